"""Times TRL's GRPOTrainer on the model and batch of benchmarks.grpo_step.

    /path/to/venv/bin/python -P benchmarks/grpo_trl.py [--steps=6]

The interpreter needs torch and trl. Prints the seconds of each step (generation, log-probs and
update) as TRL's own trainer runs them, in float32 on CPU; the first two warm up.
"""

import argparse
import statistics
import tempfile
import time

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

VOCAB, PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 49152, 4, 8, 64, 64


class Clock(TrainerCallback):
    """Records the seconds between the ends of steps."""

    def __init__(self):
        self.seconds, self._last = [], 0.0

    def on_train_begin(self, *args, **kwargs):
        self._last = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", unk_token="w0"
    )
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, intermediate_size=768, tie_word_embeddings=True,
        max_position_embeddings=2048, pad_token_id=0, eos_token_id=1,
    ))
    ids = torch.randint(2, 1000, (PROMPTS * (args.steps + 1), PROMPT_TOKENS)).tolist()
    prompts = [" ".join(f"w{i}" for i in row) for row in ids]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
            max_completion_length=NEW_TOKENS, max_steps=args.steps, learning_rate=1e-6, beta=0.0,
            generation_kwargs={"min_new_tokens": NEW_TOKENS}, bf16=False, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True,
        )
        clock = Clock()
        GRPOTrainer(
            model=model, args=config, processing_class=tokenizer,
            reward_funcs=lambda completions, **_: torch.rand(len(completions)).tolist(),
            train_dataset=Dataset.from_dict({"prompt": prompts}), callbacks=[clock],
        ).train()
    print("steps:", " ".join(f"{s:.2f}" for s in clock.seconds), "s")
    print(f"median without the first two: {statistics.median(clock.seconds[2:]):.2f} s")


if __name__ == "__main__":
    main()
