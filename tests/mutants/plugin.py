"""What pytest has to do beside testing when a mutant is in the sources; its plugin by -p.

It sees to it that the copy's sources are the ones imported, and writes down which test is running
and which have failed and how.
"""

import os
import pathlib

import hypothesis
import pytest

RECORD = "MUTANTS_RECORD"
WRONG_SOURCES = 99  # exit status


def pytest_sessionstart(session):  # after tests/conftest.py was imported
    import jaxrl_tis

    root = pathlib.Path.cwd()
    if not pathlib.Path(jaxrl_tis.__file__).is_relative_to(root):
        pytest.exit(f"{jaxrl_tis.__file__} is imported, not {root}", WRONG_SOURCES)
    # The first example that fails is enough, the smallest takes minutes.
    phases = set(hypothesis.Phase) - {hypothesis.Phase.shrink, hypothesis.Phase.explain}
    hypothesis.settings.register_profile("mutants", phases=phases)
    hypothesis.settings.load_profile("mutants")


def _note(*words: str) -> None:
    with open(os.environ[RECORD], "a", encoding="utf-8") as file:
        file.write("\t".join(words) + "\n")


def pytest_runtest_logstart(nodeid, location):
    _note("started", nodeid)


def pytest_runtest_logreport(report):
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else str(report.longrepr)
        _note("failed", report.nodeid, " ".join(message.split())[:100])
