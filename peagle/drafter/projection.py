"""A head's input projection: the part of it that runs at the target, before hidden states travel."""

from __future__ import annotations

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional as F

from peagle.model import rms_norm


class InputProjection:
    """`fc` and its norms: what turns a target's auxiliary hidden states into the rows that travel.

    The mask's projected hidden state stays at the drafter. C layers of S numbers each, X = C * S.
    """

    def __init__(
        self, fc_HX: Tensor, *, input_norm_X: Tensor | None = None, fc_norm_CS: Tensor | None = None, eps: float = 1e-5
    ) -> None:
        """fc_HX: weight of `fc`; input_norm_X: of the norm of all layers together; fc_norm_CS: of each layer's own."""
        self.fc_HX, self.input_norm_X, self.fc_norm_CS, self.eps = fc_HX, input_norm_X, fc_norm_CS, eps

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.fc_HX.shape[0]

    @torch.no_grad()
    def project(self, aux_RX: Tensor) -> Tensor:
        """aux_RX [R, C * S], the target's auxiliary hidden states in the order of its layers -> [R, H] in the type
        of the weights."""
        x = aux_RX.to(self.fc_HX.dtype)
        if self.input_norm_X is not None:
            x = rms_norm(x, self.input_norm_X, self.eps)
        if self.fc_norm_CS is not None:
            x = rms_norm(x.unflatten(-1, tuple(self.fc_norm_CS.shape)), self.fc_norm_CS, self.eps).flatten(-2)
        return F.linear(x, self.fc_HX)

    def to_bytes(self) -> bytes:
        """All of it as one safetensors image, for the answer to a target's hello."""
        tensors = {"fc_HX": self.fc_HX, "input_norm_X": self.input_norm_X, "fc_norm_CS": self.fc_norm_CS}
        stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items() if tensor is not None}
        return save(stored | {"eps": torch.tensor([self.eps], dtype=torch.float64)})

    @classmethod
    def from_bytes(cls, data: bytes, device: torch.device) -> InputProjection:
        """What `to_bytes` wrote."""
        tensors = load(data)
        eps = float(tensors.pop("eps"))
        return cls(eps=eps, **{name: tensor.to(device) for name, tensor in tensors.items()})
