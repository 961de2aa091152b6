"""DAPO (arXiv:2503.14476) with Qwen3-30B-A3B, whose 128 experts are divided over a TPU v5p-64.

    python -m jaxrl_tis.main --config=configs/dapo_qwen3_30b_a3b.py --workdir=runs/dapo

32 chips (4x4x2). As configs/dapo_qwen25_32b.py, with int8 rollouts and answers of at most 8,192 tokens.
Each device holds 16 of the 128 experts of a layer, to train and to serve. The sampler records the
experts of every token, 384 bytes a token, and the learner replays them (R3). IcePop masks what is
left of the gap. configs/dapo_qwen3_30b_a3b_v5e.py is the same run on a v5e-64. Never run here, so there
is no expected result.

Put the model's Hugging Face folder at models/Qwen3-30B-A3B and the problems at data/dapo/train.jsonl
and data/dapo/aime2024.jsonl, lines of {"prompt", "answer", "id"} whose prompt asks for a last line
"Answer: ...".
"""

from configs import dapo_qwen25_32b


def get_config():
    c = dapo_qwen25_32b.get_config()
    c.name = "dapo_qwen3_30b_a3b"
    c.model.path = "models/Qwen3-30B-A3B"
    c.task.max_prompt_tokens = 1024

    c.rollout.prompts = 128
    c.rollout.max_new_tokens = 8192
    c.rollout.overlong_buffer = 2048
    c.engine.record_routes = True
    c.engine.slots = 512
    c.engine.prefill_chunk = 1024
    c.engine.prefill_batch = 32
    c.mesh.train = (1, -1, 1, 1, 8)
    c.mesh.serve = (-1, 1, 4, 1, 8)

    c.correction.preset = "icepop"
    c.correction.objective = "ppo(clip_high=0.28)"
    c.correction.routing = "r3"
    c.train.microbatch_rows = 32
    c.train.pack_length = 9216  # the longest sequence, 72 blocks of 128
    c.train.logprob_chunk = 8192
    return c
