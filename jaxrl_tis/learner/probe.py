"""What a step measures of itself beyond its update: profiles, variances, the routes of its experts."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.diagnostics import batch_metrics, correction_metrics, routes
from jaxrl_tis.learner.batch_layout import Rows
from jaxrl_tis.learner.scoring import make_routing
from jaxrl_tis.learner.setup import LearnerSetup
from jaxrl_tis.learner.state import policy
from jaxrl_tis.models import lora


@dataclasses.dataclass(frozen=True)
class Probe:
    """What a step's diagnostics measure at the weights before its update.

    Attributes:
      is_due: whether the step has diagnostics.
      collisions: sums of squared probabilities [N,T]; None where they are not measured.
      routing: of `own_routes`; None where it is not measured.
    """

    is_due: bool
    collisions: np.ndarray | None
    routing: tuple[np.ndarray, np.ndarray, np.ndarray] | None

    @classmethod
    def joined(cls, probes: Sequence["Probe"], order: np.ndarray) -> "Probe":
        """Returns that of a batch from those of its parts; `order` is that of the batch's rows."""
        first, collisions, routing = probes[0], None, None
        if first.collisions is not None:
            collisions = np.concatenate([p.collisions for p in probes])[order]
        if first.routing is not None:
            ids, load, entropy = zip(*(p.routing for p in probes), strict=True)
            routing = np.concatenate(ids)[order], sum(load), sum(entropy)
        return cls(first.is_due, collisions, routing)


class Diagnostics:
    """The diagnostics of a run's steps. `collisions` is of `scoring.make_collisions`."""

    def __init__(self, setup: LearnerSetup, collisions: Callable):
        self.setup, self._collisions = setup, collisions
        self._routing = make_routing(setup.update_learner)
        self._route_metrics = jax.jit(functools.partial(route_metrics, setup.model.moe))
        profile = functools.partial(correction_metrics.profile_metrics, setup.correction.weight)
        self._profile = jax.jit(profile, static_argnums=1)
        self._variance_proxies = jax.jit(batch_metrics.variance_proxy_metrics)

    def probe(self, state: dict[str, Any], rows: Rows, step: int) -> Probe:
        """Makes the passes of a step's diagnostics at the weights before its update."""
        is_due = step % self.setup.config.metrics.diagnostics_every == 0
        collisions, routing = rows.get("sum_pi_squared"), None
        if is_due and collisions is None:
            collisions = self.setup.passes(rows)(self._collisions, policy(self.setup, state))
        if is_due and self.setup.model.moe is not None:
            routing = own_routes(self.setup, self._routing, policy(self.setup, state), rows)
        return Probe(is_due, collisions, routing)

    def metrics(self, state: dict[str, Any], rows: Rows, probe: Probe) -> dict[str, Any]:
        """Returns the metrics of a step's diagnostics, but for `variances`; `state` is that after the
        update."""
        measured = {}
        if probe.is_due:
            profiled = rows | {"logp": rows["logp_prox"]}
            measured |= self._profile(profiled, bool(rows["turn"].any()))
        if probe.routing is not None:
            measured |= self._route_metrics(rows, *probe.routing)
        if self.setup.adapter is not None:
            measured |= {"lora/norm": _adapter_norm(policy(self.setup, state))}
        return measured

    def variances(
        self, rows: Rows, probe: Probe, gradient_norm: float, num_sequences: int
    ) -> dict[str, Any]:
        """Returns the variance proxies of an update whose gradient was at the weights of `probe`; {}
        where they are not due. The rows have the results of `correction.make_prepare`."""
        if probe.collisions is None:
            return {}
        return self._variance_proxies(
            rows["logp_prox"], rows["adv"], probe.collisions, rows["mask"], w=rows.get("weights"),
            gradient_norm=gradient_norm, num_sequences=num_sequences,
        )


def own_routes(
    setup: LearnerSetup, routing: Callable, params: Any, rows: Rows
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns what a policy's routers choose by themselves, also for rows that are left out of the
    loss: routes [N,T,L,k], the load of the experts [L,E], and the sum of the entropies of their
    distributions [L]. `routing` is of `scoring.make_routing`."""
    micro, flat = setup.micro_batches(rows | {"mask": rows["sampled"]})
    routed = routing(params, micro)
    total = lambda x: setup.layout.fetch(x).sum(axis=(0, 1))
    return flat(routed.ids), total(routed.load), total(routed.entropy)


def route_metrics(
    moe: Any, rows: Rows, own: Any, load_le: Any, entropy_l: Any
) -> dict[str, jax.Array]:
    """Measures the load of the experts and, where the sampler recorded its routes, how they differ
    from the policy's `own` [N,T,L,k], see diagnostics/routes.py. The gap is of the tokens that are
    trained on: the others may have no logp_old."""
    tokens = jnp.sum(load_le, axis=1) / moe.top_k
    metrics = routes.load_metrics(load_le, entropy_l / jnp.maximum(tokens, 1.0))
    if "routes_behav" not in rows:
        return metrics
    # The route of an input token belongs to the token that is sampled after it.
    after = lambda x: jnp.pad(x, ((0, 0), (1, 0)) + ((0, 0),) * (x.ndim - 2))[:, :-1]
    overlap = after(routes.overlap(own, rows["routes_behav"]))
    mask = rows["sampled"] & after(rows["routed_behav"])
    k = moe.top_k
    metrics |= routes.flip_metrics(
        overlap, mask, num_chosen=k, num_experts=moe.num_experts, response=rows["sampled"]
    )
    metrics |= routes.flip_grid(overlap, mask, num_chosen=k, response=rows["sampled"])
    return metrics | routes.gap_metrics(
        overlap, rows["logp_old"], rows["logp_behav"], mask & rows["mask"], num_chosen=k
    )


_adapter_norm = jax.jit(lora.relative_norm)
