"""Held-out accuracy: greedy, sampled, and what the commonest answer alone would score."""

import collections

import ml_collections

from jaxrl_tis import rollouts
from jaxrl_tis.data import tasks
from jaxrl_tis.data.rewards import RewardWorker
from jaxrl_tis.engine.records import Request
from jaxrl_tis.engine.scheduler import Scheduler


class Evaluator:
    """Answers the first eval.prompts examples of the held-out split, each twice.

    Raises ValueError when the split has fewer examples.
    """

    def __init__(self, config: ml_collections.ConfigDict, prompter: rollouts.Prompter):
        self._config, self._prompter = config, prompter
        params = {**config.task.params, **config.eval.params}
        source = tasks.make(config.task.name, params)
        if len(source) < config.eval.prompts:
            raise ValueError(
                f"the held-out split has {len(source)} examples, config.eval.prompts is "
                f"{config.eval.prompts}; lower that"
            )
        self._records = [source[i] for i in range(config.eval.prompts)]
        self._prompts = [prompter.ids(record) for record in self._records]

    def run(
        self, scheduler: Scheduler, rewards: RewardWorker, step: int, progress
    ) -> dict[str, float]:
        """Returns accuracies (the share of answers with score >= 1) and the number of prompts."""
        answers = collections.Counter(record["answer"] for record in self._records)
        commonest = answers.most_common(1)[0][0]
        constant = rewards.score([commonest] * len(self._records), self._records)
        texts = self._answers(scheduler, step, progress)
        return {
            "eval/greedy_accuracy": _share(rewards.score(texts[0::2], self._records)),
            "eval/sampled_accuracy": _share(rewards.score(texts[1::2], self._records)),
            "eval/constant_accuracy": _share(constant),
            "eval/n": len(self._records),
        }

    def _answers(self, scheduler, step: int, progress) -> list[str]:
        """Draws a greedy and a sampled answer to each prompt; the two share one prefill."""
        tokenizer = self._prompter.tokenizer
        sampling = {
            name: rollouts.sampling_params(self._config, tokenizer, temperature, is_filtered=False)
            for name, temperature in (("greedy", 0.0), ("sampled", 1.0))
        }
        requests = [
            Request(f"eval/{step}/{name}/{i}", ids, self._config.seed, params)
            for i, ids in enumerate(self._prompts)
            for name, params in sampling.items()
        ]
        trajectories = rollouts.run(scheduler, requests, progress.update)
        return [tokenizer.decode(t.tokens) for t in trajectories]


def _share(scores: list[float]) -> float:
    return sum(score >= 1 for score in scores) / len(scores)
