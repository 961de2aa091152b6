"""Measures a batch: metrics of the gap, of corrections, of rewards and lengths. Decides nothing."""

from jaxrl_tis import _importer

__getattr__ = _importer(__name__)
