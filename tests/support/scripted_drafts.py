"""A scheduler that replaces the drafter's proposals by scripted ones, so that a test knows every accepted token."""

from collections.abc import Sequence

from vllm.v1.outputs import DraftTokenIds

from peagle.vllm.scheduler import DraftingScheduler

CONTINUATION_KEY = "test_continuation"
"""`extra_args` key: the tokens that greedy decoding gives after this prompt. Absent: the drafter's proposals stay."""


def num_right(num_output_tokens: int, max_draft_tokens: int) -> int:
    """How many leading drafts are right when `num_output_tokens` tokens are out: every count 0..K_max comes up."""
    return (3 * num_output_tokens + 1) % (max_draft_tokens + 1)


def scripted_steps(num_output_tokens: int, max_tokens: int, k: int, max_draft_tokens: int) -> list[tuple[int, int]]:
    """(verified, accepted) of each step from `num_output_tokens` on, until `max_tokens` are out."""
    steps = []
    while num_output_tokens < max_tokens and k:
        num_accepted = min(k, num_right(num_output_tokens, max_draft_tokens))
        steps.append((k, num_accepted))
        num_output_tokens += num_accepted + 1
    return steps


class ScriptedDraftScheduler(DraftingScheduler):
    """Drafts of a scripted request: some right tokens, then wrong ones, K_max in all."""

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        scripted = []
        for request_id, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(request_id)
            extra_args = request.sampling_params.extra_args if request is not None else None
            continuation: Sequence[int] | None = (extra_args or {}).get(CONTINUATION_KEY)
            if continuation is not None:
                position = request.num_output_tokens
                right = num_right(position, self.num_spec_tokens)
                true_tokens = continuation[position : position + self.num_spec_tokens]
                drafts = [token if depth < right else token ^ 1 for depth, token in enumerate(true_tokens)]
            scripted.append(drafts)
        super().update_draft_token_ids(DraftTokenIds(draft_token_ids.req_ids, scripted))
