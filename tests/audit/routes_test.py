"""Routes of dumps: every format is read as it was written, flips are counted by hand, and each planted
fault is found, alone, in records that are without fault before."""

import base64
import gzip
import json
import pathlib
import re

import numpy as np
import pytest

from jaxrl_tis.audit import dump, measure, page, route_faults, route_pairs, routes, table, verdict
from jaxrl_tis.audit.__main__ import main
from jaxrl_tis.diagnostics import routes as metrics_of
from tests.audit import dumps, routed
from tests.audit.routed import (
    COUNT, LENGTH, NUM_CHOSEN, NUM_EXPERTS, NUM_LAYERS, PROMPT, TURN, Batch,
)

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "audit.md"


@pytest.fixture(scope="module")
def batch():
    return Batch()


def found(path, num_experts=None, shape=None):
    """(layout, sides, faults, comparison) of a file, without the metrics that are compiled."""
    read = dump.read(str(path), routes_shape=shape)
    layout = routes.lay(read)
    sides = [routes.side(name, read.routes[c], layout) for c, name in routes.SIDES.items()
             if c in read.routes]
    _, faults, comparison = routes.compare(sides, layout, num_experts)
    return layout, sides, faults, comparison


def faults(lines, tmp_path, **options):
    """name -> title and advice"""
    told = found(dumps.write(tmp_path / "d.jsonl", lines), **options)[2]
    assert len({fault["name"] for fault in told}) == len(told)
    return {fault["name"].removeprefix("routes."): f"{fault['title']}. {fault['advice']}" for fault in told}


# Formats


def encoded(rows, dtype):
    return base64.b64encode(np.ascontiguousarray(rows, dtype).tobytes()).decode()


def of_vllm(rows):
    return {"data": encoded(rows, "uint8"), "shape": list(rows.shape), "dtype": "uint8", "start": 0}


def of_vllm_without_prompt(rows):
    rows = rows[PROMPT:]
    return {"data": encoded(rows, "uint16"), "shape": list(rows.shape), "dtype": "torch.uint16",
            "start": PROMPT}


def with_row(value):
    """Rows of all n tokens: the last is no route."""
    return lambda rows: np.concatenate([rows, np.full_like(rows[:1], value)])


def with_copy(rows):
    return np.concatenate([rows, rows[-1:]])


def with_dense_layer(rows):
    """sglang-jax counts all layers of the model."""
    return np.concatenate([np.zeros_like(rows[:, :1]), rows], axis=1)


FORMATS = {
    "vLLM choices, SkyRL, slime": lambda rows: rows,
    "vLLM generate": of_vllm,
    "vLLM generate, from the answer on": of_vllm_without_prompt,
    "SGLang": lambda rows: encoded(rows, "int32"),
    "SGLang, dense layer": lambda rows: encoded(with_dense_layer(rows), "int32"),
    "verl": with_row(0),
    "NeMo-RL, Tunix": with_row(-1),
    "verifiers": with_copy,
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_clean_record_of_each_format_has_no_fault(batch, tmp_path, name):
    form, is_dense = FORMATS[name], name.endswith("dense layer")
    records = [[form(rows) for rows in side] for side in (batch.sampler, batch.learner)]
    shape = (NUM_LAYERS + is_dense, NUM_CHOSEN)
    path = dumps.write(tmp_path / "d.jsonl", batch.lines(*records))
    layout, sides, told, comparison = found(path, shape=shape)
    assert told == []
    start = PROMPT if "from the answer" in name else 0
    for side, rows in zip(sides, (batch.sampler, batch.learner), strict=True):
        assert side.constant == [0] * is_dense
        np.testing.assert_array_equal(side.ids[layout.row >= start], rows[:, start:].reshape(-1, NUM_LAYERS, NUM_CHOSEN))
    both = metrics_of.overlap(batch.sampler, batch.learner)[:, start:].reshape(-1, NUM_LAYERS)
    np.testing.assert_array_equal(comparison.shared[layout.row >= start], both)
    assert comparison.is_compared.sum() == len(both)


def test_shared_experts():
    """In any order; an unset id is that of no expert."""
    a, b = np.array([[[3, 1, 2], [4, -1, 5]]]), np.array([[[1, 9, 3], [-1, 5, 7]]])
    assert route_pairs.shared(a, b).tolist() == [[2, 1]]
    np.testing.assert_array_equal(route_pairs.shared(a[:, :1], b[:, :1]),
                                  metrics_of.overlap(a[None, :, :1], b[None, :, :1])[0])


@pytest.mark.parametrize("side", ["sampler", "learner"])
def test_one_side_without_fault(batch, tmp_path, side):
    kept = {"sampler": "routes_old", "learner": "routes_behav"}[side]
    lines = [{k: x for k, x in line.items() if k != kept} for line in batch.lines()]
    assert faults(lines, tmp_path) == {}


def test_a_padded_npz_is_the_jsonl(batch, tmp_path):
    """Rows of -1 fill the array."""
    fill = lambda x, n: np.concatenate([x, np.full((COUNT, n, *x.shape[2:]), -1)], axis=1)
    np.savez(tmp_path / "d.npz", logp_behav=batch.logp[:, PROMPT:], logp_old=batch.logp[:, PROMPT:],
             mask=batch.mask[:, PROMPT:], prompt_tokens=np.full(COUNT, PROMPT),
             routes_behav=fill(batch.sampler, 9), routes_old=fill(batch.learner, 1))
    layout, sides, told, _ = found(tmp_path / "d.npz")
    assert told == [] and layout.num_tokens.tolist() == [LENGTH] * COUNT
    np.testing.assert_array_equal(sides[0].ids, batch.sampler.reshape(-1, NUM_LAYERS, NUM_CHOSEN))


def test_rows_stand_at_the_tokens_that_they_predict(tmp_path):
    """Context a b C D e F, of which the policy sampled C, D and F: rows 1, 2 and 4 predict them. In
    the second dump the prompt stands in the sequence, masked."""
    rows = [[[t, t + 1]] for t in range(5)]
    short = {"logp_behav": [-1, -2, 0, -3], "mask": [1, 1, 0, 1], "prompt_tokens": 2, "routes_behav": rows}
    whole = {"logp_behav": [0, 0, -1, -2, 0, -3], "mask": [0, 0, 1, 1, 0, 1], "prompt_tokens": 2,
             "routes_behav": rows}
    for i, (line, of_token) in enumerate(((short, [1, 2, 3, 4]), (whole, [-1, 0, 1, 2, 3, 4]))):
        path = dumps.write(tmp_path / f"{i}.jsonl", [line | {"logp_old": line["logp_behav"]}])
        layout = routes.lay(dump.read(path))
        assert layout.of_token.tolist() == of_token and layout.row.tolist() == [0, 1, 2, 3, 4]
        assert layout.num_tokens == 6 and layout.is_boundary.tolist() == [0, 0, 0, 1, 0]
        assert layout.logp.tolist() == [0, -1, -2, 0, -3]


@pytest.mark.all
def test_flips_stand_at_positions_of_the_response_and_at_layers_of_the_record(tmp_path):
    """The first token has no route of the sampler, the third flips; layer 0 is no router."""
    behav = [[[-1, -1], [-1, -1]], [[0, 0], [0, 1]], [[0, 0], [2, 3]]]
    old = [[[0, 0], [4, 5]], [[0, 0], [0, 1]], [[0, 0], [2, 4]]]
    line = {"logp_behav": [-1.0] * 3, "logp_old": [-1.0] * 3, "prompt_tokens": 1}
    lines = [line | {"routes_behav": behav, "routes_old": old}] * 32
    report = measure.measure(dump.read(dumps.write(tmp_path / "d.jsonl", lines)))
    flips = {
        name.removeprefix("mismatch/route_flip_"): x for name, x in report["metrics"].items()
        if name.startswith("mismatch/route_flip_")
    }
    assert flips["position_1"] == 0 and flips["position_2"] == 1 and "position_0" not in flips
    assert flips["layer_1"] == 0.5 and "layer_0" not in flips


LINE = {"logp_behav": [-1.0, -2.0], "logp_old": [-1.0, -2.0], "prompt_tokens": 1}
GOOD = {"data": encoded([[[1, 2]]], "int16"), "shape": [1, 1, 2], "dtype": "int16"}


@pytest.mark.parametrize("line, message", [
    ({"routes_behav": [[1, 2]]}, "routes_behav: not rows of [L,k] expert ids"),
    ({"routes_behav": [[[1, 2]], [[1]]]}, "routes_behav: not rows of [L,k] expert ids"),
    ({"routes_behav": [[[1.5, 2]]]}, "routes_behav: not rows of [L,k] expert ids"),
    ({"routes_behav": "AAAA"}, "does not state its shape; give --routes_shape=LAYERS,K"),
    ({"routes_behav": GOOD | {"data": "?"}}, "routes_behav: data is not base64"),
    ({"routes_behav": GOOD | {"shape": [2, 1, 2]}}, "4 bytes are not rows of [1, 2] ids of int16, 2 of"),
    ({"routes_behav": GOOD | {"dtype": "float32"}}, "dtype 'float32' is none of uint8"),
    ({"routes_behav": GOOD | {"shape": 3}}, "shape 3 is not [rows, L, k]"),
    ({"routes_behav": GOOD | {"start": -1}}, "start -1 is not a whole number from 0"),
    ({"routes_behav": {"data": ""}}, "the object lacks 'dtype'"),
    ({"routes_behav": [[[1, 2, 3]]]}, "routes_behav: rows of [1, 3] experts, but [1, 2] before"),
    ({"routes_behav": [[[1, 2]]], "prompt_tokens": -1}, "prompt_tokens: -1 is not a whole number from 0"),
])
def test_a_bad_record_is_named(tmp_path, line, message):
    lines = [LINE | {"routes_behav": [[[1, 2]]]}, LINE | line]
    with pytest.raises(ValueError) as error:
        dump.read(dumps.write(tmp_path / "d.jsonl", lines))
    assert "line 2, " in str(error.value) and message in str(error.value)


def test_routes_need_the_length_of_the_prompt(tmp_path):
    lines = [{"logp_behav": [-1.0], "logp_old": [-1.0], "routes_behav": []}]
    with pytest.raises(ValueError, match="column 'prompt_tokens' is missing; routes count"):
        dump.read(dumps.write(tmp_path / "d.jsonl", lines))


@pytest.mark.parametrize("flag", ["--routes_shape=4", "--routes_shape=0,2", "--num_experts=0"])
def test_bad_flags(flag, capsys):
    with pytest.raises(SystemExit) as end:
        main(["d.jsonl", flag])
    assert end.value.code == 2 and "write it as in 48,8" in (told := capsys.readouterr().err) or (
        "is not a whole number from 1" in told)


# Faults. Each is planted in the sampler's record, unless it says otherwise.


def planted(batch, tmp_path, change, **options):
    """The faults of a record that `change` changed in place, or that it returns."""
    rows = batch.sampler.copy()
    changed = change(rows)
    return faults(batch.lines(rows if changed is None else changed), tmp_path, **options)


def put(place, value):
    """Sets the rows at a place; `value` may be a function of them."""
    def change(rows):
        rows[place] = value(rows).copy() if callable(value) else value

    return change


DISTINCT = np.arange(10 * NUM_LAYERS * NUM_CHOSEN).reshape(10, NUM_LAYERS, NUM_CHOSEN) % NUM_EXPERTS
ZEROS = "of 774 rows of the sampler are all zeros"
PLANTED = {  # a change of the sampler's rows, the fault, the beginning of its words or a part of them
    "dropped": (lambda rows: [None, [], np.full_like(rows[2], -1), *rows[3:]], "none",
                "^3 of 6 sequences have no route of the sampler"),
    "last rows missing": (lambda rows: [rows[0][:-1], rows[1][:-20], *rows[2:]], "short",
                          "2 of 6 sequences lack rows of the sampler at the end, 1 to 20"),
    "stale rows after the last token": (lambda rows: [np.concatenate([x, x[:7]]) for x in rows], "surplus",
                                        "6 of 6 sequences have 6 to 6 rows"),
    "marked as missing": (put((2, slice(30, 34)), -1), "missing",
                          r"^4 of 774 rows of the sampler are missing \(-1\)\. "),
    "bug 5": (put((slice(None), TURN - 1), 0), "zero_rows", f"^6 {ZEROS}, all of them the last token of a turn"),
    "bug 4": (put((slice(None), slice(0, PROMPT)), 0), "zero_rows", f"^120 {ZEROS}, all of them in prompts"),
    "bug 8": (put((slice(2, 4), PROMPT - 1), 0), "zero_rows",
              f"^2 {ZEROS}, all of them the last token of a prompt"),
    "zeros anywhere": (put((1, slice(30, 40)), 0), "zero_rows", rf"^10 {ZEROS}\. Placeholders"),
    "bug 3, rows of padding among the rows": (put((3, slice(50, 60)), DISTINCT), "padding_rows",
                                              "^10 of 774 rows"),
    "an expert twice": (put((4, 9, 2), 3), "duplicates", "^1 of 774 rows"),
    "layers that one side alone counts": (
        lambda rows: [with_dense_layer(x) for x in rows], "layers",
        "5 layers of the sampler, of which 0 with one route in every row and 4 layers of the learner"),
    "a router that is not captured": (  # both count four layers; the others are compared
        put((slice(None), slice(None), 2), [3, 5, 9]), "layers",
        "4 layers of the sampler, of which 2 with one route"),
    "another model": (lambda rows: rows[:, :, :3], "layers", "3 routers of 3 experts and the learner 4 routers"),
    "bug 12, a row is there twice, in two sequences": (
        put((slice(1, 3), slice(45, None)), lambda rows: rows[1:3, 44:-1]), "shifted_from",
        r"in 2 of 6 sequences the sampler's rows stand 1 row too late from some row on\. "),
    "bug 10, a prefix of the cache that was another's": (
        put((2, slice(0, 80)), lambda rows: rows[3, :80]), "foreign", "in 1 of 6 sequences agree no better"),
    "unrelated": (lambda rows: rows[::-1], "unrelated", "and unrelated rows 2"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(batch, tmp_path, name):
    change, fault, words = PLANTED[name]
    told = planted(batch, tmp_path, change)
    assert set(told) == {fault} and re.search(words, told[fault])


def test_rows_of_text_after_the_last_token_are_no_surplus(batch, tmp_path):
    """A tool's text stands last, and has rows."""
    lines = batch.lines()
    for line in lines:
        line["mask"][-9:] = [0] * 9
    assert faults(lines, tmp_path) == {}


def test_padding_by_zeros(batch, tmp_path):
    """Bug 6; by distinct ids it is no fault."""
    pad = lambda rows, fill: [np.concatenate([x, fill]) for x in rows]
    zero = np.zeros((5, NUM_LAYERS, NUM_CHOSEN), int)
    told = planted(batch, tmp_path, lambda rows: pad(rows, zero))
    assert set(told) == {"zero_padding"} and told["zero_padding"].startswith("24 rows")  # and n - 1
    spread = np.arange(zero.size).reshape(zero.shape) % NUM_EXPERTS
    assert planted(batch, tmp_path, lambda rows: pad(rows, spread)) == {}


def test_zeros_of_routers_with_one_expert_are_found_unless_chance_may_make_them():
    rng = np.random.default_rng(0)
    for layers, num_found in ((1, 0), (6, 5)):  # of 16 experts: 1 / 16 and 1 / 16^6 of the rows
        ids = rng.integers(0, 16, (500, layers, 1))
        ids[:5] = 0
        assert route_faults.is_zero(ids, np.ones(500, bool)).sum() == num_found


def test_ids_that_no_expert_has(batch, tmp_path):
    def unset(rows):
        rows[0, 5, 1, 0] = -1
        rows[1, 5, 1, 0] = 16

    assert "1 ids of the sampler are outside the experts, from -1 to -1" in (
        planted(batch, tmp_path, unset)["range"])
    told = planted(batch, tmp_path, unset, num_experts=16)
    assert set(told) == {"range"} and "2 ids of the sampler are outside the experts, from -1 to 16" in told["range"]


@pytest.mark.parametrize("shift, words", [(1, "1 row too late: shifted by -1"), (-2, "2 rows too early: shifted by 2")])
def test_rows_that_are_shifted(batch, tmp_path, shift, words):
    told = planted(batch, tmp_path, lambda rows: np.roll(rows, shift, axis=1))
    assert set(told) == {"shifted"} and words in told["shifted"]
    comparison = found(tmp_path / "d.jsonl")[3]
    assert comparison.shift == shift and comparison.shifts[shift] > 0.9 > 0.4 > comparison.shifts[0]


def test_rows_that_are_shifted_after_a_turn(tmp_path):
    """Bugs 5 and 14: each answer is too short to tell, all together are not."""
    batch = Batch()
    batch.sampler[:, TURN + 40 : -1] = batch.learner[:, TURN + 40 : -1]
    batch.mask[:, TURN:] = 0
    batch.mask[:, TURN + 40 :] = 1  # twenty tokens are the second turn
    def late(rows):
        rows[:, TURN + 40 : -1] = rows[:, TURN + 41 :].copy()

    assert faults(batch.lines(), tmp_path) == {}
    told = planted(batch, tmp_path, late)
    assert set(told) == {"shifted_turns"}
    assert told["shifted_turns"].startswith("after the first turn the sampler's rows stand 1 row too early")


@pytest.mark.parametrize("is_sampler", [True, False])
def test_one_side_is_read_in_another_order(batch, tmp_path, is_sampler):
    """Bug 1: [tokens, batch] read as [batch, tokens], shapes equal."""
    turn = lambda rows: rows.swapaxes(0, 1).reshape(rows.shape)
    back = lambda rows: rows.reshape(rows.shape[1], COUNT, NUM_LAYERS, NUM_CHOSEN).swapaxes(0, 1)
    for change in (turn, back):
        changed = {"sampler" if is_sampler else "learner": change(
            batch.sampler if is_sampler else batch.learner)}
        told = faults(batch.lines(**changed), tmp_path)
        assert set(told) == {"transposed"} and "as recorded 1" in told["transposed"]


def stale(rows):
    rows[1:4, 33:100] = rows[1:4, 32:33]


def test_one_route_over_many_tokens(batch, tmp_path):
    """Bug 7: 68 rows in each of three sequences, beside a loop of 70 equal tokens."""
    told = planted(batch, tmp_path, stale)
    assert set(told) == {"repeated", "foreign"}  # the learner has other experts there
    assert "the sampler repeats one route over up to 68 consecutive tokens (such runs: 3;" in told["repeated"]
    assert "learner repeats" not in told["repeated"]
    lines = [{k: x for k, x in line.items() if k != "routes_old"} for line in stale_lines(batch)]
    assert set(faults(lines, tmp_path)) == {"repeated"}


def stale_lines(batch):
    rows = batch.sampler.copy()
    stale(rows)
    return batch.lines(rows)


def test_a_short_run_is_found_where_the_learner_chose_other_experts(batch, tmp_path):
    def again(rows):
        rows[4, 62:68] = rows[4, 61]

    told = planted(batch, tmp_path, again)
    assert set(told) == {"repeated"} and "up to 7 consecutive" in told["repeated"]
    assert "sequence 4 from row 61" in told["repeated"]
    lines = [{k: x for k, x in line.items() if k != "routes_old"} for line in json_lines(tmp_path)]
    assert faults(lines, tmp_path) == {}  # seven tokens of one nat may be equal


def json_lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]


def test_routers_that_repeat_themselves_are_no_fault(tmp_path):
    """Two routers of three experts: runs of equal rows are frequent, also of unlikely tokens."""
    rng = np.random.default_rng(1)
    for skew in ((1, 1, 1), (60, 1, 1)):
        p = np.array(skew) / sum(skew)
        rows = rng.choice(3, (COUNT, LENGTH - 1, 2, 1), p=p)
        told = faults([
            {"logp_behav": [-9.0] * (LENGTH - PROMPT), "logp_old": [-9.0] * (LENGTH - PROMPT),
             "prompt_tokens": PROMPT, "routes_behav": x.tolist()} for x in rows], tmp_path)
        assert told == {}


@pytest.mark.parametrize("seed", range(1, 6))
def test_other_batches_have_no_fault(tmp_path, seed):
    assert faults(Batch(seed).lines(), tmp_path) == {}


@pytest.mark.parametrize("count", [20, pytest.param(600, marks=pytest.mark.all)])
def test_random_dumps_have_no_fault(tmp_path, count):
    """Each alarms in at most one of a thousand."""
    alarms = []
    for seed in range(count):
        lines = routed.random_dump(np.random.default_rng(seed))
        alarms += [(seed, fault["name"]) for fault in found(dumps.write(tmp_path / "d.jsonl", lines))[2]]
    assert alarms == []


# The report


@pytest.fixture(scope="module")
def told(batch, tmp_path_factory):
    """The report of a dump with stale rows."""
    path = dumps.write(tmp_path_factory.mktemp("routes") / "d.jsonl", stale_lines(batch))
    report = measure.measure(dump.read(path), num_experts=NUM_EXPERTS)
    return report | {"doctor": verdict.verdict(report)}


@pytest.mark.all
def test_the_metrics_are_those_of_the_policys_tokens(told, batch):
    rows = batch.sampler.copy()
    stale(rows)
    is_valid = batch.mask[:, PROMPT:] > 0  # token t is predicted by row t - 1
    pairs = rows[:, PROMPT - 1 :][is_valid], batch.learner[:, PROMPT - 1 :][is_valid]
    flips = np.array([[set(a) != set(b) for a, b in zip(*layers, strict=True)]
                      for layers in zip(*pairs, strict=True)])
    values = told["metrics"]
    assert values["mismatch/route_flip_token"] == pytest.approx(flips.any(axis=1).mean(), rel=1e-5)
    for layer in range(NUM_LAYERS):
        rate = flips[:, layer].mean()
        assert values[f"mismatch/route_flip_layer_{layer}"] == pytest.approx(rate, rel=1e-5)
    first = flips[np.cumsum(is_valid.sum(axis=1)) - is_valid.sum(axis=1)]
    assert values["mismatch/route_flip_position_0"] == pytest.approx(first.mean(), rel=1e-5)
    assert values["mismatch/route_flip_layer_1_position_0"] == pytest.approx(first[:, 1].mean(), rel=1e-5)


def test_the_report_says_it(told):
    text = " ".join(table.text(told).split())
    for words in (
        "sampler 774 of 774 rows in 6 sequences; 4 layers, 3 of 16 experts",
        f"tokens that flip {told['metrics']['mismatch/route_flip_token']:.2%}", "flips by layer 0: ",
        "gap, unflipped 0 nats", "same experts by shift of the sampler's rows -2: ",
        "faults of the records: 2, see the verdict", "routes.repeated: the sampler repeats one route",
    ):
        assert words in text, words
    assert told["doctor"]["verdict"][:2] == ["routes.foreign", "routes.repeated"]
    assert "healthy" not in told["doctor"]["verdict"]
    assert {f["name"] for f in told["doctor"]["findings"]} >= {"routes.foreign", "routes.repeated"}


def test_the_page_has_a_picture_of_the_flips(told):
    text = page.page(told)
    assert "Flips by layer and position" in text and "routes.repeated" in text


def test_one_side_has_no_comparison(batch, tmp_path):
    lines = [{k: x for k, x in line.items() if k != "routes_old"} for line in batch.lines()]
    report = measure.measure(dump.read(dumps.write(tmp_path / "d.jsonl", lines)))
    report["doctor"] = verdict.verdict(report)
    text = table.text(report)
    assert "Nothing is compared: flips need routes_behav and routes_old" in text
    assert "faults of the records: none" in text and "mismatch/route_flip_token" not in report["metrics"]
    assert report["doctor"]["verdict"] == ["healthy"]


def test_the_dump_of_the_page_is_that_of_its_writer():
    text = gzip.decompress(routed.EXAMPLE.read_bytes()).decode()
    assert [json.loads(line) for line in text.splitlines()] == routed.example()


@pytest.mark.all
def test_the_page_has_what_the_command_prints(monkeypatch, capsys):
    """Of the section of routes: its lines, in order, between the dots."""
    monkeypatch.chdir(PAGE.parents[1])
    section = PAGE.read_text().split("## Routes of experts\n")[1].split("\n## ")[0]
    command, printed = (block.splitlines() for block in section.split("```")[1:4:2])
    main(command[1].split()[3:])
    lines = iter(capsys.readouterr().out.splitlines())
    missing = [line for line in printed[1:] if line not in ("...", "") and line not in lines]
    assert len(printed) > 15 and missing == []
