"""AL and survival of heads by the length of the context that they draft in.

    python -m benchmarks.contexts HEAD... --target NAME_OR_DIR --prompts FILE.jsonl --lengths 400 2000 --out FILE.json

prompts: long ones, such as `long.jsonl` of `benchmarks.prompts`; of each the beginning is kept, and its last line, the
question. The target answers greedily, and every head drafts K tokens behind each token of the answer
(`peagle.draft`): a head that drafts well in short contexts and badly in long ones was trained on short ones. On a CPU
in float32; `peagle evaluate` drafts behind the prompt's tokens as well, which takes minutes a prompt there.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.common import markdown
from peagle.checkpoint import build_drafter, load_head
from peagle.draft import DraftSession
from peagle.evaluate import AnswerCounts
from peagle.heads import prepare_head
from peagle.model import Drafter
from peagle.provenance import conditions
from peagle.train.recipe import target_checkpoint
from peagle.train.target import Target

QUESTION_TOKENS = 100
"""Room for the question and the chat template."""


def shorten(tokenizer: Any, prompt: str, num_tokens: int) -> list[int]:
    """Token ids of a chat whose user turn is the prompt's beginning and its question, about `num_tokens` in all."""
    body, question = prompt.rsplit("\n", 1)
    begin = tokenizer.decode(tokenizer(body).input_ids[: num_tokens - QUESTION_TOKENS])
    turn = {"role": "user", "content": f"{begin}\n\n{question}"}
    ids: list[int] = tokenizer.apply_chat_template([turn], add_generation_prompt=True, return_dict=False)
    return ids


@torch.no_grad()
def accepted(drafter: Drafter, tokens_N: Tensor, aux_NX: Tensor, num_prompt: int, num_drafts: int) -> np.ndarray:
    """How many leading drafts behind each answer token are the answer's own [answer tokens - 1], as `replay` counts.

    tokens_N: prompt and answer. aux_NX: the target's tapped hidden states [N, C * S]. num_prompt: tokens of the prompt.
    """
    session, found, done = DraftSession(drafter), [], 0
    for position in range(num_prompt, len(tokens_N) - 1):  # of the newest token
        given = tokens_N[done + 1 : position + 1], aux_NX[done:position]
        drafts_K, done = session.propose(*given, num_drafts).token_ids_K, position
        true_K = tokens_N[position + 1 : position + 1 + num_drafts]
        found.append(int((drafts_K[: len(true_K)] == true_K).long().cumprod(0).sum()))
    return np.array(found, np.uint8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="+", help="shipped heads' names or directories")
    parser.add_argument("--target", required=True, help="an embedded target's name or a directory")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[400, 2000], help="tokens of a context, about")
    parser.add_argument("--num-prompts", type=int, default=8, help="of each length")
    parser.add_argument("--answer-tokens", type=int, default=80)
    parser.add_argument("--num-drafts", type=int, default=7, help="K")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    checkpoint = target_checkpoint(args.target)
    target, tokenizer = Target(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    drafters = {
        head: build_drafter(
            *load_head(prepare_head(head, checkpoint)), embed_VH=target.embed_VS, lm_head_VH=target.lm_head_VS
        )
        for head in args.heads
    }
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    chosen = prompts[:: max(1, len(prompts) // args.num_prompts)][: args.num_prompts]
    rows = []
    for length in args.lengths:
        counts: dict[str, list[np.ndarray]] = {head: [] for head in drafters}
        for prompt in chosen:
            ids = torch.tensor([shorten(tokenizer, prompt, length)])
            with torch.no_grad():
                whole_1N = target.model.generate(ids, max_new_tokens=args.answer_tokens, do_sample=False)
                seen = target.model(whole_1N, output_hidden_states=True, logits_to_keep=1).hidden_states
            for head, drafter in drafters.items():
                aux_NX = torch.cat([seen[layer][0] for layer in drafter.config.aux_layer_ids], dim=-1)
                counts[head].append(accepted(drafter, whole_1N[0], aux_NX, ids.shape[1], args.num_drafts))
        for head, found in counts.items():
            of = AnswerCounts.of(found, args.num_drafts)
            survival = of.num_survived.sum(0) / of.num_steps[:, -1].sum()
            row = {"head": head, "context_tokens": length, "num_answers": len(found)}
            row["accepted_length"] = round(float(of.num_tokens.sum() / of.num_steps[:, -1].sum()), 3)
            row["num_tokens"] = int(of.num_tokens.sum())
            rows.append(row | {"survival": [round(float(one), 3) for one in survival]})
        report = {"num_drafts": args.num_drafts, "rows": rows, "conditions": conditions()}
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    shown = [[row["head"], row["context_tokens"], row["accepted_length"], *row["survival"]] for row in rows]
    sys.stdout.write(markdown(["head", "context", "AL", *map(str, range(1, args.num_drafts + 1))], shown) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
