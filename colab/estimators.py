# %% [markdown] title
# # Off-policy corrections, drawn
#
# Sampler and learner give the same token different probabilities. This notebook draws every method of
# `jaxrl_tis.estimators` that deals with this gap: weights, masks, the gradient of objectives and KL
# terms, and the bias and variance of weights against the true gradient. Each curve comes from the
# function that a training run calls. A new entry of a table appears by itself.
#
# The notebook needs no accelerator and takes less than a minute on two CPU cores.
#
# If `jaxrl_tis` can be imported, the next cell installs nothing. Otherwise set `SOURCE` there.

# %% setup
import math

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxrl_tis.estimators import kl, loss, masks, methods, objectives, reduce, weights
from experiments import exact, frontier
from jaxrl_tis.report import page, plots

plt.rcParams.update(plots.STYLE | {"figure.dpi": 60})
BLUE, RED, GREEN = plots.COLORS[:3]

# %% [markdown] setting-text
# ## The setting
#
# There are two responses of 8 tokens to one prompt, one with advantage +1 and one with -1. All tokens
# have the same log-ratio. A curve shows the last token of a response as a function of this log-ratio.
# Methods run with their published defaults. `CHOSEN` has other values for some parameters.
# Change any value and run the cells below again.

# %% setting
NUM_TOKENS = 8
CHOSEN = {"trm_delta": 2.0, "oapl_beta": 0.5 / NUM_TOKENS}
ones = np.ones((2, NUM_TOKENS), np.float32)
MASK = ones > 0
ADV = ones * np.array([[1.0], [-1.0]], np.float32)
LOGP_OLD = -2.0 * ones  # the learner's probability before its update is 0.14
GAP = 0.0  # logp_old - logp_behav: the engine's error, nats
zeros = np.zeros(MASK.shape, np.int32)
FIELDS = {
    "logp_old": LOGP_OLD, "logp_prox": LOGP_OLD, "logp_behav": LOGP_OLD - GAP, "weights": ones,
    "entropy": ones, "turn": zeros + 2 * np.arange(NUM_TOKENS) // NUM_TOKENS, "group": zeros,
    "version": zeros, "current_version": 2, "st_ppo_norm": 1.0, "key": jax.random.key(0),
    "rewards": np.maximum(ADV, 0.0),
}


def call(kind, name, *arrays, **fields):
    """Calls an entry of a table with its batch fields and required parameters."""
    fields = loss.needed(kind, name, FIELDS | fields)
    values = methods.example(kind, name)
    chosen = {key: CHOSEN.get(key, value) for key, value in values.items()}
    return methods.function(kind, name)(*arrays, **fields, **chosen)


def curves(function, names, grid):
    """Returns {name: function(name, x) for all x of the grid}, compiled as one program."""
    program = jax.jit(jax.vmap(lambda x: [function(name, x) for name in names]))
    return dict(zip(names, jax.device_get(program(jnp.asarray(grid))), strict=True))


def panels(count, columns, width, height, **shared):
    """Returns a figure and its `count` panels, row by row; width and height of a panel are in inches."""
    rows = math.ceil(count / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), **shared)
    for unused in axes.flat[count:]:
        unused.remove()
    return figure, axes.flat[:count]

# %% [markdown] weights-text
# ## Weights
#
# The loss of a token is multiplied by its weight, a function of the log-ratio `logp_old - logp_behav`.
# The first part of a name is the unit of the ratio. The second part is the treatment: unchanged
# (`vanilla`), truncated (`tis`), bounded on both sides (`clip`), zero outside a band (`mis`, `icepop`).
# The log-ratio of a sequence of 8 tokens grows 8 times as fast, so the `seq` panel has a narrower range.
# `geo_mis` and `seq_mask_tis` keep a very narrow band, meant for means over hundreds of tokens. It is a
# spike here.

# %% weights
def weight(name, log_ratio):
    return call("weight", name, log_ratio * ones, MASK)[0, -1]


drift = np.linspace(-2.0, 2.0, 4001)
weight_curves = curves(weight, weights.WEIGHTS, drift)
treatments = list(dict.fromkeys(name.partition("_")[2] for name in weight_curves))
by_level = {}
for name in weight_curves:
    by_level.setdefault(name.partition("_")[0], []).append(name)

weight_figure, axes = panels(len(by_level), 3, 4.2, 3.3, sharey=True)
for ax, (level, names) in zip(axes, by_level.items(), strict=True):
    for i, name in enumerate(names):  # the first lines are wide and stay visible below the others
        color = f"C{treatments.index(name.partition('_')[2])}"
        ax.plot(drift, weight_curves[name], color=color, linewidth=5.5 / (1 + 0.3 * i), label=name)
    reach = 2.0 / NUM_TOKENS if level == "seq" else 2.0
    ax.set(title=level, xlim=(-reach, reach), ylim=(-0.15, 5.6))
    ax.legend(loc="upper left")
weight_figure.supxlabel("log-ratio of every token, nats")
weight_figure.supylabel("weight")
plt.show()

# %% [markdown] masks-text
# ## Masks
#
# A mask removes tokens from the loss and from its denominator. A bar shows the log-ratios, equal for all
# tokens of the response, that a mask keeps. Bounds without a published value are 2. This is a wide band
# for a mean and a narrow band for a sum. Under `k3` it extends further down than up. Masks that depend
# on more than the log-ratio are listed below the figure and not drawn.

# %% masks
def is_kept(name, log_ratio):
    return call("mask", name, log_ratio * ones, MASK)[0, -1]


drift = np.linspace(-12.0, 12.0, 4801)
alone = [name for name in masks.MASKS if not methods.needs("mask", name)]
kept = curves(is_kept, alone, drift)

mask_figure, ax = plt.subplots(figsize=(9.5, 0.32 * len(kept) + 1))
for i, name in enumerate(kept):
    ax.fill_between(drift, i - 0.36, i + 0.36, where=kept[name], color=BLUE, linewidth=0)
ticks = (-10, -3, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 3, 10)
ax.set_xscale("symlog", linthresh=0.5, linscale=1.2)
ax.set_xticks(ticks, ticks)
ax.set_yticks(range(len(kept)), kept)
ax.invert_yaxis()
ax.set_xlabel("log-ratio of every token, nats")
plt.show()
print("Depend on more than the log-ratio:", ", ".join(m for m in masks.MASKS if m not in kept))

# %% [markdown] objectives-text
# ## Objectives
#
# The push of an objective on a token is `-d loss / d logp`. It is drawn against the learner's move since
# sampling, `logp - logp_old`, in blue for advantage +1 and in red for -1. At 0 nearly all objectives are
# plain REINFORCE, +1 and -1. To the left and right the methods differ: a push that drops to 0 is
# clipped, a constant push is truncated, and a push that grows without bound is an untruncated importance
# weight. Spikes are very narrow bands (`tbpo`) or bands on the product of the 8 ratios (`ctpo`,
# `vespo`). `fusion_shaped` is small by design. `seq_ppo` is 8 times as large in a sum over tokens,
# because each of the 8 tokens has the loss of the response.
#
# The sampler is exact here. Set `GAP` above to see which objectives depend on the gap. `clip_cov` and
# `kl_cov` select a few tokens by their covariance in a real batch. The curve is of a token that is not
# selected.

# %% objectives
def push(name, moved):
    """Returns the push on the last token of the good and of the bad response."""

    def total_loss(logp):
        return call("objective", name, logp, LOGP_OLD, ADV, MASK)[0].sum()

    return -jax.grad(total_loss)(LOGP_OLD + moved)[:, -1]


moved = np.linspace(-1.6, 1.6, 641)
pushes = curves(push, objectives.OBJECTIVES, moved)

objective_figure, axes = panels(len(pushes), 6, 2.1, 1.7, sharex=True, sharey=True)
for ax, name in zip(axes, pushes, strict=True):
    ax.plot(moved, pushes[name][:, 0], color=BLUE, linewidth=2)
    ax.plot(moved, pushes[name][:, 1], color=RED, linewidth=2)
    ax.set(title=name, ylim=(-3.4, 3.4))
objective_figure.supxlabel("logp - logp_old, nats")
objective_figure.supylabel("push on the token")
plt.show()

# %% [markdown] kl-text
# ## KL
#
# Value and gradient of every KL estimator against `z = logp - logp_ref`. The vocabulary has two tokens,
# which the exact forms need to know, and the reference samples the token. In a loss only the gradient
# acts. `k1` pushes every token down equally, which cancels on average. `k2` and the `+` forms pull by
# `z`. `k3` pulls harder on rarer tokens.

# %% kl
LOGP_REF = LOGP_OLD[:1, :1]


def two_tokens(logp):
    """Returns the log-probs of a token and of the only other token."""
    return jnp.stack([logp, jnp.log1p(-jnp.exp(logp))], axis=-1)


def kl_and_gradient(name, z):
    def value(z):
        logp = LOGP_REF + z
        fields = {"logits": two_tokens(logp), "logits_ref": two_tokens(LOGP_REF)}
        return call("kl", name, logp, LOGP_REF, logp_old=LOGP_REF, **fields)[0, 0]

    return jnp.stack(jax.value_and_grad(value)(z))


z = np.linspace(-1.6, 1.6, 641)
kl_curves = curves(kl_and_gradient, kl.KL, z)

kl_figure, axes = panels(len(kl_curves), 4, 3.1, 2.1, sharex=True, sharey=True)
for ax, name in zip(axes, kl_curves, strict=True):
    ax.plot(z, kl_curves[name][:, 0], color=GREEN, linewidth=3, label="value")
    ax.plot(z, kl_curves[name][:, 1], "--", color="#222222", label="gradient")
    ax.set(title=name, ylim=(-2.6, 2.6))
axes[0].legend(loc="lower right")
kl_figure.supxlabel("z = logp - logp_ref, nats")
plt.show()

# %% [markdown] oracle-text
# ## Bias against variance, exactly
#
# Which weight should one use? With three tokens and responses of length three, all responses can be
# enumerated. The true gradient, the expected step and its variance are then exact. The sampler's logits
# have noise of 0.5. The steps are REINFORCE with the ratio of a token, of the prefix and of the whole
# sequence, and with caps (the numbers). The true gradient has norm 1.
#
# The sequence weight has no bias, and a cap trades variance for bias. A token weight is biased at any
# cap: it corrects neither the sampler's prefixes nor the sampler's continuations.

# %% oracle
def score(response):
    """Returns a reward that is different for every response."""
    return float(np.sin(response @ 2.0 ** np.arange(len(response)) + len(response)))


policy = exact.random_logits(3, 3, np.random.default_rng(0))
sampler = exact.with_engine_noise(policy, 0.5, np.random.default_rng(1))
problem = exact.Problem(policy, sampler, score, 3)
truth = problem.true_gradient()
norm = np.linalg.norm(truth)


def bias_and_variance(text):
    """Returns bias and variance of REINFORCE with a weight, relative to the norm of the true gradient."""
    method = methods.parse("weight", text)

    def loss_fn(logp, batch):
        w = loss.importance_weights(batch["logp_old"] - batch["logp_behav"], batch, method)
        return reduce.aggregate(-w * batch["adv"] * logp, batch["mask"], "seq-mean-token-sum")

    mean, variance = problem.moments(loss_fn)
    return np.linalg.norm(mean - truth) / norm, variance / norm**2


CAPS = (2.0, 1.0, 0.5)
chosen = {
    "none": {"": "none"},
    "token": {"": "token_vanilla"} | {cap: f"token_tis(cap={cap})" for cap in CAPS},
    "prefix": {"": "prefix_ctpo(ctpo_low=inf, ctpo_high=inf)"},
    "sequence": {"": "seq_vanilla"} | {cap: f"seq_tis(cap={cap})" for cap in CAPS},
}

cap_figure, ax = plt.subplots(figsize=(9.5, 4.5))
print(f"{'weight':42} {'bias':>6} {'variance':>9}")
for (unit, texts), color in zip(chosen.items(), ("#777777", BLUE, GREEN, RED), strict=True):
    points = [bias_and_variance(text) for text in texts.values()]
    ax.plot(*zip(*points, strict=True), "o-", color=color, label=unit)
    for (cap, text), point in zip(texts.items(), points, strict=True):
        print(f"{text:42} {point[0]:6.3f} {point[1]:9.2f}")
        ax.annotate(cap, point, xytext=(6, 2), textcoords="offset points", color=color)
ax.set(xlabel="bias", ylabel="variance", xlim=(-0.02, 0.6), ylim=(0, 30))
ax.legend(loc="lower left")
plt.show()

# %% [markdown] sweep-text
# ## Bias against variance as responses get longer
#
# The same question for longer responses. The policy's state is its last token, the reward is on the last
# token, and the logits have noise of 0.2. The first seven rows are exact. The others are sampled with
# 95 % intervals, and show a bias of 0 below their noise. Progress is
# `P = <grad J, E g>^2 / (variance + bias^2)` of a step on one response. Larger is better, but the square
# hides a step against the gradient. Most biases hardly change with the length. All variances grow, and
# the variance of products over many tokens grows fastest. `docs/oracle.md` has the whole comparison.

# %% sweep
LENGTHS = (8, 32, 128)
rows = frontier.sweep(0.2, "last", LENGTHS, batch=1, num_samples=4000, seed=0)
names = list(dict.fromkeys(row.method for row in rows))
titles = {"bias": "bias", "log10_variance": "log10 of the variance", "progress": "progress P"}

sweep_figure, axes = plt.subplots(1, 3, figsize=(13, 5), sharey=True)
for ax, (field, title) in zip(axes, titles.items(), strict=True):
    for i, length in enumerate(LENGTHS):
        own = [row for row in rows if row.horizon == length]
        values = [getattr(row.profile, field) for row in own]
        halves = [getattr(row.half, field) if row.half else 0.0 for row in own]
        height = np.arange(len(own)) + 0.2 * (i - 1)
        style = {"fmt": "o", "color": plots.COLORS[i], "label": f"{length} tokens"}
        ax.errorbar(values, height, xerr=halves, **style)
    ax.set_title(title)
axes[0].set_xscale("symlog", linthresh=0.1)
axes[0].set_xlim(-0.01, 10)
axes[2].set_xscale("log")
axes[0].set_yticks(range(len(names)), names)
axes[0].invert_yaxis()
axes[1].legend(loc="upper right")
plt.show()

# %% [markdown] run-text
# ## Your own run
#
# A run records the gap between sampler and learner, and its weights, at every step. `RUN` is any folder
# with a `metrics.jsonl`. This one is in the repository.

# %% run
RUN = CLONE / "docs" / "smollm2" / "seed0"

runs = page.load([RUN])
shown = [plot for plot in plots.PLOTS if plot.section in (plots.GAP, plots.WEIGHTS)]
shown = [plot for plot in shown if plots.is_present(plot, runs)]
run_figure, axes = panels(len(shown), 3, 4.4, 2.8)
for ax, plot in zip(axes, shown, strict=True):
    plots.draw(ax, plot, runs)
    ax.legend(handles=plots.legend_entries(plot, runs))
plt.show()
