"""The learner's half of a setup: the shape of its rows, the age of its tokens, its programs."""

import math

import pytest

from jaxrl_tis.learner.setup import make_learner_setup
from jaxrl_tis.validate import validate
from tests import tiny

ONE = dict(train__minibatches=1, train__epochs=1)


@pytest.mark.parametrize("changes, why", [
    (dict(train__minibatches=2), "a rollout batch gets 2 updates"),
    (dict(train__epochs=2), "a rollout batch gets 2 updates"),
    (dict(train__fuse_old_logp="never"), "train.fuse_old_logp is never"),
    (dict(correction__batch_normalize=True), "weights are divided by their mean"),
    (dict(correction__masks="token_k2(upper=1.0)"), "the number of tokens that the masks keep"),
    (dict(correction__masks="top_entropy", correction__rejected_in_denominator=True),
     "the mask top_entropy ranks the tokens"),
    (dict(correction__kl_coeff=0.1, correction__kl_placement="reward"), "a part of the reward"),
    (dict(correction__controllers="ess_scale"), "ess_scale looks at the batch"),
    (dict(correction__advantage="otb"), "the advantage otb needs"),
    (dict(correction__objective="st_ppo"), "the objective st_ppo needs st_ppo_norm"),
])
def test_why_a_batch_is_scored_before(changes, why):
    assert why in tiny.setup(**ONE | changes).training.recompute_reason


def test_a_batch_is_scored_by_its_only_update():
    assert tiny.setup(**ONE).training.recompute_reason is None


@pytest.mark.parametrize("rollout, staleness", [
    ({}, 0),
    (dict(schedule="areal(staleness=2)"), 2),
    (dict(schedule="fully_async(trigger=2, threshold=0.5)"), 2),
    (dict(replay="newest"), 4),  # four versions beyond the schedule
    (dict(replay="newest", max_age=7), 7),
    (dict(replay="newest(uses=1)"), 0),  # replays nothing
    (dict(schedule="areal(staleness=inf)", queue=8, snapshots=4), math.inf),
])
def test_the_age_of_a_token_is_bounded_by_mode_and_replay(rollout, staleness):
    changes = {f"rollout__{name}": value for name, value in rollout.items()}
    assert tiny.setup(**changes).training.staleness == staleness


@pytest.mark.parametrize("old_logp, approximates_old_logp, averages_policy", [
    ("ring", False, False), ("ewma", True, True), ("none", True, False),
])
def test_another_policy_stands_in_for_older_weights(old_logp, approximates_old_logp, averages_policy):
    bypass = dict(correction__centre="behav", correction__weight="none")
    training = tiny.setup(
        rollout__schedule="one_step", rollout__old_logp_source=old_logp, **bypass
    ).training
    assert training.approximates_old_logp == approximates_old_logp
    assert training.averages_policy == averages_policy


def test_rows_hold_the_longest_prompt_and_response():
    whole, packed = tiny.setup().training, tiny.setup(train__pack_length=24).training
    assert whole.row_length == packed.row_length == 5 + 3
    assert whole.correction.scale is None and whole.update_learner is whole.learner
    # Sums over packed rows are divided by the length of a row of one sequence.
    assert packed.correction.scale == 8.0
    assert packed.update_learner.max_targets == packed.packer.length == 128


def test_a_sampler_that_drops_keys_has_evictions():
    assert not tiny.setup().training.has_evictions
    assert tiny.setup(engine__retention=(1, 2)).training.has_evictions


R3 = dict(correction__routing="r3", engine__record_routes=True)


@pytest.mark.parametrize("changes, model, why", [
    (R3, {}, "'r3' replays routes, and the model has no experts"),
    (dict(correction__load_balance_coeff=0.1), {}, "losses of routers, and the model has no experts"),
    (dict(correction__router_z_coeff=0.1), {}, "losses of routers, and the model has no experts"),
    (dict(optimizer__freeze_router_bias=False), {}, "routers with sigmoid scores"),
    (dict(optimizer__freeze_router_bias=False), dict(model__num_experts=4), "and the model has none"),
])
def test_settings_of_routers_that_a_checkpoint_lacks_are_refused(changes, model, why):
    """A config that names a checkpoint is checked against it once it was read."""
    config = tiny.config(model__path="some/folder", **changes)
    choices, read = validate(config), tiny.setup(**model).model
    chosen = choices.correction, choices.schedule, choices.replay
    with pytest.raises(ValueError, match=why):
        make_learner_setup(config, *chosen, read)


def test_rows_that_the_context_shards_do_not_cut_are_refused():
    with pytest.raises(ValueError, match="rows of 9 tokens cannot be cut.* 8 context shards"):
        tiny.setup(mesh__train=(1, 1, 1, -1), task__max_prompt_tokens=5, rollout__max_new_tokens=4)


@pytest.mark.parametrize("changes, name", [
    (dict(train__microbatch_rows=4), "train.microbatch_rows = 4"),
    (dict(train__microbatch_rows=8, warmup__rows=4), "warmup.rows = 4"),
])
def test_rows_that_the_data_shards_do_not_divide_are_refused(changes, name):
    """-1 is all 8 devices."""
    with pytest.raises(ValueError, match=f"{name} is not divisible by the 8 data shards of mesh.train"):
        tiny.setup(mesh__train=(-1, 1, 1), **changes)
    tiny.setup(mesh__train=(-1, 1, 1), train__microbatch_rows=8, warmup__rows=4, warmup__steps=0)
