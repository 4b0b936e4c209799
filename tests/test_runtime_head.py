"""A remote drafter's head: loading it with the target's tables, and the part that runs at the target."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from peagle.checkpoint import build_drafter, load_head, save_head
from peagle.config import HeadError
from peagle.drafter.head import Reducer, load_runtime_head, reducer_of
from peagle.heads import prepare_head, shipped_heads
from peagle.model import Drafter
from peagle.train.target import Target
from tests.head_factory import CONFIG, REDUCED, TARGET, head_tensors, random_drafter
from tests.pass_requests import SWITCHES, Requests, Step


def write_target(folder: Path, **changes: Any) -> Path:
    """A target's config.json and its two tables."""
    torch.manual_seed(1)
    folder.mkdir()
    shape = (TARGET["vocab_size"], TARGET["hidden_size"])
    tables = {"model.embed_tokens.weight": torch.randn(shape), "lm_head.weight": torch.randn(shape)}
    save_file(tables, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(TARGET | {"tie_word_embeddings": False} | changes))
    return folder


@pytest.mark.parametrize("config", [CONFIG, REDUCED], ids=["whole", "reduced"])
def test_a_shipped_head_takes_the_targets_tables(tmp_path: Path, config: Any) -> None:
    target_dir = write_target(tmp_path / "target")
    head_dir = save_head(tmp_path / "head", config, head_tensors(config, shipped=True))
    drafter = load_runtime_head(head_dir, target_dir, "cpu", torch.float32)

    # The same through the plain head that the engine would load.
    plain = prepare_head(head_dir, target_dir, tmp_path / "cache")
    stored, tensors = load_head(plain)
    tables = {name: tensor for name, tensor in load_tables(target_dir).items() if name not in tensors}
    expected = build_drafter(stored, tensors, embed_VH=None, lm_head_VH=tables.get("lm_head.weight"))
    assert drafter.lm_head is not None
    assert expected.lm_head is not None
    assert torch.equal(drafter.lm_head.weight, expected.lm_head.weight)
    assert torch.equal(drafter.target_ids, expected.target_ids)
    ids = torch.arange(config.vocab_size)
    assert torch.equal(drafter.embed(ids), expected.embed(ids))
    assert not any(parameter.requires_grad for parameter in drafter.parameters())


def load_tables(target_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    stored = load_file(target_dir / "model.safetensors")
    return {name.removeprefix("model."): tensor for name, tensor in stored.items()}


def test_a_head_for_another_target_is_refused(tmp_path: Path) -> None:
    target_dir = write_target(tmp_path / "target", vocab_size=101)
    head_dir = save_head(tmp_path / "head", CONFIG, head_tensors(CONFIG, shipped=True))
    with pytest.raises(HeadError, match="vocabulary: the head has 100 tokens, the target 101"):
        load_runtime_head(head_dir, target_dir)


def test_an_eagle3_head_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, ptd_token_id=None)
    head_dir = save_head(tmp_path / "head", config, head_tensors(config))
    with pytest.raises(HeadError, match=r"head .* has no mask token .* P-EAGLE heads only"):
        load_runtime_head(head_dir, write_target(tmp_path / "target"))


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_reducer_travels_and_equals_the_drafter(name: str, dtype: torch.dtype) -> None:
    drafter = random_drafter(SWITCHES[name]).to(dtype)
    data = reducer_of(drafter).to_bytes()
    reducer = Reducer.from_bytes(data)
    aux_RX = torch.randn(5, drafter.config.fc_input_size, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(reducer.reduce(aux_RX), drafter.reduce(aux_RX), rtol=1e-2, atol=1e-2)
    if dtype == torch.float64:
        torch.testing.assert_close(reducer.reduce(aux_RX), drafter.reduce(aux_RX).detach(), rtol=1e-12, atol=1e-12)
    assert (reducer.dtype, reducer.hidden_size, reducer.input_size) == (dtype, 32, 96)
    assert len(data) < reducer.fc_HX.nbytes + 4096, "more than fc and its norms travels"


def test_the_reducer_takes_other_types_and_moves() -> None:
    reducer = reducer_of(random_drafter(SWITCHES["norms"])).to("cpu", torch.float32)
    aux_RX = torch.randn(3, reducer.input_size)
    assert reducer.reduce(aux_RX.bfloat16()).dtype == torch.float32
    assert reducer.fc_norm_CS is not None
    assert reducer.fc_norm_CS.dtype == torch.float32


def image(about: dict[str, Any] | None = None, **tensors: torch.Tensor) -> bytes:
    description = {"version": 1, "eps": 1e-5, "dtype": "float32"} | (about or {})
    return save(tensors, metadata={"reducer": json.dumps(description)})


FC = torch.randn(4, 12)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are no reducer"),
        (b"GET / HTTP/1.1\r\n\r\n", "18 bytes are no reducer: they are cut short or of something else"),
        (image(fc=FC)[:-8], "cannot be read"),
        (image(fc=FC)[:60], "cut short"),
        (save({"fc": FC}), "no description in their header"),
        (image({"version": 2}, fc=FC), "a reducer of version 2, this side knows 1: run the same release"),
        (image({"eps": "a"}, fc=FC), "eps = 'a' must be a number between 0 and 1"),
        (image({"dtype": "bfloat16"}, fc=FC), r"a reducer of type 'bfloat16' holds tensors of \['float32'\]"),
        (image(input_norm=FC), "holds no tensor fc"),
        (image(fc=FC, lm_head=FC.clone()), r"unknown tensors \['lm_head'\]"),
        (image(fc=FC[0].clone()), r"fc_HX has shape \[12\]"),
        (image(fc=FC, input_norm=FC[0, :11].clone()), r"input_norm_X has shape \[11\], not \[12\]"),
        (image(fc=FC, fc_norm=FC.clone()), r"fc_norm_CS has shape \[4, 12\], not \[C, S\] with C \* S = 12"),
    ],
)
def test_a_damaged_reducer_is_named(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reducer.from_bytes(data)


@pytest.fixture(scope="module")
def shipped(target_dir: Path) -> Drafter:
    return load_runtime_head(shipped_heads()["smollm2-135m-instruct"], target_dir, "cpu", torch.float32)


@pytest.mark.timeout(300)
def test_the_shipped_head_drafts_as_its_session(shipped: Drafter, target_dir: Path) -> None:
    """Two requests with the small model's own hidden states; the pass's drafts are the session's."""
    target = Target(target_dir)
    requests = Requests(shipped, 2)
    with torch.no_grad():
        tokens_BN = requests.tokens + 1000
        positions_BN = torch.arange(tokens_BN.shape[1]).expand(2, -1)
        requests.aux, _ = target.states(
            tokens_BN, torch.zeros_like(tokens_BN), positions_BN, shipped.config.aux_layer_ids
        )
    requests.tokens = torch.cat([tokens_BN[:, 1:], tokens_BN[:, :1]], dim=1)
    parallel_pass = requests.new_pass()
    for steps in ([Step(0, 0, 30, 5), Step(1, 0, 11, 0)], [Step(0, 30, 2, 3), Step(1, 11, 4, 5)], [Step(0, 31, 1, 5)]):
        assert parallel_pass.run(requests.batch(steps)).tolist() == [requests.expected(step) for step in steps]
