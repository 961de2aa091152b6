"""Measures time and memory of the audit on a dump of a million tokens (docs/audit.md).

    python -m benchmarks.audit [--tokens=1000000] [--spread=0.8] [--kind=jsonl]

Writes a dump of responses with reward, group and version. Lengths are log-normal with median 512
and deviation `spread` of the logarithm, at most 4,096. The audit runs on the dump in a process of
its own, without a compilation cache.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks import arguments
from jaxrl_tis.runtime import cli

MEAN, LONGEST = 512, 4096


def responses(tokens: int, spread: float) -> list[dict]:
    """Returns records with about this number of tokens."""
    rng, found = np.random.default_rng(0), []
    while tokens > 0:
        n = int(np.clip(rng.lognormal(np.log(MEAN) - spread**2 / 2, spread), 1, LONGEST))
        old = -rng.exponential(0.5, n)
        behav = np.minimum(old + 0.03 * rng.standard_normal(n), 0.0)
        found.append({
            "logp_behav": behav.round(6).tolist(), "logp_old": old.round(6).tolist(),
            "reward": float(rng.random() < 0.4), "group": len(found) // 8,
            "version": int(rng.integers(5, 8)),
        })
        tokens -= n
    return found


def write(path: pathlib.Path, records: list[dict]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return
    columns = {name: [record[name] for record in records] for name in records[0]}
    arrays: dict[str, Any] = {name: np.concatenate(x) if name.startswith("logp") else np.array(x)
              for name, x in columns.items()}
    np.savez(path, **arrays, lengths=np.array([len(x) for x in columns["logp_old"]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--spread", type=float, default=0.8)
    parser.add_argument("--kind", default="jsonl", choices=["jsonl", "npz"])
    args = arguments.parse(parser, tokens=4000)
    arguments.say(f"writing a dump of {args.tokens:,} tokens")
    records = responses(args.tokens, args.spread)
    lengths = [len(record["logp_old"]) for record in records]
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / f"dump.{args.kind}"
        write(path, records)
        size = path.stat().st_size / 2**20
        arguments.say(f"the audit of {size:.0f} MiB")
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "jaxrl_tis.audit", str(path)], check=True, env=environment,
            stdout=subprocess.DEVNULL,
        )
        seconds = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{len(records)} responses, {sum(lengths):,} tokens, longest {max(lengths)}, {size:.0f} MiB: "
          f"{seconds:.1f} s, {usage.ru_utime + usage.ru_stime:.1f} s of CPU, "
          f"{usage.ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    cli.run(main)
