"""Makes the figures of docs/experiments.md: writes NAME.md and the pictures of NAME again.

A figure of trained runs reads NAME.jsonl, the runs of `configs/fig_NAME.py`; with --runs it writes this
file before. Other figures read the runs of those, or compute what they show for minutes.

Examples:

    python -m experiments.figures rescue
    python -m experiments.figures staleness docs/experiments
"""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from configs import fig_lora, fig_lora_smollm2
from experiments import (
    budget, causes, contexts, drafter, engines, fusion, lag_law, length_sweep, lora, mismatch,
    parallelism, parts, predictor, records, referee, referee_factors, referee_objectives, reuse,
    router_noise, router_noise_trained, routing_penalty, threshold, turns,
)
from experiments.parts import (
    ARM, SEEDS, Arms, Figure, Interval, Picture, compared, curves, gain, interval, mean_of,
    of, of_arms, ratio, split, to_base,
)
from experiments.records import Run
from jaxrl_tis.record import intervals
from jaxrl_tis.report.plots import COLORS, palette
from jaxrl_tis.runtime import cli

K1, ACCURACY = "actor/ppo_kl", "eval/sampled_accuracy"
reward = of("reward/mean")


# Rescue and critic: Figures 2, 4, 5 and 6 of Yao et al. (2025)

BYPASS = ("PPO-IS", "centering")  # their k1 is of the sampler, and holds the gap


def uncorrected(arm: str) -> str:
    """Returns the arm that an arm is compared with, its own name without one."""
    return {"int8-TIS-2": "int8", "no-gap": "no-gap", "int8": "int8"}.get(arm, "none")


def negative_share(run: Run) -> float:
    """Returns the share of blocks whose k1 estimate of a KL divergence is below 0."""
    return float(np.mean(run.series[K1] < 0))


def verdict(gain: Interval, beside: Interval | None, is_collapse: bool = False) -> str:
    """Returns the verdict of the protocol (docs/experiments.md) on an arm.

    Args:
      gain: gain of the arm, with interval.
      beside: paired difference to the uncorrected arm; None if there is no comparison.
      is_collapse: whether the uncorrected arm collapses.
    """
    words = ["collapses"] if gain[2] < 0 else ["improves"] if gain[1] > 0 else ["neither"]
    if beside is not None and beside[1] > 0:
        words.append("rescues" if is_collapse and gain[2] >= 0 else "better than none")
    if beside is not None and beside[2] < 0:
        words.append("worse than none")
    return ", ".join(words)


def k1_below_0(arm: str, arms: Arms) -> str:
    return "–" if arm in BYPASS else f"{np.mean([negative_share(run) for run in arms[arm]]):.2f}"


def judged(arm: str, arms: Arms) -> str:
    of_gain = lambda arm: intervals.of_mean([gain(run) for run in arms[arm]])
    base = uncorrected(arm)
    if base == arm or base not in arms:
        return verdict(of_gain(arm), None)
    return verdict(of_gain(arm), parts.beside(arms[arm], arms[base]), of_gain(base)[2] < 0)


def rescue_panel(name: str, title: str, unit: str) -> parts.Panel:
    """Makes a panel of six arms, and of int8 without an injected gap in grey."""
    shown = ("no-gap", "none", "PPO-IS", "vanilla-IS", "TIS-2", "centering")
    is_change = name == ACCURACY
    draw = curves(name, {arm: arm for arm in shown}, is_change, title=title, ylabel=unit)

    def panel(axes, arms):
        draw(axes, {arm: own for arm, own in arms.items() if not (name == K1 and arm in BYPASS)})
        int8, label = arms.get("int8", ()), "int8, no injected gap"
        parts.curve(axes, int8, name, label, parts.GREY, is_change, linestyle="--")
        if name == K1:
            parts.zero(axes)
            axes.set_yscale("symlog", linthresh=1e-3)

    return panel


STORY = {
    "no-gap": "no gap", "none": "gap, uncorrected", "PPO-IS": "gap inside PPO's ratio",
    "TIS-2": "gap, truncated weights (TIS)",
}


RESCUE = Figure(
    tables=(
        of_arms(
            ARM, SEEDS, ("gain in sampled accuracy", mean_of(gain, "+.3f")),
            ("difference to uncorrected", to_base(uncorrected)),
            ("final sampler reward", mean_of(reward)),
            ("largest dp in 8 steps", mean_of(of("training/rollout_probs_diff_max"))),
            ("entropy", mean_of(of("actor/entropy"))), ("share of k1 below 0", k1_below_0),
            ("length", mean_of(of("response_length/mean"))), ("verdict", judged),
        ),
        compared((
            *(("gain", gain, arm, other) for arm, other in (
                ("TIS-2", "TIS-8"), ("TIS-2", "vanilla-IS"), ("TIS-2", "centering"), ("seq-TIS", "TIS-2"),
                ("seq-MIS", "MIS"), ("no-gap", "TIS-2"),
            )),
            ("sampler's reward", reward, "none", "TIS-2"),
            ("entropy", of("actor/entropy"), "none", "TIS-2"),
            ("share of k1 below 0", negative_share, "none", "TIS-2"),
            ("response length", of("response_length/mean"), "none", "TIS-2"),
        )),
    ),
    pictures={
        "rescue": Picture((14, 7), [
            rescue_panel(ACCURACY, "Learner, held-out accuracy", "change, fraction correct"),
            rescue_panel("reward/mean", "Sampler, training reward", "fraction correct"),
            rescue_panel(
                "training/rollout_probs_diff_max", "Largest difference in 8 steps", "|p_sampler − p_learner|"
            ),
            rescue_panel("actor/entropy", "Entropy of the learner", "nats per token"),
            rescue_panel(K1, "k1 of old to new policy", "nats per token"),
            rescue_panel("response_length/mean", "Response length", "tokens"),
        ], num_rows=2, has_legend_below=True),
        "collapse": Picture((10, 3.6), [
            curves(
                "reward/mean", STORY, title="What the log shows: the sampler's reward",
                ylabel="fraction correct",
            ),
            curves(
                ACCURACY, STORY, is_change=True, has_zero=True, title="What was learned: held-out accuracy",
                ylabel="change, fraction correct",
            ),
        ], has_legend_below=True),
    },
    needed=("none",),
)


# Staleness: prosperity before collapse, and the ESS at each lag

OBJECTIVES, LAGS = ("M2PO", "PPO", "no-clip"), (0, 4, 16, 48)
# Over the second half of a run, when its samples are as old as they get.
lag_of = of("training/off_policy/trajectory_staleness/mean", 0.5)
ess_of = of("mismatch/ess_seq", 0.5)


def fall(run: Run) -> float:
    """Returns the largest held-out accuracy of a run minus the accuracy of its last evaluations."""
    return float(run.series[ACCURACY].max() - run.series[ACCURACY][-parts.LAST :].mean())


def early(run: Run) -> float:
    """Returns the gain at the second to fourth evaluation, before a stale run can fall."""
    values = run.series[ACCURACY]
    return float(values[1 : 1 + parts.LAST].mean() - values[0])


def power(runs: Sequence[Run]) -> Interval | None:
    """Fits ESS = c lag^x to the stale runs of each seed, by least squares of the logarithms.

    Returns x and its 95 % interval over seeds; None without a seed of two lags.
    """
    slopes = []
    for seed in sorted({r.seed for r in runs}):
        lags, ess = (
            np.array([measure(r) for r in runs if r.seed == seed]) for measure in (lag_of, ess_of)
        )
        is_stale = lags > 0
        if len(set(lags[is_stale])) > 1:
            slopes.append(np.polyfit(np.log(lags[is_stale]), np.log(ess[is_stale]), 1)[0])
    return intervals.of_mean(slopes) if slopes else None


def bounds(arms: Arms) -> str:
    """Returns the table of each objective: the largest lag that improves, the smallest lag that does
    not, the ESS of both, and the exponent of `power`."""
    lines = []
    for name in dict.fromkeys(split(arm)[0] for arm in arms):
        own = {arm: runs for arm, runs in arms.items() if split(arm)[0] == name}
        improves = {arm: intervals.of_mean([gain(r) for r in own[arm]])[1] > 0 for arm in own}
        described = {arm: f"{split(arm)[1]:g}, {mean_of(ess_of)(arm, own)}" for arm in own}
        good, bad = ([described[arm] for arm in own if improves[arm] == is_good] for is_good in (True, False))
        law = interval(power(parts.every(own)), ".2f")
        lines.append([name, good[-1] if good else "–", bad[0] if bad else "–", law])
    header = ["objective", "largest lag that improves, ESS", "smallest lag that does not, ESS", "x of ESS ~ lag^x"]
    return parts.rows(header, lines)


def lag_panel(lag: int) -> parts.Panel:
    """Makes the panel of the accuracy of each objective at a lag; the first has the legend."""
    return curves(
        ACCURACY, {f"{name}-{lag}": name for name in OBJECTIVES}, is_change=True, has_zero=True,
        has_legend=lag == LAGS[0], title=f"{lag} batches behind", ylabel="change of held-out accuracy",
    )


def ess_panel(axes, arms):
    """Draws the gain of each run by its ESS."""
    for name, color in zip(OBJECTIVES, palette(len(OBJECTIVES)), strict=True):
        parts.scatter(axes, parts.every(arms, name), ess_of, gain, color=color, s=16)
    parts.zero(axes)
    axes.set(title="Gain by sample size", xlabel="sequence ESS, share of the batch", ylabel="gain")


STALENESS = Figure(
    tables=(
        of_arms(
            ("objective", lambda arm, _: split(arm)[0]), ("bound", lambda arm, _: f"{split(arm)[1]:g}"),
            SEEDS, ("lag", mean_of(lag_of, ".1f")), ("sequence ESS", mean_of(ess_of)),
            ("early gain", mean_of(early, "+.3f")), ("gain in sampled accuracy", mean_of(gain, "+.3f")),
            ("drop from its best", mean_of(fall)),
        ),
        compared([
            (label, measure, f"{name}-{lag}", f"PPO-{lag}")
            for lag in LAGS for name in ("no-clip", "M2PO")
            for label, measure in (("early gain", early), ("gain", gain))
        ]),
        bounds,
    ),
    pictures={"staleness": Picture((16, 3.6), [*map(lag_panel, LAGS), ess_panel], sharey=True)},
    order=split,
)


# Number formats of sampler and learner

gap_of = of("mismatch/engine/log_ratio_abs_mean", 1.0)


def ratios(arms: Arms) -> str:
    """Returns the table of gaps divided by those of another arm: sizes in the hypotheses, and the effect
    of a learner that rounds like its sampler."""
    pairs = (
        ("W8A8-both", "W8A8"), ("QaRL", "W8A8"), ("Jet-RL", "FP8"), ("float16", "bfloat16"),
        ("float32-float16", "float32-bfloat16"), ("bfloat16", "float32-bfloat16"),
        ("float16", "float32-float16"),
    )
    lines = [
        [f"{arm} / {other}", interval(ratio(arms[arm], arms[other], gap_of), ".3g")]
        for arm, other in pairs if arm in arms and other in arms
    ]
    return parts.rows(["ratio of gaps", "mean |log ratio|"], lines)


def gap_panel(axes, arms):
    """Draws the gap of each run, a line for each arm."""
    for place, own in enumerate(arms.values()):
        axes.scatter([gap_of(run) for run in own], [place] * len(own), color=COLORS[0], s=16)
    axes.set(title="Gap", xlabel="mean |log ratio|, nats", xscale="log")
    axes.set_yticks(range(len(arms)), list(arms))
    axes.invert_yaxis()


def gain_panel(axes, arms):
    """Draws the gain of each arm with its interval."""
    for place, own in enumerate(arms.values()):
        mean, low, high = intervals.of_mean([gain(run) for run in own])
        axes.errorbar(mean, place, xerr=[[mean - low], [high - mean]], color=COLORS[1], fmt="o")
    axes.set(title="Gain in held-out accuracy", xlabel="sampled accuracy, end less start")


FORMATS = Figure(
    tables=(
        of_arms(
            ARM, SEEDS, ("mean |log ratio|", mean_of(gap_of, ".2e")),
            ("largest dp", mean_of(of("training/rollout_probs_diff_max", 1.0), ".2e")),
            ("k3", mean_of(of("rollout_corr/k3_kl", 1.0), ".2e")),
            ("gain in sampled accuracy", mean_of(gain, "+.3f")), ("difference to float32", to_base("float32")),
        ),
        ratios,
        compared([("gain", gain, arm, "W8A8") for arm in ("W8A8-TIS-2", "QuRL", "W8A8-both", "QaRL")]),
    ),
    pictures={"formats": Picture((10, 4), [gap_panel, gain_panel], sharey=True)},
    needed=("float32",),
)


# Routing: none, r2 and r3 by the number of minibatches of a batch. The name of an arm is the routing and
# this number, after "noise-" where the sampler's routers have noise.


def group_of(arm: str) -> tuple[str, float]:
    """Returns the prefix of an arm's name and its number of minibatches: "noise-r2-4" is
    ("noise-", 4)."""
    name, count = split(arm)
    return name.removesuffix(name.rpartition("-")[2]), count


def spread(measure: parts.Measure, form: str) -> parts.Column:
    """Makes a column of mean and range: "0.45 (0.44 to 0.46)"."""

    def cell(arm, arms):
        values = [measure(run) for run in arms[arm]]
        mean, low, high = (format(x, form) for x in (sum(values) / len(values), min(values), max(values)))
        return f"{mean} ({low} to {high})"

    return cell


ROUTING = Figure(
    tables=(
        of_arms(
            ARM, SEEDS, ("sampled accuracy at the end", spread(lambda run: run.series[ACCURACY][-1], ".3f")),
            ("gain", spread(gain, "+.3f")), ("k3", spread(of("rollout_corr/k3_kl", 1.0), ".1e")),
            ("tokens that flip", spread(of("mismatch/route_flip_token", 1.0), ".3f")),
            ("routers that flip", spread(of("mismatch/route_flip_router", 1.0), ".3f")),
        ),
        compared([
            ("gain", gain, f"{prefix}{one}-{count}", f"{prefix}{other}-{count}")
            for prefix in ("", "noise-") for count in (1, 2, 4, 8)
            for one, other in (("r2", "none"), ("r3", "none"), ("r3", "r2"))
        ]),
    ),
    seeds="0,1", order=lambda arm: (group_of(arm), arm),
)


LONG = Figure(
    tables=(of_arms(
        ARM, SEEDS, ("reward, first 80 steps", mean_of(lambda run: float(run.series["reward/mean"][:10].mean()))),
        ("reward at the end", mean_of(reward)), ("gain in sampled accuracy", mean_of(gain, "+.3f")),
        ("largest gradient norm", mean_of(lambda run: float(run.series["actor/grad_norm"].max()))),
    ),),
    seeds="2,3",
)


TRAINED = {
    "rescue": RESCUE,
    "critic": dataclasses.replace(RESCUE, pictures={"critic": RESCUE.pictures["rescue"]}),
    "threshold": threshold.FIGURE, "staleness": STALENESS, "formats": FORMATS, "causes": causes.FIGURE,
    "routing": ROUTING, "fusion": fusion.FIGURE, "drafter": drafter.FIGURE, "replay": reuse.FIGURE,
    "lora": lora.figure("lora", fig_lora),
    "lora_smollm2": lora.figure("lora_smollm2", fig_lora_smollm2, lora.recorded_runs),
    "long": LONG, "mismatch": mismatch.FIGURE, "lag": lag_law.FIGURE,
}
STORED = {  # read runs of others
    "contexts": contexts.FIGURE, "engines": engines.FIGURE, "predictor": predictor.FIGURE, "referee": referee.FIGURE,
    "referee_factors": referee_factors.FIGURE, "referee_objectives": referee_objectives.FIGURE,
}
COMPUTED = {
    "length_sweep": length_sweep.FIGURE,
    "parallelism": parallelism.FIGURE, "budget": budget.FIGURE, "router_noise": router_noise.FIGURE,
    "router_noise_trained": router_noise_trained.FIGURE, "routing_penalty": routing_penalty.FIGURE,
    "turns": turns.FIGURE,
}
FIGURES = TRAINED | COMPUTED | STORED


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see the top of the file."""
    parser = cli.parser("experiments.figures", "Makes a figure of docs/experiments.md.", __doc__)
    names = f"{', '.join(FIGURES)}; without a name: lists them with the seeds of their runs"
    parser.add_argument("name", nargs="?", choices=FIGURES, metavar="NAME", help=names)
    parser.add_argument("folder", nargs="?", default=parts.FOLDER, help="default: %(default)s")
    parser.add_argument("--runs", help="folder of a sweep, whose runs FOLDER/NAME.jsonl shall hold")
    args = parser.parse_args(argv)
    if args.name is None:
        for name, figure in FIGURES.items():
            print(name, figure.seeds if name in TRAINED else "computed" if name in COMPUTED else "stored")
        return
    folder = pathlib.Path(args.folder)
    if args.runs:
        records.gather(args.runs, folder / f"{args.name}.jsonl")
    FIGURES[args.name].write(folder, args.name)


if __name__ == "__main__":
    cli.run(main)
