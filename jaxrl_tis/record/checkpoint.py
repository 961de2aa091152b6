"""Checkpoints of a run, verified by checksums before they are restored.

A step is WORKDIR/checkpoints/<step>: arrays and JSON written by Orbax, plus manifest.json with the
sha256 of every file. Orbax does not detect a flipped bit. A step is therefore restored only if its
manifest matches; a damaged step is set aside, and the next older one is used. The manifest is
written last, and a step without one does not count: a process killed at any moment leaves a whole
checkpoint or none. Nothing is pickled.
"""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from jaxrl_tis.record.provenance import differences
from jaxrl_tis.runtime import processes, storage
from jaxrl_tis.runtime.cli import Interrupted, Unwritable

MANIFEST = "manifest.json"
CORRUPT, UNCOMMITTED = ".corrupt", ".uncommitted"
STREAMS = 16  # files that are read at a time to be hashed
COMMIT_SECONDS = 3600  # for process 0 to hash a checkpoint


class Misfit(ValueError):
    """The arrays of a checkpoint differ from those of the program in name, shape or dtype."""


class Checkpoints:
    """The newest `keep` steps of a run, saved in the background.

    Use it as a context manager: Orbax cannot finish a save once the interpreter shuts down. With
    several processes every process makes the same calls, on a file system that all of them see.
    """

    def __init__(self, workdir: str | os.PathLike, keep: int,
                 before_commit: Callable[[], None] = lambda: None):
        """Opens WORKDIR/checkpoints, made if missing, on this machine or on a bucket.

        Args:
          keep: how many steps are kept, at least 1.
          before_commit: called on process 0, in the background, before a step counts.
        """
        if keep < 1:
            raise ValueError(
                f"keep={keep} checkpoints; set checkpoint.keep to at least 1, which resuming needs"
            )
        self._directory = storage.folder(workdir) / "checkpoints"
        self._keep, self._before_commit = keep, before_commit
        # The step and the future of the save in the background.
        self._pending: tuple[int, futures.Future] | None = None
        self._executor = futures.ThreadPoolExecutor(max_workers=1)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unwritable(
                f"cannot make {self._directory}: {error}; make the folder writable, or choose "
                "another --workdir"
            ) from error
        self._stack = contextlib.ExitStack()

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Returns Orbax's manager, opened after damaged steps are set aside, which it rejects. It
        deletes nothing: a step may be deleted only after a newer manifest is on disk."""
        return self._stack.enter_context(contextlib.closing(ocp.CheckpointManager(
            self._directory, options=ocp.CheckpointManagerOptions(create=False))))

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Starts saving; the caller may donate or overwrite `state` as soon as this returns.

        Args:
          step: number of the checkpoint, not saved before.
          state: pytree of arrays (parameters, optimizer state, PRNG key data, ...).
          meta: what JSON can hold (data position, weight version, fingerprints, ...).

        Raises:
          ValueError: the step exists, a leaf is no array, or `meta` is not JSON.
          Unwritable: this save, or the one before it in the background, could not be written.
        """
        self.wait()
        try:
            text = json.dumps({"meta": meta, "leaves": describe_leaves(state)})
        except TypeError as error:
            raise ValueError(f"meta of checkpoint {step} is not JSON: {error}") from error
        if step in self.steps():
            raise ValueError(f"checkpoint {self._directory / str(step)} already exists")
        try:
            self._tidy()
            self._manager.save(step, force=True, args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(json.loads(text))))
        except jax.errors.JaxRuntimeError:
            raise  # another process is gone: no word about this folder
        except Exception as error:
            raise self._explained(step, error) from error
        self._pending = step, self._executor.submit(self._commit, step)

    def wait(self) -> None:
        """Waits until the save in the background is complete, and raises its error if it failed."""
        if self._pending is not None:
            (step, future), self._pending = self._pending, None
            try:
                future.result()
            except Exception as error:
                with contextlib.suppress(Exception):  # Orbax raises it once more, in this thread
                    self._manager.wait_until_finished()
                if isinstance(error, (jax.errors.JaxRuntimeError, Interrupted)):
                    raise
                raise self._explained(step, error) from error

    def steps(self) -> list[int]:
        """Returns the steps whose manifest is written, oldest first (their bytes are not read)."""
        return _steps(self._directory)

    def latest(self) -> int | None:
        """Returns the newest complete step, or None in a new run.

        Raises:
          ValueError: only damaged checkpoints are there; starting over would hide that.
        """
        self.wait()
        steps = self.steps()
        newest = _agreed(steps[-1] if steps else None)
        damaged = [path.name for path in storage.children(self._directory)
                   if path.name.endswith(CORRUPT)]
        if newest is None and damaged:
            raise ValueError(f"{self._directory} holds only damaged checkpoints ({damaged}): start "
                             "a new workdir, or delete them to train again from the beginning")
        return newest

    def restore(self, abstract_state: Any, step: int | None = None, is_part: bool = False,
                optional: Collection[str] = ()) -> tuple[Any, dict[str, Any]]:
        """Returns (state, meta) of the newest intact step, or of `step` and no other.

        Args:
          abstract_state: pytree of jax.ShapeDtypeStruct with shardings, on any mesh; or a function
            from the saved meta to it.
          step: None falls back to older steps when newer ones are damaged.
          is_part: abstract_state is a part of the saved state, with nested dicts in place of
            classes; no other arrays are read, and nothing in the folder changes, where a run may
            still save.
          optional: first names of parts that are left out where only the checkpoint or only
            abstract_state has them.

        Raises:
          FileNotFoundError: there is no checkpoint, or not the one asked for.
          ValueError: no intact checkpoint is left, or a leaf differs in name, shape or dtype.
        """
        self.wait()
        step = self._intact(step, sets_aside=not is_part)
        self._manager.reload()
        saved = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))
        if callable(abstract_state):
            abstract_state = abstract_state(saved["meta"]["meta"])
        leaves, first = saved["meta"]["leaves"], lambda name: name.partition("/")[0]
        if lacking := set(optional) - set(map(first, leaves)):
            abstract_state = {n: x for n, x in abstract_state.items() if n not in lacking}
        wanted = describe_leaves(abstract_state)
        unread = set(optional) - set(map(first, wanted))
        leaves = {name: leaf for name, leaf in leaves.items()
                  if name in wanted or not (is_part or first(name) in unread)}
        path = self._directory / str(step)
        check_leaves(leaves, wanted, path)
        restored = ocp.args.PyTreeRestore(
            abstract_state, partial_restore=is_part or bool(unread),
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract_state))
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(path / "state", restored), saved["meta"]["meta"]

    def close(self) -> None:
        """Finishes the save in the background and frees the threads."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            with contextlib.suppress(Exception):  # Orbax raises once more what a save has raised
                self._stack.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self.close()
        except Exception as error:
            if kind is None:
                raise
            logging.error("%s", error)  # what ends the block is the cause, and says more

    def _commit(self, step: int) -> None:
        """Waits for Orbax, writes the manifest, then deletes steps beyond `keep`. All processes
        wait for process 0: one that ended earlier would end process 0 too."""
        try:
            self._manager.wait_until_finished()
            if jax.process_index() == 0:
                self._before_commit()
                write_manifest(self._directory / str(step))
                for old in self.steps()[:-self._keep]:
                    (self._directory / str(old) / MANIFEST).unlink()  # half a step must not count
                    (self._directory / str(old)).rmtree()
        finally:
            processes.meet(f"checkpoint {step} is complete", COMMIT_SECONDS)

    def _tidy(self) -> None:
        """Removes files of failed or killed saves. Never called during a save."""
        if jax.process_index() == 0:
            newest = max(self.steps(), default=-1)
            for path in storage.children(self._directory):
                if ocp.utils.TMP_DIR_SUFFIX in path.name:
                    path.rmtree()
                elif path.name.isdigit() and not (path / MANIFEST).exists():
                    if int(path.name) < newest:
                        path.rmtree()  # its deletion was cut short
                    else:
                        self._set_aside(path, UNCOMMITTED)
        multihost_utils.sync_global_devices("checkpoints_tidy")
        self._manager.reload()

    def _set_aside(self, path: epath.Path, suffix: str) -> epath.Path:
        target = path.parent / (path.name + suffix)
        if target.exists():
            target.rmtree()
        path.rename(target)
        return target

    def _intact(self, wanted: int | None, sets_aside: bool) -> int:
        """Returns the step to restore, checked by process 0; damaged ones are passed over, and set
        aside where asked."""
        steps = self.steps()
        multihost_utils.sync_global_devices("checkpoints_listed")  # before process 0 renames any
        if not steps or (wanted is not None and wanted not in steps):
            raise FileNotFoundError(f"no checkpoint {'' if wanted is None else wanted} in "
                                    f"{self._directory}; complete steps there: {steps}")
        chosen, problems = None, []
        candidates = steps[::-1] if wanted is None else [wanted]
        for step in candidates if jax.process_index() == 0 else []:
            problem = verify(self._directory / str(step))
            if problem is None:
                chosen = step
                break
            name = ""
            if sets_aside:
                name = f", now called {self._set_aside(self._directory / str(step), CORRUPT).name}"
            problems.append(f"checkpoint {step} is damaged ({problem}){name}")
        chosen = _agreed(chosen)
        if chosen is None:
            raise ValueError(f"no intact checkpoint{'' if wanted is None else f' {wanted}'} left "
                             f"in {self._directory}: {'; '.join(problems)}; other complete steps: "
                             f"{self.steps()}")
        if jax.process_index() == 0 and wanted is None:
            problems += [f"checkpoint {path.name} was not completed"
                         for path in storage.children(self._directory)
                         if path.name.isdigit() and int(path.name) > chosen]
        for problem in problems:
            logging.error("%s: %s; restoring step %d instead.", self._directory, problem, chosen)
        return chosen

    def _explained(self, step: int, error: Exception) -> Unwritable | Interrupted:
        if storage.is_passing(error):
            return Interrupted(f"checkpoint {step} could not be written to {self._directory}: {error}; "
                               "the same command continues later")
        return Unwritable(f"checkpoint {step} could not be written to {self._directory}: "
                            f"{error}. The older steps {self.steps()} are intact; free space or "
                            "make the folder writable, then start the same command again to "
                            "resume.")


def newest_step(workdir: str | os.PathLike) -> int | None:
    """Returns the newest step whose manifest is written, -1 where there is none; None without a folder
    of checkpoints."""
    folder = storage.folder(workdir) / "checkpoints"
    return max(_steps(folder), default=-1) if folder.exists() else None


def _steps(folder: epath.Path) -> list[int]:
    names = [path.name for path in storage.children(folder) if path.name.isdigit()]
    return sorted(int(name) for name in names if (folder / name / MANIFEST).exists())


def _agreed(step: int | None) -> int | None:
    """Returns what process 0 passed, on every process."""
    value = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if step is None else step)))
    return None if value < 0 else value


def describe_leaves(tree: Any) -> dict[str, str]:
    """Returns {"params/embed": "float32[32,8]", ...} of a pytree of arrays or their structs."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not hasattr(leaf, "dtype"):
            raise ValueError(f"leaf {name} is a {type(leaf).__name__}, not an array: it may go "
                             "into meta")
        leaves[name] = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    return leaves


def check_leaves(saved: Mapping[str, str], wanted: Mapping[str, str], path: epath.Path) -> None:
    """Raises Misfit naming every leaf that the checkpoint and the program do not share."""
    different = [f"{name}: {old} in the checkpoint, {new} in this program"
                 for name, old, new in differences(saved, wanted)]
    if different:
        raise Misfit(f"{path} does not fit this program, {len(different)} leaves differ: "
                         + "; ".join(different[:8]) + ("; ..." if len(different) > 8 else ""))


def write_manifest(step_directory: epath.Path) -> None:
    """Writes manifest.json: size and sha256 of every file below `step_directory`."""
    names = [str(path.relative_to(step_directory)) for path in storage.files(step_directory)]
    storage.write_json(step_directory / MANIFEST, {"files": _hashes(step_directory, names)})


def verify(step_directory: str | os.PathLike) -> str | None:
    """Returns the first mismatch between the files of a step and its manifest, None if there is
    none."""
    folder = storage.folder(step_directory)
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        for name, expected in files.items():
            path = folder / name
            if not path.exists() or path.is_dir():
                return f"file {name} is missing"
            size = path.stat().length
            if size != expected["bytes"]:
                return f"file {name} has {size} bytes instead of {expected['bytes']}"
        found = _hashes(folder, list(files))
        for name in files:
            if found[name] != files[name]:
                return f"the sha256 of file {name} does not match"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is unreadable: {error}"
    except OSError as error:
        return f"read error: {error}"
    return None


def _hashes(folder: epath.Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns size and sha256 of files. Reads several at once, because each read from a bucket
    starts slowly."""
    with futures.ThreadPoolExecutor(STREAMS) as pool:
        found = pool.map(lambda name: _size_and_hash(folder / name), names)
        return dict(zip(names, found, strict=True))


def _size_and_hash(path: epath.Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}
