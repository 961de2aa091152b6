"""Files and folders, on this machine or on a bucket (gs://BUCKET/FOLDER).

A file on a bucket cannot be appended to. A run therefore writes growing files on this machine, and
copies them to its workdir after every complete checkpoint. A lost machine costs only the steps
since then.
"""

import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import socket
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Iterator

from etils import epath

from jaxrl_tis.runtime.cli import Interrupted, Unwritable

OWNER = "owner.json"
SIGN_SECONDS, SIGNS = 15.0, 3  # after so many without a sign an owner is dead
KEPT_APART = ("checkpoints", "base", "lock", OWNER)  # not files that grow; "base" is that of LoRA
NEW = ".new"  # end of the name of a file that is being written
STACKS = "stacks"  # of a process that hung: written when nothing can be copied any more


def is_remote(path: str | os.PathLike) -> bool:
    return "://" in os.fspath(path)


def folder(path: str | os.PathLike) -> epath.Path:
    """Returns a folder as an absolute path, or as a path on a bucket.

    Raises:
      ImportError: the folder is on a bucket, and the package gcsfs is not installed.
      ValueError: the path is empty, names no bucket, or is no text in this locale.
    """
    if not os.fspath(path):
        raise ValueError(
            "the path of a folder is empty; give a folder, such as . for the current one"
        )
    if not _is_text(path if is_remote(path) else os.path.abspath(path)):
        raise ValueError(
            f"the path {os.fspath(path)!a} is no text in this locale, whose file names are "
            f"{sys.getfilesystemencoding()}, and libraries read paths as UTF-8: set LC_ALL=C.UTF-8 "
            "or PYTHONUTF8=1"
        )
    if not is_remote(path):
        return epath.Path(os.path.abspath(path))
    if not re.match(r"gs://[^/]", os.fspath(path)):
        raise ValueError(
            f"{os.fspath(path)} is neither local nor on a bucket; give a local folder or "
            "gs://BUCKET/FOLDER"
        )
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


def _is_text(path: str | os.PathLike) -> bool:
    """Whether a path has the same bytes for Python, by the locale, and for libraries, in UTF-8."""
    try:
        return os.fspath(path).encode() == os.fsencode(path)
    except UnicodeEncodeError:
        return False


def cache(name: str) -> pathlib.Path:
    """Returns the user's cache folder of this name, for files that can be made again."""
    folder = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(folder) / "jaxrl_tis" / name


def is_passing(error: Exception) -> bool:
    """Returns whether a bucket's client says that a later try may succeed."""
    code = getattr(error, "code", None)
    return code == 429 or isinstance(code, int) and code >= 500


def children(path: epath.Path) -> list[epath.Path]:
    """Returns the sorted entries of a folder, [] if it does not exist. A bucket has no empty
    ones."""
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
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a file, all or nothing."""
    if is_remote(path):
        epath.Path(path).write_text(text)
        return
    path = pathlib.Path(path)
    new_path = path.with_name(path.name + NEW)
    with open(new_path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new_path, path)


class Mirror:
    """Mirrors the files of a run, except its checkpoints, to a workdir on a bucket.

    The run writes to `folder` on this machine. If the workdir is not on a bucket, `folder` is the
    workdir itself and nothing is copied. The process that called `fetch` last owns the workdir, and
    renews its signature every SIGN_SECONDS. As a context manager, the mirror copies once more at
    the end and releases the workdir.
    """

    def __init__(self, workdir: str | os.PathLike):
        self.workdir = folder(workdir)
        self._is_remote = is_remote(workdir)
        self._copied, self._is_over = {}, threading.Event()
        self._sign = {"token": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid(),
                      "time": time.strftime("%Y-%m-%d %H:%M:%S %Z")}
        self.folder = pathlib.Path(workdir)
        if self._is_remote:
            path = os.fspath(workdir).removeprefix("gs://").strip("/")
            self.folder = cache("workdirs") / urllib.parse.quote(path, safe="")

    def __enter__(self) -> "Mirror":
        return self

    def __exit__(self, kind, *_) -> None:
        self._is_over.set()
        try:
            self.upload()
            if self._is_remote and self._owns(self._owner()):
                (self.workdir / OWNER).unlink()
        except Exception:
            if kind is None:
                raise

    def fetch(self) -> None:
        """Makes this process the owner of the workdir, and downloads its files to `folder`.

        Raises:
          ValueError: a run on another machine owns it and is alive.
          Unwritable: the bucket cannot be read or written.
        """
        if not self._is_remote:
            return
        with self._explained():
            owner = self._owner()
            is_alive = owner is not None and self._signs(owner)
        if owner is not None and is_alive:
            raise ValueError(
                f"{self.workdir} is in use by process {owner['pid']} on {owner['host']}, started "
                f"{owner['time']}; wait for it, or choose another --workdir"
            )
        with self._explained():
            self._begin()
        threading.Thread(target=self._keep_signing, daemon=True).start()

    def _signs(self, owner: dict) -> bool:
        """Whether the owner renews its signature. An owner on this machine would hold the lock."""
        if owner["host"] == self._sign["host"]:
            return False
        for _ in range(SIGNS):
            time.sleep(SIGN_SECONDS)
            if (now := self._owner()) != owner:
                return now is not None
        return False

    def _keep_signing(self) -> None:
        """Renews the signature until the end, or until another run owns the workdir."""
        for count in itertools.count(1):
            if self._is_over.wait(SIGN_SECONDS):
                return
            with contextlib.suppress(Exception):  # the next copy tells what is wrong
                if not self._owns(self._owner()):
                    return
                write_json(self.workdir / OWNER, self._signed(count))

    def _signed(self, count: int) -> dict:
        """Returns a signature of constant length. A reader during its replacement would otherwise
        get the new text cut to the old length."""
        return self._sign | {"signs": f"{count:09}"}

    def _owns(self, owner: dict | None) -> bool:
        return owner is not None and owner["token"] == self._sign["token"]

    def _begin(self) -> None:
        self.workdir.mkdir(parents=True, exist_ok=True)
        write_json(self.workdir / OWNER, self._signed(0))
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.name not in (*KEPT_APART, STACKS):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        growing = [p for p in children(self.workdir) if p.name not in KEPT_APART]
        for path in [f for p in growing for f in (files(p) if p.is_dir() else [p])]:
            target = self.folder / path.relative_to(self.workdir)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
            self._copied[target] = _stamp(target)

    def upload(self) -> None:
        """Copies changed files to the bucket.

        Raises:
          ValueError: another run has taken the workdir over.
          Unwritable: the bucket cannot be written.
        """
        if not self._is_remote or not self.folder.exists():
            return
        with self._explained():
            owner = self._owner()
        if owner is not None and not self._owns(owner):
            raise ValueError(
                f"{self.workdir} was taken over by process {owner['pid']} on {owner['host']}, "
                f"started {owner['time']}, and this run stops; stop that process first to continue "
                "here"
            )
        with self._explained():
            self._copy()

    def _copy(self) -> None:
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder)
            if path.is_dir() or name.parts[0] in KEPT_APART or path.suffix == NEW:
                continue
            stamp = _stamp(path)  # what grows meanwhile is copied the next time
            if self._copied.get(path) != stamp:
                (self.workdir / name).write_bytes(path.read_bytes())
                self._copied[path] = stamp

    def _owner(self) -> dict | None:
        """Returns the process that fetched last, None if there is none."""
        try:
            return json.loads((self.workdir / OWNER).read_text())
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns errors of a bucket's client, which have no common class, into Interrupted or
        Unwritable."""
        try:
            yield
        except Exception as error:
            if is_passing(error):
                raise Interrupted(
                    f"{self.workdir} does not answer: {error}; the same command continues later"
                ) from error
            raise Unwritable(
                f"{self.workdir} cannot be used: {error}; check the bucket and its permissions, "
                "then start the same command again"
            ) from error


def _stamp(path: pathlib.Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
