"""Settings of an engine with a remote drafter: what vLLM is given, and what is refused."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peagle.vllm.engine import (
    ASYNC_SCHEDULER,
    REMOTE_CPU_WORKER,
    REMOTE_GPU_WORKER,
    REMOTE_KEY,
    RemoteSettings,
    engine_kwargs,
)
from peagle.vllm.remote import check_config
from tests.support.head_factory import CONFIG


@pytest.fixture
def head(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    return tmp_path


def test_on_a_cpu(head: Path) -> None:
    remote = RemoteSettings(min_deadline_s=0.1, max_deadline_s=2.0)
    kwargs = engine_kwargs("/target", head, on_cpu=True, remote=remote)
    colocated = engine_kwargs("/target", head, on_cpu=True)
    assert kwargs["worker_cls"] == REMOTE_CPU_WORKER
    assert {key: value for key, value in kwargs.items() if colocated.get(key) != value} == {
        "worker_cls": REMOTE_CPU_WORKER,
        "additional_config": kwargs["additional_config"],
    }
    about = kwargs["additional_config"][REMOTE_KEY]
    assert (about["hidden_size"], about["aux_layer_ids"]) == (CONFIG.hidden_size, list(CONFIG.aux_layer_ids))
    assert kwargs["additional_config"][REMOTE_KEY].items() >= dataclasses.asdict(remote).items()


def test_on_a_gpu(head: Path) -> None:
    extra = {"additional_config": {"other": 1}}
    kwargs = engine_kwargs("/target", head, on_cpu=False, remote=RemoteSettings(), extra=extra)
    assert (kwargs["worker_cls"], kwargs["scheduler_cls"]) == (REMOTE_GPU_WORKER, ASYNC_SCHEDULER)
    assert kwargs["additional_config"].keys() == {"other", REMOTE_KEY}


def test_an_eagle3_head_is_refused(head: Path) -> None:
    (head / "config.json").write_text(json.dumps(CONFIG.to_dict() | {"ptd_token_id": None}))
    with pytest.raises(ValueError, match="is an EAGLE-3 head: a remote drafter runs P-EAGLE heads"):
        engine_kwargs("/t", head, on_cpu=True, remote=RemoteSettings())


def config(**changes: Any) -> Any:
    model = {"enable_prompt_embeds": False, "is_multimodal_model": False, "multimodal_config": None, **changes}
    return SimpleNamespace(
        speculative_config=SimpleNamespace(disable_padded_drafter_batch=False), model_config=SimpleNamespace(**model)
    )


def test_engines_that_a_remote_drafter_cannot_serve() -> None:
    check_config(config())
    media, text = (SimpleNamespace(language_model_only=text_only) for text_only in (False, True))
    with pytest.raises(ValueError, match=r"does not go with enable_prompt_embeds, images .*language_model_only: true"):
        check_config(config(enable_prompt_embeds=True, is_multimodal_model=True, multimodal_config=media))
    check_config(config(is_multimodal_model=True, multimodal_config=text))
