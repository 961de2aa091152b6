import math

import pytest

from jaxrl_tis.rollouts import schedules
from jaxrl_tis.rollouts.schedules import SCHEDULES, Schedule


# Batches ahead, updates between syncs, the most versions a token is behind, by hand.
@pytest.mark.parametrize("text, ahead, sync_every, staleness, on_sync", [
    ("sync", 0, 1, 0, "drain"),
    ("periodic", 0, 1, 0, "drain"),
    ("one_step", 1, 1, 1, "drain"),
    ("areal", 4, 1, 4, "interrupt"),
    ("areal(staleness=inf)", math.inf, 1, math.inf, "interrupt"),
    ("in_flight(staleness=2)", 2, 1, 2, "in_place"),
    ("dora", 2, 1, 2, "drain"),
    ("roll_flash(alpha=0.5)", 0.5, 1, 1, "interrupt"),
    ("laminar(staleness=3)", 3, 1, 3, "drain"),
    ("oapl(lag=800)", 799, 800, 799, "drain"),
    # verl: (1 + threshold) * trigger batches begin between two syncs.
    ("fully_async", 5, 4, 5, "interrupt"),  # 1.5 * 4 - 1
    ("fully_async(trigger=1, threshold=0)", 0, 1, 0, "interrupt"),
    ("fully_async(trigger=4, threshold=0)", 3, 4, 3, "interrupt"),
    ("fully_async(trigger=4, threshold=0.25, partial=False)", 4, 4, 4, "drain"),
    ("fully_async(trigger=2, threshold=0.25)", 1.5, 2, 2, "interrupt"),
])
def test_a_name_stands_for_its_numbers(text, ahead, sync_every, staleness, on_sync):
    schedule = schedules.parse(text)
    assert (schedule.ahead, schedule.sync_every, schedule.on_sync) == (ahead, sync_every, on_sync)
    assert schedule.staleness == staleness


def test_what_else_tells_modes_apart():
    assert schedules.parse("periodic").on_arrival and not schedules.parse("sync").on_arrival
    assert schedules.parse("roll_flash(redundant=3)").redundant == 3
    assert schedules.parse("laminar(repack=0.25)").repack == 0.25
    assert [name for name in SCHEDULES if SCHEDULES[name]().is_sync] == ["sync"]
    mixing = {name for name in SCHEDULES if SCHEDULES[name]().on_sync != "drain"}
    assert mixing == {"fully_async", "areal", "in_flight", "roll_flash"}


@pytest.mark.parametrize("text, problem", [
    ("ariel", "did you mean 'areal'"),
    ("areal(stale=1)", "did you mean 'staleness'"),
    ("areal(staleness=-1)", "it runs -1.0 batches ahead; the bound is 0 or more"),
    ("in_flight(staleness=0.5)", "staleness is 0.5; give a whole number of versions, or inf"),
    ("areal(staleness=None)", "not 'NoneType'"),
    ("fully_async(trigger=0)", "trigger is 0; give a whole number of updates from 1"),
    ("fully_async(trigger=2.0)", "trigger is 2.0"),
    ("fully_async(threshold=-0.5)", "threshold is -0.5"),
    ("oapl(lag=0)", "lag is 0; give a whole number of updates from 1"),
    ("roll_flash(redundant=-1)", "-1 redundant candidates"),
    ("laminar(repack=1.0)", "repack is 1.0; give a share of the slots from 0 to below 1"),
    ("sync(ahead=1)", "has no parameter 'ahead'"),
])
def test_a_mode_that_cannot_be_is_refused_with_its_text(text, problem):
    with pytest.raises(ValueError, match="schedule") as error:
        schedules.parse(text)
    assert problem in str(error.value) and text.partition("(")[0] in str(error.value)


def test_numbers_that_contradict_each_other_are_refused():
    for numbers, problem in (
        (dict(ahead=math.nan), "it runs nan batches ahead"),
        (dict(on_sync="later"), "on_sync is 'later', none of drain, interrupt, in_place"),
        (dict(sync_every=0), "every 0 updates"),
        (dict(sync_every=True), "every True updates"),
        (dict(ahead=1.0, on_arrival=True), "use older ones"),
        (dict(ahead=1.5, sync_every=3), "every 3 updates, and samplers may start only 2.5 batches"),
    ):
        with pytest.raises(ValueError, match=problem):
            Schedule(**numbers)


def test_a_sync_may_be_as_rare_as_the_groups_that_are_begun_last():
    assert Schedule(ahead=2.0, sync_every=3).staleness == 2
