"""Off-policy estimators: pure functions on arrays that know no model, engine or config.

The methods are entries of five tables: importance `weights`, rejection `masks`, `objectives`,
`advantages` and `kl`. The other modules:

* `methods` parses the entries of a config, `presets` names combinations, `loss` assembles them;
* `reduce` is the only place where [B, T] becomes a scalar;
* `controllers` adapt a run to measurements (`jaxrl_tis.diagnostics`), `counts` counts the tokens that
  a correction changed;
* `entries` makes entries that share one function, `ratios` has the functions that all entries share.
"""

from jaxrl_tis import _importer

__getattr__ = _importer(__name__)
