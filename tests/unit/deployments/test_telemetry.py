"""What is seen of the service: Prometheus families and /drafting. Metrics, dashboard and alerts agree."""

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.pages import engine_families
from cluster.counts import CounterDeltas, Counts, TargetReport, WorkloadCounts
from cluster.heads import DrafterReport, HeadRef
from cluster.k_policy import KPolicy
from cluster.learning import LearnerReport
from cluster.request import KRules
from deployments import telemetry
from deployments.metrics import Families
from deployments.replicas import link_reports
from deployments.telemetry import add_drafter_metrics, add_learner_metrics, add_scaling_metrics, prometheus_text
from deployments.view import as_text
from peagle.drafter.client import LinkStats
from peagle.drafter.kvcache import Counters
from peagle.drafter.server import ServerStats
from tests.support import scaling_cases
from tests.support.autoscaling_harness import Controller
from tests.support.counted import counts_of
from tests.support.metric_names import documented, exported
from tests.unit.cluster.test_heads import swapped
from tests.unit.deployments.test_replicas import drafter_report

GOOD = counts_of([(3, 3), (3, 1)])
BAD = counts_of([(3, 0)])


def report(head: str = "a", replica: str = "t1", links: Any = (), **workloads: Counts) -> TargetReport:
    counted = {name: WorkloadCounts(1, 1, 0, 10, 20, counts) for name, counts in workloads.items()}
    return TargetReport(replica, head, head, counted, links=tuple(links), num_output_tokens=12)


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    """Values by name and the values of the labels, in the order of their names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def link(drafter: str, state: str, counters: dict[str, float]) -> dict[str, Any]:
    return {"drafter": drafter, "state": state, "path": "tcp", "problem": "", "counters": counters}


def test_the_document_has_each_head_with_its_acceptance() -> None:
    reports = [report("a", "t1", [link("h:1", "up", {"steps": 7.0})]), report("new", "t2")]
    by_head = dict[str, Counts]()
    for counted in ({"a": {"code": GOOD}}, {}, {"old": {"code": BAD}, "a": {"code": BAD}}):
        telemetry.add_head_counts(by_head, CounterDeltas(by_head=counted))
    drafter = drafter_report("r1", "a", problems={"b": "its files are gone"})
    document = telemetry.drafting_document(reports, by_head, [drafter])
    heads = {row["head"]: row for row in document["heads"]}
    assert heads["a"]["acceptance_rates"] == [0.6667, 0.3333, 0.3333]
    assert heads["a"]["acceptance_length"] == round(1 + 4 / 3, 4)
    assert [heads[head]["is_live"] for head in ("a", "new", "old")] == [True, True, False]
    assert heads["new"]["acceptance_length"] is None
    assert document["drafters"][0]["heads"] == [{"index": 0, "name": "head-a", "head": "a"}]
    assert document["drafters"][0]["problems"] == {"b": "its files are gone"}
    assert document["links"][0]["target"] == "t1"
    k_policy = KPolicy(KRules(3, 3, 3))
    shown = as_text({"model": "m", **k_policy.document(0.0), **document}).splitlines()
    assert "head a (drafts): measured AL 2.33, 3 steps" in shown
    assert "head new (drafts): nothing drafted yet, 0 steps" in shown
    assert "drafter h:1: a; links: up by tcp" in shown
    without_drafter = as_text({"model": "m", **KPolicy(KRules(0, 0, 0)).document(0.0)}).splitlines()
    assert without_drafter[-1] == "m: no drafter"


def test_metrics_have_heads_drafters_and_links() -> None:
    reports = [report("a", "t1", [link("h:1", "up", {"steps": 7.0}), link("h:2", "late", {})])]
    changes = swapped(0, 0.1, 120).manager.document()
    drafters = [drafter_report("r1", "a", refused="no such head")]
    families = Families()
    telemetry.add_head_metrics(families, {"a": GOOD})
    telemetry.add_change_metrics(families, changes)
    telemetry.add_drafter_metrics(families, drafters, reports)
    found = samples(telemetry.prometheus_text(families.values()))
    assert found["peagle_head_gain", "a", "low", "b"] == pytest.approx(changes[0]["low"])
    assert found["peagle_head_accepted_tokens_total", "1", "a"] == 2
    assert found["peagle_drafter_head", "a", "0", "r1"] == 1
    assert found["peagle_drafter_head_refused", "r1"] == 1
    assert found["peagle_drafter_passes_total", "r1"] == 5
    assert found["peagle_link_up", "h:2", "t1"] == 0
    assert found["peagle_link_steps_total", "h:1", "t1"] == 7


# ---- the table of metrics, and every expression of dashboard and alerts, names what is exported


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


def test_metrics_of_autoscaling_drafters_links_and_the_learner_are_those_of_the_table() -> None:
    scaled = Controller()
    scaled.serve(60, 1.0, scaling_cases.GOOD)
    served = dataclasses.asdict(Counters()) | dataclasses.asdict(ServerStats())  # as a drafter reports it
    replica = DrafterReport("r1", "h:1", (HeadRef("a", "a"),), "", served)
    about = {"drafter": "h:1", "state": "up", "path": "tcp", "problem": ""}
    links = link_reports([{"links": [about | {"counters": dataclasses.asdict(LinkStats())}]}])
    figures = {"ratio": 1.1, "low": 1.05, "high": 1.15}
    counters = {"answers_taken": 9, "rounds": 2, "proposals": 1, "busy_seconds": 3.5, "heads_promoted": 1}
    learner = LearnerReport("training", "", {"chat": 9}, 900, counters, {"recent": figures, "before": figures})
    add_scaling_metrics(families := Families(), scaled.router.document)
    add_drafter_metrics(families, [replica], [report("a", "t1", links)])
    add_learner_metrics(families, [learner])
    prefixes = tuple(f"peagle_{about}_" for about in ("autoscaling", "drafter", "link", "learner"))
    table = {name: labels for name, labels in documented().items() if name.startswith(prefixes)}
    assert exported(prometheus_text(families.values()).decode()) == table


@pytest.mark.parametrize("where", expressions())
def test_every_expression_names_metrics_and_labels_that_exist(where: str) -> None:
    expression, engines = expressions()[where], engine_families()
    table = documented() | {name: set(labels.split()) for name, (_, labels, _) in engines.items()}
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"(?:peagle_|vllm:)\w+", expression)}
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


def texts(document: str) -> Any:
    """A YAML document whose values are all texts: 0x600 is no number."""
    return yaml.load(document, yaml.BaseLoader)


CALM = texts("""
peagle_target_replicas: 2x600
peagle_drafter_replicas: 1x600
peagle_link_up{replica="t1", drafter="h:1"}: 1x600
peagle_queued_requests{replica="t1"}: 0x600
peagle_draft_tokens_total{model="m", workload="code", draft_position="1", replica="t1"}: 0+600x600
peagle_accepted_tokens_total{model="m", workload="code", draft_position="1", replica="t1"}: 0+400x600
peagle_time_to_first_token_seconds_bucket{workload="code", le="0.5"}: 0+60x600
peagle_time_to_first_token_seconds_bucket{workload="code", le="+Inf"}: 0+60x600
peagle_answers_total{workload="code", status="200"}: 0+60x600
""")
"""Ten hours, one sample a minute, in which nothing is wrong."""

INCIDENTS = texts("""
calm: {}
acceptance collapses, and of 600 drafts a minute 60 are accepted:
  alerts: [PeagleAcceptanceCollapsed]
  peagle_accepted_tokens_total{model="m", workload="code", draft_position="1", replica="t1"}: 0+400x540 216060+60x60
no drafter answers:
  alerts: [PeagleDrafterDown, PeagleTargetWithoutDrafter]
  peagle_drafter_replicas: 1x540 0x60
  peagle_link_up{replica="t1", drafter="h:1"}: 1x540 0x60
a head was rolled back:
  alerts: [PeagleHeadRolledBack]
  peagle_head_change{head="b", against="a", state="rolled back"}: _x540 1x60
a head is watched:
  peagle_head_change{head="b", against="a", state="promoted"}: _x540 1x60
one link of two is down:
  peagle_link_up{replica="t1", drafter="h:1"}: 1x600
  peagle_link_up{replica="t1", drafter="h:2"}: 1x540 0x60
first tokens come late:
  alerts: [PeagleFirstTokenLate]
  peagle_time_to_first_token_seconds_bucket{workload="code", le="0.5"}: 0+60x540 32400+0x60
  peagle_time_to_first_token_seconds_bucket{workload="code", le="5.0"}: 0+60x540 32400+50x60
  peagle_time_to_first_token_seconds_bucket{workload="code", le="+Inf"}: 0+60x600
requests queue:
  alerts: [PeagleQueue]
  peagle_queued_requests{replica="t1"}: 0x540 80x60
requests fail:
  alerts: [PeagleRequestsFail]
  peagle_answers_total{workload="code", status="200"}: 0+60x600
  peagle_answers_total{workload="code", status="500"}: 0+0x540 0+6x60
no target runs:
  alerts: [PeagleNoTarget]
  peagle_target_replicas: 2x540 0x60
scaled to zero:
  peagle_autoscaling_replicas{deployment="target", count="min"}: 0x600
  peagle_target_replicas: 2x540 0x60
the router is gone:
  alerts: [PeagleNotSeen]
  peagle_target_replicas: 2x540 _x60
""")
"""What is other than in the calm hours, and the alerts that it raises."""


def series(incident: str) -> list[dict[str, str]]:
    """The calm hours with those of an incident in the place of those of the same name."""
    changed = {name: values for name, values in INCIDENTS[incident].items() if name != "alerts"}
    names = {name.partition("{")[0] for name in changed}
    calm = {name: values for name, values in CALM.items() if name.partition("{")[0] not in names}
    labelled = {name if "{" in name else f"{name}{{}}": values for name, values in (calm | changed).items()}
    return [{"series": name.replace("{", '{job="peagle", '), "values": v} for name, v in labelled.items()]


@pytest.mark.parametrize("incident", INCIDENTS)
def test_an_incident_raises_its_alert_and_no_other(incident: str, rules_file: Path, tmp_path: Path) -> None:
    alerts = INCIDENTS[incident].get("alerts", [])
    # Which labels and texts an alert carries is not compared: the expression counts its alerts.
    firing = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": "9h40m",
        "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in alerts],
    }
    case = {
        "rule_files": [str(rules_file)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series(incident), "promql_expr_test": [firing]}],
    }
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(case), encoding="utf-8")
    promtool("test", "rules", str(path))
