"""`peagle batch`: answers a file of requests, in the format of OpenAI's batches, at any service with OpenAI's API.

Enters: a JSON object a line with `custom_id`, `url` and `body`. Leaves: a line for each as it is answered,
`{"custom_id", "response": {"status_code", "body"}, "error"}`. A line that is no request has an `error` and no response.
"""

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any, TextIO

import openai
from pydantic import BaseModel, Field, ValidationError, field_validator
from tqdm import tqdm

from peagle.schema import problem_lines

Json = dict[str, Any]

MAX_RETRIES = 8
"""Retries of a request that a full or a restarting service refuses: for 40 s, or as long as its Retry-After says."""

TIMEOUT_S = 3600.0


class BatchRequest(BaseModel):
    """A line of a file of requests."""

    custom_id: str
    url: str = Field(pattern="^/v1/")
    body: Json

    @field_validator("body")
    @classmethod
    def _check_body(cls, body: Json) -> Json:
        if body.get("stream"):
            raise ValueError(".stream is true: answers of a batch come whole, leave it out")
        try:
            json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            raise ValueError(f" cannot be sent as JSON: {error}") from error
        return body


def client_options(url: str, api_key: str | None) -> tuple[Json, Any]:
    """Options of an OpenAI client of the service at `url`, and `extra_headers` of its requests: without a key none is
    sent, as a service with keys would take any for a wrong one."""
    base = url.rstrip("/").removesuffix("/v1")
    headers = {} if api_key else {"Authorization": openai.Omit()}
    return {"base_url": f"{base}/v1", "api_key": api_key or "none"}, headers


def read_requests(path: Path) -> tuple[dict[str, BatchRequest], list[Json]]:
    """The requests of a file by `custom_id`, and what is written for its other lines. Raises ValueError where the file
    has no line, OSError where it cannot be read."""
    requests, refused = dict[str, BatchRequest](), []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        raw: Any = None
        try:
            raw = json.loads(line)
            request = BatchRequest.model_validate(raw)
            if request.custom_id in requests:
                raise ValueError(f"custom_id {request.custom_id!r:.80} stands in an earlier line")
            requests[request.custom_id] = request
        except (ValueError, RecursionError) as error:
            problems = problem_lines(error, BatchRequest) if isinstance(error, ValidationError) else [str(error)]
            wrong = {"code": "invalid_line", "message": f"line {number}: {'; '.join(problems)}"}
            custom_id = raw.get("custom_id") if isinstance(raw, dict) else None
            refused.append({"custom_id": custom_id, "response": None, "error": wrong})
    if not requests and not refused:
        raise ValueError(f"{path} holds no requests")
    return requests, refused


def keep_answers(out: Path) -> set[str]:
    """Take all lines out of a file of answers but those with status 200. Gives the `custom_id`s of these. Raises
    ValueError where it is a file of something else."""
    *lines, _ = out.read_bytes().split(b"\n") if out.exists() else [b""]  # the last line may be half of one
    kept = {}
    for line in lines:
        try:
            answer = json.loads(line)
            if answer["response"] is not None and answer["response"]["status_code"] == 200:
                kept[answer["custom_id"]] = line + b"\n"
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise ValueError(f"{out} has lines that are no answers: name another file") from error
    beside = out.with_name(f"{out.name}.part")
    beside.write_bytes(b"".join(kept.values()))
    beside.replace(out)
    return set(kept)


async def answer_file(
    path: Path, out: Path | None, url: str, api_key: str | None = None, *, max_running: int = 32
) -> tuple[int, int, list[str]]:
    """Answer the requests of a file, `max_running` at a time. What `out` has an answer to is not asked again.

    Args:
        out: file of answers; None: standard output.
        url: of the service, such as `http://127.0.0.1:8000`.

    Returns how many requests are answered now and were before, and why each other line was refused.

    Raises:
        ValueError: the file has no line, `out` is no file of answers, or the service refuses the key.
        OSError: a file cannot be read or written, or the service does not answer.
    """
    requests, refused = read_requests(path)
    answered = set() if out is None else keep_answers(out) & requests.keys()
    options, headers = client_options(url, api_key)
    client = openai.AsyncOpenAI(**options, max_retries=MAX_RETRIES, timeout=TIMEOUT_S)
    num_before, refusals = len(answered), [line["error"]["message"] for line in refused]
    todo = [request for name, request in requests.items() if name not in answered]
    left = iter(todo)

    def write(sink: TextIO, line: Json) -> None:
        sink.write(json.dumps(line) + "\n")
        sink.flush()

    async def work(sink: TextIO, bar: Any) -> None:
        for request in left:
            response = await _ask(client, request, headers)
            write(sink, {"custom_id": request.custom_id, "response": response, "error": None})
            if response["status_code"] == 200:
                answered.add(request.custom_id)
            else:
                refusals.append(f"{request.custom_id}: {response['status_code']} {json.dumps(response['body'])[:200]}")
            bar.update()

    with contextlib.ExitStack() as stack:
        sink = sys.stdout if out is None else stack.enter_context(out.open("a", encoding="utf-8"))
        for line in refused:
            write(sink, line)
        bar = stack.enter_context(
            tqdm(total=len(requests), initial=len(answered), unit="request", disable=None if out else True)
        )
        try:
            async with client:
                if todo:
                    await _check_service(client, headers)
                await asyncio.gather(*(work(sink, bar) for _ in range(max_running)))
        except openai.AuthenticationError as error:
            raise ValueError(f"{url} refuses the key: {error.message}") from error
        except openai.APIConnectionError as error:
            raise OSError(f"{url} does not answer: {error.__cause__ or error}") from error
    return len(answered) - num_before, num_before, refusals


async def _check_service(client: openai.AsyncOpenAI, headers: Any) -> None:
    """Raises APIConnectionError or AuthenticationError at once where every request would, after its retries."""
    try:
        await client.with_options(max_retries=0, timeout=30).models.list(extra_headers=headers)
    except openai.APIStatusError as error:
        if error.status_code == 401:
            raise


async def _ask(client: openai.AsyncOpenAI, request: BatchRequest, headers: Any) -> Json:
    """Status and body of the answer to a request. Raises AuthenticationError where the service refuses the key."""
    try:
        path = request.url.removeprefix("/v1")
        answer: Any = await client.post(path, body=request.body, cast_to=object, options={"headers": headers})
    except openai.APIStatusError as error:
        if error.status_code == 401:
            raise
        return {"status_code": error.status_code, "body": {"error": error.body}}
    return {"status_code": 200, "body": answer}
