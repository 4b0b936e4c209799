"""What a head gains that learns from live traffic, in the real service: acceptance before a shift, at it, and after.

    python -m benchmarks.learning --shift json --learning '{replay: DIR}' --out learning.json

Starts the service of the configuration with a learner on this machine. Sends general questions, then only prompts of a
kind that the head has never seen, until the learner has trained, judged and proposed a head and its trial is over. At
the start and at the end it sends the same held-out prompts of both kinds, whose answers the learner never gets. Then it
takes the learned head back and sends them once more: tokens/s over those are what the head is worth, for both were
measured while nothing else ran. All greedy, at a fixed K, so both heads draft for the same answers, which are compared,
and AL of one over the other is paired. Counts failed requests. AL = 1 + accepted / steps over all answers of a phase,
with the 95 % interval of a bootstrap over answers; output tokens/s are those of all clients together, and mean
something where `--num-clients` have several prompts each. Writes the figures with their conditions as JSON. A folder to
`replay` is written by `peagle generate`, with the recipe of the head.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from benchmarks.common import running_applications
from deployments import APP_NAME
from deployments.app import build
from deployments.client import change_heads
from peagle.evaluate import interval, resamples
from peagle.provenance import conditions

TRAFFIC = yaml.safe_load("""
words:
  name: [Ana, Bruno, Carla, Diego, Elena, Felix, Grace, Hugo, Irene, Jonas, Karin, Luis, Marta, Nuno, Olga, Pedro, Rita]
  city: [Lisbon, Porto, Madrid, Berlin, Oslo, Turin, Ghent, Lyon, Krakow, Dublin, Vienna, Prague]
  thing: [laptop, desk lamp, office chair, coffee machine, water pump, bicycle, printer, phone case, garden hose, drill,
    tent, backpack, heater, monitor, keyboard, router]
  topic: [photosynthesis, inflation, gravity, democracy, vaccines, volcanoes, the water cycle, black holes, bread, wine,
    compound interest, plate tectonics, machine learning, renewable energy, antibiotics, evolution, tides,
    electric cars, coral reefs, jazz, chess, sleep, memory, bridges, glaciers, honey bees, cotton]
  table: [orders, customers, invoices, employees, shipments, payments, products, tickets]
  column: [total, price, salary, weight, amount, quantity]
  group: [city, country, status, department, category, year]
kinds:
  general:
    - What is {topic}?
    - Explain {topic} to a child.
    - Give me {small} tips about {topic}.
    - Write a short story about {name} and {topic}.
    - Write an email to {name} about {topic}.
    - Compare {topic} and {other_topic}.
  json:
    - "Turn this order into a JSON object with the keys customer, city, item, quantity, price, status and notes: {name}
      from {city} ordered {small} pieces of the {thing} for {number} euros each."
  sql:
    - Write only SQL. Table {table} (id, name, {group}, {column}, created_at). Create the table, insert four rows, then
      select the average {column} for each {group} where {column} is above {number}.
""")


LIVE, HELD_OUT = "live", "held-out"
"""Workloads of the requests that the learner gets, and of those that it does not."""


def prompts(kind: str) -> Iterator[str]:
    """Prompts of a kind, none twice."""
    draw, seen = random.Random(kind), set()
    while True:
        words = {name: draw.choice(options) for name, options in TRAFFIC["words"].items()}
        words |= {"small": str(draw.randint(2, 9)), "number": str(draw.randint(2, 900))}
        text = draw.choice(TRAFFIC["kinds"][kind]).format(**words, other_topic=draw.choice(TRAFFIC["words"]["topic"]))
        if text not in seen:
            seen.add(text)
            yield text


@dataclass(frozen=True)
class Reply:
    """To one request; text "" where it failed. num_steps, num_accepted: of its drafting. Times since the first client's
    begin."""

    sent_s: float
    ended_s: float
    text: str
    head: str = ""
    num_tokens: int = 0
    num_steps: int = 0
    num_accepted: int = 0


class Clients:
    """Some that ask one after another."""

    def __init__(self, url: str, model: str, num_clients: int, max_tokens: int) -> None:
        self._url, self._body = url, {"model": model, "temperature": 0, "max_tokens": max_tokens}
        self._pool, self._begun_s = ThreadPoolExecutor(num_clients), time.monotonic()
        # One for all: each loads certificates when it is made, and that would then be what is measured.
        self._http = httpx.Client(timeout=120, limits=httpx.Limits(max_connections=num_clients + 1))
        self.num_sent = self.num_failed = 0

    def ask(self, texts: Sequence[str], workload: str) -> list[Reply]:
        found = list(self._pool.map(self._one, texts, itertools.repeat(workload)))
        self.num_sent += len(found)
        self.num_failed += sum(not reply.text for reply in found)
        return found

    def _one(self, text: str, workload: str) -> Reply:
        sent_s = time.monotonic() - self._begun_s
        body = {"messages": [{"role": "user", "content": text}], "drafting": {"workload": workload}, **self._body}
        try:
            answer = self._http.post(f"{self._url}/v1/chat/completions", json=body)
            document = answer.raise_for_status().json()
        except (httpx.HTTPError, ValueError):
            document = None
        ended_s = time.monotonic() - self._begun_s
        if document is None:
            return Reply(sent_s, ended_s, "")
        drafting, num_tokens = document["drafting"], document["usage"]["completion_tokens"]
        counts = num_tokens, drafting["num_steps"], drafting["num_accepted_tokens"]
        return Reply(sent_s, ended_s, document["choices"][0]["message"]["content"], drafting["head"], *counts)

    def drafting(self) -> dict[str, Any]:
        return dict(self._http.get(f"{self._url}/drafting", timeout=30).json())


def figures(replies: Sequence[Reply]) -> dict[str, Any]:
    """Of one phase. Where several heads drafted in it, as in a trial, also of each head's requests: all waited in the
    same minutes, so one's tokens/s of a request over the other's is what the head is worth to a caller."""
    steps, accepted = (np.array([getattr(one, name) for one in replies]) for name in ("num_steps", "num_accepted"))
    found: dict[str, Any] = {"num_requests": len(replies), "num_failed": sum(not one.text for one in replies)}
    if not steps.sum():
        return found
    found |= {"num_steps": int(steps.sum()), "acceptance_length": round(float(1 + accepted.sum() / steps.sum()), 4)}
    elapsed_s = max(one.ended_s for one in replies) - min(one.sent_s for one in replies)
    found["output_tokens_per_s"] = round(sum(one.num_tokens for one in replies) / elapsed_s, 1)
    weights = resamples(len(replies))
    bounds = interval(1 + (weights @ accepted)[:, None] / (weights @ steps)[:, None])[0]
    found |= {"acceptance_length_95": bounds, "heads": (heads := sorted({one.head for one in replies if one.head}))}
    if len(heads) > 1:
        found["by_head"] = {head: of_head([one for one in replies if one.head == head]) for head in heads}
    return found


def of_head(replies: Sequence[Reply]) -> dict[str, Any]:
    """Of the requests of one head: how many, their AL, and output tokens per second of waiting."""
    num_steps, num_accepted = (sum(getattr(one, name) for one in replies) for name in ("num_steps", "num_accepted"))
    rate = sum(one.num_tokens for one in replies) / sum(one.ended_s - one.sent_s for one in replies)
    length = round(1 + num_accepted / num_steps, 4) if num_steps else None
    return {"num_requests": len(replies), "acceptance_length": length, "request_tokens_per_s": round(rate, 1)}


def paired(before: Sequence[Reply], after: Sequence[Reply]) -> dict[str, Any]:
    """AL of the same prompts over that of before."""
    rows = np.array([[one.num_steps, one.num_accepted] for one in (*before, *after)]).reshape(2, len(before), 2)
    sums = np.einsum("wp,hpc->hcw", np.vstack([np.ones(len(before)), resamples(len(before))]), rows)
    lengths = 1 + sums[:, 1] / sums[:, 0]
    ratio = lengths[1] / lengths[0]
    return {
        "num_prompts": len(before),
        "num_equal_answers": sum(a.text == b.text for a, b in zip(before, after, strict=True)),
        "ratio": round(float(ratio[0]), 4),
        "ratio_95": interval(ratio[1:, None])[0],
    }


def measure(clients: Clients, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole run against a service that is ready."""
    kinds = "general", options.shift
    traffic = {kind: prompts(kind) for kind in kinds}
    held_out = {kind: list(itertools.islice(traffic[kind], options.num_held_out)) for kind in kinds}
    phases: dict[str, Any] = {}

    def note(name: str, replies: list[Reply]) -> list[Reply]:
        phases[name] = figures(replies)
        say(f"{name}: {phases[name]}")
        return replies

    def take(kind: str, number: int) -> list[Reply]:
        return clients.ask(list(itertools.islice(traffic[kind], number)), kind if options.by_workload else LIVE)

    def judged(when: str) -> dict[str, list[Reply]]:
        workloads = {kind: kind if options.by_workload and when == "after" else HELD_OUT for kind in kinds}
        return {kind: note(f"{kind} held out, {when}", clients.ask(held_out[kind], workloads[kind])) for kind in kinds}

    before = judged("before")
    note("general", take("general", options.num_before))
    since_shift = take(options.shift, 1)
    while_doing: dict[str, list[Reply]] = {}
    end_s = time.monotonic() + options.max_s
    states: list[dict[str, Any]] = []
    promoted: dict[str, Any] | None = None
    while promoted is None and time.monotonic() < end_s:
        if (learner := clients.drafting().get("learner")) is None:  # the router is slow to answer
            time.sleep(options.pause_s)
            continue
        if not states or states[-1]["phase"] != learner["phase"]:
            states.append({"num_requests_since_shift": len(since_shift), **learner})
            say(json.dumps(states[-1]))
        if learner["counters"].get("heads_promoted"):
            promoted = {"num_requests_since_shift": len(since_shift), "seconds_since_shift": None}
            promoted["seconds_since_shift"] = round(since_shift[-1].sent_s - since_shift[0].sent_s, 1)
        else:
            slowly = options.pause_s > 0 and learner["phase"] in ("training", "judging")
            replies = take(options.shift, 1 if slowly else 4 * options.num_clients)
            doing = f"round {learner['counters'].get('rounds', 0)}: {learner['phase']}"
            while_doing.setdefault(doing, []).extend(replies)
            since_shift += replies
            time.sleep(options.pause_s if slowly else 0)
    for doing, replies in while_doing.items():
        note(f"{options.shift}, {doing}", replies)
    note(f"{options.shift}, while it learned", since_shift)
    after = judged("after")
    worth: dict[str, float] = {}
    if promoted is not None and not options.by_workload:
        change_heads()
        judged("rolled back")
        for kind in kinds:
            rates = [phases[f"{kind} held out, {when}"]["output_tokens_per_s"] for when in ("after", "rolled back")]
            worth[kind] = round(rates[0] / rates[1], 3)
    return {
        "tokens_per_s_after_over_rolled_back": worth,
        "after_over_before": {kind: paired(before[kind], after[kind]) for kind in kinds},
        "phases": phases,
        "promoted": promoted,
        "num_requests": clients.num_sent,
        "num_failed": clients.num_failed,
        "states": states,
        "drafting": clients.drafting(),
    }


def settings(options: argparse.Namespace, heads_dir: str) -> dict[str, Any]:
    """The configuration's `args` with a learner."""
    document = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    args: dict[str, Any] = document["applications"][0]["args"]
    args["depth"] = {"policy": "fixed", "default": options.k}
    args["drafter"] |= {"spare_heads": 1 + options.by_workload, "trial_share": 0.5}
    args["engine"]["enable_prefix_caching"] = False  # held-out prompts come twice
    args["learning"] = {
        "heads_dir": heads_dir,
        "workloads": ["general", options.shift] if options.by_workload else [LIVE],
        "num_cpus": 2,
        "share": 1,
        **yaml.safe_load(options.learning),
    }
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs" / "local.yaml")
    parser.add_argument("--learning", default="{}", help="YAML: settings of `learning` that differ")
    parser.add_argument("--shift", choices=[kind for kind in TRAFFIC["kinds"] if kind != "general"], default="json")
    parser.add_argument("--k", type=int, default=7)
    parser.add_argument("--num-clients", type=int, default=8)
    parser.add_argument(
        "--by-workload", action="store_true", help="each kind is a workload, which may get its own head"
    )
    parser.add_argument("--num-before", type=int, default=40, help="general requests before the shift")
    parser.add_argument("--num-held-out", type=int, default=40, help="prompts of each kind, sent before and after")
    parser.add_argument(
        "--pause-s", type=float, default=5.0, help="between requests while it trains; 0: all clients ask"
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-s", type=float, default=3600, help="for the learner, from the shift on")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    with tempfile.TemporaryDirectory() as heads_dir:
        args = settings(options, heads_dir)
        with running_applications(lambda: {APP_NAME: build(args)}, "/health") as url:
            clients = Clients(url, args["model"]["id"], options.num_clients, options.max_tokens)
            found = measure(clients, options, say)
    asked = {name: str(value) for name, value in vars(options).items()}
    document = {"made": conditions(), "options": asked, "learning": args["learning"], **found}
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    names = "tokens_per_s_after_over_rolled_back", "after_over_before", "phases", "promoted", "num_requests"
    summary = {name: found[name] for name in (*names, "num_failed")}
    sys.stdout.write(json.dumps(summary, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
