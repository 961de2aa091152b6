"""Measures weight syncs, records and a run with the driver "ray", on one machine.

Each part runs in a process of its own, with a local Ray (the extra `ray`), and prints JSON. Tables
for docs/async.md follow. The first run fills the compilation cache.

- smollm2: weight syncs of SmolLM2-135M with random weights, while workers sample. A sync lasts from
  the learner's call of `publish` to the first token of the new version on every worker. A pause is
  the time from the last token of the old version to the first token of the new one. The first token
  of a worker counts from the request for the actor.
- records, train: see `benchmarks.records` and `benchmarks.asynchrony`.

Examples:

    python -m benchmarks.handover --json=handover.json
    python -m benchmarks.handover --only=smollm2:int8 --rounds=3
"""

import itertools
import json
import os
import pathlib
import statistics
import tempfile
import time

from benchmarks import arguments, asynchrony, records
from jaxrl_tis import build
from jaxrl_tis.rollouts.source import next_batch
from jaxrl_tis.runtime import cli

FORMATS = {"bfloat16": "none", "int8": "w8a8"}
ARMS = {"sync": "sync", "sync, both": asynchrony.BOTH, "threads": "areal(staleness=2)",
        "driver": asynchrony.RAY}
SMOLLM2 = [f"smollm2:{name}:{count}" for name in FORMATS for count in (1, 2)]
SMOKE = ("smollm2:int8:1", "records:1", "train:driver")  # the parts with --smoke
PARTS = (*SMOLLM2, "records:1", "records:2", *(f"train:{arm}" for arm in ARMS))
LABELS = {  # of the lines of the tables, by name in the JSON
    "handover_s": "weight sync, s", "publish_s": "of it in the learner's thread, s",
    "pause_s": "pause of a sampler, s", "call_s": "one call of the engine, s",
    "first_token_s": "first token of a worker, s", "served_bytes": "weights, MB",
    "host_weight_bytes": "object store between syncs, MB",
    "peak_store_bytes": "object store at a sync, MB", "store_versions": "versions there at a sync",
    "records_per_s": "records per second", "learner_cpu_share": "CPU share of the learner",
    "tokens_per_s": "tokens per second", "learner_idle": "learner's wait, share of the time",
    "driver_learner_thread_share": "driver in the learner's thread, share",
    "driver_threads_cpu_share": "CPU share of the driver's other threads",
}


class LoggedSampling(build.Sampling):
    """The sampler's half of a run. Its schedulers write version, end and prefilled prompt tokens of
    each step that sampled a token, into the folder of the model."""

    def scheduler(self, engine, params, version, *args, **options):
        scheduler = super().scheduler(engine, params, version, *args, **options)
        path = f"{self.config.model.path}/{os.getpid()}.calls"
        log = open(path, "a", buffering=1)  # noqa: SIM115 (as long as the scheduler)
        step, set_params = scheduler.step, scheduler.set_params

        def logged():
            before = scheduler.stats.tokens
            finished, stats = step(), scheduler.stats
            if stats.tokens > before:
                log.write(f"{version} {time.monotonic()} {stats.prefilled}\n")
            return finished

        def synced(new_params, new_version):
            nonlocal version
            version = new_version
            set_params(new_params, new_version)

        vars(scheduler).update(step=logged, set_params=synced)
        return scheduler


def read_calls(folder: str) -> list[list[tuple[int, float, int]]]:
    """Returns what each worker wrote: (version, end, prefilled prompt tokens) of its calls."""
    texts = [path.read_text() for path in sorted(pathlib.Path(folder).glob("*.calls"))]
    rows = [[line.split() for line in text.split("\n")[:-1]] for text in texts]
    return [[(int(v), float(t), int(n)) for v, t, n in of_one] for of_one in rows if of_one]


def summary(calls: list[list[tuple[int, float, int]]], published: dict[int, float]) -> dict:
    """Returns the times of syncs, from `read_calls` and {version: time of its publication}. Pauses
    with a prefill count only where there are no others."""
    syncs, pauses, filled = [], [], []
    for version, start in published.items():
        ends = []
        for of_one in calls:
            first = next(i for i, (v, _, _) in enumerate(of_one) if v >= version)
            (_, last, before), (_, end, after) = of_one[first - 1 : first + 1]
            (filled if after > before else pauses).append(end - last)
            ends.append(end)
        syncs.append(max(ends) - start)
    pairs = itertools.chain.from_iterable(map(itertools.pairwise, calls))
    steps = [b[1] - a[1] for a, b in pairs if (a[0], a[2]) == (b[0], b[2])]
    return {
        "handover_s": statistics.median(syncs), "handover_each_s": syncs,
        "pause_s": statistics.median(pauses or filled), "pause_each_s": pauses,
        "pause_with_prefill_each_s": filled, "call_s": statistics.median(steps),
    }


def store_bytes() -> int:
    """Returns the bytes in the object stores of the cluster."""
    import ray  # whose import reads the environment that `ray_cluster.connect` sets

    total, free = ray.cluster_resources(), ray.available_resources()
    return int(total["object_store_memory"] - free["object_store_memory"])


def smollm2(name: str, workers: int, rounds: int, layers: int | None = None) -> dict:
    """Syncs weights of a format to workers `rounds` times, and returns medians. The model has so many
    layers; by default its own number."""
    published, seconds, peak = {}, [], 0
    with tempfile.TemporaryDirectory() as folder:
        shape = json.loads(pathlib.Path(asynchrony.SMOLLM2).read_text())
        shape["num_hidden_layers"] = layers or shape["num_hidden_layers"]
        pathlib.Path(folder, "config.json").write_text(json.dumps(shape))
        c = records.config(workers, "in_flight(staleness=4)")
        c.model.path, c.train.microbatch_rows = folder, 4
        c.rollout.update(prompts=2, group_size=2, max_new_tokens=160)
        c.engine.update(dtype="bfloat16", quantization=FORMATS[name], slots=4, prefill_batch=4)
        c.engine.steps_per_call = 1
        params, source, start = records.opened(c, LoggedSampling)
        for version in range(rounds + 1):
            if version:
                next_batch(source, version)
            published[version] = time.monotonic()
            source.publish(params, version)
            seconds.append(time.monotonic() - published[version])
            while sum(of_one[-1][0] >= version for of_one in read_calls(folder)) < workers:
                time.sleep(0.02)
        del published[0]  # the workers were starting
        _, values = next_batch(source, version + 1)
        held, size, send = store_bytes(), values["sync/bytes"], source.driver.send

        def send_and_wait(*args):
            nonlocal peak
            weights = send(*args)
            time.sleep(1)  # until Ray has reported both versions
            peak = store_bytes()
            return weights

        source.driver.send = send_and_wait
        source.publish(params, version + 1)
        source.close(is_over=True)
        calls = read_calls(folder)
    return summary(calls, published) | {
        "publish_s": statistics.median(seconds[1:]), "served_bytes": size,
        "first_token_s": max(of_one[0][1] for of_one in calls) - start, "host_weight_bytes": held,
        "peak_store_bytes": peak, "store_versions": round(peak / size),
    }


def in_process(part: str, rounds: int, is_smoke: bool) -> dict:
    """Measures a part in a process of its own."""
    kind, rest = part.split(":", 1)
    if kind == "train":
        most = 24 if is_smoke else asynchrony.MOST
        return asynchrony.in_process(ARMS[rest], 4 * rounds, most)
    command = ["benchmarks.records", f"--workers={rest}"]
    if kind == "smollm2":
        command = ["benchmarks.handover", f"--part={part}", f"--rounds={rounds}"]
    command += ["--smoke"] if is_smoke else []
    return arguments.result(command, os.environ | {"JAX_PLATFORMS": "cpu"})


def table(found: dict[str, dict], kind: str) -> str:
    """Returns the Markdown table of the parts of a kind, a column for each."""
    parts = [part for part in found if part.startswith(kind)]
    names = " | ".join(part.split(":", 1)[1] for part in parts)
    lines = [f"| | {names} |", "|---" * (len(parts) + 1) + "|"]
    shown = lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    for name, label in LABELS.items():
        scale = 1e-6 if name.endswith("bytes") else 1
        cells = [shown(scale * found[p][name]) if name in found[p] else "" for p in parts]
        if any(cells):
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = cli.parser("benchmarks.handover", __doc__.partition("\n")[0], __doc__)
    parser.add_argument("--only", default="", help="start of the names of parts")
    parser.add_argument("--rounds", type=int, default=5, help="weight syncs, each for 4 steps")
    parser.add_argument("--json", default="", help="file for all numbers")
    parser.add_argument("--part", choices=PARTS, help="measure this part in this process")
    given = arguments.parse(parser, rounds=1)
    if given.part:
        _, name, workers = given.part.split(":")
        layers = 1 if given.smoke else None
        print(json.dumps(smollm2(name, int(workers), given.rounds, layers)))
        return
    found = {}
    for part in SMOKE if given.smoke else PARTS:
        if part.startswith(given.only):
            arguments.say(f"{part}: a process starts Ray, compiles and measures")
            found[part] = in_process(part, given.rounds, given.smoke)
            print(part, json.dumps(found[part]), "load", os.getloadavg()[0], flush=True)
    if given.json:
        pathlib.Path(given.json).write_text(json.dumps({"driver": "ray"} | found, indent=1))
    for kind in dict.fromkeys(part.split(":")[0] for part in found):
        print(f"\n{table(found, kind)}")


if __name__ == "__main__":
    cli.run(main)
