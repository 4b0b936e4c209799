"""Acceptance of a head on answers of its target: AL and acceptance rates for every K from one pass (no decoding).

    peagle evaluate HEAD DIR [DIR2 ...] --target TARGET [--against HEAD2] [--out DIR]

`replay` makes drafts at all positions of an answer at once, on the true prefix. For each anchor it counts the leading
drafts that are the answer's own tokens (`accepted_N`, at most K_max). Decoding at any K visits only some of these
anchors: it accepts min(accepted, K) tokens, emits one more, and goes on after that one (`walk`). So one run at K_max
gives every K, and every policy that changes K on the way. A folder of answers holds answers at one temperature, which
its manifest.json names; `peagle generate --prompts` writes such folders.

AL = answer tokens / steps, bonus token counted, pooled over answers (as in arXiv 2602.01469, section 5.1, and vLLM).
The first token of an answer comes from the prompt's pass and counts for none. The acceptance rate S_i is the share of
steps whose first i drafts were all accepted. Intervals are 95% percentiles of a bootstrap over answers, because tokens
of one answer are not independent; with a handful of answers they are too narrow.

Why a walk over a finished text is right. The head drafts the same tokens whatever came after the prefix: vLLM takes
the most likely ones (`draft_sample_method="greedy"`, its default, at any temperature). Greedy decoding accepts a draft
exactly if it is the answer's next token. So does decoding at a temperature: vLLM's rejection sampler accepts draft d
with probability p(d), p being the target's distribution, and otherwise samples from p with d left out. The token that
comes out is d exactly if d was accepted, and its distribution is p, that of an answer sampled without drafts.

Exact but for two things: the last step of an answer is not credited past its end, and in bfloat16 the target's most
likely token may differ between batch shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peagle.checkpoint import load_head
from peagle.config import DrafterConfig, check_head_fits, read_json, read_target_config
from peagle.heads import head_directory
from peagle.model import Drafter
from peagle.provenance import conditions
from peagle.schema import type_problems
from peagle.train.cod import next_tokens, row_inputs
from peagle.train.data import Batch, Conversations, PackedBatches, check_data_fits, distinct_share, pack
from peagle.train.passes import ChainAttention
from peagle.train.plan import spread, target_bytes
from peagle.train.target import Target

PACK_TOKENS = 2048
"""Tokens of a sequence into which answers are packed; a longer answer is a sequence of its own."""
LOGIT_ROWS = 4096
LOOPING = "looping"
RATIO_DEPTHS = (3, 5, 7)
NUM_RESAMPLES = 500
OTHER_BYTES = 4 << 30
"""What evaluation takes of a GPU beside the target, roughly."""
PERCENTILES = (2.5, 97.5)


def walk(accepted_N: np.ndarray, num_draft_tokens: int) -> np.ndarray:
    """Tokens accepted in each step of decoding one answer at K = num_draft_tokens."""
    accepted = np.minimum(accepted_N, num_draft_tokens).tolist()
    steps, anchor = [], 0
    while anchor < len(accepted):
        steps.append(accepted[anchor])
        anchor += accepted[anchor] + 1
    return np.array(steps, dtype=np.int64)


@dataclasses.dataclass(frozen=True)
class AnswerCounts:
    """Counts of several answers. num_tokens [answers]: answer tokens but the first; num_steps [answers, K_max]:
    decoding steps at K = 1..K_max; num_accepting [answers, K_max]: steps at K_max whose first 1..K_max drafts were all
    accepted.
    """

    num_tokens: np.ndarray
    num_steps: np.ndarray
    num_accepting: np.ndarray

    @classmethod
    def from_accepted(cls, accepted: Sequence[np.ndarray], num_depths: int) -> AnswerCounts:
        """accepted: `accepted_N` of each answer."""
        num_steps = np.zeros((len(accepted), num_depths), np.int64)
        num_accepting = np.zeros_like(num_steps)
        for answer, accepted_N in enumerate(accepted):
            for k in range(1, num_depths + 1):
                steps = walk(accepted_N, k)
                num_steps[answer, k - 1] = len(steps)
            num_accepting[answer] = (steps[:, None] > np.arange(num_depths)).sum(axis=0)
        return cls(np.array([len(accepted_N) for accepted_N in accepted], np.int64), num_steps, num_accepting)

    def select(self, chosen: np.ndarray) -> AnswerCounts:
        return AnswerCounts(self.num_tokens[chosen], self.num_steps[chosen], self.num_accepting[chosen])


def resamples(num_answers: int) -> np.ndarray:
    """How often each answer is drawn in each resample, [resamples, answers]; the same for equal arguments."""
    return np.random.default_rng(0).multinomial(num_answers, np.full(num_answers, 1 / num_answers), size=NUM_RESAMPLES)


def interval(values: np.ndarray) -> list[list[float]]:
    """[low, high] of each column over the resamples."""
    return np.percentile(values, PERCENTILES, axis=0).T.round(4).tolist()


def figures(counts: AnswerCounts) -> dict[str, Any]:
    """AL for K = 1..K_max and acceptance rates at K_max of a group of answers, 95% intervals (none for one answer)."""
    num_answers, num_depths = counts.num_steps.shape
    names = [str(k) for k in range(1, num_depths + 1)]
    steps_by_k = counts.num_steps.sum(axis=0)
    found: dict[str, Any] = {
        "num_answers": num_answers,
        "num_tokens": int(counts.num_tokens.sum()),
        "acceptance_length": dict(zip(names, (counts.num_tokens.sum() / steps_by_k).round(4).tolist(), strict=True)),
        "acceptance_rates": (counts.num_accepting.sum(axis=0) / steps_by_k[-1]).round(4).tolist(),
    }
    if num_answers > 1:
        weights = resamples(num_answers)
        steps = weights @ counts.num_steps
        lengths = interval((weights @ counts.num_tokens)[:, None] / steps)
        found["acceptance_length_95"] = dict(zip(names, lengths, strict=True))
        found["acceptance_rates_95"] = interval((weights @ counts.num_accepting) / steps[:, -1:])
    return found


def ratios(ours: AnswerCounts, theirs: AnswerCounts, depths: Sequence[int]) -> dict[str, Any]:
    """AL of one head relative to another's on the same answers at each K, with 95% intervals (paired bootstrap)."""
    columns = [k - 1 for k in depths]
    ours_steps, theirs_steps = ours.num_steps[:, columns], theirs.num_steps[:, columns]
    # The tokens are the same, so a ratio of lengths is that of steps the other way round.
    found: dict[str, Any] = {"num_answers": len(ours_steps)}
    values = (theirs_steps.sum(axis=0) / ours_steps.sum(axis=0)).round(4).tolist()
    found["ratio"] = {str(k): value for k, value in zip(depths, values, strict=True)}
    if len(ours_steps) > 1:
        weights = resamples(len(ours_steps))
        bounds = interval((weights @ theirs_steps) / (weights @ ours_steps))
        found["ratio_95"] = {str(k): pair for k, pair in zip(depths, bounds, strict=True)}
    return found


def members(groups: Sequence[Sequence[str]]) -> dict[str, np.ndarray]:
    """Indices of the answers in each group, groups in alphabetical order; groups: those of each answer."""
    found: dict[str, list[int]] = {}
    for index, names in enumerate(groups):
        for name in names:
            found.setdefault(name, []).append(index)
    return {name: np.array(found[name]) for name in sorted(found)}


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a head would have accepted: accepted_N of each answer walked, and which answers these are."""

    accepted: list[np.ndarray]
    walked: list[int]
    num_depths: int

    @functools.cached_property
    def counts(self) -> AnswerCounts:
        return AnswerCounts.from_accepted(self.accepted, self.num_depths)


@torch.no_grad()
def replay(drafter: Drafter, target: Target, data: Conversations, num_depths: int | None = None) -> Replay:
    """Drafts at every anchor of every answer of two tokens or more: the first one comes from the prompt's pass.

    num_depths: K_max, by default the head's own. Raises ValueError for a K_max that a P-EAGLE head was not trained for.
    """
    trained = drafter.config.max_depths
    num_depths = num_depths or drafter.config.num_depths
    if drafter.config.is_parallel and num_depths > trained:
        raise ValueError(f"K_max = {num_depths}: the head was trained to draft {trained} tokens in a pass")
    walked = np.flatnonzero(data.lengths - data.prompt_lengths >= 2).tolist()
    found: dict[int, np.ndarray] = {}
    for indices, batch in sequences(data, walked):
        accepted_N = _accepted(drafter, target, batch.to(target.device), num_depths).cpu().numpy().astype(np.uint8)
        found |= {index: accepted_N[anchors] for index, anchors in answer_anchors(data, indices).items()}
    return Replay([found[index] for index in walked], walked, num_depths)


def sequences(data: Conversations, indices: list[int]) -> Iterator[tuple[list[int], Batch]]:
    """Packed sequences without padding, and the conversations in them."""
    if not indices:
        return
    packer = PackedBatches(data, num_sequences=1, max_tokens=max(PACK_TOKENS, int(data.lengths.max())), seed=0)
    order = np.array(indices)
    order = order[np.argsort(-data.lengths[order], kind="stable")]
    is_long = data.lengths[order] > PACK_TOKENS
    groups = [[int(index)] for index in order[is_long]]
    for group in [*groups, *pack(data.lengths, PACK_TOKENS, order[~is_long])]:
        whole, num_tokens = packer.assemble([group]), int(data.lengths[group].sum())
        yield group, Batch(**{name: value[:, :num_tokens] for name, value in vars(whole).items()})


def answer_anchors(data: Conversations, indices: list[int]) -> dict[int, slice]:
    """Anchors whose first draft is a token of the answer, by conversation of a packed sequence."""
    ends = data.lengths[indices].cumsum()
    starts = ends - data.lengths[indices] + data.prompt_lengths[indices]
    spans = zip(indices, starts.tolist(), ends.tolist(), strict=True)
    return {index: slice(start - 1, end - 2) for index, start, end in spans}


def _accepted(drafter: Drafter, target: Target, batch: Batch, num_depths: int) -> Tensor:
    """How many leading drafts of each anchor [N] are the document's own tokens.

    Offset after offset from all anchors at once, as `peagle.train.passes` unrolls: attention over the anchors' own rows
    is the same for every offset, and a mask over all rows, which grows with (N * K) ** 2, is never needed. A chain ends
    at its first wrong draft; until then its drafts are the true tokens, so EAGLE-3's rows can read those.
    """
    config, document_BN = drafter.config, batch.document_BN
    aux_BNX, _ = target.states(batch.tokens_BN, batch.position_BN, config.aux_layer_ids, eager=True)
    last = batch.tokens_BN.shape[1] - 1
    anchor_R = torch.arange(last + 1, device=target.device)
    is_compared_R = batch.answer_BN[0].roll(-1)  # the first draft, with the answer's second token
    accepted_N = torch.zeros_like(anchor_R)
    attend = ChainAttention(document_BN)
    with torch.autocast(target.device.type, torch.bfloat16, enabled=target.device.type == "cuda"):
        embeds_BMH, hidden_BMH = row_inputs(drafter, next_tokens(batch.tokens_BN), aux_BNX, 1)
        embeds_BRH, hidden_BRH = embeds_BMH[:, : last + 1], hidden_BMH[:, : last + 1]
        for offset in range(num_depths):
            position_BR = batch.position_BN[:, anchor_R] + offset
            normed_BRH, stream_BRH = drafter(embeds_BRH, hidden_BRH, position_BR, attend)
            label_R = (anchor_R + offset + 2).clamp_max(last)
            is_inside_R = (anchor_R + offset + 2 <= last) & (document_BN[0, label_R] == document_BN[0, anchor_R])
            index_R = (is_compared_R & is_inside_R).nonzero().squeeze(1)
            best = [drafter.logits(part_RH).argmax(-1) for part_RH in normed_BRH[0, index_R].split(LOGIT_ROWS)]
            index_R = index_R[drafter.target_ids[torch.cat(best)] == batch.tokens_BN[0, label_R[index_R]]]
            if not len(index_R):
                break
            anchor_R, is_compared_R = anchor_R[index_R], torch.ones_like(index_R, dtype=torch.bool)
            accepted_N[anchor_R] += 1
            attend.keep(index_R, anchor_R)
            if not config.is_parallel:
                embeds_BRH, hidden_BRH = drafter.embed(batch.tokens_BN[:, label_R[index_R]]), stream_BRH[:, index_R]
            else:
                embeds_BRH, hidden_BRH = (x[:, -1:].expand(-1, len(index_R), -1) for x in (embeds_BMH, hidden_BMH))
    return accepted_N


@dataclasses.dataclass(frozen=True)
class Answers:
    """One folder's answers; categories: one each."""

    data: Conversations
    categories: list[str]
    temperature: float = 0.0


def group_names(data: Conversations, categories: list[str]) -> list[list[str]]:
    """Groups that each conversation counts in: all, its category, looping or not, and the category's looping or not."""
    names = []
    for (tokens, prompt), category in zip(data.documents(), categories, strict=True):
        kind = LOOPING if distinct_share(tokens[prompt:].tolist()) < 0.5 else f"non-{LOOPING}"
        names.append(["all", category, kind, f"{category} {kind}"])
    return names


def check_categories(folder: str | Path, categories: list[str], data: Conversations) -> None:
    """Raises ValueError where these are not one for each conversation of a folder."""
    if len(categories) != len(data):
        raise ValueError(
            f"{folder}: manifest.json names {len(categories) or 'no'} categories for {len(data)} conversations"
        )


def load_answers(folder: str | Path, max_per_category: int | None = None) -> Answers:
    """Answers that `peagle generate --prompts` wrote, or the first `max_per_category` of each category.

    Raises ValueError when manifest.json has no categories, or not one for each answer, or a temperature that is none.
    """
    data = Conversations.load(folder)
    path = Path(folder) / "manifest.json"
    manifest = read_json(path, "data")
    problems = type_problems("categories", categories := manifest.get("categories"), list[str] | None)
    problems += type_problems("temperature", manifest.get("temperature"), float | None)
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}: make the answers again with `peagle generate --prompts`")
    check_categories(folder, categories := categories or [], data)
    if max_per_category is not None:
        first = [found[:max_per_category] for found in members([[category] for category in categories]).values()]
        chosen = sorted(np.concatenate(first).tolist())
        data, categories = data.select(chosen), [categories[index] for index in chosen]
    return Answers(data, categories, float(manifest.get("temperature") or 0.0))


def evaluate(
    drafters: Sequence[Drafter], target: Target, answers: Answers, num_depths: int | None = None
) -> dict[str, Any]:
    """Figures of one folder's answers at K_max = `num_depths` (`replay`), by group.

    Returns {"temperature", "groups": {group: {"num_answers", "num_tokens", "acceptance_length": {K: AL},
    "acceptance_rates": [S_1..], both with "_95" for intervals}}}, and of a second drafter its groups ("against") and
    the "ratios" of AL.
    """
    names = group_names(answers.data, answers.categories)
    found = [replay(drafter, target, answers.data, num_depths) for drafter in drafters]
    groups = members([names[index] for index in found[0].walked])
    tables = [{name: figures(one.counts.select(chosen)) for name, chosen in groups.items()} for one in found]
    result: dict[str, Any] = {"temperature": answers.temperature, "groups": tables[0]}
    if len(found) > 1:
        ours, theirs = (one.counts for one in found)
        depths = sorted({*(k for k in RATIO_DEPTHS if k < found[0].num_depths), found[0].num_depths})
        result["against"] = tables[1]
        result["ratios"] = {
            name: ratios(ours.select(chosen), theirs.select(chosen), depths) for name, chosen in groups.items()
        }
    return result


def table(result: dict[str, Any]) -> str:
    """A header, and one line a group: number of answers, AL at each K with the last one's interval, cumulative
    acceptance rates S by draft position. Other groups that hold all answers have no line."""
    num_all, ratios = result["groups"].get("all", {}).get("num_answers"), result.get("ratios", {})
    groups = {name: one for name, one in result["groups"].items() if name == "all" or one["num_answers"] != num_all}
    num = max((len(group["acceptance_length"]) for group in groups.values()), default=0)
    positions = range(1, num + 1)
    header = f"{'answers':>40s}  AL " + " ".join(f"K={k:<2d}" for k in positions) + "  95 %          S "
    lines = [(header + " ".join(f"{position:<4d}" for position in positions)).rstrip()]
    for name, group in groups.items():
        lengths = group["acceptance_length"]
        low, high = group.get("acceptance_length_95", {}).get(str(len(lengths)), (math.nan, math.nan))
        line = f"{name:32s} {group['num_answers']:7d}  AL " + " ".join(f"{value:.2f}" for value in lengths.values())
        lines.append(
            f"{line}  [{low:.2f}, {high:.2f}]  S " + " ".join(f"{share:.2f}" for share in group["acceptance_rates"])
        )
    for name in (name for name in ratios if name in groups):
        cells = [
            f"K={k} {value:.3f} [{', '.join(f'{bound:.3f}' for bound in ratios[name].get('ratio_95', {}).get(k, []))}]"
            for k, value in ratios[name]["ratio"].items()
        ]
        lines.append(f"{name:32s} ratio {'  '.join(cells)}")
    return "\n".join(lines)


def kind(config: DrafterConfig) -> str:
    name = "P-EAGLE" if config.is_parallel else "EAGLE-3"
    return f"{name}, {config.num_hidden_layers} layer{'s' if config.num_hidden_layers > 1 else ''}"


def common_depths(configs: list[DrafterConfig]) -> int:
    """K_max for several heads: the least of the P-EAGLE heads, for EAGLE-3 can go on beyond what it was trained for."""
    limits = [config.num_depths for config in configs if config.is_parallel]
    return min(limits) if limits else max(config.num_depths for config in configs)


def evaluate_heads(
    head: str | Path,
    answers: list[Path],
    target_dir: str,
    *,
    against: str | Path | None = None,
    num_draft_tokens: int | None = None,
    out: Path | None = None,
) -> Iterator[str]:
    """Yields a table for each folder of answers; then writes evaluation.json into `out`, if given.

    head: a directory, or a shipped head's name. against: a second one, for the ratio of AL. num_draft_tokens: K_max, by
    default what the heads were trained for.
    """
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    paths = [head, *([against] if against else [])]
    # What is small is read first: a wrong folder is known before the target is loaded.
    sets = [(folder, load_answers(folder)) for folder in answers]
    found = [load_head(head_directory(path)) for path in paths]
    target_config = read_target_config(target_dir)
    for config, _ in found:
        check_head_fits(config, target_config)
    for folder in answers:
        check_data_fits(folder, target_dir)
    size = target_bytes(Path(target_dir), target_config, dtype.itemsize)
    is_large = on_gpu and size + OTHER_BYTES > torch.cuda.mem_get_info()[0]
    gpu_bytes = spread(OTHER_BYTES) if is_large else None
    target = Target(target_dir, device="cuda" if on_gpu else "cpu", dtype=dtype, gpu_bytes=gpu_bytes)
    drafters = [target.build_drafter(*each, dtype) for each in found]
    num_depths = num_draft_tokens or common_depths([drafter.config for drafter in drafters])
    heads = [
        {"path": str(path), "kind": kind(drafter.config), "num_depths": drafter.config.num_depths}
        for path, drafter in zip(paths, drafters, strict=True)
    ]
    document: dict[str, Any] = {"made": conditions(), "target": target_dir, "heads": heads, "num_depths": num_depths}
    document["sets"] = []
    for folder, loaded in sets:
        result = evaluate(drafters, target, loaded, num_depths)
        document["sets"].append({"answers": str(folder), **result})
        yield f"{folder}: temperature {loaded.temperature:g}, {heads[0]['kind']}\n{table(result)}"
        if against:
            yield f"against {against}, {heads[1]['kind']}\n{table({'groups': result['against']})}"
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "evaluation.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
