"""How each published command runs tiny, see published.py.

`WAYS` is read from top to bottom, the first pattern that begins a command counts. `MADE` makes what a
command reads and no clone has.
"""

import dataclasses
import gzip
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping

import numpy as np

from tests.audit import dumps
from tests.doctor import logs

MODEL = {
    "model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 1,
    "model.head_dim": 16, "model.mlp_dim": 48,
}
BATCH = {
    "rollout.prompts": 2, "rollout.group_size": 2, "engine.slots": 4, "engine.prefill_batch": 4,
    "train.microbatch_rows": 4, "steps": 1, "eval.prompts": 2,
}


def fields(*groups: Mapping[str, object]) -> str:
    return " ".join(f"--config.{name}={x}" for group in groups for name, x in group.items())


TINY = fields(MODEL, BATCH)
RUN = f"{TINY} --config.warmup.steps=1 --config.warmup.rows=4"
# Config and workdir of a command that leaves them open.
OPEN = (("--config=...", "--config=configs/quickstart.py"), ("--workdir=...", "--workdir=new/run"))
SMALL_RANK = (r"--config\.model\.lora=.*", "--config.model.lora=lora(rank=2)")
# A run begins in a new folder: `new` is emptied before each command.
NEW = (*OPEN, (r"--workdir=(runs/.*|WORKDIR)", "--workdir=new/run"), SMALL_RANK)
# The program of a run that is only parsed and checked.
CHECK = (
    "import sys; from jaxrl_tis import cli_flags, validate; "
    "validate.validate(cli_flags.parsed(sys.argv[1:]))"
)


@dataclasses.dataclass(frozen=True)
class Way:
    """How a command runs.

    Attributes:
      add: arguments after those of the page.
      swap: (pattern, text) for whole arguments; an empty text leaves the argument out.
      instead: what takes the place of all arguments, because of `why`.
      check: only parse and check the config, because of `why`.
      why: the reason.
      codes: exit codes of success.
      until: the command does not end; it is stopped once it printed this.
      feed: file for its standard input.
    """

    add: str = ""
    swap: tuple[tuple[str, str], ...] = ()
    instead: str = ""
    check: bool = False
    why: str = ""
    codes: tuple[int, ...] = (0,)
    until: str = ""
    feed: str = ""


def help_for(why: str) -> Way:
    return Way(instead="--help", why=why)


MENTION = help_for("the page names the command without its arguments")
SMOKE = Way("--smoke", swap=(
    (r"--\w+_python=.*", ""),  # of other libraries, whose environments are not here
    (r"--rows=ROWS", "--rows=8"), (r"--tokenizer=models/.*", ""),
))
DRY = Way("--dry-run", swap=(("--config=CONFIG", "--config=configs/gsm8k_qwen25_0p5b.py:grpo"),))
FIGURE = Way(swap=((r"docs/experiments", ""),))  # the default
LANE = "the lane itself, or hours"

WAYS: dict[str, Way] = {
    # Benchmarks.
    r"python -m benchmarks\.accelerator --row": Way(),
    r"python -m benchmarks\.accelerator": help_for("launch/accelerator.sh runs it for minutes"),
    r"python -m benchmarks\.prose": Way(codes=(0, 1)),  # 1: a page is above a limit
    r"python -m benchmarks\.canary": Way(
        f"{TINY} --config.train.minibatches=1 --prompts=2",
        swap=((r"--config=.*", "--config=tests/small_run.py"), SMALL_RANK),
    ),
    r"python -m benchmarks\.config_memory .*--gpu": help_for("needs the compiler of GPUs"),
    r"python -m benchmarks\.config_memory": Way("--layers=1 --programs=decode"),
    r"python -m benchmarks\.\w+": SMOKE,
    # Runs whose weights or machines are not here.
    r"(RAY_ADDRESS=\S+ )?python -m jaxrl_tis\.main --config=configs/(dapo|gsm8k|smollm2)": Way(
        check=True, why="needs weights that are downloaded, and most of them a TPU slice",
    ),
    r"RAY_ADDRESS=\S+ python -m jaxrl_tis\.main": Way(check=True, why="needs that Ray cluster"),
    r"python -m jaxrl_tis\.main .*--coordinator": Way(check=True, swap=OPEN, why="needs two hosts"),
    r"python -m jaxrl_tis\.main --config=configs/NAME": help_for("stands for every config"),
    r"python -m jaxrl_tis\.main .*--config\.model\.path": Way(
        f"{fields(BATCH)} --config.task.max_prompt_tokens=16 --config.rollout.max_new_tokens=4", NEW,
    ),
    # Runs.
    r"python -m jaxrl_tis\.main .*--workdir=runs/bad": Way(TINY, NEW, codes=(2,)),  # as the page says
    r"python -m jaxrl_tis\.main .*--change": Way(
        RUN.replace("--config.steps=1", "--config.steps=2"),
        (*OPEN[:1], ("--workdir=.*", "--workdir=WORKDIR")),
    ),
    r"python -m jaxrl_tis\.main .*task\.name=jsonl": Way(TINY, NEW),
    r"python -m jaxrl_tis\.main .*configs/async_local": Way(
        f"{RUN} --config.task.params.digits=2 --config.rollout.max_new_tokens=4 "
        "--config.engine.steps_per_call=4 --config.metrics.samples=2", NEW,
    ),
    r"(XLA_FLAGS=\S+ )?python -m jaxrl_tis\.main .*--workdir": Way(RUN, NEW),
    r"python launch/supervise\.py": Way(RUN, NEW),
    # Tools.
    r"python -m jaxrl_tis\.(aot|audit|doctor|gate|serve|sweep)( --json| FILE --from=)?$": MENTION,
    r"python -m jaxrl_tis\.aot .*--fit": help_for("searches for half an hour"),
    r"python -m jaxrl_tis\.aot": Way("--layers=1 --programs=decode", (
        ("--config=...", "--config=configs/dapo_qwen25_32b.py"),
    )),
    r"python -m jaxrl_tis\.audit .*--routes_shape": Way(
        "--num_experts=16", (("dump.jsonl", "tests/audit/routes.jsonl.gz"), ("--routes_shape=.*", "")),
    ),
    r"python -m jaxrl_tis\.audit dump\.npz --columns": Way(swap=(("dump.npz", "named.npz"),)),
    r"python -m jaxrl_tis\.audit": Way(),
    r"python -m jaxrl_tis\.doctor -$": Way(feed="train.log"),
    r"python -m jaxrl_tis\.(doctor|provision)": Way(),
    r"python -m jaxrl_tis\.evaluate models/mine": Way(
        f"{TINY} --samples=1", (("--config=.*", "--config=configs/quickstart.py"),),
    ),
    r"python -m jaxrl_tis\.evaluate": Way(f"{TINY} --samples=1"),
    r"python -m jaxrl_tis\.export": Way(swap=(
        ("--step=50", "--step=1"), (r"(adapters|models)/.*|OUT|exported", "new/export"),
    )),
    r"python -m jaxrl_tis\.gate .*--engine=": help_for("needs a running engine"),
    r"python -m jaxrl_tis\.gate": Way(f"{TINY} --prompts=2", OPEN, codes=(0, 1)),  # 1: it fails
    r"python -m jaxrl_tis\.libtpu_flags": Way(),
    r"python -m jaxrl_tis\.report": Way(),
    r"python -m jaxrl_tis\.score .*\.gguf": help_for("no command writes a GGUF file"),
    r"python -m jaxrl_tis\.score": Way(),
    r"python -m jaxrl_tis\.serve": Way(f"{TINY} --port=0", until="Uvicorn running"),
    r"python -m jaxrl_tis\.sweep .*--launch": Way(),
    r"python -m jaxrl_tis\.sweep": Way("--dry_run"),  # sweep_test.py runs a small one
    # Studies.
    r"python -m experiments\.engines": help_for("needs vLLM, and hours"),
    r"python -m experiments\.contexts": help_for("trains and samples for minutes; its test does a small part"),
    r"python -m experiments\.figures router_noise_trained": help_for(
        "computes for many minutes; its test computes a small part"
    ),
    r"python -m experiments\.async_clock": Way("--steps=3"),
    r"python -m experiments\.referee_runs .*--gradients": help_for("computes for many minutes"),
    r"python -m experiments\.referee_runs": Way("--seeds=0 --arms=none --folder=runs"),
    r"python -m experiments\.": FIGURE,
    # Pages and notebooks.
    r"python (docs/make_\w+|colab/notebooks)\.py": Way(),
    # Scripts.
    r"EXTRA=\w+ \./launch/accelerator\.sh": Way(instead="-n", why="needs packages of a GPU"),
    r"\./launch/accelerator\.sh": Way("--smoke", (("NAME|h100", ""),), codes=(0, 1)),
    r"(JOBS=\d )?\./launch/aot\.sh": help_for("an hour of compiling; its commands run one by one"),
    r"\./launch/async_local\.sh": Way(
        "--config.steps=8 --config.task.params.digits=40 --config.rollout.max_new_tokens=48 "
        "--config.task.max_prompt_tokens=96 --config.warmup.steps=1 --config.eval.prompts=2"
    ),
    r"(JOBS=\d )?\./launch/figures\.sh lora_smollm2": help_for("needs SmolLM2"),
    r"(JOBS=\d )?\./launch/figures\.sh( NAME)?$": Way("rescue --smoke", (("NAME", ""),)),
    r"(JOBS=\d )?\./launch/figures\.sh": Way("--smoke"),
    r"\./launch/jetstream\.sh": help_for("installs 3 GB into an environment of its own"),
    r"(\w+=\S+ )*\./launch/on_(engines|ray|vm)\.sh": help_for("runs on the hosts of a cluster"),
    r"\./launch/lint\.sh": Way(),
    r"\./launch/quickstart\.sh vllm": help_for("installs 3 GB; a test runs vLLM"),
    r"\./launch/quickstart\.sh": Way(RUN),
    r"\./launch/vllm\.sh": help_for("installs 3 GB into an environment of its own"),
    r"\./launch/smollm2\.sh": help_for("downloads a model"),
    r"(OPTIMIZED=1 )?\./launch/test\.sh": Way("tests/choices_test.py"),
    r"\./tests/profile\.sh": Way("tests/choices_test.py"),
    r"python launch/(tpu_vm|gke/jobset|gke/raycluster)\.py .*--dry-run": Way(),
    r"python launch/(tpu_vm|gke/jobset|gke/raycluster)\.py": DRY,
    r"\.ci/\w+": Way(instead="-n", why=LANE),
    r"python -m tests\.mutants": Way("--check"),
    r"python -m tests\.published": Way("--list"),
}


def way(text: str) -> Way | None:
    """Returns how a command runs; None for one that the table lacks."""
    text = re.sub(r"(python -m jaxrl_tis|jaxrl-tis) (?=[a-z])", "python -m jaxrl_tis.", text)
    text = text.replace("jaxrl_tis.train ", "jaxrl_tis.main ")
    return next((way for pattern, way in WAYS.items() if re.match(pattern, text)), None)


# What commands read


def _verl(path: pathlib.Path) -> None:
    rows = logs.rows(logs.VERL)
    lines = (" - ".join([f"step:{s}", *(f"{n}:{x}" for n, x in row.items())]) for s, row in rows)
    path.write_text("\n".join(lines) + "\n")


def _state(path: pathlib.Path) -> None:
    logs.write_state(path, logs.rows(logs.TRL))


def _outputs(path: pathlib.Path) -> None:
    (path / "checkpoint-120").mkdir(parents=True)
    _state(path / "checkpoint-120" / "trainer_state.json")


def _dump(path: pathlib.Path) -> None:
    names = {"logp_behav": "rollout_log_probs", "logp_old": "old_log_probs"}
    is_ours = path.suffix == ".jsonl"
    lines = dumps.records()
    if not is_ours:
        lines = [{names.get(name, name): x for name, x in line.items()} for line in lines]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(text) if is_ours else path.write_bytes(gzip.compress(text.encode()))


def _arrays(path: pathlib.Path) -> None:
    names = ("logp_behav", "old_log_probs" if path.stem == "named" else "logp_old")
    lines = dumps.only(dumps.records(), "logp_behav", "logp_old", "reward", "version")
    columns = {name: [line[name] for line in lines] for name in lines[0]}
    tokens = [np.concatenate(columns.pop(name)) for name in ("logp_behav", "logp_old")]
    lengths = np.array([len(line["logp_old"]) for line in lines])
    each = {name: np.array(x) for name, x in columns.items()}
    np.savez(path, **dict(zip(names, tokens, strict=True)), **each, lengths=lengths)


def _tokens(path: pathlib.Path) -> None:
    np.save(path, np.zeros((1, 4), np.int32))


def _report(path: pathlib.Path) -> None:
    shutil.copy(path.parent / "docs/accelerators/h200.json", path)


BASE = "python -m jaxrl_tis.main --config=configs/quickstart.py"
# A file's maker, or the command that makes a folder. The run with an adapter has the weights of
# runs/base, whose rate is 0.
MADE: dict[str, str | Callable[[pathlib.Path], None]] = {
    "runs/first": f"{BASE} {RUN} --workdir=runs/first",
    "runs/base": f"{BASE} {TINY} --config.warmup.steps=0 --config.optimizer.lr=0 --workdir=runs/base",
    "runs/lora": f"{BASE} {TINY} --config.warmup.steps=0 '--config.model.lora=lora(rank=2)' "
    "--workdir=runs/lora",
    "models/mine": "python -m jaxrl_tis.export runs/base models/mine",
    "adapters/lora": "python -m jaxrl_tis.export runs/lora adapters/lora --adapter",
    "in.npy": _tokens,
    "dump.jsonl": _dump, "dump.jsonl.gz": _dump, "dump.npz": _arrays, "named.npz": _arrays,
    "slurm-4711.out": _verl, "train.log": _verl, "outputs/my-run": _outputs,
    "trainer_state.json": _state,
    "trainer.jsonl": lambda path: logs.write_jsonl(path, logs.rows(logs.PRIME)),
    "orchestrator.jsonl": lambda path: logs.write_jsonl(path, logs.rows(logs.PRIME_ORCHESTRATOR)),
    "h100.json": _report,
    "token.txt": lambda path: path.write_text("secret\n"),
}
SAME = {  # folders that are copies of one that is made
    **dict.fromkeys(
        ("WORKDIR", "runs/second", "runs/quickstart-tis", "runs/mine", "runs/a", "runs/b"), "runs/first"
    ),
    "MODEL": "models/mine", "adapters/a": "adapters/lora",
}
