"""Routes of sampler and learner without fault, and the dump of docs/audit.md.

`python -m tests.audit.routed` writes routes.jsonl.gz.
"""

import gzip
import json
import pathlib

import numpy as np

EXAMPLE = pathlib.Path(__file__).parent / "routes.jsonl.gz"
NUM_EXPERTS, NUM_CHOSEN, NUM_LAYERS = 16, 3, 4
PROMPT, LENGTH, TURN = 20, 130, 70  # context tokens: of the prompt, in all, of the first turn
COUNT = 6
LOOP = slice(40, 110)  # of sequence 0: one token again and again, with a probability near 1


def random_routes(rng, num):
    """[num, L, k] of different experts."""
    order = np.argsort(rng.random((num, NUM_LAYERS, NUM_EXPERTS)), axis=-1)
    return order[..., :NUM_CHOSEN]


class Batch:
    """Routes without fault: those of a token by a table, which the learner changes in one of twelve
    routers; text of 50 tokens, and a loop."""

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, 50, (COUNT, LENGTH))
        tokens[0, LOOP] = 7
        self.sampler = random_routes(rng, 50)[tokens[:, :-1]]
        other = random_routes(rng, COUNT * (LENGTH - 1)).reshape(self.sampler.shape)
        is_other = rng.random(self.sampler.shape[:3]) < 1 / 12
        self.learner = np.where(is_other[..., None], other, self.sampler)
        self.logp = -rng.exponential(1.0, (COUNT, LENGTH))
        self.logp[0, LOOP] = -0.001
        self.mask = np.ones((COUNT, LENGTH), int)
        self.mask[:, TURN : TURN + 5] = 0  # a tool's text

    def lines(self, sampler=None, learner=None, **more):
        """The dump; records are lists of rows."""
        sampler = list(self.sampler) if sampler is None else sampler
        learner = list(self.learner) if learner is None else learner
        return [
            {"logp_behav": self.logp[i, PROMPT:].tolist(), "logp_old": self.logp[i, PROMPT:].tolist(),
             "mask": self.mask[i, PROMPT:].tolist(), "prompt_tokens": PROMPT,
             "routes_behav": plain(sampler[i]), "routes_old": plain(learner[i]), **more}
            for i in range(COUNT)
        ]


def plain(x):
    return x.tolist() if isinstance(x, np.ndarray) else x


def example() -> list[dict]:
    """A dump with two faults of the sampler: the last row of the first turn is a placeholder in every
    sequence, and one route stands for 46 rows of one sequence. Tokens with a flip have the larger gap."""
    batch, rng = Batch(), np.random.default_rng(1)
    flips = (batch.sampler != batch.learner).any(axis=(2, 3))[:, PROMPT - 1 :]
    noise = rng.standard_normal(flips.shape) * np.where(flips, 0.12, 0.02)
    batch.sampler[:, TURN - 1] = 0
    batch.sampler[3, 21:TURN - 4] = batch.sampler[3, 20]
    lines = batch.lines()
    for line, x in zip(lines, noise, strict=True):
        behav = np.array(line["logp_behav"]).round(4)
        line["logp_behav"], line["logp_old"] = behav.tolist(), np.minimum(behav + x, 0).round(4).tolist()
    return lines


def random_dump(rng) -> list[dict]:
    """A dump without fault: of few or many tokens, layers, experts and sequences, with loops of equal
    tokens as likely as the sampler finds them, uneven loads, flips of both sides, turns, sequences
    without a token of the policy, and last rows that are no routes."""
    num_layers, num_experts, num_words = (int(rng.choice(x)) for x in ((1, 2, 4, 12), (4, 8, 64), (2, 50, 1000)))
    num_chosen = min(int(rng.choice((1, 2, 4))), num_experts)
    flips, sticky, longest = (float(rng.choice(x)) for x in ((0, 0.05, 0.3), (0, 0.3, 0.95), (3, 20, 300)))
    load = np.log([rng.choice((1, 30)), *[1] * (num_experts - 1)])
    choose = lambda n: np.argsort(
        -load - rng.gumbel(size=(n, num_layers, num_experts)), axis=-1)[..., :num_chosen]
    of_word, lines = choose(num_words), []
    for _ in range(rng.integers(1, 12)):
        n = int(rng.integers(2, longest + 1))
        prompt = int(rng.integers(0, n))
        words = rng.integers(0, num_words, n)
        for t in range(1, n):
            words[t] = words[t - 1] if rng.random() < sticky else words[t]
        is_same = np.concatenate([[False], words[1:] == words[:-1]])
        logp = np.where(is_same, np.log(max(sticky, 1 / num_words)), -rng.exponential(1.0, n))[prompt:]
        mask = np.ones(n - prompt, int)
        mask[3:5] = rng.integers(2)
        mask[:] *= rng.random() > 0.05
        first = mask.argmax() if mask.any() else 0
        of_side = lambda n=n, words=words: np.where(
            rng.random((n - 1, num_layers, 1)) < flips, choose(n - 1), of_word[words[:-1]])
        last = int(rng.integers(3))
        ended = lambda rows, last=last: np.concatenate(
            [rows, *([rows[-1:] * (last - 1)] if last else [])])
        lines.append({
            "logp_behav": logp.tolist(), "logp_old": logp.tolist(), "mask": mask.tolist(),
            "prompt_tokens": prompt + int(first), "routes_behav": ended(of_side()).tolist(),
            "routes_old": ended(of_side()).tolist(),
        })
    return lines if any(any(line["mask"]) for line in lines) else random_dump(rng)


if __name__ == "__main__":
    text = "".join(json.dumps(line) + "\n" for line in example())
    EXAMPLE.write_bytes(gzip.compress(text.encode(), mtime=0))
