"""Heads swapped at a drafter that serves, and heads that it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.draft_engine_harness import head_runtime
from tests.transport_harness import Target, entry, eventually, make_pool, make_server, only_link, running, served_head


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])
def test_a_swapped_head_drafts_after_the_targets_have_its_reducer(shared: bool) -> None:
    with running(make_server((0, 1))) as server:
        pool, other = make_pool(use_shared_memory=shared), make_pool(use_shared_memory=shared)
        pool.set_drafters([entry(server.address, {0: "digest0"})])
        other.set_drafters([entry(server.address, {0: "digest1"})])
        eventually(lambda: pool.num_up and other.num_up)
        target, untouched = Target(pool), Target(other)
        target.check_step()
        server.swap(0, head_runtime(2), served_head(2))
        assert server.report()["heads"] == {"0": "digest2", "1": "digest1"}
        eventually(lambda: only_link(pool)["heads"] == {"0": "digest2"} and pool.num_up)
        target.begin_cold()
        assert target.step() == [target.expected(slot, head=2) for slot in range(3)]
        assert untouched.step() == [untouched.expected(slot, head=1) for slot in range(3)]
        assert only_link(other)["num_connections"] == 1
        for each in (pool, other):
            each.close()


@pytest.mark.parametrize(
    ("index", "served", "problem"),
    [
        (5, served_head(2), "there is no head 5 to swap, only"),
        (0, served_head(1), "head digest1 is served under another number already"),
        (0, served_head(2, hidden_size=8), "head digest2 does not fit the targets: its hidden_size is 8, that of"),
        (0, served_head(2, aux_layer_ids=(0,)), "its aux_layer_ids is"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_and_the_old_one_goes_on(index: int, served: Any, problem: str) -> None:
    with running(make_server((0, 1))) as server:
        pool = make_pool()
        pool.set_drafters([entry(server.address, {0: "digest0"})])
        eventually(lambda: pool.num_up)
        target = Target(pool)
        target.check_step()
        with pytest.raises(ValueError, match=problem):
            server.swap(index, head_runtime(2), served)
        target.check_step()
        assert only_link(pool)["num_connections"] == 1
        pool.close()
