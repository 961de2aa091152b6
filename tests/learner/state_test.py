"""What the state holds, and that no two parts of it share a buffer."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.learner.state import abstract_state, as_begun, initial_params, initial_state
from jaxrl_tis.learner.trainer import Trainer
from jaxrl_tis.record.checkpoint import Checkpoints
from jaxrl_tis.record.provenance import write_run_files
from jaxrl_tis.sharding import device_bytes
from jaxrl_tis.validate import validate
from tests import tiny
from tests.learner.trainer_test import fake_samples, one_update

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("a run: flax, optax, orbax and XLA together"),
]


@pytest.mark.all
def test_the_value_head_is_there_with_gae_only_and_starts_at_zero():
    setup = tiny.setup(correction__advantage="gae")
    state = initial_state(setup.training, initial_params(setup.training))
    assert set(state) == {"policy", "critic"}
    assert not np.any(state["critic"].params["value"])
    setup = tiny.setup()
    assert set(initial_state(setup.training, initial_params(setup.training))) == {"policy"}


@pytest.mark.all
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
    values = json.loads((tmp_path / "run" / "config.json").read_text())
    values["pins"] = {"hf://owner/data/a.jsonl": "hf://owner/data@0123/a.jsonl"}
    (tmp_path / "run" / "config.json").write_text(json.dumps(values))
    files = tiny.config(task__name="hf://owner/data/a.jsonl")
    assert as_begun(files, str(tmp_path / "run")).task.name == "hf://owner/data@0123/a.jsonl"
    (tmp_path / "config.json").write_text("{}")  # of a model
    assert as_begun(undated, str(tmp_path)) is undated
    assert as_begun(undated, "hf://owner/model") is undated


@pytest.mark.cases("float32", "int8")
@pytest.mark.parametrize("changes", [
    dict(),
    dict(train__pack_length=24),
    dict(train__fuse_old_logp="never", correction__offload_reference=True),
    dict(model__dtype="bfloat16"),
    dict(model__dtype="bfloat16", model__fp32_head=True, correction__kl_placement="reward",
         correction__kl="k1"),
    dict(model__dtype="bfloat16", model__quantization="w8a16"),
    dict(model__dtype="float16", train__pack_length=24, train__fuse_old_logp="never"),
    dict(model__param_dtype="bfloat16"),
], ids=["float32", "packed", "offloaded", "bfloat16", "head", "int8", "float16", "parameters"])
def test_the_kl_to_the_reference_starts_at_exactly_zero(changes):
    """With equal rewards nothing moves. No parameter is a number of bfloat16 by chance."""
    setup = tiny.setup(**dict(
        correction__kl_coeff=0.5, train__minibatches=1, train__epochs=1, **changes
    ))
    with tiny.one_device():
        trainer = Trainer(setup.training)
    params = jax.tree.map(lambda x: (1.003 * x).astype(x.dtype), initial_params(setup.training))
    begun = initial_state(setup.training, params)
    matrix, norm = (begun["reference"]["layers"][name].dtype for name in ("q", "attn_norm"))
    is_half = "bfloat16" in changes.values() and "model__quantization" not in changes
    assert (matrix == jnp.bfloat16) == is_half
    assert norm == setup.config.model.param_dtype
    batch = [dataclasses.replace(s, reward=1.0) for s in fake_samples()]
    rows = trainer.score(begun, batch, {0: begun["policy"].params})
    _, _, metrics = trainer.update(begun, rows, 1, 0)
    assert metrics["actor/kl_to_reference"] == metrics["actor/grad_norm"] == 0.0
    if "correction__kl_placement" not in changes:
        assert metrics["actor/kl_loss"] == 0.0


@pytest.mark.all
def test_moments_in_host_memory_change_no_number(tmp_path):
    """Two updates on eight devices, and a checkpoint that brings the moments back to the host."""
    ends = []
    for is_offloaded in (False, True):
        setup = tiny.setup(
            optimizer__offload=is_offloaded, mesh__train=(1, 4, 1), train__microbatch_rows=4, train__minibatches=1,
            train__epochs=1,
        ).training
        trainer = Trainer(setup)
        state = initial_state(setup, initial_params(setup))
        for step in (1, 2):
            rows = trainer.score(state, fake_samples(), {0: state["policy"].params})
            state, *_ = trainer.update(state, rows, step, 0)
        moments = [
            leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state["policy"].opt_state)
            if jax.tree_util.keystr(path).endswith("['q']")
        ]
        kind = "pinned_host" if is_offloaded else "device"
        assert [x.sharding.memory_kind for x in moments] == [kind] * 2
        assert all(np.asarray(x).any() for x in moments)
        ends.append(jax.tree.map(np.asarray, state["policy"]))
    jax.tree.map(np.testing.assert_array_equal, *ends)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(2, state, {})
        restored, _ = checkpoints.restore(abstract_state(setup))
    same = lambda x, y: x.sharding.memory_kind == y.sharding.memory_kind and (x == y).all()
    assert all(map(same, jax.tree.leaves(restored["policy"].params), jax.tree.leaves(state["policy"].params)))
    kinds = [[x.sharding.memory_kind for x in jax.tree.leaves(s["policy"])] for s in (restored, state)]
    assert kinds[0] == kinds[1]
    assert device_bytes(abstract_state(setup)) < device_bytes(
        jax.tree.map(lambda x: x.update(sharding=x.sharding.with_memory_kind("device")), abstract_state(setup))
    )


@pytest.mark.all
def test_moments_that_an_update_may_skip_stay_on_the_devices():
    for changes in (
        dict(model__dtype="float16"), dict(correction__controllers="gradient_alignment(gac_low=0.0, gac_high=0.5)"),
    ):
        with pytest.raises(ValueError, match="optimizer.offload moves the moments at every update"):
            validate(tiny.config(optimizer__offload=True, **changes))
