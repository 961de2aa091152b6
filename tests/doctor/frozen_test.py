"""A sampler whose weights stay behind while its version says that it is fresh."""

import numpy as np
import pytest

from jaxrl_tis.doctor import foreign
from jaxrl_tis.doctor.case import K3, KL, LAG, PEARSON, THRESHOLDS, Case
from jaxrl_tis.doctor.diagnose import describe, diagnose
from jaxrl_tis.doctor.frameworks import ABS_GAP, KL_REF, REWARD, SAMPLER_LOGP
from jaxrl_tis.doctor.frozen import FACTS, rank_correlation
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.models import lora
from tests import tiny
from tests.doctor import logs
from tests.doctor.confusion_test import linear, noisy
from tests.doctor.runs import names, write_run

LORA = {"model.lora": "lora(rank=4)", "rollout.canary": "never"}
STILL = {SAMPLER_LOGP: noisy(0.5, 0.02, 1), REWARD: noisy(0.3, 0.05, 2)}
GROWING = {K3: linear(0.002, 0.2), KL: linear(0.002, 0.2), PEARSON: linear(0.99, 0.6)}


def evidence_of(diagnosis, name="frozen"):
    [finding] = [f for f in diagnosis["findings"] if f["name"] == name]
    return {e["metric"]: e["value"] for e in finding["evidence"]}


def test_ranks_by_hand():
    """(1, 2, 3) and (2, 1, 3): 1 - 6 * 2 / (3 * 8). A constant has no ranks."""
    assert rank_correlation((1, 2, 3), (2, 1, 3)) == pytest.approx(0.5)
    assert rank_correlation((1, 1, 1), (2, 1, 3)) == 0
    assert rank_correlation((1, float("inf"), 2), (2, 1, 3)) == 0
    # Ranks 0.5, 2, 2, 3.5 and 0.5, 1.5, 2.5, 3.5: 4.5 / sqrt(4.5 * 5).
    assert rank_correlation((1, 2, 2, 3), (1, 2, 3, 4)) == pytest.approx(0.9**0.5)


def test_facts_of_a_gap_by_hand():
    """40 values, in tenths of four."""
    fact = lambda name, values, metric: FACTS[f"record/{name}"](
        Case({metric: dict(enumerate(values))}, {}, THRESHOLDS, len(values) - 1))[0]
    assert fact("gap_grown", [0.1] * 4 + [0.2] * 32 + [0.4] * 4, K3) == pytest.approx(4.0)
    assert fact("gap_grown", [0.0] * 4 + [0.2] * 36, K3) == float("inf")
    assert fact("gap_nats", [0.2] * 40, ABS_GAP) == pytest.approx(0.01 * np.pi)  # of a normal log ratio
    assert fact("gap_nats", [-0.2] * 40, K3) == pytest.approx(0.2)
    with pytest.raises(KeyError, match=f"40 values of {K3}, there are 39"):
        fact("gap_grown", [0.1] * 39, K3)


@pytest.mark.parametrize("changes, child, change", [
    (LORA, "frozen.adapter", {"field": "rollout.canary", "value": "lora", "now": "never"}),
    ({}, "frozen.pinned", {"field": "rollout.canary", "value": "always", "now": "lora"}),
])
def test_a_gap_that_grows_with_the_distance_from_the_base(changes, child, change, tmp_path):
    """In place of A, which blames the engine. By hand: the means of the first and last 12 of 120
    steps of a line from 0.002 to 0.2."""
    diagnosis = diagnose(write_run(tmp_path, GROWING | STILL, changes))
    assert "frozen" in diagnosis["verdict"] and "A" not in diagnosis["verdict"]
    assert {"frozen", child} <= names(diagnosis["findings"])
    evidence = evidence_of(diagnosis)
    assert evidence[f"rank correlation of {K3} with the steps"] == pytest.approx(1)
    slope = 0.198 / 119
    grown = (0.2 - 5.5 * slope) / (0.002 + 5.5 * slope)
    assert evidence[f"{K3}, last tenth of the record by the first"] == pytest.approx(grown)
    [finding] = [f for f in diagnosis["findings"] if f["name"] == child]
    assert finding["changes"] == [change]
    assert "adapter is old or absent, or its weights are pinned" in describe(diagnosis)


def test_the_logged_distance_is_used():
    series = {K3: dict(enumerate(np.linspace(1, 2, 50))), "lora/norm": dict(enumerate(range(50, 0, -1)))}
    value, name = FACTS["record/gap_by_distance"](Case(series, {}, THRESHOLDS, 49))
    assert value == pytest.approx(-1) and name == f"rank correlation of {K3} with lora/norm"


@pytest.mark.parametrize("values", [
    {LAG: linear(0.0, 8.0)},  # staleness that is logged
    {K3: 0.1, KL: 0.1},  # a constant gap, as of quantization
    {SAMPLER_LOGP: linear(0.6, 0.3)},  # the sampler's entropy falls: it has new weights
    {"response_length/mean": linear(100.0, 115.0)}, {REWARD: linear(0.1, 0.6)},
    {KL_REF: linear(0.001, 5.0)},  # the policy is much farther away than the sampler
    {K3: linear(0.0001, 0.0008)},  # a small gap
])
def test_other_gaps_that_grow_and_gaps_that_do_not(values, tmp_path):
    diagnosis = diagnose(write_run(tmp_path, GROWING | STILL | values, LORA))
    assert "frozen" not in names(diagnosis["findings"])
    assert "frozen" not in {u["name"] for u in diagnosis["undecided"]}


def test_without_a_distance_and_without_the_samplers_log_probs_it_stays_open(tmp_path):
    diagnosis = diagnose(write_run(tmp_path, GROWING))
    reasons = {u["name"]: u["reason"] for u in diagnosis["undecided"]}
    assert reasons["frozen"] == f"needs {KL_REF} to the reference, or {SAMPLER_LOGP}"
    assert "A" in diagnosis["verdict"]


# Other frameworks


def trl(path, **changes):
    gap = "sampling/sampling_logp_difference/mean"
    rows = logs.rows(logs.TRL, {gap: linear(0.01, 0.4)} | changes)
    return foreign.diagnose([logs.write_state(path / "trainer_state.json", rows)], "auto")


def test_trl_shows_it_where_it_logs_the_kl_to_the_reference(tmp_path):
    """A mean |log ratio| of 0.4 is a KL of 0.13, if the log ratio is normal."""
    diagnosis = trl(tmp_path, kl=lambda s: 0.15 * (s / 120) ** 2)
    assert "frozen" in diagnosis["verdict"]
    assert evidence_of(diagnosis)["the gap in the last tenth, nats"] == pytest.approx(
        np.pi / 4 * (0.4 - 5.5 * 0.39 / 119) ** 2)
    assert "frozen" not in trl(tmp_path, kl=lambda s: 5.0 * (s / 120) ** 2)["verdict"]
    open_ones = {u["name"] for u in trl(tmp_path)["undecided"]}
    assert "frozen" in open_ones


def test_verls_sampler_perplexity_tells_a_frozen_sampler_from_a_changing_policy(tmp_path):
    grown = {"rollout_corr/kl": linear(0.001, 0.2), "rollout_corr/k3_kl": linear(0.001, 0.2)}
    found = []
    for logp in (noisy(0.7, 0.01), linear(0.7, 0.3)):
        rows = logs.rows(logs.VERL, grown | {"rollout_corr/rollout_log_ppl": logp})
        verdict = foreign.diagnose([logs.write_verl(tmp_path / "verl.jsonl", rows)], "auto")["verdict"]
        found.append({"frozen", "A"} & set(verdict))
    assert found == [{"frozen"}, {"A"}]


# A run


@pytest.mark.all
@pytest.mark.compiles
@pytest.mark.by_jax("a run: flax, optax, orbax and XLA together")
def test_a_run_whose_sampler_never_receives_the_adapter(tmp_path, monkeypatch):
    """The engine serves the first adapter for ever, and nothing checks it. Then a good run."""
    load, first = Engine.load, []

    def stale(self, params, noise=None):
        if lora.split(params)[1] is not None and self.config.quantization == "w8a8":
            first.append(load(self, params, noise))
            return first[0]
        return load(self, params, noise)

    settings = dict(
        steps=60, model__lora="lora(rank=4, alpha=32)", optimizer__lr=5e-4, eval__every=60,
        checkpoint__every=60, warmup__steps=12, train__epochs=1, train__minibatches=1,
        rollout__canary="never", engine__quantization="w8a8", metrics__diagnostics_every=60,
    )
    tiny.run(tmp_path / "good", **settings)
    monkeypatch.setattr(Engine, "load", stale)
    tiny.run(tmp_path / "bad", **settings)
    good, bad = (diagnose(tmp_path / name) for name in ("good", "bad"))
    norms = [x["lora/norm"] for x in tiny.lines(tmp_path / "bad") if x["phase"] == "train"]
    assert 0 < norms[0] < norms[-1]
    assert "frozen.adapter" in names(bad["findings"]) and "frozen" in bad["verdict"]
    assert "frozen" not in good["verdict"]
    gap = {name: [x[ABS_GAP] for x in tiny.lines(tmp_path / name) if x["phase"] == "train"]
           for name in ("good", "bad")}
    assert np.mean(gap["bad"][-6:]) > 3 * np.mean(gap["good"][-6:])
