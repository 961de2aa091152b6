"""Draws collapse and rescue with a critic: the figure of `rescue.py` for `configs/fig_critic.py`.

Examples:

    python -m jaxrl_tis.experiments.critic
    python -m jaxrl_tis.experiments.critic docs/experiments
"""

from jaxrl_tis.experiments import figures
from jaxrl_tis.experiments.rescue import draw, table

if __name__ == "__main__":
    figures.run("critic", table, {"critic": (draw, (14, 7))}, needed=("none",))
