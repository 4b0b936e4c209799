"""Reads checkpoints of the `speculators` package (`peagle` and `eagle3`) and writes them as heads of this package.

    peagle convert SOURCE_DIR OUT_DIR

The head is a plain one. vLLM reads the source too, but not all of it: of a `peagle` checkpoint its translation drops
`fc_norm` and `norm_output`, and of a drafter with Llama layers it sizes `fc` for three taps whatever their number.

What a setting means is as in speculators 0.9; the layers' settings have the defaults of transformers. Nothing is left
out silently: settings and tensors that are not known are an error that names them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor

from peagle.checkpoint import check_tables, check_tensors, load_tensors, read_tensor_specs, save_head
from peagle.config import ARCHITECTURE, QWEN_ARCHITECTURE, DrafterConfig, HeadError, read_json

#: Of the layers' settings, what decides the drafter's function. Others are of training, of saving, or of generation.
LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rms_norm_eps", "max_position_embeddings", "attention_bias", "mlp_bias", "hidden_act",
    "rope_parameters", "layer_types", "sliding_window",
)  # fmt: skip
#: Settings beside `transformer_layer_config` that are read, and those that do not change what the drafter computes.
READ_KEYS = {
    "speculators_model_type", "transformer_layer_config", "speculators_config", "draft_vocab_size", "mask_token_id",
    "target_hidden_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "fc_norm",
    "norm_output",
}  # fmt: skip
IDLE_KEYS = {
    "architectures", "auto_map", "dtype", "torch_dtype", "embed_requires_grad", "speculators_version",
    "tie_word_embeddings", "transformers_version", "has_no_defaults_at_init", "model_type", "provenance",
}  # fmt: skip
#: Tensors of the target that some versions save with the drafter's; they play a part in training alone.
TARGET_TENSORS = ("verifier_lm_head.weight", "verifier_norm.weight")
ARCHITECTURES = {"llama": ARCHITECTURE, "qwen3": QWEN_ARCHITECTURE}


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint that was read. left_out: names of the target's tensors that it held."""

    config: DrafterConfig
    tensors: dict[str, Tensor]
    left_out: list[str]


def read_speculators(source_dir: str | Path) -> Source:
    """Read a checkpoint of the `speculators` package.

    Raises HeadError for a missing directory, a checkpoint of another kind, a setting that is not known or implemented,
    and missing, spare or wrong tensors; all of a kind in one message.
    """
    path = Path(source_dir) / "config.json"
    config = DrafterConfig.from_dict(plain_config(read_json(path), str(path)), str(path))
    specs = read_tensor_specs(source_dir)
    left_out = [name for name in TARGET_TENSORS if name in specs]
    check_tensors(config, {name: spec for name, spec in specs.items() if name not in left_out}, source_dir)
    tensors = {name: tensor for name, tensor in load_tensors(source_dir).items() if name not in left_out}
    check_tables(config, tensors, source_dir)
    return Source(config, tensors, left_out)


def plain_config(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """vLLM's `config.json` for the drafter that a `speculators` configuration describes.

    raw: the `config.json` of the source, whose name is `source`. Raises HeadError as `read_speculators`.
    """
    from transformers import AutoConfig

    method, layer = raw.get("speculators_model_type"), raw.get("transformer_layer_config")
    if method not in ("peagle", "eagle3"):
        raise HeadError(f"{source}: speculators_model_type = {method!r}, only peagle and eagle3 can be read")
    unknown = sorted(raw.keys() - READ_KEYS - IDLE_KEYS)
    if unknown:
        raise HeadError(f"{source}: settings that are not known: {', '.join(unknown)}")
    if not isinstance(layer, dict) or layer.get("model_type") not in ARCHITECTURES:
        kind = layer.get("model_type") if isinstance(layer, dict) else layer
        raise HeadError(f"{source}: transformer_layer_config.model_type = {kind!r}, only llama and qwen3 can be read")
    if method == "peagle" and not isinstance(raw.get("mask_token_id"), int):
        raise HeadError(f"{source}: mask_token_id = {raw.get('mask_token_id')!r}, a peagle checkpoint needs a token")
    plain: dict[str, Any] = {"architectures": [ARCHITECTURES[layer["model_type"]]]}
    # transformers leaves out the layers' settings that have its defaults when it saves.
    settings = AutoConfig.for_model(**layer).to_dict()
    plain |= {key: value for key, value in settings.items() if key in LAYER_KEYS}
    plain |= {key: raw.get(key) for key in ("draft_vocab_size", "target_hidden_size")}
    # Where the setting is missing, vLLM's translation has it for EAGLE-3 and not for P-EAGLE.
    plain["norm_before_residual"] = raw.get("norm_before_residual", method == "eagle3")
    plain |= {key: raw.get(key, False) for key in ("norm_before_fc", "fc_norm", "norm_output")}
    if method == "peagle":
        plain["ptd_token_id"] = raw["mask_token_id"]
    layer_ids = raw.get("eagle_aux_hidden_state_layer_ids")
    plain["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layer_ids} if layer_ids else {}
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    if (num_depths := methods[0].get("speculative_tokens")) is not None:
        plain["num_depths"] = num_depths
    return plain


def convert(source_dir: str | Path, out_dir: str | Path) -> Source:
    """Write a checkpoint of the `speculators` package as a plain head into `out_dir`; types of tensors stay.

    Raises HeadError as `read_speculators`, before anything is written, OSError when the disk is full.
    """
    source = read_speculators(source_dir)
    save_head(out_dir, source.config, source.tensors)
    return source
