"""The settings of a served cluster: what stands under `args` in a YAML of `configs/`.

Enters: a raw mapping, the environment, and a `Catalog` of what exists on this machine. Leaves: `ClusterSettings` with
every default filled in, or one `SettingsError` that lists all problems, each with its path and what to write instead.

Every section is a strict pydantic model (`peagle.schema`). Validators check what the types cannot: the fields of
`ClusterSettings` stand in the order in which their validators need each other. Counts are `num_*`, limits `max_*`, CPUs
are Ray's logical CPUs.
"""

import json
import math
import os
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from cluster.request import Caller, Callers, KRules, TagRight, hash_key, is_workload_tag
from peagle.schema import Section, SettingsError, listed, nearest, type_problems

SPECULATIVE_CONFIG_ENV = "SM_VLLM_SPECULATIVE_CONFIG"
"""The environment variable by which SageMaker hands over vLLM's speculative_config, as JSON."""

OWNED_ENGINE_KEYS = {
    "model": "set model.source",
    "served_model_name": "set model.id",
    "speculative_config": "set drafter, or put speculative_config beside engine",
    "spec_method": "set drafter",
    "spec_model": "set drafter.head",
    "spec_tokens": "set drafter.max_draft_tokens",
    "num_speculative_tokens": "set drafter.max_draft_tokens",
    "scheduler_cls": "the target's scheduler verifies at most K drafts of each request and cannot be replaced here",
    "async_scheduling": "on for GPUs, off for CPUs, where vLLM does not support it",
    "worker_cls": "the target's worker cannot be replaced here",
    "distributed_executor_backend": "it follows from target.bundle",
    "per_request_spec_decode_metrics": "acceptance is always recorded for each request",
    "disable_log_stats": "acceptance is counted from the engine's statistics",
    "data_parallel_size": "set target.num_replicas",
    "api_key": "set callers",
    "host": "set http_options.host",
    "port": "set http_options.port",
    "root_path": "set route_prefix of the application",
    "allowed_origins": "set ingress.allow_origins",
    "ssl_certfile": "put a proxy or an Ingress with TLS in front",
    "lora_modules": "adapters are not served: serve the merged model",
    "enable_scale_out": "only the server of vllm serve reads it",
    "enable_server_load_tracking": "only the server of vllm serve reads it",
    "enable_tokenizer_info_endpoint": "only the server of vllm serve reads it",
    "sse_keep_alive_interval": "only the server of vllm serve reads it",
}
"""Engine arguments, and those of `vllm serve`, that cannot be set, each with what to do instead."""

COUNTED = (
    "max_model_len", "max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size", "max_num_batched_tokens",
    "block_size", "num_gpu_blocks_override", "kv_cache_memory_bytes",
)  # fmt: skip
"""Engine arguments that are read here too, or whose bounds do not stand beside them in vLLM's source."""

PARSER_PLUGINS = {"tool_call_parser": "tool_parser_plugin", "reasoning_parser": "reasoning_parser_plugin"}
"""Engine arguments that name one of vLLM's own parsers, where no file of other parsers is given."""

OWNED_DRAFT_KEYS = {
    "model": "set drafter.head",
    "method": "set drafter.method",
    "num_speculative_tokens": "set drafter.max_draft_tokens",
    "parallel_drafting": "the head's file says it: leave it out",
    "tensor_parallel_size": "set draft_tensor_parallel_size, as in vLLM",
    "num_speculative_tokens_per_batch_size": "each request has its own K, which follows the load: see num_draft_tokens",
    "enable_adaptive_verification": "the engine's own rule chooses the drafts of a step: leave it out",
}
"""Keys of vLLM's speculative_config that cannot be set in drafter.engine_options, each with what to do instead."""

ONLY_DRAFT_VALUES = {
    "draft_sample_method": ("greedy",),
    "rejection_sample_method": ("standard", "synthetic"),
    "quantization": ("fp8",),
}
"""Keys of which other values are refused: K is learned from drafts that are greedy and rejected one by one, and heads
are stored in bfloat16, of which vLLM makes FP8 as it loads them."""

METHODS_WITHOUT_HEAD = ("mtp", "ngram")
"""Methods without files of their own: the target's checkpoint has the layers, or the text is enough."""

VERIFICATION_KEYS = ("rejection_sample_method", "synthetic_acceptance_length", "synthetic_acceptance_rates")
"""Keys of verification, which the target's engine does wherever the drafter runs."""

ROW_DTYPES = {"float32": "float32", "float": "float32", "float16": "float16", "half": "float16", "bfloat16": "bfloat16"}
"""vLLM's names of data types, and the names in the remote drafter's protocol."""

DEFAULT_MAX_NUM_SEQS = 256
"""Sequences that an engine runs at a time where `engine.max_num_seqs` does not say."""

OBJECT_STORES = ("s3://", "gs://", "az://")
STREAMED_FORMATS = ("runai_streamer", "runai_streamer_sharded")
"""Where checkpoints may be that vLLM streams, and `engine.load_format` by which it does."""

_HUGGING_FACE_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TAG_RULE = "1 to 64 letters, digits or . _ : - starting with a letter or digit"


def _check_tag(tag: str) -> str:
    if not is_workload_tag(tag):
        raise ValueError(f" is {tag!r:.80}: a workload is {_TAG_RULE}")
    return tag


Tag = Annotated[str, AfterValidator(_check_tag)]

Count = Annotated[int, Field(ge=1)]
Finite = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Delay = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_KEY_RULE = (
    "write key_sha256 (printf %s KEY | sha256sum), or key_env, the name of an environment variable that holds it, or "
    "key_file, a file that does"
)
KEY_SETTINGS = ("key_sha256", "key_env", "key_file")
_KEY = re.compile(r"[!-~]+")  # what a header carries unchanged


# ---- what exists on this machine


@dataclass(frozen=True)
class Catalog:
    """Embedded models; the folder of shipped heads (one folder a head); what reads the config of a head's folder, and
    raises ValueError; types of the engine's arguments, and of vLLM's speculative_config, by name (None: not
    checked); environment variables; directories whose content is not looked at, as it is on other machines."""

    embedded_models: Collection[str]
    heads_dir: Path
    read_head: Callable[[Path], Any]
    engine_types: Mapping[str, Any] | None = None
    draft_types: Mapping[str, Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Collection[str] = ()

    def resolve(self, source: str, shipped: Collection[str], what: str) -> str:
        """`source` as it is when it is shipped, a Hugging Face id or in an object store, else the absolute path of its
        directory. Raises ValueError when it is none of these, or a directory without a config.json."""
        path = Path(os.path.expanduser(source))  # noqa: PTH111  # Path's own raises where there is no such user
        is_elsewhere = any(path.is_relative_to(folder) for folder in self.elsewhere)
        if source in shipped or source.startswith(OBJECT_STORES) or is_elsewhere:
            return source
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise ValueError(f": the directory {source} holds no config.json, so it is no checkpoint")
            return str(path.resolve())
        if _HUGGING_FACE_ID.fullmatch(source):
            return source
        known = f"{what}s: {listed(sorted(shipped))}" if shipped else f"there is no {what}"
        raise ValueError(
            f": {source!r} is no {what}, no directory (looked for from {Path.cwd()}) and no Hugging Face id (org/name)"
            f"{nearest(source, shipped)} ({known})"
        )

    def head(self, name: str) -> tuple[str, Any]:
        """A head's resolved name and its config (`peagle.config.DrafterConfig`); None for a Hugging Face id, whose
        files are not here yet."""
        shipped = sorted(path.parent.name for path in self.heads_dir.glob("*/config.json"))
        name = self.resolve(name, shipped, "shipped head")
        folder = self.heads_dir / name if name in shipped else Path(name)
        try:
            return name, self.read_head(folder) if folder.is_dir() else None
        except (ValueError, OSError) as error:
            raise ValueError(f": {error}") from error


# ---- the sections


class ModelSettings(Section):
    """The target."""

    source: str = Field(
        min_length=1, description="Embedded model, directory, Hugging Face id `org/name`, or `s3://`, `gs://`, `az://`."
    )
    id: str = Field(
        "",
        pattern=r"^[^\s]*$",
        validate_default=True,
        description="Model's name in requests; by default the last part of `source`.",
    )
    aliases: dict[str, Tag] = Field(
        {}, description="Further names of the model, each with the workload of its requests."
    )

    @field_validator("source")
    @classmethod
    def _resolve(cls, source: str, info: ValidationInfo) -> str:
        catalog: Catalog | None = info.context
        return source if catalog is None else catalog.resolve(source, catalog.embedded_models, "embedded model")

    @field_validator("id")
    @classmethod
    def _name(cls, model_id: str, info: ValidationInfo) -> str:
        return model_id or str(info.data.get("source", "")).rstrip("/").rsplit("/", 1)[-1]

    @field_validator("aliases")
    @classmethod
    def _check_aliases(cls, aliases: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        model_id = info.data.get("id")
        for alias in aliases:
            if not alias or alias == model_id or any(character.isspace() for character in alias):
                raise ValueError(f" has the name {alias!r:.80}: an alias is another name than {model_id}, no blanks")
        return aliases


class TargetSettings(Section):
    """Replicas of the target. A bundle may name a kind of GPU, `"accelerator_type:H100": 0.001`."""

    removed: ClassVar[Mapping[str, str]] = {"max_ongoing_requests": "limits says how many requests a replica takes"}
    elsewhere: ClassVar[Mapping[str, str]] = {
        "num_gpus": "write target.bundle: {GPU: 1}, and engine.tensor_parallel_size for several"
    }

    num_replicas: Count = Field(1, description="Target replicas; with `autoscaling` leave it out.")
    num_cpus: float = Field(1.0, ge=0, description="Logical CPUs of the replica's own process.")
    bundle: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=lambda: {"GPU": 1.0},
        description="Ray resources of each engine worker, such as `{GPU: 1}` or `{CPU: 1}`.",
    )
    env: dict[str, str] = Field({}, description="Environment variables of replica and engine.")
    front_ends: Count | None = Field(
        None, le=64, description="Processes between text and tokens, 1 to 4 by default; 1: the replica's own."
    )

    @field_validator("bundle")
    @classmethod
    def _check_bundle(cls, bundle: dict[str, float]) -> dict[str, float]:
        meant = {name: name.upper().removesuffix("S") for name in bundle}
        problems = [f" names {name!r}: write {what}" for name, what in meant.items() if what in {"CPU", "GPU"} - {name}]
        if bundle.get("GPU", 0.0) > 1:
            problems.append(
                " is of one engine worker, which uses one GPU: write GPU: 1, and engine.tensor_parallel_size"
            )
        SettingsError.check(problems)
        return bundle

    @property
    def has_gpu(self) -> bool:
        return bool(self.bundle.get("GPU"))


class DrafterReplicas(Section):
    """Replicas of a remote drafter."""

    removed: ClassVar[Mapping[str, str]] = {"max_num_requests": "a replica finds its room from the number of targets"}

    num_replicas: Count = Field(1, description="Drafter replicas; with `autoscaling` leave it out.")
    num_cpus: float = Field(1.0, ge=0, description="Logical CPUs of one replica.")
    num_gpus: float | None = Field(
        None, ge=0, description="GPUs of one replica; by default 1 where the target has GPUs, else 0."
    )
    cache_gib: float = Field(1.0, gt=0, description="Memory of its KV cache, all heads together.")
    host: str | None = Field(None, min_length=1, description="Address that it listens on; by default its node's.")
    env: dict[str, str] = Field({}, description="Environment variables of its process.")


class LinkSettings(Section):
    """How long a target waits for drafts."""

    removed: ClassVar[Mapping[str, str]] = {"min_deadline_ms": "a step waits max_deadline_ms at most"}

    max_deadline_ms: Finite = Field(1000.0, description="How long a step waits for its drafts before it runs without.")


class DrafterSettings(Section):
    """The drafter. `replicas`, `links` and `spare_heads` are for `placement: remote`. A candidate on trial gets an
    equal share of the cache."""

    removed: ClassVar[Mapping[str, str]] = {
        "parallel_drafting": "the head's file says it",
        "heads_by_workload": "one head drafts for all workloads, set drafter.head",
    }
    elsewhere: ClassVar[Mapping[str, str]] = {
        "model": "write drafter.head",
        "num_speculative_tokens": "write drafter.max_draft_tokens",
    }

    method: Literal["eagle3", "eagle", "mtp", "dflash", "dspark", "draft_model", "ngram"] = Field(
        "eagle3", description="As vLLM names it. `eagle3`: a P-EAGLE or an EAGLE-3 head, as its file says."
    )
    head: str = Field("", description="Shipped head, or as `model.source`; none with `mtp` and `ngram`.")
    placement: Literal["colocated", "remote"] = Field(
        "colocated", description="In the target's engine, or on drafter replicas."
    )
    max_draft_tokens: int | None = Field(
        None, ge=1, le=64, description="K_max, proposed in one pass; default: `num_depths` of a head that is here."
    )
    engine_options: dict[str, Any] = Field({}, description="Further keys of vLLM's `speculative_config`.")
    replicas: DrafterReplicas | None = Field(None, description="The drafter's replicas.")
    links: LinkSettings | None = Field(None, description="How long targets wait for drafts.")
    spare_heads: int = Field(0, ge=0, le=31, description="Room for candidate heads in each replica.")
    trial_share: float = Field(0.1, gt=0, le=0.5, description="Share of the requests that a candidate head drafts for.")

    @property
    def is_remote(self) -> bool:
        return self.placement == "remote"

    @property
    def is_vllms_own(self) -> bool:
        """Whether vLLM alone knows the drafter: its files are neither read nor converted here."""
        return self.method != "eagle3"

    @model_validator(mode="after")
    def _check_placement(self) -> typing.Self:
        if not self.is_remote:
            SettingsError.check(
                [
                    f".{key} has no meaning with placement: colocated, where the drafter runs in the target's engine: "
                    "write placement: remote, or leave it out"
                    for key in ("replicas", "links", "spare_heads")
                    if getattr(self, key)
                ]
            )
        elif others := [key for key in self.engine_options if key not in VERIFICATION_KEYS]:
            raise ValueError(
                f".engine_options ({', '.join(others)}) are for a drafter in the target's engine, which "
                "placement: remote does not have: leave them out"
            )
        return self

    @field_validator("engine_options")
    @classmethod
    def _check_options(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        known = None if info.context is None else info.context.draft_types
        problems = []
        for key, value in options.items():
            if key in OWNED_DRAFT_KEYS:
                problems.append(f".{key} is not yours to set: {OWNED_DRAFT_KEYS[key]}")
            elif known is not None and key not in known:
                hint = nearest(key, known)
                problems.append(f"unknown key drafter.engine_options.{key}: vLLM's speculative_config has none{hint}")
            elif key == "quantization" and info.data.get("method") != "eagle3":
                continue
            elif key in ONLY_DRAFT_VALUES and value not in ONLY_DRAFT_VALUES[key]:
                problems.append(f".{key} is {value!r:.80}, but must be {' or '.join(ONLY_DRAFT_VALUES[key])} here")
            elif known is not None:
                problems += type_problems(f"drafter.engine_options.{key}", value, known[key])
        SettingsError.check(problems)
        return options

    @model_validator(mode="after")
    def _read_head(self, info: ValidationInfo) -> "DrafterSettings":
        """Resolve the head's name, and take missing values from its config."""
        catalog: Catalog | None = info.context
        if catalog is None:
            return self
        if self.is_vllms_own:
            return self._read_others(catalog)
        if not self.head:
            raise SettingsError(["missing key drafter.head: a shipped head's name, a directory, or a Hugging Face id"])
        try:
            name, head = catalog.head(self.head)
        except ValueError as error:
            raise ValueError(f".head{error}") from error
        problems = []
        if self.is_remote and head is not None and not head.is_parallel:
            problems.append(
                f".head: {self.head} is an EAGLE-3 head, which drafts one token after another; placement: remote and "
                "live swaps take P-EAGLE heads: name one of these, or write drafter.placement: colocated"
            )
        max_draft_tokens = self.max_draft_tokens or (None if head is None else head.num_depths)
        if max_draft_tokens is None:
            problems.append(
                ".max_draft_tokens is missing: the head is not here yet, so its number of draft tokens is not known"
            )
        elif head is not None and max_draft_tokens > head.max_depths:
            problems.append(
                f".max_draft_tokens is {max_draft_tokens}, but the head {self.head} was trained for {head.num_depths} "
                f"depths (its num_depths): write {head.num_depths} or less"
            )
        SettingsError.check(problems)
        return self.model_copy(update={"head": name, "max_draft_tokens": max_draft_tokens})

    def _read_others(self, catalog: Catalog) -> "DrafterSettings":
        """Resolve the name of a drafter that only vLLM reads, and refuse what is for P-EAGLE heads."""
        problems = []
        if self.is_remote:
            problems.append(f".placement: remote is for P-EAGLE heads: leave it out with method: {self.method}")
        if self.max_draft_tokens is None:
            problems.append(
                f".max_draft_tokens is missing: with method: {self.method} nothing says how many are drafted"
            )
        name = self.head
        if self.method not in METHODS_WITHOUT_HEAD:
            try:
                name = catalog.resolve(self.head, catalog.embedded_models, "embedded model")
            except ValueError as error:
                problems.append(f".head{error}")
        elif name:
            problems.append(f".head is {name!r:.80}, but method: {self.method} has no files of its own: leave it out")
        SettingsError.check(problems)
        return self.model_copy(update={"head": name})


class Objective(Section):
    """What a workload needs. While a workload has a limit, no step but those that explore verifies more than K."""

    removed: ClassVar[Mapping[str, str]] = {
        "kind": "K follows from the tokens per second of all requests together",
        "weight": "every workload's tokens count the same",
    }

    max_tpot_ms: Finite | None = Field(None, description="Limit of the mean time per output token.")


class KSettings(Section):
    """K of requests: how many draft tokens a step verifies. `state` also keeps which heads were put into others' place;
    without it both end with the Ray cluster."""

    policy: Literal["adaptive", "fixed"] = Field("adaptive", description="Whether K is learned where none is pinned.")
    default: int | None = Field(None, ge=0, description="K where nothing else decides; by default `max`.")
    max: int | None = Field(None, ge=0, description="Largest K of any request; by default K_max.")
    by_workload: dict[Tag, int] = Field({}, description="Pinned K by workload.")
    state: str | None = Field(None, description="File for what was learned; by default Ray's key-value store.")
    objectives: dict[Tag, Objective] = Field({}, description="Limits of a workload; with `policy: adaptive` only.")

    @model_validator(mode="after")
    def _check_meaning(self) -> typing.Self:
        if self.policy == "fixed" and self.objectives:
            raise ValueError(".objectives is read by the adaptive policy only: write num_draft_tokens.policy: adaptive")
        if both := sorted(self.by_workload.keys() & self.objectives.keys()):
            raise ValueError(
                f".by_workload pins K of {both[0]}, so num_draft_tokens.objectives.{both[0]} decides nothing"
            )
        return self


class IngressSettings(Section):
    """The HTTP front end. Target replicas answer HTTP themselves, beside one router that learns for all of them.

    A service without `callers` that listens on a loopback address takes the names of this machine and
    `allowed_hosts`."""

    removed: ClassVar[Mapping[str, str]] = {
        "num_replicas": "target replicas answer HTTP themselves, set target.num_replicas",
        "max_ongoing_requests": "the router takes what the targets and the metrics ask it",
    }

    num_cpus: float = Field(1.0, ge=0, description="Logical CPUs of the router.")
    allow_origins: list[str] = Field([], description="Web pages that a browser may call from (CORS).")
    allowed_hosts: list[str] = Field([], description="`Host` names that clients may use without `callers`; `*`: any.")
    usage_log: str | None = Field(
        None, description="File to which each target replica appends a line of JSON a request; `-`: stdout."
    )


class LimitSettings(Section):
    """Limits of one request, beyond which it gets 400 unless a description names another status, and of all requests of
    a replica that answers HTTP.

    The defaults of a body's size keep the event loop of a replica free: it reads and checks such a body in less than
    0.1 s. `max_body_values` counts commas and opening brackets outside texts; `max_list_entries` counts all
    parts and calls in messages too. `max_body_bytes_in_flight` counts a body from its first byte to the end of the
    answer. A grammar is compiled in a process of its own."""

    removed: ClassVar[Mapping[str, str]] = {
        "max_num_stop": "a request has up to 16 stop strings",
        "max_grammar_choices": "a list of choices has at most max_list_entries",
    }

    max_body_bytes: Count = Field(4 * 2**20, description="Size of a body; beyond it 413.")
    max_body_bytes_in_flight: Count = Field(
        128 * 2**20, description="All bodies above 16 KiB together; beyond it 429. One caller: half."
    )
    max_body_values: Count = Field(150_000, description="Numbers, texts, objects and lists of a body; beyond it 413.")
    max_list_entries: Count = Field(2048, description="Entries of a field's list or object, token ids apart.")
    max_num_sequences: Count = Field(16, description="`n` times the number of prompts.")
    max_num_logprobs: int = Field(20, ge=0, description="Log probabilities of an output token.")
    max_num_prompt_logprobs: int = Field(2**16, ge=0, description="`n` times prompt tokens times (1 + logprobs).")
    max_grammar_bytes: Count = Field(64 * 2**10, description="JSON text of a field that makes a grammar.")
    max_grammar_mib: Count = Field(100, description="Memory to compile a grammar and follow it for 64 tokens.")
    grammar_timeout_s: Finite = Field(10.0, description="CPU time to compile a grammar and follow it for 64 tokens.")
    max_running_requests: Count = Field(
        256, description="Running sequences of a replica that answers HTTP; beyond it they wait."
    )
    max_queued_requests: int = Field(256, ge=0, description="Sequences of a replica that wait; beyond it 429.")

    @model_validator(mode="after")
    def _check_bodies(self) -> "LimitSettings":
        if self.max_body_bytes_in_flight < 2 * self.max_body_bytes:
            raise ValueError(
                f".max_body_bytes_in_flight is {self.max_body_bytes_in_flight}: one caller may hold half of it, which "
                f"must be at least max_body_bytes, {self.max_body_bytes}"
            )
        return self


class CallerSettings(Section):
    """One caller, with one of the three keys that tell where its API key is. `key_env` becomes `key_sha256` here.
    Replicas read `key_file` again when it changes.

    No message repeats a value that may be a key: settings files and logs are read by more people than keys are for."""

    key_sha256: str | None = Field(None, description="The API key's SHA-256, 64 hexadecimal digits.")
    key_env: None = Field(None, description="Environment variable that holds the key.")
    key_file: str | None = Field(
        None, description="File with a key a line, all of them valid; read by each target replica."
    )
    tags: TagRight = Field("refuse", description="Whether the caller may set workload tags; `refuse` answers 403.")
    workload: Tag | None = Field(None, description="Workload of its requests without a tag.")
    max_k: int | None = Field(None, ge=0, description="Largest K of its requests.")
    max_running_requests: int | None = Field(None, ge=1, description="Its running sequences.")
    requests_per_minute: Finite | None = Field(None, description="Its POST requests, whatever their answer.")
    tokens_per_minute: Finite | None = Field(None, description="Its prompt and output tokens.")
    tokens_per_day: int | None = Field(None, ge=1, description="Its prompt and output tokens from 0:00 to 24:00 UTC.")
    learn: bool = Field(False, description="Whether heads may be trained on its requests and answers.")

    @model_validator(mode="before")
    @classmethod
    def _read_key(cls, raw: Any, info: ValidationInfo) -> Any:
        if not isinstance(raw, Mapping):
            raise ValueError(f" must be a mapping with its key: {_KEY_RULE}")
        if plain := [key for key in ("key", "api_key", "token") if key in raw]:
            raise ValueError(f".{plain[0]}: keys do not stand in the settings: {_KEY_RULE}")
        digest, variable = raw.get("key_sha256"), raw.get("key_env")
        if len(given := [name for name in KEY_SETTINGS if raw.get(name) is not None]) > 1:
            raise ValueError(f" has {listed(given)}: keep one of them")
        if not given:
            raise ValueError(f" has no key: {_KEY_RULE}")
        if raw.get("key_file") is not None:
            return raw
        if variable is not None:
            digest = hash_key(_key_in(variable, {} if info.context is None else info.context.env))
        elif not isinstance(digest, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
            raise ValueError(
                ".key_sha256 must be the 64 hexadecimal digits of `printf %s KEY | sha256sum`, in quotes; it is not "
                "the key itself"
            )
        if digest.lower() == hash_key(""):
            raise ValueError(".key_sha256 is the SHA-256 of an empty key")
        return {**raw, "key_sha256": digest.lower(), "key_env": None}

    def caller(self, name: str) -> Caller:
        return Caller(name, **self.model_dump(exclude=set(KEY_SETTINGS)))


def same_keys(digests: Mapping[str, Sequence[str]]) -> list[str]:
    """What is wrong with callers' keys, by their SHA-256: each must be one caller's."""
    names: dict[str, list[str]] = {}
    for name, found in digests.items():
        for digest in found:
            names.setdefault(digest, []).append(name)
    return [f" {listed(same)} have the same key" for same in names.values() if len(same) > 1]


def _key_in(variable: Any, env: Mapping[str, str]) -> str:
    """The key that an environment variable holds. Raises ValueError without repeating it."""
    if not isinstance(variable, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        raise ValueError(".key_env must be the name of an environment variable; it is not the key itself")
    key = env.get(variable, "").strip()
    if not key:
        raise ValueError(f".key_env: the environment variable {variable} is not set here, where settings are read")
    if not _KEY.fullmatch(key):
        raise ValueError(f".key_env: the key in {variable} has blanks or characters other than ASCII")
    return key


def key_variables(raw: Any) -> list[str]:
    """The environment variables that hold callers' keys, in settings that may be wrong."""
    callers = raw.get("callers") if isinstance(raw, Mapping) else None
    sections = callers.values() if isinstance(callers, Mapping) else ()
    found = [section.get("key_env") for section in sections if isinstance(section, Mapping)]
    return list(dict.fromkeys(variable for variable in found if isinstance(variable, str)))


def pod_directories(raw: Any) -> list[str]:
    """Directories of `kubernetes.volumes`, in settings that may be wrong."""
    section = raw.get("kubernetes") if isinstance(raw, Mapping) else None
    volumes = section.get("volumes") if isinstance(section, Mapping) else None
    return [path for path in volumes if isinstance(path, str)] if isinstance(volumes, Mapping) else []


class ReplicaRange(Section):
    """Bounds of a deployment's number of replicas."""

    min: int = Field(1, ge=0, description="Fewest replicas; 0: none after `idle_s` without a request.")
    max: int = Field(ge=1, description="Most replicas.")

    @model_validator(mode="after")
    def _check_order(self) -> typing.Self:
        if self.min > self.max:
            raise ValueError(f".min is {self.min}, above max, {self.max}")
        return self

    def clamp(self, number: int) -> int:
        return min(self.max, max(self.min, number))


STALE_AFTER_S = 30.0
"""A report older than this counts as missing."""


class AutoscalingSettings(Section):
    """Replica counts that follow the traffic.

    `acceptance` divides the demand in output tokens/s by the capacity of a replica at its predicted best K, and falls
    back to `queue_length` while replicas do not report. Drafters scale with targets. The two delays are Serve's."""

    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("min_replicas", "max_replicas"), "write autoscaling.target: {min: 1, max: 4}"
    )
    removed: ClassVar[Mapping[str, str]] = {
        "decision_interval_s": "a decision is made every 5 s",
        "warmup_s": "Serve's upscale_delay_s says how long a demand must last",
        "spare_replicas": "lower utilisation, or raise target.min",
        "scale_to_zero": "write target: {min: 0}",
        "max_tpot_ms": "lower engine.max_num_seqs, the batch at which a replica's capacity counts",
    }

    policy: Literal["acceptance", "queue_length"] = Field(
        "acceptance", description="`acceptance`: demand and capacity in tokens/s; `queue_length`: ongoing requests."
    )
    target: ReplicaRange = Field(description="Bounds of the number of targets.")
    drafter: ReplicaRange | None = Field(None, description="Bounds of the number of drafters, if remote.")
    target_ongoing_requests: Finite = Field(16.0, description="Requests of a replica that `queue_length` aims at.")
    utilisation: float = Field(0.75, gt=0, le=1, description="Share of a replica's capacity that is planned for.")
    start_time_s: Delay = Field(180.0, description="From the decision to a replica that serves.")
    idle_s: Finite = Field(
        600.0, description="Time without a request before the last target ends, with `target.min: 0`."
    )
    upscale_delay_s: Delay = Field(15.0, description="How long a decision to grow must last.")
    downscale_delay_s: Delay = Field(300.0, description="How long a decision to shrink must last; more than 30.")

    @model_validator(mode="after")
    def _check_meaning(self) -> typing.Self:
        problems = []
        if self.drafter is not None and self.drafter.min == 0 < self.target.min:
            problems.append(".drafter.min is 0: drafters end with the last target, so target.min must be 0 too")
        if self.downscale_delay_s <= STALE_AFTER_S:
            problems.append(
                f".downscale_delay_s is {self.downscale_delay_s:g}: it must be more than {STALE_AFTER_S:g}, after "
                "which a silent replica counts as missing, or silence would look like traffic that went away"
            )
        SettingsError.check(problems)
        return self


class LearningSettings(Section):
    """A learner that trains the remote drafter's heads on, on live traffic (`deployments.learner`).

    With `callers`, only answers of callers with `learn: true` are kept, by default all of theirs. Without `replay` a
    sample of what came stands for the mix of before. `recipe` overrides `peagle.train.continual.SETTINGS`. Both gains
    must be likely, not only measured."""

    removed: ClassVar[Mapping[str, str]] = {
        "queue_mib": "a target keeps 16 MiB of answers until they are fetched",
        "replay_share": "0.3 of a round's tokens are of the mix of before",
    }

    heads_dir: str | None = Field(
        None, min_length=1, description="Folder of proposed heads; by default in the node's cache directory."
    )
    workloads: Literal["all", "callers"] | list[str] | None = Field(
        None, description="Workloads whose answers are kept; `callers` (default if there are any): all of theirs."
    )
    replay: str | None = Field(None, description="Folder of conversations that must not be forgotten.")
    recipe: dict[str, dict[str, Any]] = Field(
        {}, description="Sections of the training recipe that differ from the learner's own."
    )
    num_cpus: float = Field(1.0, gt=0, description="CPUs of its process, which gives way to every other.")
    num_gpus: float | None = Field(
        None, ge=0, description="GPUs of its process; by default 1 where the target has GPUs."
    )
    share: float = Field(0.5, gt=0, le=1, description="Share of the time that it may be busy.")
    buffer_mib: float = Field(256.0, gt=0, description="Answers kept in the learner, prompts included.")
    keep_hours: float = Field(24.0, gt=0, description="Longest time that an answer is kept.")
    min_new_answers: Count = Field(200, description="New answers before a round begins.")
    min_held_out: int = Field(30, ge=2, description="Fewest held-out answers of a comparison.")
    min_gain: float = Field(0.02, ge=0, description="AL gain on recent answers that a proposal needs.")
    max_loss: float = Field(0.01, ge=0, description="AL loss on the mix of before that a proposal may have.")


def _check_quantity(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?[KMGT]i?", text):
        raise ValueError(f" is {text!r:.80}: write an amount of memory as Kubernetes does, such as 64Gi")
    return text


Quantity = Annotated[str, AfterValidator(_check_quantity)]


class Toleration(Section):
    """A taint of nodes that pods may run on all the same, as Kubernetes has it."""

    key: str = Field(description="The taint's key.")
    value: str | None = Field(None, description="The taint's value; by default any.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="The taint's effect; by default any."
    )

    def as_kubernetes(self) -> dict[str, str]:
        return {"operator": "Exists" if self.value is None else "Equal", **self.model_dump(exclude_none=True)}


class PodSettings(Section):
    """Pods of one kind. What they ask for is also their limit."""

    cpus: float | None = Field(
        None, gt=0, description="Processors; default: head 1; worker 8 per GPU, at least what Ray places."
    )
    memory: Quantity | None = Field(
        None, description="Memory of a pod; default: head 4Gi, worker 10Gi; with GPUs 8Gi and 64Gi."
    )
    node_selector: dict[str, str] = Field({}, description="Labels that their nodes have.")
    tolerations: list[Toleration] = Field(
        [], description="Taints that their nodes may have, besides `nvidia.com/gpu` of GPU nodes."
    )


class KubernetesSettings(Section):
    """Pods of a manifest (`peagle manifest`), which alone reads this section."""

    image: str | None = Field(
        None, min_length=1, description="By default `peagle-serve:VERSION-cpu`, with GPUs `-gpu`."
    )
    image_pull_secrets: list[str] = Field([], description="Secrets to pull the image with.")
    service_account: str | None = Field(
        None, description="Service account of worker pods, such as one that may read a bucket."
    )
    volumes: dict[str, str] = Field(
        {}, description="PersistentVolumeClaims by the directory where all pods have them, with checkpoints."
    )
    shared_memory: Quantity | None = Field(None, description="/dev/shm of a pod; by default 1Gi, with GPUs 8Gi.")
    head: PodSettings = Field(default_factory=PodSettings, description="The pod of Ray's head, without replicas.")
    workers: PodSettings = Field(default_factory=PodSettings, description="Pods with replicas.")

    @field_validator("volumes")
    @classmethod
    def _check_volumes(cls, volumes: dict[str, str]) -> dict[str, str]:
        problems = [
            f" has the directory {path!r:.80}: write an absolute path, without .. and without / at its end"
            for path in volumes
            if not path.startswith("/") or ".." in path or path.endswith("/")
        ]
        problems += [
            f".{path} is {claim!r:.80}: the name of a claim has small letters, digits and -, at most 57"
            for path, claim in volumes.items()
            if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,55}[a-z0-9])?", claim)
        ]
        SettingsError.check(problems)
        return volumes


# ---- the whole


class ClusterSettings(Section):
    """Everything under `args`."""

    removed: ClassVar[Mapping[str, str]] = {"depth": "its keys stand under num_draft_tokens"}

    model: ModelSettings = Field(description="The target model.")
    target: TargetSettings = Field(default_factory=TargetSettings, description="Replicas of the target.")
    engine: dict[str, Any] = Field({}, description="vLLM's engine arguments, unchanged.")
    drafter: DrafterSettings | None = Field(None, description="The drafter; without it nothing is drafted.")
    num_draft_tokens: KSettings = Field(default_factory=KSettings, description="K of requests.")
    ingress: IngressSettings = Field(
        default_factory=IngressSettings, description="The router, and who may reach the service."
    )
    limits: LimitSettings = Field(default_factory=LimitSettings, description="Limits of one request and of a replica.")
    callers: dict[str, CallerSettings] | None = Field(
        None, description="Callers by name; without it everyone is served and may set tags."
    )
    autoscaling: AutoscalingSettings | None = Field(
        None, description="Replica counts that follow the traffic; without it they are fixed."
    )
    learning: LearningSettings | None = Field(
        None, description="A learner that trains heads on live traffic; off without it."
    )
    kubernetes: KubernetesSettings = Field(default_factory=KubernetesSettings, description="Pods of `peagle manifest`.")

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, engine: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        known = None if info.context is None else info.context.engine_types
        problems = []
        for key, value in engine.items():
            if key in OWNED_ENGINE_KEYS:
                problems.append(f".{key} is not yours to set: {OWNED_ENGINE_KEYS[key]}")
            elif known is not None and key not in known:
                problems.append(f"unknown key engine.{key}: neither engine nor API reads it{nearest(key, known)}")
            elif key in COUNTED and (type(value) is not int or value < 1):
                problems.append(f".{key} must be an integer from 1, not {value!r:.80}")
            elif known is not None and not engine.get(PARSER_PLUGINS.get(key, "")):
                problems += type_problems(f"engine.{key}", value, known[key])
        share = getattr(info.data.get("target"), "bundle", {}).get("GPU", 0.0)
        if 0 < share <= 0.5 and any(engine.get(f"{kind}_parallel_size", 1) != 1 for kind in ("tensor", "pipeline")):
            problems.append(f"target.bundle has GPU: {share:g}: NCCL refuses two workers on one GPU, write GPU: 1")
        source, load_format = getattr(info.data.get("model"), "source", ""), engine.get("load_format")
        if source.startswith(OBJECT_STORES) and load_format not in STREAMED_FORMATS:
            problems.append(
                f".load_format is {load_format!r:.80}, but model.source is in an object store: write "
                f"{' or '.join(STREAMED_FORMATS)}"
            )
        SettingsError.check(problems)
        return engine

    @field_validator("drafter")
    @classmethod
    def _fill_remote(cls, drafter: DrafterSettings | None, info: ValidationInfo) -> DrafterSettings | None:
        """A remote drafter with the defaults of `replicas` and `links`, which follow the target."""
        engine, target = info.data.get("engine", {"dtype": "float32"}), info.data.get("target", TargetSettings())
        if drafter is None or not drafter.is_remote:
            return drafter
        problems = []
        if (dtype := engine.get("dtype", "auto")) not in ROW_DTYPES:
            problems.append(
                f"engine.dtype is {dtype!r:.80}, but placement: remote needs its name, "
                f"{', '.join(sorted(ROW_DTYPES))}: target and drafter compute in one type"
            )
        if (num_stages := engine.get("pipeline_parallel_size", 1)) != 1:
            problems.append(
                f"engine.pipeline_parallel_size is {num_stages!r:.80}, but placement: remote needs all layers on each "
                "worker, 1: use tensor_parallel_size, or placement: colocated"
            )
        if engine.get("enable_prompt_embeds"):
            problems.append("engine.enable_prompt_embeds does not go with placement: remote: leave one of them out")
        SettingsError.check(problems)
        replicas = drafter.replicas or DrafterReplicas()
        if replicas.num_gpus is None:
            replicas = replicas.model_copy(update={"num_gpus": float(target.has_gpu)})
        return drafter.model_copy(update={"replicas": replicas, "links": drafter.links or LinkSettings()})

    @field_validator("num_draft_tokens")
    @classmethod
    def _check_num_draft_tokens(cls, num_draft_tokens: KSettings, info: ValidationInfo) -> KSettings:
        if "drafter" not in info.data:
            return num_draft_tokens  # it has problems of its own
        if info.data["drafter"] is None:
            raise ValueError(" has no meaning without a drafter: remove num_draft_tokens, or give drafter.head")
        most, because = _max_k(info.data["drafter"], None)
        problems = []
        if num_draft_tokens.max is not None and num_draft_tokens.max > most:
            problems.append(f".max is {num_draft_tokens.max}, above {because}")
        else:
            most, because = _max_k(info.data["drafter"], num_draft_tokens)
        if num_draft_tokens.default is not None and num_draft_tokens.default > most:
            problems.append(f".default is {num_draft_tokens.default}, above {because}")
        problems += [
            f".by_workload.{tag} is {k}, outside 0..{most} ({because})"
            for tag, k in num_draft_tokens.by_workload.items()
            if not 0 <= k <= most
        ]
        SettingsError.check(problems)
        return num_draft_tokens

    @field_validator("callers", mode="before")
    @classmethod
    def _check_names(cls, callers: Any) -> Any:
        if not isinstance(callers, Mapping):
            raise ValueError(" must be a mapping from a caller's name to its settings; leave it out to serve everyone")
        if not callers:
            raise ValueError(" is empty, so nobody could ask: name at least one, or leave it out to serve everyone")
        for name in callers:
            if not isinstance(name, str) or not is_workload_tag(name):
                raise ValueError(f" has the name {name!r:.80}: a name is {_TAG_RULE}")
        return callers

    @field_validator("callers")
    @classmethod
    def _check_callers(
        cls, callers: dict[str, CallerSettings] | None, info: ValidationInfo
    ) -> dict[str, CallerSettings] | None:
        problems = same_keys({name: [one.key_sha256] for name, one in (callers or {}).items() if one.key_sha256})
        if "drafter" in info.data and "num_draft_tokens" in info.data:
            most, because = _max_k(info.data["drafter"], info.data["num_draft_tokens"])
            problems += [
                f".{name}.max_k is {caller.max_k}, outside 0..{most} ({because})"
                for name, caller in (callers or {}).items()
                if caller.max_k is not None and caller.max_k > most
            ]
        SettingsError.check(problems)
        return callers

    @field_validator("autoscaling")
    @classmethod
    def _check_autoscaling(
        cls, scaling: AutoscalingSettings | None, info: ValidationInfo
    ) -> AutoscalingSettings | None:
        if scaling is None or not {"target", "engine", "drafter"} <= info.data.keys():
            return scaling
        drafter: DrafterSettings | None = info.data["drafter"]
        replicas = None if drafter is None else drafter.replicas
        is_remote = drafter is not None and drafter.is_remote
        fixed = {"target.num_replicas": info.data["target"], "drafter.replicas.num_replicas": replicas}
        problems = [
            f"{key} fixes what autoscaling decides: remove one of them"
            for key, section in fixed.items()
            if section is not None and "num_replicas" in section.model_fields_set
        ]
        if scaling.drafter is not None and not is_remote:
            problems.append(".drafter bounds a remote drafter: write drafter.placement: remote, or remove it")
        if scaling.drafter is None and is_remote:
            problems.append(".drafter is missing: a remote drafter scales too, e.g. {min: 1, max: 2}")
        if scaling.policy == "acceptance" and drafter is None:
            problems.append(".policy is acceptance, which needs a drafter: write policy: queue_length")
        if scaling.policy == "acceptance" and "max_num_seqs" not in info.data["engine"]:
            problems.append(".policy is acceptance, which needs engine.max_num_seqs, the largest batch")
        SettingsError.check(problems)
        return scaling

    @field_validator("learning")
    @classmethod
    def _check_learning(cls, learning: LearningSettings | None, info: ValidationInfo) -> LearningSettings | None:
        if learning is None or not {"drafter", "callers", "target"} <= info.data.keys():
            return learning
        problems = []
        if info.data["drafter"] is None or not info.data["drafter"].is_remote:
            problems.append(" needs heads that can be swapped while requests run: write drafter.placement: remote")
        elif not info.data["drafter"].spare_heads:
            problems.append(" needs room for the head that it proposes: write drafter.spare_heads: 1")
        if "model" in info.data and info.data["model"].source.startswith(OBJECT_STORES):
            problems.append(" needs the target's files: model.source must be a directory or a Hugging Face id")
        if learning.workloads is None and info.data["callers"] is None:
            problems.append(
                ".workloads is missing: without callers that say learn: true, name the workloads whose answers may be "
                "kept, or write all"
            )
        named = learning.workloads if isinstance(learning.workloads, list) else []
        problems += [
            f".workloads has the tag {tag!r:.80}: a tag is {_TAG_RULE}" for tag in named if not is_workload_tag(tag)
        ]
        SettingsError.check(problems)
        gpus = float(info.data["target"].has_gpu) if learning.num_gpus is None else learning.num_gpus
        return learning.model_copy(update={"num_gpus": gpus})

    def learns_from(self, caller: Caller, workload: str) -> bool:
        """Whether answers to this caller's requests of this workload may be kept for the learner."""
        if self.learning is None or (self.callers is not None and not caller.learn):
            return False
        named = self.learning.workloads
        return workload in named if isinstance(named, list) else named == "all" or self.callers is not None

    @property
    def max_draft_tokens(self) -> int:
        """K_max, 0 without a drafter."""
        return 0 if self.drafter is None else self.drafter.max_draft_tokens or 0

    @property
    def max_num_seqs(self) -> int:
        """Sequences that one engine runs at a time."""
        return int(self.engine.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS))

    @property
    def num_workers(self) -> int:
        """Engine workers of one target replica."""
        return math.prod(self.engine.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))

    def target_bundles(self) -> list[dict[str, float]]:
        """Ray resources of one target replica: of each engine worker, the first with the replica's own process."""
        first = {**self.target.bundle, "CPU": self.target.bundle.get("CPU", 0.0) + self.target.num_cpus}
        return [first, *({**self.target.bundle} for _ in range(self.num_workers - 1))]

    @property
    def max_num_targets(self) -> int:
        return self.target.num_replicas if self.autoscaling is None else self.autoscaling.target.max

    @property
    def max_num_drafters(self) -> int:
        """0 without a remote drafter."""
        if self.drafter is None or self.drafter.replicas is None:
            return 0
        scaled = None if self.autoscaling is None else self.autoscaling.drafter
        return self.drafter.replicas.num_replicas if scaled is None else scaled.max

    def k_rules(self) -> KRules:
        """The operator's choice of K, with its defaults filled in."""
        max_k, _ = _max_k(self.drafter, self.num_draft_tokens)
        default_k = max_k if self.num_draft_tokens.default is None else self.num_draft_tokens.default
        is_adaptive = self.num_draft_tokens.policy == "adaptive" and self.max_draft_tokens > 0
        limits = {
            name: one.max_tpot_ms
            for name, one in self.num_draft_tokens.objectives.items()
            if one.max_tpot_ms is not None
        }
        return KRules(
            self.max_draft_tokens, max_k, default_k, dict(self.num_draft_tokens.by_workload), is_adaptive, limits
        )

    def caller_table(self, keys: Mapping[str, Sequence[str]] = MappingProxyType({})) -> Callers | None:
        """None: everyone is served. `keys`: those of files (`read_key_files`)."""
        if self.callers is None:
            return None
        found = {one.key_sha256: one.caller(name) for name, one in self.callers.items() if one.key_sha256}
        in_files = {name: one for name, one in self.callers.items() if one.key_file}
        found |= {digest: one.caller(name) for name, one in in_files.items() for digest in keys.get(name, ())}
        return found

    def read_key_files(self) -> dict[str, list[str]]:
        """SHA-256 of the keys in the files of callers, by caller. Raises SettingsError with every problem, without
        keys: no such file, a key with blanks, one key of two callers."""
        sections, problems = self.callers or {}, list[str]()
        digests = {name: [one.key_sha256] for name, one in sections.items() if one.key_sha256}
        found: dict[str, list[str]] = {}
        for name, path in ((name, one.key_file) for name, one in sections.items() if one.key_file):
            try:
                lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
            except OSError as error:
                problems.append(f"callers.{name}.key_file: {path} cannot be read: {error.strerror}")
                continue
            keys = [key for line in lines if (key := line.strip())]
            if not all(map(_KEY.fullmatch, keys)):
                problems.append(f"callers.{name}.key_file: a key in {path} has blanks or characters other than ASCII")
            found[name] = [hash_key(key) for key in dict.fromkeys(keys)]
        problems += [f"callers{problem}" for problem in same_keys(digests | found)]
        SettingsError.check(problems)
        return found

    def named_workloads(self) -> frozenset[str]:
        """Workloads named in the settings, which are always distinguished."""
        of_callers = {caller.workload for caller in (self.callers or {}).values() if caller.workload is not None}
        learned = None if self.learning is None else self.learning.workloads
        named = {
            *self.num_draft_tokens.by_workload,
            *self.num_draft_tokens.objectives,
            *self.model.aliases.values(),
            *of_callers,
        }
        return frozenset({*named, *(learned if isinstance(learned, list) else ())})


def _max_k(drafter: DrafterSettings | None, num_draft_tokens: KSettings | None) -> tuple[int, str]:
    """The largest K that a request may get, and the setting that says so."""
    if drafter is None:
        return 0, "without a drafter nothing is drafted"
    if num_draft_tokens is not None and num_draft_tokens.max is not None:
        return num_draft_tokens.max, f"num_draft_tokens.max, {num_draft_tokens.max}"
    return drafter.max_draft_tokens or 0, f"drafter.max_draft_tokens, {drafter.max_draft_tokens}"


def load_settings(raw: Any, catalog: Catalog, env: Mapping[str, str] | None = None) -> ClusterSettings:
    """Check `raw` and fill in what it leaves out.

    vLLM's published `speculative_config` may stand in place of `drafter`, as an object or its JSON in `raw`, or as
    JSON in the environment variable SM_VLLM_SPECULATIVE_CONFIG. Raises SettingsError, which lists every problem.
    """
    if not isinstance(raw, Mapping):
        sections = listed(tuple(ClusterSettings.model_fields))
        raise SettingsError([f"args must be a mapping with the keys {sections}, not {raw!r:.80}"])
    catalog = replace(catalog, env=env or {})
    return ClusterSettings.read(_with_drafter(raw, catalog.env), context=catalog)


def swapped(drafter: DrafterSettings, user_config: Any, catalog: Catalog) -> DrafterSettings:
    """`drafter` with the head in a deployment's `user_config`, `{head: ...}` or `{}`. Raises ValueError with every
    problem: an unknown key, no such head, or one that drafts too few tokens."""
    if not isinstance(user_config, Mapping):
        raise ValueError(f"user_config must be a mapping with head, not {user_config!r:.80}")
    if unknown := [str(key) for key in user_config if key != "head"]:
        raise ValueError(f"unknown key {unknown[0]} in user_config{nearest(unknown[0], ['head'])}; it swaps the head")
    try:
        return DrafterSettings.read({**drafter.model_dump(), **user_config}, "user_config", catalog)
    except SettingsError as error:
        raise ValueError("; ".join(error.problems)) from error


def _with_drafter(raw: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """`raw` with vLLM's speculative_config, from the mapping or the environment, turned into a `drafter` section.

    Raises SettingsError."""
    sections, given = dict(raw), {}
    if "speculative_config" in sections:
        given["speculative_config"] = sections.pop("speculative_config")
    if in_env := env.get(SPECULATIVE_CONFIG_ENV):
        given[SPECULATIVE_CONFIG_ENV] = in_env
    for name, value in given.items():
        try:
            given[name] = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError as error:
            raise SettingsError([f"{name} is not JSON: {error}"]) from error
    if len(given) == 2 and given["speculative_config"] == given[SPECULATIVE_CONFIG_ENV]:
        given.popitem()
    names = [*given, *(["drafter"] if "drafter" in sections and given else [])]
    if len(names) > 1:
        raise SettingsError([f"{listed(names)} contradict: keep one of them"])
    for name, value in given.items():
        if not isinstance(value, Mapping):
            raise SettingsError([f"{name} must be an object like vLLM's --speculative-config, not {value!r:.80}"])
        options = {str(key): item for key, item in value.items()}
        known = typing.get_args(DrafterSettings.model_fields["method"].annotation)
        if (method := options.pop("method", None)) not in known:
            said = f'{name} must say "method": "eagle3" (for P-EAGLE heads too)'
            raise SettingsError([f"{said} or another of {listed(known)}; it says method {method!r}"])
        needed = ("num_speculative_tokens",) if method in METHODS_WITHOUT_HEAD else ("model", "num_speculative_tokens")
        SettingsError.check([f"missing key {name}.{key}" for key in needed if options.get(key) is None])
        drafter = {"method": method, "max_draft_tokens": options.pop("num_speculative_tokens")}
        if "model" in options:
            drafter["head"] = options.pop("model")
        if method == "eagle3":
            options.pop("parallel_drafting", None)  # the head's file says it
        sections["drafter"] = {**drafter, "engine_options": options}
    return sections


# ---- settings that change while requests run


def live_config(settings: ClusterSettings) -> dict[str, Any]:
    """What changes without a new engine, as the `user_config` of router and target: plain values."""
    sections = settings.model_dump(mode="json", include={"num_draft_tokens", "limits", "callers"})
    return {"aliases": dict(settings.model.aliases), **sections}


class LiveSettings(Section):
    """What `live_config` makes. Sections that it does not name stay as they are."""

    removed: ClassVar[Mapping[str, str]] = {"depth": "its keys stand under num_draft_tokens; make the manifest again"}

    aliases: dict[str, str] | None = None
    num_draft_tokens: KSettings | None = None
    limits: LimitSettings | None = None
    callers: dict[str, CallerSettings] | None = None


def with_live(settings: ClusterSettings, live: Any) -> ClusterSettings:
    """`settings` with what `live_config` made of others. Raises SettingsError, which lists every problem."""
    if not isinstance(live, Mapping):
        raise SettingsError(
            [f"user_config must be a mapping with {listed(LiveSettings.model_fields)}, not {live!r:.80}"]
        )
    found = LiveSettings.read(live, "user_config")
    changed: dict[str, Any] = {
        name: value for name in ("num_draft_tokens", "limits") if (value := getattr(found, name)) is not None
    }
    if found.callers == {}:
        raise SettingsError(["user_config.callers is empty, which would let nobody in: name one, or write null"])
    if "callers" in live:
        changed["callers"] = found.callers
    if found.aliases is not None:
        changed["model"] = settings.model.model_copy(update={"aliases": found.aliases})
    return settings.model_copy(update=changed)
