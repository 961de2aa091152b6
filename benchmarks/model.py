"""A GRPO step of a random model, by default with 4 layers and width 256, for the benchmarks."""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs import default
from jaxrl_tis import build, sharding
from jaxrl_tis.aot import work
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.estimators.centering import head_size
from jaxrl_tis.learner import correction
from jaxrl_tis.learner.batch_layout import Rows
from jaxrl_tis.learner.optimizer import make_optimizer
from jaxrl_tis.learner.scoring import Learner
from jaxrl_tis.learner.setup import LearnerSetup
from jaxrl_tis.learner.state import initial_params, initial_state
from jaxrl_tis.learner.trainer import Trainer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from jaxrl_tis.models.transformer import Program
from jaxrl_tis.rollouts import schedules
from jaxrl_tis.rollouts.groups import Sample
from jaxrl_tis.rollouts.source import generate


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a step: `prompts` x `group` samples of prompt_tokens + new_tokens tokens.

    Attributes:
      microbatch_rows: rows of a forward and backward pass.
      dtype: of activations and products; `param_dtype` of the learner is float32.
      remat: what the backward pass recomputes, as in `Program`.
    """

    model: ModelConfig
    prompts: int = 4
    group: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 64
    microbatch_rows: int = 8
    dtype: str = "float32"
    remat: str = "none"

    @property
    def rows(self) -> int:
        return self.prompts * self.group


SMALL = Sizes(ModelConfig(
    family="llama", vocab_size=49152, embed_dim=256, num_layers=4, num_heads=8, num_kv_heads=4,
    head_dim=32, mlp_dim=768, rope=RopeConfig("default", 1e4), max_position=2048, norm_eps=1e-5,
    qkv_bias=False, qk_norm=False, tie_embeddings=True,
))
TINY = Sizes(  # for --smoke
    dataclasses.replace(
        SMALL.model, vocab_size=1024, embed_dim=32, num_layers=1, num_heads=2, num_kv_heads=1,
        head_dim=16, mlp_dim=48,
    ),
    prompts=2, group=2, prompt_tokens=16, new_tokens=16, microbatch_rows=2,
)


def engine_config(dtype: str, **options) -> EngineConfig:
    """Returns the config of an engine that computes and caches in a dtype. On a TPU its layers are
    scanned, with pages that the decode kernel supports; elsewhere they are unrolled."""
    is_tpu = jax.default_backend() == "tpu"
    by_platform: dict[str, Any] = dict(unroll=False, page_size=128, joins_qkv=True) if is_tpu else {}
    return EngineConfig(dtype=dtype, cache_dtype=dtype, **by_platform, **options)


def setup(
    sizes: Sizes = SMALL, quantization: str = "w8a8", fuse_old_logp: str = "auto",
    preset: str = "tis_2", centering: str | None = None,
):
    """Returns (Setup, state) of a step with these sizes."""
    config = default.get_config()
    config.task.max_prompt_tokens = sizes.prompt_tokens
    config.rollout.max_new_tokens = sizes.new_tokens
    config.rollout.prompts, config.rollout.group_size = sizes.prompts, sizes.group
    config.train.microbatch_rows = sizes.microbatch_rows
    config.train.fuse_old_logp = fuse_old_logp
    config.correction.preset, config.correction.centering = preset, centering
    chosen = correction.parse(config.correction)
    layout = sharding.layout((1, 1, 1), sharding.TRAIN_RULES, jax.devices()[:1])
    tx = make_optimizer(config.optimizer, 100)
    engine = Engine(sizes.model, engine_config(
        sizes.dtype, slots=sizes.rows, max_length=sizes.prompt_tokens + sizes.new_tokens,
        steps=sizes.new_tokens, prefill_batch=sizes.prompts, quantization=quantization,
        top_n=head_size(chosen.centering, 0),
    ))
    program = Program(dtype=sizes.dtype, remat=sizes.remat)
    training = LearnerSetup(
        config=config, correction=chosen, schedule=schedules.sync(), staleness=0,
        model=sizes.model, layout=layout,
        learner=Learner(sizes.model, program, sizes.new_tokens, config.train.logprob_chunk),
        packer=None, optimizer=tx, critic_optimizer=tx, drafter_optimizer=tx,
    )
    made = build.Setup(
        config=config, model=sizes.model, training=training, replay=None, tokenizer=None,
        engines=(engine,), learner_engine=engine,
    )
    return made, initial_state(training, initial_params(training))


def flops(sizes: Sizes, is_fused: bool) -> dict[str, int]:
    """Returns the model FLOPs of the parts of a step. Nothing that is recomputed counts. A fused
    update also computes logp_old, so nothing is scored before it."""
    length = sizes.prompt_tokens + sizes.new_tokens
    forward = work.forward_flops(sizes.model, sizes.rows, length, sizes.new_tokens)
    mean_length = sizes.prompt_tokens + sizes.new_tokens // 2
    sampled = work.decode_flops(sizes.model, sizes.rows * sizes.new_tokens, mean_length)
    prefilled = work.forward_flops(sizes.model, sizes.prompts, sizes.prompt_tokens, 0)
    return {
        "rollout": prefilled + sampled, "score": 0 if is_fused else forward, "update": 3 * forward,
    }


def matrix_rate(dtype: str, width: int, rounds: int = 5) -> float:
    """Returns the FLOP/s of the product of two square matrices, the best of `rounds`. Float32 has
    the default precision of the platform; int8 counts operations."""
    draw = lambda key: jax.random.normal(jax.random.key(key), (width, width))
    cast = (lambda x: (20 * x).astype("int8")) if dtype == "int8" else lambda x: x.astype(dtype)
    a, b = cast(draw(0)), cast(draw(1))
    total = "int32" if dtype == "int8" else "float32"
    product = jax.jit(functools.partial(jnp.matmul, preferred_element_type=total))
    jax.block_until_ready(product(a, b))
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(product(a, b))
        seconds.append(time.perf_counter() - start)
    return 2 * width**3 / min(seconds)


class Step:
    """Rollout, score and update with random rewards; call it to run one step. `rows` are the last
    update's."""

    def __init__(self, made: build.Setup, state: dict):
        self.trainer, self.state = Trainer(made.training), state
        self._engine = made.engine
        self._scheduler = Scheduler(made.engine, made.engine.load(state["policy"].params))
        self._config = made.config
        self._rng = np.random.default_rng(0)
        self._count, self.rows = 0, None

    def rollout(self) -> list[Sample]:
        self._count += 1
        self._scheduler.set_params(self._engine.load(self.state["policy"].params), self._count)
        rollout, length = self._config.rollout, self._config.task.max_prompt_tokens
        sampling = SamplingParams(max_tokens=rollout.max_new_tokens)
        prompts = self._rng.integers(0, 1000, (rollout.prompts, length)).astype(np.int32)
        requests = [
            Request(f"{self._count}/{i}/{g}", prompt, 0, sampling)
            for i, prompt in enumerate(prompts) for g in range(rollout.group_size)
        ]
        done = generate(self._scheduler, requests)
        sample = Sample(done[0], {}, "", 0.0, 0.0, 0)
        rewards, size = self._rng.random(len(done)).tolist(), rollout.group_size
        return [
            dataclasses.replace(sample, trajectory=t, reward=rewards[i], group=i // size)
            for i, t in enumerate(done)
        ]

    def __call__(self) -> dict[str, float]:
        rows = self.score(self.rollout())
        return self.update(rows, self._count)

    def score(self, samples: list[Sample]) -> Rows:
        return self.trainer.score(
            self.state, samples, {self._count: self.state["policy"].params}
        )

    def update(self, rows: Rows, step: int) -> dict[str, float]:
        self.state, self.rows, metrics = self.trainer.update(self.state, rows, step, self._count)
        return metrics
