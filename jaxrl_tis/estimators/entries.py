"""Makes entries of a table from one shared function: they differ in level, estimator or defaults."""

import functools
import inspect
import textwrap
from collections.abc import Callable

from jaxrl_tis.estimators.traits import Traits


def entry(
    function: Callable, first: str, name: str, what: str, region: str, use: str, traits: Traits,
    bounds: str = "", **defaults: float,
) -> Callable:
    """Returns `function(first, ...)` as an entry with its own signature, name and docstring.

    Args:
      function: takes `first`, the arguments of the table, and its parameters by keyword alone.
      first: what the entries of `function` differ in, a level or an estimator.
      name: of the entry; it begins with "token" or with a level of sequences.
      what: what the entry computes, and its source.
      region: the trust region.
      use: what the entry is good for; what is against it.
      traits: of the entry.
      bounds: where the defaults come from.
      defaults: of the parameters; a parameter without any is required.
    """
    bound = functools.partial(function, first, **defaults)

    def call(*arguments, **parameters):
        return bound(*arguments, **parameters)

    unit = "token" if name.startswith("token") else "sequence"
    labels = f"Unit: {unit}. Trust region: {region}. Use: {use}."
    call.__doc__ = "\n\n".join(textwrap.fill(x, 100) for x in (what, labels, bounds) if x)
    call.__name__ = call.__qualname__ = name
    call.__module__ = function.__module__
    call.__signature__ = inspect.signature(bound)  # type: ignore[attr-defined]
    return traits(call)
