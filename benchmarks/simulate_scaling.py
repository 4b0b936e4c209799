"""Autoscaling compared in a model of a fleet: real acceptance traces, measured step times, Serve's rules, no GPU.

    python -m benchmarks.simulate_scaling --traces FILE.npz --step-times FILE.json --out FILE.json

Arms: our policy at several utilisations, Serve's queue length at several `target_ongoing_requests` (each also with a
downscaling factor of 0.3), a fixed number of replicas. All get the same requests, bounds, delays and starts
(`benchmarks.simulation.fleet`). In a collapse one more arm knows it all beforehand and orders the right number at its very
moment: a bound for whoever must notice first. Compared are GPU hours at equal attainment: the share of requests whose
TTFT and TPOT keep their limits. For each arm one setting is also chosen on traffic whose acceptance stands still, and
followed where it moves. The mean rate is such that `--replicas` replicas at 75 % of the predicted capacity would serve
it.

--scenario, --arm and --utilisation, repeatable, pick some; --merge FILE, repeatable, takes earlier outputs in.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulate import file_conditions, made
from benchmarks.simulation.fleet_arms import AcceptanceArm, settings
from benchmarks.simulation.fleet_bench import ARMS, OURS, USUAL_UTILISATION, UTILISATIONS, Bench
from benchmarks.simulation.fleet_records import Conditions, FleetRun
from benchmarks.simulation.fleet_report import (
    as_runs,
    at_equal_attainment,
    call_times,
    cheapest,
    figures,
    number_in,
    ratio,
)
from benchmarks.simulation.fleet_traffic import DURATION_S, SCENARIOS, TUNED_ON, WARM_S, draw
from benchmarks.simulation.traces import Traces
from cluster.step_time import StepTimes

TUNED_LEVEL = 0.95


def simulate(
    bench: Bench, names: Sequence[str], arms: Sequence[str], seeds: Sequence[int], utilisations: Sequence[float]
) -> dict[str, Any]:
    """The figures of each scenario and arm, and what our policy's calls took."""
    found: dict[str, Any] = {}
    calls: list[tuple[float, bool]] = []
    for name in names:
        low_s = draw(name, bench.requests_per_s, bench.answers, seeds[0]).low_s
        runs: dict[str, dict[str, list[FleetRun]]] = {}
        for arm_name in arms:
            by_setting = bench.arms(name, utilisations)[arm_name]
            for setting, make in by_setting.items():
                for seed in seeds:
                    run, arm = bench.run(name, make, seed)
                    runs.setdefault(arm_name, {}).setdefault(setting, []).append(run)
                    calls += arm.seconds if isinstance(arm, AcceptanceArm) else []
        found[name] = {
            "arms": {arm: {setting: figures(of, low_s) for setting, of in by.items()} for arm, by in runs.items()}
        }
    return {"scenarios": found, "call_us": call_times(calls)}


def one_setting(scenarios: Mapping[str, Any]) -> dict[str, Any]:
    """Each arm at the setting that is cheapest on traffic whose acceptance and rate do not jump, in all scenarios."""
    tuned_on = [scenarios[name]["arms"] for name in TUNED_ON if name in scenarios]
    if len(tuned_on) < len(TUNED_ON):
        return {}
    chosen = {arm: cheapest([as_runs(one[arm]) for one in tuned_on], TUNED_LEVEL) for arm in tuned_on[0]}
    found: dict[str, Any] = {"level": TUNED_LEVEL, "settings": chosen, "scenarios": {}}
    for name, one in scenarios.items():
        rows = {arm: one["arms"][arm][setting] for arm, setting in chosen.items() if setting is not None}
        found["scenarios"][name] = {
            arm: {
                "attainment": row["attainment"]["mean"],
                "gpu_hours": row["gpu_hours"]["mean"],
                "changes_per_hour": row["changes_per_hour"]["mean"],
                "recovery_s": row.get("recovery_s", {}).get("mean"),
                "our_gpu_hours": _against(rows, arm, "gpu_hours_by_seed"),
                "our_recovery": _against(rows, arm, "recovery_s_by_seed"),
            }
            for arm, row in rows.items()
        }
    return found


def _against(rows: Mapping[str, Any], arm: str, key: str) -> dict[str, Any] | None:
    """Ours over this arm's."""
    if OURS not in rows or arm == OURS or key not in rows[arm]:
        return None
    return ratio(rows[OURS][key], rows[arm][key])


def table(name: str, found: Mapping[str, Any]) -> str:
    lines = [f"{name}", f"  {'arm':26s} {'setting':16s} {'kept':>7s} {'GPU h':>7s} {'changes/h':>9s} {'recovery':>9s}"]
    for arm, by_setting in found["arms"].items():
        for setting, one in by_setting.items():
            recovery = f"{one['recovery_s']['mean']:7.0f} s" if "recovery_s" in one else ""
            lines.append(
                f"  {arm:26s} {setting:16s} {one['attainment']['mean']:7.4f} {one['gpu_hours']['mean']:7.2f} "
                f"{one['changes_per_hour']['mean']:9.1f} {recovery:>9s}"
            )
    for rival, levels in found["gpu_hours_at_equal_attainment"].items():
        shown = [f"{one['attainment']:.2f}: {one['ratio']} {one.get('ratio_95', 'out of reach')}" for one in levels]
        lines.append(f"  GPU hours over {rival}: " + "; ".join(shown))
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="of peagle.evaluate --traces")
    parser.add_argument("--step-times", type=Path, required=True, help="table of peagle.vllm.calibrate")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="default: all")
    parser.add_argument("--arm", action="append", choices=ARMS, help="default: all")
    parser.add_argument("--utilisation", action="append", type=float, help=f"of our arm, default {UTILISATIONS}")
    parser.add_argument("--merge", action="append", type=Path, default=[], help="an earlier output")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--replicas", type=int, default=4, help="that the usual traffic needs")
    parser.add_argument("--max-replicas", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-tpot-ms", type=float, default=100.0)
    parser.add_argument("--max-ttft-s", type=float, default=5.0)
    parser.add_argument("--start-time-s", type=float, default=180.0)
    parser.add_argument("--upscale-delay-s", type=float, default=15.0)
    parser.add_argument("--downscale-delay-s", type=float, default=300.0)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--answers-joined", type=int, default=1, help="traced answers that make one; the rate falls")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    for name in ("seeds", "replicas", "max_replicas", "max_num_seqs", "prompt_tokens", "answers_joined"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not all(0 < one <= 1 for one in args.utilisation or ()):
        parser.error("--utilisation must be above 0 and at most 1")
    if args.replicas > args.max_replicas:
        parser.error("--replicas must be at most --max-replicas")
    return args


def _conditions(args: argparse.Namespace) -> Conditions:
    return Conditions(
        max_num_seqs=args.max_num_seqs,
        min_replicas=1,
        max_replicas=args.max_replicas,
        max_tpot_s=args.max_tpot_ms / 1000,
        max_ttft_s=args.max_ttft_s,
        duration_s=DURATION_S,
        measured_from_s=WARM_S,
        start_time_s=args.start_time_s,
        upscale_delay_s=args.upscale_delay_s,
        downscale_delay_s=args.downscale_delay_s,
        prompt_tokens=args.prompt_tokens,
    )


def report(args: argparse.Namespace) -> dict[str, Any]:
    """The document. Raises ValueError naming a file that cannot be used."""
    times, traces = StepTimes.load(args.step_times), Traces.load(args.traces)
    if times.max_draft_tokens < traces.max_draft_tokens:
        traces = traces.up_to(times.max_draft_tokens)
    elif times.max_draft_tokens > traces.max_draft_tokens:
        raise ValueError(f"{args.step_times} has K_max {times.max_draft_tokens}, the traces {traces.max_draft_tokens}")
    bench = Bench(_conditions(args), times, traces, args.replicas, args.answers_joined)
    earlier = [json.loads(path.read_text(encoding="utf-8")) for path in args.merge]
    names = args.scenario or ([] if earlier else list(SCENARIOS))
    simulated = simulate(bench, names, args.arm or ARMS, range(args.seeds), args.utilisation or UTILISATIONS)
    conditions = {
        "traces": file_conditions(args.traces),
        "step_times": {**file_conditions(args.step_times), "measured": times.measured, "conditions": times.conditions},
        "num_seeds": args.seeds,
        "answers_joined": args.answers_joined,
        "fleet": dataclasses.asdict(bench.conditions),
        "policy": settings(bench.conditions, USUAL_UTILISATION).model_dump(),
        "requests_per_s": round(bench.requests_per_s, 4),
        "capacities": {name: dataclasses.asdict(one) for name, one in bench.capacities.items()},
    }
    for path, one in zip(args.merge, earlier, strict=True):
        # The policy's settings are a condition of the runs of our arm only.
        has_ours = any(OURS in scenario["arms"] for scenario in one["scenarios"].values())
        shared = {key: value for key, value in conditions.items() if has_ours or key != "policy"}
        if differs := [key for key, value in shared.items() if _plain(one["conditions"].get(key)) != _plain(value)]:
            raise ValueError(f"{path}: other conditions than here: {', '.join(differs)}")
    scenarios = merged([one["scenarios"] for one in (*earlier, simulated)])
    return {
        "made": [made("benchmarks.simulate_scaling"), *(by for one in earlier for by in np.atleast_1d(one["made"]))],
        "conditions": conditions,
        "call_us": [call for one in earlier for call in one["call_us"]] + ([simulated["call_us"]] if names else []),
        "scenarios": scenarios,
        "one_setting": one_setting(scenarios),
    }


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of all parts by scenario and arm, and the arms compared."""
    found: dict[str, Any] = {}
    for name in SCENARIOS:
        arms: dict[str, dict[str, Any]] = {}
        for part in parts:
            for arm, by_setting in part.get(name, {"arms": {}})["arms"].items():
                arms.setdefault(arm, {}).update(by_setting)
        if not arms:
            continue
        arms = {
            arm: dict(sorted(arms[arm].items(), key=lambda item: number_in(item[0]))) for arm in ARMS if arm in arms
        }
        rivals = [arm for arm in arms if arm != OURS and OURS in arms]
        compared = {arm: at_equal_attainment(as_runs(arms[OURS]), as_runs(arms[arm])) for arm in rivals}
        found[name] = {"arms": arms, "gpu_hours_at_equal_attainment": compared}
    return found


def _plain(value: Any) -> Any:
    """As JSON has it, less what is not set: a setting that came later says nothing of an earlier run."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items() if one is not None}
    return json.loads(json.dumps(value))


def main() -> None:
    args = parse_args()
    try:
        document = report(args)
    except ValueError as error:
        sys.exit(f"benchmarks.simulate_scaling: {error}")
    for name, one in document["scenarios"].items():
        print(table(name, one), end="\n\n")
    print(json.dumps(document["one_setting"], indent=1))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
