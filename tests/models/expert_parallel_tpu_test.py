"""The exchange between the devices of the experts, as a TPU's compiler makes it."""

import jax
import pytest

from jaxrl_tis import sharding
from jaxrl_tis.aot.hlo import Module
from jaxrl_tis.models import expert_parallel
from tests import tpu

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("libtpu compiles the programs")]


@pytest.mark.cases("v5e:4x8-all-gather")
@pytest.mark.parametrize("chips, kind", [
    ("v5e:2x4", "ragged-all-to-all"), ("v5e:4x8", "all-gather"), ("v5p:2x2x2", "ragged-all-to-all"),
])
def test_a_large_v5e_slice_gathers_tokens(chips, kind):
    """libtpu refuses a ragged exchange there. Each of 8 devices has 4 tokens with 2 experts: 8 rows
    travel to their experts and back, or 32 tokens are gathered once."""
    devices = tpu.devices(chips)
    layout = sharding.layout((-1, 1, 1, 1, 8), sharding.SERVE_RULES, devices)
    like = lambda dtype, shape, *axes: jax.ShapeDtypeStruct(
        shape, dtype, sharding=layout.sharding(axes)
    )
    rows = lambda dtype, n: like(dtype, (len(devices), 4, n), "batch", "length", None)
    ws = tuple(
        like("bfloat16", shape, *axes)
        for shape, axes in zip(((8, 256, 128), (8, 256, 128), (8, 128, 256)), expert_parallel.AXES[:3], strict=True)
    )
    run = jax.jit(lambda *x: expert_parallel.experts(*x, 8, layout))
    text = run.lower(rows("bfloat16", 256), rows("int32", 2), rows("float32", 2), ws).compile().as_text()
    found = [c for c in Module(text).collectives(dict(layout.mesh.shape)) if c.axes == ("expert",)]
    is_gathered = kind == "all-gather"
    size, runs = (32 * 256 * 2, 1) if is_gathered else (8 * 256 * 2, 2)
    assert [c.bytes for c in found if c.kind == kind].count(size) == runs
    assert is_gathered != any("ragged" in c.kind for c in found)
