"""A run whose sequences are worked through in segments gives the weights of a run without."""

import torch

from peagle.train.recipe import Recipe
from peagle.train.trainer import Trainer
from tests.support.small_run import write_small_run


def test_segments_train_the_same_drafter(tmp_path) -> None:
    small = write_small_run(tmp_path)

    def weights(name: str, *overrides: str) -> dict[str, torch.Tensor]:
        settings = [
            f"output={small / name}",
            "schedule.max_steps=4",
            "evaluate.data=null",
            "loss.reach=0.5",
            *overrides,
        ]
        trainer = Trainer(Recipe.load(small / "recipe.yaml", ["optimizer.name=adamw", "optimizer.lr=0.001", *settings]))
        trainer.run()
        return {key: value.detach() for key, value in trainer.drafter.trainable().items()}

    whole = weights("whole")
    parts = weights("parts", "batch.num_segments=3")
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-3, atol=1e-5, msg=name)
