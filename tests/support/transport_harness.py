"""Drafters in processes of their own, real ones with the small random head of `draft_engine_harness`, and targets that
feed them through links as an engine does."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from peagle.drafter.engine import DraftEngine
from peagle.drafter.pool import LinkPool
from peagle.drafter.protocol import Int32Array, ServedHead, Step, StepDescriptor, TargetShape
from peagle.drafter.server import DrafterServer
from peagle.drafter.serving import input_projection
from tests.support.draft_engine_harness import CONFIG, MAX_DEPTH, aux_rows, drafter_of, expected_drafts, head_runtime
from tests.support.pass_requests import ints

SHAPE = TargetShape(
    hidden_size=CONFIG.hidden_size,
    dtype="float64",
    max_draft_tokens=MAX_DEPTH,
    max_num_requests=4,
    max_num_rows=64,
    vocab_size=CONFIG.vocab_size,
)
ROOT = Path(__file__).resolve().parents[2]
HEADS = {0: "digest0"}
POOLS: list[LinkPool] = []
"""All that were made."""


def served_head(head: int, **changes: Any) -> ServedHead:
    offered: dict[str, Any] = {
        "digest": f"digest{head}",
        "projection": input_projection(drafter_of(head)).to_bytes(),
        "hidden_size": CONFIG.hidden_size,
        "dtype": "float64",
        "vocab_size": CONFIG.vocab_size,
        "aux_layer_ids": CONFIG.aux_layer_ids,
        "max_draft_tokens": MAX_DEPTH,
    }
    return ServedHead(**(offered | changes))


class SlowEngine(DraftEngine):
    delay_s = 0.0

    def step(self, steps: Sequence[Step]) -> list[Int32Array]:
        time.sleep(self.delay_s)
        return super().step(steps)


def make_server(
    heads: tuple[int, ...] = (0,), port: int = 0, delay_s: float = 0.0, num_blocks: int = 600, **settings: Any
) -> DrafterServer:
    engine = SlowEngine({i: head_runtime(head, num_blocks=num_blocks) for i, head in enumerate(heads)})
    engine.delay_s = delay_s
    return DrafterServer(engine, {i: served_head(head) for i, head in enumerate(heads)}, port=port, **settings)


@contextlib.contextmanager
def running(server: DrafterServer) -> Iterator[DrafterServer]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


class DrafterProcess:
    """A drafter that can be killed, stopped and started again. It is forked from a process that has imported torch."""

    def __init__(self, port: int = 0, delay_s: float = 0.0) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        ours, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=serve_until_killed, args=(theirs, port, delay_s), daemon=True)
        self.process.start()
        theirs.close()
        with ours:
            self.address: str = ours.recv()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:  # on a busy machine its threads run on for a moment
            eventually(lambda: Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def mapped_rings(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("peagle-ring")


def eventually(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """The condition's value once it is true. A deadline, not a measurement: it fails by far or not at all."""
    end_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.005)
    return value


def entry(address: str, heads: dict[int, str] = HEADS) -> dict[str, object]:
    return {"address": address, "heads": heads}


def only_link(pool: Any) -> dict[str, Any]:
    """Its report, with its counters beside the rest."""
    (link,) = pool.report()["links"]
    return link | link["counters"]


def make_pool(**settings: Any) -> LinkPool:
    settings = {"max_deadline_s": 30.0, "aux_layer_ids": CONFIG.aux_layer_ids} | settings
    POOLS.append(LinkPool(settings.pop("shape", SHAPE), **settings))
    return POOLS[-1]


def connected(*addresses: str, heads: dict[int, str] = HEADS, **settings: Any) -> LinkPool:
    """A target whose links to these drafters are up."""
    pool = make_pool(**settings)
    pool.set_drafters([entry(address, heads) for address in addresses])
    eventually(lambda: pool.num_up == len(addresses))
    return pool


class Target:
    """An engine's side without a model: requests with fixed tokens that advance by some rows a step."""

    def __init__(self, pool: LinkPool, num_requests: int = 3, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.pool = pool
        self.tokens = [generator.integers(0, 99, 120).tolist() for _ in range(num_requests)]
        self.ends = [0] * num_requests
        self.firsts = [0] * num_requests  # where the drafter's cache of the request begins
        self.is_new = set(range(num_requests))
        self.homes: list[str | None] = [None] * num_requests

    def restart(self, slot: int) -> None:
        """The slot's request ends and another, with the same tokens, takes its place."""
        self.pool.finish_requests([slot])
        self.ends[slot], self.firsts[slot], self.is_new = 0, 0, self.is_new | {slot}

    def step(self, num_rows: int = 3, depth: int = MAX_DEPTH, head: int = 0) -> list[list[int] | None]:
        """One step of all requests. Drafts of each, None for those that were not answered."""
        slots_B = np.arange(len(self.tokens), dtype=np.int32)
        heads_B, drafts = np.full_like(slots_B, head), [None] * len(slots_B)
        new, self.is_new = self.is_new, set()
        sent: list[tuple[Any, list[int]]] = []
        for link, members_M in self.pool.assign(slots_B, heads_B):
            slots = members_M.tolist()
            if self._send(link, slots, num_rows, depth, head, new):
                sent.append((link, slots))
            for slot in slots:
                self.homes[slot] = link.drafter.address
        for link, slots in sent:
            out_MK = torch.full((len(slots), MAX_DEPTH), 77, dtype=torch.int64, device=self.pool.device)
            link.wait(out_MK)
            has_drafts_M = link.has_drafts(np.array(slots, np.int32))
            for slot, drafts_K, has_drafts in zip(slots, out_MK.tolist(), has_drafts_M, strict=True):
                if link.state == "up":
                    found = drafts_K[:depth] if has_drafts else []
                    drafts[slot] = found + [-1] * (MAX_DEPTH - len(found))
                else:
                    assert not any(drafts_K)
        self.ends = [end + num_rows for end in self.ends]
        return drafts

    def _send(self, link: Any, slots: list[int], num_rows: int, depth: int, head: int, new: set[int]) -> bool:
        starts = [self.ends[slot] for slot in slots]
        rows, next_tokens, projection = [], [], link.projections[head]
        for slot, start in zip(slots, starts, strict=True):
            aux_RX = aux_rows(self.tokens[slot], start, start + num_rows)
            rows.append(projection.project(aux_RX.to(self.pool.device)))
            next_tokens += self.tokens[slot][start + 1 : start + 1 + num_rows]

        descriptor = StepDescriptor(
            slots_B=ints(*slots),
            heads_B=ints(*[head] * len(slots)),
            num_drafts_B=ints(*[depth] * len(slots)),
            row_offset_B=ints(*range(0, num_rows * len(slots), num_rows)),
            num_rows=len(next_tokens),
            prompts={slot: ints(*self.tokens[slot][: self.ends[slot] + 1]) for slot in new & set(slots)},
        )
        integers = (
            torch.tensor(values, dtype=torch.int32, device=self.pool.device)
            for values in (starts, [num_rows] * len(slots), next_tokens)
        )
        is_sent: bool = link.send(descriptor, *integers, torch.cat(rows))
        return is_sent

    def expected(self, slot: int, head: int = 0) -> list[int]:
        """Drafts that the last step must have got for the slot."""
        return expected_drafts(head, self.tokens[slot], self.firsts[slot], self.ends[slot], MAX_DEPTH)

    def check_step(self, num_rows: int = 3, head: int = 0) -> None:
        """One step in which every request gets the right drafts."""
        drafts = self.step(num_rows, head=head)
        assert drafts == [self.expected(slot, head=head) for slot in range(len(self.tokens))]

    def begin_cold(self) -> None:
        """From the next step on, the drafter's caches begin where the requests are now."""
        self.firsts = list(self.ends)


@contextlib.contextmanager
def drafting(
    drafter: contextlib.AbstractContextManager[Any], **settings: Any
) -> Iterator[tuple[Any, LinkPool, Target]]:
    """A drafter that runs, and the links of a target and the target itself, which has had its first drafts."""
    with drafter as up:
        target = Target(connected(up.address, **settings))
        target.check_step()
        yield up, target.pool, target


def serve_until_killed(said: Connection, port: int, delay_s: float) -> None:
    torch.set_num_threads(1)
    server = make_server(port=port, delay_s=delay_s)
    server.start()
    said.send(server.address)
    signal.pause()
