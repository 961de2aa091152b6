"""The second table of the referee: every method of the literature with its published settings.

    ./launch/figures.sh referee_objectives  # docs/referee.md has the protocol

An arm is "GAP/long/METHOD", in the parts `PARTS` of configs/fig_referee.py: the same models, prompts and
start. The fields of a method are those of its source; docs/methods.md names them. What a source leaves open
is that of `fig_referee.get_config`: GRPO's advantage, token-mean, no weight.

A method is around the sampler (`SAMPLER`) where its source has the sampler in the denominator. The others have
the learner's own log-probs, and do not see the gap of a synchronous sampler. In the part with age both are the
same ratio, as its sampler is exact: all are around the sampler there, but those of `AGE`.
"""

from configs import fig_referee
from configs.fig_referee import get_config as get_config
from jaxrl_tis.sweep import Arm

PARTS = ("noise/long", "stale/long", "int8/long")
SEEDS = tuple(range(4))
SAMPLER: Arm = {"correction.centre": "behav"}
PER_RESPONSE: Arm = {"correction.aggregation": "seq-mean-token-mean"}
TRAJECTORY: Arm = {"correction.aggregation": "seq-mean-token-sum"}
NO_STD: Arm = {"correction.advantage": "dr_grpo"}
# Both updates of a step are of the whole batch, as the groups of a prompt must not be split.
WHOLE: Arm = {"train.minibatches": 1, "train.epochs": 2, "train.microbatch_rows": 256}
DPPO = SAMPLER | NO_STD | {"correction.aggregation": "seq-mean-token-sum-norm"}
UNCLIPPED = "ppo(clip_low=1.0, clip_high=inf)"


def _objective(text: str) -> Arm:
    return {"correction.objective": text}


def _weight(text: str) -> Arm:
    return {"correction.weight": text}


def _mask(text: str) -> Arm:
    return {"correction.masks": text}


NONE = "none"
# What the methods are compared with: no correction, and two presets with the clip of the first table.
BASES: dict[str, Arm] = {
    NONE: {},
    "tis_2": _weight("token_tis(cap=2.0)"),
    "async": _weight("token_mis(upper=5.0)"),
}
NAMED: dict[str, Arm] = {
    "GMPO": _objective("gmpo") | PER_RESPONSE,
    "GPG": _objective("gpg") | {"correction.advantage": "gpg"},
    "CISPO": _objective("cispo"),
    "SAPO": _objective("sapo") | PER_RESPONSE,
    "DPPO-TV": _objective("dppo_tv") | DPPO,
    "DPPO-KL": _objective("dppo_kl") | DPPO,
    "Clip-Cov": _objective("clip_cov(clip_low=1.0, clip_high=1.0)"),
    "KL-Cov": _objective("kl_cov"),
    "TOPR": _objective("topr") | SAMPLER | TRAJECTORY,
    "ASPO": _objective("aspo"),
    "MinPRO": _objective("minpro") | SAMPLER,
    "CTPO": _objective("ctpo") | _weight("seq_tis(cap=5.0)"),
    "M2PO": _objective("m2po") | SAMPLER,
    "VESPO": _objective("vespo") | SAMPLER,
    "OAPL": _objective("oapl") | SAMPLER | PER_RESPONSE | {"correction.advantage": "oapl"},
    "OAPL schedule": _objective("oapl") | SAMPLER | PER_RESPONSE | {
        "correction.advantage": "oapl", "rollout.schedule": "oapl(lag=20)",
    },
    "R2VPO": _objective("r2vpo(r2vpo_lambda=0.04)"),
    "DISPO": _objective(
        "dispo(dispo_low_pos=1.0, dispo_high_pos=4.0, dispo_low_neg=0.8, dispo_high_neg=0.28)"
    ),
    "QUATRO": _objective("quatro(quatro_delta=0.1, quatro_floor=0.001)") | NO_STD | WHOLE,
    "TRM": _mask("trm(trm_delta=0.0001)"),
    "ST-PPO": _objective("st_ppo") | PER_RESPONSE,
    "ESPO": _objective("espo(vocab_size=19)") | PER_RESPONSE,
    "TBPO": _objective("tbpo") | _weight("seq_tis(cap=2.0)") | PER_RESPONSE,
    "OTB": _weight("token_tis(cap=2.0)") | {"correction.advantage": "otb"},
    "OPOB": _objective(UNCLIPPED) | _weight("seq_tis(cap=8.0)") | PER_RESPONSE | {
        "correction.advantage": "opob", "correction.controllers": "ess_scale",
    },
    "ALP": _objective("ppo(clip_low=0.5, clip_high=3.0)") | SAMPLER | {
        "correction.controllers": "layerwise_perturbation",
    },
    "OPSM 0.5": _mask("opsm(opsm_delta=0.5)"),
    "OPSM 1e-4": _mask("opsm(opsm_delta=0.0001)"),
}
# The objectives that no other figure trains.
OTHERS: dict[str, Arm] = {
    "dual clip": _objective("dual_clip"),
    "A-3PO": _objective("a3po"),
    "QuRL": _objective("qurl_acr"),
    "sequence PPO": _objective("seq_ppo") | PER_RESPONSE,
    "GSPO": _objective("gspo") | PER_RESPONSE,
    "GSPO-token": _objective("gspo_token") | PER_RESPONSE,
    "LUSPO": _objective("luspo") | PER_RESPONSE,
    "Turn-PPO": _objective("turn_ppo") | PER_RESPONSE,
    "DIS": _objective("dis") | SAMPLER,
    "TOPR token": _objective("topr_token") | SAMPLER,
    "TOPR geometric": _objective("topr_geo") | SAMPLER | PER_RESPONSE,
    "DRO": _objective("dro(dro_beta=0.1)"),
}
METHODS = NAMED | OTHERS
SNAPSHOTS: Arm = {"correction.centre": "old", "rollout.old_logp_source": "ring"}
# Of the part with age, in place of `SAMPLER`. Without a correction there is no clip, as in the first table.
AGE: dict[str, Arm] = {
    NONE: fig_referee.REINFORCE,
    "tis_2": SNAPSHOTS,
    "async": fig_referee.DECOUPLED,
    "OPOB": {"correction.centre": "prox", "correction.staleness_weight": "folded"},
    "QuRL": SNAPSHOTS,
}
# Methods that need age, and why the other parts do not have them.
NEEDS_AGE = {
    "A-3PO": "it is refused where all samples have one version",
    "OAPL schedule": "its schedule is an age of its own",
}


def objectives_of(gap: str, length: str) -> dict[str, Arm]:
    """Returns the arms of a gap by method, without those that need an age it lacks."""
    turns = fig_referee.UPDATE_TURNS.get(f"{gap}/{length}")
    _, fields = fig_referee.GAPS[gap]
    shared = fig_referee.LENGTHS[length] | fields
    if turns:
        shared = shared | {"rollout.update_turns": turns}
    arms = {}
    for name, arm in (BASES | METHODS).items():
        if not turns and name in NEEDS_AGE:
            continue
        if turns and name in AGE:
            arm = arm | AGE[name]
        elif turns:
            # The ratio to the sampler has the engine's factor; a weight of it would count it twice.
            arm = arm | SAMPLER | _weight("none")
        arms[name] = shared | _weight("none") | arm
    return arms


def sweep():
    return {
        f"{part}/{name}": arm for part in PARTS for name, arm in objectives_of(*part.split("/")).items()
    }
