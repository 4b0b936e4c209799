"""What the scripts of benchmarks/coder start on hosts of one GPU and of several; stand-ins write down how."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HEADS = "peagle eagle3 p12:peagle,drafter.num_depths=12,schedule.max_minutes=5"
PYTHON = """#!/bin/bash
case "$*" in
-c*capture_sizes*) echo 1,2,4 ;;
-c*) exit 1 ;;  # no further packages
*) echo "$CUDA_VISIBLE_DEVICES $*" >> "$WORK/calls" ;;
esac
"""


def run(script: str, work: Path, num_gpus: int, **env: str) -> list[list[str]]:
    """Words of each command that it started, in alphabetical order; first the GPU, or nothing."""
    programs = work / "programs"
    programs.mkdir(exist_ok=True)
    gpus = "".join(f"GPU {index}: NVIDIA H100 (UUID)\\n" for index in range(num_gpus))
    for name, text in (("python3", PYTHON), ("nvidia-smi", f"#!/bin/bash\nprintf '{gpus}'\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    for name in ("humaneval", "questions"):
        (work / f"{name}.jsonl").touch()
    (work / "target").mkdir(exist_ok=True)
    (work / "target/config.json").touch()
    (work / "calls").unlink(missing_ok=True)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "WORK": str(work), "PROMPTS": str(work)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    subprocess.run(
        ["bash", str(ROOT / f"benchmarks/coder/{script}.sh")],
        cwd=ROOT, env={**environment, **env}, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return sorted(line.split(" ") for line in (work / "calls").read_text().splitlines())


@pytest.mark.parametrize(("num_gpus", "workers", "on"), [(1, 4, "000"), (2, 4, "010"), (4, 8, "012")])
def test_heads_are_trained_a_gpu_each(tmp_path: Path, num_gpus: int, workers: int, on: str) -> None:
    calls = run("train", tmp_path, num_gpus, HEADS=HEADS, MINUTES="10")
    made, answered = sorted((call for call in calls if "generate" in call), key=lambda call: "--prompts" in call)
    assert made[-2:] == [f"generate.num_workers={workers}", f"generate.num_conversations={36000 // workers}"]
    assert answered[-1] == f"{tmp_path}/answers"
    trained = {Path(call[7].removeprefix("output=")).name: call for call in calls if "train" in call}
    assert {name: call[0] for name, call in trained.items()} == dict(zip(("peagle", "eagle3", "p12"), on, strict=True))
    recipes = {name: Path(call[4]).stem.removeprefix("coder-") for name, call in trained.items()}
    assert recipes == {"peagle": "peagle", "eagle3": "eagle3", "p12": "peagle"}
    assert trained["p12"][-2:] == ["drafter.num_depths=12", "schedule.max_minutes=5"]
    assert "schedule.max_minutes=10" in trained["p12"], "and the later one counts"


def test_cells_go_to_the_gpus_in_turn(tmp_path: Path) -> None:
    def options(num_gpus: int, **env: str) -> list[dict[str, str]]:
        """Of each table: words behind an option, up to the next one."""
        found = []
        for call in run("table", tmp_path, num_gpus, **env):
            pairs = (part.split(" ", 1) for part in " ".join(call).split(" --")[1:])
            found.append({pair[0]: pair[-1] for pair in pairs})
        return sorted(found, key=lambda table: table["first-port"])

    (alone,) = options(1, CELLS="a:1 b:2/c:3/d:4")
    assert (alone["gpus"], alone["cells"], Path(alone["out"]).name) == ("0", "a:1 b:2 c:3 d:4", "headline-first.json")
    first, second = options(2, CELLS="a:1 b:2/c:3/d:4", HEAD="p12", ARMS="none ours-7")
    assert (first["gpus"], first["cells"], second["gpus"], second["cells"]) == ("0", "a:1 b:2 d:4", "1", "c:3")
    assert first["peagle-head"] == f"{tmp_path}/p12/head"
    assert first["arms"] == "none ours-7"
    assert (second["first-port"], Path(second["out"]).name) == ("8200", "headline-first-2.json")
    (rest,) = options(2, SET="second")
    assert rest["gpus"] == "0 1"
    assert rest["arms"].split()[-1] == "remote-7"
