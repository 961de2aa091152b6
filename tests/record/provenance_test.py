"""What a run writes about itself, and what it refuses to go on with."""

import datetime
import json
import sys

import jax
import pytest

from jaxrl_tis.record import provenance
from jaxrl_tis.record.provenance import git_revision, write_run_files

pytestmark = pytest.mark.by_jax("orbax and the layout of arrays")


def test_run_files(tmp_path):
    config = {"seed": 1, "clip": float("inf"), "optimizer": {"lr": 1e-6, "betas": (0.9, 0.99)}}
    write_run_files(tmp_path, config)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["config"]["optimizer"] == {"lr": 1e-6, "betas": [0.9, 0.99]}
    assert written["config"]["clip"] == "inf"
    assert written["versions"]["jax"] == jax.__version__
    assert written["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert written["git_revision"] is None or len(written["git_revision"]) >= 40


def test_the_date_of_a_run_is_that_of_its_first_start(tmp_path):
    config = {"task": {"date": ""}}
    now = datetime.datetime.now().replace(microsecond=0)
    begun = datetime.datetime.fromisoformat(provenance.date(config, tmp_path))
    assert now <= begun <= datetime.datetime.now()
    write_run_files(tmp_path, {"task": {"date": "2020-01-02T03:04:05"}})
    assert provenance.date(config, tmp_path) == "2020-01-02T03:04:05"
    assert provenance.date({"task": {"date": "1999-01-01"}}, tmp_path) == "1999-01-01"
    write_run_files(tmp_path, {"task": {}})  # of a version without the field
    assert datetime.datetime.fromisoformat(provenance.date(config, tmp_path)) >= now


@pytest.mark.all
def test_git_revision_outside_a_repository(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert git_revision() is None


def test_full_disk_while_writing_the_config(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="cannot write .*config.json"):
        write_run_files(tmp_path / "file", {"seed": 1})


@pytest.mark.all
def test_the_revision_of_an_exported_tree(tmp_path, monkeypatch):
    """`git archive` writes the commit into revision.txt; a plain copy knows none."""
    revisions = []
    for i, text in enumerate((None, "$Format:%H$\n", "a" * 40 + "\n")):
        folder = tmp_path / str(i)
        folder.mkdir()
        if text is not None:
            (folder / "revision.txt").write_text(text)
        monkeypatch.setattr(provenance, "__file__", str(folder / "provenance.py"))
        revisions.append(git_revision())
    assert revisions == [None, None, "a" * 40]


def test_git_is_asked_once_a_process(monkeypatch, tmp_path):
    first = git_revision()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision() == first
