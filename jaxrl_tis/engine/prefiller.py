"""Prefill of prompts chunk by chunk, many prompts in one call."""

from jaxrl_tis.engine.pages import NULL
from jaxrl_tis.engine.prefixes import Prefix, Prefixes
from jaxrl_tis.engine.protocol import Chunk, EngineProtocol, Insertion
from jaxrl_tis.engine.routes import PageRoutes
from jaxrl_tis.engine.runner import Runner
from jaxrl_tis.engine.sequences import Sequence
from jaxrl_tis.engine.stats import Stats


class Prefiller:
    """Fills the pages of prefixes, and returns the sequences that can be inserted.

    Args:
      engine: sizes, see EngineProtocol.
      runner: makes the calls.
      prefixes: tokens whose pages are to be filled.
      stats: where computed and cached prompt tokens are counted.
      routes: of the tokens in the pages.
    """

    def __init__(
        self, engine: EngineProtocol, runner: Runner, prefixes: Prefixes, stats: Stats,
        routes: PageRoutes,
    ):
        self._engine, self._runner = engine, runner
        self._prefixes, self._stats, self._routes = prefixes, stats, routes

    def run(self) -> bool:
        """Prefills the next chunk of the first prefixes, as many as fit into one call. Returns
        False if no prefix is left to fill."""
        unfilled = self._prefixes.unfilled()
        if not unfilled:
            return False
        chunks, prefixes = self._next_chunks(unfilled)
        if chunks:
            result = self._runner.prefill(chunks)
            if result.routes is not None:
                self._routes.write(chunks, result.rows, result.routes)
            for prefix, logps in zip(prefixes, result.logps or (), strict=False):
                if prefix.logps is not None:
                    prefix.logps.append(logps)
        return True

    def _next_chunks(self, unfilled: list[Prefix]) -> tuple[list[Chunk], list[Prefix]]:
        """Returns the chunks of the next call, and the prefix of each, marked as filled so far.

        All chunks of a call have one padded length, and all or none are scored: the first one
        decides.
        """
        engine, prefixes = self._engine, self._prefixes
        room = dict.fromkeys(range(engine.shards), engine.prefill_batch // engine.shards)
        next_tokens = lambda p: p.tokens[p.filled : p.filled + engine.prefill_chunk]
        kind = lambda p: (engine.bucket(len(next_tokens(p))), p.logps is None)
        chunks, chosen, kind_of_call = [], [], None
        for prefix in unfilled:
            if not room[prefix.shard]:
                continue
            self._stats.cached += prefixes.adopt(prefix)
            if prefix.is_filled or chosen and kind(prefix) != kind_of_call:
                continue
            kind_of_call = kind(prefix)
            room[prefix.shard] -= 1
            tokens, targets = next_tokens(prefix), None
            if prefix.logps is not None:
                targets = prefix.tokens[prefix.filled + 1 :][: engine.prefill_chunk]
            chunks.append(Chunk(prefix.shard, tokens, prefix.filled, prefix.pages, targets))
            chosen.append(prefix)
            prefixes.fill(prefix, len(tokens))
            self._stats.prefilled += len(tokens)
        return chunks, chosen

    def pop_filled(self) -> dict[Sequence, Insertion]:
        """Returns {sequence with a filled prompt: the insertion into its slot}. Samples of a prompt
        share all its pages except the last one, which each copies if it is not full."""
        rows = {}
        for prefix in self._prefixes.filled():
            is_partial = len(prefix.tokens) % self._engine.page_size > 0
            for sequence in prefix.waiters:
                copy = (prefix.pages[-1], sequence.pages[-1]) if is_partial else (NULL, NULL)
                rows[sequence] = sequence.insertion(sequence.length, copy)
                if sequence.routes is not None and any(self._engine.route_shape):
                    blocks = self._routes.of(sequence.shard, prefix.pages)
                    sequence.routes.filled(blocks, len(prefix.tokens))
                sequence.filled(self._runner.version)
                if sequence.needs_scores:
                    sequence.prompt_logps = prefix.prompt_logps()
            prefix.waiters = []
        return rows
