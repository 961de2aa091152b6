"""Whole runs whose sampler is our own server over loopback."""

import pytest

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


def test_an_interrupted_run_continues(tmp_path, external):
    """Its engine has newer weights than the checkpoint: the first sync gives it those of the run."""
    fields = external | dict(rollout__schedule="areal(staleness=2)")
    tiny.run(tmp_path / "run", **fields)
    lines = tiny.lines(tmp_path / "run")
    assert lines[-1]["step"] == tiny.STEPS
    tiny.run(tmp_path / "run", **fields | dict(steps=8), change=("steps",))
    found = gaps(tmp_path / "run")
    assert len(found) == 8 and max(found) < CLOSE, found
