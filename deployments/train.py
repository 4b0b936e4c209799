"""Training on several GPUs: Ray Train starts the workers and their process group, `peagle.train.trainer` does the rest.

A step then has `num_workers` times the batches of the recipe, one lot on each worker; gradients are averaged.
"""

import os
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device

from deployments import compat
from peagle.train.recipe import Recipe


def train_worker(settings: dict[str, Any]) -> None:
    """One worker. settings: "recipe" path, "overrides", and the "folder" that relative paths start from."""
    from peagle.train.trainer import train_head

    os.chdir(settings["folder"])  # Ray gives each worker a directory of its own
    train_head(Recipe.load(settings["recipe"], settings["overrides"]), device=str(get_device()))


def train(recipe: Path, overrides: list[str], num_workers: int) -> Path:
    """Trains with `num_workers` workers, one GPU each, or CPU where there is none: in the Ray cluster that RAY_ADDRESS
    names or that runs here, else in a fresh one. Returns the head's directory.

    Raises ValueError for a wrong recipe before any worker starts, ConnectionError where RAY_ADDRESS names no cluster,
    and Ray's TrainingFailedError, with a worker's error in it, when one fails.
    """
    output = Path(Recipe.load(recipe, overrides).output).resolve()
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS") or compat.local_cluster() or "local"
        if address != "local":
            compat.use_token()
        ray.init(address=address)
    TorchTrainer(
        train_worker,
        train_loop_config={"recipe": str(recipe), "overrides": overrides, "folder": str(Path.cwd())},
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(name="ray-train", storage_path=str(output)),
    ).fit()
    return output / "head"
