"""One recipe trained many times, each time with something else changed, and the table of what came out.

    python -m benchmarks.ablation run   configs/train/ablation.yaml [--gpus 2,3] [--only NAME ...] [--set K=V ...]
    python -m benchmarks.ablation table configs/train/ablation.yaml --out results/ablation.json

`run` trains one run after another on each GPU, each in a process of its own (`peagle train`), into
`output/NAME`. A finished run is skipped, one that was cut short goes on from its checkpoint, one that failed is
recorded in `output/NAME/run.json` and does not stop the rest. `table` collects what is there, finished or not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from benchmarks.common import markdown
from peagle.provenance import conditions
from peagle.train.data import Conversations, write_manifest
from peagle.train.recipe import Recipe

GROUPS = ("all", "humaneval", "non-looping", "looping")
POLL_S = 1.0
NUM_LOG_LINES = 15
TABLE_DEPTHS = (3, 5, 7)


class Run(BaseModel):
    """What one run changes."""

    model_config = ConfigDict(extra="forbid")

    overrides: list[str] = Field(default_factory=list, description="section.key=value, as for peagle.train.trainer")
    data_share: float = Field(1.0, gt=0, le=1, description="share of the training conversations, the same first ones")


class Plan(BaseModel):
    """The list of runs. A run is a list of overrides, or a mapping of `Run`."""

    model_config = ConfigDict(extra="forbid")

    base: str = Field(description="recipe that every run starts from")
    output: str = Field(description="folder of the runs, one below it for each")
    common: list[str] = Field(default_factory=list, description="overrides of every run")
    runs: dict[str, Run]

    @field_validator("runs", mode="before")
    @classmethod
    def _short_form(cls, runs: Any) -> Any:
        if not isinstance(runs, dict):
            return runs
        return {str(name): {"overrides": run} if isinstance(run, list) else run for name, run in runs.items()}

    @field_validator("runs")
    @classmethod
    def _folder_names(cls, runs: dict[str, Run]) -> dict[str, Run]:
        if wrong := [name for name in runs if Path(name).name != name or name.startswith((".", "data-"))]:
            raise ValueError(f"names become folders; these cannot: {wrong}")
        return runs

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Raises ValueError naming the file and every wrong key."""
        try:
            return cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except ValidationError as error:
            lines = [f"  {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
            raise ValueError(f"{path}: {len(lines)} wrong settings\n" + "\n".join(lines)) from error

    def folder(self, name: str) -> Path:
        return Path(self.output) / name

    def overrides(self, name: str) -> list[str]:
        """All overrides of a run, those that the plan's layout adds included; later ones win."""
        run = self.runs[name]
        found = [*self.common, *run.overrides, f"output={self.folder(name)}"]
        return found if run.data_share == 1 else [*found, f"data={self.data_folder(run.data_share)}"]

    def data_folder(self, share: float) -> Path:
        return Path(self.output) / f"data-{share:g}"


def settings(recipe: Recipe) -> dict[str, Any]:
    """What makes two runs the same."""
    stored: dict[str, Any] = json.loads(recipe.model_dump_json(exclude={"generate", "output", "log_every_steps"}))
    return stored


def finished(plan: Plan, name: str) -> dict[str, Any] | None:
    """Provenance of a run's head; None when it is not there yet.

    Raises ValueError when the head was made with other settings.
    """
    path = plan.folder(name) / "head" / "provenance.json"
    if not path.exists():
        return None
    provenance: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    stored = {key: value for key, value in provenance["recipe"].items() if key != "generate"}
    made = settings(Recipe.model_validate(stored))
    wanted = settings(Recipe.load(plan.base, plan.overrides(name)))
    if changed := [key for key in wanted if made[key] != wanted[key]]:
        raise ValueError(
            f"{path}: made with other settings of {', '.join(changed)}: remove the folder or rename the run"
        )
    return provenance


def write_share(plan: Plan, name: str) -> None:
    """The data folder of a run on a share of the conversations: a random subset, a small share inside a greater one."""
    share = plan.runs[name].data_share
    folder = plan.data_folder(share)
    if share == 1 or (folder / "manifest.json").exists():
        return
    source = Recipe.load(plan.base, [*plan.common, *plan.runs[name].overrides]).data
    data = Conversations.load(source)
    chosen = np.random.default_rng(0).permutation(len(data))[: max(1, round(len(data) * share))]
    part = data.select(sorted(chosen.tolist()))
    part.save_part(folder, "00")
    counts = {"num_conversations": len(part), "num_answer_tokens": part.num_answer_tokens}
    write_manifest(folder, {"source": source, "share": share, **counts, "made": conditions()})


def environment(gpu: str | None) -> dict[str, str]:
    """Environment of a run that sees one GPU; None: what this process sees."""
    return dict(os.environ) if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}


def start(plan: Plan, name: str, gpu: str | None) -> subprocess.Popen[bytes]:
    """Starts the training of one run; what it prints goes to `train.log` in its folder."""
    folder = plan.folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    write_share(plan, name)
    command = [sys.executable, "-m", "deployments.cli", "train", plan.base, *plan.overrides(name)]
    with (folder / "train.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment(gpu))


def record(plan: Plan, name: str, gpu: str | None, returncode: int, seconds: float) -> str:
    """Writes `run.json`; returns the run's status."""
    folder = plan.folder(name)
    status = "failed" if returncode else "finished"
    lines = (folder / "train.log").read_text(encoding="utf-8", errors="replace").splitlines()
    document: dict[str, Any] = {"status": status, "gpu": gpu, "returncode": returncode, "seconds": round(seconds, 1)}
    if returncode:
        document["log"] = [line.split("\r")[-1] for line in lines[-NUM_LOG_LINES:]]
    (folder / "run.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return status


def run_all(plan: Plan, names: list[str], gpus: list[str | None], max_minutes: float | None = None) -> dict[str, str]:
    """Trains the named runs, one at a time for each entry of `gpus`. Returns the status of each.

    max_minutes: no run is started after so many minutes; those left are "waiting". An entry of `gpus` may repeat: runs
    then share that GPU, and their speed is not that of a GPU of their own.
    """
    waiting = [name for name in names if finished(plan, name) is None]
    status = {name: "waiting" if name in waiting else "finished" for name in names}
    began = time.monotonic()
    free = list(gpus)
    running: dict[str, tuple[subprocess.Popen[bytes], str | None, float]] = {}
    try:
        while waiting or running:
            over = max_minutes is not None and time.monotonic() - began > 60 * max_minutes
            while waiting and free and not over:
                name, gpu = waiting.pop(0), free.pop(0)
                print(f"{name}: starts" + (f" on GPU {gpu}" if gpu is not None else ""), flush=True)
                running[name] = (start(plan, name, gpu), gpu, time.monotonic())
            if not running:
                break
            for name, (process, gpu, started) in list(running.items()):
                if (returncode := process.poll()) is not None:
                    status[name] = record(plan, name, gpu, returncode, time.monotonic() - started)
                    print(f"{name}: {status[name]} after {time.monotonic() - started:.0f} s", flush=True)
                    free.append(gpu)
                    del running[name]
            time.sleep(POLL_S if running else 0)
    finally:
        for process, _, _ in running.values():
            process.terminate()
    return status


def last_record(folder: Path) -> dict[str, Any]:
    """The last figures of training in `log.jsonl`; empty when there are none."""
    path = folder / "log.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    return next((one for one in reversed(records) if "loss" in one), {})


def collect(plan: Plan) -> dict[str, Any]:
    """Every run's figures. tokens_per_s counts the places of packed sequences, padding included."""
    runs: dict[str, Any] = {}
    for name, run in plan.runs.items():
        folder = plan.folder(name)
        entry: dict[str, Any] = {"overrides": run.overrides, "data_share": run.data_share, "status": "waiting"}
        if (folder / "run.json").exists():
            entry |= json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if provenance := finished(plan, name):
            training, batch = provenance["training"], provenance["recipe"]["batch"]
            seconds = 60 * training["minutes"]
            num_tokens = batch["num_sequences"] * batch["max_tokens"] * batch.get("num_accumulated", 1)
            groups = provenance["acceptance_offline"]
            last = last_record(folder)
            entry |= {
                "status": "finished",
                "num_steps": training["num_steps"],
                "minutes": training["minutes"],
                "num_answer_tokens": training["num_answer_tokens"],
                "tokens_per_s": training["num_steps"] * num_tokens / seconds if seconds else None,
                "groups": {group: groups[group] for group in GROUPS if group in groups},
                "last_logged": {key: last.get(key) for key in ("step", "loss", "loss_by_depth", "accuracy")},
                "made": provenance["made"],
            }
        runs[name] = entry
    return {"made": conditions(), "base": plan.base, "common": plan.common, "runs": runs}


def acceptance_cells(groups: dict[str, Any], group: str, depths: Sequence[int] = TABLE_DEPTHS) -> list[float | None]:
    """AL of one group at each K; None where the head drafts fewer tokens or the group is absent."""
    lengths = groups.get(group, {}).get("acceptance_length", {})
    return [lengths.get(str(k)) for k in depths]


def ablation_table(document: dict[str, Any]) -> str:
    """A row a run: AL by group, steps and speed; a run that failed says so. Runs that never began stand below."""
    groups = ("all", "humaneval", "non-looping", "looping")
    header = ["run", "overrides", *(f"{group} K={k}" for group in groups for k in TABLE_DEPTHS)]
    header += ["steps", "minutes", "tokens/s"]
    rows = []
    for name, run in document["runs"].items():
        what = "`" + " ".join(run["overrides"]) + "`" if run["overrides"] else ""
        if run["status"] == "waiting":
            continue
        if run["status"] != "finished":
            rows.append([name, f"{what} {run['status']}", *[None] * (len(header) - 2)])
            continue
        lengths = [cell for group in groups for cell in acceptance_cells(run["groups"], group)]
        rows.append([name, what, *lengths, run["num_steps"], run["minutes"], round(run["tokens_per_s"] or 0) or None])
    waiting = [name for name, run in document["runs"].items() if run["status"] == "waiting"]
    return markdown(header, rows) + (f"\n\nNot run: {', '.join(waiting)}." if waiting else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train what is not finished")
    run.add_argument("--gpus", help="indices, comma-separated: one run at a time on each (default: what is visible)")
    run.add_argument("--only", nargs="+", metavar="NAME", help="these runs, in this order")
    run.add_argument("--max-minutes", type=float, help="start no run after so many minutes")
    table = commands.add_parser("table", help="collect the figures")
    table.add_argument("--out", type=Path, help="result file (JSON); the table beside it as .md")
    for command in (run, table):
        command.add_argument("plan", type=Path)
        command.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further overrides of every run")
    args = parser.parse_args()
    plan = Plan.load(args.plan)
    plan.common += args.set
    for name in plan.runs:
        Recipe.load(plan.base, plan.overrides(name))  # a wrong override is found before hours of training
    if args.command == "run":
        names = args.only or list(plan.runs)
        if unknown := [name for name in names if name not in plan.runs]:
            raise ValueError(f"--only: {args.plan} has no runs {unknown}; it has {list(plan.runs)}")
        status = run_all(plan, names, args.gpus.split(",") if args.gpus else [None], args.max_minutes)
        print(json.dumps(status))
        return
    document = collect(plan)
    print(ablation_table(document))
    if args.out:
        args.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        args.out.with_suffix(".md").write_text(ablation_table(document) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
