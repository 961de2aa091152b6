"""A run small enough for tests: a layer of width 32, one-digit sums, a few steps, one device."""

import contextlib
import copy
import functools
import json
import pathlib
from unittest import mock

from configs import default
from jaxrl_tis import build, train
from jaxrl_tis.learner.trainer import Trainer
from jaxrl_tis.report import page
from tests import runs, threaded

STEPS = 5
EPISODES = dict(  # of up to three turns; the environment gives the rewards
    task__environment="tests.tiny_environment:Sums", task__max_context_tokens=20,
    task__max_turns=3, task__environment_workers=1, reward__name="exact",
)
HARNESS = dict(  # sessions of two calls by the `openai` client
    rollout__harness="tests.tiny_harness:sums", task__max_context_tokens=20, reward__name="exact",
    reward__on_error="drop",
)
_build, _trainer, _engine = build.build, Trainer, build.Engine


def config(**overrides):
    """The tiny config; overrides are dotted names with "__" for the dot: `train__epochs=1`."""
    c = default.get_config()
    c.name = "tiny"
    c.steps = STEPS
    c.model.num_layers = 1
    c.model.embed_dim = 32
    c.model.num_heads = 2
    c.model.num_kv_heads = 1
    c.model.head_dim = 16
    c.model.mlp_dim = 48
    c.task.tokenizer = "char"
    c.task.params = {"size": 256, "digits": 1, "terms": 2, "ops": "+"}
    c.task.max_prompt_tokens = 5
    c.task.date = "2026-01-31"  # of the clock, two runs would share no Setup
    c.reward.name = "tests.tiny_rewards:closeness"
    c.reward.on_error = "0"
    c.warmup.steps = 12
    c.warmup.rows = 32
    c.warmup.lr = 1e-2
    c.rollout.prompts = 4
    c.rollout.group_size = 4
    c.rollout.max_new_tokens = 3
    c.rollout.temperature = 0.8
    c.engine.slots = 8
    c.engine.steps_per_call = 2
    c.engine.prefill_batch = 4
    c.optimizer.lr = 3e-3
    c.critic.lr = 3e-3
    c.train.minibatches = 2
    c.train.epochs = 2
    c.train.microbatch_rows = 4
    c.eval.every = 2
    c.eval.prompts = 8
    c.checkpoint.every = 2
    for name, value in overrides.items():
        *path, last = name.split("__")
        setattr(functools.reduce(getattr, path, c), last, value)
    return c.lock()


@functools.cache
def _cached(kind: str, key: str) -> dict:
    return {}


def _shared_build(c):
    store = _cached("setup", c.to_json())
    if not store:
        store["setup"] = _build(c)
    return store["setup"]


def _shared_engine(*args):
    layout = args[2]
    store = _cached("engine", repr((args, [d.id for d in layout.mesh.devices.flat])))
    if not store:
        store["engine"] = _engine(*args)
    return store["engine"]


def _shared_trainer(setup):
    c, devices = setup.config, [d.id for d in setup.layout.mesh.devices.flat]
    updates = c.steps * c.train.epochs * c.train.minibatches
    schedules = [(o.to_json(), o.schedule == "constant" or updates) for o in (c.optimizer, c.critic)]
    made_of = (setup.update_learner, setup.correction, setup.has_critic, schedules, devices,
               bool(setup.recompute_reason))
    store = _cached("trainer", repr(made_of))
    if not store:
        store["trainer"] = _trainer(setup)
    trainer = copy.copy(store["trainer"])
    trainer.setup = setup
    return trainer


@contextlib.contextmanager
def one_device(children=threaded.children):
    """Programs of the tiny config on one device, traced once for all configs that have them alike
    (they hold no state), and no report, whose plots take seconds. Rewards and environments are called
    in threads, or in processes with `contextlib.nullcontext` for `children`."""
    with (
        children(),
        mock.patch.object(build, "Engine", _shared_engine),
        mock.patch.object(train, "build", _shared_build),
        mock.patch.object(train, "Trainer", _shared_trainer),
        mock.patch.object(page, "write", lambda *_, **__: None),
    ):
        yield


def run(workdir, change=(), children=threaded.children, **overrides) -> dict:
    """`train.run` of the tiny config; see `one_device`."""
    with one_device(children):
        return train.run(config(**overrides), str(workdir), change=change)


def setup(**overrides):
    """`train.build` of the tiny config."""
    with one_device():
        return train.build(config(**overrides))


def lines(workdir) -> list[dict]:
    """metrics.jsonl as it is on disk, without times."""
    text = (pathlib.Path(workdir) / "metrics.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in records]


@functools.cache
def finished(**overrides) -> pathlib.Path:
    """Folder of an uninterrupted run, see `runs.shared`."""
    return runs.shared(config(**overrides).to_json(), lambda folder: run(folder, **overrides))
