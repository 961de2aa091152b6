"""Dumps for tests."""

import json
import pathlib

import numpy as np

TRL = pathlib.Path(__file__).parent / "trl.npz"  # written by benchmarks/audit_trl.py
LENGTHS = (5, 2, 1, 7, 3, 4)
GAPS = (2.0, 1.0, 0.0, 2.0, 1.0, 0.1)  # of the sequences, so that each rule does something else


def records(seed=0, lengths=LENGTHS, gap=0.6):
    """Sequences with every column but `top`; some tokens are masked."""
    rng, found = np.random.default_rng(seed), []
    for i, n in enumerate(lengths):
        old = -rng.exponential(1.0, n) - 0.5
        size = gap * GAPS[i % len(GAPS)]
        near = lambda size, old=old, n=n: np.minimum(
            old + size * rng.standard_normal(n), 0.0).tolist()
        mask = [1] * n
        if n > 4:
            mask[2] = 0
        found.append({
            "logp_behav": near(size), "logp_old": old.tolist(), "logp": near(0.5 * gap), "mask": mask,
            "reward": float(rng.integers(0, 3)), "group": f"q{i // 2}", "version": 9 - 5 * (i % 2),
            "turn": [int(t > 2) for t in range(n)], "position": list(range(10, 10 + n)),
        })
    return found


def only(lines, *columns):
    return [{name: line[name] for name in columns} for line in lines]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)
