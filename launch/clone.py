"""Copies code and secrets to the hosts of a TPU VM: a commit of this clone or of another one."""

import contextlib
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping

import plan as plans

UNUSED = (":(exclude)docs", ":(exclude)tests", ":(exclude)benchmarks", ":(exclude)experiments")  # by a run
NAMES_SHOWN = 5


def problem(shell: plans.Shell, plan: plans.Plan) -> str:
    """Returns why the hosts cannot use the commit of this clone, "" if they can."""
    code, text = shell.read(_git("rev-parse", "--verify", "HEAD"))
    if code:
        return (f"{plans.ROOT} is not a git clone with a commit for the hosts; clone the "
                f"repository, or give --git=URL ({text.splitlines()[-1]})")
    path = plan.config.partition(":")[0]
    if shell.read(_git("cat-file", "-e", f"HEAD:./{path}"))[0]:
        return (f"--config={plan.config}: {path} is not committed, and the hosts get a commit; "
                "commit it, or give --git=URL")
    return ""


def changes(shell: plans.Shell) -> str:
    """Returns the files that differ from the commit, "" for none."""
    code, text = shell.read(_git("status", "--porcelain", "--", ".", *UNUSED))
    names = [line.split(maxsplit=1)[1] for line in text.splitlines()] if code == 0 else []
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def archive(path: str) -> list[str]:
    """Returns the command that archives the commit in a file."""
    return _git("archive", "--format=tar.gz", "-o", path, "HEAD")


def fetch(clone: str, git: str) -> str:
    """Returns the script that makes or updates a host's clone of URL[#REVISION]. Untracked files
    stay: runs, environments, caches."""
    url, _, revision = git.partition("#")
    url, name = shlex.quote(url), shlex.quote(revision)
    find, wanted = ["git remote set-head origin --auto"], "origin/HEAD"
    if revision:  # a branch is where it is now, not where it was when the clone was made
        find, wanted = [], f'"$(git rev-parse --quiet --verify origin/{name} || echo {name})"'
    return " && ".join([
        f"git init --quiet {clone}",
        f"cd {clone}",
        f"{{ git remote add origin {url} 2>/dev/null || git remote set-url origin {url}; }}",
        "git fetch --quiet --tags --force origin",
        *find,
        f"git checkout --quiet --force --detach {wanted}",
    ])


@contextlib.contextmanager
def folder(shell: plans.Shell) -> Iterator[str]:
    """Yields a private temporary folder for files to copy to the hosts."""
    if shell.is_dry:
        print("folder=$(mktemp -d)")
        yield plans.Expanded("$folder")
        print('rm -r "$folder"')
    else:
        with tempfile.TemporaryDirectory() as path:
            yield path


def inside(where: str, name: str) -> str:
    """Returns the path of a file in this folder, as the same type of word."""
    return type(where)(f"{where}/{name}")


def write_secrets(shell: plans.Shell, path: str, found: Mapping[str, str]) -> None:
    """Writes the secrets as a private file for the shell of a host."""
    if shell.is_dry:
        pairs = " ".join(f'{name} "${name}"' for name in found)
        print(f"umask 077\nprintf '%s=%q\\n' {pairs} >\"{path}\"")
    else:
        with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.writelines(f"{name}={shlex.quote(value)}\n" for name, value in found.items())


def _git(*words: str) -> list[str]:
    return ["git", "-C", str(plans.ROOT), *words]
