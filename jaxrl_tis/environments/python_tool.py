r"""Python as a tool: an answer with a ```python block is a call, one with \boxed{...} is final.

    answer       "```python\nprint(12 * 34)\n```"
    observation  "408\n"
    answer       "The result is \boxed{408}."

All blocks of an answer run as one program in a new interpreter, so nothing is kept between calls.
The observation is the program's output, and the error that ended the program. An answer with
neither a block nor a box is final and wrong. A box outside the blocks makes an answer final. The ```
at the end of a block is a line of its own, and a block without it is no call.

The program has the standard library, but no files, network, other processes or environment
variables, so it cannot import asyncio, ctypes or subprocess. CPU seconds, memory and output are
limited. The system enforces the limits, an audit hook in the program's interpreter refuses the
rest. This guards against mistakes of a policy. It is no sandbox for hostile code.

Random numbers are seeded, and so are hashes. A program that prints the time or the address of an
object is not repeatable.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from jaxrl_tis.data import graders
from jaxrl_tis.environments.protocol import Messages, Step

OPEN = r"```python[ \t]*\r?\n"
# The end is a line of its own, so a program may have ``` in a string.
BLOCK = re.compile(OPEN + r"(.*?)^[ \t]*```[ \t]*\r?$", re.DOTALL | re.MULTILINE)
UNCLOSED = re.compile(OPEN + r".*", re.DOTALL)
OUTPUT_CHARACTERS = 4000
PROGRAM_BYTES = 32 << 10  # below the size of a pipe
WALL = 4.0  # seconds of waiting per CPU second; a busy machine must not change the result
# Runs the program on stdin. Arguments: CPU seconds, bytes of memory, seed of random numbers.
INTERPRETER = r'''
import os, random, resource, sys

seconds, memory, seed = map(int, sys.argv[1:])
random.seed(seed)
source = sys.stdin.buffer.read().decode("utf-8", "replace")
for limit, value in (
    (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (value, value))

def hook(
    event, arguments, library=os.path.dirname(os.__file__) + "/", text=str, refusal=PermissionError
):
    """Allows events without an effect outside, and reading modules of the standard library."""
    first = arguments[0] if arguments and type(arguments[0]) is text else ""
    module = first.rpartition(".")[2]
    if event == "import" and module not in {"_posixsubprocess", "_ctypes", "_testcapi"}:
        return
    if event in {
        "_thread.start_joinable_thread", "_thread.start_new_thread", "array.__new__", "builtins.id",
        "builtins.input", "builtins.input/result", "code.__new__", "compile",
        "cpython.PyInterpreterState_Clear", "cpython._PySys_ClearAuditHooks", "exec",
        "function.__new__", "marshal.load", "marshal.loads", "object.__delattr__",
        "object.__getattr__", "object.__setattr__", "pickle.find_class", "sys._getframe",
        "sys._getframemodulename", "sys.excepthook", "sys.unraisablehook", "time.sleep",
    }:
        return
    is_reading = event == "os.listdir" or event == "open" and arguments[1] in {"r", "rb"}
    if is_reading and (first + "/").startswith(library) and "/../" not in first + "/":
        if "/site-packages/" not in first + "/":
            return
    raise refusal("no files, network or processes here (" + event + ")")

def run(source):
    try:
        code = compile(source, "<program>", "exec")
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        return f"line {line}: {type(error).__name__}: {getattr(error, 'msg', error)}"
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as error:
        return "" if error.code in (None, 0) else f"SystemExit: {error.code}"
    except BaseException as error:
        trace, line = error.__traceback__, "?"
        while trace:
            if trace.tb_frame.f_code.co_filename == "<program>":
                line = trace.tb_lineno
            trace = trace.tb_next
        return f"line {line}: {type(error).__name__}: {error}"
    return ""

sys.addaudithook(hook)
del hook, os, resource
error = run(source)
if error:
    print(error)
sys.stdout.flush()
'''


class PythonTool:
    """One episode. Metrics: `programs`, and `stopped_programs` at a limit of time or output.

    Args:
        seconds: CPU seconds of a program, whole seconds from 1. Keep WALL times this number below
            the time limit of a turn (task.turn_timeout).
        memory: MiB of a program.
    """

    @classmethod
    def prepare(cls, *, seconds: int = 2, memory: int = 256) -> None:
        if seconds < 1 or seconds != int(seconds) or memory < 64:
            raise ValueError(
                f"seconds={seconds} and memory={memory}; give whole seconds from 1 and at least "
                "64 MiB"
            )

    def __init__(self, *, seed: int, seconds: int = 2, memory: int = 256):
        self._seed, self._seconds, self._memory = seed, int(seconds), int(memory) << 20
        self._programs = self._stopped = 0

    def reset(self, example: Mapping[str, Any]) -> str | Messages:
        self._answer = graders.answer_of(example).strip()
        return example["prompt"]

    def step(self, answer: str) -> Step:
        blocks = BLOCK.findall(answer)
        boxed = graders.last_boxed(UNCLOSED.sub("", BLOCK.sub("", answer)))
        if boxed is not None or not blocks:
            is_right = boxed is not None and boxed.strip() == self._answer
            return Step("", float(is_right), True, self._metrics())
        self._programs += 1
        return Step(self._output("\n".join(blocks)), metrics=self._metrics())

    def _metrics(self) -> dict[str, float]:
        return {"programs": self._programs, "stopped_programs": self._stopped}

    def _output(self, program: str) -> str:
        output, stop = run(program, self._seconds, self._memory, self._seed)
        self._stopped += bool(stop)
        separator = "\n" if stop and output and not output.endswith("\n") else ""
        return output + separator + stop or "(no output)"


def run(program: str, seconds: int, memory: int, seed: int) -> tuple[str, str]:
    """Returns a program's output, and the limit that stopped it, as a line; "" for none."""
    source = program.encode(errors="replace")
    if len(source) > PROGRAM_BYTES:
        return "", f"[not run: more than {PROGRAM_BYTES} bytes]\n"
    # Isolated as by -I, which would also ignore the seed of hashes.
    flags = ["-B", "-P", "-S", "-s", "-u", "-c", INTERPRETER]
    deadline = time.monotonic() + WALL * seconds
    with subprocess.Popen(
        [sys.executable, *flags, *map(str, (seconds, memory, seed))], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0, cwd="/",
        env={"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8:backslashreplace"},
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(source)
            output = _read(process.stdout.fileno(), deadline)
            if len(output) > OUTPUT_CHARACTERS:
                return output[:OUTPUT_CHARACTERS], f"[cut after {OUTPUT_CHARACTERS} characters]\n"
            status = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        finally:
            process.kill()
    if status in (-signal.SIGKILL, -signal.SIGXCPU):
        return output, f"[stopped: more than {seconds} s]\n"
    return output, f"[ended by signal {-status}]\n" if status < 0 else ""


def _read(descriptor: int, deadline: float) -> str:
    """Returns the text up to its end, the deadline, or more than OUTPUT_CHARACTERS."""
    data, poll = b"", select.poll()
    poll.register(descriptor, select.POLLIN)
    while len(data) <= 4 * OUTPUT_CHARACTERS:
        left = max(0.0, deadline - time.monotonic())
        part = os.read(descriptor, 1 << 16) if poll.poll(1000 * left) else b""
        if not part:
            break
        data += part
    return data.decode(errors="replace")
