"""How a run is saved, and how it goes on from a checkpoint.

A checkpoint holds the state of `learner.state`; under "snapshots" the weights that tokens in the queue
were sampled with; and meta, which JSON can hold: the fields NEEDED. The base of LoRA does not change:
WORKDIR/base holds it once, see `learner.state.keep_base`.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import ml_collections

from jaxrl_tis.data import pipeline
from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.learner import optimizer
from jaxrl_tis.learner.setup import LearnerSetup
from jaxrl_tis.learner.snapshots import WeightSnapshots
from jaxrl_tis.learner.state import abstract_state, initial_drafter, joined, read_base
from jaxrl_tis.record import changes
from jaxrl_tis.record.changes import Changes
from jaxrl_tis.record.checkpoint import Checkpoints, Misfit
from jaxrl_tis.record.provenance import saved_config

NEEDED = ("step", "version", "source", "held_out", "snapshots")
# Parts of a position's fingerprint that no field of the config names.
OF_EXAMPLES = ("examples", "length")


def save(
    checkpoints: Checkpoints, step: int, version: int, state: Mapping[str, Any],
    snapshots: WeightSnapshots, source: Mapping[str, Any], held_out: str,
) -> None:
    """Saves a run after `step`, in the background.

    Args:
      version: of the policy in `state`.
      source: the state of the source of rollouts.
      held_out: digest of the examples that evaluations measure.
    """
    arrays, of_snapshots = snapshots.state()
    meta = {
        "step": step, "version": version, "held_out": held_out, "source": source,
        "snapshots": of_snapshots,
    }
    trained = {name: x for name, x in state.items() if name != "base"}
    checkpoints.save(step, {**trained, **({"snapshots": arrays} if arrays else {})}, meta)


def restore(
    checkpoints: Checkpoints, setup: LearnerSetup, snapshots: WeightSnapshots, changed: Changes,
    workdir: str | pathlib.Path,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads the newest checkpoint: returns (state, meta), and restores `snapshots`. A drafter that was not
    trained before begins anew, and one that is trained no more is left out.

    Raises:
      ValueError: the checkpoint does not fit a field that --change names, or is of another version
        of jaxrl_tis.
    """
    def abstract(meta):
        shapes = {name: x for name, x in abstract_state(setup).items() if name != "base"}
        if "snapshots" not in meta:
            return shapes
        of_snapshots = snapshots.abstract(meta["snapshots"], shapes["policy"].params)
        return shapes | ({"snapshots": of_snapshots} if of_snapshots else {})

    try:
        state, meta = checkpoints.restore(abstract, optional=("drafter",))
    except Misfit as error:
        if not (named := changed.named_fields()):
            raise
        raise ValueError(
            f"the checkpoints in {workdir} hold other arrays than this change needs ({named}); use "
            "the old values, or a new workdir"
        ) from error
    if missing := [name for name in NEEDED if name not in meta]:
        raise ValueError(
            f"the checkpoints in {workdir} have no {' and '.join(missing)}: another version of "
            "jaxrl_tis wrote them; use that version, or a new workdir"
        )
    if setup.drafter is not None and "drafter" not in state:
        state["drafter"] = initial_drafter(setup)
    kept = state.pop("snapshots", {})
    if setup.adapter is not None:
        state["base"] = read_base(setup, workdir)
    snapshots.restore(kept, meta["snapshots"], lambda trained: joined(setup, state, trained))
    return state, meta


def move_to_other_data(
    meta: dict[str, Any], batches: Batches, held_out: str, changed: Changes,
    workdir: str | pathlib.Path,
) -> dict[str, list]:
    """Moves the position that `meta` holds to other data, where --change names them. Returns what
    is different about the data, as `Changes.fields` has it.

    Args:
      batches: of the training data of this start.
      held_out: digest of the held-out examples of this start.

    Raises:
      ValueError: the held-out examples have changed in their place and are not named. The source
        raises the same for the examples of training.
    """
    fields, state = {}, meta["source"]["batches"]
    differing = batches.differing(state)
    if differing and all(changed.names(pipeline.FIELDS[name]) for name in differing):
        meta["source"]["batches"] = batches.moved(state)
        fields |= {f"data.{n}": pair for n, pair in differing.items() if n in OF_EXAMPLES}
    before = meta["held_out"]
    is_meant = any(map(changed.names, ("eval.params", "task.params")))
    is_meant |= any(changes.is_within(field, ("eval.params",)) for field in changed.fields)
    if before != held_out and not is_meant:
        raise ValueError(
            f"the held-out examples differ from those of the run in {workdir} (digest {before}, "
            f"now {held_out}). Use the old data, a new workdir, or --change=eval.params to "
            "continue with the new data"
        )
    return fields | ({"data.held_out": [before, held_out]} if before != held_out else {})


def changed_rates(
    folder: pathlib.Path, config: ml_collections.ConfigDict, state: Mapping[str, Any]
) -> list[str]:
    """Returns a line for each learning rate of the next update that differs from the one that the
    configuration saved in `folder` gives."""
    saved, lines = ml_collections.ConfigDict(saved_config(folder)), []
    for section, network in (("optimizer", "policy"), ("critic", "critic")):
        if network in state:
            count = optimizer.num_updates(state[network].opt_state)
            before, now = (float(optimizer.rate_at(c, section, count)) for c in (saved, config))
            if before != now:
                lines.append(
                    f"the learning rate of the {network} is {now:.4g} now, and was {before:.4g}"
                )
    return lines
