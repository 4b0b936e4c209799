"""The safetensors files of a head directory: which there are, and what their headers say.

Enters: a directory. Leaves: names, types and shapes of its tensors, or a `HeadError` that names a missing or damaged
file with its bytes. Tensor values are never read and torch is never imported.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path

from peagle.config import HeadError

#: A safetensors header longer than this is damage, not a head (the format's own limit).
MAX_HEADER_BYTES = 100_000_000


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Type (safetensors' name, such as "BF16") and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def canonical_name(name: str) -> str:
    """Checkpoint name of a tensor; EAGLE-3 heads of one layer may call it `midlayer`, as vLLM allows."""
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def weight_files(head_dir: str | Path) -> list[Path]:
    """The head's safetensors files, sorted. Raises HeadError when there is none."""
    files = sorted(Path(head_dir).glob("*.safetensors"))
    if not files:
        found = sorted(path.name for path in Path(head_dir).iterdir()) if Path(head_dir).is_dir() else []
        raise HeadError(
            f"{Path(head_dir) / 'model.safetensors'} does not exist (the directory holds: {found or 'nothing'})"
        )
    return files


def read_tensor_specs(head_dir: str | Path) -> dict[str, TensorSpec]:
    """Type and shape of every tensor in a head directory, by canonical name, from the files' headers.

    Raises:
        HeadError: no safetensors file, a file that is cut short or damaged (named with its size in bytes), or one
            tensor stored twice.
    """
    specs: dict[str, TensorSpec] = {}
    for path in weight_files(head_dir):
        for name, spec in _read_header(path).items():
            if canonical_name(name) in specs:
                raise HeadError(f"{path}: {canonical_name(name)} is stored twice in {head_dir}")
            specs[canonical_name(name)] = spec
    return specs


def _read_header(path: Path) -> dict[str, TensorSpec]:
    """Parse the header of one safetensors file: 8 bytes of length, JSON, then the tensors' bytes."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if len(start) < 8:
            raise HeadError(f"{path} is cut short: {num_bytes} bytes, a safetensors file has more than 8")
        if header_bytes > MAX_HEADER_BYTES:
            raise HeadError(f"{path} is no safetensors file: {num_bytes} bytes, its header claims {header_bytes}")
        if 8 + header_bytes > num_bytes:
            raise HeadError(f"{path} is cut short: {num_bytes} bytes, its header alone needs {8 + header_bytes}")
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        specs = {name: TensorSpec(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
        expected_bytes = 8 + header_bytes + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise HeadError(f"{path} ({num_bytes} bytes) has a damaged safetensors header: {error!r}") from error
    if num_bytes != expected_bytes:
        state = "cut short" if num_bytes < expected_bytes else "longer than its header says"
        raise HeadError(f"{path} is {state}: {num_bytes} bytes, expected {expected_bytes}")
    return specs
