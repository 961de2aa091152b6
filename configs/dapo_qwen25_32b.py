"""DAPO (arXiv:2503.14476) with Qwen2.5-32B, int8 rollouts and token-level TIS, on a TPU v5p-128.

    python -m jaxrl_tis.main --config=configs/dapo_qwen25_32b.py --workdir=runs/dapo

64 chips (4x4x4). Groups of 16, clip 0.2 / 0.28, token-mean loss, no KL. Groups with equal rewards are
replaced. A soft penalty covers the last 4,096 of 20,480 response tokens. TIS cap 8, as in the 32B runs
of Yao et al. (2025). Never run here, so there is no expected result.

`:async` learns on a v5p-64 and samples up to two batches ahead, with eight workers on Ray of four chips
each; `launch/tpu_vm.py` asks for these machines.

Put the model's Hugging Face folder at models/Qwen2.5-32B and the problems at
data/dapo/train.jsonl and data/dapo/aime2024.jsonl, lines of {"prompt", "answer", "id"} whose prompt
asks for a last line "Answer: ...". The reward needs math-verify: pip install 'jaxrl_tis[math]'.
"""

from configs import default


def get_config(variant: str = "sync"):
    if variant not in ("sync", "async"):
        raise ValueError(f"variant {variant!r} is none of sync, async")
    c = default.get_config()
    c.name = "dapo_qwen25_32b"
    c.steps = 400
    c.model.path = "models/Qwen2.5-32B"
    c.model.dtype = "bfloat16"
    c.model.remat = "full"
    c.model.fp32_head = True
    c.task.name = "jsonl"
    c.task.params = {"path": "data/dapo/train.jsonl"}
    c.task.chat = True
    c.task.max_prompt_tokens = 2048
    c.reward.name = "math"
    c.warmup.params = {}
    c.eval.params = {"path": "data/dapo/aime2024.jsonl"}
    c.eval.prompts = 30
    c.eval.every = 10
    c.checkpoint.every = 10

    c.rollout.prompts = 512
    c.rollout.group_size = 16
    c.rollout.max_new_tokens = 20_480
    c.rollout.dynamic_sampling = True
    c.rollout.overlong_buffer = 4096
    c.engine.slots = 768  # need the memory that the sampler frees during the update
    c.engine.page_size = 512
    c.engine.prefill_chunk = 2048
    c.engine.dtype = "bfloat16"
    c.engine.cache_dtype = "bfloat16"
    c.engine.steps_per_call = 64
    c.engine.prefill_batch = 32
    c.engine.unroll = False
    c.mesh.train = (1, -1, 1)
    c.mesh.serve = (-1, 1, 8)

    c.correction.preset = "tis_8"
    c.correction.objective = "ppo(clip_high=0.28)"
    c.optimizer.lr = 1e-6
    c.optimizer.warmup = 10
    c.optimizer.weight_decay = 0.1
    c.train.minibatches = 16
    c.train.microbatch_rows = 64
    c.train.pack_length = 22_528  # the longest sequence, 176 blocks of 128
    c.train.logprob_chunk = 16_384
    if variant == "async":
        c.name = "dapo_qwen25_32b-async"
        c.rollout.schedule = "areal(staleness=2)"
        c.rollout.driver = "ray"
        c.rollout.workers = 8
        c.rollout.tpus_per_worker = 4.0
        c.rollout.snapshot_gib = 400.0  # three snapshots of 122 GiB, on the eight hosts of the learner
        c.engine.slots = 48  # of each worker, whose chips hold no learner state
        c.engine.prefill_batch = 8
        c.mesh.serve = (-1, 1, 4)
        c.train.microbatch_rows = 32
    return c
