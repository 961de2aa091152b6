"""A run in invariant numerics: what the learner scores is what the sampler recorded."""

from unittest import mock

import numpy as np
import pytest

from jaxrl_tis import train
from tests import tiny

pytestmark = [
    pytest.mark.all,
    pytest.mark.compiles,
    pytest.mark.by_jax("a run: flax, optax, orbax and XLA together"),
]

INVARIANT = dict(
    model__numerics="invariant", model__dtype="bfloat16", engine__dtype="bfloat16",
    engine__cache_dtype="bfloat16", engine__quantization="none", rollout__top_k=5,
    rollout__sampling_mask_size=5, steps=2, warmup__steps=0, train__epochs=1,
)


def scored_rows(tmp_path, **overrides):
    """What the trainer scored at every step."""
    found, score = [], tiny._trainer.score

    def recorded(*args):
        found.append(score(*args))
        return found[-1]

    with (
        mock.patch.object(tiny._trainer, "score", recorded),
        mock.patch.object(train.Run, "evaluate"),
    ):
        tiny.run(tmp_path, **overrides)
    return found


def test_at_the_weights_that_sampled_every_ratio_is_1(tmp_path):
    steps = scored_rows(tmp_path, **INVARIANT)
    assert len(steps) == 2
    for rows in steps:
        mask = rows["mask"]
        assert mask.any() and (rows["kept"][mask] >= 0).any()
        np.testing.assert_array_equal(rows["logp_old"][mask], rows["logp_behav"][mask])
    for r in tiny.lines(tmp_path):
        assert r["training/rollout_probs_diff_max"] == r["rollout_corr/k3_kl"] == 0
        assert r["rollout_corr/rollout_is_min"] == r["rollout_corr/rollout_is_max"] == 1
        assert r["actor/grad_norm"] > 0
