"""The learner: trains the remote drafter's heads on, on the traffic of now, and proposes those that draft better.

Enters: answers that the targets kept of requests whose callers opted in. Leaves: heads in `learning.heads_dir`, with
where they come from, and in proposals to the router, which tries them on live traffic. In between: a buffer in memory
(`cluster.learning`) and rounds of training (`peagle.train.continual`). A gate compares the new head with the current
one on held-out answers of the newest traffic and of the mix of before.

It gives way to whatever else runs on its processor, and trains and judges for `learning.share` of the time. The target
is loaded when the first round begins.
"""

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from ray import serve

from cluster.heads import HeadChange, HeadProposal, HeadRef
from cluster.learning import BETTER, KeptAnswer, LearnerReport, TrafficBuffer, judge_gain
from cluster.settings import ClusterSettings
from deployments import ROUTER_NAME, TARGET_NAME
from deployments.checkpoints import local_directory, target_source
from deployments.compat import ask_each, prepare_replica
from deployments.replicas import POLL_TIMEOUT_S, REPLICA_LOST
from peagle.heads import candidate_directory, candidate_files, shipped_heads, target_digest
from peagle.store import cache_root
from peagle.train.continual import HeadInTraining, continual_recipe
from peagle.train.data import Conversations
from peagle.train.target import Target

logger = logging.getLogger(__name__)

COLLECT_INTERVAL_S = 5.0
MAX_NICENESS = 19
REPLAY_SHARE = 0.3
"""Share of a round's tokens from the mix of before."""

HELD_OUT_FACTOR = 2
"""A head is judged by up to this number times `learning.min_held_out` answers of each mix."""


class Learner:
    """The one replica."""

    async def __init__(self, settings: ClusterSettings) -> None:  # type: ignore[misc]
        assert settings.learning is not None
        assert settings.drafter is not None
        os.nice(MAX_NICENESS)
        prepare_replica()
        self._settings, self._learning = settings, settings.learning
        application = serve.get_replica_context().app_name
        self._target, self._router = (
            serve.get_deployment_handle(name, app_name=application) for name in (TARGET_NAME, ROUTER_NAME)
        )
        self._trainer = HeadTrainer(settings)
        self._buffer = TrafficBuffer(
            int(self._learning.buffer_mib * 2**20),
            3600 * self._learning.keep_hours,
            max_prompt_tokens=self._trainer.max_prompt_tokens,
            replay=load_answers(self._learning.replay),
        )
        self._counters: dict[str, Any] = Counter(busy_seconds=0)
        self._phase, self._problem = "collecting", ""
        self._last_round: dict[str, Any] = {}
        self._tasks = [asyncio.get_running_loop().create_task(work()) for work in (self._collect, self._learn)]

    async def report(self) -> LearnerReport:
        counters = {**self._counters, **{f"answers_{name}": n for name, n in self._buffer.counters.items()}}
        kept = self._buffer.num_answers()
        return LearnerReport(self._phase, self._problem, kept, self._buffer.num_bytes, counters, self._last_round)

    async def _collect(self) -> None:
        while True:
            await asyncio.sleep(COLLECT_INTERVAL_S)
            try:
                for answers in await ask_each(self._target, "fetch_answers", POLL_TIMEOUT_S):
                    if isinstance(answers, list):  # else what a replica raised
                        self._buffer.add(answers, time.monotonic())
            except (*REPLICA_LOST, TimeoutError):
                pass
            except Exception as error:  # the targets serve on, and keep what they can until it goes again
                self._problem = repr(error)
                logger.exception("answers cannot be fetched")

    async def _learn(self) -> None:
        while True:
            await asyncio.sleep(COLLECT_INTERVAL_S)
            if self._buffer.num_new.total() < self._learning.min_new_answers:
                continue
            try:
                await self._run_round(await self._router.live_head.remote())
                self._problem = ""
            except Exception as error:  # requests are served on, and the next answers may do better
                self._problem = repr(error)
                logger.exception("a round of learning failed")
            self._phase = "collecting"

    async def _run_round(self, head: HeadRef) -> None:
        """Train a head on, judge it, and propose it if it is better."""
        self._buffer.num_new.clear()
        num_recent = (1 - REPLAY_SHARE) * self._trainer.max_tokens
        recent = self._buffer.draw(held_out=False, max_tokens=num_recent)
        num_before = REPLAY_SHARE / (1 - REPLAY_SHARE) * sum(answer.num_tokens for answer in recent)
        before = self._buffer.draw(held_out=False, newest=False, max_tokens=num_before)
        if not recent:
            return
        num_judged = HELD_OUT_FACTOR * self._learning.min_held_out
        draw_judged = functools.partial(self._buffer.draw, held_out=True, max_answers=num_judged)
        judged = draw_judged(), draw_judged(newest=False)
        self._phase = "training"
        self._counters["rounds"] += 1
        found = await asyncio.to_thread(self._trainer.train, head, [*recent, *before], self._buffer.target)
        self._counters["busy_seconds"] += found["busy_s"]
        self._phase = "judging"
        found |= await asyncio.to_thread(self._trainer.judge, *judged)
        self._counters["busy_seconds"] += found["judging_s"]
        found["parent"], found["parent_digest"] = head.name, head.digest
        found["num_recent"] = dict(Counter(answer.workload for answer in recent))
        found["num_before"] = dict(Counter(answer.workload for answer in before))
        self._last_round = found
        logger.warning("round %d: %s", self._counters["rounds"], found)
        if found["verdict"] == BETTER:
            folder = await asyncio.to_thread(self._trainer.save, found)
            self._counters["proposals"] += 1
            self._phase = "trial"
            files = await asyncio.to_thread(candidate_files, folder)  # the router may be on another node
            proposal = HeadProposal(folder.name, files, head.digest, found)
            try:
                change = await self._try_head(proposal)
            except Exception:
                self._trainer.drop(folder)
                raise
            self._trainer.end_trial(folder, change)

    async def _try_head(self, proposal: HeadProposal) -> HeadChange:
        """Propose a head, and wait for the end of its trial."""
        change: HeadChange = await self._router.propose.remote(proposal)
        while not change.is_over:
            await asyncio.sleep(COLLECT_INTERVAL_S)
            with contextlib.suppress(*REPLICA_LOST):
                change = await self._router.trial.remote(change.name)
        logger.warning("%s is %s: %s", proposal.source, change.state, change.reason)
        self._counters[f"heads_{change.state.replace(' ', '_')}"] += 1
        return change


class HeadTrainer:
    """Trains heads on and judges them, in the thread that calls. The target is loaded once, a head for its first
    round."""

    def __init__(self, settings: ClusterSettings) -> None:
        assert settings.learning is not None
        self._settings, self._learning = settings, settings.learning
        recipe = continual_recipe(self._learning.recipe)
        batch = recipe.batch
        self.max_prompt_tokens = batch.max_tokens - 1
        self.max_tokens = recipe.schedule.max_steps * batch.num_sequences * batch.max_tokens
        self.target: Any = None
        self._weights = ""
        self._parent = ""  # digest of the head that drafts, with which the one in training is compared
        self._head: HeadInTraining | None = None
        self._folders: dict[str, Path] = {}  # of promoted heads, by digest

    def train(self, head: HeadRef, answers: list[KeptAnswer], weights: str) -> dict[str, Any]:
        """Run one round. weights: digest of the target that wrote the answers. Raises ValueError where this node has
        another target."""
        self._load_target(weights)
        if self._head is None or self._parent != head.digest:
            self._head = None  # its memory is free before another is loaded
            self._head, self._parent = self._load(head), head.digest
        return dict(self._head.train(conversations(answers), self._rest))

    def judge(self, recent: list[KeptAnswer], before: list[KeptAnswer]) -> dict[str, Any]:
        """Figures on held-out answers, and the verdict. A head that got worse is dropped."""
        began_s, limits, head = time.monotonic(), self._learning, self._head
        assert head is not None

        def compare(answers: list[KeptAnswer]) -> dict[str, Any]:
            names = [answer.workload for answer in answers]
            return head.compare(conversations(answers), self._settings.max_draft_tokens, names)

        found = {"recent": compare(recent), "before": compare(before)}
        verdict = judge_gain(found["recent"], found["before"], limits.min_held_out, limits.min_gain, limits.max_loss)
        if verdict.startswith("worse"):
            self._head = None
        took_s = time.monotonic() - began_s
        self._rest(took_s)
        return {**found, "verdict": verdict, "judging_s": round(took_s, 1)}

    def save(self, provenance: dict[str, Any]) -> Path:
        assert self._head is not None
        heads_dir = Path(self._learning.heads_dir) if self._learning.heads_dir else cache_root() / "learned"
        folder = heads_dir.resolve() / time.strftime("head-%Y%m%dT%H%M%S", time.gmtime())
        self._head.save(folder, {"learned": provenance})
        return folder

    def end_trial(self, folder: Path, change: HeadChange) -> None:
        """The head saved in `folder` was tried. The next round begins from the head that drafts now."""
        self._head = None
        if change.state == "promoted":
            self._folders[change.head] = folder
        else:
            self.drop(folder)

    def drop(self, folder: Path) -> None:
        """Remove a saved head that was not promoted, except from a folder of the operator's."""
        if self._learning.heads_dir is None:
            shutil.rmtree(folder, ignore_errors=True)

    def _load_target(self, weights: str) -> None:
        """Has the target of this digest loaded; a head in training ends with another."""
        if self._weights == weights:
            return
        self._head = None
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

    def _load(self, head: HeadRef) -> HeadInTraining:
        known = self._folders.get(head.digest) or shipped_heads().get(head.name) or candidate_directory(head.name)
        if (folder := known or local_directory(head.name)) is None:
            raise ValueError(f"the head {head.name}, which drafts, is not on this node")
        return HeadInTraining(self._learning.recipe, self.target, folder, self._settings.max_draft_tokens)

    def _rest(self, took_s: float) -> None:
        time.sleep(took_s * (1 / self._learning.share - 1))


def load_answers(folder: str | None) -> list[KeptAnswer]:
    """Stored conversations (`peagle generate`); [] without a folder."""
    documents = Conversations.load(folder).documents() if folder else ()
    return [
        KeptAnswer("replay", "", tokens[:prompt], tokens[prompt:])
        for tokens, prompt in documents
        if len(tokens) - prompt > 1
    ]


def conversations(answers: list[KeptAnswer]) -> Conversations:
    """As the trainer takes them."""
    return Conversations.from_lists(
        [answer.prompt.tolist() for answer in answers], [answer.answer.tolist() for answer in answers]
    )
