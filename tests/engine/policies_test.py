from jaxrl_tis.engine.policies import POLICIES
from tests.arithmetic import request


def order(name, waiting, finished=()):
    """Ids in the order of a policy; `waiting` pairs requests with the tokens they have drawn."""
    policy = POLICIES[name]()
    for r, drawn in waiting:
        policy.added(r)
        policy.key(r, drawn)
    for r, drawn in finished:
        policy.removed(r, drawn)
    key = lambda pair: policy.key(*pair)
    return "".join(r.id for r, _ in sorted(waiting, key=key))


A, B = request("a", (1, 2, 3), max_tokens=4), request("b", (1,), max_tokens=9)
C = request("c", (1, 2), max_tokens=6)


def test_first_come_keeps_the_order_of_arrival():
    assert order("first_come", [(B, 5), (A, 0), (C, 1)]) == "bac"


def test_shortest_prompt_counts_what_must_be_prefilled():
    assert order("shortest_prompt", [(A, 0), (B, 0), (C, 0)]) == "bca"
    assert order("shortest_prompt", [(A, 0), (B, 4), (C, 0)]) == "cab"  # 3, 1 + 4, 2


def test_longest_first_counts_what_may_still_be_drawn():
    assert order("longest_first", [(A, 0), (B, 0), (C, 0)]) == "bca"
    assert order("longest_first", [(A, 0), (B, 6), (C, 1)]) == "cab"  # 4, 9 - 6, 6 - 1


GROUP = [request(id, (7,), max_tokens=8) for id in "pqr"]
OTHERS = [request(id, (8,), max_tokens=5) for id in "xyz"]


def test_the_first_of_each_group_is_its_probe_and_goes_first():
    waiting = [(r, 0) for r in GROUP + OTHERS]
    # Then groups at their limits, 8 and 5.
    assert order("group_longest_first", waiting) == "pxqryz"


def test_probes_of_fewest_tokens_go_first():
    assert order("group_longest_first", [(GROUP[0], 4), (OTHERS[0], 2)]) == "xp"


def test_a_group_is_as_long_as_its_longest_finished_sample():
    waiting = [(r, 0) for r in GROUP + OTHERS]
    finished = [(GROUP[0], 3), (GROUP[1], 1)]
    # 3 against the limit 5 of the others; probes still go first.
    assert order("group_longest_first", waiting, finished) == "pxyzqr"
    assert order("group_longest_first", waiting, [(GROUP[0], 3), (GROUP[1], 6)]) == "pxqryz"


def test_what_a_sample_has_drawn_counts_against_the_estimate_of_its_group():
    waiting = [(GROUP[0], 0), (OTHERS[0], 0), (GROUP[1], 6), (OTHERS[1], 1)]
    assert order("group_longest_first", waiting) == "pxyq"  # 5 - 1 left against 8 - 6


def test_an_estimate_is_at_most_what_a_sample_may_draw():
    short = request("s", (7,), max_tokens=2)
    waiting = [(GROUP[0], 0), (OTHERS[0], 0), (short, 0), (OTHERS[1], 0)]
    assert order("group_longest_first", waiting, [(GROUP[0], 8)]) == "pxys"


def test_a_probe_that_was_aborted_has_a_successor():
    policy = POLICIES["group_longest_first"]()
    for r in GROUP:
        policy.added(r)
    assert [policy.key(r, 0) for r in GROUP] == [(0, 0), (1, -8), (1, -8)]
    policy.removed(GROUP[1], None)
    assert policy.key(GROUP[2], 0) == (1, -8)
    policy.removed(GROUP[0], None)
    assert policy.key(GROUP[2], 0) == (0, 0)


def test_a_group_that_comes_again_has_a_probe_again():
    policy = POLICIES["group_longest_first"]()
    for _ in range(2):
        for r in GROUP:
            policy.added(r)
        assert [policy.key(r, 0) for r in GROUP] == [(0, 0), (1, -8), (1, -8)]
        for r in GROUP:
            policy.removed(r, 3)
    assert not policy._groups
