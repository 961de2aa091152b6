"""Eight devices draw what one draws: the sampler, and an engine whose layers are scanned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import sharding
from jaxrl_tis.aot.hlo import Module
from jaxrl_tis.engine import sampling
from jaxrl_tis.engine.block_manager import KVEviction
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.drafts import Drafts
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.sampling import SamplingRows
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.models import transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from tests.drawn import EDGE, ROWS, keys, logits, short_cumsum

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("the partitioner places the arrays and XLA compiles the programs"),
]

KINDS = [
    SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(top_k=5),
    SamplingParams(top_p=0.8), SamplingParams(min_p=0.1), SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.6, top_k=40, top_p=0.9, min_p=0.01), SamplingParams(top_k=1),
]
FIELDS = ("logp_behav", "logp_raw", "entropy")


# A block of 128 tokens spans all parts of 24; 304 / 2 and 304 / 8 cut blocks; 512 / 2 does not; 301
# is not divided.
@pytest.mark.cases("filtered-304-shape2", "plain-301-shape4")
@pytest.mark.parametrize("v, shape", [
    (24, (1, 1, 8)), (304, (4, 1, 2)), (304, (1, 1, 8)), (512, (2, 2, 2)), (301, (4, 1, 2)),
])
@pytest.mark.parametrize("kinds", [KINDS[:2], KINDS], ids=["plain", "filtered"])
def test_a_split_vocabulary_draws_what_the_whole_one_draws(v, shape, kinds):
    layout = sharding.layout(shape, sharding.SERVE_RULES, vocab_size=v)
    rows = SamplingRows.of([kinds[i % len(kinds)] for i in range(ROWS)])
    ids = np.arange(ROWS, dtype=np.uint32)
    args = logits(v), rows, sampling.row_keys(ids, ids + 7), ids.astype(np.int32)
    whole = jax.jit(sampling.sample)(*args)
    split = jax.jit(functools.partial(sampling.sample, layout=layout))(*args)
    np.testing.assert_array_equal(split.tokens, whole.tokens)
    for field in FIELDS:
        np.testing.assert_allclose(getattr(split, field), getattr(whole, field), atol=2e-6)
    # Other draws exist: the same uniforms on other logits give other tokens.
    other = jax.jit(sampling.sample)(args[0][:, ::-1], *args[1:])
    assert (np.asarray(other.tokens) != np.asarray(whole.tokens)).mean() > 0.5


@pytest.mark.cases("304-shape0-fast")
@pytest.mark.parametrize("v, shape, numerics", [
    (304, (4, 1, 2), "fast"), (304, (1, 1, 8), "fast"), (24, (1, 1, 8), "fast"),
    (1024, (2, 1, 4), "invariant"), (300, (2, 1, 4), "invariant"), (24, (1, 1, 8), "invariant"),
])
def test_the_largest_uniform_draws_the_last_possible_token(v, shape, numerics, monkeypatch):
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape: jnp.full(shape, EDGE))
    monkeypatch.setattr(jnp, "cumsum", short_cumsum)
    layout = sharding.layout(shape, sharding.SERVE_RULES, vocab_size=v)
    supports = [0], [v - 1], [0, v - 1], [1, 2, v // 2], [0, v // 2 - 1], [v // 8, v // 8 + 1]
    supports += [v // 2, v - 4], range(0, v - 5, 3)
    values = np.full((8, v), -np.inf, np.float32)
    for row, support in zip(values, supports, strict=True):
        row[list(support)] = 0.0
    rows = SamplingRows.of([SamplingParams()] * 8)
    for place in (None, layout):
        edge = jax.jit(
            lambda *args, place=place: sampling.sample(*args, place, numerics=numerics))
        drawn = edge(values, rows, keys(8), np.arange(8, dtype=np.int32))
        np.testing.assert_array_equal(drawn.tokens, [max(support) for support in supports])


@pytest.mark.all
@pytest.mark.cases("1024-shape1-invariant")
@pytest.mark.parametrize("v, shape, numerics", [
    (304, (4, 1, 2), "fast"), (1024, (4, 1, 2), "invariant"), (300, (4, 1, 2), "invariant"),
])
def test_rows_of_nan_draw_a_token_of_the_vocabulary(v, shape, numerics):
    layout = sharding.layout(shape, sharding.SERVE_RULES)
    rows, ids = SamplingRows.of([SamplingParams()] * 8), np.arange(8, dtype=np.uint32)
    args = jnp.full((8, v), jnp.nan), rows, sampling.row_keys(ids, ids), ids.astype(np.int32)
    for place in (None, layout):
        draw = functools.partial(sampling.sample, layout=place, numerics=numerics)
        drawn = jax.jit(draw)(*args)
        assert not drawn.tokens.any() and np.isnan(drawn.logp_behav).all()


CONFIG = ModelConfig(
    family="qwen2", vocab_size=300, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=48, rope=RopeConfig("default", 10000.0), max_position=64, norm_eps=1e-6,
    qkv_bias=True, qk_norm=False, tie_embeddings=True,
)


def engine_of(layout, **options):
    params = jax.tree.map(lambda x: 2 * x, transformer.init(CONFIG, jax.random.key(0)))
    sizes = dict(slots=8, max_length=24, steps=3, prefill_batch=4, unroll=False) | options
    engine = Engine(CONFIG, EngineConfig(**sizes), layout)
    return engine, engine.load(params)


def trajectories(layout, longest=5, retention=None, drafts=None, **options):
    engine = engine_of(layout, **options)
    scheduler, out = Scheduler(*engine, retention=retention, drafts=drafts), []
    for i in range(20):
        prompt = np.arange(1 + i % longest, dtype=np.int32) + i
        sampled = SamplingParams(top_k=(0, 9)[i % 2], max_tokens=4 + i % 6)
        scheduler.add(Request(f"r{i}", prompt, i, sampled))
    while scheduler.pending:
        out += scheduler.step()
    return {t.id: t for t in out}


@pytest.mark.all
@pytest.mark.parametrize("quantization", ["none", "w8a8"])
def test_scanned_layers_on_eight_devices_draw_what_one_device_draws(quantization):
    """In int8 an activation may by chance lie so near to the middle of two codes that sums over
    devices, which round differently, move it: its sequence changes from that token on."""
    layout = sharding.layout((4, 1, 2), sharding.SERVE_RULES)
    near = num_near(*(trajectories(x, quantization=quantization) for x in (None, layout)))
    assert near >= (20 if quantization == "none" else 19)


def num_near(single, spread):
    assert len(single) == len(spread) == 20

    def is_near(a, b):
        gaps = (getattr(a, field) - getattr(b, field) for field in FIELDS)
        return np.array_equal(a.tokens, b.tokens) and max(np.abs(g).max() for g in gaps) < 5e-5

    return sum(is_near(t, spread[id]) for id, t in single.items())


LONG = dict(max_length=40, page_size=8, prefill_chunk=8, cache_dtype="int8")


@pytest.mark.all
@pytest.mark.parametrize("options", [
    {}, {"max_draft": 3, "drafts": Drafts(1, 3, free_batch_rows=9)},
    {"unroll": True, "retention": KVEviction(1, 1)},
], ids=["plain", "drafts", "retention"])
def test_devices_that_share_the_positions_of_pages_draw_what_one_device_draws(options):
    """Prompts of up to 19 tokens in chunks of a page, int8 keys. Two positions of a page on each of
    four devices. The KV cache rounds an activation near the middle of two codes either way."""
    layout = sharding.layout((1, 1, 2, 4), sharding.SERVE_RULES)
    one, many = (trajectories(x, 19, **LONG, **options) for x in (None, layout))
    assert num_near(one, many) >= 19


@pytest.mark.all
def test_no_keys_are_gathered_where_devices_share_positions():
    """A decode step sums over the devices of a page; it gathers nothing over them."""
    layout = sharding.layout((1, 1, 2, 4), sharding.SERVE_RULES)
    engine, _ = engine_of(layout, **LONG)
    for name in ("prefill", "decode"):
        function, args = engine.programs()[name]
        text = function.lower(*args).compile().as_text()
        found = [c for c in Module(text).collectives(dict(layout.mesh.shape)) if "context" in c.axes]
        assert found and {c.kind for c in found} == {"all-reduce"}, name


def test_settings_that_do_not_fit_shared_positions_are_refused():
    layout = sharding.layout((1, 1, 1, 4), sharding.SERVE_RULES)
    for changes, why in (
        (dict(page_size=6), "engine.page_size = 6 positions cannot be cut into the 4 context shards"),
        (dict(unroll=True, weighs_pages=True), "not with context shards"),
        (dict(page_size=128, numerics="invariant"), "4 context shards; use 1"),
    ):
        with pytest.raises(ValueError, match=why):
            Engine(CONFIG, EngineConfig(slots=8, max_length=24, **changes), layout)
