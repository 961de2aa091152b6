"""docs/own_data.md: its rewards run as they are printed."""

import http.server
import json
import pathlib
import re
import threading

import pytest

from configs import default
from jaxrl_tis.data import signatures
from jaxrl_tis.data.rewards import RewardWorker

PAGE = (pathlib.Path(__file__).parents[1] / "docs/own_data.md").read_text()
REWARDS = PAGE[PAGE.index("\n## Rewards") if "\n## Rewards" in PAGE else 0:]
CODE = re.findall(r"```python\n(.*?)```", REWARDS, re.DOTALL)
NAMES = re.findall(r"^\*\*`(\w+)`\*\*:", REWARDS, re.MULTILINE)
EXAMPLE = {"prompt": "2+3=", "answer": "5", "id": "a"}


def test_the_page_shows_every_signature():
    assert set(NAMES) == set(signatures.SIGNATURES) - {"auto"}
    assert len(CODE) == len(NAMES) + 1  # and a judge


@pytest.mark.all
@pytest.mark.parametrize("name", NAMES)
def test_a_function_of_the_page_scores(tmp_path, monkeypatch, name):
    code = CODE[NAMES.index(name)]
    (tmp_path / f"page_{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    [function] = re.findall(r"^def (\w+)", code, re.MULTILINE)
    for signature in ("auto", name):
        with RewardWorker(f"page_{name}:{function}", timeout=10, signature=signature) as worker:
            found = worker.results([" 5", "6"], [EXAMPLE] * 2)
            assert [s.score for s in found] == [1.0, 0.0], worker.last_error
    assert ("acc" in found[0].components) == (name == "verl")


class Judge(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"score": eval(asked["answer"])}).encode())

    def log_message(self, *_):
        pass


@pytest.mark.all
def test_the_judge_of_the_page_is_asked(tmp_path, monkeypatch):
    (tmp_path / "page_judge.py").write_text(CODE[-1])
    monkeypatch.syspath_prepend(str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}")
        with RewardWorker("page_judge:score", timeout=10, network=True, workers=2) as worker:
            assert worker.score(["1/2", "1/4", "3"], [EXAMPLE] * 3) == [0.5, 0.25, 3.0]
        with RewardWorker("page_judge:score", timeout=10) as worker:
            [refused] = worker.results(["1/2"], [EXAMPLE])
            assert refused.is_failed and "reward.network=True" in worker.last_error
        server.shutdown()


def test_the_fields_of_the_page_are_those_of_the_config():
    fields = default.get_config().reward
    named = set(re.findall(r"reward\.(\w+)", re.sub(r"reward\.\w+=\S*:\w+", "", REWARDS)))
    assert {name for name in named if name != "py"} <= set(fields)
    assert set(fields) - {"name"} <= named
