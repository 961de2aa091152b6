"""Refuses requests that a foreign web page could have sent, and requests of ambiguous length.

A page can make a visitor's browser send requests to this machine. It cannot send JSON or hide its
Origin, unless its own name resolves to this machine (DNS rebinding). In this case its name is in
the Host header.
"""

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxrl_tis.endpoint.answer import described
from jaxrl_tis.runtime.addresses import is_loopback

JSON = "application/json"
SAFE = ("GET", "HEAD", "OPTIONS")  # methods without a body


class Guard:
    """ASGI middleware. `hosts` are accepted Host names beside the loopback's; None accepts any."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None):
        self._app = app
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = scope["type"] == "http" and refusal(scope, self._hosts)
        if not refused:
            return await self._app(scope, receive, send)
        status, words = refused
        # The next request would begin where the body of this one may not have ended.
        headers = {"connection": "close"} if status == 400 else None
        await JSONResponse(described(status, words), status, headers)(scope, receive, send)


def refusal(scope: Scope, hosts: Collection[str] | None) -> tuple[int, str] | None:
    """Returns (status, message) for a refused request, None for others."""
    headers = Headers(scope=scope)
    if "transfer-encoding" in headers and (
        "content-length" in headers or scope["http_version"] == "1.0"
    ):  # RFC 9112, 6.1
        return 400, "the length of the body is in doubt: Transfer-Encoding beside Content-Length"
    host, origin = headers.get("host", "").lower(), headers.get("origin")
    if hosts is not None and not (is_loopback(name := _name(host)) or name in hosts):
        return 421, f"this server is not {name!r}; start it with --hosts if that is its name"
    if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
        return 403, f"pages of {origin} may not ask this server"
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if scope["method"] not in SAFE and kind != JSON:
        return 415, f"the body is {kind or 'of no type'}; send Content-Type: {JSON}"
    return None


def _name(host: str) -> str:
    """Returns the name in a Host header, without port and brackets; "" if it has none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
