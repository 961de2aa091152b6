"""How plain the pages are: words, long sentences, semicolons, vague pronouns and local words.

    python -m benchmarks.prose [PAGE ...] [--long]

Prints a row for each page (README.md, CONTRIBUTING.md and docs/ by default) and one for all pages
together. Prose is a page without code, tables, images, headings and HTML. A `!` marks a figure
above its limit, and the exit code is then 1. --long also prints each sentence above 30 words and
each sentence with a vague word.
"""

import argparse
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
LONG = 30  # words of a sentence
LIMITS = {"long": 8.0, "semicolons": 6.0, "vague": 8.0}  # per cent, then per 1,000 words
HEADS = {"long": "> 30 words %", "semicolons": "; / 1000", "vague": "vague / 1000"}
# Pronouns in the place of a noun, and local words for which the field has a term.
VAGUE = re.compile(
    r"\b(what|whatever|whose|whom|whoever|those|that of|of it|of them|thereof"
    r"|draw|draws|drawn|drew|hand(?:s|ed)? over|handed|taken over|beside|besides|company"
    r"|put out|tells?|told|hears?|heard|says?|said)\b",
    re.IGNORECASE,
)
WORD = re.compile(r"[\w'%./-]*\w[\w'%./-]*")
END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z0-9`\"'(\[*])")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|et al|cf|approx|Fig|Eq|Sec|No)\.", re.IGNORECASE)
FENCED = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
ITEM = re.compile(r"([-*+]|\d+[.)])\s+")
NO_PROSE = ("|", "#", "<", "![")  # how lines of tables, headings, HTML and images begin


def blocks(page: str) -> list[str]:
    """Returns the paragraphs and list items of a page in Markdown, each as one line."""
    found, lines = [], []
    for line in COMMENT.sub("", FENCED.sub("\n", page)).splitlines():
        bare, item = line.strip(), ITEM.match(line.strip())
        is_code = not lines and line.startswith("    ")
        is_prose = bare and not bare.startswith(NO_PROSE) and not is_code
        if item or not is_prose:
            found.append(" ".join(lines))
            lines = []
        if is_prose:
            lines.append(bare[item.end():] if item else bare)
    return [block for block in [*found, " ".join(lines)] if block]


def sentences(page: str) -> list[str]:
    """Returns the sentences of a page in Markdown. The end of a list item ends a sentence."""
    found = []
    for block in blocks(page):
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)
        text = re.sub(r"`[^`]*`", "CODE", text).replace("*", "")
        found += END.split(ABBREVIATION.sub(r"\1", text))
    return [sentence for sentence in found if re.search(r"\w", sentence)]


def words(sentence: str) -> int:
    return len(WORD.findall(sentence))


def measure(found: list[str]) -> dict[str, float]:
    """Returns the words of sentences, and the figures that `LIMITS` bounds."""
    total = sum(map(words, found))
    per_thousand = 1000 / max(total, 1)
    return {
        "words": total,
        "long": 100 * sum(words(s) > LONG for s in found) / max(len(found), 1),
        "semicolons": per_thousand * sum(s.count(";") for s in found),
        "vague": per_thousand * sum(len(VAGUE.findall(s)) for s in found),
    }


def above(figures: dict[str, float]) -> list[str]:
    """Returns the names of the figures that exceed their limit."""
    return [name for name, limit in LIMITS.items() if figures[name] > limit]


def row(page: str, figures: dict[str, float]) -> str:
    cells = [f"{page:<28}{figures['words']:7}"]
    for name, head in HEADS.items():
        mark = "!" if name in above(figures) else " "
        cells.append(f"{figures[name]:{len(head) + 2}.1f}{mark}")
    return "".join(cells)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prose", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("pages", nargs="*", type=pathlib.Path)
    parser.add_argument("--long", action="store_true", help="also print what is counted")
    args = parser.parse_args()
    pages = args.pages or [
        ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))
    ]
    print(f"{'page':<28}{'words':>7}" + "".join(f"  {head} " for head in HEADS.values()))
    every, is_above = [], False
    for page in pages:
        found = sentences(page.read_text(encoding="utf-8"))
        every += found
        figures = measure(found)
        is_above |= bool(above(figures))
        print(row(str(page).removeprefix(f"{ROOT}/"), figures))
        if args.long:
            for s in found:
                if words(s) > LONG or VAGUE.search(s):
                    print(f"  {words(s):3} {'|'.join(VAGUE.findall(s))}: {s}")
    print(row("all", measure(every)))
    return int(is_above)


if __name__ == "__main__":
    raise SystemExit(main())
