"""FrozenLake against Gymnasium's own registered environment."""

import collections

import gymnasium
import pytest

from jaxrl_tis.environments.frozen_lake import MOVES, RULES, FrozenLake

EXAMPLE = {"prompt": "", "id": "x"}
STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def rows(text):
    return text.removeprefix(RULES).split("\n")


def path(lake):
    """The moves of a shortest walk from the corner to the goal, by breadth-first search."""
    paths = {(0, 0): []}
    frontier = collections.deque(paths)
    while frontier:
        row, column = place = frontier.popleft()
        if lake[row][column] == "G":
            return paths[place]
        for move, (down, right) in STEPS.items():
            new = row + down, column + right
            if min(new) >= 0 and max(new) < 4 and lake[new[0]][new[1]] != "H" and new not in paths:
                paths[new] = [*paths[place], move]
                frontier.append(new)


@pytest.mark.parametrize("id", ["x", "y", "train:7"])
def test_a_walk_to_the_goal(id):
    play = FrozenLake(seed=1)
    lake = rows(play.reset({"id": id}))
    assert [len(row) for row in lake] == [4] * 4 and lake[0][0] == "P" and lake[3][3] == "G"
    moves, (row, column) = path(lake), (0, 0)
    for number, move in enumerate(moves, start=1):
        step = play.step(f"Then I go {move.upper()}.")
        row, column = row + STEPS[move][0], column + STEPS[move][1]
        expected = [list("S" + lake[0][1:]), *map(list, lake[1:])]
        expected[row][column] = "P"
        assert rows(step.observation) == ["".join(line) for line in expected]
        assert step.is_done == (number == len(moves)) and step.reward == float(step.is_done)
        assert step.metrics == {"moves": number, "unread": 0}
    play.close()


def test_a_hole_ends_it_and_a_wall_stops_it():
    holes = 0
    for id in range(20):
        play = FrozenLake(seed=1)
        lake = rows(play.reset({"id": id}))
        assert rows(play.step("up").observation) == lake
        if lake[0][1] == "H":
            step = play.step("left or right")  # the last word is the move
            assert (step.is_done, step.reward) == (True, 0.0)
            holes += 1
    assert holes


def test_an_answer_without_a_move():
    play = FrozenLake(seed=1)
    lake = play.reset(EXAMPLE)
    step = play.step("upright, downhill")
    assert (step.is_done, step.reward, step.metrics) == (False, 0.0, {"moves": 0, "unread": 1})
    assert step.observation == "no move: reply with left, down, right or up"
    assert rows(play.step("up").observation) == rows(lake)


def test_the_map_is_the_examples_and_chance_the_seeds():
    maps = [FrozenLake(seed=seed).reset({"id": id}) for id in range(8) for seed in (1, 2)]
    assert maps[::2] == maps[1::2] and len(set(maps)) > 4

    def walk(seed):
        play = FrozenLake(seed=seed, slippery=True)
        return [play.reset(EXAMPLE), *(play.step(m).observation for m in ("right", "down") * 4)]

    assert walk(1) == walk(1)
    assert len({str(walk(seed)) for seed in range(6)}) > 1


@pytest.mark.parametrize("slippery", [False, True])
def test_it_is_gymnasiums_own(slippery):
    play = FrozenLake(seed=5, slippery=slippery)
    lake = [row.replace("P", "S") for row in rows(play.reset(EXAMPLE))]
    theirs = gymnasium.make("FrozenLake-v1", desc=lake, is_slippery=slippery)
    theirs.reset(seed=5)
    for move in ("right", "down", "left", "up", "right", "right", "down", "down") * 2:
        place, reward, is_done, _, _ = theirs.step(MOVES[move])
        step = play.step(move)
        assert "".join(rows(step.observation)).index("P") == place
        assert (step.reward, step.is_done) == (reward, is_done)
        if is_done:
            break
