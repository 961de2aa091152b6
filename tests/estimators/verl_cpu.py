"""Makes verl 0.9.1's estimators importable on a CPU, for make_golden_verl.py.

Packages that verl imports and its estimators never call (ray, transformers, ...) are replaced by
mocks; no file of verl is changed. VERL_ROOT is the folder of the unpacked wheel.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from unittest import mock

UNUSED = """
    ray transformers transfer_queue datasets peft accelerate hydra codetiming requests psutil pandas
    tqdm msgspec zmq aiohttp fastapi uvicorn pydantic PIL filelock safetensors huggingface_hub
    orjson
""".split()


class MockedModule(types.ModuleType):
    """A module in which every name is a class: to inherit from, to call, to decorate with."""

    __path__ = []
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (mock.MagicMock,), {})


class MockedPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of packages in UNUSED that are not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in UNUSED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return MockedModule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(MockedPackages())
sys.path.insert(0, os.environ["VERL_ROOT"])
os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"
os.environ["VERL_FORCE_DEVICE"] = "cpu"

correction = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
algos = importlib.import_module("verl.trainer.ppo.core_algos")
algorithm = importlib.import_module("verl.trainer.config.algorithm")
actor = importlib.import_module("verl.workers.config.actor")
functional = importlib.import_module("verl.utils.torch_functional")
debug = importlib.import_module("verl.utils.debug.metrics")
metric_utils = importlib.import_module("verl.trainer.ppo.metric_utils")
DataProto = importlib.import_module("verl.protocol").DataProto
