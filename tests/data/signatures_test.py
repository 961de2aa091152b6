"""Reward functions with the signatures that people have, called in this process.

What verl and TRL pass is what their own managers and trainers pass: the keywords of verl's
`NaiveRewardManager` and `BatchRewardManager`, and those of TRL's `GRPOTrainer._calculate_rewards`.
"""

import asyncio
import functools
import json
import sys
import types

import pytest

from jaxrl_tis.data import signatures

EXAMPLE = {
    "prompt": "2+3=", "answer": "5", "id": "a", "data_source": "sums", "level": 2,
    "reward_model": {"style": "rule", "ground_truth": "5"}, "extra_info": {"index": 7},
}
CHAT = [{"role": "user", "content": "2+3="}]


def test_ours(score):
    assert score(lambda text, example: float(text == example["answer"]), ["5", "6"]) == [1.0, 0.0]
    assert score(lambda t, r, scale=3: scale * len(t), ["ab"]) == [6.0]
    assert score(lambda texts, examples: [len(t) + e["level"] for t, e in zip(texts, examples, strict=True)],
                 ["a", "ab"]) == [3.0, 4.0]


def test_verl_is_called_by_its_four_names(score):
    seen = {}

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        seen.update(kwargs, source=data_source, text=solution_str, truth=ground_truth, extra=extra_info)
        return {"score": float(solution_str == ground_truth), "acc": True}

    assert score(compute_score, ["5"]) == [{"score": 1.0, "acc": 1.0}]
    assert seen == {
        "source": "sums", "text": "5", "truth": "5",
        "extra": {"index": 7, "num_turns": None, "rollout_reward_scores": {}},
    }
    # An example of another layout: its answer is the ground truth.
    plain = {"prompt": "", "answer": "9", "id": "b"}
    assert score(lambda solution_str, ground_truth: int(ground_truth), ["5"], plain) == [9.0]
    nothing = {"prompt": "", "id": "b", "reward_model": {"ground_truth": None}}
    assert score(lambda solution_str, ground_truth: ground_truth is None, [""], nothing) == [1.0]


def test_verl_in_batches(score):
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
        rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
        return [len(d) + len(s) + int(g) + e["index"] for d, s, g, e in rows]

    assert score(compute_score, ["a", "ab"]) == [4 + 1 + 5 + 7, 4 + 2 + 5 + 7]


def test_trl_gets_columns_and_messages_where_the_prompt_has_them(score):
    seen = []

    def reward(prompts, completions, completion_ids, level, **kwargs):
        seen.append((prompts, completions, completion_ids, level, sorted(kwargs)))
        return [None if c == "none" else float(len(c)) for c in completions]

    assert score(reward, ["abc", "none"], tokens=[[1, 2], [3]]) == [3.0, None]
    columns = ["answer", "data_source", "extra_info", "id", "log_extra", "log_metric", "reward_model"]
    assert seen == [(["2+3="] * 2, ["abc", "none"], [[1, 2], [3]], [2, 2], columns)]

    def content(completions, **kwargs):
        kwargs["log_metric"]("length", 1.0)
        return [len(completion[0]["content"]) for completion in completions]

    assert score(content, ["abc"], EXAMPLE | {"prompt": CHAT}) == [3.0]


def test_trl_without_a_column_that_it_takes(score):
    [failed] = score(lambda completions, solution, **_: [0.0], ["a"], raw=True)
    assert failed["error"].startswith(
        "TypeError: the reward needs the parameters solution, and the available ones are answer, "
    )


@pytest.mark.parametrize("signature", ["example", "examples", "verl", "verl_batch", "trl"])
def test_a_function_may_be_async(score, signature):
    async def example(text, example):
        await asyncio.sleep(0)
        return len(text)

    async def texts(texts, examples):
        return await asyncio.gather(*(example(text, {}) for text in texts))

    async def verl(data_source, solution_str, ground_truth, extra_info):
        return await example(solution_str, {})

    async def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
        return await texts(solution_strs, [])

    async def trl(prompts, completions, **columns):
        return await texts(completions, [])

    function = {"example": example, "examples": texts, "verl": verl, "verl_batch": verl_batch,
                "trl": trl}[signature]
    assert score(function, ["a", "abc"]) == [1.0, 3.0]
    assert score(function, ["a", "abc"], signature=signature) == [1.0, 3.0]


def test_calls_of_an_async_function_run_at_once_and_each_has_its_time(score):
    running, at_once = set(), []

    async def judge(text, example):
        if text == "raises":
            raise LookupError("no judge")
        call = object()
        running.add(call)
        at_once.append(len(running))
        try:
            await asyncio.sleep(60 if text == "hangs" else 0.1)
        finally:
            running.remove(call)
        return 1.0

    texts = ["ok", "hangs", "raises", *["ok"] * 13]
    found = score(judge, texts, workers=8, timeout=2.0, raw=True)
    assert 1 < max(at_once) <= 8
    assert [o.get("fault", "") for o in found] == [
        "", "timeouts", "errors", *[""] * 13]
    assert found[1]["error"] == "TimeoutError: no result within 2 s"


def test_the_first_text_of_a_kind_has_the_traceback_in_whatever_order_they_failed(score):
    async def judge(text, example):
        await asyncio.sleep(float(text))
        raise LookupError(text)

    found = score(judge, ["0.2", "0.1", "0"], workers=3, raw=True)
    assert [o["error"] for o in found] == [f"LookupError: {t}" for t in ("0.2", "0.1", "0")]
    assert [bool(o["traceback"]) for o in found] == [True, False, False]


def test_an_async_function_fails_for_its_own_text(score):
    async def verl(solution_str, ground_truth, **_):
        return 1 / len(solution_str)

    found = score(verl, ["ab", ""], raw=True)
    assert found[0] == {"value": {"parts": {"reward": 0.5}}}
    assert found[1]["error"] == "ZeroDivisionError: division by zero"


def test_a_function_may_run_a_loop_of_its_own(score):
    async def one(text):
        return len(text)

    assert score(lambda text, example: asyncio.run(one(text)), ["ab"]) == [2.0]


def test_a_function_changes_its_own_copy_of_an_example(score, module):
    def spoil(texts, examples):
        for example in examples:
            example["answer"] = "spoilt"
            example["visits"] = example.get("visits", 0) + 1
        if "raises" in texts:
            raise ValueError
        return [float(example["visits"]) for example in examples]

    module.spoil = spoil
    module.right = lambda text, example: float(text == example["answer"])
    assert score("given:spoil,given:right", ["5"]) == [{"spoil": 1.0, "right": 1.0}]
    assert score("given:spoil", ["5", "raises"], raw=True)[0] == {"value": {"parts": {"reward": 1.0}}}


def test_a_timeout_of_the_function_itself_is_an_error(score):
    async def judge(text, example):
        raise TimeoutError("judge: connection refused")

    [found] = score(judge, ["5"], raw=True, timeout=60.0)
    assert (found["fault"], found["error"]) == ("errors", "TimeoutError: judge: connection refused")


def test_other_callables(score):
    class Judge:
        def __call__(self, text, example):
            return len(text)

    class AsyncJudge:
        async def __call__(self, text, example):
            return len(text)

    assert score(Judge, ["ab"]) == score(Judge(), ["ab"]) == score(AsyncJudge(), ["ab"]) == [2.0]
    scaled = functools.partial(lambda scale, text, example: scale * len(text), 3)
    assert score(scaled, ["ab"]) == [6.0]
    verl = functools.partial(lambda data_source, solution_str, ground_truth, extra_info, k: k, k=4)
    assert score(verl, ["ab"]) == [4.0]


@pytest.mark.parametrize("function", [
    lambda text: 0.0, lambda: 0.0, lambda text, answer: 0.0, lambda a, b, c: 0.0,
    lambda *args, **kwargs: 0.0, lambda **kwargs: 0.0, lambda *, text, example: 0.0,
    lambda data_source, solution_str, ground_truth, tokenizer: 0.0,
    lambda completions, /: [0.0],
])
def test_a_signature_that_nobody_calls_is_refused(score, function):
    with pytest.raises(ValueError, match=r"takes \(.*fits no reward signature: score\(text, example\), "):
        score(function, ["a"])


def test_a_signature_that_is_named(score):
    assert score(lambda **kwargs: len(kwargs), ["a"], signature="verl") == [4.0]
    assert score(lambda *rows: [float(len(rows))], ["a"], signature="examples") == [2.0]
    with pytest.raises(ValueError, match="takes"):
        score(lambda text, example: 0.0, ["a"], signature="verl")


def test_several_functions_are_the_parts_of_one_reward(score, module):
    module.right = lambda text, example: float(text == example["answer"])
    module.short = lambda completions, **_: [None if c == "none" else -len(c) for c in completions]
    found = score("given:right, given:short", ["5", "none"])
    assert found == [{"right": 1.0, "short": -1.0}, {"right": 0.0, "short": None}]
    assert score("exact,given:right", ["5"]) == [{"exact": 1.0, "right": 1.0}]
    module.score = lambda text, example: 0.5  # no component stands for the others
    assert score("given:score,given:right", ["5"]) == [{"given_score": 0.5, "right": 1.0}]
    assert score("given:score", ["5"]) == [0.5]
    module.parts = lambda text, example: {"score": 1.0}
    [found] = score("exact,given:parts", ["5"], raw=True)
    assert found == {"value": {"bad": "a dict from parts, one of several functions"}}
    module.judged = lambda text, example: "unsure" if text == "?" else 1.0
    module.scored = lambda text, example: {"score": "unsure", "length": 1}
    unsure = {"value": {"unsure": True}}
    assert score("exact,given:judged", ["?"], raw=True) == score("given:scored", ["5"], raw=True) == [unsure]


def test_a_text_that_breaks_a_batch_fails_alone(score):
    def reward(completions, **_):
        return [1 / len(c) for c in completions]

    found = score(reward, ["a", "", "ab"], raw=True)
    assert [o["fault"] if "fault" in o else o["value"] for o in found] == [
        {"parts": {"reward": 1.0}}, "errors", {"parts": {"reward": 0.5}}]
    [one, two] = score(lambda completions, **_: [1.0] * 3, ["a", "b"], raw=True)
    assert one["error"] == "WrongCount: the reward returned 3 values for 2 texts; return one value per text"
    assert one["traceback"] and not two["traceback"]  # the first of a kind
    assert two["error"] == one["error"]  # none is called alone, where the count would be right


def test_the_traceback_of_a_function_of_several_texts_is_its_own(score):
    def reward(completions, **_):
        return [c["x"] for c in completions]

    one, two = score(reward, ["a", "b"], raw=True)
    assert "signatures.py" not in one["traceback"] and "During handling" not in one["traceback"]
    assert one["kind"] == two["kind"]


@pytest.mark.parametrize("name", ["correct_answer", "reference_answer", "gt", "golden", "expected_output"])
def test_a_function_of_the_answer_itself_is_refused(name):
    with pytest.raises(ValueError, match=f"takes \\(text, {name}\\)"):
        signatures.called(eval(f"lambda text, {name}: 0.0"), "given")


def test_an_answer_that_is_a_number_is_one_in_the_columns(score):
    right = lambda completions, answer, **columns: [
        float(c == str(a + 1)) for c, a in zip(completions, answer, strict=True)]
    example = {"prompt": "2+3=", "answer": "5", "id": "1", "as_read": {"answer": 5}}
    assert score(right, ["6"], example) == [1.0]
    seen = lambda completions, **columns: [float("as_read" not in columns)]
    assert score(seen, ["6"], example) == [1.0]


def test_what_no_file_can_hold_is_spelled_out(score):
    def reward(text, example):
        raise ValueError("bad \ud800")

    [failed] = score(reward, ["a"], raw=True)
    assert failed["error"] == "ValueError: bad \\ud800" and "\\ud800" in failed["traceback"]
    assert score(lambda text, example: {"a\ud800": 1}, ["a"]) == [{"a\\ud800": 1.0}]
    [large] = score(lambda text, example: 10**400, ["a"], raw=True)
    assert large == {"value": {"bad": "a number that is too large"}}


def test_a_failure_says_where(score):
    def helper(example):
        return example["missing"]

    [failed] = score(lambda text, example: helper(example), ["a"], raw=True)
    line = helper.__code__.co_firstlineno + 1
    assert failed["kind"] == f"KeyError at {__file__}:{line}"
    assert failed["error"] == "KeyError: 'missing'"
    assert 'return example["missing"]' in failed["traceback"]
    assert "signatures.py" not in failed["traceback"]


class Number:
    def __float__(self):
        return 2.0


@pytest.mark.parametrize("value, expected", [
    (0.5, {"reward": 0.5}), (True, {"reward": 1.0}), (Number(), {"reward": 2.0}),
    ({"score": 0.5, "acc": True, "pred": "7"}, {"score": 0.5, "acc": 1.0}),
    ({"a": None, "b": 1, "c": [1], "d": b"1"}, {"a": None, "b": 1.0}),
])
def test_what_is_a_number(value, expected):
    assert signatures.reading(value) == {"parts": expected}


@pytest.mark.parametrize("value, bad", [
    (None, "None"), ("1.0", "a str"), ([1.0], "a list"), ((1.0, "x"), "a tuple"),
    ({"score": "1.0", "acc": 1}, "a str as the score"),
    ({}, "a mapping without any number"), ({"pred": "7"}, "a mapping without any number"),
])
def test_what_is_none(value, bad):
    assert signatures.reading(value) == {"bad": bad}


@pytest.fixture
def module(monkeypatch):
    given = types.ModuleType("given")
    monkeypatch.setitem(sys.modules, "given", given)
    return given


@pytest.fixture
def score(module):
    """Scores texts by a function, or by the name of one: a number, or the parts, of each."""

    def score(function, texts, example=EXAMPLE, signature="auto", tokens=None, workers=1, timeout=5.0,
              raw=False):
        if not isinstance(function, str):
            module.function = function
        name = function if isinstance(function, str) else "given:function"
        call = signatures.make({"name": name, "signature": signature, "timeout": timeout,
                                "workers": workers})
        items = [[text, json.loads(json.dumps(example)), tokens and tokens[i]]
                 for i, text in enumerate(texts)]
        if call.traits["batched"] or call.traits["async"]:
            found = call(items)
        else:
            found = [outcome for item in items for outcome in call([item])]
        if raw:
            return found
        parts = [o["value"].get("parts", {"reward": None}) for o in found]
        return [p["reward"] if list(p) == ["reward"] else p for p in parts]

    return score
