"""The supervised steps before the first one."""

from unittest import mock

import pytest

from jaxrl_tis import train
from tests import tiny

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("a run: flax, optax, orbax and XLA together"),
]


def test_the_warm_up_taught_the_format():
    losses = [r["warmup/loss"] for r in tiny.lines(tiny.finished()) if r["phase"] == "warmup"]
    assert losses[-1] < 0.5 * losses[0]


def test_a_warm_up_answer_longer_than_the_row_of_targets_is_refused(tmp_path):
    """A target that max_new_tokens cuts off would be taught without its end, in silence."""
    with (
        mock.patch.object(train, "initial_state", side_effect=RuntimeError("the warm-up passed")),
        pytest.raises(ValueError, match="max_new_tokens"),
    ):
        tiny.run(tmp_path, rollout__max_new_tokens=2, task__max_prompt_tokens=8, warmup__steps=1)
