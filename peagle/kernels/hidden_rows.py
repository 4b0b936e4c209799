"""Hidden states of a pass's rows: those of the payload, the shared one for mask rows.

R payload rows, N rows of the pass, H hidden size.
"""

from __future__ import annotations

import ctypes

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.dispatch import check_shape, uses_kernel

MAX_BLOCK_H = 2048
ALIGNMENT_BYTES = 16  # of addresses, where a row's size is a multiple of it: rows then move in wide loads


def place_hidden(payload_RH: Tensor, sources_N: Tensor, mask_hidden_H: Tensor, out_NH: Tensor) -> Tensor:
    """Writes and returns out_NH: row i is payload_RH[sources_N[i]], or mask_hidden_H where the source is -1.

    sources_N: int, as `peagle.kernels.batch_rows` makes them. Values are converted to the type of out_NH. Plain torch,
    for a payload that is one tensor on the device of the others; a GPU's pass has `place_hidden_at`.

    Raises ValueError when shapes do not fit together.
    """
    hidden_size = mask_hidden_H.shape[-1]
    check_shape("mask_hidden_H", mask_hidden_H, None)
    check_shape("payload_RH", payload_RH, None, hidden_size)
    check_shape("out_NH", out_NH, len(sources_N), hidden_size)
    mask_1H = mask_hidden_H.to(out_NH.dtype)[None]
    # The shared hidden state is the last row, where -1 points.
    return out_NH.copy_(torch.cat([payload_RH.to(out_NH.dtype), mask_1H])[sources_N.long()])


def place_hidden_at(addresses_R: Tensor, sources_N: Tensor, mask_hidden_H: Tensor, out_NH: Tensor) -> Tensor:
    """`place_hidden` with a payload whose rows lie anywhere: row r is H numbers of out_NH's type at addresses_R[r].

    A captured graph thus reads whatever memory its inputs name: the mailboxes of several targets, copied by nobody.

    addresses_R: int64, in bytes, of memory that out_NH's device reaches (its own, or pinned host memory); multiples of
    `ALIGNMENT_BYTES` where a row's size is. Whoever calls keeps that memory until the kernel has run; only rows that a
    source names are read. Raises ValueError when shapes do not fit together.
    """
    check_shape("addresses_R", addresses_R, None)
    check_shape("mask_hidden_H", mask_hidden_H, None)
    check_shape("out_NH", out_NH, len(sources_N), len(mask_hidden_H))
    if addresses_R.dtype != torch.int64 or not out_NH.is_contiguous() or mask_hidden_H.stride(0) != 1:
        raise ValueError("addresses_R must be int64, out_NH and mask_hidden_H contiguous")
    if len(sources_N):
        (place_hidden_at_triton if uses_kernel(out_NH) else place_hidden_at_torch)(
            addresses_R, sources_N, mask_hidden_H, out_NH
        )
    return out_NH


def place_hidden_at_torch(addresses_R: Tensor, sources_N: Tensor, mask_hidden_H: Tensor, out_NH: Tensor) -> None:
    """The twin, for addresses in host memory."""
    row_bytes = out_NH.shape[1] * out_NH.itemsize
    for row_H, source in zip(out_NH, sources_N.tolist(), strict=True):
        if source < 0:
            row_H.copy_(mask_hidden_H)
        else:
            found = (ctypes.c_char * row_bytes).from_address(int(addresses_R[source]))
            row_H.copy_(torch.frombuffer(found, dtype=out_NH.dtype))


def place_hidden_at_triton(addresses_R: Tensor, sources_N: Tensor, mask_hidden_H: Tensor, out_NH: Tensor) -> None:
    """One launch, a program for each part of a row."""
    num_rows, hidden_size = out_NH.shape
    block = min(MAX_BLOCK_H, triton.next_power_of_2(hidden_size))
    _place_hidden_at_kernel[(num_rows, triton.cdiv(hidden_size, block))](
        addresses_R, sources_N, mask_hidden_H, out_NH, addresses_R.stride(0), hidden_size,
        BLOCK_H=block, ALIGNMENT=ALIGNMENT_BYTES if hidden_size * out_NH.itemsize % ALIGNMENT_BYTES == 0 else 1,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _place_hidden_at_kernel(
    addresses_R, sources_N, mask_hidden_H, out_NH, address_stride, hidden_size,
    BLOCK_H: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_column = column < hidden_size
    source = tl.load(sources_N + row).to(tl.int64)
    if source >= 0:
        address = tl.load(addresses_R + source * address_stride)
        payload_H = tl.multiple_of(address.to(tl.pointer_type(out_NH.dtype.element_ty)), ALIGNMENT)
        tl.store(out_NH + row * hidden_size + column, tl.load(payload_H + column, mask=is_column), mask=is_column)
    else:
        shared = tl.load(mask_hidden_H + column, mask=is_column)
        tl.store(out_NH + row * hidden_size + column, shared.to(out_NH.dtype.element_ty), mask=is_column)
