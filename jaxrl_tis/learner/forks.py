"""Rows of a batch for the forks of sessions.

A session of a harness whose calls do not continue each other has several rows: its record, and the
forks in `Trajectory.forks`. A batch with forks has a fixed number of rows after those of its
samples. The forks fill them from the first, and the rest hold no token. A batch without forks has no
such rows.

The reward of a session is that of its record's row alone. Statistics over rewards count the session
once, because the rewards of other rows are unknown. Its forks get the advantage of the record's row.
"""

import dataclasses

import numpy as np

from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.rollouts.groups import Sample
from jaxrl_tis.rollouts.record_check import EMPTY

Rows = dict[str, np.ndarray]
NOTHING = dataclasses.replace(EMPTY, temperature=1.0)


@dataclasses.dataclass(frozen=True)
class ForkRows:
    """The rows of a batch after those of its N samples.

    Attributes:
      trajectories: the forks with a row, then records without tokens; [] without forks.
      owners: [N + len(trajectories)] index of the sample that each row belongs to. Rows without
        tokens belong to sample 0.
      num_placed: forks with a row; num_left_out: forks without one.
      num_tokens_left_out: sampled tokens of the forks without a row.
    """

    trajectories: list[Trajectory]
    owners: np.ndarray
    num_placed: int
    num_left_out: int
    num_tokens_left_out: int


def fork_rows(samples: list[Sample], trained: np.ndarray, most: int) -> ForkRows:
    """Chooses the forks that get a row: those with most sampled tokens, of equal ones the first.

    Args:
      samples: N samples of a batch.
      trained: [N] whether a sample is in the loss; the forks of others get no row and are not
        counted.
      most: rows for forks; 0 leaves all forks out.
    """
    forks = [
        (i, fork) for i, sample in enumerate(samples) if trained[i]
        for fork in sample.trajectory.forks
    ]
    lengths = np.array([fork.mask.sum() for _, fork in forks], np.int64)
    order = np.argsort(-lengths, kind="stable")
    placed = [forks[i] for i in sorted(order[:most])]
    num_empty = most - len(placed) if placed else 0
    owners = [*range(len(samples)), *(i for i, _ in placed), *[0] * num_empty]
    return ForkRows(
        [fork for _, fork in placed] + [NOTHING] * num_empty, np.array(owners, np.int32),
        len(placed), len(forks) - len(placed), int(lengths[order[most:]].sum()),
    )


def of_all_rows(fields: Rows, owners: np.ndarray) -> Rows:
    """Returns reward fields [N,...] of samples for all rows of a batch, and `owner`. Every other row
    has unknown rewards, and is a group of its own."""
    count, group = len(owners) - len(fields["group"]), fields["group"]
    unknown = lambda x: np.full((count, *x.shape[1:]), np.nan, x.dtype)
    rows = {name: np.concatenate([x, unknown(x)]) for name, x in fields.items() if name != "group"}
    own = group.max() + 1 + np.arange(count, dtype=group.dtype)
    return rows | {"group": np.concatenate([group, own]), "owner": owners}


def metrics(rows: ForkRows) -> dict[str, float]:
    """Counts the forks that a batch trains on, those that it leaves out, and their tokens."""
    return {
        "harness/fork_rows": rows.num_placed,
        "harness/left_out_forks": rows.num_left_out,
        "harness/left_out_tokens": rows.num_tokens_left_out,
    }
