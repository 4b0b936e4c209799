"""Acceptance of a head on answers of its target: AL and survival for every K from one pass (no decoding).

    python -m peagle.evaluate HEAD --target DIR --answers DIR [DIR2 ...] [--against HEAD2] [--out DIR]

Drafts are made at all positions of an answer at once, on the true prefix, and `peagle.walk` replays decoding on them.
A folder of answers holds answers at one temperature, which its manifest.json names; `peagle.vllm.generate --prompts`
writes such folders.

Why a walk over a finished text is right. The head drafts the same tokens whatever came after the prefix: vLLM takes
the most likely ones (`draft_sample_method="greedy"`, its default, for requests of any temperature). Greedy decoding
accepts a draft exactly if it is the answer's next token. So does decoding at a temperature: without draft probabilities
vLLM's rejection sampler takes the draft's for 1, accepts draft d with probability p(d), p being the target's
distribution at that temperature, and otherwise samples from p with d left out. The token that comes out is d exactly if
d was accepted, and its distribution is p. An answer sampled from the target without drafts has that distribution too,
and goes on with d with the same probability. `draft_sample_method="probabilistic"` would end this: drafts would be
random, accepted with probability min(1, p / q); the text would not tell, and one would have to average sum(min(p, q)).
(Read in vLLM 0.29: v1/sample/rejection_sampler.py and config/speculative.py, for `rejection_sample_method="standard"`.)

Exact but for two things: the last step of an answer is not credited past its end, and in bfloat16 the target's most
likely token may differ between batch shapes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peagle.config import DrafterConfig
from peagle.data import Conversations
from peagle.model import Drafter
from peagle.prompts import distinct_share
from peagle.replay import Replay, replay
from peagle.target import Target
from peagle.walk import Counts, figures, members, ratios, save_traces

LOOPING = "looping"
RATIO_DEPTHS = (3, 5, 7)


@dataclasses.dataclass(frozen=True)
class Answers:
    """One folder's answers; categories: one each."""

    data: Conversations
    categories: list[str]
    temperature: float = 0.0


def group_names(data: Conversations, categories: list[str]) -> list[list[str]]:
    """Groups that each conversation counts in: all, its category, looping or not, and the category's looping or not."""
    names = []
    for (tokens, prompt), category in zip(data.documents(), categories, strict=True):
        kind = LOOPING if distinct_share(tokens[prompt:].tolist()) < 0.5 else f"non-{LOOPING}"
        names.append(["all", category, kind, f"{category} {kind}"])
    return names


def summarize(found: Replay, groups: list[list[str]]) -> dict[str, Any]:
    """Figures of `peagle.walk` by group, and `skipped`: number of the group's answers left out, by reason."""
    counts = Counts.of(found.accepted, found.num_depths)
    by_group = members([groups[index] for index in found.walked])
    summary = {name: figures(counts.select(chosen)) for name, chosen in by_group.items()}
    for index, reason in found.skipped.items():
        for name in groups[index]:
            entry = summary.setdefault(name, {"num_answers": 0, "num_tokens": 0})
            reasons = entry.setdefault("skipped", {})
            reasons[reason] = reasons.get(reason, 0) + 1
    return dict(sorted(summary.items()))


def evaluate(drafter: Drafter, target: Target, data: Conversations, categories: list[str]) -> dict[str, Any]:
    """AL for K = 1..K_max and survival at K_max, by group; categories: one per conversation.

    Returns {group: {"num_answers", "num_tokens", "acceptance_length": {K: AL}, "survival": [S_1..], both with "_95"
    for intervals, "skipped": {reason: number}}}; a group without any answer walked has no figures.
    """
    return summarize(replay(drafter, target, data), group_names(data, categories))


def load_answers(folder: str | Path, max_per_category: int | None = None) -> tuple[Conversations, list[str]]:
    """Answers written by `peagle.vllm.generate --prompts`, and their categories."""
    answers = first_of_each(load_folder(folder), max_per_category)
    return answers.data, answers.categories


def first_of_each(answers: Answers, max_per_category: int | None) -> Answers:
    """The first so many answers of each category; all where None. Raises ValueError below 1."""
    if max_per_category is None:
        return answers
    if max_per_category < 1:
        raise ValueError(f"max_per_category is {max_per_category}: give at least 1")
    seen: dict[str, int] = {}
    chosen = []
    for index, category in enumerate(answers.categories):
        seen[category] = seen.get(category, 0) + 1
        if seen[category] <= max_per_category:
            chosen.append(index)
    return Answers(answers.data.select(chosen), [answers.categories[index] for index in chosen], answers.temperature)


def load_folder(folder: str | Path) -> Answers:
    """Raises ValueError when manifest.json has no categories, or not one for each answer."""
    data = Conversations.load(folder)
    manifest = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
    categories = manifest.get("categories")
    if categories is None or len(categories) != len(data):
        count = "no" if categories is None else len(categories)
        raise ValueError(f"{folder}: manifest.json names {count} categories for {len(data)} conversations")
    return Answers(data, categories, float(manifest.get("temperature") or 0.0))


def load_drafter(head_dir: Path, target: Target) -> Drafter:
    """A head on the target's device and in its type."""
    from peagle.checkpoint import build_drafter, load_head

    config, tensors = load_head(head_dir)
    tables = {"embed_VH": target.embed_VS, "lm_head_VH": target.lm_head_VS}
    return build_drafter(config, tensors, **tables, dtype=target.embed_VS.dtype, device=target.device)


def evaluate_folder(
    drafters: list[Drafter], target: Target, answers: Answers, num_depths: int, max_tokens: int | None
) -> tuple[dict[str, Any], Replay]:
    """Figures of one folder: of the first drafter, of the second, and their ratio; and the first one's replay."""
    groups = group_names(answers.data, answers.categories)
    first, *others = [replay(drafter, target, answers.data, num_depths, max_tokens) for drafter in drafters]
    result: dict[str, Any] = {"temperature": answers.temperature, "groups": summarize(first, groups)}
    if others:
        ours, theirs = (Counts.of(one.accepted, num_depths) for one in (first, others[0]))
        depths = [k for k in RATIO_DEPTHS if k <= num_depths]
        result["against"] = summarize(others[0], groups)
        result["ratios"] = {
            name: ratios(ours.select(chosen), theirs.select(chosen), depths)
            for name, chosen in members([groups[index] for index in first.walked]).items()
        }
    return result, first


def table(result: dict[str, Any]) -> str:
    """One line a group: number of answers, AL at each K with the last one's interval, survival, what is skipped."""
    lines = []
    for name, one in result["groups"].items():
        skipped = "".join(f"; skipped {number}: {reason}" for reason, number in one.get("skipped", {}).items())
        line = f"{name:32s} n={one['num_answers']:<4d}"
        if one["num_answers"]:
            lengths = one["acceptance_length"]
            line += " AL " + " ".join(f"{value:.2f}" for value in lengths.values())
            low, high = one.get("acceptance_length_95", {}).get(str(len(lengths)), (math.nan, math.nan))
            line += f" [{low:.2f}, {high:.2f}]  S " + " ".join(f"{share:.2f}" for share in one["survival"])
        lines.append(line + skipped)
    for name, one in result.get("ratios", {}).items():
        cells = [
            f"K={k} {value:.3f} [{', '.join(f'{bound:.3f}' for bound in one.get('ratio_95', {}).get(k, []))}]"
            for k, value in one["ratio"].items()
        ]
        lines.append(f"{name:32s} ratio {'  '.join(cells)}")
    return "\n".join(lines)


def describe(config: DrafterConfig) -> str:
    kind = "EAGLE-3" if config.ptd_token_id is None else "P-EAGLE"
    return f"{kind}, {config.num_hidden_layers} layer{'s' if config.num_hidden_layers > 1 else ''}"


def common_depths(configs: list[DrafterConfig]) -> int:
    """K_max for several heads: the least of the P-EAGLE heads, for EAGLE-3 can go on beyond what it was trained for."""
    limits = [config.num_depths for config in configs if config.ptd_token_id is not None]
    return min(limits) if limits else max(config.num_depths for config in configs)


def load_target(target_dir: str | Path) -> Target:
    """On a GPU in bfloat16, else on the CPU in float32."""
    on_gpu = torch.cuda.is_available()
    return Target(target_dir, device="cuda" if on_gpu else "cpu", dtype=torch.bfloat16 if on_gpu else torch.float32)


def traces(found: Replay, answers: Answers) -> dict[str, Any]:
    """What `save_traces` stores of each answer beside its anchors."""
    texts = list(answers.data.documents())
    return {
        "category": [answers.categories[index] for index in found.walked],
        "temperature": [answers.temperature] * len(found.walked),
        "distinct_share": [
            distinct_share(tokens[prompt:].tolist()) for tokens, prompt in map(texts.__getitem__, found.walked)
        ],
    }


def main() -> None:
    from peagle.plot import plot_acceptance
    from peagle.provenance import conditions

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--target", required=True, help="directory of the target's checkpoint")
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help="folders, each of one temperature")
    parser.add_argument(
        "--against", type=Path, metavar="HEAD2", help="a second head, for the ratio of AL: HEAD / HEAD2"
    )
    parser.add_argument(
        "--num-draft-tokens", type=int, metavar="K_MAX", help="default: what the heads were trained for"
    )
    parser.add_argument("--max-tokens", type=int, help="leave out answers longer than this, prompt included (counted)")
    parser.add_argument("--traces", type=Path, help="write what every anchor would accept (.npz), see peagle.walk")
    parser.add_argument("--out", type=Path, help="folder for evaluation.json and evaluation.png")
    args = parser.parse_args()
    target = load_target(args.target)
    paths = [args.head, *([args.against] if args.against else [])]
    drafters = [load_drafter(path, target) for path in paths]
    num_depths = args.num_draft_tokens or common_depths([one.config for one in drafters])
    heads = [
        {"path": str(path), "kind": describe(one.config), "num_depths": one.config.num_depths}
        for path, one in zip(paths, drafters, strict=True)
    ]
    document: dict[str, Any] = {
        "made": conditions(),
        "target": str(args.target),
        "heads": heads,
        "num_depths": num_depths,
    }
    document["sets"] = []
    accepted: list[np.ndarray] = []
    stored: dict[str, list[Any]] = {}
    for folder in args.answers:
        answers = load_folder(folder)
        result, found = evaluate_folder(drafters, target, answers, num_depths, args.max_tokens)
        document["sets"].append({"answers": str(folder), **result})
        accepted += found.accepted
        for name, values in traces(found, answers).items():
            stored.setdefault(name, []).extend(values)
        print(f"{folder}: temperature {answers.temperature:g}, {heads[0]['kind']}\n{table(result)}")
    if args.traces:
        save_traces(args.traces, accepted, stored, num_depths)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "evaluation.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        plot_acceptance(document, args.out / "evaluation.png")


if __name__ == "__main__":
    main()
