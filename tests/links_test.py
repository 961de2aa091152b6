"""Every relative link of the pages resolves, to a file and to an anchor as GitHub makes them."""

import collections
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)?$", re.MULTILINE)
SOURCES = ("jaxrl_tis", "configs", "launch", "benchmarks", "experiments", "colab", "docs", "tests")
NAMED_PAGE = re.compile(r"(?<![\w./])docs/[\w/]+\.md")


def links(text: str) -> list[str]:
    """The targets of a page's links but those to the web; code has none."""
    targets = LINK.findall(CODE.sub("`code`", FENCED.sub("", text)))
    return [target for target in targets if not re.match(r"\w+:", target)]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings."""
    found, counts = set(), collections.Counter()
    for heading in HEADING.findall(FENCED.sub("", text)):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return found


def broken(page: pathlib.Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    found = []
    for link in links(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            found.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            found.append(f"{link}: no such heading")
    return found


def test_all_links_resolve():
    assert {page: links for page in PAGES if (links := broken(page))} == {}


def test_every_page_is_in_the_reading_order():
    """But for the tables that experiments write."""
    listed = {(ROOT / "docs" / x).resolve() for x in links((ROOT / "docs/README.md").read_text())}
    written = {*(ROOT / "docs").glob("*.md"), ROOT / "docs/smollm2/README.md"}
    assert written - {ROOT / "docs/README.md"} <= listed


def test_a_page_that_a_source_names_is_there():
    """In comments, docstrings and messages."""
    named = collections.defaultdict(set)
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".sh", ".ipynb"):
                for page in NAMED_PAGE.findall(path.read_text(encoding="utf-8")):
                    named[page].add(path.relative_to(ROOT).as_posix())
    assert len(named) > 10
    assert {page: files for page, files in named.items() if not (ROOT / page).exists()} == {}


def test_what_leads_nowhere_is_found(tmp_path):
    other = "# A `b.c`: d-e_f\n## Twice\n## Twice\n```\n# No heading\n```\n"
    (tmp_path / "other.md").write_text(other)
    page = tmp_path / "page.md"
    page.write_text("""\
# Here
[a](other.md#a-bc-d-e_f) [b](other.md#twice-1) [c](#here) ![d](other.md) [e](https://a.b/c.md)
`[code](gone.md)` [f](gone.md) [g](other.md#no-heading) [h](#there) [i](other.md#twice-2)
""")
    assert [problem.partition(":")[0] for problem in broken(page)] == [
        "gone.md", "other.md#no-heading", "#there", "other.md#twice-2",
    ]
