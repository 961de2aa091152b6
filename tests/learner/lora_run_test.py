"""Runs with LoRA: what is trained, saved, shared and sent; and that the sampler has the adapter."""

import contextlib
import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_tis import build, sharding
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.weights import sent
from jaxrl_tis.learner.state import (
    initial_params, initial_policy, initial_state, keep_base, policy, read_base, read_params,
    starting_factors,
)
from jaxrl_tis.learner.trainer import Trainer
from jaxrl_tis.models import lora, peft, placement, transformer
from jaxrl_tis.record.checkpoint import Checkpoints
from jaxrl_tis.rollouts.source import generate
from jaxrl_tis.runtime import fingerprint
from tests import tiny
from tests.learner.trainer_test import fake_samples

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.by_jax("a run: flax, optax, orbax and XLA together"),
]

LORA = dict(model__lora="lora(rank=4, alpha=32)", optimizer__lr=3e-2)
SHORT = dict(train__epochs=1, train__minibatches=1, eval__every=8, warmup__steps=2)


def begun(**overrides):
    setup = tiny.setup(**LORA, **overrides)
    with tiny.one_device():
        trainer = Trainer(setup.training)
    return setup, trainer, initial_state(setup.training, initial_params(setup.training))


def updated(setup, trainer, state, step=1):
    params = policy(setup.training, state)
    rows = trainer.score(state, fake_samples(), {0: params})
    return trainer.update(state, rows, step, 0)


def test_an_update_moves_the_factors_and_no_bit_of_the_base():
    """Policy, critic and reference share one base. The optimizer knows factors alone."""
    setup, trainer, state = begun(correction__kl_coeff=0.1, correction__advantage="gae")
    assert set(state) == {"policy", "critic", "base"}
    base = jax.tree.map(np.array, state["base"])
    first = jax.tree.map(np.array, state["policy"].params)
    moments = jax.tree.leaves(state["policy"].opt_state)
    most = max(x.size for x in jax.tree.leaves(first))
    assert max(x.size for x in moments) == most
    held = state["base"]
    state, rows, metrics = updated(setup, trainer, state)
    assert lora.is_same(state["base"], held)  # not donated, not copied
    jax.tree.map(np.testing.assert_array_equal, state["base"], base)
    assert metrics["actor/grad_norm"] > 0 and metrics["critic/grad_norm"] > 0
    moved = jax.tree.map(lambda a, b: np.any(a != b), state["policy"].params, first)
    assert all(x["b"] for x in moved["layers"].values())
    # A fresh adapter is its base: the KL with the reference starts at 0.
    np.testing.assert_array_equal(rows["logp_ref"], rows["logp_prox"])
    rows = trainer.score(state, fake_samples(), {0: policy(setup.training, state)})
    assert np.abs(rows["logp_ref"] - rows["logp_prox"])[rows["mask"]].max() > 1e-4
    state, *_ = updated(setup, trainer, state, 2)
    compiled = trainer._train_step._cache_size()
    updated(setup, trainer, state, 3)
    assert trainer._train_step._cache_size() == compiled


@pytest.mark.all
def test_a_packed_update_is_that_of_rows_alone():
    norms = []
    for pack in (0, 24):
        setup, trainer, state = begun(
            train__pack_length=pack, train__epochs=1, train__minibatches=1, model__remat="full"
        )
        state, _, metrics = updated(setup, trainer, state)
        norms.append((metrics["actor/grad_norm"], np.array(state["policy"].params["layers"]["q"]["b"])))
    assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-4)
    np.testing.assert_allclose(norms[0][1], norms[1][1], rtol=0, atol=1e-4)


@pytest.mark.cases("none")
@pytest.mark.parametrize("scheme", ["none", "w8a16"])
def test_the_sampler_has_the_new_adapter_and_the_same_base(scheme):
    """After an update the sampler's logits have moved and are the learner's; the quantised base is
    the same arrays; a send leaves the learner's arrays as they were."""
    setup, trainer, state = begun(engine__quantization=scheme, model__quantization=scheme)
    params = policy(setup.training, state)
    before = setup.engine.load(params)
    state, *_ = updated(setup, trainer, state)
    params = policy(setup.training, state)
    kept = jax.tree.map(np.array, params)
    after = setup.engine.load(params)
    jax.tree.map(np.testing.assert_array_equal, params, kept)
    assert lora.is_same(lora.split(before)[1], lora.split(after)[1])
    tokens = jnp.arange(8).reshape(1, 8) % setup.model.vocab_size
    program = dataclasses.replace(setup.engine.program, layout=None)
    of = lambda params, program: transformer.logits(params, setup.model, tokens, program=program)
    learner = dataclasses.replace(setup.training.learner.program, layout=None)
    sampled, learned = of(after, program), of(params, learner)
    np.testing.assert_allclose(sampled, learned, rtol=0, atol=2e-5)
    assert np.abs(sampled - of(before, program)).max() > 1e-3
    moved = sum(x.nbytes for x in jax.tree.leaves(sent(after)))
    assert moved == sum(x.nbytes for x in jax.tree.leaves(state["policy"].params))
    assert moved < 0.5 * sum(x.nbytes for x in jax.tree.leaves(after))


@pytest.mark.all
def test_fifty_syncs_keep_one_base_and_one_version():
    setup, _, state = begun(engine__quantization="w8a8")
    params = policy(setup.training, state)
    factors, base = lora.split(params)
    counts = []
    for _ in range(50):
        factors = jax.tree.map(lambda x: x + 1e-3, factors)
        served = setup.engine.load(setup.training.adapter.join(base, factors))
        counts.append(len(jax.live_arrays()))
    assert counts[10] == counts[-1]
    del served


def test_a_second_sampler_receives_the_base_once():
    setup, trainer, state = begun()
    served = setup.engine.load(policy(setup.training, state))
    first = setup.learner_engine.receive(served)
    again = setup.learner_engine.receive(served)
    assert lora.is_same(lora.split(first)[1], lora.split(again)[1])
    jax.tree.map(np.testing.assert_array_equal, served, again)


@pytest.mark.all
def test_an_interrupted_run_continues_to_the_same_factors(tmp_path):
    changes = LORA | SHORT
    tiny.run(tmp_path / "whole", steps=4, **changes)
    tiny.run(tmp_path / "parts", steps=2, **changes)
    tiny.run(tmp_path / "parts", steps=4, change=("steps",), **changes)
    of_train = lambda name: [x for x in tiny.lines(tmp_path / name) if x["phase"] == "train"]
    names = ("actor/grad_norm", "reward/mean", "training/rollout_probs_diff_mean")
    whole, parts = ([[x[n] for n in names] for x in of_train(n)] for n in ("whole", "parts"))
    assert whole == parts and len(whole) == 4
    setup = tiny.setup(steps=4, **changes)
    read = [read_params(setup.training, str(tmp_path / name)) for name in ("whole", "parts")]
    jax.tree.map(np.testing.assert_array_equal, *read)
    assert np.any(read[0]["layers"]["q"].b)
    # A checkpoint holds factors alone; the base is beside it, once.
    saved = json.loads((tmp_path / "whole" / "checkpoints" / "4" / "meta" / "metadata").read_text())
    names = saved["leaves"]
    assert not any(".embed" in name or "'embed'" in name for name in names) and names
    with Checkpoints(tmp_path / "whole" / "base", keep=1) as checkpoints:
        assert checkpoints.steps() == [0]


def test_a_start_that_saved_no_state_leaves_no_base(tmp_path):
    setup, _, state = begun()
    keep_base(setup.training, state, str(tmp_path))
    other = state | {"base": jax.tree.map(lambda x: x + 1, state["base"])}
    keep_base(setup.training, other, str(tmp_path))
    jax.tree.map(
        np.testing.assert_array_equal, read_base(setup.training, str(tmp_path)), other["base"])


@pytest.mark.cases("schedule0")
@pytest.mark.parametrize("schedule", [
    dict(rollout__schedule="areal(staleness=1)"),
    dict(rollout__schedule="in_flight(staleness=2)", rollout__old_logp_source="replica"),
    dict(rollout__schedule="one_step", rollout__old_logp_source="ewma"),
])
def test_runs_with_stale_samples(tmp_path, schedule):
    tiny.run(tmp_path / "run", steps=3, **LORA, **SHORT, **schedule)
    lines = [x for x in tiny.lines(tmp_path / "run") if x["phase"] == "train"]
    assert len(lines) == 3 and all(np.isfinite(x["actor/grad_norm"]) for x in lines)
    if schedule.get("rollout__old_logp_source") != "ewma":
        assert max(x["training/rollout_probs_diff_max"] for x in lines) < 0.05


@pytest.mark.all
def test_factors_on_a_mesh_are_whole_ones():
    setup, trainer, state = begun(model__tie_embeddings=False)
    state, *_ = updated(setup, trainer, state)
    params = policy(setup.training, state)
    tokens = jnp.arange(32).reshape(4, 8) % setup.model.vocab_size
    whole = transformer.logits(params, setup.model, tokens)
    layout = sharding.layout(
        (1, 4, 1), sharding.TRAIN_RULES, jax.devices()[:4], setup.model.vocab_size
    )
    put = placement.put(params, layout, setup.model)
    parts = {name: x.addressable_shards[0].data.shape for name, x in (
        ("a of q", put["layers"]["q"].a), ("b of o", put["layers"]["o"].b)
    )}
    assert parts == {"a of q": (1, 8, 4), "b of o": (1, 4, 8)}  # a quarter of the width, 32
    program = transformer.Program(layout=layout)
    cut = jax.jit(lambda p, t: transformer.logits(p, setup.model, t, program=program))(put, tokens)
    np.testing.assert_allclose(cut, whole, rtol=0, atol=1e-4)


STARTED = LORA | dict(warmup__steps=0)


def saved_adapter(folder):
    """Writes an adapter with moved factors; returns (its factors, the base that it was moved on)."""
    setup, _, state = begun(warmup__steps=0)
    moved = jax.tree.map(lambda x: np.asarray(x) + 0.05, state["policy"].params)
    peft.save(folder, setup.training.adapter, moved)
    return moved, state["base"]


def test_a_run_starts_from_an_adapter(tmp_path):
    """Policy and sampler have it; the base, which is the reference, and the critic do not."""
    factors, base = saved_adapter(tmp_path / "adapter")
    changes = STARTED | dict(correction__advantage="gae", model__adapter=str(tmp_path / "adapter"))
    training = tiny.setup(**changes).training
    state = initial_state(training, initial_params(training))
    jax.tree.map(np.testing.assert_array_equal, state["policy"].params, factors)
    jax.tree.map(np.testing.assert_array_equal, state["base"], base)
    assert not any(np.any(x["b"]) for x in state["critic"].params["decoder"]["layers"].values())
    jax.tree.map(np.testing.assert_array_equal, lora.split(initial_policy(training))[0], factors)
    shutil.rmtree(tmp_path / "adapter")
    build.build_sampling(tiny.config(**changes))  # a rollout worker needs no folder


@pytest.mark.all
def test_a_run_that_started_from_an_adapter_continues_without_its_folder(tmp_path):
    folder = tmp_path / "adapter"
    factors, _ = saved_adapter(folder)
    changes = STARTED | SHORT | dict(warmup__steps=0, model__adapter=str(folder))
    tiny.run(tmp_path / "run", steps=1, **changes | dict(optimizer__lr=0.0))
    read = lambda: read_params(tiny.setup(**changes).training, str(tmp_path / "run"))
    jax.tree.map(np.testing.assert_array_equal, lora.split(read())[0], factors)
    shutil.rmtree(folder)
    tiny.run(tmp_path / "run", steps=2, change=("steps", "optimizer.lr"), **changes)
    assert len([x for x in tiny.lines(tmp_path / "run") if x["phase"] == "train"]) == 2
    assert np.any(lora.split(read())[0]["layers"]["q"]["b"] != factors["layers"]["q"]["b"])
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert config["model"]["adapter"] == str(folder)


@pytest.mark.parametrize("text, named", [
    ("lora(rank=8, alpha=64)", "has rank 4 at down, and model.lora = 'lora.rank=8, alpha=64.' has 8 there"),
    ("lora(rank=4, alpha=16)", "has s = alpha / rank 8 at down, and model.lora = .* has 4 there"),
    ("lora(rank=4, alpha=32, targets='q,v')",
     "adapts down, gate, k, o, q, up, v, and model.lora = .* adapts q, v; set its targets to 'down,gate,"),
])
def test_an_adapter_that_does_not_agree_with_the_config(tmp_path, text, named):
    saved_adapter(tmp_path / "adapter")
    training = tiny.setup(
        **STARTED | dict(model__lora=text, model__adapter=str(tmp_path / "adapter"))
    ).training
    with pytest.raises(ValueError, match=named):
        starting_factors(training)


def test_an_adapter_of_some_ranks_cannot_start_a_run(tmp_path):
    """As one of some layers: the others would have factors of zeros, which have no gradient."""
    setup, _, state = begun(warmup__steps=0)
    factors = jax.tree.map(np.array, state["policy"].params)
    factors["layers"]["q"]["a"][..., 1:] = 0  # B is zero in a fresh adapter
    peft.save(tmp_path / "adapter", setup.training.adapter, factors)
    training = tiny.setup(**STARTED | dict(model__adapter=str(tmp_path / "adapter"))).training
    with pytest.raises(ValueError, match="lacks 3 of the 4 ranks of layers.q, all layers together"):
        starting_factors(training)


@pytest.mark.parametrize("field, value, named", [
    ("model__adapter", "a", "model.adapter = 'a' was trained beside its base, which warmup.steps = 12"),
    ("model__uaq_scale", 1.5, "model.uaq_scale = 1.5 scales it; set it to 1"),
    ("optimizer__weight_decay", 0.1, "optimizer.weight_decay = 0.1 decays weights; set it to 0"),
    ("engine__noise_start", 0.1, "engine.noise_start = 0.1 adds noise"),
    ("model__lora", "lora(rank=0)", "rank=0 must be"),
    ("model__lora", "lora(rank=64)", "rank 64, and"),
    ("model__lora", "lora(rank=4, targets='head')", "the model's head is its embedding"),
    ("model__lora", "lora(dropout=0.1)", "no parameter 'dropout'"),
])
def test_settings_that_cannot_be(field, value, named):
    with pytest.raises(ValueError, match=named):
        tiny.setup(**LORA | {field: value})


def after_an_update(**overrides):
    """Returns (norm of the gradient, the trained factors, the sampler's logits) on some mesh."""
    setup, trainer, state = begun(
        model__num_kv_heads=2, train__epochs=1, train__minibatches=1, **overrides
    )
    state, _, metrics = updated(setup, trainer, state)
    served = setup.engine.load(policy(setup.training, state))
    assert setup.engine.factor_digest(policy(setup.training, state)) == fingerprint.hex(
        fingerprint.digest(sent(served)[0])
    )
    tokens = setup.engine.layout.put(np.arange(64, dtype=np.int32).reshape(8, 8) % 12, ("batch", None))
    logits = jax.jit(lambda p, t: transformer.logits(p, setup.model, t, program=setup.engine.program))
    factors = jax.tree.map(np.asarray, state["policy"].params)
    return metrics["actor/grad_norm"], factors, np.asarray(logits(served, tokens))


EXPERTS = dict(model__num_experts=4, model__expert_dim=16)


@pytest.mark.all
@pytest.mark.parametrize("meshes, changes", [
    (dict(mesh__train=(1, 4, 2), mesh__serve=(4, 1, 2)), {}),
    (dict(mesh__train=(1, 2, 2, 1, 2), mesh__serve=(1, 1, 2, 1, 2)), EXPERTS),
    (dict(mesh__train=(1, 1, 1, 1, 4), mesh__serve=(1, 1, 1, 1, 4)), EXPERTS),
], ids=["fsdp and tensor", "fsdp, tensor and experts", "experts"])
def test_an_update_on_a_mesh_is_that_of_one_device(meshes, changes):
    rows = dict(train__microbatch_rows=8, engine__quantization="none")
    alone, cut = after_an_update(**changes, **rows), after_an_update(**changes, **meshes, **rows)
    assert cut[0] == pytest.approx(alone[0], rel=1e-4)
    for a, b in zip(*map(jax.tree.leaves, (cut[1], alone[1])), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)
    np.testing.assert_allclose(cut[2], alone[2], rtol=0, atol=1e-3)


@pytest.mark.all
def test_cached_keys_are_dropped_with_the_adapter_that_made_them():
    """The same prompt before and after the factors change: as in an engine that never had others."""
    setup, _, state = begun(task__max_prompt_tokens=48)
    params = policy(setup.training, state)
    factors, base = lora.split(params)
    other = setup.training.adapter.join(base, jax.tree.map(lambda x: x + 0.05, factors))
    prompt = np.arange(40, dtype=np.int32) % 9 + 3

    def drawn(scheduler):
        sampling = SamplingParams(temperature=1.0, max_tokens=4)
        [record] = generate(scheduler, [Request("a", prompt, 5, sampling)])
        return record.logp_behav, scheduler.stats.cached

    with contextlib.closing(setup.scheduler(setup.engine, setup.engine.load(params), 0)) as used:
        first, _ = drawn(used)
        again, cached = drawn(used)
        assert cached >= 32, "two pages of the prompt"
        np.testing.assert_allclose(again, first, atol=1e-5)
        used.set_params(setup.engine.load(other), 1)
        found, after = drawn(used)
    with contextlib.closing(setup.scheduler(setup.engine, setup.engine.load(other), 1)) as fresh:
        expected, _ = drawn(fresh)
    assert after == cached and np.abs(expected - first).max() > 1e-3
    np.testing.assert_array_equal(found, expected)
