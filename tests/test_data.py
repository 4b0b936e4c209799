"""Training data: parts on disk, packing without loss, the same batches after a resume, prompts and loops."""

import itertools

import numpy as np
import pytest
import torch

from peagle.data import Conversations, PackedBatches, pack
from peagle.prompts import cut_loop, distinct_share, read_jsonl


def conversations(count: int = 40, seed: int = 0) -> Conversations:
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, 1000, random.integers(2, 9)).tolist() for _ in range(count)]
    answers = [random.integers(0, 1000, random.integers(1, 20)).tolist() for _ in range(count)]
    return Conversations.from_lists(prompts, answers)


def test_parts_come_back_as_written(tmp_path) -> None:
    first, second = conversations(7, 1), conversations(5, 2)
    first.save_part(tmp_path, "00")
    second.save_part(tmp_path, "01")
    loaded = Conversations.load(tmp_path)
    assert len(loaded) == 12
    assert loaded.tokens.tolist() == [*first.tokens.tolist(), *second.tokens.tolist()]
    assert loaded.num_answer_tokens == first.num_answer_tokens + second.num_answer_tokens


def test_missing_and_damaged_data_are_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="no part"):
        Conversations.load(tmp_path)
    good = conversations(3)
    np.savez(tmp_path / "part-00.npz", tokens=good.tokens[:-1], lengths=good.lengths, prompt_lengths=good.lengths)
    with pytest.raises(ValueError, match="damaged"):
        Conversations.load(tmp_path)


def test_packing_keeps_every_document_once() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 500)
    groups = list(pack(lengths, 64, np.arange(500), max_open=8))
    assert sorted(itertools.chain(*groups)) == list(range(500))
    assert max(lengths[group].sum() for group in groups) <= 64
    assert len(groups) <= 1.15 * lengths.sum() / 64, "more than 15% of the sequences is padding"


def test_batches_are_whole_documents_with_answers_marked() -> None:
    data = conversations()
    batch = next(PackedBatches(data, num_sequences=3, max_tokens=64, seed=0)())
    known = {tuple(tokens.tolist()): prompt for tokens, prompt in data.documents()}
    for tokens, document, position, answer in zip(
        batch.tokens_BN, batch.document_BN, batch.position_BN, batch.answer_BN, strict=True
    ):
        for number in range(int(document.max()) + 1):
            here = document == number
            whole = tuple(tokens[here].tolist())
            assert position[here].tolist() == list(range(len(whole)))
            assert answer[here].tolist() == [at >= known[whole] for at in range(len(whole))]
        assert not answer[document < 0].any()


def test_skip_gives_the_batches_of_an_uninterrupted_run() -> None:
    batches = PackedBatches(conversations(), num_sequences=2, max_tokens=48, seed=3)
    straight = list(itertools.islice(batches(), 25))
    resumed = list(itertools.islice(batches(skip=10), 15))
    assert all(torch.equal(a.tokens_BN, b.tokens_BN) for a, b in zip(straight[10:], resumed, strict=True))
    assert not torch.equal(straight[0].tokens_BN, straight[10].tokens_BN)


def test_what_does_not_fit_is_counted() -> None:
    batches = PackedBatches(conversations(), num_sequences=1, max_tokens=16, seed=0)
    assert batches.num_left_out == int((conversations().lengths > 16).sum()) > 0
    with pytest.raises(ValueError, match="max_tokens"):
        PackedBatches(conversations(), num_sequences=1, max_tokens=1, seed=0)


def test_loops_are_cut_and_told() -> None:
    varied, loop = list(range(100)), [1, 2, 3, 4, 5] * 60
    assert cut_loop(varied) == varied
    cut = cut_loop(varied + loop, ngram=8, max_repeats=20)
    assert 100 < len(cut) < 140
    assert distinct_share(varied) == 1.0
    assert distinct_share(loop) < 0.1


def test_prompts_from_jsonl(tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"turns": ["two", "three"], "category": "c"}\n')
    assert [(p.text, p.category) for p in read_jsonl(file)] == [("one", "default"), ("two", "c")]
    for text, message in (("{", ":1: not valid JSON"), ('{"turns": []}', ":1: needs"), ("", "no prompts")):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_jsonl(file)
