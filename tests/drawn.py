"""What a sampler should draw from, in float64, and Pearson's test of what it drew."""

import jax.numpy as jnp
import numpy as np

from jaxrl_tis.engine import sampling


def penalised(logits_v, params, prompt=(), drawn=()):
    """Logits [V] in float64 after the penalties and the bias, token by token."""
    out = np.array(logits_v, np.float64)
    for token in {*prompt, *drawn}:
        factor = params.repetition_penalty
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in set(drawn):
        times = list(drawn).count(token)
        out[token] -= params.presence_penalty + params.frequency_penalty * times
    for token, bias in params.logit_bias:
        out[token] += bias
    return out


def reference(logits_v, params):
    """Probabilities [V] in float64: temperature, then top-k, top-p, min-p, each renormalised."""
    logits_v = np.asarray(logits_v, np.float64)
    ranked = sorted(range(len(logits_v)), key=lambda i: (-logits_v[i], i))
    if params.temperature == 0:
        return np.eye(len(logits_v))[ranked[0]]
    weight = np.exp((logits_v - logits_v.max()) / params.temperature)
    if params.top_k:
        ranked = ranked[: params.top_k]
    total, mass, kept = weight[ranked].sum(), 0.0, []
    for i in ranked:
        if params.top_p < 1 and mass >= params.top_p:
            break
        kept.append(i)
        mass += weight[i] / total
    kept = [i for i in kept if weight[i] >= params.min_p * weight[ranked[0]]]
    out = np.zeros(len(logits_v))
    out[kept] = weight[kept] / weight[kept].sum()
    return out


ROWS = 64


def logits(v):
    """[ROWS,v] float32, impossible tokens and ties among them."""
    rng = np.random.default_rng(v)
    out = rng.normal(0, 2, (ROWS, v)).astype(np.float32)
    out[8:16, ::3] = -np.inf
    out[16:24] = np.round(out[16:24])
    out[24:32] = 1.0
    out[32:40, : v // 2] = -np.inf  # all in the second half
    return out


def keys(count, seed=0, request=0):
    """[count,2] keys; a scalar is repeated."""
    column = lambda x: jnp.asarray(np.broadcast_to(np.asarray(x, np.uint32), (count,)))
    return sampling.row_keys(column(seed), column(request))


EDGE = 1 - 2.0**-23  # the largest number that jax.random.uniform gives


def short_cumsum(x, axis, cumsum=jnp.cumsum):
    """Rounded down but for its last entry, as a sum in the order of a tree may be."""
    is_end = jnp.arange(x.shape[-1]) == x.shape[-1] - 1
    scale = jnp.where(is_end, 1.0, 1 - 1e-6)
    return cumsum(x, axis=axis) * scale.reshape((1,) * (x.ndim - 1) + (-1,))


def is_drawn_from(tokens, p):
    """Pearson's statistic has mean df and variance 2 df; cells below 5 expected are pooled."""
    observed = np.bincount(tokens, minlength=len(p)).astype(float)
    assert len(observed) == len(p)
    if observed[p == 0].any():
        return False
    expected = p * len(tokens)
    rare = (expected < 5) & (p > 0)
    cells = [*zip(observed[expected >= 5], expected[expected >= 5], strict=True)]
    if rare.any() and expected[rare].sum() >= 5:
        cells.append((observed[rare].sum(), expected[rare].sum()))
    df = len(cells) - 1
    assert df >= 1
    return sum((o - e) ** 2 / e for o, e in cells) < df + 4 * np.sqrt(2 * df)


def assert_chi_square(tokens, p):
    assert is_drawn_from(tokens, p)
