"""The TPU kernels: interpreted against float64, and compiled for chips that are not here."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from jaxrl_tis.kernels import logprob_pallas
from jaxrl_tis.kernels.logprob import Head
from tests import tpu
from tests.kernels.logprob_reference import Case, scored, scored_by

TILE = 128


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(logprob_pallas, "LARGEST_TILE", TILE)


def interpreted(case: Case):
    """Memory that nothing wrote reads as NaN; races and reads out of bounds are errors."""
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    with pltpu.force_tpu_interpret_mode(params):
        return case.run(scored_by("pallas"))


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    st.sampled_from([1, 2, 3]), st.integers(1, 90), st.sampled_from([97, 256, 300]),
    st.integers(0, 1), st.booleans(),
)
def test_values_and_gradients_equal_float64(b, n, v, vocab_axis, highest):
    case = Case(b, n, 8, v, vocab_axis, highest=highest, seed=b * n * v)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprob_pallas, "LARGEST_TILE", TILE)
        case.check(interpreted(case))


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_tiles_that_divide_neither_tokens_nor_vocabulary(vocab_axis):
    case = Case(2, 75, 8, 300, vocab_axis, dtype="bfloat16")  # 2 x 3 tiles
    case.check(interpreted(case), tolerance=8e-3)


def test_a_token_without_cotangent_leaks_nothing():
    case = Case(2, 9, 8, 97)
    case.g_logp[1, 2:5] = case.g_entropy[1, 2:5] = 0
    expected = interpreted(case)[1]
    case.x[1, 2:5] = np.nan
    found, gradients = interpreted(case)
    assert np.all(np.isnan(found.logp[1, 2:5])) and not np.any(np.isnan(found.logp[0]))
    for ours, theirs in zip(gradients, expected):
        np.testing.assert_array_equal(ours, theirs)


def compiled_for(topology, tokens, width, vocab, vocab_axis, dtype, highest):
    """Value and gradients at [2, tokens / 2] for one chip; the chunk would take all the tokens."""
    sharding = SingleDeviceSharding(tpu.devices(topology)[0])
    shape = lambda *s, dtype="float32": jax.ShapeDtypeStruct(s, dtype, sharding=sharding)

    def loss(weight, x, targets, temperature):
        head = Head(weight, vocab_axis, highest)
        found = scored(chunk=tokens)(head, x, targets, temperature, None)
        return jnp.sum(found.logp + found.entropy), found

    rows = 2, tokens // 2
    weight = shape(*((vocab, width), (width, vocab))[vocab_axis], dtype=dtype)
    inputs = shape(*rows, width, dtype=dtype), shape(*rows, dtype="int32"), shape(*rows)
    return jax.jit(jax.grad(loss, (0, 1), has_aux=True)).lower(weight, *inputs).compile()


@pytest.mark.parametrize(
    "topology, tokens, width, vocab, vocab_axis, dtype, highest",
    [
        ("v5e:2x2", 600, 896, 5000 + 64, 0, "bfloat16", False),
        ("v5e:2x2", 40, 576, 97, 1, "float32", False),
        ("v5p:2x2x1", 600, 640, 1200, 1, "bfloat16", True),
    ],
)
def test_compiles_for_a_tpu(monkeypatch, topology, tokens, width, vocab, vocab_axis, dtype, highest):
    monkeypatch.setattr(logprob_pallas, "LARGEST_TILE", 512)
    compiled = compiled_for(topology, tokens, width, vocab, vocab_axis, dtype, highest)
    text = compiled.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    rows = rf"(?:{tokens}|2,{tokens // 2}|1,2,{tokens // 2})"
    assert not re.search(rf"f32\[{rows},{vocab}\]", text)
    # Columns of float32 fields take a whole register of 128 lanes per token.
    size = 4 if highest else jnp.dtype(dtype).itemsize
    per_token = 3 * 4 * 128 + 4 * width * 4
    head = (4 + 2 * size) * width * vocab
    assert compiled.memory_analysis().temp_size_in_bytes < 1.2 * (head + tokens * per_token)
