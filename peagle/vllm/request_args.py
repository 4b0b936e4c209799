"""Arguments of a request for the engine: keys of `SamplingParams.extra_args` (HTTP: `vllm_xargs`), and their readers.

Imports no vLLM.
"""

from typing import Any

MAX_K_KEY = "peagle_k"
"""`extra_args` key: int 0..K_max, the most drafts verified per step of this request (its max_k). Absent: K_max."""

HEAD_KEY = "peagle_head"
"""`extra_args` key: int 0.., index of the head that a remote drafter proposes with. Absent: 0."""

MAX_HEAD_INDEX = 2**31 - 1
MIN_P_EPSILON = 1e-5  # vLLM's own

ACCEPTANCE_RATES_KEY = "peagle_acceptance_rates"
"""`extra_args` key: list of cumulative acceptance rates S_1, S_2, ..., by which the scheduler may verify fewer drafts
under load. Where it is shorter than max_k, only steps that explore go beyond its end. Absent: every step verifies max_k
drafts, the request's fixed K."""

WORKLOAD_KEY = "peagle_workload"
"""`extra_args` key: str, the workload under which this request is counted. Absent: `DEFAULT_WORKLOAD`."""

LEARN_KEY = "peagle_learn"
"""`extra_args` key: str, name of the caller, whose answers may be kept to train heads. Absent: nothing is kept."""

GROUP_KEY = "peagle_group"
"""`extra_args` key: str, the same for all sequences of one request of several. Absent: it has one sequence."""

ALL_OF_CLIENT = "peagle_client:"
"""Before the index of an engine's client: the id by which all requests of that client are aborted. No request has such
an id, because vLLM's API starts each with the name of its call."""


def read_extra_args(params: Any) -> dict[str, Any]:
    """The arguments of a request with vLLM's `SamplingParams`; none if it generates nothing (`params` is None)."""
    return (params.extra_args if params is not None else None) or {}


def read_max_k(params: Any, k_max: int) -> int:
    """The most drafts per step of a request with these `SamplingParams`, at most `k_max`, K_max. The front end has
    validated it; here an integer under `MAX_K_KEY` is clamped, and anything else counts as absent. 0 if its sampling
    works without drafts only."""
    if undraftable_field(params):
        return 0
    wanted = read_extra_args(params).get(MAX_K_KEY)
    return min(max(wanted, 0), k_max) if type(wanted) is int else k_max


def undraftable_field(params: Any) -> str:
    """The first field of these `SamplingParams` that works without drafts only; "" without one.

    vLLM's runner for CPUs processes logits for these fields by request, and not by row.
    """
    if params is None:
        return ""
    is_asked = {
        "logit_bias": bool(params.logit_bias),
        "min_p": params.min_p > MIN_P_EPSILON,
        "thinking_token_budget": getattr(params, "thinking_token_budget", None) is not None,
    }
    return next((field for field, asked in is_asked.items() if asked), "")


def read_head(params: Any) -> int:
    """Index of a request's head, an int32; anything but an integer counts as absent. Integers outside become -1 or
    `MAX_HEAD_INDEX`, which no drafter has."""
    head = read_extra_args(params).get(HEAD_KEY)
    return min(max(head, -1), MAX_HEAD_INDEX) if type(head) is int else 0
