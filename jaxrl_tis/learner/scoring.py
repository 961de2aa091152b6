"""The learner's forward passes: log-probs, entropies, logits, values of rows of tokens.

Rows hold one sequence each or, with `Learner.max_segments`, several. Micro-batches without a token in
the mask are skipped.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_tis.estimators import ratios
from jaxrl_tis.fields import route_dtype
from jaxrl_tis.kernels.divergence import token_kl
from jaxrl_tis.kernels.logprob import Scores, token_logprob
from jaxrl_tis.kernels.logprob_chunked import Kept
from jaxrl_tis.learner.batch_layout import without_replay
from jaxrl_tis.models import lora, moe, transformer
from jaxrl_tis.models.config import ModelConfig

Batch = dict[str, Any]  # arrays; "seg" is a Segments
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Learner:
    """The static parts of every learner program: model, program options and sizes.

    Attributes:
      max_targets: most response tokens in a row; only these positions reach the output head.
      chunk: positions with logits in memory at a time.
      max_segments: most sequences of a packed row; None if every row holds one.
      adapter: the trained weights of LoRA; None trains all weights.
    """

    config: ModelConfig
    program: transformer.Program
    max_targets: int
    chunk: int
    max_segments: int | None = None
    adapter: lora.Adapter | None = None

    def joined(self, trained: Any, base: Any) -> Any:
        """Returns the parameters of a network from those that are trained: the same without an
        adapter, else adapted parameters with this base."""
        if self.adapter is None:
            return trained
        if "decoder" in trained:
            return trained | {"decoder": self.adapter.join(base, trained["decoder"])}
        return self.adapter.join(base, trained)

    @property
    def sums_in_order(self) -> bool:
        """Whether gradients are summed over devices in a fixed order: in invariant numerics, and on
        CPU, where XLA's order depends on the number of processes."""
        layout = self.program.layout
        if layout is None or layout.shards == 1:
            return False
        return self.program.is_invariant or layout.platform == "cpu"

    def by_parts(self, measure: Callable[[Any, "Learner", Any], Any], params: Any, batch: "Batch"):
        """Computes measure(params, learner, batch) -> [B,...]. With `sums_in_order` its gradients are
        summed over devices in order, and `measure` gets no scalars of the batch."""
        layout = self.program.layout
        if layout is None or not self.sums_in_order:
            return measure(params, self, batch)
        inside = dataclasses.replace(
            self, program=dataclasses.replace(self.program, layout=layout.inside())
        )
        rows = {name: x for name, x in batch.items() if name != "seg" and jnp.ndim(x)}
        return layout.by_parts(lambda p, part: measure(p, inside, part), params, rows)

    def on_every_device(self, tree: Any) -> Any:
        """With `sums_in_order` replicates each array, so that computations on it need no sums over
        devices."""
        layout = self.program.layout
        if layout is None or not self.sums_in_order:
            return tree
        return jax.lax.with_sharding_constraint(tree, layout.replicated())

    def replicated(self, loss_fn: Callable[[Any, Any], tuple]) -> Callable[[Any, Any], tuple]:
        """Returns loss_fn: (scores, inputs) -> (loss, others). With `sums_in_order` every device
        computes it from all scores of `by_parts`."""
        layout = self.program.layout
        if layout is None or not self.sums_in_order:
            return loss_fn
        return layout.everywhere(loss_fn)


def _forward(
    params: Any, learner: Learner, batch: Batch, asked: moe.Asked = moe.NOTHING
) -> transformer.Hidden:
    """Runs the policy over the rows of a batch. Routes of the batch are replayed."""
    replay = None
    if "routes" in batch:
        replay = moe.Replay(jnp.moveaxis(batch["routes"], 2, 0), batch["routed"])
    return transformer.rows_routed(
        params, learner.config, learner.program,
        batch["tokens"], batch["positions"], batch["segment_ids"], batch.get("evict_step"),
        batch.get("noise_seed"), replay, asked,
    )


def _of_rows(routed: moe.Routed) -> moe.Routed:
    """Returns what routers did with rows first: ids [B,T,L,k], statistics [B,L,...]."""
    ids = None if routed.ids is None else jnp.moveaxis(routed.ids, 0, 2)
    rest = dataclasses.replace(routed, ids=None)
    return dataclasses.replace(jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rest), ids=ids)


def _score_targets(
    params: Any, learner: Learner, batch: Batch, x_btd: jax.Array, **options
) -> Scores:
    """Computes `token_logprob` of the masked tokens at their temperatures, and of `top_ids` where the
    batch has them, [B,T] and [B,T,K]; 0 elsewhere. `x_btd` is that of `_forward`. Tokens of the
    field `environment` count as masked, at temperature 1.

    With recorded supports all distributions are restricted to the supports, as in the sampler. This
    includes the entropy, the collisions and both sides of the KL to the reference. Its estimators are
    means over the sampler's tokens.
    """
    mask = targets(batch)
    gather_hidden, gather, scatter = _targets(mask, learner.max_targets)
    kept = _kept(gather(batch["kept"])) if "kept" in batch else None
    head, x_btd = transformer.output_head(params, learner.program, x_btd)
    scores = token_logprob(
        head,
        gather_hidden(x_btd),
        gather(batch["tokens"]),
        gather(_temperature(batch)),
        learner.chunk,
        kept=kept,
        ids_bnk=gather(batch["top_ids"]) if "top_ids" in batch else None,
        layout=learner.program.layout,
        numerics=learner.program.numerics,
        **options,
    )
    *single, others = map(scatter, scores)
    single = [ratios.zero_padding(x, mask) for x in single]
    return Scores._make([*single, ratios.zero_padding(others, mask[..., None])])


def _dense_kl(params: Any, learner: Learner, batch: Batch, shadow_btd: jax.Array) -> jax.Array:
    """Computes KL(dense || shadow) [B,T] of the masked tokens at their temperatures; 0 elsewhere.

    The dense policy attends to all keys, the shadow to those that the sampler kept. Routes and noise
    of the batch, and recorded supports, are those of both. The gradient flows through the dense policy
    alone.

    Args:
      shadow_btd: [B,T,D] hidden states under `evict_step`.
    """
    x_btd = _forward(params, learner, {k: x for k, x in batch.items() if k != "evict_step"}).x
    gather_hidden, gather, scatter = _targets(batch["mask"], learner.max_targets)
    head, x_btd = transformer.output_head(params, learner.program, x_btd)
    _, shadow_btd = transformer.output_head(params, learner.program, shadow_btd)
    return scatter(token_kl(
        head, gather_hidden(x_btd), gather_hidden(shadow_btd),
        gather(_temperature(batch)), gather(batch["mask"]), learner.chunk,
        _kept(gather(batch["kept"])) if "kept" in batch else None,
    ))


def _temperature(batch: Batch) -> jax.Array:
    return jnp.where(batch["mask"], batch["temperature"], 1.0)


def _kept(ids_bnk: jax.Array) -> Kept:
    """Returns the supports of a Trajectory's `kept`; values at padding do not matter."""
    return Kept(ids_bnk, jnp.all(ids_bnk < 0, axis=-1))


def targets(batch: Batch) -> jax.Array:
    """Returns the tokens [...,T] whose log-probs an update needs: of the mask and of environments."""
    mask = batch["mask"]
    return mask | batch["environment"] if "environment" in batch else mask


def _targets(mask_bt: jax.Array, max_targets: int):
    """Returns three functions: from hidden states [B,T,D] to those [B,N,D] that predict the
    targets, from fields [B,T,...] to those of the targets [B,N,...], and from those back to [B,T,...].

    Token t is predicted from position t - 1. Where fewer tokens than T - 1 can be targets, the
    masked ones are gathered to the left; else N is T, and the row is shifted by one.
    """
    b, t = mask_bt.shape
    if max_targets >= t - 1:
        return lambda x: x, lambda x: jnp.roll(x, -1, axis=1), lambda x: jnp.roll(x, 1, axis=1)
    source_bn = jnp.argsort(~mask_bt[:, 1:], axis=1, stable=True)[:, :max_targets]
    rows = jnp.arange(b)[:, None]
    after = lambda ndim: source_bn.reshape(b, -1, *(1,) * (ndim - 2)) + 1
    return (
        lambda x_btd: jnp.take_along_axis(x_btd, source_bn[..., None], axis=1),
        lambda x: jnp.take_along_axis(x, after(x.ndim), axis=1),
        lambda x: jnp.zeros((b, t, *x.shape[2:])).at[rows, source_bn + 1].set(x),
    )


def response_scores(
    params: Any, learner: Learner, batch: Batch, with_entropy: bool, pulls_entropy: bool = True,
    asked: moe.Asked = moe.NOTHING, with_dense_kl: bool = False,
) -> Batch:
    """Computes `logp` and `entropy` [B,T] of the masked tokens at their temperatures and, where the
    batch has `top_ids`, `logp_top` [B,T,K] of these; 0 elsewhere. The tokens of `environment` count
    as masked, at temperature 1. Without `pulls_entropy` the entropies have no gradient. What was
    asked of the routers is under `routed`, a row first. With `with_dense_kl` also `dense_kl` [B,T]."""
    x_btd, _, routed = _forward(params, learner, batch, asked)
    scores = _score_targets(
        params, learner, batch, x_btd, with_entropy=with_entropy, pulls_entropy=pulls_entropy
    )
    fields: dict[str, Any] = {"logp": scores.logp, "entropy": scores.entropy}
    fields |= {"logp_top": scores.others} if "top_ids" in batch else {}
    fields |= {"dense_kl": _dense_kl(params, learner, batch, x_btd)} if with_dense_kl else {}
    return fields | ({} if routed is None else {"routed": _of_rows(routed)})


def response_logprobs(params: Any, learner: Learner, batch: Batch) -> jax.Array:
    """Computes the log-probs [B,T] of the masked tokens at their temperatures; 0 elsewhere."""
    return response_scores(params, learner, batch, with_entropy=False)["logp"]


def response_logits(params: Any, learner: Learner, batch: Batch) -> jax.Array:
    """Computes the logits [B,T,V] divided by the temperature, for each masked token; 0 elsewhere."""
    x_btd = _forward(params, learner, batch).x
    logits_btv = transformer.head_logits(params, learner.program, x_btd)
    before_btv = jnp.pad(logits_btv, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    mask_bt1 = batch["mask"][..., None]
    temperature_bt1 = jnp.where(mask_bt1, batch["temperature"][..., None], 1.0)
    return jnp.where(mask_bt1, before_btv / temperature_bt1, 0.0)


def prefix_values(params: Any, learner: Learner, batch: Batch) -> jax.Array:
    """Computes the critic's value [B,T] of the prefix before each token, float32. The critic's
    routers choose by themselves."""
    x_btd = transformer.rows_hidden(
        params["decoder"], learner.config, learner.program,
        batch["tokens"], batch["positions"], batch["segment_ids"], batch.get("evict_step"),
    )
    values_bt = jnp.einsum("btd,d->bt", x_btd.astype(jnp.float32), params["value"])
    return jnp.pad(values_bt, ((0, 0), (1, 0)))[:, :-1]


def make_score(
    learner: Learner, with_entropy: bool = True, with_routes: bool = False
) -> jax.stages.Wrapped:
    """Makes (params, batch [M, rows, ...]) -> {"logp", "entropy"} [M, rows, T], one micro-batch at
    a time. With `with_routes` also the routers' own choices: `routes` [M, rows, T, L, k]."""

    def score(params, micro):
        asked = moe.Asked(routes=with_routes)
        fields = response_scores(params, learner, micro, with_entropy, asked=asked)
        if with_routes:
            fields["routes"] = _as_recorded(learner, fields.pop("routed").ids)
        return fields

    return _by_micro_batch(learner, score)


def _by_micro_batch(learner: Learner, measure: Callable[[Any, Batch], Any]):
    """Makes the jitted (params, batch [M, rows, ...]) -> stacked measure(params, micro-batch); 0 for
    micro-batches with an empty mask."""

    def one(params, micro):
        zeros = zeros_like(jax.eval_shape(measure, params, micro))
        return jax.lax.cond(jnp.any(micro["mask"]), measure, lambda *_: zeros, params, micro)

    return jax.jit(
        lambda params, batch: jax.lax.map(lambda micro: one(params, micro), batch),
        compiler_options=learner.program.compiler_options,
    )


def _as_recorded(learner: Learner, ids: jax.Array) -> jax.Array:
    return ids.astype(route_dtype(learner.config.experts.num_experts))


def zeros_like(tree: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tree)


def make_collisions(learner: Learner) -> Callable[[Any, Batch], jax.Array]:
    """Makes (params, batch [M, rows, ...]) -> sum of pi^2 over the vocabulary at each masked token
    [M, rows, T], 0 elsewhere."""

    def collisions(params, micro):
        x_btd = _forward(params, learner, micro).x
        return _score_targets(params, learner, micro, x_btd, with_collision=True).collision

    return _by_micro_batch(learner, collisions)


def make_routing(learner: Learner) -> Callable[[Any, Batch], moe.Routed]:
    """Makes (params, batch [M, rows, ...]) -> what the routers do by themselves: their own choices
    `ids` [M, rows, T, L, k] and statistics [M, rows, L, ...]."""

    def routing(params, micro):
        asked = moe.Asked(routes=True, statistics=True)
        routed: Any = _forward(params, learner, without_replay(micro), asked).routed
        routed = _of_rows(routed)
        return dataclasses.replace(routed, ids=_as_recorded(learner, routed.ids))

    return _by_micro_batch(learner, routing)


def make_logits(learner: Learner) -> Callable[[Any, Batch], jax.Array]:
    """Makes (params, batch [M, rows, ...]) -> `response_logits` [M, rows, T, V]."""
    return _by_micro_batch(learner, lambda params, b: response_logits(params, learner, b))


def make_score_norms(learner: Learner) -> Callable[[Any, Batch], jax.Array]:
    """Makes (params, batch [M, rows, ...]) -> |grad sum_t log pi(y_t)|^2 of each row [M, rows], by
    a backward pass for each. Rows hold one sequence. The gradient is that of the trained parameters:
    of an adapter its factors."""

    def log_prob(params, row):
        return jnp.sum(response_logprobs(params, learner, row))

    def squared_norm(params, row):
        trained, base = lora.split(params)
        whole = (lambda x: x) if base is None else functools.partial(lora.join_like, params, base)
        one = jax.tree.map(lambda x: x[None], row)
        with learner.program.products():
            gradient = jax.grad(lambda x: log_prob(whole(x), one))(trained)
        return jnp.square(optax.global_norm(gradient))

    return _by_micro_batch(
        learner, lambda params, b: jax.lax.map(lambda row: squared_norm(params, row), b)
    )


def make_values(learner: Learner) -> Callable[[Any, Batch], jax.Array]:
    """Makes (critic params, batch [M, rows, ...]) -> values [M, rows, T]."""
    return _by_micro_batch(learner, lambda params, b: prefix_values(params, learner, b))
