"""A head for others: a model card made from what training wrote beside it, and its upload to Hugging Face."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import yaml

from peagle.checkpoint import check_head, is_plain
from peagle.config import HeadError, read_json
from peagle.train.evaluate import LOOPING, kind
from peagle.train.recipe import is_hub_id

logger = logging.getLogger(__name__)

DEPTHS = (1, 3, 5, 7)
"""K of the card's table."""

CARD = """# {name}

{kind} head for [{base}](https://huggingface.co/{base}): it drafts tokens for speculative decoding, and is no model by
itself. Output is the target's own. {depths}{note}

## Use

vLLM:

```
vllm serve {base} --speculative-config '{speculative}'
```

peagle-serve, where the target verifies as many drafts of each request as pay:

```yaml
model: {{id: {model_id}, source: {base}}}
drafter: {{head: {repo}, max_draft_tokens: {k}}}
```

## Acceptance

Tokens a step (accepted drafts and one of the target's own), {answers}, with 95 % intervals over answers:

{table}

A greedy answer that repeats itself is easy to draft: looping answers stand apart.

## Training

{data} {training}

```yaml
{recipe}```

Commit {commit} of peagle-serve, {date}, {hardware}; versions: {versions}.
"""


def publish(
    head: str | Path,
    repo: str,
    *,
    base_model: str | None = None,
    license_id: str = "apache-2.0",
    note: str = "",
    dry_run: bool = False,
) -> list[str]:
    """Writes README.md into the head's directory and uploads the head with it to `repo`, which is made where it is not.

    base_model: Hugging Face id of the target, by default the recipe's. note: what else a reader must know. dry_run: the
    card alone. Returns the names of the files uploaded (to upload).

    Raises:
        HeadError: a damaged head, one that stock vLLM does not load, or one without provenance.json.
        ValueError: `repo` or the target is no Hugging Face id.
        OSError: the hub refuses.
    """
    head = Path(head)
    path = head / "provenance.json"
    provenance = read_json(path, "head")
    try:
        base_model = base_model or str(provenance["recipe"]["target"])
        card = model_card(head, repo, provenance, base_model, license_id, note)
    except (LookupError, TypeError, AttributeError) as error:
        raise HeadError(f"{path} is not what `peagle train` writes beside a head: {error!r:.200}") from error
    if not is_hub_id(repo):
        raise ValueError(f"--repo {repo!r} is no Hugging Face id: ORG/NAME")
    if not is_hub_id(base_model):
        raise ValueError(f"the target {base_model!r} is no Hugging Face id: name it with --base-model ORG/NAME")
    if not is_plain(head, check_head(head)):
        raise HeadError(
            f"{head} is not in the form that vLLM loads: `peagle convert {head} OUT --target DIR` writes it"
        )
    (head / "README.md").write_text(card, encoding="utf-8")
    files = ["README.md", "provenance.json", "config.json", *sorted(path.name for path in head.glob("*.safetensors"))]
    if not dry_run:
        from huggingface_hub import HfApi

        message = f"Head of peagle-serve {provenance['made']['commit']}"
        HfApi().create_repo(repo, exist_ok=True)
        HfApi().upload_folder(repo_id=repo, folder_path=head, allow_patterns=files, commit_message=message)
    return files


def model_card(head: Path, repo: str, provenance: dict[str, Any], base_model: str, license_id: str, note: str) -> str:
    """Text of README.md, with the metadata that the hub reads; the rest as in `publish`."""
    config = check_head(head)
    parallel = config.is_parallel
    k = min(config.num_depths, max(DEPTHS))
    recipe, training, made = (provenance[name] for name in ("recipe", "training", "made"))
    evaluated = recipe["evaluate"]["data"] or "conversations held out"
    metadata: dict[str, Any] = {"base_model": base_model, "license": license_id, "library_name": "vllm"}
    metadata |= {"tags": ["speculative-decoding", "p-eagle" if parallel else "eagle3", "vllm"]}
    text = CARD.format(
        name=repo.partition("/")[2],
        kind=kind(config),
        base=base_model,
        model_id=base_model.partition("/")[2].lower(),
        repo=repo,
        note=f"\n\n{note}" if note else "",
        k=k,
        depths=f"All of up to {config.num_depths} drafts come from one pass."
        if parallel
        else f"Drafts come one after another; it was trained for {config.num_depths}.",
        speculative=json.dumps(
            {"method": "eagle3", "model": repo, "num_speculative_tokens": k, "parallel_drafting": parallel}
        ),
        answers=f"on {evaluated}" if provenance["acceptance_offline"] else "(none were evaluated)",
        table=acceptance_table(provenance["acceptance_offline"]),
        data=f"{training['num_conversations']:,} conversations, {training['num_answer_tokens']:,} answer tokens.",
        training=f"{training['num_steps']:,} steps in {training['minutes']:g} minutes.",
        recipe=yaml.safe_dump({name: recipe[name] for name in ("drafter", "batch", "optimizer", "schedule", "loss")}),
        commit=made["commit"],
        date=made["date"][:10],
        hardware=made["hardware"].get("gpu") or made["hardware"].get("cpu", "unknown hardware"),
        versions=", ".join(f"{name} {version}" for name, version in made["versions"].items()),
    )
    return f"---\n{yaml.safe_dump(metadata)}---\n\n{text}"


def acceptance_table(groups: dict[str, Any]) -> str:
    """AL by category and K, without the looping shares of the categories."""
    shown = {name: group for name, group in groups.items() if not name.endswith((f" {LOOPING}", f" non-{LOOPING}"))}
    if not shown:
        return "(not measured)"
    depths = [str(k) for k in DEPTHS if str(k) in next(iter(shown.values()))["acceptance_length"]]
    lines = ["| | answers | " + " | ".join(f"K = {k}" for k in depths) + " |", "| --- " * (len(depths) + 2) + "|"]
    for name, group in shown.items():
        bounds = group.get("acceptance_length_95", {})
        spans = {k: f" [{low:.2f}, {high:.2f}]" for k, (low, high) in bounds.items()}
        cells = [f"{group['acceptance_length'][k]:.2f}{spans.get(k, '')}" for k in depths]
        lines.append(f"| {name} | {group['num_answers']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
