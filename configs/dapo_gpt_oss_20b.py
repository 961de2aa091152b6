"""DAPO (arXiv:2503.14476) with gpt-oss-20b, sampled with experts in 4 bits, on a TPU v5p-32.

    python -m jaxrl_tis.main --config=configs/dapo_gpt_oss_20b.py --workdir=runs/dapo

16 chips (2x2x4). As configs/dapo_qwen3_30b_a3b.py. The learner reads the published MXFP4 experts exactly
and trains them in full precision. Each sync rounds them to MXFP4 again for the sampler, as the model was
trained; attention, router and head are bfloat16. Each device holds 4 of the 32 experts of a layer, to
train and to serve. Never run here, so there is no expected result.

Put the model's Hugging Face folder at models/gpt-oss-20b and the problems at data/dapo/train.jsonl
and data/dapo/aime2024.jsonl, lines of {"prompt", "answer", "id"} whose prompt asks for a last line
"Answer: ...".
"""

from configs import dapo_qwen3_30b_a3b


def get_config():
    c = dapo_qwen3_30b_a3b.get_config()
    c.name = "dapo_gpt_oss_20b"
    c.model.path = "models/gpt-oss-20b"
    c.task.template_kwargs = {"reasoning_effort": "low"}
    c.engine.quantization = "mxfp4"
    c.engine.slots = 256
    c.engine.prefill_batch = 16
    c.mesh.serve = (-1, 1, 2, 1, 8)
    c.train.microbatch_rows = 16
    return c
