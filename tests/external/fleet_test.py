"""Our own server over loopback as the engine of a run: weights, records, checks."""

import contextlib
import dataclasses
import functools
import pathlib
import shutil
import time
from unittest import mock

import jax
import numpy as np
import pytest

from jaxrl_tis.engine.records import Request, SamplingParams
from jaxrl_tis.external import canary
from jaxrl_tis.external.client import Client, EngineError
from jaxrl_tis.external.protocol import Facts
from jaxrl_tis.external.vllm import Vllm
from jaxrl_tis.external.weights import KEPT
from jaxrl_tis.runtime.cli import MismatchError
from jaxrl_tis.learner.state import initial_policy
from jaxrl_tis.models import transformer
from tests import engines, tiny, weights

pytestmark = pytest.mark.compiles

OWN = dict(engine__quantization="none")
PROMPTS = [[4, 13, 5, 14], [6, 13, 7, 14]]


@pytest.fixture(scope="module")
def url():
    with engines.served(tiny.setup(**OWN)) as found:
        yield found


def setup(folder, url, **overrides):
    (folder / "token").write_text(engines.TOKEN + "\n")
    return tiny.setup(**OWN, **{
        "rollout__driver": "external", "rollout__engines": url,
        "rollout__weights_folder": str(folder / "weights"),
        "rollout__engine_token_file": str(folder / "token"), "rollout__start_timeout": 5.0,
    } | overrides)


def sampled(scheduler, *requests):
    for request in requests:
        scheduler.add(request)
    found, start = {}, time.monotonic()
    while len(found) < len(requests):
        assert time.monotonic() - start < 60
        found |= {t.id: t for t in scheduler.step()}
    return found


def request(id, prompt, **sampling):
    return Request(id, np.array(prompt), 3, SamplingParams(0.8, max_tokens=3, **sampling))


@functools.partial(jax.jit, static_argnums=(1, 3))
def _log_probs(params, model, tokens, program):
    return jax.nn.log_softmax(transformer.logits(params, model, tokens, program=program) / 0.8)


def expected(params, made, trajectory):
    """The log-probs of a record's tokens by one pass over them."""
    tokens = np.concatenate([trajectory.prompt, trajectory.tokens])
    padded = np.pad(tokens, (0, 8 - len(tokens)))[None]
    logps = np.asarray(_log_probs(params, made.model, padded, made.training.learner.program))[0]
    at = np.arange(len(trajectory.prompt), len(tokens))
    return logps[at - 1, tokens[at]]


@pytest.mark.by_jax("XLA compiles and rounds the programs")
def test_an_engine_samples_from_each_version_that_it_is_given(tmp_path, url):
    made = setup(tmp_path, url)
    fleet = made.fleet
    fleet.watch(PROMPTS)
    start = jax.device_get(initial_policy(made.training))
    policies = {3: start, 4: weights.drawn(made.model, seed=1), 5: weights.drawn(made.model, seed=2)}
    scheduler = fleet.scheduler(fleet.serving_params(start, 3), 3)
    with contextlib.closing(scheduler):
        for version, params in policies.items():
            scheduler.set_params(fleet.serving_params(params, version), version)
            found = sampled(scheduler, request("a", PROMPTS[0]), request("b", PROMPTS[1]))
            for t in found.values():
                assert set(t.version.tolist()) == {version} and len(t.tokens) == 3
                np.testing.assert_allclose(t.logp_behav, expected(params, made, t), atol=2e-5)
    kept = sorted(p.name for p in (tmp_path / "weights").iterdir() if p.is_dir())
    assert kept == ["version-4", "version-5"] and len(kept) == KEPT
    assert fleet.serving_params(policies[5], 5) is fleet.serving_params(policies[5], 5)


def test_what_samples_from_other_weights_is_found_in_words(tmp_path, url):
    """Weights that were never read, those of a version before, and log-probs at temperature 1."""
    made = setup(tmp_path, url)
    fleet = made.fleet
    fleet.watch(PROMPTS)
    policies = [weights.drawn(made.model, seed=i) for i in range(2)]
    scheduler = fleet.scheduler(fleet.serving_params(policies[0], 0), 0)
    name = lambda self, path, version: self._name(version)
    copy = shutil.copytree(tmp_path / "weights" / "version-0", tmp_path / "copy")
    with contextlib.closing(scheduler):
        with (
            mock.patch.object(Vllm, "load", name),
            pytest.raises(MismatchError, match="They are those of version 0: the engine did not read"),
        ):
            scheduler.set_params(fleet.serving_params(policies[1], 1), 1)
        # A part of the weights stays: nothing else agrees, and the distance grew from the first sync.
        part = policies[0] | {"final_norm": policies[0]["final_norm"] * 1.01}
        load = Vllm.load
        with (
            mock.patch.object(Vllm, "load", lambda self, path, v: load(self, str(copy), v)),
            pytest.raises(MismatchError, match=rf"(?s)bound {canary.FLOOR}, at the first sync .*Likely keys"),
        ):
            scheduler.set_params(fleet.serving_params(part, 2), 2)
        # It comes back in another mode, whose log-probs are the same at temperature 1.
        [member] = fleet._members
        member.reason = EngineError("it ended")
        raw = dataclasses.replace(FACTS, logprobs="raw_logprobs")
        with mock.patch.object(Vllm, "facts", lambda self: raw):
            scheduler.set_params(fleet.serving_params(policies[1], 3), 3)
        assert member.version is None and "its log-probs are raw_logprobs" in str(member.reason)


FACTS = Facts("m", 8, "float32", "processed_logprobs", -1, None)


@pytest.mark.parametrize("said, match", [
    (dict(logprobs="raw_logprobs"), "its log-probs are raw_logprobs.*--logprobs-mode"),
    (dict(vocab_size=7), "its model has 7 token ids and this run's 19; serve the same model"),
    (dict(max_length=7), ".* at most 7 tokens, and this run's up to 8; raise --max-model-len"),
    (dict(dtype="bfloat16"), "it computes in bfloat16, and engine.dtype is float32"),
])
def test_what_cannot_sample_for_a_run_is_refused_before_it(tmp_path, said, match):
    facts = dataclasses.replace(FACTS, **said)
    made = setup(tmp_path, "http://localhost:1")
    with (
        mock.patch.object(Vllm, "facts", lambda self: facts),
        pytest.raises(ValueError, match=f"the engine at http://localhost:1: {match}"),
    ):
        made.fleet


def test_bad_engines_and_folders_are_refused_in_words(tmp_path, url):
    with pytest.raises(ValueError, match=r"GET http://localhost:1/v1/models failed: .*refused; is the"):
        setup(tmp_path, "http://localhost:1").fleet
    with pytest.raises(ValueError, match="engine_token_file = .*nowhere.* cannot be read"):
        setup(tmp_path, url, rollout__engine_token_file=str(tmp_path / "nowhere")).fleet
    made = setup(tmp_path, url)
    first, other = made.fleet, setup(tmp_path, url, seed=2).fleet
    first.watch(PROMPTS)
    with pytest.raises(ValueError, match=r"weights is in use by process .*rollout.weights_folder"):
        other.watch(PROMPTS)
    first.close()
    with (
        mock.patch("shutil.disk_usage", lambda _: mock.Mock(free=1000)),
        pytest.raises(ValueError, match="has 1e-06 GB free, and 3 versions of the weights take"),
    ):
        other.watch(PROMPTS)
    with (
        mock.patch.object(Vllm, "tokenize", lambda self, text: [1, 2]),
        pytest.raises(ValueError, match="its tokenizer gives the prompt .* other ids"),
    ):
        first.watch(PROMPTS)


def test_an_engine_that_does_not_take_weights_is_told_before_the_first_step(tmp_path, url):
    fleet = setup(tmp_path, url).fleet
    fleet.watch(PROMPTS)
    served = fleet.serving_params(weights.drawn(fleet._setup.model), 0)
    pathlib.Path(served.path, "model.safetensors").unlink()
    with pytest.raises(EngineError, match="(?s)model.safetensors.*does the engine see"):
        fleet.scheduler(served, 0)


def test_keys_that_stay_are_no_sync(tmp_path, url):
    """vLLM clears nothing while requests hold blocks, and says so."""
    kind = Vllm(Client(url, token=engines.TOKEN))
    kept = lambda self, path, body=None, **rest: {"success": not path.startswith("/reset")}
    with (
        mock.patch.object(Client, "post", kept),
        pytest.raises(EngineError, match="keys of older weights would stay"),
    ):
        kind.load("weights/version-1", 1)
