"""Training on several GPUs: Ray Train starts the workers and their process group, `peagle.train.trainer` does the rest.

    python -m deployments.train configs/train/smollm2-135m.yaml --num-workers 4 [section.key=value ...]

A step then has `num_workers` times the batches of the recipe, one lot on each worker; gradients are averaged.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device

from peagle.train.recipe import Recipe


def train_worker(settings: dict[str, Any]) -> None:
    """One worker. settings: "recipe" path and "overrides"."""
    import torch

    from peagle.train.trainer import Trainer

    torch.set_float32_matmul_precision("high")
    Trainer(Recipe.load(settings["recipe"], settings["overrides"]), device=str(get_device())).run()


def train(recipe: Path, overrides: list[str], num_workers: int, *, use_gpu: bool) -> Path:
    """Trains with `num_workers` workers, one GPU (or CPU) each. Returns the head's directory.

    Relative paths of the recipe mean this process's directory. Raises ValueError for a wrong recipe before any worker
    starts, and Ray's TrainingFailedError, with a worker's error in it, when one fails.
    """
    loaded = Recipe.load(recipe, overrides)
    output = Path(loaded.output).resolve()
    TorchTrainer(
        train_worker,
        train_loop_config={"recipe": str(recipe.resolve()), "overrides": [*overrides, *absolute_paths(loaded)]},
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=use_gpu),
        run_config=RunConfig(name="ray-train", storage_path=str(output)),
    ).fit()
    return output / "head"


def absolute_paths(recipe: Recipe) -> list[str]:
    """Overrides that name the recipe's folders from the root: a worker runs in a directory of its own."""
    folders = {
        "data": recipe.data,
        "output": recipe.output,
        "evaluate.data": recipe.evaluate.data,
        "stored_states": recipe.stored_states,
        "drafter.start_from": recipe.drafter.start_from,
        "target": recipe.target if Path(recipe.target).is_dir() else None,
    }
    return [f"{key}={Path(folder).resolve()}" for key, folder in folders.items() if folder]


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--num-workers", type=int, required=True)
    args = parser.parse_intermixed_args()
    use_gpu = torch.cuda.is_available()
    print(f"head written to {train(args.recipe, args.overrides, args.num_workers, use_gpu=use_gpu)}")


if __name__ == "__main__":
    main()
