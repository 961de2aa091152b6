"""Token, address and weights; then a real engine behind the routes, and a real socket."""

import dataclasses
import functools
import http.client
import json
import os
import pathlib
import subprocess
import sys
import time
from unittest import mock

import jax
import numpy as np
import pytest

from jaxrl_tis import models
from jaxrl_tis.build import Sampling, build
from jaxrl_tis.endpoint.request import Limits
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.learner.state import initial_params, initial_state
from jaxrl_tis.models import peft
from jaxrl_tis.record.checkpoint import Checkpoints
from jaxrl_tis.rollouts.source import generate
from jaxrl_tis.serve import setup as serving
from tests import tiny
from tests.asgi import HEADERS, call, listening, run
from tests.endpoint import app_test
from tests.models.peft_test import drawn

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("a run: flax, optax, orbax and XLA together"),
]


TEXT = "/v1/completions"
ROOT = pathlib.Path(__file__).parents[2]
LIMITS = Limits(
    body_bytes=1000, context_tokens=8, max_tokens=3, choices=4, logprobs=2, seconds=60.0
)


@pytest.fixture(scope="module", autouse=True)
def refused():
    """The command on an address that others reach, without a token."""
    arguments = ["--config=configs/quickstart.py", "--host=0.0.0.0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "jaxrl_tis.serve", *arguments], cwd=ROOT, env=environment,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )


@pytest.mark.all
@pytest.mark.parametrize("host, expected", [
    ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
    ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("", False), ("my.host", False),
])
def test_loopback(host, expected):
    assert serving.is_loopback(host) == expected


def test_token(tmp_path):
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    assert serving.read_token(str(file)) == "s3cret" and serving.read_token(None) is None
    for bad in ("", "\n", "two words", "s\u00e9cret"):
        file.write_text(bad)
        with pytest.raises(ValueError, match="must hold a token"):
            serving.read_token(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="must hold a token"):
        serving.read_token(str(file))


@functools.cache
def setup():
    return build(tiny.config(), penalties=True, top_n=2)


@functools.cache
def start_params():
    return serving.load(setup(), None)


def scaled(factor):
    return jax.tree.map(lambda x: x * factor, initial_params(setup().training))


def assert_serves(path, factor):
    expected = setup().engine.load(scaled(factor))
    jax.tree.map(np.testing.assert_array_equal, serving.load(setup(), str(path)), expected)


@pytest.fixture
def folder(tmp_path):
    """A model of other weights."""
    models.save(tmp_path / "model", setup().model, scaled(-1.0))
    return tmp_path / "model"


@pytest.mark.all
def test_a_run_with_a_harness_is_served_without_it(monkeypatch):
    """Its module need not be installed where the run is served."""
    harnessed = tiny.config(rollout__harness="not_here:play")
    made = dataclasses.replace(setup(), config=harnessed)
    monkeypatch.setattr(serving, "warm_up", lambda engine, params, drafting: None)
    monkeypatch.setattr(Sampling, "sessions", property(lambda self: pytest.fail("it began sessions")))
    serving.make_app(made, start_params(), LIMITS, 4, None, "127.0.0.1")


@pytest.mark.parametrize("host, is_closed", [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_server_for_others_needs_its_token(monkeypatch, host, is_closed):
    served = mock.Mock()
    for name in ("warm_up", "EngineThread"):
        monkeypatch.setattr(serving, name, mock.Mock())
    monkeypatch.setattr(serving.app, "make", served)
    serving.make_app(mock.Mock(), None, LIMITS, 4, "t", host)
    assert served.call_args.args[0].is_closed is is_closed and served.call_args.args[0].token == "t"


def test_a_trainer_gets_facts_and_the_base_of_the_start(monkeypatch):
    """Without a path the base is the server's first one, with another adapter or its own."""
    app, load = mock.Mock(), mock.Mock()
    for name, value in {"warm_up": mock.Mock(), "EngineThread": mock.Mock(), "load": load}.items():
        monkeypatch.setattr(serving, name, value)
    monkeypatch.setattr(serving.app, "make", app)
    made = mock.Mock(**{"engine.config.dtype": "bfloat16", "model.vocab_size": 50})
    serving.make_app(made, None, LIMITS, 4, "t", "127.0.0.1", start=("run", "first"))
    served = app.call_args.args[0]
    assert served.facts == {
        "dtype": "bfloat16", "max_model_len": 8, "logprobs_mode": "processed_logprobs",
        "max_logprobs": 2, "hf_config": {"vocab_size": 50},
    }
    for given in ((None,), (None, "new"), ("other",), ("other", "new")):
        served.load(*given)
    assert [call.args for call in load.call_args_list] == [
        (made, "run", "first"), (made, "run", "new"), (made, "other", None), (made, "other", "new")
    ]


@pytest.mark.all
def test_weights_of_a_model_folder(folder):
    assert_serves(folder, -1.0)
    edited = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 49}
    (folder / "config.json").write_text(json.dumps(edited))
    with pytest.raises(ValueError, match="holds another model"):
        serving.load(setup(), str(folder))
    with pytest.raises(FileNotFoundError):
        serving.load(setup(), str(folder / "absent"))


@pytest.mark.all
def test_weights_of_a_run_are_its_newest_checkpoint(tmp_path):
    state = initial_state(setup().training, scaled(1.0))
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 3):
            policy = dataclasses.replace(state["policy"], params=scaled(float(step)))
            checkpoints.save(step, state | {"policy": policy}, {"step": step})
    assert_serves(tmp_path, 3.0)


@pytest.mark.all
def test_a_real_engine(folder):
    params = start_params()
    scheduler = setup().scheduler(setup().engine, params, 0)
    greedy = SamplingParams(0.0, stop_ids=(2,), max_tokens=3)
    prompt = np.array(setup().tokenizer.encode("1+2=", add_special=True), np.int32)
    (record,) = generate(scheduler, [Request("alone", prompt, 0, greedy)])

    async def script(app):
        ask = lambda **fields: call(app, TEXT, {"prompt": "1+2="} | fields)
        replies = {
            "greedy": await ask(temperature=0, logprobs=2),
            "sampled": await ask(n=4, seed=5, temperature=5.0, logprobs=1),
            "again": await ask(n=4, seed=5, temperature=5.0, logprobs=1),
            "biased": await ask(logit_bias={"6": 100}, presence_penalty=1),
            "wrong": await ask(logit_bias={"999": 1}),
            "weights": await call(app, "/weights", {"path": str(folder)}, token="t"),
            "after": await ask(temperature=0, logprobs=2),
        }
        return {name: reply.json for name, reply in replies.items()}

    app = serving.make_app(setup(), params, LIMITS, 8, "t", "127.0.0.1")
    got = run(app, script)
    choice = lambda name: got[name]["choices"][0]
    assert choice("greedy")["logprobs"]["token_ids"] == record.tokens.tolist()
    np.testing.assert_allclose(choice("greedy")["logprobs"]["raw_logprobs"], record.logp_raw)
    ids = lambda name: [c["logprobs"]["token_ids"] for c in got[name]["choices"]]
    assert ids("sampled") == ids("again") and len(set(map(tuple, ids("sampled")))) > 1
    assert all(len(row) == 1 for row in choice("sampled")["logprobs"]["top_logprobs"])
    assert choice("biased")["text"] == "333"
    assert "beyond the vocabulary" in got["wrong"]["error"]["message"]
    assert got["weights"]["version"] == 1 and set(choice("after")["versions"]) == {1}
    assert choice("after")["logprobs"] != choice("greedy")["logprobs"]


@pytest.mark.all
def test_a_real_adapter_comes_and_goes(tmp_path):
    """Its log-probs are those of a server that starts with it, and without it those of the base."""
    peft.save(tmp_path / "adapter", *drawn(setup().model, "lora(rank=2, targets='attention')"))
    prompt = np.array(setup().tokenizer.encode("1+2=", add_special=True), np.int32)
    greedy = SamplingParams(0.0, stop_ids=(2,), max_tokens=3)
    alone = {}
    for name, path in (("base", None), ("a", str(tmp_path / "adapter"))):
        scheduler = setup().scheduler(setup().engine, serving.load(setup(), None, path), 0)
        (record,) = generate(scheduler, [Request("alone", prompt, 0, greedy)])
        alone[name] = record.tokens.tolist(), record.logp_raw.tolist()

    async def script(app):
        post = lambda path, **body: call(app, path, body, token="t")
        params = {"temperature": 0, "logprobs": 0, "max_tokens": 3}

        async def ask():
            body = {"token_ids": prompt.tolist(), "sampling_params": params}
            found = await post("/inference/v1/generate", **body)
            (choice,) = found.json["choices"]
            return choice["token_ids"], [x["raw_logprob"] for x in choice["logprobs"]["content"]]

        loaded = await post(
            "/v1/load_lora_adapter", lora_name="a", lora_path=str(tmp_path / "adapter"))
        found = {"a": await ask()}
        unloaded = await post("/v1/unload_lora_adapter", lora_name="a")
        absent = await post("/v1/load_lora_adapter", lora_name="b", lora_path=str(tmp_path / "no"))
        found["base"] = await ask()
        return found, (loaded.status, unloaded.status, absent.status), absent.error

    app = serving.make_app(setup(), start_params(), LIMITS, 8, "t", "127.0.0.1")
    found, statuses, error = run(app, script)
    assert statuses == (200, 200, 400) and "no" in error
    for name, (tokens, logps) in alone.items():
        assert found[name][0] == tokens
        np.testing.assert_allclose(found[name][1], logps, rtol=0, atol=1e-5)
    assert np.abs(np.subtract(alone["a"][1], alone["base"][1])).max() > 0.01


def test_a_socket_a_stream_and_a_client_that_hangs_up():
    engine = app_test.Held(steps=2)
    body = {"prompt": "abc", "seed": app_test.SEED, "stream": True}
    with listening(app_test.application(engine)) as port:
        health = lambda: json.loads(fetch(port, "/health").read())
        engine.calls.release()
        reply = fetch(port, TEXT, json.dumps(body))
        assert reply.status == 200 and b"data: {" in reply.readline()
        assert health()["pending"] == 1
        reply.close()
        for _ in range(8):  # of the 9 steps that are left
            engine.calls.release()
            time.sleep(0.1)
            if not health()["pending"]:
                break
        assert health() == {"status": "ok", "version": 0, "pending": 0, "is_paused": False}


def fetch(port, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST" if body else "GET", path, body, HEADERS | {"Connection": "close"})
    return connection.getresponse()


def test_an_address_that_others_reach_needs_a_token(refused):
    output, _ = refused.communicate(timeout=120)
    assert refused.returncode != 0 and "--host=0.0.0.0" in output and "--token_file" in output


@pytest.mark.all
def test_a_missing_package_is_told_with_its_extra():
    """In a process of its own, where uvicorn cannot be imported."""
    code = (
        "import runpy, sys; sys.modules['uvicorn'] = None; "
        "runpy.run_module('jaxrl_tis.serve', run_name='__main__', alter_sys=True)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "--config=configs/quickstart.py"], cwd=ROOT, text=True,
        capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert ran.returncode == 2 and "Traceback" not in ran.stderr
    assert "uvicorn" in ran.stderr and "pip install 'jaxrl_tis[serve]'" in ran.stderr
