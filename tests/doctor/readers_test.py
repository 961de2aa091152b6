"""Logs of every kind are read whole, or the place that is broken is named."""

import gzip
import io
import json
import math
import struct

import pytest
from etils import epath
from tensorboardX.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2

from jaxrl_tis.doctor import readers
from tests.doctor import logs


def read(path, text=None):
    if text is not None:
        path.write_text(text)
    [log] = readers.read(epath.Path(path))
    return log


def values(log):
    return [row.values for row in log.rows]


# JSONL


def test_jsonl(tmp_path):
    log = read(tmp_path / "a.jsonl", '{"step": 1, "kl": 0.5, "text": "x", "none": null, "ok": true}\n\n'
               '{"step": 2, "kl": NaN, "ratio": "Infinity", "low": "-inf"}\n')
    assert math.isnan(log.rows[0].values.pop("none"))  # as verl's logger writes NaN
    assert values(log)[0] == {"step": 1, "kl": 0.5}
    assert math.isnan(log.rows[1].values["kl"])
    assert (log.rows[1].values["ratio"], log.rows[1].values["low"]) == (math.inf, -math.inf)
    assert log.texts == {"text", "ok"} and log.rows[1].place == "line 3"


def test_verls_lines_hold_their_values_one_level_deeper(tmp_path):
    assert values(read(tmp_path / "a.jsonl", '{"step": 3, "data": {"kl": 1}}\n')) == [
        {"kl": 1.0, "step": 3.0}
    ]


def test_a_torn_last_line_is_left_out(tmp_path):
    assert values(read(tmp_path / "a.jsonl", '{"step": 1}\n{"step": 2, "kl": 0.')) == [{"step": 1}]


@pytest.mark.parametrize("text, message", [
    ('{"step": 1}\n{"step" 2}\n{"step": 3}\n', r"a\.jsonl, line 2: not JSON"),
    ('{"step": 1}\n{"step" 2}\n', r"line 2: not JSON"),  # ended, so not being written
    ('{"step": 1}\n[2]\n', r"line 2: not a JSON object"),
])
def test_a_bad_line_is_named(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.jsonl", text)


# CSV


def test_a_table_of_history(tmp_path):
    log = read(tmp_path / "a.csv", ',_step,actor/lr,note,kl\n0,1,0.5,good,\n1,2,NaN,"two\nlines",3e-2\n')
    assert values(log)[0] == {"_step": 1, "actor/lr": 0.5}
    assert math.isnan(log.rows[1].values["actor/lr"]) and log.rows[1].values["kl"] == 0.03
    assert log.texts == {"note"} and [row.place for row in log.rows] == ["line 2", "line 4"]


@pytest.mark.parametrize("prefix", ["", "Name: ", "Group: "])
def test_a_chart_of_one_run(prefix, tmp_path):
    head = '"Step","{0}my - run - train/kl","{0}my - run - train/kl__MIN","{0}my - run - train/kl__MAX"\n'
    log = read(tmp_path / "a.csv", head.format(prefix) + "1,0.5,0.4,0.6\n")
    assert values(log) == [{"Step": 1, "train/kl": 0.5}]


@pytest.mark.parametrize("text, message", [
    ("Step,a - kl,b - kl\n1,2,3\n", "line 1: columns of several runs: a, b"),
    ("Step,kl,kl\n1,2,3\n", "line 1: duplicate columns: kl"),
    ("Step,kl\n1,2\n3\n", "line 3: 1 cells for 2 columns"),
    ("Step,kl\n1,2\n3,x\n4,5\n", "line 3: 'kl' is 'x', not a number"),
    ('Step,kl\n1,"2\n', "not CSV"),
    ("", "line 1: the names of the columns are missing"),
])
def test_a_bad_table_is_named(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.csv", text)


# trainer_state.json


def test_trainer_state(tmp_path):
    state = {"log_history": [{"step": 1, "kl": 0.5}, {"step": 2, "kl": None}]}
    log = read(tmp_path / readers.STATE, json.dumps(state))
    assert values(log)[0] == {"step": 1, "kl": 0.5}
    assert log.rows[1].values["step"] == 2 and math.isnan(log.rows[1].values["kl"])
    assert len(read(tmp_path).rows) == 2


@pytest.mark.parametrize("text, message", [
    ("{", "line 1: not JSON"), ("[]", "log_history"), ("{}", "log_history"),
    ('{"log_history": [{}, 2]}', r"log_history\[1\]: not a JSON object"),
])
def test_a_bad_state_is_named(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read(tmp_path / readers.STATE, text)


# TensorBoard


def test_checksums_are_those_of_tfrecords():
    # CRC-32C of 32 zero bytes is 0x8A9136AA (RFC 3720, B.4). Rotated right by 15 it is 0x6D551522, and
    # 0x6D551522 + 0xA282EAD8 = 0x1_0FD7_FFFA.
    assert readers._masked(bytes(32)) == 0x0FD7FFFA


def test_events(tmp_path):
    folder = logs.write_events(tmp_path / "tb", [(1, {"a/kl": 0.5}), (2, {"a/kl": math.nan, "b": 2.0})])
    log = read(epath.Path(folder))
    assert values(log)[0] == {"a/kl": 0.5, "step": 1}
    assert math.isnan(log.rows[1].values["a/kl"]) and log.rows[1].values["b"] == 2.0
    [file] = (tmp_path / "tb").iterdir()
    assert len(read(file).rows) == 2


def file_of(tmp_path):
    logs.write_events(tmp_path / "tb", [(1, {"kl": 0.5}), (2, {"kl": 0.25})])
    [file] = (tmp_path / "tb").iterdir()
    return file


def test_a_torn_last_record_is_left_out(tmp_path):
    file = file_of(tmp_path)
    whole = file.read_bytes()
    for cut in (1, 10, len(whole) // 4):
        file.write_bytes(whole[:-cut])
        assert values(read(file))[:1] == [{"kl": 0.5, "step": 1}]
        assert len(read(file).rows) == 1


def test_a_flipped_bit_is_named(tmp_path):
    file = file_of(tmp_path)
    whole = bytearray(file.read_bytes())
    whole[-6] ^= 1
    file.write_bytes(whole)
    with pytest.raises(ValueError, match=r"record 3 at byte \d+: the checksum of its content is wrong"):
        read(file)
    whole[1] ^= 1  # the length of the first
    file.write_bytes(whole)
    with pytest.raises(ValueError, match="record 1 at byte 0: the checksum of its length is wrong"):
        read(file)


def record(content):
    length = struct.pack("<Q", len(content))
    parts = (length, struct.pack("<I", readers._masked(length)), content,
             struct.pack("<I", readers._masked(content)))
    return b"".join(parts)


def test_what_is_no_event_is_named(tmp_path):
    file = tmp_path / "events.out.tfevents.1"
    file.write_bytes(record(b"\xff\xff\xff"))
    with pytest.raises(ValueError, match="record 1 at byte 0: not an event"):
        read(file)


def scalar(**fields):
    return tensor_pb2.TensorProto(tensor_shape=tensor_shape_pb2.TensorShapeProto(), **fields)


@pytest.mark.parametrize("tensor, value", [
    (scalar(dtype=1, float_val=[0.5]), 0.5), (scalar(dtype=2, double_val=[0.1]), 0.1),
    (scalar(dtype=1, tensor_content=struct.pack("<f", 0.25)), 0.25),
    (scalar(dtype=7, string_val=[b"text"]), None),
    (tensor_pb2.TensorProto(dtype=1, float_val=[1, 2], tensor_shape=tensor_shape_pb2.TensorShapeProto(
        dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=2)])), None),
])
def test_scalars_that_are_written_as_tensors(tensor, value, tmp_path):
    event = event_pb2.Event(step=3, summary=summary_pb2.Summary(
        value=[summary_pb2.Summary.Value(tag="kl", tensor=tensor)]))
    file = tmp_path / "events.out.tfevents.1"
    file.write_bytes(record(event.SerializeToString()))
    log = read(file)
    assert log.rows[0].values == {"step": 3} | ({} if value is None else {"kl": value})
    assert log.texts == (set() if value is not None else {"kl"})


def test_a_continued_run_hides_what_it_writes_again(tmp_path):
    logs.write_events(tmp_path / "tb", [(1, {"kl": 0.5}), (2, {"kl": 9.0}), (3, {"kl": 9.0})], ".1")
    start = event_pb2.Event(
        step=2, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
    again = event_pb2.Event(step=2, summary=summary_pb2.Summary(
        value=[summary_pb2.Summary.Value(tag="kl", simple_value=0.25)]))
    later = tmp_path / "tb" / "events.out.tfevents.9999999999.2"
    later.write_bytes(record(start.SerializeToString()) + record(again.SerializeToString()))
    assert [(row["step"], row["kl"]) for row in values(read(tmp_path / "tb"))] == [(1, 0.5), (2, 0.25)]


# What is no log


def test_what_is_no_log(tmp_path):
    with pytest.raises(FileNotFoundError, match="not found; give the path of a log"):
        read(tmp_path / "a.jsonl")
    with pytest.raises(FileNotFoundError, match="this folder has no log; give one with trainer_state.json"):
        read(tmp_path)
    assert not readers.is_log(epath.Path(tmp_path)) and not readers.is_log(epath.Path(tmp_path / "x"))
    with pytest.raises(ValueError, match="a.log: the format is unknown; give JSONL"):
        read(tmp_path / "a.log", "loss: 1")
    assert readers.is_log(epath.Path(tmp_path / "a.log")) and readers.is_log(epath.Path("-"))


# Compressed files, folders, standard input


@pytest.mark.parametrize("name, text", [
    ("a.jsonl", '{"step": 1, "kl": 0.5}\n'), ("a.csv", "step,kl\n1,0.5\n"), ("a.log", "step:1 - kl:0.5\n"),
    (readers.STATE, '{"log_history": [{"step": 1, "kl": 0.5}]}'), ("a", '{"step": 1, "kl": 0.5}\n'),
    ("slurm-1.out", "hello\nstep:1 - kl:0.5\n"),
])
def test_files_may_be_compressed(name, text, tmp_path):
    packed = tmp_path / (name + ".gz")
    packed.write_bytes(gzip.compress(text.encode()))
    assert values(read(packed)) == values(read(tmp_path / name, text)) == [{"step": 1, "kl": 0.5}]
    packed.write_bytes(gzip.compress(text.encode())[:-5])
    with pytest.raises(ValueError, match="gz: not a complete gzip file"):
        read(packed)


def state(folder, kl):
    folder.mkdir(parents=True)
    (folder / readers.STATE).write_text(json.dumps({"log_history": [{"step": 1, "kl": kl}]}))


def test_of_checkpoints_the_newest_is_read(tmp_path):
    for number, kl in ((500, 0.1), (1000, 0.2), (1500, 0.3)):
        state(tmp_path / f"checkpoint-{number}", kl)
    (tmp_path / "checkpoint-2000").mkdir()  # begun, and without a state
    (tmp_path / "checkpoint-last").mkdir()
    assert readers.is_log(epath.Path(tmp_path))
    assert values(read(tmp_path)) == [{"step": 1, "kl": 0.3}]
    (tmp_path / readers.STATE).write_text(json.dumps({"log_history": [{"step": 1, "kl": 0.4}]}))
    assert values(read(tmp_path)) == [{"step": 1, "kl": 0.4}]


def test_a_folder_of_several_logs(tmp_path):
    (tmp_path / "a.log").write_text("step:1 - kl:0.5\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"step": 2, "kl": 0.25}\n'))
    (tmp_path / "model.bin").write_bytes(b"x")
    assert [values(log) for log in readers.read(epath.Path(tmp_path))] == [
        [{"step": 1, "kl": 0.5}], [{"step": 2, "kl": 0.25}]]
    (tmp_path / "metrics.jsonl").write_text("")  # of a run of ours
    assert not readers.is_log(epath.Path(tmp_path))


def test_metrics_jsonl_of_a_folder_is_ours_or_its_only_log(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, more in ((ours, ', "phase": "train"'), (theirs, "")):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(f'{{"step": 1, "kl": 0.5{more}}}\n')
        (folder / "checkpoints.jsonl").write_text('{"step": 7, "path": "x"}\n')
    assert not readers.is_log(epath.Path(ours)) and readers.is_log(epath.Path(theirs))
    (ours / "metrics.jsonl").write_bytes(b"\xff\n")  # broken, and told by the reader of our records
    assert not readers.is_log(epath.Path(ours))
    assert values(read(theirs)) == [{"step": 1, "kl": 0.5}]


@pytest.mark.parametrize("text", ['{"step": 1, "kl": 0.5}\n', "step:1 - kl:0.5\n"])
def test_standard_input(text, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert values(read("-")) == [{"step": 1, "kl": 0.5}]
