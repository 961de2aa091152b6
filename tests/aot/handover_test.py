"""Bytes that new weights move, by hand on eight devices, and as the run moves them."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxrl_tis.aot import handover
from jaxrl_tis.aot.handover import Moved
from jaxrl_tis.learner.state import abstract_state
from jaxrl_tis.sharding import make_mesh
from tests import tiny

FSDP, BOTH = (1, 4, 1), (1, 2, 2)  # four devices that learn


def counted(shape, source, target, learner=FSDP, sampler=(2, 1, 2)):
    """A float32 array, from devices 0 to 3 to 4 to 7."""
    learner, sampler = make_mesh(learner, jax.devices()[:4]), make_mesh(sampler, jax.devices()[4:])
    found = handover.count([
        Moved(shape, 4, NamedSharding(learner, P(*source)), NamedSharding(sampler, P(*target)))
    ])
    axes = {(x["does"], x["axis"]): (x["bytes"], x["device_bytes"]) for x in found.pop("axes")}
    return found, axes


def test_rows_that_become_columns():
    """[8,4], 128 bytes: two rows of each learner's device; two columns, 64 bytes, of each sampler's,
    a quarter of them from every learner's device."""
    found, axes = counted((8, 4), ("fsdp", None), (None, "tensor"))
    assert found == {
        "bytes": 4 * 64, "device_bytes": 64, "distinct_bytes": 128, "whole_bytes": 4 * 16,
        "sent_device_bytes": 64, "senders": 4,
    }
    assert axes == {
        ("copied", "data"): (128, 64), ("cut", "tensor"): (256, 64),
        ("gathered", "fsdp"): (192, 48),
    }


def test_parts_that_lie_within_one_another():
    """Four columns, one of each learner's device: each sampler's two columns come from two."""
    found, axes = counted((8, 4), (None, "fsdp"), (None, "tensor"))
    assert (found["whole_bytes"], found["senders"]) == (4 * 32, 2)
    assert found["sent_device_bytes"] == 2 * 32  # its column to two samplers' devices
    assert axes["gathered", "fsdp"] == (128, 32)


def test_what_everybody_has():
    """A norm [8], 32 bytes: copied over data to both of the second row of the sampler's mesh, and
    over tensor within the first; no two devices are sent it by the same one."""
    found, axes = counted((8,), (None,), (None,))
    assert found == {
        "bytes": 128, "device_bytes": 32, "distinct_bytes": 32, "whole_bytes": 128,
        "sent_device_bytes": 32, "senders": 1,
    }
    assert axes == {
        ("copied", "data"): (64, 32), ("copied", "tensor"): (32, 32), ("same", "fsdp"): (128, 32),
    }


def test_pieces_count_for_the_first_axis_on_which_they_are_elsewhere():
    """[8,4] in four blocks [4,2] of 32 bytes, joined whole by each of four devices: one piece is the
    first, one is beside it on tensor, and two are elsewhere on fsdp."""
    found, axes = counted((8, 4), ("fsdp", "tensor"), (None, None), BOTH, (4, 1, 1))
    assert (found["bytes"], found["distinct_bytes"], found["whole_bytes"]) == (512, 128, 128)
    assert axes == {
        ("copied", "data"): (384, 128), ("gathered", "fsdp"): (256, 64),
        ("gathered", "tensor"): (128, 32),
    }


def test_pieces_that_several_have():
    """Rows [8,4] that the two devices along tensor have alike: they take turns."""
    found, axes = counted((8, 4), ("fsdp", None), ("tensor", None), BOTH)
    assert axes[("same", "tensor")] == (256, 64) and ("gathered", "tensor") not in axes
    assert (found["whole_bytes"], found["senders"], found["sent_device_bytes"]) == (256, 1, 64)


def test_arrays_add_up():
    mesh = make_mesh(FSDP, jax.devices()[:4]), make_mesh((2, 1, 2), jax.devices()[4:])
    place = lambda i, *spec: NamedSharding(mesh[i], P(*spec))
    matrix = Moved((8, 4), 1, place(0, "fsdp", None), place(1, None, "tensor"))
    norm = Moved((8,), 4, place(0), place(1))
    found = handover.count([matrix, matrix, norm])
    assert (found["bytes"], found["device_bytes"]) == (2 * 4 * 16 + 128, 2 * 16 + 32)
    assert found["sent_device_bytes"] == 2 * 16 + 32 and found["senders"] == 4
    by = lambda does: sum(x["bytes"] for x in found["axes"] if x["does"] == does)
    assert found["distinct_bytes"] + by("copied") == found["bytes"]
    assert found["whole_bytes"] + by("gathered") == found["bytes"]


# Of a run


@pytest.fixture(scope="module", params=[(True, FSDP), (False, BOTH)])
def setup(request):
    unroll, learner = request.param
    return tiny.setup(
        rollout__mode="one_step", rollout__driver="threads", mesh__train=learner,
        mesh__serve=(2, 1, 1), rollout__workers=2, engine__unroll=unroll, engine__dtype="bfloat16",
        model__num_kv_heads=2,
    )


def test_serving_parameters_are_counted_from_where_they_are_to_where_they_go(setup):
    """The run's own program and its own device_put, array by array."""
    zeros = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
    params = jax.tree.map(zeros, abstract_state(setup.training)["policy"].params)
    left, _ = setup.engine._weights.loader(params)(params, None)
    served = setup.served_params(params, 0)
    same = lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim)
    listed = handover.moved(setup, setup.engine)
    rows = zip(listed, jax.tree.leaves(left), jax.tree.leaves(served[0]), strict=True)
    for x, before, after in rows:
        assert same(before, x.source) and same(after, x.target)
        assert (x.shape, x.itemsize) == (after.shape, after.dtype.itemsize)
    found = handover.by_format(setup)["w8a8"]
    nbytes = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    arrived = lambda tree: sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards)
    assert found["distinct_bytes"] == nbytes(served[0])  # sync/bytes, for each sampler
    assert found["bytes"] == arrived(served[0]) and found["passed_on_bytes"] == arrived(served[1])


def test_formats(setup):
    """Full precision is the engine's dtype: of all but the quantised layers it stays."""
    found = handover.by_format(setup)
    assert list(found) == ["bfloat16", "w8a8"]
    c = setup.model
    matrices = c.embed_dim * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    matrices = c.num_layers * (matrices + 3 * c.embed_dim * c.mlp_dim)
    outputs = c.head_dim * (c.num_heads + 2 * c.num_kv_heads) + 2 * c.embed_dim + 2 * c.mlp_dim
    saved = 2 * matrices - (matrices + 4 * c.num_layers * outputs)
    distinct = {name: x["distinct_bytes"] for name, x in found.items()}
    assert distinct["bfloat16"] - distinct["w8a8"] == saved
    plain = tiny.setup(
        rollout__mode="one_step", rollout__driver="threads", engine__quantization="none",
    )
    assert list(handover.by_format(plain)) == ["float32", "w8a8"]


def test_the_table_says_what_each_axis_does(setup):
    shown = handover.table(handover.by_format(setup), markdown=True).splitlines()
    found = handover.by_format(setup)["w8a8"]
    assert len({line.count("|") for line in shown}) == 1
    assert f"| w8a8 | all | {found['bytes']:,} | {found['device_bytes']:,} |" in shown
    [line] = [x for x in shown if x.startswith("| w8a8 | gathered over fsdp (")]
    axis = next(x for x in found["axes"] if (x["does"], x["axis"]) == ("gathered", "fsdp"))
    assert line.endswith(f"| {axis['bytes']:,} | {axis['device_bytes']:,} |")
    assert f"{found['passed_on_bytes']:,}" in shown[-1]
    assert f"{found['bytes']:,}" in handover.table(handover.by_format(setup))
