"""Every way in which a head directory can be wrong is named, all at once, without loading it."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from cluster.settings import Catalog, DrafterSettings, load_settings
from peagle.checkpoint import build_drafter, check_head, expected_tensors, load_head, save_head
from peagle.config import (
    DEFAULT_NUM_DEPTHS,
    LLAMA_NAMES,
    QWEN_NAMES,
    UNNAMED_LAYERS,
    DrafterConfig,
    HeadError,
    HeadFile,
    check_head_fits,
    plain_config,
    read_head_config,
)
from peagle.heads import MAX_NUM_CANDIDATES, candidate_directory, candidate_files, head_digest, keep_candidate
from peagle.schema import SettingsError
from peagle.vllm.engine_settings import engine_kwargs
from tests.support.disk import full_disk
from tests.support.head_factory import CONFIG, REDUCED, TARGET, head_tensors, reconfigure, rewrite


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return save_head(tmp_path / "head", CONFIG, head_tensors(CONFIG))


def settings_with(head: Path, **drafter: Any) -> DrafterSettings:
    """Of a service with this head."""
    catalog = Catalog(("target",), Path("nowhere"), read_head_config)
    found = load_settings({"model": {"source": "target"}, "drafter": {"head": str(head), **drafter}}, catalog, {})
    assert found.drafter is not None
    return found.drafter


@pytest.mark.parametrize("name", [*LLAMA_NAMES, *QWEN_NAMES])
def test_every_name_that_vllm_knows_passes_the_settings_and_loads(tmp_path: Path, name: str) -> None:
    config = dataclasses.replace(CONFIG, qk_norm=name in QWEN_NAMES)
    head = save_head(tmp_path / "head", config, head_tensors(config))
    reconfigure(head, architectures=[name])
    drafter = settings_with(head)
    assert (drafter.head, drafter.max_draft_tokens) == (str(head), config.num_depths)
    assert build_drafter(*load_head(head)).config == config
    reconfigure(head, architectures=["EagleLlamaForCausalLM"])
    with pytest.raises(SettingsError, match=r"architectures = \['EagleLlamaForCausalLM'\], expected"):
        settings_with(head)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"fc__weight": None}, "missing fc.weight: expected F32/F16/BF16 [32, 96]"),
        ({"norm__weight": torch.zeros(31)}, "wrong norm.weight: found F32 [31], expected F32/F16/BF16 [32]"),
        ({"mask_hidden": torch.zeros(1, 1, 64)}, "wrong mask_hidden: found F32 [1, 1, 64], expected F32/F16/BF16 [96]"),
        ({"norm__weight": torch.zeros(32).int()}, "wrong norm.weight: found I32 [32], expected F32/F16/BF16 [32]"),
        ({"extra": torch.zeros(3)}, "spare extra: found F32 [3], not part of this head"),
    ],
)
def test_a_wrong_tensor_is_named_in_one_line_with_its_file(head: Path, changed: Any, problem: str) -> None:
    rewrite(head, **changed)
    with pytest.raises(HeadError) as caught:
        load_head(head)
    assert str(caught.value) == f"head {head}/model.safetensors does not match its config.json: {problem}"


def test_many_wrong_tensors_are_one_line(head: Path) -> None:
    rewrite(head, **{f"layers__2__mlp__{name}__weight": torch.zeros(1) for name in "abcde"})
    with pytest.raises(HeadError, match=r"^[^\n]*spare layers.2.mlp.a.weight.*; and 2 more$"):
        load_head(head)


def test_a_mask_token_that_nobody_names(head: Path) -> None:
    reconfigure(head, ptd_token_id=...)
    with pytest.raises(HeadError, match=r"(?s)spare mask_hidden.*names no mask token \(mask_token_id, pard_"):
        load_head(head)


def test_an_output_matrix_tied_to_the_head_s_own_table(head: Path) -> None:
    reconfigure(head, tie_word_embeddings=True)
    load_head(head)
    rewrite(head, lm_head__weight=None)
    with pytest.raises(HeadError, match=r"ties its output matrix .*: store lm_head.weight in it, or write false"):
        load_head(head)
    rewrite(head, embed_tokens__weight=None)
    load_head(head)


def test_k_max_is_limited_where_the_head_says_what_it_was_trained_for(head: Path) -> None:
    assert settings_with(head).max_draft_tokens == 5
    with pytest.raises(SettingsError, match="was trained for 5 depths"):
        settings_with(head, max_draft_tokens=18)
    reconfigure(head, num_depths=...)  # as in the published heads
    assert settings_with(head).max_draft_tokens == DEFAULT_NUM_DEPTHS
    assert settings_with(head, max_draft_tokens=18).max_draft_tokens == 18
    speculative = engine_kwargs(None, head, max_draft_tokens=18, on_cpu=True)
    assert speculative["speculative_config"]["num_speculative_tokens"] == 18


@pytest.mark.parametrize("keep", [0, 8, 200, -1, 1])
def test_cut_file_is_named_with_its_bytes(head: Path, keep: int) -> None:
    path = head / "model.safetensors"
    whole = path.read_bytes()
    cut = whole + b"\0" if keep == 1 else whole[:keep]
    path.write_bytes(cut)
    for check in (load_head, check_head):
        with pytest.raises(HeadError, match=rf"model.safetensors \({len(cut)} bytes\) is cut short or damaged"):
            check(head)


def test_files_that_are_no_heads(head: Path, tmp_path: Path) -> None:
    weights = head / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:8] + b"x" * (len(good) - 8))
    with pytest.raises(HeadError, match="is cut short or damaged: .*header"):
        load_head(head)
    weights.unlink()
    with pytest.raises(HeadError, match=r"model.safetensors does not exist \(the directory holds: \['config.json'\]\)"):
        load_head(head)
    with pytest.raises(HeadError, match=r"no head at .*nowhere: .*config.json does not exist"):
        load_head(tmp_path / "nowhere")
    for name in ("one", "two"):
        save_file({"norm.weight": torch.zeros(32)}, head / f"{name}.safetensors")
    with pytest.raises(HeadError, match=r"norm.weight is stored twice"):
        load_head(head)


LLAMA = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "neutral",
    [{"extrapolation_factor": 1, "apply_yarn_scaling": True}, {"mscale": 0, "mscale_all_dim": 0}, {"attn_factor": 1.4}],
)
def test_names_of_yarn_that_change_nothing_are_passed_over(neutral: dict[str, Any]) -> None:
    rope = YARN | {"attention_factor": 1.5}
    expected = DrafterConfig.from_dict(CONFIG.to_dict() | {"rope_parameters": rope}).rope_scaling
    found = DrafterConfig.from_dict(CONFIG.to_dict() | {"rope_parameters": rope | neutral}).rope_scaling
    assert found == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ..., "vocab_size": ...}, "missing hidden_size, vocab_size"),
        (
            {"num_hidden_layers": 0, "num_depths": 1.5},
            "num_hidden_layers: .* equal to 1, not 0; num_depths: Input should be a valid integer, not 1.5",
        ),
        ({"ptd_token_id": 100}, r"ptd_token_id = 100 must be in 0..99"),
        ({"draft_vocab_size": 101}, r"draft_vocab_size = 101 must be in 1..vocab_size = 100"),
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures = \['LlamaForCausalLM'\], expected"),
        ({"hidden_act": "gelu"}, "hidden_act: Input should be 'silu', not 'gelu'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state: Input should be True"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type must be default, llama3 or yarn"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 8}}, "yarn: missing key original_max_position_emb"),
        ({"mask_token_id": 98}, "mask_token_id = 98 and ptd_token_id = 99 contradict each other"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported: take the head in"),
        (
            {"rope_parameters": LLAMA | {"high_freq_factor": "4"}},
            "llama3: high_freq_factor: Input .* not '4'; missing key original_max_position_embeddings",
        ),
        ({"num_aux_hidden_states": 2}, "num_aux_hidden_states = 2, but there are 3 auxiliary layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"= \[1, 2\] and eagle_config.* = \[2, 4, 5\] contradict"),
        ({"eagle_aux_hidden_state_layer_ids": [4, 2, 5], "eagle_config": {}}, "must be .* different and ascending"),
        ({"vocab_size": 2**62}, "vocab_size: Input should be less than or equal to 16777216"),
        ({"eagle_aux_hidden_state_layer_ids": [0] * 2000}, "eagle_aux_hidden_state_layer_ids: List should have"),
        ({"head_dim": 7}, "head_dim = 7 must be even and at least 2"),
        ({"rms_norm_eps": float("nan")}, "is not valid JSON"),
        ({"layer_types": ["full_attention"]}, "has 1 entries, but num_hidden_layers = 2"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "train one without it"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta = '1e4' must be a number above 1"),
        ({"rope_parameters": {"use_fope": True}}, "not known with rope_type default: use_fope; .* leave them out"),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 5.0}}, "and rope_scaling .* contradict each other"),
        ({"rope_parameters": YARN | {"attn_factor": 2.0}}, "not known with rope_type yarn: attn_factor"),
        ({"rope_parameters": YARN | {"factor": 1e6}}, "the positions of vLLM's table, not 1e.06 . 64"),
        (
            {"rope_parameters": LLAMA | {"low_freq_factor": 4, "original_max_position_embeddings": 64}},
            "low_freq_factor = 4.0 must be below 4.0",
        ),
    ],
)
def test_wrong_configuration_is_named(head: Path, changes: dict[str, Any], message: str) -> None:
    reconfigure(head, **changes)
    with pytest.raises(HeadError, match=message):
        check_head(head)


KEYS = sorted({*json.loads(json.dumps(CONFIG.to_dict())), *HeadFile.model_fields})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*KEYS, "factor"]), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3), is_speculators=st.booleans())
def test_any_value_of_any_key_is_read_or_refused(changes: dict[str, Any], is_speculators: bool) -> None:
    raw = CONFIG.to_dict() | changes
    if is_speculators:
        layer = CONFIG.to_dict() | {"model_type": "llama"} | changes
        raw = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, **changes}
    try:
        if is_speculators:
            raw = plain_config(raw, "config.json")
        config = DrafterConfig.from_dict(raw)
    except HeadError:
        return
    assert len(expected_tensors(config)) < 20_000
    assert DrafterConfig.from_dict(config.to_dict()) == config


def test_a_config_that_is_no_object(head: Path) -> None:
    path = head / "config.json"
    for content, message in (
        (b"{", "is not valid JSON"),
        (b"[]", "must hold a JSON object, found a list"),
        (b'{"a": ' * 100_000, "is not valid JSON: recursion limit exceeded"),
    ):
        path.write_bytes(content)
        with pytest.raises(HeadError, match=message):
            load_head(head)
    path.unlink()
    path.mkdir()
    with pytest.raises(HeadError, match="is no file: expected a JSON file"):
        load_head(head)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden size: the head reads 32, the target has 64"),
        ({"vocab_size": 120}, "vocabulary: the head has 100 tokens, the target 120"),
        ({"num_hidden_layers": 4}, r"auxiliary layers: \[5\] of \[2, 4, 5\] are outside 0..4"),
        ({"hidden_size": None}, "the target's config.json lacks hidden_size"),
    ],
)
def test_head_for_another_target_is_refused(head: Path, change: dict[str, Any], message: str) -> None:
    check_head_fits(CONFIG, TARGET)
    check_head_fits(CONFIG, {"text_config": TARGET})
    with pytest.raises(HeadError, match=message):
        check_head_fits(CONFIG, TARGET | change)
    with pytest.raises(HeadError, match=message):
        check_head(head, TARGET | change)


def test_default_taps_of_a_short_target_are_refused() -> None:
    short = TARGET | {"num_hidden_layers": 6}
    with pytest.raises(HeadError, match=r"default aux_layer_ids \(2, 3, 3\) need a target of 7 layers, it has 6"):
        DrafterConfig.for_target(short, num_layers=1)
    assert DrafterConfig.for_target(short, num_layers=1, aux_layer_ids=(0, 5)).fc_input_size == 64
    with pytest.raises(HeadError, match="need a target of 7 layers, it has 6: name the layers"):
        check_head_fits(dataclasses.replace(CONFIG, aux_layer_ids=UNNAMED_LAYERS), short)


@pytest.mark.parametrize("missing", ["embed_tokens", "lm_head"])
def test_a_drafter_of_another_width_needs_its_own_tables(tmp_path: Path, missing: str) -> None:
    config = dataclasses.replace(CONFIG, hidden_size=16, head_dim=8)
    path = save_head(tmp_path / "head", config, head_tensors(config))
    assert check_head(path, TARGET) == config
    rewrite(path, **{f"{missing}__weight": None})
    with pytest.raises(HeadError, match=f"has no {missing}.weight, so it must share the target.s, but its hidden_size"):
        check_head(path, TARGET)


def test_checks_import_no_torch(head: Path) -> None:
    code = (
        "import json, sys; from peagle.checkpoint import check_head; check_head(sys.argv[1], json.loads(sys.argv[2]));"
        "heavy = {'torch', 'transformers', 'ray'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(head), json.dumps(TARGET)], check=True, cwd=Path(__file__).parents[3]
    )


def test_the_files_of_a_candidate_are_checked_and_kept_in_the_cache(head: Path, tmp_path: Path) -> None:
    cache, files = tmp_path / "cache", candidate_files(head)
    assert candidate_directory("candidate-x", cache) is None
    kept = keep_candidate("candidate-x", files, (), cache)
    assert candidate_directory("candidate-x", cache) == kept
    assert head_digest(kept) == head_digest(head)
    (kept / "config.json").write_text("{}")
    assert candidate_directory("candidate-x", cache) is None, "damaged since"
    for index in range(MAX_NUM_CANDIDATES + 2):
        keep_candidate(f"candidate-{index}", files, ["candidate-1"], cache)
    assert candidate_directory("candidate-0", cache) is None
    assert candidate_directory("candidate-1", cache) is not None
    assert candidate_directory(f"candidate-{MAX_NUM_CANDIDATES + 1}", cache) is not None


def test_files_that_no_candidate_has_are_refused(head: Path, tmp_path: Path) -> None:
    for name in ("../config.json", "pytorch_model.bin", "a/model.safetensors"):
        with pytest.raises(ValueError, match="a head has config.json and safetensors files, not"):
            keep_candidate("candidate-x", {**candidate_files(head), name: b""}, (), tmp_path / "cache")
    rewrite(head, fc__weight=None)
    with pytest.raises(HeadError, match="missing fc.weight"):
        keep_candidate("candidate-x", candidate_files(head), (), tmp_path / "cache")
    assert candidate_directory("candidate-x", tmp_path / "cache") is None


# ---- round trips in both forms, tables that must agree, and writes that fail half-way


def test_shipped_head_round_trip_and_its_tables_come_from_the_target(tmp_path: Path) -> None:
    tensors = head_tensors(CONFIG, shipped=True)
    config, loaded = load_head(save_head(tmp_path / "head", CONFIG, tensors))
    assert "embed_tokens.weight" not in loaded
    with pytest.raises(HeadError, match=r"no embed_tokens.weight: pass the target's as embed_VH \[100, 32\]"):
        build_drafter(config, loaded)
    table = torch.randn(100, 32)
    with pytest.raises(HeadError, match=r"no lm_head.weight: pass the target's as lm_head_VH \[100, 32\]"):
        build_drafter(config, loaded, embed_VH=table)
    with pytest.raises(HeadError, match=r"embed_VH has shape \[100, 31\], the head needs \[100, 32\]"):
        build_drafter(config, loaded, embed_VH=table[:, 1:], lm_head_VH=table)
    drafter = build_drafter(config, loaded, embed_VH=table, lm_head_VH=table)
    assert torch.equal(drafter.embed(torch.tensor([98, 99])), torch.stack([table[98], tensors["mask_embedding"]]))


def test_vocabulary_tables_must_agree(tmp_path: Path) -> None:
    def load_with(**changes: Tensor) -> None:
        path = save_head(tmp_path / "head", REDUCED, head_tensors(REDUCED))
        rewrite(path, **changes)
        load_head(path)

    offsets = head_tensors(REDUCED)["d2t"]
    load_with()
    load_with(d2t=offsets.int())
    with pytest.raises(HeadError, match=r"d2t\[6\] = 94 leads to target token 100, outside 0..99 \(1 such entries"):
        load_with(d2t=offsets.index_fill(0, torch.tensor([6]), 94))
    with pytest.raises(HeadError, match="d2t leads 10 draft tokens to only 9 different target tokens"):
        load_with(d2t=offsets.index_put((torch.tensor([1]),), offsets[0] - 1))
    with pytest.raises(HeadError, match="t2d does not mark the 10 target tokens that d2t leads to"):
        load_with(d2t=offsets + torch.arange(10))  # token ids where offsets belong, all in range here
    with pytest.raises(HeadError, match="t2d does not mark the 10 target tokens that d2t leads to, and no others"):
        load_with(t2d=head_tensors(REDUCED)["t2d"].index_fill(0, torch.tensor([0]), True))


def test_a_table_that_orders_the_whole_vocabulary_anew_is_refused(tmp_path: Path) -> None:
    """A plain head has none, so it would be lost."""
    head, ids = save_head(tmp_path / "head", CONFIG, head_tensors(CONFIG)), torch.arange(100)
    rewrite(head, d2t=0 * ids)
    load_head(head)
    rewrite(head, d2t=ids.roll(1) - ids)
    with pytest.raises(HeadError, match="d2t orders the whole vocabulary anew, .* without d2t"):
        load_head(head)


def test_a_head_is_not_written_beside_other_weights(tmp_path: Path) -> None:
    """They would be read with it."""
    head = save_head(tmp_path / "head", CONFIG, head_tensors(CONFIG))
    (head / "model.safetensors").rename(head / "model-00001-of-00001.safetensors")
    with pytest.raises(HeadError, match=r"holds other weights \(model-00001-of-00001.safetensors\), .*: name another"):
        save_head(head, *load_head(head))
    assert load_head(head)[0] == CONFIG


def test_save_refuses_what_load_would(tmp_path: Path) -> None:
    tensors = head_tensors(CONFIG)
    del tensors["fc.weight"]
    with pytest.raises(HeadError, match=r"missing fc.weight"):
        save_head(tmp_path / "head", CONFIG, tensors)
    assert not (tmp_path / "head").exists()


def test_a_full_disk_leaves_the_old_head_whole(tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", CONFIG, head_tensors(CONFIG))
    config, before = load_head(head)
    with full_disk(20_000), pytest.raises(OSError, match="model.safetensors"):
        save_head(head, config, {name: torch.zeros_like(tensor) for name, tensor in before.items()})
    assert sorted(path.name for path in head.iterdir()) == ["config.json", "model.safetensors"]
    after = load_head(head)[1]
    assert all(torch.equal(after[name], before[name]) for name in before)
