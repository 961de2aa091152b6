"""Writes the last section of the page: sampled answers, each token coloured by |Δp|.

Tokens that an environment gave between two turns are grey.
"""

import html
import math
from collections.abc import Sequence
from typing import Any

FULL_COLOR = 0.25  # |Δp| that is drawn in full colour
EMPTY = "\N{WHITE SQUARE}"  # for a token without text or name, as a part of a character

CSS = """
.answer { padding: 10px 14px; margin: 10px 0; } .answer p { margin: 4px 0; white-space: pre-wrap;
          overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; }
.answer span { border-radius: 3px; } .answer .given { color: #888888; }
"""


def section(label: str, lines: Sequence[dict[str, Any]]) -> str:
    """Returns the answers of a run's last evaluation and last recorded training step, as HTML; `lines`
    are those of samples.jsonl."""
    parts = []
    for phase, title in (("eval", "evaluation"), ("train", "rollouts")):
        steps = [line["step"] for line in lines if line["phase"] == phase]
        if steps:
            parts.append(f"<h3>{html.escape(label)}: {title} at step {steps[-1]}</h3>")
            parts += [answer(x) for x in lines if (x["phase"], x["step"]) == (phase, steps[-1])]
    return "".join(parts)


def answer(line: dict[str, Any]) -> str:
    """Returns one answer as HTML, each token coloured by |Δp|."""
    tokens = "".join(_token(line, i) for i in range(len(line["tokens"])))
    rest = line["length"] - len(line["tokens"])
    more = f" <small>and {rest} more tokens</small>" if rest else ""
    right = line["answer"]
    expected = "" if right is None else f", expected {html.escape(right)}"
    reward = "unknown" if line["reward"] is None else f'{line["reward"]:zg}'
    ended = f', {line["outcome"]}, turns {len(line["turn_rewards"])}' if "outcome" in line else ""
    return (
        f'<div class="card answer"><p><small>prompt</small> {html.escape(line["prompt"])}</p>'
        f"<p><small>answer</small> {tokens}{more}</p>"
        f'<p><small>reward {reward}{expected}{ended}</small></p></div>'
    )


def _token(line: dict[str, Any], i: int) -> str:
    behav, old, weight, version = (
        None if line[name] is None else line[name][i]
        for name in ("logp_behav", "logp_old", "weight", "version")
    )
    shown = line["tokens"][i] or ("names" in line and line["names"][i]) or EMPTY
    facts = [repr(shown if shown != EMPTY else "")]
    if "turn" in line and behav is None and old is None:
        title = html.escape(f"{facts[0]}, given before turn {line['turn'][i] + 1}", quote=True)
        return f'<span class="given" title="{title}">{html.escape(shown)}</span>'
    facts += [] if behav is None else [f"sampler's probability {math.exp(behav):.4f}"]
    facts += [] if old is None else [f"learner's probability {math.exp(old):.4f}"]
    facts += [] if weight is None else [f"weight {weight:.4f}"]
    facts += [] if version is None else [f"version {version}"]
    style = ""
    if behav is not None and old is not None:
        alpha = min(abs(math.exp(old) - math.exp(behav)) / FULL_COLOR, 1.0)
        style = f' style="background:rgba(213,94,0,{alpha:.3f})"'
    title = html.escape(", ".join(facts), quote=True)
    return f'<span title="{title}"{style}>{html.escape(shown)}</span>'
