"""Load from NVIDIA's AIPerf, whose workers are processes: a second opinion on what `vllm bench serve` measures.

Its program lies in an environment of its own, because it asks for other versions than vLLM does:

    uv venv /tmp/aiperf && uv pip install --python /tmp/aiperf/bin/python aiperf
    python -m benchmarks.headline --aiperf /tmp/aiperf/bin/aiperf ...
"""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REMOVED_VARIABLES = ("PYTHONPATH", "HF_HUB_OFFLINE")
"""The second one makes AIPerf look for a tokenizer's folder on the Hub alone."""
MAX_WORKERS = 6
"""By default AIPerf takes three quarters of the host's cores, which the servers need."""

FIGURES = {
    "p50_ttft_ms": ("time_to_first_token", "p50"),
    "p99_ttft_ms": ("time_to_first_token", "p99"),
    "mean_ttft_ms": ("time_to_first_token", "avg"),
    "p50_tpot_ms": ("inter_token_latency", "p50"),
    "p99_tpot_ms": ("inter_token_latency", "p99"),
    "output_throughput": ("output_token_throughput", "avg"),
    "completed": ("request_count", "avg"),
    "duration": ("benchmark_duration", "avg"),
}
"""Names of `vllm bench serve`, and where AIPerf's report has the figure."""


def load(
    program: str, url: str, model: str, tokenizer: str, prompts: Sequence[str], num_requests: int, folder: Path,
    fields: dict[str, Any], timeout_s: float,
) -> dict[str, float]:  # fmt: skip
    """`FIGURES` of these prompts, answered with `num_requests` in flight. fields: of each request, beside its prompt.
    Raises RuntimeError when AIPerf or a request fails, or it takes longer than `timeout_s`."""
    file = folder / "aiperf-prompts.jsonl"
    file.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    command = [
        *(program, "profile", "--model", model, "--url", url, "--tokenizer", tokenizer, "--ui", "none"),
        *("--endpoint-type", "completions", "--streaming", "--use-server-token-count"),
        *("--concurrency", str(num_requests), "--request-count", str(len(prompts)), "--workers-max", str(MAX_WORKERS)),
        *("--input-file", str(file), "--custom-dataset-type", "single_turn"),
        *("--dataset-sampling-strategy", "sequential", "--extra-inputs", json.dumps(fields)),
        *("--output-artifact-dir", str(folder / "aiperf")),
    ]
    env = {name: value for name, value in os.environ.items() if name not in REMOVED_VARIABLES}
    report = folder / "aiperf" / "profile_export_aiperf.json"
    report.unlink(missing_ok=True)
    log = folder / "aiperf.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers too
        process.wait()
    if not report.exists():
        raise RuntimeError(f"AIPerf has written no report: {log} says why")
    figures = json.loads(report.read_text(encoding="utf-8"))
    found = {name: round(float(figures[figure][part]), 2) for name, (figure, part) in FIGURES.items()}
    if found["completed"] != len(prompts):
        errors = figures.get("error_summary")
        raise RuntimeError(f"AIPerf: {found['completed']:.0f} of {len(prompts)} requests were answered: {errors}")
    return found
