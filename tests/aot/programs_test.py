"""Programs of the shipped configs, compiled for their topologies: two layers, small batches."""

import collections
import contextlib
import importlib
import json
import math
import pathlib
import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from jaxrl_tis import sharding
from jaxrl_tis.aot import programs as aot, report, work
from jaxrl_tis.aot.chips import CHIPS, GIB, TOPOLOGIES, Topology
from jaxrl_tis.aot.flags import FLAGS
from tests import commands, tpu

pytestmark = [pytest.mark.compiles, pytest.mark.by_jax("libtpu compiles the programs")]

ROOT = pathlib.Path(__file__).parents[2]
SHAPES = ROOT / "configs" / "shapes"

# Smaller batches and rows; what shapes a program's operations is the config's own.
SMALL = {
    "quickstart": {"engine__max_draft": 1, "correction__advantage": "gae"},
    "smollm2_135m": {},
    "gsm8k_qwen25_0p5b:grpo": {
        "rollout__prompts": 64, "rollout__max_new_tokens": 32, "task__max_prompt_tokens": 32,
        "train__microbatch_rows": 8, "train__pack_length": 128,
        "engine__slots": 64, "engine__prefill_batch": 8,
    },
    "gsm8k_qwen25_0p5b:ppo": {
        "engine__drafter": "models/Qwen2.5-0.5B-Instruct", "engine__max_draft": 3, "engine__drafter_every": 1,
        "rollout__max_new_tokens": 32, "task__max_prompt_tokens": 32,
        "train__microbatch_rows": 8, "train__pack_length": 128,
        "engine__slots": 64, "engine__prefill_batch": 8,
    },
    "dapo_qwen25_32b": {
        "rollout__prompts": 128, "rollout__max_new_tokens": 192, "task__max_prompt_tokens": 64,
        "rollout__overlong_buffer": 32, "train__pack_length": 256,
        "engine__slots": 64, "engine__prefill_batch": 8,
    },
    "dapo_qwen3_8b": {
        "rollout__prompts": 16, "rollout__max_new_tokens": 192, "task__max_prompt_tokens": 64,
        "rollout__overlong_buffer": 32, "train__pack_length": 256,
    },
}
SMALL["dapo_qwen3_30b_a3b"] = SMALL["dapo_qwen3_30b_a3b_v5e"] = {
    "rollout__prompts": 128, "rollout__max_new_tokens": 192, "task__max_prompt_tokens": 64,
    "rollout__overlong_buffer": 32, "train__pack_length": 256,
    "engine__slots": 64, "engine__prefill_batch": 64, "engine__prefill_chunk": 64,
}
SMALL["dapo_qwen25_32b:async"] = SMALL["dapo_qwen25_32b"]
SMALL["dapo_qwen3_8b_64k"] = {
    "rollout__prompts": 16, "rollout__max_new_tokens": 1984, "task__max_prompt_tokens": 64,
    "rollout__overlong_buffer": 32, "train__pack_length": 2048, "engine__slots": 8,
    "optimizer__offload": True,
}
# A compiler that optimises less is several times as fast. Only for programs without gradients:
# libtpu 0.0.42.1 aborts on the reduce-scatters of the others.
LITTLE_EFFORT = {"exec_time_optimization_effort": -1.0}
COMPILED = {
    "quickstart": ("critic", "decode", "verify", "eval_prefill", "eval_insert", "eval_decode"),
    "smollm2_135m": ("reshard", "prefill", "insert"),
    "gsm8k_qwen25_0p5b:grpo": ("train", "score", "quantize"),
    "gsm8k_qwen25_0p5b:ppo": ("values", "distill", "verify", "draft_prefill", "draft_insert", "draft"),
    "dapo_qwen25_32b": ("decode",),
    "dapo_qwen25_32b:async": ("score", "quantize", "insert"),
    "dapo_qwen3_8b": ("train", "weigh"),
    "dapo_qwen3_8b_64k": ("train", "decode"),
    "dapo_qwen3_30b_a3b": ("score", "decode"),
    "dapo_qwen3_30b_a3b_v5e": ("score", "decode"),
}


def little_effort(topology):
    return mock.patch.dict(FLAGS, {topology.kind: FLAGS[topology.kind] | LITTLE_EFFORT})


def configured(name):
    module, _, variant = name.partition(":")
    make = importlib.import_module(f"configs.{module}").get_config
    return make(variant) if variant else make()


def small(name, **overrides):
    """A shipped config with small batches; overrides as in tests.tiny."""
    config = configured(name)
    for field, value in (SMALL[name] | overrides).items():
        *path, last = field.split("__")
        target = config
        for part in path:
            target = target[part]
        target[last] = value
    return config.lock()


@pytest.fixture(scope="module")
def made():
    """name -> (setup, report) of COMPILED, each compiled once."""
    found = {}

    def get(name):
        if name not in found:
            topology = Topology.parse(TOPOLOGIES.get(name) or TOPOLOGIES[name.partition(":")[0]])
            tpu.devices(topology.name)
            layers = 2 if name == "gsm8k_qwen25_0p5b:grpo" else 1
            workers = aot.workers(small(name), topology)
            setup = aot.setup_for(small(name), SHAPES, topology.devices(), layers, workers)
            programs = {}
            for program in COMPILED[name]:
                has_gradient = program in ("train", "critic", "distill")
                effort = contextlib.nullcontext() if has_gradient else little_effort(topology)
                with effort, mock.patch.object(report, "LARGEST", 10**6):
                    made_now = aot.report(setup, topology, [program])
                programs |= made_now["programs"]
            found[name] = setup, made_now | {"programs": programs}
        return found[name]

    return get


@pytest.mark.all
def test_a_packed_batch_is_weighed_in_segment_kernels_on_the_devices_of_the_learner(made):
    setup, report = made("dapo_qwen3_8b")
    entry = report["programs"]["weigh"]
    assert entry["runs_on"] == "train" and entry["memory"]["argument_bytes"] > 0
    assert sum(k["runs"] for k in entry["kernels"] if k["name"].startswith("segment_")) >= 5
    # Rows stay where they are: only numbers of the whole batch are summed over devices.
    assert {c["kind"] for c in entry["collectives"]} <= {"all-reduce"}


@pytest.mark.all
@pytest.mark.parametrize("name", SMALL)
def test_a_config_compiles_for_its_topology(made, name):
    setup, report = made(name)
    assert tuple(report["programs"]) == COMPILED[name]
    assert report["layers"] == setup.model.num_layers
    assert report["chips"] == Topology.parse(report["topology"]).num_chips
    for entry in report["programs"].values():
        is_offloading = setup.config.model.remat == "host" or setup.config.optimizer.offload
        is_offloading &= entry["name"] == "train"
        assert entry["fits"] and bool(entry["host_transfers"]) == is_offloading
        assert 0 < entry["memory"]["peak_bytes"] < entry["memory"]["hbm_bytes"]
        assert entry["roofline"]["is_model_output"] is True
    json.dumps(report)


def test_the_configs_between_them_compile_every_program():
    assert {p for names in COMPILED.values() for p in names} == set(aot.PROGRAMS)


@pytest.mark.all
def test_every_key_is_documented(made):
    """A key of the JSON is in docs/tpu.md as `key`."""
    page = (ROOT / "docs" / "tpu.md").read_text()

    def keys(value):
        if isinstance(value, list):
            return {k for x in value for k in keys(x)}
        if not isinstance(value, dict):
            return set()
        return set(value) | {k for x in value.values() for k in keys(x)}

    reports = [made(name)[1] for name in ("gsm8k_qwen25_0p5b:grpo", "dapo_qwen25_32b:async")]
    named = {n for r in reports for n in (*r["resident_bytes"], *r.get("weight_sync", ()))}
    names = keys(reports) - set(aot.PROGRAMS) - named
    assert [k for k in sorted(names) if f"`{k}`" not in page] == []


@pytest.mark.all
def test_what_the_compiler_counts_of_a_training_step(made):
    """The FLOPs of the program against those of the shapes. Of the layers no product is computed
    again; the head makes four passes for the model's three, and is most of two layers' work. Short
    rows have next to no attention."""
    entry = made("gsm8k_qwen25_0p5b:grpo")[1]["programs"]["train"]
    assert 3 / 4 < entry["model_flop_ratio"] < 3 / 3.7
    large = [c for c in entry["collectives"] if c["bytes"] > 2**20]
    assert large and {tuple(c["axes"]) for c in large} == {("fsdp",)}


@pytest.mark.all
@pytest.mark.parametrize("name", ["gsm8k_qwen25_0p5b:grpo", "dapo_qwen3_8b"])
def test_weight_gradients_are_scattered_and_no_head_is_whole(made, name):
    """No sum of more than a MiB reaches every device whole, and of the token table and the head a
    device makes no array of more than twice its own share."""
    setup, found = made(name)
    entry, c, count = found["programs"]["train"], setup.model, setup.training.layout.shards
    kinds = {k: [x for x in entry["collectives"] if x["kind"] == k and x["bytes"] > 2**20]
             for k in ("all-reduce", "reduce-scatter", "all-gather")}
    assert kinds["all-reduce"] == []
    sizes = {max(map(int, shape)) for x in kinds["reduce-scatter"]
             for shape in re.findall(r"\[(\d+),(\d+)\]", x["shapes"])}
    assert c.mlp_dim in sizes  # of gate, up and down
    wide = []
    for array in entry["largest"]:
        dims = [int(n) for n in re.findall(r"\d+", array["shape"].partition("[")[2])]
        is_of_vocabulary = any(n % (c.vocab_size // count) == 0 for n in dims if n)
        if is_of_vocabulary and not array["what"].startswith("argument"):
            wide.append(math.prod(dims))
    share = c.vocab_size * c.embed_dim // count
    assert share <= max(wide) <= 2 * share


@pytest.mark.all
def test_devices_that_share_positions_send_no_keys(made):
    """The sampler sums one head's attention and its weight over them, the learner gathers keys of
    one head at a time, and moves tokens to other devices before the first layer and after the last."""
    _, found = made("dapo_qwen3_8b_64k")
    of_context = {
        name: [c for c in entry["collectives"] if "context" in c["axes"]]
        for name, entry in found["programs"].items()
    }
    assert {c["kind"] for c in of_context["decode"]} == {"all-reduce"}
    assert max(c["bytes"] for c in of_context["decode"]) == 8 * 32 // 8 * (128 + 1) * 4
    row = 2048 * 4096 * 2  # numbers of bfloat16 in a row of hidden states
    others = [c for c in of_context["train"] if c["kind"] in ("all-gather", "all-to-all")]
    assert max(c["bytes"] for c in others) == 2048 * 128 * 2
    moved = [c for c in of_context["train"] if c["kind"] == "collective-permute"]
    assert max(c["bytes"] for c in moved) <= row // 8


EXPERTS = "dapo_qwen3_30b_a3b", "dapo_qwen3_30b_a3b_v5e"


def runs_of(entry, kind):
    """Bytes -> runs of a kind of collective between the eight devices of the experts."""
    runs = collections.Counter()
    for c in entry["collectives"]:
        if c["kind"] == kind and c["axes"] == ["expert"]:
            runs[c["bytes"]] += c["count"]
    return runs


def num_passes(config):
    """Micro-batches of a score."""
    return config.rollout.prompts * config.rollout.group_size // config.train.microbatch_rows


@pytest.mark.all
def test_tokens_travel_to_their_experts_and_back(made):
    """One layer. A device's tokens, 8 rows of 2048 bfloat16 numbers each, travel as one chunk."""
    setup, found = made("dapo_qwen3_30b_a3b")
    engine, token = setup.engine, 8 * 2048 * 2
    of_decode = {engine.slots // engine.shards * token: 2 * engine.steps}
    assert runs_of(found["programs"]["decode"], "ragged-all-to-all") == of_decode
    of_score = {256 * token: 2 * num_passes(setup.config)}
    assert runs_of(found["programs"]["score"], "ragged-all-to-all") == of_score


@pytest.mark.all
def test_a_large_v5e_slice_gathers_the_tokens_of_its_experts_axis(made):
    """One layer: the tokens of eight devices of the learner, or sixteen of the sampler, 2048 bfloat16
    numbers each."""
    setup, found = made("dapo_qwen3_30b_a3b_v5e")
    engine, token = setup.engine, 8 * 2048 * 2
    decode, score = (found["programs"][name] for name in ("decode", "score"))
    for entry in (decode, score):
        assert not runs_of(entry, "ragged-all-to-all")
    tokens = engine.slots // engine.shards * 2 * token
    assert runs_of(decode, "all-gather")[tokens] == engine.steps
    assert runs_of(score, "all-gather")[256 * token] == num_passes(setup.config)


@pytest.mark.all
@pytest.mark.parametrize("name", EXPERTS)
def test_no_device_holds_all_experts_and_none_makes_floats_of_them(made, name):
    """A device serves 16 of the 128 experts, or 8 on the v5e slice, and a quarter of their width of 768.
    Under the scan over
    layers the 8-bit matrices of a layer are copied out of the stack."""
    setup, found = made(name)
    programs = aot.programs(setup)
    held = {"score": 16, "decode": 8 if name.endswith("v5e") else 16}
    for program in found["programs"]:
        layers = programs[program][1][0]["layers"]
        for weight in ("expert_gate", "expert_up", "expert_down"):
            for x in jax.tree.leaves(layers[weight]):
                assert x.sharding.shard_shape(x.shape)[1] == held[program]
    size = held["decode"] * 2048 * 768 // 4
    shapes = [x["shape"] for x in found["programs"]["decode"]["largest"]
              if not x["what"].startswith("argument")]
    dims = lambda shape: math.prod(map(int, re.findall(r"\d+", shape.partition("[")[2])))
    copies = [shape for shape in shapes if dims(shape) >= size]
    assert {shape.partition("[")[0] for shape in copies} <= {"s8"}


@pytest.mark.all
def test_a_slice_learns_and_hosts_of_workers_sample(made):
    """The learner and a worker have their own programs, and in memory what is kept there and nothing
    else. The learner lays the weights that it sends out as for evaluations."""
    setup, found = made("dapo_qwen25_32b:async")
    layouts = setup.training.layout, setup.engine.layout
    learner, worker = (set(x.mesh.devices.flat) for x in layouts)
    assert (len(learner), len(worker), len(learner | worker)) == (32, 4, 36)
    assert setup.engine.layout.mesh.shape["tensor"] == 4 and setup.learner_engine.layout.shards == 8
    devices = {"score": learner, "quantize": learner, "insert": worker, "decode": worker}
    made_of = aot.programs(setup)
    assert {name: report._devices(made_of[name][1]) for name in devices} == devices
    entries, held = found["programs"], found["resident_bytes"]
    assert {name: x["runs_on"] for name, x in entries.items()} == {
        "score": "train", "quantize": "serve", "insert": "serve"
    }
    assert held["arriving weights"] == held["serving weights"] > 0
    beside = {name: x["memory"]["beside_bytes"] for name, x in entries.items()}
    parameters = sharding.device_bytes(made_of["quantize"][1])
    assert beside["score"] == beside["quantize"] == held["policy"] - parameters
    assert beside["insert"] == 2 * held["serving weights"]


@pytest.mark.all
def test_the_weight_sync_from_the_learner_to_its_workers(made):
    """One layer of 5120 x (5120 + 1024 + 1024 + 5120 + 3 * 27648) = 487,587,840 in int8, an embedding
    in bfloat16 and a head in float32 of 152064 x 5120 are cut over tensor, as are their scales, but for
    those of o and down, and the three biases; three norms are not. All is in four parts. Eight hosts
    send to eight workers, so that each sends what each receives."""
    setup, found = made("dapo_qwen25_32b:async")
    table, matrices = 152064 * 5120, 487_587_840
    wide, outputs = 5120 + 1024 + 1024, 5120 + 1024 + 1024 + 2 * 27648
    cut = matrices + 2 * table + 4 * table + 4 * outputs + 2 * wide
    whole = 4 * (5120 + 5120) + 3 * 2 * 5120
    int8 = found["weight_sync"]["w8a8"]
    assert int8["device_bytes"] == cut // 4 + whole and int8["bytes"] == 4 * int8["device_bytes"]
    assert int8["distinct_bytes"] == cut + whole == int8["sent_bytes"] == int8["received_bytes"]
    assert int8["seconds"] == pytest.approx((cut + whole) / 25e9)  # 200 Gbps of a host
    assert found["weight_sync"]["bfloat16"]["distinct_bytes"] == (
        2 * matrices + 6 * table + 2 * wide + 3 * 2 * 5120
    )


@pytest.mark.all
def test_the_flags_change_the_program():
    """Without them a gathered weight of a quantised learner, whose products the partitioner cuts,
    becomes a ring of products (collective-permutes)."""
    topology = Topology.parse("v5e:2x4")
    tpu.devices(topology.name)
    config = configured("gsm8k_qwen25_0p5b:grpo")  # small rows do not show it
    config.model.quantization = "w8a16"
    score = aot.programs(aot.setup_for(config.lock(), SHAPES, topology.devices(), layers=1))["score"]
    kinds = lambda flags: {
        c.kind for c in aot.compiled("score", *score, flags | LITTLE_EFFORT).module.collectives()
    }
    assert "collective-permute" not in kinds(FLAGS["v5e"])
    assert "collective-permute" in kinds({})


@pytest.mark.all
def test_an_unknown_flag_is_refused():
    devices = tpu.devices("v5e:2x2")
    one = jax.sharding.SingleDeviceSharding(devices[0])
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=one)
    add = jax.jit(lambda x: x + 1)
    for flags in FLAGS.values():
        aot.compiled("add", add, (x,), flags)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_flag"):
        aot.compiled("add", add, (x,), {"xla_no_such_flag": "1"})


@pytest.mark.all
def test_two_slices():
    """Data parallelism over two slices: gradients go between them, weights do not."""
    tpu.devices("v5e:2x2")
    topology = Topology.parse("v5e:2x2", num_slices=2)
    config = small("quickstart", mesh__train=(2, 4, 1))
    setup = aot.setup_for(config, SHAPES, topology.devices(), layers=1)
    entry = aot.report(setup, topology, ["train"])["programs"]["train"]
    by_network = {
        network: {(c["kind"], *c["axes"]) for c in entry["collectives"] if c["network"] == network}
        for network in ("ici", "dcn")
    }
    assert {kind for kind, *_ in by_network["dcn"]} == {"all-reduce"}
    assert ("all-gather", "fsdp") in by_network["ici"]


@pytest.mark.all
def test_a_teacher_is_a_part_of_decode():
    tpu.devices("v5e:2x2")
    topology = Topology.parse("v5e:2x2")
    config = small("smollm2_135m", rollout__teacher="models/Qwen3-8B")
    setup = aot.setup_for(config, SHAPES, topology.devices(), layers=1)
    found, parts = aot.report(setup, topology, ["decode"]), setup.engine.device_bytes
    assert found["resident_bytes"]["serving weights"] == parts["policy"] + parts["teacher"]
    assert parts["teacher"] > 10 * parts["policy"]
    made = work.work("decode", setup, aot.programs(setup)["decode"][1])
    alone = aot.setup_for(small("smollm2_135m"), SHAPES, topology.devices(), layers=1)
    own = work.work("decode", alone, aot.programs(alone)["decode"][1])
    steps, slots = setup.engine.steps, setup.engine.slots
    teacher = work.decode_flops(setup.engine.teacher, slots, setup.engine.max_length)
    assert made.flops == own.flops + steps * teacher
    assert made.weight_bytes == own.weight_bytes + steps * parts["teacher"]


@pytest.mark.all
def test_a_drafter_has_memory_of_its_own(made):
    """A model of the policy's shape: keys of its own, weights that are not quantized, and with
    engine.drafter_every float32 weights with two moments on the learner's devices."""
    setup, found = made("gsm8k_qwen25_0p5b:ppo")
    held, own = found["resident_bytes"], setup.drafters[0]
    assert held["drafter state"] == held["decode state"]
    assert held["drafter weights"] > held["serving weights"]
    count = sum(x.size for x in jax.tree.leaves(own.abstract_params()))
    assert 12 * count / 8 <= held["drafter"] < 12.5 * count / 8  # cut over eight devices
    beside = {name: x["memory"]["beside_bytes"] for name, x in found["programs"].items()}
    awake = sum(n for name, n in held.items() if name not in report.OF_EVALUATION)
    assert beside["verify"] == awake - held["serving weights"] - held["decode state"]
    assert beside["draft"] == awake - held["drafter weights"] - held["drafter state"]
    asleep = sum(held[name] for name in ("policy", "critic", "drafter"))
    network = sharding.device_bytes(aot.programs(setup)["distill"][1][0])
    assert beside["values"] + sharding.device_bytes(aot.programs(setup)["values"][1][0]) == asleep
    assert beside["distill"] == asleep - network


@pytest.mark.all
def test_a_drafter_of_another_vocabulary_is_refused():
    devices = tpu.devices("v5p:4x4x4")
    config = small("dapo_qwen25_32b", engine__drafter="models/Qwen2.5-0.5B-Instruct", engine__max_draft=1)
    with pytest.raises(ValueError, match="151936 token ids and the policy 152064; name a model with as many"):
        aot.setup_for(config, SHAPES, devices)


# What does not fit


@pytest.mark.all
def test_a_decode_state_that_is_too_large_is_named(capsys):
    tpu.devices("v5e:2x2")
    command = commands.load("aot.__main__")
    config = small("quickstart", engine__slots=3_000_000)
    with (
        mock.patch.object(command.config_flags, "get_config_filename", lambda _: "a.py"),
        mock.patch.object(command.flags, "FLAGS", {"config": None}),
        commands.exits(
            command, CONFIG=config, NAMES=["insert"], LAYERS=1, JSON=None, MARKDOWN=False,
            FIT=False, TOPOLOGY="v5e:2x2", NUM_SLICES=1,
        ) as exited,
    ):
        command.main()
    out = capsys.readouterr().out
    assert exited.value.code == 1
    assert "DOES NOT FIT" in out and "too much" in out and "argument[0].cache" in out


def test_a_refusal_is_read():
    refusal = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
        "hbm. Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G.\n"
        "  1. Size: 8.00G\n     Operator: op_name=\"jit(f)/dot\" source_file=\"a.py\"\n"
        "     Shape: bf16[65536,65536]{1,0:T(8,128)(2,1)}\n     Unpadded size: 8.00G\n"
    )
    x = jax.ShapeDtypeStruct((2**28,), jnp.float32)
    refused = aot.Compiled("train", ({"weights": x},), 1.0, refusal=refusal)
    memory, over, where = report._refused(refused, beside=5, hbm=16 * GIB)
    assert memory["peak_bytes"] == int(20.5 * GIB) and memory["argument_bytes"] == GIB
    assert (over, where) == (int(4.5 * GIB) + 5, "hbm")
    first, second = report.largest(refused)
    assert first == {
        "bytes": 8 * GIB, "what": "jit(f)/dot", "shape": "bf16[65536,65536]"
    }
    assert second["what"] == "argument[0]['weights']"


def test_what_a_refusal_calls_temporaries_holds_the_arguments():
    """An update in place of 20 GiB, refused before memory is laid out."""
    tpu.devices("v5e:2x2")
    device = jax.sharding.SingleDeviceSharding(Topology.parse("v5e:2x2").devices()[0])
    x = jax.ShapeDtypeStruct((20 * 2**15, 2**13), jnp.float32, sharding=device)
    write = jax.jit(lambda x: x.at[0, 0].set(1.0), donate_argnums=0)
    refused = aot.compiled("insert", write, (x,), {})
    memory, over, where = report._refused(refused, beside=0, hbm=CHIPS["v5e"].hbm_bytes)
    assert memory["peak_bytes"] == 20 * GIB and (over, where) == (int(4.25 * GIB), "hbm")


def test_arrays_of_a_program_are_named_where_the_refusal_names_none():
    tpu.devices("v5e:2x2")
    device = jax.sharding.SingleDeviceSharding(Topology.parse("v5e:2x2").devices()[0])
    x = jax.ShapeDtypeStruct((40 * 2**10, 40 * 2**10), jnp.float32, sharding=device)
    products = jax.jit(lambda x: (x @ x) @ (x.T @ x))
    refused = aot.compiled("train", products, (x,), {})
    assert "Size: " not in refused.refusal and "total memory" in refused.refusal
    largest = report.largest(refused)
    assert {"argument[0]", "dot_general"} <= {x["what"].split("/")[-1] for x in largest}
    assert {x["bytes"] for x in largest[:2]} == {4 * x.size}


def test_a_refusal_of_another_memory_is_no_peak_of_hbm():
    refusal = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space smem. Used 1.02M of 1.00M smem. "
        "Exceeded smem capacity by 18.1K.\n"
    )
    x = jax.ShapeDtypeStruct((2**28,), jnp.float32)
    refused = aot.Compiled("decode", (x,), 1.0, refusal=refusal)
    memory, over, where = report._refused(refused, beside=5, hbm=16 * GIB)
    assert (memory["peak_bytes"], over, where) == (GIB, int(18.1 * 2**10), "smem")


def test_a_model_of_unknown_shape_says_where_to_put_it(tmp_path):
    config = small("dapo_qwen25_32b", model__path="models/Other-7B")
    with pytest.raises(FileNotFoundError, match=r"Other-7B.*Other-7B\.json"):
        aot.model_of(config, tmp_path)


def test_a_shape_has_the_name_of_its_model(tmp_path):
    shape = json.loads((SHAPES / "Qwen3-8B.json").read_text())
    (tmp_path / "Other-7B.json").write_text(json.dumps(shape | {"num_hidden_layers": 3}))
    for path in ("models/Other-7B", "hf://org/Other-7B@main"):
        assert aot.model_of(small("dapo_qwen25_32b", model__path=path), tmp_path).num_layers == 3


def test_a_refusal_that_is_not_of_memory_is_an_error():
    function, error = mock.Mock(), jax.errors.JaxRuntimeError("INTERNAL: a mistake of the compiler")
    function.lower.return_value.compile.side_effect = error
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        aot.compiled("train", function, (), {})


@pytest.mark.all
def test_an_unknown_program_is_named():
    tpu.devices("v5e:2x2")
    topology = Topology.parse("v5e:2x2")
    setup = aot.setup_for(small("smollm2_135m"), SHAPES, topology.devices(), layers=1)
    with pytest.raises(ValueError, match="critic; choose among train, quantize"):
        aot.report(setup, topology, ["train", "critic"])


def test_what_stays_beside_a_program():
    """Arrays of a run that the program does not take itself; equal shapes count one by one."""
    a, b = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (256, 512))
    kept = {"policy": [a, a], "decode state": [b]}
    assert report._beside((a,), kept) == 4 * (256 + 512)
    assert report._beside((a, a, b), kept) == 0
    assert report._beside((), kept) == 4 * (2 * 256 + 512)


SAMPLING = {"policy", "serving weights", "decode state", "drafter weights", "drafter state"}


@pytest.mark.parametrize("programs, alive, asleep", [
    ("train distill", SAMPLING, {"policy"}),
    ("quantize", SAMPLING, {"policy"}),
    ("decode draft", SAMPLING, SAMPLING),
    ("reshard", {"policy", "serving weights", "drafter weights"}, {"policy"}),
    ("eval_decode",
     {"policy", "serving weights", "drafter weights", "evaluation weights", "evaluation state"},
     {"policy", "evaluation weights", "evaluation state"}),
])
def test_what_is_in_memory_while_a_program_runs(programs, alive, asleep):
    """A sampler that sleeps has weights and cache in its own programs alone."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], "x")
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=whole)
    kept = {name: [x] for name in (*SAMPLING, *report.OF_EVALUATION)}
    for program in programs.split():
        assert report._alive(program, (x,), kept, sleeps=False).keys() == alive
        assert report._alive(program, (x,), kept, sleeps=True).keys() == asleep
