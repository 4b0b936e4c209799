"""A head whose drafts know the draft before them: what it is trained on, and how it is stored and served.

That its drafts are those of vLLM's engine, of the remote drafter and of evaluation is tested where theirs are.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from peagle.checkpoint import load_head, load_markov_head, save_head
from peagle.config import DrafterConfig, HeadError
from peagle.heads import head_digest, prepare_head
from peagle.model import Drafter
from peagle.train.cod import chain_lengths
from peagle.train.passes import States
from peagle.train.recipe import Recipe
from peagle.train.trainer import Trainer
from tests.head_factory import CONFIG, head_tensors
from tests.small_run import write_small_run


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_run(tmp_path_factory.mktemp("small"))


def trainer_of(small: Path, name: str, *overrides: str) -> Trainer:
    return Trainer(Recipe.load(small / "recipe.yaml", [f"output={small / name}", "drafter.markov_rank=16", *overrides]))


@torch.no_grad()
def table_of(drafter: Drafter) -> torch.Tensor:
    """[V] the draft that `drafter` makes after each token, once its Markov head drowns all else."""
    assert drafter.markov_head is not None
    drafter.markov_head.hidden.weight.zero_()
    torch.nn.init.normal_(drafter.markov_head.previous.weight)
    torch.nn.init.normal_(drafter.markov_head.out.weight, std=1e4)
    token_V = torch.arange(drafter.config.vocab_size)
    return drafter.logits(drafter.after(torch.zeros(len(token_V), drafter.config.hidden_size), token_V)).argmax(-1)


@pytest.mark.parametrize("num_segments", [1, 3])
def test_a_row_is_trained_on_the_true_token_before_its_label(small: Path, num_segments: int) -> None:
    trainer = trainer_of(small, "rows", "cod.ratio=1.0", f"batch.num_segments={num_segments}")
    drafter, batch = trainer.drafter, next(trainer.batches())
    before_V = table_of(drafter)
    aux_BNX, last_BNS = trainer.target.states(
        batch.tokens_BN, batch.document_BN, batch.position_BN, drafter.config.aux_layer_ids
    )
    report = trainer._pass(drafter, batch, States(aux_BNX, last_BNS, trainer.target.lm_head_VS))
    best_BN = (last_BNS @ trainer.target.lm_head_VS.T).argmax(-1)
    right_BN = before_V[batch.tokens_BN] == best_BN
    chain_BN = chain_lengths(batch.document_BN, batch.answer_BN, drafter.config.num_depths)
    for offset in range(1, drafter.config.num_depths):
        sequence, anchor = (chain_BN > offset).nonzero(as_tuple=True)
        wanted = int(right_BN[sequence, anchor + offset + 1].sum())
        assert int(report.correct_R[report.offset_R == offset].sum()) == wanted > 0


def test_what_is_trained_is_stored_and_trained_on(small: Path) -> None:
    trainer = trainer_of(small, "run")
    head = trainer.run()
    assert trainer.drafter.markov_head is not None
    out_HR = trainer.average.values["markov_head.out.weight"]
    assert out_HR.abs().max() > 1e-3
    stored = load_markov_head(head)
    assert stored is not None
    torch.testing.assert_close(stored.out.weight.float(), out_HR, rtol=0.01, atol=1e-4)
    again = trainer_of(small, "again", f"drafter.start_from={head}")
    assert again.drafter.markov_head is not None
    torch.testing.assert_close(again.drafter.markov_head.out.weight, stored.out.weight.float())


def test_stock_vllm_finds_a_plain_head_and_we_the_rest_beside_it(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, markov_rank=8)
    tensors = head_tensors(config)
    whole = save_head(tmp_path / "head", config, tensors)
    (tmp_path / "target").mkdir()
    target = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "vocab_size": 100}
    target |= {"intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "target" / "config.json").write_text(json.dumps(target))
    plain = prepare_head(whole, tmp_path / "target", tmp_path / "cache")
    seen_by_vllm = {name for path in plain.glob("*.safetensors") for name in load_file(path)}
    assert seen_by_vllm == {name for name in tensors if not name.startswith("markov_head.")}
    for head in (whole, plain):
        found_config, found = load_head(head)
        assert found_config == config
        for name, value in tensors.items():
            torch.testing.assert_close(found[name], value)
    assert prepare_head(plain, tmp_path / "target", tmp_path / "cache") == plain
    assert load_markov_head(save_head(tmp_path / "none", CONFIG, head_tensors(CONFIG))) is None

    before = head_digest(plain)
    file = next((plain / "markov_head").iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert head_digest(plain) != before
    file.unlink()
    with pytest.raises(HeadError, match=r"missing markov_head\.previous\.weight"):
        load_markov_head(plain)


def test_an_eagle3_head_has_none(small: Path) -> None:
    with pytest.raises(HeadError, match="markov_rank = 8: an EAGLE-3 head reads its own drafts already"):
        DrafterConfig.for_target(json.loads((small / "target/config.json").read_text()), num_layers=1, markov_rank=8)
    overrides = ["drafter.method=eagle3", "drafter.ptd_token_id=null", "drafter.markov_rank=8"]
    with pytest.raises(ValueError, match=r"drafter\.markov_rank"):
        Recipe.load(small / "recipe.yaml", overrides)
