"""What a drafter and its target are, from their `config.json` alone: shape, RoPE, auxiliary layers, mask token.

A head's file has vLLM's keys, or those of the `speculators` package (`plain_config`). `HeadFile` gives every key that
is read its type and its bounds. Imports neither torch nor vLLM, so that the service checks a head before anything
loads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from peagle.schema import problem_lines, type_problems

ARCHITECTURE = "LlamaForCausalLMEagle3"
QWEN_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"
#: Names of the two kinds of layers: vLLM's (the first of each is the one written), and NeMo AutoModel's.
LLAMA_NAMES = (
    ARCHITECTURE, "Eagle3LlamaForCausalLM", "PeagleLlamaForCausalLM", "PEagleDraftModel", "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM", "LlamaEagle3DraftModel",
)  # fmt: skip
QWEN_NAMES = (QWEN_ARCHITECTURE, "PeagleQwen3ForCausalLM")
#: Before the architecture of a head without the tables that vLLM needs of it, which vLLM must refuse: it would draft
#: with whatever is in the memory that a missing tensor has.
SHIPPED_PREFIX = "Tableless"
#: Names of the mask token, in the order in which vLLM looks for them.
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
#: Draft tokens by default of a head whose file does not say what it was trained for (`num_depths`).
DEFAULT_NUM_DEPTHS = 8
#: The most draft tokens of a pass that may be asked of such a head.
MAX_NUM_DEPTHS = 64
#: Layers that a target needs so that the default auxiliary layers are three different ones.
MIN_DEFAULT_LAYERS = 7
#: Auxiliary layers of a head that leaves them to vLLM's default: three for certain, their ids are not.
UNNAMED_LAYERS = (-1, -1, -1)
MAX_LAYERS = 1024
MAX_POSITIONS = 2**24
REQUIRED_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

#: Of the layers' settings of the speculators package, those that decide the drafter's function. Others are of training,
#: of saving, or of generation.
LAYER_KEYS = (
    *REQUIRED_KEYS, "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "attention_bias",
    "mlp_bias", "hidden_act", "rope_parameters", "layer_types",
)  # fmt: skip
#: Its settings beside `transformer_layer_config` that are read, and those that do not change what the drafter computes.
SPECULATORS_KEYS = {
    "speculators_model_type", "transformer_layer_config", "speculators_config", "draft_vocab_size", "mask_token_id",
    "target_hidden_size", _LAYER_IDS, "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
}  # fmt: skip
SPECULATORS_IDLE_KEYS = {
    "architectures", "auto_map", "dtype", "torch_dtype", "embed_requires_grad", "speculators_version",
    "tie_word_embeddings", "transformers_version", "has_no_defaults_at_init", "model_type", "provenance",
}  # fmt: skip


class HeadError(ValueError):
    """A head that cannot be used. The message names the file, the key or tensor, and what is expected."""


# ---- RoPE


_CHECKED = ConfigDict(strict=True, allow_inf_nan=False)
Factor = Annotated[float, Field(gt=0, le=2**20)]
Positions = Annotated[int, Field(ge=1, le=MAX_POSITIONS)]


@checked_dataclass(frozen=True, config=_CHECKED)
class Llama3Rope:
    """Llama 3.1's stretching to long contexts: slow frequencies are divided by `factor`, fast ones stay.

    A frequency is slow when fewer than `low_freq_factor` of its turns fit in `original_max_position_embeddings` tokens,
    fast when more than `high_freq_factor` do; in between the two are blended.
    """

    factor: Factor
    low_freq_factor: Factor
    high_freq_factor: Factor
    original_max_position_embeddings: Positions

    def __post_init__(self) -> None:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor = {self.low_freq_factor} must be below {self.high_freq_factor}, the high"
            )


@checked_dataclass(frozen=True, config=_CHECKED)
class YarnRope:
    """YaRN's stretching to long contexts, as vLLM 0.32 and transformers read it (gpt-oss has it).

    A frequency is divided by `factor` when it makes fewer than `beta_slow` turns in `original_max_position_embeddings`
    tokens, and stays when it makes more than `beta_fast`; in between the two are blended. Cosines and sines are
    multiplied by `attention_factor`, by default 1 + 0.1 log(factor), or the ratio that `mscale` and `mscale_all_dim`
    give. `truncate`: the bounds are whole numbers of frequencies.
    """

    factor: Factor
    original_max_position_embeddings: Positions
    beta_fast: Factor = 32.0
    beta_slow: Factor = 1.0
    attention_factor: Factor | None = None
    mscale: Factor | None = None
    mscale_all_dim: Factor | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.factor * self.original_max_position_embeddings > MAX_POSITIONS:
            raise ValueError(
                f"factor * original_max_position_embeddings must be at most {MAX_POSITIONS}, the positions of vLLM's "
                f"table, not {self.factor:g} * {self.original_max_position_embeddings}"
            )


Rope = Llama3Rope | YarnRope
ROPE_KINDS: dict[str, type[Llama3Rope] | type[YarnRope]] = {"llama3": Llama3Rope, "yarn": YarnRope}
#: Values of YaRN's keys that change nothing.
_YARN_NEUTRAL = {"extrapolation_factor": 1, "apply_yarn_scaling": True, "mscale": 0, "mscale_all_dim": 0}
#: Keys beside those of the kind. With text, the three positions of `mrope_section` are one, so it changes nothing.
_ROPE_KEYS = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}


def rope_theta(raw: dict[str, Any]) -> float:
    """Base alone, whatever the kind of RoPE."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    # Gemma 3 has one for each kind of layer.
    given = given.get("full_attention") or given
    return float(given.get("rope_theta") or raw.get("rope_theta") or 10000.0)


def read_rope(raw: dict[str, Any]) -> tuple[float, Rope | None]:
    """Base and scaling of a head, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling`.

    Raises ValueError for another kind of RoPE, for one with a setting missing, and for settings that are not known:
    nothing is left out silently.
    """
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    if new and old and new != old:
        raise ValueError(f"rope_parameters = {new} and rope_scaling = {old} contradict each other: keep one of them")
    given = {key: value for key, value in (new or old or {}).items() if value not in (None, _YARN_NEUTRAL.get(key))}
    if "attention_factor" in given:  # an older name beside it, which vLLM 0.32 does not read
        given.pop("attn_factor", None)
    theta = given.get("rope_theta", raw.get("rope_theta"))
    theta = 10000.0 if theta is None else theta
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 1 < theta < math.inf:
        raise ValueError(f"RoPE: rope_theta = {theta!r:.80} must be a number above 1")
    kind = given.get("rope_type") or given.get("type") or "default"
    share = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise ValueError(f"RoPE: partial_rotary_factor = {share!r:.80}, the drafter rotates whole heads only")
    if kind != "default" and (not isinstance(kind, str) or kind not in ROPE_KINDS):
        raise ValueError(f"RoPE {given!r:.400}: rope_type must be default, llama3 or yarn, the drafter has no other")
    record = ROPE_KINDS.get(kind)
    names = {field.name for field in dataclasses.fields(record)} if record else set()
    if unknown := sorted(given.keys() - _ROPE_KEYS - names):
        raise ValueError(
            f"RoPE: settings that are not known with rope_type {kind}: {', '.join(unknown)}; they might change the "
            "rotation: leave them out if they do not"
        )
    if record is None:
        return float(theta), None
    try:
        return float(theta), record(**{name: given[name] for name in names if name in given})
    except ValidationError as error:
        raise ValueError(f"RoPE, rope_type {kind}: {'; '.join(problem_lines(error, HeadFile))}") from error


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
            f"{num_target_layers}: name the layers in the head's config.json, or take a larger target"
        )
    return layer_ids


def resolve_aux_layer_ids(layer_ids: tuple[int, ...], num_target_layers: int) -> tuple[int, ...]:
    """The layers that a head reads: vLLM's default where it leaves them unnamed. Raises as `default_aux_layer_ids`."""
    return default_aux_layer_ids(num_target_layers) if layer_ids == UNNAMED_LAYERS else layer_ids


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Shape of a P-EAGLE (or EAGLE-3) drafter.

    `num_depths` is K_max, the draft tokens that the head was trained to propose: all in one pass, or, for an EAGLE-3
    head, one after another (steps of its unroll, `peagle.train.passes`). `num_depths_is_known`: whether its file says
    so; the published heads' do not. `ptd_token_id` is the mask token, an id of the target's vocabulary that text does
    not use; None for a head without parallel drafting (EAGLE-3). `norm_output`: an
    EAGLE-3 head feeds back its rows after the last norm, not its residual stream (EAGLE-3.1). `norm_before_fc`
    normalises the auxiliary hidden states together, `fc_norm` each alone; `qk_norm` each head of queries and keys
    (Qwen 3's layers).
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
    num_depths_is_known: bool = True
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 8192
    norm_before_residual: bool = False
    norm_output: bool = False
    fc_norm: bool = False
    attention_bias: bool = False
    norm_before_fc: bool = False
    qk_norm: bool = False
    rope_scaling: Rope | None = None

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise HeadError(f"head_dim = {self.head_dim} must be even and at least 2: RoPE rotates pairs of numbers")
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

    @property
    def is_parallel(self) -> bool:
        """Whether one pass makes all drafts (P-EAGLE, which has a mask token), or one pass each (EAGLE-3)."""
        return self.ptd_token_id is not None

    @property
    def max_depths(self) -> int:
        """The most draft tokens that may be asked of the head: `num_depths`, where that is known."""
        return self.num_depths if self.num_depths_is_known else MAX_NUM_DEPTHS

    @property
    def fc_input_size(self) -> int:
        """Width of the concatenated target hidden states: C * S."""
        return len(self.aux_layer_ids) * self.target_hidden_size

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """RoPE in the spelling of transformers 5."""
        rope: dict[str, Any] = {"rope_theta": self.rope_theta, "rope_type": "default"}
        if self.rope_scaling is not None:
            kind = next(name for name, record in ROPE_KINDS.items() if isinstance(self.rope_scaling, record))
            rope |= {"rope_type": kind, **dataclasses.asdict(self.rope_scaling)}
        return {key: value for key, value in rope.items() if value is not None}

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
        try:
            file = HeadFile.model_validate(raw)
            if problems := _problems(file, raw):
                raise ValueError("; ".join(problems))
            theta, scaling = read_rope(raw)
        except ValidationError as error:
            raise HeadError(f"{source}: {'; '.join(problem_lines(error, HeadFile))}") from error
        except ValueError as error:
            raise HeadError(f"{source}: {error}") from error
        eagle = raw.get("eagle_config") or {}
        layer_ids = raw.get(_LAYER_IDS) or eagle.get(_LAYER_IDS)
        defaults = {
            "num_key_value_heads": raw["num_attention_heads"],
            "head_dim": raw["hidden_size"] // raw["num_attention_heads"],
            "draft_vocab_size": raw["vocab_size"],
            "target_hidden_size": raw["hidden_size"],
        }
        decided = {
            "aux_layer_ids": tuple(layer_ids) if layer_ids else UNNAMED_LAYERS,
            "ptd_token_id": next(iter(_mask_tokens(raw).values()), None),
            "num_depths_is_known": file.num_depths is not None,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "qk_norm": is_qwen(raw),
        }
        if "norm_before_fc" in eagle:
            decided["norm_before_fc"] = bool(eagle["norm_before_fc"])
        shared = {field.name for field in dataclasses.fields(cls)} & HeadFile.model_fields.keys()
        return cls(**(defaults | file.model_dump(include=shared, exclude_none=True) | decided))

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` of the head, as vLLM reads it."""
        name, model_type = (QWEN_ARCHITECTURE, "qwen3") if self.qk_norm else (ARCHITECTURE, "llama")
        raw: dict[str, Any] = {"architectures": [name], "model_type": model_type, "tie_word_embeddings": False}
        raw |= dataclasses.asdict(self)
        named_otherwise = ["aux_layer_ids", "num_depths_is_known", "rope_scaling", "qk_norm"]
        for name in named_otherwise if self.num_depths_is_known else [*named_otherwise, "num_depths"]:
            del raw[name]
        raw["hidden_act"] = "silu"
        raw["rope_parameters"] = self.rope_parameters  # the base stands in the old place, too
        raw["eagle_config"] = {"use_aux_hidden_state": True}
        if self.aux_layer_ids != UNNAMED_LAYERS:
            # vLLM's V2 runner reads them at the top alone, its Llama drafters count them in `eagle_config` alone.
            raw[_LAYER_IDS] = raw["eagle_config"][_LAYER_IDS] = list(self.aux_layer_ids)
        return raw


def is_qwen(raw: dict[str, Any]) -> bool:
    """Whether a `config.json` names a drafter with Qwen 3's layers."""
    return not set(QWEN_NAMES).isdisjoint(_architectures(raw))


def _architectures(raw: dict[str, Any]) -> list[str]:
    """Names of the kind of layers, of a head in the shipped form, too."""
    return [name.removeprefix(SHIPPED_PREFIX) for name in raw.get("architectures") or [ARCHITECTURE]]


def _mask_tokens(raw: dict[str, Any]) -> dict[str, int]:
    """What a `config.json` calls the mask token, by key."""
    return {key: raw[key] for key in MASK_TOKEN_KEYS if raw.get(key) is not None}


def is_read_alike_by_vllm(raw: dict[str, Any]) -> bool:
    """Whether stock vLLM 0.32 takes a head's `config.json` for what this package takes it for.

    It does not where the file is of the speculators package (of a P-EAGLE head vLLM drops `fc_norm` and `norm_output`),
    where vLLM would put `Eagle3` before the architecture's name and so know no such model, where `target_hidden_size`
    is null, where the auxiliary layers of a Llama drafter, other than three, stand at the top only, or where the head
    lacks tables.
    """
    names, top = raw.get("architectures") or (), raw.get(_LAYER_IDS) or ()
    inner = (raw.get("eagle_config") or {}).get(_LAYER_IDS)
    counts_taps = is_qwen(raw) or len(top) in (0, 3) or bool(inner) or raw.get("num_aux_hidden_states") is not None
    return (
        "speculators_model_type" not in raw
        and raw.get("model_type") in ("llama", "qwen3")
        and any(name.startswith("Eagle3") or name.endswith("Eagle3") for name in names)
        and not any(name.startswith(SHIPPED_PREFIX) for name in names)
        and raw.get("target_hidden_size", 0) is not None
        and counts_taps
    )


Width = Annotated[int, Field(ge=1, le=2**20)]
NumTokens = Annotated[int, Field(ge=1, le=2**24)]
TokenId = Annotated[int, Field(ge=0, lt=2**24)]
LayerIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_LAYERS)]], Field(max_length=MAX_LAYERS)]


class _File(BaseModel):
    """Keys of a file that are read. Null stands for a key that is not there; others may be there too."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)


class _SwitchesFile(_File):
    """Switches of vLLM's drafter that this package does not implement, with the only value that is accepted."""

    use_aux_hidden_state: Literal[True] | None = None
    mlp_bias: Literal[False] | None = None
    hidden_act: Literal["silu"] | None = None
    logit_scale: Annotated[float, Field(ge=1, le=1)] | None = None
    bias: Literal[False] | None = None
    qkv_bias: Literal[False] | None = None
    is_causal: Literal[True] | None = None


class EagleFile(_SwitchesFile):
    """`eagle_config` of a head's `config.json`."""

    eagle_aux_hidden_state_layer_ids: LayerIds | None = None
    norm_before_fc: bool | None = None


class HeadFile(_SwitchesFile):
    """Type and bounds of every key of a head's `config.json` that decides what is built from it, here and in vLLM.

    The sizes are bounded so that a file of a few bytes takes no memory; the tensors' headers then have to agree.
    """

    architectures: list[str] | None = None
    model_type: str | None = None
    hidden_size: Width | None = None
    intermediate_size: Width | None = None
    num_hidden_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None
    num_attention_heads: Width | None = None
    num_key_value_heads: Width | None = None
    head_dim: Width | None = None
    vocab_size: NumTokens | None = None
    draft_vocab_size: NumTokens | None = None
    target_hidden_size: Width | None = None
    mask_token_id: TokenId | None = None
    pard_token: TokenId | None = None
    ptd_token_id: TokenId | None = None
    num_depths: Annotated[int, Field(ge=1, le=MAX_NUM_DEPTHS)] | None = None
    rms_norm_eps: Annotated[float, Field(gt=0, le=1)] | None = None
    max_position_embeddings: Positions | None = None
    rope_theta: float | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    fc_norm: bool | None = None
    attention_bias: bool | None = None
    norm_before_fc: bool | None = None
    tie_word_embeddings: bool | None = None
    eagle_config: EagleFile | None = None
    eagle_aux_hidden_state_layer_ids: LayerIds | None = None
    num_aux_hidden_states: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None
    layer_types: Annotated[list[str], Field(max_length=MAX_LAYERS)] | None = None
    num_labels: Annotated[int, Field(ge=0, le=1024)] | None = None  # transformers names each of them


def _problems(file: HeadFile, raw: dict[str, Any]) -> list[str]:
    """What does not fit together in a head's `config.json`, one line each."""
    if set(_architectures(raw)).isdisjoint({*LLAMA_NAMES, *QWEN_NAMES}):
        return [
            f"architectures = {sorted(raw['architectures'])}, expected ['{ARCHITECTURE}'] or ['{QWEN_ARCHITECTURE}'] "
            "(a P-EAGLE/EAGLE-3 head)"
        ]
    problems = []
    if missing := [key for key in REQUIRED_KEYS if raw.get(key) is None]:
        problems.append(f"missing {', '.join(missing)}")
    kinds, num_layers = file.layer_types, file.num_hidden_layers
    if kinds and num_layers and len(kinds) != num_layers:
        problems.append(f"layer_types has {len(kinds)} entries, but num_hidden_layers = {num_layers}")
    if "sliding_attention" in (kinds or ()):  # alone, `sliding_window` means nothing to vLLM's drafters
        problems.append(
            "layer_types has sliding_attention: heads with a sliding window are not supported; train one without it, "
            "with batch.joined_share for long contexts"
        )
    if len(set((masks := _mask_tokens(raw)).values())) > 1:
        problems.append(" and ".join(f"{key} = {value}" for key, value in masks.items()) + " contradict each other")
    if raw.get("quantization_config"):
        problems.append(
            "quantization_config is not supported: take the head in bfloat16, whatever its target's type is"
        )
    eagle = raw.get("eagle_config") or {}
    # Tapped layers stand at the top or in `eagle_config`, any number of them.
    top, inner = raw.get(_LAYER_IDS) or [], eagle.get(_LAYER_IDS) or []
    if top and inner and top != inner:
        problems.append(f"{_LAYER_IDS} = {top} and eagle_config.{_LAYER_IDS} = {inner} contradict each other")
    num_aux = len(top or inner) or len(UNNAMED_LAYERS)
    if file.num_aux_hidden_states not in (None, num_aux):
        problems.append(
            f"num_aux_hidden_states = {file.num_aux_hidden_states}, but there are {num_aux} auxiliary layers"
        )
    return problems


# ---- heads and targets on disk


def read_json(path: Path, kind: str = "head") -> dict[str, Any]:
    """The `config.json` of a head or target. Raises HeadError when there is none or it holds no JSON object."""
    if not path.exists():
        raise HeadError(f"no {kind} at {path.parent}: {path} does not exist")
    if not path.is_file():
        raise HeadError(f"{path} is no file: expected a JSON file")
    try:
        # Some targets' files have infinite values; nesting is bounded by the parser.
        raw = pydantic_core.from_json(path.read_bytes(), allow_inf_nan=kind == "target")
    except ValueError as error:
        raise HeadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise HeadError(f"{path} must hold a JSON object, found a {type(raw).__name__}")
    return raw


def read_head_config(head_dir: str | Path) -> DrafterConfig:
    """The drafter that a head's `config.json` describes; whoever asks whether a head is supported asks here.

    Raises HeadError: no such directory or file, no JSON, or as `from_dict` and `plain_config`.
    """
    path = Path(head_dir) / "config.json"
    raw = read_json(path)
    if "speculators_model_type" in raw:
        raw = plain_config(raw, str(path))
    return DrafterConfig.from_dict(raw, source=str(path))


class _Proposal(_File):
    speculative_tokens: int | None = None


class _Proposals(_File):
    proposal_methods: list[_Proposal] | None = None


class _LayersFile(HeadFile):
    model_type: Literal["llama", "qwen3"]


class SpeculatorsFile(HeadFile):
    """A `config.json` of the speculators package: some of a head's keys, and these."""

    speculators_model_type: Literal["peagle", "eagle3"]
    transformer_layer_config: _LayersFile
    speculators_config: _Proposals | None = None


def plain_config(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """vLLM's `config.json` for the drafter that a configuration of the `speculators` package describes.

    raw: the `config.json`, whose name is `source`. What a setting means is as in speculators 0.9; the layers' settings
    have the defaults of transformers. Raises HeadError for a checkpoint of another kind and for settings that are not
    known: nothing is left out silently.
    """
    from transformers import AutoConfig

    if unknown := sorted(raw.keys() - SPECULATORS_KEYS - SPECULATORS_IDLE_KEYS):
        raise HeadError(f"{source}: settings that are not known: {', '.join(unknown)}")
    try:
        file = SpeculatorsFile.model_validate(raw)
    except ValidationError as error:
        raise HeadError(f"{source}: " + "; ".join(problem_lines(error, SpeculatorsFile))) from error
    method, is_llama = file.speculators_model_type, file.transformer_layer_config.model_type == "llama"
    if method == "peagle" and file.mask_token_id is None:
        raise HeadError(f"{source}: mask_token_id = None, a peagle checkpoint needs a token")
    try:  # transformers leaves out the layers' settings that have its defaults when it saves
        settings = AutoConfig.for_model(**raw["transformer_layer_config"]).to_dict()
    except Exception as error:  # of transformers' own checks
        raise HeadError(f"{source}: transformer_layer_config: {error}") from error
    plain: dict[str, Any] = {"architectures": [ARCHITECTURE if is_llama else QWEN_ARCHITECTURE]}
    plain |= {key: value for key, value in settings.items() if key in LAYER_KEYS}
    plain |= {key: raw.get(key) for key in ("draft_vocab_size", "target_hidden_size")}
    # Where the setting is missing, vLLM's translation has it for EAGLE-3 and not for P-EAGLE.
    plain["norm_before_residual"] = raw.get("norm_before_residual", method == "eagle3")
    plain |= {key: raw.get(key, False) for key in ("norm_before_fc", "fc_norm", "norm_output")}
    if method == "peagle":
        plain["ptd_token_id"] = raw["mask_token_id"]
    layer_ids = raw.get(_LAYER_IDS)
    plain["eagle_config"] = {_LAYER_IDS: layer_ids} if layer_ids else {}
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    if (num_depths := methods[0].get("speculative_tokens")) is not None:
        plain["num_depths"] = num_depths
    return plain


def _text_config(target: dict[str, Any]) -> dict[str, Any]:
    text = target if "hidden_size" in target else target.get("text_config")
    return text if isinstance(text, dict) else {}


def _not_counts(text: dict[str, Any], keys: Iterable[str]) -> list[str]:
    return [key for key in keys if type_problems(key, text.get(key), Annotated[int, Field(ge=1)])]


def check_head_fits(config: DrafterConfig, target: dict[str, Any]) -> None:
    """Raises HeadError naming each mismatch of a head's configuration with its target's.

    target: the target's `config.json` as a dict; for a multimodal target its `text_config` counts.
    """
    text = _text_config(target)
    if missing := _not_counts(text, ("hidden_size", "vocab_size", "num_hidden_layers")):
        raise HeadError(f"the target's config.json lacks {', '.join(missing)}, so no head can be compared with it")
    problems = []
    if config.target_hidden_size != text["hidden_size"]:
        problems.append(
            f"hidden size: the head reads {config.target_hidden_size}, the target has {text['hidden_size']}"
        )
    if config.vocab_size != text["vocab_size"]:
        problems.append(f"vocabulary: the head has {config.vocab_size} tokens, the target {text['vocab_size']}")
    num_layers = text["num_hidden_layers"]
    layer_ids = resolve_aux_layer_ids(config.aux_layer_ids, num_layers)
    if outside := [index for index in layer_ids if index > num_layers]:
        problems.append(f"auxiliary layers: {outside} of {list(layer_ids)} are outside 0..{num_layers}")
    if problems:
        raise HeadError("the head does not fit this target:\n  " + "\n  ".join(problems))


def read_target_config(target_dir: str | Path) -> dict[str, Any]:
    """`config.json` of the target's text model: that of a multimodal target is its `text_config`.

    Raises HeadError without one, ValueError that names the file and every key that is missing or not a number (some
    architectures give a list, one number a layer: a drafter has one shape for all its layers).
    """
    path = Path(target_dir) / "config.json"
    raw = read_json(path, "target")
    text = _text_config(raw)
    if wrong := [f"{name} = {text.get(name)!r:.80}" for name in _not_counts(text, REQUIRED_KEYS)]:
        where = "" if text is raw else " under text_config"
        raise ValueError(
            f"{path}: {', '.join(wrong)}{where}: a target needs whole numbers of at least 1 here; targets are "
            "decoder-only language models"
        )
    return text
