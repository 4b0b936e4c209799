"""Trains a head from a recipe; goes on from its last checkpoint by itself.

Each step is a pass (`peagle.train.passes`) over a packed batch. `output/checkpoint.pt` resumes a run, `output/head/` is
the head, `output/log.jsonl` the figures on the way, and `output/tensorboard/` the same for TensorBoard.

Data-parallel training: every worker has the whole drafter, batches of its own, and the mean of all gradients. Ray Train
or torchrun starts the workers and torch.distributed's default process group; without one there is a single worker.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import pickle
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tensorboardX import SummaryWriter
from torch import Tensor, nn
from torch import distributed as dist
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from peagle.checkpoint import save_drafter
from peagle.config import read_target_config
from peagle.model import Drafter
from peagle.provenance import conditions
from peagle.train.data import Batch, Conversations, PackedBatches, check_data_fits, read_manifest, write_manifest
from peagle.train.evaluate import check_categories, evaluate, load_answers, table
from peagle.train.passes import Eagle3Pass, PassReport, PEaglePass, States, drafter_config, new_drafter, seen_by_drafter
from peagle.train.plan import TrainingPlan
from peagle.train.qk_clip import EVERY_STEPS, attention_scores, clip_attention
from peagle.train.recipe import OptimizerRecipe, Recipe, ScheduleRecipe
from peagle.train.target import KeptStates, Target

logger = logging.getLogger(__name__)

UNCHANGED = ("target", "seed", "drafter.", "batch.", "optimizer.name", "evaluate.held_out")
"""Settings that a resumed run must keep: each a key, or the beginning of keys."""

MAX_MASK_SHARE = 1e-4
"""Share of the tokens up to which the mask token may stand in the data: a target may sample any token."""

WARMUP_STEPS = 3
"""First steps, which compile, and so are not training time."""
ADAMW_BETAS = (0.9, 0.95)


class Workers:
    """rank: 0 .. size - 1; rank 0 writes files and decides."""

    def __init__(self) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        self.leads = self.rank == 0

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites every worker's tensors by those of rank 0, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every worker, by rank; equal shapes. Every worker must call it."""
        if self.size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor)
        return gathered

    def agree(self, value: float, device: torch.device | str) -> float:
        """Rank 0's value: clocks differ, decisions must not."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=device)
        self.share([shared])
        return float(shared)

    def average(self, parameters: list[nn.Parameter]) -> None:
        """Gradients become the mean over all workers; one message for all of them.

        A parameter that no row of this worker reached counts as zero.
        """
        if self.size == 1:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        pieces = (flat / self.size).split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)


class _WithoutBfloat16(TorchFunctionMode):
    """`Tensor.bfloat16` is a copy. torch's Muon takes its matrix products in bfloat16, for which a CPU that has no such
    arithmetic needs far longer than in float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0].clone() if func is torch.Tensor.bfloat16 else func(*args, **(kwargs or {}))


class Optimizer:
    """One or two torch optimizers stepped together. `scale` multiplies every peak learning rate (the schedule)."""

    def __init__(self, parameters: dict[str, nn.Parameter], recipe: OptimizerRecipe, *, fused: bool) -> None:
        self.recipe = recipe
        self.parameters = list(parameters.values())
        matrices, others = list[nn.Parameter](), list[nn.Parameter]()
        for name, p in parameters.items():
            is_matrix = p.ndim == 2 and name.startswith("layers.")
            (matrices if recipe.name == "muon" and is_matrix else others).append(p)
        adamw = torch.optim.AdamW(
            others, lr=recipe.lr, betas=ADAMW_BETAS, weight_decay=recipe.weight_decay, fused=fused
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
            for group in part.param_groups:  # after a resume these are of the checkpoint
                group |= {"lr": lr * scale, "weight_decay": self.recipe.weight_decay}
            with contextlib.nullcontext() if self.parameters[0].is_cuda else _WithoutBfloat16():
                part.step()
            part.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part, _ in self._parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Takes over moments and counts; rates and decay stay the recipe's."""
        for (part, _), state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)


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


class HeadTraining:
    """A drafter with its passes, optimizer and moving average; `step` counts the optimizer's steps."""

    def __init__(self, recipe: Recipe, drafter: Drafter, random: torch.Generator, workers: Workers) -> None:
        """random: where rows are drawn from, on the drafter's device."""
        self.recipe, self.drafter, self.random, self.workers, self.step = recipe, drafter, random, workers, 0
        on_gpu, owned = random.device.type == "cuda", drafter.trainable()
        self.optimizer = Optimizer(owned, recipe.optimizer, fused=on_gpu)
        self.average = MovingAverage(owned, recipe.optimizer.ema_decay)
        compiled, is_parallel = recipe.compile and on_gpu, drafter.config.is_parallel
        self._pass = (
            PEaglePass(recipe, random, compiled=compiled) if is_parallel else Eagle3Pass(recipe, compiled=compiled)
        )

    def add_gradients(self, batch: Batch, states: States) -> PassReport:
        """Runs a batch on the drafter's device through a pass, after clipping attention scores if the recipe limits
        them (scores_WLA: of W workers, L layers, A heads)."""
        batch, states = seen_by_drafter(batch, states, self.recipe.batch.joined_share, self.step)
        max_score = None if self.drafter.config.qk_norm else self.recipe.optimizer.max_attention_score
        if max_score is not None and self.step % EVERY_STEPS == 0:
            scores_WLA = torch.stack(self.workers.gather(attention_scores(self.drafter, batch, states.aux_BNX)))
            clip_attention(self.drafter, scores_WLA.amax(0), max_score)
        return self._pass(self.drafter, batch, states)

    def update(self, scale: float) -> float:
        """Takes a step of the optimizer; returns the gradient norm. Raises FloatingPointError as `Optimizer.step`."""
        self.workers.average(self.optimizer.parameters)
        norm = self.optimizer.step(scale)
        self.average.update(self.step)
        self.step += 1
        return norm


class Trainer(HeadTraining):
    """State of one worker's run, and the loop. With several workers rank 0 evaluates and writes."""

    def __init__(self, recipe: Recipe, device: str | None = None) -> None:
        """device: by default a GPU where there is one; a worker is given one GPU of several. Raises ValueError where
        data, target or device do not fit the recipe."""
        self.recipe, self.workers = recipe, Workers()
        self.elapsed_s, self.timed_tokens = 0.0, 0
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        on_gpu = self.device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        self.output = Path(recipe.output)
        target_dir = recipe.target_dir()
        target_config = read_target_config(target_dir)
        plan = TrainingPlan.make(
            recipe, target_dir, target_config, drafter_config(recipe, target_config), self.device, self.workers.size
        )
        plan.check()
        data, num_held_out = self._split_data()
        packing = recipe.batch.model_dump(include={"num_sequences", "max_tokens", "long"})
        self.batches = PackedBatches(data, seed=recipe.seed, **packing)
        check_data_fits(recipe.data, target_dir, self.batches)
        num_masks = int((data.tokens == recipe.drafter.ptd_token_id).sum())
        if num_masks > MAX_MASK_SHARE * len(data.tokens):
            raise ValueError(
                f"drafter.ptd_token_id = {recipe.drafter.ptd_token_id} stands in the conversations of {recipe.data}, "
                f"{num_masks} times: name a token that no text has"
            )
        self.data_digest = data.digest()
        if self.workers.leads:
            if self.answers:  # found at the start, not after the training
                try:
                    check_data_fits(self.answers, target_dir)
                except ValueError as error:
                    raise ValueError(f"evaluate.data: {error}") from error
            for line in plan.lines(recipe, self.batches.counts, num_held_out, self.workers.size):
                logger.info(line)
        self.target = Target(
            target_dir,
            device=str(self.device),
            dtype=dtype,
            compiled=recipe.compile and on_gpu,
            gpu_bytes=plan.gpu_bytes,
        )
        random = torch.Generator(self.device).manual_seed(recipe.seed)
        drafter = new_drafter(recipe, self.target, self.batches, random)
        self.workers.share(drafter.trainable().values())
        if not self.workers.leads:  # workers start from one drafter and then drop different rows
            random.manual_seed(hash((recipe.seed, self.workers.rank)) % 2**63)
        super().__init__(recipe, drafter, random, self.workers)
        self._events: SummaryWriter | None = None
        self._kept: KeptStates | None = None
        if recipe.states_dir is not None:
            self._kept = KeptStates(recipe.states_dir, self.target, self.batches.data, drafter.config.aux_layer_ids)

    def _split_data(self) -> tuple[Conversations, int]:
        """The conversations to train on, and the number of those held out, which rank 0 writes into
        `output/held-out` as a folder that `peagle evaluate` takes. Sets `answers`: folder to evaluate on."""
        recipe = self.recipe
        data, self.answers = Conversations.load(recipe.data), recipe.evaluate.data
        if not recipe.evaluate.held_out:
            return data, 0
        trained, held_out = data.hold_out(recipe.evaluate.held_out)
        if not held_out or not trained:
            raise ValueError(
                f"evaluate.held_out = {recipe.evaluate.held_out:g} of {len(data)} conversations leaves "
                f"{len(held_out)} to evaluate on and {len(trained)} to train on: change it, or add data"
            )
        folder = self.output / "held-out"
        self.answers = str(folder)
        if self.workers.leads:
            made = read_manifest(recipe.data)
            names = made.get("categories") or ["default"] * len(data)
            check_categories(recipe.data, names, data)
            kept = {key: made[key] for key in ("tokenizer", "temperature") if key in made}
            data.select(held_out).save_part(folder, "000")
            write_manifest(folder, kept | {"categories": [names[index] for index in held_out]})
        return data.select(trained), len(held_out)

    def _next(self, batches: Iterator[Batch]) -> tuple[Batch, Tensor | None]:
        """The next batch, on the host, and the target's states of it as far as they are kept."""
        batch = next(batches)
        return batch, None if self._kept is None else self._kept.read(batch)

    def run_pass(self, batch: Batch, kept_BNX: Tensor | None = None) -> PassReport:
        """Adds the gradients of one batch. kept_BNX: what `KeptStates.read` gave for it."""
        if self._kept is not None:
            aux_BNX, last_BNS = self._kept.make(batch) if kept_BNX is None else self._kept.to_device(kept_BNX)
        else:
            layers = self.drafter.config.aux_layer_ids
            aux_BNX, last_BNS = self.target.states(batch.tokens_BN, batch.position_BN, layers)
        return self.add_gradients(batch, States(aux_BNX, last_BNS, self.target.lm_head_VS))

    def run(self) -> Path:
        """Trains to the end of the schedule and writes the head. Returns its directory.

        Raises FloatingPointError when loss or gradient is no number (the last checkpoint is kept), and
        torch.OutOfMemoryError naming the settings to change.
        """
        self.output.mkdir(parents=True, exist_ok=True)
        self.resume()
        if self.workers.leads:  # a run that goes on hides what was written after its checkpoint
            self._events = SummaryWriter(str(self.output / "tensorboard"), purge_step=self.step + 1)
        try:
            self._loop()
        except FloatingPointError as error:
            raise FloatingPointError(
                f"step {self.step + 1}: {error}. {self.output / 'checkpoint.pt'} is that of the last save (every "
                f"{self.recipe.save_every_steps} steps). Lower optimizer.lr or "
                "optimizer.muon_lr, or optimizer.max_grad_norm, and start again"
            ) from error
        except torch.OutOfMemoryError as error:
            batch = self.recipe.batch
            raise torch.OutOfMemoryError(
                f"out of memory: raise batch.num_segments (now {batch.num_segments}), or lower batch.num_sequences "
                f"(now {batch.num_sequences}), batch.max_tokens (now {batch.max_tokens}) or loss.chunk (now "
                f"{self.recipe.loss.chunk}) ({error})"
            ) from error
        return self.finish()

    def _loop(self) -> None:
        schedule, workers = self.recipe.schedule, self.workers
        tally = LossTally(self.drafter.config.num_depths, self.device)
        bar = tqdm(total=schedule.max_steps, initial=self.step, unit="step", mininterval=5, disable=not workers.leads)
        compiled_from, read_at = self.step + WARMUP_STEPS, (self.timed_tokens, self.elapsed_s)
        batches = self.batches(self.step * workers.size, workers.rank, workers.size)
        with bar, ThreadPoolExecutor(1) as ahead:
            # A run that ended may have been cut short before its head was written: no step comes on top.
            _, over = schedule_scale(schedule, self.step, workers.agree(self.elapsed_s, self.device))
            pending, last = ahead.submit(self._next, batches), time.monotonic()
            while not over:
                (batch, kept_BNX), pending = pending.result(), ahead.submit(self._next, batches)
                tally.add(self.run_pass(batch.to(self.device), kept_BNX))
                num_tokens = batch.tokens_BN.numel() * workers.size
                scale, over = schedule_scale(schedule, self.step + 1, workers.agree(self.elapsed_s, self.device))
                norm = self.update(scale)
                bar.update()
                now = time.monotonic()
                # The first steps compile; they are not training time.
                if self.step > compiled_from:
                    self.elapsed_s += now - last
                    self.timed_tokens += num_tokens
                last = now
                if self.step % self.recipe.log_every_steps == 0 or over:
                    figures = tally.read()
                    num_tokens, seconds = self.timed_tokens - read_at[0], self.elapsed_s - read_at[1]
                    read_at = self.timed_tokens, self.elapsed_s
                    speed = {"lr": self.recipe.optimizer.lr * scale, "tokens_per_s": round(num_tokens / (seconds or 1))}
                    at = {"step": self.step, "minutes": round(self.elapsed_s / 60, 3)}
                    self._append(at | figures | {"norm": norm} | speed)
                    first = " ".join(f"{share:.2f}" for share in figures["accuracy"])
                    bar.set_postfix_str(f"loss {figures['loss']:.3f} accuracy by position {first}", refresh=False)
                if self.step % self.recipe.save_every_steps == 0:
                    self.save()
                if self.step % self.recipe.evaluate.every_steps == 0 and not over:
                    self._evaluate(self.recipe.evaluate.max_conversations)
                    last = time.monotonic()

    def finish(self) -> Path:
        """Writes the averaged head with its provenance, after an evaluation on all answers."""
        head = self.output / "head"
        self.save()
        if not self.workers.leads:
            return head
        limits = self.recipe.schedule
        if limits.max_minutes is not None and self.step < limits.max_steps:
            logger.info("schedule.max_minutes, %g, ended the training at step %d", limits.max_minutes, self.step)
        if groups := self._evaluate(None):
            logger.info(table({"groups": groups}))
        recipe = self.recipe
        on_gpu = self.device.type == "cuda"
        provenance = {
            "made": conditions(),
            "recipe": recipe.model_dump(exclude={"generate": {"openings"}}),
            "training": {
                "num_steps": self.step,
                "minutes": round(self.elapsed_s / 60, 2),
                "num_workers": self.workers.size,
                "tokens_per_s": round(self.timed_tokens / self.elapsed_s) if self.elapsed_s else None,
                "peak_memory_bytes": torch.cuda.max_memory_allocated(self.device) if on_gpu else None,
                **self.batches.counts,
            },
            "acceptance_offline": groups,
        }
        save_drafter(head, self.drafter, self.average.values)
        (head / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
        return head

    def _evaluate(self, max_conversations: int | None) -> dict[str, Any]:
        if self.answers is None or not self.workers.leads:
            return {}
        self.average.swap()
        groups = evaluate([self.drafter], self.target, load_answers(self.answers, max_conversations))["groups"]
        self.average.swap()
        for group in ("all", "non-looping"):
            if group in groups:
                self._append({"step": self.step, "group": group, **groups[group]})
        return groups

    def _append(self, record: dict[str, Any]) -> None:
        if not self.workers.leads:
            return
        with (self.output / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")
        if self._events is not None:
            for name, value in scalars(record, record.get("group", "train")):
                self._events.add_scalar(name, value, record["step"])
            self._events.flush()

    def save(self) -> None:
        """Writes `checkpoint.pt` whole or not at all. Every worker must call it: each has a random state of its own."""
        random_states = [state.cpu() for state in self.workers.gather(self.random.get_state().to(self.device))]
        if not self.workers.leads:
            return
        state = {
            "drafter": {name: p.detach() for name, p in self.drafter.trainable().items()},
            "average": self.average.values,
            "target_ids": self.drafter.target_ids,
            "data": self.data_digest,
            "optimizer": self.optimizer.state_dict(),
            "random": random_states,
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "timed_tokens": self.timed_tokens,
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
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} is damaged ({error}): remove it to start again") from error
        asked = settings_by_path(self.recipe.model_dump())
        made = {"evaluate.held_out": 0.0} | settings_by_path(state["recipe"])  # a checkpoint of 0.1 lacks it
        problems = [
            f"{key} = {made.get(key)}, the recipe says {new}"
            for key, new in asked.items()
            if key.startswith(UNCHANGED) and made.get(key) != new
        ]
        if len(state["random"]) != self.workers.size:
            problems.append(f"{len(state['random'])} workers, this run has {self.workers.size}")
        if not torch.equal(self.drafter.target_ids, state["target_ids"]):
            problems.append(f"another draft vocabulary: the answers in {self.recipe.data} have changed")
        if state["data"] != self.data_digest:
            problems.append(
                f"other data: the conversations in {self.recipe.data} have changed, and with them all batches"
            )
        if problems:
            raise ValueError(f"{path} was made with {problems[0]}: use another output folder")
        with torch.no_grad():
            for name, parameter in self.drafter.trainable().items():
                parameter.copy_(state["drafter"][name])
                self.average.values[name].copy_(state["average"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random.set_state(state["random"][self.workers.rank].cpu())
        self.step, self.elapsed_s, self.timed_tokens = state["step"], state["elapsed_s"], state["timed_tokens"]
        logger.info("resumed at step %d", self.step)


def settings_by_path(settings: dict[str, Any], path: str = "") -> dict[str, Any]:
    """`section.key` -> value of the settings of a recipe."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= settings_by_path(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return found


class LossTally:
    """Since the last reading: mean of the weighted losses, which do not compare between recipes with different weights;
    share of drafts by position that equal the target's choice."""

    def __init__(self, num_depths: int, device: torch.device) -> None:
        self._counted, self._correct = (torch.zeros(num_depths, device=device) for _ in range(2))
        self._loss, self._passes = torch.zeros((), device=device), 0

    def add(self, report: PassReport) -> None:
        num_depths = len(self._counted)
        self._counted += torch.bincount(report.offset_R, minlength=num_depths)
        self._correct += torch.bincount(report.offset_R, report.correct_R.float(), minlength=num_depths)
        self._loss += report.loss
        self._passes += 1

    def read(self) -> dict[str, Any]:
        """Raises FloatingPointError when the loss is no finite number."""
        loss = float(self._loss) / max(self._passes, 1)
        if not math.isfinite(loss):
            raise FloatingPointError(f"loss is {loss}")
        accuracy = [round(share, 4) for share in (self._correct / self._counted.clamp_min(1)).tolist()]
        for counter in (self._counted, self._correct, self._loss):
            counter.zero_()
        self._passes = 0
        return {"loss": round(loss, 5), "accuracy": accuracy}


def scalars(record: Any, name: str) -> Iterator[tuple[str, float]]:
    """Every number in a record, by its path; positions count from 1, as draft positions do."""
    if isinstance(record, dict | list):
        for key, value in record.items() if isinstance(record, dict) else enumerate(record, 1):
            yield from scalars(value, f"{name}/{key}")
    elif isinstance(record, int | float):
        yield name, record


def train_head(recipe: Recipe, device: str | None = None) -> Path:
    """Trains by a recipe and returns the head's directory; with torch.distributed started, as one of its workers.
    Raises as `Trainer` and `Trainer.run`."""
    torch.set_float32_matmul_precision("high")
    return Trainer(recipe, device=device).run()
