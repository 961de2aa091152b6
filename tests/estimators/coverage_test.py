"""Every published method by its published name: there, documented with its source, and tested."""

import pathlib
import re

import pytest

from jaxrl_tis.estimators import methods, presets

pytestmark = [
    pytest.mark.by_jax("one pass over every entry: jax.numpy's rules of types and gradients"),
]

# Published name: entries by table.
PUBLISHED = {
    "TIS": [("weight", "token_tis"), ("weight", "seq_tis"), ("weight", "geo_tis")],
    "MIS": [("weight", "token_mis"), ("weight", "seq_mis"), ("weight", "geo_mis")],
    "IcePop": [("weight", "token_icepop"), ("weight", "seq_icepop")],
    "two-sided clip of weights": [("weight", f"{u}_clip") for u in ("token", "seq")],
    "seq-mask-tis": [("weight", "seq_mask_tis")],
    "vanilla IS": [("weight", "token_vanilla"), ("weight", "seq_vanilla")],
    "prefix weights": [("weight", "prefix_minpro"), ("weight", "prefix_ctpo")],
    "turn weights": [("weight", "turn_tis"), ("weight", "turn_geo")],
    "verl's rejection modes": [("mask", name) for name in (
        "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
        "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3")],
    "k1 bands on the ratio itself": [("mask", name) for name in (
        "token_ratio", "seq_sum_ratio", "seq_mean_ratio")],
    "a band on the probabilities": [("mask", "token_dp")],
    "binary KL of tokens": [("mask", "token_binary_kl")],
    "KPop": [("mask", "token_kpop")],
    "veto and outlier mask": [("mask", "veto")],
    "sequence log-prob error": [("mask", "seq_logprob_error")],
    "TRM": [("mask", "trm"), ("mask", "trm_k3")],
    "OPSM": [("mask", "opsm")],
    "staleness filter": [("mask", "staleness")],
    "M2PO": [("mask", "m2po"), ("objective", "m2po")],
    "entropy selection": [("mask", "top_entropy")],
    "Clip-cov": [("mask", "clip_cov"), ("objective", "clip_cov")],
    "KL-cov": [("objective", "kl_cov")],
    "PPO": [("objective", "ppo")],
    "dual-clip and two-sided clip": [("objective", "dual_clip")],
    "A-3PO": [("objective", "a3po")],
    "PPO on sequences": [("objective", "seq_ppo")],
    "GSPO": [("objective", "gspo"), ("objective", "gspo_token")],
    "LUSPO": [("objective", "luspo")],
    "GMPO": [("objective", "gmpo")],
    "CTPO": [("objective", "ctpo")],
    "ESPO": [("objective", "espo")],
    "QuRL-ACR": [("objective", "qurl_acr")],
    "TBPO": [("objective", "tbpo")],
    "Turn-PPO and ST-PPO": [("objective", "turn_ppo"), ("objective", "st_ppo")],
    "GPG and REINFORCE": [("objective", "gpg"), ("objective", "reinforce"), ("advantage", "gpg")],
    "CISPO": [("objective", "cispo")],
    "DISPO": [("objective", "dispo")],
    "SAO's double-sided clip": [("objective", "dis")],
    "TOPR": [("objective", "topr"), ("objective", "topr_token"), ("objective", "topr_geo")],
    "ASPO": [("objective", "aspo")],
    "MinPRO": [("objective", "minpro")],
    "DPPO": [("objective", "dppo_tv"), ("objective", "dppo_kl")],
    "VESPO": [("objective", "vespo")],
    "logit fusion": [("objective", "fusion_cap"), ("objective", "fusion_shaped")],
    "SAPO": [("objective", "sapo")],
    "R2VPO": [("objective", "r2vpo")],
    "QUATRO": [("objective", "quatro")],
    "OAPL": [("objective", "oapl"), ("advantage", "oapl")],
    "DRO": [("objective", "dro")],
    "GAE": [("advantage", "gae")],
    "GRPO": [("advantage", "grpo")],
    "Dr.GRPO": [("advantage", "dr_grpo")],
    "MaxRL": [("advantage", "maxrl")],
    "FlashREINFORCE": [("mask", "seq_mean_binary_kl"), ("advantage", "batch_mean")],
    "pass@k": [("advantage", "grpo_passk")],
    "RLOO": [("advantage", "rloo")],
    "REINFORCE++": [("advantage", "reinforce_plus_plus"),
                    ("advantage", "reinforce_plus_plus_baseline")],
    "ReMax": [("advantage", "remax")],
    "OPO": [("advantage", "opo")],
    "GDPO": [("advantage", "gdpo")],
    "OTB": [("advantage", "otb"), ("advantage", "tir_otb")],
    "OPOB": [("advantage", "opob")],
    "VCPO's step": [("controller", "ess_scale")],
    "halving on a length surge": [("controller", "length_surge")],
    "GAC": [("controller", "gradient_alignment")],
    "ALP": [("controller", "layerwise_perturbation")],
    "R2VPO's dual": [("controller", "r2vpo_dual")],
    "adaptive KL": [("controller", "adaptive_kl")],
    "KL": [("kl", name) for name in (
        "k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", "is_k3", "clipped_is_k2", "clipped_is_k3",
        "exact_reverse", "exact_forward")],
}
# An arXiv id, or the code, note or book for what has none, or the entry whose source it shares.
SOURCE = re.compile(
    r"arXiv:\d{4}\.\d{5}|[A-Z][a-z]+ et al\.|Schulman|slime|prime-rl|verl|OpenRLHF|NeMo|TRL|AReaL"
    r"|[Ss]ource as `\w+`"
)
ENTRIES = [entry for entries in PUBLISHED.values() for entry in entries]
TABLE = [(kind, name) for kind, table in methods.TABLES.items() for name in table]


def test_every_published_method_is_there():
    assert set(ENTRIES) <= set(TABLE)


def has_source(kind, name):
    text = methods.function(kind, name).__doc__
    return SOURCE.search(text) or "no paper" in text


def test_every_docstring_says_where_the_method_is_from():
    assert [entry for entry in TABLE if entry[1] != "none" and not has_source(*entry)] == []


def test_a_test_names_every_method():
    folder = pathlib.Path(__file__).parent
    here = {pathlib.Path(__file__).name, "universal_test.py", "samples.py"}
    text = "\n".join(p.read_text() for p in folder.glob("*_test.py") if p.name not in here)
    words = set(re.findall(r"[a-z_0-9+]+", text))
    calls = set(re.findall(r"\.(\w+)", text))
    named = lambda kind, name: name in words or methods.function(kind, name).__name__ in calls
    assert [entry for entry in TABLE if not named(*entry)] == []


def test_presets():
    assert len(presets.PRESETS) == 19 + 5 + 4 + 2 + 2 + 1 + 2 + 7
    assert {"decoupled", "capped_ratio", "seq_capped_ratio", "mis_ppo", "seq_mis_ppo"} <= set(presets.PRESETS)
