"""Writes the small heads in tests/data/speculators by the `speculators` package itself, and what it computes with them.

    pip install speculators==0.9.0 && python tests/data/make_speculators_heads.py

Each folder is what `save_pretrained` left there (less the copy of its Python code), and `golden.npz`: inputs and logits
of one forward pass of the package. Made with speculators 0.9.0, transformers 5.23, torch 2.13 on a CPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
from speculators import (
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
    PEagleDraftModel,
    PEagleSpeculatorConfig,
    SpeculatorsConfig,
    VerifierConfig,
)
from speculators.models.peagle import core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

ROOT = Path(__file__).parent / "speculators"
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "attn_implementation": "eager",
}
LONG = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
DRAFT_IDS = torch.arange(24) * 2 + 5
NUM_TOKENS = 12


class Done(Exception):
    """Ends a forward pass at its logits."""


def settings(algorithm: str, num_depths: int) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num_depths)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path="small-target", architectures=["LlamaForCausalLM"]),
    )


def peagle() -> PEagleDraftModel:
    """What `--speculator-type peagle` makes by default (Qwen 3 layers), with fc_norm and two layers."""
    return PEagleDraftModel(
        PEagleSpeculatorConfig(
            transformer_layer_config=Qwen3Config(num_hidden_layers=2, **SHAPE),
            draft_vocab_size=len(DRAFT_IDS),
            norm_before_residual=True,
            fc_norm=True,
            mask_token_id=63,
            eagle_aux_hidden_state_layer_ids=[1, 3, 4, 6],
            speculators_config=settings("peagle", 4),
        )
    )


def eagle3() -> Eagle3DraftModel:
    """What `--speculator-type eagle3` makes by default (norm_before_fc, norm_output); whole vocabulary."""
    rope = {"rope_theta": 500000.0, "rope_type": "llama3"} | LONG
    return Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=LlamaConfig(num_hidden_layers=1, rope_parameters=rope, **SHAPE),
            draft_vocab_size=SHAPE["vocab_size"],
            norm_before_fc=True,
            norm_output=True,
            eagle_aux_hidden_state_layer_ids=[2, 4, 5],
            speculators_config=settings("eagle3", 3),
        )
    )


@torch.no_grad()
def fill(model: Any) -> None:
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.4 * noise)
    if model.d2t is not None:
        model.d2t.copy_(DRAFT_IDS - torch.arange(len(DRAFT_IDS)))
        model.t2d.zero_()[DRAFT_IDS] = True


@torch.no_grad()
def logits_of(model: Any, inputs: dict[str, Tensor], **arguments: Any) -> Tensor:
    """Logits of the first call of the output matrix."""
    seen: list[Tensor] = []

    def stop(_module: Any, _inputs: Any, output: Tensor) -> None:
        seen.append(output)
        raise Done

    handle = model.lm_head.register_forward_hook(stop)
    try:
        model(
            hidden_states=inputs["hidden"][None],
            input_ids=inputs["tokens"][None],
            document_ids=torch.zeros(1, NUM_TOKENS, dtype=torch.long),
            **arguments,
        )
    except Done:
        handle.remove()
    return seen[0][0]


def write(name: str, model: Any) -> None:
    fill(model)
    model.eval()
    folder = ROOT / name
    model.save_pretrained(folder)
    (folder / "config.py").unlink()
    inputs = {
        "tokens": torch.randint(0, 60, (NUM_TOKENS,)),
        "hidden": torch.randn(NUM_TOKENS, model.fc.in_features),
    }
    rows: dict[str, Tensor] = {}
    if isinstance(model, PEagleDraftModel):
        sample = core.generate_cod_sample_indices

        def noted(**arguments: Any) -> tuple[Tensor, Tensor]:
            rows["anchor"], rows["depth"] = sample(**arguments)
            return rows["anchor"], rows["depth"]

        core.generate_cod_sample_indices = noted
        extra = {"num_depths": 4, "down_sample_ratio": 0.8, "verifier_last_hidden_states": torch.zeros(1)}
        logits = logits_of(model, inputs, **extra)
        core.generate_cod_sample_indices = sample
    else:
        rows = {"anchor": torch.arange(NUM_TOKENS), "depth": torch.zeros(NUM_TOKENS, dtype=torch.long)}
        logits = logits_of(model, inputs, ttt_steps=1)
    arrays = {key: value.numpy() for key, value in (inputs | rows | {"logits": logits}).items()}
    np.savez_compressed(folder / "golden.npz", **arrays)


if __name__ == "__main__":
    torch.manual_seed(0)
    write("peagle", peagle())
    write("eagle3", eagle3())
