"""How a launch of `peagle.kernels.paged_attention` is cut: from sizes that the host knows, and from nothing else.

Every distinct plan is a kernel to compile, which takes longer than a target waits for its drafts. So plans are few, and
`distinct_batches` tells what has to run once before a drafter serves.
"""

from __future__ import annotations

import dataclasses

import triton

#: Splitting below this many keys costs more in partial results than it saves.
MIN_KEYS_PER_SPLIT = 256
MAX_SPLITS = 32
#: Lanes for requests, here and in `peagle.kernels.batch_rows`: each width is a kernel to compile.
MIN_BLOCK_REQUESTS = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one launch; all follow from sizes that the host knows.

    block_m: rows times query heads of a tile. block_n: keys read at a time. num_splits: parts of the context at most.
    phased: keys that all rows of a tile see are taken without masks; pays where tiles see many keys.
    """

    block_m: int
    block_n: int
    num_splits: int
    phased: bool
    num_warps: int
    num_stages: int


def plan_for(
    num_rows: int,
    num_requests: int,
    num_heads: int,
    num_groups: int,
    head_size: int,
    *,
    element_bytes: int,
    max_context: int,
    num_sms: int,
) -> Plan:
    """Sizes for a batch of about equal requests.

    element_bytes: of queries and keys. max_context: positions that the block table has room for. num_sms:
    multiprocessors of the GPU.
    """
    ratio = num_heads // num_groups
    rows_each = triton.cdiv(num_rows, max(num_requests, 1))
    # What a tile keeps in registers is bounded: larger tiles would spill. float32 has no tensor cores here.
    most = 32 if element_bytes > 2 else (128 if head_size <= 128 else 64)
    block_m = min(most, max(16, triton.next_power_of_2(rows_each * ratio)))
    block_m = max(block_m, triton.next_power_of_2(ratio))
    num_tiles = max(num_requests, 1) * triton.cdiv(rows_each, block_m // ratio)
    # Two programs fit a multiprocessor; twice as many even out contexts of different lengths.
    num_splits = min(4 * num_sms // (num_tiles * num_groups), triton.cdiv(max_context, MIN_KEYS_PER_SPLIT), MAX_SPLITS)
    # A power of two: every number of splits is a kernel of its own to compile.
    num_splits = 1 << max(num_splits, 1).bit_length() - 1
    small = head_size * element_bytes <= 256
    return Plan(
        block_m=block_m,
        block_n=64 if small else 32,
        num_splits=num_splits,
        phased=block_m == 128 and num_splits <= 1,
        num_warps=8 if block_m >= 128 or not small else 4,
        num_stages=3 if small else 2,
    )


def block_requests(num_requests: int) -> int:
    """Lanes that look for a row's request, of which there is one more than requests."""
    return max(MIN_BLOCK_REQUESTS, triton.next_power_of_2(num_requests + 1))


def distinct_batches(
    max_num_rows: int, max_num_requests: int, num_heads: int, num_groups: int, head_size: int, **sizes: int
) -> list[tuple[int, int]]:
    """Rows and requests of one batch for every kernel that batches within the limits may need.

    sizes: element_bytes, max_context and num_sms of `plan_for`.
    """
    found: dict[tuple[Plan, int], tuple[int, int]] = {}
    for num_requests in range(1, max_num_requests + 1):
        for rows_each in range(1, triton.cdiv(max_num_rows, num_requests) + 1):
            num_rows = min(rows_each * num_requests, max_num_rows)
            plan = plan_for(num_rows, num_requests, num_heads, num_groups, head_size, **sizes)
            found.setdefault((plan, block_requests(num_requests)), (num_rows, num_requests))
    return list(found.values())
