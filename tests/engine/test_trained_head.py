"""What `peagle train` writes is what stock vLLM loads: its own `eagle3` drafts with OUTPUT/head as our reference does.

The engine knows nothing of this package: a small random target on the CPU, in float32, and the directory as training
left it.
"""

from pathlib import Path

import pytest

from peagle.checkpoint import build_drafter, load_head
from peagle.train.recipe import Recipe
from peagle.train.target import Target
from peagle.train.trainer import Trainer
from tests.engine.test_draft_engine import Run, compare, greedy_answers, hidden_states, record
from tests.support.small_run import write_small_run

pytestmark = pytest.mark.engine

NUM_DRAFTS, NUM_TOKENS = 4, 24
KINDS: dict[str, tuple[str, ...]] = {
    "p-eagle": ("drafter.draft_vocab_size=40",),
    "eagle3": (
        "drafter.method=eagle3", "drafter.ptd_token_id=null", "drafter.num_layers=1", "drafter.draft_vocab_size=40",
    ),
    "p-eagle, whole vocabulary": (),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["p-eagle", *(pytest.param(kind, marks=pytest.mark.long) for kind in list(KINDS)[1:])])
def test_stock_vllm_drafts_as_the_reference_does(tmp_path: Path, kind: str) -> None:
    folder = write_small_run(tmp_path, head_dim=32)  # vLLM's attention on the CPU takes no smaller one
    settings = [f"output={tmp_path / 'run'}", "schedule.max_steps=40", "evaluate.data=null", *KINDS[kind]]
    head = Trainer(Recipe.load(folder / "recipe.yaml", settings)).run()
    target = Target(folder / "target")
    prompts = [[2 + (7 * index + place) % 60 for place in range(3 + 5 * index)] for index in range(4)]
    answers = greedy_answers(target, prompts, NUM_TOKENS)
    engine = {
        "model": str(folder / "target"), "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True,
        "max_model_len": 128, "max_num_batched_tokens": 256, "enable_prefix_caching": False, "async_scheduling": False,
        "speculative_config": {
            "method": "eagle3", "model": str(head), "num_speculative_tokens": NUM_DRAFTS,
            "parallel_drafting": kind != "eagle3",
        },
    }  # fmt: skip
    job = {"engine": engine, "prompts": prompts, "answers": answers, "max_tokens": NUM_TOKENS}
    records = record(tmp_path, job)
    tokens = [
        max((one["token_ids"] for one in records if one["request"] == index), key=len) for index in range(len(prompts))
    ]
    config, tensors = load_head(head)
    drafter = build_drafter(config, tensors, embed_VH=target.embed_VS, lm_head_VH=target.lm_head_VS)
    run = Run(records, [hidden_states(target, ids, config.aux_layer_ids) for ids in tokens], tokens, drafter)
    num_compared, num_equal, num_ties = compare(run, lambda session, ids, aux: session.propose(ids, aux, NUM_DRAFTS))
    assert num_equal == num_compared > 50
    assert num_ties < num_compared / 10
    assert len({tuple(one["draft_token_ids"]) for one in records}) > 5, "they say nothing"
