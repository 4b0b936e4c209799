"""The plain reference of drafting proposes what vLLM's engine proposes: same head, same steps, same draft tokens.

The engine runs the embedded target on the CPU in float32 with stock `eagle3`: with `parallel_drafting` for P-EAGLE
heads, without it for EAGLE-3 heads. The reference gets the target's hidden states from Hugging Face transformers, so
both the drafter and what it is fed with are compared.

The heads are random, with weights large enough that drafts depend on the KV cache, on the shift between tokens and
hidden states and on `mask_hidden` or what is fed back; the last test shows that the comparison sees each of them. Of
each kind, one head is like those that this repository trains, the other has every switch that published heads use.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from peagle.checkpoint import build_drafter, expected_tensors, load_head, marks, offsets, save_head
from peagle.config import DrafterConfig, Llama3Rope
from peagle.draft import DraftSession
from peagle.heads import prepare_head
from peagle.model import Drafter
from peagle.train.target import Target

# Without the mark of tests with engines: this engine is a program of its own that computes on one core, so it may run
# beside those which share a process.

NUM_DRAFTS = 5
MAX_TOKENS = 26
MIN_LOGIT_GAP = 1e-3  # below it the two best drafts are a tie for float32 arithmetic in another order
PROMPTS = [
    "Hello!",
    "Write a Python function that returns the factorial of n, and explain each line of it.",
    "Translate to German: The weather is nice today and we will go for a walk in the old town.",
    "List the planets of the solar system in the order of their distance from the sun, with one fact about each.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n",
    "Once upon a time, in a village by the sea, there lived an old fisherman who had never learned to swim. " * 4,
]


@dataclasses.dataclass
class Run:
    """What the engine did, and what the reference needs to do the same."""

    records: list[dict[str, Any]]
    aux: list[Tensor]  # of each request: target hidden states [N, C * S] at all its tokens
    tokens: list[list[int]]  # of each request: prompt and answer
    drafter: Drafter


EVERY_SWITCH: dict[str, Any] = {
    "draft_vocab_size": 8192,
    "norm_before_residual": True,
    "fc_norm": True,
    "attention_bias": True,
}
HEADS: dict[str, dict[str, Any]] = {
    "p-eagle": {"num_layers": 4, "ptd_token_id": 17},
    "p-eagle, all switches": {"num_layers": 4, "ptd_token_id": 17} | EVERY_SWITCH,
    "p-eagle as speculators trains it": {
        "num_layers": 2,
        "ptd_token_id": 17,
        "qk_norm": True,
        "norm_before_fc": True,
        "rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 64),
        "aux_layer_ids": (1, 5, 12, 20, 28),
    },
    "p-eagle with a sliding window": {"num_layers": 2, "ptd_token_id": 17, "sliding_window": 24},
    "eagle3": {"num_layers": 1},
    "eagle3, all switches": {"num_layers": 2, "norm_output": True} | EVERY_SWITCH,
}


def strong_head(config: DrafterConfig) -> dict[str, Tensor]:
    """Random tensors of a shipped head whose attention and MLPs matter as much as its residual stream."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, want in expected_tensors(config).items():
        if name == "d2t" and config.draft_vocab_size < config.vocab_size:
            kept = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
            tensors |= {"d2t": offsets(kept), "t2d": marks(kept, config.vocab_size)}
        if name == "d2t" or not (want.required or name == "mask_embedding"):
            continue
        value = torch.randn(want.shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.1 * value
        elif name.endswith("_proj.weight"):
            value *= 2.0 / want.shape[-1] ** 0.5
        elif name == "fc.weight":
            value *= 0.1 / want.shape[-1] ** 0.5
        tensors[name] = value
    return tensors


@torch.no_grad()
def greedy_answers(target: Target, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    answers = []
    for prompt in prompts:
        out = target.model.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def hidden_states(target: Target, tokens: list[int], layer_ids: tuple[int, ...]) -> Tensor:
    """[N, C * S] target hidden states at every token of one request."""
    tokens_BN = torch.tensor([tokens])
    position_BN = torch.arange(len(tokens))[None]
    return target.states(tokens_BN, torch.zeros_like(tokens_BN), position_BN, layer_ids)[0][0]


pytestmark = pytest.mark.long  # heads of every layout are compared with vLLM's network in test_head_layouts


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    return Target(target_dir)


@pytest.fixture(scope="module")
def questions(target: Target, target_dir: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of PROMPTS and of their greedy answers."""
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    return prompts, greedy_answers(target, prompts, MAX_TOKENS)


IN_SHORT = ("p-eagle, all switches",)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.long) for name in HEADS],
)
def run(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    target: Target,
    target_dir: Path,
    questions: tuple[list[list[int]], list[list[int]]],
) -> Run:
    folder = tmp_path_factory.mktemp("drafts")
    prompts, answers = questions
    config = DrafterConfig.for_target(target.config, num_depths=NUM_DRAFTS, **HEADS[request.param])
    shipped = save_head(folder / "strong", config, strong_head(config))
    head_dir = prepare_head(shipped, target_dir, folder / "cache")
    engine = {
        "model": str(target_dir),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "speculative_config": {
            "method": "eagle3",
            "model": str(head_dir),
            "num_speculative_tokens": NUM_DRAFTS,
            "parallel_drafting": config.ptd_token_id is not None,
        },
    }
    job = {"engine": engine, "prompts": prompts, "answers": answers, "max_tokens": MAX_TOKENS}
    records = record(folder, job)
    tokens = [
        max((entry["token_ids"] for entry in records if entry["request"] == index), key=len)
        for index in range(len(prompts))
    ]
    drafter = build_drafter(config, load_head(head_dir)[1], embed_VH=target.embed_VS, lm_head_VH=target.lm_head_VS)
    aux = [hidden_states(target, ids, config.aux_layer_ids) for ids in tokens]
    return Run(records, aux, tokens, drafter)


def record(folder: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run `record_drafts.py` on a job."""
    (folder / "job.json").write_text(json.dumps(job))
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(root),
    }
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():
        environment["LD_PRELOAD"] = str(openmp)
    command = [
        sys.executable,
        str(root / "tests" / "support" / "record_drafts.py"),
        str(folder / "job.json"),
        str(folder / "out.json"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"the engine failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return json.loads((folder / "out.json").read_text())


def compare(run: Run, propose: Callable[[DraftSession, Tensor, Tensor], Any]) -> tuple[int, int, int]:
    """Replay every step: (draft tokens that are no near ties, how many of them are equal, near ties left out)."""
    sessions = [DraftSession(run.drafter) for _ in run.tokens]
    num_compared = num_equal = num_ties = 0
    for entry in run.records:
        session, aux = sessions[entry["request"]], run.aux[entry["request"]]
        tokens = torch.tensor(entry["token_ids"])
        start = session.num_rows
        drafts = propose(session, tokens[start + 1 :], aux[start : len(tokens) - 1])
        best = drafts.logits_KV.topk(2, dim=-1).values
        clear = best[:, 0] - best[:, 1] > MIN_LOGIT_GAP
        if run.drafter.config.ptd_token_id is None:  # a token drafted after a tie depends on how the tie fell
            clear = clear.int().cummin(0).values.bool()
        equal = drafts.token_ids_K == torch.tensor(entry["draft_token_ids"])
        num_compared += int(clear.sum())
        num_equal += int((clear & equal).sum())
        num_ties += int((~clear).sum())
    return num_compared, num_equal, num_ties


def test_the_engine_went_through_all_acceptance_lengths(run: Run) -> None:
    """Precondition of the comparison: steps of 1 to K + 1 tokens, for every prompt, and drafts that vary."""
    for index in range(len(PROMPTS)):
        lengths = [len(entry["token_ids"]) for entry in run.records if entry["request"] == index]
        steps = {after - before for before, after in itertools.pairwise(lengths)}
        assert steps >= set(range(1, NUM_DRAFTS))
    assert len(run.records) > 40
    assert len({tuple(entry["draft_token_ids"]) for entry in run.records}) > len(run.records) // 2


def test_the_text_is_the_target_s_own(run: Run, questions: tuple[list[list[int]], list[list[int]]]) -> None:
    """Whatever was drafted, accepted and rejected, the engine wrote what greedy decoding without drafts writes."""
    for prompt, answer, written in zip(*questions, run.tokens, strict=True):
        assert written == (prompt + answer)[: len(written)]
        assert len(written) > len(prompt) + MAX_TOKENS - 2 * (NUM_DRAFTS + 1)


def test_reference_proposes_what_the_engine_proposes(run: Run) -> None:
    num_compared, num_equal, num_ties = compare(run, lambda session, ids, aux: session.propose(ids, aux, NUM_DRAFTS))
    print(f"{num_equal} of {num_compared} draft tokens equal, {num_ties} near ties left out")
    assert num_equal == num_compared
    assert num_ties <= 0.02 * num_compared
