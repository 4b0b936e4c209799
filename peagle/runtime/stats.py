"""What links and servers count. Pure."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class LinkStats:
    """Counts since the link was made.

    num_steps: sent. num_answered: in time. num_timeouts: deadlines missed. num_skipped: steps that were not sent,
    because the link was not up. num_connections: agreed ones, the first included. num_bytes: sent and received over
    TCP. num_cut_prompts: new requests whose tokens did not fit.

    Of the answers that came in time, last_service_s, sum_service_s: from when the drafter saw the step (over TCP: from
    when it was sent) to its answer; sum_wait_s: what the target waited, its GPU's stream or its host. What a wait is
    longer than the service is transfer; it is shorter where the target had other things to do meanwhile.
    """

    num_steps: int = 0
    num_answered: int = 0
    num_timeouts: int = 0
    num_skipped: int = 0
    num_connections: int = 0
    num_bytes: int = 0
    num_cut_prompts: int = 0
    last_service_s: float = 0.0
    sum_service_s: float = 0.0
    sum_wait_s: float = 0.0

    def answered(self, service_s: float, wait_s: float) -> None:
        """Count an answer that came in time."""
        self.num_answered += 1
        self.last_service_s = service_s
        self.sum_service_s += service_s
        self.sum_wait_s += wait_s


@dataclasses.dataclass
class ServerStats:
    """num_batches: calls of the engine that were answered; num_steps: targets' steps in them; num_refused: newcomers
    that were no targets, did not fit, or whose mailbox CUDA did not take; num_dropped: targets dropped for what they
    sent; num_failures: calls of the engine that raised. busy_s: seconds with steps in hand."""

    num_batches: int = 0
    num_steps: int = 0
    num_connections: int = 0
    num_refused: int = 0
    num_dropped: int = 0
    num_failures: int = 0
    busy_s: float = 0.0
