"""Folders on a bucket, gs://BUCKET/FOLDER, beside those of this machine.

A file on a bucket cannot grow. What a run appends to is therefore written on this machine and copied
to its workdir whenever a checkpoint is complete: a machine that is lost takes with it no more than
the steps since then.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator

from etils import epath

from jaxrl_tis.cli import Unwritable

OWNER = "owner.json"
KEPT_APART = ("checkpoints", "lock", OWNER)  # not files that grow


def is_remote(path: str | os.PathLike) -> bool:
    return "://" in os.fspath(path)


def folder(path: str | os.PathLike) -> epath.Path:
    """Returns the folder as a path that does not depend on where the process runs.

    Raises:
      ImportError: it is on a bucket, and the package that reads such is not installed.
    """
    if not is_remote(path):
        return epath.Path(os.path.abspath(path))
    if not os.fspath(path).startswith("gs://"):
        raise ValueError(f"{os.fspath(path)}: a folder is on this machine or on gs://BUCKET/FOLDER")
    try:
        import fsspec
        import gcsfs  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{os.fspath(path)} needs the package gcsfs: pip install 'jaxrl_tis[gcs]'"
        ) from error
    # TensorStore writes beside it, which a listing that is kept would not show.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return epath.Path(path)


def children(path: epath.Path) -> list[epath.Path]:
    """Returns what is in a folder; on a bucket one that holds nothing does not exist."""
    try:
        return sorted(path.iterdir())
    except FileNotFoundError:
        return []


def files(path: epath.Path) -> Iterator[epath.Path]:
    """Yields the files below a folder."""
    for child in children(path):
        if child.is_dir():
            yield from files(child)
        else:
            yield child


def write_json(path: str | os.PathLike, value: object) -> None:
    """Writes a JSON file, all or nothing."""
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
    if is_remote(path):
        epath.Path(path).write_text(text)
        return
    path = pathlib.Path(path)
    new_path = path.with_name(path.name + ".new")
    with open(new_path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new_path, path)


class Mirror:
    """The files of a run but its checkpoints: written to `folder`, on this machine, and copied to
    the workdir if that is on a bucket; else `folder` is the workdir.

    As a context manager it copies once more at the end.
    """

    def __init__(self, workdir: str | os.PathLike):
        self.workdir = folder(workdir)
        self._is_remote = is_remote(workdir)
        self._token, self._copied = uuid.uuid4().hex, {}
        self.folder = pathlib.Path(workdir)
        if self._is_remote:
            cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
            name = re.sub(r"[^\w.-]+", "_", os.fspath(workdir).removeprefix("gs://").strip("/"))
            self.folder = pathlib.Path(cache) / "jaxrl_tis" / "workdirs" / name

    def __enter__(self) -> "Mirror":
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self.upload()
        except Exception:
            if kind is None:
                raise

    def fetch(self) -> None:
        """Makes this process the owner of the workdir, and `folder` what was last copied there.

        Raises:
          Unwritable: the bucket cannot be read or written.
        """
        if not self._is_remote:
            return
        with self._explained():
            self._begin()

    def _begin(self) -> None:
        sign = {"token": self._token, "host": socket.gethostname(), "pid": os.getpid(),
                "time": time.strftime("%Y-%m-%d %H:%M:%S %Z")}
        self.workdir.mkdir(parents=True, exist_ok=True)
        write_json(self.workdir / OWNER, sign)
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.name not in KEPT_APART:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        growing = [p for p in children(self.workdir) if p.name not in KEPT_APART]
        for path in [f for p in growing for f in (files(p) if p.is_dir() else [p])]:
            target = self.folder / path.relative_to(self.workdir)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
            self._copied[target] = _stamp(target)

    def upload(self) -> None:
        """Copies what changed.

        Raises:
          ValueError: another run has taken the workdir over.
          Unwritable: the bucket cannot be written.
        """
        if not self._is_remote or not self.folder.exists():
            return
        with self._explained():
            owner = self._owner()
        if owner is not None and owner["token"] != self._token:
            raise ValueError(
                f"{self.workdir} was taken over by process {owner['pid']} on {owner['host']}, "
                f"started {owner['time']}: this run stops"
            )
        with self._explained():
            self._copy()

    def _copy(self) -> None:
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder)
            if path.is_dir() or name.parts[0] in KEPT_APART or self._copied.get(path) == _stamp(path):
                continue
            stamp = _stamp(path)  # what grows meanwhile is copied the next time
            (self.workdir / name).write_bytes(path.read_bytes())
            self._copied[path] = stamp

    def _owner(self) -> dict | None:
        """Returns who fetched last; None if nobody did."""
        try:
            return json.loads((self.workdir / OWNER).read_text())
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """What a client of a bucket may raise has no class of its own."""
        try:
            yield
        except Exception as error:
            raise Unwritable(f"{self.workdir} cannot be used: {error}") from error


def _stamp(path: pathlib.Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
