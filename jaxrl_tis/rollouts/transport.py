"""How weights get from a learner to the workers: the two ends, what both agree on, and files.

What travels is the serving tree, as it is served: eight-bit leaves stay eight-bit. The learner's end
announces a version; the worker's end copies it to the side, verifies every byte and returns a whole
tree or none, so that the weights in use are replaced in one assignment or not at all.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import numpy as np
import safetensors
import safetensors.numpy
from etils import epath

from jaxrl_tis.rollouts.wire import DTYPES
from jaxrl_tis.runtime import storage

MANIFEST = "manifest.json"
FILE_BYTES = 1 << 30  # what goes into one file, if it is more than one leaf


class Unavailable(RuntimeError):
    """A version could not be had: it is gone, damaged, or its transfer broke. Whoever asked keeps the
    weights it has and asks again later."""


class WeightTransport(Protocol):
    """The worker's end."""

    def latest(self) -> int | None:
        """Returns the newest version that can be fetched, None before the first."""

    def fetch(self, version: int, like: Any) -> Any:
        """Returns the tree of a version as NumPy arrays, bit by bit what was published.

        Args:
          like: a tree of the same structure, shapes and dtypes, as arrays or ShapeDtypeStructs.

        Raises:
          Unavailable: not now, or not this version; what is in use stays in use.
          ValueError: what is published has another structure, shape or dtype.
        """


def _named(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves with their paths as names."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def host_leaves(tree: Any) -> dict[str, np.ndarray]:
    """Returns the leaves by name, as copies that no later update of the tree can change."""
    leaves = {name: np.array(leaf, order="C") for name, leaf in _named(tree)}
    for name, leaf in leaves.items():
        if leaf.dtype.name not in DTYPES:
            raise ValueError(f"weight {name} is {leaf.dtype}; what can be sent is {', '.join(DTYPES)}")
    return leaves


def tree_format(tree: Any) -> dict[str, Any]:
    """Returns, as JSON, what two trees have in common that differ in nothing but values. The structure
    tells the schemes of quantised leaves."""
    leaves = {name: [np.dtype(x.dtype).name, list(x.shape)] for name, x in _named(tree)}
    return {"structure": str(jax.tree.structure(tree)), "leaves": leaves}


def tree_digest(tree: Any) -> str:
    """Returns the sha256 of the names, dtypes, shapes and bytes of a tree's leaves."""
    sha = hashlib.sha256()
    for name, leaf in _named(tree):
        leaf = np.asarray(leaf, order="C")
        sha.update(f"{name} {leaf.dtype.name} {leaf.shape}\n".encode())
        sha.update(raw(leaf))
    return sha.hexdigest()


def raw(leaf: np.ndarray) -> np.ndarray:
    """Returns the bytes of a contiguous array, uint8 [n], not a copy."""
    return leaf.reshape(-1).view(np.uint8)


def check_format(version: int, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises ValueError, with both values, where a published tree is not what a worker serves."""
    for name in sorted(found["leaves"].keys() | wanted["leaves"].keys()):
        theirs, ours = (
            " ".join(map(str, tree["leaves"][name])) if name in tree["leaves"] else "absent"
            for tree in (found, wanted)
        )
        if theirs != ours:
            raise ValueError(f"version {version}: weight {name} is {theirs}, this worker's {ours}")
    if found["structure"] != wanted["structure"]:
        raise ValueError(
            f"version {version} has structure {found['structure']}, this worker serves "
            f"{wanted['structure']}"
        )


def assembled(version: int, leaves: dict[str, np.ndarray], digest: str, like: Any) -> Any:
    """Returns a tree of leaves that came, all of which are those that were published.

    Raises:
      Unavailable: they are not.
    """
    tree = jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name, _ in _named(like)])
    if (got := tree_digest(tree)) != digest:
        raise Unavailable(f"version {version} has digest {got}, published was {digest}")
    return tree


def check_newer(version: int, latest: int | None) -> None:
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ValueError(f"version {version!r}; give an int from 0")
    if latest is not None and version <= latest:
        raise ValueError(f"version {version} is not newer than {latest}, which is published already")


class Directory:
    """Both ends, by files: PATH/VERSION/*.safetensors and their manifest.json, on a disk or a bucket
    that the learner and the workers share. Nothing is flushed to the disk: what a power cut tears is
    damaged, and seen.

    A version counts once its manifest is there. On a disk the whole folder is renamed into place; on a
    bucket, which cannot rename, the manifest is written last. A version that was read and found
    damaged is passed over by the reader from then on: the one before is its latest. There is one
    learner.

    Args:
      path: of a folder for one start of one run: versions grow, and one that resumes an earlier
        checkpoint begins below the last.
      keep: number of newest versions that stay, at least 2: workers are still reading the one before.
      grace: seconds for which a version stays after it was announced, however many came after it.
    """

    def __init__(self, path: str, keep: int = 2, grace: float = 60.0):
        if keep < 2:
            raise ValueError(f"keep={keep} versions; a worker may still read the one before: at least 2")
        self._path, self._is_remote = storage.folder(path), storage.is_remote(path)
        self._keep, self._grace, self._lock = keep, grace, threading.Lock()
        self._announced: dict[int, float] = {}  # when this process did, or first saw it
        self._damaged: set[int] = set()
        self.bytes_sent = 0

    def publish(self, params_tree: Any, version: int, digest: str) -> None:
        """Announces a serving tree, of which it takes a copy; `digest` is `tree_digest` of it.

        Raises:
          ValueError: the version is not newer than the latest.
        """
        with self._lock:
            check_newer(version, self.latest())
            final = self._folder(version)
            folder = final if self._is_remote else final.with_name(final.name + storage.NEW)
            if folder.exists():
                folder.rmtree()  # of a learner that did not live to finish it
            folder.mkdir(parents=True)
            self._write(folder, params_tree, version, digest)
            if not self._is_remote:
                folder.rename(final)
            self._announced[version] = time.monotonic()
            self._retire()

    def _write(self, folder: epath.Path, params_tree: Any, version: int, digest: str) -> None:
        files = {}
        for i, leaves in enumerate(_in_files(host_leaves(params_tree))):
            data, name = safetensors.numpy.save(leaves), f"weights-{i:05}.safetensors"
            (folder / name).write_bytes(data)
            files[name] = hashlib.sha256(data).hexdigest()
            self.bytes_sent += len(data)
        manifest = {"version": version, "digest": digest, "format": tree_format(params_tree),
                    "files": files}
        storage.write_json(folder / MANIFEST, manifest | {"sha256": _seal(manifest)})

    def _retire(self) -> None:
        """Deletes old versions, and what a learner that did not live to finish it left behind."""
        now, complete = time.monotonic(), sorted(self._versions())
        for version in complete:
            self._announced.setdefault(version, now)
        stay = set(complete[-self._keep :])
        stay |= {v for v in complete if now - self._announced[v] < self._grace}
        for child in storage.children(self._path):
            number = child.name.removesuffix(storage.NEW)
            if number.isdecimal() and int(number) not in stay:
                (child / MANIFEST).unlink(missing_ok=True)  # first: it counts no more
                child.rmtree(missing_ok=True)

    def latest(self) -> int | None:
        return max(set(self._versions()) - self._damaged, default=None)

    def fetch(self, version: int, like: Any) -> Any:
        wanted, manifest = tree_format(like), self._manifest(version)
        check_format(version, manifest["format"], wanted)
        leaves = {}
        for name, sha256 in manifest["files"].items():
            data = self._bytes(version, name)
            if hashlib.sha256(data).hexdigest() != sha256:
                raise self._as_damaged(version, f"the sha256 of {name} differs")
            leaves |= {
                leaf: _array(about["data"], *wanted["leaves"][leaf])
                for leaf, about in safetensors.deserialize(data)
            }
        try:
            return assembled(version, leaves, manifest["digest"], like)
        except Unavailable as error:
            raise self._as_damaged(version, "its digest differs") from error

    def _manifest(self, version: int) -> dict[str, Any]:
        try:
            manifest = json.loads(self._bytes(version, MANIFEST))
            is_whole = manifest.pop("sha256") == _seal(manifest)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._as_damaged(version, f"{MANIFEST} is not what a learner writes") from error
        if not is_whole:
            raise self._as_damaged(version, f"the sha256 of {MANIFEST} differs")
        return manifest

    def _bytes(self, version: int, name: str) -> bytes:
        folder = self._folder(version)
        try:
            return (folder / name).read_bytes()
        except FileNotFoundError as error:
            if name != MANIFEST and (folder / MANIFEST).exists():
                raise self._as_damaged(version, f"{name} is missing") from error
            raise Unavailable(
                f"version {version} is not in {self._path}; the latest is {self.latest()}"
            ) from error
        except Exception as error:  # what a client of a bucket may raise has no class of its own
            raise Unavailable(f"{folder / name} cannot be read now: {error}") from error

    def _as_damaged(self, version: int, why: str) -> Unavailable:
        self._damaged.add(version)
        return Unavailable(f"version {version} in {self._path} is damaged: {why}")

    def _folder(self, version: int) -> epath.Path:
        return self._path / f"{version:08}"

    def _versions(self) -> Iterator[int]:
        for child in storage.children(self._path):
            if child.name.isdecimal() and (child / MANIFEST).exists():
                yield int(child.name)


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _array(data: bytes | bytearray, dtype: str, shape: list[int]) -> np.ndarray:
    return np.frombuffer(data, DTYPES[dtype]).reshape(shape)


def _in_files(leaves: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Yields the leaves of one file after the other."""
    part, size = {}, 0
    for name, leaf in leaves.items():
        if part and size + leaf.nbytes > FILE_BYTES:
            yield part
            part, size = {}, 0
        part[name], size = leaf, size + leaf.nbytes
    yield part
