"""What a drafter and its target are, from their `config.json` alone: shape, RoPE, taps, mask token.

A head's file has vLLM's keys (`LlamaForCausalLMEagle3` and five other names). Imports neither torch nor vLLM, so that
the service checks a head before anything loads.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

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
#: Switches of vLLM's drafter that this package does not implement, with the only value that is accepted. They stand at
#: the top of `config.json` or in its `eagle_config`.
UNSUPPORTED_SWITCHES: dict[str, Any] = {
    "use_aux_hidden_state": True,
    "mlp_bias": False,
    "hidden_act": "silu",
    "logit_scale": 1.0,
}
#: Keys that must hold whole numbers where they are given; a JSON string there would fail far from its cause.
INTEGER_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "draft_vocab_size", "target_hidden_size", "ptd_token_id", "num_depths",
)  # fmt: skip
REQUIRED_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_SLIDING = "sliding_attention"
#: Keys of a head's `config.json` that are read, or written anew, besides the fields of `DrafterConfig`.
_READ_KEYS = {
    "architectures", "model_type", "tie_word_embeddings", "hidden_act", "rope_parameters", "rope_theta", "rope_scaling",
    "pard_token", "eagle_config", _LAYER_IDS, "layer_types",
}  # fmt: skip


class HeadError(ValueError):
    """A head that cannot be used. The message names the file, the key or tensor, and what is expected."""


# ---- RoPE


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
    return float(_rope_settings(raw).get("rope_theta") or raw.get("rope_theta") or 10000.0)


def _rope_settings(raw: dict[str, Any]) -> dict[str, Any]:
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    # Gemma 3 has one for each kind of layer.
    return dict(given.get("full_attention") or given)


def read_rope(raw: dict[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling`.

    Raises ValueError for another kind of RoPE, or for one of Llama 3 with a setting missing.
    """
    given = _rope_settings(raw)
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


# ---- the drafter


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
        """The drafter that a `config.json` in vLLM's keys describes. source: what to call it in messages.

        Raises HeadError for another architecture, missing keys, keys of a wrong type, and switches of vLLM's drafter
        that this package does not implement; every one of a kind is named.
        """
        architectures = set(raw.get("architectures") or [ARCHITECTURE])
        if not architectures & {*LLAMA_NAMES, *QWEN_NAMES}:
            raise HeadError(
                f"{source}: architectures = {sorted(architectures)}, expected ['{ARCHITECTURE}'] or "
                f"['{QWEN_ARCHITECTURE}'] (a P-EAGLE/EAGLE-3 head)"
            )
        if problems := _problems(raw):
            raise HeadError(f"{source}: " + "; ".join(problems))
        missing = [key for key in REQUIRED_KEYS if raw.get(key) is None]
        if missing:
            raise HeadError(f"{source}: missing {', '.join(missing)}")
        try:
            theta, scaling = read_rope(raw)
        except ValueError as error:
            raise HeadError(f"{source}: {error}") from error
        eagle = raw.get("eagle_config") or {}
        hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
        layer_ids = raw.get(_LAYER_IDS) or eagle.get(_LAYER_IDS)
        known = _READ_KEYS | {field.name for field in dataclasses.fields(cls)}
        switches = ("norm_before_residual", "norm_output", "fc_norm", "attention_bias", "norm_before_fc")
        values = {key: raw[key] for key in REQUIRED_KEYS}
        values |= {key: raw[key] for key in ("num_depths", "rms_norm_eps", "max_position_embeddings") if key in raw}
        values |= {key: bool(raw.get(key, False)) for key in switches}
        if "norm_before_fc" in eagle:
            values["norm_before_fc"] = bool(eagle["norm_before_fc"])
        return cls(
            **values,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or hidden // heads,
            draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
            target_hidden_size=raw.get("target_hidden_size") or hidden,
            aux_layer_ids=tuple(layer_ids) if layer_ids else UNNAMED_LAYERS,
            # vLLM's own order.
            ptd_token_id=raw.get("pard_token", raw.get("ptd_token_id")),
            rope_theta=theta,
            rope_scaling=scaling,
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
        # In the spelling of transformers 5; the base stands in the old place too.
        rope: dict[str, Any] = {"rope_theta": self.rope_theta, "rope_type": "default"}
        if self.rope_scaling is not None:
            rope |= {"rope_type": "llama3", **dataclasses.asdict(self.rope_scaling)}
        raw |= {"rope_theta": self.rope_theta, "rope_parameters": rope}
        raw["eagle_config"] = {"use_aux_hidden_state": True}
        if self.aux_layer_ids != UNNAMED_LAYERS:
            raw["eagle_config"][_LAYER_IDS] = list(self.aux_layer_ids)
        return raw | self.extra


def is_qwen(raw: dict[str, Any]) -> bool:
    """Whether a `config.json` names a drafter with Qwen 3's layers."""
    return not set(QWEN_NAMES).isdisjoint(raw.get("architectures") or [])


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


def _problems(raw: dict[str, Any]) -> list[str]:
    """What is wrong with the values of a head's `config.json`, one line each."""
    problems = [
        f"{key} = {raw[key]!r} must be a whole number of at least {0 if key == 'ptd_token_id' else 1}"
        for key in INTEGER_KEYS
        if raw.get(key) is not None and not _is_count(raw[key], at_least=0 if key == "ptd_token_id" else 1)
    ]
    eagle = raw.get("eagle_config") or {}
    for key, accepted in UNSUPPORTED_SWITCHES.items():
        given = eagle.get(key, raw.get(key, accepted))
        if given != accepted:
            problems.append(f"{key} = {given!r} is not supported (only {accepted!r})")
    return problems + _tap_problems(raw, eagle)


def _tap_problems(raw: dict[str, Any], eagle: dict[str, Any]) -> list[str]:
    """Tapped layers as vLLM reads them: from the top of `config.json` or from `eagle_config`, any number of them.

    Of a Llama drafter, vLLM 0.29 takes the layers from the top first, but the width of `fc` from `eagle_config` alone
    (else three taps), so a head that names other than three at the top only does not load there.
    """
    key = _LAYER_IDS
    top, inner = raw.get(key) or [], eagle.get(key) or []
    problems = [
        f"{name} = {ids!r} must be a list of whole numbers"
        for name, ids in ((key, top), (f"eagle_config.{key}", inner))
        if not isinstance(ids, list) or not all(_is_count(index, at_least=0) for index in ids)
    ]
    if problems:
        return problems
    if top and inner and top != inner:
        problems.append(f"{key} = {top} and eagle_config.{key} = {inner} contradict each other")
    num_taps, num_given = len(top or inner) or len(UNNAMED_LAYERS), raw.get("num_aux_hidden_states")
    if num_given is not None and num_given != num_taps:
        problems.append(f"num_aux_hidden_states = {num_given!r}, but {num_taps} layers are tapped")
    if num_given is None and not inner and num_taps != len(UNNAMED_LAYERS) and not is_qwen(raw):
        problems.append(f"{key} names {num_taps} layers: more or less than 3 must stand in eagle_config")
    return problems


def _is_count(value: object, at_least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


# ---- heads and targets on disk


def read_json(path: Path, kind: str = "head") -> dict[str, Any]:
    """The `config.json` of a head or target. Raises HeadError when there is none or it holds no JSON object."""
    if not path.is_file():
        raise HeadError(f"no {kind} at {path.parent}: {path} does not exist")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HeadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise HeadError(f"{path} must hold a JSON object, found a {type(raw).__name__}")
    return raw


def read_head_config(head_dir: str | Path) -> DrafterConfig:
    """The drafter that a head's `config.json` describes; whoever asks whether a head is supported asks here.

    Raises HeadError: no such directory or file, no JSON, a checkpoint of the speculators package, or as `from_dict`.
    """
    path = Path(head_dir) / "config.json"
    raw = read_json(path)
    if "speculators_model_type" in raw:
        raise HeadError(f"{path} is of the speculators package: `peagle convert {head_dir} OUT_DIR` makes it a head")
    return DrafterConfig.from_dict(raw, source=str(path))


def check_head_fits(config: DrafterConfig, target: dict[str, Any]) -> None:
    """Raises HeadError naming each mismatch of a head's configuration with its target's.

    target: the target's `config.json` as a dict; for a multimodal target its `text_config` counts.
    """
    text = target if "hidden_size" in target else target.get("text_config") or {}
    missing = [key for key in ("hidden_size", "vocab_size", "num_hidden_layers") if not isinstance(text.get(key), int)]
    if missing:
        raise HeadError(f"the target's config.json lacks {', '.join(missing)}, so no head can be compared with it")
    problems = []
    if config.target_hidden_size != text["hidden_size"]:
        problems.append(
            f"hidden size: the head reads {config.target_hidden_size}, the target has {text['hidden_size']}"
        )
    if config.vocab_size != text["vocab_size"]:
        problems.append(f"vocabulary: the head has {config.vocab_size} tokens, the target {text['vocab_size']}")
    if config.ptd_token_id is not None and not config.ptd_token_id < text["vocab_size"]:
        problems.append(f"ptd_token_id = {config.ptd_token_id} is outside the target's 0..{text['vocab_size'] - 1}")
    num_layers = text["num_hidden_layers"]
    outside = [index for index in config.aux_layer_ids if index > num_layers]
    if outside:
        problems.append(f"tapped layers: {outside} of {list(config.aux_layer_ids)} are outside 0..{num_layers}")
    if config.aux_layer_ids == UNNAMED_LAYERS and num_layers < MIN_DEFAULT_LAYERS:
        problems.append(
            f"tapped layers: not given, and their default needs {MIN_DEFAULT_LAYERS} target layers, the target has "
            f"{num_layers}"
        )
    if problems:
        raise HeadError("the head does not fit this target:\n  " + "\n  ".join(problems))


def read_target_config(target_dir: str | Path) -> dict[str, Any]:
    """`config.json` of the target's text model: that of a multimodal target is its `text_config`.

    Raises FileNotFoundError without one, ValueError that names the file and every key that is missing or not a number
    (some architectures give a list, one number a layer: a drafter has one shape for all its layers).
    """
    path = Path(target_dir) / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    text = raw if "hidden_size" in raw else raw.get("text_config") or {}
    wrong = [f"{name} = {text.get(name)}" for name in REQUIRED_KEYS if not _is_count(text.get(name))]
    if wrong:
        where = "" if text is raw else " under text_config"
        raise ValueError(
            f"{path}: {', '.join(wrong)}{where}: a target needs whole numbers of at least 1 here; targets are "
            "decoder-only language models"
        )
    return text
