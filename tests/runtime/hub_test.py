"""The hub is a server on 127.0.0.1; the commands that ask it are processes of their own, as its
client reads the environment once."""

import json
import os
import pathlib
import subprocess
import sys

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import errors

from jaxrl_tis.runtime import cli, hub
from tests import configs_test, hub_server

ASK = """
import json, sys
from jaxrl_tis.runtime import cli, hub
for line in sys.stdin:
    answers = []
    for name, args in json.loads(line):
        try:
            answers.append(getattr(hub, name)(*args))
        except cli.REFUSALS as error:
            answers.append([type(error).__name__, str(error)])
    print(json.dumps(answers, default=str), flush=True)
"""


class Client:
    def __init__(self, home, endpoint):
        self.home, self.endpoint = home, endpoint

    def start(self, *command, **environment):
        given = {"HF_ENDPOINT": self.endpoint, "HF_HOME": f"{self.home}", **environment}
        clean = {n: v for n, v in os.environ.items() if not n.startswith("HF_")}
        return subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=clean | given, cwd=configs_test.ROOT,
        )

    def run(self, *command, said="", **environment):
        with self.start(*command, **environment) as process:
            told = process.communicate(said)
        return subprocess.CompletedProcess(command, process.returncode, *told)

    def ask(self, *calls, **environment):
        done = self.run("-c", ASK, said=json.dumps(calls), **environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


class Asked(Client):
    """A client that asks from one process, as long as its environment is the same."""

    def __init__(self, home, endpoint):
        super().__init__(home, endpoint)
        self._process = self.start("-c", ASK)

    def ask(self, *calls):
        self._process.stdin.write(json.dumps(calls) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line else pytest.fail(self._process.stderr.read())

    def close(self):
        self._process.communicate()


@pytest.fixture
def served(tmp_path):
    with hub_server.serving() as (server, endpoint):
        yield server, Client(tmp_path / "home", endpoint)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A hub for several tests, each of which has repositories of its own."""
    with hub_server.serving() as (server, endpoint):
        client = Asked(tmp_path_factory.mktemp("hub") / "home", endpoint)
        yield server, client
        client.close()


MODEL = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}",
         "sub/other.json": b"{}", "README.md": b"words", "pytorch_model.bin": b"pickle"}


# Paths


@pytest.mark.parametrize("text, parts", [
    ("hf://Qwen/Qwen2.5-0.5B", ("model", "Qwen/Qwen2.5-0.5B", "", "")),
    ("hf://a/b@main", ("model", "a/b", "main", "")),
    ("hf://a/b@v1/x.gguf", ("model", "a/b", "v1", "x.gguf")),
    ("hf://datasets/openai/gsm8k/main/train", ("dataset", "openai/gsm8k", "", "main/train")),
    ("hf://datasets/a/b@c", ("dataset", "a/b", "c", "")),
    ("hf://a/b@refs/pr/12/x.gguf", ("model", "a/b", "refs/pr/12", "x.gguf")),
])
def test_the_parts_of_a_path(text, parts):
    found = hub.Reference.parse(text)
    assert (found.kind, found.repository, found.revision, found.inside) == parts
    assert str(found) == text


@pytest.mark.parametrize("text", [
    "hf://", "hf://a", "hf://datasets/a", "hf://a/b@", "hf://a b/c", "hf://a/b/../../etc",
    "https://a/b", "hf://a/b@x@y",
])
def test_what_is_no_path_is_refused(text):
    with pytest.raises(ValueError, match="not a path of the hub; give hf://OWNER/MODEL"):
        hub.Reference.parse(text)


def test_replaced_goes_into_nested_values():
    before = {"a": "x", "b": {"c": ("x", "y"), "d": 1}, "e": ["x"]}
    assert hub.replaced(before, {"x": "z"}) == {"a": "z", "b": {"c": ("z", "y"), "d": 1}, "e": ["z"]}
    assert sorted(map(str, hub.leaves(before))) == ["1", "x", "x", "x", "y"]


# Fetching


@pytest.mark.all
def test_a_model_comes_without_what_is_not_read(served):
    server, client = served
    server.put("models/o/m", "1", MODEL)
    [folder, without] = client.ask(("local", ["hf://o/m"]), ("local", ["/a/b"]))
    assert without == "/a/b" and folder.endswith("1" * 40)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.all
def test_config_and_tokenizer_come_without_the_weights(served):
    server, client = served
    server.put("models/o/m", "1", MODEL)
    [folder] = client.ask(("local", ["hf://o/m", False]))
    assert sorted(os.listdir(folder)) == ["config.json", "tokenizer.json"]


@pytest.mark.all
def test_one_file_of_a_repository(served):
    server, client = served
    server.put("models/o/m", "1", {"a.gguf": b"a", "b.gguf": b"b"})
    [path] = client.ask(("local", ["hf://o/m/b.gguf"]))
    assert pathlib.Path(path).read_bytes() == b"b"
    assert not any("a.gguf" in asked for asked in server.asked)


@pytest.mark.all
def test_a_folder_of_a_repository(served):
    server, client = served
    inside = {f"part/{name}": data for name, data in MODEL.items()} | {"config.json": b"{}"}
    server.put("models/o/m", "1", inside)
    [folder] = client.ask(("local", ["hf://o/m/part"]))
    assert folder.endswith("/part")
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert os.listdir(os.path.dirname(folder)) == ["part"]


@pytest.mark.parametrize("inside", ["", "part/"])
def test_named_files_come_alone(asked, inside):
    server, client = asked
    server.put(f"models/o/named{len(inside)}", "1", {f"{inside}{name}": data for name, data in MODEL.items()})
    names, path = ["config.json", "absent.json"], f"hf://o/named{len(inside)}/{inside}"
    folder, without = client.ask(("local_files", [path, names]), ("local_files", ["/a/b", names]))
    assert without == "/a/b" and os.listdir(folder) == ["config.json"]


def test_the_files_of_a_split(asked):
    server, client = asked
    server.put("datasets/o/split", "2", {
        "main/train-00000-of-00002.parquet": b"a", "main/train-00001-of-00002.parquet": b"b",
        "main/test-00000-of-00001.parquet": b"c", "main/trainer.jsonl": b"d", "val.jsonl": b"e",
        "socratic/train.jsonl": b"f",
    })
    pinned = "hf://datasets/o/split@" + "2" * 40
    _, train, val, none = client.ask(
        ("data_files", ["hf://datasets/o/split/main/trainer"]),  # then in the same folder of the cache
        ("data_files", ["hf://datasets/o/split/main/train"]),
        ("data_files", [f"{pinned}/val"]), ("data_files", ["hf://datasets/o/split/dev"]),
    )
    assert [name for name, _ in train] == [
        "hf://datasets/o/split/main/train-00000-of-00002.parquet",
        "hf://datasets/o/split/main/train-00001-of-00002.parquet",
    ]
    assert [pathlib.Path(path).read_text() for _, path in train] == ["a", "b"]
    assert [name for name, _ in val] == [f"{pinned}/val.jsonl"]
    assert none[0] == "FileNotFoundError" and "has no file dev.* or dev-*" in none[1]


def test_a_glob_on_this_machine_is_sorted_and_a_name_with_brackets_is_a_file(tmp_path):
    for name in ("b.csv", "a.csv", "c[1].csv"):
        (tmp_path / name).write_text("")
    names = lambda pattern: [name for name, _ in hub.data_files(f"{tmp_path}/{pattern}")]
    assert names("[ab].csv") == [f"{tmp_path}/a.csv", f"{tmp_path}/b.csv"]
    assert names("c[1].csv") == [f"{tmp_path}/c[1].csv"]
    with pytest.raises(FileNotFoundError, match="no file has such a name"):
        names("d*")


@pytest.mark.all
def test_a_glob_of_files_and_their_packed_ones(served):
    server, client = served
    server.put("datasets/o/d", "2", {
        "data/train-0.csv.gz": b"a", "data/train-1.csv.gz": b"b", "data/test-0.csv.gz": b"c",
    })
    found, exact = client.ask(
        ("data_files", ["hf://datasets/o/d/data/tr*.csv.gz"]),
        ("data_files", ["hf://datasets/o/d/data/train-1"]),
    )
    assert [name for name, _ in found] == [
        "hf://datasets/o/d/data/train-0.csv.gz", "hf://datasets/o/d/data/train-1.csv.gz",
    ]
    assert [name for name, _ in exact] == ["hf://datasets/o/d/data/train-1.csv.gz"]


@pytest.mark.all
def test_the_cache_serves_without_a_network(served):
    server, client = served
    server.put("models/o/m", "1", MODEL)
    [before] = client.ask(("local", ["hf://o/m"]))
    count = len(server.asked)
    after, absent = client.ask(
        ("local", ["hf://o/m"]), ("local", ["hf://o/other"]), HF_HUB_OFFLINE="1"
    )
    assert after == before and len(server.asked) == count
    assert absent[0] == "FileNotFoundError" and "cannot fetch hf://o/other" in absent[1]


@pytest.mark.all
def test_what_the_hub_does_not_have_or_not_give(served):
    server, client = served
    server.put("models/o/gated", "1", MODEL)
    server.gated.add("models/o/gated")
    absent, revision, closed = client.ask(
        ("local", ["hf://o/none"]), ("local", ["hf://o/gated@v9"]), ("local", ["hf://o/gated"]),
    )
    assert absent[0] == "FileNotFoundError" and "the hub has no model hf://o/none" in absent[1]
    assert revision[0] == "ValueError" and closed[0] == "ValueError" and "HF_TOKEN" in closed[1]
    wrong, = client.ask(("local", ["hf://o/gated"]), HF_TOKEN="hf_wrong")
    assert wrong[0] == "ValueError" and "hf_wrong" not in wrong[1]
    [folder] = client.ask(("local", ["hf://o/gated"]), HF_TOKEN=server.token)
    assert folder.endswith("1" * 40)


# Commits


def test_pins_take_the_newest_commit_and_keep_an_older_one(asked):
    server, client = asked
    server.put("models/o/pinned", "1", MODEL)
    server.put("datasets/o/pinned", "2", {"train.jsonl": b""})
    values = {"model": {"path": "hf://o/pinned"}, "task": ["hf://datasets/o/pinned/train", "local", 3]}
    [first] = client.ask(("pins", [values]))
    assert first == {
        "hf://o/pinned": "hf://o/pinned@" + "1" * 40,
        "hf://datasets/o/pinned/train": "hf://datasets/o/pinned@" + "2" * 40 + "/train",
    }
    server.put("models/o/pinned", "3", MODEL)
    count = len(server.asked)
    again, newest, same = client.ask(
        ("pins", [values, first]), ("pins", [values]),
        ("pins", [{"a": "hf://o/pinned@" + "1" * 40}]),
    )
    assert again == first
    assert newest["hf://o/pinned"] == "hf://o/pinned@" + "3" * 40
    assert list(same.values()) == ["hf://o/pinned@" + "1" * 40]
    of_data = [a for a in server.asked[count:] if "datasets" in a and "revision" in a]
    assert len(of_data) == 1  # by the second call alone


@pytest.mark.all
def test_a_branch_keeps_its_commit_too(served):
    server, client = served
    server.put("models/o/m", "1", MODEL)
    values = ["hf://o/m@main"]
    [first] = client.ask(("pins", [values]))
    assert first == {"hf://o/m@main": "hf://o/m@" + "1" * 40}
    server.put("models/o/m", "3", MODEL)
    again, other = client.ask(("pins", [values, first]), ("pins", [["hf://o/m"], first]))
    assert again == first and other == {"hf://o/m": "hf://o/m@" + "3" * 40}


@pytest.mark.cases("429")
@pytest.mark.parametrize("status", [429, pytest.param(503, marks=pytest.mark.all)])
def test_a_busy_hub_is_asked_again_later(served, status):
    server, client = served
    server.put("models/o/m", "1", MODEL)
    server.status = status
    done = client.run("-m", "jaxrl_tis.main", "--config=tests/small_run.py",
                      f"--workdir={client.home}/run", "--config.model.path=hf://o/m")
    assert done.returncode == 42 and "did not send hf://o/m" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["ReadTimeout", "ConnectError", "RemoteProtocolError", "ProxyError"])
def test_a_connection_that_breaks_is_made_again_later(monkeypatch, name):
    [base] = [c for c in errors.HfHubHTTPError.__mro__ if c.__name__ == "HTTPError"]
    broken = getattr(sys.modules[base.__module__.partition(".")[0]], name)

    def download(*args, **options):
        raise broken("gone")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(cli.Interrupted, match="the connection to the hub broke while it sent hf://o/m: gone"):
        hub.local("hf://o/m")


def parquet_of(rows):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


def sums(shift):
    return parquet_of([
        {"prompt": f"{i}+{shift}=", "answer": f"{i + shift}", "id": f"{i}"} for i in range(8)
    ])


@pytest.mark.all
def test_a_run_goes_on_with_the_commit_that_it_began_with(served, tmp_path):
    server, client = served
    server.put("datasets/o/d", "1", {"train-0.parquet": sums(1), "test-0.parquet": sums(2)})
    run = lambda steps: client.run(
        "-m", "jaxrl_tis.main", "--config=tests/small_run.py", f"--workdir={tmp_path / 'run'}",
        "--config.task.name=jsonl", "--config.task.params.path=hf://datasets/o/d/train",
        "--config.eval.params.path=hf://datasets/o/d/test", "--config.warmup.steps=0",
        f"--config.steps={steps}",
    )
    first = run(1)
    assert first.returncode == 0, first.stderr
    held = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert held["task"]["params"]["path"] == "hf://datasets/o/d@" + "1" * 40 + "/train"
    assert held["eval"]["params"]["path"] == "hf://datasets/o/d@" + "1" * 40 + "/test"
    server.put("datasets/o/d", "2", {"train-0.parquet": sums(3), "test-0.parquet": sums(4)})
    second = run(2)
    assert second.returncode == 0, second.stderr
    assert "after step 1" in second.stdout
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["task"] == held["task"]
