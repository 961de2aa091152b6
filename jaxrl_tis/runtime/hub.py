"""Models and data sets of the Hugging Face hub, named by a path:

    hf://Qwen/Qwen2.5-0.5B-Instruct            a model: config, tokenizer and safetensors
    hf://unsloth/Qwen3-0.6B-GGUF/q8.gguf       one file of a repository
    hf://datasets/openai/gsm8k/main/train      the files of a split: parquet, JSON lines

`@REVISION` behind the repository, as in hf://Qwen/Qwen2.5-0.5B-Instruct@main, chooses a branch, tag
or commit. Files go to the hub's own cache and are taken from there without a network
(HF_HUB_OFFLINE=1); HF_ENDPOINT and HF_TOKEN are read from the environment.
"""

import dataclasses
import fnmatch
import glob
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_tis.runtime import cli, storage

SCHEME = "hf://"
MODEL_FILES = ["*.json", "*.jinja"]
WEIGHT_FILES = ["*.safetensors"]
DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
DATA_ENDS = (*DATA_SUFFIXES, *(f"{suffix}.gz" for suffix in DATA_SUFFIXES))
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclasses.dataclass(frozen=True)
class Reference:
    """A repository of the hub, a revision ("" for its newest) and what is meant inside of it."""

    kind: str  # "model" or "dataset"
    repository: str
    revision: str
    inside: str

    @classmethod
    def parse(cls, path: str) -> "Reference":
        """Raises ValueError where the path names no repository."""
        kind, rest = "model", path.removeprefix(SCHEME)
        if rest.startswith("datasets/"):
            kind, rest = "dataset", rest.removeprefix("datasets/")
        found = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([^/@]+))?(?:/([^@]+?))?/?", rest)
        if not path.startswith(SCHEME) or found is None or ".." in path.split("/"):
            raise ValueError(
                f"{path!r} is not a path of the hub; give hf://OWNER/MODEL or "
                "hf://datasets/OWNER/NAME/SPLIT, with @REVISION after NAME for a revision"
            )
        return cls(kind, found[1], found[2] or "", found[3] or "")

    def __str__(self) -> str:
        folder = "datasets/" if self.kind == "dataset" else ""
        revision, inside = self.revision and f"@{self.revision}", self.inside and f"/{self.inside}"
        return f"{SCHEME}{folder}{self.repository}{revision}{inside}"


def is_hub(path: Any) -> bool:
    return isinstance(path, str) and path.startswith(SCHEME)


def local(path: str | os.PathLike, weights: bool = True) -> pathlib.Path:
    """Returns where the files of a model are, fetched before if the path is of the hub.

    Args:
      path: of the hub, or any other, which is returned.
      weights: False leaves them out: config and tokenizer are enough.

    Raises: see `_fetch`.
    """
    if not is_hub(path):
        return pathlib.Path(path)
    found = Reference.parse(path)
    if found.inside:
        return _fetch(found, [found.inside]) / found.inside
    return _fetch(found, MODEL_FILES + WEIGHT_FILES * weights, ["*/*"])


def data_files(path: str | os.PathLike) -> list[tuple[str, os.PathLike]]:
    """Returns [(name that is the same on every machine, where it is)] of the files of a split; a
    path that is not of the hub is a file or a glob of files, here or on a bucket.

    Raises:
      FileNotFoundError: the data set has no such split, no file is like the glob; and see `_fetch`.
    """
    if not is_hub(path):
        return _matching(os.fspath(path))
    found = Reference.parse(path)
    inside = found.inside or "*"
    folder = _fetch(found, [inside, f"{inside}.*", f"{inside}-*", f"{inside}/*"])
    names = sorted(
        p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.name.endswith(DATA_ENDS)
    )
    begins = inside if glob.has_magic(inside) else glob.escape(inside)
    ends = "", ".*", "-*", "/*"
    names = [n for n in names if any(fnmatch.fnmatchcase(n, begins + end) for end in ends)]
    if not names:
        raise FileNotFoundError(
            f"{path}: the data set has no file {inside}.* or {inside}-* of "
            f"{', '.join(DATA_SUFFIXES)}; name a split that the data set's page on the hub shows"
        )
    return [(str(dataclasses.replace(found, inside=name)), folder / name) for name in names]


def _matching(path: str) -> list[tuple[str, os.PathLike]]:
    """Returns a file, or the files that are like a glob, sorted by name."""
    is_remote = storage.is_remote(path)
    found = storage.folder(path) if is_remote else pathlib.Path(path)
    if not glob.has_magic(path) or found.exists():
        return [(path, found)]
    if is_remote:
        *whole, _ = path[: re.search(r"[*?[]", path).start()].split("/")
        folder = "/".join(whole)
        names = [f"{p}" for p in storage.folder(folder).glob(path[len(folder) + 1 :])]
    else:
        names = glob.glob(path, recursive=True)
    if not names:
        raise FileNotFoundError(f"{path}: no file has such a name; check the pattern")
    place = storage.folder if is_remote else pathlib.Path
    return [(name, place(name)) for name in sorted(names)]


def pins(values: Mapping[str, Any], before: Mapping[str, str] = {}) -> dict[str, str]:
    """Returns for every path of the hub in nested `values` the same path at one commit.

    A path that `before` has keeps what it was pinned to, so that a run which is continued uses what
    it began with; all others get the newest of their revision.
    """
    commits, pinned = {}, {}
    for path in sorted(set(filter(is_hub, leaves(values)))):
        if path in before:
            pinned[path] = before[path]
            continue
        found = Reference.parse(path)
        key = found.kind, found.repository, found.revision
        if not COMMIT.fullmatch(found.revision):
            if key not in commits:
                commits[key] = _fetch(found, ["config.json", "README.md"]).name
            found = dataclasses.replace(found, revision=commits[key])
        pinned[path] = str(found)
    return pinned


def leaves(value: Any) -> Iterator[Any]:
    """Yields the values of nested mappings, lists and tuples."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def replaced(value: Any, new: Mapping[str, str]) -> Any:
    """Returns nested values with the strings that `new` names replaced."""
    if isinstance(value, Mapping):
        return {name: replaced(item, new) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(replaced(item, new) for item in value)
    return new[value] if isinstance(value, str) and value in new else value


def _fetch(found: Reference, patterns: list[str], ignore: list[str] | None = None) -> pathlib.Path:
    """Returns the folder, named by its commit, that holds the files matching `patterns`.

    Raises:
      ImportError: huggingface_hub is not installed.
      FileNotFoundError: the hub has no such repository or revision, or it is not in the cache and
        there is no network.
      ValueError: the hub asks for a token, or refuses the one in HF_TOKEN.
      Interrupted: the hub cannot answer now.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ImportError(
            f"{found} needs the package huggingface_hub: pip install 'jaxrl_tis[hub]'"
        ) from error
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(
            found.repository, repo_type=found.kind, revision=found.revision or None,
            allow_patterns=patterns, ignore_patterns=ignore,
        ))
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{found} requires accepted terms; accept them on its page of the hub, and set HF_TOKEN"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise FileNotFoundError(
            f"the hub has no {found.kind} {found}; correct the name, or set HF_TOKEN if it is "
            "private"
        ) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled,
            errors.HFValidationError) as error:
        if _is_passing(error) or _is_passing(error.__cause__):
            raise cli.Interrupted(
                f"the hub did not send {found}: {error}; start the same command again later"
            ) from error
        raise FileNotFoundError(
            f"cannot fetch {found}: {error}; check the name and the network, or give a local path"
        ) from error


def _is_passing(error: BaseException | None) -> bool:
    """Whether the hub said that it is asked too much, or that something is wrong with it."""
    response = getattr(error, "response", None)
    return response is not None and (response.status_code == 429 or response.status_code >= 500)
