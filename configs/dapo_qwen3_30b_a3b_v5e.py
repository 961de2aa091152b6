"""As configs/dapo_qwen3_30b_a3b.py, on a TPU v5e-64: 64 chips (8x8) of 16 GB.

    python -m jaxrl_tis.main --config=configs/dapo_qwen3_30b_a3b_v5e.py --workdir=runs/dapo

Layer inputs are offloaded to the host, and the KV cache is int8. Never run here, so there is no expected
result.
"""

from configs import dapo_qwen3_30b_a3b


def get_config():
    c = dapo_qwen3_30b_a3b.get_config()
    c.name = "dapo_qwen3_30b_a3b_v5e"
    c.model.remat = "host"
    c.engine.cache_dtype = "int8"
    c.engine.slots = 384  # need the memory that the sampler frees during the update
    c.engine.prefill_batch = 64
    c.mesh.serve = (-1, 1, 4, 1, 16)
    c.train.microbatch_rows = 64
    return c
