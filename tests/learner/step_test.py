"""The learner's programs against a reference built here from whole logits.

The reference computes [B,T,V] logits, a log-softmax, a gather, the ratio, the clip, the weight and
a weighted sum whose coefficients are made in NumPy; `jax.grad` of that is the update under plain
gradient descent at rate 1, so a wrong scale shows.
"""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

from configs import default
from jaxrl_tis import sharding
from jaxrl_tis.estimators import reduce
from jaxrl_tis.estimators.counts import is_count
from jaxrl_tis.learner import correction
from jaxrl_tis.learner.optimizer import make_optimizer, noise_seeds, perturb, scale_loss
from jaxrl_tis.learner.scoring import (
    Learner, make_logits, make_score, make_score_norms, make_values, response_scores,
)
from jaxrl_tis.learner.step import (
    MicroLoss, TrainState, accumulate_gradients, make_arriving_step, make_critic_step,
    make_supervised_step, make_train_step,
)
from jaxrl_tis.models import lora, placement, transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from tests import jitted

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("XLA compiles and rounds the programs")]

B, T, V, D = 8, 9, 19, 16
CONFIG = ModelConfig(
    family="llama", vocab_size=V, embed_dim=D, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, mlp_dim=24, rope=RopeConfig("default", 10000.0), max_position=64, norm_eps=1e-6,
    qkv_bias=False, qk_norm=False, tie_embeddings=False,
)
LEARNER = Learner(CONFIG, transformer.Program(), max_targets=6, chunk=10)
CAP, LOW, HIGH = 1.2, 0.2, 0.28
PROMPTS = (4, 9, 9, 4, 9, 9, 2, 4)  # of the rows of `batch`
WEIGHT, PPO = f"token_tis(cap={CAP})", f"ppo(clip_low={LOW}, clip_high={HIGH})"


def fields(**changes):
    c = default.get_config().correction
    c.weight, c.objective = WEIGHT, PPO
    c.update(changes)
    return c


@functools.cache
def params(key=0):
    """Initial parameters with a larger head, for distributions away from uniform, and embedding,
    whose gradient is then no larger than the others."""
    p = transformer.init(CONFIG, jax.random.key(key))
    return jax.device_get({**p, "head": 1.5 * p["head"], "embed": 4.0 * p["embed"]})


@functools.cache
def batch():
    """Ragged rows with holes in the masks; row 5 is padding but for its prompt, row 7 wholly."""
    rng = np.random.default_rng(0)
    lengths = np.array([9, 7, 8, 5, 9, 3, 6, 0])
    starts = np.array([3, 2, 4, 4, 3, 3, 1, 0])  # first response token
    t = np.arange(T)[None]
    mask = (t >= starts[:, None]) & (t < lengths[:, None])
    mask[0, 5] = mask[4, 6] = mask[4, 7] = mask[6, 2] = False
    normal = lambda scale: rng.normal(0, scale, (B, T)).astype(np.float32)
    old = reference_logprob(params(), {
        "tokens": (tokens := rng.integers(0, V, (B, T)).astype(np.int32)),
        "segment_ids": (segments := (t < lengths[:, None]).astype(np.int32)),
        "temperature": (temperature := np.repeat(
            np.linspace(0.5, 1.5, B).astype(np.float32)[:, None], T, axis=1
        )),
    })
    out = {
        "tokens": tokens, "positions": np.broadcast_to(t, (B, T)).astype(np.int32),
        "segment_ids": segments, "mask": mask, "temperature": temperature,
        "logp_old": old + normal(0.3), "logp_behav": old + normal(0.3),
        "logp_ref": old + normal(0.5), "adv": normal(1.0), "weights": np.exp(normal(0.3)),
        "group": np.repeat(np.int32(PROMPTS)[:, None], T, axis=1),
        "values": normal(0.3), "returns": normal(1.0),
    }
    out["logp_prox"] = out["logp_old"] + normal(0.2)
    out["weights"] = np.minimum(out["weights"], CAP)
    return {name: np.asarray(value) for name, value in out.items()}


def with_nan_padding(data):
    """The same rows with NaN wherever a per-token field means nothing."""
    names = ("logp_old", "logp_behav", "logp_ref", "adv", "weights", "values", "returns")
    return data | {n: np.where(data["mask"], data[n], np.nan) for n in names if n in data}


@jitted.function
def reference_logprob(p, data):
    """log softmax(logits / temperature) at each token, [B,T]; 0 at the first position."""
    logits = transformer.logits(p, CONFIG, data["tokens"], None, data["segment_ids"])
    logp = jax.nn.log_softmax(logits / data["temperature"][:, :1, None], axis=-1)
    taken = jnp.take_along_axis(logp[:, :-1], data["tokens"][:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(taken, ((0, 0), (1, 0)))


@jitted.function
def reference_entropy(p, data):
    """Entropy of the distribution that each token is drawn from, [B,T]."""
    logits = transformer.logits(p, CONFIG, data["tokens"], None, data["segment_ids"])
    logp = jax.nn.log_softmax(logits / data["temperature"][:, :1, None], axis=-1)
    return jnp.pad(-jnp.sum(jnp.exp(logp) * logp, axis=-1)[:, :-1], ((0, 0), (1, 0)))


def coefficients(mask, mode):
    """What each token's loss is multiplied with, [B,T]; by the definition of each mode."""
    tokens, sequences = mask.sum(), mask.any(1).sum()
    per_row = np.maximum(mask.sum(1, keepdims=True), 1)
    per_prompt = np.array([[mask[np.equal(PROMPTS, p)].sum()] for p in PROMPTS])
    return mask * {
        "token-mean": 1 / tokens,
        "token-sum": 1.0,
        "seq-mean-token-sum": 1 / sequences,
        "seq-mean-token-sum-norm": 1 / sequences / T,
        "seq-mean-token-mean": 1 / sequences / per_row,
        "prompt-mean": 1 / 3 / per_prompt,
    }[mode]


def reference_loss(p, data, coefficient, kl_coeff, entropy_coeff):
    """sum_bt coefficient * (w * PPO-clip + kl_coeff * k3 - entropy_coeff * entropy)."""
    logp = reference_logprob(p, data)
    ratio = jnp.exp(logp - data["logp_old"])
    clipped = jnp.clip(ratio, 1 - LOW, 1 + HIGH)
    surrogate = -jnp.minimum(ratio * data["adv"], clipped * data["adv"]) * data["weights"]
    ref = data["logp_ref"] - logp
    k3 = jnp.exp(ref) - ref - 1
    bonus = reference_entropy(p, data)
    return jnp.sum(coefficient * (surrogate + kl_coeff * k3 - entropy_coeff * bonus))


reference_gradient = jax.jit(jax.grad(reference_loss))


def cut(data, count):
    """[B,...] -> [count, B / count, ...]"""
    return {name: x.reshape(count, len(x) // count, *x.shape[1:]) for name, x in data.items()}


def start(p, tx):
    return jax.jit(lambda p: TrainState(p, tx.init(p)))(p)


SGD = optax.sgd(1.0)
FORWARD = ("tokens", "positions", "segment_ids", "mask", "temperature")  # what log-probs take


def updated(chosen, data, count):
    """(parameters, metrics) after one update of plain gradient descent in `count` micro-batches."""
    train_step = make_train_step(LEARNER, chosen, SGD)
    state, metrics = train_step(start(params(), SGD), cut(data, count))
    return jax.device_get(state.params), jax.device_get(metrics)


def assert_trees_close(ours, theirs, atol):
    flat = lambda tree: jax.tree_util.tree_leaves_with_path(tree)
    for (path, a), (_, b) in zip(flat(ours), flat(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


def difference(ours, theirs):
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), ours, theirs)))


@pytest.mark.all
def test_counts_add_up_over_micro_batches_and_arriving_parts():
    chosen = correction.parse(fields(
        centre="behav", objective="reinforce", masks="token_ratio(lower=0.9, upper=1.1)",
    ))
    data = {name: x for name, x in batch().items() if name != "weights"}
    of = lambda metrics: {name: x for name, x in jax.device_get(metrics).items() if is_count(name)}
    whole = of(updated(chosen, data, 1)[1])
    assert whole["correction/weight/num_tokens"] == whole["correction/mask/token_ratio/num_tokens"] == (
        data["mask"].sum())
    assert 0 < whole["correction/mask/token_ratio/dropped"] < data["mask"].sum()
    assert of(updated(chosen, data, 4)[1]) == whole
    add, finish = make_arriving_step(LEARNER, chosen, SGD)
    state, sums = start(params(), SGD), None
    for i in (2, 0, 3, 1):
        part = {name: x[2 * i : 2 * i + 2] for name, x in data.items()}
        sums, _ = add(state.params, sums, cut(part, 1))
    mask = data["mask"]
    _, metrics = finish(state, sums, np.float32(mask.sum()), np.float32(mask.any(1).sum()))
    assert of(metrics) == whole


# Log-probs


@pytest.mark.parametrize("chunk, max_targets", [(10, 6), (1, 6), (1000, 1000)])
def test_log_probs_and_entropies_are_those_of_the_whole_logits(chunk, max_targets):
    learner = dataclasses.replace(LEARNER, chunk=chunk, max_targets=max_targets)
    data, mask = batch(), batch()["mask"]
    ids = np.stack([data["tokens"], np.full_like(data["tokens"], -1)], axis=-1)
    found = jax.jit(lambda p, b: response_scores(p, learner, b, with_entropy=True))(
        params(), data | {"top_ids": ids}
    )
    logp, entropy = found["logp"], found["entropy"]
    np.testing.assert_array_equal(found["logp_top"], np.stack([logp, 0 * logp], axis=-1))
    expected = np.where(mask, reference_logprob(params(), data), 0)
    np.testing.assert_allclose(logp, expected, atol=2e-5)
    np.testing.assert_allclose(
        entropy, np.where(mask, reference_entropy(params(), data), 0), atol=2e-5
    )
    cold = data | {"temperature": np.ones_like(data["temperature"])}
    unscaled = np.where(mask, reference_logprob(params(), cold), 0)
    assert np.abs(unscaled - expected).max() > 0.1  # the temperature matters in this batch


def test_score_runs_micro_batches_one_by_one():
    data = batch()
    scored = make_score(LEARNER)(params(), cut(data, 4))
    assert scored["logp"].shape == (4, 2, T)
    expected = np.where(data["mask"], reference_logprob(params(), data), 0)
    np.testing.assert_allclose(scored["logp"].reshape(B, T), expected, atol=2e-5)
    bare = make_score(LEARNER, with_entropy=False)(params(), cut(data, 4))
    np.testing.assert_allclose(bare["logp"], scored["logp"], atol=1e-6)
    assert not np.any(bare["entropy"])


# The policy update


AGED = dict(centre="prox", staleness_weight="token_vanilla")


def aged():
    """(the batch of an update whose correction is `AGED`, the same with its centre and weights written out)"""
    data = dict(batch())
    staleness = np.exp(data["logp_prox"] - data["logp_old"])
    engine = np.minimum(np.exp(data["logp_old"] - data["logp_behav"]), CAP)
    del data["weights"]
    return data, data | {"logp_old": data["logp_prox"], "weights": engine * staleness}


@pytest.mark.cases("seq-mean-token-mean", "prompt-mean", "token-mean, aged")
@pytest.mark.parametrize("mode", [*reduce.MODES, "token-mean, aged"])
def test_update_is_the_reference_gradient_whole_and_in_micro_batches(mode):
    given, data = aged() if mode.endswith("aged") else (batch(), batch())
    mode, changes = mode.split(",")[0], AGED if mode.endswith("aged") else {}
    coefficient = coefficients(data["mask"], mode)
    gradient = reference_gradient(params(), data, coefficient, 0.0, 0.0)
    expected = jax.tree.map(lambda p, g: p - np.asarray(g), params(), gradient)
    scale = max(jax.tree.leaves(jax.tree.map(lambda g: np.abs(g).max(), gradient)))
    assert scale > 1e-3
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradient)))
    chosen, found = correction.parse(fields(aggregation=mode, **changes)), []
    for count in (4,) if mode in ("token-sum", "seq-mean-token-sum") else (1, 4):
        ours, metrics = updated(chosen, with_nan_padding(given), count)
        assert_trees_close(ours, expected, atol=1e-5 * max(1, scale))
        assert metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        found.append(metrics)
    for name in found[0]:
        assert found[-1][name] == pytest.approx(found[0][name], abs=1e-5, rel=1e-5), name


HALF = dataclasses.replace(LEARNER, program=transformer.Program(dtype="float16"))


@pytest.mark.all
@pytest.mark.parametrize("is_aged", [False, True])
def test_a_float16_update_is_the_reference_gradient_where_it_is_scaled(is_aged):
    """Advantages of 1e-6 make gradients of activations below float16's 6e-8."""
    small = {"adv": 1e-6 * batch()["adv"]}
    data, reference = (x | small for x in (aged() if is_aged else (batch(), batch())))
    coefficient = coefficients(data["mask"], "token-mean")
    gradient = reference_gradient(params(), reference, coefficient, 0.0, 0.0)
    size = float(optax.global_norm(gradient))
    chosen = correction.parse(fields(aggregation="token-mean", **AGED if is_aged else {}))

    def error(tx, learner):
        state, metrics = make_train_step(learner, chosen, tx)(start(params(), tx), cut(data, 2))
        # Moved by 1e5 times the gradient, which float32 parameters would round away.
        step = jax.tree.map(lambda new, old: (old - new) / 1e5, state.params, params())
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))
        return float(optax.global_norm(jax.tree.map(jnp.subtract, step, gradient))) / size, metrics

    tx = optax.sgd(1e5)
    assert error(tx, LEARNER)[0] < 1e-3
    found, metrics = error(scale_loss(tx), HALF)
    assert found < 0.02
    assert metrics["actor/grad_norm"] == pytest.approx(size, rel=0.01)
    assert (metrics["actor/loss_scale"], metrics["actor/is_skipped"]) == (65536, 0)
    assert error(tx, HALF)[0] > 0.2


@pytest.mark.all
def test_a_float16_update_that_overflows_changes_the_scale_alone_until_it_fits():
    data = cut(batch() | {"adv": 1e3 * batch()["adv"]}, 1)
    tx = scale_loss(SGD)
    train_step = make_train_step(HALF, correction.parse(fields()), tx)
    state, scales, norms = start(params(), tx), [], []
    while not norms or norms[-1] == 0:
        before = jax.device_get(state.params)
        state, metrics = train_step(state, data)
        scales.append(float(metrics["actor/loss_scale"]))
        norms.append(float(metrics["actor/grad_norm"]))
        moved = difference(jax.device_get(state.params), before)
        assert (moved == 0) == bool(metrics["actor/is_skipped"]) == (norms[-1] == 0)
    assert len(scales) > 2
    assert scales == [2.0 ** (15 - i) for i in range(len(scales) - 1)] + [scales[-2]]


def test_what_overflows_at_the_smallest_scale_is_told():
    data = cut(batch() | {"adv": 1e9 * batch()["adv"]}, 1)
    tx = scale_loss(SGD)
    state = start(params(), tx)
    state = dataclasses.replace(state, opt_state=state.opt_state._replace(loss_scale=jnp.float32(1)))
    _, metrics = make_train_step(HALF, correction.parse(fields()), tx)(state, data)
    assert not np.isfinite(metrics["actor/grad_norm"]) and metrics["actor/loss_scale"] == 1


@pytest.mark.all
def test_kl_and_entropy_terms():
    data = batch()
    coefficient = coefficients(data["mask"], "token-mean")
    gradient = reference_gradient(params(), data, coefficient, 0.3, 0.2)
    expected = jax.tree.map(lambda p, g: p - np.asarray(g), params(), gradient)
    chosen = correction.parse(fields(kl_coeff=0.3, entropy_coeff=0.2))
    ours, metrics = updated(chosen, with_nan_padding(data), 2)
    assert_trees_close(ours, expected, atol=1e-5)
    entropy = float(np.sum(coefficient * reference_entropy(params(), data)))
    assert metrics["actor/entropy_loss"] == pytest.approx(entropy, rel=1e-4)
    ref = data["logp_ref"] - reference_logprob(params(), data)
    kl = np.sum(coefficient * (np.exp(ref) - ref - 1))
    assert metrics["actor/kl_loss"] == pytest.approx(float(kl), rel=1e-4)
    assert metrics["actor/kl_coef"] == pytest.approx(0.3, rel=1e-6)


def test_an_exact_kl_is_that_of_the_whole_logits():
    data, mask = batch(), batch()["mask"]

    @jitted.function
    def behind(p):
        logits = transformer.logits(p, CONFIG, data["tokens"], None, data["segment_ids"])
        logp = jax.nn.log_softmax(logits / data["temperature"][:, :1, None])
        return jnp.pad(logp[:, :-1], ((0, 0), (1, 0), (0, 0)))

    logp_ref = behind(params(1))
    logits = np.reshape(make_logits(LEARNER)(params(), cut(data, 4)), (B, T, V))
    found = jitted.function(jax.nn.log_softmax)(logits)
    np.testing.assert_allclose(found[mask], behind(params())[mask], atol=2e-5)
    assert not np.any(logits[~mask])

    def kl(p):
        logp = behind(p)
        kl_bt = jnp.sum(jnp.exp(logp) * (logp - logp_ref), axis=-1)
        return jnp.sum(jnp.where(mask, kl_bt, 0)) / mask.sum()

    coefficient = coefficients(mask, "token-mean")
    value, gradient = jitted.value_and_grad(kl)(params())
    policy = jax.device_get(reference_gradient(params(), data, coefficient, 0.0, 0.0))
    expected = jax.tree.map(lambda p, g, h: p - (g + 0.3 * h), params(), policy, gradient)
    chosen = correction.parse(fields(kl="exact_reverse", kl_coeff=0.3))
    given = with_nan_padding(data) | {"logits_ref": logp_ref}
    ours, metrics = updated(chosen, given, 2)
    assert metrics["actor/kl_loss"] == pytest.approx(float(value), rel=1e-4)
    assert_trees_close(ours, expected, atol=1e-5)


@pytest.mark.all
def test_the_dense_policy_is_pulled_to_the_shadow_that_the_sampler_kept():
    """Shadow Mask: the RL loss of the kept keys, and the exact KL of all keys to them, which pulls the
    pass with all keys alone. Keys 1 and 2 of a row are unseen from position 4 on."""
    data, mask = dict(batch()), batch()["mask"]
    data["evict_step"] = np.full((B, T), T, np.int32)
    data["evict_step"][:, 1:3] = 4
    before = lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))

    def behind(p, evict_step):
        x = transformer.rows_hidden(
            p, CONFIG, LEARNER.program, data["tokens"], data["positions"], data["segment_ids"],
            evict_step,
        )
        return jax.nn.log_softmax(before(x @ p["head"]) / data["temperature"][:, :1, None])

    def total(p, rate, is_pulling):
        logq = behind(p, data["evict_step"])
        logp = behind(p, None)
        logp_bt = jnp.take_along_axis(logq, data["tokens"][..., None], axis=-1)[..., 0]
        ratio = jnp.exp(logp_bt - data["logp_old"])
        clipped = jnp.clip(ratio, 1 - LOW, 1 + HIGH)
        policy = -jnp.minimum(ratio * data["adv"], clipped * data["adv"]) * data["weights"]
        logq = logq if is_pulling else jax.lax.stop_gradient(logq)
        kl = jnp.sum(jnp.exp(logp) * (logp - logq), axis=-1)
        mean = lambda x: jnp.sum(jnp.where(mask, x, 0)) / mask.sum()
        return mean(policy) + rate * mean(kl), mean(kl)

    gradient = jax.jit(jax.grad(total, has_aux=True), static_argnums=2)
    expected, kl = gradient(params(), 0.7, False)
    pulled, _ = gradient(params(), 0.7, True)
    plain, _ = gradient(params(), 0.0, False)
    assert kl > 1e-3
    for other in (pulled, plain):  # both would be seen
        assert difference(jax.device_get(expected), jax.device_get(other)) > 1e-3
    chosen = correction.parse(fields(dense_kl_coeff=0.7))
    for count in (1, 4):
        ours, metrics = updated(chosen, with_nan_padding(data), count)
        assert metrics["actor/dense_kl_loss"] == pytest.approx(float(kl), rel=1e-4)
        wanted = jax.tree.map(lambda p, g: p - np.asarray(g), params(), expected)
        assert_trees_close(ours, wanted, atol=1e-5)
    ours, metrics = updated(correction.parse(fields()), data, 1)
    assert "actor/dense_kl_loss" not in metrics
    assert_trees_close(ours, jax.tree.map(lambda p, g: p - np.asarray(g), params(), plain), atol=1e-5)


@pytest.mark.all
def test_a_mesh_changes_no_pull_on_the_dense_policy():
    """Rows, widths, heads with the vocabulary, and positions cut in two, compared with one device."""
    config = dataclasses.replace(CONFIG, num_kv_heads=2, vocab_size=20)
    whole = jax.device_get(transformer.init(config, jax.random.key(0)))
    data = {n: np.pad(x, ((0, 0), (0, 12 - T))) for n, x in batch().items() if x.shape == (B, T)}
    data |= {"temperature": np.maximum(data["temperature"], 0.5), "adv": 0 * data["adv"]}
    data["evict_step"] = np.full((B, 12), 12, np.int32)
    data["evict_step"][:, 1:3] = 4
    found = []
    for mesh in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1, 2)):
        layout = sharding.layout(mesh, sharding.TRAIN_RULES, vocab_size=20)
        learner = Learner(config, transformer.Program(layout=layout), max_targets=12, chunk=10)
        train_step = make_train_step(learner, correction.parse(fields(dense_kl_coeff=0.7)), SGD)
        state, metrics = train_step(
            start(placement.put(whole, layout, config), SGD), layout.put_batch(cut(data, 2))
        )
        found.append((jax.device_get(state.params), metrics["actor/dense_kl_loss"]))
    (one, kl), *others = found
    assert kl > 1e-3 and difference(one, whole) > 1e-3
    for params, same in others:
        assert same == pytest.approx(float(kl), rel=1e-5)
        assert_trees_close(params, one, atol=1e-6)


@pytest.mark.all
def test_a_controller_scales_the_update_and_not_the_gradient():
    data, chosen = batch(), correction.parse(fields())
    whole, metrics = updated(chosen, data, 2)
    half, half_metrics = updated(chosen, data | {"lr_scale": np.full(B, 0.5, np.float32)}, 2)
    expected = jax.tree.map(lambda p, q: p + 0.5 * (q - p), params(), whole)
    assert_trees_close(half, expected, atol=1e-6)
    assert half_metrics["actor/grad_norm"] == metrics["actor/grad_norm"] > 0


def test_the_rate_that_is_told_is_that_of_the_update():
    """Of 6 updates from 0.1 to 0 the second has 0.1 * 5 / 6; a controller halves it."""
    fields_ = dict(lr=0.1, schedule="linear", warmup=0, b1=0.9, b2=0.9, eps=1.0, weight_decay=0.0, offload=False,
                   clip_norm=1.0)
    tx = make_optimizer(ml_collections.ConfigDict(fields_), 6)
    take = make_train_step(LEARNER, correction.parse(fields()), tx)
    data = cut(batch() | {"lr_scale": np.full(B, 0.5, np.float32)}, 2)
    state, told = start(params(), tx), []
    for _ in range(2):
        state, metrics = take(state, data)
        told.append(float(metrics["actor/lr"]))
    assert told == pytest.approx([0.05, 0.05 * 5 / 6])


# Layerwise perturbation

DRAW = np.arange(B, dtype=np.uint32) + 11


def noise(layer, seed):
    return np.asarray(jax.random.normal(jax.random.fold_in(jax.random.key(seed), layer), (T, D)))


def one_of_each():
    """Rows in which no token comes twice, so that each position has a row of the table to itself."""
    rng = np.random.default_rng(1)
    tokens = np.stack([rng.permutation(V)[:T] for _ in range(B)]).astype(np.int32)
    return batch() | {"tokens": tokens, "noise_seed": DRAW}


def test_the_noise_is_on_the_input_of_each_layer():
    """Of one layer this is the embedding, whose rows are moved here by hand."""
    std, data = 0.3, one_of_each()
    noisy = params() | {"perturbation": np.full(1, np.log(std), np.float32)}
    found = jitted.function(response_scores)(noisy, LEARNER, data, with_entropy=False)["logp"]
    for b in range(B):
        row = {name: x[b : b + 1] for name, x in data.items()}
        embed = np.array(params()["embed"])
        embed[row["tokens"][0]] += std * noise(0, DRAW[b])
        logp = reference_logprob(params() | {"embed": embed}, row) * row["mask"]
        np.testing.assert_allclose(found[b], logp[0], atol=2e-5)
    assert np.abs(found - reference_logprob(params(), data) * data["mask"]).max() > 0.1


@pytest.mark.all
@pytest.mark.cases("full")
@pytest.mark.parametrize("remat", ["none", "full"])
def test_each_layer_has_noise_and_a_deviation_of_its_own(remat):
    """The gradient by a layer's deviation is that of small differences, also where the backward pass
    makes the noise again; and no layer's noise is another's."""
    config = dataclasses.replace(CONFIG, num_layers=3)
    learner = dataclasses.replace(LEARNER, config=config, program=transformer.Program(remat=remat))
    p = transformer.init(config, jax.random.key(0))
    data = one_of_each()

    @jax.jit
    def total(log_std):
        logp = response_scores(p | {"perturbation": log_std}, learner, data, False)["logp"]
        return jnp.sum(logp * data["adv"] * data["mask"])

    at = jnp.log(jnp.array([0.1, 0.2, 0.3]))
    found = jax.jit(jax.grad(total))(at)
    h = 0.01
    expected = [(total(at.at[i].add(h)) - total(at.at[i].add(-h))) / (2 * h) for i in range(3)]
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=1e-3)
    assert np.all(np.abs(found) > 1e-3) and len({round(float(x), 4) for x in found}) == 3
    assert np.abs(noise(0, 11) - noise(1, 11)).max() > 1


@pytest.mark.all
def test_a_small_perturbation_is_no_perturbation_and_a_large_one_is_learned():
    """The ratio is that of the perturbed policy, whether in one micro-batch or four. Adam's first step
    is its learning rate, against the gradient."""
    data, chosen = batch() | {"draw": DRAW}, correction.parse(fields())

    def after(std, count):
        tx = perturb(SGD, 1, perturb_std=std, perturb_lr=0.01)
        state, metrics = make_train_step(LEARNER, chosen, tx)(start(params(), tx), cut(data, count))
        return jax.device_get((state.params, state.opt_state.log_std, metrics))

    plain, plain_metrics = updated(chosen, data, 2)
    small, _, metrics = after(1e-7, 2)
    assert_trees_close(small, plain, atol=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(plain_metrics["actor/grad_norm"], rel=1e-4)
    whole, log_std, metrics = after(0.3, 1)
    parts, same, _ = after(0.3, 4)
    seeds = [noise_seeds(cut(data, n)["draw"], jnp.int32(c)).ravel() for n in (1, 4) for c in (0, 1)]
    np.testing.assert_array_equal(seeds[0], seeds[2])
    assert len(set(np.concatenate(seeds[:2]).tolist())) == 2 * B
    assert difference(whole, plain) > 1e-3
    assert_trees_close(parts, whole, atol=2e-6)
    np.testing.assert_allclose(same, log_std, atol=1e-6)
    assert abs(abs(log_std[0] - np.log(0.3)) - 0.01) < 1e-4
    assert metrics["alp/std_mean"] == metrics["alp/std_max"] == pytest.approx(np.exp(log_std[0]))


def test_no_update_holds_the_logits_of_all_tokens():
    def widest(data, **changes):
        """Largest array of the lowered update with a vocabulary axis, in vectors of V."""
        chosen = correction.parse(fields(**changes))
        traced = make_train_step(LEARNER, chosen, SGD).trace(
            start(params(), SGD), cut(data, 2)
        )
        shapes = re.findall(r"tensor<((?:\d+x)+)", traced.lower().as_text())
        shapes = [[int(n) for n in shape[:-1].split("x")] for shape in shapes]
        return max(math.prod(shape) // V for shape in shapes if V in shape)

    # A micro-batch has 4 rows of at most 6 targets, a chunk 4 x 2 positions, the head D columns.
    assert widest(batch(), kl_coeff=0.1, entropy_coeff=0.1) == D < 4 * 6
    logits = {"logits_ref": np.zeros((B, T, V), np.float32)}
    assert widest(batch() | logits, kl="exact_reverse", kl_coeff=0.1) >= 4 * T


def test_score_norms_are_those_of_each_row():
    data = batch()

    @jax.jit
    @jax.grad
    def gradient(p, one):
        return jnp.sum(jnp.where(one["mask"], reference_logprob(p, one), 0))

    norms = make_score_norms(LEARNER)(
        params(), cut({name: data[name] for name in FORWARD}, 4)
    ).reshape(B)
    for row in range(B):
        one = {name: data[name][row : row + 1] for name in FORWARD}
        leaves = jax.tree.leaves(gradient(params(), one))
        assert norms[row] == pytest.approx(
            sum(float(np.square(x).sum()) for x in leaves), rel=1e-3, abs=1e-6), row
    assert norms[7] == 0 and norms[0] > 1e-3


@pytest.mark.all
def test_the_score_norms_of_an_adapter_are_those_of_its_factors():
    data = batch()
    rows = {name: data[name] for name in FORWARD}
    shapes = transformer.abstract_params(CONFIG)
    adapter = lora.Adapter.of(lora.parse("lora(rank=2)"), CONFIG, shapes)
    factors = adapter.init(shapes, jax.random.key(1))
    norms = lambda x: make_score_norms(LEARNER)(adapter.join(params(), x), cut(rows, 4)).reshape(B)
    assert norms(factors)[0] > 0
    # Of A = 0 and B = 0 both gradients are 0.
    assert not np.any(norms(jax.tree.map(jnp.zeros_like, factors)))


def test_sums_of_gradients_are_float32():
    """256 and four times 1: in bfloat16 257 is 256."""
    loss = lambda scores, x: (jnp.sum(scores * x[0]["c"]), ({}, {}))
    micro = MicroLoss(lambda p, b: p["w"] * b["mask"].any(), loss)
    data = {"mask": np.ones((5, 1, 1), bool), "c": np.array([256, 1, 1, 1, 1], np.float32).reshape(5, 1, 1)}
    grads, *_ = accumulate_gradients(
        LEARNER, micro, {"w": jnp.ones((), jnp.bfloat16)}, data, is_whole=False
    )
    assert grads["w"].dtype == jnp.float32 and grads["w"] == 260


@pytest.mark.all
def test_the_drift_is_split_into_its_factors():
    data, mask = batch(), batch()["mask"]
    logp = np.asarray(reference_logprob(params(), data), np.float64)
    chain = [data["logp_behav"], data["logp_old"], data["logp_prox"], logp]
    factors = dict(zip(("engine", "staleness", "trust_region"),
                       [b - a for a, b in itertools.pairwise(chain)], strict=True))
    for centre in ("old", "behav"):
        chosen = correction.parse(fields(centre=centre, weight="none"))
        _, metrics = updated(chosen, data, 2)
        total = sum(factors.values())
        for name, x in (factors | {"product": total}).items():
            assert metrics[f"mismatch/{name}/log_ratio_abs_mean"] == pytest.approx(
                np.abs(x)[mask].mean(), rel=1e-3, abs=1e-6), (centre, name)
            assert metrics[f"mismatch/{name}/log_ratio_square_mean"] == pytest.approx(
                np.square(x)[mask].mean(), rel=1e-3, abs=1e-6), (centre, name)
            assert metrics[f"mismatch/{name}/log_ratio_part"] == pytest.approx(
                (x * total)[mask].mean(), rel=1e-3, abs=1e-6), (centre, name)


def test_metrics_have_verls_names_and_values():
    data, mask = batch(), batch()["mask"]
    _, metrics = updated(correction.parse(fields()), data, 2)
    assert {"actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/grad_norm"} <= set(metrics)
    logp = np.asarray(reference_logprob(params(), data), np.float64)
    mean = lambda x: x[mask].mean()
    assert metrics["actor/ppo_kl"] == pytest.approx(mean(data["logp_old"] - logp), rel=1e-4)
    ratio, adv = np.exp(logp - data["logp_old"]), data["adv"]
    # The clipped branch is active where it is the larger loss.
    clipped = -np.clip(ratio, 1 - LOW, 1 + HIGH) * adv > -ratio * adv
    assert 0.2 < metrics["actor/pg_clipfrac"] == pytest.approx(mean(clipped), rel=1e-5)
    loss = mean(data["weights"] * np.maximum(-ratio * adv, -np.clip(ratio, 0.8, 1.28) * adv))
    assert metrics["actor/pg_loss"] == pytest.approx(loss, rel=1e-4)


def test_a_wholly_masked_minibatch_changes_nothing():
    data = with_nan_padding(batch() | {"mask": np.zeros((B, T), bool)})
    state, metrics = make_train_step(LEARNER, correction.parse(fields()), SGD)(
        start(params(), SGD), cut(data, 4)
    )
    assert difference(jax.device_get(state.params), params()) == 0
    assert all(np.isfinite(v) for v in metrics.values()), metrics


def test_the_state_is_donated():
    state = start(params(), SGD)
    old = jax.tree.leaves(state.params)
    make_train_step(LEARNER, correction.parse(fields()), SGD)(state, cut(batch(), 1))
    assert all(leaf.is_deleted() for leaf in old)


def test_logp_carries_the_gradient_and_no_other_field_does():
    """logp_old is data: with weights of zero nothing moves, whatever logp_old says (PEERS: the old
    policy must not be a stop-gradient of the current one, whose ratio is always 1)."""
    data = batch()
    chosen = correction.parse(fields())
    _, at_old = updated(chosen, data, 1)
    shifted = data | {"logp_old": data["logp_old"] - 0.5}
    _, at_shifted = updated(chosen, shifted, 1)
    assert at_shifted["actor/ppo_kl"] == pytest.approx(at_old["actor/ppo_kl"] - 0.5, abs=1e-5)
    assert abs(at_shifted["actor/pg_loss"] - at_old["actor/pg_loss"]) > 1e-2


# Critic and supervised


@functools.cache
def critic_params():
    value = np.random.default_rng(3).normal(0, 0.3, D).astype(np.float32)
    return {"decoder": params(), "value": value}


@jax.jit
def reference_values(p, data):
    """Value of the prefix before each token: the last hidden state through a head of one column."""
    one_column = {**p["decoder"], "head": p["value"][:, None]}
    v = transformer.logits(one_column, CONFIG, data["tokens"], None, data["segment_ids"])[..., 0]
    return jnp.pad(v[:, :-1], ((0, 0), (1, 0)))


def test_values_are_of_the_prefix_before_each_token():
    data = batch()
    values = make_values(LEARNER)(critic_params(), cut(data, 2)).reshape(B, T)
    expected = reference_values(critic_params(), data)
    np.testing.assert_allclose(values[data["mask"]], expected[data["mask"]], atol=1e-5)
    changed = data | {"tokens": np.where(np.arange(T) == 6, 5, data["tokens"]).astype(np.int32)}
    after = make_values(LEARNER)(critic_params(), cut(changed, 2)).reshape(B, T)
    np.testing.assert_allclose(after[:, :7], values[:, :7], atol=1e-6)  # V_6 has not seen token 6
    assert np.abs(after[0, 7] - values[0, 7]) > 1e-3


def test_critic_update_is_the_gradient_of_the_clipped_value_loss():
    data, clip = batch(), 0.2
    coefficient = data["mask"] / data["mask"].sum()

    def loss(p):
        v, old, target = reference_values(p, data), data["values"], data["returns"]
        clipped = jnp.clip(v, old - clip, old + clip)
        return jnp.sum(
            coefficient * 0.5 * jnp.maximum((v - target) ** 2, (clipped - target) ** 2)
        )

    value, gradient = jax.jit(jax.value_and_grad(loss))(critic_params())
    expected = jax.tree.map(lambda p, g: p - np.asarray(g), critic_params(), gradient)
    results = []
    given = with_nan_padding(data) | {"lr_scale": np.full(B, 0.5, np.float32)}  # of the policy alone
    for count in (1, 4):
        state, metrics = make_critic_step(LEARNER, clip, SGD)(
            start(critic_params(), SGD), cut(given, count)
        )
        assert_trees_close(jax.device_get(state.params), expected, atol=1e-5)
        assert metrics["critic/vf_loss"] == pytest.approx(float(value), rel=1e-4)
        assert {"critic/vf_clipfrac", "critic/grad_norm"} <= set(metrics)
        results.append(metrics)
    assert 0 < results[0]["critic/vf_clipfrac"] < 1
    for name in results[0]:
        assert results[0][name] == pytest.approx(float(results[1][name]), rel=1e-4), name


def test_supervised_step_lowers_the_loss_from_the_mean_cross_entropy():
    data = {n: batch()[n] for n in ("tokens", "positions", "segment_ids", "mask")}
    data["temperature"] = np.ones((B, T), np.float32)
    train_step = make_supervised_step(LEARNER, tx := optax.adam(1e-2))
    state, losses = start(params(), tx), []
    for _ in range(12):
        state, metrics = train_step(state, cut(data, 2))
        losses.append(float(metrics["supervised/ce_loss"]))
    expected = -np.asarray(reference_logprob(params(), data))[data["mask"]].mean()
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < 0.5 * losses[0]
