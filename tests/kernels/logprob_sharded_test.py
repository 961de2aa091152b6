"""Heads cut over a mesh: the same numbers on eight devices as on one, and what a TPU exchanges."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxrl_tis import sharding
from jaxrl_tis.kernels import logprob
from jaxrl_tis.kernels.logprob import Head
from tests import tpu
from tests.kernels.logprob_reference import QUICK, Case, scored, scored_by

WHOLE_VOCABULARY = sharding.TRAIN_RULES | {"vocab": None}
POSITIONS_CUT = sharding.TRAIN_RULES | {"batch": "data", "length": "fsdp"}


@pytest.mark.parametrize(
    "mesh, rules, fields",
    [
        ((2, 2, 2), sharding.TRAIN_RULES, dict(b=4, d=8, v=98, vocab_axis=0)),
        ((1, 2, 4), sharding.TRAIN_RULES, dict(b=3, d=8, v=100, vocab_axis=1)),  # a row is added
        ((2, 1, 4), sharding.SERVE_RULES, dict(b=2, d=7, v=100, vocab_axis=0, kept_size=5)),
        ((2, 2, 2), POSITIONS_CUT, dict(b=2, d=8, v=98, kept_size=5)),
        ((1, 2, 4), WHOLE_VOCABULARY, dict(b=2, d=8, v=97)),
    ],
)
@pytest.mark.parametrize("chunk", [9, 1000])
def test_values_and_gradients_equal_float64(mesh, rules, fields, chunk):
    case = Case(**fields, seed=3)
    layout = sharding.layout(mesh, rules)
    case.check(case.run(scored(chunk, layout=layout), compiler_options=QUICK))


def test_kernels_of_a_mesh_equal_float64():
    case = Case(2, 5, 8, 98, dtype="float32")
    layout = sharding.layout((1, 2, 2), sharding.TRAIN_RULES)
    with pltpu.force_tpu_interpret_mode():
        score = scored_by("pallas", logprob.Cut.of(layout, case.v))
        case.check(case.run(score, compiler_options=QUICK))


def test_a_vocabulary_that_the_mesh_does_not_divide_is_refused():
    case, layout = Case(v=97), sharding.layout((1, 2, 4), sharding.TRAIN_RULES)
    with pytest.raises(ValueError, match="97 cannot be cut into 4 shards"):
        case.run(scored(layout=layout))


def shapes_of(text: str, name: str) -> list[list[int]]:
    """Shapes of what an HLO operation gives."""
    found = re.findall(rf"= \(?\w+\[([\d,]*)\][^=\n]*? {name}(?:-start)?\(", text)
    return [[int(n) for n in shape.split(",") if n] for shape in found]


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_a_tpu_gathers_the_width_once_and_no_vocabulary(vocab_axis):
    b, n, d, v, data, fsdp, tensor = 4, 72, 256, 1024 + 8, 1, 2, 2
    layout = sharding.layout(
        (data, fsdp, tensor), sharding.TRAIN_RULES, tpu.devices("v5e:2x2")
    )
    abstract = lambda axes, *s, dtype="float32": jax.ShapeDtypeStruct(
        s, dtype, sharding=layout.sharding(axes)
    )

    def loss(weight, x, targets, temperature):
        head = Head(weight, vocab_axis)
        found = scored(chunk=16, layout=layout)(head, x, targets, temperature, None)
        return jnp.sum(found.logp + found.entropy), found

    names, sizes = (("vocab", "embed"), (v, d))
    if vocab_axis == 1:
        names, sizes = names[::-1], sizes[::-1]
    compiled = jax.jit(jax.grad(loss, (0, 1), has_aux=True)).lower(
        abstract(names, *sizes),
        abstract(("batch", None, None), b, n, d, dtype="bfloat16"),
        abstract(("batch", None), b, n, dtype="int32"),
        abstract(("batch", None), b, n),
    ).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    head = [v // tensor, d]
    gathered = [s for s in shapes_of(text, "all-gather") if np.prod(s) >= d]
    assert all(sorted(s[-2:]) == sorted(head) for s in gathered) and 1 <= len(gathered) <= 2
    tokens = b // (data * fsdp) * n
    reduced = shapes_of(text, "all-reduce")
    assert all(np.prod(s) <= tokens * d for s in reduced)
    assert not re.search(rf"\[(?:\d+,)?(?:{tokens}|{n}),(?:{v}|{v // tensor})\]", text)
