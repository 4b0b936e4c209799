"""Workloads, their acceptance by draft position, and the K that each gets, from a running service (`peagle view`).

Asks `GET /drafting` of the service: the document of `cluster.k_policy.KPolicy`, with the heads, drafters and
links that `deployments.telemetry` adds and the decision of `deployments.autoscaling`.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx
import typer
from rich.console import Console, ConsoleOptions, Group
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

TIMEOUT_S = 10.0
POSITION_WIDTH = 12
"""Characters of a position: "100(99-100) "."""


def show(url: str, api_key: str | None, interval_s: float | None) -> None:
    """Print the document of a service, once or every `interval_s` until Ctrl-C; on a terminal it is drawn in place."""
    console = Console(highlight=False, markup=False, emoji=False)
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            document = fetch(url, api_key)
            if console.is_terminal:
                live.update(rendered(document), refresh=True)
            else:
                typer.echo(as_text(document))
            if interval_s is None:
                return
            time.sleep(interval_s)


def as_text(document: Mapping[str, Any]) -> str:
    """The document for a file or another program: no line is broken."""
    console = Console(highlight=False, markup=False, emoji=False, width=1000, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(rendered(document))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def rendered(document: Mapping[str, Any]) -> Group:
    """A line each workload, S1, S2, ... as mean (low-high) in per cent; then reasons, heads, drafters."""
    max_draft_tokens = int(document["max_draft_tokens"])
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("workload", "running", "steps", "K", "source", "expected AL"):
        table.add_column(name, no_wrap=True)
    table.add_column(Positions([f"S{position}" for position in range(1, max_draft_tokens + 1)]))
    for workload in document["workloads"]:
        table.add_row(*_row(workload, max_draft_tokens))
    about = f"K_max {max_draft_tokens}, policy {document['policy']}, {document['step_times']}"
    lines = ["", f"{document['model']}: {about if max_draft_tokens else 'no drafter'}"]
    lines += [
        f"{workload['workload']}: {workload['reason']}" for workload in document["workloads"] if workload["reason"]
    ]
    lines += [_head_line(head) for head in document.get("heads", ())]
    lines += [change_line(change) for change in document.get("head_changes", ())]
    lines += [_drafter_line(drafter, document.get("links", ())) for drafter in document.get("drafters", ())]
    lines += [_learner_line(learner)] if (learner := document.get("learner")) else []
    return Group(table, *lines, *_scaling_lines(document.get("autoscaling")))


class Positions:
    """One text for each draft position, as many on a line as fit: rows break at the same position as their header."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [text.ljust(POSITION_WIDTH) for text in texts]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        num = max(1, options.max_width // POSITION_WIDTH)
        for start in range(0, len(self._texts), num):
            yield Text("".join(self._texts[start : start + num]), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(POSITION_WIDTH, POSITION_WIDTH * max(1, len(self._texts)))


def fetch(url: str, api_key: str | None = None) -> dict[str, Any]:
    """The document of a service at `url`. Raises OSError when it answers with none."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/drafting", headers=headers, timeout=TIMEOUT_S).raise_for_status()
        document: dict[str, Any] = answer.json()
    except httpx.HTTPStatusError as error:
        status, text = error.response.status_code, error.response.text
        text = "this is no service of peagle" if status == 404 and text.lstrip().startswith("<") else text
        hint = "write --api-key, or set PEAGLE_API_KEY" if status == 401 and api_key is None else text
        raise OSError(f"{url.rstrip('/')}/drafting answered {status}: {hint:.200}") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise OSError(f"{url}/drafting does not answer: {error}") from error
    return document


def _row(workload: Mapping[str, Any], max_draft_tokens: int) -> list[str | Positions]:
    rates = workload["acceptance_rates"]
    known = zip(rates["mean"], rates["low"], rates["high"], strict=True)
    texts = [f"{100 * mean:.0f}({100 * low:.0f}-{100 * high:.0f})" for mean, low, high in known][:max_draft_tokens]
    texts += ["-"] * (max_draft_tokens - len(texts))
    length = "-" if workload["acceptance_length"] is None else f"{workload['acceptance_length']:.2f}"
    counts = [f"{workload['num_requests']:g}", f"{workload['num_steps']:.0f}", str(workload["k"])]
    return [workload["workload"], *counts, workload["source"], length, Positions(texts)]


def _head_line(head: Mapping[str, Any]) -> str:
    length = head["acceptance_length"]
    measured = "nothing drafted yet" if length is None else f"measured AL {length:.2f}"
    live = "drafts" if head["is_live"] else "no longer drafts"
    return f"head {head['head']} ({live}): {measured}, {head['num_steps']} steps"


def change_line(change: Mapping[str, Any]) -> str:
    """A trial or change of heads, and how it stands."""
    against = f" against {change['against']}" if change["against"] else ""
    state = change["state"] + (", watched" if change["is_watched"] else "")
    gain = ""
    has_figures = "AL " in change["reason"] and not change["is_watched"]  # the verdict that ended it
    if change["gain"] is not None and not has_figures:
        gain = f"; AL {change['gain']:+.1%} ({change['low']:+.1%} to {change['high']:+.1%})"
    return f"{change['name']} ({change['head'] or 'not loaded'}){against}: {state}, {change['reason']}{gain}"


def _drafter_line(drafter: Mapping[str, Any], links: Sequence[Mapping[str, Any]]) -> str:
    states = [f"{link['state']} by {link['path']}" for link in links if link["drafter"] == drafter["address"]]
    heads = ", ".join(head["head"] for head in drafter["heads"])
    refused = f"; refused: {drafter['refused']}" if drafter["refused"] else ""
    return f"drafter {drafter['address']}: {heads}; links: {', '.join(states) or 'none'}{refused}"


def _learner_line(learner: Mapping[str, Any]) -> str:
    kept = ", ".join(f"{number} of {workload}" for workload, number in learner["num_answers"].items())
    said = f"; last round: {verdict}" if (verdict := learner["last_round"].get("verdict")) else ""
    problem = f"; problem: {learner['problem']}" if learner["problem"] else ""
    return f"learner ({learner['phase']}): keeps {kept or 'nothing yet'}{said}{problem}"


def _scaling_lines(decision: Mapping[str, Any] | None) -> list[str]:
    """Replicas that run and are wanted, demand and capacity, and why."""
    if decision is None:
        return []
    parts = [
        f"{name} {'?' if counts['num_running'] is None else counts['num_running']} running, {counts['num_wanted']} "
        f"wanted ({counts['min']}..{counts['max']})"
        for name in ("target", "drafter")
        if (counts := decision[name]) is not None
    ]
    demand, capacity = decision["demand_tokens_per_s"], decision["capacity_tokens_per_s"]
    parts += [] if demand is None else [f"demand {demand:.0f} tokens/s"]
    parts += [] if capacity is None else [f"capacity {capacity:.0f} tokens/s a replica"]
    return [f"replicas: {'; '.join(parts)}", f"autoscaling ({decision['source']}): {decision['reason']}"]
