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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

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
        joined = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        return cls(
            tokens=np.fromiter((token for one in joined for token in one), dtype=np.int32),
            lengths=np.array([len(one) for one in joined], dtype=np.int32),
            prompt_lengths=np.array([len(one) for one in prompts], dtype=np.int32),
        )

    @classmethod
    def load(cls, folder: str | Path) -> Conversations:
        """Raises ValueError when the folder holds no parts or a part is damaged."""
        parts = sorted(Path(folder).glob("part-*.npz"))
        if not parts:
            raise ValueError(f"data: no part-*.npz in {folder}; make them with `python -m peagle.vllm.generate`")
        arrays: dict[str, list[np.ndarray]] = {"tokens": [], "lengths": [], "prompt_lengths": []}
        for part in parts:
            try:
                with np.load(part) as stored:
                    for name, values in arrays.items():
                        values.append(stored[name].astype(np.int32))
            except (zipfile.BadZipFile, EOFError, KeyError, ValueError) as error:
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
        documents = list(self.documents())
        chosen = [documents[index] for index in indices]
        return Conversations.from_lists(
            [tokens[:prompt].tolist() for tokens, prompt in chosen],
            [tokens[prompt:].tolist() for tokens, prompt in chosen],
        )

    def documents(self) -> Iterator[tuple[np.ndarray, int]]:
        """Each conversation's tokens and prompt length."""
        ends = self.lengths.cumsum()
        for start, end, prompt in zip(ends - self.lengths, ends, self.prompt_lengths, strict=True):
            yield self.tokens[start:end], int(prompt)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed sequences. document_BN: -1 on padding; position_BN: within a document; answer_BN: answer tokens."""

    tokens_BN: Tensor
    document_BN: Tensor
    position_BN: Tensor
    answer_BN: Tensor

    def to(self, device: torch.device | str) -> Self:
        moved = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return type(self)(**{name: value.to(device, non_blocking=True) for name, value in moved.items()})


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

    long: what becomes of a conversation of more than `max_tokens`. "leave_out": it is not used; "cut": its first
    `max_tokens` are, if any of its answer is among them. `counts` says how many conversations and tokens of one epoch
    are used, left out and cut.
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
        self.counts = self.counts_of(self._usable)
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

    def counts_of(self, used: np.ndarray) -> dict[str, int]:
        """used: indices of the conversations that one epoch goes through; all others count as left out."""
        whole, taken = self.data.lengths[used], self._lengths[used]
        return {
            "num_conversations": len(used),
            "num_tokens": int(taken.sum()),
            "num_answer_tokens": int(taken.sum() - self.data.prompt_lengths[used].sum()),
            "num_left_out": len(self.data) - len(used),
            "num_tokens_left_out": int(self.data.lengths.sum() - whole.sum()),
            "num_cut": int((taken < whole).sum()),
            "num_tokens_cut": int((whole - taken).sum()),
        }

    @property
    def num_left_out(self) -> int:
        return self.counts["num_left_out"]

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation used, as used."""
        return int(self._lengths[self._usable].max())

    def num_batches(self) -> int:
        """Batches until every conversation was used once; the last may begin the second epoch."""
        return -(-sum(1 for _ in self._sequences(epoch=0)) // self.num_sequences)

    def __call__(self, skip: int = 0, rank: int = 0, num_workers: int = 1) -> Iterator[Batch]:
        """skip: batches to pass over (resume). Of the rest, worker `rank` gets every `num_workers`-th."""
        for number, rows in enumerate(self._groups()):
            if number >= skip and number % num_workers == rank:
                yield self.assemble(rows)

    def _sequences(self, epoch: int) -> Iterator[list[int]]:
        order = np.random.default_rng((self.seed, epoch)).permutation(self._usable)
        return pack(self._lengths, self.max_tokens, order)

    def _groups(self) -> Iterator[list[list[int]]]:
        """Conversations of each batch. Sequences left over at the end of an epoch go into the next one's batches."""
        rows: list[list[int]] = []
        for epoch in itertools.count():
            for indices in self._sequences(epoch):
                rows.append(indices)
                if len(rows) == self.num_sequences:
                    yield rows
                    rows = []

    def assemble(self, rows: list[list[int]]) -> Batch:
        """A batch of the given conversations, one list a sequence, in order."""
        shape = (len(rows), self.max_tokens)
        tokens, position = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        document, answer = np.full(shape, -1, np.int64), np.zeros(shape, bool)
        for row, indices in enumerate(rows):
            at = 0
            for number, index in enumerate(indices):
                length, start = int(self._lengths[index]), self._starts[index]
                here = slice(at, at + length)
                tokens[row, here] = self.data.tokens[start : start + length]
                document[row, here], position[row, here] = number, np.arange(length)
                answer[row, at + int(self.data.prompt_lengths[index]) : at + length] = True
                at += length
        return Batch(*(torch.from_numpy(array) for array in (tokens, document, position, answer)))


def write_manifest(folder: str | Path, manifest: dict[str, Any]) -> None:
    path = Path(folder) / "manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
