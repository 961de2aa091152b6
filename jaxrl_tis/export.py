"""Writes the policy of a run as a Hugging Face folder, which transformers, vLLM and this project read.

The tokenizer's files come along, with its chat template, its end tokens and the defaults that the
checkpoint gives for sampling. Before the command ends it reads the folder back and compares all of it.

Examples:

    python -m jaxrl_tis.export runs/first models/first
    python -m jaxrl_tis.export runs/first models/first-50 --step=50 --dtype=float32
"""

import json
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from jaxrl_tis import models
from jaxrl_tis.build import small_model
from jaxrl_tis.data.tokenizer import Tokenizer
from jaxrl_tis.data.tokenizer_files import load_tokenizer
from jaxrl_tis.models import transformer
from jaxrl_tis.models.hf_config import GENERATION
from jaxrl_tis.record.checkpoint import Checkpoints
from jaxrl_tis.record.provenance import saved_config
from jaxrl_tis.runtime import cli, hub

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
      dtype: of the weights in the folder; the bias of a router stays in float32.

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
    params = transformer.cast(state["policy"]["params"], dtype)
    with tempfile.TemporaryDirectory() as folder:
        source = hub.local(config.task.tokenizer or config.model.path, weights=False)
        if not source.is_dir():  # a .gguf file, or "char"
            source = _described(tokenizer, pathlib.Path(folder))
        fields = _generation_fields(source, tokenizer)
        files = [source / name for name in TOKENIZER_FILES if (source / name).exists()]
        about = {"run": config.name, "step": f"{meta['step']}", "made_by": "jaxrl_tis"}
        models.save(out, model, params, files, about, fields)
        expected = _identity(tokenizer) | {"generation config": _generation(source, fields)}
    _check(out, model, params, dtype, expected)
    return meta["step"]


def _described(tokenizer: Tokenizer, folder: pathlib.Path) -> pathlib.Path:
    """Writes the files of a tokenizer that has none into `folder`, which it returns."""
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "bos_token": None, **tokenizer.special, "chat_template": tokenizer.template,
    }
    ids = {name: tokenizer.backend.token_to_id(text) for name, text in tokenizer.special.items()}
    ids = {f"{name}_id": index for name, index in ids.items()}
    ids |= {"eos_token_id": list(tokenizer.eos_ids)}
    files = {"tokenizer_config": described, "generation_config": ids, "config": ids}
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n")
    return folder


def _read(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _generation_fields(source: pathlib.Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns what config.json says of generation: all that the source's says, and the end tokens
    that samples of the run ended at where neither file of the source names any."""
    fields = {name: x for name, x in _read(source / "config.json").items() if name in GENERATION}
    named = [_read(source / f"{name}.json") for name in ("config", "generation_config")]
    if all(values.get("eos_token_id") is None for values in named):
        fields["eos_token_id"] = list(tokenizer.eos_ids)
    return fields


def _generation(folder: pathlib.Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the generation config as transformers reads it in `folder`: generation_config.json,
    or without that `fields` of config.json."""
    return _read(folder / "generation_config.json") or fields


def _identity(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns what a server needs to know of a tokenizer beside its ids."""
    return {
        "end tokens": tokenizer.eos_ids, "start token": tokenizer.bos_id,
        "padding": tokenizer.pad_id, "special tokens": dict(tokenizer.special),
        "chat template": tokenizer.template, "ids": tokenizer.ids.tolist(),
    }


def _check(
    out: str, model: models.ModelConfig, params: Any, dtype: str, expected: dict[str, Any]
) -> None:
    """Reads the folder `out` and compares it with what it was to hold; another one is set aside."""
    found, read = models.load(out, dtype=dtype)
    tokens = jnp.arange(16)[None] % model.vocab_size
    logits = jax.jit(lambda p: transformer.logits(p, model, tokens))
    same = [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(read))]
    wrong = []
    if found != model or not all(same) or not np.array_equal(logits(params), logits(read)):
        wrong.append("model")
    folder = pathlib.Path(out)
    fields = {n: x for n, x in _read(folder / "config.json").items() if n in GENERATION}
    written = _identity(load_tokenizer(out)) | {"generation config": _generation(folder, fields)}
    wrong += [name for name, value in expected.items() if written[name] != value]
    if wrong:
        shutil.move(out, f"{out}.wrong")
        raise RuntimeError(
            f"{out} reads back with another {', '.join(wrong)}; it is now {out}.wrong, which should "
            "not be used"
        )


def main() -> None:
    """Command line: see the top of the file."""
    parser = cli.parser("jaxrl_tis.export", "A run's policy as a Hugging Face folder.", __doc__)
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
