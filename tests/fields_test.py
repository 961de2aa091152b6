"""The two tables, against the classes and the methods that read them."""

import dataclasses

import numpy as np
import pytest

from configs import default
from jaxrl_tis import fields
from jaxrl_tis.engine.protocol import Draw, ResultTokens
from jaxrl_tis.engine.records import Trajectory
from jaxrl_tis.estimators import methods
from jaxrl_tis.fields import DRAWN, FIELDS
from jaxrl_tis.learner import correction


def names(cls) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def test_a_draw_its_result_and_its_record_hold_the_fields_of_the_table():
    assert names(Draw) == list(DRAWN)
    assert set(names(ResultTokens)) == {*DRAWN, "valid", "remaining", "routes", "page_mass"}
    assert DRAWN.keys() <= set(names(Trajectory))


def test_what_a_record_is_copied_from_is_an_attribute_of_it():
    recorded = {name: f.record for name, f in FIELDS.items() if f.record}
    assert set(recorded.values()) <= set(names(Trajectory))
    for name, attribute in recorded.items():
        assert FIELDS[name].source == "record" and FIELDS[name].unit == "token"
        if attribute in DRAWN:
            assert FIELDS[name].dtype == DRAWN[attribute].dtype, name


def test_every_word_of_the_table_is_one_that_its_docstring_explains():
    said = fields.Field.__doc__
    for name, f in FIELDS.items():
        for word in (f.unit, f.source, f.use):
            assert f'"{word}"' in said, (name, word)
        assert np.array(f.padding).astype(f.dtype) == f.padding, name


@pytest.mark.parametrize("kind", ["weight", "mask", "objective", "advantage", "kl"])
def test_every_need_of_a_method_has_a_line(kind):
    needed = {field for name in methods.TABLES[kind] for field in methods.needs(kind, name)}
    assert needed <= FIELDS.keys(), needed - FIELDS.keys()


def test_shapes_by_hand():
    widths = {"vocabulary": 19, "kept": 3, "components": 2}
    found = {name: fields.shape(name, 4, 7, widths) for name in (
        "tokens", "kept", "logits", "rewards", "reward_components", "draw", "current_version"
    )}
    assert found == {
        "tokens": (4, 7), "kept": (4, 7, 3), "logits": (4, 7, 19), "rewards": (4,),
        "reward_components": (4, 2), "draw": (4,), "current_version": (4, 1),
    }
    assert fields.is_recorded("tokens", widths) and fields.is_recorded("kept", widths)
    assert not fields.is_recorded("kept", widths | {"kept": 0})


def test_axes_on_a_mesh():
    """Tokens and what stands on them are cut along the row, numbers of the step are not."""
    assert fields.logical_axes("tokens", 3) == (None, "batch", "length")
    assert fields.logical_axes("kept", 4) == (None, "batch", "length", None)
    assert fields.logical_axes("group", 3) == (None, "batch", "length")
    assert fields.logical_axes("draw", 2) == (None, "batch")
    assert fields.logical_axes("current_version", 3) == (None, "batch", None)


def test_a_field_without_a_line_is_told_where_it_belongs():
    with pytest.raises(KeyError, match="'prices': give it a line of fields.FIELDS"):
        fields.field("prices")


@pytest.mark.parametrize("changes, taken, dropped", [
    ({}, ("adv", "weights", "logp_behav", "logp_old", "tokens", "draw"),
     ("rewards", "entropy", "version", "current_version", "group", "turn", "logits")),
    ({"objective": "espo(vocab_size=19)"}, ("entropy",), ("group",)),
    ({"masks": "staleness(staleness_max=2)"}, (), ("version", "current_version")),
    ({"masks": "staleness(staleness_max=2)", "centre": "behav", "weight": "none"},
     ("version", "current_version"), ("group",)),
    ({"advantage": "otb"}, (), ("sum_pi_squared",)),
    ({"turn_credit": "rest"}, ("adv",), ("turn_rewards", "turn")),
    ({"turn_credit": "turn", "objective": "turn_ppo"}, ("turn",), ("turn_rewards",)),
    ({"masks": "trm(trm_delta=1.0)"}, ("logits_behav",), ("logits",)),
    ({"kl": "exact_reverse", "kl_coeff": 0.1}, ("logits_ref", "logp_ref"), ("logits",)),
    ({"objective": "quatro(quatro_delta=0.3, quatro_floor=0.5)"}, ("group",), ("entropy",)),
    ({"aggregation": "prompt-mean"}, ("group",), ("rewards", "prompt_divisor")),
])
def test_updates_take_what_they_and_their_methods_read(changes, taken, dropped):
    config = default.get_config().correction
    config.weight, config.objective = "token_tis", "ppo"
    config.update(changes)
    c = correction.parse(config)
    assert {name: c.is_in_update(name) for name in (*taken, *dropped)} == (
        dict.fromkeys(taken, True) | dict.fromkeys(dropped, False)
    )


@pytest.mark.parametrize("count, dtype", [
    (2, "uint8"), (256, "uint8"), (257, "uint16"), (2**16, "uint16"),
])
def test_the_dtype_of_routes_is_the_smallest_that_holds_every_id(count, dtype):
    assert fields.route_dtype(count) == dtype and np.iinfo(dtype).max >= count - 1
