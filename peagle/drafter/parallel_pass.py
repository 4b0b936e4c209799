"""The drafter's one forward pass over a batch of requests and a paged cache of keys and values.

Enters: `PassBatch`. Leaves: drafts [B, D] as they travel (`peagle.drafter.rows`), D of the request that wants the
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
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peagle.config import DrafterConfig, HeadError
from peagle.drafter.attention import paged_attention, write_kv
from peagle.drafter.projection import norm
from peagle.drafter.protocol import NO_DRAFT, Int32Array
from peagle.drafter.rows import MAX_VOCABULARY, best_tokens, build_rows, pack, place_hidden
from peagle.model import Attention, Drafter, Layer, rotary_tables, rotate

if TYPE_CHECKING:
    from peagle.drafter.graphs import GraphKey

#: Waits for the drafts of a pass, as they travel: [B, D], -1 where none is wanted; an array of the caller's own.
PendingDrafts = Callable[[], Int32Array]
Values = TypeVar("Values", npt.NDArray[Any], Tensor)


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


@dataclasses.dataclass(frozen=True)
class PassBatch(Generic[Values]):
    """B requests of one pass: integers as arrays of the host, or as tensors of the pass's device. Tensors may hold more
    rows than the batch has, and requests without rows may pad it.

    start_B: position of a request's first row, counted from its first row in the cache, which is overwritten from there
        on.
    num_valid_B: n, rows given: positions start .. start + n - 1. With 0, the request gets no drafts.
    row_offset_B: where they begin among the batch's R rows.
    num_drafts_B: drafts wanted; 0: the rows only enter the cache.
    next_tokens_R: int64, the token after each row.
    addresses_R: int64, where each row's projected hidden state lies (`place_hidden`): on a GPU in its own memory, or in
        pinned memory of the host, which must stay as it is until the drafts are there.
    block_table_BN: cache block of the positions [j * block_size, (j + 1) * block_size) in column j, for all before
        start + n + num_drafts - 1: rows of the mask token take room as well.
    """

    start_B: Values
    num_valid_B: Values
    row_offset_B: Values
    num_drafts_B: Values
    next_tokens_R: Values
    addresses_R: Values
    block_table_BN: Values

    @property
    def num_requests(self) -> int:
        return len(self.start_B)

    def first_requests(self, number: int) -> PassBatch[Values]:
        """These requests, with the same rows."""
        per_request = ("start_B", "num_valid_B", "row_offset_B", "num_drafts_B", "block_table_BN")
        return dataclasses.replace(self, **{name: getattr(self, name)[:number] for name in per_request})

    @functools.cached_property
    def drafts_B(self) -> Int32Array:
        """Drafts that each request gets: `num_drafts_B`, but 0 without rows. This and the next two: on the host."""
        return np.where(np.asarray(self.num_valid_B) > 0, self.num_drafts_B, 0)

    @functools.cached_property
    def num_rows(self) -> int:
        """Rows of the pass: n of each request, and one of the mask token for each draft after the first."""
        return int(np.sum(np.asarray(self.num_valid_B) + np.maximum(self.drafts_B - 1, 0)))

    @functools.cached_property
    def max_drafts(self) -> int:
        """Drafts of the request that gets the most."""
        return int(self.drafts_B.max())


def row_addresses(hidden_RH: Tensor) -> npt.NDArray[np.int64]:
    """Where the rows of a payload lie."""
    return hidden_RH.data_ptr() + np.arange(len(hidden_RH), dtype=np.int64) * (hidden_RH.stride(0) * hidden_RH.itemsize)


# The drafter's layers, with matrices joined where one product serves


#: x [rows, in] -> x W^T + b [rows, out].
Linear = Callable[[Tensor], Tensor]


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The product with these weights, [out, in] and [out].

    In float32 on a CPU by oneDNN, from a copy in its own layout: MKL, which torch takes, needs several times as long
    for a few rows on an AMD CPU (benchmarks/parallel_pass.py of commit da11d84).
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return lambda x: F.linear(x, weight, bias)


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """One layer; `qkv` and `gate_up` are products with its own matrices one below the other."""

    input_norm_H: Tensor
    qkv: Linear
    qk_norms: tuple[Tensor, Tensor] | None
    out: Linear
    mlp_norm_H: Tensor
    gate_up: Linear
    down: Linear

    @classmethod
    def from_layer(cls, layer: Layer, placed: Callable[[Tensor], Tensor]) -> LayerWeights:
        """placed: moves a tensor to the pass's device and type."""

        def joined(*parts: nn.Linear) -> Linear:
            biases = [placed(part.bias) for part in parts if part.bias is not None]
            return linear(torch.cat([placed(part.weight) for part in parts]), torch.cat(biases) if biases else None)

        attention: Attention = layer.self_attn
        return cls(
            input_norm_H=placed(layer.input_layernorm.weight),
            qkv=joined(attention.q_proj, attention.k_proj, attention.v_proj),
            qk_norms=(placed(attention.q_norm.weight), placed(attention.k_norm.weight)) if attention.qk_norm else None,
            out=joined(attention.o_proj),
            mlp_norm_H=placed(layer.post_attention_layernorm.weight),
            gate_up=joined(layer.mlp.gate_proj, layer.mlp.up_proj),
            down=joined(layer.mlp.down_proj),
        )


class ParallelPass:
    """One head's weights, its cache of keys and values, and the pass over them. Used by one thread at a time."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        limits: PassLimits,
        digest: str,
        device: torch.device | str,
        dtype: torch.dtype,
        graph_keys: Sequence[GraphKey] | None = None,
    ) -> None:
        """drafter: a P-EAGLE head with its tables, as `load_runtime_head` gives it. digest: `peagle.heads.head_digest`,
        which keeps apart the cached prefixes of different heads. graph_keys: batches that run as a CUDA graph; without
        effect on a CPU.

        Raises HeadError for an EAGLE-3 head, and for a target of more than 2**20 tokens.
        """
        config = self._config = drafter.config
        check_parallel(config, "the drafter")
        assert drafter.embed_tokens is not None
        assert drafter.lm_head is not None
        assert config.ptd_token_id is not None
        self.limits, self.digest, self.device, self.dtype = limits, digest, torch.device(device), dtype
        num_blocks, block_size = limits.num_blocks, limits.block_size
        num_positions = limits.max_blocks * block_size

        def placed(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device=self.device, dtype=dtype)

        layers = [layer for layer in drafter.layers if isinstance(layer, Layer)]
        self._mask_token_id = config.ptd_token_id
        self._layers = [LayerWeights.from_layer(layer, placed) for layer in layers]
        self._hidden_norm_H, self._norm_H = placed(layers[0].hidden_norm.weight), placed(drafter.norm.weight)
        self._embed_VH, self._lm_head = placed(drafter.embed_tokens.weight), linear(placed(drafter.lm_head.weight))
        # An embedding of the head's own has the mask token's in its row.
        self._mask_embedding_H = placed(drafter.mask_token())
        self._target_ids_V = drafter.target_ids.to(device=self.device, dtype=torch.int32)
        positions_1P = torch.arange(num_positions, device=self.device)[None]
        tables = rotary_tables(positions_1P, config.head_dim, config.rope_theta, config.rope_scaling)
        self._cos_P1D, self._sin_P1D = (table[0, 0, :, None] for table in tables)
        with torch.no_grad():
            self._mask_hidden_H = placed(drafter.reduce(drafter.mask_hidden.view(1, -1))[0])
        shape = (config.num_hidden_layers, 2, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        # Zeros, not whatever the memory held: a NaN under a mask is a NaN in the sum.
        self._cache_tensor = torch.zeros(shape, dtype=dtype, device=self.device)
        self._cache = [(layer[0], layer[1]) for layer in self._cache_tensor]
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

    def warm_up(self) -> int:
        """Compiles kernels and captures CUDA graphs, without which a pass is slow; returns how many graphs there are.
        Only while no request has rows in the cache. On a CPU nothing happens."""
        return 0 if self._runner is None else self._runner.warm_up()

    @torch.no_grad()
    def compute(self, inputs: PassBatch[Tensor], num_rows: int, max_drafts: int) -> Tensor:
        """Drafts [B, max_drafts] as they travel, -1 where none is wanted; waits for nothing.

        num_rows may be more than the batch has.
        """
        config, eps = self._config, self._config.rms_norm_eps
        rows = build_rows(
            inputs.start_B, inputs.num_valid_B, inputs.row_offset_B, inputs.num_drafts_B, inputs.next_tokens_R,
            inputs.block_table_BN, block_size=self.limits.block_size, mask_token_id=self._mask_token_id,
            max_drafts=max_drafts, num_rows=num_rows,
        )  # fmt: skip
        hidden_NH = torch.empty(num_rows, config.hidden_size, dtype=self.dtype, device=self.device)
        place_hidden(inputs.addresses_R, rows.sources_N, self._mask_hidden_H, hidden_NH)
        sampled_M = rows.sample_rows_BD.flatten()
        embeds_NH = F.embedding(rows.token_ids_N, self._embed_VH)
        embeds_NH = torch.where((rows.token_ids_N == self._mask_token_id)[:, None], self._mask_embedding_H, embeds_NH)
        normed_NH = norm(hidden_NH, self._hidden_norm_H, eps)
        x = torch.cat([norm(embeds_NH, self._layers[0].input_norm_H, eps), normed_NH], dim=-1)
        stream_NH = normed_NH if config.norm_before_residual else hidden_NH
        cos_N1D, sin_N1D = self._cos_P1D[rows.positions_N], self._sin_P1D[rows.positions_N]
        sizes = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        for index, (layer, (keys, values)) in enumerate(zip(self._layers, self._cache, strict=True)):
            is_last = index == len(self._layers) - 1
            q_NAD, k_NGD, v_NGD = layer.qkv(x).unflatten(1, (-1, config.head_dim)).split(sizes, dim=1)
            if layer.qk_norms is not None:
                q_NAD, k_NGD = (norm(x, weight, eps) for x, weight in zip((q_NAD, k_NGD), layer.qk_norms, strict=True))
            q_NAD, k_NGD = rotate(q_NAD, cos_N1D, sin_N1D), rotate(k_NGD, cos_N1D, sin_N1D)
            write_kv(k_NGD, v_NGD, keys, values, rows.slots_N)
            if is_last and not sampled_M.numel():
                return rows.sample_rows_BD.to(torch.int32)
            out_NX = paged_attention(
                q_NAD, keys, values, inputs.block_table_BN, rows.first_row_B1, inputs.start_B, rows.context_B,
                scale=config.head_dim**-0.5, sliding_window=config.sliding_window,
            ).flatten(1)  # fmt: skip
            if is_last:
                # Rows that are padded samples read the last row, whose draft is dropped below.
                out_NX, stream_NH = out_NX[sampled_M], stream_NH[sampled_M]
            stream_NH = stream_NH + layer.out(out_NX)
            gate_NI, up_NI = layer.gate_up(norm(stream_NH, layer.mlp_norm_H, eps)).chunk(2, dim=-1)
            stream_NH = stream_NH + layer.down(F.silu(gate_NI) * up_NI)
            x = norm(stream_NH, self._norm_H if is_last else self._layers[index + 1].input_norm_H, eps)
        logits_MV = self._lm_head(x)
        ids_M, chance_M = torch.empty_like(sampled_M), torch.empty_like(sampled_M, dtype=torch.float32)
        best_tokens(logits_MV, ids_M, chance_M)
        drafts_M = torch.where(sampled_M < 0, NO_DRAFT, pack(self._target_ids_V[ids_M], chance_M))
        return drafts_M.view(rows.sample_rows_BD.shape)


def check_parallel(config: DrafterConfig, source: str) -> None:
    """Raise HeadError for a head that a remote drafter does not run."""
    if config.ptd_token_id is None:
        raise HeadError(
            f"{source} has no mask token (ptd_token_id), so it is an EAGLE-3 head: a remote drafter runs P-EAGLE heads "
            "only, which propose all their tokens in one pass; run this head in the target's own engine"
        )
    if config.vocab_size > MAX_VOCABULARY:
        raise HeadError(
            f"{source} drafts for a target of {config.vocab_size} tokens, a remote drafter's drafts name at most "
            f"{MAX_VOCABULARY}; run this head in the target's own engine"
        )


def cache_bytes_per_block(config: DrafterConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one cache block of `block_size` positions takes in all layers of a drafter: keys and values."""
    return 2 * config.num_hidden_layers * block_size * config.num_key_value_heads * config.head_dim * dtype.itemsize
