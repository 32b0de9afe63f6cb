"""Requests over HTTP to servers that are not trusted.

One deadline holds for a whole exchange, at most so many bytes are read, nothing is unpacked, redirections are not
followed and cookies not kept. Imported where it is needed: it brings asyncio.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any
from urllib.parse import urlsplit

from agent_r1_tools.event_loop import event_loop

Answer = tuple[int, str, bytes]
"""The status, the content's coding ("identity": none), and the content, of which there may be more."""
ERROR_BYTES = 32_000
"""The most that is read of an answer that is an error, or is encoded."""


MAX_CHUNKS = 65_536
"""The most pieces of an answer: each costs time, however small it is. 64 MiB in TCP packets have 46,000."""


class ExchangeError(ConnectionError):
    """A request that got no answer."""


class Exchange:
    """A client for one server. It is safe in threads. A fork gets its own connections.

    Args:
        seconds: what one exchange may take, from connecting to the last byte.
        headers: further ones, of every request.
        connect_seconds: what connecting may take of it; None: all.
        trust_env: use the proxies that the process's environment names.

    Raises: ImportError without httpx; it names the extra.
    """

    def __init__(
        self,
        seconds: float,
        headers: Mapping[str, str] | None = None,
        *,
        connect_seconds: float | None = None,
        trust_env: bool = True,
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ImportError('asking a server needs httpx: pip install "agent-r1[http]"') from error
        self._httpx = httpx
        self._seconds, self._connect_seconds, self._trust_env = seconds, connect_seconds, trust_env
        self.headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **(headers or {})}
        self._clients: dict[int, Any] = {}  # by process
        weakref.finalize(self, _close, self._clients).atexit = False  # for who forgets to close

    def post(self, url: str, body: bytes, most: int) -> Answer:
        """Send a body of JSON; see `send`."""
        return self.send("POST", url, body, most)

    def send(self, method: str, url: str, body: bytes, most: int, seconds: float | None = None) -> Answer:
        """Make a request. Of a longer answer, return a little more than `most` bytes. Of an error, a status outside
        200 to 299 or a coding that was not requested, return at most a little more than `ERROR_BYTES`.

        Args:
            seconds: a deadline for this request instead of the general one.

        Raises: ExchangeError.
        """
        future = self.start(method, url, body, most, seconds)
        try:
            return future.result()
        except TimeoutError:
            raise ExchangeError(f"ReadTimeout: no whole answer within {seconds or self._seconds:g} seconds") from None
        except ExchangeError:
            raise
        except (self._httpx.HTTPError, OSError, UnicodeError) as error:  # the last: a name that DNS cannot have
            raise ExchangeError(f"{type(error).__name__} {error}".strip()) from error
        finally:
            future.cancel()  # where the caller was interrupted

    def start(self, method: str, url: str, body: bytes, most: int, seconds: float | None = None) -> Future[Answer]:
        """Begin a request as `send` makes it, and do not wait for its answer."""
        return asyncio.run_coroutine_threadsafe(self._send(method, url, body, most, seconds), event_loop("exchange"))

    async def _send(self, method: str, url: str, body: bytes, most: int, seconds: float | None) -> Answer:
        # httpx's own limits hold for single reads, each of which may bring a byte.
        async with (
            asyncio.timeout(seconds or self._seconds),
            self._client().stream(method, url, content=body, headers=self.headers) as response,
        ):
            coding = response.headers.get("Content-Encoding", "identity").lower()
            if not 200 <= response.status_code < 300 or coding != "identity":
                most = min(most, ERROR_BYTES)
            data, chunks = bytearray(), 0
            async for chunk in response.aiter_raw():
                data += chunk
                chunks += 1
                if len(data) > most:
                    break
                if chunks > MAX_CHUNKS:
                    raise ExchangeError(f"the answer has {len(data)} bytes in more than {MAX_CHUNKS} chunks")
            return response.status_code, coding, bytes(data)

    def _client(self) -> Any:
        """Return this process's client. Call it in the loop's thread only."""
        client = self._clients.get(os.getpid())
        if client is None:
            cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
            timeout = self._httpx.Timeout(self._seconds, connect=self._connect_seconds or self._seconds)
            client = self._httpx.AsyncClient(timeout=timeout, cookies=cookies, trust_env=self._trust_env)
            self._clients[os.getpid()] = client
        return client

    def close(self) -> None:
        """Close the connections."""
        closing = _close(self._clients)
        if closing is not None:
            closing.result()


def _close(clients: dict[int, Any]) -> Future[None] | None:
    """Begin to close this process's connections, if it has any."""
    client = clients.pop(os.getpid(), None)
    return None if client is None else asyncio.run_coroutine_threadsafe(client.aclose(), event_loop("exchange"))


def send_at_exit(method: str, requests: Iterable[tuple[str, Mapping[str, str]]], seconds: float) -> None:
    """Send requests at the end of a program, where Python starts no thread any more. Nothing is raised.

    They are sent at the same time. Of an answer, the status and the headers are read.

    Args:
        requests: an address and its headers for each of them.
        seconds: what all of them together may take.
    """
    import httpx

    async def send_all() -> None:
        async with asyncio.timeout(seconds), httpx.AsyncClient(timeout=seconds, trust_env=False) as client:

            async def send(url: str, headers: Mapping[str, str]) -> None:
                with suppress(httpx.HTTPError, OSError, UnicodeError):
                    async with client.stream(method, url, headers=headers):
                        pass  # closing the connection drops the body

            await asyncio.gather(*(send(*request) for request in requests))

    with suppress(TimeoutError), asyncio.Runner(loop_factory=lambda: _LoopWithoutThreads(seconds)) as runner:
        runner.run(send_all())


class _LoopWithoutThreads(asyncio.SelectorEventLoop):
    """An event loop that looks up the names of hosts itself, for so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._end = self.time() + seconds

    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> Any:
        if self.time() > self._end:  # a look-up blocks the loop, and its timeouts
            raise TimeoutError
        return socket.getaddrinfo(*args, **kwargs)


def is_address(url: str) -> bool:
    """Return True for the address of a server, such as "http://127.0.0.1:8000"."""
    try:
        parts = urlsplit(url)
        url.encode()
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0  # a wrong port raises
    except ValueError:
        return False
