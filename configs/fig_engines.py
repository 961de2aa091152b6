"""SmolLM2-135M learns with vLLM or this project's engine as its sampler, both in bfloat16.

    ./launch/figures.sh engines    # three arms of one seed, some hours on two cores without bfloat16

The run is `configs/smollm2_135m.py` with 60 steps and a float32 learner. No gap is added.
"""

from configs import smollm2_135m
from configs.fig_rescue import TIS_2, UNCORRECTED

URL = "http://127.0.0.1:8310"  # of vLLM, which `experiments.engines` starts
VLLM = {
    "rollout.driver": "external", "rollout.engines": URL,
    "rollout.weights_folder": "runs/figures/engines-weights",
}


def get_config():
    c = smollm2_135m.get_config()
    c.steps = 60
    c.engine.quantization = "none"
    c.engine.dtype = c.engine.cache_dtype = "bfloat16"
    c.eval.every = 60
    c.eval.prompts = 256
    return c


def sweep():
    return {"vLLM-none": VLLM | UNCORRECTED, "vLLM-TIS-2": VLLM | TIS_2, "own-TIS-2": TIS_2}
