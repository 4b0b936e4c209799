"""Writes what every token of recorded answers would accept of a head's drafts, for `benchmarks.simulate_depths`.

    python -m benchmarks.traces HEAD DIR [DIR2 ...] --target DIR --out FILE.npz

DIR: answers of the target, as for `peagle evaluate`. Any policy of K can be replayed from the file:
`peagle.train.evaluate` says why.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peagle.checkpoint import build_drafter, load_head
from peagle.train.evaluate import load_answers, replay
from peagle.train.target import Target


def save_traces(path: Any, accepted: Sequence[np.ndarray], answers: Mapping[str, Any], num_depths: int) -> None:
    """accepted: `Replay.accepted`. answers: further arrays, one entry an answer (as `category`).

    Stored: `accepted` (uint8, all answers end to end), `num_anchors` (of each answer), `num_depths`.
    """
    arrays = {name: np.asarray(values) for name, values in answers.items()}
    arrays["accepted"] = np.concatenate([*accepted, np.zeros(0)]).astype(np.uint8)
    arrays["num_anchors"] = np.array([len(accepted_N) for accepted_N in accepted], np.int32)
    arrays["num_depths"] = np.array(num_depths)
    np.savez_compressed(path, allow_pickle=False, **arrays)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("answers", type=Path, nargs="+")
    parser.add_argument("--target", required=True, help="directory of the target's checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-per-category", type=int, help="answers of each category and folder; default: all")
    args = parser.parse_args(arguments)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    target = Target(args.target, device=device, dtype=dtype)
    tables = {"embed_VH": target.embed_VS, "lm_head_VH": target.lm_head_VS}
    drafter = build_drafter(*load_head(args.head), **tables, dtype=dtype, device=device)
    accepted: list[np.ndarray] = []
    about: dict[str, list[Any]] = {"category": [], "temperature": []}
    for folder in args.answers:
        loaded = load_answers(folder, args.max_per_category)
        found = replay(drafter, target, loaded.data)
        accepted += found.accepted
        about["category"] += [loaded.categories[index] for index in found.walked]
        about["temperature"] += [loaded.temperature] * len(found.walked)
    save_traces(args.out, accepted, about, drafter.config.num_depths)


if __name__ == "__main__":
    main()
