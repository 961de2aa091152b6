"""A chat template that does harm costs its time and one clear error, whatever it was asked."""

import time

import pytest

from jaxrl_tis.data import confined

pytestmark = pytest.mark.faults

USER = [{"role": "user", "content": "2+3?"}]
NESTED = "".join(f"{{% for {v} in range(99999) %}}" for v in "abcd") + "{% endfor %}" * 4


PATIENCE = 60.0  # seconds; none of these calls takes as long, on however busy a machine


@pytest.mark.all
@pytest.mark.parametrize("template, message", [
    ("{{ 'a' * 10**10 }}", "MemoryError"),
    ("{% set x = 'a' * 10**6 %}" + "{% set x = x ~ x %}" * 20, "MemoryError"),
    ("{{ 'a'.ljust(10**10) }}", "MemoryError"),
    ("{{ 'a' | center(10**10) }}", "MemoryError"),
    ("{{ '%10000000000d' % 1 }}", "MemoryError|OverflowError|ValueError"),
    ("{{ range(10**9) | list }}", "OverflowError: Range too big"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{{ 'a' * 10**8 }}", "a result of more than"),
    ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
    ("{{ messages[0].update(role='system') }}", "unsafe"),
    ("{% include '/etc/passwd' %}", "no loader"),
])
def test_harm_costs_one_clear_error_and_the_next_prompt_is_rendered(template, message):
    check_harm(template, message, PATIENCE)


@pytest.mark.all
@pytest.mark.parametrize("template", [NESTED, "{{ 9 ** (9 ** (8 + messages | length)) }}"])
def test_a_template_without_end_costs_its_time(template):
    check_harm(template, "TimeoutError: the template exceeded its time limit|MemoryError", 1.0)


def check_harm(template, message, seconds):
    """The harm is done to one conversation alone, as a probe would not see; it has `seconds`."""
    text = f"{{% if messages[0].content == 'now' %}}{template}{{% endif %}}fine"
    made = "jaxrl_tis.data.templates:renderer"
    confined_template = confined.Confined(
        made, {"template": text, "tokens": {}, "kwargs": {}, "date": ""}, what="the template",
        timeout=PATIENCE, memory=512 << 20,
    )
    try:
        start = time.monotonic()
        [first] = confined_template.calls([[USER, True]])
        [harmed] = confined_template.calls(
            [[[{"role": "user", "content": "now"}], True]], timeout=seconds
        )
        [last] = confined_template.calls([[USER, True]])
        assert time.monotonic() - start < seconds + PATIENCE
        assert [r["value"] for r in (first, harmed, last)] == ["fine", None, "fine"]
        with pytest.raises(ValueError, match=message):
            raise ValueError(harmed["error"])
    finally:
        confined_template.close()
