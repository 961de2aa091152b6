"""Writes docs/methods.md, one row per method, from the docstrings: python docs/make_methods.py.

A row is the paragraph of the docstring that reads

    Unit: token. Trust region: w <= cap. Gradient: none. Use: what it is good for; what is against.

A label that all entries of a table share stands in the docstring of the table's module instead. All
labels are required. KINDS says which are columns.
"""

import inspect
import pathlib
import re
from collections.abc import Iterable

from jaxrl_tis.estimators import (
    advantages, centering, controllers, kl, masks, methods, objectives, presets, weights,
)
from jaxrl_tis.fields import FIELDS

PAGE = pathlib.Path(__file__).with_name("methods.md")
# Kind: (title, module, labels that are columns of its table).
KINDS = {
    "weight": ("Weights", weights, ("Unit", "Trust region")),
    "mask": ("Masks", masks, ("Unit", "Trust region")),
    "objective": ("Objectives", objectives, ("Unit", "Trust region")),
    "advantage": ("Advantages", advantages, ("Unit",)),
    "kl": ("KL estimators", kl, ("Gradient",)),
}
LABELS = "Unit", "Trust region", "Gradient"
COLUMNS = {
    "Unit": "unit", "Trust region": "trust region", "Gradient": "gradient path", "Reads": "reads",
    "Sets": "sets",
}
LABEL = re.compile(r"(?:^|(?<= ))(Unit|Trust region|Gradient|Reads|Sets|Use): ")
# An author with a year, or the program for what has no paper.
NAMED = re.compile(
    r"[A-Z][a-z]+(?: et al\.)? (?:19|20)\d\d"
    r"|\b(?:verl|slime|prime-rl|TRL|AReaL|NeMo-RL|OpenRLHF)\b|no paper"
)
HEAD = """\
# Methods

Every weight, mask, objective, advantage, KL estimator, controller and preset, with its paper, its defaults and its
use. Written by `python docs/make_methods.py` from the docstrings. To change a row, edit the docstring.

## How to choose methods

The fields of `config.correction` name the methods ([configs.md](configs.md#correction)). A preset sets centre, weights,
masks, objective, centering and routing. A field that the config gives has precedence over the preset:

```
--config.correction.preset=tis_2
--config.correction.weight="token_tis(cap=4.0)"
--config.correction.masks="seq_mean_k3(upper=0.01) & veto"
--config.correction.objective="ppo(clip_low=0.2, clip_high=0.28)"
--config.correction.advantage=rloo
--config.correction.kl=k2 --config.correction.kl_coeff=0.001
```

## How to read the tables

| symbol | meaning |
|---|---|
| `pi` | the policy during the update |
| `pi_old` | the learner at the weights that sampled |
| `mu` | the sampler |
| `ref` | the reference model |
| `A`, `w` | advantage, importance weight |
| `rho` | `pi_old / mu`, or the ratio that a [field](concepts.md#one-ratio-four-factors) says; weights and masks use it |
| `k1`, `k2`, `k3` | `-log rho`, `(log rho)^2 / 2`, `rho - 1 - log rho` |
| `r` | `pi / pi_old`, the ratio of objectives; `correction.centre` chooses another denominator |
| `z` | `log(pi / ref)`, for KL estimators |

- **unit**: the level of one weight, decision, ratio or baseline.
- **trust region**: the bound on the weight or on the step. A *one-sided* bound holds on the side that `A` pushes to.
- **parameters**: with their defaults; one without is required. "Needs" are batch fields beyond the usual arguments.
  †: for small models, as it takes all logits or a gradient per row.
- **use**: what a method is good for; what speaks against it.

The docstring of an objective has its gradient path. An objective that needs `logp_behav` has its own weight. Use it
with weight `none`. Some surveys describe another form of a method than the authors' code:
`form=survey` selects it, as in `kl_cov(form=survey)`.

## Aggregation of the loss

`correction.aggregation` reduces the token losses `l` to one number. N is the number of valid tokens of the minibatch.
S is its number of sequences with a valid token.

| `correction.aggregation` | loss | also known as |
|---|---|---|
| `token-mean` (default) | `sum_s sum_t l / N` | DAPO |
| `token-sum` | `sum_s sum_t l` | |
| `seq-mean-token-sum` | `sum_s sum_t l / S` | |
| `seq-mean-token-sum-norm` | `sum_s sum_t l / (S scale)`, with `correction.scale` (0: the row length) | Dr. GRPO |
| `seq-mean-token-mean` | `sum_s mean_t l / S` | GRPO |
| `prompt-mean` | `sum_p (sum_s sum_t l / N_p) / P`, with `N_p` tokens of prompt p and P prompts | ScaleRL ([2510.13786](https://arxiv.org/abs/2510.13786)), SkyRL's `prompt_mean` |

`prompt-mean` counts the prompts of the minibatch. With several minibatches a prompt can have samples in more than one.
A fork of a session counts in the prompt of the session. An update with `prompt-mean` waits for its whole batch.

## Further terms of the loss

| coefficient | term | tokens | source |
|---|---|---|---|
| `correction.kl_coeff` | KL to the reference, by `correction.kl` | in the loss | the [KL estimators](#kl-estimators) |
| `correction.sampler_kl_coeff` | `(log(pi / mu))^2 / 2` | in the loss, rejected ones too | prime-rl, whose `kl_tau` is half of it |
| `correction.dense_kl_coeff` | KL of all keys to those of `engine.retention` | in the loss | Shadow Mask, [2605.06850](https://arxiv.org/abs/2605.06850), 0.1 |
| `correction.entropy_coeff` | minus the entropy of `pi` | in the loss | |
| `correction.environment_ce_coeff` | `-log pi` at temperature 1 | written by an [environment](environments.md) or an agent between two answers, and the chat template's around them | ECHO, [2605.24517](https://arxiv.org/abs/2605.24517) |

`correction.aggregation` reduces all but the last, a mean over the environment's tokens of the minibatch.

## Rejected and unscored responses

Rejected tokens leave the denominators of the loss, unless `correction.rejected_in_denominator` is set. Masks that act
inside the update always keep rejected tokens in the denominators. These are masks with `of=policy`, all masks around
the sampler (`correction.centre=behav`), and {at_update}.

A response without a reward is out of the loss, its denominators and all statistics of its group and batch. A
group with one remaining response has advantage 0. A batch without any reward leaves the weights unchanged.

`train.mask_truncated` takes responses that reach `rollout.max_new_tokens` out of the loss (DAPO, 2503.14476,
section 3.4). Their rewards stay in the statistics of their groups. The critic trains on neither kind.
`actor/left_out_ratio` counts both kinds. Metrics of sampler against learner cover the responses in the loss.

## Credit of turns

With an environment a response has several turns. `correction.turn_credit` names the rewards that the advantage of a
token is made from. Source: `estimators/turn_credit.py`.

| `correction.turn_credit` | rewards of a token | advantages |
|---|---|---|
| `episode` (default) | of the whole episode | all |
| `rest` | of the token's turn and of later turns | all but {whole} |
| `turn` | of the token's turn | all but {whole}, {per_token} |

The advantages that the row `turn` adds to its exceptions work with returns per token. With `rest` they get the reward
of a turn at its last sampled token. All others treat each turn as a sequence of its own and compare it with turns of
the same number. A turn that one sample of a group reached alone has advantage 0.

A turn without a reward counts as 0 in `rest`. In `turn` its advantage is 0. Penalties of the run, such as the overlong
penalty, belong to the last turn. `rollout.dynamic_sampling` compares the rewards of whole episodes with any credit.

Tokens of tools are in no loss, except with `correction.environment_ce_coeff`. The methods whose unit is a turn are
{of_turns}.

## Centred scores

Source: `estimators/centering.py`, [2609.20807](https://arxiv.org/abs/2609.20807). The mean of a weighted score under
`mu` is not 0, and a constant advantage turns it into a step at every prefix. `centering` subtracts the mean.

Centering needs the sampler's probabilities of tokens that were not sampled. `"top(n)"` records the n likeliest tokens
and assumes that the other tokens are proportional to `pi`. `"kept"` uses the recorded sampling mask
(`rollout.sampling_mask_size`) and assumes nothing. Positions where the mask overflowed (`rollout/kept_overflow`) are
not centred.

With weight `token_vanilla` the mean is 0 already. Centering works with these methods and refuses all others:

- weights {centred_weights}
- masks {centred_masks}
- around the sampler (`correction.centre=behav`) objectives {centred_objectives}
- around `old` or `prox`, with one update per batch, also objectives {centred_at_one}

The paper reports results at or above those of weights. A replication with a Qwen model found no effect.

## Sources without an arXiv id

- Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
- Liu et al. 2025, "When Speed Kills Stability" (weights of sequences and their truncation, too)
- Zhang et al. 2026, "Learning from Mixed Rollouts"
- Schulman 2020, "Approximating KL Divergence"
- Ionides 2008, "Truncated Importance Sampling"
- Hu et al. 2026, "FlashREINFORCE: Critic-Free Single-Rollout Asynchronous RL for Agentic Language Models"
- Williams 1992, "Simple Statistical Gradient-Following Algorithms"

The name of a framework as a source stands for its code. No primary source gives the formulas of StableReinforce, MIPU,
SAT, AIS, DCMDP, mu-GRPO and DVP, which are not included.
"""
ABOUT_CONTROLLERS = """\
A controller changes a setting between updates. It has no gradient. Its state is part of the checkpoint."""
ABOUT_PRESETS = """\
| presets | source |
|---|---|
| the first, up to `disabled` | verl, under the same names |
| `normal`, `ppo_is`, `vanilla_is`, `tis_2`, `tis_8` | Yao et al. 2025 |
| `centered`, `centered_tis_2` | [2609.20807](https://arxiv.org/abs/2609.20807) |
| `flash_reinforce` | Hu et al. 2026 |
| `ipo` | prime-rl's default loss |
| `kpop` | [2606.15079](https://arxiv.org/abs/2606.15079) |
| `decoupled` | [2110.00641](https://arxiv.org/abs/2110.00641) |
| `factored`, `capped_ratio`, `seq_capped_ratio` | a bound for [each factor](concepts.md#one-ratio-four-factors); no paper |
| `mis_ppo`, `seq_mis_ppo` | Liu et al. 2025 |
| `icepop` | [2510.18855](https://arxiv.org/abs/2510.18855) |
| the others | named after systems |

`moe` and `async_moe` replay routes by `train.minibatches`: none in one update, r2 in two, r3 beyond
([2512.01374](https://arxiv.org/abs/2512.01374)). A geometric band is 0.99 to 1.01 in most advice and 0.999 to 1.001 in
verl's presets; caps of a weight are 2 to 10, those of a sequence up to 100."""


def labelled(doc: str, name: str, labels: list[str]) -> list[str]:
    """What a docstring says after each label; ValueError names the entry that lacks one."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in doc.split("\n\n")]
    parts = LABEL.split(" ".join(text for text in paragraphs if LABEL.match(text)))
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    found = {label: text.strip().removesuffix(".") for label, text in pairs}
    for label in labels:
        if not found.get(label):
            raise ValueError(f"the docstring of {name!r} has no {label!r}; add '{label}: ...'")
    return [found[label] for label in labels]


def source(doc: str, name: str, table: dict) -> str:
    """Links to the arXiv ids above a docstring's labels and arguments, or the sources it names."""
    head = LABEL.split(" ".join(doc.partition("Args:")[0].split()))[0]
    if shared := re.search(r"[Ss]ource as `(\w+)`", head):
        return source(table[shared[1]].__doc__, shared[1], table)
    links = [f"[{i}](https://arxiv.org/abs/{i})" for i in re.findall(r"arXiv:(\d{4}\.\d{5})", head)]
    if not links and not NAMED.search(head):
        raise ValueError(f"the docstring of {name!r} has no source; add 'arXiv:...' or 'no paper'")
    found = dict.fromkeys(links or NAMED.findall(head))
    return ", ".join(name for name in found if name != "no paper")


def row(name: str, table: dict, labels: Iterable[str], required: Iterable[str], shared: str,
        parameters: str) -> list[str]:
    """Cells of an entry; `shared` is the docstring of the table's module."""
    doc, function = table[name].__doc__, table[name].__name__
    labelled(f"{shared}\n\n{doc}", name, required)
    *cells, use = labelled(f"{shared}\n\n{doc}", name, [*labels, "Use"])
    link = f"[`{name}`](../{table[name].__module__.replace('.', '/')}.py)"
    link += f" (`{function}`)" * (function != name)
    return [f"{link} {source(doc, name, table)}".strip(), *cells, parameters, use]


def defaults(parameters: dict) -> str:
    return listed(
        name if value is inspect.Parameter.empty else f"{name}={value}"
        for name, value in parameters.items()
    )


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def parameters(kind: str, name: str) -> str:
    """The parameters of a method, and the batch fields that it needs."""
    fields = methods.needs(kind, name)
    needs = ", ".join(f"`{field}`" + "†" * FIELDS[field].is_large for field in fields)
    found = defaults(methods.parameters(kind, name))
    return "; ".join([found] * bool(found) + [f"needs {needs}"] * bool(needs))


def advantages_with(trait: str) -> str:
    names = methods.TABLES["advantage"]
    return listed(n for n in names if getattr(methods.traits("advantage", n), trait))


def section(title: str, header: list[str], rows: Iterable[list[str]], about: str = "") -> str:
    escaped = [[cell.replace("|", r"\|") for cell in cells] for cells in rows]
    head, *lines = [f"| {' | '.join(line)} |\n" for line in (header, *escaped)]
    about += "\n\n" * bool(about)
    return f"\n## {title}\n\n{about}{head}|" + "---|" * len(header) + "\n" + "".join(lines)


def method_section(kind: str) -> str:
    (title, module, labels), table = KINDS[kind], methods.TABLES[kind]
    rows = [row(n, table, labels, LABELS, module.__doc__, parameters(kind, n)) for n in table]
    return section(title, ["method", *(COLUMNS[x] for x in labels), "parameters", "use"], rows)


def controller_section() -> str:
    table, labels = controllers.CONTROLLERS, ("Reads", "Sets")
    rows = [row(n, table, labels, (), "", defaults(methods.parameters("controller", n))) for n in table]
    header = ["method", *(COLUMNS[x] for x in labels), "parameters", "use"]
    return section("Controllers", header, rows, ABOUT_CONTROLLERS)


def preset_row(name: str) -> list[str]:
    bundle = presets.PRESETS[name]
    shown = ("centre", "weight", "staleness_weight", "masks", "objective")
    parts = [bundle[part] for part in shown]
    cells = [f"`{cell}`" if cell not in ("", "none") else "" for cell in (name, *parts)]
    cells[-1] += f", centred by `{bundle['centering']}`" * (bundle["centering"] != "none")
    cells[-1] += f", routes {bundle['routing']}" * (bundle["routing"] != "none")
    return cells


def page() -> str:
    at_update = [name for name in masks.MASKS if methods.traits("mask", name).at_update]
    of_turns = [
        name for kind in KINDS for name in methods.TABLES[kind]
        if "turn" in methods.needs(kind, name)
    ]
    text = HEAD.format(
        at_update=listed(at_update), centred_weights=listed(centering.known("weight")),
        centred_masks=listed(centering.known("mask")),
        centred_objectives=listed(centering.known("objective")),
        centred_at_one=listed(centering.known("objective", "one")),
        whole=advantages_with("of_sequences"), per_token=advantages_with("per_token"),
        of_turns=listed(of_turns),
    )
    text += "".join(map(method_section, KINDS)) + controller_section()
    header = ["name", "centre", "weight", "staleness_weight", "masks", "objective"]
    text += section("Presets", header, map(preset_row, presets.PRESETS), ABOUT_PRESETS)
    return text.replace("docs/oracle.md", "[oracle](oracle.md)")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
