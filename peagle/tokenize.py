"""Training data from conversations that exist already: the target writes nothing (off-policy answers).

    python -m peagle.tokenize RECIPE FILE.jsonl --out DIR

Enters: JSONL whose lines carry an answer (`peagle.prompts.read_jsonl`). Leaves: a data folder as `peagle.vllm.generate`
makes it, of the same prompts with the given answers. Needs no engine. The last answer of a conversation is what is
learned; earlier ones are context (and counted).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from peagle.data import Conversations, write_manifest
from peagle.matching import check_tokenizer, tokenizer_hash
from peagle.prompts import ChatTemplate, read_jsonl
from peagle.provenance import conditions
from peagle.recipe import Recipe
from peagle.store import sha256_of

CONVERSATIONS_PER_PART = 10_000


def tokenize_file(target_dir: Path, file: Path, out: Path) -> dict[str, int]:
    """Writes the parts and the manifest; returns the totals.

    Raises ValueError naming wrong lines, messages that the chat template refuses, a tokenizer that is not the target's,
    and a folder that holds data already.
    """
    from transformers import AutoTokenizer

    if any(out.glob("part-*.npz")):
        raise ValueError(f"{out} holds data already: use another folder for --out")
    given = read_jsonl(file, need_answers=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(target_dir)
    check_tokenizer(tokenizer, target_dir)
    template = ChatTemplate(tokenizer)
    totals = {"num_conversations": len(given), "num_tokens": 0, "num_answer_tokens": 0}
    for number, start in enumerate(range(0, len(given), CONVERSATIONS_PER_PART)):
        some = given[start : start + CONVERSATIONS_PER_PART]
        answers = [template.answer(prompt.answer or "") for prompt in some]
        made = Conversations.from_lists([template.render(prompt) for prompt in some], answers)
        made.save_part(out, f"{number:03d}")
        totals["num_tokens"] += int(made.lengths.sum())
        totals["num_answer_tokens"] += made.num_answer_tokens
    totals["num_earlier_answers"] = sum(one["role"] == "assistant" for prompt in given for one in prompt.messages)
    manifest = {
        "totals": totals,
        "answers": "as given",
        "source": {"file": str(file), "sha256": sha256_of(file)},
        "tokenizer": tokenizer_hash(target_dir),
        "made": conditions(),
    }
    write_manifest(out, manifest)
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    print(json.dumps(tokenize_file(Recipe.load(args.recipe).target_dir(), args.file, args.out)))


if __name__ == "__main__":
    main()
