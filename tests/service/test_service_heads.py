"""The real service changes heads by what it counts: a better candidate is promoted, a worse head goes back by itself.

Requests run all the time; none may fail, and every answer must be the target's own.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import serve
from safetensors.torch import load_file, save_file

import peagle.heads
from cluster.heads import HeadChange, HeadProposal
from deployments import APP_NAME, ROUTER_NAME
from deployments.cli import main
from tests.service.test_service_remote import answers, drafter_of, heads, links, load, swap, texts
from tests.support.service_harness import FIXED, Service, running_service, wait_for

pytestmark = [pytest.mark.service, pytest.mark.long, pytest.mark.timeout(1800)]

SHIPPED = Path(peagle.heads.__file__).parent / "smollm2-135m-instruct"
DECIDED_S = 400.0


def never_right(folder: Path, mask: float) -> str:
    """A head that always drafts token 0: its final norm is zero. Another one for every `mask`."""
    shutil.copytree(SHIPPED, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"].zero_()
    tensors["mask_hidden"].fill_(mask)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """It drafts with a head that is never right, and has room for a candidate."""
    folder = tmp_path_factory.mktemp("heads")
    drafter = {"head": never_right(folder / "first", 1.0), "spare_heads": 1, "trial_share": 0.5}
    with running_service(drafter=drafter, num_draft_tokens={**FIXED, "state": str(folder / "state.json")}) as running:
        wait_for(lambda: links(running) == ["up"], "a link to the drafter")
        yield running


def router(method: str, *args: Any) -> HeadChange:
    found: HeadChange = getattr(serve.get_deployment_handle(ROUTER_NAME, APP_NAME), method).remote(*args).result()
    return found


def newest(service: Service) -> dict[str, Any]:
    return dict(service.drafting()["head_changes"][0])


def decided(name: str) -> HeadChange:
    wait_for(lambda: router("trial", name).is_over, f"end of the trial of {name}", DECIDED_S)
    return router("trial", name)


def test_heads_come_and_go_by_what_is_accepted_of_their_drafts(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, (first,) = texts(answers(service, "plain", k=0)), heads(service)
    wrong = never_right(tmp_path / "wrong", 2.0)
    with load(service, plain) as lengths:
        wait_for(lambda: len(lengths) > 1, "answer")

        proposal = HeadProposal(str(SHIPPED), parent=first, provenance={"num_requests": 100})
        trial = decided(router("propose", proposal).name)
        assert trial.state == "promoted", trial
        assert trial.provenance == {"num_requests": 100}
        wait_for(lambda: heads(service)[0] == trial.head, "promoted head")
        num_before = len(lengths)
        wait_for(lambda: len(lengths) > num_before + 4, "answers of the promoted head")
        assert min(lengths[-2:]) > max(lengths[:1])
        found = {one["head"]: one for one in service.drafting()["heads"]}
        assert found[trial.head]["is_live"]
        assert found[trial.head]["acceptance_length"] > found[first]["acceptance_length"]

        assert main(["heads", "--propose", wrong]) == 0
        dropped = decided(capsys.readouterr().out.split(":")[0])
        assert dropped.state == "dropped", dropped
        assert heads(service)[0] == trial.head

        swap(service, head=wrong)
        wait_for(lambda: newest(service)["state"] == "rolled back", "old head", DECIDED_S)
        change = newest(service)
        assert (change["head"], change["against"]) == (dropped.head, trial.head)
        assert change["high"] < 0
        wait_for(lambda: heads(service)[0] == trial.head, "old head on the drafter")
        assert service.metrics()["peagle_head_change"]
        assert drafter_of(service)["refused"] == ""

        swap(service, head=service.written["applications"][0]["args"]["drafter"]["head"])
        wait_for(lambda: heads(service)[0] == first, "the operator's head, which was never rolled back")
    assert texts(answers(service, "default")) == plain
    assert main(["heads", service.url]) == 0
    assert f"({dropped.head}) against {trial.head}: dropped" in capsys.readouterr().out
