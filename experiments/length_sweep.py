"""Compares importance weights by progress on a trained policy, for 64 to 1,024 tokens (docs/open_problems.md, 1).

The policy is a decoder of two layers with uniform attention, see `sampled_policy`, and has learned by policy
gradients to count: a token is right that follows the previous one, modulo the vocabulary. The sampler has its
weights of LAG updates before. One pair of weights serves all lengths. A step is (R - b) sum_t w_t grad log pi(y_t)
with b the sampler's mean reward. The gradient is of responses of the policy itself.

A case is a reward, a batch and a length. It is decided where log10 of P of the best pure weight
(`frontier.EXTREMES`) and of the best other one, means over seeds, differ by more than the interval of their
difference, a jackknife over GROUPS of chunks. The conjecture fails if a pure weight is ahead in the cases of LONG
tokens and more.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import expert_policy, frontier, parts
from experiments.expert_policy import Size
from experiments.sampled_policy import of_tokens, sampled, scored
from jaxrl_tis.models.config import MoeConfig
from jaxrl_tis.report.plots import palette

LENGTHS = (64, 128, 256, 512, 1024)
LONG = 200  # tokens of the conjecture
SEEDS = range(2)
# Training, at the shortest length.
STEPS, LAG, RESPONSES, RATE = 100, 8, 128, 1e-3
CHUNK = 64  # responses of a gradient
CHUNKS = {64: 64, 128: 64, 256: 32, 512: 32, 1024: 16}  # of the sampler, by T
ORACLE = 4  # times as many chunks of the policy
PILOT = 512  # responses of the sampler, whose mean reward is the baseline
BATCHES = (256, 4096)  # responses of a step
GROUPS = 8  # of chunks, each left out once
T_95 = 2.365  # two-sided 95 % quantile of Student's t with 7 degrees of freedom

WEIGHTS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "none": lambda log_ratio_nt, adv_n: np.ones_like(log_ratio_nt),
    "token": lambda log_ratio_nt, adv_n: np.exp(log_ratio_nt),
    "token_tis": lambda log_ratio_nt, adv_n: np.exp(np.minimum(log_ratio_nt, math.log(2.0))),
    "prefix": lambda log_ratio_nt, adv_n: np.exp(np.cumsum(log_ratio_nt, axis=1)),
    "seq": lambda log_ratio_nt, adv_n: np.exp(log_ratio_nt.sum(axis=1, keepdims=True)),
    **frontier.SAMPLED,
}
REWARDS = ("share", "success")  # of right tokens; whether this share is at least the sampler's median


def size_of(length: int) -> Size:
    """Returns the policy's shape. Both of two experts are active: a gated MLP of twice the width."""
    return Size(MoeConfig(num_experts=2, top_k=2, expert_dim=16), vocab=8, horizon=length)


def right(tokens_nt: Any, vocab: int) -> jax.Array:
    """Returns for each token after the first whether it follows the previous one, [N,T-1]."""
    return tokens_nt[:, 1:] == (tokens_nt[:, :-1] + 1) % vocab


def trained(seed: int) -> tuple[Any, Any]:
    """Trains a policy; returns its weights and those of the sampler."""
    size, key = size_of(min(LENGTHS)), jax.random.key(seed)
    params = jax.tree.map(jnp.float32, expert_policy.random_params(size, seed))
    params["position"] = jnp.zeros((max(LENGTHS), size.embed_dim))
    optimizer = optax.adam(RATE)

    @jax.jit
    def update(params, state, key):
        tokens_nt, *_ = sampled(params, size, key, RESPONSES)
        reward_nt = jnp.pad(right(tokens_nt, size.vocab), ((0, 0), (1, 0))) - 0.0
        reward_nt = (reward_nt - reward_nt.mean(axis=0, keepdims=True)) / size.horizon
        adv_nt = jnp.cumsum(reward_nt[:, ::-1], axis=1)[:, ::-1]

        def loss(params):
            logp_ntv, _ = scored(params, size, tokens_nt)
            return -jnp.mean(jnp.sum(of_tokens(logp_ntv, tokens_nt) * adv_nt, axis=1))

        gradient = jax.grad(loss)(params) | {"position": jnp.zeros_like(params["position"])}
        change, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, change), state

    state, kept = optimizer.init(params), []
    for step in range(STEPS):
        params, state = update(params, state, jax.random.fold_in(key, step))
        kept = [*kept, params][-LAG - 1 :]
    return kept[-1], kept[0]


def reward_of(tokens_nt: np.ndarray, size: Size, least: float) -> dict[str, np.ndarray]:
    """Returns the rewards [N] of responses, all between 0 and 1. least: share of right tokens of a success."""
    share_n = np.asarray(right(tokens_nt, size.vocab)).mean(axis=1)
    return {"share": share_n, "success": (share_n >= least).astype(float)}


@functools.partial(jax.jit, static_argnames=("size", "count"))
def drawn(params, sampler, size: Size, key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns sampled responses [N,T], and the log-ratio [N,T] of the policy to the sampler."""
    tokens_nt, behav_nt, _ = sampled(sampler, size, key, count)
    return tokens_nt, of_tokens(scored(params, size, tokens_nt)[0], tokens_nt) - behav_nt


@functools.partial(jax.jit, static_argnames="size")
def gradients(params, size: Size, tokens_nt: jax.Array, factor_mnt: jax.Array) -> jax.Array:
    """Returns the mean over responses of sum_t factor_t grad log pi(y_t), for each set of factors, [M,D]."""
    logp = lambda params: of_tokens(scored(params, size, tokens_nt)[0], tokens_nt)
    pull = jax.vjp(logp, params)[1]

    def of_set(factor_nt):
        [gradient] = pull(factor_nt / len(tokens_nt))
        return jnp.concatenate([x.ravel() for name, x in sorted(gradient.items()) if name != "position"])

    return jax.vmap(of_set)(factor_mnt)


@dataclasses.dataclass(frozen=True)
class Gram:
    """Inner products of the gradients of C chunks of the sampler and O chunks of the policy."""

    own: np.ndarray  # [C,C]
    cross: np.ndarray  # [C,O]
    true: np.ndarray  # [O,O]

    def without(self, group: int) -> "Gram":
        """Returns the products without the chunks of one of GROUPS."""
        kept = [np.arange(count) % GROUPS != group for count in self.cross.shape]
        return Gram(self.own[kept[0]][:, kept[0]], self.cross[kept[0]][:, kept[1]], self.true[kept[1]][:, kept[1]])

    def measures(self) -> dict[str, float]:
        """Returns unbiased estimates: "true2" and "own2", the squared norms of the gradient and of the expected step,
        "dot", their inner product, "bias2", the squared norm of their difference, and "variance", the summed
        variance of the step of one response."""
        pairs = lambda x: (x.sum() - np.trace(x)) / (len(x) * (len(x) - 1))
        true2, own2, dot = pairs(self.true), pairs(self.own), self.cross.mean()
        variance = CHUNK * (np.trace(self.own) / len(self.own) - own2)
        return {
            "true2": true2, "own2": own2, "dot": dot, "bias2": own2 - 2 * dot + true2, "variance": variance,
        }


def progress(found: Mapping[str, float], batch: int) -> float:
    """Returns log10 of P for a mean over `batch` responses; -inf for a step against the gradient."""
    if found["dot"] <= 0:
        return -math.inf
    return math.log10(found["dot"] ** 2 / (found["variance"] / batch + max(found["bias2"], 0.0)))


def line_of(gram: Gram) -> dict[str, Any]:
    """Returns the measures, and "P BATCH", log10 of P of all chunks followed by those without each group."""
    found = gram.measures()
    groups = [found, *(gram.without(group).measures() for group in range(GROUPS))]
    rounded = lambda x: float(f"{x:.6g}")
    of_batches = {f"P {batch}": [rounded(progress(x, batch)) for x in groups] for batch in BATCHES}
    return {name: rounded(x) for name, x in found.items()} | of_batches


def measured(params, sampler, length: int, seed: int) -> list[dict[str, Any]]:
    """Returns the lines of one policy and length: of each reward and weight."""
    size, key = size_of(length), jax.random.fold_in(jax.random.key(seed), length)
    fold = lambda *numbers: functools.reduce(jax.random.fold_in, numbers, key)
    tokens_nt, log_ratio_nt = map(np.asarray, drawn(params, sampler, size, fold(0), PILOT))
    least = float(np.median(reward_of(tokens_nt, size, 0.0)["share"]))
    baseline = {name: x.mean() for name, x in reward_of(tokens_nt, size, least).items()}
    own, true, log_w_n, k3 = [], [], [], []
    for i in range(CHUNKS[length]):
        tokens_nt, log_ratio_nt = map(np.asarray, drawn(params, sampler, size, fold(1, i), CHUNK))
        log_ratio_nt = log_ratio_nt.astype(np.float64)
        log_w_n.append(log_ratio_nt.sum(axis=1))
        k3.append(np.mean(np.expm1(log_ratio_nt) - log_ratio_nt))
        factors = []
        for name, reward_n in reward_of(tokens_nt, size, least).items():
            adv_n = reward_n - baseline[name]
            weights = (weight(log_ratio_nt, adv_n) for weight in WEIGHTS.values())
            factors += [np.broadcast_to(w * adv_n[:, None], log_ratio_nt.shape) for w in weights]
        own.append(np.asarray(gradients(params, size, tokens_nt, jnp.float32(np.stack(factors)))))
    for i in range(ORACLE * CHUNKS[length]):
        tokens_nt, _ = drawn(params, params, size, fold(2, i), CHUNK)
        adv_rn = np.stack([x - baseline[name] for name, x in reward_of(tokens_nt, size, least).items()])
        factor_rnt = np.broadcast_to(adv_rn[..., None], (*adv_rn.shape, length))
        true.append(np.asarray(gradients(params, size, tokens_nt, jnp.float32(factor_rnt))))
    w_n = np.exp(np.concatenate(log_w_n))
    ess = w_n.sum() ** 2 / np.sum(w_n**2) / len(w_n)
    values = {"k3": np.mean(k3), "ess": ess, "share right": baseline["share"]}
    shared = {name: float(f"{x:.6g}") for name, x in values.items()}
    own_cmd = np.stack(own).astype(np.float64).reshape(len(own), len(REWARDS), len(WEIGHTS), -1)
    true_ord, lines = np.stack(true).astype(np.float64), []
    for r, reward in enumerate(REWARDS):
        of_true = true_ord[:, r]
        for m, weight in enumerate(WEIGHTS):
            found = own_cmd[:, r, m]
            gram = Gram(found @ found.T, found @ of_true.T, of_true @ of_true.T)
            lines.append({"seed": seed, "T": length, "reward": reward, "weight": weight} | line_of(gram) | shared)
    return lines


def compared(lines: Sequence[Mapping[str, Any]], length: int, reward: str, batch: int) -> dict[str, np.ndarray]:
    """Returns weight -> log10 of P, [seeds, 1 + GROUPS]."""
    own = [x for x in lines if (x["T"], x["reward"]) == (length, reward)]
    return {weight: np.array([x[f"P {batch}"] for x in own if x["weight"] == weight]) for weight in WEIGHTS}


def difference(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Returns the mean over seeds of the difference of log10 P, and half of its 95 % interval from the sampling of
    responses, a jackknife over GROUPS."""
    apart = one - other
    variance = (GROUPS - 1) * apart[:, 1:].var(axis=1)
    return float(apart[:, 0].mean()), float(T_95 * np.sqrt(variance.sum()) / len(apart))


def verdict(found: Mapping[str, np.ndarray]) -> tuple[str, str, str]:
    """Returns (answer, best pure weight, best intermediate weight): "extreme" or "intermediate" where the interval of
    their difference excludes 0, else "open". No weight does not compete."""
    best = lambda is_extreme: max(
        (w for w in found if w != "none" and (w in frontier.EXTREMES) == is_extreme),
        key=lambda w: found[w][:, 0].mean(),
    )
    extreme, middle = best(True), best(False)
    gap, half = difference(found[middle], found[extreme])
    return "open" if not abs(gap) > half else "intermediate" if gap > 0 else "extreme", extreme, middle


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns Markdown: the verdict, the winners, and the measures of all weights."""
    cells, answers, seeds = [], {}, sorted({x["seed"] for x in lines})
    for reward in REWARDS:
        for batch in BATCHES:
            for length in LENGTHS:
                found = compared(lines, length, reward, batch)
                answer, extreme, middle = verdict(found)
                answers[reward, batch, length] = answer
                gap, half = difference(found[middle], found[extreme])
                log_p = lambda w, found=found: f"{found[w][:, 0].mean():.2f}"
                shown = [f"{extreme} {log_p(extreme)}", f"{middle} {log_p(middle)}", f"{gap:+.3f} ± {half:.3f}"]
                cells.append([reward, str(batch), str(length), answer, *shown, log_p("none")])
    long = [answer for (*_, length), answer in answers.items() if length >= LONG]
    counts = ", ".join(f"{name} {long.count(name)}" for name in ("intermediate", "extreme", "open"))
    header = [
        "reward", "responses", "T", "largest P", "pure: log10 P", "intermediate: log10 P", "difference", "no weight",
    ]
    blocks = [f"T >= {LONG}, {len(long)} cases: {counts}.", parts.rows(header, cells)]
    header = ["reward", "T", "weight", "bias / gradient", "log10 variance / gradient^2", "k3", "sequence ESS"]
    cells = []
    for reward in REWARDS:
        for length in LENGTHS:
            for weight in WEIGHTS:
                own = [x for x in lines if (x["T"], x["reward"], x["weight"]) == (length, reward, weight)]
                true2 = np.array([x["true2"] for x in own])
                mean = lambda name, own=own: np.array([x[name] for x in own])
                bias = np.sqrt(np.maximum(mean("bias2") / true2, 0.0))
                cells.append([
                    reward, str(length), weight, ", ".join(f"{x:.2f}" for x in bias),
                    ", ".join(f"{x:.2f}" for x in np.log10(mean("variance") / true2)),
                    f"{mean('k3').mean():.4f}", f"{mean('ess').mean():.3f}",
                ])
    caption = f"A value for each of the seeds {', '.join(map(str, seeds))}:"
    return "\n\n".join([*blocks, caption, parts.rows(header, cells)])


def panel_of(reward: str, batch: int) -> parts.Panel:
    """Makes a panel of log10 P by length."""

    def panel(axes, lines):
        found = [compared(lines, length, reward, batch) for length in LENGTHS]
        for weight, color in zip(WEIGHTS, palette(len(WEIGHTS)), strict=True):
            style = "-" if weight in frontier.EXTREMES else ":" if weight == "none" else "--"
            axes.plot(LENGTHS, [x[weight][:, 0].mean() for x in found], style, color=color, label=weight)
        axes.set(title=f"{reward}, {batch} responses", xlabel="T", ylabel="log10 of P", xscale="log")
        axes.set_xticks(LENGTHS, map(str, LENGTHS))
        axes.minorticks_off()

    return panel


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Computes the lines that length_sweep.jsonl does not have yet, and returns all."""
    path = folder / "length_sweep.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    done = {(line["seed"], line["T"]) for line in lines}
    for seed in SEEDS:
        if all((seed, length) in done for length in LENGTHS):
            continue
        params, sampler = trained(seed)
        for length in LENGTHS:
            if (seed, length) not in done:
                new = measured(params, sampler, length, seed)
                with path.open("a") as file:
                    file.writelines(json.dumps(line) + "\n" for line in new)
                lines += new
    return lines


FIGURE = parts.Figure(
    (table,),
    {"length_sweep": parts.Picture(
        (14, 4), [panel_of(r, b) for r in REWARDS for b in BATCHES], has_legend_below=True,
    )},
    read,
)
