"""On-policy distillation of engine.drafter, the small model that drafts for the policy (ReSpec, arXiv:2510.26475).

The tokens of a rollout are samples of the policy mu. The mean of log mu - log pi over them is therefore
an unbiased estimate of KL(mu || pi) per token of the drafter pi, and its gradient that of the
cross-entropy. A better drafter changes no sample: the policy verifies every draft.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.fields import FIELDS
from jaxrl_tis.learner.batch_layout import Rows
from jaxrl_tis.learner.setup import LearnerSetup
from jaxrl_tis.learner.state import DrafterState
from jaxrl_tis.learner.step import make_distillation_step

READ = ("tokens", "positions", "segment_ids", "temperature", "logp_behav")  # fields of rollout rows


class Distiller:
    """Trains the drafter on rollout batches. The program is compiled once."""

    def __init__(self, setup: LearnerSetup):
        assert setup.drafter is not None
        self._setup, engine = setup, setup.config.engine
        self._every, self._weighting = engine.drafter_every, engine.drafter_weighting
        self._step = make_distillation_step(setup.drafter, setup.drafter_optimizer)

    def update(
        self, state: DrafterState, rows: Rows, step: int, version: int
    ) -> tuple[DrafterState, dict[str, float]]:
        """Returns (new state, metrics), ({} and the same state where none is due). One pass over the
        sampled tokens of the batch in shuffled order, with an update for each micro-batch.

        Args:
          state: donated.
          rows: of the rollout batch [N,T], as `Trainer.update` returns them.
          version: of the policy, which the new drafter gets.
        """
        if step % self._every:
            return state, {}
        weight_n = sequence_weights(rows, self._weighting)
        order = np.random.default_rng((self._setup.config.seed, step)).permutation(len(weight_n))
        order = order[weight_n[order] > 0]
        network, measured = state.network, []
        size = self._setup.config.train.microbatch_rows
        for start in range(0, len(order), size):
            index = order[start : start + size]
            length = self._setup.layout.whole_row(rows["tokens"].shape[1])
            batch = _microbatch(rows, weight_n, index, size, length)
            network, values = self._step(network, self._setup.layout.put_batch(batch))
            measured.append(values)
        if not measured:
            return state, {}
        measured = jax.device_get(measured)
        metrics = {name: float(np.mean([v[name] for v in measured])) for name in measured[0]}
        return DrafterState(network, jnp.full_like(state.version, version)), metrics


def sequence_weights(rows: Rows, weighting: str) -> np.ndarray:
    """Returns the weight of each sequence's tokens in the loss [N], 0 for a sequence without a sampled
    token. The mean over the tokens with a weight is 1.

    Args:
      rows: `sampled` [N,T], `rewards` [N].
      weighting: "none": 1. "reward": proportional to the reward, 0 if it is negative or unknown.
    """
    count_n = rows["sampled"].sum(axis=1)
    weight_n = np.ones(len(count_n))
    if weighting == "reward":
        weight_n = np.maximum(np.nan_to_num(rows["rewards"]), 0.0)
    weight_n = np.where(count_n > 0, weight_n, 0.0)
    count = np.sum(count_n[weight_n > 0])
    return (weight_n * count / np.maximum(np.sum(weight_n * count_n), 1e-9)).astype(np.float32)


def _microbatch(
    rows: Rows, weight_n: np.ndarray, index: np.ndarray, size: int, length: int
) -> dict[str, Any]:
    """Returns the rows of an index as a minibatch [1,size,length], filled up with empty rows."""
    weight_bt = np.broadcast_to(weight_n[index][:, None], rows["sampled"][index].shape)
    fields = {name: rows[name][index] for name in READ}
    fields |= {"mask": rows["sampled"][index], "weights": weight_bt}
    wide = [(0, size - len(index)), (0, length - weight_bt.shape[1])]
    pad = lambda name, x: np.pad(x, wide, constant_values=FIELDS[name].padding)[None]
    return {name: pad(name, x) for name, x in fields.items()}
