"""Held-out reward and accuracy with a sampler that answers by rule."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

from jaxrl_tis import evaluate, export
from jaxrl_tis.data.rewards import Scored
from jaxrl_tis.data.tokenizer import ARITHMETIC_CHARS, CharTokenizer
from jaxrl_tis.models import transformer
from jaxrl_tis.record import intervals
from jaxrl_tis.record.failures import Failures
from jaxrl_tis.rollouts.prompts import Prompter
from jaxrl_tis.runtime import cli
from tests import forked, tiny
from tests.rollouts.synchronous_test import FakeRewards, FakeScheduler
from tests.weights import exploding

NAN = float("nan")
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


class Episodes(FakeScheduler):
    """Right with a reward of 1 in the second turn when greedy; others fail on every second prompt."""

    def _trajectory(self, request):
        is_greedy, is_odd = request.sampling.temperature == 0, int(request.id.split("/")[-1]) % 2
        outcome = "done" if is_greedy or is_odd else "failed"
        rewards = np.array([NAN, float(is_greedy)], np.float32)
        return dataclasses.replace(
            super()._trajectory(request), outcome=outcome, turn_rewards=rewards
        )


class Endless(FakeScheduler):
    """Of eight prompts, the first three episodes end right and the fourth wrong. Two run into
    max_turns and one into its length without a reward; the last one is right at max_turns."""

    outcomes = ["done"] * 4 + ["max_turns", "max_turns", "overlong", "max_turns"]
    rewards = [1.0, 1.0, 1.0, 0.0, NAN, NAN, NAN, 1.0]

    def _trajectory(self, request):
        index = int(request.id.split("/")[-1])
        return dataclasses.replace(
            super()._trajectory(request), outcome=self.outcomes[index],
            turn_rewards=np.array([self.rewards[index]], np.float32),
        )


class Failing(FakeRewards):
    failures = Failures()

    def failed(self, fault, error, text, example):
        return Scored(NAN, {}, is_failed=True)


class Progress:
    done = 0

    def update(self, n=1, **_):
        self.done += n


def evaluator(**changes):
    config = tiny.config(rollout__top_k=3, rollout__allow_filter_bias=True, **changes)
    return evaluate.Evaluator(config, Prompter(TOKENIZER, config.task)), config


def test_bad_examples_of_a_generated_held_out_split_are_left_out():
    """Sums of two digits each have 7 tokens with the start token, and 81 % of the sums are such."""
    params = {"size": 256, "digits": 2, "terms": 2, "ops": "+"}
    held_out, config = evaluator(
        task__params=params, task__max_prompt_tokens=6, task__on_bad_example="skip"
    )
    assert len(held_out._examples) == config.eval.prompts and held_out.left_out > 128


def test_accuracies():
    held_out, _ = evaluator()
    scheduler, progress = Answers(), Progress()
    rewards = FakeRewards(lambda text, example: float(text == example["answer"]))
    values = held_out.run(scheduler, rewards, 7, progress)
    answers = [sum(int(x) for x in TOKENIZER.decode(r.prompt)[:-1].split("+"))
               for r in scheduler.requests[::2]]
    assert values == {
        "eval/greedy_accuracy": 1.0, "eval/sampled_accuracy": 0.5, "eval/n": 8,
        "eval/greedy_n": 8, "eval/sampled_n": 8,
        "eval/greedy_reward": 1.0, "eval/sampled_reward": 0.5, "eval/failed_rewards": 0,
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


def test_the_environment_rewards_episodes():
    held_out, _ = evaluator(**tiny.EPISODES)
    scheduler = Episodes()
    values = held_out.run(scheduler, Failing(None), 7, Progress())
    assert values == {
        "eval/greedy_accuracy": 1.0, "eval/sampled_accuracy": 0.0, "eval/n": 8,
        "eval/greedy_n": 8, "eval/sampled_n": 4,
        "eval/greedy_reward": 1.0, "eval/sampled_reward": 0.0, "eval/failed_rewards": 4,
        "eval/episodes/done": 12, "eval/episodes/failed": 4, "eval/episodes/timeout": 0,
        "eval/episodes/max_turns": 0, "eval/episodes/overlong": 0, "eval/episodes/given_ratio": 0.0,
    }
    assert "limit" not in evaluate.summary(values)
    prompts = [r.example["prompt"] for r in scheduler.requests]
    assert prompts == [TOKENIZER.decode(r.prompt) for r in scheduler.requests]
    found, at_limit = held_out.scores(Episodes(), Failing(None), 2, Progress())
    assert found[:, 0].tolist() == [1.0] * 8 and np.isnan(found[:, 1:]).sum() == 8
    assert at_limit.shape == (8, 3) and not at_limit.any()


def test_an_episode_that_a_limit_ended_is_wrong():
    """By hand: 4 of 8 are right. The rewards of the other five have the mean 0.8."""
    held_out, _ = evaluator(**tiny.EPISODES)
    values = held_out.run(Endless(), Failing(None), 7, Progress())
    for kind in ("greedy", "sampled"):
        assert values[f"eval/{kind}_accuracy"] == 0.5 and values[f"eval/{kind}_n"] == 8
        assert values[f"eval/{kind}_reward"] == pytest.approx(0.8)
    assert values["eval/failed_rewards"] == 0 and values["eval/episodes/max_turns"] == 6
    assert evaluate.summary(values) == (
        "held-out accuracy 0.500 greedy, 0.500 sampled; reward 0.800 greedy, 0.800 sampled; 50.0 % of "
        "the episodes ended at a limit (max_turns 6, overlong 2)"
    )
    found, at_limit = held_out.scores(Endless(), Failing(None), 2, Progress())
    right = evaluate.are_right(found, at_limit, 1.0)
    assert right.mean(axis=1).tolist() == [1, 1, 1, 0, 0, 0, 0, 1] and at_limit.sum() == 4 * 3


def test_partial_credit_is_not_accuracy():
    values = evaluator()[0].run(Answers(), FakeRewards(lambda *_: 0.99), 0, Progress())
    assert values["eval/greedy_accuracy"] == values["eval/constant_accuracy"] == 0.0


@pytest.mark.parametrize("threshold, greedy, sampled", [(1.0, 0, 0), (0.9, 1, 0.5), (0.3, 1, 1)])
def test_graded_rewards_have_a_mean_and_a_threshold(threshold, greedy, sampled):
    """0.98 for the answer and 0.3 for others: greedy answers are right, and half of the sampled."""
    graded = FakeRewards(lambda text, example: 0.98 if text == example["answer"] else 0.3)
    values = evaluator(eval__threshold=threshold)[0].run(Answers(), graded, 0, Progress())
    assert values["eval/greedy_reward"] == pytest.approx(0.98)
    assert values["eval/sampled_reward"] == pytest.approx((0.98 + 0.3) / 2)
    assert (values["eval/greedy_accuracy"], values["eval/sampled_accuracy"]) == (greedy, sampled)


def test_failed_rewards_are_in_no_mean_and_are_counted():
    """Of eight sampled answers, four are "-" and fail; the constant answer fails nowhere."""
    failing = FakeRewards(lambda text, example: NAN if text == "-" else float(text == example["answer"]))
    values = evaluator()[0].run(Answers(), failing, 0, Progress())
    assert values["eval/sampled_accuracy"] == values["eval/sampled_reward"] == 1.0
    assert (values["eval/failed_rewards"], values["eval/n"]) == (4, 8)
    assert (values["eval/greedy_n"], values["eval/sampled_n"]) == (8, 4)
    values = evaluator()[0].run(Answers(), FakeRewards(lambda *_: NAN), 0, Progress())
    assert values == {"eval/failed_rewards": 16, "eval/n": 8}


def test_data_without_answers_have_no_constant_answer():
    held_out, _ = evaluator()
    held_out._examples = [
        {name: x for name, x in example.items() if name != "answer"} for example in held_out._examples
    ]
    values = held_out.run(Answers(), FakeRewards(lambda *_: 0.5), 0, Progress())
    assert "eval/constant_accuracy" not in values and values["eval/greedy_reward"] == 0.5


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

    ours = {e["prompt"] for e in held_out._examples}
    for split in ("train", "warmup"):
        source = TASKS["arithmetic"](**{**config.task.params, "split": split})
        assert not ours & {source[i]["prompt"] for i in range(len(source))}


def test_too_few_held_out_examples_names_both_numbers():
    with pytest.raises(ValueError, match="256 examples and config.eval.prompts is 257"):
        evaluator(eval__prompts=257)


def test_a_held_out_prompt_that_is_too_long_is_found_at_set_up():
    with pytest.raises(ValueError, match="5 prompt tokens.*max_prompt_tokens is 4"):
        evaluator(task__max_prompt_tokens=4)


# The command


@pytest.mark.parametrize("right, k, expected", [
    ([[1, 0, 0, 0]], 1, 0.25), ([[1, 0, 0, 0]], 2, 0.5),  # 1 - C(3,2) / C(4,2) = 1 - 3/6
    ([[1, 1, 0, 0]], 2, 5 / 6),  # 1 - C(2,2) / C(4,2)
    ([[0, 0, 0, 0]], 4, 0.0), ([[1, 0, 0, 0]], 4, 1.0), ([[1, 1, 1, 0]], 2, 1.0),
])
def test_pass_at_k(right, k, expected):
    assert evaluate.pass_at(k, np.array(right, bool)).tolist() == [pytest.approx(expected)]


def test_pass_at_k_is_what_drawing_without_replacement_gives():
    right = np.array([[1, 0, 1, 0, 0, 0]], bool)
    for k in (1, 2, 3):
        drawn = [any(right[0, list(chosen)]) for chosen in itertools.combinations(range(6), k)]
        assert evaluate.pass_at(k, right)[0] == pytest.approx(np.mean(drawn))


def test_several_draws_of_each_prompt():
    held_out, _ = evaluator()
    scheduler = Answers()
    rewards = FakeRewards(lambda text, example: float(text == example["answer"]))
    found, _ = held_out.scores(scheduler, rewards, 3, Progress())
    assert found[:, 0].tolist() == [1.0] * 8
    assert found[:, 1:].tolist() == [[i % 2 == 0] * 3 for i in range(8)]
    assert len({r.hash for r in scheduler.requests}) == 8 * 4  # no two draws share their noise


@pytest.mark.all
@pytest.mark.parametrize("path", ["run", "model"])
def test_the_command_measures_a_run_and_a_model(path, tmp_path):
    """What it says of a run's last checkpoint is what the run's own record has."""
    run = tiny.finished()
    if path == "model":
        export.export(str(run), str(tmp_path / "model"), dtype="float32")
    target = str(run if path == "run" else tmp_path / "model")
    with tiny.one_device():
        measured = evaluate.measure(tiny.setup(), target, samples=4)
    assert list(measured) == [
        "n", "samples", "failed", "at_limit", "greedy", "sampled", "pass_at_1", "pass_at_2", "pass_at_4",
        "greedy_reward", "sampled_reward",
    ]
    last = [r for r in tiny.lines(run) if r["phase"] == "eval"][-1]
    assert measured["n"] == 8
    assert measured["greedy"]["mean"] == last["eval/greedy_accuracy"]
    assert measured["greedy_reward"]["mean"] == pytest.approx(last["eval/greedy_reward"])
    low, high = measured["greedy_reward"]["low"], measured["greedy_reward"]["high"]
    assert low < measured["greedy_reward"]["mean"] < high and measured["failed"] == 0
    assert measured["pass_at_1"] == pytest.approx(measured["sampled"])
    assert measured["pass_at_4"]["mean"] >= measured["pass_at_2"]["mean"] >= measured["sampled"]["mean"]
    low, high = measured["greedy"]["low"], measured["greedy"]["high"]
    assert 0 <= low <= measured["greedy"]["mean"] <= high <= 1


@pytest.mark.compiles
def test_the_command_leaves_answers_out_whose_reward_failed(monkeypatch):
    """Of eight prompts the first has a failed greedy answer and a failed draw. Of the other greedy
    answers, of rewards 0 to 6, those from 5 on are right, and so is the first prompt's other draw."""
    def scores(self, scheduler, rewards, samples, progress):
        sampled = np.full((8, samples), 2.0)
        sampled[0] = 10.0, NAN
        found = np.concatenate([np.array([NAN, *range(7)])[:, None], sampled], axis=1)
        return found, np.zeros(found.shape, bool)

    monkeypatch.setattr(evaluate.Evaluator, "scores", scores)
    with tiny.one_device():
        measured = evaluate.measure(tiny.setup(eval__threshold=5.0), str(tiny.finished()), samples=2)
    assert (measured["n"], measured["failed"]) == (8, 2)
    assert measured["greedy"]["mean"] == pytest.approx(2 / 7) and measured["pass_at_2"]["mean"] == 0
    assert measured["pass_at_1"]["mean"] == measured["sampled"]["mean"] == 1 / 8
    assert measured["greedy_reward"]["mean"] == 3.0 and measured["sampled_reward"]["mean"] == 3.0
    # Student's t of 6 degrees of freedom, 2.447, times sqrt(28 / 6 / 7), the error of the mean.
    assert measured["greedy_reward"]["high"] == pytest.approx(3 + 2.4469 * (28 / 42) ** 0.5, rel=1e-4)


def test_a_reward_of_one_prompt_has_no_interval():
    assert evaluate._named(intervals.of_mean(np.array([0.5]))) == {"mean": 0.5, "low": None, "high": None}


@pytest.mark.all
def test_an_older_checkpoint_is_measured_where_it_is_asked_for():
    run = tiny.finished()  # its checkpoints are those of steps 4 and 5
    with tiny.one_device():
        measured = evaluate.measure(tiny.setup(), str(run), samples=1, step=4)
        with pytest.raises(FileNotFoundError, match="no checkpoint 3"):
            evaluate.measure(tiny.setup(), str(run), samples=1, step=3)
    [record] = [r for r in tiny.lines(run) if (r["phase"], r["step"]) == ("eval", 4)]
    assert measured["greedy"]["mean"] == record["eval/greedy_accuracy"]


@pytest.mark.all
def test_the_command_line(tmp_path):
    run = tiny.finished()
    call = lambda *words: forked.run(["-m", "jaxrl_tis.evaluate", *words], tmp_path / "log")
    code, said = call(
        str(run), "--config=tests/small_run.py", "--samples=2", f"--json={tmp_path / 'a.json'}"
    )
    assert code == 0 and "8 prompts, 2 samples each" in said and "pass_at_2" in said, said
    assert json.loads((tmp_path / "a.json").read_text())["samples"] == 2
    code, said = call("--config=tests/small_run.py")
    assert code == 2 and said.splitlines()[-1] == "WORKDIR|MODEL is missing; --help shows the arguments"
    code, said = call(str(tmp_path / "none"), "--config=tests/small_run.py")
    assert code == 2 and "No model folder" in said


@pytest.mark.all
def test_a_model_that_overflows_has_no_accuracy(monkeypatch):
    setup = tiny.setup(model__num_layers=2, model__dtype="float16")
    params = exploding(transformer.init(setup.model, jax.random.key(0)))
    monkeypatch.setattr(evaluate, "read_params", lambda *_: params)
    with pytest.raises(FloatingPointError, match=r"is not finite: values stop .* in layer 1 ") as error:
        evaluate.measure(setup, "models/any", samples=1)
    assert cli.exit_code(error.value) == 1
