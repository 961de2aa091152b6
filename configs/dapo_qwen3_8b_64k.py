"""DAPO (arXiv:2503.14476) with Qwen3-8B and answers of 64k or 128k tokens, on a TPU v5p-64.

    python -m jaxrl_tis.main --config=configs/dapo_qwen3_8b_64k.py --workdir=runs/dapo_64k

32 chips (4x4x2). As configs/dapo_qwen3_8b.py, with sequences of at most 65,536 tokens, and 131,072 with
`:128k`. Eight devices share a row in the update, and four the keys of a sequence in the sampler. Never
run here, so there is no expected result.

Qwen3-8B was trained on 40,960 positions. Put its Hugging Face folder at models/Qwen3-8B-YaRN, with a config.json that
has the YaRN fields of configs/shapes/Qwen3-8B-YaRN.json, and the problems where configs/dapo_qwen3_8b.py wants them.
"""

from configs import dapo_qwen3_8b


def get_config(variant: str = "64k"):
    if variant not in ("64k", "128k"):
        raise ValueError(f"variant {variant!r} is none of 64k, 128k")
    c = dapo_qwen3_8b.get_config()
    c.name = f"dapo_qwen3_8b_{variant}"
    c.model.path = "models/Qwen3-8B-YaRN"
    c.model.remat = "full"
    length = 131_072 if variant == "128k" else 65_536
    c.rollout.max_new_tokens = length - c.task.max_prompt_tokens
    c.rollout.overlong_buffer = 8192
    c.engine.slots = 96 if variant == "128k" else 192
    c.mesh.train = (1, 4, 1, 8)
    c.mesh.serve = (1, 1, 8, 4)  # a page of 512 positions is 128 on each device
    c.train.microbatch_rows = 4
    c.train.pack_length = length
    return c
