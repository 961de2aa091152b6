"""How every command starts and ends.

A command ends with the message alone and exit code 2 where its user can mend it: a flag or a field
that does not exist, a config that is refused, a file that is missing, broken or cannot be written.
It ends with the message alone and 1 where a run cannot go on: a loss is not finite, the gate fails.
A mistake in the code keeps its traceback, and exits with 1. A run that was interrupted from outside
ends with 42: the same command continues it, and what started it should start it again. What Ctrl-C
stops at once, a run at the second one, ends with 130. Where nobody reads what is printed any more, as
in `COMMAND | head -1`, it ends with 141 and without a word.
"""

import argparse
import contextlib
import glob
import importlib.util
import os
import pathlib
import select
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator

PACKAGE = pathlib.Path(__file__).parents[1]
# What a machine with a TPU, an NVIDIA or an AMD GPU has one of, bare, in a container or in WSL.
TPUS = ("/dev/accel*", "/dev/vfio/[0-9]*")
DEVICES = (*TPUS, "/dev/nvidia*", "/dev/kfd", "/dev/dxg")
TPU_VARIABLES = ("TPU_NAME", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID")
RESTART = 42
STOPPED, STOPPED_TEXT = 130, "\nstopped at once by Ctrl-C"  # the code as shells have it
UNREAD = 141  # as shells have it: 128 + SIGPIPE


class Unwritable(RuntimeError):
    """A disk is full, or may not be written: the user can mend it, and continue."""


class Interrupted(Exception):
    """A run has to stop where it is, by no fault of its own; the same command continues it."""


EXAMPLES = "\nExamples:\n"  # begins the end of a command's docstring

REFUSALS = (ValueError, OSError, ImportError, Unwritable)
FAILURES = (FloatingPointError, RuntimeError)


def exit_code(error: BaseException) -> int | None:
    """Returns 2 for an error that the user can mend, 1 for a run that cannot go on, RESTART for one
    that was interrupted, None for a bug.

    A `raise` statement of this package is a sentence for the user. What Python, JAX or another
    library raised, however deep inside, is a bug of ours, but for a file that cannot be used.
    """
    if isinstance(error, Interrupted):
        return RESTART
    if isinstance(error, OSError) and error.filename is not None:
        return 2
    last = traceback.extract_tb(error.__traceback__)[-1]
    if PACKAGE not in pathlib.Path(last.filename).parents or not last.line.startswith("raise "):
        return None
    if isinstance(error, REFUSALS):
        return 2
    return 1 if isinstance(error, FAILURES) else None


@contextlib.contextmanager
def piped() -> Iterator[None]:
    """Ends a command with UNREAD, and without a traceback, if nobody reads its output any more. An exit
    code that says that the command failed stays."""
    try:
        try:
            yield
        except SystemExit as end:
            if end.code:
                _drop_unread()
            else:
                sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        if not _drop_unread():  # another pipe, or a socket
            raise
        sys.exit(UNREAD)


def _drop_unread() -> bool:
    """Returns whether nobody reads stdout or stderr. What is printed there from now on goes nowhere:
    Python would else fail to write the rest at its end."""
    lost, poll = select.POLLERR | select.POLLHUP, select.poll()
    for number in (1, 2):
        poll.register(number, 0)
    unread = [number for number, event in poll.poll(0) if event & lost]
    for number in unread:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
    return bool(unread)


@contextlib.contextmanager
def messages() -> Iterator[None]:
    """Turns errors whose message says it all into that message and an exit."""
    try:
        yield
    except KeyboardInterrupt:
        print(STOPPED_TEXT, file=sys.stderr)
        sys.exit(STOPPED)
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        with contextlib.suppress(BrokenPipeError):
            print(error, file=sys.stderr)
        sys.exit(code)


def split_examples(about: str) -> tuple[str, str]:
    """Returns a command's docstring without its examples, and its examples as --help ends with them."""
    text, _, examples = about.partition(EXAMPLES)
    return text.strip(), textwrap.indent(f"examples:\n{textwrap.dedent(examples).strip()}", "  ")[2:]


def parser(command: str, description: str, about: str) -> argparse.ArgumentParser:
    """Returns the parser of `python -m command`; its --help ends with the examples of `about`, the
    docstring of the command."""
    return argparse.ArgumentParser(
        prog=f"python -m {command}", description=description, epilog=split_examples(about)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def check_folder(flag: str, path: str | None) -> None:
    """Raises FileNotFoundError, before hours of work, where the file that a flag names cannot be
    made."""
    if path and not pathlib.Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(
            f"--{flag}={path}: its folder does not exist; create it, or give another path"
        )
    if path and pathlib.Path(path).is_dir():
        raise IsADirectoryError(f"--{flag}={path} is a folder; give a file in it")


def has_tpu() -> bool:
    """Whether this looks like a machine with a TPU on which libtpu is installed."""
    has_hint = any(name in os.environ for name in TPU_VARIABLES)
    has_device = any(glob.glob(pattern) for pattern in TPUS)
    return importlib.util.find_spec("libtpu") is not None and (has_hint or has_device)


def leave_out_missing_tpu() -> None:
    """Keeps JAX from loading libtpu on a machine without any accelerator.

    There libtpu, installed for its compiler, only costs time and writes errors to the terminal.
    JAX_PLATFORMS, or JAX itself where it sees a TPU, decides before this.
    """
    has_device = any(glob.glob(pattern) for pattern in DEVICES)
    if importlib.util.find_spec("libtpu") is None or has_tpu() or has_device:
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for a JAX that is imported later
    if "jax" in sys.modules and sys.modules["jax"].config.jax_platforms is None:
        sys.modules["jax"].config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def run(main: Callable[[], object]) -> None:
    """Runs a command; see the top of the file. `main` parses its own arguments."""
    leave_out_missing_tpu()
    with piped(), messages():
        main()
