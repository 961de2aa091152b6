import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from configs import default
from jaxrl_tis.data import child, confined, rewards
from jaxrl_tis.data.rewards import RewardWorker, Scored, soft_overlong_penalty
from jaxrl_tis.record import failures
from tests import threaded

USER_REWARDS = '''
import asyncio, os, random, subprocess, sys, time

IDENTITY = random.SystemRandom().random()  # process numbers may be of a namespace

def length(text, example):
    return len(text) + len(example["answer"])

def parts(text, example):
    if text == "unsure":
        return text
    if text == "other":
        return {"size": 1}
    if text == "nothing":
        return {}
    if text == "nothing given":
        return {"length": None, "format": 0.5}
    if text == "all void":
        return {"length": None, "format": None}
    if text == "turned":
        return {"format": 0.5, "length": 6}
    return {"length": float("nan") if text == "nan" else len(text), "format": 0.5}

def scored(text, example):
    return {"score": None if text == "no score" else 0.5, "pred": "7",
            "acc": {"void": None, "endless": float("inf")}.get(text, True)}

async def slow_async(text, example):
    await asyncio.sleep(60 if text == "hang" else 0.02)
    return float(text)

def slow(text, example):
    time.sleep(60 if text == "hang" else 0.02)
    return float(text)

async def slow_trl(prompts, completions, **columns):
    if "crash" in completions:
        os._exit(3)
    return await asyncio.gather(*(slow_async(text, None) for text in completions))

def tokens(completions, completion_ids, **columns):
    return [len(ids) for ids in completion_ids]

def faulty(text, example):
    print("not a message", flush=True)
    if text == "hang":
        time.sleep(600)
    if text == "hang with a child":
        code = "import time; time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", code, example["answer"]], start_new_session=True)
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

def has_jax(text, example):
    return "jax" in sys.modules

def which(text, example):
    return IDENTITY
'''
EXAMPLE = {"prompt": "2+3=", "answer": "5", "id": "x"}


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "user_rewards.py").write_text(USER_REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_rewards", raising=False)  # of a test whose threads had it
    return "user_rewards"


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def scorer(worker):
    """The process that runs the function: the first child of `unshare`, if there is that."""
    pid = worker._confined[0]._child.pid
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
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still running"
        time.sleep(0.01)


def test_soft_overlong_penalty():
    # max_length 100 and buffer 20: 0 up to 80, (80 - 90) / 20 = -0.5, -1 from 100 on.
    values = [soft_overlong_penalty(n, 100, 20) for n in (0, 80, 81, 90, 100, 101, 5000)]
    assert values == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]
    with pytest.raises(ValueError, match="buffer 101 must be above 0 and at most max_length 100"):
        soft_overlong_penalty(1, 100, 101)
    with pytest.raises(ValueError, match="buffer 0 "):
        soft_overlong_penalty(1, 100, 0)


@pytest.mark.all
def test_importing_rewards_does_not_import_jax():
    code = "import sys, jaxrl_tis.data.rewards; print('jax' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=os.getcwd()
    )
    assert result.stdout == "False\n"


@pytest.mark.all
def test_worker_scores_in_order(user_module):
    with RewardWorker(f"{user_module}:length", timeout=10, on_error=-1.0) as worker:
        texts = ["x" * n for n in range(100)]
        assert worker.score(texts, [EXAMPLE] * 100) == [n + 1.0 for n in range(100)]
        assert worker.score([], []) == []
        assert worker.score(["é\ud800\n"], [EXAMPLE]) == [4.0]
        with pytest.raises(ValueError, match="shorter"):
            worker.score(["a", "b"], [EXAMPLE])
        assert sum(worker.counts.values()) == 0


def test_a_score_is_the_reward_and_what_stands_beside_it_is_recorded(user_module, in_threads):
    with RewardWorker(f"{user_module}:scored", timeout=10) as worker:
        texts = ["plain", "void", "endless"]
        plain, void, endless = worker.results(texts, [EXAMPLE] * 3)
        assert plain == Scored(0.5, {"score": 0.5, "acc": 1.0})  # and no number of the text "7"
        assert void.score == 0.5 and math.isnan(void.components["acc"])
        assert endless.score == 0.5 and math.isnan(endless.components["acc"])
        assert sum(worker.counts.values()) == 0
        [failed] = worker.results(["no score"], [EXAMPLE])
        assert failed.is_failed and math.isnan(failed.score)
        assert worker.last_error == "the reward returned None for score"
    with RewardWorker(f"{user_module}:scored", timeout=10, weights={"acc": 0.1}) as worker:
        assert worker.score(["plain", "void"], [EXAMPLE] * 2) == [0.6, 0.5]


@pytest.mark.all
def test_components_without_a_score_are_summed_by_their_weights(user_module, in_threads):
    weights = {"format": 0.1, "formt": 1.0}
    with RewardWorker(f"{user_module}:parts", timeout=10, weights=weights) as worker:
        assert worker.score(["ab"], [EXAMPLE]) == [2.05]
        assert worker.unused_weights() == ["formt"]
    with RewardWorker(f"{user_module}:parts", timeout=10) as worker:
        # The second text has another name: each has the parts that it has.
        texts = ["ab", "other", "turned", "nothing given", "nan"]
        found = worker.results(texts, [EXAMPLE] * 5)
        assert found[:3] == [
            Scored(2.5, {"length": 2.0, "format": 0.5}), Scored(1.0, {"size": 1.0}),
            Scored(6.5, {"format": 0.5, "length": 6.0}),
        ]
        assert found[3].score == 0.5 and math.isnan(found[3].components["length"])
        assert found[4].is_failed and set(found[4].components) == {"length", "format", "size"}
        assert all(map(math.isnan, found[4].components.values()))
        assert worker.counts == {"timeouts": 0, "errors": 0, "non_finite": 1, "dropped": 1, "unsure": 0}
        assert "'length': nan" in worker.last_error
        assert worker.results(["nothing"], [EXAMPLE])[0].is_failed
        assert worker.last_error == "the reward returned a mapping without any number"
        assert worker.results(["all void"], [EXAMPLE])[0].is_failed
        assert worker.last_error == "the reward returned None for every part"


def test_a_failure_is_dropped_or_gets_the_score_that_is_asked_for(user_module, in_threads):
    with RewardWorker(f"{user_module}:faulty", timeout=10) as worker:
        assert [math.isnan(x) for x in worker.score(["a", "raise"], [EXAMPLE] * 2)] == [False, True]
        assert worker.counts == {"timeouts": 0, "errors": 1, "non_finite": 0, "dropped": 1, "unsure": 0}
    with RewardWorker(f"{user_module}:parts", timeout=10, on_error="-1.0") as worker:
        _, failed, unsure = worker.results(["ab", "nan", "unsure"], [EXAMPLE] * 3)
        # An equal part of it in every component.
        assert failed == Scored(-1.0, {"length": -0.5, "format": -0.5}, is_failed=True)
        assert worker.counts["dropped"] == 0
        assert not unsure.is_failed and all(map(math.isnan, [unsure.score, *unsure.components.values()]))
        assert worker.counts["unsure"] == 1 and worker.counts["errors"] == 0
    with RewardWorker(f"{user_module}:length", timeout=10, on_error="-1.0") as worker:
        assert worker.results(["a"], [EXAMPLE]) == [Scored(2.0, {"reward": 2.0})]


@pytest.mark.all
def test_failures_are_told_once_a_kind_and_kept(user_module, tmp_path, capfd):
    path, told = tmp_path / failures.FILE_NAME, []
    with RewardWorker(
        f"{user_module}:faulty", timeout=10, failures=failures.Failures(path, told.append)
    ) as worker:
        worker.score(["raise", "none", "raise", "exit", "a"], [EXAMPLE] * 5)
    assert len([text for text in told if "no reward, example x" in text]) == 3
    assert any('raise KeyError("no such key")' in text for text in told)
    raised, none, exited = failures.read(path)
    assert raised.kind.startswith("KeyError at ") and "user_rewards.py:" in raised.kind
    assert (raised.count, none.count, exited.count) == (2, 1, 1)
    assert none.kind == none.error == "the reward returned None"
    assert raised.last[-1] == {"id": "x", "text": "raise", "error": "KeyError: 'no such key'"}
    assert 'raise KeyError("no such key")' in raised.traceback


def test_workers_score_at_once_and_in_order(user_module, in_threads):
    """200 answers of 20 ms each take 4 s, one after the other."""
    texts, examples = [str(i) for i in range(200)], [EXAMPLE] * 200
    for name in ("slow", "slow_async", "slow_trl"):
        with RewardWorker(f"{user_module}:{name}", timeout=10, workers=8) as worker:
            assert len(worker._confined) == (1 if name == "slow_async" else 8)
            fastest = 4.0
            for _ in range(3):  # on a busy machine one may take long
                start = time.monotonic()
                assert worker.score(texts, examples) == [float(text) for text in texts]
                fastest = min(fastest, time.monotonic() - start)
                if fastest < 4.0:
                    break
            assert fastest < 4.0  # 0.5 s on an idle machine


@pytest.mark.faults
def test_one_that_hangs_costs_its_own_time_alone(user_module):
    texts = [str(i) for i in range(12)]
    texts[7] = "hang"

    def score(name, **settings):
        with RewardWorker(f"{user_module}:{name}", on_error="-1", **settings) as worker:
            found = worker.score(texts, [EXAMPLE] * 12)
            assert found == [-1.0 if text == "hang" else float(text) for text in texts]
            assert worker.counts["timeouts"] == 1

    score("slow", workers=2, timeout=2.0)
    with threaded.children():  # a batch waits for the limits of all its texts
        score("slow_async", workers=4, timeout=1.0)
        score("slow_trl", workers=4, timeout=1.0)


@pytest.mark.all
def test_a_crash_in_a_batch_costs_one_text(user_module):
    with RewardWorker(f"{user_module}:slow_trl", timeout=10, on_error="-1") as worker:
        assert worker.score(["1", "crash", "3"], [EXAMPLE] * 3) == [1.0, -1.0, 3.0]
        assert worker.counts["errors"] == 1


@pytest.mark.all
def test_a_batch_that_hangs_ends_with_its_worker(user_module):
    worker = RewardWorker(f"{user_module}:slow_trl", timeout=60)
    scoring = threading.Thread(target=worker.score, args=(["hang"] * 2, [EXAMPLE] * 2), daemon=True)
    scoring.start()
    pid = scorer(worker)
    time.sleep(0.5)
    worker.close()
    scoring.join(10)
    assert not scoring.is_alive()
    wait_until_ended(pid)
    assert worker.score(["1"], [EXAMPLE]) == [1.0]
    worker.close()


@pytest.mark.all
def test_tokens_reach_a_function_that_asks_for_them(user_module, in_threads):
    with RewardWorker(f"{user_module}:tokens", timeout=10) as worker:
        assert worker.results(["a", "b"], [EXAMPLE] * 2, [[1, 2], [3]])[0].score == 2.0
        assert worker.score(["abc"], [EXAMPLE]) == [3.0]  # the text of no model


@pytest.mark.all
def test_a_config_makes_a_worker(user_module):
    config = default.get_config().reward
    config.name, config.on_error = f"{user_module}:scored", "-2"
    config.weights.acc = 0.1
    with rewards.worker(config) as worker:
        assert worker.score(["plain", "no score"], [EXAMPLE] * 2) == [0.6, -2.0]


@pytest.mark.all
def test_worker_runs_without_jax_in_one_other_process(user_module):
    with RewardWorker(f"{user_module}:has_jax", timeout=10, on_error=-1.0) as worker:
        assert worker.score(["a"], [EXAMPLE]) == [0.0]
    with RewardWorker(f"{user_module}:which", timeout=10, on_error=-1.0) as worker:
        assert len(set(worker.score(["a", "b"], [EXAMPLE] * 2) + worker.score(["c"], [EXAMPLE]))) == 1
        assert scorer(worker) != os.getpid() and is_running(scorer(worker))


@pytest.mark.all
def test_worker_scores_a_batch_in_milliseconds():
    with RewardWorker("last_number", timeout=10, on_error=-1.0) as worker:
        texts = [f"the sum is {n}" for n in range(256)]
        examples = [EXAMPLE | {"answer": str(n)} for n in range(256)]
        times = []
        for _ in range(3):
            start = time.monotonic()
            assert worker.score(texts, examples) == [1.0] * 256
            times.append(time.monotonic() - start)
        assert min(times) < 2.0  # 10 to 20 ms on an idle machine; 256 waits take longer


@pytest.mark.faults
def test_faulty_items_score_on_error_and_the_rest_go_on(user_module):
    texts = ["a", "hang", "b", "crash", "crash", "c", "raise", "exit", "nan", "inf", "none", "d"]
    start = time.monotonic()
    with RewardWorker(f"{user_module}:faulty", timeout=2.0, on_error=-0.25) as worker:
        scores = worker.score(texts, [EXAMPLE] * len(texts))
        assert scores == [1.0 if len(text) == 1 else -0.25 for text in texts]
        # errors: two crashes, KeyError, SystemExit, and None that is no number
        assert worker.counts == {"timeouts": 1, "errors": 5, "non_finite": 2, "dropped": 0, "unsure": 0}
        assert worker.last_error == "the reward returned None"
        assert worker.score(["read", "a"], [EXAMPLE] * 2) == [0.0, 1.0]
    assert time.monotonic() - start < 60


@pytest.mark.all
def test_an_exception_does_not_cost_the_process(user_module):
    with RewardWorker(f"{user_module}:faulty", timeout=10, on_error=-1.0) as worker:
        before, *_, after = worker.score(["which", "raise", "exit", "which"], [EXAMPLE] * 4)
        assert before == after != -1.0


@pytest.mark.all
def test_a_process_that_no_longer_reads_is_replaced(user_module):
    with RewardWorker(f"{user_module}:faulty", timeout=2.0, on_error=-1.0) as worker:
        os.kill(scorer(worker), signal.SIGSTOP)
        assert worker.score(["x" * 1_000_000, "a"], [EXAMPLE] * 2) == [-1.0, 1.0]
        assert worker.counts["timeouts"] == 1


@pytest.mark.all
def test_the_time_limit_is_per_item(tmp_path, monkeypatch):
    (tmp_path / "slow_rewards.py").write_text(
        "import time\ndef slow(text, example):\n    time.sleep(0.1)\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardWorker("slow_rewards:slow", timeout=2.0, on_error=0.0) as worker:
        assert worker.score(["a"] * 25, [EXAMPLE] * 25) == [1.0] * 25  # 2.5 s in all


@pytest.mark.all
def test_a_message_larger_than_the_pipe(user_module):
    with RewardWorker(f"{user_module}:length", timeout=10, on_error=-1.0) as worker:
        assert worker.score(["x" * 1_000_000] * 3, [EXAMPLE] * 3) == [1_000_001.0] * 3


@pytest.mark.all
@pytest.mark.skipif(not child.namespaces(), reason="without them a new session gets away")
def test_a_hanging_item_is_killed_with_what_it_started(user_module, tmp_path):
    note, seen = str(tmp_path / "child"), []
    with RewardWorker(f"{user_module}:faulty", timeout=1.0, on_error=0.0) as worker:
        look = threading.Timer(0.7, lambda: seen.extend(running_with(note)))
        look.start()
        worker.score(["hang with a child"], [EXAMPLE | {"answer": note}])
        assert worker.counts["timeouts"] == 1
    look.join()
    [child] = seen
    wait_until_ended(child)


@pytest.mark.all
def test_close_leaves_no_process_and_can_be_repeated(user_module):
    worker = RewardWorker(f"{user_module}:which", timeout=10, on_error=0.0)
    [before], pid = worker.score(["a"], [EXAMPLE]), scorer(worker)
    worker.close()
    worker.close()
    wait_until_ended(pid)
    [other] = worker.score(["a"], [EXAMPLE])
    assert other != before
    worker.close()


@pytest.mark.all
def test_a_worker_killed_from_outside_is_replaced(user_module):
    with RewardWorker(f"{user_module}:which", timeout=10, on_error=-1.0) as worker:
        [before], pid = worker.score(["a"], [EXAMPLE]), scorer(worker)
        os.kill(pid, signal.SIGKILL)
        wait_until_ended(pid)
        scores = worker.score(["a", "b"], [EXAMPLE] * 2)
        assert scores[0] == -1.0
        assert scores[1] not in (-1.0, before)
        assert worker.counts["errors"] == 1


@pytest.mark.all
def test_the_worker_ends_when_its_owner_is_killed(user_module, tmp_path):
    note = tmp_path / "pid"
    code = (
        "import sys, os, signal\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from jaxrl_tis.data.rewards import RewardWorker\n"
        "worker = RewardWorker('user_rewards:which', timeout=10, on_error=0.0)\n"
        "pid = worker._confined[0]._child.pid\n"
        "children = open(f'/proc/{pid}/task/{pid}/children').read().split()\n"
        f"open({str(note)!r}, 'w').write(str((children or [pid])[0]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=os.getcwd()).returncode == -9
    wait_until_ended(int(note.read_text()))


@pytest.mark.all
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("guess", "unknown reward 'guess'; use one of exact, judge, last_number, math"),
        ("no_such_module:f", "'no_such_module:f' cannot be loaded: ModuleNotFoundError"),
        ("math:no_such_function", "AttributeError"),
        ("dying:f", "cannot be loaded: EOFError: its process ended; its output is above"),
    ],
)
def test_a_function_that_cannot_be_loaded(function, message, tmp_path, monkeypatch):
    (tmp_path / "dying.py").write_text("import os\nos._exit(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=message):
        RewardWorker(function, timeout=1, on_error=0.0)


@pytest.mark.all
def test_a_module_that_loads_for_too_long(tmp_path, monkeypatch):
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(confined, "START_SECONDS", 0.3)
    with pytest.raises(ValueError, match="cannot be loaded: TimeoutError: its process does not start within 0.3 seconds"):
        RewardWorker("endless:f", timeout=1, on_error=0.0)


@pytest.mark.all
def test_on_error_is_returned_as_given(user_module, in_threads):
    with RewardWorker(f"{user_module}:faulty", timeout=10, on_error=math.pi) as worker:
        assert worker.score(["raise"], [EXAMPLE]) == [math.pi]
        assert worker.last_error == "KeyError: 'no such key'"
