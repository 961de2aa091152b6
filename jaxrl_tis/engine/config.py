"""The sizes, number formats and recorded fields of an engine."""

import dataclasses

from jaxrl_tis.engine.injection import Injection
from jaxrl_tis.models import quant


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The sizes and number formats of an engine, and the fields that it records per token.

    Attributes:
      slots: sequences decoded together.
      max_length: prompt plus sampled tokens of a sequence.
      page_size: positions of a page of the cache.
      num_pages: pages of each data shard, page 0 included; None: every slot can hold a sequence
        of max_length.
      dtype: compute dtype; cache_dtype: dtype of keys and values, "int8" and
        "float8_e4m3fn" included.
      quantization: a name in `quant.SCHEMES`, for the layers' projections but `unquantized`.
      teacher_quantization: as `quantization`, of the teacher, see fusion.py.
      fp32_head: the output head in float32 at the highest precision.
      steps: decode steps per `generate` call.
      max_draft: longest draft of the `verify` program that `Engine.programs` returns; 0: none.
      prefill_batch: prompts per prefill call; prefill_chunk: most tokens of each.
      unroll: unroll the layers (faster on CPU and GPU) instead of scanning them (compiles one layer).
      joins_qkv: serve q, k and v of a layer as one matrix, `transformer.joined`: one product instead of
        three, for devices on which a product of few rows takes no less time. Not for adapted weights.
      records_logits: record the whole distribution of every token; for small models.
      penalties: accept requests with penalties, a bias or min_tokens. The engine then counts
        tokens per vocabulary entry in every slot.
      top_n: number of likeliest tokens recorded per sampled token.
      num_kept: record the tokens that the filters kept, if they are at most this many.
      record_routes: record the experts of every token, for a model that has some.
      weighs_pages: record the attention of decode steps to each page, for `KVEviction.heavy`. Only with
        unrolled layers: the kernel of scanned ones does not return it.
      page_groups: groups of consecutive layers with page tables of their own, see `KVEviction.groups`.
      numerics: "fast", or "invariant": the log-probs of a token do not depend on the other slots,
        the chunks of its prompt or the mesh, and equal those of a learner with these numerics.
      injected: an artificial gap, see injection.py.
    """

    slots: int
    max_length: int
    page_size: int = 16
    num_pages: int | None = None
    dtype: str = "float32"
    cache_dtype: str = "float32"
    quantization: str = "none"
    unquantized: tuple[str, ...] = ()
    teacher_quantization: str = "none"
    fp32_head: bool = False
    steps: int = 8
    max_draft: int = 0
    prefill_batch: int = 8
    prefill_chunk: int = 512
    unroll: bool = True
    joins_qkv: bool = False
    records_logits: bool = False
    penalties: bool = False
    top_n: int = 0
    num_kept: int = 0
    record_routes: bool = False
    weighs_pages: bool = False
    page_groups: int = 1
    numerics: str = "fast"
    injected: Injection = Injection()

    @property
    def recipe(self) -> quant.Recipe:
        return quant.Recipe(self.quantization, tuple(self.unquantized))

    @property
    def is_joined(self) -> bool:
        """Whether q, k and v are served as one matrix: they have one number format, and sums of any
        order will do."""
        is_alike = len(set(map(self.recipe.covers, ("q", "k", "v")))) == 1
        return self.joins_qkv and is_alike and self.numerics == "fast"

    @property
    def pages_per_slot(self) -> int:
        return -(-self.max_length // self.page_size)

    @property
    def table_shape(self) -> tuple[int, ...]:
        """The shape of the page table of all slots."""
        of_groups = (self.page_groups,) if self.page_groups > 1 else ()
        return self.slots, *of_groups, self.pages_per_slot

    @property
    def whole_chunk(self) -> int:
        """The longest chunk of a prompt: prefill_chunk rounded up to whole pages, and at most a
        whole sequence."""
        return -(-min(self.prefill_chunk, self.max_length) // self.page_size) * self.page_size
