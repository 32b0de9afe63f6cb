"""Limits of our HTTP servers on connections: those without a request, and those whose client takes no answer."""

from __future__ import annotations

from typing import Any

try:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol
except ImportError as error:
    raise ImportError(f'{error}: our servers need pip install "agent-r1[server]"') from error

HEADER_SECONDS = 10.0
"""The time that a connection may be open without a request; at most twice this."""
ANSWER_SECONDS = 600.0
"""The time in which an answer must be found."""
TAKE_SECONDS = 30.0
"""The time in which a client must take an answer; at most `HEADER_SECONDS` more."""


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
