"""Measures how far the canary's d spreads over prompts and small changes of an adapter (docs/lora.md).

    python -m benchmarks.canary --config=configs/fig_lora_smollm2.py --config.model.lora='lora(rank=32, alpha=32)'

The factors of a new adapter move by Gaussian noise of several sizes. For each, the table has the
smallest, the median and the largest d of `--prompts` prompts, and how many exceed gate.max_d_p99.
The last line has the smallest and the largest d of each prompt over the sizes.
"""

import jax
import numpy as np
from absl import flags

from benchmarks import arguments
from jaxrl_tis import build, cli_flags
from jaxrl_tis.data import tasks
from jaxrl_tis.gate.canary import Canary
from jaxrl_tis.learner.state import initial_params, initial_state, policy
from jaxrl_tis.models import lora

CONFIG = cli_flags.define_config()
PROMPTS = flags.DEFINE_integer("prompts", 20, "Number of prompts.", lower_bound=1)
SIZES = (0, 1e-4, 1e-4, 1e-4, 3e-4, 3e-4, 1e-3, 1e-3, 3e-3)


def main() -> None:
    config = CONFIG.value
    arguments.say(f"building {config.name}")
    setup = build.build(config.lock())
    source, prompter = tasks.make(config.task.name, config.task.params), setup.prompter()
    prompts = [prompter.ids(source[i]) for i in range(PROMPTS.value)]
    canary, bound = Canary(setup, prompts), config.gate.max_d_p99
    training = setup.training
    params = policy(training, initial_state(training, initial_params(training)))
    factors, base = lora.split(params)
    assert training.adapter is not None and base is not None
    random = np.random.default_rng(0)
    measured = []
    line = "{:>8} {:>8} {:>8} {:>8} {:>8}"
    print(line.format("change", "smallest", "median", "largest", "above"))
    for size in SIZES:
        shift = lambda x, size=size: x + size * random.standard_normal(x.shape).astype(x.dtype)
        moved = training.adapter.join(base, jax.tree.map(shift, factors))
        served = setup.engine.load(moved)
        d = [canary.measured(moved, served, ids)[0] for ids in prompts]
        measured.append(d)
        columns = (f"{x:.3f}" for x in (min(d), np.median(d), max(d)))
        print(line.format(f"{size:g}", *columns, sum(x > bound for x in d)), flush=True)
    spans = (f"{min(d):.2f}-{max(d):.2f}" for d in zip(*measured, strict=True))
    print("each prompt over the changes:", ", ".join(spans))


if __name__ == "__main__":
    cli_flags.run(main, required=["config"])
