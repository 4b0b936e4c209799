"""How bodies and answers flow over HTTP, in a replica and in a gateway. Imports no vLLM."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.errors import ApiError

BODY_TIMEOUT_S = 120.0
SEND_TIMEOUT_S = 60.0
"""For one piece of a stream to go out, when the buffers on the way to the client are full."""


class EventStream(StreamingResponse):
    """Ends its source with the response, or when its client all but stops reading, and closes `until_sent`, which has
    entered `until_disconnected`. A source that is left to the garbage collector goes on for a while, and with it the
    request in the engine."""

    def __init__(
        self, source: AsyncIterator[str] | AsyncIterator[bytes], until_sent: contextlib.AsyncExitStack
    ) -> None:
        super().__init__(source, media_type="text/event-stream")
        self._until_sent = until_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        source: Any = self.body_iterator

        async def send_in_time(message: Any) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        with contextlib.suppress(ApiError, TimeoutError):  # the client has gone, or reads no more
            async with self._until_sent, contextlib.aclosing(source):
                await self.stream_response(send_in_time)


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


@contextlib.asynccontextmanager
async def until_disconnected(request: Request) -> AsyncIterator[None]:
    """Cancels what runs inside when the client goes away: the engine then drops the request. Raises ApiError (499)."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        limit.reschedule(0.0)

    try:
        async with asyncio.timeout(None) as limit:
            task = asyncio.create_task(watch())
            try:
                yield
            finally:
                task.cancel()
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise ApiError(499, "the client has gone") from error
