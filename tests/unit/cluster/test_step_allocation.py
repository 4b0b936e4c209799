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
@given(
    TABLES,
    st.lists(st.tuples(survivals(3), st.sets(st.integers(0, 3), min_size=1, max_size=2)), min_size=1, max_size=4),
)
def test_allocate_is_the_optimum_of_all_assignments(table, requests):
    rates, bounds = zip(*requests, strict=True)
    min_ks, max_ks = [min(each) for each in bounds], [max(each) for each in bounds]
    found = allocate(rates, max_ks, table, min_ks=min_ks)
    allowed = list(product(*(range(low, high + 1) for low, high in zip(min_ks, max_ks, strict=True))))
    assert tuple(found) in allowed
    best = max(tokens_per_s(table, rates, each) for each in allowed)
    assert tokens_per_s(table, rates, found) == pytest.approx(best, rel=1e-9)


def test_ties_go_to_fewer_drafts_and_the_first_request():
    free = Table(per_token_s=0.0)
    assert allocate([(0.0, 0.0)] * 2, [2, 2], free) == [0, 0]
    dear = Table(10 * MS, 0.0, sizes=[4, 1000], per_token_squared_s=MS)
    assert allocate([(0.5, 0.4)] * 3, [2, 2, 2], dear) == [1, 0, 0]
    assert allocate([], [], free) == []
