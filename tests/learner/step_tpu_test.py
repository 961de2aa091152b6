"""The update as a TPU program: what its HLO holds, and a program that breaks each claim."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from configs import default
from jaxrl_tis import sharding
from jaxrl_tis.aot.flags import FLAGS
from jaxrl_tis.aot.hlo import MOSAIC, Module
from jaxrl_tis.fields import logical_axes
from jaxrl_tis.learner import correction
from jaxrl_tis.learner.optimizer import optimizer_shardings
from jaxrl_tis.learner.scoring import Learner, response_logits
from jaxrl_tis.learner.step import TrainState, make_train_step
from jaxrl_tis.models import placement, transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from tests import tpu

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("libtpu compiles the programs")]

L, B, T, V, D, F = 15, 8, 512, 2560, 256, 768  # a row of 512 tokens for each of 8 chips
DEEP = 27
CONFIG = ModelConfig(
    family="llama", vocab_size=V, embed_dim=D, num_layers=L, num_heads=4, num_kv_heads=2,
    head_dim=64, mlp_dim=F, rope=RopeConfig("default", 10000.0), max_position=T, norm_eps=1e-6,
    qkv_bias=False, qk_norm=False, tie_embeddings=False,
)
TX = optax.sgd(1.0)
PROJECTIONS = {(D, D), (D, 128), (D, F), (F, D)}


@functools.cache
def layout(chips="v5e:2x4"):
    return sharding.layout((1, 8, 1), sharding.TRAIN_RULES, tpu.devices(chips))


def model(layers=L):
    return dataclasses.replace(CONFIG, num_layers=layers)


def learner(chips="v5e:2x4", remat="full", layers=L, dtype="bfloat16"):
    program = transformer.Program(dtype, remat, True, layout(chips))
    return Learner(model(layers), program, max_targets=T, chunk=2048, max_segments=8)


def abstract_state(chips="v5e:2x4", layers=L):
    params = transformer.abstract_params(model(layers))
    place = lambda tree, where: jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where
    )
    shardings = placement.shardings(layout(chips), model(layers))
    moments = optimizer_shardings(TX, params, shardings, layout(chips).replicated())
    return TrainState(
        place(params, shardings), place(jax.eval_shape(TX.init, params), moments)
    )


def abstract_rows(chips, names, dtype=jnp.float32):
    place = lambda name: layout(chips).sharding(logical_axes(name, 3))
    return {name: jax.ShapeDtypeStruct((1, B, T), dtype, sharding=place(name)) for name in names}


def minibatch(chips="v5e:2x4"):
    rows = functools.partial(abstract_rows, chips)
    return (
        rows(("tokens", "positions", "segment_ids"), jnp.int32)
        | rows(("mask",), jnp.bool_)
        | rows(("temperature", "logp_old", "logp_prox", "logp_behav", "adv", "weights"))
    )


@functools.cache
def update(remat="full", chips="v5e:2x4", layers=L, dtype="bfloat16"):
    """(compiled update, its HLO)"""
    chosen = correction.parse(default.get_config().correction)
    train_step = make_train_step(learner(chips, remat, layers, dtype), chosen, TX)
    lowered = train_step.lower(abstract_state(chips, layers), minibatch(chips))
    compiled = lowered.compile(compiler_options=FLAGS[chips.partition(":")[0]])
    return compiled, Module(compiled.as_text())


@functools.cache
def module_of(name):
    """Programs that do what an update must not."""
    params = abstract_state().params
    if name == "gathers the stack":
        whole = jax.jit(lambda p: p, out_shardings=layout().replicated())
        return Module(whole.lower(params["layers"]["gate"]).compile().as_text())
    if name == "all logits":
        logits = jax.jit(lambda p, b: response_logits(p, learner(), b))
        place = layout().sharding(("batch", None))
        rows = {n: jax.ShapeDtypeStruct((B, T), x.dtype, sharding=place)
                for n, x in minibatch().items()}
        return Module(logits.lower(params, rows).compile().as_text())

    def prints(p):
        jax.debug.callback(lambda x: None, p["final_norm"][0])
        return p["final_norm"] + 1

    return Module(jax.jit(prints).lower(params).compile().as_text())


def weight_gathers(module, dtype="bf16"):
    """Those of the layers; the head is multiplied in float32."""
    return [
        (c.shapes[0].dims, c.runs) for c in module.collectives(dict(layout().mesh.shape))
        if c.kind == "all-gather" and c.axes == ("fsdp",) and c.shapes[0].size >= D * 128
        and c.shapes[0].dtype == dtype
    ]


def stacked_gathers(module, dtype="bf16"):
    return [dims for dims, _ in weight_gathers(module, dtype) if len(dims) == 3 and dims[0] > 1]


@pytest.mark.all
@pytest.mark.parametrize("chips", ["v5e:2x4", "v5p:2x2x2"])
def test_weights_are_gathered_layer_by_layer_inside_the_scan(chips):
    _, module = update(chips=chips)
    gathers = weight_gathers(module)
    # Seven projections a layer, in the forward pass and again in the backward pass.
    assert sum(runs for _, runs in gathers) >= 2 * 7 * L
    assert {tuple(n for n in dims if n > 1) for dims, _ in gathers} <= PROJECTIONS
    assert stacked_gathers(module) == []
    assert stacked_gathers(module_of("gathers the stack"), "f32") == [(L, D, F)]


def logits_of_all_tokens(module):
    tokens = B * T // layout().shards
    return [
        b for b in module.buffers()
        if b.shape.dtype == "f32" and V in b.shape.dims and b.shape.size >= tokens * V
    ]


@pytest.mark.all
def test_no_array_holds_the_logits_of_the_tokens():
    assert logits_of_all_tokens(update()[1]) == []
    assert logits_of_all_tokens(module_of("all logits"))


@pytest.mark.all
def test_nothing_goes_to_the_host_inside_a_step():
    assert update()[1].host_transfers() == []
    assert module_of("prints").host_transfers()


ATTENTION = {
    "splash_mha_fwd_segmented_residuals", "splash_mha_dkv_segmented_no_residuals",
}


def kernels(module):
    """Names of the kernels."""
    calls = [c for c in module.custom_calls() if c.target == MOSAIC]
    return {c.name.split(".")[0] for c in calls}


@pytest.mark.all
def test_the_kernels_are_in_the_program():
    """Attention forward, again for the backward pass, and its gradients; the moments of the head.
    Whole logits, without a backward pass, come from none of these."""
    assert kernels(update()[1]) == ATTENTION | {"token_logprob"}
    others = kernels(module_of("all logits"))
    assert others and not others & (ATTENTION | {"token_logprob"})


def activations_by_layer(module):
    """Shapes of the arrays that hold something of the tokens of every layer."""
    return {
        (b.shape.dtype, tuple(n for n in b.shape.dims if n > 1)) for b in module.buffers()
        if b.shape.dims[:1] == (L,) and T in b.shape.dims
    }


@pytest.mark.all
def test_arrays_of_every_layer_are_what_remat_keeps():
    """Of every layer the backward pass keeps the input, in the compute dtype."""
    assert activations_by_layer(update()[1]) == {("bf16", (L, T, D))}
    kept = activations_by_layer(update("none")[1])
    assert {("bf16", (L, T, D)), ("bf16", (L, T, F))} < kept


@pytest.mark.all
def test_inputs_of_the_layers_wait_in_the_memory_of_the_host():
    """Space 5; without the policy they stay on the device, in HBM or, as small as here, in VMEM."""
    spaces = lambda remat: {
        b.shape.memory_space for b in update(remat)[1].buffers()
        if b.shape.dims[:1] == (L,) and tuple(n for n in b.shape.dims if n > 1) == (L, T, D)
    }
    assert spaces("full") <= {0, 1} and spaces("host") == {5}


@pytest.mark.all
def test_temporaries_grow_with_depth_by_no_more_than_what_remat_keeps():
    temporaries = lambda *which: update(*which)[0].memory_analysis().temp_size_in_bytes
    inputs = B * T * D * 2 / layout().mesh.size  # of a layer
    shallow, deep = temporaries(), temporaries("full", "v5e:2x4", DEEP)
    assert (deep - shallow) / (DEEP - L) <= inputs
    # Without remat a layer keeps far more: the two gates, queries, keys and values, ...
    assert temporaries("none") - shallow > 10 * inputs * L


def aliased_bytes(module):
    return sum(alias.shape.bytes for alias in module.aliases())


def test_the_update_writes_where_it_reads():
    parameters = sum(4 * x.size for x in jax.tree.leaves(abstract_state().params)) / 8
    assert aliased_bytes(update()[1]) == pytest.approx(parameters, rel=0.05)
    assert aliased_bytes(module_of("prints")) == 0  # nothing is donated


def inexact_products(module):
    """Precisions of the products of float16 that lose bits of it."""
    return {d.precision for d in module.dots() if any(s.dtype == "f16" for s in d.operands)} - {"highest"}


@pytest.mark.all
def test_products_of_float16_keep_its_bits():
    """Those of the backward pass, too; a kernel's are of float32."""
    module = update(layers=2, dtype="float16")[1]
    assert any(s.dtype == "f16" for d in module.dots() for s in d.operands)
    assert not inexact_products(module)
    x = jax.ShapeDtypeStruct((B, D, D), jnp.float16, sharding=layout().sharding(("batch", None, None)))
    plain = jax.jit(lambda x: x @ x).lower(x).compile()
    assert inexact_products(Module(plain.as_text())) == {"default"}
