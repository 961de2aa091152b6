"""Engines of others beside a learner: the flags of launch/tpu_vm.py, and hosts that ssh reaches."""

import argparse
import dataclasses
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence

from jaxrl_tis.aot.chips import Topology

KINDS = ("vllm", "sglang")
PORT = 8000
MOUNT = "/mnt/weights"  # where learner and engines see the share
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters, for vLLM
SCRIPTS = ("venv.sh", "vllm.sh", "on_engines.sh")  # that a host of `Engines.hosts` needs
FLAGS = (
    "engine_kind", "engine_hosts", "engine_venv", "engine_arguments", "weights_mount", "max_lora_rank",
)


@dataclasses.dataclass(frozen=True)
class Engines:
    """The engines of a run.

    Attributes:
      names: of the hosts, as the learner reaches them.
      hosts: as ssh reaches them; empty for machines that the launcher requests.
      venv: the environment on `hosts` that has the engine.
      model: a folder of the machines, or OWNER/NAME on the hub.
      folder: of the weights, below MOUNT.
      share: the NFS share that is mounted there, HOST:/PATH.
      arguments: of the server.
    """

    kind: str
    names: tuple[str, ...]
    hosts: tuple[str, ...]
    venv: str
    model: str
    folder: str
    share: str
    arguments: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every machine that the launcher requests."""
        names = ",".join(self.names)
        return {"ENGINES": names, "WEIGHTS_FOLDER": self.folder, "WEIGHTS_MOUNT": self.share}

    @property
    def fields(self) -> list[str]:
        """The config fields of the learner."""
        values = {
            "driver": "external", "engine_kind": self.kind, "weights_folder": self.folder,
            "engines": ",".join(f"http://{name}:{PORT}" for name in self.names),
        }
        own = "--config.engine.quantization=none"  # the format of this program's engine
        return [own, *(f"--config.rollout.{name}={value}" for name, value in values.items())]

    def verb(self, name: str) -> list[str]:
        """Returns the arguments of on_vm.sh that start the engine on the machine of this name."""
        return ["engine", name, self.model, *self.arguments]

    def starts(self, run: str) -> list[list[str]]:
        """Returns the commands that start the engines on `hosts`."""
        paths = [str(pathlib.Path(__file__).with_name(script)) for script in SCRIPTS]
        folder, commands = shlex.quote(self.folder), []
        for name, host in zip(self.names, self.hosts, strict=False):
            words = ["start", name, self.kind, self.venv, self.model, *self.arguments]
            commands += [
                ["ssh", host, f"mkdir -p {run}/launch"],
                ["scp", *paths, f"{host}:{run}/launch/"],
                ["ssh", host, f"WEIGHTS_FOLDER={folder} {_script(run)} {shlex.join(words)}"],
            ]
        return commands


def add_flags(made: argparse.ArgumentParser) -> None:
    for name, text in {
        "engine_kind": "vllm or sglang: such engines sample, on the worker machines or on "
        "--engine_hosts; sets --config.rollout.driver=external",
        "engine_hosts": "hosts for engines that ssh reaches, as me@10.0.0.7,me@10.0.0.8",
        "engine_venv": "absolute path of the environment with the engine on these hosts",
        "engine_arguments": "further arguments of the server, as '--max-model-len 4096'",
        "weights_mount": f"NFS share for the weights, HOST:/PATH; machines see it at {MOUNT}",
    }.items():
        made.add_argument(f"--{name}", help=text)
    made.add_argument("--max_lora_rank", type=int, help="largest rank of adapters in the engines")


def make(
    given: argparse.Namespace, named: Mapping[str, str], workers: Topology | None, run: str
) -> Engines | None:
    """Returns the engines of a run, None if it has none. `named`: the config fields that are given.

    Raises:
      ValueError: the flags contradict each other, or engines of this kind cannot serve the run.
    """
    if given.engine_kind is None:
        if flag := next((name for name in FLAGS if getattr(given, name) is not None), None):
            raise ValueError(f"--{flag} needs --engine_kind; give vllm or sglang, or leave it out")
        return None
    if given.engine_kind not in KINDS:
        raise ValueError(
            f"--engine_kind={given.engine_kind} is unknown; give one of {', '.join(KINDS)}"
        )
    hosts = hosts_of(given)
    if bool(hosts) == (workers is not None):
        raise ValueError(
            f"--engine_kind={given.engine_kind} needs machines for the engines; give one of "
            "--worker_accelerator and --engine_hosts"
        )
    if workers is not None:
        _check_tpu(given)
    elif not (given.engine_venv or "").startswith("/"):
        raise ValueError(
            f"--engine_venv={given.engine_venv or ''} is no absolute path; give the environment with "
            f"{given.engine_kind} on --engine_hosts"
        )
    _check_rank(given)
    folder = _folder(given, named, run)
    names = [host.rpartition("@")[2] for host in hosts]
    arguments = [*_lora(given), *shlex.split(given.engine_arguments or "")]
    if workers is not None:
        names = [f"{run}-worker-{i}" for i in range(workers.num_slices)]
        arguments = ["--tensor-parallel-size", str(workers.chips_per_host), *arguments]
    return Engines(
        given.engine_kind, tuple(names), hosts, given.engine_venv or "", _model(named), folder,
        given.weights_mount, tuple(arguments),
    )


def problem(engines: Engines, secrets: Mapping[str, str]) -> str:
    """Returns why the engines cannot start with these secrets, "" if they can."""
    if engines.model.startswith("/") or "HF_TOKEN" in secrets:
        return ""
    return (f"HF_TOKEN is not set, and the engines fetch hf://{engines.model} from the hub; export "
            "it, or name a folder of the machines")


def hosts_of(given: argparse.Namespace) -> tuple[str, ...]:
    return tuple(part.strip() for part in (given.engine_hosts or "").split(",") if part.strip())


def command(host: str, run: str, verb: str) -> list[str]:
    """Returns the command for `status` or `stop` of the engine on a host."""
    return ["ssh", host, f"{_script(run)} {verb}"]


def _script(run: str) -> str:
    return f"bash {run}/launch/on_engines.sh"


def _check_tpu(given: argparse.Namespace) -> None:
    """Raises ValueError where engines on TPU cannot serve a run. Read in tpu-inference 0.32 and
    sglang-jax 0.0.2."""
    if given.engine_kind == "sglang":
        raise ValueError(
            "--engine_kind=sglang cannot run on --worker_accelerator: sglang-jax has no route that "
            "reads weights; give --engine_kind=vllm, or hosts with GPUs by --engine_hosts"
        )
    if given.max_lora_rank is None:
        raise ValueError(
            "--max_lora_rank is missing: vLLM on TPU has no method that reads whole weights, only "
            "LoRA adapters; give the rank of --config.model.lora, or hosts with GPUs by --engine_hosts"
        )


def _check_rank(given: argparse.Namespace) -> None:
    rank = given.max_lora_rank
    if given.engine_kind == "vllm" and rank not in (None, *RANKS):
        raise ValueError(
            f"--max_lora_rank={rank} is no rank of vLLM; give one of {', '.join(map(str, RANKS))}"
        )
    if rank is not None and rank < 1:
        raise ValueError(f"--max_lora_rank={rank} is below 1; give at least 1")


def _folder(given: argparse.Namespace, named: Mapping[str, str], run: str) -> str:
    """Returns the folder of the weights."""
    if not re.fullmatch(r"[^\s:]+:/\S*", given.weights_mount or ""):
        raise ValueError(
            f"--weights_mount={given.weights_mount or ''} names no share, from which the engines read "
            "the weights; give HOST:/PATH of an NFS server, such as Filestore's"
        )
    folder = named.get("--config.rollout.weights_folder", f"{MOUNT}/{run}")
    if not folder.startswith(f"{MOUNT}/"):
        raise ValueError(
            f"--config.rollout.weights_folder={folder} is not below {MOUNT}, where the machines see "
            "--weights_mount; leave it out, or name a folder there"
        )
    return folder


def _lora(given: argparse.Namespace) -> Sequence[str]:
    if given.max_lora_rank is None:
        return []
    # An update holds two adapters.
    more = {"vllm": ["--max-loras", "2"], "sglang": ["--lora-target-modules", "all"]}
    return ["--enable-lora", "--max-lora-rank", str(given.max_lora_rank), *more[given.engine_kind]]


def _model(named: Mapping[str, str]) -> str:
    path = named.get("--config.model.path", "")
    if re.fullmatch(r"hf://[^/\s]+/[^/\s]+|/\S+", path):
        return path.removeprefix("hf://")
    raise ValueError(
        f"--config.model.path={path} is no model that every machine can read; give hf://OWNER/NAME, "
        f"or a folder such as {MOUNT}/MODEL"
    )
