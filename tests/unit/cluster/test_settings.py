"""The schema of `args`: what is accepted and filled in, and each bad input with the words a user needs to mend it."""

import copy
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from cluster.request import ANYONE
from cluster.settings import Catalog, DrafterSettings, SettingsError, load_settings, swapped
from deployments.replicas import settings_with
from peagle.checkpoint import read_head_config
from peagle.schema import read_yaml

HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "ptd_token_id": 999,
    "num_depths": 7,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]},
}
HEADS = {
    "shipped-head": HEAD,
    "same-shape": {**HEAD, "target_hidden_size": 64, "num_depths": 8},
    "shallow": {**HEAD, "num_depths": 3},
    "eagle3": {**HEAD, "ptd_token_id": None, "num_depths": 5},
}
GOOD: dict[str, Any] = {
    "model": {"id": "tiny", "source": "embedded-model"},
    "drafter": {"head": "shipped-head", "placement": "colocated", "max_draft_tokens": 7},
    "num_draft_tokens": {"default": 5, "max": 6, "by_workload": {"code": 6, "chat": 3}},
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
QUEUE = {"policy": "queue_length", "target": {"min": 1, "max": 3}}
DRAFT_TYPES = dict.fromkeys(("draft_tensor_parallel_size", "quantization", "rejection_sample_method"), Any)
ENGINE_TYPES = {
    **dict.fromkeys(
        ("dtype", "load_format", "max_model_len", "max_num_seqs", "speculative_config", "pipeline_parallel_size"), Any
    ),
    "enable_prompt_embeds": bool,
    "enforce_eager": bool,
    "gpu_memory_utilization": Annotated[float, Field(gt=0, le=1)],
    "hf_token": bool | str | None,
    "tensor_parallel_size": int,
    "tool_call_parser": Literal["hermes", "llama3_json"] | None,
    "tool_parser_plugin": str,
}


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    for name, config in HEADS.items():
        write_head(tmp_path / "heads" / name, config)
    return Catalog({"embedded-model"}, tmp_path / "heads", read_head_config, ENGINE_TYPES, DRAFT_TYPES)


def write_head(folder: Path, config: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))


def changed(**paths: Any) -> dict[str, Any]:
    """GOOD with each `section__key=value` set; a value of `...` removes the key."""
    args = copy.deepcopy(GOOD)
    for path, value in paths.items():
        *sections, key = path.split("__")
        place = args
        for section in sections:
            place = place.setdefault(section, {})
        if value is ...:
            del place[key]
        else:
            place[key] = value
    return args


BARE = changed(drafter=..., num_draft_tokens=...)


def remote(**paths: Any) -> dict[str, Any]:
    return changed(drafter__placement="remote", num_draft_tokens=..., **paths)


def scaled(**section: Any) -> dict[str, Any]:
    return changed(target__num_replicas=..., autoscaling={**QUEUE, **section})


def asked(**speculative_config: Any) -> dict[str, Any]:
    return {**BARE, "speculative_config": {**SPECULATIVE_CONFIG, **speculative_config}}


def problems_of(args: Any, catalog: Catalog, env: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(SettingsError) as raised:
        load_settings(args, catalog, env)
    assert all(problem in str(raised.value) for problem in raised.value.problems)
    return raised.value.problems


def drafter_of(args: dict[str, Any], catalog: Catalog) -> DrafterSettings:
    return load_settings(args, catalog).drafter


def test_defaults_come_from_the_head_and_the_source(catalog: Catalog) -> None:
    settings = load_settings({"model": {"source": "org/Model-1B"}, "drafter": {"head": "shipped-head"}}, catalog)
    assert settings.model.id == "Model-1B"
    policy = settings.k_rules()
    assert (policy.max_draft_tokens, policy.max_k, policy.default_k) == (7, 7, 7)


def test_without_a_drafter_nothing_is_drafted(catalog: Catalog) -> None:
    for args in (BARE, changed(drafter=None, num_draft_tokens=...)):
        settings = load_settings(args, catalog)
        assert (settings.drafter, settings.k_rules().max_draft_tokens, settings.max_num_drafters) == (None, 0, 0)


def test_a_directory_becomes_an_absolute_path(catalog: Catalog, tmp_path: Path, monkeypatch) -> None:
    write_head(tmp_path / "checkpoint", {})
    monkeypatch.chdir(tmp_path)
    settings = load_settings(changed(model__source="./checkpoint", model__id=...), catalog)
    assert settings.model.source == str(tmp_path / "checkpoint")
    assert settings.model.id == "checkpoint"


BAD_INPUTS: list[tuple[Any, ...]] = [
    (changed(num_draft_tokens__defualt=5), "num_draft_tokens.defualt", "did you mean default"),
    (changed(num_cpus=1), "unknown key num_cpus. Valid keys here: model,"),
    (changed(engine__max_modl_len=5), "engine.max_modl_len", "did you mean max_model_len"),
    (changed(engine__speculative_config={}), "engine.speculative_config", "set drafter"),
    (changed(engine__max_model_len=0), "engine.max_model_len", "from 1"),
    (changed(engine__max_num_seqs="8"), "engine.max_num_seqs must be an integer from 1, not '8'"),
    (changed(modle={"source": "x"}), "modle", "did you mean model"),
    (changed(drafter__num_draft_tokens=5), "drafter.num_draft_tokens", "max_draft_tokens"),
    (changed(num_draft_tokens=None), "num_draft_tokens must be a mapping, such as {policy: ...}, not None"),
    (changed(model="org/x"), "model must be a mapping, such as {source: ...}, not 'org/x'"),
    (changed(engine=None), "engine: Input should be a mapping, not None"),
    (remote(drafter__num_replicas=2), "unknown key drafter.num_replicas; did you mean drafter.replicas.num_replicas?"),
    (changed(max_draft_tokens=7), "unknown key max_draft_tokens; did you mean drafter.max_draft_tokens?"),
    (changed(engine__api_key=["sk"]), "engine.api_key is not yours to set: set callers"),
    (changed(engine__sse_keep_alive_interval=5), "engine.sse_keep_alive_interval is not yours to set: only the server"),
    (changed(target__num_cpus=float("inf")), "target.num_cpus: Input should be a finite number"),
    (changed(target={"bundle": {"CPU": -1}}), "target.bundle.CPU: Input should be greater than or equal to 0"),
    (changed(target={"bundle": {"GPU": float("nan")}}), "target.bundle.GPU: Input should be"),
    (remote(drafter__replicas={"cache_gib": float("inf")}), "drafter.replicas.cache_gib: Input should be a finite"),
    (changed(model__source="~nosuchuser/x"), "model.source: '~nosuchuser/x' is no embedded model, no directory"),
    (changed(target={"bundle": {"GPU": 0.5}}, engine__tensor_parallel_size=4), "target.bundle has GPU: 0.5", "GPU: 1"),
    (changed(model__source=...), "missing key model.source"),
    (changed(num_draft_tokens__objectives={"a b": {}}), "num_draft_tokens.objectives.a b", "'a b'"),
    (changed(model__aliases={"coder": "a b"}), "model.aliases.coder", "'a b'"),
    (changed(engine__gpu_memory_utilization=90), "gpu_memory_utilization: Input should be less", "not 90"),
    (changed(engine__hf_token=[1]), "engine.hf_token: Input should be a valid boolean or a valid string"),
    (changed(engine__tool_call_parser="hermess"), "'llama3_json', not 'hermess'; did you mean hermes?"),
    (changed(num_draft_tokens__default="5"), "num_draft_tokens.default: Input should be a valid integer, not '5'"),
    (changed(model=...), "missing key model"),
    (changed(model__source="embeded-model"), "model.source", "did you mean embedded-model"),
    (changed(drafter__head="no-such-head"), "drafter.head", "no-such-head", "shipped-head"),
    (changed(drafter__head=...), "missing key drafter.head"),
    (changed(drafter__max_draft_tokens=8), "drafter.max_draft_tokens is 8", "7 depths"),
    (changed(num_draft_tokens__max=8), "num_draft_tokens.max is 8", "drafter.max_draft_tokens, 7"),
    (changed(num_draft_tokens__default=7), "num_draft_tokens.default is 7", "num_draft_tokens.max, 6"),
    (changed(num_draft_tokens__by_workload={"code": 9}), "num_draft_tokens.by_workload.code is 9", "0..6"),
    (changed(num_draft_tokens__by_workload={"a b": 1}), "num_draft_tokens.by_workload", "'a b'"),
    (
        changed(num_draft_tokens={"policy": "fixed", "objectives": {"chat": {}}}),
        "write num_draft_tokens.policy: adaptive",
    ),
    (
        changed(num_draft_tokens__objectives={"chat": {}}),
        "num_draft_tokens.by_workload pins K of chat",
        "num_draft_tokens.objectives.chat",
    ),
    (changed(model__aliases={"tiny": "code"}), "model.aliases", "'tiny'", "another name"),
    (changed(model__aliases={"a b": "code"}), "model.aliases", "'a b'"),
    (changed(callers={"web": {**KEY, "max_k": 7}}), "callers.web.max_k is 7", "0..6"),
    (changed(drafter=..., num_draft_tokens=..., callers={"web": {**KEY, "max_k": 3}}), "callers.web.max_k is 3"),
    (changed(target={"bundle": {"GPU": 2}}), "target.bundle", "write GPU: 1, and engine.tensor_parallel_size"),
    (changed(target={"bundle": {"gpu": 1}}), "target.bundle", "'gpu': write GPU"),
    (changed(target={"bundle": {"GPUs": 1}}), "target.bundle", "'GPUs': write GPU"),
    (
        changed(ingress={"num_cpus": "2 cores"}),
        "ingress.num_cpus",
        "not '2 cores': write the number alone, in the unit of the key",
    ),
    (changed(limits={"grammar_timeout_s": float("inf")}), "limits.grammar_timeout_s"),
    (changed(limits={"max_body_bytes": 10, "max_body_bytes_in_flight": 19}), "limits.max_body_bytes_in_flight is 19"),
    (changed(drafter=None), "num_draft_tokens has no meaning without a drafter"),
    (remote(drafter__replicas={"max_num_requests": 8}), "drafter.replicas.max_num_requests is no setting"),
    (changed(drafter__replicas={"num_replicas": 1}), "placement: colocated", "write placement: remote"),
    (changed(drafter__links={}), "drafter.links", "placement: colocated"),
    (remote(drafter__head="eagle3", drafter__max_draft_tokens=...), "drafter.head: eagle3 is an EAGLE-3 head"),
    (remote(drafter__engine_options={"draft_tensor_parallel_size": 2}), "(draft_tensor_parallel_size)"),
    (changed(drafter__engine_options={"enable_adaptive_verification": True}), "drafter.engine_options.enable_adaptive"),
    (remote(engine={"dtype": "half", "pipeline_parallel_size": 2}), "engine.pipeline_parallel_size is 2"),
    (remote(engine={"dtype": "half", "enable_prompt_embeds": True}), "engine.enable_prompt_embeds does not go with"),
    (remote(engine={"dtype": "fp8"}), "engine.dtype is 'fp8'", "bfloat16"),
    (changed(learning={"workloads": "all"}), "learning needs heads that can be swapped", "drafter.placement: remote"),
    (remote(learning={"workloads": "all"}), "learning needs room", "drafter.spare_heads: 1"),
    (changed(ingress={"num_replicas": 2}), "ingress.num_replicas is no setting any more", "target.num_replicas"),
    (remote(drafter__spare_heads=1, learning={}), "learning.workloads is missing", "learn: true"),
    (remote(drafter__spare_heads=1, learning={"workloads": ["a b"]}), "learning.workloads has the tag 'a b'"),
    (scaled(target={"min": 4, "max": 3}), "autoscaling.target.min is 4, above max, 3"),
    (scaled(drafter={"min": 0, "max": 3}), "autoscaling.drafter.min is 0"),
    (changed(target={"num_gpus": 2}), "unknown key target.num_gpus: write target.bundle: {GPU: 1}"),
    (changed(drafter__num_speculative_tokens=3), "drafter.num_speculative_tokens: write drafter.max_draft_tokens"),
    (scaled(min_replicas=1), "unknown key autoscaling.min_replicas: write autoscaling.target: {min: 1, max: 4}"),
    (scaled(scale_to_zero=True), "autoscaling.scale_to_zero is no setting any more: write target: {min: 0}"),
    (scaled(drafter={"min": 1, "max": 2}), "autoscaling.drafter bounds a remote drafter"),
    (scaled(downscale_delay_s=20), "autoscaling.downscale_delay_s is 20: it must be more than 30"),
    (scaled(policy="acceptance"), "needs engine.max_num_seqs"),
    (changed(autoscaling=QUEUE), "target.num_replicas fixes what autoscaling decides"),
    (changed(drafter={"method": "dflash", "max_draft_tokens": 7}), "drafter.head"),
    (changed(drafter={"method": "dflash", "head": "org/head"}), "drafter.max_draft_tokens is missing: with method"),
    (changed(drafter={"method": "mtp", "head": "a/b", "max_draft_tokens": 6}), "has no files of its own: leave it out"),
    (remote(drafter__method="eagle", drafter__head="org/head"), "drafter.placement: remote is for P-EAGLE heads"),
    (asked(method="medusa"), "medusa"),
    (asked(draft_tensor_parallel_sise=1), "unknown key drafter.engine_options.draft_tensor_parallel_sise: vLLM's"),
    (asked(tensor_parallel_size=1), "tensor_parallel_size is not yours to set: set draft_tensor_parallel_size"),
    (asked(num_speculative_tokens_per_batch_size=[[1, 8, 3]]), "each request has its own K"),
    (asked(rejection_sample_method="block"), "is 'block', but must be standard or synthetic here"),
    (asked(quantization="mxfp4"), "quantization is 'mxfp4', but must be fp8 here"),
    (asked(model=None), "missing key speculative_config.model"),
    (asked(num_speculative_tokens="x"), "drafter.max_draft_tokens"),
    ({**GOOD, "speculative_config": SPECULATIVE_CONFIG}, "speculative_config", "contradict"),
    (changed(drafter__engine_options={"model": "other"}), "engine_options.model is not yours to set"),
    (remote(autoscaling=QUEUE, target__num_replicas=...), "autoscaling.drafter is missing"),
    (changed(drafter={"head": "amazon/some-p-eagle-head"}), "drafter.max_draft_tokens is missing"),
]


@pytest.mark.parametrize("case", BAD_INPUTS, ids=lambda case: case[1])
def test_bad_input_is_named_with_its_path_and_remedy(case: Any, catalog: Catalog) -> None:
    args, *words = case
    (problem,) = problems_of(args, catalog)
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    ("workloads", "callers", "learned"),
    [
        ("all", None, {("anyone", "chat"), ("anyone", "code")}),
        (["code"], None, {("anyone", "code")}),
        (None, {"web": {**KEY, "learn": True}}, {("web", "chat"), ("web", "code")}),
        ("all", {"web": KEY}, set()),
        (["code"], {"web": {**KEY, "learn": True}}, {("web", "code")}),
    ],
)
def test_nobody_is_learned_from_who_did_not_opt_in(
    workloads: Any, callers: Any, learned: set[tuple[str, str]], catalog: Catalog
) -> None:
    args = remote(drafter__spare_heads=1, learning={"workloads": workloads})
    settings = load_settings({**args, **({"callers": callers} if callers else {})}, catalog)
    asking = [ANYONE, *(section.caller(name) for name, section in (settings.callers or {}).items())]
    tags = ("chat", "code")
    assert {(one.name, tag) for one in asking for tag in tags if settings.learns_from(one, tag)} == learned


def test_one_message_lists_every_problem(catalog: Catalog) -> None:
    args = changed(
        model__source="nope", drafter__head="nope", num_draft_tokens__colour="red", engine__scheduler_cls="a.B"
    )
    text = "\n".join(problems_of(args, catalog))
    assert all(
        word in text for word in ("model.source", "drafter.head", "num_draft_tokens.colour", "engine.scheduler_cls")
    )


def test_an_eagle3_head_drafts_one_after_another(catalog: Catalog) -> None:
    drafter = drafter_of(changed(drafter={"head": "eagle3"}, num_draft_tokens=...), catalog)
    assert drafter.max_draft_tokens == 5
    given = {"method": "eagle3", "model": "eagle3", "num_speculative_tokens": 4}
    assert drafter_of({**BARE, "speculative_config": given}, catalog).max_draft_tokens == 4


def test_vllms_other_drafters_are_passed_on_unread(catalog: Catalog) -> None:
    args = changed(drafter={"method": "dflash", "head": "org/some-dflash-head", "max_draft_tokens": 7})
    drafter = drafter_of(args, catalog)
    assert (drafter.method, drafter.head, drafter.max_draft_tokens) == ("dflash", "org/some-dflash-head", 7)
    given = {"method": "dflash", "model": "org/some-dflash-head", "num_speculative_tokens": 7}
    assert drafter_of({**changed(drafter=...), "speculative_config": given}, catalog) == drafter
    without_head = {"method": "mtp", "num_speculative_tokens": 1}
    assert (
        drafter_of({**changed(drafter=..., num_draft_tokens=...), "speculative_config": without_head}, catalog).head
        == ""
    )


def test_checkpoints_in_object_stores_are_streamed(catalog: Catalog) -> None:
    drafter = {"head": "gs://bucket/head", "max_draft_tokens": 7}
    args = changed(model={"source": "s3://bucket/my-model"}, drafter=drafter)
    settings = load_settings({**args, "engine": {"load_format": "runai_streamer"}}, catalog)
    assert (settings.model.source, settings.model.id) == ("s3://bucket/my-model", "my-model")
    assert settings.drafter.head == "gs://bucket/head"
    for engine in ({}, {"load_format": "auto"}):
        with pytest.raises(SettingsError, match="but model.source is in an object store: write runai_streamer or"):
            load_settings({**args, "engine": engine}, catalog)


def test_vllms_speculative_config_stands_for_the_drafter(catalog: Catalog) -> None:
    from_args = load_settings(asked(), catalog)
    env = {"SM_VLLM_SPECULATIVE_CONFIG": json.dumps(SPECULATIVE_CONFIG)}
    assert load_settings(BARE, catalog, env) == load_settings(asked(), catalog, env) == from_args
    assert from_args.drafter.head == "amazon/some-p-eagle-head"
    assert from_args.k_rules().default_k == 5
    # A config file of vLLM's own has it as JSON in a string.
    assert load_settings({**BARE, "speculative_config": json.dumps(SPECULATIVE_CONFIG)}, catalog) == from_args
    drafter = drafter_of(asked(draft_tensor_parallel_size=1), catalog)
    assert drafter.engine_options == {"draft_tensor_parallel_size": 1}


@pytest.mark.parametrize(
    ("args", "in_env", "words"),
    [
        (GOOD, json.dumps(SPECULATIVE_CONFIG), "contradict"),
        (BARE, "{", "is not JSON"),
        (BARE, "3", "must be an object"),
    ],
)
def test_a_wrong_drafter_in_the_environment_is_named(args: Any, in_env: str, words: str, catalog: Catalog) -> None:
    (problem,) = problems_of(args, catalog, {"SM_VLLM_SPECULATIVE_CONFIG": in_env})
    assert words in problem


# ---- a remote drafter


def test_a_user_config_swaps_the_head_and_leaves_the_rest(catalog: Catalog) -> None:
    drafter = drafter_of(remote(), catalog)
    assert swapped(drafter, {}, catalog) == drafter
    assert swapped(drafter, {"head": "same-shape"}, catalog) == drafter.model_copy(update={"head": "same-shape"})


@pytest.mark.parametrize(
    ("user_config", "said"),
    [
        ("same-shape", "user_config must be a mapping"),
        ({"haed": "same-shape"}, "unknown key haed in user_config.*did you mean head"),
        ({"head": "no-head"}, "user_config.head.*no-head"),
        ({"head": "shallow"}, "max_draft_tokens is 7.*3 depths"),
        ({"head": "eagle3"}, "user_config.head: eagle3 is an EAGLE-3 head.* live swaps take P-EAGLE heads"),
    ],
)
def test_a_user_config_that_cannot_be_is_refused(user_config: Any, said: str, catalog: Catalog) -> None:
    drafter = drafter_of(remote(), catalog)
    with pytest.raises(ValueError, match=said):
        swapped(drafter, user_config, catalog)


BAD_LIVE: dict[str, Any] = {
    "user_config must be a mapping with aliases, num_draft_tokens, limits and callers, not 'limits'": "limits",
    "unknown key user_config.limit; did you mean limits?": {"limit": {}},
    "user_config.aliases.coder: Input should be a valid string": {"aliases": {"coder": 3}},
    "user_config.limits.max_num_sequences: Input should be greater": {"limits": {"max_num_sequences": 0}},
    "user_config.callers.web.max_k: Input should be greater": {"callers": {"web": {**KEY, "max_k": -1}}},
    "unknown key user_config.engine": {"engine": {"max_num_seqs": 8}},
    "user_config.callers is empty": {"callers": {}},
    "user_config.depth is no setting any more: its keys stand under num_draft_tokens": {"depth": {"max": 3}},
}


@pytest.mark.parametrize("said", BAD_LIVE)
def test_live_settings_that_cannot_be_leave_a_running_service_as_it_was(said: str, catalog: Catalog, caplog) -> None:
    settings = load_settings(GOOD, catalog)
    assert settings_with(settings, BAD_LIVE[said]) is settings
    (record,) = [record for record in caplog.records if record.name == "deployments.replicas"]
    assert said in record.getMessage()


# ---- YAML files of users: what PyYAML reads, but for a key that stands twice


@pytest.mark.parametrize("text", ["a: 1\na: 2", "a: [{b: 1, b: 2}]", "a: &m {b: 1, b: 2}\nc: {<<: *m}"])
def test_a_key_that_stands_twice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="file.yaml is not YAML: the key [ab] stands twice"):
        read_yaml(text, "file.yaml")


def test_a_merge_may_be_overridden_and_merged_again() -> None:
    text = "a: &a {x: 1}\nb: {c: &c {<<: *a, x: 2}}\nd: {<<: *c, y: 3}\ne: {<<: *a, <<: *c}"
    assert read_yaml(text, "file.yaml")["b"] == {"c": {"x": 2}}
