"""Held-out accuracy with a sampler that answers by rule."""

import numpy as np
import pytest

from jaxrl_tis import evaluate, rollouts
from jaxrl_tis.data.tokenizer import ARITHMETIC_CHARS, CharTokenizer
from tests import tiny
from tests.rollouts_test import FakeRewards, FakeScheduler

pytestmark = pytest.mark.by_jax("a run: flax, optax, orbax and XLA together")

TOKENIZER = CharTokenizer(ARITHMETIC_CHARS)


class Answers(FakeScheduler):
    """Right when greedy; at temperature 1 right on every second prompt."""

    def _trajectory(self, request):
        fake = super()._trajectory(request)
        a, b = TOKENIZER.decode(request.prompt)[:-1].split("+")
        index = int(request.id.split("/")[-1])
        is_right = request.sampling.temperature == 0 or index % 2 == 0
        text = str(int(a) + int(b)) if is_right else "-"
        tokens = np.array([*TOKENIZER.encode(text), 2], np.int32)
        return type(fake)(**(vars(fake) | {"tokens": tokens}))


class Progress:
    done = 0

    def update(self, n=1, **_):
        self.done += n


def evaluator(**changes):
    config = tiny.config(rollout__top_k=3, rollout__allow_filter_bias=True, **changes)
    return evaluate.Evaluator(config, rollouts.Prompter(TOKENIZER, config.task)), config


def test_accuracies():
    held_out, _ = evaluator()
    scheduler, progress = Answers(), Progress()
    rewards = FakeRewards(lambda text, record: float(text == record["answer"]))
    values = held_out.run(scheduler, rewards, 7, progress)
    answers = [sum(int(x) for x in TOKENIZER.decode(r.prompt)[:-1].split("+"))
               for r in scheduler.requests[::2]]
    assert values == {
        "eval/greedy_accuracy": 1.0, "eval/sampled_accuracy": 0.5, "eval/n": 8,
        "eval/constant_accuracy": max(answers.count(a) for a in answers) / 8,
    }
    assert progress.done == 16
    # Greedy and at temperature 1, without the rollouts' filters, on the same prompts.
    greedy, sampled = scheduler.requests[0::2], scheduler.requests[1::2]
    assert {r.sampling.temperature for r in greedy} == {0.0}
    assert {r.sampling.temperature for r in sampled} == {1.0}
    assert {r.sampling.top_k for r in scheduler.requests} == {0}
    assert [r.prompt.tolist() for r in greedy] == [r.prompt.tolist() for r in sampled]
    assert len({r.hash for r in scheduler.requests}) == 16


def test_partial_credit_is_not_accuracy():
    values = evaluator()[0].run(Answers(), FakeRewards(lambda *_: 0.99), 0, Progress())
    assert values["eval/greedy_accuracy"] == values["eval/constant_accuracy"] == 0.0


def test_the_same_prompts_at_every_step():
    held_out, _ = evaluator()
    seen = []
    for step in (0, 5):
        scheduler = Answers()
        held_out.run(scheduler, FakeRewards(lambda *_: 0.0), step, Progress())
        seen.append([r.prompt.tolist() for r in scheduler.requests])
    assert seen[0] == seen[1]


def test_held_out_prompts_are_in_neither_training_split():
    held_out, config = evaluator()
    from jaxrl_tis.data.tasks import TASKS

    ours = {r["prompt"] for r in held_out._records}
    for split in ("train", "warmup"):
        source = TASKS["arithmetic"](**{**config.task.params, "split": split})
        assert not ours & {source[i]["prompt"] for i in range(len(source))}


def test_too_few_held_out_examples_names_both_numbers():
    with pytest.raises(ValueError, match="256 examples, config.eval.prompts is 257"):
        evaluator(eval__prompts=257)


def test_a_held_out_prompt_that_is_too_long_is_found_at_set_up():
    with pytest.raises(ValueError, match="5 prompt tokens.*max_prompt_tokens is 4"):
        evaluator(task__max_prompt_tokens=4)
