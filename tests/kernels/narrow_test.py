"""What a kernel's program is made of where 64-bit types are allowed."""

import re

import jax
import pytest
from jax.experimental import pallas as pl

from jaxrl_tis.kernels import decode_attention, logprob_pallas, narrow
from jaxrl_tis.kernels.head import Head


def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype)


def decode():
    pages, scales = shape("int8", 1, 9, 2, 128, 128), shape("float32", 1, 9, 2, 2, 128)
    slots = shape("int32", 4)
    return decode_attention.decode_attention, (
        shape("bfloat16", 4, 2, 2, 64), shape("int8", 4, 2, 2, 64), shape("float32", 4, 2, 2), pages,
        scales, shape("int32"), slots, slots, shape("int32", 4, 2),
    )


def moments():
    run = lambda head, x, targets, temperature, others: logprob_pallas.moments(
        head, x, targets, temperature, others, None, 300, 8, True, True
    )
    head = Head(shape("float32", 300, 128), 0)
    rows = shape("int64", 2, 9), shape("float32", 2, 9), shape("int64", 2, 9, 3)
    return run, (head, shape("float32", 2, 9, 128), *rows)


def doubled():
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    block = pl.BlockSpec((8, 128), lambda i: (i, 0))
    call = narrow.pallas_call(
        kernel, grid=(2,), in_specs=[block], out_specs=block, out_shape=shape("int32", 16, 128)
    )
    return call, (shape("int64", 16, 128),)


@pytest.mark.parametrize("case", [decode, moments, doubled])
def test_no_kernel_has_a_64_bit_type(case):
    function, arguments = case()
    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(function)(*arguments)
    calls = [e for e in jaxpr.eqns if e.primitive.name == "pallas_call"]
    assert len(calls) == 1 and not re.search(r"\b[iuf]64\b", str(calls[0]))


def test_a_plain_call_does_have_them(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(narrow, "pallas_call", pl.pallas_call)
    with pytest.raises(AssertionError):
        test_no_kernel_has_a_64_bit_type(doubled)
