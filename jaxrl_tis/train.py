"""The run: `run(config, workdir)` is the whole loop, to be read from top to bottom."""

import dataclasses
import functools
import math
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import logging

from jaxrl_tis import batch as batching
from jaxrl_tis import checkpoint, evaluate, metrics, models, optimizer, report, rollouts, sharding
from jaxrl_tis import step as steps
from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.data.rewards import RewardWorker
from jaxrl_tis.data.tokenizer import check_tokenizer, load_tokenizer
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.models import transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from jaxrl_tis.validate import validate


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything of a run that does not change while it runs."""

    config: ml_collections.ConfigDict
    tokenizer: Any
    model: ModelConfig
    layout: sharding.Layout
    learner: steps.Learner
    correction: steps.Correction
    optimizer: Any
    critic_optimizer: Any
    engine: Engine
    learner_engine: Engine

    @property
    def has_critic(self) -> bool:
        return self.correction.advantage[0] == "gae"

    @property
    def row_length(self) -> int:
        return self.config.task.max_prompt_tokens + self.config.rollout.max_new_tokens


def build(config: ml_collections.ConfigDict) -> Setup:
    """Checks the config, reads the tokenizer and the model's shape, and makes the programs."""
    validate(config)
    tokenizer = load_tokenizer(config.task.tokenizer or config.model.path)
    model = model_config(config, tokenizer)
    check_tokenizer(tokenizer, model.vocab_size)
    layout = sharding.layout(config.mesh.train, sharding.TRAIN_RULES)
    program = transformer.Program(
        config.model.dtype, config.model.remat, config.model.highest_head, layout.constrain
    )
    learner = steps.Learner(
        model, program, config.rollout.max_new_tokens, config.train.logprob_chunk
    )
    updates = config.steps * config.train.epochs * config.train.minibatches
    engine = functools.partial(
        Engine, model, slots=config.engine.slots,
        max_length=config.task.max_prompt_tokens + config.rollout.max_new_tokens,
        highest_head=config.model.highest_head, steps=config.engine.steps_per_call,
        prefill_batch=config.engine.prefill_batch, unroll=config.engine.unroll,
        layout=sharding.layout(config.mesh.serve, sharding.SERVE_RULES),
    )
    return Setup(
        config, tokenizer, model, layout, learner, steps.correction(config.correction),
        optimizer.make(config.optimizer, updates), optimizer.make(config.critic, updates),
        engine=engine(
            dtype=config.engine.dtype, cache_dtype=config.engine.cache_dtype,
            quantization=config.engine.quantization,
        ),
        learner_engine=engine(dtype=config.model.dtype, cache_dtype=config.model.dtype),
    )


def model_config(config: ml_collections.ConfigDict, tokenizer: Any) -> ModelConfig:
    """The shape of the checkpoint at model.path, or of the small model that the config spells."""
    m = config.model
    if m.path:
        return models.read_config(m.path)
    return ModelConfig(
        family="llama", vocab_size=tokenizer.vocab_size, embed_dim=m.embed_dim,
        num_layers=m.num_layers, num_heads=m.num_heads, num_kv_heads=m.num_kv_heads,
        head_dim=m.head_dim, mlp_dim=m.mlp_dim, rope=RopeConfig("default", m.rope_theta),
        max_position=m.max_position, norm_eps=1e-6, qkv_bias=False, qk_norm=False,
        tie_embeddings=m.tie_embeddings,
    )


# State: {"policy": TrainState, "critic": TrainState with GAE, "reference": params with a KL term}


def abstract_state(setup: Setup) -> dict[str, Any]:
    """The state's shapes, dtypes and shardings, without its values."""
    shardings = setup.layout.params(setup.model)
    params = transformer.abstract_params(setup.model, setup.config.model.param_dtype)
    replicated = setup.layout.replicated()
    place = lambda tree, where: jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where
    )

    def network(params, shardings, tx):
        opt = jax.eval_shape(tx.init, params)
        opt_shardings = optimizer.state_shardings(tx, params, shardings, replicated)
        return steps.TrainState(place(params, shardings), place(opt, opt_shardings))

    state = {"policy": network(params, shardings, setup.optimizer)}
    if setup.has_critic:
        value = jax.ShapeDtypeStruct((setup.model.embed_dim,), jnp.float32)
        state["critic"] = network(
            {"decoder": params, "value": value},
            {"decoder": shardings, "value": replicated},
            setup.critic_optimizer,
        )
    if setup.correction.kl is not None:
        bf16 = transformer.abstract_params(setup.model, "bfloat16")
        state["reference"] = place(bf16, shardings)
    return state


def initial_params(setup: Setup) -> Any:
    """The checkpoint at model.path, or random values, in the training layout."""
    config, shardings = setup.config.model, setup.layout.params(setup.model)
    if config.path:
        return models.load(config.path, shardings, config.param_dtype)[1]
    init = lambda key: jax.tree.map(
        lambda x: x.astype(config.param_dtype), transformer.init(setup.model, key)
    )
    return jax.jit(init, out_shardings=shardings)(jax.random.key(setup.config.seed))


def initial_state(setup: Setup, params: Any) -> dict[str, Any]:
    """State at step 0: the critic and the reference start as copies of the policy."""
    shardings = jax.tree.map(lambda s: s.sharding, abstract_state(setup))

    def make(params):
        state = {"policy": steps.TrainState(params, setup.optimizer.init(params))}
        if setup.has_critic:
            critic = {"decoder": params, "value": jnp.zeros((setup.model.embed_dim,))}
            state["critic"] = steps.TrainState(critic, setup.critic_optimizer.init(critic))
        if setup.correction.kl is not None:
            state["reference"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return state

    return jax.jit(make, out_shardings=shardings)(params)


def warm_up(setup: Setup, params: Any, writer: metrics.MetricsWriter) -> Any:
    """Supervised steps on (prompt, answer) pairs; returns the taught parameters."""
    config = setup.config
    prompter = rollouts.Prompter(setup.tokenizer, config.task)
    batches = Batches(
        config.task.name, {**config.task.params, **config.warmup.params},
        batch_size=config.warmup.rows, seed=config.seed,
    )
    tx = optimizer.make(
        ml_collections.ConfigDict({**config.optimizer, "lr": config.warmup.lr}), config.warmup.steps
    )
    train_step = steps.make_supervised_step(setup.learner, tx)
    state = steps.TrainState(params, jax.jit(tx.init)(params))
    with metrics.Progress(config.warmup.steps, "warm-up") as progress:
        for index in range(1, config.warmup.steps + 1):
            pairs = [
                (prompter.ids(r), [*setup.tokenizer.encode(r["answer"]), setup.tokenizer.eos_ids[0]])
                for r in next(batches)
            ]
            rows = batching.supervised_rows(pairs, setup.row_length)
            minibatch = {name: value[None] for name, value in rows.items()}
            state, values = train_step(state, setup.layout.put_batch(minibatch))
            loss = float(values["supervised/ce_loss"])
            if not math.isfinite(loss):
                raise FloatingPointError(f"warm-up step {index}: the cross-entropy is {loss}")
            writer.write(index, "warmup", {"warmup/loss": loss})
            progress.update(1, loss=loss)
    return state.params


class Trainer:
    """One step of reinforcement learning over the state; the programs are compiled once."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self._score = steps.make_score(setup.learner)
        self._prepare = steps.make_prepare(setup.correction)
        self._train_step = steps.make_train_step(setup.learner, setup.correction, setup.optimizer)
        if setup.has_critic:
            self._values = steps.make_values(setup.learner)
            self._critic_step = steps.make_critic_step(
                setup.learner, setup.config.critic.value_clip, setup.critic_optimizer
            )

    def score(self, state: dict[str, Any], samples: list[rollouts.Sample]) -> dict[str, np.ndarray]:
        """The rollout batch [N,T] with everything the learner computes at the weights that
        sampled."""
        rows = batching.rows([s.trajectory for s in samples], self.setup.row_length)
        micro = self._micro_batches(rows)
        flat = lambda x: np.asarray(x).reshape(rows["tokens"].shape)
        scored = self._score(state["policy"].params, micro)
        rows["logp_learner"], rows["entropy"] = flat(scored["logp"]), flat(scored["entropy"])
        if "critic" in state:
            rows["values"] = flat(self._values(state["critic"].params, micro))
        if "reference" in state:
            rows["logp_ref"] = flat(self._score(state["reference"], micro)["logp"])
        rows["rewards"] = np.array([s.reward for s in samples], np.float32)
        rows["group"] = np.array([s.group for s in samples], np.int32)
        return rows

    def _micro_batches(self, rows: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        size = self.setup.config.train.microbatch_rows
        return self.setup.layout.put_batch(
            {name: x.reshape(-1, size, *x.shape[1:]) for name, x in rows.items()}
        )

    def update(self, state: dict[str, Any], rows: dict[str, np.ndarray], step: int):
        """(new state, metrics) after all epochs and minibatches; the old state is donated."""
        config = self.setup.config
        prepared, measured = self._prepare(rows)
        rows = rows | {name: np.asarray(value) for name, value in prepared.items()}
        collected = []
        for epoch in range(config.train.epochs):
            seed = (config.seed, step, epoch)
            size = config.train.microbatch_rows
            for minibatch in batching.minibatches(rows, config.train.minibatches, size, seed):
                minibatch = self.setup.layout.put_batch(minibatch)
                policy, values = self._train_step(state["policy"], minibatch)
                state = state | {"policy": policy}
                if "critic" in state:
                    critic, critic_values = self._critic_step(state["critic"], minibatch)
                    state, values = state | {"critic": critic}, values | critic_values
                collected.append(values)
        collected = jax.device_get(collected)
        means = {name: np.mean([v[name] for v in collected]) for name in collected[0]}
        return state, jax.device_get(measured) | means


def sample_metrics(samples: list[rollouts.Sample], rows: dict[str, np.ndarray]) -> dict[str, float]:
    """Rewards, lengths and the learner's entropy of a rollout batch."""
    lengths = np.array([len(s.trajectory.tokens) for s in samples])
    rewards, groups = rows["rewards"], rows["group"]
    by_group = [rewards[groups == g] for g in np.unique(groups)]
    return {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/score_mean": np.mean([s.score for s in samples]),
        "reward/equal_groups_ratio": np.mean([np.ptp(r) == 0 for r in by_group]),
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
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
        raise FloatingPointError(
            f"step {step}: {', '.join(f'{n} is {v}' for n, v in terms.items())}; the run stops here "
            + (f"and the checkpoint of step {kept} is intact" if kept is not None else "")
        )


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


def run(config: ml_collections.ConfigDict, workdir: str) -> dict[str, float]:
    """Trains to config.steps, or continues the run that `workdir` holds; returns the last eval.

    Raises:
      ValueError, FileNotFoundError: the config, data or model cannot be used; before any step.
      FloatingPointError: a loss or gradient is not finite; the last checkpoint is intact.
    """
    workdir = pathlib.Path(workdir)
    setup = build(config)
    checkpoint.check_same_config(workdir, config.to_dict(), ignore=("steps",))
    batches = Batches(
        config.task.name, config.task.params, batch_size=config.rollout.prompts, seed=config.seed
    )
    prompter = rollouts.Prompter(setup.tokenizer, config.task)
    evaluator = evaluate.Evaluator(config, prompter)
    trainer = Trainer(setup)
    with (
        checkpoint.Checkpoints(workdir, config.checkpoint.keep) as checkpoints,
        RewardWorker(
            config.reward.name, timeout=config.reward.timeout, on_error=config.reward.on_error
        ) as rewards,
        Interrupt() as interrupt,
    ):
        done = checkpoints.latest()
        checkpoint.write_run_files(workdir, config.to_dict())
        writer = metrics.MetricsWriter(workdir, done)
        evaluation = lambda step: _evaluate(setup, evaluator, rewards, state, writer, step)
        if done is None:
            state = initial_state(setup, warm_up(setup, initial_params(setup), writer))
            done = 0
            last_eval = evaluation(0)
            _save(checkpoints, 0, state, batches)
        else:
            state, meta = checkpoints.restore(abstract_state(setup))
            done = meta["step"]
            batches.set_state(meta["batches"])
            print(f"continuing {workdir} after step {done}", flush=True)
            last_eval = {}

        collector = rollouts.Collector(config, prompter, batches, rewards)
        scheduler = None
        timer = metrics.Timer()
        progress = metrics.Progress(config.steps - done, "training")
        for step in range(done + 1, config.steps + 1):
            with timer("step"):
                with timer("sync"):
                    params = jax.block_until_ready(setup.engine.load(state["policy"].params))
                    scheduler = scheduler or Scheduler(setup.engine, params, step - 1)
                    scheduler.set_params(params, step - 1)
                samples, values = collector.collect(scheduler, step, timer)
                with timer("score"):
                    rows = trainer.score(state, samples)
                with timer("update"):
                    state, measured = trainer.update(state, rows, step)
            values |= measured | sample_metrics(samples, rows)
            values |= {f"reward/{name}": count for name, count in rewards.counts.items()}
            check_finite(step, values, checkpoints.latest())
            times = timer.collect()
            tokens = sum(len(s.trajectory.tokens) for s in samples)
            times["time/rollout_tokens_per_s"] = tokens / times["time/rollout_s"]
            writer.write(step, "train", values | times)
            progress.update(1, reward=values["reward/mean"],
                            dp_max=values["training/rollout_probs_diff_max"])
            is_last = step == config.steps or interrupt.is_set
            if step % config.eval.every == 0 or step == config.steps:
                last_eval = evaluation(step)
            if step % config.checkpoint.every == 0 or is_last:
                _save(checkpoints, step, state, batches)
            if interrupt.is_set:
                break
        progress.close()
        writer.close()
    report.write([workdir], workdir / "report.html")
    print(f"report: {workdir / 'report.html'}", flush=True)
    return last_eval


def _save(checkpoints: checkpoint.Checkpoints, step: int, state: Any, batches: Batches) -> None:
    checkpoints.save(step, state, {"step": step, "batches": batches.get_state()})


def _evaluate(setup, evaluator, rewards, state, writer, step: int) -> dict[str, float]:
    """Held-out accuracy of the learner itself: its weights and numerics, not the sampler's."""
    params = setup.learner_engine.load(state["policy"].params)
    with metrics.Progress(2 * setup.config.eval.prompts, f"evaluation at step {step}") as progress:
        values = evaluator.run(Scheduler(setup.learner_engine, params, step), rewards, step, progress)
    writer.write(step, "eval", values)
    print(
        f"step {step}: held-out accuracy {values['eval/greedy_accuracy']:.3f} greedy, "
        f"{values['eval/sampled_accuracy']:.3f} sampled", flush=True,
    )
    return values
