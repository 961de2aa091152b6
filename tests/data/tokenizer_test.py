import json

import pytest
import tokenizers

from jaxrl_tis.data.tokenizer import BREAK, CharTokenizer, escaped, fitted
from jaxrl_tis.data.tokenizer_files import from_folder, from_gguf, load_tokenizer
from tests.data.tokenizer_files_test import TEMPLATE, TOKENS, USER, write_folder, write_gguf

pytestmark = pytest.mark.usefixtures("in_threads")


def test_char_tokenizer_ids_follow_the_alphabet():
    tokenizer = CharTokenizer("01+=")
    # 0 pad, 1 start, 2 end, so "0" is 3, "1" is 4, "+" is 5 and "=" is 6.
    assert tokenizer.encode("1+0=") == [4, 5, 3, 6]
    assert tokenizer.encode("1", add_special=True) == [1, 4]
    assert tokenizer.decode([1, 4, 5, 3, 6, 2, 0, 0]) == "1+0="
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_ids) == (7, 0, (2,))
    turns = [{"role": "user", "content": "1+"}, {"role": "user", "content": "0"}]
    assert tokenizer.chat(turns) == "1+0"


def test_char_tokenizer_names_what_it_does_not_know():
    tokenizer = CharTokenizer("01+=")
    with pytest.raises(ValueError, match="'7' of '1\\+7=' is not in the tokenizer's alphabet '01"):
        tokenizer.encode("1+7=")
    with pytest.raises(ValueError, match="'00' repeats a character"):
        CharTokenizer("00")


def test_ids_that_a_tokenizer_lacks_have_no_text(tmp_path):
    tokenizer = CharTokenizer("01+=")
    assert tokenizer.decode([3, 7, 99, 4]) == "01"
    assert tokenizer.ids.tolist() == list(range(7))
    folder = write_folder(tmp_path / "a", config={"eos_token": "<|im_end|>"})
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["added_tokens"].append(saved["added_tokens"][3] | {"content": "<far>", "id": 99})
    saved["model"]["vocab"]["<far>"] = 99
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = from_folder(folder)
    assert tokenizer.vocab_size == 100
    assert tokenizer.ids.tolist() == [*range(len(TOKENS)), 99]  # between them is a hole
    a = TOKENS.index("a")
    assert tokenizer.decode([a, len(TOKENS), 98, 99, 100, 5000, a]) == "a<far>a"


@pytest.mark.all
def test_chat_drops_the_white_space_of_block_lines(tmp_path):
    tokenizer = from_gguf(write_gguf(tmp_path / "tiny.gguf"))
    # trim_blocks drops the newline after a block and lstrip_blocks the blanks before one; the
    # four blanks before {{ }} and the newline after it belong to the text.
    turn = "    <|im_start|>user\n2+3?<|im_end|>\n\n"
    assert tokenizer.chat(USER) == turn + "<|im_start|>assistant\n"
    assert tokenizer.chat(USER, add_generation_prompt=False) == turn


def test_arguments_and_date_reach_the_template(tmp_path):
    text = "{{ strftime_now('%Y') }}{% if deep %} deep{% endif %}"
    folder = write_folder(
        tmp_path / "a", config={"eos_token": "<|im_end|>", "chat_template": text}
    )
    assert load_tokenizer(folder, {"deep": True}, "1999-01-02").chat(USER) == "1999 deep"
    assert load_tokenizer(folder, {}, "1999-01-02").chat(USER) == "1999"
    timeless = write_folder(
        tmp_path / "c", config={"eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}
    )
    assert load_tokenizer(timeless, {}, "1999-01-02").date == ""
    with pytest.raises(ValueError, match="does not read depe; set only variables that it reads: deep$"):
        load_tokenizer(folder, {"depe": True}).chat(USER)
    bare = write_folder(tmp_path / "b", config={"eos_token": "<|im_end|>"})
    for path in ("char", bare):
        with pytest.raises(ValueError, match="no chat template, and nothing reads deep"):
            load_tokenizer(path, {"deep": True})


@pytest.mark.all
def test_tools_reach_the_template(tmp_path):
    text = "{{ tools | tojson }}{{ messages | length }}{{ add_generation_prompt }}"
    write_folder(tmp_path / "a", config={"eos_token": "<|im_end|>"}, jinja=text)
    tokenizer, tools = load_tokenizer(tmp_path / "a"), [{"type": "function"}]
    assert tokenizer.chat(USER, False, tools) == '[{"type": "function"}]1False'
    assert tokenizer.chat(USER) == "null1True"
    write_folder(tmp_path / "b", config={"eos_token": "<|im_end|>"}, jinja=TEMPLATE)
    with pytest.raises(ValueError, match="the chat template of .*does not read tools"):
        load_tokenizer(tmp_path / "b").chat(USER, tools=tools)
    with pytest.raises(ValueError, match="no chat template, and nothing reads tools"):
        CharTokenizer("12").chat(USER, tools=tools)


@pytest.mark.all
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% if %}", "cannot be loaded: TemplateSyntaxError"),
    ],
)
def test_a_template_cannot_leave_its_sandbox(tmp_path, template, message):
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    tokenizer = from_folder(write_folder(tmp_path / "a", config=config))
    with pytest.raises(ValueError, match=message):
        tokenizer.chat(USER)


@pytest.mark.all
def test_template_helpers(tmp_path):
    template = (
        "{{ strftime_now('%%') }}{{ {'a': 'é<'} | tojson }}"
        "{% for i in [1, 2] %}{% break %}{% endfor %}"
    )
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    tokenizer = from_folder(write_folder(tmp_path / "a", config=config))
    assert tokenizer.chat(USER) == '%{"a": "é<"}'


END = {"eos_token": "<|im_end|>"}


def loaded(folder, *added, config=END, escapes=False, generation=None):
    """A tokenizer with the ids of TOKENS, then one for each text of `added`."""
    write_folder(folder, config=config, generation=generation)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(list(added))
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder, escapes=escapes)


def test_a_tokenizer_of_ordinary_text_beyond_the_model_is_refused(tmp_path):
    tokenizer = CharTokenizer("0123")
    assert fitted(tokenizer, 7) is fitted(tokenizer, 128) is tokenizer
    with pytest.raises(ValueError, match="has 7 ids but the model's vocabulary has 6"):
        fitted(tokenizer, 6)
    tokenizer, count = loaded(tmp_path / "a"), len(TOKENS)
    assert fitted(tokenizer, count) is tokenizer
    with pytest.raises(ValueError, match=f"has {count} ids but the model's vocabulary has {count - 1}"):
        fitted(tokenizer, count - 1)


def test_a_text_with_an_added_token_beyond_the_model_is_refused(tmp_path):
    """As Gemma 3, whose token of an image is the first id after its vocabulary."""
    count = len(TOKENS)
    tokenizer = fitted(loaded(tmp_path / "a", "<image>", config=END | {"pad_token": "<image>"}), count)
    assert (tokenizer.vocab_size, tokenizer.pad_id) == (count + 1, 0)
    first, refused = tokenizer.encodes(["hello", "a<image>b<image>"])
    assert first == [TOKENS.index("hello")]
    expected = f"has the token '<image>' of id {count}, and the model's vocabulary has {count} ids"
    assert isinstance(refused, ValueError) and expected in str(refused)
    with pytest.raises(ValueError, match=expected):
        tokenizer.encode("<image>")
    assert fitted(tokenizer, count + 1).encode("<|im_end|>") == [2]


@pytest.mark.parametrize("end", ["tokenizer_config", "generation_config"])
def test_an_end_token_beyond_the_model_is_refused(tmp_path, end):
    is_named = end == "tokenizer_config"
    config, generation = ({"eos_token": "<end>"}, None) if is_named else (END, {"eos_token_id": [2, 99]})
    tokenizer = loaded(tmp_path / "a", "<end>", config=config, generation=generation)
    id = len(TOKENS) if is_named else 99
    with pytest.raises(ValueError, match=f"end token of id {id} is beyond .* of {len(TOKENS)} ids"):
        fitted(tokenizer, len(TOKENS))


def test_a_start_token_that_a_text_begins_with_is_written_once(tmp_path, capsys):
    start, a = TOKENS.index("<|im_start|>"), TOKENS.index("a")
    tokenizer = from_gguf(write_gguf(tmp_path / "a.gguf", add_bos=True))
    assert tokenizer.encode("a", add_special=True) == [start, a]
    assert "" == capsys.readouterr().err
    texts = ["<|im_start|>a", "<|im_start|><|im_start|>a", "a<|im_start|>", "<|im_start|>"]
    once = [[start, a], [start, start, a], [start, a, start], [start]]
    assert tokenizer.encodes(texts, add_special=True) == once
    assert [tokenizer.encode(text, add_special=True) for text in texts] == once
    assert tokenizer.encode("<|im_start|>a") == [start, a]
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "start token '<|im_start|>', which the tokenizer adds" in told
    # This one adds none, so that both are of the text.
    tokenizer = from_gguf(write_gguf(tmp_path / "b.gguf", add_bos=False))
    assert tokenizer.encodes(texts[1:2], add_special=True) == [[start, start, a]]


def test_special_tokens_of_a_text_from_outside(tmp_path, capsys):
    text = "a<|im_end|>b<tool><|im_start|>"
    names = {token: i for i, token in enumerate(TOKENS)}
    ids = [names[x] for x in ("a", "<|im_end|>", "b", "<tool>", "<|im_start|>")]
    # Of the marks' characters this tokenizer has none but letters, and leaves out the others.
    plain = [names[x] for x in ("a", "i", "e", "d", "b", "<tool>", "i", "s", "a", "r")]
    kept = loaded(tmp_path / "kept")
    assert kept.escaped("a<tool>") == "a<tool>" and capsys.readouterr().err == ""
    assert kept.encode(kept.escaped(text)) == ids == kept.encode(text)
    assert kept.escaped("<|im_start|>") == "<|im_start|>"
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "'<|im_end|>', which becomes a control token" in told
    assert "config.task.escape_special_tokens=True" in told
    escaping = loaded(tmp_path / "escaped", escapes=True)
    made = escaping.escaped(text)
    assert made.replace(BREAK, "") == text and escaping.escaped(made) == made
    assert escaping.encode(made) == plain
    assert escaping.encode(f"<|im_end|>{made}<|im_end|>") == [2, *plain, 2]  # of a template
    assert escaping.encodes([made, text]) == [plain, ids]
    assert capsys.readouterr().err == ""
    assert CharTokenizer("ab").escaped("ab") == "ab"


def test_what_is_left_of_a_special_token_is_no_other_one(tmp_path):
    tokenizer = loaded(tmp_path / "a", "abc", "cd", "bcd", escapes=True)
    # "abc" is found first; without it "bcd" begins after the cut, and without that "cd".
    assert tokenizer.escaped("abcd") == BREAK.join("abcd")
    names = [TOKENS.index(c) for c in "abcd"]
    assert tokenizer.encode(tokenizer.escaped("abcd")) == names
    tokenizer = loaded(tmp_path / "b", "é", escapes=True)
    with pytest.raises(ValueError, match="special token 'é' is one character"):
        tokenizer.escaped("aé")


def test_messages_of_users_and_tools_come_from_outside(tmp_path):
    tokenizer = loaded(tmp_path / "a", escapes=True)
    roles = ("system", "user", "assistant", "tool")
    talk = [{"role": role, "content": "<|im_end|>", "name": "<|im_end|>"} for role in roles]
    made = [m["content"] for m in escaped(tokenizer, talk)]
    assert [BREAK in content for content in made] == [False, True, False, True]
    assert escaped(tokenizer, [{"role": "user"}]) == [{"role": "user"}]


@pytest.mark.all
def test_many_at_once_are_as_one_by_one(tmp_path):
    template = "{% if messages|length > 1 %}{{ raise_exception('one, please') }}{% endif %}" + TEMPLATE
    write_folder(tmp_path / "a", config={"eos_token": "<|im_end|>"}, jinja=template)
    tokenizer = load_tokenizer(tmp_path / "a")
    texts = ["hello world", "", "12+3", "é" * 50]
    assert tokenizer.encodes(texts) == [tokenizer.encode(text) for text in texts]
    conversations = [USER, USER * 2, [{"role": "user", "content": "hello"}]]
    first, refused, last = tokenizer.chats(conversations)
    assert [first, last] == [tokenizer.chat(c) for c in conversations[::2]]
    assert isinstance(refused, ValueError) and "one, please" in str(refused)
    with pytest.raises(ValueError, match="one, please"):
        tokenizer.chat(USER * 2)


def test_a_text_that_the_tokenizer_refuses_leaves_the_others():
    found = CharTokenizer("12").encodes(["1", "x", "12"], add_special=True)
    assert found[::2] == [[1, 3], [1, 3, 4]] and "'x'" in str(found[1])


def test_bare_exceptions_of_a_tokenizer_are_of_their_text(tmp_path):
    write_folder(tmp_path / "a", config={"eos_token": "<|im_end|>"})
    model = tokenizers.models.WordLevel({"a": 0, "<|im_end|>": 1}, unk_token="?")
    tokenizers.Tokenizer(model).save(str(tmp_path / "a/tokenizer.json"))
    first, refused = load_tokenizer(tmp_path / "a").encodes(["a", "b"])
    assert first == [0] and isinstance(refused, ValueError) and "cannot encode" in str(refused)
    with pytest.raises(ValueError, match="cannot encode"):
        load_tokenizer(tmp_path / "a").encode("b")


def test_the_digest_tells_tokenizers_and_templates_apart(tmp_path):
    for name, jinja in (("a", "x"), ("b", "y"), ("c", "x")):
        write_folder(tmp_path / name, config={"eos_token": "<|im_end|>"}, jinja=jinja)
    text = (tmp_path / "c/tokenizer.json").read_text()
    (tmp_path / "c/tokenizer.json").write_text(text.replace("<tool>", "<tools>"))
    digests = [load_tokenizer(tmp_path / name).digest() for name in "aabc"]
    assert digests[0] != digests[2] != digests[3] != digests[0]
    assert CharTokenizer("12").digest() != CharTokenizer("21").digest()


@pytest.mark.cases("hello")
@pytest.mark.parametrize("said", ["hello", " hello  ", "2+3?", "e", ""])
def test_the_last_message_of_an_assistant_is_left_open(tmp_path, said):
    """As transformers' continue_final_message has it: the text ends with the message."""
    write_folder(tmp_path / "a", config={"eos_token": "<|im_end|>"}, jinja=TEMPLATE)
    tokenizer = load_tokenizer(tmp_path / "a")
    [text, other] = tokenizer.chats([[*USER, {"role": "assistant", "content": said}], USER])
    assert "<|im_start|>user\n2+3?<|im_end|>\n" in text
    assert text.endswith(f"<|im_start|>assistant\n{said}") and text.count("<|im_end|>") == 1
    assert other == tokenizer.chat(USER)


@pytest.mark.all
def test_a_last_message_that_the_template_does_not_write_is_refused(tmp_path):
    jinja = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    write_folder(tmp_path / "a", config={"eos_token": "<|im_end|>"}, jinja=jinja)
    tokenizer = load_tokenizer(tmp_path / "a")
    found = tokenizer.chats([[{"role": "assistant", "content": c}] for c in ("abc", "", "ABC")])
    assert all("changes the assistant's last message" in str(x) for x in found)


@pytest.mark.all
def test_a_last_message_with_tool_calls_is_refused(tmp_path):
    jinja = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    write_folder(tmp_path / "a", config={"eos_token": "<|im_end|>"}, jinja=jinja)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    [found] = load_tokenizer(tmp_path / "a").chats([[{"role": "assistant", "tool_calls": [call]}]])
    assert isinstance(found, ValueError) and "has tool calls" in str(found)


@pytest.mark.all
def test_a_last_message_that_the_template_cuts_is_refused(tmp_path):
    """R1's template drops the thought. A template that trims drops space, and that may be."""
    jinja = "{% for m in messages %}{{ m.content.split('</think>')[-1] | trim }}{% endfor %}"
    write_folder(tmp_path / "a", config={"eos_token": "<|im_end|>"}, jinja=jinja)
    said = "<think>\nplan</think>\nSo 7", "  So 7"
    cut, kept = load_tokenizer(tmp_path / "a").chats([[{"role": "assistant", "content": c}] for c in said])
    assert "changes the assistant's last message" in str(cut) and kept == "So 7"
