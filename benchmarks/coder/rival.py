"""A block drafter to compare the heads of train.sh with: speculators' trainer, model and settings, on the same
conversations, packed as for them but never joined into one document.

    python benchmarks/coder/rival.py dflash --target DIR --data DIR --out DIR --minutes 3.5 [options of speculators]

Needs speculators 0.9; the head is in OUT/0. The target runs on each batch, as in `peagle train` without `states_dir`.
The first step, which compiles, is not counted as time. The learning rate falls with the time.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from speculators.train import cli
from speculators.train.config import TrainConfig

from peagle.train.data import Conversations, PackedBatches, answer_token_counts
from peagle.train.target import Target

WARMUP_SHARE = 0.01
NUM_SEQUENCES, MAX_TOKENS = 4, 2048


class Loader:
    """Batches in speculators' form, all sequences of one end to end, until the time is over."""

    batch_sampler = None

    def __init__(self, target: Target, data: Conversations, minutes: float) -> None:
        num_layers = target.config["num_hidden_layers"]
        self._target, self._seconds, self._start_s = target, 60 * minutes, float("inf")
        self._batches = PackedBatches(data, num_sequences=NUM_SEQUENCES, max_tokens=MAX_TOKENS, seed=0)
        self._aux_layer_ids = (2, num_layers // 2, num_layers - 3)  # speculators' default
        self._last: list[torch.Tensor] = []
        # Speculators puts the target's last norm on by itself, so what enters that is wanted.
        target.model.get_decoder().norm.register_forward_pre_hook(lambda _, given: self._last.append(given[0]))

    def __len__(self) -> int:
        return len(self._batches.data.tokens)  # more than there is time for

    def rate(self, step: int = 0) -> float:
        """The learning rate's factor now."""
        share = max(0.0, time.monotonic() - self._start_s) / self._seconds
        return max(0.0, min(0.01 + share / WARMUP_SHARE, 1 - share))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        number = 0
        for number, batch in enumerate(self._batches()):
            if number == 1:
                self._start_s = time.monotonic()
            if number and not self.rate():
                break
            row_B1 = 1000 * torch.arange(NUM_SEQUENCES)[:, None]
            document_BN = torch.where(batch.document_BN < 0, -1, batch.document_BN + row_B1)
            on_device = batch.to(self._target.device)
            aux_BNX, _ = self._target.states(on_device.tokens_BN, on_device.position_BN, self._aux_layer_ids)
            yield {
                "hidden_states": aux_BNX.flatten(0, 1)[None],
                "verifier_last_hidden_states": self._last.pop().flatten(0, 1)[None],
                "input_ids": batch.tokens_BN.reshape(1, -1),
                "loss_mask": batch.answer_BN.reshape(1, -1),
                "document_ids": document_BN.reshape(1, -1),
                "position_ids": batch.position_BN.reshape(1, -1),
                "error_records": 0,
            }
        print(f"{number} steps", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("dflash", "dspark"))
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="conversations of `peagle generate`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    options, further = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, data = Target(options.target, device=device, dtype=torch.bfloat16), Conversations.load(options.data)
    loader = Loader(target, data, options.minutes)
    counts = answer_token_counts(data, target.config["vocab_size"]).tolist()
    torch.save({token: count for token, count in enumerate(counts) if count}, options.out / "token_freq.pt")

    class Trainer(cli.Trainer):
        def setup_trainer(self) -> None:
            super().setup_trainer()
            self.local_rank = self.device_type = device

        def setup_optimizer(self) -> None:
            super().setup_optimizer()
            self.schedulers = [torch.optim.lr_scheduler.LambdaLR(one, loader.rate) for one in self.optimizers]

    cli.Trainer, cli.create_train_val_loaders = Trainer, lambda **_: (loader, None)
    arguments = ["--speculator-type", options.kind, "--verifier-name-or-path", str(options.target), "--epochs", "1"]
    arguments += ["--data-path", str(options.out), "--save-path", str(options.out), "--log-freq", "100", *further]
    cli.main(TrainConfig.resolve(arguments))


if __name__ == "__main__":
    main()
