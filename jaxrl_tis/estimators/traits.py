"""What a method is and needs beyond its formula.

`@Traits(...)` stands above the function of a method whose traits are not the defaults. Checks of a
config, the loss and the pages read them with `of`. No other file lists methods by name.
"""

import dataclasses
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True)
class Traits:
    """Properties of a method.

    Attributes:
      needs: batch fields that its function takes by keyword, beyond the arguments of its table.
      example: a value for each parameter that has no published one, for tests and tables.
      of_versions: it tells versions of the weights apart, so all tokens of one version are no use.
      of_policy: it looks at the policy that is updated, not at an average of its weights.
      centering: how score centering knows its weight of a token that was not sampled. "ratio": at
        every ratio. "one": where the ratio is 1. "": not at all.

    Of a weight:
      level: of its ratio, a key of `weights.RAW`; it counts once for each token or sequence.
      is_bounded_ratio: it is the raw ratio of `level`, changed by its bounds alone.
      unbounded: bounds with names of its own, with the values at which they do nothing.

    Of a mask or an objective:
      ranks: it compares the tokens of a whole batch.

    Of a mask:
      at_update: its statistic holds the policy that is trained. It is judged at every update, with
        log_ratio = logp - logp_behav. Others judge the sampler's gap, once for a rollout batch.

    Of an objective:
      of_mixture: it is of samples that a teacher and the policy draw together.
      has_ratio: it has a ratio of the policy that is trained. One without counts the gap by `weight`.
      reads_old: it looks at logp_old.
      weighs_itself: a factor of its own stands for the sampler's gap, beside its ratio.
      takes_weight: it may be multiplied by an importance weight.
      is_grouped: it computes something of all samples of a prompt; or the `form` that does.
      is_per_sequence: each token has something of the whole sequence, so that its gradient does not
        fall with the length.

    Of an advantage:
      compares: it compares the samples of a group, and needs two or more.
      of_components: it looks at the components of the reward and not at their sum.
      of_batch: it looks at all groups of a batch.
      per_token: it gives a token the rewards from it on, and so credits turns by itself.
      of_sequences: its inputs are of whole sequences, and turns have none.
    """

    needs: tuple[str, ...] = ()
    example: Mapping[str, float] = dataclasses.field(default_factory=dict)
    of_versions: bool = False
    of_policy: bool = False
    centering: str = ""
    level: str = "token"
    is_bounded_ratio: bool = True
    unbounded: Mapping[str, float] = dataclasses.field(default_factory=dict)
    at_update: bool = False
    ranks: bool = False
    of_mixture: bool = False
    has_ratio: bool = True
    reads_old: bool = True
    weighs_itself: bool = False
    takes_weight: bool = True
    is_grouped: bool | str = False
    is_per_sequence: bool = False
    compares: bool = True
    of_components: bool = False
    of_batch: bool = False
    per_token: bool = False
    of_sequences: bool = False

    def __call__(self, function: Callable) -> Callable:
        """Returns the function, which has these traits now."""
        function.traits = self  # type: ignore[attr-defined]
        return function


DEFAULT = Traits()


def of(function: Callable | None) -> Traits:
    """Returns the traits of a method's function, the defaults for None."""
    return getattr(function, "traits", DEFAULT)
