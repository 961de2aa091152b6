"""One process of environments, played here in the process of the tests."""

import re

import numpy as np
import pytest

from jaxrl_tis.environments import host
from jaxrl_tis.environments.protocol import Step
from tests.environments import played

EXAMPLE = {"prompt": "p", "answer": "5", "id": "x"}


def made(name="Echo", **params):
    return host.make({"environment": f"tests.environments.played:{name}", "params": params})


def test_an_episode_is_played_and_closed(tmp_path):
    note = tmp_path / "note"
    play = made(note=str(note))
    first = {"observation": "p 3", "reward": None, "is_done": False, "metrics": {}}
    assert play("reset", "a", EXAMPLE, 3) == {"step": first, "error": ""}
    assert play("step", "a", "one")["step"] == first | {"observation": "p 3: one"}
    assert play("step", "a", "done")["step"] == {
        "observation": "", "reward": 1.0, "is_done": True, "metrics": {"turns": 2.0},
    }
    assert not note.exists()
    assert play("forget", "a") == {"step": None, "error": ""}
    assert play("forget", "a") == {"step": None, "error": ""}
    assert note.read_text() == "p\n"


def test_episodes_do_not_share_an_instance():
    play = made()
    for id, seed in (("a", 1), ("b", 2)):
        play("reset", id, EXAMPLE, seed)
    for id, answer in (("a", "x"), ("b", "y"), ("a", "z")):
        last = play("step", id, answer)
    assert last["step"]["observation"] == "p 1: x z"
    assert play("step", "b", "y")["step"]["observation"] == "p 2: y y"


def test_a_second_reset_closes_the_first(tmp_path):
    note = tmp_path / "note"
    play = made(note=str(note))
    play("reset", "a", EXAMPLE, 1)
    play("reset", "a", EXAMPLE | {"prompt": "q"}, 1)
    assert note.read_text() == "p\n"
    assert play("step", "a", "x")["step"]["observation"] == "q 1: x"


ERRORS = {
    "raise": "KeyError at .*played.py:[0-9]+: 'no such key'$",
    "exit": "SystemExit at .*played.py:[0-9]+: 1$",
    "flood": "step returned 70,000 characters as the observation, above the limit of 65,536",
    # 80,000, 31 for each message {"role": "user", "content": ""}, 4 for "[, ]"
    "flood of messages": "step returned 80,066 characters",
    "none": "step returned None; return a Step",
    "pair": "step returned a tuple; return a Step",
    "coroutine": "step returned a coroutine; return a Step",
    "no text": "step returned None as the observation; return text, or a list of messages",
    "no messages": "step returned a list as the observation",
    "no role": "step returned a list as the observation",
    "surrogate": "step returned a lone surrogate in the observation",
    "nan": "step returned the reward nan, not a finite number",
    "inf": "step returned the reward inf",
    "beyond": "step returned the reward 1e.39, not a finite number of float32",
    "large": "step returned the reward 1000",
    "text reward": "step returned the reward '1', not a finite number",
    "no bool": "step returned a str as is_done; return a bool",
    "metric": "step returned the metric 'a': None, not a finite number",
    "metrics": "step returned a list as metrics; return a dict",
    "score": "step returned a metric called 'score', the name of the reward; rename it",
}


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("answer", ERRORS)
def test_what_a_step_may_not_return(answer, tmp_path):
    note = tmp_path / "note"
    play = made(note=str(note))
    play("reset", "a", EXAMPLE, 1)
    result = play("step", "a", answer)
    assert result["step"] is None
    assert re.match(ERRORS[answer], result["error"]), result["error"]
    assert note.read_text() == "p\n"  # a failed environment is closed at once


@pytest.mark.parametrize("prompt, error", [
    ("raise", "KeyError at "),
    ("none", "reset returned None as the prompt; return text, or a list of messages"),
    ("flood", "reset returned a Step as the prompt"),
])
def test_a_prompt_that_is_none(prompt, error, tmp_path):
    note = tmp_path / "note"
    result = made(note=str(note))("reset", "a", EXAMPLE | {"prompt": prompt}, 1)
    assert result["step"] is None and result["error"].startswith(error)
    assert note.read_text() == f"{prompt}\n"


def test_a_constructor_that_raises():
    result = made("Unmade")("reset", "a", EXAMPLE, 7)
    assert result["error"].startswith("LookupError at ") and result["error"].endswith(": seed 7")


def test_the_first_traceback_of_a_kind_is_printed(capsys):
    play = made()
    for id in "abc":
        play("reset", id, EXAMPLE, 1)
        play("step", id, "raise" if id != "c" else "exit")
    shown = capsys.readouterr().err
    assert shown.count('raise KeyError("no such key")') == 1
    assert shown.count("sys.exit(1)") == 1


def test_an_error_of_close_costs_nothing(capsys):
    play = made()
    play("reset", "a", EXAMPLE, 1)
    play("step", "a", "no close")
    assert play("forget", "a") == {"step": None, "error": ""}
    assert "an environment failed to close: OSError at " in capsys.readouterr().err


def test_an_example_that_is_changed_is_changed_for_the_episode_alone(tmp_path):
    example = dict(EXAMPLE)
    made("Ends")("reset", "a", example, 1)
    assert example == EXAMPLE


def test_what_a_step_may_return():
    messages = [{"role": "tool", "content": "é", "name": "f"}, {"role": "user", "content": ""}]
    step = Step(messages, np.float32(0.5), np.bool_(False), {"a": np.int64(2), 3: True})
    assert host.reading(step, "step", "observation") == {
        "observation": messages, "reward": 0.5, "is_done": False, "metrics": {"a": 2.0, "3": 1.0},
    }
    longest = "é" * host.OBSERVATION_CHARACTERS
    assert host.reading(Step(longest), "step", "observation")["observation"] == longest
    assert host.reading(Step("", 0), "step", "observation")["reward"] == 0.0


@pytest.mark.parametrize("last", ["x" * 70_000, "\ud800", None, {1}])
def test_nobody_reads_the_last_observation(last):
    """Of a step that ends the episode, and of the last answer that it may have."""
    for step, is_last in ((Step(last, 1.0, np.bool_(True)), False), (Step(last, 1.0), True)):
        found = host.reading(step, "step", "observation", is_last)
        assert (found["observation"], found["reward"]) == ("", 1.0)
    with pytest.raises(ValueError, match="observation"):
        host.reading(Step(last), "step", "observation")


@pytest.mark.parametrize("name", ["Echo", "Told"])
def test_an_environment_with_the_parameter_is_told_of_a_cut(name):
    play = made(name)
    play("reset", "a", EXAMPLE, 1)
    play("step", "a", "one", True)
    said = play("step", "a", "two", False, False)["step"]["observation"]
    assert said == ("p 1: one two" if name == "Echo" else "p 1: one (cut) two")
    assert play("step", "a", "flood", False, True) == {"step": {
        "observation": "", "reward": None, "is_done": False, "metrics": {},
    }, "error": ""}


@pytest.mark.parametrize("name, params, error", [
    ("Gone", {}, "module 'tests.environments.played' has no attribute 'Gone'"),
    ("FAULTS", {}, "tests.environments.played:FAULTS has no method reset"),
    ("Echo", {"size": 3}, "cannot be made with the parameters seed, size: .*'size'"),
    ("Unprepared", {}, "no index"),
])
def test_a_class_that_cannot_be_used_is_refused(name, params, error):
    with pytest.raises(Exception, match=error):
        made(name, **params)


def test_the_faults_are_all_tested():
    assert set(ERRORS) == set(played.FAULTS) - {"hang", "crash", "send"}
