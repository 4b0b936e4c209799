"""What a run will take, known before it starts: parameters, memory, tokens. Refuses a run that cannot fit."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from peagle.config import DrafterConfig
from peagle.model import Drafter
from peagle.train.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """num_trainable: parameters of the drafter; gib: of each part, `rows` (activations) roughly; available: GiB;
    gpu_bytes: `spread` of the target."""

    num_trainable: int
    gib: dict[str, float]
    available: float
    gpu_bytes: dict[int, int] | None = None

    @classmethod
    def make(
        cls,
        recipe: Recipe,
        target_dir: Path,
        target: dict[str, Any],
        config: DrafterConfig,
        device: torch.device,
        num_workers: int = 1,
    ) -> TrainingPlan:
        """target: its `config.json`. num_workers: that share a host without a GPU. Loads no weights."""
        with torch.device("meta"):
            num_owned = sum(parameter.numel() for parameter in Drafter(config).parameters())
        on_gpu, batch = device.type == "cuda", recipe.batch
        width, num_tokens = 2 if on_gpu else 4, batch.num_sequences * batch.max_tokens
        ratio = 1.0 if recipe.drafter.method == "eagle3" else recipe.cod.ratio
        num_rows = num_tokens * sum(ratio**offset for offset in range(config.num_depths))
        num_logits = min(recipe.loss.chunk, num_rows) * (target["vocab_size"] + 2 * config.draft_vocab_size)
        kept = config.num_hidden_layers * (8 * config.hidden_size + 3 * config.intermediate_size)
        num_bytes = {
            "target": target_bytes(target_dir, target, width),
            "drafter, gradients, optimizer, average": num_owned * 4 * 5,
            "hidden states": num_tokens * target["hidden_size"] * (target["num_hidden_layers"] + 5) * width,
            "logits": num_logits * width,
            "rows": num_rows * kept * width / batch.num_segments,
        }
        others = sum(num_bytes.values()) - num_bytes["target"] - num_bytes["rows"]
        available, gpu_bytes = torch.cuda.mem_get_info(device)[0] if on_gpu else host_memory() / num_workers, None
        if on_gpu and num_workers == 1 and num_bytes["target"] + others > available:
            table = target["vocab_size"] * target["hidden_size"] * width  # a copy for the loss
            if (gpu_bytes := spread(others + num_bytes["rows"] + table)) is not None:
                available = others + sum(gpu_bytes.values())
        gib = {name: size / 2**30 for name, size in num_bytes.items()}
        return cls(num_owned, gib, available / 2**30, gpu_bytes)

    def check(self) -> None:
        """Raises ValueError where the parts that are known exceed the device's memory; `rows` is left out."""
        known = sum(self.gib.values()) - self.gib["rows"]
        if known > self.available:
            raise ValueError(
                f"this run cannot fit: it needs more than {known:.1f} GiB ({self._parts()}), and there "
                f"are {self.available:.1f} GiB. Lower batch.num_sequences, batch.max_tokens, loss.chunk or "
                "drafter.num_layers, or take a smaller target"
            )

    def lines(self, recipe: Recipe, counts: dict[str, int], num_held_out: int, num_workers: int) -> list[str]:
        """What is printed. counts: `PackedBatches.counts`."""
        batch, schedule = recipe.batch, recipe.schedule
        step = batch.num_sequences * batch.max_tokens * num_workers
        passes = schedule.max_steps * step / counts["num_tokens"]
        limit = "" if schedule.max_minutes is None else f" or {schedule.max_minutes:g} minutes"
        return [
            f"data      {counts['num_conversations']:,} conversations, {counts['num_tokens']:,} tokens, "
            f"{counts['num_answer_tokens']:,} of answers; held out: {num_held_out:,} conversations",
            f"drafter   {self.num_trainable / 1e6:.1f} M trainable parameters",
            f"schedule  {schedule.max_steps:,} steps{limit}, {step:,} tokens a step, at most {passes:,.1f} passes over "
            "the data",
            f"memory    about {sum(self.gib.values()):.1f} of {self.available:.1f} GiB ({self._parts()})"
            + ("" if self.gpu_bytes is None else f"; the target's layers go over {len(self.gpu_bytes)} GPUs"),
        ]

    def _parts(self) -> str:
        return "; ".join(f"{name} {size:.1f}" for name, size in self.gib.items())


def target_bytes(target_dir: Path, target: dict[str, Any], width: int) -> float:
    """Bytes of its weights, `width` a parameter. target: its `config.json`."""
    stored = float(sum(path.stat().st_size for path in target_dir.glob("*.safetensors")))
    if "quantization_config" in target:  # it stays as it is stored
        return stored
    return stored * width / (4 if "float32" in (target.get("dtype"), target.get("torch_dtype")) else 2)


def spread(others: float) -> dict[int, int] | None:
    """Bytes that a target's layers may take of each GPU of this process: nine tenths of what is free, on the first one
    beside `others`, the bytes of what else runs there. None with one GPU, or without the package accelerate, which
    moves what goes from one to the next."""
    if torch.cuda.device_count() < 2 or importlib.util.find_spec("accelerate") is None:
        return None
    free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
    return {index: int(0.9 * max(0.0, size - others * (index == 0))) for index, size in enumerate(free)}


def host_memory() -> int:
    """Bytes of memory that this process may use: the host's, or what its container is limited to."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return physical if text == "max" else min(physical, int(text))
