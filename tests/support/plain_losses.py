"""Plain twin of `peagle.train.losses`."""

from torch import Tensor


def plain_losses(logits_RV: Tensor, target_RV: Tensor) -> Tensor:
    """Loss of each row from logits of drafter and target over the draft vocabulary."""
    return -(target_RV.softmax(-1) * logits_RV.log_softmax(-1)).sum(-1)
