"""Corrections of the engine gap on the quickstart's task.

The arms: no correction, truncated and masked weights by token and by sequence, and a sampler without a gap.

    python -m jaxrl_tis.sweep --config=configs/sweeps/correction.py --seeds=0,1,2

Nine arms; one run is the quickstart's, about 5 minutes on two CPU cores.
"""

from configs import quickstart
from jaxrl_tis.sweep import grid, product

get_config = quickstart.get_config


def sweep():
    weights = [
        "none", "token_vanilla", "token_tis(cap=2.0)", "token_tis(cap=8.0)", "token_mis(upper=2.0)",
        "seq_tis(cap=2.0)", "seq_mis(upper=2.0)",
    ]
    corrected = product(
        grid({"engine.quantization": ["w8a8"]}), grid({"correction.weight": weights})
    )
    bypass = [{"engine.quantization": "w8a8", "correction.preset": "bypass_ppo_clip"}]
    no_gap = [{"engine.quantization": "none", "correction.weight": "none"}]
    return corrected + bypass + no_gap
