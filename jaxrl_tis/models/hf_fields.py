"""Fields of a `config.json`. null counts as absent everywhere in this format."""

import math
from collections.abc import Mapping
from typing import Any


def required(hf: Mapping[str, Any], key: str) -> Any:
    if key not in hf or hf[key] is None:
        raise ValueError(f"config.json has no {key!r}; the model cannot be built without it.")
    return hf[key]


def integer(hf: Mapping[str, Any], key: str) -> int:
    value = required(hf, key)
    if type(value) is not int:
        raise ValueError(f"{key}={value!r} in config.json must be an integer.")
    return value


def number(hf: Mapping[str, Any], key: str) -> float:
    value = required(hf, key)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{key}={value!r} in config.json must be a finite number.")
    return float(value)


def boolean(hf: Mapping[str, Any], key: str) -> bool:
    value = required(hf, key)
    if type(value) is not bool:
        raise ValueError(f"{key}={value!r} in config.json must be true or false.")
    return value


def flag(hf: Mapping[str, Any], key: str, otherwise: bool = False) -> bool:
    """Returns a setting, or the default of the family's config class where it is absent."""
    return boolean(hf, key) if is_set(hf, key) else otherwise


def either(hf: Mapping[str, Any], key: str, other: str, otherwise: int | None = None) -> int:
    """Returns an integer with two names. ValueError if they differ, or if it is absent and there is
    no default."""
    found = [integer(hf, name) for name in (key, other) if is_set(hf, name)]
    if len(set(found)) > 1:
        raise ValueError(
            f"config.json gives two values: {key}={found[0]} and {other}={found[1]}; remove one.")
    if found:
        return found[0]
    return integer(hf, key) if otherwise is None else otherwise


def is_set(hf: Mapping[str, Any], key: str) -> bool:
    """Whether a field is set; null counts as absent everywhere in this format."""
    return key in hf and hf[key] is not None
