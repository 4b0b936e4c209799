"""A drafter's last layer behind its attention, for the rows that propose drafts only.

Enters: vLLM's network of a head, as it was loaded. It is changed to stop behind the attention of its last layer.
Leaves: what was left out, as one function. Output projection, MLP and final norm of the last layer move no other row,
and of a prompt's rows one proposes drafts, of a decoding request's about two thirds.

S rows, A numbers of the attention's heads, H hidden size.
"""

from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.layernorm import RMSNorm

from peagle.drafter.rows import add_norm, silu_mul

COMPILED_KEY = "peagle_last_layer"
"""Key in vLLM's `additional_config` that sets networks that stop there apart in vLLM's cache of compiled ones."""


class _Passed(nn.Module):
    """Stands where a module was, and returns what it is given."""

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return hidden, residual


class LastLayer:
    """What `network` no longer does. It then returns what the attention of its last layer puts out, [N, A], and the
    residual stream before it, [N, H].

    To be made before the network is compiled. Raises ValueError for a network that is not built like a Llama.
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
        norm = self._mlp_norm
        stream_SH, hidden_SH = add_norm(stream_SH, added_SH, norm.weight, norm.variance_epsilon)
        gate_up, _ = self._mlp.gate_up_proj(hidden_SH)
        added_SH, _ = self._mlp.down_proj(silu_mul(gate_up))
        return add_norm(stream_SH, added_SH, self._norm.weight, self._norm.variance_epsilon)[1]
