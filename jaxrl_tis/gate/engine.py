"""Measures the gap of a running engine to the learner at the weights of the config, and splits it.

The engine serves these weights already: nothing is written. Each row compares the log-probs of the
engine's own answers with the learner's log-probs of the same tokens. The rows are:

  run          all samples of all prompts, as a run samples them
  dtype        the same tokens; the learner computes in the engine's dtype
  raw          the same tokens; the learner's log-probs at temperature 1, which raw log-probs are
  unfiltered   one sample of each prompt, at temperature 1 and without filters
  cache_miss   one sample of each prompt, after a reset of the engine's prefix cache
  cache_hit    the same requests again
  alone        the same requests one at a time, after another reset where the engine allows it
  chunked      prompts longer than a chunk of the engine, one at a time

The rows from `unfiltered` on are new samples: compare each with `cache_miss`. A row that is not
measured names its reason. What the engine does not say is unknown.
"""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxrl_tis.build import Setup
from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.external import fleet
from jaxrl_tis.external.canary import other_ids, problems
from jaxrl_tis.external.client import EngineError
from jaxrl_tis.external.protocol import Answer, Facts, Kind, Numerics
from jaxrl_tis.external.scheduler import kept_sets, recorded_routes
from jaxrl_tis.external.vllm import SEEDS
from jaxrl_tis.gate import ladder, report
from jaxrl_tis.learner.batch_layout import forward_fields, trajectory_rows
from jaxrl_tis.runtime import addresses

DTYPES = ("float32", "bfloat16", "float16")  # in which the learner can compute
LONG_PROMPTS = 4
BEYOND = 48  # tokens of a long prompt after its first chunk
LONGEST = 10_000  # tokens of a long prompt, which the learner scores in a row of its own


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the split.

    Attributes:
      sequences: what the engine sampled; empty where the row is `is_same` or not measured.
      is_same: nothing differs from the row that it is compared with.
      why: why it is not measured; "" where it is.
    """

    name: str
    sequences: Sequence[Trajectory] = ()
    is_same: bool = False
    why: str = ""


def connect(url: str, kind: str, rollout: Any) -> Kind:
    """Returns the client of an engine that says what it is. ValueError where none answers so.

    Args:
      rollout: config.rollout, which has the timeout and the token's file.
    """
    if not addresses.is_url(url):
        raise ValueError(f"--engine={url} is no http address; give http://host:port")
    engine = fleet.connect(url, kind, rollout)
    try:
        engine.facts()  # before a model is loaded for it
    except EngineError as error:
        raise ValueError(f"--engine: {error}") from error
    return engine


def measure(setup: Setup, params: Any, prompts: int, url: str, kind: Kind) -> dict[str, Any]:
    """Returns the report on an engine that serves `params`, see docs/gate.md.

    Raises:
      ValueError: the engine cannot be reached, has another vocabulary, or does not answer as its
        kind does.
    """
    report.check_prompts(setup, prompts)
    found: list[str] = []
    try:
        facts, numerics = kind.facts(), kind.numerics()
        own, engine = setup.model.vocab_size, setup.engine
        found = problems(
            facts, url, own, engine.max_length, engine.config.dtype, engine.top_n
        )
        if facts.vocab_size not in (None, own):
            raise ValueError("; ".join(found))
        wanted = report.requests(setup, prompts)
        found += _of_tokenizer(setup, url, kind, wanted[0].prompt)
        sampler = Sampler(setup, url, kind, numerics.chunk)
        rows, long = sampler.rows(wanted, facts, numerics)
    except EngineError as error:
        raise ValueError("; ".join([*found, f"--engine: {error}"])) from error
    if len(sampler.versions) > 1:
        named = ", ".join(sorted(sampler.versions))
        found.append(
            f"the engine at {url}: its weights changed while it was measured, from version to "
            f"version: {named}; measure it while nothing trains it"
        )
    said = dataclasses.asdict(facts) | dataclasses.asdict(numerics)
    said["versions"] = sorted(sampler.versions) or None
    return {"config": setup.config.name, "engine": url, "facts": said, "problems": found} | _scored(
        setup, params, facts.dtype, rows, long
    )


def _of_tokenizer(setup: Setup, url: str, kind: Kind, prompt: np.ndarray) -> list[str]:
    """Returns why the engine's tokenizer cannot be this run's, a sentence; [] where it may be."""
    text = setup.tokenizer.decode(prompt)
    try:
        return other_ids(kind, url, text, [*map(int, setup.tokenizer.encode(text))])
    except EngineError as error:
        return [f"the engine at {url} does not tokenize: {error}"]


class Sampler:
    """Sends requests to an engine.

    Args:
      chunk: see `Numerics`.

    Attributes:
      versions: the names that answers gave to the weights of their tokens.
    """

    def __init__(self, setup: Setup, url: str, kind: Kind, chunk: int | None):
        self._setup, self._url, self._kind, self._chunk = setup, url, kind, chunk
        self.versions: set[str] = set()

    def rows(
        self, wanted: list[Request], facts: Facts, numerics: Numerics
    ) -> tuple[list[Row], Row]:
        """Samples all rows but `dtype`. Returns (rows of the run's length, `run` first; the row of
        long prompts)."""
        setup, rollout = self._setup, self._setup.config.rollout
        slots = setup.engine.slots
        one_each = wanted[:: rollout.group_size]
        self.reset()
        run = self.ask("run", wanted, slots)
        rows = [Row("run", run)]
        raw = [dataclasses.replace(t, temperature=1.0) for t in run]
        is_plain = rollout.temperature == 1
        rows.append(Row("raw", () if is_plain else raw, is_plain))
        is_plain = is_plain and not wanted[0].sampling.is_filtered
        plain = [_with(r, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) for r in one_each]
        same = Row("unfiltered", is_same=True)
        rows.append(same if is_plain else self._row("unfiltered", plain, slots))
        if why := _uncached(one_each, numerics) or self.reset():
            rows += [Row("cache_miss", why=why), Row("cache_hit", why=why)]
        else:
            rows += [self._row(name, one_each, slots) for name in ("cache_miss", "cache_hit")]
        self.reset()
        rows.append(self._row("alone", one_each, 1))
        if why := _unchunked(setup, facts, numerics):
            return rows, Row("chunked", why=why)
        assert numerics.chunk is not None
        long = long_prompts(one_each, numerics.chunk + BEYOND, LONG_PROMPTS)
        return rows, self._row("chunked", long, 1)

    def _row(self, name: str, requests: Sequence[Request], at_once: int) -> Row:
        """Samples a row without which the others stand."""
        try:
            return Row(name, self.ask(name, requests, at_once))
        except EngineError as error:
            return Row(name, why=str(error))

    def ask(self, name: str, requests: Sequence[Request], at_once: int) -> list[Trajectory]:
        """Samples requests, so many at once, each with its seed where the engine cuts no prompt."""
        # vLLM on a CPU ends where it cuts the prompt of a request with a seed.
        longest = at_once * max(len(r.prompt) for r in requests)
        has_seeds = not self._chunk or longest <= self._chunk

        def one(request: Request) -> Trajectory:
            seed = (request.seed + request.hash) % SEEDS if has_seeds else None
            answer = self._kind.generate(
                f"{name}/{request.id}", request.prompt, request.sampling, seed, 0, None
            )
            self.versions.update(version for version, _, _ in answer.spans or ())
            return self._record(request, answer)

        with ThreadPoolExecutor(at_once, "gate") as threads:
            return list(threads.map(one, requests))

    def _record(self, request: Request, answer: Answer) -> Trajectory:
        """Returns the record of an answer. EngineError where it is none of this model's."""
        tokens, vocab_size = answer.tokens, self._setup.model.vocab_size
        if not len(tokens) or answer.stop_reason == "abort":
            raise EngineError(
                f"{self._url} ended request {request.id} by {answer.stop_reason!r} after "
                f"{len(tokens)} tokens; measure it while nothing else stops its requests"
            )
        if tokens.max() >= vocab_size or tokens.min() < 0:
            raise EngineError(
                f"{self._url} sampled token {tokens.max()}, and this model has {vocab_size} token "
                "ids; serve the model of --config"
            )
        unknown = np.full(len(tokens), np.nan, np.float32)
        engine, routes = self._setup.engine, dict[str, Any]()
        if engine.route_shape[0]:
            routes = recorded_routes(request, answer, engine)
        return Trajectory(
            request.id, request.prompt, tokens, answer.logps, logp_raw=unknown, entropy=unknown,
            version=np.zeros(len(tokens), np.int32), stop_reason=answer.stop_reason,
            seed=request.seed, request=request.hash, quant_id="unknown",
            temperature=request.sampling.temperature,
            kept=kept_sets(request.id, answer, len(tokens), engine.num_kept), **routes,
        )

    def reset(self) -> str:
        """Empties the engine's prefix cache. Returns why it could not, "" where it did."""
        try:
            self._kind.reset_cache()
        except EngineError as error:
            return str(error)
        return ""


def _with(request: Request, **changes: Any) -> Request:
    sampling = dataclasses.replace(request.sampling, **changes)
    return dataclasses.replace(request, sampling=sampling)


def _uncached(requests: Sequence[Request], numerics: Numerics) -> str:
    """Returns why no prompt can be found in the prefix cache, "" where one may be."""
    longest = max(len(r.prompt) for r in requests)
    if numerics.block == 0:
        return "the engine has no prefix cache"
    if numerics.block is not None and longest <= numerics.block:
        return f"no prompt is longer than a block of the prefix cache, {numerics.block} tokens"
    return ""


def _unchunked(setup: Setup, facts: Facts, numerics: Numerics) -> str:
    """Returns why no prompt can be cut into chunks, "" where one can."""
    chunk = numerics.chunk
    if not chunk:
        unknown = "the engine does not say in which chunks it reads prompts"
        return unknown if chunk is None else "the engine cuts no prompts into chunks"
    length = chunk + BEYOND
    total = length + setup.config.rollout.max_new_tokens
    if facts.max_length is not None and total > facts.max_length:
        return (
            f"{total} tokens, more than a chunk of {chunk}, exceed its longest sequence, "
            f"{facts.max_length}"
        )
    if length > LONGEST:
        return f"prompts of more than {LONGEST} tokens are not scored, and a chunk has {chunk}"
    try:
        setup.model.check_length(total)
    except ValueError as error:
        return str(error)
    return ""


def long_prompts(requests: Sequence[Request], length: int, count: int) -> list[Request]:
    """Makes `count` requests with prompts of this length, out of all prompts one after the other."""
    text = np.concatenate([r.prompt for r in requests])
    starts = np.cumsum([0, *(len(r.prompt) for r in requests)])
    return [
        dataclasses.replace(
            requests[0], id=f"gate/long/{i}",
            prompt=np.resize(np.roll(text, -starts[i % len(requests)]), length),
        )
        for i in range(count)
    ]


def _scored(
    setup: Setup, params: Any, dtype: str | None, rows: list[Row], long: Row
) -> dict[str, Any]:
    """Returns the keys of the report that the learner's log-probs decide. One program scores all
    rows of the run's length.

    Args:
      dtype: of the engine.
    """
    settings = ladder.learner_settings(setup)
    batch = _padded(
        setup.training.rows([t for row in rows for t in row.sequences]),
        setup.config.train.microbatch_rows,
    )
    owner = np.repeat(np.arange(len(rows)), [len(row.sequences) for row in rows])
    owner = np.pad(owner, (0, len(batch["mask"]) - len(owner)), constant_values=-1)
    of = lambda index: batch["mask"] & (owner == index)[:, None]
    micro, flat = setup.training.micro_batches(batch)
    logp = flat(ladder.score(setup, settings, params, micro))
    described = [
        _described(row, ladder.gap(logp, batch["logp_behav"], of(i)) if row.sequences else {})
        for i, row in enumerate(rows)
    ]
    total = ladder.gap(logp, batch["logp_behav"], of(0))
    described.insert(1, _dtype_row(setup, params, dtype, batch, of(0)))
    described.append(_described(long, _long_gap(setup, params, long.sequences)))
    return {
        "sequences": len(rows[0].sequences), "tokens": int(of(0).sum()), "total": total,
        "rows": described, **report.judged(setup, params, batch, of(0), logp, total),
    }


def _described(row: Row, measured: dict[str, float]) -> dict[str, Any]:
    return {"row": row.name, "is_same": row.is_same, "not_measured": row.why or None} | measured


def _padded(rows: dict[str, np.ndarray], multiple: int) -> dict[str, np.ndarray]:
    """Returns rows with more of them at the end, without a token in the mask, up to a multiple."""
    count = len(rows["mask"])
    index = np.pad(np.arange(count), (0, -count % multiple))
    rows = {name: x[index] for name, x in rows.items()}
    rows["mask"][count:] = False
    return rows


def _dtype_row(
    setup: Setup, params: Any, dtype: str | None, batch: dict[str, np.ndarray], mask: np.ndarray
) -> dict[str, Any]:
    """Measures the row `dtype` at the tokens [N,T] of the row `run`."""
    settings = ladder.learner_settings(setup)
    if dtype not in DTYPES:
        said = "the engine does not say its dtype" if dtype is None else f"its dtype is {dtype}"
        return _described(Row("dtype", why=said), {})
    is_exact = dtype == "float32"
    changed = dataclasses.replace(
        settings, dtype=dtype, norm_dtype=settings.norm_dtype if is_exact else dtype,
        excess_precision=is_exact and settings.excess_precision,
    )
    if changed == settings:
        return _described(Row("dtype", is_same=True), {})
    micro, flat = setup.training.micro_batches(batch, mask.max(axis=1))
    logp = flat(ladder.score(setup, changed, params, micro))
    return _described(Row("dtype"), ladder.gap(logp, batch["logp_behav"], mask))


def _long_gap(setup: Setup, params: Any, sequences: Sequence[Trajectory]) -> dict[str, float]:
    """Measures long sequences in rows of their own length; {} without any."""
    if not sequences:
        return {}
    layout = setup.training.layout
    longest = max(len(t.prompt) + len(t.tokens) for t in sequences)
    batch = _padded(trajectory_rows([*sequences], layout.whole_row(longest)), layout.shards)
    micro = {
        name: x.reshape(-1, layout.shards, *x.shape[1:])
        for name, x in forward_fields(batch).items()
    }
    settings = dataclasses.replace(
        ladder.learner_settings(setup), rows=layout.shards, replays=False
    )
    unpacked = dataclasses.replace(setup, training=dataclasses.replace(setup.training, packer=None))
    logp = ladder.score(unpacked, settings, params, layout.put_batch(micro))
    return ladder.gap(logp.reshape(batch["mask"].shape), batch["logp_behav"], batch["mask"])


def failures(found: dict[str, Any]) -> list[str]:
    """Returns the reasons why the gate fails, one sentence each: those for which a run refuses the
    engine, then measures above their bound."""
    return [*found["problems"], *report.failures(found)]


def table(found: dict[str, Any]) -> str:
    """Returns the report as text."""
    said = (f"{n} {'unknown' if x is None else _text(x)}" for n, x in found["facts"].items())
    lines = [f"engine {found['engine']}: {', '.join(said)}"]
    lines.append(f"{'row':<18}" + "".join(f"{name:>12}" for name in report.MEASURES))
    for r in found["rows"]:
        text = f"{'same':>12}" if r["is_same"] else f"  not measured: {r['not_measured']}"
        lines.append(f"{r['row']:<18}" + (report.numbers(r) if report.MEASURES[0] in r else text))
    others = ((n, v) for n, v in found["total"].items() if n not in report.MEASURES)
    lines.append("run: " + "  ".join(f"{n} {v:z.4g}" for n, v in others))
    return "\n".join(lines + failures(found))


def _text(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)
