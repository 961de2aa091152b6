"""Runs the gate on the quickstart's samplers and on wrong ones (docs/gate.md).

    python -m benchmarks.gate [--prompts=64]

Each sampler is compared with the quickstart's float32 learner, with the initial random weights and
with the weights after warm-up. Printed are the gate's measures, the largest cause, and the `d_mean`
of `decode`.
"""

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import arguments
from configs import quickstart
from jaxrl_tis import build
from jaxrl_tis.gate import report
from jaxrl_tis.learner.state import initial_params
from jaxrl_tis.learner.warmup import examples, warm_up
from jaxrl_tis.record.metrics import NoRecord
from jaxrl_tis.runtime import cli

FLOATS = dict(quantization="none")
SAMPLERS = {
    "float32": FLOATS,
    "float32, int8 cache": FLOATS | dict(cache_dtype="int8"),
    "bfloat16": FLOATS | dict(dtype="bfloat16", cache_dtype="bfloat16"),
    "W8A16": dict(quantization="w8a16"),
    "W8A8": dict(quantization="w8a8"),
    "bfloat16, W8A8, int8 cache": dict(
        quantization="w8a8", dtype="bfloat16", cache_dtype="int8"
    ),
}
MEASURES = ("d_mean", "d_p99", "dp_max", "k3")


def setup(
    engine: dict, temperature: float = 1.0, warmup_steps: int | None = None
) -> build.Setup:
    config = quickstart.get_config()
    config.warmup.steps = config.warmup.steps if warmup_steps is None else warmup_steps
    config.engine.update(engine)
    config.rollout.temperature = temperature
    return build.build(config.lock())


def perturbed(params: Any, noise: float) -> Any:
    """Multiplies every weight by 1 + noise * N(0, 1)."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    factor = lambda x, key: 1 + noise * jax.random.normal(key, x.shape, x.dtype)
    return jax.tree.unflatten(
        tree, [x * factor(x, key) for x, key in zip(leaves, keys, strict=True)]
    )


def reports(prompts: int) -> dict[str, Callable]:
    """Returns the gate's report for each sampler with these parameters."""
    exact, colder = setup(FLOATS), setup(FLOATS, temperature=0.9)

    def measure(engine):
        made = functools.cache(lambda: setup(engine))
        return lambda params: report.measure(made(), params, prompts)

    def off_by(noise):
        sample = lambda params: report.sample(exact, perturbed(params, noise), prompts)
        return lambda params: report.gap_report(exact, params, sample(params))

    def wrong_temperature(params):
        found = report.sample(colder, params, prompts)
        recorded = [dataclasses.replace(t, temperature=1.0) for t in found]
        return report.gap_report(exact, params, recorded)

    return {name: measure(engine) for name, engine in SAMPLERS.items()} | {
        "float32, weights off by 1 %": off_by(0.01), "float32, weights off by 3 %": off_by(0.03),
        "float32, temperature 0.9 recorded for 1": wrong_temperature,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--warmup_steps", type=int, help="default: the quickstart's")
    args = arguments.parse(parser, prompts=16, warmup_steps=2)
    exact = setup(FLOATS, warmup_steps=args.warmup_steps)
    training = exact.training
    arguments.say("the warm-up")
    with contextlib.closing(exact.prompter()) as prompter:
        taught = warm_up(
            training, initial_params(training), NoRecord(), lambda: None, prompter,
            examples(training, prompter),
        )
    states = initial_params(training), taught
    decode = lambda r: next(x["d_mean"] for x in r["rungs"] if x["cause"] == "decode")
    for sampler, judged in reports(args.prompts).items():
        arguments.say(f"the gate of {sampler}")
        found = [judged(params) for params in states]
        both = lambda text, found=found: " / ".join(map(text, found))
        columns = [both(lambda r, name=name: f"{r['total'][name]:.2g}") for name in MEASURES]
        columns += [both(lambda r: r["largest"]), both(lambda r: f"{decode(r):.2g}")]
        print("|", " | ".join([sampler, *columns]), "|", flush=True)


if __name__ == "__main__":
    cli.run(main)
