"""The frozen target in training and evaluation: tapped hidden states and output logits, by Hugging Face transformers.

Serving never uses this module: there vLLM runs the target.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


class Target:
    """A causal language model whose layers' inputs can be tapped. All of it is frozen."""

    def __init__(
        self, target_dir: str | Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32, compiled: bool = False
    ) -> None:
        self.config: dict[str, Any] = json.loads((Path(target_dir) / "config.json").read_text(encoding="utf-8"))
        model: Any = AutoModelForCausalLM.from_pretrained(target_dir, dtype=dtype, attn_implementation="sdpa")
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = torch.device(device)
        self._body = torch.compile(self.model.model) if compiled else self.model.model

    @property
    def embed_VS(self) -> Tensor:
        return self.model.get_input_embeddings().weight

    @property
    def lm_head_VS(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def states(
        self, tokens_BN: Tensor, document_BN: Tensor, position_BN: Tensor, aux_layer_ids: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """One pass over packed documents; no token sees another document.

        position_BN: position within the document. Returns (aux [B, N, C * S]: residual stream entering each of
        `aux_layer_ids`, concatenated in that order; last [B, N, S]: what `lm_head_VS` turns into logits).

        Raises ValueError for a layer that the target does not have.
        """
        num_layers = self.config["num_hidden_layers"]
        if max(aux_layer_ids) >= num_layers or min(aux_layer_ids) < 0:
            raise ValueError(
                f"aux_layer_ids = {aux_layer_ids}: must be in 0..{num_layers - 1}, inputs of the target's layers"
            )
        num_tokens = tokens_BN.shape[1]
        causal_NN = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=tokens_BN.device).tril()
        same_BNN = document_BN[:, :, None] == document_BN[:, None, :]
        out = self._body(
            input_ids=tokens_BN,
            position_ids=position_BN,
            attention_mask=(same_BNN & causal_NN)[:, None],
            output_hidden_states=True,
            use_cache=False,
        )
        return torch.cat([out.hidden_states[layer] for layer in aux_layer_ids], dim=-1), out.last_hidden_state
