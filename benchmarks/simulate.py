"""Policies of K compared in a model of one engine: real acceptance traces, measured step times, no GPU.

    python -m benchmarks.simulate --traces FILE.npz --step-times FILE.json --out FILE.json
    python -m benchmarks.simulate --survival code=0.88,0.77 --survival chat=0.64,0.39 --step-times FILE.json
    python -m benchmarks.simulate --traces FILE.npz --validate RESULTS.json

Against ours (`benchmarks.simulation.learned`) run: no speculation (with --plain-step-times, the table of an engine without
a drafter), every fixed K, a batch-size table, a moving average, two bandits, the best fixed K of each workload in
hindsight, and an oracle of each step. Ours also runs with one workload for all, and with either half of it left out.
Controls: with shuffled labels the gain by workload must vanish, with flat costs K must be K_max.

Regret is the share of the score lost to the best single fixed K, chosen on other answers and seeds, and to the best
fixed K of each workload, chosen on the very requests that are measured. The score is tokens/s in a closed loop, and one
over the mean TPOT where requests arrive by themselves, for there all that keep up give out what arrives.

--validate compares AL at fixed K with real runs (`benchmarks.stock_acceptance`, or `peagle.evaluate`'s figures): by replay
of the traces, and carried from the run's own survival at its greatest K.
"""

import argparse
import dataclasses
import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulation.arms import (
    BY_WORKLOAD,
    PLAIN,
    PlainTimes,
    best_by_workload,
    controls,
    fixed,
    lengths,
    rivals,
    tuned_depth,
)
from benchmarks.simulation.baselines import NoSpeculation
from benchmarks.simulation.comparison import Bench, Load, Remembered, figures, mistaken, over_range, ratio, scores
from benchmarks.simulation.engine_model import Engine, Run, Times
from benchmarks.simulation.traces import Kind, Traces, even, mixes, synthetic
from benchmarks.simulation.validation import carried_lengths, carried_table, compare_lengths
from benchmarks.simulation.validation import table as validation_table
from cluster.step_time import StepCosts, StepTimes
from cluster.transfer import SPLIT_SHARE

LOADS = ("closed:1", "closed:2", "closed:4", "closed:8", "closed:16", "closed:32", "closed:64", "closed:128")


def compare(
    tuning: Bench,
    bench: Bench,
    times: StepCosts,
    plain_times: Times | None,
    load: Load,
    seeds: Sequence[int],
    with_controls: bool = True,
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Every policy at one load: the figures to report, and scores by policy and seed."""
    tuned = tuned_depth(tuning, load, seeds)
    best = fixed(int(np.argmax(tuned)))
    found: dict[str, list[Run]] = {}
    if plain_times is not None:
        found[PLAIN] = bench.runs(lambda seed: NoSpeculation(), load, seeds, plain_times)
    for name, make in rivals(tuning, times).items():
        found[name] = bench.runs(make, load, seeds)
    by_label, found[BY_WORKLOAD] = best_by_workload(bench, times, load, seeds, int(np.argmax(tuned)))
    policies = {}
    for name, runs in found.items():
        to_best, to_workload = (ratio(scores(runs, load), scores(found[base], load)) for base in (best, BY_WORKLOAD))
        policies[name] = {
            **figures(runs),
            "to_best_fixed": to_best,
            "regret_to_best_fixed": round(1 - to_best["ratio"], 4),
            "to_best_by_workload": to_workload,
            "regret_to_best_by_workload": round(1 - to_workload["ratio"], 4),
        }
    document = {
        "load": str(load),
        "num_requests": len(bench.traffic(load, seeds[0]).answers),
        "best_fixed": best,
        "tuning_scores": [round(score, 3) for score in tuned],
        "best_by_workload": by_label,
        "policies": policies,
    }
    if with_controls:
        document["controls"] = controls(bench, times, load, seeds, found)
    return document, {name: scores(runs, load) for name, runs in found.items()}


def whole_range(by_load: Sequence[Mapping[str, Sequence[float]]], loads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each policy against one fixed K for all loads, the best one by the tuning runs, and against each load's best."""
    tuned = np.log(np.array([one["tuning_scores"] for one in loads])).mean(axis=0)
    single = fixed(int(np.argmax(tuned)))
    return {
        "best_single_fixed": single,
        "policies": {
            name: {
                "to_best_single_fixed": over_range(by_load, name, [single] * len(by_load)),
                "to_each_loads_best_fixed": over_range(by_load, name, [one["best_fixed"] for one in loads]),
            }
            for name in by_load[0]
        },
    }


def table(one: Mapping[str, Any]) -> str:
    """The figures of one load, a line a policy."""
    lines = [
        f"{one['load']}: best fixed {one['best_fixed']} (tuned elsewhere), by workload {one['best_by_workload']}",
        f"{'policy':30s} {'tok/s':>8s} {'to best fixed [95%]':>22s} {'AL':>5s} {'K':>5s} "
        f"{'TPOT p50':>9s} {'p95':>7s} {'p99':>7s} ms {'changes/h':>9s}",
    ]
    for name, found in one["policies"].items():
        low, high = found["to_best_fixed"]["ratio_95"]
        tpot_ms = [1000 * found["tpot_s"][share] for share in ("p50", "p95", "p99")]
        lines.append(
            f"{name:30s} {found['tokens_per_s']:8.0f} {found['to_best_fixed']['ratio']:6.3f} [{low:.3f}, {high:.3f}] "
            f"{found['acceptance_length']:5.2f} {found['mean_depth']:5.2f} {tpot_ms[0]:9.2f} {tpot_ms[1]:7.2f} "
            f"{tpot_ms[2]:7.2f}    {found['changes_per_hour']:9.0f}"
        )
    for name, found in one.get("controls", {}).items():
        shown = found.get("to_max", found)
        depth = f", mean K {found['mean_depth']} of {found['max_draft_tokens']}" if "to_max" in found else ""
        lines.append(f"control {name}: {shown['ratio']:.3f} {shown['ratio_95']}{depth}")
    return "\n".join(lines)


def range_table(found: Mapping[str, Any]) -> str:
    lines = [
        f"all loads, geometric mean: to {found['best_single_fixed']} everywhere; to each load's best fixed K, worst"
    ]
    for name, one in found["policies"].items():
        everywhere, each = one["to_best_single_fixed"], one["to_each_loads_best_fixed"]
        lines.append(
            f"{name:30s} {everywhere['ratio']:6.3f} {everywhere['ratio_95']}   {each['ratio']:6.3f} {each['ratio_95']}"
            f"  {each['worst_load']:6.3f}"
        )
    return "\n".join(lines)


def made(program: str = "benchmarks.simulate") -> dict[str, Any]:
    """Command, commit, date and machine of a run of `program`."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "command": " ".join([f"python -m {program}", *sys.argv[1:]]),
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
    }


def file_conditions(path: Path) -> dict[str, str]:
    return {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def named_survival(text: str) -> tuple[str, tuple[float, ...]]:
    """Reads `code=0.88,0.77`."""
    name, _, values = text.partition("=")
    return name, tuple(float(value) for value in values.split(","))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--traces", type=Path, help="of peagle.evaluate --traces")
    source.add_argument(
        "--survival", action="append", type=named_survival, metavar="NAME=S1,S2,...", help="synthetic acceptance"
    )
    parser.add_argument("--step-times", type=Path, help="table of `calibrate`, of the engine with its drafter")
    parser.add_argument(
        "--table-error",
        type=float,
        default=0.0,
        help="policies know each step time with a chance error up to this share",
    )
    parser.add_argument("--plain-step-times", type=Path, help="table of the same engine without a drafter")
    parser.add_argument("--validate", type=Path, metavar="RESULTS", help="compare AL with real runs")
    parser.add_argument("--mix", default="apps", choices=sorted(mixes()), help="workloads (default: apps)")
    parser.add_argument(
        "--load", action="append", type=Load.parse, help=f"closed:NUM, poisson:RATE or bursty:RATE; default {LOADS}"
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--num-requests", type=int, help="per run (default: enough for the load)")
    parser.add_argument("--prompt-tokens", type=int, default=Engine.prompt_tokens)
    parser.add_argument("--max-num-seqs", type=int, default=Engine.max_num_seqs)
    parser.add_argument("--jitter", type=float, default=Engine.jitter, help="of the logarithm of step times")
    parser.add_argument(
        "--min-distinct-share", type=float, default=0.0, help="leave out answers that repeat themselves more than this"
    )
    parser.add_argument("--max-answer-tokens", type=int, help="cut answers, as the real run of --validate did")
    parser.add_argument("--no-controls", action="store_true")
    parser.add_argument("--note", help="kept with the figures, e.g. what table and traces do not share")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not args.validate and not args.step_times:
        parser.error("give --step-times FILE to simulate, or --validate RESULTS, or both")
    if args.validate and not args.traces:
        parser.error("--validate needs --traces")
    if not 0 <= args.table_error < 1:
        parser.error("--table-error must be at least 0 and below 1")
    if args.seeds < 1:
        parser.error("--seeds must be at least 1")
    return args


def simulate(args: argparse.Namespace, traces: Traces) -> dict[str, Any]:
    """All loads; prints each table as it is done."""
    times = StepTimes.load(args.step_times)
    plain = PlainTimes(StepTimes.load(args.plain_step_times)) if args.plain_step_times else None
    if times.max_draft_tokens < traces.max_draft_tokens:
        traces = traces.up_to(times.max_draft_tokens)
    engine = Engine(max_num_seqs=args.max_num_seqs, prompt_tokens=args.prompt_tokens, jitter=args.jitter)
    mix = even({name: Kind((name,)) for name, _ in args.survival}) if args.survival else mixes()[args.mix]
    split_share = 0.0 if args.survival else SPLIT_SHARE  # synthetic acceptance is the same wherever a draft starts
    tuning, bench = (
        Bench(half, Remembered(times), mix, engine, args.num_requests, split_share=split_share)
        for half in traces.halves()
    )
    known = mistaken(times, args.table_error, 0) if args.table_error else times
    seeds = range(args.seeds)
    loads, by_load = [], []
    for load in args.load or [Load.parse(text) for text in LOADS]:
        found, by_seed = compare(tuning, bench, known, plain, load, seeds, not args.no_controls)
        print(table(found), end="\n\n", flush=True)
        loads.append(found)
        by_load.append(by_seed)
    summary = whole_range(by_load, loads)
    print(range_table(summary))
    return {
        "step_times": {
            **file_conditions(args.step_times),
            "measured": times.measured,
            "conditions": times.conditions,
        },
        "table_error": args.table_error,
        "plain_step_times": file_conditions(args.plain_step_times) if args.plain_step_times else None,
        "mix": {"name": "synthetic" if args.survival else args.mix, **dataclasses.asdict(mix)},
        "max_draft_tokens": traces.max_draft_tokens,
        "min_distinct_share": args.min_distinct_share,
        "engine": dataclasses.asdict(engine),
        "num_seeds": args.seeds,
        "warmup": bench.warmup,
        "acceptance_length": {str(k): round(length, 4) for k, length in enumerate(lengths(bench))},
        "loads": loads,
        "all_loads": summary,
    }


def main() -> None:
    args = parse_args()
    try:
        document = report(args)
    except ValueError as error:
        sys.exit(f"benchmarks.simulate: {error}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Everything asked for; printed and returned."""
    traces = synthetic(dict(args.survival), 0) if args.survival else Traces.load(args.traces)
    if args.max_answer_tokens is not None:
        traces = traces.cut(args.max_answer_tokens)
    document: dict[str, Any] = {
        "made": made(),
        "note": args.note,
        "traces": file_conditions(args.traces) if args.traces else {"synthetic": dict(args.survival)},
        "max_answer_tokens": args.max_answer_tokens,
    }
    if args.validate:
        compared = compare_lengths(traces, args.validate)
        print(validation_table(compared))
        document["validation"] = [{**dataclasses.asdict(one), "difference": one.difference} for one in compared]
        carried = carried_lengths(args.validate)
        print(carried_table(carried))
        document["carried"] = [{**dataclasses.asdict(one), "difference": one.difference} for one in carried]
    if args.step_times:
        document |= simulate(args, traces.without_repetition(args.min_distinct_share))
    return document


if __name__ == "__main__":
    main()
