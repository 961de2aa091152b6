"""Writes docs/methods.md, one row per method, from the docstrings: python docs/make_methods.py.

A row is the paragraph of the docstring that reads

    Unit: token. Trust region: w <= cap. Gradient: none. Use: what it is good for; what is against.

A label that all entries of a table share stands in the docstring of the table's module instead.
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
KINDS = {"weight": ("Weights", weights), "mask": ("Masks", masks),
         "objective": ("Objectives", objectives), "advantage": ("Advantages", advantages),
         "kl": ("KL estimators", kl)}
COLUMNS = {"Unit": "unit", "Trust region": "trust region", "Gradient": "gradient path"}
CONTROLLER_COLUMNS = {"Reads": "reads", "Sets": "sets"}
LABEL = re.compile(r"(?:^|(?<= ))(Unit|Trust region|Gradient|Reads|Sets|Use): ")
# An author with a year, or the program for what has no paper.
NAMED = re.compile(
    r"[A-Z][a-z]+(?: et al\.)? (?:19|20)\d\d"
    r"|\b(?:verl|slime|prime-rl|TRL|AReaL|NeMo-RL|OpenRLHF)\b|no paper"
)
HEAD = """\
# Methods

Written by `python docs/make_methods.py` from the docstrings; edit those.

A correction is a weight, any number of masks, an objective, an advantage and, if wanted, a KL term,
each a name in a table below with the parameters that are not to be the defaults. They are fields of
`config.correction` (`configs/default.py`). A preset sets the mode, the first three and whether scores
are centred; what the config spells out wins:

```
--config.correction.weight="token_tis(cap=4.0)"
--config.correction.masks="seq_mean_k3(upper=0.01) & veto"
--config.correction.objective="ppo(clip_low=0.2, clip_high=0.28)"
--config.correction.advantage=rloo
--config.correction.kl=k2 --config.correction.kl_coeff=0.001
```

Where a survey describes another form of a method than its authors' code, both are there:
`form=survey`, as in `kl_cov(form=survey)`, chooses the survey's; the docstring has the formulas.

**Centred scores** (`estimators/centering.py`, [2609.20807](https://arxiv.org/abs/2609.20807)). Drawn
from `mu`, weighted scores have a mean, the drift, which a constant advantage turns into a step at
every prefix. `centering` subtracts it: the expected step of a prefix becomes the covariance of
advantage and weighted score. It needs the sampler's probabilities of other tokens than the drawn one,
which the engine then records: `"top(n)"`, the n likeliest, with the rest taken to be in proportion to
`pi`; or `"kept"`, the recorded support (`rollout.sampling_mask_size`), where nothing is left to be
modelled, and nothing is subtracted where more could be drawn than it holds
(`rollout/kept_overflow`). It goes with the weights {centred_weights}, the masks {centred_masks},
and the objectives {centred_objectives} in bypass mode; in decoupled mode with one update of a batch
also with {centred_at_one}. With `token_vanilla` there is nothing to subtract. Other methods have no
weight of a token that was not drawn and are refused by name. Evidence is mixed: the paper (0.6B to
30B) finds it at or above weights under quantised rollouts, a replication with a Qwen model found
nothing.

To add a method: one function in `jaxrl_tis/estimators/`, with the labels of its neighbours'
docstrings; one line in the dict at the end of the file, and in `NEEDS` if it takes more from the
batch; one test in `tests/estimators/`, where `coverage_test.py` lists what there is, `samples.py`
has values of required parameters and `universal_test.py` tests all entries. Then write this page.

**Symbols.** `pi` is the policy that is trained, `pi_old` the learner at the weights that sampled,
`mu` the sampler, `ref` the reference, `A` the advantage, `w` a weight. Weights and masks judge
`rho = pi_old / mu` (`pi / mu` in bypass mode), by `k1 = -log rho`, `k2 = (log rho)^2 / 2` or
`k3 = rho - 1 - log rho`; objectives have `r = pi / pi_old`, KL estimators `z = log(pi / ref)`.

**Columns.** *Unit*: what one weight, decision, ratio or baseline belongs to. *Trust region*: what
bounds the weight or the step. *Needs*: batch fields beyond the usual arguments; those marked † are
for small configs: the logits of the whole vocabulary at every token, or a backward pass for every
row; an objective with `logp_behav` holds the weight itself and goes with weight `none`. Rejected
tokens leave the denominators of the loss unless `rejected_in_denominator` is set; where masks are
judged together with the gradient, at every update, they stay: in bypass mode, and in decoupled mode
those that judge the policy of the update and not the sampler's gap ({at_update}). Controllers are
small state machines beside the update, without a gradient; `correction.controllers` names them,
joined by `&`, and their state is part of the checkpoint.

**Answers that are left out.** An answer whose reward failed has an unknown reward. It is in neither
the loss nor its denominators, and in no statistic of its group or batch. One known answer left of a
group has advantage 0. A batch without a known reward leaves the weights as they are.
`train.mask_truncated` takes answers that end at `rollout.max_new_tokens` out of the loss and its
denominators, as DAPO's overlong filtering does (2503.14476, section 3.4); their rewards, with the
penalty of `rollout.overlong_buffer`, stay in the statistics of their groups. The critic does not
train on either. `actor/left_out_ratio` counts both; the metrics of sampler against learner are of the
answers in the loss.

**Sources** without an arXiv id: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training"; Liu et al. 2025, "When Speed Kills Stability"; Zhang et al. 2026, "Learning
from Mixed Rollouts"; Schulman 2020, "Approximating KL Divergence"; Ionides 2008, "Truncated
Importance Sampling"; Hu et al. 2026, "FlashREINFORCE: Critic-Free Single-Rollout Asynchronous RL for
Agentic Language Models"; Williams 1992, "Simple Statistical Gradient-Following Algorithms"; else code.
Presets: verl's up to `disabled`, those that Yao et al. compare up to `tis_8`, those of
arXiv:2609.20807, FlashREINFORCE's, then by system (`same_engine` is `normal`, `colocated` and
`disaggregated` are `tis_2`).
"""


def labelled(doc: str, name: str, labels: list[str]) -> list[str]:
    """What a docstring says after each label; ValueError names the entry that lacks one."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in doc.split("\n\n")]
    parts = LABEL.split(" ".join(text for text in paragraphs if LABEL.match(text)))
    found = {label: text.strip().removesuffix(".") for label, text in zip(parts[1::2], parts[2::2])}
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
    return ", ".join(dict.fromkeys(links or NAMED.findall(head)))


def row(name: str, table: dict, shared: str, labels: Iterable[str], *more: str) -> list[str]:
    """Cells of an entry; `shared` is the docstring of the table's module."""
    *cells, use = labelled(f"{shared}\n\n{table[name].__doc__}", name, [*labels, "Use"])
    link = f"[`{name}`](../{table[name].__module__.replace('.', '/')}.py)"
    return [link, source(table[name].__doc__, name, table), *cells, *more, use]


def defaults(parameters: dict) -> str:
    texts = [
        f"`{name}` required" if value is inspect.Parameter.empty else f"`{name}={value}`"
        for name, value in parameters.items()
    ]
    return ", ".join(texts) or "–"


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def needs(kind: str, name: str) -> str:
    fields = methods.needs(kind, name)
    marked = [f"`{field}`" + "†" * FIELDS[field].is_large for field in fields]
    return ", ".join(marked) or "–"


def section(title: str, header: list[str], rows: Iterable[list[str]]) -> str:
    escaped = [[cell.replace("|", r"\|") for cell in cells] for cells in rows]
    lines = [header, ["---"] * len(header), *escaped]
    return f"\n## {title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def method_rows(kind: str) -> list[list[str]]:
    table, shared = methods.TABLES[kind][0], KINDS[kind][1].__doc__
    parameters = {name: defaults(methods.parameters(kind, name)) for name in table}
    return [row(n, table, shared, COLUMNS, parameters[n], needs(kind, n)) for n in table]


def controller_row(name: str) -> list[str]:
    parameters = defaults(methods.parameters("controller", name))
    return row(name, controllers.CONTROLLERS, "", CONTROLLER_COLUMNS, parameters)


def page() -> str:
    header = ["name", "paper", *COLUMNS.values(), "defaults", "needs", "when to use it"]
    at_update = [name for name in masks.MASKS if name in masks.AT_UPDATE]
    text = HEAD.format(
        at_update=listed(at_update), centred_weights=listed(centering.WEIGHTS),
        centred_masks=listed(centering.MASKS), centred_objectives=listed(centering.OBJECTIVES),
        centred_at_one=listed(centering.AT_RATIO_ONE),
    )
    text += "".join(section(KINDS[k][0], header, method_rows(k)) for k in KINDS)
    header = ["name", "paper", *CONTROLLER_COLUMNS.values(), "defaults", "when to use it"]
    text += section("Controllers", header, map(controller_row, controllers.CONTROLLERS))
    bundles = [[name, *preset.values()] for name, preset in presets.PRESETS.items()]
    rows = [[f"`{cell}`" if cell else "–" for cell in bundle] for bundle in bundles]
    text += section("Presets", ["name", "mode", "weight", "masks", "objective", "centering"], rows)
    return text.replace("docs/oracle.md", "[docs/oracle.md](oracle.md)")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
