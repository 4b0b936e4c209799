"""Messages between targets and drafters come out as they went in, and what does not fit is named."""

import dataclasses
import gc
import os
import time
import typing
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peagle.drafter.client import step_frames
from peagle.drafter.projection import InputProjection
from peagle.drafter.protocol import (
    FROM_TARGET,
    MAX_PAYLOAD_BYTES,
    DtypeName,
    Hello,
    Step,
    StepDescriptor,
    TargetShape,
    WireError,
    check_sizes,
    check_step,
    find_mismatch,
    read_message,
)
from peagle.drafter.serving import input_projection
from peagle.drafter.shared_memory import NUM_SLOTS, Ring
from tests.support.head_factory import random_drafter
from tests.support.pass_requests import SWITCHES, ints
from tests.support.transport_harness import SHAPE as SERVED_SHAPE
from tests.support.transport_harness import (
    DrafterProcess,
    Target,
    connected,
    entry,
    eventually,
    make_pool,
    mapped_rings,
    served_head,
)

SHAPE = TargetShape(
    hidden_size=6, dtype="bfloat16", max_draft_tokens=3, max_num_requests=4, max_num_rows=10, vocab_size=100
)


def step(**changes: Any) -> StepDescriptor:
    made = StepDescriptor(
        slots_B=ints(2, 0, 3), heads_B=ints(0, 0, 1), num_drafts_B=ints(3, 0, 1), row_offset_B=ints(1, 5, 9),
        num_rows=10, prompts={0: ints(7, 8), 3: ints()}, finished_slots=(0, 1), number=5,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def write(ring: Ring, descriptor: StepDescriptor, starts: Any, num_valid: Any, tokens: Any = None) -> Tensor:
    """The step in a target's ring; its payload."""
    hidden_RH = torch.randn(descriptor.num_rows, SHAPE.hidden_size).to(ring.shape.torch_dtype)
    tokens = range(descriptor.num_rows) if tokens is None else tokens
    ring.write_descriptor(descriptor)
    ring.write_tensors(
        descriptor.number, *(torch.tensor(list(values), dtype=torch.int32) for values in (starts, num_valid, tokens)),
        hidden_RH,
    )  # fmt: skip
    return hidden_RH


def carry(sent: Step, shape: TargetShape = SHAPE) -> Step:
    """A step over TCP, as the drafter reads it."""
    descriptor, raw = read_message([zmq.Frame(bytes(frame)) for frame in step_frames(sent)], FROM_TARGET)
    theirs = Ring.create(shape)
    theirs.write_received(descriptor, [frame.buffer for frame in raw])
    return theirs.read_step(descriptor.number)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 3), st.integers(0, 50)), max_size=4))
def test_every_step_comes_out_as_it_went_in(requests: list[tuple[int, int, int, int]]) -> None:
    """Over TCP, but for rejected rows. Requests as (rejected rows before, valid rows, drafts wanted, start)."""
    shape = dataclasses.replace(SHAPE, max_num_rows=16)
    offsets, num_rows = [], 0
    for rejected, valid, *_ in requests:
        offsets.append(num_rows + rejected)
        num_rows += rejected + valid
    some = ints(*range(len(requests)))
    num_valid, num_drafts, starts = ([one[field] for one in requests] for field in (1, 2, 3))
    prompts = {slot: ints(*[7] * (start + 1)) for slot, start in enumerate(starts)}
    descriptor = StepDescriptor(some, some * 0, ints(*num_drafts), ints(*offsets), num_rows, prompts, (0, 3), number=1)
    ours = Ring.create(shape)
    write(ours, descriptor, starts, num_valid)
    sent = ours.read_step(1)
    found = carry(sent, shape)
    rows = sent.valid_rows()
    assert torch.equal(found.hidden_RH, sent.hidden_RH[rows])
    assert found.next_tokens_R.tolist() == sent.next_tokens_R[rows].tolist()
    assert (found.start_B.tolist(), found.num_valid_B.tolist()) == (starts, num_valid)
    assert sum(len(frame) for frame in step_frames(sent)[3:]) == len(rows) * 2 * SHAPE.hidden_size
    assert (found.descriptor.number, found.descriptor.finished_slots) == (1, (0, 3))
    for name in ("slots_B", "heads_B", "num_drafts_B"):
        assert getattr(found.descriptor, name).tolist() == getattr(descriptor, name).tolist()
    assert [tokens.tolist() for tokens in found.descriptor.prompts.values()] == [[7] * (start + 1) for start in starts]
    assert found.descriptor.prompts.keys() == prompts.keys()


@pytest.mark.parametrize(
    ("changes", "raw", "problem"),
    [
        ({"num_rows": 11}, [bytes(64)], "num_rows = 11 is outside 0 .. 10"),
        ({}, [bytes(40), bytes(120)], "3 requests and 10 rows with 10 integers"),
        ({}, [bytes(64), bytes(60)], "with 16 integers and 60 bytes"),
        ({"num_drafts_B": ints(1, 1)}, [bytes(64)], "num_drafts_B has 2 values for 3 requests"),
    ],
)
def test_a_step_over_tcp_that_contradicts_itself_is_refused(changes: dict[str, Any], raw: Any, problem: str) -> None:
    with pytest.raises((WireError, ValueError), match=problem):
        Ring.create(SHAPE).write_received(step(**changes), raw)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"slots_B": ints(2, 2, 3)}, "names a slot twice"),
        ({"slots_B": ints(2, 0, 4)}, r"slots_B holds 0 .. 4, outside 0 .. 3"),
        ({"num_drafts_B": ints(4, 0, 1)}, "num_drafts_B holds 0 .. 4"),
        ({"row_offset_B": ints(1, 5, 11)}, "row_offset_B holds 1 .. 11"),
        ({"num_rows": 11}, "num_rows = 11 is outside 0 .. 10"),
        ({"finished_slots": (9,)}, "finished_slots holds 9"),
        ({"prompts": {1: ints(1)}}, "slot 1, which has no rows"),
        ({"prompts": {0: ints(1, 100)}}, r"prompts\[0\] holds 1 .. 100"),
    ],
)
def test_a_value_of_a_descriptor_that_does_not_fit_is_named(changes: dict[str, Any], problem: str) -> None:
    descriptor = step(**changes)
    found = Step(descriptor, ints(0, 0, 0), ints(0, 0, 0), ints(*[0] * 10), torch.zeros(10, 6))
    with pytest.raises(ValueError, match=problem):
        check_sizes(descriptor, SHAPE) or check_step(found, SHAPE)


@pytest.mark.parametrize(
    ("starts", "num_valid", "token", "prompts", "problem"),
    [
        ([-1, 1, 0], [2, 3, 0], 5, {}, "start_B holds -1"),
        ([4, 1, 0], [2, 6, 0], 5, {}, "reaches beyond the 10 rows"),
        ([4, 1, 0], [2, 3, 0], 100, {}, "next_tokens_R holds 100"),
        ([4, 1, 0], [2, 3, 0], 5, {2: ints(1)}, r"prompts\[2\] has 1 tokens, not 0 or 5, start \+ 1"),
    ],
)
def test_a_value_of_the_tensors_that_does_not_fit_is_named(
    starts: list[int], num_valid: list[int], token: int, prompts: Any, problem: str
) -> None:
    ring = Ring.create(SHAPE)
    write(ring, step(prompts=prompts), starts, num_valid, [token] * 10)
    with pytest.raises(ValueError, match=problem):
        ring.read_step(5)


HELLO = Hello("target", SERVED_SHAPE, served_head(0).aux_layer_ids, {0: "digest0"}, "host")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"heads": {}}, "names no head"),
        ({"shape": dataclasses.replace(SERVED_SHAPE, max_num_rows=2**30)}, f"at most {MAX_PAYLOAD_BYTES}"),
        ({"heads": {0: "digest0", 1: "other"}}, "head 1 of the target is other, this drafter has digest0"),
        ({"aux_layer_ids": (1, 2)}, "aux_layer_ids is"),
        ({"shape": dataclasses.replace(SERVED_SHAPE, vocab_size=8)}, "vocab_size is"),
        ({"shape": dataclasses.replace(SERVED_SHAPE, max_draft_tokens=50)}, "asks for up to 50 drafts"),
    ],
)
def test_a_target_that_does_not_fit_is_refused_by_field(changes: dict[str, Any], reason: str) -> None:
    answer = find_mismatch(msgspec.structs.replace(HELLO, **changes), {0: served_head(0)})
    assert answer is not None
    assert reason in answer


# The input projection


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_input_projection_travels_and_equals_the_drafters(name: str, dtype: torch.dtype) -> None:
    drafter = random_drafter(SWITCHES[name]).to(dtype)
    data = input_projection(drafter).to_bytes()
    projection = InputProjection.from_bytes(data, torch.device("cpu"))
    aux_RX = torch.randn(5, drafter.config.fc_input_size, dtype=dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-2
    with torch.no_grad():
        expected = drafter.project_inputs(aux_RX)
    torch.testing.assert_close(projection.project(aux_RX), expected, rtol=tolerance, atol=tolerance)
    assert (projection.fc_HX.dtype, projection.fc_HX.shape) == (dtype, (32, 96))
    assert projection.eps == drafter.config.rms_norm_eps
    assert len(data) < projection.fc_HX.nbytes + 4096, "more than fc and its norms travels"


# ---- a ring hands over what was written into it, ends a wait with its deadline, and leaves nothing in memory


def write_step(ring: Ring, number: int) -> Tensor:
    """A step of three requests, of whose ten rows the third and the fourth are rejected; its payload."""
    return write(ring, step(number=number), [4, 1, 0], [2, 3, 0])


@pytest.mark.parametrize("dtype", typing.get_args(DtypeName))
def test_a_step_and_its_reply_arrive_in_another_view_of_the_memory(dtype: str) -> None:
    ours = Ring.create(dataclasses.replace(SHAPE, dtype=dtype))
    theirs = Ring.attach(ours.name, ours.shape)
    for number in range(1, 2 * NUM_SLOTS + 1):
        assert not theirs.is_ready(number)
        hidden_RH = write_step(ours, number)
        assert theirs.is_ready(number)
        found = theirs.read_step(number)
        descriptor = found.descriptor
        assert descriptor.number == number
        columns = [descriptor.slots_B, descriptor.heads_B, descriptor.row_offset_B, descriptor.num_drafts_B]
        assert [column.tolist() for column in columns] == [[2, 0, 3], [0, 0, 1], [1, 5, 9], [3, 0, 1]]
        assert (found.start_B.tolist(), found.num_valid_B.tolist()) == ([4, 1, 0], [2, 3, 0])
        assert found.next_tokens_R.tolist() == list(range(10))
        assert torch.equal(found.hidden_RH, hidden_RH)
        assert descriptor.finished_slots == (0, 1)
        assert {slot: tokens.tolist() for slot, tokens in descriptor.prompts.items()} == {0: [7, 8], 3: []}
        assert not ours.is_done(number)
        theirs.write_drafts(number, np.array([[4, 5, 6], [-1, -1, -1]], np.int32), service_ns=2_000_000)
        assert ours.is_done(number)
        assert ours.slot(number).drafts_BK[:2].tolist() == [[4, 5, 6], [-1, -1, -1]]
        assert ours.slot(number).service_ns[0] == 2_000_000


def test_a_slot_is_written_again_only_after_its_answer() -> None:
    ring = Ring.create(SHAPE)
    for number in range(1, NUM_SLOTS + 1):
        assert ring.is_free(number)
        write_step(ring, number)
    assert not ring.is_free(NUM_SLOTS + 1)
    ring.write_drafts(1, np.zeros((2, 3), np.int32), 0)
    assert ring.is_free(NUM_SLOTS + 1)
    assert not ring.is_free(NUM_SLOTS + 2)


def test_a_descriptor_of_another_step_or_size_is_refused() -> None:
    ring = Ring.create(SHAPE)
    write_step(ring, 3 + NUM_SLOTS)
    with pytest.raises(WireError, match="step 3 is described by"):
        ring.read_step(3)
    write_step(ring, 3)
    for size in (0, 20, -1):
        ring.slot(3).descriptor_size[0] = size
        with pytest.raises(WireError, match="does not fit"):
            ring.read_step(3)


def test_a_ring_of_another_size_or_name_is_refused() -> None:
    ours = Ring.create(SHAPE)
    with pytest.raises(ValueError, match="the two sides differ"):
        Ring.attach(ours.name, dataclasses.replace(SHAPE, max_num_rows=4096))
    with pytest.raises(ValueError, match="is not named"):
        Ring.attach("../../etc/passwd", SHAPE)


def test_the_memory_goes_with_the_last_who_has_it() -> None:
    before = mapped_rings(os.getpid())
    ours = Ring.create(SHAPE)
    name = ours.name
    theirs = Ring.attach(name, SHAPE)
    theirs.set_abort(True)
    assert ours._abort[0]
    assert mapped_rings(os.getpid()) == before + 2
    del ours, theirs
    gc.collect()
    assert mapped_rings(os.getpid()) == before
    with pytest.raises((OSError, ValueError)):
        Ring.attach(name, SHAPE)


# On a device


class StreamTarget(Target):
    """A target whose host, with its tensors on a GPU, never waits for a step."""

    def begin(self, num_rows: int) -> tuple[torch.Tensor, list[list[int]]]:
        """Where the step's drafts come, and those that must."""
        slots_B = np.arange(len(self.tokens), dtype=np.int32)
        new, self.is_new = self.is_new, set()
        ((link, members_M),) = self.pool.assign(slots_B, np.zeros_like(slots_B))
        assert self._send(link, members_M.tolist(), num_rows, SERVED_SHAPE.max_draft_tokens, 0, new)
        drafts_MK = torch.full((len(self.tokens), SERVED_SHAPE.max_draft_tokens), 77, device=self.pool.device)
        link.wait(drafts_MK)
        self.ends = [end + num_rows for end in self.ends]
        return drafts_MK, [self.expected(slot) for slot in range(len(self.tokens))]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_drafts_arrive_in_stream_order_while_the_host_runs_ahead(device: str) -> None:
    """On a CPU the same functions do at once what a GPU does in stream order."""
    with DrafterProcess() as drafter:
        pools = [make_pool(device=device) for _ in range(2)]
        target = StreamTarget(pools[0])
        for pool in pools:
            target.pool = pool
            pool.set_drafters([entry(drafter.address)])
            eventually(lambda pool=pool: pool.num_up)
            for sizes in ((5, 1), (3, 2), (1, 1), (2, 1)):
                steps = [target.begin(num_rows) for num_rows in sizes]
                for drafts_MK, expected in steps:
                    assert drafts_MK.tolist() == expected
            for slot in range(3):
                target.restart(slot)
            pool.close()


@pytest.mark.gpu
def test_a_killed_drafter_releases_the_stream() -> None:
    with DrafterProcess(delay_s=30.0) as drafter:
        pool = connected(drafter.address, device="cuda", max_deadline_s=25.0)
        drafts_MK, _ = StreamTarget(pool).begin(3)
        begin_s = time.monotonic()
        drafter.kill()
        assert drafts_MK.unique().tolist() == [0]
        assert time.monotonic() - begin_s < 12, "the deadline ended the wait, not the drafter's death"
        pool.close()
