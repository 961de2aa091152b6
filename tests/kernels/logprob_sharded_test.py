"""Heads cut over a mesh: the same numbers on eight devices as on one, and what a TPU exchanges."""

import dataclasses
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxrl_tis import sharding
from jaxrl_tis.kernels import logprob, logprob_pallas
from jaxrl_tis.kernels.head import Head
from tests import tpu
from tests.kernels.logprob_reference import Case, scored, scored_by

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("Pallas lowers the kernels")]

TRAIN_RULES = sharding.TRAIN_RULES
WHOLE_VOCABULARY = TRAIN_RULES | {"vocab": None}  # where it is stored
POSITIONS_CUT = TRAIN_RULES | {"batch": "data", "length": "fsdp"}


@pytest.mark.parametrize(
    "mesh, rules, fields",
    [
        ((2, 2, 2), TRAIN_RULES, dict(b=4, d=8, v=98, vocab_axis=0, num_others=3)),
        ((1, 2, 4), TRAIN_RULES, dict(b=3, d=8, v=100, vocab_axis=1)),  # a row is added
        ((2, 1, 4), sharding.SERVE_RULES, dict(b=2, d=7, v=100, vocab_axis=0, kept_size=5)),
        ((2, 2, 2), POSITIONS_CUT, dict(b=2, d=8, v=98, kept_size=5, num_others=2)),
        ((1, 2, 4), TRAIN_RULES, dict(b=2, d=8, v=97)),  # 25, 25, 25 and 22 tokens
        ((1, 1, 8), WHOLE_VOCABULARY, dict(b=2, d=8, v=9, vocab_axis=1, kept_size=3)),  # 2 to none
        # More tokens than columns: the head travels, in parts of 3 or 4 tokens, the last ones empty.
        ((1, 4, 2), TRAIN_RULES, dict(b=4, d=8, v=23, vocab_axis=0, num_others=2)),
        ((2, 4, 1), TRAIN_RULES, dict(b=16, d=8, v=13, vocab_axis=1, kept_size=5)),
    ],
)
@pytest.mark.parametrize("chunk", [9, 1000])
def test_values_and_gradients_equal_float64(mesh, rules, fields, chunk):
    case = Case(**fields, seed=3)
    layout = sharding.layout(mesh, rules)
    case.check(case.run(scored(chunk, layout=layout)))


def test_what_travels_is_decided_by_shapes():
    """Bytes of the hidden states of a micro-batch in bfloat16, and of the head in float32."""
    layout = sharding.layout((1, 8, 1), TRAIN_RULES)

    def cut_of(vocab, width, rows, length):
        struct = lambda dtype, *s: jax.ShapeDtypeStruct(s, dtype)
        head = Head(struct("float32", width, vocab), vocab_axis=1, highest=True)
        return logprob.Cut.of(layout).in_parts(head, struct("bfloat16", rows, length, width))

    small = cut_of(151_936, 896, 64, 2048)  # 131,072 tokens of 2 bytes, 151,936 of 4
    assert (small.is_spread, small.parts, small.num_parts) == (True, 1, 8)
    large = cut_of(152_064, 5120, 64, 22_528)
    assert (large.is_spread, large.parts, large.num_parts) == (False, 8, 8)
    alone = logprob.Cut.of(sharding.layout((8, 1, 1), TRAIN_RULES))
    assert not alone.in_parts(Head(jnp.zeros((8, 8)), 0), jnp.zeros((8, 4, 8))).is_spread


@pytest.mark.all
@pytest.mark.cases("mesh1-97-0", "mesh3-517-0", "mesh4-9-1")
@pytest.mark.parametrize("mesh, v, vocab_axis", [
    ((1, 2, 2), 98, 0), ((1, 2, 2), 97, 0), ((1, 2, 2), 97, 1),
    ((1, 1, 4), 517, 0),  # tiles of 128 and 2 tokens, of which the last shard has 127
    ((1, 1, 8), 9, 1),  # shards without a token
])
def test_kernels_of_a_mesh_equal_float64(mesh, v, vocab_axis):
    case = Case(2, 5, 8, v, vocab_axis, num_others=3)
    layout = sharding.layout(mesh, TRAIN_RULES, vocab_size=v)
    tiles = mock.patch.object(logprob_pallas, "LARGEST_TILE", 128)
    ways = [{}] if mesh[1] == 1 else [dict(is_spread=True), dict(parts=mesh[1])]
    cuts = [dataclasses.replace(logprob.Cut.of(layout), **way) for way in ways]
    with tiles, pltpu.force_tpu_interpret_mode():
        for cut in cuts:
            case.check(case.run(scored_by("pallas", cut)))


def shapes_of(text: str, name: str) -> list[list[int]]:
    """Shapes of what an HLO operation gives."""
    found = re.findall(rf"= \(?\w+\[([\d,]*)\][^=\n]*? {name}(?:-start)?\(", text)
    return [[int(n) for n in shape.split(",") if n] for shape in found]


@pytest.mark.all
@pytest.mark.cases("1-1032-72", "0-1033-512")
@pytest.mark.parametrize("vocab_axis, v, n", [(0, 1032, 72), (1, 1032, 72), (0, 1033, 512)])
def test_a_tpu_gathers_tokens_or_parts_of_the_head(vocab_axis, v, n):
    """Of few tokens those of both shards travel, half of them at a time; of many the head, in
    halves. Of 1033 columns, stored whole, each shard still multiplies half; the gradient becomes
    whole again."""
    b, d, data, fsdp, tensor = 4, 256, 1, 2, 2
    layout = sharding.layout(
        (data, fsdp, tensor), TRAIN_RULES, tpu.devices("v5e:2x2"), vocab_size=v
    )
    abstract = lambda axes, *s, dtype="float32": jax.ShapeDtypeStruct(
        s, dtype, sharding=layout.sharding(axes)
    )

    def loss(weight, x, targets, temperature):
        head = Head(weight, vocab_axis)
        found = scored(chunk=16, layout=layout)(head, x, targets, temperature, None, None)
        return jnp.sum(found.logp + found.entropy), found

    names, sizes = (("vocab", "embed"), (v, d))
    if vocab_axis == 1:
        names, sizes = names[::-1], sizes[::-1]
    gradients = layout.sharding(names), None
    compiled = jax.jit(
        jax.grad(loss, (0, 1), has_aux=True), out_shardings=(gradients, None)
    ).lower(
        abstract(names, *sizes),
        abstract(("batch", None, None), b, n, d, dtype="bfloat16"),
        abstract(("batch", None), b, n, dtype="int32"),
        abstract(("batch", None), b, n),
    ).compile()
    text = compiled.as_text()
    kernels = text.count('custom_call_target="tpu_custom_call"')
    assert kernels == 3
    part, half_d = -(-v // (tensor * fsdp)), d // fsdp
    is_spread = n == 72
    gathered = {tuple(sorted(s)[-2:]) for s in shapes_of(text, "all-gather") if np.prod(s) >= d * 8}
    gathered.discard((half_d, -(-v // tensor)))  # of what is stored whole
    assert gathered == ({(n // fsdp, d)} if is_spread else {(d, part)})
    largest = max(np.prod(s) for s in shapes_of(text, "all-reduce") or [[0]])
    assert largest <= b // fsdp * n * d
    assert not re.search(rf"\[(?:\d+,)?(?:{n}),(?:{v}|{-(-v // tensor)})\]", text)
