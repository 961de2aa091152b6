"""Templates as checkpoints bring them; the sandbox around them is tested with the tokenizer."""

from jaxrl_tis.data.templates import renderer


def test_blocks_leave_no_white_space_and_special_tokens_come_by_name():
    render = renderer(
        "{% for m in messages %}\n  {{ m.role + ':' + m.content + eos_token }}\n{% endfor %}\n"
        "  {% if add_generation_prompt %}go{% endif %}\n"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    # The indentation of the expression stays, the lines of the blocks go.
    assert render(messages, True, {"eos_token": "|"}) == "  user:a|\n  assistant:b|\ngo"
    assert render(messages[:1], False, {"eos_token": "|"}) == "  user:a|\n"
