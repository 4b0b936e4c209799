"""One vLLM engine that writes user turns and answers as token ids, and counts whatever it drops."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from peagle.data import Conversations
from peagle.matching import check_tokenizer
from peagle.prompts import ChatTemplate, Prompt, begin_user_turns, cut_loop, distinct_share, special_ids
from peagle.recipe import GenerateRecipe

#: A prompt is used when at least so many tokens of an answer fit behind it.
MIN_ANSWER_TOKENS = 16
MIN_USER_TOKENS = 5
NUM_KEY_TOKENS = 24

Counts = dict[str, int]


class Writer:
    """The target as writer. seed: of the engine; engines with one seed would write the same free user turns."""

    def __init__(self, target_dir: Path, recipe: GenerateRecipe, seed: int = 0) -> None:
        from transformers import AutoTokenizer
        from vllm import LLM

        self.recipe = recipe
        tokenizer = AutoTokenizer.from_pretrained(target_dir)
        check_tokenizer(tokenizer, target_dir)
        self.template = ChatTemplate(tokenizer)
        self.special_ids = special_ids(tokenizer)
        self.engine = LLM(model=str(target_dir), seed=seed, **recipe.engine)
        self.max_model_len: int = self.engine.model_config.max_model_len

    def _write(self, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> list[Any]:
        """One output a prompt; sampling: one set of SamplingParams arguments a prompt."""
        from vllm import SamplingParams

        if not prompts:
            return []
        stop = sorted(self.template.end_ids)
        params = [SamplingParams(detokenize=False, stop_token_ids=stop, **one) for one in sampling]
        requests: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self.engine.generate(requests, params, use_tqdm=not os.environ.get("CI"))
        return [output.outputs[0] for output in outputs]

    def user_turns(self, count: int, seed: int) -> tuple[list[list[int]], Counts]:
        """Whole prompts whose user turn the target wrote, and counts of those asked for and dropped, by reason.

        Dropped: turns that do not end within `max_user_tokens` (the text of a base model need not), that are too short
        or hold special tokens, that repeat themselves, and that begin as one before does.
        """
        recipe = self.recipe
        counts = dict.fromkeys(["asked", "unended", "unusable", "repeating", "duplicate"], 0) | {"asked": count}
        begun = begin_user_turns(self.template, recipe.openings, recipe.shares, count, seed)
        sampling = {"temperature": 1.0, "top_p": 0.95, "max_tokens": recipe.max_user_tokens}
        outputs = self._write(begun, [sampling] * count)
        kept: dict[tuple[int, ...], list[int]] = {}
        for prompt, output in zip(begun, outputs, strict=True):
            written = [token for token in output.token_ids if token not in self.template.end_ids]
            turn = prompt[len(self.template.before) :] + written
            key = tuple(turn[:NUM_KEY_TOKENS])
            if self.template.is_chat and output.finish_reason != "stop":
                counts["unended"] += 1
            elif len(turn) < MIN_USER_TOKENS or self.special_ids.intersection(written):
                counts["unusable"] += 1
            elif distinct_share(written, 4) <= 0.6:
                counts["repeating"] += 1
            elif key in kept:
                counts["duplicate"] += 1
            else:
                kept[key] = self.template.before + turn + self.template.after
        named = {"num_asked" if key == "asked" else f"num_turns_{key}": value for key, value in counts.items()}
        return list(kept.values()), named

    def fitting(self, prompts: list[Prompt]) -> dict[int, list[int]]:
        """Index -> token ids of the prompts that leave room for an answer in `max_model_len`."""
        rendered = [self.template.render(prompt) for prompt in prompts]
        return {n: ids for n, ids in enumerate(rendered) if len(ids) + MIN_ANSWER_TOKENS <= self.max_model_len}

    def answers(
        self, prompts: list[list[int]], max_tokens: int, temperatures: list[float]
    ) -> tuple[list[list[int]], int]:
        """The target's answers, with their end token where they came to an end, and how many did not.

        temperatures: one a prompt. An answer comes to no end at `max_tokens`, and where `max_model_len` is full.
        """
        outputs = self._write(prompts, [{"temperature": one, "max_tokens": max_tokens} for one in temperatures])
        num_unfinished = sum(output.finish_reason != "stop" for output in outputs)
        return [list(output.token_ids) for output in outputs], num_unfinished

    def conversations(self, count: int, seed: int, given: list[Prompt]) -> tuple[Conversations, Counts]:
        """One round: `count` user turns asked of the target, those kept and the given prompts answered.

        Loops are cut short. Every prompt, answer and token that is dropped is counted.
        """
        recipe = self.recipe
        prompts, counts = self.user_turns(count, seed)
        fitting = self.fitting(given)
        prompts += fitting.values()
        temperatures = [0.0 if greedy else recipe.temperature for greedy in spread(len(prompts), recipe.greedy_share)]
        answers, num_unfinished = self.answers(prompts, recipe.max_answer_tokens, temperatures)
        cut = [cut_loop(answer, max_repeats=recipe.max_loop_tokens) for answer in answers]
        made = Conversations.from_lists(prompts, cut)
        return made, counts | {
            "num_prompts_given": len(given),
            "num_prompts_too_long": len(given) - len(fitting),
            "num_conversations": len(made),
            "num_answer_tokens": made.num_answer_tokens,
            "num_unfinished": num_unfinished,
            "num_loops_cut": sum(len(short) < len(answer) for short, answer in zip(cut, answers, strict=True)),
            "num_loop_tokens_cut": sum(map(len, answers)) - made.num_answer_tokens,
        }


def spread(count: int, share: float) -> list[bool]:
    """`share` of `count` entries are True, evenly spread, the first of them among these unless share is 0."""
    return [math.ceil((n + 1) * share) > math.ceil(n * share) for n in range(count)]
