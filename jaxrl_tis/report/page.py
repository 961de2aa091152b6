"""Loads the records of runs and writes the page. plots.py has the list of plots."""

import html
import json
import os
from collections.abc import Callable, Sequence

import numpy as np
from etils import epath
from matplotlib import colors

from jaxrl_tis.record import failures, intervals, metrics, probabilities, provenance, samples
from jaxrl_tis.record.progress import clock
from jaxrl_tis.report import answers, plots
from jaxrl_tis.report.plots import Run
from jaxrl_tis.runtime import storage


def load(workdirs: Sequence[str | os.PathLike]) -> list[Run]:
    """Reads the runs; labels are folder names, or whole paths where names repeat.

    Raises:
      ValueError: no workdir is given, or a file of one is broken.
      FileNotFoundError: a workdir has no metrics.jsonl.
    """
    if not workdirs:
        raise ValueError("no workdir given; a report needs at least one")
    paths = [storage.folder(workdir) for workdir in workdirs]
    names = [path.name for path in paths]
    runs = []
    for path, color in zip(paths, plots.palette(len(paths)), strict=True):
        label = path.name if names.count(path.name) == 1 else str(path)
        records = metrics.read(path)
        config = provenance.read(path)
        failed = failures.read(path / failures.FILE_NAME)
        planes = probabilities.read(path)
        runs.append(Run(label, color, records, config, samples.read(path), failed, planes))
    return runs


def _percent(run: Run, key: str, index: int) -> str:
    """Returns an accuracy with its 95 % interval, as "41.0 % [35.2, 47.1]"."""
    records = [record for record in run.records if record["phase"] == "eval" and key in record]
    if not records:
        return "–"
    record = records[index]
    if (count := metrics.num_answers(record, key)) is None:
        return f"{100 * record[key]:.1f} %"
    low, high = intervals.wilson(record[key], count)
    return f"{100 * record[key]:.1f} % <small>[{100 * low:.1f}, {100 * high:.1f}]</small>"


def _change(run: Run, key: str) -> str:
    """Returns the first and the last value of an evaluation."""
    values = run.curve("eval", key)[1]
    return f"{values[0]:z.3g} → {values[-1]:z.3g}" if values.size else "–"


def _number(run: Run, key: str, reduce: Callable) -> str:
    values = run.curve("train", key)[1]
    return f"{reduce(values):z.3g}" if values.size else "–"


def summary_row(run: Run) -> dict[str, str]:
    """Returns a row of the table at the top, as {column: HTML}."""
    steps = [record["step"] for record in run.records if record["phase"] == "train"]
    config = run.config["config"] if run.config else {}
    difference = "training/rollout_probs_diff_"
    accuracy = {f"{name} accuracy<br>before → after <small>[95 %]</small>":
                f"{_percent(run, key, 0)} → {_percent(run, key, -1)}"
                for name, key in (("Greedy", "eval/greedy_accuracy"),
                                  ("Sampled", "eval/sampled_accuracy"))}
    color = colors.to_hex(run.color)
    return {
        "Run": f'<span class="dot" style="background:{color}"></span>{html.escape(run.label)}',
        "Config": html.escape(str(config["name"])) if "name" in config else "–",
        "Steps": f"{steps[-1]}" if steps else "–",
        **accuracy,
        "Held-out reward<br>before → after": _change(run, "eval/sampled_reward"),
        "Largest |Δp|": _number(run, difference + "max", np.nanmax),
        "Mean |Δp|": _number(run, difference + "mean", np.nanmean),
        "Final ESS": _number(run, "rollout_corr/rollout_is_eff_sample_size", lambda ess: ess[-1]),
        "Goodput": "–" if (share := plots.goodput(run)) is None else f"{100 * share:.0f} %",
        "Time": clock(sum(plots.phase_seconds(run).values())),
    }


def changed(run: Run) -> str:
    """Returns the config fields that changed when a run was resumed, as HTML; "" without any."""
    items = "".join(
        f"<li>after step {change['step']}: {html.escape(name)} "
        f"{html.escape(json.dumps(old))} → {html.escape(json.dumps(new))}</li>"
        for change in run.config.get("changes", [])
        for name, (old, new) in change["fields"].items()
    )
    return f"<p>{html.escape(run.label)} was resumed with changes:</p><ul>{items}</ul>" if items else ""


def failed_rewards(runs: Sequence[Run]) -> str:
    """Returns the section about failed rewards, as HTML; "" without any."""
    rows = "".join(
        f"<tr><td>{html.escape(run.label)}</td><td>{f.count}</td><td>{html.escape(f.error)}"
        f"<details><summary><small>{html.escape(f.kind)}</small></summary><pre>{html.escape(f.traceback)}"
        f"</pre></details></td><td>{html.escape(f.last[-1]['id'])}<br><small>{f.last_at}</small></td>"
        f"<td><pre>{html.escape(f.last[-1]['text'])}</pre></td></tr>"
        for run in runs for f in run.failures
    )
    head = "".join(f"<th>{name}</th>" for name in ("Run", "Count", "First error", "Last", "Its text"))
    table = f'<div class="card scroll"><table><tr>{head}</tr>{rows}</table></div>'
    return f"<h2>Failed rewards</h2>{table}" if rows else ""


CSS = """
:root { color-scheme: light;
        --sans: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
body { margin: 0; background: #f6f7f9; color: #1f2933; font: 15px/1.5 var(--sans); }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 25px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 34px 0 12px; }
.lead { color: #616e7c; margin: 0 0 20px; max-width: 75ch; }
.card { background: #fff; border: 1px solid #e4e7eb; border-radius: 8px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 9px 13px; border-bottom: 1px solid #e4e7eb;
         white-space: nowrap; vertical-align: top; }
th { color: #616e7c; font-weight: 600; } tr:last-child td { border-bottom: 0; }
td { font-variant-numeric: tabular-nums; } small { color: #7b8794; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 8px; }
.grid { display: grid; gap: 16px; align-items: start;
        grid-template-columns: repeat(auto-fill, minmax(min(480px, 100%), 1fr)); }
figure { margin: 0; padding: 12px 14px; } figure svg { width: 100%; height: auto; display: block; }
figure svg text { font-family: var(--sans) !important; }
figcaption { color: #616e7c; font-size: 13px; margin-top: 6px; }
details { margin: 10px 0; padding: 10px 14px; } summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font-size: 12.5px; }
"""


def page(runs: Sequence[Run]) -> str:
    """Returns the whole page."""
    rows = [summary_row(run) for run in runs]
    head = "".join(f"<th>{column}</th>" for column in rows[0])
    table = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row.values()) + "</tr>"
                    for row in rows)
    sections = "".join(
        f'<section><h2>{section}</h2><div class="grid">' + "".join(
            f'<figure class="card">{picture}<figcaption>{html.escape(note)}</figcaption></figure>'
            for picture, note in pictures) + "</div></section>"
        for section, pictures in plots.figures(runs).items())
    configs = "".join(
        f'<details class="card"><summary>{html.escape(run.label)}</summary><pre>'
        f"{html.escape(json.dumps(run.config, indent=2))}</pre></details>"
        for run in runs if run.config)
    written = "".join(answers.section(run.label, run.samples) for run in runs)
    title = html.escape(", ".join(run.label for run in runs))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{CSS}{answers.CSS}</style></head>
<body><main><h1>{title}</h1>
<p class="lead">Pale lines: every step. Strong lines: moving average over 1/25 of the run. |Δp|:
difference of the two probabilities that sampler and learner give to the same token at the same
weights.</p>
<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{table}</tbody></table></div>
{failed_rewards(runs)}
{sections or "<p>No metric to plot yet.</p>"}
<h2>Configuration</h2>{"".join(map(changed, runs))}{configs or "<p>No run has a config.json.</p>"}
<h2>Answers</h2>
<p class="lead">The colour of a token is |Δp|, full at {answers.FULL_COLOR}. Hold the pointer on a token
to see both probabilities. Evaluations have the learner's probability alone.</p>
{written or "<p>No run has a samples.jsonl.</p>"}
</main></body></html>
"""


def write(workdirs: Sequence[str | os.PathLike], out: str | os.PathLike) -> epath.Path:
    """Writes the page of one or several runs and returns its path; see `load` for the errors."""
    path = storage.folder(out)
    path.write_bytes(page(load(workdirs)).encode())
    return path
