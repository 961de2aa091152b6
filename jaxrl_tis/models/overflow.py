"""Finds where the numbers of a model stop being finite.

Nothing here runs until a log-prob has been seen that is not finite. Then one sequence is computed
again, layer by layer.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.models.transformer import Params, Program, residuals

# Families whose activations exceed the largest float16. In Gemma 3 they reach several 100,000.
FLOAT16_OVERFLOWS = ("gemma3_text",)
UNCHECKED = ("perturbation",)  # logarithms, which may be -inf


def doubt(config: ModelConfig, dtypes: dict[str, str]) -> str:
    """Returns a warning about a family that overflows in float16, "" without one. `dtypes` maps the
    names of settings to the dtypes that they choose."""
    named = [f"{name} = {dtype!r}" for name, dtype in dtypes.items() if dtype == "float16"]
    if not named or config.family not in FLOAT16_OVERFLOWS:
        return ""
    return (
        f"{' and '.join(named)}: models of the family {config.family} are known to exceed "
        f"{np.finfo(np.float16).max:g}, the largest float16; set bfloat16 or float32"
    )


def cause(params: Params, config: ModelConfig, program: Program, tokens: Any) -> str:
    """Returns where the values of a sequence stop being finite, as a sentence without its full stop.

    Args:
      params, program: the learner's or the sampler's.
      tokens: [T] all tokens of the pass that gave the log-prob that is not finite.
    """
    if weight := next(_broken_weights(params), None):
        return f"the weight {weight} is not finite"
    largest, last = 0.0, config.num_layers - 1
    for i, x_btd in enumerate(residuals(params, config, program, _rows(program, tokens)), -1):
        peak = float(_peak(x_btd[:, : len(tokens)]))
        if not np.isfinite(peak):
            place = "the embeddings" if i < 0 else (
                f"layer {i} (of layers 0 to {last}), whose input is at most {largest:.4g}"
            )
            most = float(jnp.finfo(program.dtype).max)
            return (
                f"values stop being finite in {place}; the largest {program.dtype} is {most:.6g}. "
                "Compute in a dtype of a wider range, bfloat16 or float32"
            )
        largest = peak
    return (
        f"layers 0 to {last} are finite in a pass over the whole sequence, at most {largest:.4g}; "
        "the fault is in the output head or in the cache"
    )


def _broken_weights(params: Params) -> Iterator[str]:
    """Yields the names and dtypes of the parameters with a number that is not finite."""
    named = {
        jax.tree_util.keystr(path, simple=True, separator="."): x
        for path, x in jax.tree.leaves_with_path(params) if jnp.issubdtype(x.dtype, jnp.floating)
    }
    checked = {name: x for name, x in named.items() if not name.startswith(UNCHECKED)}
    for name, is_finite in zip(checked, jax.device_get(_are_finite([*checked.values()])), strict=True):
        if not is_finite:
            yield f"{name} ({checked[name].dtype})"


@jax.jit
def _are_finite(weights: list[jax.Array]) -> list[jax.Array]:
    return [jnp.isfinite(x.astype(jnp.float32)).all() for x in weights]


@jax.jit
def _peak(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x.astype(jnp.float32)))


def _rows(program: Program, tokens: np.ndarray) -> jax.Array:
    """Returns the sequence in as many equal rows as the mesh cuts a batch into, with padding after
    it, which no earlier token sees."""
    layout = program.layout
    if layout is None:
        return jnp.asarray(tokens, jnp.int32)[None]
    rows = np.zeros((layout.shards, layout.whole_row(len(tokens))), np.int32)
    rows[:, : len(tokens)] = tokens
    return layout.put(rows, ("batch", None))
