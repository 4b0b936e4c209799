"""The target of any architecture: packed documents are read as if each stood alone, what cannot be is refused."""

import importlib.util
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from peagle.config import UNNAMED_LAYERS, read_target_config
from peagle.train.plan import spread
from peagle.train.target import Target

SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=8, head_dim=8)
SHAPE = SIZES | dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, pad_token_id=0)
KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"] * 2
WINDOWS = dict(sliding_window=6, layer_types=KINDS)
SETTINGS = {
    "llama": {},
    "mistral": dict(sliding_window=6),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": {},
    "gemma3_text": WINDOWS | dict(query_pre_attn_scalar=8),
    "gpt_oss": WINDOWS | dict(num_local_experts=4, num_experts_per_tok=2),
}
LENGTHS = (13, 3, 16)
TAPS = (1, 4, 7)


def saved(folder, kind, **settings):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **settings)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=SETTINGS)
def target(request, tmp_path_factory) -> Target:
    return Target(saved(tmp_path_factory.mktemp(request.param), request.param, **SETTINGS[request.param]))


def test_packed_documents_are_read_as_if_alone(target: Target) -> None:
    """Alone, the architecture builds its own masks: windows (6 tokens, shorter than the documents) included."""
    tokens_1N = torch.randint(1, 96, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    position_1N = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    aux, last = target.states(tokens_1N, position_1N, TAPS)
    start = 0
    for length in LENGTHS:
        here = slice(start, start + length)
        with torch.no_grad():
            alone = target.model(input_ids=tokens_1N[:, here], output_hidden_states=True, use_cache=False)
        expected = torch.cat([alone.hidden_states[layer] for layer in TAPS], dim=-1)
        torch.testing.assert_close(aux[:, here], expected, rtol=1e-3, atol=1e-3)
        logits = last[:, here] @ target.lm_head_VS.T
        torch.testing.assert_close(logits, alone.logits, rtol=1e-3, atol=1e-3 * float(alone.logits.abs().max()))
        start += length


def test_layer_that_the_target_lacks(target: Target) -> None:
    tokens = torch.ones(1, 4, dtype=torch.long)
    for taps in ((2, 4, 8), (-1,)):
        with pytest.raises(ValueError, match=r"must be in 0..7, inputs of the target's layers .* reads 8, the end"):
            target.states(tokens, tokens.cumsum(1) - 1, taps)
    unnamed, default = (target.states(tokens, tokens.cumsum(1) - 1, taps)[0] for taps in (UNNAMED_LAYERS, (2, 4, 5)))
    assert torch.equal(unnamed, default)


def test_capped_logits_are_refused(tmp_path) -> None:
    """Gemma 2 caps its logits: softened targets made without the cap would be others."""
    folder = saved(tmp_path, "gemma2", **WINDOWS, query_pre_attn_scalar=8, final_logit_softcapping=1.0)
    with pytest.raises(ValueError, match="it caps, scales or biases them"):
        Target(folder)


def test_unusual_shapes_are_named(tmp_path) -> None:
    def read(raw):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return read_target_config(tmp_path)

    plain = AutoConfig.for_model("llama", **SHAPE).to_dict()
    assert read({"model_type": "wrapper", "text_config": plain})["num_hidden_layers"] == 8
    with pytest.raises(ValueError, match=r"config.json: intermediate_size = \[64, 64\]: a target needs whole numbers"):
        read(plain | {"intermediate_size": [64, 64]})
    with pytest.raises(ValueError, match="num_hidden_layers = 0 under text_config"):
        read({"text_config": plain | {"num_hidden_layers": 0}})
    with pytest.raises(ValueError, match="hidden_size = None"):
        read({"d_model": 512})


def test_layers_go_over_gpus_within_the_bytes_given_and_never_onto_the_host(tmp_path, monkeypatch) -> None:
    """Without GPUs: transformers is asked for the spread, and where it put a layer on the host is refused."""
    load, asked, places = AutoModelForCausalLM.from_pretrained, [], [0, 1]

    def from_pretrained(folder, *, device_map, max_memory, **settings):
        asked.append((device_map, max_memory))
        model = load(folder, **settings)
        model.hf_device_map = dict(enumerate(places))
        return model

    saved(tmp_path, "llama")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    spread = Target(tmp_path, gpu_bytes={0: 5, 1: 9})
    assert asked == [("auto", {0: 5, 1: 9})]
    tokens_1N = torch.arange(1, 9)[None]
    aux, last = spread.states(tokens_1N, tokens_1N - 1, TAPS)
    assert (aux.shape, last.shape) == ((1, 8, 96), (1, 8, 32))
    places.append("disk")
    with pytest.raises(ValueError, match="its layers do not fit on the GPUs"):
        Target(tmp_path, gpu_bytes={0: 5, 1: 9})


# ---- where its layers go when they do not fit beside the drafter on one GPU


GB = 10**9


@pytest.mark.parametrize(
    ("free", "others", "expected"),
    [
        ((80, 80), 10, {0: 63, 1: 72}),
        ((80, 40, 20), 30, {0: 45, 1: 36, 2: 18}),
        ((80, 80), 90, {0: 0, 1: 72}),
        ((80,), 10, None),
        ((), 10, None),
    ],
)
def test_a_target_is_spread_with_room_for_the_others_on_the_first_gpu(free, others, expected, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index] * GB, 80 * GB))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    found = spread(others * GB)
    assert found == (None if expected is None else {index: size * GB for index, size in expected.items()})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert spread(others * GB) is None
