"""Tests on a small trained model whether the gradient bias of routing noise grows as K x delta.

The model of configs/fig_routing.py with K = 1, 2, 4 of its 8 experts, after the supervised steps.
The sampler is float32 and has noise on its routers, `engine.injected = "router(scale=delta)"`, so
nothing else makes a gap. The gradient of the expected reward is estimated from the sampler's answers
with the weight of the whole sequence, which leaves no bias. A method's bias is the mean difference to
it over the same answers. Squared norms are products of the estimates of two halves of the prompts, so
that the noise of one estimate adds nothing to their mean.
"""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs import fig_routing
from jaxrl_tis.build import Setup, build
from jaxrl_tis.engine.records import Trajectory
from experiments import parts, router_noise
from jaxrl_tis.gate import report
from jaxrl_tis.learner import scoring
from jaxrl_tis.learner.batch_layout import Rows
from jaxrl_tis.learner.probe import own_routes, route_metrics

ACTIVE = (1, 2, 4)  # K
DELTAS = (0.03, 0.1, 0.3, 1.0)
SEEDS, NOISE_SEEDS = range(3), range(2)
PROMPTS = 1024  # each with a group of answers
CAP = 2.0  # of token TIS
METHODS = ("no weight", "token TIS")


def setup_of(active: int, seed: int, delta: float = 0.0, noise_seed: int = 0) -> Setup:
    """Returns the run of K active experts whose sampler has this noise on its routers."""
    c = fig_routing.get_config()
    c.seed, c.model.experts_per_token = seed, active
    c.engine.quantization, c.rollout.prompts = "none", PROMPTS
    if delta:
        c.engine.injected = f"router(scale={delta}, seed={noise_seed})"
    return build(c.lock())


def rewarded(setup: Setup, trajectory: Trajectory) -> float:
    """Returns 1 if the answer to a sum "a+b=" is right, else 0."""
    text = setup.tokenizer.decode(trajectory.prompt)
    total = sum(map(int, text.removesuffix("=").split("+")))
    return float(setup.tokenizer.decode(trajectory.tokens) == str(total))


def coefficients(ratio_nt: np.ndarray, advantage_n: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the factors [N,T] of each token's log-prob gradient: of the true gradient ("true"), and
    of each method's difference to it.

    Args:
      ratio_nt: policy over sampler, of each token of an answer; 1 elsewhere.
    """
    whole_n1 = np.prod(ratio_nt, axis=1, keepdims=True)
    weights = {"no weight": np.ones_like(ratio_nt), "token TIS": np.minimum(ratio_nt, CAP)}
    scaled = lambda weight_nt: weight_nt * advantage_n[:, None]
    differences = {name: scaled(weights[name] - whole_n1) for name in METHODS}
    return {"true": scaled(whole_n1 * np.ones_like(ratio_nt))} | differences


def make_gradient(setup: Setup) -> Callable[[Any, Rows, np.ndarray], Any]:
    """Makes (params, rows, factors [N,T]) -> the mean over sequences of sum_t factor_t grad log pi_t."""
    learner, size = setup.training.learner, setup.config.train.microbatch_rows

    def objective(params, batch, factor_rt):
        return jnp.sum(scoring.response_logprobs(params, learner, batch) * factor_rt)

    @jax.jit
    def total(params, micro, factor_mrt):
        add = lambda sums, part: (
            jax.tree.map(jnp.add, sums, jax.grad(objective)(params, *part)), None
        )
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(add, zeros, (micro, factor_mrt))[0]

    def gradient(params, rows, factor_nt):
        micro, _ = setup.training.micro_batches(rows)
        mean_nt = jnp.asarray(factor_nt / len(factor_nt), jnp.float32)
        return total(params, micro, mean_nt.reshape(-1, size, factor_nt.shape[1]))

    return gradient


def product(one: Any, other: Any) -> float:
    """Returns the inner product of two gradients."""
    return float(optax.tree.vdot(one, other))


def measured(setup: Setup, params: Any) -> dict[str, float]:
    """Returns measures of one policy and noise pattern: the squared norm of the true gradient and of
    each method's bias, k3 in nats a token, flipped routers and flipped tokens."""
    trajectories = report.sample(setup, params, PROMPTS)
    rows = setup.training.rows(trajectories)
    reward_n = np.array([rewarded(setup, t) for t in trajectories])
    micro, flat = setup.training.micro_batches(rows)
    logp_nt = flat(scoring.make_score(setup.training.learner)(params, micro)["logp"])
    log_ratio_nt = np.where(rows["mask"], logp_nt - rows["logp_behav"], 0.0).astype(np.float64)
    halves = [slice(0, len(trajectories) // 2), slice(len(trajectories) // 2, None)]
    estimates, gradient = {name: [] for name in ("true", *METHODS)}, make_gradient(setup)
    for half in halves:
        part = {name: x[half] for name, x in rows.items()}
        factors = coefficients(np.exp(log_ratio_nt[half]), (reward_n - reward_n.mean())[half])
        for name, factor_nt in factors.items():
            estimates[name].append(gradient(params, part, factor_nt * part["mask"]))
    own = own_routes(setup.training, scoring.make_routing(setup.training.learner), params, rows)
    flips = route_metrics(setup.model.experts, rows | {"logp_old": logp_nt}, *own)
    ratio = log_ratio_nt[rows["mask"]]
    return {name: product(*pair) for name, pair in estimates.items()} | {
        "k3": float(np.mean(np.expm1(ratio) - ratio)),
        "flips": float(flips["mismatch/route_flip_router"]),
        "tokens that flip": float(flips["mismatch/route_flip_token"]),
        "accuracy": float(reward_n.mean()),
    }


def found_of(seeds: Sequence[int], noise_seeds: Sequence[int]) -> dict[str, np.ndarray]:
    """Returns each measure [seed and noise, K, delta]."""
    cells = []
    for seed in seeds:
        params = {active: parts.taught(setup_of(active, seed)) for active in ACTIVE}
        for noise in noise_seeds:
            cells.append([
                [measured(setup_of(k, seed, d, noise), params[k]) for d in DELTAS] for k in ACTIVE
            ])
    names = cells[0][0][0]
    return {n: np.array([[[c[n] for c in row] for row in run] for run in cells]) for n in names}


def exponents(values: np.ndarray, is_square: bool) -> tuple[parts.Interval, ...]:
    """Returns the exponents (a of K, b of delta) with 95 % intervals from a bootstrap over runs.

    a compares the sums over delta up to `router_noise.LARGEST` at the largest K and at K = 1, and b
    the sums over K at the largest and the smallest of these deltas. A sum of estimates that is not
    positive gives an infinite exponent.

    Args:
      values: [run, K, delta]; is_square: of squares, whose exponents are halved.
    """
    small = [i for i, d in enumerate(DELTAS) if d <= router_noise.LARGEST]
    runs, rng = len(values), np.random.default_rng(0)
    draws = np.stack([np.arange(runs), *rng.integers(runs, size=(router_noise.RESAMPLES, runs))])
    mean = values[draws].mean(axis=1)[:, :, small]  # [draw, K, delta]
    of_k, of_delta = mean.sum(axis=2), mean.sum(axis=1)
    spans = (of_k, ACTIVE[-1] / ACTIVE[0]), (of_delta, DELTAS[small[-1]] / DELTAS[small[0]])
    out = []
    for sums, span in spans:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(sums[:, 0] > 0, np.maximum(sums[:, -1], 0) / sums[:, 0], np.inf)
            power = np.log(ratio) / np.log(span) / (2 if is_square else 1)
        out.append(parts.bootstrap(power, "nearest"))
    return tuple(out)


def laws(found: Mapping[str, np.ndarray]) -> dict[str, tuple[parts.Interval, ...]]:
    """Returns `exponents` of the norm of each method's bias, of k3 and of the flips."""
    return {n: exponents(found[n], n in METHODS) for n in (*METHODS, "k3", "flips")}


def relative_bias(found: Mapping[str, np.ndarray], method: str) -> np.ndarray:
    """Returns the norm of the bias [K, delta] in units of the norm of the true gradient. A negative
    estimate of a square counts as 0."""
    square = found[method].mean(axis=0) / found["true"].mean(axis=0)
    return np.sqrt(np.maximum(square, 0.0))


def table(found: Mapping[str, np.ndarray]) -> str:
    """Returns Markdown: the verdict, the exponents, and the means of all cells."""
    law = laws(found)
    blocks = [
        f"Does the bias of {method} grow as K x delta? {router_noise.verdict(law[method])}."
        for method in METHODS
    ]
    lines = [[name, *(parts.interval(x, ".2f") for x in law[name])] for name in law]
    blocks.append(parts.rows(["of", "a (of K)", "b (of delta)"], lines))
    cells = {f"bias, {name}": relative_bias(found, name) for name in METHODS}
    cells |= {n: found[n].mean(axis=0) for n in ("k3", "flips", "tokens that flip", "accuracy")}
    lines = [
        [name, str(k), *(f"{x:.3g}" for x in row)]
        for name, rows in cells.items() for k, row in zip(ACTIVE, rows, strict=True)
    ]
    blocks.append(parts.rows(["mean", "K", *(f"delta {d:g}" for d in DELTAS)], lines))
    return "\n\n".join(blocks)


def read(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Computes and stores the measures."""
    found = found_of(SEEDS, NOISE_SEEDS)
    lines = [json.dumps({name: x.tolist()}) for name, x in found.items()]
    (folder / "router_noise_trained.jsonl").write_text("\n".join(lines) + "\n")
    return found


FIGURE = parts.Figure((table,), read=read)
