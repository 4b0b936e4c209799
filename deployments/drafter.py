"""The drafter: replicas that hold P-EAGLE heads and their KV cache, and draft for all targets (`placement: remote`).

Hidden states and drafts do not pass through Ray (`peagle.drafter.server`). Ray Serve starts, watches, restarts and
replaces the replicas, hands their addresses to the targets, and brings new heads as `user_config`.
"""

import asyncio
import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from ray import serve

import peagle.heads
from cluster.heads import CANDIDATE, DesiredHeads, DrafterReport, HeadRef
from cluster.settings import ROW_DTYPES, Catalog, ClusterSettings, DrafterSettings, swapped
from deployments.checkpoints import prepared_head, target_directory, target_source
from deployments.compat import be_no_nicer, prepare_replica
from deployments.replicas import MAX_DRAIN_S, MAX_SMALL_MACHINE_CORES
from peagle.checkpoint import read_head_config
from peagle.drafter.engine import DraftEngine
from peagle.drafter.parallel_pass import ParallelPass
from peagle.drafter.protocol import ServedHead
from peagle.drafter.server import DrafterServer
from peagle.drafter.serving import DrafterLimits, load_served_head
from peagle.heads import candidate_directory, head_digest, keep_candidate

logger = logging.getLogger(__name__)

MAX_NUM_ROWS = 2048
"""Rows of one pass. A step of more rows, long prompts, takes several."""

MIN_NUM_REQUESTS = 256
"""Requests that a pass has room for at the least."""


class LoadedHead(NamedTuple):
    name: str
    digest: str
    runtime: ParallelPass  # drafts
    served: ServedHead  # what targets get to know of it


class MissingHeadError(ValueError):
    """A candidate whose files the router has to send first."""


class HeadLoader:
    """Loads heads of one drafter onto one device."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Prepares the target's checkpoint, which heads share tables with. Raises ValueError for a damaged one."""
        drafter, engine = settings.drafter, settings.engine
        assert drafter is not None
        assert drafter.replicas is not None
        assert drafter.max_draft_tokens is not None
        self._max_draft_tokens: int = drafter.max_draft_tokens
        self.num_slots = 1 + drafter.spare_heads
        self._cache_gib = drafter.replicas.cache_gib / self.num_slots
        self._target = target_source(settings.model.source)
        self._dtype: torch.dtype = getattr(torch, ROW_DTYPES[engine["dtype"]])
        self._max_model_len: int | None = engine.get("max_model_len")
        self.device = torch.device("cuda" if drafter.replicas.num_gpus else "cpu")
        # `peagle serve` leaves a fixed number of targets out of `settings`, so that changing it restarts no drafter.
        self.max_num_requests = max(MIN_NUM_REQUESTS, settings.max_num_targets * settings.max_num_seqs)

    def directory(self, name: str) -> Path:
        """A head's directory, ready. Raises ValueError for a damaged head, or one of another target."""
        if name.startswith(CANDIDATE):
            if (directory := candidate_directory(name)) is None:
                raise MissingHeadError(f"the files of {name} are not on this node")
            name = str(directory)
        return prepared_head(name, self._target)

    def load(self, name: str) -> LoadedHead:
        """A head with its share of the cache: the slots share `cache_gib` evenly. Raises ValueError for a damaged head,
        another target's, one that drafts fewer tokens than K_max, or a cache too small for one request of the longest
        context.
        """
        directory = self.directory(name)
        config = read_head_config(directory)
        if config.max_depths < self._max_draft_tokens:
            raise ValueError(
                f"the head {name} was trained for {config.num_depths} depths, the targets draft "
                f"{self._max_draft_tokens}"
            )
        limits = DrafterLimits(
            max_num_requests=self.max_num_requests,
            max_num_rows=max(MAX_NUM_ROWS, self.max_num_requests * 2 * (1 + self._max_draft_tokens)),
            max_draft_tokens=self._max_draft_tokens,
            cache_gib=self._cache_gib,
            # As in vLLM, the target's contexts: a head whose file says less drafts beyond what it says too.
            max_context=self._max_model_len or config.max_position_embeddings,
        )
        target_dir = target_directory(self._target)
        runtime, served = load_served_head(directory, target_dir, limits, self.device, self._dtype)
        return LoadedHead(name, served.digest, runtime, served)


class HeadSlots:
    """The heads of one replica, a slot each in its engine and server: which are configured, desired, and draft.

    A head stays in its slot. Targets name heads by their index in `drafting`: the configured head, or what the router
    desires in its place, then the candidate.
    """

    def __init__(self, settings: DrafterSettings, loader: HeadLoader) -> None:
        """Loads the head of the settings. Raises ValueError if it cannot be used."""
        self._settings, self._loader, self._lock = settings, loader, asyncio.Lock()
        head = loader.load(settings.head)
        self.loaded = {0: head}
        self.configured = HeadRef(head.name, head.digest)
        self.drafting: tuple[HeadRef, ...] = (self.configured,)
        self.desired = DesiredHeads()
        self.refused = ""
        self.problems: dict[str, str] = {}
        self.missing: tuple[str, ...] = ()
        self.server: DrafterServer | None = None

    async def configure(self, user_config: Any) -> None:
        """Let the head that `user_config` names draft. Where it does not fit, the head of now stays, and `refused` says
        why."""

        def work() -> None:
            # Over the settings, not over the head of now: a replica that starts now never had that one.
            catalog = Catalog((), Path(peagle.heads.__file__).parent, read_head_config)
            self._apply(self._find(swapped(self._settings, user_config, catalog).head))

        self.refused = await self._run(work)

    async def apply(self, desired: DesiredHeads) -> None:
        """Let the heads that the router desires draft, as far as `problems` and `missing` say nothing else."""
        if desired != self.desired:
            self.desired, self.problems, self.missing = desired, {}, ()
            await self._apply_again()

    async def keep_files(self, name: str, files: Mapping[str, bytes]) -> None:
        """The files of a head that is `missing`. Raises ValueError, OSError."""
        if name in self.missing:
            in_use = {head.name for head in (self.desired.replacement, self.desired.candidate) if head is not None}
            await asyncio.to_thread(keep_candidate, name, files, in_use)
            await self._apply_again()

    async def _apply_again(self) -> None:
        if problem := await self._run(lambda: self._apply(self.configured)):
            self.problems["desired"] = problem

    async def _run(self, work: Callable[[], None]) -> str:
        """Load heads in a thread, once at a time. Returns what went wrong, "" where nothing did."""
        async with self._lock:
            try:
                await asyncio.to_thread(work)
            except Exception as error:  # whatever a head's files make of it, the reason must show
                is_foreseen = isinstance(error, ValueError | OSError | RuntimeError)  # the last: no memory for two
                reason = str(error) if is_foreseen else repr(error)
                logger.error("new heads are refused, and those of now stay: %s", reason, exc_info=not is_foreseen)
                return reason
            return ""

    def _apply(self, configured: HeadRef) -> None:
        """Load what is to draft. Raises for `configured`, or the head in its place, and changes nothing then."""
        self.problems, self.missing = {}, ()
        replacement = self.desired.replacement if self.desired.replaced == configured.digest else None
        live, candidate = self._find_desired(replacement) or configured, self._find_desired(self.desired.candidate)
        needed, before = {head.digest for head in (live, candidate) if head is not None}, self.drafting
        self._load(live, needed)
        self.configured = configured
        self.drafting = (live,) if candidate is None or not self._is_loaded(candidate) else (live, candidate)
        if candidate is not None:
            try:
                self._load(candidate, needed)
                self.drafting = live, candidate
            except Exception as error:  # noqa: BLE001  # whatever its files make of it
                self.problems[candidate.name] = str(error) if isinstance(error, ValueError) else repr(error)
        for index, head in enumerate(self.drafting):
            if head not in before:
                logger.info("head %d is %s (%s)", index, head.name, head.digest)

    def _find(self, name: str) -> HeadRef:
        return HeadRef(name, head_digest(self._loader.directory(name)))

    def _find_desired(self, wanted: HeadRef | None) -> HeadRef | None:
        """A head that the router desires, where its files are on this node and unchanged."""
        if wanted is None:
            return None
        try:
            found = self._find(wanted.name)
            if wanted.digest not in ("", found.digest):
                raise ValueError(f"the files of {wanted.name} are no longer those of head {wanted.digest}")
            return found
        except MissingHeadError:
            self.missing = (*self.missing, wanted.name)
        except (ValueError, OSError) as error:
            self.problems[wanted.name] = str(error)
            logger.warning("the head %s is desired and does not draft: %s", wanted.name, error)
        return None

    def _load(self, head: HeadRef, needed: Collection[str]) -> None:
        """Load a head into a free slot, or into that of a head which is not `needed`."""
        if self._is_loaded(head):
            return
        new = self._loader.load(head.name)
        if new.digest != head.digest:
            raise ValueError(f"the files of {new.name} are no longer those of head {head.digest}")
        drafting = {head.digest for head in self.drafting}
        free = [slot for slot in range(self._loader.num_slots) if slot not in self.loaded]
        idle = [slot for slot, old in self.loaded.items() if old.digest not in needed]
        slot = [*free, *sorted(idle, key=lambda slot: self.loaded[slot].digest in drafting)][0]
        assert self.server is not None
        self.server.swap(slot, new.runtime, new.served)
        self.loaded[slot] = new

    def _is_loaded(self, head: HeadRef) -> bool:
        return any(loaded.digest == head.digest for loaded in self.loaded.values())


class DrafterReplica:
    """One replica. Its constructor returns when the server listens, so a running replica is a ready one."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Raises ValueError for heads that cannot be used: Serve shows it and tries again."""
        assert settings.drafter is not None
        assert settings.drafter.replicas is not None
        be_no_nicer()
        prepare_replica()
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._is_configured = False
        self._swaps: set[asyncio.Task[None]] = set()
        if not settings.drafter.replicas.num_gpus:
            num_cores = len(os.sched_getaffinity(0))  # the target waits during a pass
            torch.set_num_threads(num_cores if num_cores <= MAX_SMALL_MACHINE_CORES else num_cores // 2)
        loader = HeadLoader(settings)
        self._heads = HeadSlots(settings.drafter, loader)
        self._engine = DraftEngine({slot: head.runtime for slot, head in self._heads.loaded.items()})
        # Targets hear it through Ray; whoever else reaches the port is not let in.
        self._key = secrets.token_hex(16)
        self._server = self._heads.server = DrafterServer(
            self._engine,
            {slot: head.served for slot, head in self._heads.loaded.items()},
            host=settings.drafter.replicas.host or str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
            port=0,
            device=loader.device,
            key=self._key,
        )
        self._server.start()
        logger.info("drafting at %s on %s", self._server.address, loader.device)

    async def report(self) -> DrafterReport:
        """Identity, heads and counts of this replica."""
        heads = self._heads
        return DrafterReport(
            self._replica,
            self._server.address,
            heads.drafting,
            heads.refused,
            dataclasses.asdict(self._engine.counters) | dataclasses.asdict(self._server.stats),
            self._key,
            heads.configured,
            heads.desired,
            dict(heads.problems),
            heads.missing,
        )

    async def check_health(self) -> None:
        """Raise where the serving thread is dead or hangs, or its passes all fail: Serve then replaces the replica."""
        if not self._server.is_healthy():
            raise RuntimeError(f"the drafter does not draft; its last error: {self._server.last_error or 'none'}")

    async def reconfigure(self, user_config: Any) -> None:
        """Put the head that `user_config` names in the place of the configured one. A replica that serves returns at
        once, since Serve counts it out until then. Never raises for a head that does not fit, since Serve would end the
        replica: the heads that draft stay, and the reason stands in the log, in /drafting and in /metrics.
        """
        work = self._heads.configure(user_config or {})
        if self._is_configured:
            self._begin(work)
        else:
            self._is_configured = True
            await work

    async def apply_desired(self, desired: DesiredHeads) -> None:
        """Draft with the heads that the router desires. Returns at once; reports say what became of it."""
        self._begin(self._heads.apply(desired))

    async def keep_files(self, name: str, files: Mapping[str, bytes]) -> None:
        """The files of a head that the router desires and this node has not. Raises ValueError, OSError."""
        await self._heads.keep_files(name, files)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._swaps.add(task)
        task.add_done_callback(self._swaps.discard)

    async def __del__(self) -> None:
        """Serve retires this replica: targets know already, and leave it as their requests end."""
        end_s = time.monotonic() + MAX_DRAIN_S
        while self._server.targets and time.monotonic() < end_s:
            await asyncio.sleep(0.2)
        self._server.stop()
