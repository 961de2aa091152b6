"""Reads and writes LoRA adapters as folders of PEFT: adapter_config.json, adapter_model.safetensors.

Reading is strict. A key that would change the arithmetic and is not implemented is refused by name,
every tensor must bind a module of the model, and every targeted module must have its tensors.
"""

import collections
import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from jaxrl_tis.models import lora, peft_config
from jaxrl_tis.models.config import STACKS, ModelConfig
from jaxrl_tis.models.peft_config import CONFIG, WEIGHTS
from jaxrl_tis.models.fused_experts import FUSED
from jaxrl_tis.models.safetensors import names
from jaxrl_tis.models.stacking import slots
from jaxrl_tis.models.transformer import abstract_params
from jaxrl_tis.runtime import hub

PREFIX = "base_model.model."
HEAD_COPY = f"{PREFIX}lm_head.base_layer.weight"


@dataclasses.dataclass(frozen=True)
class Site:
    """A place in a checkpoint that can have one pair of factors.

    Attributes:
      name: of a module, or of a tensor of all experts of a layer ("...mlp.experts.gate_up_proj").
      parts: the parameters in its weight; several share A.
      stack: of the parameters, or "".
      place: its indices in them. A tensor of all experts has the layer's alone.
      prefix: of the names of its factors.
    """

    name: str
    parts: tuple[str, ...]
    stack: str
    place: tuple[int, ...]
    prefix: str

    @property
    def is_fused(self) -> bool:
        """Whether it is a tensor of all experts."""
        return self.name != self.prefix

    @property
    def parameter_name(self) -> str:
        return self.name if self.is_fused else f"{self.name}.weight"

    def tensor(self, factor: str) -> str:
        return f"{PREFIX}{self.prefix}.lora_{factor}.weight"


def save(
    folder: str | os.PathLike, adapter: lora.Adapter, factors: Mapping[str, Any], base: str = ""
) -> None:
    """Writes the factors of an adapter as a folder that PEFT reads, in float32.

    PEFT 0.21 takes gate_proj, up_proj and down_proj among the `target_modules` of a model with
    experts for tensors of experts. Those of its dense layers and shared experts are therefore
    `target_parameters` as well.

    Args:
      folder: must not exist yet.
      base: path of the base; its name and revision are written.

    Raises:
      FileExistsError: the folder exists.
      ValueError: gate and up of experts have different ranks or scales; PEFT has one of both.
    """
    folder, config, ranks = pathlib.Path(folder), adapter.config, dict(adapter.ranks)
    if folder.exists():
        raise FileExistsError(f"{folder} exists; give the adapter a folder of its own.")
    tensors, modules, parameters = {}, {}, {}
    sites = [site for site in _modules(config) if site.parts[0] in ranks and len(site.place) < 2]
    sites += _fused(config, lambda name, parts: not ranks.keys().isdisjoint(parts))
    for site in sites:
        a, b, setting = _written(site, adapter, factors)
        tensors |= {site.tensor(x): np.ascontiguousarray(y) for x, y in (("A", a), ("B", b))}
        if site.is_fused or config.moe is not None and site.parts[0] in ("gate", "up", "down"):
            parameters[".".join(site.parameter_name.split(".")[3:])] = setting
        else:
            modules[site.name.rpartition(".")[2]] = setting
    # The most frequent setting stands for all; the others are patterns of single targets.
    settings = modules | parameters
    (rank, alpha), _ = collections.Counter(settings.values()).most_common(1)[0]
    base, revision = hub.name_and_revision(base)
    fields = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base or None,
        "revision": revision or None, "r": rank, "lora_alpha": alpha, "use_rslora": False,
        "rank_pattern": {name: own for name, (own, _) in settings.items() if own != rank},
        "alpha_pattern": {name: own for name, (_, own) in settings.items() if own != alpha},
        "target_modules": sorted(modules), "lora_dropout": 0.0, "bias": "none",
        "init_lora_weights": True, "inference_mode": True,
    }
    if parameters:
        fields["target_parameters"] = sorted(parameters)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        (partial / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        safetensors.numpy.save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        shutil.copymode(partial / CONFIG, partial / WEIGHTS)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _written(
    site: Site, adapter: lora.Adapter, factors: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray, tuple[int, float]]:
    """Returns lora_A, lora_B and (r, lora_alpha) of a site.

    The parts of a tensor of experts have ranks of their own, one after the other: A = [A1, A2] and B
    is block-diagonal. A part without factors is zero. PEFT lays the rows of A out by (expert, rank),
    and the columns of B by (rank, expert).
    """
    ranks, scales = dict(adapter.ranks), dict(adapter.scales)
    own = [name for name in site.parts if name in ranks]
    rank, scale = ranks[own[0]], scales[own[0]]
    if any((ranks[name], scales[name]) != (rank, scale) for name in own):
        raise ValueError(
            f"the adapter has ranks {[ranks[n] for n in own]} and scales {[scales[n] for n in own]} of "
            f"{', '.join(own)}, which PEFT has in one tensor; give them one rank and scale"
        )
    tree = factors[site.stack] if site.stack else factors
    of = lambda name, x: np.asarray(tree[name][x][site.place], np.float32)
    setting = rank * len(site.parts), _alpha(scale * rank * len(site.parts))
    if not site.is_fused:
        return of(own[0], "a").T, of(own[0], "b").T, setting
    a, b = (
        [of(name, x) if name in own else np.zeros_like(of(own[0], x)) for name in site.parts] for x in "ab"
    )
    apart = lambda i: ((0, 0), (i * rank, (len(b) - 1 - i) * rank), (0, 0))
    a_eir = np.concatenate(a, axis=2)
    b_ero = np.concatenate([np.pad(x, apart(i)) for i, x in enumerate(b)], axis=2)
    rows = a_eir.swapaxes(1, 2).reshape(-1, a_eir.shape[1])
    return rows, b_ero.transpose(2, 1, 0).reshape(b_ero.shape[2], -1), setting


def _alpha(alpha: float) -> float:
    """Returns alpha without the rounding of a scale times its rank."""
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha


def load(path: str | os.PathLike, config: ModelConfig) -> tuple[lora.Adapter, dict[str, Any]]:
    """Returns the adapter in a folder of PEFT, or of the hub, and its factors, in float32.

    Layers without factors get factors of zeros. Where the scale differs from layer to layer, B is
    multiplied by it. A copy of the base's head, which PEFT writes beside factors of it, is left out.
    Factors of experts are read from tensors of all experts, and of each as transformers 4 has them.

    Raises:
      FileNotFoundError: the folder or one of its files does not exist.
      ValueError: a file is damaged, a key is not implemented, or the tensors do not fit the model.
    """
    folder = peft_config.local(path)
    fields = peft_config.read(path)
    try:
        tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is damaged ({error}); copy it again.") from error
    tensors.pop(HEAD_COPY, None)
    sites = _checked_sites(path, fields, tensors, config)
    if config.tie_embeddings and any(site.name == "lm_head" for site in sites):
        raise ValueError(
            f"{path} adapts lm_head, and the model's head is its embedding; train the adapter "
            "without it"
        )
    shapes, found = abstract_params(config), collections.defaultdict(list)
    trees = {"": shapes} | {stack: shapes[stack] for stack in STACKS if stack in shapes}
    for site in sites:
        leaves = [trees[site.stack][name] for name in site.parts]
        rank, scale = _setting(fields, site)
        pair = _read_pair(path, tensors, site, leaves, rank)
        for name, a, b in _parts(site, leaves, *pair):
            found[name].append((site, a, b, scale))
    ranks, scales, factors = {}, {}, {}
    for name, entries in sorted(found.items()):
        ranks[name] = rank = max(a.shape[-1] for _, a, _, _ in entries)
        is_alike = len({scale for *_, scale in entries}) == 1
        scales[name] = entries[0][3] if is_alike else 1.0
        for stack, tree in trees.items():
            if name not in tree:
                continue
            leaf = tree[name]
            whole = {
                "a": np.zeros((*leaf.shape[:-1], rank), np.float32),
                "b": np.zeros((*leaf.shape[:-2], rank, leaf.shape[-1]), np.float32),
            }
            for site, a, b, scale in entries:
                if site.stack == stack:
                    whole["a"][site.place][..., : a.shape[-1]] = a
                    whole["b"][site.place][..., : a.shape[-1], :] = b * (1.0 if is_alike else scale)
            home = factors.setdefault(stack, {}) if stack else factors
            home[name] = whole
    adapter = lora.Adapter(config, tuple(sorted(ranks.items())), tuple(sorted(scales.items())))
    return adapter, factors


def _read_pair(
    path: str | os.PathLike, tensors: Mapping[str, np.ndarray], site: Site, leaves: list, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns lora_A and lora_B of a site in float32. ValueError for another shape or bad numbers."""
    experts = leaves[0].shape[1] if site.is_fused else 1
    expected = {
        "A": (rank * experts, leaves[0].shape[-2]),
        "B": (sum(leaf.shape[-1] for leaf in leaves), rank * experts),
    }
    pair = {x: tensors[site.tensor(x)] for x in "AB"}
    for x, shape in expected.items():
        if pair[x].shape != shape:
            raise ValueError(
                f"{path} is of another base or rank: lora_{x} of {site.name} is "
                f"{list(pair[x].shape)}, and this model needs {list(shape)}"
            )
        is_float = jnp.issubdtype(pair[x].dtype, jnp.floating)
        pair[x] = pair[x].astype(np.float32) if is_float else pair[x]
        if not (is_float and np.isfinite(pair[x]).all()):
            raise ValueError(
                f"{path}: lora_{x} of {site.name} must have finite floats, and its dtype is "
                f"{tensors[site.tensor(x)].dtype}; copy {WEIGHTS} again, or export the adapter again"
            )
    return pair["A"], pair["B"]


def _parts(
    site: Site, leaves: list, a: np.ndarray, b: np.ndarray
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields (parameter, its A [..., in, r], its B [..., r, out]) of a site, see `_written`.

    Parts whose ranks are apart have these alone, and a part whose A is zero has no factors. Any other
    parts share all of A.
    """
    if not site.is_fused:
        yield site.parts[0], a.T, b.T
        return
    experts, count = leaves[0].shape[1], len(site.parts)
    a = a.reshape(experts, -1, a.shape[1]).swapaxes(1, 2)
    b = b.reshape(len(b), -1, experts).transpose(2, 1, 0)
    rank, ends = b.shape[1] // count, np.cumsum([leaf.shape[-1] for leaf in leaves])
    of_parts = np.split(b, ends[:-1], axis=2)
    own = [slice(i * rank, (i + 1) * rank) for i in range(count)]
    outside = [np.delete(x, s, axis=1) for x, s in zip(of_parts, own, strict=True)]
    if b.shape[1] % count or any(x.any() for x in outside):
        own = [slice(None)] * count
    for name, x, s in zip(site.parts, of_parts, own, strict=True):
        if a[:, :, s].any():
            yield name, a[:, :, s], x[:, s]


def beside(
    params: dict[str, Any], path: str | os.PathLike, config: ModelConfig
) -> dict[str, Any]:
    """Returns parameters with the adapter in a folder of PEFT, in place of any that they have. Raises as
    `load` and `check_head`."""
    return join(params, path, *load(path, config))


def join(
    params: dict[str, Any], path: str | os.PathLike, adapter: lora.Adapter, factors: dict[str, Any]
) -> dict[str, Any]:
    """Returns parameters with the adapter that `load` has read from a folder, in place of any that they
    have. Raises as `check_head`."""
    base = lora.split(params)[1] or params
    check_head(path, lambda: np.asarray(base["head"]))
    return adapter.join(base, jax.tree.map(jnp.asarray, factors))


def check_head(path: str | os.PathLike, head: Callable[[], np.ndarray]) -> None:
    """Raises ValueError if the folder has a copy of another head than the base's."""
    with safetensors.safe_open(peft_config.local(path) / WEIGHTS, framework="numpy") as file:
        copy = file.get_tensor(HEAD_COPY) if HEAD_COPY in file.keys() else None
    if copy is not None and not _is_rounded(copy.T, head()):
        raise ValueError(f"{path} is of another base: its {HEAD_COPY} is not this model's head")


def _is_rounded(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays are equal in the narrower of their dtypes."""
    narrow = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    return np.array_equal(one.astype(narrow), other.astype(narrow))


def _modules(config: ModelConfig) -> Iterator[Site]:
    """Yields every module that can have factors, those of experts one by one."""
    tree = slots(config, names(config))
    for stack in STACKS:
        for name, slot in tree.get(stack, {}).items():
            if name in lora.modules_of(config):
                for place, tensor in np.ndenumerate(slot.names):
                    module = tensor.removesuffix(".weight")
                    yield Site(module, (name,), stack, place, module)
    yield Site("lm_head", (lora.HEAD,), "", (), "lm_head")


def _fused(
    config: ModelConfig, is_wanted: Callable[[str, tuple[str, ...]], bool] = lambda name, parts: True
) -> Iterator[Site]:
    """Yields the tensors of all experts of a layer with is_wanted(name, parts). PEFT wraps their module
    once for each of them, the first one innermost."""
    has_factors = config.moe is not None and "expert_gate" in lora.modules_of(config)
    for i, layer in enumerate(config.stacks["layers"] if has_factors else ()):
        tensors = ((template.format(layer=layer), parts) for template, parts in FUSED.items())
        wanted = [pair for pair in tensors if is_wanted(*pair)]
        for depth, (name, parts) in enumerate(reversed(wanted)):
            prefix = name.rpartition(".")[0] + ".base_layer" * depth
            yield Site(name, parts, "layers", (i,), prefix)


def _setting(fields: Mapping[str, Any], site: Site) -> tuple[int, float]:
    """Returns (rank, s) of a site. Patterns match the name that the site is targeted by."""
    is_module = peft_config.is_target(fields, site.name)
    return peft_config.setting(fields, site.name if is_module else site.parameter_name)


def _is_parameter(fields: Mapping[str, Any], site: Site) -> bool:
    """Whether a site is targeted by its tensor. Single experts have no tensor in transformers 5."""
    return len(site.place) < 2 and peft_config.is_target_parameter(fields, site.parameter_name)


def _checked_sites(
    path: str | os.PathLike, fields: Mapping[str, Any], tensors: Mapping[str, Any], config: ModelConfig
) -> list[Site]:
    """Returns the sites that adapter_config.json targets. ValueError for tensors of others, and for
    targets without tensors."""
    modules = list(_modules(config))
    wanted = [s for s in modules if peft_config.is_target(fields, s.name) or _is_parameter(fields, s)]
    wanted += _fused(config, lambda name, parts: peft_config.is_target_parameter(fields, name))
    known = {site.prefix: site for site in (*modules, *_fused(config))}
    bound = {prefix: site for prefix, site in known.items() if site.tensor("A") in tensors}
    expected = {site.tensor(x) for site in bound.values() for x in "AB"}
    if strays := sorted(tensors.keys() - expected):
        _refuse_unadapted(path, strays, config, known)
        raise ValueError(
            f"{path} has {len(strays)} tensors that bind no module of this model, such as "
            f"{strays[0]}; it is an adapter of another base"
        )
    if missing := sorted(expected - tensors.keys()):
        raise ValueError(f"{path} has no tensor {missing[0]}; copy {WEIGHTS} again")
    if not bound:
        raise ValueError(f"{path} binds no module of this model; it is an adapter of another base")
    if differing := {site.prefix for site in wanted} ^ bound.keys():
        raise ValueError(
            f"{path}: {CONFIG} targets {len(wanted)} modules of this model and {WEIGHTS} has "
            f"{len(bound)}; they differ in {sorted(differing)[0]}"
        )
    return wanted


def _refuse_unadapted(
    path: str | os.PathLike, strays: Iterable[str], config: ModelConfig, known: Collection[str]
) -> None:
    """Raises ValueError for a tensor of a module that the model has and that cannot have factors: the
    embedding, a router, a norm."""
    table = names(config)
    tensors = (x for slot in jax.tree.leaves(slots(config, table)) for x in slot.names.flat)
    own = {x.removesuffix(".weight") for x in tensors}
    for stray in strays:
        module = re.split(r"\.(?:lora_|base_layer|weight)", stray.removeprefix(PREFIX))[0]
        if module in own and module not in known:
            raise ValueError(
                f"{path} adapts {module}, and here the projections of attention, MLP and experts and "
                f"the head alone have factors; train the adapter without {module.rpartition('.')[2]}"
            )
