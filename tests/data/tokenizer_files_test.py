import json

import gguf
import pytest
import tokenizers

from jaxrl_tis.data.tokenizer import ARITHMETIC_CHARS
from jaxrl_tis.data.tokenizer_files import from_folder, from_gguf, load_tokenizer
from tests.data import chat_templates

TEMPLATE = (
    "{% for message in messages %}\n"
    "    {{ '<|im_start|>' + message['role'] + '\n' + message['content'] + eos_token + '\n' }}\n"
    "{% endfor %}\n"
    "  {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}\n"
)
USER = [{"role": "user", "content": "2+3?"}]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 33384568\n"

# Ids 0-2 are control tokens and 3 is a user-defined one, as in SmolLM2's layout; then one token
# per byte that the texts need, then the merges. "Ġ" is the byte-level name of a space.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHARS = [*"0123456789+=?abcdehilorsuw", "Ġ", "Ċ", "Ã", "©"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("1", "2"), ("o", "r")]
TOKENS = [*SPECIAL, "<tool>", *CHARS, *("".join(pair) for pair in MERGES)]


def independent_backend() -> tokenizers.Tokenizer:
    """The same tokenizer through the JSON format of `tokenizers`, by hand."""
    return tokenizers.Tokenizer.from_str(json.dumps({
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": token in SPECIAL}
            for index, token in enumerate(TOKENS[:4])
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": True},
        ]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(TOKENS)},
                  "merges": [" ".join(pair) for pair in MERGES]},
    }))


def write_gguf(path, *, pre="smollm", pad=2, add_bos=False, eos=2, tokens=TOKENS, bos=1):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 4] + [1] * (len(tokens) - 4))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(bos)
    if eos is not None:
        writer.add_eos_token_id(eos)
    writer.add_pad_token_id(pad)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_folder(folder, *, config=None, generation=None, model=None, jinja=None):
    folder.mkdir()
    independent_backend().save(str(folder / "tokenizer.json"))
    files = {"tokenizer_config": config, "generation_config": generation, "config": model}
    for name, value in files.items():
        if value is not None:
            (folder / f"{name}.json").write_text(json.dumps(value))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    return folder


def test_the_char_spec_covers_arithmetic():
    tokenizer = load_tokenizer("char")
    assert tokenizer.decode(tokenizer.encode(ARITHMETIC_CHARS)) == ARITHMETIC_CHARS


@pytest.mark.parametrize(
    "text",
    ["hello world 12+123=", "  hello", "<|im_start|>user\nhello<|im_end|>\n", "a<tool>12", "é"],
)
def test_gguf_ids_equal_the_independent_tokenizer(tmp_path, text):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "tiny.gguf"))
    expected = independent_backend().encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text.replace(SPECIAL[1], "").replace(SPECIAL[2], "")
    assert tokenizer.vocab_size == len(TOKENS)


def test_gguf_special_tokens_are_single_and_digits_are_split(tmp_path):
    tokenizer = from_gguf(write_gguf(tmp_path / "tiny.gguf"))
    assert tokenizer.encode("<|im_start|><|im_end|><tool>") == [1, 2, 3]
    # The merge ("1", "2") exists, but digits are cut one by one before merging.
    assert tokenizer.encode("12") == [TOKENS.index("1"), TOKENS.index("2")]
    gpt2 = from_gguf(write_gguf(tmp_path / "gpt2.gguf", pre="gpt-2"))
    assert gpt2.encode("12") == [TOKENS.index("12")]


def test_a_user_defined_token_is_text_and_a_control_token_is_not(tmp_path):
    tokenizer = from_gguf(write_gguf(tmp_path / "tiny.gguf"))
    assert tokenizer.decode([1, 3, TOKENS.index("a"), 2]) == "<tool>a"


def test_gguf_pad_is_never_an_end_token_and_bos_is_added_on_request(tmp_path):
    tokenizer = from_gguf(write_gguf(tmp_path / "a.gguf", pad=2))
    assert (tokenizer.pad_id, tokenizer.eos_ids, tokenizer.bos_id) == (0, (2,), 1)
    assert tokenizer.encode("a", add_special=True) == [TOKENS.index("a")]
    tokenizer = from_gguf(write_gguf(tmp_path / "b.gguf", pad=3, add_bos=True))
    assert tokenizer.pad_id == 3
    assert tokenizer.encode("a", add_special=True) == [1, TOKENS.index("a")]
    assert tokenizer.encode("a") == [TOKENS.index("a")]


def test_gguf_errors_name_the_file_and_the_field(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.gguf is missing"):
        load_tokenizer(tmp_path / "none.gguf")
    with pytest.raises(ValueError, match="pre-tokenizer 'klingon'.*'smollm'"):
        from_gguf(write_gguf(tmp_path / "a.gguf", pre="klingon"))
    with pytest.raises(ValueError, match="b.gguf has no end-of-sequence token"):
        from_gguf(write_gguf(tmp_path / "b.gguf", eos=None))
    with pytest.raises(ValueError, match="bos_token_id is 999, which is no token of its"):
        from_gguf(write_gguf(tmp_path / "d.gguf", add_bos=True, bos=999))
    writer = gguf.GGUFWriter(tmp_path / "c.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="c.gguf lacks tokenizer.ggml.model, tokenizer.ggml.pre"):
        from_gguf(tmp_path / "c.gguf")


def test_folder_ids_come_from_every_file(tmp_path):
    tokenizer = load_tokenizer(write_folder(
        tmp_path / "a",
        config={"eos_token": {"content": "<|im_end|>"}, "pad_token": "<tool>", "bos_token": None},
        generation={"eos_token_id": [2, 1]},
        model={"eos_token_id": 0, "bos_token_id": 1},
    ))
    assert tokenizer.eos_ids == (2, 1, 0)
    assert tokenizer.pad_id == 3
    assert tokenizer.bos_id is None  # tokenizer_config.json says so, which outranks config.json.
    tokenizer = from_folder(write_folder(
        tmp_path / "b",
        config={"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
        model={"bos_token_id": 1},
    ))
    assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.bos_id) == ((2,), 0, 1)
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


@pytest.mark.parametrize("saved", [
    {"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}},
    {"padding": {"strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": None,
                 "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}},
    {"padding": {"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": 8,
                 "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}},
])
def test_a_saved_truncation_or_padding_is_off(tmp_path, saved):
    folder = write_folder(tmp_path / "a", config={"eos_token": "<|im_end|>"})
    text = json.loads((folder / "tokenizer.json").read_text()) | saved
    (folder / "tokenizer.json").write_text(json.dumps(text))
    ids = [TOKENS.index(c) for c in "1+2+3"]
    assert tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode("1+2+3").ids != ids
    assert from_folder(folder).encode("1+2+3") == ids


def test_a_saved_dropout_of_merges_is_off(tmp_path):
    folder = write_folder(tmp_path / "a", config={"eos_token": "<|im_end|>"})
    text = json.loads((folder / "tokenizer.json").read_text())
    text["model"]["dropout"] = 0.9
    (folder / "tokenizer.json").write_text(json.dumps(text))
    tokenizer = from_folder(folder)
    assert all(tokenizer.encode("hello") == [TOKENS.index("hello")] for _ in range(9))


@pytest.mark.parametrize("is_added", [True, False])
def test_an_end_token_that_its_file_does_not_mark_is_one_token_and_no_text(tmp_path, is_added):
    """An added token that is not special, or an entry of the vocabulary alone. transformers 5.24 gives
    these ids and this text, too."""
    backend = json.loads(independent_backend().to_str())
    for token in backend["added_tokens"]:
        token["special"] = token["special"] and token["content"] != "<|im_end|>"
    if not is_added:
        backend["added_tokens"] = [t for t in backend["added_tokens"] if t["content"] != "<|im_end|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    tokenizer = from_folder(tmp_path)
    ids = tokenizer.encode("12<|im_end|>")
    assert ids[-1] == TOKENS.index("<|im_end|>") == tokenizer.eos_ids[0]
    assert tokenizer.decode(ids) == "12"


def test_special_tokens_for_a_template_are_those_of_transformers(tmp_path):
    own = chat_templates.TOKENS | {"extra_special_tokens": {"image": "<image>"}}
    tokenizer = from_folder(write_folder(tmp_path / "a", config=own))
    assert tokenizer.special == {"image": "<image>",
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "boi_token": "<tool>",
    }
    config = {"eos_token": "<|im_end|>", "bos_token": None}
    tokenizer = from_folder(write_folder(tmp_path / "b", config=config, model={"bos_token_id": 1}))
    assert tokenizer.special == {"eos_token": "<|im_end|>"}  # it has none, and says so
    tokenizer = from_folder(write_folder(tmp_path / "c", model={"bos_token_id": 1, "eos_token_id": 2}))
    assert tokenizer.special == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    old = write_folder(tmp_path / "d", config={"eos_token": "<|im_start|>"})
    (old / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert from_folder(old).eos_ids == (2,)
    gguf_file = write_gguf(tmp_path / "tiny.gguf", pad=3)
    assert from_gguf(gguf_file).special == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<tool>",
    }


@pytest.mark.all
def test_folder_template_in_each_of_its_places(tmp_path):
    text = "{{ messages[0]['content'] }}|%s|{{ bos_token }}"
    base = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    plain = write_folder(tmp_path / "a", config=base | {"chat_template": text % "config"})
    assert from_folder(plain).chat(USER) == "2+3?|config|<|im_start|>"
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": text % "named"}]
    listed = write_folder(tmp_path / "b", config=base | {"chat_template": named})
    assert from_folder(listed).chat(USER) == "2+3?|named|<|im_start|>"
    both = write_folder(
        tmp_path / "c", config=base | {"chat_template": text % "config"}, jinja=text % "file"
    )
    assert from_folder(both).chat(USER) == "2+3?|file|<|im_start|>"


def test_folder_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json is missing"):
        load_tokenizer(tmp_path / "nowhere")
    unknown = write_folder(tmp_path / "a", config={"eos_token": "</s>"})
    with pytest.raises(ValueError, match="tokenizer_config.json names the token '</s>'"):
        from_folder(unknown)
    broken = write_folder(tmp_path / "b")
    (broken / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        from_folder(broken)
    bare = write_folder(tmp_path / "c", config={"eos_token": "<|im_end|>"})
    with pytest.raises(ValueError, match="c has no chat template"):
        from_folder(bare).chat(USER)


def cut(text):
    return text[: len(text) // 2]


def newer(text):
    return json.dumps(json.loads(text) | {"model": {"type": "Tomorrow"}})


@pytest.mark.parametrize(("name", "damage", "message"), [
    ("tokenizer.json", cut, "is not JSON, or is cut: .*; copy it again"),
    ("tokenizer.json", newer, rf"read by tokenizers {tokenizers.__version__}: .*pip install -U tokenizers"),
    ("tokenizer.json", lambda text: "[]", "cannot be read by|holds a list, not a JSON object"),
    ("tokenizer.json", lambda text: POINTER, "is a pointer of Git LFS, .*git lfs pull"),
    ("tokenizer_config.json", lambda text: POINTER, "is a pointer of Git LFS"),
    ("tokenizer_config.json", lambda text: "[]", "holds a list, not a JSON object"),
    ("chat_template.jinja", lambda text: POINTER, "is a pointer of Git LFS"),
    ("chat_template.jinja", lambda text: "\udcff", "is not text in UTF-8"),
])
def test_a_file_that_is_not_whole_is_named_with_the_likely_reason(tmp_path, name, damage, message):
    folder = write_folder(tmp_path / "a", config={"eos_token": "<|im_end|>"}, jinja=TEMPLATE)
    path = folder / name
    path.write_bytes(damage(path.read_text()).encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=f"{path}.* ({message})"):
        from_folder(folder)


def test_a_gguf_file_that_is_not_whole_is_named(tmp_path):
    path = write_gguf(tmp_path / "a.gguf")
    whole = path.read_bytes()
    for kept in (0, 3, 40, len(whole) // 2):
        path.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=f"{path} is not a GGUF file, or is cut"):
            load_tokenizer(path)
    path.write_text(POINTER)
    with pytest.raises(ValueError, match=f"{path} is a pointer of Git LFS"):
        load_tokenizer(path)
