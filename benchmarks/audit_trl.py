"""Writes a dump for `python -m jaxrl_tis.audit` with TRL's GRPOTrainer (docs/audit.md).

    /path/to/venv/bin/python -P benchmarks/audit_trl.py [--out=tests/audit/trl.npz] [--steps=4]

The interpreter needs torch and trl. A small Llama with random weights learns to sample low token
ids. A bfloat16 copy with the current weights samples, and the learner is float32. The dump holds
the last batch.
"""

import argparse
import tempfile

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

VOCAB, PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS, END = 512, 8, 8, 8, 64, 1


class Dumping(GRPOTrainer):
    """A trainer that writes each sampled batch, as shown in docs/audit.md."""

    path = ""

    def _generate_and_score_completions(self, inputs):
        out = super()._generate_and_score_completions(inputs)
        mask = out["completion_mask"].cpu() * out.get("tool_mask", 1)
        scores = self._logs["rewards"].values()
        np.savez_compressed(
            self.path, mask=mask, logp_behav=out["sampling_per_token_logps"].cpu(),
            logp_old=out["old_per_token_logps"].cpu(),
            reward=np.sum([list(x)[-len(mask):] for x in scores], axis=0),
            group=np.arange(len(mask)) // self.num_generations,
        )
        return out


@torch.no_grad()
def sample(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
    """TRL's rollout_func: samples from a bfloat16 copy and returns its log-probs, in nats."""
    # Not a deep copy: accelerate has bound the model's forward to the model itself.
    model = LlamaForCausalLM(trainer.model.config).to(torch.bfloat16).eval()
    model.load_state_dict(trainer.model.state_dict())
    prompt_ids = trainer.processing_class(prompts)["input_ids"]
    tokens = torch.tensor(prompt_ids)
    drawn, logps, cache = [], [], None
    for _ in range(NEW_TOKENS):
        out = model(tokens, past_key_values=cache, use_cache=True)
        cache, logp = out.past_key_values, torch.log_softmax(out.logits[:, -1].float(), dim=-1)
        tokens = torch.multinomial(logp.exp(), 1)
        drawn.append(tokens)
        logps.append(logp.gather(1, tokens))
    drawn, logps = torch.cat(drawn, 1), torch.cat(logps, 1)
    is_end = (drawn == END).int()
    lengths = torch.where(is_end.any(1), is_end.argmax(1) + 1, NEW_TOKENS).tolist()
    cut = lambda x: [row[:n] for row, n in zip(x.tolist(), lengths, strict=True)]
    return {"prompt_ids": prompt_ids, "completion_ids": cut(drawn), "logprobs": cut(logps)}


def low_numbers(completions: list[str], **_) -> list[float]:
    """Reward: the share of token ids in the lower half of the vocabulary."""
    rows = [[int(word[1:]) for word in text.split() if word[0] == "w"] for text in completions]
    return [sum(i < VOCAB // 2 for i in row) / max(len(row), 1) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="tests/audit/trl.npz")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    words = {"pad": 0, "end": END} | {f"w{i}": i for i in range(2, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="pad"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="pad", eos_token="end", unk_token="pad"
    )
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=192, tie_word_embeddings=True,
        initializer_range=0.2, pad_token_id=0, eos_token_id=END,
    ))
    ids = torch.randint(2, VOCAB, (PROMPTS * (args.steps + 1), PROMPT_TOKENS)).tolist()
    prompts = [" ".join(f"w{i}" for i in row) for row in ids]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
            max_completion_length=NEW_TOKENS, max_steps=args.steps, num_iterations=2,
            learning_rate=1e-4, beta=0.0, bf16=False, use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True,
        )
        trainer = Dumping(
            model=model, args=config, processing_class=tokenizer, reward_funcs=low_numbers,
            train_dataset=Dataset.from_dict({"prompt": prompts}), rollout_func=sample,
        )
        trainer.path = args.out
        trainer.train()


if __name__ == "__main__":
    main()
