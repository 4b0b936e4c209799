"""The frozen target in training and evaluation: tapped hidden states and output logits, by Hugging Face transformers.

Any decoder-only model of full and sliding-window attention will do; what cannot be packed or scored exactly is refused
when it is loaded. Serving never uses this module: there vLLM runs the target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from peagle.config import read_target_config

# ====================================================================================================
# The target's next-token distributions at the tokens of a batch: labels of the losses.
#
# Rows of the drafter share labels: the label of a row is an index into the N tokens of a batch. `TargetLogits` holds the
# logits of all N tokens where they are few enough, else it makes them from the target's last hidden states as they are
# asked for, and `walk` visits rows in the order of their labels, so that each is made once. Callers do not see which.
#
#     N = 16,384 tokens in bf16:  V = 49,152 takes 1.6 GB and is held, V = 201,088 takes 6.6 GB and is not
#
# A reduced draft vocabulary takes V_draft of the target's V tokens: distributions are renormalised over them, while the
# most likely token stays that of the whole vocabulary.

MAX_WHOLE_BYTES = 4 << 30  # logits of a batch that are held whole

#: statistics(logits_UV) -> (log-sum-exp_U, argmax_U), the first in float32 or wider.
Statistics = Callable[[Tensor], tuple[Tensor, Tensor]]


def wide_softmax(logits_CV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits, exponentials, sums of these [C, 1], log-sum-exp [C, 1]), in float32 or wider."""
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    top_C1 = wide_CV.amax(-1, keepdim=True)
    exponent_CV = (wide_CV - top_C1).exp()
    total_C1 = exponent_CV.sum(-1, keepdim=True)
    return wide_CV, exponent_CV, total_C1, top_C1 + total_C1.log()


def statistics(logits_UV: Tensor) -> tuple[Tensor, Tensor]:
    *_, logsumexp_U1 = wide_softmax(logits_UV)
    return logsumexp_U1.squeeze(-1), logits_UV.argmax(-1)


@dataclasses.dataclass(frozen=True)
class Distributions:
    """The target at U tokens.

    logits_UV, logsumexp_U: over the draft vocabulary. argmax_U: most likely token of the whole vocabulary, an id of the
    target. draft_U: the same as an index into the draft vocabulary, -1 where that lacks it.
    """

    logits_UV: Tensor
    logsumexp_U: Tensor
    argmax_U: Tensor
    draft_U: Tensor


class TargetLogits:
    """What the target says at the N tokens of a batch."""

    def __init__(
        self,
        hidden_NS: Tensor,
        lm_head_VS: Tensor,
        target_ids_V: Tensor | None = None,
        *,
        chunk: int = 4096,
        max_whole_bytes: int = MAX_WHOLE_BYTES,
        statistics: Statistics = statistics,
    ) -> None:
        """hidden_NS: the target's last hidden states (after its norm); lm_head_VS: its output matrix.

        target_ids_V: the target's ids of the draft vocabulary [V_draft]; None, or as many as the target has tokens: all
        in order. chunk: tokens whose logits over the whole vocabulary exist at once while they are made whole.
        """
        num_tokens, vocabulary = hidden_NS.shape[0], lm_head_VS.shape[0]
        reduced = target_ids_V is not None and len(target_ids_V) < vocabulary
        self.target_ids_V = target_ids_V if reduced else None
        self._index_V = _inverse(target_ids_V, vocabulary) if target_ids_V is not None and reduced else None
        self._hidden_NS, self._lm_head_VS, self._statistics = hidden_NS, lm_head_VS, statistics
        self.vocabulary_size = len(target_ids_V) if target_ids_V is not None else vocabulary
        self._whole: Distributions | None = None
        if num_tokens * self.vocabulary_size * hidden_NS.element_size() <= max_whole_bytes:
            self._whole = self._made_whole(chunk)

    @torch.no_grad()
    def at(self, token_U: Tensor | None) -> Distributions:
        """Distributions at tokens as `walk` names them; None: at all N."""
        if token_U is None:
            assert self._whole is not None, "only `walk` of held logits names no tokens"
            return self._whole
        logits_UV = self._hidden_NS[token_U] @ self._lm_head_VS.T
        if self.target_ids_V is None:
            return self._distributions(logits_UV, logits_UV)
        return self._distributions(logits_UV, logits_UV.index_select(1, self.target_ids_V))

    def walk(self, label_R: Tensor, chunk: int) -> Iterator[tuple[slice | Tensor, Tensor | None, Tensor]]:
        """Visits all R rows once, `chunk` or fewer at a time: (which rows, tokens for `at`, index_C into what it says).

        label_R: int64, 0..N-1. Chunks differ by one row at most. Where logits are not held, the host waits for the
        device twice, before the first chunk.
        """
        spans = _spans(len(label_R), chunk)
        if self._whole is not None:
            for start, end in spans:
                yield slice(start, end), None, label_R[start:end]
            return
        sorted_R, order_R = label_R.sort(stable=True)
        token_U, index_R = sorted_R.unique_consecutive(return_inverse=True)
        firsts = index_R[[start for start, _ in spans]].tolist()
        lasts = index_R[[end - 1 for _, end in spans]].tolist()
        for (start, end), first, last in zip(spans, firsts, lasts, strict=True):
            yield order_R[start:end], token_U[first : last + 1], index_R[start:end] - first

    def ids(self, draft_R: Tensor) -> Tensor:
        """Index into the draft vocabulary -> id of the target."""
        return draft_R if self.target_ids_V is None else self.target_ids_V[draft_R]

    def _distributions(self, whole_UV: Tensor, draft_UV: Tensor) -> Distributions:
        logsumexp_U, argmax_U = self._statistics(draft_UV)
        if self._index_V is None:
            return Distributions(draft_UV, logsumexp_U, argmax_U, argmax_U)
        argmax_U = whole_UV.argmax(-1)
        return Distributions(draft_UV, logsumexp_U, argmax_U, self._index_V[argmax_U])

    @torch.no_grad()
    def _made_whole(self, chunk: int) -> Distributions:
        num_tokens = self._hidden_NS.shape[0]
        logits_NV = self._hidden_NS.new_empty(num_tokens, self.vocabulary_size)
        parts = []
        for start, end in _spans(num_tokens, chunk):
            hidden_US, out_UV = self._hidden_NS[start:end], logits_NV[start:end]
            if self.target_ids_V is None:
                whole_UV = torch.mm(hidden_US, self._lm_head_VS.T, out=out_UV)
            else:
                whole_UV = hidden_US @ self._lm_head_VS.T
                torch.index_select(whole_UV, 1, self.target_ids_V, out=out_UV)
            parts.append(self._distributions(whole_UV, out_UV))
        sums, tops, drafts = ([getattr(p, name) for p in parts] for name in ("logsumexp_U", "argmax_U", "draft_U"))
        return Distributions(logits_NV, torch.cat(sums), torch.cat(tops), torch.cat(drafts))


def _inverse(target_ids_V: Tensor, vocabulary: int) -> Tensor:
    """Id of the target [V] -> index into the draft vocabulary, -1 where that lacks it."""
    index_V = target_ids_V.new_full((vocabulary,), -1)
    index_V[target_ids_V] = torch.arange(len(target_ids_V), device=target_ids_V.device)
    return index_V


def _spans(num_rows: int, chunk: int) -> list[tuple[int, int]]:
    """0..num_rows in the fewest spans of at most `chunk`. They are even: a stray single row would recompile kernels."""
    num_spans = -(-num_rows // chunk)
    return [(i * num_rows // num_spans, (i + 1) * num_rows // num_spans) for i in range(num_spans)]


# ====================================================================================================
# The frozen target in training and evaluation: tapped hidden states and output logits, by Hugging Face transformers.
#
# Any decoder-only model of full and sliding-window attention will do; what cannot be packed or scored exactly is refused
# when it is loaded. Serving never uses this module: there vLLM runs the target.

_FULL, _SLIDING = "full_attention", "sliding_attention"


class Target:
    """A causal language model whose layers' inputs can be tapped. All of it is frozen.

    config: `config.json` of its text model.

    Raises ValueError for a target whose tables have another shape than its config says, whose logits are more than its
    output matrix applied to its last hidden state, whose layers are neither full nor sliding-window attention, or in
    which a packed document changes with its neighbour.
    """

    def __init__(
        self, target_dir: str | Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32, compiled: bool = False
    ) -> None:
        self.config: dict[str, Any] = read_target_config(target_dir)
        model: Any = _load(target_dir, dtype)
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = torch.device(device)
        self._eager_body = model.get_decoder()
        text: Any = model.config.get_text_config()
        self._window: int | None = getattr(text, "sliding_window", None)
        #: Kinds of layers where the model takes one mask a kind; none where it takes one mask.
        self._layer_types = sorted(set(getattr(text, "layer_types", None) or []))
        self._check(str(target_dir))
        self._body = torch.compile(self._eager_body) if compiled else self._eager_body

    @property
    def embed_VS(self) -> Tensor:
        """As stored: a scale that the target puts on its embeddings is not in it, nor in a drafter's (vLLM's way)."""
        return self.model.get_input_embeddings().weight

    @property
    def lm_head_VS(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def states(
        self,
        tokens_BN: Tensor,
        document_BN: Tensor,
        position_BN: Tensor,
        aux_layer_ids: tuple[int, ...],
        *,
        eager: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """One pass over packed documents; no token sees another document.

        position_BN: position within the document. eager: not compiled, for shapes that do not come again. Returns
        (aux [B, N, C * S]: residual stream entering each of `aux_layer_ids`, concatenated in that order; last
        [B, N, S]: what `lm_head_VS` turns into logits).

        Raises ValueError for a layer that the target does not have.
        """
        num_layers = self.config["num_hidden_layers"]
        if max(aux_layer_ids) >= num_layers or min(aux_layer_ids) < 0:
            raise ValueError(
                f"aux_layer_ids = {aux_layer_ids}: must be in 0..{num_layers - 1}, inputs of the target's layers"
            )
        return self._states(
            self._eager_body if eager else self._body, tokens_BN, document_BN, position_BN, aux_layer_ids
        )

    def _states(
        self, body: Any, tokens_BN: Tensor, document_BN: Tensor, position_BN: Tensor, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        out = body(
            input_ids=tokens_BN,
            position_ids=position_BN,
            attention_mask=self._masks(document_BN),
            output_hidden_states=True,
            use_cache=False,
        )
        return torch.cat([out.hidden_states[layer] for layer in layers], dim=-1), out.last_hidden_state

    def _masks(self, document_BN: Tensor) -> Tensor | dict[str, Tensor]:
        """The mask [B, 1, N, N] that the model takes, or one for each kind of its layers."""
        num_tokens = document_BN.shape[1]
        index_N = torch.arange(num_tokens, device=document_BN.device)
        back_NN = index_N[:, None] - index_N
        same_BNN = document_BN[:, :, None] == document_BN[:, None, :]
        full = self._as_taken((same_BNN & (back_NN >= 0))[:, None])
        if self._window is None:
            return dict.fromkeys(self._layer_types, full) if self._layer_types else full
        sliding = self._as_taken((same_BNN & (back_NN >= 0) & (back_NN < self._window))[:, None])
        masks = {_FULL: full, _SLIDING: sliding}
        return {kind: masks[kind] for kind in self._layer_types} if self._layer_types else sliding

    def _as_taken(self, seen_B1NN: Tensor) -> Tensor:
        if self.model.config._attn_implementation == "sdpa":
            return seen_B1NN
        zero = torch.zeros((), dtype=self.model.dtype, device=seen_B1NN.device)
        return torch.where(seen_B1NN, zero, torch.finfo(self.model.dtype).min)

    @torch.no_grad()
    def _check(self, source: str) -> None:
        if unknown := set(self._layer_types) - {_FULL, _SLIDING}:
            raise ValueError(f"target {source}: layers of {sorted(unknown)} cannot keep packed documents apart")
        if _SLIDING in self._layer_types and self._window is None:
            raise ValueError(f"target {source}: layers of {_SLIDING} without a sliding_window")
        shape = (self.config["vocab_size"], self.config["hidden_size"])
        for name, table in (("input embeddings", self.embed_VS), ("output matrix", self.lm_head_VS)):
            if tuple(table.shape) != shape:
                raise ValueError(f"target {source}: its {name} have shape {list(table.shape)}, not {list(shape)}")
        # Two documents, of 5 and of 7 tokens, and the same with another first document.
        tokens_BN = (torch.arange(24, device=self.device).view(2, 12) * 7919 + 11) % shape[0]
        tokens_BN[1, 5:] = tokens_BN[0, 5:]
        lengths = torch.tensor([5, 7], device=self.device)
        document_BN = torch.arange(2, device=self.device).repeat_interleave(lengths).expand(2, -1)
        position_BN = torch.cat([torch.arange(5), torch.arange(7)]).to(self.device).expand(2, -1)
        _, last_BNS = self._states(self._eager_body, tokens_BN, document_BN, position_BN, (0,))
        if not torch.allclose(last_BNS[0, 5:], last_BNS[1, 5:], rtol=1e-3, atol=1e-3 * float(last_BNS.abs().max())):
            raise ValueError(f"target {source}: a packed document changes with the one before it")
        logits_NV = self.model(input_ids=tokens_BN[:1, :5], use_cache=False).logits[0]
        _check_logits(source, logits_NV.float(), (last_BNS[0, :5] @ self.lm_head_VS.T).float())


def _check_logits(source: str, logits_NV: Tensor, expected_NV: Tensor) -> None:
    """The model's own logits against its output matrix applied to its last hidden state: capped, scaled or biased?"""
    difference = float((logits_NV - expected_NV).abs().max())
    if difference > 0.03 * float(expected_NV.abs().max()):
        raise ValueError(
            f"target {source}: its logits differ from output matrix x last hidden state by up to {difference:.3g} (of "
            f"{float(expected_NV.abs().max()):.3g}): it caps, scales or biases them, or its attention cannot be packed"
        )


def _load(target_dir: str | Path, dtype: torch.dtype) -> Any:
    """With SDPA, or, for architectures that have none, with eager attention."""
    try:
        return AutoModelForCausalLM.from_pretrained(target_dir, dtype=dtype, attn_implementation="sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return AutoModelForCausalLM.from_pretrained(target_dir, dtype=dtype, attn_implementation="eager")
