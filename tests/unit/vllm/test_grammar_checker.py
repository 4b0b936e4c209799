"""Grammars are compiled in a process of their own, whose children the kernel ends when they take too much."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from peagle.vllm import grammar_checker
from peagle.vllm.grammar_checker import CheckedGrammar, GrammarChecker, GrammarLimits, current_queue

SLOW = {"type": "object", "properties": {f"p{n}": {"type": "string", "maxLength": n} for n in range(1000, 1040)}}
"""Each string of bounded length takes most of a second to compile."""

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    loop = asyncio.new_event_loop()
    yield lambda work: loop.run_until_complete(asyncio.wait_for(work, 300))
    loop.close()


@pytest.fixture(scope="module")
def checker(target_dir: Path, run: Run) -> Iterator[GrammarChecker]:
    config = EngineArgs(str(target_dir), max_model_len=256, dtype="float32").create_engine_config()

    async def start() -> GrammarChecker:
        found = GrammarChecker(config, GrammarLimits(max_cpu_s=2.0))
        found.start()
        return found

    checker = run(start())
    yield checker
    checker.stop()
    assert checker.pid is None


def check(checker: GrammarChecker, run: Run, **fields: Any) -> CheckedGrammar:
    return run(checker.check(StructuredOutputsParams(**fields)))  # type: ignore[no-any-return]


async def check_from(checker: GrammarChecker, queue: str, regex: str) -> CheckedGrammar:
    current_queue.set(queue)
    return await checker.check(StructuredOutputsParams(regex=regex))


def test_a_grammar_comes_back_as_vllms_validation_leaves_it(checker: GrammarChecker, run: Run) -> None:
    """Nothing of this process may compile: the process that does has one thread and is not this one."""
    found = check(checker, run, choice=["a", "b"])
    assert (found.choice, found.grammar, found._backend) == (None, 'root ::= "a" | "b"', "xgrammar")
    assert isinstance(found, CheckedGrammar)
    assert check(checker, run, json={"type": "integer", "multipleOf": 7})._backend == "guidance"
    assert check(checker, run, json_object=True)._backend == "xgrammar"
    assert check(checker, run, choice=["", "a"]).grammar == 'root ::= "" | "a"'
    one_or_two = {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": {"enum": [1, 2]}}]}
    tag = json.dumps({"type": "structural_tag", "format": one_or_two})
    assert check(checker, run, structural_tag=tag).structural_tag == tag
    threads = [(path / "comm").read_text().strip() for path in Path(f"/proc/{checker.pid}/task").iterdir()]
    # An allocator that the host preloads has a thread of its own, and takes its locks around a fork.
    assert len([name for name in threads if name != "jemalloc_bg_thd"]) == 1, threads
    assert f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{checker.pid}/status").read_text()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": r"[^\s\S]"}, "the grammar allows no text"),
        ({"json": {"$ref": "#"}}, "the grammar allows no text"),
        ({"choice": [""]}, "the grammar allows no text"),
        ({"json": {"type": "array", "minItems": 10**7}}, "the grammar takes more than 2 s or 100 MiB"),
        ({"json": '{"properties": {"a":' * 10_000 + "1" + "}}" * 10_000}, "structured_outputs: "),
        ({"regex": "((a{1,100}){1,100}){1,100}"}, "the grammar takes more than 2 s"),  # to follow
        ({"json": {"type": "nothing"}}, "structured_outputs: "),
        ({"json": {"a": object()}}, "structured_outputs is no JSON"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(checker: Any, run: Run, fields: Any, message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message) as raised:
        check(checker, run, **fields)
    assert str(raised.value.parameter).startswith("structured_outputs")
    assert len(str(raised.value)) < 1000


def test_a_child_that_takes_too_much_ends_alone_and_others_go_on(checker: GrammarChecker, run: Run) -> None:
    async def both() -> list[Any]:
        slow, quick = StructuredOutputsParams(json=SLOW), StructuredOutputsParams(regex="ab+")
        return await asyncio.gather(checker.check(slow), checker.check(quick), return_exceptions=True)

    pid = checker.pid
    slow, quick = run(both())
    assert "the grammar takes more than 2 s or 100 MiB to compile" in str(slow)
    assert quick.regex == "ab+"
    assert checker.pid == pid


def test_the_memory_of_a_grammar_has_a_limit(checker: GrammarChecker, run: Run) -> None:
    assert check(checker, run, regex="[a-z]{1,100}")
    before, checker.limits = checker.limits, GrammarLimits(max_memory_bytes=2**20)
    try:
        with pytest.raises(VLLMValidationError, match="the grammar takes more than 10 s or 1 MiB to compile"):
            check(checker, run, regex="[a-z]{1,100}")  # by other limits: the outcome from before does not hold
    finally:
        checker.limits = before


def test_a_client_that_leaves_leaves_the_work_to_the_next(checker: GrammarChecker, run: Run) -> None:
    """The place of a grammar is free again when its child has ended, not before."""

    async def leave() -> Any:
        grammar = StructuredOutputsParams(regex="leave+")
        first = asyncio.ensure_future(checker.check(grammar))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        return await checker.check(grammar)

    assert run(leave()).regex == "leave+"


def hold_compilations(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], asyncio.Event]:
    """The regular expressions whose compilation has begun; it ends after the event."""
    asked, ends = list[str](), asyncio.Event()

    async def ask(job: bytes) -> bytes:
        asked.append(json.loads(job)["fields"]["regex"])
        await ends.wait()
        return b" {}"

    monkeypatch.setattr(checker, "_ask", ask)
    return asked, ends


def test_grammars_that_nobody_waits_for_any_more_are_not_begun(
    checker: GrammarChecker, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ends = hold_compilations(checker, monkeypatch)

    async def flood() -> None:
        for number in range(20):
            current_queue.set(f"queue {number}")
            client = asyncio.create_task(checker.check(StructuredOutputsParams(regex=f"flood{number}")))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            client.cancel()
        stays, leaves = (asyncio.create_task(checker.check(StructuredOutputsParams(regex="both"))) for _ in range(2))
        await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.sleep(0)
        ends.set()
        await stays

    run(flood())
    assert asked == ["flood0", "flood1", "both"]
    assert not checker._queued
    assert not checker._num_waiting


@pytest.mark.parametrize(("many", "regex"), [("slow", "quick"), ("shared", "shared2")])
def test_a_line_with_many_slow_grammars_keeps_no_other_line_waiting(
    checker: GrammarChecker, run: Run, monkeypatch: pytest.MonkeyPatch, many: str, regex: str
) -> None:
    asked, ends = hold_compilations(checker, monkeypatch)

    async def flood() -> None:
        asking = [asyncio.create_task(check_from(checker, "many", f"{many}{number}")) for number in range(3)]
        await asyncio.sleep(0)
        asking.append(asyncio.create_task(check_from(checker, "other", regex)))
        while len(asked) < 2:
            await asyncio.sleep(0)
        ends.set()
        await asyncio.gather(*asking)

    run(flood())
    assert asked == [f"{many}0", regex, f"{many}1", f"{many}2"]
    assert not checker._turns


def test_two_that_wait_for_a_lost_process_start_one_in_its_place(
    checker: GrammarChecker, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, start = [], checker.start

    def count() -> None:
        starts.append(checker.pid)
        start()

    async def lose() -> list[CheckedGrammar]:
        checker.stop()
        waiting = [asyncio.create_task(check_from(checker, queue, f"lost {queue}")) for queue in "ab"]
        while len(starts) < 2:
            await asyncio.sleep(0)
        assert checker.pid is not None
        os.kill(checker.pid, signal.SIGKILL)  # while it imports
        return await asyncio.gather(*waiting)

    monkeypatch.setattr(checker, "start", count)
    assert [found.regex for found in run(lose())] == ["lost a", "lost b"]
    assert [pid is None for pid in starts] == [True, False, True, False]


def test_a_backend_that_counts_other_tokens_than_the_model_is_refused(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """guidance counts the tokenizer's tokens. The engine would end, whose tables have the width of the model's."""
    config = EngineArgs(str(target_dir), max_model_len=256, dtype="float32").create_engine_config()
    compilers = grammar_checker._Compilers(config.model_config, config.structured_outputs_config)
    assert "error" not in compilers.compile({"regex": "a"})
    size = config.model_config.get_vocab_size()
    monkeypatch.setattr(type(config.model_config), "get_vocab_size", lambda _: size - 64)
    assert "does not know this model's vocabulary" in compilers.compile({"regex": "b"})["error"]
