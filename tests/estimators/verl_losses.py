"""verl's policy and value losses on a batch, with their gradients, for make_golden_verl.py."""

from verl_cpu import actor, algorithm, algos

GLOBAL = {"batch_num_tokens": 50.0, "global_batch_size": 8, "loss_scale_factor": 16}
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)

# Aggregation (geo_mean has one of its own) and settings of the actor or of its policy loss.
LOSSES = {
    "vanilla": ("token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}),
    "dppo_tv": (
        "token-mean",
        {"clip_ratio_low": 0.15, "clip_ratio_high": 0.1, "clip_ratio_c": 1.5},
    ),
    "dppo_kl": (
        "token-mean",
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.04, "clip_ratio_c": 20.0},
    ),
    "gspo": ("seq-mean-token-mean", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}),
    "sapo": ("seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "gpg": ("token-mean", {}),
    "clip_cov": (
        "token-mean",
        {
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.28,
            "clip_cov_ratio": 1.0,
            "clip_cov_lb": 0.1,
            "clip_cov_ub": 2.0,
        },
    ),
    "kl_cov": ("token-mean", {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.1}),
    "geo_mean": (None, {"clip_ratio_low": 0.4, "clip_ratio_high": 0.3}),
    "dro": ("token-mean", {"dro_beta": 0.1}),
    "cispo": ("token-mean", {"clip_ratio_low": 0.5, "clip_ratio_high": 0.28}),
    "reinforce": ("seq-mean-token-sum", {}),
}
TIE_SETTINGS = {
    "vanilla": {"clip_ratio_low": 0.0, "clip_ratio_high": 0.0},
    "dppo_tv": {"clip_ratio_low": 0.0, "clip_ratio_high": 0.0, "clip_ratio_c": 1.0},
    "dppo_kl": {"clip_ratio_low": 0.0, "clip_ratio_high": 0.0, "clip_ratio_c": 1.0},
    "gspo": {"clip_ratio_low": 0.0, "clip_ratio_high": 0.0},
    "geo_mean": {"clip_ratio_low": 0.5, "clip_ratio_high": 0.5},
}
# Their ratios are not clamped, or (kl_cov) their order depends on ties.
LEFT_OUT = {
    ("extreme", "clip_cov"),
    ("extreme", "kl_cov"),
    ("extreme", "geo_mean"),
    ("ties", "kl_cov"),
}
BYPASS = {
    "ppo_clip": {"loss_type": "ppo_clip", "rollout_is": None},
    "ppo_clip_rs": {
        "loss_type": "ppo_clip",
        "rollout_is": "sequence",
        "rollout_rs": "seq_mean_k3",
        "rollout_rs_threshold": 0.3,
    },
    "reinforce_seq": {"loss_type": "reinforce", "rollout_is": "sequence"},
    "reinforce_icepop_normalized": {
        "loss_type": "reinforce",
        "rollout_is": "token",
        "rollout_is_threshold": "0.5_5.0",
        "rollout_is_batch_normalize": True,
    },
    "reinforce_rs": {
        "loss_type": "reinforce",
        "rollout_is": "token",
        "rollout_rs": "token_k1,seq_mean_k3",
        "rollout_rs_threshold": "0.4_3.0,0.5",
    },
}
POLICY_LOSS_FIELDS = actor.PolicyLossConfig.__dataclass_fields__


def with_gradient(function, x):
    """The result of function(x) and the gradient of its scalar (or its sum) with respect to x."""
    x = x.clone().requires_grad_()
    result = function(x)
    value = result[0] if isinstance(result, tuple) else result
    value.sum().backward()
    return result, x.grad


def actor_config(settings, counts=None, **policy_loss):
    """An ActorConfig; a setting that belongs to its policy loss goes there."""
    settings = settings | policy_loss
    inner = {key: x for key, x in settings.items() if key in POLICY_LOSS_FIELDS}
    config = actor.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=actor.PolicyLossConfig(**inner),
        **{key: x for key, x in settings.items() if key not in inner},
    )
    config.global_batch_info.update(counts or {})
    return config


def policy_loss(name, batch, mode, config, logp_old, w=None):
    """Loss, metrics and the gradient with respect to logp of one of verl's policy losses."""
    if name == "reinforce":
        function = algos.compute_policy_loss_reinforce
    else:
        function = algos.get_policy_loss_fn(name)
    mask = batch["mask"]
    (loss, metrics), gradient = with_gradient(
        lambda logp: function(logp_old, logp, batch["adv"], mask, mode, config, w), batch["logp"]
    )
    return {"loss": loss, "gradient": gradient, "metrics": metrics}


def policy(name, batch):
    cases = {}
    for loss, (mode, settings) in LOSSES.items():
        if (name, loss) in LEFT_OUT:
            continue
        if name == "ties" and loss in TIE_SETTINGS:
            settings = settings | TIE_SETTINGS[loss]
        arguments = (loss, batch, mode, actor_config(settings), batch["logp_old"])
        case = policy_loss(*arguments)
        case["weighted_loss"] = policy_loss(*arguments, batch["weights"])["loss"]
        cases[loss] = {"mode": mode, "settings": settings} | case
    return cases


def aggregation(name, batch):
    settings = LOSSES["vanilla"][1]
    cases = []
    for mode in AGGREGATIONS:
        for counts in ({}, GLOBAL):
            config = actor_config(settings, counts)
            case = policy_loss("vanilla", batch, mode, config, batch["logp_old"], batch["weights"])
            cases.append({"mode": mode, "is_global": bool(counts)} | case)
            del cases[-1]["metrics"]
    return cases


def bypass(name, batch):
    cases = {}
    for case, settings in BYPASS.items():
        rollout = algorithm.RolloutCorrectionConfig(**settings)
        config = actor_config(LOSSES["vanilla"][1], rollout_correction=rollout)
        arguments = ("bypass_mode", batch, "token-mean", config, batch["logp_behav"])
        result = policy_loss(*arguments)
        result["metrics"] = {
            key: x for key, x in result["metrics"].items() if key.startswith("actor/")
        }
        cases[case] = {"settings": settings} | result
    return cases


def value(name, batch):
    cases = {}
    for mode in ("token-mean", "seq-mean-token-mean"):
        (loss, clipfrac), gradient = with_gradient(
            lambda v, mode=mode: algos.compute_value_loss(
                v, batch["returns"], batch["values_old"], batch["mask"], 0.5, mode
            ),
            batch["values"],
        )
        cases[mode] = {"loss": loss, "clipfrac": clipfrac, "gradient": gradient}
    return cases

