"""Published peak rates of accelerators, by the name that jax gives to a device.

No program reaches these rates. TPU rates are those of jaxrl_tis/aot/chips.py. GPU rates are for
dense products, half of those that NVIDIA publishes "with sparsity":

* H100, H200: https://www.nvidia.com/en-us/data-center/h100/ and /h200/
* A100: https://www.nvidia.com/en-us/data-center/a100/
* L4, L40S, T4: https://www.nvidia.com/en-us/data-center/l4/, /l40s/ and /tesla-t4/
"""

from typing import NamedTuple

from jaxrl_tis.aot.chips import CHIPS


class Peak(NamedTuple):
    """Rates of one device.

    Attributes:
      bfloat16: FLOP/s of bfloat16 products; None where the device has none.
      int8: operations/s of int8 products.
      memory: bytes/s of its memory.
    """

    bfloat16: float | None
    int8: float
    memory: float


def _tpu(kind: str, devices: int = 1) -> Peak:
    """Returns the rates of one of the `devices` that jax shows for a chip."""
    chip = CHIPS[kind]
    return Peak(chip.bf16_rate / devices, chip.int8_rate / devices, chip.hbm_rate / devices)


PEAKS = {
    "TPU v4": _tpu("v4"), "TPU v5 lite": _tpu("v5e"), "TPU v5e": _tpu("v5e"),
    "TPU v5": _tpu("v5p"), "TPU v5p": _tpu("v5p"), "TPU v6 lite": _tpu("v6e"),
    "TPU v6e": _tpu("v6e"), "TPU7x": _tpu("tpu7x", devices=2),
    "NVIDIA H200": Peak(989e12, 1979e12, 4.8e12),
    "NVIDIA H100 80GB HBM3": Peak(989e12, 1979e12, 3.35e12),
    "NVIDIA H100 PCIe": Peak(756e12, 1513e12, 2.0e12),
    "NVIDIA A100-SXM4-80GB": Peak(312e12, 624e12, 2.039e12),
    "NVIDIA A100 80GB PCIe": Peak(312e12, 624e12, 1.935e12),
    "NVIDIA A100-SXM4-40GB": Peak(312e12, 624e12, 1.555e12),
    "NVIDIA A100-PCIE-40GB": Peak(312e12, 624e12, 1.555e12),
    "NVIDIA L40S": Peak(362e12, 733e12, 864e9),
    "NVIDIA L4": Peak(121e12, 242e12, 300e9),
    "Tesla T4": Peak(None, 130e12, 320e9),
}


def share(rate: float, peak: float | None) -> float | None:
    """Returns a measured rate as a share of a peak rate; None if the peak is unknown."""
    return None if peak is None else rate / peak
