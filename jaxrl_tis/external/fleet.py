"""The engines of rollout.engines as one sampler of a run: their clients, the folder of weights, the canary."""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from jaxrl_tis.external import canary
from jaxrl_tis.external.client import Client, EngineError
from jaxrl_tis.external.protocol import Facts, Kind
from jaxrl_tis.external.scheduler import ExternalScheduler, Member
from jaxrl_tis.external.sglang import Sglang
from jaxrl_tis.external.vllm import Vllm
from jaxrl_tis.external.weights import Folder, Version
from jaxrl_tis.learner.state import abstract_params
from jaxrl_tis.runtime import addresses, processes

KINDS: dict[str, type[Vllm] | type[Sglang]] = {"vllm": Vllm, "sglang": Sglang}


class Fleet:
    """See above. `setup` is the run's. ValueError where an engine cannot sample for it."""

    def __init__(self, setup: Any):
        rollout, engine = setup.config.rollout, setup.engine
        self._setup = setup
        if not processes.is_alone():
            raise ValueError(
                "rollout.driver = 'external' has one learner process, and this run has "
                f"{jax.process_count()}; use one host, or rollout.driver = 'ray'"
            )
        if engine.num_logits:
            raise ValueError(
                "the correction needs the whole distribution of the sampler, which engines of others do "
                "not record; choose another one, or another rollout.driver"
            )
        self._members = [
            Member(url, connect(url, rollout.engine_kind, rollout))
            for url in addresses.urls(rollout.engines)
        ]
        self._top_n = canary.TOP
        for member in self._members:
            try:
                facts = self._facts(member)
            except EngineError as error:
                raise ValueError(f"rollout.engines: {error}") from error
            if facts.max_logprobs is not None and facts.max_logprobs >= 0:
                self._top_n = min(self._top_n, facts.max_logprobs)
        self._folder = Folder(rollout.weights_folder, setup.model, engine.config.dtype)
        self._canary: Any = None
        self._newest: Version | None = None

    @property
    def size(self) -> int:
        """The number of engines."""
        return len(self._members)

    def watch(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begins a run: takes the folder of weights, and makes the canary of these prompts, token ids each.
        ValueError where an engine has another tokenizer, or the folder has no room or is in use."""
        setup, config = self._setup, self._setup.config
        self._check_tokenizers(setup.tokenizer.decode(prompts[0]))
        self._folder.open()
        self._folder.check_room(abstract_params(setup.training))
        self._newest = None
        self._canary = canary.Canary(
            setup.model, setup.training.learner.program, setup.training.layout, prompts,
            setup.engine.max_length, config.rollout.temperature, config.gate.max_d_p99,
            config.gate.max_dp_max, setup.engine.route_shape,
        )

    def close(self) -> None:
        """Ends a run: another one may use the folder."""
        self._folder.close()

    def _facts(self, member: Member) -> Facts:
        """Returns what an engine says of itself. EngineError where it cannot sample for this run."""
        engine, vocab_size = self._setup.engine, self._setup.model.vocab_size
        facts = member.kind.facts()
        if found := canary.problems(
            facts, member.url, vocab_size, engine.max_length, engine.config.dtype, engine.top_n
        ):
            raise EngineError(found[0])
        return facts

    def _check_tokenizers(self, text: str) -> None:
        ids = [*map(int, self._setup.tokenizer.encode(text))]
        for member in self._members:
            try:
                found = canary.other_ids(member.kind, member.url, text, ids)
            except EngineError as error:
                raise ValueError(f"rollout.engines: {error}") from error
            if found:
                raise ValueError(found[0])

    def serving_params(self, params: Any, version: int) -> Version:
        """Writes a version of the policy for the engines, once."""
        if self._newest is None or self._newest.version != version:
            path, adapter = self._folder.write(params, version)
            self._newest = Version(path, version, adapter, self._canary.expected(params, version))
        return self._newest

    def scheduler(self, served: Version, version: int) -> ExternalScheduler:
        """Makes the scheduler that samples with all engines. Only one may have requests at a time."""

        def check(member: Member, served: Version) -> None:
            if member.reason is not None:
                self._facts(member)  # it may have started again with other settings
            self._canary.check(
                member.url, member.kind, member.adapter, served.version, served.expected, self._top_n
            )

        patience = self._setup.config.rollout.start_timeout
        return ExternalScheduler(self._members, self._setup.engine, served, version, check, patience)


def connect(url: str, kind: str, rollout: Any) -> Kind:
    """Returns the client of an engine, with the timeout and the token of config.rollout."""
    token = None
    if path := rollout.engine_token_file:
        try:
            token = pathlib.Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ValueError(
                f"rollout.engine_token_file = {path!r} cannot be read ({error}); give the file that the "
                "engine was started with"
            ) from error
    return KINDS[kind](Client(url, rollout.worker_timeout, token))
