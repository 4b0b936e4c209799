"""A step and its drafts as messages over TCP: what the mailbox is on one host. Only valid rows travel."""

from __future__ import annotations

import socket

import numpy as np
import torch

from peagle.runtime.steps import Int32Array, TargetShape, TargetStep
from peagle.runtime.wire import Message, WireError, send_message

_NUM_ARRAYS = 6  # slots, heads, start, num_valid, row_offset, depth


def max_step_bytes(shape: TargetShape, max_prompt_tokens: int) -> int:
    """Raw bytes of the largest step message."""
    numbers = (_NUM_ARRAYS + 3) * shape.max_num_requests + shape.max_num_rows + max_prompt_tokens
    return 4 * numbers + shape.payload_bytes


def send_step(connection: socket.socket, step: TargetStep) -> int:
    """Send a step that has passed `TargetStep.check`. Returns the bytes sent. Raises OSError."""
    rows = step.valid_rows()
    packed_offset_B = (np.cumsum(step.num_valid_B) - step.num_valid_B).astype(np.int32)
    prompts = list(step.prompts.items())
    numbers = np.concatenate(
        [step.slots_B, step.heads_B, step.start_B, step.num_valid_B, packed_offset_B, step.depth_B]
        + [step.next_tokens_R[rows], np.asarray(step.finished_slots, np.int32)]
        + [np.asarray([slot for slot, _ in prompts] + [len(tokens) for _, tokens in prompts], np.int32)]
        + [tokens for _, tokens in prompts],
        dtype=np.int32,
    )
    fields = {
        "step": step.step,
        "num_requests": step.num_requests,
        "num_rows": len(rows),
        "num_finished": len(step.finished_slots),
        "num_prompts": len(prompts),
        "num_prompt_tokens": sum(len(tokens) for _, tokens in prompts),
    }
    runs = _runs(step)
    return send_message(connection, "step", fields, [numbers.data, *runs])


def _runs(step: TargetStep) -> list[memoryview]:
    """The payload's valid rows in order, as few pieces of its memory."""
    bytes_RX = step.hidden_RH.contiguous().view(torch.uint8).numpy()
    pieces: list[tuple[int, int]] = []
    for first, count in zip(step.row_offset_B.tolist(), step.num_valid_B.tolist(), strict=True):
        if pieces and pieces[-1][1] == first:
            pieces[-1] = (pieces[-1][0], first + count)
        else:
            pieces.append((first, first + count))
    return [bytes_RX[first:end].data for first, end in pieces if end > first]


def read_step(message: Message, session: int, shape: TargetShape) -> TargetStep:
    """Inverse of `send_step`; arrays are views of the message. Raises WireError or ValueError for what does not fit."""
    if message.kind != "step":
        raise WireError(f"a target sent {message.kind!r:.40} where a step was due")
    names = ("num_requests", "num_rows", "num_finished", "num_prompts", "num_prompt_tokens")
    sizes = [message.field(name, int) for name in names]
    if min(sizes) < 0:
        raise WireError(f"step: sizes {dict(zip(names, sizes, strict=True))}")
    num_requests, num_rows, num_finished, num_prompts, num_prompt_tokens = sizes
    lengths = [num_requests] * _NUM_ARRAYS + [num_rows, num_finished, num_prompts, num_prompts, num_prompt_tokens]
    num_numbers = sum(lengths)
    if len(message.raw) != 4 * num_numbers + num_rows * shape.row_bytes:
        raise WireError(f"step: {len(message.raw)} raw bytes do not fit {dict(zip(names, sizes, strict=True))}")
    arrays = np.split(np.frombuffer(message.raw, np.int32, num_numbers), np.cumsum(lengths)[:-1])
    prompt_lengths = arrays[9]
    if num_prompts and (prompt_lengths.min() < 0 or prompt_lengths.sum() != num_prompt_tokens):
        raise WireError(f"step: prompts of {prompt_lengths.tolist()} tokens are not {num_prompt_tokens} together")
    tokens = np.split(arrays[10], np.cumsum(prompt_lengths)[:-1]) if num_prompts else []
    if num_rows:
        hidden_RH = torch.frombuffer(message.raw, dtype=shape.torch_dtype, offset=4 * num_numbers)
    else:
        hidden_RH = torch.empty(0, dtype=shape.torch_dtype)
    slots_B, heads_B, start_B, num_valid_B, row_offset_B, depth_B = arrays[:_NUM_ARRAYS]
    found = TargetStep(
        session=session,
        step=message.field("step", int),
        slots_B=slots_B,
        heads_B=heads_B,
        start_B=start_B,
        num_valid_B=num_valid_B,
        row_offset_B=row_offset_B,
        depth_B=depth_B,
        next_tokens_R=arrays[6],
        hidden_RH=hidden_RH.view(num_rows, shape.hidden_size),
        finished_slots=arrays[7].tolist(),
        prompts=dict(zip(arrays[8].tolist(), tokens, strict=True)),
    )
    found.check(shape)
    return found


def drafts_of(message: Message, step: int, num_requests: int, shape: TargetShape) -> Int32Array:
    """[B, K] of the reply to a step. Raises WireError for a reply to another step or of another size."""
    if message.field("step", int) != step or len(message.raw) != 4 * num_requests * shape.max_depth:
        raise WireError(
            f"a reply to step {message.fields['step']} with {len(message.raw)} bytes, to step {step} wanted"
        )
    return np.frombuffer(message.raw, np.int32).reshape(num_requests, shape.max_depth)


def send_drafts(connection: socket.socket, step: int, drafts_BK: Int32Array) -> None:
    """The reply to a step. Raises OSError."""
    send_message(connection, "drafts", {"step": step}, [np.ascontiguousarray(drafts_BK).data])
