"""The tokenizer of a GGUF file as a `tokenizers.Tokenizer`: byte-level BPE, or SentencePiece's BPE with byte fallback.

The one is checked against llama.cpp's tokenizer (`tests/test_prepare.py`), the other against SentencePiece's own
(`tests/test_gguf.py`).
"""

from typing import Any

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from peagle.gguf_fields import optional, value

# GGUF's token types.
_NORMAL = 1  # made by merges
_CONTROL = 3  # <|im_start|> and the like: matched before BPE, hidden from decoded text
_USER_DEFINED = 4  # matched before BPE, part of the text

_SPACE = "▁"  # how SentencePiece writes a space

# How llama.cpp splits text before BPE, by the name in `tokenizer.ggml.pre`. "smollm": every digit stands alone, and is
# cut off before the byte-level rule sees the text (so that a run of spaces before a number is not attached to it).
_PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    ),
}


def tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    """Raises ValueError for a kind of tokenizer that has no rule here."""
    kind, split = value(reader, "tokenizer.ggml.model"), value(reader, "tokenizer.ggml.pre")
    if kind == "gpt2" and split in _PRE_TOKENIZERS:
        made = _byte_level(reader, split)
    elif kind == "llama" and not value(reader, "tokenizer.ggml.add_space_prefix"):
        made = _sentence_piece(reader)
    else:
        raise ValueError(
            f"tokenizer.ggml.pre: no rule for {kind!r}/{split!r}; known: 'gpt2' with {sorted(_PRE_TOKENIZERS)}, "
            "'llama' (SentencePiece's BPE) without add_space_prefix"
        )
    if value(reader, "tokenizer.ggml.add_bos_token"):
        bos_id = int(value(reader, "tokenizer.ggml.bos_token_id"))
        bos = made.id_to_token(bos_id)
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return made


def tokenizer_config(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, Any]:
    """``tokenizer_config.json``; the generic class takes tokenizer.json as it stands, on every Transformers release."""
    tokens = value(reader, "tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(value(reader, "tokenizer.ggml.add_bos_token")),
        "add_prefix_space": bool(value(reader, "tokenizer.ggml.add_space_prefix")),
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[int(value(reader, "tokenizer.ggml.unknown_token_id"))],
    }


def chat_template(reader: gguf.GGUFReader) -> str | None:
    """The model's own chat template; None for a base model, which has none."""
    return optional(reader, "tokenizer.chat_template")


def _tokens_and_types(reader: gguf.GGUFReader) -> tuple[list[str], list[int]]:
    return value(reader, "tokenizer.ggml.tokens"), value(reader, "tokenizer.ggml.token_type")


def _add_control_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])


def _byte_level(reader: gguf.GGUFReader, split: str) -> Tokenizer:
    """Byte-level BPE; control tokens are special."""
    tokens, types = _tokens_and_types(reader)
    merges = [tuple(merge.split(" ")) for merge in value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_control_tokens(tokenizer, tokens, types)
    return tokenizer


def _sentence_piece(reader: gguf.GGUFReader) -> Tokenizer:
    """SentencePiece's BPE: merges follow from the pieces' scores, unknown characters fall back to bytes."""
    tokens, types = _tokens_and_types(reader)
    # GGUF writes the spaces of user-defined tokens (runs of spaces) plainly.
    tokens = [
        token.replace(" ", _SPACE) if type_ == _USER_DEFINED else token
        for token, type_ in zip(tokens, types, strict=True)
    ]
    scores = value(reader, "tokenizer.ggml.scores")
    pieces = {t: -score for t, score, type_ in zip(tokens, scores, types, strict=True) if type_ == _NORMAL}
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges(pieces),
            unk_token=tokens[int(value(reader, "tokenizer.ggml.unknown_token_id"))],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()],
    )
    _add_control_tokens(tokenizer, tokens, types)
    defined = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=True) for token in defined])
    return tokenizer


def _merges(rank_by_piece: dict[str, float]) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, best piece first: SentencePiece merges whatever makes the best piece."""
    found = [
        (rank, piece[:cut], piece[cut:])
        for piece, rank in rank_by_piece.items()
        for cut in range(1, len(piece))
        if piece[:cut] in rank_by_piece and piece[cut:] in rank_by_piece
    ]
    return [(left, right) for _, left, right in sorted(found)]
