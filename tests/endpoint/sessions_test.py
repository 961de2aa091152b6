"""The endpoint of a run behind a socket, with a real client. The test answers its calls."""

import errno
import gc
import math
import threading
import time
import weakref
from unittest import mock

import httpx
import numpy as np
import openai
import pytest

from jaxrl_tis.data.tokenizer import CharTokenizer
from jaxrl_tis.endpoint import sessions
from jaxrl_tis.endpoint.calls import Ended
from jaxrl_tis.endpoint.sessions import RETRIES, Endpoint
from jaxrl_tis.engine.records import SamplingParams
from tests import arithmetic

TOKENIZER = CharTokenizer("abcdefghijklmnopqrst")  # the 23 ids of the engine
SAMPLING = SamplingParams(temperature=0.7, stop_ids=tuple(TOKENIZER.eos_ids), max_tokens=6)
LENGTH = 20
TEXT = {"model": "tiny", "prompt": "abc"}


class Door:
    """One session, its client, and answers: the first ids of the alphabet, or none yet."""

    def __init__(self, endpoint):
        self.endpoint, self.calls, self.is_answering = endpoint, [], True
        self.arrived = threading.Event()
        self.key, self.url = endpoint.open(SAMPLING, self._take)
        self.session = endpoint.session(self.key)
        self.client = openai.OpenAI(base_url=self.url, api_key=endpoint.token, timeout=10.0)

    def _take(self, call):
        self.calls.append(call)
        self.arrived.set()
        if self.is_answering:
            self.answer(call)

    def answer(self, call):
        count = min(call.choice.sampling.max_tokens, 4)
        scheduler = arithmetic.Scheduler(arithmetic.Engine(slots=1, steps=2, max_length=64), 0)
        request = arithmetic.request("r", call.choice.prompt, max_tokens=count)
        scheduler.add(request)
        while scheduler.pending:
            ended = scheduler.step()
        call.answer(ended[0])

    def post(self, path, body, token=None, **headers):
        url = self.url.removesuffix("/v1") + path
        given = {"authorization": f"Bearer {token or self.endpoint.token}"} | headers
        return httpx.post(url, json=body, headers=given, timeout=60.0)

    def wait(self, count):
        limit = time.monotonic() + 60
        while len(self.calls) < count and time.monotonic() < limit:
            time.sleep(0.005)
        assert len(self.calls) == count


@pytest.fixture(scope="module")
def endpoint():
    made = Endpoint("tiny", arithmetic.VOCAB, TOKENIZER, max_length=LENGTH, logprobs=0)
    yield made
    made.close()


@pytest.fixture
def door(endpoint):
    door = Door(endpoint)
    yield door
    if not door.session.end:
        endpoint.end(door.key, "the test is over")


def test_a_call_of_an_unchanged_client(door):
    answer = door.client.completions.create(**TEXT, max_tokens=3, temperature=1.9, top_p=0.1)
    [call] = door.calls
    assert call.choice.prompt.tolist() == TOKENIZER.encode("abc", add_special=True)
    assert answer.choices[0].text == TOKENIZER.decode(call.result.tokens)
    assert answer.usage.completion_tokens == 3 and call.is_delivered
    sampling = call.choice.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.7, 1.0, 3)


def test_max_tokens_are_bounded_and_stops_are_kept(door):
    door.client.completions.create(**TEXT, max_tokens=1000, stop=["q"], extra_body={
        "stop_token_ids": [9], "ignore_eos": True, "min_tokens": 2,
    })
    sampling = door.calls[0].choice.sampling
    assert (sampling.max_tokens, sampling.stop_strings, sampling.min_tokens) == (6, ("q",), 0)
    assert sampling.stop_ids == (*TOKENIZER.eos_ids, 9)


def test_a_stream_is_the_whole_answer(door):
    whole = door.client.completions.create(**TEXT).choices[0]
    parts = list(door.client.completions.create(**TEXT, stream=True))
    assert "".join(p.choices[0].text for p in parts if p.choices) == whole.text
    assert parts[-1].choices[0].finish_reason == whole.finish_reason == "length"


def test_token_ids_and_log_probs(door):
    body = {"token_ids": [4, 5, 6], "sampling_params": {"max_tokens": 3, "logprobs": 0}}
    reply = door.post("/inference/v1/generate", body).json()["choices"][0]
    result = door.calls[0].result
    assert reply["token_ids"] == result.tokens.tolist()
    assert [c["logprob"] for c in reply["logprobs"]["content"]] == result.logp_behav.tolist()


def test_the_models_and_the_tokenizer(door, endpoint):
    endpoint.set_version(7)
    [model] = door.client.models.list().data
    assert (model.id, model.max_model_len, model.version) == ("tiny", LENGTH, 7)
    assert door.post("/tokenize", {"prompt": "abc"}).json()["tokens"] == TOKENIZER.encode("abc", add_special=True)


@pytest.mark.parametrize("body, status, words", [
    ({"n": 2}, 400, "n is 2; give 1 to 1"),
    ({"model": "gpt"}, 404, "'gpt' is not served; use 'tiny'"),
    ({"prompt": ["a", "b"]}, 400, "2 prompts"),
    ({"unheard": 1}, 400, "unknown field"),
    ({"prompt": "a" * LENGTH}, 400, "21 prompt tokens; give 1 to 19"),
])
def test_a_call_that_is_refused(door, body, status, words):
    reply = door.post("/v1/completions", TEXT | body)
    assert reply.status_code == status and words in reply.json()["error"]["message"]
    assert door.session.is_overlong == ("prompt tokens" in words) and not door.calls


def test_the_token_and_the_address_are_the_ways_in(door):
    assert door.post("/v1/completions", TEXT, token="other").status_code == 401
    url = door.url.replace(door.key, "other")
    with pytest.raises(openai.NotFoundError, match="there is no session of this address"):
        door.client.with_options(base_url=url).completions.create(**TEXT)
    page = httpx.post(f"{door.url}/completions", json=TEXT, headers={
        "host": "evil.example", "authorization": f"Bearer {door.endpoint.token}",
    })
    assert page.status_code == 421


def test_an_ended_session_refuses_its_calls_at_once(door):
    door.is_answering = False
    found = []

    def ask():
        try:
            door.client.completions.create(**TEXT)
        except openai.ConflictError as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    door.wait(1)
    door.endpoint.end(door.key, "its time is over")
    thread.join(60)
    start = time.monotonic()
    ask()
    assert len(found) == 2 and time.monotonic() - start < 0.4  # an SDK's retry waits 0.5 s
    assert all("takes no more calls: its time is over" in str(error) for error in found)


def test_a_call_that_arrives_as_its_session_ends_is_refused(door):
    door.endpoint.end(door.key, "its time is over")
    with pytest.raises(Ended, match="its time is over"):
        door.session.enter(None, b"", is_retry=False)
    assert not door.calls and not door.session.calls


def test_an_ended_session_keeps_nothing_of_its_owner(endpoint):
    class Owner:
        def take(self, call):
            pass

    owner = Owner()
    seen = weakref.ref(owner)
    key, _ = endpoint.open(SAMPLING, owner.take)
    endpoint.end(key, "over")
    del owner
    gc.collect()
    assert seen() is None


def test_a_call_ends_with_its_session_and_has_no_limit_of_its_own(door, endpoint):
    """Its first token may wait until programs are compiled."""
    door.is_answering = False
    assert endpoint._sessions._served.limits.seconds == math.inf
    replies = []
    thread = threading.Thread(target=lambda: replies.append(door.post("/v1/completions", TEXT)))
    thread.start()
    door.wait(1)
    endpoint.end(door.key, "it took too long")
    thread.join()
    assert replies[0].status_code == 409 and "it took too long" in replies[0].text


def test_too_many_connections_are_said_once(endpoint, capsys):
    loop = mock.Mock()
    for number in (errno.EMFILE, errno.EMFILE, errno.EPIPE):
        endpoint._fault(loop, {"message": "", "exception": OSError(number, "of a socket")})
    assert capsys.readouterr().err.count("more connections than this process may open files") == 1
    assert loop.default_exception_handler.call_count == 1  # EPIPE


def test_the_oldest_ended_sessions_are_forgotten(endpoint, monkeypatch):
    monkeypatch.setattr(sessions, "KEPT", 2)
    keys = [endpoint.open(SAMPLING, None)[0] for _ in range(5)]
    for key in keys:
        endpoint.end(key, "over")
    known = [key in endpoint._sessions.sessions for key in keys]
    assert known == [False] * 3 + [True] * 2


def test_a_retry_gets_the_answer_of_the_call_it_repeats(door):
    door.is_answering = False
    replies = []
    ask = lambda **headers: replies.append(door.post("/v1/completions", TEXT, **headers).json())
    threads = [threading.Thread(target=ask)]
    threads.append(threading.Thread(target=ask, kwargs={RETRIES: "1"}))
    for thread in threads:
        thread.start()
        door.wait(1)
    limit = time.monotonic() + 60
    while not door.session.retries and time.monotonic() < limit:
        time.sleep(0.005)
    door.answer(door.calls[0])
    for thread in threads:
        thread.join(60)
    ask(**{RETRIES: "2"})
    assert len(replies) == 3 and door.session.retries == 2 and len(door.calls) == 1
    assert len({reply["choices"][0]["text"] for reply in replies}) == 1
    door.is_answering = True
    door.post("/v1/completions", TEXT)
    door.post("/v1/completions", TEXT | {"max_tokens": 2}, **{RETRIES: "1"})  # another body
    assert len(door.calls) == 3


def test_a_client_that_leaves_and_comes_back(door):
    door.is_answering = False
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{door.url}/completions", json=TEXT, timeout=0.2,
            headers={"authorization": f"Bearer {door.endpoint.token}"},
        )
    [call] = door.calls
    limit = time.monotonic() + 60
    while not call.is_gone and time.monotonic() < limit:
        time.sleep(0.005)
    assert call.is_gone
    door.answer(call)
    assert not call.is_delivered
    again = door.post("/v1/completions", TEXT, **{RETRIES: "1"})
    assert again.status_code == 200 and call.is_delivered and len(door.calls) == 1
    np.testing.assert_array_equal(again.json()["choices"][0]["versions"], call.result.version)
