"""Serving parameters: the learner's parameters, cast or quantised, then moved to the engine.

The base of adapted parameters is quantised at the first sync, and kept for as long as something
serves it. A later sync moves float32 factors and their fingerprint alone. Nothing is merged.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_tis import sharding
from jaxrl_tis.models import lora, placement, quant, transformer, transforms
from jaxrl_tis.models.config import STACKS, ModelConfig, by_stack
from jaxrl_tis.runtime import fingerprint
from jaxrl_tis.sharding import Layout


# Weights of one matrix: those of experts gain nothing.
TRANSPOSED = tuple(name for name in quant.QUANTIZED if not name.startswith("expert_"))
FLOAT32 = ("router", "router_bias", "router_logits_bias")  # in every engine


class Weights:
    """Makes serving parameters for one engine.

    Args:
      inject: an artificial change of the learner's parameters, applied first, see injection.py.
      is_joined: serve q, k and v of a layer as one matrix, see `transformer.joined`.

    Attributes:
      shardings: of the serving parameters, in their tree.
    """

    def __init__(
        self, config: ModelConfig, recipe: quant.Recipe, program: transformer.Program, unroll: bool,
        inject: Callable[[transformer.Params], transformer.Params] = lambda params: params,
        is_joined: bool = False,
    ):
        self._config, self._recipe, self._program = config, recipe, program
        self._inject, self._is_joined = inject, is_joined
        assert program.layout is not None
        self._layout, self._unroll = program.layout, unroll
        on_cpu = self._layout.platform == "cpu"
        self._is_transposed = unroll and on_cpu and not program.is_invariant
        self._axes = transformer.logical_axes(config, is_joined)
        rules = self._layout.rules
        self._by_column = dataclasses.replace(
            self._layout, rules_items=tuple((rules | {"embed": rules["batch"]}).items())
        )
        self.shardings = self.shardings_in(self._layout)
        self._loader = functools.cache(self._load_from)
        self._factor_loader = functools.cache(self._make_factor_loader)
        self._base: _Kept | None = None

    def load(
        self, params: transformer.Params, noise: transforms.Noise | None = None
    ) -> transformer.Params:
        """Returns the serving parameters. Noise, cast and quantisation run on the devices of the
        parameters, and only the result is moved. Parameters without a mesh are laid out for serving
        first.

        Sent and received arrays are compared by their fingerprints on each device.

        Raises:
          RuntimeError: they differ.
        """
        factors, base = lora.split(params)
        if base is None:
            return self._load(params, noise)
        if self._is_joined:
            raise ValueError(
                "EngineConfig.joins_qkv is set, and the parameters have factors of LoRA for each of q, k and v; "
                "leave it False"
            )
        adapter = lora.adapter_of(params, self._config)
        served = self._kept_base(base, lambda: self._load(base, noise))
        return adapter.join(served, self._load_factors(adapter, factors))

    def receive(self, served: transformer.Params) -> transformer.Params:
        """Returns the serving parameters of another engine on the devices of this one. The base of
        adapted ones is moved once."""
        factors, base = lora.split(served)
        if base is None:
            return jax.device_put(served, self.shardings)
        adapter = lora.adapter_of(served, self._config)

        def moved():
            here = jax.device_put(base, self.shardings)
            fingerprint.check(here, fingerprint.hex(fingerprint.digest(base)))
            return here

        here = self._kept_base(base, moved)
        return adapter.join(here, jax.device_put(factors, self.factor_shardings(adapter)))

    def _kept_base(self, base: Any, make: Callable[[], Any]) -> Any:
        """Returns make(), or what it returned for the same base while something still serves that."""
        served = self._base.served(base) if self._base is not None else None
        if served is None:
            served = make()
            self._base = _Kept.of(base, served)
        return served

    def factor_shardings(self, adapter: lora.Adapter) -> Any:
        """Returns the shardings of the served factors, in their tree."""
        return self._unrolled(placement.of_factors(self._layout, adapter), lambda s: NamedSharding(
            s.mesh, PartitionSpec(*s.spec[1:])
        ))

    def abstract_factors(self, adapter: lora.Adapter) -> Any:
        """Returns the shapes and shardings of the served factors."""
        shapes = self._unrolled(placement.abstract_factors(adapter), lambda x: (
            jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        ))
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes, self.factor_shardings(adapter),
        )

    def _unrolled(self, factors: Any, of_layer: Callable[[Any], Any]) -> Any:
        """Returns a tree of factors in the layout of the serving parameters."""
        if not self._unroll:
            return factors
        outer = {n: x for n, x in factors.items() if n not in STACKS}
        home = {i: s for s, indices in self._config.stacks.items() for i in indices}
        layers = tuple(
            jax.tree.map(of_layer, factors.get(home[i], {})) for i in range(self._config.num_layers)
        )
        return outer | {"layers": layers}

    def factor_digest(self, params: transformer.Params) -> str:
        """Returns the fingerprint that the served factors of adapted parameters must have."""
        adapter = lora.adapter_of(params, self._config)
        return fingerprint.hex(self._factor_loader(adapter)(lora.split(params)[0])[1])

    def _load_factors(self, adapter: lora.Adapter, factors: Any) -> Any:
        """Returns the factors as they are served, each device's copy checked by its fingerprint."""
        served, sent = self._factor_loader(adapter)(factors)
        served = jax.device_put(served, self.factor_shardings(adapter))
        fingerprint.check(served, fingerprint.hex(sent))
        return served

    def _make_factor_loader(self, adapter: lora.Adapter) -> Any:
        """Returns the jitted function of the factors: (as they are served, their fingerprint)."""

        def load(factors):
            # Copies: an update donates the factors of the learner.
            if not self._unroll:
                served = jax.tree.map(jnp.copy, factors)
            else:
                stacks = {s: factors.get(s, {}) for s in self._config.stacks}
                outer = {n: jax.tree.map(jnp.copy, x) for n, x in factors.items() if n not in STACKS}
                served = transformer.unstack(outer | stacks, self._config)
            return served, fingerprint.digest(served)

        return jax.jit(load, compiler_options=self._program.compiler_options)

    def _load(self, params, noise=None):
        homes = _homes(params)
        if not homes:
            params = placement.put(params, self._layout, self._config)
            homes = tuple(jax.tree.leaves(placement.shardings(self._layout, self._config)))
        served, sent = self._loader(homes)(params, noise)
        if not self._holds(homes):
            served = jax.tree.map(sharding.moved, served, self.shardings)
        if sent is not None:
            fingerprint.check(served, fingerprint.hex(sent))
        return served

    def loader(self, params: transformer.Params) -> Any:
        """Returns the jitted function of `load` for (maybe abstract) parameters with these shardings.
        It returns (the serving parameters, their fingerprint before the move). The fingerprint is
        None on a single device, where nothing is moved."""
        return self._loader(_homes(params))

    def _load_from(self, homes: tuple[NamedSharding, ...]) -> Any:
        is_moved = self._layout.mesh.size > 1 or not self._holds(homes)

        def load(params, noise=None):
            served = self._serve(homes, params, noise)
            return served, fingerprint.digest(served) if is_moved else None

        return jax.jit(
            load,
            out_shardings=(
                self.shardings if self._holds(homes) else None,
                NamedSharding(homes[0].mesh, PartitionSpec()),
            ),
            compiler_options=self._program.compiler_options,
        )

    def _holds(self, homes: tuple[NamedSharding, ...]) -> bool:
        """Whether all arrays are on the devices of the serving mesh, in any layout."""
        devices = tuple(self._layout.mesh.devices.flat)
        return all(tuple(s.mesh.devices.flat) == devices for s in homes)

    def shardings_in(self, layout: Layout) -> Any:
        """Returns the shardings of the serving parameters in a layout. In the learner's layout these
        are the shardings before the move to other devices. A scale has no input axis to split."""
        scale = lambda axes: layout.sharding(quant.scale_axes(axes, self._recipe.scheme))

        def place(path, axes):
            name, is_layer = path[-1].key, path[0].key in STACKS
            is_transposed = is_layer and name in TRANSPOSED and self._is_transposed
            sharding: Any = layout.sharding(axes[::-1] if is_transposed else axes)
            if is_layer and self._recipe.covers("q" if name == "qkv" else name):
                sharding = quant.QuantArray(sharding, scale(axes), scheme=self._recipe.scheme)
            return quant.Transposed(sharding) if is_transposed else sharding

        is_axes = lambda x: isinstance(x, tuple)
        axes = self._axes
        if self._unroll:
            of_layer = {
                index: {name: axes[1:] for name, axes in axes[stack].items()}
                for stack, indices in self._config.stacks.items() for index in indices
            }
            outer = {name: x for name, x in axes.items() if name not in STACKS}
            axes = outer | {"layers": [of_layer[i] for i in range(self._config.num_layers)]}
        placed = jax.tree_util.tree_map_with_path(place, axes, is_leaf=is_axes)
        return placed | {"layers": tuple(placed["layers"])} if self._unroll else placed

    def _serve(self, homes, params, noise):
        homes = jax.tree.unflatten(jax.tree.structure(params), homes)
        if noise is not None:
            params = transforms.add_noise(params, noise)
        params = self._inject(params)
        served = {n: self._outer(n, w, homes[n]) for n, w in params.items() if n not in STACKS}
        if self._unroll:
            stacks = by_stack(lambda layers, stack: self._layers(layers, homes[stack]), params)
            layers = transformer.unstack(stacks, self._config)["layers"]
            if self._is_transposed:
                layers = tuple(map(self._transposed, layers))
            return served | {"layers": layers}
        of_layer = lambda s: NamedSharding(s.mesh, PartitionSpec(*s.spec[1:]))
        for stack in self._config.stacks:
            serve = functools.partial(self._layers, homes=jax.tree.map(of_layer, homes[stack]))
            served[stack] = jax.lax.map(serve, params[stack])
        return served

    def _outer(self, name, w, home):
        """Returns a parameter outside the layers. A float32 head has float32 weights, and with float16
        every head is a float32 head, see `kernels.head`.

        Devices first exchange parts of their own columns. In one step from the learner's layout XLA
        would move the whole table to each device."""
        head = "embed" if self._config.tie_embeddings else "head"
        is_float = name == head and (
            self._program.fp32_head or self._program.dtype == "float16"
        )
        w = w.astype("float32" if is_float else self._program.dtype)
        w = jax.lax.with_sharding_constraint(w, home)
        is_cut = "embed" in self._axes[name] and self._config.embed_dim % self._layout.shards == 0
        if is_cut and self._holds((home,)):
            w = jax.lax.with_sharding_constraint(w, self._by_column.sharding(self._axes[name]))
        return w

    def _layers(self, layers, homes):
        """Returns the serving parameters of one layer, or of all of them stacked."""
        quantized = quant.quantize_params({"layers": layers}, self._recipe)["layers"]

        def stay(w, home):
            if isinstance(w, quant.QuantArray) and w.is_mxfp4:
                return w  # a learner's cut need not be one of whole bytes
            if isinstance(w, quant.QuantArray):
                return dataclasses.replace(w, q=jax.lax.with_sharding_constraint(w.q, home))
            return jax.lax.with_sharding_constraint(w, home)

        cast = lambda name, w: w if name in FLOAT32 else w.astype(self._program.dtype)
        is_float = lambda w: not isinstance(w, quant.QuantArray)
        served = {
            name: stay(cast(name, w) if is_float(w) else w, homes[name])
            for name, w in quantized.items()
        }
        if not self._is_joined:
            return served
        joined = transformer.joined(served, self._config)
        return joined | {"qkv": stay(joined["qkv"], homes["k"])}

    @staticmethod
    def _transposed(layer):
        return {n: quant.transposed(w) if n in TRANSPOSED else w for n, w in layer.items()}


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A base and how it is served, both held by others."""

    base: tuple[weakref.ref, ...]
    leaves: tuple[weakref.ref, ...]
    structure: Any

    @classmethod
    def of(cls, base: Any, served: Any) -> "_Kept":
        refs = lambda tree: tuple(map(weakref.ref, jax.tree.leaves(tree)))
        return cls(refs(base), refs(served), jax.tree.structure(served))

    def served(self, base: Any) -> Any:
        """Returns how this base is served; None for another base, or once nothing serves it."""
        mine = zip(self.base, jax.tree.leaves(base), strict=True)
        leaves = [ref() for ref in self.leaves]
        if any(ref() is not x for ref, x in mine) or any(x is None for x in leaves):
            return None
        return jax.tree.unflatten(self.structure, leaves)


def moving(served: Any) -> tuple[Any, Any]:
    """Returns (the part of serving parameters that each sync moves, the part that only the first one
    does): factors and base of adapted ones, and (all, None) of any others."""
    return lora.split(served)


def sent(served: Any) -> list[Any]:
    """Returns what a sync moves of serving parameters, or of a list with those of each sampler."""
    return [moving(part)[0] for part in (served if isinstance(served, list) else [served])]


def apart(serving: Any, params: Any) -> Any:
    """Returns serving parameters with copies of the arrays that they share with a policy, whose update
    donates its trained arrays."""
    own = {id(x) for x in jax.tree.leaves(lora.split(params)[0])}
    return jax.tree.map(lambda x: jnp.copy(x) if id(x) in own else x, serving)


def _homes(params: transformer.Params) -> tuple[NamedSharding, ...]:
    """Returns the sharding of each parameter, in the order of the tree; () if any of them has no
    mesh. Equal ones are spelled alike: XLA leaves out of an update's results what cuts nothing, and
    that must not make another program."""
    found = [getattr(x, "sharding", None) for x in jax.tree.leaves(params)]
    shardings = tuple(_canonical(s) for s in found if isinstance(s, NamedSharding))
    return shardings if len(shardings) == len(found) else ()


def _canonical(sharding: NamedSharding) -> NamedSharding:
    sizes, spec = sharding.mesh.shape, []
    for entry in sharding.spec:
        names = (entry,) if isinstance(entry, str) else entry or ()
        cutting = tuple(name for name in names if sizes[name] > 1)
        spec.append(cutting[0] if len(cutting) == 1 else cutting or None)
    while spec and spec[-1] is None:
        spec.pop()
    return sharding.update(spec=PartitionSpec(*spec))
