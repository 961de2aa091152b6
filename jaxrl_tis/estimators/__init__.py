"""Off-policy estimators: pure functions on arrays that know no model, engine or config.

Five tables: `weights` of a log-ratio, rejection `masks`, `objectives`, `advantages` and `kl`;
`methods` reads how a config spells an entry, `presets` names what goes together, `loss` assembles
it, and `reduce` is the one place where [B, T] becomes a scalar. `controllers` adapt a run to what
was measured (`jaxrl_tis.diagnostics`), `counts` reports what a correction did, `entries` makes entries
that share one function, and `ratios` holds what all of them share.
"""

from jaxrl_tis import _importer

__getattr__ = _importer(__name__)
