"""What must hold for every entry of the tables, on batches that hypothesis draws: the order of the
rows, padding, packing, micro-batches and dtypes.

A batch is drawn as the lengths of its sequences, the size of each one's log-ratios and a seed. All
its numbers but logits are multiples of 2^-12 with few enough bits that float32 adds them up exactly
in any order: a bound is then hit, or missed, in every layout.
"""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.estimators import samples
from tests.estimators.samples import ADVANTAGES, ENTRIES, LOSSES, SCALARS, VOCAB, WIDTH

pytestmark = pytest.mark.compiles

NUM_ROWS = len(samples.LENGTHS)
SHAPE = (NUM_ROWS, WIDTH)
PACKED_SHAPE = (NUM_ROWS - 1, 2 * WIDTH + 3)
# Methods that look at the whole batch, so that micro-batches do not add up.
COUPLED = ("clip_cov", "kl_cov", "kl_cov(form=survey)", "m2po", "top_entropy", "quatro", "espo",
           "r2vpo(form=survey)")
# A method whose random choice depends on the layout of the batch.
RANDOM = ("clip_cov",)

FINE = np.arange(NUM_ROWS * WIDTH).reshape(SHAPE) / 4096  # tells tokens apart, so that none tie
EXACT = (-20.0, -2.0, 0.0, 2.0, 20.0)  # bounds of a log-ratio and of k2
PADDING = (100.0, -100.0, np.nan, np.inf, -np.inf)

LENGTHS = st.tuples(st.integers(3, WIDTH), *[st.integers(0, WIDTH)] * (NUM_ROWS - 1))
SIZES = st.tuples(*[st.sampled_from([0.0, 0.1, 1.0, 5.0, 300.0, "exact"])] * NUM_ROWS)
SEED = st.integers(0, 2**32 - 1)
settings = hypothesis.settings(max_examples=12, deadline=None, derandomize=True, database=None)


def drifts(rng, sizes):
    """Log-ratios [B, T]: up to the size of the row, or the exact bounds."""
    drift = np.zeros(SHAPE)
    for i, size in enumerate(sizes):
        if size == "exact":
            drift[i] = rng.choice(EXACT, WIDTH)
        elif size > 0.0:
            drift[i] = np.floor(64 * size * rng.random(WIDTH)) / 64 + FINE[i]
    drift[0, 0] = 0.0  # so that the smallest is not one of several at a bound
    return rng.choice([-1.0, 1.0], SHAPE) * drift


def make_batch(lengths, sizes, seed):
    """(logp, batch) with the fields of `samples.make`, float64 and int32."""
    rng = np.random.default_rng(seed)
    mask = np.arange(WIDTH)[None, :] < np.array(lengths)[:, None]
    mask[1:] &= rng.random((NUM_ROWS - 1, WIDTH)) < 0.8
    staleness, engine, prox, ref = (drifts(rng, sizes) for _ in range(4))
    old = -np.max([np.zeros(SHAPE), staleness, -engine, -prox, -ref], axis=0)
    old -= rng.integers(1, 128, SHAPE) / 64 + FINE
    adv = rng.choice(np.arange(-8, 9) / 4, (NUM_ROWS, 1), replace=False)  # no group is constant
    mixed = lambda: rng.permutation(FINE.ravel()).reshape(SHAPE)
    logits = rng.normal(size=(*SHAPE, VOCAB))
    near = lambda x: x + rng.choice([0.0, 0.3, 3.0], (NUM_ROWS, 1, 1)) * rng.normal(size=x.shape)
    floats = {
        "logp_old": old,
        "logp_behav": old - engine,
        "logp_prox": old - prox,
        "logp_ref": old - ref,
        "adv": adv + mixed(),
        "entropy": 256 * mixed() + 0.125,
        "sum_pi_squared": 64 * mixed() + 0.125,
        "logits": logits,
        "logits_behav": near(logits),
        "logits_ref": near(logits),
        "rewards": np.repeat(rng.choice([0.0, 1.0], (NUM_ROWS, 1)), WIDTH, axis=1),
    }
    integers = {
        "turn": np.cumsum(rng.random(SHAPE) < 0.4, axis=1),
        "version": rng.integers(1, 5, SHAPE),
        "group": np.repeat(rng.integers(0, 3, (NUM_ROWS, 1)), WIDTH, axis=1),
    }
    batch = floats | {"mask": mask} | {k: x.astype(np.int32) for k, x in integers.items()}
    batch |= {"current_version": np.int32(4), "key": jax.random.key(seed),
              "st_ppo_norm": np.float64(0.5)}
    return old + staleness, batch


def cast(tree, dtype=np.float32):
    """The floats in another type."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, tree)


def per_token(function, logp, batch):
    """function of logp and of every field [B, T] or [B, T, V] of the batch."""
    fields = {name: x if name in SCALARS else function(x) for name, x in batch.items()}
    return function(logp), fields


def poison(logp, batch, value):
    """Another value outside the mask; 99 in integers."""

    def fill(x):
        mask = np.asarray(batch["mask"]) != 0
        filler = np.array(99 if x.dtype.kind == "i" else value).astype(x.dtype)
        return np.where(mask.reshape(mask.shape + (1,) * (x.ndim - 2)), x, filler)

    logp, fields = per_token(fill, logp, batch)
    return logp, fields | {"mask": batch["mask"]}


def evaluate(logp, batch, full_batch=None):
    counts = samples.counts(batch if full_batch is None else full_batch)
    return jax.device_get(samples.results(logp, batch | counts))


def assert_same(actual, wanted, left_out=(), change=lambda x: x, atol=1e-6):
    """Equal results; `change` puts those [B, T] that are wanted into the layout of the actual."""
    for entry in ENTRIES + LOSSES:
        if entry[1] in left_out:
            continue
        for got, want in zip(actual[entry], wanted[entry], strict=True):
            label = " ".join(entry)
            assert np.all(np.isfinite(want)), label
            want = change(want) if np.ndim(want) else want
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=atol, err_msg=label)


def assert_dtype(results, dtype):
    for entry, parts in results.items():
        assert {x.dtype for x in jax.tree.leaves(parts)} == {np.dtype(dtype)}, entry


@pytest.mark.all
@settings
@hypothesis.given(LENGTHS, SIZES, SEED, st.permutations(range(NUM_ROWS)))
def test_permuted_rows_have_permuted_results(lengths, sizes, seed, order):
    batch = cast(make_batch(lengths, sizes, seed))
    permute = lambda x: x[np.array(order)]
    actual = evaluate(*per_token(permute, *batch))
    assert_same(actual, evaluate(*batch), RANDOM, permute)


@pytest.mark.all
@settings
@hypothesis.given(LENGTHS, SIZES, SEED)
def test_what_stands_at_padding_changes_nothing(lengths, sizes, seed):
    logp, batch = cast(make_batch(lengths, sizes, seed))
    wanted = evaluate(logp, batch)
    for value in PADDING:
        assert_same(evaluate(*poison(logp, batch, value)), wanted)
    nothing = batch | {"mask": np.zeros_like(batch["mask"])}
    for entry, parts in evaluate(*poison(logp, nothing, np.nan)).items():
        for part in parts:
            np.testing.assert_array_equal(part, np.zeros_like(part), err_msg=" ".join(entry))


def arrangement(lengths, random):
    """(row, first column) of each sequence in rows of PACKED_SHAPE, and the sequence ids there."""
    num_rows, width = PACKED_SHAPE
    seg, free, place = np.zeros(PACKED_SHAPE, np.int32), [0] * num_rows, {}
    ids = [random.sample(range(1, width + 1), NUM_ROWS) for _ in range(num_rows)]
    for i in random.sample(range(NUM_ROWS), NUM_ROWS):
        gap = random.randint(0, 1)
        row = random.choice([r for r in range(num_rows) if free[r] + gap + lengths[i] <= width])
        place[i] = row, free[row] + gap
        free[row] += gap + lengths[i]
        seg[row, free[row] - lengths[i] : free[row]] = ids[row].pop()
    return place, seg


@pytest.mark.all
@settings
@hypothesis.given(LENGTHS, SIZES, SEED, st.randoms(use_true_random=False), st.sampled_from(PADDING))
def test_packed_rows_equal_dense_rows(lengths, sizes, seed, random, value):
    """In any arrangement, in arrays of another shape, with a mask of another type."""
    batch = cast(make_batch(lengths, sizes, seed))
    place, seg = arrangement(lengths, random)

    def pack(x):
        packed = np.zeros((*PACKED_SHAPE, *x.shape[2:]), x.dtype)
        for i, (row, start) in place.items():
            packed[row, start : start + lengths[i]] = x[i, : lengths[i]]
        return packed

    logp, packed = poison(*per_token(pack, *batch), value)
    packed |= {"mask": np.float32(0.5) * packed["mask"], "seg": seg}
    actual = evaluate(logp, packed, full_batch=batch[1])
    assert_same(actual, evaluate(*batch), RANDOM, pack)


@settings
@hypothesis.given(LENGTHS, SIZES, SEED, st.tuples(*[st.integers(0, 2)] * NUM_ROWS))
def test_micro_batches_add_up(lengths, sizes, seed, part_of):
    """Each row is in one of three micro-batches and padding in the others."""
    logp, batch = cast(make_batch(lengths, sizes, seed))
    parts = []
    for part in range(3):
        here = batch["mask"] & (np.array(part_of) == part)[:, None]
        micro = poison(logp, batch | {"mask": here}, np.nan)
        parts.append(evaluate(*micro, full_batch=batch))
    actual = jax.tree.map(lambda *x: sum(x), *parts)
    assert_same(actual, evaluate(logp, batch), COUPLED)


@pytest.mark.all
@settings
@hypothesis.given(LENGTHS, SIZES, SEED)
def test_float64_stays_float64_and_agrees_with_float32(lengths, sizes, seed):
    batch = make_batch(lengths, sizes, seed)
    with jax.enable_x64(True):
        double = evaluate(*batch)
    assert_dtype(double, np.float64)
    assert_same(evaluate(*cast(batch)), double, atol=1e-5)


@pytest.mark.all
@settings
@hypothesis.given(LENGTHS, SIZES, SEED)
def test_bfloat16_is_computed_in_float32(lengths, sizes, seed):
    batch = cast(make_batch(lengths, sizes, seed), jnp.bfloat16)
    actual, wanted = evaluate(*batch), evaluate(*cast(batch))
    for entry, (got, *gradient) in actual.items():
        want, *wanted_gradient = wanted[entry]
        label = " ".join(entry)
        assert got.dtype == np.float32, label
        np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=label)
        for low, high in zip(gradient, wanted_gradient, strict=True):  # a sum of rounded terms
            assert low.dtype == jnp.bfloat16, label
            tolerance = {"rtol": 2**-7, "atol": 2**-8 * np.max(np.abs(high))}
            np.testing.assert_allclose(low.astype(np.float32), high, **tolerance, err_msg=label)


# Advantages


def make_inputs(lengths, rewards, group, seed):
    """Every field that an advantage can ask for, float64 and int32."""
    rng = np.random.default_rng(seed)
    mask = np.arange(WIDTH)[None, :] < np.array(lengths)[:, None]
    mask[1:] &= rng.random((NUM_ROWS - 1, WIDTH)) < 0.8
    return {
        "rewards": np.array(rewards) / 8,
        "mask": mask,
        "group": np.array(group, np.int32),
        "values": rng.integers(-16, 17, SHAPE) / 8,
        "greedy_rewards": rng.integers(-16, 17, NUM_ROWS) / 8,
        "reward_components": rng.integers(-16, 17, (NUM_ROWS, 2)) / 8,
        "logp_old": -rng.integers(1, 256, SHAPE) / 64,
        "logp_prox": -rng.integers(1, 256, SHAPE) / 64,
        "logp_behav": -rng.integers(1, 256, SHAPE) / 64,
        "sum_pi_squared": rng.integers(1, 64, SHAPE) / 64,
        "entropy": rng.integers(1, 64, SHAPE) / 16,
        "weights": rng.integers(0, 256, SHAPE) / 64,
        "grad_norms": rng.integers(1, 256, NUM_ROWS) / 64,
    }


def advantages(inputs):
    return jax.device_get(samples.advantages(inputs))


def assert_same_advantages(actual, wanted, atol=1e-5, atol_gdpo=1e-5):
    for name in ADVANTAGES:
        assert np.all(np.isfinite(wanted[name])), name
        tolerance = {"rtol": 1e-5, "atol": atol_gdpo if name == "gdpo" else atol}
        np.testing.assert_allclose(actual[name], wanted[name], **tolerance, err_msg=name)


BY_ROW = [st.tuples(*[st.integers(*ends)] * NUM_ROWS) for ends in ((-16, 16), (0, 2))]


@pytest.mark.all
@settings
@hypothesis.given(LENGTHS, *BY_ROW, SEED, st.permutations(range(NUM_ROWS)))
def test_permuted_samples_have_permuted_advantages(lengths, rewards, group, seed, order):
    inputs, order = cast(make_inputs(lengths, rewards, group, seed)), np.array(order)
    actual = advantages({field: x[order] for field, x in inputs.items()})
    assert_same_advantages(actual, {k: x[order] for k, x in advantages(inputs).items()})


@pytest.mark.all
@settings
@hypothesis.given(LENGTHS, *BY_ROW, SEED)
def test_padding_changes_no_advantage(lengths, rewards, group, seed):
    """Neither what stands there nor how many columns there are of it, nor the mask's type. A reward
    per sequence is one on its last token."""
    inputs = cast(make_inputs(lengths, rewards, group, seed))
    mask = inputs["mask"]
    inputs["rewards"] *= mask.any(axis=1)
    wanted = advantages(inputs)
    for value in PADDING:
        poisoned = {
            field: np.where(mask, x, np.float32(value)) if x.shape == SHAPE else x
            for field, x in inputs.items()
        }
        assert_same_advantages(advantages(poisoned | {"mask": mask}), wanted, atol=0.0)
    wider = lambda x: np.pad(x, ((0, 0), (1, 2))) if x.shape == SHAPE else x
    is_last = mask & (np.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1)
    rewards_bt = np.where(is_last, inputs["rewards"][:, None], np.where(mask, 0.0, np.nan))
    inputs["rewards"] = rewards_bt.astype(np.float32)
    wide = {field: wider(x) for field, x in inputs.items()}
    actual = advantages(wide | {"mask": np.float32(0.5) * wide["mask"]})
    assert_same_advantages(actual, {name: wider(x) for name, x in wanted.items()})


@pytest.mark.all
@settings
@hypothesis.given(LENGTHS, *BY_ROW, SEED)
def test_dtypes_of_advantages(lengths, rewards, group, seed):
    inputs = make_inputs(lengths, rewards, group, seed)
    with jax.enable_x64(True):
        double = advantages(inputs)
    assert_dtype(double, np.float64)
    # gdpo divides sums of rounded terms by 1e-4 where they are all but equal.
    assert_same_advantages(advantages(cast(inputs)), double, atol_gdpo=3e-3)
    low = cast(inputs, jnp.bfloat16)
    actual = advantages(low)
    assert_dtype(actual, np.float32)
    assert_same_advantages(actual, advantages(cast(low)), atol=0.0)
