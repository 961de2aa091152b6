"""Harnesses of tiny runs, as agents written for the `openai` client."""

import openai

from tests.tiny_rewards import closeness


def sums(session):
    """Asks for the sum, shows the answer with a digit, and asks again."""
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    text = session.record["prompt"]
    for turn in range(2):
        answer = client.completions.create(model=session.model, prompt=text, max_tokens=3)
        choice = answer.choices[0]
        if turn == 0:
            text = text + choice.text + f"{session.seed % 10}+"
    return closeness(choice.text + "0", session.record)
