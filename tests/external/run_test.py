"""Whole runs whose sampler is our own server over loopback."""

from unittest import mock

import pytest

from jaxrl_tis.external.client import EngineError
from jaxrl_tis.external.vllm import Vllm
from jaxrl_tis.record.checkpoint import newest_step
from jaxrl_tis.runtime.cli import SamplerLost
from tests import engines, tiny

pytestmark = [pytest.mark.all, pytest.mark.compiles]

CLOSE = 3e-5  # nats, float32 on both sides


@pytest.fixture
def external(tmp_path):
    """Fields of a run by the engine, which serves the weights that the run starts from."""
    (tmp_path / "token").write_text(engines.TOKEN)
    fields = dict(engine__quantization="none")
    made = tiny.setup(**fields, task__max_prompt_tokens=21)
    with engines.served(made, context_tokens=24, max_tokens=24) as url:
        yield fields | dict(
            rollout__driver="external", rollout__engines=url,
            rollout__weights_folder=str(tmp_path / "weights"),
            rollout__engine_token_file=str(tmp_path / "token"),
        )


def gaps(folder):
    lines = [r for r in tiny.lines(folder) if r["phase"] == "train"]
    return [r["mismatch/log_ratio_abs_max"] for r in lines if "mismatch/log_ratio_abs_max" in r]


@pytest.mark.parametrize("fields", [
    {}, dict(rollout__schedule="areal(staleness=2)"),
    dict(rollout__schedule="areal(staleness=2)", model__lora="lora(rank=2)",
         warmup__steps=0, optimizer__lr=1e-2),
    tiny.EPISODES, tiny.HARNESS,
], ids=["sync", "ahead", "adapters", "episodes", "sessions"])
def test_a_run_has_no_gap_after_any_sync(tmp_path, external, fields):
    tiny.run(tmp_path / "run", **external, **fields)
    found = gaps(tmp_path / "run")
    assert len(found) == tiny.STEPS and max(found) < CLOSE, found
    assert any(r["phase"] == "eval" for r in tiny.lines(tmp_path / "run"))


def test_a_run_that_lost_its_engine_continues_after_its_last_step(tmp_path, external):
    """The steps since the last checkpoint are saved. Then the run is longer: its engine has newer weights
    than the checkpoint, and the first sync gives it those of the run."""
    fields = external | dict(
        rollout__schedule="areal(staleness=2)", checkpoint__every=100, rollout__start_timeout=1.0,
    )
    load = Vllm.load

    def lost(self, path, version):
        if version == 2:
            raise EngineError("out of memory")
        load(self, path, version)

    with mock.patch.object(Vllm, "load", lost), pytest.raises(SamplerLost, match="out of memory"):
        tiny.run(tmp_path / "run", **fields)
    last = tiny.lines(tmp_path / "run")[-1]["step"]
    assert 2 <= last < tiny.STEPS and newest_step(tmp_path / "run") == last
    tiny.run(tmp_path / "run", **fields)
    assert [r["step"] for r in tiny.lines(tmp_path / "run") if r["phase"] == "train"] == [
        *range(1, tiny.STEPS + 1)]
    tiny.run(tmp_path / "run", **fields | dict(steps=8), change=("steps",))
    found = gaps(tmp_path / "run")
    assert len(found) == 8 and max(found) < CLOSE, found
