"""Reading one value, or one number that was meant as a decimal, out of a GGUF file's metadata."""

from typing import Any

import gguf


def value(reader: gguf.GGUFReader, key: str) -> Any:
    """Raises ValueError naming the key when the metadata lacks it."""
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"{key}: missing from the GGUF's metadata")
    return field.contents()


def optional(reader: gguf.GGUFReader, key: str) -> Any:
    """The value, or None when the metadata lacks it."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def decimal(reader: gguf.GGUFReader, key: str) -> float:
    """GGUF keeps float32; 7 digits give back the decimal number that was meant (1e-05, not 9.999999747e-06)."""
    return float(f"{value(reader, key):.7g}")


def token_ids(reader: gguf.GGUFReader) -> dict[str, int]:
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` as `config.json` names them."""
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {ours: int(value(reader, f"tokenizer.ggml.{theirs}")) for ours, theirs in names.items()}
