"""The heads of a drafter replica: what a `user_config` and the router make of them, without weights."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.heads import DesiredHeads, HeadRef
from cluster.settings import DrafterSettings
from deployments.drafter import HeadSlots, MissingHeadError
from tests.support.weightless_drafter import WeightlessDrafter


class Loader:
    """Of heads without weights; the one in `broken` raises what nobody foresaw."""

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
    slots: HeadSlots, tmp_path: Path
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
