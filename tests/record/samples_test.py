import json
import types

import numpy as np
import pytest

from jaxrl_tis.record import probabilities, samples
from tests import tiny


def decode(ids):
    return "".join(chr(96 + i) for i in ids)


def sample(group, tokens, score=0.5):
    trajectory = types.SimpleNamespace(
        prompt=np.array([1, 2]), tokens=np.array(tokens), logp_behav=np.zeros(len(tokens)),
        logp_raw=np.full(len(tokens), -0.5), mask=np.ones(len(tokens), bool), outcome="",
        fork=0, forks=(), joins=())
    example = {"id": f"id{group}", "answer": "right"}
    return types.SimpleNamespace(trajectory=trajectory, example=example, text=decode(tokens),
                                 score=score, reward=score + 1, group=group)


def rows():
    """Two prompt tokens, then up to three of the response."""
    mask = np.array([[0, 0, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 1, 0, 0]], bool)
    numbers = np.arange(15).reshape(3, 5) / 8
    return {"mask": mask, "sampled": mask, "logp_behav": -numbers, "logp_old": -numbers - 1,
            "version": np.full((3, 5), 7)}


def test_the_first_answer_of_each_group_with_its_tokens():
    drawn = [sample(0, [3, 4, 5]), sample(0, [3, 4]), sample(1, [6])]
    weights = np.full((3, 5), 2.0)
    first, second = samples.of_step(4, drawn, rows(), weights, decode, 2)
    assert first == {
        "step": 4, "phase": "train", "id": "id0", "prompt": "ab", "response": "cde",
        "answer": "right", "reward": 1.5, "length": 3, "tokens": ["c", "d", "e"],
        "logp_behav": [-0.25, -0.375, -0.5], "logp_old": [-1.25, -1.375, -1.5],
        "weight": [2.0, 2.0, 2.0], "version": [7, 7, 7],
    }
    assert second["id"] == "id1" and second["logp_behav"] == [-1.5]
    assert len(samples.of_step(4, drawn, rows(), None, decode, 1)) == 1
    assert samples.of_step(4, drawn, rows(), None, decode, 1)[0]["weight"] is None


def test_tokens_without_text_have_names():
    """Token 9 has no text, and token 3 has one."""
    text = lambda ids: decode([i for i in ids if i != 9])
    name = {3: "c", 9: "</s>"}.get
    for [line] in (
        samples.of_step(4, [sample(0, [3, 9])], rows(), None, text, 1, name),
        samples.of_evaluation(4, [sample(0, [3, 9])], text, 1, name),
    ):
        assert (line["tokens"], line["names"]) == (["c", ""], [None, "</s>"])


def test_answers_and_tokens_that_are_not_trained_on():
    """The first answer has a token that masks rejected; the second failed, and has no log-prob."""
    drawn, kept = [sample(0, [3, 4, 5]), sample(1, [3, 4], score=np.nan)], rows()["mask"].copy()
    kept[0, 3], kept[1] = False, False
    weights = np.where(kept, 2.0, 0.0)
    first, second = samples.of_step(4, drawn, rows() | {"mask": kept}, weights, decode, 2)
    assert first["logp_old"] == [-1.25, -1.375, -1.5] and first["weight"] == [2.0, 0.0, 2.0]
    assert second["logp_behav"] == [-0.875, -1.0] and second["version"] == [7, 7]
    assert second["reward"] is second["logp_old"] is second["weight"] is None


def test_tokens_that_an_environment_gave_have_no_values():
    drawn = sample(0, [3, 4, 5])
    vars(drawn.trajectory).update(
        mask=np.array([True, False, True]), turn=np.array([0, 1, 1]), outcome="done",
        turn_rewards=np.array([np.nan, 0.5], np.float32),
    )
    given = {"mask": rows()["mask"] & (np.arange(5) != 3)}
    [line] = samples.of_step(4, [drawn], rows() | given, np.full((3, 5), 2.0), decode, 1)
    assert line["tokens"] == ["c", "d", "e"] and line["length"] == 3
    assert line["logp_behav"] == [-0.25, None, -0.5] and line["logp_old"] == [-1.25, None, -1.5]
    assert line["weight"] == [2.0, None, 2.0] and line["version"] == [7, None, 7]
    assert (line["turn"], line["outcome"], line["turn_rewards"]) == ([0, 1, 1], "done", [None, 0.5])


def test_a_session_names_its_forks():
    drawn = sample(0, [3, 4, 5])
    fork = types.SimpleNamespace(fork=0, prompt=np.array([1, 6]), tokens=np.array([7, 8]))
    vars(drawn.trajectory).update(fork=1, forks=(fork,))
    [line] = samples.of_step(4, [drawn], rows(), None, decode, 1)
    assert line["fork"] == 1 and line["response"] == "cde"
    assert line["forks"] == [{"fork": 0, "prompt": "af", "response": "gh", "length": 2}]


def test_long_answers_are_cut_and_say_so(monkeypatch):
    monkeypatch.setattr(samples, "MAX_TOKENS", 2)
    [line] = samples.of_step(1, [sample(0, [3, 4, 5])], rows(), None, decode, 1)
    assert line["length"] == 3 and line["tokens"] == ["c", "d"] and len(line["logp_old"]) == 2
    assert line["response"] == "cde"


def test_tokens_are_what_each_adds_to_the_text():
    """The bytes of "é" are two tokens, and the text of the second depends on the first."""
    text = {3: b"a", 4: b"\xc3", 5: b"\xa9", 6: b"", 7: b" b"}
    decode = lambda ids: b"".join(text[i] for i in ids).decode(errors="replace").strip()
    assert samples.pieces([3, 4, 5, 7, 6], decode) == ["a", "", "é", " b", ""]
    assert samples.pieces([3, 4], decode) == ["a", "\ufffd"]  # it ends there
    assert samples.pieces([7, 3], decode) == ["b", "a"]


def test_an_evaluation_has_one_program():
    [line] = samples.of_evaluation(2, [sample(0, [3]), sample(1, [4])], decode, 1)
    assert line["phase"] == "eval" and line["reward"] == 0.5 and line["logp_old"] == [-0.5]
    assert line["logp_behav"] is line["weight"] is line["version"] is None
    drawn = sample(0, [3])
    del drawn.example["answer"]
    [line] = samples.of_evaluation(0, [drawn], decode, 1)
    assert line["answer"] is None and line["id"] == "id0"


def test_lines_after_the_resumed_step_are_dropped_and_a_torn_one(tmp_path):
    file = samples.open_file(tmp_path, None)
    for step in (0, 1, 2):
        file.write(json.dumps({"step": step}))
    file.close()
    with open(tmp_path / "samples.jsonl", "a") as torn:
        torn.write('{"step": 3, "to')
    assert [x["step"] for x in samples.read(tmp_path)] == [0, 1, 2]
    file = samples.open_file(tmp_path, 1)
    file.write(json.dumps({"step": 2}))
    file.close()
    assert [x["step"] for x in samples.read(tmp_path)] == [0, 1, 2]
    (tmp_path / "samples.jsonl").write_text("nonsense\n{}\n")
    with pytest.raises(ValueError, match="samples.jsonl, line 1: not JSON"):
        samples.read(tmp_path)


@pytest.mark.all
def test_a_run_writes_them_and_a_resumed_one_the_same(tmp_path):
    settings = dict(metrics__samples_every=2, metrics__samples=2, checkpoint__every=1)
    tiny.run(tmp_path / "whole", **settings)
    lines = samples.read(tmp_path / "whole")
    assert [(x["step"], x["phase"]) for x in lines] == [
        (step, phase) for step, phase in [(0, "eval"), (2, "train"), (2, "eval"), (4, "train"),
                                          (4, "eval"), (5, "eval")] for _ in range(2)]
    # Greedy answers, at the model's own probabilities.
    greedy = np.exp(np.concatenate([x["logp_old"] for x in lines if x["phase"] == "eval"]))
    assert (0 < greedy).all() and (greedy < 1).all() and np.ptp(greedy) > 0.01
    train = [x for x in lines if x["phase"] == "train"]
    for x in train:
        assert len(x["tokens"]) == len(x["logp_behav"]) == len(x["logp_old"]) == x["length"]
        # int8 against float32: near, and not the same
        gap = np.abs(np.exp(x["logp_behav"]) - np.exp(x["logp_old"]))
        assert 0 < gap.max() < 0.2
        np.testing.assert_allclose(
            x["weight"], np.minimum(np.exp(np.subtract(x["logp_old"], x["logp_behav"])), 2), rtol=1e-4)
        assert x["version"] == [x["step"] - 1] * x["length"]
    records = {r["step"]: r for r in tiny.lines(tmp_path / "whole") if r["phase"] == "train"}
    counts = probabilities.read(tmp_path / "whole")
    assert [x["step"] for x in counts] == [2, 4]
    for x in counts:
        high = records[x["step"]]["mismatch/dp_high"]
        assert x["tokens"] == probabilities.plane([x]).sum() > 16
        assert x["high"] / x["tokens"] == pytest.approx(high)
    tiny.run(tmp_path / "cut", **settings | {"steps": 3})
    tiny.run(tmp_path / "cut", **settings)
    own = [x for x in samples.read(tmp_path / "cut") if (x["step"], x["phase"]) != (3, "eval")]
    assert own == lines and probabilities.read(tmp_path / "cut") == counts
