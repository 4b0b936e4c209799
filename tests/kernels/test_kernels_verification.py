"""`peagle.vllm.verification` against vLLM's own rejection sampler, token by token: on a GPU with captured graphs, else
under the interpreter with what a graph holds in the place of its replay."""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from peagle.drafter.rows import INTERPRETED
from tests.support.graph_config import graph_config, outside_an_engine
from tests.support.kernel_device import DEVICE, needs_kernel

pytestmark = needs_kernel
pytest.importorskip("vllm")


RENEWED = ("vllm.v1.worker.gpu.", "vllm.v1.sample.ops.", "peagle.vllm.")


@contextlib.contextmanager
def vllms_kernels() -> Iterator[None]:
    """vLLM's V2 runner imported anew, and what we build on it. On a CPU vLLM has an empty module for Triton, here it is
    Triton. Afterwards all modules are those of before."""
    import vllm.triton_utils

    libdevice = SimpleNamespace(log1p=lambda x: triton.language.log(1.0 + x))  # the interpreter has none
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(RENEWED)}
    try:
        with mock.patch.multiple(vllm.triton_utils, triton=triton, tl=triton.language, tldevice=libdevice):
            yield
    finally:
        for name in [name for name in sys.modules if name.startswith(RENEWED)]:
            del sys.modules[name]
        sys.modules.update(before)
        for name, module in before.items():
            package, _, child = name.rpartition(".")
            setattr(sys.modules[package], child, module)


with vllms_kernels() if INTERPRETED else contextlib.nullcontext():
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.input_batch import InputBatch, expand_idx_mapping
    from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
    from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
    from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS, SamplingStates
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    # Not as names of their packages, which may still have those of before.
    cudagraph_utils = importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
    verification = importlib.import_module("peagle.vllm.verification")

NUM_PLACES, K, VOCAB, HIDDEN = 12, 3, 50, 16
NUM_ROWS = 200  # of the target's buffers
PARAMETERS: dict[str, dict[str, list[float]]] = {
    "greedy": {"temperature": [0.0]},
    "plain": {"temperature": [0.0, 1.0]},
    "temperatures": {"temperature": [0.0, 0.7, 1.0, 1.8]},
    "nucleus": {"temperature": [0.0, 0.7], "top_p": [1.0, 0.5, 0.9], "top_k": [VOCAB, 3, 20]},
    "min_p": {"temperature": [0.0, 0.7], "min_p": [0.0, 0.2]},
    "penalties": {
        "temperature": [0.0, 1.0],
        "repetition": [1.0, 1.1],
        "frequency": [0.0, 0.2],
        "presence": [0.0, -0.5],
        "top_p": [1.0, 0.8],
    },
}
"""Values of a request's sampling parameters, one of which it has."""
SCALED = [name for name in PARAMETERS if name not in ("greedy", "plain")]


def both(values: np.ndarray[Any, Any]) -> Any:
    """As the runner has a parameter: on the host, and for the device."""
    return SimpleNamespace(np=values, gpu=torch.from_numpy(values).to(DEVICE))


class Stream:
    def wait_stream(self, other: Any) -> None:
        assert isinstance(other, Stream)


class Runner:
    """What the sampler of vLLM's runner reads of it, with an output matrix of random numbers."""

    def __init__(self, parameters: str = "greedy", method: str = "standard") -> None:
        draw = np.random.default_rng(0)
        self.weight_VH = torch.from_numpy(3 * draw.standard_normal((VOCAB, HIDDEN))).float().to(DEVICE)
        self.model = SimpleNamespace(compute_logits=lambda hidden_NH: hidden_NH @ self.weight_VH.T)
        self.device, self.max_num_reqs, self.num_speculative_steps = torch.device(DEVICE), NUM_PLACES, K
        given, zeros = PARAMETERS[parameters], np.zeros(NUM_PLACES, np.int32)

        def drawn(name: str, neutral: float, kind: type = np.float32) -> Any:
            return both(draw.choice(np.array(given.get(name, [neutral]), kind), NUM_PLACES))

        states: Any = object.__new__(SamplingStates)
        states.vocab_size, states.num_logprobs = VOCAB, np.full(NUM_PLACES, NO_LOGPROBS)
        states.temperature, states.min_p = drawn("temperature", 0.0), drawn("min_p", 0.0)
        states.top_k, states.top_p = drawn("top_k", VOCAB, np.int32), drawn("top_p", 1.0)
        states.seeds = both(draw.integers(-(2**62), 2**62, NUM_PLACES))
        states.seeds_set = np.ones(NUM_PLACES, bool)
        penalties: Any = object.__new__(PenaltiesState)
        penalties.repetition_penalty = drawn("repetition", 1.0)
        penalties.frequency_penalty, penalties.presence_penalty = drawn("frequency", 0.0), drawn("presence", 0.0)
        penalties.use_penalty = (
            (penalties.repetition_penalty.np != 1.0)
            | (penalties.frequency_penalty.np != 0.0)
            | (penalties.presence_penalty.np != 0.0)
        )
        # Tokens of prompts, a bit each, and how often each is in what was answered.
        bits = draw.integers(-(2**31), 2**31, (NUM_PLACES, -(-VOCAB // 32)), np.int32)
        counts = draw.choice(np.array([0, 0, 0, 1, 2], np.int32), (NUM_PLACES, VOCAB))
        penalties.prompt_bin_mask = torch.from_numpy(bits).to(DEVICE)
        penalties.output_bin_counts = torch.from_numpy(counts).to(DEVICE)
        self.sampler: Any = object.__new__(Sampler)
        bias: Any = object.__new__(LogitBiasState)
        bias.use_logit_bias = zeros > 0
        bad_words: Any = object.__new__(BadWordsState)
        bad_words.num_bad_words = both(zeros)
        self.sampler.logits_processors = [bias, penalties, bad_words]
        self.sampler.thinking_budget_state = SimpleNamespace(enabled=False, apply=lambda *_: None)
        self.sampler.sampling_states, self.sampler.penalties_state = states, penalties
        self.sampler.trace_replay_state, self.sampler.return_sampling_mask = None, False
        self.sampler.needs_logits_processing = (
            ((states.temperature.np != 0) & (states.temperature.np != 1))
            | (states.min_p.np != 0)
            | (states.top_k.np != VOCAB)
            | (states.top_p.np != 1)
            | penalties.use_penalty
        )
        self.sampler.compute_nans = self.sampler.use_fp64_gumbel = False
        self.sampler.use_flashinfer = self.sampler.use_xpu_sampler = False
        self.sampler.logprobs_mode = "raw_logprobs"
        self.sampler.req_states = SimpleNamespace(prefill_len=both(draw.integers(20, 60, NUM_PLACES).astype(np.int32)))
        self.speculative_config = SimpleNamespace(
            num_speculative_tokens=K,
            enable_adaptive_verification=False,
            rejection_sample_method=method,
            synthetic_acceptance_rates=[0.8, 0.6, 0.3],  # of the method of that name
        )
        self.rejection_sampler = RejectionSampler(self.sampler, self.speculative_config, self.device)
        self.speculator = SimpleNamespace(draft_logits=None)
        verification.CoupledSampler.install(self)
        self.input_buffers = SimpleNamespace(
            input_ids=torch.zeros(NUM_ROWS, dtype=torch.int32, device=DEVICE),
            positions=torch.zeros(NUM_ROWS, dtype=torch.int64, device=DEVICE),
            seq_lens=torch.zeros(NUM_PLACES, dtype=torch.int32, device=DEVICE),
        )
        self.cudagraph_manager = SimpleNamespace(hidden_states=torch.zeros(NUM_ROWS, HIDDEN, device=DEVICE))
        self.vllm_config = graph_config(NUM_PLACES, NUM_ROWS, [NUM_ROWS])
        self.model_state = SimpleNamespace(num_new_sampled_tokens_per_step=1)
        self.batch_sharder = self.pcp_manager = None
        on_gpu = DEVICE == "cuda"
        self.main_stream = torch.cuda.current_stream() if on_gpu else Stream()
        self.output_copy_stream = torch.cuda.Stream() if on_gpu else Stream()

    def step(self, draw: random.Random, drafts_B: list[int], prompt_rows_B: list[int]) -> tuple[Tensor, Any]:
        """A step of requests in random places, each with so many drafts, behind so many rows of its prompt: what the
        runner lays out of it, tokens included, and the target's output."""
        count, buffers = len(drafts_B), self.input_buffers
        place_np = np.array(draw.sample(range(NUM_PLACES), count), np.int64)
        lengths_B = [1 + drafts + prompt for drafts, prompt in zip(drafts_B, prompt_rows_B, strict=True)]
        num_rows, ends_B = sum(lengths_B), np.cumsum(lengths_B)
        noise = torch.Generator().manual_seed(draw.randrange(2**31))
        hidden_MH = self.cudagraph_manager.hidden_states
        hidden_MH.copy_(torch.randn(NUM_ROWS, HIDDEN, generator=noise))
        best_N = self.model.compute_logits(hidden_MH[:num_rows]).argmax(-1).tolist()
        prefill_np = self.sampler.req_states.prefill_len.np
        ids, positions, rows, lengths = [], [], [], []
        for place, length, drafts, prompt in zip(place_np, lengths_B, drafts_B, prompt_rows_B, strict=True):
            first = len(ids)
            # Some prompts do not end here: nothing is sampled of those.
            unfinished = prompt > 0 and draw.random() < 0.5
            start = int(prefill_np[place]) - length - 1 if unfinished else int(prefill_np[place])
            right = draw.randint(0, drafts)
            for offset in range(length):
                token = draw.randrange(VOCAB)
                if prompt < offset <= prompt + right:
                    token = best_N[first + offset - 1]
                ids.append(-1 if offset > prompt and draw.random() < 0.05 else token)
                positions.append(start + offset)
            rows += range(first + prompt, first + length)
            lengths.append(start + length)
        buffers.input_ids[:num_rows] = torch.tensor(ids, dtype=torch.int32)
        buffers.positions[:num_rows] = torch.tensor(positions)
        buffers.seq_lens.zero_()
        buffers.seq_lens[:count] = torch.tensor(lengths, dtype=torch.int32)
        up_to_np = np.concatenate([[0], np.cumsum(np.array(drafts_B) + 1)]).astype(np.int32)
        place_B, up_to_B1 = torch.from_numpy(place_np).to(DEVICE), torch.from_numpy(up_to_np).to(DEVICE)
        expanded, local = expand_idx_mapping(place_B, len(rows), up_to_B1, 1 + K)
        batch: Any = object.__new__(InputBatch)
        vars(batch).update(
            num_reqs=count,
            num_draft_tokens=sum(drafts_B),
            idx_mapping=place_B,
            idx_mapping_np=place_np,
            expanded_idx_mapping=expanded,
            expanded_local_pos=local,
            logits_indices=torch.tensor(rows, device=DEVICE),
            cu_num_logits=up_to_B1,
            cu_num_logits_np=up_to_np,
            query_start_loc_np=np.concatenate([[0], ends_B]),
            input_ids=buffers.input_ids[:num_rows],
            positions=buffers.positions[:num_rows],
            seq_lens=buffers.seq_lens[:count],
            seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        )
        return hidden_MH[:num_rows], batch


@pytest.fixture
def graphs() -> Iterator[None]:
    """vLLM's capture without its engine; on a CPU nothing is captured, and a replay does what a graph holds."""

    @contextlib.contextmanager
    def on_a_stream(device: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            yield

    # The interpreter cannot run the kernel's loop over rows; vLLM's sampler does not call it on a CPU, either.
    by_sorting = topk_topp_sampler.apply_top_k_top_p_pytorch
    if DEVICE == "cuda":
        patch = mock.patch.object(cudagraph_utils, "graph_capture", on_a_stream)
    else:
        patch = mock.patch.object(verification.topk_topp_triton, "apply_top_k_top_p_triton", by_sorting)
    with outside_an_engine(cudagraph_utils), patch:
        yield


def make(runner: Runner) -> Any:
    one = verification.Verification.create(runner)
    if DEVICE == "cuda":
        one.capture()
    else:
        one.graphs.run_fullgraph = lambda desc: one.verify(desc, False)
        one.scaled_graphs.run_fullgraph = lambda desc: one.verify(desc, True)
    return one


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    ("parameters", "method"),
    [
        ("greedy", "standard"), ("plain", "standard"), ("temperatures", "block"), ("nucleus", "standard"),
        ("min_p", "standard"), ("penalties", "synthetic"),
    ],
)  # fmt: skip
def test_it_samples_what_vllms_sampler_does(parameters: str, method: str) -> None:
    runner, draw = Runner(parameters, method), random.Random(1)
    one = make(runner)
    accepted: set[int] = set()
    num_unfinished, num_scaled = 0, 0
    for index in range(40 if DEVICE == "cuda" else 8):
        count = (1, 2, 5, NUM_PLACES)[index % 4]
        drafts_B = [draw.choice([0, 1, K, K]) for _ in range(count)]
        drafts_B[-1] = K
        prompt_rows_B = [draw.choice([0, 0, 0, 4]) if index % 4 > 1 else 0 for _ in range(count)]
        drafts_B = [0 if prompt else drafts for prompt, drafts in zip(prompt_rows_B, drafts_B, strict=True)]
        if not any(drafts_B):
            drafts_B[0], prompt_rows_B[0] = K, 0
        hidden_NH, batch = runner.step(draw, drafts_B, prompt_rows_B)
        logits = runner.model.compute_logits(hidden_NH[batch.logits_indices])
        expected = runner.rejection_sampler(logits, batch, None)
        # Numbers of a larger step before must not show.
        one.rows.place_N.fill_(0)
        one.rows.draft_N.zero_()
        found = one(hidden_NH, batch)
        assert found.num_sampled.tolist() == expected.num_sampled.tolist()
        assert found.num_rejected.tolist() == expected.num_rejected.tolist()
        for mine, theirs, num in zip(
            found.sampled_token_ids.tolist(), expected.sampled_token_ids.tolist(), found.num_sampled, strict=True
        ):
            assert mine[: int(num)] == theirs[: int(num)]
        # A request with drafts samples at least one token. A request whose prompt does not end here samples none.
        num_sampled_B = found.num_sampled.tolist()
        accepted |= {num - 1 for num, drafts in zip(num_sampled_B, drafts_B, strict=True) if drafts == K}
        num_unfinished += num_sampled_B.count(0)
        num_scaled += bool(runner.sampler.needs_logits_processing[batch.idx_mapping_np].any())
    assert accepted == set(range(K + 1))
    assert num_unfinished > 0
    assert bool(num_scaled) == (parameters in SCALED)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_tokens_are_those_sampled_without_drafts(parameters: str) -> None:
    """Each token, the one behind accepted drafts too, is what vLLM's sampler draws at its position for the same tokens
    before, whatever the drafts were."""
    runner, draw = Runner(parameters), random.Random(4)
    one, sampler = make(runner), runner.sampler
    counts_SV, num_accepted = sampler.penalties_state.output_bin_counts, 0
    for _ in range(20 if DEVICE == "cuda" else 3):
        hidden_NH, batch = runner.step(draw, [K] * 4, [0] * 4)
        found = one(hidden_NH, batch)
        for request, (place, tokens) in enumerate(zip(batch.idx_mapping_np, found.sampled_token_ids, strict=True)):
            num_sampled, before = int(found.num_sampled[request]), counts_SV.clone()
            num_accepted += num_sampled - 1
            for offset in range(num_sampled):
                row = (1 + K) * request + offset
                places, rows = torch.tensor([place], device=DEVICE), slice(row, row + 1)
                (expected,), _ = sampler.sample(
                    runner.model.compute_logits(hidden_NH[rows]),
                    places,
                    places,
                    np.array([place]),
                    batch.positions[rows],
                    batch.input_ids[rows],
                    torch.zeros(1, dtype=torch.int32, device=DEVICE),
                    np.array([int(batch.positions[row]) + 1]),
                )
                assert int(tokens[offset]) == int(expected)
                counts_SV[place, int(expected)] += 1  # as the runner counts what was sampled
            counts_SV.copy_(before)
    assert num_accepted > 0


@pytest.mark.parametrize("k_max", [1, 7, 8])
def test_a_draft_is_accepted_where_it_is_the_targets_token(k_max: int) -> None:
    draw = random.Random(k_max)
    up_to, tokens, drafts, expected = [0], [], [], []
    for num_drafts in [0, k_max, 1, k_max, *(draw.randint(0, k_max) for _ in range(20))]:
        mine = [draw.randrange(3) for _ in range(1 + num_drafts)]
        given = [draw.choice([token, token, -1, 7]) for token in mine[:-1]]
        num_accepted = next((i for i, (a, b) in enumerate(zip(mine, given, strict=False)) if a != b), num_drafts)
        expected.append(mine[: num_accepted + 1])
        tokens, drafts = tokens + mine, [*drafts, draw.choice([mine[0], 5]), *given]
        up_to.append(len(tokens))
    up_to.append(up_to[-1])  # a request without rows
    on_device = [torch.tensor(tokens), torch.tensor(drafts, dtype=torch.int32), torch.tensor(up_to, dtype=torch.int32)]
    sampled_BK1, num_sampled_B = verification.accept_drafts(*(values.to(DEVICE) for values in on_device), k_max)
    assert sampled_BK1.shape == (len(up_to) - 1, k_max + 1)
    assert num_sampled_B.tolist() == [*map(len, expected), 0]
    assert [row[:num] for row, num in zip(sampled_BK1.tolist(), num_sampled_B, strict=True)] == [*expected, []]


@pytest.mark.usefixtures("graphs")
def test_other_steps_are_left_to_vllm() -> None:
    runner, draw = Runner("temperatures"), random.Random(2)
    one, sampler = make(runner), runner.sampler
    hidden_NH, batch = runner.step(draw, [K, 1], [0, 0])
    place = int(batch.idx_mapping_np[1])
    assert one(hidden_NH, batch) is not None
    assert one(hidden_NH.clone(), batch) is None  # the target ran without a full graph
    for values, value in [
        (sampler.sampling_states.num_logprobs, 0),
        (sampler.logits_processors[0].use_logit_bias, True),
        (sampler.logits_processors[2].num_bad_words.np, 1),
    ]:
        usual, processed = values[place].copy(), sampler.needs_logits_processing[place].copy()
        values[place], sampler.needs_logits_processing[place] = value, True
        assert one(hidden_NH, batch) is None
        values[place], sampler.needs_logits_processing[place] = usual, processed
        assert one(hidden_NH, batch) is not None
    sampler.thinking_budget_state.enabled = True
    sampler.thinking_budget_state.use_thinking_budget = np.ones(NUM_PLACES, bool)
    assert one(hidden_NH, batch) is None
    hidden_NH, batch = runner.step(draw, [0, 0], [0, 0])
    assert one(hidden_NH, batch) is None  # nothing to verify


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("", None),  # the usual engine
        ("batch_sharder", 1),
        ("pcp_manager", 1),
        ("vllm_config.lora_config", 1),
        ("speculator.draft_logits", 1),
        ("vllm_config.parallel_config.tensor_parallel_size", 2),
        ("vllm_config.parallel_config.pipeline_parallel_size", 2),
        ("sampler.compute_nans", True),
        ("sampler.trace_replay_state", 1),
        ("sampler.return_sampling_mask", True),
        ("sampler.logits_processors", []),
        ("rejection_sampler.watermark_key", 3),
        ("model_state.num_new_sampled_tokens_per_step", 0),
        ("cudagraph_manager.hidden_states", None),
    ],
)
def test_other_engines_have_none(path: str, value: Any) -> None:
    runner: Any = Runner()
    if path:
        *owners, name = path.split(".")
        setattr(functools.reduce(getattr, owners, runner), name, value)
    assert (verification.Verification.create(runner) is None) == bool(path)
