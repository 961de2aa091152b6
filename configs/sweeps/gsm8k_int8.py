"""Corrections of an int8 sampler on GSM8K with Qwen2.5-0.5B-Instruct, on one TPU v5e-8.

    python -m jaxrl_tis.sweep --config=configs/sweeps/gsm8k_int8.py:grpo --seeds=0,1,2 --launch=tpu_vm \\
      --launch_flags="--accelerator=v5litepod-8"

The comparison of "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al., 2025,
figure 4): no correction, untruncated weights (vanilla IS), the sampler inside PPO's ratio (PPO-IS), and
weights truncated at 2 and at 8 (TIS). A bfloat16 sampler without a correction is the reference. In the essay
PPO-IS and vanilla IS end near an accuracy of 0. Never run here. `:ppo` samples one answer per question and
trains a critic; see configs/gsm8k_qwen25_0p5b.py.
"""

from configs import gsm8k_qwen25_0p5b
from jaxrl_tis.sweep import grid

get_config = gsm8k_qwen25_0p5b.get_config


def sweep():
    presets = ["normal", "vanilla_is", "ppo_is", "tis_2", "tis_8"]
    no_gap = {"engine.quantization": "none", "correction.preset": "normal"}
    return [*grid({"correction.preset": presets}), no_gap]
