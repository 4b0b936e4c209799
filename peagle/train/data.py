"""Training data: conversations as token ids, on disk and packed into batches.

On disk a data set is a folder of `part-*.npz` files (arrays `tokens`, `lengths`, `prompt_lengths`) and one
`manifest.json` that says how it was made. In memory it is three flat arrays. Nothing is cut silently: what does not fit
is counted (`PackedBatches.counts`) and logged.
"""

from __future__ import annotations

import bisect
import codecs
import dataclasses
import hashlib
import itertools
import json
import logging
import random
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError, model_validator
from torch import Tensor

from peagle.config import read_target_config
from peagle.provenance import conditions
from peagle.schema import problem_lines
from peagle.store import sha256_of

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
        chosen = [(tokens.tolist(), prompt) for tokens, prompt in map(documents.__getitem__, indices)]
        return Conversations.from_lists([t[:n] for t, n in chosen], [t[n:] for t, n in chosen])

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
        moved = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return type(self)(**{name: value.to(device, non_blocking=True) for name, value in moved.items()})

    def joined(self) -> tuple[Self, Tensor]:
        """All sequences as one document [1, B * N], padding last, and the place in B * N that each token comes from.

        No chain runs on into the next conversation where that begins with a prompt of two tokens or more, as chats do.
        """
        order_N = (self.document_BN.flatten() < 0).to(torch.int8).argsort(stable=True)
        moved = {field.name: getattr(self, field.name).flatten()[order_N][None] for field in dataclasses.fields(self)}
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
    def longest(self) -> int:
        """Tokens of the longest conversation used, as used."""
        return int(self._lengths[self._usable].max())

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
    starts = data.lengths.cumsum(dtype=np.int64) - data.lengths
    position = np.arange(len(data.tokens)) - np.repeat(starts, data.lengths)
    answers = data.tokens[position >= np.repeat(data.prompt_lengths, data.lengths)]
    return torch.from_numpy(np.bincount(answers, minlength=vocab_size))


def frequent_tokens(count_V: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """The `size` most frequent tokens, ascending [size] int64; ties go to the lower id.

    always: ids that are taken whatever their count, such as the end of a turn.

    Raises ValueError when `size` exceeds the vocabulary or cannot hold `always`, or one of those is no token.
    """
    chosen = sorted(set(always))
    if not len(chosen) <= size <= len(count_V):
        raise ValueError(
            f"draft_vocab_size = {size}: must be in {len(chosen)}..{len(count_V)} (tokens that are always taken .. "
            "vocabulary of the target)"
        )
    if chosen and not 0 <= chosen[0] <= chosen[-1] < len(count_V):
        raise ValueError(f"always: {chosen} must be tokens of the target, 0..{len(count_V) - 1}")
    ranked = count_V.long().clone()
    ranked[chosen] = torch.iinfo(torch.int64).max
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values


def write_manifest(folder: str | Path, manifest: dict[str, Any], target_dir: str | Path | None = None) -> None:
    """Writes `manifest.json`; with a target, also its tokenizer and the conditions of this run."""
    if target_dir is not None:
        manifest = manifest | {"tokenizer": tokenizer_hash(target_dir), "made": conditions()}
    path = Path(folder) / "manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


# ---- prompts: read from JSONL, rendered with the target's chat template, or begun for the target to go on

_SENTINEL = "\u2063turn\u2063"
_MAX_NAMED_LINES = 10

NotBlank = Annotated[str, Field(pattern=r"\S")]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Messages up to where an answer begins, the class of traffic they stand for, and the answer if one is given.

    messages: {"role", "content"} each; where: file and line, for messages about it.
    """

    messages: tuple[dict[str, str], ...]
    category: str = "default"
    answer: str | None = None
    where: str = "prompt"


class Message(BaseModel):
    """A message as OpenAI's API has it; other keys are ignored."""

    role: Literal["system", "user", "assistant"]
    content: NotBlank


class Line(BaseModel):
    """A line of a JSONL file of prompts; other keys are ignored. `answer` goes with `prompt`."""

    messages: list[Message] | None = None
    prompt: NotBlank | None = None
    turns: Annotated[list[NotBlank], Field(min_length=1)] | None = None
    answer: NotBlank | None = None
    category: str = "default"

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        given = [key for key in ("messages", "prompt", "turns") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"needs one of `messages`, `prompt`, `turns`; has {given or 'none'}")
        roles = [message.role for message in self.messages or ()]
        if self.messages is not None and "user" not in (roles[-1:] if roles[-1:] != ["assistant"] else roles[-2:-1]):
            raise ValueError("`messages` needs a user's message last, or before the assistant's last")
        return self

    def as_prompt(self, where: str) -> Prompt:
        messages = [message.model_dump() for message in self.messages or ()]
        answer = messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else self.answer
        text = self.prompt or (self.turns or [""])[0]
        return Prompt(tuple(messages or [{"role": "user", "content": text}]), self.category, answer, where)


def read_jsonl(path: str | Path, *, need_answers: bool = False) -> list[Prompt]:
    """One JSON object a line, of one of the forms

    - `messages`: list of {"role": system | user | assistant, "content": str}; a last one of the assistant is the answer
    - `prompt`: str, and optionally `answer`: str
    - `turns`: list of str, user turns; the first is the prompt, the rest (counted and logged) is not used

    with `category` (str) where evaluation is to tell kinds of traffic apart. need_answers: every line must give one.

    Raises ValueError that names the file and every wrong line (the first 10), empty ones too.
    """
    lines = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).removesuffix(b"\n").split(b"\n")
    prompts, wrong = [], []
    num_unused_turns = 0
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        try:
            read = Line.model_validate_json(line)
        except ValidationError as error:
            wrong.append(f"  {where}: {'; '.join(problem_lines(error, Line))}")
            continue
        prompts.append(read.as_prompt(where))
        num_unused_turns += len(read.turns or [""]) - 1
        if need_answers and prompts[-1].answer is None:
            wrong.append(f"  {where}: no answer: needs `answer`, or `messages` that end with the assistant's")
    if lines == [b""]:
        raise ValueError(f"{path}: holds no prompts")
    if wrong:
        more = [f"  and {len(wrong) - _MAX_NAMED_LINES} more"] if len(wrong) > _MAX_NAMED_LINES else []
        named = "\n".join([*wrong[:_MAX_NAMED_LINES], *more])
        raise ValueError(f"{path}: {len(wrong)} of {len(lines)} lines are wrong\n{named}")
    if num_unused_turns:
        logger.warning("%s: %d later entries of `turns` are not used: only the first is", path, num_unused_turns)
    return prompts


def special_ids(tokenizer: Any) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder.items()
    return frozenset([*tokenizer.all_special_ids, *(token_id for token_id, token in added if token.special)])


class ChatTemplate:
    """Token ids around a turn, as the target's own chat template puts them.

    before, after: around a single user turn, up to where the answer begins; end_id: what the template ends an answer
    with; end_ids: that and the tokenizer's end token. Without a template (`is_chat` is False, a base model) prompts are
    plain text, and answers go on with it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.is_chat = bool(tokenizer.chat_template)
        if not self.is_chat:
            logger.warning("the target has no chat template: prompts are plain text for it to go on with")
            begins = tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
            self.before, self.after = [tokenizer.bos_token_id] if begins else [], []
            self.end_id: int = tokenizer.eos_token_id
            self.end_ids = frozenset({self.end_id})
            return
        user = {"role": "user", "content": _SENTINEL}
        before, after = self._text([user], add_generation_prompt=True).split(_SENTINEL)
        self.before, self.after = self.encode(before), self.encode(after)
        answered = self._text([{**user, "content": "?"}, {"role": "assistant", "content": _SENTINEL}])
        closing = self.encode(answered.split(_SENTINEL)[1])
        closes = bool(closing) and closing[0] in special_ids(tokenizer)
        self.end_id = closing[0] if closes else tokenizer.eos_token_id
        self.end_ids = frozenset({self.end_id, tokenizer.eos_token_id})

    def _text(self, messages: Any, **options: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def render(self, prompt: Prompt) -> list[int]:
        """Token ids of the whole prompt, up to where the target's answer begins.

        Raises ValueError naming the line whose messages the template refuses (an order of roles, a system message), or
        that has more than a user's message where there is no template.
        """
        from jinja2 import TemplateError

        if not self.is_chat:
            if len(prompt.messages) > 1:
                raise ValueError(f"{prompt.where}: the target has no chat template: a prompt is one message, its text")
            return self.before + self.encode(prompt.messages[0]["content"])
        try:
            return self.encode(self._text(list(prompt.messages), add_generation_prompt=True))
        except TemplateError as error:
            raise ValueError(f"{prompt.where}: the target's chat template refuses these messages: {error}") from error

    def answer(self, text: str) -> list[int]:
        """Token ids of an answer that the target did not write, with the token that ends it."""
        return [*self.encode(text), self.end_id]


def begin_user_turns(
    template: ChatTemplate, openings: dict[str, list[str]], shares: dict[str, float], count: int, seed: int
) -> list[list[int]]:
    """Prompts that end inside the user turn, for the target to go on writing as the user (Magpie's way).

    openings: group -> beginnings of user turns; shares: group -> share of all prompts. The rest begins with nothing.
    """
    rng = random.Random(seed)
    encoded = {group: [template.encode(text) for text in texts] for group, texts in openings.items()}
    groups, weights = [*shares, None], [*shares.values(), 1 - sum(shares.values())]
    chosen = rng.choices(groups, weights, k=count)
    return [template.before + (rng.choice(encoded[group]) if group else []) for group in chosen]


def cut_loop(answer: list[int], ngram: int = 8, max_repeats: int = 64) -> list[int]:
    """The answer up to where it has only repeated itself for `max_repeats` tokens (every n-gram seen before)."""
    seen: set[tuple[int, ...]] = set()
    run = 0
    for end in range(ngram, len(answer) + 1):
        gram = tuple(answer[end - ngram : end])
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
    content = json.loads(path.read_text(encoding="utf-8"))
    for key in ("version", "truncation", "padding"):
        content.pop(key, None)
    merges = content.get("model", {}).get("merges")
    if merges:
        content["model"]["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def check_tokenizer(tokenizer: Any, target_dir: str | Path) -> None:
    """Raises ValueError when the tokenizer makes ids that the target's embedding table does not have, special ones
    aside: some targets name tokens of inputs that their text model lacks.
    """
    vocab_size = read_target_config(target_dir)["vocab_size"]
    special = special_ids(tokenizer)
    beyond = {token_id: token for token, token_id in tokenizer.get_vocab().items() if token_id >= vocab_size}
    plain = sorted(token_id for token_id in beyond if token_id not in special)
    if plain:
        raise ValueError(
            f"tokenizer and target do not match: the tokenizer in {target_dir} has {len(plain)} tokens beyond the "
            f"target's vocab_size = {vocab_size} (config.json), the first {beyond[plain[0]]!r} = {plain[0]}: "
            "put the target's own tokenizer files there"
        )


def check_data_fits(folder: str | Path, target_dir: str | Path, batches: PackedBatches | None = None) -> None:
    """Raises ValueError when conversations were tokenized by another tokenizer than the target's, hold ids beyond its
    vocabulary, or are longer than its positions. batches: of the folder; only what these use must be short enough.
    """
    data = batches.data if batches else Conversations.load(folder)
    config = read_target_config(target_dir)
    vocab_size, num_positions = config["vocab_size"], config.get("max_position_embeddings")
    manifest = Path(folder) / "manifest.json"
    theirs = json.loads(manifest.read_text(encoding="utf-8")).get("tokenizer") if manifest.exists() else None
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


# ---- training data from conversations that exist already


def tokenize_file(target_dir: Path, file: Path, out: Path) -> dict[str, int]:
    """Makes a data folder from JSONL lines with answers (`read_jsonl`), without an engine; returns its totals.

    The last answer of a conversation is what is learned; earlier ones are context (and counted). Raises ValueError
    naming wrong lines, messages that the chat template refuses, a tokenizer that is not the target's, and a folder that
    holds data already.
    """
    from transformers import AutoTokenizer

    if any(out.glob("part-*.npz")):
        raise ValueError(f"{out} holds data already: use another folder for --out")
    given = read_jsonl(file, need_answers=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(target_dir)
    check_tokenizer(tokenizer, target_dir)
    template = ChatTemplate(tokenizer)
    answers = [template.answer(prompt.answer or "") for prompt in given]
    made = Conversations.from_lists([template.render(prompt) for prompt in given], answers)
    made.save_part(out, "000")
    roles = [message["role"] for prompt in given for message in prompt.messages]
    totals = {
        "num_conversations": len(given),
        "num_tokens": int(made.lengths.sum()),
        "num_answer_tokens": made.num_answer_tokens,
        "num_earlier_answers": roles.count("assistant"),
    }
    source = {"file": str(file), "sha256": sha256_of(file)}
    write_manifest(out, {"totals": totals, "answers": "as given", "source": source}, target_dir)
    return totals
