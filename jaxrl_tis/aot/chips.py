"""Published rates of TPU chips, names of rented slices, and the slices of the shipped configs.

Sources for each chip: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. Other sources are
named at the number. No program reaches the peak rates. Labels, machine types and chips per machine
are from the manifests of xpk 1.16.
"""

import dataclasses
import importlib.util
import math
import os
import pathlib
import re
from typing import Any

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Rates of one chip, in bytes, operations or bytes per second.

    Attributes:
      hbm_bytes, hbm_rate: memory available to programs, and its bandwidth.
      bf16_rate, int8_rate: rates of dense matrix products.
      ici_rate: rate of all links of the chip in one direction, half the published figure for both.
      dcn_rate: the chip's share of the data center network in one direction; None is not published.
      cores_per_chip: cores in the names of v4 and v5p slices: v5p-128 has 64 chips.
    """

    hbm_bytes: int
    hbm_rate: float
    bf16_rate: float
    int8_rate: float
    ici_rate: float
    dcn_rate: float | None
    cores_per_chip: int


# Memory is what libtpu lets a program take, less than the published size but for v5p.
CHIPS = {
    # ICI: 6 links of 50 GB/s each way (arXiv:2304.01433).
    "v4": Chip(61 * GIB // 2, 1.2e12, 275e12, 275e12, 300e9, None, 2),
    # "16 GB", "819 GBps", 197 TFLOPs, 393 TOPs, ICI 400 GBps both ways, 2 x 100 Gbps for 8 chips.
    "v5e": Chip(63 * GIB // 4, 819e9, 197e12, 393e12, 200e9, 3.125e9, 1),
    # 95 GiB, 2765 GBps, 459 TFLOPs, ICI 1200 GBps both ways, DCN 50 Gbps; 918 int8 TOPs from the announcement
    # (cloud.google.com/blog, "Introducing Cloud TPU v5p", December 2023).
    "v5p": Chip(95 * GIB, 2765e9, 459e12, 918e12, 600e9, 6.25e9, 2),
    # "32 GB", 1638 GBps, 918 TFLOPs, 1836 TOPs, ICI 800 GBps both ways, DCN 100 Gbps.
    "v6e": Chip(125 * GIB // 4, 1638e9, 918e12, 1836e12, 400e9, 12.5e9, 1),
    # 192 GiB, 7380 GBps, 2307 TFLOPs, ICI 1200 GBps both ways, DCN 100 Gbps. 4614 TFLOPs are for fp8; no int8
    # rate is published, so that of bfloat16 stands here.
    "tpu7x": Chip(379 * GIB // 2, 7380e9, 2307e12, 2307e12, 600e9, 12.5e9, 2),
}


@dataclasses.dataclass(frozen=True)
class Offer:
    """Names under which slices of a chip are rented.

    Attributes:
      prefix: first part of a slice's name: v5litepod of v5litepod-8.
      runtime: image of a TPU VM.
      label: accelerator label of a GKE node.
      machine: machine type of a GKE node, without the number of chips.
      host_chips: largest number of chips on one host; hosts of larger slices have 4.
    """

    prefix: str
    runtime: str
    label: str
    machine: str
    host_chips: int


OFFERS = {
    "v4": Offer("v4", "tpu-ubuntu2204-base", "tpu-v4-podslice", "ct4p-hightpu", 4),
    "v5e": Offer("v5litepod", "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice", "ct5lp-hightpu", 8),
    "v5p": Offer("v5p", "v2-alpha-tpuv5", "tpu-v5p-slice", "ct5p-hightpu", 4),
    "v6e": Offer("v6e", "v2-alpha-tpuv6e", "tpu-v6e-slice", "ct6e-standard", 8),
}
# Chips of a slice -> its shape.
FLAT_SHAPES = {
    1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16",
}
CUBE_SHAPES = {
    4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8",
    512: "8x8x8", 1024: "8x8x16", 2048: "8x16x16",
}

# Name of a file in configs/, or of a variant of it -> the slice that it is meant for.
TOPOLOGIES = {
    "quickstart": "v5e:2x2",
    "quickstart_moe": "v5e:2x2",
    "quickstart_tool": "v5e:2x2",
    "smollm2_135m": "v5e:2x2",
    "gsm8k_qwen25_0p5b": "v5e:2x4",
    "gsm8k_one_chip": "v5e:1x1",
    "gsm8k_qwen3_8b_lora": "v5e:2x4",
    "dapo_qwen25_32b": "v5p:4x4x4",
    "dapo_qwen25_32b:async": "v5p:2x4x4",
    "dapo_qwen3_8b": "v5e:4x4",
    "dapo_gpt_oss_20b": "v5p:2x2x4",
    "dapo_qwen3_8b_64k": "v5p:4x4x2",
    "dapo_qwen3_30b_a3b": "v5p:4x4x2",
    "dapo_qwen3_30b_a3b_v5e": "v5e:8x8",
}
# A config whose samplers are Ray's -> machine of a worker, and number of workers.
WORKERS = {"dapo_qwen25_32b:async": ("v5p:2x2x1", 8)}


def name_of(config: str) -> str:
    """Returns the name in TOPOLOGIES of a config as --config=configs/FILE.py:VARIANT has it."""
    path, _, variant = config.partition(":")
    stem = pathlib.PurePath(path).stem
    return f"{stem}:{variant}" if f"{stem}:{variant}" in TOPOLOGIES else stem


@dataclasses.dataclass(frozen=True)
class Topology:
    """One or more slices of a shape, such as "v5e:4x4" (16 chips) or "v5p:4x4x4" (v5p-128)."""

    name: str
    kind: str
    chip: Chip
    chips_per_slice: int
    num_slices: int

    @classmethod
    def parse(cls, name: str, num_slices: int = 1) -> "Topology":
        """Returns the topology of a name such as "v5e:4x4"; ValueError for an unknown chip or a
        malformed shape."""
        kind, _, shape = name.partition(":")
        if kind not in CHIPS or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
            raise ValueError(
                f"topology {name!r} is unknown; give one of the chips {', '.join(CHIPS)} and a "
                "shape, as in v5e:4x4"
            )
        return cls(name, kind, CHIPS[kind], math.prod(map(int, shape.split("x"))), num_slices)

    @classmethod
    def rented(cls, accelerator: str, num_slices: int = 1) -> "Topology":
        """Returns the topology of a rented name such as v5litepod-8 or v5p-128; ValueError for a
        name that is not offered."""
        kinds = {offer.prefix: kind for kind, offer in OFFERS.items()}
        prefix, _, count = accelerator.rpartition("-")
        if prefix not in kinds or not count.isdigit():
            raise ValueError(
                f"accelerator {accelerator!r} is unknown; give one of "
                f"{', '.join(f'{p}-N' for p in kinds)}"
            )
        chip = CHIPS[kinds[prefix]]
        shapes = FLAT_SHAPES if kinds[prefix] in ("v5e", "v6e") else CUBE_SHAPES
        names = {chips * chip.cores_per_chip: shape for chips, shape in shapes.items()}
        if int(count) not in names:
            raise ValueError(
                f"there is no {accelerator}; choose one of "
                f"{', '.join(f'{prefix}-{n}' for n in names)}"
            )
        return cls.parse(f"{kinds[prefix]}:{names[int(count)]}", num_slices)

    def host(self, chips: int) -> "Topology":
        """Returns the topology of one host with this number of chips, 0 for all that a host can have.
        ValueError where no host has so many."""
        chips, shapes = chips or self.offer.host_chips, FLAT_SHAPES
        if self.kind not in ("v5e", "v6e"):
            shapes = CUBE_SHAPES
        fitting = [n for n in shapes if n <= self.offer.host_chips]
        if chips not in fitting:
            raise ValueError(
                f"a worker has the chips of one host, {' or '.join(map(str, fitting))} of {self.kind}, and "
                f"rollout.tpus_per_worker = {chips:g}"
            )
        return Topology.parse(f"{self.kind}:{shapes[chips]}")

    @property
    def offer(self) -> Offer:
        if self.kind not in OFFERS:
            raise ValueError(
                f"{self.kind} has no known accelerator type; choose one of {', '.join(OFFERS)}"
            )
        return OFFERS[self.kind]

    @property
    def shape(self) -> str:
        """Chips along each side of a slice: 4x4."""
        return self.name.partition(":")[2]

    @property
    def hosts_per_slice(self) -> int:
        few = self.chips_per_slice <= self.offer.host_chips
        return 1 if few else math.ceil(self.chips_per_slice / 4)

    @property
    def chips_per_host(self) -> int:
        return self.chips_per_slice // self.hosts_per_slice

    @property
    def machine_type(self) -> str:
        """The machine type of a GKE node: ct5lp-hightpu-8t."""
        return f"{self.offer.machine}-{self.chips_per_host}t"

    @property
    def num_chips(self) -> int:
        return self.chips_per_slice * self.num_slices

    @property
    def accelerator(self) -> str:
        """The rented name of one slice: v5litepod-8, v5p-128."""
        prefix = OFFERS[self.kind].prefix if self.kind in OFFERS else self.kind
        return f"{prefix}-{self.chips_per_slice * self.chip.cores_per_chip}"

    @property
    def product_name(self) -> str:
        """The rented name with the number of slices: 2 x v5p-128."""
        name = self.accelerator
        return f"{self.num_slices} x {name}" if self.num_slices > 1 else name

    def devices(self) -> list:
        """Returns devices to compile for. They cannot run a program. Some chips count as two
        devices.

        Raises:
          ModuleNotFoundError: libtpu, which contains the compiler, is not installed.
          ValueError: libtpu does not know the topology.
        """
        if importlib.util.find_spec("libtpu") is None:
            raise ModuleNotFoundError(
                "compiling for a TPU needs libtpu: pip install 'jaxrl_tis[tpu]'"
            )
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server on other machines
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing runs, nothing to lock
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")  # else libtpu tells that they
        os.environ.setdefault("TPU_HOST_BOUNDS", "1,1,1")  # are missing; the topology is its own
        import jax
        from jax.experimental import topologies

        more: dict[str, Any] = {"num_slices": self.num_slices} if self.num_slices > 1 else {}
        if self.chips_per_slice == 1:
            more["chips_per_host_bounds"] = [1, 1, 1]  # libtpu takes hosts of several by default
        try:
            return list(topologies.get_topology_desc(
                platform="tpu", topology_name=self.name, **more
            ).devices)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"libtpu does not accept the topology {self.name!r}: {error}; choose a shape of a "
                "real slice"
            ) from error
