"""Applications served for a benchmark: made in the Ray that serves them, found at their prefix, gone afterwards."""

from __future__ import annotations

import httpx
import pytest
import ray
from ray import serve
from ray.serve import Application

from benchmarks.common import running_applications

pytestmark = [pytest.mark.service, pytest.mark.long]


@serve.deployment
class Named:
    def __init__(self, name: str) -> None:
        self._name = name

    async def __call__(self) -> str:
        return self._name


def named(name: str) -> Application:
    """Asks Ray something while it is made, as an application of `ray.serve.llm` does."""
    assert isinstance(ray.get_runtime_context().runtime_env, dict)
    return Named.bind(name)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("names", [["one"], ["one", "two"]])
def test_applications_are_made_once_ray_runs_and_end_with_it(names: list[str]) -> None:
    prefixes = {name: f"/{name}" if len(names) > 1 else "" for name in names}
    with running_applications(lambda: {name: named(name) for name in names}, f"{prefixes['one']}/") as url:
        answers = [httpx.get(f"{url}{prefixes[name]}/").text for name in names]
    assert answers == names
    assert not ray.is_initialized()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_ray_ends_where_an_application_cannot_be_made() -> None:
    def broken() -> dict[str, Application]:
        raise ValueError("settings")

    with pytest.raises(ValueError, match="settings"), running_applications(broken, "/"):
        pass
    assert not ray.is_initialized()
