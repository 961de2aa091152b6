"""Every metric that a run writes has a row in docs/metrics.md, and some run writes every row."""

import re
from unittest import mock

import jax
import numpy as np
import pytest

from jaxrl_tis.diagnostics import correction_metrics
from jaxrl_tis.estimators import masks, rank_masks
from jaxrl_tis.record import goodput, metrics, names
from tests import tiny
from tests.engine import drafter_test
from tests.resume_test import cut_at

pytestmark = pytest.mark.compiles

# Runs that together write every name but those of `further`.
RUNS = {
    "default": {"metrics__diagnostics_every": 1, "warmup__steps": 1},
    "ppo": {"correction__advantage": "gae", "train__pack_length": 16, "model__dtype": "float16"},
    "masked": {
        "correction__weight": "token_mis(upper=2.0)", "correction__masks": "seq_mean_k1(upper=1.5)",
        "correction__controllers": "adaptive_kl(kl_target=0.05)",
        "correction__kl_coeff": 0.01, "correction__entropy_coeff": 0.01,
        "correction__batch_normalize": True, "reward__name": "tests.tiny_rewards:parts",
    },
    "bypass": {
        "correction__preset": "bypass_ppo_clip", "correction__sampler_kl_coeff": 0.01,
        "correction__controllers": "ess_scale & layerwise_perturbation & "
        "gradient_alignment(gac_low=0.1, gac_high=0.9)",
    },
    "rejecting": {
        "correction__masks": "opsm(opsm_delta=0.1)", "engine__max_draft": 1,
        "correction__objective": "r2vpo(r2vpo_lambda=0.5)",
        "correction__controllers": "r2vpo_dual(r2vpo_bound=0.0, r2vpo_step=1.0)",
    },
    "on prompts": {
        "correction__objective": "quatro(quatro_delta=0.1, quatro_floor=0.1)",
        "train__microbatch_rows": 16, "train__minibatches": 1,
    },
    "by factor": {
        "correction__preset": "capped_ratio", "rollout__dynamic_sampling": True, "rollout__extend_equal": 2,
    },
    "centred": {"correction__preset": "centered_tis_2"},
    "experts": {
        "model__num_experts": 4, "model__expert_dim": 16, "engine__record_routes": True,
        "correction__routing": "r3", "correction__routing_missing": "mask",
        "correction__load_balance_coeff": 0.01, "metrics__diagnostics_every": 1,
    },
    "kept": {
        "rollout__top_k": 9, "rollout__sampling_mask_size": 9, "engine__retention": (1, 1),
        "engine__page_size": 2, "engine__quantization": "none", "correction__dense_kl_coeff": 0.1,
    },
    "asynchronous": {
        "rollout__schedule": "areal(staleness=1)", "rollout__gap_probe_every": 1,
        "rollout__replay": "fresh_by_ess(uses=2)",
    },
    "episodes": tiny.EPISODES | {"correction__environment_ce_coeff": 0.01},
    "lora": {"model__lora": "lora(rank=4)"},
    "sessions": tiny.HARNESS,
    "threads": {"rollout__schedule": "one_step", "rollout__driver": "threads"},
    "ray": {
        "rollout__schedule": "one_step", "rollout__driver": "ray", "rollout__cpus_per_worker": 0.01,
    },
}
# What may stand for a placeholder.
PLACEHOLDERS = {"<mask>": "|".join([*masks.MASKS, *rank_masks.MASKS])}


@pytest.fixture(scope="module", params=["one run", pytest.param("all", marks=pytest.mark.all)])
def written(request, tmp_path_factory):
    """Every name that one run writes, or that some run does."""
    folder = tmp_path_factory.mktemp("runs")
    for name in RUNS if request.param == "all" else ["masked"]:
        tiny.run(folder / name, steps=1, **{"warmup__steps": 0} | RUNS[name])
    if request.param == "all":
        continued(folder / "continued")
        drafter = drafter_test.small_model(tmp_path_factory.mktemp("drafter"))
        taught = dict(rollout__teacher=drafter["engine__drafter"], rollout__alpha="linear(start=0.5, steps=4)")
        tiny.run(folder / "drafted", **drafter, **taught, steps=1, engine__drafter_every=1)
    records = [record for path in folder.iterdir() for record in metrics.read(path)]
    return {name for record in records for name in record} - {"step", "phase"} | further()


def continued(folder):
    """A run that loses its first step, and takes it again."""
    with cut_at(2, "after update"):
        tiny.run(folder, steps=2, **RUNS["default"])
    tiny.run(folder, steps=2, **RUNS["default"])


def further():
    """Names of runs that cannot be made here: of several turns, whose records are a source's own,
    and on devices that tell how much memory was in use."""
    logp, turn = np.zeros((2, 4), np.float32), np.array([[0, 0, 1, 1]] * 2)
    batch = {"logp_old": logp, "logp_behav": logp, "entropy": logp, "mask": logp == 0, "turn": turn}
    device = mock.Mock()
    device.memory_stats.return_value = {"peak_bytes_in_use": 2**30}
    with mock.patch.object(jax, "local_devices", lambda: [device]):
        profile = correction_metrics.profile_metrics(("none", {}), batch, has_turns=True)
        return {*profile, *goodput.memory()}


def test_every_value_has_a_row(written):
    assert len(written) > 120
    assert sorted(name for name in written if names.find(name) is None) == []


@pytest.mark.all
@pytest.mark.parametrize("written", ["all"], indirect=True)
def test_every_row_is_of_something(written):
    """Every name in the table is written; one with a placeholder, by a name that has no other row."""
    rest = {name for name in written if name not in names.find(name).names}
    matches = lambda name: any(re.fullmatch(names.regex(name, PLACEHOLDERS), w) for w in rest)
    unknown = [name for metric in names.METRICS for name in metric.names
               if name not in written and not ("<" in name and matches(name))]
    assert unknown == []


@pytest.mark.all
def test_a_compact_line_is_a_fifth(tmp_path):
    sizes = {}
    for kind in ("full", "compact"):
        tiny.run(tmp_path / kind, steps=1, metrics__record=kind)
        [line] = [x for x in (tmp_path / kind / "metrics.jsonl").read_text().splitlines()
                  if '"train"' in x]
        sizes[kind] = len(line)
    assert sizes["compact"] < sizes["full"] / 4
