"""Engine settings, acceptance counts and version checks of `peagle.vllm`, without an engine."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from cluster.counts import WorkloadCounts
from peagle.config import DrafterConfig
from peagle.model import Rotary
from peagle.vllm import compat
from peagle.vllm.engine_settings import (
    ASYNC_SCHEDULER,
    CPU_WORKER,
    REMOTE_CPU_WORKER,
    REMOTE_GPU_WORKER,
    REMOTE_KEY,
    SYNC_SCHEDULER,
    V2_WORKER,
    capture_sizes,
    engine_kwargs,
)
from peagle.vllm.recorder import DraftingRecorder, RecorderDelta, RequestDrafting
from peagle.vllm.remote import check_config
from peagle.vllm.request_args import LEARN_KEY, WORKLOAD_KEY
from peagle.vllm.step_notes import STEPS_HEADER, VerifiedStep, steps_text
from tests.support.counted import counts_of
from tests.support.head_factory import CONFIG


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write_head(tmp_path)


def write_head(folder: Path, **changes: Any) -> Path:
    config = CONFIG.to_dict() | {"ptd_token_id": 3, "num_depths": 7} | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def test_engine_kwargs(head: Path) -> None:
    kwargs = engine_kwargs("/target", head, max_draft_tokens=5, dtype="float32", on_cpu=True, extra={"seed": 1})
    assert kwargs == {
        "model": "/target",
        "dtype": "float32",
        "seed": 1,
        "async_scheduling": False,
        "scheduler_cls": SYNC_SCHEDULER,
        "worker_cls": CPU_WORKER,
        "speculative_config": {
            "method": "eagle3",
            "model": str(head),
            "num_speculative_tokens": 5,
            "parallel_drafting": True,
        },
    }


def test_engine_kwargs_of_drafters_that_only_vllm_knows() -> None:
    kwargs = engine_kwargs("/target", "/drafter", method="dspark", max_draft_tokens=5, on_cpu=False)
    assert kwargs["speculative_config"] == {"method": "dspark", "model": "/drafter", "num_speculative_tokens": 5}
    assert kwargs["worker_cls"] == V2_WORKER
    assert kwargs["cudagraph_capture_sizes"] == capture_sizes(4096)
    for on_cpu, method in ((True, "ngram"), (False, "ngram_gpu")):
        kwargs = engine_kwargs("/target", None, method="ngram", max_draft_tokens=5, on_cpu=on_cpu)
        assert kwargs["speculative_config"] == {"method": method, "num_speculative_tokens": 5}


def test_engine_kwargs_on_a_gpu(head: Path) -> None:
    kwargs = engine_kwargs(None, head, on_cpu=False)
    assert kwargs["scheduler_cls"] == ASYNC_SCHEDULER
    assert kwargs["speculative_config"]["num_speculative_tokens"] == 7
    assert kwargs["worker_cls"] == V2_WORKER
    assert "model" not in kwargs
    # Without max_num_seqs the largest graphs there may be; with it a full batch of 1 + K_max rows, and half as much or
    # 512.
    assert kwargs["cudagraph_capture_sizes"] == capture_sizes(4096)
    some = engine_kwargs(None, head, on_cpu=False, extra={"max_num_seqs": 64})
    assert some["cudagraph_capture_sizes"][-3:] == [640, 704, 768]
    few = engine_kwargs(None, head, on_cpu=False, extra={"max_num_seqs": 8})
    assert few["cudagraph_capture_sizes"] == [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 513, 32)]
    own = {"compilation_config": {"cudagraph_capture_sizes": [1, 2]}}
    assert "cudagraph_capture_sizes" not in engine_kwargs(None, head, on_cpu=False, extra=own)


def test_an_engine_with_a_remote_drafter_has_another_worker_which_knows_the_head(head: Path) -> None:
    kwargs = engine_kwargs("/target", head, on_cpu=True, remote_deadline_s=2.0)
    about = kwargs["additional_config"][REMOTE_KEY]
    assert kwargs == engine_kwargs("/target", head, on_cpu=True) | {
        "worker_cls": REMOTE_CPU_WORKER,
        "additional_config": {REMOTE_KEY: about},
    }
    layers = list(CONFIG.aux_layer_ids)
    assert about == {"hidden_size": CONFIG.hidden_size, "aux_layer_ids": layers, "max_deadline_s": 2.0}
    extra = {"additional_config": {"other": 1}}
    kwargs = engine_kwargs("/target", head, on_cpu=False, remote_deadline_s=2.0, extra=extra)
    assert (kwargs["worker_cls"], kwargs["scheduler_cls"]) == (REMOTE_GPU_WORKER, ASYNC_SCHEDULER)
    assert kwargs["additional_config"].keys() == {"other", REMOTE_KEY}


def test_a_head_without_a_mask_token_drafts_one_after_another_and_not_remotely(tmp_path: Path) -> None:
    for mask_token, parallel in (({"pard_token": 9}, True), ({}, False)):
        head = write_head(tmp_path, ptd_token_id=None, **mask_token)
        kwargs = engine_kwargs("/target", head, on_cpu=True)
        assert kwargs["speculative_config"]["parallel_drafting"] == parallel
    with pytest.raises(ValueError, match="is an EAGLE-3 head: a remote drafter runs P-EAGLE heads"):
        engine_kwargs("/target", head, on_cpu=True, remote_deadline_s=1.0)


def test_engines_that_a_remote_drafter_cannot_serve() -> None:
    def config(**changes: Any) -> Any:
        model = {"enable_prompt_embeds": False, "is_multimodal_model": False, "multimodal_config": None, **changes}
        speculative = SimpleNamespace(disable_padded_drafter_batch=False)
        return SimpleNamespace(speculative_config=speculative, model_config=SimpleNamespace(**model))

    check_config(config())
    media, text = (SimpleNamespace(language_model_only=text_only) for text_only in (False, True))
    with pytest.raises(ValueError, match=r"does not go with enable_prompt_embeds, images .*language_model_only: true"):
        check_config(config(enable_prompt_embeds=True, is_multimodal_model=True, multimodal_config=media))
    check_config(config(is_multimodal_model=True, multimodal_config=text))


LONG = {"factor": 8.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", **LONG}


@pytest.mark.parametrize(
    "given",
    [
        {"rope_type": "default"},
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG},
        YARN,
        YARN | {"attention_factor": 0.5},
        YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        YARN | {"mscale": 0.5, "mscale_all_dim": 2.0},
        YARN | {"truncate": False, "beta_fast": 16.0},
    ],
    ids=str,
)
def test_rope_is_vllm_s(given: dict[str, Any]) -> None:
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        expected = get_rope(32, 512, True, {"rope_theta": 10000.0, **given}, torch.float32).cos_sin_cache
    raw = CONFIG.to_dict() | {"head_dim": 32, "rope_parameters": {"rope_theta": 10000.0, **given}}
    rotary = Rotary(DrafterConfig.from_dict(DrafterConfig.from_dict(raw).to_dict())).bfloat16()
    cos, sin = rotary.tables(torch.arange(512)[None])
    assert torch.equal(torch.cat([cos[0, 0, :, :16], sin[0, 0, :, :16]], dim=-1), expected)


def test_wrong_arguments_are_refused(head: Path) -> None:
    for wrong in (0, 8, "5", True):
        with pytest.raises(ValueError, match=f"max_draft_tokens must be an integer from 1 to 7.*not {wrong!r}"):
            engine_kwargs("/target", head, max_draft_tokens=wrong, on_cpu=True)
    with pytest.raises(ValueError, match="does not exist"):
        engine_kwargs("/target", Path("/nowhere"), on_cpu=True)


def make_request(internal_id: str, external_id: str, **extra_args: Any) -> EngineCoreRequest:
    params = SamplingParams(extra_args=extra_args, detokenize=False)
    unused = dict.fromkeys(["mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"])
    return EngineCoreRequest(
        internal_id, [1], sampling_params=params, arrival_time=0.0, external_req_id=external_id, **unused
    )


def last_output(internal_id: str, steps: list[tuple[int, ...]]) -> EngineCoreOutput:
    """Final output of a request: three tokens, and the report of `steps`."""
    return EngineCoreOutput(
        request_id=internal_id,
        new_token_ids=[5, 6, 7],
        finish_reason=FinishReason.LENGTH,
        trace_headers={"traceparent": "00-1", STEPS_HEADER: steps_text(VerifiedStep(*step) for step in steps)},
    )


@pytest.fixture
def processor() -> OutputProcessor:
    """vLLM's own output processor, as an engine client has it."""
    return OutputProcessor(None, log_stats=False)


@pytest.fixture
def recorder(processor: OutputProcessor) -> DraftingRecorder:
    found = DraftingRecorder()
    found.attach(SimpleNamespace(output_processor=processor))
    return found


def test_prompts_of_one_completion_are_summed(processor: OutputProcessor, recorder: DraftingRecorder) -> None:
    for index in range(2):
        processor.add_request(make_request(f"cmpl-x-{index}-ab", f"cmpl-x-{index}", **{WORKLOAD_KEY: "code"}), None)
        processor.process_outputs([last_output(f"cmpl-x-{index}-ab", [(2, index)])])
    counts = counts_of([(2, 0), (2, 1)])
    processor.add_request(make_request("other", "cmpl-x-1-0", **{WORKLOAD_KEY: "code"}), None)
    processor.process_outputs([last_output("other", [(2, 0)])])
    names = "cmpl-x-0", "cmpl-x-1"
    assert recorder.pop(*names) == RequestDrafting("cmpl-x-0", "code", counts, 6, 2)
    assert recorder.pop(*names) is None
    assert recorder.pop("cmpl-x-1-0") is not None, "of a request of another name"
    assert recorder.workloads()["code"].counts == counts + counts_of([(2, 0)])


def test_accepted_drafts_behind_a_stop_string_are_neither_counted_nor_learned_from(target_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    tokens: list[int] = tokenizer(" 4, 5, 6, 7")["input_ids"]
    stop_place = next(n for n in range(len(tokens)) if "4" in tokenizer.decode(tokens[: n + 1])) + 1
    answers = []
    recorder = DraftingRecorder(on_answer=lambda *answer: answers.append(answer))
    processor = OutputProcessor(tokenizer, log_stats=False)
    recorder.attach(SimpleNamespace(output_processor=processor))
    request = make_request("a", "a")
    request.sampling_params = SamplingParams(stop=["4"], extra_args={LEARN_KEY: "web"})
    processor.add_request(request, None)
    output = last_output("a", [(7, 7)])
    output.new_token_ids, output.finish_reason = list(tokens), None
    assert processor.process_outputs([output]).reqs_to_abort == ["a"]
    processor.process_outputs([last_output("a", [(7, 7)])])  # the engine hears of the stop a step later
    assert recorder.num_output_tokens == stop_place
    assert recorder.workloads()["default"].num_output_tokens == stop_place
    assert answers == [("default", "web", [1], tokens[:stop_place])]


def test_bounds_of_the_recorder(processor: OutputProcessor) -> None:
    recorder = DraftingRecorder(max_records=2, max_workloads=2)
    recorder.attach(SimpleNamespace(output_processor=processor))
    for index in range(4):
        processor.add_request(make_request(str(index), str(index), **{WORKLOAD_KEY: f"w{index}"}), None)
        processor.process_outputs([last_output(str(index), [(1, 1)])])
    assert [recorder.pop(str(index)) is not None for index in range(4)] == [False, False, True, True]
    assert {name: one.counts.num_steps for name, one in recorder.workloads().items()} == {"w2": 1, "w3": 1}


def test_a_workload_makes_room_after_its_end_was_reported(processor: OutputProcessor) -> None:
    """Else it would run for ever for who adds up the reports."""
    recorder, total = DraftingRecorder(max_workloads=1), DraftingRecorder(max_workloads=3)
    recorder.attach(SimpleNamespace(output_processor=processor))
    processor.add_request(make_request("0", "0", **{WORKLOAD_KEY: "first"}), None)
    total.add_delta(1, recorder.take_delta())
    processor.process_outputs([last_output("0", [(1, 1)])])
    for index, workload in enumerate(("second", "third"), start=1):
        processor.add_request(make_request(str(index), str(index), **{WORKLOAD_KEY: workload}), None)
        total.add_delta(1, recorder.take_delta())
        processor.process_outputs([last_output(str(index), [(1, 1)])])
    total.add_delta(1, recorder.take_delta())
    assert {name: one.num_running for name, one in total.workloads().items()} == {"first": 0, "default": 0, "third": 0}


def test_what_ends_under_a_name_for_which_there_was_no_room_ends_where_it_has_begun() -> None:
    total = DraftingRecorder(max_workloads=1)
    total.add_delta(1, RecorderDelta({"first": WorkloadCounts(1)}))
    total.add_delta(1, RecorderDelta({"second": WorkloadCounts(1)}))
    total.add_delta(1, RecorderDelta({"first": WorkloadCounts(num_finished=1)}))
    total.add_delta(1, RecorderDelta({"second": WorkloadCounts(num_finished=1)}))
    assert {name: one.num_running for name, one in total.workloads().items()} == {"first": 0, "default": 0}


def test_a_recorder_adds_up_what_those_of_other_clients_have_counted(
    processor: OutputProcessor, recorder: DraftingRecorder
) -> None:
    total = DraftingRecorder(max_workloads=2)
    for name, workload in (("a", "code"), ("b", "code"), ("c", "chat")):
        processor.add_request(make_request(name, name, **{WORKLOAD_KEY: workload}), None)
    total.add_delta(1, recorder.take_delta())
    total.add_delta(2, RecorderDelta({"code": WorkloadCounts(2)}, 5))
    assert total.num_output_tokens == 5
    processor.process_outputs([last_output("a", [(2, 1)])])
    total.add_delta(1, recorder.take_delta())
    assert recorder.take_delta().workloads == {}
    assert total.num_output_tokens == 8
    assert total.workloads() == {
        "code": WorkloadCounts(4, 1, 0, 3, 1, counts_of([(2, 1)])), "chat": WorkloadCounts(1)
    }  # fmt: skip
    total.drop_source(1, {"chat": 2, "unknown": 3})  # one began since the last delta, and that of "code" has finished
    assert {name: (one.num_running, one.num_finished, one.num_aborted) for name, one in total.workloads().items()} == {
        "code": (2, 2, 0), "chat": (0, 0, 2), "default": (0, 0, 3)
    }  # fmt: skip
    total.add_delta(3, RecorderDelta({"a third": WorkloadCounts(1, 1)}))
    total.add_delta(3, RecorderDelta({"a fourth": WorkloadCounts(1)}))
    assert total.workloads().keys() == {"default", "code", "a fourth"}, "those without sequences make room"


COMPLETE = [FinishReason.STOP, FinishReason.LENGTH]


@pytest.mark.parametrize("reason", [*COMPLETE, FinishReason.ERROR, FinishReason.REPETITION, None])
def test_complete_answers_of_those_who_opted_in_are_kept(processor: OutputProcessor, reason: Any) -> None:
    """`None`: aborted before its last output."""
    kept = []
    recorder = DraftingRecorder(on_answer=lambda *answer: kept.append(answer))
    recorder.attach(SimpleNamespace(output_processor=processor))
    for name, extra in (("a", {LEARN_KEY: "web", WORKLOAD_KEY: "code"}), ("b", {}), ("c", {LEARN_KEY: 3})):
        processor.add_request(make_request(name, name, **extra), None)
        for output in (EngineCoreOutput(name, [5, 6]), EngineCoreOutput(name, [7], finish_reason=reason)):
            processor.process_outputs([output])
    processor.abort_requests(["a", "b", "c"], internal=True)
    assert kept == ([("code", "web", [1], [5, 6, 7])] if reason in COMPLETE else [])


@pytest.mark.parametrize("version", ["0.31.1", "1.32.0"])
def test_an_untested_version_is_refused_unless_told(
    version: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PEAGLE_UNTESTED_VLLM", raising=False)
    for tested in ("0.32.0", "0.32.1+cpu"):
        compat.check_version(tested)
        assert compat.is_tested(tested)
    assert caplog.text == ""
    line = (
        rf"^vLLM {version} was not tested with this package, 0\.32 was; .* environment variable PEAGLE_UNTESTED_VLLM=1$"
    )
    with pytest.raises(compat.UnsupportedVLLMError, match=line):
        compat.check_version(version)
    monkeypatch.setenv("PEAGLE_UNTESTED_VLLM", "1")
    compat.check_version(version)
    assert f"vLLM {version} was not tested" in caplog.text
    assert not compat.is_tested(version)
