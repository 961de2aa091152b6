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
        {"prompt": "2+3=", "answer": "5", "id": "x"},
        {"prompt": "é", "answer": "two\nlines", "id": "7"},
    ]


def test_jsonl_field_names_and_missing_ids(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"q": "2+3=", "a": "5"}', '{"q": "1+1=", "a": "2"}')
    source = TASKS["jsonl"](path=path, prompt_field="q", answer_field="a", id_field=None)
    assert source[1] == {"prompt": "1+1=", "answer": "2", "id": f"{path}:2"}


GOOD = '{"prompt": "2+3=", "answer": "5", "id": "x"}'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, "{prompt"], r"a\.jsonl:2: the line is not JSON"),
        ([GOOD, "[1]"], r"a\.jsonl:2: the line is a list, not a JSON object"),
        ([GOOD, "", '{"prompt": "1", "id": "y"}'], r"a\.jsonl:3: no field 'answer'.*prompt, id"),
        (['{"prompt": ["1"], "answer": "1", "id": "y"}'], r"a\.jsonl:1: 'prompt' is a list"),
        ([GOOD, GOOD], r"a\.jsonl:2: the id 'x' was already used at .*a\.jsonl:1"),
        ([], r"a\.jsonl is empty; one line looks like \{\"prompt\""),
        (["", ""], r"a\.jsonl is empty"),
    ],
)
def test_jsonl_errors_name_file_and_line(tmp_path, lines, message):
    path = write(tmp_path / "a.jsonl", *lines)
    with pytest.raises(ValueError, match=message):
        TASKS["jsonl"](path=path)


def test_jsonl_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: the line is not JSON"):
        TASKS["jsonl"](path=path)


def test_parquet_is_read_as_lines_are(tmp_path):
    rows = [{"question": "2+3?", "answer": "2 plus 3\n#### 5"}, {"question": "1?", "answer": "#### 1,000"}]
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    source = TASKS["gsm8k_jsonl"](path=str(path))
    assert read_all(source) == [
        {"prompt": "2+3?", "answer": "5", "id": f"{path}:1"},
        {"prompt": "1?", "answer": "1000", "id": f"{path}:2"},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[::-1]), path)
    assert TASKS["gsm8k_jsonl"](path=str(path)).digest() != source.digest()


def test_a_broken_parquet_file_is_refused_by_name(tmp_path):
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1 but no more")
    with pytest.raises(ValueError, match="train.parquet is no parquet file that can be read"):
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
    expected = {"prompt": "How many?", "answer": "1200", "id": f"{path}:1"}
    assert read_all(TASKS["gsm8k_jsonl"](path=path)) == [expected]
    bad = write(tmp_path / "b.jsonl", '{"question": "How many?", "answer": "12"}')
    with pytest.raises(ValueError, match=r"b\.jsonl:1: 'answer' has no '####'"):
        TASKS["gsm8k_jsonl"](path=bad)


def chain_sum(**changes):
    params = {"name": "chain_sum", "size": 60, "min_terms": 2, "max_terms": 2, "min_digits": 1,
              "max_digits": 1}
    return TASKS["reasoning_gym"](**(params | changes))


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


def test_reasoning_gym_errors(monkeypatch):
    with pytest.raises(ValueError, match="'no_such_task'.*not registered"):
        chain_sum(name="no_such_task")
    with pytest.raises(ValueError, match="max_terms must be >= min_terms"):
        chain_sum(max_terms=1)
    with pytest.raises(ValueError, match="'colour'"):
        chain_sum(colour="red")
    with pytest.raises(ValueError, match="above 1048576"):
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
