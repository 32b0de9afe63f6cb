"""Sampling from any endpoint that speaks OpenAI's chat completions. It serves evaluation only: there are no weights to
update, and the sampled text has no token ids."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
from tqdm import tqdm

from agent_r1_tools.text import printable
from llm_utils.sampling.engine import EngineDied, Span
from llm_utils.sampling.vllm_replies import Body, member, parse

Array = np.ndarray
REPLY_BYTES, REPLY_SECONDS = 2**24, 600.0  # limits of one reply
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0)  # seconds before each retry
BUSY = {408, 409, 425, 429, 500, 502, 503, 504}  # temporary statuses
REMEDIES = {
    **dict.fromkeys((401, 403), "check the key in OPENAI_API_KEY"),
    404: "check --api, the address up to /v1, and --api-model",
}
TOO_LONG = ("context_length_exceeded", "context length", "context window")  # words of servers' errors


class ChatEngine:
    """An engine that takes its spans from the replies of a chat API, written in the environment's dialect.

    An episode's slot is its index in `envs`. Every turn is a request with the whole conversation, in its own thread.
    The key comes from the environment variable OPENAI_API_KEY.
    """

    overlaps = True

    def __init__(
        self, url: str, model: str, envs: Any, temperature: float | None = None, top_p: float | None = None
    ) -> None:
        """Connect to `url`, the part before /chat/completions. `envs` is the `ToolVectorEnv` of the episodes.

        `temperature` and `top_p` are always sent, even 1: a server fills missing values with its own defaults, often
        from the model's folder. None means the server's default.
        """
        self.url, self.envs = url.rstrip("/") + "/chat/completions", envs
        sampling = {"temperature": temperature, "top_p": top_p}
        self.body: dict[str, Any] = {"model": model} | {k: v for k, v in sampling.items() if v is not None}
        self.limit = "max_tokens"  # newer endpoints use another name
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.Client(timeout=httpx.Timeout(REPLY_SECONDS, connect=10), headers=headers, limits=limits)
        self.replies: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.warned = self.reached = False  # reached: a request has connected
        self.rooms: dict[int, int] = {}  # slot -> token limit of the span being sampled

    def feed(
        self, slot: int, tokens: Array, max_new_tokens: int, stop_token_ids: Sequence[int], seed: Any = None
    ) -> None:
        """Request the next turn of the episode in this slot. The API reads its conversation."""
        env = self.envs.envs[slot]
        body = self.body | {"messages": env.messages} | ({"tools": env.schemas} if env.schemas else {})
        self.rooms[slot] = room = int(max_new_tokens)
        threading.Thread(target=self._ask, args=(slot, body, room), daemon=True).start()

    def _ask(self, slot: int, body: dict[str, Any], room: int) -> None:
        try:
            self.replies.put((slot, self._reply(body, room)))
        except Exception as error:  # raised by `step`
            self.replies.put((slot, error))

    def _reply(self, body: dict[str, Any], room: int) -> dict[str, Any]:
        """Return the API's message. Raise EngineDied if it rejects the request, or sends no reply for minutes.

        A connection that fails before any other has worked is not retried: the address is wrong, or nobody listens. Nor
        is a reply that is not HTTP, before any that is.
        """
        cause = ""
        for pause in (0.0, *PAUSES):
            if cause and not self.warned:  # once, so that a wrong address does not look like a slow model
                self.warned = True
                tqdm.write(f"{self.url} {cause}; retrying for {sum(PAUSES):.0f} s", file=sys.stderr)
            time.sleep(pause)
            limit = self.limit
            try:
                status, content = self._post(body | {limit: room})
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                if isinstance(error, httpx.ConnectError) and not self.reached:
                    raise EngineDied(
                        f"{self.url} cannot be reached ({error}): start its server, or correct --api"
                    ) from error
                cause = f"does not answer: {error!r}"
                if isinstance(error, httpx.RemoteProtocolError) and not self.reached:
                    raise EngineDied(
                        f"{self.url} does not answer as HTTP ({printable(str(error))}): correct --api"
                    ) from error
                continue
            if status == 200:
                return _message(self.url, content)
            text = content[:2000].decode(errors="replace")
            if status == 400 and "max_completion_tokens" in text and limit == "max_tokens":
                self.limit = "max_completion_tokens"
                return self._reply(body, room)
            if status in (400, 413) and any(words in text.lower() for words in (*TOO_LONG, "content_filter")):
                return {"content": ""}  # a turn without action, until the turns run out
            cause = f"answers with {status}: {printable(' '.join(text[:500].split()))}"
            cause += f"; {REMEDIES[status]}" if status in REMEDIES else ""
            if status not in BUSY:
                break
        raise EngineDied(f"{self.url} {cause}")

    def _post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        read = Body(REPLY_BYTES, REPLY_SECONDS)
        with self.http.stream("POST", self.url, json=body) as answer:
            self.reached = True
            for chunk in answer.iter_raw():
                read.add(chunk)
            return answer.status_code, read.content

    def step(self) -> list[Span]:
        """Return the turns that have arrived. Wait up to 50 ms if there are none."""
        spans: list[Span] = []
        try:
            while self.rooms:
                slot, reply = self.replies.get(timeout=0.0 if spans else 0.05)
                room = self.rooms.pop(slot)
                if isinstance(reply, Exception):
                    raise reply
                tokens = self._encode(slot, reply)[:room]
                spans.append(Span(slot, tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32)))
        except queue.Empty:
            pass
        return spans

    def _encode(self, slot: int, reply: Any) -> Array:
        try:
            return self.envs.envs[slot].encode_reply(reply)
        except TypeError as error:
            raise EngineDied(f"{self.url}: {error}") from None

    @property
    def busy(self) -> bool:
        """Return True while a reply is awaited."""
        return bool(self.rooms)

    def release(self) -> None:
        """Forget the conversations, which belong to the environments."""
        self.rooms = {}

    def close(self) -> None:
        """Close the connections."""
        self.http.close()


def _message(url: str, content: bytes) -> dict[str, Any]:
    try:
        choices = member(parse(content), "choices", list)
        return member(choices[0] if choices else None, "message", dict)
    except ValueError as error:
        raise EngineDied(f"{url} sent an unreadable reply: {error}") from None
