"""Draws collapse and rescue with a critic: the figure of `rescue.py` for `configs/fig_critic.py`.

Examples:

    python -m experiments.critic
    python -m experiments.critic docs/experiments
"""

from experiments import figures
from experiments.rescue import draw, table

if __name__ == "__main__":
    figures.run("critic", table, {"critic": (draw, (14, 7))}, needed=("none",))
