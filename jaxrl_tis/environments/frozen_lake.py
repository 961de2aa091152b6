"""FrozenLake of Gymnasium: walk from the start to the goal, and fall into no hole.

The map comes from the example's id, so all episodes of an example have one map. The episode's seed
decides where a player slips. The example's prompt is not used. This file shows an adapter of
Gymnasium: `reset` and `step` translate text.
"""

import random
import re
from collections.abc import Mapping
from typing import Any

try:
    from gymnasium.envs.toy_text import frozen_lake
except ImportError as error:
    raise ImportError(f"{error}: pip install 'jaxrl_tis[environments]'") from error

from jaxrl_tis.environments.protocol import Step

SIZE = 4
MOVES = {
    "left": frozen_lake.LEFT, "down": frozen_lake.DOWN, "right": frozen_lake.RIGHT,
    "up": frozen_lake.UP,
}
MOVE = re.compile(rf"\b({'|'.join(MOVES)})\b", re.IGNORECASE)
RULES = """\
You are on a frozen lake. P is you, F is ice, H is a hole, G is the goal, S is the start.
Reply with one move: left, down, right or up. Reach G, and avoid H.

"""


class FrozenLake:
    """One episode. The last move in an answer is taken. The reward is Gymnasium's: 1 for a step to
    the goal, 0 for other steps. Metrics: `moves`, and `unread`, answers without a move.

    Args:
        slippery: whether a move goes to either side with probability 1/3 each.
    """

    def __init__(self, *, seed: int, slippery: bool = False):
        self._seed, self._slippery = seed, slippery
        self._moves = self._unread = 0

    def reset(self, example: Mapping[str, Any]) -> str:
        rng = random.Random(f"frozen lake {example['id']}")
        lake = frozen_lake.generate_random_map(size=SIZE, seed=rng.getrandbits(32))
        self._game = frozen_lake.FrozenLakeEnv(desc=lake, is_slippery=self._slippery)
        self._game.reset(seed=self._seed)
        return RULES + self._map()

    def step(self, answer: str) -> Step:
        moves = MOVE.findall(answer)
        if not moves:
            self._unread += 1
            return Step("no move: reply with left, down, right or up", 0.0, metrics=self._metrics())
        self._moves += 1
        _, reward, is_done, _, _ = self._game.step(MOVES[moves[-1].lower()])
        return Step(self._map(), float(reward), is_done, self._metrics())

    def close(self) -> None:
        self._game.close()

    def _metrics(self) -> dict[str, float]:
        return {"moves": self._moves, "unread": self._unread}

    def _map(self) -> str:
        """Returns the lines of the map with the player's place as P."""
        lake: Any = self._game.desc  # bytes; its annotation says text
        fields = [field.decode() for field in lake.ravel()]
        fields[self._game.s] = "P"
        return "\n".join("".join(fields[i : i + SIZE]) for i in range(0, SIZE * SIZE, SIZE))
