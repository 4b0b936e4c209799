"""How bodies and answers flow over HTTP, in a replica and in a gateway. Imports no vLLM."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from deployments.errors import ApiError

T = TypeVar("T")

BODY_TIMEOUT_S = 120.0


class EventStream(StreamingResponse):
    """Ends its source with the response, and closes `until_sent`. A source that is left to the garbage collector goes
    on for a while, and with it the request in the engine."""

    def __init__(self, source: AsyncIterator[str] | AsyncIterator[bytes], until_sent: contextlib.ExitStack) -> None:
        super().__init__(source, media_type="text/event-stream")
        self._until_sent = until_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        source: Any = self.body_iterator
        with self._until_sent:
            async with contextlib.aclosing(source):
                await super().__call__(scope, receive, send)


async def read_body(request: Request, hold: Callable[[int], None], max_bytes: int) -> bytes:
    """The body, of which no more is read than may be sent. `hold` is told of each part (`BodyBudget.hold_body`)."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                hold(len(part))
                parts.append(part)
                size += len(part)
                if size > max_bytes:
                    break
    except TimeoutError as error:
        text = f"The request body was not complete after {BODY_TIMEOUT_S:.0f} s, with {size} bytes of it."
        raise ApiError(408, text, code="timeout") from error
    except ClientDisconnect as error:
        raise ApiError(499, "the client has gone") from error
    return b"".join(parts)


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away first: the engine then drops the request."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has gone")
        return task.result()
    finally:
        for unfinished in (task, gone):
            unfinished.cancel()
            # vLLM answers a cancelled request with an error, which nobody waits for any more.
            unfinished.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
