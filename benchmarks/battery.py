"""Whether any request stops the service: named hostile and generated requests beside a canary, and what they cost.

    python -m benchmarks.battery [--inputs FILE] [--num 1000] [--names NAME ...] [--out FILE]

The service is started as its users start it (`peagle serve`). First every named request (`benchmarks.hostile`) is sent
alone, so that what it costs is its own; then all of them and `--num` generated ones come from several clients at once.
schemathesis generates a quarter of these from the service's OpenAPI document, with what fits it and what does not;
hypothesis the others, of hostile numbers, lists, schemas and patterns. From another loopback address a canary (a plain
greedy request of 8 tokens) is sent every 2 s and /health is asked every second. No canary may fail, wait longer than
5 s or get another text, no answer may be 5xx or other than the document says, and no process may end.

Generating takes minutes: with `--inputs` the generated requests are read from the file, which is written where it is
missing. `--num 0` sends the named ones only.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import operator
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from schemathesis import APIOperation, BaseSchema, Case, GenerationMode
from schemathesis.core.failures import FailureGroup

from benchmarks import hostile
from benchmarks.common import markdown
from benchmarks.faults import fixed_targets, running_service
from benchmarks.hostile import HUGE, MAX_TOKENS, PATHS, Ask, Outcome, hostile_requests, judged
from cluster.settings import load_settings
from deployments.app import catalog
from deployments.front_end import FrontEnd
from deployments.routes import Entrance, make_app
from peagle.provenance import conditions

CANARY_PERIOD_S, HEALTH_PERIOD_S, MEMORY_PERIOD_S, TIMEOUT_S, MAX_WAIT_S = 2.0, 1.0, 0.5, 60.0, 5.0
NUM_CLIENTS, MAX_BYTES, MAX_S = 6, 2**20, 1500.0
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CANARY = {"messages": QUESTION, "max_tokens": 8, "temperature": 0}
CANARY_ADDRESS = "127.0.0.2"
PROCESSES = ("ray::Serve", "ray::HAProxyManager", "ray::ProxyActor", "VLLM::")
"""How the names of the processes begin that are watched."""

Input = dict[str, str]
"""A generated request: its name, path in the document (`of`), method, path, and content, a byte a character."""
RECORDS = {"chat": "ChatCompletionRequest", "completions": "CompletionRequest"}


# ---- generated requests


def draw(strategy: SearchStrategy[Any], num: int, number: int) -> list[Any]:
    """`num` values at most, the same for the same `number`."""
    found: list[Any] = []

    @seed(number)
    @settings(
        max_examples=num, database=None, deadline=None, derandomize=False, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


BOUNDS = (0, 1, -1, 2, 3, 15, 100, 1000, 10_000, HUGE, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**400)
numbers = st.sampled_from(BOUNDS) | st.floats() | st.integers()
texts = st.text(max_size=20) | st.sampled_from(["", "\ud800", "\0", "__proto__", "{{ 1 }}", "<|im_end|>"])
texts |= st.builds(operator.mul, st.sampled_from("a é"), st.sampled_from([100, 10_000, 200_000]))
scalars = st.none() | st.booleans() | numbers | texts
small = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def repeat(value: Any, num: int) -> list[Any]:
    """A list of this value that is no larger than a body should be."""
    return [value] * min(num, MAX_BYTES // (len(json.dumps(value)) + 2))


def nest(value: Any, depth: int) -> Any:
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


long_lists = st.builds(repeat, small, st.sampled_from([17, 129, 1025, 20_000, 300_000]))
long_mappings = st.builds(
    lambda value, num: {f"k{key}": value for key in range(num)}, scalars, st.sampled_from([17, 1025, 20_000])
)
deep_values = st.builds(nest, scalars, st.sampled_from([30, 63, 64, 65, 500]))

repetitions = st.builds(
    lambda least, most: f"{{{least},{most}}}", st.sampled_from(["0", "1", "5", "1000"]),
    st.sampled_from(["", "5", "1000", "10000", "10000000"]),
)  # fmt: skip
regexes = st.recursive(
    st.sampled_from(["a", "[a-z]", ".", r"\d", r"\w", "(?=a)", "^", "$", "é", r"\p{L}", "(", "[^\\s\\S]"]),
    lambda inner: st.builds("({}){}".format, inner, repetitions | st.sampled_from("*+?"))
    | st.builds("{}|{}".format, inner, inner)
    | st.builds("{}{}".format, inner, inner),
    max_leaves=6,
)  # fmt: skip
rules = st.builds("root ::= [a-z]{}".format, repetitions) | st.builds("root ::= {}".format, regexes) | texts
SCHEMA_BOUNDS = (
    "minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minimum", "maximum",
    "exclusiveMinimum", "multipleOf",
)  # fmt: skip
schema_bounds = st.dictionaries(st.sampled_from(SCHEMA_BOUNDS), numbers | texts, max_size=3)
types = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null", "any"])
plain_schemas = st.builds(lambda kind, bounds: {"type": kind, **bounds}, types, schema_bounds)
schemas = st.recursive(
    plain_schemas
    | st.builds(lambda pattern: {"type": "string", "pattern": pattern}, regexes)
    | st.builds(lambda num: {"enum": [f"v{index}" for index in range(num)]}, st.sampled_from([0, 1, 1000, 6000]))
    | st.sampled_from([{"$ref": "#"}, {"$ref": "#/none"}, {}, True, {"const": None}, {"format": "date-time"}]),
    lambda inner: st.builds(lambda item, bounds: {"type": "array", "items": item, **bounds}, inner, schema_bounds)
    | st.builds(
        lambda item, num, bounds: {"type": "object", "properties": {f"p{n}": item for n in range(num)}, **bounds},
        inner, st.sampled_from([1, 3, 300]), schema_bounds,
    )
    | st.builds(lambda items: {"anyOf": items}, st.lists(inner, max_size=3))
    | st.builds(lambda item: {"type": "object", "additionalProperties": item}, inner),
    max_leaves=4,
)  # fmt: skip
structured = (
    st.fixed_dictionaries({"json": schemas})
    | st.fixed_dictionaries({"regex": regexes})
    | st.fixed_dictionaries({"grammar": rules})
    | st.fixed_dictionaries({"choice": long_lists | st.lists(scalars, max_size=3)})
    | st.fixed_dictionaries({"structural_tag": small})
    | st.fixed_dictionaries({"json": schemas, "regex": regexes})
)
grammar_fields = st.one_of(
    structured.map(lambda value: {"structured_outputs": value}),
    schemas.map(hostile.as_response_format),
    schemas.map(hostile.as_tool),
)


hostile_values = numbers | texts | small | long_lists | long_mappings | deep_values


def hostile_bodies(call: str, fields: Sequence[str], num: int, number: int) -> list[dict[str, Any]]:
    """Plain requests with a hostile value in one field, every field in turn, or with a hostile grammar."""
    values, grammars = draw(hostile_values, num, number), draw(grammar_fields, num // 2, number)
    changes = [{name: value} for name, value in zip(itertools.cycle(sorted(fields)), values, strict=False)]
    return [{**hostile.BASES[call], **change} for change in (*changes, *grammars)]


def with_few_tokens(body: Any) -> Any:
    """A body whose answer is short, if it is accepted. A number that no context holds stays."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    names = ("max_tokens", "max_completion_tokens")
    for name in (*names, "min_tokens"):
        if isinstance(value := body.get(name), int | float) and MAX_TOKENS < value < 100_000:
            body[name] = MAX_TOKENS
    if all(body.get(name) is None for name in names):
        body["max_tokens"] = MAX_TOKENS
    return body


def make_document(config: Path) -> dict[str, Any]:
    """What GET /openapi.json of a service of this configuration says."""
    (application,) = yaml.safe_load(config.read_text(encoding="utf-8"))["applications"]
    front_end = FrontEnd(load_settings(application["args"], catalog(), os.environ))
    backend: Any = SimpleNamespace(front_end=front_end)
    return dict(make_app(backend, Entrance()).openapi())


def make_inputs(document: dict[str, Any], num: int, number: int = 0) -> list[Input]:
    """`num` different generated requests at most, a quarter of them of schemathesis."""
    sources: list[tuple[APIOperation, str, list[Case]]] = []
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = result.ok()
        for mode in GenerationMode if operation.body else [GenerationMode.POSITIVE]:
            cases = draw(operation.as_strategy(generation_mode=mode), num // 24, number)
            sources.append((operation, mode.value, cases))
        for call in (call for call, path in PATHS.items() if path == operation.path):
            fields = document["components"]["schemas"][RECORDS[call]]["properties"]
            bodies = hostile_bodies(call, fields, num // 3, number)
            sources.append((operation, "hostile", [operation.Case(body=body) for body in bodies]))
    found: dict[tuple[str, str, str], Input] = {}
    for operation, kind, cases in sources:
        for case in cases:
            content = b""
            if operation.body:
                content = case.body if isinstance(case.body, bytes) else json.dumps(with_few_tokens(case.body)).encode()
            made = {"method": operation.method, "path": case.formatted_path, "content": content.decode("latin-1")}
            name = f"{operation.label} {kind} {len(found)}"
            if len(content) <= MAX_BYTES:
                found.setdefault((*made.values(),), {"name": name, "of": operation.path, **made})
    inputs = list(found.values())
    random.Random(number).shuffle(inputs)
    return inputs[:num]


def ask_input(made: Input, document: BaseSchema) -> Ask:
    """Sends a generated request; the answer is one that the document has."""
    operation = document[made["of"]][made["method"]]
    statuses = document.raw_schema["paths"][made["of"]][made["method"].lower()]["responses"]
    content, headers = made["content"].encode("latin-1"), {"Content-Type": "application/json"}

    def ask(client: httpx.Client) -> Outcome:
        response = client.request(made["method"], made["path"], content=content, headers=headers)
        outcome = judged(response)
        if {str(response.status_code), f"{response.status_code // 100}XX"}.isdisjoint(statuses):
            return Outcome(outcome.answer, outcome.problem or "a status that the document does not have")
        if not outcome.problem:
            try:
                operation.validate_response(response)
            except (AssertionError, FailureGroup) as error:
                return Outcome(outcome.answer, f"not what the document says: {error!s:.300}")
        return outcome

    return ask


# ---- what is watched meanwhile


class Watch:
    """A canary, /health and the memory of the service's processes, from entering to leaving.

    `others`: children of this process that do not belong to the service. `canaries`, `healths`: start and end of each
    request in seconds of the monotonic clock, and what was wrong with it. `sizes`: time, and name and MiB by process.
    """

    def __init__(self, url: str, others: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.canaries: list[tuple[float, float, str]] = []
        self.healths: list[tuple[float, float, str]] = []
        self.sizes: list[tuple[float, dict[int, tuple[str, float]]]] = []
        self.text = ""
        self._others, self._ended = others, threading.Event()
        transport = httpx.HTTPTransport(
            local_address=CANARY_ADDRESS, limits=httpx.Limits(max_connections=None, keepalive_expiry=0.5)
        )
        self._client = httpx.Client(base_url=url, timeout=TIMEOUT_S, transport=transport)
        self._pool = ThreadPoolExecutor(int(TIMEOUT_S * (1 / CANARY_PERIOD_S + 1 / HEALTH_PERIOD_S)) + 3)

    def __enter__(self) -> "Watch":
        texts = {self.ask_canary() for _ in range(3)}
        if len(texts) != 1:
            raise SystemExit(f"error: the canary's answers differ before anything is sent: {texts}")
        (self.text,) = texts
        self._threads = [
            threading.Thread(target=self._every, args=(period_s, work))
            for period_s, work in (
                (CANARY_PERIOD_S, lambda: self._pool.submit(self._ask, self._check_canary, self.canaries)),
                (HEALTH_PERIOD_S, lambda: self._pool.submit(self._ask, self._check_health, self.healths)),
                (MEMORY_PERIOD_S, self._measure),
            )
        ]
        self._measure()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._pool.shutdown()
        self._client.close()

    def ask_canary(self) -> str:
        """Its text. Raises HTTPError for an answer other than 200."""
        response = self._client.post(PATHS["chat"], json=CANARY).raise_for_status()
        return str(response.json()["choices"][0]["message"]["content"])

    def _check_canary(self) -> str:
        text = self.ask_canary()
        return "" if text == self.text else f"another text: {text}"

    def _check_health(self) -> str:
        self._client.get("/health").raise_for_status()
        return ""

    def _ask(self, check: Callable[[], str], kept: list[tuple[float, float, str]]) -> None:
        start_s = time.monotonic()
        try:
            problem = check()
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            problem = f"{type(error).__name__}: {error!s:.100}"
        kept.append((start_s, time.monotonic(), problem))

    def _every(self, period_s: float, work: Callable[[], Any]) -> None:
        while not self._ended.wait(period_s):
            work()

    def _measure(self) -> None:
        found = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                name = " ".join(process.cmdline()).split(" ")[0].partition(".")[0]
                if process.pid not in self._others and name.startswith(PROCESSES):
                    found[process.pid] = name, round(process.memory_info().rss / 2**20, 1)
        self.sizes.append((time.monotonic(), found))

    def wait_until_well(self, timeout_s: float = 180.0) -> None:
        """Until a canary is right again."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
                if self._check_canary() == "":
                    return
            time.sleep(1.0)
        raise SystemExit(f"error: the service is not well after {timeout_s:.0f} s")

    def report(self, start_s: float, end_s: float) -> dict[str, Any]:
        """Of requests that were under way in this time, and of the processes that were there at its start."""
        met = {
            name: [one for one in kept if one[1] >= start_s and one[0] <= end_s]
            for name, kept in (("canary", self.canaries), ("health", self.healths))
        }
        sizes = [found for at_s, found in self.sizes if start_s - 2 * MEMORY_PERIOD_S <= at_s <= end_s] or [{}]
        growth = [
            (round(max(found[pid][1] for found in sizes if pid in found) - before, 1), name)
            for pid, (name, before) in sizes[0].items()
        ]
        most, grown = max(growth, default=(0.0, ""))
        return {
            **{name: summarize(kept) for name, kept in met.items()},
            "growth": {"mib": most, "process": grown},
            "ended": sorted(name for pid, (name, _) in sizes[0].items() if not psutil.pid_exists(pid)),
        }


def summarize(kept: Sequence[tuple[float, float, str]]) -> dict[str, Any]:
    waits = sorted(end_s - start_s for start_s, end_s, _ in kept)
    return {
        "num": len(kept),
        "median_s": round(statistics.median(waits), 3) if waits else None,
        "max_s": round(waits[-1], 3) if waits else None,
        "num_late": sum(wait_s > MAX_WAIT_S for wait_s in waits),
        "problems": dict(Counter(problem for _, _, problem in kept if problem)),
    }


# ---- sending


def send(name: str, ask: Ask, client: httpx.Client) -> dict[str, Any]:
    """Answer, problem and time of one request."""
    start_s = time.monotonic()
    try:
        outcome = ask(client)
    except (httpx.HTTPError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
        outcome = Outcome(type(error).__name__, f"{type(error).__name__}: {error!s:.100}")
    seconds = round(time.monotonic() - start_s, 3)
    return {"name": name, "answer": outcome.answer, "problem": outcome.problem, "seconds": seconds}


def send_alone(requests: dict[str, Ask], client: httpx.Client, watch: Watch, end_s: float) -> Iterator[dict[str, Any]]:
    """One after another, each with what the watch saw meanwhile."""
    for name, ask in requests.items():
        if time.monotonic() > end_s:
            return
        start_s = time.monotonic()
        row = send(name, ask, client)
        time.sleep(MEMORY_PERIOD_S)
        watch.wait_until_well()
        yield {**row, **watch.report(start_s, time.monotonic())}


def send_together(requests: Sequence[tuple[str, Ask]], client: httpx.Client, end_s: float) -> list[dict[str, Any]]:
    """From several clients at once."""
    left = iter(requests)
    lock, rows = threading.Lock(), []

    def work() -> None:
        while time.monotonic() < end_s:
            with lock:
                name, ask = next(left, ("", None))
            if ask is None:
                return
            rows.append(send(name, ask, client))

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for done in [pool.submit(work) for _ in range(NUM_CLIENTS)]:
            done.result()
    return rows


def battery(config: Path, inputs: list[Input], named: dict[str, Ask]) -> dict[str, Any]:
    """The named requests alone, then, with generated ones, all together in a random order."""
    others = {process.pid for process in psutil.Process().children(recursive=True)}
    alone: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        url, _ = stack.enter_context(running_service(fixed_targets(config, 1), 1))
        limits = httpx.Limits(max_connections=None, keepalive_expiry=0.5)
        client = stack.enter_context(httpx.Client(base_url=url, timeout=TIMEOUT_S, limits=limits))
        watch = stack.enter_context(Watch(url, others))
        started_s = time.monotonic()
        end_s = started_s + MAX_S
        for row in send_alone(named, client, watch, end_s):
            alone.append(row)
            shown = {key: row[key] for key in ("name", "answer", "problem", "growth", "ended")}
            sys.stderr.write(f"{row['seconds']:.1f} s, canary {row['canary']['max_s']} s, {json.dumps(shown)}\n")
        together_s = time.monotonic()
        mixed: list[tuple[str, Ask]] = []
        if inputs:
            document = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
            mixed += [(made["name"], ask_input(made, document)) for made in inputs]
            mixed += named.items()
            random.Random(0).shuffle(mixed)
        rows = send_together(mixed, client, end_s)
        ended_s = time.monotonic()
        if rows:
            watch.wait_until_well()
        last_s = time.monotonic()
        by_name = {made["name"]: made for made in inputs}
        problems = [{**row, "input": by_name.get(row["name"])} for row in rows if row["problem"]]
        return {
            "inputs": {
                "num_named": len(named),
                "num_generated": len(inputs),
                "num_alone": len(alone),
                "num_together": len(rows),
                "sha256_of_generated": hashlib.sha256(json.dumps(inputs).encode()).hexdigest(),
            },
            "all": {**watch.report(started_s, last_s), "seconds": round(last_s - started_s, 1)},
            "together": {
                **watch.report(together_s, last_s),
                "seconds": round(ended_s - together_s, 1),
                "statuses": dict(sorted(Counter(row["answer"][:3] for row in rows).items())),
                "slowest": sorted(rows, key=lambda row: -row["seconds"])[:15],
                "problems": problems,
            },
            "alone": alone,
        }


def problems_of(found: dict[str, Any]) -> list[str]:
    """What the battery shows to be wrong, a line each; how long canaries waited is not among it."""
    watched = found["all"]
    rows = [*found["alone"], *found["together"]["problems"]]
    lines = [f"{row['name']}: {row['problem']} ({row['answer']})" for row in rows if row["problem"]]
    lines += [f"canary: {text}, {num} times" for text, num in watched["canary"]["problems"].items()]
    lines += [f"/health: {text}, {num} times" for text, num in watched["health"]["problems"].items()]
    return [*lines, *(f"ended: {name}" for name in watched["ended"])]


def table(found: dict[str, Any]) -> str:
    """The named requests that were sent alone."""
    header = ["input", "answer", "seconds", "longest wait of a canary, s", "of /health, s", "growth, MiB", "ended"]
    rows = []
    for row in found["alone"]:
        answer = f"{row['answer']:.60}{' **' + row['problem'] + '**' if row['problem'] else ''}"
        numbers = row["seconds"], row["canary"]["max_s"], row["health"]["max_s"], row["growth"]["mib"]
        rows.append([row["name"], answer, *numbers, ", ".join(row["ended"]) or None])
    return markdown(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 where nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs" / "local.yaml")
    parser.add_argument("--inputs", type=Path, help="the generated requests; written where it is missing")
    parser.add_argument("--num", type=int, default=1000, help="generated requests")
    parser.add_argument("--names", nargs="+", help="only the named requests with one of these texts in their names")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the service is stopped then too
    inputs: list[Input] = []
    if options.inputs is not None and options.inputs.exists():
        inputs = json.loads(options.inputs.read_text(encoding="utf-8"))[: options.num]
    elif options.num:
        inputs = make_inputs(make_document(options.config), options.num)
        if options.inputs is not None:
            options.inputs.write_text(json.dumps(inputs), encoding="utf-8")
    made = {**conditions(), "load_average_at_start": os.getloadavg()}
    named = hostile_requests()
    if options.names:
        named = {name: ask for name, ask in named.items() if any(part in name for part in options.names)}
    found = battery(options.config, inputs, named)
    asked = {key: str(value) for key, value in vars(options).items()}
    made |= {"load_average_at_end": os.getloadavg(), "options": asked}
    if options.out is not None:
        options.out.write_text(json.dumps({"made": made, **found}, indent=1) + "\n", encoding="utf-8")
    lines = problems_of(found)
    if num := found["all"]["canary"]["num_late"]:
        lines.append(f"canary: {num} waited more than {MAX_WAIT_S:g} s")
    shown = {key: value for key, value in found["together"].items() if key not in ("problems", "slowest")}
    sys.stdout.write(f"{table(found)}\n{json.dumps(found['all'])}\n{json.dumps(shown)}\n" + "\n".join([*lines, ""]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
