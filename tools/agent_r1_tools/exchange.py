"""Requests over HTTP to servers that are not trusted.

One deadline holds for a whole exchange, at most so many bytes are read, nothing is unpacked, redirections are not
followed and cookies not kept. Imported where it is needed: it brings asyncio.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any
from urllib.parse import urlsplit

from agent_r1_tools.event_loop import event_loop

Answer = tuple[int, str, bytes]
"""The status, the content's coding ("identity": none), and the content, of which there may be more."""


class ExchangeError(ConnectionError):
    """A request that got no answer."""


class Exchange:
    """A client for one server. It is safe in threads. A fork gets its own connections.

    Args:
        seconds: what one exchange may take, from connecting to the last byte.
        headers: further ones, of every request.

    Raises: ImportError without httpx; it names the extra.
    """

    def __init__(self, seconds: float, headers: Mapping[str, str] | None = None) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ImportError('asking a server needs httpx: pip install "agent-r1[http]"') from error
        self._httpx = httpx
        self._seconds = seconds
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **(headers or {})}
        self._clients: dict[int, Any] = {}  # by process
        weakref.finalize(self, _close, self._clients).atexit = False  # for who forgets to close

    def post(self, url: str, body: bytes, most: int) -> Answer:
        """Send a body of JSON. Of a longer answer, return a little more than `most` bytes. Of an error, a status other
        than 200 or a coding that was not requested, return a few thousand.

        Raises: ExchangeError.
        """
        future = asyncio.run_coroutine_threadsafe(self._post(url, body, most), event_loop("exchange"))
        try:
            return future.result()
        except TimeoutError:
            raise ExchangeError(f"ReadTimeout: no whole answer within {self._seconds:g} seconds") from None
        except (self._httpx.HTTPError, OSError, UnicodeError) as error:  # the last: a name that DNS cannot have
            raise ExchangeError(f"{type(error).__name__} {error}".strip()) from error
        finally:
            future.cancel()  # where the caller was interrupted

    async def _post(self, url: str, body: bytes, most: int) -> Answer:
        # httpx's own limits hold for single reads, each of which may bring a byte.
        async with (
            asyncio.timeout(self._seconds),
            self._client().stream("POST", url, content=body, headers=self._headers) as response,
        ):
            coding = response.headers.get("Content-Encoding", "identity").lower()
            if response.status_code != 200 or coding != "identity":
                most = 4_000
            data = bytearray()
            async for chunk in response.aiter_raw():
                data += chunk
                if len(data) > most:
                    break
            return response.status_code, coding, bytes(data)

    def _client(self) -> Any:
        """Return this process's client. Call it in the loop's thread only."""
        client = self._clients.get(os.getpid())
        if client is None:
            cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
            client = self._clients[os.getpid()] = self._httpx.AsyncClient(timeout=self._seconds, cookies=cookies)
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


def is_address(url: str) -> bool:
    """Return True for the address of a server, such as "http://127.0.0.1:8000"."""
    try:
        parts = urlsplit(url)
        url.encode()
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0  # a wrong port raises
    except ValueError:
        return False
