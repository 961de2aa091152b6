"""Whether an engine samples from the weights that it was given: before the first step, and after every
sync.

The learner computes its log-probs of the next token after a few fixed prompts when it publishes a
version. After the sync the engine samples one token after each of them, by the same kind of request as
the run's. Its log-probs of that token and of the likeliest ones are compared with the learner's. Keys of
older weights, weights that were never read, log-probs at another temperature and another tokenizer all
show there, and nowhere else before the reward falls.

Two bounds hold. The gate's is for the gap of two programs. The other grows from the first sync: number
formats do not change during a run, so a distance GROWTH times the first one is of other weights.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.engine.records import SamplingParams
from jaxrl_tis.external.client import EngineError, Refused
from jaxrl_tis.external.protocol import Answer, Facts, Kind
from jaxrl_tis.models import transformer
from jaxrl_tis.runtime.cli import MismatchError

PROMPTS = 9
LEAST = 272  # tokens of a prompt: more than a block of any cache, which may hold keys of older weights
TOP = 5  # likely tokens that the engine is asked for beside the sampled one
GROWTH = 10.0  # times the distance at the first sync
LIKELY = np.log(0.01)
FLOOR = 3e-4  # nats and probability, below which no distance counts as growth


@dataclasses.dataclass(frozen=True)
class Expected:
    """The learner's log-probs [P,V] of the token after each prompt: at the run's temperature, and at 1."""

    logps: np.ndarray
    raw: np.ndarray


class Said(NamedTuple):
    """The engine's log-probs of some tokens [n] after some prompts: prompts [n], logps [n]."""

    prompts: np.ndarray
    tokens: np.ndarray
    logps: np.ndarray

    def distance(self, logps: np.ndarray) -> tuple[float, float]:
        """Returns the medians over likely tokens of |log-prob - log-prob| and |p - p|."""
        own = logps[self.prompts, self.tokens]
        # Rounding of logits is in proportion to their size: log-probs of unlikely tokens are coarse.
        is_likely = np.maximum(own, self.logps) >= LIKELY
        if not is_likely.any():
            is_likely[:] = True
        own, said = own[is_likely], self.logps[is_likely]
        dp = np.abs(np.exp(own) - np.exp(said))
        return float(np.median(np.abs(own - said))), float(np.median(dp))


class Canary:
    """Compares engines with the learner.

    Args:
      model, program, layout: the learner's.
      prompts: token ids of prompts; each is the end of a longer text of all of them.
      room: most tokens of a prompt and one more.
      temperature: of the run.
      max_d, max_dp: bounds of the medians over tokens, of |log-prob - log-prob| and |p - p|.
      route_shape: (layers, experts) that the engine shall record; (0, 0) for none.
    """

    def __init__(
        self, model: Any, program: Any, layout: Any, prompts: Sequence[Sequence[int]], room: int,
        temperature: float, max_d: float, max_dp: float, route_shape: tuple[int, int] = (0, 0),
    ):
        text = [int(token) for ids in prompts for token in ids]
        length = min(max(LEAST, max(map(len, prompts))), room - 1)
        text = text * (1 + (length + PROMPTS) // len(text))
        self._prompts = [text[i : i + length] for i in range(PROMPTS)]
        self._temperature, self._max_d, self._max_dp = temperature or 1.0, max_d, max_dp
        self._layout, self._route_shape = layout, route_shape
        self._program = _made(model, program, self._temperature)
        self._before: dict[int, Expected] = {}
        self._first: dict[str, tuple[float, float]] = {}  # engine -> distances at its first sync

    def expected(self, params: Any, version: int) -> Expected:
        """Returns what an engine with these parameters of the policy shall say."""
        layout = self._layout
        shards, count, length = layout.shards, len(self._prompts), len(self._prompts[0])
        rows = np.zeros((-(-count // shards) * shards, layout.whole_row(length)), np.int32)
        rows[:count, :length] = self._prompts
        found = self._program(params, layout.put(rows, ("batch", None)), length - 1)
        made = Expected(*(layout.fetch(x)[:count] for x in found))
        self._before = {v: e for v, e in self._before.items() if v >= version - 1} | {version: made}
        return made

    def check(
        self, url: str, kind: Kind, adapter: str | None, version: int, expected: Expected, top_n: int = TOP,
    ) -> None:
        """Samples a token after each prompt. MismatchError with both numbers and the likely cause where
        the engine's log-probs are not the learner's; `top_n`: of the likely tokens that it can say."""
        sampling = SamplingParams(temperature=self._temperature, max_tokens=1)
        top_n, found = min(top_n, expected.logps.shape[1]), []
        for i, ids in enumerate(self._prompts):
            answer = kind.generate(f"canary-{version}-{i}", ids, sampling, None, top_n, adapter)
            if len(answer.tokens) != 1:
                raise EngineError(f"{url} sampled {len(answer.tokens)} tokens where one was asked for")
            self._check_routes(url, answer)
            tokens = np.append(answer.top_ids[0], answer.tokens)
            logps = np.append(answer.top_logps[0], answer.logps)
            is_any = (tokens >= 0) & (logps > -np.inf)
            found += [(i, token, logp) for token, logp in zip(tokens[is_any], logps[is_any], strict=True)]
        prompts, tokens, logps = (np.array(x) for x in zip(*found, strict=True))
        if tokens.max() >= expected.logps.shape[1]:
            raise MismatchError(
                f"{url} says the log-prob of token {tokens.max()}, and this run's model has "
                f"{expected.logps.shape[1]} token ids; serve the same model"
            )
        said = Said(prompts, tokens, logps)
        distance = said.distance(expected.logps)
        bounds = self._bounds(url)
        if all(d <= bound for d, bound in zip(distance, bounds, strict=True)):
            self._first.setdefault(url, distance)
            return
        cause = self._cause(said, version, expected, adapter is not None)
        own = np.median(expected.logps[prompts, tokens])
        grown = f", at the first sync {self._first[url][0]:.3g}" if url in self._first else ""
        raise MismatchError(
            f"{url} does not sample from version {version}: after {len(self._prompts)} fixed prompts its "
            f"median log-prob is {np.median(logps):.6g} and the learner's {own:.6g}; median difference "
            f"{distance[0]:.3g} nats (bound {bounds[0]:.3g}{grown}), of probabilities {distance[1]:.3g} "
            f"(bound {bounds[1]:.3g}). {cause}. The run stops before it samples"
        )

    def _bounds(self, url: str) -> tuple[float, float]:
        """Returns the bounds of both distances: the gate's, and from the second sync on of growth."""
        first = self._first.get(url, (np.inf, np.inf))
        limit = lambda most, x: min(most, max(FLOOR, GROWTH * x))
        return limit(self._max_d, first[0]), limit(self._max_dp, first[1])

    def _check_routes(self, url: str, answer: Answer) -> None:
        layers, experts = self._route_shape
        if layers and (answer.routes is None or answer.routes.shape[1:] != (layers, experts)):
            said = "none" if answer.routes is None else f"an array of {list(answer.routes.shape)}"
            raise Refused(
                f"{url} says {said} of the {experts} experts in {layers} layers, and engine.record_routes "
                "is set; start it with --enable-return-routed-experts, or unset it"
            )

    def _cause(self, said: Said, version: int, expected: Expected, is_adapter: bool) -> str:
        """Returns the likely cause: what else the log-probs agree with."""
        here = said.distance(expected.logps)[0]
        fits = lambda logps: said.distance(logps)[0] <= here / GROWTH
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
        base = ", or other weights below the adapter than this run's"
        return (
            "Likely keys of older weights in its prefix cache, another temperature, another number format, "
            f"another model or tokenizer{base if is_adapter else ''}"
        )


@functools.lru_cache(maxsize=8)
def _made(model, program, temperature):
    return jax.jit(
        functools.partial(_log_probs, model, program, temperature),
        compiler_options=program.compiler_options,
    )


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
        found.append(
            f"its model has {said.vocab_size} token ids and this run's {vocab_size}; serve the same model"
        )
    if said.max_length is not None and said.max_length < length:
        found.append(
            f"its sequences have at most {said.max_length} tokens, and this run's up to {length}; raise "
            "--max-model-len of vLLM, --context-length of SGLang"
        )
    if said.dtype not in (None, dtype):
        found.append(f"it computes in {said.dtype}, and engine.dtype is {dtype}; make them equal")
    if said.max_logprobs is not None and -1 < said.max_logprobs < top_n:
        found.append(
            f"it answers with at most {said.max_logprobs} likely tokens, and {top_n} are recorded; raise "
            "--max-logprobs"
        )
    return [f"the engine at {url}: {problem}" for problem in found]


def other_ids(kind: Kind, url: str, text: str, ids: Sequence[int]) -> list[str]:
    """Returns why an engine's tokenizer cannot be that of a run in which a prompt has these ids, a
    sentence; [] where it may be."""
    found = kind.tokenize(text)
    if found is None or found == [*ids]:
        return []
    return [
        f"the engine at {url}: its tokenizer gives the prompt {text[:60]!r} other ids than this run's; "
        "serve a folder with the same tokenizer.json"
    ]
