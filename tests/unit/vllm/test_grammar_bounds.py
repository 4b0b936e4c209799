"""What a grammar asks for is read off its text, and each number in it has a bound."""

import contextlib
import json
from typing import Any

import pytest

from peagle.vllm.grammar_bounds import GrammarError, GrammarLimits, check_grammar, check_structured_outputs

LIMITS = GrammarLimits(max_chars=2000, max_choices=10, max_depth=20, max_repeats=1000, max_product=100_000)


def nested(num_objects: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(num_objects):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def refused(kind: str, value: Any) -> str:
    """The error, "" where there is none."""
    try:
        check_grammar("f", value, LIMITS, kind)
    except GrammarError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["minItems", "maxLength", "minProperties", "maxContains"])
@pytest.mark.parametrize("number", [1001, 1e300, 10**18])
def test_each_number_of_a_schema_has_a_bound(name: str, number: float) -> None:
    schema = {"type": "object", "properties": {"a": {"anyOf": [{}, {name: number}]}}}
    assert refused("json", schema).startswith(
        f"f.properties.a.anyOf.1.{name} repeats {number:.12g} times, at most 1000"
    )
    assert refused("json", json.dumps(schema)).startswith("f.properties.a.anyOf.1.")
    assert refused("json", {name: 1000}) == ""


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"pattern": "a{1001}"}, "f.pattern repeats 1001 times"),
        ({"patternProperties": {"a{1001}": {}}}, "f.patternProperties repeats 1001 times"),
        ({"maxItems": 1000, "items": {"maxItems": 101, "items": {}}}, "f has nested repetitions of 101000 in all"),
        ({"maxItems": 1000, "items": {"pattern": "(a{10}){11}"}}, "f has nested repetitions of 110000 in all"),
        (
            {
                "$defs": {
                    "a/b": {"items": {"$ref": "#/$defs/c"}, "minItems": 1000},
                    "c": {"type": "string", "maxLength": 500},
                },
                "properties": {"x": {"$ref": "#/$defs/a~1b"}},
            },
            "f.$defs.a/b has nested repetitions of 500000 in all, at most 100000",
        ),
        ({"maxItems": 1000, "items": {"$ref": "#"}}, ""),  # how often it refers to itself has no number
        ({"properties": {"a": {"maxLength": 1000}, "b": {"maxLength": 1000}}, "maxProperties": 100}, ""),
        ({"enum": [{"minItems": 10**9}], "const": {"maxLength": 10**9}, "default": {"maxItems": 10**9}}, ""),
        ({"properties": {"maxItems": {"type": "integer", "maximum": 10**9}}}, ""),
        ({"$ref": "#/nowhere"}, ""),
        (nested(9), ""),
        (nested(10), "f is nested more than 20 levels deep"),
        ({"enum": ["a" * 2000]}, "f has more than 2000 characters"),
        ({"enum": list(range(2000))}, "f has more than 2000 characters"),
        ("{", "f is no JSON"),
        ("[" * 1900, "f is no JSON"),
        (" " * 2001, "f has 2001 characters, at most 2000"),
    ],
)
def test_a_schema(schema: Any, error: str) -> None:
    found = refused("json", schema)
    assert found.startswith(error)
    assert bool(found) == bool(error)


def test_a_chain_of_references_has_a_bound() -> None:
    chain = {f"a{n}": {"items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(30)}
    assert "levels deep, with $ref" in refused("json", {"$defs": chain, "$ref": "#/$defs/a0"})


@pytest.mark.parametrize(
    ("regex", "error"),
    [
        ("[a-z]{1,1000}", ""),
        ("[a-z]{1,1001}", "f repeats 1001 times"),
        ("a{00001001,}", "f repeats 1001 times"),
        ("a{" + "9" * 1900 + "}", "f repeats 99999999999999999999 times"),
        ("((a{10}){100}|b){101}", "f has nested repetitions of 101000 in all"),
        ("a{100}{100}{11}", "f has nested repetitions of 110000 in all"),
        ("(a{1000})b{1000}", ""),
        (r"a\{9999\}[{9999}]\x{9999}", ""),
        ("[]{9999}", "f repeats 9999 times"),  # in JavaScript's syntax an empty class
        (r"[\]{9999}]{9999}", "f repeats 9999 times"),
        ("a{,", ""),
        ("))))a{9999}", "f repeats 9999 times"),
    ],
)
def test_a_regular_expression(regex: str, error: str) -> None:
    found = refused("regex", regex)
    assert found.startswith(error)
    assert bool(found) == bool(error)
    if found:
        assert refused("json", {"pattern": regex}).startswith("f.pattern" + error.removeprefix("f")[:20])


@pytest.mark.parametrize(
    ("grammar", "error"),
    [
        ('root ::= "a"{1,1000}', ""),
        ('root ::= "a"{1,1001}', "f repeats 1001 times"),
        ("root ::= (b{100}){100}\nb ::= [0-9999]{11}", "f has nested repetitions of 110000 in all"),
        ('root ::= "a" root{1000} | b\nb ::= root{1000}', ""),
        ('root ::= "a\n a ::= "b"{9999}', "f repeats 9999 times"),
        ('root ::= "a"{9999}\nroot ::= "b"', "f repeats 9999 times"),
        ('start: "a"~1..1001', "f repeats 1001 times"),
        ("start: A~1000\nA: b~101\nb: /c/", "f has nested repetitions of 101000 in all"),
        ("start: /a{1001}/", "f repeats 1001 times"),
        ('start: %json {"minItems": 1001}', "f repeats 1001 times"),
        ("start: /[0-9999]/ // 9999", ""),
    ],
)
def test_a_grammar_in_ebnf_or_lark(grammar: str, error: str) -> None:
    found = refused("grammar", grammar)
    assert found.startswith(error)
    assert bool(found) == bool(error)


def test_a_structural_tag() -> None:
    content = {"type": "json_schema", "json_schema": {"minItems": 1001}}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}
    assert refused("structural_tag", json.dumps(tag)).startswith("f.format.content.json_schema.minItems repeats 1001")
    for inner in ({"type": "regex", "pattern": "a{1001}"}, {"type": "grammar", "grammar": 'root ::= "a"{1001}'}):
        tag["format"] = inner
        assert "repeats 1001 times" in refused("structural_tag", json.dumps(tag))
    tag["format"] = {"type": "repeat", "min": 0, "max": 1001, "content": {"type": "any_text"}}
    assert refused("structural_tag", json.dumps(tag)).startswith("f.format.max repeats 1001")


def test_all_constraints_of_a_request_are_checked() -> None:
    for fields, where in (
        ({"choice": ["a"] * 11}, "so.choice has 11 choices"),
        ({"choice": ["a" * 3000]}, "so.choice has more than"),
        ({"regex": "a{1001}"}, "so.regex repeats"),
        ({"grammar": 'root ::= "a"{1001}'}, "so.grammar repeats"),
        ({"json": '{"minItems": 1001}'}, "so.json.minItems repeats"),
        ({"json": {}, "whitespace_pattern": " {1001}"}, "so.whitespace_pattern repeats"),
    ):
        with pytest.raises(GrammarError, match=where):
            check_structured_outputs("so", fields, LIMITS)
    check_structured_outputs("so", {"json_object": True, "json": None}, LIMITS)


HOSTILE = ["[", "(", "{", "{1,", "{ ", "\\", "\\x{", '"', '"\\', "'", "/", "/\\", "a", "a ", " ", "~", "#", "-", "a:"]


@pytest.mark.parametrize("piece", HOSTILE)
def test_a_grammar_is_read_in_time_linear_in_its_length(piece: str) -> None:
    """A pattern that goes back over these texts would take hours."""
    limits = GrammarLimits(max_chars=10**6)
    for kind in ("regex", "grammar"):
        with contextlib.suppress(GrammarError):
            check_grammar("f", piece * (10**6 // len(piece)), limits, kind)
