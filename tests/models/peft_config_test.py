"""adapter_config.json: keys that are refused, ranks and scales, targets, and the base that it names."""

import pathlib

import numpy as np
import pytest

from jaxrl_tis import models
from jaxrl_tis.models import peft, peft_config
from tests.models.peft_test import GOLDEN, MODEL, changed


def test_the_scale_of_rslora_and_of_patterns():
    config = models.read_config(GOLDEN / "base")
    adapter, _ = peft.load(GOLDEN / "rslora", config)
    assert set(dict(adapter.scales).values()) == {32 / 4**0.5}
    adapter, factors = peft.load(GOLDEN / "patterns", config)
    assert dict(adapter.ranks) == {"q": 2, "v": 3}
    assert dict(adapter.scales) == {"q": 5 / 2, "v": 8 / 3}
    assert not np.any(factors["layers"]["q"]["b"][0]) and np.any(factors["layers"]["q"]["b"][1])


Q = "model.layers.{}.self_attn.q_proj"


@pytest.mark.parametrize("fields, module, is_target", [
    (dict(target_modules=["q_proj"]), Q.format(0), True),
    (dict(target_modules=["_proj"]), Q.format(0), False),
    (dict(target_modules=["q_proj"], exclude_modules=["self_attn.q_proj"]), Q.format(0), False),
    (dict(target_modules=r".*\.q_proj", exclude_modules=r".*\.0\..*"), Q.format(0), False),
    (dict(target_modules="all-linear"), Q.format(0), True),
    (dict(target_modules="all-linear"), "lm_head", False),
    (dict(target_modules=["q_proj"], layers_to_transform=[1]), Q.format(0), False),
    (dict(target_modules=["q_proj"], layers_to_transform=1), Q.format(1), True),
    (dict(target_modules=["q_proj"], layers_to_transform=[1], layers_pattern="layers"), Q.format(1), True),
    (dict(target_modules=["q_proj"], layers_to_transform=[1], layers_pattern=["h"]), Q.format(1), False),
    # The number of the layer, not that of the expert.
    (dict(target_modules=["up_proj"], layers_to_transform=[1]), "model.layers.1.mlp.experts.0.up_proj", True),
    # PEFT adapts a module that is targeted by its whole name in any case.
    (dict(target_modules=["lm_head"], layers_to_transform=[1]), "lm_head", True),
    (dict(target_modules=[Q.format(0)], layers_to_transform=[1]), Q.format(0), True),
])
def test_the_modules_that_are_targeted(fields, module, is_target):
    assert peft_config.is_target(fields, module) == is_target


@pytest.mark.parametrize("fields, named", [
    (dict(use_dora=True), "use_dora = True, which is not implemented"),
    (dict(bias="all"), "bias = 'all'"),
    (dict(lora_bias=True), "lora_bias"),
    (dict(modules_to_save=["lm_head"]), "modules_to_save"),
    (dict(target_parameters="w"), "target_parameters = 'w', which must be a list of names"),
    (dict(target_parameters=["k_proj.weight"], target_modules=["q_proj"]), "targets 4 modules"),
    (dict(layers_pattern="h", layers_to_transform=[0, 1]), "targets 1 modules of this model"),
    (dict(fan_in_fan_out=True), "fan_in_fan_out"),
    (dict(init_lora_weights="pissa"), "init_lora_weights 'pissa', which changes the base"),
    (dict(use_something_new={"x": 1}), "use_something_new"),
    (dict(peft_type="IA3"), "peft_type must be 'LORA'"),
    (dict(r=None), "has no r"),
    (dict(target_modules=None), "has no target_modules"),
    (dict(target_modules=["q_proj"]), "targets 2 modules of this model"),
    (dict(r=8), "is of another base or rank"),
    (dict(r=0), "r = 0, which must be a whole number of at least 1"),
    (dict(r="4"), "r = '4', which must be a whole number"),
    (dict(lora_alpha=float("nan")), "lora_alpha = nan, which must be a finite number above 0"),
    (dict(rank_pattern={"q_proj": 0}), "rank_pattern = .*, which must be regular expressions with whole"),
    (dict(alpha_pattern={"(": 2}), "alpha_pattern = .*, which must be regular expressions with finite"),
    (dict(target_modules="(q_proj"), "target_modules = '.q_proj', which must be a list of names or a"),
    (dict(exclude_modules=3), "exclude_modules = 3, which must be a list of names"),
    (dict(layers_to_transform="0"), "layers_to_transform = '0', which must be a layer's number"),
    (dict(revision=3), "revision = 3, which must be a text"),
])
def test_a_key_that_is_refused_by_name(tmp_path, fields, named):
    with pytest.raises(ValueError, match=named):
        peft.load(changed(tmp_path, **fields), models.read_config(GOLDEN / "base"))


@pytest.mark.parametrize("name, revision, path, named", [
    ("owner/name", None, MODEL, ""),
    ("owner/name", "v1", MODEL, ""),  # of the newest revision, whose name is not known
    ("owner/name", None, f"{MODEL}@v1", ""),
    ("owner/name", "v1", f"{MODEL}@v1", ""),
    ("owner/name", "v1", f"{MODEL}@v2", "trained on owner/name at revision v1, and the model is hf://owner/name@v2"),
    ("owner/other", None, MODEL, "trained on owner/other, and the model is hf://owner/name"),
    ("owner/other", "v1", f"{MODEL}@v1", "trained on owner/other at revision v1, and the model is"),
    ("models/a", None, pathlib.Path("models/a"), ""),
    ("models/a", None, "models/b", "trained on models/a, and the model is models/b"),
    (None, "v1", f"{MODEL}@v2", ""),  # the folder names no base
    ("owner/name", "v1", "", ""),  # a model without a path
])
def test_an_adapter_that_names_another_base_or_revision(tmp_path, name, revision, path, named):
    folder = changed(tmp_path, base_model_name_or_path=name, revision=revision)
    found = peft_config.other_base(folder, path)
    assert found.startswith(f"{folder} was {named}") if named else found == ""
