"""The parsers that the shipped configs name, on texts in the form of their models' templates. The tokenizer is the
embedded model's, with their special tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai_harmony import HarmonyError
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.parser import ParserManager

CONFIGS = Path(__file__).parents[3] / "configs"
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}
ARGUMENTS = {"city": "Porto", "days": 2}
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nPorto\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
XML += "</function>\n</tool_call>"
HARMONY = "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
HARMONY += f"<|constrain|>json<|message|>{json.dumps(ARGUMENTS)}<|call|>"
GEMMA = '<|channel>thought\nRain?<channel|><|tool_call>call:weather{city:<|"|>Porto<|"|>,days:2}<tool_call|>'
CASES = {"coder.yaml": HERMES, "gpu.yaml": XML, "gpu-remote.yaml": XML, "gemma-4-31b.yaml": GEMMA}
CASES |= dict.fromkeys(("gpt-oss-20b.yaml", "gpt-oss-120b.yaml"), HARMONY)
SPECIAL = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|turn>", "<turn|>", '<|"|>']
SPECIAL += ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"]


def test_every_config_of_a_large_model_names_its_parser() -> None:
    has_parser = {path.name for path in CONFIGS.glob("*.yaml") if "tool_call_parser" in path.read_text()}
    assert has_parser == CASES.keys()


@pytest.mark.parametrize("config", CASES)
def test_a_call_and_its_reasoning_are_found_in_a_whole_answer_and_in_a_stream(config: str, target_dir: Path) -> None:
    engine = yaml.safe_load((CONFIGS / config).read_text())["applications"][0]["args"]["engine"]
    text, is_harmony = CASES[config], config.startswith("gpt-oss")
    names = engine["tool_call_parser"], engine.get("reasoning_parser"), engine["enable_auto_tool_choice"]
    parser: Any = ParserManager.get_parser(*names, is_harmony=is_harmony)
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    ids = tokenizer.encode(text, add_special_tokens=False)
    if is_harmony:
        try:
            ids = get_encoding().encode(text, allowed_special="all")
        except (HarmonyError, OSError) as error:  # it may have to download its vocabulary
            pytest.skip(f"no vocabulary of gpt-oss here: {error}")
    turns = [{"role": "user", "content": "Rain?"}]
    asked = ChatCompletionRequest(messages=turns, tools=[{"type": "function", "function": TOOL}], tool_choice="auto")
    expected = None if text in (HERMES, XML) else "Rain?"
    found = parser(tokenizer, asked.tools).parse(text, asked, enable_auto_tools=True, model_output_token_ids=ids)
    assert (found[0] or None, (found[1] or "").strip()) == (expected, "")
    assert [(call.name, json.loads(call.arguments)) for call in found[2]] == [("weather", ARGUMENTS)]
    for step in (1, 5):  # tokens of a chunk; accepted drafts bring several
        stream, deltas = parser(tokenizer, asked.tools), list[Any]()
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            piece, is_last = "" if is_harmony else tokenizer.decode(part), start + step >= len(ids)
            delta = stream.parse_delta(piece, part, asked, prompt_token_ids=[], finished=is_last)
            deltas += [] if delta is None else [delta]
        assert ("".join(delta.reasoning or "" for delta in deltas) or None) == expected
        assert "".join(delta.content or "" for delta in deltas).strip() == ""
        functions = [call.function for delta in deltas for call in delta.tool_calls or () if call.function]
        assert [function.name for function in functions if function.name] == ["weather"]
        assert json.loads("".join(function.arguments or "" for function in functions)) == ARGUMENTS
