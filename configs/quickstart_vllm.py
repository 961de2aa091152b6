"""The quickstart with vLLM as the sampler, in float32 on CPUs.

    ./launch/quickstart.sh vllm

runs `:start`, exports its policy, serves it by vLLM and trains with it. The gap stays at rounding,
about 1e-5 nats.
"""

from configs import quickstart

START = "runs/quickstart_vllm-start"


def get_config(variant: str = "none"):
    c = quickstart.get_config("f32")
    c.name = f"quickstart_vllm-{variant}"
    c.rollout.prompts = 32
    c.eval.prompts = 256
    if variant == "start":  # the policy after supervised steps and one update
        c.model.head_dim = 32  # vLLM's attention on CPUs has no smaller one
        c.steps = c.eval.every = c.checkpoint.every = 1
        return c
    c.steps = 60
    c.eval.every = c.checkpoint.every = 30
    c.model.path = f"{START}/model"
    c.task.tokenizer = ""
    c.warmup.steps = 0
    c.correction.weight = "none"
    c.rollout.driver = "external"
    c.rollout.engines = "http://127.0.0.1:8300"
    c.rollout.weights_folder = "runs/quickstart_vllm-weights"
    if variant == "ahead":
        c.rollout.schedule, c.correction.weight = "areal(staleness=2)", "token_tis(cap=2)"
    elif variant != "none":
        raise ValueError(f"variant {variant!r} is none of start, none, ahead")
    return c
