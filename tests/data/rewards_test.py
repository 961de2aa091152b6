import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxrl_tis.data import confined
from jaxrl_tis.data.rewards import REWARDS, RewardWorker, soft_overlong_penalty

USER_REWARDS = '''
import os, random, subprocess, sys, time

IDENTITY = random.SystemRandom().random()  # process numbers may be of a namespace

def length(text, record):
    return len(text) + len(record["answer"])

def parts(text, record):
    if text == "other":
        return {"length": 1}
    if text == "nothing":
        return {}
    if text == "turned":
        return {"format": 0.5, "length": 6}
    return {"length": float("nan") if text == "nan" else len(text), "format": 0.5}

def faulty(text, record):
    print("not a message", flush=True)
    if text == "hang":
        time.sleep(600)
    if text == "hang with a child":
        code = "import time; time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", code, record["answer"]], start_new_session=True)
        time.sleep(600)
    if text == "crash":
        os._exit(3)
    if text == "raise":
        raise KeyError("no such key")
    if text == "exit":
        sys.exit(1)
    if text == "which":
        return IDENTITY
    if text == "read":
        return float(len(sys.stdin.read()))
    return {"nan": float("nan"), "inf": float("-inf"), "none": None}.get(text, 1.0)

def has_jax(text, record):
    return "jax" in sys.modules

def which(text, record):
    return IDENTITY
'''
RECORD = {"prompt": "2+3=", "answer": "5", "id": "x"}


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "user_rewards.py").write_text(USER_REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "user_rewards"


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def scorer(worker):
    """The process that runs the function: the first child of `unshare`, if there is that."""
    pid = worker._confined._process.pid
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return int((file.read().split() or [pid])[0])


def running_with(argument):
    """Processes that were started with this argument."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(argument).encode() in words:
            found.append(int(pid))
    return found


def wait_until_ended(pid):
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still running"
        time.sleep(0.01)


def answer(text):
    return {"answer": text, "id": "x"}


def test_exact():
    assert REWARDS["exact"](" 85\n", answer("85 ")) == 1.0
    assert REWARDS["exact"]("085", answer("85")) == 0.0


@pytest.mark.parametrize(
    ("text", "number", "expected"),
    [
        ("the sum is 85.", "85", 1.0),
        ("it is 84, no, 85", "85", 1.0),
        ("85 or 84", "85", 0.0),
        ("$1,234.50 in total", "1234.5", 1.0),
        ("-$5", "-5", 1.0),
        ("$-5", "-5", 1.0),
        ("= -7", "7", 0.0),
        ("= \N{MINUS SIGN}7", "-7", 1.0),
        ("+7", "7", 1.0),
        ("7-4", "4", 1.0),
        ("7-4", "-4", 0.0),
        ("(1+2)-4", "4", 1.0),
        (".50", "0.5", 1.0),
        ("x=12", "12", 1.0),
        ("1, 2", "2", 1.0),
        ("1,2345", "2345", 1.0),
        ("1,234,567", "1234567", 1.0),
        ("0.1", "0.10000000000000001", 0.0),
        ("**5**", "#### 5", 1.0),
        ("no number", "5", 0.0),
        ("", "5", 0.0),
    ],
)
def test_last_number(text, number, expected):
    assert REWARDS["last_number"](text, answer(number)) == expected


def test_last_number_of_an_answer_without_one():
    with pytest.raises(ValueError, match="the answer 'five' of x has no number"):
        REWARDS["last_number"]("5", answer("five"))


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        (r"so \boxed{4}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}", 1.0),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{5} and Answer: 6", "5", 1.0),
        (r"\boxed{5", "5", 0.0),
        ("Answer: 4\nAnswer: $\\left( 1, 2 \\right)$", "(1,2)", 1.0),
        ("answer :1,000.", "1000", 1.0),
        ("Answer: (1,200)", "(1200)", 1.0),
        (r"\boxed{5\text{ cm}}", "5cm", 1.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{\leftarrow}", "arrow", 0.0),
        (r"\boxed{3}", r"we get \boxed{3}", 1.0),
        ("it is 5", "5", 0.0),
        ("Answer:\n5", "5", 0.0),
    ],
)
def test_boxed(text, reference, expected):
    assert REWARDS["boxed"](text, answer(reference)) == expected


def test_reasoning_gym_uses_the_score_of_the_package():
    meta = '{"source_dataset": "chain_sum", "expression": "500 + 500"}'
    record = {"prompt": "500 + 500 =", "answer": "1000", "id": "x", "meta": meta}
    assert REWARDS["reasoning_gym"](" 1,000.0\n", record) == 1.0  # the package allows both
    assert REWARDS["reasoning_gym"]("999", record) == 0.0
    # A text that only holds the answer gets len("1000") / len("it is 1000") = 4 / 10.
    assert REWARDS["reasoning_gym"]("it is 1000", record) == pytest.approx(0.4)


def test_soft_overlong_penalty():
    # max_length 100 and buffer 20: 0 up to 80, (80 - 90) / 20 = -0.5, -1 from 100 on.
    values = [soft_overlong_penalty(n, 100, 20) for n in (0, 80, 81, 90, 100, 101, 5000)]
    assert values == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]
    with pytest.raises(ValueError, match="buffer 101 must be above 0 and at most max_length 100"):
        soft_overlong_penalty(1, 100, 101)
    with pytest.raises(ValueError, match="buffer 0 "):
        soft_overlong_penalty(1, 100, 0)


def test_importing_rewards_does_not_import_jax():
    code = "import sys, jaxrl_tis.data.rewards; print('jax' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=os.getcwd()
    )
    assert result.stdout == "False\n"


def test_worker_scores_in_order(user_module):
    with RewardWorker(f"{user_module}:length", timeout=10, on_error=-1.0) as worker:
        texts = ["x" * n for n in range(100)]
        assert worker.score(texts, [RECORD] * 100) == [n + 1.0 for n in range(100)]
        assert worker.score([], []) == []
        assert worker.score(["é\ud800\n"], [RECORD]) == [4.0]
        with pytest.raises(ValueError, match="shorter"):
            worker.score(["a", "b"], [RECORD])
        assert worker.counts == {"timeouts": 0, "errors": 0, "non_finite": 0}


def test_worker_returns_the_components_of_a_score(user_module):
    with RewardWorker(f"{user_module}:parts", timeout=10, on_error=-1.0) as worker:
        wanted = [{"length": 2.0, "format": 0.5}, {"length": -0.5, "format": -0.5},
                  {"length": 1.0, "format": 0.5}]
        # The second text has other names than the first: an error, shared by the components.
        assert worker.components(["ab", "other", "c"], [RECORD] * 3) == wanted
        assert worker.counts == {"timeouts": 0, "errors": 1, "non_finite": 0}
        assert "['length'], before ['length', 'format']" in worker.last_error
        assert worker.score(["ab", "nan"], [RECORD] * 2) == [2.5, -1.0]
        assert worker.counts["non_finite"] == 1
        # The order of the names is that of the first result, as they become columns.
        [turned] = worker.components(["turned"], [RECORD])
        assert list(turned.items()) == [("length", 6.0), ("format", 0.5)]
    with RewardWorker(f"{user_module}:parts", timeout=10, on_error=-1.0) as worker:
        assert worker.components(["nothing"], [RECORD]) == [{"reward": -1.0}]
        assert worker.counts["errors"] == 1
    with RewardWorker(f"{user_module}:length", timeout=10, on_error=-1.0) as worker:
        assert worker.components(["a"], [RECORD]) == [{"reward": 2.0}]


def test_worker_runs_without_jax_in_one_other_process(user_module):
    with RewardWorker(f"{user_module}:has_jax", timeout=10, on_error=-1.0) as worker:
        assert worker.score(["a"], [RECORD]) == [0.0]
    with RewardWorker(f"{user_module}:which", timeout=10, on_error=-1.0) as worker:
        assert len(set(worker.score(["a", "b"], [RECORD] * 2) + worker.score(["c"], [RECORD]))) == 1
        assert scorer(worker) != os.getpid() and is_running(scorer(worker))


def test_worker_scores_a_batch_in_milliseconds():
    with RewardWorker("last_number", timeout=10, on_error=-1.0) as worker:
        texts = [f"the sum is {n}" for n in range(256)]
        records = [RECORD | {"answer": str(n)} for n in range(256)]
        times = []
        for _ in range(3):
            start = time.monotonic()
            assert worker.score(texts, records) == [1.0] * 256
            times.append(time.monotonic() - start)
        assert min(times) < 0.2  # 10 to 20 ms on an idle machine


def test_faulty_items_score_on_error_and_the_rest_go_on(user_module):
    texts = ["a", "hang", "b", "crash", "crash", "c", "raise", "exit", "nan", "inf", "none", "d"]
    start = time.monotonic()
    with RewardWorker(f"{user_module}:faulty", timeout=0.5, on_error=-0.25) as worker:
        scores = worker.score(texts, [RECORD] * len(texts))
        assert scores == [1.0 if len(text) == 1 else -0.25 for text in texts]
        # errors: two crashes, KeyError, SystemExit, and None that is no number
        assert worker.counts == {"timeouts": 1, "errors": 5, "non_finite": 2}
        assert "TypeError" in worker.last_error
        assert worker.score(["read", "a"], [RECORD] * 2) == [0.0, 1.0]
    assert time.monotonic() - start < 20


def test_an_exception_does_not_cost_the_process(user_module):
    with RewardWorker(f"{user_module}:faulty", timeout=10, on_error=-1.0) as worker:
        before, *_, after = worker.score(["which", "raise", "exit", "which"], [RECORD] * 4)
        assert before == after != -1.0


def test_a_process_that_no_longer_reads_is_replaced(user_module):
    with RewardWorker(f"{user_module}:faulty", timeout=0.5, on_error=-1.0) as worker:
        os.kill(scorer(worker), signal.SIGSTOP)
        assert worker.score(["x" * 1_000_000, "a"], [RECORD] * 2) == [-1.0, 1.0]
        assert worker.counts["timeouts"] == 1


def test_the_time_limit_is_per_item(tmp_path, monkeypatch):
    (tmp_path / "slow_rewards.py").write_text(
        "import time\ndef slow(text, record):\n    time.sleep(0.1)\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardWorker("slow_rewards:slow", timeout=1.0, on_error=0.0) as worker:
        assert worker.score(["a"] * 15, [RECORD] * 15) == [1.0] * 15  # 1.5 s in all


def test_a_message_larger_than_the_pipe(user_module):
    with RewardWorker(f"{user_module}:length", timeout=10, on_error=-1.0) as worker:
        assert worker.score(["x" * 1_000_000] * 3, [RECORD] * 3) == [1_000_001.0] * 3


@pytest.mark.skipif(not confined.namespaces(), reason="without them a new session gets away")
def test_a_hanging_item_is_killed_with_what_it_started(user_module, tmp_path):
    note, seen = str(tmp_path / "child"), []
    with RewardWorker(f"{user_module}:faulty", timeout=1.0, on_error=0.0) as worker:
        look = threading.Timer(0.7, lambda: seen.extend(running_with(note)))
        look.start()
        worker.score(["hang with a child"], [RECORD | {"answer": note}])
        assert worker.counts["timeouts"] == 1
    look.join()
    [child] = seen
    wait_until_ended(child)


def test_close_leaves_no_process_and_can_be_repeated(user_module):
    worker = RewardWorker(f"{user_module}:which", timeout=10, on_error=0.0)
    [before], pid = worker.score(["a"], [RECORD]), scorer(worker)
    worker.close()
    worker.close()
    wait_until_ended(pid)
    [other] = worker.score(["a"], [RECORD])
    assert other != before
    worker.close()


def test_a_worker_killed_from_outside_is_replaced(user_module):
    with RewardWorker(f"{user_module}:which", timeout=10, on_error=-1.0) as worker:
        [before], pid = worker.score(["a"], [RECORD]), scorer(worker)
        os.kill(pid, signal.SIGKILL)
        wait_until_ended(pid)
        scores = worker.score(["a", "b"], [RECORD] * 2)
        assert scores[0] == -1.0
        assert scores[1] not in (-1.0, before)
        assert worker.counts["errors"] == 1


def test_the_worker_ends_when_its_owner_is_killed(user_module, tmp_path):
    note = tmp_path / "pid"
    code = (
        "import sys, os, signal\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from jaxrl_tis.data.rewards import RewardWorker\n"
        "worker = RewardWorker('user_rewards:which', timeout=10, on_error=0.0)\n"
        "pid = worker._confined._process.pid\n"
        "children = open(f'/proc/{pid}/task/{pid}/children').read().split()\n"
        f"open({str(note)!r}, 'w').write(str((children or [pid])[0]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=os.getcwd()).returncode == -9
    wait_until_ended(int(note.read_text()))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("guess", "unknown reward 'guess'; use one of boxed, exact"),
        ("no_such_module:f", "'no_such_module:f' cannot be loaded: ModuleNotFoundError"),
        ("math:no_such_function", "AttributeError"),
        ("dying:f", "EOFError: its process ended"),
    ],
)
def test_a_function_that_cannot_be_loaded(function, message, tmp_path, monkeypatch):
    (tmp_path / "dying.py").write_text("import os\nos._exit(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=message):
        RewardWorker(function, timeout=1, on_error=0.0)


def test_a_module_that_loads_for_too_long(tmp_path, monkeypatch):
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(confined, "START_SECONDS", 0.3)
    with pytest.raises(ValueError, match="cannot be loaded: TimeoutError"):
        RewardWorker("endless:f", timeout=1, on_error=0.0)


def test_on_error_is_returned_as_given(user_module):
    with RewardWorker(f"{user_module}:faulty", timeout=10, on_error=math.pi) as worker:
        assert worker.score(["raise"], [RECORD]) == [math.pi]
        assert worker.last_error == "KeyError: 'no such key'"
