"""Latency that our ingress and target add, against the plain service of `ray.serve.llm` over the same engine settings.

    python -m benchmarks.ingress --out FILE

Both services run at the same time in one Ray on this machine, each with an engine of its own: `ours` as `build` makes
it, `plain` by `ray.serve.llm.build_openai_app` from the very `LLMConfig` of our target. In each round both are asked
the same thing one after the other, in an order drawn anew, so that whatever else the machine does meets both alike.
Both are started anew for every part of the rounds, because an engine's place in memory shows in its step times.

Answers of 1 token leave K to our service, which decides it although no draft can be verified. For longer answers K is
pinned to K_max, which is what the plain service verifies: the engines then do the same work.

The real model's steps vary by more than what is looked for. `--small-engine` gives both services an engine of the same
vocabulary with 2 layers of random weights and no drafter: its noise is less, the way to it is the same.

Ray runs replicas at niceness 15 unless RAY_worker_niceness says otherwise: set it where other work runs.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from ray.serve import Application
from ray.serve.llm import build_openai_app

from benchmarks.common import running_applications
from cluster.settings import load_settings
from deployments.app import build, catalog, replica_env
from deployments.target import engine_config, prepare
from peagle.provenance import conditions

OURS, PLAIN = "ours", "plain"
CONFIG = Path(__file__).parents[1] / "configs" / "local.yaml"
NICENESS = "RAY_worker_niceness"
NUM_RESAMPLES = 2000
NUM_WARMUP_ROUNDS = 5


@dataclass(frozen=True)
class Case:
    """One kind of request. `max_tokens`: length of each answer, whose end the model may not choose."""

    max_tokens: int
    stream: bool

    def __str__(self) -> str:
        return f"{self.max_tokens} token{'s' * (self.max_tokens > 1)}, {'streamed' if self.stream else 'whole'}"


@dataclass(frozen=True)
class Timing:
    """Seconds from sending one request to the first piece of its answer and to its end."""

    first_s: float
    total_s: float


Round = Mapping[str, Timing]
"""By service."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0; the JSON is written and the table shown."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ingress",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", type=Path, nargs="?", default=CONFIG, help="settings (default: %(default)s)")
    parser.add_argument("--num-requests", type=int, default=200, help="of each kind to each service (default: 200)")
    parser.add_argument("--num-starts", type=int, default=2, help="of both services (default: 2)")
    parser.add_argument("--max-minutes", type=float, default=60.0, help="of the rounds after one start (default: 60)")
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--small-engine", action="store_true", help="2 layers of random weights, no drafter")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if not 1 <= options.num_starts <= options.num_requests or min(options.max_tokens) < 1:
        parser.error("--num-requests must be at least --num-starts, and that and --max-tokens at least 1")
    args = shared_args(options.config, options.small_engine)
    document: dict[str, Any] = {
        "made": conditions(),
        "config": {"file": str(options.config), "args": args},
        "load": "one request at a time, greedy, no two prompts alike, both services up, order drawn in each round",
        "num_cores": os.cpu_count(),
        "niceness": {"client": os.nice(0), NICENESS: os.environ.get(NICENESS, "Ray's default, 15")},
        "load_average_at_start": os.getloadavg(),
    }
    cases = [Case(length, stream) for length in options.max_tokens for stream in (False, True)]
    rounds: dict[str, list[Round]] = {str(case): [] for case in cases}
    by_start = []
    for start in range(options.num_starts):
        num_rounds = options.num_requests * (start + 1) // options.num_starts - len(rounds[str(cases[0])])
        with running_applications(lambda: services(args), f"/{OURS}/health") as url:
            found = measure(url, args, cases, num_rounds, 60 * options.max_minutes, random.Random(start))
        for case, one in found.items():
            rounds[case] += one
        by_start.append(summary(found))
    report = summary(rounds)
    document |= {"load_average_at_end": os.getloadavg(), "results": report, "by_start": by_start}
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{table(report)}\nwritten to {options.out}\n")
    return 0


def shared_args(config: Path, small_engine: bool) -> dict[str, Any]:
    """The settings that both services are made from, with what only our target would otherwise do by itself."""
    (application,) = yaml.safe_load(config.read_text(encoding="utf-8"))["applications"]
    args = {name: section for name, section in application["args"].items() if name != "callers"}
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    target = args.get("target", {})
    args["target"] = {**target, "env": {"VLLM_CPU_OMP_THREADS_BIND": cores, **target.get("env", {})}}
    if small_engine:
        args = {name: section for name, section in args.items() if name not in ("drafter", "depth")}
        small = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 2}}
        args["engine"] = {**args.get("engine", {}), **small}
    return args


def services(args: dict[str, Any]) -> dict[str, Application]:
    """Ours and plain `ray.serve.llm`, with engines of the same settings."""
    settings = load_settings(args, catalog(), os.environ)
    plain = engine_config(settings, *prepare(settings), replica_env(settings))
    plain.deployment_config = {
        "num_replicas": settings.target.num_replicas,
        "max_ongoing_requests": settings.target.max_ongoing_requests,
        "ray_actor_options": {"num_cpus": settings.target.num_cpus},
    }
    return {OURS: build(args), PLAIN: build_openai_app({"llm_configs": [plain]})}


def measure(
    url: str, args: Mapping[str, Any], cases: Sequence[Case], num_rounds: int, max_s: float, rng: random.Random
) -> dict[str, list[Round]]:
    """`num_rounds` rounds of every case, the cases in turn, after some that are not counted; fewer when `max_s` seconds
    are over, but one."""
    found: dict[str, list[Round]] = {str(case): [] for case in cases}
    end = time.monotonic() + max_s
    with httpx.Client(base_url=url, timeout=600) as client:
        for index in range(-NUM_WARMUP_ROUNDS, num_rounds):
            if index > 0 and time.monotonic() > end:
                break
            for case in cases:
                timings = {}
                prompt = f"Greet visitor {rng.randrange(10**9)} in one sentence."
                for service in rng.sample((OURS, PLAIN), 2):
                    timings[service] = ask(client, service, request_body(args, service, case, prompt))
                if index >= 0:
                    found[str(case)].append(timings)
            sys.stderr.write(f"\rround {index + 1} of {num_rounds}")
    sys.stderr.write("\n")
    return found


def request_body(args: Mapping[str, Any], service: str, case: Case, prompt: str) -> dict[str, Any]:
    """A chat request; to ours with K pinned to K_max where drafts are verified at all."""
    body: dict[str, Any] = {
        "model": args["model"]["id"],
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": case.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": case.stream,
    }
    drafter = args.get("drafter")
    if service == OURS and drafter is not None and case.max_tokens > 1:
        body["drafting"] = {"k": drafter["max_draft_tokens"]}
    return body


def ask(client: httpx.Client, service: str, body: Mapping[str, Any]) -> Timing:
    """One request over a connection that stays open. Raises SystemExit when the answer is no answer."""
    start = time.perf_counter()
    first_s, received = 0.0, b""
    with client.stream("POST", f"/{service}/v1/chat/completions", json=body) as response:
        for piece in response.iter_raw():
            first_s = first_s or time.perf_counter() - start
            received += piece
    total_s = time.perf_counter() - start
    if response.status_code != 200 or b'"choices"' not in received:
        raise SystemExit(f"error: {service} answered {response.status_code} {received.decode(errors='replace'):.500}")
    return Timing(first_s, total_s)


def summary(rounds: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    """By case and by what is timed: each service's median and p99, and what ours takes more, in milliseconds.

    Differences are of the quantiles; `median_of_pairs` is the median over rounds of the difference within a round.
    """
    return {
        case: {
            what: compared(*(np.array([getattr(one[service], what) for one in timings]) for service in (OURS, PLAIN)))
            for what in ("total_s", "first_s")
        }
        for case, timings in rounds.items()
    }


def compared(ours_s: np.ndarray, plain_s: np.ndarray) -> dict[str, Any]:
    """Quantiles of two services' seconds and of their difference, each `[value, low, high]` in milliseconds: the 95 %
    interval of a bootstrap over rounds. The arrays hold one entry a round, in the same order."""
    drawn = np.random.default_rng(0).integers(len(ours_s), size=(NUM_RESAMPLES, len(ours_s)))
    ours_R, plain_R = ours_s[drawn], plain_s[drawn]
    found: dict[str, Any] = {"num_requests": len(ours_s), OURS: {}, PLAIN: {}, "difference": {}}
    for name, percent in (("median", 50), ("p99", 99)):
        ours, plain = np.percentile(ours_s, percent), np.percentile(plain_s, percent)
        of_ours, of_plain = np.percentile(ours_R, percent, axis=1), np.percentile(plain_R, percent, axis=1)
        found[OURS][name] = _in_ms(ours, of_ours)
        found[PLAIN][name] = _in_ms(plain, of_plain)
        found["difference"][name] = _in_ms(ours - plain, of_ours - of_plain)
    pairs, of_pairs = np.median(ours_s - plain_s), np.median(ours_R - plain_R, axis=1)
    found["difference"]["median_of_pairs"] = _in_ms(pairs, of_pairs)
    return found


def _in_ms(value: float, resampled: np.ndarray) -> list[float]:
    low, high = np.percentile(resampled, (2.5, 97.5))
    return [round(1000 * float(one), 3) for one in (value, low, high)]


def table(report: Mapping[str, Any]) -> str:
    """The report as a table for people."""
    lines = [f"{'milliseconds to the end of':28s}{'':18s}{'ours':>26s}{'plain':>26s}{'ours - plain':>26s}"]
    for case, found in report.items():
        for what in ("total_s", "first_s"):
            one = found[what]
            for name in ("median", "p99", "median_of_pairs"):
                cells = [_cell(one[column].get(name)) for column in (OURS, PLAIN, "difference")]
                part = "first piece" if what == "first_s" else "answer"
                lines.append(f"{case:28s}{f'{part}, {name}':30s}" + "".join(f"{cell:>26s}" for cell in cells))
    return "\n".join(lines)


def _cell(values: Sequence[float] | None) -> str:
    return "" if values is None else f"{values[0]:.2f} [{values[1]:.2f}, {values[2]:.2f}]"


if __name__ == "__main__":
    sys.exit(main())
