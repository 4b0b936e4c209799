"""The drafter's one forward pass over a batch of requests and a paged cache of keys and values.

Enters: `PassBatch`. Leaves: drafts [B, D], tokens of the target's vocabulary, D of the request that wants the
most, -1 from a request's number of drafts on; the rows given are in the cache. For each request the tokens are those of
`peagle.draft.DraftSession.propose`: rows of the mask token leave no trace, because the next rows begin before them. On
a CPU the pass runs at once; on a GPU as a CUDA graph of the batch's padded size (`peagle.drafter.graphs`).

B requests, N rows of the pass, M sampled rows, R rows that are given, H hidden size, A query heads and G key heads of
D, I width of the MLP.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from peagle.drafter.attention import paged_attention
from peagle.drafter.protocol import NO_DRAFT, Int32Array
from peagle.drafter.rows import PassBatch, best_tokens, build_rows, place_hidden
from peagle.model import Drafter

if TYPE_CHECKING:
    from peagle.drafter.graphs import GraphKey

#: Waits for the drafts of a pass: [B, D], -1 where none is wanted; an array of the caller's own.
PendingDrafts = Callable[[], Int32Array]


@dataclasses.dataclass(frozen=True)
class PassLimits:
    """The most that one pass takes.

    max_num_rows: rows of the pass, those of the mask token included. max_blocks: columns of a block table that a
    request uses. max_draft_tokens: K.
    """

    max_num_requests: int
    max_num_rows: int
    max_blocks: int
    num_blocks: int
    block_size: int
    max_draft_tokens: int


def row_addresses(hidden_RH: Tensor) -> npt.NDArray[np.int64]:
    """Where the rows of a payload lie."""
    return hidden_RH.data_ptr() + np.arange(len(hidden_RH), dtype=np.int64) * (hidden_RH.stride(0) * hidden_RH.itemsize)


class ParallelPass:
    """One head's network, its cache of keys and values, and the pass over them. Used by one thread at a time."""

    def __init__(
        self, drafter: Drafter, *, limits: PassLimits, digest: str, graph_keys: Sequence[GraphKey] | None = None
    ) -> None:
        """drafter: a P-EAGLE head with its tables; the pass is on its device and in its type. digest:
        `peagle.heads.head_digest`, which keeps apart the cached prefixes of different heads. graph_keys: batches that
        run as a CUDA graph; without effect on a CPU.
        """
        config = self._config = drafter.config
        self.limits, self.digest, self._drafter = limits, digest, drafter
        self.device, self.dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
        use_onednn(drafter)
        self._target_ids_V = drafter.target_ids.to(device=self.device, dtype=torch.int32)
        with torch.no_grad():
            self._mask_hidden_H = drafter.project_inputs(drafter.mask_hidden.view(1, -1))[0]
        num_blocks, heads = limits.num_blocks + 1, (config.num_key_value_heads, config.head_dim)
        # The last block takes the padding. Zeros, not what the memory held: a NaN under a mask is a NaN in the sum.
        self._cache = torch.zeros(
            config.num_hidden_layers, 2, num_blocks, limits.block_size, *heads, dtype=self.dtype, device=self.device
        )
        self._runner = None
        if self.device.type == "cuda":
            from peagle.drafter.graphs import GraphRunner  # which imports the batch from here

            self._runner = GraphRunner(self.compute, self.limits, graph_keys, self.device)

    @torch.no_grad()
    def launch(self, batch: PassBatch[Any]) -> PendingDrafts:
        """Starts a pass; what the batch points to must stay as it is until the drafts are there. On a GPU a block or an
        address that is wrong is a wild write or read. Passes run in the order of their launch."""
        if self._runner is not None:
            return self._runner.launch(batch)
        values = (getattr(batch, field.name) for field in dataclasses.fields(batch))
        inputs = PassBatch(*(torch.from_numpy(np.ascontiguousarray(value)) for value in values))
        return self.compute(inputs, batch.num_rows, batch.max_drafts).numpy

    @torch.no_grad()
    def warm_up(self) -> int:
        """Compiles kernels and captures CUDA graphs, without which a pass is slow; returns how many graphs there are.
        Only while no request has rows in the cache. On a CPU nothing happens."""
        return 0 if self._runner is None else self._runner.warm_up()

    @torch.no_grad()
    def compute(self, inputs: PassBatch[Tensor], num_rows: int, max_drafts: int) -> Tensor:
        """Drafts [B, max_drafts], int32, -1 where none is wanted; waits for nothing.

        num_rows may be more than the batch has.
        """
        config, drafter = self._config, self._drafter
        assert config.ptd_token_id is not None
        rows = build_rows(
            inputs, block_size=self.limits.block_size, mask_token_id=config.ptd_token_id, max_drafts=max_drafts,
            num_rows=num_rows,
        )  # fmt: skip
        hidden_NH = torch.empty(num_rows, config.hidden_size, dtype=self.dtype, device=self.device)
        place_hidden(inputs.addresses_R, rows.sources_N, self._mask_hidden_H, hidden_NH)

        def attend(layer: int, q_1AND: Tensor, k_1GND: Tensor, v_1GND: Tensor) -> Tensor:
            keys, values = self._cache[layer]
            keys.flatten(0, 1)[rows.slots_N] = k_1GND[0].transpose(0, 1)
            values.flatten(0, 1)[rows.slots_N] = v_1GND[0].transpose(0, 1)
            out_NAD = paged_attention(
                q_1AND[0].transpose(0, 1), keys, values, inputs.block_table_BN, rows.first_row_B1, inputs.start_B,
                rows.context_B, scale=config.head_dim**-0.5,
            )  # fmt: skip
            return out_NAD.transpose(0, 1)[None]

        embeds_1NH = drafter.embed(rows.token_ids_N[None])
        normed_1NH, _ = drafter(embeds_1NH, hidden_NH[None], rows.positions_N[None], attend)
        if not max_drafts:
            return rows.sample_rows_BD.int()
        sampled_M = rows.sample_rows_BD.flatten()
        # Rows that are padded samples read the last row, whose draft is dropped below.
        logits_MV = drafter.logits(normed_1NH[0, sampled_M])
        ids_M = torch.empty_like(sampled_M)
        best_tokens(logits_MV, ids_M)
        drafts_M = torch.where(sampled_M < 0, NO_DRAFT, self._target_ids_V[ids_M])
        return drafts_M.view(rows.sample_rows_BD.shape)


def use_onednn(drafter: Drafter) -> None:
    """Let a float32 drafter on a CPU multiply by oneDNN, as vLLM's target does there. MKL, which torch takes, needs
    several times as long for a few rows on an AMD CPU."""
    if drafter.fc.weight.device.type != "cpu" or drafter.fc.weight.dtype != torch.float32:
        return
    if not torch.backends.mkldnn.is_available():
        return

    def multiply(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return product

    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach())
            module.forward = functools.partial(multiply, packed, module.bias)  # type: ignore[method-assign]
