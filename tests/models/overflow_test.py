"""Where the values of a model stop being finite: planted in one layer, weight or dtype."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import models
from jaxrl_tis.models import overflow, transformer
from jaxrl_tis.models.transformer import Program
from tests import tiny
from tests.weights import exploding

GOLDEN = pathlib.Path(__file__).parent / "golden"
pytestmark = pytest.mark.compiles
TOKENS = np.array([1, 2, 3, 4, 5], np.int32)
HALF = Program(dtype="float16")


def golden(name):
    return models.load(GOLDEN / name)


# glm4_moe: layer 0 is dense and in a stack of its own. gemma3: windows, and scaled embeddings.
@pytest.mark.all
@pytest.mark.parametrize("name", ["llama_default", "gemma3", "glm4_moe"])
def test_the_stream_of_layers_is_that_of_a_whole_pass(name):
    config, params = golden(name)
    rows = TOKENS[None]
    stream = list(transformer.residuals(params, config, Program(), rows))
    assert len(stream) == 1 + config.num_layers
    positions, segments = np.arange(5)[None], np.ones((1, 5), np.int32)
    whole = transformer.rows_hidden(params, config, Program(), rows, positions, segments)
    scale = params["final_norm"] + (1.0 if config.zero_centered_norms else 0.0)
    last = transformer.rms_norm(stream[-1], scale, config.norm_eps)
    np.testing.assert_allclose(last, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_unrolled", [False, True])
def test_the_layer_where_float16_overflows_is_named(is_unrolled):
    config, params = golden("glm4_moe")
    dense = len(config.stacks["dense_layers"])
    broken = exploding(params, "layers", 0)
    if is_unrolled:
        broken = jax.jit(transformer.unstack, static_argnums=1)(broken, config)
    said = overflow.cause(broken, config, HALF, TOKENS)
    last = config.num_layers - 1
    assert f"in layer {dense} (of layers 0 to {last}), whose input is at most " in said
    assert "the largest float16 is 65504. Compute in a dtype of a wider range" in said
    before = list(transformer.residuals(params, config, HALF, TOKENS[None]))[dense]
    assert f"at most {float(jnp.abs(before).max()):.4g};" in said
    # In float32 the same weights are fine.
    assert "finite in a pass over" in overflow.cause(broken, config, Program(), TOKENS)


def test_a_broken_weight_is_named_before_any_layer():
    config, params = golden("llama_default")
    layers = params["layers"] | {"up": params["layers"]["up"].at[1, 0, 0].set(jnp.nan)}
    said = overflow.cause(params | {"layers": layers}, config, Program(), TOKENS)
    assert said == "the weight layers.up (float32) is not finite"


@pytest.mark.all
def test_rows_and_padding_of_a_mesh_change_nothing():
    setup = tiny.setup(model__num_layers=2, model__dtype="float16")
    params = transformer.init(setup.model, jax.random.key(0))
    program = setup.training.learner.program
    assert program.layout is not None
    said = overflow.cause(exploding(params, "layers", 1), setup.model, program, TOKENS)
    assert "in layer 1 (of layers 0 to 1)" in said


def test_families_that_overflow_in_float16_are_named():
    gemma, _ = golden("gemma3")
    said = overflow.doubt(gemma, {"model.dtype": "float16", "engine.dtype": "bfloat16"})
    assert said.startswith("model.dtype = 'float16': models of the family gemma3_text are known")
    assert overflow.doubt(gemma, {"model.dtype": "bfloat16"}) == ""
    llama = dataclasses.replace(gemma, family="llama")
    assert overflow.doubt(llama, {"model.dtype": "float16"}) == ""
