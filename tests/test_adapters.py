"""The adapters of Ray Serve without Serve: what they do when a report fails, is late, or never comes."""

from types import SimpleNamespace
from typing import Any

from cluster.callers import Caller
from cluster.drafting import resolve
from cluster.workloads import Workloads
from deployments.requests import ChatBody
from deployments.target import TargetServer
from tests.test_control import POLICY, control, observation


def admitted(control: Any, drafting: Any) -> Any:
    """The decision of a target replica on a chat with this `drafting` field."""
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "Hi"}], "drafting": drafting})
    replica: Any = SimpleNamespace(
        _policy=POLICY, _aliases={}, _workloads=Workloads(), _control=control, _remote=None, _model_id="m"
    )
    return TargetServer._admit(replica, body)


def test_a_target_leaves_the_decision_of_the_ingress_and_so_the_limit_of_a_caller() -> None:
    ingress, target = control(per_token_s=0.0), control(per_token_s=0.0)
    target.observe([observation()], 0.0)
    target.settle = lambda drafting, now_s, settle=target.settle: settle(drafting, 0.0)  # type: ignore[method-assign]
    assert admitted(target, None).k > 1, "a request past the ingress gets what the target has learned"
    asked = resolve(POLICY, caller=Caller("web", max_depth=1))
    unknown = ingress.settle(asked, 1.0)
    ingress.observe([observation(num_steps=0)], 1.0)
    cold = ingress.settle(asked, 1.0)
    for decided in (unknown, cold):
        assert (decided.k, decided.source) == (1, "default")
        assert admitted(target, decided.to_wire()).k == 1
