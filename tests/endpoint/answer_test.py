"""Texts of single tokens, by decoders that drop the space before the first."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from jaxrl_tis.endpoint.answer import Answer
from jaxrl_tis.endpoint.request import Choice, Completion
from jaxrl_tis.engine.records import SamplingParams, Trajectory

DECODERS = {
    "strip": decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    "metaspace": decoders.Metaspace(),
}


class Tokenizer:
    eos_ids = (2,)

    def __init__(self, decoder):
        vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581Hello": 3, "\u2581world": 4, "world": 5}
        self.backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        self.backend.decoder = decoder

    def decode(self, ids):
        return self.backend.decode([int(i) for i in ids if i != 2])


def answered(name, is_chat):
    """The answer " world world", with " world" (0.6) and "world" (0.4) as likeliest tokens."""
    zeros, tokens = np.zeros(2), np.array([4, 4], np.int32)
    trajectory = Trajectory(
        "x", np.array([1, 3]), tokens, zeros, zeros, zeros, np.zeros(2, np.int32), "length", 0, 0, "f",
        1.0, top_ids=np.array([[4, 5]] * 2), top_logps=np.log(np.array([[0.6, 0.4]] * 2)),
    )
    choice = Choice("x/0", np.array([1, 3]), 0, SamplingParams(max_tokens=2), index=0)
    completion = Completion("x", [choice], 1, is_chat, False, False, 2, False, ())
    [found] = Answer(completion, "m", Tokenizer(DECODERS[name])).whole([trajectory])["choices"]
    return json.loads(json.dumps(found))


@pytest.mark.parametrize("name", DECODERS)
def test_a_token_has_the_text_that_it_has_behind_another(name):
    found = answered(name, is_chat=False)
    assert found["text"] == "world world"
    assert found["logprobs"]["tokens"] == [" world"] * 2
    for row in found["logprobs"]["top_logprobs"]:
        assert {text: round(np.exp(logp), 3) for text, logp in row.items()} == {" world": 0.6, "world": 0.4}
    entries = answered(name, is_chat=True)["logprobs"]["content"]
    assert bytes(sum((entry["bytes"] for entry in entries), [])).decode() == " world world"
