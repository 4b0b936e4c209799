"""The learner: trains the remote drafter's heads on, on the traffic of now, and proposes those that draft better.

Enters: answers that the targets kept of requests whose callers opted in. Leaves: heads in `learning.heads_dir`, with
where they come from, and in proposals to the router, which tries them on live traffic. In between: a buffer in memory
(`cluster.learning`), rounds of training (`peagle.train.continual`), and a gate: held-out answers of the newest traffic
and of the mix of before, drafted by the new head and by the current one.

It gives way to whatever else runs on its processor, and trains for `learning.share` of the time at most. The target is
loaded when the first round begins.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ray import serve

from cluster.heads import HeadProposal, HeadTrial
from cluster.learning import BETTER, Comparison, KeptAnswer, LearnerReport, TrafficBuffer, is_held_out, verdict
from cluster.settings import ClusterSettings
from deployments import DRAFTER_NAME, ROUTER_NAME, TARGET_NAME
from deployments.compat import ask_each
from deployments.replicas import POLL_TIMEOUT_S, REPLICA_LOST, DrafterReport, LiveHead
from peagle.heads import candidate_directory, candidate_files, shipped_heads
from peagle.store import cache_root

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
        self._num_new: Counter[int] = Counter()  # answers by head since its last round
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
            answers = [answer for found in taken if isinstance(found, list) for answer in found]
            for answer in self._buffer.add(answers, time.monotonic()):
                self._num_new[self._drafter.head_index(answer.workload)] += 1

    async def _learn(self) -> None:
        while True:
            await asyncio.sleep(COLLECT_INTERVAL_S)
            index, num_new = max(self._num_new.items(), key=lambda item: item[1], default=(0, 0))
            if num_new < self._learning.min_new_answers:
                continue
            try:
                await self._round(index)
                self._problem = ""
            except Exception as error:  # requests are served on, and the next answers may do better
                self._problem = repr(error)
                logger.exception("a round of learning failed")
            self._num_new[index] -= num_new
            self._phase = "collecting"

    async def _round(self, index: int) -> None:
        """Trains the head of this index on, judges it, and proposes it if it is better."""
        head = await self._live_head(index)
        of = self._has(index)
        num_tokens, num_held_out = self._rounds.max_tokens, HELD_OUT_FACTOR * self._learning.min_held_out
        share = self._learning.replay_share
        recent = self._buffer.draw(int((1 - share) * num_tokens), held_out=False, of=of)
        num_before = int(share / (1 - share) * sum(answer.num_tokens for answer in recent))
        before, judged_before = self._rounds.replayed(num_before, num_held_out) or (
            self._buffer.draw(num_before, held_out=False, newest=False, of=of),
            self._buffer.draw(2**62, held_out=True, newest=False, of=of)[:num_held_out],
        )
        judged = self._buffer.draw(2**62, held_out=True, of=of)[:num_held_out]
        if not recent:
            return
        self._phase = "training"
        self._counters["rounds"] += 1
        found = await asyncio.to_thread(self._rounds.train, index, head, [*recent, *before])
        self._busy_s += found["busy_s"]
        self._phase = "judging"
        began_s = time.monotonic()
        found |= await asyncio.to_thread(self._rounds.judge, index, judged, judged_before)
        self._busy_s += time.monotonic() - began_s
        found["parent"], found["parent_digest"] = head.name, head.digest
        found["num_recent"] = dict(Counter(answer.workload for answer in recent))
        found["num_before"] = dict(Counter(answer.workload for answer in before))
        self._last_round = found
        logger.warning("round %d: %s", self._counters["rounds"], found)
        if found["verdict"] == BETTER:
            folder = await asyncio.to_thread(self._rounds.save, index, found)
            self._counters["proposals"] += 1
            self._phase = "trial"
            self._rounds.tell(index, folder, await self._tried(index, head, folder, found))

    async def _tried(self, index: int, parent: LiveHead, folder: Path, provenance: dict[str, Any]) -> HeadTrial:
        """What became of a head on live traffic; waits for it."""
        workloads = tuple(name for name in self._drafter.heads_by_workload if index and self._has(index)(name))
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

    def _has(self, index: int) -> Callable[[str], bool]:
        """Whether the head of this index drafts for a workload."""
        return lambda workload: self._drafter.head_index(workload) == index

    async def _live_head(self, index: int) -> LiveHead:
        for answer in await ask_each(self._drafters, "report", POLL_TIMEOUT_S):
            if isinstance(answer, DrafterReport):
                return answer.heads[index]
        raise RuntimeError("no drafter says which heads draft")


@dataclasses.dataclass
class InTraining:
    """A head that is trained on (`peagle.train.continual.HeadInTraining`), and the digest of the one that drafts, with
    which it is compared."""

    training: Any
    digest: str


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
        self._target: Any = None
        self._heads: dict[int, InTraining] = {}
        self._replay: list[KeptAnswer] | None = None
        if self._learning.replay is not None:
            from peagle.train.data import Conversations

            stored = Conversations.load(self._learning.replay)
            self._replay = [
                KeptAnswer("replay", "", tokens[:prompt], tokens[prompt:]) for tokens, prompt in stored.documents()
            ]

    def replayed(self, num_tokens: int, num_held_out: int) -> tuple[list[KeptAnswer], list[KeptAnswer]] | None:
        """Conversations of `learning.replay` to train on, others each time, and to judge by; None without any."""
        if self._replay is None:
            return None
        chosen, trained, num_drawn = np.random.default_rng().permutation(len(self._replay)).tolist(), [], 0
        for answer in (self._replay[at] for at in chosen):
            if num_drawn < num_tokens and not is_held_out(answer.prompt):
                trained.append(answer)
                num_drawn += answer.num_tokens
        return trained, [answer for answer in self._replay if is_held_out(answer.prompt)][:num_held_out]

    def train(self, index: int, head: LiveHead, answers: list[KeptAnswer]) -> dict[str, Any]:
        known = self._heads.get(index)
        if known is None or known.digest != head.digest:
            known = self._heads[index] = InTraining(self._load(head.name), head.digest)
        return dict(known.training.train(conversations(answers), self._rest))

    def judge(self, index: int, recent: list[KeptAnswer], before: list[KeptAnswer]) -> dict[str, Any]:
        """Figures on held-out answers, and the verdict. A head that got worse is dropped."""
        figures = {
            name: self._heads[index].training.compare(conversations(answers), self._num_draft_tokens)
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
        if said.startswith("worse"):
            del self._heads[index]
        return {**figures, "verdict": said}

    def save(self, index: int, provenance: dict[str, Any]) -> Path:
        heads_dir = Path(self._learning.heads_dir) if self._learning.heads_dir else cache_root() / "learned"
        folder = heads_dir.resolve() / time.strftime(f"head-{index}-%Y%m%dT%H%M%S", time.gmtime())
        self._heads[index].training.save(folder, {"learned": provenance})
        return folder

    def tell(self, index: int, folder: Path, trial: HeadTrial) -> None:
        """What became of the head saved in `folder`. One that lost is dropped: the next round begins anew."""
        if trial.state == "promoted":
            self._heads[index].training.compare_with(folder)
            self._heads[index].digest = trial.head
        else:
            del self._heads[index]

    def _load(self, head: str) -> Any:
        import torch

        from deployments.drafter import local_directory, target_source
        from peagle.train.continual import HeadInTraining
        from peagle.train.target import Target

        if self._target is None:
            on_gpu = bool(self._learning.num_gpus)
            if not on_gpu:
                torch.set_num_threads(max(1, round(self._learning.num_cpus)))
            source = target_source(self._settings.model.source)
            self._target = Target(
                source, device="cuda" if on_gpu else "cpu", dtype=torch.bfloat16 if on_gpu else torch.float32
            )
        folder = shipped_heads().get(head) or candidate_directory(head) or local_directory(head)
        if folder is None:
            raise ValueError(f"the head {head}, which drafts, is not on this node")
        return HeadInTraining(self._learning.recipe, self._target, folder)

    def _rest(self, took_s: float) -> None:
        time.sleep(took_s * (1 / self._learning.share - 1))


def conversations(answers: list[KeptAnswer]) -> Any:
    """As the trainer takes them (`peagle.train.data.Conversations`)."""
    from peagle.train.data import Conversations

    return Conversations.from_lists(
        [answer.prompt.tolist() for answer in answers], [answer.answer.tolist() for answer in answers]
    )
