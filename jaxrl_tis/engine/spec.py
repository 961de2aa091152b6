"""Everything static that the programs of an engine are compiled for."""

import dataclasses
from collections.abc import Callable

import jax

from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.shards import Shards
from jaxrl_tis.kernels import tiles
from jaxrl_tis.models import invariant, placement, quant, transformer
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.sharding import Layout

BLOCK_TOKENS = 256  # on a CPU larger blocks take no less time per token


@dataclasses.dataclass(frozen=True)
class Spec:
    """The model, the sizes and the mesh of an engine. `check` checks that they fit together.

    Attributes:
      model: architecture of the model.
      config: sizes and formats of the engine.
      program: how a forward pass is computed, and its mesh.
      inject: (logits [M,V] float32, positions [M]) -> logits, see injection.py.
      teacher: architecture of the model whose logits are mixed in, see fusion.py; None: no teacher.
    """

    model: ModelConfig
    config: EngineConfig
    program: transformer.Program
    inject: Callable[[jax.Array, jax.Array], jax.Array]
    teacher: ModelConfig | None = None

    @property
    def layout(self) -> Layout:
        assert self.program.layout is not None  # an engine has one
        return self.program.layout

    @property
    def shards(self) -> int:
        """The number of data shards. Each has an equal part of slots, prefill rows and pages."""
        return self.layout.shards

    @property
    def num_pages(self) -> int:
        """Pages of each shard, page 0 included."""
        config = self.config
        if config.num_pages is None:
            return config.slots // self.shards * config.pages_per_slot + 2
        return config.num_pages

    @property
    def num_penalised(self) -> int:
        """Tokens of the vocabulary whose logits requests may change: all or none."""
        return self.model.vocab_size if self.config.penalties else 0

    @property
    def num_logits(self) -> int:
        """Log-probs recorded of each sampled token: of the whole vocabulary or none."""
        return self.model.vocab_size if self.config.records_logits else 0

    @property
    def route_shape(self) -> tuple[int, int]:
        """(layers with experts, experts of a token) of recorded routes; (0, 0) without any."""
        if not self.config.record_routes:
            return 0, 0
        return self.model.num_moe_layers, self.model.experts.top_k

    @property
    def widths(self) -> dict[str, int]:
        """The number of entries per sampled token by attribute name, see fields.DrawnField."""
        config = self.config
        return dict(
            num_logits=self.num_logits, top_n=config.top_n, num_kept=config.num_kept,
            num_teachers=self.num_teachers,
        )

    @property
    def num_teachers(self) -> int:
        return int(self.teacher is not None)

    def block_rows(self, length: int) -> int:
        """Returns how many of a shard's prefill rows are computed at a time, a divisor of all.

        On a CPU a block has at least BLOCK_TOKENS tokens and blocks without a prompt are skipped,
        since late prompts come alone. The size of a block depends on the padded length alone, so
        batch composition changes no bit of a prompt.
        """
        rows = self.config.prefill_batch // self.shards
        if self.layout.platform != "cpu":
            return rows
        return next(n for n in range(1, rows + 1) if rows % n == 0 and n * length >= BLOCK_TOKENS
                    or n == rows)

    def check(self) -> None:
        """Raises ValueError where the sizes do not fit the mesh or each other."""
        config, mesh = self.config, dict(self.layout.mesh.shape)
        if config.record_routes and self.model.moe is None:
            raise ValueError(
                "engine.record_routes is set, and the model has no experts; set it to False"
            )
        models = [(self.model, config.recipe)]
        if self.teacher is not None:
            models += [(self.teacher, quant.Recipe(config.teacher_quantization))]
            placement.shardings(self.layout, self.teacher)
        for model, recipe in models:
            placement.check_experts(model, mesh["expert"])
            recipe.check(model, mesh["tensor"])
        for name in ("slots", "prefill_batch"):
            count = getattr(config, name)
            if count % self.shards:
                raise ValueError(
                    f"engine.{name}={count} cannot be cut into the {self.shards} data shards of "
                    f"mesh {mesh}; make it a multiple"
                )
        if self.num_pages < config.pages_per_slot + 2:
            raise ValueError(
                f"{self.num_pages} pages of {config.page_size} positions cannot hold a sequence of "
                f"{config.max_length}; give engine.num_pages at least {config.pages_per_slot + 2}"
            )
        vocab = self.model.vocab_size // Shards.of(self.layout).count
        if config.top_n > vocab:
            raise ValueError(
                f"top_n = {config.top_n} is above the {vocab} vocabulary entries of a device; "
                "lower it"
            )
        self._check_weighing()
        if config.page_size % mesh["context"]:
            raise ValueError(
                f"engine.page_size = {config.page_size} positions cannot be cut into the "
                f"{mesh['context']} context shards of mesh {mesh}; make it a multiple"
            )
        if self.program.is_invariant:
            for model, recipe in models:
                invariant.check(model, mesh, recipe.scheme)
            self._check_invariant()

    def _check_weighing(self) -> None:
        if (groups := self.config.page_groups) > self.model.num_layers:
            raise ValueError(
                f"engine.heavy_groups = {groups} is above the {self.model.num_layers} layers of the model; "
                "lower it"
            )
        reasons = {
            "scanned layers, whose kernel returns none; set engine.unroll to True":
                not self.config.unroll,
            "invariant numerics; set engine.numerics to 'fast'": self.program.is_invariant,
            "a teacher, which has attention of its own; set rollout.teacher to ''":
                self.teacher is not None,
            "context shards, which share the positions of a page; set that entry of mesh.serve to 1":
                self.layout.mesh.shape["context"] > 1,
        }
        for reason, is_so in reasons.items():
            if self.config.weighs_pages and is_so:
                raise ValueError(f"engine.heavy_pages needs the attention to each page, not with {reason}")

    def _check_invariant(self) -> None:
        config = self.config
        if config.page_size != tiles.PAGE:
            raise ValueError(
                f"numerics='invariant' needs pages of {tiles.PAGE} positions, and engine.page_size "
                f"is {config.page_size}; set it to {tiles.PAGE}"
            )
        if config.cache_dtype not in (config.dtype, "float32"):
            raise ValueError(
                f"numerics='invariant' needs a cache in {config.dtype} or float32, and "
                f"engine.cache_dtype is {config.cache_dtype}; set it to {config.dtype}"
            )
