"""SmolLM2-135M-Instruct learns chains of sums by GRPO with int8 rollouts and token-level TIS.

    ./launch/smollm2.sh
    python -m jaxrl_tis.main --config=configs/smollm2_135m.py --workdir=runs/smollm2

The task is chain_sum of reasoning-gym with two terms of one or two digits, scored by the last number
of the answer. Held-out problems have two digits. Two CPU cores, under an hour.
"""

from configs import default


def get_config():
    c = default.get_config()
    c.name = "smollm2_135m"
    c.steps = 30
    c.model.path = "models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
    c.task.name = "reasoning_gym"
    c.task.params = {
        "name": "chain_sum", "size": 20_000,
        "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2,
    }
    c.task.chat = True
    c.task.system = "Answer with a number."
    c.task.max_prompt_tokens = 38
    c.reward.name = "last_number"
    c.rollout.prompts = 8
    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 18
    c.engine.slots = 64
    c.engine.steps_per_call = 18
    c.engine.prefill_batch = 8
    c.train.microbatch_rows = 16
    c.optimizer.lr = 2e-5
    c.eval.params = {"split": "eval", "min_digits": 2}
    c.eval.every = 30
    c.eval.prompts = 512
    c.checkpoint.every = 10
    c.checkpoint.keep = 1
    return c
