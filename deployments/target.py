"""The target: a replica of `ray.serve.llm`'s server with P-EAGLE inside its vLLM engine, and with HTTP of its own.

Enters: requests, over HTTP past every other Python process (Ray Serve's HAProxy forwards bytes to this one) or by
deployment handle, which go through the same front end.
Leaves: the engine's answers with a `drafting` field that says how they were drafted, and counts. K is chosen as the
router says (`deployments.router`). How the engine is configured from the settings stands here too.
"""

import gc

gc.disable()  # while modules load: what they make stays, and each full collection would walk all of it

import asyncio
import contextlib
import functools
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.import_utils import resolve_obj_by_qualname

from cluster.counts import TargetReport
from cluster.errors import ApiError
from cluster.k_policy import PolicyUpdate
from cluster.learning import AnswerQueue, KeptAnswer
from cluster.request import MAX_NUM_WORKLOADS, TRIAL_SUFFIX, base_workload
from cluster.settings import ClusterSettings, DrafterSettings, LimitSettings, with_live
from cluster.step_latency import StepLatency
from deployments import compat
from deployments.answers import EngineAnswers
from deployments.body import Call, read_document
from deployments.checkpoints import local_directory, prepared_head, target_source
from deployments.errors import not_ready
from deployments.front_end import QUEUED_PER_RUNNING, FrontEnd
from deployments.front_end_processes import FrontEndProcesses
from deployments.replicas import (
    MAX_SMALL_MACHINE_CORES,
    POLL_INTERVAL_S,
    POLL_TIMEOUT_S,
    REPLICA_LOST,
    DrafterLinks,
    EngineLost,
    repeat,
    settings_with,
)
from deployments.routes import Entrance, make_app
from deployments.telemetry import engine_metrics
from deployments.usage_log import UsageLog
from peagle.heads import head_digest, target_digest
from peagle.schema import SettingsError
from peagle.vllm.clients import abort_all_of
from peagle.vllm.engine_settings import ASYNC_SCHEDULER, engine_kwargs
from peagle.vllm.grammar_checker import GrammarChecker, GrammarLimits
from peagle.vllm.limits import guard
from peagle.vllm.recorder import DraftingRecorder

gc.enable()

logger = logging.getLogger(__name__)

CPUS_OF_A_FRONT_END, MAX_DEFAULT_FRONT_ENDS = 4, 4
"""CPUs of a replica for each front-end process, and the most of these by default. Measured with 16 CPUs and one GPU:
2026-11-29-headline-coder-front-ends-h200.json."""


class TargetServer(LLMServer):
    """One replica. Its constructor returns when the engine answers, so a running replica is a ready one."""

    _is_new = True
    """Whether no `reconfigure` has succeeded yet."""

    async def __init__(  # type: ignore[misc]
        self,
        settings: ClusterSettings,
        drafter: DeploymentHandle[Any] | None = None,
        router: DeploymentHandle[Any] | None = None,
    ) -> None:
        """The engine's configuration is made here, where the checkpoints are prepared: each node has its own cache.
        `drafter`: the deployment of remote drafters, where there is one. Without a `router` K is the
        settings' default."""
        compat.be_no_nicer()
        compat.prepare_replica()
        if not settings.target.has_gpu:
            use_all_cores_of_a_small_machine()
        self._usage_log = UsageLog(settings.ingress.usage_log) if settings.ingress.usage_log else None
        keys = await asyncio.to_thread(settings.read_key_files)
        target_dir, head_dir = await asyncio.to_thread(prepare, settings)
        # Tasks of the replica need no fork server.
        env = {**ray.get_runtime_context().runtime_env.get("env_vars", {}), compat.SETUP_HOOK_ENV: ""}
        config = engine_config(settings, target_dir, head_dir, env)
        if Path(target_dir).is_dir():
            compat.download_nothing(config)
        self._settings = settings
        self._answers, self._weights = AnswerQueue(MAX_QUEUED_ANSWER_BYTES), settings.model.source
        keep = None
        if settings.learning is not None:
            self._weights, keep = await asyncio.to_thread(target_digest, target_dir), self._keep
        max_workloads = MAX_NUM_WORKLOADS + len(settings.named_workloads())
        self._recorder = DraftingRecorder(max_workloads=max_workloads, on_answer=keep)
        self._replica = serve.get_replica_context().replica_id.unique_id
        max_running = QUEUED_PER_RUNNING * settings.max_num_seqs
        self.front_end = FrontEnd(settings, max_running, self._usage_log, self._replica)
        self.front_end.set_keys(keys)
        charge = self.front_end.charge

        own_node = ray.get_runtime_context().get_node_id()
        has = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == own_node)  # type: ignore[no-untyped-call]
        own_gpus = settings.target.bundle.get("GPU", 0) * settings.num_workers
        number = settings.target.front_ends or default_front_ends(has.get("CPU", 0), has.get("GPU", 0), own_gpus)
        several = FrontEndProcesses(number, max_workloads, self._recorder, charge, keep) if number > 1 else None
        self._front_ends = several
        launch = several.launch if several is not None else lambda vllm_config, arguments: ((), None)
        await super().__init__(config, engine_cls=compat.engine_class(not settings.target.has_gpu, launch))
        self._client, self.vllm = client, vllm = compat.read_engine(self.engine)
        self._started_s = time.monotonic()
        self._grammars = GrammarChecker(client.vllm_config, grammar_limits(settings.limits))
        self._grammars.start()
        if several is None:
            answers = EngineAnswers.attach(client, vllm, self._recorder, charge, self._grammars)
            self.front_end.generate = answers.generate
        else:
            guard(client, self._grammars)
            abort = functools.partial(abort_all_of, client)
            await several.attach(self._grammars, abort, client.output_handler)
            self.front_end.generate = several.generate
        self.front_end.max_model_len = self._client.vllm_config.model_config.max_model_len
        if settings.drafter is not None and drafter is None:
            digest = head_digest(head_dir) if head_dir is not None else target_digest(target_dir)
            self.front_end.heads = (digest,)
        # Once: an engine takes its memory at its start, and each question holds up a step.
        self._devices = tuple(await self._client.collective_rpc("describe_device"))
        self._router, self._num_targets = router, 1
        loops = [repeat(self._refresh_keys, POLL_INTERVAL_S, "callers' keys stay as they were")]
        if router is not None:  # requests are served on, by the last update
            update = functools.partial(self._apply_update, router)
            loops.append(repeat(update, POLL_INTERVAL_S, "the router gives no policy update"))
        self._links: DrafterLinks | None = None
        if drafter is not None:
            self._links = DrafterLinks(
                drafter,
                client.collective_rpc,
                is_busy=lambda: self.front_end.admission.num_running > 0,
                on_heads=functools.partial(setattr, self.front_end, "heads"),
            )
            problem = "the drafters cannot be handed to the engine; it serves without them meanwhile"
            loops.append(repeat(self._links.poll, POLL_INTERVAL_S, problem, at_once=True))
        self._loops = [asyncio.create_task(loop) for loop in loops]
        freeze_gc_heap()  # as vLLM's own server: a full collection of all that is loaded would hold up every stream

    async def __del__(self) -> None:
        """Serve retires this replica; its requests have ended."""
        if (usage_log := getattr(self, "_usage_log", None)) is not None:  # the constructor may have failed before
            usage_log.close()
        await super().__del__()
        if (others := getattr(self, "_front_ends", None)) is not None:
            others.metrics_folder.cleanup()  # Serve kills this process, so nothing else would

    async def _start_engine(self) -> None:
        """Without Ray's own next step: its telemetry of models starts an actor that imports vLLM once more, and holds
        up this replica until that answers."""
        assert self.engine is not None
        await self.engine.start()  # type: ignore[no-untyped-call]

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(self, await asyncio.to_thread(Entrance.read_from_serve, self._settings.ingress))

    async def reconfigure(self, user_config: Mapping[str, Any] | None) -> None:
        """Take other limits, callers, K and aliases while requests run (`cluster.settings.live_config`). Raises
        SettingsError in a new replica, for what cannot be: it would let in everybody, or not those with a key file."""
        if user_config is not None:
            self._settings = (with_live if self._is_new else settings_with)(self._settings, user_config)
            self.front_end.apply_settings(self._settings)
            self._grammars.limits = grammar_limits(self._settings.limits)
        try:
            await self._refresh_keys()
            self._is_new = False
        except SettingsError:
            if self._is_new:
                raise  # else the keys before stay, as is logged a second later

    async def check_health(self) -> None:
        """Raises EngineLost when the engine has died. vLLM's own exception would make whoever gets it, Serve's
        controller too, import vLLM, which takes seconds."""
        try:
            await super().check_health()
        except Exception as error:  # noqa: BLE001
            raise EngineLost(f"{type(error).__name__}: {error}") from None
        if self._front_ends is not None and self._front_ends.problem:
            raise EngineLost(self._front_ends.problem)

    async def report(self) -> TargetReport:
        """What this replica has counted. Raises EngineLost, see `check_health`."""
        await self.check_health()
        if self._front_ends is not None:
            await self._front_ends.refresh_counts()
        latency_json = self._recorder.step_latency
        return TargetReport(
            replica=self._replica,
            head=self.front_end.find_head(),
            trial_head=self.front_end.find_head(TRIAL_SUFFIX),
            workloads=self._recorder.workloads(),
            step_latency=msgspec.json.decode(latency_json, type=StepLatency) if latency_json else None,
            links=() if self._links is None else self._links.links,
            num_output_tokens=self._recorder.num_output_tokens,
            weights=self._weights,
            num_queued=self.front_end.admission.num_queued_sequences,
            spent=dict(self.front_end.admission.spent),
            uptime_s=time.monotonic() - self._started_s,
            node=socket.gethostname(),
            devices=self._devices,
        )

    def _keep(self, workload: str, caller: str, prompt: list[int], answer: list[int]) -> None:
        tokens = np.array(prompt, np.int32), np.array(answer, np.int32)
        self._answers.put(KeptAnswer(base_workload(workload), caller, *tokens, self._weights))

    async def fetch_answers(self) -> list[KeptAnswer]:
        """What the learner has not fetched yet of answers that may be learned from."""
        return self._answers.drain()

    async def front_end_metrics(self) -> tuple[str, list[Any]]:
        """This replica, and what its clients saw, as `FrontEnd.families`, with vLLM's families of its engine."""
        others = self._front_ends
        return self._replica, [
            *self.front_end.families(),
            *engine_metrics(None if others is None else others.metrics_folder.name),
            *([] if others is None else others.families(self._replica)),
        ]

    async def _refresh_keys(self) -> None:
        """Take the keys in callers' files. Raises SettingsError for files that cannot be used: the keys before stay."""
        keys = await asyncio.to_thread(self._settings.read_key_files)
        if keys != self.front_end.keys:
            logger.info("callers' keys have changed")
            self.front_end.set_keys(keys)

    async def _apply_update(self, router: DeploymentHandle[Any]) -> None:
        async with asyncio.timeout(POLL_TIMEOUT_S):
            update: PolicyUpdate = await router.policy_update.remote()
        self._num_targets = self.front_end.admission.num_replicas = max(1, update.num_targets)
        self.front_end.routing = update.heads
        self.front_end.admission.spending = update.spending
        for workload in update.workloads:
            self.front_end.remember_workload(workload)
        if update.choices:  # none come of a router that has just started: the last ones stand
            self.front_end.policy_update = update

    # ---- what the HTTP API shows besides answers

    async def health(self) -> dict[str, Any]:
        if self._client.errored or (self._front_ends is not None and not self._front_ends.num_ready):
            raise not_ready(self.front_end.model)
        return {"status": "ready", "model": self.front_end.model, "num_target_replicas": self._num_targets}

    async def metrics(self) -> bytes:
        """Metrics of all replicas. Raises ApiError (503) while the router is down."""
        return bytes(await self._of_the_service("metrics"))

    async def drafting(self) -> dict[str, Any]:
        """The document of all replicas. Raises ApiError (503) while the router is down."""
        return dict(await self._of_the_service("drafting"))

    async def _of_the_service(self, page: str) -> Any:
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                return await getattr(self._router, page).remote()
        except (*REPLICA_LOST, TimeoutError) as error:
            raise ApiError(
                503, f"The router, which knows the {page} of the service, does not answer; requests are served."
            ) from error

    async def ask(self, call: Call, document: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The answer to a request by deployment handle (see `deployments.client`), through the front end: one response,
        or one chunk after the other. What is refused gives `{"error": {...}, "status": ...}`."""
        try:
            fields = read_document(document, self.front_end.limits)
            async with contextlib.aclosing(self.front_end.answer(call, fields)) as pieces:
                async for piece in pieces:
                    data = piece.removeprefix("data: ").strip()
                    if data != "[DONE]":
                        yield json.loads(data)
        except ApiError as error:
            yield {**error.body(), "status": error.status}


HttpTarget = serve.ingress(None)(TargetServer)  # the app is that of `__serve_build_asgi_app__`, made in the replica

MAX_QUEUED_ANSWER_BYTES = 16 * 2**20
"""Answers kept until the learner fetches them; the oldest go first."""


# ---- how a replica is built from the settings


def prepare(settings: ClusterSettings) -> tuple[str, Path | None]:
    """Make the target and the head ready on this node: convert, join, or download what is not in the cache yet.

    Returns what vLLM loads: the target's directory or Hugging Face id, and the head's directory. Raises ValueError for
    a damaged file, or a head for another target.
    """
    target, drafter = target_source(settings.model.source), settings.drafter
    if drafter is None or not drafter.head:
        return target, None
    if drafter.is_vllms_own:
        return target, local_directory(target_source(drafter.head))
    return target, prepared_head(drafter.head, target)


def grammar_limits(limits: LimitSettings) -> GrammarLimits:
    return GrammarLimits(limits.grammar_timeout_s, limits.max_grammar_mib * 2**20)


def default_front_ends(num_cpus: float, num_gpus: float, own_gpus: float) -> int:
    """Front-end processes of a replica. num_cpus, num_gpus: of its node, as Ray counts them; own_gpus: the replica's,
    0 for an engine on the CPU, which needs the cores itself."""
    own_cpus = num_cpus * min(1.0, own_gpus / num_gpus) if num_gpus else 0.0
    return max(1, min(MAX_DEFAULT_FRONT_ENDS, int(own_cpus / CPUS_OF_A_FRONT_END)))


def use_all_cores_of_a_small_machine() -> None:
    """Let vLLM's CPU worker compute on every core where there are few. To be called on the replica's own node.

    By itself vLLM keeps one core free for its other processes, which mostly wait: on two cores that halves the speed.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) <= MAX_SMALL_MACHINE_CORES:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(str(core) for core in cores))


def engine_config(settings: ClusterSettings, target: str, head_dir: Path | None, env: Mapping[str, str]) -> LLMConfig:
    """`ray.serve.llm`'s configuration of the engine of a replica whose environment has `env`."""
    extra = {"enable_prompt_tokens_details": True, **settings.engine}  # usage says how much of a prompt was cached
    dtype = extra.pop("dtype", "auto")
    drafter = settings.drafter or DrafterSettings()  # its defaults have no head, and so draft nothing
    links = drafter.links  # None unless remote
    kwargs = engine_kwargs(
        None,
        head_dir,
        method=drafter.method,
        max_draft_tokens=drafter.max_draft_tokens,
        dtype=dtype,
        on_cpu=not settings.target.has_gpu,
        remote_deadline_s=None if links is None else links.max_deadline_ms / 1000,
        extra=extra,
    )
    if kwargs.get("scheduler_cls") == ASYNC_SCHEDULER:
        # Ray makes vLLM's configuration in a task, and it is read in other processes again. Each of them imports the
        # scheduler when it unpickles its class, and with it the permission for vLLM's V2 runner.
        kwargs["scheduler_cls"] = resolve_obj_by_qualname(ASYNC_SCHEDULER)
    if settings.drafter is not None:
        kwargs["speculative_config"] |= drafter.engine_options
    return LLMConfig(
        model_loading_config={"model_id": settings.model.id, "model_source": target},
        engine_kwargs=kwargs,
        placement_group_config={"bundle_per_worker": dict(settings.target.bundle)},
        runtime_env={"env_vars": dict(env)},
        log_engine_metrics=False,  # else Ray's, which `deployments.telemetry` does not read
    )
