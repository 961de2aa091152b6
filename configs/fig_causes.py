"""Runs of which the cause of the gap is known, for the doctor to find.

    ./launch/figures.sh causes    # 7 arms of 10 seeds, 30 minutes on two cores
"""

from configs import fig_base

get_config = fig_base.get_config


def sweep():
    return {
        "none": {},
        "injected": {"engine.injected": "weights(scale=0.3)"},
        "filter": {"rollout.top_p": 0.8, "rollout.allow_filter_bias": True},
        "noise": {"engine.noise_start": 0.5, "engine.noise_end": 0.3, "engine.noise_stages": 1},
        "quantised": {"engine.quantization": "fp8_w8a8", "engine.cache_dtype": "float8_e4m3fn"},
        "stale": {
            "rollout.mode": "areal(staleness=16)", "rollout.update_turns": 4, "optimizer.lr": 1e-3,
        },
        "reuse": {"train.epochs": 8, "optimizer.lr": 1e-3},
    }
