# %% [markdown] title
# # Reading a run
#
# This notebook reads a workdir and needs no accelerator. It shows the record, plots, answers with both
# probabilities of each token, and the doctor's findings. `WORKDIR` is the folder of any run, also
# `gs://...`. The default is a short recorded run of the quickstart.

# %% setup
import matplotlib.pyplot as plt
from IPython.display import HTML, display

from jaxrl_tis.doctor import diagnose
from jaxrl_tis.record import metrics, samples
from jaxrl_tis.report import answers, page, plots

plt.rcParams.update(plots.STYLE | {"figure.dpi": 60})
WORKDIR = CLONE / "colab" / "example_run"

# %% [markdown] record-text
# ## The record
#
# `metrics.jsonl` has one line per step and per evaluation. `docs/metrics.md` explains the names.

# %% record
records = metrics.read(WORKDIR)
train = [r for r in records if r["phase"] == "train"]
print(f"{len(train)} steps, {len(train[-1])} values in the last line; some of them:")
for name in ("reward/mean", "training/rollout_probs_diff_max", "rollout_corr/k3_kl",
             "rollout_corr/rollout_is_eff_sample_size", "mismatch/engine/share"):
    if name in train[0] and name in train[-1]:
        print(f"{name:42} first {train[0][name]:.4g}, last {train[-1][name]:.4g}")

# %% [markdown] plots-text
# ## Plots
#
# The same plots as in `report.html`. The table `plots.PLOTS` defines them.

# %% plots
runs = page.load([WORKDIR])
shown = [plot for plot in plots.PLOTS if plot.in_overview and plots.is_present(plot, runs)][:6]
overview_figure, axes = plt.subplots(2, 3, figsize=(11, 5), layout="constrained")
for ax, plot in zip(axes.flat, shown, strict=False):
    plots.draw(ax, plot, runs)
plt.show()

# %% [markdown] answers-text
# ## Answers, and where sampler and learner disagree
#
# A darker token has a larger difference of probability between sampler and learner. Point at a token
# for the numbers. The next cell prints the tokens of all recorded answers with the largest differences.

# %% answers
lines = samples.read(WORKDIR)
display(HTML(f"<style>{answers.CSS}</style>" + answers.section("this run", lines)))

# %% worst
import math

tokens = [
    (abs(math.exp(new) - math.exp(old)), token, line["step"], line["response"])
    for line in lines if line["phase"] == "train" and line["logp_old"] is not None
    for token, old, new in zip(line["tokens"], line["logp_behav"], line["logp_old"], strict=True)
    if old is not None and new is not None  # tokens of an environment
]
for gap, token, step, response in sorted(tokens, reverse=True)[:5]:
    print(f"|Δp| = {gap:.4f} at {token!r} of {response!r}, step {step}")

# %% [markdown] doctor-text
# ## The doctor
#
# The doctor names the likely cause of the gap, the evidence, and the change to make. The command
# `python -m jaxrl_tis.doctor WORKDIR` prints the same.

# %% doctor
print(diagnose.describe(diagnose.diagnose(WORKDIR, {})))
