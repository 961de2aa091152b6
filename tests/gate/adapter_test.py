"""The rung `adapter`: what the sampler's factors of LoRA have of the gap."""

import contextlib
import functools
import json
from unittest import mock

import jax
import numpy as np
import pytest

from jaxrl_tis.gate import ladder, pages, report
from jaxrl_tis.learner.scoring import make_score
from jaxrl_tis.learner.state import initial_params, initial_state, policy
from jaxrl_tis.models import lora, peft
from tests import commands, tiny

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("XLA compiles and rounds the programs"),
]
LORA = dict(model__lora="lora(rank=4, alpha=32)")


@pytest.fixture(autouse=True)
def _scores(monkeypatch):
    """Programs of learner and sampler are traced once."""
    monkeypatch.setattr(ladder, "make_score", make_score)
    monkeypatch.setattr(pages, "Engine", shared_engine)


make_score, shared_engine = functools.cache(make_score), functools.cache(pages.Engine)


@functools.cache
def policies(**overrides):
    """Returns (setup, a policy whose factors moved, serving parameters: the same, old, absent)."""
    setup = tiny.setup(**LORA, **overrides)
    fresh = policy(setup.training, initial_state(setup.training, initial_params(setup.training)))
    factors, base = lora.split(fresh)
    moved = setup.training.adapter.join(base, jax.tree.map(lambda x: x + 0.05, factors))
    load = setup.engine.load
    return setup, moved, {"same": load(moved), "old": load(fresh), "absent": load(base)}


def rungs_of(sampler, **overrides):
    """Returns (cause -> the rung's differences of the sampled tokens, logp_old - logp_behav)."""
    setup, params, served = policies(**overrides)
    trajectories = report.sample(setup, params, 4, served=served[sampler])
    rungs = ladder.climb(setup, params, trajectories, served[sampler])
    rows = setup.training.rows(trajectories)
    total = rungs[0].before.astype(np.float64) - rows["logp_behav"]
    return {r.cause: (r.is_same, r.difference[rows["mask"]]) for r in rungs}, total[rows["mask"]]


@pytest.mark.all
@pytest.mark.cases("same-none", "old-none")
@pytest.mark.parametrize("scheme", ["none", "w8a8"])
@pytest.mark.parametrize("sampler", ["same", "old", "absent"])
def test_another_adapter_is_the_gap_and_the_same_one_is_none_of_it(sampler, scheme):
    """A fresh adapter is its base, so that an old and an absent one here are one policy. In float32
    all else is rounding; an 8-bit base has rungs of its own."""
    rungs, total = rungs_of(sampler, engine__quantization=scheme)
    np.testing.assert_allclose(sum(x for _, x in rungs.values()), total, rtol=0, atol=1e-12)
    is_same, gap = rungs["adapter"]
    rest = total - gap
    if sampler == "same":
        assert is_same and not gap.any()
    else:
        assert not is_same and np.abs(gap).mean() > 0.1
        assert np.abs(gap).mean() > 5 * np.abs(rest).mean()
    if scheme == "none":
        assert np.abs(rest).max() < 2e-5
    else:
        assert 1e-4 < np.abs(rungs["weights"][1]).mean() < 0.1


def test_an_absent_adapter_is_exactly_the_learner_without_factors():
    setup, params, served = policies(engine__quantization="none")
    trajectories = report.sample(setup, params, 4, served=served["absent"])
    first = ladder.climb(setup, params, trajectories, served["absent"])[0]
    alone = ladder.climb(setup, lora.split(params)[1], trajectories)[0]
    np.testing.assert_array_equal(first.after, alone.before)


def test_the_gate_of_a_run_with_lora_finds_its_own_adapter():
    setup, params, _ = policies(engine__quantization="none")
    by_cause = {r["cause"]: r for r in report.measure(setup, params, 4)["rungs"]}
    assert list(by_cause)[0] == "adapter" and by_cause["adapter"]["is_same"]


@pytest.mark.all
def test_the_command_takes_an_adapter_from_a_folder(tmp_path):
    """Of a config without LoRA. The rung is there, and an engine that drops the factors is found."""
    setup, params, _ = policies(engine__quantization="none")
    peft.save(tmp_path / "adapter", setup.training.adapter, lora.split(params)[0])
    config, path = tiny.config(engine__quantization="none"), tmp_path / "gate.json"
    gate, load = commands.load("gate.__main__"), setup.engine.load
    found = {}
    for name in ("kept", "dropped"):
        serve = {
            "kept": load, "dropped": lambda params, noise=None: load(lora.split(params)[1], noise)
        }[name]
        with (
            tiny.one_device(),
            mock.patch.object(
                type(setup.engine), "load", lambda self, *args, serve=serve: serve(*args)),
            mock.patch.object(gate, "CONNECTED", contextlib.nullcontext),
            commands.exits(
                gate, CONFIG=config, JSON=path, PROMPTS=None, ADAPTER=str(tmp_path / "adapter"),
                ENGINE=None,
            ) as exited,
        ):
            gate.main()
        found[name] = exited.value.code, json.loads(path.read_text())
    code, of_kept = found["kept"]
    assert code == 0 and of_kept["rungs"][0] == {"cause": "adapter", "is_same": True}
    code, of_dropped = found["dropped"]
    assert code == 1 and of_dropped["largest"] == "adapter"
    assert of_dropped["rungs"][0]["d_mean"] == pytest.approx(of_dropped["total"]["d_mean"], rel=1e-3)
