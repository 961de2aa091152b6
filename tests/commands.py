"""Commands called in this process: two of them may not define the same absl flag."""

import contextlib
import importlib
from unittest import mock

import pytest
from absl import flags


def load(name: str):
    """The module jaxrl_tis.`name` without its flags."""
    before = set(flags.FLAGS)
    module = importlib.import_module(f"jaxrl_tis.{name}")
    flags.FLAGS.remove_flag_values(set(flags.FLAGS) - before)
    return module


@contextlib.contextmanager
def exits(module, **values):
    """Gives the flags of a command these values, and expects it to exit."""
    holders = {name: mock.Mock(value=value) for name, value in values.items()}
    with mock.patch.multiple(module, **holders), pytest.raises(SystemExit) as exited:
        yield exited
