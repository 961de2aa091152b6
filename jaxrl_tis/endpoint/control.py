"""Routes by which a trainer holds this server's weights, in vLLM's form: pause, resume, reload,
adapter, version, cache.

A trainer that speaks to `vllm serve` in development mode speaks to this server, too. What changes
what the server samples needs the token.

The server has one policy. An adapter takes the place of the weights that are served: a base and it.
Requests name the adapter then, as they name the base before.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from jaxrl_tis.endpoint.request import UnknownModel, object_of

MODES = ("abort", "wait", "keep")
RELOAD = "reload_weights"
FLAGS = {"true": True, "1": True, "false": False, "0": False}


class Control:
    """The handlers.

    Args:
      served: what the server serves, see `app.Served`.
      body: reads a request's body.
      check: raises where a request may not change what is sampled.
      check_open: raises where a request may not ask.

    Attributes:
      model: the name of what is sampled: the base's, or that of the newest adapter.
    """

    def __init__(self, served: Any, body: Callable, check: Callable, check_open: Callable):
        self._served, self._worker = served, served.worker
        self._body, self._check, self._check_open = body, check, check_open
        self.model: str = served.model
        self._base: str | None = None  # path of the base; None: what the server started with
        self._adapters: set[str] = set()
        self._labels: dict[int, str] = {}  # version of the worker -> what a trainer calls it
        self._changing = asyncio.Lock()

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
        self._check_open(request)
        return JSONResponse({"vllm_config": {"model_config": dict(self._served.facts)}})

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
        self._check_open(request)
        return JSONResponse({"is_paused": self._worker.is_paused})

    async def rpc(self, request: Request) -> Response:
        """Runs the one method that there is: new weights from a folder."""
        body = await self._object(request)
        arguments = body.get("kwargs")
        path = arguments.get("weights_path") if isinstance(arguments, Mapping) else None
        if body.get("method") != RELOAD or not isinstance(path, str) or not path:
            raise ValueError(
                f'only {{"method": "{RELOAD}", "kwargs": {{"weights_path": text}}}} is served'
            )
        await self.load(path)
        return JSONResponse({"results": [None]})

    async def load(self, path: str) -> int:
        """Samples from the weights at a path from now on, without an adapter. Returns their version.
        """
        async with self._changing:
            version = await self._change(path)
            self._base, self.model = path, self._served.model
            return version

    async def _change(self, *source: str | None) -> int:
        """Samples from the weights of (path of the base, folder of an adapter, if any) from now on.
        """
        try:
            params = await asyncio.to_thread(self._served.load, *source)
        except OSError as error:
            raise ValueError(str(error)) from error
        return await asyncio.wrap_future(self._worker.set_params(params))

    async def load_adapter(self, request: Request) -> Response:
        """Samples from the base and an adapter from now on."""
        body = await self._object(request)
        name, path = body.get("lora_name"), body.get("lora_path")
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            raise ValueError('the body must be {"lora_name": text, "lora_path": text}')
        async with self._changing:
            if name in self._adapters or name == self._served.model:
                raise ValueError(
                    f"lora_name is {name!r}, which is served or was: give each adapter a new name, "
                    "or unload this one"
                )
            await self._change(self._base, path)
            self._adapters.add(name)
            self.model = name
        return PlainTextResponse(f"Success: requests that name {name!r} are answered")

    async def unload_adapter(self, request: Request) -> Response:
        """Forgets an adapter's name. The base is sampled again if this adapter was."""
        name = (await self._object(request)).get("lora_name")
        if not isinstance(name, str):
            raise ValueError('the body must be {"lora_name": text}')
        async with self._changing:
            if name not in self._adapters:
                raise UnknownModel(f"lora_name is {name!r}, and no adapter of this name is loaded")
            if name == self.model:
                await self._change(self._base)
                self.model = self._served.model
            self._adapters.remove(name)
        return PlainTextResponse(f"Success: {name!r} is unloaded")

    async def reset(self, request: Request) -> Response:
        self._check(request)
        given = request.query_params.get("reset_running_requests", "false")
        if given.lower() not in FLAGS:
            raise ValueError(f"reset_running_requests is {given!r}; give true or false")
        done = await asyncio.wrap_future(self._worker.drop_keys(FLAGS[given.lower()]))
        return JSONResponse({"success": done})

    async def name(self, request: Request) -> Response:
        name = (await self._object(request)).get("new_version")
        if not isinstance(name, str) or not name:
            raise ValueError('the body must be {"new_version": text}')
        async with self._changing:
            self._labels[self._worker.version] = name
        return JSONResponse({"success": True, "new_version": name})

    async def version(self, request: Request) -> Response:
        self._check_open(request)
        return JSONResponse({"weight_version": self.label(self._worker.version)})

    async def abort(self, request: Request) -> Response:
        ids = (await self._object(request)).get("request_ids")
        if not (isinstance(ids, list) and all(isinstance(id, str) for id in ids)):
            raise ValueError('the body must be {"request_ids": [text, ...]}')
        choices = [f"{id}/{i}" for id in ids for i in range(self._served.limits.choices)]
        await asyncio.wrap_future(self._worker.abort(choices))
        return JSONResponse({"status": "aborted"})

    async def _object(self, request: Request) -> dict[str, Any]:
        """Returns the JSON object in the body of a request that may change what is sampled."""
        self._check(request)
        return object_of(await self._body(request))

    def routes(self) -> list[Route]:
        return [
            Route("/server_info", self.info), Route("/is_paused", self.is_paused),
            Route("/weight_info", self.version),
            *(
                Route(path, handler, methods=["POST"]) for path, handler in {
                    "/pause": self.pause, "/resume": self.resume, "/collective_rpc": self.rpc,
                    "/reset_prefix_cache": self.reset, "/update_weight_version": self.name,
                    "/abort_requests": self.abort, "/v1/load_lora_adapter": self.load_adapter,
                    "/v1/unload_lora_adapter": self.unload_adapter,
                }.items()
            ),
        ]
