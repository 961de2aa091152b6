"""Harnesses of tiny runs: agents that know base URL, key and model alone."""

import json
import urllib.request

import openai

from tests.tiny_environment import Sums
from tests.tiny_rewards import closeness


def sums(session):
    """Asks for the sum, shows the answer with a digit, and asks again."""
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    text = session.example["prompt"]
    first = client.completions.create(model=session.model, prompt=text, max_tokens=3)
    text += first.choices[0].text + f"{session.seed % 10}+"
    second = client.completions.create(model=session.model, prompt=text, max_tokens=3)
    reward = closeness(second.choices[0].text + "0", session.example)
    if reward < 0.01:
        raise RuntimeError("no such answer")
    return reward


def forks(session):
    """Makes two calls that do not continue each other."""
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    text = session.example["prompt"]
    client.completions.create(model=session.model, prompt=text, max_tokens=1)
    second = client.completions.create(model=session.model, prompt="1+" + text, max_tokens=3)
    return closeness(second.choices[0].text + "0", session.example)


def plays(session):
    """Plays the environment of tiny runs by token ids."""

    def post(path, **body):
        request = urllib.request.Request(
            session.base_url.removesuffix("/v1") + path, json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {session.api_key}"},
        )
        with urllib.request.urlopen(request) as reply:
            return json.loads(reply.read())

    environment, total = Sums(seed=session.seed), 0.0
    ids = post("/tokenize", prompt=environment.reset(session.example))["tokens"]
    for _ in range(3):
        answer = post("/inference/v1/generate", token_ids=ids, sampling_params={})
        sampled = answer["choices"][0]["token_ids"]
        plain = [token for token in sampled if token > 2]
        text = post("/detokenize", tokens=plain)["prompt"]
        step = environment.step(text)
        total += step.reward
        if step.is_done:
            break
        more = post("/tokenize", prompt=step.observation, add_special_tokens=False)["tokens"]
        ids = ids + sampled + more
        if len(ids) >= 20:
            break
    return total
