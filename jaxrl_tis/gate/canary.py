"""A fixed prompt, scored by learner and sampler at every weight sync, before a token is sampled.

A sampler whose adapter is old or absent samples from another policy, and nothing else says so at
once. The check has two parts. After the prompt, the distributions of the first sampled token must be
within bounds: d = sum_v p_behav |logp_old - logp_behav|, the expectation of the gate's d at this token,
within `gate.max_d_p99`, the bound for single tokens, and max_v |p_old - p_behav| within
`gate.max_dp_max`. An int8 sampler can exceed them at a single token: then `PROMPTS` prompts are scored,
and their medians must be within the bounds. Positions inside a prompt do not count: no token is sampled
there, and the policy is not trained on them. With LoRA the served factors must also have the fingerprint
of the learner's: an update may move distributions by less than the bounds.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_tis.build import Setup
from jaxrl_tis.engine.weights import sent
from jaxrl_tis.runtime.cli import MismatchError
from jaxrl_tis.models import overflow, transformer
from jaxrl_tis.runtime import fingerprint

WHEN = ("lora", "always", "never")  # choices of rollout.canary
PROMPTS = 9


def is_on(setup: Setup) -> bool:
    """Whether rollout.canary asks for the check in this run."""
    when = setup.config.rollout.canary
    return when == "always" or (when == "lora" and setup.training.adapter is not None)


class Canary:
    """Checks serving parameters against the policy's.

    Args:
      prompts: token ids of each prompt. The first is scored at every sync.
    """

    def __init__(self, setup: Setup, prompts: Sequence[Any]):
        self._setup, self._prompts = setup, prompts
        programs = setup.training.learner.program, setup.engine.program
        self._learner, self._sampler = (
            jax.jit(functools.partial(_log_probs, setup.model, p), compiler_options=p.compiler_options)
            for p in programs
        )

    def checked(self, serving_params: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        """Returns `serving_params`, which then checks what it returns."""

        def served(params, version):
            found = serving_params(params, version)
            self.check(params, found, version)
            return found

        return served

    def check(self, params: Any, served: Any, version: int) -> None:
        """Compares the policy's parameters with the serving ones, or with a list of them for each
        sampler.

        Raises:
          MismatchError: a sampler has an old or no adapter, or the distributions are too far apart.
          FloatingPointError: see `measured`.
        """
        setup, bounds = self._setup, self._setup.config.gate
        parts = served if isinstance(served, list) else [served]
        if setup.training.adapter is not None:
            expected = setup.engine.factor_digest(params)
            for part in parts:
                if (found := fingerprint.hex(fingerprint.digest(sent(part)[0]))) != expected:
                    raise MismatchError(
                        f"the sampler's adapter is old or absent: at version {version} its factors "
                        f"have the fingerprint {found}, and the learner's {expected}; the run stops "
                        "before it samples"
                    )
        # The first sampler alone: fingerprints compare the others with it.
        measured = [self.measured(params, parts[0], self._prompts[0])]
        if not self._is_within(*measured[0]):
            measured += [self.measured(params, parts[0], ids) for ids in self._prompts[1:]]
        d, dp_max = np.median(measured, axis=0)
        if not self._is_within(d, dp_max):
            raise MismatchError(
                f"at version {version} sampler and learner disagree on {len(measured)} fixed prompts: "
                f"median d {d:.3g} (gate.max_d_p99 = {bounds.max_d_p99:g}), median dp_max {dp_max:.3g} "
                f"(gate.max_dp_max = {bounds.max_dp_max:g}); the run stops before it samples. "
                "`python -m jaxrl_tis.gate` splits the gap by cause"
            )

    def _is_within(self, d: float, dp_max: float) -> bool:
        bounds = self._setup.config.gate
        return d <= bounds.max_d_p99 and dp_max <= bounds.max_dp_max

    def measured(self, params: Any, served: Any, ids: Any) -> tuple[float, float]:
        """Returns (d, dp_max) of the token after a prompt, see the head of the file. Raises
        FloatingPointError where a log-prob of it is not finite."""
        setup = self._setup
        learned = self._scored(self._learner, setup.training.layout, params, ids)
        sampled = self._scored(self._sampler, setup.engine.layout, served, ids)
        for whose, logp_v, weights, program in (
            ("learner", learned, params, setup.training.learner.program),
            ("sampler", sampled, served, setup.engine.program),
        ):
            if not np.isfinite(logp_v).all():
                raise FloatingPointError(
                    f"log-probs of the {whose} after a fixed prompt are not finite: "
                    f"{overflow.cause(weights, setup.model, program, ids)}; the run stops before it samples"
                )
        return distances(learned, sampled)

    def _scored(self, program: Any, layout: Any, params: Any, ids: list[int]) -> np.ndarray:
        """Returns the log-probs [V] of the token after a prompt."""
        longest = max(map(len, self._prompts))  # one program for all prompts
        rows = np.zeros((layout.shards, layout.whole_row(longest)), np.int32)
        rows[:, : len(ids)] = ids
        tokens = layout.put(rows, ("batch", None))
        return layout.fetch(program(params, tokens, len(ids) - 1))[0]


def distances(learned_v: np.ndarray, sampled_v: np.ndarray) -> tuple[float, float]:
    """Returns (d, dp_max) of two log-probs [V], see the head of the file."""
    p_v = np.exp(sampled_v)
    d = np.sum(p_v * np.abs(learned_v - sampled_v))
    return float(d), float(np.abs(np.exp(learned_v) - p_v).max())


def _log_probs(model, program, params, tokens_bt, position) -> jax.Array:
    """Returns the log-probs [B,V] of the token after a position."""
    logits_btv = transformer.logits(params, model, tokens_bt, program=program)
    return jax.nn.log_softmax(jnp.take(logits_btv, position, axis=1))
