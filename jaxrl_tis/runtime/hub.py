"""Downloads models and data sets of the Hugging Face hub, named by a path:

    hf://Qwen/Qwen2.5-0.5B-Instruct            a model: config, tokenizer and safetensors
    hf://unsloth/Qwen3-0.6B-GGUF/q8.gguf       one file of a repository: .gguf or .json
    hf://OWNER/NAME/FOLDER                     a model in a folder of a repository
    hf://datasets/openai/gsm8k/main/train      the files of a split: parquet, JSON lines

`@REVISION` after the repository, as in hf://Qwen/Qwen2.5-0.5B-Instruct@main, chooses a branch, tag,
commit or refs/pr/N. Files are stored in the hub's own cache, which also serves them without a network
(HF_HUB_OFFLINE=1). HF_ENDPOINT and HF_TOKEN are read from the environment.
"""

import dataclasses
import fnmatch
import glob
import os
import pathlib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_tis.runtime import cli, storage

SCHEME = "hf://"
MODEL_FILES = ["*.json", "*.jinja"]
WEIGHT_FILES = ["*.safetensors"]
SINGLE_FILES = (".gguf", ".json")
DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
DATA_ENDS = (*DATA_SUFFIXES, *(f"{suffix}.gz" for suffix in DATA_SUFFIXES))
COMMIT = re.compile(r"[0-9a-f]{40}")
POINTER = b"version https://git-lfs.github.com/spec/"  # the file that Git LFS leaves for another one


@dataclasses.dataclass(frozen=True)
class Reference:
    """A repository of the hub, its revision ("" for the newest) and a path inside of it."""

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
        match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@(refs/pr/\d+|[^/@]+))?(?:/([^@]+?))?/?", rest)
        if not path.startswith(SCHEME) or match is None or ".." in path.split("/"):
            raise ValueError(
                f"{path!r} is not a path of the hub; give hf://OWNER/MODEL or "
                "hf://datasets/OWNER/NAME/SPLIT, with @REVISION after NAME for a revision"
            )
        return cls(kind, match[1], match[2] or "", match[3] or "")

    def __str__(self) -> str:
        folder = "datasets/" if self.kind == "dataset" else ""
        revision, inside = self.revision and f"@{self.revision}", self.inside and f"/{self.inside}"
        return f"{SCHEME}{folder}{self.repository}{revision}{inside}"


def is_hub(path: Any) -> bool:
    return isinstance(path, str) and path.startswith(SCHEME)


def name_and_revision(path: str) -> tuple[str, str]:
    """Returns (OWNER/NAME, revision or "") of a path of the hub, and (path, "") of any other path."""
    if not is_hub(path):
        return path, ""
    reference = Reference.parse(os.fspath(path))
    return reference.repository, reference.revision


def local(path: str | os.PathLike, weights: bool = True) -> pathlib.Path:
    """Returns the local folder or file of a model; downloads it if the path is a hub path.

    Args:
      path: a hub path; any other path is returned unchanged.
      weights: False skips the weights and fetches config and tokenizer only.

    Raises: see `_fetch`.
    """
    if not is_hub(path):
        return pathlib.Path(path)
    reference = Reference.parse(os.fspath(path))
    inside, patterns = reference.inside, MODEL_FILES + WEIGHT_FILES * weights
    if inside.endswith(SINGLE_FILES):
        return _fetch(reference, [inside]) / inside
    if inside:
        folder = [f"{inside}/{pattern}" for pattern in patterns]
        return _fetch(reference, folder, [f"{inside}/*/*"]) / inside
    return _fetch(reference, patterns, ["*/*"])


def check_whole(path: pathlib.Path) -> None:
    """Raises ValueError for the pointer that a clone without Git LFS has in the place of a file."""
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise ValueError(
                f"{path} is a pointer of Git LFS, not the file itself; run `git lfs pull` in its "
                "folder, or copy the file again"
            )


def local_files(path: str | os.PathLike, names: Sequence[str]) -> pathlib.Path:
    """Returns the local folder with the named files; downloads those if the path is a folder of the hub.
    Raises: see `_fetch`."""
    if not is_hub(path):
        return pathlib.Path(path)
    reference = Reference.parse(os.fspath(path))
    inside = f"{reference.inside}/" if reference.inside else ""
    return _fetch(reference, [f"{inside}{name}" for name in names]) / reference.inside


def data_files(path: str | os.PathLike) -> list[tuple[str, Any]]:
    """Returns [(machine-independent name, local path)] of the files of a split. A path outside the
    hub is a file or a glob, on this machine or on a bucket.

    Raises:
      FileNotFoundError: the data set has no such split, or no file matches the glob; see `_fetch`.
    """
    if not is_hub(path):
        return _matching(os.fspath(path))
    reference = Reference.parse(os.fspath(path))
    inside = reference.inside or "*"
    folder = _fetch(reference, [inside, f"{inside}.*", f"{inside}-*", f"{inside}/*"])
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
    return [(str(dataclasses.replace(reference, inside=name)), folder / name) for name in names]


def _matching(path: str) -> list[tuple[str, os.PathLike]]:
    """Returns a file, or the files that match a glob, sorted by name."""
    is_remote = storage.is_remote(path)
    file = storage.folder(path) if is_remote else pathlib.Path(path)
    if not glob.has_magic(path) or file.exists():
        return [(path, file)]
    if is_remote:
        *whole, _ = re.split(r"[*?[]", path)[0].split("/")
        folder = "/".join(whole)
        names = [f"{p}" for p in storage.folder(folder).glob(path[len(folder) + 1 :])]
    else:
        names = glob.glob(path, recursive=True)
    if not names:
        raise FileNotFoundError(f"{path}: no file has such a name; check the pattern")
    place = storage.folder if is_remote else pathlib.Path
    return [(name, place(name)) for name in sorted(names)]


def pins(values: Mapping[str, Any], before: Mapping[str, str] = {}) -> dict[str, str]:
    """Pins every hub path in nested `values` to a commit; returns {path: pinned path}.

    Paths in `before` keep their commit, so a continued run uses the same files. All others get the
    newest commit of their revision.
    """
    commits, pinned = {}, {}
    for path in sorted(set(filter(is_hub, leaves(values)))):
        if path in before:
            pinned[path] = before[path]
            continue
        reference = Reference.parse(os.fspath(path))
        key = reference.kind, reference.repository, reference.revision
        if not COMMIT.fullmatch(reference.revision):
            if key not in commits:
                commits[key] = _fetch(reference, ["config.json", "README.md"]).name
            reference = dataclasses.replace(reference, revision=commits[key])
        pinned[path] = str(reference)
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
      Interrupted: the hub cannot answer now, or the connection broke.
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
    except _broken(errors) as error:
        raise cli.Interrupted(
            f"the connection to the hub broke while it sent {found}: {error}; start the same command "
            "again later"
        ) from error


def _broken(errors: types.ModuleType) -> tuple[type[Exception], ...]:
    """Returns the errors of a transfer. Their base is of the HTTP library, which depends on the version
    of huggingface_hub."""
    bases = [c for c in errors.HfHubHTTPError.__mro__ if c.__name__ in ("HTTPError", "RequestException")]
    transfer = [getattr(errors, "XetDownloadError", None)]
    return (*bases, *filter(None, transfer))


def _is_passing(error: BaseException | None) -> bool:
    """Whether the error is temporary: too many requests, or a fault of the hub."""
    response = getattr(error, "response", None)
    return response is not None and (response.status_code == 429 or response.status_code >= 500)
