"""Heads with a reduced draft vocabulary, and the tables that are left to the target."""

from pathlib import Path

import pytest
import torch

from peagle.checkpoint import build_drafter, is_plain, load_head, save_drafter, without_tables
from peagle.draft import Drafts, DraftSession
from peagle.model import Drafter
from peagle.train.data import Conversations, answer_token_counts, frequent_tokens
from peagle.train.target import Target
from tests.support.small_run import trainer_of, write_small_run


def test_most_frequent_tokens_ascending_and_ties_to_the_lower_id() -> None:
    count_V = torch.tensor([0, 7, 2, 9, 2, 0, 1])
    assert frequent_tokens(count_V, 3).tolist() == [1, 2, 3]
    assert frequent_tokens(count_V, 3, always=[6]).tolist() == [1, 3, 6]
    assert frequent_tokens(count_V, 7, always=[6]).tolist() == list(range(7))
    for size in (8, 1):
        with pytest.raises(ValueError, match=rf"draft_vocab_size = {size}: must be in 2\.\.7"):
            frequent_tokens(count_V, size, always=[6, 0])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_run(tmp_path_factory.mktemp("small"))


def test_trained_head_drafts_the_same_after_saving(small: Path, tmp_path: Path) -> None:
    settings = ["drafter.draft_vocab_size=24", "schedule.max_steps=12", "evaluate={}"]
    trainer = trainer_of(small, tmp_path / "run", *settings)
    before = {name: value.detach().clone() for name, value in trainer.drafter.trainable().items()}
    head = trainer.run()
    live = trainer.drafter
    moved = [name for name, value in live.trainable().items() if not torch.equal(value, before[name])]
    assert sorted(moved) == sorted(before), "every tensor that the head owns is trained"
    data = trainer.batches.data
    assert torch.equal(live.target_ids, frequent_tokens(answer_token_counts(data, 64), 24, always=[2]))

    config, tensors = load_head(save_drafter(tmp_path / "exact", live, dtype=torch.float32))
    assert config == load_head(head)[0]
    assert is_plain(head, config)
    expected = drafts(live, trainer.target, data)
    assert set(expected.token_ids_K.tolist()) <= set(live.target_ids.tolist())
    tables = {"embed_VH": trainer.target.embed_VS, "lm_head_VH": trainer.target.lm_head_VS}
    for built in (build_drafter(config, tensors), build_drafter(config, without_tables(config, tensors), **tables)):
        again = drafts(built, trainer.target, data)
        assert torch.equal(again.token_ids_K, expected.token_ids_K)
        torch.testing.assert_close(again.logits_KV, expected.logits_KV)


def drafts(drafter: Drafter, target: Target, data: Conversations) -> Drafts:
    """What a drafter proposes after the first conversation."""
    tokens_1N = torch.from_numpy(next(iter(data.documents()))[0].astype("int64"))[None]
    position_1N = torch.arange(tokens_1N.shape[1])[None]
    aux_1NX, _ = target.states(tokens_1N, position_1N, drafter.config.aux_layer_ids)
    return DraftSession(drafter).propose(tokens_1N[0, 1:], aux_1NX[0, :-1], 4)
