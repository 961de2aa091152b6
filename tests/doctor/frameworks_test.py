"""The tables of other frameworks' names: what is mapped is ours, and conversions are right."""

import itertools
import math
import re

import pytest

from jaxrl_tis.doctor import frameworks
from jaxrl_tis.doctor.case import K3, KL
from jaxrl_tis.doctor.frameworks import FRAMEWORKS, RATIO, VARIANTS, WEIGHT_MEAN
from tests.metrics_page_test import as_regex
from tests.metrics_page_test import rows as documented

ALL = FRAMEWORKS | {f"{name} (variant)": f for name, f in VARIANTS.items()}


def value(framework, ours, **theirs):
    """The value that the first row with all of these names gives; __ stands for /."""
    values = {name.replace("__", "/"): x for name, x in theirs.items()}
    row = next(r for r in framework.names if r.ours == ours and set(r.theirs) <= values.keys())
    return row.value(*(values[name] for name in row.theirs))


@pytest.mark.parametrize("name", ALL)
def test_what_is_mapped_is_on_our_page_of_metrics(name):
    known = [as_regex(n) for names, *_ in documented() for n in names]
    for row in ALL[name].names:
        is_ours = any(re.fullmatch(pattern, row.ours) for pattern in known)
        assert is_ours or row.ours.startswith("theirs/"), row.ours


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


def test_verls_names_are_ours():
    assert all(row.theirs == (row.ours,) for row in frameworks.VERL.names
               if not row.ours.startswith("theirs/") and row.ours != RATIO)


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
