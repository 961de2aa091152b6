"""The search for the largest settings that fit."""

import math
from unittest import mock

import pytest

from jaxrl_tis.aot import fit
from jaxrl_tis.aot.chips import Topology
from tests import tpu
from tests.aot.programs_test import SHAPES, configured, small

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("libtpu compiles the programs")]


@pytest.mark.all
def test_the_search_finds_the_largest_that_fits():
    """Rows are multiples of the data shards that divide an update's 64 * 8 sequences."""
    tpu.devices("v5e:2x2")
    topology = Topology.parse("v5e:2x2")

    def entry(self, name, setup):
        config = setup.config
        size = config.train.microbatch_rows if name == "train" else config.engine.slots
        memory = {"peak_bytes": size, "beside_bytes": 1, "hbm_bytes": 17}
        roofline = {"seconds": 1.0}
        return {"memory": memory, "fits": size <= 16, "over_in": "hbm", "roofline": roofline}

    with mock.patch.object(fit.Search, "_entry", entry):
        rows = fit.Search(small("quickstart"), SHAPES, topology).run()
        capped = fit.Search(small("quickstart"), SHAPES, topology, limit=3)
        other = fit.Search(small("gsm8k_qwen25_0p5b:grpo"), SHAPES, topology).run()
        capped.run()
    tried = lambda **which: [
        (r["size"], r["fits"]) for r in rows if all(r[k] == v for k, v in which.items())
    ]
    until = [(32, False), (8, True), (16, True)]  # of 4, 8, ... 512
    assert tried(program="train", mesh=(1, 4, 1), remat="full") == until
    assert tried(program="decode", mesh=(4, 1, 1)) == until
    # Of two key/value heads.
    assert {r["mesh"] for r in rows} == {(1, 4, 1), (1, 2, 2), (4, 1, 1), (2, 1, 2)}
    assert {r["mesh"] for r in other} == {(1, 4, 1), (1, 2, 2), (4, 1, 1), (2, 1, 2)}
    two_shards = [r for r in other if r["mesh"] == (1, 2, 2) and r["remat"] == "none"]
    assert [r["size"] for r in two_shards] == [4, 8, 16]  # of 2, 4, 8, 16: divide 80 sequences
    assert len(capped.rows) == 3 and not capped.is_whole
    assert "100.0%" in fit.line(rows[2]) and "does not fit in hbm" in fit.line(rows[0])


@pytest.mark.all
def test_rows_divide_those_of_forks_too():
    """32 samples and 24 rows for forks, in micro-batches of a divisor of both."""
    tpu.devices("v5e:2x2")
    config = configured("quickstart_tool")
    config.task.environment, config.rollout.harness = "", "my_agent:play"
    config.rollout.prompts, config.rollout.group_size, config.rollout.fork_rows = 4, 8, 24
    config.train.microbatch_rows, config.train.pack_length = 8, 0
    memory = {"peak_bytes": 1, "beside_bytes": 1, "hbm_bytes": 17}
    fits = lambda self, name, setup: {
        "memory": memory, "fits": True, "over_in": "hbm", "roofline": {"seconds": 1.0},
    }
    with mock.patch.object(fit.Search, "_entry", fits):
        rows = fit.Search(config.lock(), SHAPES, Topology.parse("v5e:2x2")).run()
    assert max(r["size"] for r in rows if r["program"] == "train") == 8


@pytest.mark.all
def test_the_search_tries_no_split_that_a_run_refuses():
    """Prefills of 32 prompts cannot be cut into 64 shards, nor 8 key/value heads into 16."""
    tpu.devices("v5p:4x4x4")
    memory = {"peak_bytes": 1, "beside_bytes": 1, "hbm_bytes": 17}
    fits = lambda self, name, setup: {
        "memory": memory, "fits": True, "over_in": "hbm", "roofline": {"seconds": 1.0},
    }
    with mock.patch.object(fit.Search, "_entry", fits):
        search = fit.Search(
            configured("dapo_qwen25_32b").lock(), SHAPES, Topology.parse("v5p:4x4x4"), limit=80
        )
        rows = search.run()
    serving = {r["mesh"] for r in rows if r["program"] == "decode"}
    assert serving == {(32, 1, 2), (16, 1, 4), (8, 1, 8)} and search.is_whole
    training = {r["mesh"] for r in rows if r["program"] == "train"}
    assert training == {(1, 64, 1), (1, 32, 2), (1, 16, 4), (1, 8, 8)}
    with pytest.raises(ValueError, match="nonesuch"):
        config = small("quickstart", engine__quantization="nonesuch")
        fit.Search(config, SHAPES, Topology.parse("v5e:2x2")).run()


def test_the_search_leaves_learner_and_worker_their_own_devices():
    """32 chips learn, and a worker samples with four, over which the 8 key/value heads are cut."""
    tpu.devices("v5p:2x4x4")
    memory = {"peak_bytes": 1, "beside_bytes": 1, "hbm_bytes": 17}
    fits = lambda self, name, setup: {
        "memory": memory, "fits": setup.is_apart, "over_in": "hbm", "roofline": {"seconds": 1.0},
    }
    with mock.patch.object(fit.Search, "_entry", fits):
        config = configured("dapo_qwen25_32b:async").lock()
        rows = fit.Search(config, SHAPES, Topology.parse("v5p:2x4x4"), limit=18).run()
    assert all(r["fits"] for r in rows)
    meshes = lambda program: {r["mesh"] for r in rows if r["program"] == program}
    assert meshes("decode") == {(4, 1, 1), (2, 1, 2), (1, 1, 4)}
    assert {math.prod(mesh) for mesh in meshes("train")} == {32}


@pytest.mark.all
def test_slots_that_an_evaluation_has_no_room_for_do_not_fit():
    """Its cache is of the learner's dtype: twice the bytes of the sampler's."""
    tpu.devices("v5e:2x2")

    def entry(self, name, setup):
        used = setup.config.engine.slots * (2 if name == "eval_decode" else 1)
        memory = {"peak_bytes": used, "beside_bytes": 1, "hbm_bytes": 17}
        roofline = {"seconds": 1.0}
        return {"memory": memory, "fits": used <= 16, "over_in": "hbm", "roofline": roofline}

    with mock.patch.object(fit.Search, "_entry", entry):
        rows = fit.Search(small("quickstart"), SHAPES, Topology.parse("v5e:2x2")).run()
    assert fit.largest(rows)["decode"]["size"] == 8
    assert fit.largest(rows)["decode"]["use_bytes"] == 2 * 8 + 1


def test_splits_keep_the_axes_context_and_expert():
    meshes = fit._meshes(32, (1, -1, 1, 1, 8), is_training=True)
    assert meshes == [(1, 4, 1, 1, 8), (1, 2, 2, 1, 8), (1, 1, 4, 1, 8)]
    assert [fit._shards(mesh) for mesh in meshes] == [32, 16, 8]
    assert fit._meshes(4, (-1, 1, 1), is_training=False) == [(4, 1, 1), (2, 1, 2), (1, 1, 4)]
    assert fit._meshes(2, (1, 1, 1, -1), is_training=True) == [(1, 2, 1), (1, 1, 2)]


def test_of_equal_times_the_most_rows_are_advised_and_of_these_what_recomputes_least():
    """A third more work weighs more than twice the rows."""
    row = lambda program, mesh, remat, size, seconds, fits=True: {
        "program": program, "mesh": mesh, "remat": remat, "size": size, "fits": fits,
        "seconds": seconds,
    }
    rows = [
        row("decode", (4, 1, 1), "", 64, None, fits=False),
        row("train", (1, 4, 1), "full", 32, 4.0), row("train", (1, 4, 1), "none", 8, 3.0),
        row("train", (1, 4, 1), "host", 16, 3.02), row("train", (1, 2, 2), "dots", 16, 3.01),
        row("train", (1, 2, 2), "none", 32, None, fits=False),
    ]
    assert fit.advice(rows) == (
        "decode: nothing that was tried fits\n"
        "train: --config.mesh.train='(1,2,2)' --config.model.remat=dots "
        "--config.train.microbatch_rows=16"
    )


def test_the_largest_size_that_fits_every_program_is_found():
    """An evaluation needs twice the memory of a decode call, and 16 is there."""
    assert fit._doubled(3, 24) == [3, 6, 12, 24] and fit._doubled(1, 1) == [1]

    def entry(self, program, size):
        used = size * (2 if program == "eval_decode" else 1)
        memory = {"peak_bytes": used, "beside_bytes": 0, "hbm_bytes": 16}
        return {"memory": memory, "fits": used <= 16, "over_in": "hbm", "roofline": {"seconds": 1.0}}

    def searched(limit):
        search = fit.Search(None, SHAPES, None, limit=limit)
        search._on_row = lambda row: None
        with mock.patch.multiple(fit.Search, _entry=entry, _setup=lambda self, size: size):
            search._bisect("decode", (4, 1, 1), "", [1, 2, 4, 8, 16, 32], lambda size: size)
        return search

    search = searched(limit=9)
    assert [(r["size"], r["fits"]) for r in search.rows] == [(4, True), (16, False), (8, True)]
    assert search.is_whole and not searched(limit=2).is_whole
