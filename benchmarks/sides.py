"""One training step of a P-EAGLE head, ours or that of the package `speculators`, on synthetic states.

    python -m benchmarks.sides '{"side": "peagle", "shape": "smollm2", "num_tokens": 2048, ...}'

The worker of `benchmarks.speculators`: builds, runs the first steps (which compile), prints a line, waits for a line
on standard input, then times its steps and prints what it found. Nothing else runs on the GPU while it times.

A step of both: forward and backward of one packed sequence (one document, every token an answer token) under bf16
autocast with float32 weights, norms clipped at 1, one AdamW step. Embedding and output matrix are frozen. Hidden states
and tokens are random: they set no shape.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

#: Shapes of targets that the drafter's layers take: hidden, intermediate, heads, key-value heads, vocabulary.
SHAPES = {
    "tiny": (64, 96, 4, 2, 320),
    "smollm2": (576, 1536, 9, 3, 49152),
    # The intermediate size is what makes 1.8 B parameters of its published head: 4 layers, both tables of its own.
    "gpt-oss-20b": (2880, 14336, 64, 8, 201088),
    "8b": (4096, 14336, 32, 8, 128256),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """side: 'peagle', or 'speculators' as shipped, or 'speculators-eager-mask' with its block mask made and its fused
    loss called outside the compiled graph, or 'speculators-eager-loss' with its plain loss there, or
    'speculators-defaults' with its own r, floor, max_anchors and trainable embedding."""

    side: str
    shape: str
    num_tokens: int
    num_segments: int = 1
    num_layers: int = 4
    num_depths: int = 8
    ratio: float = 0.8
    num_steps: int = 5
    device: str = "cuda"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """tokens_1N; aux_1NX: tapped hidden states; last_1NS: input of the output matrix; embed and lm_head [V, H]."""

    tokens_1N: Tensor
    aux_1NX: Tensor
    last_1NS: Tensor
    embed_VH: Tensor
    lm_head_VH: Tensor

    @classmethod
    def random(cls, case: Case) -> Inputs:
        hidden, _, _, _, vocabulary = SHAPES[case.shape]
        generator = torch.Generator(case.device).manual_seed(0)
        dtype = torch.bfloat16 if case.device == "cuda" else torch.float32

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator, device=case.device) * std).to(dtype)

        return cls(
            torch.randint(vocabulary, (1, case.num_tokens), generator=generator, device=case.device),
            normal(1, case.num_tokens, 3 * hidden),
            normal(1, case.num_tokens, hidden),
            normal(vocabulary, hidden, std=0.02),
            normal(vocabulary, hidden, std=0.02),
        )


@dataclasses.dataclass(frozen=True)
class Side:
    """backward: adds one sequence's gradients and returns its loss. num_rows: T. settings: what is particular."""

    model: nn.Module
    backward: Callable[[], Tensor]
    num_rows: int
    settings: dict[str, Any]


def our_side(case: Case, inputs: Inputs) -> Side:
    from peagle.config import DrafterConfig
    from peagle.model import Drafter, initialize
    from peagle.train.cod import kept_per_offset
    from peagle.train.data import Batch
    from peagle.train.passes import States, new_pass
    from peagle.train.recipe import Recipe

    hidden, intermediate, heads, kv_heads, vocabulary = SHAPES[case.shape]
    raw: dict[str, Any] = {"target": "synthetic", "data": "synthetic", "output": "none"}
    raw["drafter"] = {"num_layers": case.num_layers, "num_depths": case.num_depths, "ptd_token_id": vocabulary - 1}
    raw["batch"] = {"num_sequences": 1, "max_tokens": case.num_tokens, "num_segments": case.num_segments}
    raw["cod"] = {"ratio": case.ratio}
    recipe = Recipe.model_validate(raw)
    target = {"hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads}
    target |= {"num_key_value_heads": kv_heads, "vocab_size": vocabulary, "num_hidden_layers": 30}
    config = DrafterConfig.for_target(
        target,
        num_layers=case.num_layers,
        num_depths=case.num_depths,
        ptd_token_id=vocabulary - 1,
        fc_norm=True,
        head_dim=_head_dim(case.shape),
    )
    drafter = Drafter(config).to(case.device)
    drafter.share_target(inputs.embed_VH, inputs.lm_head_VH)
    random = torch.Generator(case.device).manual_seed(1)
    initialize(drafter, inputs.aux_1NX[0], random)
    run_pass = new_pass(recipe, random, compiled=case.device == "cuda")
    position_1N = torch.arange(case.num_tokens, device=case.device)[None]
    answer_1N = torch.ones_like(position_1N, dtype=torch.bool)
    batch = Batch(inputs.tokens_1N, torch.zeros_like(position_1N), position_1N, answer_1N)
    states = States(inputs.aux_1NX, inputs.last_1NS, inputs.lm_head_VH)
    settings = {"num_segments": case.num_segments, "partition": recipe.batch.partition, "loss_chunk": recipe.loss.chunk}
    num_rows = sum(kept_per_offset(case.num_tokens, case.num_depths, case.ratio))
    return Side(drafter, lambda: run_pass(drafter, batch, states).loss, num_rows, settings)


def their_side(case: Case, inputs: Inputs) -> Side:
    """`speculators`, model `peagle`, called as its trainer calls it."""
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle.train.data import generate_cod_sample_indices

    on_gpu, defaults = case.device == "cuda", case.side == "speculators-defaults"
    model = _their_model(case, inputs, trainable_embedding=defaults)
    sampling = {"num_depths": case.num_depths, "down_sample_ratio": case.ratio, "down_sample_ratio_min": 0.0}
    if defaults:
        sampling |= {"down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2, "max_anchors": 512}
    loss_mask = torch.ones(1, case.num_tokens, device=case.device)
    anchors, _ = generate_cod_sample_indices(case.num_tokens, loss_mask, **sampling)
    fused = on_gpu and case.side != "speculators-eager-loss"
    loss_config = resolve_loss_config("kl_div", "fused" if fused else "eager")
    if case.side == "speculators-eager-mask":
        loss_config = {name: (torch.compiler.disable(loss), weight) for name, (loss, weight) in loss_config.items()}
    call = {
        "hidden_states": inputs.aux_1NX,
        "input_ids": inputs.tokens_1N,
        "document_ids": torch.zeros_like(inputs.tokens_1N),
        "position_ids": torch.arange(case.num_tokens, device=case.device)[None],
        "loss_mask": loss_mask,
        "verifier_last_hidden_states": inputs.last_1NS,
        "loss_config": loss_config,
    }

    def backward() -> Tensor:
        with torch.autocast(case.device, dtype=torch.bfloat16, enabled=on_gpu):
            _, loss, _ = model(**call, **sampling)
        loss.backward()
        return loss.detach()

    return Side(model, backward, len(anchors), sampling | {"trainable_embedding": defaults, "loss": "kl_div"})


def _their_model(case: Case, inputs: Inputs, *, trainable_embedding: bool) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    hidden, intermediate, heads, kv_heads, vocabulary = SHAPES[case.shape]
    layers = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=case.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_head_dim(case.shape),
        vocab_size=vocabulary,
        max_position_embeddings=case.num_tokens + case.num_depths,
        rms_norm_eps=1e-5,
    )
    # The first is what its `from_training_args` sets; FlexAttention has no backward on a CPU.
    layers._attn_implementation = "simple_flex_attention" if case.device == "cuda" else "sdpa"
    proposal = GreedyTokenProposalConfig(speculative_tokens=case.num_depths)
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=vocabulary,
        fc_norm=True,
        embed_requires_grad=trainable_embedding,
        eagle_aux_hidden_state_layer_ids=[2, 15, 27],
        mask_token_id=vocabulary - 1,
        speculators_config=SpeculatorsConfig(
            algorithm="peagle",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    model: Any = PEagleDraftModel(config).to(case.device).train()
    with torch.no_grad():
        model.embed_tokens.weight.copy_(inputs.embed_VH)
        for matrix in (model.lm_head, model.verifier_lm_head):
            matrix.weight.copy_(inputs.lm_head_VH)
    if case.side in ("speculators-eager-mask", "speculators-eager-loss"):
        model._create_mask_fn = torch.compiler.disable(model._create_mask_fn)
    return model


def _head_dim(shape: str) -> int:
    hidden, _, heads, _, _ = SHAPES[shape]
    return 64 if shape == "gpt-oss-20b" else hidden // heads


def run_steps(side: Side, optimizer: torch.optim.Optimizer, num_steps: int, device: str) -> tuple[list[float], float]:
    """Seconds of each step, and the last loss."""
    owned = [parameter for parameter in side.model.parameters() if parameter.requires_grad]
    seconds, loss = [], torch.zeros(())
    for _ in range(num_steps):
        start = time.perf_counter()
        loss = side.backward()
        nn.utils.clip_grad_norm_(owned, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds, float(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description="Worker of benchmarks.speculators.")
    parser.add_argument("case", type=json.loads)
    case = Case(**parser.parse_args().case)
    inputs = Inputs.random(case)
    side = (our_side if case.side == "peagle" else their_side)(case, inputs)
    owned = [parameter for parameter in side.model.parameters() if parameter.requires_grad]
    on_gpu = case.device == "cuda"
    optimizer = torch.optim.AdamW(owned, lr=1e-4, fused=on_gpu)
    first_steps, _ = run_steps(side, optimizer, 3, case.device)
    if on_gpu:
        torch.cuda.empty_cache()
    print("ready", flush=True)
    sys.stdin.readline()
    run_steps(side, optimizer, 1, case.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds, loss = run_steps(side, optimizer, case.num_steps, case.device)
    step_ms = statistics.median(seconds) * 1000
    found = {
        "num_rows": side.num_rows,
        "num_trainable": sum(parameter.numel() for parameter in owned),
        "step_ms": round(step_ms, 3),
        "step_ms_each": [round(one * 1000, 3) for one in seconds],
        "tokens_per_s": round(case.num_tokens / step_ms * 1000, 1),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if on_gpu else None,
        "first_steps_s": [round(one, 2) for one in first_steps],
        "loss": round(loss, 4),
        "settings": side.settings,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
