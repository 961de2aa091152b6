"""The protocol of vLLM, as `vllm serve --enable-scale-out` speaks it in development mode, and our own
server. Read in vLLM 0.32."""

import base64
import binascii
import contextlib
import io
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_tis.engine.records import SamplingParams
from jaxrl_tis.external.client import Client, EngineError, Refused
from jaxrl_tis.external.protocol import Answer, Facts, Numerics, part, read

GENERATE = "/inference/v1/generate"
STOPS = ("stop", "length", "abort")
SEEDS = 2**31  # of requests are smaller


class Vllm:
    """One engine of this kind."""

    filters_logps = True

    def __init__(self, client: Client):
        self._client = client
        self._model: str | None = None
        self._adapters: dict[str, str] = {}  # name of a version -> name in the engine

    def facts(self) -> Facts:
        client = self._client
        [model, *_] = _list(client.get("/v1/models"), "data", client.url)
        own = part(client.get("/server_info", config_format="json"), "vllm_config", "model_config")
        hf = part(own, "hf_config")
        self._model = str(model["id"])
        dtype = own.get("dtype")
        return Facts(
            self._model, model.get("max_model_len") or own.get("max_model_len"),
            None if dtype is None else str(dtype).removeprefix("torch."), own.get("logprobs_mode"),
            own.get("max_logprobs"), hf.get("vocab_size"),
        )

    def numerics(self) -> Numerics:
        client = self._client
        config = part(client.get("/server_info", config_format="json"), "vllm_config")
        cache, scheduler = part(config, "cache_config"), part(config, "scheduler_config")
        try:
            program = part(client.get("/version")).get("version")
        except Refused:
            program = None
        block, chunk = cache.get("block_size"), scheduler.get("max_num_batched_tokens")
        return Numerics(
            program, cache.get("cache_dtype"),
            0 if cache.get("enable_prefix_caching") is False else block,
            0 if scheduler.get("enable_chunked_prefill") is False
            else scheduler.get("long_prefill_token_threshold") or chunk,
        )

    def reset_cache(self) -> None:
        # Paused requests hold blocks; without this argument the call would then clear nothing.
        done = self._client.post("/reset_prefix_cache", reset_running_requests="true")
        if not part(done).get("success"):
            raise EngineError(
                f"{self._client.url}/reset_prefix_cache answered {done!r}: keys of older weights would "
                "stay, and later answers would be silently wrong"
            )

    def generate(
        self, id: str, tokens: Sequence[int] | np.ndarray, sampling: SamplingParams, seed: int | None,
        top_n: int, adapter: str | None,
    ) -> Answer:
        body = {
            "request_id": id, "model": self._adapters.get(adapter or "", self._model),
            "token_ids": [*map(int, tokens)],
            "sampling_params": _params(sampling, seed, top_n), "stream": False,
        }
        answer = self._client.post(GENERATE, body, timeout=None)
        choices = _list(answer, "choices", self._client.url + GENERATE)
        if len(choices) != 1:
            raise EngineError(f"{self._client.url}{GENERATE} answered {len(choices)} choices, not 1")
        return _read(choices[0], top_n, f"{self._client.url}{GENERATE}, request {id}")

    def abort(self, ids: Sequence[str]) -> None:
        if ids:
            # vLLM puts the route's name before the id; our server does not.
            names = [*ids, *(f"generate-tokens-{id}" for id in ids)]
            self._client.post("/abort_requests", {"request_ids": names})

    def pause(self) -> None:
        self._client.post("/pause", mode="keep", clear_cache="false")

    def resume(self) -> None:
        self._client.post("/resume")

    def load(self, path: str, version: int) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        try:
            self._client.post("/collective_rpc", body, timeout=None)
        except Refused as error:
            # The engine may see the folder at another time.
            raise EngineError(f"{error}; does the engine see {path}?") from error
        self._name(version)

    def load_adapter(self, name: str, path: str, older: str | None) -> None:
        # The engine refuses a name that it knows, and a name that it knew could serve the old factors.
        new = f"{name}-{uuid.uuid4().hex[:8]}"
        self._client.tell("/v1/load_lora_adapter", {"lora_name": new, "lora_path": path})
        if older is not None and (old := self._adapters.pop(older, None)) is not None:
            with contextlib.suppress(Refused):  # it started again since
                self._client.tell("/v1/unload_lora_adapter", {"lora_name": old})
        self._adapters[name] = new
        self._name(int(name.rpartition("-")[2]))

    def version(self) -> int | None:
        answer = self._client.get("/weight_info")
        text = str(answer.get("weight_version")) if isinstance(answer, Mapping) else ""
        return int(text) if text.isdecimal() else None

    def tokenize(self, text: str) -> list[int] | None:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            answer = self._client.post("/tokenize", body)
        except Refused:
            return None
        return _list(answer, "tokens", f"{self._client.url}/tokenize")

    def _name(self, version: int) -> None:
        self._client.post("/update_weight_version", {"new_version": str(version)})
        self.reset_cache()


def _params(s: SamplingParams, seed: int | None, top_n: int) -> dict[str, Any]:
    """Returns the sampling parameters in vLLM's names."""
    return {
        "temperature": s.temperature, "top_k": s.top_k or -1, "top_p": s.top_p, "min_p": s.min_p,
        "stop_token_ids": [*s.stop_ids], "stop": [*s.stop_strings], "ignore_eos": True,
        "include_stop_str_in_output": True, "detokenize": bool(s.stop_strings),
        "max_tokens": s.max_tokens, "min_tokens": s.min_tokens,
        "repetition_penalty": s.repetition_penalty, "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty, "logprobs": top_n,
        "seed": None if seed is None else seed % SEEDS,
        "logit_bias": {str(token): bias for token, bias in s.logit_bias} or None,
        "skip_special_tokens": False,
    }


def _list(answer: Any, name: str, where: str) -> list:
    value = answer.get(name) if isinstance(answer, Mapping) else None
    if not isinstance(value, list) or not value:
        raise EngineError(f"{where} answered without {name!r}: {str(answer)[:300]}")
    return value


def _read(choice: Mapping[str, Any], top_n: int, where: str) -> Answer:
    """Reads one choice. EngineError where a token has no log-prob."""
    tokens, reason = choice.get("token_ids"), choice.get("finish_reason")
    content = (choice.get("logprobs") or {}).get("content")
    if not isinstance(tokens, list) or reason not in STOPS:
        raise EngineError(f"{where}: no token ids, or it ended by {reason!r}")
    content = content if isinstance(content, list) else []
    try:
        own = [(int(entry["token_id"]), entry["logprob"]) for entry in content]
        # The sampled token comes first where it is none of the likeliest.
        likely = [
            [(int(e["token_id"]), e["logprob"]) for e in x.get("top_logprobs") or []] for x in content
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{where}: a log-prob is without token_id or logprob; serve vLLM 0.32 or newer ({error})"
        ) from error
    spans = choice.get("weight_versions")
    if spans is not None:
        spans = [(s["version"], s["start"], s["end"]) for s in spans]
    routes = _routes(choice.get("routed_experts"), where)
    kept = choice.get("sampling_mask")
    return read(where, tokens, own, likely, top_n, reason, spans, routes, kept)


def _routes(value: Any, where: str) -> np.ndarray | None:
    """Reads experts: base64 of an .npy file, or an object with the bytes of an array in base64, its
    shape and its dtype."""
    if value is None:
        return None
    try:
        if isinstance(value, Mapping):
            rows = np.frombuffer(base64.b64decode(value["data"], validate=True), value["dtype"])
            return rows.reshape(value["shape"])
        return np.load(io.BytesIO(base64.b64decode(value, validate=True)), allow_pickle=False)
    except (ValueError, KeyError, TypeError, binascii.Error, EOFError) as error:
        raise EngineError(f"{where}: routed_experts cannot be read ({error})") from error
