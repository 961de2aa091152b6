"""Functions of arrays as users call them: one program a call, where a plain call compiles many.

A call traces the arrays among its arguments and takes all else as it is: a width, a flag, a name.
It returns numpy arrays, which tests index and compare without another program. A call without
arrays is a plain one.
"""

import functools

import jax
import numpy as np

ARRAYS = jax.Array, np.ndarray, np.generic


def function(plain):
    """Returns `plain` with a program for each structure of its arguments."""

    @functools.wraps(plain)
    def call(*args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        fixed = tuple(None if isinstance(x, ARRAYS) else (type(x), x) for x in leaves)
        arrays = [x for x in leaves if isinstance(x, ARRAYS)]
        if not arrays:
            return plain(*args, **kwargs)
        return jax.tree.map(_on_host, _program(plain, tree, fixed)(arrays))

    return call


@functools.lru_cache(maxsize=1000)
def _program(plain, tree, fixed):
    def program(arrays):
        rest = iter(arrays)
        args, kwargs = jax.tree.unflatten(tree, [next(rest) if x is None else x[1] for x in fixed])
        return plain(*args, **kwargs)

    return jax.jit(program)


def _on_host(x):
    is_traced = isinstance(x, jax.core.Tracer)
    return x if is_traced or jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)


@functools.lru_cache(maxsize=1000)
def grad(plain, *argnums, **settings):
    return function(jax.grad(plain, *argnums, **settings))


@functools.lru_cache(maxsize=1000)
def value_and_grad(plain, *argnums, **settings):
    return function(jax.value_and_grad(plain, *argnums, **settings))


class Module:
    """A module whose functions, and those of its tables, are called so."""

    def __init__(self, plain):
        self._plain = plain

    def __getattr__(self, name):
        found = getattr(self._plain, name)
        if isinstance(found, dict):
            return {key: _called(value) for key, value in found.items()}
        return _called(found)


def _called(found):
    return function(found) if callable(found) and not isinstance(found, type) else found
