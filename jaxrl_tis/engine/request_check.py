"""Checks that an engine can serve a request."""

from collections.abc import Collection

import numpy as np

from jaxrl_tis.engine.protocol import EngineProtocol
from jaxrl_tis.engine.records import Request, SamplingParams, Trajectory
from jaxrl_tis.fields import DRAWN


def check(
    request: Request, engine: EngineProtocol, live: Collection[str], can_decode: bool
) -> None:
    """Raises ValueError if the request can never run.

    Args:
      live: ids of the pending requests.
      can_decode: whether there is a function that turns tokens into text.
    """
    problems = _problems(request, engine, can_decode)
    problems["another live request has this id"] = request.id in live
    if request.partial is not None:
        problems |= _partial_problems(request)
        if len(request.partial.tokens):
            problems |= _record_problems(request, engine)
    for problem, is_so in problems.items():
        if is_so:
            raise ValueError(f"request {request.id}: {problem}")


def check_extension(
    partial: Trajectory, sampling: SamplingParams, engine: EngineProtocol
) -> None:
    """Raises ValueError if a record that ends with given tokens cannot be continued so."""
    prompt, count, given = len(partial.prompt), len(partial.tokens), partial.num_given
    problems = {
        f"the extension has tokens beyond the vocabulary of {engine.vocab_size}":
            partial.tokens[-given:].max() >= engine.vocab_size,
        f"the record of {prompt} prompt tokens + {count - given} tokens and the extension of {given} "
        f"tokens leave no room in the cache of {engine.max_length} positions":
            prompt + count >= engine.max_length,
        f"the record of {count - given} tokens and the extension of {given} tokens leave no room for "
        f"a turn within max_tokens={sampling.max_tokens}, which counts all of them; raise it":
            count >= sampling.max_tokens,
    }
    for problem, is_so in problems.items():
        if is_so:
            raise ValueError(f"request {partial.id}: {problem}")


def _problems(request: Request, engine: EngineProtocol, can_decode: bool) -> dict[str, bool]:
    prompt, sampling = len(request.prompt), request.sampling
    return {
        "the prompt is empty; give at least one token": prompt == 0,
        f"the prompt has tokens beyond the vocabulary of {engine.vocab_size}":
            request.prompt.max(initial=0) >= engine.vocab_size,
        f"{prompt} prompt tokens + {sampling.max_tokens} new tokens exceed the cache of "
        f"{engine.max_length} positions; shorten the prompt or raise engine.max_length":
            prompt + sampling.max_tokens > engine.max_length,
        f"{len(sampling.stop_ids)} stop ids, at most {engine.max_stop_ids} are supported":
            len(sampling.stop_ids) > engine.max_stop_ids,
        "stop strings need a scheduler with a `decode` function":
            bool(sampling.stop_strings) and not can_decode,
        "penalties, logit_bias and min_tokens with stop ids need an engine with penalties=True":
            sampling.is_penalised and not engine.num_penalised,
        "min_tokens bars every token of the vocabulary, as all are stop ids":
            sampling.min_tokens > 0 and len(set(sampling.stop_ids)) >= engine.vocab_size,
        "an alpha above 0 needs an engine with a teacher":
            sampling.alpha > 0 and not engine.num_teachers,
        f"logit_bias names tokens beyond the vocabulary: {sampling.logit_bias}":
            any(id >= engine.num_penalised > 0 for id, _ in sampling.logit_bias),
    }


def _partial_problems(request: Request) -> dict[str, bool]:
    """Returns {problem of the trajectory that the request continues: whether it exists}."""
    partial, sampling = request.partial, request.sampling
    assert partial is not None
    return {
        "the partial trajectory is of another request":
            (partial.id, partial.seed) != (request.id, request.seed)
            or not np.array_equal(partial.prompt, request.prompt),
        f"the partial trajectory ended by itself ({partial.stop_reason})":
            partial.stop_reason != "abort",
        f"the partial trajectory has {len(partial.tokens)} tokens, as many as may be drawn "
        f"({sampling.max_tokens}) or more": len(partial.tokens) >= sampling.max_tokens,
        "the partial trajectory saw evicted keys, which cannot be rebuilt; start it again":
            len(partial.evict_step) > 0,
        "the partial trajectory lacks the prompt's log-probs; start it again":
            sampling.prompt_logprobs and len(partial.tokens) > 0
            and not len(partial.prompt_logps),
    }


def _record_problems(request: Request, engine: EngineProtocol) -> dict[str, bool]:
    """Returns the problems of appending to the partial record: a record has one temperature, one
    quant_id and one width of each field."""
    partial, temperature = request.partial, request.sampling.temperature
    assert partial is not None
    widths = {n: getattr(engine, f.width) for n, f in DRAWN.items() if f.width}
    read = len(partial.prompt) + len(partial.tokens) - partial.num_given - 1
    partial_widths = {name: getattr(partial, name).shape[1] for name in widths}
    return {
        f"the partial trajectory was drawn at temperature {partial.temperature}, not "
        f"{temperature}": partial.temperature != temperature,
        f"the partial trajectory was drawn by {partial.quant_id}, not {engine.quant_id}":
            partial.quant_id != engine.quant_id,
        f"the partial trajectory has routes of {partial.routes.shape[1:]} (layers, experts), this "
        f"engine {engine.route_shape}": partial.routes.shape[1:] != engine.route_shape,
        f"the partial trajectory has routes of {len(partial.routes)} tokens and needs {read}; start it "
        "again": any(engine.route_shape) and len(partial.routes) < read,
        f"the partial trajectory records {partial_widths} numbers of a draw, this engine {widths}":
            partial_widths != widths,
    }
