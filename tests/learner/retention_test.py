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
def setup(**more):
    return build(tiny.config(**DROPPED, **more))


@functools.cache
def params(**more):
    return jax.tree.map(lambda x: 1.4 * x, initial_params(setup(**more).training))


@functools.cache
def sampled(count=16, **more):
    made = setup(**more)
    scheduler = made.scheduler(made.engine, made.engine.load(params(**more)), 0)
    sampling = sampling_params(made.config, made.tokenizer, 1.0, is_filtered=True)
    prompts = [np.array(made.tokenizer.encode(text), np.int32) for text in ("1+2=", "7+5=")]
    return generate(scheduler, [Request(f"r{i}", prompts[i % 2], i, sampling) for i in range(count)])


@functools.cache
def score(**more):
    return make_score(setup(**more).training.learner)


def scored(rows, **more):
    one = {name: x[None] for name, x in forward_fields(rows).items()}
    return np.asarray(score(**more)(params(**more), one)["logp"][0])


@BY_JAX
def test_the_learner_that_drops_the_same_keys_agrees():
    rows = setup().training.rows(sampled())
    dropped = sum(np.any(t.evict_step < NEVER) for t in sampled())
    assert 4 <= dropped and any(not len(t.evict_step) for t in sampled())
    mask = rows["mask"]
    np.testing.assert_allclose(scored(rows)[mask], rows["logp_behav"][mask], atol=2e-5)
    whole = rows | {"evict_step": np.full_like(rows["evict_step"], mask.shape[1])}
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


HEAVY = dict(engine__heavy_pages=2, model__num_layers=2, model__num_kv_heads=2)


def decoded(t, params, model, size, heavy, temperature, groups=1):
    """(log-probs, evict_step) of a record by a float64 decoder in NumPy, one query at a time.

    It reads the record's tokens, adds up what each query of a decode step gives to each page, and
    evicts the lightest pages at the ends of calls, which are the steps of the record's evictions. Groups of
    layers have masses and evictions of their own.
    """
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    tokens, start = np.concatenate([t.prompt, t.tokens]), len(t.prompt)
    evicted, mass = np.full((groups, len(tokens)), NEVER), np.zeros((groups, len(tokens) // size + 1))
    shape = model.num_heads, model.head_dim
    keys, values = np.zeros((2, model.num_layers, len(tokens), *shape))
    norm = lambda x, w: x / np.sqrt(np.mean(x * x) + 1e-6) * w
    speed = model.rope.theta ** (-np.arange(0, shape[1], 2) / shape[1])

    def turned(x, position):
        x1, x2 = np.split(x.reshape(shape), 2, axis=-1)
        cos, sin = np.cos(position * speed), np.sin(position * speed)
        return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)

    logps = []
    for query, token in enumerate(tokens[:-1]):
        x = p["embed"][token]
        for i in range(model.num_layers):
            group = i * groups // model.num_layers
            seen = np.flatnonzero(query < evicted[group, : query + 1])
            w = {name: leaf[i] for name, leaf in p["layers"].items()}
            h = norm(x, w["attn_norm"])
            q, keys[i, query] = (turned(h @ w[name], query) for name in "qk")
            values[i, query] = (h @ w["v"]).reshape(shape)
            weights = np.exp(np.einsum("hk,shk->hs", q, keys[i, seen]) / shape[1] ** 0.5)
            weights /= weights.sum(axis=1, keepdims=True)
            if query >= start - 1:
                np.add.at(mass[group], seen // size, weights.sum(axis=0))
            x = x + np.einsum("hs,shk->hk", weights, values[i, seen]).reshape(-1) @ w["o"]
            h = norm(x, w["mlp_norm"])
            gate = h @ w["gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
        logits = norm(x, p["final_norm"]) @ (p["head"] if "head" in p else p["embed"].T) / temperature
        if query >= start - 1:
            logps.append(logits[tokens[query + 1]] - np.log(np.sum(np.exp(logits))))
        for group in range(groups):
            full = [n for n in range((query + 1) // size) if evicted[group, n * size] == NEVER]
            while query + 1 in t.evict_step and len(full) > 1 + heavy + 1:
                page = min(full[1:-1], key=lambda n, own=mass[group]: own[n])
                full.remove(page)
                evicted[group, page * size : (page + 1) * size] = query + 1
    return np.array(logps), (evicted[0] if groups == 1 else evicted.T).tolist()


@pytest.mark.all
@pytest.mark.parametrize("way", [
    {}, dict(engine__max_draft=3), dict(mesh__serve=(1, 1, 2)), dict(mesh__serve=(2, 1, 1)),
    dict(engine__heavy_groups=2, model__num_layers=3),
    dict(engine__heavy_groups=2, engine__max_draft=3, mesh__serve=(2, 1, 2)),
])
def test_heavy_pages_are_those_of_an_oracle_and_the_learner_attends_to_them(way):
    more = HEAVY | way
    made, records = setup(**more), sampled(64, **more)
    rows = made.training.rows(records)
    mask = rows["mask"]
    np.testing.assert_allclose(scored(rows, **more)[mask], rows["logp_behav"][mask], atol=2e-5)
    long = [t for t in records if len(t.evict_step)]
    assert len(long) > 3
    kept_old = differing = 0
    for t in long:
        groups = more.get("engine__heavy_groups", 1)
        logps, evict_step = decoded(t, params(**more), made.model, 2, 2, t.temperature, groups)
        np.testing.assert_allclose(logps, t.logp_behav, atol=2e-5)
        assert t.evict_step.tolist() == evict_step
        gone = t.evict_step.reshape(-1, groups)[2:] < NEVER
        kept_old += np.any(~gone[: np.flatnonzero(gone[:, 0])[-1], 0])
        differing += np.any(gone != gone[:, :1])
    assert kept_old > 1, "some page is older than an evicted one"
    assert (differing > 1) == (groups > 1)


GROUPS = HEAVY | dict(engine__heavy_pages=1, engine__heavy_groups=2, rollout__max_new_tokens=20)


@pytest.mark.all
@pytest.mark.parametrize("way", [
    {}, GROUPS, dict(rollout__schedule="one_step", steps=4),
    GROUPS | dict(model__remat="full", train__pack_length=0, correction__controllers="layerwise_perturbation"),
], ids=["all layers", "groups", "one step ahead", "groups, perturbed"])
def test_the_run_measures_no_gap(tmp_path, way):
    """Sampled, scored and updated in packed rows, and the dense policy pulled to what was seen."""
    tiny.run(
        tmp_path / "dropped", **dict(steps=1, warmup__steps=0, correction__dense_kl_coeff=0.1) | DROPPED | way
    )
    records = [r for r in tiny.lines(tmp_path / "dropped") if "rollout/occupancy" in r]
    assert len(records) == way.get("steps", 1)
    for record in records:
        assert record["rollout/evicted"] > 0
        assert record["mismatch/log_ratio_abs_max"] < 1e-4
        assert record["actor/dense_kl_loss"] > 0
