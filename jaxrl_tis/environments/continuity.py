"""Keeps sampled token ids as they are across the turns of an episode.

The ids of the next turn are the ids so far and a suffix. No sampled token is ever decoded and
encoded again, because the text of two tokens may encode to another token. `Suffixes` makes the
suffix for an observation. `joined` finds the suffix in a prompt that another program made.
"""

import functools
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_tis.data.tokenizer import Tokenizer, escaped

QUESTION = {"role": "user", "content": "question-5d1c"}
FIRST, SECOND = "answer-8e07", "answer-c3b4"
OBSERVATION = {"role": "user", "content": "observation-3b92"}
SYSTEM = {"role": "system", "content": "system-71f6"}
ROLES = ("user", "tool", "system")
SPACED = f" \n{FIRST}\n "
THOUGHT = f"<think>\nthought-60a4\n</think>\n\n{FIRST}"
MOVED_SYSTEM = "the system message"
CACHED = 4096  # observations


def _answer(content: str) -> dict:
    return {"role": "assistant", "content": content}
Ids = Sequence[int] | np.ndarray


class Suffixes:
    """The ids between the last sampled token of a turn and the first token of the next answer.

    With a chat template, the suffix is the difference of two renders: of a conversation that ends
    with an answer, and of the same conversation with the observation after it. It has the
    template's end of the answer, the observation, and the beginning of the next answer.

    Args:
      tokenizer: its template renders in a confined process.
      chat: whether prompts are conversations. If not, an observation is text after the answer.

    Attributes:
      rewrites: what the template changes in earlier turns when a message follows; () for nothing.
        The ids of an episode stay as sampled. There they differ from a render of the whole
        conversation, and `join` tells so.
      tool_role: role of messages from tools: "tool", or "user" where the template has no such role.

    Raises:
      ValueError: there is no template, or its conversations cannot be extended: it refuses a second
        question, leaves out an answer, or writes something else after the second answer than after
        the first one.
    """

    def __init__(self, tokenizer: Tokenizer, chat: bool):
        self._tokenizer, self._is_chat = tokenizer, chat
        self._ids = functools.lru_cache(CACHED)(self._encoded)
        self._between = functools.lru_cache(CACHED)(self._rendered)
        self._knows = functools.cache(self._renders_role)
        self.rewrites: tuple[str, ...] = ()
        self.tool_role = "tool"
        if chat:
            self._check_extends()
            self.rewrites = self._find_rewrites()
            self.tool_role = "tool" if self._knows("tool") else "user"
            ended = tokenizer.chat([QUESTION, _answer(FIRST)], add_generation_prompt=False)
            self._end = tokenizer.encode(_rest(ended, FIRST))
            known = [{**OBSERVATION, "role": role} for role in ROLES if self._knows(role)]
            texts = [self._between(json.dumps([m])).partition(m["content"])[0] for m in known]
            # The tokens that the template writes first after an answer.
            self._begins = {ids[0] for text in texts if (ids := tokenizer.encode(text))}

    def after(
        self, observation: str | Sequence[dict], end: int | None, eos_ids: Collection[int]
    ) -> list[int]:
        """Returns the suffix for an observation.

        Templates such as GLM's write no end of an answer. There the policy ends it with the token
        that begins the next message, and the suffix starts after this token. If `replaces` is
        true, the suffix has another one in its place.

        Args:
          observation: a text (with a template, a message of the user), or messages.
          end: the last sampled token if it is one of `eos_ids`. It then stands for the template's
            end of the answer. None otherwise, as after a stop string or at the length limit: the
            end of the answer is a part of the suffix.
          eos_ids: tokens that end an answer when they are sampled.

        Raises:
          ValueError: the template or the tokenizer refuses the observation.
        """
        if not self._is_chat:
            if not isinstance(observation, str):
                raise ValueError(
                    "the observation is a list of messages, but task.chat is False; return text"
                )
            return self._encode(self._tokenizer.escaped(observation))
        ids = list(self._ids(json.dumps(self._messages(observation))))
        ends = [i for i, token in enumerate(self._end) if token in eos_ids]
        begun = [end] if end in self._begins else []
        sampled = self._end[: ends[0] + 1] if ends else begun
        is_there = end is not None and ids[: len(sampled)] == sampled
        return ids[len(sampled) :] if is_there else ids

    def replaces(
        self, observation: str | Sequence[dict], end: int | None, eos_ids: Collection[int]
    ) -> bool:
        """Whether `end`, see `after`, begins a message of another role than the observation's. The
        suffix then begins with the token that belongs in its place.

        Raises ValueError as `after`.
        """
        if not self._is_chat or end not in self._begins or any(x in eos_ids for x in self._end):
            return False
        return self._ids(json.dumps(self._messages(observation)))[:1] != (end,)

    def join(
        self, answers: Sequence[str], observations: Sequence[str | Sequence[dict]]
    ) -> str:
        """Compares the row with a render of the conversation. The row is the render up to the last
        answer, this answer as sampled, and the suffix. A message of the user stands for the prompt.

        Args:
          answers: the texts of all turns, in order, without special tokens.
          observations: of `after`, the one that follows each answer.

        Returns "append" if a render of everything is the row. "realign" if it keeps the beginning of
        the last answer. "fork" if it keeps nothing of it, or changes what stands before it; always
        with a template that moves the system message.
        """
        if not self._is_chat:
            return "append"
        if MOVED_SYSTEM in self.rewrites:
            return "fork"
        talk, given = [QUESTION], [self._messages(x) for x in observations]
        for answer, messages in zip(answers[:-1], given[:-1], strict=True):
            talk += [_answer(answer), *messages]
        asked, text = self._tokenizer.chats([talk, [*talk, _answer(answers[-1]), *given[-1]]])
        if isinstance(asked, ValueError) or isinstance(text, ValueError):
            return "fork"
        row = f"{asked}{answers[-1]}{self._between(json.dumps(given[-1]))}"
        if text == row:
            return "append"
        return "realign" if len(os.path.commonprefix([text, row])) > len(asked) else "fork"

    def _messages(self, observation: str | Sequence[dict]) -> list[dict]:
        if isinstance(observation, str):
            return escaped(self._tokenizer, [{"role": "user", "content": observation}])
        if not observation or not all(isinstance(m, dict) and "role" in m for m in observation):
            raise ValueError(
                f"the observation is {str(observation)[:80]!r}; return a text, or a list of "
                "messages with role and content"
            )
        roles = [self.tool_role if m["role"] == "tool" else m["role"] for m in observation]
        unknown = [role for role in roles if not self._knows(role)]
        if unknown:
            raise ValueError(
                f"the chat template does not write messages of the role {unknown[0]!r}; use 'user'"
            )
        pairs = zip(observation, roles, strict=True)
        messages = [{**message, "role": role} for message, role in pairs]
        return escaped(self._tokenizer, messages)

    def _encoded(self, messages: str) -> tuple[int, ...]:
        return tuple(self._encode(self._between(messages)))

    def _rendered(self, messages: str) -> str:
        """Returns the text from an answer to the next one, between which messages stand."""
        [text] = self._tokenizer.chats([[QUESTION, _answer(FIRST), *json.loads(messages)]])
        if isinstance(text, ValueError):
            raise ValueError(f"the chat template refuses an observation: {text}")
        return _rest(text, FIRST)

    def _encode(self, text: str) -> list[int]:
        [ids] = self._tokenizer.encodes([text])
        if isinstance(ids, ValueError):
            raise ids
        return ids

    def _renders_role(self, role: str) -> bool:
        message = {**OBSERVATION, "role": role}
        [text] = self._tokenizer.chats([[QUESTION, _answer(FIRST), message]])
        return isinstance(text, str) and OBSERVATION["content"] in text

    def _check_extends(self) -> None:
        shorter = [QUESTION, _answer(FIRST), OBSERVATION]
        texts = self._tokenizer.chats([shorter, [*shorter, _answer(SECOND), OBSERVATION]])
        refused = "the chat template cannot be extended by turns: "
        failed = [text for text in texts if isinstance(text, ValueError)]
        if failed:
            raise ValueError(f"{refused}{failed[0]}")
        one, two = map(str, texts)
        if (one.count(FIRST), two.count(SECOND)) != (1, 1):
            raise ValueError(f"{refused}it leaves out or repeats earlier answers")
        if _rest(one, FIRST) != _rest(two, SECOND):
            raise ValueError(
                f"{refused}after the second answer it writes {_rest(two, SECOND)!r}, after the "
                f"first one {_rest(one, FIRST)!r}"
            )

    def _find_rewrites(self) -> tuple[str, ...]:
        """Compares renders with the text that a policy saw when it sampled."""
        turns = [QUESTION, _answer(FIRST), OBSERVATION]
        renders: list[Any] = self._tokenizer.chats([
            [QUESTION], turns, [QUESTION, _answer(SPACED), OBSERVATION],
            [QUESTION, _answer(THOUGHT), OBSERVATION], [SYSTEM, QUESTION], [SYSTEM, *turns],
        ])
        prompt, plain, spaced, thought, told, system = renders
        begin = plain[: plain.index(FIRST)]
        is_kept = lambda text, start: isinstance(text, str) and text.startswith(start)
        asked = lambda text: text.partition(QUESTION["content"])[0]
        kept = {
            "the beginning of an earlier answer": begin == prompt,
            "white space around an earlier answer": is_kept(spaced, begin + SPACED),
            "the thinking of an earlier answer": is_kept(thought, begin + THOUGHT),
            # A template without system messages refuses both conversations.
            MOVED_SYSTEM: isinstance(told, ValueError) or is_kept(system, asked(told))
            and _rest(system, FIRST) == _rest(plain, FIRST),
        }
        return tuple(name for name, is_so in kept.items() if not is_so)


def _rest(text: str, answer: str) -> str:
    return text.partition(answer)[2]


def end_of_answer(tokenizer: Tokenizer, role: str) -> int:
    """Returns the end token that the chat template writes after an answer, or else before the next
    message, of `role`. The tokenizer's first end token if the template writes none."""
    turn = [QUESTION, _answer(FIRST)]
    for talk in (turn, [*turn, {**OBSERVATION, "role": role}]):
        try:
            text = tokenizer.chat(talk, add_generation_prompt=False)
            ids = tokenizer.encode(_rest(text, FIRST).partition(OBSERVATION["content"])[0])
        except ValueError:  # of a template that refuses the role
            continue
        if ends := [index for index in ids if index in tokenizer.eos_ids]:
            return ends[0]
    return tokenizer.eos_ids[0]


@dataclass(frozen=True)
class Append:
    """The prompt is the ids so far and `suffix`: the same row continues."""

    suffix: tuple[int, ...]


@dataclass(frozen=True)
class Realign:
    """The prompt changes the end of the last answer: the row keeps its ids before `start`.

    `suffix` follows, as tokens that the policy did not choose. The sampled ids from `start` on are
    lost.
    """

    start: int
    suffix: tuple[int, ...]


@dataclass(frozen=True)
class Fork:
    """The prompt begins a row of its own."""


def joined(
    record_ids: Ids, prompt_ids: Ids, turn_start: int
) -> Append | Realign | Fork:
    """Tells how the prompt of the next turn continues the row of a record.

    Args:
      record_ids: all ids of the row so far, prompt and answers.
      prompt_ids: ids of the next turn's prompt.
      turn_start: index in `record_ids` of the first token of the last answer.

    Returns:
      Append if the prompt begins with all ids of the record. Realign if it begins with them up to
      within the last answer, and goes on otherwise. Else Fork: a prompt that keeps no token of the
      last answer, or only goes back into it, takes nothing away from the record.
    """
    same = _common(record_ids, prompt_ids)
    suffix = tuple(map(int, prompt_ids[same:]))
    if same == len(record_ids):
        return Append(suffix)
    return Realign(same, suffix) if same > turn_start and suffix else Fork()


def joined_to_one(
    rows: Sequence[tuple[Ids, int]], prompt_ids: Ids
) -> tuple[int, Append | Realign | Fork]:
    """Returns the row that a prompt continues, and how; (-1, Fork) if it continues none.

    `rows` are (record_ids, turn_start) of `joined`. The row with the longest match wins, of equal
    ones the first.
    """
    found = [(i, joined(ids, prompt_ids, start)) for i, (ids, start) in enumerate(rows)]
    match = lambda pair: _common(rows[pair[0]][0], prompt_ids)
    return max(
        (pair for pair in found if not isinstance(pair[1], Fork)), key=match, default=(-1, Fork())
    )


def _common(a: Ids, b: Ids) -> int:
    """Returns the length of the longest common prefix."""
    count = min(len(a), len(b))
    differs = np.asarray(a[:count], np.int64) != np.asarray(b[:count], np.int64)
    return int(differs.argmax()) if differs.any() else count
