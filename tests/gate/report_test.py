"""The gap of sampler and learner at the same weights, found, attributed and refused."""

import dataclasses
import contextlib
import functools
import itertools
import json
import pathlib
import re
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import build, train
from jaxrl_tis.data.tokenizer_files import load_tokenizer
from jaxrl_tis.engine import cache
from jaxrl_tis.gate import ladder, pages, report
from jaxrl_tis.kernels import tiles
from jaxrl_tis.learner.batch_layout import trajectory_rows
from jaxrl_tis.learner.scoring import make_logits, make_score
from jaxrl_tis.learner.setup import LearnerSetup
from jaxrl_tis.learner.state import initial_params
from jaxrl_tis.learner.trainer import Trainer
from jaxrl_tis.models import attention
from jaxrl_tis.rollouts.groups import Sample
from jaxrl_tis.runtime import cli
from jaxrl_tis.runtime.cli import MismatchError
from jaxrl_tis.validate import validate
from tests import commands, tiny
from tests.gate import noisy

pytestmark = pytest.mark.compiles
BY_JAX = pytest.mark.by_jax("XLA compiles and rounds the programs")

ROOT = pathlib.Path(__file__).parents[2]
SAME = dict(engine__quantization="none")
BFLOAT16 = dict(engine__dtype="bfloat16", engine__cache_dtype="bfloat16")
ROUTED = SAME | dict(
    model__num_layers=2, model__num_experts=6, model__expert_dim=16, engine__record_routes=True
)
FILTERED = dict(rollout__top_k=4, rollout__top_p=0.9, rollout__allow_filter_bias=True)


def even_setup(**overrides):
    """The tiny setup with a vocabulary that two devices can share."""
    config = tiny.config(**overrides)
    tokenizer = load_tokenizer("char")
    size = tokenizer.vocab_size + tokenizer.vocab_size % 2
    with tiny.one_device():
        choices = validate(config)
        return build.assemble(config, choices, build.small_model(config, size), tokenizer)


@pytest.fixture(autouse=True)
def _scores(monkeypatch):
    """Programs of learner and sampler are traced once; see `wrong_attention`."""
    monkeypatch.setattr(ladder, "make_score", make_score)
    monkeypatch.setattr(pages, "Engine", shared_engine)


make_score, shared_engine = functools.cache(make_score), functools.cache(pages.Engine)


def wrong_attention(monkeypatch, attend):
    """Traces with `attend(right, *arguments)` in place of the attention of rows."""
    monkeypatch.setattr(ladder, "make_score", make_score.__wrapped__)
    monkeypatch.setattr(
        attention, "row_attention", functools.partial(attend, attention.row_attention)
    )


@pytest.fixture(scope="module")
def sampled():
    """(overrides) -> (setup, parameters, trajectories)."""
    found = {}

    def get(**overrides):
        key = json.dumps(overrides, sort_keys=True)
        if key not in found:
            make = even_setup if "mesh__serve" in overrides else tiny.setup
            setup = make(**overrides)
            params = initial_params(setup.training)
            found[key] = setup, params, report.sample(setup, params, 4)
        return found[key]

    return get


def climbed(sampled, **overrides):
    setup, params, trajectories = sampled(**overrides)
    rungs = ladder.climb(setup, params, trajectories)
    return rungs, trajectory_rows(trajectories, setup.training.row_length)


def differing(rungs):
    return [r.cause for r in rungs if not r.is_same]


@pytest.mark.all
@BY_JAX
def test_the_same_engine_agrees_to_the_noise_of_float32(sampled):
    result = report.gap_report(*sampled(**SAME))
    assert 0 < result["total"]["d_max"] < 2e-5 and result["total"]["pearson"] > 0.999999
    assert result["exceeded"] == [] and result["largest"] in ("pages", "decode")
    assert [r["cause"] for r in result["rungs"] if not r["is_same"]] == ["batch_shape", "pages", "decode"]
    assert result["inside_support"] is None


@pytest.mark.all
@BY_JAX
def test_whole_episodes_are_sampled_where_there_is_an_environment(sampled):
    """Observations are no tokens of the policy, and the learner scores all turns."""
    setup, params, episodes = sampled(**SAME, **tiny.EPISODES)
    assert all(t.outcome for t in episodes)
    assert max(t.num_turns for t in episodes) > 1 and not all(t.mask.all() for t in episodes)
    result = report.gap_report(setup, params, episodes)
    assert result["tokens"] == sum(t.mask.sum() for t in episodes)
    assert 0 < result["total"]["d_max"] < 2e-5


@BY_JAX
def test_a_quantised_sampler_is_told_by_its_rungs(sampled):
    result = report.gap_report(*sampled())
    by_cause = {r["cause"]: r for r in result["rungs"]}
    assert result["largest"] in ("weights", "activations")
    smallest = min(by_cause[c]["d_mean"] for c in ("weights", "activations"))
    assert smallest > 1e-3 and by_cause["decode"]["d_mean"] < 0.02 * smallest
    assert all(by_cause[c]["is_same"] for c in ("dtype", "tensor_parallel", "kv_dtype", "filter"))


@pytest.mark.all
@BY_JAX
def test_experts_in_4_bits_are_the_rung_of_weights(sampled):
    """And of none where the learner computes with them too."""
    experts = dict(model__num_experts=4, model__experts_per_token=2, model__expert_dim=32)
    overrides = dict(engine__quantization="mxfp4", engine__record_routes=True, **experts)
    for learner, causes in (("none", ["batch_shape", "weights", "route", "decode"]),
                            ("mxfp4", ["batch_shape", "route", "decode"])):
        result = report.gap_report(*sampled(**overrides, model__quantization=learner))
        by_cause = {r["cause"]: r for r in result["rungs"]}
        assert [cause for cause, r in by_cause.items() if not r["is_same"]] == causes
        assert by_cause["decode"]["d_max"] < 2e-5
        assert result["total"]["d_mean"] > 1e-3 if learner == "none" else result["total"]["d_max"] < 2e-5
    assert by_cause["weights"]["is_same"]


@pytest.mark.all
@BY_JAX
def test_numerics_of_the_sampler_alone_are_the_whole_gap_of_two_programs(sampled):
    """A learner with fast numerics, a sampler with invariant ones: nothing is left for `decode`."""
    result = report.gap_report(*sampled(**SAME, engine__numerics="invariant", engine__page_size=tiles.PAGE))
    by_cause = {r["cause"]: r for r in result["rungs"]}
    assert 0 < by_cause["numerics"]["d_max"] < 2e-5
    assert by_cause["pages"]["d_max"] == by_cause["decode"]["d_max"] == 0


@pytest.mark.all
@pytest.mark.cases("overrides0-causes0", "overrides1-causes1")
@pytest.mark.parametrize("overrides, causes", [
    ({}, ["batch_shape", "weights", "activations", "pages", "decode"]),
    (dict(engine__quantization="w8a16", engine__cache_dtype="int8"),
     ["batch_shape", "weights", "kv_dtype", "pages", "decode"]),
    (dict(**BFLOAT16, **FILTERED),
     ["dtype", "excess_precision", "batch_shape", "weights", "activations", "pages",
      "decode", "filter"]),
    (dict(model__quantization="w8a8", model__unquantized=("down",), train__pack_length=16),
     ["batch_shape", "weights", "pages", "decode"]),
])
def test_the_rungs_add_up_to_the_gap_and_none_is_empty(sampled, overrides, causes):
    rungs, rows = climbed(sampled, **overrides)
    assert differing(rungs) == causes
    setup, params, trajectories = sampled(**overrides)
    samples = [Sample(t, {}, "", 0.0, 0.0, 0) for t in trajectories]
    with tiny.one_device():
        state = {"policy": mock.Mock(params=params)}
        learner = Trainer(setup.training).score(state, samples, {0: params})["logp_old"]
    np.testing.assert_array_equal(rungs[0].before, learner)
    gap = learner.astype(np.float64) - rows["logp_behav"]
    np.testing.assert_array_equal(sum(r.difference for r in rungs), gap)
    assert np.abs(gap[rows["mask"]]).max() > 1e-4
    for r in rungs:
        is_empty = not r.difference[rows["mask"]].any()
        # Products this small round alike in batches of any size.
        assert r.is_same == is_empty or r.cause == "batch_shape" and is_empty, r.cause


def test_each_pair_of_programs_differs_in_what_its_rung_says():
    """Of a sampler that differs in everything; no program runs."""
    setup = even_setup(
        **BFLOAT16 | dict(engine__cache_dtype="int8"), mesh__serve=(1, 1, 2),
        mesh__train=(1, 1, 1, 2), model__num_kv_heads=2, model__num_heads=4,
        model__num_experts=4, model__expert_dim=16, engine__record_routes=True,
    )
    # Such a sampler cannot be built: it needs keys in its own dtype.
    setup.engine.config = dataclasses.replace(setup.engine.config, numerics="invariant")
    used = []
    score = lambda setup, settings, params, micro: used.append(settings) or micro["mask"]
    nothing = {"mask": np.zeros((1, 8)), "logp_behav": np.zeros((1, 8))}
    with (
        mock.patch.object(ladder, "score", score),
        mock.patch.object(LearnerSetup, "rows", lambda *_: nothing),
        mock.patch.object(LearnerSetup, "micro_batches", lambda self, rows: (rows, lambda x: x)),
    ):
        causes = [r.cause for r in ladder.climb(setup, None, [])][1:-4]
    fields = [f.name for f in dataclasses.fields(ladder.Settings)]
    changed = [
        [f for f in fields if getattr(a, f) != getattr(b, f)] for a, b in itertools.pairwise(used)
    ]
    assert dict(zip(causes, changed, strict=True)) == {
        "dtype": ["dtype", "norm_dtype"], "excess_precision": ["excess_precision"],
        "batch_shape": ["rows"],
        "sequence_parallel": ["layout"], "tensor_parallel": ["layout"],
        "weights": ["quantization"], "activations": ["quantization"], "kv_dtype": ["kv_dtype"],
        "numerics": ["numerics"], "route": ["replays"],
    }
    assert used[0] == ladder.learner_settings(setup)
    meshes = [tuple(settings.layout.mesh.shape.values()) for settings in used]
    assert meshes == [(1, 1, 1, 2, 1)] * 4 + [(1, 1, 1, 1, 1)] + [(1, 1, 2, 1, 1)] * 6
    assert [settings.replays for settings in used] == [False] * 10 + [True]


def meshes_of(**meshes):
    """The meshes of `sequence_parallel` and `tensor_parallel`, and their devices."""
    setup = even_setup(**ROUTED | dict(model__num_experts=8, model__num_kv_heads=2), **meshes)
    layouts = [ladder.changes(setup)[f"{kind}_parallel"]["layout"] for kind in ("sequence", "tensor")]
    shape = lambda layout: tuple(layout.mesh.shape.values())
    return [(shape(layout), [d.id for d in layout.mesh.devices.flat]) for layout in layouts]


def test_whole_rows_keep_the_devices_of_the_experts():
    assert meshes_of(mesh__train=(1, 1, 1, 2, 2), mesh__serve=(1, 1, 2, 1, 2)) == [
        ((1, 1, 1, 1, 2), [0, 1]), ((1, 1, 2, 1, 2), [0, 1, 2, 3])
    ]
    assert meshes_of(mesh__train=(1, 2, 1, 2, 2), mesh__serve=(1, 1, 1, 1, 4)) == [
        ((1, 2, 1, 1, 2), [0, 1, 4, 5])
    ] * 2


@pytest.mark.all
def test_rows_and_heads_that_are_cut_have_rungs_of_their_own(monkeypatch):
    """A fault in the attention of cut rows is found in the rung where they become whole."""
    setup = even_setup(
        **SAME, mesh__serve=(1, 1, 2), mesh__train=(1, 1, 1, 2), model__num_kv_heads=2
    )
    params = initial_params(setup.training)
    trajectories = report.sample(setup, params, 4)

    def wrong(right, q, k, v, segment_ids, layout, *others):
        is_cut = layout.mesh.shape["context"] > 1
        return right(q, k, v, segment_ids, layout, *others) * (1.01 if is_cut else 1.0)

    wrong_attention(monkeypatch, wrong)
    rungs = {r.cause: r for r in ladder.climb(setup, params, trajectories) if not r.is_same}
    assert list(rungs) == ["batch_shape", "sequence_parallel", "tensor_parallel", "pages", "decode"]
    del rungs["batch_shape"]  # both its programs have the fault
    cut, *rest = (np.abs(r.difference).max() for r in rungs.values())
    assert cut > 1e-4 and 0 < min(rest) and max(rest) < 1e-5


def test_what_depends_on_the_batch_has_a_rung_of_its_own(sampled, monkeypatch):
    setup, params, trajectories = sampled(**SAME)

    def wrong(right, q, *others):
        return right(q, *others) * (1.01 if len(q) > 1 else 1.0)

    wrong_attention(monkeypatch, wrong)
    rungs = {r.cause: r for r in ladder.climb(setup, params, trajectories) if not r.is_same}
    assert list(rungs) == ["batch_shape", "pages", "decode"]
    batch_shape, *rest = (np.abs(r.difference).max() for r in rungs.values())
    assert batch_shape > 1e-4 and max(rest) < 1e-5


def test_float32_has_no_excess_precision(sampled):
    setup, params, trajectories = sampled(**SAME)
    training = setup.training
    micro, _ = training.micro_batches(trajectory_rows(trajectories, training.row_length))
    settings = ladder.learner_settings(setup)
    rounded = dataclasses.replace(settings, excess_precision=False)
    assert settings.excess_precision
    np.testing.assert_array_equal(*(
        ladder.score(setup, s, params, micro) for s in (settings, rounded)
    ))


@pytest.mark.all
def test_all_rungs_together_stand_where_the_sampler_does(sampled):
    """Rows in the sampler's settings and the engine differ by less than any setting does: by the
    noise of float32, and where that by chance carries a key over a half step, by one code."""
    overrides = dict(engine__quantization="w8a16", engine__cache_dtype="int8")
    rungs, rows = climbed(sampled, **overrides)
    mean = {r.cause: np.abs(r.difference[rows["mask"]]).mean() for r in rungs}
    assert max(mean["pages"], mean["decode"]) < 0.01 * min(mean["weights"], mean["kv_dtype"])


def test_a_float_cache_of_fewer_bits_is_seen(sampled):
    """bfloat16 keys and values under float32 products."""
    rungs, _ = climbed(sampled, **SAME, engine__cache_dtype="bfloat16")
    rungs = {r.cause: r for r in rungs}
    kv, *rest = (np.abs(rungs[c].difference).max() for c in ("kv_dtype", "pages", "decode"))
    assert kv > 1e-5 and max(rest) < 0.1 * kv


@pytest.mark.all
def test_pages_chunks_and_single_tokens_have_a_rung_each(monkeypatch):
    """A fault in the attention of a prefill, of chunks after the first, or of single tokens; at a
    temperature and in chunks of two pages, of which the last one is cut."""
    monkeypatch.setattr(pages, "Engine", shared_engine.__wrapped__)
    fill, append = cache.fill, cache.append
    where = {
        "pages": lambda starts: 1.01, "chunks": lambda starts: jnp.where(starts > 0, 1.01, 1.0),
        "decode": lambda starts: 1.0,
    }
    for rows, (fault, factor) in enumerate(({"none": where["decode"]} | where).items(), 3):

        def wrong_fill(starts, *others, factor=factor):
            attend = fill(starts, *others)
            scale = jnp.broadcast_to(factor(starts), starts.shape)[:, None, None, None]
            return lambda q, *rest: attend(q * scale, *rest)

        def wrong_append(*others, size=1.01 if fault == "decode" else 1.0):
            attend = append(*others)
            return lambda q, *rest: attend(q * size, *rest)

        monkeypatch.setattr(cache, "fill", wrong_fill)
        monkeypatch.setattr(cache, "append", wrong_append)
        setup = tiny.setup(
            **SAME, rollout__temperature=0.7, engine__page_size=2, engine__prefill_chunk=4,
            engine__prefill_batch=rows,  # engines of equal sizes are traced once
        )
        params = initial_params(setup.training)
        rungs = ladder.climb(setup, params, report.sample(setup, params, 4))
        sizes = {r.cause: np.abs(r.difference).max() for r in rungs if not r.is_same}
        assert list(sizes) == ["batch_shape", "pages", "chunks", "decode"]
        large = {cause for cause, size in sizes.items() if size > 1e-4}
        # Prefilled answers have the fault of a prefill, and single tokens do not.
        expected = {"none": set(), "decode": {"decode"}}.get(fault, {fault, "decode"})
        assert large == expected, (fault, sizes)
        assert max(size for cause, size in sizes.items() if cause not in large) < 1e-5, sizes


@pytest.mark.all
def test_noise_on_the_samplers_weights_is_seen_as_large_as_it_is(sampled):
    """No setting explains it, so that it stands with the engine."""
    setup, params, _ = sampled(**SAME)
    found = []
    for noise in (0.001, 0.01, 0.1):
        result = report.gap_report(setup, params, noisy.sample(noise, setup, params, 4))
        assert result["largest"] == "decode"  # the weights without noise are prefilled
        assert bool(result["exceeded"]) == (noise == 0.1)
        found.append(result["total"])
    for name in report.MEASURES:
        values = [total[name] for total in found]
        assert values == sorted(values)
    # To first order d is linear in the noise, and k3 square.
    ratio = lambda name: found[1][name] / found[0][name]
    assert 7 < ratio("d_mean") < 14 and 60 < ratio("k3") < 160


def with_first_logp(trajectories, value):
    first, *rest = trajectories
    logp = first.logp_behav.copy()
    logp[0] = value
    return [dataclasses.replace(first, logp_behav=logp), *rest]


def test_a_wrong_log_prob_is_found_and_refused(sampled):
    setup, params, trajectories = sampled(**SAME)
    wrong = with_first_logp(trajectories, trajectories[0].logp_behav[0] - 1)
    result = report.gap_report(setup, params, wrong)
    assert result["total"]["d_max"] == pytest.approx(1.0, abs=1e-4)
    # k3 of one of n tokens is exp(1) - 1 - 1
    assert result["total"]["k3"] == pytest.approx((np.e - 2) / result["tokens"], rel=1e-3)
    assert result["largest"] == "decode" and "k3" in result["exceeded"]


def bounded_k3(setup, bound):
    """The setup with this bound of the gate and no other."""
    config = setup.config.copy_and_resolve_references()
    for name in report.MEASURES:
        config.gate[f"max_{name}"] = bound if name == "k3" else np.inf
    return dataclasses.replace(setup, config=config)


def no_number(literal):
    raise AssertionError(f"{literal} is not a number of JSON")


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_a_gap_that_is_no_number_is_the_largest_and_within_no_bound(sampled, value):
    setup, params, trajectories = sampled(**SAME)
    records = with_first_logp(trajectories, value)
    result = report.gap_report(bounded_k3(setup, 1e9), params, records)
    assert result["exceeded"] == ["k3"] and result["budgets"] == {"k3": 1e9}
    assert result["largest"] == "decode"  # batch_shape, before it, is finite
    assert result["non_finite"] == {"learner": 0, "sampler": 1}
    assert result["non_finite_cause"] is None
    said = "1 log-probs of the sampler are not finite"
    k3 = result["total"]["k3"]
    assert report.failures(result) == [said, f"k3 {k3} is not within gate.max_k3 = 1e+09"]
    assert said in report.table(result)
    written = json.loads(report.to_json(result), parse_constant=no_number)
    assert written["total"]["k3"] is written["total"]["d_max"] is None
    assert written["rungs"][-2]["d_mean"] is None and written["tokens"] == result["tokens"]


def test_log_probs_that_are_no_numbers_fail_the_gate_without_bounds(sampled):
    setup, params, trajectories = sampled(**SAME)
    broken = with_first_logp(trajectories, -np.inf)
    said = "1 log-probs of the sampler are not finite; the largest part is decode"
    with (
        mock.patch.object(report, "sample", lambda *_, **__: broken),
        pytest.raises(MismatchError, match=said),
    ):
        report.require(bounded_k3(setup, np.inf), params)


def test_a_learner_that_is_no_number_is_told_from_the_sampler(sampled):
    setup, params, trajectories = sampled(**SAME)
    result = report.gap_report(setup, noisy.perturbed(params, np.nan), trajectories)
    assert result["non_finite"] == {"learner": result["tokens"], "sampler": 0}
    said = f"{result['tokens']} log-probs of the learner are not finite: the weight embed (float32) is"
    assert report.failures(result)[0].startswith(said)


def test_no_zero_is_printed_as_negative():
    flips = dict.fromkeys(("token", "router", "expert", "layer_0"), -0.0)
    assert report._flip_lines(flips)[0] == "route flips: token 0.0000  router 0.0000  expert 0.0000"
    total = dict.fromkeys((*report.MEASURES, "k1"), -0.0)
    said = report.table({
        "rungs": [], "total": total, "largest": "dtype", "route_flips": flips, "exceeded": [],
        "non_finite": {}, "non_finite_cause": None, "budgets": {}, **dict.fromkeys(report.AGREEMENT),
    })
    assert "-0" not in said


def test_filters_cost_the_kept_mass(sampled):
    overrides = SAME | FILTERED
    setup, params, trajectories = sampled(**overrides)
    result = report.gap_report(setup, params, trajectories)
    filtered = {r["cause"]: r for r in result["rungs"]}["filter"]
    lost = np.concatenate([t.logp_behav - t.logp_raw for t in trajectories])
    assert filtered["d_mean"] == pytest.approx(lost.mean(), rel=1e-4) and lost.mean() > 0.1
    assert result["largest"] == "filter" and result["inside_support"] == 1.0


@pytest.mark.all
def test_kept_sets_that_the_learner_scores_over_leave_no_filter(sampled):
    """What is left of it are the tokens whose set was too wide to be recorded."""
    overrides = SAME | FILTERED | dict(rollout__sampling_mask_size=3)
    setup, params, trajectories = sampled(**overrides)
    result = report.gap_report(setup, params, trajectories)
    rungs, rows = climbed(sampled, **overrides)
    rungs = {r.cause: r.difference[rows["mask"]] for r in rungs}
    is_wide = np.concatenate([np.all(t.kept < 0, axis=-1) for t in trajectories])
    lost = np.concatenate([t.logp_raw - t.logp_behav for t in trajectories])
    assert 0.1 < is_wide.mean() < 0.9 and np.abs(rungs["decode"]).max() < 2e-5
    np.testing.assert_allclose(rungs["filter"], np.where(is_wide, lost, 0.0), atol=1e-6)
    assert result["kept_identical"] == result["kept_jaccard"] == result["inside_support"] == 1
    # Another distribution keeps other sets.
    rows = trajectory_rows(trajectories, setup.training.row_length)
    agreed = report.support_agreement(setup, noisy.perturbed(params, 0.1), rows)
    assert 0 < agreed["kept_identical"] < agreed["kept_jaccard"] < 1


# Experts


def with_noisy_router(setup, params):
    """Records of a sampler whose router alone is another one."""
    layers = params["layers"]
    noise = np.random.default_rng(0).normal(size=layers["router"].shape).astype(np.float32)
    other = params | {"layers": layers | {"router": layers["router"] + 0.3 * noise}}
    return report.sample(setup, other, 4)


@pytest.mark.cases("none-0")
@BY_JAX
@pytest.mark.parametrize("routing, pack_length", [("none", 0), ("r3", 0), ("none", 16)])
def test_other_routes_have_a_rung_of_their_own(sampled, routing, pack_length):
    """The only gate of a token is 1, so another router does nothing but choose other experts."""
    setup, params, _ = sampled(
        **ROUTED, correction__routing=routing, model__experts_per_token=1,
        train__pack_length=pack_length,
    )
    trajectories = with_noisy_router(setup, params)
    rungs = {r.cause: r for r in ladder.climb(setup, params, trajectories)}
    largest = {cause: np.abs(r.difference).max() for cause, r in rungs.items()}
    assert largest["decode"] < 2e-5
    assert rungs["route"].is_same == (routing == "r3")
    assert largest["route"] == 0 if routing == "r3" else largest["route"] > 1e-3
    result = report.gap_report(setup, params, trajectories)
    assert result["largest"] == ("decode" if routing == "r3" else "route")
    flips = result["route_flips"]
    assert 0.1 < flips["router"] < flips["token"] < 1 and flips["expert"] == flips["router"]
    assert "route flips: token 0." in report.table(result)


@pytest.mark.all
@BY_JAX
def test_a_flip_is_found_in_its_layer(sampled):
    """One sampled token of one record was sent to another expert in the second layer."""
    setup, params, trajectories = sampled(**ROUTED)
    rows = setup.training.rows(trajectories)
    flips = lambda rows: report.route_flips(setup, params, rows, rows["logp_behav"])
    assert set(flips(rows).values()) == {0.0}
    recorded, row = rows["routes_behav"].copy(), np.argmax(rows["mask"][1]) - 1
    absent = set(range(6)) - set(recorded[1, row, 1].tolist())
    recorded[1, row, 1, 0] = min(absent)
    found = flips(rows | {"routes_behav": recorded})
    count = rows["mask"].sum()
    assert found["token"] == found["layer_1"] == pytest.approx(1 / count)
    assert found["layer_0"] == 0 and found["router"] == pytest.approx(1 / (2 * count))
    assert found["layer_1_position_0"] == pytest.approx(1 / len(trajectories))
    del rows["routes_behav"]
    assert flips(rows) is None


def test_tokens_outside_the_learners_support_are_counted(sampled):
    setup, params, trajectories = sampled(**SAME, **FILTERED)
    rows = trajectory_rows(trajectories, setup.training.row_length)
    logits = make_logits(setup.training.learner)
    micro, flat = setup.training.micro_batches(rows)
    least = flat(logits(params, micro)).argmin(-1)  # of the first response token
    row = rows["mask"][0].argmax()
    tokens = trajectories[0].tokens.copy()
    tokens[0] = least[0, row]
    rows = trajectory_rows([dataclasses.replace(trajectories[0], tokens=tokens), *trajectories[1:]],
                      setup.training.row_length)
    share = report.support_agreement(setup, params, rows)["inside_support"]
    assert share <= 1 - 1 / rows["mask"].sum() + 1e-6


def test_a_batch_that_is_no_whole_number_of_micro_batches_is_refused():
    setup = tiny.setup(rollout__group_size=2, rollout__prompts=8)
    with pytest.raises(ValueError, match="3 prompts of 2 samples.*microbatch_rows = 4"):
        report.check_prompts(setup, 3)
    report.check_prompts(setup, 2)


# In a run


def test_a_run_that_requires_the_gate_stops_before_its_first_step(tmp_path):
    with pytest.raises(MismatchError, match="d_mean .* not within gate.max_.* = 1e-06"):
        tiny.run(tmp_path, gate__required=True, gate__max_d_mean=1e-6, warmup__steps=1)
    assert [r["phase"] for r in tiny.lines(tmp_path)] == ["warmup"]


@pytest.mark.all
def test_a_stop_request_does_not_pass_a_required_gate(tmp_path, monkeypatch):
    def asked(setup, params, heartbeat):
        monkeypatch.undo()
        raise cli.Interrupted

    monkeypatch.setattr(train, "require", asked)
    fields = dict(gate__required=True, gate__max_d_mean=1e-6, warmup__steps=1)
    with pytest.raises(cli.Interrupted):
        tiny.run(tmp_path, **fields)
    with pytest.raises(MismatchError):
        tiny.run(tmp_path, **fields)


@pytest.mark.all
def test_a_run_within_the_bounds_is_the_run_without_the_gate(tmp_path, capsys):
    tiny.run(tmp_path, gate__required=True, **SAME, steps=1)
    assert re.search("largest cause: (pages|decode)", capsys.readouterr().out)
    first = lambda folder: next(r for r in tiny.lines(folder) if r["phase"] == "train")
    assert first(tmp_path) == first(tiny.finished(**SAME, steps=1))


# The command


def command(config, path, noise=0.0, prompts=None):
    """Exit code and report of jaxrl_tis.gate with a sampler whose weights are off by `noise`."""
    gate = commands.load("gate.__main__")
    sample = functools.partial(noisy.sample, noise) if noise else report.sample
    with (
        mock.patch.object(report, "sample", sample),
        mock.patch.object(gate, "CONNECTED", contextlib.nullcontext),
        commands.exits(
            gate, CONFIG=config, JSON=path, PROMPTS=prompts, ADAPTER=None, ENGINE=None
        ) as exited,
    ):
        gate.main()
    return exited.value.code, json.loads(path.read_text(), parse_constant=no_number)


def test_the_command_exits_with_1_when_it_fails_and_writes_what_the_page_documents(
    tmp_path, capsys
):
    code, result = command(tiny.config(**SAME), tmp_path / "refused", noise=0.5)
    assert code == 1 and "not within gate.max_d_mean" in capsys.readouterr().out
    assert "d_mean" in result["exceeded"] and result["sequences"] == 16
    page = (ROOT / "docs" / "gate.md").read_text()
    names = {*result, *result["total"], *(key for rung in result["rungs"] for key in rung)}
    names |= {rung["cause"] for rung in result["rungs"]}
    assert not [name for name in names if f"`{name}`" not in page]
    unbounded = {f"gate__max_{name}": np.inf for name in report.MEASURES}
    with pytest.raises(FloatingPointError, match="is not finite: the weight embed") as error:
        command(tiny.config(**SAME, **unbounded), tmp_path / "broken", noise=np.nan)
    assert cli.exit_code(error.value) == 1 and not (tmp_path / "broken").exists()
    code, result = command(tiny.config(**SAME), tmp_path / "accepted", prompts=8)
    assert code == 0 and result["sequences"] == 32


def test_a_measure_gives_signs_of_life():
    setup, beats = tiny.setup(**SAME), []
    params = initial_params(setup.training)
    report.measure(setup, params, setup.config.rollout.prompts, lambda: beats.append(1))
    assert len(beats) > len(ladder.changes(setup))  # of each rung, and of the engine's calls
