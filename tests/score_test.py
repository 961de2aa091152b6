import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests import commands

score = commands.load("score")
pytestmark = pytest.mark.by_jax("XLA compiles and rounds the programs")

GOLDEN = pathlib.Path(__file__).parent / "models" / "golden" / "llama_linear"


@pytest.mark.all
def test_command_writes_the_golden_logits(tmp_path):
    """And nothing else: not on the terminal either, where libtpu is installed without a TPU."""
    out = tmp_path / "logits.npy"
    environment = {n: v for n, v in os.environ.items() if n not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_tis.score", "--model", GOLDEN, "--tokens",
         GOLDEN / "tokens.npy", "--out", out], check=True, timeout=120, env=environment,
        cwd=pathlib.Path(__file__).parents[1], capture_output=True, text=True)
    for words in ("Unable to initialize backend", "TPU", "InitGoogle"):
        assert words not in done.stdout + done.stderr
    logits, expected = np.load(out), np.load(GOLDEN / "logits.npy")
    assert logits.shape == expected.shape and logits.dtype == np.float32
    assert np.abs(logits - expected).max() <= 2e-4 * expected.std()


@pytest.mark.parametrize("tokens, message", [
    (np.zeros(3, np.int32), r"got int32\[3\]"),
    (np.zeros((2, 0), np.int32), r"got int32\[2, 0\]"),
    (np.zeros((1, 3)), r"got float64\[1, 3\]"),
    (np.array([[0, 97]]), "0 to 97 must lie in the vocabulary, 0 to 96"),
    (np.array([[-1, 3]]), "-1 to 3 must lie"),
])
def test_bad_tokens_are_refused(tmp_path, tokens, message):
    with pytest.raises(ValueError, match=message):
        score.score(GOLDEN, tokens, tmp_path / "out.npy")
    assert not (tmp_path / "out.npy").exists()


@pytest.mark.all
def test_an_adapter_of_another_base_is_named_on_stderr(tmp_path, capsys):
    """This one was trained on "base", a folder elsewhere."""
    folder = GOLDEN.parents[1] / "golden_peft"
    score.score(folder / "base", np.zeros((1, 2), np.int32), tmp_path / "out.npy", folder / "all")
    assert f"warning: {folder / 'all'} was trained on base, and the model is" in capsys.readouterr().err


def test_logits_that_are_not_finite_leave_no_file(tmp_path, monkeypatch):
    """Token 3 has a broken embedding. The row before is fine."""
    config, params = score.models.load(GOLDEN)
    params["embed"] = params["embed"].at[3].set(np.nan)
    monkeypatch.setattr(score.models, "load", lambda _: (config, params))
    out, tokens = tmp_path / "out.npy", np.array([[1, 2, 4], [1, 3, 2]])
    with pytest.raises(FloatingPointError, match="row 1 are not finite: the weight embed"):
        score.score(GOLDEN, tokens, out)
    assert not out.exists()
