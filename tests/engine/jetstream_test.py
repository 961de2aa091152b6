"""The adapter under JetStream's own interface and orchestrator; `./launch/jetstream.sh` runs this.

What is drawn must be what our scheduler draws with the same engine.
"""

import asyncio
import dataclasses
import functools
import logging

import jax
import numpy as np
import pytest

engine_api = pytest.importorskip("jetstream.engine.engine_api")

from jaxrl_tis.data.tokenizer import CharTokenizer
from jaxrl_tis.engine import jetstream
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.engine import Engine
from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.engine.scheduler import Scheduler
from jaxrl_tis.models import transformer
from jaxrl_tis.models.config import ModelConfig, MoeConfig, RopeConfig
from jaxrl_tis.rollouts.source import generate

TOKENIZER = CharTokenizer("".join(map(chr, range(ord("A"), ord("A") + 40))))
CONFIG = ModelConfig(
    family="qwen3", vocab_size=43, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=48, rope=RopeConfig(kind="default", theta=10000.0), max_position=48,
    norm_eps=1e-5, qkv_bias=False, qk_norm=True, tie_embeddings=False,
)
MAX_TOKENS = 9
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.5, top_k=20)
ENGINES = {"unrolled": {}, "scanned_kv8": dict(unroll=False, cache_dtype="int8")}
# The start token and n more; at most 3 chunks of 8.
PROMPTS = [np.array([1, *range(3, 3 + n)], np.int32) for n in (4, 15, 1, 8, 22, 7, 2)]


@functools.cache
def engine(name="unrolled"):
    return Engine(CONFIG, EngineConfig(
        slots=3, max_length=48, page_size=8, steps=1, prefill_batch=1, prefill_chunk=8,
        **ENGINES[name],
    ))


@functools.cache
def params():
    """Strong enough to look at the whole prompt."""
    return jax.tree.map(lambda x: 4 * x, transformer.init(CONFIG, jax.random.key(0)))


def adapter(name="unrolled", sampling=GREEDY):
    # Greater than what the clients ask for, who are served by JetStream's own count.
    sampling = SamplingParams(**{**vars(sampling), "max_tokens": 40})
    return jetstream.Engine(engine(name), TOKENIZER, sampling, seed=5)


@functools.cache
def expected(name="unrolled", sampling=GREEDY):
    """Tokens that our scheduler draws, without the end token, which JetStream does not return."""
    ours = SamplingParams(**{
        **vars(sampling), "max_tokens": MAX_TOKENS, "stop_ids": TOKENIZER.eos_ids
    })
    scheduler = Scheduler(engine(name), engine(name).load(params()))
    requests = [Request(str(i), prompt, 5, ours) for i, prompt in enumerate(PROMPTS)]
    trajectories = generate(scheduler, requests)
    is_stop = [t.stop_reason == "stop" for t in trajectories]
    return [t.tokens[: len(t.tokens) - s].tolist() for t, s in zip(trajectories, is_stop, strict=True)]


def drive(jet: "engine_api.Engine") -> list[list[int]]:
    """Tokens of the prompts, by nothing but the abstract interface: slots are reused."""
    serving, state = jet.load_params(params()), jet.init_decode_state()
    tokenizer = jet.build_tokenizer(jet.get_tokenizer())
    waiting, slots, out = list(enumerate(PROMPTS)), {}, [[] for _ in PROMPTS]
    while waiting or slots:
        for slot in range(jet.max_concurrent_decodes):
            if slot not in slots and waiting:
                slots[slot], prompt = waiting.pop(0)
                padded = np.pad(prompt, (0, jet.max_prefill_length - len(prompt)))
                prefix = jet.prefill(params=serving, padded_tokens=padded, true_length=len(prompt))
                prefix = jax.device_put(prefix, jet.get_prefix_destination_sharding())
                state = jet.insert(prefix, state, slot)
                jax.tree.map(lambda x: x.delete(), prefix)  # as JetStream does
        state, result = jet.generate(serving, state)
        result = result.convert_to_numpy()
        for slot, index in list(slots.items()):
            data = result.get_result_at_slot(slot)
            token, valid = int(data.tokens[0, 0]), bool(data.valid[0, 0])
            is_end = token in tokenizer.stop_tokens or not valid
            if not is_end:
                out[index].append(token)
                assert int(data.lengths[0]) == len(out[index])
            if is_end or len(out[index]) == MAX_TOKENS:
                del slots[slot]
    return out


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_abstract_interface_draws_what_our_scheduler_draws(name, sampling):
    tokens = expected(name, sampling)
    assert len(set(map(tuple, tokens))) > 3, "the prompts matter"
    jet = adapter(name, sampling)
    assert isinstance(jet, engine_api.Engine)
    assert drive(jet) == tokens


def test_a_sequence_that_fills_its_slot_stops_being_valid():
    jet = adapter()
    serving, state = jet.load_params(params()), jet.init_decode_state()
    prompt = np.arange(3, 35, dtype=np.int32)  # of 48 positions
    prefix = jet.prefill(params=serving, padded_tokens=prompt, true_length=32)
    state, valid = jet.insert(prefix, state, 1), []
    for _ in range(18):
        state, result = jet.generate(serving, state)
        slots = [result.get_result_at_slot(slot) for slot in range(3)]
        valid.append([int(data.valid[0, 0]) for data in slots])
    count = sum(v for _, v, _ in valid)
    assert 1 <= count <= 16 and valid == [[0, 1, 0]] * count + [[0, 0, 0]] * (18 - count)
    assert [int(data.lengths[0]) for data in slots] == [0, count, 0]


@pytest.fixture
def orchestrator(monkeypatch):
    """JetStream's module, with the one function of JAX that is gone since, and without its log of
    every step."""
    monkeypatch.setattr(jax, "tree_map", jax.tree.map, raising=False)
    from jetstream.core import orchestrator

    orchestrator.root.removeHandler(orchestrator.handler)
    orchestrator.root.setLevel(logging.WARNING)
    return orchestrator


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("is_text", [True, False])
def test_jetstream_s_orchestrator(orchestrator, is_interleaved, is_text):
    from jetstream.core.proto import jetstream_pb2

    jet = adapter()
    serving = jet.load_params(params())
    driver = orchestrator.Driver([jet], [jet], [serving], [serving], is_interleaved)
    client = orchestrator.LLMOrchestrator(driver=driver)
    text, ids = (jetstream_pb2.DecodeRequest.TextContent, jetstream_pb2.DecodeRequest.TokenContent)

    async def decode(prompt):
        # JetStream puts the start token before the prompt.
        content = dict(token_content=ids(token_ids=prompt[1:].tolist()))
        if is_text:
            content = dict(text_content=text(text=TOKENIZER.decode(prompt)))
        request = jetstream_pb2.DecodeRequest(max_tokens=MAX_TOKENS, **content)
        samples = [r.stream_content.samples[0] async for r in client.Decode(request)]
        return [token for sample in samples for token in sample.token_ids], samples

    async def decode_all():
        try:
            return await asyncio.wait_for(asyncio.gather(*map(decode, PROMPTS)), 120)
        finally:
            await asyncio.to_thread(driver.stop)  # its threads call the loop until they end

    got = asyncio.run(decode_all())
    assert [tokens for tokens, _ in got] == expected()
    if is_text:
        texts = ["".join(sample.text for sample in samples) for _, samples in got]
        assert texts == [TOKENIZER.decode(tokens) for tokens in expected()]


def test_tokenizer():
    tokenizer = adapter().build_tokenizer(adapter().get_tokenizer())
    padded, length = tokenizer.encode("AB", is_bos=True, max_prefill_length=32, jax_padding=False)
    assert length == 3 and padded.tolist() == [1, 3, 4] + [0] * 13
    assert tokenizer.encode("AB", is_bos=False)[1] == 2 and tokenizer.decode([3, 4]) == "AB"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 0)
    assert tokenizer.stop_tokens == {2}


def test_a_stop_id_of_the_caller_ends_a_sequence():
    tokens = expected()[0]
    stop = tokens[2]
    jet = adapter(sampling=dataclasses.replace(GREEDY, stop_ids=(stop,)))
    serving, state = jet.load_params(params()), jet.init_decode_state()
    prefix = jet.prefill(params=serving, padded_tokens=PROMPTS[0], true_length=len(PROMPTS[0]))
    state, valid = jet.insert(prefix, state, 0), []
    for _ in range(len(tokens)):
        state, result = jet.generate(serving, state)
        valid.append(int(result.get_result_at_slot(0).valid[0, 0]))
    end = tokens.index(stop) + 1
    assert valid == [1] * end + [0] * (len(tokens) - end)


def test_what_cannot_be_driven():
    sizes = dict(slots=2, max_length=16, page_size=8, steps=2, num_pages=4)
    with pytest.raises(ValueError, match="steps=2.*4 pages, the slots need 5.*max_length=16"):
        jetstream.Engine(Engine(CONFIG, EngineConfig(**sizes)), TOKENIZER, GREEDY)
    searched = SamplingParams(presence_penalty=1.0, stop_strings=("A",))
    with pytest.raises(ValueError, match="JetStream: no counts of tokens.*; stop strings"):
        adapter(sampling=searched)
    with pytest.raises(ValueError, match="JetStream: no counts of tokens"):
        adapter(sampling=SamplingParams(min_tokens=3))  # which bars the end tokens
    with pytest.raises(ValueError, match="33 stop ids, at most 32 are possible; prompt_logprobs"):
        adapter(sampling=SamplingParams(stop_ids=tuple(range(3, 35)), prompt_logprobs=True))
    experts = dataclasses.replace(CONFIG, moe=MoeConfig(num_experts=4, top_k=2, expert_dim=16))
    recording = EngineConfig(slots=1, max_length=48, steps=1, record_routes=True)
    with pytest.raises(ValueError, match="JetStream: record_routes, and .* no place for routes$"):
        jetstream.Engine(Engine(experts, recording), TOKENIZER, GREEDY)
    jet = adapter()
    assert jet.max_prefill_length == 32
    for length in (0, 33):
        with pytest.raises(ValueError, match="give 1 to 32"):
            jet.prefill(params=None, padded_tokens=np.zeros(40), true_length=length)
    with pytest.raises(NotImplementedError):
        jet.prefill(params=None, existing_prefix=1, padded_tokens=np.zeros(4), true_length=1)
