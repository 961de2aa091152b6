"""Settings of who generates when that contradict themselves."""

import re

import pytest

from jaxrl_tis.validate import validate
from tests import tiny


def problems(config) -> list[str]:
    try:
        validate(config)
    except ValueError as error:
        return [line for line in str(error).splitlines() if line.startswith("- ")]
    return []


@pytest.mark.parametrize("changes, why", [
    (dict(schedule="areal(staleness=-1)"), "rollout.schedule 'areal.staleness=-1.': it runs -1"),
    (dict(schedule="aral"), "schedule 'aral' is unknown; did you mean 'areal'"),
    (dict(schedule="fully_async(trigger=4, threshold=-0.5)"), "threshold is -0.5"),
    (dict(schedule="fully_async(trigger=0)"), "trigger is 0; give a whole number"),
    (dict(schedule="roll_flash(redundant=-1)"), "-1 redundant candidates"),
    (dict(schedule="laminar(repack=1.5)", workers=2), "repack is 1.5"),
    (dict(schedule="laminar"), "moves sequences between workers, and there is one"),
    (dict(schedule="areal(staleness=inf)"), "has no bound; set rollout.queue"),
    (dict(schedule="areal", queue=3), "rollout.queue = 3 groups cannot hold a batch of rollout.prompts = 4"),
    (dict(schedule="fully_async(trigger=3)", queue=8), "cannot hold the 3 batches of 4"),
    (dict(schedule="areal", workers=0), "rollout.workers is 0"),
    (dict(schedule="areal", update_turns=-1), "rollout.update_turns is -1"),
    (dict(schedule="areal", driver="thread"), "rollout.driver is 'thread'; choose one of virtual"),
    (dict(schedule="areal", driver="threads", update_turns=2), "rollout.update_turns = 2 is for rollout.driver = 'virtual'"),
    (dict(schedule="areal", driver="ray", ray_address="8000"), "rollout.ray_address: '8000' is not an address"),
    (dict(schedule="areal", driver="ray", worker_timeout=0.0), "rollout.worker_timeout is 0.0 seconds"),
    (dict(schedule="areal", driver="ray", worker_timeout=4.0), "an idle worker answers after one second"),
    (dict(schedule="areal", driver="ray", start_timeout=float("inf")), "rollout.start_timeout is inf seconds"),
    (dict(schedule="areal", driver="ray", tpus_per_worker=-1.0), "rollout.tpus_per_worker is -1.0"),
    (dict(schedule="areal", driver="threads", old_logp_source="replica"), "keeps no copy of them; set it to ring"),
    (dict(driver="external", engines="http://a:1", weights_folder="w", engine_kind="sglang", top_p=0.9),
     "rollout.engine_kind = 'sglang' records log-probs before filters, and rollout.top_k = 0, top_p = 0.9"),
    (dict(driver="threads"), "rollout.driver = 'threads' is for samplers that run ahead"),
    (dict(workers=2), "rollout.workers = 2 is for samplers that run ahead"),
    (dict(queue=9), "rollout.queue = 9 is for samplers that run ahead"),
    (dict(replay="uniform(uses=3)"), "rollout.prompts = 4 groups with 3 uses each .* multiple of 3"),
    (dict(replay="uniform(uses=0)"), "rollout.replay 'uniform.uses=0.': uses is 0"),
    (dict(replay="uniform(uses=2, most=2)"), "at most 2 times and 2 times on average"),
    (dict(max_age=3), "rollout.max_age = 3 limits the age of replayed tokens"),
    (dict(replay="newest(uses=1)", max_age=3), "rollout.replay = 'newest.uses=1.' replays none"),
    (dict(replay="newest", max_age=-1), "rollout.max_age = -1 leaves no token to replay"),
    (dict(replay="newest", schedule="areal(staleness=3)", max_age=3), "new tokens are up to 3 versions old"),
    (dict(replay="newest", schedule="areal(staleness=inf)", queue=8), "set rollout.max_age"),
])
def test_a_contradiction_is_named(changes, why):
    config = tiny.config(**{f"rollout__{name}": value for name, value in changes.items()})
    assert re.search(why, "\n".join(problems(config)))


def test_a_queue_of_one_batch_is_enough():
    for queue, count in ((-1, 1), (3, 1), (4, 0)):
        assert len(problems(tiny.config(rollout__schedule="areal", rollout__queue=queue))) == count


def test_other_sections_that_a_mode_excludes():
    for schedule, count in (("areal", 1), ("sync", 0)):
        timed = tiny.config(rollout__schedule=schedule, engine__max_draft=1, engine__free_batch_rows=0)
        found = problems(timed)
        assert len(found) == count and all("measured times decide" in problem for problem in found)
    config = tiny.config(
        rollout__schedule="roll_flash(redundant=1)", correction__advantage="remax")
    assert "needs its greedy answer" in " ".join(problems(config))
    found = problems(tiny.config(
        rollout__schedule="areal", rollout__extend_equal=2, correction__advantage="remax"
    ))
    for words in ("needs rollout.dynamic_sampling", "is of synchronous batches", "more than the one greedy"):
        assert words in " ".join(found)
    assert not problems(tiny.config(rollout__dynamic_sampling=True, rollout__extend_equal=2))


@pytest.mark.parametrize("replay", ["uniform(uses=1)", "newest", "fresh(uses=4, most=9, tau=50)"])
def test_replay_goes_with_every_mode(replay):
    for schedule in ("sync", "periodic", "areal"):
        assert not problems(tiny.config(rollout__schedule=schedule, rollout__replay=replay))


def test_modes_as_they_are():
    for schedule in ("sync", "periodic", "one_step", "areal(staleness=2)"):
        assert not problems(tiny.config(rollout__schedule=schedule))


@pytest.mark.parametrize("changes, why", [
    (dict(gap_probe_every=-1), "rollout.gap_probe_every is -1"),
    (dict(gap_probe_every=1, on_gap_exceeded="halt"), "on_gap_exceeded is 'halt'; choose one of warn, sync, stop"),
    (dict(on_gap_exceeded="stop"), "needs probes of the gap"),
    (dict(gap_probe_every=1, on_gap_exceeded="sync"), "lowers the bound on staleness, and rollout.schedule = 'sync'"),
])
def test_budgets_that_cannot_be_kept(changes, why):
    config = tiny.config(**{f"rollout__{name}": value for name, value in changes.items()})
    assert why in " ".join(problems(config))
