"""Measures the gap by degree of parallelism and answer length: Figures 7 to 10 of Yao et al. (2025).

SmolLM2-135M in bfloat16 samples with one and with three tensor shards, the degrees that its nine heads
allow. Learners of other degrees, and with rows cut over up to eight devices, compute log-probs of the same
tokens. The tables compare the largest and the mean |p_sampler - p_learner| of a response. Answers do not stop
and are cut to several lengths. `./launch/smollm2.sh --fetch` provides the model.

The figure needs eight devices, as XLA_FLAGS=--xla_force_host_platform_device_count=8 makes them.
"""

import dataclasses
import pathlib
from collections.abc import Mapping

import jax
import numpy as np
from matplotlib.axes import Axes

from jaxrl_tis import cli_flags, sharding
from jaxrl_tis.build import Setup, build
from experiments import parts
from jaxrl_tis.gate import ladder, report
from jaxrl_tis.learner.state import initial_params
from jaxrl_tis.report.plots import COLORS, palette

CONFIG = "configs/smollm2_135m.py"
SAMPLERS = {"TP1": 1, "TP3": 3}
# (data, fsdp, tensor, context)
LEARNERS = {
    "TP1": (1, 1, 1, 1), "TP3": (1, 1, 3, 1), "SP2": (1, 1, 1, 2), "SP4": (1, 1, 1, 4), "SP8": (1, 1, 1, 8),
}
PROMPTS = 4  # groups of eight
LENGTHS = (64, 128, 256, 512)
PROMPT = 48  # maximum tokens of a prompt; with the longest answer two equal chunks for each of 8 shards

Gaps = Mapping[str, Mapping[str, np.ndarray]]  # sampler -> learner -> |p_sampler - p_learner| [N,T]


def setup_of(tensor: int, prompts: int) -> Setup:
    """Builds a sampler with `tensor` shards, and a learner on one device."""
    config = cli_flags.parsed([f"--config={CONFIG}"])
    config.model.dtype = config.engine.dtype = config.engine.cache_dtype = "bfloat16"
    config.engine.quantization = "none"
    config.mesh.serve = (1, 1, tensor)
    config.task.max_prompt_tokens = PROMPT
    config.rollout.prompts, config.rollout.max_new_tokens = prompts, max(LENGTHS)
    config.engine.slots = prompts * config.rollout.group_size
    config.engine.steps_per_call = 32
    config.train.microbatch_rows = 4
    return build(config.lock())


def differences(setup: Setup, params, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns learner -> |p_sampler - p_learner| of the answers' tokens [N, longest answer]."""
    micro, flat = setup.training.micro_batches(rows)
    tokens = lambda x_nt: x_nt[rows["mask"]].reshape(len(x_nt), -1)
    by_degree = {}
    for name, shape in LEARNERS.items():
        layout = sharding.layout(
            shape, sharding.TRAIN_RULES, jax.devices()[: int(np.prod(shape))], setup.model.vocab_size
        )
        settings = dataclasses.replace(ladder.learner_settings(setup), layout=layout)
        logp = flat(ladder.score(setup, settings, params, micro))
        by_degree[name] = np.abs(np.exp(tokens(logp)) - np.exp(tokens(rows["logp_behav"])))
    return by_degree


def degrees_table(found: Gaps) -> str:
    """Returns a Markdown table by sampler and learner: largest and mean difference of a response, and the
    largest minus that of the learner on one device, paired by response."""
    lines = []
    for sampler, learners in found.items():
        plain = learners["TP1"].max(axis=1)
        for learner, dp in learners.items():
            paired = "–" if learner == "TP1" else parts.mean(dp.max(axis=1) - plain, "+.4f")
            lines.append([
                sampler, learner, parts.mean(dp.max(axis=1), ".4f"), paired, f"{dp.max():.3f}",
                parts.mean(dp.mean(axis=1), ".5f"),
            ])
    header = [
        "sampler", "learner", "largest dp of a response", "difference to TP1", "largest dp of all",
        "mean dp of a response",
    ]
    return parts.rows(header, lines)


def lengths_table(found: Gaps) -> str:
    """Returns a Markdown table by length, of TP1 and TP1: one answer cut there, and as many tokens of
    several beginnings of a group's answers."""
    dp, lines = found["TP1"]["TP1"], []
    group = len(dp) // PROMPTS
    shortest = min(LENGTHS)
    if group * shortest < max(LENGTHS):
        raise ValueError(
            f"groups of {group} answers of {shortest} tokens are shorter than {max(LENGTHS)} "
            "tokens; use larger groups"
        )
    for length in LENGTHS:
        pieces = length // shortest
        starts = dp[:, :shortest].reshape(-1, group, shortest)[:, :pieces].max(axis=(1, 2))
        late = dp[:, length - shortest : length]
        lines.append([
            str(length), parts.mean(dp[:, :length].max(axis=1), ".4f"),
            parts.mean(starts, ".4f"),
            parts.mean(dp[:, :length].mean(axis=1), ".5f"), parts.mean(late.mean(axis=1), ".5f"),
        ])
    header = [
        "tokens", "largest dp of one answer", f"as many tokens in answers of {shortest}", "mean dp",
        f"mean dp of its last {shortest}",
    ]
    return parts.rows(header, lines)


def draw_degrees(axes: Axes, found: Gaps) -> None:
    """Draws the distribution of a response's largest difference by degrees."""
    for (sampler, learners), style in zip(found.items(), ("-", "--"), strict=False):
        for (learner, dp), color in zip(learners.items(), palette(len(learners)), strict=True):
            values = np.sort(dp.max(axis=1))
            share = 1 - np.arange(len(values)) / len(values)
            axes.plot(values, share, style, color=color, label=f"{sampler}, {learner}")
    axes.set(
        title="Largest difference of a response", ylabel="share above",
        xlabel="|p_sampler − p_learner| (TP: tensor shards, SP: parts of a row)",
    )
    axes.legend(loc="upper right", fontsize=7, title="sampler, learner", title_fontsize=7)


def draw_lengths(axes: Axes, found: Gaps) -> None:
    """Draws the growth of the difference with the length of a response."""
    dp = found["TP1"]["TP1"]
    for reduce, label, color in ((np.max, "largest", COLORS[0]), (np.mean, "mean", COLORS[1])):
        means = [reduce(dp[:, :length], axis=1).mean() for length in LENGTHS]
        axes.plot(LENGTHS, means, "o-", color=color, label=label)
    axes.set(title="And its length, TP1 and TP1", xlabel="tokens", xscale="log", yscale="log")
    axes.set_ylabel("|p_sampler − p_learner|")
    axes.minorticks_off()
    axes.set_xticks(LENGTHS, map(str, LENGTHS))
    ticks = (0.003, 0.01, 0.03)
    axes.set_yticks(ticks, map(str, ticks))
    axes.legend()


def read(folder: pathlib.Path) -> Gaps:
    """Samples and scores the answers of all degrees."""
    if jax.device_count() < 8:
        raise ValueError(
            f"eight devices are needed, and there are {jax.device_count()}; set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8"
        )
    gaps = {}
    for sampler, tensor in SAMPLERS.items():
        setup = setup_of(tensor, PROMPTS)
        params = initial_params(setup.training)
        endless = report.sample(setup, params, PROMPTS, stop_ids=())
        gaps[sampler] = differences(setup, params, setup.training.rows(endless))
        print(f"{sampler}: scored", flush=True)
    return gaps


FIGURE = parts.Figure(
    (degrees_table, lengths_table),
    {"parallelism": parts.Picture((11, 4.5), [draw_degrees, draw_lengths])}, read,
)
