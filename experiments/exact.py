"""Exact expectation and variance of policy-gradient estimators, by enumeration.

The policy is a table of logits with one row per prefix. The gradient of a policy with shared
parameters is a linear image of this gradient: an estimator that is unbiased here is unbiased there.
Every response is enumerated with its probability, in float64, and nothing is sampled. The true
gradient is the automatic derivative of the enumerated expected reward, without a score function or
an importance ratio.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np

from experiments.horizon import log_softmax

Batch = dict[str, chex.Array]
LossFn = Callable[[chex.Array, Batch], chex.Array]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A policy, a sampler and a reward: everything that the moments of an estimator depend on.

    Rows of a table are prefixes, numbered as a heap: the empty one is 0, and row p followed by
    token v is row p V + 1 + v. A table for `horizon` tokens has (V^horizon - 1) / (V - 1) rows.

    Attributes:
      policy: [P, V] logits of the policy whose gradient is estimated; -inf for a token outside its
        sampling mask.
      behaviour: [P, V] logits of the sampler, likewise.
      reward: function of a response, an int array of its tokens up to and including `stop`.
      horizon: maximum number of tokens of a response, tool tokens included.
      group: the batch of a loss: one id per response, all independent responses to the same
        prompt. (0,) is a single response, (0, 0, 0) a group of three.
      old: [P, V] logits of the learner at the sampler's weights; None is `policy`.
      ref: [P, V] logits of the reference of a KL term; None is `policy`.
      stop: token that ends a response; None has all responses of length `horizon`.
      tool: positions of tokens that a tool writes, distributed as the behaviour's rows; the mask
        is False there.
      draw: (logp, batch) to the token [B, T] bool, at most one, that a loss samples with
        batch["key"]. All tokens that the key can select in a batch are equally likely.
    """

    policy: np.ndarray
    behaviour: np.ndarray
    reward: Callable[[np.ndarray], float]
    horizon: int
    _: dataclasses.KW_ONLY
    group: tuple[int, ...] = (0,)
    old: np.ndarray | None = None
    ref: np.ndarray | None = None
    stop: int | None = None
    tool: tuple[int, ...] = ()
    draw: Callable[[chex.Array, Batch], chex.Array] | None = None

    def __post_init__(self):
        vocab = self.policy.shape[-1]
        shape = (num_prefixes(vocab, self.horizon), vocab)
        for name in ("policy", "behaviour", "old", "ref"):
            table = getattr(self, name)
            if table is not None and table.shape != shape:
                raise ValueError(
                    f"{name} is {table.shape}; {self.horizon} tokens of a vocabulary of {vocab} "
                    f"need one row per prefix, {shape}."
                )

    @functools.cached_property
    def responses(self) -> dict[str, np.ndarray]:
        """Returns all N responses: `tokens`, `row`, the booleans `is_live` and `mask` [N, T], `rewards`
        [N].

        After `stop` a response is not live, and its remaining tokens are `stop`.
        """
        vocab = self.policy.shape[1]
        tokens_nt = np.array(list(itertools.product(range(vocab), repeat=self.horizon)))
        is_stop_nt = tokens_nt == self.stop if self.stop is not None else np.zeros_like(tokens_nt)
        is_live_nt = np.cumsum(is_stop_nt, axis=1) - is_stop_nt == 0
        is_own_n = np.all(is_live_nt | (is_stop_nt == 1), axis=1)
        tokens_nt, is_live_nt = tokens_nt[is_own_n], is_live_nt[is_own_n]
        row_nt = np.zeros_like(tokens_nt)
        for t in range(1, self.horizon):
            row_nt[:, t] = row_nt[:, t - 1] * vocab + 1 + tokens_nt[:, t - 1]
        is_tool_t = np.isin(np.arange(self.horizon), self.tool)
        rewards = [
            float(self.reward(y[live])) for y, live in zip(tokens_nt, is_live_nt, strict=True)
        ]
        return {
            "tokens": tokens_nt,
            "row": row_nt,
            "is_live": is_live_nt,
            "mask": is_live_nt & ~is_tool_t,
            "rewards": np.array(rewards),
        }

    def pick(self, table: np.ndarray) -> np.ndarray:
        """Returns log-probs [N, T] of all responses' tokens under a table, also of tokens not live."""
        return log_softmax(table)[self.responses["row"], self.responses["tokens"]]

    def differentiate(self, objective: Callable[[chex.Array], chex.Array]) -> np.ndarray:
        """Returns the derivative [P, V] of a scalar function of log-probs [N, T] by the policy's logits.

        The function receives the log-probs of live tokens (of tool tokens under the tool), and 0
        after the end of a response.
        """
        data = self.responses
        tool_nt = np.where(data["is_live"] & ~data["mask"], self.pick(self.behaviour), 0.0)

        def of_logits(logits):
            logp_nt = jax.nn.log_softmax(logits)[data["row"], data["tokens"]]
            return objective(jnp.where(data["mask"], logp_nt, tool_nt))

        with jax.enable_x64(True):
            return np.asarray(jax.jit(jax.grad(of_logits))(jnp.asarray(self.policy, jnp.float64)))

    def true_gradient(self) -> np.ndarray:
        """Returns the gradient of the policy's expected reward with respect to its logits, [P, V]."""
        rewards = self.responses["rewards"]
        return self.differentiate(lambda logp_nt: jnp.exp(logp_nt.sum(axis=1)) @ rewards)

    def transition(self, table: np.ndarray) -> np.ndarray:
        """Returns probabilities [P, V] of tokens under a table; the tool's own for tool tokens."""
        depth_p = np.repeat(
            np.arange(self.horizon), [table.shape[1] ** t for t in range(self.horizon)]
        )
        is_tool_p = np.isin(depth_p, self.tool)
        return np.exp(log_softmax(np.where(is_tool_p[:, None], self.behaviour, table)))

    def probabilities(self, table: np.ndarray) -> np.ndarray:
        """Returns the probability of each response under a table, [N]."""
        data = self.responses
        p_nt = self.transition(table)[data["row"], data["tokens"]]
        return np.where(data["is_live"], p_nt, 1.0).prod(axis=1)

    def visits(self, table: np.ndarray) -> np.ndarray:
        """Returns the probability that a response passes through each prefix, [P]."""
        data = self.responses
        p_n, visits_p = self.probabilities(table), np.zeros(len(table))
        for t in range(self.horizon):
            live = data["is_live"][:, t]
            np.add.at(visits_p, data["row"][live, t], p_n[live])
        return visits_p

    def action_values(self, table: np.ndarray) -> np.ndarray:
        """Returns the expected reward [P, V] after each prefix and token, continued under a table."""
        data, vocab, transition = self.responses, table.shape[1], self.transition(table)
        last_n = data["is_live"].sum(axis=1) - 1
        ends = tuple(data[name][np.arange(len(last_n)), last_n] for name in ("row", "tokens"))
        is_end, q, value = np.zeros(table.shape, bool), np.zeros(table.shape), np.zeros(len(table))
        is_end[ends], q[ends] = True, data["rewards"]
        for row in reversed(range(len(table))):  # a prefix has a smaller number than its extensions
            first = row * vocab + 1
            if first < len(table):
                q[row] = np.where(is_end[row], q[row], value[first : first + vocab])
            value[row] = transition[row] @ q[row]
        return q

    @functools.cached_property
    def fields(self) -> dict[str, np.ndarray]:
        """Returns the fields of a loss's batch for each of the N responses; see `moments`."""
        data = self.responses
        row, tokens, mask = data["row"], data["tokens"], data["mask"]
        old = self.policy if self.old is None else self.old
        ref = self.policy if self.ref is None else self.ref
        pi, pi_old = (np.exp(log_softmax(table)) for table in (self.policy, old))
        q = self.action_values(self.policy)
        entropy_p = -np.sum(pi_old * np.log(np.where(pi_old > 0, pi_old, 1.0)), axis=1)
        squares_p = np.square(pi_old).sum(axis=1)
        norms_nt = 1.0 - 2.0 * pi_old[row, tokens] + squares_p[row]
        greedy_n = self.probabilities(np.where(pi == pi.max(axis=1, keepdims=True), 0.0, -np.inf))
        is_tool = ~mask & data["is_live"]
        return {
            "logp": self.pick(self.policy),
            "logits": self.policy[row],
            "tokens": tokens,
            "mask": mask,
            "turn": np.cumsum(is_tool & ~np.pad(is_tool, ((0, 0), (1, 0)))[:, :-1], axis=1),
            "logp_old": self.pick(old),
            "logp_prox": self.pick(old),
            "logp_behav": self.pick(self.behaviour),
            "logp_ref": self.pick(ref),
            "logits_behav": self.behaviour[row],
            "logits_ref": ref[row],
            "rewards": data["rewards"],
            "adv": np.where(mask, data["rewards"][:, None], 0.0),
            "values": (self.transition(self.policy) * q).sum(axis=1)[row],
            "action_values": q[row, tokens],
            "greedy_rewards": np.full(len(tokens), greedy_n @ data["rewards"]),
            "entropy": entropy_p[row],
            "sum_pi_squared": squares_p[row],
            "grad_norms": np.where(mask, norms_nt, 0.0).sum(axis=1),
        }

    @functools.cached_property
    def batches(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns all batches: responses [M, G], seed of batch["key"] [M], probability [M].

        With `draw`, each token that the key can select is a separate batch.
        """
        p_n = self.probabilities(self.behaviour)
        drawn = np.flatnonzero(p_n)
        axes = np.meshgrid(*[drawn] * len(self.group), indexing="ij")
        index_mg = np.stack(axes, axis=-1).reshape(-1, len(self.group))
        p_m = p_n[index_mg].prod(axis=1)
        if self.draw is None:
            return index_mg, np.zeros(len(p_m), int), p_m
        seed_d = seeds_by_first((len(self.group), self.horizon))
        index, seed = np.repeat(index_mg, len(seed_d), axis=0), np.tile(seed_d, len(p_m))
        is_drawn = self._map(lambda logp, _, batch: self.draw(logp, batch), index, seed)
        is_drawn = is_drawn.reshape(len(p_m), len(seed_d), -1)
        if is_drawn.sum(axis=-1).max() > 1:
            raise ValueError("The draw takes more than one token; its outcomes are not enumerated.")
        is_same = (is_drawn[:, :, None] == is_drawn[:, None]).all(axis=-1)
        is_new = ~np.tril(is_same, -1).any(axis=-1)
        p_md = np.where(is_new, p_m[:, None] / is_new.sum(axis=1, keepdims=True), 0.0)
        is_new = is_new.ravel()
        return index[is_new], seed[is_new], p_md.ravel()[is_new]

    def _map(self, function, index_mg, seed_m):
        """Returns function(logp, logits, batch) of batches, as float64 numpy arrays [M, ...]."""
        with jax.enable_x64(True):
            fields = {name: jnp.asarray(x[index_mg]) for name, x in self.fields.items()}
            logp, logits = fields.pop("logp"), fields.pop("logits")
            group = jnp.asarray(self.group)

            def of_batch(logp, logits, fields, seed):
                batch = fields | {"logits": logits, "group": group, "key": jax.random.key(seed)}
                return function(logp, logits, batch)

            mapped = jax.jit(jax.vmap(of_batch))
            return jax.tree.map(np.asarray, mapped(logp, logits, fields, jnp.asarray(seed_m)))

    def average(self, function: LossFn) -> np.ndarray:
        """Returns E[function(logp, batch)] over all batches, for a function that returns any array."""
        index_mg, seed_m, p_m = self.batches
        values = self._map(lambda logp, _, batch: function(logp, batch), index_mg, seed_m)
        return np.tensordot(p_m, values, axes=1)

    def moments(self, loss_fn: LossFn) -> tuple[np.ndarray, float]:
        """Returns (E[g] [P, V], tr Var(g)) of the step g = -gradient of the loss.

        Args:
          loss_fn: (logp [B, T], batch) to a scalar that is minimised, or to (scalar, anything).
            The gradient is taken through logp and through batch["logits"] [B, T, V]. The batch
            holds [B, T]: tokens, mask, turn, logp_old, logp_prox, logp_behav, logp_ref, adv (the
            reward on each valid token), values and action_values (exact, of the policy), entropy
            and sum_pi_squared (of the old policy); [B]: rewards, greedy_rewards, group, grad_norms
            (of the old policy); [B, T, V]: logits, logits_behav, logits_ref; and a key. Where the
            mask is False, log-probs are the tables' values for the token at that position.
        """

        def loss(logp, logits, batch):
            value = loss_fn(logp, batch | {"logits": logits})
            return value[0] if isinstance(value, tuple) else value

        index_mg, seed_m, p_m = self.batches
        by_logp, by_logits = self._map(jax.grad(loss, argnums=(0, 1)), index_mg, seed_m)
        row_mgt, tokens_mgt = (self.responses[name][index_mg] for name in ("row", "tokens"))
        pi = np.exp(log_softmax(self.policy))
        score = np.eye(pi.shape[1])[tokens_mgt] - pi[row_mgt]
        step = -(by_logp[..., None] * score + by_logits)  # [M, G, T, V]
        mean = np.zeros(self.policy.shape)
        np.add.at(mean, row_mgt, p_m[:, None, None, None] * step)
        second = 0.0
        for i, j in itertools.product(range(len(self.group)), repeat=2):
            is_shared_mt = row_mgt[:, i] == row_mgt[:, j]
            second += p_m @ np.sum(is_shared_mt * (step[:, i] * step[:, j]).sum(axis=-1), axis=1)
        return mean, float(second - np.sum(mean**2))

    def expectation(self, loss_fn: LossFn) -> np.ndarray:
        """Returns E[-gradient of the loss] [P, V], to be compared with `true_gradient`."""
        return self.moments(loss_fn)[0]

    def variance(self, loss_fn: LossFn) -> float:
        """Returns tr Var(gradient of the loss), the sum of the variances over the logits."""
        return self.moments(loss_fn)[1]


def num_prefixes(vocab: int, horizon: int) -> int:
    """Returns the number of rows of a table: prefixes of 0 to horizon - 1 tokens."""
    return sum(vocab**t for t in range(horizon))


@functools.cache
def seeds_by_first(shape: tuple[int, int]) -> np.ndarray:
    """Returns for each position of an array a seed with the smallest random bits at this position.

    `rank_masks.clip_cov` samples without replacement by taking the smallest bits among its
    candidates. Each candidate is selected under one of these seeds.
    """
    bits = lambda seed: jax.random.bits(jax.random.key(seed), shape, jnp.uint32).ravel()
    first_s = np.asarray(jax.vmap(bits)(jnp.arange(1000))).argmin(axis=1)
    positions, seeds = np.unique(first_s, return_index=True)
    if len(positions) < np.prod(shape):
        raise ValueError(f"1000 seeds put only {len(positions)} of the positions of {shape} first.")
    return seeds


def random_logits(
    vocab: int, horizon: int, rng: np.random.Generator, scale: float = 1.0
) -> np.ndarray:
    """Returns a table of independent normal logits with the given standard deviation."""
    return scale * rng.normal(size=(num_prefixes(vocab, horizon), vocab))


def with_engine_noise(
    logits: np.ndarray, scale: float, rng: np.random.Generator
) -> np.ndarray:
    """Returns the logits of another engine: plus normal errors of the given standard deviation."""
    return logits + scale * rng.normal(size=logits.shape)


def quantised(logits: np.ndarray, bits: int) -> np.ndarray:
    """Returns the logits rounded to 2^bits - 1 levels, with one symmetric scale for the table."""
    scale = np.abs(logits).max() / (2 ** (bits - 1) - 1)
    return np.round(logits / scale) * scale


def top_p(logits: np.ndarray, mass: float) -> np.ndarray:
    """Returns the logits with -inf outside the smallest set of tokens of the given probability."""
    p = np.exp(log_softmax(logits))
    order = np.argsort(-p, axis=1, kind="stable")
    before = np.cumsum(np.take_along_axis(p, order, axis=1), axis=1)
    before = before - np.take_along_axis(p, order, axis=1)
    is_kept = np.zeros(p.shape, bool)
    np.put_along_axis(is_kept, order, before < mass, axis=1)
    return np.where(is_kept, logits, -np.inf)

