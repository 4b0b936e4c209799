"""Several workers, started by Ray Train, make the same step as one worker that goes through all their batches."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.train.data import Batch
from peagle.train.passes import PassReport
from peagle.train.recipe import Recipe
from peagle.train.trainer import Trainer
from tests.support.small_run import write_small_run

ROOT = Path(__file__).resolve().parents[2]
# Ratio 1 keeps every row, so that nothing is drawn at random; plain AdamW at a small rate keeps rounding small.
EXACT = ("cod.ratio=1.0", "optimizer.name=adamw", "optimizer.lr=0.001", "schedule.max_steps=6", "evaluate.data=null")


def environment_of_worker() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class ForBoth(Trainer):
    """Its steps have the batches of two workers, as one."""

    def run_pass(self, *_: Any) -> PassReport:
        pair = [vars(next(self.batches(number))) for number in (2 * self.step, 2 * self.step + 1)]
        both = Batch(**{name: torch.cat([one[name] for one in pair]) for name in pair[0]})
        return super().run_pass(both.to(self.device))


@pytest.mark.service
@pytest.mark.long
def test_two_workers_equal_one_with_the_batches_of_both(tmp_path) -> None:
    small = write_small_run(tmp_path)
    together = [*EXACT, "output=two", "batch.num_sequences=2", "save_every_steps=6"]
    command = [sys.executable, "-m", "deployments.cli", "train", "recipe.yaml", *together]
    command += ["--num-workers", "2"]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # Ray's sockets need a short path
        note = Path(folder, "ray", "ray_current_cluster")
        note.parent.mkdir()
        note.write_text("127.0.0.1:1")  # of a cluster that was killed
        options: Any = {"cwd": small, "env": environment_of_worker() | {"RAY_TMPDIR": folder}}
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    alone = [*EXACT, f"output={small / 'one'}", "batch.num_sequences=2"]
    trainer = ForBoth(Recipe.load(small / "recipe.yaml", alone))
    trainer.run()
    written = torch.load(small / "two" / "checkpoint.pt", weights_only=True)
    assert written["step"] == 6
    for name, value in trainer.drafter.trainable().items():
        torch.testing.assert_close(written["drafter"][name], value.detach(), rtol=1e-4, atol=1e-5, msg=name)


RESUMED = """
import shutil, sys
from pathlib import Path
import torch
from torch import distributed
from peagle.train.recipe import Recipe
from peagle.train.trainer import Trainer

class Kept(Trainer):
    def save(self):
        super().save()
        if self.workers.leads:
            shutil.copy(self.output / "checkpoint.pt", self.output / f"step-{self.step}.pt")

recipe, folder, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
settings = ["cod.ratio=0.6", "schedule.max_steps=4", "save_every_steps=2", "evaluate.data=null"]
settings += ["optimizer.max_attention_score=0.01"]  # by the greatest score of both, or their weights part
Kept(Recipe.load(recipe, [*settings, f"output={folder / 'whole'}"])).run()
if rank == 0:
    (folder / "cut").mkdir()
    shutil.copy(folder / "whole" / "step-2.pt", folder / "cut" / "checkpoint.pt")
distributed.barrier()
Trainer(Recipe.load(recipe, [*settings, f"output={folder / 'cut'}"])).run()
distributed.destroy_process_group()  # or a thread of it may abort the process at its end
"""


@pytest.mark.long
def test_workers_go_on_as_if_they_had_not_stopped(tmp_path) -> None:
    """Every worker has a random state of its own, which the checkpoint keeps; another number of workers is refused."""
    small = write_small_run(tmp_path)
    command = [sys.executable, "-c", RESUMED, str(small / "recipe.yaml"), str(small)]
    processes = [subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment_of_worker()) for rank in range(2)]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    whole, cut = (torch.load(small / name / "checkpoint.pt", weights_only=True) for name in ("whole", "cut"))
    assert whole["step"] == cut["step"] == 4
    assert not torch.equal(*whole["random"]), "both workers draw the same rows"
    for name, value in whole["drafter"].items():
        torch.testing.assert_close(cut["drafter"][name], value, rtol=0, atol=0, msg=name)
    alone = Recipe.load(small / "recipe.yaml", [f"output={small / 'cut'}", "cod.ratio=0.6"])
    with pytest.raises(ValueError, match=r"was made with 2 workers, this run has 1"):
        Trainer(alone).run()


def test_a_wrong_recipe_starts_no_worker(tmp_path) -> None:
    from deployments.train import train

    small = write_small_run(tmp_path)
    with pytest.raises(ValueError, match=r"drafter\.num_layers"):
        train(small / "recipe.yaml", ["drafter.num_layers=0"], 2)
