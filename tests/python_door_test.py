"""`import jaxrl_tis as jt`: the pure functions, without an engine."""

import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import jaxrl_tis

ROOT = pathlib.Path(__file__).parents[1]


def example() -> str:
    """The Python of the section of the README."""
    section = (ROOT / "README.md").read_text().split("## From Python")[1].split("\n## ")[0]
    return section.split("```python\n")[1].split("```")[0]


@pytest.mark.all
def test_the_example_of_the_readme():
    names = {}
    exec(example(), names)
    gap = np.asarray(names["logp_old"] - names["logp_behav"])
    np.testing.assert_allclose(names["w"], np.minimum(np.exp(gap), 2.0), rtol=1e-5)
    # On-policy the ratio is 1, so the loss is -mean(w adv).
    expected = -np.mean(np.minimum(np.exp(gap), 2.0) * np.asarray(names["adv"]))
    assert math.isclose(names["loss"], expected, rel_tol=1e-4)
    assert names["metrics"]["actor/pg_loss"] == names["loss"]
    k1 = names["gap"]["rollout_corr/kl"]  # mean of log mu / pi over the sampler's draws
    np.testing.assert_allclose(k1, -gap.mean(), rtol=1e-3, atol=1e-6)


@pytest.mark.all
def test_it_loads_no_engine_model_or_learner():
    code = f"import sys\n{example()}\nprint(*sorted(m for m in sys.modules if m.startswith('jaxrl_tis')))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    rooms = {name.split(".")[1] for name in loaded if "." in name}
    assert rooms == {"diagnostics", "estimators", "kernels", "choices"}


@pytest.mark.all
def test_the_package_alone_imports_nothing():
    code = "import sys, jaxrl_tis; print('jax' in sys.modules, 'numpy' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.split() == ["False", "False"], run.stderr


def test_what_there_is_can_be_completed():
    assert {"estimators", "diagnostics", "policy_loss"} <= set(dir(jaxrl_tis))


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jaxrl_tis.nothing
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jaxrl_tis.estimators.nothing
