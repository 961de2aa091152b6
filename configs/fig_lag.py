"""How far behind a sampler may be, by the sequence ESS: the lag law (docs/open_problems.md, 5).

    ./launch/figures.sh lag    # 28 arms of 3 seeds of 1,600 steps, a day on two cores

An arm is "FAMILY/OBJECTIVE-LAG". The sampler keeps its weights for LAG updates, `oapl(lag=LAG)`, and each batch has one
update. Both objectives have the sampler as the reference: OAPL's regression, and REINFORCE with a KL to the sampler.
Families are two-digit sums and lists of eight one-digit sums.

Fixed before the runs: a run is stable if it ends above its start and at 70 % of its best or more. The ESS is that of
log-normal weights, exp(-length * mean squared log-ratio of the ages), of each batch before its own update, mean over
the second half of the run: the ESS itself is recorded of the engine's gap alone. c and a of L = c ESS^a are the
boundary of a logistic regression on log lag and log ESS, with a bootstrap over runs. The law fails if a tenth of the
runs is on the wrong side, or if a of the two families differs by more than 0.5.
"""

from configs import fig_base
from configs.fig_referee import LENGTHS
from jaxrl_tis.sweep import Arm

LAGS = (1, 10, 50, 100, 200, 400, 800)
OBJECTIVES: dict[str, Arm] = {
    "OAPL": {
        "correction.objective": "oapl(oapl_beta=0.1)", "correction.advantage": "oapl(oapl_beta_value=0.1)",
        "correction.aggregation": "seq-mean-token-mean",
    },
    "KL": {"correction.objective": "reinforce", "correction.centre": "behav", "correction.sampler_kl_coeff": 0.1},
}
FAMILIES: dict[str, Arm] = {"sums": {}, "lists": LENGTHS["long"]}


def get_config():
    c = fig_base.get_config()
    c.steps = c.checkpoint.every = 1600
    c.train.minibatches = 1
    c.eval.every = 100
    return c


def _lag(lag: int) -> Arm:
    """Returns the fields of a lag."""
    return {} if lag == 1 else {"rollout.schedule": f"oapl(lag={lag})", "rollout.update_turns": 4}


def sweep():
    return {
        f"{family}/{name}-{lag}": fields | objective | _lag(lag)
        for family, fields in FAMILIES.items() for name, objective in OBJECTIVES.items() for lag in LAGS
    }
