"""What vLLM runs in the place of the drafter's kernels, on the cases of `benchmarks.kernels`, which starts this.

    python -m benchmarks.preparation --out FILE.json [--quick]

The drafter's `set_inputs_first_pass` is called on buffers of vLLM's own sizes without building an engine around it: it
reads nothing else of the engine. The hidden states go in reduced already, as vLLM has them at that point. Its pass has
a row for every rejected token as well.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from benchmarks.kernels import BLOCK_SIZE, HIDDEN, MASK_TOKEN, MAX_DEPTH, SCALE, Attention, Preparation, cases, timed

MAX_MODEL_LEN = 32768


def proposer(num_rows: int, device: str) -> Any:
    """vLLM's drafter with the attributes that preparing a parallel draft reads (of vLLM 0.26 and 0.29)."""
    made = object.__new__(SpecDecodeBaseProposer)
    rows: dict[str, Any] = dict(device=device)
    made.__dict__.update(
        device=torch.device(device),
        use_heterogeneous_vocab=False,
        needs_extra_input_slots=True,
        pass_hidden_states_to_model=True,
        extra_slots_per_request=MAX_DEPTH,
        net_num_new_slots_per_request=MAX_DEPTH - 1,
        parallel_drafting_token_id=MASK_TOKEN,
        parallel_drafting_hidden_state_tensor=torch.randn(HIDDEN, dtype=torch.bfloat16, **rows),
        input_ids=torch.zeros(num_rows, dtype=torch.int32, **rows),
        positions=torch.zeros(num_rows, dtype=torch.int64, **rows),
        hidden_states=torch.zeros(num_rows, HIDDEN, dtype=torch.bfloat16, **rows),
        is_rejected_token_mask=torch.zeros(num_rows, dtype=torch.bool, **rows),
        is_masked_token_mask=torch.zeros(num_rows, dtype=torch.bool, **rows),
        arange=torch.arange(num_rows, dtype=torch.int32, **rows),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
    )
    return made


def prepare(case: Preparation, device: str) -> dict[str, float]:
    given, batch = case.tensors(device), len(case.start)
    num_rows = sum(case.scheduled)
    drafter = proposer(num_rows + batch * MAX_DEPTH, device)
    query_start_cpu = torch.tensor([0, *case.scheduled]).cumsum(0).int()
    start_B, scheduled_B = given["start_B"], torch.tensor(case.scheduled, dtype=torch.int32, device=device)
    positions_R = torch.cat(
        [torch.arange(start, start + rows) for start, rows in zip(case.start, case.scheduled, strict=True)]
    ).to(device)
    metadata = CommonAttentionMetadata(
        query_start_loc=query_start_cpu.to(device),
        query_start_loc_cpu=query_start_cpu,
        seq_lens=start_B + scheduled_B,
        num_reqs=batch,
        num_actual_tokens=num_rows,
        max_query_len=max(case.scheduled),
        max_seq_len=max(case.start) + max(case.scheduled),
        block_table_tensor=given["block_table_BN"],
        slot_mapping=torch.zeros(num_rows, dtype=torch.int64, device=device),
    )
    rejected_B = scheduled_B - given["num_valid_B"]
    next_B = torch.arange(batch, dtype=torch.int32, device=device)

    def call() -> None:
        drafter.set_inputs_first_pass(
            target_token_ids=given["next_tokens_R"],
            next_token_ids=next_B,
            target_positions=positions_R,
            target_hidden_states=given["payload_RH"],
            token_indices_to_sample=None,
            cad=metadata,
            num_rejected_tokens_gpu=rejected_B,
        )

    return timed([call], device)


def attend(case: Attention, device: str) -> dict[str, float]:
    version = get_flash_attn_version()
    if version is None:
        raise RuntimeError("vLLM finds no FlashAttention for this GPU")

    def call(q_NAD: Tensor, k: Tensor, v: Tensor, table: Tensor, first_row: Tensor, context: Tensor) -> None:
        flash_attn_varlen_func(
            q=q_NAD, k=k, v=v, cu_seqlens_q=first_row, max_seqlen_q=case.rows, seqused_k=context,
            max_seqlen_k=case.context, softmax_scale=SCALE, causal=True, block_table=table, fa_version=version,
        )  # fmt: skip

    turns = [(q, k, v, table, first_row, context) for q, k, v, table, first_row, _, context, _ in case.tensors(device)]
    times = timed([lambda turn=turn: call(*turn) for turn in turns], device)  # type: ignore[misc]
    return {**times, "gb_per_s": round(case.kv_bytes / times["device_us"] / 1e3, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="a few small cases")
    options = parser.parse_args()
    prepared, attentions = cases(options.quick)
    document = {
        "preparation": {case.name: prepare(case, "cuda") for case in prepared},
        "attention": {case.name: attend(case, "cuda") for case in attentions},
        "flash_attention_version": get_flash_attn_version(),
    }
    options.out.write_text(json.dumps(document) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
