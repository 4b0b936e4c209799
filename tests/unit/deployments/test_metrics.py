"""Metrics, dashboard and alerts agree: the table of metrics, and every expression, names what is exported."""

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.pages import engine_families
from cluster.heads import DrafterReport, HeadRef
from cluster.learning import LearnerReport
from deployments.metrics import Families
from deployments.replicas import link_reports
from deployments.telemetry import add_drafter_metrics, add_learner_metrics, add_scaling_metrics, prometheus_text
from peagle.drafter.client import LinkStats
from peagle.drafter.kvcache import Counters
from peagle.drafter.server import ServerStats
from tests.support.autoscaling_harness import Controller
from tests.support.metric_names import documented, exported
from tests.support.scaling_cases import GOOD
from tests.unit.deployments.test_telemetry import report

MONITORING = Path(__file__).parents[3] / "k8s" / "components" / "monitoring"
ALERTS = yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))
DASHBOARD = json.loads((MONITORING / "grafana-dashboard.json").read_text(encoding="utf-8"))
RULES = [rule for group in ALERTS["spec"]["groups"] for rule in group["rules"]]
OWN_LABELS = {"le", "job", "instance", "cluster", "namespace", "application"}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] not in ("row", "text")]


def expressions() -> dict[str, str]:
    """Every expression of dashboard and alerts, by where it stands."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in RULES}
    for panel in panels():
        found |= {f"panel {panel['title']}, {target['refId']}": target["expr"] for target in panel["targets"]}
    return found


def metrics_in(expression: str) -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"(?:peagle_|vllm:)\w+", expression)}


def labels_of(add: Callable[..., None], *said: Any) -> dict[str, set[str]]:
    """Labels by metric of what `add` makes of `said`."""
    add(found := Families(), *said)
    return exported(prometheus_text(found.values()).decode())


def test_metrics_of_autoscaling_are_those_of_the_table() -> None:
    scaled = Controller()
    scaled.serve(60, 1.0, GOOD)
    found = labels_of(add_scaling_metrics, scaled.router.document)
    assert found == {name: labels for name, labels in documented().items() if name.startswith("peagle_autoscaling_")}


def test_every_counter_of_drafters_and_links_is_in_the_table() -> None:
    served = {name.removeprefix("num_"): value for name, value in dataclasses.asdict(ServerStats()).items()}
    served["refused_connections"] = served.pop("refused")  # as a drafter reports it
    replica = DrafterReport("r1", "h:1", (HeadRef("a", "a"),), "", dataclasses.asdict(Counters()) | served)
    about = {"address": "h:1", "state": "up", "path": "tcp", "problem": ""}
    links = link_reports([{"links": [about | dataclasses.asdict(LinkStats())]}])
    found = labels_of(add_drafter_metrics, [replica], [report("a", "t1", links)])
    assert found == {
        name: labels for name, labels in documented().items() if name.startswith(("peagle_drafter_", "peagle_link_"))
    }


def test_metrics_of_the_learner_are_those_of_the_table() -> None:
    figures = {"ratio": 1.1, "low": 1.05, "high": 1.15}
    counters = {"answers_taken": 9, "rounds": 2, "proposals": 1, "busy_seconds": 3.5, "heads_promoted": 1}
    said = LearnerReport("training", "", {"chat": 9}, 900, counters, {"recent": figures, "before": figures})
    found = labels_of(add_learner_metrics, [said])
    assert found == {name: labels for name, labels in documented().items() if name.startswith("peagle_learner_")}


@pytest.mark.parametrize("where", expressions())
def test_every_expression_names_metrics_and_labels_that_exist(where: str) -> None:
    expression, engines = expressions()[where], engine_families()
    table = documented() | {name: set(labels.split()) for name, (_, labels, _) in engines.items()}
    names = metrics_in(expression)
    assert names
    assert names <= table.keys()
    known = {label for name in names for label in table[name]} | OWN_LABELS
    used = {label for group in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for label in re.findall(r"\w+", group)}
    used |= set(re.findall(r"[{,]\s*(\w+)\s*[=!]~?", expression))
    assert used <= known


def test_alerts_say_what_to_do() -> None:
    assert (ALERTS["apiVersion"], ALERTS["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


# ---- with Prometheus' own tool, where it is installed


@pytest.fixture(scope="module")
def rules_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rules in the form that Prometheus itself reads."""
    path = tmp_path_factory.mktemp("rules") / "alerts.yaml"
    path.write_text(yaml.safe_dump(ALERTS["spec"]), encoding="utf-8")
    return path


def promtool(*arguments: str) -> None:
    if (tool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_rules(rules_file: Path) -> None:
    promtool("check", "rules", str(rules_file))


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inside = ",".join(f'{label}="{value}"' for label, value in {"job": "peagle", **labels}.items())
    return {"series": f"{name}{{{inside}}}", "values": values}


DEPTH_1 = {"model": "m", "workload": "code", "depth": "1", "replica": "t1"}
CALM = [
    series("peagle_target_replicas", "2x600"),
    series("peagle_drafter_replicas", "1x600"),
    series("peagle_link_up", "1x600", replica="t1", drafter="h:1"),
    series("peagle_queued_requests", "0x600", replica="t1"),
    series("peagle_draft_tokens_total", "0+600x600", **DEPTH_1),
    series("peagle_accepted_tokens_total", "0+400x600", **DEPTH_1),
    series("peagle_time_to_first_token_seconds_bucket", "0+60x600", workload="code", le="0.5"),
    series("peagle_time_to_first_token_seconds_bucket", "0+60x600", workload="code", le="+Inf"),
    series("peagle_answers_total", "0+60x600", workload="code", status="200"),
]
"""Ten hours, one sample a minute, in which nothing is wrong."""


def instead(*changed: dict[str, str]) -> list[dict[str, str]]:
    """The calm hours with some series in the place of those of the same name."""
    names = {item["series"].split("{")[0] for item in changed}
    return [*changed, *(item for item in CALM if item["series"].split("{")[0] not in names)]


INCIDENTS: dict[str, tuple[list[dict[str, str]], list[str]]] = {
    "calm": ([], []),
    # Of 600 drafts a minute 400 were accepted, since an hour 60.
    "acceptance collapses": (
        [series("peagle_accepted_tokens_total", "0+400x540 216060+60x60", **DEPTH_1)],
        ["PeagleAcceptanceCollapsed"],
    ),
    "no drafter answers": (
        [
            series("peagle_drafter_replicas", "1x540 0x60"),
            series("peagle_link_up", "1x540 0x60", replica="t1", drafter="h:1"),
        ],
        ["PeagleDrafterDown", "PeagleTargetWithoutDrafter"],
    ),
    "a head was rolled back": (
        [series("peagle_head_change", "_x540 1x60", head="b", against="a", state="rolled back")],
        ["PeagleHeadRolledBack"],
    ),
    "a head is watched": ([series("peagle_head_change", "_x540 1x60", head="b", against="a", state="promoted")], []),
    "one link of two is down": (
        [
            series("peagle_link_up", "1x600", replica="t1", drafter="h:1"),
            series("peagle_link_up", "1x540 0x60", replica="t1", drafter="h:2"),
        ],
        [],
    ),
    "first tokens come late": (
        [
            series("peagle_time_to_first_token_seconds_bucket", "0+60x540 32400+0x60", workload="code", le="0.5"),
            series("peagle_time_to_first_token_seconds_bucket", "0+60x540 32400+50x60", workload="code", le="5.0"),
            series("peagle_time_to_first_token_seconds_bucket", "0+60x600", workload="code", le="+Inf"),
        ],
        ["PeagleFirstTokenLate"],
    ),
    "requests queue": ([series("peagle_queued_requests", "0x540 80x60", replica="t1")], ["PeagleQueue"]),
    "requests fail": (
        [
            series("peagle_answers_total", "0+60x600", workload="code", status="200"),
            series("peagle_answers_total", "0+0x540 0+6x60", workload="code", status="500"),
        ],
        ["PeagleRequestsFail"],
    ),
    "no target runs": ([series("peagle_target_replicas", "2x540 0x60")], ["PeagleNoTarget"]),
    "scaled to zero": (
        [
            series("peagle_autoscaling_replicas", "0x600", deployment="target", count="min"),
            series("peagle_target_replicas", "2x540 0x60"),
        ],
        [],
    ),
    "the router is gone": ([series("peagle_target_replicas", "2x540 _x60")], ["PeagleNotSeen"]),
}
"""What is other than in the calm hours, and the alerts that it raises."""


@pytest.mark.parametrize("incident", INCIDENTS)
def test_an_incident_raises_its_alert_and_no_other(incident: str, rules_file: Path, tmp_path: Path) -> None:
    changed, alerts = INCIDENTS[incident]
    # Which labels and texts an alert carries is not compared: the expression counts its alerts.
    firing = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": "9h40m",
        "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in alerts],
    }
    case = {
        "rule_files": [str(rules_file)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": instead(*changed), "promql_expr_test": [firing]}],
    }
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(case), encoding="utf-8")
    promtool("test", "rules", str(path))
