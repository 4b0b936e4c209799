"""What full CUDA graphs for several K are worth, and that they change no output. Needs a GPU.

    python -m benchmarks.graphs --out FILE.json [--engines k7-tiers k3 ...]

Engines (each in a process of its own, one after another; results are added to FILE.json, so several calls can share the
work): K_max = 7 with tiers, K_max = 7 as vLLM is, and engines built with K = 3 and K = 5, all with the shape of
Qwen3-Coder-30B-A3B (random weights, synthetic acceptance) and a P-EAGLE head of four layers. Then the embedded small
model with its shipped head, with and without tiers: the same tokens must come out. A difference passes only where both
tokens are equally likely, to `TIE_NATS`, in float32 (bf16 rounds differently in kernels for other shapes).

Ends with status 1, after writing the results, when a step ran on another graph than it should, a measurement has too
few steps, tokens differ, or an engine failed. Whether the goal is met (`goals`) is a result and no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines import ENGINES, TIERS, depths_of, measure
from peagle.provenance import conditions

GOAL_RATIO = 1.03
MIN_SHARE = 0.9
"""Of the steps between the first and the last of a batch's shape, at least so many have that shape."""
TIE_NATS = 1.0
"""Two tokens whose log probabilities are this close may change places in bf16, whose numbers near 20 are 0.125 apart,
after some tens of layers. A row that belongs to another request is further off, and in most texts."""
LOG_LINES = 60

Gap = Callable[[Sequence[int], int, int], float]
"""(tokens so far, one next token, another) -> difference of their log probabilities, in nats."""


def seconds_of(runs: dict[str, Any], engine: str, label: str, num_requests: int) -> float | None:
    """Step time of one batch, None where it was not measured."""
    for row in runs.get(engine, {}).get("rows", ()):
        if (row["label"], row["num_requests"]) == (label, num_requests):
            return float(row["seconds"])
    return None


def ratios(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Step times of the engine with tiers beside the others', batch by batch; with a goal where one was built for K."""
    found = []
    for row in runs.get("k7-tiers", {}).get("rows", ()):
        batch = (row["label"], row["num_requests"])
        own, stock = seconds_of(runs, f"k{batch[0]}", *batch), seconds_of(runs, "k7", *batch)
        one = {"label": batch[0], "num_requests": batch[1], "tiers_ms": round(1e3 * row["seconds"], 3)}
        one |= {"graphs": row["graphs"], "no_tiers_ms": None if stock is None else round(1e3 * stock, 3)}
        one["ratio_to_no_tiers"] = None if stock is None else round(row["seconds"] / stock, 4)
        if own is not None and batch[0] != "7":
            one |= {"built_for_k_ms": round(1e3 * own, 3), "ratio_to_built_for_k": round(row["seconds"] / own, 4)}
            one["goal_met"] = row["seconds"] / own <= GOAL_RATIO
        found.append(one)
    return found


def timing_failures(runs: dict[str, Any]) -> list[str]:
    """Batches whose steps are not what they should be."""
    failures = []
    for name, run in runs.items():
        for row in run.get("rows", ()):
            if "seconds" not in row:
                continue
            where = f"{name}, K = {row['label']}, {row['num_requests']} requests"
            if row["share"] < MIN_SHARE:
                failures.append(f"{where}: only {row['share']:.0%} of the steps have the batch's shape")
            depths = set(depths_of(row["label"], row["num_requests"]))
            tiers = set(TIERS) if ENGINES[name].tiers else {ENGINES[name].max_draft_tokens}
            if len(depths) == 1 and depths <= tiers:
                num_tokens = row["num_requests"] * (1 + min(depths))
                on_tier = row["graphs"].get(f"FULL/{num_tokens}", 0)
                if on_tier < 0.99 * sum(row["graphs"].values()) * row["share"]:
                    failures.append(f"{where}: expected FULL/{num_tokens}, ran {row['graphs']}")
    return failures


def compare_texts(runs: dict[str, Any], gap: Gap) -> tuple[list[dict[str, Any]], list[str]]:
    """Output with tiers beside output without: one row a label and batching, and what cannot be explained by a tie."""
    rows, failures = [], []
    others = {(row["label"], row["batching"]): row for row in runs["text"]["rows"]}
    prompts = next(row["prompts"] for row in runs["text"]["rows"] if "prompts" in row)
    for row in runs["text-tiers"]["rows"]:
        where = (row["label"], row["batching"])
        gaps = []
        for prompt, ours, theirs in zip(prompts, row["tokens"], others[where]["tokens"], strict=True):
            if ours == theirs:
                continue
            place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            gaps.append(round(abs(gap([*prompt, *ours[:place]], ours[place], theirs[place])), 4))
        num_tokens = sum(len(tokens) - 1 for tokens in row["tokens"])
        lengths = [num_tokens / (one["num_request_steps"] - len(prompts)) for one in (row, others[where])]
        rows.append(
            {
                "label": where[0],
                "batching": where[1],
                "num_prompts": len(prompts),
                "num_identical": len(prompts) - len(gaps),
                "gaps_nats": gaps,
                "tokens_per_step": round(lengths[0], 4),
                "tokens_per_step_no_tiers": round(lengths[1], 4),
                "graphs": row["graphs"],
                "graphs_no_tiers": others[where]["graphs"],
            }
        )
        if gaps and max(gaps) > TIE_NATS:
            failures.append(f"text, K = {where[0]}, {where[1]}: a token differs that is {max(gaps)} nats less likely")
        if lengths[0] < 0.93 * lengths[1]:
            failures.append(
                f"text, K = {where[0]}, {where[1]}: {lengths[0]:.3f} tokens a step, {lengths[1]:.3f} without"
            )
    return rows, failures


def float32_gap() -> Gap:
    """`Gap` by the embedded target in float32; the model is loaded at the first call."""
    loaded: list[Any] = []

    def gap(tokens: Sequence[int], one: int, other: int) -> float:
        import torch
        from transformers import AutoModelForCausalLM

        from peagle.embedded import prepare_target

        if not loaded:
            loaded.append(AutoModelForCausalLM.from_pretrained(prepare_target(), dtype=torch.float32))
        with torch.inference_mode():
            logits = loaded[0](torch.tensor([list(tokens)])).logits[0, -1]
        return float(logits[one] - logits[other])

    return gap


def run_apart(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One engine in a process of its own. Its log goes to a file; the end of it is shown when it fails.

    Returns what `measure` found, or {"error": reason}.
    """
    part, log = folder / f"{name}.json", folder / f"{name}.log"
    part.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.graphs", "--out", str(part), "--engine", name]
    command += ["--folder", str(folder), "--steps", str(args.steps), "--repeats", str(args.repeats), "--num-requests"]
    command += [str(size) for size in args.num_requests]
    if args.max_padding_tokens is not None:
        command += ["--max-padding-tokens", str(args.max_padding_tokens)]
    start_s = time.perf_counter()
    error = None
    with log.open("w") as stream:
        # A session of its own: vLLM's engine is a process under this one, and a timeout must end both.
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            if code := process.wait(args.timeout_s):
                error = f"ended with {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            error = f"not done after {args.timeout_s:.0f} s"
    if error is None and not part.exists():
        error = "wrote nothing"
    took = f"{time.perf_counter() - start_s:.0f} s"
    sys.stdout.write(f"{name}: {error or 'done'}, {took}\n")
    if error is not None:
        sys.stdout.write("\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]) + "\n")
        return {"error": f"{error}; log: {log}"}
    found: dict[str, Any] = json.loads(part.read_text())
    return found | {"conditions": conditions(), "wall_s": round(time.perf_counter() - start_s, 1)}


def summarize(result: dict[str, Any]) -> None:
    """Fill in what follows from the runs: ratios, goals, comparison of texts, failures."""
    runs = result["runs"]
    result["ratios"] = ratios(runs)
    result["goals"] = [one for one in result["ratios"] if "goal_met" in one]
    failures = [f"{name}: {run['error']}" for name, run in runs.items() if "error" in run]
    failures += timing_failures(runs)
    if all("rows" in runs.get(name, {}) for name in ("text", "text-tiers")):
        result["texts"], differences = compare_texts(runs, float32_gap())
        failures += differences
    result["failures"] = failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--num-requests", type=int, nargs="+", default=[1, 2, 8, 32], help="batch sizes, at most 32")
    parser.add_argument("--steps", type=int, default=100, help="steps of a run, at least 30")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-padding-tokens", type=int, help="of the engines with tiers; default: the engine's own")
    parser.add_argument("--timeout-s", type=float, default=420.0, help="of one engine")
    parser.add_argument("--folder", type=Path, help="models and logs; default: a folder beside the results")
    parser.add_argument("--engine", choices=list(ENGINES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder: Path = args.folder or args.out.with_suffix("").with_name(args.out.stem + "-files")
    folder.mkdir(parents=True, exist_ok=True)
    if args.engine is not None:
        found = measure(args.engine, folder, args.num_requests, args.steps, args.repeats, args.max_padding_tokens)
        args.out.write_text(json.dumps(found))
        return 0
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
    for name in args.engines:
        result["runs"][name] = run_apart(name, args, folder)
        args.out.write_text(json.dumps(result, indent=1))
    summarize(result)
    args.out.write_text(json.dumps(result, indent=1))
    for one in (*result["ratios"], *result.get("texts", ())):
        sys.stdout.write(json.dumps(one) + "\n")
    for name, run in result["runs"].items():
        if "report" in run:
            shown = {key: run["report"][key] for key in ("cudagraph_mode", "num_graphs", "capture")}
            sys.stdout.write(f"{name}: started in {run['start_s']} s, {json.dumps(shown)}\n")
    sys.stdout.writelines(f"FAILURE {failure}\n" for failure in result["failures"])
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
