"""One long sequence trained in segments: the gradient of the whole pass, the memory of a part (paper section 3.2).

Rows of offset 0 are seen by every later row, so a cut between anchors leaves one kind of dependence across it: rows see
the keys and values of the offset-0 rows before their segment. A sweep without gradients keeps these. Then the segments
run from the last to the first, each with its own rows alone and with the kept keys and values of earlier ones as
inputs. Their gradients add up until the segment that owns the rows passes them on through its own keys and values.
Every row is computed with gradients once, and no segment holds more than about T / S.

The paper's Algorithm 1 computes the earlier rows again in every segment instead, with gradients, which takes more time
and memory (docs/performance.md, training memory).

A chain is never split: its rows of mask tokens see each other, and one segment holds them all.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from peagle.model import Drafter
from peagle.train.cod import CodRows, attend_under, next_tokens, row_inputs
from peagle.train.masks import AttentionMask

#: loss_of(normed_RH, index_R) -> scalar: the share of the loss that R rows have, numbered within the pass's T rows.
LossOf = Callable[[Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class PackedSequence:
    """document_1N: -1 on padding; aux_1NX: the target's auxiliary hidden states; position_1T: within the document."""

    tokens_1N: Tensor
    document_1N: Tensor
    aux_1NX: Tensor
    rows: CodRows
    position_1T: Tensor


@dataclasses.dataclass(frozen=True)
class Segment:
    """Numbers of its rows within the T: offset 0 from start to stop, mask tokens from chain_start to chain_stop."""

    start: int
    stop: int
    chain_start: int
    chain_stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start + self.chain_stop - self.chain_start

    def index(self, device: torch.device) -> Tensor:
        """Numbers of its rows, [R]."""
        plain = torch.arange(self.start, self.stop, device=device)
        return torch.cat([plain, torch.arange(self.chain_start, self.chain_stop, device=device)])


def cut_by_rows(rows: CodRows, num_segments: int) -> list[Segment]:
    """Segments of about T / S rows each, at most T / S + K; chains go with their anchors. ValueError for S > N."""
    num_tokens, num_rows = rows.num_tokens, rows.anchor_BT.shape[1]
    if num_segments > num_tokens:
        raise ValueError(f"num_segments = {num_segments} must be at most {num_tokens}, the tokens of a sequence")
    anchor_N = torch.arange(num_tokens + 1, device=rows.anchor_BT.device)
    chain_N = torch.searchsorted(rows.anchor_BT[0, num_tokens:].contiguous(), anchor_N)  # chain rows before an anchor
    wanted = [s * num_rows // num_segments for s in range(num_segments + 1)]
    bound_S = torch.searchsorted(anchor_N + chain_N, anchor_N.new_tensor(wanted))
    edges = itertools.pairwise(zip(bound_S.tolist(), (num_tokens + chain_N[bound_S]).tolist(), strict=True))
    segments = [Segment(start, stop, chain_start, chain_stop) for (start, chain_start), (stop, chain_stop) in edges]
    return [segment for segment in segments if segment.num_rows]


def segment_rows(
    drafter: Drafter,
    embeds_1TH: Tensor,
    hidden_1TH: Tensor,
    position_1T: Tensor,
    mask: Tensor | BlockMask,
    earlier: Tensor,
) -> tuple[Tensor, Tensor]:
    """Normed rows [1, T, H], and their own keys and values [layers, 2, 1, G, T, D].

    earlier: keys (rotated) and values of N rows of offset 0 that come before these as keys.
    """
    own = []

    def attend(layer_index: int, q_BATD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        own.append(torch.stack([k_BGTD, v_BGTD]))
        k_BGND, v_BGND = pairs[layer_index]
        return attend_masked(layer_index, q_BATD, torch.cat([k_BGND, k_BGTD], 2), torch.cat([v_BGND, v_BGTD], 2))

    attend_masked = attend_under(mask)
    pairs = [layer.unbind() for layer in earlier.unbind()]
    normed_1TH, _ = drafter(embeds_1TH, hidden_1TH, position_1T, attend)
    return normed_1TH, torch.stack(own)


class Partition:
    """Passes over one sequence in S segments; holds the compiled functions.

    compiled: with masks for FlexAttention, else with dense ones. autocast: the drafter runs in bfloat16 on a GPU,
    losses and backward passes don't. tile: rows are padded to a multiple of it.
    """

    def __init__(self, num_segments: int, *, compiled: bool = False, autocast: bool = True, tile: int = 128) -> None:
        self.num_segments, self.tile, self.compiled, self.autocast = num_segments, tile, compiled, autocast
        self.inputs, self.rows = row_inputs, segment_rows
        if compiled:
            self.inputs = torch.compile(row_inputs, dynamic=True)
            self.rows = torch.compile(segment_rows, fullgraph=True)

    def backward(self, drafter: Drafter, sequence: PackedSequence, loss_of: LossOf) -> None:
        """Adds the gradients of the sum of all segments' losses to the drafter's parameters.

        The loss is asked for once a segment, of its own rows. Raises ValueError for S > N.
        """
        run = SequencePass(self, drafter, sequence)
        segments = cut_by_rows(sequence.rows, self.num_segments)
        kept = run.sweep(segments[-1].start)
        # Segments add to it one after another, which bfloat16 would lose.
        gradient = torch.zeros_like(kept, dtype=torch.promote_types(kept.dtype, torch.float32))
        for segment in reversed(segments):
            earlier = kept.detach().requires_grad_()
            normed_RH, own = run(segment, earlier)
            loss = loss_of(normed_RH, segment.index(run.device))
            own = own[..., : segment.stop - segment.start, :]
            del normed_RH
            torch.autograd.backward([loss, own], [None, gradient[..., segment.start : segment.stop, :].to(own.dtype)])
            del loss, own
            if segment.start:
                assert earlier.grad is not None
                gradient[..., : segment.start, :] += earlier.grad[..., : segment.start, :]


class SequencePass:
    """One sequence on its way through a partition."""

    def __init__(self, partition: Partition, drafter: Drafter, sequence: PackedSequence) -> None:
        self.partition, self.drafter, self.sequence = partition, drafter, sequence
        self.device = sequence.tokens_1N.device
        self.next_1N = next_tokens(sequence.tokens_1N)
        self.attention_mask = AttentionMask.from_rows(sequence.rows, sequence.document_1N)
        #: rows of every call: the greatest segment that `cut_by_rows` can make
        num_rows = sequence.rows.anchor_BT.shape[1]
        most, tile = -(-num_rows // partition.num_segments) + drafter.config.num_depths, partition.tile
        self.max_rows = -(-most // tile) * tile

    def __call__(self, segment: Segment, earlier: Tensor) -> tuple[Tensor, Tensor]:
        """Normed rows [R, H] of a segment; keys and values [layers, 2, 1, G, T, D] of these and of the blank rows
        behind them.

        earlier: keys and values of the N rows of offset 0, of which those before the segment are seen.
        """
        sequence, num_queries = self.sequence, self.max_rows
        index_T = torch.nn.functional.pad(segment.index(self.device), (0, num_queries - segment.num_rows), value=-1)
        before_N = torch.arange(earlier.shape[-2], device=self.device)
        key_U = torch.cat([before_N.where(before_N < segment.start, -1), index_T])
        attention_mask = self.attention_mask.select(key_U, num_queries)
        with self._autocast():
            mask = attention_mask.block(self.partition.tile) if self.partition.compiled else attention_mask.dense()
            rows = slice(segment.start, segment.stop)
            next_1N, aux_1NX = self.next_1N[:, rows], sequence.aux_1NX[:, rows]
            embeds_1TH, hidden_1TH = self.partition.inputs(
                self.drafter, next_1N, aux_1NX, num_queries - next_1N.shape[1]
            )
            position_1T = sequence.position_1T[:, index_T.clamp_min(0)]
            normed_1TH, own = self.partition.rows(self.drafter, embeds_1TH, hidden_1TH, position_1T, mask, earlier)
        return normed_1TH[0, : segment.num_rows], own

    @torch.no_grad()
    def sweep(self, stop: int) -> Tensor:
        """Keys and values of the rows of offset 0 before `stop`, [layers, 2, 1, G, N, D]; zeros behind."""
        config = self.drafter.config
        shape = (config.num_hidden_layers, 2, 1, config.num_key_value_heads, self.sequence.rows.num_tokens)
        with self._autocast():
            enabled = torch.is_autocast_enabled(self.device.type)
            dtype = torch.get_autocast_dtype(self.device.type) if enabled else self.drafter.fc.weight.dtype
        kept = torch.zeros(*shape, config.head_dim, dtype=dtype, device=self.device)
        for start in range(0, stop, self.max_rows):
            end = min(start + self.max_rows, stop)
            _, own = self(Segment(start, end, 0, 0), kept)
            kept[..., start:end, :] = own[..., : end - start, :]
        return kept

    def _autocast(self) -> torch.autocast:
        # Its cache of weights would hand those cast without gradients (the sweep) to passes that need them.
        enabled = self.partition.autocast and self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)
