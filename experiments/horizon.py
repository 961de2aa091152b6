"""Bias, variance and progress of policy-gradient estimators at horizons of up to 1024 tokens.

The state of the policy is its last token: one row of logits per state, shared by all positions. The
reward is R = sum_t r_t(y_t). From one sequence of the behaviour policy, an estimator is

    g = R sum_t w_t grad log pi(y_t | y_t-1),

summed over tokens and not divided by the length, so that w = 1 is unbiased on-policy.
`Chain.moments` computes E[g] and E|g|^2 without sampling for products of the ratios of single steps:
none, token, prefix, sequence. `monte_carlo` estimates them with 95 % intervals for any weight.
`frontier` has the weights and the table. Everything is float64; values that can overflow are kept
as logarithms.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

UNITS = ("none", "token", "prefix", "seq")
SINGLE = ("none", "token")  # weights that depend on a single token
NUM_BLOCKS = 50  # of the jackknife
T_95 = 2.0096  # two-sided 95 % quantile of Student's t with 49 degrees of freedom

WeightFn = Callable[[np.ndarray, np.ndarray], np.ndarray]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns log-probs over the last axis; a logit of -inf is a token of probability 0."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class Moments:
    """Moments of an estimator g of one sequence.

    mean: E[g], as the logits are laid out. log_second: log E|g|^2. ess: effective sample size of
    its token weights, (E sum_t w_t)^2 / (T E sum_t w_t^2), in (0, 1].
    """

    mean: np.ndarray
    log_second: float
    ess: float


class Chain:
    """A policy and a behaviour policy whose state is the last token.

    Args:
      policy: [V, V] logits, row = state; -inf is a token of probability 0.
      behaviour: [V, V] logits.
      reward: [T, V] reward of token v at position t; T is the horizon.
      start: state before the first token.

    A token that the behaviour never samples and the policy does has ratio 0: no weight repairs
    missing support.
    """

    def __init__(
        self, policy: np.ndarray, behaviour: np.ndarray, reward: np.ndarray, start: int = 0
    ):
        vocab = policy.shape[0]
        if policy.shape != (vocab, vocab) or behaviour.shape != policy.shape:
            raise ValueError(
                f"policy {policy.shape} and behaviour {behaviour.shape} must both be [V, V]."
            )
        if reward.ndim != 2 or reward.shape[1] != vocab:
            raise ValueError(f"reward {reward.shape} must be [T, {vocab}], as the policy is.")
        self.policy, self.behaviour, self.reward, self.start = policy, behaviour, reward, start
        self.vocab, self.horizon = vocab, reward.shape[0]
        self.pi, self.mu = np.exp(log_softmax(policy)), np.exp(log_softmax(behaviour))
        self.ratio = np.divide(self.pi, self.mu, out=np.zeros_like(self.pi), where=self.mu > 0)
        # score[k, s, v]: derivative of log pi(v | s) with respect to logit k of the raveled table.
        score = np.zeros((vocab, vocab, vocab, vocab))
        for s in range(vocab):
            score[s, :, s, :] = np.eye(vocab) - self.pi[s][:, None]
        self.score = score.reshape(vocab * vocab, vocab, vocab)

    def expected_reward(self, transition: np.ndarray | None = None) -> float:
        """Returns E[R] under [V, V] probabilities, by default of the policy."""
        transition = self.pi if transition is None else transition
        state, total = np.eye(self.vocab)[self.start], 0.0
        for reward_v in self.reward:
            state = state @ transition
            total += state @ reward_v
        return float(total)

    def true_gradient(self) -> np.ndarray:
        """Returns the gradient of the policy's expected reward with respect to its logits, [V, V]."""
        return Chain(self.policy, self.policy, self.reward, self.start).moments("none").mean

    def moments(self, unit: str, cap: float = math.inf, is_centred: bool = False) -> Moments:
        """Returns exact moments of the estimator with the weights of `unit`.

        Args:
          unit: "none" w_t = 1, "token" w_t = min(rho_t, cap), "prefix" w_t = prod_{s<=t} rho_s,
            "seq" w_t = prod_s rho_s, where rho = pi / mu.
          cap: truncation of the token weights; other weights are not truncated.
          is_centred: subtract the mean under the behaviour from each weighted score (score
            centering, arXiv:2609.20807); for weights of single tokens.
        """
        if unit not in UNITS:
            raise ValueError(f"Unknown unit {unit!r}; choose one of {', '.join(UNITS)}.")
        if unit != "token" and cap != math.inf:
            raise ValueError(f"cap is {cap}, but only token weights are truncated exactly.")
        if is_centred:
            if unit not in SINGLE:
                raise ValueError(f"unit is {unit!r}, but scores are centred for {', '.join(SINGLE)}.")
            centred = self._centred(unit, cap).moments("none")
            return dataclasses.replace(centred, ess=self.moments(unit, cap).ess)
        mean_k, log_scale = self._moment(unit, cap, 1)
        square_k, log_square = self._moment(unit, cap, 2)
        log_first = self._log_weights(unit, cap, 1)
        log_ess = 2.0 * log_first - math.log(self.horizon) - self._log_weights(unit, cap, 2)
        return Moments(
            mean=(math.exp(log_scale) * mean_k).reshape(self.policy.shape),
            log_second=math.log(square_k.sum()) + log_square,
            ess=math.exp(min(log_ess, 0.0)),
        )

    def _centred(self, unit, cap):
        """Returns the chain with centred weighted scores in place of the scores."""
        weight = np.minimum(self.ratio, cap) if unit == "token" else np.ones_like(self.ratio)
        weighted = weight * self.score
        chain = Chain(self.policy, self.behaviour, self.reward, self.start)
        chain.score = weighted - (self.mu * weighted).sum(axis=-1, keepdims=True)
        return chain

    def _moment(self, unit, cap, power):
        """Returns (x [K], c) with E[R^power g_k^power] = x exp(c), g without its reward.

        A state of the transfer matrix is (powers of the reward taken, scores taken, last token).
        """
        rows, row_of_t = np.unique(self.reward, axis=0, return_inverse=True)
        matrices = [self._transfer(unit, cap, power, row_v) for row_v in rows]
        levels = power + 1
        f = np.zeros((self.score.shape[0], levels, levels, self.vocab))
        f[:, 0, 0, self.start] = 1.0
        f, log_scale = f.reshape(f.shape[0], 1, -1), 0.0
        for row in row_of_t.ravel():
            f = f @ matrices[row]
            scale = np.abs(f).max()
            f, log_scale = f / scale, log_scale + math.log(scale)
        last = f.reshape(f.shape[0], levels, levels, self.vocab)[:, power, power]
        return last.sum(axis=-1) * math.factorial(power) ** 2, log_scale

    def _transfer(self, unit, cap, power, reward_v):
        """Returns the matrices of one step, [K, D, D] with D = (power + 1)^2 V; powers are divided by
        their factorial."""
        levels = power + 1
        blocks = np.zeros((self.score.shape[0], *(levels, levels, self.vocab) * 2))
        for b in range(levels):
            for j in range(levels - b):
                edge = self.mu * self._factor(unit, cap, power, b, j)
                edge = edge * self.score**j / math.factorial(j)
                for a in range(levels):
                    for i in range(levels - a):
                        step = edge * reward_v**i / math.factorial(i)
                        blocks[:, a, b, :, a + i, b + j, :] = step
        size = levels * levels * self.vocab
        return blocks.reshape(-1, size, size)

    def _factor(self, unit, cap, power, taken, taking):
        """Returns the factor [V, V] of the weight in a step that takes `taking` scores after `taken`
        earlier scores.

        All sequence weights run to the end; the prefix weight of a score ends at the score.
        """
        if unit == "token":
            return np.minimum(self.ratio, cap) ** taking
        return self.ratio ** {"none": 0, "prefix": power - taken, "seq": power}[unit]

    def _log_weights(self, unit, cap, power):
        """log E[sum_t w_t^power]."""
        is_product = unit in ("prefix", "seq")
        step = self.mu * self.ratio**power if is_product else self.mu
        pick_v = (self.mu * np.minimum(self.ratio, cap) ** power).sum(axis=1)
        f, log_scale, logs = np.eye(self.vocab)[self.start], 0.0, []
        for _ in range(self.horizon):
            token_weight = f @ pick_v
            f = f @ step
            scale = f.sum()
            f, log_scale = f / scale, log_scale + math.log(scale)
            logs.append(math.log(token_weight) if unit == "token" else log_scale)
        if unit == "seq":
            return math.log(self.horizon) + logs[-1]
        return float(np.logaddexp.reduce(logs))

    def sample(self, num: int, rng: np.random.Generator) -> np.ndarray:
        """Samples `num` sequences of the behaviour; returns steps [N, T], each state * V + token."""
        cumulative = np.cumsum(self.mu, axis=1)[:, :-1]
        uniform_tn = rng.random((self.horizon, num))
        step_nt = np.empty((num, self.horizon), np.int64)
        state_n = np.full(num, self.start)
        for t in range(self.horizon):
            token_n = (uniform_tn[t][:, None] >= cumulative[state_n]).sum(axis=1)
            step_nt[:, t] = state_n * self.vocab + token_n
            state_n = token_n
        return step_nt

    def rewards(self, step_nt: np.ndarray) -> np.ndarray:
        """Returns R of sampled sequences, [N]."""
        return self.reward[np.arange(self.horizon), step_nt % self.vocab].sum(axis=1)

    def log_ratios(self, step_nt: np.ndarray) -> np.ndarray:
        """log pi - log mu of sampled tokens, [N, T] nats."""
        with np.errstate(divide="ignore"):
            return np.log(self.ratio).ravel()[step_nt]

    def weighted_scores(self, w_nt: np.ndarray, step_nt: np.ndarray) -> np.ndarray:
        """sum_t w_t grad log pi(y_t | y_t-1) of sampled sequences, [N, V * V]."""
        num, num_steps = len(step_nt), self.vocab**2
        bins = np.arange(num)[:, None] * num_steps + step_nt
        w_nt = np.broadcast_to(w_nt, step_nt.shape)
        sums = np.bincount(bins.ravel(), weights=w_nt.ravel(), minlength=num * num_steps)
        return sums.reshape(num, num_steps) @ self.score.reshape(num_steps, num_steps).T


@dataclasses.dataclass(frozen=True)
class Profile:
    """An estimator compared with the true gradient, in units of the gradient's norm.

    bias: |E g - grad J|. log10_variance: log10 of tr Var(g), one sequence. progress: SGA's P =
    <grad J, E g>^2 / (tr Var + |bias|^2) of the mean over a batch of independent sequences.
    efficiency: <grad J, E g>^2 / E|g|^2 of that mean, negative if the expected step is against the
    gradient. It is the share of an exact step's improvement, each with its best step size. Unlike
    P it does not depend on the scale of the estimator. ess: see `Moments`.
    """

    bias: float
    log10_variance: float
    progress: float
    efficiency: float
    ess: float


def profile(moments: Moments, gradient: np.ndarray, batch: int = 1, noise: float = 0.0) -> Profile:
    """Returns the profile of an estimator averaged over `batch` sequences.

    `noise` is the expected squared error of a sampled `moments.mean`. It inflates the squared norms
    and is subtracted from them.
    """
    norm_sq = float(np.sum(gradient**2))
    bias_sq = max(float(np.sum((moments.mean - gradient) ** 2)) - noise, 0.0) / norm_sq
    mean_sq = max(float(np.sum(moments.mean**2)) - noise, 0.0) / norm_sq
    cosine = float(np.sum(moments.mean * gradient)) / norm_sq
    log_second = moments.log_second - math.log(norm_sq)
    explained = min(mean_sq * math.exp(-log_second), 1.0 - 1e-15)
    log_variance = log_second + math.log1p(-explained)
    with np.errstate(divide="ignore"):
        log_bias, log_mean, log_cosine = np.log([bias_sq, mean_sq, cosine**2])
    log_noise = log_variance - math.log(batch)
    efficiency = math.exp(min(log_cosine - np.logaddexp(log_noise, log_mean), 0.0))
    return Profile(
        bias=math.sqrt(bias_sq),
        log10_variance=log_variance / math.log(10.0),
        progress=math.exp(log_cosine - np.logaddexp(log_noise, log_bias)),
        efficiency=math.copysign(efficiency, cosine),
        ess=moments.ess,
    )


def _sample_block(chain, weights, num, rng):
    """Samples `num` sequences; returns {name: (g [N, K], mean w, mean w^2)} and the controls [N, K, 3]."""
    step_nt = chain.sample(num, rng)
    log_ratio_nt, reward_n = chain.log_ratios(step_nt), chain.rewards(step_nt)
    result = {}
    for name, function in weights.items():
        w_nt = function(log_ratio_nt, reward_n)
        g_nk = reward_n[:, None] * chain.weighted_scores(w_nt, step_nt)
        result[name] = (g_nk, w_nt.mean(), np.square(w_nt).mean())
    plain_nk = chain.weighted_scores(np.ones((1, 1)), step_nt)
    token_nk = chain.weighted_scores(np.exp(log_ratio_nt), step_nt)
    controls = [reward_n[:, None] * plain_nk, reward_n[:, None] * token_nk, token_nk]
    return result, np.stack(controls, axis=-1)


def _control_means(chain):
    """Returns exact means [K, 3] of the controls: g of weights none and token, and sum_t rho_t score_t."""
    constant = np.zeros_like(chain.reward)
    constant[-1] = 1.0
    unit = Chain(chain.policy, chain.behaviour, constant, chain.start)
    means = chain.moments("none"), chain.moments("token"), unit.moments("token")
    return np.stack([m.mean.ravel() for m in means], axis=-1)


def monte_carlo(
    chain: Chain, weights: Mapping[str, WeightFn], num_samples: int, seed: int = 0, batch: int = 1
) -> dict[str, tuple[Profile, Profile]]:
    """Returns profiles of weights from sampled sequences, the same sequences for all weights.

    E[g] uses three control variates with exact means (g of weights none and token, and the
    token-weighted score). E|g|^2 and the ESS are plain averages. The intervals come from a
    jackknife over 50 blocks.

    Args:
      chain: the policies and the reward.
      weights: functions of log-ratios [N, T] and rewards [N] that give w [N, T] or [N, 1].
      num_samples: sequences, at least 100.
      seed: of the samples.
      batch: as in `profile`.

    Returns {name: (profile, half-widths of its 95 % intervals)}.
    """
    size = num_samples // NUM_BLOCKS
    if size < 2:
        raise ValueError(f"{num_samples} samples are too few: give at least {2 * NUM_BLOCKS}.")
    rng = np.random.default_rng(seed)
    blocks = [_sample_block(chain, weights, size, rng) for _ in range(NUM_BLOCKS)]
    controls = np.stack([c for _, c in blocks]) - _control_means(chain)
    flat = controls.reshape(-1, controls.shape[-1])
    gradient = chain.true_gradient()
    shared: tuple = controls, flat, gradient, batch
    columns = lambda name: map(np.array, zip(*(b[name] for b, _ in blocks), strict=True))
    return {
        name: _jackknife(*columns(name), *shared)
        for name in weights
    }


def _jackknife(g, w_mean, w_square, controls, flat, gradient, batch):
    """Returns (profile, half-widths) from g [blocks, N, K] and the mean weights [blocks]."""
    centred = (g - g.mean(axis=(0, 1))).ravel()
    coefficients = np.linalg.lstsq(flat.T @ flat, flat.T @ centred, rcond=None)[0]
    adjusted = g - controls @ coefficients
    noise = adjusted.reshape(-1, g.shape[-1]).var(axis=0, ddof=1).sum() / (g.shape[0] * g.shape[1])
    means, squares = adjusted.mean(axis=1), np.square(g).sum(axis=-1).mean(axis=1)

    def of(weight):
        """Returns the profile of the blocks, averaged with `weight` [blocks]."""
        total = weight.sum()
        moments = Moments(
            mean=(weight @ means / total).reshape(gradient.shape),
            log_second=math.log(weight @ squares / total),
            ess=float((weight @ w_mean) ** 2 / (total * (weight @ w_square))),
        )
        return profile(moments, gradient, batch, noise * len(weight) / total)

    left_out = np.array(
        [dataclasses.astuple(of(1.0 - np.eye(NUM_BLOCKS)[b])) for b in range(NUM_BLOCKS)]
    )
    spread = np.square(left_out - left_out.mean(axis=0)).sum(axis=0)
    half = T_95 * np.sqrt(spread * (NUM_BLOCKS - 1) / NUM_BLOCKS)
    return of(np.ones(NUM_BLOCKS)), Profile(*half)
