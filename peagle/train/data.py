"""Training data: conversations as token ids, on disk and packed into batches.

On disk a data set is a folder of `part-*.npz` files (arrays `tokens`, `lengths`, `prompt_lengths`) and one
`manifest.json` that says how it was made. In memory it is three flat arrays. Nothing is cut silently: what does not fit
is counted (`PackedBatches.counts`) and logged.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import json
import logging
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from peagle.config import read_json, read_target_config
from peagle.provenance import conditions

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Conversations:
    """tokens: all conversations end to end; lengths: tokens of each; prompt_lengths: those before the answer."""

    tokens: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_answer_tokens(self) -> int:
        return int(self.lengths.sum() - self.prompt_lengths.sum())

    @classmethod
    def from_lists(cls, prompts: list[list[int]], answers: list[list[int]]) -> Conversations:
        conversations = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        return cls(
            tokens=np.fromiter((token for tokens in conversations for token in tokens), dtype=np.int32),
            lengths=np.array([len(tokens) for tokens in conversations], dtype=np.int32),
            prompt_lengths=np.array([len(tokens) for tokens in prompts], dtype=np.int32),
        )

    @classmethod
    def load(cls, folder: str | Path) -> Conversations:
        """Raises ValueError when the folder holds no parts or a part is damaged."""
        parts = sorted(Path(folder).glob("part-*.npz"))
        if not parts:
            raise ValueError(f"data: no part-*.npz in {folder}; make them with `peagle generate`")
        arrays: dict[str, list[np.ndarray]] = {"tokens": [], "lengths": [], "prompt_lengths": []}
        for part in parts:
            try:
                with np.load(part) as stored:
                    for name, values in arrays.items():
                        values.append(stored[name].astype(np.int32))
            except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"data: {part} is damaged: {error}") from error
            if arrays["tokens"][-1].size != arrays["lengths"][-1].sum():
                raise ValueError(f"data: {part} is damaged: lengths do not add up to its tokens")
        return cls(**{name: np.concatenate(values) for name, values in arrays.items()})

    def save_part(self, folder: str | Path, name: str) -> Path:
        """Writes `part-{name}.npz`, 16 bits a token where the vocabulary allows. A reader never sees half a part."""
        path = Path(folder) / f"part-{name}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        narrow = np.uint16 if self.tokens.size == 0 or self.tokens.max() < 2**16 else np.int32
        partial = path.with_name(f".{path.name}.partial.npz")
        np.savez_compressed(
            partial, tokens=self.tokens.astype(narrow), lengths=self.lengths, prompt_lengths=self.prompt_lengths
        )
        partial.replace(path)
        return path

    def digest(self) -> str:
        """16 hex digits that change with any conversation and with their order."""
        hashed = hashlib.sha256()
        for array in (self.tokens, self.lengths, self.prompt_lengths):
            hashed.update(np.ascontiguousarray(array, dtype=np.int32).tobytes())
        return hashed.hexdigest()[:16]

    def select(self, indices: list[int]) -> Conversations:
        documents = [tokens for tokens, _ in self.documents()]
        tokens = np.concatenate([self.tokens[:0], *(documents[index] for index in indices)])
        at = np.array(indices, dtype=np.int64)
        return Conversations(tokens, self.lengths[at], self.prompt_lengths[at])

    def hold_out(self, share: float) -> tuple[list[int], list[int]]:
        """Indices of the conversations to train on and of those to evaluate on. The prompt's tokens alone decide, so
        that no prompt is in both, and those of one prompt stay where they are when others are added."""
        ranks = [zlib.crc32(tokens[:prompt].astype(np.int32).tobytes()) for tokens, prompt in self.documents()]
        is_held_out = np.array(ranks) < share * 2**32
        return np.flatnonzero(~is_held_out).tolist(), np.flatnonzero(is_held_out).tolist()

    def documents(self) -> Iterator[tuple[np.ndarray, int]]:
        """Each conversation's tokens and prompt length."""
        ends = self.lengths.cumsum()
        for start, end, prompt in zip(ends - self.lengths, ends, self.prompt_lengths, strict=True):
            yield self.tokens[start:end], int(prompt)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed sequences. document_BN: -1 on padding; position_BN: within a document; answer_BN: answer tokens; index_BN:
    place of a token in `Conversations.tokens`, -1 on padding."""

    tokens_BN: Tensor
    document_BN: Tensor
    position_BN: Tensor
    answer_BN: Tensor
    index_BN: Tensor

    def to(self, device: torch.device | str) -> Self:
        return type(self)(**{name: value.to(device, non_blocking=True) for name, value in vars(self).items()})

    def joined(self) -> tuple[Self, Tensor]:
        """All sequences as one document [1, B * N], padding last, and the place in B * N that each token comes from.

        No chain runs on into the next conversation where that begins with a prompt of two tokens or more, as chats do.
        """
        order_N = (self.document_BN.flatten() < 0).to(torch.int8).argsort(stable=True)
        moved = {name: value.flatten()[order_N][None] for name, value in vars(self).items()}
        moved["document_BN"] = moved["document_BN"].clamp_max(0)
        moved["position_BN"] = torch.arange(len(order_N), device=order_N.device)[None]
        return type(self)(**moved), order_N


def pack(lengths: np.ndarray, max_tokens: int, order: np.ndarray, max_open: int = 256) -> Iterator[list[int]]:
    """Groups documents into sequences of at most `max_tokens`: best fit among `max_open` open sequences.

    order: indices into lengths; those longer than max_tokens must not be in it. Yields lists of indices.
    """
    used: list[int] = []  # tokens of each open sequence, ascending
    rows: list[list[int]] = []  # their documents, in the same order
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect.bisect_right(used, max_tokens - length) - 1
        if at >= 0:
            length, row = length + used.pop(at), rows.pop(at)
            row.append(index)
        else:
            row = [index]
            if len(used) == max_open:
                used.pop()
                yield rows.pop()
        at = bisect.bisect_left(used, length)
        used.insert(at, length)
        rows.insert(at, row)
    yield from rows


class PackedBatches:
    """Endless batches of packed conversations, reshuffled each epoch; the same seed and skip give the same batches.

    long: a conversation of more than `max_tokens` is left out, or cut, if any of its answer is within these. `counts`:
    conversations and tokens of one epoch that are used, left out and cut.
    """

    def __init__(
        self,
        data: Conversations,
        *,
        num_sequences: int,
        max_tokens: int,
        seed: int,
        long: Literal["leave_out", "cut"] = "leave_out",
    ) -> None:
        self.data, self.num_sequences, self.max_tokens, self.seed = data, num_sequences, max_tokens, seed
        self._starts = data.lengths.cumsum() - data.lengths
        self._lengths = np.minimum(data.lengths, max_tokens)
        can_be_cut = (data.prompt_lengths < max_tokens) & (long == "cut")
        self._usable = np.flatnonzero((data.lengths <= max_tokens) | can_be_cut)
        whole, taken = data.lengths[self._usable], self._lengths[self._usable]
        self.counts = {
            "num_conversations": len(taken),
            "num_tokens": int(taken.sum()),
            "num_answer_tokens": int(taken.sum() - data.prompt_lengths[self._usable].sum()),
            "num_left_out": len(data) - len(taken),
            "num_tokens_left_out": int(data.lengths.sum() - whole.sum()),
            "num_cut": int((taken < whole).sum()),
            "num_tokens_cut": int((whole - taken).sum()),
        }
        if not len(self._usable):
            raise ValueError(f"data: every conversation exceeds batch.max_tokens = {max_tokens}")
        if self.counts["num_left_out"] or self.counts["num_cut"]:
            logger.warning(
                "of %d conversations %d exceed %d tokens: %d are left out (%d tokens), %d are cut (%d tokens)",
                len(data),
                int((data.lengths > max_tokens).sum()),
                max_tokens,
                *(self.counts[key] for key in ("num_left_out", "num_tokens_left_out", "num_cut", "num_tokens_cut")),
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation used, as used."""
        return int(self._lengths[self._usable].max())

    def __call__(self, skip: int = 0, rank: int = 0, num_workers: int = 1) -> Iterator[Batch]:
        """skip: batches to pass over (resume). Worker `rank` gets every `num_workers`-th of the others."""
        for number, rows in enumerate(self._groups()):
            if number >= skip and number % num_workers == rank:
                yield self.assemble(rows)

    def _groups(self) -> Iterator[list[list[int]]]:
        """Conversations of each batch. Sequences left over at the end of an epoch go into the next one's batches."""
        rows: list[list[int]] = []
        for epoch in itertools.count():
            order = np.random.default_rng((self.seed, epoch)).permutation(self._usable)
            for indices in pack(self._lengths, self.max_tokens, order):
                rows.append(indices)
                if len(rows) == self.num_sequences:
                    yield rows
                    rows = []

    def assemble(self, rows: list[list[int]]) -> Batch:
        """A batch of the given conversations, one list a sequence, in order."""
        shape = (len(rows), self.max_tokens)
        tokens, position = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        document, answer = np.full(shape, -1, np.int64), np.zeros(shape, bool)
        place = np.full(shape, -1, np.int64)
        for row, indices in enumerate(rows):
            at = 0
            for number, index in enumerate(indices):
                length, start = int(self._lengths[index]), self._starts[index]
                here = slice(at, at + length)
                tokens[row, here] = self.data.tokens[start : start + length]
                place[row, here] = np.arange(start, start + length)
                document[row, here], position[row, here] = number, np.arange(length)
                answer[row, at + int(self.data.prompt_lengths[index]) : at + length] = True
                at += length
        return Batch(*(torch.from_numpy(array) for array in (tokens, document, position, answer, place)))


def answer_token_counts(data: Conversations, vocab_size: int) -> Tensor:
    """count_V [vocab_size] int64: how often each token of the target occurs in the answers."""
    answers = np.concatenate([data.tokens[:0], *(tokens[prompt:] for tokens, prompt in data.documents())])
    return torch.from_numpy(np.bincount(answers, minlength=vocab_size))


def frequent_tokens(count_V: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """The `size` most frequent tokens, ascending [size] int64; ties go to the lower id.

    always: ids that are taken whatever their count, such as the end of a turn.

    Raises ValueError when `size` exceeds the vocabulary or cannot hold `always`.
    """
    chosen = sorted(set(always))
    if not len(chosen) <= size <= len(count_V):
        raise ValueError(
            f"draft_vocab_size = {size}: must be in {len(chosen)}..{len(count_V)} (tokens that are always taken .. "
            "vocabulary of the target)"
        )
    ranked = count_V.long().clone()
    ranked[chosen] = torch.iinfo(torch.int64).max
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """`manifest.json` of a data folder, empty where it has none. Raises ValueError for a damaged one."""
    path = Path(folder) / "manifest.json"
    return read_json(path, "data") if path.exists() else {}


def write_manifest(folder: str | Path, manifest: dict[str, Any], target_dir: str | Path | None = None) -> None:
    """Writes `manifest.json`; with a target, also its tokenizer and the conditions of this run."""
    if target_dir is not None:
        manifest = manifest | {"tokenizer": tokenizer_hash(target_dir), "made": conditions()}
    path = Path(folder) / "manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def cut_loop(answer: list[int], max_repeats: int) -> list[int]:
    """The answer up to where it has only repeated itself for `max_repeats` tokens (every 8-gram seen before)."""
    seen: set[tuple[int, ...]] = set()
    run = 0
    for end in range(8, len(answer) + 1):
        gram = tuple(answer[end - 8 : end])
        run = run + 1 if gram in seen else 0
        seen.add(gram)
        if run == max_repeats:
            return answer[:end]
    return answer


def distinct_share(answer: list[int], ngram: int = 8) -> float:
    """Share of n-grams that are distinct; under 0.5 the answer counts as looping."""
    grams = [tuple(answer[start : start + ngram]) for start in range(len(answer) - ngram + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


# ---- do data, tokenizer and target belong together? A drafter trained on ids of another tokenizer learns noise


def tokenizer_hash(target_dir: str | Path) -> str | None:
    """16 hex digits that say how text becomes ids; None for a target without `tokenizer.json`.

    Of the contents, not of the bytes: releases of `tokenizers` write merges and key order differently.
    """
    path = Path(target_dir) / "tokenizer.json"
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
        model = content["model"]
        merges = model.get("merges")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file of the package tokenizers: {error!r:.200}") from error
    for key in ("version", "truncation", "padding"):
        content.pop(key, None)
    if merges:
        content["model"]["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def load_tokenizer(target_dir: str | Path) -> Any:
    """The target's tokenizer. Raises ValueError for files that cannot be read as one, and as `read_target_config`."""
    from transformers import AutoTokenizer

    read_target_config(target_dir)
    try:
        return AutoTokenizer.from_pretrained(target_dir)
    except Exception as error:  # transformers and tokenizers raise what they like, Exception itself too
        raise ValueError(f"the tokenizer in {target_dir} cannot be loaded: {error}") from error


def special_ids(tokenizer: Any) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder.items()
    return frozenset([*tokenizer.all_special_ids, *(token_id for token_id, token in added if token.special)])


def check_data_fits(folder: str | Path, target_dir: str | Path, batches: PackedBatches | None = None) -> None:
    """Raises ValueError when conversations were tokenized by another tokenizer than the target's, hold ids beyond its
    vocabulary, or are longer than its positions. batches: of the folder; only what these use must be short enough.
    """
    data = batches.data if batches else Conversations.load(folder)
    config = read_target_config(target_dir)
    vocab_size, num_positions = config["vocab_size"], config.get("max_position_embeddings")
    theirs = read_manifest(folder).get("tokenizer")
    ours = tokenizer_hash(target_dir)
    if theirs is None:
        logger.info("%s names no tokenizer: only the range of its token ids is checked", folder)
    elif ours is not None and ours != theirs:
        raise ValueError(
            f"data and target do not match: {folder} was made with tokenizer {theirs} (manifest.json), the target "
            f"{target_dir} has tokenizer {ours}: make the data again with `peagle generate`"
        )
    highest, lowest = int(data.tokens.max(initial=0)), int(data.tokens.min(initial=0))
    if highest >= vocab_size or lowest < 0:
        wrong = highest if highest >= vocab_size else lowest
        raise ValueError(
            f"data and target do not match: {folder} holds token id {wrong}, the target {target_dir} has ids "
            f"0..{vocab_size - 1}: make the data again with this target's tokenizer"
        )
    longest = batches.longest if batches else int(data.lengths.max(initial=0))
    if num_positions is not None and longest > num_positions:
        raise ValueError(
            f"data: conversations of {folder} have up to {longest} tokens, the target {target_dir} has "
            f"{num_positions} positions (max_position_embeddings): lower batch.max_tokens to {num_positions}"
        )
