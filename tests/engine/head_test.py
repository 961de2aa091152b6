"""The output head of the sampler: bfloat16 like the rest, or float32 as in the learner."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.models import transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig

CONFIG = ModelConfig(
    family="llama", vocab_size=50, embed_dim=32, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=16, mlp_dim=48, rope=RopeConfig(kind="default", theta=10000.0), max_position=16,
    norm_eps=1e-5, qkv_bias=False, qk_norm=False, tie_embeddings=True,
)


@pytest.mark.parametrize("quantization", ["none", "w8a8"])
@pytest.mark.parametrize("unroll", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_float32_head_has_the_learners_weights(is_tied, unroll, quantization):
    config = dataclasses.replace(CONFIG, tie_embeddings=is_tied)
    params = transformer.init(config, jax.random.key(0))
    head = "embed" if is_tied else "head"
    x = jnp.asarray(np.random.default_rng(0).normal(0, 1, (4, 32)), jnp.bfloat16)
    program = transformer.Program(dtype="bfloat16", highest_head=True)
    expected = transformer.head_logits(params, program, x)
    for highest in (True, False):
        engine = Engine(
            config, slots=2, max_length=16, dtype="bfloat16", highest_head=highest, unroll=unroll,
            quantization=quantization,
        )
        loaded = engine.load(params)
        dtypes = {name: w.dtype for name, w in loaded.items() if name != "layers"}
        rest = dict.fromkeys(dtypes, jnp.bfloat16)
        assert dtypes == (rest | {head: jnp.float32} if highest else rest)
        gap = np.abs(transformer.head_logits(loaded, engine.program, x) - expected).max()
        assert gap == 0 if highest else gap > 1e-4
