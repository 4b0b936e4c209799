"""The heads of a drafter replica, without weights: what a `user_config` and the router make of them."""

import asyncio
import functools
import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.counts import TargetReport, WorkloadCounts
from cluster.heads import DesiredHeads, DrafterReport, HeadManager, HeadProposal, HeadRef
from cluster.history import ServiceHistory
from cluster.settings import DrafterSettings
from deployments import drafter as of_drafters
from deployments import router as of_routers
from deployments.drafter import DrafterReplica, HeadLoader, HeadSlots, MissingHeadError
from deployments.router import Router
from deployments.state import StateStore
from peagle.checkpoint import save_head
from peagle.drafter.engine import Counters
from peagle.drafter.server import ServerStats
from peagle.heads import candidate_directory, keep_candidate
from tests.support.head_factory import CONFIG, head_tensors, rewrite
from tests.unit.deployments.test_state import k_policy_with_counts


class WeightlessDrafter(DrafterReplica):
    """Without Ray, a server and weights of its heads: what it does with heads is real."""

    def __init__(self, settings: DrafterSettings, loader: Any, replica: str = "r0") -> None:
        server: Any = SimpleNamespace(swap=lambda *_: None, stats=ServerStats(), address="h:1")
        engine: Any = SimpleNamespace(counters=Counters())
        self._replica, self._key, self._is_configured, self._swaps = replica, "", False, set()
        self._heads, self._engine, self._server = HeadSlots(settings, loader), engine, server
        self._heads.server = server

    def __del__(self) -> None: ...  # type: ignore[override]

    async def settle(self) -> DrafterReport:
        """Its report once it has done what it was told."""
        await asyncio.gather(*self._swaps)
        return await self.report()


class Loader:
    """In the place of `HeadLoader`; the head in `broken` raises what nobody foresaw."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots, self.loaded = num_slots, list[str]()
        self.problem = ""

    def directory(self, name: str) -> Path:
        if name == "candidate-x":
            raise MissingHeadError("not here")
        return Path(name)

    def load(self, name: str) -> Any:
        if self.problem:
            raise ValueError(f"{name} {self.problem}")
        if Path(name).name == "broken":
            raise KeyError("fc.weight")
        self.loaded.append(Path(name).name)
        return SimpleNamespace(name=name, digest=Path(name).name, runtime=None, served=None)


@pytest.fixture
def loader() -> Loader:
    return Loader(num_slots=2)


@pytest.fixture
def drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: Any) -> WeightlessDrafter:
    """A drafter with the head a; what it may have instead is there too."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 9, "num_depths": 7, "hidden_size": 8,
        "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 32,
    }  # fmt: skip
    for name in ("a", "b", "c", "d", "broken", "unreadable"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "unreadable" / "config.json").write_text(json.dumps({**config, "num_depths": "7"}))
    monkeypatch.setattr("deployments.drafter.head_digest", lambda folder: folder.name)
    settings = DrafterSettings(head=str(tmp_path / "a"), placement="remote", max_draft_tokens=7)
    return WeightlessDrafter(settings, loader)


@pytest.fixture
def slots(drafter: WeightlessDrafter) -> HeadSlots:
    return drafter._heads


def configured(slots: HeadSlots, user_config: Any) -> list[str]:
    """Digests of the heads that draft after a `user_config`, by index."""
    asyncio.run(slots.configure(user_config))
    return [head.digest for head in slots.drafting]


def applied(slots: HeadSlots, **desired: Any) -> list[str]:
    """Digests of the heads that draft after what the router desires, by index."""
    asyncio.run(slots.apply(DesiredHeads(**desired)))
    return [head.digest for head in slots.drafting]


def test_a_head_that_fails_in_an_unforeseen_way_is_refused_with_the_reason(slots: HeadSlots, tmp_path: Path) -> None:
    for name, words in (("broken", "KeyError('fc.weight')"), ("unreadable", "num_depths")):
        assert configured(slots, {"head": str(tmp_path / name)}) == ["a"]
        assert words in slots.refused
        assert configured(slots, {}) == ["a"]
        assert slots.refused == ""


async def test_a_drafter_that_starts_has_its_new_head_before_it_drafts(
    drafter: WeightlessDrafter, tmp_path: Path
) -> None:
    """One that is restarted after a swap would first draft with the head before it."""
    await drafter.reconfigure({"head": str(tmp_path / "c")})
    assert (await drafter.report()).heads[0].digest == "c"
    await drafter.reconfigure({})
    assert (await drafter.report()).heads[0].digest == "c", "later, Serve does not wait"
    assert (await drafter.settle()).heads[0].digest == "a"


def test_a_head_that_was_rolled_back_is_replaced_until_the_operator_names_another(
    slots: HeadSlots, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert configured(slots, {"head": c}) == ["c"]
    assert applied(slots, replaced="c", replacement=HeadRef(a, "a")) == ["a"]
    assert slots.configured.digest == "c"
    assert configured(slots, {"head": c}) == ["a"], "a replica that starts anew gets the same user_config"
    assert configured(slots, {"head": b}) == ["b"]
    assert configured(slots, {}) == ["a"], "whatever came before: one that starts later gets the last one only"
    assert applied(slots, replaced="a", replacement=HeadRef(c, "another")) == ["a"]
    assert "no longer those of head another" in slots.problems[c]
    assert f"{c} is desired and does not draft: the files of" in caplog.text


def test_a_candidate_takes_a_spare_slot_and_the_head_before_it_stays_loaded(
    slots: HeadSlots, loader: Loader, tmp_path: Path
) -> None:
    candidate = HeadRef(str(tmp_path / "c"))
    assert applied(slots, candidate=candidate) == ["a", "c"]
    assert applied(slots, replaced="a", replacement=candidate, candidate=candidate) == ["c", "c"]
    assert applied(slots, candidate=candidate) == ["a", "c"]
    assert loader.loaded == ["a", "c"], "it went back without loading anything"
    assert applied(slots, candidate=HeadRef(str(tmp_path / "d"))) == ["a", "d"]
    assert {head.digest for head in slots.loaded.values()} == {"a", "d"}


def test_what_is_wrong_with_a_candidate_is_reported_and_the_others_draft_on(
    slots: HeadSlots, loader: Loader, tmp_path: Path
) -> None:
    loader.problem = "was trained for 3 depths"
    assert applied(slots, candidate=HeadRef("candidate-x")) == ["a"]
    assert (slots.missing, slots.problems) == (("candidate-x",), {})
    assert applied(slots, candidate=HeadRef(str(tmp_path / "c"))) == ["a"]
    assert "3 depths" in slots.problems[str(tmp_path / "c")]
    assert slots.refused == ""
    assert configured(slots, {"head": "no-such-head"}) == ["a"]
    assert applied(slots) == ["a"]
    assert slots.problems == {}
    assert "no-such-head" in slots.refused, "until another user_config"


# ---- with the router: heads and their files reach every drafter, also a new one


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
