"""Which head drafts: a candidate's trial beside the current head, and the way back from a head that turned out worse.

Whoever has a candidate (the learner, an operator) hands a `HeadProposal` to the router, as `Router.propose`, and reads
what became of it, a `HeadTrial`, from `Router.trial`. Never knows: Ray, files' contents, the engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TrialState = Literal["loading", "running", "promoted", "dropped", "taken back", "refused"]
"""Of a candidate. `loading`: drafters read it. `running`: it drafts for a share of the requests. `promoted`: it drafts
for all requests of its workloads, and is watched. The others are final: `dropped` was not better, or ended by an
operator; `taken back` was promoted and then fell below the head before it; `refused` cannot be loaded."""


@dataclass(frozen=True)
class HeadProposal:
    """A candidate head, for `Router.propose`.

    Attributes:
        source: its directory, as `drafter.head` may name one. Read by the router, which hands the files to drafters on
            other nodes. With `files` a name for the log.
        files: name -> content of config.json and the safetensors, where the router cannot read `source`.
        workloads: whose requests it is for; () for those of all workloads that have no head of their own.
        parent: digest of the head that it was trained from, "" where there is none.
        provenance: where it comes from, as JSON can hold it: numbers of requests and tokens, figures of the offline
            gate. Shown as it is in `GET /drafting`, and kept with the head.
    """

    source: str
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    workloads: tuple[str, ...] = ()
    parent: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadTrial:
    """What became of a proposal, as `Router.trial(name)` says it.

    Attributes:
        name: of the candidate, unique; `Router.propose` returns it.
        workloads, parent, provenance: as proposed.
        state: see `TrialState`. reason: of the state, in words.
        head: the candidate's digest, as counts and reports name it; "" until a drafter has loaded it.
        against: digest of the head that it is compared with, "" until then.
        gain: acceptance length over that of `against` minus 1, with `low` and `high`, an interval that may be looked at
            at any time; None before there is enough evidence.
        num_steps: verification steps with the candidate that were compared.
        begun_s: Unix time of the proposal.
    """

    name: str
    workloads: tuple[str, ...]
    parent: str
    provenance: Mapping[str, Any]
    state: TrialState
    reason: str = ""
    head: str = ""
    against: str = ""
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    num_steps: int = 0
    begun_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether another candidate may be proposed."""
        return self.state not in ("loading", "running")
