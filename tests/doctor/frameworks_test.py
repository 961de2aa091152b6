"""The tables of other frameworks' names: what is mapped is ours, and conversions are right."""

import itertools
import json
import math
import pathlib
import re

import pytest

from jaxrl_tis.doctor import foreign, frameworks
from jaxrl_tis.doctor.case import (
    CHI2, CHI2_SEQ, CLIPPED, DP_MAX, K3, KL, LAG, LENGTH, PEARSON, PPL, PPO_KL, REJECTED, TURNS,
    WEIGHTS_ESS,
)
from jaxrl_tis.doctor.frameworks import (
    ABS_GAP, CORRECTED, DP_MEAN, FRAMEWORKS, RATIO, REWARD, SAMPLER_LOGP, VARIANTS, WEIGHT_MEAN,
)
from jaxrl_tis.record import names

NAMES = json.loads(pathlib.Path(__file__).with_name("names.json").read_text())  # by make_names.py
ALL = FRAMEWORKS | {f"{name} (variant)": f for name, f in VARIANTS.items()}


def value(framework, ours, **theirs):
    """The value that the first row with all of these names gives; __ stands for /."""
    values = {name.replace("__", "/"): x for name, x in theirs.items()}
    row = next(r for r in framework.names if r.ours == ours and set(r.theirs) <= values.keys())
    return row.value(*(values[name] for name in row.theirs))


@pytest.mark.parametrize("name", ALL)
def test_what_is_mapped_is_in_our_table_of_metrics(name):
    for row in ALL[name].names:
        assert names.find(row.ours) or row.ours.startswith("theirs/"), row.ours


@pytest.mark.parametrize("name", ALL)
def test_every_row_can_be_reached(name):
    """An earlier row of the same metric needs a name that a later one does not."""
    for a, b in itertools.combinations(ALL[name].names, 2):
        assert a.ours != b.ours or not set(a.theirs) <= set(b.theirs), (a.ours, b.theirs)


@pytest.mark.parametrize("name", ALL)
def test_the_source_names_a_commit_its_date_and_files(name):
    assert re.match(r"[\w-]+/[\w-]+[ ,].*\b[0-9a-f]{7,9}\b.* \(20\d\d-\d\d-\d\d\): ", ALL[name].source)
    assert ".py" in ALL[name].source


@pytest.mark.parametrize("name", ALL)
def test_switches_are_of_metrics_that_are_mapped(name):
    assert set(ALL[name].switches) <= {row.ours for row in ALL[name].names}


def test_a_mark_is_of_one_framework():
    marks = {name: {prefix + mark for mark in f.marks for prefix in ("", f.prefix)}
             for name, f in FRAMEWORKS.items()}
    for a, b in itertools.combinations(marks, 2):
        assert not marks[a] & marks[b], (a, b)


def test_verls_names_are_ours_behind_what_a_version_puts_before_them():
    for row in frameworks.VERL.names:
        if row.ours.startswith(("rollout_corr/", "training/", "actor/", "response_length/")):
            [name] = row.theirs
            assert name in (row.ours, "actor/" + row.ours) or name.startswith("mismatch/"), name


@pytest.mark.parametrize("messages, turns", [(2, 1), (4, 2), (3, 1.5)])
def test_verls_turns_are_messages(messages, turns):
    """A question and an answer are 2; a call of a tool and its result are 2 more."""
    assert value(frameworks.VERL, TURNS, num_turns__mean=messages) == turns


# Names that each version writes


def written(framework, version):
    """Names, and the names behind what its loggers put before them."""
    names = set(NAMES[framework][version]["names"])
    prefix = table(framework).prefix
    return names | {name.removeprefix(prefix) for name in names}


def table(framework):
    return FRAMEWORKS.get(framework) or VARIANTS["trl"]


# Ours that a log of this version has; the gap that it does not log cannot be read.
READ = {
    "verl": {
        "0.5.0": {DP_MEAN}, "0.6.0": {KL, K3, PPL, RATIO, WEIGHTS_ESS, REJECTED, CORRECTED, PEARSON},
        "": {KL, K3, PPL, CHI2, CHI2_SEQ, RATIO, WEIGHT_MEAN, WEIGHTS_ESS, REJECTED, CORRECTED, PEARSON, TURNS},
    },
    "trl": {"0.16.0": {CLIPPED}, "0.19.1": {CLIPPED, LENGTH}, "": {ABS_GAP, CORRECTED, CLIPPED, LENGTH}},
    "trl, asynchronous": {"1.16.0": {K3, RATIO, LAG, LENGTH}, "": {K3, RATIO, CLIPPED}},
    "openrlhf": {"0.8.0": {LENGTH}, "": {KL, CORRECTED, CLIPPED, PPO_KL, LENGTH}},
    "slime": {"0.1.0": {KL, RATIO, CLIPPED}, "": {ABS_GAP, KL, CHI2, RATIO, CORRECTED, CLIPPED}},
    "skyrl": {"train-0.2.0": {CLIPPED}, "": {ABS_GAP, RATIO, CORRECTED, CLIPPED, LAG, LENGTH}},
    "prime_rl": {"main": {KL, CORRECTED, LAG, LENGTH, TURNS}, "": {KL, K3, CORRECTED, LENGTH, TURNS}},
    "nemo_rl": {"0.3.1": {RATIO}, "": {KL, K3, RATIO, LENGTH}},
    "tunix": {
        "0.1.5": {CLIPPED}, "0.1.6": {CLIPPED, PPO_KL},
        "": {PEARSON, DP_MAX, ABS_GAP, CORRECTED, RATIO, CLIPPED},
    },
    "tinker": {"": {KL, CORRECTED, SAMPLER_LOGP, LAG, LENGTH, TURNS, REWARD}},
}


@pytest.mark.parametrize("framework", NAMES)
def test_what_each_version_writes_is_read(framework):
    expected = READ[framework]
    for version in NAMES[framework]:
        names = written(framework, version)
        found = {row.ours for row in table(framework).names if set(row.theirs) <= names}
        assert expected.get(version, expected[""]) <= found, version


@pytest.mark.parametrize("framework", NAMES)
def test_each_version_is_told_by_its_names(framework):
    for version in NAMES[framework]:
        if (framework, version) in (("trl", "0.16.0"), ("openrlhf", "0.8.0")):  # they log no gap
            continue
        name, marks = foreign.recognise(set(NAMES[framework][version]["names"]), "auto")
        assert name == framework.removesuffix(", asynchronous") and marks, version


@pytest.mark.parametrize("framework", NAMES)
def test_every_name_of_a_table_is_written_by_a_version(framework):
    names = set().union(*(written(framework, version) for version in NAMES[framework]))
    for row in table(framework).names:
        assert set(row.theirs) <= names, row.theirs
    marks = set(table(framework).marks)
    assert marks - names <= {"timing_s/step"}  # f"timing_s/{name}"


@pytest.mark.parametrize("version", ["0.8.0", "0.9.1"])
def test_verls_bypass_mode_writes_actor_before_its_names(version):
    """The trainer does not compute them there: the actor's are the only ones."""
    names = {name for name in written("verl", version) if not name.startswith("rollout_corr/")}
    found = {row.ours for row in frameworks.VERL.names if set(row.theirs) <= names}
    assert {KL, K3, CHI2, CHI2_SEQ, WEIGHT_MEAN, WEIGHTS_ESS, REJECTED, RATIO, CORRECTED} <= found


def test_the_mean_ratio_of_k1_and_k3():
    # Ratios 0.5 and 2: mean 1.25. k1 is the mean of log 2 and -log 2: 0. k3 is the mean of
    # 0.5 - 1 + log 2 and 2 - 1 - log 2: 0.25.
    assert value(frameworks.VERL, RATIO, rollout_corr__kl=0.0, rollout_corr__k3_kl=0.25) == 1.25
    # 0.8 twice: k1 = -log 0.8, k3 = 0.8 - 1 - log 0.8.
    k1 = -math.log(0.8)
    found = value(frameworks.SLIME, RATIO, train__mis_kl=k1, train__mis_k3_kl=0.8 - 1 + k1)
    assert found == pytest.approx(0.8)


def test_slimes_k1_is_the_samplers_log_prob_less_the_learners():
    found = value(frameworks.SLIME, KL, rollout__rollout_log_probs=-0.5, rollout__log_probs=-0.75)
    assert found == 0.25


def test_nemo_rls_sums_are_divided_by_the_updates():
    # Two updates: ratios of mean 0.99 and 1.02 add up to 2.01, k3 of 0.01 and 0.03 to 0.04.
    sums = {"train__probs_ratio": 2.01, "train__gen_kl_error": 0.04}
    assert value(frameworks.NEMO_RL, K3, **sums) == pytest.approx(0.02)
    assert value(frameworks.NEMO_RL, K3, train__gen_kl_error=0.04) == 0.04
    # A ratio that is switched off is a mean log-prob.
    assert value(frameworks.NEMO_RL, K3, train__gen_kl_error=0.04, train__probs_ratio=-0.7) == 0.04


@pytest.mark.parametrize("out, ratio, weight", [(None, 0.98, None), (0.0, 0.98, 0.98), (0.1, None, 0.98)])
def test_nemo_rls_weights_are_the_ratio_where_none_is_bounded(out, ratio, weight):
    theirs = {"train__sampling_importance_ratio": 1.96, "train__probs_ratio": 2.0}
    theirs |= {} if out is None else {"train__is_oob_ratio": out}
    assert value(frameworks.NEMO_RL, RATIO, **theirs) == ratio
    if weight is not None:
        assert value(frameworks.NEMO_RL, WEIGHT_MEAN, **theirs) == weight


@pytest.mark.parametrize("clipped, ratio", [(0.0, 0.98), (0.01, None)])
def test_tunix_weights_are_the_ratio_where_none_is_clipped(clipped, ratio):
    found = value(frameworks.TUNIX, RATIO, sampler_is__train__weight_mean=0.98,
                  sampler_is__train__frac_clipped_at_threshold=clipped)
    assert found == ratio


@pytest.mark.parametrize("episodes, length", [(4, 25.0), (0, None)])
def test_tinkers_length_is_tokens_by_episodes(episodes, length):
    theirs = {"env__all__total_ac_tokens": 100, "env__all__total_episodes": episodes}
    assert value(frameworks.TINKER, LENGTH, **theirs) == length
