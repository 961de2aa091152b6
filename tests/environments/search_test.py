"""Search in a small corpus; the scores of BM25 are computed here by its formula."""

import collections
import json
import math
import re
import subprocess
import sys

import pytest

from jaxrl_tis.environments import search
from jaxrl_tis.environments.protocol import Step
from jaxrl_tis.environments.search import NOTHING, Index, Search, index

CORPUS = [
    {"title": "Lisbon", "text": "Lisbon is the capital of Portugal."},
    {"title": "Porto", "text": "Porto is a city in Portugal, a port on the river Douro."},
    {"text": "The river Douro begins in Spain and ends in Portugal."},
    {"title": "Lyon", "text": "Lyon lies on two rivers."},
    {"title": "Copy", "text": "Lyon lies on two rivers."},
    {"title": "Long", "text": "granite " * 1000},
]
EXAMPLE = {"prompt": "Where does the Douro begin?", "answer": "Spain", "id": "x"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps(passage) + "\n" for passage in CORPUS))
    return str(path)


def begun(corpus, example=EXAMPLE, **params):
    Search.prepare(corpus=corpus, **params)
    play = Search(seed=1, corpus=corpus, **params)
    assert play.reset(example) == example["prompt"]
    return play


def test_a_search_and_a_final_answer(corpus):
    play = begun(corpus, passages=1)
    step = play.step("I have to look it up.\nsearch: Douro begins Spain\n")
    assert step == Step(CORPUS[2]["text"], metrics={"searches": 1, "empty_searches": 0})
    step = play.step("Search: Lisbon")
    assert step == Step(
        "Lisbon: Lisbon is the capital of Portugal.", metrics={"searches": 2, "empty_searches": 0}
    )
    assert play.step("Answer:  SPAIN ") == Step("", 1.0, True, {"searches": 2, "empty_searches": 0})


@pytest.mark.parametrize("answer, reward", [
    ("spain", 1.0), ("answer: Portugal\nAnswer: Spain", 1.0), ("Spain.", 0.0), ("", 0.0),
    ("search: Douro\nSpain", 0.0), ("research: Douro", 0.0),
])
def test_final_answers(corpus, answer, reward):
    step = begun(corpus).step(answer)
    assert (step.is_done, step.reward, step.metrics["searches"]) == (True, reward, 0)


@pytest.mark.parametrize("query", ["zebra", "", "the of", "?"])
def test_a_search_without_a_passage(corpus, query):
    step = begun(corpus).step(f"search: {query}")
    assert step == Step(NOTHING, metrics={"searches": 1, "empty_searches": 1})


def test_the_order_is_that_of_bm25(corpus):
    """Lucene's form, k1 1.5 and b 0.75: idf * tf / (tf + k1 (1 - b + b length / mean length))."""
    texts = [f"{p['title']}: {p['text']}" if "title" in p else p["text"] for p in CORPUS]
    stop = {"is", "the", "of", "in", "on", "and", "a"}
    words = [[w for w in re.findall(r"\w\w+", t[:2000].lower()) if w not in stop] for t in texts]
    mean = sum(map(len, words)) / len(words)

    def score(terms, query):
        count, total = collections.Counter(terms), 0.0
        for word in query:
            known = sum(word in other for other in words)
            idf = math.log(1 + (len(words) - known + 0.5) / (known + 0.5))
            room = 1.5 * (0.25 + 0.75 * len(terms) / mean)
            total += idf * count[word] / (count[word] + room)
        return total

    for query in ("portugal river", "douro port", "capital spain lisbon", "portugal"):
        scores = [score(terms, query.split()) for terms in words]
        order = sorted((i for i in range(6) if scores[i] > 0), key=lambda i: -scores[i])
        assert index(corpus).best(query, 20) == [texts[i] for i in order], query


def test_of_equal_passages_the_first_comes_first_and_long_ones_are_cut(corpus):
    found = index(corpus).best("two rivers", 5)
    assert found == ["Lyon: Lyon lies on two rivers.", "Copy: Lyon lies on two rivers."]
    short, long = ([f"rivers x{i:02} {end}" for i in range(40)] for end in ("", "and what follows"))
    many = [passage for pair in zip(short, long, strict=True) for passage in pair]
    assert Index(many).best("rivers", 60) == short + long[:20]  # shorter ones score higher
    assert index(corpus).best("granite", 1) == [("Long: " + "granite " * 1000)[:2000]]
    step = begun(corpus, passages=2).step("search: two rivers")
    assert step.observation == "\n\n".join(found)


@pytest.mark.parametrize("params, error", [
    ({"passages": 0}, "passages=0; give 1 to 20"),
    ({"passages": 21}, "passages=21"),
    ({"corpus": "gone.jsonl"}, "gone.jsonl is missing"),
    ({"corpus": "bad.jsonl"}, "bad.jsonl:2: no text in the column text"),
])
def test_what_cannot_be_searched_is_refused(corpus, params, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"title": "b"}\n')
    with pytest.raises((ValueError, FileNotFoundError), match=error):
        Search.prepare(**({"corpus": corpus} | params))


def test_an_example_without_an_answer(corpus):
    with pytest.raises(ValueError, match="example x has no answer"):
        begun(corpus, {"prompt": "p", "id": "x"})


@pytest.mark.all
def test_the_library_imports_no_jax():
    code = "import sys, jaxrl_tis.environments.search\nprint([m for m in sys.modules if m[:4] == 'jax.'])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
    assert sys.modules["jax"] is not None and search.bm25s
