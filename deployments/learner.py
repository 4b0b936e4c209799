"""The learner: trains the remote drafter's heads on, on the traffic of now, and proposes those that draft better.

Enters: answers that the targets kept of requests whose callers opted in. Leaves: heads in `learning.heads_dir`, with
where they come from, and in proposals to the router, which tries them on live traffic. In between: a buffer in memory
(`cluster.learning`), rounds of training (`peagle.train.continual`), and a gate: held-out answers of the newest traffic
and of the mix of before, drafted by the new head and by the current one.

It gives way to whatever else runs on its processor, and trains and judges for `learning.share` of the time. The target
is loaded when the first round begins.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ray import serve

from cluster.heads import HeadProposal, HeadTrial
from cluster.k_policy import PolicyUpdate
from cluster.learning import BETTER, Comparison, KeptAnswer, LearnerReport, TrafficBuffer, is_held_out, verdict
from cluster.settings import ClusterSettings, DrafterSettings
from deployments import DRAFTER_NAME, ROUTER_NAME, TARGET_NAME
from deployments.compat import ask_each, prepare_replica
from deployments.replicas import POLL_TIMEOUT_S, REPLICA_LOST, DrafterReport, LiveHead
from peagle.heads import candidate_directory, candidate_files, shipped_heads, target_digest
from peagle.store import cache_root

if TYPE_CHECKING:
    from peagle.train.continual import HeadInTraining

logger = logging.getLogger(__name__)

COLLECT_INTERVAL_S = 5.0
MAX_NICENESS = 19
HELD_OUT_FACTOR = 2
"""A head is judged by up to so many times `learning.min_held_out` answers of each mix."""


class Learner:
    """The one replica."""

    async def __init__(self, settings: ClusterSettings) -> None:  # type: ignore[misc]
        assert settings.learning is not None
        assert settings.drafter is not None
        os.nice(MAX_NICENESS)
        prepare_replica()
        self._settings, self._learning, self._drafter = settings, settings.learning, settings.drafter
        application = serve.get_replica_context().app_name
        self._target, self._drafters, self._router = (
            serve.get_deployment_handle(name, app_name=application) for name in (TARGET_NAME, DRAFTER_NAME, ROUTER_NAME)
        )
        self._rounds = Rounds(settings)
        self._buffer = TrafficBuffer(
            int(self._learning.buffer_mib * 2**20),
            3600 * self._learning.keep_hours,
            max_prompt_tokens=self._rounds.max_prompt_tokens,
        )
        self._counters: Counter[str] = Counter()
        self._busy_s = 0.0
        self._phase, self._problem = "collecting", ""
        self._last_round: dict[str, Any] = {}
        self._tasks = [asyncio.get_running_loop().create_task(work()) for work in (self._collect, self._learn)]

    async def report(self) -> LearnerReport:
        counters = {
            **self._counters,
            "busy_seconds": self._busy_s,
            **{f"answers_{name}": n for name, n in self._buffer.counters.items()},
        }
        kept = self._buffer.num_answers()
        return LearnerReport(self._phase, self._problem, kept, self._buffer.num_bytes, counters, self._last_round)

    async def check_health(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def _collect(self) -> None:
        while True:
            await asyncio.sleep(COLLECT_INTERVAL_S)
            try:
                taken = await ask_each(self._target, "take_answers", POLL_TIMEOUT_S)
            except (*REPLICA_LOST, TimeoutError):
                continue
            except Exception as error:  # the targets serve on, and keep what they can until it goes again
                self._problem = repr(error)
                logger.exception("answers cannot be fetched")
                continue
            self._buffer.add((one for found in taken if isinstance(found, list) for one in found), time.monotonic())

    async def _learn(self) -> None:
        num_new = self._buffer.num_new
        while True:
            await asyncio.sleep(COLLECT_INTERVAL_S)
            if num_new.total() < self._learning.min_new_answers:
                continue
            try:
                in_use = HeadsInUse(self._drafter, *await self._heads())
                by_head: Counter[LiveHead] = Counter()
                for workload, number in num_new.items():
                    by_head[in_use.head_of(workload)] += number
                for head, number in by_head.most_common(1):
                    if number >= self._learning.min_new_answers:
                        await self._round(head, in_use)
                        self._problem = ""
            except Exception as error:  # requests are served on, and the next answers may do better
                self._problem = repr(error)
                logger.exception("a round of learning failed")
            self._phase = "collecting"

    async def _round(self, head: LiveHead, in_use: "HeadsInUse") -> None:
        """Trains a head on, judges it, and proposes it if it is better."""

        def of(workload: str) -> bool:
            return in_use.head_of(workload) == head

        def held_out(of: Callable[[str], bool], newest: bool) -> list[KeptAnswer]:
            drawn = self._buffer.draw(2**62, held_out=True, newest=newest, of=of)
            return drawn[: HELD_OUT_FACTOR * self._learning.min_held_out]

        for workload in filter(of, list(self._buffer.num_new)):
            del self._buffer.num_new[workload]
        num_tokens, share = self._rounds.max_tokens, self._learning.replay_share
        recent = self._buffer.draw(int((1 - share) * num_tokens), held_out=False, of=of)
        num_before = int(share / (1 - share) * sum(answer.num_tokens for answer in recent))
        before, judged_before = self._rounds.replayed(num_before) or (
            self._buffer.draw(num_before, held_out=False, newest=False, of=of),
            held_out(of, newest=False),
        )
        judged = held_out(of, newest=True), judged_before
        alone = {
            name: (held_out(name.__eq__, newest=True), held_out(name.__eq__, newest=False))
            for name in self._buffer.num_answers()
            if in_use.has_room and of(name)
        }
        if not recent:
            return
        self._phase = "training"
        self._counters["rounds"] += 1
        self._rounds.keep_only({live.digest for live in in_use.heads})
        found = await asyncio.to_thread(self._rounds.train, head, [*recent, *before], self._buffer.target)
        self._busy_s += found["busy_s"]
        self._phase = "judging"
        found |= await asyncio.to_thread(self._rounds.judge, head.digest, *judged, alone)
        self._busy_s += found["judging_s"]
        found["parent"], found["parent_digest"] = head.name, head.digest
        found["num_recent"] = dict(Counter(answer.workload for answer in recent))
        found["num_before"] = dict(Counter(answer.workload for answer in before))
        self._last_round = found
        logger.warning("round %d: %s", self._counters["rounds"], found)
        if found["verdict"] == BETTER:
            folder = await asyncio.to_thread(self._rounds.save, head, found)
            self._counters["proposals"] += 1
            self._phase = "trial"
            workloads = tuple(found.get("alone", ())) or in_use.workloads_of(head)
            self._rounds.tell(head.digest, folder, await self._tried(workloads, head, folder, found))

    async def _tried(
        self, workloads: tuple[str, ...], parent: LiveHead, folder: Path, provenance: dict[str, Any]
    ) -> HeadTrial:
        """What became of a head on live traffic; waits for it."""
        files = await asyncio.to_thread(candidate_files, folder)  # the router may be on another node
        proposal = HeadProposal(folder.name, files, workloads, parent.digest, provenance)
        trial: HeadTrial = await self._router.propose.remote(proposal)
        while not trial.is_over:
            await asyncio.sleep(COLLECT_INTERVAL_S)
            with contextlib.suppress(*REPLICA_LOST):
                trial = await self._router.trial.remote(trial.name)
        logger.warning("%s is %s: %s", folder.name, trial.state, trial.reason)
        self._counters[f"heads_{trial.state.replace(' ', '_')}"] += 1
        return trial

    async def _heads(self) -> tuple[tuple[LiveHead, ...], Mapping[str, str]]:
        """Those that draft, and the digests of those that workloads were given."""
        update: PolicyUpdate = await self._router.policy_update.remote()
        for answer in await ask_each(self._drafters, "report", POLL_TIMEOUT_S):
            if isinstance(answer, DrafterReport):
                return answer.heads, update.heads.own
        raise RuntimeError("no drafter says which heads draft")


@dataclasses.dataclass(frozen=True)
class HeadsInUse:
    """Which head drafts for which workload. heads: live; own: digest by workload, of those that were given one."""

    settings: DrafterSettings
    heads: tuple[LiveHead, ...]
    own: Mapping[str, str]

    def head_of(self, workload: str) -> LiveHead:
        given = [head for head in self.heads if head.digest == self.own.get(workload)]
        return (given or self.heads[self.settings.head_index(workload) :])[0]

    def workloads_of(self, head: LiveHead) -> tuple[str, ...]:
        """As a proposal takes them: none stands for all without a head of their own."""
        named = dict.fromkeys((*self.settings.heads_by_workload, *self.own))
        return tuple(name for name in named if head.index and self.head_of(name) == head)

    @property
    def has_room(self) -> bool:
        """Whether one more workload can have its own head, and a place for a candidate is left."""
        return len(set(self.own.values())) + 1 < self.settings.spare_heads


class Rounds:
    """Training and judging, in the thread that calls. The target is loaded once, a head when its first round comes."""

    def __init__(self, settings: ClusterSettings) -> None:
        from peagle.train.continual import continual_recipe

        assert settings.learning is not None
        assert settings.drafter is not None
        self._settings, self._learning = settings, settings.learning
        self._num_draft_tokens = settings.max_draft_tokens
        recipe = continual_recipe(self._learning.recipe)
        batch = recipe.batch
        self.max_prompt_tokens = batch.max_tokens - 1
        self.max_tokens = recipe.schedule.max_steps * batch.num_sequences * batch.max_tokens
        self.target: Any = None
        self._weights = ""
        self._heads: dict[str, HeadInTraining] = {}  # by digest of the head that drafts, with which one is compared
        self._replay: list[KeptAnswer] | None = None
        if self._learning.replay is not None:
            from peagle.train.data import Conversations

            stored = Conversations.load(self._learning.replay)
            self._replay = [
                KeptAnswer("replay", "", tokens[:prompt], tokens[prompt:])
                for tokens, prompt in stored.documents()
                if len(tokens) - prompt > 1
            ]

    def replayed(self, num_tokens: int) -> tuple[list[KeptAnswer], list[KeptAnswer]] | None:
        """Conversations of `learning.replay` to train on, others each time, and to judge by; None without any."""
        if self._replay is None:
            return None
        chosen, trained, num_drawn = np.random.default_rng().permutation(len(self._replay)).tolist(), [], 0
        for answer in (self._replay[at] for at in chosen):
            if num_drawn < num_tokens and not is_held_out(answer.prompt):
                trained.append(answer)
                num_drawn += answer.num_tokens
        judged = [answer for answer in self._replay if is_held_out(answer.prompt)]
        return trained, judged[: HELD_OUT_FACTOR * self._learning.min_held_out]

    def keep_only(self, digests: Collection[str]) -> None:
        """Heads that draft no longer are trained on no longer."""
        self._heads = {digest: self._heads[digest] for digest in digests if digest in self._heads}

    def train(self, head: LiveHead, answers: list[KeptAnswer], weights: str) -> dict[str, Any]:
        """weights: digest of the target that wrote the answers. Raises ValueError where this node has another."""
        self._load_target(weights)
        if head.digest not in self._heads:
            self._heads[head.digest] = self._load(head.name)
        return dict(self._heads[head.digest].train(conversations(answers), self._rest))

    def judge(
        self,
        digest: str,
        recent: list[KeptAnswer],
        before: list[KeptAnswer],
        alone: Mapping[str, tuple[list[KeptAnswer], list[KeptAnswer]]],
    ) -> dict[str, Any]:
        """Figures on held-out answers, and the verdict. A head that got worse is dropped.

        alone: answers, recent and of before, of each workload that may have a head of its own. Where the new head is
        no better for all of them, the one that gains most on recent answers is judged by itself; where it passes, the
        verdict is on it, and its figures are under `alone`.
        """
        began_s = time.monotonic()
        found = self._judged(digest, recent, before)
        gains = {name: part["ratio"] for name, part in found["recent"].get("by_workload", {}).items() if name in alone}
        if found["verdict"] != BETTER and gains:
            best = max(gains, key=lambda name: gains[name])
            own = self._judged(digest, *alone[best])
            if own["verdict"] == BETTER:
                found |= {"alone": {best: own}, "verdict": BETTER}
        if found["verdict"].startswith("worse"):
            del self._heads[digest]
        took_s = time.monotonic() - began_s
        self._rest(took_s)
        return found | {"judging_s": round(took_s, 1)}

    def _judged(self, digest: str, recent: list[KeptAnswer], before: list[KeptAnswer]) -> dict[str, Any]:
        figures = {
            name: self._heads[digest].compare(
                conversations(answers), self._num_draft_tokens, [answer.workload for answer in answers]
            )
            for name, answers in (("recent", recent), ("before", before))
        }
        compared = [
            Comparison(found["num_answers"], found["ratio"], found["low"], found["high"]) for found in figures.values()
        ]
        said = verdict(
            *compared,
            min_answers=self._learning.min_held_out,
            min_gain=self._learning.min_gain,
            max_loss=self._learning.max_loss,
        )
        return {**figures, "verdict": said}

    def save(self, head: LiveHead, provenance: dict[str, Any]) -> Path:
        heads_dir = Path(self._learning.heads_dir) if self._learning.heads_dir else cache_root() / "learned"
        folder = heads_dir.resolve() / time.strftime(f"head-{head.index}-%Y%m%dT%H%M%S", time.gmtime())
        self._heads[head.digest].save(folder, {"learned": provenance})
        return folder

    def tell(self, digest: str, folder: Path, trial: HeadTrial) -> None:
        """What became of the head saved in `folder`, trained from that of `digest`. One that lost is dropped: the next
        round begins anew."""
        training = self._heads.pop(digest)
        if trial.state == "promoted":
            training.compare_with(folder)
            self._heads[trial.head] = training

    def _load_target(self, weights: str) -> None:
        """Has the target of this digest loaded; heads in training end with another."""
        import torch

        from deployments.drafter import target_source
        from peagle.train.target import Target

        if self._weights == weights:
            return
        self._heads.clear()
        self.target, self._weights = None, ""
        on_gpu = bool(self._learning.num_gpus)
        if not on_gpu:
            torch.set_num_threads(max(1, round(self._learning.num_cpus)))
        source = target_source(self._settings.model.source)
        self.target = Target(
            source, device="cuda" if on_gpu else "cpu", dtype=torch.bfloat16 if on_gpu else torch.float32
        )
        if (found := target_digest(source)) != weights:
            raise ValueError(f"{source} has the weights {found} on this node, and the targets answer with {weights}")
        self._weights = weights

    def _load(self, head: str) -> "HeadInTraining":
        from deployments.drafter import local_directory
        from peagle.train.continual import HeadInTraining

        folder = shipped_heads().get(head) or candidate_directory(head) or local_directory(head)
        if folder is None:
            raise ValueError(f"the head {head}, which drafts, is not on this node")
        return HeadInTraining(self._learning.recipe, self.target, folder)

    def _rest(self, took_s: float) -> None:
        time.sleep(took_s * (1 / self._learning.share - 1))


def conversations(answers: list[KeptAnswer]) -> Any:
    """As the trainer takes them (`peagle.train.data.Conversations`)."""
    from peagle.train.data import Conversations

    return Conversations.from_lists(
        [answer.prompt.tolist() for answer in answers], [answer.answer.tolist() for answer in answers]
    )
