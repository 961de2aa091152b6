"""Turns trajectories into the JSON of an answer, whole or in chunks of a stream."""

import math
import time
from typing import Any

from jaxrl_tis.data.tokenizer import Tokenizer
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.text import settled_length
from jaxrl_tis.serve.request import Completion
from jaxrl_tis.serve.text import cut, offsets, utf8

Json = dict[str, Any]


class Answer:
    """Writes the answer to one completion request."""

    def __init__(self, completion: Completion, model: str, tokenizer: Tokenizer):
        self._completion, self._tokenizer = completion, tokenizer
        self._created, self._model = int(time.time()), model

    def whole(self, trajectories: list[Trajectory]) -> Json:
        """Returns the answer with all choices, in their order."""
        choices = []
        for index, trajectory in enumerate(trajectories):
            text = self.text(trajectory)
            content = {"text": text}
            if self._completion.is_chat:
                content = {"message": {"role": "assistant", "content": text}}
            choices.append({"index": index} | content | self._end(trajectory))
        usage = self._usage(sum(len(t.tokens) for t in trajectories))
        return self._envelope("chat.completion", choices) | {"usage": usage}

    def first(self, index: int) -> Json:
        """Returns the chunk that opens a choice of a chat."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def more(self, index: int, text: str) -> Json:
        """Returns a chunk with more text of a choice."""
        content = {"delta": {"content": text}} if self._completion.is_chat else {"text": text}
        return self._chunk(index, content)

    def last(self, index: int, trajectory: Trajectory) -> Json:
        """Returns the chunk that ends a choice: no text, and all log-probs."""
        content = {"delta": {}} if self._completion.is_chat else {"text": ""}
        return self._chunk(index, content, self._end(trajectory))

    def end(self, num_tokens: int) -> Json:
        """Returns the chunk after all others, with the number of sampled tokens."""
        return self._envelope("chat.completion.chunk", []) | {"usage": self._usage(num_tokens)}

    def text(self, trajectory: Trajectory) -> str:
        decode = self._tokenizer.decode
        floor = settled_length(trajectory.tokens[: self._completion.min_tokens], decode)
        return cut(decode(trajectory.tokens), self._completion.stops, floor)

    def _chunk(self, index: int, content: Json, end: Json | None = None) -> Json:
        end = end or {"finish_reason": None, "logprobs": None}
        usage = {"usage": None} if self._completion.includes_usage else {}
        return self._envelope("chat.completion.chunk", [{"index": index} | content | end]) | usage

    def _usage(self, sampled: int) -> Json:
        prompt = sum(map(len, self._completion.prompts))
        return {
            "prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled
        }

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._completion.id,
            "object": kind if self._completion.is_chat else "text_completion",
            "created": self._created, "model": self._model, "seed": self._completion.seed,
            "choices": choices,
        }

    def _end(self, trajectory: Trajectory) -> Json:
        """Returns the finish reason, the versions of the weights that sampled, and the log-probs."""
        prompt = {}
        if self._completion.has_prompt_logprobs:
            prompt = {"prompt_logprobs": self._of_prompt(trajectory)}
        return prompt | {
            "finish_reason": trajectory.stop_reason,
            "versions": list(dict.fromkeys(trajectory.version.tolist())),
            "logprobs": None if self._completion.logprobs is None else self._logprobs(trajectory),
        }

    def _logprobs(self, trajectory: Trajectory) -> Json:
        t = trajectory
        tokens = [self._piece(token) for token in t.tokens]
        behav, raw = (list(map(_finite, logp)) for logp in (t.logp_behav, t.logp_raw))
        top = [self._top(*row) for row in zip(t.top_ids, t.top_logps)]
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
            for token, logp, raw_logp, row in zip(tokens, behav, raw, top)
        ]}

    def _of_prompt(self, trajectory: Trajectory) -> list[Json | None]:
        """Returns {id: log-prob and text} for each token of the prompt, None for the first token;
        [] if the answer ended before its prompt was read."""
        pairs = zip(trajectory.prompt[1:].tolist(), trajectory.prompt_logps[1:].tolist())
        entry = lambda logp, id: {"logprob": _finite(logp), "decoded_token": self._piece(id)}
        first = [None] * (len(trajectory.prompt_logps) > 0)
        return first + [{str(id): entry(logp, id)} for id, logp in pairs]

    def _top(self, ids, logps) -> list[tuple[str, float | None]]:
        """Returns (text, log-prob) of the likeliest possible tokens at one position."""
        pairs = list(zip(ids, logps))[: self._completion.logprobs]
        return [(self._piece(id), _finite(logp)) for id, logp in pairs if id >= 0]

    def _piece(self, token: int) -> str:
        return self._tokenizer.decode([token])


def _by_text(row: list[tuple[str, float | None]]) -> dict[str, float | None]:
    """Returns {text: log-prob}; of tokens with equal texts the likeliest counts, which comes first."""
    by_text = {}
    for text, logp in row:
        by_text.setdefault(text, logp)
    return by_text


def _finite(value: float) -> float | None:
    """Replaces infinities and NaN by None: JSON lacks them, and a diverged model gives them."""
    return float(value) if math.isfinite(value) else None


def described(status: int, message: str) -> Json:
    """Returns an error in the API's JSON."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
