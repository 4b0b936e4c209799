"""Autoscaling from acceptance in a model of a fleet: calm while nothing changes, and cheaper than queue length when the
head fails."""

from benchmarks.simulate_scaling import by_acceptance, by_queue, simulate


def test_steady_traffic_moves_no_count_and_keeps_every_limit() -> None:
    found = simulate(by_acceptance(0.7), collapses=False, seed=0, initial=4)
    assert (found.num_changes, found.kept) == (0, 1.0)


def test_a_collapse_costs_fewer_replica_hours_than_with_queue_length_and_no_more_requests() -> None:
    ours, lower = (simulate(policy, collapses=True, seed=0, initial=4) for policy in (by_acceptance(0.6), by_queue(3)))
    assert ours.kept > 0.99
    assert ours.kept > lower.kept
    assert ours.replica_hours < 0.85 * lower.replica_hours
    assert ours.recovery_s <= 60
    assert ours.num_changes <= 4 < lower.num_changes
