"""Replay of routes in the learner, the losses of the router, and the steps of its bias.

Bugs of other trainers, each with the test that fails on a copy of it:

| # | bug | test |
|---|---|---|
| 1 | routes flattened in another order than the router's | `test_each_token_keeps_its_route`, and a mutant of scoring.py |
| 2 | routes bound to layers that do not run: replay is off | `test_recorded_routes_are_replayed_in_score_and_update`, and a mutant of transformer.py |
| 3 | packed padding shifts routes | `test_each_token_keeps_its_route` |
| 5 | a turn's last token keeps its zero row | `test_a_continued_record_has_the_routes_of_all_its_tokens` |
| 6 | padding goes to expert 0 | `test_padding_and_last_token_use_the_router`, and a mutant of moe.py |
| 13 | gates gathered after zeroing | models/moe_test.py: `test_gates_that_are_gathered_after_zeroing_are_found`, and a mutant of moe.py |
| 14 | a merge of partial rollouts drops routes | `test_a_continued_record_has_the_routes_of_all_its_tokens` |
| 15 | missing routes train with a print | `test_a_sample_without_routes_stops_the_step`, `test_masked_samples_are_counted`, mutants of setup.py |
| 16 | a queue of routes under recomputation | models/moe_test.py: `test_a_queue_of_routes_is_found_under_recomputation` |
"""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

from jaxrl_tis.build import build
from jaxrl_tis.engine.records import Request, Trajectory, extended
from jaxrl_tis.learner import optimizer, step
from jaxrl_tis.learner.arriving import accumulation_blocker, update_arriving
from jaxrl_tis.learner.batch_layout import Packer, minibatches, packed_minibatches, trajectory_rows
from jaxrl_tis.learner.scoring import Learner
from jaxrl_tis.learner.setup import without_routes
from jaxrl_tis.learner.state import initial_params, initial_state
from jaxrl_tis.learner.step import moved_bias, router_loss
from jaxrl_tis.learner.trainer import Trainer
from jaxrl_tis.models import moe, transformer
from jaxrl_tis.models.config import MoeConfig
from jaxrl_tis.rollouts.groups import Sample, sampling_params
from jaxrl_tis.rollouts.source import generate
from tests import jitted, tiny
from tests.learner.trainer_test import fake_samples

pytestmark = pytest.mark.compiles

L, K, E = 2, 2, 6
EXPERTS = dict(
    model__num_layers=L, model__num_experts=E, model__expert_dim=16, model__router="sigmoid",
    engine__record_routes=True, engine__quantization="none",
)
R3 = EXPERTS | dict(correction__routing="r3")
NEVER = dict(train__fuse_old_logp="never")
ONE = dict(train__minibatches=1, train__epochs=1)


# Routes in rows


def code(token):
    """The route [...,L,K] that a token of `marked` has: other digits of its id in each place."""
    places = np.arange(L * K).reshape(L, K)
    return (np.asarray(token)[..., None, None] * (2 * places + 1) + places).astype(np.uint8)


def marked(index, prompt, count, extra=0):
    """A record in which every token has an id of its own, and the route that its id names."""
    tokens = (100 * index + 1 + np.arange(prompt + count)).astype(np.int32)
    zeros = np.zeros(count, np.float32)
    return Trajectory(
        str(index), tokens[:prompt], tokens[prompt:], zeros, zeros, zeros, zeros.astype(np.int32),
        "stop", 0, index, "none", 1.0, routes=code(tokens[: prompt + count - 1 + extra]),
    )


def laid_out(trajectories, length):
    rows = trajectory_rows(trajectories, length)
    return rows | {"routes": rows["routes_behav"], "routed": rows["routed_behav"]}


def keep_their_routes(parts):
    """Every token but the last of its sequence has the route that its id names, padding has none."""
    for batch in parts:
        segments = batch["segment_ids"]
        after = np.concatenate([segments[..., 1:], np.zeros_like(segments[..., :1])], axis=-1)
        has_next = (segments > 0) & (after == segments)
        np.testing.assert_array_equal(batch["routed"], has_next)
        np.testing.assert_array_equal(batch["routes"][has_next], code(batch["tokens"][has_next]))


FIELDS = ("tokens", "mask", "segment_ids", "routes", "routed")


def dense_and_packed(lengths, seed=3):
    rows = laid_out([marked(i, *n) for i, n in enumerate(lengths)], 12)
    rows = {name: rows[name] for name in FIELDS}
    dense = [batch for batch, _ in minibatches(rows, 2, 2, (seed,))]
    packed = [batch for batch, *_ in packed_minibatches(rows, Packer.of(40, 12, 2, 1), 2, (seed,))]
    return dense, packed


LENGTHS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=8, max_size=8
)


@hypothesis.given(LENGTHS, st.integers(0, 99))
@hypothesis.settings(max_examples=30, deadline=None)
def test_each_token_keeps_its_route(lengths, seed):
    for parts in dense_and_packed(lengths, seed):
        keep_their_routes(parts)


def sequence_first(batch):
    """Bug 1: the routes of a micro-batch are flattened by token first."""
    routes = batch["routes"]
    return batch | {"routes": np.swapaxes(routes, 1, 2).reshape(routes.shape)}


def shifted_by_padding(batch):
    """Bug 3: the routes of later sequences of a row stand one place later."""
    later = batch["segment_ids"] > 1
    moved = np.roll(batch["routes"], 1, axis=2)
    return batch | {"routes": np.where(later[..., None, None], moved, batch["routes"])}


@pytest.mark.parametrize("bug, packed", [
    (sequence_first, False), (sequence_first, True), (shifted_by_padding, True),
])
def test_planted_bugs_of_the_layout_are_found(bug, packed):
    parts = dense_and_packed([(1 + i % 4, 2 + i % 3) for i in range(8)])[packed]
    with pytest.raises(AssertionError):
        keep_their_routes([bug(batch) for batch in parts])


def test_a_record_with_a_row_of_its_last_token_is_laid_out_too():
    rows = laid_out([marked(0, 2, 3, extra=1), marked(1, 3, 2)], 6)
    np.testing.assert_array_equal(rows["routed"].sum(axis=1), [5, 4])
    np.testing.assert_array_equal(rows["routes"][0, :5], code(rows["tokens"][0, :5]))


@pytest.mark.all
def test_a_continued_record_has_the_routes_of_all_its_tokens():
    """A sequence that is cut after two of its tokens has the routes of one that never was."""
    made, engine, params = engine_of(EXPERTS)
    request = Request("0", drawn(EXPERTS)[0].trajectory.prompt, 5, sampling_of(made))
    whole = generated(made, engine, params, [request])[0]
    cut = 2  # it needs no route of its last token
    keep = {name: getattr(whole, name)[:cut] for name in CUT}
    partial = dataclasses.replace(
        whole, **keep, stop_reason="abort", routes=whole.routes[: len(whole.prompt) + cut - 1]
    )
    [again] = generated(
        made, engine, params, [dataclasses.replace(request, partial=partial)]
    )
    np.testing.assert_array_equal(again.tokens, whole.tokens)
    np.testing.assert_array_equal(again.routes, whole.routes)
    assert len(whole.tokens) > cut and len(again.routes) == len(whole.prompt) + len(whole.tokens) - 1


CUT = (
    "tokens", "logp_behav", "logp_raw", "entropy", "version", "mask", "turn", "kv_version", "segment",
)


# Score and update


@functools.cache
def run_of_key(key):
    return tiny.setup(**dict(key))


def run_of(settings):
    return run_of_key(tuple(sorted(settings.items())))


@functools.cache
def trainer_of_key(key):
    with tiny.one_device():
        return Trainer(run_of_key(key).training)


def trainer_of(settings):
    return trainer_of_key(tuple(sorted(settings.items())))


def start_of(settings):
    """A fresh state with a router of large logits, so that routes matter."""
    made = run_of(settings).training
    params = initial_params(made)
    layers = params["layers"] | {"router": 6 * params["layers"]["router"]}
    layers |= {name: 4 * layers[name] for name in ("expert_down",)}
    return initial_state(made, params | {"layers": layers})


def samples_with_routes(seed=0, without=None):
    out = []
    for i, sample in enumerate(fake_samples()):
        rng, t = np.random.default_rng((seed, i)), sample.trajectory
        count = len(t.prompt) + len(t.tokens) - 1 - (without or {}).get(i, 0)
        ids = rng.permuted(np.broadcast_to(np.arange(E), (max(count, 0), L, E)), axis=-1)
        routes = ids[..., :K].astype(np.uint8)
        t = dataclasses.replace(t, routes=routes, rerouted=np.zeros(2, np.int32))
        out.append(dataclasses.replace(sample, trajectory=t))
    return out


def score(settings, samples, state=None):
    state = state or start_of(settings)
    return trainer_of(settings).score(state, samples, {0: state["policy"].params})


def own_routes(settings, rows, state):
    trainer = trainer_of(settings)
    micro, flat = trainer.setup.micro_batches(rows | {"mask": rows["sampled"]})
    return flat(trainer.diagnostics._routing(state["policy"].params, micro).ids)


@pytest.mark.cases("dense")
@pytest.mark.parametrize("packing", [{}, dict(train__pack_length=40)], ids=["dense", "packed"])
def test_recorded_routes_are_replayed_in_score_and_update(packing):
    """Other routes change every log-prob. Dense rows, packed rows and the fused update agree."""
    samples = samples_with_routes()
    settings = R3 | NEVER | ONE | packing
    rows = score(settings, samples)
    mask = rows["mask"]
    native = score(EXPERTS | NEVER | ONE | packing, samples)["logp_prox"]
    assert np.abs(rows["logp_prox"] - native)[mask].min() > 1e-6
    assert np.abs(rows["logp_prox"] - native)[mask].mean() > 1e-2
    dense = score(R3 | NEVER | ONE, samples)["logp_prox"]
    np.testing.assert_allclose(rows["logp_prox"], dense, atol=2e-5)
    fused = R3 | ONE | packing
    state = start_of(fused)
    unscored = score(fused, samples, state)
    assert "logp_old" not in unscored
    state, updated, metrics = trainer_of(fused).update(state, unscored, 1, 0)
    np.testing.assert_allclose(updated["logp_old"], dense, atol=2e-5)
    # The router has a gradient: it moved.
    before = start_of(fused)["policy"].params["layers"]
    after = state["policy"].params["layers"]
    assert np.abs(after["router"] - before["router"]).max() > 1e-4
    np.testing.assert_array_equal(after["router_bias"], before["router_bias"])


def test_a_replay_of_each_token_depends_on_its_own_route():
    """A change of the route of one token changes the log-probs of later tokens of its sequence."""
    samples = samples_with_routes()
    settings = R3 | NEVER | ONE
    before = score(settings, samples)["logp_prox"]
    at = 6  # the first response token of row 5 is token 5
    t = samples[5].trajectory
    routes = t.routes.copy()
    routes[at - 1] = (routes[at - 1] + 1) % E
    samples[5] = dataclasses.replace(
        samples[5], trajectory=dataclasses.replace(t, routes=routes))
    after = score(settings, samples)["logp_prox"]
    changed = np.argwhere(np.abs(after - before) > 1e-5).tolist()
    assert changed and all(row == 5 and token >= at for row, token in changed)


def test_padding_and_last_token_use_the_router():
    samples = samples_with_routes()
    settings = R3 | NEVER | ONE
    state = start_of(settings)
    rows = score(settings, samples, state)
    for row, sample in enumerate(samples):
        last = len(sample.trajectory.prompt) + len(sample.trajectory.tokens) - 1
        assert rows["routed"][row, :last].all() and not rows["routed"][row, last:].any()
    # What stands at padding and at the last token is never read.
    trainer = trainer_of(settings)
    garbage = np.where(rows["routed"][..., None, None], rows["routes"], 3).astype(np.uint8)
    micro, flat = trainer.setup.micro_batches(rows | {"routes": garbage})
    found = flat(trainer._score(state["policy"].params, micro)["logp"])
    np.testing.assert_array_equal(found, rows["logp_prox"])


def test_reference_and_critic_never_replay():
    samples = samples_with_routes()
    settings = NEVER | ONE | dict(
        correction__kl_coeff=0.1, correction__advantage="gae", rollout__group_size=1,
        rollout__prompts=16,
    )
    state = start_of(R3 | settings)
    value = jnp.ones_like(state["critic"].params["value"])  # it starts at 0
    critic = dataclasses.replace(
        state["critic"], params=state["critic"].params | {"value": value}
    )
    replayed, native = (
        score(routing | settings, samples, state | {"critic": critic}) for routing in (R3, EXPERTS)
    )
    assert np.abs(replayed["logp_prox"] - native["logp_prox"]).max() > 1e-2
    for name in ("logp_ref", "values"):
        assert np.abs(native[name]).max() > 0
        np.testing.assert_array_equal(replayed[name], native[name])


def test_evaluation_records_and_replays_nothing():
    made = run_of(R3)
    assert made.engine.config.record_routes and not made.learner_engine.config.record_routes


def test_r2_replays_the_routes_of_the_pass_before_the_update():
    samples, settings = samples_with_routes(), EXPERTS | ONE | dict(correction__routing="r2")
    state = start_of(settings)
    rows = score(settings, samples, state)
    np.testing.assert_array_equal(rows["routed"], rows["segment_ids"] > 0)
    own = own_routes(settings, rows, state)
    is_token = rows["segment_ids"] > 0
    np.testing.assert_array_equal(rows["routes"][is_token], own[is_token])
    assert not np.array_equal(rows["routes"][rows["routed_behav"]],
                              rows["routes_behav"][rows["routed_behav"]])


@pytest.mark.all
@pytest.mark.usefixtures("optimized")
def test_r2_is_off_for_the_first_minibatch_bit_by_bit():
    samples, found = samples_with_routes(), []
    own = EXPERTS | ONE | dict(optimizer__lr=2e-3)  # programs that no other test has compiled
    for settings in (own | NEVER, own | dict(correction__routing="r2")):
        state = start_of(settings)
        rows = score(settings, samples, state)
        state, rows, _ = trainer_of(settings).update(state, rows, 1, 0)
        found.append((jax.device_get(state["policy"].params), rows["logp_old"]))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.all
def test_later_minibatches_of_r2_keep_the_routes():
    """The second update of a batch with a large rate: its own routes moved, the replayed ones not."""
    samples = samples_with_routes()
    settings = EXPERTS | dict(correction__routing="r2", optimizer__lr=0.3)
    state = start_of(settings)
    rows = score(settings, samples, state)
    routes = rows["routes"].copy()
    state, rows, _ = trainer_of(settings).update(state, rows, 1, 0)
    np.testing.assert_array_equal(rows["routes"], routes)
    own, is_token = own_routes(settings, rows, state), rows["segment_ids"] > 0
    assert (own[is_token] != routes[is_token]).any()


@pytest.mark.all
def test_stale_tokens_are_scored_by_the_routers_that_sampled_them_with_r2():
    """logp_old of version 0 is by its own weights and routes, logp_prox by those of the policy."""
    settings = EXPERTS | dict(correction__routing="r2", rollout__schedule="areal(staleness=2)")
    trainer, now = trainer_of(settings), start_of(settings)
    older = jax.tree.map(lambda x: 1.3 * x, now["policy"].params)
    samples = samples_with_routes()
    rows = trainer.score(now, samples, {0: older})
    plain = EXPERTS | NEVER | dict(rollout__schedule="areal(staleness=2)")
    expected = trainer_of(plain).score(now, samples, {0: older})
    for name in ("logp_old", "logp_prox"):
        np.testing.assert_allclose(rows[name], expected[name], atol=1e-6)
    assert np.abs(rows["logp_old"] - rows["logp_prox"]).max() > 1e-2
    replayed = trainer_of(plain | R3).score(now, samples, {0: older})
    assert np.abs(replayed["logp_old"] - rows["logp_old"])[rows["mask"]].mean() > 1e-3


# Samples without routes


@pytest.mark.parametrize("change", [
    lambda routes: routes[:, :1], lambda routes: routes[..., :1], lambda routes: routes + np.uint8(E),
], ids=["fewer layers", "fewer experts of a token", "ids out of the range"])
@pytest.mark.parametrize("fields", [R3, EXPERTS], ids=["replayed", "measured"])
def test_routes_of_another_model_stop_the_step(fields, change):
    samples = samples_with_routes()
    drawn = samples[5].trajectory
    samples[5] = dataclasses.replace(
        samples[5], trajectory=dataclasses.replace(drawn, routes=change(drawn.routes))
    )
    with pytest.raises(ValueError, match="sample 5 has routes of .* of another model"):
        score(fields | NEVER | ONE, samples)


@pytest.mark.parametrize("missing", [1, 99], ids=["one row", "all rows"])
def test_a_sample_without_routes_stops_the_step(missing):
    samples = samples_with_routes(without={3: missing, 7: missing})
    with pytest.raises(ValueError, match="'r3' .*2 samples lack some: 3, 7. Mend the sampler"):
        score(R3 | NEVER | ONE, samples)
    with pytest.raises(ValueError, match="'keep' .*2 samples lack some: 3, 7"):
        score(EXPERTS | NEVER | ONE | dict(correction__routing="keep"), samples)


def test_given_tokens_at_the_end_need_no_route():
    """No token was sampled after them."""
    t = samples_with_routes()[0].trajectory
    given = extended(t, [3, 4])
    cut = dataclasses.replace(given, routes=given.routes[:-1])
    assert without_routes([t, given, cut]).tolist() == [False, False, True]


MASK = R3 | dict(correction__routing_missing="mask", metrics__diagnostics_every=1)


@pytest.mark.cases("scored")
@pytest.mark.parametrize("settings", [
    MASK | NEVER | ONE, MASK | ONE, MASK | NEVER | ONE | dict(train__pack_length=40),
], ids=["scored", "fused", "packed"])
def test_masked_samples_are_counted_and_left_out_of_the_loss(settings):
    """The update is that of a batch in which these samples have another route, or none."""
    found = []
    for without in ({3: 1, 7: 99}, {3: 99, 7: 2}):
        state = start_of(settings)
        samples = samples_with_routes(without=without)
        rows = score(settings, samples, state)
        assert not rows["mask"][[3, 7]].any() and rows["sampled"][[3, 7]].any(axis=1).all()
        assert rows["mask"].any(axis=1).sum() == 14
        state, rows, metrics = trainer_of(settings).update(state, rows, 1, 0)
        assert metrics["moe/samples_without_routes"] == 2
        found.append((metrics["actor/grad_norm"], metrics["actor/pg_loss"], rows["adv"]))
        # Flips are of the tokens with a route, the gap of those that are trained on.
        assert all(np.isfinite(x).all() for x in metrics.values())
        assert metrics["mismatch/route_flip_flipped/log_ratio_abs_mean"] < 5
    assert found[0][0] > 1e-3
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.all
def test_a_batch_without_any_route_trains_nothing():
    settings = MASK | NEVER | ONE
    state = start_of(settings)
    before = jax.device_get(state["policy"].params)
    samples = samples_with_routes(without=dict.fromkeys(range(16), 99))
    rows = score(settings, samples, state)
    assert rows["routes"].shape == (*rows["tokens"].shape, L, K) and not rows["routed"].any()
    state, _, metrics = trainer_of(settings).update(state, rows, 1, 0)
    assert metrics["moe/samples_without_routes"] == 16
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state["policy"].params), before)


def test_flips_and_gap_are_not_of_passes_that_were_skipped():
    """Truncated answers are left out of the loss. Their flips are measured, as they were sampled;
    their log-probs may be missing, and are in no gap."""
    settings = R3 | ONE | dict(train__mask_truncated=True, metrics__diagnostics_every=1)
    state, found = start_of(settings), []
    samples = samples_with_routes()
    for reason in ("stop", "length"):
        changed = [
            dataclasses.replace(s, trajectory=dataclasses.replace(s.trajectory, stop_reason=reason))
            if i < 8 else s for i, s in enumerate(samples)
        ]
        state = start_of(settings)
        rows = score(settings, changed, state)
        own = own_routes(settings, rows, state)
        shared = (own[..., None] == rows["routes_behav"][..., None, :]).any(-1).sum(-1)
        mask = rows["sampled"][:, 1:] & rows["routed_behav"][:, :-1]
        expected = (shared < K)[:, :-1][mask].any(-1).mean()
        _, rows, metrics = trainer_of(settings).update(state, rows, 1, 0)
        np.testing.assert_allclose(metrics["mismatch/route_flip_token"], expected, rtol=1e-6)
        gap = np.abs(rows["logp_old"] - rows["logp_behav"])[:, 1:]
        is_flipped = (shared < K).any(-1)[:, :-1] & mask & rows["mask"][:, 1:]
        np.testing.assert_allclose(
            metrics["mismatch/route_flip_flipped/log_ratio_abs_mean"], gap[is_flipped].mean(),
            rtol=1e-5,
        )
        found.append(metrics["mismatch/route_flip_token"])
    assert found[0] == found[1] > 0.5


# Gradients of parts


PARTS = MASK | ONE | dict(rollout__schedule="periodic", train__microbatch_rows=4)


def updated_by_parts(samples):
    """(the state, the rows, the metrics) after an update whose parts arrive in another order."""
    state = start_of(PARTS)
    parts = (samples[i : i + 4] for i in (8, 0, 12, 4))
    return update_arriving(
        trainer_of(PARTS), state, parts, {0: state["policy"].params}, 1, 0
    )


def test_samples_without_routes_are_counted_over_all_parts():
    *_, metrics = updated_by_parts(samples_with_routes(without={1: 1, 9: 99}))
    assert metrics["moe/samples_without_routes"] == 2


@pytest.mark.all
def test_parts_that_arrive_replay_and_count():
    trainer = trainer_of(PARTS)
    assert accumulation_blocker(trainer.setup) is None
    samples = samples_with_routes(without={1: 1, 9: 99})
    state = start_of(PARTS)
    whole, rows, _ = trainer.update(state, score(PARTS, samples, state), 1, 0)
    found, _, found_rows, _ = updated_by_parts(samples)
    np.testing.assert_allclose(found_rows["logp_old"], rows["logp_old"], atol=2e-5)
    np.testing.assert_array_equal(found_rows["routes"], rows["routes"])
    for a, b in zip(*map(jax.tree.leaves, (found["policy"].params, whole["policy"].params)),
                    strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    r2 = EXPERTS | ONE | dict(correction__routing="r2", rollout__schedule="periodic")
    assert "r2" in accumulation_blocker(run_of(r2).training)
    losses = EXPERTS | ONE | dict(correction__load_balance_coeff=0.1, rollout__schedule="periodic")
    assert "losses of the routers" in accumulation_blocker(run_of(losses).training)


# With a sampler


@functools.cache
def engine_of_key(key):
    made = build(tiny.config(**dict(key)))
    params = start_of(dict(key))["policy"].params
    return made, made.engine, params


def engine_of(settings):
    return engine_of_key(tuple(sorted(settings.items())))


def sampling_of(made):
    return sampling_params(
        made.config, made.tokenizer, made.config.rollout.temperature, is_filtered=False
    )


def generated(made, engine, params, requests):
    return generate(made.scheduler(engine, engine.load(params), 0), requests)


@functools.cache
def drawn_key(key):
    made, engine, params = engine_of_key(key)
    texts = ("1+2=", "7+5=", "3+3=", "9+0=")
    prompts = [np.array(made.tokenizer.encode(text), np.int32) for text in texts]
    requests = [Request(str(i), prompts[i // 4], i, sampling_of(made)) for i in range(16)]
    trajectories = generated(made, engine, params, requests)
    rewards = np.random.default_rng(0).random(16)
    return [Sample(t, {}, "", 0.0, float(r), i // 4, {}, 0.5)
            for i, (t, r) in enumerate(zip(trajectories, rewards, strict=True))]


def drawn(settings):
    return drawn_key(tuple(sorted(settings.items())))


def gap(settings, samples):
    """(k3 of the sampler's gap, log-probs, metrics) of an update."""
    state = start_of(settings)
    rows = score(settings, samples, state)
    _, rows, metrics = trainer_of(settings).update(state, rows, 1, 0)
    return metrics["rollout_corr/k3_kl"], rows["logp_old"], metrics


MEASURED = NEVER | ONE | dict(metrics__diagnostics_every=1)


@pytest.mark.all
def test_with_equal_engines_every_routing_is_the_same():
    samples = drawn(EXPERTS)
    for sample in samples:
        t = sample.trajectory
        assert t.routes.shape == (len(t.prompt) + len(t.tokens) - 1, L, K)
    none, r2, r3 = (
        gap(EXPERTS | MEASURED | dict(correction__routing=routing), samples)
        for routing in ("none", "r2", "r3")
    )
    for k3, logp, metrics in (none, r2, r3):
        assert metrics["mismatch/route_flip_token"] == 0 and k3 < 1e-9
        np.testing.assert_allclose(logp, none[1], atol=1e-6)


def test_replay_lowers_the_gap_of_a_noisy_router():
    noisy = EXPERTS | dict(engine__injected="router(scale=0.3)")
    samples = drawn(noisy)
    none = gap(noisy | MEASURED, samples)
    r3 = gap(noisy | MEASURED | dict(correction__routing="r3"), samples)
    for *_, metrics in (none, r3):
        assert metrics["mismatch/route_flip_token"] > 0.02
    assert r3[0] < 0.5 * none[0]


# Losses of the router and steps of its bias


@dataclasses.dataclass(frozen=True)
class Coefficients:
    load_balance_coeff: float
    router_z_coeff: float
    router_bias_rate: float = 0.0


router_loss = jitted.function(router_loss)


def statistics_of(load, probs, z):
    as_rows = lambda x: np.asarray([x], np.float32)
    return moe.Routed(load=as_rows(load), probs=as_rows(probs), z=as_rows(z))


def test_losses_of_the_router_by_hand():
    """Two layers of two experts, 4 tokens with one choice each. Layer 0: f = (3/4, 1/4), p = (5/8,
    3/8), 2 sum f p = 9/8. Layer 1 is even: 1. Their mean is 17/16. z: (6 / 4 + 2 / 4) / 2 = 1."""
    routed = statistics_of([[3, 1], [2, 2]], [[2.5, 1.5], [2, 2]], [6, 2])
    value, metrics = router_loss(Coefficients(0.5, 0.25), routed, np.float32(1))
    assert metrics.keys() == {"moe/load_balance_loss", "moe/router_z_loss"}
    assert float(metrics["moe/load_balance_loss"]) == pytest.approx(17 / 16)
    assert float(metrics["moe/router_z_loss"]) == pytest.approx(1)
    assert float(value) == pytest.approx(0.5 * 17 / 16 + 0.25)
    half, _ = router_loss(Coefficients(0.5, 0.25), routed, np.float32(0.5))
    assert float(half) == pytest.approx(float(value) / 2)
    two_rows = jax.tree.map(lambda x: np.concatenate([x / 2, x / 2]), routed)
    assert float(router_loss(Coefficients(0.5, 0.25), two_rows, np.float32(1))[0]) == pytest.approx(
        float(value))
    _, counted = router_loss(Coefficients(0, 0, 0.1), routed, np.float32(1))
    np.testing.assert_array_equal(counted["expert_counts"], [[3, 1], [2, 2]])


def test_an_even_load_is_one_whatever_the_number_of_choices():
    routed = statistics_of([[6, 6, 6, 6]], [[3.0, 3, 3, 3]], [0])  # 12 tokens, 2 choices each
    assert float(router_loss(Coefficients(1, 0), routed, np.float32(1))[0]) == pytest.approx(1)


@pytest.mark.all
def test_the_gradient_of_the_losses_by_differences():
    """In float64 from the logits; the choices are fixed."""
    kind, rng = MoeConfig(E, K, 4), np.random.default_rng(0)
    logits = rng.normal(0, 2, (2, 5, E)).astype(np.float32)
    c, is_token = Coefficients(0.7, 0.3), np.ones((2, 5), bool)

    def loss(x):
        _, _, routed = moe.route(x, None, kind, None, moe.Asked(statistics=True), is_token)
        rows_first = jax.tree.map(lambda x: x[:, None], routed)  # [B,L,...] with one layer
        return router_loss(c, rows_first, np.float32(1))[0]

    load = np.zeros(E)
    for row in logits.reshape(-1, E):
        load[np.argsort(-row)[:K]] += 1

    def by_hand(flat):
        x = flat.reshape(-1, E)
        p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        z = np.log(np.exp(x).sum(-1)) ** 2
        return 0.7 * E * (load / load.sum() * p.mean(0)).sum() + 0.3 * z.mean()

    flat, step = logits.astype(np.float64).ravel(), 1e-5
    expected = [(by_hand(flat + step * u) - by_hand(flat - step * u)) / (2 * step)
                for u in np.eye(len(flat))]
    assert float(loss(jnp.asarray(logits))) == pytest.approx(by_hand(flat), rel=1e-5)
    found = np.asarray(jax.grad(loss)(jnp.asarray(logits))).ravel()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


LOSSES = dict(correction__load_balance_coeff=0.5, correction__router_z_coeff=0.01)


@pytest.mark.all
def test_losses_are_of_the_routers_own_choice():
    """One layer, so that replay changes no input of a router."""
    single = dict(model__num_layers=1)
    samples = [
        dataclasses.replace(s, trajectory=dataclasses.replace(
            s.trajectory, routes=s.trajectory.routes[:, :1])) for s in samples_with_routes()
    ]
    found = []
    for settings in (EXPERTS | single | LOSSES | ONE, R3 | single | LOSSES | ONE):
        state = start_of(settings)
        rows = score(settings, samples, state)
        found.append(trainer_of(settings).update(state, rows, 1, 0)[2])
    for name in ("moe/load_balance_loss", "moe/router_z_loss"):
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=1e-6)
    assert found[0]["moe/load_balance_loss"] > 1 and found[0]["moe/router_z_loss"] > 0


@pytest.mark.all
def test_the_split_into_micro_batches_of_equal_sequences_changes_the_z_loss_by_rounding():
    """The z-loss is a mean over tokens. The load-balancing loss is a product of two means of its
    micro-batch, and the mean over micro-batches of other loads is another number."""
    found = []
    samples = [s for s in samples_with_routes() if len(s.trajectory.tokens) == 2][:4] * 4
    samples = [dataclasses.replace(s, group=i // 4) for i, s in enumerate(samples)]
    for rows_each in (4, 16):
        settings = EXPERTS | LOSSES | ONE | dict(train__microbatch_rows=rows_each)
        state = start_of(settings)
        rows = score(settings, samples, state)
        found.append(trainer_of(settings).update(state, rows, 1, 0)[2])
    for name in ("moe/router_z_loss",):
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-5)
    np.testing.assert_allclose(
        found[0]["moe/load_balance_loss"], found[1]["moe/load_balance_loss"], rtol=0.2)


def test_the_bias_moves_against_the_load():
    """Load (4, 1, 1), mean 2: down, up, up. An even layer does not move."""
    params = {"layers": {"router_bias": np.float32([[0, 1, -1], [2, 2, 2]])}, "x": 1}
    moved = moved_bias(params, np.array([[4.0, 1, 1], [2, 2, 2]]), 0.25)
    np.testing.assert_array_equal(moved["layers"]["router_bias"], [[-0.25, 1.25, -0.75], [2, 2, 2]])
    assert moved["x"] == 1
    plain = {"layers": {"router": np.ones(3)}}
    assert moved_bias(plain, np.ones((1, 3)), 0.25) is plain


@pytest.mark.all
@pytest.mark.parametrize("routing", ["none", "r3"])
def test_a_frozen_bias_keeps_every_bit(routing):
    """Over several updates with weight decay, in the learner and in the sampler's parameters."""
    settings = EXPERTS | LOSSES | dict(
        correction__routing=routing, optimizer__weight_decay=0.1, optimizer__lr=0.05,
    )
    made, state = run_of(settings), start_of(settings)
    bias = np.random.default_rng(1).normal(0, 0.1, (L, E)).astype(np.float32)
    params = state["policy"].params
    params = params | {"layers": params["layers"] | {"router_bias": jnp.asarray(bias)}}
    state = initial_state(made.training, params)
    before = jax.device_get(params)
    for number in (1, 2):
        rows = score(settings, samples_with_routes(), state)
        state, *_ = trainer_of(settings).update(state, rows, number, number - 1)
    after = jax.device_get(state["policy"].params)
    assert after["layers"]["router_bias"].tobytes() == bias.tobytes()
    assert np.abs(after["layers"]["router"] - before["layers"]["router"]).max() > 1e-3
    served = made.engine.load(state["policy"].params)["layers"]
    for layer, expected in zip(served, bias, strict=True):
        assert np.asarray(layer["router_bias"]).tobytes() == expected.tobytes()


@pytest.mark.all
def test_a_bias_that_is_not_frozen_moves_by_its_rate_alone():
    settings = EXPERTS | ONE | dict(
        optimizer__freeze_router_bias=False, optimizer__router_bias_rate=0.01,
        optimizer__weight_decay=0.1,
    )
    state = start_of(settings)
    before = jax.device_get(state["policy"].params)["layers"]["router_bias"]
    rows = score(settings, samples_with_routes(), state)
    own = own_routes(settings, rows, state)[rows["segment_ids"] > 0]  # [n,L,K]
    load = np.stack([np.bincount(own[:, layer].ravel(), minlength=E) for layer in range(L)])
    state, _, metrics = trainer_of(settings).update(state, rows, 1, 0)
    moved = np.asarray(state["policy"].params["layers"]["router_bias"]) - before
    expected = 0.01 * np.sign(load.mean(axis=1, keepdims=True) - load)
    np.testing.assert_allclose(moved, expected, atol=1e-7)
    assert "expert_counts" not in metrics and np.abs(expected).max() > 0


def _overflowed(params):
    return optimizer.scale_loss(optax.sgd(1.0)), {"x": jnp.full((1, 1, 1), jnp.inf)}, "float16"


def _at_rest(params):
    return optax.sgd(1.0), {"x": np.ones((1, 1, 1)), "lr_scale": jnp.zeros((1, 1))}, "float32"


@pytest.mark.parametrize("case", [_overflowed, _at_rest])
def test_a_skipped_update_moves_no_bias(case):
    params = {"layers": {"w": np.ones(3), "router_bias": jnp.zeros((1, 2))}}
    tx, fields, dtype = case(params)
    forward = lambda p, b: jnp.sum(p["layers"]["w"]) * b["x"]
    of_loss = lambda s, i: (jnp.sum(s), ({step.EXPERT_COUNTS: np.array([[3.0, 1.0]])}, {}))
    learner = Learner(None, transformer.Program(dtype=dtype), 2, 2)
    update = step._make_step(
        learner, step.MicroLoss(forward, of_loss), tx, "actor", router_bias_rate=0.001)
    state = step.TrainState(params, tx.init(params))
    state, _ = update(state, {"mask": np.ones((1, 1, 1), bool)} | fields)
    np.testing.assert_array_equal(state.params["layers"]["w"], 1.0)
    np.testing.assert_array_equal(state.params["layers"]["router_bias"], 0.0)
