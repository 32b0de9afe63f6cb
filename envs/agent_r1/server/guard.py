"""The checks before every request: who asks, and how large the body is."""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException

from agent_r1.remote import TOKEN_VARIABLE
from agent_r1_tools.http_limits import Bodies

MAX_BODY_BYTES = 4 * 1024 * 1024


class Guard:
    """The checks before every request of an application: who asks, and how large the body is.

    Args:
        app: an ASGI application.
        token: what a client must send as `Authorization: Bearer TOKEN`. None: the client must name a loopback host, and
            must not be a page in a browser, which sends its origin or its site.
    """

    def __init__(self, app: Any, token: str | None) -> None:
        self._app, self._token = app, token
        self._bodies = Bodies(MAX_BODY_BYTES)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if problem := self._refusal(headers):
            await self._refuse(scope, send, *problem)
        elif scope["type"] == "websocket":
            await self._app(scope, receive, send)
        else:
            await self._with_body(scope, receive, send)

    def _refusal(self, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        if self._token is not None:
            given = headers.get(b"authorization", b"")
            right = hmac.compare_digest(given, b"Bearer " + self._token.encode())
            return None if right else (401, f"wrong or missing token: send Authorization: Bearer ${TOKEN_VARIABLE}")
        if b"origin" in headers or headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            return 403, "pages in browsers are not served without a token"
        if not is_loopback(headers.get(b"host", b"").decode("latin-1")):
            return 403, "without a token only this machine is served: ask for 127.0.0.1"
        return None

    async def _refuse(self, scope: Any, send: Any, status: int, problem: str) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": problem})
            return
        body = json.dumps({"detail": problem}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
        await send({"type": "http.response.body", "body": body})

    async def _with_body(self, scope: Any, receive: Any, send: Any) -> None:
        """Read the whole body within its limits, then let the application answer."""
        try:
            data = await self._bodies.read(receive)
        except HTTPException as error:
            await self._refuse(scope, send, error.status_code, error.detail)
            return
        read = False

        async def receive_again() -> Any:
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": data, "more_body": False}

        try:
            await self._app(scope, receive_again, send)
        finally:
            self._bodies.free(data)


def is_loopback(host: str) -> bool:
    """Return whether a host, with or without port, is this machine itself, by name or address."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
