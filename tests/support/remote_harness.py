"""A real engine whose drafter is another process, for tests that do something to the drafter meanwhile."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peagle.vllm.engine import RemoteSettings, engine_kwargs
from tests.support.engine_harness import Result, RunningEngine

LINK_TIMEOUT_S = 120.0


def check_text(results: Sequence[Result], reference: Sequence[Result]) -> None:
    """Each answer has its length, and is how the target without drafts begins."""
    for result, expected in zip(results, reference, strict=False):
        assert result.tokens[0] == expected.tokens[0][: len(result.tokens[0])]
        assert result.finish_reasons == ["length"]


def num_verified(results: Sequence[Result]) -> int:
    """Drafts that were verified."""
    return sum(one.drafting.counts.num_draft_tokens for one in results if one.drafting is not None)


class RemoteEngine(RunningEngine):
    """`RunningEngine` with what the service asks of the worker."""

    @classmethod
    def start(
        cls,
        target_dir: Path,
        head_dir: Path,
        settings: RemoteSettings,
        *,
        k_max: int,
        is_async: bool,
        extra: dict[str, Any],
    ) -> "RemoteEngine":
        kwargs = engine_kwargs(
            target_dir,
            head_dir,
            max_draft_tokens=k_max,
            dtype="float32",
            on_cpu=True,
            remote=settings,
            extra=extra,
        )
        if is_async:
            kwargs["worker_cls"] = "tests.support.async_remote_worker.AsyncRemoteWorker"
        return cls(kwargs, is_async=is_async)

    def set_drafters(self, drafters: Sequence[dict[str, Any]]) -> None:
        self._run(self._client.collective_rpc("set_drafters", args=(list(drafters),)))

    def report(self) -> dict[str, Any]:
        (report,) = self._run(self._client.collective_rpc("remote_report"))
        return dict(report)

    def links(self) -> dict[str, dict[str, Any]]:
        """What the pool says of each link, by address."""
        return {link["address"]: link for link in self.report()["links"]}

    def connect(self, *drafters: Any) -> None:
        """Use these `DrafterProcess`es, and wait until steps can go to all of them."""
        self.set_drafters([drafter.entry for drafter in drafters])
        addresses = {drafter.entry["address"] for drafter in drafters}
        end_s = time.monotonic() + LINK_TIMEOUT_S
        while {address for address, link in self.links().items() if link["state"] == "up"} != addresses:
            assert time.monotonic() < end_s, self.links()
            time.sleep(0.05)
