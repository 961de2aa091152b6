"""Logits of given tokens.

Reads int tokens [B,T], writes float32 logits [B,T,V]; row by row, so memory holds one row's.

Examples:

    python -m jaxrl_tis.score --model=models/mine --tokens=in.npy --out=out.npy
    python -m jaxrl_tis.score --model=models/mine.gguf --tokens=in.npy --out=out.npy
    python -m jaxrl_tis.score --model=models/mine --adapter=adapters/a --tokens=in.npy --out=out.npy
"""

import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from jaxrl_tis import cli_flags, models
from jaxrl_tis.models import overflow, peft, peft_config, transformer

MODEL: Any = flags.DEFINE_string("model", None, "Checkpoint folder or .gguf file.")
ADAPTER = flags.DEFINE_string("adapter", None, "Folder of a PEFT adapter of this model.")
TOKENS: Any = flags.DEFINE_string("tokens", None, ".npy file with tokens [B,T].")
OUT: Any = flags.DEFINE_string("out", None, ".npy file to write logits [B,T,V] to.")


def score(model: str, tokens_bt: np.ndarray, out: str, adapter: str | None = None) -> None:
    """Writes the logits [B,T,V] in float32 of `tokens_bt` [B,T] to the .npy file `out`. `adapter` is
    the folder of a PEFT adapter, which stays beside the model's weights.

    Raises:
      ValueError: the tokens are no [B,T] array of integers below the model's vocabulary.
      FloatingPointError: a logit is not finite; `out` is then removed.
    """
    if adapter is not None and (why := peft_config.other_base(adapter, model)):
        print(f"warning: {why}", file=sys.stderr)
    loaded = None if adapter is None else peft.load(adapter, models.read_config(model))
    config, params = models.load(model)
    if adapter is not None and loaded is not None:
        params = peft.join(params, adapter, *loaded)
    _check_tokens(tokens_bt, config.vocab_size)
    row_logits = jax.jit(lambda params, tokens: transformer.logits(params, config, tokens))
    shape = (*tokens_bt.shape, config.vocab_size)
    written = np.lib.format.open_memmap(out, mode="w+", dtype=np.float32, shape=shape)
    for i, tokens in enumerate(tokens_bt):
        written[i] = row_logits(params, jnp.asarray(tokens, jnp.int32)[None])[0]
        if not np.isfinite(written[i]).all():
            os.remove(out)
            why = overflow.cause(params, config, transformer.Program(), tokens)
            raise FloatingPointError(f"the logits of row {i} are not finite: {why}")
    written.flush()


def _check_tokens(tokens_bt: np.ndarray, vocab_size: int) -> None:
    is_integer = np.issubdtype(tokens_bt.dtype, np.integer)
    if tokens_bt.ndim != 2 or not is_integer or not tokens_bt.size:
        raise ValueError(
            f"Tokens must be integers [B,T], B and T at least 1, got "
            f"{tokens_bt.dtype}{list(tokens_bt.shape)}.")
    if not 0 <= tokens_bt.min() <= tokens_bt.max() < vocab_size:
        raise ValueError(
            f"Tokens {tokens_bt.min()} to {tokens_bt.max()} must lie in the vocabulary, 0 to "
            f"{vocab_size - 1}.")


def read_tokens(path: str) -> np.ndarray:
    """Reads the array in a .npy file; FileNotFoundError or ValueError where there is none."""
    try:
        tokens = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is not a .npy file of numbers: {error}; write it with numpy.save"
        ) from error
    if not isinstance(tokens, np.ndarray):
        raise ValueError(f"{path} holds several arrays; a .npy file holds one")
    return tokens


def main() -> None:
    score(MODEL.value, read_tokens(TOKENS.value), OUT.value, ADAPTER.value)


if __name__ == "__main__":
    cli_flags.run(main, required=["model", "tokens", "out"])
