# %% [markdown] title
# # RL with an int8 sampler, in three minutes
#
# A decoder of 0.8 M parameters learns two-digit sums, first by supervised steps and then by GRPO. The
# sampler computes in int8, and token-level truncated importance sampling (TIS) corrects the gap. The
# plots below are drawn during training. The run takes less than three minutes on two CPU cores.
# `configs/quickstart.py` without changes takes four minutes and ends higher.

# %% setup
import subprocess
import time

import matplotlib.pyplot as plt
from IPython.display import clear_output, display

from jaxrl_tis.record import metrics
from jaxrl_tis.report import page, plots

plt.rcParams.update(plots.STYLE | {"figure.dpi": 60})

# %% [markdown] settings-text
# ## Settings
#
# Any field of `configs/default.py` can be set. The printed command also works in a terminal.

# %% settings
WORKDIR = "runs/notebook-quickstart"
SETTINGS = {
    "steps": 60, "warmup.steps": 220, "eval.every": 20, "eval.prompts": 128,
    "checkpoint.every": 20, "metrics.samples_every": 20,
}
FLAGS = ["--config=configs/quickstart.py",
         *(f"--config.{name}={value}" for name, value in SETTINGS.items())]
SHOWN = {"Reward": ("train", "reward/mean"),
         "Held-out accuracy, greedy": ("eval", "eval/greedy_accuracy"),
         "Largest difference of probability": ("train", "training/rollout_probs_diff_max")}
print("python -m jaxrl_tis.main", " ".join(FLAGS), f"--workdir={WORKDIR}")

# %% [markdown] train-text
# ## Train
#
# The run is a separate process. Interrupt this cell to stop the run. Run the cell again to continue it.

# %% train

# %% result
first, *_, last = [r for r in metrics.read(WORKDIR) if r["phase"] == "eval"]
print(f"greedy accuracy on {last['eval/n']:.0f} unseen sums: {first['eval/greedy_accuracy']:.3f} "
      f"before, {last['eval/greedy_accuracy']:.3f} after {last['step']} steps")
print(f"the report of the run: {page.write([WORKDIR], WORKDIR + '/report.html')}")

# %% [markdown] next-text
# ## Next
#
# `read_a_run.ipynb` looks into this run; `--config.correction.weight=none` turns the correction off,
# `--config.engine.quantization=none` the gap. docs/own_data.md has the way to your own model and data.
