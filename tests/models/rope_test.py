"""Frequencies by hand, and against those transformers computes (make_golden.py)."""

import json
import math
import pathlib

import numpy as np
import pytest

from jaxrl_tis.models.config import ModelConfig, RopeConfig
from jaxrl_tis.models.rope import rope_frequencies

pytestmark = pytest.mark.by_jax("XLA compiles and rounds the programs")

RECORDS = json.loads((pathlib.Path(__file__).parent / "golden" / "rope.json").read_text())


def test_default_frequencies_are_a_geometric_sequence():
    inv_freq, scale = rope_frequencies(RopeConfig(kind="default", theta=10000.0), 8)
    # 10000^(-2i/8) for i = 0..3.
    np.testing.assert_allclose(inv_freq, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
    assert (inv_freq.dtype, scale) == (np.float32, 1.0)


def test_llama3_keeps_fast_blends_middle_divides_slow():
    # Base 1, 0.1, 0.01, 0.001 over 188 tokens makes 29.9, 2.992113, 0.299, 0.03 turns. More than
    # 4 are kept, fewer than 1 divided by 10; 2.992113 blend with weight 1.992113 / 3 = 0.664038:
    # 0.1 * (0.664038 + 0.335962 / 10) = 0.0697634.
    rope = RopeConfig(kind="llama3", theta=10000.0, factor=10.0, low_freq_factor=1.0,
                      high_freq_factor=4.0, original_max_position=188)
    inv_freq, _ = rope_frequencies(rope, 8)
    np.testing.assert_allclose(inv_freq, [1.0, 0.0697634, 0.001, 0.0001], rtol=2e-6)


def test_yarn_attention_scale():
    rope = dict(kind="yarn", theta=10000.0, factor=math.e**2, original_max_position=64)
    scale = lambda **fields: rope_frequencies(RopeConfig(**rope, **fields), 8)[1]
    assert scale() == pytest.approx(1.2)  # 0.1 * 2 + 1
    assert scale(attention_factor=0.5) == 0.5
    assert scale(mscale=2.0, mscale_all_dim=1.0) == pytest.approx(1.4 / 1.2)
    assert scale(mscale=2.0) == pytest.approx(1.2)  # needs both


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r["config"]["rope_scaling"]["rope_type"])
def test_frequencies_agree_with_transformers(record):
    config = ModelConfig.from_hf(record["config"])
    inv_freq, scale = rope_frequencies(config.rope, config.rope.rotary_dim(config.head_dim))
    np.testing.assert_allclose(inv_freq, record["inv_freq"], rtol=2e-6)
    assert scale == pytest.approx(record["attention_scale"], rel=1e-12)
