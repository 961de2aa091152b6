"""Supervised steps before the first step of reinforcement learning."""

import math
from collections.abc import Callable
from typing import Any

import jax
import ml_collections

from jaxrl_tis import processes, rollouts
from jaxrl_tis.build import Setup
from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.metrics import MetricsWriter, NoRecord
from jaxrl_tis.models import placement
from jaxrl_tis.optimizer import make_optimizer, optimizer_shardings, scaled_for
from jaxrl_tis.progress import Progress
from jaxrl_tis.rows import supervised_rows
from jaxrl_tis.step import TrainState, make_supervised_step


def warm_up(
    setup: Setup, params: Any, writer: MetricsWriter | NoRecord, pulse: Callable[[], None]
) -> Any:
    """Takes supervised steps on (prompt, answer) pairs and returns the taught parameters; calls
    `pulse` after each.

    Raises ValueError when an answer and its end token exceed rollout.max_new_tokens.
    """
    config = setup.config
    if config.warmup.steps == 0:
        return params
    prompter = rollouts.Prompter(setup.tokenizer, config.task)
    batches = Batches(
        config.task.name, {**config.task.params, **config.warmup.params},
        batch_size=config.warmup.rows, seed=config.seed, **processes.shard(),
    )
    fields = ml_collections.ConfigDict({**config.optimizer, "lr": config.warmup.lr})
    tx = scaled_for(config.model.dtype, make_optimizer(fields, config.warmup.steps))
    train_step = make_supervised_step(setup.learner, tx)
    layout = setup.layout
    moments = optimizer_shardings(
        tx, params, placement.shardings(layout, setup.model), layout.replicated()
    )
    state = TrainState(params, jax.jit(tx.init, out_shardings=moments)(params))
    context = layout.mesh.shape["context"]
    length = -(-setup.row_length // context) * context
    with Progress(config.warmup.steps, "warm-up", is_shown=processes.is_first()) as progress:
        for index in range(1, config.warmup.steps + 1):
            records = processes.gather(next(batches))
            pairs = [(prompter.ids(r), _target(setup, r)) for r in records]
            rows = supervised_rows(pairs, length)
            minibatch = {name: value[None] for name, value in rows.items()}
            state, values = train_step(state, layout.put_batch(minibatch))
            loss = float(values["supervised/ce_loss"])
            if not math.isfinite(loss):
                raise FloatingPointError(f"warm-up step {index}: the cross-entropy is {loss}")
            if not math.isfinite(norm := float(values["supervised/grad_norm"])):
                raise FloatingPointError(f"warm-up step {index}: the gradient's norm is {norm}")
            writer.write(index, "warmup", {"warmup/loss": loss})
            progress.update(1, loss=loss)
            pulse()
    return state.params


def _target(setup: Setup, record: dict[str, str]) -> list[int]:
    ids = [*setup.tokenizer.encode(record["answer"]), setup.tokenizer.eos_ids[0]]
    limit = setup.config.rollout.max_new_tokens
    if len(ids) > limit:
        raise ValueError(
            f"example {record['id']}: the answer and its end are {len(ids)} tokens, "
            f"config.rollout.max_new_tokens is {limit}; raise it"
        )
    return ids
