"""Sampled responses with per-token values: WORKDIR/samples.jsonl, one response per line.

A line is {"step", "phase", "id", "prompt", "response", "answer", "reward", "tokens", "logp_behav",
"logp_old", "weight", "version", "length"}: texts, then a value for each of the first MAX_TOKENS
tokens of the response. `length` counts all tokens. Where tokens have no text, as the end has none,
"names" has the names of these tokens, null for the others. An episode with an environment also has "turn",
the turn of each of these tokens, "outcome", "turn_rewards", null where a turn has none, and
"joins", see `engine.records.Trajectory`. A session with forks has "fork", the number of its row, and
"forks", the number, prompt, response and length of each other row.

Null values: the values of a token that an environment gave; `answer` if the data has none; `reward`
if the reward function failed; `logp_old` and `weight` if the response is not trained on; `weight`
also if weights exist only inside the update.
An evaluation (phase "eval", greedy responses) has a single log-prob, of the model at temperature 1,
in `logp_old`; its `logp_behav`, `weight` and `version` are null.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_tis.record.metrics import LineFile, open_objects, read_objects

FILE_NAME = "samples.jsonl"
MAX_TOKENS = 512
DIGITS = 6  # after the point
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what bytes decode to that are part of a character

Decode = Callable[[Sequence[int]], str]
Name = Callable[[int], str | None]  # token id -> its name in the tokenizer


def of_step(
    step: int, samples: Sequence[Any], rows: Mapping[str, np.ndarray],
    weights: np.ndarray | None, decode: Decode, count: int, name: Name = lambda token: None,
) -> list[dict[str, Any]]:
    """Returns the lines of a training step: the first response of each of the first `count` groups.

    Args:
      samples: of the batch, as `rollouts.groups.Sample`.
      rows: of the batch, [N,T], in the order of the samples: mask, logp_behav, logp_old, version.
      weights: [N,T] or None.
    """
    groups = [s.group for s in samples]
    lines = []
    for i in [groups.index(g) for g in dict.fromkeys(groups)][:count]:
        sample, is_trained_on = samples[i], rows["mask"][i].any()
        start = len(sample.trajectory.prompt)
        response = slice(start, start + len(sample.trajectory.tokens))
        of_tokens = {name: rows[name][i][response] for name in ("logp_behav", "version")}
        if is_trained_on:
            of_tokens["logp_old"] = rows["logp_old"][i][response]
            of_tokens["weight"] = None if weights is None else weights[i][response]
        lines.append(_line(step, "train", sample, sample.reward, of_tokens, decode, name))
    return lines


def of_evaluation(
    step: int, samples: Sequence[Any], decode: Decode, count: int, name: Name = lambda token: None,
) -> list[dict[str, Any]]:
    """Returns the lines of an evaluation: its first `count` responses. Engines of others say no
    log-prob without filters."""
    known = lambda raw: {} if np.isnan(raw).any() else {"logp_old": raw}
    return [
        _line(
            step, "eval", sample, sample.score, known(sample.trajectory.logp_raw), decode, name
        )
        for sample in samples[:count]
    ]


def _line(step, phase, sample, reward, of_tokens, decode, name) -> dict[str, Any]:
    trajectory = sample.trajectory
    ids, mask = trajectory.tokens.tolist(), trajectory.mask[:MAX_TOKENS].tolist()
    names = "logp_behav", "logp_old", "weight", "version"
    control = [None if decode([token]) else name(token) for token in ids[:MAX_TOKENS]]
    columns = {n: of_tokens.get(n) for n in names}
    return {
        "step": step, "phase": phase, "id": sample.example["id"],
        "prompt": decode(sample.trajectory.prompt.tolist()), "response": sample.text,
        "answer": sample.example.get("answer"),
        "reward": None if math.isnan(reward) else round(float(reward), DIGITS),
        "length": len(ids), "tokens": pieces(ids[:MAX_TOKENS], decode),
        **{n: None if x is None else _numbers(x[:MAX_TOKENS], mask) for n, x in columns.items()},
        **({"names": control} if any(control) else {}),
        **(_of_episode(trajectory) if trajectory.outcome else {}),
        **(_of_forks(trajectory, decode) if trajectory.forks else {}),
    }


def _of_episode(trajectory) -> dict[str, Any]:
    rewards = trajectory.turn_rewards
    return {
        "turn": trajectory.turn[:MAX_TOKENS].tolist(), "outcome": trajectory.outcome,
        "turn_rewards": _numbers(rewards, ~np.isnan(rewards)), "joins": list(trajectory.joins),
    }


def _of_forks(trajectory, decode) -> dict[str, Any]:
    forks = [
        {"fork": row.fork, "prompt": decode(row.prompt.tolist()),
         "response": decode(row.tokens.tolist()), "length": len(row.tokens)}
        for row in trajectory.forks
    ]
    return {"fork": trajectory.fork, "forks": forks}


def pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """Returns the text that each token adds; joined, they are the whole text. An incomplete
    character belongs to the token that completes it."""
    texts, shown = [], ""
    for count, token in enumerate(ids, start=1):
        text = decode(ids[:count])
        if text.endswith(INCOMPLETE) and count < len(ids):
            text = shown
        texts.append(text[len(shown):] if text.startswith(shown) else decode([token]))
        shown = text
    return texts


def _numbers(values: np.ndarray, mask: Sequence[bool]) -> list[float | int | None]:
    """Returns the values where the mask is True, None elsewhere."""
    pairs = zip(values.tolist(), mask, strict=True)
    return [round(x, DIGITS) if is_there else None for x, is_there in pairs]


def open_file(workdir: str | os.PathLike, resume_step: int | None) -> LineFile:
    """Opens the file, see `metrics.open_objects`."""
    return open_objects(workdir, FILE_NAME, resume_step)


def read(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """Returns the lines of a run, see `metrics.read_objects`."""
    return read_objects(workdir, FILE_NAME)
