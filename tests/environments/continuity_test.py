"""Ids of several turns. Each mistake that others made with them is planted once, and is found.

The known mistakes with episodes of several turns, the test of each, and a mutant of it (`tests/mutants`):

| mistake | test | mutant |
|---|---|---|
| 1 the newline after an answer is lost at every seam | `test_the_ids_of_every_turn_are_those_of_the_render`, `test_mistake_1_a_newline_that_is_lost_after_the_end` | `the newline after an answer is lost` |
| 2 the history is tokenised again and splits otherwise | `test_mistake_2_pieces_that_would_merge_stay_as_sampled`, `rollouts/episodes_test.py`: `test_episodes_are_what_a_plain_loop_makes` | `answers are tokenised again` |
| 3 the template drops the thinking of earlier turns | `test_mistake_3_thinking_that_the_template_drops_stays`, `test_mistake_3_a_talk_without_earlier_thinking_is_a_row_of_its_own` | `an answer without its thinking continues the row` |
| 4 a prefix of the last turn alone, the first match in place of the longest, a match of texts | `test_mistake_4_matches_are_of_all_ids_and_the_longest` | `the first match wins` |
| 5 an end is appended that was not sampled | `test_mistake_5_no_end_is_made_up_as_sampled`, `test_mistake_5_an_answer_of_a_stop_string_has_no_sampled_end_either`, `engine/extend_test.py`: `test_a_turn_that_was_cut_by_length_ends_without_a_stop_token` | `an answer that was cut has a sampled end`, `given tokens count as sampled` |
| 6 one path of the loss counts the tokens of tools | `learner/turns_test.py`: `test_mistake_6_tokens_of_tools_change_no_loss` | `tokens of tools are in the loss` |
| 7 the mask is longer than the ids | `test_mistake_7_lists_have_one_length_after_an_answer_was_shortened`, `engine/extend_test.py`: `test_a_turn_of_every_length_continues_the_sequence` | `an answer that was shortened keeps a token more`, `a list of a record is not extended` |
| 8 log-probs are cut, or padded with zeros | `engine/extend_test.py`: `test_a_turn_of_every_length_continues_the_sequence` | `log-probs of earlier turns are zeros` |
| 9 a retried turn is appended to the lists of the first try; no stop at a tool call where log-probs are asked for | `engine/extend_test.py`: `test_a_retried_turn_is_the_turn_of_an_undisturbed_run`, `endpoint/app_test.py`: `test_a_stop_string_ends_an_answer_with_log_probs_too` | `the record that is extended is changed`, `no stop string ends an answer with log-probs` |
| 10 the text of a tool is in the budget of the answer | `rollouts/episodes_test.py`: `test_observations_leave_the_budget_of_a_turn_alone` | `the text of a tool is in the budget of the answer` |
| 11 the end by length is lost after the first turn | `rollouts/episodes_test.py`: `test_every_turn_says_how_it_ended` | `a later turn that was cut counts as whole` |
| 12 an episode without a reward has reward 0 | `rollouts/episodes_test.py`: `test_the_reward_is_the_sum_of_what_is_known` | `an episode without a reward has the reward 0`, `a failed turn has the reward of the turn before` |
| 13 a failed episode is in the mean of its group | `rollouts/episodes_test.py`: `test_a_group_keeps_its_advantages_when_a_member_fails` | `a failed member is a reward of 0 of its group` |
| 14 failed episodes shrink a group, a reshape mixes groups | `rollouts/groups_test.py`: `test_a_failed_sample_stays_in_its_group`, `rollouts/episodes_test.py`: `test_a_group_keeps_its_advantages_when_a_member_fails` | `failed samples are dropped before their group is known`, `a group is four rows` |
| 15 ids of a tool call are lost in a stream | `endpoint/tool_calls_test.py`: `test_calls_reach_the_client_and_come_back` | `ids of a tool call are lost in a stream` |

The templates are those of nine families (tests/data/chat_templates.py). The tokenizer is a small
byte-level BPE that knows their marks.
"""

import copy
import dataclasses
import functools
import itertools
import pathlib
import re

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxrl_tis.data.tokenizer import CharTokenizer, HFTokenizer
from jaxrl_tis.environments.continuity import (
    Append, Fork, Realign, Suffixes, end_of_answer, joined, joined_to_one,
)
from tests.data import chat_templates
from tests.mutants.__main__ import MUTANTS as PLANTED

pytestmark = pytest.mark.usefixtures("in_threads")

TESTS = pathlib.Path(__file__).parents[1]
MARKS = [
    "<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|User|>",
    "<|Assistant|>", "<|end|>", "[INST]", "[/INST]", "<think>", "</think>",
    "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>",
]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
ENDS = {  # of an answer, as each family writes it
    "qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "smollm2": "<|im_end|>",
    "gemma3": "<end_of_turn>", "mistral": "</s>", "deepseek": "<|end|>", "olmo": "</s>",
    "glm4.5": "<|user|>",
}


@functools.cache
def backend():
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    vocab = {piece: i for i, piece in enumerate([*MARKS, *pieces])}
    result = tokenizers.Tokenizer(models.BPE(vocab, MERGES))
    result.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    return result


def mark(text):
    return MARKS.index(text)


def piece(text):
    return backend().token_to_id(text)


@functools.cache
def tokenizer(template, end="</s>", **kwargs):
    special = {"bos_token": "<s>", "eos_token": end, "pad_token": "<pad>"}
    return HFTokenizer(
        backend(), backend().get_vocab_size(), 0, 1, (mark(end),), special, template, "the test",
        kwargs, "2026-02-03",
    )


@functools.cache
def family(name, **kwargs):
    return tokenizer(chat_templates.TEMPLATES[name], ENDS[name], **kwargs)


@functools.cache
def suffixes(name, **kwargs):
    return Suffixes(family(name, **kwargs), chat=True)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def encode(text):
    return backend().encode(text, add_special_tokens=False).ids


# -- what a suffix is --


@pytest.mark.all
def test_a_suffix_of_chatml_by_hand():
    found = suffixes("smollm2").after("4", mark("<|im_end|>"), [mark("<|im_end|>")])
    newline, start = piece("Ċ"), mark("<|im_start|>")
    user_ids = [piece(c) for c in "user"]
    assistant_ids = [piece(c) for c in "assistant"]
    expected = [newline, start, *user_ids, newline, piece("4"), mark("<|im_end|>"), newline, start,
                *assistant_ids, newline]
    assert found == expected
    # After an answer without a sampled end, the template's end is a part of the suffix.
    cut = suffixes("smollm2").after("4", None, [mark("<|im_end|>")])
    assert cut == [mark("<|im_end|>"), *expected]


@pytest.mark.parametrize("stops, expected", [
    (["<|im_end|>"], "\n"),  # the sampled end stands for the template's
    (["<pad>", "<|im_end|>"], "\n"),
    (["<pad>"], "<|im_end|>\n"),  # the template's end ends no answer of the sampler
])
def test_a_sampled_end_stands_for_the_templates_end(stops, expected):
    found = suffixes("smollm2").after("4", mark(stops[0]), [mark(s) for s in stops])
    text = f"{expected}<|im_start|>user\n4<|im_end|>\n<|im_start|>assistant\n"
    assert found == encode(text)


@pytest.mark.all
def test_an_end_within_the_observation_is_not_the_answers():
    """The template of this test writes nothing after an answer."""
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    found = Suffixes(tokenizer(template), chat=True).after("a</s>b", mark("</s>"), [mark("</s>")])
    assert found == encode("][a</s>b]")


@pytest.mark.all
def test_an_end_of_the_last_answer_alone_is_no_part_of_a_suffix():
    template = "{% for m in messages %}[{{ m.content }}{{ eos_token if loop.last }}{% endfor %}"
    found = Suffixes(tokenizer(template), chat=True).after("4", mark("</s>"), [mark("</s>")])
    assert found == encode("[4</s>")  # the last message of the longer render has it


@pytest.mark.all
def test_a_system_message_that_is_repeated_at_the_end_is_named():
    template = (
        "{% for m in messages %}[{{ m.content }}]{% endfor %}"
        "{{ messages[0].content if messages[0].role == 'system' and messages|length > 2 }}"
        "{% if add_generation_prompt %}[{% endif %}"
    )
    assert Suffixes(tokenizer(template), chat=True).rewrites == ("the system message",)


@pytest.mark.all
@pytest.mark.parametrize("name, kwargs, rewrites, tool_role", [
    ("qwen2.5", {}, [], "tool"),
    ("qwen3", {}, ["thinking"], "tool"),
    ("qwen3", {"enable_thinking": False}, ["beginning", "thinking"], "tool"),
    ("llama3", {}, ["white space"], "tool"),
    ("smollm2", {}, [], "tool"),
    ("gemma3", {}, ["white space"], "user"),  # refuses other roles
    ("mistral", {}, ["beginning", "white space", "system"], "tool"),
    ("deepseek", {}, ["beginning", "thinking"], "user"),  # leaves messages of tools out
    ("olmo", {}, ["white space"], "tool"),
    ("glm4.5", {}, ["beginning", "white space", "thinking"], "tool"),
    ("glm4.5", {"enable_thinking": False}, ["beginning", "white space", "thinking"], "tool"),
])
def test_what_a_template_rewrites_is_named(name, kwargs, rewrites, tool_role):
    names = {
        "beginning": "the beginning of an earlier answer",
        "white space": "white space around an earlier answer",
        "thinking": "the thinking of an earlier answer", "system": "the system message",
    }
    made = suffixes(name, **kwargs)
    assert made.rewrites == tuple(names[x] for x in rewrites)
    assert made.tool_role == tool_role


TOOL = [{"role": "tool", "content": "4"}]


@pytest.mark.parametrize("name, answer, observation, expected", [
    ("smollm2", " hello\n", "4", "append"),
    ("qwen3", "hello", "4", "append"),
    # Thinking is dropped before the next message of the user, and stays before one of a tool.
    ("qwen3", "<think>\nwell\n</think>\n\nhello", "4", "fork"),
    ("qwen3", "<think>\nwell\n</think>\n\nhello", TOOL, "append"),
    ("llama3", "hello", "4", "append"),
    ("llama3", "hello \n", "4", "realign"),  # stripped
    ("llama3", " hello", "4", "fork"),
    ("gemma3", "hello ", "4", "realign"),
    ("deepseek", "hello", "4", "fork"),  # begins an earlier answer otherwise
    ("mistral", "hello", "4", "fork"),
])
def test_what_a_render_would_do_to_the_row(name, answer, observation, expected):
    made = suffixes(name)
    assert made.join([answer], [observation]) == expected
    assert Suffixes(CharTokenizer("12="), chat=False).join([answer], ["4"]) == "append"


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "llama3", "gemma3", "olmo"])
@pytest.mark.parametrize("answer", ["hello", "hello ", " hello", "<think>\nw\n</think>\n\nhello"])
def test_joins_are_those_of_sessions(name, answer):
    """Against `joined`, for renders of the whole conversation letter by letter."""
    talk, made = [user("2+2"), {"role": "assistant", "content": answer}, user("4")], suffixes(name)
    asked = family(name).chat(talk[:1])
    short = family(name).chat([talk[0], {**talk[1], "content": "A"}, talk[2]])
    row = asked + answer + short.partition("A")[2]
    again, codes = family(name).chat(talk), lambda text: [ord(c) for c in text]
    found = joined(codes(asked + answer), codes(again), len(asked))
    expected = {Append: "append", Realign: "realign", Fork: "fork"}[type(found)]
    assert made.join([answer], ["4"]) == expected
    assert (expected == "append") == (again == row)


THINKS = "<think>\nwell\n</think>\n\nhello"


@pytest.mark.parametrize("name, answers, observations, expected", [
    # Before a message of the user all thinking is dropped, that of turns before the last one too.
    ("qwen3", [THINKS, "one"], [TOOL, "5"], "fork"),
    ("qwen3", [THINKS, THINKS], [TOOL, TOOL], "append"),
    ("qwen3", ["one", "one"], [TOOL, "5"], "append"),
    ("qwen3", [THINKS, "one", "one"], [TOOL, "5", "6"], "append"),  # after the fork
    ("qwen3", [THINKS, "one"], ["4", "5"], "append"),
    ("smollm2", [THINKS, "one"], [TOOL, "5"], "append"),
    ("llama3", ["hello", "hello \n"], ["4", "5"], "realign"),
    ("llama3", ["hello \n", "hello"], ["4", "5"], "append"),
])
def test_a_render_is_of_all_turns(name, answers, observations, expected):
    """Against `joined`, for renders letter by letter."""
    made, tokens, talk = suffixes(name), family(name), [user("2+2")]
    codes = lambda text: [ord(c) for c in text]
    for answer, observation in zip(answers, observations, strict=True):
        asked = tokens.chat(talk)
        talk.append(assistant(answer))
        talk += [user(observation)] if isinstance(observation, str) else observation
    found = joined(codes(asked + answers[-1]), codes(tokens.chat(talk)), len(asked))
    assert {Append: "append", Realign: "realign", Fork: "fork"}[type(found)] == expected
    assert made.join(answers, observations) == expected


def test_messages_of_tools_have_the_role_that_the_template_knows():
    tool = [{"role": "tool", "content": "4"}]
    # Gemma has no such role, Llama calls it "ipython" and quotes the text.
    end = mark("<end_of_turn>")
    of_gemma = lambda said: suffixes("gemma3").after(said, end, [end])
    assert of_gemma(tool) == of_gemma("4")
    found = suffixes("llama3").after(tool, mark("<|eot_id|>"), [mark("<|eot_id|>")])
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert found == encode(header.format("ipython") + '"4"<|eot_id|>' + header.format("assistant"))


def test_without_chat_an_observation_is_text():
    made = Suffixes(CharTokenizer("12="), chat=False)
    assert made.after("21=", 2, [2]) == [4, 3, 5] and made.after("", None, [2]) == []
    with pytest.raises(ValueError, match="task.chat is False; return text"):
        made.after([user("1")], 2, [2])
    with pytest.raises(ValueError, match="'7' of '7' is not in the tokenizer's alphabet"):
        made.after("7", 2, [2])


def test_a_repeated_observation_is_rendered_once(monkeypatch):
    made, end = Suffixes(family("smollm2"), chat=True), mark("<|im_end|>")
    calls = []
    chats = HFTokenizer.chats
    monkeypatch.setattr(HFTokenizer, "chats", lambda self, c: calls.append(1) or chats(self, c))
    first = made.after("higher", end, [end])
    assert len(calls) == 1
    first.append(0)  # belongs to the caller
    assert made.after("higher", end, [end]) == first[:-1] and len(calls) == 1
    made.after("lower", end, [end])
    assert len(calls) == 2


@pytest.mark.parametrize("chat", [True, False])
def test_special_tokens_of_an_observation_are_plain_text_on_request(chat, capsys):
    """The template's own ones stay."""
    template = chat_templates.TEMPLATES["smollm2"]
    kept = tokenizer(template, "<|im_end|>")
    made = [
        Suffixes(dataclasses.replace(kept, source=f"{chat}", escapes=x), chat) for x in (False, True)
    ]
    text, end = "4<|im_end|>5", mark("<|im_end|>")
    became, escaped = (x.after(text, True, [end]) for x in made)
    assert "'<|im_end|>', which becomes a control token" in capsys.readouterr().err
    assert became.count(end) - escaped.count(end) == 1 and escaped.count(end) == chat
    assert backend().decode(escaped, skip_special_tokens=False) == (
        backend().decode(became, skip_special_tokens=False)
    )
    if chat:
        assert made[1].after([user(text)], True, [end]) == escaped
        assert made[1].join(["4"], [text]) == "append"


# GLM's form: nothing after an answer, and a token of the role before a message.
OF_ROLES = (
    "{% set marks = {'user': '<|User|>', 'assistant': '<|Assistant|>', 'tool': '<|end|>'} %}"
    "{% for m in messages %}{{ marks[m.role] }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
# A tool's message continues the question, and only the last answer has an end.
LAST_ENDS = (
    "{% for m in messages %}[{{ m.content }}{{ eos_token if loop.last and m.role == 'assistant' }}"
    "{% endfor %}"
)


@pytest.mark.parametrize("template, role, eos, end", [
    *((chat_templates.TEMPLATES[name], "user", ["<s>", ENDS[name]], ENDS[name]) for name in ENDS),
    (OF_ROLES, "user", ["<s>", "<|User|>", "<|end|>"], "<|User|>"),
    (OF_ROLES, "tool", ["<s>", "<|User|>", "<|end|>"], "<|end|>"),
    (OF_ROLES, "tool", ["<s>", "</s>"], "<s>"),  # it writes neither
    (OF_ROLES, "</s>", ["<s>", "</s>"], "<s>"),  # it refuses such a message
    (LAST_ENDS, "user", ["<s>", "</s>"], "</s>"),
    (None, "user", ["<s>", "</s>"], "<s>"),
])
def test_the_end_of_an_answer_is_the_one_that_the_template_writes(template, role, eos, end):
    ends = tuple(map(mark, eos))
    made = dataclasses.replace(tokenizer(template, eos[-1]), eos_ids=ends)
    assert end_of_answer(made, role) == mark(end)


# -- what cannot be extended --


@pytest.mark.parametrize("template, message", [
    ("{{ raise_exception('one question only') if messages|length > 1 }}", "one question only"),
    ("{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}",
     "leaves out or repeats earlier answers"),
    ("{% for m in messages %}[{{ loop.index }}] {{ m.content }}{% endfor %}",
     r"after the second answer it writes '\[5\] observation-3b92', after the first one '\[3\]"),
])
def test_a_template_that_cannot_be_extended_is_refused(template, message):
    with pytest.raises(ValueError, match=message) as error:
        Suffixes(tokenizer(template), chat=True)
    assert "cannot be extended by turns" in str(error.value)


def test_no_template_is_refused():
    with pytest.raises(ValueError, match="has no chat template; set task.chat to False"):
        Suffixes(tokenizer(None), chat=True)


@pytest.mark.parametrize("observation, message", [
    ([], r"is '\[\]'; return a text, or a list of messages with role and content"),
    ([{"content": "4"}], "with role and content"),
    ([user("a"), user("b")], "refuses an observation: .*Roles must alternate"),
    ([{"role": "note", "content": "a"}], "does not write messages of the role 'note'"),
])
def test_a_bad_observation_is_refused(observation, message):
    with pytest.raises(ValueError, match=message):
        suffixes("gemma3").after(observation, None, [mark("<end_of_turn>")])


# -- answers that end with the mark of the next message --


ROLES = [mark(x) for x in ("<|endoftext|>", "<|user|>", "<|observation|>")]  # GLM's ends
ASKED, TOLD = "<|user|>\n4<|assistant|>", (
    "<|observation|>\n<tool_response>\n4\n</tool_response><|assistant|>"
)


@pytest.mark.parametrize("observation, end, text, is_other", [
    ("4", "<|user|>", ASKED.removeprefix("<|user|>"), False),
    (TOOL, "<|observation|>", TOLD.removeprefix("<|observation|>"), False),
    # The sampled mark is another message's: the suffix has the right one.
    ("4", "<|observation|>", ASKED, True), (TOOL, "<|user|>", TOLD, True),
    ([*TOOL, user("4")], "<|user|>", TOLD.removesuffix("<|assistant|>") + ASKED, True),
    # No mark of a message: nothing stands in its place, and nothing is missing.
    ("4", "<|endoftext|>", ASKED, False), ("4", None, ASKED, False), (TOOL, None, TOLD, False),
])
def test_a_sampled_mark_begins_the_next_message(observation, end, text, is_other):
    made, end = suffixes("glm4.5"), None if end is None else mark(end)
    assert made.after(observation, end, ROLES) == encode(text)
    assert made.replaces(observation, end, ROLES) == is_other


def test_a_template_that_writes_an_end_replaces_nothing():
    for name in ENDS.keys() - {"glm4.5"}:
        ends = [mark(ENDS[name]), mark("<|endoftext|>")]
        assert not any(suffixes(name).replaces(x, e, ends) for x in ("4", TOOL) for e in (*ends, None))
    assert not Suffixes(CharTokenizer("12="), chat=False).replaces("1", 3, [3])


def test_marks_stand_once_between_turns_of_users_and_tools():
    """The policy ends its second answer with the wrong mark, and the row is that of the render."""
    thoughts = ["\n<think></think>\none", "\n<think></think>\nhello", "\n<think></think>\nthree"]
    said, ends, talk = [TOOL, "4", TOOL], ["<|observation|>"] * 3, [user("2+3?")]
    tokens, made = family("glm4.5"), suffixes("glm4.5")
    row = Row(tokens.encode(tokens.chat(talk)))
    for answer, observation, end in zip(thoughts, said, map(mark, ends), strict=True):
        row.sample([*encode(answer), end])
        if made.replaces(observation, end, ROLES):
            row.join(Realign(len(row.ids) - 1, ()))
        row.give(made.after(observation, end, ROLES))
        talk += [assistant(answer), *([user("4")] if observation == "4" else TOOL)]
        assert row.ids == tokens.encode(tokens.chat(talk))
        assert len(row.ids) == len(row.mask) == len(row.logp)
    assert sum(row.mask) == sum(len(encode(x)) for x in thoughts) + 2  # the marks but for one
    assert made.join(thoughts, said) == "append"


# -- episodes, and the mistakes --


class Row:
    """One row of ids as an engine keeps it: sampled ids and ids of others, in order."""

    def __init__(self, prompt):
        self.ids, self.mask, self.logp = list(prompt), [False] * len(prompt), [0.0] * len(prompt)
        self.turn_start = 0

    def sample(self, ids):
        self.turn_start = len(self.ids)
        self._add(ids, True, -0.5)

    def give(self, ids):
        self._add(ids, False, 0.0)

    def join(self, how):
        """Continues with the next prompt, as `joined` says."""
        if isinstance(how, Realign):
            self.ids, self.mask, self.logp = (
                x[: how.start] for x in (self.ids, self.mask, self.logp)
            )
        self.give(how.suffix)

    def _add(self, ids, is_sampled, logp):
        self.ids = self.ids + list(ids)
        self.mask = self.mask + [is_sampled] * len(ids)
        self.logp = self.logp + [logp] * len(ids)


def play(name, answers, observations, next_ids=None, ends=True):
    """Returns the row before each answer and at the end, and all ids that the sampler returned.

    `next_ids(row, k, ends)` gives the ids after an answer.
    """
    tokens, end = family(name), mark(ENDS[name])
    row = Row(tokens.encode(tokens.chat([user("2+3?")])))
    next_ids = next_ids or (
        lambda row, k, ends: row.give(suffixes(name).after(observations[k], end if ends else None, [end]))
    )
    rows, returned = [copy.copy(row)], []
    for k, answer in enumerate(answers):
        sampled = (encode(answer) if isinstance(answer, str) else answer) + [end] * ends
        row.sample(sampled)
        returned += sampled
        next_ids(row, k, ends)
        rows.append(copy.copy(row))
    return rows, returned


def check_row(rows, returned):
    """Mistakes 2, 3, 5 and 7: a turn begins with all ids so far, lists are of one length, and the
    mask is True for what the sampler returned alone."""
    for before, row in itertools.pairwise(rows):
        assert row.ids[: len(before.ids)] == before.ids
        assert len(row.ids) == len(row.mask) == len(row.logp)
    chosen = [(i, x) for i, is_sampled, x in zip(row.ids, row.mask, row.logp, strict=True) if is_sampled]
    assert [i for i, _ in chosen] == returned
    assert all(x == -0.5 for _, x in chosen)


ANSWERS, OBSERVATIONS = ["one", "hello", "three"], ["1", "no, hello", "what\n3"]


def check_equals_the_render(name, next_ids=None):
    """Mistake 1: where the template is stable, ids of a turn are those of the render."""
    talk = [user("2+3?")]
    rows, _ = play(name, ANSWERS, OBSERVATIONS, next_ids)
    for k, row in enumerate(rows):
        assert row.ids == family(name).encode(family(name).chat(talk))
        talk += [assistant(ANSWERS[k % 3]), user(OBSERVATIONS[k % 3])]


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3", "smollm2", "gemma3", "olmo"])
def test_the_ids_of_every_turn_are_those_of_the_render(name):
    check_equals_the_render(name)


@pytest.mark.parametrize("name", ["qwen2.5", "gemma3"])
def test_mistake_1_a_newline_that_is_lost_after_the_end(name):
    def without_newline(row, k, ends):
        first, *others = suffixes(name).after(OBSERVATIONS[k], mark(ENDS[name]), [mark(ENDS[name])])
        assert first == piece("Ċ")
        row.give(others)

    with pytest.raises(AssertionError):
        check_equals_the_render(name, without_newline)


def rendered_again(name, answers):
    """The mistake: the whole talk is rendered and encoded again, and lists are padded or cut."""

    def next_ids(row, k, ends):
        talk = [user("2+3?")]
        texts = [a if isinstance(a, str) else backend().decode(a) for a in answers[: k + 1]]
        for text, observation in zip(texts, OBSERVATIONS, strict=False):
            talk += [assistant(text), user(observation)]
        count = len(row.ids)
        row.ids = family(name).encode(family(name).chat(talk))
        row.give([])
        row.mask = (row.mask + [False] * (len(row.ids) - count))[: len(row.ids)]
        row.logp = (row.logp + [0.0] * (len(row.ids) - count))[: len(row.ids)]

    return next_ids


SPLIT = [[piece("h"), piece("e"), piece("ll"), piece("o")], "hello", [piece("l"), piece("l")]]


def test_mistake_2_pieces_that_would_merge_stay_as_sampled():
    assert encode(backend().decode(SPLIT[0])) == [piece("hello")]
    check_row(*play("smollm2", SPLIT, OBSERVATIONS))
    with pytest.raises(AssertionError):
        check_row(*play("smollm2", SPLIT, OBSERVATIONS, rendered_again("smollm2", SPLIT)))


THOUGHTS = [f"<think>\nwell {k}\n</think>\n\n{a}" for k, a in enumerate(ANSWERS)]


@pytest.mark.parametrize("name", ["qwen3", "deepseek"])
def test_mistake_3_thinking_that_the_template_drops_stays(name):
    assert "the thinking of an earlier answer" in suffixes(name).rewrites
    rows, returned = play(name, THOUGHTS, OBSERVATIONS)
    check_row(rows, returned)
    assert rows[-1].ids.count(mark("<think>")) == 3
    with pytest.raises(AssertionError):
        check_row(*play(name, THOUGHTS, OBSERVATIONS, rendered_again(name, THOUGHTS)))


def test_mistake_5_no_end_is_made_up_as_sampled():
    rows, returned = play("llama3", ANSWERS, OBSERVATIONS, ends=False)
    check_row(rows, returned)
    end = mark("<|eot_id|>")
    assert end not in returned
    # The end of every answer is there as in the render, as context.
    assert rows[-1].ids == play("llama3", ANSWERS, OBSERVATIONS)[0][-1].ids

    def made_up(row, k, ends):
        row._add([end], True, 0.0)
        row.give(suffixes("llama3").after(OBSERVATIONS[k], end, [end]))

    with pytest.raises(AssertionError):
        check_row(*play("llama3", ANSWERS, OBSERVATIONS, made_up, ends=False))


def test_mistake_5_an_answer_of_a_stop_string_has_no_sampled_end_either():
    """Neither "has no end id" nor the stop reason alone says how an answer ended."""
    found = suffixes("qwen2.5").after("4", None, [mark("<|im_end|>")])
    assert found[0] == mark("<|im_end|>") and found.count(mark("<|im_end|>")) == 2


# -- turns that another program joins --


@pytest.mark.parametrize("record, start, prompt, expected", [
    ([1, 2, 3, 4], 2, [1, 2, 3, 4, 5, 6], Append((5, 6))),
    ([1, 2, 3, 4], 2, [1, 2, 3, 4], Append(())),
    # The last answer [3, 4] ends otherwise in the prompt.
    ([1, 2, 3, 4], 2, [1, 2, 3, 9, 5], Realign(3, (9, 5))),
    ([1, 2, 3, 4], 2, [1, 2, 3, 5, 4, 6], Realign(3, (5, 4, 6))),
    # None of the answer is kept, or the prompt differs before it.
    ([1, 2, 3, 4], 2, [1, 2, 9, 4], Fork()),
    ([1, 2, 3, 4], 2, [1, 9, 3, 4, 5], Fork()),
    ([1, 2, 3, 4], 2, [7], Fork()),
    # The same prompt again, or the beginning of the answer: nothing of the record is given up.
    ([1, 2, 3, 4], 2, [1, 2], Fork()),
    ([1, 2, 3, 4], 2, [1, 2, 3], Fork()),
    ([1, 2, 3, 4], 2, [], Fork()),
    # 4 is the mark that ended the answer: the next message's own, another one, and an empty answer.
    ([1, 2, 3, 4], 2, [1, 2, 3, 4, 7, 8], Append((7, 8))),
    ([1, 2, 3, 4], 2, [1, 2, 3, 5, 7, 8], Realign(3, (5, 7, 8))),
    ([1, 2, 4], 2, [1, 2, 5, 7, 8], Fork()),
])
def test_a_prompt_continues_a_record_by_its_ids(record, start, prompt, expected):
    assert joined(record, prompt, start) == expected
    assert joined(np.array(record, np.int32), np.array(prompt), start) == expected


def test_the_longest_match_wins():
    # Three rows share [1, 2]; the second is the talk so far, the last one ends otherwise.
    rows = [([1, 2, 3], 2), ([1, 2, 3, 4, 5, 6], 5), ([1, 2, 3, 4, 8, 9], 4)]
    assert joined_to_one(rows, [1, 2, 3, 4, 5, 6, 7]) == (1, Append((7,)))
    assert joined_to_one(rows, [1, 2, 3, 7]) == (0, Append((7,)))
    assert joined_to_one(rows, [1, 2, 3, 4, 8, 7]) == (2, Realign(5, (7,)))
    assert joined_to_one(rows, [1, 7]) == (-1, Fork())
    assert joined_to_one([], [1]) == (-1, Fork())
    assert joined_to_one([rows[0], rows[0]], [1, 2, 3, 7]) == (0, Append((7,)))


def check_four_turns(join):
    """Mistake 4: two branches share a beginning, and four turns of one of them stay one row.

    `join(rows, prompt)` returns the row that a prompt continues, and how.
    """
    trunk = encode("2+3?")
    # The second and the third row have one text in other ids; the first one begins as the third.
    rows = [Row(trunk), Row(trunk), Row(trunk)]
    for row, ids in zip(rows, (SPLIT[0][:2], [piece("hello")], SPLIT[0]), strict=True):
        row.sample(ids)
    for k in range(4):
        prompt = rows[2].ids + encode(f"no {k}")
        found, how = join([(row.ids, row.turn_start) for row in rows], prompt)
        assert (found, how) == (2, Append(tuple(encode(f"no {k}"))))
        rows[2].join(how)
        rows[2].sample(SPLIT[0])
    assert sum(rows[2].mask) == 5 * 4


def test_mistake_4_matches_are_of_all_ids_and_the_longest():
    check_four_turns(joined_to_one)
    first_ids = []

    def of_the_first_prompt(rows, prompt):  # not of all ids so far
        first_ids.append(rows[2][0])
        return joined_to_one([*rows[:2], (first_ids[0], rows[2][1])], prompt)

    def first_match(rows, prompt):
        found = ((i, joined(ids, prompt, start)) for i, (ids, start) in enumerate(rows))
        return next(pair for pair in found if pair[1] != Fork())

    def by_text(rows, prompt):
        again = [(encode(backend().decode(ids)), start) for ids, start in rows]
        return joined_to_one(again, encode(backend().decode(prompt)))

    for planted in (of_the_first_prompt, first_match, by_text):
        with pytest.raises(AssertionError):
            check_four_turns(planted)


def test_mistake_3_a_talk_without_earlier_thinking_is_a_row_of_its_own():
    tokens = family("qwen3")
    row = Row(tokens.encode(tokens.chat([user("2+3?")])))
    row.sample(encode(THOUGHTS[0]) + [mark("<|im_end|>")])
    talk = [user("2+3?"), assistant(THOUGHTS[0]), user("more")]
    assert joined(row.ids, tokens.encode(tokens.chat(talk)), row.turn_start) == Fork()


def check_realigned(join):
    """Mistake 7: a prompt that shortens the last answer shortens all lists."""
    row = Row(encode("2+3?"))
    row.sample(encode("four") + encode("  \n"))
    row.sample(encode("five") + encode("  \n"))
    kept = len(row.ids) - len(encode("  \n"))
    prompt = row.ids[:kept] + encode("!")
    join(row, joined(row.ids, prompt, row.turn_start))
    assert row.ids == prompt
    assert len(row.ids) == len(row.mask) == len(row.logp)
    assert row.mask[-2:] == [True, False] and row.logp[-2:] == [-0.5, 0.0]


def test_mistake_7_lists_have_one_length_after_an_answer_was_shortened():
    check_realigned(Row.join)

    def ids_alone(row, how):
        row.ids = row.ids[: how.start]
        row.give(how.suffix)

    with pytest.raises(AssertionError):
        check_realigned(ids_alone)


# The table of mistakes


def rows_of_mistakes():
    """(number, mistake, [(file, test)], names of mutants) of each row of the table above."""
    for line in re.findall(r"^\| (\d.*) \|$", __doc__, re.MULTILINE):
        mistake, tests, mutants = line.split(" | ")
        named = re.findall(r"(?:`([\w/]+\.py)`: )?`(test_\w+)`", tests)
        number, _, words = mistake.partition(" ")
        yield int(number), words, named, re.findall(r"`(.+?)`", mutants)


def test_the_table_names_tests_and_mutants_that_exist():
    rows, planted = list(rows_of_mistakes()), {mutant.name: mutant for mutant in PLANTED}
    assert [number for number, *_ in rows] == list(range(1, 16))
    own = pathlib.Path(__file__).relative_to(TESTS)
    for number, words, tests, mutants in rows:
        assert words and tests and mutants, number
        for file, name in tests:
            source = (TESTS / (file or own)).read_text()
            assert f"\ndef {name}(" in source, f"{number}: {file or own} has no {name}"
        for name in mutants:
            assert name in planted, f"{number}: no mutant {name!r}"
            assert planted[name].problem(TESTS.parent) == "", name
            files = {f"tests/{file or own}" for file, _ in tests}
            assert files & {*planted[name].files, planted[name].first_try.partition("::")[0]}, name


def test_every_test_of_a_mistake_is_in_the_table():
    listed = {name for _, _, tests, _ in rows_of_mistakes() for _, name in tests}
    own = {name for name in globals() if name.startswith("test_mistake_")}
    assert own and own <= listed
