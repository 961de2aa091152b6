"""Held-out reward and accuracy: greedy, sampled, and what the commonest answer alone would score.

An answer is right from a reward of eval.threshold on. An answer whose reward failed is left out of
every mean, and counted. An episode that ended at a limit of turns or tokens without a reward is wrong;
it is left out of the mean reward alone.

As a command it measures a checkpoint of a run, the newest by default, a Hugging Face folder, a .gguf
file or a model of the hub on a config's held-out task, with the learner's numerics.

Examples:

    python -m jaxrl_tis.evaluate runs/first --config=configs/quickstart.py
    python -m jaxrl_tis.evaluate models/mine --config=configs/smollm2_135m.py --samples=8
"""

import collections
import contextlib
import json
import math
from collections.abc import Callable
from typing import Any

import ml_collections
import numpy as np
from absl import flags

from jaxrl_tis import cli_flags
from jaxrl_tis.build import Setup, build
from jaxrl_tis.data import tasks
from jaxrl_tis.data.rewards import RewardWorker, worker
from jaxrl_tis.engine.records import OUTCOMES, Trajectory
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.learner.state import as_begun, read_params, with_adapter
from jaxrl_tis.record import intervals
from jaxrl_tis.record.progress import Progress
from jaxrl_tis.rollouts import live
from jaxrl_tis.rollouts.episodes import episode_metrics
from jaxrl_tis.rollouts.groups import Sample, request, sampling_params, scores
from jaxrl_tis.rollouts.prompts import GENERATED, Prompter, lacks_answer
from jaxrl_tis.rollouts.source import generate
from jaxrl_tis.runtime import cli

LIMITS = ("max_turns", "overlong")  # outcomes of episodes that their environments did not end


class Evaluator:
    """Answers the first eval.prompts examples of the held-out split, each twice; `digest` tells
    that split from another, `left_out` is how many of its examples cannot be used, `prompts` are their
    token ids, `greedy` the greedy answers of the last `run`.

    Raises ValueError when the split has fewer examples.
    """

    def __init__(
        self, config: ml_collections.ConfigDict, prompter: Prompter,
        heartbeat: Callable[[], None] = lambda: None,
    ):
        self._config, self._prompter = config, prompter
        self.greedy: list[Sample] = []
        params = {**config.task.params, **config.eval.params}
        reject = lacks_answer(config)
        limit = config.eval.prompts if config.task.on_bad_example == "error" else GENERATED
        checked = prompter.checked(
            tasks.make(config.task.name, params), "held-out data", reject, limit, heartbeat
        )
        if len(checked.good) < config.eval.prompts:
            raise ValueError(
                f"the held-out split has {len(checked.good)} examples and config.eval.prompts is "
                f"{config.eval.prompts}; set it to at most {len(checked.good)}"
            )
        self._examples = [checked.source[i] for i in checked.good[: config.eval.prompts]]
        self.digest, self.left_out = checked.digest(), checked.left_out
        self.prompts = [prompter.ids(example) for example in self._examples]

    def run(
        self, scheduler: Scheduler, rewards: RewardWorker, step: int, progress,
        heartbeat: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Returns mean rewards, accuracies, the number of prompts, how many of the answers have a
        failed reward, and the metrics of episodes. A mean of no reward is left out, and so is the
        accuracy of the commonest answer where the data have none."""
        constant = self._constant(rewards)
        trajectories = self._answers(scheduler, step, 1, progress, heartbeat)
        texts = self._texts(trajectories)
        both = [scores(rewards, texts[i::2], self._examples, trajectories[i::2]) for i in (0, 1)]
        greedy, sampled = ([scored.score for scored in of_kind] for of_kind in both)
        self.greedy = [
            Sample(trajectory, example, text, score, score, group=i)
            for i, (trajectory, example, text, score) in enumerate(
                zip(trajectories[0::2], self._examples, texts[0::2], greedy, strict=True)
            )
        ]
        at_limit = np.array([is_at_limit(t) for t in trajectories])
        kinds: dict[str, tuple[Any, Any]] = {
            "greedy": (greedy, at_limit[0::2]), "sampled": (sampled, at_limit[1::2]),
            "constant": (constant, False),
        }
        means, failed = {}, 0
        for name, (found, is_wrong) in kinds.items():
            of_kind = np.array(found, np.float64)
            right = _known(are_right(of_kind, is_wrong, self._config.eval.threshold))
            if len(right):
                means[f"eval/{name}_accuracy"] = right.mean()
            if name == "constant":
                continue
            failed += len(found) - len(right)
            if len(right):
                means[f"eval/{name}_n"] = len(right)
            if len(known := _known(of_kind)):
                means[f"eval/{name}_reward"] = known.mean()
        means |= {f"eval/{name}": value for name, value in episode_metrics(trajectories).items()}
        return means | {"eval/failed_rewards": failed, "eval/n": len(self._examples)}

    def _constant(self, rewards: RewardWorker) -> list[float]:
        """Returns the scores of the commonest answer in the place of each; [] where the data have no
        answers, or an environment or a harness gives the rewards."""
        has_turns = self._config.task.environment or self._config.rollout.harness
        if has_turns or not all("answer" in example for example in self._examples):
            return []
        answers = collections.Counter(example["answer"] for example in self._examples)
        commonest = answers.most_common(1)[0][0]
        return rewards.score([commonest] * len(self._examples), self._examples)

    def scores(
        self, scheduler: Scheduler, rewards: RewardWorker, samples: int, progress
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rewards of the answers [N,1+samples], the greedy one first, and whether they
        are episodes that `is_at_limit`."""
        trajectories = self._answers(scheduler, 0, samples, progress, lambda: None)
        examples = [example for example in self._examples for _ in range(1 + samples)]
        scored = scores(rewards, self._texts(trajectories), examples, trajectories)
        shape = len(self._examples), 1 + samples
        at_limit = np.array([is_at_limit(t) for t in trajectories]).reshape(shape)
        return np.array([x.score for x in scored]).reshape(shape), at_limit

    def _answers(self, scheduler, step: int, samples: int, progress, heartbeat) -> list[Trajectory]:
        """Draws a greedy and sampled answers to each prompt; those of a prompt share one
        prefill."""
        tokenizer = self._prompter.tokenizer
        sampling = {
            name: sampling_params(self._config, tokenizer, temperature, is_filtered=False)
            for name, temperature in (("greedy", 0.0), ("sampled", 1.0))
        }
        draws = [("greedy", "greedy"), ("sampled", "sampled")]
        draws += [(f"sampled{j}", "sampled") for j in range(1, samples)]
        requests = [
            request(
                self._config, f"eval/{step}/{name}/{i}", ids, sampling[kind], self._examples[i]
            )
            for i, ids in enumerate(self.prompts)
            for name, kind in draws
        ]
        return generate(scheduler, requests, progress.update, heartbeat)

    def _texts(self, trajectories: list[Trajectory]) -> list[str]:
        return [self._prompter.tokenizer.decode(t.tokens) for t in trajectories]


def is_at_limit(trajectory: Trajectory) -> bool:
    """Whether a limit of turns or tokens ended an episode, and not its environment."""
    return trajectory.outcome in LIMITS


def _known(values: np.ndarray) -> np.ndarray:
    return values[~np.isnan(values)]


def are_right(rewards: np.ndarray, at_limit: np.ndarray | bool, threshold: float) -> np.ndarray:
    """Returns 1 for rewards of at least the threshold, 0 for others and where an episode without a
    reward is `at_limit`, and NaN where a reward failed."""
    wrong = np.where(at_limit, 0.0, np.nan)
    return np.where(np.isnan(rewards), wrong, rewards >= threshold)


def summary(values: dict[str, float]) -> str:
    """Says the metrics of `Evaluator.run` in a line."""
    shown = lambda name: f"{values[name]:z.3f}" if name in values else "unknown"
    accuracy, reward = (
        f"{shown(f'eval/greedy_{of}')} greedy, {shown(f'eval/sampled_{of}')} sampled"
        for of in ("accuracy", "reward")
    )
    counts = {x: int(values.get(f"eval/episodes/{x}", 0)) for x in OUTCOMES[1:]}
    limits = ", ".join(f"{name} {counts[name]}" for name in LIMITS if counts[name])
    share = sum(counts[name] for name in LIMITS) / max(sum(counts.values()), 1)
    at_limit = f"; {100 * share:.1f} % of the episodes ended at a limit ({limits})" if limits else ""
    return f"held-out accuracy {accuracy}; reward {reward}{at_limit}"


def pass_at(k: int, right: np.ndarray) -> np.ndarray:
    """Returns, for each prompt [N], the chance that one of k of its draws is right.

    The unbiased estimate 1 - C(n-c, k) / C(n, k) with c of n draws right (arXiv:2107.03374).

    Args:
      right: [N,n] bool, n at least k.
    """
    n = right.shape[1]
    return np.array([1 - math.comb(n - c, k) / math.comb(n, k) for c in right.sum(axis=1).tolist()])


def measure(
    setup: Setup, path: str, samples: int, step: int | None = None, adapter: str | None = None
) -> dict[str, Any]:
    """Returns {"n", "samples", "failed", "at_limit", "greedy", "sampled", "pass_at_<k>", ...,
    "greedy_reward", "sampled_reward"}; k are the powers of 2 up to `samples`.

    Each accuracy is {"mean", "low", "high"} with its 95 % Wilson interval over prompts, each mean
    reward with Student's, None where one prompt has none. Answers whose reward `failed` are left out:
    the mean of a prompt is over the others, and pass@k over prompts with at least k of them.
    "at_limit" counts the episodes that a limit ended, see `is_at_limit`.

    Raises ValueError where no answer is left; further see `state.read_params` and `Evaluator`.
    """
    config = setup.config
    total = config.eval.prompts * (1 + samples)
    if config.rollout.harness:
        live.check_files(total)
    prompter = setup.prompter()
    evaluator = Evaluator(config, prompter)
    read = lambda: read_params(setup.training, path, step)
    params = with_adapter(setup.training, read, adapter)
    if config.rollout.driver == "external":
        setup.fleet.watch(evaluator.prompts)
    scheduler = setup.evaluating(params, 0)
    with (
        contextlib.closing(prompter), contextlib.closing(scheduler),
        worker(config.reward) as rewards,
        Progress(total, "answers") as progress,
    ):
        found, at_limit = evaluator.scores(scheduler, rewards, samples, progress)
    right = are_right(found, at_limit, config.eval.threshold)
    drawn = [_known(row) for row in right[:, 1:]]
    shares: dict[str, Any] = {
        "greedy": _known(right[:, 0]), "sampled": [x.mean() for x in drawn if len(x)],
    }
    for k in (2**i for i in range(samples.bit_length())):
        several = [x[None] > 0 for x in drawn if len(x) >= k]
        shares[f"pass_at_{k}"] = [pass_at(k, x)[0] for x in several]
    given = [_known(row) for row in found[:, 1:]]
    means: dict[str, Any] = {
        "greedy_reward": _known(found[:, 0]), "sampled_reward": [x.mean() for x in given if len(x)],
    }
    measured = {name: _named(intervals.of_shares(x)) for name, x in shares.items() if len(x)}
    measured |= {name: _named(intervals.of_mean(x)) for name, x in means.items() if len(x)}
    if not measured:
        raise ValueError(
            f"the reward {config.reward.name!r} failed on every answer; the last error is "
            f"{rewards.last_error}"
        )
    counts = {"failed": int(np.isnan(right).sum()), "at_limit": int(at_limit.sum())}
    return {"n": len(found), "samples": samples, **counts, **measured}


def _named(interval: tuple[float, float, float]) -> dict[str, float | None]:
    """Names the parts of an interval; a bound that there is none of, as of one value, is None."""
    names = "mean", "low", "high"
    return {name: x if math.isfinite(x) else None for name, x in zip(names, interval, strict=True)}


def main() -> None:
    """Command line: see the top of the file."""
    config = cli_flags.define_config()
    samples = flags.DEFINE_integer("samples", 8, "Answers sampled for each prompt.", lower_bound=1)
    step = flags.DEFINE_integer("step", None, "Of the checkpoint; default: the newest.")
    path = flags.DEFINE_string("json", None, "File to write the numbers to.")
    adapter = flags.DEFINE_string("adapter", None, "Folder of a PEFT adapter of the model.")

    def run(model: str) -> None:
        cli.check_folder("json", path.value)
        setup = build(as_begun(config.value, model))
        measured = measure(setup, model, samples.value, step.value, adapter.value)
        failed = f", {measured['failed']} answers without a reward" if measured["failed"] else ""
        limits = f", {measured['at_limit']} episodes ended at a limit" if measured["at_limit"] else ""
        print(f"{model}: {measured['n']} prompts, {samples.value} samples each{failed}{limits}")
        for name in list(measured)[4:]:
            mean, low, high = measured[name].values()
            if name.endswith("_reward"):
                interval = "" if low is None else f"  [{low:z.4g}, {high:z.4g}]"
                print(f"{name:14} {mean:z.4g}{interval}")
            else:
                print(f"{name:14} {100 * mean:5.1f} %  [{100 * low:.1f}, {100 * high:.1f}]")
        if path.value:
            with open(path.value, "w", encoding="utf-8") as file:
                json.dump(measured, file, indent=2, allow_nan=False)

    cli_flags.run(run, required=["config"], words=["WORKDIR|MODEL"])


if __name__ == "__main__":
    main()
