"""`peagle batch` against a small real service: what is sent, what is written, and how a run goes on."""

import asyncio
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deployments import regenerate
from deployments.batch import BatchRequest, read_requests
from deployments.cli import main

Json = dict[str, Any]
CHAT = "/v1/chat/completions"


class SmallService(ThreadingHTTPServer):
    """Answers with what it was asked, by the text of the prompt: `refused`; `full` once; `lost` is not answered."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[tuple[str, Json, str | None]] = []
        self.num_running, self.most_running = 0, 0
        self.lock = threading.Lock()

    def count(self) -> Counter[str]:
        return Counter(str(body["prompt"]) for _, body, _ in self.asked)


class JsonHandler(BaseHTTPRequestHandler):
    """Of small services."""

    protocol_version = "HTTP/1.1"

    def send(self, status: int, document: Json) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Retry-After", "0.1")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


class Handler(JsonHandler):
    server: SmallService

    def do_GET(self) -> None:
        is_wrong = self.headers["Authorization"] == "Bearer wrong"
        self.send(*((401, {"error": {"message": "no such key"}}) if is_wrong else (503, {})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, body, self.headers["Authorization"]))
            self.server.num_running += 1
            self.server.most_running = max(self.server.most_running, self.server.num_running)
            num_asked = self.server.count()[body["prompt"]]
        try:
            match body["prompt"]:
                case "lost":
                    self.close_connection = True
                case "refused":
                    self.send(400, {"error": {"message": "not so", "param": "prompt"}})
                case "full" if num_asked == 1:
                    self.send(429, {"error": {"message": "full"}})
                case text:
                    self.send(200, {"text": text})
        finally:
            self.server.num_running -= 1


@pytest.fixture
def service() -> Iterator[SmallService]:
    with SmallService() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def written(path: Path, *prompts: str, beside: str = "") -> Path:
    """A file of requests, whose `custom_id`s are the prompts, and other lines."""
    lines = [{"custom_id": prompt, "method": "POST", "url": CHAT, "body": {"prompt": prompt}} for prompt in prompts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + beside)
    return path


def answers(path: Path) -> dict[str, Json]:
    return {line["custom_id"]: line for line in map(json.loads, path.read_text().splitlines())}


def test_each_line_is_answered_or_says_why_not(service: SmallService, tmp_path: Path, capsys: Any) -> None:
    path = written(tmp_path / "requests.jsonl", "a", "refused", "full", beside='{"custom_id": "cut", "url"\n\n')
    out = tmp_path / "answers.jsonl"
    assert main(["batch", str(path), "--out", str(out), "--url", f"{service.url}/v1/", "--api-key", "sk"]) == 1
    shown = capsys.readouterr().err
    assert "2 answered, 0 had answers, 2 refused" in shown
    assert f"{path}: 2 lines were refused, see {out}; the first: line 4: Expecting ':'" in shown
    found = answers(out)
    assert found["a"] == {"custom_id": "a", "response": {"status_code": 200, "body": {"text": "a"}}, "error": None}
    assert found["full"]["response"]["status_code"] == 200
    refusal = {"error": {"message": "not so", "param": "prompt"}}
    assert found["refused"]["response"] == {"status_code": 400, "body": refusal}
    assert found[None]["response"] is None
    assert found[None]["error"]["message"].startswith("line 4: ")
    assert service.count() == {"a": 1, "refused": 1, "full": 2}
    assert {(path, key) for path, _, key in service.asked} == {(CHAT, "Bearer sk")}


def test_without_a_file_for_answers_they_are_printed(service: SmallService, tmp_path: Path, capsys: Any) -> None:
    path = written(tmp_path / "requests.jsonl", "a")
    assert main(["batch", str(path), "--url", service.url]) == 0
    assert json.loads(capsys.readouterr().out)["response"]["body"] == {"text": "a"}
    assert service.asked == [(CHAT, {"prompt": "a"}, None)]  # a key that is none would be refused as a wrong one


def test_a_run_goes_on_where_it_stopped(service: SmallService, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "answers.jsonl"
    main(["batch", str(written(tmp_path / "some.jsonl", "a", "refused")), "--out", str(out), "--url", service.url])
    out.write_text(out.read_text() + '{"custom_id": "b", "resp')  # killed while it wrote
    path = written(tmp_path / "all.jsonl", "a", "b", "refused", "c")
    assert main(["batch", str(path), "--out", str(out), "--url", service.url]) == 1
    shown = capsys.readouterr().err
    assert "2 answered, 1 had answers, 1 refused" in shown
    assert 'the first: refused: 400 {"error": {"message": "not so"' in shown
    assert service.count() == {"a": 1, "b": 1, "refused": 2, "c": 1}
    assert len(out.read_text().splitlines()) == 4
    assert answers(out).keys() == {"a", "b", "refused", "c"}


def test_another_file_is_not_overwritten_by_answers(service: SmallService, tmp_path: Path, capsys: Any) -> None:
    path = written(tmp_path / "requests.jsonl", "a")
    before = path.read_bytes()
    assert main(["batch", str(path), "--out", str(path), "--url", service.url]) == 1
    assert f"{path} has lines that are no answers" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert service.asked == []


def test_a_service_that_goes_away_ends_the_run(
    service: SmallService, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.batch.MAX_RETRIES", 1)
    path, out = written(tmp_path / "requests.jsonl", "a", "lost", "b"), tmp_path / "answers.jsonl"
    assert main(["batch", str(path), "--out", str(out), "--url", service.url, "--max-running", "1"]) == 1
    assert f"{service.url} does not answer" in capsys.readouterr().err
    assert answers(out).keys() == {"a"}
    assert service.count() == {"a": 1, "lost": 2}


def test_a_wrong_key_or_address_is_said_at_once(service: SmallService, tmp_path: Path, capsys: Any) -> None:
    path = str(written(tmp_path / "requests.jsonl", "a", "b"))
    assert main(["batch", path, "--url", service.url, "--api-key", "wrong"]) == 1
    assert "refuses the key: Error code: 401 - no such key" in capsys.readouterr().err
    assert service.asked == []
    begun_s = time.monotonic()
    assert main(["batch", path, "--url", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err
    assert time.monotonic() - begun_s < 10


def test_no_more_requests_run_than_may(service: SmallService, tmp_path: Path) -> None:
    path = written(tmp_path / "requests.jsonl", *map(str, range(40)))
    out = tmp_path / "answers.jsonl"
    assert main(["batch", str(path), "--out", str(out), "--url", service.url, "--max-running", "3"]) == 0
    assert answers(out).keys() == set(map(str, range(40)))
    assert service.most_running <= 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting property name"),
        ('{"custom_id": 1, "url": "/v1/a", "body": {}}', "line 2: custom_id: Input should be a valid string"),
        ('{"custom_id": "b", "url": "http://a/v1/", "body": {}}', "line 2: url: String should match"),
        ('{"custom_id": "b", "url": "/v1/a", "body": []}', "line 2: body: Input should be a mapping"),
        (
            '{"custom_id": "b", "url": "/v1/a", "body": {"a": "\\ud83d"}}',
            "line 2: body cannot be sent as JSON: 'utf-8'",
        ),
        ('{"custom_id": "b", "url": "/v1/a", "body": {"a": NaN}}', "line 2: body cannot be sent as JSON: Out of range"),
        ('{"custom_id": "b", "url": "/v1/a", "body": {"stream": true}}', "line 2: body.stream is true"),
        ('{"custom_id": "a", "url": "/v1/a", "body": {}}', "line 2: custom_id 'a' stands in an earlier line"),
    ],
)
def test_a_wrong_line_does_not_refuse_the_file(tmp_path: Path, line: str, message: str) -> None:
    right = {"custom_id": "a", "url": CHAT, "body": {"prompt": "separators\u2028inside"}}
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(right, ensure_ascii=False) + "\n" + line + "\n", encoding="utf-8")
    requests, (refused,) = read_requests(path)
    assert requests == {"a": BatchRequest.model_validate(right)}
    assert re.match(re.escape(message), refused["error"]["message"])


def test_training_data_is_made_without_a_line_that_could_not_be_sent(tmp_path: Path, monkeypatch: Any) -> None:
    async def answer(path: Path, out: Path, *_: Any, **__: Any) -> tuple[int, int, list[str]]:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        refused = [{"custom_id": line["custom_id"], "response": None, "error": {}} for line in lines]
        out.write_text("".join(json.dumps(line) + "\n" for line in refused))
        return 0, 0, ["line 1"]

    async def model(*_: Any) -> str:
        return "m"

    monkeypatch.setattr(regenerate, "answer_file", answer)
    monkeypatch.setattr(regenerate, "_first_model", model)
    (source := tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    recipe: Any = None
    made = regenerate.regenerate(recipe, str(source), tmp_path / "out", "http://s", max_tokens=8, temperature=0.0)
    with pytest.raises(ValueError, match="http://s answered none of 1 prompts"):
        asyncio.run(made)
