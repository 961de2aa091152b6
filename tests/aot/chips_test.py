"""Names of slices, and the rule that every config has one."""

import pathlib
import re

import jax
import pytest

from jaxrl_tis.aot.chips import CHIPS, OFFERS, TOPOLOGIES, Topology
from jaxrl_tis.aot.flags import FLAGS
from tests import tpu


def test_names_of_slices():
    for name, chips, rented_as in (
        ("v5e:2x4", 8, "v5litepod-8"),  # v5e counts chips
        ("v5e:16x16", 256, "v5litepod-256"),
        ("v6e:4x4", 16, "v6e-16"),
        ("v5p:4x4x4", 64, "v5p-128"),  # v4 and v5p count the two cores of a chip
        ("v4:2x2x1", 4, "v4-8"),
    ):
        topology = Topology.parse(name)
        assert (topology.num_chips, topology.product_name) == (chips, rented_as)
        assert topology.chip is CHIPS[name.split(":")[0]]


@pytest.mark.parametrize("rented_as, name, hosts, machine", [
    ("v5litepod-1", "v5e:1x1", 1, "ct5lp-hightpu-1t"),
    ("v5litepod-8", "v5e:2x4", 1, "ct5lp-hightpu-8t"),
    ("v5litepod-16", "v5e:4x4", 4, "ct5lp-hightpu-4t"),
    ("v5litepod-256", "v5e:16x16", 64, "ct5lp-hightpu-4t"),
    ("v5p-8", "v5p:2x2x1", 1, "ct5p-hightpu-4t"),
    ("v5p-128", "v5p:4x4x4", 16, "ct5p-hightpu-4t"),
    ("v4-16", "v4:2x2x2", 2, "ct4p-hightpu-4t"),
    ("v6e-8", "v6e:2x4", 1, "ct6e-standard-8t"),
])
def test_what_is_rented(rented_as, name, hosts, machine):
    topology = Topology.rented(rented_as)
    assert (topology.name, topology.accelerator) == (name, rented_as)
    assert (topology.hosts_per_slice, topology.machine_type) == (hosts, machine)
    assert topology.hosts_per_slice * topology.chips_per_host == topology.num_chips


@pytest.mark.parametrize("accelerator, said", [
    ("v5e-8", "'v5e-8' is unknown; give one of v4-N, v5litepod-N"),
    ("v5litepod-2x4", "is unknown"), ("v5litepod", "is unknown"),
    ("v5litepod-12", "no v5litepod-12; choose one of v5litepod-1, v5litepod-4"),
    ("v5p-4", "no v5p-4; choose one of v5p-8"),
])
def test_what_is_not_offered(accelerator, said):
    with pytest.raises(ValueError, match=said):
        Topology.rented(accelerator)


def test_the_offers_are_of_known_chips():
    assert OFFERS.keys() < CHIPS.keys()
    with pytest.raises(ValueError, match="tpu7x has no known accelerator type"):
        Topology.parse("tpu7x:2x2x1").hosts_per_slice


@pytest.mark.all
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_memory_is_what_libtpu_lets_a_program_take(name):
    pytest.importorskip("libtpu")
    topology = Topology.parse(name)
    device, *_ = devices = topology.devices()
    x = jax.ShapeDtypeStruct((2**16, 2**20), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    with pytest.raises(jax.errors.JaxRuntimeError) as refusal:
        jax.jit(lambda x: x + 1).lower(x).compile()
    (allowed,) = re.findall(r"available HBM \(([\d.]+)G\)", str(refusal.value))
    each = topology.chip.hbm_bytes * topology.num_chips / len(devices) / 2**30
    assert float(allowed) - 0.75 <= each <= float(allowed)


def test_several_slices():
    topology = Topology.parse("v5e:4x4", num_slices=2)
    assert (topology.num_chips, topology.product_name) == (32, "2 x v5litepod-16")


def test_a_name_of_nothing_is_refused():
    for name in ("v5e", "v5e:8", "v9:2x2", "v5e:2x2x2x2", "v5e:ax2"):
        with pytest.raises(ValueError, match=f"topology '{name}' is unknown; give one of the chips v4, v5e"):
            Topology.parse(name)


def test_every_config_has_a_topology():
    folder = pathlib.Path(__file__).parents[2] / "configs"
    of_cpus = {"__init__", "default", "async_local", "quickstart_vllm"} | {p.stem for p in folder.glob("fig_*.py")}
    assert {name.partition(":")[0] for name in TOPOLOGIES} == {p.stem for p in folder.glob("*.py")} - of_cpus
    for name in TOPOLOGIES.values():
        Topology.parse(name)


def test_a_host_of_a_worker():
    assert [Topology.parse("v5p:4x4x4").host(n).name for n in (0, 4)] == ["v5p:2x2x1"] * 2
    assert [Topology.parse("v5e:4x4").host(n).name for n in (0, 1, 4)] == ["v5e:2x4", "v5e:1x1", "v5e:2x2"]
    with pytest.raises(ValueError, match="4 of v5p, and rollout.tpus_per_worker = 8"):
        Topology.parse("v5p:4x4x4").host(8)


def test_every_chip_has_flags():
    assert FLAGS.keys() == CHIPS.keys()


@pytest.mark.parametrize("name, kind", [
    ("v4:2x2x1", "TPU v4"), ("v5e:2x2", "TPU v5 lite"), ("v5p:2x2x1", "TPU v5"),
    ("v6e:2x2", "TPU v6 lite"), ("tpu7x:2x2x1", "TPU7x"),
])
def test_the_compiler_knows_the_chip(name, kind):
    tpu.devices(name)  # skips without libtpu
    topology = Topology.parse(name)
    devices = topology.devices()
    assert {d.device_kind for d in devices} == {kind}
    assert len(devices) % topology.num_chips == 0
