"""Acceptance: greedy equals decoding without drafts; sampling keeps the target's distribution (chi-square).

Chance is seeded, and the limit on the p-value is 1e-6, so a sound rule does not fail by accident. The wrong rules
below must fail the same check: that is what shows that the check can see an error.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from peagle import evaluate as accept
from peagle.evaluate import PADDING_TOKEN_ID, accept_greedy, accept_sampled

MIN_P_VALUE = 1e-6
VOCAB_SIZE = 4
NUM_TOKENS = 3  # length of the sequences whose joint distribution is compared: 4^3 = 64 cells
NUM_SAMPLES = 100_000

Rule = Callable[..., accept.Accepted]


def markov_chain(seed: int, sharpness: float) -> Tensor:
    """[V, V] row-stochastic: row t is the distribution of the token after token t."""
    logits = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    return (logits * sharpness).softmax(dim=-1).double()


TARGET = markov_chain(seed=1, sharpness=1.0)
DRAFTER = markov_chain(seed=2, sharpness=1.5)


def draft(last: Tensor, num_drafts: int, sample: bool, generator: torch.Generator) -> Tensor:
    """last [B] -> [B, K] drafts, sampled from DRAFTER or its most likely tokens."""
    drafts = []
    for _ in range(num_drafts):
        rows = DRAFTER[last]
        last = torch.multinomial(rows, 1, generator=generator)[:, 0] if sample else rows.argmax(dim=-1)
        drafts.append(last)
    return torch.stack(drafts, dim=1) if drafts else last.new_zeros(last.shape[0], 0)


def generate(
    rule: Rule,
    num_drafts: int,
    *,
    sample_drafts: bool,
    give_draft_probs: bool,
    ragged: bool = False,
    seed: int = 0,
) -> Tensor:
    """Generate NUM_TOKENS tokens after token 0 for NUM_SAMPLES requests with speculation: [NUM_SAMPLES, NUM_TOKENS]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(NUM_SAMPLES, NUM_TOKENS + num_drafts + 1, dtype=torch.int64)  # column 0 is the start token
    length = torch.ones(NUM_SAMPLES, dtype=torch.int64)
    while bool((length <= NUM_TOKENS).any()):
        active = (length <= NUM_TOKENS).nonzero()[:, 0]
        last = tokens[active, length[active] - 1]
        drafts = draft(last, num_drafts, sample_drafts, generator)
        history = torch.cat([last[:, None], drafts], dim=1)
        counts = torch.randint(0, num_drafts + 1, last.shape, generator=generator) if ragged else None
        step = rule(
            drafts,
            TARGET[history],
            DRAFTER[history[:, :-1]] if give_draft_probs else None,
            num_draft_tokens_B=counts,
            generator=generator,
        )
        for column in range(num_drafts + 1):
            emitted = step.token_ids_BT[:, column]
            rows = active[emitted != PADDING_TOKEN_ID]
            place = length[rows] + column
            fits = place < tokens.shape[1]
            tokens[rows[fits], place[fits]] = emitted[emitted != PADDING_TOKEN_ID][fits]
        length[active] += step.num_accepted_tokens_B + 1
    return tokens[:, 1 : NUM_TOKENS + 1]


def p_value(tokens: Tensor) -> float:
    """Chi-square p-value of tokens [N, NUM_TOKENS] against the exact joint distribution of the TARGET chain."""
    cells = torch.cartesian_prod(*[torch.arange(VOCAB_SIZE)] * NUM_TOKENS)
    previous = torch.cat([torch.zeros(len(cells), 1, dtype=torch.int64), cells[:, :-1]], dim=1)
    expected = TARGET[previous, cells].prod(dim=1) * len(tokens)
    assert float(expected.min()) > 5, "too few samples a cell for the chi-square approximation"
    index = (tokens * VOCAB_SIZE ** torch.arange(NUM_TOKENS - 1, -1, -1)).sum(dim=1)
    observed = torch.bincount(index, minlength=len(cells)).double()
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 4])
@pytest.mark.parametrize(
    ("sample_drafts", "give_draft_probs"),
    [(True, True), (False, False), (True, False)],
    ids=["q", "greedy", "q-hidden"],
)
def test_sampling_keeps_the_target_distribution(num_drafts: int, sample_drafts: bool, give_draft_probs: bool) -> None:
    # "q-hidden": drafts drawn by chance but judged as one-hot, which is sound because each draft is fixed by then.
    tokens = generate(accept_sampled, num_drafts, sample_drafts=sample_drafts, give_draft_probs=give_draft_probs)
    assert p_value(tokens) > MIN_P_VALUE


@pytest.mark.parametrize("give_draft_probs", [True, False])
def test_sampling_keeps_the_target_distribution_with_ragged_k(give_draft_probs: bool) -> None:
    tokens = generate(accept_sampled, 3, sample_drafts=True, give_draft_probs=give_draft_probs, ragged=True)
    assert p_value(tokens) > MIN_P_VALUE


def test_check_rejects_greedy_drafts_judged_as_samples() -> None:
    tokens = generate(accept_sampled, 2, sample_drafts=False, give_draft_probs=True)
    assert p_value(tokens) < MIN_P_VALUE


def test_check_rejects_greedy_acceptance_of_sampled_requests() -> None:
    def greedy(drafts: Tensor, target: Tensor, draft_probs: Tensor | None, **options: object) -> accept.Accepted:
        return accept_greedy(drafts, target)

    assert p_value(generate(greedy, 2, sample_drafts=True, give_draft_probs=True)) < MIN_P_VALUE


def test_check_rejects_target_rows_off_by_one() -> None:
    def shifted(drafts: Tensor, target: Tensor, draft_probs: Tensor | None, **options: object) -> accept.Accepted:
        return accept_sampled(drafts, target.roll(-1, dims=1), draft_probs, generator=options["generator"])  # type: ignore[arg-type]

    assert p_value(generate(shifted, 2, sample_drafts=True, give_draft_probs=True)) < MIN_P_VALUE


@pytest.mark.parametrize("give_draft_probs", [True, False])
def test_check_rejects_replacement_from_the_target_instead_of_the_residual(
    monkeypatch: pytest.MonkeyPatch, give_draft_probs: bool
) -> None:
    def target_row(
        drafts: Tensor, target: Tensor, _draft_probs: object, num_accepted: Tensor, _counts: Tensor
    ) -> Tensor:
        return target[torch.arange(len(drafts)), num_accepted]

    monkeypatch.setattr(accept, "_next_token_weights", target_row)
    assert p_value(generate(accept_sampled, 2, sample_drafts=True, give_draft_probs=give_draft_probs)) < MIN_P_VALUE


def test_check_rejects_drafts_kept_after_a_rejected_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "_num_leading_true", lambda kept, counts: kept.long().sum(dim=1))
    assert p_value(generate(accept_sampled, 3, sample_drafts=True, give_draft_probs=True)) < MIN_P_VALUE


def test_greedy_equals_decoding_without_drafts() -> None:
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(50, 50, generator=generator)  # logits of the token after token t
    reference = [0]
    while len(reference) < 60:
        reference.append(int(table[reference[-1]].argmax()))
    tokens, num_accepted = [0], []
    while len(tokens) < 60:
        num_drafts = int(torch.randint(0, 5, (1,), generator=generator))
        drafts = torch.randint(0, 50, (1, num_drafts), generator=generator)
        num_right = int(torch.randint(0, num_drafts + 1, (1,), generator=generator))
        right = reference[len(tokens) : len(tokens) + num_right]
        drafts[0, : len(right)] = torch.tensor(right, dtype=torch.int64)
        step = accept_greedy(drafts, table[torch.cat([torch.tensor([[tokens[-1]]]), drafts], dim=1)])
        num_accepted.append(int(step.num_accepted_tokens_B[0]))
        assert num_accepted[-1] >= len(right)
        tokens += [int(token) for token in step.token_ids_BT[0] if token != PADDING_TOKEN_ID]
    assert tokens[:60] == reference
    assert max(num_accepted) >= 3, "the walk must see long acceptances"


def test_greedy_by_hand_with_ragged_k() -> None:
    # Four requests, K = 3; the target wants 5, 6, 7, 8 in its four rows.
    logits = torch.nn.functional.one_hot(torch.tensor([5, 6, 7, 8]), 9).float().expand(4, 4, 9)
    drafts = torch.tensor([[5, 6, 7], [5, 0, 7], [5, 6, -1], [-1, -1, -1]])
    step = accept_greedy(drafts, logits, num_draft_tokens_B=torch.tensor([3, 3, 2, 0]))
    assert step.num_accepted_tokens_B.tolist() == [3, 1, 2, 0]
    assert step.token_ids_BT.tolist() == [[5, 6, 7, 8], [5, 6, -1, -1], [5, 6, 7, -1], [5, -1, -1, -1]]


def test_a_right_draft_past_the_request_k_is_not_emitted() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3]]), 4).float()
    step = accept_greedy(torch.tensor([[1, 2]]), logits, num_draft_tokens_B=torch.tensor([1]))
    assert step.token_ids_BT.tolist() == [[1, 2, -1]]
    sampled = accept_sampled(torch.tensor([[1, 2]]), logits, num_draft_tokens_B=torch.tensor([1]))
    assert sampled.token_ids_BT.tolist() == [[1, 2, -1]]


def test_no_drafts_at_all() -> None:
    probs = torch.nn.functional.one_hot(torch.tensor([[2], [0]]), 3).float()
    none = torch.zeros(2, 0, dtype=torch.int64)
    for step in (accept_greedy(none, probs), accept_sampled(none, probs), accept_sampled(none, probs, probs[:, :0])):
        assert step.token_ids_BT.tolist() == [[2], [0]]
        assert step.num_accepted_tokens_B.tolist() == [0, 0]


def test_sampling_keeps_every_draft_when_the_drafter_is_the_target() -> None:
    probs = TARGET[torch.zeros(1000, 3, dtype=torch.int64)].float()
    generator = torch.Generator().manual_seed(0)
    drafts = torch.multinomial(probs[:, 0], 2, replacement=True, generator=generator)
    step = accept_sampled(drafts, probs, probs[:, :2], generator=generator)
    assert step.num_accepted_tokens_B.tolist() == [2] * 1000
    assert bool((step.token_ids_BT[:, :2] == drafts).all())


def test_drafts_of_probability_zero() -> None:
    many = 2000
    generator = torch.Generator().manual_seed(0)
    target = torch.tensor([0.5, 0.5, 0.0]).expand(many, 2, 3)
    drafts = torch.full((many, 1), 2)
    for draft_probs in (None, torch.tensor([0.0, 0.0, 1.0]).expand(many, 1, 3)):
        step = accept_sampled(drafts, target, draft_probs, generator=generator)
        assert int(step.num_accepted_tokens_B.sum()) == 0
        assert set(step.token_ids_BT[:, 0].tolist()) == {0, 1}
    impossible = torch.tensor([0.0, 0.0, 1.0]).expand(many, 1, 3)  # the drafter claims it never drafts token 0
    step = accept_sampled(torch.zeros(many, 1, dtype=torch.int64), target, impossible, generator=generator)
    assert int(step.num_accepted_tokens_B.sum()) == 0


def test_certain_draft_is_always_kept_and_its_empty_residual_is_never_used() -> None:
    probs = torch.nn.functional.one_hot(torch.tensor([[1, 0]]), 3).float().expand(500, 2, 3)
    step = accept_sampled(torch.ones(500, 1, dtype=torch.int64), probs)
    assert step.token_ids_BT.tolist() == [[1, 0]] * 500


def test_one_generator_state_gives_one_result() -> None:
    drafts = torch.zeros(50, 2, dtype=torch.int64)
    target = TARGET[torch.zeros(50, 3, dtype=torch.int64)]
    runs = [accept_sampled(drafts, target, generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(runs[0].token_ids_BT, runs[1].token_ids_BT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_token_ids_BK": torch.zeros(2, dtype=torch.int64)}, r"draft_token_ids_BK must be \[B, K\]"),
        ({"draft_token_ids_BK": torch.zeros(2, 2)}, r"draft_token_ids_BK must be \[B, K\] integers"),
        ({"draft_token_ids_BK": torch.tensor([[0, 4], [0, 0]])}, r"draft_token_ids_BK\[0, 1\] = 4 is outside 0..3"),
        ({"target_probs_BTV": torch.full((2, 2, 4), 0.25)}, r"expected \[B, K \+ 1, V\] = \(2, 3, V\)"),
        ({"target_probs_BTV": torch.randn(2, 3, 4)}, r"target_probs_BTV\[0, 0\] is not a distribution"),
        ({"target_probs_BTV": torch.full((2, 3, 4), float("nan"))}, "is not a distribution"),
        ({"draft_probs_BKV": torch.full((2, 3, 4), 0.25)}, r"draft_probs_BKV has shape \(2, 3, 4\)"),
        (
            {"draft_probs_BKV": torch.full((2, 2, 4), 0.5)},
            r"draft_probs_BKV\[0, 0\] is not a distribution: it sums to 2",
        ),
        ({"num_draft_tokens_B": torch.tensor([0, 3])}, r"num_draft_tokens_B must be \[B\] = \[2\] values in 0..2"),
        ({"num_draft_tokens_B": torch.tensor([-1, 0])}, "num_draft_tokens_B must be"),
        ({"num_draft_tokens_B": torch.tensor([1])}, "num_draft_tokens_B must be"),
    ],
)
def test_bad_input_is_named(change: dict[str, Tensor], message: str) -> None:
    good = {"draft_token_ids_BK": torch.zeros(2, 2, dtype=torch.int64), "target_probs_BTV": torch.full((2, 3, 4), 0.25)}
    accept_sampled(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        accept_sampled(**{**good, **change})  # type: ignore[arg-type]
