"""Data, tokenizer and target that do not belong together are told apart, each with both names."""

from pathlib import Path

import pytest

from peagle.train.data import (
    Conversations,
    PackedBatches,
    check_data_fits,
    tokenizer_hash,
    write_manifest,
)


def data_folder(folder: Path, tokens: list[int], **manifest: object) -> Path:
    Conversations.from_lists([tokens[:2]], [tokens[2:]]).save_part(folder, "00")
    write_manifest(folder, manifest)
    return folder


def test_data_of_another_tokenizer_are_refused(target_dir, tmp_path) -> None:
    own = str(tokenizer_hash(target_dir))
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
