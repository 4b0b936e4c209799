"""Trains a head on, round after round, on conversations in memory, and compares it with the head that drafts now.

The learner of a running service (`deployments.learner`) uses it. Losses, passes, optimizer and moving average are those
of the trainer; the settings are a recipe's. The target's hidden states are recomputed here, as in training.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from peagle.checkpoint import load_head, save_head, with_tables
from peagle.config import HeadError
from peagle.provenance import conditions
from peagle.schema import SettingsError
from peagle.train.data import Conversations, PackedBatches
from peagle.train.evaluate import AnswerCounts, members, ratios, replay
from peagle.train.passes import States
from peagle.train.recipe import Recipe
from peagle.train.target import Target
from peagle.train.trainer import HeadTraining, LossTally, Workers, schedule_scale

SETTINGS: dict[str, dict[str, Any]] = {
    "batch": {"num_sequences": 4, "max_tokens": 2048, "long": "cut"},
    "optimizer": {"name": "muon", "lr": 3e-4, "muon_lr": 1e-3, "ema_decay": 0.98},
    "schedule": {"max_steps": 200, "max_minutes": 20, "warmup_steps": 10, "final_ratio": 0.1},
    "loss": {"offset_decay": 0.9, "reach": 0.3},
}
"""Sections of a recipe, for a head that is trained already; keys of `learning.recipe` override them."""


def continual_recipe(given: dict[str, dict[str, Any]], ptd_token_id: int = 0) -> Recipe:
    """The recipe of `SETTINGS`, overridden by `given`. Raises ValueError for a key that no recipe has, or a section
    that a round cannot change."""
    if foreign := given.keys() - {*SETTINGS, "cod"}:
        raise ValueError(f"{sorted(foreign)[0]} is no section of it: {', '.join([*SETTINGS, 'cod'])}")
    sections = {name: {**SETTINGS.get(name, {}), **given.get(name, {})} for name in {*SETTINGS, *given}}
    names = dict.fromkeys(("target", "data", "output"), "live")
    try:
        return Recipe.read({**names, "drafter": {"ptd_token_id": ptd_token_id}, **sections})
    except SettingsError as error:
        raise ValueError("; ".join(error.problems)) from error


class HeadInTraining(HeadTraining):
    """A head that is trained on, `current`. Weights and moments stay from round to round; the new head is the moving
    average.

    Raises HeadError for an EAGLE-3 head.
    """

    def __init__(self, settings: dict[str, dict[str, Any]], target: Target, head_dir: Path, k_max: int) -> None:
        """settings: as `continual_recipe` takes them. k_max: of the service; a head is trained for it where its file
        does not name `num_depths`."""
        self.config, self._tensors = load_head(head_dir)
        if not self.config.num_depths_is_known:
            self.config = dataclasses.replace(self.config, num_depths=k_max)
        if self.config.ptd_token_id is None:  # not `is_parallel`, so that its type is known below
            raise HeadError(f"{head_dir}: an EAGLE-3 head; P-EAGLE heads are trained on")
        recipe, self.target, self.num_rounds = continual_recipe(settings, self.config.ptd_token_id), target, 0
        self.current = target.build_drafter(self.config, self._tensors, target.model.dtype)
        drafter = target.build_drafter(self.config, self._tensors, torch.float32)
        drafter.share_target(self.current.embed_tokens.weight, self.current.lm_head.weight)
        super().__init__(recipe, drafter, torch.Generator(target.device).manual_seed(0), Workers())

    def train(self, data: Conversations, rest: Callable[[float], None]) -> dict[str, Any]:
        """One round; returns its figures. rest: called after each step with its seconds, to wait as long as others need
        the processor. Raises FloatingPointError when loss or gradient is no number."""
        schedule, packing = self.recipe.schedule, self.recipe.batch
        batches = PackedBatches(
            data, **packing.model_dump(include={"num_sequences", "max_tokens", "long"}), seed=self.num_rounds
        )
        self.num_rounds += 1
        tally = LossTally(self.config.num_depths, self.target.device)
        step, busy_s, begun_s, over = 0, 0.0, time.monotonic(), False
        self.drafter.zero_grad(set_to_none=True)  # a round may have ended between a pass and its step
        for batch in batches():
            step, began_s = step + 1, time.monotonic()
            on_device = batch.to(self.target.device)
            aux_last = self.target.states(on_device.tokens_BN, on_device.position_BN, self.config.aux_layer_ids)
            tally.add(self.add_gradients(on_device, States(*aux_last, self.target.lm_head_VS)))
            scale, over = schedule_scale(schedule, step, time.monotonic() - begun_s)
            self.update(scale)
            busy_s += (took_s := time.monotonic() - began_s)
            if over:
                break
            rest(took_s)
        return {
            "num_steps": step,
            "busy_s": round(busy_s, 1),
            "seconds": round(time.monotonic() - begun_s, 1),
            **batches.counts,
            **tally.read(),
        }

    def compare(self, data: Conversations, num_draft_tokens: int, workloads: Sequence[str]) -> dict[str, Any]:
        """AL at K = num_draft_tokens on the same answers: of the new head (`new`), of the current one (`current`), and
        their ratio with its 95% interval. workloads: of each answer; `by_workload` has the figures of each. Answers
        have two tokens or more."""
        self.average.swap()
        try:
            drafters = self.drafter, self.current
            new, current = (replay(drafter, self.target, data, num_draft_tokens).counts for drafter in drafters)
        finally:
            self.average.swap()
        parts = members([[name] for name in workloads]).items()
        by_workload = {name: compared(new.select(among), current.select(among)) for name, among in parts}
        return compared(new, current) | {"by_workload": by_workload}

    def save(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Writes the head, as vLLM loads it, with where it comes from."""
        tensors = dict(self._tensors)
        for name, value in self.average.values.items():
            like = tensors.get(name, value)  # the mask token's embedding may be a row of the head's own table
            tensors[name] = value.to(like.dtype).reshape(like.shape).cpu()
        tables = {"embed_tokens.weight": self.target.embed_VS.cpu(), "lm_head.weight": self.target.lm_head_VS.cpu()}
        save_head(folder, self.config, with_tables(self.config, tensors, tables))
        recipe = self.recipe.model_dump(include={"drafter", "cod", "batch", "optimizer", "schedule", "loss"})
        document = {"made": conditions(), "recipe": recipe, **provenance}
        (folder / "provenance.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def compared(new: AnswerCounts, current: AnswerCounts) -> dict[str, Any]:
    """Figures of two heads on the same answers at the deepest K of their counts."""
    k, num_tokens = new.num_steps.shape[1], int(new.num_tokens.sum())
    found: dict[str, Any] = {"num_answers": len(new.num_tokens), "num_tokens": num_tokens, "ratio": 1.0}
    widest = 1 / (k + 1), k + 1.0
    if not num_tokens:
        return found | {"low": widest[0], "high": widest[1]}
    for name, counts in (("new", new), ("current", current)):
        found[f"acceptance_length_{name}"] = round(num_tokens / int(counts.num_steps[:, -1].sum()), 4)
    paired = ratios(new, current, (k,))
    low, high = paired.get("ratio_95", {}).get(str(k), widest)
    return found | {"ratio": paired["ratio"][str(k)], "low": low, "high": high}
