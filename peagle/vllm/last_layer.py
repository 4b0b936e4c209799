"""A drafter's last layer after its attention, only for the rows that propose drafts.

Enters: vLLM's loaded network of a head. It is changed to stop after the attention of its last layer. Leaves: the rest
of the layer as one function. Output projection, MLP and final norm change each row alone. One row of a prompt proposes
drafts, and about two thirds of a decoding request's rows.

S rows, A numbers of the attention's heads, H hidden size.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from vllm.model_executor.layers.layernorm import RMSNorm

from peagle.model import rms_norm

COMPILED_KEY = "peagle_last_layer"
"""Key in vLLM's `additional_config` that separates these networks from whole ones in vLLM's compile cache."""


class _Passed(nn.Module):
    """Replaces a module and returns its input."""

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return hidden, residual


class LastLayer:
    """The rest of a network's last layer. Making it changes the network: that then returns the output of its last
    attention [N, A] and the residual stream before it [N, H].

    Make it before the network is compiled. Raises ValueError for a network that is not built like a Llama.
    """

    def __init__(self, network: Any) -> None:
        model = network.model
        layer = model.layers[-1]
        norms = (layer.post_attention_layernorm, model.norm)
        has_mlp = hasattr(layer.mlp, "gate_up_proj") and hasattr(layer.mlp, "down_proj")
        if not has_mlp or any(type(norm) is not RMSNorm for norm in norms):
            raise ValueError(f"the head's network, {type(network).__name__}, has a last layer of another kind")
        self._o_proj, self._mlp = layer.self_attn.o_proj, layer.mlp
        self._mlp_norm, self._norm = norms
        self.input_size: int = self._o_proj.input_size_per_partition
        layer.self_attn.o_proj, layer.mlp = _Passed(), nn.Identity()
        layer.post_attention_layernorm, model.norm = _Passed(), _Passed()

    def __call__(self, attended_SA: Tensor, stream_SH: Tensor) -> Tensor:
        """Normed hidden states, [S, H], for the head's `lm_head`."""
        added_SH, _ = self._o_proj(attended_SA)
        stream_SH = stream_SH + added_SH
        hidden_SH = rms_norm(stream_SH, self._mlp_norm.weight, self._mlp_norm.variance_epsilon)
        gate_SI, up_SI = self._mlp.gate_up_proj(hidden_SH)[0].chunk(2, dim=-1)
        added_SH, _ = self._mlp.down_proj(F.silu(gate_SI) * up_SI)
        return rms_norm(stream_SH + added_SH, self._norm.weight, self._norm.variance_epsilon)
