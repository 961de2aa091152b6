"""From a config to everything that a run needs before its first step: programs, layouts, state."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from jaxrl_tis import control, correction, models, optimizer, sharding
from jaxrl_tis import batch as batching
from jaxrl_tis import step as steps
from jaxrl_tis.data.tokenizer import check_tokenizer, load_tokenizer
from jaxrl_tis.engine.drafts import Drafts
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.policies import POLICIES
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.engine.scheduler import Retention, Scheduler
from jaxrl_tis.models import invariant, placement, quant, transformer, transforms
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from jaxrl_tis.validate import validate

MAX_LOGITS = 2**28  # 1 GiB in float32


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything of a run that does not change while it runs.

    `learner` takes rows of one sequence; `packer`, if any, is how the updates' rows are filled.
    `engine` samples, `learner_engine` generates with the learner's own numerics for evaluation.
    """

    config: ml_collections.ConfigDict
    tokenizer: Any
    model: ModelConfig
    layout: sharding.Layout
    learner: steps.Learner
    packer: batching.Packer | None
    correction: correction.Correction
    optimizer: Any
    critic_optimizer: Any
    engine: Engine
    learner_engine: Engine

    @property
    def has_critic(self) -> bool:
        return "values" in self.correction.needs

    @property
    def row_length(self) -> int:
        return self.engine.max_length

    @property
    def retention(self) -> Retention | None:
        """Pages that the sequences of `engine` keep; None if all."""
        sinks, window = self.config.engine.retention
        return Retention(sinks, window) if window else None

    def rows(self, trajectories: list[Trajectory]) -> dict[str, np.ndarray]:
        """Records of `engine` as rows, see batch.rows."""
        return batching.rows(trajectories, self.row_length, self.retention is not None)

    def micro_batches(self, rows: dict[str, np.ndarray]):
        """(what a log-prob takes, in micro-batches of the learner's layout; function from results
        [M,R,T,...] to rows [N,T,...])."""
        forward = batching.forward_fields(rows)
        if self.packer is None:
            size = self.config.train.microbatch_rows
            micro = {name: x.reshape(-1, size, *x.shape[1:]) for name, x in forward.items()}
            flat = lambda x: np.asarray(x).reshape(-1, *x.shape[2:])
        else:
            packing = self.packer.plan(batching.sequence_lengths(rows))
            micro = packing.pack(forward)
            flat = lambda x: packing.unpack(np.asarray(x), self.row_length)
        return self.layout.put_batch(micro), flat

    def scheduler(self, engine: Engine, params: Any, version: int, **options) -> Scheduler:
        """Of one of the engines, with these serving parameters; see Scheduler for more options."""
        config, drafts = self.config.engine, None
        retention = self.retention if engine is self.engine else None
        if config.max_draft:
            drafts = Drafts(engine.slots, config.max_draft, config.free_rows)
        return Scheduler(
            engine, params, version, policy=POLICIES[config.policy](),
            max_bypass=config.max_bypass or None, prefill_calls=config.prefill_calls,
            divide=config.divide, retention=retention, drafts=drafts, **options,
        )

    @property
    def update_learner(self) -> steps.Learner:
        """The learner on the rows of the updates."""
        if self.packer is None:
            return self.learner
        return dataclasses.replace(
            self.learner, max_targets=self.packer.length, max_segments=self.packer.max_segments
        )


def build(config: ml_collections.ConfigDict, **sampler) -> Setup:
    """Checks the config, reads the tokenizer and the model's shape, and makes the programs.

    `sampler` are further arguments of the Engine that samples.
    """
    validate(config)
    model = models.read_config(config.model.path) if config.model.path else None
    tokenizer = load_tokenizer(config.task.tokenizer or config.model.path)
    model = model or small_model(config, tokenizer.vocab_size)
    check_tokenizer(tokenizer, model.vocab_size)
    return assemble(config, model, tokenizer, **sampler)


def assemble(
    config: ml_collections.ConfigDict, model: ModelConfig, tokenizer: Any,
    devices: list | None = None, **sampler,
) -> Setup:
    """The programs of a checked config on `devices` (default: those of this machine), which need
    not exist: see jaxrl_tis.aot. `sampler` are further arguments of the Engine that samples."""
    chosen = correction.parse(config.correction)
    _check_logits(config, chosen, model.vocab_size)
    place = functools.partial(sharding.layout, devices=devices, vocab_size=model.vocab_size)
    layout = place(config.mesh.train, sharding.TRAIN_RULES)
    serving = place(config.mesh.serve, sharding.SERVE_RULES)
    for mesh in (layout.mesh, serving.mesh):
        placement.check_tensor_parallel(model, mesh.shape["tensor"])
    program = transformer.Program(
        config.model.dtype, config.model.remat, config.model.highest_head, layout,
        quant.Recipe(config.model.quantization, tuple(config.model.unquantized)),
        config.model.numerics,
    )
    if program.is_invariant:
        invariant.check(model, dict(layout.mesh.shape), program.quantization.scheme)
    learner = steps.Learner(
        model, program, config.rollout.max_new_tokens, config.train.logprob_chunk
    )
    updates = config.steps * config.train.epochs * config.train.minibatches
    policy_optimizer = optimizer.make(config.optimizer, updates)
    for name, parameters in chosen.controllers:
        if name == "gradient_alignment":
            policy_optimizer = optimizer.aligned(policy_optimizer, **parameters)
    max_length = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    packer = None
    if config.train.pack_length:
        packer = batching.Packer.of(
            config.train.pack_length, max_length, config.train.microbatch_rows, layout.shards,
            layout.mesh.shape["context"],
        )
        # Rows of one sequence are max_length wide, which packed rows do not know.
        chosen = dataclasses.replace(chosen, scale=chosen.scale or float(max_length))
    engine = functools.partial(
        Engine, model, slots=config.engine.slots, max_length=max_length,
        highest_head=config.model.highest_head, steps=config.engine.steps_per_call,
        max_draft=config.engine.max_draft,
        page_size=config.engine.page_size, num_pages=config.engine.num_pages or None,
        prefill_batch=config.engine.prefill_batch, prefill_chunk=config.engine.prefill_chunk,
        unroll=config.engine.unroll, layout=serving, numerics=config.model.numerics,
    )
    return Setup(
        config, tokenizer, model, layout, learner, packer, chosen,
        policy_optimizer, optimizer.make(config.critic, updates),
        engine=engine(
            dtype=config.engine.dtype, cache_dtype=config.engine.cache_dtype,
            quantization=config.engine.quantization, unquantized=config.engine.unquantized,
            records_logits="logits_behav" in chosen.needs,
            num_kept=config.rollout.kept_set, **sampler,
        ),
        learner_engine=engine(
            dtype=config.model.dtype, cache_dtype=config.model.dtype,
            quantization=config.model.quantization, unquantized=config.model.unquantized,
        ),
    )


def _check_logits(config, chosen: correction.Correction, vocab_size: int) -> None:
    """ValueError where a method keeps more than MAX_LOGITS numbers of every rollout batch."""
    needs = {f: user for f, user in chosen.needs.items() if f.startswith("logits")}
    tokens = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    rows = config.rollout.prompts * config.rollout.group_size
    count = len(needs) * rows * tokens * vocab_size
    if count > MAX_LOGITS:
        users = " and ".join(repr(user) for user in dict.fromkeys(needs.values()))
        raise ValueError(
            f"{users} needs {', '.join(needs)} of every token: {count:,} numbers a batch, where "
            f"{MAX_LOGITS:,} are allowed; it is for small vocabularies and short responses"
        )


def small_model(config: ml_collections.ConfigDict, vocab_size: int) -> ModelConfig:
    """The model whose shape the config spells, for a run without a checkpoint."""
    m = config.model
    return ModelConfig(
        family="llama", vocab_size=vocab_size, embed_dim=m.embed_dim,
        num_layers=m.num_layers, num_heads=m.num_heads, num_kv_heads=m.num_kv_heads,
        head_dim=m.head_dim, mlp_dim=m.mlp_dim, rope=RopeConfig("default", m.rope_theta),
        max_position=m.max_position, norm_eps=1e-6, qkv_bias=False, qk_norm=False,
        tie_embeddings=m.tie_embeddings,
    )


# State: {"policy": TrainState, "critic": TrainState with GAE, "reference": params with a KL term,
# "controllers": their states, where the config names one that has a state}


def abstract_state(setup: Setup) -> dict[str, Any]:
    """The state's shapes, dtypes and shardings, without its values."""
    shardings = placement.shardings(setup.layout, setup.model)
    params = transformer.abstract_params(setup.model, setup.config.model.param_dtype)
    replicated = setup.layout.replicated()
    place = lambda tree, where: jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where
    )

    def network(params, shardings, tx):
        opt = jax.eval_shape(tx.init, params)
        opt_shardings = optimizer.state_shardings(tx, params, shardings, replicated)
        return steps.TrainState(place(params, shardings), place(opt, opt_shardings))

    state = {"policy": network(params, shardings, setup.optimizer)}
    if setup.has_critic:
        value = jax.ShapeDtypeStruct((setup.model.embed_dim,), jnp.float32)
        state["critic"] = network(
            {"decoder": params, "value": value},
            {"decoder": shardings, "value": replicated},
            setup.critic_optimizer,
        )
    if setup.correction.kl is not None:
        bf16 = transformer.abstract_params(setup.model, "bfloat16")
        kind = "pinned_host" if setup.config.correction.offload_reference else "device"
        state["reference"] = place(bf16, placement.shardings(setup.layout, setup.model, kind))
    states = jax.eval_shape(lambda: control.init(setup.correction))
    if states:
        state["controllers"] = place(states, jax.tree.map(lambda _: replicated, states))
    return state


def abstract_rows(setup: Setup) -> dict[str, jax.ShapeDtypeStruct]:
    """Fields [N,...] of a rollout batch as the sampler leaves it."""
    nothing = np.zeros(0, np.int32)
    trajectory = Trajectory(
        id="", prompt=np.zeros(1, np.int32), tokens=nothing, mask=nothing, turn=nothing,
        logp_behav=nothing, logp_raw=nothing, entropy=nothing, version=nothing, stop_reason="",
        seed=0, request=0, quant_id="", temperature=1.0,
        logits=np.zeros((0, setup.engine.num_logits), np.float32),
        kept=np.zeros((0, setup.engine.num_kept), np.int32),
    )
    count = setup.config.rollout.prompts * setup.config.rollout.group_size
    rows = setup.rows([trajectory])
    return {n: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype) for n, x in rows.items()}


def abstract_microbatches(setup: Setup) -> dict[str, jax.ShapeDtypeStruct]:
    """Fields [M,R,T] of a rollout batch that the learner scores, in the training layout."""
    rows = abstract_rows(setup)
    return _in_rows(setup, batching.forward_fields(rows), 1)


def abstract_minibatch(setup: Setup) -> dict[str, jax.ShapeDtypeStruct]:
    """Fields [M,R,T,...] of one update, in the training layout."""
    rows, needs = abstract_rows(setup), setup.correction.needs.keys()
    count, length = rows["mask"].shape
    struct = lambda dtype, *shape: jax.ShapeDtypeStruct((count, *shape), dtype)
    scored = {"logp_learner", "entropy"} | {"sum_pi_squared"} & needs
    scored |= {"values"} if setup.has_critic else set()
    scored |= {"logp_ref"} if setup.correction.kl is not None else set()
    rows |= dict.fromkeys(scored, struct("float32", length))
    rows |= dict.fromkeys({"rewards"} | {"greedy_rewards", "grad_norms"} & needs, struct("float32"))
    rows["group"] = struct("int32")
    rows |= {n: struct(x.dtype, *x.shape[1:]) for n, x in batching.update_fields(1, 1, 0).items()}
    rows |= jax.eval_shape(correction.make_prepare(setup.correction), rows)[0]
    rows["group"] = struct("int32", length)
    left_out = (*setup.correction.not_in_update, *batching.OF_SEQUENCES)
    kept = {name: x for name, x in rows.items() if name not in left_out}
    return _in_rows(setup, kept, setup.config.train.minibatches)


def _in_rows(setup: Setup, rows: dict, parts: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Fields [N,...] of sequences as the run lays N / parts of them into micro-batches."""
    size, packer = setup.config.train.microbatch_rows, setup.packer

    def place(x):
        count, shape = x.shape[0] // parts, x.shape[1:]
        if packer is None:
            shape = (count // size, size, *shape)
        else:
            is_of_token = shape and shape[0] > 1
            shape = (packer.length, *shape[1:]) if is_of_token else shape
            shape = (packer.num_microbatches(count), size, *shape)
        sharding_of = setup.layout.sharding(sharding.batch_axes(shape))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding_of)

    return {name: place(x) for name, x in rows.items()}


def initial_params(setup: Setup) -> Any:
    """The checkpoint at model.path, or random values, in the training layout."""
    config, shardings = setup.config.model, placement.shardings(setup.layout, setup.model)
    if config.path:
        return models.load(config.path, shardings, config.param_dtype)[1]
    init = lambda key: jax.tree.map(
        lambda x: x.astype(config.param_dtype), transformer.init(setup.model, key)
    )
    return jax.jit(init, out_shardings=shardings)(jax.random.key(setup.config.seed))


def initial_state(setup: Setup, params: Any) -> dict[str, Any]:
    """State at step 0: the critic and the reference start as copies of the policy, which is
    folded by `model.uaq_scale`."""
    shardings = jax.tree.map(lambda s: s.sharding, abstract_state(setup))
    on_device = jax.tree.map(lambda s: s.with_memory_kind("device"), shardings)

    def make(params):
        if setup.config.model.uaq_scale != 1:
            params = transforms.fold(params, setup.config.model.uaq_scale)
        state = {"policy": steps.TrainState(params, setup.optimizer.init(params))}
        if setup.has_critic:
            # A copy, not the same buffers: each network's update donates its own.
            critic = {
                "decoder": jax.tree.map(jnp.copy, params),
                "value": jnp.zeros((setup.model.embed_dim,)),
            }
            state["critic"] = steps.TrainState(critic, setup.critic_optimizer.init(critic))
        if setup.correction.kl is not None:
            state["reference"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        if states := control.init(setup.correction):
            state["controllers"] = states
        return state

    return jax.device_put(jax.jit(make, out_shardings=on_device)(params), shardings)
