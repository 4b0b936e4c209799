"""The drafter network: the same function as vLLM's `LlamaForCausalLMEagle3`, in plain torch.

How rows see each other is the caller's (`attend`): a COD mask in training, a KV cache in drafting.

Parameter names are the checkpoint's. `embed_tokens` and `lm_head` stay frozen; the mask token's embedding and its
hidden state are ours (`mask_embedding`, `mask_hidden`; paper section 2).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from peagle.config import DrafterConfig

#: attend(layer_index, q_BATD, k_BGTD, v_BGTD) -> out_BATD; keys and values are of the rows given, already rotated.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size], normalised over its last dimension in float32 (float64 stays)."""
    if x.is_cuda and not torch.is_grad_enabled():
        return weight * F.rms_norm(x, x.shape[-1:], eps=eps)  # the same, in two kernels
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


class Rotary(LlamaRotaryEmbedding):
    """Cosines and sines of Llama's RoPE (halves rotated, not pairs), as vLLM has them to the last bit."""

    def __init__(self, config: DrafterConfig) -> None:
        # transformers warns of a length that is not the stretched one, and does not use it.
        scaling, length = config.rope_scaling, config.max_position_embeddings
        if scaling is not None:
            length = int(scaling.factor * scaling.original_max_position_embeddings)
        rope = config.rope_parameters
        super().__init__(LlamaConfig(head_dim=config.head_dim, max_position_embeddings=length, rope_parameters=rope))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        # Frequencies change the device with the drafter, and stay float32 whatever its weights are.
        self.inv_freq = nn.Buffer(self.inv_freq.to(fn(self.inv_freq).device), persistent=False)
        return self

    def tables(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Both [B, 1, T, D] in float32."""
        # An elementwise product: older releases of transformers multiply matrices, which TF32 would round.
        angles_B1TD = (positions_BT[..., None].float() * self.inv_freq).repeat(1, 1, 2)[:, None]
        return angles_B1TD.cos() * self.attention_scaling, angles_B1TD.sin() * self.attention_scaling


def rotate(x_BATD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_BATD.chunk(2, dim=-1)
    return (x_BATD * cos + torch.cat([-second, first], dim=-1) * sin).to(x_BATD.dtype)


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(input_size, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(input_size, config.num_key_value_heads * config.head_dim, bias=bias)
        # vLLM has no bias there in Qwen 3's layers.
        out_bias = bias and not config.qk_norm
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=out_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(config.head_dim, config.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, layer_index: int) -> Tensor:
        """x [B, T, input_size] -> [B, T, H]."""
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out_BATD = attend(layer_index, rotate(q, *rotary), rotate(k, *rotary), v)
        return self.o_proj(out_BATD.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Llama's decoder layer; the first one reads [embedding ; hidden] and so has 2H inputs (paper Fig. 2)."""

    def __init__(self, config: DrafterConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.norm_before_residual = config.norm_before_residual
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        if layer_index == 0:
            self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config, 2 * size if layer_index == 0 else size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config)

    def forward(self, stream_BTH: Tensor, embeds_BTH: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Residual stream in, residual stream out."""
        if self.layer_index == 0:
            normed = self.hidden_norm(stream_BTH)
            if self.norm_before_residual:
                stream_BTH = normed
            x = torch.cat([self.input_layernorm(embeds_BTH), normed], dim=-1)
        else:
            x = self.input_layernorm(stream_BTH)
        stream_BTH = stream_BTH + self.self_attn(x, rotary, attend, self.layer_index)
        return stream_BTH + self.mlp(self.post_attention_layernorm(stream_BTH))


class Drafter(nn.Module):
    """P-EAGLE drafter (paper section 2); with `ptd_token_id = None` an EAGLE-3 drafter.

    `embed_tokens` [V, H] and `lm_head` [V_draft, H] exist from `share_target` on; they carry no gradient. `target_ids`
    [V_draft] maps draft vocabulary to target vocabulary (identity when not reduced).
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.fc_input_size, config.rms_norm_eps)
        if config.fc_norm:
            norms = (RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.aux_layer_ids)
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(config.fc_input_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)
        if config.is_parallel:
            self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, config.fc_input_size))
        self.embed_tokens: nn.Embedding
        self.lm_head: nn.Linear
        self.target_ids: Tensor
        self.register_buffer("target_ids", torch.arange(config.draft_vocab_size), persistent=False)

    def share_target(self, embed_VH: Tensor, lm_head_VH: Tensor, target_ids: Tensor | None = None) -> None:
        """Uses the target's embedding table [V, H] and output matrix [V_draft, H], without copying them.

        target_ids: for a reduced draft vocabulary, its tokens as ids of the target, ascending [V_draft]; lm_head_VH is
        then the target's whole matrix, of which those rows are copied.
        """
        if target_ids is not None:
            self.target_ids = target_ids.to(lm_head_VH.device)
            lm_head_VH = lm_head_VH[self.target_ids]
        self.embed_tokens = nn.Embedding.from_pretrained(embed_VH, freeze=True)
        self.lm_head = nn.Linear(lm_head_VH.shape[1], lm_head_VH.shape[0], bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(lm_head_VH, requires_grad=False)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Named parameters that the head owns: all but the target's tables."""
        tables = ("lm_head.", "embed_tokens.")
        return {name: value for name, value in self.named_parameters() if not name.startswith(tables)}

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [...] -> [..., H]; the mask token gets the learned embedding."""
        embeds = self.embed_tokens(token_ids)
        if self.config.ptd_token_id is None:
            return embeds
        is_mask = (token_ids == self.config.ptd_token_id)[..., None]
        return torch.where(is_mask, self.mask_embedding.to(embeds.dtype), embeds)

    def project_inputs(self, aux: Tensor) -> Tensor:
        """Auxiliary hidden states, concatenated [..., C * S] -> [..., H] (`fc`, after its norms)."""
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            chunks = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux)

    def forward(
        self, embeds_BTH: Tensor, hidden_BTH: Tensor, positions_BT: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """One pass over T rows.

        embeds_BTH: `embed` of the token after each row; hidden_BTH: `project_inputs` of the row's target hidden states,
        or of `mask_hidden`; positions_BT: int positions. Returns (normed [B, T, H] for `logits`, what EAGLE-3 feeds
        back as the next row's hidden state [B, T, H]: the residual stream, or with `norm_output` the normed rows).
        """
        rotary, stream_BTH = self.rotary.tables(positions_BT), hidden_BTH
        for layer in self.layers:
            stream_BTH = layer(stream_BTH, embeds_BTH, rotary, attend)
        normed_BTH = self.norm(stream_BTH)
        return normed_BTH, normed_BTH if self.config.norm_output else stream_BTH

    def logits(self, normed: Tensor) -> Tensor:
        """[..., H] -> [..., V_draft]; `target_ids` turns an index into a token id of the target."""
        return self.lm_head(normed)


@torch.no_grad()
def initialize(drafter: Drafter, aux_RX: Tensor, generator: torch.Generator | None = None) -> None:
    """Normal weights of std 0.02 in every matrix; mask token and shared hidden state start at the mean of what they
    replace.

    aux_RX: a sample of the target's auxiliary hidden states [rows, C * S].
    """
    for parameter in drafter.trainable().values():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02, generator=generator)
    if drafter.config.is_parallel:
        drafter.mask_embedding.copy_(drafter.embed_tokens.weight.float().mean(0))
        drafter.mask_hidden.copy_(aux_RX.float().mean(0).view(1, 1, -1))
