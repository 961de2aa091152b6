"""The batches on which make_golden_verl.py runs verl: six rows of six tokens each.

All inputs have few decimals, so that float32 and float64 hold the same numbers and the file that
keeps them stays small. Every batch but "lone" has 17 valid tokens: 17 / 16 is exact in float32, in
which verl takes the Bessel correction of its whitening even when it runs in float64.

  random     normal drifts, ragged rows with holes and a late start, groups of 3, 2 and 1
  empty_row  the same with a row without valid tokens and two of one token
  extreme    log-ratios beyond +-20, of both signs within one row
  ties       bounds hit exactly: ratio 1, log-ratio +-20, mean 10, statistics at their thresholds
  lone       a single valid token
"""

import numpy as np

NUM_TOKENS = 6

MASKS = {
    "random": [
        [1, 1, 1, 1, 1, 1],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [1, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 0],
    ],
    "empty_row": [
        [1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 0, 0, 0, 0, 0],
    ],
    "lone": [[0] * 6, [0, 0, 1, 0, 0, 0]] + [[0] * 6] * 4,
}
for name in ("extreme", "ties"):
    MASKS[name] = [[1] * n + [0] * (NUM_TOKENS - n) for n in (6, 4, 3, 2, 1, 1)]

GROUPS = {
    "random": [7, 3, 7, 7, 3, 5],
    "empty_row": [0, 0, 1, 1, 1, 2],
    "extreme": [4, 4, 4, 9, 9, 9],
    "ties": [2, 2, 1, 1, 1, 1],
    "lone": [0] * 6,
}
PAIRS = [0, 1, 1, 0, 2, 2]  # pass@k needs two samples per group

# log-ratios logp_old - logp_behav (the engine) and logp - logp_old (the staleness), row by row
LOG_RATIOS = {
    "extreme": (
        [
            [30, -25, 0.1, -0.2, 0.3, 0.05],
            [-30, 1, 2, -0.5],
            [60, -60, 0],
            [21, -20.5],
            [-45],
            [50],
        ],
        [
            [25, -25, 0.5, -0.5, 0.1, -0.1],
            [-22, 0.2, 30, -3],
            [5, -5, 0.3],
            [40, -45],
            [33],
            [-28],
        ],
    ),
    "ties": (
        [
            [0, 1, -1, 0.5, -0.5, 0],
            [0.5, 0.5, -1, 1],
            [-0.5, -0.25, -0.25],
            [1, 1],
            [-1],
            [20],
        ],
        [
            [0, 20, -20, 0.5, -0.5, 0],
            [0, 0, 0, 0],
            [0.5, -0.5, 0],
            [20, 0],
            [-20],
            [10],
        ],
    ),
}
TIE_ADVANTAGES = [
    [1, 1, 1, 0.5, -0.5, -1],
    [1, -1, 0.5, 0],
    [-0.5, 1, -1],
    [-1, -0.5],
    [1],
    [-0.25],
]
TIE_KL = [[0, 0.5, -0.5, 20, -20, 0], [1, -1, 0, 0], [0, 0, 2], [25, -25], [0], [-0.125]]


def _padded(rows):
    return np.array([list(row) + [0.0] * (NUM_TOKENS - len(row)) for row in rows], np.float64)


def random_batch(seed, mask, group):
    """Small drifts; rewards on the last valid token and, in every other row, on the first."""
    rng = np.random.default_rng(seed)
    mask = np.array(mask)
    shape = mask.shape
    logp_behav = -rng.exponential(1.0, shape) - 0.01
    logp_old = np.minimum(logp_behav + 0.5 * rng.normal(size=shape), -0.005)
    rewards = np.zeros(shape)
    for row in range(shape[0]):
        valid = np.flatnonzero(mask[row])
        if valid.size:
            rewards[row, valid[-1]] += rng.integers(0, 5) / 2
            rewards[row, valid[0]] += (row % 2) * 0.25
    p = np.exp(logp_old)
    batch = {
        "logp_behav": logp_behav,
        "logp_old": logp_old,
        "logp": np.minimum(logp_old + 0.6 * rng.normal(size=shape), -0.002),
        "logp_ref": logp_old + 0.5 * rng.normal(size=shape),
        "adv": rng.normal(size=shape),
        "rewards": rewards,
        "values": rng.normal(size=shape),
        "values_old": rng.normal(size=shape),
        "returns": rng.normal(size=shape),
        "weights": 0.1 + rng.exponential(1.0, shape),
        "sum_pi_squared": p**2 + 0.3 * (1 - p) ** 2 + 0.001,
        "greedy_rewards": rng.normal(size=shape[0]),
        "reward_components": rng.integers(0, 9, (shape[0], 2)) / 4,
    }
    batch = {key: np.round(x, 3) for key, x in batch.items()}
    return batch | {"mask": mask, "group": np.array(group)}


def with_log_ratios(batch, name):
    """The batch with log-probs below 0 that have the log-ratios of LOG_RATIOS[name]."""
    engine, staleness = (_padded(rows) for rows in LOG_RATIOS[name])
    logp_old = np.minimum(np.minimum(engine, -staleness), 0.0) - 1.0
    batch = batch | {
        "logp_behav": np.round(logp_old - engine, 3),
        "logp_old": logp_old,
        "logp": np.round(logp_old + staleness, 3),
    }
    if name == "ties":
        batch |= {"adv": _padded(TIE_ADVANTAGES), "logp_ref": batch["logp"] - _padded(TIE_KL)}
    return batch


BATCHES = {
    name: random_batch(seed, MASKS[name], GROUPS[name])
    for seed, name in enumerate(("random", "empty_row", "extreme", "ties", "lone"))
}
for name in LOG_RATIOS:
    BATCHES[name] = with_log_ratios(BATCHES[name], name)
