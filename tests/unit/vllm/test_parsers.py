"""The parsers of tool calls and reasoning that the shipped configs name, on texts as their models write them.

Texts are in the forms of the models' chat templates. The tokenizer is the embedded model's, with their special tokens.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai_harmony import HarmonyError
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.parser import Parser, ParserManager

CONFIGS = Path(__file__).parents[3] / "configs"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
ARGUMENTS = {"city": "Porto", "days": 2}
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nPorto\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
XML += "</function>\n</tool_call>"
HARMONY_CALL = "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>Rain?<|end|>"
CASES = {
    "coder.yaml": ('<tool_call>\n{"name": "weather", "arguments": {"city": "Porto", "days": 2}}\n</tool_call>', None),
    "gpu.yaml": (XML, None),
    "gpu-remote.yaml": (XML, None),
    "gpt-oss-20b.yaml": (f"{ANALYSIS}{HARMONY_CALL}{json.dumps(ARGUMENTS)}<|call|>", "Rain?"),
    "gpt-oss-120b.yaml": (f"{ANALYSIS}{HARMONY_CALL}{json.dumps(ARGUMENTS)}<|call|>", "Rain?"),
    "gemma-4-31b.yaml": (
        '<|channel>thought\nRain?<channel|><|tool_call>call:weather{city:<|"|>Porto<|"|>,days:2}<tool_call|>',
        "Rain?",
    ),
}
"""What a model writes, and the reasoning in it."""
SPECIAL = ("<tool_call>", "</tool_call>", "<think>", "</think>")
SPECIAL += ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|turn>", "<turn|>")


@pytest.fixture(scope="module")
def tokenizer(target_dir: Path) -> PreTrainedTokenizerBase:
    found = AutoTokenizer.from_pretrained(target_dir)
    found.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return found


def make_parser(config: str, tokenizer: PreTrainedTokenizerBase) -> tuple[Parser, list[int]]:
    """The parser of a config, and the tokens of its case."""
    engine = yaml.safe_load((CONFIGS / config).read_text())["applications"][0]["args"]["engine"]
    is_harmony, text = config.startswith("gpt-oss"), CASES[config][0]
    found = ParserManager.get_parser(
        engine["tool_call_parser"], engine.get("reasoning_parser"), engine["enable_auto_tool_choice"],
        is_harmony=is_harmony,
    )  # fmt: skip
    assert found is not None
    if not is_harmony:
        return found(tokenizer, chat().tools), tokenizer.encode(text, add_special_tokens=False)
    try:
        encoding = get_encoding()
    except (HarmonyError, OSError) as error:  # it downloads its vocabulary once
        pytest.skip(f"no vocabulary of gpt-oss here: {error}")
    return found(tokenizer, chat().tools), encoding.encode(text, allowed_special="all")


def chat() -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=[{"role": "user", "content": "Rain?"}], tools=[TOOL], tool_choice="auto")


def test_every_config_of_a_large_model_names_its_parser() -> None:
    has_parser = {path.name for path in CONFIGS.glob("*.yaml") if "tool_call_parser" in path.read_text()}
    assert has_parser == CASES.keys()


@pytest.mark.parametrize("config", CASES)
def test_a_call_and_its_reasoning_are_found_in_a_whole_answer(config: str, tokenizer: Any) -> None:
    parser, ids = make_parser(config, tokenizer)
    text, expected = CASES[config]
    reasoning, content, calls = parser.parse(text, chat(), enable_auto_tools=True, model_output_token_ids=ids)
    assert (reasoning or None, (content or "").strip()) == (expected, "")
    assert [(call.name, json.loads(call.arguments)) for call in calls or ()] == [("weather", ARGUMENTS)]


@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize("config", CASES)
def test_a_call_and_its_reasoning_are_found_in_a_stream(config: str, step: int, tokenizer: Any) -> None:
    """`step`: tokens of a chunk; accepted drafts bring several."""
    parser, ids = make_parser(config, tokenizer)
    deltas: list[DeltaMessage] = []
    for start in range(0, len(ids), step):
        part = ids[start : start + step]
        text = "" if config.startswith("gpt-oss") else tokenizer.decode(part)
        delta = parser.parse_delta(text, part, chat(), prompt_token_ids=[], finished=start + step >= len(ids))
        deltas += [] if delta is None else [delta]
    assert ("".join(delta.reasoning or "" for delta in deltas) or None) == CASES[config][1]
    assert "".join(delta.content or "" for delta in deltas).strip() == ""
    functions = [call.function for delta in deltas for call in delta.tool_calls or ()]
    assert [function.name for function in functions if function and function.name] == ["weather"]
    assert json.loads("".join(function.arguments or "" for function in functions if function)) == ARGUMENTS
