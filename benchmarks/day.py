"""A day of mixed traffic in minutes: what clients meet while load, text, settings, heads and replicas change.

    python -m benchmarks.day [--config configs/local.yaml] [--day benchmarks/day.yaml] [--minutes 20] [--out FILE]

The service is started as its users start it (`peagle serve`), with a remote drafter, a learner, and one or two targets
by acceptance. Clients ask chats, code and orders, whole and streamed, at temperature 0 and 0.7. `day.yaml` says how
many ask and what happens: a second `peagle serve` pins K of a workload, a target and the drafter are killed, and the
orders' text shifts from sentences that repeat to JSON. The learner proposes a head when it has a better one.

Whole answers should never fail; a stream ends with its own target. Some prompts are asked with K = 0 before, and with
drafts all day: each greedy answer must be the same. Replica hours: of targets that are ready, and of all that run,
those that start or stop included, against the largest number all day.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from benchmarks import faults
from benchmarks.common import markdown_of
from benchmarks.faults import Clients, Sent, ask, health, wait_until
from peagle.provenance import conditions

SETTLE_S = 300.0


class Day:
    """What is asked when, what happens meanwhile, and a look at the service each second. Times: seconds of the day."""

    def __init__(self, plan: dict[str, Any], url: str, options: argparse.Namespace) -> None:
        self._plan, self._url, self.length_s = plan, url, 60 * options.minutes
        self._draw = random.Random(0)
        self.events: list[dict[str, Any]] = []
        self.seen: list[dict[str, Any]] = []
        self.document: dict[str, Any] = {}
        with httpx.Client(base_url=url, timeout=120) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            self._body = {"model": model, "max_tokens": options.max_tokens, "temperature": 0}
            texts = [self._make_text(kind) for kind in (*plan["texts"], *plan["texts"])]
            self.expected = {text: ask(client, self._make_body("checked", text, {"k": 0})).text for text in texts}
        self.begun_s, self.begun_unix_s = time.monotonic(), time.time()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.begun_s

    def run(self, file: Path) -> list[Sent]:
        num_clients = max(number for _, number, *_ in self._plan["phases"].values())
        happening: list[threading.Thread] = []
        with Clients(self._url, num_clients, self._next_body) as clients:
            while self.now_s < self.length_s:
                for event, share in self._plan["events"].items():
                    if share * self.length_s <= self.now_s and len(happening) <= list(self._plan["events"]).index(
                        event
                    ):
                        happening.append(threading.Thread(target=self._make_happen, args=(event, file)))
                        happening[-1].start()
                self._look()
                time.sleep(1)
        for thread in happening:
            thread.join()
        return clients.sent

    def _look(self) -> None:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            self.document = httpx.get(f"{self._url}/drafting", timeout=5).json()
        found = {"ready": health(self._url), "held": len(faults.pids("target")), "wanted": self._num_wanted()}
        learner = (self.document.get("learner") or {}).get("phase", "")
        self.seen.append({"s": round(self.now_s, 1), **found, "learner": learner})

    def _num_wanted(self) -> int:
        return int(((self.document.get("autoscaling") or {}).get("target") or {}).get("num_wanted", 1))

    def _make_text(self, kind: str) -> str:
        words = {name: self._draw.choice(options) for name, options in self._plan["words"].items()}
        text: str = self._draw.choice(self._plan["texts"][kind])
        return text.format(**words, n=self._draw.randint(3, 9), number=self._draw.randint(2, 900))

    def _make_body(self, kind: str, text: str, drafting: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        body = {**self._body, "messages": [{"role": "user", "content": text}], **fields}
        return body if kind == "chat" else {**body, "drafting": drafting or {"workload": kind}}

    def _next_body(self, number: int) -> dict[str, Any] | None:
        share = self.now_s / self.length_s
        phase = [phase for phase in self._plan["phases"].values() if phase[0] <= share][-1]
        _, num_clients, pause_s, orders_share = phase
        if number >= num_clients:
            return None
        time.sleep(pause_s)
        (kind,) = self._draw.choices(list(self._plan["kinds"]), list(self._plan["kinds"].values()))
        kind = "orders" if self._draw.random() < orders_share else kind
        is_stream, temperature = self._draw.random() < 0.5, self._draw.choice((0, 0.7))
        fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
        if kind == "checked":
            return self._make_body(kind, self._draw.choice(list(self.expected)), **fields)
        is_shifted = kind == "orders" and share >= self._plan["events"]["text of orders shifts"]
        return self._make_body(
            kind, self._make_text("shifted" if is_shifted else kind), **fields, temperature=temperature
        )

    def _make_happen(self, event: str, file: Path) -> None:
        killed = event.removesuffix(" killed")
        if killed == "target":  # without a second one nobody would answer
            wait_until(lambda: health(self._url) > 1, SETTLE_S)
        began_s, num = self.now_s, health(self._url)
        took_s: float | None = 0.0
        if killed != event:
            before = {kind: faults.pids(kind) for kind in {"drafter", killed}}
            took_s = faults.measure_recovery(
                killed, lambda: faults.is_well(self._url, before, min(num, self._num_wanted()))
            )
        elif event.startswith("K "):
            took_s = self._change_settings(file)
        self.note(event, began_s, took_s, f"{num} targets before")

    def note(self, event: str, began_s: float, took_s: float | None, note: str) -> None:
        well_s = None if took_s is None else round(began_s + took_s, 1)
        self.events.append({"event": event, "began s": round(began_s, 1), "all well s": well_s, "note": note})
        sys.stderr.write(f"{json.dumps(self.events[-1])}\n")

    def _change_settings(self, file: Path) -> float | None:
        """Run `peagle serve` again with other live settings: seconds until answers have the new K, or None."""
        document, began_s = yaml.safe_load(file.read_text(encoding="utf-8")), time.monotonic()
        document["applications"][0]["args"] = merge(document["applications"][0]["args"], self._plan["live"])
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
        env = {**os.environ, "RAY_ADDRESS": faults.ray_address()}
        process = subprocess.Popen(faults.serve_command(file), env=env, stdout=sys.stderr)
        with httpx.Client(base_url=self._url, timeout=120) as client:
            body = self._make_body("orders", "Hi", max_tokens=2)
            wait_until(lambda: ask(client, body).drafting.get("source") == "workload", SETTLE_S)
        took_s = time.monotonic() - began_s
        return took_s if process.wait(SETTLE_S) == 0 and took_s < SETTLE_S else None

    def note_changes(self) -> None:
        """Add what happened by itself: other numbers of targets, phases of the learner, changes of heads."""
        for before, now in itertools.pairwise(self.seen):
            if before["wanted"] != now["wanted"]:
                later = (seen["s"] for seen in self.seen if seen["s"] >= now["s"] and seen["ready"] == now["wanted"])
                well_s = next(later, None)
                took_s = None if well_s is None else well_s - now["s"]
                self.note(f"{now['wanted']} targets wanted", now["s"], took_s, f"{before['wanted']} before")
            if now["learner"] != before["learner"]:
                self.note(f"learner: {now['learner']}", now["s"], 0.0, "")
        for head in self.document.get("head_changes", ()):
            note = f"{head['reason']}; AL gain {head['gain']} [{head['low']}, {head['high']}]"
            began_s, took_s = head["begun_s"] - self.begun_unix_s, head["changed_s"] - head["begun_s"]
            self.note(f"head {head['state']}", began_s, took_s, note)
        self.events.sort(key=lambda event: event["began s"])

    def summarize(self, phase: str, sent: Sequence[Sent], begun_s: float, end_s: float) -> dict[str, Any]:
        """Figures of the requests that began in a phase."""
        sent = [one for one in sent if begun_s <= one.start_s - self.begun_s < end_s]
        found: dict[str, Any] = {"phase": phase, "s": round(end_s - begun_s)}
        for name, streams in ("whole", False), ("streams", True):
            failed = Counter(one.outcome for one in sent if one.outcome and one.streams == streams)
            found |= {name: sum(one.streams == streams for one in sent), f"{name} failed": dict(failed)}
        done = [one for one in sent if not one.outcome]
        found["tokens/s"] = round(sum(one.num_tokens for one in done) / (end_s - begun_s), 1)
        firsts = [one.ttft_s for one in done if one.streams and one.ttft_s is not None]
        for name, times in ("TTFT", firsts), ("latency", [one.end_s - one.start_s for one in done]):
            for percent in (50, 99):
                found[f"{name} p{percent}"] = round(float(np.percentile(times, percent)), 2) if times else None
        orders = [one.drafting for one in done if one.drafting.get("workload", "").startswith("orders")]
        num_steps, num_accepted = (sum(one[f"num_{name}"] for one in orders) for name in ("steps", "accepted_tokens"))
        found["AL of orders"] = round(1 + num_accepted / num_steps, 2) if num_steps else None
        checked = [one for one in done if one.drafting["workload"].startswith("checked")]
        return {**found, "checked": len(checked), "differing": sum(map(self.differs, checked))}

    def differs(self, one: Sent) -> bool:
        """Whether an answer is not that without drafts."""
        is_checked = not one.outcome and one.drafting["workload"].startswith("checked")
        return is_checked and one.text != self.expected[one.prompt]


def merge(settings: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Sections joined key by key."""
    both = {key: merge(settings[key], value) for key, value in others.items() if isinstance(settings.get(key), dict)}
    return {**settings, **others, **both}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs" / "local.yaml")
    parser.add_argument("--day", type=Path, default=Path(__file__).with_name("day.yaml"))
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the service is stopped then too
    plan, document = (yaml.safe_load(file.read_text(encoding="utf-8")) for file in (options.day, options.config))
    args = document["applications"][0]["args"] = merge(document["applications"][0]["args"], plan["settings"])
    for section in args["target"], args["drafter"].get("replicas", {}):
        section.pop("num_replicas", None)  # the traffic decides
    bounds = args["autoscaling"]["target"]
    with faults.running_service(document, bounds["min"]) as (url, file):
        day = Day(plan, url, options)
        sent = day.run(file)
    day.note_changes()
    begins = [share * day.length_s for share, *_ in plan["phases"].values()]
    spans = [("all", 0.0, day.length_s), *zip(plan["phases"], begins, [*begins[1:], day.length_s], strict=True)]
    rows = [day.summarize(phase, sent, begun_s, end_s) for phase, begun_s, end_s in spans]
    gaps = [(seen, (later["s"] - seen["s"]) / 3600) for seen, later in itertools.pairwise(day.seen)]
    hours = {name: sum(seen[name] * hours for seen, hours in gaps) for name in ("ready", "held")}
    hours["fixed"] = bounds["max"] * sum(hours for _, hours in gaps)
    if options.out is not None:
        found: dict[str, Any] = {"made": conditions(), "options": {k: str(v) for k, v in vars(options).items()}}
        found |= {"settings": args, "rows": rows, "events": day.events, "replica_hours": hours}
        found["failed"] = [vars(one) for one in sent if one.outcome]
        differing = [{"expected": day.expected[one.prompt], **vars(one)} for one in sent if day.differs(one)]
        found |= {"learner": day.document.get("learner"), "differing": differing, "seen": day.seen}
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write("\n\n".join(map(markdown_of, (rows, day.events, [hours]))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
