"""What a link counts. Pure."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class LinkStats:
    """Counts since the link was made.

    num_steps: sent. num_answered: in time. num_timeouts: deadlines missed. num_skipped: steps that were not sent,
    because the link was not up. num_connections: agreed ones, the first included. num_bytes: sent and received over
    TCP. num_cut_prompts: new requests whose tokens did not fit. last_service_s: of the newest answer.
    """

    num_steps: int = 0
    num_answered: int = 0
    num_timeouts: int = 0
    num_skipped: int = 0
    num_connections: int = 0
    num_bytes: int = 0
    num_cut_prompts: int = 0
    last_service_s: float = 0.0
