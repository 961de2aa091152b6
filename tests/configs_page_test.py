"""docs/configs.md is what its generator writes, and has every field with its meaning."""

import re

from configs import default
from docs import make_configs
from jaxrl_tis.record import changes, provenance


def rows():
    """{field: [mark, values, meaning]}."""
    lines = re.findall(r"^\| `([\w.]+)`(.?) \| (.*) \|$", make_configs.page(), re.MULTILINE)
    return {name: [mark, *re.split(r" (?<!\\)\| ", cells)] for name, mark, cells in lines}


def fields():
    config = default.get_config().to_dict()
    return [
        name for key, value in config.items()
        for name in ([f"{key}.{field}" for field in value] if isinstance(value, dict) else [key])
    ]


def test_the_page_is_current():
    assert make_configs.PAGE.read_text(encoding="utf-8") == make_configs.page()


def test_every_field_has_one_row_and_a_meaning():
    assert sorted(rows()) == sorted(fields())
    assert sum(line.startswith("| `") for line in make_configs.page().splitlines()) == len(rows())
    for field, cells in rows().items():
        assert len(cells) == 3 and len(cells[2]) > 8, field


def test_rows_by_hand():
    table = rows()
    assert table["seed"] == ["³", "`0`", "Seed of the initialisation, the data order and the sampler."]
    assert table["optimizer.clip_norm"] == ["", "`1.0`, > 0", "Largest norm of a gradient."]
    assert table["critic.clip_norm"] == ["", "`1.0`, > 0", "As optimizer.clip_norm."]
    assert table["correction.weight"][:2] == ["", "preset"]
    assert table["rollout.driver"][:2] == ["³", '`"virtual"`, `threads`, `ray`, `external`']
    assert table["model.numerics"][2].startswith("invariant: ")


def test_experts_fields_stand_apart():
    _, _, experts = make_configs.comments()
    assert {"train.logprob_chunk", "optimizer.b1", "critic.eps"} <= experts
    assert not {"train.epochs", "optimizer.lr", "gate.required"} & experts


def test_the_rule_for_a_continued_run_is_that_of_the_check():
    """For a synchronous run, and for one whose samplers run ahead."""
    sync = provenance.flat(default.get_config().to_dict())
    ahead = sync | {"rollout.schedule": "one_step"}
    for field in set(fields()) - {"steps"}:
        free = [changes.is_free(field, config, config) for config in (sync, ahead)]
        rule = make_configs.continued(field)
        expected = {"free": [True, True], "free if sync": [True, False]}.get(rule, [False, False])
        assert free == expected, field
        assert (rule == "change if sync") == (field in changes.QUEUED), field
