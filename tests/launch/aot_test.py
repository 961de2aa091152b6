"""launch/aot.sh: the page that it writes of the shipped configs' programs, with a stand-in for python."""

import itertools
import pathlib
import shutil
import subprocess

import pytest

from jaxrl_tis.aot import report, weight_sync

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *version*) echo 1.2.3 ;;
  "- "*) echo '| a | train | 1 |' ;;
  *"$FAILS"*) echo "DOES NOT FIT"; exit 1 ;;
  *--programs=decode*) printf '| decode | 1.0 | 2 GiB | 3 GiB | 4 | 5 | 6%% | 7e+12 | 1.00 | 8 | 9 ms | memory |\n' ;;
  *) printf 'a. Mesh x x y: 1x2.\\n\\ntrain: compiled in 1 s\\n  1 x all-gather\\n\\n'
     printf '| program | s | a | t | peak | e | use | FLOPs | r | m | best | bound |\\n'
     printf '|---|---|---|---|---|---|---|---|---|---|---|---|\\n'
     printf '| train | 1 | 2 GiB | 3 GiB | 4 GiB | 5 GiB | 6%% | 7 | 8 | 9 GiB | 10 s | memory |\\n'
     printf '| eval_insert | 1 | 2 | 3 | 4 GiB | 5 | 6%% | 7 | 8 | 9 | 10 s | memory |\\n'
     printf '\\n| weight sync |\\n|---|\\n' ;;
esac
"""


def run(folder, fails="nothing"):
    (folder / "launch").mkdir()
    (folder / "docs").mkdir()
    shutil.copy(ROOT / "launch" / "aot.sh", folder / "launch")
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    (folder / "launch" / "venv.sh").write_text(f'cd "{folder}"; prepare_venv() {{ PY={python}; }}\n')
    command = ["bash", "launch/aot.sh", "logs"]
    return subprocess.run(
        command, cwd=folder, env={"PATH": "/usr/bin:/bin", "FAILS": fails}, capture_output=True,
        text=True,
    )


def headings(page):
    return [line for line in page.splitlines() if line.startswith("## ")]


@pytest.mark.all
def test_the_page_has_a_title_and_the_tables_of_each_config(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "docs" / "tpu_programs.md").read_text()
    section = (
        "a. Mesh 1x2.\n\n| program | peak | use | FLOPs | best |\n|---|---|---|---|---|\n"
        "| train | 4 | 6% | 7 | 10 s |\n\n| weight sync |\n|---|\n"
    )
    assert page.count(section) == len(headings(page)) - 2 == 14  # the last two are of several configs
    assert "with jax 1.2.3 and libtpu 1.2.3" in page and "all-gather" not in page
    assert "all-gather" in (tmp_path / "logs" / "dapo_qwen25_32b:async.log").read_text()
    assert headings(page) == headings((ROOT / "docs" / "tpu_programs.md").read_text())


@pytest.mark.all
def test_the_formats_of_the_sampler_are_rows_of_one_table(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "docs" / "tpu_programs.md").read_text()
    rows = [line for line in page.splitlines() if line.endswith("| 4 | 6% | 8 | 9 ms |")]
    assert [row.split(" | ")[1] for row in rows] == 2 * [
        "bfloat16, bfloat16", "w8a16, bfloat16", "w8a8, bfloat16", "w8a8, int8"]
    assert rows[0].startswith("| `gsm8k_qwen25_0p5b.py:grpo` | ") and rows[4].startswith("| `dapo_qwen25_32b.py` | ")


@pytest.mark.all
def test_a_program_that_does_not_fit_ends_it_and_leaves_the_page(tmp_path):
    done = run(tmp_path, fails="dapo_qwen25_32b.py:async")
    assert done.returncode == 1 and "DOES NOT FIT" in done.stderr
    assert not (tmp_path / "docs" / "tpu_programs.md").exists()


def test_the_page_has_columns_of_the_tables():
    lines = (ROOT / "docs" / "tpu_programs.md").read_text().splitlines()
    firsts = {a for a, b in itertools.pairwise(lines) if b.startswith("|---")}
    left_out = "compile s", "arguments", "temporaries", "beside", "model / HLO", "bound"
    programs = [name for name in report.COLUMNS if name not in (*left_out, "moves")]
    formats = [name for name in report.COLUMNS[1:] if name not in (*left_out, "HLO FLOPs")]
    of_ray = [title for title, key in weight_sync.COLUMNS.items() if key != "passed_on_bytes"]
    rows = (
        programs, ("weight sync", *of_ray), ("config", "weights, cache", *formats),
        ("config", "program", "collectives"),
        ("config", "segment kernels", "MiB accessed", "by XLA's scatters"),
    )
    assert firsts == {"| " + " | ".join(row) + " |" for row in rows}
