"""What a closed load reports, against figures worked out by hand."""

from dataclasses import replace

import pytest

from benchmarks.load import Window, extra_args
from cluster.request import Drafting
from peagle.vllm.acceptance import DEPTH_KEY, SURVIVAL_KEY, SYNTHETIC_KEY, WORKLOAD_KEY


def test_rates_come_from_steps_as_measured_and_tokens_as_expected() -> None:
    window = Window(11, {"code": (0.5, 0.25), "chat": (0.1, 0.0)})
    for ttft_s in (0.1, 0.1, 1.0):  # the host stands still once
        window.add("code", 1, [], ttft_s, first=True)
    for accepted in (2, 0):  # luck: it must not enter the expected rate
        window.add("code", 1 + accepted, [(2, accepted)], 0.02, first=False)
    window.add("chat", 1, [], 0.1, first=True)
    window.add("chat", 1, [], 0.01, first=False)  # a step without drafts
    found = window.document(num_requests=4, seconds=2.0)
    assert found["otps"] == (3 + 3 + 1 + 1 + 1) / 2
    code, chat = found["by_workload"]["code"], found["by_workload"]["chat"]
    assert (code["mean_k"], code["acceptance_length"], code["step_ms"]) == (2.0, 2.0, 20.0)
    assert (code["ttft_ms"], code["median_ttft_ms"]) == (400.0, 100.0)
    assert (chat["mean_k"], chat["acceptance_length"], chat["step_ms"]) == (0.0, 1.0, 10.0)
    # A code request: 0.1 s to its first token, then 10 tokens at 1.75 a step of 20 ms; chat: 10 steps of 10 ms.
    token_s = [(0.1 + 10 / 1.75 * 0.02) / 11, (0.1 + 10 * 0.01) / 11]
    assert found["expected_otps"] == pytest.approx(4 * 2 / sum(token_s), abs=0.01)


def test_a_window_in_which_nothing_came_says_zero() -> None:
    assert Window(11, {}).document(num_requests=4, seconds=2.0) == {
        "otps": 0.0,
        "expected_otps": 0.0,
        "by_workload": {},
    }


def test_a_request_of_the_load_tells_the_engine_its_workload() -> None:
    """Without it the scheduler trims all workloads by the survival of whichever request came last."""
    learned = Drafting("code", 5, "learned", survival=(0.9, 0.8))
    told = {DEPTH_KEY: 5, WORKLOAD_KEY: "code", SYNTHETIC_KEY: [0.9, 0.7]}
    assert extra_args(learned, [0.9, 0.7]) == {**told, SURVIVAL_KEY: [0.9, 0.8]}
    assert extra_args(Drafting("code", 5, "default"), [0.9, 0.7]) == told
    assert extra_args(replace(learned, max_k=7), [0.9, 0.7])[DEPTH_KEY] == 7, "steps decide within max_k"
