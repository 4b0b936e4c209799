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
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from torch import Tensor

from peagle.config import read_json, read_target_config
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
            except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"data: {part} is damaged: {error}") from error
            if arrays["lengths"][-1].shape != arrays["prompt_lengths"][-1].shape:
                raise ValueError(f"data: {part} is damaged: lengths and prompt_lengths are not of one shape")
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
        """skip: batches to pass over (resume). Worker `rank` gets every `num_workers`-th of the others."""
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

    messages: as the chat template takes them, and so `tools`; answer_message: the answer where it is more than its text
    (`reasoning_content`, `tool_calls`); num_unused: messages behind the answer; where: file and line, for messages
    about it.
    """

    messages: tuple[dict[str, Any], ...]
    category: str = "default"
    answer: str | None = None
    where: str = "prompt"
    tools: tuple[dict[str, Any], ...] = ()
    answer_message: dict[str, Any] | None = None
    num_unused: int = 0


class _Record(BaseModel):
    """Part of a line. Unknown keys are errors, but null stands for a key that is not there."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, raw: Any) -> Any:
        return {key: value for key, value in raw.items() if value is not None} if isinstance(raw, dict) else raw


class Function(_Record):
    name: NotBlank
    arguments: dict[str, Any] = Field(default_factory=dict)

    @field_validator("arguments", mode="before")
    @classmethod
    def _parse(cls, arguments: Any) -> Any:
        """OpenAI's API has them as JSON in a string, chat templates take an object."""
        try:
            return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError) as error:
            raise ValueError(f" must be a JSON object: {error}") from error


class ToolCall(_Record):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class ToolFunction(_Record):
    name: NotBlank
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Record):
    type: Literal["function"]
    function: ToolFunction


class Message(_Record):
    """A message as OpenAI's API has it, and `reasoning_content`, as vLLM has it. weight 0: not trained on."""

    role: Literal["system", "user", "assistant", "tool"]
    content: NotBlank | None = None
    reasoning_content: NotBlank | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    weight: Literal[0, 1] | None = None

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        only = {
            "reasoning_content": "assistant",
            "tool_calls": "assistant",
            "weight": "assistant",
            "tool_call_id": "tool",
        }
        wrong = [key for key, role in only.items() if getattr(self, key) is not None and self.role != role]
        if wrong:
            raise ValueError(f".{wrong[0]} is of the role {only[wrong[0]]}, not {self.role}")
        if self.content is None and self.tool_calls is None:
            raise ValueError(" needs content" + (", or tool_calls" if self.role == "assistant" else ""))
        return self

    def as_dict(self) -> dict[str, Any]:
        """As vLLM hands it to the chat template."""
        return {"role": self.role, "content": ""} | self.model_dump(exclude_none=True, exclude={"weight"})


class Line(_Record):
    """A line of a JSONL file of prompts. `answer` goes with `prompt`, `tools` with `messages`; `id`, `task_id`,
    `question_id`, `reference`, `source` and `metadata` say where the line comes from and are not read."""

    messages: list[Message] | None = None
    prompt: NotBlank | None = None
    turns: Annotated[list[NotBlank], Field(min_length=1)] | None = None
    answer: NotBlank | None = None
    tools: Annotated[list[Tool], Field(min_length=1)] | None = None
    category: str = "default"
    id: Any = None
    task_id: Any = None
    question_id: Any = None
    reference: Any = None
    source: Any = None
    metadata: Any = None

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        given = [key for key in ("messages", "prompt", "turns") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"needs one of `messages`, `prompt`, `turns`; has {given or 'none'}")
        if self.answer is not None and self.prompt is None:
            raise ValueError(f"`answer` goes with `prompt`, not with `{given[0]}`")
        if self.tools is not None and self.messages is None:
            raise ValueError(f"`tools` goes with `messages`, not with `{given[0]}`")
        if self.messages is not None:
            end = self.answer_index
            if end == 0 or self.messages[end - 1].role not in ("user", "tool"):
                raise ValueError("`messages` needs a user's message (or a tool's) last, or before the answer")
        return self

    @property
    def answer_index(self) -> int:
        """Place in `messages` of the last answer that is trained on; where none ends them, their end."""
        messages = self.messages or []
        if not messages or messages[-1].role != "assistant":
            return len(messages)
        trained = [index for index, one in enumerate(messages) if one.role == "assistant" and one.weight != 0]
        return trained[-1] if trained else len(messages) - 1

    def as_prompt(self, where: str) -> Prompt:
        if self.messages is None:
            text = self.prompt or (self.turns or [""])[0]
            return Prompt(({"role": "user", "content": text},), self.category, self.answer, where)
        at = self.answer_index
        context = tuple(message.as_dict() for message in self.messages[:at])
        found = [message for message in self.messages[at : at + 1] if message.weight != 0]
        whole = found[0].as_dict() if found else {}
        return Prompt(
            context,
            self.category,
            whole.get("content"),
            where,
            tuple(tool.model_dump(exclude_none=True) for tool in self.tools or ()),
            whole if whole.keys() - {"role", "content"} else None,
            len(self.messages) - at - len(found),
        )


def read_jsonl(path: str | Path, *, need_answers: bool = False) -> list[Prompt]:
    """One JSON object a line, of one of the forms

    - `messages`: list of {"role": system | user | assistant | tool, "content": str}, the assistant's also with
      `reasoning_content`, `tool_calls` and `weight`, and `tools`; if the assistant's is last, the answer is the last of
      them whose `weight` is not 0, and what follows it (counted and logged) is not used
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
            wrong.append(
                f"  {where}: no answer: needs `answer`, or `messages` that end with the assistant's, one of a weight "
                "other than 0"
            )
    if lines == [b""]:
        raise ValueError(f"{path}: holds no prompts")
    if wrong:
        more = [f"  and {len(wrong) - _MAX_NAMED_LINES} more"] if len(wrong) > _MAX_NAMED_LINES else []
        named = "\n".join([*wrong[:_MAX_NAMED_LINES], *more])
        raise ValueError(f"{path}: {len(wrong)} of {len(lines)} lines are wrong\n{named}")
    if num_unused_turns:
        logger.warning("%s: %d later entries of `turns` are not used: only the first is", path, num_unused_turns)
    if num_unused := sum(prompt.num_unused for prompt in prompts):
        logger.warning("%s: %d messages behind the last answer of a weight other than 0 are not used", path, num_unused)
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
        """Raises ValueError for a template that refuses a user's message by itself, or does not repeat it as it is, and
        for a tokenizer without `eos_token` whose template ends an answer with no special token."""
        self.tokenizer = tokenizer
        self.is_chat = bool(tokenizer.chat_template)
        eos = tokenizer.eos_token_id
        self.closes = False
        if not self.is_chat:
            logger.warning("the target has no chat template: prompts are plain text for it to go on with")
            begins = tokenizer.bos_token_id is not None and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
            self.before, self.after = [tokenizer.bos_token_id] if begins else [], []
        else:
            user = {"role": "user", "content": _SENTINEL}
            before, after = self._around([user], add_generation_prompt=True)
            self.before, self.after = self.encode(before), self.encode(after)
            answered = [{**user, "content": "?"}, {"role": "assistant", "content": _SENTINEL}]
            closing = self.encode(self._around(answered)[1])
            self.closes = bool(closing) and closing[0] in special_ids(tokenizer)
        self.end_id: int = closing[0] if self.closes else eos
        if self.end_id is None:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path}: it has no eos_token"
                + (", and its chat_template ends an answer with no special token" if self.is_chat else "")
                + ": set eos_token in tokenizer_config.json to the token that ends the target's answers"
            )
        self.end_ids = frozenset({self.end_id} if eos is None else {self.end_id, eos})

    def _around(self, messages: list[dict[str, Any]], **options: Any) -> tuple[str, str]:
        """What the template writes before and after the sentinel."""
        where = f"tokenizer {self.tokenizer.name_or_path}, chat_template"
        parts = self._text(messages, where, **options).split(_SENTINEL)
        if len(parts) != 2:
            raise ValueError(f"{where}: it writes a message {len(parts) - 1} times, expected once and as it is")
        return parts[0], parts[1]

    def _text(self, messages: Sequence[dict[str, Any]], where: str, **options: Any) -> str:
        """Raises ValueError, beginning with `where`, for messages that the template refuses."""
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        except Exception as error:  # a template is a program, and raises what it likes
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ValueError(
                f"{where}: the target's chat template refuses these messages (roles {roles}): {error}; change the "
                "messages, or chat_template in tokenizer_config.json or chat_template.jinja"
            ) from error

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def render(self, prompt: Prompt) -> list[int]:
        """Token ids of the whole prompt, up to where the target's answer begins.

        Raises ValueError naming the line whose messages the template refuses (an order of roles, a system message) or
        of whose keys it would write nothing, or that has more than a user's message where there is no template.
        """
        if not self.is_chat:
            if len(prompt.messages) > 1 or prompt.tools or prompt.answer_message:
                raise ValueError(
                    f"{prompt.where}: the target has no chat template: a prompt is one message and its answer, texts"
                )
            return self.before + self.encode(prompt.messages[0]["content"])
        is_idle = re.compile(r"messages\.\d+\.(tool_call_id|reasoning_content)").fullmatch
        if lost := [key for key in self.keys_left_out(prompt) if not is_idle(key)]:
            raise ValueError(
                f"{prompt.where}: the target's chat template writes nothing of {', '.join(lost)}: leave out the line, "
                "or take a chat template that does"
            )
        return self.encode(self._text(prompt.messages, prompt.where, **self._tools(prompt), add_generation_prompt=True))

    def _tools(self, prompt: Prompt) -> dict[str, Any]:
        return {"tools": list(prompt.tools)} if prompt.tools else {}

    def keys_left_out(self, prompt: Prompt) -> list[str]:
        """Keys that change nothing of what the template writes: `tools`, `messages.2.reasoning_content` (templates
        leave out that of earlier turns), `answer.tool_calls`."""
        named = {f"messages.{index}": message for index, message in enumerate(prompt.messages)}
        named |= {"answer": prompt.answer_message} if prompt.answer_message else {}
        extra = [(name, key) for name, message in named.items() for key in message.keys() - {"role", "content"}]
        if not extra and not prompt.tools:
            return []
        tools = self._tools(prompt)
        whole = self._text(list(named.values()), prompt.where, **tools)

        def is_idle(messages: dict[str, dict[str, Any]], tools: dict[str, Any]) -> bool:
            try:
                return self._text(list(messages.values()), prompt.where, **tools) == whole
            except ValueError:  # the template needs it
                return False

        found = ["tools"] if tools and is_idle(named, {}) else []
        for name, key in sorted(extra):
            without = {other: value for other, value in named[name].items() if other != key}
            found += [f"{name}.{key}"] if is_idle({**named, name: without}, tools) else []
        return found

    def answer(self, text: str) -> list[int]:
        """Token ids of an answer that the target did not write, with the token that ends it."""
        return [*self.encode(text), self.end_id]

    def render_answer(self, prompt: Prompt) -> list[int]:
        """Token ids of the prompt's answer, with the token that ends it, as the target would write it.

        Raises ValueError naming the line whose answer the template does not write behind the prompt.
        """
        if prompt.answer_message is None:
            return self.answer(prompt.answer or "")
        options = self._tools(prompt)
        begin = self._text(prompt.messages, prompt.where, **options, add_generation_prompt=True)
        whole = self._text([*prompt.messages, prompt.answer_message], prompt.where, **options)
        ids = self.encode(whole.removeprefix(begin))
        if not whole.startswith(begin) or (self.closes and self.end_id not in ids):
            raise ValueError(
                f"{prompt.where}: the target's chat template does not write the answer behind the prompt and end it, "
                "so what the target would write is not known: leave out the line"
            )
        if not self.closes:
            return [*ids, self.end_id]
        return ids[: len(ids) - ids[::-1].index(self.end_id)]


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
    """The target's tokenizer, checked (`check_tokenizer`). Raises ValueError for files that cannot be read as one."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(target_dir)
    except Exception as error:  # transformers and tokenizers raise what they like, Exception itself too
        raise ValueError(f"the tokenizer in {target_dir} cannot be loaded: {error}") from error
    check_tokenizer(tokenizer, target_dir)
    return tokenizer


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
    theirs = read_json(manifest, "data").get("tokenizer") if manifest.exists() else None
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

    The last answer of a conversation, of a weight other than 0, is what is learned; earlier ones are context (and
    counted), and reasoning of theirs that the template leaves out is counted. Raises ValueError naming wrong lines,
    messages that the chat template refuses or writes nothing of, a tokenizer that is not the target's, and a folder
    that holds data already.
    """
    if any(out.glob("part-*.npz")):
        raise ValueError(f"{out} holds data already: use another folder for --out")
    given = read_jsonl(file, need_answers=True)
    template = ChatTemplate(load_tokenizer(target_dir))
    answers = [template.render_answer(prompt) for prompt in given]
    made = Conversations.from_lists([template.render(prompt) for prompt in given], answers)
    made.save_part(out, "000")
    roles = [message["role"] for prompt in given for message in prompt.messages]
    totals = {
        "num_conversations": len(given),
        "num_tokens": int(made.lengths.sum()),
        "num_answer_tokens": made.num_answer_tokens,
        "num_earlier_answers": roles.count("assistant"),
        "num_unused_messages": sum(prompt.num_unused for prompt in given),
        "num_reasoning_left_out": sum(
            key.endswith(".reasoning_content")
            for prompt in given
            if template.is_chat
            for key in template.keys_left_out(prompt)
        ),
    }
    source = {"file": str(file), "sha256": sha256_of(file)}
    write_manifest(out, {"totals": totals, "answers": "as given", "source": source}, target_dir)
    return totals
