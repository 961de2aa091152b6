"""The page holds every run, every plot that has data, and nothing fetched from elsewhere."""

import html.parser
import math
import re

import numpy as np
import pytest

from jaxrl_tis.record import failures, metrics
from jaxrl_tis.record.provenance import write_run_files
from jaxrl_tis.report import plots
from jaxrl_tis.report.__main__ import main
from jaxrl_tis.report.page import load, write

GREEDY = "eval/greedy_accuracy"


class Page(html.parser.HTMLParser):
    """Collects what a reader sees: figures, the words inside each, table rows, links."""

    def __init__(self, text):
        super().__init__()
        self.open_tags, self.figures, self.rows, self.headings = [], [], [], []
        self.links, self.detail_words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "br"):
            self.open_tags.append(tag)
        if tag == "figure":
            self.figures.append([])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.links += [value for name, value in attributes if name in ("href", "src", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag, f"</{tag}> closes another element"

    def handle_startendtag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("href", "src", "xlink:href")]

    def handle_data(self, data):
        if "svg" in self.open_tags and self.open_tags[-1] == "text":
            self.figures[-1].append(data.strip())
        if "table" in self.open_tags and self.open_tags[-1] in ("td", "th", "small"):
            self.rows[-1][-1] += data
        if self.open_tags and self.open_tags[-1] == "h2":
            self.headings.append(data)
        if "details" in self.open_tags:
            self.detail_words.append(data)


def make_run(workdir, steps, gap, name=None):
    if name is not None:
        write_run_files(workdir, {"name": name, "optimizer": {"lr": 1e-6}})
    with metrics.MetricsWriter(workdir) as writer:
        for step in range(steps + 1):
            if step in (0, steps):
                writer.write(step, "eval", {GREEDY: 0.2 + 0.3 * (step > 0), "eval/n": 100})
            if step:
                writer.write(step, "train", {
                    "reward/mean": step / steps, "reward/learner_snis": math.nan,
                    "training/rollout_probs_diff_max": gap * step,
                    "training/rollout_probs_diff_mean": gap / 2,
                    "rollout_corr/rollout_is_eff_sample_size": 1 - gap * step,
                    "time/rollout_s": 2.0, "time/update_s": 1.0, "time/step_s": 4.0,
                    "time/eval_s": 30.0 * (step == steps)})
    return workdir


@pytest.fixture(name="workdirs", scope="module")
def two_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / "int8 & $\\gamma$", 4, 0.125, name="tis<2>"),
            make_run(folder / "_exact", 60, 0.0)]


@pytest.fixture(name="page", scope="module")
def parsed_page(workdirs):
    out = workdirs[0] / "report.html"
    assert write(workdirs, out) == out
    return Page(out.read_text(encoding="utf-8"))


def test_every_plot_with_data_and_no_other(page):
    titles = [next(word for word in words if word in TITLES) for words in page.figures]
    assert titles == ["Reward", "Held-out accuracy, greedy", "Probability difference",
                      "Effective sample size", "Time per step", "Where the time went"]
    assert page.headings == ["Learning", "Sampler against learner", "Importance weights", "Time",
                             "Configuration",
                             "Answers"]
    assert page.open_tags == []


def test_changes_of_a_run_that_went_on_are_listed(workdirs, tmp_path):
    fields = {"optimizer.lr": [1e-4, 1e-5], "task.params.path": ["a.jsonl", "<b>"]}
    workdir = make_run(tmp_path / "changed", 2, 0.0)
    write_run_files(workdir, {"name": "x"}, changes=[{"step": 40, "fields": fields}])
    out = tmp_path / "report.html"
    write([workdirs[0], workdir], out)
    text = out.read_text(encoding="utf-8")
    assert "<p>changed was resumed with changes:</p>" in text and text.count("was resumed with changes") == 1
    assert "<li>after step 40: optimizer.lr 0.0001 → 1e-05</li>" in text
    assert "<li>after step 40: task.params.path &quot;a.jsonl&quot; → &quot;&lt;b&gt;&quot;</li>" in text
    assert "<p>" + "int8" not in text  # the other run had none


TITLES = {plot.title for plot in plots.PLOTS} | {"Where the time went"}


def test_both_runs_are_in_the_legend_of_every_plot(page):
    for words in page.figures:
        # The folder names as they are: no formula, no label lost to its underscore.
        assert "int8 & $\\gamma$" in words
        assert "\u200b_exact" in words
    assert {"sampler", "learner (SNIS)"} <= set(page.figures[0])
    assert {"largest", "mean", "training step", "probability"} <= set(page.figures[2])


def test_summary_table(page):
    columns = [cell.split(" accuracy")[0] for cell in page.rows[0]]
    first, second = (dict(zip(columns, row, strict=True)) for row in page.rows[1:])
    assert first["Run"] == "int8 & $\\gamma$" and second["Run"] == "_exact"
    assert (first["Config"], second["Config"]) == ("tis<2>", "–")
    assert (first["Steps"], second["Steps"]) == ("4", "60")
    assert first["Greedy"] == "20.0 % [13.3, 28.9] → 50.0 % [40.4, 59.6]"
    assert first["Sampled"] == "– → –"
    assert (first["Largest |Δp|"], first["Mean |Δp|"]) == ("0.5", "0.0625")
    assert (first["Final ESS"], second["Final ESS"]) == ("0.5", "1")
    # 4 steps of 4 s and one evaluation of 30 s; 60 x 4 + 30 = 270 s.
    assert (first["Time"], second["Time"]) == ("46s", "4m30s")


def test_config_is_shown(page):
    text = "".join(page.detail_words)
    assert '"lr": 1e-06' in text and '"name": "tis<2>"' in text and '"jax":' in text


def test_page_stands_alone(workdirs, page):
    text = (workdirs[0] / "report.html").read_text(encoding="utf-8")
    assert all(link.startswith("#") for link in page.links)
    assert re.findall(r"<script|@import|url\((?!#)", text) == []


def test_same_folder_name_twice_and_more_runs_than_colours(tmp_path):
    paths = [make_run(tmp_path / str(number) / "run", 1, 0.0) for number in range(8)]
    runs = load(paths)
    assert [run.label for run in runs] == [str(path) for path in paths]
    assert len({tuple(np.ravel(run.color)) for run in runs}) == 8


def test_run_without_training_yet(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    page = Page(write([tmp_path], tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.figures == []
    assert page.rows[1][2:] == ["–", "– → –", "– → –", "–", "–", "–", "–", "–", "0s"]


@pytest.mark.parametrize("content", ["[1]", "{}", '{"config": 3}'])
def test_a_config_of_something_else_is_named(content, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "phase": "train"}\n')
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match='no object under "config"'):
        load([tmp_path])


def test_missing_workdir_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write([tmp_path / "nowhere"], tmp_path / "report.html")
    with pytest.raises(ValueError, match="at least one"):
        load([])


def test_command_line_and_png(tmp_path, capsys):
    workdir = make_run(tmp_path / "run", 2, 0.1)
    main([str(workdir), "--png", str(tmp_path / "overview.png")])
    assert capsys.readouterr().out.split() == [str(workdir / "report.html"),
                                               str(tmp_path / "overview.png")]
    data = (tmp_path / "overview.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[start:start + 4], "big") for start in (16, 20))
    # Four plots have data: two rows of three columns, 12.6 x 6.2 inches at 110 dpi.
    assert (width, height) == (1386, 682)
    (tmp_path / "run" / "report.html").unlink()
    main([str(workdir), "--out", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").exists() and not (workdir / "report.html").exists()


def test_rewards_that_failed_are_a_table(tmp_path):
    make_run(tmp_path, 3, 0.1)
    assert "Failed rewards" not in Page(write([tmp_path], tmp_path / "a.html").read_text()).headings
    failed = failures.Failures(tmp_path / failures.FILE_NAME, lambda text: None)
    for i in range(2):
        failed.add("KeyError at f.py:3", "KeyError: '<gold>'", "Traceback of it", f"sum-{i}", "5 < 6")
    failed.write()
    page = Page(write([tmp_path], tmp_path / "b.html").read_text())
    assert "Failed rewards" in page.headings
    [row] = [row for row in page.rows if row[2:3] and "<gold>" in row[2]]
    assert row[1] == "2" and row[3].startswith("sum-1")
    assert "Traceback of it" in page.detail_words and "KeyError at f.py:3" in page.detail_words
