import pytest

from jaxrl_tis.rollouts.queue import Full, Queue

NEEDS = {"reward": ("tokens",), "learner": ("tokens", "reward")}


def queue_of(size=2, capacity=3, groups=(0,)):
    queue = Queue(size, capacity, NEEDS)
    for group in groups:
        queue.add(group, deadline=group + 1)
    return queue


def test_it_holds_its_capacity_and_no_more():
    queue = queue_of(groups=(0, 1, 2))
    with pytest.raises(Full, match="3 groups, at most 3"):
        queue.add(3, 4)
    queue.take([1])
    queue.add(3, 4)
    assert sorted(queue.entries) == [0, 2, 3] and len(queue) == 3


def test_a_group_is_opened_once():
    with pytest.raises(ValueError, match="group 0 is in the queue"):
        queue_of().add(0, 5)


def test_the_first_samples_to_end_are_the_group():
    queue = queue_of(size=2)
    assert queue.put((0, 3), "tokens", "third")
    assert not queue.has_tokens(0)
    assert queue.put((0, 1), "tokens", "first")
    assert queue.has_tokens(0)
    assert not queue.put((0, 0), "tokens", "late")
    [entry] = queue.take([0])
    assert list(entry.columns.items()) == [(1, {"tokens": "first"}), (3, {"tokens": "third"})]


def test_a_column_is_written_once_and_only_of_samples_that_are_there():
    queue = queue_of()
    assert not queue.put((0, 0), "reward", 1.0)  # of no tokens
    assert not queue.put((7, 0), "tokens", "x")  # of no group
    assert queue.put((0, 0), "tokens", "x") and not queue.put((0, 0), "tokens", "y")
    assert queue.put((0, 0), "reward", 0.0) and not queue.put((0, 0), "reward", 1.0)
    assert (queue.get((0, 0), "tokens"), queue.get((0, 0), "reward")) == ("x", 0.0)


def test_a_consumer_gets_each_sample_once_and_oldest_groups_first():
    queue = queue_of(groups=(1, 0))
    for key in [(1, 0), (0, 1), (0, 0)]:
        queue.put(key, "tokens", "x")
    assert queue.claim("learner") == []  # there are no rewards
    assert queue.claim("reward") == [(0, 0), (0, 1), (1, 0)]
    assert queue.claim("reward") == []
    queue.put((1, 1), "tokens", "x")
    assert queue.claim("reward") == [(1, 1)]
    queue.put((0, 1), "reward", 1.0)
    assert queue.claim("learner") == [(0, 1)]


def test_a_group_is_ready_when_all_of_it_has_what_the_consumer_needs():
    queue = queue_of()
    queue.put((0, 0), "tokens", "x")
    queue.put((0, 0), "reward", 1.0)
    assert not queue.is_ready(0, "reward") and not queue.is_ready(0, "learner")
    queue.put((0, 1), "tokens", "x")
    assert queue.is_ready(0, "reward") and not queue.is_ready(0, "learner")
    queue.put((0, 1), "reward", 1.0)
    assert queue.is_ready(0, "learner")


def test_groups_are_taken_in_the_order_that_is_asked_for():
    queue = queue_of(groups=(0, 1, 2))
    assert [entry.number for entry in queue.take([2, 0])] == [2, 0]
    assert list(queue.entries) == [1] and queue.entries[1].deadline == 2
