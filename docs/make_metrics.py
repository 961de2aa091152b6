"""Writes docs/metrics.md from jaxrl_tis/record/names.py: python docs/make_metrics.py."""

import pathlib
import re
from collections.abc import Iterable

from jaxrl_tis.doctor.case import THRESHOLDS
from jaxrl_tis.record import names

PAGE = pathlib.Path(__file__).with_name("metrics.md")
HEAD = """\
# Metrics

Every value that a run writes, with its unit and meaning. Written by `python docs/make_metrics.py` from
`jaxrl_tis/record/names.py`. To change a row, edit this file.

`metrics.jsonl` has one line for each training step, evaluation and warm-up step. A line has `step`, `phase`
(`train`, `eval` or `warmup`) and the values. TensorBoard and the sinks name a value `phase/name`.

## What to look at first

`python -m jaxrl_tis.report WORKDIR` plots these metrics. `python -m jaxrl_tis.doctor WORKDIR` compares them with
the thresholds below and names the cause ([doctor.md](doctor.md)). A value above a threshold is a reason to look, and
not yet a failing run: see [Is my gap dangerous?](gate.md#is-my-gap-dangerous)

| question | metric | fine | act |
|---|---|---|---|
| Does the learner improve? | `eval/greedy_accuracy`, `eval/sampled_accuracy` | rises by more than its interval | |
| Do sampler and learner agree? | `training/rollout_actor_probs_pearson_corr` | {pearson_healthy} or more | below {pearson_broken} |
| | `rollout_corr/kl`, nats per token | below {kl_fine} | above {kl_bug}, or below {kl_negative} |
| How noisy are the weights? | `rollout_corr/chi2_token` | up to {chi2_moderate} | above {chi2_high} |
| | `rollout_corr/kept_eff_sample_size` | {ess_low} or more | below {ess_low}. With masks and below {ess_broken}: reduce the gap itself |
| How much is rejected? | `rollout_corr/rollout_rs_masked_fraction`, `actor/rejected_fraction` | up to {rejected_high} | above {rejected_stop} |
| Does the trust region hold the update? | `actor/pg_clipfrac` | up to {clipped} | above, and it rises |
| How old are the samples? | `training/off_policy/trajectory_staleness_worst/mean`, versions | up to {lag_naive}; up to {lag} with preset `async` | above that limit |
| Does the policy collapse? | `actor/entropy`, `actor/grad_norm` | steady | entropy falls to 0, or the norm has spikes |

## How to read the tables

- `{{a,b}}` in a name stands for each of the words, `<x>` for any text.
- †: also in the compact record, `--config.metrics.record=compact`, a fifth to a quarter of the full one. TensorBoard
  and the sinks always get all values.
- ‡: verl has the same metric, with this name and formula.
- A mean is over valid tokens unless the row says otherwise. A mean of nothing (an empty mask) is 0.

| symbol | meaning |
|---|---|
| π | learner during the update |
| π_prox | learner at the start of the update |
| π_old | learner at the weights that sampled |
| μ | sampler |
| ρ | exp(π_old − μ) of a token; Π ρ is the product over a sequence |
| Δp | absolute difference of the two probabilities, exp π_old and exp μ |

π, π_prox, π_old and μ are log-probs of the sampled token.
"""
# What all rows of a section share.
INTRODUCTIONS = {
    "The update": "Values are means over the updates of a step.",
    "Sampler against learner": """\
`rollout.old_logp_source` sets the source of π_old. With `none`, π_old is π_prox. With `ewma`, both are log-probs of a
moving average of the policy. In these two cases staleness counts as the engine's.

`mismatch/route_flip_*` compares the experts that sampler and learner choose for a token, in any order. It needs the
recorded routes of the sampler (`engine.record_routes`). The learner's routes are those without replay.

Rows by turn and tool appear for [episodes](environments.md) of several turns, for [sessions](harness.md) of an agent
and in the [audit](audit.md).""",
    "Experts": """\
For models with a mixture of experts, from the learner's own routes, without replay. Mean and worst are over the MoE
layers. The worst layer has the largest load, or the smallest entropy.""",
    "Importance weights and rejection": """\
`correction/*` count tokens, once for the rollout batch. Around the sampler (`correction.centre=behav`), and for
masks inside the update, they are sums over the updates: with two epochs every token counts twice. A weight
`none` and objectives with a weight of their own have no counts.""",
    "Samplers that run ahead": """\
[async.md](async.md) explains the schedules, [gate.md](gate.md) the probe (`gate/*`, every `rollout.gap_probe_every`
steps). Counts are since the last batch.""",
    "The machine": """\
Two runs of the same program may differ only in values of `time/`. Phases are disjoint. Compilation within a phase
counts as `compile`. The goodput of the report is the share of rollout, reward, score and update in the sum of all
phases.""",
}


def row(metric: names.Metric) -> str:
    """Returns the row of a metric, with links to the papers of its source."""
    is_verl = metric.source == names.VERL
    source = re.sub(r"\b(\d{4}\.\d{5})", r"[\1](https://arxiv.org/abs/\1)", metric.source)
    name = f"`{metric.pattern}`" + "†" * metric.is_compact + "‡" * is_verl
    end = "." if is_verl or not source else f" ({source})."
    cells = name, metric.unit, metric.meaning.removesuffix(".") + end
    return " | ".join(cell.replace("|", r"\|") for cell in cells)


def section(title: str, metrics: Iterable[names.Metric]) -> str:
    about = INTRODUCTIONS.get(title, "")
    lines = ["| name | unit | meaning |", "|---|---|---|", *(f"| {row(m)} |" for m in metrics)]
    return f"\n## {title}\n\n{about}" + "\n\n" * bool(about) + "\n".join(lines) + "\n"


def page() -> str:
    limits = {name: f"{value:g}" for name, value in THRESHOLDS.items()}
    return HEAD.format(**limits) + "".join(section(*item) for item in names.SECTIONS.items())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
