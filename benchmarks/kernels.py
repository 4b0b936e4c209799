"""Times of the drafter's kernels beside their twins.

    python -m benchmarks.kernels --out FILE.json [--device cuda] [--sweep] [--quick]

Three tables, of the shape of an 8B target (H = 4096, 32 query heads, 8 key heads of 128, bfloat16):

    preparation   rows and hidden states of a pass with K = 7 (`build_rows`, `place_hidden`)
    attention     one layer over the paged cache: requests that decode, and chunks of a prompt
    choice        draft tokens and their chances from logits (`best_tokens`), K = 7, vocabularies reduced and whole

    device_us     time on the device, a call: many calls queued behind a pause, so that no launch is waited for
    call_us       time of a call that is waited for, what the host does included
    gb_per_s      keys and values that had to be read, over device_us

Calls take turns on caches that together exceed the GPU's own (`ROTATED_BYTES`), as the layers of a pass do. Kernel and
twin must agree on every case, or nothing is written. On a CPU only the twins are timed. `--sweep` also times plans of
`paged_attention` other than the chosen one, at contexts of 8192.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.common import markdown
from peagle.drafter import attention, drafts
from peagle.drafter import rows as row_kernels
from peagle.drafter.rows import Rows, build_rows, place_hidden
from peagle.provenance import conditions

HIDDEN, HEADS, GROUPS, HEAD, BLOCK_SIZE, MAX_DEPTH, MASK_TOKEN = 4096, 32, 8, 128, 16, 7, 5
SCALE = HEAD**-0.5
ROTATED_BYTES = 256 << 20
PAUSE_CYCLES = 30_000_000
NUM_CALLS = 16
#: Between kernel and twin, over the greatest output: a few steps of bfloat16.
TOLERANCE = 0.02
PREPARED = (*itertools.product((1, 8, 32, 64, 128), ("decode",)), (1, "chunk"), (64, "mixed"))
DECODES = tuple(itertools.product((1, 8, 32, 64, 128), (1024, 8192, 32768)))
CHUNKS = ((2048, 2048), (2048, 16384), (8192, 8192))
CHOICES = tuple(itertools.product((7, 56, 448, 896), (32_768, 128_256, 201_088)))
"""Rows of logits and their vocabulary: of 1, 8, 64 and 128 requests."""
TWIN_LIMIT_KEYS = 1 << 20
SWEPT_CONTEXT = 8192

Call = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Preparation:
    """One step of a target: `scheduled` payload rows a request, of which `valid` count."""

    name: str
    start: list[int]
    valid: list[int]
    scheduled: list[int]

    @classmethod
    def of(cls, batch: int, kind: str) -> Preparation:
        """decode: K + 1 rows each, 1 to K + 1 of them valid; chunk: 2048 rows; mixed: decode, and a chunk of 1984."""
        valid, scheduled = [1 + (3 * request) % (MAX_DEPTH + 1) for request in range(batch)], [MAX_DEPTH + 1] * batch
        if kind != "decode":
            valid[-1] = scheduled[-1] = 2048 if kind == "chunk" else 1984
        return cls(f"{kind} B={batch}", [700 + 13 * request for request in range(batch)], valid, scheduled)

    def tensors(self, device: str) -> dict[str, Tensor]:
        """Arguments of `build_rows` by name, the payload's hidden states and the shared one."""
        offsets = [0, *itertools.accumulate(self.scheduled)]
        num_columns = (max(map(sum, zip(self.start, self.valid, strict=True))) + 64) // BLOCK_SIZE + 1
        batch = len(self.start)
        columns = {
            "start_B": self.start,
            "num_valid_B": self.valid,
            "row_offset_B": offsets[:-1],
            "depth_B": [MAX_DEPTH] * batch,
        }
        made = {name: torch.tensor(column, dtype=torch.int32, device=device) for name, column in columns.items()}
        made["next_tokens_R"] = torch.randint(0, 1000, (offsets[-1],), dtype=torch.int32, device=device)
        made["block_table_BN"] = torch.randperm(batch * num_columns, device=device).view(batch, -1).int()
        dtype = torch.bfloat16
        made["payload_RH"] = torch.randn(offsets[-1], HIDDEN, device=device, dtype=dtype)
        made["mask_hidden_H"] = torch.randn(HIDDEN, device=device, dtype=dtype)
        return made

    @property
    def num_rows(self) -> int:
        """Rows of the pass; a graph would pad them."""
        return sum(self.valid) + len(self.valid) * (MAX_DEPTH - 1)


@dataclasses.dataclass(frozen=True)
class Attention:
    """`batch` requests of `rows` rows each, whose last row sees `context` keys."""

    batch: int
    rows: int
    context: int

    @property
    def name(self) -> str:
        return f"B={self.batch} rows={self.rows} context={self.context}"

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.context * GROUPS * HEAD * 2 * 2

    def tensors(self, device: str) -> list[list[Tensor]]:
        """Arguments of `paged_attention` for each turn: the caches differ, the rest is shared."""
        turns = min(NUM_CALLS, -(-ROTATED_BYTES // self.kv_bytes)) if device == "cuda" else 1
        num_columns = self.context // BLOCK_SIZE
        integers: dict[str, Any] = dict(dtype=torch.int32, device=device)
        q_NAD = torch.randn(self.batch * self.rows, HEADS, HEAD, device=device, dtype=torch.bfloat16)
        table_BN = torch.randperm(self.batch * num_columns, device=device).view(self.batch, -1).int()
        first_row = torch.arange(self.batch + 1, **integers) * self.rows
        context = torch.full((self.batch,), self.context, **integers)
        start = context - self.rows
        shape = (2, self.batch * num_columns, BLOCK_SIZE, GROUPS, HEAD)
        caches = [torch.empty(shape, device=device, dtype=torch.bfloat16).normal_() for _ in range(turns)]
        shared = [table_BN, first_row, start, context, torch.zeros_like(start)]
        return [[q_NAD, *cache, *shared] for cache in caches]


def timed(calls: Sequence[Call], device: str) -> dict[str, float]:
    """Microseconds of one call, the calls taken in turn; see the module for the two figures."""
    for call in calls:
        call()  # compilation, and first use of memory
    found = {}
    if device == "cuda":
        samples = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(PAUSE_CYCLES)
            begin.record()
            for number in range(NUM_CALLS):
                calls[number % len(calls)]()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3 / NUM_CALLS)
        found["device_us"] = round(statistics.median(samples), 2)
    samples = []
    for number in range(NUM_CALLS):
        begin_s = time.perf_counter()
        calls[number % len(calls)]()
        if device == "cuda":
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - begin_s) * 1e6)
    return {**found, "call_us": round(statistics.median(samples), 2)}


def prepare(case: Preparation, device: str) -> dict[str, Any]:
    """Times of kernel and twin. Raises ValueError when they differ."""
    given: dict[str, Any] = {**case.tensors(device)}
    payload_RH, mask_H = given.pop("payload_RH"), given.pop("mask_hidden_H")
    hidden, twin_hidden = (torch.empty(case.num_rows, HIDDEN, device=device, dtype=payload_RH.dtype) for _ in range(2))
    addresses_R = payload_RH.data_ptr() + payload_RH.stride(0) * payload_RH.itemsize * torch.arange(len(payload_RH))
    addresses_R = addresses_R.to(device)
    options: dict[str, Any] = dict(block_size=BLOCK_SIZE, mask_token_id=MASK_TOKEN, max_depth=MAX_DEPTH)
    options["num_rows"] = case.num_rows

    def kernel() -> Rows:
        rows = build_rows(**given, **options)
        place_hidden(addresses_R, rows.sources_N, mask_H, hidden)
        return rows

    def twin() -> Rows:
        with mock.patch.object(row_kernels, "uses_kernel", return_value=False):
            rows = build_rows(**given, **options)
        torch.index_select(torch.cat([mask_H[None], payload_RH]), 0, rows.sources_N + 1, out=twin_hidden)
        return rows

    found: dict[str, Any] = {"case": case.name, "num_rows": case.num_rows, "twin": timed([twin], device)}
    if device == "cuda":
        found["kernel"] = timed([kernel], device)
        pairs = [(hidden, twin_hidden), *zip(vars(kernel()).values(), vars(twin()).values(), strict=True)]
        if not all(torch.equal(one, other) for one, other in pairs):
            raise ValueError(f"{case.name}: kernel and twin differ")
    return found


def attend(case: Attention, device: str, sweep: bool) -> dict[str, Any]:
    """Times of kernel and twin (the twin where the cache is not huge). Raises ValueError when they differ."""
    turns = case.tensors(device)
    found: dict[str, Any] = {"case": case.name, "kv_bytes": case.kv_bytes}
    if case.batch * case.context <= TWIN_LIMIT_KEYS:
        with mock.patch.object(attention, "uses_kernel", return_value=False):
            twin_out = attention.paged_attention(*turns[0], scale=SCALE)
            found["twin"] = timed([lambda: attention.paged_attention(*turns[0], scale=SCALE)], device)
    if device != "cuda":
        return found
    plans: dict[str, attention.LaunchPlan | None] = {"kernel": None}
    if sweep and case.context == SWEPT_CONTEXT:
        plans |= {json.dumps(dataclasses.asdict(plan)): plan for plan in plans_beside(case)}
    for name, plan in plans.items():
        calls = [
            lambda turn=turn, plan=plan: attention.paged_attention(*turn, scale=SCALE, plan=plan) for turn in turns
        ]
        out = attention.paged_attention(*turns[0], scale=SCALE, plan=plan)
        if "twin" in found and (difference := float((out - twin_out).abs().max() / twin_out.abs().max())) > TOLERANCE:
            raise ValueError(f"{case.name}, {name}: kernel and twin differ by {difference:.3f} of the greatest")
        times = timed(calls, device)
        times["gb_per_s"] = round(case.kv_bytes / times["device_us"] / 1e3, 1)
        if name == "kernel":
            found["kernel"] = times
        else:
            found.setdefault("sweep", []).append({"plan": json.loads(name), **times})
    return found


def choose(num_rows: int, vocabulary: int, device: str) -> dict[str, Any]:
    """Times of kernel and twin. Raises ValueError when they differ."""
    logits_NV = torch.randn(num_rows, vocabulary, device=device, dtype=torch.bfloat16)
    logits_NV[torch.arange(num_rows), torch.randint(0, vocabulary, (num_rows,))] = 14.0  # one is best
    made = [
        (torch.empty(num_rows, dtype=torch.int64, device=device), torch.empty(num_rows, device=device)) for _ in "kt"
    ]

    def twin() -> None:
        with mock.patch.object(drafts, "uses_kernel", return_value=False):
            drafts.best_tokens(logits_NV, *made[1])

    found: dict[str, Any] = {"case": f"rows={num_rows} vocabulary={vocabulary}", "twin": timed([twin], device)}
    if device == "cuda":
        found["kernel"] = timed([lambda: drafts.best_tokens(logits_NV, *made[0])], device)
        (ids_N, chance_N), (twin_ids_N, twin_chance_N) = made
        if not torch.equal(ids_N, twin_ids_N) or not torch.allclose(chance_N, twin_chance_N, rtol=TOLERANCE):
            raise ValueError(f"{found['case']}: kernel and twin differ")
    return found


def plans_beside(case: Attention) -> list[attention.LaunchPlan]:
    """Plans that differ from the chosen one in one thing: tile, keys read at a time and stages, or splits."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    chosen = attention.plan_for(
        case.batch * case.rows, case.batch, HEADS, GROUPS, HEAD,
        element_bytes=2, max_context=case.context, num_sms=num_sms,
    )  # fmt: skip
    half = max(16, chosen.block_m // 2)
    changes: list[dict[str, Any]] = [dict(block_m=half, num_warps=8 if half > 64 else 4)]
    changes += [
        dict(block_n=keys, num_stages=stages) for keys, stages in ((32, 3), (32, 4), (64, 2), (64, 4), (128, 2))
    ]
    changes += [dict(num_splits=splits) for splits in (1, chosen.num_splits // 2, chosen.num_splits * 2)]
    plans = [dataclasses.replace(chosen, **change) for change in changes]
    return [plan for plan in dict.fromkeys(plans) if plan != chosen and 1 <= plan.num_splits <= attention.MAX_SPLITS]


def cases(quick: bool) -> tuple[list[Preparation], list[Attention]]:
    decodes = [Attention(batch, MAX_DEPTH * 2, context) for batch, context in DECODES]
    chunks = [Attention(1, rows, context) for rows, context in CHUNKS]
    prepared = [Preparation.of(batch, kind) for batch, kind in PREPARED]
    return (prepared[:2], [Attention(2, 3, 64)]) if quick else (prepared, decodes + chunks)


def report(document: dict[str, Any]) -> str:
    tables = []
    for name in ("preparation", "attention", "choice"):
        rows = []
        for row in document[name]:
            times = [row.get("kernel", {}), row.get("twin", {})]
            rows.append([row["case"], *(time.get(key) for time in times for key in ("device_us", "call_us"))])
        ways = ("kernel", "twin")
        tables.append(markdown([name, *(f"{way} {key} us" for way in ways for key in ("device", "call"))], rows))
    return "\n\n".join(tables)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sweep", action="store_true", help="also time other plans of the attention")
    parser.add_argument("--quick", action="store_true", help="a few small cases")
    options = parser.parse_args(arguments)
    prepared, attentions = cases(options.quick)
    document = {
        "conditions": conditions(),
        "preparation": [prepare(case, options.device) for case in prepared],
        "attention": [attend(case, options.device, options.sweep) for case in attentions],
        "choice": [choose(*case, options.device) for case in (CHOICES[:1] if options.quick else CHOICES)],
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(report(document))


if __name__ == "__main__":
    main()
