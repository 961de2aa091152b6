"""The table against loops over single tokens, and what it says where columns are missing."""

import math

import jax
import numpy as np
import pytest

from jaxrl_tis.audit import dump, gap, measure, packing, whatif
from jaxrl_tis.estimators import methods, presets
from tests.audit import dumps

RULES = (
    ("weight", "none"), ("weight", "token_tis"), ("weight", "token_clip"), ("weight", "seq_tis"),
    ("weight", "geo_mis"), ("weight", "token_icepop"), ("weight", "turn_tis"),
    ("mask", "token_k1"), ("mask", "seq_mean_k3"), ("mask", "seq_sum_k1"), ("mask", "staleness"),
    ("mask", "opsm"), ("mask", "token_kpop"), ("mask", "seq_logprob_error"), ("mask", "veto"),
    ("preset", "decoupled_k3_rs_token_tis"), ("preset", "bypass_ppo_clip"),
    ("preset", "bypass_pg_token_icepop"), ("preset", "async"), ("preset", "ipo"), ("preset", "kpop"),
)


# Plain loops: a sequence is a list of (behav, old, now) of its valid tokens


def ratio(tokens, learner):
    return [math.exp(token[learner] - token[0]) for token in tokens]


def both_ways(token, learner):
    """The larger binary KL of the two probabilities of a token."""
    q, p = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (token[0], token[learner]))
    kl = lambda a, b: a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))
    return max(kl(p, q), kl(q, p))


def weights_of(kind, name, tokens, line, sign):
    """The weight of each valid token of a sequence, by the definitions in docs/methods.md."""
    rho, now = ratio(tokens, 1), ratio(tokens, 2)
    product, one = math.prod(rho), [1.0] * len(rho)
    keep = lambda is_good: one if is_good else [0.0] * len(rho)
    k3 = [r - 1 - math.log(r) for r in rho]
    inside = lambda r, low, high: r if low <= r <= high else 0.0
    if kind == "weight":
        turns = [t for t, m in zip(line["turn"], line["mask"], strict=True) if m]
        of_turn = {t: math.prod(r for r, u in zip(rho, turns, strict=True) if u == t) for t in set(turns)}
        return {
            "none": one, "token_tis": [min(r, 2) for r in rho],
            "token_clip": [min(max(r, 0.5), 2) for r in rho], "seq_tis": [min(product, 2)] * len(rho),
            "geo_mis": [inside(product ** (1 / len(rho)), 0.9999, 1.0001)] * len(rho),
            "token_icepop": [inside(r, 0.5, 5) for r in rho],
            "turn_tis": [min(of_turn[t], 2) for t in turns],
        }[name]
    if kind == "mask":
        gap = np.mean([token[0] - token[2] for token in tokens])
        return {
            "token_k1": [float(0.5 <= 1 / r <= 2) for r in rho],
            "seq_mean_k3": keep(np.mean(k3) <= 0.01), "seq_sum_k1": keep(0.5 <= 1 / product <= 2),
            "token_kpop": [float(both_ways(token, 1) <= 0.1) for token in tokens],
            "seq_logprob_error": keep(np.mean([max(r, 1 / r) for r in rho]) <= 2),
            "veto": keep(all(1e-4 <= r <= 100 for r in rho)),
            "staleness": keep(9 - line["version"] <= 4), "opsm": keep(sign >= 0 or gap <= 0.1),
        }[name]
    # PPO's gradient is r, and 0 where it clips. Decoupled, r is that of the learner since it sampled.
    since = [math.exp(token[2] - token[1]) for token in tokens]
    clip = lambda r: 0.0 if (sign > 0 and r > 1.2) or (sign < 0 and (r < 0.8 or r > 3)) else r
    return {
        "decoupled_k3_rs_token_tis": [
            min(r, 2) * clip(s) * k for r, s, k in zip(rho, since, keep(np.mean(k3) <= 0.01), strict=True)],
        "bypass_ppo_clip": [clip(r) for r in now],
        "bypass_pg_token_icepop": [inside(r, 0.5, 5) for r in now],
        "async": [r if r <= 5 else 0.0 for r in now],
        "ipo": [r if abs(math.exp(t[2]) - math.exp(t[0])) <= 0.3 else 0.0
                for r, t in zip(now, tokens, strict=True)],
        "kpop": [r if both_ways(t, 2) <= 0.1 else 0.0 for r, t in zip(now, tokens, strict=True)],
    }[name]


def by_hand(kind, name, lines):
    sequences = [[(b, o, p) for b, o, p, m in zip(
        line["logp_behav"], line["logp_old"], line["logp"], line["mask"], strict=True) if m] for line in lines]
    rewards = np.array([line["reward"] for line in lines])
    adv = np.zeros(len(lines))
    for i in range(0, len(lines), 2):  # groups of two
        pair = rewards[i : i + 2]
        adv[i : i + 2] = (pair - pair.mean()) / (pair.std(ddof=1) + 1e-6)
    signs = np.where(adv < 0, -1, 1)
    w = [weights_of(kind, name, *x) for x in zip(sequences, lines, signs, strict=True)]
    learner = 2 if kind == "preset" else 1
    rho = [ratio(tokens, learner) for tokens in sequences]
    flat, all_rho = np.concatenate(w), np.concatenate(rho)
    k3 = all_rho - 1 - np.log(all_rho)
    each = np.concatenate([[a] * len(x) for a, x in zip(adv, w, strict=True)])
    mean, of_sequences = flat.mean(), np.array([np.mean(x) for x in w])
    missed = [np.mean([max(0, y / of_sequences.mean() - math.prod(r)) for y in x])
              for x, r in zip(w, rho, strict=True)] if mean else [1.0]
    return {
        "tokens_kept": np.mean(flat != 0), "sequences_kept": np.mean([any(x) for x in w]),
        "kept_k3": np.mean(k3[flat != 0]) if mean else 0.0,
        "ess": mean**2 / np.mean(flat**2) if mean else 0.0, "mean": mean, "largest": flat.max(),
        "bias_token": np.mean(np.maximum(flat / mean - all_rho, 0)) if mean else 1.0,
        "bias_seq": np.mean(missed),
        "variance": np.mean((flat * each / mean) ** 2) / np.mean(each**2) if mean else 0.0,
        "reward": of_sequences @ rewards / of_sequences.sum() if mean else 0.0,
    }


def batch_of(tmp_path, lines):
    return measure.make_batch(dump.read(dumps.write(tmp_path / "d.jsonl", lines)), None)


def table_of(batch, names=RULES):
    chosen = [r for r in whatif.rules(frozenset(batch)) if (r.kind, r.name) in names]
    return {(row["kind"], row["name"]): row for row in whatif.table(chosen, batch)}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """(lines, {layout: table}) of one dump, a row for each sequence and rows that are shared."""
    folder, lines, found = tmp_path_factory.mktemp("dump"), dumps.records(seed=1), {}
    # Two gaps that cancel in a sum over the sequence, and one that is beyond the veto's bounds.
    for line, token, size in ((4, 0, 1.6), (4, 2, -1.5), (5, 0, 5.0)):
        lines[line]["logp_behav"][token] = lines[line]["logp_old"][token] - size
    for layout, most in (("alone", 10), ("shared", 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packing, "MOST_PADDED", most)
            found[layout] = table_of(batch_of(folder, lines))
    return lines, found


@pytest.mark.cases("preset-decoupled_k3_rs_token_tis-alone", "weight-none-alone", "weight-token_tis-alone")
@pytest.mark.parametrize("layout", ["alone", "shared"])
@pytest.mark.parametrize("kind, name", RULES)
def test_numbers_are_those_of_plain_loops(tables, layout, kind, name):
    lines, found = tables
    row, wanted = found[layout][kind, name], by_hand(kind, name, lines)
    assert row["reason"] is None
    np.testing.assert_allclose(
        [row[k] for k in wanted], list(wanted.values()), rtol=2e-5, atol=1e-6, err_msg=str(wanted))


def test_the_rules_differ_on_this_dump(tables):
    """So that a table of one rule under the name of another would be seen."""
    lines, _ = tables
    seen = {tuple(np.round(list(by_hand(*rule, lines).values()), 6)) for rule in RULES}
    assert len(seen) == len(RULES)


def test_truncated_is_what_a_bound_changed(tables):
    lines, found = tables
    tokens = [(b, o) for line in lines for b, o, m in zip(
        line["logp_behav"], line["logp_old"], line["mask"], strict=True) if m]
    rho = np.exp([o - b for b, o in tokens])
    row = lambda *rule: found["alone"][rule]["truncated"]
    assert row("weight", "token_tis") == pytest.approx(np.mean(rho > 2))
    assert row("weight", "token_clip") == pytest.approx(np.mean((rho > 2) | (rho < 0.5)))
    assert row("weight", "none") == row("weight", "token_icepop") == 0
    assert row("preset", "decoupled_k3_rs_token_tis") == row("weight", "token_tis") > 0


@pytest.mark.all
def test_without_weights_the_bias_is_the_total_variation(tmp_path):
    batch = batch_of(tmp_path, dumps.only(dumps.records(), "logp_behav", "logp_old", "mask"))
    row = table_of(batch, [("weight", "none")])["weight", "none"]
    metrics = jax.jit(gap.metrics)(batch)
    assert row["bias_token"] == pytest.approx(float(metrics["mismatch/tv_token"]), rel=1e-5)
    assert row["bias_seq"] == pytest.approx(float(metrics["mismatch/tv_seq"]), rel=1e-5)
    assert row["bias_token"] > 0.01


LEAST = {"mask", "logp_behav", "logp_old", "key"}  # of every dump


def reasons(fields):
    return {(r.kind, r.name): r.reason for r in whatif.rules(frozenset(fields))}


def test_every_weight_mask_and_preset_has_a_row():
    tables = [(kind, name) for kind in ("weight", "mask") for name in methods.TABLES[kind]]
    assert list(reasons(LEAST)) == tables + [("preset", name) for name in presets.PRESETS]


def test_what_is_missing_is_the_reason():
    found = reasons(LEAST)
    assert found["weight", "token_tis"] is found["preset", "bypass_ppo_clip"] is None
    assert found["weight", "turn_tis"] == "needs turn"
    assert found["mask", "opsm"] == "needs logp (the current learner); needs reward and group"
    assert found["mask", "staleness"] == "needs version"
    assert found["preset", "async"] == "needs logp (the current learner)"
    assert found["preset", "centered"] == "needs top (the sampler's likeliest tokens)"
    more = {"logp", "logp_prox", "turn", "version", "current_version", "top", "adv"}
    left = {name for name, reason in reasons(LEAST | more).items() if reason}
    assert left == {("mask", "trm"), ("mask", "top_entropy")}
    assert found["mask", "top_entropy"] == "needs the entropy of every token"
    assert reasons(LEAST | {"entropy"})["mask", "top_entropy"] is None


def test_without_logp_what_judges_the_learner_now_judges_the_one_that_sampled():
    parts = lambda fields: {r.name: r.parts for r in whatif.rules(frozenset(fields))}
    known, unknown = parts(LEAST | {"logp"}), parts(LEAST)
    assert known["m2po"][0].seen == "policy" and unknown["m2po"][0].seen == "engine"
    assert known["veto"][0].seen == "engine"
    of = lambda rule: [part.seen for part in rule]
    assert of(known["bypass_pg_geo_rs_seq_tis"]) == ["policy", "behav", "policy"]
    assert of(unknown["bypass_pg_is"]) == ["engine", "behav"]
    assert of(known["decoupled_geo_rs"]) == ["engine", "old", "engine"]
    assert of(known["factored"]) == ["engine", "staleness", "prox"]
    assert of(known["async"]) == ["folded", "prox"]
    reasons = {r.name: r.reason for r in whatif.rules(frozenset(LEAST))}
    assert reasons["factored"] == reasons["async"] == "needs logp (the current learner)"
