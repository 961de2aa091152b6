"""Tests at equal token KL whether the gradient bias of token weights grows as T K delta (docs/open_problems.md, 3).

The policy is that of `expert_policy`, with responses of up to 96 tokens, which are sampled. K is the number of
experts, of which two are active, and delta the share of experts that a token gains or loses in the sampler.
The sampler has noise on its routers, which flips experts, on its head, which flips none, or on both; the noise is
scaled until the token KL is KL. The reward is the share of tokens that repeat the previous one.

From one response of the sampler, with r_u the reward of token u, rho_t the ratio of token t and W_u the product of
rho_1 ... rho_u, unbiased estimates of the token-weighted step and of the gradient are

    sum_t rho_t (sum_{u>=t} r_u) grad log pi(y_t),    sum_t (sum_{u>=t} W_u r_u) grad log pi(y_t).

Earlier rewards and a baseline change neither expectation. The bias is the mean difference over the same responses.

log bias = c + a log T + b log(K delta) is fitted to root mean squares over seeds, divided by the root of the KL
over its target. The law holds where the 95 % intervals of a and b, of a bootstrap over seeds, contain 1. It is
sublinear where that of b lies below 1. The KL alone predicts the bias where the interval of router noise over head
noise contains 1.
"""

import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import expert_policy, parts, sampled_policy
from experiments.expert_policy import Size
from experiments.sampled_policy import of_tokens, sampled, scored
from experiments.router_noise import RESAMPLES
from jaxrl_tis.models.config import MoeConfig
from jaxrl_tis.report.plots import palette

LENGTHS = (4, 24, 96)  # T
EXPERTS = (4, 8, 16)  # K, two of them active
KL = 0.003  # of the policy to the sampler, nats per token
# Share of the routers in the noise: sine of the angle between head and routers, both scaled to KL alone.
ROUTERS = (0.0, 0.25, 0.7, 1.0)
SEEDS = range(4)
CHUNK = 512
CHUNKS = {4: 32, 24: 8, 96: 8}  # of responses, by T
TRIED = 128  # responses of the policy, of which the KL is measured
ROUNDS = 8  # of scaling


def size_of(experts: int, length: int) -> Size:
    """Returns the policy's shape."""
    return Size(MoeConfig(num_experts=experts, top_k=2, expert_dim=8), horizon=length)


def rewards(tokens_nt: jax.Array) -> jax.Array:
    """Returns the reward [N,T] of each token: their sum is the share of tokens that repeat the previous one."""
    repeats_nt = (tokens_nt[:, 1:] == tokens_nt[:, :-1]) / (tokens_nt.shape[1] - 1)
    return jnp.pad(repeats_nt, ((0, 0), (1, 0)))


def coefficients(log_ratio_nt: jax.Array, reward_nt: jax.Array) -> jax.Array:
    """Returns the factors [2,N,T] of grad log pi of each token: of the bias of token weights, and of the gradient.

    Args:
      reward_nt: reward of each token, less a baseline of its place.
    """
    to_go = lambda x_nt: jnp.cumsum(x_nt[:, ::-1], axis=1)[:, ::-1]
    whole_nt = jnp.exp(jnp.cumsum(log_ratio_nt, axis=1))
    true_nt = to_go(whole_nt * reward_nt)
    return jnp.stack([jnp.exp(log_ratio_nt) * to_go(reward_nt) - true_nt, true_nt])


@functools.partial(jax.jit, static_argnames="size")
def pilot(params, size: Size, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns responses of the policy and the mean reward of each place."""
    tokens_nt, *_ = sampled(params, size, key, TRIED)
    return tokens_nt, rewards(tokens_nt).mean(axis=0)


@functools.partial(jax.jit, static_argnames="size")
def divergence(params, sampler, size: Size, tokens_nt: jax.Array) -> jax.Array:
    """Returns the KL of the policy to the sampler in nats per token, over responses of the policy."""
    logp_ntv, behav_ntv = (scored(p, size, tokens_nt)[0] for p in (params, sampler))
    return jnp.mean(jnp.sum(jnp.exp(logp_ntv) * (logp_ntv - behav_ntv), axis=-1))


@functools.partial(jax.jit, static_argnames="size")
def chunk(params, sampler, size: Size, key: jax.Array, baseline_t: jax.Array) -> dict[str, jax.Array]:
    """Returns measures of CHUNK responses: the mean vectors "bias" and "true", the flipped experts of a token and
    layer, and k3 in nats per token."""
    tokens_nt, behav_nt, behav_ids = sampled(sampler, size, key, CHUNK)

    def logp(params):
        logp_ntv, ids = scored(params, size, tokens_nt)
        return of_tokens(logp_ntv, tokens_nt), ids

    logp_nt, pull, ids = jax.vjp(logp, params, has_aux=True)
    log_ratio_nt = logp_nt - behav_nt
    factors = coefficients(log_ratio_nt, rewards(tokens_nt) - baseline_t[None]) / CHUNK
    flat = lambda tree: jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
    bias, true = (flat(pull(factor_nt)) for factor_nt in factors)
    shared = jnp.sum(ids[..., None] == behav_ids[..., None, :], axis=(-1, -2))
    ratio_nt = jnp.exp(log_ratio_nt)
    return {
        "bias": bias, "true": true, "flips": 2.0 * jnp.mean(size.moe.top_k - shared),
        "k3": jnp.mean(ratio_nt - 1 - log_ratio_nt),
    }


def scaled(params, size: Size, change: Mapping[str, Any], tokens_nt: jax.Array) -> tuple[float, float]:
    """Returns the factor of a change of the weights at which the KL is closest to KL, of ROUNDS, and the KL there."""
    factor, found = 0.1, []
    for _ in range(ROUNDS):
        kl = float(divergence(params, changed(params, change, factor), size, tokens_nt))
        found.append((abs(np.log(max(kl, 1e-12) / KL)), factor, kl))
        factor *= float(np.clip(KL / max(kl, 1e-12), 0.01, 100.0)) ** 0.4
    return min(found)[1:]


def changed(params, change: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Returns the weights plus `factor` times the change."""
    return params | {name: params[name] + factor * x for name, x in change.items()}


def measured(experts: int, length: int, seed: int) -> list[dict[str, Any]]:
    """Returns the lines of one policy: of each share of the routers in the noise."""
    size, key = size_of(experts, length), jax.random.key(seed)
    params = jax.tree.map(jnp.float32, expert_policy.random_params(size, seed))
    tokens_nt, baseline_t = pilot(params, size, jax.random.fold_in(key, 1))
    rng = np.random.default_rng((seed, 2))
    head = {"head": jnp.float32(rng.normal(size=params["head"].shape) * params["head"].std())}
    router = {"router": jnp.float32(expert_policy.noise_pattern(size, seed))}
    alone = [scaled(params, size, change, tokens_nt)[0] for change in (head, router)]
    lines = []
    for share in ROUTERS:
        change = {
            "head": (1 - share**2) ** 0.5 * alone[0] * head["head"], "router": share * alone[1] * router["router"],
        }
        factor, kl = scaled(params, size, change, tokens_nt)
        sampler = changed(params, change, factor)
        keys = jax.random.split(jax.random.fold_in(key, 3), CHUNKS[length])
        found = [jax.device_get(chunk(params, sampler, size, k, baseline_t)) for k in keys]
        lines.append({"T": length, "K": experts, "seed": seed, "routers": share, "kl": kl} | summary(found))
    return lines


def summary(found: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Returns the squared norms of the means "bias" and "true" of chunks, and the means of the other measures."""
    squares = {name: sampled_policy.square(np.array([np.float64(x[name]) for x in found])) for name in ("bias", "true")}
    return squares | {name: float(np.mean([x[name] for x in found])) for name in ("flips", "k3")}


def table_of(lines: Sequence[Mapping[str, float]], name: str) -> np.ndarray:
    """Returns a measure [seed, T, K, share of the routers]."""
    seeds = sorted({line["seed"] for line in lines})
    cells = {(x["seed"], x["T"], x["K"], x["routers"]): x[name] for x in lines}
    return np.array([[[[cells[s, t, k, r] for r in ROUTERS] for k in EXPERTS] for t in LENGTHS] for s in seeds])


def exponents(lines: Sequence[Mapping[str, float]], is_relative: bool) -> dict[str, parts.Interval]:
    """Fits log bias = c + a log T + b log(K delta) to the root mean squares over seeds, where routers have noise;
    "T" and "K delta" are a and b with 95 % intervals of a bootstrap over seeds. "K" and "delta" are of a second fit
    with both apart, "routers / head" is the bias of router noise alone in units of that of head noise. Squares are
    divided by KL over its target. A cell is left out whose mean square is not positive, or without a flip.

    Args:
      is_relative: of the bias in units of the norm of the gradient.
    """
    bias, true, flips, kl = (table_of(lines, name) for name in ("bias", "true", "flips", "kl"))
    bias = bias / (kl / KL)
    seeds, rng = len(bias), np.random.default_rng(0)
    draws = np.stack([np.arange(seeds), *rng.integers(seeds, size=(RESAMPLES, seeds))])
    square = bias[draws].mean(axis=1)
    if is_relative:
        square = square / true[draws].mean(axis=(1, 4))[..., None]
    with np.errstate(invalid="ignore", divide="ignore"):
        log_bias = np.log(square) / 2
        log_flips = np.log(flips[draws].mean(axis=1)[..., 1:])
    log_t, log_k = (
        np.broadcast_to(np.log(x), log_flips.shape[1:]).ravel()
        for x in (np.array(LENGTHS)[:, None, None], np.array(EXPERTS)[None, :, None])
    )
    fits = {"T": [], "K delta": [], "K": [], "delta": []}
    for values, flip in zip(log_bias[..., 1:], log_flips, strict=True):
        y, x = values.ravel(), flip.ravel()
        own = np.column_stack([np.ones_like(x), log_t, x]), np.column_stack([np.ones_like(x), log_t, log_k, x - log_k])
        has = np.isfinite(y) & np.isfinite(x)
        together, apart = (np.linalg.lstsq(d[has], y[has], rcond=None)[0] for d in own)
        for name, value in zip(fits, (together[1], together[2], apart[2], apart[3]), strict=True):
            fits[name].append(value)
    fits["routers / head"] = np.exp(np.nanmean(log_bias[..., -1] - log_bias[..., 0], axis=(1, 2)))
    return {name: parts.bootstrap(np.array(values)) for name, values in fits.items()}


def verdict(law: Mapping[str, parts.Interval]) -> str:
    """Returns the answers of the rule of docs/open_problems.md."""
    contains = lambda name: law[name][1] <= 1.0 <= law[name][2]
    holds = "yes" if contains("T") and contains("K delta") else "no"
    growth = "sublinear" if law["K delta"][2] < 1 else "superlinear" if law["K delta"][1] > 1 else "not decided"
    alone = "the KL alone predicts it" if contains("routers / head") else "the KL alone does not"
    a, b, ratio = (parts.interval(law[name], ".2f") for name in ("T", "K delta", "routers / head"))
    return f"T K delta: {holds}. T^{a}, (K delta)^{b} ({growth}), routers / head {ratio} ({alone})"


def table(lines: Sequence[Mapping[str, float]]) -> str:
    """Returns Markdown: the verdicts, the exponents, and the means of all cells."""
    laws = {"norm of the bias": exponents(lines, False), "in units of the gradient": exponents(lines, True)}
    blocks = [f"{name}: {verdict(law)}." for name, law in laws.items()]
    names = list(laws["norm of the bias"])
    cells = [[of, *(parts.interval(law[name], ".2f") for name in names)] for of, law in laws.items()]
    blocks.append(parts.rows(["exponents", *names], cells))
    bias, true, flips, kl, k3 = (table_of(lines, name).mean(axis=0) for name in ("bias", "true", "flips", "kl", "k3"))
    cells = []
    for i, length in enumerate(LENGTHS):
        for j, experts in enumerate(EXPERTS):
            for n, share in enumerate(ROUTERS):
                at = i, j, n
                norm = np.sqrt(max(bias[at], 0.0))
                cells.append([
                    str(length), str(experts), f"{share:g}", f"{kl[at]:.4f}", f"{k3[at]:.4f}", f"{flips[at]:.3f}",
                    f"{norm:.4f}", f"{norm / np.sqrt(true[i, j].mean()):.3f}",
                ])
    header = ["T", "K", "routers", "KL", "k3", "K delta", "bias", "bias / gradient"]
    return "\n\n".join([*blocks, parts.rows(header, cells)])


def panel_of(length: int) -> parts.Panel:
    """Makes a panel of the bias against K delta, by K."""

    def panel(axes, lines):
        bias, flips = (table_of(lines, name).mean(axis=0)[LENGTHS.index(length)] for name in ("bias", "flips"))
        for experts, color, y, x in zip(EXPERTS, palette(len(EXPERTS)), bias, flips, strict=True):
            norm = np.sqrt(np.maximum(y, 0.0))
            axes.plot(x[1:], norm[1:], "o-", color=color, label=f"K = {experts}")
            axes.axhline(norm[0], color=color, linestyle=":", linewidth=0.8)
        axes.set(title=f"T = {length}", xlabel="K delta, flips a token and layer", xscale="log", yscale="log")
        axes.legend()
        if length == LENGTHS[0]:
            axes.set_ylabel("norm of the bias; dotted: head noise")

    return panel


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Computes the lines that routing_penalty.jsonl does not have yet, and returns all."""
    path = folder / "routing_penalty.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    done = {(line["T"], line["K"], line["seed"]) for line in lines}
    for length in LENGTHS:
        for experts in EXPERTS:
            for seed in SEEDS:
                if (length, experts, seed) not in done:
                    new = measured(experts, length, seed)
                    with path.open("a") as file:
                        file.writelines(json.dumps(line) + "\n" for line in new)
                    lines += new
    return lines


FIGURE = parts.Figure(
    (table,), {"routing_penalty": parts.Picture((12, 4), list(map(panel_of, LENGTHS)), sharey=True)}, read,
)
