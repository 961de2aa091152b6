"""The routes of a run whose rollouts come through this endpoint: each session has a URL of its own.

A session is one run of an agent. Its base URL is `/session/KEY/v1`, so that a client needs nothing
but a base URL and an API key. A call goes through these functions:

1. `SessionServer` checks token and session, and parses the body as the server of a checkpoint does.
   The session replaces its sampling parameters, except stops and a smaller limit of tokens.
2. `Session` gives the call to its owner, another thread, unless the call is a retry of an SDK: that
   gets the answer of the call that it repeats, at once or when it has ended.
3. The owner ends the call with `Call.answer` or `Call.fail`.
"""

import asyncio
import collections
import contextlib
import errno
import hashlib
import math
import secrets
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount

from jaxrl_tis.data.tokenizer import Tokenizer
from jaxrl_tis.endpoint import app, connection
from jaxrl_tis.endpoint.calls import Call, Ended, Session
from jaxrl_tis.endpoint.answer import described
from jaxrl_tis.endpoint.request import Choice, Completion, Limits, NoRoom
from jaxrl_tis.engine.records import MAX_INT, SamplingParams
from jaxrl_tis.engine.worker import Listener

BODY_BYTES = 2**24
START_SECONDS = 30.0
KEPT = 10_000  # ended sessions whose calls are refused with the reason
RETRIES = "x-stainless-retry-count"  # of the SDKs: how often they have sent this call before


class Caller:
    """Samples the choice of one HTTP request by its session, see `app.Worker`."""

    error = None
    pending = 0

    def __init__(self, session: Session, digest: bytes, is_retry: bool, version: int):
        self._session, self._digest, self._is_retry = session, digest, is_retry
        self.version = version
        self._call: Call | None = None

    def submit(self, requests: list[Choice], listener: Listener, is_streamed: bool) -> Future:
        """Enters the call. A stream gets the whole answer at its end."""
        [choice], future = requests, Future()
        self._call = self._session.enter(choice, self._digest, self._is_retry)
        self._call.listen(choice.id, listener)
        future.set_result(None)
        return future

    def abort(self, request_ids: Collection[str]) -> None:
        for id in request_ids:
            if self._call is not None:
                self._call.leave(id)


async def _ended(request: Request, error: Ended) -> Response:
    """Refuses a call of an ended session. SDKs do not repeat the call."""
    headers = {"x-should-retry": "false"}
    return JSONResponse(described(409, str(error)), status_code=409, headers=headers)


class SessionServer(app.Server):
    """The handlers of the routes, for sessions. They run in the endpoint's thread."""

    def __init__(self, served: app.Served):
        super().__init__(served)
        self.sessions: dict[str, Session] = {}

    def _check_open(self, request: Request) -> None:
        self._check_token(request)
        self._session(request)

    def _session(self, request: Request) -> Session:
        session = self.sessions.get(request.path_params["key"])
        if session is None:
            raise HTTPException(404, "there is no session of this address")
        if session.end:
            raise Ended(session.end)
        return session

    def _parsed(self, request: Request, body: bytes, read: Callable) -> Completion:
        session = self._session(request)
        try:
            return session.imposed(super()._parsed(request, body, read))
        except NoRoom:
            session.is_overlong = True
            raise

    def _worker(self, request: Request, body: bytes) -> Caller:
        route = request.url.path.encode()
        digest = hashlib.blake2b(route + b"\0" + body, digest_size=16).digest()
        is_retry = request.headers.get(RETRIES, "0") != "0"
        return Caller(self._session(request), digest, is_retry, self._served.worker.version)


class _Weights:
    """What `/v1/models` says of the weights."""

    version, error, pending = 0, None, 0


class Endpoint:
    """Listens on a random port of the loopback, in a thread of its own, until `close`.

    Args:
      model: its name for clients.
      vocab_size: number of token ids.
      max_length: most tokens of prompt and answer.
      logprobs: most of the likeliest tokens that the engine records.

    Attributes:
      token: the API key of all sessions.
    """

    def __init__(
        self, model: str, vocab_size: int, tokenizer: Tokenizer, *, max_length: int, logprobs: int
    ):
        self.token = secrets.token_urlsafe(24)
        limits = Limits(BODY_BYTES, max_length, MAX_INT, 1, logprobs, math.inf)  # a call ends with its session
        self._weights = _Weights()
        self._sessions = SessionServer(app.Served(
            self._weights, tokenizer, model, vocab_size, limits, load=None, token=self.token,
            is_closed=True,
        ))
        routes = [Mount("/session/{key}", routes=app.model_routes(self._sessions))]
        application = Starlette(
            routes=routes, middleware=[app.Middleware(app.Guard, hosts=())],
            exception_handlers=app.HANDLERS | {Ended: _ended},
        )
        options = connection.OPTIONS | dict(timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(
            uvicorn.Config(application, port=0, log_level="critical", lifespan="off", **options)
        )
        self._ended: collections.deque[str] = collections.deque()
        self._is_full = False  # it was said that too many files are open
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
        self._thread.start()
        if not self._is_up.wait(START_SECONDS):
            raise RuntimeError("the endpoint of rollout.harness does not start")

    def open(self, sampling: SamplingParams, take: Callable[[Call], None]) -> tuple[str, str]:
        """Opens a session. Returns its key and its base URL."""
        key = secrets.token_urlsafe(12)
        self._sessions.sessions[key] = Session(sampling, take)
        return key, f"http://127.0.0.1:{self._port}/session/{key}/v1"

    def session(self, key: str) -> Session:
        return self._sessions.sessions[key]

    def end(self, key: str, why: str) -> None:
        """Ends a session and its open calls. Later calls are refused with the reason."""
        self.session(key).close(why)
        self._ended.append(key)
        while len(self._ended) > KEPT:
            del self._sessions.sessions[self._ended.popleft()]

    def set_version(self, version: int) -> None:
        self._weights.version = version

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def _fault(self, loop: asyncio.AbstractEventLoop, context: dict) -> None:
        """Says once that no more connections can be open: the loop tries it thousands of times."""
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif not self._is_full:
            self._is_full = True
            print(
                "the agents of rollout.harness have more connections than this process may open "
                "files (ulimit -Hn), and calls wait for others to end: raise the limit, or lower "
                "rollout.prompts, rollout.group_size and eval.prompts", file=sys.stderr, flush=True,
            )

    def _run(self) -> None:
        async def serve():
            asyncio.get_running_loop().set_exception_handler(self._fault)
            task = asyncio.ensure_future(self._server.serve())
            while not self._server.started and not task.done():
                await asyncio.sleep(0.001)
            if self._server.started:
                self._port = self._server.servers[0].sockets[0].getsockname()[1]
                self._is_up.set()
            await task

        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(serve())
