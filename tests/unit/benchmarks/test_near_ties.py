"""`benchmarks.near_ties`: the first difference of two answers, judged by the target."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.near_ties import differing, judged


def test_the_targets_own_answer_is_its_best_and_another_is_below(target_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    prompt = "Name the days of the week."
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    prompt_ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    own_ids = model.generate(prompt_ids, max_new_tokens=12, do_sample=False)[0, prompt_ids.shape[1] :].tolist()
    own = tokenizer.decode(own_ids)
    other = tokenizer.decode(own_ids[:6]) + " elephant"
    answers = {"none": [own, own, own], "ours-7": [own, other, tokenizer.decode(own_ids[:6])]}
    cells = [{"num_requests": 4, "prompt_texts": [prompt] * 3, "answers": answers}]
    [case] = differing(tokenizer, cells)
    assert (case["arm"], case["num_requests"]) == ("ours-7", 4)
    assert case["token_ids"] == prompt_ids[0].tolist() + own_ids[:6]
    assert case["pair"][0] == own_ids[6]
    row = judged(model, tokenizer, case)
    assert row["below_best"][0] == pytest.approx(0.0, abs=1e-3)
    assert row["below_best"][1] > 1.0
