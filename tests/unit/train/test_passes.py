"""The passes of training: the unroll of EAGLE-3 against a twin that drafts from one anchor at a time, what rows may not
see, and sequences in segments."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.config import DrafterConfig
from peagle.model import Drafter
from peagle.train.cod import CodRows, attend_under, chain_lengths, draft_rows, label_rows, sample_rows
from peagle.train.data import Batch
from peagle.train.losses import ChainWeights, ChunkedLoss
from peagle.train.masks import AttentionMask
from peagle.train.partition import PackedSequence, Partition
from peagle.train.passes import Eagle3Pass, States, block_masks, unrolled_rows
from peagle.train.recipe import Recipe
from tests.support.head_factory import CONFIG, TARGET, random_drafter

NUM_STEPS = 4
UNROLLED = DrafterConfig.for_target(TARGET, num_layers=2, num_depths=NUM_STEPS, fc_norm=True)
FOLDERS = dict(target="", data="", output="")
LENGTHS = (9, 5, 7)  # documents of each sequence; three tokens of padding follow


def random_batch(lengths: tuple[int, ...] = LENGTHS, num_padding: int = 3, seed: int = 0) -> tuple[Batch, Tensor]:
    """Two sequences of the same documents and target hidden states [2, N, C * S]."""
    generator = torch.Generator().manual_seed(seed)
    document_N = torch.tensor([*range(len(lengths)), -1]).repeat_interleave(torch.tensor([*lengths, num_padding]))
    document_BN = document_N.expand(2, -1)
    position_N = torch.cat([torch.arange(length) for length in (*lengths, num_padding)])
    tokens_BN = torch.randint(0, 100, document_BN.shape, generator=generator)
    index_BN = torch.arange(tokens_BN.numel()).view_as(tokens_BN).where(document_BN >= 0, -1)
    batch = Batch(tokens_BN, document_BN, position_N.expand(2, -1), document_BN >= 0, index_BN)
    aux_BNX = torch.randn(*document_BN.shape, UNROLLED.fc_input_size, generator=generator).double()
    return batch, aux_BNX


def plain_losses(logits_RV: Tensor, target_RV: Tensor) -> Tensor:
    """Plain twin of `peagle.train.losses`: of each row, from logits of drafter and target over the draft vocabulary."""
    return -(target_RV.softmax(-1) * logits_RV.log_softmax(-1)).sum(-1)


def draft_alone(drafter: Drafter, token_ids: list[int], aux_AX: Tensor, num_steps: int) -> list[Tensor]:
    """Normed rows [H] of one chain, each step with all rows from the beginning.

    aux_AX: hidden states of the target up to the anchor, from the beginning of its document. token_ids: the tokens
    after each of these rows, then those that the chain reads.
    """
    hidden, normed = list(drafter.project_inputs(aux_AX)), []
    for row in range(len(aux_AX) - 1, len(aux_AX) - 1 + num_steps):
        embeds, position = drafter.embed(torch.tensor(token_ids[: row + 1])), torch.arange(row + 1)
        attend = attend_under(torch.ones(1, row + 1, row + 1, dtype=torch.bool).tril())
        rows, stream = drafter(embeds[None], torch.stack(hidden)[None], position[None], attend)
        normed.append(rows[0, row])
        hidden.append(stream[0, row])
    return normed


def chains(batch: Batch, num_steps: int) -> list[tuple[int, int, int, int]]:
    """(sequence, first token of the document, anchor, steps whose label lies in the document) of every chain."""
    length_BN = chain_lengths(batch.document_BN, batch.answer_BN, num_steps)
    first_BN = torch.arange(length_BN.shape[1]) - batch.position_BN
    return [(b, int(first_BN[b, a]), a, int(length_BN[b, a])) for b, a in length_BN.nonzero().tolist()]


@pytest.mark.parametrize(
    "switches", [{}, {"norm_before_residual": True}, {"norm_output": True}, {"num_hidden_layers": 1}]
)
def test_rows_and_gradients_equal_one_chain_at_a_time(switches: dict[str, object]) -> None:
    drafter = random_drafter(dataclasses.replace(UNROLLED, **switches))
    batch, aux_BNX = random_batch()
    rows = unrolled_rows(drafter, batch.tokens_BN, aux_BNX, batch.position_BN, batch.document_BN)
    rows_BKNH = rows.unflatten(1, (NUM_STEPS, -1))
    together, alone, num_rows = torch.tensor(0.0), torch.tensor(0.0), 0
    for b, first, anchor, length in chains(batch, NUM_STEPS):
        ids = batch.tokens_BN[b, first + 1 : anchor + 1 + length].tolist()
        for step, expected in enumerate(draft_alone(drafter, ids, aux_BNX[b, first : anchor + 1], length)):
            torch.testing.assert_close(rows_BKNH[b, step, anchor], expected)
            weight = torch.randn(UNROLLED.hidden_size, generator=torch.Generator().manual_seed(num_rows))
            together = together + rows_BKNH[b, step, anchor] @ weight.double()
            alone, num_rows = alone + expected @ weight.double(), num_rows + 1
    assert num_rows == 2 * sum(sum(min(NUM_STEPS, length - 2 - a) for a in range(length - 2)) for length in LENGTHS)
    owned = drafter.trainable()
    ours, twin = (torch.autograd.grad(total, list(owned.values())) for total in (together, alone))
    for name, one, other in zip(owned, ours, twin, strict=True):
        # Norms and rotation work in float32 inside a drafter of float64.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()), msg=name)
        assert one.abs().max() > 1e-3, f"{name} gets no gradient: nothing compared"


def test_the_pass_forms_the_gradient_of_the_weighted_loss() -> None:
    recipe = Recipe(**FOLDERS, drafter={"method": "eagle3", "num_depths": NUM_STEPS}, loss={"offset_decay": 0.8})
    drafter = random_drafter(UNROLLED)
    batch, aux_BNX = random_batch()
    batch = dataclasses.replace(batch, answer_BN=batch.position_BN >= 3)
    last_BNS = torch.randn(*batch.tokens_BN.shape, 32, generator=torch.Generator().manual_seed(3)).double()
    lm_head_VS = drafter.lm_head.weight.detach()
    report = Eagle3Pass(recipe, compiled=False)(drafter, batch, States(aux_BNX, last_BNS, lm_head_VS))
    rows_BKNH = unrolled_rows(drafter, batch.tokens_BN, aux_BNX, batch.position_BN, batch.document_BN)
    rows_BKNH = rows_BKNH.unflatten(1, (NUM_STEPS, -1))
    cells = [(b, step, anchor) for b, _, anchor, length in chains(batch, NUM_STEPS) for step in range(length)]
    logits_RV = drafter.logits(torch.stack([rows_BKNH[cell] for cell in cells]))
    target_RV = torch.stack([last_BNS[b, anchor + step + 1] for b, step, anchor in cells]) @ lm_head_VS.T
    weight_R = torch.tensor([0.8**step for _, step, _ in cells])
    draft_R = target_RV.argmax(-1)
    loss = weight_R / weight_R.sum() @ plain_losses(logits_RV, target_RV).float()
    torch.testing.assert_close(report.loss.double(), loss.double())
    parameters = list(drafter.trainable().values())
    for parameter, expected in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    num_right = int((logits_RV.argmax(-1) == draft_R).sum())
    assert int(report.correct_R.sum()) == num_right
    assert report.offset_R.bincount().tolist() == [sum(step == k for _, step, _ in cells) for k in range(NUM_STEPS)]


def test_recipes_that_do_not_fit_are_refused() -> None:
    recipe = Recipe(**FOLDERS, drafter={"method": "eagle3"}, batch={"num_segments": 2})
    with pytest.raises(ValueError, match="num_segments = 2: method eagle3 has no segments, write 1"):
        Eagle3Pass(recipe, compiled=False)


@torch.no_grad()
def test_flex_attention_joins_to_the_same_rows() -> None:
    config = dataclasses.replace(UNROLLED, head_dim=16)
    drafter = random_drafter(config).float()
    batch, aux_BNX = random_batch()
    flex, plain = (
        unrolled_rows(drafter, batch.tokens_BN, aux_BNX.float(), batch.position_BN, attention_mask)
        for attention_mask in (block_masks(batch.document_BN, config.num_depths, 16), batch.document_BN)
    )
    torch.testing.assert_close(flex, plain, rtol=1e-3, atol=1e-4)


# ---- a sequence in segments has the gradient of the whole pass, and its chains stay whole


DEEP = dataclasses.replace(CONFIG, num_hidden_layers=3)
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
    config = dataclasses.replace(DEEP, **switches)
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
    drafter, sequence = random_drafter(DEEP), packed_sequence(DEEP, 0.8)
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
    config = dataclasses.replace(DEEP, head_dim=16, fc_norm=True)
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


# ---- chunked losses against their plain twins in float64, where rounding cannot hide an error, and their labels


@dataclasses.dataclass(frozen=True)
class Problem:
    hidden_RH: Tensor
    lm_head_VH: Tensor
    target_NH: Tensor
    label_R: Tensor
    weight_R: Tensor
    target_ids_V: Tensor

    @classmethod
    def draw(cls, reduced: bool = False, num_rows: int = 37, num_tokens: int = 11, size: int = 8) -> "Problem":
        generator = torch.Generator().manual_seed(num_rows)
        draw = {"generator": generator, "dtype": torch.float64}
        return cls(
            torch.randn(num_rows, size, **draw),
            torch.randn(50, size, **draw),
            torch.randn(num_tokens, size, **draw),
            torch.randint(num_tokens - 2, (num_rows,), generator=generator) + 1,  # tokens without a row, too
            torch.rand(num_rows, generator=generator),
            torch.randperm(50, generator=generator)[:20] if reduced else torch.arange(50),
        )

    @property
    def draft_VH(self) -> Tensor:
        return self.lm_head_VH[self.target_ids_V]

    def score(self, loss: ChunkedLoss, hidden_RH: Tensor, weight_R=None) -> tuple[Tensor, Tensor]:
        labels = loss.labels(self.target_NH, self.lm_head_VH, self.target_ids_V)
        weight_R = self.weight_R if weight_R is None else weight_R
        return loss(hidden_RH, self.draft_VH, labels, self.label_R, lambda _: weight_R)

    def plain(self, hidden_RH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(losses_R, correct_R, outside_R), a row at a time where the vocabularies meet."""
        logits_RV, target_NV = hidden_RH @ self.draft_VH.T, self.target_NH @ self.lm_head_VH.T
        ids = self.target_ids_V.tolist()
        best_R = target_NV.argmax(-1)[self.label_R].tolist()
        draft_R = torch.tensor([ids.index(best) if best in ids else -1 for best in best_R])
        losses_R = plain_losses(logits_RV, target_NV[self.label_R][:, ids])
        return losses_R, logits_RV.argmax(-1) == draft_R, draft_R < 0


@pytest.mark.parametrize("reduced", [False, True])
def test_loss_and_gradient_equal_the_plain_twin(reduced: bool) -> None:
    problem = Problem.draw(reduced)
    plain_RH = problem.hidden_RH.clone().requires_grad_()
    losses_R, correct_R, outside_R = problem.plain(plain_RH)
    plain = (losses_R * problem.weight_R).sum()
    plain.backward()
    assert plain_RH.grad.abs().max() > 1e-2
    for chunk in (1, 8, 37, 64):
        hidden_RH = problem.hidden_RH.clone().requires_grad_()
        total, found_R = problem.score(ChunkedLoss(chunk), hidden_RH)
        (3 * total).backward()
        torch.testing.assert_close(total.detach(), plain.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(hidden_RH.grad, 3 * plain_RH.grad, rtol=1e-10, atol=1e-13)
        assert torch.equal(found_R, correct_R)
    assert outside_R.any() == reduced
    assert not outside_R.all()


def test_bfloat16_rows_keep_their_gradient() -> None:
    """Weights as small as those of a big batch must cost a row's gradient no more than bfloat16's own rounding."""
    problem = Problem.draw()
    lm_head_VH, target_NH = problem.lm_head_VH.bfloat16(), problem.target_NH.bfloat16()
    narrow = dataclasses.replace(problem, lm_head_VH=lm_head_VH, target_NH=target_NH)
    wide = dataclasses.replace(problem, lm_head_VH=lm_head_VH.double(), target_NH=target_NH.double())
    grads = []
    for one, dtype, scale in ((narrow, torch.float32, 1e-6), (wide, torch.float64, 1)):
        hidden_RH = problem.hidden_RH.bfloat16().to(dtype).requires_grad_()
        one.score(ChunkedLoss(8), hidden_RH, problem.weight_R * scale)[0].backward()
        grads.append(hidden_RH.grad.double() / scale)
    # Logits around 8 are rounded to 1/32 in bfloat16, so probabilities are off by some percent.
    torch.testing.assert_close(*grads, rtol=0.1, atol=0.05)


def test_chain_weights_equal_a_slow_loop() -> None:
    document_BN = torch.tensor([[0] * 9 + [1] * 6, [0] * 12 + [-1] * 3])
    chain_BN = chain_lengths(document_BN, document_BN >= 0, 4)
    generator = torch.Generator().manual_seed(0)
    rows = sample_rows(chain_BN, 4, 0.9, generator=generator)
    useful_T, label_T, offset_T = label_rows(rows, chain_BN)
    index_R, label_R, offset_R = useful_T.nonzero().squeeze(1), label_T[useful_T], offset_T[useful_T]
    sequence_R, anchor_R = index_R // rows.anchor_BT.shape[1], rows.anchor_BT.flatten()[index_R]
    token_N = torch.randint(0, 5, (chain_BN.numel(),), generator=generator) - 1  # -1: not in the draft vocabulary
    right_R = torch.rand(len(index_R), generator=generator) < 0.7
    draft_R = torch.where(right_R, token_N[label_R].clamp_min(0), 4)
    correct_R = right_R & (token_N[label_R] >= 0)

    keys = list(zip(sequence_R.tolist(), anchor_R.tolist(), offset_R.tolist(), strict=True))
    correct = dict(zip(keys, correct_R.tolist(), strict=True))
    reached = [all(correct[b, a, earlier] for earlier in range(g)) for b, a, g in keys]
    total = sum(0.9**g for *_, g in keys)
    expected_R = torch.tensor([0.9**g * (1.0 if r else 0.3) / total for (*_, g), r in zip(keys, reached, strict=True)])
    assert 10 < sum(reached) < len(keys) - 10

    settings = {"num_depths": 4, "offset_decay": 0.9, "reach": 0.3}
    weights = ChainWeights(offset_R, token_N, **settings)
    torch.testing.assert_close(weights.weigh(label_R, offset_R, draft_R), expected_R)
    known_N = token_N.clamp_min(0)
    weight_R = ChainWeights(offset_R, known_N, **settings).weigh(label_R, offset_R, known_N[label_R])
    torch.testing.assert_close(weight_R.sum(), torch.tensor(1.0))
    # In two parts, as a partitioned pass may have them: offset 0 of a chain before its other rows.
    weights, weight_R = ChainWeights(offset_R, token_N, **settings), torch.zeros_like(expected_R)
    first_R = (anchor_R % 2 == 0) | (offset_R == 0)
    for part_R in (first_R, ~first_R):
        weight_R[part_R] = weights.weigh(label_R[part_R], offset_R[part_R], draft_R[part_R])
    torch.testing.assert_close(weight_R, expected_R)


def test_a_row_weighs_the_same_whichever_worker_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two workers, whose gradients are averaged: one has 100 rows, the other has one."""

    def weigh(num_rows: int, num_others: int = 0) -> Tensor:
        monkeypatch.setattr("peagle.train.losses.dist.is_initialized", lambda: num_others > 0)
        monkeypatch.setattr("peagle.train.losses.dist.get_world_size", lambda: 2)
        monkeypatch.setattr("peagle.train.losses.dist.all_reduce", lambda total: total.add_(num_others))
        token_N, offset_R = torch.arange(num_rows + 1), torch.zeros(num_rows, dtype=torch.int64)
        weights = ChainWeights(offset_R, token_N, num_depths=1, offset_decay=1.0, reach=1.0)
        return weights.weigh(token_N[1:], offset_R, token_N[1:])

    torch.testing.assert_close(torch.cat([weigh(100, 1), weigh(1, 100)]) / 2, weigh(101))


def test_no_rows_are_no_loss() -> None:
    problem = dataclasses.replace(Problem.draw(), label_R=torch.empty(0, dtype=torch.int64))
    hidden_RH = torch.empty(0, 8, dtype=torch.float64, requires_grad=True)
    total, _ = problem.score(ChunkedLoss(8), hidden_RH, torch.empty(0))
    total.backward()
    assert total == 0
    assert hidden_RH.grad.shape == (0, 8)


@pytest.mark.gpu
def test_compiled_loss_equals_plain_torch_on_a_gpu() -> None:
    problem = Problem.draw(reduced=True, num_rows=700, num_tokens=300)
    problem = Problem(*(value.to("cuda") for value in dataclasses.astuple(problem)))
    grads = []
    for compiled in (False, True):
        hidden_RH = problem.hidden_RH.clone().requires_grad_()
        problem.score(ChunkedLoss(96, compiled), hidden_RH)[0].backward()
        grads.append(hidden_RH.grad)
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-13)
