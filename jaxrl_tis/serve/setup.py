"""Builds the application of `python -m jaxrl_tis.serve` from a config: weights, token, address."""

import functools
import pathlib
from collections.abc import Collection
from typing import Any

import jax
from starlette.applications import Starlette

from jaxrl_tis.build import Setup
from jaxrl_tis.endpoint import app
from jaxrl_tis.endpoint.request import Limits
from jaxrl_tis.engine.warm import warm_up
from jaxrl_tis.engine.worker import EngineThread
from jaxrl_tis.learner.state import initial_policy, read_params, with_adapter
from jaxrl_tis.runtime.addresses import is_loopback


def read_token(path: str | None) -> str | None:
    """Reads the token in a file; None without a file."""
    if path is None:
        return None
    token = pathlib.Path(path).read_text(encoding="utf-8", errors="replace").strip()
    if not (token and token.isascii() and token.isprintable() and " " not in token):
        raise ValueError(f"{path} must hold a token: printable ASCII characters without spaces")
    return token


def load(setup: Setup, path: str | None, adapter: str | None = None) -> Any:
    """Loads serving parameters from `path`; None: the weights that the config starts from. `adapter`
    is the folder of a PEFT adapter."""
    learner = setup.training
    read = lambda: initial_policy(learner) if path is None else read_params(learner, path)
    params = with_adapter(learner, read, adapter)
    return jax.block_until_ready(setup.engine.load(params))


def make_app(
    setup: Setup, params: Any, limits: Limits, max_pending: int, token: str | None, host: str,
    hosts: Collection[str] = (), start: tuple[str | None, str | None] = (None, None),
) -> Starlette:
    """Makes the application that serves `params` at an address, and compiles all programs. `hosts`
    are further names of the address, and `start` is what `params` were loaded from: see `load`.

    Raises ValueError if other machines reach the address and there is no token.
    """
    # Requests to a server are turns, also those of a run with an environment or a harness.
    scheduler = setup.turn_scheduler(
        setup.engine, params, 0, max_pending=max_pending, decode=setup.tokenizer.decode
    )
    application = app.make(app.Served(
        EngineThread(scheduler), setup.tokenizer, setup.config.name, setup.model.vocab_size, limits,
        load=functools.partial(_load, setup, start), token=token, is_closed=not is_loopback(host),
        hosts=hosts, facts=_facts(setup, limits),
    ))
    warm_up(setup.engine, params, setup.drafting.get(setup.engine))
    return application


def _load(
    setup: Setup, start: tuple[str | None, str | None], path: str | None, adapter: str | None = None
) -> Any:
    """Loads serving parameters as `load` does. Without a path the base is that of `start`, and its
    adapter is served again if none is given."""
    base, first = (path, None) if path is not None else start
    return load(setup, base, adapter or first)


def _facts(setup: Setup, limits: Limits) -> dict[str, Any]:
    """Returns what a trainer asks of the engine, by vLLM's names."""
    return {
        "dtype": setup.engine.config.dtype, "max_model_len": limits.context_tokens,
        "logprobs_mode": "processed_logprobs", "max_logprobs": limits.logprobs,
        "hf_config": {"vocab_size": setup.model.vocab_size},
    }
