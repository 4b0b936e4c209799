"""The drafter's one forward pass over a batch of requests and a paged cache of keys and values.

Enters: `PassBatch`. Leaves: draft ids [B, K], -1 from a request's depth on; the rows given are in the cache. For each
request it is `peagle.draft.DraftSession.propose`: rows of the mask token leave no trace, because the next rows begin
before them. On a CPU the pass runs at once; on a GPU as a CUDA graph of the batch's padded size
(`peagle.runtime.graphs`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.config import DrafterConfig
from peagle.kernels.attention_plan import distinct_batches
from peagle.kernels.batch_rows import build_rows
from peagle.kernels.hidden_rows import place_hidden, place_hidden_at
from peagle.model import Drafter
from peagle.runtime.graphs import GraphRunner, GraphSizes
from peagle.runtime.head import check_parallel
from peagle.runtime.layers import PagedCache, PassLayers
from peagle.runtime.pass_batch import Int32Array, PassBatch, PassInputs, PassLimits
from peagle.runtime.pending import KnownDrafts, PendingDrafts

__all__ = ["GraphSizes", "ParallelPass", "PassBatch", "PassLimits", "PendingDrafts", "cache_bytes_per_block"]


class ParallelPass:
    """One head's weights, its cache of keys and values, and the pass over them. Used by one thread at a time."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        max_num_requests: int,
        max_num_rows: int,
        num_blocks: int,
        block_size: int,
        max_depth: int,
        device: torch.device | str,
        dtype: torch.dtype,
        max_context: int | None = None,
        max_payload_rows: int | None = None,
        graph_sizes: GraphSizes | None = None,
    ) -> None:
        """drafter: a P-EAGLE head with its tables, as `load_runtime_head` gives it; where it has the pass's device and
        type already, its matrices become views of the joined ones.

        max_num_rows: of one pass, those of the mask token included. max_context: positions that a request may reach,
        by default what the head's config.json says and K more. max_payload_rows: rows given to one pass, rejected ones
        included; by default max_num_rows and K for each request. graph_sizes: batches that run as a CUDA graph;
        without effect on a CPU.

        Raises HeadError for an EAGLE-3 head, ValueError for a limit below 1.
        """
        self.drafter, config = drafter, drafter.config
        check_parallel(config, "the drafter")
        self.device, self.dtype = torch.device(device), dtype
        context = max_context or config.max_position_embeddings + max_depth
        self.limits = PassLimits(
            max_num_requests=max_num_requests,
            max_num_rows=max_num_rows,
            max_payload_rows=max_payload_rows or max_num_rows + max_num_requests * max_depth,
            max_blocks=min(num_blocks, -(-context // block_size)),
            num_blocks=num_blocks,
            block_size=block_size,
            max_depth=max_depth,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
        )
        num_positions = self.limits.max_blocks * block_size
        self.layers = PassLayers(drafter, num_positions, self.device, dtype)
        shape = (config.num_hidden_layers, 2, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        # Zeros, not whatever the memory held: a NaN under a mask is a NaN in the sum.
        self._cache = torch.zeros(shape, dtype=dtype, device=self.device)
        self._keys, self._values = list(self._cache[:, 0]), list(self._cache[:, 1])

        self._runner = None
        if self.device.type == "cuda":
            batches = self._distinct_batches(config)
            self._runner = GraphRunner(self._compute, self.limits, graph_sizes, self.device, dtype, batches)

    @property
    def max_num_requests(self) -> int:
        return self.limits.max_num_requests

    @property
    def max_num_rows(self) -> int:
        """Of one pass, those of the mask token included."""
        return self.limits.max_num_rows

    @property
    def max_depth(self) -> int:
        """K, columns of the drafts."""
        return self.limits.max_depth

    @property
    def num_blocks(self) -> int:
        return self.limits.num_blocks

    @property
    def block_size(self) -> int:
        """Positions of a cache block."""
        return self.limits.block_size

    @property
    def cache_bytes_per_block(self) -> int:
        """Bytes of one block: keys and values of `block_size` positions in every layer."""
        return cache_bytes_per_block(self.drafter.config, self.limits.block_size, self.dtype)

    def run(self, batch: PassBatch) -> Int32Array:
        """Drafts [B, K] in host memory, -1 where none is wanted; waits for them. Raises as `launch`."""
        return self.launch(batch).wait()

    @torch.no_grad()
    def launch(self, batch: PassBatch, *, is_checked: bool = False) -> PendingDrafts:
        """Starts a pass; what `batch` points to must stay as it is until the drafts are there.

        Passes run one after another, so the next may be launched before the drafts of this one are waited for.

        is_checked: for a batch made of steps that were checked and of blocks that a pool gave out.

        Raises ValueError, before anything runs, for a batch that `PassBatch.check` refuses.
        """
        if not is_checked:
            batch.check(self.limits)
        if self._runner is not None:
            return self._runner.launch(batch)
        inputs = PassInputs.on_cpu(batch, self.limits.hidden_size, self.dtype)
        drafts_BK = self._compute(inputs, batch.num_rows(), int(batch.drafts_B().max()))
        return KnownDrafts(drafts_BK.numpy(), self.limits.max_depth)

    def warm_up(self) -> int:
        """Captures the CUDA graphs of full batches, so that serving does not begin with them; returns how many there
        are. Only while no request has rows in the cache of a batch that runs. On a CPU nothing happens."""
        return 0 if self._runner is None else self._runner.warm_up()

    def fill_cache(self, generator: torch.Generator) -> None:
        """Normal numbers in place of every key and value, for measurements: zeros run faster than what is real."""
        self._cache.normal_(generator=generator)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _distinct_batches(self, config: DrafterConfig) -> list[tuple[int, int]]:
        return distinct_batches(
            self.limits.max_num_rows,
            self.limits.max_num_requests,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            element_bytes=self.dtype.itemsize,
            max_context=self.limits.max_blocks * self.limits.block_size,
            num_sms=torch.cuda.get_device_properties(self.device).multi_processor_count,
        )

    def _compute(self, inputs: PassInputs, num_rows: int, depth: int) -> Tensor:
        """Drafts [B, depth] on the device; num_rows may be more than the batch has. Waits for nothing."""
        rows = build_rows(
            inputs.start_B, inputs.num_valid_B, inputs.row_offset_B, inputs.depth_B, inputs.next_tokens_R,
            inputs.block_table_BN, block_size=self.limits.block_size, mask_token_id=self.layers.mask_token_id,
            max_depth=depth, num_rows=num_rows,
        )  # fmt: skip
        hidden_NH = torch.empty(num_rows, self.limits.hidden_size, dtype=self.dtype, device=self.device)
        if inputs.addresses_R is not None:
            place_hidden_at(inputs.addresses_R, rows.sources_N, self.layers.mask_hidden_H, hidden_NH)
        else:
            assert inputs.payload_RH is not None
            place_hidden(inputs.payload_RH, rows.sources_N, self.layers.mask_hidden_H, hidden_NH)
        cache = PagedCache(
            self._keys, self._values, self.limits.block_size, inputs.block_table_BN, inputs.start_B,
            inputs.cache_start_B,
        )  # fmt: skip
        return self.layers(rows, hidden_NH, cache)


def cache_bytes_per_block(config: DrafterConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one cache block of `block_size` positions takes in all layers of a drafter."""
    return 2 * config.num_hidden_layers * block_size * config.num_key_value_heads * config.head_dim * dtype.itemsize
