"""The rollout engine: prefill, insert and generate over fixed slots and pages of keys and values.

This module is the host's side: it lays requests into arrays and calls the jitted functions of
programs.py. A prompt is prefilled in chunks into pages that its samples share. Its last token is
then the first input of decode, so one decode program samples every token, the first included.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis import sharding
from jaxrl_tis.engine import fusion
from jaxrl_tis.engine.config import EngineConfig
from jaxrl_tis.engine.penalties import Penalties
from jaxrl_tis.engine.programs import Programs
from jaxrl_tis.engine.protocol import Chunk, Insertion, Prefilled, ResultTokens
from jaxrl_tis.engine.records import MAX_STOP_IDS, SamplingParams
from jaxrl_tis.engine.sampling import SamplingRows
from jaxrl_tis.engine.spec import Spec
from jaxrl_tis.engine.state import DecodeState, Slots
from jaxrl_tis.engine.weights import Weights
from jaxrl_tis.models import lora, overflow, placement, quant, transformer, transforms
from jaxrl_tis.models.config import ModelConfig
from jaxrl_tis.sharding import Layout, single_device


class Engine:
    """One model on fixed slots. Holds no parameters and no cache: callers pass both to each call.

    Args:
      model: architecture of the model.
      config: sizes, formats and the recorded fields per sampled token.
      layout: mesh and rules; None runs on one device.
      teacher: architecture of the model whose logits are mixed into the policy's, see fusion.py.

    Raises:
      ValueError: the sizes do not fit the mesh or each other.
    """

    max_stop_ids = MAX_STOP_IDS

    def __init__(
        self, model: ModelConfig, config: EngineConfig, layout: Layout | None = None,
        teacher: ModelConfig | None = None,
    ):
        self.model, self.config, self.teacher = model, config, teacher
        self.layout = layout or single_device()
        self.program = transformer.Program(
            dtype=config.dtype, fp32_head=config.fp32_head, layout=self.layout,
            numerics=config.numerics,
        )
        self._spec = Spec(model, config, self.program, config.injected.logits, teacher)
        self._spec.check()
        self.slots, self.max_length, self.steps = config.slots, config.max_length, config.steps
        self.page_size, self.pages_per_slot = config.page_size, config.pages_per_slot
        self.prefill_batch, self.prefill_chunk = config.prefill_batch, config.whole_chunk
        self.top_n, self.num_kept = config.top_n, config.num_kept
        self.shards, self.vocab_size = self.layout.shards, model.vocab_size
        self.num_pages, self.num_logits = self._spec.num_pages, self._spec.num_logits
        self.num_penalised, self.route_shape = self._spec.num_penalised, self._spec.route_shape
        self.num_teachers, self.weighs_pages = self._spec.num_teachers, config.weighs_pages
        self.num_experts = model.moe.num_experts if model.moe else 0
        self.quant_id = config.recipe.id if config.quantization != "none" else config.dtype
        self._weights = Weights(
            model, config.recipe, self.program, config.unroll, config.injected.weights, config.is_joined
        )
        self._of_teacher = None if teacher is None else Weights(
            teacher, quant.Recipe(config.teacher_quantization), self.program, config.unroll,
            is_joined=config.is_joined,
        )
        self._programs = Programs(self._spec)

    # Parameters

    def load(
        self, params: transformer.Params, noise: transforms.Noise | None = None
    ) -> transformer.Params:
        """Turns the learner's parameters into serving parameters, see weights.Weights."""
        return self._weights.load(params, noise)

    def load_teacher(self, params: transformer.Params) -> transformer.Params:
        """Returns the serving parameters of the teacher. `fusion.Pair(load(...), load_teacher(...))` is
        what the programs of an engine with a teacher take."""
        assert self._of_teacher is not None
        return self._of_teacher.load(params)

    def receive(self, served: transformer.Params) -> transformer.Params:
        """Returns the serving parameters of another engine on this one's devices."""
        return self._weights.receive(served)

    @property
    def serving_shardings(self) -> Any:
        """The shardings of serving parameters, in their tree."""
        return self._weights.shardings

    def factor_digest(self, params: transformer.Params) -> str:
        """Returns the fingerprint that the served factors of adapted parameters must have."""
        return self._weights.factor_digest(params)

    def abstract_factors(self, adapter: lora.Adapter) -> Any:
        """Returns the shapes and shardings of the served factors of LoRA."""
        return self._weights.abstract_factors(adapter)

    def shardings_in(self, layout: Layout) -> Any:
        """Returns the shardings of serving parameters in the learner's layout, before they move."""
        return self._weights.shardings_in(layout)

    def abstract_params(self) -> Any:
        """Returns the shapes and shardings of serving parameters."""
        return _served(self._weights, self._abstract(self.model))

    def _abstract(self, model: ModelConfig) -> Any:
        """Returns the shapes of a model's unserved parameters in the serving layout."""
        return _abstract(transformer.abstract_params(model), placement.shardings(self.layout, model))

    def _abstract_state(self) -> DecodeState:
        return _abstract(jax.eval_shape(self._programs.empty_state), self._programs.shardings)

    def _abstract_teacher(self) -> Any:
        assert self.teacher is not None and self._of_teacher is not None
        return _served(self._of_teacher, self._abstract(self.teacher))

    @functools.cached_property
    def device_bytes(self) -> dict[str, int]:
        """What serving takes on each device, in bytes, by name: "policy", "teacher" and "keys and
        values", which are those of both."""
        trees = {"policy": self.abstract_params(), "keys and values": self._abstract_state().cache}
        if self.num_teachers:
            trees["teacher"] = self._abstract_teacher()
        return {name: sharding.device_bytes(tree) for name, tree in trees.items()}

    def non_finite(self, params: transformer.Params, tokens: np.ndarray) -> str:
        """Returns where the values of a sequence stop being finite, see overflow.cause."""
        if not isinstance(params, fusion.Pair):
            return overflow.cause(params, self.model, self.program, tokens)
        found = overflow.cause(params.student, self.model, self.program, tokens)
        if found:
            return found
        assert self.teacher is not None
        found = overflow.cause(params.teacher, self.teacher, self.program, tokens)
        return f"in the teacher {found}" if found else ""

    # Prefill

    def bucket(self, length: int) -> int:
        """Returns the padded length of a chunk: the next of 1, 2, 3, 4, 6, 8, 12, ... pages."""
        pages, needed = 1, -(-length // self.page_size)
        while pages < needed:
            pages = pages * 3 // 2 if pages & (pages - 1) == 0 and pages > 1 else -(-pages * 4 // 3)
        return min(pages * self.page_size, self.prefill_chunk)

    def prefill(
        self, params, state: DecodeState, chunks: list[Chunk], temperature: float = 1.0
    ) -> tuple[DecodeState, Prefilled]:
        """Writes the keys of the chunks, at most prefill_batch / shards of each shard.

        Chunks have targets or have none, all alike. The log-probs of targets are those of the
        model's own logits at this temperature.
        """
        rows, arrays = self._chunk_rows(chunks)
        if chunks[0].targets is None:
            most = max(np.bincount([c.shard for c in chunks]))
            blocks = -(-most // self._spec.block_rows(arrays[0].shape[1]))
            state, routes = self._programs.prefill(params, state, *arrays, np.int32(blocks))
            return state, Prefilled(None, routes, rows)
        targets = np.zeros(arrays[0].shape, np.int32)
        for row, chunk in zip(rows, chunks, strict=True):
            if chunk.targets is not None:
                targets[row, : len(chunk.targets)] = chunk.targets
        state, logps, routes = self._programs.prefill_scored(
            params, state, *arrays, self.layout.put(targets, ("batch", None)), np.float32(temperature)
        )
        logps = np.asarray(logps)
        of_chunks = [
            logps[row, : len(chunk.tokens)] for row, chunk in zip(rows, chunks, strict=True)
        ]
        return state, Prefilled(of_chunks, routes, rows)

    def _chunk_rows(self, chunks: list[Chunk]) -> tuple[list[int], tuple]:
        """Lays chunks into the rows of a prefill call.

        Returns: the row of each chunk, and (tokens [R,T], starts [R], lengths [R], table [R,P]).
        """
        per_shard = self.prefill_batch // self.shards
        length = self.bucket(max(len(c.tokens) for c in chunks))
        tokens = np.zeros((self.prefill_batch, length), np.int32)
        starts, lengths = (np.zeros(self.prefill_batch, np.int32) for _ in range(2))
        table = np.zeros((self.prefill_batch, self.pages_per_slot), np.int32)
        counts, rows = [0] * self.shards, []
        for chunk in chunks:
            row = chunk.shard * per_shard + counts[chunk.shard]
            counts[chunk.shard] += 1
            rows.append(row)
            tokens[row, : len(chunk.tokens)] = chunk.tokens
            starts[row], lengths[row] = chunk.start, len(chunk.tokens)
            table[row, : len(chunk.pages)] = chunk.pages
        put = lambda x: self.layout.put(x, ("batch",) + (None,) * (x.ndim - 1))
        return rows, tuple(map(put, (tokens, starts, lengths, table)))

    # Insert

    def init_state(self) -> DecodeState:
        """Returns free slots and empty pages, each device with its own part."""
        return self._programs.init()

    def insert(self, state: DecodeState, rows: dict[int, Insertion]) -> DecodeState:
        """Puts sequences into slots."""
        return self._programs.insert(state, *self._insert_arrays(rows))

    def _insert_arrays(self, rows: dict[int, Insertion]) -> tuple:
        """Lays insertions into the arguments of the insert program.

        Returns: (content of the slots, seeds [B], hashes [B], source pages [B], target pages [B],
        which slots are new [B], the tokens that penalties count).
        """
        b = self.slots
        is_new = np.zeros(b, bool)
        token, position, remaining, cached = (np.zeros(b, np.int32) for _ in range(4))
        seeds, hashes = (np.zeros(b, np.uint32) for _ in range(2))
        stop_ids = np.full((b, self.max_stop_ids), -1, np.int32)
        copies = np.zeros((2, b), np.int32)
        tokens = np.zeros((b, self.max_length if self.num_penalised else 0), np.int32)
        prompts = np.zeros(b, np.int32)
        params = [SamplingParams()] * b
        for slot, row in rows.items():
            sampling, is_new[slot] = row.request.sampling, True
            token[slot], position[slot] = row.tokens[-1], len(row.tokens) - 1
            remaining[slot], cached[slot] = row.remaining, row.cached
            seeds[slot], hashes[slot] = row.request.seed & 0xFFFFFFFF, row.request.hash
            stop_ids[slot, : len(sampling.stop_ids)] = sampling.stop_ids
            copies[:, slot] = row.copy
            params[slot], prompts[slot] = sampling, len(row.request.prompt)
            if self.num_penalised:
                tokens[slot, : len(row.tokens)] = row.tokens
        penalties = Penalties.of(params) if self.num_penalised else None
        new = Slots(
            token, position, remaining, cached, None, stop_ids, SamplingRows.of(params), penalties
        )
        return new, seeds, hashes, *copies, is_new, (tokens, prompts, position + 1)

    def release(self, state: DecodeState, slots: list[int]) -> DecodeState:
        """Stops the given slots, which frees them for the next insert."""
        is_left = np.isin(np.arange(self.slots), slots)
        remaining = jnp.where(is_left, 0, state.slots.remaining)
        return DecodeState(state.cache, dataclasses.replace(state.slots, remaining=remaining))

    # Generate

    def generate(
        self, params, state: DecodeState, table: np.ndarray, shift: np.ndarray
    ) -> tuple[DecodeState, ResultTokens]:
        """Samples up to `steps` tokens for every running slot. Its pages must have room for
        them."""
        return self._programs.generate(params, state, table, shift)

    def verify(
        self, params, state: DecodeState, drafts: np.ndarray | jax.Array, counts: np.ndarray | jax.Array,
        table: np.ndarray, shift: np.ndarray,
    ) -> tuple[DecodeState, ResultTokens]:
        """Runs one pass over the last token of every running slot and its draft.

        A token is sampled after each of these as long as the draft agrees, so at least one and at
        most counts + 1. In the result K is n + 1.

        Args:
          drafts: [slots, n] int32 drafted tokens.
          counts: [slots] int32, how many of them each slot has.
        """
        return self._programs.verify(params, state, drafts, counts, table, shift)

    def draft(
        self, params, state: DecodeState, slots: Slots, table: np.ndarray, shift: np.ndarray
    ) -> tuple[DecodeState, jax.Array, jax.Array]:
        """Drafts `steps` - 1 tokens for every running slot of an engine with pages at the same places, see
        drafter.py. Returns (state, drafts [slots, steps - 1], how many of them each slot has)."""
        kv, drafts, counts = self._programs.draft(params, state.cache, slots, table, shift)
        return DecodeState(kv, state.slots), drafts, counts

    # Programs from shapes alone

    def programs(
        self, params: transformer.Params | None = None, slots: Slots | None = None
    ) -> dict[str, tuple[Any, tuple]]:
        """Returns every jitted program with abstract arguments: `fn.lower(*args)` allocates
        nothing.

        Args:
          params: the learner's abstract parameters with their shardings; None takes float32 in the
            serving layout.
          slots: of another engine for which this one drafts; None: it does not.

        With LoRA "load" is that of the base, which runs once.

        Returns: {"load", "prefill", "insert", "decode", "verify" if there are drafts, "draft" with
        `slots`} -> (jitted function, arguments). Prompts are of the largest bucket, drafts as long as they
        may be.
        """
        if params is None:
            params = self._abstract(self.model)
        base = lora.split(params)[1]
        programs, learned = self._programs, params if base is None else base
        load = self._weights.loader(learned)
        serving = _served(self._weights, learned)
        if base is not None:
            adapter = lora.adapter_of(params, self.model)
            serving = adapter.join(serving, self.abstract_factors(adapter))
        if self.num_teachers:
            serving = fusion.Pair(serving, self._abstract_teacher())
        state = self._abstract_state()
        r, table = self.prefill_batch, (self.pages_per_slot,)
        host = lambda *shape: np.zeros(shape, np.int32)
        rows = host(r, self.prefill_chunk), host(r), host(r), host(r, *table)
        pages = host(*self.config.table_shape), host(self.slots)
        drafts = host(self.slots, self.config.max_draft), host(self.slots)
        named = {
            "load": (load, (learned,)),
            "prefill": (programs.prefill, (serving, state, *rows, host())),
            "insert": (programs.insert, (state, *self._insert_arrays({}))),
            "decode": (programs.generate, (serving, state, *pages)),
        }
        if self.config.max_draft:
            named["verify"] = programs.verify, (serving, state, *drafts, *pages)
        if slots is not None:
            named["draft"] = programs.draft, (serving, state.cache, slots, *pages)
        return named


def _served(weights: Weights, params: Any) -> Any:
    """Returns the shapes and shardings of what serves parameters of these."""
    return _abstract(jax.eval_shape(weights.loader(params), params)[0], weights.shardings)


def _abstract(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
