"""benchmarks/prose.py on a page by hand, and its limits on the pages that a newcomer reads first."""

import pathlib

import pytest

from benchmarks import prose

ROOT = pathlib.Path(__file__).parents[1]
PAGE = """\
# A heading is no prose.

One sentence with `code; that of it` in it, e.g. this one. [A second](what.md) sentence:
It continues; here.

- An item
  of two lines
- What a local word.

| a table | whose words |
|---|---|

    indented code whose words

```
fenced code; whose words
```
<!-- a comment -->
![an image](x.png)
"""


def test_the_sentences_of_a_page():
    assert prose.sentences(PAGE) == [
        "One sentence with CODE in it, e.g this one.", "A second sentence:", "It continues; here.",
        "An item of two lines", "What a local word.",
    ]


def test_the_figures_of_a_page():
    figures = prose.measure([*prose.sentences(PAGE), "word " * 31])
    words = 9 + 3 + 3 + 5 + 4 + 31
    assert figures == pytest.approx({
        "words": words, "long": 100 / 6, "semicolons": 1000 / words, "vague": 1000 / words,
    })
    assert prose.above(figures) == ["long", "semicolons", "vague"]
    assert prose.row("p", figures).count("!") == 3


def test_no_sentences():
    figures = prose.measure([])
    assert figures == {"words": 0, "long": 0, "semicolons": 0, "vague": 0}
    assert prose.above(figures) == []


@pytest.mark.parametrize("page", [
    "README.md", "CONTRIBUTING.md", "docs/README.md", "docs/quickstart.md", "docs/concepts.md",
])
def test_the_first_pages_are_plain(page):
    assert prose.above(prose.measure(prose.sentences((ROOT / page).read_text()))) == []
