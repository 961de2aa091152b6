import json
import time

import pytest

from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.data.examples import FileExamples
from jaxrl_tis.data.tasks import TASKS
from jaxrl_tis.runtime import processes

pytestmark = pytest.mark.by_jax("grain")


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "a.jsonl", 10)


def write(path, length, first="0"):
    rows = [{"prompt": first, "answer": "0", "id": "0"}]
    rows += [{"prompt": str(i), "answer": str(i), "id": str(i)} for i in range(1, length)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:length]))
    return str(path)


def ids(batches, count):
    return [[example["id"] for example in next(batches)] for _ in range(count)]


def flat(batches, count):
    return [name for batch in ids(batches, count) for name in batch]


def test_each_epoch_is_another_permutation(path):
    order = flat(Batches("jsonl", {"path": path}, batch_size=4, seed=0), 10)
    epochs = [order[start : start + 10] for start in range(0, 40, 10)]  # 4 * 10 = 4 epochs
    assert all(sorted(epoch) == [str(i) for i in range(10)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_seed_decides_the_order(path):
    first, again, other = (
        flat(Batches("jsonl", {"path": path}, batch_size=5, seed=seed), 4) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_state_restored_at_every_position_across_epochs(path):
    whole = ids(Batches("jsonl", {"path": path}, batch_size=4, seed=3), 12)
    running = Batches("jsonl", {"path": path}, batch_size=4, seed=3)
    for position in range(9):  # 10 examples: the epochs end inside batch 2, and after batch 4.
        state = json.loads(json.dumps(running.get_state()))
        restored = Batches("jsonl", {"path": path}, batch_size=4, seed=3)
        next(restored)
        restored.set_state(state)
        assert ids(restored, 3) == whole[position : position + 3]
        assert ids(running, 1) == whole[position : position + 1]


class Late:
    """Examples that are made when they are read, each listed in `read`."""

    is_late, bad = True, ()

    def __init__(self, source):
        self._source, self.read = source, []

    def __len__(self):
        return len(self._source)

    def __getitem__(self, index):
        self.read.append(index)
        return self._source[index]

    def digest(self):
        return self._source.digest()


def test_late_examples_are_read_ahead_and_a_state_counts_none_that_was_not_given(path):
    make = lambda **more: Batches("jsonl", {"path": path}, batch_size=4, seed=3, **more)
    whole, ahead = ids(make(), 12), make(check=Late)
    for position in range(4):
        state = json.loads(json.dumps(ahead.get_state()))
        assert ids(ahead, 1) == whole[position : position + 1]
        end = time.monotonic() + 20
        while len(ahead.source.read) < 4 * (position + 2):  # the batch after this one
            assert time.monotonic() < end
            time.sleep(0.01)
        restored = make(check=Late)
        restored.set_state(state)
        assert ids(restored, 3) == whole[position : position + 3]


@pytest.mark.parametrize("shard_count", [2, 4])
def test_shards_make_up_the_same_batches_for_any_number_of_hosts(path, shard_count):
    whole = ids(Batches("jsonl", {"path": path}, batch_size=4, seed=5), 10)
    shards = [
        Batches("jsonl", {"path": path}, batch_size=4, seed=5, shard_index=s,
                shard_count=shard_count)
        for s in range(shard_count)
    ]
    together = [sum((ids(shard, 1)[0] for shard in shards), []) for _ in range(10)]
    assert together == whole
    epoch = [name for batch in together for name in batch][:10]
    assert sorted(epoch) == [str(i) for i in range(10)]
    assert len(ids(shards[0], 1)[0]) == 4 // shard_count


def test_a_position_carries_over_to_another_number_of_hosts(path):
    one = Batches("jsonl", {"path": path}, batch_size=4, seed=5)
    ids(one, 3)
    two = Batches("jsonl", {"path": path}, batch_size=4, seed=5, shard_index=1, shard_count=2)
    two.set_state(one.get_state())
    assert ids(two, 1)[0] == ids(one, 1)[0][2:]


@pytest.mark.parametrize(
    ("changes", "differs"), [({"seed": 1}, "seed"), ({"batch_size": 5}, "batch_size")]
)
def test_another_order_is_refused(path, changes, differs):
    saved = Batches("jsonl", {"path": path}, batch_size=4, seed=0).get_state()
    kwargs = {"batch_size": 4, "seed": 0} | changes
    mine = Batches("jsonl", {"path": path}, **kwargs)
    refusal = rf"differ from those of the checkpoint \({differs} differ\)"
    with pytest.raises(ValueError, match=refusal) as caught:
        mine.set_state(saved)
    assert json.dumps(saved["fingerprint"]) in str(caught.value)
    assert json.dumps(mine.fingerprint) in str(caught.value)


def test_other_data_is_refused(path, tmp_path):
    saved = Batches("jsonl", {"path": path}, batch_size=4, seed=0).get_state()
    write(tmp_path / "a.jsonl", 11)
    with pytest.raises(ValueError, match=r"\(examples, length differ\)"):
        Batches("jsonl", {"path": path}, batch_size=4, seed=0).set_state(saved)
    write(tmp_path / "a.jsonl", 10, first="changed")
    with pytest.raises(ValueError, match=r"\(examples differ\)"):
        Batches("jsonl", {"path": path}, batch_size=4, seed=0).set_state(saved)
    arithmetic = Batches("arithmetic", {"size": 10}, batch_size=4, seed=0)
    with pytest.raises(ValueError, match=r"\(examples, params, task differ\)"):
        arithmetic.set_state(saved)
    write(tmp_path / "a.jsonl", 10)
    Batches("jsonl", {"path": path}, batch_size=4, seed=0).set_state(saved)


@pytest.mark.parametrize("batch_size, index", [(4, 3), (6, 2), (5, 3), (12, 1), (13, 1)])
def test_a_position_in_other_data_is_the_number_of_examples_read(path, tmp_path, batch_size, index):
    """After 3 batches of 4; a batch that is begun is not read again."""
    old = Batches("jsonl", {"path": path}, batch_size=4, seed=0)
    ids(old, 3)
    write(tmp_path / "a.jsonl", 20)
    new, other = (
        Batches("jsonl", {"path": path}, batch_size=batch_size, seed=0) for _ in range(2)
    )
    assert set(new.differing(old.get_state())) == {"length", "examples"} | (
        {"batch_size"} if batch_size != 4 else set())
    new.set_state(new.moved(old.get_state()))
    assert ids(new, 2) == ids(other, index + 2)[index:]


def test_the_order_of_parameters_does_not_matter():
    a = Batches("arithmetic", {"size": 10, "digits": 1}, batch_size=2, seed=0)
    b = Batches("arithmetic", {"digits": 1, "size": 10}, batch_size=2, seed=0)
    b.set_state(a.get_state())
    assert next(a) == next(b)


def test_setup_errors(path, monkeypatch):
    with pytest.raises(ValueError, match="unknown task 'chess'; the tasks are arithmetic, gsm8k"):
        Batches("chess", {}, batch_size=1, seed=0)
    with pytest.raises(ValueError, match="a batch of 4 prompts cannot be divided among 3 hosts"):
        Batches("jsonl", {"path": path}, batch_size=4, seed=0, shard_count=3)
    with pytest.raises(ValueError, match="shard_index 2 is not below shard_count 2"):
        Batches("jsonl", {"path": path}, batch_size=4, seed=0, shard_index=2, shard_count=2)
    monkeypatch.setitem(TASKS, "nothing", lambda: FileExamples([], [], "", []))
    with pytest.raises(ValueError, match="'nothing'.*has 0 examples"):
        Batches("nothing", {}, batch_size=1, seed=0)


def test_examples_that_could_not_be_read_are_refused_unless_they_are_checked(tmp_path):
    path = write(tmp_path / "a.jsonl", 3)
    with open(path, "a") as file:
        file.write("nonsense\n")
    with pytest.raises(ValueError, match=r"1 examples cannot be used; fix or remove them:\n- .*a.jsonl:4: the line is not"):
        Batches("jsonl", {"path": path}, batch_size=1, seed=0)
    batches = Batches("jsonl", {"path": path}, batch_size=3, seed=0, check=lambda source: source)
    assert sorted(flat(batches, 1)) == ["0", "1", "2"]


def test_a_whole_batch_has_the_parts_of_all_hosts(path, monkeypatch):
    make = lambda **shard: Batches("jsonl", {"path": path}, batch_size=4, seed=0, **shard)
    monkeypatch.setattr(processes, "gather", lambda part: [*part, "of the others"])
    whole = make().next_whole()  # one host that reads all of it asks nobody
    assert [example["id"] for example in whole] == ids(make(), 1)[0]
    half = make(shard_index=1, shard_count=2).next_whole()
    assert len(half) == 3 and half[2] == "of the others"
