"""One step of reinforcement learning on a rollout batch: score it, then update the state."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_collections
import numpy as np

from jaxrl_tis.diagnostics import attribution, batch_metrics
from jaxrl_tis.diagnostics.correction_metrics import sampler_logp
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.estimators import counts
from jaxrl_tis.learner import control, correction, forks, snapshots
from jaxrl_tis.learner.batch_layout import (
    Rows, environment_tokens, minibatches, num_sequences, packed_minibatches, sequence_lengths,
    update_fields, without_replay,
)
from jaxrl_tis.learner.probe import Diagnostics
from jaxrl_tis.learner.scoring import (
    make_collisions, make_logits, make_score, make_score_norms, make_values, targets,
)
from jaxrl_tis.learner.setup import LearnerSetup, max_length
from jaxrl_tis.learner.state import abstract_params, base, joined, policy as policy_of
from jaxrl_tis.learner.step import (
    make_arriving_step, make_critic_step, make_packed_weigh, make_train_step,
)
from jaxrl_tis.models import lora, overflow, placement
from jaxrl_tis.rollouts.episodes import episode_metrics
from jaxrl_tis.rollouts.groups import (
    Sample, components, draft_metrics, kept_metrics, reroute_metrics,
)

WITHOUT_ROUTES = "moe/samples_without_routes"
# Whose log-probs these fields are.
LOGPS = {
    "logp_prox": "the learner", "logp_old": "the learner", "logp_ref": "the reference",
    "logp_behav": "the sampler",
}


class Trainer:
    """One step of reinforcement learning: `score` a rollout batch, then `update` the state. The
    programs are compiled once.

    Attributes:
      weights: importance weights of the last batch's tokens, [N,T]; None if the correction computes
        none before the update.
      score_metrics: metrics of the last batch's score.
      diagnostics: measures the steps that have diagnostics.
      prepare, credit, weigh, arriving_step: programs, see `correction.make_prepare`, `credited` and
        `weighed`, `step.make_arriving_step`.
    """

    def __init__(self, setup: LearnerSetup):
        self.setup, learner = setup, setup.update_learner
        self.weights: np.ndarray | None = None
        self.score_metrics: dict[str, float] = {}
        self._score = make_score(learner)
        self._score_routes = None
        if setup.correction.routing == "r2":
            self._score_routes = make_score(learner, with_routes=True)
        self.prepare = correction.make_prepare(setup.correction)
        self._begin = jax.jit(functools.partial(control.begin, setup.correction))
        self._end = jax.jit(functools.partial(control.end, setup.correction))
        self._train_step = make_train_step(
            learner, setup.correction, setup.optimizer, is_scored=bool(setup.recompute_reason)
        )
        self.credit = jax.jit(functools.partial(correction.credited, setup.correction))
        if setup.packer is None:
            self.weigh: Callable = jax.jit(functools.partial(correction.weighed, setup.correction))
        else:
            self.weigh = make_packed_weigh(learner, setup.correction)
        self.arriving_step = make_arriving_step(learner, setup.correction, setup.optimizer)
        self._collisions = make_collisions(learner)
        self.diagnostics = Diagnostics(setup, self._collisions)
        self._logits = make_logits(learner)
        self._score_norms = make_score_norms(learner)
        if setup.has_critic:
            self._values = make_values(learner)
            self._critic_step = make_critic_step(
                learner, setup.config.critic.value_clip, setup.critic_optimizer
            )

    def score(
        self, state: dict[str, Any], samples: list[Sample], sampled_by: Mapping[int, Any],
        known: list[np.ndarray] | None = None,
    ) -> Rows:
        """Returns the rollout batch [N,T] with everything that is computed once of it before the
        update; without the policy's log-probs where the update itself computes them, see
        `LearnerSetup.recompute_reason`. Its mask is that of the answers of `are_trained_on`. The
        rows of forks follow those of the samples, see `forks.fork_rows`.

        Args:
          state: as the update starts from it: logp_prox is scored at its policy, or at the average
            of its policies where it has one.
          samples: whole groups.
          sampled_by: version -> the policy's parameters then, for every version in the records:
            logp_old is scored at the weights that drew each token. ValueError where one is missing,
            or where an update that scores its batch would need another than its own. Not asked for
            anything where logp_old is logp_prox, see `LearnerSetup.approximates_old_logp`.
          known: log-probs of each sample's tokens [n] at the weights that drew them, NaN where they
            are still to be scored.
        """
        needs, policy = self.setup.correction.needs, policy_of(self.setup, state)
        rewarded = reward_fields(samples, needs)
        trained = are_trained_on(samples, rewarded, self.setup.config.train.mask_truncated)
        extra = forks.fork_rows(samples, trained, self.setup.fork_rows)
        trajectories = [s.trajectory for s in samples] + extra.trajectories
        rows = self.setup.rows(trajectories)
        run = self.setup.passes(rows)
        if known is not None:
            known = known + [np.full(len(t.tokens), np.nan) for t in extra.trajectories]
        laid_out = _laid_out(trajectories, known, rows["mask"].shape)
        rows |= self._policy_fields(state, rows, run, sampled_by, laid_out)
        if self.setup.config.rollout.harness:
            self.score_metrics |= forks.metrics(extra)
        if "critic" in state:
            critic = joined(self.setup, state, state["critic"].params)
            # Of all answers: GAE whitens over those that are left out, too.
            micro, flat = self.setup.micro_batches(rows | {"mask": rows["sampled"]})
            rows["values"] = flat(self._values(critic, micro))
        if self.setup.correction.kl is not None:
            reference = self._reference(state)
            own = self.setup.passes(without_replay(rows))
            rows["logp_ref"] = own(lambda *a: self._score(*a)["logp"], reference)
            if "logits_ref" in needs:
                rows["logits_ref"] = own(self._logits, reference)
        rows |= forks.of_all_rows(rewarded, extra.owners) if extra.trajectories else rewarded
        if "turn_rewards" in needs:
            rows["turn_rewards"] = turn_rewards(samples, rows["mask"].shape[1])
        by_learner = {
            "sum_pi_squared": self._collisions, "logits": self._logits,
            "grad_norms": self._score_norms,
        }
        rows |= {name: run(f, policy) for name, f in by_learner.items() if name in needs}
        rows |= {"mask": rows["mask"] & trained[extra.owners][:, None]}
        return rows | ({"environment": environment_tokens(rows)} if "environment" in needs else {})

    def _reference(self, state: dict[str, Any]) -> Any:
        layout, model = self.setup.layout, self.setup.model
        return base(state) or placement.put(state["reference"], layout, model)

    def non_finite(self, state: dict[str, Any], rows: Rows) -> str:
        """Returns which log-probs of a scored batch are not finite, and where the values of the
        first such sequence stop being finite under the policy or the reference; "" without any."""
        for name, whose in LOGPS.items():
            bad = rows["mask"] & ~np.isfinite(rows[name]) if name in rows else np.zeros(1, bool)
            if not bad.any():
                continue
            params = policy_of(self.setup, state)
            if name == "logp_ref":
                params = self._reference(state)
            tokens = first_sequence(rows, bad)
            why = overflow.cause(params, self.setup.model, self.setup.learner.program, tokens)
            count = rows["mask"].sum()
            return f"{bad.sum()} of {count} log-probs of {whose} ({name}) are not finite: {why}"
        return ""

    def _policy_fields(
        self, state: dict[str, Any], rows: Rows, run: Callable, sampled_by: Mapping[int, Any],
        known: np.ndarray | None,
    ) -> Rows:
        """Returns logp_prox, entropy and logp_old [N,T], {} where the update computes them; `run`
        is of `LearnerSetup.passes`, the other arguments of `score`."""
        policy, num_recomputed, fields = policy_of(self.setup, state), 0, {}

        def log_probs(params, is_wanted):
            nonlocal num_recomputed
            num_recomputed += is_wanted.sum()
            micro, flat = self.setup.micro_batches(rows, is_wanted)
            return flat(self._score(params, micro)["logp"])

        if self.setup.recompute_reason:
            centre = policy
            if "ewma" in state:
                mean = state["ewma"].params(like=state["policy"].params)
                centre = joined(self.setup, state, mean)
            scores = run(self._score_routes or self._score, centre)
            fields = {"logp_prox": scores["logp"], "entropy": scores["entropy"]}
            if "routes" in scores:
                # A micro-batch without a token in the mask was skipped, and has no routes.
                is_scored = np.any(rows["mask"], axis=1)
                fields["routes"] = scores["routes"]
                fields["routed"] = (rows["segment_ids"] > 0) & is_scored[:, None]
            fields["logp_old"] = (
                fields["logp_prox"] if self.setup.approximates_old_logp
                else at_versions(rows | fields, policy, sampled_by, log_probs, known)
            )
        elif not self.setup.approximates_old_logp and not all(
            lora.is_same(sampled_by[v], policy) for v in check_versions(rows, sampled_by)
        ):
            raise ValueError(
                "tokens were sampled with other weights than the update starts from, and the "
                "update cannot score them; set train.fuse_old_logp to never"
            )
        self.score_metrics = {
            "old_logp/versions": len(np.unique(rows["version"][rows["mask"]])),
            "old_logp/recomputed_sequences": num_recomputed,
        }
        if self.setup.correction.replays_routes:
            missing = rows["sampled"].any(axis=1) & ~rows["mask"].any(axis=1)
            self.score_metrics[WITHOUT_ROUTES] = missing.sum()
        return fields

    def log_probs(self, params: Any, trajectories: list[Trajectory]) -> list[np.ndarray]:
        """Returns the log-probs of the tokens of whole or unfinished sequences at these parameters,
        [n] each, by the program that scores a batch."""
        rollout, logps = self.setup.config.rollout, []
        count = rollout.prompts * rollout.group_size
        for start in range(0, len(trajectories), count):
            part = trajectories[start : start + count]
            filled = part + part[:1] * (count - len(part))
            rows = self.setup.rows(filled)
            micro, flat = self.setup.micro_batches(rows, np.arange(count) < len(part))
            logp = flat(self._score(params, micro)["logp"])
            logps += [row[_response(t)] for row, t in zip(logp, part, strict=False)]
        return logps

    def weight_snapshots(self) -> snapshots.WeightSnapshots:
        """Returns the store of published weights that rollout.schedule and rollout.old_logp_source
        require. ValueError if the snapshots exceed rollout.snapshot_gib."""
        setup, schedule = self.setup, self.setup.schedule
        if not setup.staleness or setup.approximates_old_logp:
            return snapshots.NewestSnapshots()
        rollout = setup.config.rollout
        params = abstract_params(setup)
        if setup.adapter is not None:
            params = placement.abstract_factors(setup.adapter)
        size, most = snapshots.num_bytes(params), rollout.snapshot_gib * 2**30
        if rollout.old_logp_source == "ring":
            count = rollout.snapshots or snapshots.num_snapshots(setup.staleness)
            return snapshots.RingSnapshots(count, size, most)
        groups = rollout.queue or math.ceil((schedule.ahead + 1) * rollout.prompts)
        of_group = rollout.group_size + schedule.redundant + 1  # with ReMax's greedy answer
        return snapshots.ReplicaSnapshots(size, most, self.log_probs, groups * of_group)

    def update_fields(self, rows: Rows, prepared: Mapping[str, Any]) -> Rows:
        """Returns the fields for the updates: of a batch and of the results of `prepare`. There a
        fork of a session is in its session's group."""
        merged = rows | {name: np.asarray(value) for name, value in prepared.items()}
        if "owner" in merged:
            merged["group"] = merged["group"][merged["owner"]]
        is_scored, is_taken = bool(self.setup.recompute_reason), self.setup.correction.is_in_update
        return {name: x for name, x in merged.items() if is_taken(name, is_scored)}

    def minibatches(self, rows: Rows, seed: tuple[int, ...]):
        """Yields (minibatch, metrics of its packing, a function from its results [M,R,T] to rows
        [N,T] of the whole batch) per update."""
        train, packer = self.setup.config.train, self.setup.packer
        shape, fetch = rows["mask"].shape, self.setup.layout.fetch

        def back(index, x):
            out = np.zeros(shape, x.dtype)
            out[index] = x
            return out

        if packer is None:
            for minibatch, index in minibatches(
                rows, train.minibatches, train.microbatch_rows, seed
            ):
                yield minibatch, {}, lambda x, i=index: back(i, fetch(x).reshape(-1, shape[1]))
            return
        for minibatch, index, packing in packed_minibatches(rows, packer, train.minibatches, seed):
            unpacked = lambda x, i=index, p=packing: back(i, p.unpack(fetch(x), shape[1]))
            yield minibatch, packing.metrics(packer.shards), unpacked

    def with_prepared(self, rows: Rows, prepared: Mapping[str, Any]) -> Rows:
        """Returns the rows with the results of `prepare`, and stores their weights in `weights`. The
        field "scored" is their mask before any token was rejected."""
        rows = rows | {"scored": rows["mask"]} | {name: np.asarray(value) for name, value in prepared.items()}
        self.weights = rows.get("weights")
        return rows

    def update(self, state: dict[str, Any], rows: Rows, step: int, version: int):
        """Runs all epochs and minibatches and returns (new state, rows, metrics). The rows include the
        fields computed by `score` or the update. `version` is the version of the state's policy; the
        state is donated. A minibatch without a trainable token is skipped."""
        config, count = self.setup.config, len(rows["mask"])
        rows = rows | update_fields(count, version, step, config.seed)
        controllers = state.get("controllers", {})
        controllers, settings = self._begin(controllers, rows)
        rows |= control.fields(settings, count)
        is_scored = bool(self.setup.recompute_reason)
        prepared, measured = self._prepared(rows) if is_scored else self.credit(rows)
        probe = self.diagnostics.probe(state, rows, step)
        updated, collected, num_seqs = self.update_fields(rows, prepared), [], []
        fused = {n: np.zeros(rows["mask"].shape, t) for n, t in correction.OF_UPDATE.items()}
        for epoch in range(config.train.epochs):
            for minibatch, packing, flat in self.minibatches(updated, (config.seed, step, epoch)):
                if not targets(minibatch).any():
                    continue
                num_seqs.append(num_sequences(minibatch))
                minibatch = self.setup.layout.put_batch(minibatch)
                policy, values, *outputs = self._train_step(
                    state["policy"], minibatch, base(state)
                )
                state = state | {"policy": policy}
                if "ewma" in state:
                    state["ewma"] = snapshots.averaged(state["ewma"], policy.params)
                if "critic" in state:
                    critic, critic_values = self._critic_step(
                        state["critic"], minibatch, base(state)
                    )
                    state, values = state | {"critic": critic}, values | critic_values
                if outputs:
                    fused = jax.tree.map(flat, outputs[0])
                collected.append(values | packing)
        if not is_scored:
            rows, prepared, of_weights = self.after_update(rows, {**prepared, **fused})
            measured |= of_weights
        measured |= self.diagnostics.metrics(state, rows, probe)
        measured |= self.score_metrics | {f"control/{name}": x for name, x in settings.items()}
        rows = self.with_prepared(rows, prepared)
        measured, collected = jax.device_get((measured, collected))
        if not collected:
            return state, rows, measured
        means = {name: _of_step(name, [v[name] for v in collected]) for name in collected[0]}
        measured |= means | attribution.shares(means)
        is_skipped = collected[0].get("actor/is_skipped", 0.0) > 0
        if not is_skipped:
            # Only the first update has its gradient at the weights that sampled.
            measured |= self.diagnostics.variances(
                rows, probe, collected[0]["actor/grad_norm"], num_seqs[0]
            )
        if controllers:
            num_rows = int(rows["segment_ids"].any(axis=1).sum())
            state = state | {"controllers": self._end(controllers, measured, num_rows)}
        return state, rows, measured

    def after_update(self, rows: Rows, made: dict[str, Any]):
        """Returns (rows, results of `prepare`, metrics but for those of `credit`) of a batch that an
        update has scored; `made` has the results of `credit` and the fields of `correction.OF_UPDATE`."""
        logp = made["logp_old"]
        rows = rows | {"logp_old": logp, "logp_prox": logp, "entropy": made["entropy"]}
        credited = {name: made[name] for name in ("adv", "returns") if name in made}
        of_update = {name: made[name] for name in ("weights", "accepted")}
        fields, metrics = self._weighed(rows, credited | of_update)
        return rows, credited | fields, metrics

    def _prepared(self, rows: Rows) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the results of `prepare` for a scored batch, whose weights are those of packed rows if the
        config packs them."""
        if self.setup.packer is None:
            return self.prepare(rows)
        credited, of_rewards = self.credit(rows)
        fields, of_weights = self._weighed(rows, credited)
        return credited | fields, of_rewards | of_weights

    def _weighed(self, rows: Rows, made: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the results of `weigh` for rows [N,T] with these fields, packed if the config packs
        rows: then all of the batch once, cut over the mesh."""
        rows, packer, layout = rows | made, self.setup.packer, self.setup.layout
        if packer is None:
            return self.weigh(rows)
        taken = {n: np.asarray(x) for n, x in rows.items() if self.setup.correction.is_weighed(n)}
        packing = packer.plan(sequence_lengths(rows))
        packed = {n: x.reshape(1, -1, *x.shape[2:]) for n, x in packing.pack(taken).items()}
        fields, metrics = self.weigh(layout.put_batch(packed))
        length = rows["mask"].shape[1]
        return {n: packing.unpack(layout.fetch(x), length) for n, x in fields.items()}, metrics


def _of_step(name: str, values: list) -> np.floating:
    """Combines a metric's values over the updates of a step: the sum of a count, the last learning
    rate, the mean of any other."""
    if name.endswith("/lr"):
        return values[-1]
    return np.sum(values) if counts.is_count(name) else np.mean(values)


def at_versions(
    rows: Rows, policy: Any, sampled_by: Mapping[int, Any],
    log_probs: Callable[[Any, np.ndarray], np.ndarray], known: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the log-probs [N,T] of every token under the weights that sampled it.

    Args:
      rows: `version`, `mask` and `logp_prox`, the result where these weights are the policy's.
      policy, sampled_by: see `Trainer.score`.
      log_probs: (parameters, is_wanted [N]) -> log-probs [N,T] of the wanted rows' tokens.
      known: log-probs to use as they are, NaN where there is none.
    """
    logp_old = rows["logp_prox"]
    if known is not None:
        logp_old = np.where(np.isnan(known), logp_old, known)
    for version in check_versions(rows, sampled_by, known):
        params = sampled_by[version]
        if not lora.is_same(params, policy):
            is_its = _unknown(rows, known) & (rows["version"] == version)
            logp_old = np.where(is_its, log_probs(params, is_its.any(axis=1)), logp_old)
    return logp_old


def check_versions(
    rows: Rows, sampled_by: Mapping[int, Any], known: np.ndarray | None = None
) -> list[int]:
    """Returns the versions that sampled tokens without known log-probs. ValueError if the weights of
    one are missing."""
    versions = np.unique(rows["version"][_unknown(rows, known)]).tolist()
    missing = [v for v in versions if v not in sampled_by]
    if missing:
        raise ValueError(
            f"tokens were sampled with the weights of version {', '.join(map(str, missing))}, and "
            f"only those of {', '.join(map(str, sampled_by))} are kept, so logp_old cannot be "
            "computed; raise rollout.snapshots"
        )
    return versions


def _unknown(rows: Rows, known: np.ndarray | None) -> np.ndarray:
    """Returns a mask [N,T] of the tokens without a known logp_old."""
    return rows["mask"] if known is None else rows["mask"] & np.isnan(known)


def _response(trajectory: Trajectory) -> slice:
    """Returns the place of the sampled tokens in a row that holds this sequence alone."""
    start = len(trajectory.prompt)
    return slice(start, start + len(trajectory.tokens))


def _laid_out(
    trajectories: list[Trajectory], values: list[np.ndarray] | None, shape: tuple[int, int]
) -> np.ndarray | None:
    """Lays values of each sequence's sampled tokens into rows [N,T], NaN elsewhere."""
    if values is None:
        return None
    rows = np.full(shape, np.nan, np.float32)
    for row, t, value in zip(rows, trajectories, values, strict=True):
        row[_response(t)] = value
    return rows


def are_trained_on(samples: list[Sample], rows: Rows, without_truncated: bool) -> np.ndarray:
    """Returns whether each sample is in the loss, [N]. Its reward must be known, and so must the
    greedy answer's if the advantage uses it. `without_truncated` excludes samples that ended at a
    limit of tokens, and episodes that ended at a limit of tokens or turns."""
    are_known = ~np.isnan(rows["rewards"])
    if "greedy_rewards" in rows:
        are_known &= ~np.isnan(rows["greedy_rewards"])
    return are_known & ~(without_truncated & _are_truncated(samples))


def _are_truncated(samples: list[Sample]) -> np.ndarray:
    return np.array([s.trajectory.stop_reason == "length" for s in samples])


def reward_fields(samples: list[Sample], needs: Mapping[str, str]) -> Rows:
    """Returns the fields [N] of the samples' rewards and groups, and the further reward fields that
    methods need."""
    column = lambda name, dtype: np.array([getattr(s, name) for s in samples], dtype)
    fields = {"rewards": column("reward", np.float32), "group": column("group", np.int32)}
    if "greedy_rewards" in needs:
        fields["greedy_rewards"] = column("greedy_reward", np.float32)
    if "reward_components" in needs:
        parts = components(samples)
        columns = [parts[name] for name in sorted(parts)] or [np.full(len(samples), np.nan, np.float32)]
        fields["reward_components"] = np.stack(columns, axis=1)
    return fields


def turn_rewards(samples: list[Sample], length: int) -> np.ndarray:
    """Returns the reward of each turn on its last sampled token [N,length], 0 elsewhere; NaN where
    the environment gave none.

    What the run adds to the environment's rewards, as the overlong penalty, goes to the last turn.
    So does the whole reward where the environment gave no turn a reward, or failed.
    """
    rows = np.zeros((len(samples), length), np.float32)
    for row, sample in zip(rows, samples, strict=True):
        trajectory = sample.trajectory
        sampled = np.flatnonzero(trajectory.mask)
        if not len(sampled):
            continue
        turn = trajectory.turn[sampled]
        is_end = np.append(turn[1:] != turn[:-1], True)
        ends = len(trajectory.prompt) + sampled[is_end]
        given = () if sample.is_failed else trajectory.turn_rewards
        of_turns = np.full(trajectory.num_turns, np.nan, np.float32)
        of_turns[: len(given)] = given
        row[ends] = of_turns[turn[is_end]]
        if np.isnan(given).all():
            row[ends[-1]] = sample.reward
        elif sample.reward != sample.score:
            row[ends[-1]] = np.nan_to_num(row[ends[-1]]) + sample.reward - sample.score
    return rows


_length_metrics = jax.jit(batch_metrics.length_metrics)


def sample_metrics(
    samples: list[Sample], rows: Rows, config: ml_collections.ConfigDict
) -> dict[str, float]:
    """Measures rewards, lengths and the learner's entropy of a rollout batch. Means of rewards cover
    the known rewards, and are absent if there are none. Forks count in the entropy alone."""
    prompts = np.array([len(s.trajectory.prompt) for s in samples])
    lengths = np.array([s.trajectory.mask.sum() for s in samples])
    turns = np.array([s.trajectory.turn.max(initial=0) + 1 for s in samples])
    rewards, groups = (rows[name][: len(samples)] for name in ("rewards", "group"))
    by_group = [_known(rewards[groups == g]) for g in np.unique(groups)]
    parts = components(samples)
    named = {"mean": rewards, "score_mean": np.array([s.score for s in samples])}
    named |= {f"component/{name}": x for name, x in parts.items() if len(parts) > 1}
    means = {f"reward/{name}": known.mean() for name, x in named.items() if len(known := _known(x))}
    if len(known := _known(rewards)):
        means["reward/std"] = known.std()
    if (scored := scored_tokens(rows)).any():
        means["actor/entropy"] = rows["entropy"][scored].mean()
    trajectories = [s.trajectory for s in samples]
    recorded = kept_metrics(trajectories) | reroute_metrics(trajectories)
    recorded |= episode_metrics(trajectories) | draft_metrics(trajectories)
    return means | recorded | _length_metrics(
        prompts, lengths, max_prompt_length=config.task.max_prompt_tokens,
        max_response_length=config.rollout.max_new_tokens, num_turns=turns,
        longest_turn=np.array([_longest_turn(t, config) for t in trajectories]),
    ) | {
        "reward/zero_std_group_ratio": np.mean([len(np.unique(r)) < 2 for r in by_group]),
        "response_length/truncated_ratio": _are_truncated(samples).mean(),
        "actor/left_out_ratio": np.mean(
            ~are_trained_on(samples, rows | {"rewards": rewards}, config.train.mask_truncated)
        ),
    }


def _longest_turn(trajectory: Trajectory, config: ml_collections.ConfigDict) -> int:
    """Returns the sampled tokens of the longest turn; rollout.max_new_tokens if the sequence is
    full, because then the last turn could have no more."""
    is_full = len(trajectory.prompt) + len(trajectory.tokens) >= max_length(config)
    counts = np.bincount(trajectory.turn[trajectory.mask], minlength=1)
    return config.rollout.max_new_tokens if is_full else int(counts.max())


def first_sequence(rows: Rows, is_bad: np.ndarray) -> np.ndarray:
    """Returns the tokens [n] of the first row with a bad token: all, since attention in whole rows
    multiplies later values by 0, and 0 times infinity is NaN."""
    row = int(is_bad.any(axis=1).argmax())
    return rows["tokens"][row][rows["segment_ids"][row] > 0]


def scored_tokens(rows: Rows) -> np.ndarray:
    """Returns the mask [N,T] of the tokens that were trained on or rejected by a mask."""
    return rows["scored"] if "scored" in rows else rows["mask"]


def both_logps(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-probs [n] in nats of sampler and learner, at the same weights, of these tokens."""
    scored = scored_tokens(rows)
    return sampler_logp(rows)[scored], rows["logp_old"][scored]


def _known(rewards: np.ndarray) -> np.ndarray:
    return rewards[~np.isnan(rewards)]
