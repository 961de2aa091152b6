"""Controllers in a run: their states, their settings for a step, and the update of their states.

A setting is a scalar, which every row of the step's batch carries as a field [N]. "lr_scale"
multiplies the update of the policy; "kl_coeff" and "r2vpo_lambda" replace the config's values.
Controllers of the gradient are part of the optimizer, see `optimizer.align` and `perturb`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.estimators import controllers, ratios
from jaxrl_tis.learner.correction import Batch, Correction, Metrics

States = dict[str, Any]


def init(c: Correction) -> States:
    """Returns {controller: its state at step 0}, without stateless controllers."""
    states: States = {}
    _, parameters = c.objective
    for name, chosen in c.controllers:
        if name == "length_surge":
            states[name] = controllers.length_surge_init(chosen["window"])
        elif name == "adaptive_kl":
            states[name] = controllers.kl_coefficient_init(c.kl_coeff)
        elif name == "r2vpo_dual":
            states[name] = controllers.r2vpo_dual_init(parameters["r2vpo_lambda"])
    return states


def begin(c: Correction, states: States, batch: Batch) -> tuple[States, dict[str, jax.Array]]:
    """Returns (states, settings for this step) from the scored rollout batch [N,T]."""
    chosen, settings = dict(c.controllers), {}
    mask, scale = batch["mask"], jnp.ones(())
    if "ess_scale" in chosen:
        # Of the policy that the update starts from, so that staleness counts.
        log_ratio = ratios.safe_log_ratio(batch["logp_prox"], batch["logp_behav"], mask)
        scale, _ = controllers.ess_scale(log_ratio, mask, **chosen["ess_scale"])
    if "length_surge" in chosen:
        answers = batch["sampled"]  # those that are not trained on, too: the longest are truncated
        length = ratios.safe_divide(jnp.sum(answers, dtype=jnp.float32), jnp.sum(jnp.any(answers, 1)))
        surge = controllers.length_surge(states["length_surge"], length, **chosen["length_surge"])
        states, scale = states | {"length_surge": surge}, scale * surge.scale
    if "ess_scale" in chosen or "length_surge" in chosen:
        settings["lr_scale"] = scale
    if "adaptive_kl" in chosen:
        settings["kl_coeff"] = states["adaptive_kl"].kl_coeff
    if "r2vpo_dual" in chosen:
        settings["r2vpo_lambda"] = states["r2vpo_dual"].r2vpo_lambda
    return states, settings


def end(c: Correction, states: States, metrics: Metrics, num_seqs: int) -> States:
    """Returns the states after the step's updates, from the metrics of these updates."""
    chosen = dict(c.controllers)
    if "adaptive_kl" in chosen:
        states = states | {"adaptive_kl": controllers.adaptive_kl(
            states["adaptive_kl"], metrics["actor/kl_to_reference"], num_seqs,
            **chosen["adaptive_kl"],
        )}
    if "r2vpo_dual" in chosen:
        states = states | {"r2vpo_dual": controllers.r2vpo_dual(
            states["r2vpo_dual"], metrics["actor/ratio_variance"], **chosen["r2vpo_dual"]
        )}
    return states


def fields(settings: dict[str, jax.Array], count: int) -> dict[str, np.ndarray]:
    """Returns the settings as fields [count] of a batch."""
    return {name: np.full(count, value, np.float32) for name, value in settings.items()}


def check(c: Correction) -> None:
    """Raises ValueError for a parameter that a controller refuses; traces without computing."""

    def trial():
        row = jnp.zeros((1, 1))
        states, _ = begin(
            c, init(c),
            {"mask": row > 0, "sampled": row > 0, "logp_prox": row, "logp_behav": row},
        )
        measured = {"actor/kl_to_reference": jnp.zeros(()), "actor/ratio_variance": jnp.zeros(())}
        end(c, states, measured, 1)
        for name, parameters in c.controllers:
            if name == "gradient_alignment":
                state = controllers.gradient_alignment_init(row)
                controllers.gradient_alignment(state, row, **parameters)
            elif name == "layerwise_perturbation":
                controllers.layerwise_perturbation(1, **parameters)

    jax.eval_shape(trial)
