"""Whatever file of the newest checkpoint is damaged, and however: the older one is used."""

import logging
import pathlib
import shutil

import pytest

from jaxrl_tis.learner.state import abstract_state
from jaxrl_tis.record import checkpoint
from tests import tiny

pytestmark = pytest.mark.faults


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 0x04
    path.write_bytes(data)


DAMAGES = {
    "first bits": lambda path: flip(path, 0), "middle bits": lambda path: flip(path, 0.5),
    "last bits": lambda path: flip(path, 1),
    "shorter": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "empty": lambda path: path.write_bytes(b""), "deleted": pathlib.Path.unlink,
}


@pytest.mark.parametrize("hows", [
    ["middle bits"], pytest.param(list(DAMAGES), marks=pytest.mark.all),
], ids=["one", "every"])
def test_every_file_and_every_damage(tmp_path, caplog, hows):
    """Restores from a copy of a finished run, whose checkpoints are those of steps 4 and 5."""
    whole, abstract = tiny.finished(), abstract_state(tiny.setup().training)
    newest = whole / "checkpoints" / "5"
    files = [p.relative_to(newest) for p in newest.rglob("*") if p.is_file() and p.stat().st_size]
    assert len(files) > 8 and pathlib.Path(checkpoint.MANIFEST) in files
    for number, file in enumerate(files):
        for how in hows:
            workdir = tmp_path / f"{number}-{how}"
            shutil.copytree(whole / "checkpoints", workdir / "checkpoints")
            DAMAGES[how](workdir / "checkpoints" / "5" / file)
            caplog.clear()
            with (
                caplog.at_level(logging.ERROR, logger="absl"),
                checkpoint.Checkpoints(workdir, keep=2) as checkpoints,
            ):
                assert checkpoints.restore(abstract)[1]["step"] == 4, (file, how)
            left = sorted(p.name for p in (workdir / "checkpoints").iterdir())
            is_uncommitted = (f"{file}", how) == (checkpoint.MANIFEST, "deleted")
            assert left == (["4", "5"] if is_uncommitted else ["4", "5.corrupt"]), (file, how)
            # Threads of earlier tests may log, too.
            told = [r.getMessage() for r in caplog.records if r.name == "absl"]
            assert len(told) == 1, (file, how, told)
            assert "restoring step 4 instead" in told[0] and "\n" not in told[0]
            assert not is_uncommitted or "checkpoint 5 was not completed" in told[0]
            shutil.rmtree(workdir)
