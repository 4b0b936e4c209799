"""A sequence trained in segments has the gradient of the whole pass, and its chains stay whole."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.config import DrafterConfig
from peagle.model import Drafter
from peagle.train.cod import CodRows, chain_lengths, draft_rows, sample_rows
from peagle.train.masks import AttentionMask
from peagle.train.partition import PackedSequence, Partition
from tests.support.head_factory import CONFIG, random_drafter
from tests.unit.train.test_unroll import random_batch

LONG = dataclasses.replace(CONFIG, num_hidden_layers=3)
NUM_TOKENS = 45
#: documents of a packed sequence; the last 6 tokens are padding
DOCUMENTS = (17, 2, 20)


def packed_sequence(config: DrafterConfig, ratio: float, seed: int = 0) -> PackedSequence:
    """One sequence with documents, a prompt, padding and dropped rows."""
    batch, aux_BNX = random_batch(DOCUMENTS, NUM_TOKENS - sum(DOCUMENTS), seed)
    random = torch.Generator().manual_seed(seed)
    wanted_1N = torch.rand(1, NUM_TOKENS, generator=random) < 0.7
    wanted_1N[:, :12] = False  # a prompt: rows of offset 0 alone
    document_1N = batch.document_BN[:1]
    chain_1N = chain_lengths(document_1N, wanted_1N, config.num_depths)
    rows = sample_rows(chain_1N, config.num_depths, ratio, generator=random)
    position_1T = batch.position_BN[:1].gather(1, rows.anchor_BT) + rows.offset_BT
    return PackedSequence(batch.tokens_BN[:1], document_1N, aux_BNX[:1], rows, position_1T)


class SoftLoss:
    """Soft cross-entropy of the useful rows to fixed distributions, and which rows were asked for."""

    def __init__(self, drafter: Drafter, sequence: PackedSequence) -> None:
        random = torch.Generator().manual_seed(7)
        self.lm_head_VH = drafter.lm_head.weight
        num_rows = sequence.rows.anchor_BT.shape[1]
        target_TV = torch.randn(num_rows, len(self.lm_head_VH), generator=random).softmax(-1)
        self.target_TV = target_TV.to(self.lm_head_VH)
        self.weight_T = (sequence.document_1N.gather(1, sequence.rows.anchor_BT)[0] >= 0).to(self.lm_head_VH)
        self.asked: list[int] = []

    def __call__(self, normed_RH: Tensor, index_R: Tensor) -> Tensor:
        self.asked += index_R.tolist()
        losses_R = F.cross_entropy(normed_RH @ self.lm_head_VH.T, self.target_TV[index_R], reduction="none")
        return (losses_R * self.weight_T[index_R]).sum()


def gradients(drafter: Drafter) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in drafter.trainable().items()}
    drafter.zero_grad()
    return found


def whole_gradients(drafter: Drafter, sequence: PackedSequence) -> dict[str, Tensor]:
    mask = AttentionMask.from_rows(sequence.rows, sequence.document_1N).dense()
    normed_1TH = draft_rows(drafter, sequence.tokens_1N, sequence.aux_1NX, sequence.position_1T, mask)
    SoftLoss(drafter, sequence)(normed_1TH[0], torch.arange(normed_1TH.shape[1], device=normed_1TH.device)).backward()
    return gradients(drafter)


def worst_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Greatest difference of a parameter's gradient, relative to the greatest entry of it."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - want).abs().max() / want.abs().max()) for name, want in wanted.items())


@pytest.mark.parametrize("ratio", [0.6, 1.0])
@pytest.mark.parametrize(
    "switches",
    [{}, {"fc_norm": True, "attention_bias": True}, {"norm_before_residual": True}],
    ids=lambda switches: "+".join(switches) or "plain",
)
def test_segments_have_the_gradient_of_the_whole_pass(ratio: float, switches: dict) -> None:
    config = dataclasses.replace(LONG, **switches)
    drafter, sequence = random_drafter(config), packed_sequence(config, ratio)
    wanted = whole_gradients(drafter, sequence)
    assert {"mask_hidden", "mask_embedding", "fc.weight"} <= wanted.keys()
    for num_segments in (1, 3, 8):
        loss_of = SoftLoss(drafter, sequence)
        Partition(num_segments, tile=8).backward(drafter, sequence, loss_of)
        assert sorted(loss_of.asked) == list(range(sequence.rows.anchor_BT.shape[1]))
        assert worst_difference(gradients(drafter), wanted) < 1e-12


def greatest_graph(num_segments: int) -> int:
    """Bytes that autograd holds when the loss of a segment is asked for, parameters left out; at most."""
    drafter, sequence = random_drafter(LONG), packed_sequence(LONG, 0.8)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}
    held: dict[int, int] = {}
    found, loss_of = [], SoftLoss(drafter, sequence)

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        return saved

    def counted_loss(normed_RH: Tensor, index_R: Tensor) -> Tensor:
        found.append(sum(held.values()))
        held.clear()
        return loss_of(normed_RH, index_R)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        Partition(num_segments, tile=1).backward(drafter, sequence, counted_loss)
    return max(found)


def test_memory_falls_with_the_segments() -> None:
    assert greatest_graph(4) < greatest_graph(1) / 2.5


@pytest.mark.gpu
def test_compiled_segments_on_a_gpu() -> None:
    config = dataclasses.replace(LONG, head_dim=16, fc_norm=True)
    drafter = random_drafter(config).float().cuda()
    partition = Partition(3, compiled=True, autocast=False)
    for seed in range(3):
        sequence = packed_sequence(config, 0.8, seed)
        rows = CodRows(sequence.rows.anchor_BT.cuda(), sequence.rows.offset_BT.cuda(), NUM_TOKENS)
        fields = {"tokens_1N": sequence.tokens_1N, "document_1N": sequence.document_1N}
        fields |= {"aux_1NX": sequence.aux_1NX.float(), "position_1T": sequence.position_1T}
        sequence = PackedSequence(**{name: value.cuda() for name, value in fields.items()}, rows=rows)
        wanted = whole_gradients(drafter, sequence)
        with torch.compiler.set_stance("fail_on_recompile" if seed == 2 else "default"):
            partition.backward(drafter, sequence, SoftLoss(drafter, sequence))
        assert worst_difference(gradients(drafter), wanted) < 1e-3


def test_segments_beyond_the_tokens_are_refused() -> None:
    drafter, sequence = random_drafter(CONFIG), packed_sequence(CONFIG, 0.8)
    with pytest.raises(ValueError, match=f"num_segments = {NUM_TOKENS + 1} must be at most {NUM_TOKENS}"):
        Partition(NUM_TOKENS + 1).backward(drafter, sequence, SoftLoss(drafter, sequence))
