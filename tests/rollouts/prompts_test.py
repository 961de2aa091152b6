"""From examples to prompt ids, and the check of all data before a run."""

import json

import ml_collections
import numpy as np
import pytest

from jaxrl_tis.data import tasks, tokenizer
from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.data.tokenizer import CharTokenizer
from jaxrl_tis.data.tokenizer_files import load_tokenizer
from jaxrl_tis.rollouts import prompts
from jaxrl_tis.rollouts.prompts import Prompter
from tests.data import tokenizer_files_test, tokenizer_test
from tests.data.tokenizer_files_test import TOKENS

ALPHABET = "0123456789+= "


def task(**changes):
    base = dict(
        template="{prompt}", chat=False, system="", max_prompt_tokens=8, on_bad_example="error"
    )
    return ml_collections.ConfigDict(base | changes)


class Chat(CharTokenizer):
    """Writes a 0 before a system message, a 1 before a user's and a 2 before the model's."""

    digits = {"system": "0", "user": "1", "assistant": "2"}

    def chats(self, conversations):
        self.rendered = conversations
        return ["+".join(self.digits[m["role"]] + m["content"] for m in c) for c in conversations]


def prompter(own=None, **changes):
    return Prompter(own or CharTokenizer(ALPHABET), task(**changes))


def lacks(rewards, environment="", harness=""):
    config = {
        "reward": {"name": rewards}, "task": {"environment": environment},
        "rollout": {"harness": harness},
    }
    return prompts.lacks_answer(ml_collections.ConfigDict(config))


def example(prompt, name="x"):
    return {"prompt": prompt, "id": name}


def text_of(prompter, prompt):
    return prompter.tokenizer.decode(prompter.ids(example(prompt)))


def test_template_and_start_token():
    ids = prompter(template="{prompt} 0").ids(example("1+2="))
    assert CharTokenizer(ALPHABET).decode(ids) == "1+2= 0" and ids[0] == CharTokenizer.bos_id
    assert ids.dtype == np.int32


def test_chat_uses_the_template_of_the_tokenizer_and_no_second_start_token():
    own = Chat(ALPHABET)
    assert list(prompter(own, chat=True).ids(example("7"))) == own.encode("17")
    found = prompter(own, chat=True, system="9", template="{prompt} 5").ids(example("7"))
    assert list(found) == own.encode("09+17 5")


@pytest.mark.parametrize("chat", [False, True])
def test_a_list_of_messages_always_goes_through_the_chat_template(chat):
    messages = [{"role": "user", "content": "7"}, {"role": "assistant", "content": "8"},
                {"role": "user", "content": "9"}]
    chatting = Chat(ALPHABET)
    assert text_of(prompter(chatting, chat=chat), messages) == "17+28+19"
    long = prompter(chatting, chat=chat, system="6", max_prompt_tokens=20)
    assert text_of(long, messages) == "06+17+28+19"
    own = [{"role": "system", "content": "5"}, *messages[:1]]
    assert text_of(long, own) == "05+17"
    assert chatting.rendered == [own]  # as it is in the data


def test_a_template_does_not_rewrite_messages():
    with pytest.raises(ValueError, match="task.template is 'solve {prompt}', and a prompt is a list"):
        prompter(template="solve {prompt}").ids(example([{"role": "user", "content": "7"}]))


def test_a_long_prompt_is_refused_by_name_with_both_numbers():
    with pytest.raises(ValueError, match="example sum-7: 5 prompt tokens.*max_prompt_tokens is 4"):
        prompter(max_prompt_tokens=4).ids(example("1+2=", "sum-7"))


# The check of all data


def write(path, prompts, **more):
    path.write_text("".join(json.dumps({"prompt": p} | more) + "\n" for p in prompts))
    return tasks.make("jsonl", {"path": str(path)})


def test_the_first_five_bad_examples_are_named_before_a_run(tmp_path):
    source = write(tmp_path / "a.jsonl", ["1", "12345678", "x", *["123456789"] * 5, "1"], id=None)
    with pytest.raises(ValueError) as error:
        prompter().checked(source, "training data")
    assert str(error.value).splitlines() == [
        "training data: 7 of 9 examples cannot be used:",
        f"- {tmp_path}/a.jsonl:2: 9 prompt tokens, config.task.max_prompt_tokens is 8; raise it or "
        "shorten the prompt",
        f"- {tmp_path}/a.jsonl:3: the tokenizer cannot encode it: the character 'x' of 'x' is not in "
        f"the tokenizer's alphabet {ALPHABET!r}; add it there or change the task's text",
        *(f"- {tmp_path}/a.jsonl:{i}: 10 prompt tokens, config.task.max_prompt_tokens is 8; raise it "
          "or shorten the prompt" for i in (4, 5, 6)),
        "- and 2 more",
        "Fix or remove them, or leave them out with --config.task.on_bad_example=skip.",
    ]


def test_an_empty_prompt_at_the_last_of_many_places(tmp_path):
    """A start token would make it one of a token; messages have none."""
    source = write(tmp_path / "a.jsonl", ["1"] * 20_005 + [[{"role": "user", "content": ""}]])
    with pytest.raises(ValueError, match=r"1 of 20006 .*\n- .*a.jsonl:20006: the prompt has 0 tokens"):
        prompter().checked(source, "training data")


def test_a_model_without_a_start_token(tmp_path):
    tokenizer_files_test.write_folder(tmp_path / "model", config={"eos_token": "<|im_end|>"})
    p = prompter(load_tokenizer(tmp_path / "model"))
    source = write(tmp_path / "a.jsonl", [f"{i}+1=" if i != 7 else "" for i in range(20)])
    with pytest.raises(ValueError, match=r"1 of 20 .*\n- .*a.jsonl:8: the prompt has 0 tokens"):
        p.checked(source, "training data")


def test_an_example_with_a_token_beyond_the_model_is_bad(tmp_path):
    """Gemma 3 has the token of an image after its vocabulary."""
    own = tokenizer.fitted(tokenizer_test.loaded(tmp_path / "model", "<image>"), len(TOKENS))
    source = write(tmp_path / "a.jsonl", ["1", "2<image>", "3"])
    with pytest.raises(ValueError, match=r"1 of 3 .*\n- .*a.jsonl:2: .*'<image>' of id"):
        prompter(own).checked(source, "training data")
    checked = prompter(own, on_bad_example="skip").checked(source, "training data")
    assert (len(checked), checked.left_out) == (2, 1)


@pytest.mark.parametrize("is_outside", [True, False])
def test_special_tokens_of_an_environments_prompt_are_plain_text_on_request(tmp_path, is_outside):
    """The texts of data keep theirs."""
    own = tokenizer_test.loaded(tmp_path / "model", escapes=True)
    given = {"x": "a<|im_end|>", "y": ValueError("no prompt")}
    opening = (lambda examples, heartbeat: [given[e["id"]] for e in examples]) if is_outside else None
    p = Prompter(own, task(), opening)
    plain = [TOKENS.index(c) for c in "aied"]
    assert p.ids(example(given["x"])).tolist() == (plain if is_outside else [plain[0], 2])
    if is_outside:
        with pytest.raises(ValueError, match="example y: no prompt"):
            p.ids(example("", "y"))


@pytest.mark.all
def test_a_template_that_refuses_an_example_and_one_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "TEMPLATE_SECONDS", 0.5)
    source, loaded = write(tmp_path / "a.jsonl", ["1", "2", "3"]), []
    hang = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    for i, said in enumerate(["{{ raise_exception('no twos') }}", hang]):
        jinja = "{% if messages[0].content in wrong %}" + said + "{% endif %}{{ messages[0].content }}"
        jinja = "{% set wrong = '" + "21"[i] + "' %}" + jinja
        folder = tmp_path / f"model{i}"
        tokenizer_files_test.write_folder(folder, config={"eos_token": "<|im_end|>"}, jinja=jinja)
        loaded.append(load_tokenizer(folder))
    with pytest.raises(ValueError, match=r"1 of 3 .*\n- .*a.jsonl:2: the chat template.*no twos"):
        prompter(loaded[0], chat=True).checked(source, "training data")
    with pytest.raises(ValueError, match="^the chat template .* exceeded its time limit"):
        prompter(loaded[1], chat=True).checked(source, "training data")


def test_messages_need_a_chat_template(tmp_path):
    tokenizer_files_test.write_folder(tmp_path / "model", config={"eos_token": "<|im_end|>"})
    source = write(tmp_path / "a.jsonl", [[{"role": "user", "content": "1"}]])
    with pytest.raises(ValueError, match="no chat template; .*use text prompts"):
        prompter(load_tokenizer(tmp_path / "model")).checked(source, "training data")


def test_bad_rows_and_bad_prompts_are_left_out_counted_and_told(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    write(path, ["1", "123456789", "3"])
    path.write_text(path.read_text() + "nonsense\n" + '{"prompt": "4"}\n')
    source = tasks.make("jsonl", {"path": str(path)})
    checked = prompter(on_bad_example="skip").checked(source, "training data")
    assert [checked[i]["prompt"] for i in range(len(checked))] == ["1", "3", "4"]
    assert checked.left_out == 2
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "training data: 2 of 5 examples are left out:"
    assert [line.split(":")[1] for line in told[1:]] == ["2", "4"]


def test_the_digest_tells_which_examples_are_left_out(tmp_path):
    source = write(tmp_path / "a.jsonl", ["1", "12", "123"])
    of_limit = lambda n: prompter(on_bad_example="skip", max_prompt_tokens=n).checked(source, "d").digest()
    assert of_limit(4) == source.digest() != of_limit(3) != of_limit(2)


def test_nothing_that_is_left_is_an_error_with_skip_too(tmp_path):
    source = write(tmp_path / "a.jsonl", ["123456789"] * 2)
    with pytest.raises(ValueError, match="2 of 2 examples cannot be used"):
        prompter(on_bad_example="skip").checked(source, "training data")


def test_an_example_without_an_answer_is_bad_where_the_reward_compares_with_it(tmp_path):
    source = write(tmp_path / "a.jsonl", ["1"])
    with pytest.raises(ValueError, match="no answer, which the reward 'exact' compares with"):
        prompter().checked(source, "training data", lacks("exact"))
    assert len(prompter().checked(source, "training data", lacks("mine:reward"))) == 1
    assert "reward 'exact' compares" in lacks("mine:reward,exact")({})
    assert lacks("exact")({"answer": ""}) == "" == lacks("exact", "mine:Environment")({})
    assert lacks("exact", harness="mine:agent")({}) == ""


def test_chunks_are_bounded_in_number_and_in_size(monkeypatch):
    monkeypatch.setattr(prompts, "CHUNK", 3)
    monkeypatch.setattr(prompts, "CHUNK_CHARACTERS", 10)
    texts = ["1", "22", "333", "4", "55555", "55555", "6", "x" * 99, "7"]
    found = prompts.chunks_of(texts)
    assert found == [["1", "22", "333"], ["4", "55555"], ["55555", "6"], ["x" * 99], ["7"]]
    assert prompts.chunks_of([[{"role": "user"}]]) == [[[{"role": "user"}]]]


def test_every_process_sees_the_same_data(tmp_path):
    write(tmp_path / "a.jsonl", ["1", "123456789", "2", "3", "4"])
    params, found = {"path": f"{tmp_path}/a.jsonl"}, []
    for shard in range(2):
        check = lambda source: prompter(on_bad_example="skip").checked(source, "training data")
        batches = Batches("jsonl", params, batch_size=4, seed=0, shard_index=shard, shard_count=2,
                          check=check)
        found += [r["prompt"] for r in next(batches)]
    assert sorted(found) == ["1", "2", "3", "4"]


def test_checked_prompts_are_not_rendered_again(tmp_path):
    p = prompter()
    source = write(tmp_path / "a.jsonl", ["1", "2"])
    checked = p.checked(source, "training data")
    object.__setattr__(p, "tokenizer", None)
    assert p.ids(checked[1]).tolist() == CharTokenizer(ALPHABET).encode("2", add_special=True)


# Generated tasks


class Fives(tasks.Generated):
    """Prompts 0, 1, 2, ... of which every fifth from 40 on is bad in one of four ways."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index >= 40 and index % 5 == 0:
            if index % 4 == 0:
                raise ValueError("cannot be made")
            return example(["x", "123456789", "\ud800"][index % 3], f"{index}")
        return example(f"{index}", f"{index}")


def test_a_bad_example_of_a_long_generated_task_is_replaced_where_it_is_drawn():
    source, p = Fives(), prompter()
    checked = p.checked(source, "training data", limit=40)
    assert len(checked) == 100 and checked.left_out == 0 and checked.digest() == source.digest()
    found = [checked[i]["id"] for i in range(100)]
    assert found == [f"{i % 40 if i >= 40 and i % 5 == 0 else i}" for i in range(100)]
    assert checked.left_out == 12
    assert all(len(p.ids(checked[i])) for i in range(100))


def test_a_bad_example_that_is_checked_ends_the_start():
    with pytest.raises(ValueError, match=r"12 of 100 .*\n- generated example 40: cannot be made"):
        prompter().checked(Fives(), "training data")
    with pytest.raises(ValueError, match=r"- generated example 45 \(id '45'\): the tokenizer cannot"):
        prompter().checked(Fives(), "training data")
    checked = prompter(on_bad_example="skip").checked(Fives(), "training data", limit=50)
    assert len(checked) == 100 and [checked[i]["id"] for i in (39, 40, 45)] == ["39", "40", "45"][:1] + [
        f"{[*range(40), 41, 42, 43, 44, 46, 47, 48, 49][i]}" for i in (40, 45)
    ]


class Counting(Chat):
    """Counts the prompts that are encoded; the first of a check is tried by itself."""

    count = 0

    def encodes(self, texts, add_special=False):
        Counting.count += len(texts)
        return super().encodes(texts, add_special)


def test_a_generated_task_of_a_million_is_checked_in_part():
    """The others are rendered once, when they are read."""
    source = tasks.make("arithmetic", {"size": 2**40, "digits": 1})
    p = prompter(Counting(ALPHABET))
    checked = p.checked(source, "training data", limit=30)
    assert checked.count == 30 and checked.is_late
    Counting.count = 0
    assert len(p.ids(checked[1000])) and Counting.count == 1


# The cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(prompts, "CACHED", 3)
    return tmp_path / "cache" / "jaxrl_tis" / "prompts"


def encoded(source, alphabet=ALPHABET, **changes):
    """How many prompts the check of a source encodes, and what comes of it."""
    Counting.count = 0
    p = prompter(Counting(alphabet), on_bad_example="skip", **changes)
    checked = p.checked(source, "training data")
    return Counting.count, [p.ids(checked[i]).tolist() for i in range(len(checked))]


def test_the_ids_are_kept_for_the_next_start(cache, tmp_path):
    source = write(tmp_path / "a.jsonl", ["1", "x", "12345678", "", "34"])
    count, first = encoded(source)
    assert count == 6 and len(first) == 3
    assert encoded(source) == (0, first)
    # What is allowed is no part of it.
    count, more = encoded(source, max_prompt_tokens=9)
    assert count == 0 and len(more) == 4
    moved = write(tmp_path / "b.jsonl", ["1", "x", "12345678", "", "34"], answer="5")
    assert encoded(moved) == (0, first)


@pytest.mark.parametrize("is_once", [True, False])
def test_a_fault_of_the_templates_process_is_tried_again_and_not_kept(cache, tmp_path, monkeypatch, is_once):
    source, faults = write(tmp_path / "a.jsonl", ["1", "2", "3", "4"]), []
    own = prompts.Prompter._encoded

    def encoded_with_a_fault(self, inputs, is_chat):
        found = own(self, inputs, is_chat)
        if "3" in inputs and not (is_once and faults):
            faults.append(None)
            found[inputs.index("3")] = "TimeoutError: the chat template exceeded its time limit"
        return found

    monkeypatch.setattr(prompts.Prompter, "_encoded", encoded_with_a_fault)
    assert len(encoded(source)[1]) == (4 if is_once else 3)
    assert cache.exists() == is_once
    monkeypatch.undo()


@pytest.mark.parametrize("changes", [
    {"alphabet": ALPHABET + "-"}, {"template": " {prompt}"}, {"chat": True},
    {"chat": True, "system": "5", "max_prompt_tokens": 20},
])
def test_whatever_the_ids_depend_on_makes_new_ones(cache, tmp_path, changes):
    source = write(tmp_path / "a.jsonl", ["1", "2", "34"])
    first = encoded(source, chat="system" in changes)
    assert encoded(source, **changes)[0] == 4
    assert encoded(source, chat="system" in changes) == (0, first[1])
    assert encoded(write(tmp_path / "b.jsonl", ["1", "2", "35"]))[0] == 4


@pytest.mark.parametrize("damage", [
    lambda data: data[:100], lambda data: b"", lambda data: b"nonsense",
    lambda data: data.replace(np.int32(4).tobytes(), np.int32(5).tobytes()),
])
def test_a_torn_file_does_no_harm(cache, tmp_path, damage):
    source = write(tmp_path / "a.jsonl", ["1", "2", "34"])
    _, first = encoded(source)
    [path] = cache.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert encoded(source) == (4, first)
    assert encoded(source) == (0, first)
    assert list(cache.iterdir()) == [path]


def test_a_cache_that_cannot_be_written_costs_time_alone(cache, tmp_path):
    cache.parent.mkdir(parents=True)
    cache.write_text("no folder")
    source = write(tmp_path / "a.jsonl", ["1", "2", "34"])
    assert encoded(source) == encoded(source)


def test_the_last_files_are_kept(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "KEPT_FILES", 2)
    for i in range(4):
        encoded(write(tmp_path / "a.jsonl", ["1", "2", f"{i}"]))
    assert len(list(cache.iterdir())) == 2
    assert encoded(write(tmp_path / "a.jsonl", ["1", "2", "3"]))[0] == 0
