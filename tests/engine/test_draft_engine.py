"""The plain reference of drafting proposes what vLLM's engine proposes: same head, same steps, same draft tokens.

The engine runs a small random target on the CPU in float32 with stock `eagle3`, and knows nothing of this package: with
`parallel_drafting` for P-EAGLE heads, without it for EAGLE-3 heads. The reference gets the target's hidden states from
Hugging Face transformers, so both the drafter and what it is fed with are compared.

One head is what `peagle train` left in OUTPUT/head. The others are random, with weights large enough that drafts depend
on the KV cache, on the shift between tokens and hidden states and on `mask_hidden` or what is fed back.
Of each kind, one head has every switch that published heads use.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.checkpoint import build_drafter, expected_tensors, load_head, marks, offsets, save_head
from peagle.config import DrafterConfig, Llama3Rope
from peagle.draft import DraftSession
from peagle.heads import prepare_head
from peagle.model import Drafter
from peagle.train.recipe import Recipe
from peagle.train.target import Target
from peagle.train.trainer import Trainer
from peagle.vllm import fork_server
from tests.support import record_drafts
from tests.support.small_run import write_small_run
from tests.support.warm_engine import engines_start_warm

pytestmark = pytest.mark.engine

NUM_DRAFTS, MAX_TOKENS = 4, 26
MIN_LOGIT_GAP = 1e-3  # below it the two best drafts are a tie for float32 arithmetic in another order
PROMPTS = [[2 + (7 * index + place) % 60 for place in range(3 + 11 * index)] for index in range(5)]
TRAINED = "trained p-eagle"
EVERY_SWITCH = {"draft_vocab_size": 48, "norm_before_residual": True, "fc_norm": True, "attention_bias": True}
RANDOM: dict[str, dict[str, Any]] = {
    "p-eagle, all switches": {"num_layers": 4, "ptd_token_id": 17} | EVERY_SWITCH,
    "p-eagle as speculators trains it": {
        "num_layers": 2,
        "ptd_token_id": 17,
        "qk_norm": True,
        "norm_before_fc": True,
        "rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 64),
        "aux_layer_ids": (1, 2, 4, 5, 6),
    },
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


def make_head(folder: Path, name: str, target: Target) -> Path:
    """A head of that name in a folder of `write_small_run`."""
    if name == TRAINED:
        settings = [f"output={folder / 'run'}", "schedule.max_steps=10", "evaluate.data=null"]
        return Trainer(Recipe.load(folder / "recipe.yaml", [*settings, "drafter.draft_vocab_size=40"])).run()
    config = DrafterConfig.for_target(target.config, num_depths=NUM_DRAFTS, **RANDOM[name])
    shipped = save_head(folder / "strong", config, strong_head(config))
    return prepare_head(shipped, folder / "target", folder / "cache")


@torch.no_grad()
def greedy_answer(target: Target, prompt: list[int]) -> list[int]:
    out = target.model.generate(
        torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def hidden_states(target: Target, tokens: list[int], layer_ids: tuple[int, ...]) -> Tensor:
    """[N, C * S] target hidden states at every token of one request."""
    tokens_BN = torch.tensor([tokens])
    position_BN = torch.arange(len(tokens))[None]
    return target.states(tokens_BN, position_BN, layer_ids)[0][0]


def record(folder: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run `record_drafts` on a job, in a process of its own that starts warm."""
    (folder / "job.json").write_text(json.dumps(job))
    with engines_start_warm(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        process = fork_server.Process(target=record_drafts.main, args=(folder / "job.json", folder / "records.json"))
        process.start()
        process.join(300)
    assert process.exitcode == 0
    found: list[dict[str, Any]] = json.loads((folder / "records.json").read_text())
    return found


def compare(drafter: Drafter, records: list[dict[str, Any]], aux_R: list[Tensor]) -> tuple[int, int, int]:
    """Replay every step: (draft tokens that are no near ties, how many of them are equal, near ties left out).

    aux_R: of each request, the target's hidden states [N, C * S] at the tokens of prompt and answer.
    """
    sessions = [DraftSession(drafter) for _ in aux_R]
    num_compared = num_equal = num_ties = 0
    for entry in records:
        session, aux = sessions[entry["request"]], aux_R[entry["request"]]
        tokens = torch.tensor(entry["token_ids"])
        start = session.num_rows
        drafts = session.propose(tokens[start + 1 :], aux[start : len(tokens) - 1], NUM_DRAFTS)
        best = drafts.logits_KV.topk(2, dim=-1).values
        clear = best[:, 0] - best[:, 1] > MIN_LOGIT_GAP
        if not drafter.config.is_parallel:  # a token drafted after a tie depends on how the tie fell
            clear = clear.int().cummin(0).values.bool()
        equal = drafts.token_ids_K == torch.tensor(entry["draft_token_ids"])
        num_compared += int(clear.sum())
        num_equal += int((clear & equal).sum())
        num_ties += int((~clear).sum())
    return num_compared, num_equal, num_ties


IN_SHORT = (TRAINED, "p-eagle, all switches", "eagle3, all switches")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.long) for name in (TRAINED, *RANDOM)]
)
def test_stock_vllm_drafts_as_the_reference_does(tmp_path: Path, name: str) -> None:
    folder = write_small_run(tmp_path, head_dim=32)  # vLLM's attention on the CPU takes no smaller one
    target = Target(folder / "target")
    head, answers = make_head(folder, name, target), [greedy_answer(target, prompt) for prompt in PROMPTS]
    config, tensors = load_head(head)
    engine = {
        "model": str(folder / "target"), "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True,
        "max_model_len": 128, "max_num_batched_tokens": 256, "enable_prefix_caching": False, "async_scheduling": False,
        "speculative_config": {
            "method": "eagle3", "model": str(head), "num_speculative_tokens": NUM_DRAFTS,
            "parallel_drafting": config.is_parallel,
        },
    }  # fmt: skip
    records = record(folder, {"engine": engine, "prompts": PROMPTS, "answers": answers, "max_tokens": MAX_TOKENS})
    of_requests = [[one["token_ids"] for one in records if one["request"] == index] for index in range(len(PROMPTS))]
    written = [max(found, key=len) for found in of_requests]
    steps = {len(after) - len(before) for found in of_requests for before, after in itertools.pairwise(found)}
    assert steps == set(range(1, NUM_DRAFTS + 2)), "some number of accepted drafts did not come up"
    for prompt, answer, tokens in zip(PROMPTS, answers, written, strict=True):
        # Whatever was drafted, the engine wrote what greedy decoding writes.
        assert tokens == (prompt + answer)[: len(tokens)]
        assert len(tokens) > len(prompt) + MAX_TOKENS - 2 * (NUM_DRAFTS + 1)
    assert len({tuple(one["draft_token_ids"]) for one in records}) > 5, "they say nothing"
    drafter = build_drafter(config, tensors, embed_VH=target.embed_VS, lm_head_VH=target.lm_head_VS)
    aux = [hidden_states(target, tokens, config.aux_layer_ids) for tokens in written]
    num_compared, num_equal, num_ties = compare(drafter, records, aux)
    print(f"{num_equal} of {num_compared} draft tokens equal, {num_ties} near ties left out")
    assert num_equal == num_compared > 50
    assert num_ties < num_compared / 10
