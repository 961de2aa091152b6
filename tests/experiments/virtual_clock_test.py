"""Schedules that were worked out by hand, and what no schedule may break."""

import dataclasses

import pytest

from experiments.costs import Costs
from experiments.virtual_clock import Clock, simulate
from jaxrl_tis.rollouts import schedules

# A sampler and a learner; a batch is one group of two responses of 8 tokens: 8 s of drawing, two
# tokens a call, 4 s of training, half a second for new weights.
TINY = Costs(
    workers=1, trainers=1, slots=2, prompts=1, group_size=2, prompt_tokens=0, median_tokens=8.0,
    sigma=0.0, call_steps=2, step_s=1.0, sequence_s=0.0, cached_s=0.0, prefill_s=0.0, train_s=0.25,
    gib_s=0.0, swap_s=0.5, reward_s=0.0,
)
SMALL = Costs(
    workers=3, trainers=1, slots=6, prompts=4, group_size=4, prompt_tokens=8, median_tokens=40.0,
    sigma=1.0, max_tokens=200, train_s=3e-4, gib_s=0.01, swap_s=0.02, reward_s=0.05,
)
SCHEDULES = [
    *schedules.SCHEDULES, "fully_async(trigger=1, partial=False)",
    "roll_flash(alpha=2, redundant=2)",
    "laminar(staleness=1, repack=0.9)", "in_flight(staleness=1)",
]


def ends(schedule, steps=3, **changes):
    """When the updates end."""
    clock = Clock(schedules.parse(schedule), dataclasses.replace(TINY, **changes))
    clock.run(steps)
    return clock._ends[1:]


def test_a_synchronous_schedule():
    """0.5 new weights, 8 drawing, 4 training: 12.5 s a step."""
    assert ends("sync") == [12.5, 25.0, 37.5]
    o = simulate(schedules.sync(), TINY, steps=3, skip=1)
    assert (o.seconds, o.tokens, o.tokens_per_s) == (25.0, 32, 1.28)
    assert o.learner_idle == 1 - 4 / 12.5
    assert o.sampler_idle == 1 - 8.5 / 12.5  # taking weights is no idle time
    assert (o.max_staleness, o.partial, o.trained) == (0, 0, (0, 1, 2))


def test_one_step_off():
    """The second batch is begun at 8.5 and ends at 16.5, when its sampler takes the first version;
    from then on drawing decides: 8.5 s a step."""
    assert ends("one_step") == [12.5, 20.5, 29.0]
    assert simulate(schedules.one_step(), TINY, 4, 2).mean_staleness == 1


def test_interrupted_sequences_are_read_anew():
    """Version 1 comes at 12.5, when the second batch has 4 tokens of each sequence: 0.5 s of new
    weights, 8 tokens of prefill, and the last 4 from there on; all of it again for the third."""
    assert ends("areal(staleness=1)") == [12.5, 21.0, 29.5]
    assert ends("areal(staleness=1)", prefill_s=0.0625) == [12.5, 21.5, 30.5]
    o = simulate(schedules.areal(staleness=1), TINY, 3, 1)
    assert (o.partial, o.mean_staleness, o.max_staleness) == (1.0, 0.5, 1)
    # The second batch and the third.
    assert o.counts.interrupted == 4 and o.counts.reprefilled_tokens == 16


def test_a_prompt_is_read_once_by_each_sampler_and_version():
    """8 tokens are 0.5 s: drawn from 1 to 9, trained on until 13. The second group has 4 tokens of
    each sequence at 13.5, its prompt and these are 1 s from 14, and its end is at 19."""
    changes = dict(prompt_tokens=8, prefill_s=0.0625, train_s=0.125)
    assert ends("areal(staleness=1)", 2, **changes) == [13.0, 23.0]


def test_swaps_in_place_pause_for_a_call_and_a_swap_at_most():
    assert ends("in_flight(staleness=1)", prefill_s=1e6) == [12.5, 21.0, 29.5]
    o = simulate(schedules.in_flight(staleness=1), TINY, 3, 1)
    assert (o.longest_pause, o.longest_call, o.counts.reprefilled_tokens) == (0.5, 2.0, 0)
    # 5 s of training: version 1 comes at 13.5, in the middle of a call that ends at 14.5.
    assert ends("in_flight(staleness=1)", train_s=0.3125)[:2] == [13.5, 22.0]
    o = simulate(schedules.in_flight(staleness=1), dataclasses.replace(TINY, train_s=0.3125), 2, 0)
    assert o.longest_pause == 1.5


def test_a_learner_that_takes_groups_as_they_arrive():
    """Two groups, one after the other: drawn from 0.5 to 8.5 and to 16.5, trained on from 8.5 to 12.5
    and from 16.5 to 20.5, and not from 16.5 to 24.5 as a batch."""
    two = dict(prompts=2)
    assert ends("sync", 2, **two) == [24.5, 49.0]
    assert ends("periodic", 2, **two) == [20.5, 41.0]


def test_an_update_takes_its_time_once_a_batch():
    """Groups end at 8.5 and 16.5, and take 8 s of training each: from 8.5 to 24.5, and 1 s more."""
    assert ends("periodic", 1, prompts=2, train_s=0.5, update_s=1.0) == [25.5]


def test_nobody_is_idle_where_the_other_is_slower():
    fast = dataclasses.replace(TINY, train_s=2.0)  # 32 s of training for 8 of drawing
    assert simulate(schedules.areal(staleness=2), fast, 6, 3).learner_idle == 0
    slow = dataclasses.replace(TINY, train_s=0.0625)  # 1 s
    assert simulate(schedules.areal(staleness=2), slow, 6, 3).sampler_idle == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_group_is_trained_on_once_within_its_staleness(schedule):
    parsed = schedules.parse(schedule)
    o = simulate(parsed, SMALL, steps=9, skip=0)
    assert len(o.trained) == len(set(o.trained)) == 9 * SMALL.prompts
    assert o.max_staleness <= parsed.staleness
    assert o.drawn_tokens == o.trained_tokens + o.untrained_tokens + o.counts.restarted_tokens
    assert o.counts.discarded_tokens <= o.untrained_tokens
    assert (o.counts.discarded_tokens > 0) == (parsed.redundant > 0)
    assert o.partial == 0 or parsed.on_sync != "drain"
    assert 0 <= o.learner_idle < 1 and 0 <= o.sampler_idle < 1


def test_a_sampler_pauses_no_longer_than_a_call_and_a_swap():
    for seed in range(8):
        o = simulate(schedules.in_flight(staleness=2), SMALL, steps=12, skip=0, seed=seed)
        assert 0 < o.longest_pause <= o.longest_call + SMALL.sync_s
        assert o.counts.reprefilled_tokens == 0


def test_a_slower_clock_changes_nothing_but_the_seconds():
    """All times doubled, which floating point does exactly."""
    fields = [f.name for f in dataclasses.fields(Costs) if f.name.endswith("_s")]
    slower = dataclasses.replace(SMALL, **{name: 2 * getattr(SMALL, name) for name in fields})
    for schedule in map(schedules.parse, SCHEDULES):
        once, twice = (simulate(schedule, c, steps=6, skip=2) for c in (SMALL, slower))
        doubled = {n: 2 * getattr(once, n) for n in ("seconds", "longest_pause", "longest_call")}
        assert dataclasses.replace(once, **doubled) == twice, schedule


def test_a_token_beyond_the_bound_stops_the_run():
    clock = Clock(schedules.areal(staleness=2), SMALL)
    clock.schedule = schedules.areal(staleness=1)  # and not the controller's
    with pytest.raises(RuntimeError, match="a token is 2 versions old, and the bound is 1"):
        clock.run(9)


def test_the_same_seed_gives_the_same_run():
    run = lambda seed: simulate(schedules.parse("laminar"), SMALL, steps=6, skip=2, seed=seed)
    assert run(1) == run(1) != run(2)


@pytest.mark.parametrize("schedule", ["sync", "areal(staleness=1)"])
def test_samples_are_divided_among_workers_that_get_weights_one_after_the_other(schedule):
    """12 samples a batch, 1 or 2 batches begun, 3 samplers of 16 slots: 4 or 8 for each, and less than
    a group more."""
    costs = dataclasses.replace(SMALL, slots=16, prompts=3, median_tokens=100.0, sigma=0.5)
    clock, most = Clock(schedules.parse(schedule), costs), 0
    begin = clock._begin_burst

    def watched(name):
        nonlocal most
        begin(name)
        most = max(most, len(clock.samplers[name].drawing))

    clock._begin_burst = watched
    o = clock.run(8)
    assert most == 4 if schedule == "sync" else 8 <= most < 12
    assert bool(o.counts.interrupted) == (schedule != "sync")


def test_a_run_in_which_nothing_can_happen_says_so():
    clock = Clock(schedules.sync(), TINY)
    clock.samplers["sampler 0"].is_syncing = True  # and never ends
    with pytest.raises(RuntimeError, match="at 0.0 s, after 0 updates"):
        clock.run(1)
