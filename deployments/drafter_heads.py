"""Heads of a drafter replica, from the settings' names to passes that run.

Enters: names of heads, the target's source, and the limits in the settings. Leaves: `LoadedHead`s, each with its
weights and its share of the cache on the replica's device; or a ValueError that says why a head cannot draft here.
"""

import dataclasses
from pathlib import Path

import torch

from cluster.drafter_settings import ROW_DTYPES, SHARED_SHAPE, DrafterSettings
from cluster.settings import ClusterSettings
from deployments.checkpoints import head_directory, local_directory, target_source
from peagle.config import DrafterConfig
from peagle.head_files import read_head_config
from peagle.runtime.draft_engine import HeadRuntime
from peagle.runtime.hello import ServedHead
from peagle.runtime.serving import DrafterLimits, load_served_head
from peagle.runtime.steps import DTYPES

MAX_NUM_ROWS = 2048
"""Rows of one pass. A step of more rows, long prompts, takes several."""

DEFAULT_MAX_NUM_SEQS = 256
"""Requests that a target runs at a time where `engine.max_num_seqs` does not say."""


@dataclasses.dataclass(frozen=True)
class LoadedHead:
    """`runtime` drafts; `served` is what targets get to know of it."""

    name: str
    config: DrafterConfig
    runtime: HeadRuntime
    served: ServedHead

    @property
    def digest(self) -> str:
        return self.served.digest


class HeadLoader:
    """Loads heads of one drafter onto one device."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Prepares the target's checkpoint, which heads share tables with. Raises ValueError for a damaged one."""
        assert settings.drafter is not None
        assert settings.drafter.replicas is not None
        self._drafter: DrafterSettings = settings.drafter
        self._replicas = settings.drafter.replicas
        self._target = target_source(settings.model.source)
        self._target_dir = local_directory(self._target) or Path(self._target)
        self._dtype_name = ROW_DTYPES[settings.engine["dtype"]]
        self._max_model_len: int | None = settings.engine.get("max_model_len")
        self.device = torch.device("cuda" if self._replicas.num_gpus else "cpu")
        num_at_targets = settings.max_num_targets * settings.engine.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS)
        self.max_num_requests: int = self._replicas.max_num_requests or num_at_targets

    @property
    def max_draft_tokens(self) -> int:
        """K_max."""
        assert self._drafter.max_draft_tokens is not None
        return self._drafter.max_draft_tokens

    def directory(self, name: str) -> Path:
        """A head's directory, ready. Raises ValueError for a damaged head, or one of another target."""
        return head_directory(name, self._target)

    def load(self, name: str, like: DrafterConfig | None = None) -> LoadedHead:
        """A head with its share of the cache: the heads share `cache_gib` evenly.

        `like`: a head that the targets are connected for, whose shape this one must have.

        Raises:
            ValueError: a damaged head, one of another target or shape, one of fewer depths than K_max, or a cache too
                small for one request of the longest context.
        """
        directory = self.directory(name)
        config = read_head_config(directory)
        if config.num_depths < self.max_draft_tokens:
            raise ValueError(
                f"the head {name} was trained for {config.num_depths} depths, the targets draft {self.max_draft_tokens}"
            )
        if like is not None:
            _check_shape(name, config, like)
        limits = DrafterLimits(
            max_num_requests=self.max_num_requests,
            max_num_rows=max(MAX_NUM_ROWS, self.max_num_requests * 2 * (1 + self.max_draft_tokens)),
            max_depth=self.max_draft_tokens,
            cache_gib=self._replicas.cache_gib / len(self._drafter.heads),
            max_context=min(self._max_model_len or config.max_position_embeddings, config.max_position_embeddings),
        )
        dtype = DTYPES[self._dtype_name]
        runtime, served = load_served_head(directory, self._target_dir, limits, self.device, dtype)
        return LoadedHead(name, config, runtime, served)


def _check_shape(name: str, config: DrafterConfig, like: DrafterConfig) -> None:
    for field in SHARED_SHAPE:
        if (ours := getattr(config, field)) != (theirs := getattr(like, field)):
            raise ValueError(
                f"the head {name} has {field} {ours}, the running targets send rows for {theirs}: deploy anew"
            )
