"""From a config to everything of a run that does not change while it runs: its `Setup`."""

import dataclasses
import functools
import hashlib
import math
import sys
from typing import Any

import jax
import ml_collections
import numpy as np

from jaxrl_tis import models, sharding
from jaxrl_tis.data.tokenizer import check_tokenizer
from jaxrl_tis.data.tokenizer_files import load_tokenizer
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.drafts import Drafts
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.policies import POLICIES
from jaxrl_tis.engine.records import MAX_STOP_IDS, Trajectory
from jaxrl_tis.engine.residency import Retention
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.estimators import centering
from jaxrl_tis.fields import FIELDS
from jaxrl_tis.learner import snapshots
from jaxrl_tis.learner.batch_layout import Packer, forward_fields, sequence_lengths, trajectory_rows
from jaxrl_tis.learner.correction import Correction
from jaxrl_tis.learner.optimizer import align, make_optimizer, perturb, scaled_for, total_updates
from jaxrl_tis.learner.scoring import Learner
from jaxrl_tis.models import invariant, placement, quant, transformer, transforms
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from jaxrl_tis.rollouts import modes, replay
from jaxrl_tis.runtime import fingerprint, processes
from jaxrl_tis.validate import validate

MAX_LOGITS = 2**28  # 1 GiB in float32
OWN_SIZES = ("slots", "num_pages", "prefill_batch")  # that each rollout worker may choose for itself
PROBED = 4096  # tokens whose texts tell a tokenizer from others


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything of a run that does not change while it runs.

    `mode` says who runs ahead of whom.
    `learner` takes rows of one sequence; `packer`, if any, is how the updates' rows are filled.
    `engine` samples, and so do all of `engines`, of which it is the first: one for each worker that
    has devices of its own, or it alone. `learner_engine` generates with the learner's own numerics
    for evaluation.
    """

    config: ml_collections.ConfigDict
    mode: modes.Mode
    tokenizer: Any
    model: ModelConfig
    layout: sharding.Layout
    learner: Learner
    packer: Packer | None
    correction: Correction
    optimizer: Any
    critic_optimizer: Any
    engines: tuple[Engine, ...]
    learner_engine: Engine

    @property
    def engine(self) -> Engine:
        return self.engines[0]

    @property
    def is_apart(self) -> bool:
        """Whether the samplers have devices of their own."""
        learning, serving = (x.mesh.devices.flat for x in (self.layout, self.engine.layout))
        return set(learning).isdisjoint(serving)

    @property
    def staleness(self) -> float:
        """The most versions that a token is behind the policy that trains on it, replayed or not."""
        return replay.oldest(self.config.rollout)

    @property
    def why_scored(self) -> str | None:
        """Why a rollout batch is scored before it is trained on, and not within its update."""
        train = self.config.train
        if train.fuse_score == "never":
            return "train.fuse_score is never"
        if self.staleness:
            return "tokens can be of older weights than those that the update starts from"
        if (updates := train.minibatches * train.epochs) > 1:
            return f"a rollout batch gets {updates} updates"
        return self.correction.why_scored

    @property
    def has_stand_in(self) -> bool:
        """Whether another policy stands in for those that drew tokens: logp_old is logp_prox."""
        return self.staleness > 0 and self.config.rollout.old_logp in snapshots.STAND_INS

    @property
    def averages_policy(self) -> bool:
        """Whether it is an average of the policy, which the state then holds."""
        return self.has_stand_in and self.config.rollout.old_logp == "ewma"

    @property
    def has_critic(self) -> bool:
        return "values" in self.correction.needs

    @property
    def row_length(self) -> int:
        return self.engine.max_length

    @property
    def retention(self) -> Retention | None:
        """The pages that the sequences of `engine` keep; None if they keep all."""
        sinks, window = self.config.engine.retention
        return Retention(sinks, window) if window else None

    def rows(self, trajectories: list[Trajectory]) -> dict[str, np.ndarray]:
        """Lays records of `engine` into rows, see rows.trajectory_rows."""
        return trajectory_rows(trajectories, self.row_length, self.retention is not None)

    def micro_batches(self, rows: dict[str, np.ndarray], is_wanted: np.ndarray | None = None):
        """Cuts rows into micro-batches of the learner's layout. Returns (what a log-prob takes of
        them, a function that turns results [M,R,T,...] back into rows [N,T,...]).

        With `is_wanted` [N] results of the other rows are 0, and the first micro-batches hold those
        that are: the shapes stay, and with them the program, which skips the rest.
        """
        forward, order, place = forward_fields(rows), slice(None), slice(None)
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

    @property
    def facts(self) -> dict[str, Any]:
        """What has to be the same for a learner and its rollout workers, by name."""
        model, engine = map(dataclasses.asdict, (self.model, self.engine.config))
        found = {f"model.{name}": str(value) for name, value in model.items()}
        found |= {f"engine.{n}": str(x) for n, x in engine.items() if n not in OWN_SIZES}
        size = self.tokenizer.vocab_size
        texts = [self.tokenizer.decode([i]) for i in range(0, size, 1 + size // PROBED)]
        shown = repr((texts, size, self.tokenizer.eos_ids)).encode()
        return found | {"tokenizer": hashlib.sha256(shown).hexdigest()[:16]}

    def serving_params(self, params: Any, version: int) -> Any:
        """Makes what `engine` samples with: the policy of this version in the sampler's format,
        with the noise of that version."""
        e, noise = self.config.engine, None
        if e.noise_start:
            noise = transforms.noise(
                self.config.seed, version, self.config.steps, e.noise_start, e.noise_end,
                e.noise_stages,
            )
        return self.engine.load(params, noise)

    def served_params(self, params: Any, version: int) -> list[Any]:
        """Makes what each of `engines` samples with, each on its own devices; it is quantised once,
        where the policy lies."""
        first = self.serving_params(params, version)
        others = [jax.device_put(first, engine.serving_shardings) for engine in self.engines[1:]]
        sent = fingerprint.hex(fingerprint.digest(first)) if others else ""
        for served in others:
            fingerprint.check(served, sent)
        return [first, *others]

    def scheduler(self, engine: Engine, params: Any, version: int, **options) -> Scheduler:
        """Makes a scheduler for one of the engines with these serving parameters; `options` are
        further arguments of Scheduler."""
        config, drafts = self.config.engine, None
        retention = self.retention if engine is self.engine else None
        if config.max_draft:
            drafts = Drafts(engine.slots, config.max_draft, config.free_rows)
        return Scheduler(
            engine, params, version, policy=POLICIES[config.policy](),
            max_bypass=config.max_bypass or None, prefill_calls=config.prefill_calls,
            divide=config.divide, retention=retention, drafts=drafts, overlap=config.overlap,
            **options,
        )

    @property
    def update_learner(self) -> Learner:
        """The learner as the updates use it, on packed rows where the config packs them."""
        if self.packer is None:
            return self.learner
        return dataclasses.replace(
            self.learner, max_targets=self.packer.length, max_segments=self.packer.max_segments
        )


def build(config: ml_collections.ConfigDict, **sampler) -> Setup:
    """Checks the config, reads the tokenizer and the model's shape, and makes the programs.

    `sampler` are further fields of the EngineConfig of the engine that samples.
    """
    chosen = validate(config)
    model = models.read_config(config.model.path) if config.model.path else None
    tokenizer = load_tokenizer(
        config.task.tokenizer or config.model.path, config.task.template_kwargs.to_dict(),
        config.task.date,
    )
    model = model or small_model(config, tokenizer.vocab_size)
    check_tokenizer(tokenizer, model.vocab_size)
    if (count := len(tokenizer.eos_ids)) > MAX_STOP_IDS:
        raise ValueError(
            f"the tokenizer and the model's files name {count} end tokens, and the engine stops at "
            f"{MAX_STOP_IDS} at most: shorten eos_token_id in generation_config.json or config.json"
        )
    return assemble(config, chosen, model, tokenizer, **sampler)


def assemble(
    config: ml_collections.ConfigDict, chosen: Correction, model: ModelConfig, tokenizer: Any,
    devices: list | None = None, **sampler,
) -> Setup:
    """Makes the programs of a checked config.

    Args:
      chosen: its methods, as `validate` returns them.
      devices: where they run, by default those of this machine; they need not exist, see
        jaxrl_tis.aot.
      sampler: further fields of the EngineConfig of the engine that samples.
    """
    _check_logits(config, chosen, model.vocab_size)
    _check_positions(config, model)
    place = functools.partial(sharding.layout, devices=devices, vocab_size=model.vocab_size)
    layout = place(config.mesh.train, sharding.TRAIN_RULES, sum_dtype=config.train.sum_dtype)
    places = _serving_layouts(config, layout, devices, model.vocab_size)
    serving = places[0]
    if "grad_norms" in chosen.needs and layout.shards > 1:
        raise ValueError(
            f"{chosen.needs['grad_norms']!r} needs the gradient of each sequence by itself, which rows "
            f"cut over {layout.shards} devices do not give: set mesh.train to (1, 1, ...)"
        )
    for mesh in (layout.mesh, serving.mesh):
        placement.check_tensor_parallel(model, mesh.shape["tensor"])
    program = transformer.Program(
        config.model.dtype, config.model.remat, config.model.highest_head, layout,
        quant.Recipe(config.model.quantization, tuple(config.model.unquantized)),
        config.model.numerics,
    )
    if program.is_invariant:
        invariant.check(model, dict(layout.mesh.shape), program.quantization.scheme)
    learner = Learner(
        model, program, config.rollout.max_new_tokens, config.train.logprob_chunk
    )
    updates = total_updates(config)
    policy_optimizer = make_optimizer(config.optimizer, updates)
    controllers = dict(chosen.controllers)
    if "gradient_alignment" in controllers:
        policy_optimizer = align(policy_optimizer, **controllers["gradient_alignment"])
    if "layerwise_perturbation" in controllers:  # around that, which is to see the parameters alone
        parameters = controllers["layerwise_perturbation"]
        policy_optimizer = perturb(policy_optimizer, model.num_layers, **parameters)
    max_length = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    packer = None
    if config.train.pack_length:
        packer = Packer.of(
            config.train.pack_length, max_length, config.train.microbatch_rows, layout.shards,
            layout.mesh.shape["context"],
        )
        # Rows of one sequence are max_length wide, which packed rows do not know.
        chosen = dataclasses.replace(chosen, scale=chosen.scale or float(max_length))
    e = config.engine
    sizes = functools.partial(
        EngineConfig, slots=e.slots, max_length=max_length, page_size=e.page_size,
        num_pages=e.num_pages or None, highest_head=config.model.highest_head,
        steps=e.steps_per_call, max_draft=e.max_draft, prefill_batch=e.prefill_batch,
        prefill_chunk=e.prefill_chunk, unroll=e.unroll, numerics=config.model.numerics,
    )
    # Of a smaller vocabulary the head is all that a device has of it.
    top_n = min(
        centering.head_size(chosen.centering, config.rollout.kept_set),
        model.vocab_size // serving.count(serving.axes("vocab")),
    )
    sampling = sizes(
        dtype=e.dtype, cache_dtype=e.cache_dtype, quantization=e.quantization,
        unquantized=tuple(e.unquantized), records_logits="logits_behav" in chosen.needs,
        num_kept=config.rollout.kept_set, injected=e.injected, **{"top_n": top_n, **sampler},
    )
    evaluating = sizes(
        dtype=config.model.dtype, cache_dtype=config.model.dtype,
        quantization=config.model.quantization, unquantized=tuple(config.model.unquantized),
    )
    return Setup(
        config, modes.parse(config.rollout.mode), tokenizer, model, layout, learner, packer, chosen,
        scaled_for(program.dtype, policy_optimizer),
        scaled_for(program.dtype, make_optimizer(config.critic, updates)),
        tuple(Engine(model, sampling, place) for place in places), Engine(model, evaluating, serving),
    )


def _serving_layouts(config, training: sharding.Layout, devices: list | None, vocab_size: int):
    """Returns where samplers serve. With the driver "threads" each has devices of its own, after
    those that train; else all work on the first devices, the learner's.

    Raises:
      ValueError: there are too few devices, or several processes share them.
    """
    shape, rules = config.mesh.serve, sharding.SERVE_RULES
    if config.rollout.driver != "threads":
        return [sharding.layout(shape, rules, devices=devices, vocab_size=vocab_size)]
    if (count := jax.process_count()) > 1:
        raise ValueError(
            f"rollout.driver = 'threads' is for one process, and {count} share the devices: choose "
            "virtual"
        )
    devices, workers = devices or jax.devices(), config.rollout.workers
    free, each = devices[training.mesh.size :], math.prod(n for n in shape if n != -1)
    if workers * each > len(free):
        needed, is_cpu = training.mesh.size + workers * each, devices[0].platform == "cpu"
        flag = f", or set XLA_FLAGS=--xla_force_host_platform_device_count={needed}" if is_cpu else ""
        raise ValueError(
            f"rollout.driver = 'threads' trains on {training.mesh.size} devices and serves with "
            f"{workers} samplers on {each} others each, {needed} in all, and there are {len(devices)}: "
            f"make mesh.train, mesh.serve or rollout.workers smaller{flag}"
        )
    if -1 in shape:
        each = len(free) // workers
    parts = (free[i * each : (i + 1) * each] for i in range(workers))
    return [sharding.layout(shape, rules, devices=part, vocab_size=vocab_size) for part in parts]


def _check_logits(config, chosen: Correction, vocab_size: int) -> None:
    """Refuses with ValueError a method that keeps more than MAX_LOGITS numbers of every rollout
    batch."""
    needs = {f: user for f, user in chosen.needs.items() if "vocabulary" in FIELDS[f].axes}
    tokens = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    rows = config.rollout.prompts * config.rollout.group_size
    count = len(needs) * rows * tokens * vocab_size
    if count > MAX_LOGITS:
        users = " and ".join(repr(user) for user in dict.fromkeys(needs.values()))
        raise ValueError(
            f"{users} needs {', '.join(needs)} of every token: {count:,} numbers a batch, where "
            f"{MAX_LOGITS:,} are allowed; it is for small vocabularies and short responses"
        )


def _check_positions(config, model: ModelConfig) -> None:
    """Refuses with ValueError sequences that the model has no positions for, and says where it has
    them by extension alone."""
    length = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    try:
        doubt = model.check_length(length)
    except ValueError as error:
        field = "" if config.model.path else ", or raise model.max_position"
        raise ValueError(
            f"{error}: lower task.max_prompt_tokens = {config.task.max_prompt_tokens} or "
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens}{field}"
        ) from error
    if doubt:
        processes.say(f"warning: {doubt}", sys.stderr)


def small_model(config: ml_collections.ConfigDict, vocab_size: int) -> ModelConfig:
    """Returns the model whose shape the config spells out, for a run without a checkpoint."""
    m = config.model
    return ModelConfig(
        family="llama", vocab_size=vocab_size, embed_dim=m.embed_dim,
        num_layers=m.num_layers, num_heads=m.num_heads, num_kv_heads=m.num_kv_heads,
        head_dim=m.head_dim, mlp_dim=m.mlp_dim, rope=RopeConfig("default", m.rope_theta),
        max_position=m.max_position, norm_eps=1e-6, qkv_bias=False, qk_norm=False,
        tie_embeddings=m.tie_embeddings,
    )
