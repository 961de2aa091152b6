"""The notebooks run from top to bottom, and what they draw is what the tables hold."""

import json
import math
import pathlib
import subprocess
import time

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot as plt

from jaxrl_tis.estimators import kl, masks, objectives, weights
from jaxrl_tis.experiments import frontier

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("the notebook's calls of jax")]

FOLDER = pathlib.Path(__file__).parents[1] / "colab"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"), key=lambda path: path.name)
LONGEST_S = 120.0
E = math.e


def code_cells(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def run(path):
    """The variables that a notebook leaves behind."""
    variables = {"__name__": "__main__"}
    for cell in code_cells(path):
        exec(compile("".join(cell["source"]), f"{path.name}:{cell['id']}", "exec"), variables)
    return variables


def panels(figure):
    """{title: the lines of the panel}."""
    return {ax.get_title(loc="left"): ax.get_lines() for ax in figure.axes}


def at(line, x):
    """The drawn value nearest to x."""
    return line.get_ydata()[np.argmin(np.abs(line.get_xdata() - x))]


def check_weights(figure):
    lines = {line.get_label(): line for ax in figure.axes for line in ax.get_lines()}
    assert sorted(lines) == sorted(weights.WEIGHTS)
    assert sum(len(ax.get_lines()) for ax in figure.axes) == len(weights.WEIGHTS)
    expected = {  # all 8 tokens at a log-ratio of 1; turns of 4
        "none": 1.0, "token_vanilla": E, "token_tis": 2.0, "token_mis": 0.0, "token_icepop": E,
        "seq_vanilla": E**8, "geo_icepop": E, "turn_geo": 2.0, "prefix_minpro": E * E,
        "prefix_ctpo": math.exp(0.05 * math.sqrt(8)), "capped_ratio": 2.0, "seq_capped_ratio": 2.0,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(at(lines[name], 1.0), value, rtol=1e-3, err_msg=name)


def check_masks(figure):
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [name for name in masks.MASKS if name not in masks.NEEDS]
    paths = [bar.get_paths() for bar in axes.collections]
    assert [len(path) for path in paths] == [1] * len(names)
    columns = [path.vertices[:, 0] for (path,) in paths]
    ends = {name: (x.min(), x.max()) for name, x in zip(names, columns)}
    # A ratio of 2 of one token, or of 8; l^2 / 2 <= 2; a mean square of 0.04.
    edge = {"token_k1": math.log(2), "seq_sum_k1": math.log(2) / 8, "token_k2": 2.0, "m2po": 0.2}
    for name, value in edge.items():
        np.testing.assert_allclose(ends[name], (-value, value), atol=6e-3, err_msg=name)
    np.testing.assert_allclose(ends["veto"], (math.log(1e-4), 12.0), atol=6e-3)


def check_objectives(figure):
    drawn = panels(figure)
    assert list(drawn) == list(objectives.OBJECTIVES)
    # n / (K size); gamma / (1 + gamma)^2; the loss of the response on each of its n tokens.
    other = {"espo": 8 / 12, "fusion_shaped": 0.1 / 1.1**2, "seq_ppo": 8.0}
    for name, (good, bad) in drawn.items():
        start = other[name] if name in other else 1.0
        np.testing.assert_allclose([at(good, 0), at(bad, 0)], [start, -start], rtol=1e-5,
                                   err_msg=name)
    after_one_nat = {"ppo": (0, -E), "dual_clip": (0, -E), "cispo": (1.2, -1.2), "topr": (1, -1),
                     "kl_cov": (E, -E), "dro": (0.9, -1.1), "gspo": (0, -E)}
    for name, expected in after_one_nat.items():
        actual = [at(line, 1.0) for line in drawn[name]]
        np.testing.assert_allclose(actual, expected, rtol=1e-4, err_msg=name)


def check_kl(figure):
    drawn = panels(figure)
    assert list(drawn) == list(kl.KL)
    p, q = 1 / E, 1 / E**2  # of the token, one nat above the reference
    odds = math.log((1 - p) / (1 - q))
    expected = {
        "k1": (1, 1), "k2": (0.5, 1), "k3": (1 / E, 1 - 1 / E), "k3+": (1 / E, 1), "is_k3": (1, E),
        "exact_reverse": (p + (1 - p) * odds, p * (1 - odds)),
    }
    for name, pair in expected.items():
        actual = [at(line, 1.0) for line in drawn[name]]
        np.testing.assert_allclose(actual, pair, rtol=1e-4, err_msg=name)


def check_caps(figure):
    lines = {line.get_label(): line.get_xydata() for line in figure.axes[0].get_lines()}
    assert {label: len(points) for label, points in lines.items()} == {
        "none": 1, "token": 4, "prefix": 1, "sequence": 4
    }
    printed = {"none": (0.488, 25.5), "token": (0.493, 24.8), "prefix": (0.480, 26.7),
               "sequence": (0.0, 27.0)}  # docs/oracle.md
    for label, (bias, variance) in printed.items():
        np.testing.assert_allclose(lines[label][0, 0], bias, atol=6e-4, err_msg=label)
        np.testing.assert_allclose(lines[label][0, 1], variance, atol=0.06, err_msg=label)
    np.testing.assert_allclose(lines["token"][2, 0], 0.474, atol=6e-4)  # cap 1
    assert np.all(np.diff(lines["sequence"][:, 0]) > 0)
    assert np.all(np.diff(lines["sequence"][:, 1]) < 0)


def check_sweep(figure):
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == [*frontier.EXACT, *frontier.SAMPLED]
    for ax in figure.axes:
        assert [len(bars[0].get_xdata()) for bars in ax.containers] == [len(names)] * 3
    for bars in figure.axes[0].containers:
        assert bars[0].get_xdata()[names.index("seq")] < 1e-6


def check_run(figure):
    assert len(figure.axes) == 9 and all(ax.get_lines() for ax in figure.axes)


CHECKS = {
    "estimators.ipynb": {
        "weight_figure": check_weights, "mask_figure": check_masks,
        "objective_figure": check_objectives, "kl_figure": check_kl, "cap_figure": check_caps,
        "sweep_figure": check_sweep, "run_figure": check_run,
    },
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_draws_what_it_says(path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"{path.name} starts {args}: nothing is to be installed here")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.chdir(FOLDER)
    plt.close("all")
    start = time.perf_counter()
    with matplotlib.rc_context({"backend": "Agg"}):
        variables = run(path)
        assert time.perf_counter() - start < LONGEST_S
        drawn = [plt.figure(number) for number in plt.get_fignums()]
        checks = CHECKS[path.name]
        assert drawn == [variables[name] for name in checks]
        for name, check in checks.items():
            check(variables[name])
        for line in (line for figure in drawn for ax in figure.axes for line in ax.get_lines()):
            assert len(line.get_xydata()) and np.isfinite(line.get_xydata()).all()
    plt.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_without_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4 and notebook["nbformat_minor"] >= 5
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in code_cells(path):
        assert cell["outputs"] == [] and cell["execution_count"] is None
