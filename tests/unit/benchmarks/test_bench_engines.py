"""Tests of `benchmarks.engines` that need no engine: whose turn it is to be measured."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.engines import Turns

NUM_ROUNDS = 3


async def arm(index: int, turns: Turns, start_s: float, seen: list[int], running: list[int], num_rounds: int) -> None:
    await asyncio.sleep(start_s)
    for _ in range(num_rounds):
        async with turns:
            assert not running, "one at a time"
            running.append(index)
            await asyncio.sleep(0.05)
            seen.append(running.pop())


def test_arms_are_measured_in_turn_once_all_are_ready(tmp_path: Path) -> None:
    seen: list[int] = []

    async def together() -> None:
        running: list[int] = []
        await asyncio.gather(
            *(arm(i, Turns(tmp_path, i, 3), 0.3 * (i == 1), seen, running, NUM_ROUNDS) for i in range(3))
        )

    asyncio.run(asyncio.wait_for(together(), 30))
    assert seen == [0, 1, 2] * NUM_ROUNDS


def test_nobody_waits_for_an_arm_that_has_ended(tmp_path: Path) -> None:
    """The first one after a round, the last one before it was ready."""
    seen: list[int] = []

    async def together() -> None:
        running: list[int] = []
        Turns(tmp_path, 2, 3).end()
        others = arm(1, Turns(tmp_path, 1, 3), 0.0, seen, running, NUM_ROUNDS)
        await asyncio.gather(first(running), others)

    async def first(running: list[int]) -> None:
        await arm(0, Turns(tmp_path, 0, 3), 0.0, seen, running, 1)
        Turns(tmp_path, 0, 3).end()

    asyncio.run(asyncio.wait_for(together(), 30))
    assert seen == [0, 1, 1, 1]


def test_the_others_keep_their_order_where_an_arm_between_them_has_ended(tmp_path: Path) -> None:
    seen: list[int] = []

    async def together() -> None:
        running: list[int] = []
        Turns(tmp_path, 1, 3).end()
        await asyncio.gather(
            *(arm(i, Turns(tmp_path, i, 3), 0.2 * (i == 0), seen, running, NUM_ROUNDS) for i in (0, 2))
        )

    asyncio.run(asyncio.wait_for(together(), 30))
    assert seen == [0, 2] * NUM_ROUNDS


def test_what_was_measured_is_in_the_file_of_a_call_that_is_ended(tmp_path: Path) -> None:
    """`timeout` ends a program's process, then the process group that it is in."""
    code = """
import json, subprocess, sys
from argparse import Namespace
from pathlib import Path
from benchmarks import engines
start = subprocess.Popen
def arm(command):
    Path(command[command.index("--out") + 1]).write_text(json.dumps({"arm": command[command.index("--arm") + 1]}))
    return start([sys.executable, "-c", "import os, time; os.write(1, bytes([109, 10])); time.sleep(60)"])
subprocess.Popen = arm
folder = Path(sys.argv[1])
engines.measure_in_turn(Namespace(folder=folder, arm=["none", "peagle-7"], out=folder / "out.json"))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["m\n"] * 2  # each written at once
        process.terminate()
        while process.poll() is None:
            time.sleep(0.002)
            os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(30) == 1
    assert json.loads((tmp_path / "out.json").read_text()) == {"none": {"arm": "none"}, "peagle-7": {"arm": "peagle-7"}}
