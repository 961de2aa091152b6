"""System repair against correction in the loss, by number format: the mismatch budget (docs/open_problems.md, 4).

    ./launch/figures.sh mismatch    # 34 arms of 8 seeds, some hours on two cores

An arm is "MODEL/FORMAT/WAY". MODEL is the decoder of `fig_base.py` or the one with experts of `fig_routing.py`. FORMAT
is the sampler's, the learner is float32. WAY is "neither", "repair", "correct" (token TIS) or "both". Repair makes the
learner compute in int8 or float8 as its sampler does, and gives half precision three, or all, of the mantissa bits that
it lacks: float16 for bfloat16, float32 for float16. With experts it also replays the sampler's routes (R3).

Fixed before the runs: an arm is within the budget if the means of its runs are, D95 of tokens below 1e-4 (the 95th
percentile of the sampled tokens' |p_sampler - p_learner|), chi2 of sequences below 0.1, flips below 1e-3. The
conjecture fails if the paired gain of the correction, "correct" less "neither" or "both" less "repair", is at least
0.003 with its interval in an arm within the budget. It holds if all intervals there end below 0.003.
"""

from configs import fig_base
from configs.fig_formats import BOTH_INT8, FP8, _engine
from configs.fig_referee import MODEL
from configs.fig_rescue import INT8, TIS_2
from jaxrl_tis.sweep import Arm

# Format -> (fields of the sampler, fields of the repaired pair)
FORMATS: dict[str, tuple[Arm, Arm]] = {
    "int8": (INT8, BOTH_INT8),
    "fp8": (FP8, FP8 | {"model.quantization": "fp8_w8a8"}),
    "bf16": (_engine("bfloat16"), _engine("float16")),
    "fp16": (_engine("float16"), {}),
}
MODELS: dict[str, Arm] = {"dense": {}, "experts": MODEL | {"engine.record_routes": True}}
REPLAY = {"experts": {"correction.routing": "r3"}, "dense": {}}


def get_config():
    c = fig_base.get_config()
    c.metrics.diagnostics_every = 8
    return c


def sweep():
    arms = {}
    for model, fields in MODELS.items():
        for name, (plain, repaired) in FORMATS.items():
            repaired = repaired | REPLAY[model]
            arms |= {
                f"{model}/{name}/neither": fields | plain, f"{model}/{name}/correct": fields | plain | TIS_2,
                f"{model}/{name}/repair": fields | repaired, f"{model}/{name}/both": fields | repaired | TIS_2,
            }
        arms[f"{model}/float32/neither"] = fields
    return arms
