"""Exact bias and variance of methods that use a whole group, in groups of two and three responses.

Some methods couple the responses of a group: a baseline that includes the response itself, weights
divided by the batch mean, tokens selected by their rank, a learning rate that follows the ESS. Their
expected step scales the gradient, turns it, or both. `rows` computes by how much. It enumerates all
groups, with and without a gap between policy and sampler.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.estimators import controllers, methods, rank_masks
from jaxrl_tis.estimators.loss import importance_weights, needed, policy_loss
from experiments import exact

GROUP_SIZES = (2, 3)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step in the words of a config, see `loss.policy_loss`; a masked token counts as 0.

    The default is unbiased without a gap: RLOO's advantage, the objective -A log pi, and the mean
    over responses of the sum over tokens.

    Attributes:
      is_ess_scaled: multiply the step by VCPO's factor of the learning rate.
      head: number of the sampler's likeliest tokens for centred scores; 0 does not centre.
    """

    advantage: str = "rloo"
    weight: str = "none"
    masks: str = ""
    objective: str = "reinforce"
    centre: str = "old"
    aggregation: str = "seq-mean-token-sum"
    is_batch_normalized: bool = False
    is_ess_scaled: bool = False
    head: int = 0


LUSPO = "luspo(clip_low=0.0003, clip_high=0.0004)"
BAND = "clip_cov_lower=0.0, clip_cov_upper=inf"
ADVANTAGES = {
    **{name: name for name in methods.TABLES["advantage"]},
    "gae": "gae(is_whitened=False)",
    "gae, whitened": "gae",
    "oapl": "oapl(oapl_beta_value=1.0)",
}
STEPS = {
    "no weight": Step(),
    "token": Step(weight="token_vanilla"),
    "token, normalised": Step(weight="token_vanilla", is_batch_normalized=True),
    "sequence": Step(weight="seq_vanilla"),
    "sequence, normalised": Step(weight="seq_vanilla", is_batch_normalized=True),
    "sequence, ESS-scaled": Step(weight="seq_vanilla", is_ess_scaled=True),
    "vcpo": Step(advantage="opob", weight="seq_tis(cap=8.0)", is_ess_scaled=True),
    "m2po, drops": Step(weight="token_vanilla", masks="m2po"),
    "m2po, clips": Step(objective="m2po", centre="behav"),
    "clip_cov, mask": Step(weight="token_vanilla", masks=f"clip_cov({BAND})"),
    "clip_cov, objective": Step(objective=f"clip_cov({BAND})", centre="behav"),
    "kl_cov": Step(objective="kl_cov", centre="behav"),
    "top_entropy": Step(weight="token_vanilla", masks="top_entropy"),
    "espo": Step(objective="espo(vocab_size=3)", centre="behav"),
    # Under GSPO's aggregation, by which long responses count less in one of the two. Both have GSPO's band.
    **{
        name: Step(objective=spelled, centre="behav", aggregation="seq-mean-token-mean")
        for name, spelled in {"gspo": "gspo", "luspo": LUSPO}.items()
    },
    **{
        name: Step(advantage=spelled, weight="seq_vanilla")
        for name, spelled in ADVANTAGES.items()
    },
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One step compared with the true gradient, in units of the gradient's norm.

    scale: projection of the expected step on the gradient. turn: sine of the angle between them.
    bias: norm of their difference. variance: trace, of the mean over one group.
    """

    name: str
    group_size: int
    scale: float
    turn: float
    bias: float
    variance: float


def graded(response: np.ndarray) -> float:
    """Returns a reward of 0, 0.5 or 1 that depends on all tokens and on the length."""
    return (response.sum() + len(response)) % 3 / 2


def problem(step: Step, group_size: int, drift: float = 0.0, seed: int = 0) -> exact.Problem:
    """Returns the problem: responses of one to three tokens, ended by token 2. The sampler's logits have
    normal noise of standard deviation `drift`."""
    rng = np.random.default_rng(seed)
    logits = exact.random_logits(3, 3, rng)
    behaviour = exact.with_engine_noise(logits, drift, rng)
    old = behaviour if step.centre == "behav" else logits
    group = (0,) * group_size
    return exact.Problem(
        logits, behaviour, graded, 3, group=group, old=old, stop=2, draw=draw(step)
    )


def with_advantage(step: Step, logp: chex.Array, batch: exact.Batch) -> exact.Batch:
    """Returns the batch with the step's `adv` [B, T] and `logp`."""
    name, parameters = methods.parse("advantage", step.advantage)
    log_ratio = batch["logp_old"] - batch["logp_behav"]
    weight = methods.parse("weight", step.weight)
    fields = batch | {
        "reward_components": batch["rewards"][:, None],
        "weights": importance_weights(log_ratio, batch, weight),
    }
    adv = methods.function("advantage", name)(
        batch["rewards"],
        batch["mask"],
        batch["group"],
        **needed("advantage", name, fields),
        **parameters,
    )
    return batch | {"adv": adv, "logp": jax.lax.stop_gradient(logp)}


def loss(step: Step) -> exact.LossFn:
    """Returns the loss of a step, made of the library's functions."""
    parts = {
        "weight": methods.parse("weight", step.weight),
        "masks": methods.parse_all("mask", step.masks),
        "objective": methods.parse("objective", step.objective),
    }

    def loss_fn(logp, batch):
        fields, logp_top = with_advantage(step, logp, batch), None
        of_token = jnp.broadcast_to(batch["group"][:, None], batch["mask"].shape)
        fields = fields | {"group": of_token}  # as the loss of a run has it
        if step.head:
            logps, ids = jax.lax.top_k(jax.nn.log_softmax(batch["logits_behav"]), step.head)
            fields = fields | {"top_ids": ids, "top_logps": logps}
            logp_top = jnp.take_along_axis(jax.nn.log_softmax(batch["logits"]), ids, axis=-1)
        value, _ = policy_loss(
            logp,
            fields,
            entropy=batch["entropy"],
            logp_top=logp_top,
            centre=step.centre,
            aggregation=step.aggregation,
            is_batch_normalized=step.is_batch_normalized,
            rejected_in_denominator=True,
            **parts,
        )
        if step.is_ess_scaled:
            log_ratio = batch["logp_old"] - batch["logp_behav"]
            value = value * controllers.ess_scale(log_ratio, batch["mask"])[0]
        return value

    return loss_fn


def draw(step: Step) -> Callable | None:
    """Returns a function that finds the token dropped by clip-cov; None for a step without clip-cov."""
    chosen = (*methods.parse_all("mask", step.masks), methods.parse("objective", step.objective))
    parameters = [given for name, given in chosen if name == "clip_cov"]
    if not parameters:
        return None

    def is_drawn(logp, batch):
        batch = with_advantage(step, logp, batch)
        needs = needed("mask", "clip_cov", batch)
        return batch["mask"] & ~rank_masks.clip_cov(logp, batch["mask"], **needs, **parameters[0])

    return is_drawn


def against(
    truth: np.ndarray, name: str, case: exact.Problem, loss_fn: exact.LossFn
) -> Row:
    """Returns the moments of a step in units of the true gradient."""
    norm = np.linalg.norm(truth)
    mean, variance = case.moments(loss_fn)
    scale = np.sum(mean * truth) / norm**2
    across = np.linalg.norm(mean - scale * truth)
    return Row(
        name,
        len(case.group),
        scale=float(scale),
        turn=float(across / np.linalg.norm(mean)) if mean.any() else 0.0,
        bias=float(np.linalg.norm(mean - truth) / norm),
        variance=float(variance / norm**2),
    )


def rows(
    steps: Mapping[str, Step], sizes: Sequence[int], drift: float = 0.0, seed: int = 0
) -> list[Row]:
    """Returns a row for every step and group size."""
    truth = problem(Step(), 1, drift, seed).true_gradient()
    return [
        against(truth, name, problem(step, size, drift, seed), loss(step))
        for name, step in steps.items()
        for size in sizes
    ]


def table(results: Sequence[Row]) -> str:
    """Returns the rows as text, one line per step with all its group sizes."""
    sizes = sorted({row.group_size for row in results})
    head = "".join(f" | G={size} scale   turn    bias variance" for size in sizes)
    lines = [f"{'step':28}{head}"]
    for name in dict.fromkeys(row.name for row in results):
        cells = [
            f" | {row.scale:9.4f} {row.turn:6.4f} {row.bias:7.4f} {row.variance:8.3f}"
            for size in sizes
            for row in results
            if (row.name, row.group_size) == (name, size)
        ]
        lines.append(f"{name:28}{''.join(cells)}")
    return "\n".join(lines)
