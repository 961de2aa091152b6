"""A real vLLM on CPUs as the engine of runs, and the faults that a careless set-up plants.

The environment is .venv-vllm, or the folder that JAXRL_TIS_VLLM names; `launch/vllm.sh install` makes
it: 3 GB.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import threading
import time
from unittest import mock

import httpx
import numpy as np
import pytest

from jaxrl_tis import models
from jaxrl_tis.engine.records import SamplingParams
from jaxrl_tis.external import weights as versions
from jaxrl_tis.external.client import Client
from jaxrl_tis.external.vllm import Vllm
from jaxrl_tis.runtime.cli import MismatchError
from jaxrl_tis.models.config import ModelConfig
from tests import tiny, weights

pytestmark = [pytest.mark.all, pytest.mark.compiles]

ROOT = pathlib.Path(__file__).parents[2]
VENV = pathlib.Path(os.environ.get("JAXRL_TIS_VLLM") or ROOT / ".venv-vllm")
SHAPE = dict(
    vocab_size=19, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=8192, rms_norm_eps=1e-6, rope_theta=1e4,
    hidden_act="silu", torch_dtype="float32",
)
FAMILIES = {
    "llama": dict(architectures=["LlamaForCausalLM"], head_dim=32, tie_word_embeddings=True),
    "qwen2": dict(architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True),
    "qwen3": dict(architectures=["Qwen3ForCausalLM"], head_dim=32, tie_word_embeddings=False),
}
CLOSE = 3e-5  # nats, float32 on both sides


@pytest.fixture(scope="module")
def venv():
    if not (VENV / "bin" / "vllm").exists():
        subprocess.run([ROOT / "launch" / "vllm.sh", "install", VENV], check=True, timeout=1500)
    return VENV


@contextlib.contextmanager
def served(venv, model, *arguments):
    """The URL of vLLM with a model, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        ROOT / "launch" / "vllm.sh", "serve", venv, model, str(port), "--max-model-len",
        str(SHAPE["max_position_embeddings"]), "--skip-tokenizer-init", *arguments,
    ]
    with open(model / f"{port}.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    url = f"http://localhost:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health").is_success:
                    break
            assert process.poll() is None, pathlib.Path(log.name).read_text()[-3000:]
            time.sleep(1)
        yield url, process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def folder_of(folder, family):
    """A folder with random weights of a family."""
    hf = SHAPE | FAMILIES[family] | {"model_type": family}
    config = ModelConfig.from_hf(hf)
    folder.mkdir()
    models.save(folder / family, config, weights.drawn(config, seed=3, scale=1.0), with_head=True)
    return folder / family


def settings(model, url, folder, **overrides):
    return {
        "model__path": str(model), "warmup__steps": 0, "engine__quantization": "none",
        "rollout__driver": "external", "rollout__engines": url, "rollout__weights_folder": str(folder),
        "rollout__temperature": 0.7, "steps": 10, "eval__every": 10, "checkpoint__every": 10,
    } | overrides


def gaps(folder):
    return [r["mismatch/log_ratio_abs_max"] for r in tiny.lines(folder) if r["phase"] == "train"]


@pytest.mark.parametrize("family", FAMILIES)
def test_runs_of_a_family_have_no_gap_after_any_sync(tmp_path, venv, family):
    """Ten steps, synchronous and ahead, with learning rates that move the policy."""
    model = folder_of(tmp_path / "m", family)
    with served(venv, model) as (url, _):
        for name, schedule in {"sync": "sync", "ahead": "areal(staleness=2)"}.items():
            tiny.run(tmp_path / name, **settings(
                model, url, tmp_path / "weights", rollout__schedule=schedule, optimizer__lr=1e-2
            ))
            found = gaps(tmp_path / name)
            assert len(found) == 10 and max(found) < CLOSE, (name, found)


def test_adapters_reach_the_engine_during_a_run(tmp_path, venv):
    model = folder_of(tmp_path / "m", "llama")
    with served(venv, model, "--enable-lora", "--max-lora-rank", "16") as (url, _):
        tiny.run(tmp_path / "run", **settings(
            model, url, tmp_path / "weights", rollout__schedule="areal(staleness=2)",
            model__lora="lora(rank=4)", optimizer__lr=3e-2,
        ))
        found = gaps(tmp_path / "run")
        assert len(found) == 10 and max(found) < CLOSE, found
    names = sorted(p.name for p in (tmp_path / "weights").iterdir() if p.is_dir())
    assert len(names) == 2 and all(name.startswith("adapter-") for name in names)


def test_a_run_goes_on_when_an_engine_is_killed(tmp_path, venv):
    model = folder_of(tmp_path / "m", "llama")
    with served(venv, model) as (one, process), served(venv, model) as (other, _):

        def kill():
            while not (tmp_path / "run" / "metrics.jsonl").exists() or len(gaps(tmp_path / "run")) < 3:
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        tiny.run(tmp_path / "run", **settings(
            model, f"{one},{other}", tmp_path / "weights", rollout__schedule="areal(staleness=2)"
        ))
        killer.join()
        assert process.poll() is not None
    found = gaps(tmp_path / "run")
    assert len(found) == 10 and max(found) < CLOSE, found


def test_planted_faults_are_found_in_words(tmp_path, venv):
    """Each fault is one that a driver of others has had, see docs/engines.md."""
    model = folder_of(tmp_path / "m", "llama")
    name = lambda self, version: self._client.post(
        "/update_weight_version", {"new_version": str(version)}
    )

    def without_path(self, path, version):
        self._client.post("/collective_rpc", {"method": "reload_weights"}, timeout=None)
        self._name(version)

    def without_temperature(self, id, tokens, sampling, *rest):
        return generate(self, id, tokens, dataclasses.replace(sampling, temperature=1.0), *rest)

    def without_head(path, *args, **kwargs):
        return save(path, *args, **{**kwargs, "with_head": False})

    generate, save = Vllm.generate, models.save
    faults = {
        "keys": (mock.patch.object(Vllm, "_name", name), "Likely keys of older weights"),
        "path": (mock.patch.object(Vllm, "load", without_path), "They are those of version 0"),
        "temperature": (
            mock.patch.object(Vllm, "generate", without_temperature), "They are those at temperature 1"
        ),
        "head": (mock.patch.object(versions.models, "save", without_head), "does not sample from version 1"),
    }
    with served(venv, model) as (url, _):
        for fault, (patched, words) in faults.items():
            Vllm(Client(url)).load(str(model), 0)
            # Long prompts: a cache of blocks of 128 tokens keeps nothing of shorter ones.
            with patched, pytest.raises(MismatchError, match=words):
                tiny.run(tmp_path / fault, **settings(
                    model, url, tmp_path / f"weights-{fault}", optimizer__lr=1e-2,
                    task__max_prompt_tokens=400,
                ))
    with (
        served(venv, model, "--logprobs-mode", "raw_logprobs") as (url, _),
        pytest.raises(ValueError, match="its log-probs are raw_logprobs, .* --logprobs-mode"),
    ):
        tiny.run(tmp_path / "raw", **settings(model, url, tmp_path / "weights"))


def test_requests_are_filtered_and_aborted(tmp_path, venv):
    """Filters renormalise over the kept set alone, as `logp_behav` is. An aborted request answers with
    the tokens that it has."""
    model = folder_of(tmp_path / "m", "llama")
    with served(venv, model) as (url, _):
        engine = Vllm(Client(url))
        engine.facts()
        for seed in range(8):
            whole, some = (
                engine.generate(
                    f"{seed} {mass}", [4, 5, 6], SamplingParams(0.7, top_p=mass, max_tokens=1), seed, 19,
                    None,
                )
                for mass in (1.0, 0.8)
            )
            p = np.exp(whole.top_logps[0].astype(np.float64))
            count = int((np.cumsum(p) < 0.8).sum()) + 1
            at = whole.top_ids[0][:count].tolist().index(int(some.tokens[0]))
            assert some.logps[0] == pytest.approx(np.log(p[at] / p[:count].sum()), abs=CLOSE)
        found = []
        ask = lambda: found.append(engine.generate(
            "long", [4, 5, 6], SamplingParams(max_tokens=8000), None, 0, None
        ))
        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(2)  # of about 16 for all tokens; a busy machine has run this thread a second late
        while thread.is_alive():  # an id that the engine does not know yet is not aborted
            engine.abort(["long"])
            thread.join(0.05)
        assert found[0].stop_reason == "abort" and 0 < len(found[0].tokens) < 8000
