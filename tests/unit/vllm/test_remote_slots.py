"""Slots of requests at a drafter."""

import random

from peagle.vllm.remote import RequestSlots


def test_a_request_keeps_its_slot_while_it_waits() -> None:
    slots, requests = RequestSlots(3), {name: object() for name in "abc"}
    first = slots.update(["a", "b"], requests)
    assert sorted(first.slots_B.tolist()) == [0, 1]
    assert (first.new, first.finished) == ((0, 1), ())
    second = slots.update(["c", "a"], requests)  # b waits, such as after preemption
    assert second.new == (0,)
    third = slots.update(["b", "a", "c"], requests)
    assert third.slots_B.tolist() == [first.slots_B[1], first.slots_B[0], second.slots_B[0]]
    assert (third.new, third.finished) == ((), ())


def test_finished_requests_give_their_slots_back() -> None:
    slots, requests = RequestSlots(2), {name: object() for name in "ab"}
    slot = int(slots.update(["a", "b"], requests).slots_B[0])
    del requests["a"]
    requests["c"] = object()
    change = slots.update(["b", "c"], requests)
    assert change.finished == (slot,)
    assert int(change.slots_B[1]) == slot  # in use again in the same step
    assert change.new == (1,)


def test_another_request_under_the_same_id_is_new() -> None:
    slots = RequestSlots(1)
    slots.update(["a"], {"a": object()})
    change = slots.update(["a"], {"a": object()})
    assert (change.new, change.finished) == ((0,), (0,))


def test_without_a_free_slot_the_longest_waiting_request_loses_its_own() -> None:
    slots, requests = RequestSlots(2), {name: object() for name in "abcd"}
    slot_of_a = int(slots.update(["a"], requests).slots_B[0])
    slots.update(["b"], requests)
    change = slots.update(["b", "c"], requests)
    assert change.finished == (slot_of_a,)
    assert slots.update(["a", "c"], requests).new == (0,)


def test_slots_of_random_batches_are_different_and_told() -> None:
    """Against a model: a slot's holder changes only where `new` says so."""
    chance, slots = random.Random(0), RequestSlots(6)
    requests: dict[str, object] = {}
    holder: dict[int, object] = {}
    batch: list[str] = []
    for number in range(400):
        requests[f"r{number}"] = object()
        for name in [name for name in requests if chance.random() < 0.15]:
            del requests[name]
        if chance.random() < 0.6 or not batch or not requests.keys() >= set(batch):
            batch = chance.sample(sorted(requests), min(len(requests), chance.randint(1, 6)))
        elif chance.random() < 0.2:  # the batch of the step before, with another request under one of its ids
            requests[batch[0]] = object()
        change = slots.update(batch, requests)
        taken = change.slots_B.tolist()
        assert len(set(taken)) == len(batch)
        assert all(0 <= slot < 6 for slot in taken)
        for slot in change.finished:
            del holder[slot]
        for place, (name, slot) in enumerate(zip(batch, taken, strict=True)):
            assert (holder.get(slot) is not requests[name]) is (place in change.new)
            holder[slot] = requests[name]
