"""What a run will take, known before it starts: parameters, memory, tokens. Refuses a run that cannot fit."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch

from peagle.config import DrafterConfig
from peagle.model import Drafter
from peagle.train.recipe import Recipe

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Plan:
    """num_trainable: parameters of the drafter; num_bytes: memory of each part, `rows` (activations) roughly.

    The sum is between 0.9 and 1.25 times the measured peak of the runs of `configs/train` on GPUs.
    """

    num_trainable: int
    num_bytes: dict[str, int]
    available: int

    @classmethod
    def make(
        cls, recipe: Recipe, target_dir: Path, target: dict[str, Any], config: DrafterConfig, device: torch.device
    ) -> Plan:
        """target: its `config.json`. Loads no weights."""
        with torch.device("meta"):
            drafter = Drafter(config)
        owned = sum(parameter.numel() for parameter in drafter.parameters())
        owned += target["vocab_size"] * config.hidden_size * recipe.drafter.trainable_embedding
        on_gpu = device.type == "cuda"
        width, batch = 2 if on_gpu else 4, recipe.batch
        num_tokens = batch.num_sequences * batch.max_tokens
        shares = [1.0 if recipe.drafter.method == "eagle3" else recipe.cod.ratio**g for g in range(config.num_depths)]
        num_rows = round(num_tokens * sum(shares))
        num_logits = target["vocab_size"] + 2 * config.draft_vocab_size
        kept = config.num_hidden_layers * (8 * config.hidden_size + 3 * config.intermediate_size)
        num_bytes = {
            "target": _weight_bytes(target_dir, target, width),
            "drafter, gradients, optimizer, average": owned * 4 * 5,
            "hidden states": num_tokens * target["hidden_size"] * (target["num_hidden_layers"] + 5) * width,
            "logits": min(recipe.loss.chunk, num_rows) * num_logits * width,
            "rows": num_rows * kept * width // batch.num_segments,
        }
        available = (
            torch.cuda.mem_get_info(device)[0] if on_gpu else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        )
        return cls(owned, num_bytes, available)

    def check(self) -> None:
        """Raises ValueError where the parts that are known exceed the device's memory; `rows` is left out."""
        known = {name: size for name, size in self.num_bytes.items() if name != "rows"}
        if sum(known.values()) > self.available:
            raise ValueError(
                f"this run cannot fit: it needs more than {sum(known.values()) / _GIB:.1f} GiB ({_sizes(known)}), and "
                f"the device has {self.available / _GIB:.1f} GiB. Lower batch.num_sequences (batch.num_accumulated "
                "keeps the step's size), batch.max_tokens, loss.chunk or drafter.num_layers, or take a smaller target"
            )

    def lines(self, recipe: Recipe, counts: dict[str, int], num_held_out: int, num_workers: int) -> list[str]:
        """What is printed. counts: `PackedBatches.counts`."""
        batch, schedule = recipe.batch, recipe.schedule
        step = batch.num_sequences * batch.max_tokens * batch.num_accumulated * num_workers
        passes = schedule.max_steps * step / counts["num_tokens"]
        until = f"{schedule.max_steps:,} steps" + (
            f" or {schedule.max_minutes:g} minutes" if schedule.max_minutes else ""
        )
        return [
            f"data      {counts['num_conversations']:,} conversations, {counts['num_tokens']:,} tokens, "
            f"{counts['num_answer_tokens']:,} of answers; held out: {num_held_out:,} conversations",
            f"drafter   {self.num_trainable / 1e6:.1f} M trainable parameters",
            f"schedule  {until}, {step:,} tokens a step, at most {passes:.1f} passes over the data",
            f"memory    about {sum(self.num_bytes.values()) / _GIB:.1f} of {self.available / _GIB:.1f} GiB "
            f"({_sizes(self.num_bytes)})",
        ]


def _sizes(num_bytes: dict[str, int]) -> str:
    return "; ".join(f"{name} {size / _GIB:.1f}" for name, size in num_bytes.items())


def _weight_bytes(target_dir: Path, target: dict[str, Any], width: int) -> int:
    """Of its safetensors once loaded with `width` bytes a parameter; quantised ones stay as they are."""
    stored = sum(path.stat().st_size for path in target_dir.glob("*.safetensors"))
    if "quantization_config" in target:
        return stored
    return stored * width // (4 if target.get("dtype", target.get("torch_dtype")) == "float32" else 2)
