"""A taskset of verifiers 0.4 plays a session. Its Python is an environment of its own, see
tests/serve/clients_test.py."""

import asyncio
import io
import os
import pathlib
import queue
import sys
import types
from unittest import mock

import pytest

from jaxrl_tis.data.tokenizer_files import load_tokenizer
from jaxrl_tis.endpoint.sessions import Endpoint
from jaxrl_tis.engine.records import SamplingParams
from jaxrl_tis.harness import verifiers
from jaxrl_tis.harness.process import HarnessProcess
from jaxrl_tis.harness.protocol import Result, Session
from tests import arithmetic
from tests.serve.clients_test import write_tokenizer

NAME = "verifiers:verifiers_client"


@pytest.mark.all
def test_without_verifiers_it_is_one_sentence():
    with pytest.raises(ValueError, match="ImportError: .* install 'verifiers>=0.4,<0.5' there"):
        HarnessProcess(NAME, print)


def test_a_metric_called_score_is_not_the_reward():
    trace = types.SimpleNamespace(metrics={"score": 0.25, "turns": 2.0, "none": None})
    assert verifiers.metrics_of(trace) == {"metric_score": 0.25, "turns": 2.0}


def test_examples_name_tasks_by_id_or_index(monkeypatch):
    dump = lambda mode: {"prompt": "p"}
    data = lambda id: types.SimpleNamespace(id=id, model_dump=dump)
    tasks = [types.SimpleNamespace(data=data(id)) for id in (None, "x", None)]
    env = types.SimpleNamespace(taskset=tasks)
    monkeypatch.setattr(verifiers, "load", lambda name: env)
    file = io.StringIO()
    verifiers.write_examples("t", file)
    assert [line[:10] for line in file.getvalue().splitlines()] == ['{"id": "0"', '{"id": "x"', '{"id": "2"']
    taskset = verifiers.Taskset("t")
    assert taskset._task("2") is tasks[2] and taskset._task("x") is tasks[1]
    with pytest.raises(ValueError, match="the taskset 't' has no task '1'"):
        taskset._task("1")


def test_an_episode_with_errors_has_no_reward(monkeypatch):
    """verifiers itself is made by hand: an environment that returns episodes."""
    v1 = types.SimpleNamespace(
        EvalClientConfig=mock.Mock(), ModelContext=mock.Mock(), Sampling=mock.Mock())
    monkeypatch.setitem(sys.modules, "verifiers", types.SimpleNamespace(v1=v1))
    monkeypatch.setitem(sys.modules, "verifiers.v1", v1)
    monkeypatch.setenv(verifiers.KEY, "")
    trace = lambda ok=True: types.SimpleNamespace(ok=ok, errors=[], reward=0.5, metrics={"turns": 2.0})
    episode = lambda *traces, ok=True: types.SimpleNamespace(traces=traces, ok=ok, errors=["it broke"])
    env = mock.MagicMock(taskset=[types.SimpleNamespace(data=types.SimpleNamespace(id="t"))])
    env.slots.return_value, env.run_slot = ["slot"], mock.AsyncMock()
    monkeypatch.setattr(verifiers, "load", lambda name: env)
    session = Session("s", {"id": "t"}, "http://127.0.0.1:1", "key", "tiny", 0)

    def played(ended):
        env.run_slot.return_value = ended
        return asyncio.run(verifiers.Taskset("t")(session))

    assert played(episode(trace())) == Result(0.5, {"turns": 2.0})
    for failed in (episode(trace(), ok=False), episode(trace(ok=False))):
        with pytest.raises(RuntimeError, match="the episode has failed: 'it broke'"):
            played(failed)
    with pytest.raises(RuntimeError, match="2 agents played the episode"):
        played(episode(trace(), trace()))
    assert os.environ[verifiers.KEY] == "key"


@pytest.mark.all
@pytest.mark.skipif("VERIFIERS_PYTHON" not in os.environ, reason="an environment of its own")
def test_an_episode_is_played(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(pathlib.Path(__file__).parents[1] / "serve")])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    calls, replies = [], queue.SimpleQueue()

    def answer(call):
        calls.append(call)
        scheduler = arithmetic.Scheduler(arithmetic.Engine(slots=1, steps=2, max_length=600), 0)
        scheduler.add(arithmetic.request("r", call.choice.prompt % arithmetic.VOCAB, max_tokens=4))
        while scheduler.pending:
            ended = scheduler.step()
        call.answer(ended[0])

    endpoint = Endpoint("tiny", 400, tokenizer, max_length=500, logprobs=0)
    harness = HarnessProcess(NAME, replies.put, os.environ["VERIFIERS_PYTHON"])
    try:
        key, url = endpoint.open(SamplingParams(max_tokens=8), answer)
        harness.start(key, Session("s", {"id": "0"}, url, endpoint.token, "tiny", 0))
        reply = replies.get(timeout=60)
        assert (reply.error, reply.reward, len(calls)) == ("", 1.0, 2)
        first, second = (tokenizer.decode(c.choice.prompt) for c in calls)
        assert "1+2?" in first and "And 3+4?" in second and len(second) > len(first)
        harness.start(key, Session("s", {"id": "7"}, url, endpoint.token, "tiny", 0))
        assert "has no task '7'" in replies.get(timeout=60).error
    finally:
        harness.close()
        endpoint.close()
