"""docs/methods.md is what its generator writes, and no entry of a table can be left out or bare."""

import re

import pytest

from docs import make_methods
from jaxrl_tis.estimators import controllers, methods, presets


def section(title):
    return make_methods.page().split(f"## {title}\n\n")[1].split("\n## ")[0].strip()


def rows(title):
    """Cells of each row of a section's table, without its two header lines."""
    lines = section(title).split("\n\n")[-1].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_the_page_is_current():
    assert make_methods.PAGE.read_text(encoding="utf-8") == make_methods.page()


@pytest.mark.parametrize("kind", make_methods.KINDS)
def test_every_entry_has_every_column(kind):
    title, _, labels = make_methods.KINDS[kind]
    table = rows(title)
    assert [cells[0].split("`")[1] for cells in table] == list(methods.TABLES[kind])
    assert all(len(cells) == len(labels) + 3 for cells in table)
    assert all(cell for *cells, _, use in table for cell in (*cells, use))


def test_every_kind_controller_and_preset_has_its_place():
    assert {*make_methods.KINDS, "controller"} == set(methods.TABLES)
    names = [cells[0].split("`")[1] for cells in rows("Controllers")]
    assert names == list(controllers.CONTROLLERS)
    assert [cells[0].strip("`") for cells in rows("Presets")] == list(presets.PRESETS)


def test_a_row_by_hand():
    table = {cells[0].split("`")[1]: cells for cells in rows("Objectives")}
    assert table["espo"][0] == (
        "[`espo`](../jaxrl_tis/estimators/sequence_clipped.py) [2512.00499](https://arxiv.org/abs/2512.00499), "
        "[2512.07710](https://arxiv.org/abs/2512.07710)"
    )
    assert table["oapl"][3] == "`oapl_beta=0.001`; needs `logp_behav`" and table["gpg"][3] == ""
    assert table["ppo"][0].startswith("[`ppo`](../jaxrl_tis/estimators/ppo.py) (`ppo_clip`) [1707.06347]")
    masks = {cells[0].split("`")[1]: cells for cells in rows("Masks")}
    assert masks["seq_sum_ratio"][0].endswith(") verl")  # the source of seq_sum_k1
    assert masks["trm"][3] == "`trm_delta`; needs `logits_behav`†, `logits`†"  # for small configs
    presets_ = {cells[0].strip("`"): cells for cells in rows("Presets")}
    assert presets_["centered"][1:] == ["`behav`", "", "", "", "`reinforce`, centred by `top(32)`"]


@pytest.mark.parametrize("label", ["Unit", "Trust region", "Gradient", "Use"])
def test_a_missing_label_is_an_error_that_names_the_entry(label, monkeypatch):
    labels = {"Unit": "token", "Trust region": "w <= 1", "Gradient": "none", "Use": "never"}
    del labels[label]

    def bare():
        pass

    bare.__doc__ = "Bare; no paper.\n\n    " + " ".join(f"{k}: {v}." for k, v in labels.items())
    monkeypatch.setitem(methods.TABLES["objective"], "bare", bare)
    with pytest.raises(ValueError, match=f"'bare' has no '{label}'"):
        make_methods.page()


def test_a_missing_source_is_an_error_that_names_the_entry(monkeypatch):
    def bare():
        """Bare.

        Unit: token. Trust region: w <= 1. Gradient: none. Use: never.
        """

    monkeypatch.setitem(methods.TABLES["weight"], "bare", bare)
    with pytest.raises(ValueError, match="'bare' has no source"):
        make_methods.page()
