"""Named hostile requests, and what is wrong with the service's answer to each, if anything.

A request is a function that asks with a client and judges the answer. `hostile_requests` lists all of them; a battery
(`benchmarks.battery`) and the tests of the service send them. Sizes are safe: what a service without limits makes of
one of them is at most some GB and a minute of one core.
"""

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import httpx

MAX_TOKENS = 4
NUM_IDLE, NUM_UNFINISHED, UNFINISHED_BYTES, HOLD_S = 1000, 40, 4 * 2**20, 5.0
"""Connections that send nothing; bodies that do not end, and the bytes of each; how long both are held."""
UNFINISHED = f"{NUM_UNFINISHED} bodies of 4 MiB without their end"

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
HELLO = [{"role": "user", "content": "Count from one to ten."}]
BASES: dict[str, dict[str, Any]] = {
    "chat": {"messages": HELLO, "max_tokens": MAX_TOKENS},
    "completions": {"prompt": "One, two,", "max_tokens": MAX_TOKENS},
}


class Outcome(NamedTuple):
    """`answer`: status and message as the client saw them. `problem`: "" where the answer is right."""

    answer: str
    problem: str = ""


Ask = Callable[[httpx.Client], Outcome]


# ---- judging answers


def judged(response: httpx.Response, statuses: Iterable[int] = range(200, 500)) -> Outcome:
    """Whether the status is one of these or 429, and an error is in OpenAI's form and names no flag of vLLM."""
    found, wrong = str(response.status_code), ""
    if response.status_code not in (*statuses, 429):
        wrong = f"status {found}"
    if response.status_code >= 400:
        try:
            error = response.json()["error"]
            found += f" {error['message']:.150}"
            if set(error) != {"message", "type", "param", "code"}:
                wrong = wrong or "not in OpenAI's form"
            if "--" in error["message"].replace("---", ""):
                wrong = wrong or "the message names a command-line flag"
        except (ValueError, KeyError, TypeError):
            found += f" {response.text:.150}"
            wrong = wrong or "not in OpenAI's form"
        if response.status_code in (429, 502, 503) and "retry-after" not in response.headers:
            wrong = wrong or "no Retry-After"
    return Outcome(found, wrong)


def all_of(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcome of several requests: different answers, and the first problem."""
    outcomes = list(outcomes)
    problem = next((one.problem for one in outcomes if one.problem), "")
    return Outcome("; ".join(dict.fromkeys(one.answer for one in outcomes)), problem)


def post(client: httpx.Client, call: str, **fields: Any) -> httpx.Response:
    return client.post(PATHS[call], json={**BASES[call], **fields})


def expect(*statuses: int, call: str = "chat", **fields: Any) -> Ask:
    """Sends these fields; the answer has one of these statuses."""
    return lambda client: judged(post(client, call, **fields), statuses)


def expect_raw(*statuses: int, content: bytes = b"", headers: dict[str, str] | None = None) -> Ask:
    """Sends a chat request with this content, by default a right one."""
    content = content or json.dumps(BASES["chat"]).encode()
    headers = {"Content-Type": "application/json", **(headers or {})}
    return lambda client: judged(client.post(PATHS["chat"], content=content, headers=headers), statuses)


def expect_page(method: str, path: str) -> Ask:
    """The answer has status 200."""
    body = BASES["chat"] if method == "POST" else None
    return lambda client: judged(client.request(method, path, json=body), (200,))


# ---- lists of wrong elements


def as_content(values: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": values}]}


def as_tool_calls(values: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "assistant", "tool_calls": values}]}


def as_field(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda values: {name: values}


WRONG_ELEMENTS: dict[str, tuple[str, Callable[[Any], dict[str, Any]], Any]] = {
    "messages: numbers": ("chat", as_field("messages"), 1),
    "messages: objects": ("chat", as_field("messages"), {}),
    "messages: without content": ("chat", as_field("messages"), {"role": "user"}),
    "messages.content: numbers": ("chat", as_content, 1),
    "messages.content: objects": ("chat", as_content, {}),
    "messages.content: parts without text": ("chat", as_content, {"type": "text"}),
    "messages.tool_calls: objects": ("chat", as_tool_calls, {}),
    "documents: numbers": ("chat", as_field("documents"), 1),
    "tools: numbers": ("chat", as_field("tools"), 1),
    "tools: objects": ("chat", as_field("tools"), {"type": "function"}),
    "prompt: objects": ("completions", as_field("prompt"), {}),
    "prompt: numbers and a text": ("completions", lambda values: {"prompt": [*values, "a"]}, 1),
    "prompt: lists of objects": ("completions", lambda values: {"prompt": [values]}, {}),
    "prompt: empty lists": ("completions", as_field("prompt"), []),
    "stop: numbers": ("chat", as_field("stop"), 1),
    "bad_words: numbers": ("chat", as_field("bad_words"), 1),
    "bad_words: words": ("completions", as_field("bad_words"), "a"),
    "stop_token_ids: texts": ("chat", as_field("stop_token_ids"), "a"),
    "allowed_token_ids: texts": ("chat", as_field("allowed_token_ids"), "a"),
    "logprob_token_ids: texts": ("chat", as_field("logprob_token_ids"), "a"),
    "structured_outputs.choice: numbers": ("chat", lambda values: {"structured_outputs": {"choice": values}}, 1),
    "vllm_xargs: list of objects": ("chat", lambda values: {"vllm_xargs": {"a": values}}, {}),
}

WRONG_MAPPINGS: dict[str, tuple[str, Any]] = {
    "logit_bias: texts": ("logit_bias", "a"),
    "vllm_xargs: objects": ("vllm_xargs", {}),
    "chat_template_kwargs: numbers": ("chat_template_kwargs", 1),
    "metadata: objects": ("metadata", {}),
}


def expect_wrong_list(
    call: str, fields_of: Callable[[Any], dict[str, Any]], element: Any, num_bytes: int, *statuses: int
) -> Ask:
    """Sends a list of so many bytes. It is made when it is sent."""
    num = num_bytes // (len(json.dumps(element)) + 2)
    return lambda client: expect(*statuses, call=call, **fields_of([element] * num))(client)


def expect_wrong_mapping(name: str, value: Any, num_bytes: int) -> Ask:
    keys = range(num_bytes // (len(json.dumps(value)) + 12))
    return lambda client: expect(200, 400, 413, **{name: {f"{key:06}": value for key in keys}})(client)


# ---- grammars


def as_response_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def as_tool(schema: Any) -> dict[str, Any]:
    function = {"name": "f", "parameters": schema}
    chosen = {"type": "function", "function": {"name": "f"}}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": chosen}


def as_structured(schema: Any) -> dict[str, Any]:
    return {"structured_outputs": {"json": schema}}


def doubling_references(num: int) -> dict[str, Any]:
    """A schema of `num` definitions each of which refers to the next one twice."""
    definitions: dict[str, Any] = {f"d{num}": {"type": "boolean"}}
    for index in range(num):
        below = {"$ref": f"#/$defs/d{index + 1}"}
        definitions[f"d{index}"] = {"type": "object", "properties": {"a": below, "b": below}, "required": ["a", "b"]}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def nested(schema: dict[str, Any], depth: int) -> dict[str, Any]:
    for _ in range(depth):
        schema = {"type": "array", "minItems": 50, "maxItems": 100, "items": schema}
    return schema


HUGE = 10_000_000
SCHEMAS: dict[str, Any] = {
    "minItems 1e7": {"type": "array", "minItems": HUGE},
    "maxItems 1e7": {"type": "array", "items": {"type": "integer"}, "maxItems": HUGE},
    "minLength 1e7": {"type": "string", "minLength": HUGE},
    "maxLength 1e7": {"type": "string", "maxLength": HUGE},
    "minProperties 1e7": {"type": "object", "minProperties": HUGE},
    "minItems in a property": {"type": "object", "properties": {"a": {"type": "array", "minItems": HUGE}}},
    "pattern of 10,000 repetitions": {"type": "string", "pattern": "[a-z]{1,10000}"},
    "pattern of nested repetitions": {"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"},
    "arrays of 100 in one another": nested({"type": "integer"}, 6),
    "references that double": doubling_references(40),
    "a reference to itself": {"$ref": "#"},
    "5,000 values of an enum": {"enum": [f"v{number:05}" for number in range(5000)]},
    "2,000 properties": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}},
    "300 objects in one another": nested({}, 300),
    "a bound below zero": {"type": "array", "minItems": -1},
    "a bound that is a text": {"type": "array", "minItems": "many"},
    "a bound of 400 digits": {"type": "integer", "minimum": 10**400},
    "multipleOf of a tiny number": {"type": "number", "multipleOf": 1e-300},
}
MUST_REFUSE = {"300 objects in one another", "a bound of 400 digits", "minItems 1e7", "minItems in a property"}

REGEXES = {
    "regex of 10,000 repetitions": "[a-z]{1,10000}",
    "regex of 1e7 repetitions": "a{10000000}",
    "regex of nested repetitions": "((a{1,100}){1,100}){1,100}",
    "regex of nested stars": "((a*)*)*b",
    "regex of wide classes": r"[\u0000-\uffff]{1,1000}" * 8,
    "regex of 8,000 alternatives": "|".join(f"a{number}" for number in range(8000)),
    "regex of 5,000 groups": "(" * 5000 + "a" + ")" * 5000,
    "regex that ends before it starts": "a^b",
}


def chained(rule: str, num: int) -> str:
    """An EBNF of `num` rules; `rule` names the next one."""
    return "\n".join([*(f"r{n} ::= {rule.format(f'r{n + 1}')}" for n in range(num)), f'r{num} ::= "a"', "root ::= r0"])


GRAMMARS = {
    "EBNF of 1e7 repetitions": 'root ::= "a"{10000000}',
    "EBNF of 10,000 repetitions": "root ::= [a-z]{1,10000}",
    "EBNF of nested repetitions": chained("{0}{{1,50}}", 5),
    "EBNF of left recursion": 'root ::= root "a" | "b"',
    "EBNF of 3,000 rules": chained('"b" {0}', 3000),
    "EBNF of doubling rules": chained("{0} {0}", 40),
}


def grammar_requests() -> dict[str, Ask]:
    found: dict[str, Ask] = {}
    for name, schema in SCHEMAS.items():
        statuses = (400,) if name in MUST_REFUSE else (200, 400)
        found[f"schema: {name}"] = expect(*statuses, **as_structured(schema))
        if name in ("minItems 1e7", "pattern of 10,000 repetitions"):
            found[f"response_format: {name}"] = expect(*statuses, **as_response_format(schema))
            # With a tool parser the schema is enforced for `strict: true` alone.
            found[f"parameters of a tool: {name}"] = expect(200, 400, **as_tool(schema))
    huge = SCHEMAS["minItems 1e7"]
    found["schema: minItems 1e7 for a completion"] = expect(400, call="completions", **as_structured(huge))
    for name, regex in REGEXES.items():
        found[name] = expect(200, 400, structured_outputs={"regex": regex})
    for name, grammar in GRAMMARS.items():
        found[name] = expect(200, 400, structured_outputs={"grammar": grammar})
    found["regex that matches nothing"] = expect(400, structured_outputs={"regex": r"[^\s\S]"})
    structures = [{"begin": "<a>", "schema": huge, "end": "</a>"}]
    tag = {"type": "structural_tag", "structures": structures, "triggers": ["<a>"]}
    found["structural tag of a huge schema"] = expect(400, response_format=tag)
    return found


# ---- neighbours in a batch


def at_once(client: httpx.Client, asks: Iterable[Ask]) -> list[Outcome]:
    asks = list(asks)
    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(lambda ask: ask(client), asks))


def chosen_log_probabilities(client: httpx.Client) -> Outcome:
    """logprobs beside logprob_token_ids in one batch: the target has no such log probabilities where there are
    drafts."""
    plain = expect(200, call="completions", logprobs=5, max_tokens=24)
    chosen = expect(400, call="completions", logprobs=3, logprob_token_ids=[1, 2, 3], max_tokens=24)
    return all_of(at_once(client, [plain, chosen] * 2))


NEIGHBOURS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9, "seed": 1, "top_k": 5, "top_p": 0.9},
    {"temperature": 0.9, "min_p": 0.1},
    {"logit_bias": {"17": 5}},
    {"logprobs": True, "top_logprobs": 5},
    {"prompt_logprobs": 2},
    {"bad_words": ["one"]},
    {"allowed_token_ids": [1, 2, 3]},
    {"repetition_penalty": 1.3, "presence_penalty": 1, "frequency_penalty": 1},
    {"structured_outputs": {"regex": "[0-9]{1,12}"}},
    {"min_tokens": 8, "stop_token_ids": [2]},
    {"drafting": {"k": 0}},
    {"ignore_eos": True, "return_token_ids": True},
)


def all_kinds_of_neighbours(client: httpx.Client) -> Outcome:
    return all_of(at_once(client, [expect(200, **{"max_tokens": 16, **fields}) for fields in NEIGHBOURS]))


def many_sequences(client: httpx.Client) -> Outcome:
    """Requests of 3 KB that ask for 16 sequences and the log probabilities of all tokens: above the limit of those."""
    fields: dict[str, Any] = {"n": 16, "echo": True, "logprobs": 20, "temperature": 0.9, "prompt": "word " * 600}
    return all_of(at_once(client, [expect(400, call="completions", **fields)] * 2))


# ---- HTTP


@contextmanager
def connections(client: httpx.Client, num: int) -> Iterator[list[socket.socket]]:
    url = client.base_url
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((url.host, url.port), timeout=20)) for _ in range(num)]


def as_http(content: bytes, num_bytes: int | None = None) -> bytes:
    """A chat request. `num_bytes`: size that it says its content has, by default the right one."""
    head = f"POST {PATHS['chat']} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {num_bytes or len(content)}\r\n\r\n".encode() + content


def idle_connections(client: httpx.Client) -> Outcome:
    with connections(client, NUM_IDLE):
        time.sleep(HOLD_S)
        return expect(200)(client)


def unfinished_bodies(client: httpx.Client) -> Outcome:
    """Bodies of which all but the last byte is sent."""
    request = as_http(b" " * (UNFINISHED_BYTES - 1), UNFINISHED_BYTES)
    with connections(client, NUM_UNFINISHED) as unfinished:
        for connection in unfinished:
            connection.settimeout(2.0)
            with suppress(OSError):  # the service reads no more of it, or has refused it
                connection.sendall(request)
        time.sleep(HOLD_S)
        return expect(200)(client)


def slow_readers(client: httpx.Client) -> Outcome:
    """Streams of which nothing is read for a while."""
    body = {**BASES["chat"], "max_tokens": 60, "ignore_eos": True, "stream": True, "logprobs": True}
    with connections(client, 8) as unread:
        for connection in unread:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.sendall(as_http(json.dumps(body).encode()))
        time.sleep(HOLD_S)
        return expect(200)(client)


def clients_that_leave(client: httpx.Client) -> Outcome:
    body = {**BASES["chat"], "max_tokens": 1000, "ignore_eos": True, "n": 4, "temperature": 1}
    for _ in range(20):
        with connections(client, 1) as (connection,):
            connection.sendall(as_http(json.dumps(body).encode()))
            time.sleep(0.05)
    return expect(200)(client)


FROM_ELSEWHERE = (400, 403, 421)
"""Statuses for a Host or Origin that is not the service's own."""

HTTP: dict[str, Ask] = {
    "Content-Type text/plain": expect_raw(415, headers={"Content-Type": "text/plain"}),
    "Content-Type of a form": expect_raw(415, headers={"Content-Type": "application/x-www-form-urlencoded"}),
    "Host of another name": expect_raw(*FROM_ELSEWHERE, headers={"Host": "attacker.example"}),
    "Origin of another page": expect_raw(*FROM_ELSEWHERE, headers={"Origin": "http://attacker.example"}),
    "HEAD /health": expect_page("HEAD", "/health"),
    "HEAD /ping": expect_page("HEAD", "/ping"),
    "GET /health/": expect_page("GET", "/health/"),
    "POST /v1/chat/completions/": expect_page("POST", "/v1/chat/completions/"),
    "a header of 70,000 bytes": lambda client: Outcome(
        found := str(client.post(PATHS["chat"], json=BASES["chat"], headers={"X-A": "a" * 70_000}).status_code),
        "" if found in ("400", "431") else f"status {found}",
    ),
    "90 headers": expect_raw(200, 400, headers={f"X-{number}": "a" for number in range(90)}),
    "a forwarded address": expect_raw(200, headers={"X-Forwarded-For": "10.0.0.1, 127.0.0.1", "Forwarded": "for=1"}),
    "no JSON": expect_raw(400, content=b"{"),
    "an empty object": expect_raw(400, content=b"{}"),
    "no UTF-8": expect_raw(400, content=b'{"messages": "\xff"}'),
    "100,000 lists in one another": expect_raw(400, content=b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "60,000 objects in one another": expect_raw(400, content=b'{"a":' * 60_000 + b"1" + b"}" * 60_000),
    "a number of 100,000 digits": expect_raw(400, content=b'{"messages":[],"seed":' + b"9" * 100_000 + b"}"),
    "NaN": expect_raw(400, content=json.dumps({**BASES["chat"], "temperature": float("nan")}).encode()),
    "Infinity": expect_raw(400, content=json.dumps({**BASES["chat"], "top_p": float("inf")}).encode()),
    "a lone surrogate": expect_raw(400, content=json.dumps(BASES["chat"] | as_content("\ud800")).encode()),
    "a name of lone surrogates": expect_raw(400, content=b'{"messages":[],"\\ud800":1}'),
    "70,000 fields": lambda client: expect(400, **{f"f{number}": 1 for number in range(70_000)})(client),
    "1,000 idle connections": idle_connections,
    UNFINISHED: unfinished_bodies,
    "8 streams that nobody reads": slow_readers,
    "20 clients that leave": clients_that_leave,
}


# ---- answers that must be right


def same_seed(client: httpx.Client) -> Outcome:
    fields: dict[str, Any] = {"temperature": 0.9, "seed": 42, "max_tokens": 16}
    texts = {post(client, "chat", **fields).json()["choices"][0]["message"]["content"] for _ in range(5)}
    return Outcome(f"{len(texts)} different answers of 5", "" if len(texts) == 1 else "seed has no effect")


def stop_text(client: httpx.Client) -> Outcome:
    fields = {"prompt": "Count: 1, 2, 3,", "stop": ["4"], "temperature": 0, "max_tokens": 32, "logprobs": 0}
    found = []
    for k in (0, 7, 7, 7):
        answer = post(client, "completions", **fields, return_token_ids=True, drafting={"k": k}).json()
        choice = answer["choices"][0]
        lengths = (len(choice["token_ids"]), len(choice["logprobs"]["tokens"]), answer["usage"]["completion_tokens"])
        found.append((choice["finish_reason"], *lengths))
    is_right = len(set(found)) == 1 and len(set(found[0][1:])) == 1
    return Outcome(
        f"ids, log probabilities, usage at K = 0, 7, 7, 7: {found}", "" if is_right else "tokens after the stop"
    )


def last_chunk(client: httpx.Client) -> Outcome:
    response = post(client, "chat", stream=True, stream_options={"include_usage": True})
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    number = next((index for index, chunk in enumerate(chunks) if "drafting" in chunk), -1)
    found = f"drafting in chunk {number + 1} of {len(chunks)}"
    return Outcome(found, "" if number == len(chunks) - 1 else "not in the last chunk")


def drafting_that_was_off(client: httpx.Client) -> Outcome:
    drafting = post(client, "chat", logit_bias={"17": 1}, temperature=0, max_tokens=12).json()["drafting"]
    found = f"k {drafting['k']}, {drafting['source']}, {drafting['num_draft_tokens']} drafts"
    is_right = drafting["k"] == 0 or drafting["num_draft_tokens"] > 0
    return Outcome(found, "" if is_right else "k is not what happened")


def field_of_openai(client: httpx.Client) -> Outcome:
    found = judged(post(client, "chat", functions=[]), (400,))
    return Outcome(found.answer, found.problem or ("misleading hint" if "truncation_side" in found.answer else ""))


ANSWERS: dict[str, Ask] = {
    "the same seed five times": same_seed,
    "a stop text": stop_text,
    "drafting in the last chunk": last_chunk,
    "drafting of a request with logit_bias": drafting_that_was_off,
    "functions": field_of_openai,
    "modalities": expect(200, modalities=["text"]),
    "prediction": expect(200, prediction={"type": "content", "content": "One"}),
    "prompt_cache_options": expect(200, prompt_cache_options={"mode": "implicit"}),
    "moderation": expect(200, moderation={"model": "omni-moderation-latest"}),
    "web_search_options": expect(200, web_search_options={}),
    "best_of 1": expect(200, call="completions", best_of=1),
    "tools without their parser": expect(
        200, 400, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}], tool_choice="auto"
    ),
    "logprob_token_ids alone": expect(400, call="completions", logprobs=3, logprob_token_ids=[1, 2, 3]),
    "logprob_token_ids in a stream": expect(
        400, call="completions", logprobs=3, logprob_token_ids=[1, 2, 3], stream=True
    ),
}


def hostile_requests(num_bytes: int = 2**20) -> dict[str, Ask]:
    """All by name. `num_bytes`: size of the bodies with long lists."""
    lists = {
        f"{name}, {num_bytes // 1024} KiB": expect_wrong_list(call, fields_of, element, num_bytes, 400, 413)
        for name, (call, fields_of, element) in WRONG_ELEMENTS.items()
    }
    mappings = {
        f"{name}, {num_bytes // 1024} KiB": expect_wrong_mapping(field, value, num_bytes)
        for name, (field, value) in WRONG_MAPPINGS.items()
    }
    neighbours = {
        "all kinds of neighbours": all_kinds_of_neighbours,
        "n = 16 with echo and log probabilities, twice": many_sequences,
        "logprobs beside logprob_token_ids": chosen_log_probabilities,
    }
    return {**ANSWERS, **HTTP, **grammar_requests(), **lists, **mappings, **neighbours}
