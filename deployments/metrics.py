"""Every Prometheus family of the service: name, type, labels, meaning. `docs/metrics.md` has the same table.

A family that another module fills is made here by its name, without the prefix `peagle_` and the suffix `_total` of
counters. A name that is not in the table is a KeyError.
"""

from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "peagle_"


class Family(NamedTuple):
    """`kind`: counter, gauge or histogram. `labels`: separated by blanks. `where`: what must be set for it to exist."""

    kind: str
    labels: str
    text: str
    where: str = ""


SEVERAL = "target.front_ends above 1"
REMOTE, SCALED, LEARNED = "drafter.placement: remote", "autoscaling", "learning"

FAMILIES = {
    "target_replicas": Family("gauge", "", "Target replicas that run."),
    "running_requests": Family("gauge", "model replica", "Sequences in the engine, waiting ones included."),
    "queued_requests": Family("gauge", "replica", "Requests that wait for a place before the engine."),
    "answers": Family("counter", "workload status replica", "Requests by HTTP status; 499: the client left."),
    "front_end_requests": Family("counter", "replica front_end", "Requests that a front-end process got.", SEVERAL),
    "front_end_restarts": Family("counter", "replica", "Front-end processes that took the place of others.", SEVERAL),
    "requests": Family("counter", "model workload replica outcome", "Sequences ended: finished, or aborted."),
    "generated_tokens": Family("counter", "model replica", "Output tokens, running sequences included."),
    "output_tokens": Family("counter", "model workload replica", "Output tokens of ended sequences."),
    "prompt_tokens": Family("counter", "model workload replica", "Prompt tokens of ended sequences."),
    "caller_prompt_tokens": Family("counter", "caller replica", "Prompt tokens, broken-off requests included."),
    "caller_output_tokens": Family("counter", "caller replica", "Output tokens, likewise."),
    "caller_accepted_tokens": Family("counter", "caller replica", "Accepted drafts: output tokens without a step."),
    "caller_tokens_today": Family("gauge", "caller", "Prompt and output tokens since 0:00 UTC, as budgets count."),
    "time_to_first_token_seconds": Family("histogram", "workload replica", "Arrival to first chunk; streams only."),
    "time_per_output_token_seconds": Family(
        "histogram", "workload replica", "Time of a token after the first; streams only."
    ),
    "request_latency_seconds": Family("histogram", "workload replica", "Arrival to the end of a complete answer."),
    "verification_steps": Family("counter", "model workload replica", "Steps that verified draft tokens."),
    "draft_tokens": Family(
        "counter", "model workload replica draft_position", "Draft tokens verified at this position."
    ),
    "reached_draft_tokens": Family(
        "counter", "model workload replica draft_position", "Draft tokens verified after accepted ones only."
    ),
    "accepted_tokens": Family(
        "counter", "model workload replica draft_position", "Draft tokens accepted at this position."
    ),
    "num_draft_tokens": Family("gauge", "model workload source", "K of a workload's requests, and what decided it."),
    "acceptance_rate": Family(
        "gauge",
        "model workload draft_position bound",
        "Believed cumulative acceptance rate; bound: mean, low, high (90 %).",
    ),
    "step_seconds": Family("gauge", "model", "Expected time of an engine's step at the present load."),
    "head_verification_steps": Family("counter", "head", "Steps that verified this head's draft tokens."),
    "head_draft_tokens": Family("counter", "head draft_position", "This head's draft tokens that were verified."),
    "head_accepted_tokens": Family("counter", "head draft_position", "This head's draft tokens that were accepted."),
    "head_change": Family("gauge", "head against state", "1: the head is in this state (loading, running, ...)."),
    "head_gain": Family(
        "gauge", "head against bound", "AL relative to the other head's, minus 1; bound: mean, low, high."
    ),
    "drafter_replicas": Family("gauge", "", "Drafter replicas that answer.", REMOTE),
    "drafter_head": Family(
        "gauge", "replica index head", "1: the head drafts here; index 0: live, 1: a candidate.", REMOTE
    ),
    "drafter_head_refused": Family("gauge", "replica", "1: the last `user_config` was refused.", REMOTE),
    "drafter_passes": Family("counter", "replica", "Passes of the drafter's network.", REMOTE),
    "drafter_drafts": Family("counter", "replica", "Draft tokens proposed.", REMOTE),
    "drafter_steps": Family("counter", "replica", "Steps of targets, answered.", REMOTE),
    "drafter_busy_seconds": Family("counter", "replica", "Seconds with steps in hand.", REMOTE),
    "drafter_failures": Family("counter", "replica", "Batches that raised an error.", REMOTE),
    "drafter_refused_connections": Family(
        "counter", "replica", "Connections refused: no target, or one that does not fit.", REMOTE
    ),
    "drafter_cold_starts": Family("counter", "replica", "Requests begun without their earlier rows.", REMOTE),
    "drafter_prefix_hit_tokens": Family("counter", "replica", "Prompt tokens whose rows were in the cache.", REMOTE),
    "drafter_refused": Family(
        "counter", "replica", "Request steps without drafts: cache full, or context too long.", REMOTE
    ),
    "link_up": Family("gauge", "replica drafter", "1: the target drafts over this link.", REMOTE),
    "link_steps": Family("counter", "replica drafter", "Steps sent.", REMOTE),
    "link_answered": Family("counter", "replica drafter", "Steps answered in time.", REMOTE),
    "link_timeouts": Family("counter", "replica drafter", "Times that an answer was too late.", REMOTE),
    "link_skipped": Family("counter", "replica drafter", "Steps not sent: the link was late or down.", REMOTE),
    "link_wait_seconds": Family("counter", "replica drafter", "Seconds that the target waited for drafts.", REMOTE),
    "link_service_seconds": Family("counter", "replica drafter", "Seconds that the drafter took for them.", REMOTE),
    "autoscaling_replicas": Family("gauge", "deployment count", "Replicas; count: running, wanted, min, max.", SCALED),
    "autoscaling_needed_replicas": Family("gauge", "", "Targets that the demand needs, before bounds.", SCALED),
    "autoscaling_demand_tokens_per_second": Family("gauge", "", "Output tokens/s that are asked for.", SCALED),
    "autoscaling_capacity_tokens_per_second": Family("gauge", "", "Output tokens/s that one replica gives.", SCALED),
    "autoscaling_acceptance_length": Family("gauge", "", "AL of a replica at the predicted K.", SCALED),
    "autoscaling_source": Family("gauge", "source", "1: this source decided.", SCALED),
    "autoscaling_decisions": Family("gauge", "", "Decisions since the router started.", SCALED),
    "learner_answers": Family("gauge", "workload", "Answers kept now.", LEARNED),
    "learner_buffer_bytes": Family("gauge", "", "Bytes of the kept answers and prompts.", LEARNED),
    "learner_fetched_answers": Family("counter", "outcome", "Answers fetched from targets, by outcome.", LEARNED),
    "learner_phase": Family("gauge", "phase", "1: the learner is in this phase.", LEARNED),
    "learner_rounds": Family("counter", "", "Rounds of training.", LEARNED),
    "learner_proposals": Family("counter", "", "Heads that passed the gate.", LEARNED),
    "learner_busy_seconds": Family("counter", "", "Seconds in training and judging.", LEARNED),
    "learner_acceptance_ratio": Family(
        "gauge", "mix bound", "AL of the last trained head relative to the current one's.", LEARNED
    ),
}


class Families(dict[str, Metric]):
    """Families by name, each made with its first sample."""

    def add(self, name: str, value: float, *labels: str) -> None:
        if name not in self:
            kind, names, text, _ = FAMILIES[name]
            family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            self[name] = family(PREFIX + name, text, labels=names.split())
        self[name].add_metric(labels, value)  # type: ignore[attr-defined]

    def add_positions(self, name: str, values: Iterable[float], *labels: str) -> None:
        """A sample for each draft position, which is the last label."""
        for position, value in enumerate(values, start=1):
            self.add(name, value, *labels, str(position))
