"""Which reader a model's files have."""

import pathlib

import pytest

from jaxrl_tis import models


@pytest.mark.parametrize("name, kind", [("folder", "safetensors"), ("model.gguf", "gguf")])
def test_a_config_is_read_without_the_weights(monkeypatch, name, kind):
    asked = []
    local = lambda path, weights=True: asked.append(weights) or pathlib.Path(path)
    monkeypatch.setattr(models.hub, "local", local)
    for module in ("safetensors", "gguf"):
        monkeypatch.setattr(getattr(models, module), "read_config", lambda path, m=module: m)
        monkeypatch.setattr(getattr(models, module), "load", lambda path, *_, m=module: m)
    assert models.read_config(name) == models.load(name) == kind and asked == [False, True]
