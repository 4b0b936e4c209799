"""Head directories: round trips in both forms, and every way in which one can be wrong, named in one message."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.checkpoint import build_drafter, load_head, save_head
from peagle.config import DrafterConfig, HeadError
from peagle.head_files import check_head, check_head_fits, expected_tensors, read_tensor_specs

TARGET: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
CONFIG = DrafterConfig.for_target(TARGET, num_layers=2, ptd_token_id=99, num_depths=5)
REDUCED = dataclasses.replace(CONFIG, draft_vocab_size=10)


def head_tensors(
    config: DrafterConfig, *, shipped: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random tensors of a plain head with its own tables, or of a shipped head without them."""
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(want.shape).to(dtype)
        for name, want in expected_tensors(config).items()
        if want.required and name != "d2t"
    }
    if shipped:
        tensors["mask_embedding"] = torch.randn(config.hidden_size).to(dtype)
    else:
        tensors["embed_tokens.weight"] = torch.randn(config.vocab_size, config.hidden_size).to(dtype)
        tensors["lm_head.weight"] = torch.randn(config.draft_vocab_size, config.hidden_size).to(dtype)
    tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
    if config.draft_vocab_size < config.vocab_size:
        kept = torch.arange(config.draft_vocab_size) * 9 + 4
        tensors["d2t"] = kept - torch.arange(config.draft_vocab_size)
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    return tensors


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return save_head(tmp_path / "head", CONFIG, head_tensors(CONFIG))


def rewrite(head_dir: Path, **changes: Tensor | None) -> None:
    """Replace, add or (None) remove tensors behind the checks' back; `__` in a name stands for a dot."""
    tensors = load_file(head_dir / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, head_dir / "model.safetensors")


def reconfigure(head_dir: Path, **changes: Any) -> None:
    raw = json.loads((head_dir / "config.json").read_text())
    raw.update(changes)
    (head_dir / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


@pytest.mark.parametrize("config", [CONFIG, REDUCED], ids=["full", "reduced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_plain_head_round_trip(tmp_path: Path, config: DrafterConfig, dtype: torch.dtype) -> None:
    tensors = head_tensors(config, dtype=dtype)
    path = save_head(tmp_path / "a" / "head", config, tensors)
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
    loaded_config, loaded = load_head(path)
    assert loaded_config == config
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


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


def test_plain_and_shipped_form_make_the_same_drafter(tmp_path: Path) -> None:
    plain = head_tensors(CONFIG)
    shipped = {name: tensor for name, tensor in plain.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    shipped["mask_embedding"] = plain["embed_tokens.weight"][99]
    target_table = plain["embed_tokens.weight"].clone()
    target_table[99] = 0.5  # the target's own row of the mask token, which the head must not use
    one = build_drafter(CONFIG, load_head(save_head(tmp_path / "plain", CONFIG, plain))[1])
    two = build_drafter(
        CONFIG,
        load_head(save_head(tmp_path / "shipped", CONFIG, shipped))[1],
        embed_VH=target_table,
        lm_head_VH=plain["lm_head.weight"],
    )
    ids = torch.arange(100)
    assert torch.equal(one.embed(ids), two.embed(ids))
    for name, parameter in one.trainable().items():
        assert torch.equal(parameter, two.trainable()[name]), name


def test_reduced_vocabulary_maps_to_target_tokens(tmp_path: Path) -> None:
    config, loaded = load_head(save_head(tmp_path / "head", REDUCED, head_tensors(REDUCED)))
    assert build_drafter(config, loaded).get_buffer("target_ids").tolist() == [4 + 9 * index for index in range(10)]


def test_other_spellings_that_vllm_accepts(head: Path) -> None:
    reference = load_head(head)[1]
    tensors = load_file(head / "model.safetensors")
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    renamed["mask_hidden"] = tensors["mask_hidden"].view(1, -1)
    save_file(renamed, head / "model.safetensors")
    loaded = load_head(head)[1]
    assert loaded.keys() == reference.keys()
    assert all(torch.equal(loaded[name], reference[name]) for name in reference)


def test_eagle3_head_without_mask_tensors(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, ptd_token_id=None, num_depths=1)
    tensors = {name: tensor for name, tensor in head_tensors(CONFIG).items() if name != "mask_hidden"}
    path = save_head(tmp_path / "head", config, tensors)
    assert load_head(path)[0] == config
    rewrite(path, mask_hidden=torch.zeros(1, 1, 96))
    with pytest.raises(HeadError, match="spare mask_hidden"):
        load_head(path)


def test_attention_bias_and_fc_norm_heads_load_strictly(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, attention_bias=True, fc_norm=True)
    tensors = head_tensors(config)
    assert "layers.1.self_attn.o_proj.bias" in tensors
    assert "fc_norm.2.weight" in tensors
    drafter = build_drafter(config, load_head(save_head(tmp_path / "head", config, tensors))[1])
    assert torch.equal(drafter.trainable()["fc_norm.2.weight"], tensors["fc_norm.2.weight"])


def test_every_wrong_tensor_is_named_in_one_message(head: Path) -> None:
    rewrite(
        head,
        fc__weight=None,
        layers__1__mlp__up_proj__weight=None,
        norm__weight=torch.zeros(31),
        mask_hidden=torch.zeros(1, 1, 64),
        lm_head__weight=torch.zeros(100, 32, dtype=torch.int32),
        layers__2__mlp__up_proj__weight=torch.zeros(48, 32),
        extra=torch.zeros(3),
    )
    with pytest.raises(HeadError) as caught:
        load_head(head)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"head {head} does not match")
    assert sorted(line.strip() for line in lines[1:]) == sorted(
        [
            "missing fc.weight: expected F32/F16/BF16 [32, 96]",
            "missing layers.1.mlp.up_proj.weight: expected F32/F16/BF16 [48, 32]",
            "wrong norm.weight: found F32 [31], expected F32/F16/BF16 [32]",
            "wrong mask_hidden: found F32 [1, 1, 64], expected F32/F16/BF16 [96]",
            "wrong lm_head.weight: found I32 [100, 32], expected F32/F16/BF16 [100, 32]",
            "spare layers.2.mlp.up_proj.weight: found F32 [48, 32], not part of this head",
            "spare extra: found F32 [3], not part of this head",
        ]
    )


@pytest.mark.parametrize("name", sorted(expected_tensors(REDUCED)))
def test_each_required_tensor_is_missed(tmp_path: Path, name: str) -> None:
    tensors = head_tensors(REDUCED)
    path = save_head(tmp_path / "head", REDUCED, tensors)
    optional = not expected_tensors(REDUCED)[name].required
    if optional and name not in tensors:
        return
    rewrite(path, **{name: None})
    if optional:
        load_head(path)
    else:
        with pytest.raises(HeadError, match=f"missing {name}: expected"):
            load_head(path)


def test_mask_embedding_beside_an_own_table_is_spare(head: Path) -> None:
    rewrite(head, mask_embedding=torch.zeros(32))
    with pytest.raises(HeadError, match=r"spare mask_embedding: .* row ptd_token_id = 99"):
        load_head(head)


@pytest.mark.parametrize("keep", [0, 5, 8, 200, -1000, -1, 1])
def test_cut_file_is_named_with_its_bytes(head: Path, keep: int) -> None:
    path = head / "model.safetensors"
    whole = path.read_bytes()
    cut = whole + b"\0" if keep == 1 else whole[:keep]
    path.write_bytes(cut)
    state = "longer than its header says" if keep == 1 else "cut short"
    for check in (load_head, check_head):
        with pytest.raises(HeadError, match=rf"model.safetensors is {state}: {len(cut)} bytes"):
            check(head)


def test_files_that_are_no_heads(head: Path, tmp_path: Path) -> None:
    weights = head / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(b"<html>not found</html>" * 100)
    with pytest.raises(HeadError, match=r"is no safetensors file: 2200 bytes"):
        load_head(head)
    weights.write_bytes(good[:8] + b"x" * (len(good) - 8))
    with pytest.raises(HeadError, match="has a damaged safetensors header"):
        load_head(head)
    weights.unlink()
    with pytest.raises(HeadError, match=r"model.safetensors does not exist \(the directory holds: \['config.json'\]\)"):
        load_head(head)
    with pytest.raises(HeadError, match=r"no head at .*nowhere: .*config.json does not exist"):
        load_head(tmp_path / "nowhere")


def test_one_tensor_in_two_files_is_refused(head: Path) -> None:
    save_file({"norm.weight": torch.zeros(32)}, head / "more.safetensors")
    with pytest.raises(HeadError, match=r"norm.weight is stored twice"):
        load_head(head)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ..., "vocab_size": ...}, "missing hidden_size, vocab_size"),
        ({"hidden_size": "32"}, "hidden_size = '32' must be a whole number of at least 1"),
        (
            {"num_hidden_layers": 0, "num_depths": 1.5},
            "num_hidden_layers = 0 .*; num_depths = 1.5 must be a whole number",
        ),
        ({"ptd_token_id": -1}, "ptd_token_id = -1 must be a whole number of at least 0"),
        ({"ptd_token_id": 100}, r"ptd_token_id = 100 must be in 0..99"),
        ({"draft_vocab_size": 101}, r"draft_vocab_size = 101 must be in 1..vocab_size = 100"),
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures = \['LlamaForCausalLM'\], expected"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"norm_before_fc": True}, "norm_before_fc = True is not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "only the default RoPE is supported"),
    ],
)
def test_wrong_configuration_is_named(head: Path, changes: dict[str, Any], message: str) -> None:
    reconfigure(head, **changes)
    with pytest.raises(HeadError, match=message):
        load_head(head)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not valid JSON"), ("[]", "must hold a JSON object, found a list")]
)
def test_config_that_is_no_object(head: Path, text: str, message: str) -> None:
    (head / "config.json").write_text(text)
    with pytest.raises(HeadError, match=message):
        load_head(head)


def test_vocabulary_tables_must_agree(tmp_path: Path) -> None:
    def load_with(**changes: Tensor) -> None:
        path = save_head(tmp_path / "head", REDUCED, head_tensors(REDUCED))
        rewrite(path, **changes)
        load_head(path)

    offsets = head_tensors(REDUCED)["d2t"]
    ids = offsets + torch.arange(10)
    load_with()
    load_with(d2t=offsets.int())
    with pytest.raises(HeadError, match=r"d2t\[6\] = 94 leads to target token 100, outside 0..99 \(1 such entries"):
        load_with(d2t=offsets.index_fill(0, torch.tensor([6]), 94))
    with pytest.raises(HeadError, match="d2t leads 10 draft tokens to only 9 different target tokens"):
        load_with(d2t=offsets.index_put((torch.tensor([1]),), offsets[0] - 1))
    with pytest.raises(HeadError, match=r"t2d does not mark \d+ of the target tokens that d2t leads to"):
        load_with(d2t=ids)  # token ids where offsets belong, all in range here
    with pytest.raises(HeadError, match="t2d marks 11 target tokens, draft_vocab_size is 10"):
        load_with(t2d=head_tensors(REDUCED)["t2d"].index_fill(0, torch.tensor([0]), True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden size: the head reads 32, the target has 64"),
        ({"vocab_size": 120}, "vocabulary: the head has 100 tokens, the target 120"),
        ({"vocab_size": 90}, r"ptd_token_id = 99 is outside the target's 0..89"),
        ({"num_hidden_layers": 4}, r"tapped layers: \[5\] of \[2, 4, 5\] are outside 0..4"),
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


def test_all_mismatches_with_a_target_are_in_one_message() -> None:
    with pytest.raises(HeadError) as caught:
        check_head_fits(CONFIG, {"hidden_size": 64, "vocab_size": 90, "num_hidden_layers": 3})
    assert len(str(caught.value).splitlines()) == 5


def test_tapped_layers_out_of_order_are_refused() -> None:
    with pytest.raises(HeadError, match="must be different and in ascending order"):
        check_head_fits(dataclasses.replace(CONFIG, aux_layer_ids=(5, 2, 4)), TARGET)
    without_ids = dataclasses.replace(CONFIG, aux_layer_ids=(-1, -1, -1))
    check_head_fits(without_ids, TARGET)
    with pytest.raises(HeadError, match="their default needs 6 target layers, the target has 4"):
        check_head_fits(without_ids, TARGET | {"num_hidden_layers": 4})


def test_narrow_drafter_needs_its_own_table(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, hidden_size=16, head_dim=8)
    tensors = head_tensors(config)
    path = save_head(tmp_path / "head", config, tensors)
    assert check_head(path, TARGET) == config
    rewrite(path, embed_tokens__weight=None)
    with pytest.raises(HeadError, match=r"has no embed_tokens.weight, so it must share the target's table"):
        check_head(path, TARGET)


def test_checks_import_no_torch(head: Path) -> None:
    code = (
        "import json, sys; from peagle.head_files import check_head; check_head(sys.argv[1], json.loads(sys.argv[2]));"
        "heavy = {'torch', 'numpy', 'safetensors', 'transformers', 'ray'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(head), json.dumps(TARGET)], check=True, cwd=Path(__file__).parents[1]
    )


def test_save_refuses_what_load_would(tmp_path: Path) -> None:
    tensors = head_tensors(CONFIG)
    del tensors["fc.weight"]
    with pytest.raises(HeadError, match=r"missing fc.weight"):
        save_head(tmp_path / "head", CONFIG, tensors)
    assert not (tmp_path / "head").exists()


def test_a_full_disk_leaves_the_old_head_whole(head: Path) -> None:
    """The process may write files of 20 kB at most, so the write fails as it does on a full disk."""
    before = {name: tensor.clone() for name, tensor in load_head(head)[1].items()}
    code = (
        "import resource, signal, sys, torch; from peagle.checkpoint import load_head, save_head\n"
        "config, tensors = load_head(sys.argv[1])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try: save_head(sys.argv[1], config, {name: torch.zeros_like(t) for name, t in tensors.items()})\n"
        "except OSError as error: print('OSError', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(head)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert "OSError" in done.stdout
    assert "model.safetensors" in done.stdout
    assert sorted(path.name for path in head.iterdir()) == ["config.json", "model.safetensors"]
    after = load_head(head)[1]
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_specs_are_read_from_the_header_alone(head: Path) -> None:
    specs = read_tensor_specs(head)
    assert str(specs["mask_hidden"]) == "F32 [1, 1, 96]"
    assert specs.keys() == load_head(head)[1].keys()
