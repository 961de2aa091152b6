"""Files that are odd, broken or hold what JSON cannot; tasks_test reads all formats as a run does."""

import csv
import datetime
import decimal
import gzip
import json
import math

import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_tis.data import files


def read(path, content):
    path.write_bytes(content)
    return files.read(str(path), {"prompt": "1"})[0]


def test_values_that_json_lacks():
    value = {
        "nan": math.nan, "inf": [-math.inf, 1.5], "decimal": decimal.Decimal("1.50"), "bytes": b"\xff",
        "day": datetime.date(2026, 1, 2), "time": datetime.datetime(2026, 1, 2, 3, 4, 5),
        "pair": (1, True), "text": "é\N{GRINNING FACE}", "none": None,
    }
    assert files.plain(value, "row") == {
        "nan": None, "inf": [None, 1.5], "decimal": "1.50", "bytes": "/w==", "day": "2026-01-02",
        "time": "2026-01-02T03:04:05", "pair": [1, True], "text": "é\N{GRINNING FACE}", "none": None,
    }


def test_values_of_parquet_can_be_saved_as_json(tmp_path):
    rows = [{"prompt": "1", "score": math.nan, "when": datetime.datetime(2026, 1, 2), "image": b"ab",
             "price": decimal.Decimal("2.5"), "nested": {"a": [1, 2], "b": None}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    [row], _ = files.read(str(tmp_path / "a.parquet"), {})
    assert row.values == {
        "prompt": "1", "score": None, "when": "2026-01-02T00:00:00", "image": "YWI=", "price": "2.5",
        "nested": {"a": [1, 2], "b": None},
    }
    json.dumps(row.values, allow_nan=False)


def test_csv_lines_are_counted_as_an_editor_does(tmp_path):
    content = b'\xef\xbb\xbfprompt,answer\r\n"two\nlines",1\r\n\r\n"say ""a, b""",\r\n{"a": 1},[1]\r\n'
    rows = read(tmp_path / "a.csv", content)
    assert [(r.place.split(":")[-1], r.values) for r in rows] == [
        ("2", {"prompt": "two\nlines", "answer": "1"}), ("5", {"prompt": 'say "a, b"', "answer": None}),
        ("6", {"prompt": {"a": 1}, "answer": "[1]"}),
    ]


def test_csv_rows_that_cannot_be_used(tmp_path):
    rows = read(tmp_path / "a.csv", b"prompt,answer\n1,2,3\n1\n\xe9,2\n1,2\n")
    assert [r.reason for r in rows[:2]] == [
        "3 fields, and the header has 2", "1 fields, and the header has 2",
    ]
    assert "'prompt' holds the lone surrogate '\\udce9' at character 1; remove it" == rows[2].reason
    assert rows[3].reason == ""


def test_messages_in_csv_are_json_or_as_python_prints_them(tmp_path):
    messages = [{"role": "user", "content": "it's"}, {"role": "user", "content": "b"}]
    cells = [json.dumps(messages), str(messages), str(messages).replace("}, {", "}\n {"), "{x} + [{", "{2, 1}"]
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([["prompt"], *([cell] for cell in cells)])
    rows = files.read(str(tmp_path / "a.csv"), {})[0]
    assert [r.values["prompt"] for r in rows[:2]] == [messages, messages]
    # numpy prints a list without commas; a text would be trained on as it is.
    assert rows[2].reason.startswith("a cell looks like a list of messages and is not JSON: ")
    assert [(r.values["prompt"], r.reason) for r in rows[3:]] == [("{x} + [{", ""), ("{2, 1}", "")]


def test_cells_that_are_no_list_of_objects_stay_texts(tmp_path):
    cells = ["[{1}, {2}]", "[{1: 2}, 3]", "{1, 2}", "{{1, 2}, {3}}", "{[0, 1]}", "[{{1}}]"]
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([["answer"], *([cell] for cell in cells)])
    assert [r.values["answer"] for r in files.read(str(tmp_path / "a.csv"), {})[0]] == cells


@pytest.mark.parametrize("content, message", [
    (b'a,b\n1,"2\n3,4\n', r"a\.csv:\d: the line is not CSV: unexpected end of data"),
    (b"a,a\n1,2\n", r"a\.csv:1: the header a,a has a column twice"),
])
def test_csv_files_that_are_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.csv", content)


def test_a_long_csv_cell(tmp_path):
    [row] = read(tmp_path / "a.csv", b"prompt\n" + b"x" * 200_000 + b"\n")
    assert len(row.values["prompt"]) == 200_000


@pytest.mark.parametrize("content", [b"\xef\xbb\xbf [{}, 5]", b'[{"a": "\\ud800"}, 5]'])
def test_a_json_array_with_rows_that_are_none(tmp_path, content):
    first, second = read(tmp_path / "a.json", content)
    assert second.place.endswith("a.json:2") and second.reason.startswith("the line is a int")
    assert first.reason == ("" if first.values == {} else "'a' holds the lone surrogate "
                            "'\\ud800' at character 1; remove it")


@pytest.mark.parametrize("name, content, message", [
    ("a.json", b"[1, 2", "a.json is not JSON"),
    ("a.json.gz", gzip.compress(b"[1]" * 999, mtime=0)[:-12], "a.json.gz is not a readable gzip file"),
    ("a.jsonl.gz", b"no gzip", "a.jsonl.gz is not a readable gzip file"),
    ("a.parquet", b"PAR1", "a.parquet is not a readable parquet file"),
    ("a.csv.gz", gzip.compress(b"", mtime=0), "a.csv.gz is empty"),
    ("a.json", b'{"data": [\n{"prompt": "2+3="}\n]}\n', "a.json holds one JSON object; give an array"),
])
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name, content)


def test_a_line_nested_too_deep_is_a_bad_row(tmp_path):
    deep, good = read(tmp_path / "a.jsonl", b"[" * 100_000 + b"\n" + b"{}\n")
    assert deep.reason.startswith("the line is not JSON") and good.reason == ""


@pytest.mark.parametrize("name, content", [
    ("a.jsonl", b'{"x": %s}\n{}\n'), ("a.json", b'[{"x": %s}, {}]'), ("a.csv", b'x\n"{""y"": %s}"\n1\n'),
])
def test_values_nested_too_deep_are_a_bad_row(tmp_path, name, content):
    deep, good = read(tmp_path / name, content % (b"[" * 700 + b"]" * 700))
    assert deep.reason == "its values are nested too deeply" and good.reason == ""


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_pointer_in_the_place_of_a_file_is_named(tmp_path, name):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    with pytest.raises(ValueError, match=f"{name} is a pointer of Git LFS, .*git lfs pull"):
        read(tmp_path / name, pointer)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"is a folder; name its files, as in .*/\*.jsonl"):
        files.read(tmp_path, {})
