"""Mutants of the figures: records of runs, statistics, verdicts; and of the sweep that trains them."""

from tests.mutants import of

MUTANTS = [
    *of(
        "experiments/records.py",
        ("a maximum is averaged", 'pick = max if name.endswith("max") else np.mean', "pick = np.mean"),
        ("a part of a block is a block", "last - BLOCK + 2, BLOCK", "last + 1, BLOCK"),
        ("a run that was stopped counts",
         'if not metrics.has_ended(records, config["steps"]):', "if not records:"),
        ("NaN is part of the end", "np.nanmean(values[-max(1", "np.mean(values[-max(1"),
    ),
    *of(
        "experiments/figures.py",
        ("the last evaluation alone is the end", "[1:][-LAST:].mean()", "[-1]"),
        ("the start is part of the end", "[1:][-LAST:].mean()", "[-LAST:].mean()"),
        ("arms are compared without their seeds",
         "for seed in values if seed in theirs]", "for seed in sorted(theirs) if seed in values][:1]"),
        ("a curve is of the first seed", "axes.plot(steps, found[:, 0]", "axes.plot(steps, values[0]"),
        ("a missing arm is no error", "if missing := sorted(", "if missing := () and sorted("),
    ),
    *of(
        "experiments/rescue.py",
        ("an arm that collapses can rescue", "is_collapse and gain[2] >= 0", "is_collapse"),
        ("the mean decides a collapse", '["collapses"] if gain[2] < 0', '["collapses"] if gain[0] < 0'),
        ("int8 with a weight stands beside the injected gap", '{"int8-TIS-2": "int8", ', "{"),
        ("k1 in bypass mode is drawn", "if not (name == K1 and arm in BYPASS):", "if True:"),
    ),
    *of(
        "experiments/threshold.py",
        ("a half point is extrapolated", "if log_scale.min() <= crossing <= log_scale.max():", "if True:"),
        ("a majority that fails has no threshold", "-np.inf if failed.mean() > 0.5 else np.inf", "np.inf"),
        ("all failures are a size above all", "if failed.all() or not failed.any():\n        return otherwise",
         "if failed.all() or not failed.any():\n        return np.inf"),
    ),
    *of(
        "experiments/staleness.py",
        ("an arm improves by its mean", "for r in own[arm]])[1] > 0", "for r in own[arm]])[0] > -1"),
        ("one lag has a power", "if len(set(lags[is_stale])) > 1:", "if is_stale.any():"),
    ),
    *of(
        "experiments/causes.py",
        ("another cause beside it is no mistake", "return found(run) == [", "return found(run)[:1] == ["),
        ("seeds that were seen count", "[r for r in runs if r.seed not in SEEN]", "list(runs)"),
    ),
    *of(
        "experiments/predictor.py",
        ("ties are won", "ranks = stats.rankdata(score)", 'ranks = stats.rankdata(score, "max")'),
        ("a missing signal is 0",
         "np.where(np.isfinite(x), x - centre, 0.0)", "(np.where(np.isfinite(x), x, 0.0) - centre)"),
        ("a signal loses its sign", "np.arcsinh(value / SMALLEST)", "np.arcsinh(abs(value) / SMALLEST)"),
        ("a fall is one from the best of all", "KEPT * best[:-1]", "KEPT * values.max()"),
        ("none has begun to collapse", "<= EARLY * BLOCK", "< 0"),
        ("runs of two figures count twice", "(r.seed, r.series", "(r.arm, r.seed, r.series"),
    ),
    *of(
        "experiments/horizon.py",
        ("scores are centred under the policy", "(self.mu * weighted).sum", "(self.pi * weighted).sum"),
        ("the size of a centred sample is that of no weight",
         "ess=self.moments(unit, cap).ess", "ess=centred.ess"),
    ),
    *of(
        "doctor/case.py",
        ("the age of a batch counts as its reuse", "return reuse / (reuse + before)", "return 1.0"),
        ("a fresh batch has no reuse", "if not _is_stale(case):\n        return 1.0\n    reuse",
         "if not _is_stale(case):\n        return 0.0\n    reuse"),
        tests="doctor/trees_test.py",
    ),
    *of(
        "record/metrics.py",
        ("any evaluation is the last one",
         '(r["phase"], r["step"]) == ("eval", steps)', 'r["phase"] == "eval"'),
    ),
    *of(
        "experiments/turns.py",
        ("places begin at 0", "1 + attribution.response_positions(mask)",
         "attribution.response_positions(mask)"),
        ("the tokens of each entropy are those after the prompt",
         "(later[is_common] * mean)", "(others[is_common] * mean)"),
    ),
    *of(
        "sweep.py",
        ("every run has all cores", "set(cores[i::count]) if count", "set(cores) if count"),
    ),
]
