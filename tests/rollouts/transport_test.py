"""Weights as files: whole versions or none, the newest, and no older than it has to be."""

import os
import pathlib
import threading

import gcsfs
import jax
import numpy as np
import pytest

from jaxrl_tis.rollouts import transport
from jaxrl_tis.rollouts.transport import Directory, Unavailable
from jaxrl_tis.runtime import storage
from tests import gcs_server
from tests.rollouts.serving_trees import assert_same, like, tree


@pytest.fixture(scope="module")
def trees():
    return [tree(seed) for seed in range(4)]


def publish(where, tree, version):
    where.publish(tree, version, transport.tree_digest(tree))


# The tree


def test_the_copy_that_is_published_does_not_change_with_the_original():
    weight = np.zeros(3, np.float32)
    leaves = transport.host_leaves({"a": weight, "b": weight.reshape(3, 1).T})
    weight += 1
    assert leaves["['a']"].tolist() == [0, 0, 0] and leaves["['b']"].flags.c_contiguous


def test_a_digest_depends_on_values_names_dtypes_and_shapes():
    a = np.arange(4, dtype=np.int8)
    others = [{"a": a + 1}, {"b": a}, {"a": a.view(np.uint8)}, {"a": a.reshape(2, 2)},
              {"a": a[:3]}, {"a": a, "b": a[:0]}]
    digests = {transport.tree_digest(t) for t in [{"a": a}, *others]}
    assert len(digests) == 1 + len(others)
    assert transport.tree_digest({"a": a.copy()}) in digests


def test_a_dtype_that_cannot_travel_is_refused():
    with pytest.raises(ValueError, match=r"weight \['a'\] is int4; what can be sent is bool"):
        transport.host_leaves({"a": jax.numpy.zeros(2, "int4")})


@pytest.mark.parametrize("change, why", [
    (lambda t: t["layers"].pop("norm"), r"'norm'\] is absent, this worker's float32 \[2, 4\]"),
    (lambda t: t.update(embed=t["embed"].astype("float32")),
     r"'embed'\] is float32 \[7, 4\], this worker's bfloat16 \[7, 4\]"),
    (lambda t: t.update(embed=t["embed"].T), r"'embed'\] is bfloat16 \[4, 7\]"),
    (lambda t: t["layers"].update(q=tree(scheme="w8a16")["layers"]["q"]),
     "structure .*'w8a16'.* this worker serves .*'w8a8'"),
], ids=["absent", "dtype", "shape", "scheme"])
def test_another_format_is_named(tmp_path, change, why):
    ours, theirs = tree(), tree()
    change(theirs)
    where = Directory(tmp_path)
    publish(where, theirs, 1)
    with pytest.raises(ValueError, match=f"version 1.*{why}"):
        where.fetch(1, like(ours))
    assert where.latest() == 1  # nothing is wrong with it


# Files


def test_what_is_fetched_is_what_was_published(tmp_path, trees):
    learner, worker = Directory(tmp_path / "weights"), Directory(tmp_path / "weights")
    assert worker.latest() is None
    for version in (0, 1, 7):
        publish(learner, trees[version % 3], version)
        assert worker.latest() == version
        assert_same(worker.fetch(version, like(trees[0])), trees[version % 3])
    assert_same(worker.fetch(1, like(trees[0])), trees[1])
    stored = sum(p.stat().st_size for p in tmp_path.rglob("*.safetensors"))
    assert learner.bytes_sent == stored > 0  # the grace keeps them all


def test_leaves_are_spread_over_files(tmp_path, trees, monkeypatch):
    monkeypatch.setattr(transport, "FILE_BYTES", 100)
    where = Directory(tmp_path)
    publish(where, trees[0], 1)
    assert len(list(tmp_path.rglob("*.safetensors"))) > 2
    assert_same(where.fetch(1, like(trees[0])), trees[0])


@pytest.mark.parametrize("version, why", [
    (3, "version 3 is not newer than 3"), (0, "version 0 is not newer than 3"),
    (-1, "version -1; give an int from 0"), (True, "version True"), (4.0, "version 4.0"),
])
def test_versions_only_grow(tmp_path, trees, version, why):
    publish(Directory(tmp_path), trees[0], 3)
    with pytest.raises(ValueError, match=why):
        publish(Directory(tmp_path), trees[1], version)
    assert_same(Directory(tmp_path).fetch(3, like(trees[0])), trees[0])


def test_old_versions_go_and_new_ones_stay_for_the_grace(tmp_path, trees):
    short, long = Directory(tmp_path / "a", keep=2, grace=0), Directory(tmp_path / "b", keep=2)
    for version in range(4):
        publish(short, trees[0], version)
        publish(long, trees[0], version)
    names = lambda folder: sorted(path.name for path in (tmp_path / folder).iterdir())
    assert names("a") == ["00000002", "00000003"]
    assert names("b") == ["00000000", "00000001", "00000002", "00000003"]
    with pytest.raises(Unavailable, match="version 1 is not in .*; the latest is 3"):
        short.fetch(1, like(trees[0]))
    with pytest.raises(ValueError, match="at least 2"):
        Directory(tmp_path, keep=1)


def test_a_learner_that_starts_again_grants_the_grace_again(tmp_path, trees):
    for version in range(3):
        publish(Directory(tmp_path, grace=60), trees[0], version)
    again = Directory(tmp_path, grace=60)
    publish(again, trees[0], 3)
    assert len(list(tmp_path.iterdir())) == 4
    again._grace = 0
    publish(again, trees[0], 4)
    assert len(list(tmp_path.iterdir())) == 2


def test_every_changed_byte_is_seen_and_the_version_before_serves_on(tmp_path, trees):
    learner = Directory(tmp_path)
    publish(learner, trees[0], 1)
    publish(learner, trees[1], 2)
    rng = np.random.default_rng(0)
    for path in sorted((tmp_path / "00000002").iterdir()):
        whole = path.read_bytes()
        for place in rng.choice(len(whole) - 2, 40, replace=False):
            changed = bytearray(whole)
            changed[place] ^= 1 << rng.integers(8)
            path.write_bytes(changed)
            worker = Directory(tmp_path)
            with pytest.raises(Unavailable, match="version 2 in .* is damaged"):
                worker.fetch(2, like(trees[0]))
            assert worker.latest() == 1
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(Unavailable, match="is damaged"):
            Directory(tmp_path).fetch(2, like(trees[0]))
        path.write_bytes(whole)
    (tmp_path / "00000002" / "weights-00000.safetensors").unlink()
    with pytest.raises(Unavailable, match="weights-00000.safetensors is missing"):
        worker.fetch(2, like(trees[0]))
    assert_same(worker.fetch(worker.latest(), like(trees[0])), trees[0])


def test_a_wrong_digest_is_seen(tmp_path, trees):
    where = Directory(tmp_path)
    where.publish(trees[0], 1, transport.tree_digest(trees[1]))
    with pytest.raises(Unavailable, match="its digest differs"):
        where.fetch(1, like(trees[0]))


@pytest.mark.parametrize("left", ["00000002", "00000002.new"])
def test_what_a_killed_learner_left_is_no_version(tmp_path, trees, left):
    publish(Directory(tmp_path), trees[0], 1)
    (tmp_path / left).mkdir()
    (tmp_path / left / "weights-00000.safetensors").write_bytes(b"half")
    again = Directory(tmp_path)
    assert again.latest() == 1
    publish(again, trees[1], 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000001", "00000003"]
    assert_same(again.fetch(3, like(trees[0])), trees[1])


def test_a_learner_killed_at_any_file_leaves_the_version_before(tmp_path, trees, monkeypatch):
    """The write of the n-th file fails, whichever; the next learner publishes the same version."""
    monkeypatch.setattr(transport, "FILE_BYTES", 100)
    publish(Directory(tmp_path), trees[0], 1)
    write, room = pathlib.Path.write_bytes, 0

    def limited(self, data):
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(28, os.strerror(28), str(self))
        return write(self, data)

    monkeypatch.setattr(type(storage.folder(tmp_path)), "write_bytes", limited)
    for files in range(100):
        room = files
        try:
            publish(Directory(tmp_path), trees[1], 2)
            break
        except OSError:
            worker = Directory(tmp_path)
            assert worker.latest() == 1
            assert_same(worker.fetch(1, like(trees[0])), trees[0])
    assert files > 2
    assert_same(Directory(tmp_path).fetch(2, like(trees[0])), trees[1])


def test_a_reader_beside_a_learner_gets_whole_versions_that_grow(tmp_path, trees):
    learner, seen, wrong = Directory(tmp_path, keep=2, grace=0), [], []
    is_over = threading.Event()

    def read():
        worker = Directory(tmp_path)
        while not is_over.is_set():
            version = worker.latest()
            if version is None:
                continue
            try:
                found = worker.fetch(version, like(trees[0]))
            except Unavailable as error:
                wrong.extend([error] * ("damaged" in str(error)))
                continue
            wrong.extend([version] * bool(found["rest"][0] != version % 4))
            seen.append(version)

    threads = [threading.Thread(target=read) for _ in range(2)]
    [thread.start() for thread in threads]
    for version in range(30):
        publish(learner, trees[version % 4], version)
    is_over.set()
    [thread.join() for thread in threads]
    assert not wrong and len(seen) > 2


# A bucket


@pytest.fixture
def bucket(monkeypatch):
    with gcs_server.serving() as (found, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        gcsfs.GCSFileSystem.clear_instance_cache()
        yield found
        gcsfs.GCSFileSystem.clear_instance_cache()


def test_on_a_bucket_the_manifest_makes_a_version(bucket, trees):
    learner, worker = Directory("gs://bucket/w", grace=0), Directory("gs://bucket/w")
    puts = []
    bucket.before = lambda method, name: puts.append(name) if method == "POST" else None
    publish(learner, trees[0], 1)
    assert puts[-1] == "w/00000001/manifest.json" and len(puts) == 2
    assert worker.latest() == 1
    assert_same(worker.fetch(1, like(trees[0])), trees[0])
    bucket.put("w/00000002/weights-00000.safetensors", b"half")
    assert worker.latest() == 1
    for version in (2, 3):
        publish(learner, trees[version], version)
    assert bucket.names() == [
        f"w/0000000{version}/{name}" for version in (2, 3)
        for name in ("manifest.json", "weights-00000.safetensors")
    ]
    assert_same(worker.fetch(2, like(trees[0])), trees[2])
    with pytest.raises(Unavailable, match="the latest is 3"):
        worker.fetch(1, like(trees[0]))


def test_a_bucket_that_does_not_answer_is_no_damage(bucket, trees):
    where = Directory("gs://bucket/w")
    publish(where, trees[0], 1)
    is_file = lambda name: name.endswith(".safetensors")
    bucket.before = lambda method, name: 400 if method == "GET" and is_file(name) else None
    with pytest.raises(Unavailable, match="cannot be read now"):
        where.fetch(1, like(trees[0]))
    bucket.before = lambda method, name: None
    assert where.latest() == 1
    assert_same(where.fetch(1, like(trees[0])), trees[0])
