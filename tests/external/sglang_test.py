"""The client of SGLang against a server of golden answers, written down from SGLang 0.5.23."""

import contextlib
import copy
import http.server
import itertools
import json
import threading
import types

import numpy as np
import pytest

from jaxrl_tis.engine.records import SamplingParams
from jaxrl_tis.external import fleet, sglang
from jaxrl_tis.external.client import Client, EngineError, Refused
from jaxrl_tis.external.sglang import Sglang
from jaxrl_tis.rollouts import check

MODEL = {
    "model_path": "base", "served_model_name": "tiny", "tokenizer_path": "base", "is_generation": True,
    "weight_version": "default", "load_format": "auto", "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
}
SERVER = {
    "model_path": "base", "dtype": "bfloat16", "context_length": None, "max_total_num_tokens": 4096,
    "max_req_input_len": 58, "hicache_storage_backend": None, "status": "ready", "version": "0.5.23",
    "internal_states": [{"world_size": 1, "env_vars": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}}],
}
# Four tokens, the last two by weights that came between them, and the two likeliest at each.
GENERATED = {
    "text": " a b c", "output_ids": [7, 8, 9, 1],
    "meta_info": {
        "id": "r0-a", "finish_reason": {"type": "stop", "matched": 1}, "prompt_tokens": 2,
        "weight_version": "4", "num_retractions": 1, "input_token_logprobs": [],
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None], [-0.25, 9, None], [-2.0, 1, None]],
        "output_token_logprobs_length": 4, "input_top_logprobs": [],
        "output_top_logprobs": [
            [[-0.5, 7, None], [-1.25, 3, None]], [[-0.75, 2, None], [-1.5, 8, None]],
            [[-0.25, 9, None], [None, 4, None]], None,
        ],
        "completion_tokens": 4, "cached_tokens": 0,
        "weight_versions": [
            {"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 4},
        ],
    },
}
# What waits in the queue answers with what had left the scheduler.
ABORTED = {
    "text": "", "output_ids": [7],
    "meta_info": {
        "id": "r1-a", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": "4", "input_token_logprobs": [], "output_token_logprobs": [[-0.5, 7, None]],
        "output_token_logprobs_length": 1, "completion_tokens": 1,
        "weight_versions": [{"version": "4", "start": 0, "end": 1}],
    },
}
UPDATED = {
    "success": True, "message": "Succeeded to update model weights. Weight version updated to 4.",
    "num_paused_requests": 0,
}
OKS = {
    "/pause_generation": {"message": "Generation paused successfully.", "status": "ok"},
    "/continue_generation": {"message": "Generation continued successfully.", "status": "ok"},
    "/update_weights_from_disk": UPDATED,
    "/update_weight_version": {"success": True, "message": "", "new_version": "4"},
    "/load_lora_adapter": {"success": True, "error_message": None, "loaded_adapters": {}},
    "/unload_lora_adapter": {"success": True, "error_message": None, "loaded_adapters": {}},
    "/abort_request": None, "/model_info": MODEL, "/server_info": SERVER, "/generate": GENERATED,
}


@contextlib.contextmanager
def served(monkeypatch, **changes):
    """Yields (a client of a server, its answers by path, its requests). An answer is JSON, a number
    and JSON for another status, or a function of the body that returns one of them."""
    numbers = itertools.count()
    make = lambda: types.SimpleNamespace(hex=f"r{next(numbers)}")
    monkeypatch.setattr(sglang.uuid, "uuid4", make)
    answers, asked = copy.deepcopy(OKS) | {f"/{name}": x for name, x in changes.items()}, []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self):
            count = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(count)) if count else None
            asked.append((self.command, self.path, body))
            found = answers.get(self.path, (404, {"detail": "Not Found"}))
            found = found(body) if callable(found) else found
            status, found = found if isinstance(found, tuple) else (200, found)
            content = b"" if found is None else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = answer

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        kind = Sglang(Client(f"http://127.0.0.1:{server.server_port}", 20))
        try:
            yield kind, answers, asked
        finally:
            server.shutdown()
            thread.join()


SAMPLING = SamplingParams(temperature=0.7, stop_ids=(1, 2), max_tokens=5)


def ask(kind, sampling=SAMPLING, top_n=0, adapter=None):
    return kind.generate("a", np.array([4, 5]), sampling, 11, top_n, adapter)


def test_a_life_of_whole_weights(monkeypatch):
    """Facts, a request, a sync and an abort: each request and answer as SGLang has it."""
    with served(monkeypatch) as (kind, answers, asked):
        facts = kind.facts()
        assert (facts.model, facts.max_length, facts.dtype) == ("tiny", 58, "bfloat16")
        assert (facts.logprobs, facts.max_logprobs, facts.vocab_size) == (None, None, None)
        assert kind.version() is None

        answer = ask(kind, top_n=2)
        assert answer.tokens.tolist() == [7, 8, 9, 1] and answer.stop_reason == "stop"
        assert answer.logps.tolist() == [-0.5, -1.5, -0.25, -2.0] and answer.logps.dtype == np.float32
        assert answer.spans == [("3", 0, 2), ("4", 2, 4)] and answer.routes is None
        assert answer.top_ids.tolist() == [[7, 3], [2, 8], [9, -1], [-1, -1]]
        assert answer.top_logps.tolist() == [[-0.5, -1.25], [-0.75, -1.5], [-0.25, -np.inf], [-np.inf] * 2]

        kind.pause()
        kind.load("/weights/version-4", 4)
        answers["/model_info"] = MODEL | {"weight_version": "4", "model_path": "/weights/version-4"}
        assert kind.version() == 4
        kind.resume()

        is_aborted, is_asked = threading.Event(), threading.Event()
        waits = lambda body: (is_asked.set(), is_aborted.wait(20), ABORTED)[-1]
        answers["/abort_request"] = lambda body: is_aborted.set()
        answers["/generate"] = waits
        found = []
        thread = threading.Thread(target=lambda: found.append(ask(kind)))
        thread.start()
        assert is_asked.wait(20)
        kind.abort(["b"])
        kind.abort(["a", "c"])
        thread.join(20)
        [partial] = found
        assert (partial.tokens.tolist(), partial.stop_reason, partial.spans) == ([7], "abort", [("4", 0, 1)])
        assert partial.top_ids.shape == (1, 0)
        kind.abort(["a"])  # it has ended

        params = {
            "temperature": 0.7, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "stop_token_ids": [1, 2],
            "stop": [], "ignore_eos": False, "no_stop_trim": True, "skip_special_tokens": False,
            "max_new_tokens": 5, "min_new_tokens": 0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "sampling_seed": 11, "logit_bias": {},
        }
        body = {
            "rid": "r0-a", "input_ids": [4, 5], "sampling_params": params, "return_logprob": True,
            "logprob_start_len": -1, "top_logprobs_num": 2, "return_text_in_logprobs": False,
            "stream": False, "lora_path": None,
        }
        weights = {
            "model_path": "/weights/version-4", "weight_version": "4", "flush_cache": True,
            "abort_all_requests": False,
        }
        assert asked == [
            ("GET", "/model_info", None), ("GET", "/server_info", None), ("GET", "/model_info", None),
            ("POST", "/generate", body),
            ("POST", "/pause_generation", {"mode": "retract"}),
            ("POST", "/update_weights_from_disk", weights),
            ("GET", "/model_info", None),
            ("POST", "/continue_generation", {}),
            ("POST", "/generate", body | {"rid": "r1-a", "top_logprobs_num": 0}),
            ("POST", "/abort_request", {"rid": "r1-a"}),
        ]


def test_a_life_of_adapters(monkeypatch):
    """A request keeps its adapter, which stays until no request can name it."""
    hold, is_asked = threading.Event(), threading.Event()

    def generated(body):
        answer = copy.deepcopy(GENERATED)
        answer["meta_info"]["id"] = body["rid"]
        if body["input_ids"] == [9]:
            is_asked.set()
            hold.wait(20)
        return answer

    with served(monkeypatch, generate=generated) as (kind, answers, asked):
        named = lambda path: [body for _, asked_path, body in asked if asked_path == path]
        kind.load_adapter("adapter-3", "/weights/adapter-3", None)
        assert [path for _, path, _ in asked] == ["/load_lora_adapter", "/update_weight_version"]
        assert named("/update_weight_version") == [{"new_version": "3", "abort_all_requests": False}]
        found = []
        begin = lambda: found.append(kind.generate("b", [9], SAMPLING, 11, 0, "adapter-3"))
        thread = threading.Thread(target=begin)
        thread.start()
        assert is_asked.wait(20)
        kind.load_adapter("adapter-4", "/weights/adapter-4", "adapter-3")
        assert ask(kind, adapter="adapter-3").spans == [("3", 0, 4)]  # it was on its way
        kind.load_adapter("adapter-5", "/weights/adapter-5", "adapter-4")
        assert named("/unload_lora_adapter") == []  # a request has 3, and may name 4
        hold.set()
        thread.join(20)
        assert found[0].spans == [("3", 0, 4)]
        # The same version again, to an engine that has lost the older ones.
        refusal = {"success": False, "error_message": "LoRA with name adapter-3-r0 does not exist"}
        answers["/unload_lora_adapter"] = 400, refusal
        kind.load_adapter("adapter-5", "/weights/adapter-5", "adapter-5")
        assert ask(kind, adapter="adapter-5").spans == [("5", 0, 4)]
        assert named("/load_lora_adapter") == [
            {"lora_name": f"adapter-{version}-r{number}", "lora_path": f"/weights/adapter-{version}"}
            for version, number in ((3, 0), (4, 2), (5, 4), (5, 5))
        ]
        assert [body["lora_name"] for body in named("/unload_lora_adapter")] == ["adapter-3-r0", "adapter-4-r2"]
        asked_for = ["adapter-3-r0", "adapter-3-r0", "adapter-5-r5"]
        assert [body["lora_path"] for body in named("/generate")] == asked_for
        with pytest.raises(EngineError, match="was given no adapter 'adapter-4'"):
            ask(kind, adapter="adapter-4")


def test_what_a_request_may_ask_for(monkeypatch):
    with served(monkeypatch) as (kind, answers, asked):
        del answers["/generate"]["meta_info"]["output_top_logprobs"]
        answers["/generate"]["meta_info"]["finish_reason"] = {"type": "stop", "matched": "END"}
        ask(kind, SamplingParams(
            temperature=0.0, top_k=3, top_p=0.5, min_p=0.25, stop_strings=("END",), max_tokens=6,
            min_tokens=2, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5,
            logit_bias=((3, 2.0),),
        ))
        [(_, _, body)] = asked
        assert body["sampling_params"] == {
            "temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "stop_token_ids": [],
            "stop": ["END"], "ignore_eos": True, "no_stop_trim": True, "skip_special_tokens": False,
            "max_new_tokens": 6, "min_new_tokens": 2, "repetition_penalty": 1.5,
            "presence_penalty": 0.5, "frequency_penalty": -0.5, "sampling_seed": 11,
            "logit_bias": {"3": 2.0},
        }


def changed(**changes):
    """Returns GENERATED with other values of meta_info, without those that are None."""
    answer = copy.deepcopy(GENERATED)
    answer["meta_info"] |= changes
    answer["meta_info"] = {name: x for name, x in answer["meta_info"].items() if x is not None}
    return answer


def test_an_answer_that_is_no_record_is_refused(monkeypatch):
    logps = GENERATED["meta_info"]["output_token_logprobs"]
    span = lambda *span: dict(zip(("version", "start", "end"), span, strict=True))
    length = {"type": "length", "length": 4}
    cases = [
        (changed(output_token_logprobs=logps[:3]), EngineError, "request a: 4 tokens and 3 log-probs"),
        (changed(output_token_logprobs=None), EngineError, "4 tokens and 0 log-probs"),
        (changed(output_token_logprobs=[*logps[:3], [-2.0, 2, None]]), EngineError,
         "token 3 is 1 and its log-prob is of 2"),
        (changed(output_token_logprobs=[[None, 7, None], *logps[1:]]), EngineError,
         "the log-prob of token 0 is None"),
        (changed(output_token_logprobs=[-0.5, -1.5, -0.25, -2.0]), EngineError, "another form than SGLang's"),
        (changed(output_top_logprobs=[None]), EngineError, "4 tokens and 1 lists of likely tokens"),
        ({"output_ids": [7], "text": ""}, EngineError, "it ended by None: {'output_ids'"),
        ({"meta_info": GENERATED["meta_info"]}, EngineError, "no output_ids"),
        ([GENERATED], EngineError, "no output_ids"),
        (changed(id="r9-a"), EngineError, "the answer is of request 'r9-a'"),
        (changed(output_top_logprobs=None), EngineError, "4 tokens and 0 lists of likely tokens"),
        (ABORTED | {"meta_info": ABORTED["meta_info"] | {"id": "r0-a", "output_top_logprobs": [None]}},
         EngineError, r"did not ask for that \(Abort in waiting queue\)"),
        (changed(finish_reason={"type": "stop", "matched": 3}), Refused, r"stopped at 3, which .* ends \(\(1, 2\)\)"),
        (changed(finish_reason={"type": "stop", "matched": "NaN happened"}), Refused, "stopped at 'NaN happened'"),
        (changed(finish_reason=length), Refused, "cut at 4 of 5 tokens; raise --context-length"),
        (changed(weight_versions=None), EngineError, "weight_versions of 4 tokens are \\[\\]"),
        (changed(weight_versions=[span("3", 0, 2), span("4", 3, 4)]), EngineError, "are .*'start': 3"),
        ((400, {"error": {"message": "longer than the model's context length"}}), Refused, "answered 400: .*longer than"),
        ((503, {"error": {"message": "The request queue is full."}}), EngineError, "answered 503: .*queue is full"),
    ]
    for answer, kind_of_error, why in cases:
        with served(monkeypatch, generate=answer) as (kind, *_):
            with pytest.raises(EngineError, match=why) as error:
                ask(kind, top_n=2)
            assert type(error.value) is kind_of_error and not kind._calls


def test_an_abort_of_the_last_step_came_late(monkeypatch):
    abort = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    with served(monkeypatch, generate=changed(finish_reason=abort)) as (kind, *_):
        assert ask(kind).stop_reason == "stop"
    with served(monkeypatch, generate=changed(finish_reason=abort)) as (kind, *_):
        assert ask(kind, SamplingParams(stop_ids=(2,), max_tokens=4)).stop_reason == "length"


def test_an_engine_that_cannot_follow_is_named(monkeypatch):
    """What is known before the first request, and weights that an engine did not take."""
    stale = "Weights were updated, but the cache was not flushed because requests are still running"
    disabled = {"success": False, "error_message": "LoRA is not enabled. Please set `--enable-lora`"}
    facts, load = lambda kind: kind.facts(), lambda kind: kind.load("/weights/version-4", 4)
    adapter = lambda kind: kind.load_adapter("adapter-4", "/weights/adapter-4", None)
    raw = [{"env_vars": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}}]
    cases = [
        (facts, dict(model_info=(404, {"detail": "Not Found"})), Refused, "unknown there .404."),
        (facts, dict(model_info={"model_path": "base"}), EngineError, "names no weight_version"),
        (facts, dict(server_info=SERVER | {"internal_states": raw}), Refused, "those at temperature 1"),
        (facts, dict(server_info=SERVER | {"hicache_storage_backend": "file"}), Refused, "'file', which no"),
        (load, dict(update_weights_from_disk=(400, {"success": False, "message": stale})), EngineError,
         "answered 400: Weights were updated, but the cache was not flushed"),
        (load, dict(update_weights_from_disk={"success": False, "message": stale}), EngineError,
         "was no success: .*not flushed"),
        (adapter, dict(load_lora_adapter=(400, disabled)), Refused, "LoRA is not enabled"),
        (adapter, dict(load_lora_adapter=disabled), EngineError, "load_lora_adapter was no success"),
    ]
    for act, changes, kind_of_error, why in cases:
        with served(monkeypatch, **changes) as (kind, *_):
            with pytest.raises(EngineError, match=why) as error:
                act(kind)
            assert type(error.value) is kind_of_error
    for said, dtype in (("half", "float16"), ("float", "float32"), ("auto", None)):
        with served(monkeypatch, server_info=SERVER | {"dtype": said}) as (kind, *_):
            assert kind.facts().dtype == dtype


def test_every_kind_can_be_chosen_and_its_log_probs_are_known():
    assert set(check.ENGINE_KINDS) == fleet.KINDS.keys()
    assert set(check.UNFILTERED_KINDS) == {n for n, kind in fleet.KINDS.items() if not kind.filters_logps}
