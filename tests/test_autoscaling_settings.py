"""The section `autoscaling` of a config: what is wrong or missing is named, and what it becomes for Serve."""

from pathlib import Path

import pytest
import yaml
from ray.serve.config import AutoscalingConfig

from cluster.settings import Catalog, load_settings
from deployments.autoscaling import drafter_autoscaling, target_autoscaling
from deployments.drafter import HeadLoader
from tests.test_settings import catalog, changed, problems_of  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[1]
QUEUE = {"policy": "queue_length", "target": {"min": 1, "max": 3}}
ACCEPTANCE = {"policy": "acceptance", "target": {"min": 1, "max": 3}}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({**QUEUE, "target": {"min": 4, "max": 3}}, "autoscaling.target.min is 4, above autoscaling.target.max, 3"),
        ({**QUEUE, "target": {"min": 0, "max": 3}}, "autoscaling.target.min is 0"),
        ({**QUEUE, "max_replicas": 3}, "unknown key autoscaling.max_replicas"),
        ({**QUEUE, "target": {"mni": 1, "max": 3}}, "unknown key autoscaling.target.mni"),
        ({"policy": "acceptance"}, "autoscaling.target"),
        ({**QUEUE, "policy": "fast"}, "autoscaling.policy"),
        ({**QUEUE, "utilisation": 1.5}, "autoscaling.utilisation"),
        ({**QUEUE, "drafter": {"min": 1, "max": 2}}, "autoscaling.drafter bounds a remote drafter"),
        ({**QUEUE, "downscale_delay_s": 20}, "autoscaling.downscale_delay_s is 20: it must be more than stale_after_s"),
        (ACCEPTANCE, "needs engine.max_num_seqs"),
        (QUEUE, "target.num_replicas fixes what autoscaling decides"),
    ],
)
def test_what_cannot_be_meant_is_named(catalog: Catalog, section: dict, words: str) -> None:  # noqa: F811
    problems = problems_of(changed(autoscaling=section), catalog)
    assert any(words in problem for problem in problems), problems


def test_a_remote_drafter_scales_too(catalog: Catalog) -> None:  # noqa: F811
    args = changed(autoscaling=QUEUE, target__num_replicas=..., drafter__placement="remote")
    assert any("autoscaling.drafter is missing" in problem for problem in problems_of(args, catalog))
    settings = load_settings({**args, "autoscaling": {**QUEUE, "drafter": {"min": 1, "max": 2}}}, catalog)
    config = AutoscalingConfig(**(drafter_autoscaling(settings) or {}))
    assert (config.min_replicas, config.max_replicas) == (1, 2)
    assert config.policy.policy_function == "deployments.autoscaling:DrafterAutoscaler"


def test_a_drafter_has_room_for_the_requests_of_all_targets_that_may_come(
    catalog: Catalog,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.drafter.target_source", lambda source: "nowhere")
    args = changed(
        target__num_replicas=..., drafter__placement="remote", engine__dtype="float32", engine__max_num_seqs=8
    )
    settings = load_settings({**args, "autoscaling": {**QUEUE, "drafter": {"min": 1, "max": 2}}}, catalog)
    assert HeadLoader(settings).max_num_requests == 3 * 8


def test_the_config_that_ships_says_what_serve_gets(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.chdir(ROOT)
    (application,) = yaml.safe_load((ROOT / "configs" / "local-autoscale.yaml").read_text())["applications"]
    args = application["args"]
    args["model"]["source"], args["drafter"]["head"] = "embedded-model", "shipped-head"
    shipped = Catalog(catalog.embedded_models, catalog.heads_dir)
    settings = load_settings(args, shipped)
    config = AutoscalingConfig(**(target_autoscaling(settings) or {}))
    assert (config.min_replicas, config.max_replicas, config.upscale_delay_s) == (1, 2, 5.0)
    limits = config.policy.policy_kwargs["limits"]
    assert limits == {"max_num_seqs": 8, "max_k": 7, "pinned": {}, "pinned_default": 5}
    cpus = settings.target.num_cpus + settings.target.bundle["CPU"]
    assert 2 * cpus + settings.ingress.num_cpus <= 2
