"""benchmarks/handover.py without Ray: the times that it reads from the calls of workers."""

from benchmarks import handover


def test_the_times_of_weight_syncs_by_hand():
    """Version 1 is published at 10.0. The workers sample with it until 12.5 and 13.0: a sync of 3.0.
    The first pauses from 12.0 to 12.5. The other prefills 8 tokens in its first call."""
    first = [(0, 11.0, 8), (0, 12.0, 8), (1, 12.5, 8), (1, 13.5, 8)]
    second = [(0, 12.0, 8), (1, 13.0, 16), (1, 14.0, 16)]
    found = handover.summary([first, second], {1: 10.0})
    assert found == {
        "handover_s": 3.0, "handover_each_s": [3.0], "pause_s": 0.5, "pause_each_s": [0.5],
        "pause_with_prefill_each_s": [1.0], "call_s": 1.0,
    }


def test_calls_are_read_up_to_the_last_whole_line(tmp_path):
    (tmp_path / "1.calls").write_text("0 1.5 8\n1 2.5 16\n1 3.")
    (tmp_path / "2.calls").write_text("0 1")
    assert handover.read_calls(str(tmp_path)) == [[(0, 1.5, 8), (1, 2.5, 16)]]


def test_the_table_has_a_column_for_each_part_and_a_line_for_each_number_that_one_has():
    found = {"records:1": {"records_per_s": 1234.5}, "train:sync": {"tokens_per_s": 20.0},
             "records:2": {"records_per_s": 2.0, "peak_store_bytes": 5e6, "other": [1]}}
    assert handover.table(found, "records").splitlines() == [
        "| | 1 | 2 |", "|---|---|---|", "| object store at a sync, MB |  | 5 |",
        "| records per second | 1,234 | 2 |",
    ]
