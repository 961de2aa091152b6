"""The factors of the ratio to the sampler: every centre, weight and mask against numbers of each token,
and the expected gradient against an enumeration of all responses."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.estimators import methods, presets
from jaxrl_tis.estimators.loss import CENTRES, RATIOS, LossSpec, policy_loss, staleness_weight

B, T = 6, 7


def made(seed=0):
    """Returns a batch in float64 whose four log-probs all differ, and logp."""
    rng = np.random.default_rng(seed)
    mask = np.arange(T) < rng.integers(3, T + 1, B)[:, None]
    steps = np.cumsum([-rng.uniform(0.2, 2.0, (B, T)), *rng.normal(0, 0.25, (3, B, T))], axis=0)
    batch = dict(zip(("logp_behav", "logp_old", "logp_prox"), steps, strict=False))
    return steps[3], batch | {"adv": rng.normal(size=(B, T)), "mask": mask}


def clipped(u, adv, low=0.2, high=0.2):
    """(loss, gradient) of PPO's surrogate of each token."""
    plain, bounded = -u * adv, -np.clip(u, 1 - low, 1 + high) * adv
    return np.maximum(plain, bounded), np.where(bounded > plain, 0.0, plain)


def ratio_of(batch, learner, sampler, mask, is_sequence):
    x = np.where(mask, batch[learner] - batch[sampler], 0.0)
    return np.exp(x.sum(1, keepdims=True) * np.ones_like(x)) if is_sequence else np.exp(x)


# text -> the weight as a function of the ratio
WEIGHTS = {
    "none": np.ones_like, "token_vanilla": lambda r: r, "seq_vanilla": lambda r: r,
    "token_tis(cap=1.1)": lambda r: np.minimum(r, 1.1), "seq_tis(cap=1.2)": lambda r: np.minimum(r, 1.2),
    "token_mis(lower=0.8, upper=1.3)": lambda r: np.where((r >= 0.8) & (r <= 1.3), r, 0.0),
}
COMBINATIONS = [
    *itertools.product(("token_tis(cap=1.1)", "seq_vanilla", "none"),
                       ("token_vanilla", "seq_tis(cap=1.2)", "token_mis(lower=0.8, upper=1.3)")),
    *((text, "folded") for text in WEIGHTS if text != "none"),
]


def weights_by_hand(batch, engine, staleness):
    mask, gap = batch["mask"], RATIOS["folded" if staleness == "folded" else "engine"]
    w = WEIGHTS[engine](ratio_of(batch, *gap, mask, engine.startswith("seq")))
    if staleness == "folded":
        return w
    pair = "logp_prox", "logp_old"
    return w * WEIGHTS[staleness](ratio_of(batch, *pair, mask, staleness.startswith("seq")))


def gradient_of(logp, batch, **spec):
    """(value, gradient [B,T]) in float64."""
    value = lambda x, b: policy_loss(x, b, aggregation="token-sum", **spec)[0]
    return jax.jit(jax.value_and_grad(value))(logp, batch)


def test_engine_times_staleness_times_the_clip_around_prox():
    """min(pi_old / mu, C) (pi_prox / pi_old) min(u A, clip(u) A), u = pi / pi_prox, and its like."""
    with jax.enable_x64(True):
        logp, batch = made()
        loss, gradient = clipped(np.exp(logp - batch["logp_prox"]), batch["adv"])
        assert 3 < (gradient[batch["mask"]] == 0).sum() < batch["mask"].sum() - 3
        for engine, staleness in COMBINATIONS:
            value, found = gradient_of(
                logp, batch, objective="ppo", centre="prox", weight=engine, staleness_weight=staleness
            )
            w = weights_by_hand(batch, engine, staleness) * batch["mask"]
            np.testing.assert_allclose(value, (w * loss).sum(), rtol=1e-12, err_msg=(engine, staleness))
            np.testing.assert_allclose(found, w * gradient, rtol=1e-12, atol=1e-14)


def test_presets_of_factors():
    """Decoupled PPO drops weights above 5; the caps of all three factors, of tokens and of sequences."""
    with jax.enable_x64(True):
        logp, batch = made(1)
        batch["logp_prox"][0, 1] = batch["logp_behav"][0, 1] + np.log(6.0)
        u, mask = np.exp(logp - batch["logp_prox"]), batch["mask"]
        of = lambda *pair, seq=False: ratio_of(batch | {"logp": logp}, *pair, mask, seq)
        _, gradient = clipped(u, batch["adv"])
        folded = of("logp_prox", "logp_behav")
        assert (folded > 5.0)[mask].any()
        engine, staleness = of("logp_old", "logp_behav"), of("logp_prox", "logp_old")
        seq = [of(*pair, seq=True) for pair in
               (("logp_old", "logp_behav"), ("logp_prox", "logp_old"), ("logp", "logp_prox"))]
        expected = {
            "async": np.where(folded > 5.0, 0.0, folded) * gradient, "decoupled": folded * gradient,
            "factored": np.minimum(engine, 2.0) * staleness * gradient,
            "capped_ratio": -np.minimum(engine, 2.0) * staleness * u * batch["adv"],
            "seq_capped_ratio": -np.minimum(seq[0], 2.0) * seq[1] * seq[2] * batch["adv"],
        }
        for name, values in expected.items():
            fields = {part: text for part, text in presets.PRESETS[name].items()
                      if part not in ("centering", "routing")}
            _, found = gradient_of(logp, batch, **fields)
            np.testing.assert_allclose(found, values * mask, rtol=1e-12, atol=1e-14, err_msg=name)


def test_every_objective_with_a_ratio_takes_every_centre():
    """The loss is that of the objective on the log-probs of the centre, times the weights."""
    logp, batch = jax.tree.map(lambda x: np.asarray(x, np.float32), made(2))
    batch |= {"mask": batch["mask"] > 0, "entropy": np.abs(batch["adv"]), "turn": np.arange(T) // 3 * np.ones((B, 1), int),
              "group": np.repeat([0, 1], 3)[:, None] * np.ones((1, T), int), "st_ppo_norm": np.float32(1)}
    names = [name for name in methods.TABLES["objective"]
             if methods.traits("objective", name).has_ratio
             and set(methods.needs("objective", name)) <= set(batch)
             and methods.traits("objective", name).takes_weight]
    assert {"ppo", "dual_clip", "gspo", "cispo", "sapo", "aspo", "dppo_tv"} <= set(names)

    def both(name, centre):
        method = name, methods.example("objective", name)
        weighed = {} if centre == "behav" else {"weight": "token_tis(cap=1.1)"}
        if centre == "prox":
            weighed |= {"staleness_weight": "token_vanilla"}
        value, _ = policy_loss(
            logp, batch, objective=method, centre=centre, aggregation="token-sum", **weighed)
        needed = {n: batch[n] for n in methods.needs("objective", name)}
        if centre == "behav":
            needed |= {n: batch["logp_behav"] for n in ("logp_prox",) if n in needed}
        seen = batch[CENTRES[centre]]
        loss_bt, _ = methods.function("objective", name)(
            logp, seen, batch["adv"], batch["mask"], None, **needed, **method[1])
        gap = jnp.where(batch["mask"], batch["logp_old"] - batch["logp_behav"], 0)
        age = jnp.where(batch["mask"], batch["logp_prox"] - batch["logp_old"], 0)
        w = {"behav": 1.0, "old": jnp.minimum(jnp.exp(gap), 1.1)}.get(
            centre, jnp.minimum(jnp.exp(gap), 1.1) * jnp.exp(age))
        return value, jnp.sum(w * loss_bt)

    found = jax.jit(lambda: {(n, c): both(n, c) for n in names for c in CENTRES})()
    for case, (value, expected) in found.items():
        np.testing.assert_allclose(value, expected, rtol=2e-5, atol=1e-5, err_msg=case)


@pytest.mark.parametrize("of", RATIOS)
def test_a_mask_judges_the_ratio_that_it_names(of):
    logp, batch = made(3)
    chain = batch | {"logp": logp}
    ratio = ratio_of(chain, *RATIOS[of], batch["mask"], False)
    is_kept = ((ratio >= 0.9) & (ratio <= 1.2)) & batch["mask"]
    masked = lambda logp, batch: policy_loss(
        logp, batch, objective="reinforce", masks=f"token_ratio(lower=0.9, upper=1.2, of={of})",
        rejected_in_denominator=True,
    )[1]
    metrics = jax.jit(masked)(logp, batch)
    dropped = int(metrics["correction/mask/token_ratio/dropped"])
    assert dropped == (batch["mask"] & ~is_kept).sum() > 0
    spec = LossSpec(objective=("ppo", {}), masks=methods.parse_all("mask", f"veto & token_ratio(upper=2.0, of={of})"))
    assert (len(spec.masks_at_update), len(spec.masks_before)) == ((1, 1) if of == "policy" else (0, 2))


def test_what_a_mask_judges_by_itself():
    mask = methods.parse("mask", "veto")
    at = lambda **fields: LossSpec(objective=("ppo", {}), **fields).seen(mask)
    assert at() == at(centre="prox") == "engine" and at(centre="behav") == "policy"
    assert at(centre="prox", staleness_weight=staleness_weight("folded")) == "folded"
    with pytest.raises(ValueError, match="'veto' has of=prox; choose one of engine, staleness"):
        methods.parse("mask", "veto(of=prox)")
    with pytest.raises(ValueError, match="centre is 'bypass'; choose one of old, prox, behav"):
        policy_loss(*made(), objective="ppo", centre="bypass")


def test_without_caps_the_weights_of_sequences_have_the_gradient_at_prox():
    """sum_y mu(y) w(y) R(y) grad log pi(y) at pi = pi_prox, over all 27 responses of three policies."""
    vocab, length, rng = 3, 3, np.random.default_rng(4)
    responses = np.array(list(itertools.product(range(vocab), repeat=length)))
    reward = rng.normal(size=len(responses))
    # Logits after each prefix, of which the last two tokens and the place tell the others.
    tables = rng.normal(size=(3, length, vocab + 1, vocab + 1, vocab))
    before = lambda n: np.pad(responses + 1, ((0, 0), (n, 0)))[:, :length]

    def log_probs(table):
        logits = table[np.arange(length), before(1), before(2)]
        return jnp.take_along_axis(jax.nn.log_softmax(logits), responses[..., None], axis=-1)[..., 0]

    with jax.enable_x64(True):
        behav, old, prox = map(np.asarray, jax.jit(lambda tables: [*map(log_probs, tables)])(tables))
        batch = {"logp_behav": behav, "logp_old": old, "logp_prox": prox,
                 "mask": np.ones((len(responses), length), bool)}
        drawn = np.exp(behav.sum(1))  # every loss here is linear in the advantage's size
        batch["adv"] = (drawn * reward)[:, None] * np.ones((1, length))

        def expected(table):
            return -jnp.sum(jnp.exp(log_probs(table).sum(1)) * reward)

        truth = jax.jit(jax.grad(expected))(tables[2])

        def gradient(**spec):
            value = lambda table: policy_loss(
                log_probs(table), batch, aggregation="token-sum", **spec)[0]
            return jax.jit(jax.grad(value))(tables[2])

        apart = {"weight": "seq_vanilla", "staleness_weight": "seq_vanilla"}
        unbiased = [
            apart | {"centre": "prox", "objective": "ppo"}, apart | {"objective": "reinforce"},
            {"centre": "prox", "objective": "cispo", "weight": "seq_vanilla",
             "staleness_weight": "folded"},
            {"centre": "behav", "objective": "reinforce", "weight": "seq_vanilla"},
        ]
        for spec in unbiased:
            np.testing.assert_allclose(gradient(**spec), truth, rtol=1e-9, atol=1e-12, err_msg=spec)
        size = np.abs(truth).max()
        for spec in (  # a factor is missing
            {"centre": "prox", "objective": "ppo", "weight": "seq_vanilla"},
            {"centre": "prox", "objective": "ppo", "staleness_weight": "seq_vanilla"},
        ):
            assert np.abs(gradient(**spec) - truth).max() > 0.01 * size
