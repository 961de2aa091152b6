"""Held-out accuracy: greedy, sampled, and what the commonest answer alone would score."""

import collections

import ml_collections

from jaxrl_tis import rollouts
from jaxrl_tis.data.rewards import RewardWorker
from jaxrl_tis.data.tasks import TASKS
from jaxrl_tis.engine.engine import Request
from jaxrl_tis.engine.scheduler import Scheduler


class Evaluator:
    """The first eval.prompts examples of the held-out split, each answered twice.

    Raises ValueError when the split has fewer examples.
    """

    def __init__(self, config: ml_collections.ConfigDict, prompter: rollouts.Prompter):
        self._config, self._prompter = config, prompter
        params = {**config.task.params, **config.eval.params}
        source = TASKS[config.task.name](**params)
        if len(source) < config.eval.prompts:
            raise ValueError(
                f"the held-out split has {len(source)} examples, config.eval.prompts is "
                f"{config.eval.prompts}"
            )
        self._records = [source[i] for i in range(config.eval.prompts)]
        self._prompts = [prompter.ids(record) for record in self._records]

    def run(
        self, scheduler: Scheduler, rewards: RewardWorker, step: int, progress
    ) -> dict[str, float]:
        """Accuracies (share of answers with score >= 1) and the number of prompts."""
        answers = collections.Counter(record["answer"] for record in self._records)
        commonest = answers.most_common(1)[0][0]
        constant = rewards.score([commonest] * len(self._records), self._records)
        return {
            "eval/greedy_accuracy": self._accuracy(scheduler, rewards, step, 0.0, progress),
            "eval/sampled_accuracy": self._accuracy(scheduler, rewards, step, 1.0, progress),
            "eval/constant_accuracy": _share(constant),
            "eval/n": len(self._records),
        }

    def _accuracy(self, scheduler, rewards, step, temperature, progress) -> float:
        sampling = rollouts.sampling_params(
            self._config, self._prompter.tokenizer, temperature, is_filtered=False
        )
        requests = [
            Request(f"eval/{step}/{temperature}/{i}", ids, self._config.seed, sampling)
            for i, ids in enumerate(self._prompts)
        ]
        trajectories = rollouts.run(scheduler, requests, progress.update)
        texts = [self._prompter.tokenizer.decode(t.tokens) for t in trajectories]
        return _share(rewards.score(texts, self._records))


def _share(scores: list[float]) -> float:
    return sum(score >= 1 for score in scores) / len(scores)
