"""Choice, gates, routes and statistics of the router against loops in numpy; replay in the decoder."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.kernels import tiles
from jaxrl_tis.models import moe, transformer
from jaxrl_tis.models.config import ModelConfig, MoeConfig, RopeConfig
from tests import jitted

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("XLA compiles and rounds the programs")]

SOFTMAX = MoeConfig(8, 3, 12, normalizes_top_k=False)
KINDS = {
    "softmax": SOFTMAX,
    "softmax, normalised": dataclasses.replace(SOFTMAX, normalizes_top_k=True, scale=2.5),
    "sigmoid": dataclasses.replace(SOFTMAX, score="sigmoid"),
    "sigmoid, normalised": dataclasses.replace(
        SOFTMAX, score="sigmoid", normalizes_top_k=True, scale=0.5
    ),
    "groups": MoeConfig(12, 3, 12, "sigmoid", num_groups=4, top_groups=2, scale=1.5),
    "softmax groups": MoeConfig(12, 3, 12, num_groups=3, top_groups=1),
}
ROUTES = moe.Asked(routes=True)
NO_BIAS = {name for name, kind in KINDS.items() if kind.score == "softmax"}


def scores_of(logits, kind):
    """Scores [E] of one token in float64."""
    if kind.score == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()


def loop(logits, bias, kind):
    """(ids [k], gates [k]) of one token: sorted by score, then by id, one expert at a time."""
    score = scores_of(logits, kind)
    choice = score if bias is None else score + bias
    size = kind.num_experts // kind.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(kind.num_groups)]
    best = [sum(sorted((choice[e] for e in group), reverse=True)[:2]) for group in groups]
    kept = sorted(range(kind.num_groups), key=lambda g: (-best[g], g))[: kind.top_groups]
    allowed = sorted(e for g in (kept if kind.num_groups > 1 else [0]) for e in groups[g])
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[: kind.top_k]
    gates = np.array([score[e] for e in ids])
    if kind.normalizes_top_k:
        gates = gates / gates.sum()
    return ids, gates * kind.scale


@functools.cache
def drawn(name, b=4, t=25):
    """Logits [B,T,E] with many equal ones, and the bias [E] of the choice."""
    kind, rng = KINDS[name], np.random.default_rng(len(name))
    logits = rng.integers(-4, 5, (b, t, kind.num_experts)).astype(np.float32) / 2
    bias = None if name in NO_BIAS else rng.integers(-2, 3, kind.num_experts).astype(np.float32) / 4
    return logits, bias


choose, route = jitted.function(moe.choose), jitted.function(moe.route)


def routed(name, replay=None, asked=ROUTES, is_token=None):
    logits, bias = drawn(name)
    return route(logits, bias, KINDS[name], replay, asked, is_token)


# The choice


def test_two_groups_by_hand():
    """Groups (0.9, 0.0, 0.0) and (0.5, 0.5, 0.3): the second has the larger sum of two, and expert
    0 with the largest score is out."""
    kind = MoeConfig(6, 2, 1, "sigmoid", num_groups=2, top_groups=1)
    score = np.float32([[0.9, 0.0, 0.0, 0.5, 0.5, 0.3]])
    np.testing.assert_array_equal(choose(score, None, kind), [[3, 4]])


@pytest.mark.all
def test_among_equal_scores_the_lower_id_comes_first():
    for count in (4, 64, 300):
        kind = MoeConfig(count, 3, 1)
        np.testing.assert_array_equal(choose(jnp.ones((2, count)), None, kind), [[0, 1, 2]] * 2)
    score = jnp.array([[0.1, 0.2, 0.1, 0.2, 0.2]])
    np.testing.assert_array_equal(choose(score, None, MoeConfig(5, 4, 1)), [[1, 3, 4, 0]])


@pytest.mark.parametrize("name", KINDS)
def test_ids_and_gates_equal_a_loop(name):
    logits, bias = drawn(name)
    ids, gates, found = routed(name)
    assert gates.dtype == jnp.float32 and ids.dtype == jnp.int32
    ties = 0
    for where in np.ndindex(logits.shape[:2]):
        expected, of_loop = loop(logits[where].astype(np.float64), bias, KINDS[name])
        np.testing.assert_array_equal(ids[where], expected)
        np.testing.assert_allclose(gates[where], of_loop, rtol=2e-6)
        ties += len(set(logits[where])) < logits.shape[-1]
    assert ties > 50
    np.testing.assert_array_equal(found.ids, ids)
    if bias is not None:  # it changes many choices
        plain = choose(np.float32(scores_of(logits, KINDS[name])), None, KINDS[name])
        assert (np.sort(plain, -1) != np.sort(ids, -1)).any(-1).mean() > 0.3


# Replay of routes


def drifted(name):
    """Routes [B,T,k] of another router, and which tokens have one."""
    kind, rng = KINDS[name], np.random.default_rng(9)
    shape = drawn(name)[0].shape
    ids = rng.permuted(np.broadcast_to(np.arange(kind.num_experts), shape), axis=-1)
    is_given = rng.random(shape[:2]) < 0.5
    return ids[..., : kind.top_k].astype(np.uint8), is_given


@pytest.mark.parametrize("name", KINDS)
def test_replayed_gates_are_of_the_dense_live_scores(name):
    ids, is_given = drifted(name)
    own, own_gates, _ = routed(name)
    found, gates, recorded = routed(name, moe.Replay(ids, is_given))
    np.testing.assert_array_equal(found, np.where(is_given[..., None], ids, own))
    np.testing.assert_array_equal(recorded.ids, own)  # what the router does on its own
    np.testing.assert_array_equal(gates[~is_given], own_gates[~is_given])
    logits, kind = drawn(name)[0].astype(np.float64), KINDS[name]
    for where in zip(*np.nonzero(is_given), strict=True):
        expected = scores_of(logits[where], kind)[ids[where]]
        expected = expected / expected.sum() if kind.normalizes_top_k else expected
        np.testing.assert_allclose(gates[where], expected * kind.scale, rtol=2e-6)


def gradient_is_of_the_fixed_choice(gates_of):
    """The derivative of sum(c * gates) by the logits, ids fixed, in float64 central differences."""
    for name in ("softmax", "softmax, normalised", "sigmoid", "groups"):
        logits, kind = drawn(name)[0][:1, :6], KINDS[name]
        ids = drifted(name)[0][:1, :6].astype(np.int32)
        c = np.random.default_rng(2).normal(size=ids.shape)

        def fixed(flat, logits=logits, kind=kind, ids=ids, c=c):
            total = 0.0
            for where in np.ndindex(ids.shape[:2]):
                gates = scores_of(flat.reshape(logits.shape)[where], kind)[ids[where]]
                gates = gates / gates.sum() if kind.normalizes_top_k else gates
                total += (c[where] * gates).sum() * kind.scale
            return total

        flat, step = logits.astype(np.float64).ravel(), 1e-5
        expected = np.array([
            (fixed(flat + step * unit) - fixed(flat - step * unit)) / (2 * step)
            for unit in np.eye(len(flat))
        ])
        total = lambda x, c=c, kind=kind, ids=ids: jnp.sum(
            c * gates_of(moe.scores(x, kind), ids, kind))
        gradient = np.asarray(jax.grad(total)(jnp.asarray(logits))).ravel()
        assert np.abs(expected).max() > 0.01
        np.testing.assert_allclose(gradient, expected, rtol=2e-4, atol=2e-6)


@pytest.mark.all
def test_the_gradient_of_replayed_gates_reaches_the_router():
    gradient_is_of_the_fixed_choice(moe.gates)


@pytest.mark.all
def test_gates_that_are_gathered_after_zeroing_are_found():
    """The planted copy: scores outside the router's own choice are zeroed before the gather."""

    def zeroed(scores, ids, kind):
        own = moe.choose(jax.lax.stop_gradient(scores), None, kind)
        is_own = jnp.any(own[..., None] == jnp.arange(kind.num_experts).reshape(1, 1, 1, -1), -2)
        return moe.gates(jnp.where(is_own, scores, 0.0), ids, kind)

    with pytest.raises(AssertionError):
        gradient_is_of_the_fixed_choice(zeroed)


@pytest.mark.all
def test_the_bias_has_no_gradient():
    logits, bias = drawn("groups")
    total = lambda bias: jnp.sum(moe.route(
        jnp.asarray(logits), bias, KINDS["groups"], None, moe.Asked(), None
    )[1])
    np.testing.assert_array_equal(jax.grad(total)(jnp.asarray(bias)), np.zeros_like(bias))


# Experts


def silu(x):
    return x / (1 + np.exp(-x))


def weights(e, d, f):
    rng = np.random.default_rng(5)
    return [rng.normal(0, d**-0.5, shape).astype(np.float32)
            for shape in ((e, d, f), (e, d, f), (e, f, d))]


def test_the_products_of_experts_equal_a_loop():
    kind, (gate, up, down) = KINDS["softmax"], weights(8, 10, 12)
    x = np.random.default_rng(6).normal(size=(30, 10)).astype(np.float32)
    ids = drifted("softmax")[0].reshape(-1, 3)[:30].astype(np.int32)
    ids = np.where(ids == 4, 5, ids)  # one expert without a token, one token with an expert twice
    gates = np.random.default_rng(7).random(ids.shape).astype(np.float32)
    expected = np.zeros((30, 10))
    for m, k in np.ndindex(ids.shape):
        e = ids[m, k]
        hidden = silu(x[m].astype(np.float64) @ gate[e]) * (x[m].astype(np.float64) @ up[e])
        expected[m] += gates[m, k] * (hidden @ down[e])
    run = jax.jit(lambda x, ids, gates, *ws: moe.experts(
        x, ids, gates, ws, kind.num_experts, *moe.FAST
    ))
    found = run(x, ids, gates, gate, up, down)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    turned = run(x, ids[:, ::-1], gates[:, ::-1], gate, up, down)
    np.testing.assert_allclose(turned, found, rtol=1e-5, atol=1e-6)


# Statistics


@pytest.mark.all
@pytest.mark.usefixtures("optimized")
def test_outputs_are_combined_by_row_in_a_fixed_order():
    """(1e8 - 1e8) + 1 is 1, while 1e8 + (1 - 1e8) is 0 in float32."""
    run = jax.jit(moe.combined_by_row, compiler_options=tiles.COMPILER_OPTIONS)
    gates = jnp.ones((40, 3), jnp.float32)
    outputs = jnp.broadcast_to(jnp.array([1e8, -1e8, 1], jnp.float32)[:, None], (40, 3, 4))
    np.testing.assert_array_equal(run(outputs, gates), np.ones((40, 4)))
    np.testing.assert_array_equal(run(outputs[:, ::-1], gates), np.zeros((40, 4)))
    rng = np.random.default_rng(0)
    outputs, gates = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((40, 3, 4), (40, 3)))
    whole = run(outputs, gates)
    for part in (slice(7, 8), slice(3, 20)):
        np.testing.assert_array_equal(run(outputs[part], gates[part]), whole[part])
    np.testing.assert_allclose(whole, moe.combined(outputs, gates), rtol=1e-5, atol=1e-6)
    pull = lambda f: jax.vjp(f, outputs, gates)[1](jnp.cos(whole))
    for a, b in zip(pull(moe.combined_by_row), pull(moe.combined), strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_are_sorted_by_group_and_keep_their_order_within_it():
    """Groups from 2 on are one group, the last. Also for one row, and for every row in one group."""
    sorted_by = jitted.function(moe.sorted_by)
    order, place = sorted_by(np.array([1, 5, 0, 1, 2, 0], np.int32), 2)
    np.testing.assert_array_equal(order, [2, 5, 0, 3, 1, 4])
    np.testing.assert_array_equal(place, [2, 4, 0, 3, 5, 1])
    for group in (np.zeros(1), np.full(300, 3), np.random.default_rng(0).integers(0, 8, 300)):
        order, place = sorted_by(np.int32(group), 8)
        np.testing.assert_array_equal(order, np.argsort(group, kind="stable"))
        np.testing.assert_array_equal(place, np.argsort(order))


def test_statistics_by_hand():
    """Two rows, two experts, one chosen. Logits (ln 3, 0) have probabilities (3/4, 1/4), entropy
    2 ln 2 - 3/4 ln 3 and logsumexp ln 4; (0, 0) has (1/2, 1/2), ln 2 and ln 2. The last token of
    row 1 does not count."""
    kind, ln = MoeConfig(2, 1, 1), np.log
    logits = np.array([[[ln(3), 0], [0, 0], [0, ln(3)]], [[0, ln(3)], [0, ln(3)], [ln(3), 0]]])
    is_token = np.array([[True, True, True], [True, True, False]])
    asked = moe.Asked(statistics=True)
    _, _, found = route(logits, None, kind, None, asked, is_token)
    assert found.ids is None
    peaked = 2 * ln(2) - 0.75 * ln(3)
    np.testing.assert_array_equal(found.load, [[2, 1], [0, 2]])
    np.testing.assert_allclose(found.probs, [[1.5, 1.5], [0.5, 1.5]], rtol=1e-6)
    np.testing.assert_allclose(found.entropy, [2 * peaked + ln(2), 2 * peaked], rtol=1e-6)
    np.testing.assert_allclose(found.z, [2 * ln(4) ** 2 + ln(2) ** 2, 2 * ln(4) ** 2], rtol=1e-6)


@pytest.mark.all
def test_probabilities_of_sigmoid_scores_are_their_shares():
    """Scores 0.8 and 0.2 / 0.5 and 0.5: shares (0.8, 0.2) and (0.5, 0.5)."""
    logits = jnp.array([[[np.log(4), -np.log(4)], [0, 0]]])
    kind, is_token = MoeConfig(2, 1, 1, "sigmoid"), jnp.ones((1, 2), bool)
    bias = jnp.array([-1.0, 0])  # moves the load, not the probabilities
    _, _, found = moe.route(logits, bias, kind, None, moe.Asked(statistics=True), is_token)
    np.testing.assert_allclose(found.probs, [[1.3, 0.7]], rtol=1e-6)
    np.testing.assert_array_equal(found.load, [[0, 2]])


@pytest.mark.parametrize("name", KINDS)
def test_statistics_are_those_without_replay(name):
    is_token = np.random.default_rng(3).random(drawn(name)[0].shape[:2]) < 0.7
    asked = moe.Asked(routes=True, statistics=True)
    plain = routed(name, None, asked, is_token)[2]
    jax.tree.map(
        np.testing.assert_array_equal,
        routed(name, moe.Replay(*drifted(name)), asked, is_token)[2], plain,
    )
    counts = np.zeros_like(plain.load)
    for b, t, k in np.ndindex(plain.ids.shape):
        counts[b, plain.ids[b, t, k]] += is_token[b, t]
    np.testing.assert_array_equal(plain.load, counts)
    np.testing.assert_allclose(plain.probs.sum(-1), is_token.sum(-1), rtol=1e-5)


def test_what_is_not_asked_for_is_not_there():
    assert routed("softmax", asked=moe.Asked())[2] is None


# In the decoder

DECODER = ModelConfig(
    family="glm4_moe", vocab_size=31, embed_dim=16, num_layers=3, num_heads=2, num_kv_heads=1,
    head_dim=8, mlp_dim=24, rope=RopeConfig("default", 10000.0), max_position=64, norm_eps=1e-5,
    qkv_bias=False, qk_norm=False, tie_embeddings=False,
    moe=MoeConfig(8, 2, 12, "sigmoid", dense_layers=(0,), shared_dim=12, scale=1.5),
)
TOKENS = np.random.default_rng(1).integers(0, 31, (2, 9)).astype(np.int32)
SEGMENTS = np.array([[1] * 5 + [2] * 4, [1] * 7 + [0] * 2], np.int32)


@functools.cache
def params_of(config=DECODER):
    params = jax.device_get(transformer.init(config, jax.random.key(3)))
    layers = params["layers"] | {"router": 4 * params["layers"]["router"]}
    if config.moe.has_bias:
        bias = np.random.default_rng(4).normal(0, 0.1, layers["router_bias"].shape)
        layers["router_bias"] = np.float32(bias)
    return params | {"layers": layers}


@functools.cache
def value_and_gradient(remat="none", unrolled=False):
    """Jitted (params, replay or None) -> ((loss, own routes), gradient)."""

    def loss(params, replay):
        params = transformer.unstack(params, DECODER) if unrolled else params
        positions = jnp.broadcast_to(jnp.arange(9).reshape(1, -1), TOKENS.shape)
        out = transformer.rows_routed(
            params, DECODER, transformer.Program(remat=remat), TOKENS, positions, SEGMENTS,
            replay=replay, asked=moe.Asked(routes=True),
        )
        logits = transformer.head_logits(params, transformer.Program(), out.x)
        return jnp.sum(jax.nn.log_softmax(logits)[..., 0] * (SEGMENTS > 0)), out.routed.ids

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def own_routes():
    (_, ids), _ = value_and_gradient()(params_of(), None)
    return np.asarray(ids)


def other_routes():
    return (own_routes() + 1 + np.arange(2)) % 8


def equal_bits(a, b):
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.all
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("unrolled", [False, True], ids=["scanned", "unrolled"])
def test_replay_of_a_programs_own_routes_changes_no_bit(unrolled):
    run = value_and_gradient(unrolled=unrolled)
    native = run(params_of(), None)
    ids = np.asarray(native[0][1]).astype(np.uint8)
    assert ids.shape == (2, *TOKENS.shape, 2) and len(np.unique(ids)) == 8
    everywhere = moe.Replay(ids, np.ones(TOKENS.shape, bool))
    equal_bits(run(params_of(), everywhere), native)
    partly = moe.Replay(np.where(SEGMENTS[..., None] == 1, ids, 77), SEGMENTS == 1)
    equal_bits(run(params_of(), partly), native)


@pytest.mark.all
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_recomputation_repeats_the_replayed_routes(remat):
    """Recording first-in-first-out is wrong under recomputation: a layer would pop the routes of
    another one."""
    replay = moe.Replay(other_routes(), SEGMENTS > 0)
    for given in (None, replay):
        equal_bits(value_and_gradient(remat)(params_of(), given),
                   value_and_gradient("none")(params_of(), given))


def test_other_routes_give_another_loss_and_a_gradient_of_the_router():
    replay = moe.Replay(other_routes(), SEGMENTS > 0)
    (native, _), _ = value_and_gradient()(params_of(), None)
    (value, own), gradient = value_and_gradient()(params_of(), replay)
    assert abs(value - native) > 0.1
    assert np.abs(gradient["layers"]["router"]).max() > 1e-3
    assert not np.array_equal(own, own_routes())  # the second layer sees other inputs
    np.testing.assert_array_equal(own[0], own_routes()[0])
    np.testing.assert_array_equal(gradient["layers"]["router_bias"], np.zeros((2, 8)))
    turned = moe.Replay(replay.ids[..., ::-1], replay.is_given)
    (again, _), turned_gradient = value_and_gradient()(params_of(), turned)
    np.testing.assert_allclose(again, value, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (turned_gradient, gradient)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_the_gradient_of_the_decoders_router_is_that_of_the_fixed_choice():
    """Along a direction, by differences of the replayed loss; the native loss jumps."""
    replay = moe.Replay(other_routes(), SEGMENTS > 0)
    run, params = value_and_gradient(), params_of()
    (_, _), gradient = run(params, replay)
    direction = gradient["layers"]["router"]
    expected = float(jnp.sum(direction**2))

    def moved(step):
        layers = params["layers"] | {"router": params["layers"]["router"] + step * direction}
        return float(run(params | {"layers": layers}, replay)[0][0])

    step = 2e-2 / float(jnp.sqrt(expected))
    found = (moved(step) - moved(-step)) / (2 * step)
    assert found == pytest.approx(expected, rel=2e-2)


@pytest.mark.all
def test_a_token_without_a_route_keeps_the_choice_of_the_router():
    """Only the first segment of row 0 has routes: the others are as without replay."""
    is_given = (SEGMENTS == 1) & (np.arange(2).reshape(2, 1) == 0)
    positions = np.broadcast_to(np.arange(9), TOKENS.shape).astype(np.int32)

    def hidden(replay):
        return np.asarray(transformer.rows_hidden(
            params_of(), DECODER, transformer.Program(), TOKENS, positions, SEGMENTS, replay=replay
        ))

    native, found = hidden(None), hidden(moe.Replay(other_routes(), is_given))
    changed = np.abs(found - native).max(-1) > 1e-4
    np.testing.assert_array_equal(changed, is_given)


@pytest.mark.all
def test_a_queue_of_routes_is_found_under_recomputation():
    """The planted copy: every run of a layer takes the next routes of a queue, first in, first out.
    The backward pass runs the layers again from the last one, and takes those of other layers."""
    kind, rng = MoeConfig(6, 2, 1, normalizes_top_k=False), np.random.default_rng(0)
    router_lde = jnp.asarray(rng.normal(size=(3, 6, 6)), jnp.float32)
    ids_ltk = np.array([[[0, 1]] * 4, [[2, 3]] * 4, [[4, 5]] * 4], np.int32)
    calls = []

    def from_queue(_):
        calls.append(None)
        return ids_ltk[(len(calls) - 1) % 3]

    def gradient(routes_of, is_remat):
        def layer(x_td, router_de, layer_ids):
            score = moe.scores(x_td @ router_de, kind)
            gates_tk = moe.gates(score, routes_of(layer_ids, x_td), kind)
            return x_td + jnp.pad(gates_tk, ((0, 0), (0, 4)))

        run = jax.checkpoint(layer) if is_remat else layer

        def loss(router_lde):
            x_td = jnp.asarray(np.random.default_rng(1).normal(size=(4, 6)), jnp.float32)
            for router_de, layer_ids in zip(router_lde, ids_ltk, strict=True):
                x_td = run(x_td, router_de, jnp.asarray(layer_ids))
            return jnp.sum(x_td**2)

        return np.asarray(jax.grad(loss)(router_lde))

    def queued(_, x_td):
        shape = jax.ShapeDtypeStruct((4, 2), jnp.int32)
        return jax.pure_callback(from_queue, shape, jax.lax.stop_gradient(x_td[0, 0]))

    given = lambda layer_ids, _: layer_ids
    expected = gradient(given, False)
    np.testing.assert_allclose(gradient(given, True), expected, rtol=1e-5)
    np.testing.assert_allclose(gradient(queued, False), expected, rtol=1e-5)
    calls.clear()
    assert np.abs(gradient(queued, True) - expected).max() > 1e-2 and len(calls) == 6
