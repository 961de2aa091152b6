"""The supervised steps before the first one."""

import dataclasses
from unittest import mock

import ml_collections
import pytest

from jaxrl_tis import train
from jaxrl_tis.data.tokenizer import ARITHMETIC_CHARS, CharTokenizer
from jaxrl_tis.learner import warmup
from jaxrl_tis.rollouts.prompts import Prompter
from tests import tiny
from tests.environments import continuity_test
from tests.weights import exploding

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("a run: flax, optax, orbax and XLA together"),
]


def test_the_warm_up_taught_the_format():
    losses = [r["warmup/loss"] for r in tiny.lines(tiny.finished()) if r["phase"] == "warmup"]
    assert losses[-1] < 0.5 * losses[0]


def test_turns_before_an_answer_are_read_and_not_taught():
    """The row of "12=" with a call "12=" and its reply "3 ": the end token follows the call."""
    tokenizer = CharTokenizer(ARITHMETIC_CHARS)
    config = ml_collections.ConfigDict(
        dict(template="{prompt}", chat=False, system="", max_prompt_tokens=8)
    )
    example = {"id": "1", "prompt": "12=", "answer": "3", "turns": [["12=", "3 "]]}
    pairs = warmup.Pairs(Prompter(tokenizer, config), chat=False)
    ids = pairs.before(example)
    call, reply = tokenizer.encode("12="), tokenizer.encode("3 ")
    assert ids == [tokenizer.bos_id, *call, *call, 2, *reply]
    assert pairs.target(example) == [*tokenizer.encode("3"), 2]
    del example["turns"]
    assert pairs.before(example) == [tokenizer.bos_id, *call]


def test_an_answer_ends_as_the_template_writes_it():
    """GLM's form: the next message begins with the token that ends an answer, of its role."""
    ends = [continuity_test.mark(x) for x in ("</s>", "<|User|>", "<|end|>")]
    tokenizer = dataclasses.replace(
        continuity_test.tokenizer(continuity_test.OF_ROLES), eos_ids=tuple(ends)
    )
    config = ml_collections.ConfigDict(
        dict(template="{prompt}", chat=True, system="", max_prompt_tokens=8)
    )
    pairs = warmup.Pairs(Prompter(tokenizer, config), chat=True)
    call, tool = tokenizer.encode("call"), [{"role": "tool", "content": "4"}]
    example = {"id": "1", "prompt": "2", "answer": "call", "turns": [["call", tool], ["call", "5"]]}
    assert pairs.target(example) == [*call, ends[1]]
    begin = continuity_test.mark("<|Assistant|>")
    found = [x for x in pairs.before(example) if x in ends or x == begin]
    # The question, the call and its result, the second call and the next question.
    assert found[:3] == [ends[1], begin, ends[2]] and found[-1] == begin
    # Messages go through the template with task.chat False, too; text does not.
    config.chat = False
    pairs = warmup.Pairs(Prompter(tokenizer, config), chat=False)
    talk = [{"role": "user", "content": "2"}]
    assert pairs.target(example)[-1] == ends[0]
    assert pairs.target(example | {"prompt": talk})[-1] == ends[1]


def test_turns_that_the_tokenizer_refuses_are_of_their_example():
    prompter = Prompter(CharTokenizer(ARITHMETIC_CHARS), ml_collections.ConfigDict(
        dict(template="{prompt}", chat=False, system="", max_prompt_tokens=8)
    ))
    example = {"id": "1", "prompt": "12=", "answer": "3", "turns": [["12=", "?"]]}
    why = warmup._why_bad(warmup.Pairs(prompter, chat=False), example, 5)
    assert why.startswith('its "turns": ') and "'?' is not in the tokenizer's alphabet" in why


@pytest.mark.parametrize(("turns", "is_bad"), [
    ([], False), ([["12=", "3 "]], False), ([["12=", [{"role": "user", "content": "3"}]]], False),
    (2, True), ("12=", True), ([["12="]], True), ([[12, "3 "]], True), ([["12=", 3]], True),
])
def test_turns_that_are_no_pairs_of_texts_are_refused(turns, is_bad):
    """A column of that name can be in any data."""
    prompter = Prompter(CharTokenizer(ARITHMETIC_CHARS), None, known={"12=": [3, 4]})
    pairs = warmup.Pairs(prompter, chat=True)
    why = warmup._why_bad(pairs, {"id": "1", "prompt": "12=", "answer": "3", "turns": turns}, 5)
    assert bool(why) == is_bad and ("turns" in why) == is_bad


@pytest.mark.all
def test_a_warm_up_answer_longer_than_the_row_of_targets_is_refused(tmp_path):
    """A target that max_new_tokens cuts off would be taught without its end, in silence."""
    with (
        mock.patch.object(train, "initial_state", side_effect=RuntimeError("the warm-up passed")),
        pytest.raises(ValueError, match="max_new_tokens"),
    ):
        tiny.run(tmp_path, rollout__max_new_tokens=2, task__max_prompt_tokens=8, warmup__steps=1)


def test_a_warm_up_that_overflows_names_the_layer(tmp_path):
    begin = train.initial_params
    with (
        mock.patch.object(train, "initial_params", lambda setup: exploding(begin(setup))),
        pytest.raises(FloatingPointError, match="warm-up step 1: the cross-entropy is nan.* layer 1 "),
    ):
        tiny.run(tmp_path, model__num_layers=2, model__dtype="float16")
