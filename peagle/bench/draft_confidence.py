"""What a head was confident of, beside what its target accepted: traces with the log-probability of every draft.

    python -m peagle.bench.draft_confidence HEAD --target DIR --answers DIR [DIR2 ...] --out FILE.npz
        [--max-per-category N] [--num-draft-tokens K_MAX]

Writes the traces of `peagle.evaluate --traces` with one array more, `log_probs` [anchors, K_max] (float16): the
log-softmax of the head's logits at its draft of each depth, wrong drafts and those behind them included, for the choice
of K is made before any is verified. The softmax is over the draft vocabulary and at temperature 1, whatever temperature
the request has: what an engine has at hand. `python -m cluster.simulate_confidence` says what such traces are worth.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from peagle.evaluate import Answers, first_of_each, load_drafter, load_folder, load_target, traces
from peagle.heads import head_digest
from peagle.provenance import conditions
from peagle.replay import replay
from peagle.walk import save_traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--target", required=True, help="directory of the target's checkpoint")
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help="folders, each of one temperature")
    parser.add_argument("--max-per-category", type=int, help="answers of each category and folder; default: all")
    parser.add_argument("--num-draft-tokens", type=int, metavar="K_MAX", help="default: what the head was trained for")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    target = load_target(args.target)
    drafter = load_drafter(args.head, target)
    num_depths = args.num_draft_tokens or drafter.config.num_depths
    accepted: list[np.ndarray] = []
    log_probs: list[np.ndarray] = []
    stored: dict[str, Any] = {}
    folders = []
    for folder in args.answers:
        answers = first_of_each(load_folder(folder), args.max_per_category)
        num_before = len(accepted)
        for index, category in enumerate(answers.categories):
            # One at a time: on a CPU the attention among packed answers, all of it masked, would take most of the time.
            alone = Answers(answers.data.select([index]), [category], answers.temperature)
            found = replay(drafter, target, alone.data, num_depths, with_log_probs=True)
            accepted += found.accepted
            log_probs += found.log_probs
            for name, values in traces(found, alone).items():
                stored.setdefault(name, []).extend(values)
        one = {"folder": str(folder), "digest": answers.data.digest(), "temperature": answers.temperature}
        numbers = {"num_answers": len(accepted) - num_before, "num_answer_tokens": answers.data.num_answer_tokens}
        folders.append(one | numbers)
        print(json.dumps(folders[-1]), flush=True)
    head = {"path": str(args.head), "digest": head_digest(args.head)}
    made = {"made": conditions(), "target": args.target, "head": head, "answers": folders}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    arrays = {"log_probs": np.concatenate(log_probs).astype(np.float16), "made": json.dumps(made)}
    save_traces(args.out, accepted, stored | arrays, num_depths)


if __name__ == "__main__":
    main()
