"""The shapes that `benchmarks.check_models` starts are those of vLLM's classes, and their heads fit them."""

from pathlib import Path

import pytest
import yaml
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.system_utils import get_mp_context

from benchmarks import models
from peagle.checkpoint import check_head

ARCHITECTURES = {
    "GPT_OSS_120B": "GptOssForCausalLM",
    "GPT_OSS_20B": "GptOssForCausalLM",
    "QWEN3_CODER_30B_FP8": "Qwen3MoeForCausalLM",
    "GEMMA_4_31B": "Gemma4ForCausalLM",
}
TINY = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 512}


@pytest.mark.parametrize("name", models.PUBLISHED_HEADS)
def test_a_published_shape_is_one_of_vllms_and_its_head_fits(tmp_path: Path, name: str) -> None:
    shape = dict(getattr(models, name))
    num_layers = shape["num_hidden_layers"]
    assert len(shape.get("layer_types", [""] * num_layers)) == num_layers
    shape = models.shortened(shape, 6)
    shape.pop("quantization_config", None)  # no CPU has them
    target = models.write_target(tmp_path / "target", shape)
    config = EngineArgs(model=str(target), skip_tokenizer_init=True, max_model_len=64).create_engine_config()
    found = config.model_config
    assert (found.architecture, found.hf_text_config.num_hidden_layers) == (ARCHITECTURES[name], 6)
    # Its size of layers and vocabulary would be gigabytes.
    head = {**models.PUBLISHED_HEADS[name], "num_layers": 1, "mlp_size": 64, "draft_vocab_size": 512}
    small = models.shortened({**shape, **TINY}, 2)
    assert check_head(models.write_head(tmp_path / "head", target=small, **head), small).num_depths >= 7


def test_configs_draft_as_deep_as_the_heads_were_trained() -> None:
    files = {"GPT_OSS_120B": "gpt-oss-120b", "GPT_OSS_20B": "gpt-oss-20b", "QWEN3_CODER_30B_FP8": "gpu"}
    for name, file in {**files, "GEMMA_4_31B": "gemma-4-31b"}.items():
        text = (Path(__file__).parents[3] / "configs" / f"{file}.yaml").read_text()
        drafter = yaml.safe_load(text)["applications"][0]["args"]["drafter"]
        assert drafter["max_draft_tokens"] == models.PUBLISHED_HEADS[name]["num_depths"]


def test_engines_are_spawned_where_heads_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own answer: another name of the variable would do nothing."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    models.spawn_engines()
    assert get_mp_context().get_start_method() == "spawn"
