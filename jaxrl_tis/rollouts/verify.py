"""Whether a record that came from elsewhere can be of the request that was sent there."""

import numpy as np

from jaxrl_tis.engine.protocol import EngineProtocol
from jaxrl_tis.engine.records import Request, Trajectory
from jaxrl_tis.fields import DRAWN

ROUNDING = 1e-3  # by which a log-prob may be above 0


def problem(
    record: Trajectory, request: Request, engine: EngineProtocol, oldest: int, newest: int
) -> str | None:
    """Returns why a record cannot be what this engine draws for a request, None where it can.

    Args:
      oldest, newest: versions of the weights that can have drawn what follows request.partial.
    """
    sampling, count = request.sampling, len(record.tokens)
    begun = 0 if request.partial is None else len(request.partial.tokens)
    is_stopped = count > begun and record.tokens[-1] in sampling.stop_ids
    ends = {
        "stop": is_stopped, "length": count == sampling.max_tokens and not is_stopped,
        "abort": count < sampling.max_tokens and not is_stopped,
    }
    new = record.version[begun:]
    wrong = {
        "prompt": not np.array_equal(record.prompt, request.prompt),
        "request": (record.id, record.seed, record.request) != (request.id, request.seed, request.hash),
        "temperature": record.temperature != sampling.temperature,
        "quant_id": record.quant_id != engine.quant_id,
        "stop_reason": not (record.stop_reason in ends and ends[record.stop_reason]),
        "tokens": not np.all((record.tokens >= 0) & (record.tokens < engine.vocab_size)),
        "mask": not record.mask.all() or record.turn.any(),
        "evict_step": len(record.evict_step) > 0,
        "logp_behav": not np.all(np.isfinite(record.logp_behav) & (record.logp_behav <= ROUNDING)),
        "version": not np.all((new >= oldest) & (new <= newest)) or np.any(np.diff(record.version) < 0),
        "kv_version": len(record.kv_version) != count or np.any(record.kv_version > record.version),
        "segment": len(record.segment) != count or np.any(np.diff(record.segment) < 0),
    }
    if count:
        wrong |= {
            name: getattr(record, name).shape != (count, getattr(engine, field.width))
            for name, field in DRAWN.items() if field.width
        }
    if begun:
        wrong["beginning"] = not _begins(record, request.partial, begun)
    named = [name for name, is_so in wrong.items() if is_so]
    return f"{request.id}: wrong {', '.join(named)}" if named else None


def _begins(record: Trajectory, partial: Trajectory, count: int) -> bool:
    """Whether a record goes on with what there was."""
    return all(
        np.array_equal(getattr(record, name)[:count], getattr(partial, name))
        for name in (*DRAWN, "version", "kv_version", "segment")
    )
