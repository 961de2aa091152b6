"""Filtered rollouts and the learner: a ratio of 1 over the kept sets, the kept mass without."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl_tis.build import build
from jaxrl_tis.engine.records import Request, SamplingParams, extended
from jaxrl_tis.learner.batch_layout import Packer, forward_fields, sequence_lengths, trajectory_rows
from jaxrl_tis.learner.scoring import make_score, response_scores
from jaxrl_tis.learner.state import initial_params
from jaxrl_tis.models import transformer
from jaxrl_tis.rollouts.groups import kept_metrics, sampling_params
from jaxrl_tis.rollouts.source import generate
from tests import tiny
from tests.drawn import reference

pytestmark = pytest.mark.compiles
BY_JAX = pytest.mark.by_jax("XLA compiles and rounds the programs")

FILTERED = dict(
    rollout__top_p=0.8, rollout__top_k=9, rollout__sampling_mask_size=9,
    engine__quantization="none",
    rollout__max_new_tokens=6,
)


@functools.cache
def setup(**changes):
    return build(tiny.config(**FILTERED | changes))


@functools.cache
def params():
    return jax.tree.map(lambda x: 1.4 * x, initial_params(setup().training))


@functools.cache
def sampled(**changes):
    made = setup(**changes)
    scheduler = made.scheduler(made.engine, made.engine.load(params()), 0)
    sampling = sampling_params(
        made.config, made.tokenizer, made.config.rollout.temperature, is_filtered=True
    )
    prompts = [np.array(made.tokenizer.encode(text), np.int32) for text in ("1+2=", "7+5=")]
    requests = [Request(f"r{i}", prompts[i % 2], i, sampling) for i in range(16)]
    return generate(scheduler, requests)


def scored(rows, learner=None):
    """logp and entropy [N,T] of rows that hold one sequence each."""
    one = {name: x[None] for name, x in forward_fields(rows).items()}
    found = make_score(learner or setup().training.learner)(params(), one)
    return {name: np.asarray(x[0]) for name, x in found.items()}


def rows_of(trajectories, without=()):
    rows = trajectory_rows(trajectories, setup().training.row_length)
    return {name: x for name, x in rows.items() if name not in without}


@pytest.mark.all
@BY_JAX
def test_the_ratio_is_one_over_the_kept_sets():
    trajectories = sampled()
    rows = rows_of(trajectories)
    found, mask = scored(rows), rows["mask"]
    assert (rows["kept"][mask] >= 0).sum(axis=-1).max() > 3
    np.testing.assert_allclose(np.exp(found["logp"] - rows["logp_behav"])[mask], 1.0, atol=2e-5)
    entropy = np.concatenate([t.entropy for t in trajectories])
    np.testing.assert_allclose(found["entropy"][mask], entropy, atol=2e-5)


@pytest.mark.all
def test_scores_are_centred_over_all_of_a_kept_set():
    """Sampler and learner have the same probabilities of its tokens, which sum to 1."""
    rows = rows_of(sampled(correction__preset="centered", correction__centering="kept"))
    assert rows["top_ids"].shape[-1] == 9
    learner = setup().training.learner
    found = jax.jit(lambda rows: response_scores(params(), learner, rows, False))(rows)
    is_token = rows["mask"][..., None] & (rows["top_ids"] >= 0)
    p, q = (np.where(is_token, np.exp(x), 0) for x in (found["logp_top"], rows["top_logps"]))
    np.testing.assert_allclose(p, q, atol=2e-5)
    np.testing.assert_allclose(p.sum(axis=-1)[rows["mask"]], 1.0, atol=2e-5)


def test_without_them_its_mean_is_the_kept_mass():
    """sum over S of q(a) p(a) / q(a) is p(S), and every draw has the same ratio."""
    rows = rows_of(sampled(), without=("kept",))
    found, mask = scored(rows), rows["mask"]
    ratio = np.exp(found["logp"] - rows["logp_behav"])
    logits = jax.jit(lambda tokens: transformer.logits(params(), setup().model, tokens))(
        rows["tokens"]
    )
    rollout, masses = setup().config.rollout, np.zeros(mask.shape)
    for n, t in zip(*np.nonzero(mask), strict=True):
        plain = SamplingParams(temperature=rollout.temperature)
        filtered = dataclasses.replace(plain, top_k=rollout.top_k, top_p=rollout.top_p)
        p = reference(logits[n, t - 1], plain)
        masses[n, t] = p[reference(logits[n, t - 1], filtered) > 0].sum()
    np.testing.assert_allclose(ratio[mask], masses[mask], atol=2e-5)
    assert masses[mask].mean() < 0.9


@pytest.mark.all
def test_where_a_set_was_too_wide_the_learner_scores_the_whole_vocabulary():
    trajectories = sampled(rollout__sampling_mask_size=2)
    rows = rows_of(trajectories)
    ratio = np.exp(scored(rows)["logp"] - rows["logp_behav"])[rows["mask"]]
    kept = rows["kept"][rows["mask"]]
    is_wide = (kept < 0).all(axis=-1)
    assert 0.1 < is_wide.mean() < 0.9
    np.testing.assert_allclose(ratio[~is_wide], 1.0, atol=2e-5)
    assert (ratio[is_wide] < 0.99).all()
    # The metrics say how many tokens those are, and how far below 1 the mean ratio is.
    found = kept_metrics(trajectories)
    assert found["rollout/kept_overflow"] == is_wide.mean()
    assert found["rollout/kept_overflow_mass"] == pytest.approx(1 - ratio.mean(), abs=1e-5)
    assert kept_metrics(sampled())["rollout/kept_overflow"] == 0
    # Tokens that an environment gave have no support, and none was too wide.
    assert kept_metrics([extended(t, [3, 4]) for t in trajectories]) == found
    bare = [dataclasses.replace(t, kept=np.zeros((len(t.tokens), 0), int)) for t in trajectories]
    assert kept_metrics(bare) == {}


def test_rows_hold_the_sets_at_their_tokens_and_minus_one_elsewhere():
    t = dataclasses.replace(
        sampled()[0], prompt=np.array([1, 2], np.int32), tokens=np.array([4, 5], np.int32),
        kept=np.array([[3, 4, -1], [-1, -1, -1]], np.int32),
        **{name: np.zeros(2, np.float32) for name in ("logp_behav", "entropy")},
        **{name: np.zeros(2, np.int32) for name in ("version", "turn")}, mask=np.ones(2, bool),
    )
    kept = trajectory_rows([t], 5)["kept"]
    nothing = [-1, -1, -1]
    np.testing.assert_array_equal(kept, [[nothing, nothing, [3, 4, -1], nothing, nothing]])


def test_packed_rows_score_the_same():
    rows = rows_of(sampled())
    packer = Packer.of(128, setup().training.row_length, 2, 1)
    packing = packer.plan(sequence_lengths(rows))
    packed = packing.pack(forward_fields(rows))
    learner = dataclasses.replace(setup().training.learner, max_targets=128, max_segments=64)
    found = make_score(learner)(params(), packed)
    logp = packing.unpack(np.asarray(found["logp"]), setup().training.row_length)
    np.testing.assert_allclose(logp, scored(rows)["logp"], atol=2e-5)


def test_a_gathered_response_scores_as_a_whole_row():
    rows = rows_of(sampled())
    whole = dataclasses.replace(setup().training.learner, max_targets=1000)
    assert setup().training.learner.max_targets < setup().training.row_length - 1
    np.testing.assert_allclose(scored(rows, whole)["logp"], scored(rows)["logp"], atol=2e-5)


@pytest.mark.all
def test_a_run_on_kept_sets_measures_no_gap(tmp_path):
    tiny.run(
        tmp_path, steps=1, rollout__top_p=0.8, rollout__sampling_mask_size=16,
        engine__quantization="none",
        correction__kl_coeff=0.1, train__epochs=1, train__minibatches=1,
    )
    [record] = [line for line in tiny.lines(tmp_path) if line["phase"] == "train"]
    assert record["rollout/kept_overflow"] == record["rollout/kept_overflow_mass"] == 0
    assert record["training/rollout_probs_diff_max"] < 1e-4
    # The reference is scored over the same sets, and is still equal to the policy.
    assert abs(record["actor/kl_to_reference"]) < 1e-5
