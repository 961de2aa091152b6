"""Compares importance weights by bias, variance and progress as responses get longer.

The policy is random, over a few tokens, and its state is the last token. The behaviour is the same
policy with normal noise of standard deviation `drift` on its logits. The reward is bounded, minus its
mean under the behaviour, as with the mean of a large group. `sweep` computes every method at every
length: EXACT methods by transfer matrices, SAMPLED methods by Monte Carlo with 95 % intervals.

It tests a conjecture: for 200 tokens and more, SGA's progress P is largest for an intermediate
aggregation (prefix, turn, geometric mean, variational), not for pure token or sequence weights.
"""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import figure

from experiments import parts
from experiments.horizon import Chain, Profile, monte_carlo, profile

HORIZONS = (4, 16, 64, 128, 256, 512, 1024)
VOCAB = 4


def _last(horizon, score_v):
    """Returns the reward [T, V] that is the score of the last token."""
    reward = np.zeros((horizon, len(score_v)))
    reward[-1] = score_v
    return reward


def _mean(horizon, score_v):
    """Returns the reward [T, V] that is the mean score of all tokens."""
    return np.tile(score_v / horizon, (horizon, 1))


REWARDS = {"last": _last, "mean": _mean}


def random_chain(drift: float, reward: str, horizon: int, seed: int = 0) -> Chain:
    """Returns both policies with the centred reward; the policies are the same at every horizon.

    Args:
      drift: standard deviation of the noise on the behaviour's logits.
      reward: an entry of `REWARDS`; scores of tokens are evenly spaced from 0 to 1.
      horizon: tokens of a response.
      seed: of the policy and of the noise.
    """
    rng = np.random.default_rng(seed)
    policy = rng.normal(size=(VOCAB, VOCAB))
    behaviour = policy + drift * rng.normal(size=(VOCAB, VOCAB))
    reward_tv = REWARDS[reward](horizon, np.linspace(0.0, 1.0, VOCAB))
    chain = Chain(policy, behaviour, reward_tv)
    reward_tv[-1] -= chain.expected_reward(chain.mu)
    return Chain(policy, behaviour, reward_tv)


def geometric(log_ratio_nt: np.ndarray, adv_n: np.ndarray) -> np.ndarray:
    """exp(mean_t log rho_t), the ratio of GSPO (arXiv:2507.18071)."""
    return np.exp(log_ratio_nt.mean(axis=1, keepdims=True))


def _turn_sums(log_ratio_nt, length):
    """Returns, for each token, the sum of its turn's log-ratios and the length of the turn, [N, T] each."""
    starts = np.arange(0, log_ratio_nt.shape[1], length)
    sizes = np.diff(np.append(starts, log_ratio_nt.shape[1]))
    sums = np.add.reduceat(log_ratio_nt, starts, axis=1)
    return np.repeat(sums, sizes, axis=1), np.repeat(sizes, sizes)


def turn(log_ratio_nt: np.ndarray, adv_n: np.ndarray, length: int = 16) -> np.ndarray:
    """Returns the product of the ratios of the token's turn; turns have `length` tokens."""
    return np.exp(_turn_sums(log_ratio_nt, length)[0])


def turn_geometric(log_ratio_nt: np.ndarray, adv_n: np.ndarray, length: int = 16) -> np.ndarray:
    """Geometric mean of the ratios of the token's turn (arXiv:2511.20718)."""
    sums_nt, sizes_t = _turn_sums(log_ratio_nt, length)
    return np.exp(sums_nt / sizes_t)


def prefix_min(log_ratio_nt: np.ndarray, adv_n: np.ndarray) -> np.ndarray:
    """(min_{s<t} rho_s) rho_t, MinPRO (arXiv:2601.22718)."""
    lowest = np.minimum.accumulate(log_ratio_nt, axis=1)[:, :-1]
    return np.exp(log_ratio_nt + np.pad(lowest, ((0, 0), (1, 0))))


def prefix_clip(log_ratio_nt: np.ndarray, adv_n: np.ndarray) -> np.ndarray:
    """prod_{s<=t} rho_s clamped to [exp(-0.025 sqrt t), exp(0.05 sqrt t)], the bounds of CTPO
    (arXiv:2605.07331), here as a detached weight."""
    root_t = np.sqrt(np.arange(1, log_ratio_nt.shape[1] + 1))
    return np.exp(np.clip(np.cumsum(log_ratio_nt, axis=1), -0.025 * root_t, 0.05 * root_t))


def seq_tis(log_ratio_nt: np.ndarray, adv_n: np.ndarray, cap: float = 2.0) -> np.ndarray:
    """min(prod_t rho_t, cap)."""
    return np.exp(np.minimum(log_ratio_nt.sum(axis=1, keepdims=True), math.log(cap)))


def vespo(log_ratio_nt: np.ndarray, adv_n: np.ndarray) -> np.ndarray:
    """W^k exp(lambda (1 - W)) with W = prod_t rho_t, VESPO (arXiv:2602.10693).

    (k, lambda) is (2, 3) at a non-negative advantage and (3, 2) at a negative one; log W is bounded
    to +-20.
    """
    log_w = np.clip(log_ratio_nt.sum(axis=1, keepdims=True), -20.0, 20.0)
    is_positive = adv_n[:, None] >= 0
    k, strength = np.where(is_positive, 2.0, 3.0), np.where(is_positive, 3.0, 2.0)
    return np.exp(k * log_w + strength * (1.0 - np.exp(log_w)))


EXACT: dict[str, tuple[Any, ...]] = {
    "none": ("none", math.inf),
    "none_centred": ("none", math.inf, True),
    "token": ("token", math.inf),
    "token_tis": ("token", 2.0),
    "tis_centred": ("token", 2.0, True),
    "prefix": ("prefix", math.inf),
    "seq": ("seq", math.inf),
}
SAMPLED = {
    "prefix_min": prefix_min,
    "prefix_clip": prefix_clip,
    "turn": turn,
    "turn_geometric": turn_geometric,
    "geometric": geometric,
    "vespo": vespo,
    "seq_tis": seq_tis,
}
# Pure token and pure sequence weights.
EXTREMES = ("token", "token_tis", "none_centred", "tis_centred", "seq", "seq_tis")


@dataclasses.dataclass(frozen=True)
class Row:
    """One method at one horizon. half: half-widths of the 95 % intervals, None for exact methods."""

    horizon: int
    method: str
    profile: Profile
    half: Profile | None


def sweep(
    drift: float, reward: str, lengths: Sequence[int], batch: int, num_samples: int, seed: int
) -> list[Row]:
    """Returns the profile of every method at every length; arguments as `random_chain`, `monte_carlo`."""
    rows = []
    for length in lengths:
        chain = random_chain(drift, reward, length, seed)
        gradient = chain.true_gradient()
        for name, arguments in EXACT.items():
            moments = chain.moments(*arguments)
            rows.append(Row(length, name, profile(moments, gradient, batch), None))
        sampled = monte_carlo(chain, SAMPLED, num_samples, seed, batch)
        rows += [Row(length, name, *sampled[name]) for name in SAMPLED]
    return rows


def best(rows: Sequence[Row]) -> dict[int, str]:
    """Returns the method with the largest P at each horizon."""
    lengths = sorted({row.horizon for row in rows})
    return {
        length: max(
            (row for row in rows if row.horizon == length), key=lambda row: row.profile.progress
        ).method
        for length in lengths
    }


def verdict(rows: Sequence[Row]) -> dict[int, str]:
    """Returns for each horizon whether an extreme or an intermediate method has the largest P.

    Compares the best pure token or sequence weight with the best intermediate method. The result is
    "extreme" or "intermediate" if P is larger by more than both 95 % intervals together, else "open".
    Steps against the gradient (P squares the sign) and the uncorrected "none" do not compete.
    """
    sides = {}
    for length in sorted({row.horizon for row in rows}):
        rivals = [
            row for row in rows
            if row.horizon == length and row.method != "none" and row.profile.efficiency > 0
        ]
        extreme, middle = (
            max(
                (row for row in rivals if (row.method in EXTREMES) == is_extreme),
                key=lambda row: row.profile.progress,
            )
            for is_extreme in (True, False)
        )
        margin = sum(row.half.progress for row in (extreme, middle) if row.half is not None)
        gap = middle.profile.progress - extreme.profile.progress
        side = "open" if abs(gap) <= margin else "intermediate" if gap > 0 else "extreme"
        sides[length] = f"{side} ({middle.method} against {extreme.method})"
    return sides


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as text; exact values have no interval, and * marks the largest P of a horizon."""
    winners = best(rows)
    lines = [
        f"{'T':>5} {'method':14} {'bias':>17} {'log10 variance':>17} {'progress P':>21} "
        f"{'efficiency':>21} {'ESS':>17}"
    ]
    for row in rows:
        cells = [f"{row.horizon:5d} {row.method:14}"]
        for name, form in (
            ("bias", "8.3f"),
            ("log10_variance", "8.3f"),
            ("progress", "10.3e"),
            ("efficiency", "10.3e"),
            ("ess", "8.3f"),
        ):
            half = ""
            if row.half is not None:
                half = "+-" + format(getattr(row.half, name), form).strip()
            width = 21 if form.endswith("e") else 17
            cells.append(f"{format(getattr(row.profile, name), form) + half:>{width}}")
        cells.append("*" if winners[row.horizon] == row.method else "")
        lines.append(" ".join(cells).rstrip())
    lines += [f"T = {length}: {side}" for length, side in verdict(rows).items()]
    return "\n".join(lines)


def centred_table(lengths: Sequence[int], seeds: Sequence[int], drifts: Sequence[float]) -> str:
    """Returns a Markdown table of token weights with and without centred scores, without sampling: their bias,
    and their P relative to "token", for one response and for the mean over 10,000."""
    names = ("none", "none_centred", "token_tis", "tis_centred")
    header = ["reward", "drift", "T", "policy", "bias: token"]
    header += [f"{name}: bias, P" for name in names]
    lines = []
    for reward, drift, length, seed in itertools.product(REWARDS, drifts, lengths, seeds):
        chain = random_chain(drift, reward, length, seed)
        gradient = chain.true_gradient()
        outcomes = {
            name: [profile(chain.moments(*EXACT[name]), gradient, batch) for batch in (1, 10_000)]
            for name in ("token", *names)
        }
        over = lambda name, outcomes=outcomes: ", ".join(
            f"{own.progress / token.progress:.2f}"
            for own, token in zip(outcomes[name], outcomes["token"], strict=True)
        )
        cells = [f"{outcomes[name][0].bias:.3f}; {over(name)}" for name in names]
        start = [reward, f"{drift:g}", str(length), str(seed), f"{outcomes['token'][0].bias:.3f}"]
        lines.append([*start, *cells])
    return parts.rows(header, lines)


def draw(rows: Sequence[Row], path: str) -> pathlib.Path:
    """Writes a PNG: bias against standard deviation as T grows, and P against T."""
    page = figure.Figure(figsize=(12, 5), layout="constrained")
    plane, progress = page.subplots(1, 2)
    methods = list(dict.fromkeys(row.method for row in rows))
    for i, name in enumerate(methods):
        own = [row for row in rows if row.method == name]
        style = {
            "color": f"C{i % 10}", "marker": "os^vDPX*<>hdp8"[i % 14], "markersize": 5, "label": name,
            "linestyle": "-" if name in EXACT else "--",
        }
        bias = [max(row.profile.bias, 1e-6) for row in own]
        plane.plot(bias, [row.profile.log10_variance / 2 for row in own], **style)
        progress.plot([row.horizon for row in own], [row.profile.progress for row in own], **style)
    plane.set(xscale="log", xlabel="|bias| / |true gradient| (1e-6: none)",
              ylabel="log10 of the standard deviation / |true gradient|",
              title="Bias and variance of one response; a point per T")
    progress.set(xscale="log", yscale="log", xlabel="T, tokens", ylabel="P", title="Progress P")
    progress.legend(fontsize=8)
    for axes in (plane, progress):
        axes.grid(color="#E4E7EB")
    page.savefig(path, dpi=110)
    return pathlib.Path(path)
