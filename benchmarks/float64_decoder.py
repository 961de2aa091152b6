"""A decoder of one sequence in float64 numpy, with 8-bit products and 8-bit keys and values."""

import numpy as np


def codes(x, axis):
    """(whole numbers from -127 to 127, scale) of x, whose largest magnitude along the axis is 127;
    np.round is half to even."""
    scale = np.abs(x).max(axis=axis, keepdims=True) / 127
    return np.round(x / scale), scale


def restored(x, axis):
    q, scale = codes(x, axis)
    return q * scale


def in_float8(x, axis):
    """x in float8 e4m3, whose largest is 448, with a scale along the axis: four bits of each number, of
    those below 2^-6 what is left of them, half to even."""
    scale = np.abs(x).max(axis=axis, keepdims=True) / 448
    _, exponent = np.frexp(x / scale)  # of numbers from 0.5 to 1
    step = 2.0 ** (np.maximum(exponent - 1, -6) - 3)
    return np.round(x / scale / step) * step * scale


KEPT = {"int8": restored, "float8": in_float8}


def logits(params, config, tokens, *, is_w8a8=False, kv=None):
    """[T,V] of tokens [T] at positions 0, 1, ..., with keys and values as they are, or in one of
    KEPT."""
    params = {
        name: x if name == "layers" else np.asarray(x, np.float64) for name, x in params.items()
    }
    half, heads, kv_heads = config.head_dim // 2, config.num_heads, config.num_kv_heads
    angle = np.outer(np.arange(len(tokens)), config.rope.theta ** (-np.arange(half) / half))
    turn = np.exp(1j * angle)[:, None]

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale

    def dot(x, w):
        return restored(x, -1) @ restored(w, 0) if is_w8a8 else x @ w

    def rotate(x):
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    x = params["embed"][np.asarray(tokens)]
    for i in range(config.num_layers):
        layer = {name: np.asarray(w[i], np.float64) for name, w in params["layers"].items()}
        h = norm(x, layer["attn_norm"])
        bias = lambda n, layer=layer: layer[f"{n}_bias"] if config.qkv_bias else 0.0
        q, k, v = (
            (dot(h, layer[n]) + bias(n)).reshape(len(tokens), -1, config.head_dim) for n in "qkv"
        )
        if config.qk_norm:
            q, k = norm(q, layer["q_norm"]), norm(k, layer["k_norm"])
        q, k = rotate(q), rotate(k)
        if kv:
            k, v = KEPT[kv](k, -1), KEPT[kv](v, -1)
        out = np.zeros_like(q)
        for t, head in np.ndindex(len(tokens), heads):
            shared = head * kv_heads // heads
            scores = k[: t + 1, shared] @ q[t, head] / np.sqrt(config.head_dim)
            p = np.exp(scores - scores.max())
            out[t, head] = p @ v[: t + 1, shared] / p.sum()
        x = x + dot(out.reshape(len(tokens), -1), layer["o"])
        h = norm(x, layer["mlp_norm"])
        gate = dot(h, layer["gate"])
        x = x + dot(gate / (1 + np.exp(-gate)) * dot(h, layer["up"]), layer["down"])
    head = params["embed"].T if config.tie_embeddings else params["head"]
    return norm(x, params["final_norm"]) @ head
