"""The TPU kernels: interpreted against float64, and compiled for chips that are not here."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from jaxrl_tis.kernels import logprob_pallas
from jaxrl_tis.kernels.head import Head
from tests import races, tpu
from tests.kernels.logprob_reference import Case, scored, scored_by

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("Pallas lowers the kernels")]


def interpreted(case: Case, **params):
    """In tiles of 128; memory that nothing wrote and what lies past an array's end read as NaN."""
    params = pltpu.InterpretParams(uninitialized_memory="nan", **params)
    tiles = mock.patch.object(logprob_pallas, "LARGEST_TILE", 128)
    with tiles, pltpu.force_tpu_interpret_mode(params):
        results = case.run(scored_by("pallas"))
        return jax.block_until_ready(results)


@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    st.sampled_from([1, 2, 3]), st.integers(1, 90), st.sampled_from([97, 256, 300]),
    st.integers(0, 1), st.booleans(), st.sampled_from([0, 3]),
)
def test_values_and_gradients_equal_float64(b, n, v, vocab_axis, highest, num_others):
    case = Case(b, n, 8, v, vocab_axis, highest=highest, num_others=num_others, seed=b * n * v)
    case.check(interpreted(case))


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_tiles_that_divide_neither_tokens_nor_vocabulary(vocab_axis):
    case = Case(2, 75, 8, 300, vocab_axis, dtype="bfloat16")  # 2 x 3 tiles
    case.check(interpreted(case), tolerance=8e-3)


@pytest.mark.all
def test_two_cores_do_not_race():
    case = Case(2, 75, 8, 300)
    with races.none():
        found = interpreted(case, num_cores_or_threads=2, **races.DETECTED)
    case.check(found)


@pytest.mark.all
def test_a_token_without_cotangent_leaks_nothing():
    case = Case(2, 9, 8, 97, num_others=2)
    case.g_logp[1, 2:5] = case.g_entropy[1, 2:5] = case.g_others[1, 2:5] = 0
    expected = interpreted(case)[1]
    case.x[1, 2:5] = np.nan
    found, gradients = interpreted(case)
    assert np.all(np.isnan(found.logp[1, 2:5])) and not np.any(np.isnan(found.logp[0]))
    for ours, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def compiled_for(topology, case: Case):
    """Gradients on one chip; the chunk would take all the tokens."""
    sharding = SingleDeviceSharding(tpu.devices(topology)[0])
    abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def loss(weight, x, targets, temperature, others, kept):
        head = Head(weight, case.vocab_axis, case.highest)
        found = scored(chunk=case.b * case.n)(head, x, targets, temperature, others, kept)
        return jnp.sum(found.logp + found.entropy) + jnp.sum(found.others), found

    inputs = case.weight, case.x, case.targets, case.temperature, case.others, case.kept
    step = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    return step.lower(*jax.tree.map(abstract, inputs)).compile()


def holds_all_logits(text: str, case: Case) -> bool:
    rows = rf"(?:{case.b * case.n}|(?:1,)?{case.b},{case.n})"
    return re.search(rf"f32\[{rows},{case.v}\]", text) is not None


@pytest.mark.all
@pytest.mark.cases("v5e:2x2-case1", "v5e:2x2-case2")
@pytest.mark.parametrize(
    "topology, case",
    [
        ("v5e:2x2", Case(2, 300, 896, 5000, 0, dtype="bfloat16")),
        ("v5e:2x2", Case(2, 20, 576, 97, 1)),
        ("v5e:2x2", Case(2, 150, 896, 5000, 0, dtype="bfloat16", num_others=32)),
        ("v5p:2x2x1", Case(2, 90, 256, 300, 1, dtype="bfloat16", highest=True)),
    ],
)
def test_compiles_for_a_tpu(topology, case):
    compiled = compiled_for(topology, case)
    text = compiled.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert not holds_all_logits(text, case)
    # The head cast and its gradient; float32 columns take all 128 lanes of a register per token.
    size = 4 if case.highest else case.x.dtype.itemsize
    head = (4 + size) * case.d * case.v
    per_token = 3 * 4 * 128 + 4 * size * case.d
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries < 1.2 * (head + per_token * case.b * case.n)


def test_a_tpu_program_for_kept_sets_has_no_kernel_and_holds_its_chunk():
    case = Case(2, 20, 576, 97, 1, kept_size=3)
    text = compiled_for("v5e:2x2", case).as_text()
    assert "tpu_custom_call" not in text and holds_all_logits(text, case)
