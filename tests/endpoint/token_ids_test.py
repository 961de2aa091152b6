"""The route of token ids: its body, its answer by hand, and both through a scheduler whose engine
is made of arithmetic."""

import base64
import json

import numpy as np
import pytest

from jaxrl_tis.data.tokenizer import CharTokenizer
from jaxrl_tis.endpoint.request import Limits, UnknownModel
from jaxrl_tis.endpoint.token_ids import Answer, parse
from jaxrl_tis.engine.records import SamplingParams, Trajectory
from tests import arithmetic
from tests.arithmetic import alone
from tests.endpoint.app_test import PROMPT, SEED, ask

PATH = "/inference/v1/generate"
TOKENIZER = CharTokenizer("abcdefghijklmnopqrst")
LIMITS = Limits(
    body_bytes=10_000, context_tokens=28, max_tokens=20, choices=3, logprobs=2, seconds=5.0
)


def of(body):
    return parse(json.dumps(body).encode(), "m", 23, TOKENIZER, LIMITS)


def test_a_body_of_a_training_client():
    """Parameters of other engines are ignored, known ones arrive."""
    g = of({
        "model": "m", "token_ids": [3, 0, 22], "cache_salt": "s", "priority": 3,
        "sampling_params": {
            "temperature": 0.5, "top_p": 0.9, "max_tokens": 4, "seed": 7, "stop_token_ids": [9, 2],
            "logprobs": 1, "skip_special_tokens": False, "routed_experts_prompt_start": 2,
            "detokenize": False, "extra_args": {"x": 1}, "reasoning_effort": "low",
        },
    })
    (choice,) = g.choices
    assert choice.prompt.tolist() == [3, 0, 22] and choice.sampling == SamplingParams(
        temperature=0.5, top_p=0.9, max_tokens=4, stop_ids=(2, 9)
    )
    assert (g.seed, g.logprobs, g.routes_start, g.returns_ids) == (7, 1, 2, False)


def test_without_parameters():
    g = of({"token_ids": [3], "return_token_ids": True, "stream": False, "sampling_params": None})
    assert g.choices[0].sampling == SamplingParams(stop_ids=(2,), max_tokens=20)
    assert g.logprobs is None and g.routes_start == 0 and g.returns_ids and not g.is_streamed
    # A long conversation has the room that is left.
    assert of({"token_ids": [3] * 25}).choices[0].sampling.max_tokens == 3


@pytest.mark.parametrize("body, words", [
    (b"{", "not JSON"), ({}, "token_ids must be a list of token ids"),
    ({"token_ids": "ab"}, "token_ids is a str; it must be list"),
    ({"token_ids": [1.0]}, "token_ids must be"), ({"token_ids": [True]}, "token_ids must be"),
    ({"token_ids": [[1]]}, "token_ids must be"), ({"token_ids": []}, "0 prompt tokens; give 1 to 27"),
    ({"token_ids": [3] * 28}, "28 prompt tokens"), ({"token_ids": [23]}, "0 to 22"),
    ({"token_ids": [-1]}, "0 to 22"), ({"prompt": "a"}, "unknown field 'prompt'; known are model, token"),
    ({"token_ids": [1], "stream": True}, "stream is True, which is not served"),
    ({"token_ids": [1], "features": {"a": 1}}, "features is {'a': 1}, which is not served"),
    ({"token_ids": [1], "content_parts": [{"type": "image_url"}]}, "content_parts is"),
    ({"token_ids": [1], "sampling_params": []}, "sampling_params is a list; it must be dict"),
    ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature is -1"),
    ({"token_ids": [1], "sampling_params": {"top_p": 0}}, "top_p=0"),
    ({"token_ids": [1], "sampling_params": {"max_tokens": 21}}, "max_tokens is 21; give 1 to 20"),
    ({"token_ids": [1], "sampling_params": {"n": 4}}, "n is 4; give 1 to 3"),
    ({"token_ids": [1], "sampling_params": {"logprobs": 3}}, "3 top log-probs for each token; give 0 to 2"),
    ({"token_ids": [1], "sampling_params": {"logprobs": True}}, "logprobs is a bool"),
    ({"token_ids": [1], "sampling_params": {"stop_token_ids": ["a"]}}, "give a list of token ids"),
    ({"token_ids": [1], "sampling_params": {"allowed_token_ids": [1]}}, "allowed_token_ids is [1], which"),
    ({"token_ids": [1], "sampling_params": {"bad_words": ["a"]}}, "bad_words is"),
    ({"token_ids": [1], "sampling_params": {"structured_outputs": {}}}, "structured_outputs is"),
    ({"token_ids": [1], "sampling_params": {"prompt_logprobs": 0}}, "prompt_logprobs is 0, which is not"),
    ({"token_ids": [1, 2], "sampling_params": {"routed_experts_prompt_start": 3}},
     "routed_experts_prompt_start is 3; give 0 to 2, the number of token_ids"),
    ({"token_ids": [1], "sampling_params": {"routed_experts_prompt_start": -1}}, "start is -1; give 0 to 1"),
])
def test_what_is_wrong_is_said(body, words):
    with pytest.raises(ValueError) as error:
        parse(body, "m", 23, TOKENIZER, LIMITS) if isinstance(body, bytes) else of(body)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_end_of_the_prompt_may_begin_the_experts():
    body = {"token_ids": [1, 2], "sampling_params": {"routed_experts_prompt_start": 2}}
    assert of(body).routes_start == 2


def test_another_model():
    with pytest.raises(UnknownModel, match="'other' is not served; use 'm'"):
        of({"token_ids": [1], "model": "other"})


def record(**fields):
    """Two sampled tokens, the second of them an end token, of weights 4 and 5."""
    pair = lambda *values: np.array(values, np.float32)
    return Trajectory(**dict(
        id="", prompt=np.array([3, 0, 22]), tokens=np.array([8, 2]), logp_behav=pair(-0.25, -0.5),
        logp_raw=pair(-1.25, -1.5), entropy=pair(0, 0), version=np.array([4, 5]), stop_reason="stop",
        seed=7, request=0, quant_id="", temperature=0.5, top_ids=np.array([[8, 6], [2, -1]]),
        top_logps=np.array([[-0.25, -1.5], [-0.5, -np.inf]], np.float32),
    ) | fields)


def answer(trajectory, **fields):
    generation = of({"token_ids": [3, 0, 22]} | fields)
    return Answer(generation, lambda versions: [f"of {versions}"]).whole([trajectory]), generation


def entry(id, logp):
    return {"token": f"token_id:{id}", "token_id": id, "logprob": logp}


def test_an_answer_by_hand():
    params = {"logprobs": 2, "seed": 7}
    found, generation = answer(record(), sampling_params=params, return_token_ids=True)
    assert found == {
        "request_id": generation.id, "seed": 7, "prompt_token_ids": [3, 0, 22],
        "choices": [{
            "index": 0, "token_ids": [8, 2], "finish_reason": "stop", "versions": [4, 5],
            "logprobs": {"content": [
                entry(8, -0.25) | {
                    "raw_logprob": -1.25, "top_logprobs": [entry(8, -0.25), entry(6, -1.5)],
                },
                entry(2, -0.5) | {"raw_logprob": -1.5, "top_logprobs": [entry(2, -0.5)]},
            ]},
            "weight_versions": ["of [4, 5]"],
        }],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }
    found, _ = answer(record())
    assert found["choices"][0]["logprobs"] is None and "prompt_token_ids" not in found
    assert "sampling_mask" not in found["choices"][0]
    # The ids with positive probability at each token; at the second there were too many.
    found, _ = answer(record(kept=np.array([[8, 6, -1], [-1, -1, -1]], np.int32)))
    assert found["choices"][0]["sampling_mask"] == [[8, 6], []]


def test_a_log_prob_that_json_lacks_is_null():
    diverged = record(
        logp_behav=np.array([np.nan, -0.5]), top_logps=np.array([[np.nan, -1], [-0.5, -np.inf]])
    )
    found, _ = answer(diverged, sampling_params={"logprobs": 1})
    entry, _ = json.loads(json.dumps(found, allow_nan=False))["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] is None and entry["top_logprobs"][0]["logprob"] is None


@pytest.mark.parametrize("start", [0, 2, 3])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_the_experts_of_a_token(start, dtype):
    routes = np.arange(4 * 2 * 3).reshape(4, 2, 3).astype(dtype)  # the last token has none
    params = {"routed_experts_prompt_start": start}
    found, _ = answer(record(routes=routes), sampling_params=params)
    encoded = found["choices"][0]["routed_experts"]
    assert list(encoded) == ["data", "shape", "start", "dtype"] and encoded["start"] == start
    rows = np.frombuffer(base64.b64decode(encoded["data"]), encoded["dtype"])
    np.testing.assert_array_equal(rows.reshape(encoded["shape"]), routes[start:])


# Through the scheduler


def sampled(prompt, seed=SEED, **sampling):
    """(tokens, stop reason, log-probs) of a prompt that is answered alone."""
    request = arithmetic.request("", prompt, seed, **{"stop_ids": (2,), "max_tokens": 20} | sampling)
    tokens, reason = alone(request)
    total = lambda n: sum(arithmetic.key(t, s, 0) for s, t in enumerate([*prompt, *tokens][:n]))
    drawn = [arithmetic.drawn(total(n), request, n, 0) for n in range(len(prompt), len(prompt) + len(tokens))]
    assert [token for token, _ in drawn] == tokens
    return tokens, reason, [logp for _, logp in drawn]


@pytest.mark.parametrize("params", [
    {"max_tokens": 5}, {"stop_token_ids": [sampled(PROMPT)[0][6]]}, {"n": 2, "max_tokens": 3},
])
def test_ids_and_log_probs_are_the_record_s(params):
    body = {"token_ids": PROMPT, "sampling_params": {"seed": SEED, "logprobs": 0} | params}
    reply = ask(body, PATH)
    assert reply.status == 200
    stop_ids = (2, *params.get("stop_token_ids", ()))
    tokens, reason, logps = sampled(PROMPT, max_tokens=params.get("max_tokens", 20), stop_ids=stop_ids)
    assert len(reply.json["choices"]) == params.get("n", 1)
    for choice in reply.json["choices"]:
        assert (choice["token_ids"], choice["finish_reason"]) == (tokens, reason)
        content = choice["logprobs"]["content"]
        assert [c["token"] for c in content] == [f"token_id:{token}" for token in tokens]
        assert [c["token_id"] for c in content] == tokens
        assert choice["weight_versions"] == [{"version": "server-0", "start": 0, "end": len(tokens)}]
        assert [c["logprob"] for c in content] == logps
        assert choice["versions"] == [0] * len(tokens) and "routed_experts" not in choice
    if "stop_token_ids" in params:
        assert reason == "stop" and tokens[-1] == stop_ids[-1], "the stop token belongs to the answer"


def test_a_conversation_in_turns_is_the_same_as_one_long_sequence():
    """The noise depends on the seed and the position."""
    params = {"seed": SEED, "logprobs": 0}
    whole = ask({"token_ids": PROMPT, "sampling_params": params | {"max_tokens": 9}}, PATH)
    first = ask({"token_ids": PROMPT, "sampling_params": params | {"max_tokens": 4}}, PATH)
    ids = first.json["choices"][0]["token_ids"]
    body = {"token_ids": PROMPT + ids, "sampling_params": params | {"max_tokens": 5}}
    second = ask(body, PATH).json["choices"][0]
    (expected,) = whole.json["choices"]
    assert ids + second["token_ids"] == expected["token_ids"]
    assert second["logprobs"]["content"] == expected["logprobs"]["content"][4:]


def test_experts_come_where_the_engine_records_them():
    engine = arithmetic.Engine(route_shape=(2, 3))
    params = {"seed": SEED, "max_tokens": 5, "routed_experts_prompt_start": 3}
    reply = ask({"token_ids": PROMPT, "sampling_params": params}, PATH, engine=engine)
    assert b'"routed_experts":{"data":"' in reply.body, "clients look for these bytes"
    (choice,) = reply.json["choices"]
    encoded, tokens = choice["routed_experts"], choice["token_ids"]
    assert encoded["shape"] == [1 + 4, 2, 3]  # the last prompt token, and all sampled ones but the last
    history = [*PROMPT, *tokens]
    totals = np.cumsum([arithmetic.key(token, s, 0) for s, token in enumerate(history)])
    expected = arithmetic.routed(totals, np.arange(len(history)), 0, (2, 3))[3:-1]
    rows = np.frombuffer(base64.b64decode(encoded["data"]), np.uint8).reshape(5, 2, 3)
    np.testing.assert_array_equal(rows, expected)


def test_another_model_is_not_found_and_a_wrong_body_is_refused():
    assert ask({"token_ids": [1], "model": "x"}, PATH).status == 404
    reply = ask({"token_ids": [99]}, PATH)
    assert reply.status == 400 and "0 to 22" in reply.error
