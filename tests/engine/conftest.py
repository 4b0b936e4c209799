"""The engine whose answers the engines with drafts must give, and what all of them are asked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.engine_cases import NEARLY_FULL, PROMPT_LENGTHS, TEXT, engine_settings
from tests.support.engine_harness import RunningEngine, float32_kwargs
from tests.support.warm_engine import engines_start_warm


@pytest.fixture(scope="package")
def plain_engine(target_dir: Path) -> Iterator[RunningEngine]:
    """The target without speculation. It waits beside the other engines of this folder, one start for all of them."""
    with engines_start_warm():
        engine = RunningEngine(float32_kwargs(target_dir, None, engine_settings(200)))
    with engine:
        yield engine


@pytest.fixture(scope="package")
def tokenizer(target_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(target_dir)


@pytest.fixture(scope="package")
def text_tokens(tokenizer: Any) -> list[int]:
    tokens: list[int] = tokenizer(TEXT * 6)["input_ids"]
    assert len(tokens) >= 7 * len(PROMPT_LENGTHS) + NEARLY_FULL
    return tokens


@pytest.fixture(scope="package")
def prompts(text_tokens: list[int]) -> list[list[int]]:
    """Different prompts of 1 to 300 tokens; the longest needs two prefill chunks."""
    return [text_tokens[7 * place : 7 * place + length] for place, length in enumerate(PROMPT_LENGTHS)]
