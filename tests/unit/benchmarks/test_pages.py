"""The pages: made parts are what the code says today, links and anchors lead somewhere, and cited results are there."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from benchmarks.pages import ROOT, models_in, old_pages
from cluster.settings import ClusterSettings
from peagle.train.recipe import Recipe

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("benchmarks/**/*.md"))]
PAGES = [page for page in PAGES if RESULTS not in page.parents]
RESULT = re.compile(r"(?:20\d\d-\d\d-\d\d-[\w.-]+?|step-times-[\w-]+)\.(?:json|md|png|npz)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            found.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(target):
            found.append(f"{link}: no such heading")
    return found


def test_made_parts_are_what_the_code_says() -> None:
    assert [name_of(path) for path in old_pages()] == [], "run make docs"


def keys_of(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        yield f"{model.__name__}.{name}", field.description or ""
        for inner in models_in(field.annotation):
            yield from keys_of(inner)


@pytest.mark.parametrize("model", [ClusterSettings, Recipe])
def test_every_key_has_one_sentence(model: type[BaseModel]) -> None:
    assert [key for key, text in keys_of(model) if not re.fullmatch(r"\S[^\n]{3,90}\.", text)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere_and_files_that_a_page_names_exist(page: Path) -> None:
    assert broken_links(page) == []
    folders = "peagle|cluster|deployments|benchmarks|tests|configs|k8s"
    named = re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text("utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


def tracked_text() -> Iterator[tuple[str, str]]:
    """Text files of the repository outside `results`, with their names."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git repository here")
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if name and path.is_file() and RESULTS not in path.parents:
            yield name, path.read_bytes().decode("utf-8", "ignore")


def test_pages_named_in_the_code_exist() -> None:
    missing = {
        f"{name}: {page}"
        for name, text in tracked_text()
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", text)
        if not (ROOT / page).exists()
    }
    assert missing == set()


def test_results_are_cited_and_cited_ones_are_there() -> None:
    cited = {found for _, text in tracked_text() for found in RESULT.findall(text)}
    present = {path.name for path in RESULTS.iterdir()}
    assert cited - present == set()
    stems = {Path(name).stem for name in cited}
    assert {name for name in present if Path(name).stem not in stems} == set()


@pytest.mark.parametrize("config", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.name)
def test_configs_keep_the_schema_that_editors_read(config: Path) -> None:
    schema = json.loads((ROOT / "configs" / "schema.json").read_text(encoding="utf-8"))
    document = yaml.safe_load(config.read_text(encoding="utf-8"))
    jsonschema.validate(document, schema)
    document["applications"][0]["args"]["modle"] = {}
    with pytest.raises(jsonschema.ValidationError, match="modle"):
        jsonschema.validate(document, schema)
    assert config.read_text(encoding="utf-8").startswith("# yaml-language-server: $schema=schema.json\n")
