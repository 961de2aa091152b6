"""The run: `run(config, workdir)` at the end of this file is the whole loop."""

import functools
import math
import pathlib
import signal
import sys
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from jaxrl_tis import (
    checkpoint, control, correction, evaluate, metrics, optimizer, rollouts, validate,
)
from jaxrl_tis import batch as batching
from jaxrl_tis import step as steps
from jaxrl_tis.build import Setup, abstract_state, build, initial_params, initial_state
from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.data.rewards import RewardWorker
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.estimators import attribution, batch_metrics
from jaxrl_tis.gate import report
from jaxrl_tis.models import placement, transforms
from jaxrl_tis.report import page


def warm_up(setup: Setup, params: Any, writer: metrics.MetricsWriter) -> Any:
    """Supervised steps on (prompt, answer) pairs; returns the taught parameters.

    Raises ValueError when an answer and its end token exceed rollout.max_new_tokens.
    """
    config = setup.config
    if config.warmup.steps == 0:
        return params
    prompter = rollouts.Prompter(setup.tokenizer, config.task)
    batches = Batches(
        config.task.name, {**config.task.params, **config.warmup.params},
        batch_size=config.warmup.rows, seed=config.seed,
    )
    tx = optimizer.make(
        ml_collections.ConfigDict({**config.optimizer, "lr": config.warmup.lr}), config.warmup.steps
    )
    train_step = steps.make_supervised_step(setup.learner, tx)
    layout = setup.layout
    moments = optimizer.state_shardings(
        tx, params, placement.shardings(layout, setup.model), layout.replicated()
    )
    state = steps.TrainState(params, jax.jit(tx.init, out_shardings=moments)(params))
    context = layout.mesh.shape["context"]
    length = -(-setup.row_length // context) * context
    with metrics.Progress(config.warmup.steps, "warm-up") as progress:
        for index in range(1, config.warmup.steps + 1):
            pairs = [(prompter.ids(r), _target(setup, r)) for r in next(batches)]
            rows = batching.supervised_rows(pairs, length)
            minibatch = {name: value[None] for name, value in rows.items()}
            state, values = train_step(state, layout.put_batch(minibatch))
            loss = float(values["supervised/ce_loss"])
            if not math.isfinite(loss):
                raise FloatingPointError(f"warm-up step {index}: the cross-entropy is {loss}")
            writer.write(index, "warmup", {"warmup/loss": loss})
            progress.update(1, loss=loss)
    return state.params


def _target(setup: Setup, record: dict[str, str]) -> list[int]:
    ids = [*setup.tokenizer.encode(record["answer"]), setup.tokenizer.eos_ids[0]]
    limit = setup.config.rollout.max_new_tokens
    if len(ids) > limit:
        raise ValueError(
            f"example {record['id']}: the answer and its end are {len(ids)} tokens, "
            f"config.rollout.max_new_tokens is {limit}; raise it"
        )
    return ids


class Trainer:
    """One step of reinforcement learning over the state; the programs are compiled once."""

    def __init__(self, setup: Setup):
        self.setup, learner = setup, setup.update_learner
        self._score = steps.make_score(learner)
        self._prepare = correction.make_prepare(setup.correction)
        self._begin = jax.jit(functools.partial(control.begin, setup.correction))
        self._end = jax.jit(functools.partial(control.end, setup.correction))
        self._profile = jax.jit(correction.profile_metrics, static_argnums=1)
        self._variance_proxies = jax.jit(batch_metrics.variance_proxy_metrics)
        self._train_step = steps.make_train_step(learner, setup.correction, setup.optimizer)
        self._collisions = steps.make_collisions(learner)
        self._logits = steps.make_logits(learner)
        self._score_norms = steps.make_score_norms(learner)
        if setup.has_critic:
            self._values = steps.make_values(learner)
            self._critic_step = steps.make_critic_step(
                learner, setup.config.critic.value_clip, setup.critic_optimizer
            )

    def score(self, state: dict[str, Any], samples: list[rollouts.Sample]) -> dict[str, np.ndarray]:
        """The rollout batch [N,T] with everything the learner computes at the weights that
        sampled."""
        rows = self.setup.rows([s.trajectory for s in samples])
        needs, policy = self.setup.correction.needs, state["policy"].params
        micro, flat = self.setup.micro_batches(rows)
        scored = self._score(policy, micro)
        rows["logp_learner"], rows["entropy"] = flat(scored["logp"]), flat(scored["entropy"])
        if "critic" in state:
            rows["values"] = flat(self._values(state["critic"].params, micro))
        if "reference" in state:
            reference = placement.put(state["reference"], self.setup.layout, self.setup.model)
            rows["logp_ref"] = flat(self._score(reference, micro)["logp"])
            if "logits_ref" in needs:
                rows["logits_ref"] = flat(self._logits(reference, micro))
        rows["rewards"] = np.array([s.reward for s in samples], np.float32)
        rows["group"] = np.array([s.group for s in samples], np.int32)
        if "greedy_rewards" in needs:
            rows["greedy_rewards"] = np.array([s.greedy_reward for s in samples], np.float32)
        if "reward_components" in needs:
            parts = rollouts.components(samples)
            rows["reward_components"] = np.stack(list(parts.values()), axis=1)
        by_learner = {
            "sum_pi_squared": self._collisions, "logits": self._logits,
            "grad_norms": self._score_norms,
        }
        return rows | {
            name: flat(measure(policy, micro)) for name, measure in by_learner.items()
            if name in needs
        }

    def _minibatches(self, rows: dict[str, np.ndarray], seed: tuple[int, ...]):
        """Yields the updates' (minibatch, metrics of its packing)."""
        train, packer = self.setup.config.train, self.setup.packer
        if packer is None:
            for minibatch in batching.minibatches(
                rows, train.minibatches, train.microbatch_rows, seed
            ):
                yield minibatch, {}
            return
        for minibatch, packing in batching.packed_minibatches(
            rows, packer, train.minibatches, seed
        ):
            yield minibatch, packing.metrics(packer.shards)

    def update(self, state: dict[str, Any], rows: dict[str, np.ndarray], step: int):
        """(new state, metrics) after all epochs and minibatches; the old state is donated."""
        config, count = self.setup.config, len(rows["mask"])
        rows = rows | batching.update_fields(count, step, config.seed)
        controllers = state["controllers"] if "controllers" in state else {}
        controllers, settings = self._begin(controllers, rows)
        rows |= control.fields(settings, count)
        prepared, measured = self._prepare(rows)
        measured |= {f"control/{name}": value for name, value in settings.items()}
        collisions = rows["sum_pi_squared"] if "sum_pi_squared" in rows else None
        if step % config.metrics.percentile_every == 0:
            measured |= self._profile(rows, bool(rows["turn"].any()))
            if collisions is None:
                micro, flat = self.setup.micro_batches(rows)
                collisions = flat(self._collisions(state["policy"].params, micro))
        rows = rows | {name: np.asarray(value) for name, value in prepared.items()}
        updated = dict(rows, group=np.broadcast_to(rows["group"][:, None], rows["mask"].shape))
        for name in (*self.setup.correction.not_in_update, *batching.OF_SEQUENCES):
            updated.pop(name, None)
        collected, num_sequences = [], []
        for epoch in range(config.train.epochs):
            for minibatch, packing in self._minibatches(updated, (config.seed, step, epoch)):
                num_sequences.append(batching.num_sequences(minibatch))
                minibatch = self.setup.layout.put_batch(minibatch)
                policy, values = self._train_step(state["policy"], minibatch)
                state = state | {"policy": policy}
                if "critic" in state:
                    critic, critic_values = self._critic_step(state["critic"], minibatch)
                    state, values = state | {"critic": critic}, values | critic_values
                collected.append(values | packing)
        collected = jax.device_get(collected)
        means = {name: np.mean([v[name] for v in collected]) for name in collected[0]}
        measured = jax.device_get(measured) | means | attribution.shares(means)
        if collisions is not None:
            # Of all updates only the first has its gradient at the weights that sampled.
            measured |= self._variance_proxies(
                rows["logp_learner"], rows["adv"], collisions, rows["mask"],
                w=rows["weights"] if "weights" in rows else None,
                gradient_norm=collected[0]["actor/grad_norm"], num_sequences=num_sequences[0],
            )
        if controllers:
            state = state | {"controllers": self._end(controllers, measured, count)}
        return state, measured


_length_metrics = jax.jit(batch_metrics.length_metrics)


def sample_metrics(
    samples: list[rollouts.Sample], rows: dict[str, np.ndarray], limits: tuple[int, int]
) -> dict[str, float]:
    """Rewards, lengths and the learner's entropy of a rollout batch; `limits` are the most tokens
    of a prompt and of a response."""
    prompts, lengths = (
        np.array([len(getattr(s.trajectory, field)) for s in samples])
        for field in ("prompt", "tokens")
    )
    turns = np.array([s.trajectory.turn.max(initial=0) + 1 for s in samples])
    rewards, groups = rows["rewards"], rows["group"]
    by_group = [rewards[groups == g] for g in np.unique(groups)]
    parts = rollouts.components(samples)
    means = {f"reward/component/{name}": x.mean() for name, x in parts.items() if len(parts) > 1}
    kept = rollouts.kept_metrics([s.trajectory for s in samples])
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


def check_finite(step: int, values: dict[str, float], kept: int | None) -> None:
    """FloatingPointError naming the step and the terms that are not finite."""
    bad = {name: float(v) for name, v in values.items() if not math.isfinite(v)}
    # An unclamped divergence may overflow by itself; only what moves the weights stops the run.
    terms = {n: v for n, v in bad.items() if n.endswith(("_loss", "grad_norm", "reward/mean"))}
    if terms:
        named = ", ".join(f"{n} is {v}" for n, v in terms.items())
        rest = f" and the checkpoint of step {kept} is intact" if kept is not None else ""
        raise FloatingPointError(f"step {step}: {named}; the run stops here{rest}")


class Interrupt:
    """Turns the first Ctrl-C or SIGTERM into a request to stop after the step."""

    def __enter__(self) -> "Interrupt":
        self.is_set = False
        self._old = {s: signal.signal(s, self._request) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _request(self, number, frame) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        print("\nstopping after this step; press again to stop at once", flush=True)


class Run:
    """The moving parts of a run: state, sampler, record and checkpoints."""

    def __init__(self, setup: Setup, workdir: pathlib.Path, checkpoints, rewards: RewardWorker):
        config = setup.config
        self.setup, self.rewards, self._checkpoints = setup, rewards, checkpoints
        self.timer = metrics.Timer()
        self.trainer = Trainer(setup)
        prompter = rollouts.Prompter(setup.tokenizer, config.task)
        self._evaluator = evaluate.Evaluator(config, prompter)
        self._batches = Batches(
            config.task.name, config.task.params, batch_size=config.rollout.prompts,
            seed=config.seed,
        )
        prompter.check(self._batches.source)
        self.collector = rollouts.Collector(
            config, prompter, self._batches, rewards,
            with_greedy="greedy_rewards" in setup.correction.needs,
        )
        self.last_eval: dict[str, float] = {}
        self._scheduler = None
        # From here on nothing is refused for its config.
        checkpoint.write_run_files(workdir, config.to_dict())
        if checkpoints.latest() is None:
            self._start(workdir)
        else:
            self._continue(workdir)

    def _start(self, workdir: pathlib.Path) -> None:
        self.done = 0
        self.writer = metrics.MetricsWriter(workdir)
        params = warm_up(self.setup, initial_params(self.setup), self.writer)
        self.state = initial_state(self.setup, params)
        if self.setup.config.gate.required:
            report.require(self.setup, self.state["policy"].params)
        self.evaluate(0)
        self.save(0)

    def _continue(self, workdir: pathlib.Path) -> None:
        self.state, meta = self._checkpoints.restore(abstract_state(self.setup))
        self.done = self.saved = meta["step"]
        self._batches.set_state(meta["batches"])
        self.writer = metrics.MetricsWriter(workdir, self.done)
        print(f"continuing {workdir} after step {self.done}", flush=True)

    def sampler(self, version: int) -> Scheduler:
        """The scheduler with the current weights in the sampler's format."""
        engine, noise = self.setup.engine, self._noise(version)
        params = jax.block_until_ready(engine.load(self.state["policy"].params, noise))
        if self._scheduler is None:
            self._scheduler = self.setup.scheduler(engine, params, version)
        else:
            self._scheduler.set_params(params, version)
        return self._scheduler

    def _noise(self, version: int) -> transforms.Noise | None:
        config = self.setup.config
        fields = config.engine.noise_start, config.engine.noise_end, config.engine.noise_stages
        if fields[0] == 0:
            return None
        return transforms.noise(config.seed, version, config.steps, *fields)

    def evaluate(self, step: int) -> None:
        """Held-out accuracy of the learner itself: its weights and numerics, not the sampler's."""
        start = time.monotonic()
        engine = self.setup.learner_engine
        if self._scheduler is not None:
            self._scheduler.rest()  # there is room for one cache
        params = engine.load(self.state["policy"].params)
        scheduler = self.setup.scheduler(engine, params, step)
        total = 2 * self.setup.config.eval.prompts
        with metrics.Progress(total, f"evaluation at step {step}") as progress:
            values = self._evaluator.run(scheduler, self.rewards, step, progress)
        self.writer.write(step, "eval", values | {"time/eval_s": time.monotonic() - start})
        self.last_eval = values
        print(
            f"step {step}: held-out accuracy {values['eval/greedy_accuracy']:.3f} greedy, "
            f"{values['eval/sampled_accuracy']:.3f} sampled", flush=True,
        )

    def save(self, step: int) -> None:
        """Saves in the background; the time of the blocking part counts to the next step."""
        with self.timer("checkpoint"):
            meta = {"step": step, "batches": self._batches.get_state()}
            self._checkpoints.save(step, self.state, meta)
        self.saved = step


def run(config: ml_collections.ConfigDict, workdir: str) -> dict[str, float]:
    """Trains to config.steps, or continues the run that `workdir` holds; returns the last eval.

    Raises:
      ValueError, FileNotFoundError: the config, data or model cannot be used; before any step.
      FloatingPointError: a loss or gradient is not finite; the last checkpoint is intact.
      MismatchError: with config.gate.required, learner and sampler are too far apart
        before the first step.
    """
    workdir = pathlib.Path(workdir)
    setup = build(config)
    for doubt in validate.doubts(config):
        print(f"warning: {doubt}", file=sys.stderr, flush=True)
    checkpoint.check_same_config(workdir, config.to_dict(), ignore=("steps",))
    with (
        checkpoint.Checkpoints(workdir, config.checkpoint.keep) as checkpoints,
        RewardWorker(
            config.reward.name, timeout=config.reward.timeout, on_error=config.reward.on_error
        ) as rewards,
        Interrupt() as interrupt,
    ):
        r = Run(setup, workdir, checkpoints, rewards)
        with r.writer, metrics.Progress(config.steps - r.done, "training") as progress:
            for step in range(r.done + 1, config.steps + 1):
                if interrupt.is_set:
                    print(f"stopped after step {step - 1}; the same command continues", flush=True)
                    break
                with r.timer("step"):
                    with r.timer("sync"):
                        scheduler = r.sampler(version=step - 1)
                    samples, values = r.collector.collect(scheduler, step, r.timer)
                    with r.timer("score"):
                        rows = r.trainer.score(r.state, samples)
                    with r.timer("update"):
                        r.state, measured = r.trainer.update(r.state, rows, step)

                limits = config.task.max_prompt_tokens, config.rollout.max_new_tokens
                values |= measured | sample_metrics(samples, rows, limits)
                check_finite(step, values, r.saved)
                times = r.timer.collect()
                times["time/rollout_tokens_per_s"] = rows["mask"].sum() / times["time/rollout_s"]
                r.writer.write(step, "train", values | times)
                progress.update(
                    1, reward=values["reward/mean"],
                    dp_max=values["training/rollout_probs_diff_max"],
                )

                is_last = step == config.steps or interrupt.is_set
                if step % config.eval.every == 0 or step == config.steps:
                    r.evaluate(step)
                if step % config.checkpoint.every == 0 or is_last:
                    r.save(step)
    page.write([workdir], workdir / "report.html")
    print(f"report: {workdir / 'report.html'}", flush=True)
    return r.last_eval
