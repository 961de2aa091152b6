"""GSM8K with Qwen2.5-0.5B-Instruct, int8 rollouts and token-level TIS, on one TPU v5e-8.

    python -m jaxrl_tis.main --config=configs/gsm8k_qwen25_0p5b.py:grpo --workdir=runs/gsm8k

`:grpo` samples five answers per question. `:ppo` samples one and trains a critic. Both settings are
from the GSM8K experiment in "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(Yao et al., 2025), which samples Qwen2.5-0.5B in int8. Never run here, so there is no expected result.

Model and data come from the Hugging Face hub (pip install 'jaxrl_tis[hub]'), at the newest commit when
the run begins. `--config.model.path` and the paths of task and eval also accept local folders and
files. Serving splits 14 query and 2 key/value heads over 2 chips; the heads allow only tensor
parallelism 1 and 2.
"""

from configs import default


def get_config(variant: str = "grpo"):
    c = default.get_config()
    c.name = f"gsm8k_qwen25_0p5b-{variant}"
    c.model.path = "hf://Qwen/Qwen2.5-0.5B-Instruct"
    c.model.dtype = "bfloat16"
    c.model.remat = "dots"
    c.model.fp32_head = True
    c.task.name = "gsm8k_jsonl"
    c.task.params = {"path": "hf://datasets/openai/gsm8k/main/train"}
    c.task.template = (
        '{prompt} Let\'s think step by step and output the final answer after "####".'
    )
    c.task.chat = True
    c.task.max_prompt_tokens = 512
    c.reward.name = "last_number"
    c.warmup.params = {}
    c.eval.params = {"path": "hf://datasets/openai/gsm8k/main/test"}
    c.eval.prompts = 1319
    c.eval.every = 20
    c.checkpoint.every = 20

    c.rollout.max_new_tokens = 256
    c.engine.slots = 256
    c.engine.page_size = 128
    c.engine.dtype = "bfloat16"
    c.engine.cache_dtype = "bfloat16"
    c.engine.steps_per_call = 16
    c.engine.prefill_batch = 32
    c.engine.unroll = False
    c.mesh.train = (1, -1, 1)
    c.mesh.serve = (-1, 1, 2)
    c.train.microbatch_rows = 32
    c.train.logprob_chunk = 4096
    c.train.minibatches = 4
    c.train.pack_length = 2048

    c.optimizer.lr = 1e-6
    if variant == "grpo":
        c.steps = 105  # 15 epochs of 7,473 questions
        c.rollout.prompts = 1024
        c.rollout.group_size = 5
        c.correction.kl_coeff = 0.001
    elif variant == "ppo":
        c.steps = 435
        c.rollout.prompts = 256
        c.rollout.group_size = 1
        c.correction.advantage = "gae"
        c.critic.lr = 1e-5
    else:
        raise ValueError(f"variant {variant!r} is none of grpo, ppo")
    return c
