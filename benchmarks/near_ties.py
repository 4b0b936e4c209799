"""Where greedy answers of two arms differ: how near were the two tokens, to the target itself?

    python -m benchmarks.near_ties REPORT.json --target DIR --out FILE.json [--prompts humaneval] [--requests 1 128]

Reads the answers that `benchmarks.headline` keeps beside its report. Of answers that differ from `none`'s the target
computes, in float32 without an engine, the logits behind the prompt and what the answers have in common. An arm that
verifies drafts by another distribution than the target's has tokens that are far from its best one; rounding decides
between tokens that are near: the spacing of bfloat16 is 0.125 for logits from 16 on.
"""

import argparse
import gzip
import json
import random
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.humaneval import answers_file
from peagle.provenance import conditions

BASE = "none"
CHUNK = 1024
"""Tokens of a prompt that the target computes at once."""


def differing(tokenizer: Any, cells: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Answers that differ from `BASE`'s: {"arm", "num_requests", "token_ids": up to the first difference, "pair": the
    next token of `BASE`'s and of the arm's}. One whose texts differ and tokens do not, but for an end, is left out."""
    for cell in cells:
        for arm, answers in cell["answers"].items():
            rows = zip(cell["prompt_texts"], cell["answers"][BASE], answers, strict=True)
            for prompt, base, answer in rows:
                if arm == BASE or base == answer:
                    continue
                base_ids, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (base, answer))
                pairs = enumerate(zip(base_ids, ids, strict=False))
                first = next((index for index, (one, other) in pairs if one != other), None)
                if first is None:
                    continue
                chat = [{"role": "user", "content": prompt}]
                text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
                prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                yield {
                    "arm": arm,
                    "num_requests": cell["num_requests"],
                    "token_ids": prompt_ids + base_ids[:first],
                    "pair": (base_ids[first], ids[first]),
                }


@torch.inference_mode()
def next_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """[V], behind these tokens."""
    ids, past = torch.tensor([token_ids]), None
    for begin in range(0, len(token_ids), CHUNK):
        found = model(ids[:, begin : begin + CHUNK], past_key_values=past, use_cache=True, logits_to_keep=1)
        past = found.past_key_values
    logits: torch.Tensor = found.logits[0, -1].float()
    return logits


def judged(model: Any, tokenizer: Any, case: dict[str, Any]) -> dict[str, Any]:
    """A case with the logits of its pair less the best one's."""
    logits_V = next_logits(model, case["token_ids"])
    best = float(logits_V.max())
    return {
        "arm": case["arm"],
        "num_requests": case["num_requests"],
        "context_tokens": len(case["token_ids"]),
        "tokens": [tokenizer.decode([token]) for token in case["pair"]],
        "best_logit": round(best, 4),
        "below_best": [round(best - float(logits_V[token]), 4) for token in case["pair"]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--target", required=True, help="directory or name of the model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", default="humaneval", help="of cells at temperature 0")
    parser.add_argument("--requests", type=int, nargs="+", help="of cells; all")
    parser.add_argument("--arms", nargs="+", help="all")
    parser.add_argument("--most", type=int, default=20, help="cases of each arm, drawn from all")
    args = parser.parse_args()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    with gzip.open(answers_file(args.report), "rt", encoding="utf-8") as file:
        cells = [cell for cell in json.load(file) if cell["prompts"] == args.prompts and not cell["temperature"]]
    cells = [cell for cell in cells if args.requests is None or cell["num_requests"] in args.requests]
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    by_arm: dict[str, dict[Any, dict[str, Any]]] = {}
    for case in differing(tokenizer, cells):  # several repeats may have the same difference
        by_arm.setdefault(case["arm"], {})[tuple(case["token_ids"]), case["pair"]] = case
    report: dict[str, Any] = {"prompts": args.prompts, "rows": [], "conditions": conditions()}
    for arm, cases in by_arm.items():
        if args.arms is not None and arm not in args.arms:
            continue
        for case in random.Random(0).sample(list(cases.values()), min(args.most, len(cases))):
            report["rows"].append(row := judged(model, tokenizer, case))
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        gaps = [max(row["below_best"]) for row in report["rows"] if row["arm"] == arm]
        sys.stdout.write(f"{arm}: {len(cases)} differ, {len(gaps)} looked at, median {statistics.median(gaps)}, ")
        sys.stdout.write(f"most {max(gaps)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
