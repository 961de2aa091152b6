"""The drawn distribution against a float64 reference, and the draw against the distribution."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.engine import sampling
from jaxrl_tis.engine.records import SamplingParams
from jaxrl_tis.engine.sampling import SamplingRows
from tests import compilation
from tests.drawn import (
    EDGE, assert_chi_square, is_drawn_from, keys, reference, short_cumsum,
)

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("XLA compiles and rounds the programs")]

GREEDY = SamplingParams(temperature=0.0)
COUNT = 4096
draw = jax.jit(sampling.sample, compiler_options=compilation.OPTIMIZED)
logs = jax.jit(sampling.distribution)

ROWS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=5.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=5),
    SamplingParams(top_k=10_000),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=0.999),
    SamplingParams(temperature=0.7, top_k=6, top_p=0.8),
    SamplingParams(temperature=2.0, top_k=40, top_p=0.95, min_p=0.2),
    SamplingParams(temperature=0.05, top_p=0.99, min_p=0.01),
    GREEDY,
    SamplingParams(temperature=0.0, top_k=3, top_p=0.5),
]


def distributions(logits_v, params):
    """Probabilities [len(params), len(logits_v)]; padded to one shape, so that it compiles once."""
    logits_bv = np.full((len(ROWS), 200), -np.inf, np.float32)
    logits_bv[:, : len(logits_v)] = logits_v
    rows = SamplingRows.of([*params, *[SamplingParams()] * (len(ROWS) - len(params))])
    p = np.exp(np.asarray(logs(logits_bv, rows), np.float64))
    assert not p[:, len(logits_v) :].any()
    return p[: len(params), : len(logits_v)]


def draws(logits_v, params, seed=0, request=0, position=range(COUNT)):
    """COUNT samples from one row of logits, padded to 100 or 300 tokens that cannot be drawn."""
    width = 100 if len(logits_v) <= 100 else 300
    logits_bv = np.full((COUNT, width), -np.inf, np.float32)
    logits_bv[:, : len(logits_v)] = logits_v
    position = np.broadcast_to(np.asarray(position, np.int32), (COUNT,))
    return draw(logits_bv, SamplingRows.of([params] * COUNT), keys(COUNT, seed, request), position)


@pytest.mark.parametrize("v", [5, 128, 200])
def test_distribution_equals_float64_reference(v):
    logits_v = np.random.default_rng(v).normal(0, 2, v).astype(np.float32)
    expected = np.stack([reference(logits_v, p) for p in ROWS])
    actual = distributions(logits_v, ROWS)
    np.testing.assert_array_equal(actual > 0, expected > 0)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-9)
    np.testing.assert_allclose(actual.sum(axis=-1), 1.0, rtol=1e-5)


@pytest.mark.parametrize("logits_v", [
    [1.0, 3.0, 3.0, 3.0, 0.0, 3.0],  # ties at every cut
    [2.0] * 6,  # nothing but ties
    [-np.inf, 1.0, -np.inf, 0.5, 2.0, -np.inf],
    [-np.inf, -np.inf, -np.inf, 0.0, -np.inf, -np.inf],
    [0.0, 0.0, 500.0, 0.0, 0.0, 0.0],  # one token takes all the float32 mass
], ids=["ties", "all_tied", "some_inf", "one_finite", "one_hot"])
def test_distribution_of_awkward_logits(logits_v):
    expected = np.stack([reference(logits_v, p) for p in ROWS])
    np.testing.assert_allclose(distributions(logits_v, ROWS), expected, rtol=2e-5, atol=1e-30)


def test_filters_act_in_the_order_top_k_top_p_min_p():
    # p = 0.4, 0.3, 0.2, 0.1. top_k 3 leaves 4/9, 3/9, 2/9; two of them have 7/9 >= 0.75.
    # On the unfiltered p, three would be needed (0.4 + 0.3 < 0.75 <= 0.9).
    p = lambda **params: distributions(np.log([0.4, 0.3, 0.2, 0.1]), [SamplingParams(**params)])[0]
    np.testing.assert_allclose(p(top_k=3, top_p=0.75), [4 / 7, 3 / 7, 0, 0], rtol=1e-6)
    # min_p 0.6: 0.3 >= 0.24 stays, 0.2 goes. It is relative, so renormalising does not move it.
    np.testing.assert_allclose(p(top_k=3, min_p=0.6), [4 / 7, 3 / 7, 0, 0], rtol=1e-6)
    # Temperature first: p^2 = 16, 9, 4, 1 of 30; 25/30 >= 0.8 needs two where p itself needs three.
    np.testing.assert_allclose(p(temperature=0.5, top_p=0.8), [16 / 25, 9 / 25, 0, 0], rtol=1e-6)


def test_a_token_as_likely_as_min_p_asks_for_is_kept():
    logits = np.array([[0.0, -1.0, -2.0]], np.float32)
    bound = float(jnp.exp(logits)[0, 1])
    logp = logs(logits, SamplingRows.of([SamplingParams(min_p=bound)]))
    np.testing.assert_array_equal(logp > -jnp.inf, [[True, True, False]])


def test_filtered_logprobs_are_reported():
    # 0.5, 0.3, 0.2 with top_p 0.75 is sampled 62.5 % to 37.5 %, and that is what is recorded.
    logits = np.log([0.5, 0.3, 0.2])
    result = draws(logits, SamplingParams(top_p=0.75))
    token = np.asarray(result.tokens)
    assert_chi_square(token, np.array([0.625, 0.375, 0.0]))
    filtered = np.array([0.625, 0.375])[token]
    np.testing.assert_allclose(np.exp(result.logp_behav), filtered, rtol=1e-5)
    np.testing.assert_allclose(np.exp(result.logp_raw), np.array([0.5, 0.3])[token], rtol=1e-5)
    np.testing.assert_allclose(result.logp_raw - result.logp_behav, np.log(0.8), rtol=1e-5)


@pytest.mark.parametrize("params", [p for p in ROWS if p.temperature > 0], ids=str)
def test_raw_minus_behaviour_is_the_log_of_the_kept_mass(params):
    logits = np.random.default_rng(3).normal(0, 2, 200).astype(np.float32)
    unfiltered = reference(logits, SamplingParams(temperature=params.temperature))
    kept_mass = unfiltered[reference(logits, params) > 0].sum()
    result = draws(logits, params)
    np.testing.assert_allclose(
        result.logp_raw - result.logp_behav, np.full(COUNT, np.log(kept_mass)), atol=2e-5)
    np.testing.assert_allclose(
        np.exp(result.logp_behav), reference(logits, params)[np.asarray(result.tokens)], rtol=2e-5)


@pytest.mark.parametrize("v, params", [
    (8, SamplingParams()),
    (8, SamplingParams(temperature=0.5, top_k=4, top_p=0.95)),
    (100, SamplingParams(temperature=1.3)),
    (200, SamplingParams()),
    (300, SamplingParams(top_k=150, min_p=0.02)),
    (300, SamplingParams(temperature=2.0)),
], ids=str)
def test_draws_follow_the_distribution(v, params):
    logits = np.random.default_rng(v).normal(0, 1, v).astype(np.float32)
    p = reference(logits, params)
    assert_chi_square(np.asarray(draws(logits, params, seed=1, request=5).tokens), p)
    assert_chi_square(np.asarray(draws(logits, params, request=range(COUNT), position=3).tokens), p)


@pytest.mark.parametrize("other", [
    dict(position=np.arange(COUNT) + 1), dict(request=1), dict(seed=1),
], ids=["position", "request", "seed"])
def test_neighbouring_keys_draw_independently(other):
    p = np.array([0.4, 0.3, 0.2, 0.1])
    tokens = lambda **key: np.asarray(draws(np.log(p), SamplingParams(), **key).tokens)
    assert_chi_square(4 * tokens() + tokens(**other), np.outer(p, p).ravel())


def test_the_same_triple_draws_the_same_and_each_part_matters():
    base = dict(seed=2**32 - 1, request=3_000_000_000, position=7)
    tokens = lambda **key: np.asarray(draws(np.zeros(200), SamplingParams(), **(base | key)).tokens)
    assert len(set(tokens())) == 1
    for part in base:
        # 4096 uniform draws from 200 tokens miss none: 200 (1 - 1/200)^4096 = 2.4e-7.
        assert len(set(tokens(**{part: range(COUNT)}))) == 200


@pytest.mark.all
def test_key_is_two_folds_of_the_seed():
    key = jax.random.fold_in(jax.random.key(11), 22)
    np.testing.assert_array_equal(keys(1, 11, 22)[0], jax.random.key_data(key))


def test_temperature_alone_is_not_greedy_and_temperature_zero_is():
    logits = np.array([0.0, 2.0, 1.0, 1.9])
    assert len(set(np.asarray(draws(logits, SamplingParams(temperature=0.7)).tokens))) > 1
    for params in (GREEDY, SamplingParams(temperature=0.0, top_k=2, top_p=0.1, min_p=0.5)):
        result = draws(logits, params)
        np.testing.assert_array_equal(result.tokens, np.full(COUNT, 1))
        np.testing.assert_array_equal(result.logp_behav, np.zeros(COUNT))
        np.testing.assert_array_equal(result.entropy, np.zeros(COUNT))
    # 2 - log(1 + e^2 + e + e^1.9): the raw log-probability of a greedy token is at temperature 1.
    expected = 2 - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(result.logp_raw, np.full(COUNT, expected), rtol=1e-6)


def test_greedy_is_certain_also_when_two_logits_differ_by_one_ulp():
    logits = np.zeros(200, np.float32)
    logits[3], logits[7] = 1.0, np.nextafter(np.float32(1.0), np.float32(2.0))
    result = draws(logits, GREEDY)
    assert (int(result.tokens[0]), float(result.logp_behav[0])) == (7, 0.0)


@pytest.mark.cases("fast-short_cumsum", "invariant-short_cumsum")
@pytest.mark.parametrize("cumsum", [jnp.cumsum, short_cumsum])
@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_no_uniform_draws_a_token_of_probability_zero(monkeypatch, cumsum, numerics):
    monkeypatch.setattr(jnp, "cumsum", cumsum)
    supports = [[3], [299], [0], [1, 2, 298], [130, 140], [0, 127, 128, 255, 256]]
    n, uniforms = len(supports), [0.0, 1e-30, 0.25, 0.5, 0.75, 1 - 2.0**-24]
    logits = np.full((n, 300), -np.inf, np.float32)
    for row, support in enumerate(supports):
        logits[row, support] = 0.0

    @jax.jit
    @jax.vmap
    def sample_at(u):
        monkeypatch.setattr(jax.random, "uniform", lambda key, shape: jnp.full(shape, u))
        rows = SamplingRows.of([SamplingParams()] * n)
        return sampling.sample(
            jnp.asarray(logits), rows, keys(n), jnp.arange(n), numerics=numerics
        )

    result = sample_at(jnp.array(uniforms))
    for row, support in enumerate(supports):
        assert set(np.asarray(result.tokens[:, row])) <= set(support)
        uniform = np.full(len(uniforms), -np.log(len(support)))
        np.testing.assert_allclose(result.logp_behav[:, row], uniform, atol=1e-6)
    np.testing.assert_array_equal(result.tokens[0], [s[0] for s in supports])
    np.testing.assert_array_equal(result.tokens[-1], [s[-1] for s in supports])


@pytest.mark.cases("invariant")
@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_the_largest_uniform_draws_from_a_few_tokens_of_many_blocks(monkeypatch, numerics):
    """XLA on CPU adds up many blocks as a tree; rows 7 and 41 then fall short of their totals."""
    rng, (n, v) = np.random.default_rng(0), (48, 151936)
    logits = np.full((n, v), -np.inf, np.float32)
    for row in logits:
        row[1 + rng.choice(v - 1, 200, replace=False)] = -np.abs(rng.normal(0, 2, 200))
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape: jnp.full(shape, EDGE))
    rows = SamplingRows.of([SamplingParams()] * n)
    edge = jax.jit(lambda *args: sampling.sample(*args, numerics=numerics))
    drawn = edge(logits, rows, keys(n), np.arange(n, dtype=np.int32))
    assert np.isfinite(logits[np.arange(n), drawn.tokens]).all()


def test_a_top_p_that_rounds_to_0_keeps_the_most_likely_token():
    rows = SamplingRows.of([SamplingParams()] * 2)
    rows = dataclasses.replace(rows, top_p=np.full(2, 1e-40, np.float32))
    found = np.exp(logs(np.array([[0.0, 2.0, 1.0], [1.0, 1.0, 0.0]], np.float32), rows))
    np.testing.assert_array_equal(found, [[0, 1, 0], [1, 0, 0]])


def test_draws_stay_inside_the_kept_set():
    logits = np.random.default_rng(5).normal(0, 0.1, 300)
    logits[::3] = -np.inf
    logits[128:256] = -np.inf
    for params in (SamplingParams(), SamplingParams(top_k=17), SamplingParams(top_p=0.3)):
        result = draws(logits, params)
        assert (reference(logits, params)[np.asarray(result.tokens)] > 0).all()
        assert np.isfinite(result.logp_behav).all() and np.isfinite(result.entropy).all()


MANY = 100_000
SMALL = np.random.default_rng(7).normal(0, 1.5, 24).astype(np.float32)


@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.15),
    SamplingParams(top_k=9, top_p=0.9),
    SamplingParams(top_k=9, min_p=0.1),
    SamplingParams(top_p=0.95, min_p=0.1),
    SamplingParams(temperature=1.5, top_k=12, top_p=0.9, min_p=0.12),
], ids=str)
def test_a_hundred_thousand_draws_follow_the_distribution(params):
    rows, at = SamplingRows.of([params] * MANY), np.arange(MANY, dtype=np.int32)
    drawn = draw(np.tile(SMALL, (MANY, 1)), rows, keys(MANY, 3), at)
    p = reference(SMALL, params)
    tokens = np.asarray(drawn.tokens)
    assert is_drawn_from(tokens, p)
    kept_mass = reference(SMALL, SamplingParams(temperature=params.temperature))[p > 0].sum()
    np.testing.assert_allclose(drawn.logp_raw - drawn.logp_behav, np.log(kept_mass), atol=2e-6)
    # A hotter distribution on the same support is another one.
    hotter = np.where(p > 0, p**0.95, 0.0)
    assert not is_drawn_from(tokens, hotter / hotter.sum())


def test_entropy_by_hand():
    logits = np.log([0.5, 0.25, 0.25])
    entropy = lambda params: float(draws(logits, params).entropy[0])
    assert entropy(SamplingParams()) == pytest.approx(1.5 * np.log(2), rel=1e-6)
    # top_k 2 draws from 2/3, 1/3: log 3 - 2/3 log 2.
    hand = np.log(3) - 2 / 3 * np.log(2)
    assert entropy(SamplingParams(top_k=2)) == pytest.approx(hand, rel=1e-6)
    # Temperature 0.5 squares: 4/6, 1/6, 1/6: log 6 - 4/6 log 4.
    hand = np.log(6) - 2 / 3 * np.log(4)
    assert entropy(SamplingParams(temperature=0.5)) == pytest.approx(hand, rel=1e-6)


def test_a_row_does_not_see_the_other_rows():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (6, 200)).astype(np.float32)
    mixed = [SamplingParams(), ROWS[11], GREEDY, ROWS[4], SamplingParams(min_p=0.3), ROWS[6]]
    together = jax.device_get(
        draw(logits, SamplingRows.of(mixed), keys(6, 1, range(6)), np.arange(6))
    )
    for row in range(6):
        others = rng.normal(0, 5, (6, 200)).astype(np.float32)
        others[row] = logits[row]
        params = [SamplingParams()] * 6
        params[row] = mixed[row]
        requests, positions = np.full(6, 99), np.full(6, 50)
        requests[row], positions[row] = row, row
        alone = draw(others, SamplingRows.of(params), keys(6, 1, requests), positions)
        alone = jax.device_get(alone)
        for field in ("tokens", "logp_behav", "logp_raw", "entropy"):
            assert getattr(alone, field)[row] == getattr(together, field)[row], (row, field)


@pytest.mark.parametrize("value, place", [
    (np.nan, slice(None)), (np.nan, 3), (np.inf, 3), (np.inf, slice(None)), (-np.inf, slice(None)),
])
def test_no_token_of_broken_logits_has_a_finite_log_prob(value, place):
    """However it is sampled: the scheduler looks at the log-prob."""
    logits_bv = np.tile(np.linspace(-1, 1, 100, dtype=np.float32), (len(ROWS), 1))
    logits_bv[:, place] = value
    out = draw(logits_bv, SamplingRows.of(ROWS), keys(len(ROWS)), np.zeros(len(ROWS), np.int32))
    assert not np.isfinite(out.logp_behav).any()
