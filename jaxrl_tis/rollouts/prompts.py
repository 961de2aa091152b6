"""Turns examples into prompt token ids, and checks all data before the first step.

Every example is rendered and tokenized once before a run starts, so bad data cannot end the run
later. The ids are cached in memory for the run, and on disk for the next start with the same data.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, Protocol

import ml_collections
import numpy as np

from jaxrl_tis.data import files, tasks
from jaxrl_tis.data.graders import REWARDS, names
from jaxrl_tis.data.examples import Bad, FileExamples, listed
from jaxrl_tis.data.tokenizer import Tokenizer, escaped
from jaxrl_tis.record.progress import Progress
from jaxrl_tis.runtime import processes, storage

GENERATED = 20_000  # examples of a generated task that are checked: such a task can be endless
CHUNK, CHUNK_CHARACTERS = 1000, 1 << 22  # of prompts that are rendered and tokenised together
RECENT = 4096  # prompts that were rendered after the check, for their second use
CACHED = 2000  # prompts; fewer take less than a second, and are not kept on disk
KEPT_FILES = 16  # on disk
PASSING = ("TimeoutError", "EOFError")  # faults of the template's process, not of a prompt
PLAIN = "{prompt}"  # the template that adds nothing
# Code that affects how a prompt is rendered, in addition to the tokenizer and the config.
CODE = ("templates.py", "tokenizer.py", "../rollouts/prompts.py")
PACKAGES = ("jinja2", "tokenizers")
TORN = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)  # of a file that is not whole

Prompt = str | list[dict[str, Any]]
Outcome = np.ndarray | str  # token ids, or the reason why there are none


class Opening(Protocol):
    """Gives the first observations of environments, see `episodes.Openings`."""

    def __call__(
        self, examples: Sequence[dict[str, Any]], heartbeat: Callable[[], None] = lambda: None
    ) -> list[Prompt | ValueError]: ...

    def close(self) -> None: ...


def lacks_answer(config: ml_collections.ConfigDict) -> Callable[[dict[str, Any]], str]:
    """Returns a function from an example to an error message if the example lacks the answer that a
    reward of config.reward.name compares with, else "". All built-in rewards need an answer; the
    needs of a user's function, an environment and a harness are unknown."""
    comparing = [name for name in names(config.reward.name) if name in REWARDS]
    if config.task.environment or config.rollout.harness:
        return lambda example: ""
    reason = (
        f"it has no answer, which the reward {comparing[0]!r} compares with; name the field with "
        "task.params.answer_field"
    ) if comparing else ""
    return lambda example: "" if "answer" in example else reason


def key_of(prompt: Prompt | ValueError) -> str:
    return json.dumps(prompt) if isinstance(prompt, list) else f"{prompt}"


def chunks_of(prompts: list[Prompt | ValueError]) -> list[list[Prompt | ValueError]]:
    """Splits prompts into chunks of at most CHUNK prompts and CHUNK_CHARACTERS characters. A longer
    prompt has a chunk of its own."""
    chunks, room = [[]], CHUNK_CHARACTERS
    for prompt in prompts:
        size = len(key_of(prompt))
        if chunks[-1] and (len(chunks[-1]) == CHUNK or size > room):
            chunks.append([])
            room = CHUNK_CHARACTERS
        chunks[-1].append(prompt)
        room -= size
    return chunks


@dataclasses.dataclass(frozen=True)
class Prompter:
    """Turns examples into prompt ids. The model's chat template renders a list of messages. A text
    is first formatted by task.template, and then by the chat template if task.chat is set.

    With an environment, the prompt is the environment's first observation.

    Attributes:
      opening: gives the prompts of examples; None without an environment.
      known: the ids of the checked prompts.
      recent: the outcomes of the RECENT last other examples.
    """

    tokenizer: Tokenizer
    task: ml_collections.ConfigDict
    opening: Opening | None = None
    known: dict[str, np.ndarray] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )
    recent: "collections.OrderedDict[str, Outcome]" = dataclasses.field(
        default_factory=collections.OrderedDict, repr=False, compare=False
    )

    def close(self) -> None:
        """Gives back the pool of the environment that gives the prompts."""
        if self.opening is not None:
            self.opening.close()

    def ids(self, example: dict[str, Any]) -> np.ndarray:
        """Returns the prompt ids of an example; raises ValueError if there are none or too many."""
        key = self._key(example)
        if key in self.known:
            return self.known[key]
        outcome = self._outcome(example)
        if (reason := self._reason(outcome)) or isinstance(outcome, str):
            raise ValueError(f"example {example['id']}: {reason}")
        return outcome

    def rendered(self, prompt: Prompt) -> np.ndarray:
        """Returns the ids of a prompt; raises ValueError if the template or tokenizer refuses it."""
        [outcome] = self._outcomes([prompt])
        if isinstance(outcome, str):
            raise ValueError(outcome)
        return outcome

    def checked(
        self, source: tasks.Source, what: str, reject: Callable[[dict], str] = lambda example: "",
        limit: int = GENERATED, heartbeat: Callable[[], None] = lambda: None,
    ) -> "Checked":
        """Checks all examples of files, or the first `limit` examples of a generated task.

        Args:
          what: name of the data for messages.
          reject: returns why an example with a good prompt cannot be used; "" if it can.
          heartbeat: called after each part.

        Raises:
          ValueError: an example is bad and task.on_bad_example is "error", or all are.
        """
        count = len(source) if isinstance(source, FileExamples) else min(len(source), limit)
        examples = [_example(source, i) for i in range(count)]
        whole = [example for example in examples if not isinstance(example, str)]
        prompts = self._prompts(whole, heartbeat)
        outcomes = iter(self._tokenised(prompts, what, heartbeat))
        good, bad = [], list(source.bad)
        for i, example in enumerate(examples):
            if isinstance(example, str):
                bad.append(Bad(source.place(i), source.place(i), example, source.row(i)))
                continue
            outcome = next(outcomes)
            reason = self._reason(outcome) or reject(example)
            if reason or isinstance(outcome, str):
                bad.append(Bad(source.place(i), example["id"], reason, source.row(i)))
            else:
                good.append(i)
                self.known[self._key(example)] = outcome
        bad.sort(key=lambda b: b.row)
        self._tell(bad, count + len(source.bad), what, is_any_good=bool(good))
        why_bad = lambda example: self._why_bad(example) or reject(example)
        return Checked(source, good, bad, count, why_bad, is_plain=self.opening is None)

    def _why_bad(self, example: dict[str, Any]) -> str:
        return self._reason(self._outcome(example))

    def _key(self, example: dict[str, Any]) -> str:
        return key_of(example["prompt"]) if self.opening is None else json.dumps(example)

    def _prompts(
        self, examples: list[dict[str, Any]], heartbeat: Callable[[], None] = lambda: None
    ) -> list[Prompt | ValueError]:
        if self.opening is None:
            return [example["prompt"] for example in examples]
        return [self._escaped(prompt) for prompt in self.opening(examples, heartbeat)]

    def _escaped(self, prompt: Prompt | ValueError) -> Prompt | ValueError:
        try:
            return prompt if isinstance(prompt, ValueError) else escaped(self.tokenizer, prompt)
        except ValueError as error:
            return error

    def _outcome(self, example: dict[str, Any]) -> Outcome:
        if (outcome := self.recent.get(key := self._key(example))) is None:
            [outcome] = self._outcomes(self._prompts([example]))
            self.recent[key] = outcome
            if len(self.recent) > RECENT:
                self.recent.popitem(last=False)
        return outcome

    def _tell(self, bad: list[Bad], total: int, what: str, is_any_good: bool) -> None:
        if not bad:
            return
        if self.task.on_bad_example == "error" or not is_any_good:
            rest = (
                "\nFix or remove them, or leave them out with --config.task.on_bad_example=skip."
                if is_any_good else ""
            )
            raise ValueError(
                f"{what}: {len(bad)} of {total} examples cannot be used:{listed(bad)}{rest}"
            )
        processes.report(f"{what}: {len(bad)} of {total} examples are left out:{listed(bad)}")

    def _reason(self, found: Outcome) -> str:
        """Returns why a prompt cannot be used; "" if it can."""
        if isinstance(found, str):
            return found
        limit = self.task.max_prompt_tokens
        if len(found) > limit:
            return (
                f"{len(found)} prompt tokens, config.task.max_prompt_tokens is {limit}; raise it or "
                "shorten the prompt"
            )
        return "" if len(found) else "the prompt has 0 tokens"

    # Rendering and tokenising

    def _tokenised(
        self, prompts: list[Prompt | ValueError], what: str, heartbeat: Callable[[], None]
    ) -> list[Outcome]:
        is_large = len(prompts) >= CACHED
        path = self._cache_path(prompts) if is_large else None
        if path is not None and (outcomes := _read(path, len(prompts))) is not None:
            return outcomes
        if prompts:
            self._try(prompts[0])
        outcomes = []
        is_shown = is_large and processes.is_first()
        # One chunk is tokenised while the template's process renders the next.
        with (
            Progress(len(prompts), f"checking {what}", is_shown=is_shown) as progress,
            concurrent.futures.ThreadPoolExecutor(2) as pool,
        ):
            for part in pool.map(self._outcomes, chunks_of(prompts)):
                outcomes += part
                progress.update(len(part))
                heartbeat()
        ended = [i for i, x in enumerate(outcomes) if isinstance(x, str) and any(e in x for e in PASSING)]
        for i in ended:  # the template's process, perhaps by chance
            [outcomes[i]] = self._outcomes([prompts[i]])
        is_sure = not any(isinstance(outcomes[i], str) for i in ended)
        if path is not None and is_sure:
            _write(path, outcomes)
        return outcomes

    def _try(self, prompt: Prompt | ValueError) -> None:
        """Raises ValueError if the template hangs, because it would hang on all prompts."""
        [found] = self._outcomes([prompt])
        if isinstance(found, str) and "TimeoutError" in found:
            raise ValueError(found)

    def _outcomes(self, prompts: Sequence[Prompt | ValueError]) -> list[Outcome]:
        inputs: list[Any] = [p if isinstance(p, ValueError) else self._input(p) for p in prompts]
        outcomes: list[Outcome] = [f"{x}" if isinstance(x, ValueError) else "" for x in inputs]
        for is_chat in (False, True):
            kind = list if is_chat else str
            places = [i for i, x in enumerate(inputs) if isinstance(x, kind)]
            encoded = self._encoded([inputs[i] for i in places], is_chat)
            for i, outcome in zip(places, encoded, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _input(self, prompt: Prompt) -> Prompt:
        """Returns the input of the tokenizer: a text, or messages for the chat template."""
        template, system = self.task.template, self.task.system
        if isinstance(prompt, str):
            text = template.format(prompt=prompt)
            if not self.task.chat:
                return text
            prompt = [{"role": "user", "content": text}]
        elif template != PLAIN:
            raise ValueError(
                f"task.template is {template!r}, and a prompt is a list of messages, which no "
                f"template is put around; set it to {PLAIN!r}"
            )
        elif self.opening is not None and not self.task.chat:
            raise ValueError(
                "the environment gives messages, which the chat template renders, and task.chat is "
                "False, so that later observations would be plain text; set task.chat to True"
            )
        has_system = any(message["role"] == "system" for message in prompt)
        return [{"role": "system", "content": system}, *prompt] if system and not has_system else prompt

    def _encoded(self, inputs: list, is_chat: bool) -> list[Outcome]:
        if not inputs:
            return []
        texts = self.tokenizer.chats(inputs) if is_chat else inputs
        # The template of a chat writes its own special tokens.
        encoded = iter(self.tokenizer.encodes([t for t in texts if isinstance(t, str)], not is_chat))
        encodings = [next(encoded) if isinstance(text, str) else text for text in texts]
        return [f"{x}" if isinstance(x, ValueError) else np.array(x, np.int32) for x in encodings]

    def _cache_path(self, prompts: list) -> pathlib.Path:
        """Returns the cache file of the outcomes, named by a digest of all their inputs."""
        here = pathlib.Path(files.__file__).parent
        inputs = [
            self.tokenizer.digest(), self.task.template, self.task.chat, self.task.system,
            *((here / name).read_text(encoding="utf-8") for name in CODE),
            *(metadata.version(name) for name in PACKAGES),
        ]
        digest = hashlib.blake2b(json.dumps(inputs).encode(), digest_size=16)
        for prompt in prompts:
            digest.update(json.dumps(prompt, default=str).encode())
        return storage.cache("prompts") / f"{digest.hexdigest()}.npz"


def _example(source: tasks.Source, index: int) -> dict[str, Any] | str:
    """Returns an example, or an error message if its generator fails."""
    try:
        example = source[index]
        return example if isinstance(source, FileExamples) else files.plain(example, "example")
    except ValueError as error:
        return f"{error}"


@dataclasses.dataclass
class Checked:
    """A source without its bad examples.

    If the whole source was checked, it is shorter by the bad examples. If only the first `count`
    examples of a generated task were checked, its length is unchanged, and a good example replaces
    each bad one.
    """

    source: tasks.Source
    good: list[int]
    bad: list[Bad]
    count: int
    why_bad: Callable[[dict[str, Any]], str]
    is_plain: bool = True  # prompts need no environment, whose calls are of one thread
    replaced: int = 0  # examples that were bad when they were read

    @property
    def is_late(self) -> bool:
        """Whether examples are made and rendered when they are read, by any thread."""
        return self.is_plain and not self._is_whole

    @property
    def _is_whole(self) -> bool:
        return self.count == len(self.source)

    @property
    def left_out(self) -> int:
        return len(self.bad) + self.replaced

    def __len__(self) -> int:
        return len(self.good) if self._is_whole else len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._is_whole:
            return self.source[self.good[index]]
        example = _example(self.source, index)
        if not isinstance(example, str) and not self.why_bad(example):
            return example
        self.replaced += 1
        return self.source[self.good[index % len(self.good)]]

    def digest(self) -> str:
        """Returns a digest of the examples and of the omitted rows."""
        digest, rows = self.source.digest(), [b.row for b in self.bad]
        return hashlib.blake2b(f"{digest} {rows}".encode(), digest_size=8).hexdigest() if rows else digest


# The cache


def _read(path: pathlib.Path, count: int) -> list[Outcome] | None:
    """Returns `count` cached outcomes; None if the file is missing or incomplete."""
    try:
        with np.load(path, allow_pickle=False) as file:
            ids, lengths, reasons = file["ids"], file["lengths"], json.loads(file["reasons"].tobytes())
        ends = np.cumsum(lengths)
        if len(lengths) != count or ends[-1] != len(ids):
            return None
        os.utime(path)
    except TORN:
        return None
    outcomes: list[Outcome] = [*np.split(ids, ends[:-1])]
    for i, reason in reasons:
        outcomes[i] = reason
    return outcomes


def _write(path: pathlib.Path, outcomes: list[Outcome]) -> None:
    """Writes the cache file atomically, and keeps the KEPT_FILES most recently used. On a full or
    read-only disk nothing is cached, and the next start takes longer."""
    reasons = [(i, x) for i, x in enumerate(outcomes) if isinstance(x, str)]
    ids = [np.zeros(0, np.int32) if isinstance(x, str) else x for x in outcomes]
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=storage.NEW, delete=False) as file:
            np.savez(
                file, ids=np.concatenate(ids), lengths=np.array([len(x) for x in ids]),
                reasons=np.frombuffer(json.dumps(reasons).encode(), np.uint8),
            )
        os.replace(file.name, path)
        newest = sorted(path.parent.iterdir(), key=os.path.getmtime, reverse=True)
        for old in newest[KEPT_FILES:]:
            old.unlink()
