"""The routes of the completions server.

A request is parsed outside the event loop. Its choices are queued in the scheduler's thread
(`engine/worker.py`), and their tokens return through an Inbox. A deadline or a client that
disconnects aborts the choices that still run.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxrl_tis.data.tokenizer import Tokenizer
from jaxrl_tis.endpoint import control, token_ids, tokenization, tool_calls
from jaxrl_tis.endpoint.answer import Answer, described
from jaxrl_tis.endpoint.guard import Guard
from jaxrl_tis.endpoint.request import Completion, Limits, UnknownModel, object_of, parse
from jaxrl_tis.endpoint.text import Sent, Shown
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.scheduler import Full
from jaxrl_tis.engine.worker import Listener

CLIENT_CLOSED = 499  # the client has disconnected and does not read it
News = np.ndarray | Trajectory | Exception


class Worker(Protocol):
    """Samples choices, see `engine.worker.EngineThread`."""

    @property
    def version(self) -> int: ...

    @property
    def error(self) -> Exception | None: ...

    @property
    def pending(self) -> int: ...

    def submit(self, requests: list, listener: Listener, is_streamed: bool) -> Future: ...
    def abort(self, request_ids: Collection[str]) -> None: ...


@dataclasses.dataclass(frozen=True)
class Served:
    """The engine, tokenizer, limits and access rules behind the routes.

    Attributes:
      model: its name in answers; vocab_size: number of token ids.
      load: reads the weights at a path, and an adapter in a folder beside them if one is given, and
        returns serving parameters. Path None: the weights that the server started with.
      token: the bearer token; None turns the route of new weights off.
      is_closed: every route but /health needs the token.
      hosts: accepted Host names beside the loopback's; a closed server without any accepts every
        name.
      facts: what a trainer asks of the model, by vLLM's names.
    """

    worker: Any  # an EngineThread, or for sessions what stands for one
    tokenizer: Tokenizer
    model: str
    vocab_size: int
    limits: Limits
    load: Callable[..., Any] | None
    token: str | None = None
    is_closed: bool = False
    hosts: Collection[str] = ()
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Inbox:
    """Keeps the newest tokens or record of each choice since the last `take`. Call `put` in the
    event loop."""

    def __init__(self):
        self._news: dict[str, News] = {}
        self._has_news = asyncio.Event()

    def put(self, id: str, news: News) -> None:
        self._news[id] = news
        self._has_news.set()

    async def take(self) -> dict[str, News]:
        await self._has_news.wait()
        self._has_news.clear()
        news, self._news = self._news, {}
        return news


class Job:
    """A completion in the scheduler. Call `close` in every case."""

    def __init__(self, worker: Worker, completion: Completion, deadline: float):
        self._worker, self._deadline = worker, deadline
        self._index = {choice.id: i for i, choice in enumerate(completion.choices)}
        self._live = set(self._index)
        self._inbox, self._loop = Inbox(), asyncio.get_running_loop()
        self.completion = completion

    async def start(self) -> None:
        put: Any = lambda *news: self._loop.call_soon_threadsafe(self._inbox.put, *news)
        choices, is_streamed = self.completion.choices, self.completion.is_streamed
        await asyncio.wrap_future(self._worker.submit(choices, put, is_streamed))

    async def follow(self) -> AsyncIterator[tuple[int, np.ndarray | Trajectory]]:
        """Yields (index of a choice, its tokens so far or its record) until all choices have ended.
        At the deadline they are aborted and end with the tokens that they have."""
        is_late = False
        while self._live:
            left = None if is_late else self._deadline - self._loop.time()
            try:
                all_news = await asyncio.wait_for(self._inbox.take(), left)
            except TimeoutError:
                self._worker.abort(list(self._live))
                is_late = True
                continue
            for id, news in all_news.items():
                if isinstance(news, Exception):
                    raise news
                if isinstance(news, Trajectory):
                    self._live.discard(id)
                yield self._index[id], news

    def close(self) -> None:
        """Aborts the choices that still run."""
        if self._live:
            self._worker.abort(list(self._live))


class EventStream(StreamingResponse):
    """Sends the events of a job, and closes the job when they end or the client disconnects."""

    def __init__(self, job: Job, events: AsyncIterator[str]):
        super().__init__(events, media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        self._job = job

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.close()


class Server:
    """The handlers of the routes."""

    def __init__(self, served: Served):
        self._served = served
        self._created = int(time.time())
        self._form = tool_calls.form_of(served.tokenizer)
        self.control = control.Control(
            served, lambda r: self._body(r, self._deadline()), self._check_control, self._check_open
        )

    async def health(self, request: Request) -> Response:
        worker = self._served.worker
        state = {
            "version": worker.version, "pending": worker.pending, "is_paused": worker.is_paused,
        }
        if worker.error:
            return JSONResponse(
                {"status": "failed", "error": str(worker.error)} | state, status_code=503
            )
        return JSONResponse({"status": "ok"} | state)

    async def models(self, request: Request) -> Response:
        self._check_open(request)
        model = {
            "id": self._served.model, "object": "model", "created": self._created,
            "owned_by": "jaxrl_tis",
            "max_model_len": self._served.limits.context_tokens,
            "version": self._served.worker.version,
        }
        names = [self._served.model, self.control.model]  # an adapter follows its base
        others = [model | {"id": name, "parent": names[0]} for name in names[1:] if name != names[0]]
        return JSONResponse({"object": "list", "data": [model, *others]})

    async def completions(self, request: Request) -> Response:
        return await self._complete(request, functools.partial(parse, is_chat=False), self._writer)

    async def chat(self, request: Request) -> Response:
        return await self._complete(request, functools.partial(parse, is_chat=True), self._writer)

    async def generate(self, request: Request) -> Response:
        write = functools.partial(token_ids.Answer, spans=self.control.spans)
        return await self._complete(request, token_ids.parse, write)

    async def tokenize(self, request: Request) -> Response:
        self._check_open(request)
        served, body = self._served, await self._body(request, self._deadline())
        return JSONResponse(await asyncio.to_thread(
            tokenization.tokenize, body, served.model, served.tokenizer, served.limits
        ))

    async def detokenize(self, request: Request) -> Response:
        self._check_open(request)
        served, body = self._served, await self._body(request, self._deadline())
        return JSONResponse(await asyncio.to_thread(
            tokenization.detokenize, body, served.model, served.vocab_size, served.tokenizer
        ))

    async def weights(self, request: Request) -> Response:
        """Loads the weights at {"path": ...} for all tokens sampled from then on."""
        self._check_control(request)
        body = object_of(await self._body(request, self._deadline()))
        if body.keys() != {"path"} or not isinstance(body["path"], str):
            raise ValueError('the body must be {"path": text}')
        version = await self.control.load(body["path"])
        return JSONResponse({"path": body["path"], "version": version})

    def _writer(self, completion: Completion) -> Answer:
        return Answer(completion, self.control.model, self._served.tokenizer, self._form)

    async def _complete(self, request: Request, read: Callable, writer: Callable) -> Response:
        """Samples the choices of a request.

        Args:
          read: parses the body; see `request.parse`.
          writer: the parsed request -> the writer of its answer.
        """
        self._check_open(request)
        deadline = self._deadline()
        body = await self._body(request, deadline)
        completion = await asyncio.to_thread(self._parsed, request, body, read)
        job = Job(self._worker(request, body), completion, deadline)
        answer = writer(completion)
        with contextlib.ExitStack() as stack:
            stack.callback(job.close)
            await job.start()
            if completion.is_streamed:
                stack.pop_all()  # the stream closes it
                return EventStream(job, self._events(job, answer))
            return await _unless_gone(request, self._whole(job, answer))

    def _parsed(self, request: Request, body: bytes, read: Callable) -> Completion:
        served = self._served
        return read(body, self.control.model, served.vocab_size, served.tokenizer, served.limits)

    def _worker(self, request: Request, body: bytes) -> Worker:
        return self._served.worker

    async def _whole(self, job: Job, answer: Answer | token_ids.Answer) -> Response:
        ended = {i: news async for i, news in job.follow() if isinstance(news, Trajectory)}
        body = await asyncio.to_thread(answer.whole, [ended[i] for i in sorted(ended)])
        return JSONResponse(body)

    async def _events(self, job: Job, answer: Answer) -> AsyncIterator[str]:
        event = lambda data: f"data: {json.dumps(data)}\n\n"
        completion, decode = job.completion, self._served.tokenizer.decode
        shown = [Shown(completion.stops, decode, completion.min_tokens) for _ in completion.choices]
        sent = [Sent() for _ in shown]
        num_tokens = 0
        if completion.is_chat or completion.returns_ids:
            for i in range(len(sent)):
                yield event(answer.first(i))
        try:
            async for i, news in job.follow():
                has_ended, calls = isinstance(news, Trajectory), []
                if isinstance(news, Trajectory):
                    (text, calls), tokens = answer.read(news), news.tokens
                else:
                    text, tokens = shown[i].of(news)
                    text = answer.settled(text)
                text, ids = sent[i].rest(text, tokens, has_ended)
                if text or calls or ids and completion.returns_ids:
                    yield event(answer.more(i, text, ids, calls))
                if isinstance(news, Trajectory):
                    num_tokens += len(news.tokens)
                    yield event(await asyncio.to_thread(answer.last, i, news))
            if completion.includes_usage:
                yield event(answer.end(num_tokens))
        except Exception as error:
            yield event(described(500, str(error)))
        yield "data: [DONE]\n\n"

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._served.limits.seconds

    async def _body(self, request: Request, deadline: float) -> bytes:
        limit, body = self._served.limits.body_bytes, bytearray()
        try:
            async with asyncio.timeout_at(deadline):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise HTTPException(413, f"the body has more than {limit} bytes")
        except TimeoutError:
            raise HTTPException(408, "the body did not come in time") from None
        except ClientDisconnect:
            raise HTTPException(CLIENT_CLOSED, "the client has left") from None
        return bytes(body)

    def _check_open(self, request: Request) -> None:
        if self._served.is_closed:
            self._check_token(request)

    def _check_control(self, request: Request) -> None:
        """Raises where a request may not change what is sampled."""
        if self._served.token is None:
            raise HTTPException(
                403, "this server has no token and keeps its weights; start it with --token_file"
            )
        self._check_token(request)

    def _check_token(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if not secrets.compare_digest(given, f"Bearer {self._served.token}".encode()):
            raise HTTPException(401, "give the token: Authorization: Bearer TOKEN")


async def _unless_gone(request: Request, answer) -> Response:
    """Returns the answer, or cancels it if the client disconnects first."""

    async def leaving():
        while (await request.receive())["type"] != "http.disconnect":
            pass
        return Response(status_code=CLIENT_CLOSED)

    tasks = [asyncio.ensure_future(task) for task in (answer, leaving())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    return done.pop().result()


def _refusal(status: int):
    """Returns the handler that answers an exception with this status."""

    async def answer(request: Request, error: Exception) -> Response:
        return JSONResponse(described(status, str(error)), status_code=status)

    return answer


async def _refused(request: Request, error: HTTPException) -> Response:
    body = described(error.status_code, error.detail)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


REFUSALS = {UnknownModel: 404, ValueError: 400, Full: 429, RuntimeError: 500}
HANDLERS: dict[Any, Any] = {
    HTTPException: _refused, **{error: _refusal(status) for error, status in REFUSALS.items()},
}


def make(served: Served) -> Starlette:
    """Makes the ASGI application; its lifespan starts and stops the worker."""
    if served.is_closed and not served.token:
        raise ValueError("a server that other machines reach needs a token; give --token_file")
    server = Server(served)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        served.worker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(served.worker.stop)

    routes = [
        Route("/health", server.health), *model_routes(server),
        Route("/weights", server.weights, methods=["POST"]), *server.control.routes(),
    ]
    guard = Middleware(Guard, hosts=served.hosts or (None if served.is_closed else ()))
    return Starlette(
        routes=routes, middleware=[guard], lifespan=lifespan, exception_handlers=HANDLERS
    )


def model_routes(server: Server) -> list[Route]:
    """Returns the routes that sample from the model or describe it."""
    return [
        Route("/v1/models", server.models),
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/inference/v1/generate", server.generate, methods=["POST"]),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/detokenize", server.detokenize, methods=["POST"]),
    ]
