"""For `benchmarks.engines --traces`: drafts of an engine of random weights, accepted as those of a real head were.

A request replays one answer of a file of `benchmarks.traces`: in each step it accepts as many of its drafts as the
target of the traces did at that token. So acceptance differs from request to request and from token to token as it does
in service, which synthetic rates do not. The engine verifies and samples as ever; its results are replaced.

B requests, S places of requests in the runner, P tokens of all answers.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from benchmarks.engines import Segments

CODE = ("humaneval", "coding")
PLACE = re.compile(r"place(\d+)")


@dataclass(frozen=True)
class Replay:
    """An answer of a file: its tokens are `first` .. `first + length - 1` of all. workload: code or chat."""

    first: int
    length: int
    workload: str

    def request_id(self, count: int, skipped: int = 0) -> str:
        """Says to the worker where the answer is; skipped: tokens at its begin that are not replayed."""
        return f"{count}-place{self.first + skipped}"


def load_replays(path: Path) -> list[Replay]:
    """Answers of a file that `benchmarks.traces` wrote, the shortest ones left out."""
    with np.load(path, allow_pickle=False) as stored:
        ends, names = np.cumsum(stored["num_anchors"], dtype=np.int64).tolist(), stored["category"].tolist()
        lengths = stored["num_anchors"].tolist()
    return [
        Replay(end - length, length, "code" if name in CODE else "chat")
        for end, length, name in zip(ends, lengths, names, strict=True)
        if length > 1
    ]


class Replayed(Segments):
    """vLLM's `worker_extension_cls`: `Segments`, and acceptance by traces once `replay` is called."""

    def replay(self, path: str) -> None:
        """From now on requests accept what the answers of this file did, each from the place in its id on."""
        runner = self.model_runner
        with np.load(path, allow_pickle=False) as stored:
            accepted_P = stored["accepted"].astype(np.int32)
        self.accepted_P = torch.from_numpy(accepted_P).to(runner.device)
        self.place_S = torch.zeros(runner.max_num_reqs, dtype=torch.int32, device=runner.device)
        vocab_size, add, sample = runner.model_config.get_vocab_size(), runner.req_states.add_request, runner.sample

        def add_request(req_id: str, *args: Any, **kwargs: Any) -> Any:
            found = add(req_id, *args, **kwargs)
            place = PLACE.search(req_id)
            self.place_S[runner.req_states.req_id_to_index[req_id]].fill_(int(place[1]) if place else 0)
            return found

        def replayed_sample(hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
            output, num_sampled_B, num_rejected_B = sample(hidden_states, input_batch, grammar_output)
            accept(input_batch, self.accepted_P, self.place_S, num_sampled_B, num_rejected_B)
            output.sampled_token_ids.random_(0, vocab_size)
            return output, num_sampled_B, num_rejected_B

        runner.req_states.add_request, runner.sample = add_request, replayed_sample


def accept(
    batch: Any,
    accepted_P: torch.Tensor,
    place_S: torch.Tensor,
    num_sampled_B: torch.Tensor,
    num_rejected_B: torch.Tensor,
) -> None:
    """Of each request that samples in this step, as many drafts as the answer has at its place, which moves on."""
    _accept_kernel[(batch.num_reqs,)](
        batch.cu_num_logits, batch.idx_mapping, accepted_P, place_S, num_sampled_B, num_rejected_B, len(accepted_P)
    )


@triton.jit
def _accept_kernel(up_to_B1, place_B, accepted_P, place_S, num_sampled_B, num_rejected_B, num_places):
    """One program a request."""
    request = tl.program_id(0)
    slot = tl.load(place_B + request)
    place = tl.load(place_S + slot)
    verified = tl.load(up_to_B1 + request + 1) - tl.load(up_to_B1 + request)
    if tl.load(num_sampled_B + request) > 0:
        sampled = tl.minimum(tl.load(accepted_P + place).to(tl.int32) + 1, verified.to(tl.int32))
        tl.store(num_sampled_B + request, sampled)
        tl.store(num_rejected_B + request, verified.to(tl.int32) - sampled)
        tl.store(place_S + slot, tl.minimum(place + sampled, num_places - 1))
