"""The parsers that the shipped configs name, on outputs that others recorded from their models, and on texts that are
written in the form of a model's template. The tokenizer is the embedded model's, with their special tokens."""

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
# A text, its call, its reasoning and its content. The first three texts are written, models said the others.
RAIN = ("weather", {"city": "Porto", "days": 2})
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(RAIN[1])}}}\n</tool_call>', RAIN, "", ""
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nPorto\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
GEMMA = '<|channel>thought\nRain?<channel|><|tool_call>call:weather{city:<|"|>Porto<|"|>,days:2}<tool_call|>'
# Qwen3-Coder-30B-A3B-Instruct (llama.cpp), as its user reports: github.com/ggml-org/llama.cpp/issues/15012, 2025-08-14.
TOKYO = (
    "I need to check the weather for Tokyo and Paris as well. Let me get that information for you.\n\n"
    "<tool_call>\n<function=get_current_weather>\n<parameter=location>\nTokyo, Japan\n</parameter>\n"
    "</function>\n</tool_call>",
    ("get_current_weather", {"location": "Tokyo, Japan"}),
    "",
    "I need to check the weather for Tokyo and Paris as well. Let me get that information for you.",
)
# gpt-oss-20b (MLX): README of github.com/avalan-ai/avalan, "Reasoning: high".
MEMORY = (
    "<|channel|>analysis<|message|>We need to fetch memory stored in namespace games.cards.truco. Use memory.read."
    "<|end|><|start|>assistant<|channel|>commentary to=functions.memory.read <|constrain|>json<|message|>"
    '{"namespace":"games.cards.truco","search":"retrucar"}<|call|>',
    ("memory.read", {"namespace": "games.cards.truco", "search": "retrucar"}),
    "We need to fetch memory stored in namespace games.cards.truco. Use memory.read.",
    "",
)
# gpt-oss-20b (MLX): github.com/waybarrios/vllm-mlx/pull/562, 2026-08-02. The call is in the channel of the reasoning.
SEARCH = (
    "<|channel|>analysis<|message|>We need to run ffgrep. Let us search.\n<|end|><|start|>assistant<|channel|>analysis "
    'to=functions.ffgrep code<|message|>\n{"path":"","pattern":"TextualDisplayView"}<|call|>',
    ("ffgrep", {"path": "", "pattern": "TextualDisplayView"}),
    "We need to run ffgrep. Let us search.",
    "",
)
# Gemma 4 E2B-it (transformers): github.com/google-gemma/cookbook, docs/capabilities/text/function-calling-gemma4.ipynb.
LONDON = '<|tool_call>call:get_current_temperature{location:<|"|>London<|"|>}<tool_call|><|tool_response>'
QWEN, GPT_OSS = [(f"{XML}</function>\n</tool_call>", RAIN, "", ""), TOKYO], [MEMORY, SEARCH]
OUTPUTS = {"coder.yaml": [HERMES], "gpu.yaml": QWEN, "gpu-remote.yaml": QWEN, "gpt-oss-20b.yaml": GPT_OSS}
OUTPUTS["gpt-oss-120b.yaml"] = GPT_OSS
OUTPUTS["gemma-4-31b.yaml"] = [
    (GEMMA, RAIN, "Rain?", ""),
    (LONDON, ("get_current_temperature", {"location": "London"}), "", ""),
]
SPECIAL = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|turn>", "<turn|>", '<|"|>']
SPECIAL += ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"]


def test_every_config_of_a_large_model_names_its_parser() -> None:
    has_parser = {path.name for path in CONFIGS.glob("*.yaml") if "tool_call_parser" in path.read_text()}
    assert has_parser == OUTPUTS.keys()


@pytest.mark.parametrize(("config", "output"), [(name, one) for name, found in OUTPUTS.items() for one in found])
def test_calls_and_reasoning_are_found_in_a_whole_answer_and_in_a_stream(config: str, output: Any, target_dir: Path):
    engine = yaml.safe_load((CONFIGS / config).read_text())["applications"][0]["args"]["engine"]
    is_harmony = config.startswith("gpt-oss")
    text, (name, arguments), *rest = output
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
    types = {key: {"type": "integer" if isinstance(value, int) else "string"} for key, value in arguments.items()}
    function = {"name": name, "parameters": {"type": "object", "properties": types}}
    asked = ChatCompletionRequest(
        messages=[{"role": "user", "content": "Hi"}],
        tools=[{"type": "function", "function": function}],
        tool_choice="auto",
    )
    found = parser(tokenizer, asked.tools).parse(text, asked, enable_auto_tools=True, model_output_token_ids=ids)
    assert [(part or "").strip() for part in found[:2]] == rest
    assert [(call.name, json.loads(call.arguments)) for call in found[2]] == [(name, arguments)]
    for step in (1, 5):  # tokens of a chunk; accepted drafts bring several
        stream, deltas = parser(tokenizer, asked.tools), list[Any]()
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            piece, is_last = "" if is_harmony else tokenizer.decode(part), start + step >= len(ids)
            delta = stream.parse_delta(piece, part, asked, prompt_token_ids=[], finished=is_last)
            deltas += [] if delta is None else [delta]
        texts = ["".join(getattr(one, kind) or "" for one in deltas) for kind in ("reasoning", "content")]
        assert [text.strip() for text in texts] == rest
        functions = [call.function for delta in deltas for call in delta.tool_calls or () if call.function]
        said = "".join(function.arguments or "" for function in functions)
        assert ([one.name for one in functions if one.name], json.loads(said)) == ([name], arguments)
