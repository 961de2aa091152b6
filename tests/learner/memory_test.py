"""Rows of 4,096 tokens and 4,096 words: no program of the learner has an array of both, or of two
tokens. The programs are traced, not compiled."""

import dataclasses
import functools
import math

import jax
import pytest
from jax.extend import core

from jaxrl_tis import build
from jaxrl_tis.aot import programs as aot
from jaxrl_tis.validate import validate
from tests import tiny

pytestmark = pytest.mark.by_jax("the arrays are those that jax traces")

LENGTH = 4096
PACKED = dict(train__pack_length=LENGTH)
CENTRED = dict(correction__centre="behav", correction__objective="reinforce", **PACKED)
# Fields of the config, and programs beside the update.
VARIANTS = [
    (dict(correction__kl_coeff=0.1, correction__entropy_coeff=0.01), ["score"]),
    (dict(correction__centering="top(32)", **CENTRED), []),
    (dict(
        correction__centering="kept", rollout__top_k=32, rollout__sampling_mask_size=64,
        correction__kl_coeff=0.1, correction__kl_placement="reward", **CENTRED,
    ), ["score"]),
    (dict(
        engine__retention=(1, 2), correction__dense_kl_coeff=0.1, correction__sampler_kl_coeff=0.1,
    ), []),
    (dict(correction__advantage="gae(gamma=1.0, lam=1.0)", **PACKED), ["score", "critic", "values"]),
]


@functools.cache
def tiny_model():
    model = build.small_model(tiny.config(), LENGTH)
    return dataclasses.replace(model, max_position=LENGTH)


def largest(fields, names):
    """The most numbers of an array in each of these programs, and where it is."""
    config = tiny.config(
        task__max_prompt_tokens=64, rollout__max_new_tokens=LENGTH - 64, train__microbatch_rows=1,
        rollout__prompts=2, rollout__group_size=2, engine__slots=4, model__remat="full",
        **{"train__logprob_chunk": 128} | fields,
    )
    setup = build.assemble(config, validate(config), tiny_model(), None, jax.devices()[:1])
    found = aot.programs(setup)
    return {name: max(arrays(found[name][0].trace(*found[name][1]).jaxpr.jaxpr)) for name in names}


def arrays(jaxpr):
    """Yields (size, shape) of every array that an equation of a program makes, at any depth."""
    for equation in jaxpr.eqns:
        for x in equation.outvars:
            shape = getattr(x.aval, "shape", ())
            yield math.prod(shape), f"{equation.primitive} {shape} {equation.source_info.name_stack}"
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(inner):
                yield from arrays(getattr(inner, "jaxpr", inner))


def is_program(x):
    return isinstance(x, (core.Jaxpr, core.ClosedJaxpr))


def test_no_array_of_tokens_and_words_or_of_two_tokens():
    for fields, others in VARIANTS:
        for name, (size, where) in largest(fields, ["train", *others]).items():
            assert size <= LENGTH**2 // 2, f"{name} with {fields}: {where}"


def test_a_chunk_of_all_tokens_is_found():
    [(size, where)] = largest(dict(train__logprob_chunk=LENGTH), ["score"]).values()
    assert size == (LENGTH - 64) * LENGTH, where
