"""Limits of our HTTP servers: connections without a request, answers that no client takes, and bodies of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

try:
    from fastapi import HTTPException
    from pydantic import BaseModel, ValidationError
    from uvicorn.protocols.http.auto import AutoHTTPProtocol
except ImportError as error:
    raise ImportError(f'{error}: our servers need pip install "agent-r1[server]"') from error

HEADER_SECONDS = 10.0
"""The time that a connection may be open without a request; at most twice this."""
ANSWER_SECONDS = 600.0
"""The time in which an answer must be found."""
TAKE_SECONDS = 30.0
"""The time in which a client must take an answer; at most `HEADER_SECONDS` more."""
BODY_SECONDS = 30.0
"""The time in which a body must arrive."""
MAX_HELD_BYTES = 64 * 1024 * 1024
"""The maximum of all bodies that a server holds at the same time."""

Form = TypeVar("Form", bound=BaseModel)


class Impatient(AutoHTTPProtocol):
    """A protocol that checks every connection from time to time. uvicorn itself waits forever for a connection's first
    request, for the rest of its headers, and for a client that takes its answer."""

    _gone = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look((), 0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True
        super().connection_lost(exc)

    def _look(self, before: tuple[Any, ...], times: int) -> None:
        """Check again that the client makes progress; nothing has changed since `before`, seen `times` in a row."""
        if self._gone or self.transport.get_protocol() is not self:  # a WebSocket has its own protocol
            return
        idle = self.cycle is None or self.cycle.response_complete
        untaken = self.transport.get_write_buffer_size() > 0
        now = (self.cycle, idle, untaken)
        times = times + 1 if now == before else 0
        if times * HEADER_SECONDS >= (TAKE_SECONDS if untaken else ANSWER_SECONDS):
            self.transport.abort()
        elif times and idle:
            self.transport.close()  # once all is sent
        self.loop.call_later(HEADER_SECONDS, self._look, now, times)


class Bodies:
    """Bodies of requests that a server holds: each has at most `max_bytes`, and all together `MAX_HELD_BYTES`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.held = max_bytes, 0

    async def read(self, receive: Callable[[], Awaitable[Any]]) -> bytes:
        """Return the body of an ASGI request. It is held until `free`.

        Raises HTTPException: 413 if it is too large, 429 if there is no room, 408 if it does not arrive, 499 if the
        client leaves.
        """
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise HTTPException(499, "the client has gone")
                    data += message.get("body", b"")
                    self.held += len(message.get("body", b""))
                    if len(data) > self.max_bytes:
                        raise _refusal(413, f"the body is larger than {self.max_bytes} bytes; send less in a request")
                    if self.held > MAX_HELD_BYTES:
                        raise _refusal(429, f"all bodies are larger than {MAX_HELD_BYTES} bytes; try again later")
                    if not message.get("more_body"):
                        return bytes(data)
        except BaseException as error:
            self.held -= len(data)
            if not isinstance(error, TimeoutError):
                raise
        raise _refusal(408, f"the body did not arrive within {BODY_SECONDS:g} seconds")

    def free(self, data: bytes) -> None:
        """Stop holding a body."""
        self.held -= len(data)


def read_form(form: type[Form], data: bytes) -> Form:
    """Read a body, which is JSON. Raises HTTPException 422 with its first five problems."""
    try:
        return form.model_validate_json(data)
    except RecursionError:
        raise HTTPException(422, "the body is nested too deeply") from None
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)[:5]
        raise HTTPException(422, [_short(dict(problem)) for problem in found]) from None


def _short(problem: dict[str, Any]) -> dict[str, Any]:
    """Cut the names and texts that come from the client."""
    place = [part[:100] if isinstance(part, str) else part for part in problem["loc"][:10]]
    return {"type": problem["type"], "loc": place, "msg": problem["msg"][:300]}


def _refusal(status: int, problem: str) -> HTTPException:
    return HTTPException(status, problem, {"Connection": "close"})  # the rest of the body is not read
