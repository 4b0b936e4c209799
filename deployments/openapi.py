"""The OpenAPI document of the HTTP API: what GET /openapi.json says. FastAPI makes it of vLLM's records."""

import functools
import json
import operator
import warnings
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field, create_model

from deployments.body import BODIES, UNUSED_FIELDS, name_keys

Tag = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$")]


class AskedDrafting(BaseModel, extra="forbid"):
    """K and workload that a request may choose."""

    k: Annotated[int, Field(ge=0, description="Drafts to verify in a step.")] | None = None
    workload: Tag | None = None


class ErrorFields(BaseModel):
    message: str
    type: str = Field(description="OpenAI's; below /v1/messages Anthropic's.")
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorFields


Drafted = Annotated[dict[str, Any], Field(description="What was decided for the request, and what came of its drafts.")]
REFUSALS: Any = {
    "4XX": {"model": Error, "description": "The request is refused: `param` names the field, where one is to blame."},
    "5XX": {"model": Error, "description": "No answer now. `Retry-After`, if there is one, says when to come back."},
}

UNUSED: dict[type[BaseModel], Collection[str]] = {BODIES[call]: fields for call, fields in UNUSED_FIELDS.items()}


def document(app: FastAPI, bodies: Mapping[str, Mapping[type[BaseModel], type[BaseModel]]]) -> dict[str, Any]:
    """The document of `app`. `bodies`: the records that a path takes, each with that of its answer."""
    key = Security(HTTPBearer(auto_error=False, scheme_name="key"))
    shown = FastAPI(title=app.title, version=app.version, responses=REFUSALS, dependencies=[key])

    @functools.cache
    def taken(record: type[BaseModel]) -> Any:
        if record not in UNUSED:
            return record
        further: Any = {"drafting": (AskedDrafting | None, None), **dict.fromkeys(UNUSED[record], (Any, None))}
        return create_model(record.__name__, __base__=record, __cls_kwargs__={"extra": "forbid"}, **further)

    @functools.cache
    def given(answer: type[BaseModel]) -> Any:
        return create_model(answer.__name__, __base__=answer, drafting=(Drafted, ...))

    for path, records in bodies.items():

        def ask(body: Any) -> None: ...

        ask.__annotations__["body"] = functools.reduce(operator.or_, map(taken, records))
        answers: Any = list(records.values())
        made: dict[str, Any] = {"name": " or ".join(record.__name__ for record in records)}
        if UNUSED.keys() & records.keys():
            answers = map(given, answers)
            made["responses"] = {200: {"content": {"text/event-stream": {}}}}  # version 3.1 cannot say what an event is
        shown.post(path, response_model=functools.reduce(operator.or_, answers), **made)(ask)
    shown.router.routes += [route for route in app.routes if getattr(route, "path", "") not in bodies]
    with warnings.catch_warnings(action="ignore"):  # of a route with two methods
        return dict(json.loads(name_keys(json.dumps(shown.openapi()))))
