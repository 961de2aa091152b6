"""The page of a dump, from numbers by hand."""

from matplotlib import figure

from jaxrl_tis.audit import page, table


def rule(name, kind="preset", reason=None, **numbers):
    return {"kind": kind, "name": name, "reason": reason, "tokens_kept": 0.5, "ess": 0.25} | numbers


def test_rules_with_numbers_are_drawn():
    rules = [rule("a"), rule("b", reason="needs turn"), rule("c"), rule("d", kind="mask")]
    assert [row["name"] for row in page._known({"rules": rules}, "preset")] == ["a", "c"]
    axes = figure.Figure().add_subplot()
    page._draw_kept(axes, {"rules": rules})
    assert [label.get_text() for label in axes.get_yticklabels()] == ["c", "a"]
    assert [bar.get_width() for bar in axes.patches] == [0.5, 0.5]


def test_words_of_a_dump_are_no_html(monkeypatch):
    monkeypatch.setattr(table, "text", lambda report: "x < y")
    monkeypatch.setattr(page, "_pictures", lambda report: [("<svg></svg>", "a & b")])
    found = page.page({"dump": "<script>.npz", "doctor": {"verdict": ["<b>"]}})
    assert "<script>" not in found and "&lt;script&gt;.npz" in found and "<b>" not in found
    assert "x &lt; y" in found and "<svg></svg><figcaption>a &amp; b</figcaption>" in found
