"""Bounds of a grammar that are read from its text: size, nesting, and every number of repetitions.

One pass over the text, in linear time. Imports no vLLM and compiles nothing: `peagle.vllm.grammar_checker` limits the
cost of compiling a grammar within these bounds.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

CONSTRAINTS = ("json", "regex", "choice", "grammar", "structural_tag")
"""Fields of `structured_outputs` that hold a grammar."""

_COUNTS = frozenset(
    {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains", "maxContains"}
)
_DATA = frozenset({"const", "default", "enum", "examples"})
"""Keywords of a schema whose values are data: their numbers are no repetitions."""
_REGEXES = frozenset({"pattern", "regex", "whitespace_pattern"})

# No pattern backtracks, and an unfinished string or class matches up to the end of the text: linear time for any text.
_BRACES = r"(?P<repeat>\{\s*+\d*+\s*+(?:,\s*+\d*+\s*+)?+\})"
_CLASS = r"\[(?:[^\]\\]|\\.)*+\]?"
_GROUPS = r"(?P<open>\()|(?P<close>\))"
_STRINGS = r"""\"(?:[^\"\\\n]|\\.)*+\"?|'(?:[^'\\\n]|\\.)*+'?"""
_NAMES = r"(?P<name>[A-Za-z_][\w-]*+)|(?P<number>\d++)"
_REGEX_TOKEN = re.compile(
    rf"(?P<atom>\\[xu]\{{\w{{0,8}}\}}|\\.|{_CLASS}|[^\\\[\](){{}}?+*]++)|{_BRACES}|{_GROUPS}", re.DOTALL
)
_EBNF_TOKEN = re.compile(rf"(?P<atom>{_STRINGS}|{_CLASS}|#[^\n]*+)|{_BRACES}|{_GROUPS}|{_NAMES}", re.DOTALL)
_LARK_TOKEN = re.compile(
    rf"(?P<atom>{_STRINGS}|//[^\n]*+)|/(?P<regex>(?:[^/\\\n]|\\.)++)/?|(?P<range>~\s*+\d++(?:\s*+\.\.\s*+\d++)?+)|"
    rf"{_BRACES}|(?P<open>[(\[])|(?P<close>[)\]])|{_NAMES}",
    re.DOTALL,
)
_EBNF_RULE = re.compile(r"(?<![\w.-])([A-Za-z_][\w.-]*+)\s*+::=")
_LARK_RULE = re.compile(r"^[ \t]*+[?!]?([A-Za-z_]\w*+)(?:\.-?\d++)?+[^\n:\"/]*+:", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class GrammarLimits:
    """Limits of one grammar (a schema, regular expression, EBNF, structural tag or list of choices).

    Attributes:
        max_chars: characters of its text.
        max_choices: entries of a list of choices.
        max_depth: nesting of lists and objects of a schema, also through `$ref`.
        max_repeats: largest number of repetitions: items, lengths, properties, `{m,n}`.
        max_product: product of nested numbers of repetitions.
        max_cpu_s, max_memory_bytes: of its compilation.
    """

    max_chars: int = 64 * 1024
    max_choices: int = 1000
    max_depth: int = 64
    max_repeats: int = 65_536
    max_product: int = 10_000_000
    max_cpu_s: float = 10.0
    max_memory_bytes: int = 100 * 2**20


class GrammarError(Exception):
    """A grammar that exceeds a bound.

    Attributes:
        field: path of the refused value, such as `json.properties.a.maxItems`.
        problem: the predicate of a sentence about it.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field, self.problem = field, problem


def check_grammar(field: str, value: Any, limits: GrammarLimits, kind: str = "json") -> None:
    """Check one grammar.

    Args:
        field: its name in errors.
        kind: one of `CONSTRAINTS`: how `value` is read.

    Raises:
        GrammarError: for the first bound that it exceeds.
    """
    if kind == "choice" and isinstance(value, list) and len(value) > limits.max_choices:
        raise GrammarError(field, f"has {len(value)} choices, at most {limits.max_choices} are possible")
    if isinstance(value, str) and len(value) > limits.max_chars:
        raise GrammarError(field, f"has {len(value)} characters, at most {limits.max_chars} are possible")
    if isinstance(value, str) and kind in ("json", "structural_tag"):
        try:
            value = json.loads(value)
        except (RecursionError, ValueError) as error:
            raise GrammarError(field, f"is no JSON: {error}") from None
    _check_size(field, value, limits)
    walk = _Walk(value, limits)
    if kind not in ("choice", "regex", "grammar"):
        walk.measure(value, field, 0)
    elif kind != "choice" and isinstance(value, str):
        (walk.check_regex if kind == "regex" else walk.check_rules)(field, value)


def check_structured_outputs(field: str, structured: Mapping[str, Any], limits: GrammarLimits) -> None:
    """`check_grammar` of each constraint in the fields of vLLM's `StructuredOutputsParams`."""
    for kind in CONSTRAINTS:
        if structured.get(kind) is not None:
            check_grammar(f"{field}.{kind}", structured[kind], limits, kind)
    if (pattern := structured.get("whitespace_pattern")) is not None:
        check_grammar(f"{field}.whitespace_pattern", pattern, limits, "regex")


def _check_size(field: str, value: Any, limits: GrammarLimits) -> None:
    """Characters (of texts, keys and numbers, and one for each value) and nesting. Stops at the first excess."""
    num_chars, depth, level = 0, 0, [value]
    while level:
        below: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                num_chars += 2 + sum(len(key) for key in part if isinstance(key, str))
                below.extend(part.values())
            elif isinstance(part, list):
                num_chars += 2
                below.extend(part)
            else:
                num_chars += 1 + len(part if isinstance(part, str) else str(part))
            if num_chars + len(below) > limits.max_chars:
                raise GrammarError(field, f"has more than {limits.max_chars} characters")
        depth += 1
        if below and depth > limits.max_depth:
            raise GrammarError(field, f"is nested more than {limits.max_depth} levels deep")
        level = below


class _Walk:
    """One pass over a schema. Nested numbers of repetitions are multiplied, also through `$ref`. A schema or rule that
    refers to itself names no number for that, and counts once."""

    def __init__(self, root: Any, limits: GrammarLimits) -> None:
        self._root, self._limits = root, limits
        self._products: dict[int, int] = {}  # by the id of a part of `root`

    def measure(self, part: Any, path: str, depth: int) -> int:
        """The largest product of nested numbers of repetitions in `part`, which stands at `path`."""
        if not isinstance(part, dict | list):
            return 1
        if (found := self._products.get(id(part))) is not None:
            return found
        if depth > self._limits.max_depth:
            raise GrammarError(path, f"is nested more than {self._limits.max_depth} levels deep, with $ref")
        self._products[id(part)] = 1
        if isinstance(part, list):
            product = max((self.measure(one, f"{path}.{n}", depth + 1) for n, one in enumerate(part)), default=1)
        else:
            product = self._measure_object(part, path, depth)
        self._products[id(part)] = product
        return product

    def _measure_object(self, part: dict[str, Any], path: str, depth: int) -> int:
        repeats, inner = 1, [1]
        counts = {*_COUNTS, "min", "max"} if part.get("type") == "repeat" else _COUNTS  # a format of structural tags
        for key, item in part.items():
            where = f"{path}.{key}"
            if key in counts and isinstance(item, int | float):
                repeats = max(repeats, int(self._count(item, where, f"{item:.12g}")))
            elif key in _DATA:
                continue
            elif not isinstance(item, str):
                if key == "patternProperties" and isinstance(item, dict):
                    inner += [self.check_regex(where, pattern) for pattern in item]
                inner.append(self.measure(item, where, depth + 1))
            elif key == "$ref":
                inner.append(self.measure(self._resolve(item), where, depth + 1))
            elif key in _REGEXES:
                inner.append(self.check_regex(where, item))
            elif key == "grammar":
                inner.append(self.check_rules(where, item))
        return self._multiply(repeats, max(inner), path)

    def _resolve(self, pointer: str) -> Any:
        part = self._root
        for step in pointer.removeprefix("#").strip("/").split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(part, dict) and name in part:
                part = part[name]
            elif name:
                return None  # the compiler names the error
        return part

    def check_regex(self, field: str, pattern: str) -> int:
        """The largest product of nested repetitions of a regular expression."""
        return self._scan(field, _REGEX_TOKEN.finditer(pattern), lambda name: 1)

    def check_rules(self, field: str, text: str) -> int:
        """The largest product of nested repetitions of a grammar in EBNF or Lark, through the names of its rules."""
        rule, token = (_EBNF_RULE, _EBNF_TOKEN) if "::=" in text else (_LARK_RULE, _LARK_TOKEN)
        heads = list(rule.finditer(text))
        ends = [*(head.start() for head in heads[1:]), len(text)]
        bodies: dict[str, str] = {}
        for head, end in zip(heads, ends, strict=False):
            bodies[head[1]] = bodies.get(head[1], "") + text[head.end() : end]
        products: dict[str, int] = {}

        def measure(name: str) -> int:
            if name in bodies and name not in products:
                products[name] = 1
                products[name] = self._scan(field, token.finditer(bodies[name]), measure)
            return products.get(name, 1)

        try:
            return max([self._scan(field, token.finditer(text[: heads[0].start() if heads else None]), lambda name: 1),
                        *map(measure, bodies)])  # fmt: skip
        except RecursionError:
            raise GrammarError(field, "has rules that refer to one another too deeply") from None

    def _scan(self, field: str, tokens: Iterator[re.Match[str]], measure: Callable[[str], int]) -> int:
        groups, last = [1], 1
        for token in tokens:
            kind, text = token.lastgroup, token[0]
            if kind == "open":
                groups.append(1)
                last = 1
            elif kind == "close":
                last = groups.pop() if len(groups) > 1 else 1
                groups[-1] = max(groups[-1], last)
            elif kind in ("repeat", "range", "number"):  # a number: of a schema within a Lark grammar
                found = [self._count_text(digits, field) for digits in re.findall(r"\d+", text)]
                if kind != "number" and found:
                    last = self._multiply(last, max(1, *found), field)
                    groups[-1] = max(groups[-1], last)
            elif kind in ("regex", "name"):
                last = self.check_regex(field, token["regex"]) if kind == "regex" else measure(text)
                groups[-1] = max(groups[-1], last)
            else:
                last = 1
        return max(groups)

    def _count_text(self, digits: str, field: str) -> int:
        # Python refuses to read thousands of digits.
        digits = digits.lstrip("0")[:20] or "0"
        return int(self._count(int(digits), field, digits))

    def _count(self, number: float, field: str, shown: str) -> float:
        if not number <= self._limits.max_repeats:
            raise GrammarError(field, f"repeats {shown} times, at most {self._limits.max_repeats} are possible")
        return number

    def _multiply(self, outer: int, inner: int, field: str) -> int:
        product, most = outer * inner, self._limits.max_product
        if product > most:
            raise GrammarError(field, f"has nested repetitions of {product} in all, at most {most} are possible")
        return product
