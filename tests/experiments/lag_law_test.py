"""The lag law on made boundaries."""

import numpy as np

from experiments import lag_law
from tests.experiments import made


def test_a_boundary_is_found():
    """Runs are stable where L < 50 ESS; the fitted boundary has every run on its right side."""
    runs = [
        made.run(
            f"sums/OAPL-{lag}", 0, accuracy=(0.3, 0.5, *[0.5 if lag < 50 * ess else 0.2] * 3),
            mismatch__staleness__log_ratio_square_mean=-np.log(ess) / 3, response_length__mean=3,
        )
        for lag in (1, 5, 20, 40, 100, 400) for ess in (0.05, 0.2, 0.5, 0.9)
    ]
    c, a, right = lag_law.law(runs)
    assert right == 1.0 and 20 < c < 100 and 0.5 < a < 1.5
    assert np.isnan(lag_law.law(runs[:1])).all()
    table = lag_law.laws({name: [r for r in runs if r.arm == name] for name in dict.fromkeys(r.arm for r in runs)})
    assert table.splitlines()[2].startswith("| sums/OAPL | 10 of 24 | 49.67 [")
    page = lag_law.FIGURE.pictures["lag"].page({"sums/OAPL-1": runs})
    assert sum(len(points.get_offsets()) for points in page.axes[0].collections) == 24
