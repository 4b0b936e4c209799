"""Rotary position embedding: its settings in a `config.json`, old and new spelling.

Enters: a configuration as a dict. Leaves: base and scaling. The default RoPE and Llama 3's are known; imports no
torch, like `peagle.config`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

DEFAULT_THETA = 10000.0


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's stretching to long contexts: slow frequencies are divided by `factor`, fast ones stay.

    A frequency is slow when fewer than `low_freq_factor` of its turns fit in `original_max_position_embeddings` tokens,
    fast when more than `high_freq_factor` do; in between the two are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def rope_theta(raw: dict[str, Any]) -> float:
    """Base alone, whatever the kind of RoPE."""
    return float(_settings(raw).get("rope_theta") or raw.get("rope_theta") or DEFAULT_THETA)


def _settings(raw: dict[str, Any]) -> dict[str, Any]:
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    # Gemma 3 has one for each kind of layer.
    return dict(given.get("full_attention") or given)


def read_rope(raw: dict[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling`.

    Raises ValueError for another kind of RoPE, or for one of Llama 3 with a setting missing.
    """
    given = _settings(raw)
    theta = rope_theta(raw)
    kind = given.get("rope_type") or given.get("type") or "default"
    share = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise ValueError(f"RoPE: partial_rotary_factor = {share}, the drafter rotates whole heads only")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"RoPE {given}: rope_type must be default or llama3, the drafter has no other")
    names = [field.name for field in dataclasses.fields(Llama3Rope)]
    wrong = [name for name in names if not isinstance(given.get(name), int | float)]
    if wrong:
        raise ValueError(f"RoPE {given}: rope_type llama3 needs numbers for {', '.join(wrong)}")
    return theta, Llama3Rope(**{name: given[name] for name in names})


def rope_keys(theta: float, scaling: Llama3Rope | None) -> dict[str, Any]:
    """The keys of a `config.json`, in the spelling of transformers 5; the base stands in the old place too."""
    parameters: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if scaling is not None:
        parameters |= {"rope_type": "llama3", **dataclasses.asdict(scaling)}
    return {"rope_theta": theta, "rope_parameters": parameters}
