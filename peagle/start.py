"""Where a drafter's weights start."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peagle.model import Drafter
from peagle.target import Target


@torch.no_grad()
def random_start(drafter: Drafter, aux_RX: Tensor, embed_VH: Tensor, generator: torch.Generator | None = None) -> None:
    """Normal weights of std 0.02 in every matrix; mask token and shared hidden state start at the mean of what they replace.

    aux_RX: a sample of the target's tapped hidden states [rows, C * S].
    """
    for name, parameter in drafter.trainable().items():
        if parameter.ndim == 2 and name != "mask_hidden":
            nn.init.normal_(parameter, std=0.02, generator=generator)
    if drafter.config.ptd_token_id is not None:
        drafter.mask_embedding.copy_(embed_VH.float().mean(0))
        drafter.mask_hidden.copy_(aux_RX.float().mean(0).view(1, 1, -1))


@torch.no_grad()
def target_start(drafter: Drafter, aux_RX: Tensor, target: Target, generator: torch.Generator | None = None) -> None:
    """The drafter's layers start as the target's last ones, fed by the deepest tapped hidden state.

    `fc` passes the deepest tap on (at its own scale, where `fc_norm` would have it at one), the first layer's inputs from the
    embedding start small: the drafter begins as a shortcut through the target's end. Raises ValueError when the shapes of
    the two models' layers differ.
    """
    random_start(drafter, aux_RX, target.embed_VS, generator)
    config, source = drafter.config, target.model.model
    if config.hidden_size != config.target_hidden_size:
        raise ValueError("drafter.init = target needs a drafter of the target's hidden size; use init: random")
    size = config.hidden_size
    for layer, original in zip(drafter.layers, source.layers[-config.num_hidden_layers :], strict=True):
        layer.mlp.load_state_dict(original.mlp.state_dict())
        layer.post_attention_layernorm.load_state_dict(original.post_attention_layernorm.state_dict())
        layer.self_attn.o_proj.load_state_dict(original.self_attn.o_proj.state_dict())
        first = layer.layer_index == 0
        (layer.hidden_norm if first else layer.input_layernorm).load_state_dict(original.input_layernorm.state_dict())
        for name in ("q_proj", "k_proj", "v_proj"):
            own, weight = getattr(layer.self_attn, name).weight, getattr(original.self_attn, name).weight.to(torch.float32)
            own[:, -size:].copy_(weight)
    drafter.norm.load_state_dict(source.norm.state_dict())
    drafter.fc.weight[:, -size:] += torch.eye(size, device=drafter.fc.weight.device)
    if config.fc_norm:
        # A median, because a few tokens (the first of a sequence) carry states hundreds of times larger.
        scales = aux_RX.float().unflatten(-1, (-1, size)).square().mean(-1).sqrt().median(0).values
        drafter.fc_norm[-1].weight.fill_(float(scales[-1]))
