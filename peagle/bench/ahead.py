"""Drafting ahead of verification (SSD, arXiv 2603.03251), measured on real text: hit rate, and AL of drafts made ahead.

    python -m peagle.bench.ahead HEAD --target DIR --answers DIR --out FILE [--max-per-category N]

The answers are the target's own, greedy (`peagle.vllm.generate --prompts`), so one pass of the target over an answer
gives all hidden states that decoding would see, and the drafter's passes are the only ones to repeat. What is measured
on the way (`peagle.bench.ahead_walk` has the rules):

    hit rate      share of steps whose outcome was among m guesses, in two orders of guessing: by the drafter's own
                  confidence in its drafts, and by acceptance learned by depth
    paired        after each step that hit, drafts made after it against drafts made ahead of it, at the same place. In
                  the newest rows, whose hidden states the target has not computed when drafting ahead, stands:
                    shared  P-EAGLE's learned hidden state, as in its mask rows, beside the token guessed
                    own     the drafter's output of the row before, as EAGLE-3 feeds back; no head here learned that
    played        decoding that goes on with what it got, so that worse drafts made ahead lead to other steps; on a
                  miss it waits for drafts, or goes one step without

Rows made ahead leave the cache when the true hidden states are there, so only the step under way is ever missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peagle.bench.ahead_passes import Key, Passes, key_of
from peagle.bench.ahead_walk import HOW, OnMiss, Outcome, Play, conditional_acceptance, outcomes, visits
from peagle.data import Conversations
from peagle.evaluate import LOOPING, load_answers, load_drafter, load_target
from peagle.heads import head_digest
from peagle.model import Drafter
from peagle.prompts import distinct_share
from peagle.provenance import conditions
from peagle.target import Target
from peagle.walk import interval, members, resamples

NUM_DRAFTS = (3, 5, 7)
BUDGETS = (1, 2, 4, 8, 16, 32, 64)
PLAYED_BUDGETS = (1, 4, 16, 64)
ORDERS = ("own", "learned")
ON_MISS: tuple[OnMiss, ...] = ("wait", "without")


@dataclasses.dataclass(frozen=True)
class Texts:
    """Answers with their prompts, and the passes over them, under the same indices."""

    tokens: list[np.ndarray]
    prompt_lengths: list[int]
    passes: Passes

    @classmethod
    def of(cls, drafter: Drafter, target: Target, data: Conversations, num_depths: int, num_columns: int) -> Texts:
        found = cls([], [], Passes(drafter, num_depths, num_columns))
        for tokens, prompt in data.documents():
            tokens_N = torch.from_numpy(tokens.astype(np.int64))
            zeros_BN, position_BN = torch.zeros_like(tokens_N)[None], torch.arange(len(tokens_N))[None]
            aux_BNX, _ = target.states(tokens_N[None], zeros_BN, position_BN, drafter.config.aux_layer_ids, eager=True)
            found.passes.add(tokens_N, aux_BNX[0])
            found.tokens.append(tokens)
            found.prompt_lengths.append(prompt)
        return found

    def __len__(self) -> int:
        return len(self.tokens)

    def play(self, num_drafts: int, max_guesses: int, on_miss: OnMiss) -> list[Play]:
        """Decode every text, all at once: what they ask for at a time is made in one pass."""
        running = [
            visits(tokens, prompt, num_drafts, max_guesses, on_miss)
            for tokens, prompt in zip(self.tokens, self.prompt_lengths, strict=True)
        ]
        asked = {index: key_of(index, *next(one)) for index, one in enumerate(running)}
        finished: dict[int, Play] = {}
        while asked:
            self.passes.make(asked.values())
            for index, key in list(asked.items()):
                try:
                    asked[index] = key_of(index, *running[index].send(self.passes[key]))
                except StopIteration as end:
                    finished[index] = end.value
                    del asked[index]
        return [finished[index] for index in range(len(running))]

    def outcomes(self, num_drafts: int, max_guesses: int, orders: tuple[np.ndarray | None, ...]) -> list[list[Outcome]]:
        return [
            outcomes(tokens, prompt, self.passes.lookup(index), num_drafts, max_guesses, orders)
            for index, (tokens, prompt) in enumerate(zip(self.tokens, self.prompt_lengths, strict=True))
        ]


def share_with_interval(part_D: np.ndarray, whole_D: np.ndarray) -> dict[str, Any]:
    """Pooled part / whole of D answers, with the bootstrap interval of `peagle.walk`."""
    found: dict[str, Any] = {"value": round(float(part_D.sum() / max(whole_D.sum(), 1)), 4)}
    if len(part_D) > 1:
        weights = resamples(len(part_D))
        ratios_R1 = (weights @ part_D)[:, None] / np.maximum(weights @ whole_D, 1)[:, None]
        found["interval_95"] = interval(ratios_R1)[0]
    return found


def hit_rates(steps: list[list[Outcome]]) -> dict[str, Any]:
    """By order and budget; steps: of each answer."""
    counts_D = np.array([len(one) for one in steps])
    found: dict[str, Any] = {}
    for column, order in enumerate(ORDERS):
        hits = {m: np.array([sum(step.ranks[column] < m for step in one) for one in steps]) for m in BUDGETS}
        found[order] = {str(m): share_with_interval(hits_D, counts_D) for m, hits_D in hits.items()}
    return found


def paired(texts: Texts, chosen: list[int], steps: list[list[Outcome]], num_drafts: int, budget: int) -> dict[str, Any]:
    """AL of the step after each hit: with drafts made after verification, and made ahead with each stand-in.

    by_num_accepted: the same by the number of drafts accepted before, one less than the rows that are missing.
    """
    sums_D4, by_accepted = np.zeros((len(chosen), 4), np.int64), np.zeros((num_drafts + 1, 4), np.int64)
    for answer, index in enumerate(chosen):
        for step in steps[index]:
            if step.ranks[0] >= budget:
                continue
            row = [1, *(1 + min(texts.passes[key].num_accepted, num_drafts) for key in next_keys(index, step))]
            sums_D4[answer] += row
            by_accepted[step.accepted] += row
    number_D, after_D, shared_D, own_D = sums_D4.T
    return {
        "budget": budget,
        "num_steps": int(number_D.sum()),
        "after": share_with_interval(after_D, number_D),
        "ahead_shared": share_with_interval(shared_D, number_D),
        "ahead_own": share_with_interval(own_D, number_D),
        "shared_over_after": share_with_interval(shared_D, after_D),
        "own_over_after": share_with_interval(own_D, after_D),
        "by_num_accepted": [
            {"num_accepted": accepted, "num_steps": int(row[0])}
            | dict(zip(("after", "shared", "own"), (row[1:] / row[0]).round(4).tolist(), strict=True))
            for accepted, row in enumerate(by_accepted)
            if row[0]
        ],
    }


def next_keys(text: int, step: Outcome) -> tuple[Key, Key, Key]:
    """The passes whose drafts may follow a step: made after it, and ahead of its end with either stand-in."""
    newest, missing = step.next_newest, step.accepted + 1
    return key_of(text, newest, 0), key_of(text, newest, missing, "shared"), key_of(text, newest, missing, "own")


def played(plays: list[Play]) -> dict[str, Any]:
    """Pooled over answers: tokens a step, shares of steps and tokens a step by how the drafts came, hit rate."""
    steps = {how: sum(one.steps[how] for one in plays) for how in HOW}
    tokens = {how: sum(one.tokens[how] for one in plays) for how in HOW}
    num_steps = sum(steps.values())
    return {
        "num_steps": num_steps,
        "tokens_per_step": round(sum(tokens.values()) / num_steps, 4),
        "hit_rate": round(sum(one.num_hits for one in plays) / max(sum(one.num_guessed for one in plays), 1), 4),
        "share_of_steps": {how: round(steps[how] / num_steps, 4) for how in HOW},
        "tokens_per_step_by": {how: round(tokens[how] / steps[how], 4) for how in HOW if steps[how]},
    }


def measure(texts: Texts, groups: dict[str, np.ndarray], num_drafts: int, accept_D: np.ndarray) -> dict[str, Any]:
    """Everything at one K, by group of answers. accept_D: acceptance by depth, for the learned order."""
    normal = texts.play(num_drafts, 0, "wait")
    steps = texts.outcomes(num_drafts, BUDGETS[-1], (None, accept_D))
    hit = [(index, step) for index, one in enumerate(steps) for step in one if step.ranks[0] < PLAYED_BUDGETS[-1]]
    texts.passes.make(key for index, step in hit for key in next_keys(index, step))
    runs = {(m, on_miss): texts.play(num_drafts, m, on_miss) for m in PLAYED_BUDGETS for on_miss in ON_MISS}
    found: dict[str, Any] = {}
    for name, members_G in groups.items():
        mine = members_G.tolist()
        found[name] = {
            "num_answers": len(mine),
            "normal": played([normal[i] for i in mine]),
            "hit_rate": hit_rates([steps[i] for i in mine]),
            "paired": [paired(texts, mine, steps, num_drafts, m) for m in PLAYED_BUDGETS],
            "played": [
                {"budget": m, "on_miss": on_miss} | played([plays[i] for i in mine])
                for (m, on_miss), plays in runs.items()
            ],
        }
    return found


def groups_of(data: Conversations, categories: list[str]) -> dict[str, np.ndarray]:
    names = []
    for (tokens, prompt), category in zip(data.documents(), categories, strict=True):
        kind = LOOPING if distinct_share(tokens[prompt:].tolist()) < 0.5 else f"non-{LOOPING}"
        names.append(["all", kind, category if category == "humaneval" else "spec-bench"])
    return members(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--target", required=True, help="directory of the target's checkpoint")
    parser.add_argument("--answers", type=Path, required=True, help="folder of the target's own greedy answers")
    parser.add_argument("--max-per-category", type=int, help="answers of each category; default: all")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    target = load_target(args.target)
    drafter = load_drafter(args.head, target)
    data, categories = load_answers(args.answers, args.max_per_category)
    num_depths = max(NUM_DRAFTS) + 1  # one more than K, for the guess of the token after K accepted drafts
    texts = Texts.of(drafter, target, data, num_depths, BUDGETS[-1] + 1)
    texts.play(max(NUM_DRAFTS), 0, "wait")  # makes, many at once, the passes that the next line reads
    normal = texts.outcomes(max(NUM_DRAFTS), 1, (None,))
    accept_D = conditional_acceptance([step.accepted for one in normal for step in one], num_depths)
    document: dict[str, Any] = {
        "made": conditions(),
        "target": str(args.target),
        "head": {"path": str(args.head), "digest": head_digest(args.head), "num_depths": drafter.config.num_depths},
        "answers": {"folder": str(args.answers), "digest": data.digest(), "num_answers": len(data)}
        | {"num_answer_tokens": data.num_answer_tokens},
        "settings": {"budgets": BUDGETS, "order_played": ORDERS[0], "learned_acceptance": accept_D.round(4).tolist()},
        "by_k": {},
    }
    groups = groups_of(data, categories)
    for num_drafts in NUM_DRAFTS:
        document["by_k"][str(num_drafts)] = measure(texts, groups, num_drafts, accept_D)
        print(num_drafts, json.dumps(document["by_k"][str(num_drafts)]["all"]["played"]), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
