"""What a run may change when it is continued: freely, by name, or not at all."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest

from configs import default
from jaxrl_tis import cli_flags
from jaxrl_tis.learner import optimizer
from jaxrl_tis.learner.state import abstract_state
from jaxrl_tis.record import changes, checkpoint, provenance
from tests import tiny

BY_JAX = pytest.mark.by_jax("orbax, and the state of optax")


@pytest.fixture
def found(tmp_path):
    """({field: new value}, named, fields of the run before) -> what `changes.find` returns."""
    def find(fields, named=(), **before):
        old = default.get_config()
        old.update_from_flattened_dict({n.replace("__", "."): x for n, x in before.items()})
        provenance.write_run_files(tmp_path, old.to_dict())
        old.update_from_flattened_dict(fields)
        return changes.find(tmp_path, old.to_dict(), named)

    return find


def test_a_folder_without_a_run_has_nothing_to_change(tmp_path):
    assert changes.find(tmp_path, default.get_config().to_dict(), ["optimizer.lr"]) == {}


def test_free_and_rounded_names_are_fields_or_groups():
    fields = provenance.flat(default.get_config().to_dict())
    changes.check_names(changes.FREE + changes.ROUNDED + changes.INTERRUPTING + changes.QUEUED, fields)


@pytest.mark.parametrize("field, value", [
    ("checkpoint.every", 7), ("checkpoint.keep", 9), ("watchdog.timeout", 9.0), ("reward.timeout", 9.0),
    ("metrics.diagnostics_every", 3), ("metrics.sinks", ("wandb",)), ("eval.every", 3),
    ("eval.prompts", 9), ("eval.threshold", 0.5), ("eval.params.split", "train"), ("engine.slots", 64), ("engine.num_pages", 99), ("engine.prefill_chunk", 64),
    ("steps", 200), ("name", "other"),
])
def test_what_cannot_change_a_number_is_free(found, field, value):
    [pair] = found({field: value}).values()
    assert pair[1] == (list(value) if isinstance(value, tuple) else value) != pair[0]


@pytest.mark.parametrize("field, value", [
    ("optimizer.lr", 1e-5), ("reward.on_error", "-1"), ("task.params.size", 7), ("seed", 1),
    ("task.max_prompt_tokens", 64), ("engine.page_size", 32), ("rollout.prompts", 8),
])
def test_all_else_is_free_by_its_name_or_that_of_its_group_alone(found, field, value):
    with pytest.raises(ValueError, match=f"another configuration: {field}: .* --change={field} to continue"):
        found({field: value})
    for named in (field, field.rpartition(".")[0] or field):
        assert list(found({field: value}, ["metrics", named])) == [field]


def test_a_run_that_keeps_routes_keeps_them(found):
    keeps = {"correction__routing": "keep", "engine__record_routes": True}
    with pytest.raises(ValueError, match="keeps the sampler's routes .*keep.* -> .*r3.* cannot change"):
        found({"correction.routing": "r3"}, ["correction.routing"], **keeps)
    assert found({"correction.routing": "keep"}, ["correction.routing"])


def test_each_field_that_is_not_named_is_listed(found):
    with pytest.raises(ValueError) as refusal:
        found({"optimizer.lr": 2e-4, "seed": 1, "critic.lr": 1.0, "steps": 9}, ["critic.lr"])
    assert "optimizer.lr: 0.0001 -> 0.0002; seed: 0 -> 1. Use" in str(refusal.value)
    assert "--change=optimizer.lr,seed to continue" in str(refusal.value)
    assert "critic" not in str(refusal.value) and "steps" not in str(refusal.value)


@pytest.mark.parametrize("before", [
    {"optimizer__schedule": "cosine"}, {"critic__schedule": "linear", "correction__advantage": "gae"},
    {"engine__noise_start": 0.01},
])
def test_the_number_of_steps_is_named_where_something_follows_it(found, before):
    with pytest.raises(ValueError, match="steps: 100 -> 200.*--change=steps"):
        found({"steps": 200}, **before)
    assert found({"steps": 200}, ["steps"], **before) == {"steps": [100, 200]}


def test_a_schedule_without_a_critic_follows_nothing(found):
    assert found({"steps": 200}, critic__schedule="linear") == {"steps": [100, 200]}


@pytest.mark.parametrize("field", [*changes.ROUNDED, *changes.INTERRUPTING])
def test_with_samplers_that_run_ahead_batching_and_breaks_are_named(found, field):
    for before in ({"rollout__schedule": "one_step"}, {"rollout__replay": "uniform(uses=2)"}):
        with pytest.raises(ValueError, match=f"--change={field}"):
            found({field: 3}, **before)
        assert found({field: 3}, [field], **before)


def test_a_queue_of_samples_keeps_its_shape(found):
    ahead = {"rollout__schedule": "areal(staleness=4)"}
    with pytest.raises(ValueError, match="does not fit this change: rollout.group_size: 8 -> 4"):
        found({"rollout.group_size": 4}, ["rollout"], **ahead)
    with pytest.raises(ValueError, match="does not fit this change: rollout.schedule"):
        found({"rollout.schedule": "sync"}, ["rollout"], **ahead)
    assert found({"rollout.group_size": 4}, ["rollout"]) == {"rollout.group_size": [8, 4]}
    with pytest.raises(ValueError, match="does not fit this change: rollout.temperature"):
        found({"rollout.temperature": 0.5}, ["rollout"], **ahead)
    with pytest.raises(ValueError, match="does not fit this change: correction.advantage"):
        found({"correction.advantage": "remax"}, ["correction"], **ahead)
    assert found({"correction.advantage": "rloo"}, ["correction"], **ahead)


def test_a_run_with_fields_that_no_longer_exist_is_refused_in_one_line(tmp_path):
    old = default.get_config().to_dict()
    old["rollout"]["mode"] = old["rollout"].pop("schedule")
    provenance.write_run_files(tmp_path, old)
    with pytest.raises(ValueError, match="fields rollout.mode no longer exist") as refusal:
        changes.find(tmp_path, default.get_config().to_dict())
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("group", changes.OPEN)
def test_fields_of_any_name_come_and_go_by_their_name(tmp_path, group):
    without, section = default.get_config().to_dict(), group.partition(".")
    within = default.get_config().to_dict()
    within[section[0]][section[2]] = {**within[section[0]][section[2]], "mine": 1}
    for old, new in ((without, within), (within, without)):
        provenance.write_run_files(tmp_path, old)
        if not changes.is_free(f"{group}.mine", provenance.flat(old), provenance.flat(new)):
            with pytest.raises(ValueError, match=f"another configuration: {group}.*mine"):
                changes.find(tmp_path, new)
        assert set(changes.find(tmp_path, new, [f"{group}.mine", group])) <= {f"{group}.mine", group}


def test_the_page_lists_what_is_free():
    page = (pathlib.Path(__file__).parents[2] / "docs/reliability.md").read_text()
    [row] = [line for line in page.splitlines() if line.startswith("| `checkpoint`, ")]
    assert set(re.findall("`([^`]+)`", row.split("|")[1])) == set(changes.FREE)


def test_groups_with_fields_of_any_name_are_those_of_the_command_line():
    assert set(changes.OPEN) == set(cli_flags.FREE)


def test_a_name_that_is_no_field_is_refused(found):
    with pytest.raises(ValueError, match="--change=optimizer.lrr: .* did you mean optimizer.lr"):
        found({}, ["optimizer.lrr"])
    assert found({}, ["task.params.path"]) == {}  # a task may have it


def test_data_are_named_by_their_group_and_by_any_parameter():
    for named in ("task", "task.params", "task.params.path"):
        assert changes.Changes((named,)).names("task.params")
    assert not changes.Changes(("task.param", "eval")).names("task.params")


def test_the_record_goes_back_with_the_run():
    """What changed after step 40 holds from step 20 on, when the run goes on from there."""
    first = changes.record([], 40, {"a": [1, 2]})
    assert first == [{"step": 40, "fields": {"a": [1, 2]}}]
    assert changes.record(first, 20, {"b": [1, None]}) == [
        {"step": 20, "fields": {"a": [1, 2]}}, {"step": 20, "fields": {"b": [1, None]}}]
    assert changes.record(first, 60, {}) == first == changes.record(first, 40, {"a": [1, 2]})


def test_roundings_are_told_where_there_are_any():
    fields = {"engine.slots": [8, 4], "steps": [1, 2]}
    assert changes.messages(fields, "invariant") == ["changed: engine.slots: 8 -> 4; steps: 1 -> 2"]
    assert changes.messages(fields, "fast")[1] == "engine.slots can change roundings, and samples with them"
    assert changes.messages({}, "fast") == []


# Runs


def described(workdir):
    return json.loads((workdir / "config.json").read_text())


def rates(workdir):
    return [r["actor/lr"] for r in tiny.lines(workdir) if r["phase"] == "train"]


def final(workdir, **overrides):
    with checkpoint.Checkpoints(workdir, keep=2) as checkpoints:
        return checkpoints.restore(abstract_state(tiny.setup(**overrides).training))[0]["policy"]


@pytest.mark.all
@BY_JAX
@pytest.mark.compiles
def test_another_rate_takes_over_the_state_of_the_optimizer(tmp_path, capsys):
    tiny.run(tmp_path, steps=1)
    before, lines = described(tmp_path), tiny.lines(tmp_path)
    with pytest.raises(ValueError, match="optimizer.lr: 0.003 -> 0.001.*--change=optimizer.lr"):
        tiny.run(tmp_path, steps=2, optimizer__lr=1e-3)
    assert described(tmp_path) == before and tiny.lines(tmp_path) == lines
    capsys.readouterr()
    changed = dict(steps=2, optimizer__lr=1e-3, task__max_prompt_tokens=6)
    tiny.run(tmp_path, change=["optimizer.lr", "task.max_prompt_tokens"], **changed)
    told = capsys.readouterr().out
    assert "changed: optimizer.lr: 0.003 -> 0.001; steps: 1 -> 2; task.max_prompt_tokens: 5 -> 6" in told
    assert "the learning rate of the policy is 0.001 now, and was 0.003" in told
    assert rates(tmp_path) == pytest.approx([3e-3, 1e-3])
    fields = {"optimizer.lr": [0.003, 0.001], "steps": [1, 2], "task.max_prompt_tokens": [5, 6]}
    assert described(tmp_path)["changes"] == [{"step": 1, "fields": fields}]
    assert described(tmp_path)["config"]["optimizer"]["lr"] == 1e-3
    assert optimizer.num_updates(final(tmp_path, **changed).opt_state) == 8  # 4 of each step
    tiny.run(tmp_path, **changed | {"steps": 3})  # no word of it any more
    assert [change["step"] for change in described(tmp_path)["changes"]] == [1, 2]


@pytest.mark.all
@BY_JAX
@pytest.mark.compiles
def test_more_steps_of_a_cosine_are_asked_for_and_told(tmp_path, capsys):
    """After the 4 updates of a step of one the rate is 0; of two steps it is half way down."""
    cosine = dict(optimizer__schedule="cosine")
    tiny.run(tmp_path, steps=1, **cosine)
    with pytest.raises(ValueError, match="steps: 1 -> 2.*--change=steps"):
        tiny.run(tmp_path, steps=2, **cosine)
    capsys.readouterr()
    tiny.run(tmp_path, steps=2, change=["steps"], **cosine)
    assert "the learning rate of the policy is 0.0015 now, and was 0\n" in capsys.readouterr().out


@pytest.mark.all
@BY_JAX
@pytest.mark.compiles
def test_what_is_free_changes_no_bit(tmp_path):
    """In invariant numerics, where the size of a batch changes no rounding."""
    exact = dict(model__numerics="invariant", engine__quantization="none", steps=3, eval__every=1)
    free = dict(
        engine__slots=5, engine__num_pages=12, engine__prefill_batch=2,
        engine__prefill_chunk=2, eval__every=2, eval__prompts=4, reward__timeout=9.0,
        checkpoint__every=3, checkpoint__keep=1, metrics__diagnostics_every=1, metrics__samples=1,
        watchdog__timeout=900.0, name="other",
    )
    tiny.run(tmp_path, **exact | {"steps": 1})
    tiny.run(tmp_path, **exact | free)
    reference = tiny.finished(**exact)
    ours, theirs = (
        [r for r in tiny.lines(w) if r["phase"] == "train"] for w in (tmp_path, reference)
    )
    for a, b in zip(ours, theirs, strict=True):
        same = [n for n in a.keys() & b.keys() if not n.startswith("rollout/")]
        assert len(same) > 100 and {n: a[n] for n in same} == {n: b[n] for n in same}
    for a, b in zip(*(jax.tree.leaves(final(w, **exact)) for w in (tmp_path, reference)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    [entry] = described(tmp_path)["changes"]
    names = {name.replace("__", ".") for name in free}
    assert set(entry["fields"]) == names | {"steps"} and entry["step"] == 1
    # Only the engine's record of itself shows the other batches.
    assert {r["rollout/occupancy"] for r in ours} != {r["rollout/occupancy"] for r in theirs}


@pytest.mark.all
@pytest.mark.cases("correction__kl_coeff-0.1")
@pytest.mark.compiles
@pytest.mark.parametrize("field, value", [
    ("model__mlp_dim", 64), ("correction__kl_coeff", 0.1),
    ("correction__controllers", "gradient_alignment(gac_low=0.1, gac_high=0.9)"),
])
def test_what_a_checkpoint_cannot_carry_is_refused(tmp_path, field, value):
    tiny.run(tmp_path, steps=1)
    before, name = described(tmp_path), field.replace("__", ".")
    with pytest.raises(ValueError, match=rf"other arrays than this change needs \({name}: ") as error:
        tiny.run(tmp_path, change=[name], steps=1, checkpoint__every=7, **{field: value})
    assert "checkpoint.every" not in str(error.value) and described(tmp_path) == before


def lines_of(path: pathlib.Path, first: str, count: int) -> str:
    problems = [(first, "5"), *((f"{i}+{i}=", f"{2 * i}") for i in range(count - 1))]
    lines = [json.dumps({"id": f"{i}", "prompt": p, "answer": a}) for i, (p, a) in enumerate(problems)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.all
@pytest.mark.compiles
def test_a_data_set_that_was_mended_goes_on_where_it_was(tmp_path, capsys):
    train, held = tmp_path / "train.jsonl", tmp_path / "held.jsonl"
    given = dict(
        task__name="jsonl", warmup__steps=0, eval__prompts=8,
        task__params={"path": lines_of(train, "2+3=", 9)},
        eval__params={"path": lines_of(held, "2+3=", 8)},
    )
    workdir = tmp_path / "run"
    tiny.run(workdir, steps=1, **given)
    lines_of(train, "3+2=", 9)
    with pytest.raises(ValueError, match=r"\(examples differ\).*--change=task.params to continue with"):
        tiny.run(workdir, steps=2, **given)
    lines_of(held, "3+2=", 8)
    with pytest.raises(ValueError, match="held-out examples differ .*--change=eval.params to continue"):
        tiny.run(workdir, steps=2, **given)
    tiny.run(workdir, steps=2, change=["task.params", "eval.params"], **given)
    [entry] = described(workdir)["changes"]
    assert entry["step"] == 1
    assert set(entry["fields"]) == {"steps", "data.examples", "data.held_out"}
    assert "data.examples: " in capsys.readouterr().out
    with checkpoint.Checkpoints(workdir, keep=2) as checkpoints:
        _, meta = checkpoints.restore(abstract_state(tiny.setup(steps=2, **given).training))
    assert meta["source"]["batches"]["position"] == {"next_index": 2}
    tiny.run(workdir, steps=3, **given)  # the new data are its own now
    other = given | dict(eval__params={"path": lines_of(tmp_path / "other.jsonl", "4+4=", 8)})
    tiny.run(workdir, steps=3, **other)  # others are named by the config itself
    assert {"eval.params.path", "data.held_out"} <= set(described(workdir)["changes"][-1]["fields"])
