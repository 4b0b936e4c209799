"""What hiding the drafter is worth: measured acceptance put together with step times measured on GPUs. Computes only.

    python -m peagle.bench.hiding AHEAD.json --remote FILE --step-times FILE --out FILE [--budget 16]

AHEAD.json is of `peagle.bench.ahead`; the files of times are of `deployments.bench_remote` and `peagle.vllm.calibrate`.
With t_v the target's verification of a batch of b requests, t_d what a step then waits for drafts, A the AL of drafts
made after verification, h the share of steps that a request begins with drafts made ahead, T its tokens a step:

    as it is                  b A / (t_v + t_d)
    ahead, waits on a miss    b T_b / (t_v + (1 - h^b) t_d): one miss in a batch makes all of it wait, and then all take
                              drafts made after verification, so T_b = A + (T - A) h^(b - 1)
    ahead, without on a miss  b T / t_v
    two half-batches in turn  b A / (2 max(t_v(b / 2), t_d(b / 2)))

so for one request waiting pays from t_d / t_v = (A - T) / (T - (1 - h) A) on, and going without, at any number, from
A / T - 1 on. That drafting ahead for m outcomes (m b requests of the drafter) fits into t_v is taken for granted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from statistics import mean
from typing import Any

from peagle.provenance import conditions
from peagle.store import sha256_of

NUM_REQUESTS = (1, 8, 32, 64)
NUM_DRAFTS = 7
"""K of the steps that were timed."""


@dataclasses.dataclass(frozen=True)
class Times:
    """Of a batch of num_requests, in seconds. half_verify_s, half_draft_s: of half of it; None for one request.

    source: how they follow from what was measured.
    """

    target: str
    num_requests: int
    verify_s: float
    draft_s: float
    half_verify_s: float | None
    half_draft_s: float | None
    source: str

    def __post_init__(self) -> None:
        if min(self.verify_s, self.draft_s) <= 0:
            raise ValueError(f"{self.target}, {self.num_requests} requests: times must be above 0, got {self}")


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Of one K and budget. after: A. waiting, without: T of the two policies. hit_share: h, of the one that waits."""

    after: float
    waiting: float
    hit_share: float
    without: float


def as_it_is(times: Times, acceptance: Acceptance) -> float:
    """Output tokens/s."""
    return times.num_requests * acceptance.after / (times.verify_s + times.draft_s)


def ahead_waiting(times: Times, acceptance: Acceptance) -> float:
    others_hit = acceptance.hit_share ** (times.num_requests - 1)
    tokens = acceptance.after + (acceptance.waiting - acceptance.after) * others_hit
    step_s = times.verify_s + (1 - acceptance.hit_share * others_hit) * times.draft_s
    return times.num_requests * tokens / step_s


def ahead_without(times: Times, acceptance: Acceptance) -> float:
    return times.num_requests * acceptance.without / times.verify_s


def half_batches(times: Times, acceptance: Acceptance) -> float | None:
    """None for one request, which has no halves."""
    if times.half_verify_s is None or times.half_draft_s is None:
        return None
    return times.num_requests * acceptance.after / (2 * max(times.half_verify_s, times.half_draft_s))


def break_even_waiting(acceptance: Acceptance) -> float:
    """Least t_d / t_v from which waiting on a miss pays for one request; infinite where it never does."""
    gained = acceptance.waiting - (1 - acceptance.hit_share) * acceptance.after
    return (acceptance.after - acceptance.waiting) / gained if gained > 0 else math.inf


def break_even_without(acceptance: Acceptance) -> float:
    """Least t_d / t_v from which going without on a miss pays, at any number of requests."""
    return acceptance.after / acceptance.without - 1


def dense_times(remote: dict[str, Any]) -> list[Times]:
    """Of the 8B shape, K = 7: a remote step's time for drafts is what the target waited, t_v all the rest of it. A load
    that was run more than once counts with its mean.

    Raises ValueError for a file without steps' parts.
    """
    parts_ms: dict[int, list[dict[str, float]]] = {}
    for row in remote["rows"]:
        if row["placement"] == "remote" and row.get("step_parts_ms"):
            parts_ms.setdefault(row["num_requests"], []).append(row["step_parts_ms"])
    if missing := [b for b in NUM_REQUESTS if b not in parts_ms]:
        raise ValueError(f"no step_parts_ms for {missing} requests: the file is of an older deployments.bench_remote")
    verify_s, draft_s = (
        {b: mean(parts[name] for parts in parts_ms[b]) / 1e3 for b in NUM_REQUESTS} for name in ("target", "wait")
    )

    def half(times_s: dict[int, float], num_requests: int) -> float | None:
        """Of half a batch; not measured itself, it stands on the line between the batches around it."""
        wanted = num_requests // 2
        if num_requests == 1 or wanted in times_s:
            return times_s.get(wanted)
        low, high = max(b for b in NUM_REQUESTS if b < wanted), min(b for b in NUM_REQUESTS if b > wanted)
        return times_s[low] + (times_s[high] - times_s[low]) * (wanted - low) / (high - low)

    source = "t_d what the target waited for drafts, t_v the rest of the step"
    return [Times("8b", b, verify_s[b], draft_s[b], half(verify_s, b), half(draft_s, b), source) for b in NUM_REQUESTS]


def moe_times(table: dict[str, Any]) -> list[Times]:
    """Of the shape of Qwen3-30B-A3B, K = 7: the drafter's pass in the engine is what a step of b requests with one
    draft takes more than a step of 2 b requests without (both verify 2 b tokens), and t_v the step less that."""
    step_s = {
        (point["num_requests"], point["uniform_depth"]): point["median_s"]
        for point in table["points"]
        if point["uniform_depth"] is not None
    }
    batches = sorted({*NUM_REQUESTS, *(b // 2 for b in NUM_REQUESTS if b > 1)})
    needed = {where for b in batches for where in ((b, 1), (2 * b, 0), (b, NUM_DRAFTS))}
    if missing := sorted(needed - step_s.keys()):
        raise ValueError(f"step times: no point at (num_requests, uniform_depth) = {missing}: calibrate them too")
    draft_s = {b: step_s[b, 1] - step_s[2 * b, 0] for b in batches}
    verify_s = {b: step_s[b, NUM_DRAFTS] - draft_s[b] for b in batches}
    source = "t_d: step of b requests at K = 1 less one of 2 b at K = 0; t_v: step at K = 7 less t_d"
    return [
        Times("qwen3-30b-a3b", b, verify_s[b], draft_s[b], verify_s.get(b // 2), draft_s.get(b // 2), source)
        for b in NUM_REQUESTS
    ]


def acceptance_of(ahead: dict[str, Any], num_drafts: int, budget: int, group: str) -> Acceptance:
    """Raises ValueError when the document has no such K, group or budget."""
    try:
        measured = ahead["by_k"][str(num_drafts)][group]
        plays = {one["on_miss"]: one for one in measured["played"] if one["budget"] == budget}
        waiting, without = plays["wait"], plays["without"]
    except KeyError as error:
        raise ValueError(
            f"no measurement at K = {num_drafts}, budget {budget}, group {group!r}: {error} is missing; "
            "see by_k, its groups and `played` in the file of peagle.bench.ahead"
        ) from error
    hit_share = waiting["share_of_steps"]["ahead"]
    return Acceptance(
        measured["normal"]["tokens_per_step"], waiting["tokens_per_step"], hit_share, without["tokens_per_step"]
    )


def row_of(times: Times, acceptance: Acceptance) -> dict[str, Any]:
    """Tokens/s, and each way over how it is. Two are bounds: `hidden_for_nothing` with every step hit and A tokens in
    each, `ahead_waiting_lossless` with the hits there were and drafts as good as those made after verification."""
    plain = as_it_is(times, acceptance)
    ways = {
        "hidden_for_nothing": times.num_requests * acceptance.after / times.verify_s,
        "ahead_waiting": ahead_waiting(times, acceptance),
        "ahead_waiting_lossless": ahead_waiting(times, dataclasses.replace(acceptance, waiting=acceptance.after)),
        "ahead_without": ahead_without(times, acceptance),
        "half_batches": half_batches(times, acceptance),
    }
    return {
        "target": times.target,
        "num_requests": times.num_requests,
        "verify_ms": round(1e3 * times.verify_s, 3),
        "draft_ms": round(1e3 * times.draft_s, 3),
        "draft_over_verify": round(times.draft_s / times.verify_s, 4),
        "tokens_per_s": {"as_it_is": round(plain, 1)}
        | {name: None if value is None else round(value, 1) for name, value in ways.items()},
        "over_as_it_is": {name: None if value is None else round(value / plain, 4) for name, value in ways.items()},
        "source": times.source,
    }


def break_evens(ahead: dict[str, Any], group: str) -> list[dict[str, Any]]:
    """By K and budget: what was played, and from which t_d / t_v on it pays (None: never)."""
    rows = []
    for num_drafts, by_group in ahead["by_k"].items():
        for budget in sorted({one["budget"] for one in by_group[group]["played"]}):
            found = acceptance_of(ahead, int(num_drafts), budget, group)
            waiting, without = break_even_waiting(found), break_even_without(found)
            row = {"num_drafts": int(num_drafts), "budget": budget} | dataclasses.asdict(found)
            row["break_even_waiting"] = round(waiting, 4) if math.isfinite(waiting) else None
            rows.append(row | {"break_even_without": round(without, 4)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ahead", type=Path, help="of peagle.bench.ahead")
    parser.add_argument("--remote", type=Path, required=True, help="of deployments.bench_remote")
    parser.add_argument("--step-times", type=Path, required=True, help="of peagle.vllm.calibrate")
    parser.add_argument("--budget", type=int, default=16, help="outcomes drafted ahead")
    parser.add_argument("--group", default="all", help="group of answers")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    files = (args.ahead, args.remote, args.step_times)
    ahead, remote, table = (json.loads(path.read_text(encoding="utf-8")) for path in files)
    measured_on = [
        ahead["made"]["hardware"],
        remote["runs"][0]["conditions"]["hardware"],
        table["conditions"]["made"]["hardware"],
    ]
    acceptance = acceptance_of(ahead, NUM_DRAFTS, args.budget, args.group)
    rows = [row_of(times, acceptance) for times in (*dense_times(remote), *moe_times(table))]
    document = {
        "made": conditions(),
        "computed": "nothing here was run: acceptance and times are of different targets and machines, see inputs",
        "inputs": [
            {"path": str(path), "sha256": sha256_of(path), "measured_on": one}
            for path, one in zip(files, measured_on, strict=True)
        ],
        "settings": {"num_drafts": NUM_DRAFTS, "budget": args.budget, "group": args.group},
        "acceptance": dataclasses.asdict(acceptance),
        "break_even": break_evens(ahead, args.group),
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(row["target"], row["num_requests"], json.dumps(row["over_as_it_is"]), row["source"])


if __name__ == "__main__":
    main()
