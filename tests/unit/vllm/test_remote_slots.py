"""Slots of requests at a drafter."""

from peagle.vllm.remote import RequestSlots


def test_a_request_keeps_its_slot_while_it_waits() -> None:
    slots, requests = RequestSlots(3), {name: object() for name in "abc"}
    first = slots.update(["a", "b"], requests)
    assert sorted(first.slots_B.tolist()) == [0, 1]
    assert (first.new, first.finished) == ([0, 1], [])
    second = slots.update(["c", "a"], requests)  # b waits, such as after preemption
    assert second.new == [0]
    third = slots.update(["b", "a", "c"], requests)
    assert third.slots_B.tolist() == [first.slots_B[1], first.slots_B[0], second.slots_B[0]]
    assert (third.new, third.finished) == ([], [])


def test_without_a_free_slot_the_longest_waiting_request_loses_its_own() -> None:
    slots, requests = RequestSlots(2), {name: object() for name in "abcd"}
    slot_of_a = int(slots.update(["a"], requests).slots_B[0])
    slots.update(["b"], requests)
    change = slots.update(["b", "c"], requests)
    assert change.finished == [slot_of_a]
    assert slots.update(["a", "c"], requests).new == [0]
