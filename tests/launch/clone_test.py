"""What the hosts get; git is the real one."""

import argparse
import os
import subprocess

import pytest

from tests.launch import clones

# A clone on a host


@pytest.fixture
def origin(tmp_path):
    """A repository with two commits on main, the first of them tagged v1."""
    folder = tmp_path / "origin"
    folder.mkdir()
    (folder / ".gitignore").write_text("/runs/\n")
    (folder / "code").write_text("one")
    clones.commit(folder)
    clones.git(folder, "tag", "v1")
    (folder / "code").write_text("two")
    return clones.commit(folder)


@pytest.fixture
def fetch(scripts, tmp_path, origin):
    """Brings HOME/name to a revision; returns its folder."""
    home = tmp_path / "home"
    home.mkdir()

    def run(revision=""):
        script = scripts("clone").fetch("name", f"{origin}#{revision}" if revision else str(origin))
        subprocess.run(["bash", "-euc", script], cwd=home, check=True, capture_output=True)
        return home / "name"
    return run


@pytest.mark.all
@pytest.mark.parametrize("revision, code", [("", "two"), ("main", "two"), ("v1", "one")])
def test_a_clone_is_made(fetch, revision, code):
    assert (fetch(revision) / "code").read_text() == code


@pytest.mark.all
def test_a_commit_may_be_named(fetch, origin):
    assert (fetch(clones.git(origin, "rev-parse", "v1")) / "code").read_text() == "one"


@pytest.mark.all
@pytest.mark.parametrize("revision", ["", "main"])
def test_a_clone_that_is_there_follows_and_keeps_what_git_does_not_track(fetch, origin, revision):
    folder = fetch(revision)
    (folder / "runs").mkdir()
    for name in ("runs/checkpoint", "run.json"):
        (folder / name).write_text("kept")
    (folder / "code").write_text("changed on the host")
    (origin / "code").write_text("three")
    clones.commit(origin)
    fetch(revision)
    assert (folder / "code").read_text() == "three"
    assert [(folder / name).read_text() for name in ("runs/checkpoint", "run.json")] == ["kept"] * 2


@pytest.mark.all
def test_a_tag_that_was_moved_is_followed(fetch, origin):
    fetch("v1")
    clones.git(origin, "tag", "--force", "v1", "main")
    assert (fetch("v1") / "code").read_text() == "two"


@pytest.mark.all
def test_another_address_is_taken(fetch, origin, tmp_path):
    folder = fetch()
    clones.git(folder, "remote", "set-url", "origin", str(tmp_path / "gone"))
    assert (fetch() / "code").read_text() == "two"


@pytest.mark.all
def test_an_unpacked_archive_becomes_a_clone(fetch, tmp_path):
    (tmp_path / "home" / "name" / "runs").mkdir(parents=True)
    (tmp_path / "home" / "name" / "code").write_text("zero")
    folder = fetch()
    assert (folder / "code").read_text() == "two" and (folder / "runs").is_dir()


# This clone


@pytest.fixture
def clone(scripts, tmp_path, monkeypatch):
    """The script, for a repository at ROOT with configs/a.py."""
    root = tmp_path / "repository"
    (root / "configs").mkdir(parents=True)
    (root / "configs" / "a.py").write_text("1\n")
    monkeypatch.setattr(scripts("plan"), "ROOT", root)
    return scripts("clone"), scripts("plan").Shell(is_dry=False), root


def plan_of(config):
    return argparse.Namespace(config=config)


@pytest.mark.all
def test_a_committed_config_is_no_problem(clone):
    script, shell, root = clone
    clones.commit(root)
    assert script.problem(shell, plan_of("configs/a.py:variant")) == ""
    assert script.changes(shell) == ""


@pytest.mark.all
@pytest.mark.parametrize("name", ["configs/new.py", "{root}/configs/a.py", "../a.py"])
def test_a_config_that_is_not_committed(clone, name):
    script, shell, root = clone
    name = name.format(root=root)
    clones.commit(root)
    (root / "configs" / "new.py").write_text("")
    assert f"--config={name}: {name} is not committed" in script.problem(shell, plan_of(name))


@pytest.mark.all
def test_no_git_clone(clone, monkeypatch):
    script, shell, root = clone
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(root.parent))
    assert f"{root} is not a git clone with a commit" in script.problem(shell, plan_of("configs/a.py"))
    assert script.changes(shell) == ""


@pytest.mark.all
def test_changed_and_new_files_are_named(clone):
    script, shell, root = clone
    clones.commit(root)
    (root / "configs" / "a.py").write_text("2\n")
    (root / "my_reward.py").write_text("")
    (root / "docs").mkdir()
    (root / "docs" / "a.md").write_text("not needed")
    (root / "configs" / "new.py").write_text("")
    assert script.changes(shell) == "configs/a.py, configs/new.py, my_reward.py"
    for i in range(6):
        (root / "configs" / f"new{i}.py").write_text("")
    assert script.changes(shell).endswith("configs/new2.py and 4 more")


# Secrets


def test_a_shell_reads_the_secrets_as_they_were_and_nobody_else_does(clone, tmp_path):
    script, shell, _ = clone
    path = tmp_path / "environment"
    script.write_secrets(shell, str(path), {"HF_TOKEN": "a 'b\" $c"})
    assert path.stat().st_mode & 0o777 == 0o600
    said = subprocess.run(["bash", "-c", f'source {path}; printf %s "$HF_TOKEN"'],
                          capture_output=True, text=True)
    assert said.stdout == "a 'b\" $c"


def test_the_folder_is_of_this_user_alone_and_goes(clone):
    script, shell, _ = clone
    with script.folder(shell) as folder:
        assert os.stat(folder).st_mode & 0o777 == 0o700
    assert not os.path.exists(folder)
