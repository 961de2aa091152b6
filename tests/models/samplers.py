"""The log-probs of a sampler beside those of whole rows."""

import numpy as np

from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler


def sampled(engine, served):
    """Yields the records of four prompts of up to 33 tokens, and each as a row [1, 48]."""
    scheduler, rng = Scheduler(engine, served), np.random.default_rng(1)
    for length in (1, 7, 20, 33):
        prompt = rng.integers(0, 97, length).astype(np.int32)
        scheduler.add(Request(f"{length}", prompt, 0, SamplingParams(max_tokens=14)))
    while scheduler.pending:
        for t in scheduler.step():
            row = np.concatenate([t.prompt, t.tokens])
            yield t, np.pad(row, (0, 48 - len(row)))[None].astype(np.int32)


def logps(t, logits):
    """The log-probs [n] of a record's tokens, from the logits [1, 48, V] of its row."""
    logits = np.asarray(logits, np.float64)[0, len(t.prompt) - 1 :]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logp[np.arange(len(t.tokens)), t.tokens]
