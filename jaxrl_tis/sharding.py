"""One mesh shape to train and one to serve, over the same logical axes of the parameters.

A rule table maps every logical axis name to a mesh axis (or a tuple of them, or None). Moving
parameters from one table to the other is `moved`.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_tis.fields import logical_axes

MESH_AXES = ("data", "fsdp", "tensor", "context", "expert")
# libtpu makes an all-reduce of a reduce-scatter, and on v5p of a gather, among more devices of a
# mesh axis. In stages among at most so many it does not, and a device sends as many bytes.
STAGE = 8
HOST_MEMORY = "pinned_host"

TRAIN_RULES = {
    "batch": ("data", "fsdp", "expert"),
    "length": "context",
    "layers": None,
    "norm": None,
    "router": None,
    "vocab": "tensor",
    "embed": ("fsdp", "expert"),
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "expert": "expert",
    "expert_embed": "fsdp",
}
SERVE_RULES = {
    "batch": ("data", "fsdp", "expert"),
    "length": None,
    "positions": "context",
    "layers": None,
    "norm": None,
    "router": None,
    "vocab": "tensor",
    "embed": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "expert": "expert",
    "expert_embed": None,
}


def make_mesh(shape: tuple[int, ...], devices: list | None = None) -> Mesh:
    """Makes the mesh (data, fsdp, tensor, context, expert) over the first devices. The last two may
    be left out and are 1 then. One entry may be -1 and takes all that are left."""
    shape = (*shape, *(1,) * (len(MESH_AXES) - len(shape)))
    devices = jax.devices() if devices is None else devices
    known = math.prod(n for n in shape if n != -1)
    free = list(shape).count(-1)
    if free > 1 or min(shape) < -1 or known < 1 or known > len(devices) or (
        free and len(devices) % known
    ):
        raise ValueError(
            f"mesh {dict(zip(MESH_AXES, shape, strict=True))} does not fit {len(devices)} devices; "
            "the product must be at most the device count, and with one entry -1 it must divide it"
        )
    shape = tuple(len(devices) // known if n == -1 else n for n in shape)
    used = np.array(devices[: math.prod(shape)])
    idle = {d.process_index for d in devices} - {d.process_index for d in used}
    if idle and jax.process_count() > 1:  # a described topology may be left unused in part
        raise ValueError(
            f"mesh {dict(zip(MESH_AXES, shape, strict=True))} leaves out the devices of process "
            f"{min(idle)}; make it large enough to use devices of every process"
        )
    return Mesh(used.reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def partition_spec(axes: tuple, rules: dict) -> PartitionSpec:
    """Returns the mesh axes of an array from its logical axes; an unknown or doubly used axis is an
    error."""
    unknown = [a for a in axes if a is not None and a not in rules]
    if unknown:
        raise ValueError(f"logical axes {unknown} have no rule; known are {sorted(rules)}")
    spec = [None if a is None else rules[a] for a in axes]
    used = [m for entry in spec if entry for m in ((entry,) if isinstance(entry, str) else entry)]
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {axes} use a mesh axis twice: {spec}")
    return PartitionSpec(*spec)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with its rule table, and the dtype in which its devices sum the gradients of their
    rows."""

    mesh: Mesh
    rules_items: tuple
    grad_reduce_dtype: str = "float32"

    @property
    def rules(self) -> dict:
        return dict(self.rules_items)

    @property
    def shards(self) -> int:
        """How many parts the rows of a batch are cut into."""
        return math.prod(self.mesh.shape[a] for a in TRAIN_RULES["batch"] or ())

    @property
    def row_shards(self) -> int:
        """How many parts a row is cut into, see `balanced_order`."""
        return math.prod(self.mesh.shape[a] for a in self.axes("length"))

    @property
    def row_unit(self) -> int:
        """Rows have a multiple of so many tokens, see `row_unit`."""
        return row_unit(self.row_shards)

    def whole_row(self, length: int) -> int:
        """Returns the length of the shortest row that holds so many tokens."""
        return -(-length // self.row_unit) * self.row_unit

    @property
    def is_shared(self) -> bool:
        """Whether the layout has devices of several processes."""
        return self.mesh.is_multi_process

    @property
    def platform(self) -> str:
        """The platform of its devices, such as "cpu"."""
        return self.mesh.devices.flat[0].platform

    def sharding(self, axes: tuple) -> NamedSharding:
        return NamedSharding(self.mesh, partition_spec(axes, self.rules))

    def axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes that a logical axis is cut over."""
        (entry,) = partition_spec((name,), self.rules)
        return (entry,) if isinstance(entry, str) else tuple(entry or ())

    def count(self, axes: tuple[str, ...]) -> int:
        """Counts the parts that these mesh axes cut an array into."""
        return math.prod(self.mesh.shape[a] for a in axes)

    # Rows that are cut

    def balanced(self, x: jax.Array, lead: int = 0) -> jax.Array:
        """Returns the tokens of rows [B,T,...], behind `lead` other axes, in `balanced_order`. A
        device sends half of its tokens to each of two others, and the gradient comes back so."""
        return x if self.row_shards == 1 else _exchange(self, lead, True, x)

    def in_order(self, x: jax.Array, lead: int = 0) -> jax.Array:
        """Returns the tokens of rows in `balanced_order` as the rows have them."""
        return x if self.row_shards == 1 else _exchange(self, lead, False, x)

    # Inside a shard_map over all of the mesh

    def gather(self, x: jax.Array, axis: int, logical: str = "embed") -> jax.Array:
        """Joins, along an axis of x, the parts of the devices that a logical axis is cut over."""
        for name in reversed(self.axes(logical)):
            for groups in reversed(stages(self.mesh.shape[name])):
                x = jax.lax.all_gather(x, name, axis=axis, tiled=True, axis_index_groups=groups)
        return x

    def scatter(self, x: jax.Array, axis: int, logical: str = "embed") -> jax.Array:
        """Sums x over those devices in `grad_reduce_dtype`; of an axis each keeps its own part."""
        summed = x.astype(self.grad_reduce_dtype)
        for name in self.axes(logical):
            for groups in stages(self.mesh.shape[name]):
                summed = jax.lax.psum_scatter(
                    summed, name, scatter_dimension=axis, tiled=True, axis_index_groups=groups
                )
        return summed.astype(x.dtype)

    def summed(self, x: jax.Array, logical: str | None) -> jax.Array:
        """Sums x over the devices that a logical axis is cut over; None sums over no devices."""
        axes = self.axes(logical) if logical else ()
        return jax.lax.psum(x, axes) if self.count(axes) > 1 else x

    def sum_rows(self, x: jax.Array, cut: tuple[str, ...] = ("embed",)) -> jax.Array:
        """Sums a weight's gradient in `grad_reduce_dtype` over the devices with other tokens that
        its logical axes `cut` are not cut over."""
        tokens = self.axes("batch") + self.axes("length")
        own = {a for name in cut for a in self.axes(name)}
        rest = tuple(a for a in tokens if a not in own and self.mesh.shape[a] > 1)
        return jax.lax.psum(x.astype(self.grad_reduce_dtype), rest).astype(x.dtype) if rest else x

    def constrain(self, x: jax.Array, axes: tuple) -> jax.Array:
        """Pins an activation inside jit; nothing to pin on one device."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, self.sharding(axes))

    def shard(self, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Returns f, run on every device on its part of the arguments, or f itself on one
        device."""
        if self.mesh.size == 1:
            return f
        return jax.shard_map(
            f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def inside(self) -> "Layout | None":
        """Returns the layout of one part of the rows, as the functions that `by_parts` calls see
        it."""
        if self.mesh.shape["tensor"] * self.mesh.shape["context"] == 1:
            return None
        rules = self.rules | dict.fromkeys(("batch", "embed", "expert", "expert_embed"))
        return dataclasses.replace(self, rules_items=tuple(rules.items()))

    def by_parts(self, f: Callable[[Any, Any], Any], params: Any, rows: Any) -> Any:
        """Computes f(params, rows) on each device for its part of the rows [B,...]; every device
        gets all of the results [B,...].

        The gradients for params are added up over the parts two by two, in the order of the rows:
        no sum is left to the collectives of a backend, which add in an order of their own. A device
        holds all of the gradient.
        """
        axes = self.rules["batch"]

        def place(x, *first):
            free = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - len(first))
            spec = PartitionSpec(*first, *free)
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

        @jax.custom_vjp
        def copies(x):
            return place(jnp.broadcast_to(x[None], (self.shards, *x.shape)), axes)

        def add(_, x):
            while len(x) > 1:
                half = len(x) // 2
                x = jnp.concatenate([x[:half] + x[half : 2 * half], x[2 * half :]])
            return (jax.lax.with_sharding_constraint(x[0], self.replicated()),)

        copies.defvjp(lambda x: (copies(x), None), add)
        cut = lambda x: place(x.reshape(self.shards, -1, *x.shape[1:]), axes)
        parts = jax.vmap(f, spmd_axis_name=axes)(
            jax.tree.map(copies, params), jax.tree.map(cut, rows)
        )
        join = lambda x: x.reshape(-1, *x.shape[2:])
        return jax.lax.with_sharding_constraint(jax.tree.map(join, parts), self.replicated())

    def everywhere(self, f: Callable[[Any, Any], tuple]) -> Callable[[Any, Any], tuple]:
        """Returns f: (scores, inputs) -> (value, others), as every device computes it by itself from
        all of its arguments; its gradient is that for the scores."""
        spec = PartitionSpec()
        run = jax.shard_map(
            jax.value_and_grad(f, has_aux=True), mesh=self.mesh, in_specs=spec, out_specs=spec,
            check_vma=False,
        )
        call = jax.custom_vjp(lambda scores, inputs: run(scores, inputs)[0])

        def scaled(gradient, bars):
            return jax.tree.map(lambda x: x * bars[0], gradient), None

        call.defvjp(run, scaled)
        return call

    def put(self, x: np.ndarray, axes: tuple) -> jax.Array:
        """Places values that every process has in full onto the mesh."""
        return jax.make_array_from_process_local_data(self.sharding(axes), x, x.shape)

    def put_batch(self, batch: dict[str, Any]) -> dict[str, jax.Array]:
        """Puts fields [accumulation, rows, ...] of micro-batches from the host onto the mesh."""
        return {name: self.put(x, logical_axes(name, x.ndim)) for name, x in batch.items()}

    def fetch(self, x: jax.Array | np.ndarray) -> np.ndarray:
        """Returns all of an array on the host, on every process."""
        if isinstance(x, np.ndarray) or x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        return np.asarray(_replicate(self.replicated())(x))

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


def row_unit(shards: int) -> int:
    """Returns the number of equal chunks of a row in so many parts: two for each, see `balanced_order`."""
    return 2 * shards if shards > 1 else 1


@functools.cache
def balanced_order(length: int, shards: int) -> np.ndarray:
    """Returns the place in its row [T] of each token, as the shards of a row have them one after the
    other: of 2n equal chunks shard i of n has the chunks i and 2n - 1 - i. A token attends to the
    tokens before it, so all shards then have the same work."""
    chunks = np.arange(length, dtype=np.int32).reshape(2 * shards, -1)
    return np.stack([chunks[:shards], chunks[::-1][:shards]], axis=1).reshape(-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _exchanged(layout: Layout, lead: int, to_balanced: bool, x: jax.Array) -> jax.Array:
    """Returns `Layout.balanced` of x, or `Layout.in_order`."""
    n, (name,) = layout.row_shards, layout.axes("length")
    spec = PartitionSpec(*(None,) * (lead + 1), name)

    def local(x):
        # A device has one even and one odd chunk in either order: 2i and 2i + 1 of the row, and
        # first its even or first its odd one of the balanced order.
        is_even = jax.lax.axis_index(name) % 2 == 0
        choose = lambda a, b: (jnp.where(is_even, a, b), jnp.where(is_even, b, a))
        first, second = jnp.split(x, 2, axis=lead + 1)
        parts = (first, second) if to_balanced else choose(first, second)
        sent = []
        for parity, part in enumerate(parts):
            owner = lambda i, parity=parity: min(2 * i + parity, 2 * n - 1 - (2 * i + parity))
            pairs = [(i, owner(i)) if to_balanced else (owner(i), i) for i in range(n)]
            sent.append(jax.lax.ppermute(part, name, pairs))
        return jnp.concatenate(choose(*sent) if to_balanced else sent, axis=lead + 1)

    return jax.shard_map(
        local, mesh=layout.mesh, in_specs=spec, out_specs=spec, axis_names={name}, check_vma=False
    )(x)


def _exchanged_bwd(layout, lead, to_balanced, _, gradient):
    return (_exchanged(layout, lead, not to_balanced, gradient),)


_exchanged.defvjp(lambda *args: (_exchanged(*args), None), _exchanged_bwd)
_exchange = jax.jit(_exchanged, static_argnums=(0, 1, 2))  # a part of the mesh's axes needs a jit


Box = tuple[tuple[int, int], ...]  # first index and end, for each axis of an array


def device_bytes(tree: Any) -> int:
    """Returns the bytes of arrays, or of their shapes, on one device; without a sharding they count whole."""
    return sum(_shard_bytes(x) for x in jax.tree.leaves(tree))


def _shard_bytes(x: Any) -> int:
    sharding = getattr(x, "sharding", None)
    if sharding is not None and sharding.memory_kind == HOST_MEMORY:
        return 0
    shape = sharding.shard_shape(x.shape) if sharding is not None else x.shape
    return math.prod(shape) * x.dtype.itemsize


def moved(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Copies an array to another mesh with this sharding.

    Where the two meshes cut it differently, `jax.device_put` copies all of it to the host and back.
    Here each device is sent the pieces of its part, and joins them.
    """
    if not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    there = {d: box_of(i, x.shape) for d, i in sharding.devices_indices_map(x.shape).items()}
    here = {box_of(shard.index, x.shape): shard.data for shard in x.addressable_shards}
    if here.keys() >= set(there.values()):
        return jax.device_put(x, sharding)
    parts = [_part(here, wanted, device) for device, wanted in there.items()]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Returns where a shard begins and ends, along each axis."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def common(a: Box, b: Box) -> Box | None:
    """Returns what two boxes share, None if they share nothing."""
    both = tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))
    return both if all(first < end for first, end in both) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Returns the index of a box in an array that holds `outer`."""
    return tuple(slice(i - first, j - first) for (i, j), (first, _) in zip(box, outer, strict=True))


def _part(shards: dict[Box, jax.Array], wanted: Box, device: jax.Device) -> jax.Array:
    """Returns what is in a box, on one device; `shards` by their boxes are a grid that covers it."""
    pieces = {}
    for own, shard in shards.items():
        if (shared := common(own, wanted)) is not None:
            low, high = zip(*((part.start, part.stop) for part in within(shared, own)), strict=True)
            pieces[tuple(a for a, _ in shared)] = jax.device_put(_slice(shard, low, high), device)
    for axis, (first, _) in enumerate(wanted):
        rows = collections.defaultdict(list)
        for start, piece in sorted(pieces.items(), key=lambda found: found[0]):
            rows[(*start[:axis], first, *start[axis + 1 :])].append(piece)
        join = lambda row, axis=axis: row[0] if len(row) == 1 else jnp.concatenate(row, axis)
        pieces = {start: join(row) for start, row in rows.items()}
    [whole] = pieces.values()
    return whole


_slice = jax.jit(jax.lax.slice, static_argnums=(1, 2))


@functools.cache
def stages(count: int) -> list[list[list[int]] | None]:
    """Returns, for `count` devices in a row, the groups of each stage of a reduce-scatter; a gather
    takes them in reverse. One group of all is None."""
    if count <= STAGE:
        return [None]
    sizes, rest = [], count
    while rest > 1:
        left = math.ceil(math.log(rest, STAGE) - 1e-9)
        size = next(n for n in range(1, rest + 1) if rest % n == 0 and n**left >= rest)
        sizes.append(size)
        rest //= size
    ids = np.arange(count).reshape(sizes)
    return [np.moveaxis(ids, i, -1).reshape(-1, size).tolist() for i, size in enumerate(sizes)]


@functools.cache
def _replicate(everywhere: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=everywhere)


def layout(
    shape: tuple[int, ...], rules: dict, devices: list | None = None, vocab_size: int = 0,
    grad_reduce_dtype: str = "float32",
) -> Layout:
    """Makes the mesh under the rules. Where its tensor shards do not divide a vocabulary of
    `vocab_size` tokens, each stores all of it."""
    mesh = make_mesh(shape, devices)
    if vocab_size % mesh.shape["tensor"]:
        rules = rules | {"vocab": None}
    if mesh.shape["expert"] == 1:
        rules = {name: _without_experts(entry) for name, entry in rules.items()}
    return Layout(mesh, tuple(rules.items()), grad_reduce_dtype)


def _without_experts(entry: Any) -> Any:
    """Returns the mesh axes of a rule without "expert"; of one axis its name, as a rule has it."""
    names = (entry,) if isinstance(entry, str) else entry or ()
    left = tuple(name for name in names if name != "expert")
    return left if len(left) > 1 else (left[0] if left else None)


def single_device() -> Layout:
    return layout((1, 1, 1), SERVE_RULES, jax.devices()[:1])
