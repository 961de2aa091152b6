"""Counts model FLOPs and the bytes that must move for each program, from shapes.

FLOPs are for all devices, without remat, padding of tiles or masked attention blocks. Causal
attention counts half of its square, and a decode step counts every slot at full length.
"""

import dataclasses
import math
import re

import jax

from jaxrl_tis.aot.chips import Chip
from jaxrl_tis.aot.hlo import Collective, CustomCall, Dot
from jaxrl_tis.build import Setup
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.sharding import Layout, device_bytes

# Attention products of jax's splash kernels; "fused" is a dkv that makes a dq as well.
SPLASH_PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3, "fused": 5}
PASSES = {"highest": 6, "high": 3}  # bfloat16 passes of a float32 product of that precision


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one run of a program: FLOPs of all devices, and bytes through one device's
    HBM."""

    flops: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    activation_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes


def layers_weights(c: ModelConfig, experts: int | None = None) -> int:
    """Returns the number of elements in the matrices of all layers, with all experts or so many of
    each layer."""
    attention = c.embed_dim * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    mlp = 3 * c.embed_dim * c.mlp_dim * (c.num_layers - c.num_moe_layers)
    if c.moe is not None:
        width = (c.moe.num_experts if experts is None else experts) * c.moe.expert_dim
        router = c.embed_dim * c.moe.num_experts
        mlp += c.num_moe_layers * (3 * c.embed_dim * (width + c.moe.shared_dim) + router)
    return attention * c.num_layers + mlp


def active_weights(c: ModelConfig) -> int:
    """Returns how many of these elements one token meets."""
    return layers_weights(c, c.moe.top_k if c.moe else None)


def forward_flops(c: ModelConfig, rows: int, length: int, targets: int) -> int:
    """Returns the FLOPs of `rows` causal rows of `length` tokens, each with logits at `targets`
    positions."""
    products = 2 * active_weights(c) * rows * length
    attention = 2 * length**2 * c.num_heads * c.head_dim * c.num_layers * rows
    return products + attention + 2 * c.embed_dim * c.vocab_size * targets * rows


def decode_flops(c: ModelConfig, tokens: int, length: int) -> int:
    """Returns the FLOPs of `tokens` single tokens that each attend to `length` keys."""
    products = 2 * (active_weights(c) + c.embed_dim * c.vocab_size) * tokens
    return products + 4 * length * c.num_heads * c.head_dim * c.num_layers * tokens


def model_of(name: str, setup: Setup) -> ModelConfig:
    """Returns the model that the program `name` of `programs.programs` computes."""
    is_drafters = name == "distill" or name.startswith("draft")
    return setup.drafters[0].model if is_drafters else setup.model


def kernel_flops(call: CustomCall, model: ModelConfig, layout: Layout) -> int:
    """Returns the FLOPs of one run of a Pallas kernel of a model on a device of a layout, by the kernel's
    own estimate.

    Splash attention has none and counts half of its squares. A product with experts estimates a full
    buffer, of which an even load fills one part in as many as devices share the experts. Other
    kernels without an estimate count 0.
    """
    if call.name.startswith("grouped_"):
        return (call.flops or 0) // layout.mesh.shape["expert"]
    splash = re.match(r"splash_mha_(fwd|dkv|dq)", call.name)
    if splash is None:
        return call.flops or 0
    kind, rank = splash[1], max(len(s.dims) for s in call.shapes)
    longest = [s.dims for s in call.shapes if len(s.dims) == rank]  # [(rows,) heads, T, K]
    *rows, heads, length, width = longest[0]
    if kind == "dkv" and len(longest) == 1:  # no dk and dv, but a dq [(rows,) blocks, heads, T, K]
        kind, rows = "fused", rows[:-1]
    # Of a row that n devices share, a device has a part of the queries and all keys.
    shards = layout.row_shards
    squares = length**2 * shards
    if kind == "dkv":
        heads *= model.num_heads // model.num_kv_heads
        squares //= shards**2
    return SPLASH_PRODUCTS[kind] * math.prod(rows) * heads * squares * width


def kernel_passes(call: CustomCall, setup: Setup) -> int:
    """Returns the number of bfloat16 passes of a kernel's products: six for a float32 head and in
    float16 programs, else one."""
    program, is_head = setup.training.learner.program, "token_logprob" in call.op_name
    is_exact = program.dtype == "float16" or (is_head and program.fp32_head)
    return PASSES["highest"] if is_exact else 1


def work(name: str, setup: Setup, args: tuple) -> Work:
    """Returns the work of the program `name` of `programs.programs` with these arguments."""
    if name in ("quantize", "reshard"):
        return Work(weight_bytes=device_bytes(args))
    if name == "weigh":
        return Work(activation_bytes=device_bytes(args))
    if name.startswith("eval_"):
        return _sampling(name.removeprefix("eval_"), setup.learner_engine, args)
    if name.startswith("draft"):
        return _sampling(name.removeprefix("draft_"), setup.drafters[0], args)
    if name in ("prefill", "insert", "decode", "verify"):
        return _sampling(name, setup.engine, args)
    return _learning(name, setup, args)


def _sampling(name: str, engine: Engine, args: tuple) -> Work:
    """Returns the work of a sampler's program.

    Prefill writes the first chunk of its prompts, and insert copies one page for each slot. A
    decode step reads the keys and values of every slot at max_length, once for each verified token.
    """
    state = args[0] if name == "insert" else args[1]
    cache = state if name == "draft" else state.cache
    position = device_bytes(cache) // (engine.num_pages * engine.page_size)
    slots = engine.slots // engine.shards
    if name == "insert":
        copied = 2 * slots * engine.page_size * position
        return Work(kv_bytes=copied, activation_bytes=device_bytes((state.slots, args[1:])))
    weights = device_bytes(args[0])
    models, served = [engine.model], [args[0]]
    if engine.teacher is not None:
        models, served = [engine.model, engine.teacher], [args[0].student, args[0].teacher]
    if name == "prefill":
        rows, length = args[2].shape
        tokens = rows // engine.shards * length
        width = jax.numpy.dtype(engine.config.dtype).itemsize
        inputs = sum(tokens * c.embed_dim * c.num_layers * width for c in models)
        layers = sum(device_bytes([x[stack] for stack in c.stacks]) for c, x in zip(models, served, strict=True))
        flops = sum(forward_flops(c, rows, length, 0) for c in models)
        return Work(flops, layers, tokens * position, inputs)
    steps, tokens = (1, args[2].shape[1] + 1) if name == "verify" else (engine.steps, 1)
    flops = steps * sum(decode_flops(c, engine.slots * tokens, engine.max_length) for c in models)
    kv = slots * engine.max_length * position * tokens
    return Work(flops, steps * weights, steps * kv)


def _learning(name: str, setup: Setup, args: tuple) -> Work:
    """Returns the work of a learner's program.

    A forward pass, a backward pass and remat each read the weights once. An update reads and writes
    gradients and optimizer states once, and each pass moves each layer's input once. With an adapter
    the FLOPs are still those of an update of all weights.
    """
    c, training = model_of(name, setup), setup.training
    mesh, program = training.layout.mesh.shape, training.learner.program
    micro, rows, length = args[1]["tokens"].shape
    # The drafter's rows are not packed.
    learner = training.learner if name == "distill" else training.update_learner
    targets = min(learner.max_targets, length - 1)
    targets = 0 if name in ("critic", "values") else targets
    is_update = name in ("train", "critic", "distill")
    flops = forward_flops(c, rows, length, targets) * micro * (3 if is_update else 1)
    width = jax.numpy.dtype(program.dtype).itemsize
    passes = 1 + is_update * (1 + (program.remat != "none"))
    per_device = rows * length // (training.layout.shards * mesh["context"])
    head = c.vocab_size * c.embed_dim if targets else 0
    dense = layers_weights(c, experts=0)  # each device gathers it over the axis expert
    weights = (dense + head) // mesh["tensor"]
    weights += (layers_weights(c) - dense) // (mesh["tensor"] * mesh["expert"])
    weights *= width
    state = 2 * device_bytes(args[0]) if is_update else 0
    return Work(
        flops, micro * passes * weights + state, 0,
        micro * passes * c.num_layers * per_device * c.embed_dim * width,
    )


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds at published peak rates: the bound of a model, not a measurement."""

    compute_seconds: float
    memory_seconds: float
    network_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds, self.network_seconds)

    @property
    def bound(self) -> str:
        names = ("compute", "memory", "network")
        return max(names, key=lambda n: getattr(self, f"{n}_seconds"))


def roofline(
    chip: Chip, devices_per_chip: int, dots: list[Dot], collectives: list[Collective],
    kernel_flops: int, moved: Work,
) -> Roofline:
    """Returns the least seconds of one device: products at the rate of their operands, bytes at the
    memory's rate, collectives on rings at the rate of all links. Traffic between slices is left
    out."""
    compute = kernel_flops / chip.bf16_rate
    for dot in dots:
        is_int8 = all(s.dtype in ("s8", "u8", "s4", "u4") for s in dot.operands)
        rate = chip.int8_rate if is_int8 else chip.bf16_rate
        compute += dot.flops * dot.runs * PASSES.get(dot.precision, 1) / rate
    network = sum(_wire_bytes(c) * c.runs for c in collectives if c.network == "ici")
    return Roofline(
        compute * devices_per_chip, moved.bytes * devices_per_chip / chip.hbm_rate,
        network * devices_per_chip / chip.ici_rate,
    )


def _wire_bytes(c: Collective) -> float:
    """Returns the bytes that a device sends on a ring."""
    if c.kind.startswith("collective-"):
        return c.bytes
    share = (c.group_size - 1) / c.group_size
    return c.bytes * share * (2 if c.kind == "all-reduce" else 1)
