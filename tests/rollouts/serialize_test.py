"""Entries of the queue in a checkpoint."""

import json
import math

import numpy as np

from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.rollouts import serialize
from jaxrl_tis.rollouts.groups import Sample
from jaxrl_tis.rollouts.queue import Entry

RECORD = {"id": "7", "prompt": "1+1=", "answer": "2"}


def trajectory(tokens):
    n, zeros = len(tokens), np.zeros(len(tokens), np.float32)
    return Trajectory(
        "7/0", np.array([1, 2], np.int32), np.array(tokens, np.int32), zeros, zeros, zeros,
        np.arange(n, dtype=np.int32), "stop", 0, 5, "none", 1.0,
    )


def test_an_entry_comes_back_with_what_was_rewarded_and_claimed():
    entry, drawn = Entry(3, math.inf, RECORD), trajectory([4, 5])
    parts = {"exact": 0.5, "length": 0.25}
    sample = Sample(drawn, RECORD, "ab", 0.75, 0.5, group=0, components=parts)
    entry.columns = {2: {"tokens": trajectory([6])}, 0: {"tokens": drawn, "reward": sample}}
    entry.claimed = {("reward", 0), ("reward", 2)}
    back = serialize.read(json.loads(json.dumps(serialize.written(entry))))
    assert (back.number, back.deadline, back.prompt) == (3, math.inf, RECORD)
    assert list(back.columns) == [0, 2] and list(back.columns[2]) == ["tokens"]
    # A reward that was under way is computed again.
    assert back.claimed == {("reward", 0)}
    again = back.columns[0]["reward"]
    assert (again.text, again.score, again.reward, again.components) == ("ab", 0.75, 0.5, parts)
    assert again.record == RECORD and again.trajectory is back.columns[0]["tokens"]
    np.testing.assert_array_equal(again.trajectory.tokens, [4, 5])
    np.testing.assert_array_equal(again.trajectory.version, [0, 1])


def test_a_reward_that_failed_is_still_unknown_afterwards():
    entry, drawn = Entry(3, math.inf, RECORD), trajectory([4, 5])
    sample = Sample(drawn, RECORD, "ab", math.nan, math.nan, group=0, components={"a": math.nan})
    entry.columns = {0: {"tokens": drawn, "reward": sample}}
    again = serialize.read(json.loads(json.dumps(serialize.written(entry)))).columns[0]["reward"]
    assert all(map(math.isnan, (again.score, again.reward, again.components["a"])))


def test_a_deadline_is_a_number():
    assert serialize.read(serialize.written(Entry(1, 4.0))).deadline == 4.0
