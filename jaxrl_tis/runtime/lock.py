"""The lock of a workdir: a second run in the same folder is refused, naming the first."""

import contextlib
import fcntl
import os
import pathlib
import socket
import time
from collections.abc import Iterator

from jaxrl_tis.runtime import processes, storage
from jaxrl_tis.runtime.cli import Unwritable


@contextlib.contextmanager
def locked(workdir: pathlib.Path, field: str = "--workdir") -> Iterator[None]:
    """Holds WORKDIR/lock. The operating system releases it when its process ends for any reason.
    `field` names the folder in messages.

    Raises:
      ValueError: another process holds the lock; the message names that process.
      Unwritable: the folder cannot be written.
    """
    path = workdir / "lock"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (open as long as the lock)
    except OSError as error:
        raise Unwritable(
            f"cannot make {path}: {error}; make the folder writable, or choose another {field}"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ValueError(
                f"{workdir} is in use by {file.read().strip() or 'another process'}; wait for it, "
                f"or choose another {field}"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, started "
                   f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}\n")
        file.flush()
        yield


def check_shared(workdir: str, folder: pathlib.Path) -> None:
    """Raises ValueError unless all processes see the same folder; process 0 holds the lock in
    `folder`."""
    if difference := processes.difference({"workdir": workdir}):
        raise ValueError(f"{difference}; give all processes the same --workdir")
    if processes.is_alone() or storage.is_remote(workdir):
        return
    owner = processes.first((folder / "lock").read_text)
    path = folder / "lock"
    if processes.any_of(not path.exists() or path.read_text() != owner):
        raise ValueError(
            f"--workdir={workdir} is not one folder for all processes; give a folder on a disk "
            "that all of them share, or gs://BUCKET/FOLDER"
        )
