"""A day of mixed traffic in minutes: what clients meet while load, text, settings, heads and replicas change.

    python -m benchmarks.day [--minutes 20] --out FILE
    python -m benchmarks.day --day benchmarks/day.yaml benchmarks/day-gpu.yaml --out FILE     (on one GPU)

`peagle serve` runs the service with a remote drafter, a learner, and one or two targets by acceptance. `day.yaml` says
how many clients ask what, and what happens: a second `peagle serve` pins K of a workload, a target and the drafter are
killed, and the orders' text shifts from sentences that repeat to JSON. The learner keeps orders, and proposes a head
when it has a better one. Whole answers should never fail; a stream ends with its target.

Greedy answers to some prompts, asked all day, must be those without drafts. Replica hours: of targets that are ready,
and of all that run ("held"), against the largest number all day.
"""

import argparse
import contextlib
import functools
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
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from benchmarks import faults
from benchmarks.common import markdown_of
from benchmarks.faults import RECOVERY_TIMEOUT_S, Sent, ask, health
from peagle.provenance import conditions


class Day:
    """What is asked when, what happens meanwhile, and a look at the service each second. Times: seconds of the day."""

    def __init__(self, plan: dict[str, Any], url: str, length_s: float) -> None:
        self._plan, self._url, self.length_s, self._draw = plan, url, length_s, random.Random(0)
        self.events: list[dict[str, Any]] = []
        self.seen: list[dict[str, Any]] = []
        self.document: dict[str, Any] = {}
        with httpx.Client(base_url=url, timeout=120) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            self._body = {"model": model, "max_tokens": plan["max_tokens"], "temperature": 0}
            texts = [self._make_text(kind) for kind in (*plan["texts"], *plan["texts"])]
            self.expected = {text: ask(client, self._make_body("checked", text, {"k": 0})).text for text in texts}
        self.begun_s = time.monotonic()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.begun_s

    def run(self, file: Path) -> list[Sent]:
        """The day. A greedy answer that is not the one without drafts has an outcome then."""
        events = [(event, share, file) for event, share in self._plan["events"].items()]
        threads = [threading.Thread(target=self._make_happen, args=event, daemon=True) for event in events]
        for thread in threads:
            thread.start()
        with faults.Clients(
            self._url, max(one[1] for one in self._plan["phases"].values()), self._next_body
        ) as clients:
            while self.now_s < self.length_s or any(thread.is_alive() for thread in threads):
                with contextlib.suppress(httpx.HTTPError, ValueError):
                    self.document = httpx.get(f"{self._url}/drafting", timeout=5).json()
                wanted = ((self.document.get("autoscaling") or {}).get("target") or {}).get("num_wanted", 1)
                found = {"ready": health(self._url), "held": len(faults.pids("target")), "wanted": wanted}
                found["learner"] = (self.document.get("learner") or {}).get("phase")
                self.seen.append({"s": round(self.now_s, 1), **found})
                time.sleep(1)
        for one in clients.sent:
            expected = self.expected.get(one.body["messages"][0]["content"], one.text)
            if one.body["temperature"] == 0 and not one.outcome and one.text != expected:
                one.outcome = "another answer"
        return clients.sent

    def _make_text(self, kind: str) -> str:
        words = {name: self._draw.choice(options) for name, options in self._plan["words"].items()}
        return str(self._draw.choice(self._plan["texts"][kind])).format(**words)

    def _make_body(self, kind: str, text: str, drafting: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        body = {**self._body, "messages": [{"role": "user", "content": text}], **fields}
        return body if kind == "chat" else {**body, "drafting": drafting or {"workload": kind}}

    def _next_body(self, number: int) -> dict[str, Any] | None:
        share = self.now_s / self.length_s
        _, num_clients, pause_s, orders = [one for one in self._plan["phases"].values() if one[0] <= share][-1]
        if number >= num_clients or share >= 1:
            return None
        time.sleep(pause_s)
        kind = "orders" if self._draw.random() < orders else self._draw.choice(self._plan["others"])
        fields: dict[str, Any] = {"temperature": 0 if kind == "checked" else self._draw.choice((0, 0.7))}
        if self._draw.random() < 0.5:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        is_shifted = kind == "orders" and share >= self._plan["events"]["text of orders shifts"]
        texts = list(self.expected) if kind == "checked" else [self._make_text("shifted" if is_shifted else kind)]
        return self._make_body(kind, self._draw.choice(texts), **fields)

    def _make_happen(self, event: str, share: float, file: Path) -> None:
        time.sleep(share * self.length_s)
        killed = event.removesuffix(" killed")
        if killed == "target":  # without a second one nobody would answer
            faults.wait_until(lambda: health(self._url) > 1, RECOVERY_TIMEOUT_S)
        began_s, num = self.now_s, health(self._url)
        took_s = self._change_settings(file) if event.startswith("K ") else 0.0
        if killed != event:
            before = {kind: faults.pids(kind) for kind in {"drafter", killed}}
            is_well = lambda: faults.is_well(self._url, before, min(num, self.seen[-1]["wanted"]))  # noqa: E731
            took_s = faults.measure_recovery(killed, is_well)
        self.note(event, began_s, took_s, f"{num} targets before")

    def note(self, event: str, began_s: float, took_s: float | None, note: str) -> None:
        times = {"began s": round(began_s, 1), "all well s": None if took_s is None else round(began_s + took_s, 1)}
        self.events.append({"event": event, **times, "note": note})
        sys.stderr.write(f"{json.dumps(self.events[-1])}\n")

    def _change_settings(self, file: Path) -> float | None:
        """Run `peagle serve` again with other live settings: seconds until answers have the new K, or None."""
        document, began_s = yaml.safe_load(file.read_text()), time.monotonic()
        document["applications"][0]["args"] = merge(document["applications"][0]["args"], self._plan["live"])
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
        env, body = {**os.environ, "RAY_ADDRESS": faults.ray_address()}, self._make_body("orders", "Hi", max_tokens=2)
        process = subprocess.Popen(faults.serve_command(file), env=env, stdout=sys.stderr)
        with httpx.Client(base_url=self._url, timeout=120) as client:
            faults.wait_until(lambda: ask(client, body).drafting.get("source") == "workload", RECOVERY_TIMEOUT_S)
        took_s = time.monotonic() - began_s
        return took_s if process.wait(RECOVERY_TIMEOUT_S) == 0 and took_s < RECOVERY_TIMEOUT_S else None

    def note_changes(self) -> None:
        """Add what happened by itself: other numbers of targets, and changes of heads."""
        for before, now in itertools.pairwise(self.seen):
            if before["wanted"] != now["wanted"] != now["ready"]:
                later = (seen["s"] for seen in self.seen if seen["s"] > now["s"] and seen["ready"] == now["wanted"])
                if (ready_s := next(later, None)) is not None:
                    self.note(f"{now['wanted']} targets", now["s"], ready_s - now["s"], f"{before['wanted']} before")
        for head in self.document.get("head_changes", ()):
            note = f"{head['reason']}; AL gain {head['gain']} [{head['low']}, {head['high']}]"
            began_s, took_s = self.now_s - time.time() + head["begun_s"], head["changed_s"] - head["begun_s"]
            self.note(f"head {head['state']}", began_s, took_s, note)
        self.events.sort(key=lambda event: event["began s"])

    def summarize(self, phase: str, sent: list[Sent], begun_s: float, end_s: float) -> dict[str, Any]:
        """Figures of the requests that began in a phase."""
        sent = [one for one in sent if begun_s <= one.start_s - self.begun_s < end_s]
        done = [one for one in sent if not one.outcome]
        found: dict[str, Any] = {"phase": phase, "s": round(end_s - begun_s)}
        for name, streams in ("whole", False), ("streams", True):
            those = [one for one in sent if one.streams == streams]
            found |= {name: len(those), f"{name} failed": dict(Counter(one.outcome for one in those if one.outcome))}
        found["tokens/s"] = round(sum(one.num_tokens for one in done) / (end_s - begun_s), 1)
        times = {"TTFT": [one.ttft_s or 0.0 for one in done if one.streams]}
        times["latency"] = [one.end_s - one.start_s for one in done]
        for name, percent in itertools.product(times, (50, 99)):
            found[f"{name} p{percent}"] = round(float(np.percentile(times[name] or [0.0], percent)), 2)
        orders = [one.drafting for one in done if one.drafting["workload"].startswith("orders")]
        steps, accepted = (sum(one[f"num_{name}"] for one in orders) for name in ("steps", "accepted_tokens"))
        found["AL of orders"] = round(1 + accepted / max(1, steps), 2)
        texts = [one.body["messages"][0]["content"] for one in sent if one.body["temperature"] == 0]
        return {**found, "compared": sum(text in self.expected for text in texts)}


def merge(args: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """`args` with the keys of `sections`; a mapping among them replaces single keys of the one that is there."""
    merged = dict(args)
    for name, keys in sections.items():
        merged[name] = {**args.get(name, {}), **keys} if isinstance(keys, dict) else keys
    return merged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs" / "local.yaml")
    parser.add_argument("--day", type=Path, nargs="+", default=[Path(__file__).with_name("day.yaml")])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the service is stopped then too
    *plans, document = (yaml.safe_load(file.read_text(encoding="utf-8")) for file in (*options.day, options.config))
    plan = functools.reduce(merge, plans)
    args = document["applications"][0]["args"] = merge(document["applications"][0]["args"], plan["settings"])
    args["target"].pop("num_replicas", None)  # the traffic decides
    with faults.running_service(document, args["autoscaling"]["target"]["min"]) as (url, file):
        day = Day(plan, url, 60 * options.minutes)
        sent = day.run(file)
    day.note_changes()
    begins = [share * day.length_s for share, *_ in plan["phases"].values()]
    spans = zip([*plan["phases"], "all"], [*begins, 0.0], [*begins[1:], *2 * [day.length_s]], strict=True)
    rows = [day.summarize(phase, sent, begun_s, end_s) for phase, begun_s, end_s in spans]
    gaps = [(seen, (later["s"] - seen["s"]) / 3600) for seen, later in itertools.pairwise(day.seen)]
    hours = {name: sum(seen[name] * hours for seen, hours in gaps) for name in ("ready", "held")}
    hours["fixed"] = args["autoscaling"]["target"]["max"] * sum(hours for _, hours in gaps)
    found: dict[str, Any] = {"made": conditions(), "options": {k: str(v) for k, v in vars(options).items()}}
    found |= {"settings": args, "rows": rows, "events": day.events, "replica_hours": hours}
    keys = ("outcome", "streams", "prompt", "text")
    failed = [(one.outcome, one.streams, one.body["messages"][0]["content"], one.text) for one in sent if one.outcome]
    found["failed"] = [dict(zip(keys, key, strict=True), times=times) for key, times in Counter(failed).items()]
    found["learner"] = day.document.get("learner")
    found["seen"] = [now for was, now in itertools.pairwise(day.seen) if {**was, "s": 0} != {**now, "s": 0}]
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write("\n\n".join(map(markdown_of, (rows, day.events, [hours]))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
