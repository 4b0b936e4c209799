"""Round trips between a target and a drafter that drafts nothing: what the way costs, without the pass.

    python -m benchmarks.links --out FILE [--device cuda:0 --drafter-device cuda:1] [--bookkeeping]

A step has B requests with K + 1 rows each in the payload, of which some are valid (the rest are rejected drafts). On a
CPU a round trip is the time from `Link.send` to the drafts. On a GPU it is the time on the target's stream from the
first copy of the step to the drafts in device memory, and beside it the time that the host spent to enqueue all of it;
the drafter copies the valid rows to its own GPU and waits for that copy, as before a pass. With `--bookkeeping` it does
what serving does on its host instead: requests, cache blocks, the batch of the pass, all but the pass itself.

The drafter is a process of its own (`peagle.drafter.server`). Paths: a mailbox in shared memory, TCP over loopback.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks.common import markdown
from peagle.drafter.client import Link, LinkPool
from peagle.drafter.engine import DraftEngine
from peagle.drafter.parallel_pass import ParallelPass, PassBatch, PassLimits, PendingDrafts
from peagle.drafter.protocol import Int32Array, Reducer, ServedHead, StepPlan, TargetShape, TargetStep
from peagle.drafter.server import DrafterServer
from peagle.provenance import conditions

DIGEST, LAYERS = "bench", (1, 2, 3)
CONTEXT, BLOCK_SIZE = 2048, 16


class CopyingEngine:
    """Takes the valid rows onto its device and answers token 0 everywhere."""

    def __init__(self, max_depth: int, device: str) -> None:
        self._max_depth, self._device = max_depth, torch.device(device)

    def step(self, steps: Sequence[TargetStep], prepared: Sequence[None] = ()) -> list[Int32Array]:
        if self._device.type == "cuda":
            for step in steps:
                for first, count in zip(step.row_offset_B.tolist(), step.num_valid_B.tolist(), strict=True):
                    step.hidden_RH[first : first + count].to(self._device, non_blocking=True)
            torch.cuda.synchronize(self._device)
        return [np.zeros((step.num_requests, self._max_depth), np.int32) for step in steps]

    def prepare(self, step: TargetStep) -> None:
        pass

    def drop_session(self, session: int) -> None:
        pass

    def swap(self, index: int, head: Any) -> None:
        raise NotImplementedError


class IdlePass:
    """Takes a batch as the drafter's pass does, and answers token 0 everywhere."""

    digest = DIGEST

    def __init__(self, shape: TargetShape) -> None:
        num_blocks = shape.max_num_requests * (blocks_each := CONTEXT // BLOCK_SIZE)
        num_rows = shape.max_num_rows + shape.max_num_requests * shape.max_depth
        self.limits = PassLimits(
            shape.max_num_requests, num_rows, num_rows, blocks_each, num_blocks, BLOCK_SIZE, shape.max_depth,
            shape.hidden_size,
        )  # fmt: skip

    def send_ahead(self, batch: PassBatch) -> None:
        pass

    def arm(self, *_: Any) -> None:
        pass

    def launch(self, batch: PassBatch, ahead: None = None) -> PendingDrafts:
        return lambda: np.zeros((batch.num_requests, self.limits.max_depth), np.int32)


def engine_of(shape: TargetShape, device: str, bookkeeping: bool) -> Any:
    """What drafts nothing."""
    if not bookkeeping:
        return CopyingEngine(shape.max_depth, device)
    return DraftEngine({0: cast(ParallelPass, IdlePass(shape))})


def serve(pipe: Connection, shape: TargetShape, device: str, bookkeeping: bool) -> None:
    """The drafter's process, until the pipe closes."""
    reducer = Reducer(torch.zeros(shape.hidden_size, 1, dtype=shape.torch_dtype)).to_bytes()
    head = ServedHead(DIGEST, reducer, shape.hidden_size, shape.dtype, shape.vocab_size, LAYERS, shape.max_depth)
    server = DrafterServer(engine_of(shape, device, bookkeeping), {0: head}, device=device)
    server.start()
    pipe.send(server.address)
    threading.Event().wait()


class Case:
    """The steps of B requests that begin with it, on the target's device."""

    def __init__(self, shape: TargetShape, num_requests: int, num_valid: int, device: torch.device) -> None:
        rows_each = shape.max_depth + 1
        num_rows = num_requests * rows_each
        self.slots_B = np.arange(num_requests, dtype=np.int32)
        self.heads_B = np.zeros_like(self.slots_B)
        self.depth_B = np.full_like(self.slots_B, shape.max_depth)
        self.row_offset_B = self.slots_B * rows_each
        self.prompts: dict[int, Int32Array] = {slot: np.ones(1, np.int32) for slot in range(num_requests)}
        self.start_B = torch.zeros(num_requests, dtype=torch.int32, device=device)
        self.num_valid_B = torch.full((num_requests,), num_valid, dtype=torch.int32, device=device)
        self.next_tokens_R = torch.ones(num_rows, dtype=torch.int32, device=device)
        self.hidden_RH = torch.ones(num_rows, shape.hidden_size, dtype=shape.torch_dtype, device=device)
        self.out_BK = torch.empty(num_requests, shape.max_depth, dtype=torch.int64, device=device)
        self.chance_BK = torch.empty_like(self.out_BK, dtype=torch.float32)

    def send(self, link: Link) -> None:
        num_rows = len(self.next_tokens_R)
        plan = StepPlan(self.slots_B, self.heads_B, self.depth_B, self.row_offset_B, num_rows, self.prompts)
        self.prompts = {}
        rest = self.start_B, self.num_valid_B, self.next_tokens_R, self.hidden_RH
        if not (link.announce(plan) and link.send(*rest)):
            raise RuntimeError(f"a step was not sent: {link.report()}")

    def on_host(self, pool: LinkPool) -> tuple[float, float]:
        """Seconds of one round trip, and of the part of it that `send` takes."""
        begin_s = time.perf_counter()
        ((link, _),) = pool.assign(self.slots_B, self.heads_B)
        self.send(link)
        sent_s = time.perf_counter()
        if link.wait() is None:
            raise RuntimeError(f"no drafts came: {link.report()}")
        end_s = time.perf_counter()
        self.start_B += self.num_valid_B
        return end_s - begin_s, sent_s - begin_s

    def on_device(self, pool: LinkPool) -> tuple[float, float]:
        """Seconds on the stream of one round trip, and seconds that the host took to enqueue it."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        begin.record()
        ((link, _),) = pool.assign(self.slots_B, self.heads_B)
        self.send(link)
        link.enqueue_wait(self.out_BK, self.chance_BK)
        end.record()
        host_s = time.perf_counter() - begin_s
        torch.cuda.synchronize()
        if int(self.out_BK.min()) != 0:
            raise RuntimeError(f"no drafts came: {link.report()}")
        self.start_B += self.num_valid_B
        return begin.elapsed_time(end) * 1e-3, host_s


def measure(args: argparse.Namespace, shape: TargetShape, shared: bool) -> list[dict[str, Any]]:
    """Figures of one path at every number of requests."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    drafter = context.Process(target=serve, args=(theirs, shape, args.drafter_device, args.bookkeeping), daemon=True)
    drafter.start()
    device = torch.device(args.device)
    pool = LinkPool(
        shape, aux_layer_ids=LAYERS, device=device, min_deadline_s=5.0, max_deadline_s=10.0, use_shared_memory=shared
    )
    try:
        pool.set_drafters([{"address": ours.recv(), "heads": {0: DIGEST}}])
        while not pool.num_up:
            time.sleep(0.01)
        found = []
        for num_requests in args.requests:
            case = Case(shape, num_requests, args.valid, device)
            once = case.on_device if device.type == "cuda" else case.on_host
            for _ in range(args.warmup):
                once(pool)
            answered_s = pool.report()["links"][0]["sum_service_s"]
            trips_s, host_s = zip(*(once(pool) for _ in range(args.steps)), strict=True)
            answered_s = pool.report()["links"][0]["sum_service_s"] - answered_s
            found.append(
                {
                    "path": pool.report()["links"][0]["path"],
                    "num_requests": num_requests,
                    "payload_mb": case.hidden_RH.nbytes / 1e6,
                    "median_ms": statistics.median(trips_s) * 1e3,
                    "p95_ms": statistics.quantiles(trips_s, n=20)[-1] * 1e3,
                    "host_median_ms": statistics.median(host_s) * 1e3,
                    "service_mean_ms": answered_s / args.steps * 1e3,
                }
            )
        return found
    finally:
        pool.close()
        drafter.kill()
        drafter.join()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.links", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON with the figures and their conditions")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--depth", type=int, default=7, help="K")
    parser.add_argument("--valid", type=int, default=3, help="valid rows of a request, of K + 1 (default %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bookkeeping", action="store_true", help="the drafter does all but the pass")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=50)
    default = "cuda:0" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="of the target (default %(default)s)")
    parser.add_argument("--drafter-device", help="default: the last GPU where the target has one, else the CPU")
    args = parser.parse_args()
    last_gpu = f"cuda:{torch.cuda.device_count() - 1}"
    args.drafter_device = args.drafter_device or (last_gpu if args.device.startswith("cuda") else "cpu")
    if (args.warmup + args.steps) * args.valid + args.depth >= CONTEXT:
        parser.error(f"--warmup and --steps of --valid rows each go beyond a context of {CONTEXT} tokens")
    most = max(args.requests)
    shape = TargetShape(
        hidden_size=args.hidden_size,
        dtype=args.dtype,
        max_depth=args.depth,
        max_num_requests=most,
        max_num_rows=most * (args.depth + 1),
        vocab_size=128_256,
    )
    rows = [row for shared in (True, False) for row in measure(args, shape, shared)]
    header = ["path", "requests", "payload MB", "round trip ms", "p95 ms", "host ms", "service ms"]
    print(markdown(header, [list(row.values()) for row in rows]))
    if args.out:
        settings = {name: str(value) for name, value in vars(args).items()}
        document = {"conditions": conditions(), "settings": settings, "round_trips": rows}
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
