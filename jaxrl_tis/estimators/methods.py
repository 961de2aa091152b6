"""Methods: an entry of one of the six tables with its parameters, see `choices`.

`needs` returns the fields that a method takes beyond the usual inputs.
"""

from collections.abc import Callable
from typing import Any

from jaxrl_tis import choices
from jaxrl_tis.estimators import advantages, controllers, kl, masks, objectives, weights

Method = choices.Choice

TABLES = {
    "weight": (weights.WEIGHTS, weights.NEEDS),
    "mask": (masks.MASKS, masks.NEEDS),
    "objective": (objectives.OBJECTIVES, objectives.NEEDS),
    "advantage": (advantages.ADVANTAGES, advantages.NEEDS),
    "kl": (kl.KL, kl.NEEDS),
    "controller": (controllers.CONTROLLERS, {}),
}


def function(kind: str, name: str) -> Callable:
    """The entry of a table; ValueError names the nearest where there is none."""
    return choices.function(kind, name, TABLES[kind][0])


def needs(kind: str, name: str) -> tuple[str, ...]:
    """Batch fields that the entry takes beyond the arguments of its table."""
    return TABLES[kind][1].get(name, ())


def parameters(kind: str, name: str) -> dict[str, Any]:
    """Hyper-parameters of an entry with their defaults, `inspect.Parameter.empty` if required."""
    return choices.parameters(kind, name, *TABLES[kind])


def parse(kind: str, text: str) -> Method:
    """Reads a method of this kind, see `choices.parse`."""
    return choices.parse(kind, text, *TABLES[kind])


def parse_all(kind: str, text: str) -> tuple[Method, ...]:
    """Reads methods that "&" joins, see `choices.parse_all`."""
    return choices.parse_all(kind, text, *TABLES[kind])
