import pytest

from jaxrl_tis.rollouts.schedules import SCHEDULES
from tests.rollouts import controller_fuzz

SCHEDULES_OF_CASES = controller_fuzz.schedules()


@pytest.mark.all
@pytest.mark.parametrize("text", SCHEDULES_OF_CASES)
def test_whatever_happens_groups_arrive_whole_once_and_in_time(text):
    for seed in range(5):
        controller_fuzz.play(SCHEDULES_OF_CASES[text], seed, controller_fuzz.RUN)


@pytest.mark.parametrize("text", ["areal", "laminar", "all at once"])
def test_the_same_events_give_the_same_decisions(text):
    for seed in range(3):
        schedule = SCHEDULES_OF_CASES[text]
        first, second = (controller_fuzz.play(schedule, seed, 500) for _ in range(2))
        assert first == second and len(first) > 20


def test_every_mode_is_tried():
    assert set(SCHEDULES) == {text.partition("(")[0] for text in controller_fuzz.CASES}
