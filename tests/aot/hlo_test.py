"""Programs whose operations are known by hand, compiled for the CPU and for a TPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from jaxrl_tis.aot import hlo, hlo_groups
from tests import tpu

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("the text of HLO")]

MESH = {"data": 4, "tensor": 2}


@pytest.fixture(params=["cpu", "v5e:2x4"])
def mesh(request):
    devices = jax.devices() if request.param == "cpu" else tpu.devices(request.param)
    return Mesh(np.array(devices).reshape(4, 2), tuple(MESH), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture
def tpu_mesh():
    devices = np.array(tpu.devices("v5e:2x4")).reshape(4, 2)
    return Mesh(devices, tuple(MESH), axis_types=(AxisType.Auto,) * 2)


def array(mesh, shape, dtype=jnp.float32, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def module(f, *args, assumed_trips=1, **options):
    return hlo.Module(jax.jit(f, **options).lower(*args).compile().as_text(), assumed_trips)


def chain(x, w_lij):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w_lij)[0]


# Trip counts and matrix products


def test_a_scanned_product_counts_once_per_trip(mesh):
    m = module(chain, array(mesh, (128, 256)), array(mesh, (6, 256, 256)))
    assert [(loop.trips, loop.kind) for loop in m.loops] == [(6, "exact")]
    [dot] = m.dots()
    assert (dot.flops, dot.runs) == (2 * 128 * 256 * 256, 6)
    assert m.flops() == 6 * 2 * 128 * 256 * 256
    assert dot.result.dims == (128, 256)


def test_nested_loops_multiply(mesh):
    def f(x, w):
        return jax.lax.fori_loop(0, 5, lambda i, x: chain(x, w), x)

    m = module(f, array(mesh, (128, 128)), array(mesh, (3, 128, 128)))
    assert sorted(loop.trips for loop in m.loops) == [3, 5]
    assert m.flops() == 5 * 3 * 2 * 128**3


@pytest.mark.all
@pytest.mark.parametrize("start, limit, step, trips", [(0, 7, 2, 4), (3, 9, 1, 6), (9, 2, -3, 3)])
def test_counters_that_start_and_step_elsewhere(mesh, start, limit, step, trips):
    compare = jnp.less if step > 0 else jnp.greater

    def f(x, w):
        running = lambda carry: compare(carry[0], limit)
        return jax.lax.while_loop(running, lambda c: (c[0] + step, c[1] @ w), (start, x))[1]

    m = module(f, array(mesh, (128, 128)), array(mesh, (128, 128)))
    assert m.loops[0].trips == trips and m.flops() == trips * 2 * 128**3


def test_a_loop_that_may_end_earlier_is_a_bound(mesh):
    def f(x, w):
        running = lambda carry: (carry[0] < 5) & jnp.any(carry[1] > 0)
        return jax.lax.while_loop(running, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1]

    m = module(f, array(mesh, (128, 128)), array(mesh, (128, 128)))
    assert [(loop.trips, loop.kind) for loop in m.loops] == [(5, "bound")]


def test_a_loop_without_a_known_count_takes_the_given_one(mesh):
    def f(x, w, n):
        return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1]

    args = array(mesh, (128, 128)), array(mesh, (128, 128)), array(mesh, (), jnp.int32)
    m = module(f, *args, assumed_trips=11)
    assert [(loop.trips, loop.kind) for loop in m.loops] == [(11, "assumed")]
    assert m.flops() == 11 * 2 * 128**3


@pytest.mark.all
@pytest.mark.parametrize("equation, left, right, flops", [
    ("bik,bkj->bij", (8, 16, 128), (8, 128, 32), 2 * 8 * 16 * 128 * 32),
    ("bnsk,bngk->bnsg", (4, 2, 256, 128), (4, 2, 8, 128), 2 * 4 * 2 * 256 * 8 * 128),
    ("bd,dhk->bhk", (32, 64), (64, 4, 128), 2 * 32 * 64 * 4 * 128),
])
def test_batched_products_count_each_batch_once(mesh, equation, left, right, flops):
    f = lambda x, y: jnp.einsum(equation, x, y)
    m = module(f, array(mesh, left), array(mesh, right))
    assert m.flops() == flops


def test_flops_are_those_of_one_device(mesh):
    m = module(jnp.dot, array(mesh, (256, 128), jnp.float32, "data"), array(mesh, (128, 128)))
    assert m.flops() == 2 * (256 // 4) * 128 * 128


def test_taps_on_padding_are_no_multiplications(mesh):
    def f(x, w):
        numbers = ("NTC", "TIO", "NTC")
        return jax.lax.conv_general_dilated(x, w, (1,), [(2, 2)], dimension_numbers=numbers)

    # Width 3, padded by 2 on each side of 10: 12 outputs, of which the outer 2 + 2 lose 2 + 1 taps.
    m = module(f, array(mesh, (1, 10, 16)), array(mesh, (3, 16, 32)))
    assert m.flops() == 2 * 16 * 32 * (12 * 3 - 2 * (2 + 1))


@pytest.mark.all
def test_operand_dtypes_precision_and_what_they_were_cast_from(tpu_mesh):
    x = array(tpu_mesh, (256, 512), jnp.bfloat16)
    w8, w32 = (array(tpu_mesh, (512, 512), d) for d in (jnp.int8, jnp.float32))
    [dot] = module(lambda x, w: x @ w.astype(x.dtype), x, w8).dots()
    assert [s.dtype for s in dot.sources] == ["bf16", "s8"]
    [dot] = module(lambda x, w: x @ w.astype(x.dtype) ** 2, x, w8).dots()
    assert [s.dtype for s in dot.operands] == ["bf16", "bf16"]
    assert [s.dtype for s in dot.sources] == ["bf16", "s8"]
    product = lambda precision: lambda x, w: jnp.dot(x, w, precision=precision)
    highest = module(product("highest"), w32, w32).dots()
    default = module(product(None), w32, w32).dots()
    assert [d.precision for d in highest] == ["highest"]
    assert [d.precision for d in default] == ["default"]


def test_a_cast_that_is_not_fused_is_its_own_source(tpu_mesh):
    """What the source of a weight must not look like: here a barrier makes the cast an array."""
    def f(x, w):
        return x @ jax.lax.optimization_barrier(w.astype(x.dtype))

    m = module(f, array(tpu_mesh, (256, 512), jnp.bfloat16), array(tpu_mesh, (512, 512), jnp.int8))
    assert [s.dtype for s in m.dots()[0].sources] == ["bf16", "bf16"]
    assert any(str(b.shape) == "bf16[512,512]" for b in m.buffers())


# Collectives


@pytest.mark.all
@pytest.mark.parametrize("axes", [("data",), ("tensor",), ("data", "tensor")])
def test_a_psum_names_its_axes(mesh, axes):
    def f(x):
        inner = lambda x: jax.lax.fori_loop(0, 3, lambda i, x: jax.lax.psum(x, axes) * 0.5, x)
        return jax.shard_map(
            inner, mesh=mesh, in_specs=P("data", "tensor"), out_specs=P("data", "tensor"),
            check_vma=False,
        )(x)

    [c] = module(f, array(mesh, (64, 256), jnp.float32, "data", "tensor")).collectives(MESH)
    assert (c.kind, c.axes, c.runs, c.network) == ("all-reduce", axes, 3, "ici")
    assert c.bytes == 16 * 128 * 4
    assert c.group_size == {("data",): 4, ("tensor",): 2}.get(axes, 8)


def test_without_a_mesh_axes_have_no_names(mesh):
    f = jax.shard_map(
        lambda x: jax.lax.psum(x, "tensor"), mesh=mesh, in_specs=P("data", "tensor"),
        out_specs=P("data", None), check_vma=False)
    m = module(f, array(mesh, (64, 256), jnp.float32, "data", "tensor"))
    assert [(c.axes, c.group_size) for c in m.collectives()] == [((), 2)]
    assert m.num_devices == 8


def test_gather_scatter_and_permute(mesh):
    def f(x):
        gathered = jax.lax.all_gather(x, "data", tiled=True)
        scattered = jax.lax.psum_scatter(jnp.sin(gathered), "data", tiled=True)
        return jax.lax.ppermute(scattered, "tensor", [(0, 1), (1, 0)])

    spec = P("data", "tensor")
    f = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    found = module(f, array(mesh, (1024, 256), jnp.float32, *spec)).collectives(MESH)
    full = 1024 * 128 * 4  # of one device's columns
    assert {(c.kind, c.axes, c.bytes) for c in found} == {
        ("all-gather", ("data",), full), ("reduce-scatter", ("data",), full),
        ("collective-permute", ("tensor",), full // 4),
    }


def test_an_asynchronous_chain_counts_once(tpu_mesh):
    """The gathers of a backward scan overlap with its products: start, part and end name one."""
    def loss(w, x):
        return jnp.sum(jax.checkpoint(chain)(x, w).astype(jnp.float32))

    w = array(tpu_mesh, (6, 512, 512), jnp.bfloat16, None, "data")
    x = array(tpu_mesh, (512, 512), jnp.bfloat16, "data")
    m = module(jax.grad(loss), w, x)
    assert any(c.target == "AsyncCollectiveStart" for c in m.custom_calls())
    gathers = [c for c in m.collectives(MESH) if c.kind == "all-gather"]
    assert [(c.runs, c.axes, c.bytes) for c in gathers] == [(6, ("data",), 512 * 512 * 2)] * 2


@pytest.mark.parametrize("text, groups", [
    ("replica_groups={{0,1},{2,3}}, x=1", [{0, 1}, {2, 3}]),
    ("replica_groups={}, x=1", [{0, 1, 2, 3}]),
    ("replica_groups=[2,2]<=[4], x=1", [{0, 1}, {2, 3}]),
    ("replica_groups=[2,2]<=[2,2]T(1,0), x=1", [{0, 2}, {1, 3}]),
    ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x=1", [{0, 1}, {2, 3}]),
    ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x=1", [{0, 2}, {1, 3}]),
    ("replica_groups=mesh['a'=2,'b'=1,'c'=2] {'a','b'}, x=1", [{0, 2}, {1, 3}]),
    ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, x=1", [{0, 1}, {2, 3}]),
    ("source_target_pairs={{0,1},{1,0},{3,2},{2,3}}, x=1", [{0, 1}, {2, 3}]),
    ("source_target_pairs={{0,1},{2,3},{1,2},{3,0}}, x=1", [{0, 1, 2, 3}]),
])
def test_spellings_of_replica_groups(text, groups):
    found = hlo_groups.replica_groups(f"channel_id=1, {text}", 4)
    assert found == frozenset(map(frozenset, groups))


def test_parts_of_an_axis_are_refused():
    with pytest.raises(ValueError, match="parts of axes"):
        hlo_groups.replica_groups("replica_groups=mesh['a'=4] {'a':(1)2}, x", 4)


def test_axes_of_groups():
    axes = lambda groups: hlo_groups.mesh_axes(
        frozenset(map(frozenset, groups)), {"data": 2, "fsdp": 1, "tensor": 2})
    assert axes([{0, 1}, {2, 3}]) == ("tensor",)
    assert axes([{0, 2}, {1, 3}]) == ("data",)
    assert axes([{0, 1, 2, 3}]) == ("data", "tensor")
    assert axes([{0, 3}, {1, 2}]) == ()
    of_slice = frozenset([frozenset(range(4))])  # of the first of two slices
    assert hlo_groups.mesh_axes(of_slice, {"slice": 2, "data": 2, "tensor": 2}) == ("data", "tensor")


def test_traffic_between_slices_is_named(tpu_mesh):
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x2", num_slices=2).devices
    names = ("slice", "data", "tensor")
    mesh = Mesh(np.array(devices).reshape(2, 2, 2), names, axis_types=(AxisType.Auto,) * 3)
    both = lambda x: (jax.lax.psum(x, "slice"), jax.lax.psum(x, "tensor"))
    f = jax.shard_map(
        both, mesh=mesh, in_specs=P("slice", "data"),
        out_specs=(P(None, "data"), P("slice", "data")), check_vma=False)
    m = module(f, array(mesh, (512, 512), jnp.float32, "slice", "data"))
    found = {(c.kind, c.network, c.axes, c.bytes) for c in m.collectives(dict(mesh.shape))}
    assert found == {
        ("all-reduce", "dcn", (), 256 * 256 * 4),
        ("all-reduce", "ici", ("tensor",), 256 * 256 * 4),
    }
    assert m.host_transfers() == []


def test_a_ragged_exchange_counts_the_rows_of_an_even_load(tpu_mesh):
    """The buffer of a device has room for the rows of all four, 4 x 64 of 128 floats."""
    def move(x, sizes):
        sizes = sizes[0]
        buffer = jnp.zeros((256, 128), jnp.float32)
        return jax.lax.ragged_all_to_all(
            x, buffer, sizes, sizes, sizes, sizes, axis_name="data"
        )

    for f in (move, lambda x, sizes: move(move(x, sizes), sizes)[:64]):
        f = jax.shard_map(f, mesh=tpu_mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
        m = module(f, array(tpu_mesh, (256, 128), jnp.float32, "data"),
                   array(tpu_mesh, (4, 4), jnp.int32, "data"))
        first, *_ = m.collectives(MESH)
        assert (first.kind, first.axes, first.bytes) == ("ragged-all-to-all", ("data",), 64 * 128 * 4)


# Arrays, aliases, the host, kernels


@pytest.mark.all
def test_donated_arguments(mesh):
    x = array(mesh, (64, 128))
    y = array(mesh, (32, 128), jnp.int32)
    f = lambda a, b: (a + 1, b * 2)
    [alias] = module(f, x, y, donate_argnums=(1,)).aliases()
    assert (alias.output, alias.parameter, str(alias.shape)) == ((1,), 1, "s32[32,128]")
    assert module(f, x, y).aliases() == []


@pytest.mark.all
def test_buffers_outside_fusions(tpu_mesh):
    def f(x, w):
        return jnp.sort(x @ w, axis=-1)[:, :4]

    m = module(f, array(tpu_mesh, (512, 256)), array(tpu_mesh, (256, 8192)))
    sizes = [str(b.shape) for b in m.buffers()]
    assert "f32[512,8192]" in sizes
    x = array(tpu_mesh, (512, 256))
    fused = module(lambda x, w: jnp.max(x * w), x, x)
    assert all(b.shape.size < 512 * 256 or b.opcode == "copy-start" for b in fused.buffers())


@pytest.mark.all
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_updates_in_place_are_marked(tpu_mesh, dtype):
    """Those of int8 too, which a fusion sees in smaller tiles."""
    def f(cache, row):
        fresh = lambda i: (row + i).astype(dtype)
        write = lambda i, c: jax.lax.dynamic_update_index_in_dim(c, fresh(i), i, 0)
        return jax.lax.fori_loop(0, 3, write, cache)

    args = (array(tpu_mesh, shape, jnp.dtype(dtype)) for shape in ((512, 128, 512), (128, 512)))
    args = tuple(args)
    whole = lambda m: [b for b in m.buffers() if b.shape.dims == (512, 128, 512)]
    in_place = whole(module(f, *args, donate_argnums=(0,)))
    assert in_place and all(b.in_place for b in in_place)
    copied = whole(module(f, *args))  # the argument must stay as it was
    assert not all(b.in_place for b in copied)


@pytest.mark.all
def test_host_transfers(mesh):
    def f(x):
        jax.debug.callback(lambda x: None, x)
        return x + 1

    assert module(f, array(mesh, (8, 128))).host_transfers()
    assert module(lambda x: x + 1, array(mesh, (8, 128))).host_transfers() == []


def test_a_pallas_kernel_is_listed(tpu_mesh):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def double(x, cost):
        call = pl.pallas_call(
            kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), cost_estimate=cost, name="double")
        return jax.lax.fori_loop(0, 4, lambda i, x: call(x), x)

    cost = pl.CostEstimate(flops=77, transcendentals=0, bytes_accessed=0)
    one = Mesh(tpu_mesh.devices[:1, :1], tuple(MESH), axis_types=(AxisType.Auto,) * 2)
    for given in (cost, None):
        m = module(lambda x, given=given: double(x, given), array(one, (8, 128)))
        [call] = [c for c in m.custom_calls() if c.target == hlo.MOSAIC]
        assert call.runs == 4 and "double" in call.op_name + call.name
        assert call.flops == (77 if given else None)


def test_a_gather_of_several_arrays_that_starts_by_itself_writes_its_results():
    module = hlo.Module("""HloModule m, num_partitions=4
ENTRY %main (a: f32[8], b: f32[1024]) -> f32[32] {
  %a = f32[8]{0} parameter(0)
  %b = f32[1024]{0} parameter(1)
  %s = ((f32[8]{0}, f32[1024]{0}), (f32[32]{0}, f32[4096]{0})) all-gather-start(%a, %b), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  %d = (f32[32]{0}, f32[4096]{0}) all-gather-done(%s)
  ROOT %r = f32[32]{0} get-tuple-element(%d), index=0
}
""")
    [gather] = module.collectives()
    assert [x.dims for x in gather.shapes] == [(32,), (4096,)] and gather.bytes == 4 * (32 + 4096)
