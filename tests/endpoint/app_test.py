"""The routes, on a scheduler whose engine is made of arithmetic."""

import asyncio
import dataclasses
import json
import threading
import time

import numpy as np
import pytest

from jaxrl_tis.data.tokenizer import CharTokenizer
from jaxrl_tis.endpoint import app as serve_app
from jaxrl_tis.endpoint.request import Limits
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.worker import EngineThread
from tests import arithmetic
from tests.arithmetic import alone
from tests.asgi import call, run

TOKENIZER = CharTokenizer("abcdefghijklmnopqrst")
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
TOKEN = "let-me-in"


class Held(arithmetic.Engine):
    """Generates only when it is let."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.calls = threading.Semaphore(0)

    def generate(self, *args):
        assert self.calls.acquire(timeout=60)
        return super().generate(*args)


class Slow(arithmetic.Engine):
    """Its steps are read one by one."""

    def generate(self, *args):
        time.sleep(0.01)
        return super().generate(*args)


class Broken(arithmetic.Engine):
    def generate(self, *args):
        raise RuntimeError("out of memory")


def weights(path, adapter=None):
    return int(path or 0) + 100 * int(adapter or 0)


def application(engine=None, max_pending=8, seconds=20.0, logprobs=2, **served):
    """An app of weights 0; weights and adapters are loaded from paths that are numbers."""
    scheduler = Scheduler(
        engine or arithmetic.Engine(), 0, max_pending=max_pending, decode=TOKENIZER.decode
    )
    limits = Limits(
        body_bytes=500, context_tokens=30, max_tokens=20, choices=4, logprobs=logprobs,
        seconds=seconds,
    )
    return serve_app.make(serve_app.Served(
        EngineThread(scheduler), TOKENIZER, "m", arithmetic.VOCAB, limits, load=weights, **served
    ))


def ask(body, path=TEXT, **options):
    """The reply of a fresh app."""
    return run(application(**options), lambda app: call(app, path, body))


def expected(prompt, seed=0, weights=0, max_tokens=20):
    """(text, finish_reason) of a prompt of token ids that is answered alone."""
    request = arithmetic.request("", prompt, seed, max_tokens=max_tokens, stop_ids=(2,))
    tokens, reason = alone(request, weights)
    return TOKENIZER.decode(tokens), reason


PROMPT = TOKENIZER.encode("abc", add_special=True)
SEED = next(s for s in range(999) if len(expected(PROMPT, seed=s)[0]) == 20)  # text, no end
STOP = expected(PROMPT, seed=SEED)[0][8:11]


def test_a_completion():
    reply = ask({"prompt": "abc", "seed": SEED, "max_tokens": 5, "n": 2})
    assert reply.status == 200 and reply.headers["content-type"] == "application/json"
    text, reason = expected(PROMPT, seed=SEED, max_tokens=5)
    assert (len(text), reason) == (5, "length")
    body = reply.json
    assert body["choices"] == [
        {"index": i, "text": text, "finish_reason": "length", "versions": [0] * 5, "logprobs": None}
        for i in range(2)
    ]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 10, "total_tokens": 14}
    assert (body["object"], body["model"], body["seed"]) == ("text_completion", "m", SEED)


def test_a_list_of_prompts_is_answered_in_its_order():
    first, second = PROMPT, [5, 6]
    body = {"prompt": [first, second], "seed": 0, "n": 2, "max_tokens": 4}
    reply, stream = run(application(), lambda app: asyncio.gather(
        call(app, TEXT, body), call(app, TEXT, body | {"stream": True})))
    texts = [expected(p, seed=0, max_tokens=4)[0] for p in (first, first, second, second)]
    assert texts[0] != texts[2]
    assert [(c["index"], c["text"]) for c in reply.json["choices"]] == list(enumerate(texts))
    sampled = sum(len(alone(arithmetic.request("", p, 0, max_tokens=4, stop_ids=(2,)), 0)[0])
                  for p in (first, second))
    assert reply.json["usage"] == {
        "prompt_tokens": 4 + 2, "completion_tokens": 2 * sampled, "total_tokens": 6 + 2 * sampled}
    assert joined(stream.events, "text")[0] == dict(enumerate(texts))


def test_an_error_has_the_form_of_the_api():
    reply = ask({"prompt": "a", "n": 9})
    assert reply.json == {"error": {
        "message": "n is 9; give 1 to 4", "type": "invalid_request_error", "param": None, "code": 400}}


def test_a_body_may_be_as_large_as_the_limit():
    assert ask(json.dumps({"prompt": "abc", "max_tokens": 1}).ljust(500).encode()).status == 200


def test_token_ids_and_an_end_token():
    ends = next(s for s in range(999) if expected([5, 6], seed=s)[1] == "stop")
    reply = ask({"prompt": [5, 6], "seed": ends}).json
    text, reason = expected([5, 6], seed=ends)
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == (text, reason)
    assert 1 < reply["usage"]["completion_tokens"] < 20


def test_chat():
    body = {"messages": [{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}],
            "seed": SEED, "max_tokens": 5}
    reply = ask(body, CHAT).json
    text, reason = expected(PROMPT[1:], seed=SEED, max_tokens=5)
    assert reply["object"] == "chat.completion"
    assert reply["choices"] == [{
        "index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason,
        "versions": [0] * reply["usage"]["completion_tokens"], "logprobs": None,
    }]


def test_log_probs_are_the_record_s():
    reply = ask({"prompt": "abc", "max_tokens": 3, "logprobs": 0, "seed": SEED}).json
    logprobs = reply["choices"][0]["logprobs"]
    ids = logprobs["token_ids"]
    assert "".join(logprobs["tokens"]) == reply["choices"][0]["text"] == TOKENIZER.decode(ids)
    assert logprobs["text_offset"] == [0, 1, 2]
    total = sum(arithmetic.key(token, s, 0) for s, token in enumerate(PROMPT)) + 5 * SEED + 3 * 4
    assert logprobs["token_logprobs"][0] == -total
    assert logprobs["raw_logprobs"][0] == -total - 0.5
    seed = next(s for s in range(999) if len(expected(TOKENIZER.encode("ab"), seed=s)[0]) == 20)
    body = {"messages": [{"role": "user", "content": "ab"}], "logprobs": True, "max_tokens": 2}
    body |= {"seed": seed}
    content = ask(body, CHAT).json["choices"][0]["logprobs"]["content"]
    assert [c["raw_logprob"] - c["logprob"] for c in content] == [-0.5] * 2
    assert [c["bytes"] for c in content] == [list(c["token"].encode()) for c in content]
    assert all(content[0]["bytes"])


def test_of_likeliest_tokens_with_the_same_text_the_likeliest_is_kept():
    """0, 1 and 2 (padding, start and end) have no text."""

    class Top(arithmetic.Engine):
        def generate(self, *args):
            state, result = super().generate(*args)
            shape = result.tokens.shape
            top_ids = np.broadcast_to(np.array([0, 3, 1], np.int32), (*shape, 3))
            top_logps = np.broadcast_to(np.array([-0.5, -1.0, -2.0], np.float32), (*shape, 3))
            return state, dataclasses.replace(result, top_ids=top_ids, top_logps=top_logps)

    body = {"prompt": "abc", "max_tokens": 1, "logprobs": 3, "seed": SEED}
    reply = run(application(Top(), logprobs=3), lambda app: call(app, TEXT, body))
    (top,) = reply.json["choices"][0]["logprobs"]["top_logprobs"]
    assert list(top.items()) == [("", -0.5), ("a", -1.0)]
    fewer = run(application(Top(), logprobs=3), lambda app: call(app, TEXT, body | {"logprobs": 1}))
    assert fewer.json["choices"][0]["logprobs"]["top_logprobs"] == [{"": -0.5}]


def joined(events, field):
    """Text and last chunk of every choice."""
    texts, last = {}, {}
    for event in events:
        (choice,) = event["choices"]
        delta = choice["delta"].get("content", "") if field == "delta" else choice["text"]
        texts[choice["index"]] = texts.get(choice["index"], "") + delta
        assert choice["index"] not in last, "nothing follows the last chunk"
        if choice["finish_reason"]:
            last[choice["index"]] = choice
    return texts, last


@pytest.mark.parametrize("extra", [
    {}, {"n": 3}, {"logprobs": 0}, {"stop": [STOP]}, {"stop": ["zz", STOP]}, {"max_tokens": 3},
])
def test_a_stream_says_what_the_whole_answer_says(extra):
    body = {"prompt": "abc", "seed": SEED} | extra

    async def both(app):
        return await call(app, TEXT, body), await call(app, TEXT, body | {"stream": True})

    whole, stream = run(application(), both)
    assert stream.headers["content-type"].startswith("text/event-stream")
    texts, last = joined(stream.events, "text")
    for choice in whole.json["choices"]:
        assert texts[choice["index"]] == choice["text"]
        assert last[choice["index"]] == choice | {"text": ""}


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("extra", [
    {}, {"n": 2}, {"stop": [STOP]}, {"stop": ["zz", STOP], "n": 2}, {"max_tokens": 3},
    {"stop_token_ids": [TOKENIZER.encode(STOP)[0]]},
    {"stop": [STOP], "min_tokens": 11, "ignore_eos": True},
])
def test_streamed_ids_add_up_to_those_of_the_whole_answer(path, extra):
    """Token by token, those without text too, and the prompt's ids as vLLM names them."""
    is_chat = path == CHAT
    prompt = {"messages": [{"role": "user", "content": "abc"}]} if is_chat else {"prompt": "abc"}
    body = prompt | {"seed": SEED, "return_token_ids": True} | extra

    async def both(app):
        return await call(app, path, body), await call(app, path, body | {"stream": True})

    whole, stream = run(application(Slow(steps=4)), both)
    prompt_ids = PROMPT[1:] if is_chat else PROMPT
    ids, prompts = {}, []
    for event in stream.events:
        (choice,) = event["choices"]
        ids.setdefault(choice["index"], []).extend(choice["token_ids"])
        prompts += [at["prompt_token_ids"] for at in (event, choice) if "prompt_token_ids" in at]
    n = extra.get("n", 1)
    assert prompts == [prompt_ids] * n and len(whole.json["choices"]) == n
    stop_ids = (*(() if "ignore_eos" in extra else (2,)), *extra.get("stop_token_ids", ()))
    request = arithmetic.request(
        "", prompt_ids, SEED, stop_ids=stop_ids, max_tokens=extra.get("max_tokens", 20),
    )
    tokens, _ = alone(request)
    for choice in whole.json["choices"]:
        assert ids[choice["index"]] == choice["token_ids"] == tokens[: len(choice["token_ids"])]
        at = whole.json if is_chat else choice
        assert at["prompt_token_ids"] == prompt_ids
        assert "stop" in extra or choice["token_ids"] == tokens
    assert whole.json["usage"]["completion_tokens"] == sum(map(len, ids.values()))


def test_a_stream_ends_with_an_error_if_the_sequence_started_again_and_differs(monkeypatch):
    other, engine = np.array([9, 9]), Held()
    monkeypatch.setattr(serve_app.Shown, "of", lambda self, tokens: (TOKENIZER.decode(other), other))

    async def script(app):
        engine.calls.release()
        body = {"prompt": "abc", "seed": SEED, "stream": True}
        return await call(app, TEXT, body, on_part=lambda part: engine.calls.release(50))

    sent, error = run(application(engine), script).events
    assert sent["choices"][0]["text"] == TOKENIZER.decode(other)
    assert "differs from the tokens already sent" in error["error"]["message"]


def test_every_choice_has_the_ids_of_its_own_prompt():
    body = {"prompt": [[5, 6], "abc"], "n": 2, "max_tokens": 1, "return_token_ids": True}
    choices = ask(body).json["choices"]
    assert [c["prompt_token_ids"] for c in choices] == [[5, 6]] * 2 + [PROMPT] * 2
    events = ask(body | {"stream": True}).events
    first = {e["choices"][0]["index"]: e["choices"][0] for e in reversed(events)}
    assert [first[i]["prompt_token_ids"] for i in range(4)] == [[5, 6]] * 2 + [PROMPT] * 2


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_ids_come_only_where_they_are_asked_for(path, is_streamed):
    prompt = {"prompt": "abc"} if path == TEXT else {"messages": [{"role": "user", "content": "a"}]}
    assert b"token_ids" not in ask(prompt | {"max_tokens": 2, "stream": is_streamed}, path).body


def test_a_stop_token_with_text_is_an_id_of_the_answer_and_no_text():
    ids = alone(arithmetic.request("", PROMPT, SEED, max_tokens=20))[0]
    body = {"prompt": "abc", "seed": SEED, "stop_token_ids": [ids[6]], "return_token_ids": True}
    (choice,) = ask(body).json["choices"]
    end = ids.index(ids[6])
    assert (choice["token_ids"], choice["finish_reason"]) == (ids[: end + 1], "stop")
    assert choice["text"] == TOKENIZER.decode(ids[:end]) != TOKENIZER.decode(ids[: end + 1])
    assert joined(ask(body | {"stream": True}).events, "text")[0] == {0: choice["text"]}


@pytest.mark.parametrize("path, prompt", [
    (TEXT, {"prompt": "abc"}), (CHAT, {"messages": [{"role": "user", "content": "abc"}]}),
])
def test_a_stream_counts_its_tokens_when_it_is_asked_to(path, prompt):
    body = prompt | {"seed": SEED, "n": 2, "max_tokens": 3}
    usage = ask(body, path).json["usage"]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = ask(body, path).events
    assert last["choices"] == [] and last["usage"] == usage and usage["completion_tokens"] == 6
    assert events and all(event["choices"] and event["usage"] is None for event in events)
    assert last["id"] == events[0]["id"] and last["object"] == events[0]["object"]


def test_a_stop_string_before_min_tokens_is_text():
    text = expected(PROMPT, seed=SEED)[0]
    early, late = text[2:4], text[12:15]
    body = {"prompt": "abc", "seed": SEED, "stop": [early, late], "ignore_eos": True}
    body |= {"min_tokens": 6}
    end = min(i for stop in (early, late) if (i := text.find(stop, 7 - len(stop))) > 0)
    assert end > 4
    assert ask(body).json["choices"][0]["text"] == text[:end]
    assert joined(ask(body | {"stream": True}).events, "text")[0] == {0: text[:end]}
    assert ask(body | {"min_tokens": 0}).json["choices"][0]["text"] == text[: text.index(early)]


def test_log_probs_of_the_prompt():
    reply = ask({"prompt": "abc", "seed": SEED, "max_tokens": 2, "prompt_logprobs": 0}).json
    first, *others = reply["choices"][0]["prompt_logprobs"]
    sums = np.cumsum([arithmetic.key(token, s, 0) for s, token in enumerate(PROMPT)])
    assert first is None and others == [
        {str(token): {"logprob": -float(total + token), "decoded_token": TOKENIZER.decode([token])}}
        for total, token in zip(sums[:-1], PROMPT[1:], strict=True)
    ]
    assert "prompt_logprobs" not in ask({"prompt": "abc", "max_tokens": 2}).json["choices"][0]


def test_a_stop_string_is_never_shown():
    text = expected(PROMPT, seed=SEED)[0]
    events = ask({"prompt": "abc", "seed": SEED, "stop": STOP, "stream": True}).events
    assert joined(events, "text")[0] == {0: text[: text.index(STOP)]}
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path, prompt, ids, extra", [
    (TEXT, {"prompt": "abc"}, PROMPT, {"logprobs": 1}),
    (CHAT, {"messages": [{"role": "user", "content": "abc"}]}, PROMPT[1:], {"logprobs": True}),
    ("/inference/v1/generate", {"token_ids": PROMPT}, PROMPT, {"logprobs": 1}),
])
def test_a_stop_string_ends_an_answer_with_log_probs_too(path, prompt, ids, extra):
    """An agent stops at the end of a tool call, and a trainer asks for log-probs."""
    seed = next(s for s in range(999) if len(expected(ids, seed=s)[0]) == 20)
    text = expected(ids, seed=seed)[0]
    count = text.index(text[8:11]) + 3
    found = []
    for more in ({}, extra):
        params = {"seed": seed, "stop": text[8:11]} | more
        is_generate = path == "/inference/v1/generate"
        given = {"sampling_params": params} if is_generate else params | {"return_token_ids": True}
        [choice] = ask(prompt | given, path).json["choices"]
        assert TOKENIZER.decode(choice["token_ids"]) == text[:count]
        assert choice["finish_reason"] == "stop"
        found.append(choice["logprobs"])
    without, logprobs = found
    assert not without and len(logprobs.get("content") or logprobs["token_logprobs"]) == count


def test_a_stream_of_a_chat():
    body = {"messages": [{"role": "user", "content": "abc"}], "seed": SEED, "stream": True}
    events = ask(body, CHAT).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    text, reason = expected(PROMPT[1:], seed=SEED)
    texts, last = joined(events, "delta")
    assert texts == {0: text} and last[0]["finish_reason"] == reason and last[0]["delta"] == {}


def test_a_stream_comes_while_it_is_drawn():
    engine, parts = Held(steps=2), []

    def heard(part):
        parts.append(part)
        engine.calls.release()  # the next two tokens are drawn only after these were read

    async def script(app):
        engine.calls.release()
        body = {"prompt": "abc", "seed": SEED, "max_tokens": 8, "stream": True}
        return await call(app, TEXT, body, on_part=heard)

    events = run(application(engine), script).events
    assert [len(e["choices"][0]["text"]) for e in events] == [2, 2, 2, 2, 0]


@pytest.mark.parametrize("path, body, status, words", [
    (TEXT, {"prompt": "A"}, 400, "alphabet"),
    (TEXT, b"{", 400, "not JSON"),
    (TEXT, {"prompt": "a", "model": "x"}, 404, "'x' is not served"),
    (TEXT, {"prompt": "a", "presence_penalty": 1}, 400, "penalties=True"),  # the scheduler's
    (TEXT, b" " * 501, 413, "more than 500 bytes"),
    (TEXT, [b" " * 300, b" " * 300, None], 413, "more than 500 bytes"),
    (TEXT, None, 405, "Not Allowed"),
    ("/nothing", {}, 404, "Not Found"),
    (CHAT, {"messages": []}, 400, "messages must be"),
    ("/weights", {"path": "1"}, 403, "has no token"),
])
def test_what_is_wrong_is_said(path, body, status, words):
    reply = ask(body, path)
    assert reply.status == status and words in reply.error


def test_the_scheduler_refuses_all_choices_or_none():
    engine = Held()

    async def script(app):
        first = asyncio.ensure_future(call(app, TEXT, {"prompt": "abc", "n": 2, "seed": SEED}))
        while (await call(app, "/health")).json["pending"] < 2:
            await asyncio.sleep(0.01)
        second = asyncio.ensure_future(call(app, TEXT, {"prompt": "b", "n": 2}))
        while not second.done():  # it is heard after the step that runs when it comes
            engine.calls.release()
            await asyncio.sleep(0.1)
        refused = second.result()
        pending = (await call(app, "/health")).json["pending"]
        engine.calls.release(50)
        return refused, pending, await first, await call(app, TEXT, {"prompt": "b", "n": 2})

    refused, pending, first, after = run(application(engine, max_pending=3), script)
    assert refused.status == 429 and "3 requests are pending, and at most 3" in refused.error
    assert pending == 2 and first.status == after.status == 200


@pytest.mark.parametrize("is_streamed", [False, True])
def test_past_its_time_a_request_ends_with_what_it_has(is_streamed):
    engine = Held(steps=2)

    async def script(app):
        engine.calls.release()
        body = {"prompt": "abc", "seed": SEED, "stream": is_streamed}
        reply = asyncio.ensure_future(call(app, TEXT, body))
        while (await call(app, "/health")).json["pending"] < 1:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # the second step is longer than the time
        engine.calls.release()
        return await reply

    reply = run(application(engine, seconds=0.2), script)
    text = expected(PROMPT, seed=SEED)[0][:4]
    if is_streamed:
        texts, last = joined(reply.events, "text")
        assert texts == {0: text} and last[0]["finish_reason"] == "abort"
    else:
        (choice,) = reply.json["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "abort")


def test_a_body_that_does_not_come():
    assert ask([b"{", None], seconds=0.1).status == 408


def test_a_client_that_leaves_while_it_sends_its_body():
    async def script(app):
        leave = asyncio.Event()
        leave.set()
        gone = await call(app, TEXT, [b'{"prompt"', None], leave=leave)
        return gone, (await call(app, "/health")).json["pending"]

    reply, pending = run(application(), script)
    assert (reply.status, pending) == (serve_app.CLIENT_CLOSED, 0)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_leaves_takes_its_requests_along(is_streamed):
    engine = Held()

    async def script(app):
        leave = asyncio.Event()
        body = {"prompt": "abc", "seed": SEED, "n": 2, "stream": is_streamed}
        gone = asyncio.ensure_future(call(app, TEXT, body, leave=leave))
        while (await call(app, "/health")).json["pending"] < 2:
            await asyncio.sleep(0.01)
        leave.set()
        await gone
        engine.calls.release()  # the step that is running ends
        while (await call(app, "/health")).json["pending"]:
            await asyncio.sleep(0.01)
        return gone.result(), (await call(app, "/health")).json["status"]

    reply, status = run(application(engine), script)
    assert status == "ok", "an engine that waits for another step has failed"
    assert reply.status == (200 if is_streamed else serve_app.CLIENT_CLOSED)
    assert b"DONE" not in reply.body


# Weights


def test_weights_change_between_steps_and_every_token_knows_its_own():
    engine = Held(steps=2)

    async def script(app):
        body = {"prompt": "abc", "seed": SEED}
        first = asyncio.ensure_future(call(app, TEXT, body))
        while (await call(app, "/health")).json["pending"] < 1:
            await asyncio.sleep(0.01)
        engine.calls.release(2)
        while engine.calls._value:
            await asyncio.sleep(0.01)
        change = asyncio.ensure_future(call(app, "/weights", {"path": "7"}, token=TOKEN))
        while not change.done():  # it is heard after the step that runs when it comes
            engine.calls.release()
            await asyncio.sleep(0.1)
        changed = change.result()
        engine.calls.release(20)
        return await first, changed, await call(app, TEXT, body), await call(app, "/v1/models")

    first, changed, second, listed = run(application(engine, token=TOKEN), script)
    assert changed.json == {"path": "7", "version": 1}
    old = expected(PROMPT, seed=SEED)[0]
    new, _ = expected(PROMPT, seed=SEED, weights=7)
    choice = first.json["choices"][0]
    count = choice["versions"].index(1)
    total = first.json["usage"]["completion_tokens"]
    assert count >= 4 and choice["versions"] == [0] * count + [1] * (total - count)
    assert choice["text"][:count] == old[:count] and choice["text"] != old
    (choice,) = second.json["choices"]
    assert (choice["text"], set(choice["versions"])) == (new, {1})
    model = listed.json["data"][0]
    assert type(model.pop("created")) is int and model == {
        "id": "m", "object": "model", "owned_by": "jaxrl_tis", "max_model_len": 30, "version": 1
    }


@pytest.mark.parametrize("token, body, status, words", [
    (None, {"path": "1"}, 401, "Bearer TOKEN"), ("", {"path": "1"}, 401, "Bearer TOKEN"),
    ("let-me-inn", {"path": "1"}, 401, "Bearer TOKEN"),
    (TOKEN, {"path": "x"}, 400, "invalid literal"), (TOKEN, {"path": 1}, 400, "must be"),
    (TOKEN, {"path": "1", "step": 2}, 400, "must be"), (TOKEN, b"", 400, "not JSON"),
])
def test_weights_that_stay(token, body, status, words):
    async def script(app):
        refused = await call(app, "/weights", body, token=token)
        return refused, (await call(app, "/health")).json["version"]

    refused, version = run(application(token=TOKEN), script)
    assert refused.status == status and words in refused.error and version == 0


def test_beyond_this_machine_every_route_but_health_needs_the_token():
    async def script(app):
        routes = [("/v1/models", None), (TEXT, {"prompt": "a"}),
                  (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
                  ("/inference/v1/generate", {"token_ids": [3]}), ("/tokenize", {"prompt": "a"}),
                  ("/detokenize", {"tokens": [3]})]
        closed = [(await call(app, *route)).status for route in routes]
        opened = [(await call(app, *route, token=TOKEN)).status for route in routes]
        return closed, opened, (await call(app, "/health")).status

    assert run(application(token=TOKEN, is_closed=True), script) == ([401] * 6, [200] * 6, 200)
    with pytest.raises(ValueError, match="needs a token"):
        application(is_closed=True)


# Failure


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_engine_that_fails_fails_everything_with_its_words(is_streamed):
    async def script(app):
        body = {"prompt": "a", "stream": is_streamed}
        return await call(app, TEXT, body), await call(app, TEXT, body), await call(app, "/health")

    first, second, health = run(application(Broken()), script)
    described = first.events[0]["error"] if is_streamed else first.json["error"]
    assert "out of memory" in described["message"] and described["type"] == "server_error"
    assert second.status == 500 and "out of memory" in second.error
    assert health.status == 503 and "out of memory" in health.json["error"]


def test_an_answer_whose_log_probs_are_not_finite_is_an_error():
    class Diverged(arithmetic.Engine):
        def generate(self, *args):
            state, result = super().generate(*args)
            result.logp_behav[:] = np.nan
            return state, result

    body = {"prompt": "abc", "seed": SEED, "logprobs": 0, "max_tokens": 2}
    reply = ask(body, engine=Diverged())
    assert reply.status == 500
    assert "is not finite" in json.loads(reply.body)["error"]["message"]
