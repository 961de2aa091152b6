"""Turns trajectories into the JSON of an answer, whole or in chunks of a stream."""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_tis.data.tokenizer import Tokenizer
from jaxrl_tis.endpoint import tool_calls
from jaxrl_tis.endpoint.request import Completion
from jaxrl_tis.endpoint.text import cut, offsets, utf8
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.text import settled_length

Json = dict[str, Any]


class Answer:
    """Writes the answer to one completion request. `form` is the form of tool calls in its text."""

    def __init__(
        self, completion: Completion, model: str, tokenizer: Tokenizer,
        form: tool_calls.Form | None = None,
    ):
        self._completion, self._tokenizer = completion, tokenizer
        self._form = form if completion.tools else None
        self._created, self._model = int(time.time()), model

    def whole(self, trajectories: list[Trajectory]) -> Json:
        """Returns the answer with all choices, in their order."""
        choices = []
        for index, trajectory in enumerate(trajectories):
            text, calls = self.read(trajectory)
            content: Json = {"text": text}
            if self._completion.is_chat:
                said = {"content": text or None, "tool_calls": calls} if calls else {"content": text}
                content = {"message": {"role": "assistant"} | said}
            content |= self._prompt_ids(index) | self._token_ids(trajectory.tokens.tolist())
            choices.append({"index": index} | content | self._end(trajectory))
        numbers = usage(self._completion, sum(len(t.tokens) for t in trajectories))
        prompt = self._chat_prompt_ids()
        return self._envelope("chat.completion", choices) | prompt | {"usage": numbers}

    def first(self, index: int) -> Json:
        """Returns the chunk that opens a choice: no text, and the token ids of its prompt."""
        text: Json = {"text": ""}
        if self._completion.is_chat:
            text = {"delta": {"role": "assistant", "content": ""}}
        content = text | self._prompt_ids(index) | self._token_ids([])
        return self._chunk(index, content) | self._chat_prompt_ids()

    def more(
        self, index: int, text: str, token_ids: list[int], calls: Sequence[Json] = ()
    ) -> Json:
        """Returns a chunk with more text and token ids of a choice, and with its tool calls."""
        content: Json = {"delta": {"content": text}} if self._completion.is_chat else {"text": text}
        if calls:
            content["delta"]["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls)]
        return self._chunk(index, content | self._token_ids(token_ids))

    def last(self, index: int, trajectory: Trajectory) -> Json:
        """Returns the chunk that ends a choice: no text, and all log-probs."""
        content: Json = {"delta": {}} if self._completion.is_chat else {"text": ""}
        return self._chunk(index, content | self._token_ids([]), self._end(trajectory))

    def end(self, num_tokens: int) -> Json:
        """Returns the chunk after all others, with the number of sampled tokens."""
        numbers = usage(self._completion, num_tokens)
        return self._envelope("chat.completion.chunk", []) | {"usage": numbers}

    def read(self, trajectory: Trajectory) -> tuple[str, list[Json]]:
        """Returns the text of a choice without its tool calls, and the calls."""
        text = self._text(trajectory)
        if self._form is None:
            return text, []
        text, calls = self._form.parse(text, self._completion.tools)
        return text, tool_calls.described(calls, trajectory.prompt, trajectory.tokens)

    def settled(self, text: str) -> str:
        """Returns the beginning of an unfinished text that is in no tool call."""
        return text if self._form is None else self._form.settled(text)

    def _text(self, trajectory: Trajectory) -> str:
        """Returns the text before the stop string or stop token that ended the choice."""
        decode, tokens = self._tokenizer.decode, trajectory.tokens
        floor = settled_length(tokens[: self._completion.min_tokens], decode)
        if np.isin(tokens[-1:], self._completion.stop_ids).any():
            tokens = tokens[:-1]
        return cut(decode(tokens), self._completion.stops, floor)

    def _prompt_ids(self, index: int) -> Json:
        """Returns the part of a choice with its prompt, which can differ between choices. A chat has
        one prompt, see `_chat_prompt_ids`."""
        if not self._completion.returns_ids or self._completion.is_chat:
            return {}
        return {"prompt_token_ids": self._completion.choices[index].prompt.tolist()}

    def _chat_prompt_ids(self) -> Json:
        if not self._completion.returns_ids or not self._completion.is_chat:
            return {}
        return {"prompt_token_ids": self._completion.prompts[0].tolist()}

    def _token_ids(self, token_ids: list[int]) -> Json:
        return {"token_ids": token_ids} if self._completion.returns_ids else {}

    def _chunk(self, index: int, content: Json, end: Json | None = None) -> Json:
        end = end or {"finish_reason": None, "logprobs": None}
        usage = {"usage": None} if self._completion.includes_usage else {}
        return self._envelope("chat.completion.chunk", [{"index": index} | content | end]) | usage

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._completion.id,
            "object": kind if self._completion.is_chat else "text_completion",
            "created": self._created, "model": self._model, "seed": self._completion.seed,
            "choices": choices,
        }

    def _end(self, trajectory: Trajectory) -> Json:
        """Returns the finish reason, the version of the weights of each token, and the log-probs."""
        prompt = {}
        has_calls = trajectory.stop_reason == "stop" and bool(self.read(trajectory)[1])
        if self._completion.has_prompt_logprobs:
            prompt = {"prompt_logprobs": self._of_prompt(trajectory)}
        return prompt | {
            "finish_reason": "tool_calls" if has_calls else trajectory.stop_reason,
            "versions": trajectory.version.tolist(),
            "logprobs": None if self._completion.logprobs is None else self._logprobs(trajectory),
        }

    def _logprobs(self, trajectory: Trajectory) -> Json:
        t = trajectory
        tokens = [self._piece(token) for token in t.tokens]
        behav, raw = (list(map(finite, logp)) for logp in (t.logp_behav, t.logp_raw))
        top = [self._top(*row) for row in zip(t.top_ids, t.top_logps, strict=True)]
        if not self._completion.is_chat:
            return {
                "tokens": tokens, "token_ids": t.tokens.tolist(), "token_logprobs": behav,
                "raw_logprobs": raw, "text_offset": offsets(t.tokens, self._tokenizer.decode),
                "top_logprobs": list(map(_by_text, top)),
            }
        entry = lambda token, logp: {"token": token, "logprob": logp, "bytes": utf8(token)}
        return {"content": [
            entry(token, logp) | {
                "raw_logprob": raw_logp, "top_logprobs": [entry(*pair) for pair in row]
            }
            for token, logp, raw_logp, row in zip(tokens, behav, raw, top, strict=True)
        ]}

    def _of_prompt(self, trajectory: Trajectory) -> list[Json | None]:
        """Returns {id: log-prob and text} for each token of the prompt, None for the first token;
        [] if the answer ended before its prompt was read."""
        ids, logps = trajectory.prompt[1:].tolist(), trajectory.prompt_logps[1:].tolist()
        entry = lambda logp, id: {"logprob": finite(logp), "decoded_token": self._piece(id)}
        first = [None] * (len(trajectory.prompt_logps) > 0)
        pairs = zip(ids, logps, strict=False)  # no log-probs: the prompt was not read
        return first + [{str(id): entry(logp, id)} for id, logp in pairs]

    def _top(self, ids, logps) -> list[tuple[str, float | None]]:
        """Returns (text, log-prob) of the likeliest possible tokens at one position."""
        pairs = likeliest(ids, logps, self._completion.logprobs)
        return [(self._piece(id), logp) for id, logp in pairs]

    def _piece(self, token: int) -> str:
        """Returns the text of a token behind another: some decoders drop the space before the first."""
        one, two = self._tokenizer.decode([token]), self._tokenizer.decode([token, token])
        return two.removeprefix(one) if two.startswith(one) else one


def _by_text(row: list[tuple[str, float | None]]) -> dict[str, float | None]:
    """Returns {text: log-prob}; of tokens with equal texts the likeliest counts, which comes first."""
    by_text = {}
    for text, logp in row:
        by_text.setdefault(text, logp)
    return by_text


def likeliest(ids, logps, count: int | None) -> list[tuple[int, float | None]]:
    """Returns (id, log-prob) of at most `count` possible tokens at one position, the likeliest first."""
    pairs = list(zip(ids, logps, strict=True))[:count]
    return [(int(id), finite(logp)) for id, logp in pairs if id >= 0]


def usage(completion: Completion, sampled: int) -> Json:
    """Returns the numbers of prompt tokens and sampled tokens."""
    prompt = sum(map(len, completion.prompts))
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def finite(value: float) -> float | None:
    """Replaces infinities and NaN by None: JSON lacks them, and a diverged model gives them."""
    return float(value) if math.isfinite(value) else None


def described(status: int, message: str) -> Json:
    """Returns an error in the API's JSON."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
