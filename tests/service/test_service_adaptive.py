"""The real service with `num_draft_tokens.policy: adaptive`: K is learned from real acceptance and shown. It changes no
output."""

import re

import pytest

from tests.support.service_harness import PROMPTS, QUESTION, wait_for

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def service(application):
    application.change_live(num_draft_tokens={"policy": "adaptive", "by_workload": {"pinned": 2}})
    wait_for(lambda: application.drafting()["policy"] == "adaptive", "policy")
    yield application
    application.change_live()
    wait_for(lambda: application.drafting()["policy"] == "fixed", "policy")


def test_k_is_learned_shown_and_lossless(service) -> None:
    plain = service.texts(PROMPTS, [0] * len(PROMPTS))
    asked = [
        {"messages": [{"role": "user", "content": prompt}], "max_tokens": 16, "drafting": {"workload": "mixed"}}
        for prompt in PROMPTS * 2
    ]
    learned = []

    def learns() -> bool:
        answers = service.ask_all(asked) + service.ask_all(asked[:1])  # many may verify no drafts, one alone does
        assert [one["choices"][0]["message"]["content"] for one in answers] == [*plain * 2, plain[0]]
        learned.extend(one["drafting"] for one in answers if one["drafting"]["source"] == "learned")
        # Steps of other tests teach as well, and steps are reported once a second.
        return bool(learned) and any(
            one["workload"] == "mixed" and one["num_steps"] > 0 for one in service.drafting()["workloads"]
        )

    wait_for(learns, "K learned from steps of its own")
    drafting = learned[0]
    assert drafting["reason"]
    # The scheduler weighs every step: k was planned, max_k is the limit.
    assert drafting["k"] <= drafting["max_k"] == 7
    assert drafting["num_draft_tokens"] <= drafting["max_k"] * drafting["num_steps"]

    document = service.drafting()
    (mixed,) = [one for one in document["workloads"] if one["workload"] == "mixed"]
    assert mixed["source"] == "learned"
    assert re.fullmatch(r"step times learned over [1-9]\d* steps of 1 engine", document["step_times"])
    rates = mixed["acceptance_rates"]
    for low, mean, high in zip(*(rates[end] for end in ("low", "mean", "high")), strict=True):
        assert low < mean < high
    counted = service.metrics()
    first = counted["peagle_accepted_tokens_total"]["mixed", "1"] / counted["peagle_draft_tokens_total"]["mixed", "1"]
    assert rates["low"][0] - 0.1 < first < rates["high"][0] + 0.1

    def shown_alike() -> bool:  # K may change between two questions
        (row,) = [one for one in service.drafting()["workloads"] if one["workload"] == "mixed"]
        return service.metrics()["peagle_num_draft_tokens"]["mixed",] == row["k"]

    wait_for(shown_alike, "the same K in /metrics as in /drafting")


def test_pinned_and_asked_for_k_are_obeyed_exactly(service) -> None:
    for drafting, k in (({"workload": "pinned"}, 2), ({"k": 6, "workload": "mixed"}, 6)):
        for answer in (one["drafting"] for one in service.ask_all([{"drafting": drafting}] * 2)):
            assert answer["k"] == k
            # The last step of an answer may have room for fewer tokens than K.
            assert k * (answer["num_steps"] - 1) < answer["num_draft_tokens"] <= k * answer["num_steps"]


def test_a_seed_gives_one_answer_whatever_k_was_chosen(service) -> None:
    body = {"messages": QUESTION, "max_tokens": 16, "temperature": 0.9, "seed": 42}
    answers = [service.ask(**body).json()]
    others = [{"messages": QUESTION, "temperature": 1.0, "seed": seed} for seed in range(3)]
    beside = [body, {**body, "drafting": {"k": 0}}, {**body, "drafting": {"k": 7}}, {**body, "drafting": {"k": 3}}]
    answers += service.ask_all(beside + others)[: len(beside)]
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
    assert len({answer["drafting"]["num_draft_tokens"] for answer in answers}) > 1


def test_an_answer_says_what_went_without_drafts(service) -> None:
    for sampling in ({"logit_bias": {"260": 1.0}}, {"min_p": 0.1, "temperature": 1.0}):
        drafting = service.ask(**sampling, drafting={"workload": "mixed"}).json()["drafting"]
        assert drafting["reason"] == f"{next(iter(sampling))} goes without drafts"
        assert (drafting["k"], drafting["num_steps"], "acceptance_rates" in drafting) == (0, 0, False)
