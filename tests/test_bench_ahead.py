"""Drafting ahead: passes against the drafting session, guesses, and decoding with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.accept import accept_greedy
from peagle.bench.ahead import PLAYED_BUDGETS, Texts, paired, played
from peagle.bench.ahead_passes import Passes, StandIn, key_of
from peagle.bench.ahead_walk import Lookup, Proposals, conditional_acceptance, guesses, outcomes, play
from peagle.draft import DraftSession
from peagle.walk import walk
from tests.head_factory import CONFIG, random_drafter

VOCABULARY = CONFIG.vocab_size
DEPTHS = 5
PROMPT = 4


@pytest.fixture(scope="module")
def made() -> tuple[Passes, Tensor, Tensor, torch.nn.Module]:
    """Passes over one text of 30 tokens; parts of its answer are drafts, and then the drafter's second choice."""
    drafter = random_drafter(CONFIG)
    generator = torch.Generator().manual_seed(1)
    tokens_N = torch.randint(0, VOCABULARY - 1, (30,), generator=generator)
    aux_NX = torch.randn(30, CONFIG.fc_input_size, generator=generator).double()
    for newest, num_right in ((PROMPT, 3), (8, 1), (10, 2), (13, 4), (18, 0), (19, 2)):
        session = DraftSession(drafter)
        drafts = session.propose(tokens_N[1 : newest + 1], aux_NX[:newest], DEPTHS)
        tokens_N[newest + 1 : newest + 1 + num_right] = drafts.token_ids_K[:num_right]
        tokens_N[newest + 1 + num_right] = drafts.logits_KV[num_right].topk(2).indices[1]
    passes = Passes(drafter, DEPTHS, VOCABULARY)
    passes.add(tokens_N, aux_NX)
    return passes, tokens_N, aux_NX, drafter


def test_passes_are_those_of_a_drafting_session(made: tuple[Passes, Tensor, Tensor, torch.nn.Module]) -> None:
    passes, tokens_N, aux_NX, drafter = made
    session = DraftSession(drafter)  # type: ignore[arg-type]
    session.propose(tokens_N[1:9], aux_NX[:8], 1)
    before = session.num_rows
    # Rows 8, 9 and 10 (tokens 9, 10, 11), first with the target's states and then with the shared one.
    shared_TX = drafter.mask_hidden.view(1, -1).expand(3, -1)
    for stand_in, given_TX in (("target", aux_NX[8:11]), ("shared", shared_TX)):
        expected = session.propose(tokens_N[9:12], given_TX, DEPTHS)
        session.truncate(before)
        found = passes[key_of(0, 11, 3, stand_in)]  # type: ignore[arg-type]
        assert found.token_ids_DM[:, 0].tolist() == expected.token_ids_K.tolist()
        np.testing.assert_allclose(found.probs_DM[:, 0], expected.logits_KV.softmax(-1).amax(-1), rtol=1e-5)
    assert passes[key_of(0, 11, 3, "shared")].probs_DM[0, 0] != passes[key_of(0, 11, 3, "target")].probs_DM[0, 0]


def test_many_passes_at_once_are_those_made_one_by_one(made: tuple[Passes, Tensor, Tensor, torch.nn.Module]) -> None:
    passes, tokens_N, aux_NX, drafter = made
    together = Passes(drafter, DEPTHS, VOCABULARY)  # type: ignore[arg-type]
    together.add(tokens_N, aux_NX)
    ways: tuple[StandIn, ...] = ("shared", "own")
    keys = [key_of(0, newest, missing, way) for newest in (9, 12, 20) for missing in (0, 1, 4) for way in ways]
    together.make(keys)
    for key in keys:
        np.testing.assert_allclose(together[key].probs_DM, passes[key].probs_DM, rtol=1e-9)
        assert together[key].num_accepted == passes[key].num_accepted


def test_own_outputs_stand_in_as_eagle3_feeds_them_back(made: tuple[Passes, Tensor, Tensor, torch.nn.Module]) -> None:
    """Row 8's stand-in is what the layers left at row 7, in the pass after token 8 whose drafts were verified."""
    passes, tokens_N, aux_NX, drafter = made
    session = DraftSession(drafter)  # type: ignore[arg-type]
    _, stream_TH = session._forward(tokens_N[1:9], drafter.reduce(aux_NX[:8]))
    normed_TH, _ = session._forward(tokens_N[9:10], stream_TH[-1:])
    expected = drafter.logits(normed_TH[0]).softmax(-1)
    found = passes[key_of(0, 9, 1, "own")]
    np.testing.assert_allclose(found.probs_DM[0, 0], expected.max().item(), rtol=1e-5)
    assert found.token_ids_DM[0, 0] == expected.argmax()


def scripted(text: np.ndarray, num_right: Callable[[int, int], int], seed: int = 0) -> Lookup:
    """Proposals at DEPTHS depths over 12 tokens; the first `num_right(newest, num_missing)` drafts are the text's."""

    def lookup(newest: int, num_missing: int) -> Proposals:
        random = np.random.default_rng([seed, newest, num_missing])
        ids_DM = np.stack([random.permutation(12) for _ in range(DEPTHS)])
        right = min(num_right(newest, num_missing), len(text) - 1 - newest)
        for depth in range(DEPTHS):
            if newest + 1 + depth >= len(text):
                continue
            true = np.flatnonzero(ids_DM[depth] == text[newest + 1 + depth])[0]
            swapped = 0 if depth < right else 1 + int(random.integers(11)) if true == 0 or depth == right else true
            ids_DM[depth, [true, swapped]] = ids_DM[depth, [swapped, true]]
        probs_DM = -np.sort(-random.dirichlet(np.ones(12), DEPTHS), axis=1)
        return Proposals(ids_DM, probs_DM, right)

    return lookup


TEXT = np.random.default_rng(5).integers(0, 12, 60)


def right_after(newest: int, num_missing: int) -> int:
    return newest * 7 % 5 if num_missing == 0 else newest * 3 % 4


LOOKUP = scripted(TEXT, right_after)


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 4])
def test_guesses_are_the_likeliest_of_all_outcomes(num_drafts: int) -> None:
    proposals = LOOKUP(20, 0)
    chance: dict[tuple[int, int], float] = {}
    reached = 1.0
    for accepted in range(num_drafts + 1):
        ids, probs = proposals.token_ids_DM[accepted], proposals.probs_DM[accepted]
        for token, prob in zip(ids.tolist(), probs.tolist(), strict=True):
            if accepted == num_drafts or token != ids[0]:
                chance[accepted, token] = reached * prob  # (1 - c) / (1 - q) is 1 where c = q
        reached *= probs[0]
    assert sum(chance.values()) == pytest.approx(1)
    expected = sorted(chance, key=lambda outcome: -chance[outcome])
    assert guesses(proposals, num_drafts, 11) == expected[:11]


def test_learned_acceptance_moves_guesses_between_depths() -> None:
    proposals = LOOKUP(20, 0)
    sure = guesses(proposals, 3, 8, np.full(DEPTHS, 0.99))
    assert [accepted for accepted, _ in sure][:4] == [3, 3, 3, 3]
    never = guesses(proposals, 3, 8, np.zeros(DEPTHS))
    assert {accepted for accepted, _ in never} == {0}
    assert int(proposals.token_ids_DM[0, 0]) not in {token for _, token in never}


def test_guesses_that_cannot_be_told_are_refused() -> None:
    with pytest.raises(ValueError, match="max_guesses = 12"):
        guesses(LOOKUP(20, 0), 3, 12)
    with pytest.raises(ValueError, match="num_drafts = 5"):
        guesses(LOOKUP(20, 0), 5, 4)


def test_normal_decoding_takes_the_steps_of_the_walk() -> None:
    accepted_A = np.array([LOOKUP(newest, 0).num_accepted for newest in range(PROMPT, len(TEXT) - 1)])
    steps = walk(accepted_A, 3)
    found = play(TEXT, PROMPT, LOOKUP, 3, 0, "wait")
    assert found.steps == {"after": len(steps), "ahead": 0, "none": 0}
    assert found.tokens["after"] == len(accepted_A)
    assert [step.accepted for step in outcomes(TEXT, PROMPT, LOOKUP, 3, 1)] == steps[:-1].tolist()


def test_with_all_outcomes_guessed_every_step_hits() -> None:
    """Of twelve tokens the rejected one leaves 11 outcomes, where drafts are known never to be accepted."""
    everything = scripted(TEXT, lambda newest, num_missing: 0)
    found = play(TEXT, PROMPT, everything, 1, 11, "wait", np.zeros(DEPTHS))
    assert found.num_hits == found.num_guessed == len(TEXT) - 2 - PROMPT
    assert found.steps == {"after": 1, "ahead": found.num_hits, "none": 0}
    ranks = [step.ranks[0] for step in outcomes(TEXT, PROMPT, everything, 1, 11, (np.zeros(DEPTHS),))]
    assert max(ranks) < 11
    assert play(TEXT, PROMPT, everything, 1, 1, "wait", np.zeros(DEPTHS)).num_hits == ranks.count(0) < len(ranks)


def test_states_that_are_known_all_the_same_cost_no_acceptance(
    made: tuple[Passes, Tensor, Tensor, torch.nn.Module],
) -> None:
    passes, tokens_N, _, _ = made
    text = tokens_N.numpy()
    normal = play(text, PROMPT, passes.lookup(0), 4, 0, "wait")
    known = play(text, PROMPT, passes.lookup(0, "target"), 4, VOCABULARY - 1, "wait")
    assert known.num_hits > 0
    assert normal.tokens["after"] > normal.steps["after"], "no draft was accepted: the test would show nothing"
    assert sum(known.steps.values()) == normal.steps["after"]
    shared = play(text, PROMPT, passes.lookup(0), 4, VOCABULARY - 1, "wait")
    assert sum(shared.steps.values()) > normal.steps["after"]


def test_a_miss_waits_or_goes_without() -> None:
    waiting, without = (play(TEXT, PROMPT, LOOKUP, 3, 11, on_miss) for on_miss in ("wait", "without"))
    assert 0 < waiting.num_hits < waiting.num_guessed
    assert waiting.steps["after"] == 1 + waiting.num_guessed - waiting.num_hits
    assert waiting.steps["ahead"] == waiting.num_hits
    assert without.tokens["none"] == without.steps["none"] == without.num_guessed - without.num_hits
    assert without.steps["after"] == 1
    for one in (waiting, without):
        assert sum(one.tokens.values()) == len(TEXT) - 1 - PROMPT


def test_a_play_accepts_what_verification_accepts(made: tuple[Passes, Tensor, Tensor, torch.nn.Module]) -> None:
    """A step's outcome by `peagle.accept`, the target's logits being the text's tokens."""
    passes, tokens_N, _, _ = made
    for step in outcomes(tokens_N.numpy(), PROMPT, passes.lookup(0), 4, 19):
        after = tokens_N[step.newest + 1 : step.newest + 6]
        if len(after) < 5:
            continue
        drafts_BK = torch.from_numpy(passes[key_of(0, step.newest, 0)].token_ids_DM[None, :4, 0].astype(np.int64))
        logits_BTV = torch.nn.functional.one_hot(after, VOCABULARY)[None].double()
        verified = accept_greedy(drafts_BK, logits_BTV)
        assert int(verified.num_accepted_tokens_B[0]) == step.accepted


def test_conditional_acceptance_counts_only_steps_that_got_there() -> None:
    assert conditional_acceptance([0, 1, 1, 3], 4).tolist() == [0.75, 1 / 3, 1.0, 0.0]


def test_heads_that_are_not_measured_are_refused() -> None:
    with pytest.raises(ValueError, match="no mask token"):
        Passes(random_drafter(dataclasses.replace(CONFIG, ptd_token_id=None)), DEPTHS, 20)
    with pytest.raises(ValueError, match="sliding window"):
        Passes(random_drafter(dataclasses.replace(CONFIG, sliding_window=16)), DEPTHS, 20)


def test_texts_played_at_once_are_those_played_alone(made: tuple[Passes, Tensor, Tensor, torch.nn.Module]) -> None:
    _, tokens_N, aux_NX, drafter = made
    both = Passes(drafter, DEPTHS, VOCABULARY)  # type: ignore[arg-type]
    short_N = tokens_N[:17]
    both.add(tokens_N, aux_NX)
    both.add(short_N, aux_NX[:17])
    texts = Texts([tokens_N.numpy(), short_N.numpy()], [PROMPT, PROMPT + 2], both)
    plays = texts.play(4, 50, "without")
    alone = [
        play(one, first, both.lookup(i), 4, 50, "without")
        for i, (one, first) in enumerate(zip(texts.tokens, texts.prompt_lengths, strict=True))
    ]
    assert plays == alone
    assert plays[0].num_hits > 0
    whole = played(plays)
    assert whole["num_steps"] == sum(sum(one.steps.values()) for one in plays)
    assert whole["tokens_per_step"] * whole["num_steps"] == pytest.approx(29 - PROMPT + 16 - PROMPT - 2, abs=0.01)


def test_pairs_are_of_the_steps_that_hit(made: tuple[Passes, Tensor, Tensor, torch.nn.Module]) -> None:
    passes, tokens_N, _, _ = made
    texts = Texts([tokens_N.numpy()], [PROMPT], passes)
    steps = texts.outcomes(4, 64, (None,))
    budget = PLAYED_BUDGETS[-1]
    hit = [step for step in steps[0] if step.ranks[0] < budget]
    assert 0 < len(hit) < len(steps[0])
    found = paired(texts, [0], steps, 4, budget)
    assert found["num_steps"] == len(hit) == sum(row["num_steps"] for row in found["by_num_accepted"])
    after = [1 + min(passes[key_of(0, step.next_newest, 0)].num_accepted, 4) for step in hit]
    ahead = [1 + passes[key_of(0, step.next_newest, step.accepted + 1)].num_accepted for step in hit]
    assert found["after"]["value"] == pytest.approx(np.mean(after), abs=1e-4)
    assert found["ahead_shared"]["value"] == pytest.approx(np.minimum(ahead, 5).mean(), abs=1e-4)
    assert found["after"]["value"] != found["ahead_shared"]["value"]
