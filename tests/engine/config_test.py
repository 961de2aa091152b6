"""Sizes that follow from others."""

from jaxrl_tis.engine.config import EngineConfig


def test_sizes_are_rounded_up_to_pages():
    made = lambda **sizes: EngineConfig(slots=1, page_size=16, **sizes)
    assert [made(max_length=n).pages_per_slot for n in (16, 17, 30)] == [1, 2, 2]
    assert [made(max_length=90, prefill_chunk=n).whole_chunk for n in (16, 17, 512)] == [16, 32, 96]
