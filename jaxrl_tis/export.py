"""Writes the policy of a run as a Hugging Face folder, which transformers, vLLM and this project read.

The tokenizer's files come along, with its chat template, its end tokens and the defaults that the
checkpoint gives for sampling. Before the command ends it reads the folder back and compares all of it.
A run with model.lora is written as a folder of PEFT, or merged into its base in float32.

Examples:

    python -m jaxrl_tis.export runs/first models/first
    python -m jaxrl_tis.export runs/first models/first-50 --step=50 --dtype=float32
    python -m jaxrl_tis.export runs/lora adapters/lora --adapter
    python -m jaxrl_tis.export runs/lora models/lora --merged
    python -m jaxrl_tis.export runs/first models/first-for-vllm --untied
"""

import dataclasses
import json
import math
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
from jaxrl_tis.learner.state import BASE, frozen
from jaxrl_tis.models import lora, peft, quant, transformer
from jaxrl_tis.models.hf_config import GENERATION
from jaxrl_tis.record.checkpoint import Checkpoints
from jaxrl_tis.record.provenance import saved_config
from jaxrl_tis.runtime import cli, hub, storage

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json", "vocab.json", "merges.txt", "tokenizer.model",
)
DTYPES = ("bfloat16", "float32")


def export(
    workdir: str, out: str, step: int | None = None, dtype: str = "bfloat16", is_untied: bool = False
) -> int:
    """Writes the folder `out` from a run's checkpoint and returns the checkpoint's step.

    Args:
      workdir: folder of the run, also on a bucket.
      step: of the checkpoint; None takes the newest.
      dtype: of the weights in the folder; the bias of a router stays in float32.
      is_untied: write tied embeddings as a table and a head of their own, with the same numbers.

    Raises:
      FileNotFoundError: there is no such run or step.
      FileExistsError: `out` exists.
      RuntimeError: what was written reads back as something else.
    """
    values = saved_config(workdir)
    if values is None:
        raise FileNotFoundError(f"{workdir} has no config.json: is it the --workdir of a run?")
    out = _target(out)
    config = ml_collections.ConfigDict(values)
    tokenizer = load_tokenizer(config.task.tokenizer or config.model.path)
    if config.model.path:
        model = models.read_config(config.model.path)
    else:
        model = small_model(config, tokenizer.vocab_size)
    params, meta = _restored(workdir, config, model, step)
    if (factors := lora.split(params))[1] is not None:
        if dtype != "float32":
            raise ValueError(
                f"the run has model.lora = {config.model.lora!r}, and a merge in {dtype} loses small "
                "updates; export it with --merged, which is float32, or --adapter"
            )
        base = transformer.cast(factors[1], "float32")
        params = lora.merged(lora.join_like(params, base, factors[0]))
    params = transformer.cast(params, dtype)
    if is_untied and model.tie_embeddings:
        model = dataclasses.replace(model, tie_embeddings=False)
        params = params | {"head": params["embed"].T}
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


def export_adapter(workdir: str, out: str, step: int | None = None) -> int:
    """Writes the adapter of a run with model.lora as a folder of PEFT, reads it back, and returns the
    checkpoint's step. Raises as `export`, and ValueError for a run without an adapter."""
    if (values := saved_config(workdir)) is None:
        raise FileNotFoundError(f"{workdir} has no config.json: is it the --workdir of a run?")
    out = _target(out)
    config = ml_collections.ConfigDict(values)
    tokenizer = load_tokenizer(config.task.tokenizer or config.model.path)
    model = models.read_config(config.model.path) if config.model.path else small_model(
        config, tokenizer.vocab_size
    )
    params, meta = _restored(workdir, config, model, step)
    factors, base = lora.split(params)
    if base is None:
        raise ValueError(f"{workdir} trained all weights, and has no adapter; leave out --adapter")
    adapter = lora.adapter_of(params, model)
    peft.save(out, adapter, factors, config.model.path)
    read, found = peft.load(out, model)
    same = jax.tree.map(np.array_equal, found, factors)
    if not _is_same(read, adapter) or not all(jax.tree.leaves(same)):
        shutil.move(out, f"{out}.wrong")
        raise RuntimeError(f"{out} reads back as another adapter; it is now {out}.wrong")
    return meta["step"]


def _target(out: str) -> str:
    """Returns the folder to make; ValueError if it is on a bucket."""
    if storage.is_remote(out):
        raise ValueError(
            f"{out} is not a folder of this machine; export to one, and copy it: gcloud storage cp -r"
        )
    return out.rstrip("/")


def _is_same(one: lora.Adapter, other: lora.Adapter) -> bool:
    """Compares adapters. A scale may differ in its last bits: a file has alpha, its product with the
    rank."""
    scales, others = dict(one.scales), dict(other.scales)
    return dataclasses.replace(one, scales=other.scales) == other and scales.keys() == others.keys() and (
        all(math.isclose(scales[name], others[name], rel_tol=1e-12) for name in scales)
    )


def _restored(
    workdir: str, config: ml_collections.ConfigDict, model: models.ModelConfig, step: int | None
) -> tuple[Any, dict[str, Any]]:
    """Returns (the policy's parameters in a checkpoint, adapted with model.lora; its meta)."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    place = lambda tree: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), tree
    )
    shapes, recipe = transformer.abstract_params(model, config.model.param_dtype), None
    if "lora" in config.model:  # not in runs from before there was one
        recipe = lora.parse(config.model.lora)
    adapter = None if recipe is None else lora.Adapter.of(recipe, model, shapes)
    trained = place(shapes if adapter is None else adapter.abstract(shapes))
    with Checkpoints(workdir, keep=1) as checkpoints:
        state, meta = checkpoints.restore({"policy": {"params": trained}}, step, is_part=True)
    params = state["policy"]["params"]
    if adapter is None:
        return params, meta
    m = config.model
    program = transformer.Program(
        m.dtype, fp32_head=m.fp32_head, quantization=quant.Recipe(m.quantization, tuple(m.unquantized))
    )
    constant = place(jax.eval_shape(lambda params: frozen(program, params), shapes))
    with Checkpoints(storage.folder(workdir) / BASE, keep=1) as checkpoints:
        base = checkpoints.restore({BASE: constant})[0][BASE]
    return adapter.join(base, params), meta


def _described(tokenizer: Tokenizer, folder: pathlib.Path) -> pathlib.Path:
    """Writes the files of a tokenizer that has none into `folder`, which it returns."""
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "bos_token": None, **tokenizer.special, "chat_template": tokenizer.template,
    }
    to_id = tokenizer.backend.token_to_id
    ids: dict[str, Any] = {f"{name}_id": to_id(text) for name, text in tokenizer.special.items()}
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
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(read), strict=True)
    same = [np.array_equal(a, b) for a, b in pairs]
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
    of_adapter = parser.add_mutually_exclusive_group()
    of_adapter.add_argument(
        "--adapter", action="store_true", help="write a PEFT folder of the adapter"
    )
    of_adapter.add_argument("--merged", action="store_true", help="merge the adapter, in float32")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the weights; default: bfloat16, and float32 with --merged"
    )
    parser.add_argument(
        "--untied", action="store_true",
        help="write tied embeddings as a table and a head, for engines that update the table alone",
    )
    args = parser.parse_args()
    if args.adapter and args.untied:
        parser.error("--adapter writes no embeddings; leave out --untied")
    if args.merged and args.dtype == "bfloat16":
        parser.error("--merged with --dtype=bfloat16 would lose small updates; leave out --dtype")
    jax.config.update("jax_platforms", "cpu")  # a chip may hold less, and be in use
    if args.adapter:
        step = export_adapter(args.workdir, args.out, args.step)
        print(f"{args.out}: the adapter after step {step}, read back and compared")
        return
    dtype = args.dtype or ("float32" if args.merged else "bfloat16")
    step = export(args.workdir, args.out, args.step, dtype, args.untied)
    print(f"{args.out}: the policy after step {step}, in {dtype}, read back and compared")


if __name__ == "__main__":
    cli.run(main)
