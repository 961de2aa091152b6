"""The routes of a trainer, on a scheduler whose engine is made of arithmetic: weights between
requests and within them, adapters, the prefix cache, pauses."""

import asyncio

from tests import arithmetic
from tests.arithmetic import drawn, key
from tests.asgi import call, run
from tests.endpoint.app_test import PROMPT, SEED, TOKEN, Broken, Held, application

GENERATE = "/inference/v1/generate"
KEEP = "/pause?mode=keep"
RESET_ALL = "/reset_prefix_cache?reset_running_requests=true"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def reload(path):
    return {"method": "reload_weights", "kwargs": {"weights_path": path}}


def generation(id="a", max_tokens=20, prompt=PROMPT, **fields):
    params = {"seed": SEED, "logprobs": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return {"request_id": id, "token_ids": prompt, "sampling_params": params} | fields


class Trainer:
    """Sends requests with the token, and lets a held engine step."""

    def __init__(self, app, engine=None):
        self._app, self._engine = app, engine

    async def post(self, path, body=None, token=TOKEN):
        reply = await call(self._app, path, {} if body is None else body, token=token)
        return reply.json if reply.status == 200 else (reply.status, reply.error)

    async def get(self, path):
        return (await call(self._app, path)).json

    def begin(self, path, body=None, **options):
        return asyncio.ensure_future(call(self._app, path, body or {}, TOKEN, **options))

    async def pending(self, count):
        while (await self.get("/health"))["pending"] != count:
            await asyncio.sleep(0.01)

    async def step_until_done(self, task):
        """Commands run after the step that runs when they come."""
        while not task.done():
            self._engine.calls.release()
            await asyncio.sleep(0.02)
        return task.result()


def served(script, engine=None, token=TOKEN, **options):
    """What script(trainer) returns."""
    app = application(engine, token=token, **options)
    return run(app, lambda app: script(Trainer(app, engine)))


def sampled(history, weights, count):
    """(tokens, log-probs) after these tokens, with all keys of these weights."""
    request, history, logps = arithmetic.request("", PROMPT, SEED), list(history), []
    for _ in range(count):
        total = sum(key(token, s, weights) for s, token in enumerate(history))
        token, logp = drawn(total, request, len(history), weights)
        history.append(token)
        logps.append(logp)
    return history[len(history) - count :], logps


def test_an_answer_over_a_sync_says_which_weights_sampled_which_token():
    engine = Held(steps=2)

    async def script(trainer):
        first = trainer.begin(GENERATE, generation())
        await trainer.pending(1)
        await trainer.step_until_done(trainer.begin(KEEP))
        engine.calls.release(99)
        await asyncio.sleep(0.05)
        paused = first.done(), await trainer.get("/is_paused"), await trainer.get("/health")
        states = [
            await trainer.post("/collective_rpc", reload("7")), await trainer.get("/weight_info"),
            await trainer.post("/update_weight_version", {"new_version": "12"}),
            await trainer.post(RESET_ALL), await trainer.post("/resume"),
            await trainer.get("/weight_info"), await trainer.get("/is_paused"),
        ]
        return (await first).json["choices"][0], paused, states

    choice, paused, states = served(script, engine)
    is_done, is_paused, health = paused
    assert not is_done and is_paused == {"is_paused": True}
    assert health == {"status": "ok", "version": 0, "pending": 1, "is_paused": True}
    assert states == [
        {"results": [None]}, {"weight_version": "server-1"},
        {"success": True, "new_version": "12"}, {"success": True}, {"status": "resumed"},
        {"weight_version": "12"}, {"is_paused": False},
    ]
    before, after = choice["weight_versions"]
    count = before["end"]
    assert before == {"version": "server-0", "start": 0, "end": count} and 2 <= count < 20
    assert after == {"version": "12", "start": count, "end": 20}
    old, old_logps = sampled(PROMPT, 0, count)
    new, new_logps = sampled(PROMPT + old, 7, 20 - count)  # its keys are of the new weights
    assert choice["token_ids"] == old + new
    assert [x["logprob"] for x in choice["logprobs"]["content"]] == old_logps + new_logps


def test_the_prefix_cache_is_empty_after_a_reset():
    """A prompt of two pages is filled once, and anew after the reset. Pages in use prevent a reset
    that spares running requests; requests that wait without pages do not."""
    engine = Held(slots=1, page_size=4)
    prompt = [3, 4, 5, 6, 7, 8, 9, 10, 11]
    body = lambda id, count=2: generation(id, count, prompt)

    async def script(trainer):
        filled = lambda: sum(len(tokens) for chunks in engine.prefilled for _, tokens in chunks)
        counts = []

        async def ask(id):
            before = filled()
            engine.calls.release()
            await trainer.post(GENERATE, body(id))
            counts.append(filled() - before)

        await ask("a")
        await ask("b")
        resets = [await trainer.post("/reset_prefix_cache?reset_running_requests=False")]
        await ask("c")
        await trainer.post(KEEP)
        before, waiting = filled(), trainer.begin(GENERATE, body("d", 6))
        await trainer.pending(1)
        resets.append(await trainer.post("/reset_prefix_cache"))
        await trainer.post("/resume")
        while filled() == before:  # then it has its pages, and its step is held
            await asyncio.sleep(0.01)
        reset = await trainer.step_until_done(trainer.begin("/reset_prefix_cache"))
        await trainer.step_until_done(waiting)
        return [*counts, filled() - before], [*resets, reset.json]

    counts, resets = served(script, engine)
    assert counts == [9, 1, 9, 9] and resets == [{"success": x} for x in (True, True, False)]


def test_the_modes_of_a_pause():
    """keep: a request stays. abort: it ends with its tokens. wait: it ends, and later ones wait."""
    engine = Held(steps=2)

    async def script(trainer):
        found = {}
        for mode in ("keep", "abort", "wait"):
            first = trainer.begin(GENERATE, generation(f"{mode}-1", 6))
            await trainer.pending(1)
            pause = trainer.begin(f"/pause?mode={mode}")
            await asyncio.sleep(0.05)
            second = trainer.begin(GENERATE, generation(f"{mode}-2", 6))
            await asyncio.sleep(0.05)
            assert (await trainer.step_until_done(pause)).json == {"status": "paused"}
            await asyncio.sleep(0.05)
            done = first.done(), second.done()
            await trainer.post("/resume")
            replies = [(await trainer.step_until_done(task)).json for task in (first, second)]
            found[mode] = done, [reply["choices"][0] for reply in replies]
            while engine.calls.acquire(blocking=False):
                pass
        return found

    found = served(script, engine)
    assert {mode: done for mode, (done, _) in found.items()} == {
        "keep": (False, False), "abort": (True, False), "wait": (True, False)
    }
    tokens, _ = sampled(PROMPT, 0, 6)
    for mode, (_, choices) in found.items():
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons == ["abort" if mode == "abort" else "length", "length"]
        assert choices[1]["token_ids"] == tokens
        assert choices[0]["token_ids"] == tokens[: len(choices[0]["token_ids"])]
    assert len(found["abort"][1][0]["token_ids"]) < 6


def test_a_paused_server_answers_aborts_deadlines_and_clients_that_leave():
    """None of them waits for `resume`, and none leaves a request behind."""

    async def script(trainer):
        await trainer.post(KEEP)
        leave = asyncio.Event()
        body = generation("a")
        body["sampling_params"]["n"] = 2
        aborted, left = trainer.begin(GENERATE, body), trainer.begin(
            GENERATE, generation("b"), leave=leave)
        await trainer.pending(3)
        status = await trainer.post("/abort_requests", {"request_ids": ["a", "unknown"]})
        choices = (await aborted).json["choices"]
        leave.set()
        await left
        await trainer.pending(0)
        return status, choices, await trainer.get("/is_paused")

    async def late(trainer):
        await trainer.post(KEEP)
        return (await trainer.post(GENERATE, generation("c")))["choices"]

    status, choices, is_paused = served(script)
    assert status == {"status": "aborted"} and is_paused == {"is_paused": True}
    choices += served(late, seconds=0.2)
    assert [(c["finish_reason"], c["token_ids"]) for c in choices] == [("abort", [])] * 3


def test_an_adapter_takes_the_place_of_the_weights_until_it_is_unloaded():
    """Weights are path + 100 x adapter."""

    async def script(trainer):
        found = {}

        async def ask(model):
            reply = await trainer.post(GENERATE, generation(model=model, max_tokens=4))
            if isinstance(reply, tuple):
                return reply
            return [w for w in (0, 3, 103, 203) if
                    reply["choices"][0]["token_ids"] == sampled(PROMPT, w, 4)[0]]

        async def tell(path, name, folder=None):
            body = {"lora_name": name} | ({"lora_path": folder} if folder else {})
            reply = await call(trainer._app, path, body, TOKEN)
            return reply.status, reply.body.decode()

        await trainer.post("/collective_rpc", reload("3"))
        found["load"] = await tell(LOAD, "one", "1")
        models = [(m["id"], m.get("parent")) for m in (await trainer.get("/v1/models"))["data"]]
        found["one"], found["m"], found["any"] = await ask("one"), await ask("m"), await ask(None)
        found["again"], found["base"] = await tell(LOAD, "one", "2"), await tell(LOAD, "m", "2")
        found["broken"] = await tell(LOAD, "two", "x")
        found["next"] = await tell(LOAD, "two", "2")
        found["two"], found["older"] = await ask("two"), await ask("one")
        found["unload older"], found["still"] = await tell(UNLOAD, "one"), await ask("two")
        found["unload"], found["after"] = await tell(UNLOAD, "two"), await ask("m")
        found["unknown"], found["free"] = await tell(UNLOAD, "two"), await tell(LOAD, "two", "1")
        await trainer.post("/collective_rpc", reload("0"))
        found["reloaded"] = await ask("m")
        return found, models, await trainer.get("/health")

    found, models, health = served(script)
    assert models == [("m", None), ("one", "m")]
    for name in ("load", "next", "unload older", "unload", "free"):
        assert found[name][0] == 200 and found[name][1].startswith("Success: ")
    assert found["one"] == found["any"] == [103] and found["two"] == found["still"] == [203]
    assert found["m"] == (404, "the model 'm' is not served; use 'one'")
    assert found["older"] == (404, "the model 'one' is not served; use 'two'")
    assert found["after"] == [3] and found["reloaded"] == [0]
    for name, status, words in (
        ("again", 400, "lora_name is 'one', which is served or was"), ("base", 400, "'m', which"),
        ("broken", 400, "invalid literal"), ("unknown", 404, "no adapter of this name is loaded"),
    ):
        assert found[name][0] == status and words in found[name][1]
    assert health["version"] == 6  # three of the base, one of them by an unload, and three adapters


CHANGING = (
    "/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version",
    "/abort_requests", LOAD, UNLOAD,
)
ASKING = ("/server_info", "/is_paused", "/weight_info")


def test_every_route_that_changes_something_needs_the_token():
    async def statuses(trainer):
        changing = [(await trainer.post(path, token="wrong"))[0] for path in CHANGING]
        asking = [(await call(trainer._app, path)).status for path in ASKING]
        return changing, asking, await trainer.get("/health")

    assert served(statuses)[:2] == ([401] * 8, [200] * 3)
    assert served(statuses, token=None)[:2] == ([403] * 8, [200] * 3)
    changing, asking, health = served(statuses, is_closed=True)
    assert (changing, asking) == ([401] * 8, [401] * 3)
    assert health == {"status": "ok", "version": 0, "pending": 0, "is_paused": False}


def test_what_is_wrong_is_said():
    method = 'only {"method": "reload_weights", "kwargs": {"weights_path": text}} is served'
    adapter = 'the body must be {"lora_name": text, "lora_path": text}'
    ids = 'the body must be {"request_ids": [text, ...]}'
    cases = [
        ("/pause?mode=stop", {}, "mode is 'stop'; choose one of abort, wait, keep"),
        ("/reset_prefix_cache?reset_running_requests=yes", {},
         "reset_running_requests is 'yes'; give true or false"),
        *(("/collective_rpc", body, method) for body in (
            {}, {"method": "sleep"}, {"method": "reload_weights"}, reload(None), reload(""),
            reload(7), reload("7") | {"kwargs": ["7"]}, reload("7") | {"kwargs": None},
        )),
        ("/collective_rpc", reload("x"), "invalid literal"),
        *(("/update_weight_version", body, 'the body must be {"new_version": text}') for body in (
            {}, {"new_version": ""}, {"new_version": 3})),
        *(("/abort_requests", body, ids) for body in (
            {}, {"request_ids": "a"}, {"request_ids": [1]})),
        *((LOAD, body, adapter) for body in (
            {}, {"lora_name": "a"}, {"lora_name": "", "lora_path": "1"},
            {"lora_name": "a", "lora_path": 1})),
        (UNLOAD, {"lora_name": 1}, 'the body must be {"lora_name": text}'),
        ("/collective_rpc", [b"{"], "the body is not JSON"),
        ("/update_weight_version", [b"[]"], "the body is not a JSON object"),
    ]

    async def script(trainer):
        replies = [await trainer.post(path, body) for path, body, _ in cases]
        return replies, await trainer.get("/health"), await trainer.get("/weight_info")

    replies, health, weights = served(script)
    for (path, body, words), (status, error) in zip(cases, replies, strict=True):
        assert status == 400 and words in error and "\n" not in error, (path, body)
    assert health["version"] == 0 and not health["is_paused"]
    assert weights == {"weight_version": "server-0"}


def test_a_failed_engine_is_said_to_its_trainer():
    async def script(trainer):
        await trainer.post(GENERATE, generation())
        paths = KEEP, "/pause?mode=wait", "/resume", RESET_ALL, "/abort_requests"
        bodies = {"/abort_requests": {"request_ids": []}}
        return [await trainer.post(path, bodies.get(path)) for path in paths]

    for status, error in served(script, Broken()):
        assert status == 500 and "out of memory" in error


def test_what_a_trainer_asks_of_the_model():
    facts = {"dtype": "float32", "max_logprobs": 2}
    found = served(lambda trainer: trainer.get("/server_info?config_format=json"), facts=facts)
    assert found == {"vllm_config": {"model_config": facts}}
