"""Whole runs over several turns with the chat template of every family, against its renders."""

import json

import pytest

from jaxrl_tis.rollouts.episodes import EpisodeScheduler
from tests import tiny
from tests.data import chat_templates
from tests.environments.continuity_test import ENDS, MARKS, ROLES, backend, mark, tokenizer
from tests.tiny_environment import SAID

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("in_threads")]

# GLM's form without its thinking, which makes an earlier answer another text.
FORM = """\
[gMASK]<sop>
{%- for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}
{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
TEMPLATES = chat_templates.TEMPLATES | {"glm's form": FORM}
OF_GLM = ("glm4.5", "glm's form")
STABLE = TEMPLATES.keys() - {"mistral", "deepseek", "glm4.5"}  # the others change an earlier answer


def write_tokenizer(folder, name):
    end = ENDS.get(name, ENDS["glm4.5"])
    backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "bos_token": "<s>",
        "eos_token": end, "chat_template": TEMPLATES[name],
    }))
    ends = ROLES if name in OF_GLM else [mark(end)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def row_of(record):
    """(text of the row before its last answer, the answers without marks)."""
    sampled = [record.tokens[record.mask & (record.turn == k)] for k in range(record.num_turns)]
    before = record.tokens[: len(record.tokens) - len(sampled[-1])]
    text = backend().decode([*record.prompt, *before], skip_special_tokens=False)
    return text, [backend().decode([i for i in ids if i >= len(MARKS)]) for ids in sampled]


@pytest.mark.parametrize("name", [
    x if x == "glm's form" else pytest.param(x, marks=pytest.mark.all) for x in TEMPLATES
])
def test_a_row_is_the_render_of_its_conversation(name, tmp_path, monkeypatch):
    records, finish = [], EpisodeScheduler._finish

    def kept(self, *args):
        records.append(finish(self, *args))
        return records[-1]

    monkeypatch.setattr(EpisodeScheduler, "_finish", kept)
    write_tokenizer(tmp_path, name)
    tiny.run(
        tmp_path / "run", **tiny.EPISODES | dict(
            steps=1, task__environment="tests.tiny_environment:Tools", task__chat=True,
            task__tokenizer=str(tmp_path), task__max_prompt_tokens=100, task__max_context_tokens=250,
            task__date="2026-02-03", warmup__steps=30, warmup__rows=8, eval__prompts=2,
        ),
    )
    rendered, compared = tokenizer(TEMPLATES[name], ENDS.get(name, ENDS["glm4.5"])), 0
    assert {r.num_turns for r in records} == {3} and len(records) == 16 + 2 * 4
    for record in records:
        text, answers = row_of(record)
        question = text.partition("=")[0][-3:] + "="
        talk = [{"role": "user", "content": question}]
        for answer, said in zip(answers, SAID[:2], strict=False):
            # Gemma knows no messages of tools: they are the user's.
            is_user = isinstance(said, str) or name == "gemma3"
            content = said if isinstance(said, str) else said[0]["content"]
            role = "user" if is_user else "tool"
            talk += [{"role": "assistant", "content": answer}, {"role": role, "content": content}]
        is_plain = all(x.isalnum() for x in answers)
        if is_plain and name in STABLE:
            assert text == rendered.chat(talk)
            compared += 1
        if is_plain and name in OF_GLM:
            assert (text.count("<|user|>"), text.count("<|observation|>")) == (2, 1)
    assert name not in STABLE or compared > 0
    replaced = "episodes/template_replaces"
    found = [r.get(replaced, 0) + r.get(f"eval/{replaced}", 0) for r in tiny.lines(tmp_path / "run")]
    assert sum(found) == sum(r.joins.count("replace") for r in records)
    assert (sum(found) > 0) == (name in OF_GLM)
