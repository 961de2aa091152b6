"""Methods: an entry of one of the six tables with its parameters, see `choices`, and its traits."""

import inspect
from collections.abc import Callable
from typing import Any

from jaxrl_tis import choices
from jaxrl_tis.estimators import advantages, controllers, kl, masks, objectives, weights
from jaxrl_tis.estimators.traits import Traits, of

Method = choices.Choice

TABLES = {
    "weight": weights.WEIGHTS,
    "mask": masks.MASKS,
    "objective": objectives.OBJECTIVES,
    "advantage": advantages.ADVANTAGES,
    "kl": kl.KL,
    "controller": controllers.CONTROLLERS,
}

# The ratio that a mask judges, see `loss.RATIOS`.
OF_ALL = {"mask": {"of": ("engine", "staleness", "folded", "policy")}}


def own(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an entry itself, without those of `OF_ALL`."""
    return {key: x for key, x in parameters.items() if key != "of"}


def function(kind: str, name: str) -> Callable:
    """The entry of a table; ValueError names the nearest where there is none."""
    return choices.function(kind, name, TABLES[kind])


def traits(kind: str, name: str) -> Traits:
    """The traits of an entry, the defaults for an unknown one (of a record by other code)."""
    return of(TABLES[kind].get(name))


def _inputs(kind: str) -> dict[str, tuple[str, ...]]:
    return {name: of(entry).needs for name, entry in TABLES[kind].items()}


def needs(kind: str, name: str) -> tuple[str, ...]:
    """Batch fields that the entry takes beyond the arguments of its table."""
    return traits(kind, name).needs


def parameters(kind: str, name: str) -> dict[str, Any]:
    """Hyper-parameters of an entry with their defaults, `inspect.Parameter.empty` if required."""
    return choices.parameters(kind, name, TABLES[kind], _inputs(kind))


def example(kind: str, name: str) -> dict[str, Any]:
    """Hyper-parameters of an entry: defaults, and the examples of its traits where it has none."""
    given = traits(kind, name).example
    return {
        key: given[key] if value is inspect.Parameter.empty else value
        for key, value in parameters(kind, name).items()
    }


def parse(kind: str, text: str) -> Method:
    """Reads a method of this kind, see `choices.parse`."""
    return choices.parse(kind, text, TABLES[kind], _inputs(kind), OF_ALL.get(kind, {}))


def parse_all(kind: str, text: str) -> tuple[Method, ...]:
    """Reads methods that "&" joins, see `choices.parse_all`."""
    return choices.parse_all(kind, text, TABLES[kind], _inputs(kind), OF_ALL.get(kind, {}))
