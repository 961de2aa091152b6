"""Collapse and rescue: the effect of each correction on a run with a gap, with GRPO.

    ./launch/figures.sh rescue    # 13 arms of 5 seeds, 30 minutes on two cores

Yao et al. (2025) sample Qwen2.5-0.5B in int8. At 0.1 M parameters the int8 gap is small (the two arms that
begin with int8). All other arms except the first get an artificial gap: noise on the sampler's weights, the
same at every step.
"""

from configs import fig_base

get_config = fig_base.get_config

GAP = {"engine.injected": "weights(scale=0.4)"}
INT8 = {"engine.quantization": "w8a8"}
UNCORRECTED = {"correction.weight": "none"}
TIS_2 = {"correction.weight": "token_tis(cap=2.0)"}
CORRECTIONS = {
    "none": UNCORRECTED,
    "PPO-IS": {"correction.centre": "behav"},
    "vanilla-IS": {"correction.weight": "token_vanilla"},
    "TIS-2": TIS_2,
    "TIS-8": {"correction.weight": "token_tis(cap=8.0)"},
    "MIS": {"correction.weight": "token_mis(upper=2.0)"},
    "IcePop": {"correction.weight": "token_icepop(lower=0.5, upper=5.0)"},
    "centering": {
        "correction.centre": "behav", "correction.objective": "reinforce",
        "correction.centering": "top(32)",
    },
}
OF_SEQUENCES = {
    "seq-TIS": {"correction.weight": "seq_tis(cap=2.0)"},
    "seq-MIS": {"correction.weight": "seq_mis(upper=2.0)"},
}


def with_gap(corrections):
    return {name: GAP | fields for name, fields in corrections.items()}


def sweep():
    natural = {"int8": INT8 | UNCORRECTED, "int8-TIS-2": INT8 | TIS_2}
    return {"no-gap": UNCORRECTED} | with_gap(CORRECTIONS | OF_SEQUENCES) | natural
