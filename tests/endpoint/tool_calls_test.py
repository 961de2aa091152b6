"""Tool calls in answers: texts by hand, which templates write back, and the `openai` client."""

import itertools
import json
import time

import openai
import pytest

from jaxrl_tis.data.tokenizer import CharTokenizer
from jaxrl_tis.data.tokenizer_files import load_tokenizer
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.engine.worker import EngineThread
from jaxrl_tis.endpoint import app as serve_app, prompts
from jaxrl_tis.endpoint.request import Limits
from jaxrl_tis.endpoint.tool_calls import FORMS, Call, described, form_of
from tests import arithmetic, threaded
from tests.asgi import listening
from tests.data.chat_templates import TEMPLATES
from tests.serve.clients_test import SPECIAL, post, write_tokenizer

pytestmark = pytest.mark.usefixtures("in_threads")

# Each call on lines of its own between two marks, as Hermes and Qwen write it.
HERMES = TEMPLATES["qwen2.5"].replace("\\n<call>", "\\n<tool_call>\\n").replace(
    "}</call>", "}\\n</tool_call>")
CODER = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content }}
    {%- for call in m.tool_calls %}
        {{- '\\n\\n' if loop.first and m.content else '\\n' if not loop.first }}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for key, value in call.function.arguments|items %}
            {{- '<parameter=' + key + '>\\n' + (value if value is string else value|tojson) }}
            {{- '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
TEMPLATE = {
    "hermes": HERMES, "qwen3_coder": CODER, "mistral": TEMPLATES["mistral"],
    "llama3": TEMPLATES["llama3"].replace("<|eot_id|>", SPECIAL[2]),
}
USER = {"role": "user", "content": "1+2?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {
    "a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": ["array", "null"]},
    "d": {"type": ["string", "null"]}}}}}]


def tokenizer_of(template, folder):
    write_tokenizer(folder, template)
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """name -> (tokenizer, form of its template)."""
    tokenizers = {
        name: tokenizer_of(text, tmp_path_factory.mktemp(name)) for name, text in TEMPLATE.items()
    }
    with threaded.children():
        return {name: (tokenizer, form_of(tokenizer)) for name, tokenizer in tokenizers.items()}


@pytest.mark.all
def test_the_form_is_that_of_the_template(families, tmp_path):
    forms = {name: form for name, (_, form) in families.items()}
    assert {name: form.read for name, form in forms.items()} == {
        name: form.read for name, form in FORMS.items()}
    separators = {name: form.separator for name, form in forms.items()}
    assert separators == {"hermes": "\n", "qwen3_coder": "\n\n", "llama3": "", "mistral": ""}
    assert form_of(CharTokenizer("ab")) is None
    for name in ("qwen2.5", "gemma3"):  # an unknown mark; no call at all
        assert form_of(tokenizer_of(TEMPLATES[name], tmp_path)) is None
    refusing = tokenizer_of("{{ raise_exception('no') }}", tmp_path)
    assert form_of(refusing) is None


def hermes(arguments, name="add"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def coder(body, name="add"):
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


A, B = Call("add", {"a": 1}), Call("mul", {"b": "</tool_call>", "c": [1.5, None, {"ü": True}]})
A_TEXT = hermes('{"a": 1}')
B_TEXT = hermes('{"b": "</tool_call>", "c": [1.5, null, {"ü": true}]}', "mul")
# An answer -> its content and calls; its template renders the same text from these.
STABLE = [
    ("hermes", A_TEXT, "", [A]), ("hermes", f"I add.\n{A_TEXT}", "I add.", [A]),
    ("hermes", f"I add.\n\n{A_TEXT}", "I add.\n", [A]),
    ("hermes", f"{A_TEXT}\n{B_TEXT}", "", [A, B]), ("hermes", hermes("{}"), "", [Call("add", {})]),
    ("hermes", "3", "3", []), ("hermes", "a < b <tool", "a < b <tool", []),
    ("qwen3_coder", coder("<parameter=a>\n1\n</parameter>\n"), "", [A]),
    ("qwen3_coder", "I add.\n\n" + coder(
        "<parameter=a>\n-2\n</parameter>\n<parameter=b>\n1\n\n2\n</parameter>\n"
        '<parameter=c>\n["x", null]\n</parameter>\n<parameter=d>\n3\n</parameter>\n'
    ) + "\n" + coder(""), "I add.",
     [Call("add", {"a": -2, "b": "1\n\n2", "c": ["x", None], "d": "3"}), Call("add", {})]),
    ("llama3", '{"name": "add", "parameters": {"a": 1}}', "", [A]),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]', "",
     [Call("add", {"a": 1}, "abcdefghi")]),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}, '
     '{"name": "add", "arguments": {"a": 1}, "id": "123456789"}]', "",
     [Call("add", {"a": 1}, "abcdefghi"), Call("add", {"a": 1}, "123456789")]),
]
# The same for texts that the template writes otherwise.
READ = [
    ("hermes", f"{A_TEXT}\n\n", "", [A]), ("hermes", f"x{A_TEXT} and {A_TEXT} y", "x and  y", [A, A]),
    ("hermes", '<tool_call>{"arguments":{"a":1},"name":"add"}</tool_call>', "", [A]),
    ("qwen3_coder", coder("<parameter=c>\nNone\n</parameter>\n"), "", [Call("add", {"c": None})]),
    ("qwen3_coder", coder("<parameter=a>\nx\n</parameter>\n", "f"), "", [Call("f", {"a": "x"})]),
    ("qwen3_coder", coder("<parameter=d>\nParis\n</parameter>\n"), "", [Call("add", {"d": "Paris"})]),
    ("qwen3_coder", coder("<parameter=d>\nnull\n</parameter>\n"), "", [Call("add", {"d": None})]),
    ("llama3", ' <|python_tag|>{"name": "add", "parameters": {"a": 1}}\n', "", [A]),
    ("mistral", '[{"name": "add", "arguments": {"a": 1}}]', "", [A]),  # its mark is a special token
]
UNREAD = [
    ("hermes", f"x\n{A_TEXT[:-1]}"), ("hermes", f"{A_TEXT}\n{A_TEXT[:-5]}"),
    ("hermes", f"{hermes('{')}\n{A_TEXT}"), ("hermes", hermes("[1]")), ("hermes", hermes('"{}"')),
    ("hermes", hermes('{"a": NaN}')), ("hermes", hermes(r'{"a": "\ud800"}')),
    ("hermes", hermes('{"a": ' + "[" * 3000 + "]" * 3000 + "}")),
    ("hermes", hermes("{}").replace("arguments", "parameters")),
    ("hermes", hermes('{}, "x": 1')), ("hermes", hermes("{}").replace('"add"', "1")),
    ("hermes", coder("")), ("hermes", "<tool_call>[]</tool_call>"),
    ("qwen3_coder", A_TEXT), ("qwen3_coder", coder("x")),
    ("qwen3_coder", coder("<parameter=a>\nx\n</parameter>\n")),  # no integer
    ("llama3", 'It is {"name": "add", "parameters": {}}'), ("llama3", '{"a": 1}'), ("llama3", "{"),
    ("mistral", "[]"), ("mistral", "[1]"), ("mistral", '{"name": "add", "arguments": {}}'),
]


@pytest.mark.parametrize("name, text, content, calls", STABLE + READ)
def test_an_answer_is_content_and_calls(families, name, text, content, calls):
    assert families[name][1].parse(text, TOOLS) == (content, calls)


@pytest.mark.parametrize("name, text, content, calls", STABLE)
def test_the_template_writes_what_was_read(families, name, text, content, calls):
    tokenizer, form = families[name]
    content, calls = form.parse(text, TOOLS)
    calls = described(calls, *[arithmetic.request("").prompt] * 2)
    said = {"role": "assistant", "content": content or None, "tool_calls": calls}
    talk = [prompts.message("", m) for m in (USER, said if calls else said | {"content": content})]
    rendered = tokenizer.chat(talk, add_generation_prompt=False)
    # Mistral's template puts a space before an answer, with its prompt's end.
    begin = tokenizer.chat([USER])
    assert rendered.removeprefix(begin).lstrip(" ").startswith(text)


@pytest.mark.parametrize("name, text", UNREAD)
def test_what_is_no_call_stays_in_the_text(families, name, text):
    assert families[name][1].parse(text, TOOLS) == (text, [])


@pytest.mark.parametrize("name, text", [row[:2] for row in STABLE + READ] + UNREAD[:3] + UNREAD[-3:])
def test_what_is_settled_stays(families, name, text):
    form = families[name][1]
    content, _ = form.parse(text, TOOLS)
    begun = [form.settled(text[:i]) for i in range(len(text) + 1)]
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(begun))
    assert content.startswith(begun[-1])


@pytest.mark.parametrize("name, text, settled", [
    ("hermes", "I add.", "I add."), ("hermes", "I add.\n", "I add."),
    ("hermes", "a\n\n", "a\n"), ("hermes", "a <b", "a <b"), ("hermes", "a <too", "a "),
    ("hermes", "a\n<tool_call", "a"), ("hermes", "a\n<tool_call>\n{", "a"),
    ("qwen3_coder", "a\n\n<", "a"), ("qwen3_coder", "a\n\n\n", "a\n"),
    ("llama3", " ", ""), ("llama3", "<|py", ""), ("llama3", '{"a"', ""), ("llama3", "It", "It"),
    ("mistral", "[TOOL", ""), ("mistral", "x", "x"),
])
def test_what_can_still_be_a_call_is_not_settled(families, name, text, settled):
    assert families[name][1].settled(text) == settled


def test_ids_of_calls_follow_from_the_tokens():
    ids = lambda calls, seed: [c["id"] for c in described(calls, *[
        arithmetic.request("", prompt).prompt for prompt in ([1], [seed, 2])])]
    assert ids([A, A], 3) == ids([A, A], 3)
    assert len({*ids([A, A], 3), *ids([A, A], 4)}) == 4
    assert all(len(id) == 9 and id.isalnum() for id in ids([A, A], 3))
    assert ids([Call("f", {}, "mine")], 3) == ["mine"]


# -- through the `openai` client --


class Scripted(arithmetic.Engine):
    """Samples the tokens of `script`, whatever the prompt is."""

    script = ()

    def __init__(self):
        super().__init__(slots=2, max_length=1024, page_size=64, prefill_chunk=64)

    def generate(self, *args):
        time.sleep(0.002)  # a stream sends more than the end
        return super().generate(*args)

    def _draw(self, params, state, b, pages, shift):
        slot = state.slots[b]
        remaining = slot.remaining
        _, logp, route = super()._draw(params, state, b, pages, shift)
        slot.token = self.script[slot.position - len(slot.request.prompt)]
        is_end = slot.token in slot.request.sampling.stop_ids
        slot.remaining = 0 if is_end else remaining - 1
        return slot.token, logp, route


@pytest.fixture(scope="module")
def served(families):
    """(client, answering), where answering(text) makes the engine sample the text and its end."""
    tokenizer, _ = families["hermes"]
    engine = Scripted()
    scheduler = Scheduler(engine, 0, max_pending=8, decode=tokenizer.decode)
    limits = Limits(
        body_bytes=2**20, context_tokens=1024, max_tokens=256, choices=4, logprobs=0, seconds=60.0)
    app = serve_app.make(serve_app.Served(
        EngineThread(scheduler), tokenizer, "m", tokenizer.vocab_size, limits, load=int))

    def answering(text):
        engine.script = tokenizer.encode(text + SPECIAL[2])
        return engine.script

    with listening(app) as port, openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY", max_retries=0
    ) as client:
        yield client, answering


def ask(client, **body):
    body = dict(model="m", messages=[USER], tools=TOOLS, extra_body={"return_token_ids": True}) | body
    return client.chat.completions.create(**body)


def streamed(client, **body):
    """(content, calls as JSON, token ids, finish reason) of the joined chunks."""
    calls, ids, reasons, pieces = [], [], [], []
    for chunk in ask(client, stream=True, **body):
        (choice,) = chunk.choices
        pieces.append(choice.delta.content or "")
        for call in choice.delta.tool_calls or []:
            assert call.index == len(calls)
            calls.append(call.model_dump(exclude={"index"}))
        ids += choice.token_ids
        reasons.append(choice.finish_reason)
    assert set(reasons[:-1]) == {None}
    return "".join(pieces) or None, calls, ids, reasons[-1]


def test_calls_reach_the_client_and_come_back(served):
    client, answering = served
    script = answering(f"I add.\n{A_TEXT}\n{B_TEXT}")
    reply = ask(client)
    (choice,) = reply.choices
    assert (choice.message.content, choice.finish_reason) == ("I add.", "tool_calls")
    calls = choice.message.tool_calls
    assert [(c.type, c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("function", call.name, call.arguments) for call in (A, B)]
    assert choice.token_ids == script and choice.logprobs is None
    assert streamed(client) == (
        "I add.", [call.model_dump() for call in calls], script, "tool_calls")
    # The prompt of the next turn begins with all ids of this one.
    said = choice.message.model_dump(exclude_none=True)
    talk = [USER, said, {"role": "tool", "tool_call_id": calls[0].id, "content": "3"}]
    shown = post(client, "/tokenize", {"messages": talk, "tools": TOOLS})["tokens"]
    before = reply.prompt_token_ids + choice.token_ids
    assert shown[: len(before)] == before


def test_calls_without_content_have_none(served):
    client, answering = served
    script = answering(A_TEXT)
    (choice,) = ask(client).choices
    assert choice.message.content is None and len(choice.message.tool_calls) == 1
    calls = [call.model_dump() for call in choice.message.tool_calls]
    assert streamed(client) == (None, calls, script, "tool_calls")


BROKEN = A_TEXT.replace("}}", "}")


@pytest.mark.parametrize("text, body", [
    (BROKEN, {}), (f"x\n{BROKEN}", {}), (A_TEXT, {"tool_choice": "none"}), (A_TEXT, {"tools": []}),
    ("3", {}), ("a\n<tool", {}),
])
def test_other_answers_stay_as_they_are(served, text, body):
    client, answering = served
    script = answering(text)
    (choice,) = ask(client, **body).choices
    assert (choice.message.content, choice.message.tool_calls) == (text, None)
    assert (choice.finish_reason, choice.token_ids) == ("stop", script)
    assert streamed(client, **body) == (text, [], script, "stop")


@pytest.mark.parametrize("cut, is_whole", [(1, True), (3, False)])
def test_an_answer_that_ends_by_length_says_so(served, cut, is_whole):
    client, answering = served
    script = answering(A_TEXT)[:-cut]
    body = dict(max_tokens=len(script))
    (choice,) = ask(client, **body).choices
    assert (choice.finish_reason, bool(choice.message.tool_calls)) == ("length", is_whole)
    content, calls, ids, reason = streamed(client, **body)
    assert (content, bool(calls), reason) == (choice.message.content, is_whole, "length")
    assert ids == choice.token_ids == script
