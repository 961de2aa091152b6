"""What replay costs and saves, by the runs of configs/fig_replay.py."""

from configs import fig_replay
from experiments import parts
from experiments.parts import ARM, SEEDS, Arms, Figure, Interval, Picture, gain, mean_of, of
from experiments.records import Run
from jaxrl_tis.record import intervals

ACCURACY = "eval/sampled_accuracy"
FRESH = "fresh"


def uses(arm: str) -> int:
    """Returns the number of batches that a group is in, on average."""
    return 1 if arm == FRESH else int(arm.split("-")[1])


def room(arm: str) -> float:
    """Returns the groups that the buffer holds: the new ones of as many batches as they may be old."""
    groups = fig_replay.get_config().rollout.prompts
    return int(arm.split("-")[2]) * groups / uses(arm)


def early_gain(run: Run, share: float) -> float:
    """Returns the gain after a share of the updates, mean of the last three evaluations until then."""
    steps, accuracy = run.steps(ACCURACY), run.series[ACCURACY]
    until = accuracy[(steps > steps[0]) & (steps <= share * steps[-1])]
    return float(until[-parts.LAST :].mean() - accuracy[0])


def to_samples(arm: str, arms: Arms) -> Interval | None:
    """Returns the paired difference of the gain to `fresh` after as many samples."""
    fresh = {run.seed: early_gain(run, 1 / uses(arm)) for run in arms.get(FRESH, ())}
    both = [gain(run) - fresh[run.seed] for run in arms[arm] if run.seed in fresh]
    return intervals.of_mean(both) if both else None


def panel(axes, arms: Arms) -> None:
    """Draws the mean accuracy of each arm against its updates' worth of new samples."""
    for arm, runs in arms.items():
        steps = runs[0].steps(ACCURACY) / uses(arm)
        axes.plot(steps, sum(run.series[ACCURACY] for run in runs) / len(runs), label=arm)
    axes.set(xlabel="samples, in batches", ylabel="sampled accuracy", title="Accuracy by samples")
    axes.legend()


FIGURE = Figure(
    tables=(
        parts.of_arms(
            ARM, SEEDS, ("new samples", lambda arm, _: f"{1 / uses(arm):.2f}"),
            ("groups in the buffer", lambda arm, _: "–" if arm == FRESH else f"{room(arm):g}"),
            ("age, versions", mean_of(of("training/off_policy/trajectory_staleness/mean", 0.5), ".1f")),
            ("drift, nats", mean_of(of("mismatch/staleness/log_ratio_abs_mean", 0.5))),
            ("norm of the gradient", mean_of(of("actor/grad_norm", 0.5))),
            ("entropy", mean_of(of("actor/entropy"))),
            ("gain in sampled accuracy", mean_of(gain, "+.3f")),
            ("to `fresh` after as many updates", parts.to_base(FRESH)),
            (
                "after as many samples",
                lambda arm, arms: "–" if arm == FRESH else parts.interval(to_samples(arm, arms)),
            ),
        ),
    ),
    pictures={"replay": Picture((7, 4), [panel])},
    needed=(FRESH,), seeds="0,1,2,3", order=[*fig_replay.sweep()].index,
)
