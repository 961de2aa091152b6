"""Config fields that may change when a run continues.

Fields of FREE do not affect the numbers of a run. Fields of ROUNDED change how sequences are
batched; in a synchronous run this affects roundings only. Any other changed field must be named:

    python -m jaxrl_tis.main --config=... --workdir=... --config.optimizer.lr=1e-5 --change=optimizer.lr

config.json lists every change with the step after which it holds.
"""

import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_tis.record import provenance

# Names of fields or of groups of fields.
FREE = (
    "name", "checkpoint", "watchdog", "processes", "metrics", "eval", "reward.timeout",
    "reward.workers", "task.environment_workers", "task.turn_timeout",
    "rollout.engines", "rollout.weights_folder", "rollout.engine_token_file",
    "rollout.ray_address", "rollout.cpus_per_worker", "rollout.gpus_per_worker",
    "rollout.tpus_per_worker", "rollout.worker_timeout", "rollout.start_timeout",
    "rollout.snapshot_gib", "rollout.harness_timeout", "rollout.harness_python", "rollout.canary",
    "engine.sleep",
)
ROUNDED = (
    "engine.slots", "engine.num_pages", "engine.prefill_batch", "engine.prefill_chunk",
)
# Groups whose fields have any names (`cli_flags.FREE`).
OPEN = (
    "task.params", "eval.params", "warmup.params", "task.template_kwargs", "task.environment_params",
    "reward.weights",
)
# A save or an evaluation interrupts asynchronous samplers, and newer weights may continue
# sequences.
INTERRUPTING = ("checkpoint.every", "eval.every")
# A checkpoint of samplers that run ahead has their queue, which these shape.
QUEUED = (
    "rollout.schedule", "rollout.driver", "rollout.group_size", "rollout.prompts",
    "rollout.max_new_tokens", "task.max_context_tokens", "rollout.replay", "rollout.queue",
    "rollout.old_logp_source", "rollout.snapshots", "rollout.temperature",
    "rollout.sampling_mask_size", "correction.centering", "engine.quantization",
    "engine.record_routes", "seed", "task.chat", "task.system", "task.template",
    "task.template_kwargs", "task.tokenizer", "task.escape_special_tokens",
)


@dataclasses.dataclass(frozen=True)
class Changes:
    """Differences between this start of a run and the previous one.

    Attributes:
      named: fields and groups of fields that --change names.
      fields: {dotted field: [old value, new value]}, None where there is none.
    """

    named: tuple[str, ...] = ()
    fields: Mapping[str, list] = dataclasses.field(default_factory=dict)

    def names(self, field: str) -> bool:
        """Whether --change names a field, its group or a part of it."""
        return is_within(field, self.named) or any(is_within(name, [field]) for name in self.named)

    def named_fields(self) -> "Changes | None":
        """Returns the changes that --change names; None where it names none of them."""
        fields = {field: pair for field, pair in self.fields.items() if self.names(field)}
        return Changes(self.named, fields) if fields else None

    def __str__(self) -> str:
        return "; ".join(f"{name}: {before} -> {after}" for name, (before, after) in self.fields.items())


def is_within(field: str, names: Sequence[str]) -> bool:
    """Whether `names` has this field or a group that contains it."""
    return any(field == name or field.startswith(f"{name}.") for name in names)


def find(
    workdir: str | os.PathLike, config: Mapping[str, Any], named: Sequence[str] = ()
) -> dict[str, list]:
    """Compares a config with that of the run in a folder, and returns the differences; see
    `Changes.fields`.

    Args:
      config: the resolved configuration of this start.
      named: fields and groups of fields that may differ.

    Raises:
      ValueError: `named` has a field that does not exist; a field differs that is neither free nor
        named, or that may never change; or config.json is broken.
    """
    new = provenance.flat(config)
    check_names(named, new)
    saved = provenance.saved_config(workdir)
    if saved is None:
        return {}
    old = provenance.flat(saved)
    whole = new | old  # a run of another version may lack fields
    changed = [name for name, *_ in provenance.differences(old, new)]
    is_queued = is_ahead(whole) or is_ahead(new)
    fixed = [name for name in changed if is_queued and is_within(name, QUEUED)]
    if is_queued and (whole["correction.advantage"] == "remax") != (new["correction.advantage"] == "remax"):
        fixed.append("correction.advantage")  # remax has one more answer in a group
    refused = [
        name for name in changed
        if not is_within(name, named) and not is_free(name, whole, new)
    ]
    shown = lambda names: "; ".join(
        f"{name}: {before} -> {after}" for name, before, after in provenance.differences(old, new)
        if name in names
    )
    gone = [name for name in refused if name not in new and not is_within(name, OPEN)]
    if gone:
        raise ValueError(
            f"{workdir} holds a run of another version of this code, whose fields {', '.join(gone)} "
            "no longer exist. Resume it with that version, or use a new workdir"
        )
    if "correction.routing" in changed and old["correction.routing"] == "keep":
        raise ValueError(
            f"the run in {workdir} keeps the sampler's routes in all its passes: "
            f"{shown(['correction.routing'])} cannot change. Use a new workdir"
        )
    if fixed:
        raise ValueError(
            f"the run in {workdir} has a queue of samples that does not fit this change: "
            f"{shown(fixed)}. Use the old values, or a new workdir"
        )
    if refused:
        raise ValueError(
            f"{workdir} holds a run with another configuration: {shown(refused)}. Use the old "
            f"values to resume, a new workdir, or --change={','.join(refused)} to continue with "
            "the new values"
        )
    return {name: [old.get(name), new.get(name)] for name in changed}


def check_names(named: Sequence[str], fields: Mapping[str, Any]) -> None:
    """Raises ValueError for a name that is neither a field nor a group of fields."""
    groups = {name.rsplit(".", i)[0] for name in fields for i in range(name.count(".") + 1)}
    for name in named:
        if name not in groups and not is_within(name, OPEN):
            near = difflib.get_close_matches(name, groups, n=1)
            raise ValueError(
                f"--change={name}: there is no such field"
                + (f"; did you mean {near[0]}?" if near else "; give names as in optimizer.lr")
            )


def is_free(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a field may change without being named; `old` and `new` are flat configurations."""
    if name == "steps":
        return not (needs_steps(old) or needs_steps(new))
    if name in ROUNDED:
        return not (is_ahead(new) or any(new["engine.retention"]))
    if name in INTERRUPTING:
        return not is_ahead(new)
    return is_within(name, FREE)


def messages(fields: Mapping[str, list], numerics: str) -> list[str]:
    """Returns the lines that announce changes to the user; `numerics` is the sampler's."""
    lines = [f"changed: {Changes(fields=fields)}"] if fields else []
    rounded = [name for name in fields if name in ROUNDED and numerics != "invariant"]
    if rounded:
        lines.append(f"{', '.join(rounded)} can change roundings, and samples with them")
    return lines


def needs_steps(config: Mapping[str, Any]) -> bool:
    """Whether the update of a step depends on the total number of steps."""
    has_critic = config["correction.advantage"].startswith("gae")
    schedules = [config["optimizer.schedule"], *([config["critic.schedule"]] if has_critic else [])]
    return set(schedules) != {"constant"} or config["engine.noise_start"] > 0


def is_ahead(config: Mapping[str, Any]) -> bool:
    """Whether the run is asynchronous or replays groups."""
    return config["rollout.schedule"] != "sync" or bool(config["rollout.replay"])


def record(before: Sequence[Mapping[str, Any]], step: int, fields: Mapping[str, list]) -> list[dict]:
    """Returns the list of changes for config.json: previous changes, and new ones after `step`.

    Previous changes after a later step belong to lost steps; they now hold from `step` on.
    """
    kept = [{**change, "step": min(change["step"], step)} for change in before]
    new = {"step": step, "fields": dict(fields)}
    return kept if not fields or new in kept else [*kept, new]
