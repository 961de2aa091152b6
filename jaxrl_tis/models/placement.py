"""Shardings of a model's parameters: its logical axes under the rules of a layout."""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxrl_tis.models import lora, transformer
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.sharding import Layout


def shardings(layout: Layout, config: ModelConfig, memory_kind: str = "device") -> Any:
    """Returns the tree of shardings for a model's parameters. "pinned_host" keeps them in host
    memory. ValueError if the mesh does not divide them."""
    check_tensor_parallel(config, layout.mesh.shape["tensor"])
    check_experts(config, layout.mesh.shape["expert"])

    def place(path, abstract, axes):
        sharding = layout.sharding(axes)
        _check_divides(jax.tree_util.keystr(path), abstract.shape, axes, sharding)
        return sharding.with_memory_kind(memory_kind)

    return jax.tree_util.tree_map_with_path(
        place, transformer.abstract_params(config), transformer.logical_axes(config)
    )


def of_factors(layout: Layout, adapter: lora.Adapter) -> Any:
    """Returns the tree of shardings for the factors of an adapter: each is cut as the base is along
    the axis that they share. ValueError if the mesh does not divide them."""
    shapes, axes = abstract_factors(adapter), adapter.axes(transformer.logical_axes(adapter.config))

    def place(path, abstract, axes):
        sharding = layout.sharding(axes)
        _check_divides(jax.tree_util.keystr(path), abstract.shape, axes, sharding)
        return sharding

    return jax.tree_util.tree_map_with_path(place, shapes, axes)


def abstract_factors(adapter: lora.Adapter) -> Any:
    """Returns the shapes of the factors of an adapter."""
    return adapter.abstract(transformer.abstract_params(adapter.config))


def put(params: Any, layout: Layout, config: ModelConfig) -> Any:
    """Returns the parameters of a model, adapted or not, on the mesh of a layout."""
    factors, base = lora.split(params)
    if base is None:
        return jax.device_put(params, shardings(layout, config))
    adapter = lora.adapter_of(params, config)
    factors = jax.device_put(factors, of_factors(layout, adapter))
    return adapter.join(jax.device_put(base, shardings(layout, config)), factors)


def check_tensor_parallel(config: ModelConfig, degree: int) -> None:
    """Raises ValueError, with the legal degrees, for a degree that does not divide the heads."""
    common = math.gcd(config.num_heads, config.num_kv_heads)
    if common % degree:
        legal = [n for n in range(1, common + 1) if common % n == 0]
        raise ValueError(
            f"tensor parallelism {degree} does not divide {config.num_heads} query heads and "
            f"{config.num_kv_heads} key/value heads; legal degrees are {legal}"
        )


def check_experts(config: ModelConfig, shards: int) -> None:
    """Raises ValueError where the expert axis of a mesh does not divide the experts."""
    if config.moe is not None and config.moe.num_experts % shards:
        raise ValueError(
            f"{config.moe.num_experts} experts cannot be cut into the {shards} shards of the mesh "
            "axis 'expert'; choose a divisor of their number"
        )


def _check_divides(name: str, shape: tuple, axes: tuple, sharding: NamedSharding) -> None:
    for size, axis, entry in zip(shape, axes, sharding.spec, strict=True):
        names = (entry,) if isinstance(entry, str) else entry or ()
        shards = math.prod(sharding.mesh.shape[n] for n in names)
        if size % shards:
            raise ValueError(
                f"parameter {name}: its axis {axis!r} of size {size} cannot be cut into {shards} "
                f"shards of mesh {dict(sharding.mesh.shape)}; choose another mesh"
            )
