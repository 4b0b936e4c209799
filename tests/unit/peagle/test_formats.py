"""Heads of other makers: the speculators package's checkpoints, and the layout of `amazon/gpt-oss-20b-p-eagle`."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.cli import main
from peagle.checkpoint import build_drafter, load_head, target_ids
from peagle.config import UNNAMED_LAYERS, DrafterConfig, HeadError, plain_config
from peagle.heads import convert, shipped_heads
from peagle.train.cod import attend_under
from tests.support.head_factory import reconfigure, rewrite

SOURCES = Path(__file__).parents[2] / "data" / "speculators"


@pytest.fixture(params=["peagle", "eagle3"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint written by speculators, to be changed at will."""
    return Path(shutil.copytree(SOURCES / request.param, tmp_path / request.param))


def test_converted_head_computes_what_speculators_computes(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "head")
    config, tensors = load_head(tmp_path / "head")
    drafter = build_drafter(config, tensors)
    with np.load(source / "golden.npz") as stored:
        golden = {name: torch.from_numpy(stored[name]) for name in stored.files}
    anchor_T, depth_T = golden["anchor"], golden["depth"]
    # Speculators gives a row's embedding and hidden state one place; the shift between them is done in its data.
    token_T, hidden_TX = golden["tokens"][anchor_T + depth_T], golden["hidden"][anchor_T + depth_T]
    if config.ptd_token_id is not None:
        is_mask = depth_T > 0
        token_T = torch.where(is_mask, config.ptd_token_id, token_T)
        hidden_TX = torch.where(is_mask[:, None], drafter.mask_hidden.detach()[0], hidden_TX)
        assert is_mask.sum() > 10
    embeds, hidden = drafter.embed(token_T[None]), drafter.project_inputs(hidden_TX[None])
    earlier = (depth_T == 0) & (anchor_T <= anchor_T[:, None])
    own = (anchor_T == anchor_T[:, None]) & (depth_T <= depth_T[:, None])
    normed, _ = drafter(embeds, hidden, (anchor_T + depth_T)[None], attend_under((earlier | own)[None]))
    torch.testing.assert_close(drafter.logits(normed)[0], golden["logits"], rtol=1e-4, atol=1e-4)


def test_nothing_of_the_head_is_lost_and_what_is_the_targets_is_left_out_and_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = load_file(source / "model.safetensors")
    rewrite(source, verifier_norm__weight=torch.ones(16), verifier_lm_head__weight=torch.ones(24, 16))
    assert main(["convert", str(source), str(tmp_path / "head")]) == 0
    config, tensors = load_head(tmp_path / "head")
    assert tensors.keys() == given.keys()
    assert all(torch.equal(tensors[name], given[name]) for name in given)
    left_out = "verifier_lm_head.weight, verifier_norm.weight"
    assert f"tensors written: {len(given)}; left to the target: {left_out}" in capsys.readouterr().out
    raw = json.loads((source / "config.json").read_text())
    assert config.num_depths == raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert config.aux_layer_ids == tuple(raw["eagle_aux_hidden_state_layer_ids"])
    assert config.ptd_token_id == raw.get("mask_token_id")
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert {name: getattr(config, name) for name in switches} == {name: raw[name] for name in switches}


def test_a_converted_head_keeps_what_publishing_needs(source: Path, tmp_path: Path) -> None:
    (source / "provenance.json").write_text('{"made": 1}')
    convert(source, tmp_path / "whole")
    target = target_with_tables_of(tmp_path / "whole", tmp_path / "target")
    _, _, left_out = convert(tmp_path / "whole", tmp_path / "small", target, has_tables=False)
    assert (tmp_path / "small" / "provenance.json").read_text() == '{"made": 1}'
    whole, small = (load_head(tmp_path / name)[1].keys() for name in ("whole", "small"))
    assert set(left_out) == whole - small - {"mask_embedding"} != set()


def target_with_tables_of(head: Path, folder: Path) -> Path:
    """A checkpoint whose tables a head has."""
    config, tensors = load_head(head)
    lm_head_VH = torch.randn(config.vocab_size, config.hidden_size)
    ids = target_ids(tensors["d2t"]) if "d2t" in tensors else torch.arange(config.vocab_size)
    lm_head_VH[ids] = tensors["lm_head.weight"]
    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.target_hidden_size, "num_hidden_layers": 16}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(sizes | {"tie_word_embeddings": False}))
    save_file(
        {"model.embed_tokens.weight": tensors["embed_tokens.weight"], "lm_head.weight": lm_head_VH},
        folder / "model.safetensors",
    )
    return folder


def test_a_head_without_tables_of_its_own_needs_no_target_to_stay_so(tmp_path: Path) -> None:
    for head in shipped_heads().values():
        convert(head, tmp_path / head.name, has_tables=False)
        assert load_head(tmp_path / head.name)[1].keys() == load_head(head)[1].keys()


@pytest.mark.parametrize("name", ["embed_tokens__weight", "lm_head__weight"])
def test_tables_that_are_not_the_targets_are_not_left_out(source: Path, tmp_path: Path, name: str) -> None:
    convert(source, tmp_path / "whole")
    target, table = target_with_tables_of(tmp_path / "whole", tmp_path / "target"), name.replace("__", ".")
    own_VH = load_head(tmp_path / "whole")[1][table]
    own_VH[1] += 1
    rewrite(tmp_path / "whole", **{name: own_VH})
    with pytest.raises(HeadError, match=f"has a {table} of its own, not the target's, so it cannot"):
        convert(tmp_path / "whole", tmp_path / "small", target, has_tables=False)
    with pytest.raises(HeadError, match="has embed_tokens.weight, perhaps not the target's: name its target with"):
        convert(tmp_path / "whole", tmp_path / "small", has_tables=False)
    assert not (tmp_path / "small").exists()


def test_a_head_is_not_converted_over_the_provenance_of_another(source: Path, tmp_path: Path) -> None:
    (source / "provenance.json").write_text('{"made": 1}')
    for _ in range(2):
        convert(source, tmp_path / "head")
    convert(tmp_path / "head", tmp_path / "head")
    for changed in ('{"made": 2}', None):
        (source / "provenance.json").unlink() if changed is None else (source / "provenance.json").write_text(changed)
        with pytest.raises(HeadError, match=r"head/provenance.json is of another training: delete it, or"):
            convert(source, tmp_path / "head")


def test_unknown_tensors_and_settings_are_named(source: Path, tmp_path: Path) -> None:
    rewrite(source, gate__weight=torch.zeros(3), extra=torch.zeros(2))
    with pytest.raises(HeadError, match=r"(?s)spare extra: found F32 \[2\].*spare gate.weight: found F32 \[3\]"):
        convert(source, tmp_path / "head")
    reconfigure(source, lookahead=2, scaled=True)
    with pytest.raises(HeadError, match="settings that are not known: lookahead, scaled"):
        convert(source, tmp_path / "head")
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("source", ["peagle"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type: Input should be 'peagle' or 'eagle3'"),
        ({"speculators_model_type": ...}, "missing hidden_size, intermediate_size, num_hidden_layers"),
        ({"mask_token_id": None}, "mask_token_id = None, a peagle checkpoint needs a token"),
        ({"layer": {"model_type": "qwen3_next"}}, "model_type: Input should be 'llama' or 'qwen3', not 'qwen3_next'"),
        ({"fc_norm": False}, r"spare fc_norm.0.weight.*; and 1 more"),
        ({"layer": {"hidden_act": "gelu"}}, "hidden_act: Input should be 'silu', not 'gelu'"),
        ({"layer": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}}, "partial_rotary_fac.* 0.5"),
    ],
)
def test_sources_that_cannot_be_read(source: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    layer = json.loads((source / "config.json").read_text())["transformer_layer_config"]
    layer |= changes.get("layer", {})
    reconfigure(source, **changes | {"transformer_layer_config": layer, "layer": ...})
    with pytest.raises(HeadError, match=message):
        convert(source, tmp_path / "head")


def test_missing_settings_mean_what_vllm_takes_them_for() -> None:
    raw = json.loads((SOURCES / "eagle3" / "config.json").read_text())
    switches = ("norm_before_residual", "norm_before_fc", "norm_output")
    for name in (*switches, "eagle_aux_hidden_state_layer_ids", "speculators_config"):
        del raw[name]
    plain = plain_config(raw, "config.json")
    assert [plain[name] for name in switches] == [True, False, False]
    assert "num_depths" not in plain
    assert DrafterConfig.from_dict(plain).aux_layer_ids == UNNAMED_LAYERS
