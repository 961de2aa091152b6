"""Workdirs on a bucket. The bucket is a server on 127.0.0.1 that speaks the protocol of Google Cloud
Storage; gcsfs and TensorStore, which Orbax writes arrays through, are the real ones."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import gcsfs
import pytest

from jaxrl_tis import sweep
from jaxrl_tis.data import tasks
from jaxrl_tis.runtime import cli, storage
from tests import forked, gcs_server, tiny
from tests.runtime.hub_test import parquet_of


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    with gcs_server.serving() as (found, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        gcsfs.GCSFileSystem.clear_instance_cache()
        yield found
        gcsfs.GCSFileSystem.clear_instance_cache()


# Paths


def test_a_folder_of_this_machine_does_not_depend_on_where_one_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(storage.folder("a/b")) == str(tmp_path / "a" / "b")
    mirror = storage.Mirror("a/b")
    assert mirror.folder == pathlib.Path("a/b") and not storage.is_remote("a/b")


@pytest.mark.parametrize("utf8, is_refused", [("0", True), ("1", False)])
def test_a_path_that_libraries_read_otherwise_is_refused(utf8, is_refused):
    environment = {"LC_ALL": "C", "PYTHONUTF8": utf8, "PYTHONCOERCECLOCALE": "0"}
    code = "import sys; from jaxrl_tis.runtime import cli, storage; cli.run(lambda: storage.folder(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "läufe".encode()], env=os.environ | environment,
        capture_output=True, text=True,
    )
    assert done.returncode == (2 if is_refused else 0), done.stderr
    assert ("is no text in this locale, whose file names are ascii" in done.stderr) == is_refused


def test_an_empty_path_is_not_the_folder_one_is_in():
    with pytest.raises(ValueError, match="is empty; give a folder, such as ."):
        storage.folder("")


@pytest.mark.parametrize("path", ["s3://bucket/x", "hf://a/b", "gs://", "gs:///x"])
def test_other_buckets_are_refused(path):
    with pytest.raises(ValueError, match="give a local folder or gs://BUCKET/FOLDER"):
        storage.folder(path)


def test_without_the_package_the_message_says_which(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ImportError, match=r"gcsfs: pip install 'jaxrl_tis\[gcs\]'"):
        storage.folder("gs://bucket/x")


def test_a_file_is_written_all_or_nothing(tmp_path, bucket):
    for path in (tmp_path / "a.json", storage.folder("gs://bucket/a.json")):
        storage.write_json(path, {"b": 1})
        assert json.loads(path.read_text()) == {"b": 1}
    assert sorted(p.name for p in tmp_path.glob("a*")) == ["a.json"]
    with pytest.raises(ValueError):
        storage.write_json(tmp_path / "a.json", float("nan"))
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": 1}


# Files that grow


def test_a_mirror_copies_what_changed(bucket):
    mirror = storage.Mirror("gs://bucket/run")
    mirror.fetch()
    (mirror.folder / "metrics.jsonl").write_text("1\n")
    (mirror.folder / "stacks").mkdir()
    (mirror.folder / "stacks" / "a.txt").write_text("stack")
    (mirror.folder / "lock").write_text("mine")
    mirror.upload()
    assert bucket.names() == ["run/metrics.jsonl", "run/owner.json", "run/stacks/a.txt"]
    generations = {name: held[1] for name, held in bucket.objects.items()}
    with open(mirror.folder / "metrics.jsonl", "a") as file:
        file.write("2\n")
    mirror.upload()
    assert bucket.objects["run/metrics.jsonl"][0] == b"1\n2\n"
    changed = [n for n, held in bucket.objects.items() if generations[n] != held[1]]
    assert changed == ["run/metrics.jsonl"]


def test_another_machine_begins_with_what_was_copied(bucket, monkeypatch, tmp_path):
    bucket.put("run/metrics.jsonl", b"1\n")
    bucket.put("run/tensorboard/events.1", b"e")
    bucket.put("run/checkpoints/3/manifest.json", b"{}")
    bucket.put("run/base/checkpoints/0/manifest.json", b"{}")
    mirror = storage.Mirror("gs://bucket/run")
    mirror.folder.mkdir(parents=True)
    (mirror.folder / "metrics.jsonl").write_text("of an older run\n")
    (mirror.folder / "samples.jsonl").write_text("of an older run\n")
    (mirror.folder / "stacks").mkdir()
    (mirror.folder / "stacks" / "a.txt").write_text("where it hung")
    mirror.fetch()
    found = {str(p.relative_to(mirror.folder)): p.read_bytes()
             for p in mirror.folder.rglob("*") if p.is_file()}
    assert found == {"metrics.jsonl": b"1\n", "tensorboard/events.1": b"e",
                     "stacks/a.txt": b"where it hung"}
    mirror.upload()
    assert bucket.objects["run/stacks/a.txt"][0] == b"where it hung"


def test_two_runs_of_one_name_have_folders_of_their_own(bucket):
    folders = {storage.Mirror(f"gs://bucket/{name}").folder for name in ("a/run", "b/run", "a/run2")}
    assert len(folders) == 3


def test_a_run_that_was_taken_over_stops(bucket, monkeypatch, tmp_path):
    first = storage.Mirror("gs://bucket/run")
    first.fetch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    second = storage.Mirror("gs://bucket/run")
    second.fetch()
    (first.folder / "metrics.jsonl").write_text("late\n")
    with pytest.raises(ValueError, match=f"taken over by process {os.getpid()} on .*this run stops"):
        first.upload()
    second.upload()
    assert "run/metrics.jsonl" not in bucket.names()


def test_a_run_that_is_alive_on_another_machine_is_not_disturbed(bucket, monkeypatch, tmp_path):
    monkeypatch.setattr(storage, "SIGN_SECONDS", 0.2)
    host = lambda: json.loads(bucket.objects["run/owner.json"][0])["host"]
    first = storage.Mirror("gs://bucket/run")
    first.fetch()
    before = host()
    monkeypatch.setattr(storage.socket, "gethostname", lambda: "another")
    monkeypatch.setattr(storage, "SIGNS", 50)
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on .*another --workdir"):
        storage.Mirror("gs://bucket/run").fetch()
    assert host() == before
    first._is_over.set()  # it dies
    monkeypatch.setattr(storage, "SIGNS", 5)
    time.sleep(1)
    with storage.Mirror("gs://bucket/run") as second:
        second.fetch()
        assert host() == "another"
    assert "run/owner.json" not in bucket.names()


def test_files_that_vanish_while_the_mirror_copies_are_not_its_own(bucket):
    """What is being written is renamed at any moment."""
    mirror = storage.Mirror("gs://bucket/run")
    mirror.fetch()
    stop = threading.Event()

    def write():
        while not stop.is_set():
            storage.write_json(mirror.folder / "heartbeat.json", {"a": 1})

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(40):
            mirror.upload()
    finally:
        stop.set()
        thread.join()
    assert bucket.names() == ["run/heartbeat.json", "run/owner.json"]


@pytest.mark.parametrize("status, error", [(403, cli.Unwritable), (503, cli.Interrupted)])
def test_a_bucket_that_is_ill_is_tried_again_later(bucket, status, error, monkeypatch):
    from gcsfs.retry import HttpError

    mirror = storage.Mirror("gs://bucket/run")
    mirror.fetch()

    def fails():
        raise HttpError({"code": status, "message": "no"})

    monkeypatch.setattr(mirror, "_owner", fails)
    with pytest.raises(error, match="gs://bucket/run"):
        mirror.upload()


def test_data_on_a_bucket(bucket):
    line = b'{"prompt": "1+1=", "answer": "2", "id": "a"}\n'
    bucket.put("data/train.jsonl", line)
    bucket.put("data/train.parquet", parquet_of([{"prompt": "1+1=", "answer": "2", "id": "a"}]))
    for name in ("train.jsonl", "train.parquet"):
        source = tasks.make("jsonl", {"path": f"gs://bucket/data/{name}"})
        assert source[0] == {"prompt": "1+1=", "answer": "2", "id": "a"}
    with pytest.raises(FileNotFoundError, match="gs://bucket/data/none.jsonl is missing"):
        tasks.make("jsonl", {"path": "gs://bucket/data/none.jsonl"})


def test_a_glob_on_a_bucket(bucket):
    for name in ("b", "a"):
        bucket.put(f"data/part-{name}.jsonl", b'{"prompt": "%s"}\n' % name.encode())
    bucket.put("data/other.jsonl", b'{"prompt": "x"}\n')
    source = tasks.make("jsonl", {"path": "gs://bucket/data/part-*.jsonl"})
    assert [source[i]["prompt"] for i in range(len(source))] == ["a", "b"]
    assert source[0]["id"] == "gs://bucket/data/part-a.jsonl:1"
    with pytest.raises(FileNotFoundError, match="no file has such a name"):
        tasks.make("jsonl", {"path": "gs://bucket/data/none-*.jsonl"})


def test_the_end_copies_once_more_and_hides_no_error(bucket):
    with storage.Mirror("gs://bucket/run") as mirror:
        mirror.fetch()
        (mirror.folder / "report.html").write_text("page")
    assert bucket.objects["run/report.html"][0] == b"page"
    bucket.before = lambda method, name: 403
    with pytest.raises(KeyError, match="the error"):
        with mirror:
            (mirror.folder / "report.html").write_text("page 2")
            raise KeyError("the error")
    with pytest.raises(cli.Unwritable, match="gs://bucket/run cannot be used: "):
        with mirror:
            pass


def test_a_sweep_on_a_bucket_has_its_table_there(bucket, capsys):
    record = '{"step": 2, "phase": "eval", "eval/greedy_accuracy": 0.5, "eval/n": 100}\n'
    job = sweep.Job("a", 0, "gs://bucket/sweep/a-seed0", (), 2)
    (storage.folder(job.workdir) / "metrics.jsonl").write_text(record)
    sweep._run_all([job], "gs://bucket/sweep", 1)
    assert b"| a | 1 | 0.5 [" in bucket.objects["sweep/table.md"][0]
    assert b"<html" in bucket.objects["sweep/report.html"][0]
    assert str(job.log) == "runs/bucket/sweep/a-seed0.log"


def test_in_a_local_workdir_nothing_is_copied(tmp_path):
    with storage.Mirror(tmp_path / "run") as mirror:
        mirror.fetch()
        mirror.folder.mkdir()
        (mirror.folder / "metrics.jsonl").write_text("1\n")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


# Runs


def start(workdir, cache):
    command = ["-m", "jaxrl_tis.main", "--config=tests/small_run.py", f"--workdir={workdir}"]
    return forked.Command(command, cache.with_suffix(".log"), {"XDG_CACHE_HOME": str(cache)})


@pytest.mark.all
def test_a_lost_machine_loses_the_steps_since_the_last_checkpoint_and_no_more(bucket, tmp_path):
    """The first machine dies while it writes its third checkpoint; another one goes on."""
    process = start("gs://bucket/run", cache=tmp_path / "machine1")

    def die(method, name):
        if name.startswith("run/checkpoints/3/"):
            process.kill()

    bucket.before = die
    assert process.wait(200) == -signal.SIGKILL, process.text()
    bucket.before = lambda method, name: None
    complete = [n for n in bucket.names("run/checkpoints") if n.endswith("/manifest.json")]
    assert complete == ["run/checkpoints/1/manifest.json", "run/checkpoints/2/manifest.json"]

    second = start("gs://bucket/run", cache=tmp_path / "machine2")
    assert second.wait(200) == 0, second.text()
    out = second.text()
    assert "continuing gs://bucket/run after step 2" in out and "report: gs://bucket/run" in out

    whole = start(tmp_path / "whole", cache=tmp_path / "machine3")
    assert whole.wait(200) == 0, whole.text()
    (tmp_path / "metrics.jsonl").write_bytes(bucket.objects["run/metrics.jsonl"][0])
    assert tiny.lines(tmp_path) == tiny.lines(tmp_path / "whole")
    assert {"run/config.json", "run/report.html"} <= set(bucket.names())
    assert bucket.names("run/tensorboard/") and not bucket.names("run/lock")

    command = ["-m", "jaxrl_tis.report", "gs://bucket/run", "--out", tmp_path / "page.html"]
    code, out = forked.run(command, tmp_path / "report.log")
    assert code == 0, out
    assert "<svg" in (tmp_path / "page.html").read_text()


@pytest.mark.all
def test_a_bucket_that_may_not_be_written_ends_with_2(bucket, tmp_path):
    bucket.before = lambda method, name: 403 if method != "GET" else None
    process = start("gs://bucket/run", cache=tmp_path / "machine")
    assert process.wait(200) == 2 and "Traceback" not in process.text(), process.text()
