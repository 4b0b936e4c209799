"""Acceptance of a head in stock vLLM, beside what `peagle.evaluate` reads off the same texts without decoding.

    python -m benchmarks.stock_acceptance HEAD --target DIR --answers DIR --num-draft-tokens 3 5 7 --out FILE.json

Each K gets an engine of its own, in a process of its own (its memory is only free when the process ends), with vLLM's
own scheduler: K is the engine's `num_speculative_tokens`. Counts are vLLM's counters, read before and after each
category. AL = 1 + accepted / drafts also counts drafts accepted past the end of an answer, which vLLM then throws away;
`tokens_per_step` counts only tokens that came out, as `peagle.evaluate` does. Long answers make the two the same.
Answers are decoded at the temperature of the stored ones, which the folder's manifest names; above 0 they are other
answers, so none is compared with its stored one, and on a CPU the engine gets the worker that repairs sampling there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from peagle.checkpoint import read_head_config
from peagle.evaluate import Answers, evaluate, load_folder
from peagle.heads import prepare_head
from peagle.provenance import conditions
from peagle.train.data import Conversations
from peagle.vllm.engine import CPU_WORKER

MAX_MODEL_LEN = 2048
KV_CACHE_BYTES = 8 * 2**30
"""Fixed on a GPU: an engine that sizes its cache from free memory takes its neighbours' growth for its own."""


def read_counters(metrics: list[Any], num_draft_tokens: int) -> dict[str, Any]:
    """vLLM's speculation counters so far: num_drafts, num_draft_tokens, num_accepted_tokens and one count per depth."""
    zeros: dict[str, Any] = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    found = zeros | {"accepted_tokens_per_pos": [0] * num_draft_tokens}
    for metric in metrics:
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name == "accepted_tokens_per_pos":
            found[name] = list(metric.values)
        elif name in found:
            found[name] += metric.value
    return found


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    per_pos = "accepted_tokens_per_pos"
    found = {name: value - before[name] for name, value in after.items() if name != per_pos}
    return found | {per_pos: [a - b for a, b in zip(after[per_pos], before[per_pos], strict=True)]}


def figures(counts: dict[str, Any], num_answers: int, num_tokens: int, num_identical: int | None) -> dict[str, Any]:
    """AL, survival and identity of one group of answers; None where vLLM counted no draft, or texts are sampled."""
    drafts = counts["drafts"]
    return {
        "num_answers": num_answers,
        "num_tokens": num_tokens,
        "num_identical": num_identical,
        "share_identical": None if num_identical is None else round(num_identical / num_answers, 4),
        "acceptance_length": round(1 + counts["accepted_tokens"] / drafts, 4) if drafts else None,
        "tokens_per_step": round((num_tokens - num_answers) / drafts, 4) if drafts else None,
        "survival": [round(count / drafts, 4) for count in counts["accepted_tokens_per_pos"]] if drafts else [],
        "counts": counts,
    }


def fitting_answers(folder: Path, max_tokens: int) -> tuple[Answers, int]:
    """Answers cut at max_tokens, and how many are left out as empty or too long for the engine."""
    stored = load_folder(folder)
    prompts, answers, kept = [], [], []
    for (tokens, prompt), category in zip(stored.data.documents(), stored.categories, strict=True):
        answer = tokens[prompt:].tolist()[:max_tokens]
        if len(answer) > 1 and prompt + len(answer) <= MAX_MODEL_LEN:
            prompts.append(tokens[:prompt].tolist())
            answers.append(answer)
            kept.append(category)
    if not kept:
        raise ValueError(f"answers: none in {folder} has two tokens and fits {MAX_MODEL_LEN} tokens with its prompt")
    fitting = Answers(Conversations.from_lists(prompts, answers), kept, stored.temperature)
    return fitting, len(stored.categories) - len(kept)


def eos_ids(target_dir: Path) -> list[int]:
    """End tokens by generation_config.json, else config.json."""
    for name in ("generation_config.json", "config.json"):
        path = target_dir / name
        stored = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
        if stored is not None:
            return stored if isinstance(stored, list) else [stored]
    raise ValueError(f"target {target_dir}: neither generation_config.json nor config.json names eos_token_id")


def run_engine(head_dir: Path, target_dir: Path, answers: Answers, k: int, eager: bool) -> dict[str, Any]:
    """Answers every prompt at K = k with a stock engine of this process.

    Returns {"groups": {group: figures}, "written": token ids of each answer, in the order of `answers`}.
    """
    from vllm import LLM, SamplingParams, TokensPrompt

    on_gpu = torch.cuda.is_available()
    # On a CPU the share is one of the machine's memory, most of which may be in use.
    device: dict[str, Any] = {"gpu_memory_utilization": 0.25} | (
        {"kv_cache_memory_bytes": KV_CACHE_BYTES} if on_gpu else {}
    )
    if on_gpu and eager:
        # vLLM reduces `mask_hidden` as a vector; its CUDA kernel for fc_norm, the default in eager mode, takes matrices
        # only and ends the start (seen on 0.26).
        device["kernel_config"] = {"ir_op_priority": {"rms_norm": ["native"]}}
    parallel = read_head_config(head_dir).ptd_token_id is not None
    speculative = {
        "method": "eagle3",
        "model": str(head_dir),
        "num_speculative_tokens": k,
        "parallel_drafting": parallel,
    }
    if not on_gpu and answers.temperature:
        device["worker_cls"] = CPU_WORKER
    engine = LLM(
        model=str(target_dir),
        dtype="bfloat16" if on_gpu else "float32",
        max_model_len=MAX_MODEL_LEN,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=speculative,
        enforce_eager=eager,
        **device,
    )
    settings: dict[str, Any] = {"stop_token_ids": eos_ids(target_dir), "detokenize": False}
    settings["temperature"] = answers.temperature
    stored = [(tokens[:prompt].tolist(), tokens[prompt:].tolist()) for tokens, prompt in answers.data.documents()]
    groups: dict[str, Any] = {}
    everything: list[list[int]] = [[] for _ in stored]
    first = before = read_counters(engine.get_metrics(), k)
    for category in sorted(set(answers.categories)):
        indices = [index for index, one in enumerate(answers.categories) if one == category]
        chosen = [stored[index] for index in indices]
        # As long as the stored answer and no longer: the two stay comparable.
        params = [SamplingParams(max_tokens=len(answer), **settings) for _, answer in chosen]
        requests = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in chosen]
        outputs = engine.generate(requests, params, use_tqdm=False)
        written = [list(output.outputs[0].token_ids) for output in outputs]
        for index, answer in zip(indices, written, strict=True):
            everything[index] = answer
        same = [one == answer for one, (_, answer) in zip(written, chosen, strict=True)]
        identical = None if answers.temperature else sum(same)
        after = read_counters(engine.get_metrics(), k)
        groups[category] = figures(difference(after, before), len(chosen), sum(map(len, written)), identical)
        before = after
    num_answers, num_tokens = (sum(one[name] for one in groups.values()) for name in ("num_answers", "num_tokens"))
    identical = None if answers.temperature else sum(one["num_identical"] for one in groups.values())
    groups = {"all": figures(difference(before, first), num_answers, num_tokens, identical), **groups}
    return {"groups": groups, "written": everything}


class OfflineWalk:
    """`peagle.evaluate` in this process, over answers that an engine wrote."""

    def __init__(self, head_dir: Path, target_dir: Path) -> None:
        from peagle.checkpoint import build_drafter, load_head
        from peagle.train.target import Target

        on_gpu = torch.cuda.is_available()
        device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
        self.target = Target(target_dir, device=device, dtype=dtype)
        config, tensors = load_head(head_dir)
        tables = {"embed_VH": self.target.embed_VS, "lm_head_VH": self.target.lm_head_VS}
        self.drafter = build_drafter(config, tensors, **tables, dtype=dtype, device=device)

    def __call__(self, answers: Answers, written: list[list[int]]) -> dict[str, Any]:
        prompts = [tokens[:prompt].tolist() for tokens, prompt in answers.data.documents()]
        return evaluate(self.drafter, self.target, Conversations.from_lists(prompts, written), answers.categories)


def measure(args: argparse.Namespace, head_dir: Path, answers: Answers) -> dict[str, Any]:
    """Runs one process a K, then the offline walk over what each wrote.

    Raises RuntimeError naming the K whose process failed.
    """
    command = [sys.executable, "-m", "benchmarks.stock_acceptance", str(head_dir), "--target", str(args.target)]
    command += ["--answers", str(args.answers), "--max-tokens", str(args.max_tokens)]
    command += ["--eager"] if args.eager else []
    with tempfile.TemporaryDirectory() as folder:
        running: dict[int, subprocess.Popen[bytes]] = {}
        for k in args.num_draft_tokens:
            out = Path(folder) / f"{k}.json"
            running[k] = subprocess.Popen([*command, "--out", str(out), "--engine-k", str(k)], stdout=sys.stderr)
            if not args.parallel:
                running[k].wait()
        failed = [k for k, process in running.items() if process.wait()]
        if failed:
            raise RuntimeError(f"acceptance: the engine failed at K = {failed}; its log is above")
        runs = {str(k): json.loads((Path(folder) / f"{k}.json").read_text(encoding="utf-8")) for k in running}
    engine = {k: run["groups"] for k, run in runs.items()}
    if args.no_offline:
        return {"engine": engine, "offline": {}}
    walk = OfflineWalk(head_dir, args.target)
    return {"engine": engine, "offline": {k: walk(answers, run["written"]) for k, run in runs.items()}}


def compare(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a K and group; ratio = offline AL / engine AL."""
    rows = []
    for k, groups in result["engine"].items():
        for group, one in groups.items():
            offline = result["offline"].get(k, {}).get(group, {}).get("acceptance_length", {}).get(k)
            length = one["acceptance_length"]
            ratio = round(offline / length, 4) if offline and length else None
            row = {"group": group, "k": int(k), "engine": length, "offline": offline, "ratio": ratio}
            rows.append(row | {name: one[name] for name in ("tokens_per_step", "share_identical", "survival")})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    columns = ("engine", "tokens_per_step", "offline", "ratio", "share_identical")
    lines = [f"{'group':24s}  K" + "".join(f"{name:>16s}" for name in columns) + "  survival by depth (engine)"]
    for row in rows:
        cells = "".join("               -" if row[name] is None else f"{row[name]:16.3f}" for name in columns)
        survival = " ".join(f"{share:.3f}" for share in row["survival"])
        lines.append(f"{row['group']:24s} {row['k']:2d}{cells}  {survival}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", help="a shipped head's name, or a directory")
    parser.add_argument("--target", type=Path, required=True, help="directory of the target's checkpoint")
    parser.add_argument("--answers", type=Path, required=True, help="folder made by `peagle.vllm.generate --prompts`")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[3, 5, 7], metavar="K")
    parser.add_argument("--max-tokens", type=int, default=512, help="answers are cut here")
    parser.add_argument("--parallel", action="store_true", help="run the engines of all K at the same time")
    parser.add_argument("--eager", action="store_true", help="start faster: no compilation, no CUDA graphs")
    parser.add_argument("--no-offline", action="store_true", help="leave out the walk of peagle.evaluate")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine-k", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    head_dir = prepare_head(args.head, args.target)
    answers, num_left_out = fitting_answers(args.answers, args.max_tokens)
    if args.engine_k is not None:
        groups = run_engine(head_dir, args.target, answers, args.engine_k, args.eager)
        args.out.write_text(json.dumps(groups), encoding="utf-8")
        return
    result = measure(args, head_dir, answers)
    rows = compare(result)
    sys.stdout.write(table(rows) + f"\n{len(answers.data)} answers, {num_left_out} left out\n")
    counts = {"num_answers": len(answers.data), "num_left_out": num_left_out, "temperature": answers.temperature}
    document = {"made": conditions(), **counts, "comparison": rows, **result}
    args.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
