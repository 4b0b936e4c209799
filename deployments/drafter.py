"""The drafter: replicas that hold P-EAGLE heads and their KV cache, and draft for all targets (`placement: remote`).

Enters: hidden states and tokens of the targets' steps, over connections that do not pass through Ray
(`peagle.drafter.server`). Leaves: drafts, over the same. Ray Serve starts, watches, restarts and replaces the replicas,
hands their addresses to the targets, and brings new heads as `user_config`.
"""

import asyncio
import dataclasses
import json
import logging
import os
import secrets
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray import serve

import peagle.heads
from cluster.heads import CANDIDATE, HeadOrders, HeadRef
from cluster.settings import ROW_DTYPES, Catalog, ClusterSettings, DrafterSettings, swapped
from deployments.compat import be_no_nicer, prepare_replica
from deployments.replicas import MAX_DRAIN_S, DrafterReport, LiveHead
from peagle.checkpoint import read_head_config
from peagle.drafter.engine import DraftEngine
from peagle.drafter.parallel_pass import ParallelPass
from peagle.drafter.protocol import ServedHead
from peagle.drafter.server import DrafterServer
from peagle.drafter.serving import DrafterLimits, load_served_head
from peagle.embedded import embedded_targets, prepare_target
from peagle.heads import candidate_directory, head_digest, keep_candidate, prepare_head

logger = logging.getLogger(__name__)

MAX_SMALL_MACHINE_CORES = 4
"""On so few cores a pass computes on all of them, else on half: the target waits meanwhile."""

MAX_NUM_ROWS = 2048
"""Rows of one pass. A step of more rows, long prompts, takes several."""

WEIGHT_INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class LoadedHead:
    """`runtime` drafts; `served` is what targets get to know of it."""

    name: str
    runtime: ParallelPass
    served: ServedHead

    @property
    def digest(self) -> str:
        return self.served.digest


# ---- checkpoints on this node: converted, joined or downloaded when they are not there yet


def target_source(source: str) -> str:
    """What vLLM loads for `model.source`: the directory of an embedded model, made ready here, else the source."""
    return str(prepare_target(source)) if source in embedded_targets() else source


def head_directory(head: str, target: str) -> Path:
    """The directory of a head made ready for the target, `target_source` of which is given.

    Raises:
        ValueError: a damaged file, or a head for another target.
    """
    return prepare_head(local_directory(head) or head, target_directory(target))


def local_directory(head: str) -> Path | None:
    """The local directory of a head, downloaded when its name is a Hugging Face id; None for a shipped name."""
    if Path(head).is_dir():
        return Path(head)
    if "/" not in head:
        return None
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(head, ignore_patterns=["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx"]))


def target_directory(target: str) -> Path:
    """Where a target's config.json is, and the weight files that hold its embeddings and output matrix.

    Of a Hugging Face id only these are downloaded: a drafter's node needs no more of the target, and repositories hold
    the weights of some targets several times, in other formats.
    """
    if Path(target).is_dir() or "/" not in target:
        return Path(target)
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(target, allow_patterns=["config.json", WEIGHT_INDEX]))
    files = {"model.safetensors"}
    if (index := folder / WEIGHT_INDEX).is_file():
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {file for name, file in names.items() if name.endswith(("embed_tokens.weight", "lm_head.weight"))}
    return Path(snapshot_download(target, allow_patterns=sorted(files)))


# ---- heads, from the settings' names to passes that run


class LackingHeadError(ValueError):
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
        self.num_places = len(drafter.heads) + drafter.spare_heads
        self._cache_gib = drafter.replicas.cache_gib / self.num_places
        self._target = target_source(settings.model.source)
        self._dtype: torch.dtype = getattr(torch, ROW_DTYPES[engine["dtype"]])
        self._max_model_len: int | None = engine.get("max_model_len")
        self.device = torch.device("cuda" if drafter.replicas.num_gpus else "cpu")
        num_at_targets = settings.max_num_targets * settings.max_num_seqs
        self.max_num_requests: int = drafter.replicas.max_num_requests or num_at_targets

    def directory(self, name: str) -> Path:
        """A head's directory, ready. Raises ValueError for a damaged head, or one of another target."""
        if name.startswith(CANDIDATE):
            if (directory := candidate_directory(name)) is None:
                raise LackingHeadError(f"the files of {name} are not on this node")
            name = str(directory)
        return head_directory(name, self._target)

    def load(self, name: str) -> LoadedHead:
        """A head with its share of the cache: the heads, and the places of spare ones, share `cache_gib` evenly.

        Raises:
            ValueError: a damaged head, one of another target, one of fewer depths than K_max, or a cache too small for
                one request of the longest context.
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
            max_depth=self._max_draft_tokens,
            cache_gib=self._cache_gib,
            # As in vLLM, the target's contexts: a head whose file says less drafts beyond what it says too.
            max_context=self._max_model_len or config.max_position_embeddings,
        )
        target_dir = target_directory(self._target)
        return LoadedHead(name, *load_served_head(directory, target_dir, limits, self.device, self._dtype))


class DrafterReplica:
    """One replica. Its constructor returns when the server listens, so a running replica is a ready one."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Raises ValueError for heads that cannot be used: Serve shows it and tries again."""
        assert settings.drafter is not None
        assert settings.drafter.replicas is not None
        be_no_nicer()
        prepare_replica()
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._settings: DrafterSettings = settings.drafter
        self._refused = ""
        self._is_configured = False
        self._swapping = asyncio.Lock()
        self._swaps: set[asyncio.Task[None]] = set()
        if not settings.drafter.replicas.num_gpus:
            num_cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(num_cores if num_cores <= MAX_SMALL_MACHINE_CORES else num_cores // 2)
        self._loader = HeadLoader(settings)
        # A head stays in its place of engine and server; which index of the targets' it drafts for is in the reports.
        self._places = {place: self._loader.load(name) for place, name in enumerate(self._settings.heads)}
        self._live = self._configured = tuple(HeadRef(head.name, head.digest) for head in self._places.values())
        self._orders = HeadOrders()
        self._problems: dict[str, str] = {}
        self._lacking: tuple[str, ...] = ()
        self._engine = DraftEngine(
            {place: head.runtime for place, head in self._places.items()},
            max_num_requests=self._loader.max_num_requests,
        )
        host = settings.drafter.replicas.host or str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        served = {place: head.served for place, head in self._places.items()}
        # Targets hear it through Ray; whoever else reaches the port is not let in.
        self._key = secrets.token_hex(16)
        self._server = DrafterServer(
            self._engine,
            served,
            host=host,
            port=0,
            device=self._loader.device,
            key=self._key,
            shares_gpu=bool((settings.drafter.replicas.num_gpus or 0.0) % 1.0),
        )
        self._server.start()
        logger.info("drafting at %s on %s", self._server.address, self._loader.device)

    async def report(self) -> DrafterReport:
        """Who this replica is, and what it has counted."""
        heads = tuple(LiveHead(index, head.name, head.digest) for index, head in enumerate(self._live))
        served = {name.removeprefix("num_"): value for name, value in dataclasses.asdict(self._server.stats).items()}
        served["refused_connections"] = served.pop("refused")  # `refused` is the engine's: requests without drafts
        counters = {**dataclasses.asdict(self._engine.counters), **served}
        return DrafterReport(
            self._replica,
            self._server.address,
            heads,
            self._refused,
            counters,
            self._key,
            configured=self._configured,
            orders=self._orders,
            problems=dict(self._problems),
            lacking=self._lacking,
        )

    async def check_health(self) -> None:
        """Raise where the serving thread is dead or hangs, or its passes all fail: Serve then replaces the replica."""
        if not self._server.is_healthy():
            raise RuntimeError(f"the drafter does not draft; its last error: {self._server.last_error or 'none'}")

    async def reconfigure(self, user_config: Any) -> None:
        """Put the heads that `user_config` names in the place of those that differ.

        A replica that starts returns with the new heads. One that serves returns at once and swaps while targets draft:
        Serve counts a replica out until then. Never raises for a head that does not fit: Serve would end the replica.
        The heads that are live stay, and the reason stands in the log, in /drafting and in /metrics.
        """
        if not self._is_configured:
            self._is_configured = True
            await self._swap(user_config or {})
            return
        self._begin(self._swap(user_config or {}))

    async def follow(self, orders: HeadOrders) -> None:
        """Draft with these heads, from the router. Returns at once; reports say what became of it."""
        if orders != self._orders:
            self._orders, self._problems, self._lacking = orders, {}, ()
            self._begin(self._swap(None))

    async def take_candidate(self, name: str, files: Mapping[str, bytes]) -> None:
        """The files of a head that the router ordered and this node has not. Raises ValueError, OSError."""
        if name in self._lacking:
            in_use = {head.name for head in (*self._orders.instead.values(), *self._orders.extra)}
            await asyncio.to_thread(keep_candidate, name, files, in_use)
            await self._swap(None)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._swaps.add(task)
        task.add_done_callback(self._swaps.discard)

    async def _swap(self, user_config: Any) -> None:
        """Put the heads of `user_config` (None: the last one) and of the router's orders to work."""
        async with self._swapping:
            try:
                configured = self._configured
                if user_config is not None:
                    # Over the settings, not over the heads that are live: a replica that starts now never had those.
                    catalog = Catalog((), Path(peagle.heads.__file__).parent, read_head_config)
                    asked = swapped(self._settings, user_config, catalog)
                    configured = tuple([await asyncio.to_thread(self._found, name) for name in asked.heads])
                await asyncio.to_thread(self._put, configured, self._orders)
            except Exception as error:  # whatever a head's files make of it, the reason must show
                foreseen = isinstance(error, ValueError | OSError | RuntimeError)  # the last: no memory for two heads
                reason = str(error) if foreseen else repr(error)
                if user_config is None:
                    self._problems["orders"] = reason
                else:
                    self._refused = reason
                logger.error("new heads are refused, and those of now stay: %s", reason, exc_info=not foreseen)
            else:
                self._refused = self._refused if user_config is None else ""

    def _put(self, configured: tuple[HeadRef, ...], orders: HeadOrders) -> None:
        """Raises for a head of `configured`, and changes nothing then; what is wrong with others is in reports."""
        self._problems, self._lacking = {}, ()
        wanted = tuple(self._ordered(orders.instead.get(head.digest)) or head for head in configured)
        extra = [head for head in map(self._ordered, orders.extra) if head is not None]
        kept, before = {head.digest for head in (*wanted, *extra)}, self._live
        self._load(wanted, kept)
        self._configured, self._live = configured, (*wanted, *self._present(extra))
        for head in extra:
            try:
                self._load([head], kept)
            except Exception as error:  # noqa: BLE001  # whatever its files make of it
                self._problems[head.name] = str(error) if isinstance(error, ValueError) else repr(error)
        self._live = (*wanted, *self._present(extra))
        for index, head in enumerate(self._live):
            if head not in before:
                logger.info("head %d is %s (%s)", index, head.name, head.digest)

    def _found(self, name: str) -> HeadRef:
        return HeadRef(name, head_digest(self._loader.directory(name)))

    def _ordered(self, wanted: HeadRef | None) -> HeadRef | None:
        """A head that the router ordered, if it is on this node and the one that it was."""
        if wanted is None:
            return None
        try:
            found = self._found(wanted.name)
            if wanted.digest not in ("", found.digest):
                raise ValueError(f"the files of {wanted.name} are no longer those of head {wanted.digest}")
        except LackingHeadError:
            self._lacking = (*self._lacking, wanted.name)
        except (ValueError, OSError) as error:
            self._problems[wanted.name] = str(error)
        else:
            return found
        return None

    def _load(self, heads: Sequence[HeadRef], kept: Collection[str]) -> None:
        """All, then each into a free place, or that of a head which is not `kept`."""
        loaded = {head.digest: self._loader.load(head.name) for head in heads if not self._present([head])}
        used = {head.digest for head in self._live}
        for digest, new in loaded.items():
            if new.digest != digest:
                raise ValueError(f"the files of {new.name} are no longer those of head {digest}")
            free = [place for place in range(self._loader.num_places) if place not in self._places]
            idle = [place for place, old in self._places.items() if old.digest not in kept]
            place = [*free, *sorted(idle, key=lambda place: self._places[place].digest in used)][0]
            self._server.swap(place, new.runtime, new.served)
            self._places[place] = new

    def _present(self, heads: Sequence[HeadRef]) -> list[HeadRef]:
        present = {head.digest for head in self._places.values()}
        return [head for head in heads if head.digest in present]

    async def __del__(self) -> None:
        """Serve retires this replica: targets know already, and leave it as their requests end."""
        end_s = time.monotonic() + MAX_DRAIN_S
        while self._server.report()["targets"] and time.monotonic() < end_s:
            await asyncio.sleep(0.2)
        self._server.stop()
