import csv
import gzip
import json
import re
import sys
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_tis.data.tasks import SPLITS, TASKS, in_split, make


def read_all(source):
    return [source[index] for index in range(len(source))]


def write(path, *lines):
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def test_every_text_is_in_exactly_one_split():
    texts = [f"{a}+{b}=" for a in range(100) for b in range(100)]
    counts = {split: sum(in_split(text, split) for text in texts) for split in SPLITS}
    assert sum(counts.values()) == len(texts)
    # Shares 6, 3 and 1 tenths of 10,000; a fair hash is within 5 standard deviations (50) of each.
    assert abs(counts["train"] - 6000) < 250
    assert abs(counts["warmup"] - 3000) < 250
    assert abs(counts["eval"] - 1000) < 250


@pytest.mark.parametrize(("seed_a", "seed_b"), [(0, 0), (0, 7)])
def test_arithmetic_splits_share_no_problem(seed_a, seed_b):
    params = {"size": 400, "digits": 1, "ops": "+-"}  # 200 texts, so each split repeats itself.
    seen = {
        split: {example["prompt"] for example in read_all(TASKS["arithmetic"](
            split=split, seed=seed_a if split == "train" else seed_b, **params))}
        for split in SPLITS
    }
    assert all(seen.values())
    assert not seen["train"] & seen["eval"]
    assert not seen["train"] & seen["warmup"]
    assert not seen["eval"] & seen["warmup"]


def test_arithmetic_answers_are_right():
    source = TASKS["arithmetic"](size=300, digits=3, terms=4, ops="+-*")
    for example in read_all(source):
        assert re.fullmatch(r"[0-9]{1,3}([-+*][0-9]{1,3}){3}=", example["prompt"])
        assert example["answer"] == str(eval(example["prompt"][:-1]))
    assert any("*" in example["prompt"] for example in read_all(source))


def test_arithmetic_of_several_problems():
    for example in read_all(TASKS["arithmetic"](size=50, digits=1, problems=3)):
        problems = example["prompt"].removesuffix("=").split(" ")
        assert len(problems) == 3 and all(re.fullmatch(r"[0-9]\+[0-9]", p) for p in problems)
        assert example["answer"] == " ".join(str(eval(p)) for p in problems)


def test_arithmetic_with_calls_of_a_calculator():
    """Of 400 examples about 100 are calls, and 100 answers after a reply; the problems stay."""
    plain, source = (read_all(TASKS["arithmetic"](size=400, ops="+*", calls=c)) for c in (0.0, 0.5))
    calls = [e for e in source if e["answer"] == e["prompt"]]
    replies = [e for e in source if "turns" in e]
    assert 70 < len(calls) < 130 and 70 < len(replies) < 130
    for before, after in zip(plain, source, strict=True):
        assert before["prompt"] == after["prompt"] and before["id"] == after["id"]
        if "turns" in after:
            assert after["turns"] == [[after["prompt"], before["answer"] + " "]]
        assert after["answer"] in (before["answer"], before["prompt"])


def test_arithmetic_depends_on_seed_and_index_only():
    source = TASKS["arithmetic"](size=50, seed=3)
    again = TASKS["arithmetic"](size=60, seed=3)
    assert [again[index] for index in reversed(range(50))] == read_all(source)[::-1]
    other = TASKS["arithmetic"](size=50, seed=4)
    assert [e["prompt"] for e in read_all(other)] != [e["prompt"] for e in read_all(source)]
    assert len({example["id"] for example in read_all(source) + read_all(other)}) == 100


def test_arithmetic_is_the_same_on_every_machine():
    # Written down once: a run resumed under another Python must read the same problems.
    source = TASKS["arithmetic"](size=3)
    assert [example["prompt"] for example in read_all(source)] == ["41+46=", "58+83=", "59+80="]


def test_arithmetic_refuses_wrong_parameters():
    arithmetic = TASKS["arithmetic"]
    with pytest.raises(ValueError, match="unknown split 'test'; the splits are train, warmup"):
        arithmetic(size=1, split="test")
    with pytest.raises(ValueError, match="size is 0"):
        arithmetic(size=0)
    with pytest.raises(ValueError, match="digits=0 and terms=2"):
        arithmetic(size=1, digits=0)
    with pytest.raises(ValueError, match="digits=2 and terms=1"):
        arithmetic(size=1, terms=1)
    with pytest.raises(ValueError, match="problems=0"):
        arithmetic(size=1, problems=0)
    with pytest.raises(ValueError, match="calls=1.5"):
        arithmetic(size=1, calls=1.5)
    with pytest.raises(ValueError, match="ops='/'"):
        arithmetic(size=1, ops="/")
    with pytest.raises(IndexError, match="example 1 of a task with 1"):
        arithmetic(size=1)[1]
    with pytest.raises(IndexError):
        arithmetic(size=1)[-1]


def test_jsonl_reads_several_files_in_order(tmp_path):
    a = write(tmp_path / "a.jsonl", '{"prompt": "2+3=", "answer": 5, "id": "x"}', "")
    b = write(tmp_path / "b.jsonl", '{"prompt": "é", "answer": "two\\nlines", "id": 7}')
    assert read_all(TASKS["jsonl"](path=[a, b])) == [
        {"prompt": "2+3=", "answer": "5", "id": "x", "as_read": {"answer": 5}},
        {"prompt": "é", "answer": "two\nlines", "id": "7", "as_read": {"id": 7}},
    ]


def test_the_whole_row_is_the_example_and_fields_are_dotted_paths(tmp_path):
    row = {"q": {"text": "2+3="}, "a": 5, "answer": "five", "id": "x", "more": [{"a": None}]}
    path = write(tmp_path / "a.jsonl", json.dumps(row))
    names = dict(prompt_field="q.text", answer_field="a", id_field=None)
    [example] = read_all(TASKS["jsonl"](path=path, **names))
    made = {"prompt": "2+3=", "answer": "5", "id": f"{path}:1"}
    assert example == row | made | {"as_read": {"answer": "five", "id": "x"}}


def test_without_a_column_id_the_line_is_the_id(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"prompt": "2+3="}', "", '{"prompt": "1+1=", "id": 7}')
    assert [r["id"] for r in read_all(TASKS["jsonl"](path=path))] == [f"{path}:1", "7"]


# What verl's examples/data_preprocess/gsm8k.py writes, and TRL's examples/datasets/deepmath_103k.py.
VERL = {
    "data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "2+3?"}], "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"split": "train", "index": 0, "answer": "2+3=5 #### 5", "question": "2+3?"},
}
TRL = {"prompt": [{"role": "user", "content": "2+3?"}], "solution": "$5$"}
TRL_TEXT = {"prompt": "The sky is", "length": 20}


def write_all(folder, rows):
    """The same rows in every format; CSV has nested columns as JSON."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "a.jsonl").write_text(lines)
    (folder / "lines.json").write_text(lines)
    (folder / "array.json").write_text(json.dumps(rows, indent=1))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    with (folder / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        text = lambda x: json.dumps(x) if isinstance(x, list | dict) else x
        writer.writerows({n: text(x) for n, x in row.items()} for row in rows)
    for path in list(folder.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    return sorted(folder.iterdir())


@pytest.mark.parametrize("row, answer", [(VERL, "5"), (TRL, "$5$"), (TRL_TEXT, None)])
def test_data_of_verl_and_trl_loads_as_it_is_from_every_format(tmp_path, row, answer):
    paths = write_all(tmp_path, [row, row])
    assert len(paths) == 10
    for path in paths:
        [first, _] = read_all(TASKS["jsonl"](path=str(path)))
        expected = row | {"id": f"{path}:{2 if '.csv' in path.name else 1}"}
        if ".csv" in path.name and "length" in row:
            expected["length"] = "20"  # CSV knows text alone
        assert first == (expected if answer is None else expected | {"answer": answer}), path


def test_the_ids_of_verl_can_be_named(tmp_path):
    path = write(tmp_path / "a.jsonl", json.dumps(VERL))
    [example] = read_all(TASKS["jsonl"](path=path, id_field="extra_info.index"))
    assert example["id"] == "0"


def test_a_glob_and_several_files_in_order(tmp_path):
    for name in ("b", "a", "c"):
        write(tmp_path / f"part-{name}.jsonl", json.dumps({"prompt": name}))
    write(tmp_path / "other.jsonl", '{"prompt": "x"}')
    found = read_all(TASKS["jsonl"](path=f"{tmp_path}/part-*.jsonl"))
    assert [r["prompt"] for r in found] == ["a", "b", "c"]
    both = [f"{tmp_path}/other.jsonl", f"{tmp_path}/part-[bc].jsonl"]
    assert [r["prompt"] for r in read_all(TASKS["jsonl"](path=both))] == ["x", "b", "c"]
    with pytest.raises(FileNotFoundError, match=r"none-\*.jsonl: no file has such a name"):
        TASKS["jsonl"](path=f"{tmp_path}/none-*.jsonl")


def test_the_digest_is_of_the_bytes_whatever_packs_them(tmp_path):
    write_all(tmp_path, [TRL])
    digest = lambda name: TASKS["jsonl"](path=str(tmp_path / name)).digest()
    assert digest("a.jsonl") == digest("a.jsonl.gz") != digest("array.json")
    write(tmp_path / "a.jsonl", json.dumps(TRL | {"solution": "6"}))
    assert digest("a.jsonl") != digest("a.jsonl.gz")


GOOD = '{"prompt": "2+3=", "answer": "5", "id": "x"}'


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([GOOD, "{prompt"], r"a\.jsonl:2: the line is not JSON"),
        ([GOOD, "[1]"], r"a\.jsonl:2: the line is a list, not a JSON object"),
        ([GOOD, "", '{"answer": "1", "id": "y"}'],
         r"a\.jsonl:3 \(id 'y'\): no field 'prompt'; the line has answer, id"),
        ([GOOD, '{"prompt": {"a": 1}, "id": "y"}'], r"a\.jsonl:2 \(id 'y'\): 'prompt' is a dict"),
        ([GOOD, '{"prompt": "1", "id": [1]}'], r"a\.jsonl:2: 'id' is a list, not text or a number"),
        ([GOOD, GOOD], r"a\.jsonl:2 \(id 'x'\): the id was already used at .*a\.jsonl:1"),
        ([GOOD, r'{"prompt": "\ud800", "id": "y"}'],
         r"a\.jsonl:2 \(id 'y'\): 'prompt' holds the lone surrogate '\\ud800' at character 1"),
        ([GOOD, r'{"prompt": "1", "answer": "ab\udfff", "id": "y"}'],
         r"a\.jsonl:2 \(id 'y'\): 'answer' holds the lone surrogate .*'\\udfff' at character 3"),
        ([GOOD, r'{"prompt": "1", "id": "\udc00y"}'],
         r"a\.jsonl:2 \(id '\\udc00y'\): 'id' holds the lone surrogate"),
        ([GOOD, r'{"prompt": "1", "id": "y", "extra": {"deep": ["\ud83d"]}}'],
         r"a\.jsonl:2 \(id 'y'\): 'extra.deep\[0\]' holds the lone surrogate"),
        ([GOOD, r'{"prompt": "1", "id": "y", "\ud800": 1}'], r"a\.jsonl:2 \(id 'y'\): 'name' holds the lone surrogate"),
        ([GOOD, '{"prompt": [], "id": "y"}'], r"a\.jsonl:2 .*: the prompt is an empty list of messages"),
        ([GOOD, '{"prompt": ["hi"], "id": "y"}'], r"a\.jsonl:2 .*: message 1 of the prompt has no role"),
        ([GOOD, '{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "id": "y"}'],
         r"message 1 of the prompt has a part of type 'image'; only parts of type 'text' are supported"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_id_and_left_out(tmp_path, lines, said):
    source = TASKS["jsonl"](path=write(tmp_path / "a.jsonl", *lines))
    [bad] = source.bad
    assert re.search(said, str(bad)), str(bad)
    assert [r["id"] for r in read_all(source)] == ["x"]


def test_a_field_that_was_named_has_to_be_there(tmp_path):
    path = write(tmp_path / "a.jsonl", GOOD, '{"prompt": "1", "id": "y"}')
    [bad] = TASKS["jsonl"](path=path, answer_field="answer").bad
    assert "no field 'answer'; the line has prompt, id" in str(bad)
    assert TASKS["jsonl"](path=path).bad == []


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_file_without_a_row_is_an_error(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"a\.jsonl is empty; one line looks like \{\"prompt\""):
        TASKS["jsonl"](path=str(tmp_path / "a.jsonl"))


def test_jsonl_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"prompt": "\xff"}\n')
    [bad] = TASKS["jsonl"](path=path).bad
    assert "a.jsonl:2: the line is not JSON" in str(bad)


def test_parquet_is_read_as_lines_are(tmp_path):
    rows = [{"question": "2+3?", "answer": "2 plus 3\n#### 5"}, {"question": "1?", "answer": "#### 1,000"}]
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    source = TASKS["gsm8k_jsonl"](path=str(path))
    assert read_all(source) == [
        {"prompt": "2+3?", "question": "2+3?", "answer": "5", "id": f"{path}:1",
         "as_read": {"answer": "2 plus 3\n#### 5"}},
        {"prompt": "1?", "question": "1?", "answer": "1000", "id": f"{path}:2",
         "as_read": {"answer": "#### 1,000"}},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[::-1]), path)
    assert TASKS["gsm8k_jsonl"](path=str(path)).digest() != source.digest()


def test_a_broken_parquet_file_is_refused_by_name(tmp_path):
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1 but no more")
    with pytest.raises(ValueError, match="train.parquet is not a readable parquet file"):
        TASKS["gsm8k_jsonl"](path=str(path))
    with mock.patch.dict(sys.modules, {"pyarrow": None}):
        with pytest.raises(ImportError, match=r"pip install 'jaxrl_tis\[hub\]'"):
            TASKS["gsm8k_jsonl"](path=str(path))


def test_jsonl_missing_file_says_what_to_put_there(tmp_path):
    with pytest.raises(FileNotFoundError, match='none.jsonl is missing; put .*"answer": "5"'):
        TASKS["jsonl"](path=tmp_path / "none.jsonl")


def test_gsm8k_answers_follow_the_mark(tmp_path):
    rows = [{"question": "How many?", "answer": "6 * 200 = <<6*200=1200>>1200\n#### 1,200"}]
    path = write(tmp_path / "a.jsonl", *map(json.dumps, rows))
    expected = {
        "prompt": "How many?", "question": "How many?", "answer": "1200", "id": f"{path}:1",
        "as_read": {"answer": rows[0]["answer"]},
    }
    assert read_all(TASKS["gsm8k_jsonl"](path=path)) == [expected]
    path = write(tmp_path / "b.jsonl", '{"question": "How many?", "answer": "12"}')
    [bad] = TASKS["gsm8k_jsonl"](path=path).bad
    assert str(bad).endswith("b.jsonl:1: 'answer' has no '####' before the final answer; write it as in GSM8K")


def chain_sum(**changes):
    params = {"name": "chain_sum", "size": 60, "min_terms": 2, "max_terms": 2, "min_digits": 1,
              "max_digits": 1}
    return TASKS["reasoning_gym"](**(params | changes))


@pytest.mark.all
def test_reasoning_gym_examples():
    source = chain_sum()
    for example in read_all(source):
        expression = json.loads(example["meta"])["expression"]
        assert example["prompt"].endswith(f": {expression} =")
        assert example["answer"] == str(eval(expression))
    assert len({example["id"] for example in read_all(source)}) == 60
    assert read_all(chain_sum()) == read_all(source)
    assert chain_sum()[17] == source[17]


def test_reasoning_gym_splits_share_no_problem_and_seeds_no_stretch():
    # One-digit sums have 200 texts, so seeds alone could not keep splits apart.
    seen = {s: {e["prompt"] for e in read_all(chain_sum(split=s))} for s in SPLITS}
    assert not seen["train"] & seen["eval"]
    assert not seen["train"] & seen["warmup"]
    assert not seen["eval"] & seen["warmup"]
    # The package derives problem i from seed + i: neighbouring seeds would be shifted copies.
    sources = (chain_sum(seed=seed, min_digits=4, max_digits=4) for seed in (0, 1))
    first, second = ({example["prompt"] for example in read_all(source)} for source in sources)
    assert len(first) == len(second) == 60
    assert not first & second


def test_reasoning_gym_whose_package_fails_at_an_example_says_which():
    source = chain_sum()
    source.datasets[0] = [None, {"question": 5}]
    with pytest.raises(ValueError, match="chain_sum fails at example 2: IndexError: list index"):
        source[2]


def test_reasoning_gym_errors(monkeypatch):
    with pytest.raises(ValueError, match="'no_such_task'.*not registered"):
        chain_sum(name="no_such_task")
    with pytest.raises(ValueError, match="max_terms must be >= min_terms"):
        chain_sum(max_terms=1)
    with pytest.raises(ValueError, match="'colour'"):
        chain_sum(colour="red")
    with pytest.raises(ValueError, match="at most 1048576"):
        chain_sum(size=2**20 + 1)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxrl_tis\[tasks\]'"):
        chain_sum()


def test_make_names_the_nearest_parameter_and_the_missing_ones():
    assert len(make("arithmetic", {"size": 3})) == 3
    with pytest.raises(ValueError, match="no parameter 'sise'; did you mean 'size'"):
        make("arithmetic", {"sise": 3})
    with pytest.raises(ValueError, match="no parameter 'q'; it has size, split, seed, digits"):
        make("arithmetic", {"size": 3, "q": 1})
    with pytest.raises(ValueError, match="'jsonl' needs the parameters path"):
        make("jsonl", {})
    with pytest.raises(ValueError, match="unknown task 'chess'; the tasks are arithmetic"):
        make("chess", {})
