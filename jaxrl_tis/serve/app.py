"""The routes of the completions server.

A request is parsed outside the event loop, its choices are queued in the scheduler's thread
(`worker.py`), and what they draw comes back through an Inbox. Whatever ends the answer first
(its time, the client) takes the choices that still run out of the scheduler.
"""

import asyncio
import contextlib
import dataclasses
import json
import secrets
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxrl_tis.data.tokenizer import Tokenizer
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.scheduler import Full
from jaxrl_tis.engine.worker import EngineThread
from jaxrl_tis.serve.answer import Answer, described
from jaxrl_tis.serve.guard import Guard
from jaxrl_tis.serve.request import Completion, Limits, UnknownModel, object_of, parse
from jaxrl_tis.serve.text import Shown

CLIENT_CLOSED = 499  # nobody reads it
News = np.ndarray | Trajectory | Exception


@dataclasses.dataclass(frozen=True)
class Served:
    """The objects that the routes share.

    Attributes:
      model: its name in answers; vocab_size: tokens that a prompt may have.
      load: reads the weights at a path, into serving parameters.
      token: the bearer token that changes weights; None turns that route off.
      is_closed: the token is needed for every route but /health.
      hosts: names by which the server is asked, beside those of the loopback; a closed server
        without any is asked by every name.
    """

    worker: EngineThread
    tokenizer: Tokenizer
    model: str
    vocab_size: int
    limits: Limits
    load: Callable[[str], Any]
    token: str | None = None
    is_closed: bool = False
    hosts: Collection[str] = ()


class Inbox:
    """Holds the newest of each choice since it was last looked at; `put` belongs to the event
    loop."""

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
    """A completion in the scheduler. The caller must `close` it."""

    def __init__(self, worker: EngineThread, completion: Completion, deadline: float):
        self._worker, self._deadline = worker, deadline
        self._index = {choice.id: i for i, choice in enumerate(completion.choices)}
        self._live = set(self._index)
        self._inbox, self._loop = Inbox(), asyncio.get_running_loop()
        self.completion = completion

    async def start(self) -> None:
        put = lambda *news: self._loop.call_soon_threadsafe(self._inbox.put, *news)
        choices, is_streamed = self.completion.choices, self.completion.is_streamed
        await asyncio.wrap_future(self._worker.submit(choices, put, is_streamed))

    async def follow(self) -> AsyncIterator[tuple[int, np.ndarray | Trajectory]]:
        """Yields (index of a choice, its tokens so far or its record) until all have ended; past
        the deadline they are aborted, and end with what they have."""
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
        """Aborts the requests that are still running."""
        if self._live:
            self._worker.abort(list(self._live))


class EventStream(StreamingResponse):
    """Sends the events of a job, which is closed when they end or the client leaves."""

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
        self._served, self._loading = served, asyncio.Lock()

    async def health(self, request: Request) -> Response:
        worker = self._served.worker
        state = {"version": worker.version, "pending": worker.pending}
        if worker.error:
            return JSONResponse(
                {"status": "failed", "error": str(worker.error)} | state, status_code=503
            )
        return JSONResponse({"status": "ok"} | state)

    async def models(self, request: Request) -> Response:
        self._check_open(request)
        model = {
            "id": self._served.model, "object": "model", "owned_by": "jaxrl_tis",
            "version": self._served.worker.version,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        return await self._complete(request, is_chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._complete(request, is_chat=True)

    async def weights(self, request: Request) -> Response:
        """{"path": ...} -> the weights of all tokens drawn from now on."""
        if self._served.token is None:
            raise HTTPException(403, "weights change only on a server that has a token")
        self._check_token(request)
        body = object_of(await self._body(request, self._deadline()))
        if body.keys() != {"path"} or not isinstance(body["path"], str):
            raise ValueError('the body must be {"path": text}')
        async with self._loading:
            try:
                params = await asyncio.to_thread(self._served.load, body["path"])
            except OSError as error:
                raise ValueError(str(error)) from error
            version = await asyncio.wrap_future(self._served.worker.set_params(params))
        return JSONResponse({"path": body["path"], "version": version})

    async def _complete(self, request: Request, is_chat: bool) -> Response:
        self._check_open(request)
        served = self._served
        deadline = self._deadline()
        completion = await asyncio.to_thread(
            parse, await self._body(request, deadline), is_chat, served.model,
            served.vocab_size, served.tokenizer, served.limits,
        )
        job = Job(served.worker, completion, deadline)
        answer = Answer(completion, served.model, served.tokenizer)
        with contextlib.ExitStack() as stack:
            stack.callback(job.close)
            await job.start()
            if completion.is_streamed:
                stack.pop_all()  # the stream closes it
                return EventStream(job, self._events(job, answer))
            return await _unless_gone(request, self._whole(job, answer))

    async def _whole(self, job: Job, answer: Answer) -> Response:
        ended = {i: news async for i, news in job.follow() if isinstance(news, Trajectory)}
        body = await asyncio.to_thread(answer.whole, [ended[i] for i in sorted(ended)])
        return JSONResponse(body)

    async def _events(self, job: Job, answer: Answer) -> AsyncIterator[str]:
        event = lambda data: f"data: {json.dumps(data)}\n\n"
        stops, decode = job.completion.stops, self._served.tokenizer.decode
        shown = [Shown(stops, decode, job.completion.min_tokens) for _ in job.completion.choices]
        sent = [0] * len(shown)
        num_tokens = 0
        if job.completion.is_chat:
            for i in range(len(sent)):
                yield event(answer.first(i))
        try:
            async for i, news in job.follow():
                has_ended = isinstance(news, Trajectory)
                text = answer.text(news) if has_ended else shown[i].of(news)
                if len(text) > sent[i]:
                    yield event(answer.more(i, text[sent[i] :]))
                    sent[i] = len(text)
                if has_ended:
                    num_tokens += len(news.tokens)
                    yield event(await asyncio.to_thread(answer.last, i, news))
            if job.completion.includes_usage:
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

    def _check_token(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if not secrets.compare_digest(given, f"Bearer {self._served.token}".encode()):
            raise HTTPException(401, "give the token: Authorization: Bearer TOKEN")


async def _unless_gone(request: Request, answer) -> Response:
    """The answer; cancelled when the client leaves before it is there."""

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
    """Turns an exception into an answer."""

    async def answer(request: Request, error: Exception) -> Response:
        return JSONResponse(described(status, str(error)), status_code=status)

    return answer


async def _refused(request: Request, error: HTTPException) -> Response:
    body = described(error.status_code, error.detail)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


REFUSALS = {UnknownModel: 404, ValueError: 400, Full: 429, RuntimeError: 500}


def make(served: Served) -> Starlette:
    """Makes the ASGI application; its lifespan is that of the worker."""
    if served.is_closed and not served.token:
        raise ValueError("a server beyond this machine needs a token")
    server = Server(served)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        served.worker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(served.worker.stop)

    routes = [
        Route("/health", server.health),
        Route("/v1/models", server.models),
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/weights", server.weights, methods=["POST"]),
    ]
    handlers = {error: _refusal(status) for error, status in REFUSALS.items()}
    handlers[HTTPException] = _refused
    guard = Middleware(Guard, hosts=served.hosts or (None if served.is_closed else ()))
    return Starlette(
        routes=routes, middleware=[guard], lifespan=lifespan, exception_handlers=handlers
    )
