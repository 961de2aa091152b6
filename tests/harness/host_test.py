import asyncio

import pytest

from jaxrl_tis.harness import host
from jaxrl_tis.harness.protocol import Session
from tests.harness import agents


def session(id="s", seed=5, **example):
    return dict(
        id=id, example=example, base_url="http://127.0.0.1:1/v1", api_key="k", model="m", seed=seed
    )


def played(harness, examples, cancel=()):
    """The replies of sessions that are played together, in the order in which they come."""
    replies = []

    async def run():
        made = host.Host(harness, replies.append)
        for i, example in enumerate(examples):
            made.start((f"{i}", session(f"s{i}", **example)))
        await asyncio.sleep(0.02)
        for key in cancel:
            made.cancel(key)
        for _ in range(400):
            if len(replies) == len(examples) - len(cancel):
                return
            await asyncio.sleep(0.005)

    asyncio.run(run())
    return replies


def test_a_function_in_a_thread():
    [reply] = played(agents.plain, [{"reward": 2}])
    assert reply == {"key": "0", "reward": 2.0, "metrics": {}, "calls": None, "error": ""}


def test_sessions_run_at_once_and_one_can_be_cancelled():
    for harness in (agents.waiting, agents.sleeping):
        examples = [{"seconds": s} for s in (0.2, 0.15, 0.1)]
        assert [r["key"] for r in played(harness, examples, cancel=["1"])] == ["2", "0"]


def test_a_result_is_json():
    [reply] = played(agents.waiting, [{"seconds": 0}])
    assert reply["metrics"] == {"seconds": 0.0} and reply["reward"] == 1.0
    assert reply["calls"] == [([1, 2], None), ([3], [-0.5])]


def test_an_object_can_be_asynchronous():
    assert played(agents.agent, [{}])[0]["reward"] == 5.0


@pytest.mark.parametrize("kind, words", [
    ("text", "the reward 'good', not a finite number"),
    ("nan", "the reward nan, not a finite number"),
    ("numpy", "not a finite number"),
    ("large", "the reward 1e+39, not a finite number of float32"),
    ("list", "the reward [1], not a finite number"),
    ("metrics", "the metric 'x': 'y', not a finite number"),
    ("score", "a metric called 'score', the name of the reward; rename it"),
    ("calls", "the log-prob inf, not a finite number"),
    ("raise", "ZeroDivisionError"),
])
def test_what_is_no_result_fails(kind, words, capsys):
    [reply] = played(agents.told, [{"kind": kind}])
    assert words in reply["error"] and reply.keys() == {"key", "error"}
    assert ("Traceback" in capsys.readouterr().err) == (kind == "raise")


def test_an_agent_that_gives_up_fails(capsys):
    [reply] = played(agents.giving_up, [{}])
    assert "CancelledError" in reply["error"]


def test_no_reward_is_none():
    assert played(agents.told, [{"kind": "none"}])[0]["reward"] is None


@pytest.mark.parametrize("name, error, words", [
    ("tests.harness.missing:f", ImportError, "missing"),
    ("tests.harness.agents:missing", AttributeError, "missing"),
    ("tests.harness.agents:NUMBER", TypeError, "is a int, not a function of a session"),
    ("tests.harness.agents:two", TypeError, "no function of one argument"),
])
def test_a_harness_that_cannot_be_loaded(name, error, words):
    with pytest.raises(error, match=words):
        host.load(name)


def test_a_loaded_harness():
    assert host.load("tests.harness.agents:plain") is agents.plain
    assert Session(**session()).seed == 5
