"""Splits the gap of learner and sampler into causes, by one change of settings at a time.

Every rung is a pair of log-probs of the same tokens by two programs that differ in one thing. All
but the last four are the learner's program over whole rows, with ever more of the sampler's settings:

  adapter           the learner's factors of LoRA -> the factors that the sampler serves, here and in
                    all that follow, beside the learner's base
  dtype             compute dtype, and the dtype in which the sampler keeps the norms
  excess_precision  XLA may keep results in more precision than the dtype's -> it may not, here and
                    in all that follow, so that another program is not also another rounding
  batch_shape       micro-batches as the learner takes them -> of one row for each part of the batch
  sequence_parallel rows cut over the training mesh's context axis -> whole rows
  tensor_parallel   the training mesh -> a mesh of the sampler's tensor-parallel degree
  weights           quantised weights, with the learner's treatment of activations: with "mxfp4" the
                    experts in 4 bits
  activations       quantised activations
  kv_dtype          keys and values as the cache stores them
  numerics          model.numerics -> engine.numerics: sums in the compiler's order, or in a fixed one;
                    the first rung where the learner's alone are invariant, whose program lacks some of
                    the sampler's settings
  route             the routers' own choice of experts -> the sampler's, as the engine recorded it
  pages             rows of whole sequences -> the sampler's prefill of whole sequences: its pages, tiles
                    and excess precision
  chunks            whole sequences -> chunks of engine.prefill_chunk tokens
  decode            prefill -> what the engine recorded: one token at a time
  filter            the whole distribution -> what the sampling filters kept of it, for tokens that
                    the learner does not score over their kept set

`route` is "same" for a dense model and without recorded routes. It is also "same" where
`correction.routing` is r3 or keep: the learner then replays the recorded routes on every rung, and
other experts are no part of its gap.

`pages` and `chunks` are "same" with experts, which prefill chooses anew, with recorded sampling sets and
with evicted keys. `decode` then has their parts. Cached pages are pages that a chunk wrote: they have no
rung.

`adapter` is "same" where the served factors have the bits of the learner's, and without LoRA. The
quantization of the base is in `weights` and `activations`.

The signed differences of the rungs add up to logp_old - logp_behav at every token.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis import sharding
from jaxrl_tis.build import Setup
from jaxrl_tis.diagnostics import divergences, mismatch
from jaxrl_tis.engine.records import SamplingParams, Trajectory
from jaxrl_tis.estimators import ratios
from jaxrl_tis.gate import pages
from jaxrl_tis.learner.batch_layout import without_replay
from jaxrl_tis.learner.scoring import make_score
from jaxrl_tis.models import lora, placement, quant
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.runtime import fingerprint

EXCESS_PRECISION = "xla_allow_excess_precision"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a program that scores rows; fields as in `Program`.

    Attributes:
      norm_dtype: dtype in which the scales of the norms are kept.
      excess_precision: the compiler's xla_allow_excess_precision.
      rows: of a micro-batch.
      replays: the sampler's routes, where the micro-batches have them.
    """

    dtype: str
    norm_dtype: str
    excess_precision: bool
    rows: int
    layout: sharding.Layout
    quantization: quant.Recipe
    kv_dtype: str | None = None
    numerics: str = "fast"
    replays: bool = False


@dataclasses.dataclass(frozen=True)
class Rung:
    """One cause of the gap: the log-probs [N,T] on its two sides, `before` nearer the learner.

    `is_same`: the config leaves no difference here, both sides are the same array.
    """

    cause: str
    before: np.ndarray
    after: np.ndarray
    is_same: bool

    @property
    def difference(self) -> np.ndarray:
        """The difference of the two sides [N,T], float64 in nats, without rounding."""
        return self.before.astype(np.float64) - self.after.astype(np.float64)


def learner_settings(setup: Setup) -> Settings:
    program = setup.training.learner.program
    options = program.compiler_options
    return Settings(
        program.dtype, setup.config.model.param_dtype,
        excess_precision=options is None or options[EXCESS_PRECISION],  # XLA allows it by default
        rows=setup.config.train.microbatch_rows, layout=setup.training.layout,
        quantization=program.quantization, numerics=program.numerics, replays=setup.training.correction.replays_routes,
    )


def changes(setup: Setup) -> dict[str, dict[str, Any]]:
    """Returns cause -> the fields of `Settings` that lead on to the sampler's, in the rungs'
    order."""
    engine, learner = setup.engine, learner_settings(setup)
    is_exact = engine.config.dtype == "float32"  # it holds every norm
    is_stored = engine.config.cache_dtype in ("float32", engine.config.dtype)
    numerics: dict[str, dict[str, Any]] = {"numerics": dict(numerics=engine.config.numerics)}
    is_alone = learner.numerics == "invariant" != engine.config.numerics
    return (numerics if is_alone else {}) | {
        "dtype": dict(
            dtype=engine.config.dtype,
            norm_dtype=learner.norm_dtype if is_exact else engine.config.dtype,
        ),
        # float32 results have nothing above them to be kept in.
        "excess_precision": dict(excess_precision=is_exact and learner.excess_precision),
        "batch_shape": dict(rows=setup.training.layout.shards),
        "sequence_parallel": dict(layout=_of_whole_rows(setup.training.layout)),
        "tensor_parallel": dict(layout=_serving_layout(setup)),
        "weights": dict(quantization=_weights_alone(learner.quantization, engine.config.recipe)),
        "activations": dict(quantization=engine.config.recipe),
        "kv_dtype": dict(kv_dtype=None if is_stored else engine.config.cache_dtype),
    } | numerics | {"route": dict(replays=learner.replays or engine.config.record_routes)}


def _of_whole_rows(layout: sharding.Layout) -> sharding.Layout:
    """Returns a training layout on as many of its devices as it needs to cut no row."""
    mesh = layout.mesh
    if mesh.shape["context"] == 1:
        return layout
    devices = mesh.devices.take([0], axis=mesh.axis_names.index("context"))
    return sharding.layout(devices.shape, layout.rules, list(devices.flat))


def _serving_layout(setup: Setup) -> sharding.Layout:
    """Returns the training layout, or that of the engine's degrees of tensor and expert parallelism
    if it has another tensor-parallel degree. Rows are then copied to each device, not cut."""
    mesh = setup.engine.layout.mesh
    degree, experts = mesh.shape["tensor"], mesh.shape["expert"]
    if degree == setup.training.layout.mesh.shape["tensor"]:
        return _of_whole_rows(setup.training.layout)
    devices, rules = list(mesh.devices.flat), setup.engine.layout.rules | {"batch": None}
    if mesh.is_multi_process:  # each has to take part
        return sharding.layout((-1, 1, degree, 1, experts), rules, devices)
    return sharding.layout((1, 1, degree, 1, experts), rules, devices[: degree * experts])


def _weights_alone(learner: quant.Recipe, sampler: quant.Recipe) -> quant.Recipe:
    """Returns the recipe of the sampler's weights with the learner's activations."""
    if sampler.scheme == "none":
        return sampler
    wanted = quant.SCHEMES[sampler.scheme]._replace(
        has_activations=quant.SCHEMES[learner.scheme].has_activations
    )
    schemes = (name for name, found in quant.SCHEMES.items() if found == wanted)
    scheme = next(schemes, sampler.scheme)  # MXFP4 has no quantized activations
    return dataclasses.replace(sampler, scheme=scheme)


def sampling_filters(setup: Setup) -> SamplingParams:
    """Returns the run's filters at temperature 1."""
    rollout = setup.config.rollout
    return SamplingParams(top_k=rollout.top_k, top_p=rollout.top_p, min_p=rollout.min_p)


def score(setup: Setup, settings: Settings, params: Any, micro: dict) -> np.ndarray:
    """Returns log-probs [M,R,T] of micro-batches, by the learner's program with these settings."""
    if not settings.replays:
        micro = without_replay(micro)
    program = dataclasses.replace(
        setup.training.learner.program, dtype=settings.dtype, layout=settings.layout,
        quantization=settings.quantization, kv_dtype=settings.kv_dtype, numerics=settings.numerics,
    )
    learner = dataclasses.replace(setup.training.update_learner, program=program)
    params = placement.put(_with_norms(params, settings.norm_dtype), settings.layout, setup.model)
    shape = micro["mask"].shape
    in_rows = lambda x: setup.training.layout.fetch(x).reshape(-1, settings.rows, *x.shape[2:])
    micro = settings.layout.put_batch(jax.tree.map(in_rows, micro))
    compiled = make_score(learner).lower(params, micro).compile(
        compiler_options={EXCESS_PRECISION: settings.excess_precision}
    )
    return settings.layout.fetch(compiled(params, micro)["logp"]).reshape(shape)


def _with_norms(params: Any, dtype: str) -> Any:
    is_norm = lambda path: jax.tree_util.keystr(path[-1:], simple=True).endswith("norm")
    cast = lambda path, x: x.astype(dtype) if is_norm(path) else x
    return jax.tree_util.tree_map_with_path(cast, params)


def _with_served_factors(setup: Setup, params: Any, served: Any) -> tuple[Any, bool]:
    """Returns (the learner's base with the factors of serving parameters, or the base alone if those
    have none; whether these are the learner's own factors, bit by bit)."""
    (_, base), (theirs, is_adapted) = lora.split(params), lora.split(served)
    if base is None:
        return params, True
    if is_adapted is None:
        return base, False
    adapter = lora.adapter_of(served, setup.model)
    digest = fingerprint.hex(fingerprint.digest(theirs))
    if adapter == lora.adapter_of(params, setup.model) and digest == setup.engine.factor_digest(params):
        return params, True
    return adapter.join(base, _stacked(theirs, setup.model)), False


def _stacked(factors: Any, model: ModelConfig) -> Any:
    """Returns served factors with stacked layers, see `transformer.unstack`."""
    layers = factors.get("layers", {})
    if not isinstance(layers, tuple):
        return factors
    stack = jax.jit(lambda *of_layers: jax.tree.map(lambda *x: jnp.stack(x), *of_layers))
    outer = {name: x for name, x in factors.items() if name != "layers"}
    stacks = {s: stack(*(layers[i] for i in indices)) for s, indices in model.stacks.items()}
    return outer | {s: of for s, of in stacks.items() if of}


def climb(
    setup: Setup, params: Any, trajectories: list[Trajectory], served: Any = None,
    heartbeat: Callable[[], None] = lambda: None,
) -> list[Rung]:
    """Returns the rungs from the learner's log-probs to the recorded ones; 0 at padding.

    Args:
      params: the learner's parameters. The sampler's differ in nothing but format and factors.
      trajectories: N whole micro-batches of records of `setup.engine`.
      served: the serving parameters that sampled; None takes the learner's factors.
      heartbeat: called after each rung.
    """
    rows = setup.training.rows(trajectories)
    recorded = {}
    if "routes_behav" in rows:
        recorded = {"routes": rows["routes_behav"], "routed": rows["routed_behav"]}
    micro, flat = setup.training.micro_batches(rows | recorded)
    settings = learner_settings(setup)
    before = flat(score(setup, settings, params, micro))
    is_same = served is None
    if not is_same:
        params, is_same = _with_served_factors(setup, params, served)
    after = before if is_same else flat(score(setup, settings, params, micro))
    rungs, before = [Rung("adapter", before, after, is_same)], after
    for cause, fields in changes(setup).items():
        following = dataclasses.replace(settings, **fields)
        is_same = following == settings
        after = before if is_same else flat(score(setup, following, params, micro))
        rungs.append(Rung(cause, before, after, is_same))
        heartbeat()
        settings, before = following, after
    for cause, logps in _prefills(setup, params, trajectories, served, heartbeat).items():
        after = before if logps is None else _rows_of(setup, trajectories, logps)
        rungs.append(Rung(cause, before, after, logps is None))
        before = after
    behav, is_biased = rows["logp_behav"], _is_biased(setup, rows)
    raw = _rows_of(setup, trajectories, [t.logp_raw for t in trajectories])
    decoded = np.where(is_biased, raw, behav)
    rungs.append(Rung("decode", before, decoded, False))
    rungs.append(Rung("filter", decoded, behav, not is_biased.any()))
    return rungs


def _is_biased(setup: Setup, rows: dict[str, np.ndarray]) -> np.ndarray:
    """Returns whether the sampler filtered a token's distribution and the learner did not [N,T]."""
    if not sampling_filters(setup).is_filtered:
        return np.zeros_like(rows["mask"])
    if "kept" not in rows:
        return rows["mask"]
    return rows["mask"] & np.all(rows["kept"] < 0, axis=-1)


def _prefills(
    setup: Setup, params: Any, trajectories: list[Trajectory], served: Any, heartbeat: Callable[[], None]
) -> dict[str, list[np.ndarray] | None]:
    """Returns cause -> log-probs [n] of each trajectory by the sampler's prefill; None where nothing differs
    from the rung before, or where it is not measured. Arguments as in `climb`."""
    is_partial = setup.config.rollout.sampling_mask_size > 0 or setup.retention is not None
    if setup.model.moe is not None or is_partial or not trajectories:
        return {"pages": None, "chunks": None}
    engine = setup.engine
    served = engine.load(params) if served is None else served
    is_cut = max(len(t.prompt) + len(t.tokens) for t in trajectories) > engine.prefill_chunk
    logps = functools.partial(pages.log_probs, setup, served, trajectories, heartbeat=heartbeat)
    whole = logps(chunk=engine.max_length, rows=engine.shards if is_cut else engine.prefill_batch)
    cut = logps(chunk=engine.prefill_chunk, rows=engine.prefill_batch) if is_cut else None
    return {"pages": whole, "chunks": cut}


def _rows_of(
    setup: Setup, trajectories: list[Trajectory], logps: Sequence[np.ndarray]
) -> np.ndarray:
    """Lays log-probs [n] of trajectories into [N,T], see `batch_layout.trajectory_rows`."""
    changed = [
        dataclasses.replace(t, logp_behav=logp) for t, logp in zip(trajectories, logps, strict=True)
    ]
    return setup.training.rows(changed)["logp_behav"]


def gap(logp_old: np.ndarray, logp_behav: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """Returns the measures of docs/gate.md for two log-probs [N,T] of sampled tokens, in nats."""
    return {name: float(x) for name, x in _gap(logp_old, logp_behav, mask).items()}


@jax.jit
def _gap(logp_old, logp_behav, mask):
    log_ratio = ratios.safe_log_ratio(logp_old, logp_behav, mask)
    measured = divergences.divergence_metrics(log_ratio, mask)
    measured |= divergences.response_metrics(logp_old, logp_behav, mask)
    measured |= mismatch.probability_metrics(logp_old, logp_behav, mask)
    measured |= mismatch.offpolicy_metrics(logp_old, logp_behav, mask)
    one_row = lambda x: x.reshape(1, -1)
    p99 = divergences.sequence_percentiles(
        one_row(jnp.abs(log_ratio)), one_row(mask), percentiles=(99,)
    )
    return {
        "d_mean": measured["mismatch/log_ratio_abs_mean"],
        "d_p99": p99[0, 0, 0],
        "d_max": measured["mismatch/log_ratio_abs_max"],
        "dp_max_mean": measured["mismatch/dp_max/mean"],
        "dp_max": measured["mismatch/dp_max/max"],
        "pearson": measured["training/rollout_actor_probs_pearson_corr"],
        "k1": measured["rollout_corr/kl"],
        "k3": measured["rollout_corr/k3_kl"],
        "chi2_token": measured["rollout_corr/chi2_token"],
        "chi2_seq": measured["rollout_corr/chi2_seq"],
        "ppl_ratio": measured["rollout_corr/ppl_ratio"],
    }
