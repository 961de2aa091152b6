"""The protocol of SGLang, as `sglang.launch_server` speaks it. Read in SGLang 0.5.23.

Its log-probs are after temperature, penalties and bias, and before top-k, top-p and min-p.
sglang-jax has neither /model_info nor a route that reads weights. `facts` refuses it.
"""

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from jaxrl_tis.engine.records import SamplingParams
from jaxrl_tis.external.client import SHOWN, Client, EngineError, Refused
from jaxrl_tis.external.protocol import Answer, Facts, Numerics, Pair, part, read

GENERATE = "/generate"
DTYPES: dict[Any, str | None] = {"half": "float16", "float": "float32", "auto": None}
RAW = "SGLANG_RETURN_ORIGINAL_LOGPROB"


@dataclasses.dataclass
class Call:
    """A request in work.

    Attributes:
      id: of the caller.
      adapter: its name in the engine.
      is_aborted: whether the caller asked for its end.
    """

    id: str
    adapter: str | None
    is_aborted: bool = False


class Sglang:
    """One engine of this kind."""

    filters_logps = False

    def __init__(self, client: Client):
        self._client = client
        self._calls: dict[str, Call] = {}  # by the engine's id of the request
        self._adapters: dict[str, str] = {}  # name in the engine -> name of the version

    def facts(self) -> Facts:
        url = self._client.url
        model = self._client.get("/model_info")
        if "weight_version" not in part(model):
            raise EngineError(f"{url}/model_info names no weight_version: {str(model)[:SHOWN]}")
        own = part(self._client.get("/server_info"))
        # Said where SGLANG_EXPOSE_OWN_ENV_VARS is set; the canary finds it elsewhere.
        states = own.get("internal_states")
        for state in states if isinstance(states, list) else []:
            if str(part(state, "env_vars").get(RAW)).lower() in ("1", "true"):
                raise Refused(
                    f"{url} runs with {RAW}, and its log-probs are those at temperature 1; "
                    "start it without"
                )
        if store := own.get("hicache_storage_backend"):
            raise Refused(
                f"{url} keeps keys in hicache_storage_backend = {store!r}, which no update of the "
                "weights clears; start it without"
            )
        dtype = own.get("dtype")
        # The longest prompt: that of a request which goes on before its last token.
        return Facts(
            str(model.get("served_model_name")), own.get("max_req_input_len"),
            DTYPES.get(dtype, dtype), None, None, None,
        )

    def numerics(self) -> Numerics:
        own = part(self._client.get("/server_info"))
        chunk = own.get("chunked_prefill_size")  # -1: none
        return Numerics(
            own.get("version"), own.get("kv_cache_dtype"),
            0 if own.get("disable_radix_cache") else own.get("page_size"),
            None if chunk is None else max(chunk, 0),
        )

    def reset_cache(self) -> None:
        self._client.tell("/flush_cache", {})

    def generate(
        self, id: str, tokens: Sequence[int] | np.ndarray, sampling: SamplingParams,
        seed: int | None, top_n: int, adapter: str | None,
    ) -> Answer:
        # An abort ends all requests whose ids begin with the one that it names.
        rid = f"{uuid.uuid4().hex}-{id}"
        call = Call(id, None if adapter is None else self._newest(adapter))
        body = {
            "rid": rid, "input_ids": [*map(int, tokens)],
            "sampling_params": _params(sampling, seed),
            "return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": top_n,
            "return_text_in_logprobs": False, "stream": False, "lora_path": call.adapter,
        }
        self._calls[rid] = call
        try:
            answer = self._client.post(GENERATE, body, timeout=None)
        finally:
            del self._calls[rid]
        where = f"{self._client.url}{GENERATE}, request {id}"
        try:
            found = _read(answer, rid, sampling, top_n, where)
        except (TypeError, ValueError, KeyError) as error:
            raise EngineError(
                f"{where}: the answer has another form than SGLang's ({error}): "
                f"{str(answer)[:SHOWN]}"
            ) from error
        if found.stop_reason == "abort" and not call.is_aborted:
            why = part(answer, "meta_info", "finish_reason").get("message")
            raise EngineError(f"{where}: it was aborted, and this run did not ask for that ({why})")
        if adapter is None:
            return found
        # The engine names the newest version. A request keeps the adapter with which it began.
        spans = [(str(_version(adapter)), 0, len(found.tokens))]
        return dataclasses.replace(found, spans=spans)

    def abort(self, ids: Sequence[str]) -> None:
        for rid, call in self._calls.copy().items():
            if call.id in ids:
                call.is_aborted = True
                self._client.post("/abort_request", {"rid": rid})

    def pause(self) -> None:
        # Requests wait without their keys. In mode in_place they keep them, and no flush succeeds.
        self._client.post("/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        self._client.post("/continue_generation")

    def load(self, path: str, version: int) -> None:
        body = {
            "model_path": path, "weight_version": str(version), "flush_cache": True,
            "abort_all_requests": False,
        }
        try:
            self._post("/update_weights_from_disk", body, timeout=None)
        except Refused as error:
            # The engine may have the folder or the memory at another time.
            raise EngineError(str(error)) from error

    def load_adapter(self, name: str, path: str, older: str | None) -> None:
        # The engine refuses a name that it knows: of an earlier run, or of a sync that broke off.
        adapter = f"{name}-{uuid.uuid4().hex}"
        self._post("/load_lora_adapter", {"lora_name": adapter, "lora_path": path}, timeout=None)
        self._adapters[adapter] = name
        # Before it unloads an adapter, the engine waits for its requests, which are paused. Another
        # request may be on its way with the older one.
        used = {adapter, *(call.adapter for call in self._calls.copy().values())}
        for old, of in [*self._adapters.items()]:
            if old not in used and of != older:
                self._unload(old)
        body = {"new_version": str(_version(name)), "abort_all_requests": False}
        self._post("/update_weight_version", body)

    def version(self) -> int | None:
        text = str(part(self._client.get("/model_info")).get("weight_version"))
        return int(text) if text.isdecimal() else None

    def tokenize(self, text: str) -> list[int] | None:
        return None  # the canary finds another tokenizer

    def _post(self, path: str, body: Mapping[str, Any], **settings: Any) -> None:
        """Posts a body. EngineError where the answer is no success."""
        done = self._client.post(path, body, **settings)
        if part(done).get("success") is not True:
            raise EngineError(f"{self._client.url}{path} was no success: {str(done)[:SHOWN]}")

    def _newest(self, name: str) -> str:
        """Returns the engine's name of an adapter."""
        for adapter, of in reversed(self._adapters.copy().items()):
            if of == name:
                return adapter
        raise EngineError(f"{self._client.url} was given no adapter {name!r}")

    def _unload(self, adapter: str) -> None:
        try:
            self._post("/unload_lora_adapter", {"lora_name": adapter})
        except Refused as error:  # it has restarted
            logging.warning("the adapter %s stays: %s", adapter, error)
        del self._adapters[adapter]


def _version(adapter: str) -> int:
    return int(adapter.rpartition("-")[2])


def _params(s: SamplingParams, seed: int | None) -> dict[str, Any]:
    """Returns the sampling parameters in SGLang's names."""
    return {
        "temperature": s.temperature, "top_k": s.top_k or -1, "top_p": s.top_p, "min_p": s.min_p,
        # ignore_eos ignores stop_token_ids, too.
        "stop_token_ids": [*s.stop_ids], "stop": [*s.stop_strings], "ignore_eos": not s.stop_ids,
        "no_stop_trim": True, "skip_special_tokens": False,
        "max_new_tokens": s.max_tokens, "min_new_tokens": s.min_tokens,
        "repetition_penalty": s.repetition_penalty, "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty, "sampling_seed": seed,
        "logit_bias": {str(token): bias for token, bias in s.logit_bias},
    }


def _read(answer: Any, rid: str, sampling: SamplingParams, top_n: int, where: str) -> Answer:
    """Reads an answer. EngineError where it is not of the request, or a token has no log-prob."""
    tokens, meta = part(answer).get("output_ids"), part(answer, "meta_info")
    end = part(meta, "finish_reason")
    reason, matched = end.get("type"), end.get("matched")
    if not isinstance(tokens, list) or reason not in ("stop", "length", "abort"):
        said = str(answer)[:SHOWN]
        raise EngineError(f"{where}: no output_ids, or it ended by {reason!r}: {said}")
    if meta.get("id") != rid:
        raise EngineError(f"{where}: the answer is of request {meta.get('id')!r}")
    if reason == "stop" and matched not in (*sampling.stop_ids, *sampling.stop_strings):
        raise Refused(
            f"{where}: it stopped at {matched!r}, which is none of this run's ends "
            f"({sampling.stop_ids}); serve the model with the run's tokenizer and "
            "generation_config.json"
        )
    if reason == "length" and len(tokens) != sampling.max_tokens:
        raise Refused(
            f"{where}: it was cut at {len(tokens)} of {sampling.max_tokens} tokens; raise "
            "--context-length, or the memory of its cache"
        )
    if reason == "abort" and tokens:
        # The step of an abort takes its tokens as they are, ends among them.
        if tokens[-1] in sampling.stop_ids:
            reason = "stop"
        elif len(tokens) == sampling.max_tokens:
            reason = "length"
    own = _pairs(meta.get("output_token_logprobs") or [])
    rows = meta.get("output_top_logprobs") or [] if top_n else [[]] * len(tokens)
    likely = [_pairs(row or []) for row in rows]
    likely = [[pair for pair in pairs if pair[1] is not None] for pairs in likely]
    versions = meta.get("weight_versions") or []
    spans = [(str(span["version"]), span["start"], span["end"]) for span in versions]
    starts, ends = [start for _, start, _ in spans], [end for _, _, end in spans]
    if [*starts, len(tokens)] != [0, *ends]:
        raise EngineError(
            f"{where}: weight_versions of {len(tokens)} tokens are {versions}; serve SGLang 0.5.23 "
            "or newer"
        )
    return read(where, tokens, own, likely, top_n, reason, spans)


def _pairs(entries: Sequence[Sequence[Any]]) -> list[Pair]:
    """Returns (token, log-prob) of entries [log-prob, token, text]."""
    return [(token, logp) for logp, token, *_ in entries]
