"""Tests of `peagle.vllm.speculator` without vLLM's engine: a small runner of our own calls it as vLLM's V2 runner does.

The network is `peagle.model.Drafter`, whose attention reads and writes a paged cache by the metadata that a pass
brings; the reference is `peagle.draft`.
"""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.checkpoint import build_drafter
from peagle.draft import DraftSession
from peagle.vllm.step_notes import SchedulerPlan
from tests.support.head_factory import REDUCED, head_tensors
from tests.support.kernel_device import DEVICE, needs_kernel

pytestmark = [needs_kernel, pytest.mark.skipif(DEVICE != "cpu", reason="its network and caches are the CPU's")]
if DEVICE == "cpu":
    pytest.importorskip("vllm")
    from peagle.vllm import speculator

MAX_REQUESTS, MAX_LEN, BLOCK, NUM_BLOCKS, MAX_TOKENS = 4, 48, 4, 60, 40


class Network:
    """vLLM's network of a head, as far as the speculator uses it, over a paged cache. It is whole."""

    def __init__(self, drafter: Any, rows: Any) -> None:
        self._drafter, self._rows = drafter, rows
        self.lm_head = drafter.lm_head
        self.draft_id_to_target_id = drafter.target_ids - torch.arange(len(drafter.target_ids))
        shape = NUM_BLOCKS * BLOCK, drafter.config.num_key_value_heads, drafter.config.head_dim
        self._keys = [torch.full(shape, 1e4) for _ in drafter.layers]
        self._values = [torch.full(shape, 1e4) for _ in drafter.layers]
        self.tables_BC: Tensor

    def combine_hidden_states(self, taps: Tensor) -> Tensor:
        return self._drafter.project_inputs(taps)

    @staticmethod
    def logits_processor(lm_head: Any, normed: Tensor) -> Tensor:
        return lm_head(normed)

    def __call__(self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: None) -> Any:
        embeds = self._drafter.embed(input_ids.long()[None])
        normed, back = self._drafter(embeds, hidden_states[None], positions[None], self._attend)
        return normed[0], back[0]

    def _attend(self, layer: int, q_BATD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        rows, out = self._rows(), torch.zeros_like(q_BATD)
        keys, values = self._keys[layer], self._values[layer]
        for row in range(q_BATD.shape[2]):
            if (slot := int(rows.slots_GR[0, row])) >= 0:
                keys[slot], values[slot] = k_BGTD[0, :, row], v_BGTD[0, :, row]
        for request, table in enumerate(self.tables_BC.tolist()):
            first, end = rows.first_row_B1[request : request + 2].tolist()
            context = int(rows.context_B[request])
            slots = [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(context)]
            for row in range(first, end):
                seen = slots[: max(0, context - (end - 1 - row))]
                if seen:
                    k, v = keys[seen].transpose(0, 1)[None], values[seen].transpose(0, 1)[None]
                    q = q_BATD[:, :, row : row + 1]
                    out[:, :, row : row + 1] = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return out


class Graphs:
    """Full graphs for a padded number of requests, and those for a number of rows with no more room than it takes; the
    choice of drafts for a padded number of drafts, or none."""

    def __init__(self, owner: Any) -> None:
        self._owner, self.num_packed, self._turn = owner, 0, 0

    def dispatch(self, num_requests: int, num_rows: int, uniform: int | None, num_loras: int) -> Any:
        if self is self._owner.choices:
            mode = speculator.CUDAGraphMode.FULL if num_rows % 2 else speculator.CUDAGraphMode.NONE
            return SimpleNamespace(cg_mode=mode, num_tokens=num_rows + 1)
        return SimpleNamespace(cg_mode=speculator.CUDAGraphMode.NONE, num_tokens=num_rows + 3)

    def full_graph(self, num_requests: int, num_targets: int, depth: int, max_query_len: int, num_rejected: int) -> Any:
        self._turn += 1
        padded, k_max = min(num_requests + 1, MAX_REQUESTS), self._owner.num_speculative_steps
        deep = max(depth, max_query_len - 1)
        if deep <= k_max and self._turn % 2:
            return SimpleNamespace(
                num_tokens=padded * 2 * deep, num_reqs=padded, uniform_token_count=2 * deep, max_query_len=None
            )
        num_rows = max(num_targets, num_targets + num_requests * (depth - 1) - num_rejected)
        return SimpleNamespace(num_tokens=num_rows, num_reqs=padded, uniform_token_count=None, max_query_len=num_rows)

    def run_fullgraph(self, desc: Any) -> None:
        if self is self._owner.choices:
            self._owner._choose(desc.num_tokens)
            return
        self.num_packed += desc.uniform_token_count is None
        num_targets, mode = desc.num_tokens, speculator.CUDAGraphMode.FULL
        if desc.uniform_token_count is not None:
            depth = desc.uniform_token_count // 2
            num_targets = desc.num_reqs * (1 + depth)
        self._owner._pass(num_targets, desc.num_tokens, None, None, mode)
        if desc.uniform_token_count is not None:
            self._owner._choose(desc.num_reqs * depth)
            self._owner._lay_out_drafts(desc.num_reqs, depth)


class Tables:
    """Block tables by place, and those of a batch in its order."""

    def __init__(self, input_block_tables: list[Tensor]) -> None:
        self.input_block_tables, self.block_sizes = input_block_tables, [BLOCK]
        self.by_place = torch.zeros_like(input_block_tables[0])

    def gather_block_tables(self, places: Tensor, num_padded: int) -> None:
        self.input_block_tables[0][:num_padded] = 0
        self.input_block_tables[0][: len(places)] = self.by_place[places]


def make_speculator(drafter: Any, num_drafts: int, with_graphs: bool) -> Any:
    one = object.__new__(speculator.PEagleSpeculator)
    model_config = SimpleNamespace(get_hidden_size=lambda: drafter.config.fc_input_size // 3)
    one.vllm_config = SimpleNamespace(model_config=model_config)
    one.device, one.dtype = torch.device("cpu"), torch.float32
    one.num_speculative_steps, one._num_ahead, one._never_drafted = num_drafts, num_drafts, set()
    one.max_num_reqs, one.max_num_tokens, one.max_model_len = MAX_REQUESTS, MAX_TOKENS, MAX_LEN
    one.max_rows = MAX_TOKENS + MAX_REQUESTS * 2 * num_drafts
    one.mask_token_id, one.hidden_size = drafter.config.ptd_token_id, drafter.config.hidden_size
    one.draft_tokens = torch.zeros(MAX_REQUESTS, num_drafts, dtype=torch.int64)
    one.arange_np = np.arange(MAX_REQUESTS + 1, dtype=np.int32)
    one.rows = speculator.DraftRows.empty(MAX_REQUESTS, one.max_rows, num_drafts, 1, one.device)
    one.model = Network(drafter, lambda: one.rows)
    one.groups, one.builders, one.attn_groups, one.renews_metadata = [0], [], [[]], with_graphs
    one.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["a"])])
    tables = torch.zeros(MAX_REQUESTS, MAX_LEN // BLOCK, dtype=torch.int32)
    one.block_tables = Tables([tables])
    one.aux_NX = torch.zeros(one.max_rows, drafter.config.fc_input_size)
    one.hidden_MH = torch.zeros(one.max_rows, one.hidden_size)
    one.projected_NH = torch.zeros(1 + one.max_rows, one.hidden_size)
    one.projected_NH[:1] = drafter.project_inputs(drafter.mask_hidden[0])
    one.attended_SA = torch.zeros(MAX_REQUESTS * num_drafts, one.hidden_size)
    one.stream_SH = torch.zeros(MAX_REQUESTS * num_drafts, one.hidden_size)
    one.last_layer = lambda attended_SA, stream_SH: attended_SA
    one.draft_ids_S = torch.zeros(MAX_REQUESTS * num_drafts + 1, dtype=torch.int64)
    one.graphs, one.choices = (Graphs(one), Graphs(one)) if with_graphs else (None, None)
    return one


@pytest.mark.parametrize(("num_drafts", "with_graphs"), [(1, True), (4, False), (4, True)])
def test_drafts_are_the_reference_s(num_drafts: int, with_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside decoding, rejections, requests that come and go, some with K = 0, sequences up to the
    longest, and fewer drafts than K_max ahead."""
    monkeypatch.setattr(speculator, "async_tensor_h2d", lambda array, device: torch.from_numpy(array).to(device))
    monkeypatch.setattr(speculator, "set_forward_context", lambda *args, **kwargs: contextlib.nullcontext())
    drafter = build_drafter(REDUCED, head_tensors(REDUCED))
    one = make_speculator(drafter, num_drafts, with_graphs)
    draw, generator = random.Random(num_drafts), torch.Generator().manual_seed(0)
    width, vocabulary = REDUCED.fc_input_size, REDUCED.vocab_size
    free, live = list(range(MAX_REQUESTS)), []
    num_compared, num_alone = 0, 0
    with torch.inference_mode():
        for _ in range(30):
            new: list[Any] = []
            while free and draw.random() < 0.5:
                place = free.pop()
                length = draw.choice([1, 3, 11, 30])
                prompt = [draw.randrange(vocabulary) for _ in range(length)]
                blocks = [1 + place * (MAX_LEN // BLOCK) + index for index in range(MAX_LEN // BLOCK)]
                one.block_tables.by_place[place] = torch.tensor(blocks)
                max_k, session = draw.choice([0, *[num_drafts] * 4]), DraftSession(drafter)
                params = SimpleNamespace(extra_args={"peagle_k": max_k}, logit_bias=None, min_p=0.0)
                new.append(SimpleNamespace(req_id=str(place), sampling_params=params))
                live.append(SimpleNamespace(place=place, tokens=prompt, computed=0, max_k=max_k, session=session))
            draw.shuffle(live)
            batch, budget = [], MAX_TOKENS
            for request in live:
                left = len(request.tokens) - request.computed
                query = min(left, draw.choice([3, 8, 30])) if left > 1 else 1 + draw.randint(0, num_drafts)
                query = min(query, MAX_LEN - request.computed - 1, budget)
                if query > 0:
                    batch.append((request, query))
                    budget -= query
            ahead = draw.randint(0, num_drafts)
            one.begin_step(SimpleNamespace(scheduled_new_reqs=new, peagle_plan=SchedulerPlan(num_drafts_ahead=ahead)))
            if not batch:
                continue
            columns: dict[str, list[Any]] = {name: [] for name in ("ids", "positions", "sampled", "rejected", "prompt")}
            taps, first = torch.randn(sum(q for _, q in batch), width, generator=generator), [0]
            aux = list(taps.chunk(3, dim=-1))
            if draw.random() < 0.5:  # as full graphs of the target leave them
                aux = [view[: len(taps)].copy_(given) for view, given in zip(one.aux_views(), aux, strict=True)]
            last = torch.zeros(MAX_REQUESTS, 1, dtype=torch.int64)
            prefill = torch.zeros(1, MAX_REQUESTS, dtype=torch.int32)
            expected, one._num_rejected = [], 0
            for row, (request, query) in enumerate(batch):
                context, known = request.computed, request.tokens[request.computed : request.computed + query]
                columns["ids"] += known + [draw.randrange(vocabulary) for _ in range(query - len(known))]
                columns["positions"] += range(context, context + query)
                is_unfinished = context + query < len(request.tokens)
                rejected = 0 if is_unfinished or len(known) > 1 else draw.randint(0, query - 1)
                valid = query - rejected
                if is_unfinished:
                    prefill[0, request.place] = request.tokens[context + query]
                else:
                    request.tokens += columns["ids"][first[-1] + len(known) : first[-1] + valid]
                    request.tokens.append(draw.randrange(vocabulary))
                    last[request.place] = request.tokens[-1]
                columns["sampled"].append(0 if is_unfinished else 1)
                columns["rejected"].append(rejected)
                request.computed = context + valid
                one.block_tables.input_block_tables[0][row] = one.block_tables.by_place[request.place]
                given = torch.tensor(request.tokens[context + 1 : context + valid + 1])
                drafts = request.session.propose(given, taps[first[-1] : first[-1] + valid], num_drafts)
                columns["prompt"].append(len(known) > 1 or is_unfinished or context == 0)
                takes_part = request.max_k > 0 or columns["prompt"][-1]
                one._num_rejected += rejected if takes_part else 0
                num_usable = min(ahead, MAX_LEN - context - valid + 1) if takes_part else 0
                expected.append((drafts.token_ids_K.tolist(), num_usable))
                first.append(first[-1] + query)
            one.model.tables_BC = one.block_tables.input_block_tables[0]
            num_alone += any(request.max_k == 0 for request, _ in batch)
            sampled, rejected_B = (torch.tensor(columns[name]).int() for name in ("sampled", "rejected"))
            given_batch = SimpleNamespace(
                num_reqs=len(batch),
                req_ids=[str(request.place) for request, _ in batch],
                is_prefilling_np=np.array(columns["prompt"]),
                num_tokens=first[-1],
                num_scheduled_tokens=np.diff(first).astype(np.int32),
                query_start_loc=torch.tensor(first, dtype=torch.int32),
                query_start_loc_np=np.array(first, np.int32),
                input_ids=torch.tensor(columns["ids"], dtype=torch.int32),
                positions=torch.tensor(columns["positions"]),
                idx_mapping=torch.tensor([request.place for request, _ in batch]),
                seq_lens_cpu_upper_bound=torch.tensor([request.computed for request, _ in batch]).int() + rejected_B,
            )
            proposed = one.propose(given_batch, {}, {}, taps, aux, sampled, rejected_B, last, prefill, None, None)
            for (wanted, usable), found in zip(expected, proposed.tolist(), strict=True):
                assert found[:usable] == wanted[:usable]
                num_compared += max(0, usable)
            for request in [request for request, _ in batch]:
                if len(request.tokens) >= MAX_LEN - 1 or draw.random() < 0.05:
                    live.remove(request)
                    free.append(request.place)
                    one.drop_requests([str(request.place)])
    assert num_compared > 10 * num_drafts**0.5
    assert num_alone > 2
    assert one.graphs is None or one.graphs.num_packed > 5


@pytest.mark.parametrize("renews", [True, False])
def test_full_graphs_hold_the_renewal_of_metadata_where_attention_has_it(renews: bool) -> None:
    """What a graph holds is what its function does when it is captured, and again at each replay."""
    one, done = make_speculator(build_drafter(REDUCED, head_tensors(REDUCED)), 4, with_graphs=False), []
    one.renews_metadata, one.attn_groups = renews, [[SimpleNamespace(update_draft_decode_metadata=done.append)]]
    one._attention, one._pass = lambda *_, **__: ("metadata", "slots"), lambda *given: done.append(given[2:4])
    one.block_tables.get_dummy_block_tables = lambda count: None
    sizes = dict(num_tokens=16, num_reqs=2, uniform_token_count=8, max_query_len=None)
    draft = one._prepare_capture(SimpleNamespace(**sizes, cg_mode=speculator.CUDAGraphMode.FULL), False)
    for _ in range(2):
        draft(speculator.CUDAGraphMode.NONE)
    assert done == [*(["metadata"] if renews else []), ("metadata", "slots")] * 2
    done.clear()
    piecewise = SimpleNamespace(num_tokens=16, num_reqs=None, uniform_token_count=None, cg_mode="piecewise")
    one._prepare_capture(piecewise, False)(speculator.CUDAGraphMode.PIECEWISE)
    assert done == [(None, None)]
