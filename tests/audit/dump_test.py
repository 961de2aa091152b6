"""Reading: what is accepted is as it was written, and what is not is named by line and column."""

import gzip
import json

import numpy as np
import pytest

from jaxrl_tis.audit import dump
from jaxrl_tis.audit.__main__ import main
from tests.audit import dumps


def refusal(path, **options):
    with pytest.raises(ValueError) as error:
        dump.read(str(path), **options)
    return str(error.value)


def test_jsonl_is_read_as_it_was_written(tmp_path):
    lines = dumps.records()
    found = dump.read(dumps.write(tmp_path / "d.jsonl", lines))
    assert found.lengths.tolist() == list(dumps.LENGTHS)
    assert found.columns == tuple(lines[0])
    behav = np.concatenate([line["logp_behav"] for line in lines])
    mask = np.concatenate([line["mask"] for line in lines]) != 0
    np.testing.assert_array_equal(found.tokens["mask"], mask)
    np.testing.assert_array_equal(found.tokens["logp_behav"], np.where(mask, behav, 0).astype("f"))
    assert found.sequences["group"].tolist() == [0, 0, 1, 1, 2, 2]
    assert found.tokens["version"][:7].tolist() == [9, 9, 0, 9, 9, 4, 4]  # token 2 is masked


def test_masked_tokens_may_hold_anything(tmp_path):
    line = {"logp_behav": [-1.0, None, -1.0], "logp_old": [-1.0, 7.0, -2.0], "mask": [1, 0, 1],
            "turn": [0, None, 1], "entropy": [None, 5.0, -1e-5]}
    found = dump.read(dumps.write(tmp_path / "d.jsonl", [line]))
    assert found.tokens["logp_old"].tolist() == [-1.0, 0.0, -2.0]
    assert found.tokens["turn"].tolist() == [0, 0, 1]
    np.testing.assert_array_equal(found.tokens["entropy"], [np.nan, 0.0, 0.0])


def test_a_dump_may_be_compressed(tmp_path):
    plain, packed = tmp_path / "d.jsonl", tmp_path / "d.jsonl.gz"
    wanted = dump.read(dumps.write(plain, dumps.records()))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    found = dump.read(str(packed))
    np.testing.assert_array_equal(found.tokens["logp_behav"], wanted.tokens["logp_behav"])
    packed.write_bytes(packed.read_bytes()[:-9])
    assert "d.jsonl.gz: not a complete gzip file" in refusal(packed)


def padded(lines, width=8, start=0):
    """The lines as the padded layout, with NaN at padding."""
    arrays = {}
    for name in lines[0]:
        if np.ndim(lines[0][name]):
            rows = np.full((len(lines), width), np.nan if name.startswith("logp") else 0)
            for row, line in zip(rows, lines, strict=True):
                row[start : start + len(line[name])] = line[name]
            arrays[name] = rows if name.startswith("logp") else rows.astype(int)
        else:
            arrays[name] = np.array([line[name] for line in lines])
    return arrays


@pytest.mark.parametrize("start", [0, 1])
def test_both_layouts_of_npz_are_the_jsonl(tmp_path, start):
    lines = dumps.records()
    wanted = dump.read(dumps.write(tmp_path / "d.jsonl", lines))
    np.savez(tmp_path / "padded.npz", **padded(lines, start=start))
    join = lambda name: np.concatenate([line[name] for line in lines])
    flat = {name: join(name) if np.ndim(x) else np.array([line[name] for line in lines])
            for name, x in lines[0].items()}
    np.savez(tmp_path / "flat.npz", **flat, lengths=np.array(dumps.LENGTHS))
    for name in ("padded", "flat"):
        found = dump.read(str(tmp_path / f"{name}.npz"))
        assert found.lengths.tolist() == wanted.lengths.tolist()
        for column in wanted.tokens:
            np.testing.assert_array_equal(found.tokens[column], wanted.tokens[column], column)
        for column in wanted.sequences:
            np.testing.assert_array_equal(found.sequences[column], wanted.sequences[column])


def test_a_column_is_read_from_another_in_place_of_its_own(tmp_path):
    lines = [{"logp_behav": [-1.0], "logp": [-1.5], "logp_old": [-2.0], "mask": [1]}]
    path = dumps.write(tmp_path / "d.jsonl", lines)
    np.savez(tmp_path / "d.npz", **{name: np.array([x]) for name, x in lines[0].items()})
    for file in (path, str(tmp_path / "d.npz")):
        assert dump.read(file, {"logp_old": "logp"}).tokens["logp_old"].tolist() == [-1.5]
    with pytest.raises(ValueError, match="two columns from one name"):
        dump.read(path, {"logp_old": "logp", "logp": "logp"})


def test_columns_may_have_other_names(tmp_path):
    line = {"rollout_log_probs": [-1.0], "old_log_probs": [-2.0]}
    path = dumps.write(tmp_path / "d.jsonl", [line])
    renamed = {"logp_behav": "rollout_log_probs", "logp_old": "old_log_probs"}
    assert dump.read(path, renamed).tokens["logp_old"].tolist() == [-2.0]
    assert "unknown column 'rollout_log_probs'" in refusal(path)
    assert "did you mean 'logp_old'?" in refusal(path, renamed={"logp_odl": "x"})


GOOD = {"logp_behav": [-1.0, -2.0], "logp_old": [-1.5, -2.0], "reward": 1.0, "group": 1}


@pytest.mark.parametrize("line, message", [
    ("{", "not JSON (Expecting"),
    ("", "not JSON (Expecting value"),
    ("[1]", "not a JSON object"),
    ({"logp_behav": [-1.0, float("nan")]}, "logp_behav: token 1 is nan and is not finite"),
    ({"logp_old": [float("-inf"), None]}, "logp_old: token 0 is -inf and is not finite, and 1 more"),
    ({"logp_old": [-1.0, 0.5]}, "logp_old: token 1 is 0.5 and is above 0"),
    ({"logp_old": [-1.0]}, "logp_old: 1 values, and logp_behav has 2"),
    ({"logp_old": None}, "logp_old: not a list of numbers"),
    ({"logp_old": ["-1", "-2"]}, "logp_old: not a list of numbers"),
    ({"logp_old": [[-1.0], [-2.0]]}, "logp_old: not a list of numbers"),
    ({"logp_old": [[-1.0], -2.0]}, "logp_old: not a list of numbers"),
    ({"logp_behav": []}, "logp_behav: an empty sequence"),
    ({"mask": [1, 2]}, "mask: has values other than 0 and 1"),
    ({"mask": [1]}, "mask: 1 values, and logp_behav has 2"),
    ({"reward": float("inf")}, "reward: inf is not a finite number"),
    ({"reward": True}, "reward: True is not a finite number"),
    ({"reward": [1.0, 1.0]}, "reward: [1.0, 1.0] is not a finite number"),
    ({"group": 1.5}, "group: 1.5 is neither a whole number nor a text"),
    ({"version": [1, 1]}, "version: present, but line 1 lacks it"),
    ({"logps": [-1.0, -1.0]}, "unknown column 'logps'; did you mean 'logp'?"),
    ({"reward": None}, "reward: None is not a finite number"),
])
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "d.jsonl"
    line = line if isinstance(line, str) else json.dumps(GOOD | line)
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n{json.dumps(GOOD)}\n")
    told = refusal(path)
    assert told.startswith(f"{path}: 1 of 3 lines are malformed; nothing was measured\n")
    assert f"{path}, line 2, {message}" in told


@pytest.mark.parametrize("column, values, message", [
    ("turn", [0, 0.5], "not whole numbers"), ("turn", [0, -1], "token 1 is -1 and is below 0"),
    ("version", [1, 2**31], "is above 2^31"), ("position", [1], "1 values"),
    ("top", [[[-1, -1]], [[-1, 1]]], "token 1 has a value above 0 or infinite, which is not a log-prob"),
    ("entropy", [float("nan"), -0.5], "token 1 is -0.5 and is below 0, so it is not an entropy"),
    ("entropy", [float("inf"), 0.5], "token 0 is inf and is not finite"),
    ("top", [[-1, -1], [-1, -1]], "not K pairs"), ("top", [[[-1, -1]]], "1 values"),
    ("top", [[[-1, -1]], [[-1, -1], [-2, -2]]], "not K pairs"),
])
def test_values_of_optional_columns(tmp_path, column, values, message):
    told = refusal(dumps.write(tmp_path / "d.jsonl", [GOOD | {column: values}]))
    assert f"line 1, {column}: " in told and message in told


def test_all_heads_have_one_size(tmp_path):
    lines = [GOOD | {"top": [[[-1, -1]] * k] * 2} for k in (2, 2, 3)]
    told = refusal(dumps.write(tmp_path / "d.jsonl", lines))
    assert "1 of 3" in told and "line 3, top: 3 pairs per token, but 2 before" in told


def test_missing_columns_are_named(tmp_path):
    lines = [GOOD, {"logp_behav": [-1.0], "group": 0}, {**GOOD, "top": [[[-1, -1]], [[-1, -1]]]}]
    told = refusal(dumps.write(tmp_path / "d.jsonl", lines))
    assert "line 2, column 'logp_old' is missing" in told
    assert "line 2, reward: missing, but line 1 has it" in told
    assert "line 3, top: present, but line 1 lacks it" in told


def test_all_bad_lines_are_counted_and_the_first_few_shown(tmp_path):
    lines = [GOOD] + [GOOD | {"logp_old": [-1.0]}] * 8
    told = refusal(dumps.write(tmp_path / "d.jsonl", lines))
    assert "8 of 9 lines are malformed" in told
    assert "line 6" in told and "line 7" not in told and "and 3 more" in told


@pytest.mark.parametrize("arrays, message", [
    ({"logp_behav": np.zeros((2, 3))}, "column 'logp_old' is missing"),
    ({"logp_behav": np.zeros((2, 3)), "logp_old": np.zeros((2, 3))}, "neither `mask` nor"),
    ({"logp_behav": np.zeros((2, 3)), "logp_old": np.zeros((2, 4)), "mask": np.ones((2, 3))},
     "column logp_old: shape [2, 4] does not match [2, 3]"),
    ({"logp_behav": np.zeros((2, 3)), "logp_old": np.zeros((2, 3)), "mask": np.ones(3)},
     "column mask: logp_behav has shape [2, 3] and mask [3]"),
    ({"logp_behav": np.zeros(3), "logp_old": np.zeros(3), "lengths": np.array([1, 1])},
     "column lengths"),
    ({"logp_behav": np.zeros(3), "logp_old": np.zeros(3), "lengths": np.array([0, 3])},
     "row 0, logp_behav: an empty sequence"),
    ({"logp_behav": np.zeros(3), "logp_old": np.ones(3), "lengths": np.array([1, 2])},
     "row 1, logp_old: token 0 is 1 and is above 0, so it is not a log-prob, and 1 more"),
    ({"logp_behav": np.zeros(3), "logp_old": np.zeros(3), "lengths": np.array([1, 2]),
      "tokens": np.zeros(3)}, "unknown column 'tokens'"),
    ({"logp_behav": np.zeros((2, 3)), "logp_old": np.zeros((2, 3)), "mask": np.zeros((2, 3))},
     "column mask: no token is valid"),
])
def test_a_bad_npz_is_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "d.npz", **arrays)
    assert message in refusal(tmp_path / "d.npz")


def test_files_of_other_kinds(tmp_path):
    (tmp_path / "d.npz").write_text("no zip")
    (tmp_path / "d.jsonl").touch()
    (tmp_path / "d.csv").touch()
    assert "is not a .npz file" in refusal(tmp_path / "d.npz")
    assert "there is no sequence in it" in refusal(tmp_path / "d.jsonl")
    assert "a .jsonl, .jsonl.gz or .npz file" in refusal(tmp_path / "d.csv")
    with pytest.raises(FileNotFoundError, match="no such file"):
        dump.read(str(tmp_path / "none.jsonl"))


def test_more_tokens_than_float32_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(dump, "MOST_TOKENS", 1)
    assert "2 tokens are too many, because float32 counts up to 1" in refusal(dumps.write(tmp_path / "d.jsonl", [GOOD]))


def test_a_renamed_column_has_to_be_there(tmp_path):
    line = {"logp_behav": [-1, -1], "logp_old": [-1, -3], "mask": [1, 0]}
    path = dumps.write(tmp_path / "d.jsonl", [line])
    assert "has no 'loss_mask', which --columns names for mask" in refusal(path, renamed={"mask": "loss_mask"})


def test_files_that_are_no_npz(tmp_path):
    path = tmp_path / "a.npz"
    with open(path, "wb") as file:
        np.save(file, np.zeros(3))
    assert "is not a .npz file of numbers" in refusal(path)
    zeros = np.zeros(4096, np.float32)
    np.savez_compressed(path, logp_behav=zeros, logp_old=zeros, lengths=np.array([4096]))
    damaged = bytearray(path.read_bytes())
    damaged[60:70] = b"\xff" * 10
    path.write_bytes(damaged)
    assert "is not a .npz file of numbers" in refusal(path)
    empty = np.zeros((2, 0))
    np.savez(path, logp_behav=empty, logp_old=empty, mask=empty)
    assert "T at least 1" in refusal(path)
    np.savez(path, logp_behav=zeros, logp_old=zeros, lengths=np.array(["a"]))
    assert "column lengths: give whole numbers" in refusal(path)


@pytest.mark.parametrize("value", ["logp_behav", "logp_behav=", "=x", "a=b,"])
def test_names_of_columns_on_the_command_line(value, capsys):
    with pytest.raises(SystemExit) as end:
        main(["d.jsonl", "--columns", value])
    assert end.value.code == 2 and "OURS=THEIRS" in capsys.readouterr().err
