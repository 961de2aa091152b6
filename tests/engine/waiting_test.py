"""Who comes next: the policy's choice, unless somebody was passed over too often."""

import dataclasses

import numpy as np
import pytest

from jaxrl_tis.engine.policies import FirstCome, ShortestPrompt
from jaxrl_tis.engine.sequences import Sequence
from jaxrl_tis.engine.waiting import Waiting
from tests import arithmetic


def sequence(id, length, order, admitted_after=0):
    return Sequence.of(arithmetic.request(id, prompt=[1] * length), order, admitted_after)


def ids(waiting):
    return [s.request.id for s in waiting.in_order()]


@pytest.mark.parametrize("policy, expected", [(FirstCome, "abc"), (ShortestPrompt, "cab")])
def test_the_order_is_the_policys_then_that_of_arrival(policy, expected):
    waiting = Waiting(policy(), None, 4)
    for id, length, order in (("b", 4, 1), ("c", 2, 2), ("a", 4, 0)):
        waiting.add(sequence(id, length, order))
    assert ids(waiting) == list(expected)


@pytest.mark.parametrize("admissions, expected", [(2, "cba"), (3, "acb"), (4, "abc")])
def test_who_was_passed_over_too_often_goes_first(admissions, expected):
    waiting = Waiting(ShortestPrompt(), max_bypass=3, page_size=4)
    for order, (id, length, since) in enumerate([("a", 5, 0), ("b", 4, 1), ("c", 2, 2)]):
        waiting.add(sequence(id, length, order, since))
    waiting.admissions = admissions
    assert ids(waiting) == list(expected)


def test_tokens_are_awaited_as_long_as_one_waits_with_them():
    waiting = Waiting(FirstCome(), None, 4)
    a, b = sequence("a", 3, 0), sequence("b", 3, 1)
    waiting.add(a)
    waiting.add(b)
    waiting.admit(a)
    assert waiting.has(b.key) and waiting.admissions == 1
    waiting.remove(b)
    assert not waiting.has(b.key) and waiting.admissions == 1 and not list(waiting)


def test_a_sequence_with_tokens_also_awaits_the_full_pages_of_its_prompt():
    waiting = Waiting(FirstCome(), None, 4)
    prompt = np.array([1, 2, 3, 4, 5, 6], np.int32)
    new = Sequence.of(arithmetic.request("a", prompt), 0, 0)
    partial = dataclasses.replace(
        new.trajectory("abort", "", 0), tokens=np.array([9], np.int32),
        segment=np.zeros(1, np.int32),
    )
    drew = Sequence.of(arithmetic.request("b", prompt, partial=partial), 1, 0)
    for s in (new, drew):
        waiting.add(s)
    assert (new.key, new.base_key) == (prompt.tobytes(), b"")
    assert drew.key == np.append(prompt, np.int32(9)).tobytes()
    assert drew.base_key == prompt[:4].tobytes() and waiting.has(drew.base_key)
