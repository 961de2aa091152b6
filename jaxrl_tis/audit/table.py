"""Writes the report of a dump as text."""

import math
import textwrap
from collections.abc import Iterator
from typing import Any

WIDTH = 100
RULE_WIDTH = 40

# (metric, its label, how it is written, what it says)
GAPS = (
    ("mismatch/log_ratio_abs_mean", "mean |log ratio|", "{:z.4g} nats",
     "mean difference of a token's two log-probs"),
    ("p99", "99th percentile", "{:z.4g} nats", "one token in a hundred differs by more"),
    ("training/rollout_probs_diff_max", "largest |dp|", "{:z.3g}",
     "largest difference of a token's two probabilities"),
    ("mismatch/dp_high", "|dp| above 0.5", "{:z.3g}", "share of the tokens"),
    ("training/rollout_actor_probs_pearson_corr", "correlation", "{:z.5f}",
     "correlation of the two probabilities; below 0.99 find the cause"),
    ("rollout_corr/kl", "KL, k1", "{:z.3g} nats",
     "KL(sampler || learner) per token; negative only by chance"),
    ("rollout_corr/k3_kl", "KL, k3", "{:z.3g} nats", "the same KL, never negative and less noisy"),
    ("rollout_corr/chi2_token", "chi2 of tokens", "{:z.3g}", "variance of untruncated token weights"),
    ("rollout_corr/chi2_seq", "chi2 of sequences", "{:z.3g}", "variance of untruncated sequence weights"),
    ("mismatch/tv_token", "total variation, token", "{:z.3g}",
     "share of the learner's next-token mass that the sampler misses"),
    ("mismatch/tv_seq", "total variation, sequence", "{:z.3g}",
     "the same for whole sequences; near 1 the two hardly overlap"),
    ("mismatch/ess_seq", "ESS of sequences", "{:z.3g}",
     "effective sample size of exact sequence weights, 1 is all"),
    ("mismatch/ratio_mean_token", "mean ratio", "{:z.4f}",
     "1 if the recorded log-probs are those of the sampled distribution"),
    ("reward/mean", "reward", "{:z.4g}", "mean reward of the sampler"),
    ("reward/learner_snis", "reward of the learner", "{:z.4g}",
     "its estimated mean reward, by exact weights (SNIS)"),
    ("training/off_policy/trajectory_staleness_worst/mean", "staleness", "{:z.3g} versions",
     "mean age of a sequence's oldest token"),
    ("centering/sampler_mass", "sampler's mass in top", "{:z.3g}",
     "mass of the top tokens; the rest is modelled"),
    ("centering/learner_mass", "learner's mass in top", "{:z.3g}",
     "mass of the top tokens; the rest is modelled"),
)
CAUSES = (
    ("engine", "same weights; other program, precision or filter"),
    ("staleness", "the weights changed after the tokens were sampled"),
)
FLIPS = "mismatch/route_flip_"
FLIP_ROWS = (
    ("token", "tokens that flip", "share of the tokens with another set of experts in some layer"),
    ("router", "routers that flip", "share of the tokens' routers with another set"),
    ("expert", "experts of one side", "share of the chosen experts that the other side did not choose"),
)
PROFILES = {
    "position": "tokens from this position of the response on",
    "context": "tokens from this position of the context on",
    "length": "responses from this length on",
    "entropy": "tokens with an entropy from this value on, nats",
    "turn": "turn of the conversation",
    "after_tool": "tokens at this distance from a tool's text",
    "lag": "age of the weights that sampled the token, versions",
}
COLUMNS = (
    ("tokens_kept", "tokens", 7, "share of the tokens with a weight other than 0"),
    ("sequences_kept", "seqs", 7, "share of the sequences with such a token"),
    ("kept_k3", "KL kept", 9, "KL (k3) per token of the tokens with a weight other than 0, nats"),
    ("truncated", "bound", 7, "share of the tokens whose weight a cap or floor changed, but not to 0"),
    ("ess", "ESS", 7, "effective sample size of the weighted tokens, 1 is all of them"),
    ("mean", "mean w", 8, "mean weight, 0 for dropped tokens; it scales the step"),
    ("largest", "max w", 8, "largest weight: the influence of one token"),
    ("bias_token", "bias t", 7, "share of the learner's next-token mass that the weighted tokens miss"),
    ("bias_seq", "bias s", 7, "the same for whole sequences; it bounds the bias of a reward within [0, 1]"),
    ("variance", "noise", 8, "variance of the step, relative to no weights"),
    ("reward", "reward", 8, "mean reward under these weights, self-normalised"),
)
KINDS = {
    "weight": "Weights (the factor of a token's gradient)",
    "mask": "Masks (which tokens are kept)",
    "preset": "Presets (weight, masks and objective together, at the next update)",
}


def text(report: dict[str, Any]) -> str:
    """Returns the report of `measure` as text, with the `doctor` of `verdict`."""
    parts = _head, _gap, _verdict, _causes, _routes, _profiles, _what_if
    return "\n".join(line for part in parts for line in part(report))


def _wrapped(line: str, indent: int = 2) -> list[str]:
    return textwrap.wrap(line, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2))


def _head(report) -> Iterator[str]:
    yield (f"{report['dump']}: {report['sequences']:,} sequences, {report['tokens']:,} tokens"
           f" (columns {', '.join(report['columns'])})")
    if report["masked_tokens"]:
        yield f"  {report['masked_tokens']:,} more tokens are masked and not counted"
    if report["without_tokens"]:
        yield f"  {report['without_tokens']:,} sequences have masked tokens only"
    yield ""


def _gap(report) -> Iterator[str]:
    yield "How far is the learner (logp_old) from the sampler (logp_behav)?"
    values = report["metrics"] | report["percentiles"]
    for name, label, form, meaning in GAPS:
        if name in values:
            yield f"  {label:<26}{form.format(values[name]):>14}  {meaning}"
    yield ""


def _verdict(report) -> Iterator[str]:
    doctor = report["doctor"]
    yield f"Verdict: {', '.join(doctor['verdict'])}"
    for entry in doctor["undecided"]:
        if entry["name"] in doctor["verdict"]:
            yield from _wrapped(entry["reason"])
    for finding in doctor["findings"]:
        seen = [f"{e['metric']} {e['value']:z.3g} {e['op']} {e['threshold']:g}"
                for e in finding["evidence"] if e["op"] != "=="]
        because = f" ({'; '.join(seen)})" if seen else ""
        yield from _wrapped(f"{finding['name']}: {finding['title']}{because}. {finding['advice']}")
    yield ""


def _causes(report) -> Iterator[str]:
    yield "Which part of the gap is engine, and which is staleness?"
    values = report["metrics"]
    if "mismatch/engine/share" not in values:
        yield "  Unknown: without logp (the current learner) the whole gap counts as the engine's."
    else:
        for factor, meaning in CAUSES:
            share = values[f"mismatch/{factor}/share"]
            mean = values[f"mismatch/{factor}/log_ratio_abs_mean"]
            yield f"  {factor:<12}{share:>z7.1%} of the squared log ratio, {mean:z.4g} nats: {meaning}"
    yield ""


def _routes(report) -> Iterator[str]:
    found, values = report["routes"], report["metrics"]
    if not found:
        return
    yield "Do sampler and learner send tokens to the same experts?"
    for side in found["sides"]:
        layers, constant = side["layers"], side["constant_layers"]
        yield (f"  {side['name']:<9}{side['routes']:,} of {side['expected_rows']:,} rows in {side['sequences']:,} "
               f"sequences; {layers} layers, {side['num_chosen']} of {found['num_experts']} experts")
        if constant:
            yield from _wrapped(f"layers with one route in every row, not compared: "
                                f"{', '.join(map(str, constant))}", 11)
    if found["shifts"]:
        for name, label, meaning in FLIP_ROWS:
            yield f"  {label:<26}{values[FLIPS + name]:>z14.2%}  {meaning}"
        for part in ("flipped", "unflipped"):
            gap, k3, dropped = (values[f"{FLIPS}{part}/{name}"] for name in (
                "log_ratio_abs_mean", "k3_kl", "icepop_dropped"))
            yield (f"  {'gap, ' + part:<26}{gap:>9.4g} nats  mean |log ratio| of such tokens; KL k3 {k3:z.3g} nats, "
                   f"IcePop drops {dropped:.2%}")
        for kind in ("layer", "position"):
            rates = flips_by(report, kind)
            cells = "  ".join(f"{label}: {rate:.2%}" for label, rate in rates.items())
            yield from _wrapped(f"flips by {kind}  {cells}")
        cells = "  ".join(f"{d}: {share:.1%}" for d, share in sorted(found["shifts"].items()))
        yield from _wrapped(f"same experts by shift of the sampler's rows  {cells}")
    else:
        yield "  Nothing is compared: flips need routes_behav and routes_old with the same routers."
    count = len(found["faults"])
    yield f"  faults of the records: {f'{count}, see the verdict' if count else 'none'}"
    yield ""


def flips_by(report: dict[str, Any], kind: str) -> dict[str, float]:
    """Returns label -> flip rate by "layer" or "position" of the buckets with tokens."""
    start = f"{FLIPS}{kind}_"
    rates = {name.removeprefix(start): x for name, x in report["metrics"].items()
             if name.startswith(start)}
    has_tokens = lambda label: kind != "position" or f"position_{label}" in report["profiles"]
    labels = [label for label in rates if label.isdecimal() and has_tokens(label)]
    return {label: rates[label] for label in sorted(labels, key=int)}


def _profiles(report) -> Iterator[str]:
    for kind, meaning in PROFILES.items():
        rows = {name.removeprefix(f"{kind}_"): x for name, x in report["profiles"].items()
                if name.rpartition("_")[0] == kind}
        if len(rows) > 1:
            yield f"Where is it? By {kind}: {meaning}"
            yield f"  {'':>10}{'tokens':>10}{'|log ratio|':>13}{'log ratio':>12}{'max |dp|':>10}"
            for label, x in rows.items():
                yield (f"  {label:>10}{x['token_fraction']:>10.1%}{x['log_ratio_abs_mean']:>13.4g}"
                       f"{x['log_ratio_mean']:>z12.2g}{x['dp_max']:>10.3g}")
            yield ""


def _what_if(report) -> Iterator[str]:
    columns = [c for c in COLUMNS if any(c[0] in row for row in report["rules"])]
    yield "What would each correction do to this batch?"
    for _, title, _, meaning in columns:
        yield f"  {title:<8}{meaning}"
    yield "  A correction trades bias for noise. Among corrections with a small enough bias, take the"
    yield "  least noisy one. Token weights reduce bias t, sequence weights bias s."
    if "logp" not in report["columns"]:
        yield "  logp is missing: rules that need the current learner use logp_old, as at the first update."
    for kind, heading in KINDS.items():
        yield ""
        yield heading
        yield " " * RULE_WIDTH + "".join(f"{title:>{width}}" for _, title, width, _ in columns)
        for row in report["rules"]:
            if row["kind"] == kind:
                yield _row(row, columns)


def _row(row, columns):
    if row["reason"]:
        return f"{row['rule']:<{RULE_WIDTH}}  {row['reason']}"
    cell = lambda name: _number(name, row[name])
    if not row["tokens_kept"]:
        cell = lambda name: "0.0%" if name.endswith("_kept") else "-"
    return f"{row['rule']:<{RULE_WIDTH}}" + "".join(
        f"{cell(name):>{width}}" for name, _, width, _ in columns)


def _number(name, x):
    if math.isnan(x):  # the noise of a step without an advantage
        return "-"
    if name in ("tokens_kept", "sequences_kept", "truncated"):
        return f"{x:.1%}" if x < 0.9995 or x == 1 else "99.9%"
    if name == "kept_k3":
        return f"{x:z.2g}"
    return f"{x:z.3f}" if abs(x) < 1000 else f"{x:.1e}"
