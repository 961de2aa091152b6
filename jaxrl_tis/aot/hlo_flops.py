"""Counts the multiplications of matrix products and convolutions in HLO."""

import math
import re

from jaxrl_tis.aot.hlo_text import Instruction, Shape


def dot_size(line: Instruction, lhs: Shape, rhs: Shape) -> int:
    contracted = re.findall(r"\d+", line.attribute("lhs_contracting_dims"))
    return line.shapes[0].size * math.prod(lhs.dims[int(d)] for d in contracted)


def convolution_size(line: Instruction, lhs: Shape, rhs: Shape) -> int:
    """Counts multiplications with existing elements, without padding and dilation holes. A batch
    dimension written as a window thus counts once."""
    labels = re.findall(r"^(\w+)_(\w+)->(\w+)", line.attribute("dim_labels"))
    left, right, out = labels[0]
    window = {
        key: value.split("x")
        for key, value in re.findall(r"(\w+)=([\dx_\-]+)", line.attribute("window"))
    }
    taps = 1
    for label in filter(str.isdigit, out):
        i = int(label)
        number = lambda key, i=i: int(window[key][i]) if key in window else 1
        pad = int(window["pad"][i].split("_")[0]) if "pad" in window else 0
        taps *= _taps(
            lhs.dims[left.index(label)], line.shapes[0].dims[out.index(label)], number("size"),
            number("stride"), pad, number("lhs_dilate"), number("rhs_dilate"),
        )
    batch, features = (line.shapes[0].dims[out.index(x)] for x in "bf")
    return batch * features * rhs.dims[right.index("i")] * taps


def _taps(
    size: int, outputs: int, window: int, stride: int, pad: int, dilate: int, window_dilate: int
) -> int:
    positions = (
        o * stride + k * window_dilate - pad for o in range(outputs) for k in range(window)
    )
    return sum(0 <= p <= (size - 1) * dilate and p % dilate == 0 for p in positions)
