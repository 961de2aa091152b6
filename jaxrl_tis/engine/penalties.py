"""What a request changes in its logits before they are drawn from.

In this order: the repetition penalty (arXiv:1909.05858) divides the positive logits and multiplies
the negative ones of tokens in the prompt or drawn before; the presence and the frequency penalty
are subtracted from those of tokens drawn before, once, and times how often; the bias is added; and
what must not be drawn yet, a stop id before min_tokens, becomes -inf.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.engine.records import MAX_BIAS, MAX_STOP_IDS, SamplingParams
from jaxrl_tis.engine.shards import Shards
from jaxrl_tis.sharding import Layout

BY_ROW, BY_TOKEN = ("batch",), ("batch", "vocab")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Penalties:
    """What the requests in B rows change about the logits.

    Attributes:
      repetition, presence, frequency: [B] float32, see SamplingParams.
      bias_ids: [B,MAX_BIAS] int32 tokens, -1 where a request names fewer; bias: [B,MAX_BIAS].
      stop_ids: [B,MAX_STOP_IDS] int32 padded with -1; barred: [B] int32 draws for which they are
        still impossible.
      in_prompt: [B,V] bool, the prompt has the token.
      drawn: [B,V] int32, how often it was drawn.
    """

    repetition: Any
    presence: Any
    frequency: Any
    bias_ids: Any
    bias: Any
    stop_ids: Any
    barred: Any
    in_prompt: Any = None
    drawn: Any = None

    @classmethod
    def of(cls, params: list[SamplingParams]) -> "Penalties":
        """Makes the penalties of requests that have seen no token yet; `seen` adds what they
        have."""
        column = lambda name: np.array([getattr(p, name) for p in params], np.float32)
        bias_ids = np.full((len(params), MAX_BIAS), -1, np.int32)
        bias = np.zeros((len(params), MAX_BIAS), np.float32)
        stop_ids = np.full((len(params), MAX_STOP_IDS), -1, np.int32)
        for row, p in enumerate(params):
            for i, (token, value) in enumerate(p.logit_bias):
                bias_ids[row, i], bias[row, i] = token, value
            stop_ids[row, : len(p.stop_ids)] = p.stop_ids
        return cls(
            column("repetition_penalty"), column("presence_penalty"), column("frequency_penalty"),
            bias_ids, bias, stop_ids, np.array([p.min_tokens for p in params], np.int32),
        )

    @classmethod
    def places(cls, place) -> "Penalties":
        """Applies `place` to the logical axes of every field."""
        return cls(*[place(BY_ROW)] * 7, *[place(BY_TOKEN)] * 2)

    def seen(
        self, tokens_bt: jax.Array, prompts_b: jax.Array, lengths_b: jax.Array, vocab_size: int,
        layout: Layout,
    ) -> "Penalties":
        """Counts the tokens of rows: the first `prompts` tokens of each are its prompt, and the
        others, up to `lengths`, were drawn."""
        shards, spec = Shards.of(layout), lambda axes: layout.sharding(axes).spec
        count = functools.partial(_count, width=vocab_size // shards.count, shards=shards)
        counted = layout.shard(count, (spec(BY_ROW),) * 3, (spec(BY_TOKEN),) * 2)
        in_prompt, drawn = counted(tokens_bt, prompts_b, lengths_b)
        barred = jnp.maximum(self.barred - (lengths_b - prompts_b), 0)
        return dataclasses.replace(self, barred=barred, in_prompt=in_prompt, drawn=drawn)

    def draw(self, token_b: jax.Array, is_drawn_b: jax.Array, layout: Layout) -> "Penalties":
        """Counts one drawn token in some of the rows."""
        shards, spec = Shards.of(layout), lambda axes: layout.sharding(axes).spec
        specs = spec(BY_TOKEN), spec(BY_ROW), spec(BY_ROW)
        add = layout.shard(functools.partial(_add, shards=shards), specs, spec(BY_TOKEN))
        return dataclasses.replace(
            self, barred=jnp.maximum(self.barred - is_drawn_b, 0),
            drawn=add(self.drawn, token_b, is_drawn_b),
        )

    def filled(self, fill) -> "Penalties":
        """Applies `fill` to what has an entry for every token."""
        return dataclasses.replace(self, in_prompt=fill(self.in_prompt), drawn=fill(self.drawn))

    def specs(self, layout: Layout) -> "Penalties":
        return Penalties.places(lambda axes: layout.sharding(axes).spec)

    def apply(self, logits_bv: jax.Array, shards: Shards) -> jax.Array:
        """Returns the logits [B,V] of this vocabulary shard after the penalties and biases of the
        requests, float32."""
        logits_bv = logits_bv.astype(jnp.float32)
        factor_b1, was_drawn_bv = self.repetition[:, None], self.drawn > 0
        repeated_bv = jnp.where(logits_bv > 0, logits_bv / factor_b1, logits_bv * factor_b1)
        logits_bv = jnp.where(self.in_prompt | was_drawn_bv, repeated_bv, logits_bv)
        logits_bv -= self.presence[:, None] * was_drawn_bv + self.frequency[:, None] * self.drawn
        rows, ids = _cells(self.bias_ids, shards, logits_bv.shape[1])
        logits_bv = logits_bv.at[rows, ids].add(self.bias, mode="drop")
        barred_bn = jnp.where(self.barred[:, None] > 0, self.stop_ids, -1)
        rows, ids = _cells(barred_bn, shards, logits_bv.shape[1])
        return logits_bv.at[rows, ids].set(-jnp.inf, mode="drop")


def _cells(ids_bn: jax.Array, shards: Shards, width: int) -> tuple[jax.Array, jax.Array]:
    """Returns the indices [B,1] and [B,n] of tokens in this part of the vocabulary, out of range
    for those of other parts."""
    return jnp.arange(len(ids_bn))[:, None], shards.local(ids_bn, width)


def _count(tokens_bt, prompts_b, lengths_b, *, width: int, shards: Shards):
    """Counts this part's tokens: (in_prompt, drawn)."""
    rows, ids = _cells(tokens_bt, shards, width)
    at, shape = jnp.arange(tokens_bt.shape[1])[None], (len(tokens_bt), width)
    is_prompt, is_drawn = at < prompts_b[:, None], at < lengths_b[:, None]
    of_prompt = jnp.where(is_prompt, ids, width)
    of_drawn = jnp.where(is_drawn & ~is_prompt, ids, width)
    return (
        jnp.zeros(shape, bool).at[rows, of_prompt].set(True, mode="drop"),
        jnp.zeros(shape, jnp.int32).at[rows, of_drawn].add(1, mode="drop"),
    )


def _add(drawn_bv, token_b, is_drawn_b, *, shards: Shards):
    width = drawn_bv.shape[1]
    rows, ids = _cells(token_b[:, None], shards, width)
    return drawn_bv.at[rows, jnp.where(is_drawn_b[:, None], ids, width)].add(1, mode="drop")
