"""Records of several turns, from the record to the update.

Tokens of tools change no loss, and every method of turns gets the turns of the record.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.learner.arriving import update_arriving
from jaxrl_tis.learner.batch_layout import environment_tokens, trajectory_rows
from jaxrl_tis.learner.setup import LearnerSetup
from jaxrl_tis.learner.state import initial_params, initial_state
from jaxrl_tis.learner.trainer import Trainer, turn_rewards
from jaxrl_tis.models import transformer
from jaxrl_tis.rollouts.groups import Sample
from tests import tiny

pytestmark = pytest.mark.compiles

TOOL, OTHER = 17, 18  # ids that no policy and no prompt of these records has
# Sampled (1) and given (0) tokens; the last episode ended with a tool's text, for lack of room.
SHAPES = ["1101", "110010", "1010011", "1", "111", "10010110", "1011", "10100"]


def episode(i, shape, tool=TOOL, garbage=0.0):
    """A record of several turns; `tool` and `garbage` are what its given tokens hold."""
    rng, n = np.random.default_rng(i), len(shape)
    mask = np.array([c == "1" for c in shape])
    turn = np.concatenate([[0], np.cumsum(mask[:-1] & ~mask[1:])]).astype(np.int32)
    field = lambda x: np.where(mask, x, garbage).astype(np.float32)
    draw = rng.integers(3, 13, n)
    rewards = rng.integers(0, 4, turn[mask].max() + 1).astype(np.float32)
    rewards[1::2] = np.nan
    return Trajectory(
        str(i), np.array([1, 4, 13, 5, 15], np.int32), np.where(mask, draw, tool).astype(np.int32),
        field(-1.5 - rng.random(n)), field(-2.0), field(1.0), np.zeros(n, np.int32), "stop", 0, i,
        "none", 1.0, mask=mask, turn=turn, outcome="done", turn_rewards=rewards,
    )


def episodes(**given):
    out = []
    for i in range(16):
        t = episode(i, SHAPES[i % 8], **given)
        score = float(np.nansum(t.turn_rewards))
        out.append(Sample(t, {}, "", score, score, i // 4))
    return out


SGD = optax.sgd(1.0)  # moves by the gradient itself
BASE = dict(
    rollout__max_new_tokens=8, train__minibatches=1, train__epochs=1, model__tie_embeddings=False,
)


@functools.cache
def made(changes):
    setup = tiny.setup(**BASE | dict(changes))
    setup = dataclasses.replace(setup.training, optimizer=SGD)
    return Trainer(setup)


def started(trainer):
    """The initial state, whose embeddings do not tell the two ids of a tool apart: as targets alone
    they are different."""
    params = initial_params(trainer.setup)
    embed = np.array(params["embed"])
    embed[OTHER] = embed[TOOL]
    return initial_state(trainer.setup, params | {"embed": jax.numpy.asarray(embed)})


def update(trainer, samples, is_arriving=False):
    state = started(trainer)
    sampled_by = {0: state["policy"].params}
    if is_arriving:
        parts = [samples[:4], samples[4:12], samples[12:]]
        state, _, rows, metrics = update_arriving(trainer, state, parts, sampled_by, 1, 0)
    else:
        rows = trainer.score(state, samples, sampled_by)
        state, rows, metrics = trainer.update(state, rows, 1, 0)
    return jax.device_get((state, rows, metrics))


def scored(**changes):
    return tuple((BASE | dict(train__fuse_old_logp="never") | changes).items())


PATHS = {
    "dense": scored(),
    "packed": scored(train__pack_length=40),
    "fused": tuple(dict(correction__preset="tis_2").items()),
    "bypass": scored(correction__preset="bypass_ppo_clip"),
    "critic": scored(
        correction__advantage="gae", rollout__group_size=1, rollout__prompts=16,
        correction__turn_credit="rest",
    ),
    "bypassed turns": scored(
        correction__centre="behav", correction__objective="st_ppo", correction__weight="none",
        correction__advantage="tir_otb", correction__turn_credit="rest", train__pack_length=40,
        correction__masks="token_k3(upper=9.0)",
    ),
    "turns": scored(
        correction__weight="turn_tis(cap=1.2)", correction__turn_credit="turn",
        correction__masks="seq_mean_k3(upper=9.0)", correction__aggregation="seq-mean-token-mean",
        correction__kl_coeff=0.1, correction__entropy_coeff=0.01, metrics__diagnostics_every=1,
    ),
    "bypassed turn ratios": scored(
        correction__centre="behav", correction__objective="turn_ppo", correction__weight="none",
        train__pack_length=40,
    ),
    "fused turns": tuple(dict(
        correction__weight="turn_tis(cap=1.2)", correction__turn_credit="rest",
        train__pack_length=40,
    ).items()),
    "arriving": (("rollout__schedule", "periodic"),),
}


def told(path, **given):
    """What a path made of the records: values that may not depend on the tokens of tools."""
    state, rows, metrics = update(made(PATHS[path]), episodes(**given), path == "arriving")
    is_norm = lambda name: "grad_norm" in name or name.startswith(("time/", "variance_proxy/"))
    values = {name: x for name, x in metrics.items() if not is_norm(name)}
    values |= {f"row {name}": rows[name] for name in ("logp_old", "adv", "mask")}
    for name in ("policy", "critic"):
        params = state[name].params if name in state else {}
        for leaf, x in jax.tree_util.tree_leaves_with_path(params):
            leaf = jax.tree_util.keystr(leaf)
            # The gradient of an input goes to the row of its id.
            values[name + leaf] = np.delete(x, [TOOL, OTHER], axis=0) if "embed" in leaf else x
    return values


def differing(path, **given):
    first, second = told(path), told(path, **given)
    assert first.keys() == second.keys() and len(first) > 40
    is_equal = lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return [name for name, x in first.items() if not is_equal(x, second[name])]


@pytest.mark.cases("packed")
@pytest.mark.parametrize("path", PATHS)
def test_mistake_6_tokens_of_tools_change_no_loss(path):
    """Other targets where the policy chose nothing, and anything in what is recorded of them: every
    metric and every gradient is bitwise the same."""
    assert differing(path, tool=OTHER, garbage=7.0) == []


def test_a_mask_that_holds_the_tokens_of_tools_is_found(monkeypatch):
    """The planted mistake: one path takes all tokens of the response for the policy's."""
    made_rows = LearnerSetup.rows

    def with_tools(self, trajectories):
        rows = made_rows(self, trajectories)
        responses = (rows["version"] >= 0) & (rows["segment_ids"] > 0)
        return rows | {"mask": responses, "sampled": responses}

    monkeypatch.setattr(LearnerSetup, "rows", with_tools)
    changed = differing("packed", tool=OTHER)
    assert "actor/pg_loss" in changed and "row logp_old" in changed


@pytest.mark.all
@pytest.mark.parametrize("path", ["bypassed turns", "turns"])
def test_a_mesh_gives_the_update_of_one_device(path):
    """Scalars of the whole minibatch, such as ST-PPO's norm, are no rows to be cut."""
    expected, _, metrics = update(made(PATHS[path]), episodes())
    mesh = (("mesh__train", (1, 4, 1)), ("train__microbatch_rows", 4))
    state, _, found = update(made(PATHS[path] + mesh), episodes())
    assert float(found["actor/pg_loss"]) == pytest.approx(float(metrics["actor/pg_loss"]), rel=1e-5)
    for a, b in zip(*(jax.tree.leaves(x["policy"].params) for x in (state, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


# ECHO: the cross-entropy of the tokens that the environment wrote

ECHO, COLD = 0.3, 0.8
ECHOING = {
    "dense": scored(**tiny.EPISODES),
    "one micro-batch": scored(train__microbatch_rows=16, **tiny.EPISODES),
    "packed": scored(train__pack_length=40, train__microbatch_rows=1, **tiny.EPISODES),
    "fused": tuple(tiny.EPISODES.items()),
    "rejecting": scored(correction__masks="token_ratio(lower=0.999, upper=1.001)", **tiny.EPISODES),
}


def cold_episodes(left_out=()):
    """Records at another temperature than that of the cross-entropy. Some have no reward."""
    return [
        dataclasses.replace(s, trajectory=dataclasses.replace(s.trajectory, temperature=COLD),
                            reward=float("nan") if i in left_out else s.reward)
        for i, s in enumerate(episodes())
    ]


def cross_entropy(params, trainer, left_out=()):
    """Mean over the tokens of tools, from whole logits at temperature 1."""
    rows = trainer.setup.rows([s.trajectory for s in episodes()])
    logits = transformer.logits(
        params, trainer.setup.model, rows["tokens"], None, rows["segment_ids"]
    )
    targets = rows["tokens"][:, 1:]
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), targets[..., None], 2)[..., 0]
    is_tool = (targets == TOOL) & ~np.isin(np.arange(16), left_out)[:, None]
    return -jnp.sum(jnp.where(is_tool, logp, 0.0)) / is_tool.sum()


@pytest.mark.all
@pytest.mark.cases("packed")
@pytest.mark.parametrize("path", ECHOING)
def test_the_environments_tokens_add_their_cross_entropy_to_the_loss(path):
    """Value and gradient, however the batch is cut, and whatever the masks reject."""
    plain = made(ECHOING[path])
    trainer = made((*ECHOING[path], ("correction__environment_ce_coeff", ECHO)))
    for left_out in ((), (1, 2, 6)):
        samples = cold_episodes(left_out)
        state, rows, metrics = update(trainer, samples)
        before, _, without = update(plain, samples)
        expected, gradient = jax.device_get(jax.value_and_grad(cross_entropy)(
            jax.device_get(started(plain)["policy"].params), plain, left_out
        ))
        assert metrics["actor/environment_ce_loss"] == pytest.approx(float(expected), rel=1e-4)
        # Where every token is rejected there is no update without the cross-entropy.
        assert metrics["actor/pg_loss"] == pytest.approx(without.get("actor/pg_loss", 0), abs=1e-6)
        moved = jax.tree.map(
            lambda a, b: a - b, before["policy"].params, state["policy"].params
        )
        for (where, a), (_, b) in zip(
            *map(jax.tree_util.tree_leaves_with_path, (moved, gradient)), strict=True
        ):
            np.testing.assert_allclose(
                a, ECHO * b, rtol=2e-3, atol=1e-5, err_msg=jax.tree_util.keystr(where)
            )
        assert not rows["logp_old"][~rows["sampled"]].any()
    assert not without.keys() & {"actor/environment_ce_loss"}


def test_which_tokens_the_environment_wrote():
    """After the prompt of five tokens; none in a row that is not trained on."""
    rows = trajectory_rows([episode(i, SHAPES[i]) for i in range(8)], 13)
    rows["mask"][1] = False
    found = environment_tokens(rows)
    shapes = ["".join("01"[int(x)] for x in row[5:]) for row in found]
    flipped = [s.translate(str.maketrans("01", "10")) for s in SHAPES]
    expected = [s.ljust(8, "0") for s in flipped]
    expected[1] = "0" * 8
    assert shapes == expected and not found[:, :5].any()


def test_without_a_coefficient_no_update_takes_the_environments_tokens():
    trainer = made(PATHS["dense"])
    state = started(trainer)
    rows = trainer.score(state, episodes(), {0: state["policy"].params})
    assert "environment" not in rows
    assert not trainer.setup.correction.is_in_update("environment")


# Every method of turns, by hand of the rows that the record made


def by_hand(path):
    """Rows of a path, and for each sample its (turn, columns) of sampled tokens."""
    _, rows, metrics = update(made(PATHS[path]), episodes())
    places = []
    for t in (episode(i, SHAPES[i % 8]) for i in range(16)):
        columns = len(t.prompt) + np.flatnonzero(t.mask)
        turn = t.turn[t.mask]
        places.append([columns[turn == k] for k in np.unique(turn)])
    return rows, places, metrics


def rewards_of(i):
    t = episode(i, SHAPES[i % 8])
    return t.turn_rewards


@pytest.mark.all
def test_weights_of_turns_and_advantages_of_their_own_rewards():
    rows, places, metrics = by_hand("turns")
    ratio = rows["logp_old"].astype(np.float64) - rows["logp_behav"]
    weights, adv = np.zeros(ratio.shape), np.zeros(ratio.shape)
    for i, turns in enumerate(places):
        for k, columns in enumerate(turns):
            weights[i, columns] = min(np.exp(ratio[i, columns].sum()), 1.2)
            group = range(i // 4 * 4, i // 4 * 4 + 4)
            known = [rewards_of(g)[k] for g in group if k < len(rewards_of(g))]
            known = [x for x in known if not np.isnan(x)]
            own = rewards_of(i)[k]
            if np.isnan(own) or len(known) < 2 or len(set(known)) == 1:
                continue
            adv[i, columns] = (own - np.mean(known)) / (np.std(known, ddof=1) + 1e-6)
    np.testing.assert_allclose(rows["weights"], weights, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(rows["adv"], adv, rtol=1e-4, atol=1e-5)
    assert (weights == 1.2).any() and (np.abs(adv) > 0.1).any()
    # The share of clipped tokens, by turn and right after the text of a tool.
    first = np.concatenate([weights[i, turns[0]] for i, turns in enumerate(places)])
    assert metrics["mismatch/turn_0/fraction_clipped"] == pytest.approx((first == 1.2).mean())
    after = np.array([weights[i, c[0]] for i, turns in enumerate(places) for c in turns[1:]])
    assert metrics["mismatch/after_tool_1/fraction_clipped"] == pytest.approx((after == 1.2).mean())
    gap = np.array([abs(ratio[i, c[0]]) for i, turns in enumerate(places) for c in turns[1:]])
    found = metrics["mismatch/after_tool_1/log_ratio_abs_mean"]
    assert found == pytest.approx(gap.mean(), rel=1e-4)


@pytest.mark.all
def test_the_token_baseline_counts_sampled_tokens_and_the_rest_of_the_rewards():
    """TIR-OTB: positions are those of the sampled tokens, returns the rewards of this and later
    turns."""
    rows, places, _ = by_hand("bypassed turns")
    power, to_go = np.zeros((16, 8)), np.zeros((16, 8))
    columns_of = [np.concatenate(turns) for turns in places]
    for i, turns in enumerate(places):
        p = np.exp(rows["logp_old"][i, columns_of[i]].astype(np.float64))
        squares = rows["sum_pi_squared"][i, columns_of[i]]
        power[i, : len(p)] = np.cumsum(np.maximum(1 - 2 * p + squares, 0))  # bypass mode has w = 1
        rest = np.concatenate([
            np.full(len(c), np.nansum(rewards_of(i)[k:])) for k, c in enumerate(turns)
        ])
        to_go[i, : len(p)] = rest
    adv = np.zeros(rows["adv"].shape)
    for i, columns in enumerate(columns_of):
        group = range(i // 4 * 4, i // 4 * 4 + 4)
        for n, column in enumerate(columns):
            live = [g for g in group if n < len(columns_of[g])]
            baseline = sum(power[g, n] * to_go[g, n] for g in live)
            baseline /= sum(power[g, n] for g in live) + 1e-8
            if len(live) == 1:  # its baseline is 0, of the others' zero tails
                adv[i, column] = to_go[i, n]
            elif len({to_go[g, n] for g in live}) > 1:
                adv[i, column] = to_go[i, n] - baseline
    np.testing.assert_allclose(rows["adv"], adv, rtol=1e-4, atol=1e-4)
    assert np.abs(adv).max() > 0.5


@pytest.mark.all
def test_the_loss_of_turn_ratios_in_packed_rows():
    rows, places, metrics = by_hand("bypassed turn ratios")
    losses = []
    for i, turns in enumerate(places):
        for c in turns:
            ratio = rows["logp_old"][i, c].astype(np.float64) - rows["logp_behav"][i, c]
            ratio, adv = np.exp(ratio.mean()), rows["adv"][i, c]
            losses += list(np.maximum(-ratio * adv, -np.clip(ratio, 0.8, 1.2) * adv))
    assert metrics["actor/pg_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert abs(np.mean(losses)) > 1e-3


@pytest.mark.all
def test_the_loss_of_turns_in_an_update_that_scores_its_packed_rows():
    rows, places, metrics = by_hand("fused turns")
    assert made(PATHS["fused turns"]).setup.recompute_reason is None
    losses, rest = [], lambda g, k: np.nansum(rewards_of(g)[k:])
    for i, turns in enumerate(places):
        for k, c in enumerate(turns):
            ratio = rows["logp_old"][i, c].astype(np.float64) - rows["logp_behav"][i, c]
            weight = min(np.exp(ratio.sum()), 1.2)
            group = [g for g in range(i // 4 * 4, i // 4 * 4 + 4) if k < len(places[g])]
            scores = [rest(g, k) for g in group]
            adv = 0.0
            if len(set(scores)) > 1:
                adv = (rest(i, k) - np.mean(scores)) / (np.std(scores, ddof=1) + 1e-6)
            np.testing.assert_allclose(rows["adv"][i, c], adv, rtol=1e-4, atol=1e-5)
            losses += [-weight * adv] * len(c)
    assert metrics["actor/pg_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert abs(np.mean(losses)) > 1e-3


def sample(shape, rewards, reward=None, score=None, **fields):
    """A sample with a prompt of five tokens; its score is the sum of its turns' rewards."""
    score = float(np.nansum(rewards)) if score is None else score
    trajectory = dataclasses.replace(episode(0, shape), turn_rewards=np.array(rewards, np.float32))
    return Sample(trajectory, {}, "", score, score if reward is None else reward, 0, **fields)


@pytest.mark.parametrize("shape, rewards, given, expected", [
    # Turns of 2, 1 and 3 sampled tokens; the rewards stand at 1, 4 and 8.
    ("110010111", [1, 2, 4], {}, {1: 1, 4: 2, 8: 4}),
    ("110010111", [1, np.nan, 4], {}, {1: 1, 4: np.nan, 8: 4}),
    ("110010111", [1, 2], {}, {1: 1, 4: 2, 8: np.nan}),
    # An overlong penalty of -0.5 is the last turn's.
    ("110010111", [1, 2, 4], dict(reward=6.5), {1: 1, 4: 2, 8: 3.5}),
    ("110010111", [1, 2, np.nan], dict(reward=2.5), {1: 1, 4: 2, 8: -0.5}),
    # No reward of a turn: one of the episode, of a function or of a failed environment.
    ("110010111", [], dict(score=3.0), {1: np.nan, 4: np.nan, 8: 3}),
    ("110010111", [1, 2], dict(score=-1.0, is_failed=True), {1: np.nan, 4: np.nan, 8: -1}),
    ("110010111", [1, 2, 4], dict(score=np.nan), {1: 1, 4: 2, 8: np.nan}),
    ("111", [5], {}, {2: 5}),
    ("10100", [1, 2], {}, {0: 1, 2: 2}),  # ended with the text of a tool
])
def test_the_reward_of_a_turn_stands_on_its_last_token(shape, rewards, given, expected):
    row = np.zeros(15)
    for place, value in expected.items():
        row[5 + place] = value
    [found] = turn_rewards([sample(shape, rewards, **given)], 15)
    np.testing.assert_allclose(found, row)


def test_a_sample_without_a_token_has_no_turn():
    assert not turn_rewards([sample("1", [1])], 8)[:, :5].any()
    empty = dataclasses.replace(episode(0, "1"), **{
        name: getattr(episode(0, "1"), name)[:0] for name in ("tokens", "mask", "turn")
    })
    assert not turn_rewards([Sample(empty, {}, "", 0.0, 0.0, 0)], 8).any()
