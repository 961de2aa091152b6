"""DAPO (arXiv:2503.14476) with Qwen3-8B, int8 rollouts and token-level TIS, on a TPU v5e-16.

    python -m jaxrl_tis.main --config=configs/dapo_qwen3_8b.py --workdir=runs/dapo

16 chips (4x4). As configs/dapo_qwen25_32b.py, with answers of at most 4,096 tokens. The soft penalty
covers the last 1,024 tokens, and rows have 5,120 tokens. The training state takes a third of the memory.
To save memory, layer inputs are offloaded to the host and the KV cache is int8. The 128 slots need the
memory that the sampler frees during the update. Never run here, so there is no expected result.

Put the model's Hugging Face folder at models/Qwen3-8B and the problems at data/dapo/train.jsonl and
data/dapo/aime2024.jsonl, lines of {"prompt", "answer", "id"} whose prompt asks for a last line
"Answer: ...".
"""

from configs import dapo_qwen25_32b


def get_config():
    c = dapo_qwen25_32b.get_config()
    c.name = "dapo_qwen3_8b"
    c.model.path = "models/Qwen3-8B"
    c.model.remat = "host"
    c.task.max_prompt_tokens = 1024

    c.rollout.prompts = 128
    c.rollout.max_new_tokens = 4096
    c.rollout.overlong_buffer = 1024
    c.engine.slots = 128
    c.engine.cache_dtype = "int8"
    c.engine.prefill_chunk = 1024
    c.engine.prefill_batch = 16
    c.mesh.serve = (-1, 1, 8)

    c.train.microbatch_rows = 16
    c.train.pack_length = 5120
    c.train.logprob_chunk = 8192
    return c
