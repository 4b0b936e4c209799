"""The router and drafter replicas together, without Ray: heads and their files reach every drafter, also a new one."""

import asyncio
import functools
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.counts import TargetReport, WorkloadCounts
from cluster.heads import DesiredHeads, HeadManager, HeadProposal
from cluster.history import ServiceHistory
from cluster.settings import DrafterSettings
from deployments import drafter as of_drafters
from deployments import router as of_routers
from deployments.drafter import HeadLoader
from deployments.router import Router
from deployments.state import StateStore
from peagle.checkpoint import save_head
from peagle.heads import candidate_directory, keep_candidate
from tests.support.head_factory import CONFIG, head_tensors, rewrite
from tests.support.weightless_drafter import WeightlessDrafter
from tests.unit.deployments.test_state import k_policy_with_counts


class Drafters:
    """In the place of a deployment's handle. `replicas` are real ones whose heads have no weights."""

    deployment_name = "drafter"

    def __init__(self, head: str) -> None:
        self._head = head
        self.replicas: list[WeightlessDrafter] = []

    def start(self) -> None:
        settings = DrafterSettings(head=self._head, placement="remote", max_draft_tokens=5, spare_heads=1)
        loader: Any = SimpleNamespace(num_slots=2, _target="")
        loader.directory = functools.partial(HeadLoader.directory, loader)
        loader.load = lambda name: SimpleNamespace(
            name=name, digest=of_drafters.head_digest(loader.directory(name)), runtime=None, served=None
        )
        self.replicas.append(WeightlessDrafter(settings, loader, f"r{len(self.replicas)}"))

    def broadcast(self, method: str, *args: Any) -> Any:
        async def asked() -> list[Any]:
            calls = [functools.partial(getattr(replica, method), *args) for replica in self.replicas]
            return [SimpleNamespace(get_async=call) for call in calls]

        return SimpleNamespace(_fetch_replica_results_async=asked)

    async def drafting(self) -> list[list[str]]:
        return [[head.name for head in (await replica.report()).heads] for replica in self.replicas]


async def rounds(router: Any, drafters: Drafters, num: int = 4) -> None:
    """What the router does once a second."""
    router._drafters = SimpleNamespace(num_ready=len(drafters.replicas))
    for _ in range(num):
        router._manage_heads([await replica.report() for replica in drafters.replicas])
        if router._handing_out is not None:
            await router._handing_out
        await asyncio.gather(*(replica.settle() for replica in drafters.replicas))


async def started(router: Any, head: Path, num_rounds: int = 1) -> Drafters:
    router._drafter = drafters = Drafters(str(head))
    drafters.start()
    await rounds(router, drafters, num_rounds)
    return drafters


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return save_head(tmp_path / "now", CONFIG, head_tensors(CONFIG))


@pytest.fixture
def router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its cache directory is not that of the drafters: they are on other nodes."""
    node = tmp_path / "node"
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(of_drafters, "candidate_directory", functools.partial(candidate_directory, cache_dir=node))
    monkeypatch.setattr(of_drafters, "keep_candidate", functools.partial(keep_candidate, cache_dir=node))
    monkeypatch.setattr(of_drafters, "prepared_head", lambda name, target: Path(name))
    router: Any = Router.__new__(Router)
    heads, k_policy = HeadManager(1, 0.1), k_policy_with_counts()
    channel: Any = SimpleNamespace(put=lambda *_: None)
    router.__dict__ |= {
        "_heads": heads, "_state": StateStore(None, k_policy, heads, channel), "k_policy": k_policy,
        "_handing_out": None, "_lost": Counter(), "_monitor": SimpleNamespace(reports=()), "_history": ServiceHistory(),
    }  # fmt: skip
    return router


async def test_a_candidate_reaches_drafters_on_other_nodes_and_those_that_start_later(
    router: Any, head: Path, tmp_path: Path
) -> None:
    drafters = await started(router, head)
    rewrite(head, norm__weight=None)
    with pytest.raises(ValueError, match="missing norm.weight"):
        await router.propose(HeadProposal(str(head)))
    candidate = save_head(tmp_path / "new", CONFIG, {k: v + 1 for k, v in head_tensors(CONFIG).items()})
    trial = await router.propose(HeadProposal(str(candidate), parent="now"))
    assert (trial.state, trial.parent) == ("loading", "now")
    await rounds(router, drafters)
    assert (await router.trial(trial.name)).state == "running"
    assert await drafters.drafting() == [[str(head), trial.name]]
    drafters.start()
    await rounds(router, drafters)
    assert await drafters.drafting() == [[str(head), trial.name]] * 2
    assert (await router.head_back()).state == "dropped"
    told = [event["text"] for event in router._history.document(0.0)["events"]]
    assert [text.partition(":")[0].rpartition(" ")[2] for text in told] == ["dropped", "running", "loading"]


@pytest.mark.parametrize("is_promoted", [False, True])
async def test_a_head_whose_files_are_lost_drafts_no_more(
    router: Any, head: Path, tmp_path: Path, is_promoted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_routers, "LOST_ROUNDS", 3)
    drafters = await started(router, head)
    candidate = save_head(tmp_path / "new", CONFIG, {k: v + 1 for k, v in head_tensors(CONFIG).items()})
    trial = await router.propose(HeadProposal(str(candidate), parent="now"))
    await rounds(router, drafters)
    if is_promoted:
        router._heads._promote(await router.trial(trial.name), "it is better")
        await rounds(router, drafters)
        assert (await drafters.drafting())[0][0] == trial.name
    shutil.rmtree(tmp_path / "node")
    shutil.rmtree(tmp_path / "cache")
    drafters = await started(router, head, 3)  # on new nodes
    assert (await router.trial(trial.name)).reason != "its files are lost", "a drafter may be left out of a round"
    await rounds(router, drafters, 4)
    change = await router.trial(trial.name)
    assert (change.state, change.reason) == ("rolled back" if is_promoted else "dropped", "its files are lost")
    assert (await drafters.drafting(), router._heads.desired) == ([[str(head)]], DesiredHeads())
    assert router._heads.live_head.name == str(head)


def test_requests_of_a_trial_run_in_the_workload_that_it_is_a_share_of() -> None:
    workloads = {"code": WorkloadCounts(num_started=5), "code/trial": WorkloadCounts(num_started=2)}
    reports = [TargetReport(name, workloads=workloads) for name in ("a", "b")]
    assert Router._num_running(reports) == {"code": 14}
