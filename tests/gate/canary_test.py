"""The check at every sync: an old or absent adapter is caught before a token is sampled."""

import jax
import numpy as np
import pytest

from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.gate.canary import Canary, distances
from jaxrl_tis.runtime.cli import MismatchError
from jaxrl_tis.learner.state import initial_params, initial_state, policy
from jaxrl_tis.models import lora, transformer
from tests import tiny

pytestmark = pytest.mark.compiles
LORA = dict(model__lora="lora(rank=4)", engine__quantization="w8a8")


def begun(size, **overrides):
    """Returns (canary, engine, policy at the start, policy whose factors moved by `size`)."""
    setup = tiny.setup(**LORA | overrides)
    params = policy(setup.training, initial_state(setup.training, initial_params(setup.training)))
    factors, base = lora.split(params)
    moved = setup.training.adapter.join(base, jax.tree.map(lambda x: x + size, factors))
    return Canary(setup, [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]), setup.engine, params, moved


def test_the_distances_by_hand():
    """p_behav (1/2, 1/2) and p_old (1/4, 3/4): |log 1/2| / 2 + |log 3/2| / 2."""
    d, dp_max = distances(np.log([0.25, 0.75]), np.log([0.5, 0.5]))
    assert d == pytest.approx((np.log(2) + np.log(1.5)) / 2) and dp_max == pytest.approx(0.25)


@pytest.mark.parametrize("size", [1e-6, 0.1])
def test_an_old_adapter_is_caught_however_small_the_update(size):
    canary, engine, params, moved = begun(size)
    old, new = engine.load(params), engine.load(moved)
    canary.check(params, old, 0)
    canary.check(moved, [new, new], 1)
    with pytest.raises(MismatchError, match="adapter is old or absent: at version 1"):
        canary.check(moved, old, 1)
    with pytest.raises(MismatchError, match="old or absent"):
        canary.check(moved, [new, old], 1)


def test_an_absent_adapter_is_caught():
    canary, engine, params, moved = begun(0.1)
    with pytest.raises(MismatchError, match="old or absent"):
        canary.check(moved, engine.load(lora.split(moved)[1]), 1)


def test_another_base_is_caught_by_the_log_probs():
    canary, engine, params, moved = begun(0.1)
    served = engine.load(moved)
    wrong = served | {"embed": 4 * served["embed"][::-1]}
    with pytest.raises(MismatchError, match="disagree on 3 fixed prompts: median d "):
        canary.check(moved, wrong, 1)


@pytest.mark.parametrize("pairs, scored, alarm", [
    ([(0.3, 0.25), (9.0, 9.0), (9.0, 9.0)], 1, None),  # within the bounds, so no other is scored
    ([(0.4, 0.0), (0.1, 0.0), (0.2, 0.0)], 3, None),
    ([(0.4, 0.0), (0.31, 0.0), (0.2, 0.0)], 3, "median d 0.31 "),
    ([(0.0, 0.3), (0.0, 0.1), (0.0, 0.26)], 3, "median dp_max 0.26 "),
])
def test_a_prompt_above_a_bound_is_an_alarm_if_most_are(monkeypatch, pairs, scored, alarm):
    canary, engine, params, _ = begun(0.1)
    served, rest = engine.load(params), list(pairs)
    monkeypatch.setattr("jaxrl_tis.gate.canary.distances", lambda learned, sampled: rest.pop(0))
    if alarm is None:
        canary.check(params, served, 1)
    else:
        with pytest.raises(MismatchError, match=alarm):
            canary.check(params, served, 1)
    assert len(pairs) - len(rest) == scored


def test_a_side_that_is_not_finite_is_named_and_is_no_disagreement():
    canary, engine, params, _ = begun(0.1)
    served = engine.load(params)
    broken = served | {"final_norm": np.nan * served["final_norm"]}
    with pytest.raises(FloatingPointError, match="of the sampler after .*: the weight final_norm "):
        canary.check(params, broken, 1)


@pytest.mark.all
@pytest.mark.parametrize("index", [0, 1, 2])
def test_each_prompt_is_scored_after_its_last_token(index):
    canary, _, params, _ = begun(0.1)
    ids = canary._prompts[index]
    setup = canary._setup
    found = canary._scored(canary._learner, setup.training.layout, params, ids)
    logits_tv = transformer.logits(params, setup.model, np.array([ids]))[0]
    np.testing.assert_allclose(found, jax.nn.log_softmax(logits_tv[-1]), atol=1e-5)


def test_a_run_stops_before_it_samples_from_an_old_adapter(tmp_path, monkeypatch):
    """The engine is made to serve the first adapter for ever, as a sampler that misses its syncs."""
    load, first = Engine.load, []

    def stale(self, params, noise=None):
        if lora.split(params)[1] is not None and self.config.quantization == "w8a8":
            first.append(load(self, params, noise))
            return first[0]
        return load(self, params, noise)

    monkeypatch.setattr(Engine, "load", stale)
    short = dict(steps=3, train__epochs=1, train__minibatches=1, eval__every=8, warmup__steps=2)
    with pytest.raises(MismatchError, match="at version 1"):
        tiny.run(tmp_path / "run", **LORA, **short)
    lines = [x for x in tiny.lines(tmp_path / "run") if x["phase"] == "train"]
    assert [x["step"] for x in lines] == [1]


@pytest.mark.all
@pytest.mark.parametrize("changes", [dict(), LORA | tiny.EPISODES], ids=["prompts", "episodes"])
def test_a_run_of_all_weights_or_of_episodes_can_have_it(tmp_path, changes):
    short = dict(steps=1, warmup__steps=0, eval__every=8)
    tiny.run(tmp_path / "run", **short, **changes, rollout__canary="always")


def test_another_choice_is_refused():
    with pytest.raises(ValueError, match="rollout.canary is 'sometimes'"):
        tiny.setup(rollout__canary="sometimes")
