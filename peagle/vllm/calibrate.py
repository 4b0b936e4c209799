"""Measures an engine's step times, for the choice of K: median seconds of a decoding step by batch, K and context.

    python -m peagle.vllm.calibrate configs/local-colocated.yaml --out configs/step_times/NAME.json
    python -m peagle.vllm.calibrate --target DIR --head DIR --engine load_format=dummy max_num_seqs=128 --out FILE.json

Takes target, head and engine settings from a service's YAML (its `model`, `drafter`, `engine` and `target.env`; flags
win), starts that engine, and times batches of equal K, a few of unequal K, and some at longer contexts. What a step's
time is: the interval between its result and the one before in the engine's own process, drafting, verification and
scheduling included, with asynchronous scheduling as without (`peagle.vllm.step_clock`). Steps before are thrown away as
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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from cluster.step_time import StepTimes
from peagle.embedded import embedded_targets, prepare_target
from peagle.heads import prepare_head
from peagle.provenance import conditions as provenance
from peagle.vllm.cpu_environment import cpu_environment
from peagle.vllm.engine import engine_kwargs

if TYPE_CHECKING:
    from peagle.vllm.step_bench import Cell, StepBench
    from peagle.vllm.step_clock import TimedStep

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
    from peagle.vllm.step_bench import StepBench

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
        from peagle.vllm.step_bench import grid, to_point

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
    from peagle.vllm.step_bench import MIN_STEPS

    if args.steps * args.rounds < MIN_STEPS:
        parser.error(f"--steps {args.steps} in --rounds {args.rounds}: a batch needs {MIN_STEPS} timed steps or more")
    times = calibrate(source, args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    times.save(args.out)
    sys.stdout.write(report(times) + json.dumps(times.conditions["made"]["versions"]) + f"\n{args.out} written\n")


if __name__ == "__main__":
    main()
