"""Trajectories and entries of the queue in a checkpoint: bit by bit, and damage is refused."""

import base64
import dataclasses
import json
import math

import hypothesis
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_tis.engine.records import OUTCOMES, Trajectory
from jaxrl_tis.rollouts import serialize
from jaxrl_tis.rollouts.groups import Sample
from jaxrl_tis.rollouts.queue import Entry

EXAMPLE = {"id": "7", "prompt": "1+1=", "answer": "2"}


def trajectory(tokens):
    n, zeros = len(tokens), np.zeros(len(tokens), np.float32)
    return Trajectory(
        "7/0", np.array([1, 2], np.int32), np.array(tokens, np.int32), zeros, zeros, zeros,
        np.arange(n, dtype=np.int32), "stop", 0, 5, "none", 1.0,
    )


def test_an_entry_comes_back_with_what_was_rewarded_and_claimed():
    entry, drawn = Entry(3, math.inf, EXAMPLE), trajectory([4, 5])
    parts = {"exact": 0.5, "length": 0.25}
    sample = Sample(drawn, EXAMPLE, "ab", 0.75, 0.5, group=0, components=parts)
    entry.columns = {2: {"tokens": trajectory([6])}, 0: {"tokens": drawn, "reward": sample}}
    entry.claimed = {("reward", 0), ("reward", 2)}
    back = serialize.read(json.loads(json.dumps(serialize.written(entry))))
    assert (back.number, back.deadline, back.prompt) == (3, math.inf, EXAMPLE)
    assert list(back.columns) == [0, 2] and list(back.columns[2]) == ["tokens"]
    # A reward that was under way is computed again.
    assert back.claimed == {("reward", 0)}
    again = back.columns[0]["reward"]
    assert (again.text, again.score, again.reward, again.components) == ("ab", 0.75, 0.5, parts)
    assert again.example == EXAMPLE and again.trajectory is back.columns[0]["tokens"]
    np.testing.assert_array_equal(again.trajectory.tokens, [4, 5])
    np.testing.assert_array_equal(again.trajectory.version, [0, 1])


def test_a_reward_that_failed_is_still_unknown_afterwards():
    entry, drawn = Entry(3, math.inf, EXAMPLE), trajectory([4, 5])
    sample = Sample(
        drawn, EXAMPLE, "ab", math.nan, math.nan, group=0, components={"a": math.nan}, is_failed=True
    )
    entry.columns = {0: {"tokens": drawn, "reward": sample}}
    again = serialize.read(json.loads(json.dumps(serialize.written(entry)))).columns[0]["reward"]
    assert all(map(math.isnan, (again.score, again.reward, again.components["a"])))
    assert again.is_failed


def test_forks_come_back():
    forks = tuple(dataclasses.replace(trajectory([6, n]), fork=n) for n in (0, 2))
    saved = dataclasses.replace(trajectory([4, 5]), fork=1, forks=forks)
    back = serialize.read_trajectory(serialize.trajectory_text(saved))
    assert [(t.fork, t.tokens.tolist(), t.forks) for t in back.forks] == [
        (0, [6, 0], ()), (2, [6, 2], ()),
    ]
    assert (back.fork, back.tokens.tolist()) == (1, [4, 5])


def test_a_deadline_is_a_number():
    assert serialize.read(serialize.written(Entry(1, 4.0))).deadline == 4.0


# Trajectories

settings = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def routes(draw, tokens):
    dtype, layers, chosen = draw(st.tuples(
        st.sampled_from(("uint8", "uint16")), st.integers(0, 2), st.integers(0, 2)
    ))
    rows = draw(st.sampled_from((0, max(0, tokens - 1), tokens)))
    return dict(
        routes=draw(hnp.arrays(dtype, (rows, layers, chosen))),
        rerouted=draw(hnp.arrays(np.int32, 2 if layers else 0)),
    )


@st.composite
def trajectories(draw):
    """Records of any bits: NaNs of every payload, infinities, -0.0; no tokens, and no width."""
    prompt, n = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    bits = lambda dtype, *shape: draw(hnp.arrays(np.uint32, shape)).view(dtype).reshape(shape)
    rows = lambda: draw(st.sampled_from((0, n)))
    width = lambda: draw(st.integers(0, 3))
    mask, turn = draw(hnp.arrays(bool, n)), bits("int32", n)
    sampled = int(max(np.flatnonzero(mask), default=-1)) + 1
    rewards = bits("float32", draw(st.integers(0, min(3, int(turn.max(initial=-1)) + 1))))
    numbers = st.dictionaries(st.text(max_size=3), st.floats(), max_size=2)
    return Trajectory(
        id=draw(st.text(max_size=5)), stop_reason=draw(st.text(max_size=5)),
        seed=draw(st.integers()), request=draw(st.integers()), quant_id=draw(st.text(max_size=5)),
        temperature=draw(st.floats() | st.integers()), prompt=bits("int32", prompt),
        tokens=bits("int32", n), logp_behav=bits("float32", n), logp_raw=bits("float32", n),
        entropy=bits("float32", n), version=bits("int32", n), mask=mask,
        turn=turn, kv_version=bits("int32", rows()), segment=bits("int32", rows()),
        logits=bits("float32", rows(), width()),
        drafter_version=bits("int32", rows()), accepted=draw(hnp.arrays(bool, rows())),
        evict_step=bits("int32", *draw(st.sampled_from(((0,), (prompt + n,), (prompt + n, 2))))),
        top_ids=bits("int32", rows(), width()), top_logps=bits("float32", rows(), width()),
        kept=bits("int32", rows(), width()),
        prompt_logps=bits("float32", draw(st.sampled_from((0, prompt)))),
        outcome=draw(st.sampled_from(OUTCOMES)), metrics=draw(numbers),
        turn_rewards=np.where(np.isinf(rewards), np.float32(0), rewards),
        **draw(routes(prompt + sampled)),
    )


def is_same(a, b) -> bool:
    """Bit by bit, NaNs included."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_same(a[name], b[name]) for name in a)
    return type(a) is type(b) and (a == b and str(a) == str(b) or a != a and b != b)


@pytest.mark.all
@settings
@hypothesis.given(trajectories())
def test_a_trajectory_survives_bit_by_bit(t):
    read = serialize.read_trajectory(serialize.trajectory_text(t))
    assert vars(read).keys() == vars(t).keys()
    assert [name for name in vars(t) if not is_same(vars(t)[name], vars(read)[name])] == []
    assert read.tokens.flags.writeable


def test_columns_and_slices_are_written_as_they_read():
    t = dataclasses.replace(
        trajectory([4, 5, 6, 7]), kept=np.arange(12, dtype=np.int32).reshape(3, 4).T,
        tokens=np.arange(8, dtype=np.int32)[::-2],
    )
    read = serialize.read_trajectory(serialize.trajectory_text(t))
    np.testing.assert_array_equal(read.kept, [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]])
    np.testing.assert_array_equal(read.tokens, [7, 5, 3, 1])


def test_every_truncated_text_is_refused():
    text = serialize.trajectory_text(trajectory([4]))
    for end in range(len(text)):
        with pytest.raises(ValueError, match="^cannot read trajectory "):
            serialize.read_trajectory(text[:end])


@settings
@hypothesis.given(st.data())
def test_a_changed_character_gives_a_record_or_a_refusal(data):
    """The sha256 of the checkpoint finds all of them; without it nothing else is raised."""
    text = list(serialize.trajectory_text(trajectory([4, 5])))
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.characters())
    try:
        assert isinstance(serialize.read_trajectory("".join(text)), Trajectory)
    except ValueError as error:
        assert str(error).startswith("cannot read trajectory ")


@settings
@hypothesis.given(st.data())
def test_a_changed_byte_of_the_arrays_gives_a_record_or_a_refusal(data):
    saved = json.loads(serialize.trajectory_text(trajectory([4, 5])))
    packed = bytearray(base64.b64decode(saved["arrays"]))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    saved["arrays"] = base64.b64encode(packed).decode()
    try:
        assert isinstance(serialize.read_trajectory(json.dumps(saved)), Trajectory)
    except ValueError as error:
        assert str(error).startswith("cannot read trajectory 7/0: ")


@settings
@hypothesis.given(st.text(max_size=20) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["scalars", "arrays", "id"]), inner, max_size=3),
).map(json.dumps))
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="^cannot read trajectory "):
        serialize.read_trajectory(text)


def text_of(arrays=None, left_out=(), **scalars) -> str:
    """The text of a trajectory with some of its values replaced or left out."""
    saved = json.loads(serialize.trajectory_text(trajectory([4, 5])))
    found = safetensors.numpy.load(base64.b64decode(saved["arrays"])) | (arrays or {})
    keep = lambda values: {name: x for name, x in values.items() if name not in left_out}
    packed = base64.b64encode(safetensors.numpy.save(keep(found))).decode()
    return json.dumps({"scalars": keep(saved["scalars"]) | scalars, "arrays": packed})


@pytest.mark.parametrize("text, why", [
    # A text of a version before, which was no JSON.
    ("amF4cmx0aXMBAAAAhAMA", "whose text begins with 'amF4cmx0aXMBAAAAhAMA': JSONDecodeError"),
    ("[" * 100_000, r"whose text begins with '\[{40}': RecursionError"),
    ('{"scalars": {"id": "7/0"}, "arrays": "A"}', "7/0: Error: "),
    (text_of().replace('"arrays": "', '"arrays": "*'), "7/0: Error: "),
    ('{"scalars": {"id": "7/0"}, "arrays": ""}', "7/0: SafetensorError: "),
    ('{"scalars": {"id": "7/0"}}', "7/0: KeyError: 'arrays'"),
    (text_of(left_out=["kept", "seed"]), "7/0: ValueError: it has no seed, kept"),
    (text_of(left_out=["mask"]), "7/0: ValueError: it has no mask"),
    (text_of(left_out=["tokens"], tokens=[4, 5]), "7/0: tokens is list, not ndarray"),
    (text_of(more=1), "7/0: TypeError: .*'more'"),
    (text_of({"seed": np.zeros(1, np.int32)}), "7/0: seed is ndarray, not int"),
    (text_of(id=7), "7: id is int, not str"),
    (text_of({"logp_raw": np.zeros(2)}), "7/0: logp_raw is float64 of 1 dimensions, not float32"),
    (text_of({"logp_raw": np.zeros(3, np.float32)}), "7/0: logp_raw has 3 entries and needs 2"),
])
def test_a_damaged_text_is_refused_with_its_trajectory_and_the_reason(text, why):
    with pytest.raises(ValueError, match=f"^cannot read trajectory {why}") as caught:
        serialize.read_trajectory(text)
    [line] = str(caught.value).splitlines()
    assert line.endswith(
        "The checkpoint is damaged, or another version of jaxrl_tis wrote it: use that version, or "
        "a new workdir"
    )
