"""Training throughput and peak memory side by side with the package `speculators` (its P-EAGLE model), in one run.

    python -m benchmarks.speculators --out results/2026-11-21-speculators-h200.json
    python -m benchmarks.speculators --cases smollm2:2048:peagle 8b:20480:peagle:4 8b:20480:speculators --out FILE

A case is SHAPE:TOKENS:SIDE[:SEGMENTS] (`benchmarks.sides`), SIDE one of peagle, speculators, speculators-eager-mask,
speculators-eager-loss, speculators-defaults; SEGMENTS splits our sequences (batch.num_segments). Each case has a
process of its own, so that one that fails, runs out of memory or exceeds its time is recorded and the rest go on. Up to
`--together` of them compile at the same time; then they are timed one after another, alone on the GPU. A case that ran
out of memory while others held some is tried again by itself. `speculators` must be importable; it is no dependency of
this project.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.sides import SHAPES, Case
from peagle.provenance import conditions

SIDES = ("peagle", "speculators", "speculators-eager-mask", "speculators-eager-loss", "speculators-defaults")
CELLS = ("smollm2:2048", "smollm2:8192", "8b:2048", "8b:8192", "8b:20480")
CASES = (
    *(f"{cell}:{side}" for cell in CELLS for side in ("speculators", "speculators-eager-mask", "peagle")),
    "8b:20480:peagle:4",
)
CONDITIONS = (
    "one packed sequence of one document, all tokens answer tokens; synthetic hidden states and tokens; 4 layers, K = "
    "8, r = 0.8, no floor, no max_anchors, fc_norm, embedding and output matrix frozen, forward KL (speculators: "
    "kl_div, fused; ours: soft) on both sides; float32 weights, bf16 autocast; forward, backward, clip, fused AdamW; "
    "median step after 4 warm-up steps; peak is torch's max_memory_allocated over the timed steps"
)
THEIR_DEFAULTS = "r 0.7, floor 0.2, max_anchors 512, trainable embedding, no fc_norm"


def parse_case(text: str, num_steps: int, device: str) -> Case:
    """Raises ValueError naming the part of SHAPE:TOKENS:SIDE[:SEGMENTS] that is wrong."""
    parts = text.split(":")
    if len(parts) not in (3, 4) or not all(part.isdecimal() for part in (parts[1], *parts[3:])):
        raise ValueError(f"case {text!r}: expected SHAPE:TOKENS:SIDE or SHAPE:TOKENS:SIDE:SEGMENTS")
    for value, known in ((parts[0], tuple(SHAPES)), (parts[2], SIDES)):
        if value not in known:
            raise ValueError(f"case {text!r}: {value!r} is none of {', '.join(known)}")
    num_segments = int(parts[3]) if len(parts) == 4 else 1
    if num_segments > 1 and parts[2] != "peagle":
        raise ValueError(f"case {text!r}: only peagle splits sequences in segments")
    return Case(parts[2], parts[0], int(parts[1]), num_segments, num_steps=num_steps, device=device)


class Worker:
    """A process of `benchmarks.sides` in a process group of its own (compilers that hang go with it)."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        command = [sys.executable, "-m", "benchmarks.sides", json.dumps(dataclasses.asdict(case))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={"TORCHINDUCTOR_COMPILE_THREADS": "4"} | os.environ,
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _line(self, deadline: float) -> str:
        """The next line; "" at the end. Raises TimeoutError at `deadline` (time.monotonic)."""
        try:
            return self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
        except queue.Empty:
            raise TimeoutError from None

    def warm_up(self, deadline: float) -> dict[str, Any] | None:
        """None once the first steps are done; otherwise what went wrong."""
        try:
            return None if self._line(deadline) == "ready\n" else self._failure()
        except TimeoutError:
            return {"status": "timeout", "where": "first steps (compilation)"}

    def measure(self, deadline: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            line = self._line(deadline)
        except TimeoutError:
            return {"status": "timeout", "where": "timed steps"}
        except BrokenPipeError:
            line = ""
        return {"status": "measured"} | json.loads(line) if line else self._failure()

    def _failure(self) -> dict[str, Any]:
        self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        out = any("OutOfMemoryError" in line for line in lines)
        return {"status": "out of memory" if out else "failed", "error": " | ".join(lines[-12:])[-3000:]}

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run_group(cases: list[Case], warm_up_s: float, measure_s: float) -> list[dict[str, Any]]:
    """Compiles all at once, then measures one after another. Results in the order of the cases."""
    workers = [Worker(case) for case in cases]
    results: list[dict[str, Any]] = []
    try:
        deadline = time.monotonic() + warm_up_s
        failures = [worker.warm_up(deadline) for worker in workers]
        for worker, failure in zip(workers, failures, strict=True):
            if failure:
                worker.end()
        for worker, failure in zip(workers, failures, strict=True):
            result = failure or worker.measure(time.monotonic() + measure_s)
            worker.end()
            results.append({"case": dataclasses.asdict(worker.case)} | result)
    finally:
        for worker in workers:
            worker.end()
    return results


def ratios(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our speed and memory over theirs, for each shape, length and pair of sides that was measured."""
    measured = [result for result in results if result["status"] == "measured"]
    found = []
    for ours in (result for result in measured if result["case"]["side"] == "peagle"):
        for theirs in (result for result in measured if result["case"]["side"] != "peagle"):
            same = all(ours["case"][key] == theirs["case"][key] for key in ("shape", "num_tokens"))
            if not same:
                continue
            pair = {key: ours["case"][key] for key in ("shape", "num_tokens", "num_segments")}
            pair |= {"against": theirs["case"]["side"], "speed": round(theirs["step_ms"] / ours["step_ms"], 3)}
            if ours["peak_memory_gib"]:
                pair["memory"] = round(ours["peak_memory_gib"] / theirs["peak_memory_gib"], 3)
            found.append(pair)
    return found


def skipped(case: Case, results: list[dict[str, Any]]) -> str | None:
    """Why a case is not worth its time after what was found: the eager mask stands in for the shipped one only."""
    shipped = {result["status"] for result in results if result["case"]["side"] == "speculators"}
    if case.side == "speculators" and "timeout" in shipped:
        return "exceeded its time in an earlier case"
    if case.side in ("speculators-eager-mask", "speculators-eager-loss") and "measured" in shipped:
        return "speculators runs as shipped"
    return None


def run_all(cases: list[Case], options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Runs every case and writes `options.out` after each group."""
    results: list[dict[str, Any]] = document["results"]
    alone: list[Case] = []
    over = time.monotonic() + options.total_s
    while cases or alone:
        group: list[Case] = []
        while cases and len(group) < options.together:
            case = cases.pop(0)
            why = "total time is used up" if time.monotonic() > over else skipped(case, results)
            if why:
                results.append({"case": dataclasses.asdict(case), "status": "skipped", "why": why})
            else:
                group.append(case)
        group = group or [alone.pop(0) for _ in alone[:1]]
        for case, result in zip(group, run_group(group, options.warm_up_s, options.measure_s), strict=True):
            if result["status"] == "out of memory" and len(group) > 1:
                alone.append(case)
                continue
            results.append(result)
            print(json.dumps(result), flush=True)
        document["ratios"] = ratios(results)
        options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="SHAPE:TOKENS:SIDE[:SEGMENTS]")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each case")
    parser.add_argument("--together", type=int, default=4, help="cases that compile at the same time")
    parser.add_argument("--warm-up-s", type=float, default=75, help="limit on the first steps, compilation included")
    parser.add_argument("--measure-s", type=float, default=30, help="limit on the timed steps of a case")
    parser.add_argument("--total-s", type=float, default=400, help="no further case of the list starts after this")
    options = parser.parse_args()
    cases = [parse_case(text, options.steps, options.device) for text in options.cases]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    measured_with = conditions()
    measured_with["versions"]["speculators"] = importlib.metadata.version("speculators")
    document = {"conditions": measured_with, "what": CONDITIONS, "their_defaults": THEIR_DEFAULTS, "results": []}
    run_all(cases, options, document)


if __name__ == "__main__":
    main()
