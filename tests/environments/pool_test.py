"""Many episodes in several processes, and what a harmful one costs the others."""

import dataclasses
import json
import os
import random
import re
import signal
import time
from unittest import mock

import pytest

from jaxrl_tis.data import child
from jaxrl_tis.environments import pool
from jaxrl_tis.environments.pool import Call, Pool, Reply, SharedPool
from jaxrl_tis.environments.protocol import Step

EXAMPLE = {"prompt": "p", "answer": "5", "id": "x"}
SECONDS = 30.0  # until a reply has to be there


def made(name="Echo", workers=1, timeout=20.0, **params):
    return Pool(
        environment=f"tests.environments.played:{name}", params=params, workers=workers,
        timeout=timeout,
    )


def replies(play, count):
    """`count` replies by id."""
    found, deadline = {}, time.monotonic() + SECONDS
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} replies"
        found |= {reply.id: reply for reply in play.ready(1.0)}
    return found


def asked(play, id, answers=(), digests=(), example=EXAMPLE, seed=1):
    play.submit(Call(id, example, seed, answers, digests))
    return replies(play, 1)[id]


def text(reply):
    assert reply.fault == "", reply.error
    return reply.step.observation


def host(play, worker=0):
    """The process that plays: the first child of `unshare`, if there is that."""
    pid = play._workers[worker]._process._child.pid
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return int((file.read().split() or [pid])[0])


def end(pid):
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + SECONDS
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.all
def test_all_processes_get_the_replies_of_the_first():
    """The other one has no environments; what it hears is JSON."""
    told = []

    def first(f):
        told.append(json.dumps(f()))
        return json.loads(told[-1])

    one = SharedPool(made, first)
    heard = iter(told)
    other = SharedPool(lambda: pytest.fail("it started a pool"), lambda f: json.loads(next(heard)))
    try:
        for call in (Call("a", EXAMPLE, 1), Call("b", EXAMPLE, 2, ("x",))):
            for play in (one, other):
                play.submit(call)
        found = replies(one, 2)
        assert {r.id: r for _ in told[1:] for r in other.ready()} == found
        assert found["a"].step.observation and found["a"].observations == (found["a"].step.observation,)
        assert found["b"].answers == 1 and isinstance(found["b"].step, Step)
    finally:
        for play in (one, other):
            play.forget(["a", "b"])
            play.close()


@pytest.mark.all
def test_an_episode():
    with made() as play:
        first = asked(play, "a")
        assert first == Reply("a", 0, Step("p 1"), pool.digest(Step("p 1")), observations=("p 1",))
        second = asked(play, "a", ("one",), (first.digest,))
        assert (second.answers, text(second)) == (1, "p 1: one")
        last = asked(play, "a", ("one", "done"), (first.digest, second.digest))
        assert last.step == Step("", 1.0, True, {"turns": 2.0})
        assert last.observations == ("p 1", "p 1: one", "")
        assert len({first.digest, second.digest, last.digest}) == 3
        assert play.ready() == []


def test_digests_differ_with_the_observation_and_the_end():
    message = {"role": "user", "content": "x"}
    steps = [Step("x"), Step("y"), Step("x", is_done=True), Step([message]), Step([message] * 2)]
    assert len(set(map(pool.digest, steps))) == 5
    assert pool.digest(Step("x", 1.0, False, {"a": 1})) == pool.digest(Step("x"))
    assert pool.digest(Step([message])) == pool.digest(Step([dict(reversed(message.items()))]))


@pytest.mark.all
def test_users_of_one_pool_have_episodes_of_their_own():
    """The pool ends with its last user, and the next one starts another."""
    started = []

    def start():
        started.append(mock.Mock(wraps=made()))
        return started[-1]

    lender = pool.Lender(start)
    one, other = lender.lend(), lender.lend()
    one.submit(Call("a", EXAMPLE, 1))
    other.submit(Call("a", EXAMPLE, 2))
    assert [text(replies(play, 1)["a"]) for play in (other, one)] == ["p 2", "p 1"]
    assert text(asked(other, "a", ("x",), seed=2)) == "p 2: x"
    one.submit(Call("a", EXAMPLE, 1, ("sleep 0.5",)))
    one.close()
    assert text(asked(other, "a", ("x", "y"), seed=2)) == "p 2: x y"
    assert len(started) == 1 and not started[0].close.called
    other.close()
    assert started[0].close.called
    again = lender.lend()
    assert text(asked(again, "a")) == "p 1" and len(started) == 2
    again.close()


@pytest.mark.all
def test_many_episodes_at_once():
    rng, turns = random.Random(0), 3
    answers = {f"e{i}": [str(rng.random()) for _ in range(turns)] for i in range(60)}
    with made(workers=2) as play:
        for turn in range(turns + 1):
            for id in rng.sample(sorted(answers), 60):
                example = EXAMPLE | {"prompt": id}
                play.submit(Call(id, example, int(id[1:]), tuple(answers[id][:turn])))
            for id, reply in replies(play, 60).items():
                said = " ".join(answers[id][:turn])
                assert text(reply) == f"{id} {id[1:]}" + (f": {said}" if turn else "")
                assert reply.answers == turn
        assert [worker.episodes for worker in play._workers] == [30, 30]
        play.forget(answers)
        assert [worker.episodes for worker in play._workers] == [0, 0]


@pytest.mark.all
def test_an_episode_keeps_to_its_process_and_the_processes_share_them():
    with made("Which", workers=3) as play:
        for id in "abcdef":
            play.submit(Call(id, EXAMPLE, 1))
        first = replies(play, 6)
        for id in "fedcba":
            play.submit(Call(id, EXAMPLE, 1, ("x",)))
        second = replies(play, 6)
        assert {id: text(first[id]) for id in first} == {id: text(second[id]) for id in first}
        assert sorted(map(text, first.values())).count(text(first["a"])) == 2
        assert len(set(map(text, first.values()))) == 3


@pytest.mark.all
def test_what_takes_time_takes_it_at_once_and_a_quick_one_is_first():
    with made(workers=4) as play:
        for id in "abcd":
            play.submit(Call(id, EXAMPLE, 1))
        replies(play, 4)
        start = time.monotonic()
        for id, seconds in zip("abcd", (0.9, 0.9, 0.9, 0.0), strict=True):
            play.submit(Call(id, EXAMPLE, 1, (f"sleep {seconds}",)))
        [first] = play.ready(SECONDS)
        assert first.id == "d"
        assert set(replies(play, 3)) == set("abc")
        assert time.monotonic() - start < 2.5  # 2.7 one after the other


@pytest.mark.all
def test_ready_waits_for_calls_alone():
    with made() as play:
        start = time.monotonic()
        assert play.ready(5.0) == []
        assert time.monotonic() - start < 4.0
        play.submit(Call("a", EXAMPLE, 1, ("sleep 1",)))
        start = time.monotonic()
        assert play.ready(0.2) == []
        assert 0.15 < time.monotonic() - start
        with pytest.raises(ValueError, match="episode a has a call without a reply"):
            play.submit(Call("a", EXAMPLE, 1))
        assert text(replies(play, 1)["a"]) == "p 1: sleep 1"


@pytest.mark.all
def test_one_that_hangs_costs_itself_alone(tmp_path):
    note = tmp_path / "note"
    with made(timeout=1.0, note=str(note)) as play:
        first = [asked(play, id).digest for id in "ab"]
        second = asked(play, "a", ("one",), first[:1])
        play.submit(Call("b", EXAMPLE, 1, ("hang",)))
        play.submit(Call("a", EXAMPLE, 1, ("one", "two"), (first[0], second.digest)))
        found = replies(play, 2)
        assert (found["b"].step, found["b"].fault) == (None, "timeouts")
        assert "exceeded its time limit" in found["b"].error
        assert text(found["a"]) == "p 1: one two"  # made anew, and repeated
        assert not note.exists()
        assert text(asked(play, "a", ("one", "two", "three"))) == "p 1: one two three"
    assert note.read_text() == "p\n"


@pytest.mark.all
def test_one_that_crashes_costs_itself_alone():
    with made() as play:
        asked(play, "a", ("one",))
        crashed = asked(play, "b", ("crash",))
        assert (crashed.fault, crashed.error) == ("errors", "EOFError: its process ended")
        assert text(asked(play, "a", ("one", "two"))) == "p 1: one two"


@pytest.mark.all
def test_a_process_that_is_killed_from_outside_costs_nothing():
    with made(workers=2) as play:
        for id in "abcd":
            play.submit(Call(id, EXAMPLE, 1, ("one",)))
        digests = {id: reply.digest for id, reply in replies(play, 4).items()}
        end(host(play))
        for id in "abcd":
            play.submit(Call(id, EXAMPLE, 1, ("one", "two"), ("", digests[id])))
        assert {text(reply) for reply in replies(play, 4).values()} == {"p 1: one two"}
        play.submit(Call("a", EXAMPLE, 1, ("one", "two", "sleep 1"), ("", digests["a"])))
        time.sleep(0.3)
        end(host(play, play._workers.index(play._worker_of[0, "a"])))
        assert text(replies(play, 1)["a"]) == "p 1: one two sleep 1"


@pytest.mark.all
@pytest.mark.parametrize("fault, error", [
    ("raise", "KeyError at .*played.py:"),
    ("flood", "step returned 70,000 characters"),
    ("none", "step returned None; return a Step"),
    ("nan", "step returned the reward nan"),
    ("send", "OSError at .*no network access here"),
])
def test_what_fails_is_an_outcome_of_its_own(play, fault, error):
    """And its neighbour goes on in the same process."""
    asked(play, "neighbour", ("one",))
    pid = host(play)
    failed = asked(play, f"step {fault}", (fault,))
    assert (failed.step, failed.fault) == (None, "errors")
    assert re.search(error, failed.error), failed.error
    assert text(asked(play, "neighbour", ("one", "two"))) == "p 1: one two"
    assert host(play) == pid
    play.forget(["neighbour"])


@pytest.fixture(scope="module")
def play():
    with made() as play:
        yield play


@pytest.mark.all
def test_what_cannot_be_made_is_an_outcome_of_its_own(play):
    failed = asked(play, "a", example=EXAMPLE | {"prompt": "raise"})
    assert failed.fault == "errors" and failed.error.startswith("KeyError at ")
    failed = asked(play, "b", example=EXAMPLE | {"meta": {1, 2}})
    assert failed.fault == "errors" and "set is not JSON serializable" in failed.error
    assert text(asked(play, "c")) == "p 1"
    with made("Unmade") as unmade:
        failed = asked(unmade, "a", seed=7)
        assert failed.fault == "errors" and failed.error.endswith(": seed 7")


def test_an_episode_goes_on_elsewhere(in_threads):
    """As after a restart: by all its answers, with digests or without."""
    with made() as play:
        digests = tuple(pool.digest(Step(t)) for t in ("p 1", "p 1: one"))
        for id, known in (("r", digests), ("s", ()), ("t", ("", digests[1]))):
            reply = asked(play, id, ("one", "two"), known)
            assert (text(reply), reply.answers) == ("p 1: one two", 2)
            assert reply.observations == ("p 1", "p 1: one", "p 1: one two")
        # The same call again, as of a reply that was lost, and another past of the same id.
        assert text(asked(play, "r", ("one", "two"), digests)) == "p 1: one two"
        assert text(asked(play, "r", ("1", "2", "3"))) == "p 1: 1 2 3"
        assert text(asked(play, "r", ("1", "2", "3", "4"), seed=2)) == "p 2: 1 2 3 4"


def test_a_repeated_episode_has_the_same_cuts_and_the_same_last_answer():
    with made("Told") as play:
        told = Call("a", EXAMPLE, 1, ("x", "y", "z"), cuts=(True, False, True))
        play.submit(told)
        assert text(replies(play, 1)["a"]) == "p 1: x (cut) y z (cut)"
        end(host(play))
        play.submit(dataclasses.replace(told, answers=(*told.answers, "flood"), is_last=True))
        reply = replies(play, 1)["a"]
        assert text(reply) == "" and reply.observations[-2:] == ("p 1: x (cut) y z (cut)", "")


@pytest.mark.all
def test_one_that_is_not_repeatable_fails():
    with made("Which") as play:
        first = asked(play, "a").digest
        second = asked(play, "a", ("x",), (first,)).digest
        assert first == second
        end(host(play))
        other = asked(play, "a", ("x", "y"), (first, second))
        assert (other.step, other.fault) == (None, "errors")
        assert "is not repeatable: step 0 of the episode a differs" in other.error
        assert asked(play, "b", ("x",), (first,)).fault == "errors"
        assert "step 1 of the episode c" in asked(play, "c", ("x", "y"), ("", "0" * 16)).error


@pytest.mark.all
def test_one_that_ends_sooner_when_it_is_repeated_fails(tmp_path):
    with made("Ends") as play:
        path = str(tmp_path / "seen")
        assert not asked(play, "a", (path,)).step.is_done
        end(host(play))
        assert "not repeatable: step 1" in asked(play, "a", (path, "")).error


@pytest.mark.all
def test_close_runs_when_an_episode_is_forgotten_fails_or_the_pool_closes(tmp_path, capfd):
    note = tmp_path / "note"
    with made(timeout=1.0, note=str(note)) as play:
        examples = {id: EXAMPLE | {"prompt": id} for id in "abcd"}
        for id in "abc":
            asked(play, id, example=examples[id])
        play.forget(["a", "unknown"])
        asked(play, "b", ("raise",), example=examples["b"])
        assert note.read_text() == "a\nb\n"
        play.forget(["b"])
        asked(play, "d", ("long close",), example=examples["d"])
        play.forget(["d"])
        assert text(asked(play, "c", ("x",), example=examples["c"])) == "c 1: x"
    assert note.read_text() == "a\nb\nd\nc\n"
    assert "failed to close: TimeoutError: the environment" in capfd.readouterr().err
    play.close()


@pytest.mark.all
def test_a_forgotten_call_gets_no_reply_and_its_id_is_free():
    with made() as play:
        play.submit(Call("a", EXAMPLE, 1, ("sleep 0.5",)))
        play.submit(Call("b", EXAMPLE, 1, ("hang",)))  # waits behind it, and never begins
        play.forget(["a", "b"])
        assert play.ready(5.0) == []
        start = time.monotonic()
        assert text(asked(play, "a", ("x",), seed=2)) == "p 2: x"
        assert time.monotonic() - start < 15.0  # 20 with one that hangs
        play.submit(Call("a", EXAMPLE, 2, ("x", "y")))
        time.sleep(0.3)  # the reply is there, and not yet returned
        play.forget(["a"])
        assert play.ready() == []


@pytest.mark.all
def test_a_pool_closes_with_calls_under_way():
    play = made(timeout=20.0)
    for id in "abc":
        play.submit(Call(id, EXAMPLE, 1, ("sleep 0.3",) if id == "a" else ("hang",)))
    time.sleep(0.1)
    start = time.monotonic()
    play.close()
    assert time.monotonic() - start < 10.0
    assert play.ready(1.0) == []


@pytest.mark.all
@pytest.mark.parametrize("name, params, error", [
    ("tests.environments.played", {}, "environments.played' is not of the form 'module:Class'"),
    ("no_such_module:Class", {}, "cannot be loaded: ModuleNotFoundError: No module named 'no_such"),
    ("tests.environments.played:Gone", {}, "cannot be loaded: AttributeError: module"),
    ("tests.environments.played:Echo", {"size": 3}, "parameters seed, size: .* 'size'"),
    ("tests.environments.played:Unprepared", {}, "cannot be loaded: FileNotFoundError: no index"),
])
def test_a_class_that_cannot_be_used_is_refused_before_a_run(name, params, error):
    with pytest.raises(ValueError, match=error):
        Pool(environment=name, params=params, workers=2, timeout=1.0)


@pytest.mark.all
@pytest.mark.skipif(not child.namespaces(), reason="without them nobody else ends its children")
def test_close_leaves_no_process():
    play = made(workers=2)
    pids = [host(play, worker) for worker in range(2)]
    play.close()
    deadline = time.monotonic() + SECONDS
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


SHIPPED = {
    "calculator:Calculator": ({}, "2*3+4=", "10", ("2*3=", "6+4="), "10 "),
    "guess:Guess": ({}, "Guess from 1 to 9.", "7", ("5", "8"), "lower"),
    "frozen_lake:FrozenLake": ({"slippery": True}, "", "", ("up", "left", "up", "left"), None),
    "python_tool:PythonTool": (
        {}, "How much?", "6", tuple(f"```python\nimport random\nprint({x})\n```" for x in
                                   ("random.random()", "{'a', 'b', 'c'}", "2 * 3")), "6\n",
    ),
    "search:Search": (
        {"passages": 1}, "Where?", "Spain", ("search: river", "search: Douro"), "The river Douro.",
    ),
}


@pytest.mark.all
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_environment_plays_and_repeats(name, tmp_path):
    params, prompt, answer, answers, last = SHIPPED[name]
    if name == "search:Search":
        (tmp_path / "corpus.jsonl").write_text('{"text": "Spain."}\n{"text": "The river Douro."}\n')
        params = params | {"corpus": str(tmp_path / "corpus.jsonl")}
    with Pool(
        environment=f"jaxrl_tis.environments.{name}", params=params, workers=1, timeout=30.0
    ) as play:
        example, digests = EXAMPLE | {"prompt": prompt, "answer": answer}, ()
        for turn in range(len(answers) + 1):
            if turn == len(answers):
                end(host(play))  # the last one repeats all
            reply = asked(play, "a", answers[:turn], digests, example, seed=2)
            digests += (reply.digest,)
            assert text(reply) and reply.step.is_done is False
        assert last is None or reply.step.observation == last
