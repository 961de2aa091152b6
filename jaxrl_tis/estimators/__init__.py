"""Off-policy estimators: pure functions on arrays that know no model, engine or config.

`weights` turns a log-ratio into importance weights, `objectives` holds the surrogate losses,
`advantages` the advantage estimators, `kl` the KL estimators, `reduce` the one place where [B, T]
becomes a scalar, `diagnostics` the metrics, `loss` the assembled policy loss. `ratios` holds what
they share.
"""
