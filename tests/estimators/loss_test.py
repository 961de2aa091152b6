"""The assembled loss: parts by hand, two-policy and three-policy modes, exact gradients by
enumeration."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import baselines, methods, presets
from jaxrl_tis.estimators.loss import LossSpec, apply_methods, importance_weights, policy_loss
from tests import jitted

baselines = jitted.Module(baselines)
importance_weights, policy_loss = map(jitted.function, (importance_weights, policy_loss))

LOGP = np.array([[-0.9, -1.1, -0.4], [-0.8, -1.9, -0.7]])
BATCH = {
    "logp_old": np.array([[-1.0, -1.0, -0.5], [-1.0, -2.0, -0.7]]),
    "logp_behav": np.array([[-1.4, -0.9, -0.5], [-1.0, -2.6, -0.7]]),
    "logp_ref": np.array([[-1.2, -1.0, -0.3], [-1.1, -2.2, -0.7]]),
    "adv": np.array([[1.0, 1.0, 1.0], [-0.5, -0.5, -0.5]]),
    "mask": np.array([[1, 1, 1], [1, 1, 0]]),
}
PPO = ("dual_clip", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0})
NONE = ("none", {})
TIS = ("token_tis", {"cap": 1.5})


def test_weighted_loss_by_hand():
    # Every ratio lies inside the band, so the loss is -w r A with w = min(exp(old - behav), 1.5).
    value, metrics = policy_loss(
        LOGP, BATCH, weight=TIS, objective=PPO, aggregation="token-mean"
    )
    r = np.exp([0.1, -0.1, 0.1, 0.2, 0.1])
    w = np.minimum(np.exp([0.4, -0.1, 0.0, 0.0, 0.6]), 1.5)
    adv = np.array([1.0, 1.0, 1.0, -0.5, -0.5])
    np.testing.assert_allclose(value, np.mean(-w * r * adv), rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/pg_loss"], value, rtol=1e-6)
    np.testing.assert_allclose(metrics["actor/ppo_kl"], -0.08, rtol=1e-5)
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_kl_and_entropy_terms():
    entropy = np.array([[0.5, 1.0, 1.5], [2.0, 1.0, np.nan]])
    parts = {"weight": NONE, "objective": PPO, "aggregation": "token-mean"}
    base, _ = policy_loss(LOGP, BATCH, **parts)
    value, metrics = policy_loss(
        LOGP, BATCH, kl=("k2", {}), kl_coeff=0.3, entropy=entropy, entropy_coeff=0.01, **parts
    )
    kl_loss = np.mean(np.square([0.3, -0.1, -0.1, 0.3, 0.3])) / 2
    np.testing.assert_allclose(metrics["actor/kl_loss"], kl_loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/entropy_loss"], 1.2, rtol=1e-6)
    np.testing.assert_allclose(value, base + 0.3 * kl_loss - 0.01 * 1.2, rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/pg_loss"], base, rtol=1e-6)
    assert "actor/kl_loss" not in policy_loss(LOGP, BATCH, **parts)[1]

    def total(entropy, kl):  # the KL of all keys to the kept ones is one number a token, as the entropy
        return policy_loss(
            LOGP, BATCH, entropy=entropy, entropy_coeff=0.01, dense_kl=kl, dense_kl_coeff=0.1, **parts
        )[0]

    gradient, pulled = jitted.grad(total, (0, 1))(entropy, entropy)
    np.testing.assert_allclose(gradient, -0.01 / 5 * BATCH["mask"], rtol=1e-5)
    np.testing.assert_allclose(pulled, 0.1 / 5 * BATCH["mask"], rtol=1e-5)
    with pytest.raises(ValueError, match="dense_kl_coeff is 0.1, so pass dense_kl"):
        policy_loss(LOGP, BATCH, dense_kl_coeff=0.1, **parts)


def test_the_cross_entropy_of_the_environment_by_hand():
    """ECHO: 1.7 and 0.3 nats at two tokens outside of the mask, whatever the aggregation is."""
    logp = np.array([[-0.9, -1.1, -1.7], [-0.8, -0.3, np.nan]])
    batch = BATCH | {"mask": np.array([[1, 1, 0], [1, 0, 0]])}
    batch |= {"environment": np.array([[0, 0, 1], [0, 1, 0]])}
    parts = {"weight": TIS, "objective": PPO, "aggregation": "seq-mean-token-sum"}
    total = lambda logp, batch=batch, **more: policy_loss(logp, batch, **parts, **more)
    base, plain = jitted.grad(total, has_aux=True)(logp)
    found, metrics = jitted.grad(
        functools.partial(total, environment_ce_coeff=0.25), has_aux=True
    )(logp)
    np.testing.assert_allclose(metrics["actor/environment_ce_loss"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(found - base, [[0, 0, -0.125], [0, -0.125, 0]], atol=1e-7)
    assert metrics["actor/pg_loss"] == plain["actor/pg_loss"]
    assert "actor/environment_ce_loss" not in plain
    # A part of a minibatch with eight of these tokens.
    part = batch | {"num_environment_tokens": np.array([8.0, 8.0])}
    _, metrics = total(logp, part, environment_ce_coeff=0.25)
    np.testing.assert_allclose(metrics["actor/environment_ce_loss"], 0.25, rtol=1e-6)
    with pytest.raises(KeyError, match="environment_ce_coeff needs the batch field 'environment'"):
        total(logp, BATCH, environment_ce_coeff=0.25)


def test_the_kl_to_the_sampler_is_of_rejected_tokens_too():
    """prime-rl's IPO with its quadratic term, tau = 0.1."""
    # logp - logp_behav: 0.5, -0.2, 0.1, 0.2, 0.7; differences of the probabilities by hand.
    parts = {"centre": "behav", "objective": "reinforce", "weight": "token_vanilla",
             "aggregation": "token-sum", "rejected_in_denominator": True}
    gap = np.array([0.5, -0.2, 0.1, 0.2, 0.7])
    behav = np.asarray(BATCH["logp_behav"])[np.asarray(BATCH["mask"]) > 0]
    is_kept = np.abs(np.exp(behav + gap) - np.exp(behav)) <= 0.1
    assert 0 < is_kept.sum() < 5
    adv = np.array([1.0, 1.0, 1.0, -0.5, -0.5])
    total = lambda logp: policy_loss(
        logp, BATCH, masks="token_dp(upper=0.1)", sampler_kl_coeff=0.2, **parts
    )
    (_, metrics), gradient = jitted.value_and_grad(total, has_aux=True)(LOGP)
    np.testing.assert_allclose(metrics["actor/sampler_kl_loss"], np.sum(gap**2) / 2, rtol=1e-5)
    expected = -1.0 * is_kept * adv * np.exp(gap) + 2 * 0.1 * gap
    found = np.asarray(gradient)[np.asarray(BATCH["mask"]) > 0]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert not np.any(np.asarray(gradient)[np.asarray(BATCH["mask"]) == 0])


def test_dis_is_reinforce_with_the_masked_weight_in_bypass_mode():
    # Ratios to the sampler: e^0.5, e^-0.2, e^0.1, e^0.2 and e^0.7; the first and last are above 1.5.
    parts = {"aggregation": "token-mean", "centre": "behav", "rejected_in_denominator": True}
    ways = [
        {"objective": ("dis", {"clip_low": 0.3, "clip_high": 0.5})},
        {"objective": ("reinforce", {}), "weight": ("token_mis", {"lower": 0.7, "upper": 1.5})},
    ]
    losses = [
        jitted.value_and_grad(lambda logp, way=way: policy_loss(logp, BATCH, **parts, **way)[0])
        for way in ways
    ]
    (value, gradient), (other, expected) = (loss(LOGP) for loss in losses)
    np.testing.assert_allclose(value, other, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    w = np.array([[0.0, np.exp(-0.2), np.exp(0.1)], [np.exp(0.2), 0.0, 0.0]])
    np.testing.assert_allclose(gradient, -w * BATCH["adv"] / 5, rtol=1e-5)


@pytest.mark.all
def test_flash_reinforce_by_hand():
    """Its direction is 1/B sum_i m_i A_i / T_i sum_t rho grad log pi, A = R - the mean of R over all B.

    Of the three responses the second is rejected: its tokens' binary KL is 0.0204, see
    binary_masks_test. It stays in B and in the mean of the rewards, 2/3. The tokens of the others
    have at most -0.5 log(1 - 4 * 0.02^2) = 0.0008.
    """
    sampler = np.array([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0.25, 1.0, 1.0]])
    learner = np.array([[0.5, 0.48, 0.51], [0.4, 0.4, 0.4], [0.26, 1.0, 1.0]])
    mask = np.array([[1, 1, 1], [1, 1, 1], [1, 0, 0]])
    adv = baselines.batch_mean(np.array([1.0, 0.0, 1.0]), mask, np.arange(3))
    batch = {"logp_old": np.zeros((3, 3)), "logp_behav": jnp.log(sampler), "adv": adv, "mask": mask}
    bundle = presets.PRESETS["flash_reinforce"]
    parts = {
        "objective": methods.parse("objective", bundle["objective"]),
        "weight": methods.parse("weight", bundle["weight"]),
        "masks": methods.parse_all("mask", bundle["masks"]),
        "centre": bundle["centre"], "aggregation": "seq-mean-token-mean",
        "rejected_in_denominator": True,
    }
    gradient = jitted.grad(lambda logp: policy_loss(logp, batch, **parts)[0])(jnp.log(learner))
    first = np.array([1.0, 0.96, 1.02]) / 27  # rho A / (T B) with A = 1/3, T = B = 3
    third = 1.04 / 9  # 0.26 / 0.25, one token
    np.testing.assert_allclose(-gradient, [first, [0] * 3, [third, 0, 0]], rtol=1e-5, atol=1e-8)


def test_the_denominators_of_the_full_batch_are_handed_on():
    """The micro-batch has 5 tokens in 2 sequences and rows of 3; the batch four times as many."""
    parts = {"weight": TIS, "objective": PPO}
    for mode, whole in (
        ("token-mean", {"num_tokens": 20.0}),
        ("seq-mean-token-mean", {"num_seqs": 8.0}),
        ("seq-mean-token-sum", {"num_seqs": 8.0}),
        ("seq-mean-token-sum-norm", {"scale": 12.0}),
    ):
        own, _ = policy_loss(LOGP, BATCH, aggregation=mode, **parts)
        part, _ = policy_loss(LOGP, BATCH, aggregation=mode, **parts, **whole)
        np.testing.assert_allclose(4.0 * part, own, rtol=1e-6, err_msg=mode)
    of_prompts = BATCH | {"group": np.repeat([[3], [8]], 3, axis=1)}
    own, _ = policy_loss(LOGP, of_prompts, aggregation="prompt-mean", **parts)
    means, _ = policy_loss(LOGP, BATCH, aggregation="seq-mean-token-mean", **parts)
    np.testing.assert_allclose(own, means, rtol=1e-6)
    whole = BATCH | {"prompt_divisor": np.full((2, 3), 20.0)}
    part, _ = policy_loss(LOGP, whole, aggregation="prompt-mean", **parts)
    total, _ = policy_loss(LOGP, BATCH, aggregation="token-sum", **parts)
    np.testing.assert_allclose(part, total / 20, rtol=1e-6)


def test_bypass_counts_the_whole_drift_once():
    bypass = BATCH | {"logp_old": BATCH["logp_behav"]}
    parts = {"objective": ("ppo", {"clip_low": 0.9, "clip_high": 9.0}), "aggregation": "token-sum"}
    expected = -np.sum(
        (np.exp(LOGP - BATCH["logp_behav"]) * BATCH["adv"])[np.array(BATCH["mask"]) == 1]
    )
    once, _ = policy_loss(LOGP, bypass, weight=NONE, **parts)
    np.testing.assert_allclose(once, expected, rtol=1e-5)
    # A weight on top finds no gap left to correct.
    again, _ = policy_loss(LOGP, bypass, weight=TIS, **parts)
    np.testing.assert_allclose(again, expected, rtol=1e-5)
    # Decoupled with an unbounded weight, w r is the same product.
    decoupled, _ = policy_loss(LOGP, BATCH, weight=("token_tis", {"cap": np.inf}), **parts)
    np.testing.assert_allclose(decoupled, expected, rtol=1e-5)


def test_bypass_weighs_the_policy_of_the_update():
    # logp - logp_behav is 0.5, -0.2, 0.1 | 0.2, 0.7, so the ratios are 1.649, 0.819, 1.105 | 1.221,
    # 2.014. The mask drops what is above 1.55, where logp_old - logp_behav (0.4, -0.1, 0 | 0, 0.6)
    # would leave the first; the cap of 1.2 holds the fourth. -w A log pi is then
    # 0.8187 * 1.1 + 1.1052 * 0.4 - 1.2 * 0.5 * 0.8 = 0.8627.
    parts = {
        "weight": ("token_tis", {"cap": 1.2}), "masks": (("token_ratio", {"upper": 1.55}),),
        "objective": ("reinforce", {}), "centre": "behav",
    }
    value, metrics = policy_loss(LOGP, BATCH, aggregation="token-sum", **parts)
    np.testing.assert_allclose(value, 0.8627, atol=1e-4)
    np.testing.assert_allclose(metrics["actor/rejected_fraction"], 2 / 5, rtol=1e-6)
    # Three tokens are left of five.
    kept, _ = policy_loss(LOGP, BATCH, aggregation="token-mean", **parts)
    stays, _ = policy_loss(
        LOGP, BATCH, aggregation="token-mean", rejected_in_denominator=True, **parts
    )
    np.testing.assert_allclose((kept, stays), (value / 3, value / 5), rtol=1e-5)


OPSM = (("opsm", {"opsm_delta": 0.05}),)


@pytest.mark.parametrize("brings_weights", [False, True])
def test_decoupled_applies_a_mask_of_the_policy_at_every_update(brings_weights):
    """The second sequence has A < 0. mean log(mu / pi) is -0.3 at the old policy, 0.1 at the moved
    one, above 0.05; its tokens then have weight 0 and stay among the five."""
    moved = np.stack([LOGP[0], BATCH["logp_behav"][1] - 0.1])
    fields = BATCH | ({"weights": np.full((2, 3), 2.0)} if brings_weights else {})
    parts = {
        "objective": ("reinforce", {}), "masks": OPSM, "aggregation": "token-mean",
        "rejected_in_denominator": not brings_weights,
    }
    at_old, metrics = policy_loss(BATCH["logp_old"], fields, **parts)
    weight = 2.0 if brings_weights else 1.0
    # -A log pi: 1 + 1 + 0.5 - 0.5 (1 + 2)
    np.testing.assert_allclose(at_old, weight * (2.5 - 1.5) / 5, rtol=1e-5)
    assert metrics["actor/rejected_fraction"] == 0.0
    value, metrics = policy_loss(moved, fields, **parts)
    np.testing.assert_allclose(value, weight * (0.9 + 1.1 + 0.4) / 5, rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/rejected_fraction"], 2 / 5, rtol=1e-6)


def test_a_mask_of_the_gap_is_applied_with_the_weights():
    """With the weights of a batch it was applied before, and nothing is rejected any more."""
    masks = (("token_ratio", {"upper": 1.55}),)
    parts = {"objective": ("reinforce", {}), "masks": masks, "aggregation": "token-sum"}
    value, metrics = policy_loss(LOGP, BATCH, **parts)
    # logp_old - logp_behav is 0.4, -0.1, 0 | 0, 0.6: the last token goes.
    np.testing.assert_allclose(value, 0.9 + 1.1 + 0.4 - 0.5 * 0.8, rtol=1e-5)
    assert "actor/rejected_fraction" not in metrics
    given, _ = policy_loss(LOGP, BATCH | {"weights": np.ones((2, 3))}, **parts)
    np.testing.assert_allclose(given, 0.9 + 1.1 + 0.4 - 0.5 * (0.8 + 1.9), rtol=1e-5)


def test_the_outputs_of_the_methods_by_hand():
    """logp_old - logp_behav is 0.4, -0.1, 0 | 0, 0.6: ratios 1.492, 0.905, 1 | 1, 1.822."""
    masks = (("token_ratio", {"upper": 1.3}), ("token_ratio", {"lower": 0.95, "upper": 9.0}))
    spec = LossSpec(objective=PPO, weight=TIS, masks=masks, is_batch_normalized=True)
    outputs = apply_methods(BATCH, spec, masks)
    w = np.array([[1.4918, 0.9048, 1.0], [1.0, 1.5, 0.0]])  # the cap is 1.5
    np.testing.assert_allclose(outputs.factor, w.sum() / 5, rtol=1e-4)
    np.testing.assert_allclose(outputs.weight, w / (w.sum() / 5), rtol=1e-4)
    np.testing.assert_array_equal(outputs.is_accepted, [[0, 0, 1], [1, 0, 0]])
    np.testing.assert_allclose(outputs.log_ratio, [[0.4, -0.1, 0.0], [0.0, 0.6, 0.0]], atol=1e-6)
    counts = {name.removeprefix("correction/"): int(x) for name, x in outputs.counts.items()}
    assert counts == {
        "mask/token_ratio/num_tokens": 5, "mask/token_ratio/dropped": 2,
        "mask/token_ratio_2/num_tokens": 5, "mask/token_ratio_2/dropped": 1,
        "weight/num_tokens": 5, "weight/changed_raw": 3, "weight/changed": 3, "weight/truncated": 1,
        "weight/dropped": 0,
    }
    np.testing.assert_allclose(outputs.engine, w, rtol=1e-4)
    spec = LossSpec(objective=PPO, masks=masks, centre="behav")
    drift = apply_methods(BATCH | {"logp": LOGP}, spec, masks, "policy")
    # logp - logp_behav is 0.5, -0.2, 0.1 | 0.2, 0.7
    np.testing.assert_array_equal(drift.is_accepted, [[0, 0, 1], [1, 0, 0]])
    np.testing.assert_allclose(drift.log_ratio[0], [0.5, -0.2, 0.1], atol=1e-6)
    np.testing.assert_array_equal(drift.weight, BATCH["mask"])


def test_a_method_may_be_text_as_in_a_config():
    pairs, found = policy_loss(
        LOGP, BATCH, objective=PPO, weight=TIS, kl=("k2", {}), kl_coeff=0.3,
        masks=(("token_ratio", {"upper": 1.3}), ("veto", {})),
    )
    text, others = policy_loss(
        LOGP, BATCH, objective="dual_clip(clip_low=0.2, clip_high=0.28, dual_clip=3.0)",
        weight="token_tis(cap=1.5)", kl="k2", kl_coeff=0.3, masks="token_ratio(upper=1.3) & veto",
    )
    assert text == pairs and found.keys() == others.keys()


def test_the_clip_looks_at_staleness_and_not_at_the_sampler():
    """A sampler gap of e^1 leaves the gradient alone; the learner's own move of e^1 stops it."""
    x = np.array([[-1.0]])
    batch = {
        "logp_old": x,
        "logp_behav": x - 1.0,
        "adv": np.ones((1, 1)),
        "mask": np.ones((1, 1)),
    }
    parts = {"weight": ("token_tis", {"cap": 2.0}), "objective": PPO, "aggregation": "token-mean"}
    gradient = jitted.grad(lambda logp: policy_loss(logp, batch, **parts)[0])
    np.testing.assert_allclose(gradient(x), [[-2.0]], rtol=1e-6)
    np.testing.assert_array_equal(gradient(x + 1.0), [[0.0]])


def test_precomputed_weights_are_used_as_they_are():
    parts = {"objective": PPO, "aggregation": "seq-mean-token-mean"}
    w = importance_weights(BATCH["logp_old"] - BATCH["logp_behav"], BATCH, TIS)
    fields = {name: x for name, x in BATCH.items() if name != "logp_behav"} | {"weights": w}
    expected, _ = policy_loss(LOGP, BATCH, weight=TIS, **parts)
    actual, _ = policy_loss(LOGP, fields, weight=TIS, **parts)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    doubled, _ = policy_loss(LOGP, fields | {"weights": 2.0 * w}, weight=TIS, **parts)
    np.testing.assert_allclose(doubled, 2.0 * expected, rtol=1e-6)

    def total(w):
        return policy_loss(LOGP, fields | {"weights": w}, weight=TIS, **parts)[0]

    np.testing.assert_array_equal(jitted.grad(total)(w), np.zeros(w.shape))


@pytest.mark.parametrize(
    ("field", "changes", "message"),
    [
        ("logp_behav", {}, "token_tis needs the batch field 'logp_behav'"),
        ("logp_old", {}, "dual_clip needs the batch field 'logp_old'"),
        ("adv", {}, "dual_clip needs the batch field 'adv'"),
        ("mask", {}, "dual_clip needs the batch field 'mask'"),
        ("logp_ref", {"kl": ("k3", {}), "kl_coeff": 0.1}, "k3 needs the batch field 'logp_ref'"),
    ],
)
def test_a_missing_field_is_named_with_its_user(field, changes, message):
    batch = {name: x for name, x in BATCH.items() if name != field}
    parts = {"weight": TIS, "objective": PPO, "aggregation": "token-mean"} | changes
    with pytest.raises(KeyError, match=message):
        policy_loss(LOGP, batch, **parts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": ("sequence", {})}, "weight 'sequence' is unknown; "),
        (
            {"objective": ("vanilla", {})},
            "objective 'vanilla' is unknown; choose one of ppo, dual_clip",
        ),
        ({"kl": ("low_var_kl", {})}, "kl 'low_var_kl' is unknown; choose one of k1"),
        ({"aggregation": "mean"}, "Unknown aggregation mode 'mean'"),
        ({"entropy_coeff": 0.01}, "entropy_coeff is 0.01"),
    ],
)
def test_a_name_that_is_not_there_is_an_error(changes, message):
    parts = {"weight": TIS, "objective": PPO, "aggregation": "token-mean"} | changes
    with pytest.raises(ValueError, match=message):
        policy_loss(LOGP, BATCH, **parts)


SEQUENCES = list(itertools.product(range(3), range(3)))
REWARDS = np.array([1.0, 0.0, -0.5, 0.3, 2.0, 0.1, -1.0, 0.7, 0.4])


def sequence_logps(params):
    """Log-probs [9, 2] of all sequences of two tokens; the second token depends on the first."""
    first, second = jax.nn.log_softmax(params[0]), jax.nn.log_softmax(params[1:])
    return jnp.stack([jnp.stack([first[a], second[a, b]]) for a, b in SEQUENCES])


@functools.partial(jax.jit, static_argnums=0)
def expected_gradient(name, parameters, params, sampler_params):
    """Expectation over the sampler of the gradient of the loss at logp = logp_old.

    The probability of a sequence goes into its advantage, in which the loss is linear at ratio 1.
    """
    logp_behav = sequence_logps(sampler_params)
    probability = jnp.exp(jnp.sum(logp_behav, axis=1, keepdims=True))
    batch = {
        "logp_old": sequence_logps(params),
        "logp_behav": logp_behav,
        "adv": probability * REWARDS[:, None] * np.ones((1, 2)),
        "mask": np.ones((9, 2)),
    }

    def total(params):
        return policy_loss(
            sequence_logps(params), batch, weight=(name, parameters), objective=PPO,
            aggregation="token-sum",
        )[0]

    return jitted.grad(total)(params)


def test_only_the_full_sequence_weight_gives_the_exact_policy_gradient():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        params = np.array(rng.normal(size=(4, 3)))
        sampler = params + 0.5 * rng.normal(size=(4, 3))

        def minus_value(params):
            return -jnp.sum(jnp.exp(jnp.sum(sequence_logps(params), axis=1)) * REWARDS)

        exact = jitted.grad(minus_value)(params)

        def bias(weight, sampler):
            return np.abs(expected_gradient(*weight, params, sampler) - exact).max()

        unbounded = {"cap": np.inf}
        assert bias(("seq_tis", unbounded), sampler) < 1e-14
        # Token weights leave out the other token's ratio; a cap, or no weight, adds its own bias.
        assert bias(("token_tis", unbounded), sampler) > 1e-2
        assert bias(("token_tis", {"cap": 1.2}), sampler) > 1e-2
        assert bias(("seq_tis", {"cap": 1.2}), sampler) > 1e-2
        assert bias(("none", {}), sampler) > 1e-2
        # Without a gap every one of them is exact.
        for weight in (("token_tis", {"cap": 1.2}), ("seq_mis", {}), ("none", {})):
            assert bias(weight, params) < 1e-14


def test_gmpo_takes_the_geometric_mean_of_the_weights():
    # Row 0: of (exp(0.4), exp(-0.1), 1) over 3 tokens; row 1: of (1, 1.5) over 2.
    objective = ("gmpo", {"clip_low": 0.4, "clip_high": 0.4})
    value, _ = policy_loss(
        LOGP, BATCH, weight=TIS, objective=objective, aggregation="seq-mean-token-mean"
    )
    first = np.exp((0.1 - 0.1 + 0.1) / 3) * np.exp((0.4 - 0.1) / 3)
    second = np.exp((0.2 + 0.1) / 2) * 1.5 ** (1 / 2)
    np.testing.assert_allclose(value, (-1.0 * first + 0.5 * second) / 2, rtol=1e-5)
