"""Prints the temporary memory of the policy update by vocabulary and response length.

    python -m benchmarks.memory

The figures are the compiler's, for this backend. Logits of all positions would take rows * tokens *
vocabulary * 4 bytes. This product is printed for comparison.
"""

import argparse
import dataclasses

import jax

from benchmarks import arguments, model
from jaxrl_tis.learner.state import abstract_state
from jaxrl_tis.learner.step import make_train_step
from jaxrl_tis.runtime import cli

FLOATS = ("logp_old", "logp_prox", "logp_behav", "weights", "adv")


def temporary_bytes(vocab_size: int, new_tokens: int) -> tuple[int, int]:
    """Returns (temporary bytes of the update, parameter bytes)."""
    shape = dataclasses.replace(model.SMALL.model, vocab_size=vocab_size)
    made, _ = model.setup(dataclasses.replace(model.SMALL, model=shape, new_tokens=new_tokens))
    training = made.training
    state = abstract_state(training)["policy"]
    rows, t = made.config.train.microbatch_rows, training.row_length
    struct = lambda dtype: jax.ShapeDtypeStruct((1, rows, t), dtype)
    batch = {name: struct("int32") for name in ("tokens", "positions", "segment_ids")}
    batch |= {name: struct("float32") for name in FLOATS}
    batch |= {"mask": struct("bool"), "temperature": struct("float32")}
    update = make_train_step(training.learner, training.correction, training.optimizer)
    analysis = update.lower(state, batch).compile().memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.params))
    return analysis.temp_size_in_bytes, size


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49_152, 98_304])
    parser.add_argument("--new_tokens", type=int, nargs="+", default=[64, 256, 1024])
    args = arguments.parse(parser, vocabularies=[256], new_tokens=[16])
    print("vocabulary  new tokens  temporaries  minus 4 x parameters  all logits would be")
    for vocab_size in args.vocabularies:
        for new_tokens in args.new_tokens:
            arguments.say(f"compiling for {vocab_size} and {new_tokens}")
            temporaries, params = temporary_bytes(vocab_size, new_tokens)
            logits = 8 * new_tokens * vocab_size * 4
            print(
                f"{vocab_size:10d}  {new_tokens:10d}  {temporaries / 2**20:8.0f} MiB  "
                f"{(temporaries - 4 * params) / 2**20:17.0f} MiB  {logits / 2**20:15.0f} MiB"
            )


if __name__ == "__main__":
    cli.run(main)
