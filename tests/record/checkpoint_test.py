"""Checkpoints survive flipped bits, missing files, full disks and another mesh; configs may not."""

import errno
import logging
import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_tis.record import checkpoint
from jaxrl_tis.runtime import cli

pytestmark = pytest.mark.by_jax("orbax and the layout of arrays")

META = {"step": 2, "data": {"index": 64, "fingerprint": "gsm8k-7473"}, "weight_version": 2}


def make_state(value):
    """Two weights, a real optimizer state and PRNG key data; every number follows from `value`."""
    params = {"embed": jnp.arange(16.0).reshape(8, 2) + value,
              "norm": jnp.full((4,), value, jnp.bfloat16)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {"params": params, "optimizer": optimizer.init(params),
            "key": jax.random.key_data(jax.random.key(int(value)))}


def mesh_of(num_devices):
    return Mesh(np.array(jax.devices()[:num_devices]), ("fsdp",))


def abstract(state, num_devices=1):
    """Shards the first axis of what it divides over `num_devices`."""
    def one(leaf):
        sharded = leaf.ndim > 0 and leaf.shape[0] % num_devices == 0
        spec = PartitionSpec("fsdp") if sharded else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype,
                                    sharding=NamedSharding(mesh_of(num_devices), spec))
    return jax.tree.map(one, state)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_lost_process_is_no_fault_of_the_folder(tmp_path, monkeypatch):
    """Nobody shall be told to make room because another process is gone."""
    gone = jax.errors.JaxRuntimeError("UNAVAILABLE: Gloo AllGather failed")

    def fails(*_):
        raise gone

    for name in ("_tidy", "_commit"):
        with monkeypatch.context() as m, pytest.raises(jax.errors.JaxRuntimeError) as error:
            with checkpoint.Checkpoints(tmp_path / name, 1) as checkpoints:
                m.setattr(checkpoints, name, fails)
                checkpoints.save(1, make_state(1), META)
        assert error.value is gone


@pytest.mark.parametrize("code, expected", [
    (503, cli.Interrupted), (429, cli.Interrupted), (403, cli.Unwritable),
])
def test_a_bucket_that_fails_for_now_interrupts_the_run(tmp_path, code, expected):
    class HttpError(Exception):
        pass

    def upload():
        error = HttpError("of the bucket")
        error.code = code
        raise error

    checkpoints = checkpoint.Checkpoints(tmp_path, 1, before_commit=upload)
    checkpoints.save(1, make_state(1), META)
    with pytest.raises(expected, match="checkpoint 1 could not be written"):
        checkpoints.wait()


def test_an_interrupted_upload_stays_one(tmp_path):
    def upload():
        raise cli.Interrupted("the bucket does not answer")

    checkpoints = checkpoint.Checkpoints(tmp_path, 1, before_commit=upload)
    checkpoints.save(1, make_state(1), META)
    with pytest.raises(cli.Interrupted, match="the bucket does not answer"):
        checkpoints.wait()


def test_what_ends_the_block_is_told_before_a_save_that_failed(tmp_path, monkeypatch, caplog):
    def fails(*_):
        raise OSError("No space left on device")

    with caplog.at_level(logging.ERROR, logger="absl"), pytest.raises(KeyError, match="the cause"):
        with checkpoint.Checkpoints(tmp_path, 1) as checkpoints:
            monkeypatch.setattr(checkpoint, "write_manifest", fails)
            checkpoints.save(1, make_state(1), META)
            raise KeyError("the cause")
    assert "No space left" in caplog.text
    with pytest.raises(RuntimeError, match="No space left"):
        with checkpoint.Checkpoints(tmp_path / "b", 1) as checkpoints:
            checkpoints.save(1, make_state(1), META)


def save_steps(workdir, steps, keep=5):
    with checkpoint.Checkpoints(workdir, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), {**META, "step": step})


def largest_file(step_directory):
    return max((path for path in step_directory.rglob("*") if path.is_file()
                and path.name != checkpoint.MANIFEST), key=lambda path: path.stat().st_size)


def test_round_trip_and_new_run(tmp_path):
    with checkpoint.Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() is None
        with pytest.raises(FileNotFoundError, match="no checkpoint"):
            checkpoints.restore(abstract(make_state(0)))
        checkpoints.save(2, make_state(2), META)
        assert checkpoints.latest() == 2
        state, meta = checkpoints.restore(abstract(make_state(0)))
    assert_same(state, make_state(2))
    assert meta == META


def test_keeps_the_newest_and_restores_an_asked_step(tmp_path):
    save_steps(tmp_path, [1, 2, 3, 4], keep=2)
    with checkpoint.Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.steps() == [3, 4]
        assert sorted(os.listdir(tmp_path / "checkpoints")) == ["3", "4"]
        state, meta = checkpoints.restore(abstract(make_state(0)), step=3)
        assert meta["step"] == 3
        assert_same(state, make_state(3))
        with pytest.raises(FileNotFoundError, match=r"no checkpoint 2.*\[3, 4\]"):
            checkpoints.restore(abstract(make_state(0)), step=2)


def test_a_part_is_restored_alone(tmp_path):
    save_steps(tmp_path, [1])
    whole = abstract(make_state(0))
    name = next(iter(whole))
    with checkpoint.Checkpoints(tmp_path, keep=1) as checkpoints:
        state, meta = checkpoints.restore({name: whole[name]}, is_part=True)
        assert list(state) == [name] and meta["step"] == 1
        assert_same(state[name], make_state(1)[name])
        with pytest.raises(ValueError, match="absent in the checkpoint"):
            checkpoints.restore({"other": whole[name]}, is_part=True)
        with pytest.raises(ValueError, match="absent in this program"):
            checkpoints.restore({name: whole[name]})


def test_state_may_be_donated_after_save(tmp_path):
    overwrite = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0, state), donate_argnums=0)
    with checkpoint.Checkpoints(tmp_path, keep=1) as checkpoints:
        state = make_state(5)
        checkpoints.save(5, state, META)
        jax.block_until_ready(overwrite(state))
        assert_same(checkpoints.restore(abstract(make_state(0)))[0], make_state(5))


@pytest.mark.parametrize("saved_on, restored_on", [(8, 2), (1, 8), (4, 1)])
def test_restores_on_another_mesh(tmp_path, saved_on, restored_on):
    state = make_state(3)
    placed = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding,
                                                abstract(state, saved_on)))
    wanted = abstract(state, restored_on)
    with checkpoint.Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, placed, META)
        restored, _ = checkpoints.restore(wanted)
    assert_same(restored, state)
    assert restored["params"]["embed"].sharding == wanted["params"]["embed"].sharding
    # 8 rows of `embed` over the devices of the new mesh.
    assert restored["params"]["embed"].addressable_shards[0].data.shape == (8 // restored_on, 2)


def flip_one_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


DAMAGES = {"sha256 of file": flip_one_bit, "bytes instead of": truncate,
           "is missing": lambda path: path.unlink()}


@pytest.mark.parametrize("message", DAMAGES)
def test_damaged_step_is_set_aside_and_the_older_one_used(tmp_path, message, caplog):
    save_steps(tmp_path, [1, 2])
    broken = largest_file(tmp_path / "checkpoints" / "2")
    DAMAGES[message](broken)
    with checkpoint.Checkpoints(tmp_path, keep=5) as checkpoints, \
            caplog.at_level(logging.ERROR, logger="absl"):
        state, meta = checkpoints.restore(abstract(make_state(0)))
        assert meta["step"] == 1
        assert_same(state, make_state(1))
        assert checkpoints.latest() == 1
        checkpoints.save(2, make_state(2), META)  # the run trains step 2 again
        assert checkpoints.latest() == 2
    assert message in caplog.text and broken.name in caplog.text
    assert "restoring step 1 instead" in caplog.text
    assert (tmp_path / "checkpoints" / "2.corrupt").is_dir()


def test_a_reader_changes_nothing(tmp_path, caplog):
    """A run may delete old steps while another process reads them."""
    save_steps(tmp_path, [1, 2])
    flip_one_bit(largest_file(tmp_path / "checkpoints" / "2"))
    with checkpoint.Checkpoints(tmp_path, keep=1) as checkpoints, \
            caplog.at_level(logging.ERROR, logger="absl"):
        _, meta = checkpoints.restore(abstract(make_state(0)), is_part=True)
        assert meta["step"] == 1 and checkpoints.steps() == [1, 2]
    assert "checkpoint 2 is damaged" in caplog.text and "restoring step 1" in caplog.text


@pytest.mark.parametrize("message", DAMAGES)
def test_every_file_of_a_step_is_guarded(tmp_path, message):
    save_steps(tmp_path, [1])
    step_directory = tmp_path / "checkpoints" / "1"
    assert checkpoint.verify(step_directory) is None
    paths = [path for path in step_directory.rglob("*")
             if path.is_file() and path.stat().st_size > 7]
    assert len(paths) > 5
    for path in paths:
        data = path.read_bytes()
        DAMAGES[message](path)
        assert checkpoint.verify(step_directory) is not None, path
        path.write_bytes(data)
    assert checkpoint.verify(step_directory) is None


def test_no_intact_step_left(tmp_path):
    save_steps(tmp_path, [1, 2])
    for step in ("1", "2"):
        flip_one_bit(largest_file(tmp_path / "checkpoints" / step))
    with checkpoint.Checkpoints(tmp_path, keep=5) as checkpoints:
        with pytest.raises(ValueError, match="no intact checkpoint left in .*checkpoints"):
            checkpoints.restore(abstract(make_state(0)))
    with checkpoint.Checkpoints(tmp_path, keep=5) as checkpoints:  # a restart may not start over
        with pytest.raises(ValueError, match=r"only damaged checkpoints \(\['1.corrupt', '2.corr"):
            checkpoints.latest()


def test_asked_step_has_no_substitute(tmp_path):
    save_steps(tmp_path, [1, 2])
    flip_one_bit(largest_file(tmp_path / "checkpoints" / "2"))
    with checkpoint.Checkpoints(tmp_path, keep=5) as checkpoints:
        with pytest.raises(ValueError, match=r"2 is damaged .*other complete steps: \[1\]"):
            checkpoints.restore(abstract(make_state(0)), step=2)


def test_step_without_manifest_does_not_count(tmp_path):
    save_steps(tmp_path, [1, 2])
    (tmp_path / "checkpoints" / "2" / checkpoint.MANIFEST).unlink()
    (tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir()
    with checkpoint.Checkpoints(tmp_path, keep=5) as checkpoints:
        assert checkpoints.latest() == 1
        assert checkpoints.restore(abstract(make_state(0)))[1]["step"] == 1
        assert (tmp_path / "checkpoints" / "2").is_dir()  # a reader moves nothing of a live run
        checkpoints.save(2, make_state(2), META)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2", "2.uncommitted"]


def change_leaf(state, change):
    return {**state, "params": {**state["params"], **change}}


@pytest.mark.parametrize("change, message", [
    ({"embed": jnp.zeros((8, 2), jnp.bfloat16)},
     r'params/embed: "float32\[8,2\]" in the checkpoint, "bfloat16\[8,2\]" in this program'),
    ({"embed": jnp.zeros((8, 3))}, r'params/embed: "float32\[8,2\]" .*"float32\[8,3\]"'),
    ({"head": jnp.zeros((2,))}, r'params/head: absent in the checkpoint, "float32\[2\]"'),
])
def test_other_dtype_shape_or_name_is_refused(tmp_path, change, message):
    save_steps(tmp_path, [1])
    with checkpoint.Checkpoints(tmp_path, keep=5) as checkpoints:
        with pytest.raises(ValueError, match=message):
            checkpoints.restore(abstract(change_leaf(make_state(0), change)))
        assert checkpoints.latest() == 1


def test_wrong_calls(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.Checkpoints(tmp_path, keep=0)
    with checkpoint.Checkpoints(tmp_path, keep=1) as checkpoints:
        with pytest.raises(ValueError, match="meta of checkpoint 1 is not JSON"):
            checkpoints.save(1, make_state(1), {"array": np.zeros(2)})
        with pytest.raises(ValueError, match="leaf count is a int"):
            checkpoints.save(1, {"count": 3}, META)
        checkpoints.save(1, make_state(1), META)
        with pytest.raises(ValueError, match="1 already exists"):
            checkpoints.save(1, make_state(1), META)


def test_full_disk_while_writing_the_manifest(tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with checkpoint.Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, make_state(1), META)
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.storage, "write_json", no_space)
            checkpoints.save(2, make_state(2), META)
            with pytest.raises(RuntimeError, match=r"2 .*No space left.* \[1\] are intact"):
                checkpoints.save(3, make_state(3), META)
        assert checkpoints.latest() == 1
        assert_same(checkpoints.restore(abstract(make_state(0)))[0], make_state(1))
        checkpoints.save(2, make_state(2), META)
        assert checkpoints.latest() == 2


FILE_SIZE_LIMIT = """
    import resource, sys
    import jax, jax.numpy as jnp
    from jaxrl_tis.record import checkpoint

    state = {"w": jax.random.normal(jax.random.key(0), (200, 200))}
    w = state["w"]
    abstract = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding)}
    with checkpoint.Checkpoints(sys.argv[1], keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        try:
            checkpoints.save(2, state, {})
            checkpoints.wait()
        except RuntimeError as error:
            print("REFUSED", error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert checkpoints.latest() == 1
        assert bool((checkpoints.restore(abstract)[0]["w"] == state["w"]).all())
        checkpoints.save(2, state, {})
        print("LATEST", checkpoints.latest())
"""


@pytest.mark.all
def test_file_size_limit_of_the_system(tmp_path):
    """160 kB of weights do not fit files of 20 kB: the kernel refuses the write, not a mock."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FILE_SIZE_LIMIT), str(tmp_path)],
        capture_output=True, text=True, timeout=120, env=os.environ.copy(),
        cwd=pathlib.Path(checkpoint.__file__).parents[2])
    assert result.returncode == 0, result.stderr[-3000:]
    assert "REFUSED checkpoint 2 could not be written" in result.stdout
    assert "The older steps [1] are intact" in result.stdout
    assert "LATEST 2" in result.stdout


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="cannot make .*checkpoints"):
        checkpoint.Checkpoints(tmp_path / "file", keep=1)
