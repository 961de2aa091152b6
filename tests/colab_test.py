"""The notebooks run from top to bottom, and what is drawn of the estimators is what they hold."""

import ast
import importlib.util
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import time

import jax
import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot as plt

from configs import gsm8k_one_chip, quickstart
from jaxrl_tis import validate
from jaxrl_tis.estimators import kl, loss, masks, methods, objectives, weights
from experiments import frontier

FOLDER = pathlib.Path(__file__).parents[1] / "colab"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"), key=lambda path: path.name)
NAMES = ["estimators", "one_chip", "quickstart", "read_a_run", "tpu_fit"]
LONGEST_S = 120.0
LONGEST_TEXT = 6000  # characters of a cell's text or HTML
LONGEST_PICTURE = 200_000  # characters of base64
E = math.e


# Where tests are quick, the quickstart takes fewer steps, too few to learn in, and fewer sizes are
# compiled.
IS_SHORT = "OPTIMIZED" not in os.environ
SHORTER = {'\\"steps\\": 60': '\\"steps\\": 2', '\\"warmup.steps\\": 220': '\\"warmup.steps\\": 4',
           '\\"eval.every\\": 20': '\\"eval.every\\": 2', '\\"eval.prompts\\": 128': '\\"eval.prompts\\": 64',
           "(256, 2048, 16384)": "(256, 16384)", '\\"steps\\": 40': '\\"steps\\": 2',
           '\\"warmup.steps\\": 200': '\\"warmup.steps\\": 4'}


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
        "seq_vanilla": E**8, "geo_tis": 2.0, "turn_geo": 2.0, "prefix_minpro": E * E,
        "prefix_ctpo": math.exp(0.05 * math.sqrt(8)),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(at(lines[name], 1.0), value, rtol=1e-3, err_msg=name)


def check_masks(figure):
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [name for name in masks.MASKS if not methods.needs("mask", name)]
    paths = [bar.get_paths() for bar in axes.collections]
    assert [len(path) for path in paths] == [1] * len(names)
    columns = [path.vertices[:, 0] for (path,) in paths]
    ends = {name: (x.min(), x.max()) for name, x in zip(names, columns, strict=True)}
    # A ratio of 2 of one token, or of 8; l^2 / 2 <= 2; a mean square of 0.04.
    edge = {"token_k1": math.log(2), "seq_sum_k1": math.log(2) / 8, "token_k2": 2.0, "m2po": 0.2}
    for name, value in edge.items():
        np.testing.assert_allclose(ends[name], (-value, value), atol=6e-3, err_msg=name)
    np.testing.assert_allclose(ends["veto"], (math.log(1e-4), 12.0), atol=6e-3)


def check_objectives(figure):
    drawn = panels(figure)
    assert list(drawn) == list(objectives.OBJECTIVES)
    # n / (K size); gamma / (1 + gamma)^2; n times the response's loss; that loss on each token.
    other = {"espo": 8 / 12, "fusion_shaped": 0.1 / 1.1**2, "luspo": 8.0, "seq_ppo": 8.0}
    for name, (good, bad) in drawn.items():
        start = other.get(name, 1.0)
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
    "weight_figure": check_weights, "mask_figure": check_masks,
    "objective_figure": check_objectives, "kl_figure": check_kl, "cap_figure": check_caps,
    "sweep_figure": check_sweep, "run_figure": check_run,
}


@pytest.mark.all
@pytest.mark.compiles
@pytest.mark.by_jax("the notebook's calls of jax")
def test_estimators_draws_what_it_says(monkeypatch):
    path = FOLDER / "estimators.ipynb"

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
        assert drawn == [variables[name] for name in CHECKS]
        for name, check in CHECKS.items():
            check(variables[name])
        for line in (line for figure in drawn for ax in figure.axes for line in ax.get_lines()):
            assert len(line.get_xydata()) and np.isfinite(line.get_xydata()).all()
    plt.close("all")


def executed(name, folder):
    """The outputs of a notebook by cell, from a kernel of its own: [{kind: text}].

    Runs go to `folder`; two CPU cores are what a reader has, so none of this suite's devices.
    """
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    for old, new in SHORTER.items() if IS_SHORT else ():
        text = text.replace(old, new)
    path = folder / f"{name}.ipynb"
    path.write_text(text.replace("runs/notebook-", f"{folder}/notebook-"), encoding="utf-8")
    env = {n: x for n, x in os.environ.items() if not n.startswith(("JAX_", "XLA_", "PYTEST_"))}
    command = [sys.executable, "-m", "pytest", "--nbmake", "--overwrite", "-p", "no:cacheprovider",
               f"--rootdir={folder}", str(path)]
    done = subprocess.run(
        command, cwd=folder, env=env | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    outputs = {}
    for cell in code_cells(path):
        outputs[cell["id"]] = [
            {kind: "".join(x) for kind, x in (output.get("data") or {"text": output["text"]}).items()}
            for output in cell["outputs"]
        ]
    return outputs


def text_of(outputs, cell):
    return "".join(output.get("text", "") for output in outputs[cell])


def check_quickstart(outputs):
    line = text_of(outputs, "result").splitlines()[0]
    before, after = (float(line.split(mark)[0].split()[-1]) for mark in (" before", " after"))
    assert line.startswith(f"greedy accuracy on {64 if IS_SHORT else 128} unseen sums")
    assert IS_SHORT or after > before + 0.05
    assert "image/png" in outputs["train"][0]


def check_one_chip(outputs):
    """The same cells as on a chip, on the tiny model."""
    assert text_of(outputs, "setup") == "no TPU: the tiny model\n"
    assert "largest cause" in text_of(outputs, "gate")
    assert "image/png" in outputs["train"][0]
    assert text_of(outputs, "result").startswith(
        f"greedy accuracy on {64 if IS_SHORT else 128} unseen problems")


def check_read_a_run(outputs):
    assert "24 steps" in text_of(outputs, "record")
    assert "title=" in outputs["answers"][0]["text/html"]
    gaps = [float(line.split()[2]) for line in text_of(outputs, "worst").splitlines()]
    assert len(gaps) == 5 and gaps == sorted(gaps, reverse=True) and gaps[-1] > 0
    assert "engine.corrected" in text_of(outputs, "doctor")


def check_tpu_fit(outputs):
    assert "v5litepod-8: 8 chips of 15.75 GiB" in text_of(outputs, "compile")
    fits = [line.endswith(" fits") for line in text_of(outputs, "table").splitlines()]
    assert fits == ([True, False] if IS_SHORT else [True, True, False])


@pytest.mark.all
@pytest.mark.compiles
@pytest.mark.parametrize("name, check", [
    ("estimators", lambda outputs: None), ("one_chip", check_one_chip),
    ("quickstart", check_quickstart),
    ("read_a_run", check_read_a_run), ("tpu_fit", check_tpu_fit),
])
def test_a_notebook_runs_in_a_kernel_and_says_little(name, check, tmp_path):
    if name == "tpu_fit" and importlib.util.find_spec("libtpu") is None:
        pytest.skip("no libtpu for this Python")
    outputs = executed(name, tmp_path)
    for cell, found in outputs.items():
        for kind, text in (item for output in found for item in output.items()):
            longest = LONGEST_PICTURE if kind.startswith("image/") else LONGEST_TEXT
            assert len(text) <= longest, (cell, kind)
    check(outputs)


@pytest.mark.parametrize("has_tpu, get_config", [
    (True, gsm8k_one_chip.get_config), (False, quickstart.get_config),
])
def test_one_chip_sets_fields_of_its_config(has_tpu, get_config):
    """Also on a TPU, where no test runs the notebook."""
    [settings] = [cell for cell in code_cells(FOLDER / "one_chip.ipynb") if cell["id"] == "settings"]
    variables = {"HAS_TPU": has_tpu, "pathlib": pathlib}
    exec("".join(settings["source"]), variables)
    name, _, variant = variables["CONFIG"].partition(":")
    assert (FOLDER.parent / name).exists() and variant == ("qwen25_0p5b" if has_tpu else "")
    config = get_config(*filter(None, [variant]))
    config.update_from_flattened_dict(variables["SETTINGS"])
    validate.validate(config.lock())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_without_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4 and notebook["nbformat_minor"] >= 5
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in code_cells(path):
        assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_imports_what_is_there(path):
    """Its cells run with --all alone. The fields of `estimators` are those that its entries need."""
    cells = ["".join(cell["source"]) for cell in code_cells(path)]
    nodes = [node for cell in cells for node in ast.walk(ast.parse(cell))]
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert imports
    variables = {}
    for node in imports:
        exec(compile(ast.Module([node], []), path.name, "exec"), variables)
    if path.stem == "estimators":
        (setting,) = [cell for cell in code_cells(path) if cell["id"] == "setting"]
        exec("".join(setting["source"]), variables)
        for kind in ("weight", "objective"):
            for name in methods.TABLES[kind]:
                loss.needed(kind, name, variables["FIELDS"])


def notebooks():
    spec = importlib.util.spec_from_file_location("notebooks", FOLDER / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_notebooks_are_made_from_their_sources():
    """After an edit: python colab/notebooks.py."""
    module = notebooks()
    assert [path.stem for path in NOTEBOOKS] == NAMES
    for path in NOTEBOOKS:
        assert path.read_text(encoding="utf-8") == module.notebook(path.with_suffix(".py")), path


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_begins_with_its_badge_and_the_install_cell(path):
    title, install = json.loads(path.read_text(encoding="utf-8"))["cells"][:2]
    text = "".join(title["source"])
    assert text.startswith("# ") and f"/blob/main/colab/{path.name})" in text
    assert install["id"] == "install"


class Installed(Exception):
    """The install cell came to its last command."""


@pytest.mark.all
@pytest.mark.parametrize("kind", ["folder", "archive", "zip", "git"])
def test_the_install_cell_takes_a_folder_an_archive_or_a_git_url(kind, tmp_path, monkeypatch):
    """What it would give pip: the clone, constrained to the jax that is here."""
    source = tmp_path / "made" / "jaxrl_tis-main"
    source.mkdir(parents=True)
    (source / "setup.py").write_text("")
    given = {"folder": source, "archive": tmp_path / "a.tar.gz", "zip": tmp_path / "a.zip",
             "git": tmp_path / "a.git"}[kind]
    if kind == "archive":
        subprocess.run(["tar", "-czf", given, "-C", tmp_path / "made", source.name], check=True)
    elif kind == "zip":
        shutil.make_archive(given.with_suffix(""), "zip", tmp_path / "made")
    elif kind == "git":
        git = ["git", "-C", source, "-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "a"]):
            subprocess.run([*git, *words], check=True)
        subprocess.run(["git", "clone", "--quiet", "--bare", source, given], check=True)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    run_command, find = subprocess.run, importlib.util.find_spec

    def pip_refused(command, **options):
        if "pip" not in command:
            return run_command(command, **options)
        raise Installed(command)

    monkeypatch.setattr(subprocess, "run", pip_refused)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "jaxrl_tis" else find(name))
    cell = notebooks().INSTALL.replace('SOURCE = ""', f'SOURCE = "{given}"')
    with pytest.raises(Installed) as installed:
        exec(compile(cell, "install", "exec"), {})
    (command,) = installed.value.args
    assert command[:5] == [sys.executable, "-m", "pip", "install", "--quiet"]
    assert (pathlib.Path(command[-1]) / "setup.py").exists()
    pins = pathlib.Path(command[command.index("--constraint") + 1])
    assert pins.read_text().strip() == f"jax=={jax.__version__}"


def test_in_colab_the_clone_is_that_of_the_badge_and_made_once(tmp_path, monkeypatch):
    called, find = [], importlib.util.find_spec
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "google.colab", object())
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "jaxrl_tis" else find(name))

    def fake(command, **options):
        called.append(command)
        if command[0] == "git":
            (pathlib.Path(command[-1])).mkdir()
            (pathlib.Path(command[-1]) / "setup.py").write_text("")
        if "pip" in command:
            raise Installed(command)
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(subprocess, "run", fake)
    cell = "".join(json.loads(NOTEBOOKS[0].read_text())["cells"][1]["source"])
    for _ in range(2):
        with pytest.raises(Installed):
            exec(compile(cell, "install", "exec"), {})
    cloned = [command for command in called if command[0] == "git"]
    assert len(cloned) == 1 and f"https://github.com/{notebooks().REPOSITORY}" in cloned[0]


def test_a_source_that_is_no_clone_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    cell = notebooks().INSTALL.replace('SOURCE = ""', f'SOURCE = "{tmp_path}"')
    with pytest.raises(FileNotFoundError, match="set SOURCE"):
        exec(compile(cell, "install", "exec"), {})
