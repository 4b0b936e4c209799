"""Plain twins of `peagle.train.losses`."""

from torch import Tensor, where


def plain_losses(name: str, logits_RV: Tensor, target_RV: Tensor, draft_R: Tensor) -> Tensor:
    """Loss of each row from logits of drafter and target over the draft vocabulary.

    draft_R: the target's most likely token as an index into it, or -1.
    """
    log_q, log_p = logits_RV.log_softmax(-1), target_RV.log_softmax(-1)
    if name == "soft":
        return -(log_p.exp() * log_q).sum(-1)
    assert name == "hard", name
    return where(draft_R < 0, 0, -log_q.gather(-1, draft_R.clamp_min(0)[:, None]).squeeze(-1))
