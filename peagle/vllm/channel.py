"""What travels with a request between the process that owns the engine client and vLLM's engine process.

In: two keys of `SamplingParams.extra_args` (HTTP: `vllm_xargs`) name the K and the workload of a request.
Out: the scheduler reports each verified step on the request's next output, as one header among its trace headers, and
on any output now and then what its steps turn out to take.

Trace headers are the one free-form field of `EngineCoreOutput` that vLLM 0.26 and 0.29 both have, that is made per
output, and that no HTTP response repeats. OpenTelemetry reads only the header names it knows.
This module knows nothing of vLLM.
"""

from collections.abc import Iterable, Mapping

DEPTH_KEY = "peagle_k"
"""`extra_args` key: int 0..K_max, drafts verified per step of this request. Absent: K_max."""

HEAD_KEY = "peagle_head"
"""`extra_args` key: int 0.., index of the head that a remote drafter proposes with. Absent: 0."""

MAX_HEAD_INDEX = 2**31 - 1

SURVIVAL_KEY = "peagle_survival"
"""`extra_args` key: list of S_1, S_2, ..., at least K long: chances by which the scheduler may trim the request further
under load. Absent: K is obeyed as it is."""

STEP_TIMES_KEY = "peagle_step_times"
"""Key of vLLM's `additional_config`: the document of a `cluster.step_time.StepTimes`, by which the scheduler trims."""

SYNTHETIC_KEY = "peagle_synthetic_survival"
"""`extra_args` key for measurements: S_1, S_2, ... of one request, by which `peagle.vllm.synthetic_worker` accepts."""

WORKLOAD_KEY = "peagle_workload"
"""`extra_args` key: str, the workload under which this request's acceptance is counted. Absent: `DEFAULT_WORKLOAD`."""

DEFAULT_WORKLOAD = "default"

STEPS_HEADER = "x-peagle-steps"

CORRECTIONS_HEADER = "x-peagle-corrections"
"""The scheduler's corrections of its step times, on some output now and then (`cluster.corrections.Corrections`)."""

VerifiedStep = tuple[int, int]
"""(drafts verified, drafts accepted) of one request in one engine step; verified in 1..K, accepted in 0..verified."""


def drafts_wanted(wanted: object, k_max: int) -> int:
    """K that the value `wanted` of `DEPTH_KEY` stands for: an integer is brought into 0..k_max, the rest is absent."""
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return min(max(wanted, 0), k_max)
    return k_max


def head_of(extra_args: Mapping[str, object] | None) -> int:
    """Index of a request's head, an int32; what is no integer counts as absent. Whatever is further out becomes -1 or
    `MAX_HEAD_INDEX`, which no drafter has."""
    head = (extra_args or {}).get(HEAD_KEY)
    return min(max(head, -1), MAX_HEAD_INDEX) if type(head) is int else 0


def encode_steps(steps: Iterable[VerifiedStep]) -> str:
    """Header value of some steps, oldest first: `"7:3 7:0"`."""
    return " ".join(f"{num_verified}:{num_accepted}" for num_verified, num_accepted in steps)


def decode_steps(value: str) -> list[VerifiedStep]:
    """Inverse of `encode_steps`.

    Raises:
        ValueError: the text is not what `encode_steps` writes.
    """
    steps = []
    for pair in value.split():
        num_verified, _, num_accepted = pair.partition(":")
        steps.append((int(num_verified), int(num_accepted)))
    return steps


def with_steps(headers: Mapping[str, str] | None, steps: Iterable[VerifiedStep]) -> dict[str, str]:
    """`headers` (None: empty) plus the report of `steps`; the argument is not changed."""
    return with_header(headers, STEPS_HEADER, encode_steps(steps))


def with_header(headers: Mapping[str, str] | None, name: str, value: str) -> dict[str, str]:
    """`headers` (None: empty) plus one; the argument is not changed."""
    return {**(headers or {}), name: value}
