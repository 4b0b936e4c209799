"""A real vLLM engine with a P-EAGLE head: output unchanged whatever K, exactly K drafts verified, all of them counted.

Tests run on vLLM's synchronous scheduler, and in `make test-all` on the asynchronous one too, which
test_remote_engine.py runs on in `make test`. The same target without drafts wrote the reference, in float32, where two
orders of summation hardly ever pick another token: outputs must be equal.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.platforms import current_platform
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

from cluster.step_latency import StepLatency
from tests.support.counted import counts_of
from tests.support.engine_cases import (
    BATCH,
    K_MAX,
    MIXED,
    NUM_BLOCKS,
    NUM_LONG,
    NUM_SAMPLES,
    NUM_SHORT,
    SAMPLED_TEXT,
    check_counts,
    engine_settings,
    grammar_job,
    nearly_full_job,
    only_sync,
    sampling_jobs,
    varied_jobs,
)
from tests.support.engine_harness import Job, Result, RunningEngine, float32_kwargs
from tests.support.scripted_drafts import scripted_steps

pytestmark = pytest.mark.engine

Prompts = list[list[int]]
Reference = dict[str, dict[int, Result]]
"""By the kind of job and its number; the greedy ones by the place of their prompt."""
PLACES = (*BATCH, 5)


def batch_of(prompts: Prompts) -> Prompts:
    return [prompts[place] for place in BATCH]


@pytest.fixture(scope="module")
def sampled_prompt(tokenizer: Any) -> list[int]:
    """A short prompt whose next tokens are neither certain nor all different."""
    tokens: list[int] = tokenizer(SAMPLED_TEXT)["input_ids"]
    return tokens


@pytest.fixture(scope="module")
def reference(
    prompts: Prompts, text_tokens: list[int], sampled_prompt: list[int], plain_engine: RunningEngine
) -> Reference:
    """Output of the target without speculation."""
    jobs = {
        "greedy": [Job(prompts[place], NUM_LONG + K_MAX) for place in PLACES],
        "nearly full": [nearly_full_job(text_tokens, None)],
        "grammar": [grammar_job(prompts[9], None)],
        "sampled": sampling_jobs(sampled_prompt),
        "varied": varied_jobs(batch_of(prompts), NUM_LONG),
        "likely": [Job(sampled_prompt, 3 + K_MAX)],
    }
    results = iter(plain_engine.run(list(itertools.chain(*jobs.values()))))
    found = {name: dict(enumerate(itertools.islice(results, len(of_name)))) for name, of_name in jobs.items()}
    return found | {"greedy": dict(zip(PLACES, found["greedy"].values(), strict=True))}


@pytest.fixture(scope="module", params=["sync", pytest.param("async", marks=pytest.mark.long)])
def engine(
    request: pytest.FixtureRequest, reference: Reference, target_dir: Path, head_dir: Path, environment: None
) -> Iterator[RunningEngine]:
    kwargs = float32_kwargs(target_dir, head_dir, engine_settings(NUM_BLOCKS), K_MAX)
    kwargs["worker_extension_cls"] = "tests.support.counted_passes.CountedPasses"
    if request.param == "sync":
        kwargs["scheduler_cls"] = "tests.support.scripted_drafts.ScriptedDraftScheduler"
    with RunningEngine(kwargs, is_async=request.param == "async") as running:
        yield running


def test_greedy_output_is_the_targets(engine: RunningEngine, prompts: Prompts, reference: Reference) -> None:
    depths = [MIXED[number % len(MIXED)] for number in range(len(BATCH))]
    preempted_before = engine.num_preempted
    several = itertools.cycle([None, [0.5**position for position in range(1, K_MAX + 1)]])
    jobs = [Job(prompts[place], NUM_SHORT, k=k, rates=next(several)) for place, k in zip(BATCH, depths, strict=True)]
    results = engine.run(jobs)
    for job, result, place in zip(jobs, results, BATCH, strict=True):
        assert result.tokens[0] == reference["greedy"][place].tokens[0][:NUM_SHORT]
        if job.rates is None:
            check_counts(result, K_MAX if job.k is None else job.k)
        else:  # fewer drafts where fewer pay
            assert all(num_verified <= (K_MAX if job.k is None else job.k) for num_verified, _ in result.steps or ())
    assert engine.num_preempted == preempted_before


def passes_of(engine: RunningEngine) -> list[int]:
    (passes,) = engine.call_workers("passes")
    return list(passes)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a GPU's passes are graphs")
def test_steps_that_verify_nothing_run_no_pass_of_the_drafter(
    engine: RunningEngine, prompts: Prompts, reference: Reference
) -> None:
    """Where one request has drafts, all of its batch go through the pass."""
    places, before = BATCH[:4], len(passes_of(engine))
    engine.run([Job(prompts[place], NUM_SHORT, k=0) for place in places])
    passes = passes_of(engine)[before:]
    assert 1 <= len(passes) <= len(places)  # steps that hold a prompt; the four may come in one or in several
    ks = (0, 3, 0, K_MAX)
    results = engine.run([Job(prompts[place], NUM_SHORT, k=k) for place, k in zip(places, ks, strict=True)])
    for result, place, k in zip(results, places, ks, strict=True):
        assert result.tokens[0] == reference["greedy"][place].tokens[0][:NUM_SHORT]
        check_counts(result, k)
    passes = passes_of(engine)[before + len(passes) :]
    assert len(passes) >= max(result.drafting.counts.num_steps for result in results if result.drafting)
    assert max(passes) == len(places)


@only_sync
def test_buffered_tokens_all_arrive(engine: RunningEngine, prompts: Prompts, reference: Reference) -> None:
    jobs = [
        Job(prompts[place], 2 * NUM_SHORT, MIXED[number % len(MIXED)], None, reference["greedy"][place].tokens[0])
        for number, place in enumerate(BATCH[:4])
    ]
    at_once = engine.run(jobs)
    ways: list[tuple[dict[str, Any], int]] = [
        ({}, 2 + 2 * NUM_SHORT // 8),
        ({"output_kind": RequestOutputKind.FINAL_ONLY}, 2 + 2 * NUM_SHORT // 32),
        ({"stop": ["no such text"]}, 2 + 2 * NUM_SHORT // 8),
    ]
    samplings = [{"stream_interval": 8, **sampling} for sampling, _ in ways]
    held = iter(engine.run([dataclasses.replace(job, sampling=sampling) for sampling in samplings for job in jobs]))
    for sampling, most in ways:
        for job, result, expected in zip(jobs, itertools.islice(held, len(jobs)), at_once, strict=True):
            assert 0 < result.num_outputs <= most, sampling
            assert (result.tokens, result.texts, result.steps) == (expected.tokens, expected.texts, expected.steps)
            assert result.drafting is not None
            assert expected.drafting is not None
            assert result.drafting.counts == expected.drafting.counts == counts_of(result.steps or ())
            assert result.drafting.num_output_tokens == job.max_tokens


def test_the_client_hears_what_steps_take(engine: RunningEngine, prompts: Prompts) -> None:
    for _ in range(100):
        engine.run([Job(prompts[5], NUM_SHORT)])
        latency = msgspec.json.decode(engine.recorder.step_latency, type=StepLatency)
        if latency.num_steps:
            break
    assert latency.num_steps > 0
    assert 0.001 < latency.seconds(1, 1 + K_MAX) < 10.0


@only_sync
def test_every_acceptance_is_counted(engine: RunningEngine, prompts: Prompts, reference: Reference) -> None:
    """With scripted drafts all acceptance lengths 0..K come up, and each step's counts are known beforehand."""
    jobs = []
    for number, place in enumerate(BATCH):
        continuation, k = reference["greedy"][place].tokens[0], MIXED[number % len(MIXED)]
        jobs.append(Job(prompts[place], 24, k=k, continuation=continuation, workload=str(place)))
    results = engine.run(jobs)
    for job, result, place in zip(jobs, results, BATCH, strict=True):
        steps = scripted_steps(1, 24, K_MAX if job.k is None else job.k, K_MAX)
        assert result.tokens[0] == reference["greedy"][place].tokens[0][:24]
        assert result.steps == steps
        assert result.drafting is not None
        assert result.drafting.workload == job.workload
        assert result.drafting.counts == counts_of(steps)
        assert engine.recorder.workloads()[str(job.workload)].counts == counts_of(steps)


def test_preemption_changes_nothing(engine: RunningEngine, prompts: Prompts, reference: Reference) -> None:
    preempted_before = engine.num_preempted
    jobs = [  # Of similar speed, so that all are long at the same time; of half of them tokens are held back.
        Job(
            prompts[place],
            NUM_LONG,
            k=2 + number % 2,
            continuation=reference["greedy"][place].tokens[0],
            sampling={"stream_interval": 1 + 8 * (number % 2)},
        )
        for number, place in enumerate(BATCH)
    ]
    results = engine.run([*jobs, *varied_jobs(batch_of(prompts), NUM_LONG, k=2)[:4]])
    assert engine.num_preempted > preempted_before
    for job, result, place in zip(jobs, results, BATCH, strict=False):
        assert result.tokens[0] == reference["greedy"][place].tokens[0][:NUM_LONG]
        check_counts(result, job.k)
    for result, expected in zip(results[len(jobs) :], reference["varied"].values(), strict=False):
        assert result.tokens == expected.tokens


def test_context_limit(engine: RunningEngine, text_tokens: list[int], reference: Reference) -> None:
    """The last steps have room for fewer than K drafts."""
    (result,) = engine.run([nearly_full_job(text_tokens, K_MAX)])
    assert result.tokens == reference["nearly full"][0].tokens
    assert result.finish_reasons == ["length"]
    assert result.steps is not None
    assert result.drafting is not None
    assert max(num_verified for num_verified, _ in result.steps) == K_MAX
    assert result.drafting.counts == counts_of(result.steps)


def test_aborted_requests_stay_in_the_totals(engine: RunningEngine, prompts: Prompts, reference: Reference) -> None:
    sampling = {"stream_interval": 5}
    gone = Job(prompts[6], NUM_LONG, k=3, workload="gone", abort_after=12, sampling=sampling)
    stays = Job(prompts[5], NUM_SHORT, k=3, workload="stays")
    gone_result, stays_result = engine.run([gone, stays])
    assert stays_result.tokens[0] == reference["greedy"][5].tokens[0][:NUM_SHORT]
    check_counts(stays_result, 3)
    record = gone_result.drafting
    assert record is not None
    assert record.counts.num_steps > 0
    assert 1 + record.counts.num_steps + record.counts.num_accepted_tokens == record.num_output_tokens
    gone_counts = engine.recorder.workloads()["gone"]
    assert (gone_counts.counts, gone_counts.num_started, gone_counts.num_aborted) == (record.counts, 1, 1)


@pytest.mark.parametrize("k", [0, K_MAX])
def test_an_answer_ends_with_the_token_that_completes_its_stop(
    engine: RunningEngine, prompts: Prompts, reference: Reference, tokenizer: Any, k: int
) -> None:
    """Only the engine's client notices a stop string, also among accepted drafts and tokens that were held back."""
    expected = reference["greedy"][12]
    tokens, text = expected.tokens[0], expected.texts[0]
    stop = text[20:25]
    num_tokens = next(n for n in range(len(tokens)) if stop in tokenizer.decode(tokens[:n]))
    before = text[: text.index(stop)]
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"stop": stop}, num_tokens, before),
        ({"stop": stop, "stream_interval": 8}, num_tokens, before),
        ({"stop": stop, "output_kind": RequestOutputKind.FINAL_ONLY}, num_tokens, before),
        (
            {"stop": ["no such text", stop], "include_stop_str_in_output": True, "logprobs": 2},
            num_tokens,
            before + stop,
        ),
        ({"stop_token_ids": [tokens[num_tokens]]}, 1 + tokens.index(tokens[num_tokens]), ""),
        ({"max_tokens": num_tokens}, num_tokens, tokenizer.decode(tokens[:num_tokens])),
    ]
    jobs = [Job(prompts[12], NUM_LONG, k=k, continuation=tokens, sampling=sampling) for sampling, _, _ in cases]
    for (sampling, num_tokens, text), result in zip(cases, engine.run(jobs), strict=True):
        assert result.tokens == [tokens[:num_tokens]], sampling
        if text:
            assert result.texts == [text], sampling
        assert result.finish_reasons == ["length" if "max_tokens" in sampling else "stop"]
        assert result.drafting is not None
        assert result.drafting.num_output_tokens == num_tokens, sampling
        counts = result.drafting.counts
        assert num_tokens <= 1 + counts.num_steps + counts.num_accepted_tokens <= num_tokens + k or not k


def test_grammar(engine: RunningEngine, prompts: Prompts, reference: Reference) -> None:
    """Drafts that a grammar rules out count neither as verified nor as accepted. With asynchronous scheduling vLLM's
    own list of steps has those behind the grammar's end as accepted."""
    ks = (0, 2, K_MAX)
    results = engine.run([grammar_job(prompts[9], k) for k in ks])
    for k, result in zip(ks, results, strict=True):
        assert result.texts == reference["grammar"][0].texts
        assert result.steps is not None
        assert result.drafting is not None
        assert all(num_verified <= k for num_verified, _ in result.steps)
        steps = [(verified, min(verified, accepted)) for verified, accepted in result.steps if verified]
        assert result.drafting.counts == counts_of(steps)
    sampled = [grammar_job(prompts[9], k) for k in (0, K_MAX)]
    for job in sampled:
        job.sampling.update(temperature=1.5, seed=3)
    results = engine.run(sampled)
    assert len({result.texts[0] for result in results}) == 1
    assert results[0].texts != reference["grammar"][0].texts


def test_sampled_output_is_the_same_without_drafts(
    engine: RunningEngine, prompts: Prompts, reference: Reference, sampled_prompt: list[int]
) -> None:
    """Token for token, with K = 0 and 7 in one batch, whatever the sampling. test_coupling has the distribution.

    Not with min_tokens in asynchronous scheduling, which no CPU service has: V1 counts placeholders as tokens there."""
    expected = [result.tokens[0] for result in reference["varied"].values()]
    cases = [
        (dataclasses.replace(job, k=k, continuation=tokens), tokens)
        for k in (0, K_MAX)
        for job, tokens in zip(varied_jobs(batch_of(prompts), NUM_SHORT), expected, strict=True)
        if not (engine.is_async and "min_tokens" in job.sampling)
    ]
    results = engine.run([job for job, _ in cases])
    for (job, tokens), result in zip(cases, results, strict=True):
        assert result.tokens[0] == tokens[:NUM_SHORT], (job.k, job.sampling)
    results = engine.run(sampling_jobs(sampled_prompt, k=3, continuation=reference["likely"][0].tokens[0]))
    assert [result.tokens for result in results] == [result.tokens for result in reference["sampled"].values()]
    assert sum(result.drafting.counts.num_accepted_tokens for result in results if result.drafting) > NUM_SAMPLES / 20


def test_without_a_seed_every_sequence_gets_its_own(engine: RunningEngine, prompts: Prompts) -> None:
    sampling = {"temperature": 1.5, "n": 2}
    results = engine.run([Job(prompts[7], 20, k=2, sampling=sampling), Job(prompts[7], 20, k=0, sampling=sampling)])
    answers = [tuple(tokens) for result in results for tokens in result.tokens]
    assert len(set(answers)) == 4
    for result in results:
        assert result.drafting.num_prompt_tokens == len(prompts[7]), "of both sequences, once"


def test_what_one_request_asks_for_leaves_the_others_alone(
    engine: RunningEngine, prompts: Prompts, reference: Reference
) -> None:
    """All beside three plain requests with drafts in one batch, one of them a prompt in chunks."""
    asked: list[dict[str, Any]] = [
        {"logprobs": 0},
        {"logprobs": 20},
        {"logprobs": 5, "n": 2, "temperature": 1.0},
        {"logprobs": 2, "flat_logprobs": True},
        {"prompt_logprobs": 5},
        {"prompt_logprobs": 0, "logprobs": 1},
        {"min_tokens": 5, "stop_token_ids": [1, 2]},
        {"min_tokens": 5, "regex": "[a-z]{20}"},
        {"repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=4)},
        {"allowed_token_ids": [28, 30], "bad_words": ["."]},
        {"temperature": 0.01, "top_p": 1e-9, "top_k": 1},
        {"temperature": 2.0, "presence_penalty": -2.0, "repetition_penalty": 0.01},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False, "stop": ["."], "stop_token_ids": [3]},
        {"logit_bias": {5: 100.0}, "logprobs": 3},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 5},
        {"watermarking": True},
    ]
    jobs = [Job(prompts[6], 8, k=3, sampling=sampling) for sampling in asked]
    places = (5, 12, 13)
    results = engine.run([*(Job(prompts[place], NUM_SHORT, k=K_MAX) for place in places), *jobs])
    for place, result in zip(places, results, strict=False):
        assert result.tokens[0] == reference["greedy"][place].tokens[0][:NUM_SHORT]
        check_counts(result, K_MAX)
    found = {next(iter(sampling)): result for sampling, result in zip(asked, results[len(places) :], strict=True)}
    assert all(result.tokens[0] for result in results)
    assert results[len(places)].tokens[0] == reference["greedy"][6].tokens[0][:8]
    check_counts(found["logit_bias"], 0)
    assert set(found["logit_bias"].tokens[0]) == {5}


def test_each_grammar_has_the_backend_that_checked_it(engine: RunningEngine, prompts: Prompts) -> None:
    """Of a schema vLLM's xgrammar backend ignores `multipleOf`; its guidance backend does not."""
    schema = {"type": "integer", "multipleOf": 7, "minimum": 100, "maximum": 999}
    grammars = [StructuredOutputsParams(regex="[0-9]{3}"), StructuredOutputsParams(json=schema)]
    jobs = [Job(prompts[9], 8, sampling={"structured_outputs": grammar, "ignore_eos": False}) for grammar in grammars]
    plain, multiple = engine.run(jobs)
    assert len(plain.texts[0]) == 3
    assert int(multiple.texts[0]) % 7 == 0
