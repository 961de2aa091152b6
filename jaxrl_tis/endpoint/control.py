"""Routes by which a trainer holds this server's weights, in vLLM's form: pause, resume, reload, version,
cache.

A trainer that speaks to `vllm serve` in development mode speaks to this server, too. What changes what
the server samples needs the token.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxrl_tis.endpoint.request import object_of

MODES = ("abort", "wait", "keep")
RELOAD = "reload_weights"


class Control:
    """The handlers.

    Args:
      worker: the EngineThread.
      facts: what /server_info says of the model.
      load: path -> serving parameters; None where no request gets as far.
      body: reads a request's body.
      check: raises where a request lacks the token.
    """

    def __init__(
        self, worker: Any, facts: Mapping[str, Any], load: Any, body: Callable, check: Callable
    ):
        self._worker, self._facts, self._load = worker, dict(facts), load
        self._body, self._check = body, check
        self._labels: dict[int, str] = {}  # version of the worker -> what a trainer calls it
        self._loading = asyncio.Lock()

    def label(self, version: int) -> str:
        """Returns a trainer's name of a version: its own number where none was given."""
        return self._labels.get(version, f"server-{version}")

    def spans(self, versions: list[int]) -> list[dict[str, Any]]:
        """Returns the runs of equal versions of a record's tokens."""
        starts = [i for i, v in enumerate(versions) if not i or v != versions[i - 1]]
        return [
            {"version": self.label(versions[a]), "start": a, "end": b}
            for a, b in zip(starts, [*starts[1:], len(versions)], strict=False)
        ]

    async def info(self, request: Request) -> Response:
        return JSONResponse({"vllm_config": {"model_config": self._facts}})

    async def pause(self, request: Request) -> Response:
        self._check(request)
        mode = request.query_params.get("mode", "abort")
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; choose one of {', '.join(MODES)}")
        await asyncio.wrap_future(self._worker.pause(mode))
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self._check(request)
        await asyncio.wrap_future(self._worker.resume())
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self._worker.is_paused})

    async def rpc(self, request: Request) -> Response:
        """Runs the one method that there is: new weights from a folder."""
        self._check(request)
        body = object_of(await self._body(request))
        path = body.get("kwargs", {}).get("weights_path")
        if body.get("method") != RELOAD or not isinstance(path, str):
            raise ValueError(
                f'only {{"method": "{RELOAD}", "kwargs": {{"weights_path": text}}}} is served'
            )
        await self.load(path)
        return JSONResponse({"results": [None]})

    async def load(self, path: str) -> int:
        """Samples from the weights at a path from now on; returns their version."""
        async with self._loading:
            try:
                params = await asyncio.to_thread(self._load, path)
            except OSError as error:
                raise ValueError(str(error)) from error
            return await asyncio.wrap_future(self._worker.set_params(params))

    async def reset(self, request: Request) -> Response:
        self._check(request)
        is_all = request.query_params.get("reset_running_requests", "false") == "true"
        done = await asyncio.wrap_future(self._worker.drop_keys(is_all))
        return JSONResponse({"success": done})

    async def name(self, request: Request) -> Response:
        self._check(request)
        name = object_of(await self._body(request)).get("new_version")
        if not isinstance(name, str) or not name:
            raise ValueError('the body must be {"new_version": text}')
        self._labels[self._worker.version] = name
        return JSONResponse({"success": True, "new_version": name})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.label(self._worker.version)})

    async def abort(self, request: Request) -> Response:
        self._check(request)
        ids = object_of(await self._body(request)).get("request_ids")
        if not (isinstance(ids, list) and all(isinstance(id, str) for id in ids)):
            raise ValueError('the body must be {"request_ids": [text, ...]}')
        self._worker.abort([f"{id}/0" for id in ids])  # its one choice
        return JSONResponse({"status": "aborted", "aborted": len(ids)})

    def routes(self) -> list[Route]:
        return [
            Route("/server_info", self.info), Route("/is_paused", self.is_paused),
            Route("/weight_info", self.version),
            *(
                Route(path, handler, methods=["POST"]) for path, handler in {
                    "/pause": self.pause, "/resume": self.resume, "/collective_rpc": self.rpc,
                    "/reset_prefix_cache": self.reset, "/update_weight_version": self.name,
                    "/abort_requests": self.abort,
                }.items()
            ),
        ]
