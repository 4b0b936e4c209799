"""Conversations as users have them: read from files and Hugging Face data sets, written by the target's chat template.

A row has one of the forms of `Row`. A wrong row is named by its number; a few of them are left out, many are an error.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import logging
import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from tqdm import tqdm

from peagle.schema import problem_lines
from peagle.train.data import Conversations, load_tokenizer, read_manifest, special_ids, write_manifest
from peagle.train.recipe import Recipe

logger = logging.getLogger(__name__)

MAX_WRONG_SHARE = 0.05
"""More wrong rows of a source than this share of them are an error."""

_MAX_NAMED_ROWS = 10
_SENTINEL = "\u2063turn\u2063"

NotBlank = Annotated[str, Field(pattern=r"\S")]
Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Messages up to where an answer begins, the class of traffic they stand for, and the answer if one is given.

    messages: as the chat template takes them, and so `answer` and `tools`; is_whole: the answer ended by itself;
    is_targets: the target wrote it to these messages; where: file and line, for messages about it.
    """

    messages: tuple[dict[str, Any], ...]
    category: str = "default"
    answer: dict[str, Any] | None = None
    where: str = "prompt"
    tools: tuple[dict[str, Any], ...] = ()
    is_whole: bool = True
    is_targets: bool = False

    def with_answer(self, message: Message, *, is_whole: bool = True, is_targets: bool = False) -> Prompt:
        return dataclasses.replace(self, answer=message.as_dict(), is_whole=is_whole, is_targets=is_targets)


class _Record(BaseModel):
    """Part of a row. Unknown keys are errors, but null stands for a key that is not there."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, raw: Any) -> Any:
        return _without_nulls(raw)


def _without_nulls(raw: Any) -> Any:
    return {key: value for key, value in raw.items() if value is not None} if isinstance(raw, dict) else raw


def _from_json(value: Any) -> Any:
    """Tools and arguments are JSON in a string in OpenAI's API and in many data sets; chat templates take objects."""
    try:
        return json.loads(value or "{}") if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f" must be JSON: {error}") from error


class Function(_Record):
    name: NotBlank
    arguments: dict[str, Any] = Field(default_factory=dict)

    _parse = field_validator("arguments", mode="before")(_from_json)


def _from_parts(content: Any) -> Any:
    """OpenAI's content may be a list of parts; those of text are one text."""
    is_text = isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    )
    return "".join(str(part.get("text", "")) for part in content) if is_text else content


class ToolCall(_Record):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(_Record):
    """A message as OpenAI's API has it, and `reasoning_content`, as vLLM has it. weight 0: not trained on."""

    role: Literal["system", "user", "assistant", "tool"]
    content: NotBlank | None = None
    reasoning_content: NotBlank | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    weight: Literal[0, 1] | None = None

    _join = field_validator("content", mode="before")(_from_parts)

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.tool_calls is None and self.reasoning_content is None:
            raise ValueError(" needs content" + (", or tool_calls" if self.role == "assistant" else ""))
        return self

    def as_dict(self) -> dict[str, Any]:
        """As vLLM hands it to the chat template."""
        return {"role": self.role, "content": ""} | self.model_dump(exclude_none=True, exclude={"weight"})


_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "observation": "tool"}
_LOADERS = {".parquet": "parquet", ".csv": "csv", ".json": "json"}
_FORMS = ("messages", "conversations", "instruction", "prompt", "turns")
_BESIDE: dict[str, tuple[type, ...]] = {"tools": (list, str), "category": (str,)}
_COLUMNS = frozenset({*_FORMS, *_BESIDE, "input", "output", "answer"})


class Row(_Record):
    """A conversation, from the first of these forms that the row has:

    - `messages`: list of {"role": system | user | assistant | tool, "content": text}, the assistant's also with
      `reasoning_content`, `tool_calls` and `weight`
    - `conversations` (ShareGPT): list of {"from": system | human | gpt, "value": str}
    - `instruction` (Alpaca), and optionally `input` and `output`
    - `prompt`, and optionally `answer`
    - `turns`: list of user turns, of which the first is the prompt

    `tools` and `category` (for evaluation to tell kinds of traffic apart) go with each; other columns are not read.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = Field(default_factory=list)
    category: str = "default"

    _parse = field_validator("tools", mode="before")(_from_json)

    @model_validator(mode="before")
    @classmethod
    def _from_form(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        row = _without_nulls(raw)
        form = next((form for form in _FORMS if form in row), None)
        if form is None:
            raise ValueError(f"needs one of {', '.join(_FORMS)}; has {', '.join(map(str, row)) or 'no column'}")
        given = row[form]
        if form in ("messages", "conversations") and isinstance(given, list):
            given = [_from_sharegpt(turn) for turn in given]
        elif form not in ("messages", "conversations"):
            if form == "turns" and isinstance(given, list) and given:
                given = given[0]
            if form == "instruction" and row.get("input"):
                given = f"{given}\n\n{row['input']}"
            answer = row.get("output" if form == "instruction" else "answer")
            given = [{"role": "user", "content": given}]
            given += [] if answer is None else [{"role": "assistant", "content": answer}]
        kept = {key: row[key] for key, kind in _BESIDE.items() if row.get(key) and isinstance(row[key], kind)}
        return {"messages": given, **kept}

    def as_prompt(self, where: str, *, need_answer: bool) -> Prompt:
        """Its last answer of a weight other than 0 is the answer, where it ends with one or an answer is needed."""
        at = len(self.messages)
        if need_answer or (self.messages and self.messages[-1].role == "assistant"):
            answers = [index for index, one in enumerate(self.messages) if one.role == "assistant"]
            trained = [index for index in answers if self.messages[index].weight != 0]
            if need_answer and not trained:
                raise ValueError(
                    "no answer: needs one of the assistant's, of a weight other than 0; beside `prompt` it stands in "
                    "`answer`, beside `instruction` in `output`"
                )
            at = (trained or answers)[-1]
        if at == 0 or self.messages[at - 1].role not in ("user", "tool"):
            raise ValueError("needs a user's message (or a tool's) last, or before the answer")
        context = tuple(message.as_dict() for message in self.messages[:at])
        prompt = Prompt(context, self.category, where=where, tools=tuple(self.tools))
        is_answered = at < len(self.messages) and self.messages[at].weight != 0
        return prompt.with_answer(self.messages[at]) if is_answered else prompt


def _parse_line(line: bytes) -> Any:
    try:
        return pydantic_core.from_json(line)
    except ValueError as error:
        raise ValueError(f"Invalid JSON: {error}") from error


def _from_sharegpt(turn: Any) -> Any:
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    role = turn["from"]
    named = {"role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": turn.get("value")}
    return named | {key: value for key, value in turn.items() if key == "weight"}


def read_rows(source: str | Path) -> Iterator[tuple[str, Any]]:
    """Each row of a source as read, with its place, such as `chats.jsonl:7`.

    source: a file of JSON lines (a row is then still text); a Parquet, CSV or JSON file, a folder, or the name of a
    Hugging Face data set, all of which the package `datasets` loads. `SOURCE:SPLIT` names a split or a part of one,
    such as `train[:1000]`, and ORG/NAME/SUBSET a data set's configuration.

    Raises ValueError for what `datasets` cannot load, or where it is not installed; OSError.
    """
    path = Path(source)
    if path.is_file() and path.suffix not in _LOADERS:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).removesuffix(b"\n").split(b"\n")
        yield from ((f"{path}:{number}", line) for number, line in enumerate(lines, 1) if lines != [b""])
        return
    name, _, split = (str(source), "", "") if path.exists() else str(source).partition(":")
    what: dict[str, Any] = {"path": name}
    if path.is_file():
        what = {"path": _LOADERS[path.suffix], "data_files": name}
    elif not Path(name).is_dir():
        named = re.fullmatch(r"(?P<path>[\w.-]+/[\w.-]+)(/(?P<name>[\w.-]+))?(?<!\.jsonl)", name)
        if named is None:
            raise FileNotFoundError(2, "No such file, folder or name of a Hugging Face data set", str(source))
        what = named.groupdict()
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{source}: it takes the package datasets to read this: pip install '.[train]'; a file of JSON lines "
            "(.jsonl) needs none"
        ) from error
    try:
        loaded = datasets.load_dataset(**what, split=split or "train")
    except Exception as error:  # what readers of files raise comes through as it is
        raise ValueError(f"{source}: the package datasets cannot load it: {error}") from error
    yield from ((f"{source} row {number}", row) for number, row in enumerate(loaded))


def keep_good(items: Iterable[Item], make: Callable[[Item], Made], source: str | Path) -> list[Made]:
    """What `make` makes of each item. Refused items are left out, and the first 10 are logged.

    Raises ValueError, with the same text, where more than `MAX_WRONG_SHARE` of them are refused, or there are none.
    """
    good, wrong = [], []
    for item in tqdm(items, desc=str(source), unit="row", disable=None, leave=False):
        try:
            good.append(make(item))
        except ValueError as error:
            wrong.append(f"  {error}")
    num_rows = len(good) + len(wrong)
    if not num_rows:
        raise ValueError(f"{source}: holds no conversations")
    if wrong:
        more = [f"  and {len(wrong) - _MAX_NAMED_ROWS} more"] if len(wrong) > _MAX_NAMED_ROWS else []
        said = "\n".join([f"{source}: {len(wrong)} of {num_rows} rows are wrong", *wrong[:_MAX_NAMED_ROWS], *more])
        if len(wrong) > MAX_WRONG_SHARE * num_rows:
            raise ValueError(said)
        logger.warning("%s\n  they are left out", said)
    return good


def read_prompts(source: str | Path, *, need_answers: bool = False) -> list[Prompt]:
    """The conversations of a source that `read_rows` knows. Columns that are not read are logged.

    need_answers: every row must give one. Raises ValueError as `keep_good`, and as `read_rows`.
    """
    unread: set[str] = set()

    def make(read: tuple[str, Any]) -> Prompt:
        where, raw = read
        try:
            raw = _parse_line(raw) if isinstance(raw, bytes) else raw
            row = Row.model_validate(raw)
            unread.update(_without_nulls(raw).keys() - _COLUMNS)
            return row.as_prompt(where, need_answer=need_answers)
        except ValueError as error:
            problems = problem_lines(error, Row) if isinstance(error, ValidationError) else [str(error)]
            raise ValueError(f"{where}: {'; '.join(problems)}") from error

    prompts = keep_good(read_rows(source), make, source)
    if unread:
        logger.warning("%s: columns that are not read: %s", source, ", ".join(sorted(unread)))
    return prompts


class Rendered(NamedTuple):
    """Token ids of a prompt, and of its answer with the token that ends it."""

    prompt: list[int]
    answer: list[int]


class ChatTemplate:
    """Token ids around a turn, as the target's own chat template puts them.

    before, after: around a single user turn, up to where the answer begins; end_id: what the template ends an answer
    with; end_ids: that and the tokenizer's end token.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Raises ValueError for a tokenizer without a template, a template that refuses a user's message by itself, or
        does not repeat it as it is, and a tokenizer without `eos_token` whose template ends an answer with no special
        token."""
        self.tokenizer, eos = tokenizer, tokenizer.eos_token_id
        if not tokenizer.chat_template:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path}: it has no chat template, so how a conversation is written is not "
                "known: put chat_template.jinja beside it"
            )
        user = {"role": "user", "content": _SENTINEL}
        before, after = self._around([user], add_generation_prompt=True)
        self.before, self.after = self.encode(before), self.encode(after)
        answered = [{**user, "content": "?"}, {"role": "assistant", "content": _SENTINEL}]
        closing = self.encode(self._around(answered)[1])
        self.closes = bool(closing) and closing[0] in special_ids(tokenizer)
        self.end_id: int = closing[0] if self.closes else eos
        if self.end_id is None:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path}: it has no eos_token, and its chat_template ends an answer with "
                "no special token: set eos_token in tokenizer_config.json to the token that ends the target's answers"
            )
        self.end_ids = frozenset({self.end_id} if eos is None else {self.end_id, eos})

    def _around(self, messages: list[dict[str, Any]], **options: Any) -> tuple[str, str]:
        """What the template writes before and after the sentinel."""
        where = f"tokenizer {self.tokenizer.name_or_path}, chat_template"
        parts = self._text(Prompt((), where=where), messages, **options).split(_SENTINEL)
        if len(parts) != 2:
            raise ValueError(f"{where}: it writes a message {len(parts) - 1} times, expected once and as it is")
        return parts[0], parts[1]

    def _text(self, prompt: Prompt, messages: Iterable[dict[str, Any]], **options: Any) -> str:
        """These messages with the prompt's tools. Raises ValueError, beginning with the prompt's place, for messages
        that the template refuses."""
        messages = list(messages)
        options |= {"tools": list(prompt.tools)} if prompt.tools else {}
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:  # a template is a program, and raises what it likes
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ValueError(
                f"{prompt.where}: the target's chat template refuses these messages (roles {roles}): {error}; change "
                "the messages, or chat_template in tokenizer_config.json or chat_template.jinja"
            ) from error

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _check_is_written(self, prompt: Prompt) -> None:
        """Raises ValueError naming the line of whose tools or messages' keys the template writes nothing, but for
        reasoning of earlier turns and ids of calls, which templates may leave out.
        """
        named = {f"messages.{index}": message for index, message in enumerate(prompt.messages)}
        named |= {"answer": prompt.answer} if prompt.answer else {}
        without = {"tools": (dataclasses.replace(prompt, tools=()), named)} if prompt.tools else {}
        for name, message in named.items():
            may_be_idle = {"role", "content"} | (set() if name == "answer" else {"tool_call_id", "reasoning_content"})
            for key in sorted(message.keys() - may_be_idle):
                others = {other: value for other, value in message.items() if other != key}
                without[f"{name}.{key}"] = prompt, {**named, name: others}
        if not without:
            return
        whole = self._text(prompt, named.values())

        def is_idle(prompt: Prompt, messages: dict[str, dict[str, Any]]) -> bool:
            try:
                return self._text(prompt, messages.values()) == whole
            except ValueError:  # the template needs it
                return False

        lost = [name for name, changed in without.items() if is_idle(*changed)]
        if lost:
            raise ValueError(
                f"{prompt.where}: the target's chat template writes nothing of {', '.join(lost)}: leave out the line, "
                "or take a chat template that does"
            )

    def render(self, prompt: Prompt) -> Rendered:
        """Token ids of the whole prompt, up to where the target's answer begins, and of its answer.

        Raises ValueError naming the line whose messages the template refuses (an order of roles, a system message), of
        whose keys it would write nothing, or whose answer it does not write behind the prompt.
        """
        self._check_is_written(prompt)
        begin = self._text(prompt, prompt.messages, add_generation_prompt=True)
        return Rendered(self.encode(begin), self._render_answer(prompt, begin))

    def _render_answer(self, prompt: Prompt, begin: str) -> list[int]:
        """With the token that ends it, as the target would write it behind `begin`."""
        answer, ends = prompt.answer, [self.end_id] if prompt.is_whole else []
        if answer is None:
            return ends
        last = "content" if answer["content"] else "reasoning_content"
        said = answer.get(last, "")
        up_to = ""  # the end of what was said
        if said:
            marked = self._behind(begin, prompt, {**answer, last: said + _SENTINEL})
            up_to = (marked or "").partition(_SENTINEL)[0]
        is_written, adds_nothing = up_to.endswith(said.lstrip()), up_to.strip() == said.strip()
        has_text_alone = not answer.keys() - {"role", "content"}
        if prompt.is_targets and has_text_alone and (adds_nothing or not (prompt.is_whole and is_written)):
            return [*self.encode(said), *ends]  # a service that parses no reasoning sends it within the content
        # What a template writes behind a cut text, such as the end of the reasoning, is not the target's. A template
        # without a token that ends an answer writes nothing of the target's behind a whole text either.
        is_cut = bool(said) and not (prompt.is_whole and (self.closes or answer.get("tool_calls")))
        text = up_to if is_cut else self._behind(begin, prompt, answer)
        ids, cuts_end = self.encode(text or ""), self.closes and not is_cut
        if text is None or not is_written or (cuts_end and self.end_id not in ids):
            raise ValueError(
                f"{prompt.where}: the target's chat template does not write the answer behind the prompt and end "
                "it, so what the target would write is not known: leave out the line"
            )
        ids = ids[: len(ids) - 1 - ids[::-1].index(self.end_id)] if cuts_end else ids
        return [*ids, *ends]

    def _behind(self, begin: str, prompt: Prompt, answer: dict[str, Any]) -> str | None:
        """What the template writes of an answer behind `begin`; None where it does not begin so."""
        whole = self._text(prompt, [*prompt.messages, answer])
        return whole.removeprefix(begin) if whole.startswith(begin) else None


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


def tokenize_source(target_dir: Path, source: str | Path, out: Path) -> dict[str, int]:
    """Makes a data folder from conversations with answers, without an engine; returns its totals. The last answer is
    what is learned; earlier ones are context. Raises ValueError as `read_prompts` and `tokenize_prompts`."""
    check_is_new(out)
    return tokenize_prompts(target_dir, read_prompts(source, need_answers=True), source, out)


def make_data(recipe: Recipe) -> None:
    """Makes the recipe's `data` of its `conversations`, where these are named and `data` is not there yet. Raises
    ValueError for data of another source."""
    if recipe.conversations is None:
        return
    if not any(Path(recipe.data).glob("part-*.npz")):
        totals = tokenize_source(recipe.target_dir(), recipe.conversations, Path(recipe.data))
        logger.info("%s: %s", recipe.data, json.dumps(totals))
        return
    source = read_manifest(recipe.data).get("source", "something else")
    if Path(source).resolve() != Path(recipe.conversations).resolve():
        raise ValueError(
            f"data: {recipe.data} was made of {source}, not of the recipe's conversations, "
            f"{recipe.conversations}: name another folder, or remove this one"
        )


def check_is_new(out: Path) -> None:
    """Raises ValueError where a folder holds data already."""
    if any(out.glob("part-*.npz")):
        raise ValueError(f"{out} holds data already: use another folder")


def tokenize_prompts(
    target_dir: Path, given: list[Prompt], source: str | Path, out: Path, **manifest: Any
) -> dict[str, int]:
    """Makes a data folder of prompts with their answers; returns its totals.

    manifest: more entries of `manifest.json`. Raises ValueError for a tokenizer that is not the target's, and where the
    chat template refuses the messages of many rows, or writes nothing of some of their keys.
    """
    template = ChatTemplate(load_tokenizer(target_dir))
    good = keep_good(given, lambda prompt: (prompt, template.render(prompt)), source)
    kept, rendered = zip(*good, strict=True)
    made = Conversations.from_lists([one.prompt for one in rendered], [one.answer for one in rendered])
    made.save_part(out, "000")
    totals = {
        "num_conversations": len(kept),
        "num_tokens": int(made.lengths.sum()),
        "num_answer_tokens": made.num_answer_tokens,
    }
    entries = {"totals": totals, "source": str(source), "categories": [prompt.category for prompt in kept]}
    write_manifest(out, entries | manifest, target_dir)
    return totals
