"""A batch whose gradient is accumulated from parts as they arrive."""

import jax
import numpy as np
import pytest

from jaxrl_tis.learner.arriving import accumulation_blocker, update_arriving
from jaxrl_tis.learner.state import initial_params, initial_state
from jaxrl_tis.learner.trainer import Trainer
from tests import tiny
from tests.learner.trainer_test import fake_samples

pytestmark = pytest.mark.compiles


@pytest.mark.cases("dense")
@pytest.mark.parametrize("settings", [
    dict(),
    dict(correction__aggregation="seq-mean-token-mean", correction__mode="bypass",
         correction__weight="none"),
    dict(train__pack_length=16, train__microbatch_rows=2),
    dict(correction__kl_coeff=0.05, correction__entropy_coeff=0.01, correction__masks="veto",
         correction__rejected_in_denominator=True),
], ids=["dense", "sequences", "packed", "kl"])
def test_any_order_of_arrival_gives_the_update_of_the_whole_batch(settings):
    made = tiny.setup(train__minibatches=1, train__epochs=1, rollout__schedule="periodic", **settings).training
    trainer = Trainer(made)
    assert accumulation_blocker(made) is None
    batch = fake_samples(vocab_size=0)
    groups = sorted({s.group for s in batch})
    state = lambda: initial_state(made, initial_params(made))
    start = state()
    rows = trainer.score(start, batch, {0: start["policy"].params})
    whole, rows, measured = trainer.update(start, rows, 1, 0)
    for order in (groups, groups[::-1], [1, 3, 0, 2]):
        parts = [[s for s in batch if s.group == g] for g in order]
        begun = state()
        found, drawn, found_rows, values = update_arriving(
            trainer, begun, iter([parts[0] + parts[1], *parts[2:]]), {0: begun["policy"].params},
            1, 0,
        )
        assert [s.group for s in drawn] == sorted(s.group for s in batch)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)
        jax.tree.map(close, found["policy"].params, whole["policy"].params)
        for name in ("logp_old", "adv", "mask"):
            close(found_rows[name], rows[name])
        assert measured.keys() - values.keys() <= {
            n for n in measured if n.startswith(("packing/", "train/", "control/"))
        }
        for name in values.keys() & measured.keys():
            np.testing.assert_allclose(
                values[name], measured[name], rtol=1e-3, atol=1e-5, err_msg=name
            )


@pytest.mark.parametrize("changes, reason", [
    (dict(), None),
    (dict(train__fuse_old_logp="never"), "train.fuse_old_logp is never"),
    (dict(correction__masks="clip_cov", correction__rejected_in_denominator=True),
     "the mask clip_cov ranks the tokens of the batch"),
    (dict(correction__aggregation="prompt-mean"),
     "the aggregation prompt-mean counts the tokens of each prompt in the batch"),
    (dict(correction__environment_ce_coeff=0.1, **tiny.EPISODES),
     "the cross-entropy of environment tokens is a mean over those of the batch"),
    (dict(correction__objective="clip_cov"), "clip_cov samples at random from the whole batch"),
    (dict(correction__advantage="gae", rollout__group_size=1, rollout__prompts=16),
     "the critic is updated after the policy"),
    (dict(correction__controllers="ess_scale"), "ess_scale looks at the batch before its update"),
    (dict(correction__controllers="gradient_alignment(gac_low=0.1, gac_high=0.9)"), None),
])
def test_what_keeps_a_learner_waiting_for_the_whole_batch(changes, reason):
    settings = dict(rollout__schedule="periodic", train__minibatches=1, train__epochs=1)
    assert accumulation_blocker(tiny.setup(**settings | changes).training) == reason
