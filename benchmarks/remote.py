"""Whether a drafter on another GPU changes the target's output: greedy text without a drafter, with one inside the
engine, and with one in another process, of the embedded small model and its head. Needs GPUs.

    python -m benchmarks.remote --placements none colocated remote [--choice] --out FILE.json

With `--choice` any number of drafts is verified, chosen by the drafter's chances (`peagle.vllm.chosen`), and steps with
such drafts are counted. Each placement runs in a process of its own. The target runs on GPU `--target-gpu`, the remote
drafter (`benchmarks.drafter`) on `--drafter-gpu`; both may be the same. How fast they are: `benchmarks.engines`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.engines import drafter
from benchmarks.models import spawn_engines
from peagle.provenance import conditions
from peagle.vllm.engine import RemoteSettings, engine_kwargs

PLACEMENTS = ("none", "colocated", "remote")
K_MAX, NUM_TEXT_TOKENS = 7, 96
START_S = 120.0

TEXTS = (
    "def fibonacci(n):\n    ",
    "The capital of France is",
    "Write a short story about a fox and a river.\n",
    "import numpy as np\n\ndef mean(values):\n",
    "Question: What is 17 times 23?\nAnswer:",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam, I am writing to",
    "The three laws of motion are as follows.\n1.",
)


class ChosenSteps:
    """vLLM's `worker_extension_cls`: counts the steps whose drafts were chosen."""

    model_runner: Any

    def count_chosen_steps(self) -> None:
        """From now on."""
        chosen, self.num_chosen_steps = self.model_runner.chosen, 0
        inner = chosen.reallocate_drafts

        def counting(*args: Any) -> Any:
            self.num_chosen_steps += 1
            return inner(*args)

        chosen.reallocate_drafts = counting

    def chosen_steps(self) -> int:
        return self.num_chosen_steps


def settings_of(placement: str, choice: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's `LLM`."""
    from peagle.embedded import DEFAULT_TARGET, prepare_target
    from peagle.heads import prepare_head

    target, has_head = prepare_target(), placement != "none"
    extra: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": 2048, "max_num_seqs": 64, "seed": 0}
    extra |= {"max_num_batched_tokens": 8192, "generation_config": "vllm"}
    extra |= {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 4 << 30}
    if has_head and choice:
        extra["worker_extension_cls"] = "benchmarks.remote.ChosenSteps"
    kwargs = engine_kwargs(
        target,
        prepare_head(DEFAULT_TARGET, target) if has_head else None,
        max_draft_tokens=K_MAX if has_head else None,
        dtype="bfloat16",
        on_cpu=False,
        remote=RemoteSettings(min_deadline_s=0.2) if placement == "remote" else None,
        extra=extra,
    )
    if has_head and choice:
        kwargs["scheduler_cls"] = "benchmarks.choosing_scheduler.ChoosingScheduler"
    return kwargs


def connect(rpc: Callable[..., Any], found: dict[str, Any]) -> None:
    """Give the engine its drafter, and wait until its link is up. Raises RuntimeError when it does not come up."""
    rpc("set_drafters", args=([found],))
    begin_s = time.monotonic()
    while (report := rpc("remote_report")[0]["pool"])["num_up"] == 0:
        if time.monotonic() - begin_s > START_S:
            raise RuntimeError(f"no link: {report}")
        time.sleep(0.2)


def generate(placement: str, args: argparse.Namespace) -> dict[str, Any]:
    """The texts' output in one placement, in this process."""
    from vllm import LLM, SamplingParams

    os.environ["CUDA_VISIBLE_DEVICES"] = args.target_gpu
    spawn_engines()
    kwargs = settings_of(placement, args.choice)
    counts_choices = args.choice and placement != "none"
    with ExitStack() as stack:
        found = None
        if placement == "remote":
            found = stack.enter_context(drafter(kwargs, args.drafter_gpu, args.out.with_suffix(".drafter.log")))
        engine = LLM(**kwargs, disable_log_stats=True)
        if found:
            connect(engine.collective_rpc, found())
        if counts_choices:
            engine.collective_rpc("count_chosen_steps")
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TEXT_TOKENS)
        outputs = engine.generate(TEXTS, params, use_tqdm=False)
        row: dict[str, Any] = {"placement": placement, "tokens": [list(one.outputs[0].token_ids) for one in outputs]}
        if found:
            row["report"] = engine.collective_rpc("remote_report")[0]
        if counts_choices:
            row["num_chosen_steps"] = engine.collective_rpc("chosen_steps")[0]
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    parser.add_argument("--choice", action="store_true", help="drafts chosen by the drafter's chances")
    parser.add_argument("--target-gpu", default="0")
    parser.add_argument("--drafter-gpu", default="1")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of one placement")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        args.part.write_text(json.dumps(generate(args.placements[0], args)))
        return 0
    rows: list[dict[str, Any]] = []
    for placement in args.placements:
        part = args.out.with_suffix(f".{placement}.part")
        part.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.remote", *sys.argv[1:], "--part", str(part)]
        with args.out.with_suffix(f".{placement}.log").open("w") as log:
            process = subprocess.Popen(
                [*command, "--placements", placement], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                process.wait(args.timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        rows.append(json.loads(part.read_text()) if part.exists() else {"placement": placement, "error": log.name})
        tokens = rows[-1].get("tokens", [])
        rows[-1]["num_equal"] = sum(map(list.__eq__, tokens, rows[0].get("tokens", [])))
        args.out.write_text(json.dumps({"conditions": conditions(), "rows": rows}, indent=1))
        sys.stdout.write(f"{placement}: {rows[-1]['num_equal']} of {len(TEXTS)} texts equal {rows[0]['placement']}'s\n")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
