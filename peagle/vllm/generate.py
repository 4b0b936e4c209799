"""Training data that the target writes itself, through vLLM: its own user turns, then its own answers.

    peagle generate RECIPE                                   # training prompts and answers
    peagle generate RECIPE --prompts SOURCE --out DIR        # answers to given prompts

`generate.num_workers` engines are distributed to the visible GPUs in turn. Several may share a GPU, because the host
bounds the steps of a small model. Each worker writes a part after each round. An interrupted run keeps its parts.
Started again with the same recipe, it makes only the missing ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from peagle.train.data import (
    Conversations,
    cut_loop,
    distinct_share,
    load_tokenizer,
    special_ids,
    tokenizer_hash,
    write_manifest,
)
from peagle.train.prompts import ChatTemplate, begin_user_turns, check_is_new, keep_good, read_prompts
from peagle.train.recipe import GenerateRecipe, Recipe

logger = logging.getLogger(__name__)

MIN_ANSWER_TOKENS = 16
"""Least tokens of an answer that must fit after a prompt."""
MIN_USER_TOKENS = 5
NUM_KEY_TOKENS = 24
"""Two user turns with the same first tokens, this many, are duplicates."""
MIN_DISTINCT_SHARE = 0.6
"""Least share of distinct four-token windows of a user turn; a turn with less repeats itself."""


class Writer:
    """One vLLM engine that writes user turns and answers as token ids, and counts whatever it drops."""

    def __init__(self, target_dir: Path, recipe: GenerateRecipe, seed: int) -> None:
        """seed: of the engine; engines with one seed would write the same free user turns."""
        from vllm import LLM

        self.recipe = recipe
        tokenizer = load_tokenizer(target_dir)
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
        params = [SamplingParams(detokenize=False, stop_token_ids=stop, **arguments) for arguments in sampling]
        requests: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self.engine.generate(requests, params, use_tqdm=not os.environ.get("CI"))
        return [output.outputs[0] for output in outputs]

    def user_turns(self, count: int, seed: int) -> tuple[list[list[int]], dict[str, int]]:
        """Whole prompts whose user turn the target wrote, and counts of those asked for and dropped, by reason."""
        recipe = self.recipe
        dropped = dict.fromkeys(["unended", "unusable", "repeating", "duplicate"], 0)
        begun = begin_user_turns(self.template, recipe.openings, recipe.shares, count, seed)
        sampling = {"temperature": 1.0, "top_p": 0.95, "max_tokens": recipe.max_user_tokens}
        outputs = self._write(begun, [sampling] * count)
        kept: dict[tuple[int, ...], list[int]] = {}
        for prompt, output in zip(begun, outputs, strict=True):
            written = [token for token in output.token_ids if token not in self.template.end_ids]
            turn = prompt[len(self.template.before) :] + written
            key = tuple(turn[:NUM_KEY_TOKENS])
            if output.finish_reason != "stop":
                dropped["unended"] += 1
            elif len(turn) < MIN_USER_TOKENS or self.special_ids.intersection(written):
                dropped["unusable"] += 1
            elif distinct_share(written, 4) <= MIN_DISTINCT_SHARE:
                dropped["repeating"] += 1
            elif key in kept:
                dropped["duplicate"] += 1
            else:
                kept[key] = self.template.before + turn + self.template.after
        counts = {"num_asked": count} | {f"num_turns_{reason}": number for reason, number in dropped.items()}
        return list(kept.values()), counts

    def answers(
        self, prompts: list[list[int]], max_tokens: int, temperatures: list[float]
    ) -> tuple[list[list[int]], int]:
        """The target's answers, with their end token, and how many have none (`max_tokens`, or no room).

        temperatures: one a prompt.
        """
        outputs = self._write(prompts, [{"temperature": value, "max_tokens": max_tokens} for value in temperatures])
        num_unfinished = sum(output.finish_reason != "stop" for output in outputs)
        return [list(output.token_ids) for output in outputs], num_unfinished

    def conversations(self, count: int, seed: int) -> tuple[Conversations, dict[str, int]]:
        """One round: `count` user turns asked of the target, and those kept answered."""
        recipe = self.recipe
        prompts, counts = self.user_turns(count, seed)
        temperatures = [0.0 if greedy else recipe.temperature for greedy in spread(len(prompts), recipe.greedy_share)]
        answers, num_unfinished = self.answers(prompts, recipe.max_answer_tokens, temperatures)
        cut = [cut_loop(answer, max_repeats=recipe.max_loop_tokens) for answer in answers]
        made = Conversations.from_lists(prompts, cut)
        return made, counts | {
            "num_conversations": len(made),
            "num_answer_tokens": made.num_answer_tokens,
            "num_unfinished": num_unfinished,
            "num_loops_cut": sum(len(short) < len(answer) for short, answer in zip(cut, answers, strict=True)),
            "num_loop_tokens_cut": sum(map(len, answers)) - made.num_answer_tokens,
        }


def spread(count: int, share: float) -> list[bool]:
    """`share` of `count` entries are True, evenly spread, the first of them among these unless share is 0."""
    return [math.ceil((n + 1) * share) > math.ceil(n * share) for n in range(count)]


def settings_hash(recipe: Recipe) -> str:
    """Eight hex digits of what decides the contents of a part: settings and the target's tokenizer."""
    settings = recipe.generate.model_dump(exclude={"engine", "num_workers", "num_rounds"})
    settings |= {"seed": recipe.seed, "tokenizer": tokenizer_hash(recipe.target_dir())}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def run_worker(recipe: Recipe, worker: int) -> None:
    """Makes the missing parts of one worker."""
    generate, folder = recipe.generate, Path(recipe.data)
    names = {n: f"{worker:02d}-{n:03d}" for n in range(generate.num_rounds)}
    missing = [n for n, name in names.items() if not (folder / f"part-{name}.npz").exists()]
    if not missing:
        return
    settings = settings_hash(recipe)
    # The engine's seed is another one for each start: it draws free user turns in order, and would draw them again.
    engine_seed = recipe.seed * 1009 + worker + missing[0] * 1_000_003
    writer = Writer(recipe.target_dir(), generate, seed=engine_seed)
    for n in missing:
        started = time.monotonic()
        seed = recipe.seed * 1_000_003 + worker * 1009 + n
        made, counts = writer.conversations(generate.num_conversations, seed)
        record = counts | {"worker": worker, "round": n, "seed": seed, "settings": settings}
        record |= {"seconds": round(time.monotonic() - started, 1)}
        # A part without its record would be counted nowhere; a record without its part is written over.
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"round-{names[n]}.json").write_text(json.dumps(record), encoding="utf-8")
        made.save_part(folder, names[n])
        logger.info(json.dumps(record))


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES names, else the indices of all GPUs."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(index) for index in range(torch.cuda.device_count())]
    return [name.strip() for name in named.split(",") if name.strip()]


def worker_environment(worker: int, gpus: list[str]) -> dict[str, str]:
    """Environment of a worker: of several GPUs it sees one, dealt out in turn."""
    return os.environ | ({"CUDA_VISIBLE_DEVICES": gpus[worker % len(gpus)]} if len(gpus) > 1 else {})


_WORKER = """
import logging
import sys
from peagle.train.recipe import Recipe
from peagle.vllm.generate import run_worker
logging.basicConfig(level=logging.INFO, format='%(message)s')
run_worker(Recipe.model_validate_json(sys.argv[1]), int(sys.argv[2]))
"""


def run_all(recipe: Recipe) -> dict[str, int]:
    """Starts the workers, waits, and writes the manifest. Returns its totals.

    Raises ValueError for parts made with other settings, before any engine starts; RuntimeError naming a worker that
    failed.
    """
    folder = Path(recipe.data)
    check_parts(folder, settings_hash(recipe))
    command = [sys.executable, "-c", _WORKER, recipe.model_dump_json()]
    gpus = visible_gpus()
    workers = [
        subprocess.Popen([*command, str(n)], env=worker_environment(n, gpus))
        for n in range(recipe.generate.num_workers)
    ]
    try:
        failed = [n for n, worker in enumerate(workers) if worker.wait()]
    finally:  # an interrupt must not leave engines behind
        for worker in workers:
            worker.terminate()
    if failed:
        raise RuntimeError(f"generate: workers {failed} failed; what they finished is kept in {folder}")
    totals, rounds = collect(folder)
    write_manifest(folder, {"totals": totals, "rounds": rounds, "recipe": recipe.model_dump()}, recipe.target_dir())
    return totals


def check_parts(folder: Path, settings: str) -> None:
    """Raises ValueError for parts that were made with other settings. Parts that say nothing of theirs pass."""
    for part in sorted(folder.glob("part-*.npz")):
        record = round_file(part)
        made = json.loads(record.read_text(encoding="utf-8")).get("settings") if record.exists() else None
        if made not in (None, settings):
            raise ValueError(
                f"{part} was made with other settings of `generate`, another seed or tokenizer: "
                "use another `data` folder, or remove this one"
            )


def round_file(part: Path) -> Path:
    """Where the record of a part is."""
    return part.with_name(f"{part.stem.replace('part', 'round', 1)}.json")


def collect(folder: Path) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Totals over the records of all parts, and these records.

    A count that older records lack has no total. Prompts that different parts share are counted (and kept).
    """
    records = [round_file(part) for part in sorted(folder.glob("part-*.npz"))]
    rounds = [json.loads(path.read_text(encoding="utf-8")) for path in records if path.exists()]
    counted = [key for key in rounds[0] if key.startswith("num_")] if rounds else []
    totals = {key: sum(made[key] for made in rounds) for key in counted if all(key in made for made in rounds)}
    seen = Counter(tokens[:prompt].tobytes() for tokens, prompt in Conversations.load(folder).documents())
    return totals | {"num_repeated_prompts": seen.total() - len(seen)}, rounds


def answer_prompts(recipe: Recipe, source: str, out: Path, max_tokens: int, temperature: float) -> dict[str, int]:
    """Answers to given prompts at one temperature, with their categories in the manifest, as `evaluate` needs them.
    Returns totals.

    Raises ValueError when `out` holds data, or many of the prompts are wrong.
    """
    given = read_prompts(source)
    check_is_new(out)
    writer = Writer(recipe.target_dir(), recipe.generate, seed=recipe.seed)
    asked = [dataclasses.replace(prompt, answer=None) for prompt in given]
    rendered = keep_good(asked, lambda prompt: (prompt.category, writer.template.render(prompt).prompt), source)
    fitting = [(name, ids) for name, ids in rendered if len(ids) + MIN_ANSWER_TOKENS <= writer.max_model_len]
    num_left_out = len(rendered) - len(fitting)
    if num_left_out:
        logger.warning("%d of %d prompts do not fit max_model_len and are left out", num_left_out, len(rendered))
    ids = [ids for _, ids in fitting]
    answers, num_unfinished = writer.answers(ids, max_tokens, [temperature] * len(ids))
    Conversations.from_lists(ids, answers).save_part(out, "00")
    manifest = {
        "categories": [name for name, _ in fitting],
        "temperature": temperature,
        "max_answer_tokens": max_tokens,
        "num_left_out": num_left_out,
        "num_unfinished": num_unfinished,
        "source": source,
    }
    write_manifest(out, manifest, recipe.target_dir())
    return {"num_answers": len(ids), "num_left_out": num_left_out, "num_unfinished": num_unfinished}
