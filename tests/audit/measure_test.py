"""The command from a file to its table, JSON and page; the numbers of rules are in whatif_test."""

import contextlib
import io
import json
import pathlib
import re

import numpy as np
import pytest

from jaxrl_tis.audit import dump, measure, page, table, verdict
from jaxrl_tis.audit.__main__ import main
from jaxrl_tis.doctor.case import KL
from jaxrl_tis.runtime import cli
from tests.audit import dumps

ROOT = pathlib.Path(__file__).parents[2]
LONG = tuple(range(3, 19))


@pytest.fixture(scope="module")
def lines():
    """Sixteen sequences with all columns; the sampler's gap is large."""
    found = dumps.records(seed=2, lengths=LONG)
    for i, line in enumerate(found):
        pairs = np.log([[0.5, 0.45], [0.3, 0.25 + 0.01 * (i % 2)]])
        line["top"] = [pairs.tolist()] * len(line["mask"])
        line["entropy"] = [None if t == 1 else 0.4 + 0.2 * t for t in range(len(line["mask"]))]
    return found


@pytest.fixture(scope="module")
def report(lines, tmp_path_factory):
    path = dumps.write(tmp_path_factory.mktemp("dump") / "d.jsonl", lines)
    found = measure.measure(dump.read(path), current_version=10)
    return found | {"doctor": verdict.verdict(found)}


def tokens(lines, *columns):
    """[N] each, of valid tokens."""
    mask = np.concatenate([line["mask"] for line in lines]) != 0
    return [np.concatenate([line[c] for line in lines])[mask] for c in columns]


@pytest.mark.all
def test_the_head_counts(report, lines):
    valid = sum(sum(line["mask"]) for line in lines)
    assert report["sequences"] == len(lines) and report["tokens"] == valid
    assert report["masked_tokens"] == sum(LONG) - valid > 0
    assert report["without_tokens"] == 0 and report["current_version"] == 10


def test_metrics_are_those_of_the_tokens(report, lines):
    behav, old, now = tokens(lines, "logp_behav", "logp_old", "logp")
    found, x, l = report["metrics"], old - behav, now - behav
    close = lambda name, value: np.testing.assert_allclose(found[name], value, rtol=1e-4, err_msg=name)
    close("rollout_corr/kl", -x.mean())
    close("mismatch/log_ratio_abs_mean", np.abs(x).mean())
    close("training/rollout_probs_diff_max", np.abs(np.exp(old) - np.exp(behav)).max())
    close("mismatch/dp_high", (np.abs(np.exp(old) - np.exp(behav)) > 0.5).mean())
    close("mismatch/tv_token", np.maximum(1 - np.exp(x), 0).mean())
    close("mismatch/engine/share", np.mean(x * l) / np.mean(l * l))
    close("mismatch/staleness/log_ratio_abs_mean", np.abs(now - old).mean())
    close("reward/mean", np.mean([line["reward"] for line in lines]))
    close("training/off_policy/trajectory_staleness_worst/max", 6)  # of version 4 at 10
    close("centering/sampler_mass", 0.8)
    close("centering/learner_mass", np.average(
        [0.7 + 0.01 * (i % 2) for i in range(len(lines))], weights=[sum(r["mask"]) for r in lines]))
    assert not [name for name in found if "trust_region" in name]
    assert report["percentiles"]["p95"] == pytest.approx(np.percentile(np.abs(x), 95), rel=1e-5)


def test_profiles_are_of_the_tokens_that_they_name(report, lines):
    behav, old, version, position = tokens(lines, "logp_behav", "logp_old", "turn", "position")
    gap = np.abs(old - behav)
    of_length = np.concatenate([[sum(r["mask"])] * sum(r["mask"]) for r in lines])
    lag = np.concatenate([[10 - r["version"]] * sum(r["mask"]) for r in lines])
    found = report["profiles"]
    for name, is_in in {
        "length_8": (of_length >= 8) & (of_length < 16), "lag_6": lag == 6, "lag_1": lag == 1,
        "turn_0": version == 0, "context_8": (position >= 8) & (position < 16),
    }.items():
        assert found[name]["token_fraction"] == pytest.approx(is_in.mean(), rel=1e-5), name
        assert found[name]["log_ratio_abs_mean"] == pytest.approx(gap[is_in].mean(), rel=1e-4), name
    # Token 0 has 0.4 nats, token 1 none that is known, tokens 8 and later 2.0 or more.
    [entropy] = tokens(lines, "entropy")
    entropy = np.array([np.nan if x is None else x for x in entropy])
    known, wide = ~np.isnan(entropy), entropy > 1.9
    assert 0 < wide.sum() < known.sum() < len(gap) and "entropy_0" not in found
    assert found["entropy_2"]["log_ratio_abs_mean"] == pytest.approx(gap[wide].mean(), rel=1e-4)
    assert found["entropy_2"]["token_fraction"] == pytest.approx(wide.sum() / known.sum(), rel=1e-5)
    assert found["entropy_0.1"]["token_fraction"] == pytest.approx(len(lines) / known.sum(), rel=1e-5)
    assert found["position_0"]["token_fraction"] == pytest.approx(len(lines) / len(gap), rel=1e-5)
    assert "lag_0" not in found and {"after_tool_none", "after_tool_1"} <= found.keys()


def test_every_rule_that_a_column_can_give_has_numbers(report):
    assert [row["name"] for row in report["rules"] if row["reason"]] == ["trm", "top_entropy"]
    for row in report["rules"]:
        assert row["reason"] or 0 <= row["bias_seq"] <= 1 and "reward" in row, row


def test_the_histograms_count_every_token_once(report, lines):
    behav, old = tokens(lines, "logp_behav", "logp_old")
    histogram = report["histogram"]
    inside = np.histogram(old - behav, bins=histogram["edges"])[0]
    assert histogram["log_ratio"] == inside.tolist()
    assert len(old) - 2 <= sum(histogram["log_ratio"]) <= len(old)
    assert np.sum(histogram["probabilities"]) == len(old)


def judged(lines, tmp_path):
    found = measure.measure(dump.read(dumps.write(tmp_path / "d.jsonl", lines)))
    return verdict.verdict(found)


@pytest.mark.all
def test_the_doctor_judges_by_these_metrics(report, tmp_path):
    """A gap this large is beyond weights, a fifth of it at the same weights is the engine's; without
    any gap all is well."""
    found = report["doctor"]
    assert report["metrics"][KL] > 0.05 or report["metrics"]["rollout_corr/chi2_token"] > 0.3
    assert found["verdict"] and "healthy" not in found["verdict"]
    assert all(set(f) == {"name", "title", "parent", "advice", "mistake", "evidence"}
               for f in found["findings"])
    bare = dumps.only(dumps.records(lengths=(5, 5)), "logp_behav", "logp_old")
    shifted = [{"logp_behav": line["logp_old"], "logp_old": [x - 0.2 for x in line["logp_old"]]}
               for line in bare]
    assert "A" in judged(shifted, tmp_path)["verdict"]
    same = [line | {"logp_behav": line["logp_old"]} for line in bare]
    assert judged(same, tmp_path)["verdict"] == ["healthy"]


@pytest.mark.all
@pytest.mark.parametrize("share, expected", [(0.02, "mass"), (0.002, "healthy")])
def test_a_filter_in_the_ratio_is_named(share, expected, tmp_path):
    """The sampler's log-probs are those of a distribution without this share of the learner's mass."""
    rng, lines = np.random.default_rng(0), []
    for _ in range(64):
        old = -rng.exponential(1.0, 100) - 0.1
        lines.append({"logp_behav": (old - np.log1p(-share)).tolist(), "logp_old": old.tolist()})
    found = judged(lines, tmp_path)
    assert found["verdict"] == [expected]
    if expected == "mass":
        [evidence] = next(f["evidence"] for f in found["findings"] if f["name"] == "mass")
        assert evidence["value"] == pytest.approx(0.02, abs=1e-5)


def test_no_mean_ratio_is_judged_by_a_few_sequences(tmp_path):
    """Ratios within a sequence fall together: of four sequences 0.9, 0.9, 0.9 and 1.1."""
    line = lambda ratio: {"logp_old": [-1.0] * 100, "logp_behav": [-1.0 - float(np.log(ratio))] * 100}
    found = judged([line(ratio) for ratio in (0.9, 0.9, 0.9, 1.1)], tmp_path)
    assert "mass" not in found["verdict"]


def test_a_gap_too_wide_for_a_filter_is_not_named_one(tmp_path):
    """Log-probs of other tokens: 3 nats lower for each token, where a filter would keep 5 % of the mass."""
    old = -np.random.default_rng(0).exponential(1.0, (64, 100)) - 0.1
    lines = lambda gap: [{"logp_behav": x.tolist(), "logp_old": (x - gap).tolist()} for x in old]
    assert "mass" not in judged(lines(3.0), tmp_path)["verdict"]
    assert "mass" in judged(lines(0.9), tmp_path)["verdict"]


@pytest.mark.all
def test_sequences_without_a_token_make_no_mean_more_certain(tmp_path):
    line = lambda ratio, on: {
        "logp_old": [-1.0] * 10, "logp_behav": [-1.0 - float(np.log(ratio))] * 10, "mask": [on] * 10
    }
    lines = [*(line(ratio, 1) for ratio in (0.9, 0.9, 0.9, 1.1)), *[line(1.0, 0)] * 100]
    assert "mass" not in judged(lines, tmp_path)["verdict"]


@pytest.mark.all
def test_equal_constants_are_no_gap(tmp_path):
    lines = [{"logp_old": [-1.0] * 20, "logp_behav": [-1.0] * 20}] * 8
    assert judged(lines, tmp_path)["verdict"] == ["healthy"]


@pytest.mark.all
def test_log_probs_that_rounding_put_above_zero_are_in_the_picture(tmp_path):
    line = {"logp_old": [-1.0] * 12, "logp_behav": [-1.0] * 11 + [5e-5]}
    report = measure.measure(dump.read(dumps.write(tmp_path / "d.jsonl", [line])))
    assert np.sum(report["histogram"]["probabilities"]) == 12


@pytest.mark.parametrize("flags, message", [
    (dict(current_version=3), "--current_version needs the column version"),
    (dict(num_experts=8), "--num_experts needs the column routes_behav"),
])
def test_flags_without_their_column_are_refused(flags, message, tmp_path):
    path = dumps.write(tmp_path / "d.jsonl", [{"logp_old": [-1.0], "logp_behav": [-1.0]}])
    with pytest.raises(ValueError, match=message):
        measure.measure(dump.read(path), **flags)


OUTLIER = [-1.0] * 199 + [-14.0]  # and the learner -1: a ratio of 442,413


@pytest.mark.parametrize("behav, old, reason", [
    ([-1.0], [-1.7], "1 valid tokens; a verdict needs 10"),
    ([-1.0] * 9, [-1.7] * 9, "9 valid tokens"),
    # Worth (199 + 442413)^2 / (199 + 442413^2) = 1.0009 tokens.
    (OUTLIER, [-1.0] * 200, "the 200 valid tokens have an effective size of 1; a verdict needs 2"),
])
def test_a_token_makes_no_verdict(behav, old, reason, tmp_path):
    found = measure.measure(dump.read(dumps.write(tmp_path / "d.jsonl", cut(behav, old))))
    found["doctor"] = verdict.verdict(found)
    assert found["doctor"]["verdict"] == ["too little to judge"] and found["doctor"]["findings"] == []
    assert reason in " ".join(table.text(found).split())


def cut(behav, old):
    """Sequences of five tokens and of what is left: 9 and 10 tokens share their programs."""
    return [{"logp_behav": behav[i : i + 5], "logp_old": old[i : i + 5]}
            for i in range(0, len(behav), 5)]


def test_a_few_tokens_that_weigh_alike_have_a_verdict(tmp_path):
    behav = [-1.0 - t / 10 for t in range(10)]
    lines = cut(behav, [x - 0.7 for x in behav])
    assert "A" in judged(lines, tmp_path)["verdict"]


def test_the_table_says_all_of_it(report):
    text = table.text(report)
    assert text.startswith(f"{report['dump']}: 16 sequences, ")
    for row in report["rules"]:
        assert f"\n{row['rule']} " in text, row["rule"]
    assert "trm(trm_delta=0.05)                       needs the logits of both sides" in text
    assert "of the squared log ratio" in text and "logp is missing" not in text
    for words in ("By position", "By length", "By lag", "By turn", "By context"):
        assert f"Where is it? {words}" in text
    assert all(len(line) <= 130 for line in text.splitlines()[1:])  # the first has the path
    share = report["metrics"]["mismatch/staleness/share"]
    assert f"staleness  {share:.1%}".replace("  ", " ") in " ".join(text.split())


def test_a_row_that_keeps_nothing_has_no_numbers():
    values = dict.fromkeys((name for name, *_ in table.COLUMNS), 0.0)
    row = {"kind": "mask", "name": "veto", "rule": "veto", "reason": None, **values}
    assert table._row(row, table.COLUMNS).split()[1:] == ["0.0%", "0.0%"] + ["-"] * 9


def test_the_page_has_the_table_and_its_pictures(report):
    found = page.page(report)
    assert found.count("<svg") == found.count("</svg>") == 4 + 7  # profiles of seven kinds
    assert "Bias against noise" in found and "What would each correction do" in found
    assert "http" not in found.replace("http://www.w3.org", "").replace("https://", "http")[:200]


def test_json_has_no_nan(report):
    broken = report | {"metrics": {"a": float("nan"), "b": float("inf"), "c": 1.0}}
    assert json.loads(measure.to_json(broken))["metrics"] == {"a": None, "b": None, "c": 1.0}


@pytest.fixture(scope="module")
def of_trl(tmp_path_factory):
    """What the command prints of a dump of TRL, and the files that it writes."""
    folder, told = tmp_path_factory.mktemp("trl"), io.StringIO()
    out = {kind: folder / f"out.{kind}" for kind in ("json", "html")}
    flags = [f"--{kind}={path}" for kind, path in out.items()]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(told):
        patch.chdir(ROOT)
        main([str(dumps.TRL.relative_to(ROOT)), *flags])
    return told.getvalue(), out


@pytest.mark.all
def test_the_page_of_the_docs_has_what_is_printed(of_trl):
    """The page leaves lines out where it has "...". Digits are not compared: roundings differ from one
    machine to the next."""
    page = (ROOT / "docs" / "audit.md").read_text().split("## The report")[1]
    shown = [line for line in page.split("```\n")[1].splitlines() if line != "..."]
    words = lambda line: re.sub(r"[-+0-9.e%,]+", "#", line).split()
    printed = iter([words(line) for line in of_trl[0].splitlines()])
    assert all(words(line) in printed for line in shown)  # each after the one before


@pytest.mark.all
def test_the_command_on_a_dump_of_trl(of_trl):
    told, out = of_trl
    found = json.loads(out["json"].read_text())
    assert "64 sequences, 3,776 tokens (columns mask, logp_behav, logp_old, reward, group)" in told
    assert "Verdict: healthy" in told and "without logp (the current learner)" in told
    with np.load(dumps.TRL) as arrays:
        gap = (arrays["logp_old"] - arrays["logp_behav"])[arrays["mask"] != 0]
    assert found["metrics"]["mismatch/log_ratio_abs_mean"] == pytest.approx(np.abs(gap).mean(), rel=1e-4)
    assert 0.01 < np.abs(gap).mean() < 0.1  # bfloat16 against float32
    assert out["html"].read_text().startswith("<!DOCTYPE html>")


def ended(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.run(lambda: main(list(arguments)))
    return end.value.code, capsys.readouterr().err


def test_mistakes_of_the_user_end_with_their_message_and_2(tmp_path, capsys):
    lines = dumps.records()
    good = dumps.write(tmp_path / "good.jsonl", lines)
    lines[1]["logp_old"][0] = float("nan")
    bad = dumps.write(tmp_path / "bad.jsonl", lines)
    code, told = ended(capsys, bad)
    assert code == 2 and f"{bad}, line 2, logp_old: token 0 is nan" in told and "Traceback" not in told
    assert ended(capsys, good, "--current_version=8") == (
        2, f"{good}, column version: 9 is newer than --current_version=8\n")
    code, told = ended(capsys, good, f"--json={tmp_path}/none/x")
    assert code == 2 and "its folder does not exist" in told
