"""An update that scores its batch is the update of a batch that was scored before it."""

from unittest import mock

import jax
import numpy as np
import optax
import pytest

from jaxrl_tis.learner.state import initial_params, initial_state
from jaxrl_tis.learner.trainer import Trainer
from tests import tiny
from tests.learner.trainer_test import fake_samples, one_update

pytestmark = pytest.mark.compiles

ONE = dict(train__minibatches=1, train__epochs=1, metrics__diagnostics_every=1)
FUSED = {
    "tis": dict(correction__preset="tis_2"),
    "packed": dict(correction__preset="tis_2", train__pack_length=40),
    "one micro-batch": dict(correction__preset="tis_2", train__microbatch_rows=16),
    "masks": dict(
        correction__weight="seq_tis(cap=2.0)",
        correction__masks="seq_mean_k3(upper=1.0) & veto & opsm(opsm_delta=0.3)",
        correction__rejected_in_denominator=True,
    ),
    "packed sequences": dict(
        correction__weight="seq_mis(upper=3.0)", train__pack_length=40,
        correction__masks="seq_sum_k2(upper=1.0)", correction__rejected_in_denominator=True,
    ),
    "bypass": dict(correction__preset="bypass_ppo_clip"),
    "centred": dict(correction__preset="centered_tis_2", train__pack_length=40),
    "centred, by a mask": dict(
        correction__preset="tis_2", correction__centering="top(4)",
        correction__masks="token_dp(upper=0.1)", correction__rejected_in_denominator=True,
    ),
    "factors": dict(correction__preset="capped_ratio"),
    "centred factors": dict(correction__preset="factored", correction__centering="top(4)"),
    "entropy and reference": dict(
        correction__weight="token_mis(upper=2.0)", correction__entropy_coeff=0.01,
        correction__kl_coeff=0.1, correction__aggregation="seq-mean-token-mean",
    ),
    "exact masks at the update": dict(correction__masks="trm(trm_delta=1.0)"),
    "rejected tokens have a KL": dict(
        correction__masks="opsm(opsm_delta=1e-4)", correction__kl_coeff=0.1,
        correction__entropy_coeff=0.1,
    ),
    "critic": dict(
        correction__advantage="gae", rollout__group_size=1, rollout__prompts=16,
    ),
}


def both_ways(changes):
    """[(parameters, rows, metrics)] of an update that scores its batch itself, and of one that gets
    it scored."""
    out = []
    for how in ("auto", "never"):
        # One that moves by the gradient itself; Adam would blow up the noise of small ones.
        sgd = optax.sgd(1.0)
        changed = ONE | changes | dict(train__fuse_old_logp=how)
        _, state, rows, metrics, trainer = one_update(sgd, **changed)
        reason = trainer.setup.recompute_reason
        assert bool(reason) == (how == "never"), reason
        out.append((jax.device_get(state["policy"].params), rows, metrics))
    return out


@pytest.mark.all
@pytest.mark.cases("entropy and reference")
@pytest.mark.parametrize("case", FUSED)
def test_an_update_that_scores_its_batch_is_that_of_a_scored_one(case):
    """The gradient by what it moves, every field of the rows, every metric."""
    (params, rows, metrics), (expected, scored, told) = both_ways(FUSED[case])
    for (path, a), (_, b) in zip(
        *map(jax.tree_util.tree_leaves_with_path, (params, expected)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6, err_msg=jax.tree_util.keystr(path))
    assert rows.keys() == scored.keys() and metrics.keys() == told.keys()
    for name in rows:
        np.testing.assert_allclose(rows[name], scored[name], rtol=2e-5, atol=2e-6, err_msg=name)
    for name in metrics:
        np.testing.assert_allclose(metrics[name], told[name], rtol=2e-4, atol=5e-6, err_msg=name)
    assert metrics["actor/grad_norm"] > 1e-3 and np.abs(rows["logp_old"][rows["mask"]]).min() > 0


@pytest.mark.all
def test_in_invariant_numerics_it_is_bit_by_bit(optimized):
    (params, rows, _), (expected, scored, _) = both_ways(
        FUSED["tis"] | {"model__numerics": "invariant", "engine__quantization": "none"}
    )
    for a, b in zip(*map(jax.tree.leaves, (params, expected)), strict=True):
        assert a.tobytes() == b.tobytes()
    for name in ("logp_old", "entropy", "weights", "adv"):
        assert rows[name].tobytes() == scored[name].tobytes(), name


@pytest.mark.all
def test_no_forward_pass_comes_before_it():
    setup = tiny.setup(**ONE, correction__preset="tis_2")
    with tiny.one_device():
        trainer = Trainer(setup.training)
    state = initial_state(setup.training, initial_params(setup.training))
    with mock.patch.object(trainer, "_score", side_effect=AssertionError("scored")):
        rows = trainer.score(state, fake_samples(), {0: state["policy"].params})
        assert "logp_old" not in rows and "entropy" not in rows
        _, rows, _ = trainer.update(state, rows, 2, 0)
    assert {"logp_old", "logp_prox", "entropy", "weights", "adv"} <= rows.keys()


@pytest.mark.all
def test_it_refuses_tokens_of_other_weights():
    setup = tiny.setup(**ONE, correction__preset="tis_2")
    with tiny.one_device():
        trainer = Trainer(setup.training)
    state = initial_state(setup.training, initial_params(setup.training))
    older = jax.tree.map(lambda x: 1.1 * x, state["policy"].params)
    with pytest.raises(ValueError, match="set train.fuse_old_logp to never"):
        trainer.score(state, fake_samples(), {0: older})
    with pytest.raises(ValueError, match="weights of version 0"):
        trainer.score(state, fake_samples(), {1: state["policy"].params})
