"""Rules, legal degrees, and one run's numbers on eight devices beside one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_tis import models, sharding, train
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.learner.scoring import Learner, make_score
from jaxrl_tis.learner.state import abstract_state, initial_params, initial_state
from jaxrl_tis.learner.trainer import Trainer
from jaxrl_tis.models import placement, transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from jaxrl_tis.models.quant import QuantArray
from jaxrl_tis.rollouts.groups import Sample
from jaxrl_tis.rollouts.source import generate
from tests import tiny

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("the partitioner places the arrays and XLA compiles the programs"),
]

CONFIG = ModelConfig(
    family="qwen2", vocab_size=24, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=48, rope=RopeConfig("default", 10000.0), max_position=64, norm_eps=1e-6,
    qkv_bias=True, qk_norm=False, tie_embeddings=False,
)


@pytest.mark.parametrize("shape, expected", [
    ((2, 2, 2), (2, 2, 2, 1)), ((-1, 2, 2), (2, 2, 2, 1)), ((1, -1, 2), (1, 4, 2, 1)),
    ((1, 1, -1), (1, 1, 8, 1)), ((1, 2, 1, 4), (1, 2, 1, 4)), ((1, 1, 2, -1), (1, 1, 2, 4)),
])
def test_mesh_shapes(shape, expected):
    mesh = sharding.make_mesh(shape)
    assert tuple(mesh.shape[a] for a in ("data", "fsdp", "tensor", "context")) == expected


@pytest.mark.parametrize("shape", [(3, -1, 1), (2, 2, 4), (-1, -1, 1), (1, -1, 16)])
def test_a_mesh_that_does_not_fit_names_the_shape_and_the_devices(shape):
    message = rf"'data': {shape[0]}, 'fsdp': {shape[1]}, 'tensor': {shape[2]}.* 8 devices"
    with pytest.raises(ValueError, match=message):
        sharding.make_mesh(shape)


def test_rows_are_cut_along_data_and_fsdp():
    shards = lambda *shape: sharding.layout(shape, sharding.TRAIN_RULES).shards
    assert (shards(2, 2, 2), shards(1, 4, 2), shards(4, 1, 2), shards(1, 1, 8)) == (4, 4, 4, 1)


@pytest.mark.all
@pytest.mark.parametrize("spec", [
    P(), P("data"), P("tensor"), P(None, "tensor"), P(("data", "tensor"), None), P("tensor", "data"),
])
@pytest.mark.parametrize("before", [P("fsdp"), P(None, "fsdp"), P("tensor", "fsdp"), P()])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_arrays_go_to_other_devices_and_never_through_the_host(before, spec, dtype):
    devices = jax.devices()
    old, new = sharding.make_mesh((1, 2, 2), devices[:4]), sharding.make_mesh((2, 1, 2), devices[4:])
    expected = np.arange(12 * 8, dtype=np.float32).reshape(12, 8).astype(dtype)
    x = jax.device_put(expected, jax.sharding.NamedSharding(old, before))
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        found = sharding.moved(x, jax.sharding.NamedSharding(new, spec))
    assert found.sharding == jax.sharding.NamedSharding(new, spec)
    assert [s.device for s in found.addressable_shards] == devices[4:]
    np.testing.assert_array_equal(np.asarray(found), expected)
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])


def test_partition_spec():
    weight = sharding.partition_spec(("embed", "heads"), sharding.TRAIN_RULES)
    assert weight == P(("fsdp", "expert"), "tensor")
    assert sharding.partition_spec(("embed", "heads"), sharding.SERVE_RULES) == P(None, "tensor")
    rows = sharding.partition_spec((None, "batch"), sharding.TRAIN_RULES)
    assert rows == P(None, ("data", "fsdp", "expert"))
    experts = sharding.partition_spec(("expert", "expert_embed", "mlp"), sharding.TRAIN_RULES)
    assert experts == P("expert", "fsdp", "tensor")
    with pytest.raises(ValueError, match=r"\['experts'\] have no rule; known are .*'mlp'"):
        sharding.partition_spec(("embed", "experts"), sharding.TRAIN_RULES)
    with pytest.raises(ValueError, match="use a mesh axis twice"):
        sharding.partition_spec(("heads", "mlp"), sharding.TRAIN_RULES)
    with pytest.raises(ValueError, match="use a mesh axis twice"):
        sharding.partition_spec(("batch", "embed"), sharding.TRAIN_RULES)


@pytest.mark.parametrize("vocab_size, axis", [(24, "tensor"), (25, None)])
def test_a_vocabulary_that_does_not_divide_is_stored_whole(vocab_size, axis):
    layout = sharding.layout((2, 2, 2), sharding.TRAIN_RULES, vocab_size=vocab_size)
    assert dict(layout.rules)["vocab"] == axis


@functools.cache
def params():
    return jax.device_get(transformer.init(CONFIG, jax.random.key(0)))


def local_shape(array):
    return array.addressable_shards[0].data.shape


def test_every_device_holds_its_part_only():
    layout = sharding.layout((1, 4, 2), sharding.TRAIN_RULES)
    placed = placement.put(params(), layout, CONFIG)
    layers = placed["layers"]
    assert local_shape(placed["embed"]) == (12, 8)  # vocab / 2 x embed / 4
    assert local_shape(placed["head"]) == (8, 12)
    assert local_shape(layers["q"]) == (2, 8, 16)
    assert local_shape(layers["k"]) == (2, 8, 8)
    assert local_shape(layers["o"]) == (2, 16, 8)
    assert local_shape(layers["down"]) == (2, 24, 8)
    assert local_shape(layers["q_bias"]) == (2, 16)
    total = sum(x.nbytes for x in jax.tree.leaves(placed))
    first = jax.devices()[0]
    held = sum(
        s.data.nbytes for x in jax.tree.leaves(placed) for s in x.addressable_shards
        if s.device == first
    )
    assert held < 0.16 * total  # 1/8, and the replicated norms and halved biases


@pytest.mark.all
def test_tensor_parallel_differences_are_smaller_in_float16_than_in_bfloat16():
    """Ten bits of mantissa for seven: 8 times per rounding, 64 times in squares; 6.9 and 50 times were
    seen with residual MLPs (arXiv:2510.26788 has up to 24 times beside another engine)."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 24, (16, 32)).astype(np.int32)
    rows = {
        "tokens": tokens, "positions": np.tile(np.arange(32, dtype=np.int32), (16, 1)),
        "segment_ids": np.ones_like(tokens), "mask": np.tile(np.arange(32) > 0, (16, 1)),
        "temperature": np.ones((16, 32), np.float32),
    }

    def scored(dtype, degree):
        layout = sharding.layout((1, 1, degree), sharding.TRAIN_RULES, devices=jax.devices()[:degree])
        program = transformer.Program(dtype=dtype, layout=layout)
        score = make_score(Learner(CONFIG, program, max_targets=31, chunk=64))
        micro = layout.put_batch({name: x[None] for name, x in rows.items()})
        return np.asarray(score(placement.put(params(), layout, CONFIG), micro)["logp"], np.float64)

    def gap(dtype):
        d = (scored(dtype, 1) - scored(dtype, 2))[0][rows["mask"]]
        return np.abs(d).mean(), np.mean(np.expm1(d) - d)

    (mean, k3), (mean_half, k3_half) = gap("bfloat16"), gap("float16")
    assert mean_half > 0
    assert mean / mean_half > 4 and k3 / k3_half > 16


@pytest.mark.all
def test_serving_parameters_are_int8_split_over_tensor_and_whole_along_data():
    train_layout = sharding.layout((1, 4, 2), sharding.TRAIN_RULES)
    serve_layout = sharding.layout((4, 1, 2), sharding.SERVE_RULES)
    engine = Engine(CONFIG, EngineConfig(
        slots=8, max_length=16, quantization="w8a8", unroll=False,
    ), serve_layout)
    served = engine.load(placement.put(params(), train_layout, CONFIG))
    for name, shape in {"q": (2, 32, 16), "v": (2, 32, 8), "o": (2, 16, 32), "up": (2, 32, 24),
                        "down": (2, 24, 32)}.items():
        weight = served["layers"][name]
        assert isinstance(weight, QuantArray) and weight.q.dtype == jnp.int8
        assert local_shape(weight.q) == shape, name
        assert len({str(s.index) for s in weight.q.addressable_shards}) == 2, name
    assert served["embed"].sharding.spec == P("tensor", None)
    # Quantised as one device would: the scale of an output channel sees all of its inputs.
    alone = Engine(CONFIG, EngineConfig(slots=8, max_length=16, quantization="w8a8", unroll=False))
    for name, weight in alone.load(params())["layers"].items():
        if isinstance(weight, QuantArray):
            np.testing.assert_array_equal(served["layers"][name].q, weight.q, err_msg=name)


def test_the_cache_is_split_over_slots_and_heads():
    layout = sharding.layout((4, 1, 2), sharding.SERVE_RULES)
    for unroll in (False, True):
        engine = Engine(CONFIG, EngineConfig(slots=8, max_length=16, unroll=unroll), layout)
        for leaf in jax.tree.leaves(engine.init_state().cache):
            # pages of two slots and two more, kv heads / 2, a page's positions, head (of key and
            # value if the layers are stacked)
            assert local_shape(leaf)[-4:] == (4, 1, 16, 8 if unroll else 16)


# Sums over devices


@pytest.mark.parametrize("shape", [(2, 4, 1), (3, 1, 2), (1, 1, 8)])
def test_gradients_of_parts_are_added_two_by_two_in_the_order_of_the_rows(shape):
    """One row a part: the gradient of sum(p * row) is a sum of the rows, and its bits tell the
    order."""
    layout = sharding.layout(shape, sharding.TRAIN_RULES)
    rows = np.random.default_rng(0).standard_normal((layout.shards, 1000)).astype(np.float32)
    total = lambda p: jnp.sum(layout.by_parts(lambda p, part: p[None] * part, p, rows))
    found = jax.jit(jax.grad(total))(jnp.ones(1000))
    r = list(rows)
    expected = {
        8: lambda: ((r[0] + r[4]) + (r[2] + r[6])) + ((r[1] + r[5]) + (r[3] + r[7])),
        3: lambda: (r[0] + r[1]) + r[2],
        1: lambda: r[0],
    }[layout.shards]()
    np.testing.assert_array_equal(found, expected)
    if layout.shards == 8:
        assert (functools.reduce(np.add, r) != expected).any()


def test_parts_see_a_layout_that_does_not_cut_rows():
    inside = sharding.layout((2, 2, 2), sharding.TRAIN_RULES).inside()
    assert inside.sharding(("batch", "mlp")).spec == P(None, "tensor")
    assert inside.sharding(("embed", "mlp")).spec == P(None, "tensor")
    assert sharding.layout((2, 4, 1), sharding.TRAIN_RULES).inside() is None


def test_what_every_device_computes_has_its_gradient_and_metrics():
    layout = sharding.layout((2, 4, 1), sharding.TRAIN_RULES)
    x = layout.put(np.arange(16, dtype=np.float32).reshape(8, 2), ("batch", None))
    f = layout.everywhere(lambda made, given: (jnp.sum(made**2 * given), {"mean": jnp.mean(made)}))
    (value, metrics), gradient = jax.jit(jax.value_and_grad(f, has_aux=True))(x, jnp.float32(0.5))
    assert (float(value), float(metrics["mean"])) == (620, 7.5)  # 0.5 * 15 * 16 * 31 / 6
    np.testing.assert_array_equal(gradient, np.asarray(x))


# The same two updates on one device and on eight

CRITIC = dict(correction__kl_coeff=0.1, correction__advantage="gae", train__epochs=2)


def overrides(folder, vocab_size, **others):
    """Of the tiny config: a checkpoint of CONFIG's kind on disk."""
    config = dataclasses.replace(CONFIG, vocab_size=vocab_size)
    models.save(folder, config, jax.device_get(transformer.init(config, jax.random.key(0))))
    return dict(
        model__path=str(folder), engine__quantization="none", train__microbatch_rows=8,
        train__minibatches=1, **others,
    )


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    return overrides(tmp_path_factory.mktemp("model") / "qwen2", CONFIG.vocab_size, **CRITIC)


SPREAD = dict(mesh__train=(1, 4, 2), mesh__serve=(4, 1, 2))


def sample(setup, policy_params, version):
    """Trajectories of 8 prompts with two samples each, and the learner's log-prob request."""
    sampling = SamplingParams(max_tokens=3, stop_ids=(2,))
    prompts = [np.array([1, 3 + i, 13, 4, 15], np.int32) for i in range(8)]
    requests = [
        Request(f"{version}/{i}/{g}", p, 0, sampling) for i, p in enumerate(prompts) for g in (0, 1)
    ]
    engine = setup.engine
    return generate(Scheduler(engine, engine.load(policy_params), version), requests)


def two_updates(setup):
    state = initial_state(setup.training, initial_params(setup.training))
    trainer, out = Trainer(setup.training), []
    for step in (1, 2):
        trajectories = sample(setup, state["policy"].params, step - 1)
        samples = [
            Sample(t, {}, "", 0.0, float(i % 3 + len(t.tokens) / 4), i // 2)
            for i, t in enumerate(trajectories)
        ]
        rows = trainer.score(state, samples, {step - 1: state["policy"].params})
        state, rows, metrics = trainer.update(state, rows, step, step - 1)
        out.append((trajectories, rows, metrics))
    return out, state


@pytest.mark.parametrize("vocab_size, others, in_order", [
    (24, CRITIC, True),
    # The tensor shards do not divide 25.
    pytest.param(
        25, {"train__epochs": 1, "correction__preset": "centered_tis_2"}, False,
        marks=pytest.mark.all,
    ),
    # Prompts in two micro-batches.
    pytest.param(
        24, CRITIC | {"correction__aggregation": "prompt-mean"}, True, marks=pytest.mark.all,
    ),
])
def test_eight_devices_give_the_numbers_of_one(vocab_size, others, in_order, tmp_path, monkeypatch):
    """Policy, critic and reference, with sums in order; and, as on a TPU, where XLA adds the gradients
    up, the policy by an update that scores its batch, with centred scores, where each shard holds the
    whole head."""
    if not in_order:
        monkeypatch.setattr(Learner, "sums_in_order", False)
    fields = overrides(tmp_path / "qwen2", vocab_size, **others)
    spread, spread_state = two_updates(train.build(tiny.config(**fields, **SPREAD)))
    single, single_state = two_updates(tiny.setup(**fields))
    assert len(spread_state["policy"].params["layers"]["q"].sharding.device_set) == 8
    assert local_shape(spread_state["policy"].params["layers"]["q"]) == (2, 8, 16)
    extra = ("logp_ref", "values") if "correction__advantage" in others else ()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    for of_eight, of_one in zip(spread, single, strict=True):
        (ours, rows, metrics), (theirs, expected_rows, expected) = of_eight, of_one
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            for name in ("logp_behav", "logp_raw", "entropy"):
                close(getattr(a, name), getattr(b, name), err_msg=name)
        for name in ("logp_old", "entropy", *extra):
            close(rows[name], expected_rows[name], err_msg=name)
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            close(metrics[name], value, err_msg=name)
    if extra:
        assert max(abs(spread[1][1]["logp_old"] - spread[1][1]["logp_ref"]).ravel()) > 1e-2
    ours = spread_state["policy"].params
    for path, leaf in jax.tree_util.tree_leaves_with_path(single_state["policy"].params):
        same = functools.reduce(lambda node, key: node[key.key], path, ours)
        close(np.asarray(same), np.asarray(leaf), err_msg=str(path))


def test_moments_are_split_like_their_parameters(fields):
    setup = train.build(tiny.config(**fields, **SPREAD))
    state = abstract_state(setup.training)
    for network in (state["policy"].params, state["critic"].params["decoder"], state["reference"]):
        assert network["layers"]["q"].sharding.shard_shape((2, 32, 32)) == (2, 8, 16)
    for network in (state["policy"], state["critic"]):
        moments = [
            leaf for path, leaf in jax.tree_util.tree_leaves_with_path(network.opt_state)
            if jax.tree_util.keystr(path).endswith("['embed']")
        ]
        assert [m.sharding.shard_shape(m.shape) for m in moments] == [(12, 8)] * 2
