"""Text decoded as it comes is the text of all, for each kind of tokenizer and any tokens."""

import random

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxrl_tis.data.tokenizer import ARITHMETIC_CHARS, CharTokenizer
from jaxrl_tis.data.tokenizer_files import from_folder, from_gguf
from jaxrl_tis.engine.text import INCOMPLETE, StopSearch, Text
from tests.data.tokenizer_files_test import write_folder, write_gguf

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MULTIBYTE = "\u00e9\u20ac\U0001f600".encode()  # of two, three and four bytes


def backend(tokens, decoder, special=("<s>", "</s>")):
    """A tokenizer of these tokens, two special ones and one that was added to the vocabulary."""
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    found = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=tokens[0]))
    found.decoder = decoder
    found.add_special_tokens([AddedToken(token, special=True) for token in special])
    found.add_tokens([AddedToken("<tool>")])
    ids = range(found.get_vocab_size())
    return lambda tokens: found.decode([int(token) for token in tokens]), ids


def byte_level():
    """Any byte, alone and in words."""
    table = sorted(pre_tokenizers.ByteLevel.alphabet())
    return backend([*table, "\u0120the", "ing", "\u00c3\u00a9"], decoders.ByteLevel())


def byte_fallback():
    """As Llama 2 and Mistral have it: bytes where there is no piece, the first space dropped."""
    pieces = ["\u2581", "\u2581the", "ing", "a", "\u2581\u2581", "."]
    return backend([*BYTES, *pieces], decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]))


TOKENIZERS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": lambda: backend(["\u2581", "\u2581a", "b", "c\u2581"], decoders.Metaspace()),
    "word_piece": lambda: backend(["un", "##like", "##s", ".", "a", "n't"], decoders.WordPiece()),
    "end_of_word": lambda: backend(["a</w>", "b", "cd</w>"], decoders.BPEDecoder("</w>")),
}


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """(decode, ids) of every tokenizer of data/tokenizer.py and of every usual decoder."""
    folder = tmp_path_factory.mktemp("tokenizers")
    write_gguf(folder / "a.gguf")
    end = {"eos_token": "<|im_end|>"}
    ours = {
        "char": CharTokenizer(ARITHMETIC_CHARS), "gguf": from_gguf(folder / "a.gguf"),
        "folder": from_folder(write_folder(folder / "hf", config=end)),
    }
    found = {name: (t.decode, range(t.vocab_size)) for name, t in ours.items()}
    return found | {name: make() for name, make in TOKENIZERS.items()}


NAMES = ["char", "gguf", "folder", *TOKENIZERS]


def stream(rng, ids, name):
    """Tokens in parts of 1 to 8: often bytes of a whole character, sometimes of a broken one, and
    the same few again and again."""
    few = rng.sample(ids, min(len(ids), rng.choice([2, 5, 1000])))
    tokens = []
    while len(tokens) < 60:
        data = MULTIBYTE[: rng.randint(1, 9)][rng.choice([0, 0, 2, 5]) :]
        if name == "byte_fallback" and rng.random() < 0.3:
            tokens += data
        else:
            tokens += rng.choices(few, k=rng.randint(1, 4))
    while tokens:
        size = rng.choice([1, 1, 2, 8])
        yield tokens[:size]
        tokens = tokens[size:]


def naive_stop(tokens, known, stops, decode, least=0):
    """The whole text at every call, and then token by token: a place where a stop string ends
    behind what the first `least` tokens say for good."""
    floor = len(decode(tokens[:least]).rstrip(INCOMPLETE)) if least else 0
    ends = lambda text: [
        i + len(stop) for stop in stops for i in range(len(text)) if text.startswith(stop, i)
    ]
    holds = lambda n: any(end > floor for end in ends(decode(tokens[:n])))
    counts = range(max(known, least) + 1, len(tokens) + 1)
    return next(filter(holds, counts)) if counts and holds(len(tokens)) else None


@pytest.mark.parametrize("name", NAMES)
def test_the_text_as_it_comes_is_that_of_all(known, name):
    decode, ids = known[name]
    for seed in range(60):
        rng, text, tokens = random.Random(seed), Text(decode), []
        for part in stream(rng, ids, name):
            before = decode(tokens)
            tokens += part
            assert text.add(part) == decode(tokens), (seed, tokens)
            assert text.tokens == tokens
            assert before[: text.same] == decode(tokens)[: text.same]


@pytest.mark.parametrize("name", NAMES)
def test_stop_strings_are_found_where_the_whole_text_has_them(known, name):
    """Stops cut out of the text that comes, so that they begin and end in tokens, and others."""
    decode, ids = known[name]
    found = held = 0
    for seed in range(150):
        rng = random.Random(seed)
        parts = list(stream(rng, ids, name))
        whole = decode(sum(parts, []))
        at = rng.randrange(len(whole)) if whole else 0
        stops = tuple({whole[at : at + rng.randint(1, 12)] or "!", "\u20aca", "no"})
        resumed = rng.choice([0, 0, 3])
        tokens, least = sum(parts[:resumed], []), rng.choice([0, 0, 2, 7])
        search = StopSearch(stops, decode, tokens, least)
        for part in parts[resumed:]:
            expected = naive_stop(np.array(tokens + part), len(tokens), stops, decode, least)
            assert search(part) == expected, (seed, stops, tokens, part)
            tokens = tokens + part
            if expected is not None:
                found += expected < len(tokens)
                held += least > 0
                break
    assert found > 5, "stops within a part"
    assert held > 5


@pytest.mark.parametrize("text, known, stops, count", [
    ("hello", 0, ("l",), 3), ("hello", 0, ("ll",), 4), ("hello", 0, ("lo", "ell"), 4),
    ("hello", 0, ("x",), None), ("", 0, ("x",), None), ("hello", 3, ("lo",), 5),
])
def test_the_first_token_that_completes_a_stop_string(text, known, stops, count):
    tokens = list(text.encode())
    search = StopSearch(stops, lambda t: bytes(t.tolist()).decode(), tokens[:known])
    assert search(tokens[known:]) == count


@pytest.mark.parametrize("least, count", [(0, 3), (2, 3), (3, 4), (4, 7), (6, 7), (7, None)])
def test_no_stop_string_ends_within_the_first_tokens(least, count):
    tokens = list(b"hello lo")
    search = StopSearch(("l", " l"), lambda t: bytes(t.tolist()).decode(), (), least)
    parts = [search(tokens[i : i + 2]) for i in range(0, len(tokens), 2)]
    assert next((part for part in parts if part), None) == count


def test_no_step_decodes_more_than_a_few_tokens():
    """As long as characters end: three, and up to eight new ones, however long the text is."""
    sizes = []
    decode = lambda tokens: sizes.append(len(tokens)) or bytes(tokens.tolist()).decode()
    search = StopSearch(("no such text",), decode)
    for step in range(200):
        sizes.clear()
        assert search(list(b"a b c de")) is None
        assert sum(sizes) <= 3 * 8 and len(sizes) <= 2, step


def test_a_character_in_parts_is_known_once_it_ends():
    # "a\u20ac": 61 E2 82 AC, a byte in each token.
    text = Text(lambda tokens: bytes(tokens.tolist()).decode("utf-8", "replace"))
    assert [text.add([byte]) for byte in (0x61, 0xE2, 0x82, 0xAC, 0x62)] == [
        "a", "a\ufffd", "a\ufffd", "a\u20ac", "a\u20acb"
    ]


def test_ids_that_the_tokenizer_lacks_stand_in_the_way_of_no_stop_string():
    tokenizer = CharTokenizer(ARITHMETIC_CHARS)
    beyond, (one, two) = tokenizer.vocab_size + 7, tokenizer.encode("12")
    search = StopSearch(("12",), tokenizer.decode)
    assert search([beyond, one]) is None
    assert search([beyond, beyond]) is None
    assert search([two, one]) == 5
    assert Text(tokenizer.decode).add([one, beyond, two]) == "12"
