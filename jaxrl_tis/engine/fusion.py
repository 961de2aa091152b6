"""Logit fusion: a teacher whose logits are mixed into those of the policy at every step.

Zhang et al. 2026: the sampler draws from softmax(a l_teacher + (1 - a) l_student). Both models have
pages of their own, at the same places: a page number holds the keys of both for the same tokens. What
the policy's pages do - prefix cache, preemption, eviction - the teacher's therefore do, too.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """Serving parameters, or pages, of the policy and of its teacher."""

    student: Any
    teacher: Any


def fused(student_mv: jax.Array, teacher_mv: jax.Array, alpha_m: jax.Array) -> jax.Array:
    """Returns the logits to sample from; the student's own, bit by bit, where alpha is 0.

    Args:
      teacher_mv: at least as many logits as the student has; those of further tokens are left out.
    """
    alpha_m1 = alpha_m[:, None]
    teacher_mv = teacher_mv[:, : student_mv.shape[1]]
    mixed_mv = alpha_m1 * teacher_mv + (1.0 - alpha_m1) * student_mv
    return jnp.where(alpha_m1 > 0, mixed_mv, student_mv)


def of_policy(tree: Any) -> Any:
    """Returns the policy's part of parameters or pages, which is all of them without a teacher."""
    return tree.student if isinstance(tree, Pair) else tree


def without_teacher(state: Any) -> Any:
    """Returns a decode state with the policy's pages alone."""
    return dataclasses.replace(state, cache=of_policy(state.cache))
