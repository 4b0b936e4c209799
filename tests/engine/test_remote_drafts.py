"""A drafter in another process proposes what a colocated one proposes, whatever the engine does around it.

Real engines on the CPU in float32, a real drafter process, a random head whose drafts depend on every cached row; after
recording, leading drafts are replaced by right tokens, so that all acceptance lengths and rejected rows come up. What
is expected is the plain reference of drafting (`DraftSession`) on the tokens committed at each step, which
test_draft_engine.py compares with vLLM's own pass.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm.platforms import current_platform

from peagle.checkpoint import build_drafter, load_head, save_head
from peagle.config import DrafterConfig
from peagle.draft import DraftSession
from peagle.heads import prepare_head
from peagle.model import Drafter
from peagle.train.target import Target
from peagle.vllm.engine import RemoteSettings, engine_kwargs
from tests.engine.test_draft_engine import (
    MIN_LOGIT_GAP,
    NUM_DRAFTS,
    PROMPTS,
    greedy_answers,
    hidden_states,
    record,
    strong_head,
)
from tests.support.drafter_process import DrafterProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="the drafter process of the tests is a CPU process"),
]

MAX_TOKENS = 40
PATIENT = RemoteSettings(min_deadline_s=30.0, max_deadline_s=60.0)  # two cores, shared with other tests
ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 8,
    "block_size": 32,
    "enable_prefix_caching": False,
}
CHUNKS = {"max_num_batched_tokens": 64}
FEW_BLOCKS = {"num_gpu_blocks_override": 10, "max_model_len": 256}
CACHED = {"enable_prefix_caching": True}


@dataclasses.dataclass
class Setting:
    """A head, the questions and their right answers, and the reference's view of them."""

    target_dir: Path
    head_dir: Path
    prompts: list[list[int]]
    answers: list[list[int]]
    aux: list[torch.Tensor]  # of each question: target hidden states [N, C * S] at its prompt and answer
    drafter: Drafter

    def expected(self, entry: dict[str, Any]) -> tuple[list[int], list[bool]]:
        """Draft ids after the entry's tokens, and which of them are no near ties."""
        tokens = torch.tensor(entry["token_ids"])
        aux_TX = self.aux[entry["request"]][: len(tokens) - 1]
        drafts = DraftSession(self.drafter).propose(tokens[1:], aux_TX, NUM_DRAFTS)
        best = drafts.logits_KV.topk(2, dim=-1).values
        return drafts.token_ids_K.tolist(), (best[:, 0] - best[:, 1] > MIN_LOGIT_GAP).tolist()


@pytest.fixture(scope="module")
def setting(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("head")
    target = Target(target_dir)
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    answers = greedy_answers(target, prompts, MAX_TOKENS)
    config = DrafterConfig.for_target(target.config, num_depths=NUM_DRAFTS, num_layers=4, ptd_token_id=17)
    shipped = save_head(folder / "strong", config, strong_head(config))
    head_dir = prepare_head(shipped, target_dir, folder / "cache")
    drafter = build_drafter(config, load_head(head_dir)[1], embed_VH=target.embed_VS, lm_head_VH=target.lm_head_VS)
    asked = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    aux = [hidden_states(target, tokens, config.aux_layer_ids) for tokens in asked]
    return Setting(target_dir, head_dir, prompts, answers, aux, drafter)


@pytest.fixture(scope="module")
def drafter(setting: Setting) -> Iterator[DrafterProcess]:
    process = DrafterProcess([setting.head_dir], setting.target_dir)
    yield process
    process.kill()


def run(
    folder: Path, setting: Setting, drafter: DrafterProcess | None, changes: dict[str, Any], rounds: int = 1
) -> list[dict[str, Any]]:
    """Records of an engine whose drafter is that process, or of one with its own drafter."""
    kwargs = engine_kwargs(
        setting.target_dir,
        setting.head_dir,
        dtype="float32",
        on_cpu=True,
        remote=None if drafter is None else PATIENT,
        extra=ENGINE | changes,
    )
    del kwargs["scheduler_cls"]  # The recording one takes its place.
    job = {"engine": kwargs, "prompts": setting.prompts, "answers": setting.answers, "max_tokens": MAX_TOKENS}
    if drafter is not None:
        job |= {"drafters": [drafter.entry], "report": str(folder / "report.json")}
    records = record(folder, job | {"rounds": rounds})
    if drafter is not None:
        (link,) = json.loads((folder / "report.json").read_text())["remote"]["pool"]["links"]
        assert link["num_timeouts"] == 0, link
        assert link["num_connections"] == 1, link
    return records


def check(setting: Setting, records: list[dict[str, Any]]) -> None:
    """Every draft token that is no near tie is the reference's, and the tokens are the target's own."""
    num_equal = num_compared = num_ties = 0
    for entry in records:
        prompt, answer = setting.prompts[entry["request"]], setting.answers[entry["request"]]
        tokens = entry["token_ids"]
        assert tokens == (prompt + answer)[: len(tokens)]
        if len(tokens) - 1 > len(setting.aux[entry["request"]]):
            continue
        ids, clear = setting.expected(entry)
        assert len(entry["draft_token_ids"]) == NUM_DRAFTS
        pairs = [
            pair
            for pair, is_clear in zip(zip(ids, entry["draft_token_ids"], strict=True), clear, strict=True)
            if is_clear
        ]
        num_compared, num_ties = num_compared + len(pairs), num_ties + NUM_DRAFTS - len(pairs)
        num_equal += sum(mine == theirs for mine, theirs in pairs)
    print(f"{len(records)} steps, {num_equal} of {num_compared} draft tokens equal, {num_ties} near ties left out")
    assert num_compared > 150
    assert num_equal == num_compared
    assert num_ties <= 0.02 * num_compared


def acceptance_lengths(records: list[dict[str, Any]], request: int) -> set[int]:
    lengths = [len(entry["token_ids"]) for entry in records if entry["request"] == request]
    return {after - before for before, after in itertools.pairwise(lengths)}


def test_all_acceptance_lengths(tmp_path: Path, setting: Setting, drafter: DrafterProcess) -> None:
    records = run(tmp_path, setting, drafter, {})
    check(setting, records)
    for request in range(len(PROMPTS)):
        assert acceptance_lengths(records, request) >= set(range(1, NUM_DRAFTS))


@pytest.mark.parametrize("place", ["colocated", "remote"])
def test_prompts_in_chunks(tmp_path: Path, setting: Setting, drafter: DrafterProcess, place: str) -> None:
    """At the end of an unfinished chunk the next token is the prompt's own; stock vLLM has another one there."""
    check(setting, run(tmp_path, setting, drafter if place == "remote" else None, CHUNKS))


def test_preemption(tmp_path: Path, setting: Setting, drafter: DrafterProcess) -> None:
    records = run(tmp_path, setting, drafter, FEW_BLOCKS)
    assert sum(entry["num_preempted"] > 0 for entry in records) > 5
    check(setting, records)


def test_prefix_cache_hits(tmp_path: Path, setting: Setting, drafter: DrafterProcess) -> None:
    """The second time the target computes only the end of the long prompt; the drafter has its rows of the first."""
    records = run(tmp_path, setting, drafter, CACHED, rounds=2)
    first, second = json.loads((tmp_path / "report.json").read_text())["num_cached_tokens"]
    assert (max(first), max(second)) >= (0, 64)
    assert max(first) == 0
    check(setting, records)
