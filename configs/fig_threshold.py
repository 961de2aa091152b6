"""The gap at which a run fails, without a correction and with TIS.

    ./launch/figures.sh threshold    # 9 arms of 5 seeds, 25 minutes on two cores

The gap is noise on the sampler's weights, as in `fig_rescue.py`, in four sizes. One more arm has the gap of
int8 alone.
"""

from configs import fig_base
from configs.fig_rescue import INT8, TIS_2, UNCORRECTED

get_config = fig_base.get_config

SCALES = (0.1, 0.2, 0.3, 0.5)


def sweep():
    injected = {
        f"{name}-{scale}": {"engine.injected": f"weights(scale={scale})"} | fields
        for scale in SCALES for name, fields in {"none": UNCORRECTED, "TIS-2": TIS_2}.items()
    }
    return injected | {"int8": INT8 | UNCORRECTED}
