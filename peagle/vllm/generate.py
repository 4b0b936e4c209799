"""Training data that the target writes itself, through vLLM: its own user turns, then its own answers.

    python -m peagle.vllm.generate RECIPE                                   # training prompts and answers
    python -m peagle.vllm.generate RECIPE --prompts FILE.jsonl --out DIR    # answers to given prompts, for `evaluate`

`generate.num_workers` engines are dealt out to the visible GPUs in turn; several may share one, for a small model's
steps are bound by the host. Each worker writes a part after each round, so a run that is cut short keeps what is done;
started again with the same recipe it makes only the parts that are missing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from peagle.data import Conversations, write_manifest
from peagle.prompts import ChatTemplate, begin_user_turns, cut_loop, distinct_share, read_jsonl
from peagle.provenance import conditions
from peagle.recipe import GenerateRecipe, Recipe

logger = logging.getLogger(__name__)


class Writer:
    """One vLLM engine that writes user turns and answers as token ids."""

    def __init__(self, target_dir: Path, recipe: GenerateRecipe, seed: int = 0) -> None:
        from transformers import AutoTokenizer
        from vllm import LLM

        self.recipe = recipe
        tokenizer = AutoTokenizer.from_pretrained(target_dir)
        self.template = ChatTemplate(tokenizer)
        self.special_ids = set(tokenizer.all_special_ids)
        self.eos_id = tokenizer.eos_token_id
        # Engines with one seed would write the same free user turns.
        self.engine = LLM(model=str(target_dir), seed=seed, **recipe.engine)

    def _write(self, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> list[Any]:
        """One output a prompt; sampling: one set of SamplingParams arguments a prompt."""
        from vllm import SamplingParams

        params = [SamplingParams(detokenize=False, stop_token_ids=[self.eos_id], **one) for one in sampling]
        requests: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self.engine.generate(requests, params, use_tqdm=not os.environ.get("CI"))
        return [output.outputs[0] for output in outputs]

    def user_turns(self, count: int, seed: int) -> list[list[int]]:
        """Whole prompts whose user turn the target wrote; turns that do not end, repeat or are empty are dropped."""
        recipe = self.recipe
        begun = begin_user_turns(self.template, recipe.openings, recipe.shares, count, seed)
        sampling = {"temperature": 1.0, "top_p": 0.95, "max_tokens": recipe.max_user_tokens}
        outputs = self._write(begun, [sampling] * count)
        kept: dict[tuple[int, ...], list[int]] = {}
        for prompt, output in zip(begun, outputs, strict=True):
            written = [token for token in output.token_ids if token != self.eos_id]
            turn = prompt[len(self.template.before) :] + written
            usable = output.finish_reason == "stop" and len(turn) >= 5 and not self.special_ids.intersection(written)
            if usable and distinct_share(written, 4) > 0.6:
                kept.setdefault(tuple(turn[:24]), self.template.before + turn + self.template.after)
        return list(kept.values())

    def answers(self, prompts: list[list[int]], max_tokens: int, temperatures: list[float]) -> list[list[int]]:
        """The target's answers, its end token included where it came to an end; temperatures: one a prompt."""
        outputs = self._write(prompts, [{"temperature": one, "max_tokens": max_tokens} for one in temperatures])
        return [list(output.token_ids) for output in outputs]

    def conversations(self, count: int, seed: int) -> tuple[Conversations, dict[str, int]]:
        """One round: half of the answers greedy, half sampled; loops cut short (counted)."""
        recipe = self.recipe
        prompts = self.user_turns(count, seed)
        temperatures = [recipe.temperature if n % 2 else 0.0 for n in range(len(prompts))]
        answers = self.answers(prompts, recipe.max_answer_tokens, temperatures)
        cut = [cut_loop(answer, max_repeats=recipe.max_loop_tokens) for answer in answers]
        made = Conversations.from_lists(prompts, cut)
        counts = {
            "num_asked": count,
            "num_conversations": len(made),
            "num_answer_tokens": made.num_answer_tokens,
            "num_loop_tokens_cut": sum(map(len, answers)) - made.num_answer_tokens,
        }
        return made, counts


def run_worker(recipe: Recipe, worker: int) -> None:
    generate = recipe.generate
    parts = {n: Path(recipe.data) / f"part-{worker:02d}-{n:03d}.npz" for n in range(generate.num_rounds)}
    missing = [n for n, path in parts.items() if not path.exists()]
    if not missing:
        return
    writer = Writer(recipe.target_dir(), generate, seed=recipe.seed * 1009 + worker)
    for n in missing:
        started = time.monotonic()
        seed = recipe.seed * 1_000_003 + worker * 1009 + n
        made, counts = writer.conversations(generate.num_conversations, seed)
        made.save_part(recipe.data, f"{worker:02d}-{n:03d}")
        record = counts | {"worker": worker, "round": n, "seed": seed, "seconds": round(time.monotonic() - started, 1)}
        (Path(recipe.data) / f"round-{worker:02d}-{n:03d}.json").write_text(json.dumps(record), encoding="utf-8")
        print(json.dumps(record), flush=True)


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES names, else the indices of all GPUs."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(index) for index in range(torch.cuda.device_count())]
    return [one.strip() for one in named.split(",") if one.strip()]


def worker_environment(worker: int, gpus: list[str]) -> dict[str, str]:
    """Environment of a worker: of several GPUs it sees one, dealt out in turn."""
    own = {"CUDA_VISIBLE_DEVICES": gpus[worker % len(gpus)]} if len(gpus) > 1 else {}
    return {**os.environ, **own}


def run_all(recipe_args: list[str], recipe: Recipe) -> None:
    """Starts the workers, waits, and writes the manifest. Raises RuntimeError naming a worker that failed."""
    command = [sys.executable, "-m", "peagle.vllm.generate", *recipe_args, "--worker"]
    gpus = visible_gpus()
    workers = [
        subprocess.Popen([*command, str(n)], env=worker_environment(n, gpus))
        for n in range(recipe.generate.num_workers)
    ]
    failed = [n for n, worker in enumerate(workers) if worker.wait()]
    if failed:
        raise RuntimeError(f"generate: workers {failed} failed; what they finished is kept in {recipe.data}")
    rounds = [json.loads(path.read_text()) for path in sorted(Path(recipe.data).glob("round-*.json"))]
    totals = {key: sum(one[key] for one in rounds) for key in rounds[0] if key.startswith("num_")}
    write_manifest(
        recipe.data, {"totals": totals, "rounds": rounds, "recipe": recipe.model_dump(), "made": conditions()}
    )
    print(json.dumps(totals))


def answer_prompts(recipe: Recipe, prompts_file: Path, out: Path, max_tokens: int) -> None:
    """Greedy answers to given prompts, with their categories in the manifest: what `evaluate` walks over."""
    writer = Writer(recipe.target_dir(), recipe.generate)
    prompts = read_jsonl(prompts_file)
    rendered = [writer.template.render(prompt) for prompt in prompts]
    fitting = [n for n, ids in enumerate(rendered) if len(ids) + 16 <= recipe.generate.engine["max_model_len"]]
    if len(fitting) < len(prompts):
        logger.warning(
            "%d of %d prompts do not fit max_model_len and are left out", len(prompts) - len(fitting), len(prompts)
        )
    answers = writer.answers([rendered[n] for n in fitting], max_tokens, [0.0] * len(fitting))
    Conversations.from_lists([rendered[n] for n in fitting], answers).save_part(out, "00")
    categories = [prompts[n].category for n in fitting]
    write_manifest(out, {"categories": categories, "num_left_out": len(prompts) - len(fitting), "made": conditions()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--worker", type=int, help="run one worker only (used internally)")
    parser.add_argument("--prompts", type=Path, help="answer the prompts of this JSONL file instead")
    parser.add_argument("--out", type=Path, help="folder for the answers to --prompts")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer to --prompts, in tokens")
    args = parser.parse_args()
    recipe = Recipe.load(args.recipe, args.overrides)
    if args.prompts:
        if not args.out:
            parser.error("--prompts needs --out")
        answer_prompts(recipe, args.prompts, args.out, args.max_tokens)
    elif args.worker is not None:
        run_worker(recipe, args.worker)
    else:
        run_all([str(args.recipe), *args.overrides], recipe)


if __name__ == "__main__":
    main()
