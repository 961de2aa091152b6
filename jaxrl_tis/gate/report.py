"""The gap between learner and sampler at the same weights: measured, judged and printed.

docs/gate.md explains the numbers; `python -m jaxrl_tis.gate` is the command.
"""

import contextlib
import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.build import Setup
from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.diagnostics import agreement
from jaxrl_tis.engine import sampling
from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.gate import ladder
from jaxrl_tis.learner.scoring import make_logits, make_routing
from jaxrl_tis.learner.setup import MAX_LOGITS
from jaxrl_tis.learner.probe import own_routes, route_metrics
from jaxrl_tis.learner.trainer import first_sequence
from jaxrl_tis.models import lora, overflow
from jaxrl_tis.rollouts.groups import request, sampling_params
from jaxrl_tis.rollouts.source import generate
from jaxrl_tis.runtime import processes
from jaxrl_tis.runtime.cli import MismatchError

MEASURES = ("d_mean", "d_p99", "d_max", "dp_max", "k3")  # those in the table, and with a bound
FLIPS = "mismatch/route_flip_"
AGREEMENT = ("inside_support", "kept_identical", "kept_jaccard")


def requests(setup: Setup, prompts: int, **changes: Any) -> list[Request]:
    """Makes the requests of groups of responses, or of episodes, to the first prompts of the config's
    task. `changes` are new values of fields of the config's sampling parameters."""
    config = setup.config
    params_of = sampling_params(
        config, setup.tokenizer, config.rollout.temperature, is_filtered=True
    )
    params_of = dataclasses.replace(params_of, **changes)
    with contextlib.closing(setup.prompter()) as prompter:
        records = next(
            Batches(
                config.task.name, config.task.params, batch_size=prompts, seed=config.seed,
                check=lambda source: prompter.checked(source, "training data"),
            )
        )
        return [
            request(config, f"gate/{i}/{record['id']}/{g}", prompter.ids(record), params_of, record)
            for i, record in enumerate(records) for g in range(config.rollout.group_size)
        ]


def sample(
    setup: Setup, params: Any, prompts: int, served: Any = None,
    heartbeat: Callable[[], None] = lambda: None, **changes: Any,
) -> list[Trajectory]:
    """Samples `requests` with the config's engine.

    Args:
      served: serving parameters; None makes them of the learner's `params`.
      heartbeat: called between engine calls.
      changes: see `requests`.
    """
    wanted = requests(setup, prompts, **changes)
    served = setup.engine.load(params) if served is None else served
    scheduler = setup.scheduler(setup.engine, served, 0, heartbeat=heartbeat)
    with contextlib.closing(scheduler):
        return generate(scheduler, wanted, heartbeat=heartbeat)


def check_prompts(setup: Setup, prompts: int) -> None:
    """Raises ValueError for a number of prompts that does not fill whole micro-batches."""
    count, size = prompts * setup.config.rollout.group_size, setup.config.train.microbatch_rows
    if prompts < 1 or (setup.training.packer is None and count % size):
        raise ValueError(
            f"{prompts} prompts of {setup.config.rollout.group_size} samples cannot be divided "
            f"into micro-batches of train.microbatch_rows = {size}; choose another --prompts"
        )


def support_agreement(
    setup: Setup, params: Any, rows: dict[str, np.ndarray]
) -> dict[str, float | None]:
    """Measures how far the token sets agree that the sampling filters keep, in the learner's and in the
    sampler's distribution.

    Returns shares of the sampled tokens under the keys AGREEMENT, see docs/gate.md. None without
    filters, without such a token, or where the logits of a micro-batch are more than MAX_LOGITS.
    """
    filters = ladder.sampling_filters(setup)
    micro, _ = setup.training.micro_batches(rows)
    num_logits = math.prod(micro["mask"].shape[1:]) * setup.model.vocab_size
    nothing = dict.fromkeys(AGREEMENT)
    if not filters.is_filtered or num_logits > MAX_LOGITS:
        return nothing
    logits = make_logits(setup.training.update_learner)
    counts = jax.jit(functools.partial(_agreeing, filters))
    parts = []
    for m in range(len(micro["mask"])):
        part = {name: x[m : m + 1] for name, x in micro.items()}
        parts.append(counts(logits(params, part)[0], {name: x[0] for name, x in part.items()}))
    total = jax.tree.map(lambda *x: float(sum(x)), *parts)
    return nothing | {name: hits / count for name, (hits, count) in total.items() if count}


def _agreeing(filters: sampling.SamplingParams, logits_btv: jax.Array, rows: dict) -> dict:
    """Returns name -> (number of tokens that agree, number of tokens) of one micro-batch."""
    tokens, mask, vocab = rows["tokens"], rows["mask"], logits_btv.shape[-1]
    flat = sampling.distribution(logits_btv.reshape(-1, vocab), filters)
    own = (flat > -np.inf).reshape(logits_btv.shape)

    count = jnp.sum(mask)
    outside = agreement.kept_metrics(own, own, tokens, mask)["mismatch/kept_token_outside"]
    agreement_sums = {"inside_support": ((1 - outside) * count, count)}
    if "kept" in rows:
        ids = rows["kept"]
        recorded = jnp.any(ids[..., None] == jnp.arange(vocab).reshape(1, 1, 1, -1), axis=-2)
        is_recorded = mask & jnp.any(ids >= 0, axis=-1)
        agreed = agreement.kept_metrics(own, recorded, tokens, is_recorded)
        count = jnp.sum(is_recorded)
        agreement_sums |= {
            name: (agreed[f"mismatch/{name}"] * count, count) for name in AGREEMENT[1:]
        }
    return agreement_sums


def route_flips(
    setup: Setup, params: Any, rows: dict[str, np.ndarray], logp_old: np.ndarray
) -> dict[str, float] | None:
    """Measures how often the routers of the learner by themselves choose other experts than the
    sampler recorded.

    Returns the metrics mismatch/route_flip_* of diagnostics/routes.py without their prefix, None
    without recorded routes.
    """
    if "routes_behav" not in rows:
        return None
    routing = make_routing(setup.training.update_learner)
    measured = jax.jit(functools.partial(route_metrics, setup.model.experts))(
        rows | {"logp_old": logp_old}, *own_routes(setup.training, routing, params, rows)
    )
    return {
        name.removeprefix(FLIPS): float(x)
        for name, x in measured.items() if name.startswith(FLIPS)
    }


def gap_report(
    setup: Setup, params: Any, trajectories: list[Trajectory], served: Any = None,
    heartbeat: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Returns the report on records of `setup.engine`, see docs/gate.md; arguments of `ladder.climb`."""
    rungs = ladder.climb(setup, params, trajectories, served, heartbeat)
    rows = setup.training.rows(trajectories)
    mask = rows["mask"]
    logp_old, logp_behav = rungs[0].before, rungs[-1].after
    total = ladder.gap(logp_old, logp_behav, mask)
    described: list[dict[str, Any]] = [
        {"cause": r.cause, "is_same": r.is_same}
        | ({} if r.is_same else ladder.gap(r.before, r.after, mask))
        for r in rungs
    ]
    differing = [r for r in described if not r["is_same"]]
    return {
        "config": setup.config.name,
        "sequences": len(trajectories),
        "tokens": int(mask.sum()),
        "total": total,
        "rungs": described,
        # max() keeps its first element where a comparison with NaN is false.
        "largest": max(
            differing, key=lambda r: r["d_mean"] if math.isfinite(r["d_mean"]) else math.inf
        )["cause"],
        **support_agreement(setup, params, rows),
        "route_flips": route_flips(setup, params, rows, logp_old),
        **judged(setup, params, rows, mask, logp_old, total),
    }


def judged(
    setup: Setup, params: Any, rows: dict[str, np.ndarray], mask: np.ndarray, logp_old: np.ndarray,
    total: dict[str, float],
) -> dict[str, Any]:
    """Returns the keys of a report that `failures` reads, beside "total".

    Args:
      rows: of a batch, with logp_behav [N,T]; mask: [N,T] the tokens that count.
      logp_old: [N,T] the learner's.
      total: measures of the two.
    """
    bounds = {n: bound for n, bound in _bounds(setup).items() if bound < math.inf}
    bad = {
        side: ~np.isfinite(logp) & mask
        for side, logp in (("learner", logp_old), ("sampler", rows["logp_behav"]))
    }
    return {
        "non_finite": {side: int(x.sum()) for side, x in bad.items()},
        "non_finite_cause": _cause(setup, params, rows, bad["learner"]),
        "budgets": bounds,
        "exceeded": [name for name in above(setup, total) if name in bounds],
    }


def _cause(
    setup: Setup, params: Any, rows: dict[str, np.ndarray], bad: np.ndarray
) -> str | None:
    """Returns where the learner's values stop being finite in the first sequence with a log-prob that
    is not; None without one."""
    if not bad.any():
        return None
    program = setup.training.learner.program
    return overflow.cause(params, setup.model, program, first_sequence(rows, bad))


def _bounds(setup: Setup) -> dict[str, float]:
    return {name: setup.config.gate[f"max_{name}"] for name in MEASURES}


def above(setup: Setup, measured: dict[str, float]) -> list[str]:
    """Returns the measures that are above their bound in config.gate, or not finite."""
    is_within = lambda name, bound: math.isfinite(measured[name]) and measured[name] <= bound
    return [name for name, bound in _bounds(setup).items() if not is_within(name, bound)]


def measure(
    setup: Setup, params: Any, prompts: int, heartbeat: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Returns the report on a fresh batch of so many prompts. ValueError where engines of others
    sample."""
    if setup.config.rollout.driver == "external":
        raise ValueError(
            "rollout.driver is 'external', and this gate samples with the engine of this program; "
            "measure each of rollout.engines by `python -m jaxrl_tis.gate --engine=http://host:port`"
        )
    check_prompts(setup, prompts)
    served: Any = setup.engine.load(params)
    trajectories = sample(setup, params, prompts, served=served, heartbeat=heartbeat)
    if lora.split(params)[1] is None:
        served = None  # frees a copy of all weights
    return gap_report(setup, params, trajectories, served, heartbeat)


def failures(report: dict[str, Any]) -> list[str]:
    """Returns the reasons why the gate fails, one sentence each; none when it passes."""
    counts, total, bounds = report["non_finite"], report["total"], report["budgets"]
    why = {"learner": report["non_finite_cause"]}
    return [
        f"{count} log-probs of the {side} are not finite" + (f": {why[side]}" if side in why else "")
        for side, count in counts.items() if count
    ] + [
        f"{name} {total[name]:.4g} is not within gate.max_{name} = {bounds[name]:.4g}"
        for name in report["exceeded"]
    ]


def to_json(report: dict[str, Any]) -> str:
    """Returns the report as JSON, with null for NaN and infinities."""
    strict = json.loads(json.dumps(report), parse_constant=lambda _: None)
    return json.dumps(strict, indent=1, allow_nan=False)


def numbers(measured: dict[str, Any]) -> str:
    """Returns the measures of a line of the table."""
    return "".join(f"{measured[name]:>z12.3g}" for name in MEASURES)


def table(report: dict[str, Any]) -> str:
    """Returns the report as text."""
    lines = [f"{'cause':<18}" + "".join(f"{name:>12}" for name in MEASURES)]
    for r in report["rungs"]:
        lines.append(f"{r['cause']:<18}" + (f"{'same':>12}" if r["is_same"] else numbers(r)))
    total = report["total"]
    lines += [f"{'total':<18}" + numbers(total), f"largest cause: {report['largest']}"]
    lines.append("  ".join(f"{n} {v:z.4g}" for n, v in total.items() if n not in MEASURES))
    if agreed := [f"{name} {report[name]:z.4f}" for name in AGREEMENT if report[name] is not None]:
        lines.append("  ".join(agreed))
    return "\n".join(lines + _flip_lines(report["route_flips"]) + failures(report))


def _flip_lines(flips: dict[str, float] | None) -> list[str]:
    """Returns the flip rates as text: of all routers, and of each layer with experts."""
    if flips is None:
        return []
    of = lambda names: "  ".join(f"{name} {flips[name]:z.4f}" for name in names)
    layers = [name for name in flips if re.fullmatch(r"layer_\d+", name)]
    return [f"route flips: {of(('token', 'router', 'expert'))}", f"route flips: {of(layers)}"]


def require(setup: Setup, params: Any, heartbeat: Callable[[], None] = lambda: None) -> None:
    """Prints the gap at the start of a run; raises MismatchError when the gate fails."""
    report = measure(setup, params, setup.config.rollout.prompts, heartbeat)
    processes.report(table(report))
    if found := failures(report):
        raise MismatchError(
            "before step 0 the gap of sampler and learner is above its bounds: "
            f"{', '.join(found)}; the largest part is {report['largest']}. Change the engine, or "
            "raise gate.max_*"
        )
