"""Bytes of a weight sync, by hand on eight devices, and as the run moves them."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxrl_tis.aot import weight_sync
from jaxrl_tis.aot.chips import Topology
from jaxrl_tis.aot.weight_sync import Moved
from jaxrl_tis.learner.state import abstract_state
from jaxrl_tis.sharding import make_mesh
from tests import tiny

FSDP, BOTH = (1, 4, 1), (1, 2, 2)  # four devices that learn
V5P = Topology.parse("v5p:2x2x4")


def moved(shape, itemsize, *target):
    """An array on the learner's devices 0 to 3, and on the sampler's 4 to 7, a mesh of 2 x 1 x 2."""
    learner, sampler = make_mesh(FSDP, jax.devices()[:4]), make_mesh((2, 1, 2), jax.devices()[4:])
    return Moved(
        shape, itemsize, NamedSharding(learner, P("fsdp")), NamedSharding(sampler, P(*target))
    )


@pytest.mark.parametrize("shape, target, expected", [
    # [8,4] float32, 128 bytes: two columns on each device of a pair along tensor; two such pairs.
    ((8, 4), (None, "tensor"), {"bytes": 4 * 64, "device_bytes": 64, "distinct_bytes": 128}),
    # A norm [8], 32 bytes, whole on each.
    ((8,), (None,), {"bytes": 4 * 32, "device_bytes": 32, "distinct_bytes": 32}),
    # Cut over both axes, nothing arrives twice.
    ((8, 4), ("data", "tensor"), {"bytes": 128, "device_bytes": 32, "distinct_bytes": 128}),
])
def test_an_array_is_counted_on_each_device_and_once(shape, target, expected):
    assert weight_sync.count([moved(shape, 4, *target)]) == expected


def test_arrays_add_up():
    matrix, norm = moved((8, 4), 1, None, "tensor"), moved((8,), 4)
    assert weight_sync.count([matrix, matrix, norm]) == {
        "bytes": 4 * (2 * 16 + 32), "device_bytes": 2 * 16 + 32, "distinct_bytes": 2 * 32 + 32,
    }


def test_the_table_has_a_line_for_each_format():
    counts = {"w8a8": {"bytes": 4000, "device_bytes": 1000, "distinct_bytes": 2000, "passed_on_bytes": 0}}
    assert weight_sync.table(counts, markdown=True).splitlines() == [
        "| weight sync | distinct bytes | bytes on each device | bytes on all devices | "
        "passed on to other samplers |",
        "|---|---|---|---|---|",
        "| w8a8 | 2,000 | 1,000 | 4,000 | 0 |",
    ]
    heading, row = weight_sync.table(counts).splitlines()
    assert row.index("2,000") == heading.index("distinct")


# Of a run


@pytest.fixture(scope="module", params=[(True, FSDP), (False, BOTH)])
def setup(request):
    unroll, learner = request.param
    return tiny.setup(
        rollout__schedule="one_step", rollout__driver="threads", mesh__train=learner,
        mesh__serve=(2, 1, 1), rollout__workers=2, engine__unroll=unroll, engine__dtype="bfloat16",
        model__num_kv_heads=2,
    )


@pytest.mark.all
def test_serving_parameters_are_counted_from_where_they_are_to_where_they_go(setup):
    """The run's own program and its own device_put, array by array."""
    zeros = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
    params = jax.tree.map(zeros, abstract_state(setup.training)["policy"].params)
    left, _ = setup.engine._weights.loader(params)(params, None)
    served = setup.served_params(params, 0)
    same = lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim)
    listed = weight_sync.moved(setup, setup.engine)
    rows = zip(listed, jax.tree.leaves(left), jax.tree.leaves(served[0]), strict=True)
    for x, before, after in rows:
        assert same(before, x.source) and same(after, x.target)
        assert (x.shape, x.itemsize) == (after.shape, after.dtype.itemsize)
    found = weight_sync.by_format(setup, V5P)["w8a8"]
    nbytes = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    arrived = lambda tree: sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards)
    assert found["distinct_bytes"] == nbytes(served[0])  # sync/bytes, for each sampler
    assert found["bytes"] == arrived(served[0]) and found["passed_on_bytes"] == arrived(served[1])
    on_each = dict.fromkeys(setup.engine.layout.mesh.devices.flat, 0)
    for shard in (s for x in jax.tree.leaves(served[0]) for s in x.addressable_shards):
        on_each[shard.device] += shard.data.nbytes
    assert set(on_each.values()) == {found["device_bytes"]}


def test_bytes_between_hosts_by_hand():
    """16 chips of v5p are four hosts of 200 Gbps. Eight workers get twice what each host has, and a
    worker of one chip has a quarter of a host's rate."""
    send = functools.partial(weight_sync.over_network, 10**9, V5P)
    assert send(8, 4) == {"sent_bytes": 2 * 10**9, "received_bytes": 10**9, "seconds": 2 / 25}
    assert send(8, 1)["seconds"] == 1 / 6.25
    assert send(1, 4) == {"sent_bytes": 10**9 // 4, "received_bytes": 10**9, "seconds": 1 / 25}
    assert weight_sync.over_network(8, Topology.parse("v4:2x2x1"), 1, 4)["seconds"] is None


def test_formats(setup):
    """Full precision is the engine's dtype: of all but the quantised layers it stays."""
    found = weight_sync.by_format(setup, V5P)
    assert list(found) == ["bfloat16", "w8a8"]
    c = setup.model
    matrices = c.embed_dim * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    matrices = c.num_layers * (matrices + 3 * c.embed_dim * c.mlp_dim)
    outputs = c.head_dim * (c.num_heads + 2 * c.num_kv_heads) + 2 * c.embed_dim + 2 * c.mlp_dim
    saved = 2 * matrices - (matrices + 4 * c.num_layers * outputs)
    distinct = {name: x["distinct_bytes"] for name, x in found.items()}
    assert distinct["bfloat16"] - distinct["w8a8"] == saved
    plain = tiny.setup(
        rollout__schedule="one_step", rollout__driver="threads", engine__quantization="none",
    )
    assert list(weight_sync.by_format(plain, V5P)) == ["float32", "w8a8"]
