"""The service as a user meets it: one real Ray Serve application of configs/local.yaml with a real vLLM engine.

One application serves this module and other tests of the service. The first test looks at what was seen while the
engine loaded.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.serve.context import _get_global_client
from typer.testing import CliRunner

from deployments import APP_NAME, ROUTER_NAME, TARGET_NAME, cli
from deployments.cli import main
from deployments.client import TargetClient, TargetError
from peagle.embedded import prepare_target
from peagle.train.data import Conversations, load_tokenizer
from peagle.train.prompts import ChatTemplate, Prompt
from tests.support.service_harness import BAD_REQUESTS, PROMPTS, QUESTION, assert_refused, wait_for

pytestmark = pytest.mark.service


def test_a_request_that_comes_while_the_engine_loads_gets_503_and_never_waits(application):
    assert application.statuses[0] == "DEPLOYING"
    refused = [response for response in application.early if response.status_code == 503]
    assert len(refused) >= 4
    for response in refused:
        assert int(response.headers["retry-after"]) > 0
        assert response.json()["error"]["code"] == "model_not_ready"
    # The first ones come while Serve's proxy itself starts.
    assert all(response.elapsed.total_seconds() < 10 for response in refused[2:])


def test_peagle_chat_shows_the_answer_and_its_drafting(application):
    question = "Count from one to ten in digits."
    command = ["chat", question, "--url", application.url, "--max-tokens", "12", "-k", "5"]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    answer = application.ask(messages=[{"role": "user", "content": question}]).json()
    assert done.stdout == answer["choices"][0]["message"]["content"] + "\n"
    assert done.stderr.startswith("[K = 5 (request), ")


@pytest.mark.parametrize(("call", "stream"), [("chat", True), ("completions", False)])
def test_usage_says_how_many_tokens_of_a_prompt_were_cached(application, call: str, stream: bool):
    client, prompt = application.client(), f"{call} {stream} " * 200

    def usage() -> Any:
        asked: dict[str, Any] = {"model": application.model, "max_tokens": 4, "temperature": 0, "stream": stream}
        if stream:
            asked["stream_options"] = {"include_usage": True}
        if call == "chat":
            answer = client.chat.completions.create(**asked, messages=[{"role": "user", "content": prompt}])
        else:
            answer = client.completions.create(**asked, prompt=prompt)
        return list(answer)[-1].usage if stream else answer.usage

    assert usage().prompt_tokens_details.cached_tokens < 100
    again = usage()
    assert again.prompt_tokens_details.cached_tokens > again.prompt_tokens / 2
    assert 0 <= again.completion_tokens_details.accepted_prediction_tokens < again.completion_tokens


def test_chat_and_completions_with_the_openai_client(application):
    client = application.client()
    (model,) = client.models.list()
    assert (model.id, model.max_model_len) == (application.model, 2048)
    assert client.get(f"{application.url}/version", cast_to=object).keys() == {"version", "peagle"}
    chat = client.chat.completions.create(model=application.model, messages=QUESTION, max_tokens=12, temperature=0)
    assert chat.choices[0].message.content.strip()
    assert chat.usage.completion_tokens == 12
    drafting = chat.drafting
    most = chat.usage.completion_tokens - drafting["num_steps"]
    accepted = min(drafting["num_accepted_tokens"], most)
    assert chat.usage.completion_tokens_details.accepted_prediction_tokens == accepted
    assert drafting["num_draft_tokens"] <= drafting["k"] * drafting["num_steps"]
    # The first token comes from the prompt; each step then gives its accepted drafts and one more.
    assert 0 <= drafting["num_steps"] + drafting["num_accepted_tokens"] - 11 <= drafting["k"]
    plain = client.completions.create(model=application.model, prompt="One, two, three,", max_tokens=8, temperature=0)
    assert plain.choices[0].text
    assert plain.drafting["num_steps"] > 0


def test_k_comes_from_body_header_table_or_default_and_is_obeyed(application):
    cases: list[tuple[dict[str, Any], dict[str, str], tuple[str, int, str]]] = [
        ({}, {}, ("default", 5, "default")),
        ({"drafting": {"k": 2}}, {}, ("default", 2, "request")),
        ({"drafting": {"k": 0}}, {}, ("default", 0, "request")),
        ({"drafting": {"workload": "code"}}, {}, ("code", 7, "workload")),
        ({"drafting": {"workload": "never-seen"}}, {}, ("never-seen", 5, "default")),
        ({}, {"X-Drafting-K": "3"}, ("default", 3, "request")),
        ({}, {"X-Drafting-Workload": "code"}, ("code", 7, "workload")),
        ({"drafting": {"k": 1}}, {"X-Drafting-Workload": "code"}, ("code", 1, "request")),
    ]
    answers = application.ask_all([{"headers": headers, **body} for body, headers, _ in cases])
    for answer, (body, headers, expected) in zip(answers, cases, strict=True):
        drafting = answer["drafting"]
        assert (drafting["workload"], drafting["k"], drafting["source"]) == expected, (body, headers)
        k, num_steps = drafting["k"], drafting["num_steps"]
        assert (num_steps == 0) == (k == 0)
        # The last step of an answer may have room for fewer tokens than K.
        assert k * (num_steps - 1) <= drafting["num_draft_tokens"] <= k * num_steps


def test_streaming_gives_the_same_text_piece_by_piece_and_its_drafting_at_the_end(application):
    arguments: dict[str, Any] = {"messages": QUESTION, "max_tokens": 12, "temperature": 0}
    whole = application.ask(**arguments).json()
    chunks = list(application.client().chat.completions.create(model=application.model, stream=True, **arguments))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    *others, last = chunks
    assert last.choices[0].finish_reason == "length"
    assert last.drafting == whole["drafting"]
    assert not any(hasattr(chunk, "drafting") for chunk in others)
    # One chunk for each step, not one for a time slice.
    assert len(others) >= whole["drafting"]["num_steps"]
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    *others, last = application.client().chat.completions.create(model=application.model, **with_usage, **arguments)
    assert (last.choices, last.usage.completion_tokens) == ([], 12)
    assert last.drafting == whole["drafting"]
    assert not any(hasattr(chunk, "drafting") for chunk in others)


def test_what_the_engine_would_not_survive_is_an_error_of_the_request(application):
    """One of these once ended the engine, and with it every running request, for minutes."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(functools.partial(assert_refused, application), BAD_REQUESTS, itertools.cycle([False, True])))
    assert application.ask(max_tokens=1).status_code == 200


def test_requests_of_many_sequences_are_overtaken_by_one_of_one(application):
    """Both of one caller, whose order is that of their arrival, and of another."""
    # Together more sequences than run at a time. With log probabilities each goes through its prompt itself.
    wide = {"prompt": "The quick brown fox jumps over the lazy dog. " * 18, "n": 9, "echo": True, "logprobs": 1}
    wide |= {"max_tokens": 16, "ignore_eos": True}

    def complete(body: dict[str, Any], address: str = "127.0.0.1") -> float:
        with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=600) as client:
            response = client.post(f"{application.url}/v1/completions", json={"max_tokens": 4, **body})
            assert response.status_code == 200, response.text
        return time.monotonic()

    with ThreadPoolExecutor(3) as pool:
        slow = [pool.submit(complete, {**wide, "prompt": f"{number} {wide['prompt']}"}) for number in range(2)]
        wait_for(lambda: application.metrics()["peagle_running_requests"][()] > 2, "requests in the engine")
        ended_s = complete({"prompt": "One,"}, "127.0.0.2")
        assert ended_s < min(request.result() for request in slow)


def test_greedy_output_is_the_same_whatever_k_also_mixed_in_one_batch(application):
    prompts = PROMPTS[2:]
    expected = application.texts(prompts, [0] * len(prompts))
    ks = [k for k in (7, 1, 5, 0) for _ in prompts]
    assert application.texts(prompts * 4, ks) == expected * 4


def test_metrics_parse_and_add_up_with_the_responses(application):
    before = application.metrics()
    answers = application.ask_all([
        {"messages": [{"role": "user", "content": prompt}], "drafting": {"k": k, "workload": "adds-up"}}
        for prompt, k in zip(PROMPTS, (7, 3, 1, 0), strict=True)
    ])  # fmt: skip
    after = application.metrics()

    def growth(name: str) -> dict[str, float]:
        keys = [key for key in after[name] if key[0] == "adds-up"]
        return {key[-1]: after[name][key] - before[name][key] for key in keys}

    fields = [answer["drafting"] for answer in answers]
    drafted, accepted = growth("peagle_draft_tokens_total"), growth("peagle_accepted_tokens_total")
    assert growth("peagle_requests_total") == {"finished": 4, "aborted": 0}
    assert growth("peagle_output_tokens_total") == {"adds-up": sum(a["usage"]["completion_tokens"] for a in answers)}
    assert growth("peagle_verification_steps_total") == {"adds-up": sum(f["num_steps"] for f in fields)}
    assert sum(drafted.values()) == sum(f["num_draft_tokens"] for f in fields)
    assert sum(accepted.values()) == sum(f["num_accepted_tokens"] for f in fields)
    # Right denominators: depth 1 was verified in every step, depth 7 only in those of the request with K = 7.
    assert drafted["1"] == sum(f["num_steps"] for f in fields)
    assert drafted["7"] <= fields[0]["num_steps"] < drafted["1"]
    by_depth = [drafted[str(depth)] for depth in range(1, 8)]
    assert by_depth == sorted(by_depth, reverse=True)
    reached = growth("peagle_reached_draft_tokens_total")
    assert all(accepted[depth] <= reached[depth] <= drafted[depth] for depth in drafted)
    assert after["peagle_running_requests"] == {(): 0}
    assert after["peagle_target_replicas"] == {(): 1}


def test_clients_that_leave_free_the_engine_of_all_their_sequences(application):
    """Of streams and of whole answers, of one choice and of three: each has a workload of its own."""
    ways = {f"leaving-{'stream' if stream else 'whole'}-{n}": (stream, n) for stream in (True, False) for n in (1, 3)}

    def leave(workload: str) -> None:
        stream, n = ways[workload]
        body = {
            "model": application.model, "messages": QUESTION, "max_tokens": 1500, "ignore_eos": True, "stream": stream,
            "n": n, "drafting": {"workload": workload},
        }  # fmt: skip
        # By this header Ray itself does not look for clients that leave.
        sent = {"json": body, "headers": {"X-Request-Disconnect-Disabled": "?1"} if n == 3 else {}}
        if stream:
            with httpx.stream("POST", f"{application.url}/v1/chat/completions", timeout=60, **sent) as response:
                lines = response.iter_lines()
                assert [next(lines) for _ in range(6)]
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{application.url}/v1/chat/completions", timeout=httpx.Timeout(60, read=6), **sent)

    def left() -> tuple[dict[str, float], float]:
        found = application.metrics()
        aborted = {workload: found["peagle_requests_total"][workload, "aborted"] for workload in ways}
        return aborted, found["peagle_running_requests"][()]

    with ThreadPoolExecutor(len(ways)) as pool:
        list(pool.map(leave, ways))
    # One that goes on ends as finished, however long this waits.
    ended = {workload: number for workload, (_, number) in ways.items()}, 0
    wait_for(lambda: left() == ended, "end of the work that nobody waits for", find=left)
    assert application.ask(max_tokens=1).status_code == 200


def test_serves_controller_starts_again_and_every_replica_stays(application):
    """A new controller asks each replica for its log file, and ends one that has none."""
    names = (TARGET_NAME, ROUTER_NAME)
    before = {name: application.processes(name) for name in names}
    client = _get_global_client()

    def controller() -> int:
        return ray.get(client._controller.get_pid.remote(), timeout=10)

    def is_back() -> bool:
        with contextlib.suppress(ray.exceptions.RayError, KeyError):
            return controller() != killed and serve.status().applications[APP_NAME].status == "RUNNING"
        return False

    killed = controller()
    os.kill(killed, signal.SIGKILL)
    wait_for(is_back, "controller", 120)
    assert {name: application.processes(name) for name in names} == before
    assert application.ask(max_tokens=1).status_code == 200


@pytest.mark.long
def test_python_in_the_cluster_reaches_the_same_target_by_handle(application):
    over_http = application.ask(drafting={"k": 3, "workload": "job"}).json()
    text, client = over_http["choices"][0]["message"]["content"], TargetClient()
    arguments: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "drafting": {"k": 3, "workload": "job"}}
    answer, chunks = client.chat(QUESTION, **arguments), list(client.stream_chat(QUESTION, **arguments))
    assert answer["choices"][0]["message"]["content"] == text
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text
    assert answer["drafting"] == chunks[-1]["drafting"] == over_http["drafting"]
    counting: dict[str, Any] = {"prompt": "One, two,", "max_tokens": 4, "temperature": 0}
    continued = client.complete(**counting)["choices"][0]["text"]

    async def ask_in_a_loop() -> tuple[Any, Any, list[Any]]:
        pieces = [chunk async for chunk in client.stream_complete(**counting)]
        return await client.achat(QUESTION, **arguments), await client.acomplete(**counting), pieces

    in_a_loop, completed, pieces = asyncio.run(ask_in_a_loop())
    assert in_a_loop["choices"] == answer["choices"]
    assert (
        completed["choices"][0]["text"] == "".join(piece["choices"][0]["text"] for piece in pieces) == continued != ""
    )
    # Refused by the front end, and by the engine's client.
    for fields, status, param in (({"model": "gpt-none"}, 404, "model"), ({"max_tokens": 100_000}, 400, "max_tokens")):
        with pytest.raises(TargetError) as raised:
            client.chat(QUESTION, **fields)
        assert (raised.value.status, raised.value.param) == (status, param)
    with pytest.raises(TargetError, match="no application 'other'"):
        TargetClient("other")


def test_the_service_answers_prompts_as_training_data(application, tmp_path):
    prompts, out, target = tmp_path / "prompts.jsonl", tmp_path / "data", prepare_target()
    prompts.write_text('{"prompt": "Say hello."}\n{"instruction": "Name a colour.", "output": "red"}\n')
    recipe = {"target": str(target), "data": str(out), "output": "run", "drafter": {"ptd_token_id": 16}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    line = ["generate", str(tmp_path / "recipe.yaml"), "--prompts", str(prompts), "--out", str(out)]
    line += ["--url", application.url, "--max-tokens", "12"]
    assert main(line) == 0
    template = ChatTemplate(load_tokenizer(target))
    documents = list(Conversations.load(out).documents())
    for (tokens, begin), text in zip(documents, ("Say hello.", "Name a colour."), strict=True):
        message = {"role": "user", "content": text}
        choice = application.ask(messages=[message]).json()["choices"][0]
        ends = [template.end_id] if choice["finish_reason"] == "stop" else []
        assert tokens[:begin].tolist() == template.render(Prompt((message,))).prompt
        assert tokens[begin:].tolist() == template.encode(choice["message"]["content"]) + ends
    assert json.loads((out / "manifest.json").read_text())["categories"] == ["default"] * 2
    (out / "part-000.npz").unlink()  # as where a run was killed
    answers = (out / "answers.jsonl").read_bytes()
    assert main(line) == 0
    assert (out / "answers.jsonl").read_bytes() == answers, "what was answered is asked again"
    assert len(Conversations.load(out)) == 2


@pytest.mark.long
def test_commands_beside_the_service_find_it(application, tmp_path):
    """Processes of their own, told at the most its URL."""

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)

    arguments = {"max_tokens": 12, "temperature": 0, "drafting": {"k": 3, "workload": "job"}}
    chat = {"url": "/v1/chat/completions", "body": {"messages": QUESTION, **arguments}}
    refused = {**chat, "body": {**chat["body"], "drafting": {"k": 99}}}
    complete = {"url": "/v1/completions", "body": {"prompt": "One, two,", "max_tokens": 4}}
    requests = {"a": chat, "b": refused, "c": complete}
    path, out = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"custom_id": name, **request}) + "\n" for name, request in requests.items()))
    done = run("-m", "deployments.cli", "batch", str(path), "--out", str(out), "--url", application.url)
    assert done.returncode == 1
    assert "2 answered, 0 had answers, 1 refused" in done.stderr
    answers = {line["custom_id"]: line["response"] for line in map(json.loads, out.read_text().splitlines())}
    assert {name: answer["status_code"] for name, answer in answers.items()} == {"a": 200, "b": 400, "c": 200}
    over_http = application.ask(drafting={"k": 3, "workload": "job"}).json()
    assert answers["a"]["body"]["choices"][0]["message"] == over_http["choices"][0]["message"]
    assert answers["b"]["body"]["error"]["param"] == "drafting.k"
    code = "from deployments.client import TargetClient; print(TargetClient().complete('One, two,', max_tokens=4))"
    assert "'choices': [{" in run("-c", code).stdout
    done = run("-m", "deployments.cli", "heads", "--back")
    assert done.returncode == 1
    assert done.stderr == "error: there is no change of a head to roll back\n"
