"""Exit codes and error messages that all commands share.

    2    The user can fix the error: an unknown flag or field, a contradictory config, a missing,
         broken or unwritable file. Prints the message only.
    1    The run cannot continue (loss not finite, gate failed; message only), or the code has a bug
         (with a traceback).
    42   The run was interrupted from outside. The same command continues it, and a supervisor
         should start it again.
    130  Ctrl-C stopped the command at once; for a run this is the second Ctrl-C.
    141  Nobody reads the output any more, as in `COMMAND | head -1`. Prints nothing.
"""

import argparse
import collections
import contextlib
import glob
import importlib.util
import os
import pathlib
import resource
import select
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator

PACKAGE = pathlib.Path(__file__).parents[1]
# The folders whose errors are messages; a clone has more than the package.
BESIDE = ("benchmarks", "experiments") if (PACKAGE.parent / "setup.py").exists() else ()
OURS = {PACKAGE, *(PACKAGE.parent / name for name in BESIDE)}
# What a machine with a TPU, an NVIDIA or an AMD GPU has one of, bare, in a container or in WSL.
TPUS = ("/dev/accel*", "/dev/vfio/[0-9]*")
DEVICES = (*TPUS, "/dev/nvidia*", "/dev/kfd", "/dev/dxg")
TPU_VARIABLES = ("TPU_NAME", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID")
RESTART = 42
STOPPED, STOPPED_TEXT = 130, "\nstopped at once by Ctrl-C"  # the code as shells have it
UNREAD = 141  # as shells have it: 128 + SIGPIPE


class Unwritable(RuntimeError):
    """A disk is full or not writable. The user can fix this and continue the run."""


class MismatchError(RuntimeError):
    """Learner and sampler differ by more than config.gate allows."""


class SamplerLost(RuntimeError):
    """What samples for a run cannot be reached, or does not do as it shall."""


class Interrupted(Exception):
    """A run must stop for an outside reason. The same command continues it."""


EXAMPLES = "\nExamples:\n"  # begins the end of a command's docstring

TWICE = "given more than once; give one value"
REFUSALS = (ValueError, OSError, ImportError, Unwritable)
FAILURES = (FloatingPointError, RuntimeError)


def exit_code(error: BaseException) -> int | None:
    """Returns the exit code of an error: 2 if the user can fix it, 1 if the run cannot continue,
    RESTART if it was interrupted, None for a bug.

    Errors that this project raises itself are messages for the user. Errors raised by Python, JAX
    or another library count as bugs, except for files that cannot be used.
    """
    if isinstance(error, Interrupted):
        return RESTART
    if isinstance(error, OSError) and error.filename is not None:
        return 2
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = not OURS.isdisjoint(pathlib.Path(last.filename).parents)
    if not is_ours or not (last.line or "").startswith("raise "):
        return None
    if isinstance(error, REFUSALS):
        return 2
    return 1 if isinstance(error, FAILURES) else None


@contextlib.contextmanager
def piped() -> Iterator[None]:
    """Ends a command with UNREAD and no traceback if nobody reads its output any more. A nonzero
    exit code of the command itself is kept."""
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
    """Returns whether nobody reads stdout or stderr, and sends their later output to os.devnull.
    Otherwise Python would fail to write the rest at its end."""
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
    """Turns errors with an exit code into a message and that exit; bugs keep their traceback."""
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
    return once(argparse.ArgumentParser(
        prog=f"python -m {command}", description=description, epilog=split_examples(about)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ))


def once(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Returns a parser that has no arguments yet. From now on it refuses two values of an option."""
    for action in (None, "store"):
        parser.register("action", action, _StoreOnce)
    return parser


def repeated(names: Iterable[str]) -> str:
    """Returns what is said of names that are given twice or more often; "" if none is."""
    counts = collections.Counter(names)
    more = [name for name, count in counts.items() if count > 1]
    return f"{', '.join(more)} {TWICE}" if more else ""


class _StoreOnce(argparse._StoreAction):
    """Stores the value of an option, and refuses a second one."""

    _stored_in: argparse.Namespace | None = None

    def __call__(self, parser, namespace, values, option_string=None):
        if option_string and self._stored_in is namespace:
            parser.error(f"{option_string} {TWICE}")
        self._stored_in = namespace
        super().__call__(parser, namespace, values, option_string)


def check_folder(flag: str, path: str | None) -> None:
    """Raises FileNotFoundError or IsADirectoryError if the output file of a flag cannot be created.
    Call it before hours of work."""
    if path and not pathlib.Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(
            f"--{flag}={path}: its folder does not exist; create it, or give another path"
        )
    if path and pathlib.Path(path).is_dir():
        raise IsADirectoryError(f"--{flag}={path} is a folder; give a file in it")


def has_tpu() -> bool:
    """Whether libtpu is installed and the machine looks like one with a TPU."""
    has_hint = any(name in os.environ for name in TPU_VARIABLES)
    has_device = any(glob.glob(pattern) for pattern in TPUS)
    return importlib.util.find_spec("libtpu") is not None and (has_hint or has_device)


def leave_out_missing_tpu() -> None:
    """Keeps JAX from loading libtpu on a machine without any accelerator.

    On such a machine libtpu is only needed for its compiler; loading it costs time and prints
    errors. JAX_PLATFORMS, or a TPU that JAX sees, takes precedence.
    """
    has_device = any(glob.glob(pattern) for pattern in DEVICES)
    if importlib.util.find_spec("libtpu") is None or has_tpu() or has_device:
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for a JAX that is imported later
    if "jax" in sys.modules and sys.modules["jax"].config.jax_platforms is None:
        sys.modules["jax"].config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def raise_file_limit() -> int:
    """Lets this process and those that it starts open as many files as the system allows. Returns
    this number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS allows no unlimited number
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def run(main: Callable[[], object]) -> None:
    """Runs a command; see the top of the file. `main` parses its own arguments."""
    leave_out_missing_tpu()
    raise_file_limit()
    with piped(), messages():
        main()
