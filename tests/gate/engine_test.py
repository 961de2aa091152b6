"""The gap of a running engine: of our own server over loopback, and of one with planted gaps."""

import contextlib
import functools
import http.server
import json
import pathlib
import threading
import time
from unittest import mock

import jax
import numpy as np
import pytest

from jaxrl_tis.external.client import Client, EngineError, Gone, Refused
from jaxrl_tis.external.protocol import Answer, Facts, Numerics
from jaxrl_tis.external.sglang import Sglang
from jaxrl_tis.external.vllm import Vllm
from jaxrl_tis.gate import engine, report
from jaxrl_tis.models import transformer
from tests import commands, engines, tiny, web, weights

pytestmark = pytest.mark.compiles

ROOT = pathlib.Path(__file__).parents[2]
SAME = dict(engine__quantization="none")
NAMES = ["run", "dtype", "raw", "unfiltered", "cache_miss", "cache_hit", "alone", "chunked"]
WIDTH = 128


def setup(**overrides):
    return tiny.setup(**SAME, **overrides)


def command(config, path, url):
    """Exit code and report of the command with --engine."""
    gate = commands.load("gate.__main__")
    flags = dict(
        CONFIG=config, JSON=path, PROMPTS=None, ADAPTER=None, ENGINE=url, ENGINE_KIND=None
    )
    with (
        mock.patch.object(gate, "CONNECTED", contextlib.nullcontext),
        mock.patch.object(gate, "build", tiny._shared_build),
        tiny.one_device(),
        commands.exits(gate, **flags) as exited,
    ):
        gate.main()
    return exited.value.code, json.loads(path.read_text())


@pytest.mark.by_jax("XLA compiles and rounds the programs")
def test_our_own_server_has_no_gap_at_the_same_weights_and_one_at_others(tmp_path):
    (tmp_path / "token").write_text(engines.TOKEN + "\n")
    known = SAME | dict(rollout__engine_token_file=str(tmp_path / "token"))
    with engines.served(setup()) as url:
        code, same = command(tiny.config(**known), tmp_path / "same.json", url)
        other_code, other = command(
            tiny.config(**known, seed=1), tmp_path / "other.json", url
        )
    rows = {r["row"]: r for r in same["rows"]}
    assert [*rows] == NAMES and code == 0 and same["problems"] == same["exceeded"] == []
    # The engine and the learner sum in another order: float32 rounds at about 1e-6 nats.
    for name in ("run", "unfiltered", "cache_miss", "cache_hit", "alone"):
        assert 0 <= rows[name]["d_max"] < 1e-4, name
    assert rows["run"]["d_max"] > 0 and rows["raw"]["d_mean"] > 1e-3  # the temperature is 0.8
    assert rows["dtype"]["is_same"] and "does not say" in rows["chunked"]["not_measured"]
    assert same["facts"]["versions"] == ["server-0"] and same["facts"]["cache_dtype"] is None
    text = engine.table(same)
    assert f"engine {url}: model tiny, max_length 8, dtype float32" in text
    assert "cache_dtype unknown" in text and "chunked             not measured: the engine" in text
    assert other_code == 1 and other["total"]["d_mean"] > 0.05 and "d_mean" in other["exceeded"]
    page = (ROOT / "docs" / "gate.md").read_text()
    names = {*same, *rows, *(key for r in rows.values() for key in r)}
    assert not [name for name in names if f"`{name}`" not in page]


# An engine whose answers are planned


@functools.cache
def forward():
    made = setup()
    program = made.training.learner.program
    logits = functools.partial(transformer.logits, program=program)
    return jax.jit(lambda params, tokens: logits(params, made.model, tokens))


class Planted:
    """Answers two tokens to every request. Their log-probs are those of a forward pass, plus the
    row's gap.

    Attributes:
      got: (row, tokens of the prompt, requests at once) of each request.
    """

    def __init__(self, made, params, gaps, temperature=None, **said):
        self._made, self._params, self._gaps, self._temperature = made, params, gaps, temperature
        self.got, self.resets, self._live, self._lock = [], 0, 0, threading.Lock()
        self._facts = dict(
            model="m", max_length=None, dtype="float32", logprobs=None, max_logprobs=None,
            vocab_size=None,
        ) | {name: x for name, x in said.items() if name in Facts.__dataclass_fields__}
        self._numerics = dict(program=None, cache_dtype=None, block=None, chunk=None) | {
            name: x for name, x in said.items() if name in Numerics.__dataclass_fields__
        }
        self.spans, self.refuses = said.get("spans"), said.get("refuses")
        self.ids, self.dies = said.get("ids"), said.get("dies")

    def facts(self):
        return Facts(**self._facts)

    def numerics(self):
        return Numerics(**self._numerics)

    def reset_cache(self):
        self.resets += 1
        if self.refuses:
            raise Refused(self.refuses)

    def tokenize(self, text):
        return self.ids

    def generate(self, id, tokens, sampling, seed, top_n, adapter):
        if self.dies and id.startswith(self.dies):
            raise Gone("the engine is gone")
        assert (top_n, adapter) == (0, None)
        row, vocab = id.partition("/")[0], self._made.model.vocab_size
        with self._lock:
            self._live += 1
            self.got.append((row, len(tokens), self._live))
        time.sleep(0.01)  # others begin
        # A cut prompt and a seed end vLLM on a CPU. 8 prompts of 5 tokens are read together.
        chunk = self._numerics["chunk"]
        is_cut = row == "chunked" or (row != "alone" and bool(chunk) and chunk < 40)
        assert (seed is None) == is_cut
        seed = seed or 0
        chosen = np.array([seed % vocab, seed // vocab % vocab], np.int32)
        padded = np.zeros((1, WIDTH), np.int32)
        padded[0, : len(tokens) + 2] = [*tokens, *chosen]
        at = len(tokens) - 1 + np.arange(2)
        logits = np.asarray(forward()(self._params, padded))[0, at]
        logits = np.float64(logits) / (self._temperature or sampling.temperature)
        logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        with self._lock:
            self._live -= 1
        said = logps[np.arange(2), chosen] + self._gaps.get(row, 0.0)
        none = np.zeros((2, 0))
        spans = self.spans and self.spans(row)
        return Answer(chosen, np.float32(said), "length", spans, none, none)


@functools.cache
def strong():
    """A setup and parameters whose distributions are far from even."""
    made = setup()
    return made, jax.device_put(weights.drawn(made.model))


def measured(gaps=None, prompts=4, **said):
    made, params = strong()
    kind = Planted(made, params, gaps or {}, **said)
    return engine.measure(made, params, prompts, "http://it", kind), kind


def test_each_row_has_its_own_gap_and_its_own_requests():
    """3 prompts of 4 samples; a chunk of 40 tokens, where the config's prompts have at most 5."""
    gaps = {"run": 0.01, "unfiltered": 0.02, "cache_miss": 0.03, "cache_hit": 0.04, "alone": 0.05,
            "chunked": 0.06}
    found, kind = measured(gaps, prompts=3, block=2, chunk=40, max_length=96)
    rows = {r["row"]: r for r in found["rows"]}
    for name, gap in gaps.items():
        assert rows[name]["d_mean"] == pytest.approx(gap, abs=1e-4), name
        assert rows[name]["d_max"] == pytest.approx(gap, abs=1e-4), name
    assert found["total"]["d_mean"] == rows["run"]["d_mean"] and found["tokens"] == 24
    assert rows["dtype"]["is_same"] and kind.resets == 3
    of = lambda name: [(length, live) for row, length, live in kind.got if row == name]
    assert [len(of(name)) for name in gaps] == [12, 3, 3, 3, 3, 4]
    assert max(live for _, live in of("alone") + of("chunked")) == 1
    assert max(live for _, live in of("run")) > 1 and max(live for _, live in of("cache_hit")) > 1
    assert {length for length, _ in of("chunked")} == {40 + engine.BEYOND}
    assert max(length for length, _ in of("run")) <= 5


def test_raw_log_probs_are_named_and_measured():
    """A server in vLLM's default mode: its log-probs are of temperature 1, the run's is 0.8."""
    found, _ = measured(temperature=1.0, logprobs="raw_logprobs")
    rows = {r["row"]: r for r in found["rows"]}
    assert rows["run"]["d_mean"] > 0.1 > 1e-4 > rows["raw"]["d_max"]
    assert rows["unfiltered"]["d_max"] < 1e-4
    [first, *others] = engine.failures(found)
    assert "its log-probs are raw_logprobs" in first and "--logprobs-mode processed" in first
    assert any("d_mean" in other for other in others) and first in engine.table(found)


def test_an_engine_of_another_dtype_is_scored_in_it():
    """The planted engine is exact, and the learner in bfloat16 is off. A run refuses the dtype."""
    found, _ = measured(dtype="bfloat16")
    rows = {r["row"]: r for r in found["rows"]}
    assert rows["run"]["d_max"] < 1e-4 < 1e-3 < rows["dtype"]["d_mean"] < 0.3
    assert "computes in bfloat16, and engine.dtype is float32" in found["problems"][0]


@pytest.mark.parametrize("said, why", [
    (dict(block=0, chunk=0, dtype=None), {
        "dtype": "the engine does not say its dtype",
        "cache_miss": "the engine has no prefix cache",
        "cache_hit": "the engine has no prefix cache",
        "chunked": "the engine cuts no prompts into chunks",
    }),
    (dict(block=16, chunk=20, max_length=70, dtype="float64"), {
        "dtype": "its dtype is float64",
        "cache_miss": "no prompt is longer than a block of the prefix cache, 16 tokens",
        "chunked": "71 tokens, more than a chunk of 20, exceed its longest sequence, 70",
    }),
    (dict(refuses="POST /reset_prefix_cache answered 403: no token", chunk=20_000), {
        "cache_hit": "POST /reset_prefix_cache answered 403: no token",
        "chunked": "prompts of more than 10000 tokens are not scored, and a chunk has 20000",
    }),
    (dict(chunk=1024), {"chunked": "sequences of up to 1075 tokens exceed max_position"}),
])
def test_a_row_says_why_it_is_not_measured(said, why, monkeypatch):
    zeros = lambda setup, settings, params, micro: np.zeros(micro["mask"].shape, np.float32)
    monkeypatch.setattr(engine.ladder, "score", zeros)
    found, _ = measured(**said)
    rows = {r["row"]: r for r in found["rows"]}
    for name, text in why.items():
        assert text in rows[name]["not_measured"] and "d_mean" not in rows[name], name
    assert "d_mean" in rows["alone"]


def test_what_a_run_would_stumble_over_is_told(monkeypatch):
    """Another tokenizer, weights that change meanwhile, an engine that dies after the first row."""
    zeros = lambda setup, settings, params, micro: np.zeros(micro["mask"].shape, np.float32)
    monkeypatch.setattr(engine.ladder, "score", zeros)
    spans = lambda row: [("3" if row == "run" else "4", 0, 2)]
    found, _ = measured(spans=spans, ids=[1], dies="alone")
    assert found["facts"]["versions"] == ["3", "4"]
    first, second, *_ = engine.failures(found)
    assert "its tokenizer gives the prompt" in first
    assert "its weights changed while it was measured" in second
    rows = {r["row"]: r for r in found["rows"]}
    assert rows["alone"]["not_measured"] == "the engine is gone" and "d_mean" in rows["cache_hit"]


# Bad input


MODELS = {"data": [{"id": "m", "max_model_len": 64}]}
FACTS = {"dtype": "torch.float32", "hf_config": {"vocab_size": 19}}
INFO = {"vllm_config": {"model_config": FACTS}}


@contextlib.contextmanager
def answering(pages):
    """The URL of a server with these bodies by path."""

    class Handler(web.Answering):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = pages.get(self.path.partition("?")[0])
            text = body if isinstance(body, bytes) else json.dumps(body).encode()
            self._send(404 if body is None else 200, text)

        do_POST = do_GET

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


PATHS = {"models": "/v1/models", "info": "/server_info", "generate": "/inference/v1/generate"}


@pytest.mark.parametrize("pages, words", [
    ({"generate": {}}, "without 'choices'"),
    ({"generate": b"<html>"}, "answered no JSON: '<html>'"),
    ({"generate": {"choices": [{"token_ids": [1, 2], "finish_reason": "length"}]}},
     "2 tokens and 0 log-probs"),
    ({"generate": {"choices": [{"token_ids": [], "finish_reason": "abort"}]}},
     "ended request .* by 'abort' after 0"),
    ({"generate": {"choices": [{"token_ids": [999], "finish_reason": "length", "logprobs": {
        "content": [{"token_id": 999, "logprob": -1.0}]}}]}},
     "sampled token 999, and this model has 19"),
    ({"generate": None}, "/inference/v1/generate is unknown there .404.; is it an engine of"),
    ({"info": None}, "/server_info is unknown there"),
    ({"models": {"models": []}}, "without 'data'"),
    ({"info": {"vllm_config": {"model_config": {"hf_config": {"vocab_size": 32000}}}}},
     "its model has 32000 token ids and this run's 19; serve the same model"),
])
def test_what_is_no_engine_of_this_model_is_told_in_a_sentence(pages, words):
    own = {"models": MODELS, "info": INFO} | pages
    made = setup()
    with answering({PATHS[name]: body for name, body in own.items()}) as url:
        with pytest.raises(ValueError, match=words) as error:
            kind = engine.connect(url, "vllm", made.config.rollout)
            engine.measure(made, None, 4, url, kind)
    assert url in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("url, words", [
    ("localhost:8000", "--engine=localhost:8000 is no http address; give http://host:port"),
    ("http://", "is no http address"), ("http://host:port", "is no http address"),
    ("http://[::1", "is no http address"),
    ("http://127.0.0.1:9", "/v1/models failed: .*is the engine running there"),
])
def test_an_address_without_an_engine(url, words):
    with pytest.raises(ValueError, match=words):
        engine.connect(url, "vllm", setup().config.rollout)


def test_the_own_engine_is_not_measured_in_place_of_others(tmp_path):
    others = dict(
        rollout__driver="external", rollout__engines="http://127.0.0.1:9",
        rollout__weights_folder=str(tmp_path),
    )
    with pytest.raises(ValueError, match="measure each of rollout.engines by .*gate --engine=http"):
        report.measure(setup(**others), None, 4)


def test_vllm_says_how_it_computes():
    """As version 0.32 answers; its own server says nothing of it."""
    info = {"vllm_config": {
        "cache_config": {"cache_dtype": "auto", "block_size": 16, "enable_prefix_caching": True},
        "scheduler_config": {
            "enable_chunked_prefill": True, "max_num_batched_tokens": 2048,
            "long_prefill_token_threshold": 0,
        },
    }}
    asked = lambda info: {"/server_info": info, "/version": {"version": "0.32.0"}}
    reset = {"/reset_prefix_cache": {"success": False}}
    with answering(asked(info) | reset) as url:
        kind = Vllm(Client(url))
        assert kind.numerics() == Numerics("0.32.0", "auto", 16, 2048)
        with pytest.raises(EngineError, match="/reset_prefix_cache answered {'success': False}"):
            kind.reset_cache()
    off = {"cache_config": {"block_size": 16, "enable_prefix_caching": False},
           "scheduler_config": {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}}
    with answering(asked({"vllm_config": off})) as url:
        assert Vllm(Client(url)).numerics() == Numerics("0.32.0", None, 0, 0)
    with answering({"/server_info": {"vllm_config": "text"}}) as url:
        assert Vllm(Client(url)).numerics() == Numerics(None, None, None, None)


def test_sglang_says_how_it_computes():
    """As version 0.5.23 names its arguments; a flush answers a sentence."""
    said = {"version": "0.5.23", "kv_cache_dtype": "auto", "page_size": 1,
            "disable_radix_cache": False, "chunked_prefill_size": 8192}
    with answering({"/server_info": said, "/flush_cache": b"Cache flushed."}) as url:
        kind = Sglang(Client(url))
        assert kind.numerics() == Numerics("0.5.23", "auto", 1, 8192)
        kind.reset_cache()
    off = said | {"disable_radix_cache": True, "chunked_prefill_size": -1}
    with answering({"/server_info": off}) as url:
        assert Sglang(Client(url)).numerics() == Numerics("0.5.23", "auto", 0, 0)
        with pytest.raises(Refused, match="/flush_cache is unknown there"):
            Sglang(Client(url)).reset_cache()
