"""Rollouts that dropped keys, and a learner that attends to what they kept."""

import functools

import jax
import numpy as np
import pytest

from jaxrl_tis.build import build
from jaxrl_tis.engine.block_manager import KVEviction
from jaxrl_tis.engine.records import NEVER, Request
from jaxrl_tis.learner.batch_layout import forward_fields
from jaxrl_tis.learner.scoring import make_score
from jaxrl_tis.learner.state import initial_params
from jaxrl_tis.rollouts.groups import sampling_params
from jaxrl_tis.rollouts.source import generate
from tests import tiny

pytestmark = pytest.mark.compiles
BY_JAX = pytest.mark.by_jax("XLA compiles and rounds the programs")

DROPPED = dict(
    engine__retention=(1, 1), engine__page_size=2, engine__quantization="none",
    rollout__max_new_tokens=12, train__pack_length=40,
)


@functools.cache
def setup():
    return build(tiny.config(**DROPPED))


@functools.cache
def params():
    return jax.tree.map(lambda x: 1.4 * x, initial_params(setup().training))


@functools.cache
def sampled():
    made = setup()
    scheduler = made.scheduler(made.engine, made.engine.load(params()), 0)
    sampling = sampling_params(made.config, made.tokenizer, 1.0, is_filtered=True)
    prompts = [np.array(made.tokenizer.encode(text), np.int32) for text in ("1+2=", "7+5=")]
    return generate(scheduler, [Request(f"r{i}", prompts[i % 2], i, sampling) for i in range(16)])


def scored(rows):
    one = {name: x[None] for name, x in forward_fields(rows).items()}
    return np.asarray(make_score(setup().training.learner)(params(), one)["logp"][0])


@BY_JAX
def test_the_learner_that_drops_the_same_keys_agrees():
    rows = setup().training.rows(sampled())
    dropped = sum(np.any(t.evict_step < NEVER) for t in sampled())
    assert 4 <= dropped and any(not len(t.evict_step) for t in sampled())
    mask = rows["mask"]
    np.testing.assert_allclose(scored(rows)[mask], rows["logp_behav"][mask], atol=2e-5)
    whole = {name: x for name, x in rows.items() if name != "evict_step"}
    gap = np.abs(scored(whole) - rows["logp_behav"])[mask]
    assert gap.max() > 0.01 and np.mean(gap > 1e-3) > 0.1


def test_packed_rows_drop_them_too():
    made = setup()
    rows = made.training.rows(sampled())
    micro, flat = made.training.micro_batches(rows)
    assert micro["evict_step"].shape == micro["tokens"].shape == (1, 4, 128)
    found = flat(make_score(made.training.update_learner)(params(), micro)["logp"])
    mask = rows["mask"]
    np.testing.assert_allclose(found[mask], rows["logp_behav"][mask], atol=2e-5)


def test_evaluation_keeps_all_keys():
    made = setup()
    assert made.retention == KVEviction(1, 1)
    scheduler = made.scheduler(made.learner_engine, made.learner_engine.load(params()), 0)
    sampling = sampling_params(made.config, made.tokenizer, 1.0, is_filtered=True)
    prompt = np.array(made.tokenizer.encode("1+2="), np.int32)
    found = generate(scheduler, [Request(f"r{i}", prompt, i, sampling) for i in range(8)])
    assert max(len(t.tokens) for t in found) > 6 and not any(len(t.evict_step) for t in found)


@pytest.mark.all
def test_the_run_measures_no_gap(tmp_path):
    """Sampled, scored and updated in packed rows, and the dense policy pulled to what was seen."""
    tiny.run(
        tmp_path / "dropped", steps=1, warmup__steps=0, correction__dense_kl_coeff=0.1, **DROPPED
    )
    (record,) = (r for r in tiny.lines(tmp_path / "dropped") if "rollout/occupancy" in r)
    assert record["rollout/evicted"] > 0
    assert record["mismatch/log_ratio_abs_max"] < 1e-4
    assert record["actor/dense_kl_loss"] > 0
