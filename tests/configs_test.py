"""Every shipped config builds, and the two large ones hold together in shape, without weights."""

import importlib
import json
import math
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jaxrl_tis import train
from jaxrl_tis.aot.chips import TOPOLOGIES, WORKERS, Topology
from jaxrl_tis.engine.protocol import Chunk, Insertion
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.learner import correction
from jaxrl_tis.learner.scoring import make_score, make_values
from jaxrl_tis.learner.state import abstract_state, initial_params
from jaxrl_tis.learner.step import make_critic_step, make_train_step
from jaxrl_tis.models import quant, transformer
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.models.quant import QuantArray
from jaxrl_tis.rollouts.prompts import Prompter
from jaxrl_tis.validate import validate
from tests import tiny

ROOT = pathlib.Path(__file__).parents[1]
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "hidden_act": "silu", "initializer_range": 0.02, "model_type": "qwen2",
    "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "transformers_version": "4.43.1",
    "use_cache": True, "use_sliding_window": False,
}
QWEN_0P5B = QWEN | {
    "eos_token_id": 151645, "hidden_size": 896, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21, "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "sliding_window": 32768, "tie_word_embeddings": True, "vocab_size": 151936,
}
QWEN_32B = QWEN | {
    "eos_token_id": 151643, "hidden_size": 5120, "intermediate_size": 27648,
    "max_position_embeddings": 131072, "max_window_layers": 64, "num_attention_heads": 40,
    "num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "sliding_window": 131072, "tie_word_embeddings": False, "vocab_size": 152064,
}
QWEN3_8B = QWEN | {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "eos_token_id": 151645,
    "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 40960,
    "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 151936,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# variant of the config -> (checkpoint, chips it names, float32 parameters of the decoder)
LARGE = {
    # 151936 * 896 + 896 + 24 * (2 * 896 + 896 * (896 + 128 + 128) + 896 + 128 + 128 + 896 * 896
    # + 3 * 896 * 4864)
    "gsm8k_qwen25_0p5b:grpo": (QWEN_0P5B, 8, 494_032_768),
    "gsm8k_qwen25_0p5b:ppo": (QWEN_0P5B, 8, 494_032_768),
    "dapo_qwen25_32b": (QWEN_32B, 64, 32_763_876_352),
    # 2 * 151936 * 4096 + 4096 + 36 * (2 * 4096 + 2 * 128 + 2 * 4096 * 4096 + 2 * 4096 * 1024
    # + 3 * 4096 * 12288)
    "dapo_qwen3_8b": (QWEN3_8B, 16, 8_190_735_360),
}


def get_config(name):
    module, _, variant = name.partition(":")
    make = importlib.import_module(f"configs.{module}").get_config
    return (make(variant) if variant else make()).lock()


@pytest.mark.parametrize("name", [
    "default", "quickstart", "quickstart:off", "quickstart:centered", "quickstart:f32", "smollm2_135m",
    "quickstart_vllm", "quickstart_vllm:start", "quickstart_vllm:ahead",
    "quickstart_tool", "quickstart_tool:gap_tis", "quickstart_tool:gap_turn", "quickstart_tool:gap_off",
    "quickstart_moe", "quickstart_moe:none", "quickstart_moe:icepop", "quickstart_moe:r2",
    "async_local", "fig_base", "fig_critic", "fig_causes", "fig_staleness", "fig_routing",
    "fig_lora", "fig_fusion", "fig_referee", "dapo_qwen25_32b:async", "dapo_qwen3_30b_a3b", "dapo_qwen3_30b_a3b_v5e",
    "dapo_gpt_oss_20b",
    "gsm8k_one_chip", "gsm8k_one_chip:gemma3_1b", "gsm8k_one_chip:qwen3_1p7b",
    "gsm8k_qwen3_8b_lora", "dapo_qwen3_8b_64k", "dapo_qwen3_8b_64k:128k", *LARGE,
])
def test_every_config_is_sound_and_has_the_fields_of_the_default(name):
    config = get_config(name)
    if name != "default":
        validate(config)
    flat = lambda c, prefix="": {
        f"{prefix}{key}" for key, value in c.items() if not hasattr(value, "keys")
    } | {
        leaf for key, value in c.items()
        if hasattr(value, "keys") and key not in ("params", "environment_params", "template_kwargs")
        for leaf in flat(value, f"{prefix}{key}.")
    }
    assert flat(config) == flat(get_config("default"))  # no field that no line reads


def test_every_file_in_configs_is_tested_here():
    files = {p.stem for p in (ROOT / "configs").glob("*.py")} - {"__init__"}
    # They have another's config, or tests/sweep_test.py alone checks them.
    names = (
        "rescue", "threshold", "formats", "lora_smollm2", "engines", "replay", "drafter", "long", "mismatch", "lag",
        "referee_objectives",
    )
    figures = {f"fig_{name}" for name in names}
    assert files - figures == {
        "fig_base", "fig_critic", "fig_causes", "fig_staleness", "fig_routing", "fig_lora",
        "fig_fusion", "fig_referee", "default", "quickstart", "quickstart_moe", "quickstart_tool", "quickstart_vllm",
        "smollm2_135m", "async_local",
        "gsm8k_qwen25_0p5b", "gsm8k_one_chip", "gsm8k_qwen3_8b_lora", "dapo_qwen25_32b",
        "dapo_qwen3_8b", "dapo_qwen3_8b_64k", "dapo_qwen3_30b_a3b",
        "dapo_qwen3_30b_a3b_v5e", "dapo_gpt_oss_20b",
    }


def test_the_machines_of_a_config_can_run_it():
    """One process has the samplers of threads, and those of Ray have machines of their own."""
    for name, shape in TOPOLOGIES.items():
        rollout, slice_ = get_config(name).rollout, Topology.parse(shape)
        machine, workers = WORKERS.get(name, ("v5e:1x1", 0))
        chips = Topology.parse(machine).num_chips if workers else 0
        assert (rollout.driver == "ray") == (name in WORKERS)
        assert rollout.driver != "ray" or (workers, chips) == (rollout.workers, rollout.tpus_per_worker)
        assert rollout.driver != "threads" or slice_.hosts_per_slice == 1
        assert rollout.driver != "external"


def test_an_unknown_variant_is_named():
    for name in (
        "quickstart", "quickstart_moe", "quickstart_tool", "gsm8k_qwen25_0p5b", "dapo_qwen25_32b",
        "dapo_qwen3_8b_64k",
    ):
        with pytest.raises(ValueError, match="'other' is none of"):
            get_config(f"{name}:other")


def test_the_quickstart_builds_on_a_machine_with_several_devices():
    """It runs unchanged on a laptop and on a TPU VM, where JAX sees four or eight chips."""
    assert jax.device_count() == 8
    train.build(get_config("quickstart"))


def test_a_family_that_overflows_in_float16_is_named_at_the_start(capsys):
    gemma = dict(model__path=str(ROOT / "tests" / "models" / "golden" / "gemma3"))
    train.build(tiny.config(**gemma, model__dtype="bfloat16"))
    assert "float16" not in capsys.readouterr().err
    train.build(tiny.config(**gemma, model__dtype="float16"))
    said = "warning: model.dtype = 'float16': models of the family gemma3_text are known to exceed 65504"
    assert said in capsys.readouterr().err


def test_more_positions_than_the_model_has_are_refused_before_anything_is_made(tmp_path, capsys):
    with pytest.raises(ValueError, match="5 or rollout.max_new_tokens = 3, or raise model.max_position"):
        train.build(tiny.config(model__max_position=7))
    train.build(tiny.config(model__max_position=8))
    hf = QWEN_0P5B | {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
                      "num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 7,
                      "eos_token_id": 258, "vocab_size": 264}
    write_checkpoint(tmp_path / "a", hf)
    own = dict(task__tokenizer="", model__path=str(tmp_path / "a"))
    with pytest.raises(ValueError, match="8 tokens exceed max_position_embeddings = 7 of .*tokens = 3$"):
        train.build(tiny.config(**own))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 7}
    (tmp_path / "a" / "config.json").write_text(json.dumps(hf | {"rope_scaling": yarn}))
    assert not capsys.readouterr().err
    train.build(tiny.config(**own))
    assert "warning: sequences of up to 8 tokens exceed" in capsys.readouterr().err


def test_more_end_tokens_than_the_engine_stops_at_are_refused_at_the_start(tmp_path):
    hf = QWEN_0P5B | {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
                      "num_key_value_heads": 1, "intermediate_size": 16, "vocab_size": 264,
                      "eos_token_id": [258, *range(31)]}
    write_checkpoint(tmp_path / "a", hf)
    own = dict(task__tokenizer="", model__path=str(tmp_path / "a"))
    assert len(train.build(tiny.config(**own)).tokenizer.eos_ids) == 32
    write_checkpoint(tmp_path / "b", hf | {"eos_token_id": [258, *range(32)]})
    with pytest.raises(ValueError, match="33 end tokens, and the engine supports at most 32"):
        train.build(tiny.config(**own | {"model__path": str(tmp_path / "b")}))


def test_what_the_variants_change():
    plain, off, f32 = (get_config(f"quickstart:{v}").to_dict() for v in ("tis", "off", "f32"))
    assert off["correction"].pop("weight") == "none"
    assert plain["correction"]["weight"] is None and plain["correction"]["preset"] == "tis_2"
    assert f32["engine"].pop("quantization") == "none"
    assert plain["engine"]["quantization"] == "w8a8"
    del plain["correction"]["weight"], f32["correction"]["weight"]
    assert off["engine"].pop("quantization") == plain["engine"].pop("quantization")
    for config in (plain, off, f32):
        config.pop("name")
    assert plain == off == f32


def test_the_quickstart_with_experts():
    """The variants differ in the correction alone. Embedding of 21 tokens and norm, then 4 layers of
    two norms, attention, a router with its bias, 8 experts and one shared. A token uses three
    experts of width 128: the dense quickstart's MLP of width 384."""
    none, icepop, r2, r3 = (
        get_config(f"quickstart_moe:{v}").to_dict() for v in ("none", "icepop", "r2", "r3"))
    chosen = [(c["correction"].pop("routing"), c["correction"].pop("preset"), c.pop("name"))
              for c in (none, icepop, r2, r3)]
    assert [(routing, preset) for routing, preset, _ in chosen] == [
        ("none", "tis_2"), (None, "icepop"), ("r2", "tis_2"), ("r3", "tis_2")]
    assert none == icepop == r2 == r3 and r3["engine"]["record_routes"]
    setup = train.build(get_config("quickstart_moe"))
    params = jax.eval_shape(lambda: initial_params(setup.training))
    layer = 2 * 128 + 128 * (128 + 64 + 64 + 128) + 128 * 8 + 8 + (8 + 1) * 3 * 128 * 128
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    assert count == setup.model.vocab_size * 128 + 128 + 4 * layer
    assert 128 * (2 + 1) == get_config("quickstart").model.mlp_dim


@pytest.mark.all
def test_a_short_run_of_the_quickstart_with_experts(tmp_path):
    """One layer and one step: all samples have routes, and flips are measured."""
    c = get_config("quickstart_moe").copy_and_resolve_references().unlock()
    c.steps = c.warmup.steps = c.model.num_layers = c.metrics.diagnostics_every = 1
    c.rollout.prompts, c.engine.slots, c.train.microbatch_rows, c.warmup.rows = 2, 16, 16, 16
    c.eval.prompts = 8
    train.run(c.lock(), tmp_path)
    (record,) = (r for r in tiny.lines(tmp_path) if r["phase"] == "train")
    assert record["moe/samples_without_routes"] == 0
    assert 0 <= record["mismatch/route_flip_router"] == record["mismatch/route_flip_token"] < 0.5


def test_the_published_settings():
    """GSM8K and DAPO (2503.14476): group 16, clip 0.2 and 0.28, token-mean, no KL, 20k tokens."""
    grpo, ppo = get_config("gsm8k_qwen25_0p5b:grpo"), get_config("gsm8k_qwen25_0p5b:ppo")
    dapo = get_config("dapo_qwen25_32b")
    for config in (grpo, ppo, dapo):
        assert config.engine.quantization == "w8a8"
        chosen = correction.parse(config.correction)
        assert chosen.weight[0] == "token_tis" and chosen.centre == "old"
    assert grpo.correction.advantage == "grpo" and grpo.rollout.group_size > 1
    assert ppo.correction.advantage == "gae" and ppo.rollout.group_size == 1
    c, rollout = dapo.correction, dapo.rollout
    assert correction.parse(c).objective == ("ppo", {"clip_low": 0.2, "clip_high": 0.28})
    assert correction.parse(c).weight == ("token_tis", {"cap": 8.0})
    assert (c.aggregation, c.kl_coeff) == ("token-mean", 0.0)
    assert rollout.group_size == 16 and rollout.dynamic_sampling
    assert rollout.max_new_tokens == 20_480 and rollout.overlong_buffer == 4096
    for config, data_shards in (
        (grpo, 8), (ppo, 8), (dapo, 64), (get_config("dapo_qwen3_8b"), 16)
    ):
        assert config.train.microbatch_rows % data_shards == 0
        assert config.engine.slots % (data_shards // config.mesh.serve[2]) == 0


@pytest.mark.parametrize("name, chips, parts", [
    ("dapo_qwen3_30b_a3b", 32, (8, 8)), ("dapo_qwen3_30b_a3b_v5e", 64, (8, 16)),
])
def test_experts_are_divided_evenly_over_the_chips(name, chips, parts):
    """30.5 billion parameters, of which 128 experts of 3 x 2048 x 768 in each of 48 layers."""
    config = get_config(name)
    shape = ROOT / "configs" / "shapes" / "Qwen3-30B-A3B.json"
    model = ModelConfig.from_hf(json.loads(shape.read_text()))
    layer = 2 * 2048 + 2 * 128 + 2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 128
    layer += 128 * 3 * 2048 * 768
    count = 2 * 151936 * 2048 + 2048 + 48 * layer
    assert count == 30_532_122_624
    assert sum(x.size for x in jax.tree.leaves(transformer.abstract_params(model))) == count
    for mesh, count in zip((config.mesh.train, config.mesh.serve), parts, strict=True):
        assert mesh[4] == count and chips % (mesh[2] * mesh[4]) == 0
    assert config.train.microbatch_rows % chips == 0  # every chip has rows
    assert config.engine.slots % (chips // config.mesh.serve[2]) == 0
    assert config.engine.record_routes and config.correction.routing == "r3"


def test_experts_of_gpt_oss_have_whole_blocks_on_16_chips():
    config = get_config("dapo_gpt_oss_20b")
    shape = ROOT / "configs" / "shapes" / "gpt-oss-20b.json"
    model = ModelConfig.from_hf(json.loads(shape.read_text()))
    quant.Recipe(config.engine.quantization).check(model, config.mesh.serve[2])
    for mesh in (config.mesh.train, config.mesh.serve):
        assert model.moe.num_experts % mesh[4] == 0 and 16 % (mesh[2] * mesh[4]) == 0
    assert config.train.microbatch_rows % 16 == config.engine.slots % 8 == 0


# Shapes, on a checkpoint folder without weights


def local_config(name):
    """The config with local folders and files in the place of those of the hub."""
    config = get_config(name).unlock()
    local = lambda path, end: path.replace("hf://", "here/") + (end if "hf://" in path else "")
    config.model.path = local(config.model.path, "")
    for params in (config.task.params, config.eval.params):
        params.path = local(params.path, ".jsonl")
    return config.lock()


def write_checkpoint(folder, hf):
    """The true config.json, with a tokenizer of single bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None,
        "chat_template": TEMPLATE,
    }))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": hf["eos_token_id"]}))


@pytest.fixture(params=LARGE)
def large(request, tmp_path, monkeypatch):
    """(config, build of it on the eight devices, chips, parameter count), with the folder's
    own relative paths."""
    hf, chips, count = LARGE[request.param]
    config = local_config(request.param)
    monkeypatch.chdir(tmp_path)
    write_checkpoint(pathlib.Path(config.model.path), hf)
    return config, train.build(config), chips, count


def rows_of(setup, leading, names):
    """Abstract rows [*leading, T] of the given fields."""
    t = setup.training.row_length
    kinds = {"tokens": jnp.int32, "positions": jnp.int32, "segment_ids": jnp.int32,
             "mask": jnp.bool_, "version": jnp.int32}
    return {
        n: jax.ShapeDtypeStruct((*leading, t), kinds.get(n, jnp.float32))
        for n in names
    }


ROWS = ("tokens", "positions", "segment_ids", "mask", "sampled", "logp_behav", "version",
        "temperature")


@pytest.mark.all
@pytest.mark.cases("gsm8k_qwen25_0p5b:grpo")
@pytest.mark.compiles
def test_one_full_step_of_the_learner(large):
    config, setup, chips, count = large
    training = setup.training
    state = abstract_state(training)
    leaves = jax.tree.leaves(state["policy"].params)
    assert sum(math.prod(x.shape) for x in leaves) == count
    for leaf in leaves:
        leaf.sharding.shard_shape(leaf.shape)  # every width divides
    assert ("critic" in state) == (config.correction.advantage == "gae")
    assert ("reference" in state) == (config.correction.kl_coeff > 0)

    n = config.rollout.prompts * config.rollout.group_size
    m = config.train.microbatch_rows
    t = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    micro = rows_of(setup, (n // m, m), ROWS)
    scored = jax.eval_shape(make_score(training.learner), state["policy"].params, micro)
    assert scored["logp"].shape == scored["entropy"].shape == (n // m, m, t)
    assert scored["logp"].dtype == jnp.float32

    rows = rows_of(setup, (n,), (*ROWS, "logp_old", "logp_prox", "entropy"))
    rows["rewards"] = jax.ShapeDtypeStruct((n,), jnp.float32)
    rows["group"] = jax.ShapeDtypeStruct((n,), jnp.int32)
    extra = {"current_version": jax.ShapeDtypeStruct((n, 1), jnp.int32)}
    if "critic" in state:
        values = jax.eval_shape(make_values(training.learner), state["critic"].params, micro)
        extra["values"] = jax.ShapeDtypeStruct((n, *values.shape[2:]), values.dtype)
        assert extra["values"].shape == (n, t)
    if "reference" in state:
        ref = jax.eval_shape(make_score(training.learner), state["reference"], micro)["logp"]
        extra["logp_ref"] = jax.ShapeDtypeStruct((n, *ref.shape[2:]), ref.dtype)
    prepared, measured = jax.eval_shape(correction.make_prepare(training.correction), rows | extra)
    assert {prepared[name].shape for name in ("weights", "adv")} == {(n, t)}
    assert all(x.shape == () for x in measured.values())

    accumulation = n // config.train.minibatches // m
    assert accumulation * m * config.train.minibatches == n
    minibatch = {
        name: jax.ShapeDtypeStruct((accumulation, m, *x.shape[1:]), x.dtype)
        for name, x in (rows | extra | prepared).items()
    }
    train_step = make_train_step(training.learner, training.correction, training.optimizer)
    after, metrics = jax.eval_shape(train_step, state["policy"], minibatch)
    same = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)
    assert all(jax.tree.leaves(jax.tree.map(same, after, state["policy"])))
    assert {"actor/pg_loss", "actor/grad_norm"} <= metrics.keys()
    if "critic" in state:
        critic_step = make_critic_step(
            training.learner, config.critic.value_clip, training.critic_optimizer)
        after, metrics = jax.eval_shape(critic_step, state["critic"], minibatch)
        assert all(jax.tree.leaves(jax.tree.map(same, after, state["critic"])))
        assert "critic/vf_loss" in metrics


@pytest.mark.all
def test_one_full_step_of_the_sampler(large):
    config, setup, chips, _ = large
    engine = setup.engine
    longest = config.task.max_prompt_tokens
    load, given = engine.programs(abstract_state(setup.training)["policy"].params)["load"]
    params, _ = jax.eval_shape(load, *given)
    assert isinstance(params["layers"]["q"], QuantArray)
    assert params["layers"]["q"].q.dtype == jnp.int8
    # The float32 head keeps float32 weights; tied, it is the embedding.
    head = "embed" if setup.model.tie_embeddings else "head"
    assert {n: x.dtype for n, x in params.items() if n in ("embed", "head")} == {
        "embed": jnp.bfloat16, head: jnp.float32}
    state = jax.eval_shape(engine.init_state)
    length = longest + config.rollout.max_new_tokens
    per_slot = -(-length // config.engine.page_size)
    for leaf in jax.tree.leaves(state.cache):
        pages = config.engine.slots * per_slot + 2 * engine.shards
        assert leaf.shape[1] == pages and config.engine.page_size in leaf.shape[-2:]
    prompt = np.arange(longest, dtype=np.int32) % 200
    chunk = prompt[: engine.prefill_chunk]
    pages = list(range(1, 1 + -(-len(chunk) // engine.page_size)))
    chunks = [Chunk(0, chunk, 0, pages), Chunk(engine.shards - 1, prompt[:9], 0, pages[:1])]
    state = jax.eval_shape(lambda p, s: engine.prefill(p, s, chunks)[0], params, state)
    request = Request("a", prompt, 0, SamplingParams(max_tokens=config.rollout.max_new_tokens,
                                                     stop_ids=tuple(setup.tokenizer.eos_ids)))
    row = Insertion(request, prompt, request.sampling.max_tokens, len(prompt), (1, 2))
    state = jax.eval_shape(lambda s: engine.insert(s, {0: row}), state)
    table, shift = np.zeros((engine.slots, per_slot), np.int32), np.zeros(engine.slots, np.int32)
    after, result = jax.eval_shape(
        lambda p, s: engine.generate(p, s, table, shift), params, state
    )
    assert result.tokens.shape == (config.engine.steps_per_call, config.engine.slots)
    assert result.logp_behav.dtype == jnp.float32
    same = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)
    assert all(jax.tree.leaves(jax.tree.map(same, after, state)))


@pytest.mark.all
def test_prompts_go_through_the_chat_template(large):
    config, setup, _, _ = large

    ids = Prompter(setup.tokenizer, config.task).ids({"prompt": "2+3?", "answer": "5", "id": "a"})
    text = setup.tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\n2+3?") and text.endswith("<|im_start|>assistant\n")


def test_tensor_parallelism_of_the_small_model_is_one_or_two(tmp_path):
    """Found before the checkpoint is read and the warm-up is run, not at the first rollout."""
    config = get_config("gsm8k_qwen25_0p5b:grpo").unlock()
    config.model.path = str(tmp_path / "model")
    write_checkpoint(tmp_path / "model", QWEN_0P5B)
    config.mesh.serve = (2, 1, 4)
    with pytest.raises(ValueError, match=r"4 does not divide 14 .* 2 .*legal degrees are \[1, 2\]"):
        train.build(config)


def test_gradients_of_single_sequences_are_of_one_device():
    changes = dict(correction__advantage="opob", mesh__train=(2, 1, 1), train__minibatches=1)
    with pytest.raises(ValueError, match="'opob' needs the gradient of each sequence.*on 2 devices"):
        train.build(tiny.config(**changes))


@pytest.mark.parametrize("changes, message", [
    (dict(model__mlp_dim=49), "down"),
    (dict(model__lora="lora(rank=4)", model__numerics="invariant", engine__quantization="none",
          model__embed_dim=128, model__mlp_dim=256),
     "needs whole factors on a device, and mesh.serve has 2 tensor shards"),
], ids=["width", "factors"])
def test_a_serving_mesh_that_divides_the_heads_alone_is_refused(changes, message):
    heads = dict(model__num_heads=8, model__num_kv_heads=8)
    with pytest.raises(ValueError, match=message):
        train.build(tiny.config(**heads, **changes, mesh__serve=(4, 1, 2)))


# Where things go


@pytest.mark.parametrize("name", LARGE)
def test_a_missing_model_says_what_to_put_where(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = local_config(name)
    with pytest.raises(FileNotFoundError) as error:
        train.run(config, str(tmp_path / "run"))
    for word in (config.model.path, "config.json", "safetensors", "tokenizer.json"):
        assert word in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.all
@pytest.mark.parametrize("name, missing, fields", [
    ("gsm8k_qwen25_0p5b:grpo", "train", ("question", "answer")),
    ("gsm8k_qwen25_0p5b:grpo", "eval", ("question", "answer")),
    ("dapo_qwen25_32b", "train", ("prompt", "answer", "id")),
    ("dapo_qwen25_32b", "eval", ("prompt", "answer", "id")),
])
def test_missing_data_says_what_to_put_where(name, missing, fields, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = local_config(name)
    write_checkpoint(pathlib.Path(config.model.path), LARGE[name][0])
    paths = {"train": config.task.params.path, "eval": config.eval.params.path}
    absent = paths.pop(missing)
    [present] = paths.values()
    os.makedirs(os.path.dirname(present), exist_ok=True)
    example = {"question": "1+1?", "prompt": "1+1?", "answer": "#### 2"}
    pathlib.Path(present).write_text(
        "\n".join(json.dumps(example | {"id": str(i)}) for i in range(config.eval.prompts)))
    with pytest.raises(FileNotFoundError) as error:
        train.run(config, str(tmp_path / "run"))
    assert absent in str(error.value) and present not in str(error.value)
    for field in fields:
        assert f'"{field}"' in str(error.value)


def test_the_missing_gguf_says_which_command_fetches_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"SmolLM2.*launch/smollm2\.sh"):
        train.build(get_config("smollm2_135m"))
