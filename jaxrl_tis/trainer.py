"""One step of reinforcement learning on a rollout batch: score it, then update the state."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_tis import control, correction
from jaxrl_tis.build import Setup
from jaxrl_tis.estimators import attribution, batch_metrics, counts
from jaxrl_tis.models import placement
from jaxrl_tis.rollouts import Sample, components, kept_metrics
from jaxrl_tis.rows import Rows, minibatches, num_sequences, packed_minibatches, update_fields
from jaxrl_tis.scoring import (
    make_collisions, make_logits, make_score, make_score_norms, make_values,
)
from jaxrl_tis.step import make_critic_step, make_train_step


class Trainer:
    """One step of reinforcement learning over the state; the programs are compiled once.

    `weights` are those of the last update's tokens, [N,T], None where the correction gives none
    before the update.
    """

    def __init__(self, setup: Setup):
        self.setup, learner = setup, setup.update_learner
        self.weights: np.ndarray | None = None
        self._score = make_score(learner)
        self._prepare = correction.make_prepare(setup.correction)
        self._begin = jax.jit(functools.partial(control.begin, setup.correction))
        self._end = jax.jit(functools.partial(control.end, setup.correction))
        self._profile = jax.jit(correction.profile_metrics, static_argnums=1)
        self._variance_proxies = jax.jit(batch_metrics.variance_proxy_metrics)
        self._train_step = make_train_step(
            learner, setup.correction, setup.optimizer, is_scored=bool(setup.why_scored)
        )
        self._unscored = correction.make_unscored(setup.correction)
        self._collisions = make_collisions(learner)
        self._logits = make_logits(learner)
        self._score_norms = make_score_norms(learner)
        if setup.has_critic:
            self._values = make_values(learner)
            self._critic_step = make_critic_step(
                learner, setup.config.critic.value_clip, setup.critic_optimizer
            )

    def score(
        self, state: dict[str, Any], samples: list[Sample], sampled_by: Mapping[int, Any]
    ) -> Rows:
        """Returns the rollout batch [N,T] with everything that is computed once of it before the
        update; without the policy's log-probs where the update itself computes them, see
        `Setup.why_scored`.

        Args:
          state: as the update starts from it: logp_prox is scored at its policy.
          samples: whole groups.
          sampled_by: version -> the policy's parameters then, for every version in the records:
            logp_old is scored at the weights that drew each token. ValueError where one is missing,
            or where an update that scores its batch would need another than its own.
        """
        rows = self.setup.rows([s.trajectory for s in samples])
        policy = state["policy"].params
        laid_out = functools.cache(lambda: self.setup.micro_batches(rows))  # if any pass takes them

        def measured(measure, params):
            micro, flat = laid_out()
            return flat(measure(params, micro))

        log_probs = lambda params: measured(lambda *a: self._score(*a)["logp"], params)
        if self.setup.why_scored:
            micro, flat = laid_out()
            scored = self._score(policy, micro)
            rows["logp_prox"], rows["entropy"] = flat(scored["logp"]), flat(scored["entropy"])
            rows["logp_old"] = at_versions(rows, policy, sampled_by, log_probs)
        elif any(sampled_by[v] is not policy for v in check_versions(rows, sampled_by)):
            raise ValueError(
                "tokens were drawn by other weights than those that the update starts from, which it "
                "cannot score: set train.fuse_score to never"
            )
        if "critic" in state:
            rows["values"] = measured(self._values, state["critic"].params)
        needs = self.setup.correction.needs
        if "reference" in state:
            reference = placement.put(state["reference"], self.setup.layout, self.setup.model)
            rows["logp_ref"] = log_probs(reference)
            if "logits_ref" in needs:
                rows["logits_ref"] = measured(self._logits, reference)
        rows |= reward_fields(samples, needs)
        by_learner = {
            "sum_pi_squared": self._collisions, "logits": self._logits,
            "grad_norms": self._score_norms,
        }
        return rows | {
            name: measured(measure, policy) for name, measure in by_learner.items()
            if name in needs
        }

    def _minibatches(self, rows: Rows, seed: tuple[int, ...]):
        """Yields the updates' (minibatch, metrics of its packing, a function that turns its results
        [M,R,T] back into rows [N,T] of all)."""
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
                yield minibatch, {}, lambda x: back(index, fetch(x).reshape(-1, shape[1]))
            return
        for minibatch, index, packing in packed_minibatches(rows, packer, train.minibatches, seed):
            unpacked = lambda x: back(index, packing.unpack(fetch(x), shape[1]))
            yield minibatch, packing.metrics(packer.shards), unpacked

    def update(self, state: dict[str, Any], rows: Rows, step: int, version: int):
        """Runs all epochs and minibatches and returns (new state, rows, metrics): the rows with all
        that `score` or the update has computed of them. `version` is that of the state's policy;
        the state is donated."""
        config, count = self.setup.config, len(rows["mask"])
        rows = rows | update_fields(count, version, step, config.seed)
        controllers = state["controllers"] if "controllers" in state else {}
        controllers, settings = self._begin(controllers, rows)
        rows |= control.fields(settings, count)
        is_profiled = step % config.metrics.percentile_every == 0
        is_scored = bool(self.setup.why_scored)
        prepared, measured = self._prepare(rows) if is_scored else (self._unscored(rows), {})
        collisions = rows["sum_pi_squared"] if "sum_pi_squared" in rows else None
        if is_profiled and collisions is None:
            micro, flat = self.setup.micro_batches(rows)
            collisions = flat(self._collisions(state["policy"].params, micro))
        taken = rows | {name: np.asarray(value) for name, value in prepared.items()}
        is_taken = functools.partial(self.setup.correction.is_in_update, is_scored=is_scored)
        updated = {name: x for name, x in taken.items() if is_taken(name)}
        collected, num_seqs = [], []
        for epoch in range(config.train.epochs):
            for minibatch, packing, flat in self._minibatches(updated, (config.seed, step, epoch)):
                num_seqs.append(num_sequences(minibatch))
                minibatch = self.setup.layout.put_batch(minibatch)
                policy, values, *scored = self._train_step(state["policy"], minibatch)
                state = state | {"policy": policy}
                if "critic" in state:
                    critic, critic_values = self._critic_step(state["critic"], minibatch)
                    state, values = state | {"critic": critic}, values | critic_values
                collected.append(values | packing)
        if not is_scored:
            logp, entropy = (flat(scored[0][name]) for name in ("logp", "entropy"))
            rows |= {"logp_old": logp, "logp_prox": logp, "entropy": entropy}
            prepared, measured = self._prepare(rows)
        if is_profiled:
            measured |= self._profile(rows, bool(rows["turn"].any()))
        measured |= {f"control/{name}": value for name, value in settings.items()}
        rows |= {name: np.asarray(value) for name, value in prepared.items()}
        self.weights = rows["weights"] if "weights" in rows else None
        collected = jax.device_get(collected)
        over = lambda name: np.sum if name.startswith(counts.PREFIX) else np.mean
        means = {name: over(name)([v[name] for v in collected]) for name in collected[0]}
        measured = jax.device_get(measured) | means | attribution.shares(means)
        if collisions is not None:
            # Only the first update has its gradient at the weights that sampled.
            measured |= self._variance_proxies(
                rows["logp_old"], rows["adv"], collisions, rows["mask"],
                w=self.weights,
                gradient_norm=collected[0]["actor/grad_norm"], num_sequences=num_seqs[0],
            )
        if controllers:
            state = state | {"controllers": self._end(controllers, measured, count)}
        return state, rows, measured


def at_versions(
    rows: Rows, policy: Any, sampled_by: Mapping[int, Any], log_probs: Callable[[Any], np.ndarray]
) -> np.ndarray:
    """Returns the log-probs of every token under the weights that drew it, [N,T].

    Args:
      rows: `version`, `mask` and `logp_prox`, which is taken where those weights are the policy's.
      policy, sampled_by: see `Trainer.score`.
      log_probs: parameters -> log-probs [N,T] of all tokens.
    """
    logp_old = rows["logp_prox"]
    for version in check_versions(rows, sampled_by):
        if sampled_by[version] is not policy:
            logp = log_probs(sampled_by[version])
            logp_old = np.where(rows["version"] == version, logp, logp_old)
    return logp_old


def check_versions(rows: Rows, sampled_by: Mapping[int, Any]) -> list[int]:
    """Returns the versions that drew tokens; ValueError for one whose weights are not there."""
    versions = np.unique(rows["version"][rows["mask"]]).tolist()
    missing = [v for v in versions if v not in sampled_by]
    if missing:
        raise ValueError(
            f"tokens were drawn by the weights of version {', '.join(map(str, missing))}; of those "
            f"that are still there ({', '.join(map(str, sampled_by))}) none is theirs, so logp_old "
            "cannot be scored"
        )
    return versions


def reward_fields(samples: list[Sample], needs: Mapping[str, str]) -> Rows:
    """Returns the fields [N] of the samples' rewards and groups, and what methods need beside
    them."""
    column = lambda name, dtype: np.array([getattr(s, name) for s in samples], dtype)
    fields = {"rewards": column("reward", np.float32), "group": column("group", np.int32)}
    if "greedy_rewards" in needs:
        fields["greedy_rewards"] = column("greedy_reward", np.float32)
    if "reward_components" in needs:
        fields["reward_components"] = np.stack(list(components(samples).values()), axis=1)
    return fields


_length_metrics = jax.jit(batch_metrics.length_metrics)


def sample_metrics(
    samples: list[Sample], rows: Rows, limits: tuple[int, int]
) -> dict[str, float]:
    """Measures rewards, lengths and the learner's entropy of a rollout batch; `limits` are the most
    tokens of a prompt and of a response."""
    prompts, lengths = (
        np.array([len(getattr(s.trajectory, field)) for s in samples])
        for field in ("prompt", "tokens")
    )
    turns = np.array([s.trajectory.turn.max(initial=0) + 1 for s in samples])
    rewards, groups = rows["rewards"], rows["group"]
    by_group = [rewards[groups == g] for g in np.unique(groups)]
    parts = components(samples)
    means = {f"reward/component/{name}": x.mean() for name, x in parts.items() if len(parts) > 1}
    kept = kept_metrics([s.trajectory for s in samples])
    return means | kept | _length_metrics(
        prompts, lengths, max_prompt_length=limits[0], max_response_length=limits[1],
        num_turns=turns,
    ) | {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/score_mean": np.mean([s.score for s in samples]),
        "reward/equal_groups_ratio": np.mean([np.ptp(r) == 0 for r in by_group]),
        "response_length/truncated_ratio": np.mean(
            [s.trajectory.stop_reason == "length" for s in samples]
        ),
        "actor/entropy": rows["entropy"][rows["mask"]].mean(),
    }
