"""Requests to several engines, whose answers, faults and versions the tests plan."""

import queue
import threading
import time
import types

import numpy as np
import pytest

from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.external import scheduler
from jaxrl_tis.external.client import Busy, EngineError, Gone, Refused
from jaxrl_tis.external.protocol import Answer
from jaxrl_tis.external.scheduler import ExternalScheduler, Member

ENGINE = types.SimpleNamespace(
    slots=2, max_length=64, vocab_size=50, max_stop_ids=4, num_penalised=0, top_n=0, quant_id="none",
    num_logits=0, num_kept=0, num_teachers=0, route_shape=(0, 0), num_experts=0,
)


def answer(*tokens, reason="stop", spans=None, **records):
    tokens = np.array(tokens, np.int32)
    none = np.zeros((len(tokens), 0))
    return Answer(
        tokens, -0.1 * np.float32(tokens), reason, spans, none.astype(np.int32),
        none.astype(np.float32), **records,
    )


class Planned:
    """An engine that answers what `plan` returns for (id, tokens), or raises it."""

    def __init__(self, plan=lambda id, tokens: answer(7)):
        self.plan, self.calls, self.own = plan, [], None
        self.fails = None
        self.got = queue.SimpleQueue()

    def generate(self, id, tokens, sampling, seed, top_n, adapter):
        self.got.put((id, [*map(int, tokens)], sampling, seed))
        found = self.plan(id, tokens)
        if isinstance(found, BaseException):
            raise found
        return found

    def abort(self, ids):
        self.calls.append(("abort", *ids))

    def pause(self):
        if self.fails is not None:
            raise self.fails
        self.calls.append("pause")

    def resume(self):
        self.calls.append("resume")

    def load(self, path, version):
        self.calls.append(("load", path))
        self.own = version

    def version(self):
        return self.own


    def load_adapter(self, name, path, older):
        self.calls.append(("load_adapter", name, path, older))
        self.own = int(name.rpartition("-")[2])


def served(version, adapter=None):
    name = f"{adapter or 'version'}-{version}"
    return types.SimpleNamespace(
        path=f"weights/{name}", adapter=adapter and name, version=version
    )


def made(*kinds, check=lambda member, served: None, patience=60.0, engine=ENGINE, first=None):
    members = [Member(f"http://{i}", kind) for i, kind in enumerate(kinds)]
    return ExternalScheduler(members, engine, first or served(3), 3, check, patience)


def with_records(**widths):
    return types.SimpleNamespace(**{**vars(ENGINE), **widths})


def request(id="a", partial=None, **sampling):
    values = dict(max_tokens=8, stop_ids=(1,)) | sampling
    return Request(id, np.array([4, 5]), 11, SamplingParams(**values), partial)


def ended(made, count=1):
    found, start = [], time.monotonic()
    while len(found) < count:
        assert time.monotonic() - start < 20
        found += made.step()
    return found


def test_a_sync_pauses_loads_and_resumes_before_any_request():
    kind = Planned()
    s = made(kind)
    assert kind.calls == ["pause", ("load", "weights/version-3"), "resume"]
    s.set_params(served(4), 4)
    assert kind.calls[3:] == ["pause", ("load", "weights/version-4"), "resume"]


def test_a_record_has_the_versions_of_its_tokens():
    """A sync within an answer drops its keys: another segment, whose keys are of the new version."""
    hold, spans = threading.Event(), [("3", 0, 1), ("4", 1, 4)]
    s = made(Planned(lambda *_: (hold.wait(20), answer(7, 8, 9, 1, spans=spans))[1]))
    s.add(request())
    s.step()
    s.set_params(served(4), 4)
    hold.set()
    [record] = ended(s)
    assert record.tokens.tolist() == [7, 8, 9, 1] and record.stop_reason == "stop"
    np.testing.assert_allclose(record.logp_behav, [-0.7, -0.8, -0.9, -0.1], rtol=1e-6)
    assert record.version.tolist() == record.kv_version.tolist() == [3, 4, 4, 4]
    assert record.segment.tolist() == [0, 1, 1, 1]
    assert np.isnan(record.entropy).all() and np.isnan(record.logp_raw).all()
    assert s.pending == 0


def test_a_request_goes_on_after_its_partial_by_token_ids():
    hold = threading.Event()
    kind = Planned(lambda id, tokens: answer(6, 1) if len(tokens) > 2 else (
        hold.wait(20), answer(7, 8, reason="abort")
    )[1])
    kind.abort = lambda ids: hold.set()
    s = made(kind)
    s.add(request())
    s.step()
    [partial] = s.pause("abort")
    assert partial.stop_reason == "abort"
    s.set_params(served(5), 5)
    s.add(request(partial=partial, min_tokens=3, stop_ids=()))
    [record] = ended(s)
    assert record.tokens.tolist() == [7, 8, 6, 1] and record.version.tolist() == [3, 3, 5, 5]
    assert record.segment.tolist() == [0, 0, 1, 1] and record.turn.tolist() == [0] * 4
    kind.got.get()
    _, tokens, sampling, _ = kind.got.get()
    assert tokens == [4, 5, 7, 8] and (sampling.max_tokens, sampling.min_tokens) == (6, 1)


def test_a_turn_follows_the_tokens_of_an_environment():
    kind = Planned(lambda id, tokens: answer(6, 1) if len(tokens) > 4 else answer(7, 1))
    s = made(kind)
    s.add(request())
    [first] = ended(s)
    s.extend(first, [9, 9], SamplingParams(max_tokens=8, stop_ids=(1,)))
    [record] = ended(s)
    assert record.tokens.tolist() == [7, 1, 9, 9, 6, 1]
    assert record.mask.tolist() == [True, True, False, False, True, True]
    assert record.turn.tolist() == [0, 0, 1, 1, 1, 1]


def test_requests_go_to_the_engine_with_the_fewest():
    hold = threading.Event()
    wait = lambda *_: (hold.wait(20), answer(1))[1]
    one, other = Planned(wait), Planned(wait)
    s = made(one, other)
    for id in "abcde":
        s.add(request(id))
    s.step()
    assert one.got.qsize() + other.got.qsize() == 4 and s.pending == 5  # two slots each
    hold.set()
    assert {r.id for r in ended(s, 5)} == set("abcde")
    assert one.got.qsize() and other.got.qsize()
    s.close()


def test_work_of_an_engine_that_dies_goes_on_elsewhere(monkeypatch):
    monkeypatch.setattr(scheduler, "RETRY_SECONDS", 1e9)
    dead, well = Planned(lambda *_: Gone("it is gone")), Planned(lambda *_: answer(7, 1))
    s = made(dead, well)
    for id in "abcd":
        s.add(request(id))
    assert {r.id for r in ended(s, 4)} == set("abcd")
    assert well.got.qsize() >= 4 and s.pending == 0


def test_work_of_an_engine_that_hangs_goes_on_elsewhere(monkeypatch):
    """It takes requests and never answers; then not even a question for its version."""
    monkeypatch.setattr(scheduler, "RETRY_SECONDS", 1e9)
    monkeypatch.setattr(scheduler, "SILENT_SECONDS", 0.1)
    hung, well = Planned(lambda *_: time.sleep(30)), Planned(lambda *_: answer(7, 1))
    s = made(hung, well)

    def version():
        raise Gone("no answer in time")

    hung.version = version
    for id in "abc":
        s.add(request(id))
    assert {r.id for r in ended(s, 3)} == set("abc")
    assert hung.got.qsize() and s.pending == 0


def test_a_request_that_always_fails_ends_the_run(monkeypatch):
    monkeypatch.setattr(scheduler, "RETRY_SECONDS", 0.0)
    s = made(Planned(lambda *_: EngineError("answered 500: out of memory")))
    s.add(request())
    with pytest.raises(EngineError, match="request a failed 5 times: answered 500: out of memory"):
        ended(s)


def test_an_engine_that_comes_back_has_the_newest_weights_before_it_samples(monkeypatch):
    monkeypatch.setattr(scheduler, "RETRY_SECONDS", 0.0)
    kind = Planned()
    s = made(kind)
    kind.fails = Gone("it restarts")
    s.set_params(served(4), 4)
    s.add(request())
    assert s.step() == [] and kind.got.qsize() == 0
    kind.fails, kind.own = None, None
    [record] = ended(s)
    assert record.version.tolist() == [4] and kind.calls[-3:] == ["pause", ("load", "weights/version-4"), "resume"]


def test_a_run_without_any_engine_ends_with_their_reasons(monkeypatch):
    monkeypatch.setattr(scheduler, "RETRY_SECONDS", 0.0)
    kind = Planned()
    s = made(kind, patience=0.0)
    kind.fails = Gone("no answer at http://0")
    s.set_params(served(4), 4)
    with pytest.raises(EngineError, match="no engine has answered for 0 s: http://0: no answer at http://0"):
        for _ in range(100):
            s.step()
            time.sleep(0.001)


def test_a_version_that_an_engine_does_not_have_is_told(monkeypatch):
    kind = Planned()
    kind.load = lambda path, version: None
    kind.own = 2
    with pytest.raises(EngineError, match="says that its weights are of version 2, and it was given 3"):
        made(kind)


def test_a_request_that_an_engine_refuses_ends_the_run():
    s = made(Planned(lambda *_: Refused("answered 400: the prompt is too long")))
    s.add(request())
    with pytest.raises(Refused, match="too long"):
        ended(s)


def test_a_check_that_fails_ends_the_run():
    def check(member, served):
        raise ValueError(f"{member.url} samples from others")

    with pytest.raises(ValueError, match="http://0 samples from others"):
        made(Planned(), check=check)


def test_a_busy_engine_keeps_the_requests_that_it_has():
    """It takes one at a time here, and is given no second one once it has said so."""
    live, most = [], []

    def plan(id, tokens):
        live.append(id)
        most.append(count := len(live))
        time.sleep(0.02)
        live.remove(id)
        return Busy("answered 429") if count > 1 else answer(7, 1)

    kind = Planned(plan)
    s = made(kind)
    for id in "abcdef":
        s.add(request(id))
    assert {r.id for r in ended(s, 6)} == set("abcdef")
    assert kind.calls.count("pause") == 1 and most.count(2) <= 2


def test_an_end_that_nobody_asked_for_is_no_sample():
    """Of a deadline of the engine, or of another client."""
    kind = Planned(lambda id, tokens: answer(6, 1) if len(tokens) > 2 else answer(7, 8, reason="abort"))
    s = made(kind)
    s.add(request())
    [record] = ended(s)
    assert record.tokens.tolist() == [7, 8, 6, 1] and record.stop_reason == "stop"


def test_a_pause_returns_what_was_sampled():
    hold = threading.Event()
    kind = Planned(lambda *_: (hold.wait(20), answer(7, 8, reason="abort"))[1])
    kind.abort = lambda ids: hold.set()
    s = made(kind)
    for id in "abc":  # two slots
        s.add(request(id))
    s.step()
    found = {r.id: r for r in s.pause("abort")}
    assert {id: len(r.tokens) for id, r in found.items()} == {"a": 2, "b": 2, "c": 0}
    assert {r.stop_reason for r in found.values()} == {"abort"} and s.pending == 0


def test_a_request_goes_on_with_a_new_adapter_after_its_tokens():
    """An engine samples a request to its end with the adapter that it began with."""
    hold = threading.Event()
    kind = Planned(lambda id, tokens: answer(6, 1) if len(tokens) > 2 else (
        hold.wait(20), answer(7, 8, reason="abort")
    )[1])
    kind.abort = lambda names: (kind.calls.append(("abort", *names)), hold.set())
    s = made(kind, first=served(3, "adapter"))
    s.add(request())
    s.step()
    s.set_params(served(4, "adapter"), 4)
    assert kind.calls[-4:] == [
        ("abort", "a.0"), "pause", ("load_adapter", "adapter-4", "weights/adapter-4", "adapter-3"),
        "resume",
    ]
    [record] = ended(s)
    assert record.tokens.tolist() == [7, 8, 6, 1] and record.version.tolist() == [3, 3, 4, 4]


def test_weights_that_another_gave_are_known_by_their_name(monkeypatch):
    """An engine that started again between two requests samples from its first weights."""
    monkeypatch.setattr(scheduler, "RETRY_SECONDS", 0.0)
    spans = iter([[("default", 0, 2)], [("9", 0, 2)], [("3", 0, 2)]])
    kind = Planned(lambda *_: answer(7, 1, spans=next(spans)))
    s = made(kind)
    s.add(request())
    [record] = ended(s)
    assert record.version.tolist() == [3, 3]
    assert kind.calls.count(("load", "weights/version-3")) == 3
    names = [kind.got.get()[0] for _ in range(3)]
    assert names == ["a.0", "a.1", "a.2"]  # the engine may still hold a lost request
    assert ("abort", "a.0") in kind.calls


def test_another_scheduler_of_the_engines_leaves_them_with_its_weights():
    kind = Planned(lambda *_: answer(7, 1))
    s = made(kind)
    other = ExternalScheduler(s._members, ENGINE, served(5), 5, lambda *_: None, 60.0)
    other.close()
    s.add(request())
    [record] = ended(s)
    assert record.version.tolist() == [3, 3] and kind.calls[-2] == ("load", "weights/version-3")


def test_experts_of_a_request_in_parts():
    """Rows of tokens that were read before stay, and a later choice of others is counted."""
    engine = with_records(route_shape=(1, 2), num_experts=8)
    rows = lambda *experts: np.array(experts, np.int32)[:, None]
    first = rows([0, 1], [2, 3], [4, 5])
    whole = rows([1, 0], [2, 6], [4, 5], [6, 7], [0, 7])
    plan = {2: answer(7, 8, reason="abort", routes=first), 4: answer(6, 1, routes=whole)}
    hold = threading.Event()
    kind = Planned(lambda id, tokens: (hold.wait(20), plan[len(tokens)])[1])
    kind.abort = lambda ids: hold.set()
    s = made(kind, engine=engine)
    s.add(request())
    s.step()
    [partial] = s.pause("abort")
    assert partial.routes.tolist() == first.tolist() and partial.routes.dtype == np.uint8
    s.add(request(partial=partial))
    [record] = ended(s)
    np.testing.assert_array_equal(record.routes, np.concatenate([first, whole[3:]]))
    assert record.rerouted.tolist() == [3, 1]  # of three choices one is another set
    s.add(request("b"))
    plan[2] = answer(7, 8)
    with pytest.raises(Refused, match=r"of 4 tokens in \[1, 2\] the engine says none"):
        ended(s)


def test_possible_tokens_are_recorded_up_to_a_width():
    s = made(
        Planned(lambda *_: answer(7, 1, kept=[[9, 7], [1, 2, 3, 4]])), engine=with_records(num_kept=3)
    )
    s.add(request())
    [record] = ended(s)
    assert record.kept.tolist() == [[7, 9, -1], [-1, -1, -1]]  # four are too many
    s = made(Planned(), engine=with_records(num_kept=3))
    s.add(request())
    with pytest.raises(Refused, match="says no sampling masks, and rollout.sampling_mask_size is 3"):
        ended(s)


def test_what_an_engine_cannot_record_is_refused():
    s = made(Planned(), engine=with_records(num_penalised=4))
    with pytest.raises(ValueError, match="records no log-probs of prompts"):
        s.add(request(prompt_logprobs=True))
    with pytest.raises(ValueError, match="forgets presence and frequency penalties"):
        s.add(request(presence_penalty=0.5))
    with pytest.raises(KeyError, match="'z'"):
        s.abort("z")
