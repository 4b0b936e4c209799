"""Trains a P-EAGLE head from a recipe, on one device; resumes by itself.

    python -m peagle.train configs/train/smollm2-135m.yaml [section.key=value ...]

Each step: the target's hidden states and logits of a packed batch (recomputed, never stored), rows by conditional
drop-token sampling, one pass of the drafter under the COD mask, soft cross-entropy to the target's distribution at
every useful row. `output/checkpoint.pt` resumes a run, `output/head/` is the head, `output/log.jsonl` the figures on
the way.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from peagle.checkpoint import save_head
from peagle.config import DrafterConfig
from peagle.data import Batch, Conversations, PackedBatches
from peagle.evaluate import evaluate, load_answers
from peagle.model import Drafter, initialize
from peagle.optim import MovingAverage, Optimizer, schedule_scale
from peagle.passes import ParallelPass, Pass, Report, States
from peagle.provenance import conditions
from peagle.recipe import Recipe
from peagle.target import Target

logger = logging.getLogger(__name__)


class Trainer:
    """State of one run. `loss` is a training pass, `run` the loop around it."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        cuda = recipe.device == "cuda" or (recipe.device == "auto" and torch.cuda.is_available())
        self.device = "cuda" if cuda else "cpu"
        self.compiled = recipe.compile and cuda
        dtype = torch.bfloat16 if cuda else torch.float32
        self.target = Target(recipe.target_dir(), device=self.device, dtype=dtype, compiled=self.compiled)
        self.batches = PackedBatches(
            Conversations.load(recipe.data),
            num_sequences=recipe.batch.num_sequences,
            max_tokens=recipe.batch.max_tokens,
            seed=recipe.seed,
        )
        self.random = torch.Generator(self.device).manual_seed(recipe.seed)
        self.drafter = self._new_drafter()
        owned = self.drafter.trainable()
        self.optimizer = Optimizer(owned, recipe.optimizer, fused=cuda)
        self.average = MovingAverage(owned, recipe.optimizer.ema_decay)
        self._pass: Pass = ParallelPass(recipe, self.random, compiled=self.compiled)
        self.output = Path(recipe.output)
        self.step, self.elapsed_s = 0, 0.0

    def _new_drafter(self) -> Drafter:
        recipe = self.recipe.drafter
        config = DrafterConfig.for_target(
            self.target.config,
            num_layers=recipe.num_layers,
            num_depths=recipe.num_depths,
            ptd_token_id=recipe.ptd_token_id,
            fc_norm=recipe.fc_norm,
            norm_before_residual=recipe.norm_before_residual,
        )
        drafter = Drafter(config).to(self.device)
        drafter.share_target(self.target.embed_VS, self.target.lm_head_VS)
        sample = next(self.batches()).to(self.device)
        aux_BNX, _ = self.target.states(sample.tokens_BN, sample.document_BN, sample.position_BN, config.aux_layer_ids)
        aux_RX = aux_BNX[sample.document_BN >= 0]
        initialize(drafter, aux_RX, self.random)
        return drafter

    def run_pass(self, batch: Batch) -> Report:
        """Adds the gradients of one batch."""
        config = self.drafter.config
        aux_BNX, last_BNS = self.target.states(
            batch.tokens_BN, batch.document_BN, batch.position_BN, config.aux_layer_ids
        )
        return self._pass(self.drafter, batch, States(aux_BNX, last_BNS, self.target.lm_head_VS))

    def run(self) -> Path:
        """Trains to the end of the schedule and writes the head. Returns its directory."""
        self.output.mkdir(parents=True, exist_ok=True)
        self.resume()
        bar = tqdm(total=self.recipe.schedule.max_steps, initial=self.step, unit="step", mininterval=5)
        counted, correct = (torch.zeros(self.drafter.config.num_depths, device=self.device) for _ in range(2))
        with ThreadPoolExecutor(1) as ahead:
            batches = self.batches(skip=self.step)
            pending, over, last = ahead.submit(next, batches), False, time.monotonic()
            while not over:
                batch, pending = pending.result().to(self.device), ahead.submit(next, batches)
                report = self.run_pass(batch)
                scale, over = schedule_scale(self.recipe.schedule, self.step + 1, self.elapsed_s)
                norm = self.optimizer.step(scale)
                self.average.update(self.step)
                counted += torch.bincount(report.offset_R, minlength=len(counted))
                correct += torch.bincount(report.offset_R, report.correct_R.float(), minlength=len(counted))
                self.step += 1
                bar.update()
                now = time.monotonic()
                # The first steps compile; they are not training time.
                self.elapsed_s += now - last if self.step > 3 else 0.0
                last = now
                if self.step % self.recipe.log_every_steps == 0 or over:
                    self._log(
                        bar, loss=report.loss.item(), gradient_norm=float(norm), accuracy=_shares(correct, counted)
                    )
                    counted.zero_(), correct.zero_()
                if self.step % self.recipe.save_every_steps == 0:
                    self.save()
                if self.step % self.recipe.evaluate.every_steps == 0 and not over:
                    self._evaluate(self.recipe.evaluate.max_conversations)
                    last = time.monotonic()
        bar.close()
        return self.finish()

    def finish(self) -> Path:
        """Writes the averaged head with its provenance, after an evaluation on all answers."""
        self.save()
        groups = self._evaluate(None)
        recipe = self.recipe
        provenance = {
            "made": conditions(),
            "recipe": recipe.model_dump(exclude={"generate": {"openings"}}),
            "training": {
                "num_steps": self.step,
                "minutes": round(self.elapsed_s / 60, 2),
                "num_conversations": len(self.batches.data),
                "num_left_out": self.batches.num_left_out,
                "num_tokens": int(self.batches.data.lengths.sum()),
                "num_answer_tokens": self.batches.data.num_answer_tokens,
            },
            "acceptance_offline": groups,
        }
        tensors = {name: value.to(torch.bfloat16) for name, value in self.average.values.items()}
        head = save_head(self.output / "head", self.drafter.config, tensors)
        (head / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
        return head

    def _evaluate(self, max_conversations: int | None) -> dict[str, Any]:
        if self.recipe.evaluate.data is None:
            return {}
        self.average.swap()
        groups = evaluate(self.drafter, self.target, *load_answers(self.recipe.evaluate.data, max_conversations))
        self.average.swap()
        for group in ("all", "non-looping", "humaneval"):
            if group in groups:
                self._append({"step": self.step, "group": group, **groups[group]})
        return groups

    def _log(self, bar: Any, **figures: Any) -> None:
        self._append({"step": self.step, "minutes": round(self.elapsed_s / 60, 3), **figures})
        first = " ".join(f"{share:.2f}" for share in figures["accuracy"])
        bar.set_postfix_str(f"loss {figures['loss']:.3f} accuracy by depth {first}", refresh=False)

    def _append(self, record: dict[str, Any]) -> None:
        with (self.output / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")

    def save(self) -> None:
        """Writes `checkpoint.pt` whole or not at all."""
        state = {
            "drafter": {name: p.detach() for name, p in self.drafter.trainable().items()},
            "average": self.average.values,
            "optimizer": self.optimizer.state_dict(),
            "random": self.random.get_state(),
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "recipe": self.recipe.model_dump(),
        }
        partial = self.output / "checkpoint.pt.partial"
        torch.save(state, partial)
        partial.replace(self.output / "checkpoint.pt")

    def resume(self) -> None:
        """Goes on from `checkpoint.pt` if there is one. Raises ValueError when it is of another recipe."""
        path = self.output / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        for section in ("target", "seed", "drafter", "batch"):
            ours, theirs = self.recipe.model_dump()[section], state["recipe"][section]
            if ours != theirs:
                raise ValueError(
                    f"{path} was made with {section} = {theirs}, the recipe says {ours}: use another output folder"
                )
        with torch.no_grad():
            for name, parameter in self.drafter.trainable().items():
                parameter.copy_(state["drafter"][name])
                self.average.values[name].copy_(state["average"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random.set_state(state["random"].cpu())
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
        logger.info("resumed at step %d", self.step)


def _shares(correct: Tensor, counted: Tensor) -> list[float]:
    return [round(share, 4) for share in (correct / counted.clamp_min(1)).tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_float32_matmul_precision("high")
    head = Trainer(Recipe.load(args.recipe, args.overrides)).run()
    print(f"head written to {head}")


if __name__ == "__main__":
    main()
