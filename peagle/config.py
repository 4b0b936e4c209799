"""Rotary position embedding: its settings in a `config.json`, old and new spelling.

Enters: a configuration as a dict. Leaves: base and scaling. The default RoPE and Llama 3's are known; imports no
torch, like `peagle.config`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

# ====================================================================================================
# Rotary position embedding: its settings in a `config.json`, old and new spelling.
#
# Enters: a configuration as a dict. Leaves: base and scaling. The default RoPE and Llama 3's are known; imports no
# torch, like `peagle.config`.

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


# ====================================================================================================
# The drafter's configuration, in the keys that vLLM reads (`LlamaForCausalLMEagle3`), plus `num_depths`.
#
# Enters: a head's `config.json` or a target's. Leaves: a frozen `DrafterConfig`. Imports neither torch nor vLLM, so that
# the service can check a head before anything loads.

ARCHITECTURE = "LlamaForCausalLMEagle3"
QWEN_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"
#: Names under which vLLM 0.29 knows the two kinds of layers; the first of each is the one written.
LLAMA_NAMES = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "PeagleLlamaForCausalLM", "PEagleDraftModel")
QWEN_NAMES = (QWEN_ARCHITECTURE, "PeagleQwen3ForCausalLM")
#: vLLM does not limit what it drafts by a head without `num_depths`; this is what we assume for it.
DEFAULT_NUM_DEPTHS = 8
#: Layers that a target needs so that the default taps are three different ones.
MIN_DEFAULT_LAYERS = 7
#: Taps of a head that leaves them to vLLM's default: three for certain, their ids are not.
UNNAMED_LAYERS = (-1, -1, -1)


class HeadError(ValueError):
    """A head that cannot be used. The message names the file, the key or tensor, and what is expected."""


def default_aux_layer_ids(num_target_layers: int) -> tuple[int, int, int]:
    """Target layers whose *input* residual stream the drafter reads: vLLM's EAGLE-3 default (2, L // 2, L - 3).

    The paper writes 2, L/2, L-1 (Fig. 2); vLLM captures before the layer runs, and its default is what published heads
    use.

    Raises HeadError for fewer than 7 layers, where these are not three layers in ascending order.
    """
    layer_ids = 2, num_target_layers // 2, num_target_layers - 3
    if num_target_layers < MIN_DEFAULT_LAYERS:
        raise HeadError(
            f"the default aux_layer_ids {layer_ids} need a target of {MIN_DEFAULT_LAYERS} layers, it has "
            f"{num_target_layers}: name the layers"
        )
    return layer_ids


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Shape of a P-EAGLE (or EAGLE-3) drafter.

    `num_depths` is K_max, the draft tokens that the head was trained to propose: all in one pass, or, for an EAGLE-3
    head, one after another (steps of its unroll, `peagle.train.passes`). `ptd_token_id` is the mask token, an id of the
    target's vocabulary that text does not use; None for a head without parallel drafting (EAGLE-3). `norm_output`: an
    EAGLE-3 head feeds back its rows after the last norm, not its residual stream (EAGLE-3.1). `sliding_window`: tokens
    that a row sees back, itself counted, by position and in every layer; None for all. `norm_before_fc` normalises the
    tapped hidden states together, `fc_norm` each alone; `qk_norm` each head of queries and keys (Qwen 3's layers).
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]
    ptd_token_id: int | None
    num_depths: int = DEFAULT_NUM_DEPTHS
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 8192
    norm_before_residual: bool = False
    norm_output: bool = False
    fc_norm: bool = False
    attention_bias: bool = False
    norm_before_fc: bool = False
    qk_norm: bool = False
    rope_scaling: Llama3Rope | None = None
    sliding_window: int | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise HeadError(
                f"num_attention_heads = {self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise HeadError(f"draft_vocab_size = {self.draft_vocab_size} must be in 1..vocab_size = {self.vocab_size}")
        if self.ptd_token_id is not None and not 0 <= self.ptd_token_id < self.vocab_size:
            raise HeadError(f"ptd_token_id = {self.ptd_token_id} must be in 0..{self.vocab_size - 1} (vocab_size - 1)")
        ids = self.aux_layer_ids
        if ids != UNNAMED_LAYERS and (not ids or ids[0] < 0 or list(ids) != sorted(set(ids))):
            raise HeadError(
                f"aux_layer_ids = {list(ids)} must be layers of the target, different and ascending: the engine "
                "concatenates their hidden states in the order in which layers run"
            )
        if self.num_depths < 1:
            raise HeadError(f"num_depths = {self.num_depths} must be at least 1")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise HeadError(f"sliding_window = {self.sliding_window} must be at least 1, or null")

    @property
    def fc_input_size(self) -> int:
        """Width of the concatenated target hidden states: C * S."""
        return len(self.aux_layer_ids) * self.target_hidden_size

    @classmethod
    def for_target(cls, target: dict[str, Any], *, num_layers: int, **overrides: Any) -> DrafterConfig:
        """A drafter whose layers have the shape of the target's own.

        target: the target's `config.json` as a dict (a Llama-like text model). overrides: fields of this class.
        """
        heads = target["num_attention_heads"]
        values: dict[str, Any] = dict(
            hidden_size=target["hidden_size"],
            intermediate_size=target["intermediate_size"],
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=target.get("num_key_value_heads") or heads,
            head_dim=target.get("head_dim") or target["hidden_size"] // heads,
            vocab_size=target["vocab_size"],
            draft_vocab_size=target["vocab_size"],
            target_hidden_size=target["hidden_size"],
            ptd_token_id=None,
            rms_norm_eps=target.get("rms_norm_eps", 1e-5),
            rope_theta=rope_theta(target),
            max_position_embeddings=target.get("max_position_embeddings", 8192),
        )
        if "aux_layer_ids" not in overrides:
            values["aux_layer_ids"] = default_aux_layer_ids(target["num_hidden_layers"])
        return cls(**(values | overrides))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "config.json") -> DrafterConfig:
        """Reads vLLM's keys; `head_files.read_head_config` checks their types first.

        Raises HeadError naming every missing key, or another architecture.
        """
        architectures = set(raw.get("architectures") or [ARCHITECTURE])
        if not architectures & {*LLAMA_NAMES, *QWEN_NAMES}:
            raise HeadError(
                f"{source}: architectures = {sorted(architectures)}, expected ['{ARCHITECTURE}'] or "
                f"['{QWEN_ARCHITECTURE}'] (a P-EAGLE/EAGLE-3 head)"
            )
        required = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        missing = [key for key in required if raw.get(key) is None]
        if missing:
            raise HeadError(f"{source}: missing {', '.join(missing)}")
        try:
            theta, scaling = read_rope(raw)
        except ValueError as error:
            raise HeadError(f"{source}: {error}") from error
        eagle = raw.get("eagle_config") or {}
        hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
        layer_ids = raw.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
        known = _JSON_KEYS | {field.name for field in dataclasses.fields(cls)}
        return cls(
            hidden_size=hidden,
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or hidden // heads,
            vocab_size=raw["vocab_size"],
            draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
            target_hidden_size=raw.get("target_hidden_size") or hidden,
            aux_layer_ids=tuple(layer_ids) if layer_ids else UNNAMED_LAYERS,
            # vLLM's own order.
            ptd_token_id=raw.get("pard_token", raw.get("ptd_token_id")),
            num_depths=raw.get("num_depths", DEFAULT_NUM_DEPTHS),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-5),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=raw.get("max_position_embeddings", 8192),
            norm_before_residual=bool(raw.get("norm_before_residual", False)),
            norm_output=bool(raw.get("norm_output", False)),
            fc_norm=bool(raw.get("fc_norm", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            norm_before_fc=bool(eagle.get("norm_before_fc", raw.get("norm_before_fc", False))),
            qk_norm=is_qwen(raw),
            sliding_window=_sliding_window(raw),
            extra={key: value for key, value in raw.items() if key not in known},
        )

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` of the head, as vLLM reads it."""
        kind = (QWEN_ARCHITECTURE, "qwen3") if self.qk_norm else (ARCHITECTURE, "llama")
        raw: dict[str, Any] = {"architectures": [kind[0]], "model_type": kind[1], "tie_word_embeddings": False}
        named_otherwise = ("aux_layer_ids", "extra", "rope_theta", "rope_scaling", "qk_norm", "sliding_window")
        for field in dataclasses.fields(self):
            if field.name not in named_otherwise:
                raw[field.name] = getattr(self, field.name)
        if self.sliding_window is not None:
            # vLLM's Llama layers look at the window only where `layer_types` calls the layer a sliding one.
            raw["sliding_window"] = self.sliding_window
            raw["layer_types"] = [_SLIDING] * self.num_hidden_layers
        raw["hidden_act"] = "silu"
        raw |= rope_keys(self.rope_theta, self.rope_scaling)
        raw["eagle_config"] = {"use_aux_hidden_state": True}
        if self.aux_layer_ids != UNNAMED_LAYERS:
            raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(self.aux_layer_ids)
        return raw | self.extra


def is_qwen(raw: dict[str, Any]) -> bool:
    """Whether a `config.json` names a drafter with Qwen 3's layers."""
    return not set(QWEN_NAMES).isdisjoint(raw.get("architectures") or [])


_JSON_KEYS = {
    "architectures",
    "model_type",
    "tie_word_embeddings",
    "hidden_act",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "pard_token",
    "eagle_config",
    "eagle_aux_hidden_state_layer_ids",
    "layer_types",
}
_SLIDING = "sliding_attention"


def _sliding_window(raw: dict[str, Any]) -> int | None:
    """The window of every layer, as vLLM reads it: without `layer_types`, `sliding_window` means nothing."""
    kinds = set(raw.get("layer_types") or [])
    if _SLIDING not in kinds:
        return None
    if len(kinds) > 1 or not isinstance(raw.get("sliding_window"), int):
        raise HeadError(
            f"layer_types = {raw['layer_types']}, sliding_window = {raw.get('sliding_window')}: a head with a sliding "
            "window has the same window, a whole number, in all its layers"
        )
    return int(raw["sliding_window"])


# ====================================================================================================
# What the trainer needs to know of a target's `config.json`, whichever architecture it is of.
#
# Enters: a target's directory. Leaves: the keys of its text model. Imports no torch.

_NUMBERS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def read_target_config(target_dir: str | Path) -> dict[str, Any]:
    """`config.json` of the target's text model: that of a multimodal target is its `text_config`.

    Raises FileNotFoundError without one, ValueError that names the file and every key that is missing or not a number
    (some architectures give a list, one number a layer: a drafter has one shape for all its layers).
    """
    path = Path(target_dir) / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    text = raw if "hidden_size" in raw else raw.get("text_config") or {}
    wrong = [f"{name} = {text.get(name)}" for name in _NUMBERS if not _is_count(text.get(name))]
    if wrong:
        where = "" if text is raw else " under text_config"
        raise ValueError(
            f"{path}: {', '.join(wrong)}{where}: a target needs whole numbers of at least 1 here; targets are "
            "decoder-only language models"
        )
    return text


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
