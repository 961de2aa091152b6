"""What a program has to do, by hand."""

import dataclasses

import pytest

from jaxrl_tis import build, sharding
from jaxrl_tis.aot import programs as aot, work
from jaxrl_tis.aot.chips import CHIPS
from jaxrl_tis.aot.hlo import Collective, CustomCall, Dot
from jaxrl_tis.aot.hlo_text import Shape
from jaxrl_tis.aot.work import Work
from jaxrl_tis.validate import validate
from tests import tiny

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("libtpu compiles the programs")]


def tiny_setup(**overrides):
    return build.build(tiny.config(**overrides))


def test_model_flops_of_a_forward_pass():
    c = tiny_setup().model  # D 32, 2 query and 1 key/value head of 16, F 48, 1 layer
    # q, o: 32 x 32; k, v: 32 x 16; gate, up, down: 32 x 48.
    assert work.layers_weights(c) == work.active_weights(c) == 2 * 1024 + 2 * 512 + 3 * 1536
    # Three rows of 8 tokens, logits of 5: products, half the square of two attention products,
    # and the head.
    weights = 2 * 1024 + 2 * 512 + 3 * 1536
    attention = 2 * (2 * (8 * 8 // 2) * 2 * 16)
    expected = 3 * (2 * weights * 8 + attention + 2 * 32 * c.vocab_size * 5)
    assert work.forward_flops(c, 3, 8, 5) == expected
    per_token = 2 * (weights + 32 * c.vocab_size) + 2 * 2 * 10 * 2 * 16
    assert work.decode_flops(c, 7, 10) == 7 * per_token


EXPERTS = dict(
    model__num_layers=2, model__num_experts=6, model__expert_dim=16, model__shared_expert_dim=32,
    model__experts_per_token=2, model__router="sigmoid",
)


def test_a_token_meets_its_own_experts_and_the_shared_ones():
    """D 32; attention as above; the router 32 x 6; an expert 3 x 32 x 16, the shared one 3 x 32 x 32."""
    c = tiny_setup(**EXPERTS).model
    rest = 2 * 1024 + 2 * 512 + 32 * 6 + 3 * 32 * 32
    assert work.layers_weights(c) == 2 * (rest + 6 * 3 * 32 * 16)
    assert work.active_weights(c) == 2 * (rest + 2 * 3 * 32 * 16)
    per_token = 2 * (work.active_weights(c) + 32 * c.vocab_size) + 2 * 2 * 10 * 2 * 16 * 2
    assert work.decode_flops(c, 7, 10) == 7 * per_token


def test_a_kernel_of_experts_counts_an_even_load():
    """Its buffer has room for the rows of all devices that share the experts."""
    call = CustomCall("grouped_product.2", "tpu_custom_call", (), 80, "c", 1, "")
    setup = tiny_setup(**EXPERTS, mesh__train=(1, 1, 1, 1, 2), train__microbatch_rows=4)
    count = lambda layout: work.kernel_flops(call, setup.model, layout)
    assert (count(setup.engine.layout), count(setup.training.layout)) == (80, 40)


@pytest.mark.all
def test_an_update_reads_all_dense_weights_on_each_device_of_the_experts():
    of = lambda **mesh: tiny_setup(**EXPERTS, train__microbatch_rows=4, **mesh)
    read = lambda setup: work.work("train", setup, aot.programs(setup)["train"][1]).weight_bytes
    state = lambda setup: 2 * sharding.device_bytes(aot.programs(setup)["train"][1][0])
    one, two = of(), of(mesh__train=(1, 1, 1, 1, 2))
    c, micro = one.model, aot.programs(one)["train"][1][1]["tokens"].shape[0]
    experts = work.layers_weights(c) - work.layers_weights(c, experts=0)
    passes = (read(one) - state(one)) // (4 * (work.layers_weights(c) + c.vocab_size * c.embed_dim))
    assert passes * micro > 0
    assert (read(one) - state(one)) - (read(two) - state(two)) == passes * 4 * experts // 2


def test_bytes_that_a_decode_call_must_move():
    setup = tiny_setup()
    args = aot.programs(setup)["decode"][1]
    cache = 2 * 8 * 1 * 8 * 16 * 4  # keys and values: 8 slots, 1 head, 8 tokens of 16, float32
    moved = work.work("decode", setup, args)
    assert moved.kv_bytes == 2 * cache  # two steps a call
    assert moved.weight_bytes == 2 * sharding.device_bytes(args[0])


@pytest.mark.all
def test_the_work_of_a_drafter():
    """Three drafted tokens and the key of the last one are four steps; an update is three forward passes."""
    config = tiny.config(
        engine__drafter="models/small", engine__max_draft=3, engine__drafter_every=1,
        engine__quantization="none", train__microbatch_rows=4,
    )
    model, tokenizer = build._read(config)
    small = dataclasses.replace(model, embed_dim=16)
    setup = build.assemble(config, validate(config), model, tokenizer, drafter=small)
    found = aot.programs(setup)
    made = lambda name: work.work(name, setup, found[name][1])
    args, cache = found["draft"][1], 2 * 8 * 1 * 8 * 16 * 4
    assert args[2] == found["decode"][1][1].slots
    assert made("draft").kv_bytes == 4 * cache
    assert made("draft").weight_bytes == 4 * sharding.device_bytes(args[0])
    assert made("draft").flops == 4 * work.decode_flops(small, 8, 8)
    length = setup.training.row_length
    targets = min(setup.training.learner.max_targets, length - 1)
    assert made("distill").flops == 3 * work.forward_flops(small, 4, length, targets)
    assert made("draft_prefill").kv_bytes == made("prefill").kv_bytes
    assert made("draft_prefill").flops < made("prefill").flops


def test_bytes_of_pages_that_prefill_and_insert_must_move():
    setup = tiny_setup()
    found, page = aot.programs(setup), 2 * 1 * 16 * 16 * 4  # a page of 16 positions
    kv = lambda name: work.work(name, setup, found[name][1]).kv_bytes
    assert kv("prefill") == 4 * page  # four prompts, whose first chunk fills a page
    assert kv("insert") == 2 * 8 * page  # a page of each slot, read and written


def test_flops_of_kernels():
    """Splash attention by half its squares (2 query heads); the others speak for themselves."""
    call = lambda name, shape, flops, *others: CustomCall(
        name, "tpu_custom_call", (Shape("f32", (2, 512, 128)), shape, *others), flops, "c", 1, ""
    )
    setup, q, kv = tiny_setup(), Shape("bf16", (3, 2, 64, 16)), Shape("bf16", (3, 1, 64, 16))
    square = 3 * 2 * (64 * 64 // 2) * 2 * 16  # of one product: rows, heads, half of T x T, K
    count = lambda *args: work.kernel_flops(call(*args), setup.model, setup.training.layout)
    assert count("splash_mha_fwd_segmented_residuals.4", q, None) == 2 * square
    assert count("splash_mha_dkv_segmented_no_residuals", kv, None, kv) == 4 * square
    dq_by_block = Shape("bf16", (3, 4, 2, 64, 16))
    assert count("splash_mha_dkv_segmented", dq_by_block, None, kv, kv) == 5 * square
    assert count("splash_mha_dq_segmented_no_residuals.2", q, None) == 3 * square
    alone = CustomCall("splash_mha_fwd", "tpu_custom_call", (
        Shape("f32", (512, 128)), Shape("bf16", (2, 64, 16))), None, "c", 1, "")  # a single row
    assert work.kernel_flops(alone, setup.model, setup.training.layout) == 2 * square // 3
    assert count("shard_map.3", q, 77) == 77 and count("shard_map.3", q, None) == 0
    # Two devices with 64 of 128 queries each, and all 128 keys.
    setup = tiny_setup(mesh__train=(1, 1, 1, 2))
    keys = Shape("bf16", (3, 1, 128, 16))
    assert count("splash_mha_fwd_segmented_residuals.4", q, None) == 2 * 2 * square
    assert count("splash_mha_dkv_segmented_no_residuals", keys, None, keys) == 4 * 2 * square


def test_the_roofline_takes_the_slowest_of_three():
    chip = CHIPS["v5e"]
    square = Shape("bf16", (1024, 1024))
    dot = Dot("d", square, (square, square), (square, square), "default", 197 * 10**9, "c", 2, "")
    gather = Collective("g", "all-gather", (square,), 10**9, 4, ("fsdp",), "ici", "c", 4, False, "")
    made = work.roofline(chip, 1, [dot], [gather], 0, Work(0, 819 * 10**6))
    assert made.compute_seconds == pytest.approx(2e-3)
    assert made.memory_seconds == pytest.approx(1e-3)
    assert made.network_seconds == pytest.approx(4 * 0.75e9 / 200e9)
    assert (made.seconds, made.bound) == (made.network_seconds, "network")
    narrow = Shape("s8", (1024, 1024))
    int8 = Dot("d", square, (narrow,) * 2, (narrow,) * 2, "default", 393 * 10**9, "c", 1, "")
    highest = Dot("d", square, (square,) * 2, (square,) * 2, "highest", 197 * 10**9, "c", 1, "")
    seconds = lambda d: work.roofline(chip, 1, [d], [], 0, Work()).compute_seconds
    assert seconds(int8) == pytest.approx(1e-3) and seconds(highest) == pytest.approx(6e-3)
