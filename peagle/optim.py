"""The drafter's optimizer (AdamW, or Muon for the matrices of its layers), schedule and moving average."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from peagle.recipe import OptimizerRecipe, ScheduleRecipe


class Optimizer:
    """One or two torch optimizers stepped together. `scale` multiplies every peak learning rate (the schedule)."""

    def __init__(self, parameters: dict[str, nn.Parameter], recipe: OptimizerRecipe, *, fused: bool) -> None:
        self.recipe = recipe
        self.parameters = list(parameters.values())
        matrices = [
            p for name, p in parameters.items() if recipe.name == "muon" and p.ndim == 2 and name.startswith("layers.")
        ]
        chosen = {id(p) for p in matrices}
        others = [p for p in self.parameters if id(p) not in chosen]
        adamw = torch.optim.AdamW(
            others, lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=fused
        )
        self._parts: list[tuple[torch.optim.Optimizer, float]] = [(adamw, recipe.lr)]
        if matrices:
            # match_rms_adamw: an update of Muon gets the size of one of AdamW, so that one scale of learning rates
            # serves both.
            muon = torch.optim.Muon(
                matrices, lr=recipe.muon_lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
            self._parts.append((muon, recipe.muon_lr))

    def step(self, scale: float) -> float:
        """Clips, steps, clears. Returns the gradient norm before clipping.

        Raises FloatingPointError for a norm that is no finite number; weights and moments are then as before.
        """
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.recipe.max_grad_norm))
        if not math.isfinite(norm):
            raise FloatingPointError(f"gradient norm is {norm}")
        for part, lr in self._parts:
            for group in part.param_groups:
                group["lr"] = lr * scale
            part.step()
            part.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part, _ in self._parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Takes over moments and counts; the recipe's settings stay, as `step` has its rates too."""
        for (part, _), state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)
            for group in part.param_groups:
                group["weight_decay"] = self.recipe.weight_decay
                if "betas" in group:  # Muon has none
                    group["betas"] = self.recipe.betas


def schedule_scale(recipe: ScheduleRecipe, step: int, elapsed_s: float) -> tuple[float, bool]:
    """Share of the peak learning rate at this step (from 1), and whether it is the last."""
    progress = step / recipe.max_steps
    if recipe.max_minutes is not None:
        progress = max(progress, elapsed_s / (60 * recipe.max_minutes))
    cosine = recipe.final_ratio + (1 - recipe.final_ratio) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return cosine * min(1.0, step / max(recipe.warmup_steps, 1)), progress >= 1


class MovingAverage:
    """Exponential moving average of parameters in float32; decay 0 keeps just the latest."""

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self.values = {name: p.detach().clone() for name, p in parameters.items()}
        self._live = parameters

    @torch.no_grad()
    def update(self, step: int) -> None:
        # Short runs would otherwise average in the start: the decay grows to its value over the first steps.
        decay = min(self.decay, (1 + step) / (10 + step)) if self.decay else 0.0
        live = [p.detach() for p in self._live.values()]
        torch._foreach_lerp_(list(self.values.values()), live, 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges averaged and live values, in place; a second call undoes it."""
        for name, parameter in self._live.items():
            kept = parameter.detach().clone()
            parameter.copy_(self.values[name])
            self.values[name].copy_(kept)
