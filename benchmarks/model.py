"""A GRPO step of a random model with 4 layers and width 256, for the learner's benchmarks."""

import dataclasses

import jax
import numpy as np

from configs import default
from jaxrl_tis import build, sharding
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

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 64, 64


def setup(
    vocab_size: int = 49152, quantization: str = "w8a8", new_tokens: int = NEW_TOKENS,
    fuse_old_logp: str = "auto", preset: str = "tis_2", centering: str | None = None,
):
    """Returns (Setup, state) for 4 prompts x 8 samples with 64 + new_tokens tokens each."""
    config = default.get_config()
    config.task.max_prompt_tokens, config.rollout.max_new_tokens = PROMPT_TOKENS, new_tokens
    config.rollout.prompts, config.rollout.group_size = PROMPTS, GROUP
    config.train.microbatch_rows = 8
    config.train.fuse_old_logp = fuse_old_logp
    config.correction.preset, config.correction.centering = preset, centering
    chosen = correction.parse(config.correction)
    model = ModelConfig(
        family="llama", vocab_size=vocab_size, embed_dim=256, num_layers=4, num_heads=8,
        num_kv_heads=4, head_dim=32, mlp_dim=768, rope=RopeConfig("default", 1e4),
        max_position=2048, norm_eps=1e-5, qkv_bias=False, qk_norm=False, tie_embeddings=True,
    )
    layout = sharding.layout((1, 1, 1), sharding.TRAIN_RULES, jax.devices()[:1])
    tx = make_optimizer(config.optimizer, 100)
    engine = Engine(model, EngineConfig(
        slots=PROMPTS * GROUP, max_length=PROMPT_TOKENS + new_tokens, steps=new_tokens,
        prefill_batch=PROMPTS, quantization=quantization,
        top_n=head_size(chosen.centering, 0),
    ))
    training = LearnerSetup(
        config=config, correction=chosen, schedule=schedules.sync(), staleness=0, model=model,
        layout=layout,
        learner=Learner(model, Program(), new_tokens, config.train.logprob_chunk),
        packer=None, optimizer=tx, critic_optimizer=tx,
    )
    made = build.Setup(
        training=training, replay=None, tokenizer=None, engines=(engine,), learner_engine=engine
    )
    return made, initial_state(training, initial_params(training))


class Step:
    """Rollout, score and update with random rewards; call it to run one step. `rows` are the last
    update's."""

    def __init__(self, made: build.Setup, state: dict):
        self.trainer, self.state = Trainer(made.training), state
        self._engine = made.engine
        self._scheduler = Scheduler(made.engine, made.engine.load(state["policy"].params))
        self._new_tokens = made.config.rollout.max_new_tokens
        self._rng = np.random.default_rng(0)
        self._count, self.rows = 0, None

    def rollout(self) -> list[Sample]:
        self._count += 1
        self._scheduler.set_params(self._engine.load(self.state["policy"].params), self._count)
        sampling = SamplingParams(max_tokens=self._new_tokens)
        prompts = self._rng.integers(0, 1000, (PROMPTS, PROMPT_TOKENS)).astype(np.int32)
        requests = [
            Request(f"{self._count}/{i}/{g}", prompt, 0, sampling)
            for i, prompt in enumerate(prompts) for g in range(GROUP)
        ]
        done = generate(self._scheduler, requests)
        sample = Sample(done[0], {}, "", 0.0, 0.0, 0)
        return [
            dataclasses.replace(sample, trajectory=t, reward=float(self._rng.random()), group=i // GROUP)
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
