"""docs/harness.md: its agent plays a session, its tables are those of the code."""

import dataclasses
import pathlib
import queue
import re
import sys

import numpy as np
import pytest

from jaxrl_tis.data.tokenizer import CharTokenizer
from jaxrl_tis.endpoint.calls import Ended
from jaxrl_tis.endpoint.sessions import RETRIES, Endpoint
from jaxrl_tis.engine.records import SamplingParams, Trajectory
from jaxrl_tis.harness.process import MOST_ENDS, HarnessProcess
from jaxrl_tis.harness.protocol import Result, Session
from jaxrl_tis.rollouts.record_check import EMPTY
from jaxrl_tis.rollouts.sessions import ON_FORK

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "harness.md").read_text()
TOKENIZER = CharTokenizer("0123456789+*= ")
ANSWERS = {"3*4+5=": "3*4=", "3*4+5=3*4=12 ": "12+5=", "3*4+5=3*4=12 12+5=17 ": "17"}


def turn(prompt: np.ndarray) -> Trajectory:
    """The answer of a policy that uses the calculator."""
    tokens = np.array(TOKENIZER.encode(ANSWERS[TOKENIZER.decode(prompt)]), np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    filled = dict.fromkeys(("logp_behav", "logp_raw", "entropy"), zeros)
    return dataclasses.replace(
        EMPTY, prompt=prompt, tokens=tokens, stop_reason="length", mask=None, turn=None,
        version=np.zeros(len(tokens), np.int32), **filled,
    )


@pytest.mark.all
def test_the_example_is_played(tmp_path, monkeypatch):
    code = re.search(r"<!-- file: my_agent.py -->\n```python\n(.*?)```", PAGE, re.DOTALL).group(1)
    assert code.count("\n") <= 21
    (tmp_path / "my_agent.py").write_text(code)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    replies, calls = queue.SimpleQueue(), []
    endpoint = Endpoint("m", 30, TOKENIZER, max_length=60, logprobs=0)
    harness = HarnessProcess("my_agent:calculator", replies.put)

    def answer(call):
        calls.append(TOKENIZER.decode(call.choice.prompt))
        call.answer(turn(call.choice.prompt))

    try:
        key, url = endpoint.open(SamplingParams(max_tokens=8), answer)
        example = {"id": "1", "prompt": "3*4+5=", "answer": "17"}
        harness.start(key, Session("s", example, url, endpoint.token, "m", 0))
        reply = replies.get(timeout=20)
    finally:
        harness.close()
        endpoint.close()
    assert (reply.error, reply.reward, calls) == ("", 1.0, list(ANSWERS))


def test_the_names_of_the_page():
    row = re.search(r"\| attribute of `session` .*?\n\n", PAGE, re.DOTALL).group()
    cells = " ".join(re.findall(r"^\| (`.*?) \|", row, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", cells)) == {field.name for field in dataclasses.fields(Session)}
    fields = ", ".join(field.name for field in dataclasses.fields(Result))
    assert f"`Result({fields})`" in PAGE and RETRIES in PAGE
    assert f'`rollout.on_fork = "{ON_FORK[2]}"`' in PAGE
    assert MOST_ENDS == 5 and "ends five times in a row" in PAGE
    assert "takes no more calls" in str(Ended("x"))
