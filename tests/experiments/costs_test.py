"""The cost model by itself."""

from experiments.costs import Costs


def test_decode_steps_grow_with_what_is_cached():
    costs = Costs(step_s=1.0, sequence_s=0.5, cached_s=0.25)
    # Two sequences with 10 tokens together: 1 + 2 * 0.5 + 0.25 * (10, 12, 14).
    assert costs.decode_s(2, 10, 3) == 4.5 + 5.0 + 5.5


def test_lengths_are_of_a_group_and_end_at_the_limit():
    costs = Costs(median_tokens=100.0, sigma=1.0, max_tokens=150)
    found = costs.lengths(0, 3, 200)
    assert found[:4] == costs.lengths(0, 3, 4) != costs.lengths(0, 4, 4)
    assert max(found) == 150 and sorted(found)[80] < 100 < sorted(found)[120]


def test_the_same_machines_side_by_side_and_divided():
    both = Costs(workers=6, trainers=2).colocated()
    assert (both.workers, both.trainers) == (8, 8)


def test_new_weights_take_a_moment_and_their_bytes():
    assert Costs(swap_s=0.5, weights_gib=2.0, gib_s=0.25).sync_s == 1.0
