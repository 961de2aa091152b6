"""Makes trl_runs.json, the log_history of five tiny GRPO runs of TRL, on a CPU in about two minutes.

    python tests/doctor/make_trl_runs.py OUT.json

in an environment of its own: pip install torch trl transformers. A random Llama of two layers learns to
answer in digits. `plain` samples by transformers. The others sample through an engine in vLLM's place, a
bfloat16 copy of the policy whose log-probs are those of the distribution after temperature and top-p, as
TRL asks vLLM for; what is logged is computed by TRL. `nucleus` samples with top_p 0.9, `sequence` has the
default mode sequence_mask, the others token_truncate, and `late` gets new weights at every fifth step.
"""

import importlib.metadata
import json
import random
import sys
import tempfile

import torch
import trl.trainer.grpo_trainer as grpo
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

RUNS = {  # name -> (whether an engine samples, top_p, mode, steps between two weight syncs)
    "plain": (False, 1.0, "token_truncate", 1), "whole": (True, 1.0, "token_truncate", 1),
    "nucleus": (True, 0.9, "token_truncate", 1), "sequence": (True, 1.0, "sequence_mask", 1),
    "late": (True, 1.0, "token_truncate", 5),
}
TEXTS = ["<pad>", "<eos>", *"0123456789+= abcdefghijklmnopqrstuvwxyz"]
KEPT = ("sampling/", "clip_ratio/region_mean", "completions/mean_length")


def engine(every):
    class Engine:
        """What GRPOTrainer asks of VLLMGeneration."""

        def __init__(self, **settings):
            self.settings, self.calls = settings, 0
            self.copy = LlamaForCausalLM(settings["model"].config).to(torch.bfloat16).eval()

        def sync_weights(self):
            if self.calls % every == 0:
                self.copy.load_state_dict(self.settings["model"].state_dict())
            self.calls += 1

        @torch.no_grad()
        def generate(self, prompts, images, num_generations, profiler=None):
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
            mask = (ids != 0).long()
            tokens, logps = [], []
            for _ in range(self.settings["max_completion_length"]):
                positions = (mask.cumsum(1) - 1).clamp(min=0)
                logits = self.copy(ids, attention_mask=mask, position_ids=positions).logits[:, -1]
                logp = nucleus(logits.float() / self.settings["temperature"], self.settings["top_p"])
                token = torch.multinomial(logp.exp(), 1)
                tokens.append(token)
                logps.append(logp.gather(1, token))
                ids = torch.cat([ids, token], 1)
                mask = torch.cat([mask, torch.ones_like(token)], 1)
            return prompts, *until_end(torch.cat(tokens, 1).tolist(), torch.cat(logps, 1).tolist()), None

    return Engine


def nucleus(logits, top_p):
    """Returns log-probs of the smallest set of tokens with this mass, renormalised."""
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        cut = ordered.masked_fill(probs.cumsum(-1) - probs >= top_p, -torch.inf)
        logits = torch.full_like(logits, -torch.inf).scatter(1, order, cut)
    return logits.log_softmax(-1)


def until_end(tokens, logps):
    lengths = [row.index(1) + 1 if 1 in row else len(row) for row in tokens]
    return (
        [row[:n] for row, n in zip(tokens, lengths, strict=True)],
        [[[x] for x in row[:n]] for row, n in zip(logps, lengths, strict=True)],
    )


def tokenizer():
    made = Tokenizer(models.WordLevel({text: i for i, text in enumerate(TEXTS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def digits(completions, **_):
    return [sum(c.isdigit() for c in text) / 8 for text in completions]


def run(has_engine, top_p, mode, every):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    policy = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(TEXTS), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0,
        eos_token_id=1, bos_token_id=None, initializer_range=0.15))
    draw = random.Random(0)
    prompts = [f"{draw.randint(0, 9)}+{draw.randint(0, 9)}=" for _ in range(512)]
    grpo.VLLMGeneration = engine(every)
    args = grpo.GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=32, num_generations=8,
        max_completion_length=8, max_steps=40, logging_steps=1, learning_rate=1e-3,
        lr_scheduler_type="constant", report_to=[], save_strategy="no", use_cpu=True, bf16=False,
        gradient_checkpointing=False, disable_tqdm=True, top_p=top_p, use_vllm=has_engine,
        vllm_mode="colocate", vllm_importance_sampling_mode=mode)
    trainer = grpo.GRPOTrainer(
        model=policy, reward_funcs=digits, args=args, processing_class=tokenizer(),
        train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]))
    trainer.train()
    return trainer.state.log_history


def shortened(entry, is_plain):
    is_whole = is_plain and entry["step"] <= 10
    kept = {name: x for name, x in entry.items() if is_whole or name.startswith(KEPT)}
    return {name: float(f"{x:.5g}") for name, x in kept.items()} | {"step": entry["step"]}


def main(path):
    """Keeps all names of the first ten steps of `plain`, else those of KEPT; 5 digits of each value."""
    found = {"versions": {n: importlib.metadata.version(n) for n in ("trl", "transformers", "torch")}}
    for name, settings in RUNS.items():
        found[name] = [shortened(entry, name == "plain") for entry in run(*settings)]
    text = json.dumps(found, separators=(",", ":")).replace("},{", "},\n{")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
