"""`peagle generate --url`: the answers of a running service to given prompts, as training data.

`OUT/requests.jsonl` and `OUT/answers.jsonl` are those of `peagle batch`, which retries, and goes on where it stopped.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import openai
from pydantic import ValidationError

from deployments.batch import answer_file, client_options
from peagle.schema import problem_lines
from peagle.train.prompts import Message, Prompt, check_is_new, keep_good, read_prompts, tokenize_prompts
from peagle.train.recipe import Recipe


async def regenerate(
    recipe: Recipe,
    source: str,
    out: Path,
    url: str,
    api_key: str | None = None,
    *,
    max_tokens: int,
    temperature: float,
    max_running: int = 32,
) -> dict[str, int]:
    """Makes a data folder of the prompts of a source and the answers of the first model that the service lists.

    Returns its totals, with `num_refused`, the prompts without an answer. Answers come as text and become tokens here.
    One that was cut at `max_tokens` has no end token. Raises ValueError and OSError as `read_prompts`, `answer_file`
    and `tokenize_prompts`, and ValueError where nothing was answered.
    """
    check_is_new(out)
    prompts = read_prompts(source)
    model = await _first_model(url, api_key)
    asked = dict[str, tuple[Prompt, dict[str, Any]]]()
    for prompt in prompts:
        body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        body["messages"] = [_as_sent(message) for message in prompt.messages]
        if prompt.tools:
            body["tools"] = list(prompt.tools)
        name = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
        asked[name] = prompt, {"custom_id": name, "url": "/v1/chat/completions", "body": body}
    out.mkdir(parents=True, exist_ok=True)
    requests, answers = out / "requests.jsonl", out / "answers.jsonl"
    requests.write_text("".join(json.dumps(request) + "\n" for _, request in asked.values()), encoding="utf-8")
    *_, refusals = await answer_file(requests, answers, url, api_key, max_running=max_running)
    lines = [json.loads(line) for line in answers.read_bytes().split(b"\n") if line]
    statuses = {line["custom_id"]: line["response"]["status_code"] if line["response"] else 400 for line in lines}
    found = [
        (asked[line["custom_id"]][0], line["response"]["body"]["choices"][0])
        for line in lines
        if line["custom_id"] in asked and statuses[line["custom_id"]] == 200
    ]
    if left := sum(statuses.get(name, 500) == 429 or statuses.get(name, 500) >= 500 for name in asked):
        raise OSError(f"{url} has not answered {left} of {len(asked)} prompts yet: the same command asks these again")
    if not found:
        raise ValueError(f"{url} answered none of {len(asked)} prompts; see {answers}")
    answered = keep_good(found, _with_answer, answers)
    made = {"temperature": temperature, "max_answer_tokens": max_tokens, "model": model}
    return tokenize_prompts(recipe.target_dir(), answered, source, out, **made) | {"num_refused": len(refusals)}


async def _first_model(url: str, api_key: str | None) -> str:
    options, headers = client_options(url, api_key)
    async with openai.AsyncOpenAI(**options, timeout=30) as client:
        try:
            return (await client.models.list(extra_headers=headers)).data[0].id
        except (openai.APIError, IndexError) as error:
            raise OSError(f"{url} lists no model: {error}") from error


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's API takes the arguments of a call as text."""
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [function | {"arguments": json.dumps(function["arguments"])} for function in functions]
    calls = [call | {"function": text} for call, text in zip(message["tool_calls"], texts, strict=True)]
    return message | {"tool_calls": calls}


def _with_answer(found: tuple[Prompt, dict[str, Any]]) -> Prompt:
    prompt, choice = found
    message = choice["message"]
    kept = {key: message.get(key) or None for key in ("role", "content", "tool_calls")}
    kept["reasoning_content"] = message.get("reasoning_content") or message.get("reasoning") or None
    try:
        is_whole = choice["finish_reason"] != "length"
        return prompt.with_answer(Message.model_validate(kept), is_whole=is_whole, is_targets=True)
    except ValidationError as error:
        raise ValueError(f"{prompt.where}: the answer {'; '.join(problem_lines(error, Message))}") from error
