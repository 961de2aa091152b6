"""config.json of a run: its configuration, package versions and git revision."""

import datetime
import functools
import json
import math
import os
import pathlib
import platform
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from jaxrl_tis.runtime import storage
from jaxrl_tis.runtime.cli import Unwritable

FILE_NAME = "config.json"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def write_run_files(
    workdir: str | os.PathLike, config_dict: Mapping[str, Any], pins: Mapping[str, str] = {},
    changes: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Writes WORKDIR/config.json: {"config", "versions", "git_revision", "pins", "run_id", "changes"}.

    config: the resolved configuration. versions: of Python and the packages that affect numbers.
    git_revision: of this code, with "-dirty" for local changes; null outside git. pins: hub paths
    as given, and as pinned in "config". run_id: random, constant for the folder. changes: config
    fields that changed during the run, each {"step": the last step before it, "fields": {field:
    [old, new]}}.

    Raises:
      TypeError: a value of the configuration is not JSON.
      Unwritable: the file cannot be written.
    """
    versions = {name: metadata.version(name) for name in PACKAGES}
    path = pathlib.Path(workdir) / FILE_NAME
    run_id = saved(workdir, "run_id") or uuid.uuid4().hex[:16]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write_json(path, {"config": _plain(config_dict),
                                  "versions": {"python": platform.python_version(), **versions},
                                  "git_revision": git_revision(), "pins": dict(pins),
                                  "run_id": run_id, "changes": list(changes)})
    except OSError as error:
        raise Unwritable(
            f"cannot write {path}: {error}; free space or make it writable, then start the same "
            "command again"
        ) from error


def identity(config_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns, by name, the config fields, package versions and git revision: all inputs of a run's
    numbers except its data."""
    versions = {f"version of {name}": metadata.version(name) for name in PACKAGES}
    fields = flat(config_dict, "config")
    return fields | versions | {"git revision": git_revision()}


def date(config_dict: Mapping[str, Any], workdir: str | os.PathLike) -> str:
    """Returns the date for the prompts of a run: `task.date` of the configuration, else the date of
    the run in the folder, else now."""
    if config_dict["task"]["date"]:
        return config_dict["task"]["date"]
    before = saved_config(workdir)
    if before is not None and "date" in before["task"]:
        return before["task"]["date"]
    return datetime.datetime.now().isoformat(timespec="seconds")


def saved_config(workdir: str | os.PathLike) -> dict[str, Any] | None:
    """Returns the configuration of the run in a folder, None if there is no run.

    Raises:
      ValueError: the file is broken.
    """
    return saved(workdir, "config")


def saved(workdir: str | os.PathLike, name: str) -> Any:
    """Returns an entry of a folder's config.json, None if the file does not exist.

    Raises:
      ValueError: the file is broken.
    """
    content = read(workdir)
    if content and name not in content:
        raise ValueError(
            f"{storage.folder(workdir) / FILE_NAME} has no {name}: another version of jaxrl_tis wrote "
            "it; use that version, or a new workdir"
        )
    return content[name] if content else None


def read(workdir: str | os.PathLike) -> dict[str, Any]:
    """Returns the content of a folder's config.json, {} if the file does not exist.

    Raises:
      ValueError: the file is not one that a run writes; names the file and the line.
    """
    path = storage.folder(workdir) / FILE_NAME
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes().decode(errors="replace"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {error.lineno}: not JSON ({error.msg}); restore the file"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
        raise ValueError(f'{path}, line 1: no object under "config"; restore what the run wrote')
    return content


def git_revision() -> str | None:
    """Returns the git commit of this code, or the commit that `git archive` exported, or None. Git is
    asked once per process: the code in memory is that of the first call."""
    return _revision(pathlib.Path(__file__).resolve())


@functools.cache
def _revision(here: pathlib.Path) -> str | None:
    git = ["git", "-C", str(here.parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name],
                       check=True, capture_output=True)
        describe = subprocess.run([*git, "describe", "--always", "--dirty", "--abbrev=40",
                                   "--exclude=*"], check=True, capture_output=True, text=True)
        return describe.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        exported = here.with_name("revision.txt")
        text = exported.read_text().strip() if exported.exists() else "$"
        return None if text.startswith("$") else text


def _plain(value: Any) -> Any:
    """Returns `value` with non-finite floats as strings, because JSON has no literals for them."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def flat(config_dict: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a configuration as {"group.field": value}, with values as in config.json."""
    return _flat(json.loads(json.dumps(_plain(config_dict))), prefix)


def _flat(value: Any, prefix: str) -> dict[str, Any]:
    """Returns {"a.b": leaf} of nested dicts; an empty dict is a leaf."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    return {name: leaf for key, item in value.items()
            for name, leaf in _flat(item, f"{prefix}.{key}" if prefix else key).items()}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns (name, old value, new value) as text for every name that differs."""
    pairs = [(name, json.dumps(old[name]) if name in old else "absent",
              json.dumps(new[name]) if name in new else "absent")
             for name in sorted(old.keys() | new.keys())]
    return [pair for pair in pairs if pair[1] != pair[2]]
