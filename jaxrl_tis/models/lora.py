"""LoRA: low-rank factors beside a constant base (arXiv:2106.09685).

The product with an adapted weight is x W + s (x A) B, with A [in, r] and B [r, out] in float32 and
s = alpha / r, or alpha / sqrt(r) with rslora (arXiv:2312.03732). W is any kind of weight and gets no
gradient. A starts uniform in +-1 / sqrt(in) and B at zero, so a fresh adapter changes no bit.

Trees: the *base* is a tree of parameters as `transformer.init` returns it. The *factors* have the
same names, {"a": [..., in, r], "b": [..., r, out]} for each adapted weight, and nothing else. The
*adapted* parameters have an `Adapted` in place of each adapted weight. Programs take these.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_tis import choices
from jaxrl_tis.models.config import STACKS, ModelConfig

ATTENTION = ("q", "k", "v", "o")
MLP = ("gate", "up", "down", "expert_gate", "expert_up", "expert_down")
HEAD = "head"
GROUPS = {"attention": ATTENTION, "mlp": MLP, "all": (*ATTENTION, *MLP)}
MODULES = (*GROUPS["all"], HEAD)


def modules_of(config: ModelConfig) -> tuple[str, ...]:
    """Returns the weights that can have factors: in gate and up of GPT-OSS, which alternate in one
    tensor with biases, PEFT has none that this project reads."""
    return MODULES if config.family != "gpt_oss" else (*ATTENTION, HEAD)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A weight with its factors: w + scale * a b.

    Attributes:
      w: the base, any kind of weight [..., in, out].
      a: [..., in, r] float32.
      b: [..., r, out] float32.
      scale: s of the head of this file (static).
    """

    w: Any
    a: Any
    b: Any
    scale: float = dataclasses.field(metadata=dict(static=True))

    @property
    def scaled_b(self) -> jax.Array:
        return self.b * self.scale


def on_base(f: Callable[[Any], Any], w: Any) -> Any:
    """Returns f(weight), or of an `Adapted` the same factors beside f(base)."""
    return dataclasses.replace(w, w=f(w.w)) if isinstance(w, Adapted) else f(w)


def product(x: jax.Array, w: Adapted, dot: Callable, thin: Callable) -> jax.Array:
    """Returns the product with an adapted weight in x's dtype.

    Args:
      dot: (x, base) -> their product.
      thin: (float32 x, factor) -> their product. The sum with the base's product is float32.
    """
    y = dot(x, w.w)
    delta = thin(thin(x.astype(jnp.float32), w.a), w.scaled_b)
    return (y.astype(jnp.float32) + delta).astype(y.dtype)


def split(params: dict) -> tuple[dict, dict | None]:
    """Returns (factors, base) of adapted parameters, and (params, None) of any others."""
    leaves = jax.tree.leaves(params, is_leaf=_is_adapted)
    if not any(map(_is_adapted, leaves)):
        return params, None
    bare = lambda w: w.w if _is_adapted(w) else w
    factors = _factors(params)
    return factors, jax.tree.map(bare, params, is_leaf=_is_adapted)


def _is_adapted(x) -> bool:
    return isinstance(x, Adapted)


def _factors(params) -> dict[str, Any]:
    of = lambda tree: {
        n: {"a": w.a, "b": w.b} for n, w in tree.items() if isinstance(w, Adapted)
    }
    found: dict[str, Any] = of(params)
    for stack in STACKS:
        layers = params.get(stack, {})
        if isinstance(layers, tuple):
            found[stack] = tuple(map(of, layers))
        elif named := of(layers):
            found[stack] = named
    return found


def is_same(params: Any, others: Any) -> bool:
    """Whether two trees hold the very same arrays."""
    mine, theirs = jax.tree.leaves(params), jax.tree.leaves(others)
    return len(mine) == len(theirs) and all(x is y for x, y in zip(mine, theirs, strict=True))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A choice of `model.lora`.

    Attributes:
      rank: of a factor; of an expert's factors it is divided by the experts of a token.
      alpha: see `scale`.
      targets: comma-separated names in GROUPS and MODULES.
      is_rs: divide alpha by the root of the rank.
    """

    rank: int
    alpha: float
    targets: str
    is_rs: bool

    def scale(self, rank: int) -> float:
        return self.alpha / (math.sqrt(rank) if self.is_rs else rank)

    def __post_init__(self):
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"rank={self.rank!r} must be a whole number of at least 1")
        if type(self.alpha) not in (int, float) or not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha={self.alpha!r} must be a finite number above 0")
        self.modules()

    def modules(self) -> tuple[str, ...]:
        """Returns the names in MODULES that are targeted."""
        wanted = [name.strip() for name in self.targets.split(",")]
        for name in wanted:
            if name not in GROUPS and name not in MODULES:
                raise ValueError(
                    f"targets={self.targets!r} names {name!r}, which matches nothing; choose among "
                    f"{', '.join((*GROUPS, *MODULES))}"
                )
        named = {m for name in wanted for m in GROUPS.get(name, (name,))}
        return tuple(m for m in MODULES if m in named)


def none() -> None:
    """Trains all weights."""


def lora(*, rank=32, alpha=32, targets="all") -> Recipe:
    """Trains factors with s = alpha / rank."""
    return Recipe(rank, alpha, targets, is_rs=False)


def rslora(*, rank=32, alpha=32, targets="all") -> Recipe:
    """Trains factors with s = alpha / sqrt(rank)."""
    return Recipe(rank, alpha, targets, is_rs=True)


CHOICES: dict[str, Callable[..., Recipe | None]] = {"none": none, "lora": lora, "rslora": rslora}


def parse(text: str) -> Recipe | None:
    """Returns the recipe of a choice such as "lora(rank=32)"; None for "none". ValueError for any
    other text."""
    name, parameters = choices.parse("lora", text, CHOICES)
    try:
        return CHOICES[name](**parameters)
    except ValueError as error:
        raise ValueError(f"lora {text!r}: {error}") from None


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The adapted weights of one model.

    Attributes:
      config: the model.
      ranks, scales: (name of a parameter, its rank or s) of every adapted weight.
    """

    config: ModelConfig
    ranks: tuple[tuple[str, int], ...]
    scales: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, recipe: Recipe, config: ModelConfig, shapes: Mapping[str, Any]) -> "Adapter":
        """Makes the adapter of a recipe; `shapes` are the model's abstract parameters.

        Raises:
          ValueError: the targets match nothing, the head is tied, or a rank is above a width.
        """
        if HEAD in recipe.modules() and config.tie_embeddings:
            raise ValueError(
                "model.lora targets the head, and the model's head is its embedding; leave it out "
                "of targets, or untie the head"
            )
        there = {name: x for tree in _trees(shapes) for name, x in tree.items()}
        if unable := {*recipe.modules()} & there.keys() - {*modules_of(config)}:
            raise ValueError(
                f"model.lora targets {', '.join(sorted(unable))}, and experts of {config.family} have "
                "no factors; set targets='attention'"
            )
        ranks = {}
        for name in recipe.modules():
            if name not in there:
                continue
            is_expert = name.startswith("expert_")
            ranks[name] = max(1, recipe.rank // config.experts.top_k) if is_expert else recipe.rank
            width = min(there[name].shape[-2:])
            if ranks[name] > width:
                raise ValueError(
                    f"model.lora has rank {ranks[name]}, and {name} is {width} wide; lower the rank, "
                    "or leave this name out of targets"
                )
        if not ranks:
            raise ValueError(
                f"model.lora has targets {recipe.targets!r}, which match nothing in this model; it "
                f"has {', '.join(n for n in MODULES if n in there)}"
            )
        scales = {name: recipe.scale(rank) for name, rank in ranks.items()}
        return cls(config, tuple(sorted(ranks.items())), tuple(sorted(scales.items())))

    def factors(self, of: Callable[[str, Any, int], Any], tree: Mapping[str, Any]) -> dict:
        """Returns {"a", "b"} = of(name, leaf, rank) for each adapted leaf of a tree of parameters."""
        ranks = dict(self.ranks)
        made = lambda leaves: {n: of(n, x, ranks[n]) for n, x in leaves.items() if n in ranks}
        found = made({n: x for n, x in tree.items() if n not in STACKS})
        stacks = {s: made(tree[s]) for s in STACKS if s in tree}
        return found | {s: leaves for s, leaves in stacks.items() if leaves}

    def axes(self, logical: Mapping[str, Any]) -> dict:
        """Returns the logical axes of the factors, from those of the parameters."""
        return self.factors(
            lambda name, axes, rank: {"a": (*axes[:-1], None), "b": (*axes[:-2], None, axes[-1])},
            logical,
        )

    def abstract(self, shapes: Mapping[str, Any]) -> dict:
        """Returns the shapes of the factors, from those of the parameters."""
        struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        return self.factors(
            lambda name, x, rank: {
                "a": struct(*x.shape[:-1], rank), "b": struct(*x.shape[:-2], rank, x.shape[-1])
            }, shapes,
        )

    def init(self, shapes: Mapping[str, Any], key: jax.Array) -> dict:
        """Returns the factors of a fresh adapter: A uniform in +-1 / sqrt(in), B zero."""
        leaves, structure = jax.tree.flatten_with_path(self.abstract(shapes))
        keys = jax.random.split(key, len(leaves))

        def leaf(path, x, key):
            if path[-1].key == "b":
                return jnp.zeros(x.shape, x.dtype)
            bound = x.shape[-2] ** -0.5
            return jax.random.uniform(key, x.shape, x.dtype, -bound, bound)

        made = [leaf(*pair, k) for pair, k in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(structure, made)

    def join(self, base: Mapping[str, Any], factors: Mapping[str, Any]) -> dict:
        """Returns the adapted parameters, also of unrolled layers."""
        scales = dict(self.scales)
        pair = lambda n, w, of: Adapted(w, of[n]["a"], of[n]["b"], scales[n]) if n in of else w
        merged = lambda tree, of: {n: pair(n, w, of) for n, w in tree.items()}
        joined = merged(base, {n: x for n, x in factors.items() if n not in STACKS})
        for stack in STACKS:
            if stack not in factors:
                continue
            if isinstance(base[stack], tuple):
                joined[stack] = tuple(map(merged, base[stack], factors[stack]))
            else:
                joined[stack] = merged(base[stack], factors[stack])
        return joined


def adapter_of(params: Mapping[str, Any], config: Any) -> Adapter:
    """Returns the adapter of adapted parameters."""
    found = {n: w for tree in _trees(params) for n, w in tree.items() if _is_adapted(w)}
    return Adapter(
        config, tuple((n, w.a.shape[-1]) for n, w in sorted(found.items())),
        tuple((n, w.scale) for n, w in sorted(found.items())),
    )


def _trees(params: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the dicts of leaves in a tree of parameters."""
    trees: list[Mapping[str, Any]] = [{n: x for n, x in params.items() if n not in STACKS}]
    for stack in STACKS:
        layers = params.get(stack, {})
        trees += list(layers) if isinstance(layers, tuple) else [layers]
    return trees


def join_like(like: Mapping[str, Any], base: Any, factors: Any) -> dict:
    """Returns base and factors as adapted parameters with the scales of the adapted `like`. The
    layers of base and factors may be unrolled, and those of `like` stacked."""
    return adapter_of(like, None).join(base, factors)


def relative_norm(params: Mapping[str, Any]) -> jax.Array:
    """Returns |s A B| / |W| of adapted parameters with float bases, both over all adapted weights: how
    far the adapter is from its base. |A B|^2 is the sum of (A^T A) * (B B^T), so no product is made."""
    weights = [w for tree in _trees(params) for w in tree.values() if _is_adapted(w)]
    gram = lambda equation, x: jnp.einsum(equation, x, x, preferred_element_type=jnp.float32)
    squared = lambda w: w.scale**2 * jnp.sum(gram("...ir,...is->...rs", w.a) * gram("...ro,...so->...rs", w.b))
    of_base = lambda w: jnp.sum(jnp.square(w.w.astype(jnp.float32)))
    # Rounding can make the sum of B near 0 negative.
    return jnp.sqrt(jnp.maximum(sum(map(squared, weights)), 0.0) / sum(map(of_base, weights)))


def merged(params: dict) -> dict:
    """Returns adapted parameters as one weight each, W + s A B in float32. ValueError if a base has
    another dtype: a narrower sum loses small factors."""

    def whole(w):
        if not _is_adapted(w):
            return w
        if isinstance(w.w, jax.Array) and w.w.dtype == jnp.float32:
            return w.w + jnp.matmul(w.a, w.scaled_b, precision=jax.lax.Precision.HIGHEST)
        raise ValueError("a merge needs a base in float32: in fewer bits it loses small updates")

    return jax.tree.map(whole, params, is_leaf=_is_adapted)
