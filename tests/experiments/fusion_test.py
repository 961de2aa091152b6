"""The examples of the figure of a teacher."""

from experiments import fusion


def test_half_of_the_prompts_have_digits_one_larger_and_the_policy_starts_from_random_ones():
    files = fusion.examples("short")
    shifted = str.maketrans("0123456789", "1234567890")
    right = lambda x: x["prompt"][:-1] if x["prompt"][-1] == "=" else x["prompt"][:-1].translate(shifted)
    for name in ("train", "eval", "teacher"):
        assert all(x["answer"] == right(x) for x in files[name]), name
    hard = [x for x in files["student"] if x["prompt"][-1] == "+"]
    assert len(hard) == len(files["student"]) // 2 == 2048
    same = [a == b for x in hard for a, b in zip(x["answer"], right(x), strict=True)]
    assert 0.09 < sum(same) / len(same) < 0.11
    prompts = {name: {x["id"][:-1] for x in lines} for name, lines in files.items()}
    assert prompts["train"] == prompts["student"] == prompts["teacher"] and not prompts["train"] & prompts["eval"]
