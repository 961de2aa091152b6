"""Log-probabilities, their distributions' moments and their gradients in float64, by whole
logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.kernels import logprob
from jaxrl_tis.kernels.head import Head
from jaxrl_tis.kernels.logprob_chunked import ELSEWHERE, Kept

WHOLE = logprob.Cut()


@dataclasses.dataclass
class Case:
    """Random inputs; `weight_vd` is stored transposed for vocab_axis 1."""

    b: int = 3
    n: int = 10
    d: int = 6
    v: int = 50
    vocab_axis: int = 0
    dtype: str = "float32"
    highest: bool = False
    kept_size: int = 0
    num_others: int = 0
    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        cast = lambda x: x.astype(jnp.dtype(self.dtype))
        self.x = cast(rng.normal(0, 1, (self.b, self.n, self.d)))
        self.weight_vd = cast(rng.normal(0, 1, (self.v, self.d)))
        self.targets = rng.integers(0, self.v, (self.b, self.n)).astype(np.int32)
        self.temperature = rng.uniform(0.5, 2, (self.b, self.n)).astype(np.float32)
        self.g_logp, self.g_entropy = rng.normal(0, 1, (2, self.b, self.n)).astype(np.float32)
        self.kept = self._draw_kept(rng) if self.kept_size else None
        self.others, self.g_others = self._draw_others(rng)

    def _draw_kept(self, rng) -> Kept:
        """Each set has its target and others, some twice or left out; a quarter overflow."""
        shape = (self.b, self.n, self.kept_size)
        ids = rng.integers(0, self.v, shape).astype(np.int32)
        ids = np.where(rng.random(shape) < 0.3, -1, ids)
        ids[..., self.kept_size // 2] = self.targets
        return Kept(ids, rng.random(shape[:2]) < 0.25)

    def _draw_others(self, rng) -> tuple[np.ndarray, np.ndarray]:
        """Ids of which a quarter are none, and, where there are kept sets, of one of them."""
        shape = (self.b, self.n, self.num_others)
        ids = rng.integers(0, self.v, shape).astype(np.int32)
        if self.kept is not None:
            ids[:] = self.targets[..., None]
        return (
            np.where(rng.random(shape) < 0.25, -1, ids), rng.normal(0, 1, shape).astype(np.float32)
        )

    @property
    def weight(self) -> np.ndarray:
        return self.weight_vd if self.vocab_axis == 0 else np.ascontiguousarray(self.weight_vd.T)

    def expected(self) -> tuple[list, tuple]:
        """([logp, entropy, collision, others], gradients of x and of weight)."""
        x, w = self.x.astype(np.float64), self.weight_vd.astype(np.float64)
        temperature = self.temperature[..., None].astype(np.float64)
        logits = x @ w.T / temperature
        if self.kept is not None:
            is_kept = (self.kept.ids_bnk[..., None] == np.arange(self.v)).any(axis=2)
            logits = np.where(is_kept | self.kept.overflow_bn[..., None], logits, -np.inf)
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        with np.errstate(divide="ignore"):
            logp = np.where(p > 0, np.log(p), 0)
        entropy = -(p * logp).sum(axis=-1)
        one_hot = np.eye(self.v)[self.targets]
        g_logits = self.g_logp[..., None] * (one_hot - p)
        g_logits -= self.g_entropy[..., None] * p * (logp + entropy[..., None])
        is_other = self.others >= 0
        g_others = np.where(is_other, self.g_others, 0.0)[..., None]
        g_logits += (g_others * (np.eye(self.v)[self.others] - p[:, :, None])).sum(axis=2)
        g_logits /= temperature
        others = np.where(is_other, np.take_along_axis(logp, self.others, axis=-1), 0.0)
        chosen = np.take_along_axis(logp, self.targets[..., None], axis=-1)[..., 0]
        weight_bar = np.einsum("bnv,bnd->vd", g_logits, x)
        return [chosen, entropy, (p**2).sum(axis=-1), others], (
            g_logits @ w, weight_bar if self.vocab_axis == 0 else weight_bar.T
        )

    def run(self, score):
        """(Scores, gradients of x and of weight) of score(head, x, targets, temperature, others,
        kept)."""

        def loss(x, weight):
            head = Head(weight, self.vocab_axis, self.highest)
            found = score(head, x, self.targets, self.temperature, self.others, self.kept)
            value = jnp.sum(found.logp * self.g_logp + found.entropy * self.g_entropy)
            return value + jnp.sum(found.others * self.g_others), found

        step = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
        gradients, found = step(self.x, self.weight)
        return found, gradients

    def check(self, results, tolerance: float = 2e-5) -> None:
        found, gradients = results
        expected_scores, expected_gradients = self.expected()
        for ours, theirs in zip(found, expected_scores, strict=True):
            assert ours.dtype == jnp.float32
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=2 * tolerance)
        for ours, theirs, like in zip(gradients, expected_gradients, (self.x, self.weight), strict=True):
            assert ours.dtype == like.dtype
            scale = np.abs(theirs).max()
            np.testing.assert_allclose(
                np.asarray(ours, np.float64) / scale, theirs / scale, atol=2 * tolerance
            )


def scored(chunk: int = 1000, **options):
    """`token_logprob` with everything asked for, as `Case.run` takes it."""
    return lambda head, x, targets, temperature, others, kept: logprob.token_logprob(
        head, x, targets, temperature, chunk,
        with_entropy=True, with_collision=True, kept=kept, ids_bnk=others, **options,
    )


def scored_by(body: str, cut: logprob.Cut = WHOLE, chunk: int = 1000):
    """The same by a given body, whatever the platform."""

    def score(head, x, targets, temperature, others, kept):
        plan = logprob.Plan(
            body, cut, head.vocab_size, chunk, with_entropy=True, with_collision=True,
            pulls_entropy=True,
        )
        ids = jnp.where(others < 0, ELSEWHERE, others)
        return logprob.scores(plan, cut.fill_head(head), x, targets, temperature, ids, kept)

    return score
