"""Calls of an engine over HTTP: JSON in, JSON out, and one sentence for whatever goes wrong."""

import json
import ssl
from collections.abc import Mapping
from typing import Any

import httpx

from jaxrl_tis.runtime.cli import SamplerLost

SHOWN = 300  # characters of an unexpected answer in a message
BUSY = (408, 429)  # what an engine answers that may take the request later
# vLLM and SGLang close a connection that is idle for 5 s, and lose what is sent at that moment.
IDLE_SECONDS = 2.0


class EngineError(SamplerLost):
    """An engine cannot be reached, or answers in another way than its protocol says."""


class Gone(EngineError):
    """No engine answers at the address, or its answer broke off."""


class Busy(EngineError):
    """An engine may take a request later."""


class Refused(EngineError):
    """An engine does not take a request, as it would not at another time."""


class Client:
    """An engine's address. Threads may share it.

    Args:
      url: http://host:port or https://host:port.
      timeout: seconds until a call without an answer fails; None waits.
      token: of the header "Authorization: Bearer".
    """

    def __init__(self, url: str, timeout: float | None = 60.0, token: str | None = None):
        self.url = url.rstrip("/")
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_SECONDS
        )
        # Without proxies of the environment: an engine is beside the learner.
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(
            base_url=self.url, timeout=timeout, limits=limits, trust_env=False, headers=headers
        )

    def get(self, path: str, **query: str) -> Any:
        return self._call("GET", path, params=query)

    def post(self, path: str, body: Any = None, timeout: float | None = 0, **query: str) -> Any:
        """Posts a body as JSON. `timeout`: seconds in place of the client's, None waits."""
        settings: dict[str, Any] = {} if timeout == 0 else {"timeout": timeout}
        return self._call("POST", path, json={} if body is None else body, params=query, **settings)

    def tell(self, path: str, body: Any) -> None:
        """Posts a body as JSON to a route whose answer is a sentence."""
        self._answer("POST", path, json=body, timeout=None)

    def _call(self, method: str, path: str, **settings: Any) -> Any:
        where, answer = f"{method} {self.url}{path}", self._answer(method, path, **settings)
        if not answer.content:
            return None
        try:
            return answer.json()
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise EngineError(f"{where} answered no JSON: {answer.text[:SHOWN]!r}") from error

    def _answer(self, method: str, path: str, **settings: Any) -> httpx.Response:
        where = f"{method} {self.url}{path}"
        try:
            answer = self._http.request(method, path, **settings)
        except httpx.TimeoutException as error:
            raise Gone(f"{where} had no answer in time ({type(error).__name__})") from error
        except httpx.TransportError as error:
            raise Gone(f"{where} failed: {_reason(error)}") from error
        if answer.status_code == 404:
            raise Refused(
                f"{where} is unknown there (404); is it an engine of rollout.engine_kind, started as "
                "docs/engines.md says?"
            )
        if not answer.is_success:
            kind: type[EngineError] = Refused if answer.is_client_error else EngineError
            if answer.status_code in BUSY:
                kind = Busy
            raise kind(f"{where} answered {answer.status_code}: {_said(answer)}")
        return answer


def _reason(error: httpx.TransportError) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted ({cause.verify_message})"
        cause = cause.__cause__ or cause.__context__
    return f"{error or type(error).__name__}; is the engine running there?"


def _said(answer: httpx.Response) -> str:
    """Returns the message in an error's answer."""
    try:
        body = answer.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return repr(answer.text[:SHOWN])
    for name in ("error", "message", "detail"):
        if isinstance(body, Mapping) and name in body:
            body = body[name]
    return str(body)[:SHOWN]
