"""What the TPU compiler makes of the products of every scheme."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis.aot import hlo
from jaxrl_tis.models import quant
from tests import tpu

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("libtpu compiles the programs")]

READ = {
    "none": ({"bf16"}, "f32"),
    "w8a16": ({"s8", "bf16"}, "f32"),
    "w8a8": ({"s8"}, "s32"),
    "fp8_w8a16": ({"f8e4m3fn", "bf16"}, "f32"),
    "fp8_w8a8": ({"f8e4m3fn"}, "f32"),
}
SIZE = 512


def compiled(topology, scheme):
    mesh = jax.sharding.Mesh(np.array(tpu.devices(topology)[:1]), ("x",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    array = lambda rows, dtype: jax.ShapeDtypeStruct((rows, SIZE), dtype, sharding=where)
    w = array(SIZE, jnp.bfloat16)
    if scheme != "none":
        q = array(SIZE, quant.SCHEMES[scheme].dtype)
        w = quant.QuantArray(q, array(1, jnp.float32), scheme)
    return jax.jit(quant.dot).lower(array(64, jnp.bfloat16), w).compile()


@pytest.mark.parametrize("scheme", READ)
@pytest.mark.parametrize("topology", [
    "v5e:2x2", pytest.param("tpu7x:2x2x1", marks=pytest.mark.all),
])
def test_a_product_reads_the_8_bit_values_and_copies_no_weight(topology, scheme):
    program = compiled(topology, scheme)
    (product,) = hlo.Module(program.as_text(), assumed_trips=1).dots()
    assert ({s.dtype for s in product.sources}, product.result.dtype) == READ[scheme]
    assert program.memory_analysis().temp_size_in_bytes < SIZE * SIZE
