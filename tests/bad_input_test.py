"""Bad input gets an error that says what is wrong, and what was reached before is kept."""

import contextlib
import dataclasses
import errno
import json
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from jaxrl_tis import evaluate, models, train
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.learner.state import abstract_state, initial_params
from jaxrl_tis.learner.trainer import Trainer
from jaxrl_tis.models import transformer
from jaxrl_tis.models.config import ModelConfig, RopeConfig
from jaxrl_tis.record import checkpoint, metrics
from jaxrl_tis.rollouts.synchronous import SyncSource
from tests import tiny
from tests.resume_test import assert_same_run

pytestmark = pytest.mark.compiles
BY_JAX = pytest.mark.by_jax("a run: flax, optax, orbax and XLA together")

MODEL = ModelConfig(
    family="llama", vocab_size=24, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, mlp_dim=24, rope=RopeConfig("default", 10000.0), max_position=64, norm_eps=1e-6,
    qkv_bias=False, qk_norm=False, tie_embeddings=True,
)


def initial(folder):
    """`train.build` and the parameters of the model in `folder`."""
    setup = tiny.setup(model__path=str(folder))
    return initial_params(setup.training)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint folder that works."""
    path = tmp_path / "model"
    models.save(path, MODEL, transformer.init(MODEL, jax.random.key(0)))
    return path


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = dict(safetensors.numpy.load_file(path))
    edit(tensors)
    safetensors.numpy.save_file(tensors, path)


# The model


@pytest.mark.all
def test_the_folder_of_these_tests_works(folder):
    assert initial(folder)["embed"].shape == (24, 16)


def test_missing_model_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent.*config.json, tokenizer.json and model.safetensors"):
        initial(tmp_path / "absent")


def test_missing_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor .*index.json"):
        initial(folder)


def test_truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors is truncated or damaged"):
        initial(folder)


def test_truncated_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x00" * 20)
    with pytest.raises(ValueError, match="model.gguf"):
        initial(path)


def test_wrong_tensor_shape(folder):
    def edit(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]

    edit_tensors(folder, edit)
    with pytest.raises(ValueError, match=r"model\.norm\.weight \[15\], expected \[16\]"):
        initial(folder)


def test_wrong_tensor_name(folder):
    def edit(tensors):
        tensors["model.norm.gain"] = tensors.pop("model.norm.weight")

    edit_tensors(folder, edit)
    with pytest.raises(ValueError) as error:
        initial(folder)
    assert "missing (1): model.norm.weight" in str(error.value)
    assert "unknown (1): model.norm.gain" in str(error.value)


@pytest.mark.parametrize("changes, message", [
    (dict(model_type="mixtral"), "'mixtral' is not implemented"),
    (dict(num_experts=8), "num_experts=8"),
    (dict(hidden_act="gelu"), "hidden_act='gelu'"),
    (dict(sliding_window=128), "sliding_window=128"),
    (dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic' is not implemented"),
])
def test_unimplemented_architecture(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        initial(folder)


def test_a_tokenizer_larger_than_the_vocabulary(folder, tmp_path):
    words = {f"w{i}": i for i in range(30)}
    spec = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    spec.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w1"}))
    with pytest.raises(ValueError, match="tokenizer has 30 ids.*vocabulary has 24"):
        tiny.setup(model__path=str(folder), task__tokenizer="")


# Prompts and data


def test_a_prompt_longer_than_the_cache():
    setup = tiny.setup()
    engine = setup.engine
    scheduler = Scheduler(engine, None)
    long = np.ones(6, np.int32)
    with pytest.raises(ValueError, match="request a: 6 prompt .* 3 new tokens .* 8 positions"):
        scheduler.add(Request("a", long, 0, SamplingParams(max_tokens=3)))
    assert scheduler.pending == 0


@pytest.mark.all
def test_a_prompt_longer_than_the_limit_stops_before_any_step(tmp_path):
    with pytest.raises(ValueError, match="prompt tokens.*max_prompt_tokens is 4"):
        tiny.run(tmp_path / "run", task__max_prompt_tokens=4)


def jsonl(tmp_path, text):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    return dict(task__name="jsonl", task__params={"path": str(path)},
                eval__params={"path": str(path)}, warmup__steps=0)


GOOD = '{"prompt": "1+1=", "answer": "2", "id": "%d"}'


@pytest.mark.all
def test_empty_data(tmp_path):
    with pytest.raises(ValueError, match="data.jsonl is empty; one line looks like"):
        tiny.run(tmp_path / "run", **jsonl(tmp_path, "\n\n"))


@pytest.mark.all
def test_a_line_that_is_no_json_is_named(tmp_path):
    text = "\n".join([GOOD % 1, GOOD % 2, '{"prompt": "1+1=", ', GOOD % 3])
    with pytest.raises(ValueError, match=r"data\.jsonl:3: the line is not JSON"):
        tiny.run(tmp_path / "run", **jsonl(tmp_path, text))


@pytest.mark.all
def test_fewer_held_out_examples_than_wanted(tmp_path):
    text = "\n".join(GOOD % i for i in range(5))
    with pytest.raises(ValueError, match="5 examples and config.eval.prompts is 8"):
        tiny.run(tmp_path / "run", **jsonl(tmp_path, text))


def test_a_parameter_that_the_task_does_not_have(tmp_path):
    with pytest.raises(ValueError, match="'arithmetic' has no parameter 'digit'; did you mean 'digits'"):
        tiny.run(tmp_path / "run", task__params={"size": 8, "digit": 1})


@pytest.mark.all
def test_one_long_training_prompt_stops_before_any_step(tmp_path):
    data = jsonl(tmp_path, "\n".join([GOOD % i for i in range(8)]))
    long = tmp_path / "long.jsonl"
    last = '{"prompt": "1+1+1=", "answer": "3", "id": "x"}'
    long.write_text("\n".join([*(GOOD % i for i in range(40)), last]))
    data["task__params"] = {"path": str(long)}
    with pytest.raises(ValueError, match=r"long.jsonl:41 .id .x..: 7 prompt tokens.*max_prompt_tokens is 5"):
        tiny.run(tmp_path / "run", **data)
    assert not (tmp_path / "run" / "config.json").exists()


def run_of(tmp_path, text, **changes):
    """The lines of metrics.jsonl after a step on this data."""
    tiny.run(tmp_path / "run", steps=1, **(jsonl(tmp_path, text) | changes))
    return (tmp_path / "run/metrics.jsonl").read_text().splitlines()


@pytest.mark.all
def test_the_whole_example_reaches_the_reward_and_needs_no_answer(tmp_path, monkeypatch):
    (tmp_path / "whole.py").write_text(
        "def reward(text, example):\n"
        "    assert example['reward_model'] == {'target': [1, None]} and 'answer' not in example\n"
        "    return float(example['points']) if example['prompt'][0]['role'] == 'user' else 0.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    row = {"prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"target": [1, None]},
           "points": 0.25}
    text = "\n".join([json.dumps(row)] * 8)
    measured = {"eval/greedy_accuracy": 0.0, "eval/sampled_accuracy": 0.0}
    with mock.patch.object(evaluate.Evaluator, "run", return_value=measured):
        lines = run_of(tmp_path, text, reward__name="whole:reward", metrics__samples_every=1)
    [values] = [json.loads(x) for x in lines if '"train"' in x]
    assert values["reward/mean"] == 0.25
    samples = [json.loads(x) for x in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert samples and all(line["answer"] is None for line in samples)


@pytest.mark.all
@pytest.mark.parametrize("changes, message", [
    (dict(reward__name="exact"), "held-out data: 8 of 8 .*no answer, which the reward 'exact' compares"),
    (dict(warmup__steps=1, warmup__params={}), "warm-up data: 8 of 8 .*it has no answer for the warm-up"),
])
def test_data_without_answers_where_they_are_needed(tmp_path, changes, message):
    text = "\n".join(['{"prompt": "1+1="}'] * 8)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        tiny.run(tmp_path / "run", **(jsonl(tmp_path, text) | changes))
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.all
def test_a_run_starts_in_the_same_workdir_once_its_data_is_mended(tmp_path):
    good = [GOOD % i for i in range(8)]
    with pytest.raises(ValueError, match=r"data\.jsonl:8 \(id 'x'\): 7 prompt tokens"):
        run_of(tmp_path, "\n".join([*good[:7], '{"prompt": "1+1+1=", "id": "x"}', good[7]]))
    assert any('"train"' in line for line in run_of(tmp_path, "\n".join(good)))


@pytest.mark.all
def test_a_character_outside_the_alphabet(tmp_path):
    with pytest.raises(ValueError, match="'x' .* not in the tokenizer's alphabet"):
        tiny.run(tmp_path / "run", task__template="x{prompt}", task__max_prompt_tokens=9)


def test_a_group_of_one_with_grpo(tmp_path):
    with pytest.raises(ValueError, match="group_size is 1.*'grpo'.*at least 2"):
        tiny.run(tmp_path / "run", rollout__group_size=1, train__minibatches=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.all
def test_a_reward_that_cannot_be_loaded(tmp_path):
    with pytest.raises(ValueError, match="'no_such_module:f' cannot be loaded"):
        tiny.run(tmp_path / "run", reward__name="no_such_module:f")


class Reached(Exception):
    """The set-up got as far as the first parameters."""


def stop(*_):
    raise Reached


@pytest.mark.all
@pytest.mark.parametrize("mistake", [
    dict(eval__prompts=257), dict(task__max_prompt_tokens=4), dict(reward__name="no_such_module:f"),
])
def test_a_refused_start_leaves_a_workdir_that_the_corrected_config_can_use(tmp_path, mistake):
    with pytest.raises(ValueError):
        tiny.run(tmp_path / "run", **mistake)
    with mock.patch.object(train, "initial_params", stop), pytest.raises(Reached):
        tiny.run(tmp_path / "run")


# Rewards


def test_nan_rewards_are_counted_and_the_run_goes_on():
    lines = [r for r in tiny.lines(tiny.finished()) if r["phase"] == "train"]
    assert len(lines) == tiny.STEPS
    assert any(r["reward/non_finite"] > 0 for r in lines)
    assert all(np.isfinite(r["reward/mean"]) and np.isfinite(r["actor/pg_loss"]) for r in lines)


@pytest.mark.all
def test_hanging_and_raising_rewards_get_their_score_and_never_stop_the_run(tmp_path):
    collected, parts = [], SyncSource.parts

    def record(self, step):
        for part in parts(self, step):
            collected.extend(part)
            yield part

    with mock.patch.object(SyncSource, "parts", record):
        tiny.run(tmp_path, steps=1, reward__name="tests.tiny_rewards:hangs_or_raises",
                 reward__timeout=0.3, reward__on_error="-2.0", eval__prompts=1,
                 children=contextlib.nullcontext)
    [line] = [r for r in tiny.lines(tmp_path) if r["phase"] == "train"]
    hung = [s for s in collected if s.text.startswith("1")]
    raised = [s for s in collected if s.text.startswith(("2", "3", "4"))]
    assert hung and line["reward/timeouts"] >= len(hung)
    assert raised and line["reward/errors"] >= len(raised)
    assert all(s.score == -2.0 for s in hung + raised)
    assert any(s.score >= 0 for s in collected)


# Numbers


def inject(field, step):
    """Trainer.update with NaN in one field of the rollout batch of one step."""
    update = Trainer.update

    def broken(self, state, rows, now, version):
        if now == step:
            rows = rows | {field: np.full_like(rows[field], np.nan)}
        return update(self, state, rows, now, version)

    return mock.patch.object(Trainer, "update", broken)


@pytest.mark.all
@BY_JAX
def test_nan_gradients_alone_stop_the_run(tmp_path):
    """The loss may be finite where its gradient is not."""
    update = Trainer.update

    def broken(self, state, rows, now, version):
        state, rows, values = update(self, state, rows, now, version)
        return state, rows, values | {"actor/grad_norm": np.float32("inf")}

    with mock.patch.object(Trainer, "update", broken), \
            pytest.raises(FloatingPointError, match="step 1: actor/grad_norm is inf"):
        tiny.run(tmp_path)


@pytest.mark.all
def test_nan_parameters_stop_the_warm_up(tmp_path):
    def broken(setup):
        return jax.tree.map(lambda x: x * jnp.nan, initial_params(setup))

    with mock.patch.object(train, "initial_params", broken), \
            pytest.raises(FloatingPointError, match="warm-up step 1: .*cross-entropy is nan"):
        tiny.run(tmp_path)


@pytest.mark.all
def test_nan_parameters_without_a_warm_up_stop_the_first_step(tmp_path):
    def broken(setup):
        return jax.tree.map(lambda x: x * jnp.nan, initial_params(setup))

    with mock.patch.object(train, "initial_params", broken), \
            pytest.raises(FloatingPointError, match="token 0 of eval/0/.* the weight embed .* not finite"):
        tiny.run(tmp_path, warmup__steps=0)


# Checkpoints


@pytest.fixture
def copied(tmp_path):
    """A copy of the finished run, whose checkpoints are those of steps 4 and 5."""
    shutil.copytree(tiny.finished(), tmp_path / "run")
    return tmp_path / "run"


def damage(step_folder):
    """Flips one bit of the largest file of a checkpoint."""
    path = max((p for p in step_folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_set_aside_and_the_run_continues_from_the_older(copied, caplog,
                                                                                capsys):
    damage(copied / "checkpoints" / "5")
    tiny.run(copied)
    assert "checkpoint 5 is damaged" in caplog.text and "restoring step 4" in caplog.text
    assert f"continuing {copied} after step 4" in capsys.readouterr().out
    assert (copied / "checkpoints" / "5.corrupt").exists()
    assert_same_run(copied)


def test_only_damaged_checkpoints_are_an_error(copied):
    for step in ("4", "5"):
        damage(copied / "checkpoints" / step)
    before = tiny.lines(copied)
    with pytest.raises(ValueError, match="no intact checkpoint left.*checkpoint 5 is damaged"):
        tiny.run(copied)
    assert tiny.lines(copied) == before


@pytest.mark.all
def test_no_space_left_for_a_checkpoint(tmp_path):
    """The older checkpoint is intact; with space again the run ends as if nothing had been."""
    write = checkpoint.write_manifest

    def full(step_directory):
        if step_directory.name == "2":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(step_directory)

    with mock.patch.object(checkpoint, "write_manifest", full), \
            pytest.raises(RuntimeError) as error:
        tiny.run(tmp_path)
    for words in ("checkpoint 2 could not be written", "No space left", "[0] are intact"):
        assert words in str(error.value)
    tiny.run(tmp_path)
    assert_same_run(tmp_path)


@pytest.mark.all
def test_no_space_left_for_the_record(tmp_path):
    class Full:
        """The file of the record, on a disk that fills up at the first step's line."""

        def __init__(self, file):
            self._file = file

        def write(self, data):
            if b'"phase": "train"' in data:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self._file.write(data)

        def close(self):
            self._file.close()

    init = metrics.LineFile.__init__

    def broken(self, *arguments):
        init(self, *arguments)
        self._file = Full(self._file)

    with mock.patch.object(metrics.LineFile, "__init__", broken), \
            pytest.raises(RuntimeError, match="record .*metrics.jsonl.*No space left"):
        tiny.run(tmp_path)
    with checkpoint.Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() == 0


# The workdir


def test_another_config_in_the_same_workdir_is_refused_with_the_difference(copied):
    before = (copied / "config.json").read_text()
    with pytest.raises(ValueError) as error:
        tiny.run(copied, optimizer__lr=0.1, correction__weight="none")
    assert "optimizer.lr: 0.003 -> 0.1" in str(error.value)
    assert 'correction.weight: null -> "none"' in str(error.value)
    assert "seed" not in str(error.value)
    assert (copied / "config.json").read_text() == before


@pytest.mark.all
@BY_JAX
def test_a_checkpoint_of_another_model_is_refused(tmp_path, copied):
    """The same path, but another model in it than when the run began."""
    setup = tiny.setup()
    training = dataclasses.replace(
        setup.training, model=dataclasses.replace(setup.model, mlp_dim=40)
    )
    other = dataclasses.replace(setup, training=training)
    with mock.patch.object(train, "build", lambda c: other), \
            mock.patch.object(train, "Trainer", tiny._shared_trainer), \
            pytest.raises(ValueError, match=r"leaves differ.*down.*48,32.*40,32"):
        train.run(tiny.config(), str(copied))


@pytest.mark.parametrize("field", ["logp_behav", "logp_old"])
def test_a_nan_loss_names_step_and_term_and_keeps_the_last_checkpoint(copied, field):
    """In a finished run that has three steps more than before; it is saved after every second one."""
    with inject(field, 8), pytest.raises(FloatingPointError) as error:
        tiny.run(copied, steps=8)
    message = str(error.value)
    assert "step 8" in message and "actor/pg_loss is nan" in message
    assert ("actor/grad_norm is nan" in message) == (field == "logp_behav")
    assert "checkpoint of step 6 is intact" in message
    with checkpoint.Checkpoints(copied, keep=2) as checkpoints:
        state, meta = checkpoints.restore(abstract_state(tiny.setup().training))
    assert meta["step"] == 6
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    lines, before = tiny.lines(copied), tiny.lines(tiny.finished())
    assert lines[: len(before)] == before
    assert [r["step"] for r in lines[len(before) :] if r["phase"] == "train"] == [6, 7]
