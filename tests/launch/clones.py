"""Small git repositories."""

import pathlib
import subprocess

OPTIONS = ("user.name=x", "user.email=x@example.org", "init.defaultBranch=main")


def git(folder: pathlib.Path, *words: str) -> str:
    """Runs git there; returns what it printed."""
    options = [word for option in OPTIONS for word in ("-c", option)]
    return subprocess.run(["git", *options, "-C", str(folder), *words], check=True, text=True,
                          capture_output=True).stdout.strip()


def commit(folder: pathlib.Path) -> pathlib.Path:
    """Commits all that is in a folder, and makes it a repository before; returns the folder."""
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=all")
    return folder
