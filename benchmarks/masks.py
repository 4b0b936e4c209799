"""Time to prepare the masks of many examples, four ways (paper section 3.1, Table 2).

    python -m benchmarks.masks --examples 128 --tokens 2048 --depths 8 --ratio 0.8 --out FILE [--device cuda]

    pair_loop  the definition, pair by pair in Python over all N * K rows: O((N K)^2) work an example
    row_loop   the same, a numpy line a row, then the kept rows picked: as PARD prepares its masks
    dense      one example at a time on the kept rows, vectorised (`peagle.train.masks.dense`)
    table      one table for the greatest length, each example a view of it (`peagle.train.masks`); its build included
    block      FlexAttention's form, which holds tiles instead of a mask (`peagle.train.masks.block`)

Rows are drawn beforehand, for all ways the same. A way is timed until its share of time is used up, then scaled to the
number of examples; how many were timed is said. All ways must agree on the first examples, or nothing is written.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peagle.provenance import conditions
from peagle.train import masks
from peagle.train.cod import Rows, chain_lengths, sample_rows
from peagle.train.masks import MaskTable

PAIR_LOOP_ROWS = 4


@dataclasses.dataclass(frozen=True)
class Example:
    """One packed sequence: its rows and the document of each token, [1, N]."""

    rows: Rows
    document_1N: Tensor


def examples(count: int, num_tokens: int, num_depths: int, ratio: float, device: str) -> list[Example]:
    """Packed sequences of four documents of random lengths, all tokens worth a loss."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        cuts_3 = torch.randint(1, num_tokens, (3,), generator=generator).sort().values
        document_1N = torch.bucketize(torch.arange(num_tokens), cuts_3, right=True)[None]
        chain_1N = chain_lengths(document_1N, torch.ones_like(document_1N, dtype=torch.bool), num_depths)
        rows = sample_rows(chain_1N, num_depths, ratio, generator=generator)
        rows = Rows(rows.anchor_BT.to(device), rows.offset_BT.to(device), num_tokens)
        made.append(Example(rows, document_1N.to(device)))
    return made


def pair_loop(document: list[int], num_depths: int, queries: Sequence[int]) -> list[list[bool]]:
    """Rows `queries` of the mask of all N * K rows, numbered offset * N + anchor."""
    num_tokens = len(document)
    found = []
    for query in queries:
        offset_q, anchor_q = divmod(query, num_tokens)
        line = []
        for key in range(num_tokens * num_depths):
            offset_k, anchor_k = divmod(key, num_tokens)
            in_cache = offset_k == 0 and anchor_k <= anchor_q
            in_pass = anchor_k == anchor_q and offset_k <= offset_q
            line.append((in_cache or in_pass) and document[anchor_k] == document[anchor_q])
        found.append(line)
    return found


def row_loop(example: Example, num_depths: int) -> np.ndarray:
    """Boolean mask [T, T] of the kept rows, picked from that of all N * K rows."""
    document_N = example.document_1N[0].cpu().numpy()
    num_tokens = len(document_N)
    offset, anchor = np.divmod(np.arange(num_tokens * num_depths, dtype=np.int32), num_tokens)
    document = document_N[anchor]
    first = offset == 0
    mask = np.empty((len(anchor), len(anchor)), dtype=bool)
    for query in range(len(anchor)):
        in_pass = (anchor == anchor[query]) & (offset <= offset[query])
        mask[query] = ((first & (anchor <= anchor[query])) | in_pass) & (document == document[query])
    kept = (example.rows.offset_BT * num_tokens + example.rows.anchor_BT)[0].cpu().numpy()
    return mask[np.ix_(kept, kept)]


def timed(way: Callable[[int], object], count: int, limit_s: float, device: str) -> dict[str, Any]:
    """Runs way(0), way(1), ... until `count` or `limit_s`; seconds for `count`, scaled where fewer were run."""
    way(0)  # first use of kernels and of memory
    _finish(device)
    start, done = time.perf_counter(), 0
    while done < count and (done == 0 or time.perf_counter() - start < limit_s):
        way(done)
        _finish(device)
        done += 1
    seconds = time.perf_counter() - start
    return {"seconds": round(seconds / done * count, 4), "num_timed": done, "scaled": done < count}


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def check(made: list[Example], num_depths: int, table: MaskTable) -> None:
    """Raises ValueError when two ways differ on one of the examples."""
    for number, example in enumerate(made):
        rows, document_1N = example.rows, example.document_1N
        num_tokens, num_rows = rows.num_tokens, rows.anchor_BT.shape[1]
        dense = masks.dense(rows, document_1N)
        block = masks.block(rows, document_1N)
        index_T = torch.arange(num_rows, device=dense.device)
        zero = torch.zeros(1, 1, 1, dtype=torch.int64, device=dense.device)
        tiles = block.to_dense()[:, 0].bool().repeat_interleave(128, 1).repeat_interleave(128, 2)
        by_rule = block.mask_mod(zero, zero, index_T[None, :, None], index_T[None, None, :])
        full = row_loop(Example(Rows(*_all_rows(num_tokens, num_depths), num_tokens), document_1N.cpu()), num_depths)
        queries = [0, num_tokens - 1, num_tokens, num_tokens * num_depths - 1]
        agree = {
            "row_loop": bool((torch.from_numpy(row_loop(example, num_depths)) == dense[0].cpu()).all()),
            "pair_loop": pair_loop(document_1N[0].tolist(), num_depths, queries) == full[queries].tolist(),
            "table": torch.equal(table.dense(rows, document_1N), dense),
            "block": torch.equal(by_rule, dense) and not (dense & ~tiles[:, :num_rows, :num_rows]).any(),
        }
        if wrong := [name for name, same in agree.items() if not same]:
            raise ValueError(f"example {number}: {', '.join(wrong)} differ from masks.dense")


def _all_rows(num_tokens: int, num_depths: int) -> tuple[Tensor, Tensor]:
    """Anchors and offsets [1, N * K] of every row, offset by offset."""
    number = torch.arange(num_tokens * num_depths)[None]
    return number % num_tokens, number // num_tokens


def measure(options: argparse.Namespace) -> dict[str, Any]:
    count, num_depths, device = options.examples, options.depths, options.device
    made = examples(count, options.tokens, num_depths, options.ratio, device)
    start = time.perf_counter()
    table = MaskTable(options.tokens, num_depths, device)
    _finish(device)
    build_s = time.perf_counter() - start
    check(made[: options.checked], num_depths, table)
    document = made[0].document_1N[0].tolist()
    queries = torch.linspace(0, options.tokens * num_depths - 1, PAIR_LOOP_ROWS).long().tolist()
    pairs = timed(lambda at: pair_loop(document, num_depths, queries[at : at + 1]), len(queries), 30, device)
    share = options.tokens * num_depths / len(queries)
    ways = {
        "pair_loop": {
            "seconds": round(pairs["seconds"] * share * count, 1),
            "num_timed": round(pairs["num_timed"] / (options.tokens * num_depths), 6),
            "scaled": True,
        },
        "row_loop": timed(lambda at: row_loop(made[at], num_depths), count, options.limit_s, device),
        "dense": timed(lambda at: masks.dense(made[at].rows, made[at].document_1N), count, options.limit_s, device),
        "table": timed(lambda at: table.dense(made[at].rows, made[at].document_1N), count, options.limit_s, device),
        "block": timed(lambda at: masks.block(made[at].rows, made[at].document_1N), count, options.limit_s, device),
    }
    ways["table"]["build_s"] = round(build_s, 6)
    ways["table"]["seconds"] = round(ways["table"]["seconds"] + build_s, 4)
    num_rows = made[0].rows.anchor_BT.shape[1]
    names = ("examples", "tokens", "depths", "ratio", "device")
    return {
        "conditions": conditions() | {"num_threads": torch.get_num_threads()},
        "settings": {name: getattr(options, name) for name in names},
        "num_rows": num_rows,
        "table_bytes": options.tokens**2,
        "mask_bytes": num_rows**2,
        "num_checked": len(made[: options.checked]),
        "ways": ways,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--examples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--depths", type=int, default=8)
    parser.add_argument("--ratio", type=float, default=0.8)
    parser.add_argument("--checked", type=int, default=1, help="examples on which all ways must agree")
    parser.add_argument("--limit-s", type=float, default=20, help="seconds after which a way is scaled")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = measure(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    for name, way in found["ways"].items():
        print(f"{name:10} {way['seconds']:12.3f} s for {options.examples} examples ({way['num_timed']} timed)")


if __name__ == "__main__":
    main()
