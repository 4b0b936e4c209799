"""A head in every published layout becomes the same drafter here and in vLLM: same logits for the same rows.

vLLM's own code reads the target and the head as `prepare_head` leaves it, on the CPU in float32, and shares the tables
that the head lacks. Its network then runs on a few rows, with torch's attention in place of its paged one (which
`test_draft_engine.py` compares in an engine); the other side is `peagle.model` with the head as it was published.
"""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (
    get_eagle3_aux_layers_from_config,
    set_eagle3_aux_hidden_state_layers,
)
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

from benchmarks import models
from peagle.checkpoint import build_drafter, load_head, save_head
from peagle.config import UNNAMED_LAYERS, DrafterConfig, Llama3Rope, YarnRope, is_read_alike_by_vllm, read_json
from peagle.heads import prepare_head, target_table
from peagle.train.cod import attend_under
from peagle.vllm import compat
from tests.support.head_factory import CONFIG, REDUCED, TARGET, head_tensors, reconfigure, rewrite

SPECULATORS = Path(__file__).parents[2] / "data" / "speculators"
SMALL = {**TARGET, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 64}
"""The target of the checkpoints that the speculators package wrote."""
NUM_ROWS = 12
TOLERANCE = 2e-4
"""Of logits around 10, in float32 and another order of operations."""


def head(folder: Path, config: DrafterConfig, *, shipped: bool = False, **in_config: Any) -> Path:
    """A plain or shipped head with changes in its `config.json`."""
    save_head(folder, config, head_tensors(config, shipped=shipped))
    reconfigure(folder, **in_config)
    return folder


def renamed(folder: Path, rename: Callable[[str], str], **more: Tensor) -> Path:
    tensors = load_file(folder / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()} | more, folder / "model.safetensors")
    return folder


def as_amazon(folder: Path) -> Path:
    """The keys of the published P-EAGLE heads that are known: nothing on taps or depths, RoPE in the old spelling."""
    rope = Llama3Rope(8.0, 1.0, 4.0, 64)
    config = dataclasses.replace(CONFIG, rope_scaling=rope, aux_layer_ids=UNNAMED_LAYERS)
    head(folder, config, eagle_config=..., rope_parameters=..., num_depths=..., torch_dtype="bfloat16")
    reconfigure(folder, rope_scaling=dataclasses.asdict(rope) | {"rope_type": "llama3"})
    tables = {"d2t": torch.zeros(100, dtype=torch.int64), "t2d": torch.ones(100, dtype=torch.bool)}
    return renamed(folder, lambda name: name.replace("layers.0.", "midlayer."), **tables)


def as_automodel(folder: Path) -> Path:
    """NeMo AutoModel's: its own class, the mask token under another name, `model.` before the names of tensors."""
    return prefixed(head(folder, CONFIG, architectures=["LlamaEagle3DraftModel"], ptd_token_id=..., mask_token_id=99))


def prefixed(folder: Path) -> Path:
    return renamed(folder, lambda name: f"model.{name}" if name.split(".")[0] in ("layers", "fc", "norm") else name)


def with_target_tensors(folder: Path) -> Path:
    shutil.copytree(SPECULATORS / "peagle", folder)
    rewrite(folder, verifier_norm__weight=torch.ones(16), verifier_lm_head__weight=torch.ones(24, 16))
    return folder


QWEN = dataclasses.replace(CONFIG, qk_norm=True, norm_before_fc=True, attention_bias=True, num_hidden_layers=3)
SWITCHES = dataclasses.replace(CONFIG, norm_before_residual=True, norm_output=True, fc_norm=True, attention_bias=True)
NARROW = dataclasses.replace(CONFIG, hidden_size=16, head_dim=8)
FIVE_TAPS = dataclasses.replace(CONFIG, aux_layer_ids=(0, 2, 4, 6, 7))
YARN = dataclasses.replace(CONFIG, rope_scaling=YarnRope(32.0, 16, truncate=False), rope_theta=150000.0)
AT_TOP: dict[str, Any] = {"eagle_config": {"use_aux_hidden_state": True}}
INSIDE: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": ...}
EAGLE_3 = dataclasses.replace(CONFIG, ptd_token_id=None, aux_layer_ids=(1, 3, 6))

LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "ours": lambda folder: head(folder, CONFIG),
    "ours, shipped with a reduced vocabulary": lambda folder: head(folder, REDUCED, shipped=True),
    "a reduced vocabulary": lambda folder: head(folder, REDUCED),
    "amazon": as_amazon,
    "yarn": lambda folder: head(folder, YARN),
    "pard_token": lambda folder: head(folder, CONFIG, ptd_token_id=..., pard_token=99),
    "every switch": lambda folder: head(folder, SWITCHES),
    "a narrow drafter": lambda folder: head(folder, NARROW),
    "five taps at the top": lambda folder: head(folder, FIVE_TAPS, **AT_TOP),
    "taps in eagle_config": lambda folder: head(folder, FIVE_TAPS, **INSIDE),
    "qwen3": lambda folder: head(folder, QWEN),
    "qwen3 by speculators' name": lambda folder: head(folder, QWEN, architectures=["PeagleQwen3ForCausalLM"]),
    "llama by speculators' name": lambda folder: head(folder, CONFIG, architectures=["PeagleLlamaForCausalLM"]),
    "target_hidden_size null": lambda folder: head(folder, CONFIG, target_hidden_size=None),
    "automodel": as_automodel,
    "automodel's names under vLLM's class": lambda folder: prefixed(head(folder, CONFIG)),
    "eagle3": lambda folder: head(folder, EAGLE_3),
    "eagle3, qwen3 with taps in eagle_config": lambda folder: head(
        folder, dataclasses.replace(EAGLE_3, qk_norm=True), **INSIDE
    ),
    "speculators, peagle": with_target_tensors,
    "speculators, eagle3": lambda folder: Path(shutil.copytree(SPECULATORS / "eagle3", folder)),
}


@pytest.fixture(scope="module", autouse=True)
def _vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's process groups of one rank, and a loader that empties no accelerator's cache, as in vLLM's CPU worker."""
    init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('vllm')}/init", 0, backend="gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        yield
    destroy_distributed_environment()


@pytest.fixture(autouse=True)
def _groups_of_one_model() -> Iterator[None]:
    """Those of experts are made for a model that has some."""
    yield
    destroy_model_parallel()


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Small Llama checkpoints by the size of their vocabulary."""
    found = {shape["vocab_size"]: tmp_path_factory.mktemp("target") for shape in (TARGET, SMALL)}
    for shape in (TARGET, SMALL):
        torch.manual_seed(0)
        config = LlamaConfig(**shape, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False)
        LlamaForCausalLM(config).save_pretrained(found[shape["vocab_size"]])
    return found


class PlainAttention(nn.Module):
    """Stands where vLLM's layer has its paged attention, for the rows of one sequence."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.shapes = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
        self.scale = attention.impl.scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (
            rows.unflatten(-1, (count, -1)).transpose(0, 1)
            for rows, count in zip((query, key, value), self.shapes, strict=True)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)


def config_of(target: Path, head_dir: Path, is_parallel: bool, **settings: Any) -> VllmConfig:
    speculative: dict[str, Any] = {"method": "eagle3", "model": str(head_dir), "num_speculative_tokens": 3}
    speculative |= {"draft_load_config": {"load_format": "safetensors"}, "parallel_drafting": is_parallel}
    settings |= {"dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64}
    return EngineArgs(model=str(target), speculative_config=speculative, **settings).create_engine_config()


@torch.no_grad()
def logits_of_vllm(config: VllmConfig, tokens: Tensor, aux: Tensor, mask_rows: Tensor) -> tuple[Tensor, Any]:
    """Logits [rows, target's vocabulary] of vLLM's network, and the network."""
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(1, 1)
        network: Any = load_eagle_model(get_model(vllm_config=config), config)
    hidden = network.combine_hidden_states(aux)
    if mask_rows.any():
        hidden[mask_rows] = network.combine_hidden_states(network.mask_hidden)
    for layer in network.model.layers:
        layer.self_attn.attn = PlainAttention(layer.self_attn.attn)
    normed, _ = network(tokens, torch.arange(len(tokens)), hidden)
    return network.compute_logits(normed), network


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_is_the_same_drafter_here_and_in_vllm(tmp_path: Path, targets: dict[int, Path], layout: str) -> None:
    folder = LAYOUTS[layout](tmp_path / "published")
    config, tensors = load_head(folder)
    target = targets[config.vocab_size]
    prepared = prepare_head(folder, target, tmp_path / "cache")
    assert is_read_alike_by_vllm(read_json(prepared / "config.json"))
    is_parallel = config.is_parallel
    vllm_config = config_of(target, prepared, is_parallel)
    torch.manual_seed(1)
    tokens, aux = torch.randint(0, config.vocab_size - 2, (NUM_ROWS,)), torch.randn(NUM_ROWS, config.fc_input_size)
    mask_rows = (torch.arange(NUM_ROWS) > 8) & is_parallel
    tokens[mask_rows] = config.ptd_token_id or 0
    found, network = logits_of_vllm(vllm_config, tokens, aux, mask_rows)

    embed_VH, lm_head_VH = (target_table(target, f"{name}.weight") for name in ("embed_tokens", "lm_head"))
    drafter = build_drafter(config, tensors, embed_VH=embed_VH, lm_head_VH=lm_head_VH)
    with torch.no_grad():
        hidden = drafter.project_inputs(aux)
        if is_parallel:
            hidden[mask_rows] = drafter.project_inputs(drafter.mask_hidden[0])
        attend = attend_under(torch.ones(1, NUM_ROWS, NUM_ROWS, dtype=torch.bool).tril())
        normed, _ = drafter(drafter.embed(tokens)[None], hidden[None], torch.arange(NUM_ROWS)[None], attend)
        ours = torch.full((NUM_ROWS, config.vocab_size), -torch.inf)
        ours[:, drafter.target_ids] = drafter.logits(normed)[0]
    torch.testing.assert_close(found, ours, rtol=TOLERANCE, atol=TOLERANCE)
    assert float(ours.max(1).values.std()) > 100 * TOLERANCE  # rows differ, so they could be wrong

    compat.name_aux_layers(vllm_config)
    speculative = vllm_config.speculative_config
    assert speculative is not None
    taps = get_eagle3_aux_layers_from_config(speculative)  # of vLLM's V2 runner
    assert taps == (None if config.aux_layer_ids == UNNAMED_LAYERS else config.aux_layer_ids)
    if is_parallel:
        assert get_parallel_drafting_token_id(network.config) == config.ptd_token_id


SMALL_SIZES = {
    "hidden_size": 128, "intermediate_size": 128, "vocab_size": 512, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4,
    "moe_intermediate_size": 64, "global_head_dim": 64, "num_global_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", models.PUBLISHED_HEADS)
def test_the_published_targets_hand_a_head_their_taps_and_tables(tmp_path: Path, name: str) -> None:
    """Each is a class of its own in vLLM, with its own name for the embeddings."""
    shape = {**getattr(models, name), "num_hidden_layers": 8}
    if "layer_types" in shape:
        shape["layer_types"] = shape["layer_types"][:8]
    shape = {key: SMALL_SIZES.get(key, value) for key, value in shape.items() if key != "quantization_config"}
    target = models.write_target(tmp_path / "target", shape)
    sizes = {**models.PUBLISHED_HEADS[name], "mlp_size": 128, "draft_vocab_size": 512, "num_layers": 1}
    head_dir = models.write_head(tmp_path / "head", target=shape, **sizes)
    config = config_of(target, head_dir, True, load_format="dummy")
    assert config.speculative_config is not None
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(1, 1)
        network: Any = get_model(vllm_config=config)
        set_eagle3_aux_hidden_state_layers(network, config.speculative_config)
        drafter: Any = load_eagle_model(network, config)
    assert network.model.aux_hidden_state_layers == (2, 4, 5)
    embeddings = getattr(network.model, "embed_tokens", None) or network.model.embedding
    assert drafter.model.embed_tokens is embeddings
    assert drafter.lm_head is network.lm_head


def test_stock_vllm_cannot_read_what_is_written_anew(tmp_path: Path, targets: dict[int, Path]) -> None:
    """Otherwise the copy in the cache would be for nothing."""
    for name in ("llama by speculators' name", "automodel", "ours, shipped with a reduced vocabulary"):
        folder = LAYOUTS[name](tmp_path / name)
        with pytest.raises(ValueError, match="architecture"):
            config_of(targets[100], folder, True)
