"""Reinforcement learning of language models with the gap between sampler and learner corrected.

    import jaxrl_tis as jt

    w = jt.estimators.weights.token_tis(log_ratio, mask, cap=2.0)

The rooms `estimators` and `diagnostics` are pure functions on arrays, and `policy_loss` joins them into
a loss. Their modules are imported when they are first used, so this loads no model, engine or jax.
Modules of the other rooms are imported by their full names.
"""

import importlib
import importlib.util
import types
from collections.abc import Callable


def _importer(package: str) -> Callable[[str], types.ModuleType]:
    """Returns a module's `__getattr__` that imports the submodules of `package` when they are used."""

    def load(name: str) -> types.ModuleType:
        if name.startswith("__") or importlib.util.find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(f"{package}.{name}")

    return load


def __dir__() -> list[str]:
    return sorted([*globals(), "diagnostics", "estimators", "policy_loss"])


def __getattr__(name: str):
    if name == "policy_loss":
        return importlib.import_module("jaxrl_tis.estimators.loss").policy_loss
    return _importer(__name__)(name)
