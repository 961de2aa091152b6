"""SmolLM2-135M-Instruct learns arithmetic by GRPO with int8 rollouts and token-level TIS.

    launch/smollm2.sh    # fetches the model, 98 MB
    python -m jaxrl_tis.main --config=configs/smollm2_135m.py --workdir=runs/smollm2
"""

from configs import default


def get_config():
    c = default.get_config()
    c.name = "smollm2_135m"
    c.model.path = "models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
    c.task.name = "reasoning_gym"
    c.task.params = {
        "name": "chain_sum", "size": 20_000,
        "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2,
    }
    c.task.chat = True
    c.task.system = "Answer with a number."
    c.task.max_prompt_tokens = 38
    c.eval.params = {"split": "eval", "min_digits": 2}
    c.eval.every = 20
    c.checkpoint.every = 20
    c.checkpoint.keep = 1
    c.steps = 60
    c.reward.name = "last_number"
    c.rollout.prompts = 8
    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 22
    c.engine.slots = 64
    c.engine.steps_per_call = 22
    c.engine.prefill_batch = 8
    c.train.microbatch_rows = 32
    c.optimizer.lr = 2e-5
    return c
