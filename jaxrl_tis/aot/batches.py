"""Abstract batches of a run, made from shapes alone as `Trainer` makes them from samples."""

import functools

import jax

from jaxrl_tis import fields
from jaxrl_tis.build import Setup
from jaxrl_tis.learner import control
from jaxrl_tis.learner.batch_layout import forward_fields
from jaxrl_tis.learner.correction import OF_UPDATE, credited, make_prepare
from jaxrl_tis.learner.distill import READ

Structs = dict[str, jax.ShapeDtypeStruct]


def abstract_microbatches(setup: Setup) -> Structs:
    """Returns the fields [M,R,T] of a batch to score, in the training layout."""
    return _in_rows(setup, forward_fields(_rollout_batch(setup)), 1)


def abstract_minibatch(setup: Setup) -> Structs:
    """Returns the fields [M,R,T,...] of one update, in the training layout."""
    batch, c = _rollout_batch(setup), setup.training.correction
    is_scored = bool(setup.training.recompute_reason)
    if not is_scored:
        batch = {n: x for n, x in batch.items() if fields.FIELDS[n].source != "learner"}
    _, settings = jax.eval_shape(lambda batch: control.begin(c, control.init(c), batch), batch)
    count, _ = batch["mask"].shape
    batch |= {name: jax.ShapeDtypeStruct((count,), "float32") for name in settings}
    prepare = make_prepare(c) if is_scored else functools.partial(credited, c)
    batch |= jax.eval_shape(prepare, batch)[0]
    in_update = {name: x for name, x in batch.items() if c.is_in_update(name, is_scored)}
    return _in_rows(setup, in_update, setup.config.train.minibatches)


def abstract_weighing(setup: Setup) -> Structs:
    """Returns the packed fields [1,B,T] of a whole batch, whose weights and metrics are computed at
    once."""
    batch, c = _rollout_batch(setup), setup.training.correction
    batch |= jax.eval_shape(functools.partial(credited, c), batch)[0]
    if not setup.training.recompute_reason:
        of_update = {name: OF_UPDATE[name] for name in ("weights", "accepted")}
        shape = batch["mask"].shape
        batch |= {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in of_update.items()}
    taken = {n: x for n, x in batch.items() if c.is_weighed(n)}
    rows = _in_rows(setup, taken | {"segment_ids": batch["segment_ids"]}, 1)
    whole = lambda x: (1, x.shape[0] * x.shape[1], *x.shape[2:])
    return {n: jax.ShapeDtypeStruct(whole(x), x.dtype, sharding=x.sharding) for n, x in rows.items()}


def abstract_distillation(setup: Setup) -> Structs:
    """Returns the fields [1,R,T] of one update of the drafter, as `Distiller` lays them out."""
    training, rows = setup.training, setup.config.train.microbatch_rows
    shape = 1, rows, training.layout.whole_row(training.row_length)
    place = lambda name: training.layout.sharding(fields.logical_axes(name, len(shape)))
    return {
        name: jax.ShapeDtypeStruct(shape, fields.FIELDS[name].dtype, sharding=place(name))
        for name in (*READ, "mask", "weights")
    }


def _rollout_batch(setup: Setup) -> Structs:
    """Returns the fields [N,...] of a rollout batch before the methods are applied. With the forks
    of sessions it has `LearnerSetup.fork_rows` more rows than samples."""
    config, training = setup.config, setup.training
    c = training.correction
    components = c.advantage[1].get("gdpo_weights")
    widths = {
        "kept": setup.engine.num_kept, "top": setup.engine.top_n,
        "vocabulary": setup.model.vocab_size,
        "components": len(components) if components else 1,
        "routers": setup.model.num_moe_layers,
        "experts": setup.model.moe.top_k if setup.model.moe else 0,
    }
    asked = set(c.needs) | ({"logp_ref"} if c.kl is not None else set())
    asked |= {"routes", "routed"} if c.routing != "none" else set()
    asked |= {"owner"} if training.fork_rows else set()

    def is_there(name, field):
        is_asked = not field.is_optional or name in asked
        is_evicting = name != "evict_step" or training.has_evictions
        return field.source in fields.SCORED and is_asked and is_evicting

    count = config.rollout.prompts * config.rollout.group_size + training.fork_rows
    moe = setup.model.moe
    dtypes = {}
    if moe:
        dtypes = dict.fromkeys(("routes", "routes_behav"), fields.route_dtype(moe.num_experts))
    more = {"evict_step": training.evict_axes}
    return {
        name: jax.ShapeDtypeStruct(
            fields.shape(name, count, training.row_length, widths) + more.get(name, ()),
            dtypes.get(name, field.dtype),
        )
        for name, field in fields.FIELDS.items()
        if is_there(name, field) and fields.is_recorded(name, widths)
    }


def _in_rows(setup: Setup, batch: Structs, parts: int) -> Structs:
    """Returns the fields [N,...] as micro-batches of N / parts sequences."""
    training, size = setup.training, setup.config.train.microbatch_rows
    packer = training.packer

    def place(name, x):
        count, unit = x.shape[0] // parts, fields.field(name).unit
        number = count // size if packer is None else packer.num_microbatches(count)
        length = training.row_length if packer is None else packer.length
        axes = x.shape[2:] if unit == "token" else x.shape[1:]
        shape = (number, size, *(() if unit == "step" else (length,)), *axes)
        where = training.layout.sharding(fields.logical_axes(name, len(shape)))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=where)

    return {name: place(name, x) for name, x in batch.items()}
