"""A release: one version, a wheel that holds what the product needs, configs of the version before, pinned packages."""

import email
import functools
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deployments.cli import main
from peagle import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = ("peagle", "cluster", "deployments")
BEFORE = "ebd37ec31ad83fbcd4a0e2cd796f63916ec185a6"
"""The commit of the version before, 0.1.0."""
HAS_HISTORY = subprocess.run(["git", "cat-file", "-e", BEFORE], cwd=ROOT, capture_output=True).returncode == 0


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_images_and_the_changelog_have_the_version() -> None:
    pages = [*ROOT.glob("k8s/**/*"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages if path.is_file() and path.suffix != ".png")
    named = re.findall(r"(?:peagle-serve:|newTag: )(\d[\d.]*)", text)
    assert set(named) == {__version__}
    (newest, *_) = re.findall(r"^## (.*)$", (ROOT / "docs/changelog.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest == __version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves files beside the source."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


def test_a_wheel_has_the_metadata_and_files_of_the_project(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"peagle_serve-{__version__}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        assert archive.read(f"{info}/entry_points.txt").decode().split("\n")[1] == "peagle = deployments.cli:main"
    assert (metadata["Name"], metadata["Version"]) == ("peagle-serve", __version__)
    assert (metadata["Requires-Python"], metadata["License-Expression"]) == ("<3.13,>=3.11", "Apache-2.0")
    extras = PROJECT["optional-dependencies"]
    asked = PROJECT["dependencies"] + [f"{one}; extra == '{extra}'" for extra in extras for one in extras[extra]]
    assert set(map(Requirement, metadata.get_all("Requires-Dist"))) == set(map(Requirement, asked))
    assert set(metadata.get_all("Provides-Extra")) == extras.keys()
    tracked = {name for package in PACKAGES for name in git("ls-files", "-co", "--exclude-standard", package).split()}
    assert {name for name in names if ".dist-info/" not in name} == tracked
    assert f"{info}/licenses/LICENSE" in names


def test_what_a_wheel_installs_makes_the_same_manifest(wheel: Path, tmp_path: Path) -> None:
    """In a folder without this repository: heads and modules come from the wheel."""
    installed = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(installed), str(wheel)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    code = (
        f"import sys; sys.path[0] = {str(installed)!r}; import cluster, deployments, peagle; "
        "from deployments.cli import main; "
        "assert all(m.__file__.startswith(sys.path[0]) for m in (cluster, deployments, peagle)); "
        f"sys.exit(main(['manifest', {str(ROOT / 'configs/local.yaml')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (ROOT / "k8s/local.yaml").read_text(encoding="utf-8")


# ---- configs of the version before


def gone() -> dict[str, str]:
    """What the changelog says of settings that are gone, by their paths."""
    text = (ROOT / "docs/changelog.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `([\w.]+)` \| (.+) \|$", text, re.MULTILINE))


@pytest.mark.skipif(not HAS_HISTORY, reason="needs the repository's history")
def test_configs_of_the_version_before_need_what_the_changelog_says(tmp_path: Path, capsys: Any) -> None:
    changes = {"depth": (r"\bdepth:", "num_draft_tokens:"), "autoscaling.warmup_s": (r"\n *warmup_s:.*", "")}
    changed = set()
    for name in git("ls-tree", "--name-only", BEFORE, "configs/").split():
        if not name.endswith(".yaml"):
            continue
        path, text = tmp_path / Path(name).name, git("show", f"{BEFORE}:{name}")
        path.write_text(text, encoding="utf-8")
        needed = [setting for setting, (pattern, _) in changes.items() if re.search(pattern, text)]
        assert main(["check", str(path)]) == bool(needed)
        shown = capsys.readouterr().err
        assert shown.count("no setting any more") == len(needed)
        assert all(f"  - {setting} is no setting any more: {gone()[setting]}\n" in shown for setting in needed)
        path.write_text(functools.reduce(lambda text, change: re.sub(*change, text), changes.values(), text))
        assert main(["check", str(path)]) == 0
        changed.update(needed)
    assert changed == changes.keys()


@pytest.mark.parametrize("setting", gone())
def test_a_setting_that_is_gone_says_what_stands_in_its_place(setting: str, tmp_path: Path, capsys: Any) -> None:
    name = "local-autoscale" if setting.startswith("autoscaling") else "local"
    config = yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text())
    section = config["applications"][0]["args"]
    *sections, key = setting.split(".")
    for one in sections:
        section = section.setdefault(one, {})
    section[key] = 1
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(config))
    assert main(["check", str(path)]) == 1
    assert f"{setting} is no setting any more: {gone()[setting]}" in capsys.readouterr().err


# ---- what is pinned


@pytest.mark.parametrize(
    ("lock", "extras"), [("requirements-cpu.txt", ("embedded", "dev")), ("requirements-gpu.txt", ("gpu",))]
)
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_a_lock_holds_what_the_project_asks_for(lock: str, extras: tuple[str, ...], python: str) -> None:
    lines = [Requirement(line) for line in (ROOT / lock).read_text().splitlines() if line and not line.startswith("#")]
    machine = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    pinned = {canonicalize_name(one.name): one for one in lines if not one.marker or one.marker.evaluate(machine)}
    wanted = PROJECT["dependencies"] + [one for extra in extras for one in PROJECT["optional-dependencies"][extra]]
    for requirement in map(Requirement, wanted):
        (pin,) = pinned[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(pin.version, prereleases=True), f"{requirement}: {lock} has {pin}"
