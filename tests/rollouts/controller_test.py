"""Small cases by hand; in most of them groups are of one sample, so that (3, 0) is group 3."""

import json
import math

import pytest

from jaxrl_tis.rollouts.controller import Begin, Controller, Discard, Interrupt, SyncWeights
from jaxrl_tis.rollouts.schedules import Schedule, parse
from jaxrl_tis.rollouts.queue import Queue

NEEDS = {"learner": ("tokens",)}


def controller_of(schedule, batch=1, size=1, capacity=1000, version=0, **slots):
    """A controller whose workers have the weights of a version."""
    schedule = parse(schedule) if isinstance(schedule, str) else schedule
    controller = Controller(schedule, batch, Queue(size, capacity, NEEDS))
    for name in slots:
        controller.joined(name, slots[name])
    controller.published(version)
    return controller


def settle(controller):
    """Carries out every decision at once; returns what was begun."""
    begun = []
    while decisions := controller.decisions():
        for decision in decisions:
            if isinstance(decision, SyncWeights):
                controller.synced(decision.worker, decision.version)
            elif isinstance(decision, Begin):
                begun += decision.keys
            else:
                for key in decision.keys:
                    controller.preempted(decision.worker, key, 0)
    return begun


def numbers(keys):
    return sorted({group for group, _ in keys})


def end(controller, *groups):
    """Samples of these groups end, on whichever worker draws them."""
    for group in groups:
        for name, worker in controller.workers.items():
            for key in sorted(k for k in worker.running if k[0] == group):
                assert controller.finished(name, key)
                controller.queue.put(key, "tokens", "x")


def taken(controller):
    entries = controller.take()
    return entries and [entry.number for entry in entries]


# Weights

def test_nothing_is_drawn_before_a_worker_has_weights():
    controller = controller_of("areal", a=1, version=7)
    assert controller.decisions() == [SyncWeights("a", 7)]
    assert controller.decisions() == []
    controller.joined("b", 1)
    assert controller.decisions() == [SyncWeights("b", 7)]
    controller.synced("b", 7)
    assert controller.decisions() == [Begin("b", ((0, 0),))]
    controller.synced("a", 7)
    assert controller.decisions() == [Begin("a", ((1, 0),))]


def test_drain_lets_sequences_end_and_begins_no_others():
    controller = controller_of("dora(staleness=1)", a=2)
    assert settle(controller) == [(0, 0), (1, 0)]
    end(controller, 0)
    assert taken(controller) == [0]
    controller.published(1)
    assert controller.decisions() == []
    end(controller, 1)
    assert controller.decisions() == [SyncWeights("a", 1)]
    controller.synced("a", 1)
    assert controller.decisions() == [Begin("a", ((2, 0),))]


def test_an_interrupted_sequence_goes_on_under_new_weights():
    controller = controller_of("areal(staleness=1)", a=2)
    assert settle(controller) == [(0, 0), (1, 0)]
    end(controller, 0)
    assert taken(controller) == [0]
    controller.published(1)
    assert controller.decisions() == [Interrupt("a", ((1, 0),))]
    assert controller.decisions() == []
    assert controller.preempted("a", (1, 0), 0)
    assert controller.decisions() == [SyncWeights("a", 1)]
    controller.synced("a", 1)
    assert controller.decisions() == [Begin("a", ((1, 0),)), Begin("a", ((2, 0),))]


def test_weights_come_in_place_while_it_draws():
    controller = controller_of("in_flight(staleness=1)", a=2)
    assert settle(controller) == [(0, 0), (1, 0)]
    end(controller, 0)
    assert taken(controller) == [0]
    controller.published(1)
    assert controller.decisions() == [SyncWeights("a", 1)]


def test_a_worker_does_not_go_back():
    controller = controller_of("areal", a=1, version=3)
    controller.synced("a", 3)
    with pytest.raises(ValueError, match="'a' goes back from version 3 to 2"):
        controller.synced("a", 2)


# Admission

@pytest.mark.parametrize("eta", [0, 1, 4])
def test_the_rule_of_areal(eta):
    """Of batches of 3, group N (from 1) begins if floor((N - 1) / 3) <= version + eta."""
    controller = controller_of(f"areal(staleness={eta})", batch=3, a=1000)
    begun = []
    for version in range(6):
        begun += settle(controller)
        allowed = [n for n in range(1, 100) if (n - 1) // 3 <= version + eta]
        assert numbers(begun) == [n - 1 for n in allowed]
        end(controller, *range(3 * version, 3 * version + 3))
        assert taken(controller) == [3 * version + i for i in range(3)]
        controller.published(version + 1)


def test_a_rejected_group_makes_room_for_another():
    controller = controller_of("sync", batch=2, a=9)
    assert settle(controller) == [(0, 0), (1, 0)]
    end(controller, 0)
    controller.rejected(0)
    assert settle(controller) == [(2, 0)]
    end(controller, 1, 2)
    assert taken(controller) == [1, 2]


def test_the_queue_bounds_what_has_no_other_bound():
    controller = controller_of("areal(staleness=inf)", batch=2, capacity=5, a=1000)
    assert numbers(settle(controller)) == [0, 1, 2, 3, 4]


# The four schedules of verl's fully asynchronous recipe: (1 + threshold) * trigger batches begin
# between two syncs, less what is there at the first.
@pytest.mark.parametrize("trigger, threshold, partial, most, interrupts", [
    (1, 0.0, True, 4, False),   # on policy
    (3, 0.0, True, 12, False),  # stream
    (4, 0.5, False, 24, False),  # stale samples
    (4, 0.5, True, 24, True),   # partial rollouts
    (2, 0.2, True, 9, True),    # 9.6 groups
])
def test_the_rule_of_verl(trigger, threshold, partial, most, interrupts):
    schedule = f"fully_async(trigger={trigger}, threshold={threshold}, partial={partial})"
    controller = controller_of(schedule, batch=4, a=1000)
    was_interrupted, left, before = False, 0, 0
    for version in range(5 * trigger):
        settle(controller)
        batch = list(range(4 * version, 4 * version + 4))
        end(controller, *batch)
        assert taken(controller) == batch
        settle(controller)
        if version % trigger == trigger - 1:
            assert controller.next_group - before == most - left
            left, before = len(controller.queue), controller.next_group
        controller.published(version + 1)
        found = controller.decisions()
        assert all(isinstance(d, Interrupt | SyncWeights) for d in found)
        was_interrupted |= any(isinstance(d, Interrupt) for d in found)
        for decision in found:
            if isinstance(decision, SyncWeights):
                controller.synced("a", decision.version)
            else:
                for key in decision.keys:
                    controller.preempted("a", key, version)
    assert was_interrupted == interrupts


def test_a_share_of_a_batch_is_not_lost_by_rounding():
    """(1 + 0.1) * 10 groups are 11, whatever the version: 5 + 0.1 - 5 is below 0.1."""
    controller = controller_of("fully_async(trigger=1, threshold=0.1)", batch=10, a=1000)
    for version in range(12):
        settle(controller)
        assert len(controller.queue) == 11
        end(controller, *range(controller.next_group))
        assert len(taken(controller)) == 10
        controller.published(version + 1)


# Batches

def test_a_batch_waits_for_what_is_due():
    controller = controller_of("areal(staleness=1)", a=9)
    assert settle(controller) == [(0, 0), (1, 0)]
    end(controller, 1)
    assert taken(controller) == [1]
    controller.published(1)
    assert settle(controller) == [(0, 0), (2, 0)]
    end(controller, 2)
    assert taken(controller) is None  # 0 was begun by version 0
    end(controller, 0)
    assert taken(controller) == [0]


def test_a_batch_waits_where_two_would_be_due_at_once():
    """Groups 1 and 2 are due at batch 2; were group 3 batch 1, there was room for one of them."""
    controller = controller_of("dora(staleness=2)", a=3)
    assert settle(controller) == [(0, 0), (1, 0), (2, 0)]
    end(controller, 0)
    assert taken(controller) == [0]
    controller.published(1)
    controller.joined("b", 9)
    assert settle(controller) == [(3, 0)]
    end(controller, 3)
    assert taken(controller) is None
    end(controller, 2)
    assert taken(controller) == [2]
    controller.published(2)
    assert taken(controller) is None
    end(controller, 1)
    assert taken(controller) == [1]


def test_what_is_due_first_is_taken_first():
    controller = controller_of("areal(staleness=4)", a=1)
    assert settle(controller) == [(0, 0)]  # due at batch 4
    assert controller.reduce_staleness() == 3
    end(controller, 0)
    assert settle(controller) == [(1, 0)]  # due at batch 3
    end(controller, 1)
    assert taken(controller) == [1]


def test_a_learner_that_begins_on_arrival_takes_what_is_there():
    controller = controller_of("periodic", batch=3, a=9)
    assert settle(controller) == [(0, 0), (1, 0), (2, 0)]
    assert taken(controller) is None
    end(controller, 1)
    assert taken(controller) == [1]
    with pytest.raises(ValueError, match="1 of 3 groups"):
        controller.published(1)
    end(controller, 0, 2)
    assert taken(controller) == [0, 2]
    assert taken(controller) is None and settle(controller) == []
    controller.published(1)
    assert numbers(settle(controller)) == [3, 4, 5]


@pytest.mark.parametrize("groups, version", [(0, 1), (0, -1), (1, 0), (1, 2)])
def test_a_version_is_of_the_batch_before(groups, version):
    controller = controller_of("areal", a=9)
    settle(controller)
    if groups:
        end(controller, 0)
        assert taken(controller) == [0]
    with pytest.raises(ValueError, match=f"version {version} was published after 0 and {groups} of 1"):
        controller.published(version)
    controller.published(groups)


# Groups

def test_the_first_to_end_are_the_group_and_the_others_are_given_up():
    controller = controller_of(Schedule(redundant=2), size=2, a=9)
    assert controller.decisions() == [SyncWeights("a", 0)]
    controller.synced("a", 0)
    assert controller.decisions() == [Begin("a", ((0, 0), (0, 1), (0, 2), (0, 3)))]
    for sample in (3, 1):
        assert controller.decisions() == []
        assert controller.finished("a", (0, sample))
        controller.queue.put((0, sample), "tokens", "x")
    assert controller.decisions() == [Discard("a", ((0, 0), (0, 2)))]
    assert controller.decisions() == []
    assert controller.preempted("a", (0, 0), 0) and controller.finished("a", (0, 2))
    assert controller.decisions() == []
    [entry] = controller.take()
    assert list(entry.columns) == [1, 3]


def test_reports_count_once_and_only_of_what_was_given():
    controller = controller_of("areal", a=1, b=1)
    assert settle(controller) == [(0, 0), (1, 0)]
    assert not controller.finished("b", (0, 0)) and not controller.preempted("b", (0, 0), 0)
    assert not controller.finished("nobody", (0, 0))
    assert controller.finished("a", (0, 0)) and not controller.finished("a", (0, 0))
    assert controller.preempted("b", (1, 0), 0) and not controller.preempted("b", (1, 0), 0)
    controller.queue.put((0, 0), "tokens", "x")
    assert settle(controller) == [(1, 0), (2, 0)]


def test_others_go_on_with_what_a_worker_drew_that_is_gone():
    controller = controller_of("dora", size=2, a=1, b=1)
    assert settle(controller) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    controller.left("a", {(0, 1): 0})
    end(controller, 1)
    assert controller.decisions() == [Begin("b", ((0, 0),))]
    end(controller, 0)
    assert controller.decisions() == [Begin("b", ((0, 1),))]  # of the same version: it goes on


def test_a_sequence_of_one_version_starts_over_under_another():
    controller = controller_of("dora", a=2)
    assert settle(controller) == [(0, 0), (1, 0)]
    end(controller, 0)
    assert taken(controller) == [0]
    controller.published(1)
    controller.joined("b", 1)
    controller.left("a", {(1, 0): 0})
    assert controller.decisions() == [SyncWeights("b", 1)]
    controller.synced("b", 1)
    assert controller.decisions() == [Begin("b", ((1, 0),), frozenset({(1, 0)}))]


# Moving the last sequences of a version together

def moving():
    """b is told to hand group 1 to a, which draws group 2; both wait for version 1."""
    controller = controller_of("laminar(staleness=2, repack=0.6)", a=2, b=2)
    assert settle(controller) == [(0, 0), (1, 0), (2, 0)]
    end(controller, 0)
    assert taken(controller) == [0]
    controller.published(1)
    assert controller.decisions() == [Interrupt("b", ((1, 0),))]
    assert controller.decisions() == []
    return controller


def test_the_last_sequences_are_packed_onto_one_worker():
    controller = moving()
    controller.preempted("b", (1, 0), 0)
    assert controller.decisions() == [Begin("a", ((1, 0),)), SyncWeights("b", 1)]


def test_a_worker_waits_for_what_moves_to_it():
    controller = moving()
    end(controller, 2)
    assert controller.decisions() == []  # new weights now would make it start over
    controller.preempted("b", (1, 0), 0)
    assert controller.decisions() == [Begin("a", ((1, 0),)), SyncWeights("b", 1)]


def test_a_worker_does_not_wait_for_what_has_ended():
    controller = moving()
    end(controller, 1, 2)
    assert controller.decisions() == [SyncWeights("a", 1), SyncWeights("b", 1)]


def test_nothing_is_lost_when_the_worker_that_it_moves_to_is_gone():
    controller = moving()
    controller.left("a")
    controller.preempted("b", (1, 0), 0)
    assert controller.decisions() == [SyncWeights("b", 1)]
    controller.synced("b", 1)
    assert controller.decisions() == [
        Begin("b", ((2, 0),)), Begin("b", ((1, 0),), frozenset({(1, 0)})),
    ]


@pytest.mark.parametrize("drawn_by, begun", [
    ({}, []),  # without a known part the sequence starts over, on any worker
    ({(1, 0): 0}, [Begin("a", ((1, 0),))]),
])
def test_an_idle_target_is_not_forgotten_when_the_worker_that_moves_to_it_is_gone(drawn_by, begun):
    controller = moving()
    end(controller, 2)
    controller.left("b", drawn_by)
    assert controller.decisions() == (begun or [SyncWeights("a", 1)])


def test_a_worker_is_promised_what_it_has_room_for():
    """a draws 2 of 4, b 2, c 1: c moves to a, and then there is no room for b."""
    controller = controller_of("laminar(staleness=9, repack=0.9)", a=4, b=4, c=4)
    assert len(settle(controller)) == 10
    # a draws 0, 3, 6, 9; b 1, 4, 7; c 2, 5, 8.
    end(controller, 0, 3, 1, 2, 5)
    assert taken(controller) == [0]
    controller.published(1)
    assert controller.decisions() == [Interrupt("c", ((8, 0),))]
    assert controller.decisions() == []
    controller.preempted("c", (8, 0), 0)
    assert controller.decisions() == [Begin("a", ((8, 0),)), SyncWeights("c", 1)]
    assert controller.decisions() == []


# Checkpoints and control

def test_reduced_staleness_keeps_what_a_sync_needs():
    controller = controller_of("fully_async(trigger=4, threshold=0.5)", batch=2, a=1)
    assert [controller.reduce_staleness() for _ in range(4)] == [4, 3, 3, 3]
    controller = controller_of("areal(staleness=inf)", batch=2, capacity=9, a=1)
    # 9 // 2 - 1 batches ahead
    assert [controller.reduce_staleness() for _ in range(5)] == [3, 2, 1, 0, 0]
    controller = controller_of("fully_async(trigger=4, threshold=inf)", capacity=2, a=1)
    assert controller.reduce_staleness() == 3


def test_reduced_staleness_syncs_the_next_version():
    controller = controller_of("fully_async(trigger=4, threshold=0)", a=9)
    settle(controller)
    end(controller, 0)
    controller.reduce_staleness()
    assert taken(controller) == [0]
    controller.published(1)
    assert controller.sync_version == 1


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_checkpoint_goes_on_with_what_there_is(is_trained):
    controller = controller_of("areal(staleness=inf)", batch=1, capacity=3, a=9)
    assert settle(controller) == [(0, 0), (1, 0), (2, 0)]
    end(controller, 0)
    kept = controller.take()
    settle(controller)
    assert controller.interrupt_all() == [Interrupt("a", ((1, 0), (2, 0), (3, 0)))]
    for group in (1, 2, 3):
        controller.preempted("a", (group, 0), None if group == 3 else 0)
    state = json.loads(json.dumps(controller.get_state(int(is_trained))))

    queue = Queue(1, 3, NEEDS)
    again = Controller(parse("areal(staleness=inf)"), 1, queue)
    again.set_state(state)
    queue.entries |= controller.queue.entries
    if not is_trained:
        queue.entries |= {entry.number: entry for entry in kept}
    again.joined("b", 9)
    assert again.decisions() == []
    again.published(int(is_trained))
    assert again.decisions() == [SyncWeights("b", int(is_trained))]
    again.synced("b", int(is_trained))
    assert [d.keys for d in again.decisions()] == [((g, 0),) for g in (1, 2, 3)]
    assert taken(again) == (None if is_trained else [0])
    assert again.schedule.ahead == math.inf and again.next_group == 4


def test_what_rests_goes_on_with_the_next_version():
    controller = controller_of("fully_async(trigger=4, threshold=0)", a=2)
    assert settle(controller) == [(0, 0), (1, 0)]
    end(controller, 0)
    assert taken(controller) == [0]
    assert controller.interrupt_all() == [Interrupt("a", ((1, 0),))]
    assert controller.interrupt_all() == []
    controller.preempted("a", (1, 0), 0)
    controller.published(1)
    assert controller.decisions() == [SyncWeights("a", 1)]


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="a queue of 3 groups cannot hold a batch of 4"):
        Controller(parse("sync"), 4, Queue(1, 3, NEEDS))
    controller = controller_of("sync", a=1)
    with pytest.raises(ValueError, match="'a' is there already"):
        controller.joined("a", 2)
