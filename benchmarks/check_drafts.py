"""Checks P-EAGLE on vLLM's V2 runner, on a GPU: equal output, and drafts equal to `peagle.draft`.

    python -m benchmarks.check_drafts --out FILE [--backend TRITON_ATTN] [--dtype float32] [--qwen]
    python -m benchmarks.check_drafts --out FILE --max-model-len 6000 --phase plain (then none)
    python -m benchmarks.check_drafts --out FILE --sampled --phase plain (then none, drafts)

A small target and a small head of random weights, prompts of mixed lengths in chunks, a K of its own for each request,
some sequences that end at `max_model_len`, and a cache so small that requests are preempted. Engines run in turn, by
`--phase`: plain is stock vLLM without drafts, none our worker without drafts; drafts is our worker with a drafter, but
verifies tokens that this program makes up of the first one's output: the right ones up to a random place, then wrong
ones, so that everything between no and all drafts is accepted. Their output must be the first one's. What the drafter
really proposed is recorded with all that it read, and compared with the reference in float32. Drafts for which a pass
had no room are counted and not compared: nobody expects them to be accepted.

With `--sampled` requests have a seed and the parameters of `SAMPLING`. Their output must be the first engine's as well,
token for token: K and the drafts do not change it.

The phase ties needs no GPU: greedy outputs by Transformers, and at each place in the output the request whose first two
tokens are nearest. Where outputs part at such a place, rounding decides.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from peagle.provenance import conditions

NUM_DRAFTS, CHUNK, NUM_REQUESTS, MAX_NUM_SEQS, NUM_OUTPUT = 5, 256, 48, 36, 48
USUAL_LEN, PRESSED_BLOCKS = 400, 300  # of 16 tokens: 36 sequences of 400 need 900
ROUNDS: tuple[tuple[int | None, ...], ...] = ((None, 0, 1, 3, NUM_DRAFTS), (0, 1), (1, 3), (0,))
"""K of the requests that run together."""
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2, "top_p": 0.95},
    {"temperature": 0.7, "allowed_token_ids": list(range(2, 402))},
    {"temperature": 0.0},
)
"""In turn."""
TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 768,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


class Recorder:
    """vLLM's `worker_extension_cls`: what the drafter read and proposed, and drafts that are verified in its place."""

    model_runner: Any

    def start_recording(self, oracle: dict[str, list[int]] | None) -> None:
        """From now on, record. oracle: a request's whole output, whose tokens stand in for the drafts."""
        from peagle.vllm import speculator as passes

        speculator = self.model_runner.speculator
        self.recorded: list[dict[str, Any]] = []
        write_rows, laid_out = passes.write_rows, {}

        def noting(target: Any, table: Any, out: Any, **kwargs: Any) -> None:
            write_rows(target, table, out, **kwargs)
            laid_out.update(kwargs, num_requests=len(target.place_B))

        def made_by_request() -> list[int]:
            """Drafts of each request of the pass that have a row of their own."""
            depth, count = laid_out["num_drafts"], laid_out["num_requests"]
            sampled = speculator.rows.sample_rows_BD[: count * depth].view(count, depth)
            return [len(set(row)) for row in sampled.tolist()]

        passes.write_rows = noting
        propose, wrong = speculator.propose, random.Random(0)

        def recording(batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            members, num_ahead = speculator._members(batch), speculator._num_ahead
            taps, num_sampled, num_rejected, last_sampled, next_prefill = args[3:8]
            count, num_rows = batch.num_reqs, batch.num_tokens
            # A pass of some of the requests moves their rows together, in the buffer where the target left them.
            given_taps = torch.cat([tap[:num_rows] for tap in taps], dim=-1)
            drafts = propose(batch, *args, **kwargs)
            if kwargs.get("dummy_run") or batch.req_ids[0].startswith("_"):
                return drafts
            step = {
                "req_ids": list(batch.req_ids),
                "first": batch.query_start_loc[: count + 1].tolist(),
                "tokens": batch.input_ids[:num_rows].tolist(),
                "positions": batch.positions[:num_rows].tolist(),
                "num_sampled": num_sampled.tolist(),
                "num_rejected": num_rejected.tolist(),
                "newest": last_sampled[batch.idx_mapping].view(-1).tolist(),
                "next_prompt": next_prefill.view(-1)[batch.idx_mapping].tolist(),
                "taps": given_taps.float().cpu(),
                "drafts": drafts.tolist(),
                "members": list(range(count)) if members is None else members.tolist(),
                "num_ahead": num_ahead,
                "num_made": made_by_request() if members is None or len(members) else [],
            }
            self.recorded.append(step)
            if oracle is None:
                return drafts
            made_up = drafts.clone()
            for row, name in enumerate(step["req_ids"]):
                output = oracle[name.split("-")[0]]
                total = self.model_runner.req_states.total_len.gpu[batch.idx_mapping[row]].item()
                prompt = int(self.model_runner.req_states.prompt_len.np[batch.idx_mapping_np[row]])
                right = wrong.randint(0, NUM_DRAFTS)
                for depth in range(NUM_DRAFTS):
                    place = total - prompt + depth
                    known = 0 <= place < len(output) and depth < right
                    made_up[row, depth] = output[place] if known else wrong.randrange(2048)
            return made_up

        speculator.propose = recording

    def take_recorded(self, path: str) -> int:
        """Write what was recorded; the number of steps."""
        torch.save(self.recorded, path)
        return len(self.recorded)

    def _graphs(self) -> dict[str, Any]:
        runner = self.model_runner
        found = {"target": runner.cudagraph_manager}
        if runner.speculator is not None:
            found |= {"drafter": runner.speculator.graphs, "choice": runner.speculator.choices}
        return found

    def count_replays(self) -> None:
        """From now on, count the full graphs that are replayed, by what they are planned for."""
        self.num_replays: Counter[str] = Counter()
        for name, manager in self._graphs().items():

            def counted(desc: Any, name: str = name, run: Any = manager.run_fullgraph) -> Any:
                is_any = desc.uniform_token_count is None and (desc.max_query_len or 1 << 30) > 1 + NUM_DRAFTS
                self.num_replays[f"{name}, {'any split' if is_any else 'decoding'}, {desc.num_tokens} rows"] += 1
                return run(desc)

            manager.run_fullgraph = counted

    def graph_kinds(self) -> dict[str, Any]:
        """Captured graphs of target and drafter by mode, how often full ones were replayed, and whether the target's
        renew their attention's metadata."""
        captured = {
            name: {mode.name: len(descs) for mode, descs in manager._capture_descs.items()}
            for name, manager in self._graphs().items()
        }
        renews = getattr(self.model_runner.model_state, "graphs_renew_metadata", False)
        return {**captured, "target_renews_metadata": renews, "num_replays": dict(sorted(self.num_replays.items()))}


def write_target(folder: Path, dtype: torch.dtype) -> Path:
    """Random weights of a size that keeps hidden states apart from token to token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TARGET, initializer_range=TARGET["hidden_size"] ** -0.5))
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    model.to(dtype).save_pretrained(folder)
    return folder


def write_head(folder: Path, dtype: torch.dtype, is_qwen: bool) -> Path:
    """A P-EAGLE head of four layers, with a draft vocabulary that is every fourth token. is_qwen: of Qwen 3's layers,
    and with an embedding table of its own."""
    from peagle.checkpoint import expected_tensors, save_head
    from peagle.config import DrafterConfig

    config = DrafterConfig.for_target(
        TARGET, num_layers=4, draft_vocab_size=512, ptd_token_id=2047, num_depths=NUM_DRAFTS, qk_norm=is_qwen
    )
    generator, tensors = torch.Generator().manual_seed(1), {}
    for name, expected in expected_tensors(config).items():
        if name == "mask_embedding" or (name == "embed_tokens.weight" and not is_qwen):
            continue
        if name == "d2t":
            tensors[name] = 3 * torch.arange(512)
        elif name == "t2d":
            tensors[name] = torch.arange(2048) % 4 == 0
        elif "norm" in name:
            tensors[name] = torch.ones(expected.shape)
        else:
            tensors[name] = torch.randn(expected.shape, generator=generator) * expected.shape[-1] ** -0.5
    tensors["mask_hidden"] = torch.randn(tensors["mask_hidden"].shape, generator=generator)
    floats = {name: tensor.to(dtype) for name, tensor in tensors.items() if tensor.is_floating_point()}
    return save_head(folder, config, tensors | floats)


def engine(args: argparse.Namespace) -> Any:
    from vllm import LLM

    from peagle.vllm import compat
    from peagle.vllm.engine_settings import ASYNC_SCHEDULER, V2_WORKER, capture_sizes

    compat.allow_v2()
    kwargs: dict[str, Any] = {
        "model": str(args.folder / "target"),
        "skip_tokenizer_init": True,
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": CHUNK,
        "enable_prefix_caching": False,
        "attention_backend": args.backend,
        "num_gpu_blocks_override": PRESSED_BLOCKS * args.max_model_len // USUAL_LEN,
        "gpu_memory_utilization": 0.15,
        "kv_cache_memory_bytes": 1 << 30,
        "async_scheduling": True,
        "cudagraph_capture_sizes": capture_sizes(CHUNK),
    }
    if args.phase != "plain":
        kwargs |= {
            "scheduler_cls": ASYNC_SCHEDULER,
            "worker_cls": V2_WORKER,
            "worker_extension_cls": "benchmarks.check_drafts.Recorder",
        }
    if args.phase == "drafts":
        speculative = {"method": "eagle3", "model": str(args.head), "num_speculative_tokens": NUM_DRAFTS}
        kwargs["speculative_config"] = speculative | {"parallel_drafting": True}
    return LLM(**kwargs)


def rounds(max_model_len: int) -> Iterator[list[tuple[list[int], int | None]]]:
    """Prompt and K of each request, round by round."""
    draw = random.Random(3)
    lengths = [1, 2, 7, *(usual * max_model_len // USUAL_LEN for usual in (60, 150, 300))]
    for depths in ROUNDS:
        requests = []
        for index in range(NUM_REQUESTS):
            length = max_model_len - NUM_OUTPUT // 2 if index % 6 == 5 else draw.choice(lengths)
            prompt = [draw.randrange(2, 2000) for _ in range(length)]
            requests.append((prompt, draw.choice(depths)))
        yield requests


def generate(llm: Any, args: argparse.Namespace) -> list[list[int]]:
    from vllm import SamplingParams, TokensPrompt

    tokens = []
    common: dict[str, Any] = {"ignore_eos": True, "max_tokens": NUM_OUTPUT, "detokenize": False}
    for requests in rounds(args.max_model_len):
        prompts, params = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in requests], []
        for index, (_, depth) in enumerate(requests):
            extra = {"peagle_k": depth} if args.phase == "drafts" and depth is not None else None
            sampling = {"seed": index, **SAMPLING[index % len(SAMPLING)]} if args.sampled else {"temperature": 0.0}
            params.append(SamplingParams(**common, **sampling, extra_args=extra))
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens += [list(output.outputs[0].token_ids) for output in outputs]
    return tokens


@torch.inference_mode()
def find_ties(target_dir: Path, max_model_len: int) -> list[dict[str, Any]]:
    """By place in the output: round and request with the smallest gap between the two largest logits, in standard
    deviations of the logits, and how many places of all have smaller ones."""
    from transformers import LlamaForCausalLM

    model, gaps = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval(), []
    for number, requests in enumerate(rounds(max_model_len)):
        for index, (prompt, _) in enumerate(requests):
            rows, cache = torch.tensor([prompt]), None
            for place in range(min(NUM_OUTPUT, max_model_len - len(prompt))):
                found = model(rows, past_key_values=cache, use_cache=True)
                logits, cache = found.logits[0, -1], found.past_key_values
                best = logits.topk(2)
                gaps.append((float(best.values.diff().abs() / logits.std()), number, index, place))
                rows = best.indices[:1][None]
    smallest: dict[int, dict[str, Any]] = {}
    for rank, (gap, number, index, place) in enumerate(sorted(gaps)):
        smallest.setdefault(place, {"place": place, "gap": gap, "round": number, "request": index, "num_smaller": rank})
    return [smallest[place] for place in sorted(smallest)]


def compare(steps: list[dict[str, Any]], head_dir: Path, target_dir: Path, max_model_len: int) -> dict[str, Any]:
    """Drafts of every recorded step against the reference, which is given the same hidden states."""
    from peagle.checkpoint import build_drafter, load_head
    from peagle.draft import DraftSession
    from peagle.heads import target_table

    torch.set_num_threads(max(1, min(8, max_model_len // 1000)))  # small operations at the usual length
    config, tensors = load_head(head_dir)
    drafter = build_drafter(config, tensors, embed_VH=target_table(target_dir, "embed_tokens.weight").float())
    sessions: dict[str, DraftSession] = {}
    num_equal, num_all, num_left_out, by_depth, gaps, kinds = 0, 0, 0, Counter[int](), [], Counter[str]()
    for step in steps:
        for row, num_made in zip(step["members"], step["num_made"], strict=True):
            name = step["req_ids"][row]
            start, end = step["first"][row : row + 2]
            context, valid = step["positions"][start], end - start - step["num_rejected"][row]
            newest = step["newest"][row] if step["num_sampled"][row] else step["next_prompt"][row]
            tokens = [*step["tokens"][start + 1 : start + valid], newest]
            session = sessions.setdefault(name, DraftSession(drafter))
            kinds["first" if context == 0 and not session.num_rows else "resumed" if context == 0 else "later"] += 1
            session.cache.truncate(context)
            wanted = min(step["num_ahead"], max_model_len - context - valid + 1)
            found = session.propose(torch.tensor(tokens), step["taps"][start : start + valid], NUM_DRAFTS)
            num_left_out += max(0, wanted - num_made)
            wanted = min(wanted, num_made)
            for depth in range(wanted):
                expected, given = int(found.token_ids_K[depth]), step["drafts"][row][depth]
                num_all += 1
                if expected == given:
                    num_equal += 1
                    continue
                by_depth[depth] += 1
                logits = found.logits_KV[depth]
                place = (drafter.target_ids == given).nonzero()
                gap = float((logits.max() - logits[place[0, 0]]) / logits.std()) if len(place) else float("inf")
                gaps.append(round(gap, 4))
    return {
        "num_drafts": num_all,
        "num_left_out": num_left_out,
        "equal_share": num_equal / max(1, num_all),
        "unequal_by_depth": dict(by_depth),
        "largest_gaps_in_std": sorted(gaps, reverse=True)[:10],
        "rows_of_requests": dict(kinds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/check"))
    parser.add_argument("--backend", default="TRITON_ATTN")
    parser.add_argument("--sampled", action="store_true", help="with seeds, instead of greedy")
    parser.add_argument("--qwen", action="store_true", help="a head of Qwen 3's layers with its own embedding table")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-model-len", type=int, default=USUAL_LEN, help="prompts and cache grow with it")
    parser.add_argument("--phase", choices=("plain", "none", "drafts", "ties"), required=True)
    args = parser.parse_args()
    args.head = args.folder / ("head-qwen" if args.qwen else "head")
    # vLLM forks its engine, which hangs in the first operation that torch would spread over this process's threads.
    torch.set_num_threads(1)
    kind = "-sampled" * args.sampled
    plain = args.folder / f"plain-{args.dtype}-{args.backend}-{args.max_model_len}{kind}.json"
    if args.phase == "plain":
        write_target(args.folder / "target", getattr(torch, args.dtype))
        plain.write_text(json.dumps(generate(engine(args), args)))
        return 0
    if args.phase == "ties":
        ties = find_ties(write_target(args.folder / "target", torch.float32), args.max_model_len)
        args.out.write_text(json.dumps({"ties": ties, "conditions": conditions()}, indent=1))
        return 0
    expected = json.loads(plain.read_text())
    write_head(args.head, getattr(torch, args.dtype), args.qwen)
    llm = engine(args)
    llm.collective_rpc("count_replays")
    if args.phase == "drafts":
        llm.collective_rpc("start_recording", args=({str(index): one for index, one in enumerate(expected)},))
    outputs = generate(llm, args)
    first_wrong = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        for one, other in zip(outputs, expected, strict=True)
    ]
    report: dict[str, Any] = {
        **{name: value for name, value in vars(args).items() if name not in ("out", "folder", "head")},
        "num_equal_outputs": sum(one == other for one, other in zip(outputs, expected, strict=True)),
        "num_outputs": len(outputs),
        "first_wrong_token": [place for place in first_wrong if place is not None],
        "graphs": llm.collective_rpc("graph_kinds")[0],
    }
    if args.phase == "drafts":
        path = str(args.folder / f"recorded-{args.out.stem}.pt")
        report["num_steps"] = llm.collective_rpc("take_recorded", args=(path,))[0]
        report |= judge(torch.load(path, weights_only=False), args.head, args.folder / "target", args.max_model_len)
    args.out.write_text(json.dumps(report | {"conditions": conditions()}, indent=1))
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 0


def judge(steps: list[dict[str, Any]], head_dir: Path, target_dir: Path, max_model_len: int) -> dict[str, Any]:
    """What the recorded steps were, and their drafts against the reference."""
    accepted = Counter(num_sampled for step in steps for num_sampled in step["num_sampled"])
    return {
        "drafts": compare(steps, head_dir, target_dir, max_model_len),
        "tokens_a_step": dict(sorted(accepted.items())),
        "steps_by_drafts_ahead": dict(sorted(Counter(step["num_ahead"] for step in steps).items())),
        "steps_with_too_few_rows": sum(min(step["num_made"], default=NUM_DRAFTS) < step["num_ahead"] for step in steps),
        "steps_with_requests_left_out": sum(len(step["members"]) < len(step["req_ids"]) for step in steps),
    }


if __name__ == "__main__":
    raise SystemExit(main())
