"""Who generates when: sources of the batches that a run trains on; docs/async.md explains them."""

from jaxrl_tis.rollouts.groups import (
    Groups, Sample, components, kept_metrics, sampling_params, unknown_ids,
)
from jaxrl_tis.rollouts.prompts import Prompter, lacks_answer
from jaxrl_tis.rollouts.remote import Remote
from jaxrl_tis.rollouts.source import RolloutSource, run
from jaxrl_tis.rollouts.synchronous import Collector
from jaxrl_tis.rollouts.threads import Threads
from jaxrl_tis.rollouts.virtual import Asynchronous

__all__ = [
    "Asynchronous", "Collector", "Groups", "Prompter", "Remote", "RolloutSource", "Sample", "Threads",
    "components", "kept_metrics", "lacks_answer", "run", "sampling_params", "unknown_ids",
]
