"""Sessions with an engine of arithmetic and agents of this process, against a plain loop and the
episodes of an environment."""

import dataclasses
import math
import threading
import time
import types

import numpy as np
import pytest

from jaxrl_tis.endpoint.calls import Ended, Session
from jaxrl_tis.endpoint.request import Choice, Completion
from jaxrl_tis.engine.records import SamplingParams, cut
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.environments.pool import Call as Step
from jaxrl_tis.harness.process import Reply
from jaxrl_tis.rollouts import live, schedules, sessions
from jaxrl_tis.rollouts.episodes import environment_seed
from jaxrl_tis.rollouts.live import Sessions, turn
from jaxrl_tis.rollouts.record_check import EMPTY
from jaxrl_tis.rollouts.sessions import SessionScheduler
from tests import arithmetic, tiny
from tests.rollouts import episodes_test as episodes
from tests.rollouts.episodes_test import STOPS, TOKENIZER

MAX_LENGTH, MAX_TURNS = 64, 4


class FakeEndpoint:
    """Sessions without HTTP."""

    token = "token"

    def __init__(self):
        self.sessions, self.version, self.is_closed = {}, 0, False

    def open(self, sampling, take):
        key = f"key{len(self.sessions)}"
        self.sessions[key] = Session(sampling, take)
        return key, f"http://{key}"

    def session(self, key):
        return self.sessions[key]

    def end(self, key, why):
        self.sessions[key].close(why)

    def set_version(self, version):
        self.version = version

    def close(self):
        self.is_closed = True


class FakeProcess:
    """Sessions that somebody else plays."""

    def __init__(self, on_reply):
        self.on_reply, self.started, self.cancelled, self.error = on_reply, {}, [], ""
        self.is_closed, self.checks = False, 0

    def start(self, key, session):
        self.started[key] = session

    def check(self):
        self.checks += 1

    def cancel(self, key):
        self.cancelled.append(key)

    def close(self):
        self.is_closed = True


class Client:
    """What reaches one session: calls of an agent, and its reply."""

    def __init__(self, hub, id):
        self.live = hub.live[id]
        self.session, self._process = hub.endpoint.session(self.live.key), hub.process
        self.got, self.asked = [], 0

    def ask(self, prompt, max_tokens=5, is_retry=False, stops=()):
        prompt = np.array(prompt, np.int32)
        sampling = dataclasses.replace(
            self.session.sampling, max_tokens=max_tokens, stop_strings=stops
        )
        choice = Choice("choice", prompt, 0, sampling)
        call = self.session.enter(choice, str((prompt.tolist(), max_tokens)).encode(), is_retry)
        call.listen(f"listener{self.asked}", lambda id, result: self.got.append(result))
        self.asked += 1
        return call

    def reply(self, reward=1.0, metrics=None, calls=None, error="", is_lost=False):
        self._process.on_reply(Reply(self.live.key, reward, metrics or {}, calls, error, is_lost))


def request(number=0, **changes):
    return dataclasses.replace(episodes.request(number), **changes)


def made(
    count=1, timeout=1000.0, on_fork="longest", waits=False, heartbeat=lambda: None, **options
):
    """The shared sessions and `count` schedulers."""
    hub = Sessions(FakeEndpoint, FakeProcess, "tiny", timeout)
    hub.enter()
    start = lambda: SessionScheduler(
        Scheduler(
            arithmetic.Engine(slots=3, steps=2, max_length=MAX_LENGTH), 0,
            decode=arithmetic.text_of, **options,
        ),
        hub, max_length=MAX_LENGTH, on_fork=on_fork, waits=waits, heartbeat=heartbeat,
    )
    return hub, *(start() for _ in range(count))


def opened(number=0, **options):
    """(scheduler, client, request) of one session."""
    hub, scheduler = made(**options)
    added = request(number)
    scheduler.add(added)
    return scheduler, Client(hub, added.id), added


def answered(scheduler, call, limit=100):
    """Steps until a call has its answer; returns the record of the turn."""
    for _ in range(limit):
        if call.result is not None:
            return call.result
        assert scheduler.step() == []
    raise AssertionError("no answer")


def last(scheduler, limit=100):
    """Steps until one record is returned."""
    for _ in range(limit):
        if ended := scheduler.step():
            [record] = ended
            return record
    raise AssertionError("no end")


def ids_of(result):
    return [*result.prompt.tolist(), *result.tokens.tolist()]


def play(hub, schedulers, added):
    """Plays the agents of `episodes_test.play`, whose observations follow the ids so far."""
    clients = {r.id: Client(hub, r.id) for r in added}
    state = {r.id: [clients[r.id].ask(r.prompt), [], []] for r in added}
    found = {}
    for _ in range(3000):
        if not any(s.pending for s in schedulers):
            return found
        for each in schedulers:
            found |= {t.id: t for t in (each.step() if each.pending else ())}
        for r in added:
            call, answers, rewards = state[r.id]
            if call is None or call.result is None:
                continue
            answers.append(episodes.decode(call.result.tokens))
            seed = environment_seed(r.seed, r.example)
            step = episodes.play(Step(r.id, r.example, seed, tuple(answers)))
            rewards.append(step.reward or 0.0)
            if step.is_done or len(answers) == MAX_TURNS:
                clients[r.id].reply(sum(rewards), {"turns": float(len(answers))})
                state[r.id][0] = None
            else:
                ids = ids_of(call.result) + TOKENIZER.encode(step.observation)
                state[r.id][0] = clients[r.id].ask(ids)
    raise AssertionError("never ended")


@pytest.mark.parametrize("waits", [True, False])
def test_a_session_is_the_episode_of_the_same_turns(waits):
    hub, scheduler = made(waits=waits)
    added = episodes.requests()
    for each in added:
        scheduler.add(each)
    assert scheduler.pending == len(added)
    found = play(hub, [scheduler], added)
    assert sorted(found) == sorted(r.id for r in added)
    for each in added:
        record = found[each.id]
        tokens, mask, turns, rewards, _ = episodes.alone(each, max_length=MAX_LENGTH)
        arithmetic.assert_replays(record, each)
        assert record.tokens.tolist() == tokens
        assert (record.mask.tolist(), record.turn.tolist()) == (mask, turns)
        ends = [np.flatnonzero(record.mask & (record.turn == k))[-1] for k in range(record.num_turns)]
        is_whole = all(token in STOPS for token in record.tokens[ends])
        ended = (record.outcome, record.stop_reason)
        assert ended == (("done", "stop") if is_whole else ("overlong", "length"))
        assert np.isnan(record.turn_rewards[:-1]).all()
        assert record.turn_rewards[-1] == np.float32(np.nansum(rewards))
        assert record.metrics == {"turns": float(len(rewards))}
    stats = scheduler.stats
    assert stats.sessions == len(added) and stats.forks == stats.realigned_tokens == 0
    assert stats.session_calls == sum(t.num_turns for t in found.values())
    scheduler.sleep()
    scheduler.close()
    hub.leave()
    assert hub.process.is_closed and hub.endpoint.is_closed and not hub.live


def test_with_waits_a_step_waits_for_every_session():
    """The second agent is slow: its call comes when the first one's step has begun."""
    hub, scheduler = made(waits=True)
    added = [request(i) for i in range(2)]
    for each in added:
        scheduler.add(each)
    clients = [Client(hub, r.id) for r in added]
    calls = [clients[0].ask(added[0].prompt)]
    late = threading.Timer(0.1, lambda: calls.append(clients[1].ask(added[1].prompt)))
    late.start()
    scheduler.step()
    assert len(calls) == 2 and scheduler.stats.prefilled == sum(len(r.prompt) for r in added)
    assert scheduler.stats.environment_seconds > 0.05
    late.join()


def test_an_answer_is_its_turn_alone():
    scheduler, client, added = opened()
    first = answered(scheduler, client.ask(added.prompt))
    assert first.prompt.tolist() == added.prompt.tolist() and 1 <= len(first.tokens) <= 5
    second = answered(scheduler, client.ask(ids_of(first) + [7, 8], max_tokens=2))
    assert second.prompt.tolist() == ids_of(first) + [7, 8]
    assert len(second.tokens) == len(second.logp_behav) == len(second.version) <= 2
    client.reply()
    record = last(scheduler)
    assert ids_of(record) == ids_of(second)
    np.testing.assert_array_equal(record.logp_behav[-len(second.tokens):], second.logp_behav)
    assert turn(record, 2).tokens.tolist() == record.tokens[2:].tolist()
    assert cut(record, 2).tokens.tolist() == record.tokens[:2].tolist()


def two_calls(scheduler, client, added, drop):
    """(answer, prompt of the second call): it changes the last `drop` ids of the answer."""
    first = answered(scheduler, client.ask(added.prompt))
    assert len(first.tokens) > drop
    ids = ids_of(first)
    changed = [(t + 1) % 20 + 3 if t != 22 else 4 for t in ids[len(ids) - drop:]]
    return first, ids[: len(ids) - drop] + changed[:1] + [9]


def test_a_prompt_that_changes_the_end_of_an_answer_cuts_the_row_there():
    scheduler, client, added = opened(2)
    first, prompt = two_calls(scheduler, client, added, drop=2)
    second = answered(scheduler, client.ask(prompt))
    client.reply(0.5)
    record = last(scheduler)
    assert ids_of(record) == [*prompt, *second.tokens.tolist()]
    kept = len(first.tokens) - 2
    mask = [True] * kept + [False] * 2 + [True] * len(second.tokens)
    assert record.mask.tolist() == mask
    assert record.turn.tolist() == [0] * kept + [1] * (2 + len(second.tokens))
    arithmetic.assert_replays(record, added)
    assert scheduler.stats.realigned_tokens == 2 and scheduler.stats.forks == 0


def test_another_prompt_forks_and_the_longest_row_is_the_record():
    scheduler, client, added = opened(1)
    first = answered(scheduler, client.ask(added.prompt, max_tokens=1))
    other = answered(scheduler, client.ask([5, 6, 7], max_tokens=4))
    client.reply()
    record = last(scheduler)
    assert record.prompt.tolist() == [5, 6, 7] and record.tokens.tolist() == other.tokens.tolist()
    assert record.id == added.id
    [fork] = record.forks
    assert (fork.id, fork.fork, record.fork) == (added.id, 0, 1)
    assert ids_of(fork) == ids_of(first) and fork.outcome == "" and not len(fork.turn_rewards)
    stats = scheduler.stats
    assert (stats.forks, stats.forked_tokens, stats.session_calls) == (1, len(first.tokens), 2)


def test_forks_are_refused_by_choice():
    scheduler, client, added = opened(1, on_fork="refuse")
    answered(scheduler, client.ask(added.prompt))
    call = client.ask([5, 6, 7])
    record = last(scheduler)
    assert record.outcome == "failed" and "on_fork" in str(call.result)
    assert isinstance(call.result, ValueError) and client.session.end
    assert np.isnan(record.turn_rewards).all() and scheduler.pending == 0


def test_the_same_prompt_is_another_sample_and_a_retry_is_the_same_answer():
    scheduler, client, added = opened(0)
    first = client.ask(added.prompt)
    retried_early = client.ask(added.prompt, is_retry=True)
    assert retried_early is first
    answered(scheduler, first)
    assert client.ask(added.prompt, is_retry=True) is first
    assert [t.tokens.tolist() for t in client.got] == [first.result.tokens.tolist()] * 3
    second = client.ask(added.prompt)
    assert second is not first
    answered(scheduler, second)
    assert second.result.request != first.result.request  # the sampling noise of the row
    client.reply()
    last(scheduler)
    assert (scheduler.stats.session_retries, scheduler.stats.forks) == (2, 1)


def test_parallel_calls_are_rows_of_their_own():
    scheduler, client, added = opened(0)
    calls = [client.ask([*added.prompt, token]) for token in (4, 5, 6)]
    for call in calls:
        answered(scheduler, call)
    ends = [ids_of(call.result) for call in calls]
    later = [client.ask([*ids, 9], max_tokens=3) for ids in reversed(ends)]
    for call in later:
        answered(scheduler, call)
    client.reply()
    record = last(scheduler)
    assert ids_of(record) in [ids_of(call.result) for call in later]
    sampled = [len(c.result.tokens) + len(d.result.tokens) for c, d in zip(calls, reversed(later), strict=True)]
    assert record.mask.sum() == max(sampled)
    assert sorted([record.fork, *(fork.fork for fork in record.forks)]) == [0, 1, 2]
    assert sorted(int(row.mask.sum()) for row in (record, *record.forks)) == sorted(sampled)
    assert sorted(map(ids_of, (record, *record.forks))) == sorted(ids_of(c.result) for c in later)
    assert scheduler.stats.forks == 2
    assert scheduler.stats.forked_tokens == sum(sampled) - max(sampled)


def test_an_answer_that_nobody_got_is_not_trained_on():
    scheduler, client, added = opened(0)
    first = answered(scheduler, client.ask(added.prompt, max_tokens=2))
    call = client.ask([*ids_of(first), 9])
    scheduler.step()
    call.leave("listener1")
    assert call.is_gone
    while call.result is None:
        scheduler.step()
    again = answered(scheduler, client.ask([*ids_of(first), 9], max_tokens=4))
    client.reply(calls=[(first.tokens.tolist(), None), (again.tokens.tolist(), None)])
    record = last(scheduler)
    assert record.outcome == "done" and ids_of(record) == ids_of(again)
    assert scheduler.stats.forks == 0 and record.num_turns == 2


def test_an_answer_that_nobody_got_leaves_the_row_as_it_was():
    """Its prompt changed the end of the answer before. The tokens there, their number and the reason
    of their end are those of a session without it."""
    scheduler, client, added = opened(2)
    first, prompt = two_calls(scheduler, client, added, drop=2)
    call = client.ask(prompt, max_tokens=9)
    call.leave("listener1")
    while call.result is None:
        scheduler.step()
    assert call.result.stop_reason != first.stop_reason
    client.reply(None, error="Timeout: of the client")
    record = last(scheduler)
    assert ids_of(record) == ids_of(first) and record.stop_reason == first.stop_reason
    assert scheduler.stats.realigned_tokens == 0


def test_a_call_without_an_answer_counts_no_tokens():
    """The session ends while the call that changed two tokens is sampled."""
    scheduler, client, added = opened(1)
    first, prompt = two_calls(scheduler, client, added, drop=2)
    call = client.ask(prompt, max_tokens=9)
    scheduler.step()
    assert call.result is None
    client.reply(0.5, calls=[(first.tokens.tolist(), None)])
    record = last(scheduler)
    assert ids_of(record) == ids_of(first)
    assert scheduler.stats.realigned_tokens == 0


def test_a_call_that_the_engine_refuses_changes_nothing():
    scheduler, client, added = opened(2)
    first, prompt = two_calls(scheduler, client, added, drop=2)
    refused = client.ask([*prompt, *[4] * MAX_LENGTH])
    scheduler.step()
    assert "as many as may be drawn" in str(refused.result)
    client.reply()
    assert ids_of(last(scheduler)) == ids_of(first)
    assert scheduler.stats.realigned_tokens == 0


@pytest.mark.parametrize("change, words", [
    (lambda calls: calls, ""),
    (lambda calls: calls[::-1], ""),
    (lambda calls: [(ids, None) for ids, _ in calls], ""),
    (lambda calls: [(ids, [x + 5e-5 for x in logps]) for ids, logps in calls], ""),
    (lambda calls: calls[:1], "reports 1 calls, and 2 were answered"),
    (lambda calls: [calls[0], calls[0]], "of call 1 that no call had"),
    (lambda calls: [([*calls[0][0][:-1], 5], None), calls[1]], "of call 0"),
    (lambda calls: [calls[0], (calls[1][0], [x - 0.01 for x in calls[1][1]])], "of call 1"),
    (lambda calls: [calls[0], (calls[1][0], calls[1][1][:-1])], "of call 1"),
])
def test_what_a_harness_says_it_got_is_compared(change, words):
    scheduler, client, added = opened(0)
    first = answered(scheduler, client.ask(added.prompt))
    second = answered(scheduler, client.ask([*ids_of(first), 9]))
    calls = [(t.tokens.tolist(), t.logp_behav.tolist()) for t in (first, second)]
    client.reply(calls=change(calls))
    record = last(scheduler)
    assert (record.outcome == "failed") == bool(words)  # else done, or overlong where a call was cut
    assert words in record.error and bool(words) == bool(record.error)


@pytest.mark.parametrize("reply, outcome, words", [
    (dict(), "failed", "made no call"),
    (dict(error="OSError: of the agent"), "failed", "OSError: of the agent"),
])
def test_a_session_without_an_answer_fails(reply, outcome, words):
    scheduler, client, added = opened()
    client.reply(**reply)
    record = last(scheduler)
    assert (record.outcome, len(record.tokens), record.id) == (outcome, 0, added.id)
    assert record.prompt.tolist() == added.prompt.tolist()
    assert words in record.error and scheduler.pending == 0


@pytest.mark.parametrize("asked, is_cut", [(5, True), (2, False)])
def test_a_call_that_the_run_has_cut_is_a_cut_answer(asked, is_cut):
    """Not one that asked for less than the run's 5 tokens."""
    for number in range(30):
        scheduler, client, added = opened(number)
        sampled = answered(scheduler, client.ask(added.prompt, max_tokens=asked))
        if sampled.stop_reason == "length":
            break
    assert len(sampled.tokens) == asked
    client.reply(0.5)
    record = last(scheduler)
    assert record.outcome == ("overlong" if is_cut else "done")
    assert record.stop_reason == ("length" if is_cut else "stop")
    assert record.turn_rewards.tolist() == [0.5]


def test_the_mark_of_another_message_is_realigned():
    """The agent's next prompt has another mark in the place of the one that was sampled."""
    for number in range(30):
        scheduler, client, added = opened(number)
        first = answered(scheduler, client.ask(added.prompt))
        if first.tokens[-1] == 3 and len(first.tokens) > 1:
            break
    prompt = [*ids_of(first)[:-1], 2, 9]
    answered(scheduler, client.ask(prompt))
    client.reply()
    record = last(scheduler)
    count = len(first.tokens) - 1
    assert record.forks == () and ids_of(record)[: len(prompt)] == prompt
    assert record.mask.tolist()[: count + 2] == [True] * count + [False] * 2
    assert scheduler.stats.realigned_tokens == 1
    arithmetic.assert_replays(record, added)


def test_an_error_after_a_prompt_without_room_is_overlong():
    scheduler, client, added = opened()
    answered(scheduler, client.ask(added.prompt))
    client.session.is_overlong = True
    client.reply(None, error="BadRequestError: of the client")
    record = last(scheduler)
    assert (record.outcome, record.stop_reason) == ("overlong", "length")


def test_the_end_of_the_process_is_a_failure_also_after_a_prompt_without_room():
    scheduler, client, added = opened()
    answered(scheduler, client.ask(added.prompt))
    client.session.is_overlong = True
    client.reply(None, error="the harness's process ended", is_lost=True)
    record = last(scheduler)
    assert (record.outcome, "process ended" in record.error) == ("failed", True)


def test_a_call_ends_where_the_row_has_no_room():
    scheduler, client, added = opened()
    prompt = np.arange(MAX_LENGTH - 2) % 20 + 3
    result = answered(scheduler, client.ask(prompt, max_tokens=5))
    assert len(result.tokens) <= 2


def test_a_session_that_never_ends_times_out():
    scheduler, client, added = opened(timeout=0.05, waits=True)
    first = answered(scheduler, client.ask(added.prompt))
    waiting = client.ask([*ids_of(first), 9], max_tokens=5)
    record = None
    while record is None:
        record = next(iter(scheduler.step()), None)
        time.sleep(0.06)
    assert record.outcome == "timeout" and record.num_turns == 1
    assert isinstance(waiting.result, Ended) or waiting.result is not None
    assert record.error == "a session exceeded rollout.harness_timeout = 0.05 seconds"
    assert client.session.end and scheduler.pending == 0
    assert client._process.checks == 1
    scheduler.step()


@pytest.mark.parametrize("compiled, deadline", [(1.0, 50.0), (0.0, 20.0)])
def test_the_clock_of_a_session_stands_while_a_program_is_compiled(monkeypatch, compiled, deadline):
    """The first call of the engine takes 30 s, tracing included; a session may take 20 s. Another
    session begins after that call and gains nothing."""
    now, seconds = [0.0], [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    for module in (sessions, live):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(sessions.goodput, "compile_seconds", lambda: seconds[0])
    scheduler, client, added = opened(timeout=20.0)
    client.ask(added.prompt)
    inner, sample = scheduler._scheduler, scheduler._scheduler.step

    def first_call():
        now[0], seconds[0] = now[0] + 30, seconds[0] + compiled
        return sample()

    monkeypatch.setattr(inner, "step", first_call)
    assert scheduler.step() == []
    monkeypatch.setattr(inner, "step", sample)
    late = request(1)
    scheduler.add(late)
    deadlines = {id: session.deadline for id, session in scheduler._sessions.live.items()}
    assert deadlines == {added.id: deadline, late.id: 50.0}
    now[0] = deadline
    ended = [id for id, end in deadlines.items() if end == deadline]
    assert [t.outcome for t in scheduler.step()] == ["timeout"] * len(ended)


def test_sessions_at_a_time_need_open_files(monkeypatch):
    monkeypatch.setattr(live.cli, "raise_file_limit", lambda: 1024)
    live.check_files(384)  # 2 * 384 + 256 = 1024
    with pytest.raises(ValueError, match=r"^385 sessions .* need 1026 open files, .* is 1024 \(ulimit"):
        live.check_files(385)


@pytest.mark.parametrize("settings, count", [
    (dict(), 16),  # 4 prompts, 4 samples of each
    (dict(correction__advantage="remax"), 20),  # and a greedy one
    (dict(eval__prompts=9), 18),
    (dict(rollout__schedule="areal(staleness=2)", rollout__workers=2), 2 * 8 + 2 * 8),
])
def test_the_sessions_of_a_run_at_a_time(settings, count):
    config = tiny.config(**settings)
    assert live.at_once(config, schedules.parse(config.rollout.schedule)) == count


@pytest.mark.parametrize("at", [0, 1, 2, 3, 5])
def test_an_interrupted_session_goes_on_at_another_scheduler(at):
    """Its call waits; an update comes in between, and the record says which weights sampled what."""
    hub, one, two = made(2)
    added = [request(i) for i in range(4)]
    for each in added:
        one.add(each)
    clients = [Client(hub, r.id) for r in added]
    calls = [c.ask(r.prompt) for c, r in zip(clients, added, strict=True)]
    for _ in range(at):
        assert one.step() == []
    paused = one.pause("abort")
    assert sorted(t.id for t in paused) == sorted(r.id for r in added) and one.pending == 0
    assert {t.stop_reason for t in paused} == {"abort"}
    two.set_params(1, 1)
    assert hub.endpoint.version == 1
    for each, partial in zip(added, sorted(paused, key=lambda t: t.id), strict=True):
        two.add(dataclasses.replace(each, partial=partial if len(partial.tokens) else None))
    answers = [answered(two, call) for call in calls]
    for client in clients:
        client.reply()
    found = {}
    while two.pending:
        found |= {t.id: t for t in two.step()}
    partials = {t.id: t for t in paused}
    for each, answer in zip(added, answers, strict=True):
        record, begun = found[each.id], len(partials[each.id].tokens)
        arithmetic.assert_replays(record, each)
        assert record.tokens.tolist() == answer.tokens.tolist()
        assert record.tokens[:begun].tolist() == partials[each.id].tokens.tolist()
        assert not record.version[:begun].any() and record.version[begun:].all()
    assert sum(len(t.tokens) for t in paused) == one.stats.tokens
    assert (at == 0) == (one.stats.tokens == 0)
    assert two.stats.restarted_sessions == 0


def test_new_weights_between_two_turns():
    scheduler, client, added = opened(0)
    first = answered(scheduler, client.ask(added.prompt))
    scheduler.set_params(1, 1)
    second = answered(scheduler, client.ask([*ids_of(first), 9]))
    assert set(first.version) == {0} and set(second.version) == {1}
    client.reply()
    arithmetic.assert_replays(last(scheduler), added)


def test_after_a_restart_of_the_run_a_session_begins_anew():
    hub, scheduler = made()
    added = request(0)
    tokens = np.array([4, 5], np.int32)
    partial = dataclasses.replace(
        EMPTY, id=added.id, prompt=added.prompt, tokens=tokens, mask=np.ones(2, bool),
        turn=np.zeros(2, np.int32), stop_reason="abort",
    )
    scheduler.add(dataclasses.replace(added, partial=partial))
    client = Client(hub, added.id)
    answered(scheduler, client.ask(added.prompt))
    client.reply()
    record = last(scheduler)
    arithmetic.assert_replays(record, added)
    assert scheduler.stats.restarted_sessions == 1


def test_a_sample_that_has_to_begin_anew_gets_another_agent():
    """Its tokens are too old: the request comes without them."""
    hub, scheduler = made()
    added = request(0)
    scheduler.add(added)
    old = Client(hub, added.id)
    answered(scheduler, old.ask(added.prompt))
    scheduler.pause("abort")
    scheduler.add(added)
    new = Client(hub, added.id)
    assert new.live is not old.live and "anew" in old.session.end
    assert hub.process.cancelled == [old.live.key]
    answered(scheduler, new.ask(added.prompt))
    new.reply()
    assert last(scheduler).outcome == "done"


def test_calls_of_other_sessions_do_not_wait_for_the_start_of_an_agent(monkeypatch):
    """The first session ends while its agent starts, and is cancelled then."""
    hub, scheduler = made()
    is_late, goes_on, start = threading.Event(), threading.Event(), FakeProcess.start

    def late(self, key, session):
        is_late.set()
        goes_on.wait(20)
        start(self, key, session)

    monkeypatch.setattr(FakeProcess, "start", late)
    thread = threading.Thread(target=scheduler.add, args=(request(0),))
    thread.start()
    assert is_late.wait(20) and hub.changed.acquire(timeout=10)
    hub.changed.release()
    live = hub.live["e0"]
    hub.end(live, "for the test")
    goes_on.set()
    thread.join(20)
    assert list(hub.process.started) == ["key0"] and hub.process.cancelled == ["key0", "key0"]


def test_a_cancelled_session_ends_its_calls():
    scheduler, client, added = opened(2)
    call = client.ask(added.prompt)
    scheduler.step()
    scheduler.abort(added.id)
    assert scheduler.pending == 1 and isinstance(call.result, Ended)
    assert [t.stop_reason for t in scheduler.step()] == ["abort"]
    assert scheduler.pending == 0
    scheduler.release_cache()


def test_an_interrupted_session_that_nobody_takes_ends_with_its_time():
    hub, scheduler = made(timeout=0.01)
    scheduler.add(request(0))
    scheduler.pause("abort")
    assert hub.live
    time.sleep(0.02)
    scheduler.step()
    assert not hub.live


def test_a_process_that_ends_again_and_again_ends_the_run():
    scheduler, client, _ = opened()
    scheduler._sessions.process.error = "the process has ended 5 times"
    client.reply(None, error="the harness's process ended")
    with pytest.raises(RuntimeError, match="ended 5 times"):
        scheduler.step()


def test_requests_without_an_example_are_single_turns():
    hub, scheduler = made()
    plain = arithmetic.request("plain", max_tokens=4)
    scheduler.add(plain)
    with pytest.raises(ValueError, match="1 requests are pending"):
        scheduler.sleep()
    scheduler.add(request(0))
    client = Client(hub, request(0).id)
    call = client.ask(request(0).prompt)
    found = {}
    while "plain" not in found or call.result is None:
        found |= {t.id: t for t in scheduler.step()}
    assert found["plain"].tokens.tolist() == arithmetic.alone(plain)[0]
    scheduler.pause("abort")
    assert scheduler.pending == 0


def test_a_second_live_request_of_an_id_is_refused():
    _, scheduler = made()
    scheduler.add(request(0))
    with pytest.raises(ValueError, match="another live request has this id"):
        scheduler.add(request(0))


def test_stop_strings_of_a_call_end_its_turn():
    scheduler, client, added = opened(0)
    free = answered(scheduler, client.ask(added.prompt, max_tokens=5))
    stop = arithmetic.text_of([free.tokens[1]])
    scheduler, client, added = opened(0)
    ended = answered(scheduler, client.ask(added.prompt, max_tokens=5, stops=(stop,)))
    assert ended.tokens.tolist() == free.tokens[: len(ended.tokens)].tolist()
    assert arithmetic.text_of(ended.tokens).endswith(stop) and len(ended.tokens) <= 2


def continued(number, stops=()):
    """(first answer, second answer) of two calls. The second one's prompt is the row so far."""
    scheduler, client, added = opened(number)
    first = answered(scheduler, client.ask(added.prompt, max_tokens=3))
    return first, answered(scheduler, client.ask(ids_of(first), max_tokens=6, stops=stops))


def free_number():
    """The number of a request whose answers of `continued` have 3 and 6 tokens, the second one new
    ones."""
    for number in range(99):
        first, free = continued(number)
        is_new = not {*first.tokens} & {*free.tokens}
        if len(first.tokens) == 3 and len({*free.tokens}) == 6 and is_new:
            return number
    raise AssertionError("no such request")


def test_a_stop_string_counts_in_the_answer_to_its_own_call():
    """A call that goes on where the last answer was cut: stop strings neither begin in that answer,
    nor does one that it holds end the next answer early."""
    number = free_number()
    first, free = continued(number)
    before, text = arithmetic.text_of(first.tokens), arithmetic.text_of(free.tokens)
    for stop, count in ((before[2] + text[0], 6), (text[3], 4)):
        stops = (stop, before[1])
        assert continued(number, stops)[1].tokens.tolist() == free.tokens[:count].tolist(), stop


def test_a_stop_string_of_an_interrupted_call_may_begin_before_the_interruption():
    number = free_number()
    stop = arithmetic.text_of(continued(number)[1].tokens[1:3])
    hub, one, two = made(2)
    added = request(number)
    one.add(added)
    client = Client(hub, added.id)
    first = answered(one, client.ask(added.prompt, max_tokens=3))
    call = client.ask(ids_of(first), max_tokens=6, stops=(stop,))
    assert one.step() == [] and call.result is None
    [partial] = one.pause("abort")
    assert len(partial.tokens) == 3 + 2  # of a call of two steps
    two.add(dataclasses.replace(added, partial=partial))
    assert arithmetic.text_of(answered(two, call).tokens[1:]) == stop


def test_a_wait_for_agents_beats_and_can_be_given_up(monkeypatch):
    monkeypatch.setattr(sessions, "PULSE_SECONDS", 0.01)
    beats = []

    def heartbeat():
        beats.append(1)
        if len(beats) == 3:
            raise InterruptedError

    scheduler, _, _ = opened(0, waits=True, heartbeat=heartbeat)
    with pytest.raises(InterruptedError):
        scheduler.step()


def test_a_retry_is_of_the_call_whose_client_has_gone():
    """Two equal calls at once; the client of the first has left."""
    scheduler, client, added = opened(0)
    first, second = (client.ask(added.prompt) for _ in range(2))
    first.is_gone = True
    assert client.ask(added.prompt, is_retry=True) is first
    first.is_gone = False
    assert client.ask(added.prompt, is_retry=True) is second


def test_the_reward_of_no_number_is_unknown():
    scheduler, client, added = opened(0)
    answered(scheduler, client.ask(added.prompt))
    client.reply(None)
    record = last(scheduler)
    assert record.outcome == "done" and math.isnan(record.turn_rewards[0])


def test_the_run_imposes_its_sampling():
    session = Session(SamplingParams(temperature=0.5, top_p=0.9, stop_ids=STOPS, max_tokens=5), None)
    asked = SamplingParams(
        temperature=2.0, top_k=3, presence_penalty=1.0, stop_ids=(3, 7), stop_strings=("x",),
        max_tokens=3, min_tokens=2,
    )
    completion = Completion(
        "c", [Choice("c/0", np.array([1]), 0, asked)], 1, False, False, False, None, False, ()
    )
    imposed = session.imposed(completion).choices[0].sampling
    assert imposed == SamplingParams(
        temperature=0.5, top_p=0.9, stop_ids=(2, 3, 7), stop_strings=("x",), max_tokens=3
    )
