"""Measures the check of all data before a run, the next start, which reads its cache, and how long a
step waits for prompts that are made when they are read.

    python -m benchmarks.data [--lines=100000] [--tokenizer=models/smollm2-135m-instruct/X.gguf]

Writes JSON lines as long as GSM8K's (45 words on average), reads them, renders each with a chat
template and tokenizes it. Without --tokenizer it trains a byte-level BPE on some of the lines and
uses ChatML as the template. Use an empty XDG_CACHE_HOME.
"""

import argparse
import json
import pathlib
import random
import tempfile
import time

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from benchmarks import arguments
from configs import default
from jaxrl_tis.data import pipeline, tasks
from jaxrl_tis.data.tokenizer_files import load_tokenizer
from jaxrl_tis.rollouts.prompts import Prompter
from jaxrl_tis.runtime import cli

MEAN_WORDS, WORDS = 45, 4000
BATCH, STEPS, STEP_S, MADE_S = 64, 10, 1.0, 0.01  # a prompt takes MADE_S to make, and a step STEP_S
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant."
    "<|im_end|>\\n' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + "
    "m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\\n' }}{% endif %}"
)


def write_lines(path: pathlib.Path, count: int) -> list[str]:
    """Writes the JSON lines and returns their prompts."""
    rng = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(rng.choices(letters, range(22, 0, -1), k=rng.randint(2, 9)))
             for _ in range(WORDS)]
    prompts = []
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            chosen = rng.choices(words, k=max(12, int(rng.gauss(MEAN_WORDS, 15))))
            chosen[5], chosen[-1] = f"{rng.randint(2, 900)}", f"{rng.randint(2, 90)}?"
            prompts.append(" ".join(chosen).capitalize())
            answer = f"{rng.randint(0, 9999)}"
            file.write(json.dumps({"id": f"{i}", "prompt": prompts[-1], "answer": answer}) + "\n")
    return prompts


def write_tokenizer(folder: pathlib.Path, texts: list[str]) -> str:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    backend.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=8000, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ))
    backend.save(f"{folder}/tokenizer.json")
    about = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return f"{folder}"


class Slow:
    """Examples of a task, each of which takes a while to make."""

    bad = ()

    def __init__(self, source: tasks.Source, is_late: bool):
        self._source, self.is_late = source, is_late

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict:
        time.sleep(MADE_S)
        return self._source[index]

    def digest(self) -> str:
        return self._source.digest()


def waits(is_late: bool, steps: int) -> float:
    """Returns the mean seconds that a step after the first waits for its prompts."""
    batches = pipeline.Batches(
        "arithmetic", {"size": 2**40, "digits": 2}, batch_size=BATCH, seed=0,
        check=lambda source: Slow(source, is_late),
    )
    next(batches)
    waited = 0.0
    for _ in range(steps):
        time.sleep(STEP_S)
        start = time.monotonic()
        next(batches)
        waited += time.monotonic() - start
    return waited / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = arguments.parse(parser, lines=2000, steps=2)
    config = default.get_config()
    config.task.chat, config.task.max_prompt_tokens = True, 1024
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "train.jsonl"
        arguments.say(f"writing {args.lines:,} lines, and a tokenizer")
        prompts = write_lines(path, args.lines)
        spec = args.tokenizer or write_tokenizer(pathlib.Path(folder), prompts[:5000])
        print("| start | read, s | checked, s | of this process, CPU s | tokens a prompt |")
        print("|---|---|---|---|---|")
        for name in ("first", "next"):
            prompter = Prompter(load_tokenizer(spec), config.task)
            start, busy = time.monotonic(), time.process_time()
            source = tasks.make("jsonl", {"path": f"{path}"})
            read = time.monotonic()
            checked = prompter.checked(source, "training data")
            seconds, busy = time.monotonic() - read, time.process_time() - busy
            lengths = [len(prompter.ids(checked[i])) for i in range(0, len(checked), 997)]
            mean = sum(lengths) / len(lengths)
            print(f"| {name} | {read - start:.1f} | {seconds:.1f} | {busy:.1f} | {mean:.0f} |")
    print(f"\n{BATCH} prompts of {1000 * MADE_S:.0f} ms each for steps of {STEP_S:g} s\n")
    print("| read | a step waits, s |\n|---|---|")
    for name, is_late in (("when wanted", False), ("ahead", True)):
        print(f"| {name} | {waits(is_late, args.steps):.2f} |")


if __name__ == "__main__":
    cli.run(main)
