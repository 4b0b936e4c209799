"""The OpenAPI document of the HTTP API: bodies as vLLM's records have them, answers, and every status with its form.

Enters: the FastAPI application and the records. Leaves: what GET /openapi.json says.
"""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REF = "#/components/schemas/{model}"
REFUSALS = {
    "400": "The request is not valid: `param` names the field, where one is to blame.",
    "401": "No API key, or one that nobody has.",
    "403": "A workload tag from a caller that may not set one, or a web page or Host that the settings do not name.",
    "404": "The model is not served here.",
    "408": "The body did not come in time.",
    "413": "The body is larger than `limits.max_body_bytes`.",
    "415": "The Content-Type is not application/json.",
    "429": "More than the caller may ask for, or than can wait here. `Retry-After` says when to come back.",
    "502": "The engine that worked on the request is gone. `Retry-After` says when to come back.",
    "503": "No replica can answer now. `Retry-After` says when to come back.",
}
OF_AN_ANSWER = tuple(REFUSALS)
OF_A_PAGE = {
    "/v1/models": ("401", "403"),
    "/v1/models/{model}": ("401", "403", "404"),
    "/drafting": ("401", "403", "503"),
    "/metrics": ("403", "503"),
}

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string", "description": "OpenAI's; below /v1/messages Anthropic's."},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
DRAFTING = {
    "type": ["object", "null"],
    "properties": {
        "k": {"type": ["integer", "null"], "minimum": 0, "description": "Drafts to verify in a step."},
        "workload": {"type": ["string", "null"], "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$"},
    },
    "additionalProperties": False,
}
DRAFTED = {
    "type": "object",
    "required": ["workload", "k", "max_k", "source", "num_steps", "num_draft_tokens", "num_accepted_tokens"],
    "description": "What was decided for the request, and what came of its drafts.",
}


def document(
    app: FastAPI,
    bodies: Mapping[str, Mapping[type[BaseModel], type[BaseModel]]],
    unused: Mapping[type[BaseModel], Collection[str]],
) -> dict[str, Any]:
    """The document of `app`.

    Args:
        bodies: the records that a path takes, each with that of its answer.
        unused: further fields of a record that makes text, which are taken and change nothing.
    """
    with warnings.catch_warnings(action="ignore"):  # of a route with two methods, whose ids are made below
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    answers = {body: answer for records in bodies.values() for body, answer in records.items()}
    outputs = [(body, "serialization") for body in dict.fromkeys(answers.values())]
    inputs = [(body, "validation") for body in answers]
    refs, defined = models_json_schema([*inputs, *outputs], ref_template=REF)  # type: ignore[list-item]
    schemas = {"Error": ERROR, **defined["$defs"]}
    for record in (*inputs, *outputs):
        schema = schemas[refs[record]["$ref"].rpartition("/")[2]]  # type: ignore[index]
        for name, field in schema["properties"].items():
            if name not in schema.get("required", ()):  # what may be left out may be null as well
                schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}
        if record in inputs:
            if record[0] in unused:
                schema["properties"] |= {"drafting": DRAFTING, **{name: {} for name in unused[record[0]]}}
            schema["additionalProperties"] = False
        elif record[0] in map(answers.get, unused):
            schema["properties"] |= {"drafting": DRAFTED}
    ref = {record: schema for (record, _), schema in refs.items()}
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            operation["operationId"] = f"{method} {path}"
            operation["responses"].pop("422", None)  # FastAPI's own, which no path of ours gives
            operation["responses"] |= {
                status: {"description": REFUSALS[status], "content": _json({"$ref": REF.format(model="Error")})}
                for status in (OF_AN_ANSWER if path in bodies else OF_A_PAGE.get(path, ("503",)))
            }
            if path in bodies:
                operation["summary"] = " or ".join(body.__name__ for body in bodies[path])
                operation["requestBody"] = {
                    "required": True,
                    "content": _json({"anyOf": [ref[body] for body in bodies[path]]}),
                }
                whole = _json({"anyOf": [ref[answers[body]] for body in bodies[path]]})
                # Open API before 3.2 cannot say what each event is: a schema may be taken for the whole or for one.
                if unused.keys() & bodies[path]:
                    whole["text/event-stream"] = {}
                operation["responses"]["200"]["content"] = whole
    found["components"] = {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    found["security"] = [{}, {"key": []}]
    return found


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
