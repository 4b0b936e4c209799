"""Training data: parts on disk, packing without loss, what is too long, the same batches after a resume."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from peagle.train.cod import chain_lengths
from peagle.train.data import Conversations, PackedBatches, check_data_fits, pack, tokenizer_hash, write_manifest


def conversations(count: int = 40) -> Conversations:
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 1000, random.integers(2, 9)).tolist() for _ in range(count)]
    answers = [random.integers(0, 1000, random.integers(1, 20)).tolist() for _ in range(count)]
    return Conversations.from_lists(prompts, answers)


def test_missing_and_damaged_data_are_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="no part"):
        Conversations.load(tmp_path)
    good = conversations(3)
    np.savez(tmp_path / "part-00.npz", tokens=good.tokens[:-1], lengths=good.lengths, prompt_lengths=good.lengths)
    with pytest.raises(ValueError, match="part-00.npz is damaged: lengths"):
        Conversations.load(tmp_path)
    whole = good.save_part(tmp_path, "00").read_bytes()
    (tmp_path / "part-00.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="part-00.npz is damaged"):
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
    rows = batch.tokens_BN, batch.document_BN, batch.position_BN, batch.answer_BN
    for tokens, document, position, answer in zip(*rows, strict=True):
        for number in range(int(document.max()) + 1):
            here = document == number
            whole = tuple(tokens[here].tolist())
            assert position[here].tolist() == list(range(len(whole)))
            assert answer[here].tolist() == [at >= known[whole] for at in range(len(whole))]
        assert not answer[document < 0].any()


def test_workers_share_the_batches_of_one() -> None:
    batches = PackedBatches(conversations(), num_sequences=2, max_tokens=48, seed=3)
    straight = list(itertools.islice(batches(), 12))
    dealt = [list(itertools.islice(batches(4, rank, 2), 4)) for rank in range(2)]
    in_turn = [batch for pair in zip(*dealt, strict=True) for batch in pair]
    assert all(torch.equal(a.tokens_BN, b.tokens_BN) for a, b in zip(straight[4:], in_turn, strict=True))


def test_no_document_is_lost_between_epochs() -> None:
    """40 documents in sequences of one document each, three a batch: epochs end inside a batch."""
    data = conversations()
    batches = PackedBatches(data, num_sequences=3, max_tokens=int(data.lengths.max()), seed=0)
    packed = [batch.document_BN[row].max() + 1 for batch in itertools.islice(batches(), 400) for row in range(3)]
    ends = np.cumsum(packed)
    assert set(range(40, int(ends[-1]), 40)) <= set(ends.tolist()), "an epoch lacks or repeats documents"


def test_no_prompt_is_trained_on_and_held_out() -> None:
    prompts = [[1, number % 50] for number in range(200)]
    data = Conversations.from_lists(prompts, [[7]] * 200)
    trained, held_out = data.hold_out(0.2)
    assert sorted(trained + held_out) == list(range(200))
    assert 16 <= len(held_out) <= 64
    assert not {tuple(prompts[n]) for n in trained} & {tuple(prompts[n]) for n in held_out}
    first = Conversations.from_lists(prompts[:100], [[7]] * 100)
    assert first.hold_out(0.2)[1] == [index for index in held_out if index < 100], "more data moves none"


def test_what_does_not_fit_is_counted(caplog) -> None:
    data = conversations()
    batches = PackedBatches(data, num_sequences=1, max_tokens=16, seed=0)
    too_long = data.lengths > 16
    assert batches.counts["num_left_out"] == int(too_long.sum()) > 0
    assert batches.counts["num_tokens_left_out"] + batches.counts["num_tokens"] == len(data.tokens)
    assert f"{int(too_long.sum())} are left out" in caplog.text
    with pytest.raises(ValueError, match="max_tokens"):
        PackedBatches(conversations(), num_sequences=1, max_tokens=1, seed=0)


def test_long_conversations_may_be_cut() -> None:
    """Lengths 30 and 12 fit as they are or cut; the third has no answer within 16 tokens."""
    data = Conversations.from_lists([[1] * 4, [2] * 4, [3] * 16], [[5] * 26, [6] * 8, [7] * 9])
    batches = PackedBatches(data, num_sequences=2, max_tokens=16, seed=0, long="cut")
    counts = batches.counts
    assert (counts["num_tokens"], counts["num_left_out"], counts["num_tokens_left_out"]) == (28, 1, 25)
    assert (counts["num_cut"], counts["num_tokens_cut"]) == (1, 14)
    batch = next(batches())
    rows = [tokens[document >= 0].tolist() for tokens, document in zip(batch.tokens_BN, batch.document_BN, strict=True)]
    assert sorted(rows) == [[1] * 4 + [5] * 12, [2] * 4 + [6] * 8]
    assert int(batch.answer_BN.sum()) == 20


def test_a_joined_batch_is_one_document_with_the_same_chains() -> None:
    batch = next(PackedBatches(conversations(), num_sequences=3, max_tokens=96, seed=0)())
    assert set(batch.document_BN.unique().tolist()) >= {-1, 0, 1}, "padding, or a second document, is missing"
    joined, order_N = batch.joined()
    num_real = int((batch.document_BN >= 0).sum())
    assert joined.document_BN.tolist() == [[0] * num_real + [-1] * (3 * 96 - num_real)]
    assert joined.position_BN.tolist() == [list(range(3 * 96))]
    assert sorted(order_N.tolist()) == list(range(3 * 96))
    assert torch.equal(joined.tokens_BN[0], batch.tokens_BN.flatten()[order_N])
    assert torch.equal(joined.index_BN[0], batch.index_BN.flatten()[order_N])
    lengths_BN = chain_lengths(batch.document_BN, batch.answer_BN, 4)
    assert lengths_BN.amax() == 4
    assert torch.equal(chain_lengths(joined.document_BN, joined.answer_BN, 4)[0], lengths_BN.flatten()[order_N])


# Data, tokenizer and target that do not belong together are told apart, each with both names


def data_folder(folder: Path, tokens: list[int], **manifest: object) -> Path:
    Conversations.from_lists([tokens[:2]], [tokens[2:]]).save_part(folder, "00")
    write_manifest(folder, manifest)
    return folder


def test_the_hash_of_a_tokenizer_is_of_its_contents_not_of_how_they_are_written(target_dir, tmp_path) -> None:
    content = json.loads((target_dir / "tokenizer.json").read_text())
    merges = content["model"]["merges"]
    content["model"]["merges"] = [one.split(" ") if isinstance(one, str) else " ".join(one) for one in merges]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"padding": {"strategy": "BatchLongest"}}))
    assert tokenizer_hash(tmp_path) == tokenizer_hash(target_dir)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"pre_tokenizer": None}))
    assert tokenizer_hash(tmp_path) != tokenizer_hash(target_dir)


def test_data_of_another_tokenizer_are_refused(target_dir, tmp_path) -> None:
    own = tokenizer_hash(target_dir)
    check_data_fits(data_folder(tmp_path / "own", [1, 2, 3], tokenizer=own), target_dir)
    check_data_fits(data_folder(tmp_path / "unnamed", [1, 2, 3]), target_dir)
    foreign = data_folder(tmp_path / "foreign", [1, 2, 3], tokenizer="feedfeedfeedfeed")
    with pytest.raises(ValueError, match=f"foreign was made with tokenizer feedfeedfeedfeed .* has tokenizer {own}"):
        check_data_fits(foreign, target_dir)


def test_ids_and_lengths_beyond_the_target_are_refused(target_dir, tmp_path) -> None:
    beyond = data_folder(tmp_path / "beyond", [1, 2, 49152, 3])
    with pytest.raises(ValueError, match=r"beyond holds token id 49152, the target .* has ids 0\.\.49151"):
        check_data_fits(beyond, target_dir)
    long = data_folder(tmp_path / "long", [1] * 8193)
    with pytest.raises(ValueError, match="8193 tokens, .* 8192 positions .*lower batch.max_tokens to 8192"):
        check_data_fits(long, target_dir)
    batches = PackedBatches(Conversations.load(long), num_sequences=1, max_tokens=8192, seed=0, long="cut")
    check_data_fits(long, target_dir, batches)
