"""Writes tests/data/golden/chat.json: what transformers renders of tests/data/chat_templates.py.

    pip install transformers==5.24.0 jinja2==3.1.6
    PYTHONPATH=. python tests/data/make_chat_golden.py
"""

import datetime
import json
import pathlib
import tempfile
from unittest import mock

import tokenizers
import transformers
from tokenizers import AddedToken, models
from transformers.utils import chat_template_utils

from tests.data.chat_templates import CASES, DATE, TEMPLATES, TOKENS

GOLDEN = pathlib.Path(__file__).parent / "golden" / "chat.json"
NAMES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]


def rendered(tokenizer, case) -> dict[str, str]:
    messages, add_generation_prompt, kwargs = case
    try:
        return {"text": tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
        )}
    except Exception as error:
        return {"error": str(error)}


def main() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({n: i for i, n in enumerate(NAMES)}, NAMES[0]))
    backend.add_special_tokens([AddedToken(name) for name in NAMES])
    clock = mock.Mock(now=lambda: datetime.datetime.fromisoformat(DATE))
    found = {}
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(
        chat_template_utils, "datetime", clock
    ):
        backend.save(f"{folder}/tokenizer.json")
        pathlib.Path(folder, "tokenizer_config.json").write_text(json.dumps(TOKENS))
        for family, template in TEMPLATES.items():
            pathlib.Path(folder, "chat_template.jinja").write_text(template)
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
            found[family] = {name: rendered(tokenizer, case) for name, case in CASES.items()}
    value = {"transformers": transformers.__version__, "rendered": found}
    GOLDEN.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
