"""Real clients on a real engine behind a socket: `openai`, and the training client of verifiers.

The client of verifiers 0.4 (96 packages, 570 MB, `openai` below 3) has an environment of its own.
Its test runs where VERIFIERS_PYTHON names the Python of one:

    python3.11 -m venv /tmp/verifiers && /tmp/verifiers/bin/pip install 'verifiers>=0.4,<0.5'
    VERIFIERS_PYTHON=/tmp/verifiers/bin/python python -m pytest tests/serve/clients_test.py
"""

import json
import os
import pathlib
import subprocess
import time

import httpx
import numpy as np
import openai
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxrl_tis.build import build
from jaxrl_tis.endpoint.request import Limits
from jaxrl_tis.serve import setup as serving
from tests import tiny
from tests.asgi import listening
from tests.data import chat_templates

pytestmark = pytest.mark.compiles
CONTEXT, NEW = 448, 12  # tokens of a sequence, and of an answer
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OTHERS = [f"<{slash}{name}>" for name in ("tool_call", "tool_response", "think") for slash in ("", "/")]
TOOL = {"type": "function", "function": {
    "name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}},
}}
TALK = [
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]
PARAMS = dict(temperature=0.7, max_tokens=NEW, seed=5)


def write_tokenizer(folder: pathlib.Path, template=chat_templates.TEMPLATES["qwen2.5"]) -> None:
    """A byte is a token; the marks of ChatML and of tool calls are tokens too."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL, *OTHERS]
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    backend.add_tokens([AddedToken(name, normalized=False) for name in OTHERS])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": SPECIAL[0],
        "eos_token": SPECIAL[2], "bos_token": SPECIAL[0], "chat_template": template,
    }))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(port, tokenizer, its folder) of the server of a decoder with experts and random weights."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    config = tiny.config(
        task__tokenizer=str(folder), task__max_prompt_tokens=CONTEXT - NEW,
        rollout__max_new_tokens=NEW, engine__prefill_chunk=64, engine__page_size=64,
        model__num_experts=4, model__expert_dim=32, engine__record_routes=True,
    )
    setup = build(config, penalties=True, top_n=3)
    limits = Limits(
        body_bytes=2**20, context_tokens=setup.engine.max_length, max_tokens=NEW, choices=4,
        logprobs=3, seconds=60.0,
    )
    params = serving.load(setup, None)
    with listening(serving.make_app(setup, params, limits, 8, None, "127.0.0.1")) as port:
        yield port, setup.tokenizer, folder


@pytest.fixture(scope="module")
def client(server):
    port, _, _ = server
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY", max_retries=0
    ) as client:
        yield client


def post(client, path, body):
    """The JSON of a route beside /v1, asked as training clients do."""
    url = f"{str(client.base_url).removesuffix('/v1/')}{path}"
    return client.post(url, cast_to=httpx.Response, body=body).json()


@pytest.mark.all
def test_the_model_is_listed_with_its_context(client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len, model.version) == ("tiny", CONTEXT, 0)
    assert 0 <= time.time() - model.created < 3600


def test_a_conversation_with_tools(client, server):
    _, tokenizer, _ = server
    shown = post(client, "/tokenize", {"messages": TALK, "tools": [TOOL]})
    text = post(client, "/detokenize", {"tokens": shown["tokens"]})["prompt"]
    for part in ('"name": "add"', '{"name": "add", "arguments": {"a": 1}}', "<result>3</result>"):
        assert part in text
    assert text.endswith("<|im_start|>assistant\n") and shown["max_model_len"] == CONTEXT
    body = dict(model="tiny", messages=TALK, tools=[TOOL], logprobs=True, **PARAMS)
    reply = client.chat.completions.create(**body, extra_body={"return_token_ids": True})
    (choice,) = reply.choices
    assert reply.prompt_token_ids == shown["tokens"]
    ids = choice.token_ids
    assert len(ids) == len(choice.logprobs.content) == len(choice.versions) > 0
    assert choice.message.content == tokenizer.decode(ids)
    # The same ids, sampled without a template.
    alone = post(client, "/inference/v1/generate", {
        "model": "tiny", "token_ids": shown["tokens"], "sampling_params": PARAMS | {"logprobs": 1},
    })["choices"][0]
    assert alone["token_ids"] == ids and alone["finish_reason"] == choice.finish_reason
    read = len(shown["tokens"]) + len(ids) - 1
    assert alone["routed_experts"]["shape"] == [read, 1, 2], "a layer, two experts per token"
    np.testing.assert_allclose(
        [c["logprob"] for c in alone["logprobs"]["content"]],
        [c.logprob for c in choice.logprobs.content], rtol=1e-5,
    )


@pytest.mark.parametrize("stop", [[], ["zz"]])
def test_a_stream_adds_up_to_the_whole_answer(client, stop):
    body = dict(
        model="tiny", messages=TALK, tools=[TOOL], logprobs=True, top_logprobs=1, stop=stop, n=2,
        extra_body={"return_token_ids": True}, **PARAMS,
    )
    whole = client.chat.completions.create(**body)
    text, ids, logprobs, prompts = {0: "", 1: ""}, {0: [], 1: []}, {0: [], 1: []}, []
    for chunk in client.chat.completions.create(**body, stream=True):
        (choice,) = chunk.choices
        text[choice.index] += choice.delta.content or ""
        ids[choice.index] += choice.token_ids
        logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
        prompts += [chunk.prompt_token_ids] if "prompt_token_ids" in chunk.model_extra else []
    assert prompts == [whole.prompt_token_ids] * 2
    for choice in whole.choices:
        i = choice.index
        assert (text[i], ids[i]) == (choice.message.content, choice.token_ids)
        assert [c.token for c in logprobs[i]] == [c.token for c in choice.logprobs.content]
        assert len(logprobs[i]) == len(ids[i])


@pytest.mark.parametrize("route", ["generate", "completions", "chat"])
def test_log_probs_are_those_of_the_filtered_distribution(client, route):
    """Of three kept tokens the probabilities sum to 1; the model's own do not."""
    filters = PARAMS | {"top_k": 3}
    if route == "generate":
        body = {"token_ids": [65, 66, 67], "sampling_params": filters | {"logprobs": 3}}
        (choice,) = post(client, "/inference/v1/generate", body)["choices"]
        entries = choice["logprobs"]["content"]
        rows = [(e["logprob"], e["raw_logprob"], [t["logprob"] for t in e["top_logprobs"]])
                for e in entries]
    elif route == "completions":
        reply = client.completions.create(
            model="tiny", prompt=[65, 66, 67], logprobs=3, **PARAMS, extra_body={"top_k": 3}
        )
        logprobs = reply.choices[0].logprobs
        # Tokens with equal texts share an entry.
        rows = [(behav, raw, list(top.values())) for behav, raw, top in zip(
            logprobs.token_logprobs, logprobs.raw_logprobs, logprobs.top_logprobs, strict=True) if len(top) == 3]
    else:
        reply = client.chat.completions.create(
            model="tiny", messages=TALK[:1], logprobs=True, top_logprobs=3, **PARAMS,
            extra_body={"top_k": 3},
        )
        rows = [(e.logprob, e.raw_logprob, [t.logprob for t in e.top_logprobs])
                for e in reply.choices[0].logprobs.content]
    assert rows
    for behav, raw, top in rows:
        assert sum(np.exp(top)) == pytest.approx(1, abs=1e-5) and raw < behav - 0.1
        assert min(abs(behav - logp) for logp in top) < 1e-6


@pytest.mark.parametrize("route, body, error, words", [
    ("chat", {"messages": TALK, "tools": ["add"]}, openai.BadRequestError, "tools[0] is 'add'; give"),
    ("chat", {"messages": TALK, "tool_choice": "required"}, openai.BadRequestError, "tool_choice is"),
    ("chat", {"messages": TALK, "model": "other"}, openai.NotFoundError, "'other' is not served"),
    ("completions", {"prompt": [3] * CONTEXT}, openai.BadRequestError, f"give 1 to {CONTEXT - 1}"),
])
def test_a_refusal_is_one_sentence(client, route, body, error, words):
    create = client.chat.completions.create if route == "chat" else client.completions.create
    with pytest.raises(error) as refused:
        create(**{"model": "tiny"} | body)
    message = refused.value.body["message"]
    assert words in message and "\n" not in message


@pytest.mark.skipif("VERIFIERS_PYTHON" not in os.environ, reason="an environment of its own")
def test_two_turns_of_the_training_client_of_verifiers(client, server):
    port, _, folder = server
    script = pathlib.Path(__file__).with_name("verifiers_client.py")
    ran = subprocess.run(
        [os.environ["VERIFIERS_PYTHON"], str(script), f"http://127.0.0.1:{port}/v1", str(folder)],
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "HF_HUB_OFFLINE": "1"},
        text=True, capture_output=True, timeout=160,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    branches = json.loads(ran.stdout.splitlines()[-1])
    assert len(branches) == 1, "a second branch: ids of a turn were not those of the turn before"
    ((ids, is_sampled, logprobs, routes, reward),) = branches
    assert len(ids) == len(is_sampled) == len(logprobs) and reward == 1
    assert routes == [len(ids), 1, 2], "the experts of both turns join"
    # Each run of sampled tokens is a turn. The engine samples it again from the ids before it.
    edges = np.flatnonzero(np.diff([False, *is_sampled, False])).reshape(-1, 2)
    assert len(edges) == 2
    for start, end in edges.tolist():
        params = dict(temperature=1.0, seed=5, max_tokens=end - start, logprobs=1, ignore_eos=True)
        (choice,) = post(client, "/inference/v1/generate", {
            "token_ids": ids[:start], "sampling_params": params,
        })["choices"]
        assert choice["token_ids"] == ids[start:end]
        np.testing.assert_allclose(
            logprobs[start:end], [c["logprob"] for c in choice["logprobs"]["content"]], rtol=1e-4
        )
