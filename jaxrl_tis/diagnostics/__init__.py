"""What is measured of a batch. Nothing here decides anything."""

from jaxrl_tis import _importer

__getattr__ = _importer(__name__)
