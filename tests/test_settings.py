"""The schema of `args`: what is accepted, and each bad input with the words a user needs to mend it."""

import copy
import json
import re
from pathlib import Path

import pytest
import yaml

from cluster.settings import Catalog, ClusterSettings, SettingsError, load_settings

HEAD = {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 49151, "num_depths": 7}
GOOD = {
    "model": {"id": "tiny", "source": "embedded-model"},
    "drafter": {"head": "shipped-head", "placement": "colocated", "max_draft_tokens": 7},
    "depth": {"default": 5, "max": 6, "by_workload": {"code": 6, "chat": 3}},
    "engine": {"dtype": "float32", "max_model_len": 2048},
    "target": {"num_replicas": 1, "num_cpus": 0.1, "bundle": {"CPU": 1}},
}
KEY = {"key_sha256": "ab" * 32}
SPECULATIVE_CONFIG = {
    "method": "eagle3",
    "model": "amazon/some-p-eagle-head",
    "num_speculative_tokens": 5,
    "parallel_drafting": True,
}


@pytest.fixture
def catalog(tmp_path):
    head = tmp_path / "heads" / "shipped-head"
    head.mkdir(parents=True)
    (head / "config.json").write_text(json.dumps(HEAD))
    return Catalog(
        {"embedded-model"}, tmp_path / "heads", {"dtype", "max_model_len", "max_num_seqs", "speculative_config"}
    )


def changed(**paths):
    """GOOD with each `section__key=value` set; a value of `...` removes the key."""
    args = copy.deepcopy(GOOD)
    for path, value in paths.items():
        *sections, key = path.split("__")
        place = args
        for section in sections:
            place = place[section]
        if value is ...:
            del place[key]
        else:
            place[key] = value
    return args


def problems_of(args, catalog, env=None):
    with pytest.raises(SettingsError) as raised:
        load_settings(args, catalog, env)
    assert all(problem in str(raised.value) for problem in raised.value.problems)
    return raised.value.problems


def test_good_settings_give_the_policy_they_say(catalog):
    settings = load_settings(GOOD, catalog)
    assert isinstance(settings, ClusterSettings)
    policy = settings.depth_policy()
    assert (policy.max_draft_tokens, policy.max_depth, policy.default_depth) == (7, 6, 5)
    assert policy.by_workload == {"code": 6, "chat": 3}


def test_defaults_come_from_the_head_and_the_source(catalog):
    settings = load_settings({"model": {"source": "org/Model-1B"}, "drafter": {"head": "shipped-head"}}, catalog)
    assert settings.model.id == "Model-1B"
    policy = settings.depth_policy()
    assert (policy.max_draft_tokens, policy.max_depth, policy.default_depth) == (7, 7, 7)


def test_what_the_operator_names_is_known_from_the_start(catalog):
    args = changed(model__aliases={"tiny-docs": "docs"}, callers={"web": {**KEY, "workload": "pages", "max_depth": 6}})
    settings = load_settings(args, catalog)
    assert settings.named_workloads() == {"code", "chat", "docs", "pages"}
    assert load_settings(GOOD, catalog).named_workloads() == {"code", "chat"}
    wanted = changed(depth__policy="adaptive", depth__objectives={"agents": {"kind": "latency"}})
    assert load_settings(wanted, catalog).named_workloads() == {"code", "chat", "agents"}
    assert load_settings(GOOD, catalog).caller_table() is None


def test_without_a_drafter_nothing_is_drafted(catalog):
    for args in (changed(drafter=..., depth=...), changed(drafter=None, depth=...)):
        settings = load_settings(args, catalog)
        assert settings.drafter is None
        assert settings.depth_policy().max_draft_tokens == 0


def test_a_directory_becomes_an_absolute_path(catalog, tmp_path, monkeypatch):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    settings = load_settings(changed(model__source="./checkpoint", model__id=...), catalog)
    assert settings.model.source == str(tmp_path / "checkpoint")
    assert settings.model.id == "checkpoint"


BAD_INPUTS = {
    "unknown section": (changed(modle={"source": "x"}), ["modle", "did you mean model"]),
    "unknown key": (changed(depth__defualt=5), ["depth.defualt", "did you mean default"]),
    "key of another section": (changed(num_cpus=1), ["num_cpus", "target.num_cpus"]),
    "unknown drafter key": (changed(drafter__num_draft_tokens=5), ["drafter.num_draft_tokens", "max_draft_tokens"]),
    "unknown engine key": (changed(engine__max_modl_len=5), ["engine.max_modl_len", "did you mean max_model_len"]),
    "engine key we own": (changed(engine__speculative_config={}), ["engine.speculative_config", "set drafter"]),
    "engine scheduler": (changed(engine__scheduler_cls="x.Y"), ["engine.scheduler_cls", "cannot be replaced"]),
    "engine model": (changed(engine__model="x"), ["engine.model", "model.source"]),
    "context of no tokens": (changed(engine__max_model_len=0), ["engine.max_model_len", "from 1"]),
    "no number of requests": (changed(engine__max_num_seqs=None), ["engine.max_num_seqs", "from 1", "None"]),
    "requests as text": (changed(engine__max_num_seqs="8"), ["engine.max_num_seqs", "number of requests", "'8'"]),
    "context as text": (changed(engine__max_model_len="2k"), ["engine.max_model_len", "'2k'"]),
    "engine as a list": (changed(engine=[1]), ["engine must be a mapping"]),
    "string for a number": (changed(depth__default="5"), ["depth.default", "expected an integer", "the string '5'"]),
    "truth value for a number": (changed(depth__default=True), ["depth.default", "expected an integer"]),
    "float for a count": (changed(target__num_replicas=1.5), ["target.num_replicas", "expected an integer"]),
    "number for a string": (changed(model__source=3), ["model.source", "expected a string"]),
    "string for a section": (changed(model="embedded-model"), ["model", "expected a mapping"]),
    "null for a section": (changed(depth=None), ["depth", "expected a mapping"]),
    "no model": (changed(model=...), ["missing key model"]),
    "no model source": (changed(model__source=...), ["missing key model.source"]),
    "unknown model": (changed(model__source="embeded-model"), ["model.source", "did you mean embedded-model"]),
    "missing model directory": (changed(model__source="/no/such/dir"), ["model.source", "'/no/such/dir'"]),
    "no replicas": (changed(target__num_replicas=0), ["target.num_replicas", "at least 1"]),
    "bad bundle": (changed(target__bundle={"CPU": "one"}), ["target.bundle.CPU", "expected a number"]),
    "missing head": (changed(drafter__head="no-such-head"), ["drafter.head", "no-such-head", "shipped-head"]),
    "no head": (changed(drafter__head=...), ["missing key drafter.head"]),
    "unknown placement": (changed(drafter__placement="far"), ["drafter.placement", "'colocated' or 'remote'"]),
    "K_max above the head's": (changed(drafter__max_draft_tokens=8), ["drafter.max_draft_tokens is 8", "7 depths"]),
    "K_max of nothing": (changed(drafter__max_draft_tokens=0), ["drafter.max_draft_tokens", "at least 1"]),
    "limit above K_max": (changed(depth__max=8), ["depth.max is 8", "drafter.max_draft_tokens, 7"]),
    "default above the limit": (changed(depth__default=7), ["depth.default is 7", "depth.max, 6"]),
    "negative default": (changed(depth__default=-1), ["depth.default", "at least 0"]),
    "workload above the limit": (changed(depth__by_workload={"code": 9}), ["depth.by_workload.code is 9", "0..6"]),
    "workload below zero": (changed(depth__by_workload={"code": -1}), ["depth.by_workload.code is -1", "0..6"]),
    "workload that is no tag": (changed(depth__by_workload={"a b": 1}), ["'a b'"]),
    "workload of a wrong type": (changed(depth__by_workload={"code": "x"}), ["depth.by_workload.code", "an integer"]),
    "alias that is the model": (changed(model__aliases={"tiny": "code"}), ["model.aliases", "'tiny'", "another name"]),
    "alias with a blank": (changed(model__aliases={"a b": "code"}), ["model.aliases", "'a b'"]),
    "alias of no workload": (changed(model__aliases={"coder": "a b"}), ["model.aliases.coder", "'a b'"]),
    "alias of a wrong type": (changed(model__aliases={"coder": 3}), ["model.aliases.coder", "expected a string"]),
    "aliases as a list": (changed(model__aliases=["coder"]), ["model.aliases", "expected a mapping"]),
    "caller above the limit": (
        changed(callers={"web": {**KEY, "max_depth": 7}}),
        ["callers.web.max_depth is 7", "0..6"],
    ),
    "caller above K_max": (
        changed(depth=..., callers={"web": {**KEY, "max_depth": 8}}),
        ["callers.web.max_depth is 8", "0..7"],
    ),
    "caller's K without a drafter": (
        changed(drafter=..., depth=..., callers={"web": {**KEY, "max_depth": 3}}),
        ["callers.web.max_depth is 3", "without a drafter"],
    ),
    "misspelt callers": (changed(caller={"web": KEY}), ["unknown key caller", "did you mean callers"]),
    "depth without a drafter": (changed(drafter=None), ["depth has no meaning without a drafter"]),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_named_with_its_path_and_remedy(name, catalog):
    args, words = BAD_INPUTS[name]
    problems = problems_of(args, catalog)
    assert len(problems) == 1, problems
    assert all(word in problems[0] for word in words), problems[0]


@pytest.mark.parametrize("args", [None, [], "embedded-model", 3])
def test_args_that_are_no_mapping(args, catalog):
    assert "mapping" in problems_of(args, catalog)[0]


def test_one_message_lists_every_problem(catalog):
    args = changed(model__source="nope", drafter__head="nope", depth__colour="red", engine__scheduler_cls="a.B")
    text = "\n".join(problems_of(args, catalog))
    assert all(word in text for word in ("model.source", "drafter.head", "depth.colour", "engine.scheduler_cls"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "no JSON object"),
        (json.dumps({**HEAD, "architectures": ["LlamaForCausalLM"]}), "no EAGLE-3 head"),
    ],
)
def test_a_directory_that_is_no_head(content, words, catalog, tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(content)
    (problem,) = problems_of(changed(drafter__head=str(tmp_path / "head")), catalog)
    assert "drafter.head" in problem
    assert words in problem


def test_an_eagle3_head_drafts_one_after_another(catalog, tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps({**HEAD, "ptd_token_id": None, "num_depths": 5}))
    args = changed(drafter={"head": str(tmp_path / "head")}, depth=...)
    settings = load_settings(args, catalog)
    assert (settings.max_draft_tokens, settings.drafter.parallel_drafting) == (5, None)
    given = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 4}
    by_vllm_keys = load_settings({**changed(drafter=..., depth=...), "speculative_config": given}, catalog)
    assert (by_vllm_keys.max_draft_tokens, by_vllm_keys.drafter.parallel_drafting) == (4, False)


@pytest.mark.parametrize(
    ("mask_token", "given", "words"),
    [(None, True, "EAGLE-3 head.*write false"), (3, False, "P-EAGLE head.*write true")],
)
def test_a_way_of_drafting_that_is_not_the_heads(mask_token, given, words, catalog, tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps({**HEAD, "ptd_token_id": mask_token}))
    args = changed(drafter={"head": str(tmp_path / "head"), "parallel_drafting": given}, depth=...)
    (problem,) = problems_of(args, catalog)
    assert re.search(f"drafter.parallel_drafting is {str(given).lower()}.*{words}", problem)


def test_a_head_that_is_not_here_yet_needs_its_k_max(catalog):
    args = changed(drafter={"head": "amazon/some-p-eagle-head"})
    assert "missing key drafter.max_draft_tokens" in problems_of(args, catalog)[0]
    args["drafter"]["max_draft_tokens"] = 7
    assert load_settings(args, catalog).max_draft_tokens == 7


def test_vllms_speculative_config_stands_for_the_drafter(catalog):
    bare = changed(drafter=..., depth=...)
    from_args = load_settings({**bare, "speculative_config": SPECULATIVE_CONFIG}, catalog)
    env = {"SM_VLLM_SPECULATIVE_CONFIG": json.dumps(SPECULATIVE_CONFIG)}
    assert load_settings(bare, catalog, env) == from_args
    assert load_settings({**bare, "speculative_config": SPECULATIVE_CONFIG}, catalog, env) == from_args
    assert (from_args.drafter.head, from_args.drafter.parallel_drafting) == ("amazon/some-p-eagle-head", True)
    assert from_args.depth_policy().default_depth == 5
    further = {**SPECULATIVE_CONFIG, "draft_tensor_parallel_size": 1}
    options = load_settings({**bare, "speculative_config": further}, catalog).drafter.engine_options
    assert options == {"draft_tensor_parallel_size": 1}


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        ({**GOOD, "speculative_config": SPECULATIVE_CONFIG}, {}, "contradict"),
        (GOOD, {"SM_VLLM_SPECULATIVE_CONFIG": json.dumps(SPECULATIVE_CONFIG)}, "contradict"),
        (changed(drafter=..., depth=...), {"SM_VLLM_SPECULATIVE_CONFIG": "{"}, "is not JSON"),
        (changed(drafter=..., depth=...), {"SM_VLLM_SPECULATIVE_CONFIG": "[]"}, "must be an object"),
        (changed(drafter=..., depth=..., speculative_config={**SPECULATIVE_CONFIG, "method": "ngram"}), {}, "ngram"),
        (
            changed(
                drafter=...,
                depth=...,
                speculative_config={**SPECULATIVE_CONFIG, "parallel_drafting": "sometimes"},
            ),
            {},
            "drafter.parallel_drafting",
        ),
        (
            changed(
                drafter=...,
                depth=...,
                speculative_config={"method": "eagle3", "parallel_drafting": True, "num_speculative_tokens": 3},
            ),
            {},
            "missing key speculative_config.model",
        ),
        (
            changed(drafter=..., depth=..., speculative_config={**SPECULATIVE_CONFIG, "num_speculative_tokens": "x"}),
            {},
            "drafter.max_draft_tokens",
        ),
    ],
)
def test_bad_speculative_config(args, env, words, catalog):
    assert any(words in problem for problem in problems_of(args, catalog, env))


ROOT = Path(__file__).parents[1]
SERVICES = {
    path.name: document["applications"]
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    if "applications" in (document := yaml.safe_load(path.read_text()))
}


@pytest.mark.parametrize("name", SERVICES)
def test_every_shipped_service_config_fits_the_schema(name):
    (application,) = SERVICES[name]
    settings = load_settings(application["args"], Catalog({"smollm2-135m-instruct"}, ROOT / "peagle" / "heads"))
    assert settings.max_draft_tokens > 0
