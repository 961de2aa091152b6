"""Programs as text, written by hand: loops, shapes, and counts of products."""

import pytest

from jaxrl_tis.aot import hlo, hlo_flops, hlo_text
from jaxrl_tis.aot.hlo_text import Shape

LOOP = """HloModule m, num_partitions=1
%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %p = (s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4]{{0}} get-tuple-element(%p), index=1
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  ROOT %out = (s32[], f32[4]{{0}}) tuple(%next, %x)
}}
%condition (q: (s32[], f32[4])) -> pred[] {{
  %q = (s32[], f32[4]{{0}}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %limit = s32[] constant({limit})
  %last = s32[] constant(20)
  %less = pred[] compare(%j, %limit), direction={direction}
  %first = pred[] compare(%j, %last), direction=LT
  ROOT %goes = pred[] {condition}
}}
ENTRY %main (a: f32[4]) -> f32[4] {{
  %a = f32[4]{{0}} parameter(0)
  %start = s32[] constant(1)
  %t = (s32[], f32[4]{{0}}) tuple(%start, %a)
  %w = (s32[], f32[4]{{0}}) while(%t), condition=%condition, body=%body
  ROOT %r = f32[4]{{0}} get-tuple-element(%w), index=1
}}
"""


def loop(limit, step, direction="LT", condition="copy(%less)"):
    if condition == "copy(%less)":
        condition = f"compare(%j, %limit), direction={direction}"
    text = LOOP.format(limit=limit, step=step, direction=direction, condition=condition)
    [found] = hlo.Module(text).loops
    return found.trips, found.kind


def test_trips_of_a_counter():
    """From 1: below 10 by threes 1, 4, 7; below 11 also 10; up to 10 also 10."""
    assert [loop(limit, 3)[0] for limit in (10, 11, 1)] == [3, 4, 0]
    assert loop(10, 3, "LE") == (4, "exact")


def test_two_limits_are_a_bound():
    assert loop(10, 3, condition="and(%less, %first)") == (3, "bound")
    assert loop(40, 3, condition="and(%less, %first)") == (7, "bound")  # 1, 4, ..., 19


NESTED = """HloModule m, num_partitions=1
%product (c: f32[4,8]) -> f32[4,8] {
  %c = f32[4,8]{1,0} parameter(0)
  %w = f32[8,16]{1,0} constant({...})
  %d = f32[4,16]{1,0} dot(%c, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %e = f32[4,8]{1,0} slice(%d), slice={[0:4], [0:8]}
}
%inside (s: f32[4,8]) -> pred[] {
  %s = f32[4,8]{1,0} parameter(0)
  ROOT %yes = pred[] constant(true)
}
%outer (o: f32[4,8]) -> f32[4,8] {
  %o = f32[4,8]{1,0} parameter(0)
  ROOT %v = f32[4,8]{1,0} while(%o), condition=%inside, body=%product, backend_config={"known_trip_count":{"n":"5"}}
}
%outside (u: f32[4,8]) -> pred[] {
  %u = f32[4,8]{1,0} parameter(0)
  ROOT %go = pred[] constant(true)
}
ENTRY %main (a: f32[4,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  ROOT %z = f32[4,8]{1,0} while(%a), condition=%outside, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_loops_multiply_what_they_run():
    """A product of [4,8] and [8,16]: 4 x 16 x 8 multiplications and additions, 15 times."""
    module = hlo.Module(NESTED)
    [dot] = module.dots()
    assert (dot.flops, dot.runs, module.flops()) == (2 * 4 * 16 * 8, 15, 15 * 1024)


def test_taps_of_a_window_by_hand():
    """Five numbers under a window of three: of 15 taps two are on padding. With a hole between any two
    of three numbers, a window of two meets 1, 0, 2, 0, 3 at the places 01, 12, 23, 34."""
    assert hlo_flops._taps(5, 5, 3, 1, 1, 1, 1) == 13
    assert hlo_flops._taps(3, 4, 2, 1, 0, 2, 1) == 4


def test_shapes_of_a_tuple():
    found = hlo_text.shapes_of("(s4[3]{0:S(5)}, (f32[2,4]{1,0:T(2,128)}, pred[]), bf16[<=8]{0})")
    assert found == (Shape("s4", (3,), 5), Shape("f32", (2, 4)), Shape("pred", ()), Shape("bf16", (8,)))
    assert [shape.bytes for shape in found] == [2, 32, 1, 16]


def test_a_line_without_an_end_is_refused():
    with pytest.raises(ValueError, match="no closing parenthesis"):
        hlo.Module("HloModule m\nENTRY %main (a: f32[]) -> f32[] {\n  %a = f32[] parameter(0\n}\n")
