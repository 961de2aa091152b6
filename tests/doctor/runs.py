"""Synthetic records for the tests of the doctor."""

import json

from configs import default
from jaxrl_tis.doctor.asynchrony import ENGINE_GAP, MEAN_LAG, STALENESS_GAP
from jaxrl_tis.doctor.case import (
    CHI2, CHI2_SEQ, CLIPPED, DP_MAX, ESS, IS_VALID, K3, KL, LENGTH, MEAN_GAP, PEARSON, PPL, PPO_KL, TV,
)
from jaxrl_tis.estimators.counts import labels
from jaxrl_tis.learner import correction
from jaxrl_tis.record import metrics

HEALTHY = {
    PEARSON: 0.995, DP_MAX: 0.3, KL: 0.01, K3: 0.01, PPL: 1.01, CHI2: 0.05, CHI2_SEQ: 0.5,
    ESS: 0.95, MEAN_GAP: 0.002, CLIPPED: 0.01, PPO_KL: 0.001, LENGTH: 100.0,
    IS_VALID: 1.0, TV: 0.02,
    # The lag changes with every step, the engine's gap with every second: no correlation.
    ENGINE_GAP: lambda step: 0.01 + 0.001 * (step // 2 % 2), STALENESS_GAP: 0.01,
    MEAN_LAG: lambda step: step % 2,
}
PLAIN = {"engine.quantization": "none", "task.tokenizer": "char"}


def late(before, after):
    """A metric that changes with the judged window."""
    return lambda step: before if step <= 100 else after


def config_of(changes):
    """The default config with the fields of `changes`, named with dots."""
    config = default.get_config()
    config.update_from_flattened_dict(PLAIN | changes)
    return config


def acting(config):
    """The counts of a config's weight and masks: of 1,000 tokens each takes 10."""
    chosen = correction.parse(config.correction)
    names = [f"mask/{label}" for label in labels([name for name, _ in chosen.masks])]
    found = {f"correction/{name}/{count}": n for name in (*names, "weight")
             for count, n in (("num_tokens", 1000), ("dropped", 10))}
    return found | {"correction/weight/changed": 900, "correction/weight/truncated": 0}


def write_run(path, values=(), changes=(), steps=120):
    """A workdir whose metrics are HEALTHY, and whose config the default one, but for the changes;
    a value may be a function of the step, and None leaves the metric out."""
    config = config_of(dict(changes))
    recorded = HEALTHY | acting(config) | dict(values)
    with open(path / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            now = {name: v(step) if callable(v) else v for name, v in recorded.items()}
            now = {name: value for name, value in now.items() if value is not None}
            file.write(metrics.encode(step, "train", now) + "\n")
    (path / "config.json").write_text(json.dumps({"config": config.to_dict()}), encoding="utf-8")
    return path


def names(findings):
    return {finding["name"] for finding in findings}
