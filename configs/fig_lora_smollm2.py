"""LoRA on SmolLM2-135M, beside the recorded runs of full training in docs/smollm2.

    JOBS=1 ./launch/figures.sh lora_smollm2    # one arm of 2 seeds

The run is `configs/smollm2_135m.py` with the same 30 steps. The learning rate is ten times that of full
training (https://thinkingmachines.ai/blog/lora/). The outcome is the greedy and the sampled accuracy on
held-out problems after the last step, and their paired differences to full training.
"""

from configs import smollm2_135m
from configs.fig_lora import lora

get_config = smollm2_135m.get_config


def sweep():
    return {"rank-32": lora(32, 2e-4)}
