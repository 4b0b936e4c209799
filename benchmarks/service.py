"""What speculation brings in the service: OTPS and AL without a drafter, and with P-EAGLE at several K.

    python -m benchmarks.service configs/local.yaml --questions ../shared/data/spec_bench_dev.jsonl --out bench.json
    python -m benchmarks.service configs/local.yaml --k 0 3 5 7 learned --out bench.json

Starts the service of the configuration twice on this machine, each time in a Ray of its own: first without its
`drafter` and `depth` (vLLM as it is; K = 0 in an engine with a drafter would still pay for drafting), then as it
stands, where the prompts are asked at every K in turn, `learned` leaving K to the service (`depth.policy: adaptive`),
with the category of a prompt as its workload. One request at a time, greedy, streamed, no reuse of cached
prompts. Writes the figures with their conditions as JSON.
"""

import argparse
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import yaml

from benchmarks.common import running_applications
from benchmarks.prompts import Prompt, choose_prompts
from deployments import APP_NAME
from deployments.app import build
from peagle.provenance import conditions

NGRAM = 8

Depth = int | Literal["learned"] | None
"""K of a request; `learned`: the service's own choice; None: a service without a drafter."""


@dataclass(frozen=True)
class Answer:
    """One prompt answered by one variant. Times in seconds: `ttft_s` to the first token, `total_s` to the last."""

    prompt: int
    category: str
    token_ids: tuple[int, ...]
    ttft_s: float
    total_s: float
    num_steps: int
    num_accepted_tokens: int


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether under half of the answer's 8-grams are distinct. Answers shorter than 9 tokens are not."""
    grams = [tuple(token_ids[start : start + NGRAM]) for start in range(len(token_ids) - NGRAM + 1)]
    return len(grams) > 1 and len(set(grams)) < len(grams) / 2


def figures(answers: Iterable[Answer]) -> dict[str, Any]:
    """OTPS (output tokens / seconds, prompt processing included), TTFT, TPOT and AL over some answers.

    AL = 1 + accepted / steps, over all steps together; None where nothing was drafted.
    """
    answers = list(answers)
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    total_s = sum(answer.total_s for answer in answers)
    decode_s = sum(answer.total_s - answer.ttft_s for answer in answers)
    num_steps = sum(answer.num_steps for answer in answers)
    num_accepted = sum(answer.num_accepted_tokens for answer in answers)
    num_decoded = num_tokens - len(answers)
    return {
        "num_answers": len(answers),
        "num_output_tokens": num_tokens,
        "otps": round(num_tokens / total_s, 2) if total_s else None,
        "mean_ttft_ms": round(1000 * sum(answer.ttft_s for answer in answers) / len(answers), 1) if answers else None,
        "mean_tpot_ms": round(1000 * decode_s / num_decoded, 2) if num_decoded > 0 else None,
        "acceptance_length": round(1 + num_accepted / num_steps, 3) if num_steps else None,
    }


def summary(by_variant: dict[str, list[Answer]], baseline: str) -> dict[str, Any]:
    """Figures of each variant: over all answers, over looping and non-looping ones, and per category; with the ratio of
    OTPS to the baseline's, and how many answers equal the baseline's token for token.

    Whether an answer loops is judged on the baseline's, so that every variant is split alike.
    """
    reference = {answer.prompt: answer for answer in by_variant[baseline]}
    looping = {prompt for prompt, answer in reference.items() if is_looping(answer.token_ids)}
    parts: dict[str, Callable[[Answer], bool]] = {
        "all": lambda answer: True,
        "looping": lambda answer: answer.prompt in looping,
        "non_looping": lambda answer: answer.prompt not in looping,
    }
    report: dict[str, Any] = {}
    for variant, answers in by_variant.items():
        entry: dict[str, Any] = {name: figures(filter(keep, answers)) for name, keep in parts.items()}
        for name, keep in parts.items():
            entry[name]["ratio"] = _ratio(entry[name]["otps"], figures(filter(keep, reference.values()))["otps"])
        categories = sorted({answer.category for answer in answers})
        entry["by_category"] = {
            category: figures(answer for answer in answers if answer.category == category) for category in categories
        }
        entry["num_equal_to_baseline"] = sum(
            answer.token_ids == reference[answer.prompt].token_ids for answer in answers
        )
        report[variant] = entry
    return report


def _ratio(otps: float | None, baseline: float | None) -> float | None:
    return round(otps / baseline, 3) if otps and baseline else None


def table(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    lines = [f"{'variant':<12}{'answers':<14}{'OTPS':>8}{'ratio':>8}{'AL':>8}{'TPOT ms':>9}{'TTFT ms':>9}{'number':>8}"]
    for variant, entry in report.items():
        for part in ("all", "non_looping", "looping"):
            cells = entry[part]
            lines.append(
                f"{variant:<12}{part:<14}{_cell(cells['otps']):>8}{_cell(cells['ratio']):>8}"
                f"{_cell(cells['acceptance_length']):>8}{_cell(cells['mean_tpot_ms']):>9}"
                f"{_cell(cells['mean_ttft_ms']):>9}{cells['num_answers']:>8}"
            )
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "-" if value is None else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0; the JSON is written and the table shown."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.service", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--questions", type=Path, help="JSONL with category and turns; HumanEval alone without it")
    parser.add_argument("--num-prompts", type=int, default=44)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--k", type=parse_depth, nargs="+", default=[3, 5, 7], help="numbers, or learned")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    options = parser.parse_args(arguments)
    (application,) = yaml.safe_load(options.config.read_text())["applications"]
    # The keys of callers are not ours to know; the port is this machine's own.
    args = {key: value for key, value in application["args"].items() if key != "callers"}
    stock = {key: value for key, value in args.items() if key not in ("drafter", "depth", "speculative_config")}
    prompts = choose_prompts(options.num_prompts, options.questions)
    made = measuring_conditions(options, args, prompts)

    answers: dict[str, list[Answer]] = {}
    with running_applications(lambda: {APP_NAME: build(stock)}, "/health") as url:
        answers["stock"] = measure(url, prompts, [None], options.max_tokens)[None]
    with running_applications(lambda: {APP_NAME: build(args)}, "/health") as url:
        by_k = measure(url, prompts, options.k, options.max_tokens)
        learned = httpx.get(f"{url}/drafting").json()
    answers |= {str(k) if k == "learned" else f"K={k}": by_k[k] for k in options.k}

    report = summary(answers, "stock")
    made["load_average_at_end"] = os.getloadavg()
    document = {"conditions": made, "results": report, "drafting_at_end": learned}
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(report))
    print(f"written to {options.out}")
    return 0


def parse_depth(text: str) -> int | Literal["learned"]:
    """K of the command line. Raises ValueError for what is neither a number nor `learned`."""
    return "learned" if text == "learned" else int(text)


def measure(url: str, prompts: list[Prompt], depths: Sequence[Depth], max_tokens: int) -> dict[Depth, list[Answer]]:
    """Ask every prompt at every K in turn, so that a drift of the machine's speed meets all K alike."""
    answers: dict[Depth, list[Answer]] = {k: [] for k in depths}
    with httpx.Client(base_url=url, timeout=600) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        for k in depths:
            _ask(client, model, 0, ("warm-up", "Say hello."), k, 16)
        for index, prompt in enumerate(prompts):
            for k in depths:
                answers[k].append(_ask(client, model, index, prompt, k, max_tokens))
            print(f"\r{index + 1} of {len(prompts)} prompts", end="", file=sys.stderr)
    print(file=sys.stderr)
    return answers


def _ask(client: httpx.Client, model: str, index: int, prompt: Prompt, k: Depth, max_tokens: int) -> Answer:
    category, text = prompt
    wish = {"workload": category} if k == "learned" else {"k": k, "workload": category}
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": uuid.uuid4().hex,
        **({} if k is None else {"drafting": wish}),
    }
    token_ids: list[int] = []
    drafting: dict[str, Any] = {}
    start = time.perf_counter()
    first = end = start
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"error: {response.status_code} {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            new_ids = [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
            if new_ids:
                end = time.perf_counter()
                first = end if not token_ids else first
                token_ids += new_ids
            drafting = chunk.get("drafting", drafting)
    return Answer(
        prompt=index,
        category=category,
        token_ids=tuple(token_ids),
        ttft_s=first - start,
        total_s=end - start,
        num_steps=drafting["num_steps"],
        num_accepted_tokens=drafting["num_accepted_tokens"],
    )


def measuring_conditions(options: argparse.Namespace, args: dict[str, Any], prompts: list[Prompt]) -> dict[str, Any]:
    """Everything that a figure needs beside it."""
    return {
        **conditions(),
        "config": {"file": str(options.config), "args": args},
        "load_average_at_start": os.getloadavg(),
        "load": "one request at a time, greedy, streamed",
        "num_prompts": len(prompts),
        "num_prompts_by_category": {
            name: sum(category == name for category, _ in prompts) for name in sorted({c for c, _ in prompts})
        },
        "max_tokens": options.max_tokens,
        "looping": "under half of the answer's 8-grams distinct, judged on the stock answer",
    }


if __name__ == "__main__":
    sys.exit(main())
