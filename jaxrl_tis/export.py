"""Writes the policy of a run as a Hugging Face folder, which transformers, vLLM and this project read:

    python -m jaxrl_tis.export WORKDIR OUT [--step N] [--dtype bfloat16]

The tokenizer's files come along, the chat template among them. Before the command ends it reads the
folder back and compares parameters and logits.
"""

import argparse
import json
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from jaxrl_tis import cli, hub, models
from jaxrl_tis.build import small_model
from jaxrl_tis.checkpoint import Checkpoints
from jaxrl_tis.data.tokenizer import HFTokenizer, load_tokenizer
from jaxrl_tis.models import transformer
from jaxrl_tis.provenance import saved_config

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json", "vocab.json", "merges.txt", "tokenizer.model",
)
DTYPES = ("bfloat16", "float32")


def export(workdir: str, out: str, step: int | None = None, dtype: str = "bfloat16") -> int:
    """Writes the folder `out` from a run's checkpoint and returns the checkpoint's step.

    Args:
      workdir: folder of the run, also on a bucket.
      step: of the checkpoint; None takes the newest.
      dtype: of the weights in the folder.

    Raises:
      FileNotFoundError: there is no such run or step.
      FileExistsError: `out` exists.
      RuntimeError: what was written reads back as something else.
    """
    values = saved_config(workdir)
    if values is None:
        raise FileNotFoundError(f"{workdir} has no config.json: is it the --workdir of a run?")
    config = ml_collections.ConfigDict(values)
    tokenizer = load_tokenizer(config.task.tokenizer or config.model.path)
    if config.model.path:
        model = models.read_config(config.model.path)
    else:
        model = small_model(config, tokenizer.vocab_size)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
        transformer.abstract_params(model, config.model.param_dtype),
    )
    with Checkpoints(workdir, keep=1) as checkpoints:
        state, meta = checkpoints.restore({"policy": {"params": abstract}}, step, is_part=True)
    params = jax.tree.map(lambda x: x.astype(dtype), state["policy"]["params"])
    with tempfile.TemporaryDirectory() as folder:
        files = _tokenizer_files(config, tokenizer, pathlib.Path(folder))
        about = {"run": config.name, "step": f"{meta['step']}", "made_by": "jaxrl_tis"}
        models.save(out, model, params, files, about)
    _check(out, model, params, dtype)
    return meta["step"]


def _tokenizer_files(
    config: ml_collections.ConfigDict, tokenizer: Any, folder: pathlib.Path
) -> list[pathlib.Path]:
    """Returns the files of the run's tokenizer; those of a .gguf file are made in `folder`, and a
    tokenizer without files has none."""
    if not isinstance(tokenizer, HFTokenizer):
        return []
    source = hub.local(config.task.tokenizer or config.model.path, weights=False)
    if source.is_dir():
        return [source / name for name in TOKENIZER_FILES if (source / name).exists()]
    token = tokenizer.backend.id_to_token
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": token(tokenizer.eos_ids[0]),
        "pad_token": token(tokenizer.pad_id),
        "bos_token": None if tokenizer.bos_id is None else token(tokenizer.bos_id),
        "chat_template": tokenizer.template,
    }
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")
    ends = {"eos_token_id": list(tokenizer.eos_ids)}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    return sorted(folder.iterdir())


def _check(out: str, model: models.ModelConfig, params: Any, dtype: str) -> None:
    found, read = models.load(out, dtype=dtype)
    tokens = jnp.arange(16)[None] % model.vocab_size
    logits = jax.jit(lambda p: transformer.logits(p, model, tokens))
    same = [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(read))]
    if found != model or not all(same) or not np.array_equal(logits(params), logits(read)):
        shutil.move(out, f"{out}.wrong")
        raise RuntimeError(f"{out} reads back as another model; it is now {out}.wrong")


def main() -> None:
    """Command line: see the top of the file."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_tis.export", description="A run's policy as a Hugging Face folder.",
    )
    parser.add_argument("workdir", metavar="WORKDIR", help="folder of a run")
    parser.add_argument("out", metavar="OUT", help="folder to make")
    parser.add_argument("--step", type=int, help="of the checkpoint; default: the newest")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # a chip may hold less, and be in use
    step = export(args.workdir, args.out, args.step, args.dtype)
    print(f"{args.out}: the policy after step {step}, in {args.dtype}, read back and compared")


if __name__ == "__main__":
    cli.run(main)
