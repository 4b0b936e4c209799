"""A table of workloads, their acceptance by depth, and the K that each gets, from a running service (`peagle view`).

Asks `GET /drafting` of the service: the document of `cluster.k_policy.KPolicy`, with the heads, drafters and
links that `deployments.telemetry` adds and the decision of `deployments.autoscaling`.
"""

import json
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

TIMEOUT_S = 10.0


def table(document: Mapping[str, Any]) -> str:
    """The document as text: a line each workload, survival S1, S2, ... as mean (low-high) in per cent; then reasons."""
    max_draft_tokens = int(document["max_draft_tokens"])
    header = ["workload", "requests", "steps", "K", "source", "AL", *(f"S{i}" for i in range(1, max_draft_tokens + 1))]
    rows = [header, *(_row(workload, max_draft_tokens) for workload in document["workloads"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [
        "",
        f"{document['model']}: K_max {max_draft_tokens}, policy {document['policy']}, {document['step_times']}",
    ]
    lines += [
        f"{workload['workload']}: {workload['reason']}" for workload in document["workloads"] if workload["reason"]
    ]
    lines += [_head_line(head) for head in document.get("heads", ())]
    lines += [change_line(change) for change in document.get("head_changes", ())]
    lines += [_drafter_line(drafter, document.get("links", ())) for drafter in document.get("drafters", ())]
    lines += [_learner_line(learner)] if (learner := document.get("learner")) else []
    return "\n".join([*lines, *_scaling_lines(document.get("autoscaling"))])


def fetch(url: str, api_key: str | None = None) -> dict[str, Any]:
    """The document of a service at `url`. Raises OSError when it does not answer with one."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url.rstrip("/") + "/drafting", headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        document: dict[str, Any] = json.load(answer)
    return document


def _row(workload: Mapping[str, Any], max_draft_tokens: int) -> list[str]:
    survival = workload["survival"]
    known = zip(survival["mean"], survival["low"], survival["high"], strict=True)
    depths = [f"{100 * mean:.0f} ({100 * low:.0f}-{100 * high:.0f})" for mean, low, high in known][:max_draft_tokens]
    depths += ["-"] * (max_draft_tokens - len(depths))
    length = "-" if workload["acceptance_length"] is None else f"{workload['acceptance_length']:.2f}"
    counts = [f"{workload['num_requests']:g}", f"{workload['num_steps']:.0f}", str(workload["k"])]
    return [workload["workload"], *counts, workload["source"], length, *depths]


def _head_line(head: Mapping[str, Any]) -> str:
    length = "nothing drafted yet" if head["acceptance_length"] is None else f"AL {head['acceptance_length']:.2f}"
    live = "live" if head["is_live"] else "no longer live"
    return f"head {head['head']} ({live}): {length}, {head['num_steps']} steps"


def change_line(change: Mapping[str, Any]) -> str:
    """A trial or change of heads, and how it stands."""
    where = f" for {', '.join(change['workloads'])}" if change["workloads"] else ""
    against = f" against {change['against']}" if change["against"] else ""
    state = change["state"] + (", watched" if change["is_watched"] else "")
    gain = ""
    if change["gain"] is not None:
        gain = f"; AL {change['gain']:+.1%} ({change['low']:+.1%} to {change['high']:+.1%})"
    return f"{change['name']} ({change['head'] or 'not loaded'}){where}{against}: {state}, {change['reason']}{gain}"


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
