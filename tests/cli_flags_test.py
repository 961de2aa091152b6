"""--config and its fields: any model, data and reward on any shipped config, mistakes named."""

import json
import pathlib
import re
import sys

import pytest
from absl import flags

from jaxrl_tis import __main__ as door, cli_flags, train
from jaxrl_tis.data import tasks
from jaxrl_tis.data.rewards import RewardWorker
from jaxrl_tis.rollouts.prompts import Prompter
from jaxrl_tis.validate import validate
from tests import forked
from tests.configs_test import QWEN, write_checkpoint

ROOT = pathlib.Path(__file__).parents[1]
SHIPPED = (
    "quickstart.py", "quickstart.py:off", "quickstart.py:centered", "quickstart.py:f32",
    "smollm2_135m.py",
    "gsm8k_qwen25_0p5b.py:grpo", "gsm8k_qwen25_0p5b.py:ppo", "dapo_qwen25_32b.py",
    "dapo_qwen3_8b.py",
)
SMALL = QWEN | {
    "eos_token_id": 258, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 264,
    "max_position_embeddings": 32768, "num_attention_heads": 8, "num_hidden_layers": 1,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}
SUMS = {"train": [(2, 3), (4, 1)], "heldout": [(1, 1)]}


@pytest.fixture
def read(monkeypatch):
    """(flags after --config) -> the config that a command gets; `path` may have a variant."""
    def call(path, *fields):
        argv = ["main", f"--config={path}", *(f"--config.{field}" for field in fields)]
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.delitem(sys.modules, "config_config", raising=False)  # of the file before
        values = flags.FlagValues()
        holder = cli_flags.define_config(values)
        values(argv)
        return holder.value
    return call


@pytest.fixture
def sums(tmp_path):
    """Fields that name a file of sums to train on and one to hold out."""
    for name, pairs in SUMS.items():
        rows = [{"q": f"{a}+{b}=", "a": a + b} for a, b in pairs]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        "task.name=jsonl", f"task.params.path={tmp_path}/train.jsonl", "task.params.prompt_field=q",
        "task.params.answer_field=a", "task.params.id_field=None",
        f"eval.params.path={tmp_path}/heldout.jsonl", "eval.prompts=1",
    ]


@pytest.mark.parametrize("name", SHIPPED)
def test_own_data_on_every_shipped_config(read, sums, name):
    config = read(ROOT / "configs" / name, *sums)
    validate(config)
    params = {**config.task.params}
    [example, _] = tasks.make(config.task.name, params)
    assert (example["prompt"], example["answer"]) == ("2+3=", "5")
    [held_out] = tasks.make(config.task.name, params | {**config.eval.params})
    assert held_out["prompt"] == "1+1="
    assert set(config.eval.params) == {"path"} and not config.warmup.params
    assert config.is_locked and config.task.params.is_locked


@pytest.mark.parametrize("name", sorted(set(SHIPPED) - {"smollm2_135m.py"}))
def test_another_task_keeps_its_splits_apart(read, name):
    config = read(ROOT / "configs" / name, "task.name=reasoning_gym", "task.params.size=8",
                  "task.params.name=chain_sum", "task.params.max_terms=3",
                  "eval.params.min_terms=3")
    assert config.task.params.to_dict() == {"size": 8, "name": "chain_sum", "max_terms": 3}
    assert config.eval.params.to_dict() == {"split": "eval", "min_terms": 3}
    assert config.warmup.params.to_dict() == {"split": "warmup"}
    validate(config)


def test_the_configs_own_task_keeps_its_parameters(read):
    config = read(ROOT / "configs/smollm2_135m.py", "task.name=reasoning_gym",
                  "task.params.max_terms=3", "task.params.allow_negation=true")
    assert config.task.params.to_dict() == {
        "name": "chain_sum", "size": 20_000, "min_terms": 2, "max_terms": 3, "min_digits": 1,
        "max_digits": 2, "allow_negation": True,
    }
    assert config.eval.params.to_dict() == {"split": "eval", "min_digits": 2}


@pytest.mark.all
@pytest.mark.parametrize("name", SHIPPED)
def test_own_model_and_reward_on_every_shipped_config(read, sums, tmp_path, monkeypatch, name):
    write_checkpoint(tmp_path / "model", SMALL)
    (tmp_path / "my_reward.py").write_text("def score(text, example):\n    return len(text)\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = read(ROOT / "configs" / name, *sums, f"model.path={tmp_path}/model",
                  "reward.name=my_reward:score", "task.max_prompt_tokens=128")
    setup = train.build(config)
    assert setup.model.embed_dim == 64 and setup.tokenizer.vocab_size == 259
    prompter = Prompter(setup.tokenizer, config.task)
    prompter.checked(tasks.make("jsonl", config.task.params), "training data")
    if name == "quickstart.py":
        with RewardWorker(config.reward.name, timeout=60.0, on_error=0.0) as rewards:
            assert rewards.score(["three"], [{}]) == [5.0]


def test_weights_of_a_reward_have_any_name(read):
    path = ROOT / "configs/quickstart.py"
    config = read(path, "reward.weights.format=0.1", "reward.weights.score=2", "task.name=jsonl",
                  "task.params.path=x", "reward.on_error=-1", "reward.network=true")
    assert config.reward.weights.to_dict() == {"format": 0.1, "score": 2}
    assert config.reward.on_error == "-1" and config.reward.network is True


def test_a_tokenizer_that_is_given_beside_a_model_is_taken(read):
    path = ROOT / "configs/quickstart.py"
    assert read(path, "model.path=m").task.tokenizer == ""
    assert read(path, "model.path=m", "task.tokenizer=t").task.tokenizer == "t"
    assert read(path, "task.tokenizer=t", "model.path=m").task.tokenizer == "t"
    assert read(path, "model.num_layers=2").task.tokenizer == "char"


def test_variables_of_a_chat_template(read):
    path, group = ROOT / "configs/quickstart.py", "task.template_kwargs"
    config = read(path, f"{group}.enable_thinking=False", f"{group}.effort=high", f"{group}.depth=3")
    expected = {"enable_thinking": False, "effort": "high", "depth": 3}
    assert config.task.template_kwargs.to_dict() == expected
    assert config.is_locked and config.task.template_kwargs.is_locked
    assert read(path, f"{group}.a=1", "task.name=jsonl").task.template_kwargs.to_dict() == {"a": 1}
    assert read(path, f"{group}.a=1", "model.path=m").task.template_kwargs.to_dict() == {"a": 1}


@pytest.mark.parametrize("fields, message", [
    (["task.name=jsonl"], "task 'jsonl' needs the parameters path; it has path, prompt_field"),
    (["task.name=jsonl", "task.params.path=a"], "eval.params is empty, .*config.eval.params.path"),
    (["task.name=jsonl", "task.params.path=a", "eval.params.pth=b"],
     "eval.params: task 'jsonl' has no parameter 'pth'; did you mean 'path'. It has path, prompt"),
    (["task.name=jsonl", "task.params.path=5", "eval.params.path=b"],
     "the parameter path is 5; it must be str or PathLike or Sequence"),
    (["task.params.path=a"], "task 'arithmetic' has no parameter 'path'; it has size, split, seed"),
    (["task.params.digits=2", "task.params.seed=x"], "the parameter seed is 'x'; it must be int"),
    (["task.name=sums"], "task.name is 'sums'; choose one of arithmetic, gsm8k_jsonl"),
    (["mesh.train=abc"], "mesh.train is .'abc',.; its entries must be of type int"),
    (["task.template={question}?"], "task.template is '{question}.'; it must contain {prompt}"),
    (["task.template=a set {}"], "it must contain {prompt}, and other braces must be doubled"),
    (["task.template=Answer:"], "task.template is 'Answer:'; it must contain {prompt}"),
    (["engine.retention=4"], "engine.retention is .4,.; it needs"),
    (["model.path=None"], "model.path is None; give a value, or model.path='' for an empty text"),
    (["name=None", "task.tokenizer=None"], "- name is None; .*\n- task.tokenizer is None; give"),
])
def test_parameters_that_do_not_fit_the_task_are_named(read, fields, message):
    with pytest.raises(ValueError, match=message):
        validate(read(ROOT / "configs/quickstart.py", *fields))


def test_a_field_that_may_be_none_can_be_set_back(read):
    path = ROOT / "configs/quickstart.py:off"
    assert read(path).correction.weight == "none"
    config = read(path, "correction.weight=None")
    assert config.correction.weight is None
    validate(config)


def test_two_configs_are_refused(read):
    paths = [f"--config={ROOT}/configs/{name}.py" for name in ("quickstart", "smollm2_135m")]
    with pytest.raises(flags.Error, match="^--config given more than once; give one value$"):
        cli_flags.parsed([paths[0], "--config.steps=1", paths[1]])


@pytest.mark.parametrize("fields, name", [
    (["--config.steps=1", "-config.steps", "2"], "steps"),
    (["--noconfig.task.chat", "--config.task.chat"], "task.chat"),
])
def test_a_field_that_is_given_twice_is_refused(fields, name):
    path = f"--config={ROOT}/configs/quickstart.py"
    with pytest.raises(flags.Error, match=f"^--config.{name} given more than once; give one value$"):
        cli_flags.parsed([path, "--config.name=--config.eval.every", "--config.eval.every=3", *fields])


@pytest.mark.parametrize("field, message", [
    ("optimizer.lrr=1", "config.optimizer has no field 'lrr'; did you mean 'lr'?"),
    ("optimiser.lr=1", "config has no field 'optimiser'; did you mean 'optimizer'?"),
    ("task.param.path=a", "config.task has no field 'param'; did you mean 'params'?"),
    ("gate.zzz=1", "config.gate has no field 'zzz'; it has max_d_max, max_d_mean, max_d_p99, "
     "max_dp_max, max_k3, required"),
    ("steps.many=1", "config.steps has no field 'many'; it has none"),
    ("mesh.train[0]=2", "config.mesh has no field 'train[0]'; did you mean 'train'?"),
    ("checkpoint=1", "config.checkpoint is a group of fields: set one of every, grace, keep"),
    ("steps=abc", "flag --config.steps=abc: invalid literal for int() with base 10: 'abc'"),
])
def test_a_mistyped_field_is_named_with_the_nearest(read, field, message):
    with pytest.raises(flags.Error) as error:
        read(ROOT / "configs/quickstart.py", field)
    assert str(error.value) == message


@pytest.mark.parametrize("text, message", [
    (None, "--config={path}: there is no file '{path}'"),
    ("def get_config(:", "{path}:1: invalid syntax"),
    ("\nsteps = 1", "{path}:1: module 'config_config' has no attribute 'get_config'"),
    ("def get_config():\n    raise ValueError('no such variant')", "{path}:2: no such variant"),
    ("from configs import default\ndef get_config():\n    c = default.get_config().lock()\n"
     "    c.step = 3\n    return c",
     '{path}:4: Key "step" does not exist and cannot be added since the config is locked.'),
    ("x", "{path}:1: name 'x' is not defined"),
    ("def get_config():\n    return 1 / 0", "{path}:2: division by zero"),
    ("def get_config():\n    return 3",
     "{path}: get_config() returns a value of type int, not a ConfigDict"),
    ("from configs import default\ndef get_config():\n    return default.get_config().optimiser",
     '{path}:3: \'optimiser\'\nDid you mean "optimizer" instead of "optimiser"?'),
])
def test_a_config_file_with_a_mistake_is_named_with_its_line(read, tmp_path, text, message):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(flags.Error) as error:
        read(path)
    assert str(error.value).startswith(message.format(path=path))


def test_fields_of_a_command_line():
    argv = ["main", "--config=a.py", "--config.a.b=1=2", "-config.c", "x", "--noconfig.d", "--e=1"]
    assert cli_flags.overrides(argv) == {"a.b": "1=2", "c": "x", "d": "False"}
    flagged = ["main", "--config.a", "--config.b", "-1", "--config.c", "-x", "--config.d"]
    assert cli_flags.overrides(flagged) == {"a": "True", "b": "-1", "c": "True", "d": "True"}


# Whole commands

COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for folder in ("jaxrl_tis", "experiments") for path in (ROOT / folder).rglob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)
# Runs commands, one after the other: [[exit code, stdout, stderr], ...].
ALL = """
import contextlib, io, json, runpy, sys
from absl import flags
told = []
for argv in json.loads(sys.argv[1]):
    out, err, before, code = io.StringIO(), io.StringIO(), set(flags.FLAGS), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sys.argv = argv
        sys.modules.pop(argv[0], None)
        try:
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
    flags.FLAGS.remove_flag_values(set(flags.FLAGS) - before)
    told.append((code, out.getvalue(), err.getvalue()))
print("told", json.dumps(told))
"""


# Words of the command line -> what is said of them.
REFUSED = {
    ("jaxrl_tis", "gat"): "'gat' is no command of jaxrl-tis; there are train, gate, doctor, audit, report, "
    "evaluate, export, score, sweep, provision, serve, aot",
    ("jaxrl_tis", "score", "--model=m"): "--tokens, --out not given; --help shows every flag",
    ("jaxrl_tis.score", "--model=m"): "--tokens, --out not given; --help shows every flag",
    ("jaxrl_tis.main", "--workdir=w"): "--config not given; --help shows every flag",
    ("jaxrl_tis.main", "--wrkdir=w"): "Unknown command line flag 'wrkdir'. Did you mean: workdir ?",
    ("jaxrl_tis.score", "--model=m", "--model", "n"): "--model given more than once; give one value",
    ("jaxrl_tis.main", "--config=configs/quickstart.py", "--workdir="): "--workdir not given; --help shows "
    "every flag",
    ("jaxrl_tis.main", "--flagfile=none"): "Unable to open flagfile: [Errno 2] No such file or directory: "
    "'none'",
    ("jaxrl_tis.main", "--config", "none.py"): "--config=none.py: there is no file 'none.py'; give the path of a config, as in configs/quickstart.py",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """{words of a command: (exit code, stdout, stderr)}, all in one process."""
    log = tmp_path_factory.mktemp("commands") / "log"
    words = [*((command, "--help") for command in COMMANDS), *REFUSED]
    code, text = forked.run(["-c", ALL, json.dumps(words)], log)
    assert code == 0, text
    return dict(zip(words, json.loads(text.partition("told ")[2]), strict=True))


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_a_command_line_that_lacks_something_is_refused_in_one_line(ended, words):
    assert ended[words] == [2, "", f"{REFUSED[words]}\n"]


def test_the_commands_are_found():
    assert {"jaxrl_tis", "jaxrl_tis.main", "jaxrl_tis.gate"} <= set(COMMANDS)


def test_the_door_leads_to_every_tool():
    tools = {f"jaxrl_tis.{module}" for module, _ in door.COMMANDS.values()}
    studies = {name for name in COMMANDS if name.startswith("experiments.")}
    launchers = {"jaxrl_tis", "jaxrl_tis.libtpu_flags"}  # the second is read by scripts
    assert tools == set(COMMANDS) - studies - launchers


def test_help_ends_with_0_and_names_the_command_s_own_flags(ended):
    for command in COMMANDS:
        code, out, err = ended[command, "--help"]
        assert code == 0 and not err and 3 < len(out.splitlines()) < 80, command
        assert "flags:" in out or "usage: " in out, command
        for foreign in ("alsologtostderr", "--pdb", "--logtostderr", "absl"):
            assert foreign not in out, command


def test_help_ends_with_two_examples_whose_flags_the_command_has(ended):
    for command in COMMANDS:
        about, _, examples = ended[command, "--help"][1].partition("\nexamples:\n")
        lines = examples.splitlines()
        assert len(lines) >= 2 and all(f"python -m {command}" in line for line in lines), command
        named = re.findall(r"--(?!config\.|xla_)([a-z_]+)", examples)
        assert set(named) <= set(re.findall(r"--(?:\[no\])?([a-z_]+)", about)), command


def test_help_of_a_command_with_flags_of_several_modules(ended):
    _, out, _ = ended["jaxrl_tis.main", "--help"]
    assert out.startswith("Runs one config, and continues its run where it was interrupted.\n\nflags:\n")
    assert "  --config=...\n      Config file; fields are overridden by --config.field=value. " \
        "Required.\n" in out
    assert "  --workdir=...\n      Folder of the run" in out and "--profile_steps=..." in out
    assert "  --heartbeat_timeout=...\n      Seconds after which a silent process counts as dead. " \
        "Default: 100.\n" in out
    _, out, _ = ended["jaxrl_tis.sweep", "--help"]
    assert "  --[no]dry_run\n      Show the commands and run none.\n" in out
