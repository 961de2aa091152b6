"""A client in the process of an ASGI application, which can read slowly and leave early; and that
application behind a real socket."""

import asyncio
import contextlib
import dataclasses
import json
import threading
import time

import uvicorn

from jaxrl_tis.endpoint import connection

HEADERS = {"host": "127.0.0.1:8000", "content-type": "application/json"}


@dataclasses.dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return self.json["error"]["message"]

    @property
    def events(self) -> list:
        """What server-sent events hold, without the closing one, which must be there."""
        *events, done, rest = self.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


async def call(
    app, path, body=None, token=None, leave=None, on_part=None, http_version="1.1", **headers
) -> Reply:
    """GET without a body, else POST of it: bytes, a list of bytes (None never comes), or JSON.

    The client stays until the asyncio.Event `leave` is set; `on_part` hears every part of the body.
    `headers` replace HEADERS, with "_" for "-"; one that is None is not sent.
    """
    parts = body if isinstance(body, list) else [body if isinstance(body, bytes) else
                                                 json.dumps(body).encode()]
    parts, stays = list(parts), leave or asyncio.Event()
    given = HEADERS | {name.replace("_", "-"): value for name, value in headers.items()}
    given["authorization"] = token and f"Bearer {token}"
    headers = [(k.encode(), v.encode()) for k, v in given.items() if v is not None]
    method = "GET" if body is None else "POST"
    path, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": http_version, "method": method, "scheme": "http", "path": path,
        "raw_path": path.encode(), "query_string": query.encode(), "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }
    reply = Reply(0, {}, b"")

    async def receive():
        if parts and (part := parts.pop(0)) is not None:
            return {"type": "http.request", "body": part, "more_body": bool(parts)}
        await stays.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        elif part := message["body"]:
            reply.body += part
            if on_part:
                on_part(part)

    await app(scope, receive, send)
    return reply


def run(app, script):
    """What the coroutine function `script(app)` returns while the application is up."""

    async def inside():
        async with app.router.lifespan_context(app):
            return await script(app)

    async def bounded():
        return await asyncio.wait_for(inside(), 10)

    return asyncio.run(bounded())


@contextlib.contextmanager
def listening(app, **options):
    """The port of a server in a thread, with the options of the command and these."""
    options = connection.OPTIONS | dict(port=0, log_level="critical") | options
    server = uvicorn.Server(uvicorn.Config(app, **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(5)
    assert not thread.is_alive()
