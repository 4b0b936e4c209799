"""The drafts of one step against brute force."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.step_allocation import allocate
from tests.support.step_tables import MS, TABLES, Table, survivals


def tokens_per_s(table: Table, rates, depths) -> float:
    num = len(depths)
    tokens = num + sum(sum(own[:k]) for own, k in zip(rates, depths, strict=True))
    return tokens / table.seconds(num, num + sum(depths))


@settings(max_examples=200)
@given(TABLES, st.lists(st.tuples(survivals(3), st.integers(0, 3)), min_size=1, max_size=4))
def test_allocate_is_the_optimum_of_all_assignments(table, requests):
    rates, max_ks = zip(*requests, strict=True)
    depths = allocate(rates, max_ks, table)
    assert all(0 <= k <= max_k for k, max_k in zip(depths, max_ks, strict=True))
    best = max(tokens_per_s(table, rates, each) for each in product(*(range(max_k + 1) for max_k in max_ks)))
    assert tokens_per_s(table, rates, depths) == pytest.approx(best, rel=1e-9)


def test_ties_go_to_fewer_drafts_and_the_first_request():
    free = Table(per_token_s=0.0)
    assert allocate([(0.0, 0.0)] * 2, [2, 2], free) == [0, 0]
    dear = Table(10 * MS, 0.0, sizes=[4, 1000], per_token_squared_s=MS)
    assert allocate([(0.5, 0.4)] * 3, [2, 2, 2], dear) == [1, 0, 0]
    assert allocate([], [], free) == []
