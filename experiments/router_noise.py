"""Tests whether the gradient bias of routing noise grows as K x delta, by exact enumeration.

K of 16 experts are active in each layer of `expert_policy`. The sampler has normal noise of
standard deviation delta on its router logits, fixed for a seed as in `engine.injected =
"router(scale=...)"`. The bias is the distance of the expected step from the true gradient of the
policy without noise, in units of this gradient's norm. log bias = c + a log K + b log delta is
fitted to the means over seeds, for delta up to LARGEST. The answer is yes if the 95 % intervals of
a and b, from a bootstrap over seeds, contain 1 in the arm JUDGED.
"""

import functools
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments import expert_policy, parts
from experiments.expert_policy import NOISES, Size
from jaxrl_tis.models.config import MoeConfig
from jaxrl_tis.report.plots import palette

SEEDS = range(100, 300)
ACTIVE = (1, 2, 4, 8)  # K
DELTAS = (0.01, 0.03, 0.1, 0.3, 1.0)
LARGEST = 0.3  # of the fits; above it the bias may saturate
SCALES = ("1", "sqrt K")  # factor of the experts' outputs; the gates sum to 1
ROUTINGS = ("none", "r3")  # r2 is none for weights that have not moved
WEIGHTS = ("none", "token_tis", "seq_vanilla")
ARMS = [f"{routing}, {weight}" for routing in ROUTINGS for weight in WEIGHTS]
BIASED = [arm for arm in ARMS if arm != "none, seq_vanilla"]
TARGETS = {"native": "bias", "replayed": "replay bias"}  # gradient that a step is compared with
JUDGED = ("router", "1", "none, token_tis", "native")
RESAMPLES = 2000
# Of the table of routings after updates, with noise in choice and gates.
MOVED_ACTIVE, MOVED_DELTAS, DRIFTS = 2, (0.03, 0.3), (0.0, 0.03, 0.1)
ROUNDING = 1e-12  # smaller numbers are rounding of float64

# (noise, scale of the experts) -> measure -> [seed, K, delta]
Found = Mapping[tuple[str, str], Mapping[str, np.ndarray]]
# (delta, drift of the weights) -> "<routing>, <weight>" -> bias [seed]
Moved = Mapping[tuple[float, float], Mapping[str, np.ndarray]]


def size_of(active: int) -> Size:
    """Returns the policy's shape with K active experts."""
    return Size(MoeConfig(num_experts=16, top_k=active, expert_dim=8))


@functools.partial(jax.jit, static_argnames="size")
def measured(params, pattern_lde, share, size: Size) -> dict[str, jax.Array]:
    """Returns the measures of one policy and noise pattern, each [delta].

    Args:
      params, share: of the policy, and of the noise in its gates, see `expert_policy`.

    "<arm>: bias" and "<arm>: cosine" compare the expected step with the true gradient, and
    "<arm>: replay bias" with the gradient of the policy that has the sampler's routes.
    "<routing>: gap" is E |log ratio| and "<routing>: kl" the KL of the learner from the sampler, in
    nats per token. "flips" is the expected number of experts that a layer drops or adds for a token.
    """
    native = expert_policy.scored(params, size)
    truth = expert_policy.true_gradient(native, size)
    norm = jnp.linalg.norm(truth)

    def of_delta(delta):
        behav_nt, ids_lpk = expert_policy.sampler(params, size, delta * pattern_lde, share)
        mean = lambda x_nt: jnp.exp(behav_nt.sum(axis=1)) @ x_nt.mean(axis=1)
        replayed, found = expert_policy.scored(params, size, ids_lpk), {}
        replay_truth = expert_policy.true_gradient(replayed, size)
        replay_norm = jnp.linalg.norm(replay_truth)
        for routing, policy in {"none": native, "r3": replayed}.items():
            log_ratio_nt = policy.logp_nt - behav_nt
            found[f"{routing}: gap"] = mean(jnp.abs(log_ratio_nt))
            found[f"{routing}: kl"] = mean(jnp.expm1(log_ratio_nt) - log_ratio_nt)
            steps = expert_policy.expected_steps(policy, size, behav_nt, WEIGHTS)
            for weight, step in steps.items():
                arm = f"{routing}, {weight}"
                found[f"{arm}: bias"] = jnp.linalg.norm(step - truth) / norm
                to_replay = jnp.linalg.norm(step - replay_truth)
                found[f"{arm}: replay bias"] = to_replay / replay_norm
                found[f"{arm}: cosine"] = step @ truth / (jnp.linalg.norm(step) * norm)
        is_same = ids_lpk[..., None] == jnp.expand_dims(native.ids_lpk, axis=2)
        changed_p = 2.0 * jnp.mean(size.moe.top_k - jnp.sum(is_same, axis=(2, 3)), axis=0)
        return found | {"flips": mean(changed_p[size.responses[0]])}

    return jax.lax.map(of_delta, jnp.asarray(DELTAS))


def enumerated(seeds: Sequence[int], noise: str, scale: str) -> dict[str, np.ndarray]:
    """Returns {measure: [seed, K, delta]}."""

    def of_seed(size, seed):
        params = expert_policy.random_params(size, seed)
        params["expert_down"] *= 1.0 if scale == "1" else size.moe.top_k**0.5
        return measured(params, expert_policy.noise_pattern(size, seed), NOISES[noise], size)

    with jax.enable_x64(True):
        by_active = [
            jax.tree.map(lambda *x: np.stack(x), *(of_seed(size_of(active), s) for s in seeds))
            for active in ACTIVE
        ]
    return jax.tree.map(lambda *x: np.stack(x, axis=1), *by_active)


def after_updates(seeds: Sequence[int]) -> Moved:
    """Returns the biases after updates."""
    size, found = size_of(MOVED_ACTIVE), {}
    with jax.enable_x64(True):
        for delta, drift in itertools.product(MOVED_DELTAS, DRIFTS):
            by_seed = []
            for seed in seeds:
                old = expert_policy.random_params(size, seed)
                change_lde = delta * expert_policy.noise_pattern(size, seed)
                truth, bias = expert_policy.routing_bias(
                    old, expert_policy.moved(old, drift, seed), size, change_lde[None],
                    NOISES["router"], WEIGHTS,
                )
                share = lambda x, truth=truth: np.linalg.norm(x) / np.linalg.norm(truth)
                by_seed.append({f"{r}, {w}": share(bias[r][w]) for r in bias for w in WEIGHTS})
            found[delta, drift] = {arm: np.array([x[arm] for x in by_seed]) for arm in by_seed[0]}
    return found


def exponents(values: np.ndarray, *factors: np.ndarray) -> np.ndarray:
    """Fits log mean(values) = c + sum_i a_i log mean(factor_i) over K and the deltas up to LARGEST.

    Args:
      values, factors: [seed, K, delta], or what is broadcast to it; means are over seeds.

    Returns a_i [1 + RESAMPLES, number of factors]: of all seeds, and of bootstrap samples of them.
    """
    seeds = len(values)
    drawn = np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds))
    counts = np.stack([np.bincount(d, minlength=seeds) for d in (np.arange(seeds), *drawn)])
    is_used = np.array(DELTAS) <= LARGEST

    def logs(x):
        mean = np.tensordot(counts / seeds, np.broadcast_to(x, values.shape), axes=1)
        return np.log(mean[..., is_used]).reshape(len(counts), -1)

    design = np.stack([np.ones_like(logs(values)), *map(logs, factors)], axis=-1)
    return (np.linalg.pinv(design) @ logs(values)[..., None])[:, 1:, 0]


def axes_of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns K and delta in the shape of the values."""
    k, delta = np.meshgrid(ACTIVE, DELTAS, indexing="ij")
    return np.broadcast_to(k[None], values.shape), np.broadcast_to(delta[None], values.shape)


def laws(found: Found) -> dict[tuple[str, str, str, str], tuple[parts.Interval, ...]]:
    """Returns the exponents (a of K, b of delta) of the biases that no cell has as rounding alone.

    Keys are (noise, scale of the experts, arm, key of TARGETS).
    """
    by_arm = {}
    for (noise, scale), measures in found.items():
        for arm, (target, name) in itertools.product(ARMS, TARGETS.items()):
            bias = measures[f"{arm}: {name}"]
            if _is_biased(bias):
                a_b = exponents(bias, *axes_of(bias))
                by_arm[noise, scale, arm, target] = tuple(map(parts.bootstrap, a_b.T))
    return by_arm


def _is_biased(bias: np.ndarray) -> bool:
    """Returns whether no cell is zero but for rounding. A single seed may have no flip."""
    return bool(bias.mean(axis=0).min() > ROUNDING)


def verdict(law: tuple[parts.Interval, ...]) -> str:
    """Returns the answer for the exponents of an arm, by their intervals to two digits."""
    is_one = all(round(low, 2) <= 1.0 <= round(high, 2) for _, low, high in law)
    answer = "yes" if is_one else "no"
    a, b = (parts.interval(interval, ".2f") for interval in law)
    return f"{answer}: K^a delta^b with a = {a} and b = {b}"


def table(found: Found) -> str:
    """Returns Markdown: the verdict, and the exponents of all arms and in measures of the gap."""
    by_arm = laws(found)
    lines = [[*arm, *(parts.interval(x, ".2f") for x in law)] for arm, law in by_arm.items()]
    header = ["noise", "experts x", "arm", "gradient", "a (of K)", "b (of delta)"]
    measures = found[JUDGED[:2]]
    bias, gaps = measures[f"{JUDGED[2]}: bias"], []
    for name in ("flips", "none: kl"):
        with_k = exponents(bias, axes_of(bias)[0], measures[name])
        fits = (*with_k.T, *exponents(bias, measures[name]).T)
        gaps.append([name, *(parts.interval(parts.bootstrap(fit), ".2f") for fit in fits)])
    return "\n\n".join([
        f"Does the bias grow as K x delta? {verdict(by_arm[JUDGED])} ({', '.join(JUDGED)}).",
        parts.rows(header, lines),
        parts.rows([f"{JUDGED[2]}: x", "of K at equal x", "of x at equal K", "of x alone"], gaps),
    ])


def moved_table(moved: Moved) -> str:
    """Returns the table of the bias after updates."""
    lines = [
        [f"{delta:g}", f"{drift:g}", weight]
        + [parts.mean(arms[f"{routing}, {weight}"], ".3f") for routing in expert_policy.ROUTINGS]
        for (delta, drift), arms in moved.items() for weight in WEIGHTS
    ]
    routings = [f"bias of {routing}" for routing in expert_policy.ROUTINGS]
    return parts.rows([f"delta (K = {MOVED_ACTIVE})", "drift", "weight", *routings], lines)


def cells(found: Found) -> str:
    """Returns the tables of the measures of all cells, means over seeds."""
    blocks = []
    for (noise, scale), measures in found.items():
        lines = [
            [name, str(active), *(f"{_rounded(x):.3g}" for x in values.mean(axis=0)[i])]
            for name, values in measures.items()
            for i, active in enumerate(ACTIVE)
        ]
        header = [f"noise: {noise}, experts x {scale}", "K", *(f"delta {d:g}" for d in DELTAS)]
        blocks.append(parts.rows(header, lines))
    return "\n\n".join(blocks)


def _rounded(x: float) -> float:
    return 0.0 if abs(x) < ROUNDING else x


def panel_of(arm: str) -> parts.Panel:
    """Makes a panel of an arm's mean bias against delta, by K."""

    def panel(axes, data):
        values = data[0][JUDGED[:2]][f"{arm}: bias"].mean(axis=0)
        for bias, active, color in zip(values, ACTIVE, palette(len(ACTIVE)), strict=True):
            axes.plot(DELTAS, bias, "o-", color=color, label=f"K = {active}")
        line = np.array([DELTAS[0], LARGEST])
        axes.plot(line, line, color="black", linewidth=0.7, label="slope 1")
        axes.set(title=arm, xlabel="delta", xscale="log", yscale="log")
        axes.legend()
        if arm == BIASED[0]:
            axes.set_ylabel("|bias| / |true gradient|")

    return panel


def summary(found: Found) -> list[dict]:
    """Returns a record of the means over seeds of each cell, for a file."""
    return [
        {"noise": noise, "scale": scale, "K": active, "delta": delta}
        | {name: float(f"{_rounded(x.mean(axis=0)[i, j]):.6g}") for name, x in measures.items()}
        for (noise, scale), measures in found.items()
        for i, active in enumerate(ACTIVE)
        for j, delta in enumerate(DELTAS)
    ]


def read(folder: pathlib.Path) -> tuple[Found, Moved]:
    """Computes the biases, and stores their means."""
    found = {(n, s): enumerated(SEEDS, n, s) for n in NOISES for s in SCALES}
    lines = [json.dumps(line) for line in summary(found)]
    (folder / "router_noise.jsonl").write_text("\n".join(lines) + "\n")
    return found, after_updates(SEEDS)


FIGURE = parts.Figure(
    (lambda data: table(data[0]), lambda data: moved_table(data[1]), lambda data: cells(data[0])),
    {"router_noise": parts.Picture((16, 4), list(map(panel_of, BIASED)), sharey=True)}, read,
)
