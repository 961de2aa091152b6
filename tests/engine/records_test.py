"""What requests may ask for: everything that the programs can compute with, and nothing else."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import sharding
from jaxrl_tis.engine import sampling
from jaxrl_tis.engine.penalties import Penalties
from jaxrl_tis.engine.records import Request, SamplingParams, Trajectory, extended


@pytest.mark.parametrize("name, value", [
    ("temperature", -0.1), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0),
    ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.0), ("max_tokens", 0),
    ("repetition_penalty", 0.0), ("repetition_penalty", float("inf")),
    ("presence_penalty", float("nan")), ("frequency_penalty", float("inf")),
    ("logit_bias", ((-1, 0.5),)), ("logit_bias", ((3, 0.5), (3, 1.0))),
    ("logit_bias", tuple((i, 1.0) for i in range(17))), ("logit_bias", ((1, -float("inf")),)),
    # Beyond normal float32, or without a reciprocal there.
    ("temperature", 1e-38), ("temperature", 1e38), ("temperature", float("inf")),
    ("top_p", 1e-38), ("top_p", 1e-300), ("min_p", 1e-45), ("repetition_penalty", 1e-300),
    ("repetition_penalty", 1e38), ("presence_penalty", 1e39), ("presence_penalty", -1e39),
    ("frequency_penalty", 1e-39), ("logit_bias", ((1, 1e39),)), ("logit_bias", ((1, -1e39),)),
    # Beyond int32, or no integers.
    ("top_k", 2**31), ("top_k", 2.0), ("max_tokens", 2**31), ("max_tokens", 1.5),
    ("stop_ids", (2**40,)), ("stop_ids", (-1,)), ("stop_ids", ("a",)),
    ("logit_bias", ((2**31, 1.0),)), ("logit_bias", ((1.5, 1.0),)),
    ("stop_strings", "ab"), ("stop_strings", ("",)), ("stop_strings", ("a", 1)),
    ("min_tokens", -1), ("min_tokens", 1.0), ("min_tokens", 17), ("prompt_logprobs", 0),
])
def test_parameters_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} must be ")):
        SamplingParams(**{name: value})


@pytest.mark.cases("logit_bias-value12")
@pytest.mark.parametrize("name, value", [
    ("temperature", 2.0**-126), ("temperature", 2.0**126), ("top_p", 2.0**-126), ("top_p", 1),
    ("min_p", 1 - 1e-12), ("repetition_penalty", 2.0**-126), ("repetition_penalty", 2.0**126),
    ("presence_penalty", -3.4e38), ("logit_bias", ((1, 3.4e38), (2, -3.4e38), (3, 0))),
    ("top_k", 2**31 - 1), ("top_k", np.int64(3)), ("stop_ids", (np.int32(0), 2**31 - 1)),
    ("logit_bias", tuple((token, 1.0) for token in range(16))), ("min_tokens", 16),
])
def test_what_a_draw_can_compute_with_is_taken(name, value):
    """And gives a distribution."""
    params = SamplingParams(**{name: value})
    assert getattr(params, name) == value
    logits = np.array([[0.0, 1.0, 2.0, -3.0, -np.inf, 1.5]], np.float32)
    penalties = None
    if params.is_penalised:
        history = np.array([[1, 2, 0]], np.int32), np.array([1]), np.array([2])
        penalties = Penalties.of([params]).seen(*history, 6, sharding.single_device())
    p = np.exp(sampling.distribution(logits, params, penalties))
    assert p.sum() == pytest.approx(1, rel=1e-6) and p[0, 4] == 0


def test_is_filtered_names_what_changes_the_support():
    for params in (SamplingParams(top_k=3), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)):
        assert params.is_filtered
    assert not SamplingParams(temperature=0.5).is_filtered


def of(prompt, id="a", seed=0):
    return Request(id, prompt, seed, SamplingParams())


@pytest.mark.parametrize("prompt", [
    [3, 1, 2], (3, 1, 2), np.array([3, 1, 2], np.uint8), np.array([3, 0, 1, 0, 2])[::2],
    jnp.array([3, 1, 2]),
], ids=["list", "tuple", "uint8", "strided", "jax"])
def test_a_prompt_is_held_as_int32(prompt):
    held = of(prompt).prompt
    assert held.dtype == np.int32 and held.flags.c_contiguous
    np.testing.assert_array_equal(held, [3, 1, 2])
    assert of(held).prompt is held


def test_an_empty_prompt_is_for_the_scheduler_to_refuse():
    assert of([]).prompt.shape == (0,) and of([]).prompt.dtype == np.int32


@pytest.mark.parametrize("prompt, message", [
    ([[1, 2]], r"int64 of shape \(1, 2\)"), (3, r"int64 of shape \(\)"), ([1.0], "float64"),
    ("ab", "<U2"), (["a"], "<U1"), ([True], "bool"), ([2**70], "object"),
    ([1, -1], "prompt ids from -1 to 1"), ([2**31], f"to {2**31}"),
])
def test_a_prompt_that_is_no_row_of_token_ids_is_refused(prompt, message):
    with pytest.raises(ValueError, match=f"request a: .*{message}"):
        of(prompt)


@pytest.mark.parametrize("seed", [np.int32(1), 1.0, "1", None])
def test_a_seed_that_is_no_int_is_refused(seed):
    """The sampler takes the low 32 bits, which numpy's integers may not have."""
    assert of([1], seed=2**40 - 1).seed == 2**40 - 1
    with pytest.raises(ValueError, match=re.escape(f"request a: seed {seed!r}")):
        of([1], seed=seed)


@pytest.mark.parametrize("id", [3, b"a", None])
def test_an_id_that_is_no_text_is_refused(id):
    with pytest.raises(ValueError, match=re.escape(f"request id {id!r} is a")):
        of([1], id=id)


def test_a_record_is_one_turn_of_the_policy_unless_its_builder_says_otherwise():
    numbers = np.zeros(3, np.float32)
    fields = dict(
        id="a", prompt=np.array([1]), tokens=np.array([5, 6, 7]), logp_behav=numbers,
        logp_raw=numbers, entropy=numbers, version=np.zeros(3, np.int32), stop_reason="stop",
        seed=0, request=1, quant_id="none", temperature=1.0,
    )
    plain = Trajectory(**fields)
    assert plain.mask.tolist() == [True] * 3 and plain.turn.tolist() == [0] * 3
    assert (plain.mask.dtype, plain.turn.dtype) == (bool, np.int32)
    built = Trajectory(**fields, mask=np.array([True, False, True]), turn=np.array([0, 0, 1]))
    assert built.mask.tolist() == [True, False, True] and built.turn.tolist() == [0, 0, 1]


# Turns


def test_given_tokens_follow_the_record():
    """In each field the value that stands for a token which nobody sampled."""
    ints, floats = lambda *x: np.array(x, np.int32), lambda *x: np.array(x, np.float32)
    record = Trajectory(
        "7/0", ints(5, 6), ints(3, 9), floats(-1, -2), floats(-1, -3), floats(1, 2), ints(3, 4),
        "stop", 11, 17, "int8", 0.5, kv_version=ints(2, 3), segment=ints(0, 1),
        logits=floats([-1, -2], [-3, -4]), top_ids=ints([3], [9]), top_logps=floats([-1], [-2]),
        kept=ints([3, -1], [3, 9]), routes=np.ones((3, 1, 1), np.uint8), rerouted=ints(1, 0),
        prompt_logps=floats(np.nan, -1), logp_student=floats([-1], [-4]),
        drafter_version=ints(-1, 3), accepted=np.array([False, True]),
    )
    first, before = extended(record, [8, 7]), dataclasses.asdict(record)
    whole = {
        "tokens": ints(3, 9, 8, 7), "logp_behav": floats(-1, -2, 0, 0),
        "logp_raw": floats(-1, -3, 0, 0), "entropy": floats(1, 2, 0, 0),
        "version": ints(3, 4, 4, 4), "kv_version": ints(2, 3, 3, 3), "segment": ints(0, 1, 1, 1),
        "mask": np.array([True, True, False, False]), "turn": ints(0, 0, 1, 1),
        "drafter_version": ints(-1, 3, -1, -1), "accepted": np.array([False, True, False, False]),
        "logits": floats([-1, -2], [-3, -4], [0, 0], [0, 0]), "top_ids": ints([3], [9], [-1], [-1]),
        "top_logps": floats([-1], [-2], [0], [0]),
        "logp_student": floats([-1], [-4], [0], [0]),
        "kept": ints([3, -1], [3, 9], [-1, -1], [-1, -1]), "stop_reason": "abort",
    }
    for name, value in (before | whole).items():
        np.testing.assert_array_equal(getattr(first, name), value, name, strict=True)
    assert (first.num_given, first.num_turns, record.num_given, record.num_turns) == (2, 2, 0, 1)
    np.testing.assert_array_equal(extended(first, ints(4)).turn, [0, 0, 1, 1, 2])
    np.testing.assert_array_equal(record.tokens, [3, 9])


@pytest.mark.parametrize("tokens, why", [
    ([], "the extension is empty; give at least one token"),
    ([1.5], "the extension is float64 of shape (1,); give a sequence of token ids"),
    ([[1]], "the extension is int64 of shape (1, 1); give a sequence of token ids"),
    ([3, -1], "extension ids from -1 to 3; token ids are 0 to 2147483647"),
])
def test_what_is_no_extension(tokens, why):
    none = np.zeros(0, np.float32)
    record = Trajectory(
        "7", np.array([1]), np.array([2]), none, none, none, none, "stop", 0, 0, "", 1.0
    )
    with pytest.raises(ValueError, match=re.escape(f"request 7: {why}")):
        extended(record, tokens)
    with pytest.raises(ValueError, match="request 7: the record to extend has no tokens"):
        extended(dataclasses.replace(record, tokens=none, mask=none, turn=none), [1])
