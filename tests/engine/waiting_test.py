"""Who comes next: the policy's choice, unless somebody was passed over too often."""

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
