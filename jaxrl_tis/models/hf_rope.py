"""The rotary embedding in a `config.json`."""

from collections.abc import Mapping
from typing import Any

from jaxrl_tis.models.hf_fields import boolean, integer, is_set, number

GEMMA_THETA = 1e6  # of full layers where config.json does not say
GPT_OSS_THETA = 150000.0
GLM_ROTARY = 0.5  # the share of a head that GLM rotates where config.json does not say

# Fields inside rope_scaling / rope_parameters, by rope type: HF name -> RopeConfig name.
ROPE_FIELDS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_position",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_position",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
}

# Fields without which the rope type has no meaning (the others have published defaults).
ROPE_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}


def _merge_rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all RoPE fields merged: those at the top level, rope_scaling, rope_parameters."""
    sources = [{k: hf[k] for k in ("rope_theta", "partial_rotary_factor") if is_set(hf, k)}]
    for key in ("rope_scaling", "rope_parameters"):
        if is_set(hf, key):
            if not isinstance(hf[key], Mapping):
                raise ValueError(f"{key}={hf[key]!r} in config.json must be an object.")
            fields = {k: v for k, v in hf[key].items() if v is not None}
            if "type" in fields:
                sources.append({"rope_type": fields.pop("type")})
            sources.append(fields)
    merged = {}
    for source in sources:
        for key, value in source.items():
            if key in merged and merged[key] != value:
                raise ValueError(
                    f"config.json gives two values for {key}: {merged[key]!r} and {value!r}; "
                    "remove one."
                )
            merged[key] = value
    return merged


def read(
    hf: Mapping[str, Any], family: str, max_position: int
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Returns the fields of the RopeConfig, and of that of layers with a window; None for families
    without."""
    if family == "gpt_oss":
        if not (is_set(hf, "rope_scaling") or is_set(hf, "rope_parameters")):
            raise ValueError(
                "config.json has neither rope_scaling nor rope_parameters, where transformers assumes "
                "a scaling of its own for gpt_oss; write one.")
        rope = _read({"rope_theta": GPT_OSS_THETA} | _merge_rope(hf), family, max_position)
        return rope, rope
    if family != "gemma3_text":
        return _read(_merge_rope(hf), family, max_position), None
    full, sliding = _of_gemma(hf)
    return _read(full, family, max_position), _read(sliding, family, max_position)


def _of_gemma(hf: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the RoPE fields of full layers and of those with a window. transformers 5 has both in
    rope_parameters; before, layers with a window had a base alone."""
    kinds = "full_attention", "sliding_attention"
    given = hf["rope_parameters"] if is_set(hf, "rope_parameters") else {}
    if isinstance(given, Mapping) and given.keys() & set(kinds):
        if given.keys() - set(kinds):
            raise ValueError(
                f"rope_parameters={given!r} in config.json must have the keys {', '.join(kinds)} "
                "alone.")
        by_kind = {kind: given[kind] if is_set(given, kind) else {} for kind in kinds}
        outer = {k: v for k, v in hf.items() if k != "rope_parameters"}
        full = _merge_rope(outer | {"rope_parameters": by_kind[kinds[0]]})
        sliding = _merge_rope({"rope_parameters": by_kind[kinds[1]]})
    else:
        full, sliding = _merge_rope(hf), {}
    if is_set(hf, "rope_local_base_freq"):
        sliding = _merge_rope(
            {"rope_theta": hf["rope_local_base_freq"], "rope_parameters": sliding})
    return {"rope_theta": GEMMA_THETA} | full, sliding


def _read(fields: dict[str, Any], family: str, max_position: int) -> dict[str, Any]:
    """Returns the fields of a RopeConfig; rope_theta is 10000 by default, as in old checkpoints.

    A given `factor` is used unchanged, even if it differs from `max_position_embeddings` /
    `original_max_position_embeddings` (as transformers 5; some releases of 4 used the quotient).
    """
    kind = fields.pop("rope_type") if "rope_type" in fields else "default"
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        raise ValueError(f"rope_type={kind!r} is not implemented; known: {sorted(ROPE_FIELDS)}.")
    theta = 10000.0
    if "rope_theta" in fields:
        theta = number(fields, "rope_theta")
        del fields["rope_theta"]
    fraction = GLM_ROTARY if family == "glm4_moe" else 1.0
    if "partial_rotary_factor" in fields:
        fraction = number(fields, "partial_rotary_factor")
        del fields["partial_rotary_factor"]
    if family != "glm4_moe" and fraction != 1:
        raise ValueError(f"partial_rotary_factor={fraction} is not implemented for {family}.")
    if kind == "default":  # transformers computes nothing with the fields of the other types
        fields = {k: v for k, v in fields.items() if all(k not in known for known in ROPE_FIELDS.values())}
    for key, value in fields.items():
        if key not in ROPE_FIELDS[kind]:
            raise ValueError(
                f"{key}={value!r} is not a field of rope_type={kind!r}; remove it, or correct the "
                "rope type."
            )
    for key in ROPE_REQUIRED[kind]:
        if key not in fields:
            raise ValueError(f"rope_type={kind!r} needs the field {key!r}.")
    rope = {ROPE_FIELDS[kind][key]: _rope_value(fields, key) for key in fields}
    if kind == "yarn" and "original_max_position" not in rope:
        rope["original_max_position"] = max_position
    return {"kind": kind, "theta": theta, "fraction": fraction} | rope


def _rope_value(fields: Mapping[str, Any], key: str) -> float | int | bool:
    if key == "original_max_position_embeddings":
        return integer(fields, key)
    if key == "truncate":
        return boolean(fields, key)
    return number(fields, key)


def scaling_to_hf(rope: Any) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    fields = {key: getattr(rope, name) for key, name in ROPE_FIELDS[rope.kind].items()}
    return {"rope_type": rope.kind} | {k: v for k, v in fields.items() if v is not None}
