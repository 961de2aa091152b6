"""What the tests against verl share: golden_verl.json, the two runs and how results compare.

verl ran in float64 on clean inputs. We run in float64 with a bool mask, and in float32 with an int
mask and NaN at padding. Where the batch "ties" has settings of its own, and so is compiled apart,
its mask is float.
"""

import contextlib
import json
import pathlib

import jax
import numpy as np
import pytest

from jaxrl_tis.estimators import weights

GOLDEN = json.loads(pathlib.Path(__file__).with_name("golden_verl.json").read_text())
BATCHES = GOLDEN["batches"]
RUNS = {  # dtype of the log-probs, dtype of the mask, what stands at padding
    "float64": (np.float64, bool, 0.0),
    "float32": (np.float32, np.int32, np.nan),
}
LEVELS = {"token": "token", "sequence": "seq"}
COUNTED = ("fraction", "clipfrac", "length", "oob_ratio", "aborted_ratio")


@pytest.fixture(
    params=["float64", pytest.param("float32", marks=pytest.mark.all)], scope="module"
)
def run(request):
    is_double = RUNS[request.param][0] is np.float64
    with jax.enable_x64(True) if is_double else contextlib.nullcontext():
        yield request.param


@pytest.fixture(params=BATCHES)
def name(request):
    return request.param


def inputs(name, run, mask_dtype=None):
    """The batch in the dtypes of the run, with the run's padding."""
    dtype, run_mask_dtype, padding = RUNS[run]
    batch = {field: np.array(x, dtype) for field, x in BATCHES[name]["inputs"].items()}
    mask = batch["mask"] != 0
    for field, x in batch.items():
        if x.shape == mask.shape:
            batch[field] = np.where(mask, x, dtype(padding))
    mask = mask.astype(mask_dtype or run_mask_dtype)
    return batch | {"mask": mask, "group": batch["group"].astype(np.int32)}


def inputs_of_case(name, run):
    """The inputs for the settings that make_golden_verl.py chose for the batch."""
    return inputs(name, run, np.float32 if name == "ties" else None)


def drift(name, is_sequence=False):
    """Largest |log r| of a token, or its largest sum over a sequence."""
    batch = inputs(name, "float64")
    size = np.abs(batch["logp_old"] - batch["logp_behav"])
    size = (size + np.abs(batch["logp"] - batch["logp_old"])) * batch["mask"]
    return float(np.max(size.sum(1) if is_sequence else size))


def assert_close(got, want, run, label="", drift=0.0, scale=0.0):
    """Relative error 1e-9 in float64 and 1e-5 (1 + drift) in float32, of the largest number that
    entered a sum (scale, or the largest wanted) where they cancel."""
    want = np.asarray(want, np.float64)
    largest = max(scale, float(np.max(np.abs(want), initial=0.0)))
    is_double = RUNS[run][0] is np.float64
    rtol, atol = (1e-9, 1e-14) if is_double else (1e-5 * (1.0 + drift), 2e-6)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol * largest, err_msg=label)


def assert_metrics(got, want, run, prefix="", label="", drift=0.0):
    """verl counts fractions and lengths in float32, and where it has NaN we have 0."""
    assert set(got) == {prefix + key for key in want}, label
    for key, value in want.items():
        value = 0.0 if np.isnan(value) else value
        ours = float(got[prefix + key])
        if key.endswith("std"):  # verl subtracts the squared mean from the mean square
            is_double = RUNS[run][0] is np.float64
            np.testing.assert_allclose(
                ours**2,
                value**2,
                rtol=1e-8 if is_double else 1e-4 * (1.0 + drift),
                atol=1e-12 if is_double else 1e-5,
                err_msg=f"{label} {key}",
            )
        elif any(part in key for part in COUNTED):
            np.testing.assert_allclose(ours, value, rtol=1e-6, err_msg=f"{label} {key}")
        else:
            assert_close(ours, value, run, f"{label} {key}", drift, scale=1.0)


def bounds(threshold):
    """verl's threshold as our keywords."""
    if "_" not in str(threshold):
        return {"upper": float(threshold)}
    lower, upper = str(threshold).split("_")
    return {"lower": float(lower), "upper": float(upper)}


def rollout_weights(log_ratio, mask, level, threshold):
    """verl's `rollout_is`: IcePop if the threshold is a band, truncation if it is a number."""
    band = bounds(threshold)
    if "lower" in band:
        return weights.WEIGHTS[f"{LEVELS[level]}_icepop"](log_ratio, mask, **band)
    return weights.WEIGHTS[f"{LEVELS[level]}_tis"](log_ratio, mask, cap=band["upper"])


def criteria(options, threshold):
    """verl's comma-separated options and thresholds as arguments of `masks.all_of`."""
    options, thresholds = options.split(","), str(threshold).split(",")
    return [(option, bounds(x)) for option, x in zip(options, thresholds, strict=True)]


def cases(name, family):
    """What make_golden_verl.py tried on the batch: the first two entries of each case."""
    return tuple(tuple(case.values())[:2] for case in BATCHES[name][family])
