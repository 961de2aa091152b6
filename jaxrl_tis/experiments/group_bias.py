"""The exact bias of every advantage estimator, on-policy, in groups of two and three.

Without mismatch the step -gradient of -mean_i sum_t A_it log pi_it has the expectation grad J for
an advantage whose baseline does not look at the response that it is subtracted from. Those that do
scale the gradient, turn it, or both; `rows` says by how much, by enumeration of all groups.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl_tis.estimators import advantages
from jaxrl_tis.estimators import reduce
from jaxrl_tis.experiments import oracle

NAMES = tuple(advantages.ADVANTAGES)
GROUP_SIZES = (2, 3)
PARAMETERS = {"gae": {"is_whitened": False}, "oapl": {"oapl_beta_value": 1.0}}


@dataclasses.dataclass(frozen=True)
class Row:
    """One estimator against the true gradient, which has norm 1 here.

    scale: projection of the expected step on the gradient. turn: sine of the angle between them.
    bias: norm of their difference. variance: trace, of the mean over one group.
    """

    method: str
    group_size: int
    scale: float
    turn: float
    bias: float
    variance: float


def graded(response: np.ndarray) -> float:
    """A reward of 0, 0.5 or 1 that depends on all tokens and on the length."""
    return (response.sum() + len(response)) % 3 / 2


def problem(group_size: int, seed: int) -> oracle.Problem:
    """On-policy responses of one to three tokens, the token 2 ends them."""
    logits = oracle.random_logits(3, 3, np.random.default_rng(seed))
    return oracle.Problem(logits, logits, graded, 3, group=(0,) * group_size, stop=2)


def loss(name: str, **parameters) -> oracle.LossFn:
    """REINFORCE with an advantage of the library, the mean over responses of the sum over
    tokens."""

    def loss_fn(logp, batch):
        fields = batch | {
            "reward_components": batch["rewards"][:, None],
            "weights": jnp.ones_like(logp),
        }
        needs = advantages.NEEDS[name] if name in advantages.NEEDS else ()
        adv = advantages.ADVANTAGES[name](
            batch["rewards"],
            batch["mask"],
            batch["group"],
            **{field: fields[field] for field in needs},
            **parameters,
        )
        return reduce.aggregate(-adv * logp, batch["mask"], "seq-mean-token-sum")

    return loss_fn


def rows(names: Sequence[str], seed: int = 0) -> list[Row]:
    """Entries of `ADVANTAGES` at each group size."""
    result = []
    for name in names:
        for size in GROUP_SIZES:
            case = problem(size, seed)
            truth = case.true_gradient()
            norm = np.linalg.norm(truth)
            parameters = PARAMETERS[name] if name in PARAMETERS else {}
            mean, variance = case.moments(loss(name, **parameters))
            cosine = np.sum(mean * truth) / (norm * np.linalg.norm(mean))
            result.append(
                Row(
                    name,
                    size,
                    scale=float(np.sum(mean * truth) / norm**2),
                    turn=float(np.sqrt(max(1.0 - cosine**2, 0.0))),
                    bias=float(np.linalg.norm(mean - truth) / norm),
                    variance=variance / norm**2,
                )
            )
    return result


def table(results: Sequence[Row]) -> str:
    """The rows as text."""
    head = f"{'advantage':30} {'G':>2} {'scale':>8} {'turn':>8} {'bias':>8} {'variance':>9}"
    lines = [
        f"{row.method:30} {row.group_size:2d} {row.scale:8.4f} {row.turn:8.4f} {row.bias:8.4f} "
        f"{row.variance:9.3f}"
        for row in results
    ]
    return "\n".join([head, *lines])
