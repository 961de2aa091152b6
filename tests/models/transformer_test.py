"""The decoder against a float64 forward pass written here, and the programs against each other."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.models import moe, transformer
from jaxrl_tis.models.config import ModelConfig, MoeConfig, RopeConfig

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("XLA compiles and rounds the programs")]

CONFIG = ModelConfig(
    family="llama", vocab_size=61, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=48, rope=RopeConfig(kind="default", theta=10000.0), max_position=64,
    norm_eps=1e-5, qkv_bias=False, qk_norm=False, tie_embeddings=False,
)
CONFIGS = {
    "llama": CONFIG,
    "qwen2": dataclasses.replace(CONFIG, family="qwen2", qkv_bias=True, tie_embeddings=True),
    # Heads times head_dim is not embed_dim here.
    "qwen3": dataclasses.replace(CONFIG, family="qwen3", qk_norm=True, head_dim=12),
}
TOKENS = np.random.default_rng(1).integers(0, 61, (2, 9)).astype(np.int32)
logits = jax.jit(transformer.logits, static_argnames=("config", "program"))


@functools.cache
def params_of(name):
    """Random parameters: norms around 1, biases around 0, matrices scaled by their fan-in."""
    rng = np.random.default_rng(7)

    def leaf(path, x):
        name, noise = path[-1].key, rng.normal(0, 1, x.shape)
        if "norm" in name or "bias" in name:
            return jnp.asarray(("norm" in name) + 0.3 * noise, jnp.float32)
        return jnp.asarray(noise * x.shape[-1 if name == "embed" else -2] ** -0.5, jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, transformer.abstract_params(CONFIGS[name]))


def places(config):
    """(stack, index in it) of every layer, in order."""
    dense = config.moe.dense_layers if config.moe else ()
    count = {"layers": 0, "dense_layers": 0}
    for i in range(config.num_layers):
        stack = "dense_layers" if i in dense else "layers"
        yield stack, count[stack]
        count[stack] += 1


def reference(params, config, tokens, positions, segment_ids):
    """[B,T,V] in float64, one row, head and token at a time where that is clearer."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    half = config.head_dim // 2
    angle = positions[..., None] * config.rope.theta ** (-np.arange(half) / half)

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale

    def heads(x, layer, name, count):
        y = x @ layer[name]
        y = y + layer[f"{name}_bias"] if config.qkv_bias else y
        return y.reshape(*x.shape[:2], count, config.head_dim)

    def rotate(x, name, layer):
        x = norm(x, layer[f"{name}_norm"]) if config.qk_norm else x
        turn = np.exp(1j * angle)[:, :, None]
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    def gated(x, layer, names=("gate", "up", "down")):
        gate, up, down = (layer[name] for name in names)
        hidden = x @ gate
        return (hidden / (1 + np.exp(-hidden)) * (x @ up)) @ down

    def experts(h, layer):
        out = gated(h, layer)
        for b, t in np.ndindex(h.shape[:2]):
            score = 1 / (1 + np.exp(-h[b, t] @ layer["router"]))
            chosen = np.argsort(-score - layer["router_bias"])[: config.moe.top_k]
            for e in chosen:
                of_expert = {name: layer[f"expert_{name}"][e] for name in ("gate", "up", "down")}
                out[b, t] += score[e] / score[chosen].sum() * gated(h[b, t], of_expert)
        return out

    x = params["embed"][tokens]
    for stack, i in places(config):
        layer = {name: w[i] for name, w in params[stack].items()}
        h = norm(x, layer["attn_norm"])
        q = rotate(heads(h, layer, "q", config.num_heads), "q", layer)
        k = rotate(heads(h, layer, "k", config.num_kv_heads), "k", layer)
        v = heads(h, layer, "v", config.num_kv_heads)
        out = np.zeros_like(q)
        for b, t, head in np.ndindex(q.shape[:3]):
            kv = head // (config.num_heads // config.num_kv_heads)
            seen = [s for s in range(t + 1) if segment_ids[b, s] == segment_ids[b, t]]
            weight = np.exp(k[b, seen, kv] @ q[b, t, head] / np.sqrt(config.head_dim))
            out[b, t, head] = weight / weight.sum() @ v[b, seen, kv]
        x = x + out.reshape(*x.shape[:2], -1) @ layer["o"]
        h = norm(x, layer["mlp_norm"])
        x = x + (experts(h, layer) if "router" in layer else gated(h, layer))
    head = params["embed"].T if config.tie_embeddings else params["head"]
    return norm(x, params["final_norm"]) @ head


def default_positions(tokens):
    return np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)


@pytest.mark.all
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_a_float64_forward(name):
    config, params = CONFIGS[name], params_of(name)
    positions, ones = default_positions(TOKENS), np.ones_like(TOKENS)
    expected = reference(params, config, TOKENS, positions, ones)
    actual = logits(params, config, TOKENS)
    assert actual.shape == expected.shape and actual.dtype == jnp.float32
    assert expected.std() > 0.5
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5)


def test_positions_and_segments_are_those_given():
    config, params = CONFIGS["qwen3"], params_of("qwen3")
    positions = np.array(
        [[5, 9, 10, 30, 31, 50, 51, 52, 60], [0, 1, 2, 3, 0, 1, 2, 0, 0]], np.int32)
    segment_ids = np.array([[1] * 9, [1, 1, 1, 1, 2, 2, 2, 0, 0]], np.int32)
    expected = reference(params, config, TOKENS, positions, segment_ids)
    actual = logits(params, config, TOKENS, positions, segment_ids)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5)
    assert np.abs(actual - logits(params, config, TOKENS)).max() > 0.1


def test_a_packed_row_equals_separate_rows():
    params, lengths = params_of("llama"), (4, 3)
    packed = np.concatenate([TOKENS[0, :4], TOKENS[1, :3], [0, 0]])[None]
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 0, 1]], np.int32)
    segment_ids = np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0]], np.int32)
    actual = np.asarray(logits(params, CONFIG, packed, positions, segment_ids))[0]
    separate = np.asarray(logits(params, CONFIG, TOKENS))
    np.testing.assert_allclose(actual[:4], separate[0, : lengths[0]], atol=1e-5)
    np.testing.assert_allclose(actual[4:7], separate[1, : lengths[1]], atol=1e-5)
    assert np.isfinite(actual).all()
    other = packed.copy()
    other[0, [0, 1, 2, 3, 7, 8]] += 1
    changed = np.asarray(logits(params, CONFIG, other, positions, segment_ids))[0]
    np.testing.assert_array_equal(changed[4:7], actual[4:7])


@pytest.mark.all
@pytest.mark.parametrize("name", CONFIGS)
def test_unrolled_layers_equal_scanned_ones(name):
    params = params_of(name)
    unstacked = transformer.unstack(params, CONFIGS[name])
    assert len(unstacked["layers"]) == 2
    for i in range(2):
        np.testing.assert_array_equal(unstacked["layers"][i]["up"], params["layers"]["up"][i])
    scanned = logits(params, CONFIGS[name], TOKENS)
    np.testing.assert_allclose(logits(unstacked, CONFIGS[name], TOKENS), scanned, atol=1e-5)


@pytest.mark.all
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "experts"])
def test_one_product_for_queries_keys_and_values_changes_nothing(name):
    config = mixed((1, 3)) if name == "experts" else CONFIGS[name]
    params = transformer.init(config, jax.random.key(0)) if name == "experts" else params_of(name)
    join = lambda params: params | {s: transformer.joined(params[s], config) for s in config.stacks}
    shapes = jax.eval_shape(join, params)
    for stack in config.stacks:
        assert not {*transformer.QKV} & set(shapes[stack])
        axes = transformer.logical_axes(config, is_joined=True)[stack]
        assert {n: len(x) for n, x in axes.items()} == {n: x.ndim for n, x in shapes[stack].items()}
    found = jax.jit(lambda params: transformer.logits(join(params), config, TOKENS))(params)
    np.testing.assert_allclose(found, logits(params, config, TOKENS), rtol=2e-5, atol=2e-5)


def test_layers_share_the_cosines_of_a_rotation():
    forward = jax.jit(transformer.logits, static_argnames="config")
    params = transformer.unstack(params_of("llama"), CONFIG)
    text = forward.lower(params, CONFIG, TOKENS).compile().as_text()
    assert len(re.findall(r" = f32\S* cosine\(", text)) == 1


def loss(params, program):
    out = transformer.logits(params, CONFIG, TOKENS, program=program)
    return jnp.sum(jax.nn.log_softmax(out)[:, :-1, 0] * np.arange(16).reshape(2, 8))


def count_dots(jaxpr):
    """Products in a program, nested ones included; a scanned body counts once."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == "dot_general"
        is_program = lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        for param in jax.tree.leaves(eqn.params, is_leaf=is_program):
            if is_program(param):
                count += count_dots(getattr(param, "jaxpr", param))
    return count


@pytest.mark.all
def test_remat_recomputes_and_leaves_the_gradients():
    params = params_of("llama")
    step = lambda mode: jax.value_and_grad(lambda p: loss(p, transformer.Program(remat=mode)))
    run = lambda mode: jax.jit(step(mode))(params)
    value, expected = run("none")
    program = lambda mode: jax.make_jaxpr(step(mode))(params).jaxpr
    dots = {mode: count_dots(program(mode)) for mode in transformer.REMAT}
    # Per layer: 7 projections and 2 of attention forward, twice that backward; 3 for the head.
    assert dots["none"] == 3 * 9 + 3
    # "dots" keeps the projections and repeats attention's batched products; "full" repeats the
    # layer, but for the last product, which no gradient needs.
    assert dots["none"] < dots["dots"] <= dots["none"] + 2
    assert dots["full"] >= dots["none"] + 8
    for mode in ("dots", "full", "host"):
        other_value, actual = run(mode)
        np.testing.assert_allclose(other_value, value, rtol=1e-6)
        for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            assert np.abs(e).max() > 0
            np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4 * np.abs(e).max())


def test_bfloat16_program_has_float32_logits():
    program = transformer.Program(dtype="bfloat16")
    params = params_of("llama")
    low, high = logits(params, CONFIG, TOKENS, program=program), logits(params, CONFIG, TOKENS)
    assert low.dtype == jnp.float32
    gap = np.abs(low - high)
    assert 1e-3 < gap.max() < 0.2
    # They are sums in float32, not bfloat16 numbers in a wider type.
    assert (np.asarray(low.astype(jnp.bfloat16), np.float32) != np.asarray(low)).mean() > 0.9


def test_highest_head_is_a_float32_product_of_highest_precision():
    def head_dot(program):
        x = jnp.ones((2, 32), jnp.bfloat16)
        jaxpr = jax.make_jaxpr(lambda x: transformer.head_logits(params_of("llama"), program, x))(x)
        (dot,) = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
        return {str(v.aval.dtype) for v in dot.invars}, str(dot.params["precision"])

    types, precision = head_dot(transformer.Program(dtype="bfloat16", fp32_head=True))
    assert types == {"float32"} and "HIGHEST" in precision
    types, precision = head_dot(transformer.Program(dtype="bfloat16"))
    assert types == {"bfloat16"} and "HIGHEST" not in precision


@pytest.mark.parametrize("name", CONFIGS)
def test_abstract_trees_match_init(name):
    config = CONFIGS[name]
    params = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
    abstract = transformer.abstract_params(config)
    axes = transformer.logical_axes(config)
    describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert describe(abstract) == describe(params)
    low = jax.tree.leaves(transformer.abstract_params(config, "bfloat16"))
    assert {x.dtype for x in low} == {jnp.dtype(jnp.bfloat16)}
    is_axes = lambda x: isinstance(x, tuple)
    assert jax.tree.structure(axes, is_leaf=is_axes) == jax.tree.structure(params)
    for a, p in zip(jax.tree.leaves(axes, is_leaf=is_axes), jax.tree.leaves(params), strict=True):
        assert len(a) == p.ndim
    assert axes["embed"] == ("vocab", "embed")
    assert axes["layers"]["q"] == ("layers", "embed", "heads")
    assert axes["layers"]["k"] == ("layers", "embed", "kv_heads")
    assert axes["layers"]["o"] == ("layers", "heads", "embed")
    assert axes["layers"]["down"] == ("layers", "mlp", "embed")


def test_parameters_are_those_of_the_contract():
    layers = {"attn_norm": (2, 32), "q": (2, 32, 32), "k": (2, 32, 16), "v": (2, 32, 16),
              "o": (2, 32, 32), "mlp_norm": (2, 32), "gate": (2, 32, 48), "up": (2, 32, 48),
              "down": (2, 48, 32)}
    biases = {"q_bias": (2, 32), "k_bias": (2, 16), "v_bias": (2, 16)}
    wide = {"q": (2, 32, 48), "k": (2, 32, 24), "v": (2, 32, 24), "o": (2, 48, 32)}
    outer = {"embed": (61, 32), "final_norm": (32,)}
    abstract = lambda name: transformer.abstract_params(CONFIGS[name])
    shapes = lambda name: jax.tree.map(lambda x: x.shape, abstract(name))
    assert shapes("llama") == outer | {"head": (32, 61), "layers": layers}
    assert shapes("qwen2") == outer | {"layers": layers | biases}
    norms = {"q_norm": (2, 12), "k_norm": (2, 12)}
    assert shapes("qwen3") == outer | {"head": (32, 61), "layers": layers | wide | norms}


def test_init_depends_on_the_key_and_differs_between_layers():
    init = jax.jit(transformer.init, static_argnums=0)
    first, again, other = (init(CONFIG, jax.random.key(i)) for i in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        w = first["layers"][name]
        assert not np.array_equal(w, other["layers"][name]) and not np.array_equal(w[0], w[1])
    # Fan-in scaling; outputs to the residual stream are scaled down by sqrt(2 * layers) = 2.
    np.testing.assert_allclose(np.std(first["layers"]["gate"]), 32**-0.5, rtol=0.1)
    np.testing.assert_allclose(np.std(first["layers"]["down"]), 48**-0.5 / 2, rtol=0.1)
    assert not np.array_equal(first["embed"], other["embed"])


# Layers with experts among dense ones

MOE = MoeConfig(6, 2, 16, "sigmoid", shared_dim=16)
MIXED = {
    "all": (), "first dense": (0,), "alternating": (1, 3), "last dense": (4,), "ends": (0, 1, 4),
}


def mixed(dense_layers):
    return dataclasses.replace(
        CONFIG, family="glm4_moe", num_layers=5,
        moe=dataclasses.replace(MOE, dense_layers=dense_layers),
    )


@functools.cache
def marked_params(config):
    """Parameters whose n-th router sends every token to experts n and n + 1: their bias decides."""
    params = jax.jit(transformer.init, static_argnums=0)(config, jax.random.key(0))
    count = config.num_layers - len(config.moe.dense_layers)
    bias = np.zeros((count, 6), np.float32)
    for n in range(count):
        bias[n, n % 6], bias[n, (n + 1) % 6] = 20, 10
    return params | {"layers": params["layers"] | {"router_bias": bias}}


@functools.cache
def routed_of(config, unrolled):
    def run(params, replay):
        params = transformer.unstack(params, config) if unrolled else params
        return transformer.rows_routed(
            params, config, transformer.Program(), TOKENS, default_positions(TOKENS),
            np.ones_like(TOKENS), replay=replay, asked=moe.Asked(routes=True, statistics=True),
        )

    return jax.jit(run)


@pytest.mark.cases("alternating")
@pytest.mark.parametrize("name", MIXED)
def test_routes_are_in_the_order_of_the_layers_with_experts(name):
    config = mixed(MIXED[name])
    count, params = 5 - len(MIXED[name]), marked_params(config)
    scanned, unrolled = (routed_of(config, is_unrolled)(params, None) for is_unrolled in (0, 1))
    expected = (np.arange(count)[:, None] + np.arange(2)) % 6
    for found in (scanned, unrolled):
        shape = (count, *TOKENS.shape, 2)
        np.testing.assert_array_equal(
            found.routed.ids, np.broadcast_to(expected[:, None, None], shape)
        )
        np.testing.assert_array_equal(
            found.routed.load, 9.0 * (np.arange(6) == expected[..., None]).any(1)[:, None].repeat(2, 1)
        )
    np.testing.assert_allclose(unrolled.x, scanned.x, rtol=1e-4, atol=1e-5)
    # Replay reaches the layer that it is of: a change in the last one leaves the earlier ones alone.
    ids = np.array(scanned.routed.ids)
    np.testing.assert_array_equal(
        routed_of(config, 0)(params, moe.Replay(ids, np.ones_like(TOKENS, bool))).x, scanned.x
    )
    ids[-1] = (ids[-1] + 2) % 6
    replay = moe.Replay(ids, np.ones_like(TOKENS, bool))
    changed = [routed_of(config, is_unrolled)(params, replay) for is_unrolled in (0, 1)]
    np.testing.assert_allclose(changed[1].x, changed[0].x, rtol=1e-4, atol=1e-5)
    assert np.abs(changed[0].x - scanned.x).max() > 1e-2
    for found in changed:
        np.testing.assert_allclose(found.routed.probs[:-1], scanned.routed.probs[:-1], rtol=1e-4)


@pytest.mark.all
def test_layers_with_experts_equal_a_loop_over_tokens():
    """Float64, one expert of one token at a time, by the router's own choice."""
    config = mixed((0, 2))
    params = jax.jit(transformer.init, static_argnums=0)(config, jax.random.key(1))
    params["layers"]["router_bias"] = np.random.default_rng(0).normal(0, 0.2, (3, 6)).astype("f4")
    positions, ones = default_positions(TOKENS), np.ones_like(TOKENS)
    found = transformer.head_logits(
        params, transformer.Program(), routed_of(config, 0)(params, None).x
    )
    expected = reference(params, config, TOKENS, positions, ones)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)
