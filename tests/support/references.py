"""What the embedded target says without speculation, kept so that hardly a test needs an engine without drafts.

`data/references.json` holds jobs with their results, the digest of the weights that gave them and the instruction set
of the CPU, for another one may sum in another order. `engine_harness.reference_results` runs what it does not hold;
with PEAGLE_WRITE_REFERENCES=1 it adds that. `test_references.py` runs all of them again.
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).parents[1] / "data" / "references.json"
WRITE = "PEAGLE_WRITE_REFERENCES"

Document = dict[str, Any]


@functools.cache
def conditions(target_dir: Path) -> dict[str, str]:
    """What a result depends on beside the job."""
    digest = hashlib.sha256()
    for path in sorted(target_dir.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return {"weights": digest.hexdigest(), "instructions": torch.backends.cpu.get_cpu_capability()}


def load(target_dir: Path) -> dict[str, Document]:
    """Results by the job's key; none if the file is of another target or CPU."""
    document = json.loads(FILE.read_text()) if FILE.exists() else {}
    return document["results"] if document.get("conditions") == conditions(target_dir) else {}


def save(target_dir: Path, results: dict[str, Document]) -> None:
    """One line a result."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(results.items()))
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(f'{{"conditions": {json.dumps(conditions(target_dir))},\n"results": {{\n{lines}\n}}}}\n')
