"""The `drafter` section with `placement: remote`: what is filled in, and each bad input with the words to mend it."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from cluster.settings import Catalog, ClusterSettings, DrafterSettings, SettingsError, load_settings, swapped

HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 64,
    "vocab_size": 1000,
    "ptd_token_id": 999,
    "num_depths": 7,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]},
}
HEADS = {
    "shipped-head": HEAD,
    "same-shape": {**HEAD, "target_hidden_size": 64, "num_depths": 8},
    "other-layers": {**HEAD, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}},
    "unnamed-layers": {**HEAD, "eagle_config": {}},
    "wider": {**HEAD, "hidden_size": 128, "target_hidden_size": 64},
    "other-target": {**HEAD, "target_hidden_size": 32},
    "other-vocabulary": {**HEAD, "vocab_size": 1001},
    "shallow": {**HEAD, "num_depths": 3},
    "eagle3": {**HEAD, "ptd_token_id": None},
}
GOOD: dict[str, Any] = {
    "model": {"id": "tiny", "source": "embedded-model"},
    "drafter": {"head": "shipped-head", "placement": "remote", "max_draft_tokens": 7},
    "engine": {"dtype": "float32"},
    "target": {"num_replicas": 2, "bundle": {"CPU": 1}},
}


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    for name, config in HEADS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return Catalog({"embedded-model"}, tmp_path)


def changed(sections: dict[str, Any] | None = None, **drafter: Any) -> dict[str, Any]:
    """GOOD with keys of its drafter, and whole `sections`, replaced."""
    args = copy.deepcopy(GOOD)
    args["drafter"] |= drafter
    return {**args, **(sections or {})}


def loaded(args: dict[str, Any], catalog: Catalog) -> ClusterSettings:
    return load_settings(args, catalog)


def test_replicas_have_defaults_that_follow_the_target(catalog: Catalog) -> None:
    drafter = loaded(GOOD, catalog).drafter
    assert drafter is not None
    assert drafter.replicas is not None
    assert (drafter.is_remote, drafter.replicas.num_replicas, drafter.replicas.num_gpus) == (True, 1, 0)
    on_gpu = loaded(changed({"target": {"bundle": {"GPU": 1}}}), catalog).drafter
    assert on_gpu is not None
    assert on_gpu.replicas is not None
    assert on_gpu.replicas.num_gpus == 1
    given = loaded(changed({"target": {"bundle": {"GPU": 1}}}, replicas={"num_gpus": 0.5, "cache_gib": 4}), catalog)
    assert given.drafter is not None
    assert given.drafter.replicas is not None
    assert (given.drafter.replicas.num_gpus, given.drafter.replicas.cache_gib) == (0.5, 4)


def test_a_colocated_drafter_has_no_replicas(catalog: Catalog) -> None:
    for args in (changed(placement="colocated"), {**GOOD, "drafter": {"head": "shipped-head"}}):
        drafter = loaded(args, catalog).drafter
        assert drafter is not None
        assert (drafter.is_remote, drafter.replicas, drafter.heads) == (False, None, ("shipped-head",))


def test_workloads_find_their_heads_by_index(catalog: Catalog) -> None:
    settings = loaded(
        changed(heads_by_workload={"code": "same-shape", "chat": "shipped-head", "sql": "same-shape"}), catalog
    )
    drafter = settings.drafter
    assert drafter is not None
    assert drafter.heads == ("shipped-head", "same-shape")
    assert [drafter.head_index(workload) for workload in ("code", "chat", "sql", "other")] == [1, 0, 1, 0]
    assert settings.named_workloads() == {"code", "chat", "sql"}


def test_a_head_that_is_not_here_yet_is_compared_later(catalog: Catalog) -> None:
    drafter = loaded(changed(head="org/peagle-head", heads_by_workload={"code": "org/another"}), catalog).drafter
    assert drafter is not None
    assert drafter.heads == ("org/peagle-head", "org/another")


BAD_INPUTS = {
    "unknown key of replicas": (
        changed(replicas={"cache_gb": 1}),
        ["drafter.replicas.cache_gb", "did you mean cache_gib"],
    ),
    "replicas' key in the drafter": (changed(num_gpus=1), ["drafter.num_gpus", "did you mean replicas.num_gpus"]),
    "replicas as a number": (changed(replicas=2), ["drafter.replicas", "expected a mapping"]),
    "no replicas": (changed(replicas={"num_replicas": 0}), ["drafter.replicas.num_replicas", "at least 1"]),
    "half a replica": (changed(replicas={"num_replicas": 0.5}), ["drafter.replicas.num_replicas", "an integer"]),
    "negative GPUs": (changed(replicas={"num_gpus": -1}), ["drafter.replicas.num_gpus", "at least 0"]),
    "no cache": (changed(replicas={"cache_gib": 0}), ["drafter.replicas.cache_gib", "0"]),
    "no requests": (changed(replicas={"max_num_requests": 0}), ["drafter.replicas.max_num_requests", "at least 1"]),
    "environment of numbers": (changed(replicas={"env": {"A": 1}}), ["drafter.replicas.env.A", "expected a string"]),
    "replicas of a colocated drafter": (
        changed(placement="colocated", replicas={"num_replicas": 1}),
        ["drafter.replicas", "placement: colocated", "write placement: remote"],
    ),
    "links of a colocated drafter": (
        changed(placement="colocated", links={}),
        ["drafter.links", "placement: colocated"],
    ),
    "deadline of no time": (changed(links={"min_deadline_ms": 0}), ["drafter.links.min_deadline_ms"]),
    "deadline of ever": (changed(links={"max_deadline_ms": float("inf")}), ["drafter.links.max_deadline_ms"]),
    "deadlines the wrong way round": (
        changed(links={"min_deadline_ms": 2000}),
        ["drafter.links.min_deadline_ms is 2000, above max_deadline_ms, 1000"],
    ),
    "heads of a colocated drafter": (
        changed(placement="colocated", heads_by_workload={"code": "same-shape"}),
        ["drafter.heads_by_workload", "placement: colocated"],
    ),
    "remote EAGLE-3 head": (changed(head="eagle3"), ["drafter.placement", "eagle3 is an EAGLE-3 head", "colocated"]),
    "remote, one after another": (changed(parallel_drafting=False), ["drafter.placement", "one token after another"]),
    "options of the engine's drafter": (
        changed(engine_options={"draft_tensor_parallel_size": 2}),
        ["drafter.engine_options", "draft_tensor_parallel_size", "leave them out"],
    ),
    "pipeline of stages": (
        changed({"engine": {"dtype": "half", "pipeline_parallel_size": 2}}),
        ["engine.pipeline_parallel_size is 2", "tensor_parallel_size"],
    ),
    "type that is left to vLLM": (changed({"engine": {}}), ["engine.dtype is 'auto'", "bfloat16"]),
    "unknown type": (changed({"engine": {"dtype": "fp8"}}), ["engine.dtype is 'fp8'", "bfloat16"]),
    "graphs on a CPU": (
        changed({"target": {"bundle": {"CPU": 1}, "full_graph_depths": [3]}}),
        ["target.full_graph_depths", "a CPU has no CUDA graphs"],
    ),
    "tag with a blank": (changed(heads_by_workload={"a b": "same-shape"}), ["drafter.heads_by_workload", "'a b'"]),
    "unknown head": (
        changed(heads_by_workload={"code": "same-shap"}),
        ["drafter.heads_by_workload.code", "did you mean same-shape"],
    ),
    "head as a list": (changed(heads_by_workload={"code": []}), ["drafter.heads_by_workload.code", "a string"]),
    "head of other layers": (
        changed(heads_by_workload={"code": "other-layers"}),
        ["drafter.heads_by_workload.code", "aux_layer_ids [1, 4, 6]", "[2, 4, 6]"],
    ),
    "head without layers": (changed(heads_by_workload={"code": "unnamed-layers"}), ["aux_layer_ids vLLM's default"]),
    "head of another width": (changed(heads_by_workload={"code": "wider"}), ["hidden_size 128", "64"]),
    "head of another target": (changed(heads_by_workload={"code": "other-target"}), ["target_hidden_size 32"]),
    "head of another vocabulary": (changed(heads_by_workload={"code": "other-vocabulary"}), ["vocab_size 1001"]),
    "head of fewer depths": (
        changed(heads_by_workload={"code": "shallow"}),
        ["drafter.heads_by_workload.code", "3 depths", "drafter.max_draft_tokens, 7"],
    ),
    "EAGLE-3 head of a workload": (
        changed(heads_by_workload={"code": "eagle3"}),
        ["drafter.heads_by_workload.code", "is an EAGLE-3 head"],
    ),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_named_with_its_path_and_remedy(name: str, catalog: Catalog) -> None:
    args, words = BAD_INPUTS[name]
    with pytest.raises(SettingsError) as raised:
        load_settings(args, catalog)
    (problem,) = raised.value.problems
    assert all(word in problem for word in words), problem


def test_tensor_parallel_targets_may_have_a_remote_drafter(catalog: Catalog) -> None:
    engine = {"dtype": "bfloat16", "tensor_parallel_size": 2}
    assert loaded(changed({"engine": engine, "target": {"bundle": {"GPU": 1}}}), catalog).engine == engine


def drafter_of(args: dict[str, Any], catalog: Catalog) -> DrafterSettings:
    drafter = load_settings(args, catalog).drafter
    assert drafter is not None
    return drafter


def test_a_user_config_swaps_heads_and_leaves_the_rest(catalog: Catalog) -> None:
    one = drafter_of(GOOD, catalog)
    assert swapped(one, {}, catalog.heads_dir) == one
    after = swapped(one, {"head": "same-shape"}, catalog.heads_dir)
    assert after == one.model_copy(update={"head": "same-shape"})
    two = drafter_of(changed(heads_by_workload={"code": "same-shape"}), catalog)
    exchanged = swapped(two, {"head": "same-shape", "heads_by_workload": {"code": "shipped-head"}}, catalog.heads_dir)
    assert exchanged.heads == ("same-shape", "shipped-head")


@pytest.mark.parametrize(
    ("user_config", "words"),
    [
        ("same-shape", ["user_config must be a mapping"]),
        ({"haed": "same-shape"}, ["unknown key haed in user_config", "did you mean head"]),
        ({"max_draft_tokens": 3}, ["unknown key max_draft_tokens"]),
        ({"head": 3}, ["user_config.head", "expected a string"]),
        ({"head": "no-head"}, ["drafter.head", "no-head"]),
        ({"head": "shallow"}, ["drafter.max_draft_tokens is 7", "3 depths"]),
        ({"head": "eagle3"}, ["EAGLE-3 head"]),
        ({"head": "other-layers"}, ["aux_layer_ids"]),
        ({"heads_by_workload": {"chat": "same-shape"}}, ["['chat']", "['code']", "deploy anew"]),
        ({"heads_by_workload": {"code": "shipped-head"}}, ["one head that have two"]),
    ],
)
def test_a_user_config_that_cannot_be_is_refused(user_config: Any, words: list[str], catalog: Catalog) -> None:
    drafter = drafter_of(changed(heads_by_workload={"code": "same-shape"}), catalog)
    with pytest.raises(ValueError, match=".") as raised:
        swapped(drafter, user_config, catalog.heads_dir)
    assert all(word in str(raised.value) for word in words), raised.value
