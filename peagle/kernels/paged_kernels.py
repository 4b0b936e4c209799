"""The Triton kernels of `peagle.kernels.paged_attention`, which explains what they compute and launches them.

Row tiles: BLOCK_M = BLOCK_Q rows times RATIO query heads of one key head, row by row. Tiles are numbered such that
request b begins with tile first_row[b] // BLOCK_Q + b; the padding after the last row counts as request B. Scores are
in powers of two: the scale holds log2(e).
"""

import triton
import triton.language as tl


@triton.jit
def _key_span(
    row, rows_end, first, start, context, cache_start, num_columns, window,
    BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Keys of the tile whose first row is `row`: (first seen, end, keys of a split, splits used).

    Both kernels call this, so they agree on who wrote what. The first key that is read is the first seen, rounded down
    to whole tiles.
    """
    low = cache_start
    if HAS_WINDOW:
        low = tl.maximum(low, start + row - first - window + 1)
    end = start + tl.minimum(row + BLOCK_Q, rows_end) - first
    end = tl.minimum(tl.minimum(end, context), num_columns * BLOCK_SIZE)
    num_tiles = tl.cdiv(tl.maximum(end - low // BLOCK_N * BLOCK_N, 0), BLOCK_N)
    tiles_each = tl.maximum(tl.cdiv(num_tiles, NUM_SPLITS), MIN_TILES)
    return low, end, tiles_each * BLOCK_N, tl.maximum(tl.cdiv(num_tiles, tiles_each), 1)


@triton.jit
def _read_keys(
    total, weight, top, q, position, table, k_cache, v_cache, begin, end, low, high, window, scale,
    block_stride, slot_stride,
    MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Adds the tiles of keys [begin, end) to the running sums; masked, only keys in [low, high) that a row sees."""
    column = tl.arange(0, BLOCK_D)
    for tile in range(begin, end, BLOCK_N):
        key = tile + tl.arange(0, BLOCK_N)
        exists = (key >= low) & (key < high)
        if MASKED:
            block = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0)
        else:
            block = tl.load(table + key // BLOCK_SIZE)
        at = tl.maximum(block, 0).to(tl.int64) * block_stride + (key % BLOCK_SIZE).to(tl.int64) * slot_stride
        at = at[:, None] + column[None, :]
        if MASKED or BLOCK_D != HEAD:
            read = exists[:, None] & (column < HEAD)[None, :]
            k = tl.load(k_cache + at, mask=read, other=0.0)
        else:
            k = tl.load(k_cache + at)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            visible = exists[None, :] & (key[None, :] <= position[:, None])
            if HAS_WINDOW:
                visible = visible & (key[None, :] > position[:, None] - window)
            score = tl.where(visible, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        # A row that has seen no key yet has -inf at the top, from which nothing may be subtracted.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        share = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        if MASKED or BLOCK_D != HEAD:
            v = tl.load(v_cache + at, mask=read, other=0.0)
        else:
            v = tl.load(v_cache + at)
        weight = weight * shrink + tl.sum(share, axis=1)
        total = total * shrink[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
        top = new_top
    return total, weight, top


@triton.jit(do_not_specialize=["num_requests", "num_rows"])  # each special value is a kernel to compile
def attention_kernel(
    q_NAD, k_cache, v_cache, block_table, first_row, start_B, context_B, cache_start_B, out, partial, lse,
    num_requests, num_rows, num_columns, window, scale,
    q_stride_n, q_stride_a, out_stride_n, out_stride_a, block_stride, slot_stride, group_stride, table_stride,
    RATIO: tl.constexpr, BLOCK_M: tl.constexpr, PHASED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """One tile of rows, one key head, one part of the context. Tiles run last to first: late ones see more keys."""
    tile, group, split = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    index = tl.arange(0, BLOCK_B)
    begins = tl.load(first_row + index, mask=index <= num_requests, other=1 << 30) // BLOCK_Q + index
    request = tl.sum((begins <= tile).to(tl.int32), axis=0) - 1
    first = tl.load(first_row + request).to(tl.int32)
    tile_row = first + (tile - first // BLOCK_Q - request) * BLOCK_Q
    is_padding = request == num_requests
    rows_end = tl.load(first_row + request + 1, mask=request < num_requests, other=num_rows).to(tl.int32)
    if (tile_row >= rows_end) | (is_padding & (split > 0)):
        return
    part = tl.arange(0, BLOCK_M)
    row, head = (tile_row + part // RATIO).to(tl.int64), group * RATIO + part % RATIO
    column = tl.arange(0, BLOCK_D)
    kept = ((part < BLOCK_Q * RATIO) & (row < rows_end))[:, None] & (column < HEAD)[None, :]
    out_at = out + (row * out_stride_n + head * out_stride_a)[:, None] + column[None, :]
    if is_padding:
        tl.store(out_at, tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty), mask=kept)
        return
    start = tl.load(start_B + request).to(tl.int32)
    low, high, keys_each, used = _key_span(
        tile_row, rows_end, first, start, tl.load(context_B + request).to(tl.int32),
        tl.load(cache_start_B + request).to(tl.int32), num_columns, window,
        BLOCK_SIZE, BLOCK_Q, BLOCK_N, NUM_SPLITS, MIN_TILES, HAS_WINDOW,
    )  # fmt: skip
    if split >= used:
        return
    q = tl.load(q_NAD + (row * q_stride_n + head * q_stride_a)[:, None] + column[None, :], mask=kept, other=0.0)
    total, weight, top = _read_span(
        q, start + (row - first).to(tl.int32), block_table + request.to(tl.int64) * table_stride,
        k_cache + group * group_stride, v_cache + group * group_stride,
        low // BLOCK_N * BLOCK_N + split * keys_each, keys_each, low, high, start + tile_row - first,
        window, scale, block_stride, slot_stride,
        PHASED, BLOCK_SIZE, BLOCK_Q, HEAD, BLOCK_M, BLOCK_N, BLOCK_D, HAS_WINDOW,
    )  # fmt: skip
    mean = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    if used == 1:
        tl.store(out_at, mean.to(out.dtype.element_ty), mask=kept)
    elif NUM_SPLITS > 1:
        at = (split.to(tl.int64) * num_rows + row) * (tl.num_programs(1) * RATIO) + head
        tl.store(partial + at[:, None] * HEAD + column[None, :], mean, mask=kept)
        tl.store(lse + at, top + tl.log2(weight), mask=(part < BLOCK_Q * RATIO) & (row < rows_end))


@triton.jit
def _read_span(
    q, position, table, k_cache, v_cache, begin, keys_each, low, high, first_position,
    window, scale, block_stride, slot_stride,
    PHASED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, HEAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Running sums over the keys of one split: (weighted values, weights, greatest score)."""
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    end = tl.minimum(begin + keys_each, high)
    if PHASED:
        # Tiles in between hold only keys that every row sees.
        seen = low
        if HAS_WINDOW:
            seen = tl.maximum(seen, first_position + BLOCK_Q - window)
        body = tl.minimum(tl.maximum(tl.cdiv(seen, BLOCK_N) * BLOCK_N, begin), tl.cdiv(end, BLOCK_N) * BLOCK_N)
        tail = tl.maximum(tl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, end // BLOCK_N * BLOCK_N), body)
        total, weight, top = _read_keys(
            total, weight, top, q, position, table, k_cache, v_cache, begin, body, low, high, window, scale,
            block_stride, slot_stride, True, BLOCK_SIZE, HEAD, BLOCK_N, BLOCK_D, HAS_WINDOW,
        )  # fmt: skip
        total, weight, top = _read_keys(
            total, weight, top, q, position, table, k_cache, v_cache, body, tail, low, high, window, scale,
            block_stride, slot_stride, False, BLOCK_SIZE, HEAD, BLOCK_N, BLOCK_D, HAS_WINDOW,
        )  # fmt: skip
        begin = tail
    return _read_keys(
        total, weight, top, q, position, table, k_cache, v_cache, begin, end, low, high, window, scale,
        block_stride, slot_stride, True, BLOCK_SIZE, HEAD, BLOCK_N, BLOCK_D, HAS_WINDOW,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_requests", "num_rows"])
def combine_kernel(
    partial, lse, out, first_row, start_B, context_B, cache_start_B,
    num_requests, num_rows, num_columns, window, num_heads, out_stride_n, out_stride_a,
    BLOCK_S: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Weights the parts of one row's context together, for some heads. Rows of one part are finished already."""
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK_B)
    ends = tl.load(first_row + index + 1, mask=index < num_requests, other=1 << 30)
    request = tl.sum((ends <= row).to(tl.int32), axis=0)
    if request >= num_requests:
        return
    first = tl.load(first_row + request).to(tl.int32)
    _, _, _, used = _key_span(
        first + (row - first) // BLOCK_Q * BLOCK_Q, tl.load(first_row + request + 1).to(tl.int32), first,
        tl.load(start_B + request).to(tl.int32), tl.load(context_B + request).to(tl.int32),
        tl.load(cache_start_B + request).to(tl.int32), num_columns, window,
        BLOCK_SIZE, BLOCK_Q, BLOCK_N, NUM_SPLITS, MIN_TILES, HAS_WINDOW,
    )  # fmt: skip
    if used == 1:
        return
    split, column = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    head = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
    at = (split.to(tl.int64)[:, None] * num_rows + row) * num_heads + head[None, :]
    has_part = (split < used)[:, None] & (head < num_heads)[None, :]
    score = tl.load(lse + at, mask=has_part, other=float("-inf"))
    top = tl.max(score, axis=0)
    weight = tl.exp2(score - tl.where(top == float("-inf"), 0.0, top)[None, :])
    read = has_part[:, :, None] & (column < HEAD)[None, None, :]
    mean = tl.load(partial + at[:, :, None] * HEAD + column[None, None, :], mask=read, other=0.0)
    whole = tl.sum(weight, axis=0)
    value = tl.sum(mean * weight[:, :, None], axis=0) / tl.where(whole == 0.0, 1.0, whole)[:, None]
    out_at = out + row.to(tl.int64) * out_stride_n + head[:, None] * out_stride_a + column[None, :]
    tl.store(out_at, value.to(out.dtype.element_ty), mask=(head < num_heads)[:, None] & (column < HEAD)[None, :])


@triton.jit
def write_kv_kernel(
    k_NGD, v_NGD, k_cache, v_cache, slots, block_size, num_groups,
    k_stride_n, k_stride_g, v_stride_n, v_stride_g, block_stride, slot_stride, group_stride,
    HEAD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    group, column = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_D)[None, :]
    kept = (group < num_groups) & (column < HEAD)
    at = slot // block_size * block_stride + slot % block_size * slot_stride + group * group_stride + column
    k = tl.load(k_NGD + row * k_stride_n + group * k_stride_g + column, mask=kept)
    v = tl.load(v_NGD + row * v_stride_n + group * v_stride_g + column, mask=kept)
    tl.store(k_cache + at, k.to(k_cache.dtype.element_ty), mask=kept)
    tl.store(v_cache + at, v.to(v_cache.dtype.element_ty), mask=kept)
