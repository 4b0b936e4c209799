"""Where a remote step's time went, from reports of a real link to a drafter that takes its time."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.remote import SURVIVAL, ChosenSteps, Window, settings_of, step_parts_ms
from peagle.vllm.engine import REMOTE_KEY
from tests.support.transport_harness import Target, eventually, make_pool, make_server, running

DELAY_S = 0.05


def test_a_step_is_its_targets_work_and_the_wait_for_service_and_transfer() -> None:
    with running(make_server(delay_s=DELAY_S)) as server:
        pool = make_pool()
        pool.set_drafters([{"address": server.address, "heads": {0: "digest0"}}])
        eventually(lambda: pool.num_up)
        target, reports = Target(pool), []
        for num_steps in (1, 3):
            for _ in range(num_steps):
                target.check_step()
            reports.append({"counts": {}, "pool": pool.report()})
        pool.close()
    links = [report["pool"]["links"][0] for report in reports]
    parts = step_parts_ms(*reports, step_ms=1000.0)
    assert parts["service"] == pytest.approx(
        1e3 * (links[1]["sum_service_s"] - links[0]["sum_service_s"]) / 3, abs=1e-3
    )
    assert parts["service"] >= 1e3 * DELAY_S
    assert parts["target"] + parts["wait"] == pytest.approx(1000.0, abs=1e-3)
    assert parts["service"] + parts["transfer"] == pytest.approx(parts["wait"], abs=1e-3)


def test_rates_come_from_steps_as_measured_and_tokens_as_expected() -> None:
    window = Window(11)
    for ttft_s in (0.1, 0.1, 1.0):  # the host stands still once
        window.add(1, [], ttft_s, first=True)
    for accepted in (2, 0):  # luck: it must not enter the expected rate
        window.add(1 + accepted, [(2, accepted)], 0.02, first=False)
    found = window.document(num_requests=4, seconds=2.0)
    assert found["otps"] == (3 + 3 + 1) / 2
    assert (found["mean_k"], found["acceptance_length"], found["step_ms"]) == (2.0, 2.0, 20.0)
    # 0.1 s to its first token, then 10 tokens at 1 + 0.80 + 0.64 a step of 20 ms.
    request_s = 0.1 + 10 / (1 + SURVIVAL[0] + SURVIVAL[1]) * 0.02
    assert found["expected_otps"] == pytest.approx(4 * 11 / request_s, abs=0.01)


def test_drafts_are_chosen_where_that_is_to_be_checked_and_there_are_any() -> None:
    args = Namespace(folder=Path(), check=True, choice=True, max_num_seqs=4)
    remote, none = settings_of("remote", args), settings_of("none", args)
    assert remote["additional_config"].keys() == {REMOTE_KEY}
    assert remote["scheduler_cls"].endswith("ChoosingScheduler")
    assert not {"additional_config", "worker_extension_cls"} & none.keys()


def test_steps_with_chosen_drafts_are_counted() -> None:
    steps = ChosenSteps()
    steps.model_runner = SimpleNamespace(chosen=SimpleNamespace(reallocate_drafts=lambda ids, places: len(ids)))
    steps.count_chosen_steps()
    assert [steps.model_runner.chosen.reallocate_drafts(["a"] * n, None) for n in (2, 3)] == [2, 3]
    assert steps.chosen_steps() == 2
