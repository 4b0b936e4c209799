"""Coupled sampling without an engine: tokens of a step with drafts are those of steps without, one after another."""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, BatchUpdate, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

if current_platform.is_cpu():  # GPUs collect this module too, and must not import these
    from peagle.vllm.coupling import CoupledVerifier, GumbelDraw, noise_seeds
    from peagle.vllm.workers import run_uncompiled

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="draws by a kernel of vLLM's CPU build")

VOCAB_SIZE = 60
PROMPT = [3, 4, 5]

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "top-k and top-p": {"temperature": 0.8, "top_k": 9, "top_p": 0.7},
    "penalties": {"temperature": 1.2, "presence_penalty": 0.9, "frequency_penalty": 0.7, "repetition_penalty": 1.5},
    "greedy with penalties": {"temperature": 0.0, "frequency_penalty": 1.5},
    "min tokens": {"temperature": 1.0, "min_tokens": 4, "stop_token_ids": list(range(40))},
    "allowed": {"temperature": 1.0, "allowed_token_ids": [7, 8, 9, 30]},
    "bad words": {"temperature": 1.0, "bad_words": ["x"]},
    "min p": {"temperature": 1.0, "min_p": 0.2},
    "bias": {"temperature": 1.0, "logit_bias": {11: 4.0, 12: -90.0}},
}
WITHOUT_DRAFTS = ("min p", "bias")


def make_sampler() -> Sampler:
    run_uncompiled()
    sampler = Sampler()
    sampler.topk_topp_sampler = GumbelDraw("raw_logprobs")
    return sampler


def metadata_of(batch: list[SamplingParams], outputs: list[list[int]]) -> SamplingMetadata:
    """What vLLM's input batch makes of these requests."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=len(batch)))
    processors = LogitsProcessors(kind(config, torch.device("cpu"), False) for kind in BUILTIN_LOGITS_PROCESSORS)
    added = [(b, params, PROMPT, outputs[b]) for b, params in enumerate(batch)]
    for processor in processors.all:
        processor.update_state(BatchUpdate(len(batch), removed=[], added=added, moved=[]))
    allowed = torch.zeros(len(batch), VOCAB_SIZE, dtype=torch.bool)
    for b, params in enumerate(batch):
        if params.allowed_token_ids:
            allowed[b] = True
            allowed[b, params.allowed_token_ids] = False

    def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([getattr(params, name) for params in batch], dtype=dtype)

    return SamplingMetadata(
        temperature=None if all(params.temperature == 0 for params in batch) else column("temperature"),
        all_greedy=all(params.temperature == 0 for params in batch),
        all_random=all(params.temperature > 0 for params in batch),
        top_p=column("top_p"),
        top_k=torch.tensor([params.top_k or VOCAB_SIZE for params in batch], dtype=torch.int32),
        generators={},
        max_num_logprobs=2,
        no_penalties=False,
        prompt_token_ids=torch.tensor([PROMPT] * len(batch)),
        frequency_penalties=column("frequency_penalty"),
        presence_penalties=column("presence_penalty"),
        repetition_penalties=column("repetition_penalty"),
        output_token_ids=outputs,
        allowed_token_ids_mask=allowed,
        bad_words_token_ids={b: [[20], [7, 21]] for b, params in enumerate(batch) if params.bad_words},
        logitsprocs=processors,
        spec_token_ids=[[] for _ in batch],
    )


def plain_tokens(params: SamplingParams, logits_SV: torch.Tensor, drafts: list[int], output: list[int]) -> list[int]:
    """What steps without drafts give, until a token is not the draft at its position."""
    sampler, tokens = make_sampler(), list[int]()
    for place, logits_V in enumerate(logits_SV):
        ends_B = torch.tensor([len(PROMPT) + len(output) + place])
        sampler.topk_topp_sampler.seeds_R = noise_seeds([params.seed or 0], ends_B, [1])
        metadata = metadata_of([params], [output + tokens])
        tokens += sampler(logits_V[None].clone(), metadata).sampled_token_ids.flatten().tolist()
        if place < len(drafts) and tokens[-1] != drafts[place]:
            break
    return tokens


@pytest.mark.parametrize("seed", range(6))
def test_tokens_with_drafts_are_those_without(seed: int) -> None:
    """All kinds of sampling in one batch, and alone; as many right drafts as a random number says."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    batch, outputs, drafts, rows, expected = [], [], [], [], []
    for number, (name, sampling) in enumerate(SAMPLINGS.items()):
        params = SamplingParams(**{key: value for key, value in sampling.items() if key != "bad_words"}, seed=number)
        params.bad_words = sampling.get("bad_words")
        params._all_stop_token_ids.update(params.stop_token_ids or ())
        output = [chance.randrange(VOCAB_SIZE) for _ in range(chance.randrange(4))]
        num_drafts = 0 if name in WITHOUT_DRAFTS else chance.randrange(6)
        logits_SV = 2.5 * torch.randn(num_drafts + 1, VOCAB_SIZE)
        own: list[int] = []
        for _ in range(num_drafts):  # right so far, so that the tokens after it are drawn too
            own.append(plain_tokens(params, logits_SV[: len(own) + 1], own, output)[-1])
        if own and chance.random() < 0.6:
            wrong = chance.randrange(len(own))
            own[wrong:] = [(token + 1) % VOCAB_SIZE for token in own[wrong:]]
        batch.append(params)
        outputs.append(output)
        drafts.append(own)
        rows.append(logits_SV)
        expected.append(plain_tokens(params, logits_SV, own, output))
    sampler = make_sampler()
    groups = [list(range(len(batch))), *([b] for b in range(len(batch)))]
    for group in groups:
        proposed = SpecDecodeMetadata.make_dummy([drafts[b] for b in group], torch.device("cpu"))
        ends_B = torch.tensor([len(PROMPT) + len(outputs[b]) + len(drafts[b]) for b in group])
        seeds = [batch[b].seed or 0 for b in group]
        sampler.topk_topp_sampler.seeds_R = noise_seeds(seeds, ends_B, [1 + len(drafts[b]) for b in group])
        logits_RV = torch.cat([rows[b] for b in group])
        metadata = metadata_of([batch[b] for b in group], [outputs[b] for b in group])
        found = CoupledVerifier(sampler)(proposed, None, logits_RV.clone(), metadata)
        tokens_BS = found.sampled_token_ids
        assert [[token for token in row if token >= 0] for row in tokens_BS.tolist()] == [expected[b] for b in group]
        for row, logprobs, ids in zip(
            tokens_BS.flatten().tolist(), found.logprobs_tensors[1], found.logprobs_tensors[0], strict=True
        ):
            if row >= 0:
                assert int(ids[0]) == row
                assert logprobs[0] <= logprobs[1] + 1e-6  # the token's own, then the most likely one's
    assert any(len(tokens) > 2 for tokens in expected)


def test_thinking_budgets_of_a_request_without_drafts_go_to_its_row() -> None:
    class ForcesTen:
        """vLLM's holder, of which request 1 has spent its budget."""

        outputs: Any = None

        def has_tracked_requests(self) -> bool:
            return True

        def update_state(self, outputs: Any, drafts: Any, repeat_indices: Any) -> None:
            self.outputs = outputs

        def apply_to_logits(self, logits_BV: torch.Tensor, is_bonus: bool, drafts: Any) -> torch.Tensor:
            logits_BV[1, 10] = 1000.0
            return logits_BV

    holder = ForcesTen()
    params, outputs = [SamplingParams(temperature=0.0)] * 2, [[1], [2]]
    metadata: Any = replace(metadata_of(params, outputs), thinking_budget_state_holder=holder)
    sampler = make_sampler()
    sampler.topk_topp_sampler.seeds_R = noise_seeds([0, 0], torch.tensor([7, 5]), [4, 1])
    logits_RV = torch.zeros(5, VOCAB_SIZE)
    logits_RV[:, 30] = 5.0
    proposed = SpecDecodeMetadata.make_dummy([[30, 30, 30], []], torch.device("cpu"))
    found = CoupledVerifier(sampler)(proposed, None, logits_RV, metadata)
    assert found.sampled_token_ids.tolist() == [[30] * 4, [10, -1, -1, -1]]
    assert holder.outputs == outputs


def test_draws_are_distributed_as_the_logits_say() -> None:
    """Successive positions of one request, and neighbouring seeds at one position. The bound is passed by chance once
    in ten thousand draws of all samples, which are the same in every run."""
    torch.manual_seed(1)
    logits_V, num = 2.0 * torch.randn(12), 20_000
    probabilities = logits_V.softmax(0).double()
    draw = GumbelDraw("raw_logprobs")
    ends_B = torch.zeros(num, dtype=torch.int64)
    for seeds_R in (noise_seeds([7], torch.tensor([num]), [num]), noise_seeds(range(num), ends_B, [1] * num)):
        draw.seeds_R = seeds_R
        tokens_R, _ = draw(logits_V.expand(num, -1).clone(), {}, None, None)
        expected = probabilities * num
        statistic = ((torch.bincount(tokens_R, minlength=12) - expected) ** 2 / expected).sum()
        degrees = torch.tensor(11 / 2, dtype=torch.float64)
        assert float(torch.special.gammaincc(degrees, statistic / 2)) > 1e-4
        pairs = Counter(zip(tokens_R[:-1].tolist(), tokens_R[1:].tolist(), strict=True))
        likely = int(probabilities.argmax())
        share = pairs[likely, likely] / num
        assert share == pytest.approx(float(probabilities[likely]) ** 2, abs=0.02)
