"""Templates as checkpoints bring them; the sandbox around them is tested with the tokenizer."""

import datetime
import json
import pathlib
import re
from unittest import mock

import jinja2
import pytest

from jaxrl_tis.data import templates
from jaxrl_tis.data.templates import renderer
from tests.data import chat_templates

GOLDEN = pathlib.Path(__file__).parent / "golden" / "chat.json"
SPECIAL = {  # of chat_templates.TOKENS, what transformers passes on
    "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
    "boi_token": "<tool>",
}
USER = [{"role": "user", "content": "a"}]


def setting(template, tokens=None, kwargs=None, date=""):
    return {"template": template, "tokens": tokens or {}, "kwargs": kwargs or {}, "date": date}


def test_blocks_leave_no_white_space_and_special_tokens_come_by_name():
    render = renderer(setting(
        "{% for m in messages %}\n  {{ m.role + ':' + m.content + eos_token }}\n{% endfor %}\n"
        "  {% if add_generation_prompt %}go{% endif %}\n", {"eos_token": "|"},
    ))
    messages = [*USER, {"role": "assistant", "content": "b"}]
    # The indentation of the expression stays, the lines of the blocks go.
    assert render(messages, True) == "  user:a|\n  assistant:b|\ngo"
    assert render(messages[:1], False) == "  user:a|\n"


@pytest.mark.cases("llama3", "qwen2.5", "qwen3")
@pytest.mark.parametrize("family", chat_templates.TEMPLATES)
def test_a_family_renders_as_by_transformers(family):
    expected = json.loads(GOLDEN.read_text())["rendered"][family]
    assert expected.keys() == chat_templates.CASES.keys()
    template = chat_templates.TEMPLATES[family]
    for name, (messages, add_generation_prompt, kwargs) in chat_templates.CASES.items():
        read = {key: value for key, value in kwargs.items() if re.search(rf"(?<![.\"'\w]){key}\b", template)}
        render = renderer(setting(template, SPECIAL, read, chat_templates.DATE))
        try:
            found = {"text": render(messages, add_generation_prompt)}
        except (jinja2.TemplateError, TypeError) as error:
            found = {"error": str(error)}
        assert found == expected[name], name


def test_absent_tools_documents_and_tokens():
    text = "{{ tools is none }} {{ documents is none }} {{ bos_token is defined }}[{{ bos_token }}]"
    assert renderer(setting(text))(USER, True) == "True True False[]"
    given = setting("{{ tools }}{{ bos_token }}", {"bos_token": "<s>"}, {"tools": 1, "bos_token": 2})
    assert renderer(given)(USER, True) == "12"  # an argument outranks a token, as in transformers


def test_tools_of_a_call_come_before_those_of_the_setting():
    render = renderer(setting("{{ tools | tojson }}", kwargs={"tools": ["a"]}))
    assert render(USER, True) == render(USER, True, None) == '["a"]'
    assert render(USER, True, ["b"]) == '["b"]' and render(USER, True) == '["a"]'
    assert renderer(setting("{{ tools is none }}"))(USER, True) == "True"


def test_tools_that_a_template_does_not_read_are_refused():
    render = renderer(setting("{{ messages }}"))
    with pytest.raises(ValueError, match="does not read tools; describe them in a message"):
        render(USER, True, [{"type": "function"}])
    assert renderer(setting("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}"))(
        USER, True, ["b"]) == "['b']"


def test_an_argument_that_no_template_reads_is_refused():
    text = "{% if enable_thinking is defined and not enable_thinking %}-{% endif %}"
    assert renderer(setting(text, kwargs={"enable_thinking": False}))(USER, True) == "-"
    with pytest.raises(ValueError, match="does not read enable_thinkin; set only variables that it reads: enable_thinking$"):
        renderer(setting(text, kwargs={"enable_thinkin": False}))


def test_the_date_is_the_one_given_and_else_that_of_the_clock():
    text = "{{ strftime_now('%d %b %Y %H:%M:%S') }}"
    given = setting(text, date="2024-02-29T23:59:58")
    assert renderer(given)(USER, True) == "29 Feb 2024 23:59:58"
    clock = mock.Mock(wraps=datetime.datetime, now=lambda: datetime.datetime(2001, 2, 3))
    with mock.patch.object(templates.datetime, "datetime", clock):
        assert renderer(setting(text))(USER, True) == "03 Feb 2001 00:00:00"


def test_no_message_is_an_error():
    with pytest.raises(ValueError, match="no message"):
        renderer(setting("{{ messages }}"))([], True)
