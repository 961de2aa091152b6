"""Number formats of sampler and learner: QuRL, QaRL and Jet-RL, W8A8, float8, float16 and bfloat16.

    ./launch/figures.sh formats    # 12 arms of 5 seeds, 28 minutes on two cores

No gap is added: the formats have gaps of their own.
"""

from configs import fig_base
from configs.fig_rescue import INT8, TIS_2

get_config = fig_base.get_config

BOTH_INT8 = INT8 | {"model.quantization": "w8a8"}  # learner and sampler both use int8 products
FP8 = {"engine.quantization": "fp8_w8a8"}


def _engine(dtype):
    return {"engine.dtype": dtype, "engine.cache_dtype": dtype}


def _both(dtype):
    return _engine(dtype) | {"model.dtype": dtype}


def sweep():
    return {
        "float32": {},
        "W8A8": INT8,
        "W8A8-TIS-2": INT8 | TIS_2,
        "QuRL": INT8 | {"model.uaq_scale": 1.5, "correction.objective": "qurl_acr(clip_high=0.28)"},
        "W8A8-both": BOTH_INT8,
        "QaRL": BOTH_INT8 | {"correction.objective": "tbpo"},
        "FP8": FP8,
        "Jet-RL": FP8 | {"model.quantization": "fp8_w8a8"},
        "float32-bfloat16": _engine("bfloat16"),
        "float32-float16": _engine("float16"),
        "bfloat16": _both("bfloat16"),
        "float16": _both("float16"),
    }
