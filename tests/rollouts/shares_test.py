"""Which worker begins what while others do not have their weights yet."""

from jaxrl_tis.rollouts import schedules
from jaxrl_tis.rollouts.controller import Begin, Controller, Interrupt, SyncWeights
from jaxrl_tis.rollouts.queue import Queue

WORKERS = ("a", "b")


def made(schedule):
    """Two workers of 8 slots, batches of 4 groups of 2."""
    queue = Queue(2, (schedule.ahead + 1) * 4, {"learner": ("tokens",)})
    controller = Controller(schedule, 4, queue)
    for name in WORKERS:
        controller.joined(name, 8)
    controller.published(0)
    assert controller.decisions() == [SyncWeights("a", 0), SyncWeights("b", 0)]
    return controller


def begun(controller):
    """Samples that begin now, by worker."""
    found = dict.fromkeys(WORKERS, 0)
    for decision in controller.decisions():
        assert isinstance(decision, Begin | Interrupt)
        found[decision.worker] += len(decision.keys) if isinstance(decision, Begin) else 0
    return found


def test_the_first_with_weights_leaves_the_other_half_of_a_batch():
    controller = made(schedules.sync())
    controller.synced("a", 0)
    assert begun(controller) == {"a": 4, "b": 0}
    controller.synced("b", 0)
    assert begun(controller) == {"a": 0, "b": 4}


def test_a_worker_that_goes_leaves_its_part_to_the_other():
    controller = made(schedules.sync())
    controller.synced("a", 0)
    begun(controller)
    controller.left("b")
    assert begun(controller) == {"a": 4, "b": 0}


def test_interrupted_samples_are_divided_whatever_else_may_begin():
    """All 20 groups that may begin have; 4 samples are left on each worker when version 1 comes,
    which lets 4 more groups begin. The first worker has 4 of the 8 that were interrupted."""
    controller = made(schedules.areal(staleness=4))
    for name in WORKERS:
        controller.synced(name, 0)
    while sum(begun(controller).values()) or controller.next_group < 20:
        for name in WORKERS:
            for key in sorted(controller.workers[name].running)[:2]:
                controller.finished(name, key)
                controller.queue.put(key, "tokens", 0)
    for name in WORKERS:
        for key in sorted(controller.workers[name].running)[:-4]:
            controller.finished(name, key)
            controller.queue.put(key, "tokens", 0)
    assert controller.next_group == 20 and len(controller.take()) == 4
    controller.published(1)
    controller.decisions()
    for name in WORKERS:
        for key in sorted(controller.workers[name].running):
            controller.preempted(name, key, 0)
    assert controller.decisions() == [SyncWeights("a", 1), SyncWeights("b", 1)]
    controller.synced("a", 1)
    assert begun(controller) == {"a": 4, "b": 0}
    controller.synced("b", 1)
    assert begun(controller)["b"] == 8  # its part, and new groups
