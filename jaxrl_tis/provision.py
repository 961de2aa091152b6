"""How many samplers and how much staleness a run needs so that its learner never waits.

Times come from the record of a synchronous run, or from options. A learner that trains on a batch every
T seconds is never idle under two conditions:

1. Samplers generate a batch within T seconds, less the time that a weight sync stops them.
2. Batch v + S, which may start when version v is published, arrives S updates later: S T is at least
   the time of the weight sync plus the time to generate the batch up to its last reward.

This is the overlap of ECHO-2 (arXiv:2602.02192), derived here without ECHO-2's formula. A record has the
times of one sampler: with fewer slots than samples, more samplers also shorten a batch, and S is an upper
bound. Its whole sync counts as a pause. With the record of a run ahead, or with --drift, the command also
names the lag at which the effective sample size of the ratios falls below --bound.

Examples:

    python -m jaxrl_tis.provision runs/first
    python -m jaxrl_tis.provision --samples=512 --train_s=40 --rate=1.6 --batch_s=130 --sync_s=4 --png=wait.png
"""

import math
import os
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib import figure

from jaxrl_tis.record import metrics
from jaxrl_tis.record.provenance import saved_config
from jaxrl_tis.report.plots import STYLE, palette
from jaxrl_tis.rollouts import replay, schedules
from jaxrl_tis.runtime import cli

LEARNER, BATCH = ("update", "score", "data"), ("rollout", "reward")  # phases of a synchronous step
OPTIONS = {
    "samples": "samples of a batch",
    "train_s": "seconds of an update, with its scoring",
    "rate": "samples per second of one sampler",
    "batch_s": "seconds from the start of a batch to its last reward: those of the longest sample if all begin at once",
    "sync_s": "seconds from the end of an update until samplers have the weights",
    "pause_s": "seconds of a sync in which a sampler stands still",
    "drift": "mean squared log-ratio of a token between two consecutive versions, nats squared",
    "tokens": "tokens of a sample",
}


def least_workers(samples: float, train_s: float, rate: float, pause_s: float = 0.0) -> int:
    """Returns the smallest number of samplers that keeps the learner busy; arguments as in OPTIONS.

    Raises:
      ValueError: a number is out of range, or the sync takes the whole update.
    """
    _check(samples=samples, train_s=train_s, rate=rate)
    if not 0 <= pause_s < train_s:
        raise ValueError(
            f"a weight sync of {pause_s} s stops a sampler during an update of {train_s} s, and no "
            "number of samplers is enough; sync weights less often, or give the true --pause_s"
        )
    return max(_ceil(samples / (rate * (train_s - pause_s))), 1)


def least_staleness(train_s: float, sync_s: float, batch_s: float) -> int:
    """Returns the smallest staleness bound, in versions, at which the learner never waits; arguments as in
    OPTIONS."""
    _check(train_s=train_s)
    if sync_s < 0 or batch_s < 0:
        raise ValueError(f"sync_s is {sync_s} and batch_s {batch_s}; a time is 0 or more")
    return _ceil((sync_s + batch_s) / train_s)


def wait(workers: int, staleness: int, times: Mapping[str, float]) -> float:
    """Returns the share of its time that the learner waits, by both conditions."""
    train_s = times["train_s"]
    generated = times["samples"] / (workers * times["rate"]) + times["pause_s"]
    arrived = (train_s + times["sync_s"] + times["batch_s"]) / (staleness + 1)
    return 1.0 - train_s / max(train_s, generated, arrived)


def lag_law(bound: float, drift: float, tokens: float = 1, growth: float = 1.0) -> float:
    """Returns the largest lag, in whole versions, at which the ESS share of the ratios is at least
    `bound`; inf without drift.

    The log-ratio of a token after one version is assumed normal with variance s^2. The ratio has mean 1
    under the sampling policy, so the log-ratio has mean -s^2 / 2 and mean square s^2 + s^4 / 4.
    Variances of n independent tokens add, and k versions multiply them by k^growth. The effective share
    (E w)^2 / E w^2 of lognormal weights is then exp(-n k^growth s^2) (Kong 1992).

    Args:
      bound: in (0, 1).
      drift: see OPTIONS.
      tokens: number of factors of the ratio: 1 for token weights, the length for sequence weights.
      growth: 1 if updates have independent directions, 2 if they have the same direction.
    """
    if not 0 < bound < 1:
        raise ValueError(f"bound is {bound}; give a share of the samples between 0 and 1")
    if drift < 0 or tokens < 1 or growth <= 0:
        raise ValueError(
            f"drift {drift} must be 0 or more, tokens {tokens} at least 1, growth {growth} above 0"
        )
    variance = tokens * 2 * (math.sqrt(1 + drift) - 1)
    if variance == 0:
        return math.inf
    return float(math.floor((-math.log(bound) / variance) ** (1 / growth) * (1 + 1e-12)))


def recorded(workdir: str | os.PathLike) -> dict[str, float]:
    """Returns what the record of a run says of OPTIONS: times of a synchronous run, the drift of one ahead.

    Raises:
      FileNotFoundError: there is no such run.
      ValueError: it has no step.
    """
    config = saved_config(workdir)
    trained = [r for r in metrics.read(workdir) if r["phase"] == "train"]
    steps = trained[1:] or trained  # the first one compiles
    if config is None or not steps:
        raise ValueError(f"{workdir} has no step yet; give another run, or numbers")
    numbers = lambda name: [r[name] for r in steps if math.isfinite(r.get(name, math.nan))]
    mean = lambda name: float(np.median(numbers(name)))
    found, rollout = {}, config["rollout"]
    if numbers("response_length/mean"):
        found["tokens"] = mean("response_length/mean")
    if drifts := [square for r in steps if (square := replay.drift(r)) is not None]:
        found["drift"] = float(np.median(drifts))
    if schedules.parse(rollout["schedule"]).is_sync:
        phases = (*LEARNER, *BATCH, "sync")
        if missing := [name for name in phases if not numbers(f"time/{name}_s")]:
            raise ValueError(
                f"{workdir} has no time/{missing[0]}_s, as with metrics.record = 'compact'; give another run, "
                "or numbers"
            )
        times = {name: mean(f"time/{name}_s") for name in phases}
        found["samples"] = rollout["prompts"] * rollout["group_size"]
        found["train_s"] = sum(times[name] for name in LEARNER)
        found["batch_s"] = sum(times[name] for name in BATCH)
        found["rate"] = found["samples"] / times["rollout"]
        found["sync_s"] = found["pause_s"] = times["sync"]
    return found


def table(times: Mapping[str, float], workers: int, staleness: int) -> list[str]:
    """Returns lines of the learner's waiting by samplers and batches ahead."""
    ahead = _shown(staleness, 0)
    head = "samplers  learner waits, by batches ahead: " + "".join(f"{s:>6}" for s in ahead)
    return [head] + [
        f"{w:8}  {'':31}" + "".join(f"{wait(w, s, times):6.0%}" for s in ahead) for w in _shown(workers, 1)
    ]


def _shown(needed: int, first: int) -> list[int]:
    """Returns at most ten numbers from the first to one more than needed."""
    return sorted({first, needed + 1} | {-(-needed * k // 8) for k in range(1, 9)})


def draw(path: str, times: Mapping[str, float], workers: int, staleness: int) -> None:
    """Draws the table as a PNG: a curve for each number of samplers."""
    with matplotlib.rc_context(STYLE):
        page = figure.Figure(figsize=(6, 3.8))
        axes, ahead, samplers = page.subplots(), _shown(staleness, 0), _shown(workers, 1)
        for color, w in zip(palette(len(samplers)), samplers, strict=True):
            shares = [wait(w, s, times) for s in ahead]
            axes.plot(ahead, shares, color=color, marker="o", label=f"{w} samplers")
        axes.set(xlabel="batches ahead", ylabel="share of time that the learner waits", ylim=(0, None))
        axes.legend()
        page.savefig(path, dpi=100)


def answer(times: Mapping[str, float], bound: float, png: str = "") -> list[str]:
    """Returns the lines of the answer to what is known. ValueError for too little, or a number out of
    range."""
    lines = []
    if "train_s" in times:
        known = {"sync_s": 0.0, "pause_s": 0.0} | dict(times)
        if missing := [name for name in ("samples", "rate", "batch_s") if name not in known]:
            raise ValueError(f"--{' and --'.join(missing)} also must be known")
        workers = least_workers(known["samples"], known["train_s"], known["rate"], known["pause_s"])
        staleness = least_staleness(known["train_s"], known["sync_s"], known["batch_s"])
        lines += [", ".join(f"{name} {known[name]:.3g}" for name in OPTIONS if name in known)]
        lines += table(known, workers, staleness)
        lines += [f"no wait from {workers} samplers and areal(staleness={staleness}) on"]
        if png:
            draw(png, known, workers, staleness)
            lines += [f"wrote {png}"]
    if "drift" in times:
        of = lambda tokens: f"{lag_law(bound, times['drift'], tokens):.0f}"
        lines += [
            f"ESS of token weights at least {bound:g}: up to {of(1)} versions behind; of sequence weights over "
            f"{times.get('tokens', 1):.0f} tokens: {of(times.get('tokens', 1))}"
        ]
    if not lines:
        raise ValueError(
            "neither times nor a drift are known; name a synchronous run or one ahead, or give --train_s or --drift"
        )
    return lines


def _check(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; give a finite number above 0")


def _ceil(x: float) -> int:
    """Rounds up, and ignores floating-point error."""
    return math.ceil(x * (1 - 1e-12))


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see the top of the file."""
    parser = cli.parser("jaxrl_tis.provision", "Samplers and staleness without waiting.", __doc__)
    parser.add_argument("workdir", nargs="?", help="of a run whose record gives what no option does")
    for name, text in OPTIONS.items():
        parser.add_argument(f"--{name}", type=float, help=text)
    parser.add_argument("--bound", type=float, default=0.5, help="least ESS share, default %(default)s")
    parser.add_argument("--png", default="", help="picture to write")
    args = parser.parse_args(argv)
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    known = (recorded(args.workdir) if args.workdir else {}) | given
    print("\n".join(answer(known, args.bound, args.png)))


if __name__ == "__main__":
    cli.run(main)
