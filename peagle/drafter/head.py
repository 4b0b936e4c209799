"""The head of a remote drafter: loaded with its target's tables, and the part of it that runs at the target.

Enters: a head directory and a target's checkpoint. Leaves: a `Drafter` that needs nothing of the target any more, and
its `Reducer`, which turns the target's tapped hidden states into the rows that travel: [R, C * S] -> [R, H].
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional as F

from peagle.checkpoint import build_drafter, check_head_fits, load_head
from peagle.config import DrafterConfig, HeadError, read_target_config
from peagle.heads import target_table
from peagle.model import Drafter, RMSNorm

REDUCER_VERSION = 1
_DTYPES = ("float32", "float16", "bfloat16", "float64")
_EMBEDDING, _OUTPUT = "embed_tokens.weight", "lm_head.weight"


def check_parallel(config: DrafterConfig, source: str) -> None:
    """Raise HeadError for a head that drafts one token after another: a remote drafter has one pass a step."""
    if config.ptd_token_id is None:
        raise HeadError(
            f"{source} has no mask token (ptd_token_id), so it is an EAGLE-3 head: a remote drafter runs P-EAGLE heads "
            "only, which propose all their tokens in one pass; run this head in the target's own engine"
        )


def load_runtime_head(
    head_dir: str | Path, target_dir: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Drafter:
    """A head with the tables that it shares with the target, read from the target's checkpoint; frozen.

    Raises:
        HeadError: a damaged head, an EAGLE-3 head, or a head for another target.
        ValueError: a target without a usable config.json or without the tables that the head needs.
    """
    config, tensors = load_head(head_dir)
    check_parallel(config, f"head {head_dir}")
    check_head_fits(config, read_target_config(target_dir))
    embed_VH = None if _EMBEDDING in tensors else target_table(Path(target_dir), _EMBEDDING)
    lm_head_VH = None if _OUTPUT in tensors else target_table(Path(target_dir), _OUTPUT)
    drafter = build_drafter(config, tensors, embed_VH=embed_VH, lm_head_VH=lm_head_VH, dtype=dtype, device=device)
    return drafter.requires_grad_(False)


class Reducer:
    """`fc` and its norms: what a target needs of a head. The mask's reduced hidden state stays at the drafter.

    Attributes: hidden_size (H), input_size (C * S), dtype and device of the weights and of the rows that leave.
    """

    def __init__(
        self,
        fc_HX: Tensor,
        *,
        input_norm_X: Tensor | None = None,
        fc_norm_CS: Tensor | None = None,
        eps: float = 1e-5,
    ) -> None:
        """fc_HX: weight of `fc`; input_norm_X: of the norm of all taps together; fc_norm_CS: of each tap's own.

        Raises ValueError for shapes that do not fit together.
        """
        if fc_HX.dim() != 2:
            raise ValueError(f"fc_HX has shape {list(fc_HX.shape)}, not [H, C * S]")
        width = fc_HX.shape[1]
        if input_norm_X is not None and tuple(input_norm_X.shape) != (width,):
            raise ValueError(f"input_norm_X has shape {list(input_norm_X.shape)}, not [{width}] as fc_HX asks")
        if fc_norm_CS is not None and (fc_norm_CS.dim() != 2 or fc_norm_CS.numel() != width):
            raise ValueError(f"fc_norm_CS has shape {list(fc_norm_CS.shape)}, not [C, S] with C * S = {width}")
        self.fc_HX, self.input_norm_X, self.fc_norm_CS, self.eps = fc_HX, input_norm_X, fc_norm_CS, eps

    @property
    def hidden_size(self) -> int:
        return self.fc_HX.shape[0]

    @property
    def input_size(self) -> int:
        return self.fc_HX.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.fc_HX.dtype

    @property
    def device(self) -> torch.device:
        return self.fc_HX.device

    @torch.no_grad()
    def reduce(self, aux_RX: Tensor) -> Tensor:
        """aux_RX [R, C * S], the target's tapped hidden states in the order of its layers -> [R, H] in `dtype`."""
        x = aux_RX.to(self.dtype)
        if self.input_norm_X is not None:
            x = _rms_norm(x, self.input_norm_X, self.eps)
        if self.fc_norm_CS is not None:
            x = _rms_norm(x.unflatten(-1, tuple(self.fc_norm_CS.shape)), self.fc_norm_CS, self.eps).flatten(-2)
        return F.linear(x, self.fc_HX)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Reducer:
        """A copy elsewhere, or of another type."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device=device, dtype=dtype or self.dtype)

        return Reducer(
            self.fc_HX.to(device=device, dtype=dtype or self.dtype),
            input_norm_X=moved(self.input_norm_X),
            fc_norm_CS=moved(self.fc_norm_CS),
            eps=self.eps,
        )

    def to_bytes(self) -> bytes:
        """All of it as one safetensors image, for the answer to a target's hello."""
        tensors = {"fc": self.fc_HX, "input_norm": self.input_norm_X, "fc_norm": self.fc_norm_CS}
        stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items() if tensor is not None}
        about = {"version": REDUCER_VERSION, "eps": self.eps, "dtype": str(self.dtype).removeprefix("torch.")}
        return save(stored, metadata={"reducer": json.dumps(about)})

    @classmethod
    def from_bytes(cls, data: bytes, device: torch.device | str = "cpu") -> Reducer:
        """What `to_bytes` wrote. Raises ValueError for bytes cut short, of another version or contradictory."""
        eps, dtype = _read_about(data)
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise ValueError(f"a reducer of {len(data)} bytes cannot be read: {error}") from error
        if spare := set(tensors) - {"fc", "input_norm", "fc_norm"}:
            raise ValueError(f"a reducer holds the unknown tensors {sorted(spare)}")
        if "fc" not in tensors:
            raise ValueError("a reducer holds no tensor fc")
        types = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
        if types != {dtype} or dtype not in _DTYPES:
            raise ValueError(f"a reducer of type {dtype!r} holds tensors of {sorted(types)}")
        placed = {name: tensor.to(device) for name, tensor in tensors.items()}
        return cls(
            placed["fc"],
            input_norm_X=placed.get("input_norm"),
            fc_norm_CS=placed.get("fc_norm"),
            eps=eps,
        )


def reducer_of(drafter: Drafter) -> Reducer:
    """The part of a drafter that runs at the target, in the drafter's type and on its device (weights shared)."""
    config = drafter.config
    return Reducer(
        drafter.fc.weight.detach(),
        input_norm_X=drafter.input_norm.weight.detach() if config.norm_before_fc else None,
        fc_norm_CS=torch.stack([_weight(norm) for norm in drafter.fc_norm]) if config.fc_norm else None,
        eps=config.rms_norm_eps,
    )


def _weight(norm: torch.nn.Module) -> Tensor:
    assert isinstance(norm, RMSNorm)
    return norm.weight.detach()


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `peagle.model.RMSNorm`, with a weight that may have a row for each tap."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _read_about(data: bytes) -> tuple[float, str]:
    """eps and type in the metadata of a reducer's image; the library's `load` gives tensors only."""
    problem = f"{len(data)} bytes are no reducer"
    num_header = int.from_bytes(data[:8], "little") if len(data) >= 8 else 0
    if not 2 <= num_header <= len(data) - 8:
        raise ValueError(f"{problem}: they are cut short or of something else")
    try:
        header = json.loads(data[8 : 8 + num_header])
        about = json.loads(header["__metadata__"]["reducer"])
        version, eps, dtype = about["version"], about["eps"], about["dtype"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{problem}: no description in their header ({error})") from error
    if version != REDUCER_VERSION:
        raise ValueError(
            f"a reducer of version {version}, this side knows {REDUCER_VERSION}: run the same release at the target "
            "and at the drafter"
        )
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise ValueError(f"{problem}: eps = {eps!r} must be a number between 0 and 1")
    return eps, str(dtype)
