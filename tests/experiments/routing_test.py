"""The table of routing replay by minibatches."""

from experiments import routing
from tests.experiments import made


def runs():
    return [
        made.run(arm, seed, accuracy=(0.3, *[end + 0.02 * seed] * 3), rollout_corr__k3_kl=1e-4 * (1 + seed))
        for arm, end in (("noise-none-8", 0.4), ("r3-8", 0.6), ("none-8", 0.5), ("r2-1", 0.5), ("none-2", 0.5))
        for seed in range(2)
    ]


def test_the_table():
    """Seeds 0 and 1 end at 0.6 and 0.62, after a start at 0.3."""
    arms, differences = (part.splitlines() for part in routing.table(runs()).split("\n\n"))
    assert [line.split(" | ")[0] for line in arms[2:]] == [
        "| r2-1", "| none-2", "| none-8", "| r3-8", "| noise-none-8"]
    assert arms[5] == (
        "| r3-8 | 2 | 0.610 (0.600 to 0.620) | +0.310 (+0.300 to +0.320) | 1.5e-04 (1.0e-04 to 2.0e-04) "
        "| 1.000 (1.000 to 1.000) | 1.000 (1.000 to 1.000) |")
    assert differences[2:] == ["| gain | r3-8 − none-8 | +0.100 [+0.100, +0.100] |"]
