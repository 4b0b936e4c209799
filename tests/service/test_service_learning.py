"""Heads that learn from live traffic: the real service with a learner, through an update of the target."""

import contextlib
import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from deployments import TARGET_NAME
from tests.support.service_harness import Service, running_service, wait_until_ready

pytestmark = [pytest.mark.service, pytest.mark.long, pytest.mark.timeout(1200)]

LEARNING = {
    "min_new_answers": 72,
    "min_held_out": 4,
    "max_loss": 0.1,
    "num_cpus": 1,
    "recipe": {
        "batch": {"num_sequences": 1, "max_tokens": 512},
        "optimizer": {"ema_decay": 0.7},
        "schedule": {"max_steps": 8, "warmup_steps": 1},
        "cod": {"ratio": 0.5},
    },
}
"""A round of minutes on one core: the evidence on a head grows with the number of answers, so they are short."""


def update(target: Path) -> None:
    """Other weights of the same shape, in the place of those that an engine has read."""
    tensors = {name: 1.01 * tensor for name, tensor in load_file(target / "model.safetensors").items()}
    save_file(tensors, target / "new", metadata={"format": "pt"})
    (target / "new").replace(target / "model.safetensors")


def learner_that(is_so: Callable[[dict[str, Any]], bool], service: Service) -> dict[str, Any]:
    """What the learner says of itself, once it is so."""
    end_s = time.monotonic() + 240
    while (learner := service.drafting()["learner"]) is None or not is_so(learner):
        assert time.monotonic() < end_s, learner
        time.sleep(1)
    return dict(learner)


def test_after_an_update_of_the_target_only_its_own_answers_are_learned_from(target_dir: Path, tmp_path: Path) -> None:
    target = shutil.copytree(target_dir, tmp_path / "target")
    learning = {**LEARNING, "min_new_answers": 16, "workloads": "all", "heads_dir": str(tmp_path), "num_cpus": 0.5}
    learning["recipe"] = {**LEARNING["recipe"], "schedule": {"max_steps": 1, "warmup_steps": 0}}
    remote = {"spare_heads": 1}
    texts = (f"Write a JSON record of order {number}, with its customer and price." for number in itertools.count())
    with running_service(model={"source": str(target)}, drafter=remote, learning=learning) as service:

        def ask(number: int) -> None:
            for text in itertools.islice(texts, number):
                answer = service.ask(messages=[{"role": "user", "content": text}], max_tokens=32)
                assert answer.status_code == 200, answer.text

        ask(8)
        num_early = service.num_early_answers
        before = learner_that(lambda learner: learner["counters"].get("answers_taken") == 8 + num_early, service)
        num_before = sum(before["num_answers"].values())
        assert num_before > 0

        update(target)
        (pid,) = service.processes(TARGET_NAME)
        os.kill(pid, signal.SIGKILL)
        is_down = False
        while not is_down:
            with contextlib.suppress(httpx.RemoteProtocolError):  # HAProxy held a connection to it
                is_down = service.ask().status_code == 503
        wait_until_ready(service)
        ask(24)
        after = learner_that(lambda learner: bool(learner["last_round"] or learner["problem"]), service)
        assert after["problem"] == ""
        assert after["counters"]["answers_outdated"] == num_before
        assert sum(after["num_answers"].values()) <= 24 + service.num_early_answers - num_early
        assert sum(after["last_round"]["num_recent"].values()) > 0
        assert after["last_round"]["parent"] == "smollm2-135m-instruct"
