"""The pinned packages are those that pyproject.toml asks for; `make lock` pins them anew."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


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
