"""A chat template that does harm costs its time and one clear error, whatever it was asked."""

import time

import pytest

from jaxrl_tis.data import confined

pytestmark = pytest.mark.faults

USER = [{"role": "user", "content": "2+3?"}]
NESTED = "".join(f"{{% for {v} in range(99999) %}}" for v in "abcd") + "{% endfor %}" * 4


@pytest.mark.parametrize("template, message", [
    (NESTED, "TimeoutError: the template ran past its time limit"),
    ("{{ 'a' * 10**10 }}", "MemoryError"),
    ("{% set x = 'a' * 10**6 %}" + "{% set x = x ~ x %}" * 20, "MemoryError|TimeoutError"),
    ("{{ 'a'.ljust(10**10) }}", "MemoryError"),
    ("{{ 'a' | center(10**10) }}", "MemoryError"),
    ("{{ '%10000000000d' % 1 }}", "MemoryError|OverflowError|ValueError"),
    ("{{ 9 ** (9 ** (8 + messages | length)) }}", "TimeoutError|MemoryError"),
    ("{{ range(10**9) | list }}", "OverflowError: Range too big"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{{ 'a' * 10**8 }}", "a result of more than"),
    ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
    ("{{ messages[0].update(role='system') }}", "unsafe"),
    ("{% include '/etc/passwd' %}", "no loader"),
])
def test_harm_costs_its_time_and_the_next_prompt_is_rendered(template, message):
    """The harm is done to one conversation alone, as a probe would not see."""
    text = f"{{% if messages[0].content == 'now' %}}{template}{{% endif %}}fine"
    made = "jaxrl_tis.data.templates:renderer"
    confined_template = confined.Confined(
        made, {"template": text, "tokens": {}, "kwargs": {}, "date": ""}, what="the template", timeout=1.0, memory=512 << 20
    )
    try:
        now, start = [[{"role": "user", "content": "now"}], True], time.monotonic()
        results = confined_template.calls([[USER, True], now, [USER, True]])
        assert time.monotonic() - start < 8
        assert [r["value"] for r in results] == ["fine", None, "fine"]
        with pytest.raises(ValueError, match=message):
            raise ValueError(results[1]["error"])
    finally:
        confined_template.close()
