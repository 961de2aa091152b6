"""Whether an engine samples from the weights that it was given: before the first step, and after every
sync.

The learner computes its log-probs of the next token after a few fixed prompts when it publishes a
version. After the sync the engine samples one token after each of them, by the same request as the run's,
and its log-prob is compared. Keys of older weights, weights that were never read, log-probs at another
temperature and another tokenizer all show there, and nowhere else before the reward falls.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.engine.records import SamplingParams
from jaxrl_tis.external.client import EngineError
from jaxrl_tis.external.protocol import Facts, Kind
from jaxrl_tis.gate.report import MismatchError
from jaxrl_tis.models import transformer

PROMPTS = 9
LEAST = 48  # tokens of a prompt: three pages of an engine's cache, which hold keys of older weights


@dataclasses.dataclass(frozen=True)
class Expected:
    """The learner's log-probs [P,V] of the token after each prompt: at the run's temperature, and at 1."""

    logps: np.ndarray
    raw: np.ndarray


class Canary:
    """Compares engines with the learner.

    Args:
      model, program, layout: the learner's.
      prompts: token ids of prompts; each is the end of a longer text of all of them.
      room: most tokens of a prompt and one more.
      temperature: of the run.
      max_d, max_dp: bounds of the medians over prompts, of |log-prob - log-prob| and |p - p|.
    """

    def __init__(
        self, model: Any, program: Any, layout: Any, prompts: Sequence[Sequence[int]], room: int,
        temperature: float, max_d: float, max_dp: float,
    ):
        text = [int(token) for ids in prompts for token in ids]
        length = min(max(LEAST, max(map(len, prompts))), room - 1)
        text = text * (1 + (length + PROMPTS) // len(text))
        self._prompts = [text[i : i + length] for i in range(PROMPTS)]
        self._temperature, self._max_d, self._max_dp = temperature or 1.0, max_d, max_dp
        self._layout = layout
        self._program = jax.jit(
            functools.partial(_log_probs, model, program, self._temperature),
            compiler_options=program.compiler_options,
        )
        self._before: dict[int, Expected] = {}

    def expected(self, params: Any, version: int) -> Expected:
        """Returns what an engine with these parameters of the policy shall say."""
        layout = self._layout
        shards, width = layout.shards, layout.mesh.shape["context"]
        count, length = len(self._prompts), len(self._prompts[0])
        rows = np.zeros((-(-count // shards) * shards, -(-length // width) * width), np.int32)
        rows[:count, :length] = self._prompts
        found = self._program(params, layout.put(rows, ("batch", None)), length - 1)
        made = Expected(*(layout.fetch(x)[:count] for x in found))
        self._before = {v: e for v, e in self._before.items() if v >= version - 1} | {version: made}
        return made

    def check(self, url: str, kind: Kind, adapter: str | None, version: int, expected: Expected) -> None:
        """Samples a token after each prompt. MismatchError with both numbers and the likely cause where
        the engine's log-probs are not the learner's."""
        sampling = SamplingParams(temperature=self._temperature, max_tokens=1)
        said = np.zeros(len(self._prompts))
        tokens = np.zeros(len(self._prompts), int)
        for i, ids in enumerate(self._prompts):
            answer = kind.generate(f"canary-{version}-{i}", ids, sampling, i, 0, adapter)
            if len(answer.tokens) != 1:
                raise EngineError(f"{url} sampled {len(answer.tokens)} tokens where one was asked for")
            tokens[i], said[i] = answer.tokens[0], answer.logps[0]
        if tokens.max() >= expected.logps.shape[1]:
            raise MismatchError(f"{url} sampled token {tokens.max()}, which this model does not have")
        d, dp = _distance(expected.logps, tokens, said)
        if d <= self._max_d and dp <= self._max_dp:
            return
        own = np.median(np.take_along_axis(expected.logps, tokens[:, None], 1))
        raise MismatchError(
            f"{url} does not sample from version {version}: after {len(tokens)} fixed prompts its median "
            f"log-prob is {np.median(said):.4g} and the learner's {own:.4g}; median difference {d:.3g} nats "
            f"(gate.max_d_p99 = {self._max_d:g}), of probabilities {dp:.3g} (gate.max_dp_max = "
            f"{self._max_dp:g}). {self._cause(tokens, said, version, expected)}. The run stops before it "
            "samples"
        )

    def _cause(self, tokens: np.ndarray, said: np.ndarray, version: int, expected: Expected) -> str:
        """Returns the likely cause: what else the log-probs agree with."""
        fits = lambda logps: _distance(logps, tokens, said)[0] <= self._max_d
        if self._temperature != 1 and fits(expected.raw):
            return (
                "They are those at temperature 1: start the engine with --logprobs-mode "
                "processed_logprobs"
            )
        for older, at in self._before.items():
            if older != version and fits(at.logps):
                return (
                    f"They are those of version {older}: the engine did not read the new weights, or keeps "
                    "an adapter of that name"
                )
        return (
            "Likely keys of older weights in its prefix cache, another temperature, another number "
            "format, or another tokenizer"
        )


def _distance(logps: np.ndarray, tokens: np.ndarray, said: np.ndarray) -> tuple[float, float]:
    """Returns the medians over prompts of |log-prob - log-prob| and |p - p|."""
    own = np.take_along_axis(logps, tokens[:, None], 1)[:, 0]
    return float(np.median(np.abs(own - said))), float(np.median(np.abs(np.exp(own) - np.exp(said))))


def _log_probs(model, program, temperature, params, tokens_bt, position):
    """Returns log-probs [B,V] of the token after a position, at the temperature and at 1."""
    logits_bv = jnp.take(transformer.logits(params, model, tokens_bt, program=program), position, axis=1)
    return jax.nn.log_softmax(logits_bv / temperature), jax.nn.log_softmax(logits_bv)


def problems(facts: Facts, url: str, vocab_size: int, length: int, dtype: str, top_n: int) -> list[str]:
    """Returns why an engine cannot be this run's sampler, a sentence each."""
    said, found = facts, []
    if said.logprobs not in (None, "processed_logprobs"):
        found.append(
            f"its log-probs are {said.logprobs}, of the model before temperature and filters; start it with "
            "--logprobs-mode processed_logprobs"
        )
    if said.vocab_size not in (None, vocab_size):
        found.append(f"its model has {said.vocab_size} token ids and this run's {vocab_size}; serve the same model")
    if said.max_length is not None and said.max_length < length:
        found.append(f"its sequences have at most {said.max_length} tokens, and this run's up to {length}; raise --max-model-len")
    if said.dtype not in (None, dtype):
        found.append(f"it computes in {said.dtype}, and engine.dtype is {dtype}; make them equal")
    if said.max_logprobs is not None and -1 < said.max_logprobs < top_n:
        found.append(f"it answers with at most {said.max_logprobs} likely tokens, and {top_n} are recorded; raise --max-logprobs")
    return [f"the engine at {url}: {problem}" for problem in found]
