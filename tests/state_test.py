"""What the state holds, and that no two parts of it share a buffer."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.provenance import write_run_files
from jaxrl_tis.state import as_begun, initial_params, initial_state
from tests import tiny
from tests.trainer_test import fake_samples, one_update

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("a run: flax, optax, orbax and XLA together"),
]


def test_the_value_head_is_there_with_gae_only_and_starts_at_zero():
    setup = tiny.setup(correction__advantage="gae")
    state = initial_state(setup, initial_params(setup))
    assert set(state) == {"policy", "critic"}
    assert not np.any(state["critic"].params["value"])
    setup = tiny.setup()
    assert set(initial_state(setup, initial_params(setup))) == {"policy"}


def test_a_reference_in_the_dtype_of_the_policy_survives_the_donation_of_the_policy():
    """With bfloat16 parameters the reference could share the policy's buffers, which updates
    donate."""
    changes = dict(model__param_dtype="bfloat16", correction__kl_coeff=0.1,
                   correction__advantage="gae", train__epochs=1)
    before, state, rows, metrics, trainer = one_update(**changes)
    reference = jax.device_get(state["reference"])
    assert reference["embed"].dtype == jnp.bfloat16
    for kept, first in zip(jax.tree.leaves(reference), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(kept, first)
    rows = trainer.score(state, fake_samples(), {0: state["policy"].params})
    assert np.isfinite(rows["logp_ref"]).all()
    assert math.isfinite(metrics["actor/kl_loss"])


def test_the_date_of_a_run_goes_along_where_its_policy_is_measured_or_served(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    write_run_files(tmp_path / "run", {"task": {"date": "2020-01-02"}})
    undated = tiny.config(task__date="")
    assert as_begun(undated, str(tmp_path / "run")).task.date == "2020-01-02"
    assert as_begun(tiny.config(task__date="1999-01-01"), str(tmp_path / "run")).task.date == "1999-01-01"
    (tmp_path / "config.json").write_text("{}")  # of a model
    assert as_begun(undated, str(tmp_path)) is undated
    assert as_begun(undated, "hf://owner/model") is undated
