"""The teacher's share by hand, the difficulty of prompts, and a whole run with a teacher."""

import dataclasses
import math
from unittest import mock

import pytest

from jaxrl_tis import build, export
from jaxrl_tis.models.config import SlidingConfig
from jaxrl_tis.rollouts import teaching
from jaxrl_tis.rollouts.teaching import Difficulty, Teacher
from tests import tiny


def test_alpha_falls_to_zero():
    linear = teaching.parse("linear(start=0.4, steps=4)")
    assert [linear.at(step) for step in range(6)] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0, 0])
    cosine = teaching.parse("cosine(start=0.8, steps=4)")
    half = [0.8 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(5)]
    assert [cosine.at(step) for step in range(5)] == pytest.approx(half, abs=1e-12)
    assert teaching.parse("linear") == teaching.Alpha(0.5, 1000, "linear", "")


def test_what_is_no_alpha_is_refused():
    for text, match in [
        ("linear(start=0)", "start is 0"), ("linear(start=1.5)", "start is 1.5"),
        ("cosine(steps=0)", "steps is 0"), ("linear(steps=1.5)", "steps is 1.5"),
        ("quadratic", "'quadratic' is unknown"), ("linear(end=1)", "end"),
    ]:
        with pytest.raises(ValueError, match=match):
            teaching.parse(text)


def test_the_difficulty_follows_the_last_rewards():
    """One minus the mean of the last four groups, 1 before the first, and kept over a restart."""
    known = Difficulty("reward")
    example = {"id": "a"}
    assert known.of(example) == 1
    known.add("a", [1.0, 0.0, math.nan])
    assert known.of(example) == 0.5
    known.add("a", [math.nan])  # nothing is known of it
    for mean in (1.0, 1.0, 0.0, 0.25):
        known.add("a", [mean])
    assert known.of(example) == 1 - 2.25 / 4 and known.of({"id": "b"}) == 1
    again = Difficulty("reward")
    again.set_state(known.get_state())
    known.add("a", [-9.0])
    assert again.of(example) == 1 - 2.25 / 4 and known.of(example) == 1  # at most 1
    none = Difficulty("")
    none.add("a", [1.0])
    assert none.of(example) == 1 and none.get_state() == {}


def test_the_difficulty_of_the_data_is_a_number_from_0_to_1():
    known = Difficulty("extra.level")
    assert known.of({"id": "a", "extra": {"level": 0.25}}) == 0.25
    for extra in ({}, {"level": 2}, {"level": "hard"}, None, {"level": True}):
        with pytest.raises(ValueError, match="example a has the difficulty .* at 'extra.level'"):
            known.of({"id": "a", "extra": extra})


def test_a_teacher_is_loaded_once_and_freed_at_the_end():
    loaded = []
    teacher = Teacher(teaching.parse("linear(steps=2)"), lambda: loaded.append(1) or "weights")
    assert [teacher(version) for version in range(4)] == ["weights", "weights", None, None]
    assert loaded == [1] and teacher._served is None


def test_a_teacher_that_does_not_fit_is_refused():
    config = tiny.config(rollout__teacher="models/mine", engine__retention=(1, 1))
    model, tokenizer = build._read(config)
    other = mock.Mock(ids=tokenizer.ids, decode=lambda ids: f"<{ids}>")
    for changes, theirs, match in [
        ({"vocab_size": 3}, tokenizer, "has 3 token ids, unused ones included, and the policy 1"),
        ({}, other, "another tokenizer than the policy"),
        ({"sliding": SlidingConfig(8, (0,), model.rope)}, tokenizer, "layers of rollout.teacher have a sliding window"),
        ({"max_position": 4}, tokenizer, "rollout.teacher: sequences .* exceed max_position_embeddings = 4"),
        ({"mlp_dim": 10**9}, tokenizer, r"policy 1.06e-05 GiB, .*, teacher \d+ GiB on each device of"),
    ]:
        shape = dataclasses.replace(model, **changes)
        with (
            mock.patch.object(build.models, "read_config", return_value=shape),
            mock.patch.object(build, "load_tokenizer", side_effect=[tokenizer, theirs]),
            pytest.raises(ValueError, match=match),
        ):
            build.build(config)


@pytest.mark.all
@pytest.mark.compiles
@pytest.mark.parametrize("fields", [
    dict(rollout__alpha="linear(start=0.5, steps=3, difficulty=reward)"),
    dict(rollout__schedule="areal(staleness=2)", rollout__alpha="linear(start=0.5, steps=3)",
         train__pack_length=32),
    dict(rollout__schedule="one_step", rollout__driver="ray", rollout__cpus_per_worker=0.01,
         rollout__alpha="linear(start=0.5, steps=3)"),
], ids=["sync", "ahead", "ray"])
def test_a_run_measures_its_gap_without_the_teacher(tmp_path, fields):
    """The gap stays at rounding, the teacher's part falls to 0. A run that is continued is that run."""
    tiny.run(tmp_path / "teacher", steps=1, warmup__steps=60, model__num_layers=2)
    export.export(str(tmp_path / "teacher"), str(tmp_path / "model"), dtype="float32")
    known = fields | dict(
        rollout__teacher=str(tmp_path / "model"), engine__quantization="none",
        correction__objective="fusion_cap", correction__weight="none",
    )
    tiny.run(tmp_path / "run", **known)
    trained = [r for r in tiny.lines(tmp_path / "run") if r["phase"] == "train"]
    mixing = [r["mismatch/mixing/log_ratio_abs_mean"] for r in trained]
    assert max(r["mismatch/log_ratio_abs_max"] for r in trained) < 3e-5
    assert min(mixing[:2]) > 0.1 and (fields.get("rollout__schedule") or max(mixing[3:]) < 1e-6)
    if "rollout__driver" in fields:
        return  # no run with Ray is another one's again
    tiny.run(tmp_path / "part", **known | dict(steps=2))
    tiny.run(tmp_path / "part", **known, change=("steps",))
    assert [r for r in tiny.lines(tmp_path / "part") if r["phase"] == "train"] == trained
