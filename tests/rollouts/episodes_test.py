"""Episodes with an engine of arithmetic and environments of this process, against a plain loop."""

import dataclasses
import functools
import math

import ml_collections
import numpy as np
import pytest

from jaxrl_tis.data.rewards import RewardWorker
from jaxrl_tis.data.tokenizer import CharTokenizer
from jaxrl_tis.engine.records import JOINS
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.environments.continuity import Suffixes
from jaxrl_tis.environments.pool import Call, Reply, digest
from jaxrl_tis.environments.protocol import Step
from jaxrl_tis.estimators import advantages
from jaxrl_tis.learner import trainer
from jaxrl_tis.record import failures, progress
from jaxrl_tis.record.failures import Failures
from jaxrl_tis.rollouts.episodes import (
    EpisodeScheduler, Openings, environment_seed, episode_metrics,
)
from jaxrl_tis.rollouts import episodes, groups
from jaxrl_tis.rollouts.groups import Sample, is_equal, scores
from jaxrl_tis.rollouts.prompts import Prompter
from tests import arithmetic

TOKENIZER = CharTokenizer("abcdefghijklmnopqrst")  # the 23 ids of the engine
STOPS = (2, 3)
MAX_TURNS, MAX_LENGTH = 4, 44
FIELDS = ("tokens", "mask", "turn", "turn_rewards", "logp_behav")


class Fault(Exception):
    pass


def play(call: Call) -> Step:
    """Answers with the end of the answer; ends after the number of turns that the example says."""
    example, answers = call.example, call.answers
    if example.get("fault") == len(answers):
        raise Fault
    if not answers:
        return Step(example["prompt"])
    reward = None if len(answers) % 2 else len(answers) + call.seed % 7 / 8
    observation = "ab" + answers[-1][-2:] + example.get("long", "")
    return Step(observation, reward, len(answers) >= example["turns"], {"turns": float(len(answers))})


class FakePool:
    """Environments in this process. A reply comes with the n-th look for it, as `delay` says."""

    def __init__(self, delay=lambda call: 0, kind="errors", prompt=None):
        self.delay, self.kind, self.prompt = delay, kind, prompt
        self.calls, self.waiting, self.forgotten, self.is_closed = [], {}, [], False

    def submit(self, call):
        assert call.id not in self.waiting
        assert len(call.digests) == len(call.answers) == len(call.cuts)
        assert call.is_last == (len(call.answers) == MAX_TURNS)
        self.calls.append(call)
        self.waiting[call.id] = [self.delay(call), call]

    def ready(self, wait=0.0):
        out = []
        for id, entry in list(self.waiting.items()):
            entry[0] -= 1
            if entry[0] < 0:
                out.append(self._reply(self.waiting.pop(id)[1]))
        return out[::-1]

    def _reply(self, call):
        try:
            step = play(call)
        except Fault:
            return Reply(call.id, len(call.answers), None, "", self.kind, "Fault: of the test")
        before = [
            play(dataclasses.replace(call, answers=call.answers[:n])) for n in range(len(call.answers))
        ]
        assert all(known in ("", digest(x)) for known, x in zip(call.digests, before, strict=True))
        said = tuple(x.observation for x in (*before, step))
        said = said if self.prompt is None else (self.prompt, *said[1:])
        return Reply(call.id, len(call.answers), step, digest(step), observations=said)

    def forget(self, ids):
        for id in ids:
            self.forgotten.append(id)
            self.waiting.pop(id, None)

    def close(self):
        self.is_closed = True


def shown(ids):
    """A prompt of these ids, of which some have no text."""
    return " ".join(map(str, ids))


def decode(ids):
    return TOKENIZER.decode([i for i in ids if i not in STOPS])


def read(text):
    return np.array(text.split(), np.int32)


def request(number, turns=3, partial=None, **columns):
    made = arithmetic.request(
        f"e{number}", np.arange(1, 4 + number % 3), seed=number, max_tokens=5, stop_ids=STOPS
    )
    example = {"id": f"x{number}", "prompt": shown(made.prompt), "turns": turns} | columns
    return dataclasses.replace(made, example=example, partial=partial)


def requests():
    return [request(i, turns=1 + i % 5) for i in range(9)]


def started(
    added, pool=None, waits=True, slots=3, max_length=MAX_LENGTH, suffixes=None, on_fork="rows",
    heartbeat=lambda: None, **options,
):
    is_late = "async_scheduling" in options and options["async_scheduling"]
    engine = arithmetic.Engine(slots=slots, steps=2, max_length=64, is_read_late=is_late)
    pool = FakePool() if pool is None else pool
    scheduler = EpisodeScheduler(
        Scheduler(engine, 0, **options), lambda: pool,
        suffixes or Suffixes(TOKENIZER, chat=False), decode, read,
        max_turns=MAX_TURNS, max_length=max_length, on_fork=on_fork, waits=waits, heartbeat=heartbeat,
    )
    for each in added:
        scheduler.add(each)
    return scheduler, pool


def drain(scheduler, limit=2000):
    found = {}
    for _ in range(limit):
        if not scheduler.pending:
            return found
        found |= {t.id: t for t in scheduler.step()}
    raise AssertionError(f"{scheduler.pending} requests never ended")


def alone(request, max_length=MAX_LENGTH, weights=0, has_marks=False):
    """(tokens, mask, turn, rewards, outcome) of an episode by a plain loop over its tokens. With
    marks, 2 begins each observation, and 3 a message of another role."""
    history, mask, turns, rewards, answers, is_cut = [], [], [], [], [], False

    def append(token, is_sampled):
        history.append(token)
        mask.append(is_sampled)
        turns.append(len(answers))

    while True:
        sampled = []
        while len(sampled) < request.sampling.max_tokens and not (sampled and sampled[-1] in STOPS):
            read = [*request.prompt, *history]
            if len(read) == max_length:
                break
            total = sum(arithmetic.key(int(t), s, weights) for s, t in enumerate(read))
            sampled.append(arithmetic.drawn(total, request, len(read), weights)[0])
            append(sampled[-1], True)
        answers.append(decode(sampled))
        is_cut = is_cut or sampled[-1] not in STOPS
        seed = environment_seed(request.seed, request.example)
        try:
            step = play(Call(request.id, request.example, seed, tuple(answers)))
        except Fault:
            return history, mask, turns, [*rewards, math.nan], "failed"
        rewards.append(math.nan if step.reward is None else step.reward)
        if step.is_done or len(answers) == MAX_TURNS:
            done = "overlong" if is_cut else "done"
            return history, mask, turns, rewards, done if step.is_done else "max_turns"
        suffix = [2, *TOKENIZER.encode(step.observation)] if has_marks else TOKENIZER.encode(step.observation)
        uncut = len(history)
        if has_marks and sampled[-1] == 2:
            suffix = suffix[1:]
        elif has_marks and sampled[-1] == 3 and len(sampled) > 1:
            uncut -= 1
        if len(request.prompt) + uncut + len(suffix) >= max_length:
            return history, mask, turns, rewards, "overlong"
        del history[uncut:], mask[uncut:], turns[uncut:]
        for token in suffix:
            append(token, False)


def assert_as_alone(found, added, **options):
    assert sorted(found) == sorted(r.id for r in added)
    for each in added:
        record = found[each.id]
        arithmetic.assert_replays(record, each)
        tokens, mask, turns, rewards, outcome = alone(each, **options)
        assert (record.tokens.tolist(), record.outcome) == (tokens, outcome)
        assert (record.mask.tolist(), record.turn.tolist()) == (mask, turns)
        np.testing.assert_array_equal(record.turn_rewards, np.float32(rewards))
        assert len(record.logp_behav) == len(record.version) == len(mask) == len(record.segment)
        known = len(rewards) - (outcome == "failed")
        assert record.metrics == ({"turns": float(known)} if known else {})


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("delay", [0, 3])
def test_episodes_are_what_a_plain_loop_makes(waits, delay):
    pool = FakePool(lambda call: delay * (call.id != "e2") + len(call.answers) % 2)
    scheduler, _ = started(requests(), pool, waits)
    found = drain(scheduler)
    assert_as_alone(found, requests())
    assert {t.outcome for t in found.values()} == {"done", "overlong", "max_turns"}
    assert sorted(set(pool.forgotten)) == sorted(found) and not pool.waiting
    scheduler.sleep()
    scheduler.close()
    assert pool.is_closed


def test_the_engine_samples_while_an_environment_thinks():
    """One slot: the second episode is sampled during the 50 looks for the reply to the first."""
    pool = FakePool(lambda call: 50 * (call.id == "e0"))
    scheduler, _ = started([request(0, turns=2), request(1, turns=2)], pool, waits=False, slots=1)
    ended = []
    while scheduler.pending:
        ended += [t.id for t in scheduler.step()]
    assert ended == ["e1", "e0"]


def test_with_waits_runs_make_equal_steps_whatever_the_delays():
    def steps(delay):
        scheduler, _ = started(requests(), FakePool(delay))
        digests = []
        while scheduler.pending:
            digests.append((sorted(t.id for t in scheduler.step()), str(scheduler.sync_digest())))
        return digests

    assert steps(lambda call: 0) == steps(lambda call: hash(call.answers) % 5)


@pytest.mark.parametrize("kind, outcome", [("errors", "failed"), ("timeouts", "timeout")])
def test_a_failed_episode_keeps_its_tokens_and_has_no_reward(kind, outcome):
    """It fails on its second turn; the first had no reward. An episode beside it goes on."""
    added = [request(0, turns=4, fault=2), request(1, turns=2)]
    found = drain(started(added, FakePool(kind=kind))[0])
    failed, other = found["e0"], found["e1"]
    tokens, mask, _, rewards, _ = alone(added[0])
    assert failed.outcome == outcome and failed.tokens.tolist() == tokens
    assert failed.mask.tolist() == mask and np.isnan(failed.turn_rewards).all()
    assert len(failed.turn_rewards) == 2 and failed.metrics == {"turns": 1.0}
    assert other.outcome == "done" and other.stop_reason == "stop"
    assert (failed.error, other.error) == ("Fault: of the test", "")


def test_an_episode_without_room_is_overlong():
    """The prompt of 3 tokens, at most 5 sampled and an observation of 12 or more: no third turn."""
    added = [request(0, turns=4, long="c" * 10), request(3, turns=4, long="c" * 10)]
    found = drain(started(added, max_length=32)[0])
    assert_as_alone(found, added, max_length=32)
    for record in found.values():
        assert record.outcome == "overlong" and record.stop_reason == "length"
        assert len(record.turn_rewards) == record.num_turns == 2
        assert record.mask[-1] and len(record.prompt) + len(record.tokens) <= 32


def test_observations_leave_the_budget_of_a_turn_alone():
    """Each turn may sample 5 tokens, whatever was given, and its own end decides what follows."""
    added = [request(i, turns=4, long="dc") for i in range(6)]
    found = drain(started(added)[0])
    sampled = {
        (t.id, turn): t.tokens[t.mask & (t.turn == turn)]
        for t in found.values() for turn in range(len(t.turn_rewards))
    }
    lengths = {turn: len(tokens) for turn, tokens in sampled.items()}
    is_full = [turn > 0 and n == 5 for (_, turn), n in lengths.items()]
    assert max(lengths.values()) == 5 and any(is_full)
    for key, tokens in sampled.items():
        assert len(tokens) == 5 or tokens[-1] in STOPS, key
        assert not set(tokens[:-1].tolist()) & set(STOPS)


class Ends:
    """Suffixes that say how the turn before them ended."""

    def after(self, observation, end, eos_ids):
        assert eos_ids == STOPS
        return TOKENIZER.encode("d" if end is None else "c")

    def replaces(self, observation, end, eos_ids):
        return False

    def join(self, answers, observations):
        assert len(answers) == len(observations)
        return JOINS[len(answers[-1]) % 3]


def test_every_turn_says_how_it_ended():
    """By a sampled end or by length, also after the first turn."""
    added = [request(i, turns=4) for i in range(9)]
    engine = arithmetic.Engine(slots=3, steps=2, max_length=64)
    scheduler = EpisodeScheduler(
        Scheduler(engine, 0), FakePool, Ends(), decode, read, max_turns=MAX_TURNS,
        max_length=MAX_LENGTH, on_fork="rows", waits=True,
    )
    for each in added:
        scheduler.add(each)
    seen = set()
    for record in drain(scheduler).values():
        for i in np.flatnonzero(~record.mask):
            is_end = record.tokens[i - 1] in STOPS
            assert TOKENIZER.decode([record.tokens[i]]) == ("c" if is_end else "d")
            seen.add((bool(is_end), int(record.turn[i]) > 1))
    assert len(seen) == 4


def test_the_last_turn_has_the_room_that_is_left():
    """Whatever the bound is: some observation leaves one token of room, and another none."""
    added = [request(i, turns=4) for i in range(4)]
    for bound in range(10, 26):
        found = drain(started(added, max_length=bound)[0])
        assert_as_alone(found, added, max_length=bound)
    assert any(len(t.prompt) + len(t.tokens) == bound and t.mask[-1] for t in found.values())


@pytest.mark.parametrize("cut", range(1, 14, 3))
@pytest.mark.parametrize("waits, is_late", [(True, False), (False, False), (False, True)])
def test_interrupted_episodes_go_on_elsewhere(cut, waits, is_late):
    """After `cut` steps all are interrupted; another scheduler and another pool continue them from
    their records alone, some in a turn, some while an environment thinks."""
    slow = FakePool(lambda call: len(call.answers))
    scheduler, _ = started(requests(), slow, waits, async_scheduling=is_late)
    found = {}
    for _ in range(cut):
        found |= {t.id: t for t in scheduler.step()}
    shown = {t.id: t for t in scheduler.records()}
    partials = {t.id: t for t in scheduler.pause("abort")}
    assert not scheduler.pending and not slow.waiting
    assert {t.stop_reason for t in partials.values()} <= {"abort"}
    assert sorted([*found, *partials]) == sorted(r.id for r in requests())
    for id, record in shown.items():
        assert record.stop_reason == "abort"
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(record, name), getattr(partials[id], name))
    again = [dataclasses.replace(r, partial=partials[r.id]) for r in requests() if r.id in partials]
    other, pool = started(again, waits=waits)
    found |= drain(other)
    assert_as_alone(found, requests())
    twice = [(c.id, len(c.answers)) for c in pool.calls]
    assert len(set(twice)) == len(twice)


@pytest.mark.parametrize("turns", [3, 9])  # the environment's end, and that of the episode
def test_an_environment_that_says_something_else_to_a_continued_episode(turns):
    scheduler, pool = started([request(0, turns=turns)], waits=False)
    while not (scheduler.records() and len(scheduler.records()[0].turn_rewards) == 2):
        scheduler.step()
    [partial] = scheduler.pause("abort")
    tokens = partial.tokens.copy()
    [given] = np.flatnonzero(~partial.mask & (partial.turn == 1))[:1]
    tokens[given] = TOKENIZER.encode("t")[0]
    for known, outcome in ((partial.tokens, None), (tokens, "failed")):
        start = dataclasses.replace(partial, tokens=known)
        other, _ = started([request(0, turns=turns, partial=start)])
        [ended] = drain(other).values()
        assert (ended.outcome == "failed") == (outcome == "failed")
    assert ended.num_turns == 3 and np.isnan(ended.turn_rewards[-1])
    assert ended.error.startswith("the environment is not repeatable")


@pytest.mark.parametrize("prompt", ["4 5 6", "no ids"])
def test_an_environment_with_another_prompt_than_the_policys_fails(prompt):
    """At its first answer, and where it goes on after an interruption."""
    scheduler, _ = started([request(0)], waits=False)
    while not (scheduler.records() and len(scheduler.records()[0].turn_rewards)):
        scheduler.step()
    [partial] = scheduler.pause("abort")
    for start in (None, partial):
        [ended] = drain(started([request(0, partial=start)], FakePool(prompt=prompt))[0]).values()
        assert ended.outcome == "failed" and np.isnan(ended.turn_rewards[-1])
        assert ended.num_turns == (1 if start is None else 2)
        assert "the environment is not repeatable: the prompt differs" in ended.error


def test_what_an_environment_said_here_is_what_it_has_to_repeat():
    """The digests of a call are those of the prompt and all observations; at first they are unknown."""
    scheduler, pool = started([request(0, turns=4)])
    drain(scheduler)
    said = [play(dataclasses.replace(pool.calls[-1], answers=pool.calls[-1].answers[:n])) for n in range(4)]
    known = [digest(step) for step in said]
    assert [call.digests for call in pool.calls[:3]] == [("",), tuple(known[:2]), tuple(known[:3])]


class Marks(Suffixes):
    """2 begins each observation, and 3 a message of another role."""

    def __init__(self):
        super().__init__(TOKENIZER, chat=False)

    def after(self, observation, end, eos_ids):
        ids = super().after(observation, end, eos_ids)
        return ids if end == 2 else [2, *ids]

    def replaces(self, observation, end, eos_ids):
        return end == 3


@pytest.mark.parametrize("cut", [None, *range(1, 14)])
def test_the_mark_of_another_message_is_replaced(cut):
    """Also in episodes that are interrupted and go on elsewhere, where each call of an environment
    is told of the same answers that were cut."""
    added = [request(i, turns=2 + i % 3) for i in range(24)]
    calls = {}
    for steps in (None, cut):
        found = {}
        scheduler, pool = started(added, FakePool(lambda call: len(call.answers)), False, suffixes=Marks())
        for _ in range(steps or 0):
            found |= {t.id: t for t in scheduler.step()}
        partials = {t.id: t for t in (scheduler.pause("abort") if steps else ())}
        again = [dataclasses.replace(r, partial=partials[r.id]) for r in added if r.id in partials]
        other, more = started(again, suffixes=Marks()) if steps else (scheduler, FakePool())
        found |= drain(other)
        for call in pool.calls + more.calls:
            assert calls.setdefault((call.id, call.answers), call.cuts) == call.cuts
    assert_as_alone(found, added, has_marks=True)
    seen = set()
    for record in found.values():
        begins = np.flatnonzero(~record.mask & np.append(True, record.mask[:-1]))
        assert len(begins) == len(record.joins) == record.num_turns - 1
        for at, join in zip(begins, record.joins, strict=True):
            end = record.tokens[at - 1] if record.tokens[at - 1] in STOPS else 0
            is_written = record.tokens[at] == 2
            seen.add((join, int(end), bool(is_written)))
    # Replaced: no end is left. A turn of the mark alone keeps it, and a render would fork there.
    assert seen == {("append", 2, False), ("append", 0, True), ("replace", 0, True), ("fork", 3, True)}


def test_an_environment_is_told_of_answers_that_were_cut():
    added = requests()
    scheduler, pool = started(added)
    found, cuts = drain(scheduler), set()
    for call in pool.calls:
        record = found[call.id]
        for turn, is_cut in enumerate(call.cuts):
            sampled = record.tokens[record.mask & (record.turn == turn)]
            assert is_cut == (sampled[-1] not in STOPS)
        cuts |= {*call.cuts}
    assert cuts == {True, False}


def test_a_cut_turn_is_a_cut_answer():
    """An episode of one turn has the metrics of the sample without an environment."""
    added = [request(i, turns=1) for i in range(24)]
    plain = [dataclasses.replace(r, example=None) for r in added]
    config = ml_collections.ConfigDict({
        "task": {"max_prompt_tokens": 8, "max_context_tokens": 0, "environment": ""},
        "rollout": {"max_new_tokens": 5, "harness": ""}, "train": {"mask_truncated": True},
    })
    values = []
    for made in (added, plain):
        trajectories = list(drain(started(made)[0]).values())
        samples = [Sample(t, {}, "", 1.0, 1.0, group=i) for i, t in enumerate(trajectories)]
        count = len(samples)
        rows = {"rewards": np.ones(count, np.float32), "group": np.arange(count),
                "mask": np.zeros((count, 1), bool)}
        found = trainer.sample_metrics(samples, rows, config)
        names = ("response_length/truncated_ratio", "actor/left_out_ratio", "response_length/clip_ratio")
        values.append([float(found[name]) for name in names])
    share = np.mean([len(t.tokens) == 5 and t.tokens[-1] not in STOPS for t in trajectories])
    assert values[0] == values[1] and values[0][:2] == [share, share] and 0 < share < 1
    assert values[0][2] == pytest.approx(np.mean([len(t.tokens) == 5 for t in trajectories]))


@pytest.mark.parametrize("end", ["pause", "abort"])
def test_a_continued_episode_is_interrupted_before_its_first_turn_ends(end):
    scheduler, pool = started([request(0)], waits=False)
    while not (pool.calls and scheduler.records() and len(scheduler.records()[0].turn_rewards)):
        scheduler.step()
    [partial] = scheduler.pause("abort")
    other, unused = started([request(0, partial=partial)])
    if end == "abort":
        other.abort("e0")
        [record] = other.step()
    else:
        [record] = other.pause("abort")
    assert record.tokens.tolist() == partial.tokens.tolist() and not unused.calls
    assert not other.pending


def test_a_wait_for_environments_beats_and_can_be_given_up():
    beats = []

    def heartbeat():
        beats.append(1)
        if len(beats) == 3:
            raise InterruptedError

    scheduler, pool = started([request(0), request(1)], FakePool(lambda call: 9), heartbeat=heartbeat)
    with pytest.raises(InterruptedError):
        for _ in range(99):
            scheduler.step()
    assert pool.calls
    partials = {t.id: t for t in scheduler.pause("abort")}
    assert sorted(partials) == ["e0", "e1"] and not scheduler.pending


def test_a_turn_that_was_over_is_not_sampled_again():
    scheduler, pool = started([request(0)], FakePool(lambda call: 99), waits=False)
    while not pool.calls:
        scheduler.step()
    [partial] = scheduler.pause("abort")
    assert partial.mask.all() and len(partial.turn_rewards) == 0
    other, again = started([request(0, partial=partial)], FakePool(lambda call: 2), waits=False)
    assert other.drawn(["e0"])["e0"].tolist() == partial.tokens.tolist()
    assert again.calls[0].answers == pool.calls[0].answers and other.pending == 1
    assert_as_alone(drain(other), [request(0)])


class Flags(Suffixes):
    """Records whether each observation follows a turn that ended by itself."""

    def __init__(self):
        super().__init__(TOKENIZER, chat=False)
        self.seen = []

    def after(self, observation, end, eos_ids):
        self.seen.append(end)
        return super().after(observation, end, eos_ids)


@pytest.mark.parametrize("columns", [dict(turns=3), dict(turns=3, fault=1)])
def test_an_episode_that_was_interrupted_as_its_environment_thought_ends_as_any_other(columns):
    """The interruption's reason is not that of the turn, which was over."""
    scheduler, pool = started([request(0, **columns)], FakePool(lambda call: 99), waits=False)
    while not pool.calls:
        scheduler.step()
    [partial] = scheduler.pause("abort")
    assert partial.stop_reason == "abort"
    found, flags = [], [Flags(), Flags()]
    for start, suffixes in zip((None, partial), flags, strict=True):
        [ended] = drain(started([request(0, partial=start, **columns)], suffixes=suffixes)[0]).values()
        found.append(ended)
    assert flags[0].seen == flags[1].seen
    for name in ("outcome", "stop_reason", "metrics"):
        assert getattr(found[0], name) == getattr(found[1], name)
    np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
    np.testing.assert_array_equal(found[0].turn_rewards, found[1].turn_rewards)


def joins_of(record):
    """How `Ends` joins the turns of a record, but for the last."""
    texts = [decode(record.tokens[record.mask & (record.turn == k)])
             for k in range(record.num_turns - 1)]
    return tuple(JOINS[len(text) % 3] for text in texts)


def test_a_record_says_how_a_render_would_join_its_turns():
    scheduler, _ = started(requests(), suffixes=Ends())
    first = {t.id: t for _ in range(6) for t in scheduler.step()}
    partials = {t.id: t for t in scheduler.pause("abort")}
    assert any(t.joins for t in partials.values())
    again = [dataclasses.replace(r, partial=partials[r.id]) for r in requests() if r.id in partials]
    found = [*(first | drain(started(again, suffixes=Ends())[0])).values()]
    assert {join for t in found for join in t.joins} == set(JOINS[:3])
    for record in found:
        assert record.joins == joins_of(record)
    values = episode_metrics(found)
    counted = [join for t in found for join in joins_of(t)]
    assert values["episodes/template_realigns"] == counted.count("realign") > 0
    assert values["episodes/template_forks"] == counted.count("fork") > 0


def test_an_episode_that_would_fork_fails_by_choice():
    scheduler, _ = started(requests(), suffixes=Ends(), on_fork="refuse")
    found = drain(scheduler)
    for id, record in drain(started(requests(), suffixes=Ends())[0]).items():
        if "fork" not in record.joins:
            assert found[id].outcome == record.outcome and found[id].joins == record.joins
            continue
        kept = record.joins.index("fork")
        assert found[id].outcome == "failed" and found[id].joins == record.joins[:kept]
        assert "rollout.on_fork is 'refuse'" in found[id].error
        assert found[id].num_turns == kept + 1 and np.isnan(found[id].turn_rewards[-1])
    assert any(t.outcome == "failed" for t in found.values())


def test_new_weights_between_turns():
    scheduler, _ = started(requests(), FakePool(lambda call: 2), waits=False)
    found = {}
    for version in range(1, 30):
        found |= {t.id: t for t in scheduler.step()}
        if version < 6:
            scheduler.set_params(version, version)
    found |= drain(scheduler)
    for each in requests():
        record = found[each.id]
        arithmetic.assert_replays(record, each)
        given = np.flatnonzero(~record.mask)
        np.testing.assert_array_equal(record.version[given], record.version[given - 1])
    assert len({v for t in found.values() for v in t.version}) > 3


@pytest.mark.parametrize("is_late", [False, True])
def test_aborted_episodes_end_as_they_are(is_late):
    """One is aborted while its environment thinks, the others at each step of a turn, also where
    the turn has ended by then: none goes on."""
    pool = FakePool(lambda call: 99)
    scheduler, _ = started([request(0)], pool, waits=False)
    while not pool.calls:
        scheduler.step()
    scheduler.abort("e0")
    assert scheduler.pending == 1 and not pool.waiting
    [record] = scheduler.step()
    assert record.stop_reason == "abort" and len(record.turn_rewards) == 0 and not scheduler.pending
    with pytest.raises(KeyError):
        scheduler.abort("e0")
    for cut in range(1, 8):
        scheduler, pool = started(requests(), async_scheduling=is_late)
        found = {}
        for _ in range(cut):
            found |= {t.id: t for t in scheduler.step()}
        left = [r.id for r in requests() if r.id not in found]
        for id in left:
            scheduler.abort(id)
        count = len(pool.calls)
        found = {}
        while scheduler.pending:
            found |= {t.id: t for t in scheduler.step()}
        assert sorted(found) == left and {t.stop_reason for t in found.values()} == {"abort"}
        assert len(pool.calls) == count


def test_a_request_without_an_example_is_one_turn():
    plain = dataclasses.replace(request(0), example=None)
    scheduler, pool = started([plain, request(1)])
    found = drain(scheduler)
    assert (found["e0"].tokens.tolist(), found["e0"].stop_reason) == arithmetic.alone(plain)
    assert found["e0"].outcome == "" and len(found["e0"].turn_rewards) == 0
    assert found["e1"].outcome == "done"


def test_an_id_is_refused_while_it_is_pending():
    scheduler, pool = started([request(0)], FakePool(lambda call: 99), waits=False)
    while not pool.calls:
        scheduler.step()
    with pytest.raises(ValueError, match="another live request"):
        scheduler.add(request(0))
    with pytest.raises(ValueError, match="1 requests are pending"):
        scheduler.sleep()


def test_an_observation_that_cannot_be_tokens_fails_its_episode():
    found = drain(started([request(0, long="?"), request(1, turns=1)])[0])
    assert [found[id].outcome for id in ("e0", "e1")] == ["failed", "done"]
    assert np.isnan(found["e0"].turn_rewards).all()
    assert "the character '?'" in found["e0"].error


# Prompts


def test_prompts_are_first_observations_with_a_seed_per_example():
    pool = FakePool(lambda call: len(call.id))
    opening = Openings(lambda: pool, seed=3)
    examples = [{"id": f"x{i}", "prompt": "ab" * i} for i in range(1, 4)]
    task = dict(template="{prompt}", chat=False, system="", max_prompt_tokens=5)
    prompter = Prompter(TOKENIZER, ml_collections.ConfigDict(task), opening)
    assert prompter.ids(examples[1]).tolist() == TOKENIZER.encode("abab", add_special=True)
    with pytest.raises(ValueError, match="7 prompt tokens"):
        prompter.ids(examples[2])
    assert [c.seed for c in pool.calls] == [environment_seed(3, e) for e in examples[1:]]
    assert environment_seed(3, examples[0]) != environment_seed(3, examples[1])
    assert environment_seed(3, examples[0]) != environment_seed(4, examples[0])
    prompter.close()
    assert pool.is_closed and not opening([])


def test_an_environment_without_a_prompt():
    """An example is bad where its environment fails, and a run is refused where the first one hangs."""
    examples = [{"id": f"x{i}", "prompt": "ab", "fault": i} for i in (1, 0, 1)]
    pool = FakePool()
    found = Openings(lambda: pool, 0)(examples)
    assert found[::2] == ["ab", "ab"] and "no prompt: Fault: of the test" in f"{found[1]}"
    assert sorted(pool.forgotten) == ["0", "0", "1"]
    with pytest.raises(ValueError, match="the environment has no prompt"):
        Openings(lambda: FakePool(kind="timeouts"), 0)(examples[1:])
    [found] = Openings(lambda: FakePool(kind="timeouts"), 0)(examples[1:2])  # drawn later, alone
    assert "no prompt" in f"{found}" and isinstance(found, ValueError)


def test_environments_of_prompts_are_not_all_open_at_once(monkeypatch):
    monkeypatch.setattr(episodes, "OPEN_AT_ONCE", 2)
    pool, most = FakePool(lambda call: len(call.id)), []
    ready = pool.ready
    monkeypatch.setattr(pool, "ready", lambda *a: [most.append(len(pool.calls) - len(pool.forgotten)), ready(*a)][1])
    examples = [{"id": f"x{i}", "prompt": "a" * (i + 1)} for i in range(6)]
    assert Openings(lambda: pool, 0)(examples) == ["a" * (i + 1) for i in range(6)]
    assert max(most) == 2 and len(pool.forgotten) == 6


def test_slow_prompts_show_their_progress(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    examples = [{"id": f"x{i}", "prompt": "a"} for i in range(3)]
    opening = Openings(lambda: FakePool(lambda call: int(call.id)), 0)
    opening(examples)
    shown = capsys.readouterr().err
    for count in range(4):  # 0: while the first one is awaited
        assert f"prompts of the environment: {count}/3, " in shown or count == 0
    opening(examples[:1])  # drawn later, alone
    assert capsys.readouterr().err == ""


def test_messages_of_an_environment_need_the_chat_template():
    opening = Openings(lambda: FakePool(lambda call: len(call.id)), seed=3)
    task = dict(template="{prompt}", chat=False, system="", max_prompt_tokens=5)
    prompter = Prompter(TOKENIZER, ml_collections.ConfigDict(task), opening)
    with pytest.raises(ValueError, match="set task.chat to True"):
        prompter.ids({"id": "a", "prompt": [{"role": "user", "content": "ab"}]})


# Rewards


class Rewards(RewardWorker):
    """Of a run, without a process."""

    def __init__(self, path=None):
        self.failures, self.on_error = Failures(path, lambda text: None), math.nan
        self.counts = {"errors": 0, "timeouts": 0, "non_finite": 0, "dropped": 0}


@functools.cache
def record_of(outcome, *rewards):
    [trajectory] = drain(started([request(0, turns=1)])[0]).values()
    reasons = {"overlong": "length", "max_turns": "length"}
    return dataclasses.replace(
        trajectory, outcome=outcome, turn_rewards=np.array(rewards, np.float32), metrics={},
        stop_reason=reasons.get(outcome, "stop"),
    )


def samples_of(trajectories, groups):
    rewards = Rewards()
    texts, examples = [""] * len(trajectories), [{"id": "x"}] * len(trajectories)
    scored = scores(rewards, texts, examples, trajectories)
    return rewards, [
        Sample(t, {}, "", s.score, s.score, group=g, components=s.components, is_failed=s.is_failed)
        for t, s, g in zip(trajectories, scored, groups, strict=True)
    ]


NAN = math.nan


def test_the_reward_is_the_sum_of_what_is_known():
    """No outcome is a reward of 0 by itself."""
    cases = {
        ("done", NAN, 0.5, 1.0): 1.5, ("done", 0.0): 0.0, ("max_turns", 0.25, NAN): 0.25,
        ("overlong", -1.0): -1.0, ("overlong", NAN): NAN, ("max_turns", NAN, NAN): NAN,
        ("failed", 1.0, NAN): NAN, ("timeout", 1.0, NAN): NAN, ("done", NAN): NAN,
    }
    rewards, samples = samples_of([record_of(*case) for case in cases], range(len(cases)))
    np.testing.assert_array_equal([s.score for s in samples], list(cases.values()))
    assert [s.is_failed for s in samples] == [False] * 6 + [True] * 3
    assert rewards.counts == {"errors": 1, "timeouts": 1, "non_finite": 1, "dropped": 3}
    named = dataclasses.replace(record_of("done", 0.5), metrics={"calls": 2.0})
    [sample] = samples_of([named], [0])[1]
    assert sample.components == {"score": 0.5, "calls": 2.0}


def test_the_reasons_of_failed_episodes_are_kept_with_their_texts(tmp_path):
    """By kind, as those of failed rewards: the kind of an exception is its type and its place."""
    rewards = Rewards(tmp_path / failures.FILE_NAME)
    errors = ["KeyError at a.py:3: 'x'", "KeyError at a.py:3: 'y'", "no answer"]
    made = [dataclasses.replace(record_of("failed", NAN), error=error) for error in errors]
    made.append(record_of("done", NAN))
    scores(rewards, ["a", "b", "c", "d"], [{"id": f"x{i}"} for i in range(4)], made)
    raised, silent, unknown = failures.read(tmp_path / failures.FILE_NAME)
    assert (raised.kind, raised.count, raised.error) == ("KeyError at a.py:3", 2, errors[0])
    assert raised.last == [
        {"id": "x0", "text": "a", "error": errors[0]}, {"id": "x1", "text": "b", "error": errors[1]},
    ]
    assert (silent.kind, silent.count) == ("no answer", 1)
    assert unknown.last == [
        {"id": "x3", "text": "d", "error": "the environment or harness gave no reward"},
    ]
    assert rewards.last_error == "the environment or harness gave no reward"


def test_a_reward_that_float32_does_not_hold_fails_its_episode_alone():
    rewards = Rewards()
    for given in ((1e39,), (3e38, 3e38), (-math.inf,)):
        with np.errstate(over="ignore"):
            trajectory = record_of("done", *given)
        assert groups._of_episode(rewards, trajectory, "", {}).is_failed
    assert rewards.counts == {"errors": 0, "timeouts": 0, "non_finite": 3, "dropped": 3}


def test_a_metric_called_score_is_not_the_score():
    trajectory = dataclasses.replace(record_of("done", 0.5), metrics={"score": 9.0, "turns": 2.0})
    scored = groups._of_episode(Rewards(), trajectory, "", {})
    assert (scored.score, scored.components) == (0.5, {"score": 0.5, "turns": 2.0})


def test_a_group_keeps_its_advantages_when_a_member_fails():
    """Groups of 3 and 4, one member of each failed: the advantages are those of groups of 2 and 3
    without these members, and dynamic sampling sees the known rewards alone."""
    rewards = [1.0, NAN, 3.0, 0.0, 2.0, NAN, 4.0]
    groups = [0, 0, 0, 1, 1, 1, 1]
    made = [
        record_of("failed", NAN) if math.isnan(r) else record_of("done", r) for r in rewards
    ]
    _, samples = samples_of(made, groups)
    fields = trainer.reward_fields(samples, {})
    np.testing.assert_array_equal(fields["rewards"], np.float32(rewards))
    is_known = ~np.isnan(fields["rewards"])
    assert trainer.are_trained_on(samples, fields, False).tolist() == is_known.tolist()
    known, groups = fields["rewards"][is_known], fields["group"][is_known]
    mask = np.ones((7, 1), bool)
    adv = advantages.grpo(fields["rewards"], mask & is_known[:, None], fields["group"])[:, 0]
    alone = advantages.grpo(known, mask[is_known], groups)[:, 0]
    np.testing.assert_array_equal(adv[is_known], alone)
    # 1 and 3 have mean 2 and deviation sqrt(2); 0, 2 and 4 mean 2 and deviation 2.
    half = 1 / math.sqrt(2)
    np.testing.assert_allclose(alone, [-half, half, -1, 0, 1], rtol=1e-5)
    assert not is_equal(samples[:3]) and is_equal(samples[:2]) and not is_equal(samples[3:])


def test_episodes_at_a_bound_are_truncated():
    outcomes = ["done", "max_turns", "overlong", "failed", "timeout"]
    _, samples = samples_of([record_of(o, 1.0) for o in outcomes], range(5))
    rows = {"rewards": np.ones(5, np.float32)}
    assert trainer.are_trained_on(samples, rows, True).tolist() == [True, False, False, True, True]


def test_metrics_of_a_batch():
    found = drain(started(requests() + [request(20, turns=4, fault=1)])[0]).values()
    values = episode_metrics(list(found))
    outcomes = [alone(r)[-1] for r in requests()]
    assert {"done", "overlong", "max_turns"} == set(outcomes)
    for outcome in ("done", "overlong", "max_turns", "timeout"):
        assert values[f"episodes/{outcome}"] == outcomes.count(outcome)
    assert values["episodes/failed"] == 1 and values["episodes/template_replaces"] == 0
    masks = np.concatenate([t.mask for t in found])
    assert values["episodes/given_ratio"] == pytest.approx(1 - masks.sum() / len(masks))
    assert episode_metrics([dataclasses.replace(t, outcome="") for t in found]) == {}


def test_episodes_without_a_token_have_no_share_of_tokens():
    failed = dataclasses.replace(record_of("failed", 1.0), mask=np.zeros(0, bool), joins=())
    assert episode_metrics([failed] * 2) == {"episodes/failed": 2} | dict.fromkeys(
        ("episodes/done", "episodes/timeout", "episodes/max_turns", "episodes/overlong"), 0
    )
