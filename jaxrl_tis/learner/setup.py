"""The learner of a run: its model, programs, optimizers and the shape of its batches."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_collections
import numpy as np
import optax

from jaxrl_tis import sharding
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.fields import FIELDS, route_dtype
from jaxrl_tis.learner import snapshots
from jaxrl_tis.learner.batch_layout import (
    Packer, Rows, forward_fields, sequence_lengths, trajectory_rows,
)
from jaxrl_tis.learner.correction import Correction
from jaxrl_tis.learner.optimizer import align, make_optimizer, perturb, scaled_for, total_updates
from jaxrl_tis.learner.scoring import Learner
from jaxrl_tis.models import invariant, lora, placement, quant, transformer
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.rollouts import replay
from jaxrl_tis.rollouts.schedules import Schedule
from jaxrl_tis.sharding import Layout

MAX_LOGITS = 2**28  # 1 GiB in float32


@dataclasses.dataclass(frozen=True)
class LearnerSetup:
    """The parts of a learner that do not change during a run.

    Attributes:
      correction: the methods of config.correction.
      schedule: rollout.schedule; how far samplers run ahead of this learner.
      staleness: the most versions that a token is behind the policy that trains on it, replayed
        or not; inf: no bound.
      layout: mesh and sharding rules of training.
      learner: programs for rows of one sequence each.
      packer: lays several sequences into a row of an update; None where each has its own.
      drafter: programs of engine.drafter, if it is trained; drafter_optimizer: its own.
    """

    config: ml_collections.ConfigDict
    correction: Correction
    schedule: Schedule
    staleness: float
    model: ModelConfig
    layout: Layout
    learner: Learner
    packer: Packer | None
    optimizer: optax.GradientTransformation
    critic_optimizer: optax.GradientTransformation
    drafter_optimizer: optax.GradientTransformation
    drafter: Learner | None = None

    @property
    def adapter(self) -> lora.Adapter | None:
        """The trained weights of LoRA; None trains all weights."""
        return self.learner.adapter

    @property
    def recompute_reason(self) -> str | None:
        """Why a rollout batch is scored before it is trained on, and not within its update."""
        train = self.config.train
        if train.fuse_old_logp == "never":
            return "train.fuse_old_logp is never"
        if self.staleness:
            return "tokens can be of older weights than the update starts from"
        if (updates := train.minibatches * train.epochs) > 1:
            return f"a rollout batch gets {updates} updates"
        return self.correction.recompute_reason

    @property
    def approximates_old_logp(self) -> bool:
        """Whether logp_old of stale tokens is computed with another policy than the one that
        sampled them (`old_logp_source` ewma or none)."""
        source = self.config.rollout.old_logp_source
        return self.staleness > 0 and source in snapshots.APPROXIMATIONS

    @property
    def averages_policy(self) -> bool:
        """Whether logp_prox is of an average of the policy, which the state then holds."""
        return self.approximates_old_logp and self.config.rollout.old_logp_source == "ewma"

    @property
    def has_critic(self) -> bool:
        return "values" in self.correction.needs

    @property
    def has_evictions(self) -> bool:
        """Whether samplers evict keys of a sequence. The learner then masks the same keys."""
        _, window = self.config.engine.retention
        return window > 0

    @property
    def evict_axes(self) -> tuple[int, ...]:
        """The axes of the field evict_step after those of the tokens: the groups of layers, if there are
        several."""
        groups = self.config.engine.heavy_groups
        return (groups,) if groups > 1 else ()

    @property
    def row_length(self) -> int:
        """Tokens of a row with one sequence: the longest prompt plus the longest response."""
        return max_length(self.config)

    @property
    def fork_rows(self) -> int:
        """Rows that a batch with forks of sessions has more than samples."""
        return fork_rows(self.config)

    @property
    def update_learner(self) -> Learner:
        """The learner of the updates: for packed rows if the config packs them."""
        if self.packer is None:
            return self.learner
        return dataclasses.replace(
            self.learner, max_targets=self.packer.length, max_segments=self.packer.max_segments
        )

    def rows(self, trajectories: list[Trajectory]) -> Rows:
        """Lays sampled sequences into rows, see `batch_layout.trajectory_rows`. Where the sampler's
        routes are replayed these are `routes` and `routed`, and samples without routes have an empty
        mask.

        Raises:
          ValueError: a sample has no route for a token, and none may be missing; or its routes are
            of another model.
        """
        _check_routes(trajectories, self.model)
        rows = trajectory_rows(
            trajectories, self.row_length, self.evict_axes if self.has_evictions else None
        )
        if not self.correction.replays_routes:
            return rows
        missing = without_routes(trajectories)
        if missing.any() and self.correction.routing_missing == "stop":
            ids = [t.id for t, is_missing in zip(trajectories, missing, strict=True) if is_missing]
            raise ValueError(
                f"correction.routing = {self.correction.routing!r} replays the sampler's routes, and "
                f"{len(ids)} samples lack some: {', '.join(ids[:3])}. Mend the sampler, or set "
                "correction.routing_missing to 'mask' to train without these samples"
            )
        if missing.all():
            length, moe = rows["tokens"].shape, self.model.experts
            shape = (*length, self.model.num_moe_layers, moe.top_k)
            rows["routes_behav"] = np.zeros(shape, route_dtype(moe.num_experts))
            rows["routed_behav"] = np.zeros(length, bool)
        return rows | {
            "mask": rows["mask"] & ~missing[:, None],
            "routes": rows["routes_behav"], "routed": rows["routed_behav"],
        }

    def micro_batches(self, rows: Rows, is_wanted: np.ndarray | None = None):
        """Cuts rows into micro-batches of the learner's layout.

        Args:
          rows: [N,T,...], one sequence each.
          is_wanted: [N] rows whose results are needed, None for all. The others have results of 0.
            The first micro-batches hold the wanted rows and the program skips the rest, so that its
            shapes are the same for any number of rows.

        Returns: (the fields that a log-prob takes, a function that turns results [M,R,T,...] back
          into rows [N,T,...]).
        """
        forward = forward_fields(rows)
        order: Any = slice(None)
        place: Any = slice(None)
        if is_wanted is not None:
            forward["mask"] = forward["mask"] & is_wanted[:, None]
            order = np.argsort(~is_wanted, kind="stable")
            place = np.argsort(order)
        if self.packer is None:
            size = self.config.train.microbatch_rows
            micro = {name: x[order].reshape(-1, size, *x.shape[1:]) for name, x in forward.items()}
            flat = lambda x: self.layout.fetch(x).reshape(-1, *x.shape[2:])[place]
        else:
            lengths = sequence_lengths(rows)
            packing = self.packer.plan(lengths if is_wanted is None else lengths * is_wanted)
            micro = packing.pack(forward)
            flat = lambda x: packing.unpack(self.layout.fetch(x), self.row_length)
        return self.layout.put_batch(micro), flat

    def passes(self, rows: Rows) -> Callable[[Callable, Any], Any]:
        """Returns a function (program, params) -> its results for the rows, [N,T,...] each. The rows
        are cut into micro-batches once, at the first pass."""
        cut = functools.cache(lambda: self.micro_batches(rows))

        def run(program, params):
            micro, flat = cut()
            return jax.tree.map(flat, program(params, micro))

        return run


def without_routes(trajectories: list[Trajectory]) -> np.ndarray:
    """Returns which samples [N] lack a route of a token that a sampled token follows."""
    return np.array([
        len(t.tokens) > 0 and len(t.routes) < len(t.prompt) + len(t.tokens) - t.num_given - 1
        for t in trajectories
    ], bool)


def _check_routes(trajectories: list[Trajectory], model: ModelConfig) -> None:
    """Raises ValueError for recorded routes that cannot be of this model."""
    shape = (model.num_moe_layers, model.moe.top_k) if model.moe else (0, 0)
    experts = model.moe.num_experts if model.moe else 0
    for t in trajectories:
        if len(t.routes) and (t.routes.shape[1:] != shape or t.routes.max() >= experts):
            raise ValueError(
                f"sample {t.id} has routes of {t.routes.shape[1:]} (layers, experts of a token) with "
                f"ids up to {t.routes.max()}, and this model has {shape} and {experts} experts; the "
                "routes are of another model"
            )


def max_length(config: ml_collections.ConfigDict) -> int:
    """Returns the largest number of tokens in a sequence: prompt and response, or an episode."""
    longest = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    return config.task.max_context_tokens or longest


def fork_rows(config: ml_collections.ConfigDict) -> int:
    """Returns the rows that a batch with forks has more than samples; 0 leaves all forks out."""
    rollout = config.rollout
    if not rollout.harness or rollout.on_fork != "rows":
        return 0
    return rollout.fork_rows or rollout.prompts * rollout.group_size


def max_response(config: ml_collections.ConfigDict) -> int:
    """Returns the largest number of tokens that follow a prompt."""
    has_turns = config.task.environment or config.rollout.harness
    return max_length(config) - 1 if has_turns else config.rollout.max_new_tokens


def make_learner_setup(
    config: ml_collections.ConfigDict, correction: Correction, schedule: Schedule,
    way: replay.Way | None,
    model: ModelConfig, devices: list | None = None, recipe: lora.Recipe | None = None,
    drafter: ModelConfig | None = None,
) -> LearnerSetup:
    """Makes the learner of a checked config.

    Args:
      correction, schedule, way: the config's choices, as `validate.validate` returns them; `way` is
        that of rollout.replay.
      devices: where it trains, by default this machine's; they need not exist, see jaxrl_tis.aot.
      recipe: of model.lora.
      drafter: shape of engine.drafter; None without one or if it is not trained.

    Raises:
      ValueError: a method or the model does not fit the shapes or the mesh.
    """
    _check_logits(config, correction, model.vocab_size)
    layout = sharding.layout(
        config.mesh.train, sharding.TRAIN_RULES, devices=devices, vocab_size=model.vocab_size,
        grad_reduce_dtype=config.train.grad_reduce_dtype,
    )
    _check_mesh(layout, correction, model, config)
    _check_routers(correction, model)
    program = transformer.Program(
        config.model.dtype, config.model.remat, config.model.fp32_head, layout,
        quant.Recipe(config.model.quantization, tuple(config.model.unquantized)),
        config.model.numerics,
    )
    program.quantization.check(model, layout.mesh.shape["tensor"])
    if program.is_invariant:
        invariant.check(model, dict(layout.mesh.shape), program.quantization.scheme)
    adapter = None
    if recipe is not None:
        adapter = lora.Adapter.of(recipe, model, transformer.abstract_params(model))
        check_adapter(adapter, program, layout)
    packer = None
    if config.train.pack_length:
        packer = Packer.of(
            config.train.pack_length, max_length(config), config.train.microbatch_rows,
            layout.shards, layout.mesh.shape["context"],
        )
        # Rows of one sequence are max_length wide, which packed rows do not know.
        scale = correction.scale or float(max_length(config))
        correction = dataclasses.replace(correction, scale=scale)
    scaled = functools.partial(scaled_for, program.dtype)
    learner = Learner(
        model, program, max_response(config), config.train.logprob_chunk, adapter=adapter
    )
    return LearnerSetup(
        config=config, correction=correction, schedule=schedule,
        staleness=replay.max_age(schedule, way, config.rollout.max_age),
        model=model, layout=layout,
        learner=learner,
        packer=packer,
        optimizer=scaled(_policy_optimizer(config, correction, model.num_layers)),
        critic_optimizer=scaled(make_optimizer(config.critic, total_updates(config))),
        drafter_optimizer=scaled(_drafter_optimizer(config)),
        drafter=None if drafter is None else _drafter(learner, drafter),
    )


def _drafter(learner: Learner, drafter: ModelConfig) -> Learner:
    """Returns the programs that train a drafter, in fast numerics and without quantization. ValueError
    for a mesh that does not divide it."""
    layout = learner.program.layout
    assert layout is not None
    placement.check_tensor_parallel(drafter, layout.mesh.shape["tensor"])
    placement.check_experts(drafter, layout.mesh.shape["expert"])
    program = dataclasses.replace(
        learner.program, quantization=quant.Recipe("none"), numerics="fast"
    )
    return dataclasses.replace(learner, config=drafter, program=program, adapter=None)


def _drafter_optimizer(config: ml_collections.ConfigDict) -> optax.GradientTransformation:
    """Makes the drafter's optimizer: that of the policy, at the constant rate engine.drafter_lr."""
    own = {"lr": config.engine.drafter_lr, "schedule": "constant", "warmup": 0, "offload": False}
    return make_optimizer(ml_collections.ConfigDict({**config.optimizer, **own}), 1)


def _policy_optimizer(
    config: ml_collections.ConfigDict, correction: Correction, num_layers: int
) -> optax.GradientTransformation:
    """Makes the policy's optimizer with the controllers that change gradients or parameters."""
    optimizer = make_optimizer(config.optimizer, total_updates(config))
    controllers = dict(correction.controllers)
    if "gradient_alignment" in controllers:
        optimizer = align(optimizer, **controllers["gradient_alignment"])
    if "layerwise_perturbation" in controllers:  # outermost, as it sees the parameters alone
        optimizer = perturb(optimizer, num_layers, **controllers["layerwise_perturbation"])
    return optimizer


def _check_mesh(
    layout: Layout, correction: Correction, model: ModelConfig, config: ml_collections.ConfigDict
) -> None:
    """Raises ValueError for a mesh that does not divide the model or a method's arrays."""
    if "grad_norms" in correction.needs and layout.shards > 1:
        raise ValueError(
            f"{correction.needs['grad_norms']!r} needs the gradient of each sequence, which rows "
            f"on {layout.shards} devices do not provide; set mesh.train to (1, 1, ...)"
        )
    if config.optimizer.offload or config.critic.offload:
        device = [*layout.mesh.local_devices, *layout.mesh.devices.flat][0]  # a described one is nobody's
        kinds = [m.kind for m in device.addressable_memories()]
        if sharding.HOST_MEMORY not in kinds:
            raise ValueError(
                f"optimizer.offload = {config.optimizer.offload}, critic.offload = "
                f"{config.critic.offload} and devices have no memory {sharding.HOST_MEMORY!r}, only "
                f"{', '.join(kinds)}; set both to False"
            )
    placement.check_tensor_parallel(model, layout.mesh.shape["tensor"])
    placement.check_experts(model, layout.mesh.shape["expert"])
    for problem in uncut_rows(config, layout.shards, layout.mesh.shape["context"]):
        raise ValueError(problem)


def uncut_rows(config: ml_collections.ConfigDict, shards: int, context: int) -> Iterator[str]:
    """Yields a sentence for each kind of rows that these numbers of data and context shards do not cut
    into equal parts."""
    length, rows = max_length(config), {"train.microbatch_rows": config.train.microbatch_rows}
    if not config.train.pack_length and length % (unit := sharding.row_unit(context)):
        yield (
            f"rows of {length} tokens cannot be cut into two equal chunks for each of the {context} "
            f"context shards of mesh.train; set train.pack_length to a multiple of {unit}"
        )
    if config.warmup.steps:
        rows["warmup.rows"] = config.warmup.rows
    for name, count in rows.items():
        if count % shards:
            yield (
                f"{name} = {count} is not divisible by the {shards} data shards of mesh.train; set it "
                f"to a multiple of {shards}"
            )


def check_adapter(
    adapter: lora.Adapter, program: transformer.Program, layout: Layout
) -> None:
    """Raises ValueError for a mesh or numerics that the factors do not fit."""
    placement.of_factors(layout, adapter)
    ranks, width = dict(adapter.ranks), layout.count(layout.axes("embed"))
    if program.is_invariant:
        check_invariant("model.numerics", adapter, layout, "mesh.train")
    if ranks.get(lora.HEAD, 0) % width:
        raise ValueError(
            f"model.lora has rank {ranks[lora.HEAD]} at the head, which {width} shards of the "
            "embedding do not divide; choose a multiple"
        )


def check_invariant(numerics: str, adapter: lora.Adapter, layout: Layout, mesh: str) -> None:
    """Raises ValueError for factors at the head, or cut by tensor shards, in invariant numerics; `numerics`
    and `mesh` are fields of the config."""
    if lora.HEAD in dict(adapter.ranks):
        raise ValueError(
            f"model.lora targets the head, which {numerics} = 'invariant' does not support; leave "
            "it out of targets"
        )
    count = layout.mesh.shape["tensor"]
    if count > 1:
        raise ValueError(
            f"model.lora with {numerics} = 'invariant' needs whole factors on a device, and "
            f"{mesh} has {count} tensor shards; set its tensor entry to 1"
        )


def _check_routers(correction: Correction, model: ModelConfig) -> None:
    """Raises ValueError for settings of routers that the model does not have."""
    if correction.routing != "none" and model.moe is None:
        raise ValueError(
            f"correction.routing = {correction.routing!r} replays routes, and the model has no "
            "experts; set it to 'none'"
        )
    if (correction.load_balance_coeff or correction.router_z_coeff) and model.moe is None:
        raise ValueError(
            f"correction.load_balance_coeff = {correction.load_balance_coeff} and "
            f"correction.router_z_coeff = {correction.router_z_coeff} are losses of routers, and "
            "the model has no experts; set them to 0"
        )
    if correction.router_bias_rate and not (model.moe and model.moe.has_bias):
        raise ValueError(
            "optimizer.freeze_router_bias = False moves the bias of routers with sigmoid scores, "
            "and the model has none; set it to True"
        )


def _check_logits(
    config: ml_collections.ConfigDict, correction: Correction, vocab_size: int
) -> None:
    """Raises ValueError for a method that keeps more than MAX_LOGITS numbers of every rollout
    batch."""
    needs = {f: user for f, user in correction.needs.items() if "vocabulary" in FIELDS[f].axes}
    rows = config.rollout.prompts * config.rollout.group_size + fork_rows(config)
    count = len(needs) * rows * max_length(config) * vocab_size
    if count > MAX_LOGITS:
        users = " and ".join(repr(user) for user in dict.fromkeys(needs.values()))
        raise ValueError(
            f"{users} needs {', '.join(needs)} of every token, {count:,} numbers per batch, and at "
            f"most {MAX_LOGITS:,} are allowed; lower rollout.prompts, rollout.group_size or "
            "rollout.max_new_tokens"
        )
