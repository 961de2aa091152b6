"""Rewards of the tiny run. Standard library only: the scoring process imports this file."""

import time


def closeness(text: str, example: dict) -> float:
    """Differs within nearly every group, so that every step has a gradient; NaN for some texts."""
    if text.endswith(("1", "5")):
        return float("nan")
    equal = sum(a == b for a, b in zip(text, example["answer"], strict=False))
    return float(text == example["answer"]) + equal / 4 + len(text) / 100


def parts(text: str, example: dict) -> dict[str, float]:
    """Two components, both of which differ within most groups."""
    equal = sum(a == b for a, b in zip(text, example["answer"], strict=False))
    return {"closeness": equal / 4, "length": len(text) / 100 + len(set(text)) / 7}


def hangs_or_raises(text: str, example: dict) -> float:
    """Never returns for texts that begin with 1, and fails for those that begin with 2 to 4."""
    if text.startswith("1"):
        time.sleep(1000)
    if text.startswith(("2", "3", "4")):
        raise RuntimeError("no such answer")
    return closeness(text, example)


def always_raises(text: str, example: dict) -> float:
    """Asks for a column that there is not."""
    return example["gold"]
