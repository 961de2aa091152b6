"""docs/metrics.md has a row for everything a run writes, and no row for nothing."""

import itertools
import pathlib
import re

import pytest

from jaxrl_tis import metrics
from tests import tiny

ROOT = pathlib.Path(__file__).parents[1]
# Runs that together have most metrics; what an unusual setting adds is looked for in the sources.
RUNS = {
    "default": {"metrics__percentile_every": 1},
    "ppo": {"correction__advantage": "gae", "train__pack_length": 16, "model__path": ""},
    "masked": {
        "correction__weight": "token_mis(upper=2.0)", "correction__masks": "seq_mean_k1(upper=1.5)",
        "correction__kl_coeff": 0.01, "correction__entropy_coeff": 0.01,
        "correction__batch_normalize": True,
    },
    "bypass": {"correction__preset": "bypass_ppo_clip",
               "correction__controllers": "ess_scale & layerwise_perturbation"},
    "centred": {"correction__preset": "centered_tis_2", "model__dtype": "float16"},
    "asynchronous": {"rollout__mode": "areal(staleness=1)", "rollout__probe_every": 1},
}


def rows():
    """[(names with braces expanded, is compact, rest of the cells)] of all tables."""
    found = []
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if line.startswith("| `"):
            name, compact, *rest = [cell.strip() for cell in line.strip("|").split("|")]
            found.append((expanded(name.strip("`")), compact == "c", rest))
    return found


def expanded(pattern):
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(words) for words in itertools.product(*choices)]


def as_regex(name):
    return "".join(".+" if part.startswith("<") else re.escape(part)
                   for part in re.split(r"(<[^>]*>)", name))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    names = set()
    for name, settings in RUNS.items():
        folder = tmp_path_factory.mktemp("runs") / name
        tiny.run(folder, steps=1, **settings)
        records = metrics.read(folder)
        names |= {n for record in records for n in record} - {"step", "phase"}
    return names


def test_expanding_braces():
    assert expanded("a/{b,c}/{d,e}") == ["a/b/d", "a/b/e", "a/c/d", "a/c/e"]
    assert re.fullmatch(as_regex("a/<n>_b"), "a/17_b") and not re.fullmatch(as_regex("a/<n>_b"), "a/_b")


def row_of(name):
    """The row of a name: one without a placeholder before one that has some."""
    matching = [row for row in rows() if any(re.fullmatch(as_regex(n), name) for n in row[0])]
    exact = [row for row in matching if name in row[0]]
    return (exact or matching or [None])[0]


def test_every_value_has_a_row(written):
    assert len(written) > 150
    assert sorted(name for name in written if row_of(name) is None) == []


def test_no_name_has_two_rows(written):
    for name in written:
        assert sum(name in names for names, *_ in rows()) <= 1, name


def test_the_compact_set_is_as_marked(written):
    wrong = [name for name in written if row_of(name)[1] != metrics.is_compact(name)]
    assert wrong == []


def test_every_row_is_of_something(written):
    """A name that these runs do not write is put together somewhere in the sources."""
    sources = "".join(path.read_text() for path in (ROOT / "jaxrl_tis").rglob("*.py"))
    unknown = []
    for names, *_ in rows():
        for name in names:
            is_written = any(re.fullmatch(as_regex(name), w) for w in written)
            last = re.sub(r"<[^>]*>", "", re.sub(r"^time/|_s$", "", name)).rstrip("/").split("/")[-1]
            if not is_written and (last or name.split("/")[0]) not in sources:
                unknown.append(name)
    assert unknown == []


def test_a_compact_line_is_a_fifth(tmp_path):
    sizes = {}
    for kind in ("full", "compact"):
        tiny.run(tmp_path / kind, steps=1, metrics__record=kind)
        [line] = [x for x in (tmp_path / kind / "metrics.jsonl").read_text().splitlines()
                  if '"train"' in x]
        sizes[kind] = len(line)
    assert sizes["compact"] < sizes["full"] / 4
