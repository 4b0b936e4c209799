"""A table of workloads, their acceptance by depth, and the K that each gets, from a running service.

    peagle view [http://127.0.0.1:8000] [--watch SECONDS] [--api-key KEY]

Asks `GET /drafting` of the ingress, whose document `DepthControl.document` (cluster/control.py) writes.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

TIMEOUT_S = 10.0


def table(document: Mapping[str, Any]) -> str:
    """The document of `GET /drafting` as text: a line each workload, `survival` as mean (low-high) in per cent."""
    deepest = int(document["max_draft_tokens"])
    header = ["workload", "requests", "steps", "K", "source", "AL", *(f"S{i}" for i in range(1, deepest + 1))]
    rows = [header, *(_row(one, deepest) for one in document["workloads"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", f"{document['model']}: K_max {deepest}, policy {document['policy']}, {document['step_times']}"]
    lines += [f"{one['workload']}: {one['reason']}" for one in document["workloads"] if one["reason"]]
    lines += [_head_line(one) for one in document.get("heads", ())]
    lines += [_drafter_line(one, document.get("links", ())) for one in document.get("drafters", ())]
    lines += _scaling_lines(document.get("autoscaling"))
    return "\n".join(lines)


def _scaling_lines(document: Mapping[str, Any] | None) -> list[str]:
    """Replicas that run and are wanted, demand and capacity, and why."""
    if document is None:
        return []
    counts = [
        f"{name} {'?' if one['num_running'] is None else one['num_running']} running, {one['num_wanted']} wanted "
        f"({one['min']}..{one['max']})"
        for name in ("target", "drafter")
        if (one := document[name]) is not None
    ]
    demand, capacity = document["demand_tokens_per_s"], document["capacity_tokens_per_s"]
    known = [] if demand is None else [f"demand {demand:.0f} tokens/s"]
    known += [] if capacity is None else [f"capacity {capacity:.0f} tokens/s a replica"]
    return [f"replicas: {'; '.join([*counts, *known])}", f"autoscaling ({document['source']}): {document['reason']}"]


def _row(one: Mapping[str, Any], deepest: int) -> list[str]:
    survival = one["survival"]
    known = zip(survival["mean"], survival["low"], survival["high"], strict=True)
    depths = [f"{100 * mean:.0f} ({100 * low:.0f}-{100 * high:.0f})" for mean, low, high in known][:deepest]
    depths += ["-"] * (deepest - len(depths))
    length = "-" if one["acceptance_length"] is None else f"{one['acceptance_length']:.2f}"
    counts = [f"{one['num_requests']:g}", f"{one['num_steps']:.0f}", str(one["k"])]
    return [one["workload"], *counts, one["source"], length, *depths]


def _head_line(one: Mapping[str, Any]) -> str:
    length = "nothing drafted yet" if one["acceptance_length"] is None else f"AL {one['acceptance_length']:.2f}"
    return f"head {one['head']} ({'live' if one['is_live'] else 'no longer live'}): {length}, {one['num_steps']} steps"


def _drafter_line(one: Mapping[str, Any], links: Sequence[Mapping[str, Any]]) -> str:
    found = [f"{link['state']} by {link['path']}" for link in links if link["drafter"] == one["address"]]
    states = ", ".join(found) or "none"
    refused = f"; refused: {one['refused']}" if one["refused"] else ""
    return f"drafter {one['address']}: {', '.join(head['head'] for head in one['heads'])}; links: {states}{refused}"


def fetch(url: str, api_key: str | None = None) -> dict[str, Any]:
    """The document of a service at `url`. Raises OSError when it does not answer with one."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url.rstrip("/") + "/drafting", headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        document: dict[str, Any] = json.load(answer)
    return document
