"""docs/concepts.md and its picture name the four log-probs, the gaps and the modes of the code."""

import pathlib
import re
import runpy

from jaxrl_tis.diagnostics import attribution
from jaxrl_tis.estimators import loss, presets
from jaxrl_tis.fields import FIELDS

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
PICTURE = runpy.run_path(str(ROOT / "docs" / "make_concepts.py"))


def test_the_four_log_probs():
    names = [name for name, *_ in PICTURE["LOG_PROBS"]]
    assert re.findall(r"^\| `(logp\w*)` \|", PAGE, re.MULTILINE) == names
    assert set(names) <= set(FIELDS)
    shown = [text.get_text() for text in PICTURE["draw"]().axes[0].texts]
    assert set(names) <= set(shown)


def test_a_gap_lies_between_two_log_probs():
    assert len(PICTURE["GAPS"]) == len(attribution.FACTORS) == len(PICTURE["LOG_PROBS"]) - 1
    assert f"mismatch/{{{','.join(attribution.FACTORS)}}}/" in PAGE


def test_modes_and_presets_are_those_of_the_code():
    assert all(f"**{centre.capitalize()}" in PAGE for centre in loss.CENTRES)
    rows = PAGE.split("| `correction.preset` |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", rows)) <= set(presets.PRESETS)


def test_the_picture_is_stored_as_png():
    assert PICTURE["PICTURE"].read_bytes().startswith(b"\x89PNG")
