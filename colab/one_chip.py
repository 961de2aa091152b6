# %% [markdown] title
# # GSM8K on one TPU chip
#
# On a TPU runtime this notebook trains Qwen2.5-0.5B on grade-school maths: GRPO with LoRA, an int8
# sampler and token-level truncated importance sampling (TIS). The config is
# `configs/gsm8k_one_chip.py`. Model and data come from the Hugging Face hub, without a login.
#
# Without a TPU the same cells train the tiny model of the quickstart on sums.
#
# **No chip has run this notebook.** The programs of its config were compiled for a TPU v5e chip. How
# long a step takes there, and what the run reaches, was never measured.

# %% setup
import subprocess
import time

import matplotlib.pyplot as plt
from IPython.display import clear_output, display

from jaxrl_tis.record import metrics
from jaxrl_tis.report import page, plots
from jaxrl_tis.runtime import cli

plt.rcParams.update(plots.STYLE | {"figure.dpi": 60})
HAS_TPU = cli.has_tpu()  # this process leaves the chip to the run
if HAS_TPU and importlib.util.find_spec("pyarrow") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "huggingface_hub", "pyarrow"],
                   check=True)
print("TPU" if HAS_TPU else "no TPU: the tiny model")

# %% [markdown] settings-text
# ## Settings
#
# `MODEL` may also be `gemma3_1b`, which needs a login at its hub page, or `qwen3_1p7b`. They fill more
# of the memory of a chip. Any field of `configs/default.py` can be set.

# %% settings
MODEL = "qwen25_0p5b"
if HAS_TPU:
    NAME, CONFIG, GATE_PROMPTS = f"one-chip-{MODEL}", f"configs/gsm8k_one_chip.py:{MODEL}", 8
    SETTINGS = {"steps": 20, "eval.every": 10, "eval.prompts": 256, "checkpoint.every": 10}
else:
    NAME, CONFIG, GATE_PROMPTS = "one-chip-tiny", "configs/quickstart.py", 16
    SETTINGS = {
        "model.lora": "lora(rank=32, alpha=32)", "optimizer.lr": 1e-3, "steps": 40, "warmup.steps": 200,
        "eval.every": 20, "eval.prompts": 128, "checkpoint.every": 20,
    }
WORKDIR = f"runs/notebook-{NAME}"
FLAGS = [f"--config={CONFIG}", *(f"--config.{name}={value}" for name, value in SETTINGS.items())]
SHOWN = {"Reward": ("train", "reward/mean"),
         "Held-out accuracy, greedy": ("eval", "eval/greedy_accuracy"),
         "KL of sampler to learner": ("train", "rollout_corr/k3_kl")}
print("python -m jaxrl_tis.main", " ".join(FLAGS), f"--workdir={WORKDIR}")

# %% [markdown] gate-text
# ## The gap before the run
#
# The gate samples some prompts, scores them with the learner and splits the gap into causes. A model
# of this size may exceed the bounds, which are meant for small models. The run corrects the gap.

# %% gate
gate = [sys.executable, "-m", "jaxrl_tis.gate", *FLAGS, f"--prompts={GATE_PROMPTS}"]
done = subprocess.run(gate, capture_output=True, text=True)
assert done.returncode in (0, 1) and done.stdout, done.stderr
print(done.stdout)

# %% [markdown] train-text
# ## Train
#
# The run is a separate process. Interrupt this cell to stop the run. Run the cell again to continue it.

# %% train

# %% result
first, *_, last = [r for r in metrics.read(WORKDIR) if r["phase"] == "eval"]
print(f"greedy accuracy on {last['eval/n']:.0f} unseen problems: {first['eval/greedy_accuracy']:.3f} "
      f"before, {last['eval/greedy_accuracy']:.3f} after {last['step']} steps")
seconds = [r["time/step_s"] for r in metrics.read(WORKDIR) if r["phase"] == "train"]
print(f"seconds of the last step: {seconds[-1]:.1f}")
print(f"the report of the run: {page.write([WORKDIR], WORKDIR + '/report.html')}")

# %% [markdown] next-text
# ## Next
#
# `read_a_run.ipynb` looks into a run. docs/lora.md has the adapter's settings and its export,
# docs/accelerators.md a script that checks and measures a chip. Please report what a chip shows.
