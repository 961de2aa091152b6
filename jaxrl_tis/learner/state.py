"""The trained state of a run, a dict:

* "policy": a TrainState;
* "critic": a TrainState, with GAE;
* "reference": parameters, with a KL term;
* "base": parameters, with LoRA. The policy and the critic then hold factors, and the base is the
  reference too: it is one copy;
* "controllers": their states, if one has a state;
* "ewma": an average of the policy, if it replaces older policies;
* "drafter": a DrafterState, if engine.drafter is trained.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from jaxrl_tis import models
from jaxrl_tis.learner import control
from jaxrl_tis.learner.optimizer import optimizer_shardings
from jaxrl_tis.learner.setup import LearnerSetup, check_adapter
from jaxrl_tis.learner.snapshots import Average
from jaxrl_tis.learner.step import TrainState
from jaxrl_tis.models import lora, peft, peft_config, placement, quant, transformer, transforms
from jaxrl_tis.record.checkpoint import Checkpoints
from jaxrl_tis.record.provenance import date, saved
from jaxrl_tis.runtime import hub, processes, storage
from jaxrl_tis.sharding import HOST_MEMORY


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DrafterState:
    """The drafter as it is trained, and the policy's version when it was made, int32."""

    network: TrainState
    version: Any


def abstract_state(setup: LearnerSetup) -> dict[str, Any]:
    """Returns the state's shapes, dtypes and shardings, without its values."""
    whole, shardings = abstract_params(setup), placement.shardings(setup.layout, setup.model)
    params, of_base = whole, shardings
    if setup.adapter is not None:
        params = placement.abstract_factors(setup.adapter)
        shardings = placement.of_factors(setup.layout, setup.adapter)
    replicated = setup.layout.replicated()
    place = lambda tree, where: jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where
    )

    def network(params, shardings, tx, is_offloaded):
        opt, kind = jax.eval_shape(tx.init, params), HOST_MEMORY if is_offloaded else "device"
        moments = jax.tree.map(lambda s: s.with_memory_kind(kind), shardings)
        opt_shardings = optimizer_shardings(tx, params, moments, replicated)
        return TrainState(place(params, shardings), place(opt, opt_shardings))

    config = setup.config
    state = {"policy": network(params, shardings, setup.optimizer, config.optimizer.offload)}
    if setup.has_critic:
        value = jax.ShapeDtypeStruct((setup.model.embed_dim,), jnp.float32)
        state["critic"] = network(
            {"decoder": params, "value": value},
            {"decoder": shardings, "value": replicated},
            setup.critic_optimizer, config.critic.offload,
        )
    constant = jax.eval_shape(lambda params: frozen(setup.learner.program, params), whole)
    if setup.adapter is not None:
        state["base"] = place(constant, of_base)
    elif setup.correction.kl is not None:
        kind = HOST_MEMORY if config.correction.offload_reference else "device"
        state["reference"] = place(constant, placement.shardings(setup.layout, setup.model, kind))
    if setup.averages_policy:
        average = jax.eval_shape(Average.of, params)
        state["ewma"] = place(average, Average(shardings, replicated))
    states = jax.eval_shape(lambda: control.init(setup.correction))
    if states:
        state["controllers"] = place(states, jax.tree.map(lambda _: replicated, states))
    if setup.drafter is not None:
        model = setup.drafter.config
        own = transformer.abstract_params(model, config.model.param_dtype)
        state["drafter"] = DrafterState(
            network(own, placement.shardings(setup.layout, model), setup.drafter_optimizer, False),
            jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated),
        )
    return state


def abstract_params(setup: LearnerSetup) -> Any:
    """Returns the shapes of all of the model's parameters, in the dtype that they are read in."""
    return transformer.abstract_params(setup.model, setup.config.model.param_dtype)


def policy(setup: LearnerSetup, state: dict[str, Any]) -> Any:
    """Returns the parameters of the policy: adapted ones with LoRA."""
    return joined(setup, state, state["policy"].params)


def joined(setup: LearnerSetup, state: dict[str, Any], trained: Any) -> Any:
    """Returns the parameters of a network from the trained ones, see `Learner.joined`."""
    return setup.learner.joined(trained, base(state))


def base(state: dict[str, Any]) -> Any:
    """Returns the base of an adapter; None without one."""
    return state.get("base")


def initial_params(setup: LearnerSetup) -> Any:
    """Returns the parameters of the checkpoint at model.path, or random ones, in the training
    layout."""
    config, shardings = setup.config.model, placement.shardings(setup.layout, setup.model)
    if config.path:
        return models.load(config.path, shardings, config.param_dtype)[1]
    init = lambda key: transformer.cast(transformer.init(setup.model, key), config.param_dtype)
    return jax.jit(init, out_shardings=shardings)(jax.random.key(setup.config.seed))


def frozen(program: transformer.Program, params: Any) -> Any:
    """Returns the reference, or the base of LoRA: the policy in the dtypes of the learner's products.
    The KL between the two then starts at exactly 0.

    Products in bfloat16 round a matrix to it, so a reference for them holds half the bytes. All
    other numbers keep the dtype of the policy: norms, routers, an output head at full precision,
    matrices that are quantised.
    """
    heads = ("embed", "head")

    def leaf(path, x):
        name = path[-1].key
        is_matrix = name in heads or name in quant.QUANTIZED
        is_rounded = not (program.fp32_head if name in heads else program.quantization.covers(name))
        is_rounded &= is_matrix and program.dtype == "bfloat16"
        # A copy in any case, as the updates donate the policy's buffers.
        return jnp.copy(x.astype(program.dtype) if is_rounded else x)

    return jax.tree_util.tree_map_with_path(leaf, params)


def starting_factors(setup: LearnerSetup) -> Any:
    """Returns the factors in the folder model.adapter, in the training layout; None without one.

    Raises:
      FileNotFoundError, ValueError: see `peft.load`.
      ValueError: they have other ranks, scales or targets than model.lora, or some cannot train.
    """
    path = setup.config.model.adapter
    if not path:
        return None
    found, factors = _read_adapter(setup, path)
    for what, of in (("rank", "ranks"), ("s = alpha / rank", "scales")):
        theirs, own = dict(getattr(found, of)), dict(getattr(setup.adapter, of))
        choice = f"model.lora = {setup.config.model.lora!r}"
        if theirs.keys() != own.keys():
            raise ValueError(
                f"{path} adapts {', '.join(theirs)}, and {choice} adapts {', '.join(own)}; set its "
                f"targets to {','.join(theirs)!r}"
            )
        for name, value in own.items():
            if not math.isclose(theirs[name], value, rel_tol=1e-6):
                raise ValueError(
                    f"{path} has {what} {theirs[name]:g} at {name}, and {choice} has {value:g} there; "
                    "make them agree"
                )
    pairs = jax.tree_util.tree_leaves_with_path(factors, is_leaf=lambda x: "a" in x)
    for at, pair in pairs:
        idle = ~(pair["a"].any(axis=-2) | pair["b"].any(axis=-1))
        if idle.any():
            name = jax.tree_util.keystr(at, simple=True, separator=".")
            raise ValueError(
                f"{path} lacks {idle.sum()} of the {idle.size} ranks of {name}, all layers together, "
                "and factors of zeros do not train; start from an adapter with one rank in all layers"
            )
    assert setup.adapter is not None
    shardings = placement.of_factors(setup.layout, setup.adapter)
    return jax.tree.map(_put, factors, shardings)


def initial_state(setup: LearnerSetup, params: Any, factors: Any = None) -> dict[str, Any]:
    """Makes the state at step 0. The policy is folded by `model.uaq_scale`; critic and reference start
    as copies of it. With LoRA the critic starts as fresh factors, and so does the policy without
    model.adapter.

    Args:
      factors: those of `starting_factors`, read here if they are None.
    """
    factors = starting_factors(setup) if factors is None else factors
    if factors is not None:
        peft.check_head(setup.config.model.adapter, lambda: setup.layout.fetch(params["head"]))
    shardings = jax.tree.map(lambda s: s.sharding, abstract_state(setup))
    on_device = jax.tree.map(lambda s: s.with_memory_kind("device"), shardings)

    def make(params, factors):
        state = {}
        if setup.adapter is not None:
            state["base"] = frozen(setup.learner.program, params)
            params = _fresh_factors(setup, "policy") if factors is None else factors
        elif setup.config.model.uaq_scale != 1:
            params = transforms.fold(params, setup.config.model.uaq_scale)
        state["policy"] = TrainState(params, setup.optimizer.init(params))
        if setup.has_critic:
            # A copy, not the same buffers: each network's update donates its own.
            decoder = jax.tree.map(jnp.copy, params)
            if setup.adapter is not None:
                decoder = _fresh_factors(setup, "critic")
            critic = {"decoder": decoder, "value": jnp.zeros((setup.model.embed_dim,))}
            state["critic"] = TrainState(critic, setup.critic_optimizer.init(critic))
        if setup.correction.kl is not None and setup.adapter is None:
            state["reference"] = frozen(setup.learner.program, params)
        if setup.averages_policy:
            state["ewma"] = Average.of(params)
        if states := control.init(setup.correction):
            state["controllers"] = states
        return state

    of_drafter = {} if setup.drafter is None else {"drafter": initial_drafter(setup)}
    shardings, on_device = ({n: x for n, x in s.items() if n not in of_drafter} for s in (shardings, on_device))
    made = jax.jit(make, out_shardings=on_device)(params, factors)
    return jax.device_put(made, shardings) | of_drafter


def initial_drafter(setup: LearnerSetup) -> DrafterState:
    """Returns the model of engine.drafter as its training begins."""
    assert setup.drafter is not None
    places = jax.tree.map(lambda s: s.sharding, abstract_state(setup)["drafter"])
    config = setup.config
    params = models.load(config.engine.drafter, places.network.params, config.model.param_dtype)[1]
    make = lambda p: DrafterState(TrainState(p, setup.drafter_optimizer.init(p)), jnp.int32(0))
    return jax.jit(make, out_shardings=places)(params)


def initial_policy(setup: LearnerSetup) -> Any:
    """Returns the policy's parameters at step 0, without a warm-up."""
    factors = starting_factors(setup)
    return policy(setup, initial_state(setup, initial_params(setup), factors))


FACTOR_STREAMS = {"policy": 0x6C6F7261, "critic": 0x6C6F7262}  # apart from the run's other draws


def _fresh_factors(setup: LearnerSetup, network: str) -> Any:
    key = jax.random.fold_in(jax.random.key(setup.config.seed), FACTOR_STREAMS[network])
    assert setup.adapter is not None
    return setup.adapter.init(abstract_params(setup), key)


BASE = "base"  # folder of a run with the base of LoRA


def keep_base(setup: LearnerSetup, state: dict[str, Any], workdir: str) -> None:
    """Writes the base of LoRA to WORKDIR/base, in place of that of a start that saved no state."""
    if setup.adapter is not None:
        folder = _base_folder(workdir)
        processes.first(lambda: folder.rmtree() if folder.exists() else None)
        with Checkpoints(folder, keep=1) as checkpoints:
            checkpoints.save(0, {BASE: state["base"]}, {})


def read_base(setup: LearnerSetup, workdir: str | os.PathLike) -> Any:
    """Reads what `keep_base` wrote. FileNotFoundError where there is none."""
    with Checkpoints(_base_folder(workdir), keep=1) as checkpoints:
        return checkpoints.restore({BASE: abstract_state(setup)[BASE]})[0][BASE]


def _base_folder(workdir: str | os.PathLike) -> Any:
    return storage.folder(workdir) / BASE


def is_run(path: str) -> bool:
    """Whether a path is the folder of a run with checkpoints, as opposed to a model."""
    return not hub.is_hub(path) and (storage.folder(path) / "checkpoints").is_dir()


def as_begun(config: ml_collections.ConfigDict, path: str) -> ml_collections.ConfigDict:
    """Returns the config with the date and the commits of hub files of the run at `path`, for equal
    prompts. A model's path leaves the config unchanged."""
    if not is_run(path):
        return config
    values = hub.replaced(config.to_dict(), saved(path, "pins") or {})
    values["task"]["date"] = date(values, path)
    return ml_collections.ConfigDict(values)


def with_adapter(setup: LearnerSetup, read: Callable[[], Any], folder: str | None) -> Any:
    """Returns the parameters read() with the adapter in a folder of PEFT; None leaves them unchanged.
    An adapter that does not fit is refused before `read`, and one that names another base is a
    warning."""
    if folder is None:
        return read()
    adapter, factors = _read_adapter(setup, folder)
    params = read()
    base = lora.split(params)[1] or params
    peft.check_head(folder, lambda: setup.layout.fetch(base["head"]))
    return adapter.join(base, jax.tree.map(_put, factors, placement.of_factors(setup.layout, adapter)))


def _read_adapter(setup: LearnerSetup, path: str) -> tuple[lora.Adapter, Any]:
    """Reads an adapter that fits the learner, onto the host. One of another base is a warning."""
    if why := peft_config.other_base(path, setup.config.model.path):
        processes.report(f"warning: {why}", sys.stderr)
    adapter, factors = peft.load(path, setup.model)
    check_adapter(adapter, setup.learner.program, setup.layout)
    return adapter, factors


def _put(x: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Places an array that every process holds."""
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def read_params(setup: LearnerSetup, path: str, step: int | None = None) -> Any:
    """Reads the policy's parameters in a run's newest checkpoint, or that of `step`, or those of a
    model folder or .gguf file, in the training layout.

    Raises FileNotFoundError or ValueError where there are none, or not those of this model.
    """
    if is_run(path):
        with Checkpoints(path, keep=1) as checkpoints:
            wanted = {"policy": {"params": abstract_state(setup)["policy"].params}}
            trained = checkpoints.restore(wanted, step, is_part=True)[0]["policy"]["params"]
        return setup.learner.joined(trained, read_base(setup, path) if setup.adapter else None)
    if step is not None:
        raise ValueError(f"{path} is no run, and has no step {step}; leave out the step")
    found = models.read_config(path)
    if found != setup.model:
        raise ValueError(
            f"{path} holds another model than the config: {found}, and the config has "
            f"{setup.model}; use a checkpoint of the same model"
        )
    shardings = placement.shardings(setup.layout, setup.model)
    return models.load(path, shardings, setup.config.model.param_dtype)[1]
