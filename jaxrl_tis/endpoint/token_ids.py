"""Token ids in, token ids and log-probs out: POST /inference/v1/generate.

The form is vLLM's, as trainers use it. Unknown sampling parameters are ignored, because clients send
parameters of several engines. Known parameters that this server does not support are refused.
"""

import base64
import dataclasses
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_tis.data.tokenizer import Tokenizer
from jaxrl_tis.endpoint.answer import Json, finite, likeliest, usage
from jaxrl_tis.endpoint.request import (
    ONLY, SAMPLING, Completion, Limits, check_logprobs, check_model, check_values, choices, known,
    object_of,
)
from jaxrl_tis.engine.records import Trajectory

BODY = {
    "model": (str, None), "token_ids": (list, None), "sampling_params": (dict, {}),
    "return_token_ids": (bool, False), "request_id": (str, None),
}
ONLY_BODY = {
    "stream": [False], "stream_options": [{}], "features": [], "content_parts": [],
    "kv_transfer_params": [],
}
PARAMS = SAMPLING | {"logprobs": (int, None), "routed_experts_prompt_start": (int, 0)}
UNSUPPORTED = (
    "bad_words", "structured_outputs", "allowed_token_ids", "logits_processors",
    "truncate_prompt_tokens",
)
ONLY_PARAMS = {name: ONLY[name] for name in UNSUPPORTED} | {"prompt_logprobs": []}


@dataclasses.dataclass(frozen=True)
class Generation(Completion):
    """A parsed request of token ids.

    Attributes:
      routes_start: the first token of the prompt whose experts are returned.
    """

    routes_start: int


def parse(
    body: bytes, model: str, vocab_size: int, tokenizer: Tokenizer, limits: Limits
) -> Generation:
    """Parses a body. ValueError with the problem if it is invalid."""
    values = known(object_of(body), BODY, ONLY_BODY)
    check_model(values["model"], model)
    prompt = values["token_ids"]
    if prompt is None or not all(type(token) is int for token in prompt):
        raise ValueError("token_ids must be a list of token ids")
    params = known(values["sampling_params"], PARAMS, ONLY_PARAMS, ignores_unknown=True)
    check_values(params, limits)
    check_logprobs(params["logprobs"], limits)
    start = params["routed_experts_prompt_start"]
    if not 0 <= start <= len(prompt):
        raise ValueError(
            f"routed_experts_prompt_start is {start}; give 0 to {len(prompt)}, the number of token_ids"
        )
    id = values["request_id"] or f"gen-{secrets.token_hex(12)}"
    return Generation(
        id, choices(id, [prompt], params, vocab_size, tokenizer, limits), num_prompts=1,
        is_chat=False, is_streamed=False, includes_usage=False, logprobs=params["logprobs"],
        returns_ids=values["return_token_ids"], tools=(), routes_start=start,
    )


class Answer:
    """Writes the answer to one request of token ids."""

    def __init__(self, generation: Generation, spans: Callable[[list[int]], list[Json]]):
        self._generation, self._spans = generation, spans

    def whole(self, trajectories: list[Trajectory]) -> Json:
        """Returns the answer with all choices, in their order."""
        generation = self._generation
        prompt = {}
        if generation.returns_ids:
            prompt = {"prompt_token_ids": generation.prompts[0].tolist()}
        return {"request_id": generation.id, "seed": generation.seed} | prompt | {
            "choices": [{"index": i} | self._choice(t) for i, t in enumerate(trajectories)],
            "usage": usage(generation, sum(len(t.tokens) for t in trajectories)),
        }

    def _choice(self, trajectory: Trajectory) -> Json:
        """Returns the sampled tokens and the record of each: log-prob, version, experts."""
        routes = {}
        if trajectory.routes.shape[1]:
            routes = {"routed_experts": _encoded(trajectory.routes, self._generation.routes_start)}
        return {
            "token_ids": trajectory.tokens.tolist(), "finish_reason": trajectory.stop_reason,
            "logprobs": None if self._generation.logprobs is None else self._logprobs(trajectory),
            "versions": (versions := trajectory.version.tolist()),
            "weight_versions": self._spans(versions),
        } | routes | _masks(trajectory)

    def _logprobs(self, t: Trajectory) -> Json:
        entry = lambda id, logp: {"token": f"token_id:{id}", "token_id": int(id), "logprob": logp}
        behav, raw = (map(finite, logp) for logp in (t.logp_behav, t.logp_raw))
        pairs = zip(t.top_ids, t.top_logps, strict=True)
        top = [likeliest(*row, self._generation.logprobs) for row in pairs]
        return {"content": [
            entry(token, logp) | {
                "raw_logprob": raw_logp, "top_logprobs": [entry(*pair) for pair in row]
            }
            for token, logp, raw_logp, row in zip(t.tokens, behav, raw, top, strict=True)
        ]}


def _masks(t: Trajectory) -> Json:
    """Returns the ids with positive probability at each token, [] where there were too many to record."""
    if not t.kept.shape[1]:
        return {}
    return {"sampling_mask": [row[row >= 0].tolist() for row in t.kept]}


def _encoded(routes: np.ndarray, start: int) -> dict[str, Any]:
    """Returns the experts [m,L,k] of the tokens from `start` on, in base64. `data` comes first, because
    clients look for it there."""
    rows = routes[start:]
    return {
        "data": base64.b64encode(rows.tobytes()).decode(), "shape": list(rows.shape),
        "start": start, "dtype": rows.dtype.name,
    }
