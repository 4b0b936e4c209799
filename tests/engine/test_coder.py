"""The recipes of Qwen2.5-Coder's heads: equal but for the heads, and from prompts to drafts in vLLM on a target of
Qwen 2's layout (biases on q, k and v, one table for input and output, rows of it that the tokenizer does not use)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from deployments.cli import main
from peagle.checkpoint import build_drafter, load_head
from peagle.heads import prepare_head
from peagle.train.data import Conversations, special_ids
from peagle.train.recipe import Recipe
from peagle.train.target import Target
from tests.engine.test_draft_engine import NUM_DRAFTS, PROMPTS, Run, compare, greedy_answers, hidden_states, record

RECIPES = {name: Path(__file__).parents[2] / f"configs/train/coder-{name}.yaml" for name in ("peagle", "eagle3")}
SPARE_ROWS = 64
MAX_TOKENS = 26
SMALL = (
    "compile=false", "device=cpu", "schedule.max_minutes=null", "schedule.max_steps=12", "schedule.warmup_steps=2",
    "batch.num_sequences=2", "batch.max_tokens=256", "drafter.draft_vocab_size=512", "loss.chunk=512",
    "optimizer.ema_decay=0.0", "optimizer.lr=0.02", "optimizer.muon_lr=0.02", "evaluate.data=null",
)  # fmt: skip
ENGINE = "{dtype: float32, enforce_eager: true, max_model_len: 256, disable_log_stats: true}"


def test_the_two_recipes_differ_in_the_head_alone() -> None:
    peagle, eagle3 = (Recipe.load(path).model_dump() for path in RECIPES.values())
    for name in ("target", "data", "seed", "batch", "optimizer", "schedule", "loss", "evaluate"):
        assert peagle[name] == eagle3[name], name
    assert peagle["output"] != eagle3["output"]
    shared = ("num_depths", "draft_vocab_size", "fc_norm", "aux_layer_ids", "start_from")
    assert {key: peagle["drafter"][key] for key in shared} == {key: eagle3["drafter"][key] for key in shared}


def write_target(folder: Path, tokenizer_dir: Path) -> Path:
    """Random, in Qwen 2's layout, with the tokenizer of `tokenizer_dir`."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    config = Qwen2Config(
        vocab_size=len(tokenizer) + SPARE_ROWS,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.15,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.long
def test_recipes_lead_from_prompts_to_drafts_in_vllm(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`peagle generate`, `peagle train` for either head, and vLLM proposes what `peagle.draft` proposes."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    folder = write_target(tmp_path / "target", target_dir)
    vocab_size = Qwen2Config.from_pretrained(folder).vocab_size
    common = [f"target={folder}", f"data={tmp_path / 'data'}", *SMALL]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{text} {n}"}) + "\n" for text in PROMPTS for n in range(4)))
    made = [f"generate.engine={ENGINE}", f"generate.prompts={prompts}", "generate.num_conversations=0"]
    made += ["generate.num_workers=1", "generate.num_rounds=1", "generate.max_answer_tokens=64"]
    mask_token = f"drafter.ptd_token_id={vocab_size - 1}"
    assert main(["generate", str(RECIPES["peagle"]), *common, mask_token, *made]) == 0
    data = Conversations.load(tmp_path / "data")
    assert len(data) == len(PROMPTS) * 4

    target = Target(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert vocab_size - 1 not in {*special_ids(tokenizer), *tokenizer.get_vocab().values()}
    questions = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    answers = greedy_answers(target, questions, MAX_TOKENS)
    for name, recipe in RECIPES.items():
        further = [f"output={tmp_path / name}"]
        further += [mask_token, "drafter.intermediate_size=96"] if name == "peagle" else []
        assert main(["train", str(recipe), *common, *further]) == 0
        head = prepare_head(tmp_path / name / "head", folder, tmp_path / "cache")
        config, tensors = load_head(head)
        assert (config.ptd_token_id is None) == (name == "eagle3")
        assert config.intermediate_size == {"peagle": 96, "eagle3": 160}[name]
        assert not config.attention_bias  # the target's bias is its own: a head has Llama's layers
        engine = {
            "model": str(folder),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_batched_tokens": 2048,
            "enable_prefix_caching": False,
            "async_scheduling": False,
            "speculative_config": {
                "method": "eagle3",
                "model": str(head),
                "num_speculative_tokens": NUM_DRAFTS,
                "parallel_drafting": config.ptd_token_id is not None,
            },
        }
        job = {"engine": engine, "prompts": questions, "answers": answers, "max_tokens": MAX_TOKENS}
        (tmp_path / f"job-{name}").mkdir()
        records = record(tmp_path / f"job-{name}", job)
        tokens = [
            max((entry["token_ids"] for entry in records if entry["request"] == index), key=len)
            for index in range(len(PROMPTS))
        ]
        for question, answer, written in zip(questions, answers, tokens, strict=True):
            assert written == (question + answer)[: len(written)]
        drafter = build_drafter(config, tensors, embed_VH=target.embed_VS, lm_head_VH=target.lm_head_VS)
        aux = [hidden_states(target, ids, config.aux_layer_ids) for ids in tokens]
        found = compare(
            Run(records, aux, tokens, drafter), lambda session, ids, aux: session.propose(ids, aux, NUM_DRAFTS)
        )
        num_compared, num_equal, _ = found
        print(f"{name}: {num_equal} of {num_compared} draft tokens equal")
        assert num_equal == num_compared > 100
