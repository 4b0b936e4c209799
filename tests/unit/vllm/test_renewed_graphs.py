"""Full graphs of the target that renew attention's metadata themselves, and steps that therefore build none.

vLLM's own capture, runner, metadata builders and groups, with a recording of CPU operations in the place of a CUDA
graph: a replay does them again in the same memory, so whatever Python decided or made at the capture stays as it was.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("vllm")
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
from vllm.model_executor.layers.attention.static_sink_attention import create_static_sink_attention_backend
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.flex_attention import FlexAttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend
from vllm.v1.worker.gpu import cudagraph_utils, model_runner
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.utils import AttentionGroup

from peagle.vllm import speculator, v2_worker
from peagle.vllm.v2_worker import PEagleRunner, RaggedModelRunner, RenewedState, StepGraphs
from tests.support.graph_config import graph_config

MAX_REQUESTS, MAX_LEN, SIZES = 6, 512, [4, 8, 16, 32]
LAYER, DRAFTER_LAYER = "target.0", "drafter.0"


class Recording(TorchDispatchMode):
    """In the place of a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        for function, args, kwargs, made in self.operations:
            for place, value in zip(tree_leaves(made), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(place, Tensor):
                    place.copy_(value)


def plan(*, batch_size: int, cache_seqlens: Tensor, cu_seqlens_q: Tensor, **given: Any) -> Tensor:
    """In the place of FlashAttention's: a number of each request that changes with its lengths in this step, and what
    the host decides."""
    of_requests = cache_seqlens[:batch_size] * 1000 + cu_seqlens_q.diff()
    decided = [given["max_seqlen_q"], given["num_splits"]]
    return torch.cat([*(torch.full((1,), number, dtype=torch.int32) for number in decided), of_requests])


def longest_of(rows: list[int]) -> int | None:
    """As vLLM looks for a graph: the longest query of a step that only decodes, here of up to 2 rows."""
    return max(rows) if max(rows) <= 2 else None


def read_attention(input_ids: Tensor, positions: Tensor, **_: Any) -> Tensor:
    """Of each row all that attention reads for it."""
    metadata: Any = get_forward_context().attn_metadata[LAYER]
    slots = get_forward_context().slot_mapping[LAYER]
    rows = torch.arange(len(input_ids), dtype=torch.int32)
    request = torch.searchsorted(metadata.query_start_loc, rows, right=True) - 1
    request = request.clamp(max=len(metadata.seq_lens) - 1)
    planned = metadata.scheduler_metadata  # which Triton's attention has none of
    if planned is None:
        planned = torch.zeros(2 + len(metadata.seq_lens), dtype=torch.int32)
    columns = (planned[2:][request], metadata.seq_lens[request], metadata.block_table[request, 0], slots[: len(rows)])
    return torch.stack([*columns, planned[0].expand(len(rows)), planned[1].expand(len(rows))], 1).double()


network = torch.nn.Module()
network.forward = read_attention


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What graphs, forward contexts and steps read of vLLM's configuration; recordings for CUDA graphs."""

    @contextlib.contextmanager
    def record(graph: Recording, *_: Any, **__: Any) -> Iterator[None]:
        with graph:
            yield

    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    for name, value in {"get_global_graph_pool": lambda: 0, "graph_pool_handle": lambda: 0}.items():
        monkeypatch.setattr(cudagraph_utils.current_platform, name, value, raising=False)
    monkeypatch.setattr(cudagraph_utils, "graph_capture", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cudagraph_utils, "is_global_first_rank", lambda: False)
    monkeypatch.setattr(cudagraph_utils, "capture_pool", lambda *_: contextlib.nullcontext())
    # On a CPU nothing is compiled, and vLLM refuses piecewise graphs of such a model.
    monkeypatch.setattr(cudagraph_utils, "has_compiled_submodule", lambda _: True)
    monkeypatch.setattr(cudagraph_utils, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(flash_attn, "get_scheduler_metadata", plan, raising=False)
    for module in (cudagraph_utils, model_runner):
        monkeypatch.setattr(module, "set_forward_context", forward_context)
    return graph_config(MAX_REQUESTS, 64, SIZES)


@contextlib.contextmanager
def forward_context(attn_metadata: Any, config: Any, slot_mapping: Any, **_: Any) -> Iterator[None]:
    from vllm import forward_context

    context: Any = SimpleNamespace(attn_metadata=attn_metadata, slot_mapping=slot_mapping)
    with forward_context.override_forward_context(context):
        yield


def builder_of(builder_class: type, **more: Any) -> Any:
    one = object.__new__(builder_class)
    values = {
        "aot_schedule": True,
        "aot_sliding_window": (-1, -1),
        "block_size": 16,
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "dcp_world_size": 1,
        "headdim": 64,
        "kv_cache_dtype": torch.float16,
        "max_cudagraph_size": SIZES[-1],
        "max_num_splits": 32,
        "max_seqs_64_segments": 0,
        "mm_prefix_query_ranges_np": None,
        "num_heads_kv": 2,
        "num_heads_q": 4,
        "num_par_softmax_segments": 16,
        "rswa_window": None,
        "scheduler_metadata": torch.zeros(64, dtype=torch.int32),
        "seq_threshold_3D": 4,
        "supports_draft_decode_metadata_update": True,
        **dict.fromkeys(("softmax_segm_expsum", "softmax_segm_max", "softmax_segm_output")),
        "use_full_cuda_graph": True,
        **more,
    }
    for name, value in values.items():
        setattr(one, name, value)
    return one


def group_of(builder: Any, *layers: str) -> AttentionGroup:
    spec: Any = None
    return AttentionGroup(FlashAttentionBackend, list(layers or (LAYER,)), spec, 0, metadata_builders=[builder])


def set_up(config: Any, monkeypatch: pytest.MonkeyPatch, *groups: AttentionGroup, **changes: Any) -> Any:
    """A runner after `initialize_kv_cache`, of which vLLM's part is done here."""

    def vllms(runner: Any, mode: CUDAGraphMode) -> None:
        runner.attn_groups = [list(groups)]
        layers = [name for group in groups for name in group.layer_names]
        runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=layers)])
        runner.cudagraph_manager = ModelCudaGraphManager(config, runner.device, mode, decode_query_len=2)

    monkeypatch.setattr(GPUModelRunner, "initialize_kv_cache", vllms)
    runner = object.__new__(RaggedModelRunner)
    runner.vllm_config, runner.device, runner.speculator = config, torch.device("cpu"), None
    runner.decode_query_len, runner.lora_capture_cases, runner.ubatch_runner = 2, [0], None
    state: Any = object.__new__(DefaultModelState)
    state.model_config = SimpleNamespace(max_model_len=MAX_LEN)
    state.supports_mm_inputs, state.encoder_cache = False, None
    state.prompt_embeds_state = state.rope_state = None
    runner.model_state = state
    for name, value in changes.items():
        setattr(runner, name, value)
    return runner


def step_of(runner: Any, buffers: InputBuffers, tables: BlockTables, rows: list[int], first_key: int) -> Any:
    """A step of requests with so many rows each, through vLLM's `execute_model`; its hidden states. Before, the
    runner's buffers are filled as its kernels do it."""
    lengths = torch.tensor(rows, dtype=torch.int32)
    num_requests, num_rows = len(rows), sum(rows)

    def prepare(scheduled: Any, state: Any, desc: BatchExecutionDescriptor, num_active_loras: int) -> Any:
        buffers.query_start_loc[0], buffers.query_start_loc[num_requests + 1 :] = 0, num_rows
        buffers.query_start_loc[1 : num_requests + 1] = lengths.cumsum(0)
        buffers.seq_lens.zero_()
        buffers.seq_lens[:num_requests] = lengths + first_key + torch.arange(num_requests)
        padded = desc.num_reqs or num_requests
        return SimpleNamespace(
            num_reqs=num_requests,
            num_reqs_after_padding=padded,
            num_tokens=num_rows,
            num_tokens_after_padding=desc.num_tokens,
            num_scheduled_tokens=lengths.numpy(),
            max_query_len=desc.max_query_len or (desc.num_tokens if desc.cg_mode == CUDAGraphMode.FULL else None),
            query_start_loc=buffers.query_start_loc[: padded + 1],
            query_start_loc_np=buffers.query_start_loc[: padded + 1].numpy().copy(),
            seq_lens=buffers.seq_lens[:padded],
            seq_lens_cpu_upper_bound=buffers.seq_lens[:padded].clone(),
            dcp_local_seq_lens=None,
            dcp_local_seq_lens_cpu_upper_bound=None,
            fast_prefill=None,
            idx_mapping_np=None,
            is_prefilling_np=lengths.numpy() > 2,
            is_padding=None,
            prompt_lens=None,
            input_ids=buffers.input_ids[: desc.num_tokens],
            positions=buffers.positions[: desc.num_tokens],
        )

    def prepare_attn(batch: Any) -> Any:
        tables.input_block_tables[0][: batch.num_reqs_after_padding] = 0
        tables.input_block_tables[0][:num_requests, 0] = 7 * first_key + torch.arange(num_requests)
        tables.slot_mappings.fill_(-1)
        tables.slot_mappings[0, :num_rows] = first_key + torch.arange(num_rows)
        shape = batch.num_reqs_after_padding, batch.num_tokens_after_padding
        return (tables.input_block_tables[0][: shape[0]],), tables.slot_mappings[:, : shape[1]]

    state = SimpleNamespace(num_tokens=num_rows, has_prefill=max(rows) > 2)
    stand_in = MagicMock(
        attn_groups=runner.attn_groups,
        cudagraph_manager=runner.cudagraph_manager,
        dcp_size=1,
        dp_size=1,
        gather_batch_req_state=lambda *_: (state, None),
        is_encoder_decoder=False,
        kv_cache_config=runner.kv_cache_config,
        lora_config=None,
        model=network,
        model_state=runner.model_state,
        observability_config=SimpleNamespace(cudagraph_metrics=False),
        parallel_config=runner.vllm_config.parallel_config,
        pcp_manager=None,
        prepare_attn=prepare_attn,
        prepare_inputs=prepare,
        ubatch_runner=None,
        use_aux_hidden_state_outputs=False,
        uses_inputs_embeds=False,
        vllm_config=runner.vllm_config,
    )
    scheduled = MagicMock(num_scheduled_tokens=dict(enumerate(rows)), total_num_scheduled_tokens=num_rows)
    GPUModelRunner.execute_model(stand_in, scheduled)
    return stand_in.execute_model_state


STEPS = [([1], 40), ([2, 1, 2], 300), ([1, 2, 1, 2, 1, 2], 9), ([5, 1, 2], 70), ([30], 0), ([1], 41), ([3, 40], 5)]


@pytest.mark.parametrize("renews", [True, False])
@pytest.mark.parametrize("builder_class", [FlashAttentionMetadataBuilder, TritonAttentionMetadataBuilder])
def test_replays_read_the_plan_of_their_own_step(
    config: Any, monkeypatch: pytest.MonkeyPatch, builder_class: Any, renews: bool
) -> None:
    built: list[int] = []
    build, has_plan = builder_class.build, builder_class is FlashAttentionMetadataBuilder
    monkeypatch.setattr(builder_class, "build", lambda *args, **more: built.append(1) or build(*args, **more))
    monkeypatch.setattr(builder_class, "_cudagraph_support", AttentionCGSupport.ALWAYS)
    if not renews:
        monkeypatch.setattr(speculator, "RENEWABLE", ())
    runner = set_up(config, monkeypatch, group_of(builder_of(builder_class)))
    runner.initialize_kv_cache(CUDAGraphMode.FULL_AND_PIECEWISE)
    graphs = runner.cudagraph_manager
    buffers = InputBuffers(MAX_REQUESTS, 64, torch.device("cpu"))
    tables = object.__new__(BlockTables)
    tables.cp_size, tables.slot_mappings = 1, torch.zeros(1, 64, dtype=torch.int64)
    tables.input_block_tables = [torch.zeros(MAX_REQUESTS, 4, dtype=torch.int32)]
    with torch.inference_mode():
        graphs.capture(network, runner.model_state, buffers, None, tables, runner.attn_groups, runner.kv_cache_config)
        assert len(built) == 2 * len(graphs.graphs) > 4
        kinds = set()
        for rows, first_key in STEPS:
            built.clear()
            desc = graphs.dispatch(len(rows), sum(rows), None, 0, max_query_len=longest_of(rows))
            planned = desc.max_query_len or desc.num_tokens
            done = step_of(runner, buffers, tables, rows, first_key)
            found, lengths = done.hidden_states[: sum(rows)], torch.tensor(rows)
            requests = torch.arange(len(rows))
            keys = lengths + first_key + requests
            plans = (keys * 1000 + lengths) * has_plan
            of_request = torch.stack([plans, keys, 7 * first_key + requests], 1)
            assert found[:, :3].tolist() == of_request.repeat_interleave(lengths, 0).tolist()
            assert found[:, 3].tolist() == list(range(first_key, first_key + sum(rows)))
            is_full = desc.cg_mode == CUDAGraphMode.FULL
            if has_plan:
                assert found[0, 4:].tolist() == ([planned, 32] if is_full else [max(rows), 0])
            assert len(built) == (0 if is_full and renews else 1)
            # The runner's metadata buffer holds nothing of an earlier and larger step.
            (builder,) = runner.attn_groups[0][0].metadata_builders
            assert not builder.scheduler_metadata[2 + (desc.num_reqs or len(rows)) :].any()
            assert bool(done.attn_metadata) == (not is_full or not renews)
            kinds.add((desc.cg_mode, desc.max_query_len, is_full and longest_of(rows) is None and desc.num_tokens))
    assert len(kinds) == 5  # decoding, three sizes with prompts, and eager


def test_metadata_is_built_for_all_that_is_no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        DefaultModelState, "prepare_attn", lambda *args, **more: asked.append((args[2:], more)) or {"a"}
    )
    state: Any = object.__new__(RenewedState)
    full, rest = CUDAGraphMode.FULL, ("tables", "slots", "groups", "config")
    assert state.prepare_attn("batch", full, *rest, for_capture=False) == {}
    assert state.prepare_attn("batch", full, *rest) == {}
    assert not asked
    # A capture asks for NONE, and dummy steps on a full graph for its capture.
    others = (CUDAGraphMode.NONE, False), (CUDAGraphMode.PIECEWISE, False), (CUDAGraphMode.NONE, True), (full, True)
    for mode, for_capture in others:
        assert state.prepare_attn("batch", mode, *rest, for_capture=for_capture) == {"a"}
        assert asked.pop() == ((mode, *rest), {"for_capture": for_capture})


def derived(create: Any, *more: Any) -> type:
    builder_class: type = create(*more).get_builder_cls()
    assert issubclass(builder_class, FlashAttentionMetadataBuilder)
    return builder_class


REFUSED = {
    "flex": lambda: builder_of(FlexAttentionMetadataBuilder),
    "static sinks": lambda: builder_of(derived(create_static_sink_attention_backend, FlashAttentionBackend, 4)),
    "chunks": lambda: builder_of(derived(create_chunked_local_attention_backend, FlashAttentionBackend, 64)),
    "fast prefill": lambda: builder_of(derived(create_fast_prefill_custom_backend, "a", FlashAttentionBackend)),
    "context parallel": lambda: builder_of(FlashAttentionMetadataBuilder, supports_draft_decode_metadata_update=False),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_builders_keep_vllms_way(config: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(v2_worker, "get_attn_cg_support", lambda *_, **__: SimpleNamespace(narrow=supports_all))
    known, other = group_of(builder_of(FlashAttentionMetadataBuilder)), REFUSED[name]()
    for groups in ([known, group_of(other, "target.1")], [group_of(other, LAYER, DRAFTER_LAYER), known]):
        runner = set_up(
            config, monkeypatch, *groups, speculator=SimpleNamespace(draft_attn_layer_names={DRAFTER_LAYER})
        )
        runner.initialize_kv_cache(CUDAGraphMode.FULL_AND_PIECEWISE)
        assert isinstance(runner.cudagraph_manager, StepGraphs)
        assert type(runner.model_state) is DefaultModelState
        assert not runner.cudagraph_manager.renewed


def supports_all(*_: Any) -> Any:
    return SimpleNamespace(min_cg_support=AttentionCGSupport.ALWAYS)


@pytest.mark.parametrize("builder_class", [FlashAttentionMetadataBuilder, TritonAttentionMetadataBuilder])
def test_a_drafters_layers_are_no_matter(config: Any, monkeypatch: pytest.MonkeyPatch, builder_class: type) -> None:
    monkeypatch.setattr(v2_worker, "get_attn_cg_support", lambda *_, **__: SimpleNamespace(narrow=supports_all))
    of_target, of_both = group_of(builder_of(builder_class)), group_of(builder_of(builder_class), "a", DRAFTER_LAYER)
    of_drafter = group_of(builder_of(FlexAttentionMetadataBuilder), DRAFTER_LAYER)
    speculator = SimpleNamespace(draft_attn_layer_names={DRAFTER_LAYER})
    runner = set_up(config, monkeypatch, of_target, of_drafter, of_both, speculator=speculator)
    # vLLM sets up a small cache to measure graphs with, then the real one.
    for mode, renewed in [
        (CUDAGraphMode.FULL_AND_PIECEWISE, True),
        (CUDAGraphMode.FULL_AND_PIECEWISE, True),
        (CUDAGraphMode.FULL, False),
        (CUDAGraphMode.FULL_DECODE_ONLY, True),
        (CUDAGraphMode.PIECEWISE, False),
        (CUDAGraphMode.NONE, False),
    ]:
        runner.initialize_kv_cache(mode)
        assert isinstance(runner.cudagraph_manager, StepGraphs)
        assert list(runner.cudagraph_manager.renewed) == ([of_target, of_both] if renewed else [])
        assert type(runner.model_state) is (RenewedState if renewed else DefaultModelState)
    with monkeypatch.context() as breaks:
        breaks.setattr(cudagraph_utils, "is_breakable_cudagraph_enabled", lambda: True)
        runner.initialize_kv_cache(CUDAGraphMode.FULL_AND_PIECEWISE)
        assert type(runner.model_state) is DefaultModelState
    config.kv_transfer_config = object()
    runner.initialize_kv_cache(CUDAGraphMode.FULL_AND_PIECEWISE)
    assert type(runner.cudagraph_manager) is ModelCudaGraphManager
    assert type(runner.model_state) is DefaultModelState


def tapped(input_ids: Tensor, positions: Tensor, **_: Any) -> tuple[Tensor, list[Tensor]]:
    """A network with two tapped layers."""
    rows_N2 = torch.stack([input_ids, positions], 1).double()
    return rows_N2, [rows_N2 + 100, rows_N2 + 200]


def test_the_targets_graphs_leave_taps_where_the_drafter_reads_them(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(v2_worker, "get_attn_cg_support", lambda *_, **__: SimpleNamespace(narrow=supports_all))
    taps_NX = torch.zeros(SIZES[-1], 4, dtype=torch.float64)
    views = list(taps_NX.split(2, dim=-1))
    runner = set_up(config, monkeypatch, group_of(builder_of(TritonAttentionMetadataBuilder)))
    runner.__class__ = PEagleRunner
    # Without a place, and with too small a one, they keep vLLM's.
    for given, expected in (([], []), ([view[:-1] for view in views], []), (views, views)):
        runner.speculator = SimpleNamespace(draft_attn_layer_names=set(), tap_views=lambda given=given: given)
        runner.initialize_kv_cache(CUDAGraphMode.FULL_AND_PIECEWISE)
        assert [id(view) for view in runner.cudagraph_manager.aux_hidden_states] == [id(view) for view in expected]
    graphs, buffers = runner.cudagraph_manager, InputBuffers(MAX_REQUESTS, 64, torch.device("cpu"))
    tables = object.__new__(BlockTables)
    tables.cp_size, tables.slot_mappings = 1, torch.zeros(1, 64, dtype=torch.int64)
    tables.input_block_tables = [torch.zeros(MAX_REQUESTS, 4, dtype=torch.int32)]
    with torch.inference_mode():
        rest = (runner.model_state, buffers, None, tables, runner.attn_groups, runner.kv_cache_config)
        graphs.capture(tapped, *rest, use_aux_hidden_state_outputs=True)
        for num_rows in (1, 3, 20):
            buffers.input_ids[:num_rows] = torch.arange(num_rows) * num_rows
            buffers.positions[:num_rows] = torch.arange(num_rows) + 7
            desc = graphs.dispatch(1, num_rows, None, 0, max_query_len=num_rows)
            hidden_N2, aux = graphs.run_fullgraph(desc)
            assert aux[0].data_ptr() == taps_NX.data_ptr()  # by which a drafter knows
            found_N4, expected_N2 = taps_NX[:num_rows], hidden_N2[:num_rows]
            assert expected_N2[:, 0].tolist() == [row * num_rows for row in range(num_rows)]
            assert found_N4.equal(torch.cat([expected_N2 + 100, expected_N2 + 200], dim=-1))
