"""Finds contradictions in config.rollout before a run starts."""

import math
from collections.abc import Iterator

import ml_collections

from jaxrl_tis.engine.check import is_filtered
from jaxrl_tis.rollouts import replay, schedules, teaching
from jaxrl_tis.runtime import addresses

DRIVERS = ("virtual", "threads", "ray", "external")
ENGINE_KINDS = ("vllm", "sglang")
UNFILTERED_KINDS = ("sglang",)  # whose log-probs are those before top_k, top_p and min_p
LEAST_TIMEOUT = 5.0  # of rollout.worker_timeout; a report takes a second (ray_worker.POLL_SECONDS)
ON_GAP_EXCEEDED = ("warn", "sync", "stop")
# Of the engine of this program, which driver external does not use.
OWN_ENGINE = {
    "engine.quantization": "none", "engine.numerics": "", "engine.noise_start": 0.0, "engine.injected": "",
    "engine.max_draft": 0, "engine.drafter": "", "engine.retention": (0, 0), "gate.required": False,
}
# Of what a synchronous run does not read.
DEFAULTS = {"driver": "virtual", "workers": 1, "queue": 0, "update_turns": 0}


def rollout_problems(
    config: ml_collections.ConfigDict, schedule: schedules.Schedule, way: replay.Way | None
) -> Iterator[str]:
    """Yields a sentence for each problem of config.rollout, with its parsed schedule and replay."""
    rollout = config.rollout
    yield from _replay(rollout, schedule, way)
    yield from _numbers(rollout)
    yield from _extended(config, schedule, way)
    yield from _budget(rollout, schedule)
    yield from _driver(config, rollout)
    yield from _teacher(config)
    yield from _queue(rollout, schedule)
    yield from _idle(rollout) if schedule.is_sync else _ahead(config, schedule)


def _numbers(rollout) -> Iterator[str]:
    if rollout.workers < 1:
        yield f"rollout.workers is {rollout.workers}; set it to at least 1"
    if rollout.update_turns < 0:
        yield f"rollout.update_turns is {rollout.update_turns}; it must not be below 0"
    if rollout.gap_probe_every < 0:
        yield f"rollout.gap_probe_every is {rollout.gap_probe_every}; it must not be below 0"


def _extended(config, schedule: schedules.Schedule, way: replay.Way | None) -> Iterator[str]:
    """Finds settings with which no group can grow."""
    rollout, setting = config.rollout, f"rollout.extend_equal = {config.rollout.extend_equal}"
    if rollout.extend_equal <= 1:
        return
    if not rollout.dynamic_sampling:
        yield f"{setting} needs rollout.dynamic_sampling, which is False; set it to True"
    if not schedule.is_sync or way is not None:
        yield (
            f"{setting} is of synchronous batches of new samples; set rollout.schedule to 'sync' and "
            "rollout.replay to '', or extend_equal to 1"
        )
    if config.correction.advantage == "remax":
        yield f"{setting} asks for more than the one greedy answer of advantage 'remax'; set it to 1"


def _budget(rollout, schedule: schedules.Schedule) -> Iterator[str]:
    """Finds a response to an exceeded gap bound that this run cannot carry out."""
    if rollout.on_gap_exceeded not in ON_GAP_EXCEEDED:
        yield (
            f"rollout.on_gap_exceeded is {rollout.on_gap_exceeded!r}; choose one of "
            f"{', '.join(ON_GAP_EXCEEDED)}"
        )
    elif rollout.on_gap_exceeded != "warn" and not rollout.gap_probe_every:
        yield (
            f"rollout.on_gap_exceeded = {rollout.on_gap_exceeded!r} needs probes of the gap; set "
            "rollout.gap_probe_every above 0"
        )
    if rollout.on_gap_exceeded == "sync" and not schedule.ahead:
        yield (
            "rollout.on_gap_exceeded = 'sync' lowers the bound on staleness, and rollout.schedule = "
            f"{rollout.schedule!r} has none; set it to warn or stop"
        )


def _driver(config, rollout) -> Iterator[str]:
    """Finds settings that are incompatible with rollout.driver."""
    if rollout.driver not in DRIVERS:
        yield f"rollout.driver is {rollout.driver!r}; choose one of {', '.join(DRIVERS)}"
    if rollout.driver != "virtual" and rollout.update_turns:
        yield (
            f"rollout.update_turns = {rollout.update_turns} is for rollout.driver = 'virtual', and "
            f"the driver is {rollout.driver!r}; set it to 0"
        )
    if rollout.driver == "ray":
        yield from _ray(rollout)
    if rollout.driver == "external":
        yield from _external(rollout)
        yield from _of_own_engine(config)
    elif rollout.engines:
        yield (
            f"rollout.engines = {rollout.engines!r} is for rollout.driver = 'external', and the driver is "
            f"{rollout.driver!r}; set one of them"
        )
    if rollout.driver != "virtual" and rollout.old_logp_source == "replica":
        yield (
            f"rollout.driver = {rollout.driver!r} samples while older weights are still scored, "
            "and rollout.old_logp_source = 'replica' keeps no copy of them; set it to ring"
        )


def _external(rollout) -> Iterator[str]:
    """Finds wrong settings of engines of others."""
    try:
        addresses.urls(rollout.engines)
    except ValueError as error:
        yield f"rollout.engines: {error}"
    if rollout.engine_kind not in ENGINE_KINDS:
        yield f"rollout.engine_kind is {rollout.engine_kind!r}; choose one of {', '.join(ENGINE_KINDS)}"
    if rollout.engine_kind in UNFILTERED_KINDS and is_filtered(rollout):
        yield (
            f"rollout.engine_kind = {rollout.engine_kind!r} records log-probs before filters, and "
            f"rollout.top_k = {rollout.top_k}, top_p = {rollout.top_p}, min_p = {rollout.min_p}; "
            "set them to 0, 1.0 and 0.0, or sample with vllm"
        )
    if not rollout.weights_folder:
        yield (
            "rollout.weights_folder is empty, and engines read each version of the weights from it; name "
            "a folder that they see at the same path"
        )
    if rollout.workers != 1:
        yield (
            f"rollout.workers = {rollout.workers} are samplers of this program, and rollout.engines are "
            "those of driver external; set it to 1"
        )


def _of_own_engine(config) -> Iterator[str]:
    """Finds settings of the engine of this program."""
    for field, unset in OWN_ENGINE.items():
        section, name = field.split(".")
        if (value := config[section][name]) != unset:
            yield (
                f"{field} = {value!r} is of the engine of this program, and rollout.driver = 'external' "
                f"samples elsewhere; set it to {unset!r}"
            )
    if config.rollout.old_logp_source in ("ewma", "none") and config.rollout.gap_probe_every:
        yield (
            f"rollout.gap_probe_every with rollout.old_logp_source = {config.rollout.old_logp_source!r} "
            "samples by the engine of this program, and rollout.driver is 'external'; set it to 0"
        )


def _teacher(config) -> Iterator[str]:
    rollout = config.rollout
    try:
        teaching.parse(rollout.alpha)
    except ValueError as error:
        yield f"rollout.{error}"
    if rollout.teacher and rollout.driver == "external":
        yield (
            f"rollout.teacher = {rollout.teacher!r} is mixed in by the engine of this program, and "
            "rollout.driver is 'external'; leave it out, or choose another driver"
        )
    if not rollout.teacher and (rollout.alpha, config.engine.teacher_quantization) != ("linear", "none"):
        yield (
            f"rollout.alpha = {rollout.alpha!r} and engine.teacher_quantization = "
            f"{config.engine.teacher_quantization!r} are of a teacher, and rollout.teacher is empty; name "
            "one, or leave them out"
        )


def _queue(rollout, schedule: schedules.Schedule) -> Iterator[str]:
    if 0 < rollout.queue < rollout.prompts or rollout.queue < 0:
        yield (
            f"rollout.queue = {rollout.queue} groups cannot hold a batch of rollout.prompts = "
            f"{rollout.prompts}; raise it, or set it to 0 for as many as the schedule allows"
        )
    if rollout.prompts <= rollout.queue < schedule.sync_every * rollout.prompts:
        yield (
            f"rollout.queue = {rollout.queue} groups cannot hold the {schedule.sync_every} batches of "
            f"{rollout.prompts} between two weight syncs; raise it to at least "
            f"{schedule.sync_every * rollout.prompts}, or set it to 0"
        )


def _ahead(config, schedule: schedules.Schedule) -> Iterator[str]:
    """Finds settings that asynchronous samplers do not support."""
    rollout = config.rollout
    if math.isinf(schedule.ahead) and not rollout.queue:
        yield (
            f"rollout.schedule = {rollout.schedule!r} has no bound; set rollout.queue to the largest "
            "number of groups"
        )
    if config.engine.max_draft and not config.engine.free_batch_rows and rollout.driver == "virtual":
        yield (
            "engine.free_batch_rows = 0 lets measured times decide how many tokens a turn of "
            "rollout.driver = 'virtual' samples, which repeats bit by bit; set it to 128, or the driver to "
            "'threads'"
        )
    if schedule.redundant and config.correction.advantage == "remax":
        yield (
            f"rollout.schedule = {rollout.schedule!r} uses the first samples that end, and advantage "
            "'remax' needs its greedy answer among them; set redundant to 0"
        )
    if schedule.repack and rollout.workers < 2:
        yield (
            f"rollout.schedule = {rollout.schedule!r} moves sequences between workers, and there is one; "
            "set rollout.workers to at least 2, or repack to 0"
        )


def _ray(rollout) -> Iterator[str]:
    """Finds wrong settings of workers on Ray."""
    if rollout.ray_address:
        try:
            addresses.parse(rollout.ray_address)
        except ValueError as error:
            yield f"rollout.ray_address: {error}, or \"\" for a local Ray"
    for name in ("worker_timeout", "start_timeout"):
        if not 0 < rollout[name] < math.inf:
            yield f"rollout.{name} is {rollout[name]} seconds; it must be above 0"
    if 0 < rollout.worker_timeout < LEAST_TIMEOUT:
        yield (
            f"rollout.worker_timeout is {rollout.worker_timeout} seconds, and an idle worker answers "
            f"after one second; give at least {LEAST_TIMEOUT:g}"
        )
    for name in ("cpus_per_worker", "gpus_per_worker", "tpus_per_worker"):
        if not 0 <= rollout[name] < math.inf:
            yield f"rollout.{name} is {rollout[name]}; it must not be below 0"


def _replay(rollout, schedule: schedules.Schedule, way: replay.Way | None) -> Iterator[str]:
    """Finds wrong settings of replay."""
    if rollout.max_age and (way is None or way.uses == 1):
        yield (
            f"rollout.max_age = {rollout.max_age} limits the age of replayed tokens, and "
            f"rollout.replay = {rollout.replay!r} replays none; set it to 0"
        )
    if way is None or way.uses == 1:
        return
    if rollout.prompts % way.uses:
        yield (
            f"rollout.prompts = {rollout.prompts} groups with {way.uses} uses each (rollout.replay "
            f"= {rollout.replay!r}) are not a whole number of new groups per batch; set "
            f"rollout.prompts to a multiple of {way.uses}"
        )
    oldest = replay.max_age(schedule, way, rollout.max_age)
    if rollout.max_age < 0 or oldest <= schedule.staleness and not math.isinf(oldest):
        yield (
            f"rollout.max_age = {rollout.max_age} leaves no token to replay, because with "
            f"rollout.schedule = {rollout.schedule!r} new tokens are up to {schedule.staleness:g} versions "
            "old; set it above that"
        )
    if math.isinf(oldest):
        yield (
            f"rollout.schedule = {rollout.schedule!r} has no bound on the age of a token, and "
            "rollout.replay would keep every group; set rollout.max_age"
        )


def _idle(rollout) -> Iterator[str]:
    """Finds settings that a synchronous run does not read."""
    for name, default in DEFAULTS.items():
        if rollout[name] != default and (name, rollout[name]) != ("driver", "external"):
            yield (
                f"rollout.{name} = {rollout[name]!r} is for samplers that run ahead, and "
                f"rollout.schedule is {rollout.schedule!r}; choose another schedule, or set it to {default!r}"
            )
