"""Parts of the report of a dump, from numbers by hand."""

from jaxrl_tis.audit import table

ROW = {"token_fraction": 0.5, "log_ratio_abs_mean": 0.1, "log_ratio_mean": 0.0, "dp_max": 0.2}


def test_a_share_that_is_not_all_says_so():
    number = lambda x, name="tokens_kept": table._number(name, x)
    assert [number(x) for x in (1, 0.9999, 0.9994, 0.0)] == ["100.0%", "99.9%", "99.9%", "0.0%"]
    assert [number(x, "variance") for x in (float("nan"), 999.0, 12345.0)] == ["-", "999.000", "1.2e+04"]
    assert number(0.0123, "kept_k3") == "0.012"


def test_flips_are_of_buckets_with_tokens_in_their_order():
    flips = {"layer_2": 0.1, "layer_10": 0.2, "layer_2_position_0": 0.9, "position_0": 0.3, "position_4": 0.4}
    report = {
        "metrics": {table.FLIPS + name: x for name, x in flips.items()} | {"other": 1.0},
        "profiles": {"position_0": ROW},
    }
    assert list(table.flips_by(report, "layer").items()) == [("2", 0.1), ("10", 0.2)]
    assert table.flips_by(report, "position") == {"0": 0.3}


def test_a_profile_needs_two_buckets():
    report = {"profiles": {"turn_0": ROW, "lag_0": ROW, "lag_1": ROW}}
    lines = list(table._profiles(report))
    assert [line.split(":")[0] for line in lines if line.startswith("Where")] == ["Where is it? By lag"]
    assert lines[2].split() == ["0", "50.0%", "0.1", "0", "0.2"]
