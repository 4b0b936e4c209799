"""Measures an engine's step times, for the choice of K: median seconds of a decoding step by batch, K and context.

    python -m peagle.vllm.calibrate configs/local-colocated.yaml --out configs/step_times/NAME.json
    python -m peagle.vllm.calibrate --target DIR --head DIR --engine load_format=dummy max_num_seqs=128 --out FILE.json

Takes target, head and engine settings from a service's YAML (its `model`, `drafter`, `engine` and `target.env`; flags
win), starts that engine, and times batches of equal K, a few of unequal K, and some at longer contexts. What a step's
time is: the interval between its result and the one before in the engine's own process, drafting, verification and
scheduling included, with asynchronous scheduling as without (`peagle.vllm.trimming`). Steps before are thrown away as
warm-up, and the whole grid is gone through `--rounds` times in random order; the least of the rounds' medians counts,
so that a slow minute of the machine does not. Acceptance hardly matters to it, a step verifies K drafts whether they
are right or not; `--synthetic-acceptance` fixes it (on a GPU). `--engine load_format=dummy` needs only config.json.

Writes a table for `cluster.step_time.StepTimes` with its conditions, and says how well it predicts points left out.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import yaml
from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine

from benchmarks.timed_scheduler import CONDITIONS_HEADER
from cluster.step_time import StepPoint, StepShape, StepTimes
from peagle.embedded import embedded_targets, prepare_target
from peagle.heads import prepare_head
from peagle.provenance import conditions as provenance
from peagle.vllm.acceptance import DEPTH_KEY
from peagle.vllm.engine import capture_sizes, cpu_environment, engine_kwargs, graph_padding_tokens
from peagle.vllm.trimming import STEP_TIME_HEADER, TimedStep

# ====================================================================================================
# Times of decoding steps of fixed batches, on a running engine.
#
# Enters: batches to time (`Cell`). Leaves: points of a table of step times. The engine runs as it serves, in a process of
# its own with its own loop; only its scheduler is the timed one, and reports the interval between two results with the
# shape of each step (`peagle.vllm.trimming`). This side reads those reports and nothing else, so its own speed does
# not enter. Only steps count that have exactly the cell's shape and follow another such step.

TIMED_SYNC_SCHEDULER = "benchmarks.timed_scheduler.TimedScheduler"
TIMED_ASYNC_SCHEDULER = "benchmarks.timed_scheduler.TimedAsyncScheduler"
MIN_STEPS = 5
"""Fewer timed steps of a shape are no measurement."""
PATIENCE = 10
"""Steps that a batch may take in all, for each that it is to be timed; prompts come on top."""


Mixed = Literal["none", "few", "many"]
"""Which batches of unequal depths to time."""


@dataclass(frozen=True)
class Cell:
    """A batch to time: the K of each request, and how long their prompts are."""

    depths: tuple[int, ...]
    context_tokens: int

    def __str__(self) -> str:
        k = "/".join(str(depth) for depth in sorted(set(self.depths)))
        return f"{len(self.depths)} requests at K = {k}, context {self.context_tokens}"

    def matches(self, step: TimedStep) -> bool:
        uniform = self.depths[0] if min(self.depths) == max(self.depths) else None
        num_tokens = len(self.depths) + sum(self.depths)
        return (step.num_requests, step.num_tokens, step.uniform_depth) == (len(self.depths), num_tokens, uniform)


def grid(
    batch_sizes: Iterable[int], depths: Sequence[int], contexts: Sequence[int], mixed: Mixed = "few"
) -> list[Cell]:
    """Every batch size at every depth at the first context, and batches of unequal depths.

    `few` of these are two a size: one request at a draft less than the others, which have the deepest K (the ragged
    batch with the most tokens), and halves at the deepest and none. With full graphs for several depths the first is
    padded onto one, and all that is known of ragged batches is the second: `many` adds halves at neighbouring depths.
    At each further context: smallest, middle and largest batch, each at no drafts and at the deepest K.
    """
    sizes, levels = sorted(set(batch_sizes)), sorted(set(depths))
    deepest = levels[-1]
    cells = [Cell((depth,) * size, contexts[0]) for size in sizes for depth in levels]
    pairs = [] if mixed == "none" or deepest == 0 else [(0, deepest)]
    pairs += pairwise(levels) if mixed == "many" else []
    for size in (size for size in sizes if size > 1):
        cells += [Cell((high,) * (size - size // 2) + (low,) * (size // 2), contexts[0]) for low, high in pairs]
        cells += [Cell((deepest,) * (size - 1) + (deepest - 1,), contexts[0])] if pairs else []
    for context in contexts[1:]:
        for size in sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]}):
            cells += [Cell((depth,) * size, context) for depth in sorted({min(depths), deepest})]
    return list(dict.fromkeys(cells))


class StepBench:
    """One engine, started with `engine_kwargs`' settings."""

    def __init__(self, kwargs: dict[str, Any], seed: int = 0) -> None:
        scheduler = TIMED_ASYNC_SCHEDULER if kwargs["async_scheduling"] else TIMED_SYNC_SCHEDULER
        settings = {"skip_tokenizer_init": True, **kwargs, "scheduler_cls": scheduler}
        config = EngineArgs(**settings).create_engine_config(UsageContext.OPENAI_API_SERVER)
        self._raw_capture_sizes = tuple(config.compilation_config.cudagraph_capture_sizes or ())
        self._config = config
        self.max_num_seqs: int = config.scheduler_config.max_num_seqs
        self.max_model_len: int = config.model_config.max_model_len
        self.max_draft_tokens: int = config.num_speculative_tokens
        self._engine = LLMEngine.from_vllm_config(config, UsageContext.OPENAI_API_SERVER, disable_log_stats=True)
        cache = self._engine.vllm_config.cache_config
        self._max_cached_tokens = (cache.num_gpu_blocks or 0) * (cache.block_size or 0)
        self._vocab_size: int = config.model_config.get_vocab_size()
        self._seed = seed
        self._num_cells = 0
        self.conditions: dict[str, Any] = {}
        """Of the engine, by its own word (`engine_conditions`); there once a cell was measured."""

    def why_not(self, cell: Cell, num_steps: int) -> str | None:
        """What keeps `cell` from being timed on this engine; None if nothing does."""
        size = len(cell.depths)
        if size > self.max_num_seqs:
            return f"the engine takes {self.max_num_seqs} requests at once (max_num_seqs)"
        grown = cell.context_tokens + num_steps * (1 + max(cell.depths))
        if grown > self.max_model_len:
            return f"a request may grow to {grown} tokens, the engine's limit is {self.max_model_len} (max_model_len)"
        if self._max_cached_tokens and size * grown > self._max_cached_tokens:
            return f"it may need {size * grown} tokens of KV cache, the engine has {self._max_cached_tokens}"
        return None

    def measure(self, cell: Cell, num_steps: int, num_warmup: int) -> list[TimedStep]:
        """`num_steps` timed steps of `cell`, after `num_warmup` that are thrown away.

        Fewer where requests ended first, or kept waiting for each other (a KV cache too small for all of them).
        Prompts are random tokens, the same for every cell, so that the engine's prefix cache has them.
        """
        self._num_cells += 1
        prefix = f"cell{self._num_cells}-"
        ids = [self._add(f"{prefix}{index}", index, depth, cell) for index, depth in enumerate(cell.depths)]
        found: list[TimedStep] = []
        num_running, was_ours = len(ids), False
        patience = PATIENCE * (num_steps + num_warmup) + len(ids) * (1 + cell.context_tokens // 128)
        while num_running and patience and len(found) < num_steps + num_warmup:
            patience -= 1
            for output in self._engine.engine_core.get_output().outputs:
                headers = output.trace_headers or {}
                if CONDITIONS_HEADER in headers:
                    self.conditions = json.loads(headers[CONDITIONS_HEADER])
                if not output.request_id.startswith(prefix):
                    continue  # of an earlier cell, under way when that was ended
                num_running -= output.finish_reason is not None
                if STEP_TIME_HEADER in headers:
                    step = TimedStep.decode(headers[STEP_TIME_HEADER])
                    is_ours = cell.matches(step)
                    if is_ours and was_ours:
                        found.append(step)
                    was_ours = is_ours
        self._engine.abort_request(ids)
        return found[num_warmup : num_warmup + num_steps]

    def _add(self, request_id: str, index: int, depth: int, cell: Cell) -> str:
        tokens = random.Random(self._seed + index).choices(range(self._vocab_size), k=cell.context_tokens)
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=self.max_model_len - cell.context_tokens,
            extra_args={DEPTH_KEY: depth},
        )
        self._engine.add_request(request_id, TokensPrompt(prompt_token_ids=tokens), params)
        return request_id

    def table(self, points: Sequence[StepPoint], conditions: Mapping[str, Any]) -> StepTimes:
        """`points` of this engine, with its conditions and `conditions`. Call it after a measurement."""
        depths = self.conditions["full_graph_depths"]
        return StepTimes(
            points,
            max_draft_tokens=self.max_draft_tokens,
            full_graph_depths=depths,
            capture_sizes=capture_sizes(self._config, self._raw_capture_sizes, self.conditions["cudagraph_mode"]),
            padding_tokens=graph_padding_tokens(self._config) if depths else 0,
            conditions={**self.conditions, **conditions},
        )

    def close(self) -> None:
        """Stop the engine's process."""
        self._engine.engine_core.shutdown()


def to_point(cell: Cell, rounds: Sequence[Sequence[TimedStep]]) -> StepPoint:
    """The least of the rounds' medians, and the 95th percentile of all steps.

    What else runs on a machine makes steps longer and never shorter, and two rounds taken together, one of them slow,
    may have a median in the middle that no step has (on an H200 one batch came to 37 ms with a 95th percentile of 47,
    between neighbours of 27 and 31).

    Raises:
        ValueError: fewer steps than `MIN_STEPS`.
    """
    everything = [step for steps in rounds for step in steps]
    if len(everything) < MIN_STEPS:
        raise ValueError(
            f"{cell}: {len(everything)} timed steps, at least {MIN_STEPS} are needed; requests ended or waited before"
        )
    whole = [steps for steps in rounds if len(steps) >= MIN_STEPS] or [everything]
    median_s, best = min(((_median_s(steps), steps) for steps in whole), key=lambda one: one[0])
    context = float(np.mean([step.context_tokens for step in best]))
    shape = StepShape(best[0].num_requests, best[0].num_tokens, best[0].uniform_depth, context)
    p95_s = float(np.percentile([step.seconds for step in everything], 95))
    return StepPoint(shape, median_s, max(p95_s, median_s), len(everything))


def _median_s(steps: Sequence[TimedStep]) -> float:
    return float(np.median([step.seconds for step in steps]))


# ====================================================================================================
# Measures an engine's step times, for the choice of K: median seconds of a decoding step by batch, K and context.
#
#     python -m peagle.vllm.calibrate configs/local-colocated.yaml --out configs/step_times/NAME.json
#     python -m peagle.vllm.calibrate --target DIR --head DIR --engine load_format=dummy max_num_seqs=128 --out FILE.json
#
# Takes target, head and engine settings from a service's YAML (its `model`, `drafter`, `engine` and `target.env`; flags
# win), starts that engine, and times batches of equal K, a few of unequal K, and some at longer contexts. What a step's
# time is: the interval between its result and the one before in the engine's own process, drafting, verification and
# scheduling included, with asynchronous scheduling as without (`peagle.vllm.trimming`). Steps before are thrown away as
# warm-up, and the whole grid is gone through `--rounds` times in random order; the least of the rounds' medians counts,
# so that a slow minute of the machine does not. Acceptance hardly matters to it, a step verifies K drafts whether they
# are right or not; `--synthetic-acceptance` fixes it (on a GPU). `--engine load_format=dummy` needs only config.json.
#
# Writes a table for `cluster.step_time.StepTimes` with its conditions, and says how well it predicts points left out.

if TYPE_CHECKING:
    from peagle.vllm.trimming import TimedStep

DEPTHS = (0, 1, 2, 3, 5)
"""Timed by default, and K_max."""
CONTEXTS = (128, 1024, 8192)
MAX_DEFAULT_BATCH = 256
NO_HEAD = "none"


@dataclass(frozen=True)
class Source:
    """Which engine to time. `head` None: one without speculation."""

    target: str
    head: str | None
    max_draft_tokens: int | None = None
    full_graph_depths: tuple[int, ...] | None = None
    speculative: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


def read_config(path: Path) -> dict[str, Any]:
    """The engine of a service's YAML, as fields of `Source`.

    Raises:
        ValueError: names the file and the key that is missing or of the wrong kind.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"config {path}: cannot be read as YAML: {error}") from error
    applications = raw.get("applications") if isinstance(raw, dict) else None
    args = applications[0].get("args") if isinstance(applications, list) and applications else None
    if not isinstance(args, dict):
        raise ValueError(f"config {path}: there is no applications[0].args")
    sections = {name: args.get(name) or {} for name in ("model", "drafter", "engine", "target")}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise ValueError(f"config {path}: {name} must be a mapping, not {section!r:.80}")
    drafter = sections["drafter"]
    for name, section, key in (("model", sections["model"], "source"), ("drafter", drafter, "head")):
        if (name == "model" or drafter) and not isinstance(section.get(key), str):
            raise ValueError(f"config {path}: {name}.{key} is missing")
    if drafter.get("placement") == "remote":
        raise ValueError(
            f"config {path}: drafter.placement is remote, but steps are timed with the drafter in the engine: give a "
            "config with placement: colocated"
        )
    depths = sections["target"].get("full_graph_depths")
    return {
        "target": sections["model"]["source"],
        "head": drafter.get("head"),
        "max_draft_tokens": drafter.get("max_draft_tokens"),
        "full_graph_depths": None if depths is None else tuple(depths),
        "speculative": dict(drafter.get("engine_options") or {}),
        "engine": dict(sections["engine"]),
        "env": dict(sections["target"].get("env") or {}),
    }


def source_of(args: argparse.Namespace) -> Source:
    """From the YAML, if there is one, and the flags.

    Raises:
        ValueError: names the flag or key.
    """
    found: dict[str, Any] = read_config(args.config) if args.config else {"target": None, "head": None}
    flags = {"target": args.target, "head": args.head, "max_draft_tokens": args.max_draft_tokens}
    flags["full_graph_depths"] = None if args.full_graph_depths is None else tuple(args.full_graph_depths)
    found |= {name: value for name, value in flags.items() if value is not None}
    if found["target"] is None or (found["head"] is None and not args.config):
        raise ValueError(f"give a config, or --target and --head (--head {NO_HEAD}: an engine without speculation)")
    engine = dict(found.get("engine", {}))
    for text in args.engine:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--engine {text!r}: write KEY=VALUE")
        engine[key] = yaml.safe_load(value)
    speculative = dict(found.get("speculative", {}))
    if args.synthetic_acceptance:
        speculative["rejection_sample_method"] = "synthetic"
        speculative["synthetic_acceptance_rates"] = args.synthetic_acceptance
    source = Source(**{**found, "engine": engine, "speculative": speculative})
    if source.head == NO_HEAD:
        source = replace(source, head=None, max_draft_tokens=None, full_graph_depths=None, speculative={})
    return source


def directories(source: Source) -> tuple[str, Path | None]:
    """Directories of target and head, prepared or downloaded; with dummy weights a head's directory as it is."""
    target = str(prepare_target(source.target)) if source.target in embedded_targets() else source.target
    if source.head is None:
        return target, None
    if source.engine.get("load_format") == "dummy" and (Path(source.head) / "config.json").is_file():
        return target, Path(source.head)
    return target, prepare_head(_local(source.head), Path(_local(target)))


def _local(source: str) -> str:
    """The directory of a Hugging Face id, downloaded when need be; anything else as it is."""
    if Path(source).is_dir() or "/" not in source:
        return source
    from huggingface_hub import snapshot_download

    return str(snapshot_download(source))


def start(source: Source, on_cpu: bool) -> "StepBench":
    """The engine, as a service with these settings would start it.

    Raises:
        ValueError: synthetic acceptance on a CPU, which vLLM has not, or what `engine_kwargs` and vLLM refuse.
    """
    if on_cpu and "rejection_sample_method" in source.speculative:
        raise ValueError("--synthetic-acceptance: vLLM has it on GPUs only; on a CPU leave it out")
    target, head_dir = directories(source)
    extra = dict(source.engine)
    graphs: dict[str, Any] = {}
    if source.full_graph_depths is not None:
        graphs["full_graph_depths"] = list(source.full_graph_depths)
    kwargs = engine_kwargs(
        target,
        head_dir,
        max_draft_tokens=source.max_draft_tokens,
        dtype=extra.pop("dtype", "auto"),
        async_scheduling=not on_cpu,
        on_cpu=on_cpu,
        extra=extra,
        **graphs,
    )
    if head_dir is not None:
        kwargs["speculative_config"] |= source.speculative

    return StepBench(kwargs)


def time_cells(
    bench: "StepBench", cells: Sequence["Cell"], args: argparse.Namespace
) -> "dict[Cell, list[list[TimedStep]]]":
    """Steps of every cell that fits the engine, by round; says on stderr what does not fit."""
    for cell in cells:
        if reason := bench.why_not(cell, args.steps + args.warmup):
            _say(f"left out: {cell}: {reason}")
    fitting = [cell for cell in cells if bench.why_not(cell, args.steps + args.warmup) is None]
    steps: dict[Cell, list[list[TimedStep]]] = {cell: [] for cell in fitting}
    chance = random.Random(args.seed)
    for turn in range(args.rounds):
        for number, cell in enumerate(chance.sample(fitting, len(fitting)), 1):
            # Shapes of the first round may still compile: its warm-up is longer.
            steps[cell].append(bench.measure(cell, args.steps, args.warmup * (2 if turn == 0 else 1)))
            if number % 20 == 0 or number == len(fitting):
                _say(f"round {turn + 1} of {args.rounds}: {number} of {len(fitting)} batches timed")
    return steps


def calibrate(source: Source, args: argparse.Namespace) -> StepTimes:
    """Start the engine of `source`, time it, stop it. Raises ValueError where nothing could be timed."""
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    bench = start(source, on_cpu)
    try:
        deepest = bench.max_draft_tokens
        depths = sorted({*(args.depths or DEPTHS), *(source.full_graph_depths or ()), deepest})
        if args.depths and max(args.depths) > deepest:
            raise ValueError(f"--depths: {max(args.depths)} is more than the engine's K_max, {deepest}")
        sizes = args.batch_sizes or [2**power for power in range(9) if 2**power <= bench.max_num_seqs]
        contexts = args.contexts or [one for one in CONTEXTS if one <= bench.max_model_len // 2]
        cells = grid(sizes, [depth for depth in depths if depth <= deepest], contexts, args.mixed)
        steps = time_cells(bench, cells, args)
        named = {"model_name": Path(source.target).name, "head_name": source.head and Path(source.head).name}
        measured = {"steps": args.steps, "warmup": args.warmup, "rounds": args.rounds}
        settings = {"engine": source.engine, "speculative": source.speculative, "measured": measured}
        points = []
        for cell, of in steps.items():
            try:
                points.append(to_point(cell, of))
            except ValueError as error:
                _say(f"left out: {error}")
        return bench.table(points, {**named, **settings, "made": provenance()})
    finally:
        bench.close()


def report(times: StepTimes) -> str:
    """The table in milliseconds, and how far the fit is off at points left out of it."""
    lines = ["requests  tokens  K   context  median ms   p95 ms  fitted ms  left out"]
    errors = {id(held.point): held for held in times.held_out()}
    for point in times.points:
        shape, held = point.shape, errors.get(id(point))
        depth = "mix" if shape.uniform_depth is None else str(shape.uniform_depth)
        off = "-" if held is None else f"{100 * (held.predicted_s / point.median_s - 1):+.1f} %"
        lines.append(
            f"{shape.num_requests:8.0f}{shape.num_tokens:8.0f}  {depth:3s}{shape.context_tokens:8.0f}"
            f"{1e3 * point.median_s:11.2f}{1e3 * point.p95_s:9.2f}{1e3 * times.seconds(shape):11.2f}  {off}"
        )
    for name, of in (("inside", True), ("at the edge", False)):
        found = sorted(held.error for held in errors.values() if held.is_inside is of)
        if found:
            middle, worst = found[len(found) // 2], found[-1]
            lines.append(
                f"left out, {name}: {len(found)} points, median {100 * middle:.1f} %, worst {100 * worst:.1f} %"
            )
    return "\n".join(lines) + "\n"


def _say(text: str) -> None:
    sys.stderr.write(f"calibrate: {text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", help="a service's YAML, such as configs/local-colocated.yaml")
    parser.add_argument("--target", help="an embedded target's name, a directory or a Hugging Face id")
    parser.add_argument("--head", help=f"a shipped head's name, a directory or a Hugging Face id; {NO_HEAD}: no drafts")
    parser.add_argument("--max-draft-tokens", type=int, metavar="K_MAX")
    parser.add_argument("--full-graph-depths", type=int, nargs="+", metavar="K", help="full CUDA graphs for these K")
    parser.add_argument("--engine", nargs="+", default=[], metavar="KEY=VALUE", help="vLLM engine arguments")
    parser.add_argument("--synthetic-acceptance", type=float, nargs="+", metavar="S_I", help="survival of each depth")
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", help="default: powers of two to the engine's max_num_seqs"
    )
    parser.add_argument("--depths", type=int, nargs="+", metavar="K", help=f"default: {DEPTHS} and K_max")
    parser.add_argument("--contexts", type=int, nargs="+", help=f"default: of {CONTEXTS} what fits; the first for all")
    parser.add_argument(
        "--mixed", choices=("none", "few", "many"), default="few", help="batches of unequal K; many: with graph tiers"
    )
    parser.add_argument("--steps", type=int, default=60, help="timed steps of a batch and round")
    parser.add_argument("--warmup", type=int, default=8, help="steps thrown away before them")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    source = source_of(args)
    os.environ.update(source.env)
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        os.environ.update(cpu_environment())

    if args.steps * args.rounds < MIN_STEPS:
        parser.error(f"--steps {args.steps} in --rounds {args.rounds}: a batch needs {MIN_STEPS} timed steps or more")
    times = calibrate(source, args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    times.save(args.out)
    sys.stdout.write(report(times) + json.dumps(times.conditions["made"]["versions"]) + f"\n{args.out} written\n")


if __name__ == "__main__":
    main()
