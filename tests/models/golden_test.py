"""Every family and RoPE variant against logits computed by transformers (make_golden.py).

A model that agrees must also disagree once any of its features is taken away: otherwise the
golden file would not notice the feature missing.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import models
from jaxrl_tis.models import moe, transformer

pytestmark = pytest.mark.by_jax("XLA compiles and rounds the programs")

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
EXPERTS = [name for name in CASES if "moe" in name or "oss" in name]
ONE_OF_A_KIND = [name for name in CASES if "moe_" not in name]


@functools.cache
def golden(name):
    folder = GOLDEN / name
    config, params = models.load(folder)
    return config, params, np.load(folder / "tokens.npy"), np.load(folder / "logits.npy")


def miss(name, config, params):
    """Largest distance from the golden logits, in standard deviations of these."""
    _, _, tokens, expected = golden(name)
    logits = jax.jit(lambda *of: transformer.logits(of[0], config, of[1]))(params, tokens)
    assert logits.shape == expected.shape and logits.dtype == jnp.float32
    return np.abs(np.asarray(logits) - expected).max() / expected.std()


def with_layers(params, **layers):
    return {**params, "layers": {**params["layers"], **layers}}


def with_rope(config, **changes):
    return dataclasses.replace(config, rope=dataclasses.replace(config.rope, **changes))


def interleave(params, head_dim):
    """Reorders queries and keys so that rotating halves rotates neighbours instead."""

    def reorder(x):
        halves = x.reshape(*x.shape[:-1], x.shape[-1] // head_dim, head_dim // 2, 2)
        return halves.swapaxes(-1, -2).reshape(x.shape)

    names = {"q", "k", "q_bias", "k_bias", "q_norm", "k_norm"} & params["layers"].keys()
    return with_layers(params, **{name: reorder(params["layers"][name]) for name in names})


def test_the_cases_are_the_published_families_and_rope_types():
    dense = ["llama_default", "llama_linear", "llama_llama3", "llama_yarn", "qwen2_tied",
             "qwen2_untied", "qwen3"]
    assert CASES == ["gemma3", "gemma3_linear", "glm4_moe", "glm4_moe_norm", "gpt_oss", "gpt_oss_mxfp4",
                     *dense, "qwen3_moe", "qwen3_moe_raw", "qwen3_moe_step", "qwen3_moe_ties"]
    kinds = [golden(name)[0].rope.kind for name in dense]
    assert kinds == ["default", "linear", "llama3", "yarn", "default", "default", "default"]
    qwen3 = golden("qwen3")[0]
    assert qwen3.head_dim * qwen3.num_heads != qwen3.embed_dim
    assert golden("llama_yarn")[2].shape[1] > golden("llama_yarn")[0].rope.original_max_position
    assert all(golden(name)[3].std() > 1 for name in CASES)


@pytest.mark.cases(*(name for name in CASES if name != "gpt_oss"))
@pytest.mark.parametrize("name", CASES)
def test_logits_agree_with_transformers(name):
    config, params, _, _ = golden(name)
    assert miss(name, config, params) <= 2e-4


@pytest.mark.all
@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_control_wrong_theta(name):
    config, params, _, _ = golden(name)
    assert miss(name, with_rope(config, theta=config.rope.theta * 10), params) > 1e-2


@pytest.mark.all
@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_control_wrong_norm_epsilon(name):
    config, params, _, _ = golden(name)
    assert miss(name, dataclasses.replace(config, norm_eps=1e-6), params) > 1e-2


@pytest.mark.all
@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_control_interleaved_rotation(name):
    config, params, _, _ = golden(name)
    assert miss(name, config, interleave(params, config.head_dim)) > 1e-2


@pytest.mark.cases("llama_yarn")
@pytest.mark.parametrize("name", ["llama_linear", "llama_llama3", "llama_yarn"])
def test_control_no_rope_scaling(name):
    config, params, _, _ = golden(name)
    assert miss(name, with_rope(config, kind="default"), params) > 1e-2


def test_control_no_yarn_attention_factor():
    config, params, _, _ = golden("llama_yarn")
    assert miss("llama_yarn", with_rope(config, attention_factor=1.0), params) > 1e-2


@pytest.mark.cases("q_bias-qwen2_tied", "k_bias-qwen2_tied", "v_bias-qwen2_tied")
@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_untied"])
@pytest.mark.parametrize("bias", ["q_bias", "k_bias", "v_bias"])
def test_control_no_bias(name, bias):
    config, params, _, _ = golden(name)
    zeroed = with_layers(params, **{bias: jnp.zeros_like(params["layers"][bias])})
    assert miss(name, config, zeroed) > 1e-2


def test_control_no_qk_norm():
    config, params, _, _ = golden("qwen3")
    layers = {k: v for k, v in params["layers"].items() if k not in ("q_norm", "k_norm")}
    assert miss("qwen3", dataclasses.replace(config, qk_norm=False),
                {**params, "layers": layers}) > 1e-2


@pytest.mark.cases("q_norm")
@pytest.mark.parametrize("scale", ["attn_norm", "mlp_norm", "q_norm", "k_norm"])
def test_control_unit_norm_scale(scale):
    config, params, _, _ = golden("qwen3")
    unit = with_layers(params, **{scale: jnp.ones_like(params["layers"][scale])})
    assert miss("qwen3", config, unit) > 1e-2


def test_control_tied_head():
    config, params, _, _ = golden("qwen2_untied")
    tied = {**params, "head": params["embed"].T}
    assert miss("qwen2_untied", config, tied) > 1e-2


def of_experts(name, **changes):
    """A golden model with experts, and its config with some changes of these."""
    config, params, _, _ = golden(name)
    return dataclasses.replace(config, moe=dataclasses.replace(config.moe, **changes)), params


def stored(name, file):
    return np.load(GOLDEN / name / f"{file}.npy")


def run(name, replay=None):
    """Logits in float64 and what the routers chose."""
    config, params, tokens, _ = golden(name)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    program = transformer.Program()
    out = transformer.rows_routed(
        params, config, program, jnp.asarray(tokens), positions, jnp.ones_like(positions),
        replay=replay, asked=moe.Asked(routes=True),
    )
    return np.asarray(transformer.head_logits(params, program, out.x), np.float64), out.routed.ids


def test_the_cases_with_experts():
    configs = {name: golden(name)[0] for name in EXPERTS}
    dense = {name: config.moe.dense_layers for name, config in configs.items()}
    assert dense == {"glm4_moe": (0,), "glm4_moe_norm": (0,), "gpt_oss": (), "gpt_oss_mxfp4": (), "qwen3_moe": (),
                     "qwen3_moe_raw": (1,), "qwen3_moe_step": (0, 2), "qwen3_moe_ties": ()}
    assert [name for name in EXPERTS if not configs[name].moe.normalizes_top_k] == [
        "glm4_moe_norm", "qwen3_moe_raw"]
    glm = configs["glm4_moe"]
    assert (glm.moe.num_groups, glm.moe.top_groups, glm.moe.shared_dim) == (4, 2, 32)
    assert (glm.rope.fraction, glm.moe.scale, glm.qkv_bias, glm.qk_norm) == (0.5, 2.5, True, False)
    for name, config in configs.items():
        load = np.bincount(stored(name, "routes").ravel(), minlength=config.moe.num_experts)
        assert load.min() > 0  # every expert is chosen


@pytest.mark.all
@pytest.mark.parametrize("name", EXPERTS)
def test_routes_and_errors_are_those_of_transformers(name):
    """Against a run of transformers in float64, in float32 our error is at most twice its own."""
    logits, ids = run(name)
    expected = stored(name, "routes")
    if name.startswith("glm"):  # transformers leaves the order of a route open
        ids, expected = np.sort(ids), np.sort(expected)
    np.testing.assert_array_equal(ids, expected)
    theirs = stored(name, "error").astype(np.float64)
    ours = stored(name, "logits") + theirs - logits
    assert np.abs(ours).max() <= 2 * np.abs(theirs).max() < 2e-5
    assert np.square(ours).mean() <= 4 * np.square(theirs).mean()


def replay_miss(name):
    """As `miss`, where each token takes the route of the token before it."""
    ids = jnp.asarray(np.roll(stored(name, "routes"), 1, axis=2))
    logits, _ = run(name, moe.Replay(ids, jnp.ones(ids.shape[1:3], bool)))
    expected = stored(name, "replayed")
    return np.abs(logits - expected).max() / expected.std()


@pytest.mark.all
@pytest.mark.parametrize("name", EXPERTS)
def test_replayed_routes_agree_with_transformers(name):
    assert replay_miss(name) <= 2e-4
    assert np.abs(stored(name, "replayed") - stored(name, "logits")).max() > 0.1


@pytest.mark.all
@pytest.mark.parametrize("name", EXPERTS)
def test_control_gates_of_zeroed_scores(name, monkeypatch):
    """Gates of the scores that the choice has set to 0 outside of it: a route from elsewhere reads
    zeros."""
    own_gates, chosen = moe.gates, []

    def zeroed(scores_me, ids_mk, moe):
        is_chosen = jax.nn.one_hot(chosen[-1], moe.num_experts).sum(axis=-2)
        return own_gates(scores_me * is_chosen, ids_mk, moe)

    def choose(*args, own=moe.choose):
        chosen.append(own(*args))
        return chosen[-1]

    monkeypatch.setattr(moe, "choose", choose)
    monkeypatch.setattr(moe, "gates", zeroed)
    assert not replay_miss(name) < 1e-2  # where all of a route read zeros, NaN


@pytest.mark.all
@pytest.mark.parametrize("name", EXPERTS)
def test_control_renormalisation(name):
    other = not golden(name)[0].moe.normalizes_top_k
    assert miss(name, *of_experts(name, normalizes_top_k=other)) > 1e-2


@pytest.mark.cases("glm4_moe")
@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_norm"])
def test_control_no_scale(name):
    assert miss(name, *of_experts(name, scale=1.0)) > 1e-2


@pytest.mark.cases("glm4_moe")
@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_norm"])
def test_control_whole_rotation(name):
    config, params, _, _ = golden(name)
    assert miss(name, with_rope(config, fraction=1.0), params) > 1e-2


@pytest.mark.cases("glm4_moe")
@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_norm"])
def test_control_no_shared_experts(name):
    config, params = of_experts(name, shared_dim=0)
    left = {k: x for k, x in params["layers"].items() if k not in ("gate", "up", "down")}
    assert miss(name, config, {**params, "layers": left}) > 1e-2


def test_control_no_bound_of_groups():
    assert miss("glm4_moe", *of_experts("glm4_moe", num_groups=1, top_groups=1)) > 1e-2


@pytest.mark.cases("glm4_moe")
@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_norm"])
def test_control_no_bias_in_the_choice(name):
    config, params, _, _ = golden(name)
    bias = jnp.zeros_like(params["layers"]["router_bias"])
    assert miss(name, config, with_layers(params, router_bias=bias)) > 1e-2


@pytest.mark.cases("glm4_moe")
@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_norm"])
def test_control_bias_in_the_gates(name, monkeypatch):
    choose, gates, biases = moe.choose, moe.gates, []
    monkeypatch.setattr(
        moe, "choose", lambda scores, bias, of: biases.append(bias) or choose(scores, bias, of))
    monkeypatch.setattr(
        moe, "gates",
        lambda scores, ids, moe: gates(scores + biases[-1].reshape(1, 1, -1), ids, moe))
    config, params, _, _ = golden(name)
    assert miss(name, config, params) > 1e-2


def test_control_other_groups_have_the_score_0(monkeypatch):
    """As in transformers 4: an expert of them comes before one with a negative score."""
    def choose(scores_bte, bias_e, of):
        choice = scores_bte + bias_e.reshape(1, 1, -1)
        groups = choice.reshape(*choice.shape[:2], of.num_groups, -1)
        best = jax.lax.top_k(groups, 2)[0].sum(axis=-1)
        top = jax.nn.one_hot(jax.lax.top_k(best, of.top_groups)[1], of.num_groups).sum(axis=-2)
        zeroed = jnp.where(top[..., None] > 0, groups, 0.0).reshape(choice.shape)
        return jax.lax.top_k(zeroed, of.top_k)[1]

    monkeypatch.setattr(moe, "choose", choose)
    config, params, _, _ = golden("glm4_moe")
    assert miss("glm4_moe", config, params) > 1e-2


def test_control_other_order_of_equal_scores(monkeypatch):
    def higher_first(scores_bte, bias_e, of):
        return of.num_experts - 1 - jax.lax.top_k(scores_bte[..., ::-1], of.top_k)[1]

    monkeypatch.setattr(moe, "choose", higher_first)
    for name, is_missed in (("qwen3_moe", False), ("qwen3_moe_ties", True)):
        config, params, _, _ = golden(name)
        assert (miss(name, config, params) > 1e-2) == is_missed


@pytest.mark.all
def test_control_other_dense_layers():
    assert miss("qwen3_moe_raw", *of_experts("qwen3_moe_raw", dense_layers=(0,))) > 1e-2
    assert miss("qwen3_moe_step", *of_experts("qwen3_moe_step", dense_layers=(1, 3))) > 1e-2


@pytest.mark.cases("qwen3_moe")
@pytest.mark.parametrize("name", ["glm4_moe_norm", "qwen3_moe", "qwen3_moe_step"])
def test_control_gate_and_up_exchanged(name):
    config, params, _, _ = golden(name)
    gate, up = (params["layers"][f"expert_{x}"] for x in ("gate", "up"))
    assert miss(name, config, with_layers(params, expert_gate=up, expert_up=gate)) > 1e-2


@pytest.mark.all
def test_sharded_load_gives_the_same_logits():
    config, params, _, _ = golden("llama_llama3")
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec
    shardings = jax.tree.map(
        lambda leaf: jax.sharding.NamedSharding(
            mesh, spec(None, "data", "model") if leaf.ndim == 3 else spec()), params)
    _, sharded = models.load(GOLDEN / "llama_llama3", sharding=shardings)
    assert sharded["layers"]["q"].addressable_shards[0].data.shape == (2, 16, 16)
    jax.tree.map(np.testing.assert_array_equal, sharded, params)
    assert miss("llama_llama3", config, sharded) <= 2e-4
