"""Sessions: sequences whose turns come through the endpoint, from an agent that a harness runs.

One session goes through these functions of `SessionScheduler`:

1. `add` opens a session (`Sessions.start`): the endpoint has an address for it,
   and the harness's process starts the agent.
2. The endpoint puts each call of the agent into `Live.calls`. The next `step` takes it: `_begin`
   joins its prompt to the session's rows. A prompt that begins with all ids of a row goes on in
   this row (`Scheduler.extend`). One that changes the end of the last answer cuts the row there.
   Any other begins a row of its own, a fork.
3. When the turn has ended, `_answer` sends it to the client. The row keeps what the engine recorded.
4. When the harness has returned, `step` returns the longest row as the session's record, with the
   other rows in `forks`.

An interrupted session (`pause`) keeps its rows and its agent in `Sessions`, which all schedulers of
a process share. Its call waits until its request is added again, at any of them.
"""

import dataclasses
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_tis.endpoint.calls import Call
from jaxrl_tis.engine.records import Request, SamplingParams, Trajectory, cut, extended
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.environments.continuity import Fork, Realign, joined_to_one
from jaxrl_tis.record import goodput
from jaxrl_tis.rollouts.live import CANCELLED, Live, Row, Sessions, turn
from jaxrl_tis.rollouts.turn_scheduler import TurnScheduler

PULSE_SECONDS = 0.5  # longest wait for a call, if the sampler has nothing else to do
LOGP_ERROR = 1e-4  # of a log-prob that a harness reports: records of others round to 4 decimals
ON_FORK = ("rows", "longest", "refuse")


class SessionScheduler(TurnScheduler):
    """A scheduler of sessions.

    Args:
      scheduler: samples the turns. It needs `decode`, because calls may have stop strings.
      sessions: shared by all schedulers of the process.
      options: of TurnScheduler. on_fork is one of ON_FORK: "refuse" fails sessions with a fork, and
        the learner tells the others apart. With `waits` a step waits until each session has a
        call in work or has ended.
    """

    def __init__(self, scheduler: Scheduler, sessions: Sessions, **options: Any):
        super().__init__(scheduler, **options)
        self._sessions = sessions
        self._live: dict[str, Live] = {}
        self._rows: dict[str, tuple[Live, Row]] = {}  # that the scheduler samples
        self._dropped: set[str] = set()  # ids of rows that were aborted
        self._clock = time.monotonic(), goodput.compile_seconds()
        sessions.enter()

    # For callers

    @property
    def pending(self) -> int:
        """The number of requests that have not been returned yet."""
        single = self._scheduler.pending - len(self._rows) - len(self._dropped)
        return single + len(self._live) + len(self._ended)

    def _add(self, request: Request) -> None:
        """Opens a session, or goes on with an interrupted one of this process. After a restart of
        the run, `partial` has no agent any more: the session begins anew."""
        self._stop_clock()
        live, goes_on = self._sessions.own(request)
        self.stats.restarted_sessions += request.partial is not None and not goes_on
        self._live[request.id] = live
        for row in live.rows:
            if row.running:
                self._run(live, row, row.running)

    def abort(self, request_id: str) -> None:
        """Ends a request, see `Scheduler.abort`. The agent's calls are refused from now on."""
        if request_id not in self._live:
            self._scheduler.abort(request_id)
            return
        live = self._live[request_id]
        self._leave(live, CANCELLED)
        self._ended.append(live.unfinished())

    def _aborted(self, paused: list[Trajectory]) -> list[Trajectory]:
        """Agents go on, and their calls wait."""
        ended = []
        for trajectory in paused:
            if trajectory.id not in self._rows:
                ended += self._single([trajectory])
                continue
            live, row = self._rows.pop(trajectory.id)
            if trajectory.stop_reason == "abort":
                assert row.running is not None
                row.running = dataclasses.replace(row.running, partial=trajectory)
            else:
                self._answer(live, row, trajectory)
        for live in self._live.values():
            ended.append(live.unfinished())
            self._sessions.disown(live)
        self._live = {}
        return ended

    def set_params(self, params: Any, version: int) -> None:
        """Replaces the weights of all tokens sampled from now on, see `Scheduler.set_params`."""
        super().set_params(params, version)
        self._sessions.endpoint.set_version(version)

    def drawn(self, request_ids: Collection[str]) -> dict[str, np.ndarray]:
        """Returns the tokens so far of the requests without a session among these."""
        return self._scheduler.drawn(set(request_ids) - self._rows.keys())

    def records(self) -> list[Trajectory]:
        """Returns the records of the sequences without a session, see `Scheduler.records`."""
        return [t for t in self._scheduler.records() if t.id not in self._rows]

    def sync_digest(self) -> dict[str, Any]:
        """Returns everything that decides the next step, by name, see `Scheduler.sync_digest`."""
        rows = {id: len(live.rows) for id, live in self._live.items()}
        return self._scheduler.sync_digest() | {"rows": rows}

    def release_cache(self) -> None:
        """Frees the KV cache. ValueError while requests are pending."""
        while self._scheduler.pending and not self.pending:
            self._scheduler.step()  # returns aborted rows
            self._dropped.clear()
        super().release_cache()

    def close(self) -> None:
        """Ends the sessions of this scheduler; with the last scheduler of the process, the harness
        and the endpoint."""
        for live in list(self._live.values()):
            self._leave(live, "the run has ended")
        self._sessions.leave()
        super().close()

    # One step

    def step(self) -> list[Trajectory]:
        """Takes the calls that have arrived, makes one step of the scheduler if it has work, and
        returns the records that ended.

        Raises:
          RuntimeError: the harness's process has ended again and again.
        """
        self._stop_clock()
        self._sessions.expire()
        if not self._sessions.process.error:
            self._wait()  # the heartbeat may raise
        if self._sessions.process.error:
            raise RuntimeError(self._sessions.process.error)
        finished, self._ended = self._ended, []
        for live in list(self._live.values()):
            if live.reply is not None or time.monotonic() >= live.deadline:
                finished.append(self._finished(live))
            while live.calls and live.request.id in self._live:
                if (refused := self._begin(live, live.calls.popleft())) is not None:
                    finished.append(refused)
        self._stop_clock()  # the wait was the agents' time
        # After the engine's step nothing of the agents is read: with `waits` they have the whole
        # time until the next step, whatever their speed.
        for trajectory in self._scheduler.step() if self._scheduler.pending else ():
            if trajectory.id in self._rows:
                self._answer(*self._rows.pop(trajectory.id), trajectory)
            else:
                finished += self._single([trajectory])
        return finished

    def _stop_clock(self) -> None:
        """Takes the time since the last call from no session if a program was compiled meanwhile. Its
        first call also traces it, so all of this time is left out."""
        (before, compiled), self._clock = self._clock, (time.monotonic(), goodput.compile_seconds())
        if self._clock[1] > compiled:
            self._sessions.postpone(self._clock[0] - before)

    def _wait(self) -> None:
        """Waits for the agents; without `waits` only if the scheduler has nothing to do."""
        if not self._live or not self._waits and self._scheduler.pending:
            return
        start, live = time.perf_counter(), self._live.values()
        deadline = min(x.deadline for x in live)
        is_ready = lambda: all(x.has_news or x.is_running for x in live)
        if not self._waits:
            deadline = min(deadline, time.monotonic() + PULSE_SECONDS)
            is_ready = lambda: any(x.has_news for x in live)
        while (left := deadline - time.monotonic()) > 0:
            with self._sessions.changed:
                if self._sessions.changed.wait_for(is_ready, min(left, PULSE_SECONDS)):
                    break
            self._heartbeat()
        self.stats.environment_seconds += time.perf_counter() - start

    def _begin(self, live: Live, call: Call) -> Trajectory | None:
        """Samples the answer to a call. Returns the session's record if the call ends it."""
        prompt = call.choice.prompt
        idle = [row for row in live.rows if not row.running]
        for row in idle:
            row.keep_delivered()
        idle = [row for row in idle if row.record is not None]
        live.rows = [row for row in live.rows if row.running or row.record is not None]
        index, how = joined_to_one([(row.ids, row.turn_start) for row in idle], prompt)
        if isinstance(how, Fork):
            if live.rows and self._on_fork == "refuse":
                why = "a call continues no row of the session, and rollout.on_fork is 'refuse'"
                call.fail(ValueError(why))
                return self._end(live, "failed", error=why)
            row = self._new_row(live, prompt)
            running = dataclasses.replace(row.first, sampling=self._sampling(call, row, 0))
            start = lost = 0
        else:
            row = idle[index]
            partial, lost = dataclasses.replace(row.whole, stop_reason="abort"), 0
            if isinstance(how, Realign):
                partial = cut(partial, how.start - len(partial.prompt))
                lost = row.num_sampled - int(partial.mask.sum())
            partial = extended(partial, how.suffix) if how.suffix else partial
            start = len(partial.tokens)
            running = dataclasses.replace(
                row.first, sampling=self._sampling(call, row, start), partial=partial, start=start
            )
        try:
            self._run(live, row, running)
        except ValueError as error:
            call.fail(error)
            return None
        row.before, row.running, row.call = row.record, running, call
        row.start, row.lost = start, lost
        if row not in live.rows:
            live.rows.append(row)
            live.num_rows += 1
        return None

    def _new_row(self, live: Live, prompt: np.ndarray) -> Row:
        request = live.request
        id = f"{request.id}/fork{live.num_rows}" if live.num_rows else request.id
        return Row(Request(id, prompt, request.seed, request.sampling), live.num_rows)

    def _sampling(self, call: Call, row: Row, start: int) -> SamplingParams:
        """Returns the parameters of a turn. Their max_tokens counts the tokens before the turn."""
        sampling = call.choice.sampling
        room = self._max_length - len(row.first.prompt) - start
        return dataclasses.replace(sampling, max_tokens=start + min(sampling.max_tokens, room))

    def _run(self, live: Live, row: Row, running: Request) -> None:
        self._scheduler.add(running)
        self._rows[running.id] = live, row

    def _answer(self, live: Live, row: Row, trajectory: Trajectory) -> None:
        """Sends a whole turn to its client."""
        row.record, row.running = trajectory, None
        row.realigned += row.lost
        call = row.call
        assert call is not None
        call.answer(turn(trajectory, row.start))
        live.answered.append(call)

    def _single(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Returns the records of requests without a session; drops those of aborted rows."""
        single = [t for t in trajectories if t.id not in self._dropped]
        self._dropped -= {t.id for t in trajectories}
        return single

    # The end of a session

    def _finished(self, live: Live) -> Trajectory:
        reply, is_overlong = live.reply, self._sessions.endpoint.session(live.key).is_overlong
        if reply is None:
            self._sessions.process.check()
            why = f"a session exceeded rollout.harness_timeout = {self._sessions.timeout:g} seconds"
            return self._end(live, "timeout", error=why)
        if reply.error and is_overlong and not reply.is_lost:
            return self._end(live, "overlong")
        if reply.error:
            return self._end(live, "failed", error=reply.error)
        if not any(call.is_delivered for call in live.answered):
            return self._end(live, "failed", error="the harness made no call that was answered")
        if reply.calls is not None and (lie := differs(reply.calls, live.answered)):
            return self._end(live, "failed", error=lie)
        is_cut = any(call.is_delivered and self._is_cut(live, call.result) for call in live.answered)
        return self._end(live, "overlong" if is_cut else "done", reply.reward, reply.metrics)

    def _is_cut(self, live: Live, answer: Any) -> bool:
        """Whether a limit of the run cut an answer, and not a smaller one that its call asked for."""
        most = min(live.request.sampling.max_tokens, self._max_length - len(answer.prompt))
        return answer.stop_reason == "length" and len(answer.tokens) >= most

    def _end(
        self, live: Live, outcome: str, reward: float | None = None,
        metrics: Mapping[str, float] | None = None, error: str = "",
    ) -> Trajectory:
        """Returns the record of a session: its longest row, of equal rows the last, with the
        session's reward. The others are its forks."""
        retries = self._sessions.endpoint.session(live.key).retries
        delivered = sum(call.is_delivered for call in live.answered)
        self._leave(live, "it has ended")
        for row in live.rows:
            row.keep_delivered()
        rows = [row for row in live.rows if row.num_sampled]
        stats, sampled = self.stats, [row.num_sampled for row in rows]
        stats.sessions += 1
        stats.session_calls += delivered
        stats.session_retries += retries
        stats.forks += max(len(rows) - 1, 0)
        stats.forked_tokens += sum(sampled) - max(sampled, default=0)
        stats.realigned_tokens += sum(row.realigned for row in rows)
        longest = max(reversed(rows), key=lambda row: row.num_sampled, default=None)
        record = live.empty() if longest is None else longest.whole
        id, others = live.request.id, [row for row in rows if row is not longest]
        forks = [dataclasses.replace(row.whole, id=id, fork=row.number) for row in others]
        reasons = {"done": "stop", "overlong": "length"}
        rewards = np.full(record.num_turns, math.nan, np.float32)
        rewards[-1:] = math.nan if reward is None else reward
        return dataclasses.replace(
            record, id=id, outcome=outcome, turn_rewards=rewards, forks=tuple(forks),
            fork=0 if longest is None else longest.number,
            stop_reason=reasons.get(outcome, record.stop_reason), metrics=dict(metrics or {}),
            error=error,
        )

    def _leave(self, live: Live, why: str) -> None:
        """Ends a session and what the engine samples of it."""
        for row in live.rows:
            if row.running:
                row.running, row.lost = None, 0  # no answer has counted its tokens
                if self._rows.pop(row.first.id, None):
                    self._dropped.add(row.first.id)
                    self._scheduler.abort(row.first.id)
        live.rows = [row for row in live.rows if row.record is not None]
        self._live.pop(live.request.id, None)
        self._sessions.end(live, why)


def differs(reported: Sequence, calls: list[Call]) -> str:
    """Returns how the calls that a harness reports differ from those that were answered; "" if they
    are the same."""
    left = [call.result for call in calls if call.is_delivered]
    if len(reported) != len(left):
        return f"the harness reports {len(reported)} calls, and {len(left)} were answered"
    for number, (ids, logps) in enumerate(reported):
        found = next((i for i, t in enumerate(left) if _is_equal(t, ids, logps)), None)
        if found is None:
            return f"the harness reports tokens or log-probs of call {number} that no call had"
        del left[found]
    return ""


def _is_equal(t: Any, ids: list[int], logps: list[float] | None) -> bool:
    if t.tokens.tolist() != list(ids):
        return False
    return logps is None or (
        len(logps) == len(ids) and bool(np.all(np.abs(t.logp_behav - np.array(logps)) <= LOGP_ERROR))
    )
