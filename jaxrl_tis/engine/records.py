"""Requests to the engine, and trajectories: the records of finished sequences."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_tis.fields import DRAWN, FIELDS

MAX_BIAS = 16  # tokens that a request may add something to
MAX_STOP_IDS = 32
NEVER = 2**31 - 1  # evict_step of a key that stayed
OUTCOMES = ("", "done", "max_turns", "overlong", "failed", "timeout")  # of an episode
JOINS = ("append", "realign", "fork", "replace")
NO_DRAFTER = -1  # drafter_version of a token without a verified draft
OF_DRAFTS = {"drafter_version": ("int32", NO_DRAFTER), "accepted": ("bool", False)}  # dtypes, paddings
PER_TOKEN = (*DRAWN, "version", "kv_version", "segment", "mask", "turn", *OF_DRAFTS)  # fields of a record
MAX_INT = 2**31 - 1
FILLED: Any = None  # the default of a field that __post_init__ fills
# Programs take smaller float32 for 0, so that larger ones than 1 / TINY have no reciprocal.
TINY, MAX_FLOAT = 2.0**-126, float(np.finfo(np.float32).max)


def _is_float(x) -> bool:
    return x == 0 or TINY <= abs(x) <= MAX_FLOAT


def _is_int(x, least: int = 0) -> bool:
    return isinstance(x, int | np.integer) and least <= int(x) <= MAX_INT


def token_ids(ids: Sequence[int] | np.ndarray, owner: str, what: str) -> np.ndarray:
    """Returns token ids as int32 [n]. ValueError, which names the owner and the ids, if they are
    none."""
    ids = np.asarray(ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"{owner}: the {what} is {ids.dtype} of shape {ids.shape}; give a sequence of token ids"
        )
    if ids.size and not 0 <= ids.min() <= ids.max() <= MAX_INT:
        raise ValueError(
            f"{owner}: {what} ids from {ids.min()} to {ids.max()}; token ids are 0 to {MAX_INT}"
        )
    return np.ascontiguousarray(ids, np.int32)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
      temperature: 0 is greedy. Filters act on softmax(logits / temperature), in this order:
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: of these, keep the smallest set with at least this mass; 1 keeps all.
      min_p: of these, keep tokens at least min_p times as likely as the most likely one.
      stop_ids: a sampled token among these ends the sequence (and belongs to it).
      stop_strings: the sequence ends with the token that completes one of these in its text.
      max_tokens: upper bound of sampled tokens.
      min_tokens: before this many tokens no stop id can be sampled and no stop string ends the
        sequence. A stop string that is complete by then never ends it.
      repetition_penalty: positive logits of tokens in the prompt or sampled before are divided by
        it, negative ones multiplied; 1 changes nothing.
      presence_penalty: subtracted from the logits of tokens sampled before.
      frequency_penalty: subtracted from them as often as they were sampled.
      logit_bias: ((token, bias added to its logit), ...) of at most MAX_BIAS tokens.
      prompt_logprobs: record the log-probs of the prompt's own tokens.
      alpha: weight of the teacher's logits, 1 - alpha that of the policy's; before all of the above.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    max_tokens: int = 16
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    prompt_logprobs: bool = False
    alpha: float = 0.0

    def __post_init__(self):
        ids, biases = [token for token, _ in self.logit_bias], [b for _, b in self.logit_bias]
        has_reciprocal = lambda x: TINY <= x <= 1 / TINY
        is_text = lambda x: isinstance(x, str) and len(x) > 0
        number = f"0 or a float32 of a magnitude from {TINY:.3g} to {MAX_FLOAT:.3g}"
        bounds = {
            "temperature": (
                self.temperature == 0 or has_reciprocal(self.temperature),
                f"0 or from {TINY:.3g} to {1 / TINY:.3g}",
            ),
            "top_k": (_is_int(self.top_k), f"an integer from 0 to {MAX_INT}"),
            "top_p": (TINY <= self.top_p <= 1, f"from {TINY:.3g} to 1"),
            "min_p": (
                self.min_p == 0 or TINY <= self.min_p < 1, f"0 or at least {TINY:.3g} and below 1"
            ),
            "stop_ids": (all(map(_is_int, self.stop_ids)), "token ids"),
            "stop_strings": (
                not isinstance(self.stop_strings, str)  # type: ignore[unreachable]
                and all(map(is_text, self.stop_strings)),
                "a tuple of texts, none of them empty",
            ),
            "max_tokens": (_is_int(self.max_tokens, 1), f"an integer from 1 to {MAX_INT}"),
            "min_tokens": (
                _is_int(self.min_tokens) and self.min_tokens <= self.max_tokens,
                f"an integer from 0 to max_tokens={self.max_tokens}",
            ),
            "alpha": (0 <= self.alpha <= 1, "from 0 to 1"),
            "prompt_logprobs": (isinstance(self.prompt_logprobs, bool), "true or false"),
            "repetition_penalty": (
                has_reciprocal(self.repetition_penalty), f"from {TINY:.3g} to {1 / TINY:.3g}"
            ),
            "presence_penalty": (_is_float(self.presence_penalty), number),
            "frequency_penalty": (_is_float(self.frequency_penalty), number),
            "logit_bias": (
                len(set(ids)) == len(ids) <= MAX_BIAS and all(map(_is_int, ids))
                and all(map(_is_float, biases)),
                f"of at most {MAX_BIAS} different token ids, each {number}",
            ),
        }
        bad = [
            f"{name}={getattr(self, name)!r} must be {rule}"
            for name, (is_met, rule) in bounds.items() if not is_met
        ]
        if bad:
            raise ValueError(f"sampling parameters out of range: {'; '.join(bad)}")

    @property
    def is_filtered(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def is_penalised(self) -> bool:
        """Whether penalties, a bias or min_tokens change the model's logits."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        bars_stops = self.min_tokens > 0 and bool(self.stop_ids)
        return any(penalties) or bool(self.logit_bias) or bars_stops


def _no(dtype, dims: int = 1):
    return dataclasses.field(default_factory=lambda: np.zeros((0,) * dims, dtype))


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """The record of one sampled sequence. Arrays [n] have one entry per token after the prompt.

    The policy sampled these tokens, except the ones that an environment gave between two turns.
    Given tokens have mask False, log-probs and entropy 0, the padding of fields.FIELDS in wider
    fields, no draft, and the version, kv_version and segment of the last token before them.

    Attributes:
      id, prompt, seed, temperature: of the request; request: its hash.
      tokens: int32.
      logp_behav: float32 log-prob under the sampling distribution: penalised, filtered,
        renormalised.
      logp_raw: float32 log-prob under the model's own logits at the temperature (1 if greedy).
      entropy: float32 nats, of the sampling distribution.
      version: int32, weights that sampled the token.
      stop_reason: "stop", "length" or "abort".
      quant_id: the number format of the weights.
      mask: bool, True: the policy chose the token.
      turn: int32, number of the turn, from 0. A turn begins with the tokens that an environment
        gives before the policy samples. By default one turn in which the policy chose every token.
      kv_version: int32, weights that filled the cache when the token's segment began. All keys
        that it attended to are of these weights or newer ones.
      segment: int32, how often the sequence's cache had been rebuilt before the token.
      drafter_version: int32, version of the model of engine.drafter whose draft for the token was
        verified: that of the policy when the drafter's weights were made, 0 for those that it started
        with. -1 without a verified draft; empty if the record has none.
      accepted: bool, the token equals this draft; as long as drafter_version.
      logits: [n,V] float32 log-probs of the sampling distribution; V = 0 unless recorded.
      evict_step: [prompt + n] int32: a query at position t saw position s iff
        s <= t < evict_step[s]; empty if nothing was evicted. [prompt + n, G] with G groups of layers
        that see other keys.
      top_ids, top_logps: [n,k] int32 and float32, the k likeliest tokens of the sampling
        distribution; -1 and -inf where fewer were possible; k = 0 unless recorded.
      kept: [n,K] int32 tokens with positive probability, ascending, padded with -1. A row of -1
        alone: there were more than K. K = 0 unless recorded.
      logp_student: [n,1] float32, where a teacher's logits are mixed in, see `protocol.Draw`; else [n,0].
      prompt_logps: [prompt] float32, if requested: the log-prob of each prompt token under the
        model's own logits at temperature 1 and the weights that first filled the cache; NaN for
        the first token. Empty if the sequence ended before its prompt was read.
      routes: [m,L,k] uint8, or uint16 above 256 experts: the experts of input token t of prompt and
        response, in each of the L layers with experts, in the order of falling score. It is the
        choice of the first pass over the token after which the next token was sampled. The last
        sampled token and given tokens after it have no row, so m is prompt + n - 1 where a sampled
        token is the last. If a stop string cut the record, the sampler may have read its last
        token, and there is one row more. 0 rows unless recorded, and 0 before a token was sampled.
      rerouted: [2] int32: how often later passes over tokens chose experts for them again in some
        layer, and how often they chose another set. Empty unless routes are recorded.
      outcome: how the episode ended, one of OUTCOMES. "": no environment, or the episode goes on.
        The stop reason of "done" is "stop", that of "max_turns" and "overlong" "length". "overlong"
        is an episode with a turn that was cut at a limit of tokens, or without room for another.
      turn_rewards: [turns] float32, the environment's reward of each turn, NaN where it gave none.
        Empty without an environment.
      metrics: of the environment, by name.
      joins: one of JOINS for each observation that a turn followed: how the row would go on if the
        chat template rendered the conversation anew. "append": as it does. "realign": the template
        changes the end of the answer. "fork": it changes more. "replace": the answer ended with the
        first token of a message of another role, and the row has the right one in its place.
        Empty without an environment.
      error: why the environment or the harness failed, for outcome "failed" or "timeout"; else "".
      fork: the number of the row in its session, in the order of the first calls; 0 without a
        harness.
      forks: the other rows of the session, each a record with the session's id, its own prompt and
        without a reward.
    """

    id: str
    prompt: np.ndarray
    tokens: np.ndarray
    logp_behav: np.ndarray
    logp_raw: np.ndarray
    entropy: np.ndarray
    version: np.ndarray
    stop_reason: str
    seed: int
    request: int
    quant_id: str
    temperature: float
    mask: np.ndarray = FILLED
    turn: np.ndarray = FILLED
    kv_version: np.ndarray = _no(np.int32)
    segment: np.ndarray = _no(np.int32)
    drafter_version: np.ndarray = _no(np.int32)
    accepted: np.ndarray = _no(bool)
    logits: np.ndarray = _no(np.float32, 2)
    evict_step: np.ndarray = _no(np.int32)
    top_ids: np.ndarray = _no(np.int32, 2)
    top_logps: np.ndarray = _no(np.float32, 2)
    kept: np.ndarray = _no(np.int32, 2)
    logp_student: np.ndarray = _no(np.float32, 2)
    prompt_logps: np.ndarray = _no(np.float32)
    routes: np.ndarray = _no(np.uint8, 3)
    rerouted: np.ndarray = _no(np.int32)
    outcome: str = ""
    turn_rewards: np.ndarray = _no(np.float32)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    joins: tuple[str, ...] = ()
    error: str = ""
    fork: int = 0
    forks: tuple["Trajectory", ...] = ()

    def __post_init__(self):
        count = len(self.tokens)
        if self.mask is None:
            object.__setattr__(self, "mask", np.ones(count, bool))  # type: ignore[unreachable]
        if self.turn is None:
            object.__setattr__(self, "turn", np.zeros(count, np.int32))  # type: ignore[unreachable]

    @property
    def num_turns(self) -> int:
        return int(self.turn.max(initial=-1)) + 1

    @property
    def num_given(self) -> int:
        """The number of tokens after the last one that the policy sampled."""
        sampled = np.flatnonzero(self.mask)
        return len(self.mask) - (int(sampled[-1]) + 1 if len(sampled) else 0)


def draft_fields(trajectory: Trajectory) -> dict[str, np.ndarray]:
    """Returns drafter_version and accepted of every token [n], also of a record without drafts."""
    count = len(trajectory.tokens)
    empty = {name: np.full(count, value, dtype) for name, (dtype, value) in OF_DRAFTS.items()}
    return {n: x if len(own := getattr(trajectory, n)) == 0 else own for n, x in empty.items()}


def extended(trajectory: Trajectory, tokens: Sequence[int] | np.ndarray) -> Trajectory:
    """Returns the record with tokens of an environment after it, to be continued as a
    `Request.partial` of the same request.

    Args:
      trajectory: at least one token was sampled.
      tokens: at least one token id. They begin the next turn, with the values of given tokens, see
        Trajectory.

    Raises:
      ValueError: one of them has no token, or these are no token ids.
    """
    owner = f"request {trajectory.id}"
    given = token_ids(tokens, owner, "extension")
    if not len(given):
        raise ValueError(f"{owner}: the extension is empty; give at least one token")
    if not len(trajectory.tokens):
        raise ValueError(f"{owner}: the record to extend has no tokens; add its request again")
    count = len(given)
    paddings = {field.record: field.padding for field in FIELDS.values() if field.record}
    values = {
        name: np.full((count, *getattr(trajectory, name).shape[1:]), paddings.get(name, 0))
        for name in DRAWN
    }
    values |= {
        name: np.repeat(getattr(trajectory, name)[-1:], count)
        for name in ("version", "kv_version", "segment")
    }
    values |= {
        "tokens": given, "mask": np.zeros(count, bool),
        "turn": np.full(count, trajectory.turn[-1] + 1),
    }
    if len(trajectory.drafter_version):
        values |= {name: np.full(count, value) for name, (_, value) in OF_DRAFTS.items()}
    old = {name: getattr(trajectory, name) for name in values}
    joined: dict[str, Any] = {
        n: np.concatenate([x, values[n].astype(x.dtype)]) for n, x in old.items()
    }
    return dataclasses.replace(trajectory, stop_reason="abort", **joined)


def cut(trajectory: Trajectory, count: int) -> Trajectory:
    """Returns the record of the first `count` tokens after the prompt."""
    fields = {name: getattr(trajectory, name)[:count] for name in PER_TOKEN}
    routes = trajectory.routes[: max(len(trajectory.prompt) + count - 1, 0)]
    return dataclasses.replace(trajectory, routes=routes, **fields)


@dataclasses.dataclass(frozen=True)
class Request:
    """A request to sample one sequence.

    Attributes:
      id: unique among live requests; seeds the random keys together with `seed`.
      prompt: any sequence of token ids, stored as int32.
      seed: only its low 32 bits count.
      sampling: sampling parameters.
      partial: the aborted or extended trajectory of the same request, to be continued. All its
        tokens count towards sampling.max_tokens and min_tokens.
      start: tokens of `partial` in which no stop string can begin, because the request did not ask
        for them.
      example: of the data, which an environment is made of, for a request that is an episode. The
        engine does not read it.
    """

    id: str
    prompt: np.ndarray
    seed: int
    sampling: SamplingParams
    partial: Trajectory | None = None
    start: int = 0
    example: Mapping[str, Any] | None = None

    def __post_init__(self):
        if not isinstance(self.id, str):
            raise ValueError(f"request id {self.id!r} is a {type(self.id).__name__}; give a text")
        try:
            self.id.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"request id {self.id!r} holds a lone surrogate") from error
        if not isinstance(self.seed, int):
            raise ValueError(f"request {self.id}: seed {self.seed!r}; give an int")
        prompt = token_ids(self.prompt, f"request {self.id}", "prompt")
        object.__setattr__(self, "prompt", prompt)

    @property
    def hash(self) -> int:
        """The id as 32 bits; the sampling key is fold_in(fold_in(seed, hash), position)."""
        return int.from_bytes(hashlib.blake2b(self.id.encode(), digest_size=4).digest(), "little")
