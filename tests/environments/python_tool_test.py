"""Programs in their own interpreter: output, errors, limits, and what is refused."""

import os
import time

import pytest

from jaxrl_tis.environments import python_tool
from jaxrl_tis.environments.protocol import Step
from jaxrl_tis.environments.python_tool import OUTPUT_CHARACTERS, PythonTool, run

EXAMPLE = {"prompt": "What is 12 * 34?", "answer": "408", "id": "x"}


def begun(**params):
    PythonTool.prepare(**params)
    play = PythonTool(seed=1, **params)
    assert play.reset(EXAMPLE) == EXAMPLE["prompt"]
    return play


def block(program):
    return f"Let me compute.\n```python\n{program}\n```\n"


def output(program, seconds=2, memory=256, seed=1):
    text, stop = run(program, seconds, memory << 20, seed)
    assert stop == ""
    return text


def test_a_program_and_a_final_answer():
    play = begun()
    step = play.step(block("print(12 * 34)"))
    assert step == Step("408\n", metrics={"programs": 1, "stopped_programs": 0})
    two = block("x = 20\nprint(x)") + block("print(x + 1)")
    assert play.step(two).observation == "20\n21\n"
    assert play.step(block("#\ud800")).observation == "(no output)"
    step = play.step(r"So it is \boxed{ 408 }.")
    assert step == Step("", 1.0, True, {"programs": 3, "stopped_programs": 0})


@pytest.mark.parametrize("answer, reward", [
    (r"\boxed{407}", 0.0), ("408", 0.0), ("", 0.0), (r"\boxed{1} \boxed{408}", 1.0),
    (block("print(1)") + r"\boxed{408}", 1.0), ("```python\nprint(1)", 0.0),
    ("```\nprint(1)\n```", 0.0), ("```python\nprint(r'\\boxed{408}')\nwhile", 0.0),
])
def test_final_answers(answer, reward):
    assert begun().step(answer) == Step("", reward, True, {"programs": 0, "stopped_programs": 0})


@pytest.mark.all
def test_a_block_ends_with_a_line_of_its_own():
    assert begun().step(block("print('```')\nprint(2)")).observation == "```\n2\n"
    assert begun().step("```python\r\nprint(3)\r\n```\r\n").observation == "3\n"


@pytest.mark.all
def test_a_box_in_a_program_is_no_answer():
    assert begun().step(block(r"print(r'\boxed{408}')")).observation == "\\boxed{408}\n"


@pytest.mark.all
@pytest.mark.parametrize("program, expected", [
    ("x = 1\n1 / 0", "line 2: ZeroDivisionError: division by zero\n"),
    ("print(1)\ndef f():\n  return {}['a']\nf()", "1\nline 3: KeyError: 'a'\n"),
    ("def f(:", "line 1: SyntaxError: invalid syntax\n"),
    ("raise SystemExit(3)", "SystemExit: 3\n"),
    ("import sys\nsys.exit()", ""),
    ("input()", "line 1: EOFError: EOF when reading a line\n"),
    ("print('é\\ud800')", "é\\ud800\n"),
    ("import math, json\nprint(json.dumps(math.comb(5, 2)))", "10\n"),
    ("print('x' * 10**9)", "line 1: MemoryError: \n"),
    ("import numpy", "line 1: ModuleNotFoundError: No module named 'numpy'\n"),
])
def test_output_and_errors(program, expected):
    assert output(program) == expected


REFUSED = {
    "open({file!r})": "open",
    "open({file!r}, 'w')": "open",
    "import os\nos.open({file!r}, 0)": "open",
    "open({library!r} + '/../../../etc/hostname')": "open",
    "open({library!r} + '/new.py', 'w')": "open",
    "import os\nos.remove({file!r})": "os.remove",
    "import os\nos.listdir('/')": "os.listdir",
    "import os\nos.system('true')": "os.system",
    "import os\nos.fork()": "os.fork",
    "import os\nos.kill(os.getppid(), 9)": "os.kill",
    "import subprocess": "import",
    "import ctypes": "import",
    "import socket\nsocket.socket()": "socket.__new__",
    "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (9, 9))": "resource.setrlimit",
    "import gc\ngc.get_objects()": "gc.get_objects",
}


@pytest.mark.all
def test_what_a_program_may_not_do(tmp_path):
    file, library = tmp_path / "file", os.path.dirname(os.__file__)
    file.write_text("kept")
    program = "\n".join(
        f"try:\n  exec({text.format(file=str(file), library=library)!r})\n"
        "except PermissionError as error:\n  print(error)"
        for text in REFUSED
    )
    events = [line.rpartition("(")[2].rstrip(")") for line in output(program).splitlines()]
    assert events == list(REFUSED.values())
    assert file.read_text() == "kept"


@pytest.mark.all
def test_it_reads_modules_of_the_library_and_nothing_of_the_environment(monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")
    names = output("import os\nprint(*sorted(os.environ))").split()
    assert set(names) <= {"LC_CTYPE", "PYTHONHASHSEED", "PYTHONIOENCODING"}
    assert output("import fractions, dataclasses, statistics, decimal, calendar\nprint(1)") == "1\n"


@pytest.mark.all
def test_programs_repeat():
    program = "import random\nprint(random.random(), {'a', 'b', 'c', 'd'}, hash('abc'))"
    assert output(program, seed=1) == output(program, seed=1) != output(program, seed=2)
    assert output("print('kept')\nx = 1") + output("print('x' in dir())") == "kept\nFalse\n"


@pytest.mark.all
@pytest.mark.parametrize("program", [
    "print('begun')\nwhile True: pass",
    "print('begun', flush=True)\nimport os\nos.close(1)\nwhile True: pass",
])
def test_cpu_seconds_end_a_program(program, monkeypatch):
    monkeypatch.setattr(python_tool, "WALL", 60.0)
    start = time.monotonic()
    assert run(program, 1, 256 << 20, 1) == ("begun\n", "[stopped: more than 1 s]\n")
    assert time.monotonic() - start < 30.0


@pytest.mark.all
def test_waiting_ends_a_program(monkeypatch):
    monkeypatch.setattr(python_tool, "WALL", 2.0)
    program = "print('begun')\nimport time\ntime.sleep(600)"
    play = begun(seconds=1)
    step = play.step(block(program))
    assert step.observation == "begun\n[stopped: more than 1 s]\n"
    assert step.metrics == {"programs": 1, "stopped_programs": 1}


@pytest.mark.all
@pytest.mark.parametrize("program", ["while True: print('x' * 99)", "print('x' * 10**6)"])
def test_output_is_cut(program):
    text, stop = run(program, 2, 256 << 20, 1)
    assert len(text) == OUTPUT_CHARACTERS and set(text) <= {"x", "\n"}
    assert stop == f"[cut after {OUTPUT_CHARACTERS} characters]\n"
    step = begun().step(block("print('é' * 4001, end='')"))
    assert step.observation == "é" * 4000 + f"\n[cut after {OUTPUT_CHARACTERS} characters]\n"


def test_other_ends():
    assert run("import os\nos.abort()", 2, 256 << 20, 1) == ("", "[ended by signal 6]\n")
    assert run("#" * 40_000, 2, 256 << 20, 1) == ("", "[not run: more than 32768 bytes]\n")


@pytest.mark.parametrize("params", [{"seconds": 0}, {"seconds": 1.5}, {"memory": 10}])
def test_limits_that_are_refused(params):
    with pytest.raises(ValueError, match="give whole seconds from 1 and at least 64 MiB"):
        PythonTool.prepare(**params)
